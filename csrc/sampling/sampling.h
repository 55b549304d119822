// What sampling asks of one row of logits.
#pragma once

#include <stdint.h>

namespace kvstrata {

struct SamplingKernels {
  // Whether no logit is infinite or NaN.
  bool (*finite)(const float* logits, int64_t size);
  // Index of the largest logit, the lowest of equals. NaN never wins.
  int64_t (*argmax)(const float* logits, int64_t size);
  // log(sum(exp(logits))).
  float (*logsumexp)(const float* logits, int64_t size);
  // The k largest, falling, the lower index first among equals; NaN counts as -inf.
  void (*top_k)(const float* logits, int64_t size, int64_t k, float* values, int64_t* ids);
};

namespace portable {
extern const SamplingKernels sampling_kernels;
}
namespace avx2 {
extern const SamplingKernels sampling_kernels;
}
namespace avx512 {
extern const SamplingKernels sampling_kernels;
}

}  // namespace kvstrata
