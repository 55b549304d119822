// One work item of paged attention: its tiles in order, each scored, softened, weighed and folded.
#pragma once

#include "attention/attention.h"
#include "rotate.h"
#include "simd.h"

#include "attention/format.h"
#include "attention/products.h"
#include "attention/softmax.h"

namespace kvstrata {
namespace KVSTRATA_ISA {

// dim: head_dim padded to whole vectors. query, out, max, sum: for one KV head after another.
struct Scratch {
  float* keys;    // [4, dim, 16]
  float* values;  // [kTile, dim]
  float* query;   // [padded rows, dim]
  float* out;     // [padded rows, dim], accumulators
  float* max;     // [padded rows]
  float* sum;     // [padded rows]
  float* scores;  // [kStrip, kTile]
  float* tile;    // [kStrip, dim]
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
  s.out = s.query + rows * dim;
  s.tile = s.out + rows * dim;
  s.scores = s.tile + kStrip * dim;
  s.max = s.scores + kStrip * kTile;
  s.sum = s.max + rows;
  s.key_scales = s.sum + rows;
  s.value_scales = s.key_scales + kTile * scales_per_vector(args.kv.type, args.head_dim);
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
      if (args.window > 0 && position - args.window + 1 > start) lo = position - args.window + 1 - start;
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

// Union over all of an item's rows, from its first and its last.
inline void visible_item(const AttentionArgs& args, const AttentionItem& item, int tile, int* lo, int* hi) {
  const int start = tile * kTile;
  const int last = item.first_position + item.num_tokens - 1;
  *lo = args.window > 0 ? item.first_position - args.window + 1 - start : 0;
  *lo = *lo < 0 ? 0 : *lo;
  *hi = last + 1 - start > kTile ? kTile : last + 1 - start;
}

// Where the tokens [lo, hi) of a tile lie that some row of an item sees.
struct TilePlaces {
  Place places[kTile];
  int lo = 0;
  int hi = 0;
};
inline void find_tile(const AttentionArgs& args, const AttentionItem& item, int tile, TilePlaces* found) {
  visible_item(args, item, tile, &found->lo, &found->hi);
  find_places(args, item.sequence, tile, found->lo, found->hi, found->places);
}

// Converts the tokens [lo, hi) of a tile: keys transposed to [4, dim, 16], values as they lie. Tokens of
// the same 16 that nobody sees become zeros; they are never read from the pool.
template <class Format, int D>
inline void load_tile(const AttentionArgs& args, const Place* places, int head, int lo, int hi,
                      const Scratch& scratch) {
  const int dim = D > 0 ? D : padded_dim(args.head_dim);
  const int count = Format::kScaled ? scales_per_vector(args.kv.type, args.head_dim) : 0;
  for (int c = lo / 16; c * 16 < hi; ++c) {
    for (int d = 0; d < dim; d += 16) {
      F16 square[16];
      for (int i = 0; i < 16; ++i) {
        const int j = c * 16 + i;
        if (j >= lo && j < hi) {
          const auto row = Format::row(args.kv, places[j], Part::key, head, scratch.key_scales + j * count);
          square[i] = Format::template part<D>(row, d, args.head_dim);
        } else {
          square[i] = zero();
        }
      }
      transpose16(square);
      float* keys = scratch.keys + (c * dim + d) * 16;
      for (int i = 0; i < 16; ++i) store(keys + i * 16, square[i]);
    }
  }
  for (int j = lo; j < hi; ++j) {
    const auto row = Format::row(args.kv, places[j], Part::value, head, scratch.value_scales + j * count);
    for (int d = 0; d < dim; d += 16) {
      store(scratch.values + j * dim + d, Format::template part<D>(row, d, args.head_dim));
    }
  }
}

// Scores of a strip, four rows at a time.
template <class Format, int D>
inline void strip_direct_scores(const AttentionArgs& args, const Place* places, const float* key_scales,
                                Upcoming upcoming, int head, int rows, int lo, int hi, const float* query,
                                float* scores) {
  const int dim = D > 0 ? D : padded_dim(args.head_dim);
  for (int r = 0; r < rows; r += 4) {
    const float* q = query + r * dim;
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

template <class Source, int D>
inline void strip_values(const Source& source, const Visible& visible, int rows, const float* weights, int dim,
                         float* sums) {
  for (int r = 0; r < rows; r += kValueRows) {
    const float* w = weights + r * kTile;
    const int* lo = visible.lo + r;
    const int* hi = visible.hi + r;
    float* s = sums + r * dim;
    switch (rows - r) {
      case 1:
        weigh_rows<Source, D, 1>(source, w, lo, hi, dim, s);
        break;
      case 2:
        weigh_rows<Source, D, 2>(source, w, lo, hi, dim, s);
        break;
      case 3:
        weigh_rows<Source, D, 3>(source, w, lo, hi, dim, s);
        break;
      default:
        weigh_rows<Source, D, 4>(source, w, lo, hi, dim, s);
    }
  }
}

inline const float* query_row(const AttentionArgs& args, const AttentionItem& item, int kv_head, int row) {
  const int64_t token = item.first_token + row / args.heads_per_kv;
  const int64_t head = static_cast<int64_t>(kv_head) * args.heads_per_kv + row % args.heads_per_kv;
  return args.query + token * args.query_token_stride + head * args.query_head_stride;
}

inline void begin_item(const AttentionArgs& args, const AttentionItem& item, const Scratch& scratch) {
  const int dim = padded_dim(args.head_dim);
  const int rows = item.num_tokens * args.heads_per_kv;
  const int padded = padded_rows(args.heads_per_kv, item);
  const bool rotated = args.kv.type == KvType::int4;  // as the keys are
  float* query = scratch.query;
  for (int h = 0; h < item.num_kv_heads; ++h) {
    for (int r = 0; r < padded; ++r, query += dim) {
      memset(query, 0, sizeof(float) * dim);
      if (r >= rows) continue;
      memcpy(query, query_row(args, item, item.kv_head + h, r), sizeof(float) * args.head_dim);
      if (rotated) rotate(query, args.head_dim);
    }
  }
  const int all = item.num_kv_heads * padded;
  for (int r = 0; r < all; ++r) {
    scratch.max[r] = -INFINITY;
    scratch.sum[r] = 0.0f;
  }
  memset(scratch.out, 0, sizeof(float) * all * dim);
}

inline void write_rows(const AttentionArgs& args, const AttentionItem& item, int kv_head, const float* sum,
                       const float* out) {
  const int dim = padded_dim(args.head_dim);
  const int rows = item.num_tokens * args.heads_per_kv;
  for (int r = 0; r < rows; ++r) {
    const int64_t token = item.first_token + r / args.heads_per_kv;
    const int64_t head = static_cast<int64_t>(kv_head) * args.heads_per_kv + r % args.heads_per_kv;
    float* target = args.out + (token * args.num_heads + head) * args.head_dim;
    const F16 total = set1(sum[r]);
    for (int d = 0; d < dim; d += 16) {
      const int n = args.head_dim - d < 16 ? args.head_dim - d : 16;
      store_first(target + d, load(out + r * dim + d) / total, n);
    }
  }
}

// A partial result: max [padded], sum [padded], accumulators [padded, dim].
inline void write_partial(int first_row, int rows, int padded, int dim, const float* m, const float* l,
                          const float* o, float* partial) {
  memcpy(partial + first_row, m, sizeof(float) * kStrip);
  memcpy(partial + padded + first_row, l, sizeof(float) * kStrip);
  memcpy(partial + 2 * padded + first_row * dim, o, sizeof(float) * rows * dim);
}

// One tile for the rows of one KV head: scored, softened, weighed, and folded or left as a partial result.
template <class Format, int D>
inline void attend_tile(const AttentionArgs& args, const AttentionItem& item, int tile, int head, const Place* places,
                        const Upcoming& upcoming, const Scratch& scratch, float* partial) {
  const int dim = D > 0 ? D : padded_dim(args.head_dim);
  const int rows = item.num_tokens * args.heads_per_kv;
  const int padded = padded_rows(args.heads_per_kv, item);
  const bool direct = rows <= kDirectRows;
  const int state = (head - item.kv_head) * padded;
  for (int first = 0; first < rows; first += kStrip) {
    const int count = rows - first < kStrip ? rows - first : kStrip;
    const Visible visible = visible_rows(args, item, tile, first);
    float m[kStrip] = {};
    float l[kStrip] = {};
    if (visible.any()) {
      const float* query = scratch.query + (state + first) * dim;
      if (direct) {
        strip_direct_scores<Format, D>(args, places, scratch.key_scales, upcoming, head, count, visible.lowest,
                                       visible.highest, query, scratch.scores);
      } else {
        tile_scores<D, Format::kFolded>(query, count, scratch.keys, scratch.key_scales, visible.lowest / 16,
                                        (visible.highest + 15) / 16, dim, args.scale, scratch.scores);
      }
      soften(visible, count, scratch.scores, m, l);
      if constexpr (Format::kFolded) scale_weights(visible, count, scratch.value_scales, scratch.scores);
      if (direct) {
        const DirectValues<Format, D> source{args.kv, places, scratch.value_scales, upcoming, head, args.head_dim,
                                             scales_per_vector(args.kv.type, args.head_dim)};
        strip_values<DirectValues<Format, D>, D>(source, visible, count, scratch.scores, dim, scratch.tile);
      } else {
        const TileValues source{scratch.values, dim};
        strip_values<TileValues, D>(source, visible, count, scratch.scores, dim, scratch.tile);
      }
    }
    if (item.folds) {
      fold_tile(count, dim, m, l, scratch.tile, scratch.max + state + first, scratch.sum + state + first,
                scratch.out + (state + first) * dim);
    } else {
      write_partial(first, count, padded, dim, m, l, scratch.tile, partial);
    }
  }
}

template <class Format, int D>
void attend_item(const AttentionArgs& args, const AttentionItem& item, const AttentionItem* next, float* memory) {
  const int dim = D > 0 ? D : padded_dim(args.head_dim);
  const Scratch scratch = carve(args, item, memory);
  const int rows = item.num_tokens * args.heads_per_kv;
  const int padded = padded_rows(args.heads_per_kv, item);
  const bool direct = rows <= kDirectRows;
  begin_item(args, item, scratch);

  TilePlaces places[2];
  find_tile(args, item, item.first_tile, &places[0]);
  float* partial = item.partial < 0 ? nullptr : args.partials + item.partial;
  for (int tile = item.first_tile; tile < item.end_tile; ++tile) {
    const TilePlaces& here = places[(tile - item.first_tile) & 1];
    TilePlaces& following = places[(tile - item.first_tile + 1) & 1];
    int following_head = item.kv_head;
    if (tile + 1 < item.end_tile) {
      find_tile(args, item, tile + 1, &following);
    } else if (next != nullptr) {
      find_tile(args, *next, next->first_tile, &following);
      following_head = next->kv_head;
    } else {
      following.lo = following.hi = 0;
    }
    for (int head = item.kv_head; head < item.kv_head + item.num_kv_heads; ++head) {
      const bool last = head + 1 == item.kv_head + item.num_kv_heads;
      const Upcoming upcoming = last ? Upcoming{following.places, following.lo, following.hi, following_head}
                                     : Upcoming{here.places, here.lo, here.hi, head + 1};
      if constexpr (Format::kScaled) {
        load_scales<Format>(args.kv, here.places, Part::key, head, here.lo, here.hi, scratch.key_scales);
        load_scales<Format>(args.kv, here.places, Part::value, head, here.lo, here.hi, scratch.value_scales);
      }
      if (!direct) load_tile<Format, D>(args, here.places, head, here.lo, here.hi, scratch);
      attend_tile<Format, D>(args, item, tile, head, here.places, upcoming, scratch, partial);
    }
    if (!item.folds) partial += partial_floats(rows, dim);
  }

  if (item.partial < 0) {
    for (int h = 0; h < item.num_kv_heads; ++h) {
      write_rows(args, item, item.kv_head + h, scratch.sum + h * padded, scratch.out + h * padded * dim);
    }
  } else if (item.folds) {
    for (int first = 0; first < rows; first += kStrip) {
      const int count = rows - first < kStrip ? rows - first : kStrip;
      write_partial(first, count, padded, dim, scratch.max + first, scratch.sum + first,
                    scratch.out + first * dim, partial);
    }
  }
}

template <class Format>
void attend_format(const AttentionArgs& args, const AttentionItem& item, const AttentionItem* next, float* scratch) {
// Sanitized code takes minutes to compile for each head_dim; the form for any of them stands for all.
#if (defined(KVSTRATA_ISA_AVX512) || defined(KVSTRATA_ISA_AVX2)) && !defined(__SANITIZE_ADDRESS__)
  switch (args.head_dim) {
    case 64:
      return attend_item<Format, 64>(args, item, next, scratch);
    case 80:
      return attend_item<Format, 80>(args, item, next, scratch);
    case 96:
      return attend_item<Format, 96>(args, item, next, scratch);
    case 128:
      return attend_item<Format, 128>(args, item, next, scratch);
    case 256:
      return attend_item<Format, 256>(args, item, next, scratch);
  }
#endif
  attend_item<Format, 0>(args, item, next, scratch);
}

void attend(const AttentionArgs& args, const AttentionItem& item, const AttentionItem* next, float* scratch) {
  switch (args.kv.type) {
    case KvType::float32:
      return attend_format<Plain<float>>(args, item, next, scratch);
    case KvType::bfloat16:
      return attend_format<Plain<Bf16>>(args, item, next, scratch);
    case KvType::float16:
      return attend_format<Plain<Fp16>>(args, item, next, scratch);
    case KvType::float8_e4m3:
      return attend_format<Coded<Fp8>>(args, item, next, scratch);
    case KvType::int8:
      return attend_format<Coded<Int8>>(args, item, next, scratch);
    case KvType::int4:
      return attend_format<FourBits>(args, item, next, scratch);
  }
}

// The first partial is the state after the first item's tiles and becomes the running state in place.
void fold(const AttentionArgs& args, const AttentionFold& fold) {
  const AttentionItem& item = fold.item;
  const int dim = padded_dim(args.head_dim);
  const int rows = item.num_tokens * args.heads_per_kv;
  const int padded = padded_rows(args.heads_per_kv, item);
  float* state = args.partials + item.partial;
  const float* partial = state;
  for (int i = 1; i < fold.count; ++i) {
    partial += partial_floats(rows, dim);
    for (int first = 0; first < rows; first += kStrip) {
      const int count = rows - first < kStrip ? rows - first : kStrip;
      fold_tile(count, dim, partial + first, partial + padded + first, partial + 2 * padded + first * dim,
                state + first, state + padded + first, state + 2 * padded + first * dim);
    }
  }
  write_rows(args, item, item.kv_head, state + padded, state + 2 * padded);
}

extern const AttentionKernels attention_kernels = {attend, fold};

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
