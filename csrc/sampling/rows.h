// argmax, logsumexp and top-k over a vocabulary, each row by itself.
//
// Written order of logsumexp. m: the largest logit. exp(x - m) is summed in chunks of 1,024 logits: 16
// interleaved float lanes folded from +0, combined by the tree; chunk sums are folded left to right in double.
#pragma once

#include "sampling/sampling.h"
#include "simd.h"

namespace kvstrata {
namespace KVSTRATA_ISA {

constexpr int64_t kChunk = 1024;

// Sixteen logits from i on; lanes past the end are -inf.
inline F16 logits_at(const float* logits, int64_t i, int64_t size) {
  if (i + 16 <= size) return load(logits + i);
  const int n = static_cast<int>(size - i);
  return select((1u << n) - 1u, load_first(logits + i, n), set1(-INFINITY));
}

// Zero times what is not finite is NaN, and stays it.
inline bool finite(const float* logits, int64_t size) {
  constexpr int kLanes = 4;
  F16 sums[kLanes];
  for (F16& sum : sums) sum = zero();
  int64_t i = 0;
  for (; i + 16 * kLanes <= size; i += 16 * kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] = fma(load(logits + i + 16 * lane), zero(), sums[lane]);
  }
  for (; i < size; i += 16) {
    const int n = size - i < 16 ? static_cast<int>(size - i) : 16;
    sums[0] = fma(load_first(logits + i, n), zero(), sums[0]);
  }
  return tree_sum((sums[0] + sums[1]) + (sums[2] + sums[3])) == 0.0f;
}

inline float largest(const float* logits, int64_t size) {
  F16 best = set1(-INFINITY);
  for (int64_t i = 0; i < size; i += 16) best = max(logits_at(logits, i, size), best);  // NaN leaves `best`
  return tree_max(best);
}

inline int64_t argmax(const float* logits, int64_t size) {
  const float best = largest(logits, size);
  const F16 target = set1(best);
  for (int64_t i = 0; i < size; i += 16) {
    if (greater(target, logits_at(logits, i, size)) == 0xffffu) continue;
    for (int64_t j = i; j < size && j < i + 16; ++j) {
      if (logits[j] == best) return j;
    }
  }
  return 0;
}

// ln x for 1 <= x < 2^1000 in doubles: x = 2^n f with f in [sqrt(1/2), sqrt(2)), ln f = 2 artanh((f-1)/(f+1)).
inline double natural_log(double x) {
  uint64_t bits;
  memcpy(&bits, &x, 8);
  int64_t n = static_cast<int64_t>(bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull;
  double f;
  memcpy(&f, &bits, 8);
  if (f > 1.4142135623730951) {
    f *= 0.5;
    ++n;
  }
  const double s = (f - 1.0) / (f + 1.0);
  const double z = s * s;
  double series = 1.0 / 19.0;
  for (int k = 17; k >= 1; k -= 2) series = series * z + 1.0 / k;
  return static_cast<double>(n) * 0.69314718055994530942 + 2.0 * s * series;
}

inline float logsumexp(const float* logits, int64_t size) {
  const float m = largest(logits, size);
  if (m == INFINITY || m == -INFINITY) return m;
  const F16 shift = set1(m);
  double total = 0.0;
  for (int64_t chunk = 0; chunk < size; chunk += kChunk) {
    const int64_t end = chunk + kChunk < size ? chunk + kChunk : size;
    F16 sum = zero();
    for (int64_t i = chunk; i < end; i += 16) sum = sum + exp(logits_at(logits, i, size) - shift);
    total += static_cast<double>(tree_sum(sum));
  }
  if (!(total >= 1.0)) return static_cast<float>(total);  // a NaN among the logits
  return static_cast<float>(static_cast<double>(m) + natural_log(total));
}

// Whether entry a loses to entry b.
inline bool worse(float a, int64_t a_id, float b, int64_t b_id) { return a < b || (a == b && a_id > b_id); }

// A heap with the worst of the kept at its root.
inline void sift_down(float* values, int64_t* ids, int64_t size, float value, int64_t id) {
  int64_t i = 0;
  for (int64_t child = 1; child < size; child = 2 * i + 1) {
    if (child + 1 < size && worse(values[child + 1], ids[child + 1], values[child], ids[child])) ++child;
    if (!worse(values[child], ids[child], value, id)) break;
    values[i] = values[child];
    ids[i] = ids[child];
    i = child;
  }
  values[i] = value;
  ids[i] = id;
}

inline void sift_up(float* values, int64_t* ids, int64_t i, float value, int64_t id) {
  while (i > 0) {
    const int64_t parent = (i - 1) / 2;
    if (!worse(value, id, values[parent], ids[parent])) break;
    values[i] = values[parent];
    ids[i] = ids[parent];
    i = parent;
  }
  values[i] = value;
  ids[i] = id;
}

inline void top_k(const float* logits, int64_t size, int64_t k, float* values, int64_t* ids) {
  if (k == 0) return;
  for (int64_t i = 0; i < k; ++i) sift_up(values, ids, i, logits[i] == logits[i] ? logits[i] : -INFINITY, i);
  for (int64_t i = k; i < size; i += 16) {
    uint32_t better = greater(logits_at(logits, i, size), set1(values[0]));
    for (; better != 0; better &= better - 1) {
      const int64_t j = i + __builtin_ctz(better);
      if (logits[j] > values[0]) sift_down(values, ids, k, logits[j], j);
    }
  }
  for (int64_t last = k - 1; last > 0; --last) {  // the worst goes to the end, until the best is left
    const float value = values[last];
    const int64_t id = ids[last];
    values[last] = values[0];
    ids[last] = ids[0];
    sift_down(values, ids, last, value, id);
  }
}

extern const SamplingKernels sampling_kernels = {finite, argmax, logsumexp, top_k};

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
