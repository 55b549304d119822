#include "dispatch.h"

#include <atomic>

namespace kvstrata {
namespace {

Isa widest() {
  if (isa_supported(Isa::avx512bf16)) return Isa::avx512bf16;
  if (isa_supported(Isa::avx512)) return Isa::avx512;
  if (isa_supported(Isa::avx2)) return Isa::avx2;
  return Isa::portable;
}

std::atomic<Isa>& selected() {
  static std::atomic<Isa> isa{widest()};
  return isa;
}

}  // namespace

bool isa_supported(Isa isa) {
  if (isa == Isa::portable) return true;
#if KVSTRATA_X86
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa == Isa::avx2) return avx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  return avx512 && (isa == Isa::avx512 || __builtin_cpu_supports("avx512bf16"));
#else
  return false;
#endif
}

Isa current_isa() { return selected().load(std::memory_order_relaxed); }

void select_isa(Isa isa) { selected().store(isa, std::memory_order_relaxed); }

}  // namespace kvstrata
