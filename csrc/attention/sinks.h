// A tile that holds sinks: the first tokens of a sequence, which every later row sees beside its window.
//
// Written order: that of any tile, over all its visible tokens in increasing order; only that the scores of sinks
// come from the sink query, each raised by the row's shift. A row that hides nothing yet has the same bits in both queries, and so the result of a
// sequence without retention. Source: StreamingLLM, arXiv 2309.17453, whose keys move with the window; here they stay
// as they were stored and the query moves.
#pragma once

namespace kvstrata {
namespace KVSTRATA_ISA {

// Bits of the lanes 16 c + i that lie in [lo, hi), which may be empty or elsewhere.
inline uint32_t lanes_seen(int c, int lo, int hi) {
  return lo >= hi || hi <= 16 * c || lo >= 16 * c + 16 ? 0u : lanes_between(c, lo, hi);
}

// The sinks that the rows of a strip see, taken out of what they see of the tile.
inline Visible take_sinks(const AttentionItem& item, const TilePlaces& here, Visible* visible) {
  Visible sinks{};
  sinks.highest = 0;
  visible->lowest = kTile;
  const int count = item.sinks - here.tile * kTile;
  for (int r = 0; r < kStrip; ++r) {
    sinks.hi[r] = visible->hi[r] < 0 ? 0 : visible->hi[r] > count ? count : visible->hi[r];
    sinks.highest = sinks.hi[r] > sinks.highest ? sinks.hi[r] : sinks.highest;
    if (visible->lo[r] < sinks.hi[r]) visible->lo[r] = sinks.hi[r];
    if (visible->lo[r] < visible->hi[r] && visible->lo[r] < visible->lowest) visible->lowest = visible->lo[r];
  }
  return sinks;
}

// The lanes of chunk c that row r sees.
inline uint32_t row_lanes(const Visible& sinks, const Visible& window, int r, int c) {
  return lanes_seen(c, sinks.lo[r], sinks.hi[r]) | lanes_seen(c, window.lo[r], window.hi[r]);
}

// `soften` and `scale_weights` over two ranges.
template <class Format>
inline void soften_both(const Visible& sinks, const Visible& window, int rows, const float* value_scales,
                        float* scores, float* m, float* l) {
  const F16 nothing = set1(-INFINITY);
  F16 by_row[kStrip];
  for (int r = 0; r < kStrip; ++r) by_row[r] = nothing;
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < kTile / 16; ++c) {
      const uint32_t seen = row_lanes(sinks, window, r, c);
      if (seen != 0) by_row[r] = max(by_row[r], select(seen, load(scores + r * kTile + 16 * c), nothing));
    }
  }
  store(m, tree16<Max>(by_row));
  for (int r = 0; r < kStrip; ++r) by_row[r] = zero();
  for (int r = 0; r < rows; ++r) {
    const F16 largest = set1(m[r]);
    for (int c = 0; c < kTile / 16; ++c) {
      const uint32_t seen = row_lanes(sinks, window, r, c);
      if (seen == 0) continue;
      const F16 score = load(scores + r * kTile + 16 * c);
      const F16 p = Format::Products::put_weights(scores + r * kTile, c, select(seen, exp(score - largest), zero()));
      by_row[r] = by_row[r] + p;
      if constexpr (Format::kFolded) store(scores + r * kTile + 16 * c, p * load(value_scales + 16 * c));
    }
  }
  store(l, tree16<Sum>(by_row));
}

// Of each row the sinks with what follows them at once, then the rest: rows that see something of the rest see all
// sinks before it.
template <class Products, class Source, int D>
inline void weigh_both(const Source& source, const Visible& sinks, const Visible& window, int rows,
                       const float* weights, int dim, float* sums) {
  Visible first = sinks;
  for (int r = 0; r < rows; ++r) {
    if (window.lo[r] == sinks.hi[r] && window.lo[r] < window.hi[r]) first.hi[r] = window.hi[r];
  }
  strip_values<Products, Source, D>(source, first, rows, weights, dim, sums);
  for (int r = 0; r < rows; ++r) {
    if (window.lo[r] >= window.hi[r] || first.hi[r] == window.hi[r]) continue;
    Products::template weigh_more<Source, D>(source, weights + r * kTile, window.lo[r], window.hi[r], dim,
                                             sums + r * dim);
  }
}

// The weighted values of the strip [first_row, first_row + rows) of a tile that holds sinks, and each row's m and l.
// state: where the strip's rows begin in scratch.
template <class Format, int D>
KVSTRATA_NOINLINE void attend_sink_tile(const AttentionArgs& args, const AttentionItem& item, const TilePlaces& here, int head,
                             int first_row, int rows, bool direct, int state, const Scratch& scratch, float* m,
                             float* l) {
  using Products = typename Format::Products;
  using TileValues = typename Products::TileValues;
  using DirectValues = typename Products::template DirectValues<Format, D>;
  const int dim = D > 0 ? D : padded_dim(args.head_dim);
  Visible window = visible_rows(args, item, here.tile, first_row);
  const Visible sinks = take_sinks(item, here, &window);
  if (sinks.highest == 0) return;
  const Upcoming nothing{here.places, 0, 0, head};
  const float* query = scratch.query + state * Products::query_floats(dim);
  const float* sink_query = scratch.sink_query + state * Products::query_floats(dim);
  if (direct) {
    strip_direct_scores<Format, D>(args, here.places, scratch.key_scales, nothing, head, rows, 0, sinks.highest,
                                   sink_query, scratch.sink_scores);
    if (window.any()) {
      strip_direct_scores<Format, D>(args, here.places, scratch.key_scales, nothing, head, rows, window.lowest,
                                     window.highest, query, scratch.scores);
    }
  } else {
    tile_scores<Format, D>(sink_query, rows, scratch.keys, scratch.key_scales, 0, (sinks.highest + 15) / 16, dim,
                           args.scale, scratch.sink_scores);
    if (window.any()) {
      tile_scores<Format, D>(query, rows, scratch.keys, scratch.key_scales, window.lowest / 16,
                             (window.highest + 15) / 16, dim, args.scale, scratch.scores);
    }
  }
  const float* shifts = scratch.sink_shifts + state;
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c * 16 < sinks.highest; ++c) {
      float* score = scratch.scores + r * kTile + 16 * c;
      const F16 shifted = load(scratch.sink_scores + r * kTile + 16 * c) + set1(shifts[r]);
      store(score, select(lanes_between(c, 0, sinks.highest), shifted, load(score)));
    }
  }
  soften_both<Format>(sinks, window, rows, scratch.value_scales, scratch.scores, m, l);

  if (direct) {
    const DirectValues source{args.kv, here.places, scratch.value_scales, nothing, head, args.head_dim,
                              scales_per_vector(args.kv.type, args.head_dim)};
    weigh_both<Products, DirectValues, D>(source, sinks, window, rows, scratch.scores, dim, scratch.tile);
  } else {
    const TileValues source{scratch.values, dim};
    weigh_both<Products, TileValues, D>(source, sinks, window, rows, scratch.scores, dim, scratch.tile);
  }
}

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
