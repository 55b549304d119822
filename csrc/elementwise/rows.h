// RMSNorm, gated activations, RoPE and the rounding into a pool's format.
//
// Written order. The sum of squares is 16 interleaved lanes folded from +0 by fused multiply-adds and combined
// by the tree; the root, the reciprocal and the two products (x * inverse) * weight are rounded one by one.
// Everything else is elementwise.
#pragma once

#include "elementwise/elementwise.h"
#include "simd.h"

#include "elementwise/quantise.h"

namespace kvstrata {
namespace KVSTRATA_ISA {

// 1 / sqrt(mean of squares + eps).
inline float inverse_rms(const float* x, float eps, int64_t size) {
  F16 squares = zero();
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) {
    const F16 v = load(x + i);
    squares = fma(v, v, squares);
  }
  if (i < size) {
    const F16 v = load_first(x + i, static_cast<int>(size - i));
    squares = fma(v, v, squares);
  }
  return 1.0f / sqrtf(tree_sum(squares) / static_cast<float>(size) + eps);
}

inline void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* out) {
  const F16 inverse = set1(inverse_rms(x, eps, size));
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) store(out + i, load(x + i) * inverse * load(weight + i));
  if (i < size) {
    const int n = static_cast<int>(size - i);
    store_first(out + i, load_first(x + i, n) * inverse * load_first(weight + i, n), n);
  }
}

inline void add_rms_norm(float* residual, const float* x, const float* weight, float eps, int64_t size, float* out) {
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) store(residual + i, load(residual + i) + load(x + i));
  if (i < size) {
    const int n = static_cast<int>(size - i);
    store_first(residual + i, load_first(residual + i, n) + load_first(x + i, n), n);
  }
  rms_norm(residual, weight, eps, size, out);
}

inline F16 activated(F16 gate, F16 up, Activation kind) {
  F16 exponent = zero() - gate;
  if (kind == Activation::gelu_tanh) {
    // gelu(x) = x / 2 (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
    const F16 cubic = fma(gate * gate, set1(0.044715f), set1(1.0f));
    exponent = set1(-1.5957691216057308f) * (gate * cubic);
  }
  return gate / (set1(1.0f) + exp(exponent)) * up;
}

inline void gate(const float* gate, const float* up, Activation kind, int64_t size, float* out) {
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) store(out + i, activated(load(gate + i), load(up + i), kind));
  if (i < size) {
    const int n = static_cast<int>(size - i);
    store_first(out + i, activated(load_first(gate + i, n), load_first(up + i, n), kind), n);
  }
}

inline void rope(const float* x, const float* cos, const float* sin, int64_t head_dim, float* out) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const int n = half - i < 16 ? static_cast<int>(half - i) : 16;
    const F16 first = load_first(x + i, n);
    const F16 second = load_first(x + half + i, n);
    const F16 c = load_first(cos + i, n);
    const F16 s = load_first(sin + i, n);
    store_first(out + i, fma(first, c, zero() - second * s), n);
    store_first(out + half + i, fma(second, c, first * s), n);
  }
}

template <class T>
inline void store_as(const float* x, int64_t head_dim, void* out) {
  T* p = static_cast<T*>(out);
  int64_t i = 0;
  for (; i + 16 <= head_dim; i += 16) store(p + i, load(x + i));
  if (i < head_dim) {
    T rounded[16];
    store(rounded, load_first(x + i, static_cast<int>(head_dim - i)));
    memcpy(p + i, rounded, sizeof(T) * static_cast<size_t>(head_dim - i));
  }
}

inline void store_vector(const float* x, KvType type, Part part, int64_t head_dim, void* out, void* scales) {
  uint8_t* codes = static_cast<uint8_t*>(out);
  uint16_t* scale = static_cast<uint16_t*>(scales);
  switch (type) {
    case KvType::float32:
      return store_as<float>(x, head_dim, out);
    case KvType::bfloat16:
      return store_as<Bf16>(x, head_dim, out);
    case KvType::float16:
      return store_as<Fp16>(x, head_dim, out);
    case KvType::float8_e4m3:
      return store_fp8(x, head_dim, codes, scale);
    case KvType::int8:
      return store_int8(x, head_dim, codes, scale);
    case KvType::int4:
      return store_int4(x, part, head_dim, codes, static_cast<uint8_t*>(scales));
  }
}

extern const ElementwiseKernels elementwise_kernels = {rms_norm, add_rms_norm, gate, rope, store_vector};

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
