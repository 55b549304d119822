#include "attention/plan.h"

#include <algorithm>

#include "parallel.h"

namespace kvstrata {
namespace {

constexpr int kRowsPerItem = 256;   // rows that share a converted tile, about
constexpr int kItemsPerThread = 3;  // so that the last item to finish is a small part of the whole
constexpr int kMinTilesPerPiece = 4;

int tokens_per_block(int tokens, int heads_per_kv) {
  if (tokens * heads_per_kv <= kDirectRows) return tokens;
  const int strips = std::max(1, kRowsPerItem / (kStrip * heads_per_kv));
  return std::min(tokens, strips * kStrip);  // a multiple of 16 tokens fills whole strips
}

// Reading a tile costs its bytes for few rows; converting it costs about as much as eight rows' products.
int64_t tile_cost(int rows, int head_dim) { return static_cast<int64_t>(std::max(rows, 4) + 8) * head_dim * 8; }

// What an item's rows see, and which tiles hold it.
void place_tiles(const AttentionSequence& sequence, AttentionItem* item) {
  const int last = item->first_position + item->num_tokens - 1;
  item->end_tile = last / kTile + 1;
  if (sequence.window == 0) return;
  if (sequence.sinks > 0 && !hides(last, sequence.window, sequence.sinks)) return;
  item->window = sequence.window;
  item->sinks = sequence.sinks;
  item->sink_tiles = (sequence.sinks + kTile - 1) / kTile;
  const int window_tile = std::max(0, item->first_position - sequence.window + 1) / kTile;
  if (sequence.sinks == 0) {
    item->first_tile = window_tile;
  } else if (window_tile > item->sink_tiles) {
    item->gap = window_tile - item->sink_tiles;
    item->end_tile -= item->gap;
  }
}

// An item of one KV head as it is, or as several pieces of about `share` and the fold of what they leave.
void cut_by_tiles(const AttentionItem& block, int64_t share, int heads_per_kv, int head_dim, AttentionPlan* plan) {
  const int tiles = block.end_tile - block.first_tile;
  const int pieces = static_cast<int>(
      std::min<int64_t>((block.cost + share - 1) / std::max<int64_t>(1, share), tiles / kMinTilesPerPiece));
  if (pieces <= 1) {
    plan->items.push_back(block);
    return;
  }
  // One partial for the first piece, which folds as it goes, and one for each tile of the others.
  const int64_t size = partial_floats(static_cast<int64_t>(block.num_tokens) * heads_per_kv, head_dim);
  AttentionFold fold{block, 1};
  fold.item.partial = plan->partial_floats;
  for (int i = 0; i < pieces; ++i) {
    AttentionItem piece = block;
    piece.first_tile = block.first_tile + static_cast<int32_t>(static_cast<int64_t>(tiles) * i / pieces);
    piece.end_tile = block.first_tile + static_cast<int32_t>(static_cast<int64_t>(tiles) * (i + 1) / pieces);
    piece.folds = i == 0;
    piece.cost = block.cost / tiles * (piece.end_tile - piece.first_tile);
    piece.partial = plan->partial_floats;
    const int slots = i == 0 ? 1 : piece.end_tile - piece.first_tile;
    plan->partial_floats += slots * size;
    if (i > 0) fold.count += slots;
    plan->items.push_back(piece);
  }
  plan->folds.push_back(fold);
}

// Deals items out, dearest first, each to the thread that has least and still has room.
void deal(int threads, std::vector<AttentionItem>* items) {
  std::vector<AttentionItem> sorted = *items;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; });
  const int64_t count = static_cast<int64_t>(sorted.size());
  struct Hand {
    int64_t next;
    int64_t end;
    int64_t cost;
  };
  std::vector<Hand> hands;
  for (int t = 0; t < threads; ++t) {
    hands.push_back({Shares::first(t, count, threads), Shares::first(t + 1, count, threads), 0});
  }
  for (const AttentionItem& item : sorted) {
    Hand* least = nullptr;
    for (Hand& hand : hands) {
      if (hand.next < hand.end && (least == nullptr || hand.cost < least->cost)) least = &hand;
    }
    (*items)[static_cast<size_t>(least->next++)] = item;
    least->cost += item.cost;
  }
}

}  // namespace

