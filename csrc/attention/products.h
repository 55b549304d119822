// The products of attention over one tile: scores (query times keys) and values weighted by probabilities.
//
// Written order. A score is 16 interleaved partial sums over head_dim (lane l takes d = l, 16 + l, ...: the
// first term a product, the rest fused multiply-adds in increasing d), combined by the tree, times its key's scale
// where the format folds scales, times args.scale. A weight is its probability, times its value's scale where the
// format folds scales; the sum of probabilities is taken before. A weighted value
// is folded from +0 over the visible tokens in increasing order by fused multiply-adds.
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

// Lane sums L, L + STEP, ... of R rows' scores against 16 tokens, combined down to one: depth first, so
// that few are alive at a time. keys: [dim, 16], dim
// being head_dim padded to whole vectors.
template <int L, int STEP, int R, int D>
KVSTRATA_INLINE Rows<R> dots(const float* query, const float* keys, int padded) {
  Rows<R> sum;
  if constexpr (STEP == 16) {
    const int dim = D > 0 ? D : padded;
    const F16 first = load(keys + L * 16);
    for (int r = 0; r < R; ++r) sum.v[r] = set1(query[r * dim + L]) * first;
#pragma GCC unroll 4
    for (int d = 16 + L; d < dim; d += 16) {
      const F16 key = load(keys + d * 16);
      for (int r = 0; r < R; ++r) sum.v[r] = fma(set1(query[r * dim + d]), key, sum.v[r]);
    }
  } else {
    sum = dots<L, 2 * STEP, R, D>(query, keys, padded);
    const Rows<R> other = dots<L + STEP, 2 * STEP, R, D>(query, keys, padded);
    for (int r = 0; r < R; ++r) sum.v[r] = sum.v[r] + other.v[r];
  }
  return sum;
}

