// Which vectors the rotation of int4 keys is defined for, and its matrices' signs.
#pragma once

#include <stdint.h>

namespace kvstrata {

constexpr int kMaxRotated = 1024;

// The factor of head_dim that is no power of two: 1, 12 or 20; 0 where there is no rotation of this size.
static inline int odd_factor(int64_t head_dim) {
  if (head_dim < 2 || head_dim > kMaxRotated) return 0;
  const int factor = head_dim % 20 == 0 ? 20 : head_dim % 12 == 0 ? 12 : 1;
  const int64_t rest = head_dim / factor;
  return (rest & (rest - 1)) == 0 ? factor : 0;
}

static inline bool can_rotate(int64_t head_dim) { return odd_factor(head_dim) != 0; }

// Element (i, j) of the Hadamard matrix of order p + 1, p = 11 or 19: the first construction of Paley (On Orthogonal
// Matrices, Journal of Mathematics and Physics 12, 1933).
constexpr float paley_sign(int p, int i, int j) {
  if (i == 0) return 1.0f;
  if (j == 0) return -1.0f;
  if (i == j) return 1.0f;
  const int difference = ((i - j) % p + p) % p;
  for (int root = 1; root < p; ++root) {
    if (root * root % p == difference) return 1.0f;
  }
  return -1.0f;
}

template <int SIZE>
struct PaleySigns {
  float at[SIZE][SIZE];
  constexpr PaleySigns() : at{} {
    for (int i = 0; i < SIZE; ++i) {
      for (int j = 0; j < SIZE; ++j) at[i][j] = paley_sign(SIZE - 1, i, j);
    }
  }
};

constexpr PaleySigns<12> kPaley12{};
constexpr PaleySigns<20> kPaley20{};

}  // namespace kvstrata
