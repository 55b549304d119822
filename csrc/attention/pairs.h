// Two bf16 elements that are multiplied by two others and added to a float: what attention over bf16 pools is made of.
//
// Written order: fma(a, b, c) is, a lane, fmaf(a.even, b.even, fmaf(a.odd, b.odd, c)), denormals taken for zeros and
// flushed to zeros, which is vdpbf16ps (measured on Zen 4: sums, denormals, infinities). Where that instruction is
// missing the elements are floats and the two products plain ones, under FlushDenormals.
#pragma once

namespace kvstrata {
namespace KVSTRATA_ISA {

#if defined(KVSTRATA_ISA_BF16)

struct Pairs {
  __m512i v;  // the even element of a pair in the lower half of its lane
};

// Floats of memory that a pair takes: both halves of one, or two floats.
constexpr int kPairFloats = 1;

KVSTRATA_INLINE F16 fma(Pairs a, Pairs b, F16 c) {
  return {_mm512_dpbf16_ps(c.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
}

// Sixteen pairs of a query or of 16 tokens' keys, as `store_query` and the tile have them.
KVSTRATA_INLINE Pairs load_pairs(const float* p) { return {_mm512_loadu_si512(p)}; }

// One pair on all lanes: number i of a query, or of a row's weights.
KVSTRATA_INLINE Pairs same_pair(const float* p) {
  int32_t pair;
  memcpy(&pair, p, sizeof(pair));
  return {_mm512_set1_epi32(pair)};
}
KVSTRATA_INLINE Pairs query_pair(const float* query, int i) { return same_pair(query + i); }
KVSTRATA_INLINE Pairs weight_pair(const float* weights, int i) { return same_pair(weights + i); }

// 32 elements of a query.
inline void store_query(float* to, const Bf16* elements) { memcpy(to, elements, 32 * sizeof(Bf16)); }

// Rounds the probabilities of tokens 16 c to 16 c + 16 of a row, puts them in place and gives what they became.
inline F16 store_weights(float* row, int c, F16 p) {
  const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(p.v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + 8 * c), rounded);
  return widen_bf16(rounded);
}

// n neighbours, at most 32, then zeros.
KVSTRATA_INLINE Pairs load_pairs(const Bf16* p, int n) {
  if (n >= 32) return {_mm512_loadu_si512(p)};
  if (n == 16) return {_mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  return {_mm512_maskz_loadu_epi16((1u << n) - 1u, p)};
}

// Elements of one token, at most 16, then zeros, paired with zeros in the other's place.
inline Pairs load_alone(const Bf16* p, int n, bool odd) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(load_pairs(p, n < 16 ? n : 16).v));
  return {odd ? _mm512_slli_epi32(wide, 16) : wide};
}

// The elements of two tokens paired: n of each, at most 16 C, then zeros.
template <int C>
KVSTRATA_INLINE void pair_up(const Bf16* even, const Bf16* odd, int n, Pairs* pairs) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
#pragma GCC unroll 4
  for (int c = 0; c < C; c += 2) {
    const int most = C - c == 1 ? 16 : 32;
    const int count = n - 16 * c < most ? n - 16 * c : most;
    const __m512i a = load_pairs(even + 16 * c, count).v;
    const __m512i b = load_pairs(odd + 16 * c, count).v;
    pairs[c].v = _mm512_permutex2var_epi16(a, low, b);
    if (c + 1 < C) pairs[c + 1].v = _mm512_permutex2var_epi16(a, high, b);
  }
}

// Sixteen dimensions of the values of two tokens, as the tile has them; and the same with one of the tokens hidden.
KVSTRATA_INLINE Pairs load_values(const float* pair, int d, int) { return {_mm512_loadu_si512(pair + d)}; }
inline Pairs load_value_alone(const float* pair, int d, int dim, bool odd) {
  const __m512i seen = _mm512_set1_epi32(odd ? static_cast<int>(0xffff0000u) : 0xffff);
  return {_mm512_and_si512(load_values(pair, d, dim).v, seen)};
}

#else

struct Pairs {
  F16 even;
  F16 odd;
};
constexpr int kPairFloats = 2;

KVSTRATA_INLINE F16 fma(Pairs a, Pairs b, F16 c) { return fma(a.even, b.even, fma(a.odd, b.odd, c)); }

KVSTRATA_INLINE Pairs load_pairs(const float* p) { return {load(p), load(p + 16)}; }
KVSTRATA_INLINE Pairs query_pair(const float* query, int i) {
  const float* p = query + i / 16 * 32 + i % 16;
  return {set1(p[0]), set1(p[16])};
}
KVSTRATA_INLINE Pairs weight_pair(const float* weights, int i) {
  return {set1(weights[2 * i]), set1(weights[2 * i + 1])};
}

inline void store_query(float* to, const Bf16* elements) {
  store(to, load_even(elements));
  store(to + 16, load_odd(elements));
}

inline F16 store_weights(float* row, int c, F16 p) {
  Bf16 rounded[16];
  store(rounded, p);
  p = load(rounded);
  store(row + 16 * c, p);
  return p;
}

KVSTRATA_INLINE Pairs load_pairs(const Bf16* p, int n) {
  if (n >= 32) return {load_even(p), load_odd(p)};
  Bf16 some[32] = {};
  memcpy(some, p, sizeof(Bf16) * static_cast<size_t>(n));
  return {load_even(some), load_odd(some)};
}

KVSTRATA_INLINE F16 load_up_to(const Bf16* p, int n) { return n >= 16 ? load(p) : load_some(p, n); }

inline Pairs load_alone(const Bf16* p, int n, bool odd) {
  const F16 element = load_up_to(p, n);
  return odd ? Pairs{zero(), element} : Pairs{element, zero()};
}

template <int C>
KVSTRATA_INLINE void pair_up(const Bf16* even, const Bf16* odd, int n, Pairs* pairs) {
  for (int c = 0; c < C; ++c) {
    pairs[c] = {load_up_to(even + 16 * c, n - 16 * c), load_up_to(odd + 16 * c, n - 16 * c)};
  }
}

KVSTRATA_INLINE Pairs load_values(const float* pair, int d, int dim) { return {load(pair + d), load(pair + dim + d)}; }
inline Pairs load_value_alone(const float* pair, int d, int dim, bool odd) {
  return odd ? Pairs{zero(), load(pair + dim + d)} : Pairs{load(pair + d), zero()};
}

#endif

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
