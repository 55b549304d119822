// F16 on one 512-bit register. Included by simd.h only.
#pragma once

struct F16 {
  __m512 v;
};

inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }

inline __mmask16 below(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
inline F16 load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(below(n), p)}; }
inline void store_first(float* p, F16 a, int n) { _mm512_mask_storeu_ps(p, below(n), a.v); }

inline F16 widen_bf16(__m256i h) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline F16 load(const Bf16* p) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
// The even and the odd ones of 32 elements.
inline F16 load_even(const Bf16* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
inline F16 load_odd(const Bf16* p) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), high))};
}
inline F16 load(const Fp16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline F16 load(const Int8* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline F16 load(const Fp8* p) {
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_srli_epi16(wide, 7), 15);
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
  const __m256i finite = _mm256_slli_epi16(magnitude, 7);
  const __m256i half = _mm256_mask_mov_epi16(finite, nan, _mm256_set1_epi16(0x7e00));
  return {_mm512_cvtph_ps(_mm256_or_si256(half, sign))};
}
inline F16 load(const ScaleAndZero* p) {
  const __m512i bytes = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __mmask16 nan = _mm512_cmpeq_epi32_mask(bytes, _mm512_set1_epi32(-1));
  const __m512i shifted = _mm512_slli_epi32(_mm512_and_si512(bytes, _mm512_set1_epi32(0xff)), 20);
  __m512 scale = _mm512_mul_ps(_mm512_castsi512_ps(shifted), _mm512_set1_ps(ScaleAndZero::kTwoTo108));
  scale = _mm512_mask_mov_ps(scale, nan, _mm512_set1_ps(NAN));
  scale = _mm512_moveldup_ps(scale);
  return {_mm512_mask_mul_ps(scale, 0xaaaa, scale, _mm512_cvtepi32_ps(bytes))};
}
// fma(code, scale, minimum) of the low or the high nibbles of 16 bytes; a table of the 16 values is looked up, by the
// four lowest bits of an index.
inline F16 nibbles(const uint8_t* p, bool high, float scale, float minimum) {
  const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512 table = _mm512_fmadd_ps(codes, _mm512_set1_ps(scale), _mm512_set1_ps(minimum));
  __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  if (high) bytes = _mm512_srli_epi32(bytes, 4);
  return {_mm512_permutexvar_ps(bytes, table)};
}
inline void store(Bf16* p, F16 a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  rounded = _mm512_srli_epi32(rounded, 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
inline void store(Fp16* p, F16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }

inline F16 select(uint32_t bits, F16 yes, F16 no) {
  return {_mm512_mask_mov_ps(no.v, static_cast<__mmask16>(bits), yes.v)};
}
inline uint32_t greater(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }

// a * 2^n, where n is the integer in the low bits of the float `biased` (see exp).
inline F16 scale_by_power(F16 a, F16 biased) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(biased.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), exponent))};
}

template <class Op>
inline F16 join(__m512 a, __m512 b) {
  return Op::of(F16{a}, F16{b});
}

// The tree over the lanes of sixteen vectors, begun with four of them, number k, k + 4, k + 8 and k + 12, so that
// few are alive at a time: (l, l+8), then (l, l+4).
template <class Op>
inline F16 tree_quarter(F16 u0, F16 u4, F16 u8, F16 u12) {
  const F16 a = join<Op>(_mm512_shuffle_f32x4(u0.v, u4.v, 0x44), _mm512_shuffle_f32x4(u0.v, u4.v, 0xEE));
  const F16 b = join<Op>(_mm512_shuffle_f32x4(u8.v, u12.v, 0x44), _mm512_shuffle_f32x4(u8.v, u12.v, 0xEE));
  return join<Op>(_mm512_shuffle_f32x4(a.v, b.v, 0x88), _mm512_shuffle_f32x4(a.v, b.v, 0xDD));
}
// Ended with the four quarters: (l, l+2), then (l, l+1).
template <class Op>
inline F16 tree_of_quarters(F16 q0, F16 q1, F16 q2, F16 q3) {
  const F16 a = join<Op>(_mm512_shuffle_ps(q0.v, q1.v, 0x44), _mm512_shuffle_ps(q0.v, q1.v, 0xEE));
  const F16 b = join<Op>(_mm512_shuffle_ps(q2.v, q3.v, 0x44), _mm512_shuffle_ps(q2.v, q3.v, 0xEE));
  return join<Op>(_mm512_shuffle_ps(a.v, b.v, 0x88), _mm512_shuffle_ps(a.v, b.v, 0xDD));
}

// One vector whose lane k is the tree over the lanes of u[k].
template <class Op>
inline F16 tree16(const F16* u) {
  return tree_of_quarters<Op>(
      tree_quarter<Op>(u[0], u[4], u[8], u[12]), tree_quarter<Op>(u[1], u[5], u[9], u[13]),
      tree_quarter<Op>(u[2], u[6], u[10], u[14]), tree_quarter<Op>(u[3], u[7], u[11], u[15]));
}

template <class Op>
inline float tree(F16 a) {
  __m512 v = a.v;
  v = join<Op>(v, _mm512_shuffle_f32x4(v, v, 0x4E)).v;
  v = join<Op>(v, _mm512_shuffle_f32x4(v, v, 0xB1)).v;
  v = join<Op>(v, _mm512_permute_ps(v, 0x4E)).v;
  v = join<Op>(v, _mm512_permute_ps(v, 0xB1)).v;
  return _mm512_cvtss_f32(v);
}

// Rows become columns, in place.
inline void transpose16(F16* m) {
  __m512 a[16];
  __m512 b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_ps(m[2 * i].v, m[2 * i + 1].v);
    a[2 * i + 1] = _mm512_unpackhi_ps(m[2 * i].v, m[2 * i + 1].v);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // b[4i + c]: column 4q + c of rows 4i.. in 128-bit quarter q
    b[4 * i] = _mm512_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
    b[4 * i + 1] = _mm512_shuffle_ps(a[4 * i], a[4 * i + 2], 0xEE);
    b[4 * i + 2] = _mm512_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    b[4 * i + 3] = _mm512_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 top_even = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88);
    const __m512 top_odd = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xDD);
    const __m512 low_even = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
    const __m512 low_odd = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xDD);
    m[c].v = _mm512_shuffle_f32x4(top_even, low_even, 0x88);
    m[8 + c].v = _mm512_shuffle_f32x4(top_even, low_even, 0xDD);
    m[4 + c].v = _mm512_shuffle_f32x4(top_odd, low_odd, 0x88);
    m[12 + c].v = _mm512_shuffle_f32x4(top_odd, low_odd, 0xDD);
  }
}
