// Cuts one call of paged attention into work items of similar cost. How it is cut never changes a bit.
#pragma once

#include <vector>

#include "ahead.h"
#include "attention/attention.h"

namespace kvstrata {

struct AttentionPlan {
  std::vector<AttentionItem> items;  // each thread's share after another, as `Shares` has them, its dearest first
  std::vector<AttentionFold> folds;
  int64_t partial_floats = 0;
  int64_t max_rows = 0;  // of state in scratch
  int64_t cost = 0;  // in fused multiply-adds of 16 floats, roughly
};

// Whether the row at `position` no longer sees all before it, and so meets the sinks by its sink query.
static inline bool hides(int64_t position, int64_t window, int64_t sinks) { return position >= sinks + window; }

// A sequence of `tokens` queries that begin at query row `first_token`, the last of `context` positions.
struct AttentionSequence {
  int32_t index;
  int32_t first_token;
  int32_t tokens;
  int32_t context;
  int32_t window;  // as in AttentionItem
  int32_t sinks;
};

AttentionPlan plan_attention(const std::vector<AttentionSequence>& sequences, int num_kv_heads, int heads_per_kv,
                             int head_dim, int threads);

// What each thread reads of K and V in its share of a plan, in order and bounded: of items of few rows.
std::vector<std::vector<Stretch>> plan_readings(const AttentionPlan& plan, const KvView& kv, const int32_t* tables,
                                                int64_t table_stride, int heads_per_kv, int threads);

}  // namespace kvstrata
