// The softmax of up to sixteen query rows over one tile, and the fold of a tile into what came before.
//
// Written order. m: the largest visible score. p_j = exp(s_j - m). l: the sum of p in 16 interleaved lanes
// (lane j mod 16, increasing j, hidden ones +0) and the tree. A state (M, L, O), at first (-inf, 0, 0), takes
// a tile's (m, l, o) by M' = max(M, m), a = exp(M - M'), b = exp(m - M'), L = l b + L a, O = o b + O a (products
// with a rounded, then one fused multiply-add); a tile in which a row sees nothing leaves its state alone.
#pragma once

namespace kvstrata {
namespace KVSTRATA_ISA {

// Row r of a strip sees the tile's tokens [lo[r], hi[r]); none where lo[r] >= hi[r], as for rows past the last.
struct Visible {
  int lo[kStrip];
  int hi[kStrip];
  int lowest;   // over the rows that see something
  int highest;

  bool any() const { return lowest < highest; }
};

// Bits of the lanes 16 c + i that lie in [lo, hi).
inline uint32_t lanes_between(int c, int lo, int hi) {
  const int begin = lo - 16 * c;
  const int end = hi - 16 * c;
  const uint32_t from = begin <= 0 ? 0xffffu : 0xffffu << begin & 0xffffu;
  return end >= 16 ? from : from & ((1u << end) - 1u);
}

// scores [kStrip, kTile] become probabilities relative to each row's maximum; m, l: [kStrip].
inline void soften(const Visible& visible, int rows, float* scores, float* m, float* l) {
  const F16 nothing = set1(-INFINITY);
  F16 by_row[kStrip];
  for (int r = 0; r < kStrip; ++r) by_row[r] = nothing;
  for (int r = 0; r < rows; ++r) {
    const int lo = visible.lo[r];
    const int hi = visible.hi[r];
    if (lo >= hi) continue;
    for (int c = lo / 16; c * 16 < hi; ++c) {
      const F16 score = load(scores + r * kTile + 16 * c);
      by_row[r] = max(by_row[r], select(lanes_between(c, lo, hi), score, nothing));
    }
  }
  store(m, tree16<Max>(by_row));
  for (int r = 0; r < kStrip; ++r) by_row[r] = zero();
  for (int r = 0; r < rows; ++r) {
    const int lo = visible.lo[r];
    const int hi = visible.hi[r];
    if (lo >= hi) continue;
    const F16 largest = set1(m[r]);
    for (int c = lo / 16; c * 16 < hi; ++c) {
      float* score = scores + r * kTile + 16 * c;
      const F16 p = select(lanes_between(c, lo, hi), exp(load(score) - largest), zero());
      store(score, p);
      by_row[r] = by_row[r] + p;
    }
  }
  store(l, tree16<Sum>(by_row));
}

// Probabilities become weights of bare codes: each times its value's scale. Lanes of hidden tokens are left undefined.
inline void scale_weights(const Visible& visible, int rows, const float* value_scales, float* scores) {
  for (int r = 0; r < rows; ++r) {
    for (int c = visible.lo[r] / 16; c * 16 < visible.hi[r]; ++c) {
      float* weight = scores + r * kTile + 16 * c;
      store(weight, load(weight) * load(value_scales + 16 * c));
    }
  }
}

// Folds a tile (m, l: [kStrip]; o: [rows, dim]) into the state. A row with l = 0 saw nothing: a row that
// sees a token has l >= 1 or NaN.
inline void fold_tile(int rows, int dim, const float* m, const float* l, const float* o, float* max_state,
                      float* sum_state, float* out_state) {
  uint32_t live = 0;
  for (int r = 0; r < rows; ++r) live |= (l[r] == 0.0f ? 0u : 1u) << r;
  const F16 before = load(max_state);
  const F16 tile = load(m);
  const F16 largest = max(before, tile);
  const F16 a = exp(before - largest);
  const F16 b = exp(tile - largest);
  const F16 sum = load(sum_state);
  store(max_state, select(live, largest, before));
  store(sum_state, select(live, fma(load(l), b, sum * a), sum));
  float old_factor[kStrip];
  float new_factor[kStrip];
  store(old_factor, a);
  store(new_factor, b);
  for (int r = 0; r < rows; ++r) {
    if ((live >> r & 1u) == 0) continue;
    const F16 keep = set1(old_factor[r]);
    const F16 add = set1(new_factor[r]);
    float* state = out_state + r * dim;
    for (int d = 0; d < dim; d += 16) store(state + d, fma(load(o + r * dim + d), add, load(state + d) * keep));
  }
}

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
