// SHA-256's compression with the x86 SHA instructions (Intel SDM: SHA256RNDS2, SHA256MSG1, SHA256MSG2), which do
// two rounds of FIPS 180-4 section 6.2.2 and a part of its message schedule each.
#include "keys/sha256.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define KVSTRATA_TARGET_SHA __attribute__((target("sha,ssse3,sse4.1")))

namespace kvstrata {
namespace {

// Four words of the message as the instructions take them: in order, each of them from big endian.
KVSTRATA_TARGET_SHA inline __m128i load_words(const uint8_t* bytes) {
  const __m128i reversed = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
  return _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)), reversed);
}

// The next four words of the schedule, of the sixteen before them.
KVSTRATA_TARGET_SHA inline __m128i next_words(__m128i w0, __m128i w4, __m128i w8, __m128i w12) {
  const __m128i middle = _mm_alignr_epi8(w12, w8, 4);  // W(t-7)
  return _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(w0, w4), middle), w12);
}

// Four rounds from round t on. The state lies as the instructions want it: abef holds (from the highest word) a,
// b, e and f, cdgh the others; after two rounds the old abef is the new cdgh.
KVSTRATA_TARGET_SHA inline void four_rounds(__m128i& abef, __m128i& cdgh, __m128i words, int t) {
  const __m128i constants = _mm_load_si128(reinterpret_cast<const __m128i*>(kSha256Constants + t));
  const __m128i sums = _mm_add_epi32(words, constants);
  cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sums);
  abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sums, 0x0e));
}

KVSTRATA_TARGET_SHA void compress(uint32_t state[8], const uint8_t* blocks, size_t count) {
  __m128i* words = reinterpret_cast<__m128i*>(state);
  const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xb1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
  for (; count > 0; --count, blocks += kSha256BlockBytes) {
    const __m128i old_abef = abef, old_cdgh = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i) {
      w[i] = load_words(blocks + 16 * i);
      four_rounds(abef, cdgh, w[i], 4 * i);
    }
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) {
      w[i % 4] = next_words(w[i % 4], w[(i + 1) % 4], w[(i + 2) % 4], w[(i + 3) % 4]);
      four_rounds(abef, cdgh, w[i % 4], 16 + 4 * i);
    }
    abef = _mm_add_epi32(abef, old_abef);
    cdgh = _mm_add_epi32(cdgh, old_cdgh);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

// By CPUID itself, since not every compiler's __builtin_cpu_supports knows "sha".
bool has_instructions() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
  const bool shuffles = (ecx & bit_SSSE3) != 0 && (ecx & bit_SSE4_1) != 0;
  return shuffles && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & bit_SHA) != 0;
}

}  // namespace

Sha256Compress sha256_compress_instructions() {
  static const bool found = has_instructions();
  return found ? compress : nullptr;
}

}  // namespace kvstrata
#else
namespace kvstrata {

Sha256Compress sha256_compress_instructions() { return nullptr; }

}  // namespace kvstrata
#endif
