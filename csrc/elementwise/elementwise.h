// The kernels between products as plain pointers, a row (or a head) at a time.
#pragma once

#include <stdint.h>

#include "attention/attention.h"

namespace kvstrata {

enum class Activation : int { silu, gelu_tanh };

struct ElementwiseKernels {
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t size, float* out);
  // residual += x, then out = rms_norm(residual).
  void (*add_rms_norm)(float* residual, const float* x, const float* weight, float eps, int64_t size, float* out);
  void (*gate)(const float* gate, const float* up, Activation kind, int64_t size, float* out);
  // Rotates one head; out may be x.
  void (*rope)(const float* x, const float* cos, const float* sin, int64_t head_dim, float* out);
  // One head vector into the pool's format; scales: where its scales go, if the format has some.
  void (*store_vector)(const float* x, KvType type, Part part, int64_t head_dim, void* out, void* scales);
};

namespace portable {
extern const ElementwiseKernels elementwise_kernels;
}
namespace avx2 {
extern const ElementwiseKernels elementwise_kernels;
}
namespace avx512 {
extern const ElementwiseKernels elementwise_kernels;
}

}  // namespace kvstrata