AttentionPlan plan_attention(const std::vector<AttentionSequence>& sequences, int num_kv_heads, int heads_per_kv,
                             int head_dim, int threads) {
  AttentionPlan plan;
  std::vector<AttentionItem> blocks;
  for (const AttentionSequence& sequence : sequences) {
    if (sequence.tokens == 0) continue;
    const int step = tokens_per_block(sequence.tokens, heads_per_kv);
    for (int32_t token = 0; token < sequence.tokens; token += step) {
      AttentionItem item{};
      item.sequence = sequence.index;
      item.num_kv_heads = num_kv_heads;
      item.first_token = sequence.first_token + token;
      item.num_tokens = std::min(step, sequence.tokens - token);
      item.first_position = sequence.context - sequence.tokens + token;
      place_tiles(sequence, &item);
      item.folds = true;
      item.partial = -1;
      const int rows = item.num_tokens * heads_per_kv;
      item.cost = tile_cost(rows, head_dim) * (item.end_tile - item.first_tile) * num_kv_heads;
      plan.cost += item.cost;
      blocks.push_back(item);
    }
  }

  const int64_t share = threads > 1 ? std::max<int64_t>(1, plan.cost / (threads * kItemsPerThread)) : plan.cost;
  for (const AttentionItem& block : blocks) {
    const bool direct = block.num_tokens * heads_per_kv <= kDirectRows;
    if (direct && block.cost <= share) {
      plan.items.push_back(block);
      continue;
    }
    AttentionItem one = block;
    one.num_kv_heads = 1;
    one.cost = block.cost / num_kv_heads;
    for (int head = 0; head < num_kv_heads; ++head, ++one.kv_head) {
      cut_by_tiles(one, share, heads_per_kv, head_dim, &plan);
    }
  }
  for (const AttentionItem& item : plan.items) {
    plan.max_rows = std::max<int64_t>(plan.max_rows, item.num_kv_heads * padded_rows(heads_per_kv, item));
  }
  deal(threads, &plan.items);
  return plan;
}

namespace {

constexpr int64_t kMostAhead = 2 << 20;  // bytes a thread: twice what a cache of its own holds, part of the next
constexpr int kFewRows = 128;  // more take long over what they read

// Tokens [begin, end) of one block.
void add_tokens(const KvView& kv, const AttentionItem& item, const uint8_t* block, int64_t begin, int64_t end,
                std::vector<Stretch>* reading) {
  const bool dense = kv.head_stride == kv.block_size * kv.token_stride &&
                     kv.part_stride == kv.num_kv_heads * kv.head_stride;
  if (dense && end - begin == kv.block_size && item.num_kv_heads == kv.num_kv_heads) {
    reading->push_back({block, 2 * kv.part_stride, 2 * kv.part_stride});
    return;
  }
  const int64_t bytes = (end - begin) * kv.token_stride;
  for (int64_t head = item.kv_head; head < item.kv_head + item.num_kv_heads; ++head) {
    const uint8_t* key = block + head * kv.head_stride + begin * kv.token_stride;
    reading->push_back({key, bytes, bytes});
    reading->push_back({key + kv.part_stride, bytes, bytes});
  }
}

void add_item(const KvView& kv, const AttentionItem& item, const int32_t* table, std::vector<Stretch>* reading,
              int64_t* left) {
  const int64_t context = item.first_position + item.num_tokens;
  for (int number = item.first_tile; number < item.end_tile && *left > 0; ++number) {
    int64_t token = static_cast<int64_t>(tile_at(item, number)) * kTile;
    const int64_t end = std::min(context, token + kTile);
    while (token < end) {
      const int64_t block = token / kv.block_size;
      const int64_t until = std::min(end, (block + 1) * kv.block_size);
      const int64_t first = block * kv.block_size;
      if (table[block] >= 0) {  // else its tokens are hidden from all rows
        add_tokens(kv, item, kv.base + table[block] * kv.block_stride, token - first, until - first, reading);
      }
      *left -= 2 * item.num_kv_heads * (until - token) * kv.token_stride;
      token = until;
    }
  }
}

}  // namespace

std::vector<std::vector<Stretch>> plan_readings(const AttentionPlan& plan, const KvView& kv, const int32_t* tables,
                                                int64_t table_stride, int heads_per_kv, int threads) {
  std::vector<std::vector<Stretch>> readings(static_cast<size_t>(threads));
  const int64_t count = static_cast<int64_t>(plan.items.size());
  for (int64_t t = 0; t < threads; ++t) {
    int64_t left = kMostAhead;
    for (int64_t i = Shares::first(t, count, threads); i < Shares::first(t + 1, count, threads) && left > 0; ++i) {
      const AttentionItem& item = plan.items[static_cast<size_t>(i)];
      if (item.num_tokens * heads_per_kv > kFewRows) continue;
      add_item(kv, item, tables + item.sequence * table_stride, &readings[static_cast<size_t>(t)], &left);
    }
  }
  return readings;
}

}  // namespace kvstrata
