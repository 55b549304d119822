#include "attention/plan.h"

#include <algorithm>

namespace kvstrata {
namespace {

constexpr int kRowsPerItem = 128;   // rows that share a converted tile, about
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
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; });
  return plan;
}

}  // namespace kvstrata
