// Paged attention over a batch: prepared once for all layers of a group, then called for each.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "attention/plan.h"
#include "team.h"

namespace kvstrata {

struct AttentionBatch {
  AttentionPlan plan;
  std::vector<Reading> readings;  // what each thread of a team reads of the pool's layer 0, as far as worth fetching
  at::Tensor block_tables;
  int64_t num_tokens;  // of the query, like the next
  int64_t num_heads;
};

// The arguments are those of the schema of paged_attention. Raises ValueError where they do not fit together.
AttentionBatch prepare_attention(const at::Tensor& kv, const std::optional<at::Tensor>& scales,
                                 const at::Tensor& block_tables, const at::Tensor& query_starts,
                                 const at::Tensor& context_lens, int64_t num_tokens, int64_t num_heads, int64_t window,
                                 const std::optional<at::Tensor>& windows, const std::optional<at::Tensor>& sinks,
                                 bool has_sink_query);

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& kv, int64_t layer, const AttentionBatch& batch,
                           double scale, const std::optional<at::Tensor>& scales,
                           const std::optional<at::Tensor>& sink_query, const std::optional<at::Tensor>& key_offset);

}  // namespace kvstrata
