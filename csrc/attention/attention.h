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

enum class KvType : int { float32, bfloat16, float16, float8_e4m3, int8, int4 };

// Which of a token's two vectors.
enum class Part : int { key = 0, value = 1 };

// Elements of an int4 pool that share 16 bytes of codes, and those that share a scale and a zero.
constexpr int kInt4Group = 32;
constexpr int kInt4Scaled = 16;

// Scales of one vector: what int8 and fp8 fold into a score or a weight, and a scale and a zero for each
// kInt4Scaled elements of int4.
static inline int scales_per_vector(KvType type, int64_t head_dim) {
  switch (type) {
    case KvType::float8_e4m3:
    case KvType::int8:
      return 1;
    case KvType::int4:
      return static_cast<int>((head_dim + kInt4Scaled - 1) / kInt4Scaled * 2);
    default:
      return 0;
  }
}

static inline int scale_bytes(KvType type) { return type == KvType::int4 ? 1 : 2; }

// One layer of a pool. Strides in bytes. The scales of a block lie in it: scale_offset from its first vector of this
// layer, those of a KV head's tokens side by side.
struct KvView {
  const uint8_t* base;
  int64_t block_stride;
  int64_t part_stride;  // from K to V
  int64_t head_stride;
  int64_t token_stride;
  int64_t scale_offset;
  int64_t scale_part_stride;
  int64_t scale_head_stride;
  int block_size;
  int num_kv_heads;
  int head_dim;
  int vector_bytes;
  KvType type;
};

// Row i * heads_per_kv + g of an item's KV head h is query head h * heads_per_kv + g of its i-th token.
struct AttentionArgs {
  KvView kv;
  const float* query;  // [num_tokens, num_heads, head_dim]
  int64_t query_token_stride;
  int64_t query_head_stride;
  const float* sink_query;  // the same rows as the sinks are to meet them; null where no item has sinks
  int64_t sink_token_stride;
  int64_t sink_head_stride;
  const float* key_offset;  // [num_kv_heads, head_dim], what was taken off all keys; null where nothing was
  float* out;  // [num_tokens, num_heads, head_dim], dense
  const int32_t* block_tables;
  int64_t table_stride;
  int num_heads;
  int heads_per_kv;
  int head_dim;
  float scale;
  float* partials;  // memory of all partial results
};

// Some tokens of one sequence, all query heads of some KV heads, a range of tiles. Only items that read K and V in
// place and have all tiles take several KV heads: those of a tile lie side by side.
struct AttentionItem {
  int32_t sequence;
  int32_t kv_head;         // the first
  int32_t num_kv_heads;
  int32_t first_token;     // in the query
  int32_t num_tokens;
  int32_t first_position;  // of first_token in its sequence
  int32_t window;          // tokens that a query sees, itself included; 0: all before it
  int32_t sinks;           // the first so many are seen besides, by the sink query; 0 where no row hides a token
  int32_t sink_tiles;      // tiles that hold them
  int32_t gap;             // tiles after these of which no row sees anything
  int32_t first_tile;      // numbers that pass over the gap
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

// The same to whole vectors of bf16, as queries need it.
inline int padded_query(int64_t head_dim) { return static_cast<int>((head_dim + 31) / 32 * 32); }

// Floats of one partial result of `rows` rows: maximum and sum of each, then the accumulators.
inline int64_t partial_floats(int64_t rows, int64_t head_dim) {
  const int64_t strips = (rows + kStrip - 1) / kStrip;
  return strips * kStrip * (2 + padded_dim(head_dim));
}

// Rows of one KV head's state in scratch.
inline int padded_rows(int heads_per_kv, const AttentionItem& item) {
  return (item.num_tokens * heads_per_kv + kStrip - 1) / kStrip * kStrip;
}

// The tile of an item's tile number.
static inline int tile_at(const AttentionItem& item, int number) {
  return number < item.sink_tiles ? number : number + item.gap;
}

// Floats of scratch that an item with at most `padded` rows of state needs.
inline int64_t scratch_floats(int64_t padded, int64_t head_dim, int scales, bool sinks) {
  const int64_t dim = padded_dim(head_dim);
  const int64_t query = padded_query(head_dim);
  return 2 * kTile * dim           // K and V of a tile
         + padded * (query + dim)  // queries, accumulators
         + (sinks ? padded * (query + 1) + kStrip * kTile : 0)  // queries, shifts and scores of sinks
         + 2 * kTile * scales      // of K and V of a tile
         + 2 * padded              // maxima, sums
         + kStrip * (kTile + dim)  // scores, one tile's accumulators
         + 16;                     // alignment
}

struct AttentionKernels {
  // next: the item that this thread takes after this one, whose first tile it may fetch; or null.
  void (*attend)(const AttentionArgs& args, const AttentionItem& item, const AttentionItem* next, float* scratch);
  void (*fold)(const AttentionArgs& args, const AttentionFold& fold);
};

// attention_kernels: all formats but bf16, whose kernels are bf16_attention_kernels.
namespace portable {
extern const AttentionKernels attention_kernels;
extern const AttentionKernels bf16_attention_kernels;
}  // namespace portable
namespace avx2 {
extern const AttentionKernels attention_kernels;
extern const AttentionKernels bf16_attention_kernels;
}  // namespace avx2
namespace avx512 {
extern const AttentionKernels attention_kernels;
extern const AttentionKernels bf16_attention_kernels;
}  // namespace avx512
namespace avx512bf16 {
extern const AttentionKernels bf16_attention_kernels;
}

}  // namespace kvstrata
