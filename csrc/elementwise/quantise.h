// One head vector into a quantised pool format: codes and scales.
//
// Every step is elementwise or a maximum, so any machine gets the same bits. A scale is rounded up and the codes are
// made with the rounded one: no value lies further than half a step from what it is read as.
#pragma once

#include <float.h>

#include "rotate.h"
#include "simd.h"

namespace kvstrata {
namespace KVSTRATA_ISA {

inline uint32_t word_of(float x) {
  uint32_t word;
  memcpy(&word, &x, 4);
  return word;
}
inline float float_from(uint32_t word) {
  float x;
  memcpy(&x, &word, 4);
  return x;
}

constexpr uint16_t kBf16Nan = 0x7fc0;

// The least bfloat16 that is not below x; x is finite and not negative.
inline uint16_t bf16_above(float x) { return static_cast<uint16_t>((word_of(x) + 0xffffu) >> 16); }
inline float from_bf16(uint16_t bits) { return float_from(static_cast<uint32_t>(bits) << 16); }

// The nearest integer, to even, as two's complement; |x| < 2^22.
inline uint32_t nearest(float x) { return word_of(x + 12582912.0f); }  // 1.5 * 2^23

// int8: codes -127 to 127 times the scale. A vector that is not finite is read as NaN.
inline void store_int8(const float* x, int64_t n, uint8_t* codes, uint16_t* scale) {
  float largest = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    const float magnitude = fabsf(x[i]);
    finite = finite && magnitude <= FLT_MAX;
    largest = magnitude > largest ? magnitude : largest;
  }
  *scale = finite ? bf16_above(largest / 127.0f) : kBf16Nan;
  if (!finite || *scale == 0) {
    memset(codes, 0, static_cast<size_t>(n));
    return;
  }
  const float step = from_bf16(*scale);
  for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(nearest(x[i] / step));
}

// The nearest e4m3 (OCP 8-bit floating point), to even; beyond 448 it saturates, infinities too; NaN stays NaN.
inline uint8_t to_e4m3(float x) {
  const uint32_t word = word_of(x);
  const uint32_t sign = word >> 24 & 0x80u;
  const float magnitude = float_from(word & 0x7fffffffu);
  uint32_t code;
  if (magnitude != magnitude) {
    code = 0x7f;
  } else if (magnitude >= 448.0f) {
    code = 0x7e;
  } else if (magnitude < 0.015625f) {  // subnormal: multiples of 2^-9
    code = nearest(magnitude * 512.0f) & 0xffu;
  } else {
    const uint32_t bits = word & 0x7fffffffu;
    code = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
  }
  return static_cast<uint8_t>(sign | code);
}

// fp8: the scale brings the largest finite magnitude to 448. Infinities saturate, a NaN stays one alone.
inline void store_fp8(const float* x, int64_t n, uint8_t* codes, uint16_t* scale) {
  float largest = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float magnitude = fabsf(x[i]);
    largest = magnitude <= FLT_MAX && magnitude > largest ? magnitude : largest;
  }
  *scale = bf16_above(largest / 448.0f);
  const float step = *scale == 0 ? 1.0f : from_bf16(*scale);
  for (int64_t i = 0; i < n; ++i) codes[i] = to_e4m3(x[i] / step);
}

// The scale of an int4 code: five bits of exponent, biased by 19, three of mantissa; code 255 is NaN.
constexpr uint32_t kLeastScale = 8;
constexpr uint32_t kLargestScale = 254;
inline float scale_of(uint32_t code) { return float_from((code + (108u << 3)) << 20); }
// The least code whose scale is not below x; x is not negative.
inline uint32_t scale_above(float x) {
  const uint32_t top = (word_of(x) + 0xfffffu) >> 20;
  const uint32_t code = top > (108u << 3) + kLeastScale ? top - (108u << 3) : kLeastScale;
  return code < kLargestScale ? code : kLargestScale;
}
// x in whole steps.
inline int32_t steps_of(float x, float step) {
  float steps = x / step;
  steps = steps < -1024.0f ? -1024.0f : steps > 1024.0f ? 1024.0f : steps;
  return static_cast<int32_t>(nearest(steps)) - 0x4b400000;
}

// int4, n <= 16 elements: element = (code + zero) * scale, code 0 to 15, with the least scale that has a code
// within half a step of each. scales: scale, zero. Too large elements saturate; a group that is not finite is read
// as NaN.
inline void store_int4_group(const float* x, int n, uint8_t* codes, uint8_t* scales) {
  float low = INFINITY;
  float high = -INFINITY;
  bool finite = true;
  for (int i = 0; i < n; ++i) {
    finite = finite && fabsf(x[i]) <= FLT_MAX;
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  memset(codes, 0, static_cast<size_t>(n));
  scales[0] = 0xff;
  scales[1] = 0;
  if (!finite) return;
  const float largest = fabsf(low) > fabsf(high) ? fabsf(low) : fabsf(high);
  const float spread = high * 0.0625f - low * 0.0625f;
  uint32_t code = scale_above(largest / 127.0f > spread ? largest / 127.0f : spread);
  while (code < kLargestScale && steps_of(high, scale_of(code)) - steps_of(low, scale_of(code)) > 15) ++code;
  const float step = scale_of(code);
  int32_t zero = steps_of(low, step);
  zero = zero < -128 ? -128 : zero > 127 ? 127 : zero;
  for (int i = 0; i < n; ++i) {
    const int32_t above = steps_of(x[i], step) - zero;
    codes[i] = static_cast<uint8_t>(above < 0 ? 0 : above > 15 ? 15 : above);
  }
  scales[0] = static_cast<uint8_t>(code);
  scales[1] = static_cast<uint8_t>(zero);
}

// Element i of n <= 32 goes to byte i mod n / 2, those of the first half to the low nibbles.
inline void store_int4(const float* x, Part part, int64_t n, uint8_t* codes, uint8_t* scales) {
  float rotated[kMaxRotated];
  if (part == Part::key) {
    memcpy(rotated, x, sizeof(float) * static_cast<size_t>(n));
    rotate(rotated, static_cast<int>(n));
    x = rotated;
  }
  for (int64_t i = 0; i < n; i += kInt4Group) {
    const int count = n - i < kInt4Group ? static_cast<int>(n - i) : kInt4Group;
    uint8_t wide[kInt4Group];
    for (int j = 0; j < count; j += kInt4Scaled) {
      const int scaled = count - j < kInt4Scaled ? count - j : kInt4Scaled;
      store_int4_group(x + i + j, scaled, wide + j, scales + (i + j) / kInt4Scaled * 2);
    }
    for (int j = 0; j < count / 2; ++j) {
      codes[i / 2 + j] = static_cast<uint8_t>(wide[j] | wide[j + count / 2] << 4);
    }
  }
}

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
