// Integer steps of the product on AVX-512 VNNI. Included by multiply.h only.
//
// Codes are unsigned and activations signed, as vpdpbusd wants them; it sums into int32 without saturating, and
// the shift that made the codes unsigned is taken back by the accumulator's start.
#pragma once

constexpr int kMaxRows = rows_within_limit(6);
constexpr int kMaxTiles = 2;
// Two instructions unpack a vector of nibbles, four one of sixes: against twelve products.
template <class Kind>
constexpr int64_t kDirectBlocks = 16;
template <>
constexpr int64_t kDirectBlocks<Sixes> = 3;

struct Word {
  __m512i v;
};
KVSTRATA_INLINE Word broadcast(const int8_t* p) {
  int32_t word;
  memcpy(&word, p, 4);
  return {_mm512_set1_epi32(word)};
}

template <class Kind>
struct Codes {
  __m512i v;
};
template <class Kind>
struct Dot {
  __m512i v;
};

KVSTRATA_INLINE __m512i load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }

template <class Kind>
KVSTRATA_INLINE Dot<Kind> begin(int32_t start) {
  return {_mm512_set1_epi32(start)};
}
template <class Kind>
KVSTRATA_INLINE void step(Dot<Kind>& dot, const Codes<Kind>& codes, Word x) {
  dot.v = _mm512_dpbusd_epi32(dot.v, codes.v, x.v);
}
template <class Kind>
KVSTRATA_INLINE F16 finish(const Dot<Kind>& dot, int32_t) {
  return {_mm512_cvtepi32_ps(dot.v)};
}

// Codes as a tile stores them.
KVSTRATA_INLINE Codes<Bytes> load_byte_codes(const uint8_t* p) { return {load_bytes(p)}; }
template <bool kHigh>
KVSTRATA_INLINE Codes<Nibbles> load_nibble_codes(const uint8_t* p) {
  const __m512i both = load_bytes(p);
  return {_mm512_and_si512(kHigh ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15))};
}
template <bool kHigh, int kField>
KVSTRATA_INLINE Codes<Sixes> load_six_codes(const uint8_t* low, const uint8_t* high) {
  const __m512i nibble = load_nibble_codes<kHigh>(low).v;
  const __m512i fields = load_bytes(high);
  const __m512i placed = kField == 0   ? _mm512_slli_epi16(fields, 4)
                         : kField == 1 ? _mm512_slli_epi16(fields, 2)
                         : kField == 2 ? fields
                                       : _mm512_srli_epi16(fields, 2);
  return {_mm512_or_si512(nibble, _mm512_and_si512(placed, _mm512_set1_epi8(0x30)))};
}

// Codes as the scratch holds them.
template <class Kind>
KVSTRATA_INLINE Codes<Kind> load_codes(const uint8_t* p) {
  return {load_bytes(p)};
}
template <class Kind>
KVSTRATA_INLINE void store_codes(uint8_t* p, const Codes<Kind>& codes) {
  _mm512_storeu_si512(p, codes.v);
}

KVSTRATA_INLINE F16 from_u8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
KVSTRATA_INLINE F16 from_i8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

// The largest magnitude of 32 floats as the bits of a float: ordered like integers, NaN above all.
KVSTRATA_INLINE uint32_t largest_bits(F16 a, F16 b) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  const __m512i x = _mm512_and_si512(_mm512_castps_si512(a.v), mask);
  const __m512i y = _mm512_and_si512(_mm512_castps_si512(b.v), mask);
  return static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_max_epi32(x, y)));
}
// Rounds to the nearest integer, ties to even, stores 16 codes and returns their sum.
KVSTRATA_INLINE int32_t store_rounded(int8_t* p, F16 a) {
  const __m512i rounded =
      _mm512_cvt_roundps_epi32(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(rounded));
  return _mm512_reduce_add_epi32(rounded);
}
