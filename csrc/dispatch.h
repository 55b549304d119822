// Which instruction set the kernels run with: chosen at run time, the same bits whichever is chosen.
#pragma once

namespace kvstrata {

// avx512bf16 is avx512 with products of bf16, which attention has kernels for.
enum class Isa : int { portable, avx2, avx512, avx512bf16 };

// Whether this machine can run `isa` (and this build holds code for it).
bool isa_supported(Isa isa);

// The widest that is supported, unless select_isa chose another.
Isa current_isa();

void select_isa(Isa isa);

// The member of a family of kernel tables that fits the current instruction set. Off x86-64 only the
// portable tables exist, so callers name the others through KVSTRATA_X86.
template <class Table>
const Table& pick(const Table& portable, const Table& avx2, const Table& avx512) {
  switch (current_isa()) {
    case Isa::avx512bf16:
    case Isa::avx512:
      return avx512;
    case Isa::avx2:
      return avx2;
    default:
      return portable;
  }
}

}  // namespace kvstrata

#if defined(__x86_64__)
#define KVSTRATA_X86 1
// The table `name` of namespaces portable, avx2 and avx512 for the current instruction set.
#define KVSTRATA_PICK(name) \
  ::kvstrata::pick(::kvstrata::portable::name, ::kvstrata::avx2::name, ::kvstrata::avx512::name)
#else
#define KVSTRATA_X86 0
#define KVSTRATA_PICK(name) \
  ::kvstrata::pick(::kvstrata::portable::name, ::kvstrata::portable::name, ::kvstrata::portable::name)
#endif
