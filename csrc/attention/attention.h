// Paged attention as plain pointers: what one call is given, and the work items it is cut into.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvstrata {

// Tokens of a tile: tile t holds positions [64 t, 64 t + 64) whatever the batch, chunk and block size.
constexpr int kTile = 64;
// Query rows whose softmax is done together, one row a lane.
constexpr int kStrip = 16;
// Up to so many rows read K and V in place; more share a tile converted once. The bits are the same.
constexpr int kDirectRows = 16;

enum class KvType : int { float32, bfloat16, float16 };

// One layer of a pool. Strides in bytes.
struct KvView {
  const uint8_t* base;
  int64_t block_stride;
  int64_t part_stride;  // from K to V
  int64_t head_stride;
  int64_t token_stride;
  int block_size;
  KvType type;
};

// Row i * heads_per_kv + g of an item is query head kv_head * heads_per_kv + g of its i-th token.
struct AttentionArgs {
  KvView kv;
  const float* query;  // [num_tokens, num_heads, head_dim]
  int64_t query_token_stride;
  int64_t query_head_stride;
  float* out;  // [num_tokens, num_heads, head_dim], dense
  const int32_t* block_tables;
  int64_t table_stride;
  int num_heads;
  int heads_per_kv;
  int head_dim;
  float scale;
  int window;       // 0: a query sees all before it
  float* partials;  // memory of all partial results
};

// Some tokens of one sequence, all query heads of one KV head, a range of tiles.
struct AttentionItem {
  int32_t sequence;
  int32_t kv_head;
  int32_t first_token;     // in the query
  int32_t num_tokens;
  int32_t first_position;  // of first_token in its sequence
  int32_t first_tile;
  int32_t end_tile;
  bool folds;              // begins at the first visible tile: keeps a running state
  int64_t partial;         // where its partial results go; -1: the item has all tiles and writes the output
  int64_t cost;
};

// A query block whose tiles were cut into several items: `count` partial results to fold left to right.
struct AttentionFold {
  AttentionItem item;
  int32_t count;
};

// head_dim rounded up to whole vectors: scratch holds zeros past the last dimension.
inline int padded_dim(int64_t head_dim) { return static_cast<int>((head_dim + 15) / 16 * 16); }

// Floats of one partial result of `rows` rows: maximum and sum of each, then the accumulators.
inline int64_t partial_floats(int64_t rows, int64_t head_dim) {
  const int64_t strips = (rows + kStrip - 1) / kStrip;
  return strips * kStrip * (2 + padded_dim(head_dim));
}

// Floats of scratch that an item of at most `rows` rows needs.
inline int64_t scratch_floats(int64_t rows, int64_t head_dim) {
  const int64_t padded = (rows + kStrip - 1) / kStrip * kStrip;
  const int64_t dim = padded_dim(head_dim);
  return 2 * kTile * dim           // K and V of a tile
         + 2 * padded * dim        // queries, accumulators
         + 2 * padded              // maxima, sums
         + kStrip * (kTile + dim)  // scores, one tile's accumulators
         + 16;                     // alignment
}

struct AttentionKernels {
  void (*attend)(const AttentionArgs& args, const AttentionItem& item, float* scratch);
  void (*fold)(const AttentionArgs& args, const AttentionFold& fold);
};

namespace portable {
extern const AttentionKernels attention_kernels;
}
namespace avx2 {
extern const AttentionKernels attention_kernels;
}
namespace avx512 {
extern const AttentionKernels attention_kernels;
}

}  // namespace kvstrata
