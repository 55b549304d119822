// F16, a vector of sixteen floats on AVX-512, AVX2 or plain scalars, with the same bits on each.
//
// A kernel is written once against F16 and compiled three times: a .cpp per instruction set includes
// isa_<name>.h (which names the namespace and the compiler target) and then the kernel's header. Nothing
// here may include a header whose inline functions another translation unit could share: the linker keeps
// one copy of those, and it could be the one compiled for the newer machine.
//
// What makes the bits equal: every operation is IEEE elementwise, fused multiply-adds are explicit (the
// build sets -ffp-contract=off), max and min return the second operand when one is NaN (as x86 does), and a
// sum over lanes is always the tree (l, l+8), (l, l+4), (l, l+2), (l, l+1).
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(KVSTRATA_ISA_AVX512) || defined(KVSTRATA_ISA_AVX2)
#include <immintrin.h>
#endif

#if defined(__GNUC__)
#define KVSTRATA_INLINE inline __attribute__((always_inline))
#define KVSTRATA_NOINLINE __attribute__((noinline))
#else
#define KVSTRATA_INLINE inline
#define KVSTRATA_NOINLINE
#endif

#ifndef KVSTRATA_ISA
#error "include isa_avx512.h, isa_avx2.h or isa_portable.h before simd.h"
#endif

namespace kvstrata {
namespace KVSTRATA_ISA {

// Storage types; a distinct type per format selects the conversion.
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};
struct Int8 {
  static constexpr float kUnit = 1.0f;
  int8_t code;
};
// e4m3, loaded as its value / kUnit: then binary16 with a shifted exponent holds it.
struct Fp8 {
  static constexpr float kUnit = 256.0f;
  uint8_t bits;
};
// A byte of an int4 pool's scales, which come in pairs: five bits of exponent and three of mantissa (255: NaN), and a
// zero in two's complement. Loaded as scale and zero * scale.
struct ScaleAndZero {
  static constexpr float kTwoTo108 = 3.2451855365842673e32f;  // from a float's bias of exponent, 127, to 19
  uint8_t bits;
};

#if defined(KVSTRATA_ISA_AVX512)
#include "simd_avx512.h"
#elif defined(KVSTRATA_ISA_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

struct Sum {
  static inline F16 of(F16 a, F16 b) { return a + b; }
};
struct Max {
  static inline F16 of(F16 a, F16 b) { return max(a, b); }
};

inline float tree_sum(F16 a) { return tree<Sum>(a); }
inline float tree_max(F16 a) { return tree<Max>(a); }

// e^x within 3 ulp for -87 <= x <= 88; 0 below, x is not above, NaN stays NaN, exactly 1 at 0.
// Cody-Waite reduction by ln 2 in two parts, then a degree 6 polynomial on [-ln2/2, ln2/2].
inline F16 exp_to_88(F16 x) {
  const F16 lowest = set1(-87.0f);
  const F16 rounder = set1(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const uint32_t vanished = greater(lowest, x);
  x = max(lowest, x);
  const F16 biased = fma(x, set1(1.44269504088896341f), rounder);
  const F16 n = biased - rounder;
  F16 r = fma(n, set1(-0.693145751953125f), x);
  r = fma(n, set1(-1.42860682030941723212e-6f), r);
  F16 p = set1(1.3888889e-3f);
  p = fma(p, r, set1(8.3333333e-3f));
  p = fma(p, r, set1(4.1666668e-2f));
  p = fma(p, r, set1(1.6666667e-1f));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return select(vanished, zero(), scale_by_power(p, biased));
}

// The same, and e^88 above.
inline F16 exp(F16 x) { return exp_to_88(min(set1(88.0f), x)); }

inline float exp_scalar(float x) {
  float lanes[16];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