// scores [kStrip, kTile] of a strip against the vectors [first, end) of 16 tokens of a tile's keys
// [4, dim, 16].
template <int D, bool FOLDED>
inline void tile_scores(const float* query, int rows, const float* keys, const float* key_scales, int first, int end,
                        int padded, float scale, float* scores) {
  const int dim = D > 0 ? D : padded;
  const F16 factor = set1(scale);
  for (int c = first; c < end; ++c) {
    const float* tokens = keys + c * 16 * dim;
    for (int r = 0; r < rows; r += kScoreRows) {  // the strip is padded: rows past the last are unused
      const Rows<kScoreRows> sums = dots<0, 1, kScoreRows, D>(query + r * dim, tokens, padded);
      for (int i = 0; i < kScoreRows; ++i) {
        F16 sum = sums.v[i];
        if constexpr (FOLDED) sum = sum * load(key_scales + c * 16);
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

// scores [R, kTile] of R rows against the tokens [lo, hi) of a tile, keys read in place.
template <class Format, int D, int R>
inline void direct_scores(const AttentionArgs& args, const Place* places, const float* key_scales,
                          const Upcoming& upcoming, int head, int lo, int hi, const float* query, float* scores) {
  const int dim = D > 0 ? D : padded_dim(args.head_dim);
  const F16 factor = set1(args.scale);
  const int count = Format::kScaled ? scales_per_vector(args.kv.type, args.head_dim) : 0;
  for (int c = lo / 16; c * 16 < hi; ++c) {
    F16 sums[R][16];
    const int begin = c * 16 > lo ? c * 16 : lo;
    const int end = c * 16 + 16 < hi ? c * 16 + 16 : hi;
    if (end - begin < 16) {
      for (int r = 0; r < R; ++r) {
        for (int i = 0; i < 16; ++i) sums[r][i] = zero();
      }
    }
    for (int j = begin; j < end; ++j) {
      const typename Format::Row row = Format::row(args.kv, places[j], Part::key, head, key_scales + j * count);
      if (j >= upcoming.lo && j < upcoming.hi) {
        fetch_vector<Format, D>(args.kv, upcoming.places[j], Part::key, upcoming.head);
      }
      F16 sum[R];
      const F16 first = Format::template part<D>(row, 0, args.head_dim);
      for (int r = 0; r < R; ++r) sum[r] = load(query + r * dim) * first;
#pragma GCC unroll 8
      for (int d = 16; d < dim; d += 16) {
        const F16 key = Format::template part<D>(row, d, args.head_dim);
        for (int r = 0; r < R; ++r) sum[r] = fma(load(query + r * dim + d), key, sum[r]);
      }
      for (int r = 0; r < R; ++r) sums[r][j - c * 16] = sum[r];
    }
    for (int r = 0; r < R; ++r) {
      F16 sum = tree16<Sum>(sums[r]);
      if constexpr (Format::kFolded) sum = sum * load(key_scales + c * 16);
      store(scores + r * kTile + c * 16, sum * factor);
    }
  }
}

// Values of a converted tile, [kTile, dim].
struct TileValues {
  const float* values;
  int head_dim;

  KVSTRATA_INLINE void prefetch(int) const {}
  KVSTRATA_INLINE const float* row(int j) const { return values + j * head_dim; }
  KVSTRATA_INLINE F16 load(const float* row, int d) const { return KVSTRATA_ISA::load(row + d); }
};

// Values read in place.
template <class Format, int D>
struct DirectValues {
  const KvView& kv;
  const Place* places;
  const float* scales;
  const Upcoming& upcoming;
  int head;
  int head_dim;
  int count;  // of scales a vector

  KVSTRATA_INLINE void prefetch(int j) const {
    if (j >= upcoming.lo && j < upcoming.hi) {
      fetch_vector<Format, D>(kv, upcoming.places[j], Part::value, upcoming.head);
    }
  }

  KVSTRATA_INLINE typename Format::Row row(int j) const {
    return Format::row(kv, places[j], Part::value, head, scales + j * count);
  }
  KVSTRATA_INLINE F16 load(typename Format::Row row, int d) const { return Format::template part<D>(row, d, head_dim); }
};

// sums [R, dim], columns [d, d + 16 C): goes on from what they hold, or from +0 where `fresh`.
template <class Source, int R, int C>
KVSTRATA_INLINE void weigh_columns(const Source& source, const float* weights, int begin, int end, int d,
                                   int dim, bool fresh, float* sums) {
  const bool first = d == 0;
  F16 sum[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) sum[r][c] = fresh ? zero() : load(sums + r * dim + d + 16 * c);
  }
  for (int j = begin; j < end; ++j) {
    const auto row = source.row(j);
    if (first) source.prefetch(j);
    for (int c = 0; c < C; ++c) {
      const F16 value = source.load(row, d + 16 * c);
      for (int r = 0; r < R; ++r) sum[r][c] = fma(set1(weights[r * kTile + j]), value, sum[r][c]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) store(sums + r * dim + d + 16 * c, sum[r][c]);
  }
}

template <class Source, int D, int R>
inline void weigh(const Source& source, const float* weights, int begin, int end, int padded, bool fresh,
                  float* sums) {
  const int dim = D > 0 ? D : padded;
  int d = 0;
  for (; d + 16 * kValueColumns <= dim; d += 16 * kValueColumns) {
    weigh_columns<Source, R, kValueColumns>(source, weights, begin, end, d, dim, fresh, sums);
  }
  for (; d < dim; d += 16) weigh_columns<Source, R, 1>(source, weights, begin, end, d, dim, fresh, sums);
}

// R rows that see [lo[r], hi[r]): together over the tokens that all see, alone over the others, since a
// hidden value must not even meet a weight of zero (0 * NaN).
template <class Source, int D, int R>
inline void weigh_rows(const Source& source, const float* weights, const int* lo, const int* hi, int padded,
                       float* sums) {
  const int dim = D > 0 ? D : padded;
  int begin = lo[0];
  int end = hi[0];
  int earliest = lo[0];
  for (int r = 1; r < R; ++r) {
    begin = lo[r] > begin ? lo[r] : begin;
    end = hi[r] < end ? hi[r] : end;
    earliest = lo[r] < earliest ? lo[r] : earliest;
  }
  if (begin >= end) {
    for (int r = 0; r < R; ++r) {
      if (lo[r] < hi[r]) {
        weigh<Source, D, 1>(source, weights + r * kTile, lo[r], hi[r], padded, true, sums + r * dim);
      }
    }
    return;
  }
  const bool fresh = earliest == begin;
  if (!fresh) {
    for (int r = 0; r < R; ++r) {
      weigh<Source, D, 1>(source, weights + r * kTile, lo[r], begin, padded, true, sums + r * dim);
    }
  }
  weigh<Source, D, R>(source, weights, begin, end, padded, fresh, sums);
  for (int r = 0; r < R; ++r) {
    if (hi[r] > end) {
      weigh<Source, D, 1>(source, weights + r * kTile, end, hi[r], padded, false, sums + r * dim);
    }
  }
}

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
