// Integer steps of the product on AVX2. Included by multiply.h only.
//
// vpmaddubsw adds two products in int16 and saturates, so each kind of code stays within what fits:
//   bytes    |code| x (activation with the code's sign): 128 * 127 * 2 = 32512, widened at once
//   nibbles  15 * 127 * 2 * 8 words = 30480: a whole group sums in int16
//   sixes    63 * 127 * 2 = 16002, widened at once
#pragma once

constexpr int kMaxRows = rows_within_limit(4);
constexpr int kMaxTiles = 1;
template <class Kind>
constexpr int64_t kDirectBlocks = 3;

struct Word {
  __m256i v;
};
KVSTRATA_INLINE Word broadcast(const int8_t* p) {
  int32_t word;
  memcpy(&word, p, 4);
  return {_mm256_set1_epi32(word)};
}

template <class Kind>
struct Codes {
  __m256i lo;
  __m256i hi;
};
template <class Kind>
struct Dot {
  __m256i lo;
  __m256i hi;
};

KVSTRATA_INLINE __m256i load_half(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
KVSTRATA_INLINE __m256i widen(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }

template <class Kind>
KVSTRATA_INLINE Dot<Kind> begin(int32_t) {
  return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}

// Byte codes are kept signed here, so that no start is needed. The activation takes the code's sign: it is
// never -128, while a file's code may be, which has no negative.
KVSTRATA_INLINE __m256i byte_products(__m256i codes, __m256i x) {
  return widen(_mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes)));
}
// Compilers like to gather all products of a block before they add any, which takes far more than sixteen
// registers; an empty statement that claims to change the sums keeps each addition where it is written.
template <class Kind>
KVSTRATA_INLINE void add_now(Dot<Kind>& dot, __m256i lo, __m256i hi) {
  dot.lo = lo;
  dot.hi = hi;
  asm volatile("" : "+x"(dot.lo), "+x"(dot.hi));
}
KVSTRATA_INLINE void step(Dot<Bytes>& dot, const Codes<Bytes>& codes, Word x) {
  add_now(dot, _mm256_add_epi32(dot.lo, byte_products(codes.lo, x.v)),
          _mm256_add_epi32(dot.hi, byte_products(codes.hi, x.v)));
}
KVSTRATA_INLINE void step(Dot<Nibbles>& dot, const Codes<Nibbles>& codes, Word x) {
  add_now(dot, _mm256_add_epi16(dot.lo, _mm256_maddubs_epi16(codes.lo, x.v)),
          _mm256_add_epi16(dot.hi, _mm256_maddubs_epi16(codes.hi, x.v)));
}
KVSTRATA_INLINE void step(Dot<Sixes>& dot, const Codes<Sixes>& codes, Word x) {
  add_now(dot, _mm256_add_epi32(dot.lo, widen(_mm256_maddubs_epi16(codes.lo, x.v))),
          _mm256_add_epi32(dot.hi, widen(_mm256_maddubs_epi16(codes.hi, x.v))));
}

KVSTRATA_INLINE F16 finish(const Dot<Bytes>& dot, int32_t) {
  return {_mm256_cvtepi32_ps(dot.lo), _mm256_cvtepi32_ps(dot.hi)};
}
KVSTRATA_INLINE F16 finish(const Dot<Nibbles>& dot, int32_t start) {
  const __m256i from = _mm256_set1_epi32(start);
  return {_mm256_cvtepi32_ps(_mm256_add_epi32(widen(dot.lo), from)),
          _mm256_cvtepi32_ps(_mm256_add_epi32(widen(dot.hi), from))};
}
KVSTRATA_INLINE F16 finish(const Dot<Sixes>& dot, int32_t start) {
  const __m256i from = _mm256_set1_epi32(start);
  return {_mm256_cvtepi32_ps(_mm256_add_epi32(dot.lo, from)), _mm256_cvtepi32_ps(_mm256_add_epi32(dot.hi, from))};
}

// Codes as a tile stores them.
KVSTRATA_INLINE Codes<Bytes> load_byte_codes(const uint8_t* p) {
  const __m256i shift = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(load_half(p), shift), _mm256_xor_si256(load_half(p + 32), shift)};
}
template <bool kHigh>
KVSTRATA_INLINE __m256i nibbles(__m256i both) {
  return _mm256_and_si256(kHigh ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
}
template <bool kHigh>
KVSTRATA_INLINE Codes<Nibbles> load_nibble_codes(const uint8_t* p) {
  return {nibbles<kHigh>(load_half(p)), nibbles<kHigh>(load_half(p + 32))};
}
template <bool kHigh, int kField>
KVSTRATA_INLINE __m256i sixes(__m256i low, __m256i fields) {
  const __m256i placed = kField == 0   ? _mm256_slli_epi16(fields, 4)
                         : kField == 1 ? _mm256_slli_epi16(fields, 2)
                         : kField == 2 ? fields
                                       : _mm256_srli_epi16(fields, 2);
  return _mm256_or_si256(nibbles<kHigh>(low), _mm256_and_si256(placed, _mm256_set1_epi8(0x30)));
}
template <bool kHigh, int kField>
KVSTRATA_INLINE Codes<Sixes> load_six_codes(const uint8_t* low, const uint8_t* high) {
  return {sixes<kHigh, kField>(load_half(low), load_half(high)),
          sixes<kHigh, kField>(load_half(low + 32), load_half(high + 32))};
}

// Codes as the scratch holds them.
template <class Kind>
KVSTRATA_INLINE Codes<Kind> load_codes(const uint8_t* p) {
  return {load_half(p), load_half(p + 32)};
}
template <class Kind>
KVSTRATA_INLINE void store_codes(uint8_t* p, const Codes<Kind>& codes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), codes.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), codes.hi);
}

KVSTRATA_INLINE __m128i load_eight(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
KVSTRATA_INLINE F16 from_u8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_eight(p))),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_eight(p + 8)))};
}
KVSTRATA_INLINE F16 from_i8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_eight(p))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_eight(p + 8)))};
}

// The largest magnitude of 32 floats as the bits of a float: ordered like integers, NaN above all.
KVSTRATA_INLINE uint32_t largest_bits(F16 a, F16 b) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  const __m256i x = _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(a.lo), mask),
                                     _mm256_and_si256(_mm256_castps_si256(a.hi), mask));
  const __m256i y = _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(b.lo), mask),
                                     _mm256_and_si256(_mm256_castps_si256(b.hi), mask));
  const __m256i eight = _mm256_max_epi32(x, y);
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(four));
}
// Rounds to the nearest integer, ties to even, stores 16 codes and returns their sum.
KVSTRATA_INLINE int32_t store_rounded(int8_t* p, F16 a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m256i lo = _mm256_cvtps_epi32(_mm256_round_ps(a.lo, kNearest));
  const __m256i hi = _mm256_cvtps_epi32(_mm256_round_ps(a.hi, kNearest));
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  const __m256i eight = _mm256_add_epi32(lo, hi);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1));
  return _mm_cvtsi128_si32(four);
}
