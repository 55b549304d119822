// Products of bf16 by bf16 into float32, two at a time: those of attention over bf16 pools.
//
// Written order. The query is rounded to bf16. A lane's partial sum of a score: lane l takes the dimensions
// (2l, 2l + 1), then (32 + 2l, 33 + 2l), ..., those past head_dim left out, from +0 by `fma` of pairs. A probability is
// rounded to bf16 and counts as rounded in the row's sum, so that weights sum to one. A weighted value is folded from
// +0 over the pairs of tokens (2j, 2j + 1) of a tile of which the row sees one or both, in increasing order by `fma` of
// pairs; the one that it does not see has weight and value +0.
#pragma once

namespace kvstrata {
namespace KVSTRATA_ISA {

struct PairProducts : WeighedColumns<PairProducts> {
  // Values of a converted tile, pairs of tokens.
  struct TileValues {
    const float* values;
    int head_dim;

    struct Row {
      const float* pair;
    };

    KVSTRATA_INLINE void prefetch(int) const {}
    KVSTRATA_INLINE Row row(int j) const { return {values + j * head_dim * kPairFloats}; }
    template <int C>
    KVSTRATA_INLINE void load(Row row, int d, Pairs* pairs) const {
      for (int c = 0; c < C; ++c) pairs[c] = load_values(row.pair, d + 16 * c, head_dim);
    }
    KVSTRATA_INLINE Pairs alone(int token, int d) const {
      return load_value_alone(row(token / 2).pair, d, head_dim, token % 2 != 0);
    }
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
    int count;

    struct Row {
      const Bf16* even;
      const Bf16* odd;
    };

    KVSTRATA_INLINE void prefetch(int j) const {
#pragma GCC unroll 2
      for (int token = 2 * j; token < 2 * j + 2; ++token) {
        if (token >= upcoming.lo && token < upcoming.hi) {
          fetch_vector<Format, D>(kv, upcoming.places[token], Part::value, upcoming.head);
        }
      }
    }
    KVSTRATA_INLINE const Bf16* value(int token) const {
      return Format::row(kv, places[token], Part::value, head, nullptr);
    }
    KVSTRATA_INLINE Row row(int j) const { return {value(2 * j), value(2 * j + 1)}; }
    template <int C>
    KVSTRATA_INLINE void load(Row row, int d, Pairs* pairs) const {
      pair_up<C>(row.even + d, row.odd + d, (D > 0 ? D : head_dim) - d, pairs);
    }
    KVSTRATA_INLINE Pairs alone(int token, int d) const {
      return load_alone(value(token) + d, (D > 0 ? D : head_dim) - d, token % 2 != 0);
    }
  };

  static constexpr int query_floats(int dim) { return (dim + 31) / 32 * 16 * kPairFloats; }
  static constexpr int key_floats(int dim) { return 16 * (dim / 2) * kPairFloats; }
  static constexpr int kSquareDims = 32 / kPairFloats;

  // query: [dim] floats, of which the first are overwritten.
  static void prepare_query(float* query, int dim) {
    for (int d = 0; d < dim; d += 32) {
      Bf16 rounded[32] = {};
      store(rounded, load(query + d));
      if (d + 16 < dim) store(rounded + 16, load(query + d + 16));
      store_query(query + d / 2 * kPairFloats, rounded);
    }
  }

  static KVSTRATA_INLINE F16 put_weights(float* row, int c, F16 p) { return store_weights(row, c, p); }

  template <int L, int R, int D>
  static KVSTRATA_INLINE Rows<R> lane(const float* query, const float* keys, int padded) {
    const int dim = D > 0 ? D : padded;
    Rows<R> sum;
    for (int r = 0; r < R; ++r) sum.v[r] = zero();
#pragma GCC unroll 4
    for (int i = L; i < dim / 2; i += 16) {
      const Pairs key = load_pairs(keys + i * 16 * kPairFloats);
      for (int r = 0; r < R; ++r) sum.v[r] = fma(query_pair(query + r * query_floats(dim), i), key, sum.v[r]);
    }
    return sum;
  }

  template <class Format, int R, int D>
  static KVSTRATA_INLINE void lanes(const float* query, typename Format::Row row, int head_dim, F16* sums) {
    const int dim = D > 0 ? D : head_dim;
    for (int r = 0; r < R; ++r) sums[r] = zero();
#pragma GCC unroll 8
    for (int d = 0; d < dim; d += 32) {
      const Pairs key = load_pairs(row + d, dim - d < 32 ? dim - d : 32);
      for (int r = 0; r < R; ++r) {
        sums[r] = fma(load_pairs(query + r * query_floats(dim) + d / 2 * kPairFloats), key, sums[r]);
      }
    }
  }

#if defined(KVSTRATA_ISA_BF16)
  template <class Format, int D>
  static KVSTRATA_INLINE F16 square(typename Format::Row row, int d, int head_dim) {
    return {_mm512_castsi512_ps(load_pairs(row + d, (D > 0 ? D : head_dim) - d).v)};
  }

