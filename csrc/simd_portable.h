// F16 as sixteen scalars: any compiler, any machine, the same bits. Included by simd.h only.
#pragma once

struct F16 {
  float v[16];
};

inline F16 set1(float x) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = x;
  return r;
}
inline F16 zero() { return set1(0.0f); }
inline F16 load_first(const float* p, int n) {
  F16 r = zero();
  memcpy(r.v, p, sizeof(float) * static_cast<size_t>(n));
  return r;
}
inline void store_first(float* p, F16 a, int n) { memcpy(p, a.v, sizeof(float) * static_cast<size_t>(n)); }
inline F16 load(const float* p) { return load_first(p, 16); }
inline void store(float* p, F16 a) { store_first(p, a, 16); }

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// IEEE binary16 both ways, to nearest even, subnormals kept, NaN payloads cut and made quiet as F16C does.
inline float from_fp16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 31u;
  const uint32_t mantissa = h & 0x3ffu;
  if (exponent == 31) return float_of(sign | 0x7f800000u | (mantissa != 0 ? 0x400000u | mantissa << 13 : 0u));
  if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
  return float_of(sign | bits_of(magnitude));
}
inline uint16_t to_fp16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  } else if (magnitude >= 0x47800000u) {
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: let a float addition round to a multiple of 2^-24
    half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}
inline uint16_t to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if (x != x) return 0x7fc0u;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline F16 load(const Bf16* p) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = float_of(static_cast<uint32_t>(p[i].bits) << 16);
  return r;
}
// The even and the odd ones of 32 elements.
inline F16 load_even(const Bf16* p) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = float_of(static_cast<uint32_t>(p[2 * i].bits) << 16);
  return r;
}
inline F16 load_odd(const Bf16* p) { return load_even(p + 1); }
inline F16 load(const Fp16* p) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = from_fp16(p[i].bits);
  return r;
}
inline F16 load(const Int8* p) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = static_cast<float>(p[i].code);
  return r;
}
inline F16 load(const Fp8* p) {
  F16 r;
  for (int i = 0; i < 16; ++i) {
    const uint32_t magnitude = p[i].bits & 0x7fu;
    const uint32_t half = magnitude == 0x7fu ? 0x7e00u : magnitude << 7;
    r.v[i] = from_fp16(static_cast<uint16_t>(half | static_cast<uint32_t>(p[i].bits >> 7) << 15));
  }
  return r;
}
inline F16 load(const ScaleAndZero* p) {
  F16 r;
  for (int i = 0; i < 16; i += 2) {
    const float scale = float_of(static_cast<uint32_t>(p[i].bits) << 20) * ScaleAndZero::kTwoTo108;
    r.v[i] = p[i].bits == 0xff ? NAN : scale;
    r.v[i + 1] = r.v[i] * static_cast<float>(static_cast<int8_t>(p[i + 1].bits));
  }
  return r;
}
// fma(code, scale, minimum) of the low or the high nibbles of 16 bytes.
inline F16 nibbles(const uint8_t* p, bool high, float scale, float minimum) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = fmaf(static_cast<float>(high ? p[i] >> 4 : p[i] & 15), scale, minimum);
  return r;
}
inline void store(Bf16* p, F16 a) {
  for (int i = 0; i < 16; ++i) p[i].bits = to_bf16(a.v[i]);
}
inline void store(Fp16* p, F16 a) {
  for (int i = 0; i < 16; ++i) p[i].bits = to_fp16(a.v[i]);
}

inline F16 operator+(F16 a, F16 b) {
  for (int i = 0; i < 16; ++i) a.v[i] += b.v[i];
  return a;
}
inline F16 operator-(F16 a, F16 b) {
  for (int i = 0; i < 16; ++i) a.v[i] -= b.v[i];
  return a;
}
inline F16 operator*(F16 a, F16 b) {
  for (int i = 0; i < 16; ++i) a.v[i] *= b.v[i];
  return a;
}
inline F16 operator/(F16 a, F16 b) {
  for (int i = 0; i < 16; ++i) a.v[i] /= b.v[i];
  return a;
}
inline F16 fma(F16 a, F16 b, F16 c) {
  for (int i = 0; i < 16; ++i) c.v[i] = fmaf(a.v[i], b.v[i], c.v[i]);
  return c;
}
inline F16 max(F16 a, F16 b) {
  for (int i = 0; i < 16; ++i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline F16 min(F16 a, F16 b) {
  for (int i = 0; i < 16; ++i) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}

inline F16 select(uint32_t bits, F16 yes, F16 no) {
  for (int i = 0; i < 16; ++i) no.v[i] = bits >> i & 1u ? yes.v[i] : no.v[i];
  return no;
}
inline uint32_t greater(F16 a, F16 b) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) bits |= (a.v[i] > b.v[i] ? 1u : 0u) << i;
  return bits;
}

// a * 2^n, where n is the integer in the low bits of the float `biased` (see exp).
inline F16 scale_by_power(F16 a, F16 biased) {
  for (int i = 0; i < 16; ++i) a.v[i] = float_of(bits_of(a.v[i]) + (bits_of(biased.v[i]) << 23));
  return a;
}

template <class Op>
inline float tree(F16 a) {
  for (int step = 8; step > 0; step /= 2) {
    F16 shifted = a;
    for (int i = 0; i < step; ++i) shifted.v[i] = a.v[i + step];
    a = Op::of(a, shifted);
  }
  return a.v[0];
}

// One vector whose lane k is the tree over the lanes of u[k].
template <class Op>
inline F16 tree16(const F16* u) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = tree<Op>(u[i]);
  return r;
}

// Rows become columns, in place.
inline void transpose16(F16* m) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < i; ++j) {
      const float swapped = m[i].v[j];
      m[i].v[j] = m[j].v[i];
      m[j].v[i] = swapped;
    }
  }
}
