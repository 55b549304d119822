// The products of attention over one tile: scores (query times keys); those with values are in products_*.h.
//
// Written order. A score is 16 interleaved partial sums over head_dim, each as the pool's `Products` have it, combined
// by the tree, times its key's scale where the format folds scales, times args.scale. A weight is its probability,
// times its value's scale where the format folds scales; the sum of probabilities is taken before.
// The direct forms put d on the vector's lanes, the tile forms put tokens there: the same sums either way.
#pragma once

namespace kvstrata {
namespace KVSTRATA_ISA {

#if defined(KVSTRATA_ISA_AVX512)
constexpr int kScoreRows = 4;
constexpr int kValueColumns = 4;
#else
constexpr int kScoreRows = 2;
constexpr int kValueColumns = 1;
#endif
constexpr int kValueRows = 4;

template <int R>
struct Rows {
  F16 v[R];
};

// What products with values have in common, whatever their elements; Products has weigh_columns.
template <class Products>
struct WeighedColumns {
  // sums [R, dim] of R rows over the elements [begin, end) of `source`, which they all see: goes on from what they
  // hold, or from +0 where `fresh`.
  template <class Source, int D, int R>
  static void weigh(const Source& source, const float* weights, int begin, int end, int padded, bool fresh,
                    float* sums) {
    const int dim = D > 0 ? D : padded;
    int d = 0;
    for (; d + 16 * kValueColumns <= dim; d += 16 * kValueColumns) {
      Products::template weigh_columns<Source, R, kValueColumns>(source, weights, begin, end, d, dim, fresh, sums);
    }
    for (; d < dim; d += 16) {
      Products::template weigh_columns<Source, R, 1>(source, weights, begin, end, d, dim, fresh, sums);
    }
  }
};

// Lane sums L, L + STEP, ... of R rows' scores against 16 tokens, combined down to one: depth first, so
// that few are alive at a time. keys: those of 16 tokens, dim being head_dim padded to whole vectors.
template <class Products, int L, int STEP, int R, int D>
KVSTRATA_INLINE Rows<R> dots(const float* query, const float* keys, int padded) {
  if constexpr (STEP == 16) {
    return Products::template lane<L, R, D>(query, keys, padded);
  } else {
    Rows<R> sum = dots<Products, L, 2 * STEP, R, D>(query, keys, padded);
    const Rows<R> other = dots<Products, L + STEP, 2 * STEP, R, D>(query, keys, padded);
    for (int r = 0; r < R; ++r) sum.v[r] = sum.v[r] + other.v[r];
    return sum;
  }
}

// scores [kStrip, kTile] of a strip against the vectors [first, end) of 16 tokens of a tile's keys.
template <class Format, int D>
inline void tile_scores(const float* query, int rows, const float* keys, const float* key_scales, int first, int end,
                        int padded, float scale, float* scores) {
  using Products = typename Format::Products;
  const int dim = D > 0 ? D : padded;
  const F16 factor = set1(scale);
  for (int c = first; c < end; ++c) {
    const float* tokens = keys + c * Products::key_floats(dim);
    for (int r = 0; r < rows; r += kScoreRows) {  // the strip is padded: rows past the last are unused
      const float* some = query + r * Products::query_floats(dim);
      const Rows<kScoreRows> sums = dots<Products, 0, 1, kScoreRows, D>(some, tokens, padded);
      for (int i = 0; i < kScoreRows; ++i) {
        F16 sum = sums.v[i];
        if constexpr (Format::kFolded) sum = sum * load(key_scales + c * 16);
        store(scores + (r + i) * kTile + c * 16, sum * factor);
      }
    }
  }
}

// One KV head's tokens [lo, hi) of the tile to come, brought into the cache a row at a time between the products of
// this one: all at once they would exceed what the machine can have in flight.
struct Upcoming {
  const Place* places;
  int lo;
  int hi;
  int head;
};

// R rows' sums over lanes, one vector a row, of the tokens [begin, end) among 16; multiply gives a token's lanes.
template <int R, class Multiply>
KVSTRATA_INLINE void sum_lanes(const Multiply& multiply, int begin, int end, F16* by_row) {
#if defined(KVSTRATA_ISA_BF16)
  // In registers: to store and load the lanes of 16 tokens takes longer than products of pairs.
  if (end - begin == 16) {
    F16 quarters[4][R];
    for (int q = 0; q < 4; ++q) {
      F16 sums[4][R];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) multiply(begin + q + 4 * i, sums[i]);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        quarters[q][r] = tree_quarter<Sum>(sums[0][r], sums[1][r], sums[2][r], sums[3][r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      by_row[r] = tree_of_quarters<Sum>(quarters[0][r], quarters[1][r], quarters[2][r], quarters[3][r]);
    }
    return;
  }
#endif
  F16 sums[R][16];
  if (end - begin < 16) {
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 16; ++i) sums[r][i] = zero();
    }
  }
  for (int j = begin; j < end; ++j) {
    F16 sum[R];
    multiply(j, sum);
    for (int r = 0; r < R; ++r) sums[r][j % 16] = sum[r];
  }
  for (int r = 0; r < R; ++r) by_row[r] = tree16<Sum>(sums[r]);
}

// scores [R, kTile] of R rows against the tokens [lo, hi) of a tile, keys read in place.
template <class Format, int D, int R>
inline void direct_scores(const AttentionArgs& args, const Place* places, const float* key_scales,
                          const Upcoming& upcoming, int head, int lo, int hi, const float* query, float* scores) {
  const F16 factor = set1(args.scale);
  const int count = Format::kScaled ? scales_per_vector(args.kv.type, args.head_dim) : 0;
  const auto multiply = [&](int j, F16* sums) __attribute__((always_inline)) {
    const typename Format::Row row = Format::row(args.kv, places[j], Part::key, head, key_scales + j * count);
    if (j >= upcoming.lo && j < upcoming.hi) {
      fetch_vector<Format, D>(args.kv, upcoming.places[j], Part::key, upcoming.head);
    }
    Format::Products::template lanes<Format, R, D>(query, row, args.head_dim, sums);
  };
  for (int c = lo / 16; c * 16 < hi; ++c) {
    F16 by_row[R];
    const int begin = c * 16 > lo ? c * 16 : lo;
    const int end = c * 16 + 16 < hi ? c * 16 + 16 : hi;
    sum_lanes<R>(multiply, begin, end, by_row);
    for (int r = 0; r < R; ++r) {
      F16 sum = by_row[r];
      if constexpr (Format::kFolded) sum = sum * load(key_scales + c * 16);
      store(scores + r * kTile + c * 16, sum * factor);
    }
  }
}

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
