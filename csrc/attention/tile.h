// One tile of a work item: which of its tokens are seen, where they lie, and the scratch they are converted into.
#pragma once

namespace kvstrata {
namespace KVSTRATA_ISA {

// dim: head_dim padded to whole vectors. query, out, max, sum: for one KV head after another. Keys, values, queries and
// weights take this much at most: those of pairs less.
struct Scratch {
  float* keys;    // [4, dim, 16]
  float* values;  // [kTile, dim]
  float* query;   // [padded rows, padded_query]
  float* out;     // [padded rows, dim], accumulators
  float* max;     // [padded rows]
  float* sum;     // [padded rows]
  float* scores;  // [kStrip, kTile]
  float* tile;    // [kStrip, dim]
  float* sink_query;   // [padded rows, padded_query]; null where there are none, as the next
  float* sink_scores;  // [kStrip, kTile]
  float* sink_shifts;  // [padded rows], what a row's scores of sinks are to be raised by
  float* key_scales;    // [kTile, scales a vector]
  float* value_scales;  // [kTile, scales a vector]
};

inline Scratch carve(const AttentionArgs& args, const AttentionItem& item, float* p) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  p += (64 - address % 64) % 64 / sizeof(float);
  const int64_t dim = padded_dim(args.head_dim);
  const int64_t rows = item.num_kv_heads * padded_rows(args.heads_per_kv, item);
  Scratch s;
  s.keys = p;
  s.values = s.keys + kTile * dim;
  s.query = s.values + kTile * dim;
  s.out = s.query + rows * padded_query(args.head_dim);
  s.tile = s.out + rows * dim;
  s.scores = s.tile + kStrip * dim;
  s.max = s.scores + kStrip * kTile;
  s.sum = s.max + rows;
  s.key_scales = s.sum + rows;
  s.value_scales = s.key_scales + kTile * scales_per_vector(args.kv.type, args.head_dim);
  s.sink_query = s.sink_scores = s.sink_shifts = nullptr;
  if (item.sinks > 0) {
    s.sink_query = s.value_scales + kTile * scales_per_vector(args.kv.type, args.head_dim);
    s.sink_scores = s.sink_query + rows * padded_query(args.head_dim);
    s.sink_shifts = s.sink_scores + kStrip * kTile;
  }
  return s;
}

// What the rows [first_row, first_row + kStrip) of an item see of a tile.
inline Visible visible_rows(const AttentionArgs& args, const AttentionItem& item, int tile, int first_row) {
  Visible visible;
  visible.lowest = kTile;
  visible.highest = 0;
  const int rows = item.num_tokens * args.heads_per_kv;
  const int start = tile * kTile;
  int token = first_row / args.heads_per_kv;
  int head = first_row % args.heads_per_kv;
  for (int r = 0; r < kStrip; ++r) {
    int lo = 0;
    int hi = 0;
    if (first_row + r < rows) {
      const int position = item.first_position + token;
      if (item.window > 0 && position - item.window + 1 > start) lo = position - item.window + 1 - start;
      hi = position + 1 - start;
      hi = hi > kTile ? kTile : hi;
      if (lo < hi) {
        visible.lowest = lo < visible.lowest ? lo : visible.lowest;
        visible.highest = hi > visible.highest ? hi : visible.highest;
      }
    }
    visible.lo[r] = lo;
    visible.hi[r] = hi;
    if (++head == args.heads_per_kv) {
      head = 0;
      ++token;
    }
  }
  return visible;
}

// Where the tokens [0, sinks) and [lo, hi) of a tile lie: those that some row of an item sees.
struct TilePlaces {
  Place places[kTile];
  int tile = 0;
  int sinks = 0;
  int lo = 0;
  int hi = 0;

