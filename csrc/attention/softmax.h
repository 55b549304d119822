// The softmax of up to sixteen query rows over one tile, and the fold of a tile into what came before.
//
// Written order. m: the largest visible score. p_j = exp(s_j - m), as it is put among the weights. l: the sum of p in
// 16 interleaved lanes (lane j mod 16, increasing j, hidden ones +0) and the tree. A state (M, L, O), at first
// (-inf, 0, 0), takes a tile's (m, l, o) by M' = max(M, m), a = exp(M - M'), b = exp(m - M'), L = l b + L a,
// O = o b + O a (products with a rounded, then one fused multiply-add); a tile in which a row sees nothing leaves its
// state alone.
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

// The largest of a row's scores in each lane; kWhole: the row sees the whole tile.
template <bool kWhole>
KVSTRATA_INLINE F16 largest_lanes(const float* scores, int lo, int hi) {
  const F16 nothing = set1(-INFINITY);
  F16 largest = nothing;
#pragma GCC unroll 4
  for (int c = kWhole ? 0 : lo / 16; c * 16 < (kWhole ? kTile : hi); ++c) {
    const F16 score = load(scores + 16 * c);
    largest = max(largest, kWhole ? score : select(lanes_between(c, lo, hi), score, nothing));
  }
  return largest;
}

// A row's scores become probabilities relative to its maximum, of which each lane's sum is returned.
template <class Products, bool kWhole>
KVSTRATA_INLINE F16 soften_row(float* scores, int lo, int hi, F16 largest) {
  F16 sum = zero();
#pragma GCC unroll 4
  for (int c = kWhole ? 0 : lo / 16; c * 16 < (kWhole ? kTile : hi); ++c) {
    F16 p = exp_to_88(load(scores + 16 * c) - largest);
    if constexpr (!kWhole) p = select(lanes_between(c, lo, hi), p, zero());
    sum = sum + Products::put_weights(scores, c, p);
  }
  return sum;
}

// The tree over the lanes of each of `rows` vectors; with more than 4 all 16 are read.
template <class Op>
inline void trees(const F16* by_row, int rows, float* out) {
  if (rows > 4) return store(out, tree16<Op>(by_row));
  for (int r = 0; r < rows; ++r) out[r] = tree<Op>(by_row[r]);
}

// scores [kStrip, kTile] become probabilities relative to each row's maximum, as products take them; m, l: [kStrip].
template <class Products>
inline void soften(const Visible& visible, int rows, float* scores, float* m, float* l) {
  const int* lo = visible.lo;
  const int* hi = visible.hi;
  F16 by_row[kStrip];
  if (rows > 4 && rows < kStrip) {
    for (int r = 0; r < kStrip; ++r) by_row[r] = zero();
  }
  for (int r = 0; r < rows; ++r) {
    const float* row = scores + r * kTile;
    const bool whole = lo[r] == 0 && hi[r] == kTile;
    by_row[r] = whole ? largest_lanes<true>(row, 0, kTile) : largest_lanes<false>(row, lo[r], hi[r]);
  }
  trees<Max>(by_row, rows, m);
  for (int r = 0; r < rows; ++r) {
    float* row = scores + r * kTile;
    const F16 largest = set1(m[r]);
    by_row[r] = lo[r] == 0 && hi[r] == kTile ? soften_row<Products, true>(row, 0, kTile, largest)
                                             : soften_row<Products, false>(row, lo[r], hi[r], largest);
  }
  trees<Sum>(by_row, rows, l);
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
  const F16 a = exp_to_88(before - largest);
  const F16 b = exp_to_88(tile - largest);
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
