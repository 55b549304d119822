// Products of float32 by what a pool's elements become as float32.
//
// Written order. A lane's partial sum of a score: lane l takes d = l, 16 + l, ...: the first term a product, the rest
// fused multiply-adds in increasing d. A weighted value is folded from +0 over the visible tokens in increasing order
// by fused multiply-adds.
#pragma once

namespace kvstrata {
namespace KVSTRATA_ISA {

struct FloatProducts : WeighedColumns<FloatProducts> {
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
    KVSTRATA_INLINE F16 load(typename Format::Row row, int d) const {
      return Format::template part<D>(row, d, head_dim);
    }
  };

  // Floats of a query, and of 16 tokens' keys in a converted tile, [dim, 16].
  static constexpr int query_floats(int dim) { return dim; }
  static constexpr int key_floats(int dim) { return 16 * dim; }
  // Dimensions that sixteen floats of a row of keys hold.
  static constexpr int kSquareDims = 16;

  // Makes a query of query_floats(dim) floats what products take.
  static void prepare_query(float*, int) {}

  static KVSTRATA_INLINE F16 put_weights(float* row, int c, F16 p) {
    store(row + 16 * c, p);
    return p;
  }

  // Lane L of R rows' scores against 16 tokens of a tile.
  template <int L, int R, int D>
  static KVSTRATA_INLINE Rows<R> lane(const float* query, const float* keys, int padded) {
    const int dim = D > 0 ? D : padded;
    Rows<R> sum;
    const F16 first = load(keys + L * 16);
    for (int r = 0; r < R; ++r) sum.v[r] = set1(query[r * dim + L]) * first;
#pragma GCC unroll 4
    for (int d = 16 + L; d < dim; d += 16) {
      const F16 key = load(keys + d * 16);
      for (int r = 0; r < R; ++r) sum.v[r] = fma(set1(query[r * dim + d]), key, sum.v[r]);
    }
    return sum;
  }

  // sums [R]: all lanes of R rows' scores against one token.
  template <class Format, int R, int D>
  static KVSTRATA_INLINE void lanes(const float* query, typename Format::Row row, int head_dim, F16* sums) {
    const int dim = D > 0 ? D : padded_dim(head_dim);
    const F16 first = Format::template part<D>(row, 0, head_dim);
    for (int r = 0; r < R; ++r) sums[r] = load(query + r * dim) * first;
#pragma GCC unroll 8
    for (int d = 16; d < dim; d += 16) {
      const F16 key = Format::template part<D>(row, d, head_dim);
      for (int r = 0; r < R; ++r) sums[r] = fma(load(query + r * dim + d), key, sums[r]);
    }
  }

  // kSquareDims elements of a key from d on.
  template <class Format, int D>
  static KVSTRATA_INLINE F16 square(typename Format::Row row, int d, int head_dim) {
    return Format::template part<D>(row, d, head_dim);
  }

  // Converts the values of the tokens [lo, hi) of a tile.
  template <class Format, int D>
  static void convert_values(const AttentionArgs& args, const Place* places, const float* scales, int head, int lo,
                             int hi, float* values) {
    const int dim = D > 0 ? D : padded_dim(args.head_dim);
    const int count = Format::kScaled ? scales_per_vector(args.kv.type, args.head_dim) : 0;
    for (int j = lo; j < hi; ++j) {
      const auto row = Format::row(args.kv, places[j], Part::value, head, scales + j * count);
      for (int d = 0; d < dim; d += 16) store(values + j * dim + d, Format::template part<D>(row, d, args.head_dim));
    }
  }

  // sums [R, dim], columns [d, d + 16 C): goes on from what they hold, or from +0 where `fresh`.
  template <class Source, int R, int C>
  static KVSTRATA_INLINE void weigh_columns(const Source& source, const float* weights, int begin, int end, int d,
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

  // R rows that see [lo[r], hi[r]): together over the tokens that all see, alone over the others, since a
  // hidden value must not even meet a weight of zero (0 * NaN).
  template <class Source, int D, int R>
  static void weigh_rows(const Source& source, const float* weights, const int* lo, const int* hi, int padded,
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

  // One row goes on over the tokens [lo, hi).
  template <class Source, int D>
  static void weigh_more(const Source& source, const float* weights, int lo, int hi, int padded, float* sums) {
    weigh<Source, D, 1>(source, weights, lo, hi, padded, false, sums);
  }
};

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
