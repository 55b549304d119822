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
constexpr uint16_t kFp16Nan = 0x7e00;
constexpr float kFp16Max = 65504.0f;

// The least bfloat16 that is not below x; x is finite and not negative.
inline uint16_t bf16_above(float x) { return static_cast<uint16_t>((word_of(x) + 0xffffu) >> 16); }
inline float from_bf16(uint16_t bits) { return float_from(static_cast<uint32_t>(bits) << 16); }

inline uint16_t fp16_nearest(float x) {
  Fp16 half[16];
  store(half, set1(x));
  return half[0].bits;
}
inline float from_half(uint16_t bits) {
  Fp16 half[16];
  for (Fp16& each : half) each.bits = bits;
  float lanes[16];
  store(lanes, load(half));
  return lanes[0];
}
// The least binary16 not below x, 0 <= x <= kFp16Max.
inline uint16_t fp16_above(float x) {
  const uint16_t bits = fp16_nearest(x);
  return from_half(bits) < x ? static_cast<uint16_t>(bits + 1) : bits;
}
// The greatest binary16 not above x, |x| <= kFp16Max.
inline uint16_t fp16_below(float x) {
  const uint16_t bits = fp16_nearest(x);
  if (!(from_half(bits) > x)) return bits;
  if ((bits & 0x7fffu) == 0) return 0x8001u;
  return static_cast<uint16_t>(bits & 0x8000u ? bits + 1 : bits - 1);
}

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

// int4, n <= 32 elements, n even: codes 0 to 15 times the scale, plus the minimum; element i goes to byte i mod n / 2,
// those of the first half to the low nibbles. scales: scale, minimum. Beyond binary16's range it saturates; a
// group that is not finite is read as NaN.
inline void store_int4_group(const float* x, int n, uint8_t* codes, uint16_t* scales) {
  float low = INFINITY;
  float high = -INFINITY;
  bool finite = true;
  for (int i = 0; i < n; ++i) {
    finite = finite && fabsf(x[i]) <= FLT_MAX;
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  memset(codes, 0, static_cast<size_t>(n / 2));
  if (!finite) {
    scales[0] = scales[1] = kFp16Nan;
    return;
  }
  low = low < -kFp16Max ? -kFp16Max : low > kFp16Max ? kFp16Max : low;
  scales[1] = fp16_below(low);
  const float minimum = from_half(scales[1]);
  const float range = (high - minimum) / 15.0f;
  scales[0] = fp16_above(range > kFp16Max ? kFp16Max : range);
  const float step = from_half(scales[0]);
  if (step == 0.0f) return;
  for (int i = 0; i < n; ++i) {
    float code = (x[i] - minimum) / step;
    code = code < 0.0f ? 0.0f : code > 15.0f ? 15.0f : code;
    codes[i % (n / 2)] |= static_cast<uint8_t>((nearest(code) & 15u) << (i < n / 2 ? 0 : 4));
  }
}

inline void store_int4(const float* x, Part part, int64_t n, uint8_t* codes, uint16_t* scales) {
  float rotated[kMaxRotated];
  if (part == Part::key) {
    memcpy(rotated, x, sizeof(float) * static_cast<size_t>(n));
    rotate(rotated, static_cast<int>(n));
    x = rotated;
  }
  for (int64_t i = 0; i < n; i += kInt4Group) {
    const int count = n - i < kInt4Group ? static_cast<int>(n - i) : kInt4Group;
    store_int4_group(x + i, count, codes + i / 2, scales + i / kInt4Group * 2);
  }
}

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