  Upcoming upcoming(int head) const {
    return lo < hi ? Upcoming{places, lo, hi, head} : Upcoming{places, 0, sinks, head};
  }
};
inline void find_tile(const AttentionArgs& args, const AttentionItem& item, int number, TilePlaces* found) {
  found->tile = tile_at(item, number);
  const int start = found->tile * kTile;
  const int end = item.first_position + item.num_tokens - start;
  found->hi = end > kTile ? kTile : end;
  found->sinks = item.sinks - start < 0 ? 0 : item.sinks - start;
  found->sinks = found->sinks > found->hi ? found->hi : found->sinks;
  found->lo = item.window > 0 ? item.first_position - item.window + 1 - start : 0;
  found->lo = found->lo < found->sinks ? found->sinks : found->lo;
  find_places(args, item.sequence, found->tile, 0, found->sinks, found->places);
  find_places(args, item.sequence, found->tile, found->lo, found->hi, found->places);
}

// Converts the visible tokens of a tile: keys transposed, 16 tokens after another, values in their order. Tokens of
// the same 16 that nobody sees become zeros; they are never read from the pool.
template <class Format, int D>
inline void load_tile(const AttentionArgs& args, const TilePlaces& found, int head, const Scratch& scratch) {
  using Products = typename Format::Products;
  constexpr int kSquare = Products::kSquareDims;
  const Place* places = found.places;
  const int lo = found.lo;
  const int hi = found.hi;
  const int sinks = found.sinks;
  const int dim = D > 0 ? D : padded_dim(args.head_dim);
  const int count = Format::kScaled ? scales_per_vector(args.kv.type, args.head_dim) : 0;
  for (int c = sinks > 0 ? 0 : lo / 16; c * 16 < hi || c * 16 < sinks; ++c) {
    for (int d = 0; d < dim; d += kSquare) {
      F16 square[16];
      for (int i = 0; i < 16; ++i) {
        const int j = c * 16 + i;
        if ((j >= lo && j < hi) || j < sinks) {
          const auto row = Format::row(args.kv, places[j], Part::key, head, scratch.key_scales + j * count);
          square[i] = Products::template square<Format, D>(row, d, args.head_dim);
        } else {
          square[i] = zero();
        }
      }
      transpose16(square);
      float* keys = scratch.keys + c * Products::key_floats(dim) + d * 256 / kSquare;
      const int rows = (dim - d) * 16 / kSquare;
      for (int i = 0; i < 16 && i < rows; ++i) store(keys + i * 16, square[i]);
    }
  }
  const auto convert = [&](int begin, int end) {
    Products::template convert_values<Format, D>(args, places, scratch.value_scales, head, begin, end, scratch.values);
  };
  const bool touching = sinks == lo;  // neighbours may share a pair
  if (!touching) convert(0, sinks);
  convert(touching ? 0 : lo, hi);
}

// The scales of a tile's visible tokens.
template <class Format>
inline void load_part_scales(const AttentionArgs& args, const TilePlaces& found, Part part, int head, float* out) {
  load_scales<Format>(args.kv, found.places, part, head, 0, found.sinks, out);
  load_scales<Format>(args.kv, found.places, part, head, found.lo, found.hi, out);
}

// Scores of a strip, four rows at a time.
template <class Format, int D>
inline void strip_direct_scores(const AttentionArgs& args, const Place* places, const float* key_scales,
                                Upcoming upcoming, int head, int rows, int lo, int hi, const float* query,
                                float* scores) {
  const int floats = Format::Products::query_floats(D > 0 ? D : padded_dim(args.head_dim));
  for (int r = 0; r < rows; r += 4) {
    const float* q = query + r * floats;
    float* s = scores + r * kTile;
    switch (rows - r) {
      case 1:
        direct_scores<Format, D, 1>(args, places, key_scales, upcoming, head, lo, hi, q, s);
        break;
      case 2:
        direct_scores<Format, D, 2>(args, places, key_scales, upcoming, head, lo, hi, q, s);
        break;
      case 3:
        direct_scores<Format, D, 3>(args, places, key_scales, upcoming, head, lo, hi, q, s);
        break;
      default:
        direct_scores<Format, D, 4>(args, places, key_scales, upcoming, head, lo, hi, q, s);
    }
    upcoming.hi = 0;  // the first rows have brought it
  }
}

template <class Products, class Source, int D>
inline void strip_values(const Source& source, const Visible& visible, int rows, const float* weights, int dim,
                         float* sums) {
  for (int r = 0; r < rows; r += kValueRows) {
    const float* w = weights + r * kTile;
    const int* lo = visible.lo + r;
    const int* hi = visible.hi + r;
    float* s = sums + r * dim;
    switch (rows - r) {
      case 1:
        Products::template weigh_rows<Source, D, 1>(source, w, lo, hi, dim, s);
        break;
      case 2:
        Products::template weigh_rows<Source, D, 2>(source, w, lo, hi, dim, s);
        break;
      case 3:
        Products::template weigh_rows<Source, D, 3>(source, w, lo, hi, dim, s);
        break;
      default:
        Products::template weigh_rows<Source, D, 4>(source, w, lo, hi, dim, s);
    }
  }
}

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
