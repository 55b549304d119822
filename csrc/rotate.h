// The rotation of int4 queries and keys: a Hadamard matrix over the head, divided by its norm.
//
// It leaves dot products as they are and spreads a channel that is larger than the others over all of them, so that
// a few bits do for all (QuaRot, arXiv 2404.00456).
// Written order. head_dim = 2^k m, elements (a, b), b < m: butterflies over a with distances 1, 2, 4, ... (a pair
// becomes its sum and its difference), then for m = 12 and 20 each b the sum over i of sign(b, i) x_i, left to
// right, then all times 1 / sqrt(head_dim) rounded to float.
#pragma once

#include "kv_rotation.h"
#include "simd.h"

namespace kvstrata {
namespace KVSTRATA_ISA {

template <int SIZE>
inline void mix(float* x, int dim, const PaleySigns<SIZE>& signs) {
  float mixed[SIZE];
  for (float* row = x; row < x + dim; row += SIZE) {
    for (int b = 0; b < SIZE; ++b) {
      float sum = signs.at[b][0] * row[0];
      for (int i = 1; i < SIZE; ++i) sum = sum + signs.at[b][i] * row[i];
      mixed[b] = sum;
    }
    memcpy(row, mixed, sizeof(mixed));
  }
}

// x: [dim], can_rotate(dim), changed in place.
inline void rotate(float* x, int dim) {
  const int factor = odd_factor(dim);
  for (int distance = factor; distance < dim; distance *= 2) {
    for (int start = 0; start < dim; start += 2 * distance) {
      float* low = x + start;
      float* high = low + distance;
      for (int i = 0; i < distance; ++i) {
        const float sum = low[i] + high[i];
        high[i] = low[i] - high[i];
        low[i] = sum;
      }
    }
  }
  if (factor == 12) mix(x, dim, kPaley12);
  if (factor == 20) mix(x, dim, kPaley20);
  const float norm = static_cast<float>(1.0 / sqrt(static_cast<double>(dim)));
  for (int i = 0; i < dim; ++i) x[i] = x[i] * norm;
}

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
