// F16 on two 256-bit registers (AVX2, FMA, F16C). Included by simd.h only.
#pragma once

struct F16 {
  __m256 lo;
  __m256 hi;
};

inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 set1(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}

// All ones in each of eight lanes whose bit is set.
inline __m256i lanes(uint32_t bits) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), bit), bit);
}
inline F16 load_first(const float* p, int n) {
  const uint32_t bits = (1u << n) - 1u;
  return {_mm256_maskload_ps(p, lanes(bits)), _mm256_maskload_ps(p + 8, lanes(bits >> 8))};
}
inline void store_first(float* p, F16 a, int n) {
  const uint32_t bits = (1u << n) - 1u;
  _mm256_maskstore_ps(p, lanes(bits), a.lo);
  _mm256_maskstore_ps(p + 8, lanes(bits >> 8), a.hi);
}

inline __m256 widen_bf16(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline F16 load(const Bf16* p) {
  const __m128i* h = reinterpret_cast<const __m128i*>(p);
  return {widen_bf16(_mm_loadu_si128(h)), widen_bf16(_mm_loadu_si128(h + 1))};
}
// The even and the odd ones of 32 elements.
inline F16 load_even(const Bf16* p) {
  const __m256i* h = reinterpret_cast<const __m256i*>(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(h), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(h + 1), 16))};
}
inline F16 load_odd(const Bf16* p) {
  const __m256i* h = reinterpret_cast<const __m256i*>(p);
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(h), high)),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(h + 1), high))};
}
inline F16 load(const Fp16* p) {
  const __m128i* h = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
}
inline F16 load(const Int8* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
}
inline F16 load(const Fp8* p) {
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_srli_epi16(wide, 7), 15);
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
  const __m256i finite = _mm256_slli_epi16(magnitude, 7);
  const __m256i half = _mm256_or_si256(_mm256_blendv_epi8(finite, _mm256_set1_epi16(0x7e00), nan), sign);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}
inline __m256 scales_and_zeros(__m128i p) {
  const __m256i bytes = _mm256_cvtepi8_epi32(p);
  const __m256 nan = _mm256_castsi256_ps(_mm256_cmpeq_epi32(bytes, _mm256_set1_epi32(-1)));
  const __m256i shifted = _mm256_slli_epi32(_mm256_and_si256(bytes, _mm256_set1_epi32(0xff)), 20);
  __m256 scale = _mm256_mul_ps(_mm256_castsi256_ps(shifted), _mm256_set1_ps(ScaleAndZero::kTwoTo108));
  scale = _mm256_moveldup_ps(_mm256_blendv_ps(scale, _mm256_set1_ps(NAN), nan));
  return _mm256_blend_ps(scale, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(bytes)), 0xaa);
}
inline F16 load(const ScaleAndZero* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {scales_and_zeros(bytes), scales_and_zeros(_mm_srli_si128(bytes, 8))};
}
// fma(code, scale, minimum) of the low or the high nibbles of 16 bytes.
inline F16 nibbles(const uint8_t* p, bool high, float scale, float minimum) {
  __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  if (high) bytes = _mm_srli_epi16(bytes, 4);
  bytes = _mm_and_si128(bytes, _mm_set1_epi8(15));
  const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
  const __m256 rest = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)));
  const __m256 factor = _mm256_set1_ps(scale);
  const __m256 least = _mm256_set1_ps(minimum);
  return {_mm256_fmadd_ps(low, factor, least), _mm256_fmadd_ps(rest, factor, least)};
}
inline __m256i round_bf16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), nan);
}
inline void store(Bf16* p, F16 a) {
  const __m256i packed = _mm256_packus_epi32(round_bf16(a.lo), round_bf16(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xD8));
}
inline void store(Fp16* p, F16 a) {
  __m128i* h = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(h, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(h + 1, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}

inline F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }

inline F16 select(uint32_t bits, F16 yes, F16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_castsi256_ps(lanes(bits))),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_castsi256_ps(lanes(bits >> 8)))};
}
inline uint32_t greater(F16 a, F16 b) {
  const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ));
  const int hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ));
  return static_cast<uint32_t>(lo) | static_cast<uint32_t>(hi) << 8;
}

inline __m256 scale_half(__m256 a, __m256 biased) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(biased), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
}
// a * 2^n, where n is the integer in the low bits of the float `biased` (see exp).
inline F16 scale_by_power(F16 a, F16 biased) { return {scale_half(a.lo, biased.lo), scale_half(a.hi, biased.hi)}; }

template <class Op>
inline __m256 join(__m256 a, __m256 b) {
  return Op::of(F16{a, a}, F16{b, b}).lo;
}

template <class Op>
inline __m256 tree8(const F16* u) {
  constexpr int order[8] = {0, 2, 1, 3, 4, 6, 5, 7};
  __m256 w[8];
  __m256 x[4];
  __m256 y[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) w[i] = join<Op>(u[order[i]].lo, u[order[i]].hi);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = join<Op>(_mm256_permute2f128_ps(w[i], w[i + 4], 0x20), _mm256_permute2f128_ps(w[i], w[i + 4], 0x31));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    y[i] = join<Op>(_mm256_shuffle_ps(x[i], x[i + 2], 0x44), _mm256_shuffle_ps(x[i], x[i + 2], 0xEE));
  }
  return join<Op>(_mm256_shuffle_ps(y[0], y[1], 0x88), _mm256_shuffle_ps(y[0], y[1], 0xDD));
}

// One vector whose lane k is the tree over the lanes of u[k]; the shuffles visit (l, l+8), (l, l+4), ...
template <class Op>
inline F16 tree16(const F16* u) {
  return {tree8<Op>(u), tree8<Op>(u + 8)};
}

template <class Op>
inline float tree(F16 a) {
  __m256 v = join<Op>(a.lo, a.hi);
  v = join<Op>(v, _mm256_permute2f128_ps(v, v, 0x01));
  v = join<Op>(v, _mm256_permute_ps(v, 0x4E));
  v = join<Op>(v, _mm256_permute_ps(v, 0xB1));
  return _mm256_cvtss_f32(v);
}

inline void transpose8(__m256* m) {
  __m256 a[8];
  __m256 b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_ps(m[2 * i], m[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_ps(m[2 * i], m[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
    b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xEE);
    b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    m[c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
    m[4 + c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
  }
}

// Rows become columns, in place.
inline void transpose16(F16* m) {
  __m256 q[4][8];
  for (int i = 0; i < 8; ++i) {
    q[0][i] = m[i].lo;
    q[1][i] = m[i].hi;
    q[2][i] = m[i + 8].lo;
    q[3][i] = m[i + 8].hi;
  }
  for (int i = 0; i < 4; ++i) transpose8(q[i]);
  for (int i = 0; i < 8; ++i) {
    m[i] = {q[0][i], q[2][i]};
    m[i + 8] = {q[1][i], q[3][i]};
  }
}