  template <class Format, int D>
  static void convert_values(const AttentionArgs& args, const Place* places, const float*, int head, int lo, int hi,
                             float* values) {
    const int dim = D > 0 ? D : padded_dim(args.head_dim);
    const Upcoming nothing{};
    const DirectValues<Format, D> source{args.kv, places, nullptr, nothing, head, args.head_dim, 0};
    for (int j = lo / 2; 2 * j < hi; ++j) {
      float* pair = values + j * dim;
      const bool both = 2 * j >= lo && 2 * j + 1 < hi;
      for (int d = 0; d < dim; d += 16) {
        Pairs pairs;
        if (both) {
          source.template load<1>(source.row(j), d, &pairs);
        } else {
          pairs = source.alone(2 * j >= lo ? 2 * j : 2 * j + 1, d);
        }
        _mm512_storeu_si512(pair + d, pairs.v);
      }
    }
  }
#else
  template <class Format, int D>
  static KVSTRATA_INLINE F16 square(typename Format::Row row, int d, int head_dim) {
    return FloatProducts::square<Format, D>(row, d, head_dim);
  }
  template <class Format, int D>
  static void convert_values(const AttentionArgs& args, const Place* places, const float* scales, int head, int lo,
                             int hi, float* values) {
    FloatProducts::convert_values<Format, D>(args, places, scales, head, lo, hi, values);
  }
#endif

  // R rows over the pairs [begin, end), which they see whole.
  template <class Source, int R, int C>
  static KVSTRATA_INLINE void weigh_columns(const Source& source, const float* weights, int begin, int end, int d,
                                            int dim, bool fresh, float* sums) {
    const bool first = d == 0;
    F16 sum[R][C];
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) sum[r][c] = fresh ? zero() : load(sums + r * dim + d + 16 * c);
    }
    for (int j = begin; j < end; ++j) {
      if (first) source.prefetch(j);
      Pairs value[C];
      source.template load<C>(source.row(j), d, value);
      for (int r = 0; r < R; ++r) {
        const Pairs weight = weight_pair(weights + r * kTile, j);
        for (int c = 0; c < C; ++c) sum[r][c] = fma(weight, value[c], sum[r][c]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) store(sums + r * dim + d + 16 * c, sum[r][c]);
    }
  }

  // One row goes on with a token whose neighbour it does not see.
  template <class Source>
  static void weigh_alone(const Source& source, const float* weights, int token, int dim, float* sums) {
    const Pairs weight = weight_pair(weights, token / 2);
    for (int d = 0; d < dim; d += 16) store(sums + d, fma(weight, source.alone(token, d), load(sums + d)));
  }

  // One row goes on over the tokens [lo, hi).
  template <class Source, int D>
  static void weigh_more(const Source& source, const float* weights, int lo, int hi, int padded, float* sums) {
    const int dim = D > 0 ? D : padded;
    if (lo >= hi) return;
    if (lo % 2 != 0) weigh_alone(source, weights, lo++, dim, sums);
    if (lo / 2 < hi / 2) weigh<Source, D, 1>(source, weights, lo / 2, hi / 2, padded, false, sums);
    if (hi % 2 != 0 && lo < hi) weigh_alone(source, weights, hi - 1, dim, sums);
  }

  // R rows that see [lo[r], hi[r]): together over the pairs that all see whole, alone over the others.
  template <class Source, int D, int R>
  static void weigh_rows(const Source& source, const float* weights, const int* lo, const int* hi, int padded,
                         float* sums) {
    const int dim = D > 0 ? D : padded;
    int begin = 0;
    int end = kTile / 2;
    bool fresh = true;
    for (int r = 0; r < R; ++r) {
      begin = (lo[r] + 1) / 2 > begin ? (lo[r] + 1) / 2 : begin;
      end = hi[r] / 2 < end ? hi[r] / 2 : end;
    }
    for (int r = 0; r < R; ++r) fresh = fresh && lo[r] == 2 * begin;
    const bool together = begin < end;
    if (!together || !fresh) {
      for (int r = 0; r < R; ++r) {
        const int until = together ? 2 * begin : hi[r];
        memset(sums + r * dim, 0, sizeof(float) * static_cast<size_t>(dim));
        weigh_more<Source, D>(source, weights + r * kTile, lo[r], until, padded, sums + r * dim);
      }
    }
    if (!together) return;
    weigh<Source, D, R>(source, weights, begin, end, padded, fresh, sums);
    for (int r = 0; r < R; ++r) {
      weigh_more<Source, D>(source, weights + r * kTile, 2 * end, hi[r], padded, sums + r * dim);
    }
  }
};

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
