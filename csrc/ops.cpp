// The operators that speak of the extension itself. Those of a kernel are beside it (linear/ops.cpp, ...).
#include <torch/library.h>

#include <array>
#include <string>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "dispatch.h"

namespace kvstrata {
namespace {

constexpr std::array<const char*, 4> kNames = {"portable", "avx2", "avx512", "avx512bf16"};

std::string instruction_set() { return kNames[static_cast<size_t>(current_isa())]; }

// Not safe while another thread runs an operator: for start-up and for tests that compare instruction sets.
void use_instruction_set(const std::string& name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name != kNames[i]) continue;
    TORCH_CHECK_VALUE(isa_supported(static_cast<Isa>(i)), "instruction set ", name,
                      " is not supported by this machine or build");
    select_isa(static_cast<Isa>(i));
    return;
  }
  TORCH_CHECK_VALUE(false, "instruction set ", name, " is none of portable, avx2, avx512, avx512bf16");
}

// Activations of a prefill step are megabytes that come and go with each layer. glibc would give them back to the
// system each time and take new pages, zeroed one fault after another.
void keep_freed_memory() {
#if defined(__GLIBC__)
  constexpr int kMiB = 1 << 20;
  mallopt(M_MMAP_THRESHOLD, 32 * kMiB);
  mallopt(M_TRIM_THRESHOLD, 256 * kMiB);
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kvstrata, m) {
  m.def("keep_freed_memory() -> ()", keep_freed_memory);
  m.def("instruction_set() -> str", instruction_set);
  m.def("use_instruction_set(str name) -> ()", use_instruction_set);
}

}  // namespace kvstrata
