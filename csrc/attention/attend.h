// One work item of paged attention: its tiles in order, each scored, softened, weighed and folded.
#pragma once

#include "attention/attention.h"
#include "rotate.h"
#include "simd.h"

#include "attention/format.h"
#include "attention/products.h"
#include "attention/products_float.h"
#include "attention/softmax.h"
#include "attention/tile.h"
#include "attention/sinks.h"

namespace kvstrata {
namespace KVSTRATA_ISA {

// The queries of an item's rows as products take them, those of one KV head after another, with zeros where there is no
// row; rotated as int4 keys are.
template <class Products>
inline void load_queries(const AttentionArgs& args, const AttentionItem& item, const float* source,
                         int64_t token_stride, int64_t head_stride, float* query) {
  const int dim = padded_dim(args.head_dim);
  const int rows = item.num_tokens * args.heads_per_kv;
  const int padded = padded_rows(args.heads_per_kv, item);
  const bool rotated = args.kv.type == KvType::int4;
  for (int h = item.kv_head; h < item.kv_head + item.num_kv_heads; ++h) {
    for (int r = 0; r < padded; ++r, query += Products::query_floats(dim)) {
      memset(query, 0, sizeof(float) * padded_query(args.head_dim));
      if (r >= rows) continue;
      const int64_t token = item.first_token + r / args.heads_per_kv;
      const int64_t head = static_cast<int64_t>(h) * args.heads_per_kv + r % args.heads_per_kv;
      memcpy(query, source + token * token_stride + head * head_stride, sizeof(float) * args.head_dim);
      if (rotated) rotate(query, args.head_dim);
      Products::prepare_query(query, dim);
    }
  }
}

// What is taken off all keys is the same to all scores of one query. The sinks are met by another: their scores are
// raised by what the offset means to it, less what it means to the first, summed over d in 16 interleaved lanes by
// fused multiply-adds, combined by the tree, times args.scale.
inline void load_shifts(const AttentionArgs& args, const AttentionItem& item, float* shifts) {
  const int padded = padded_rows(args.heads_per_kv, item);
  memset(shifts, 0, sizeof(float) * static_cast<size_t>(item.num_kv_heads * padded));
  if (args.key_offset == nullptr) return;
  for (int h = 0; h < item.num_kv_heads; ++h) {
    const float* offset = args.key_offset + (item.kv_head + h) * args.head_dim;
    for (int r = 0; r < item.num_tokens * args.heads_per_kv; ++r) {
      const int64_t token = item.first_token + r / args.heads_per_kv;
      const int64_t head = static_cast<int64_t>(item.kv_head + h) * args.heads_per_kv + r % args.heads_per_kv;
      const float* first = args.query + token * args.query_token_stride + head * args.query_head_stride;
      const float* other = args.sink_query + token * args.sink_token_stride + head * args.sink_head_stride;
      F16 sum = zero();
      for (int d = 0; d < args.head_dim; d += 16) {
        const int n = args.head_dim - d < 16 ? args.head_dim - d : 16;
        sum = fma(load_first(other + d, n) - load_first(first + d, n), load_first(offset + d, n), sum);
      }
      shifts[h * padded + r] = tree_sum(sum) * args.scale;
    }
  }
}

template <class Products>
inline void begin_item(const AttentionArgs& args, const AttentionItem& item, const Scratch& scratch) {
  const int dim = padded_dim(args.head_dim);
  load_queries<Products>(args, item, args.query, args.query_token_stride, args.query_head_stride, scratch.query);
  if (item.sinks > 0) {
    load_queries<Products>(args, item, args.sink_query, args.sink_token_stride, args.sink_head_stride,
                           scratch.sink_query);
    load_shifts(args, item, scratch.sink_shifts);
  }
  const int all = item.num_kv_heads * padded_rows(args.heads_per_kv, item);
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
inline void attend_tile(const AttentionArgs& args, const AttentionItem& item, const TilePlaces& here, int head,
                        const Upcoming& upcoming, const Scratch& scratch, float* partial) {
  using Products = typename Format::Products;
  using TileValues = typename Products::TileValues;
  using DirectValues = typename Products::template DirectValues<Format, D>;
  const Place* places = here.places;
  const int dim = D > 0 ? D : padded_dim(args.head_dim);
  const int rows = item.num_tokens * args.heads_per_kv;
  const int padded = padded_rows(args.heads_per_kv, item);
  const bool direct = rows <= kDirectRows;
  const int state = (head - item.kv_head) * padded;
  for (int first = 0; first < rows; first += kStrip) {
    const int count = rows - first < kStrip ? rows - first : kStrip;
    const Visible visible = visible_rows(args, item, here.tile, first);
    float m[kStrip] = {};
    float l[kStrip] = {};
    if (here.sinks > 0) {
      // In the form for any head_dim: one tile of many, which must not crowd the others out of the compiler's budget.
      attend_sink_tile<Format, 0>(args, item, here, head, first, count, direct, state + first, scratch, m, l);
    } else if (visible.any()) {
      const float* query = scratch.query + (state + first) * Products::query_floats(dim);
      if (direct) {
        strip_direct_scores<Format, D>(args, places, scratch.key_scales, upcoming, head, count, visible.lowest,
                                       visible.highest, query, scratch.scores);
      } else {
        tile_scores<Format, D>(query, count, scratch.keys, scratch.key_scales, visible.lowest / 16,
                               (visible.highest + 15) / 16, dim, args.scale, scratch.scores);
      }
      soften<Products>(visible, count, scratch.scores, m, l);
      if constexpr (Format::kFolded) scale_weights(visible, count, scratch.value_scales, scratch.scores);
      if (direct) {
        const DirectValues source{args.kv, places, scratch.value_scales, upcoming, head, args.head_dim,
                                  scales_per_vector(args.kv.type, args.head_dim)};
        strip_values<Products, DirectValues, D>(source, visible, count, scratch.scores, dim, scratch.tile);
      } else {
        const TileValues source{scratch.values, dim};
        strip_values<Products, TileValues, D>(source, visible, count, scratch.scores, dim, scratch.tile);
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
  begin_item<typename Format::Products>(args, item, scratch);

  TilePlaces places[2];
  find_tile(args, item, item.first_tile, &places[0]);
  float* partial = item.partial < 0 ? nullptr : args.partials + item.partial;
  for (int tile = item.first_tile; tile < item.end_tile; ++tile) {
    const TilePlaces& here = places[(tile - item.first_tile) & 1];
    TilePlaces& following = places[(tile - item.first_tile + 1) & 1];
    int following_head = item.kv_head;
    following.lo = following.hi = following.sinks = 0;
    if (tile + 1 < item.end_tile) {
      find_tile(args, item, tile + 1, &following);
    } else if (next != nullptr) {
      find_tile(args, *next, next->first_tile, &following);
      following_head = next->kv_head;
    }
    for (int head = item.kv_head; head < item.kv_head + item.num_kv_heads; ++head) {
      const bool last = head + 1 == item.kv_head + item.num_kv_heads;
      const Upcoming upcoming = last ? following.upcoming(following_head) : here.upcoming(head + 1);
      if constexpr (Format::kScaled) {
        load_part_scales<Format>(args, here, Part::key, head, scratch.key_scales);
        load_part_scales<Format>(args, here, Part::value, head, scratch.value_scales);
      }
      if (!direct) load_tile<Format, D>(args, here, head, scratch);
      attend_tile<Format, D>(args, item, here, head, upcoming, scratch, partial);
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

// The first partial is the state after the first item's tiles and becomes the running state in place.
inline void fold_partials(const AttentionArgs& args, const AttentionFold& fold) {
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

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
