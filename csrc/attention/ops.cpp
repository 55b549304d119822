// torch.ops.kvstrata.paged_attention on the CPU: checks, planning, threads.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "attention/batch.h"
#include "checks.h"
#include "dispatch.h"
#include "kv_view.h"
#include "operators.h"
#include "parallel.h"

namespace kvstrata {
namespace {

constexpr const char* kOp = "paged_attention";

// What each sequence's queries see: `all` where no windows are given.
struct Retention {
  const int32_t* windows;
  const int32_t* first_tokens;
  int64_t all;
  bool has_query;

  int64_t window(int64_t sequence) const { return windows == nullptr ? all : windows[sequence]; }
  int64_t sinks(int64_t sequence) const { return first_tokens == nullptr ? 0 : first_tokens[sequence]; }
};

// One number a sequence, checked.
const int32_t* counts(const char* name, const std::optional<at::Tensor>& tensor, int64_t num_seqs) {
  if (!tensor.has_value()) return nullptr;
  check_dtype(kOp, name, *tensor, at::kInt);
  check_shape(kOp, name, *tensor, {num_seqs});
  check_contiguous(kOp, name, *tensor);
  const int32_t* values = tensor->const_data_ptr<int32_t>();
  for (int64_t s = 0; s < num_seqs; ++s) {
    TORCH_CHECK_VALUE(values[s] >= 0, kOp, ": ", name, "[", s, "] is ", values[s], ", expected 0 or more");
  }
  return values;
}

const AttentionKernels& kernels_for(KvType type) {
  if (type != KvType::bfloat16) return KVSTRATA_PICK(attention_kernels);
#if KVSTRATA_X86
  if (current_isa() == Isa::avx512bf16) return avx512bf16::bf16_attention_kernels;
#endif
  return KVSTRATA_PICK(bf16_attention_kernels);
}

// A batch's sequences, once everything the kernels will read is known to be there. query: its shape.
std::vector<AttentionSequence> checked_sequences(const at::Tensor& kv, const at::Tensor& tables,
                                                 const at::Tensor& query_starts, const at::Tensor& context_lens,
                                                 at::IntArrayRef query, const std::optional<at::Tensor>& windows,
                                                 const std::optional<at::Tensor>& first_tokens, int64_t all,
                                                 bool has_query) {
  check_dtype(kOp, "block_tables", tables, at::kInt);
  check_dtype(kOp, "query_starts", query_starts, at::kInt);
  check_dtype(kOp, "context_lens", context_lens, at::kInt);
  check_shape(kOp, "context_lens", context_lens, {"num_seqs"});
  check_shape(kOp, "query_starts", query_starts, {context_lens.size(0) + 1});
  check_shape(kOp, "block_tables", tables, {context_lens.size(0), "max_blocks"});
  check_dense_rows(kOp, "block_tables", tables);
  const at::Tensor starts = query_starts.contiguous();
  const at::Tensor lens = context_lens.contiguous();
  const int64_t num_seqs = lens.size(0);
  const Retention retention{counts("windows", windows, num_seqs), counts("sinks", first_tokens, num_seqs),
                            std::min<int64_t>(all, INT32_MAX), has_query};
  for (int64_t s = 0; s < num_seqs; ++s) {
    TORCH_CHECK_VALUE(retention.sinks(s) == 0 || retention.window(s) > 0, kOp, ": sinks[", s, "] is ",
                      retention.sinks(s), ", expected 0 where there is no window");
  }
  const int64_t block_size = kv.size(4);
  const int64_t capacity = tables.size(1) * block_size;
  const int32_t* start = starts.const_data_ptr<int32_t>();
  const int32_t* len = lens.const_data_ptr<int32_t>();
  TORCH_CHECK_VALUE(start[0] == 0, kOp, ": query_starts begins with ", start[0], ", expected 0");
  std::vector<AttentionSequence> sequences;
  sequences.reserve(static_cast<size_t>(num_seqs));
  for (int64_t s = 0; s < num_seqs; ++s) {
    const int64_t tokens = static_cast<int64_t>(start[s + 1]) - start[s];
    TORCH_CHECK_VALUE(tokens >= 0 && tokens <= len[s], kOp, ": query_starts gives sequence ", s, " ", tokens,
                      " rows, expected 0 to ", len[s], " (its context_lens)");
    if (tokens == 0) continue;
    TORCH_CHECK_VALUE(len[s] <= capacity, kOp, ": context_lens[", s, "] is ", len[s], ", expected at most ", capacity,
                      " (block_tables has ", tables.size(1), " blocks of ", block_size, ")");
    const int64_t window = retention.window(s);
    const int64_t sinks = retention.sinks(s);
    TORCH_CHECK_VALUE(sinks == 0 || retention.has_query || !hides(len[s] - 1, window, sinks), kOp,
                      ": sink_query is missing, expected one (sequence ", s, " hides tokens after its sinks)");
    const int64_t first = window > 0 ? std::max<int64_t>(0, len[s] - tokens - window + 1) : 0;
    const int32_t* table = tables.const_data_ptr<int32_t>() + s * tables.stride(0);
    const auto check_blocks = [&](int64_t begin, int64_t end) {
      for (int64_t block = begin / block_size; block * block_size < end; ++block) {
        TORCH_CHECK_VALUE(table[block] >= 0 && table[block] < kv.size(0), kOp, ": block_tables[", s, ", ", block,
                          "] is ", table[block], ", expected 0 to ", kv.size(0) - 1, " (a query sees it)");
      }
    };
    check_blocks(0, std::min<int64_t>(sinks, len[s]));
    check_blocks(first, len[s]);
    sequences.push_back({static_cast<int32_t>(s), start[s], static_cast<int32_t>(tokens), len[s],
                         static_cast<int32_t>(window), static_cast<int32_t>(sinks)});
  }
  TORCH_CHECK_VALUE(start[num_seqs] == query[0], kOp, ": query has shape ", query, ", expected [", start[num_seqs],
                    ", num_heads, ", query[2], "] (query_starts' end)");
  return sequences;
}

}  // namespace

AttentionBatch prepare_attention(const at::Tensor& kv, const std::optional<at::Tensor>& scales,
                                 const at::Tensor& block_tables, const at::Tensor& query_starts,
                                 const at::Tensor& context_lens, int64_t num_tokens, int64_t num_heads, int64_t window,
                                 const std::optional<at::Tensor>& windows, const std::optional<at::Tensor>& sinks,
                                 bool has_sink_query) {
  const KvView view = kv_view(kOp, kv, scales, 0);
  TORCH_CHECK_VALUE(view.num_kv_heads > 0 && num_heads % view.num_kv_heads == 0, kOp, ": query has ", num_heads,
                    " heads, expected a multiple of kv's ", view.num_kv_heads);
  TORCH_CHECK_VALUE(window >= 0, kOp, ": window is ", window, ", expected 0 (all) or more");
  const auto sequences = checked_sequences(kv, block_tables, query_starts, context_lens,
                                           {num_tokens, num_heads, view.head_dim}, windows, sinks, window,
                                           has_sink_query);
  const int heads_per_kv = static_cast<int>(num_heads / view.num_kv_heads);
  const int threads = static_cast<int>(threads_at_hand());
  AttentionBatch batch{plan_attention(sequences, view.num_kv_heads, heads_per_kv, view.head_dim, threads), {},
                       block_tables, num_tokens, num_heads};
  if (Team::led() != nullptr) {
    batch.readings = plan_readings(batch.plan, view, block_tables.const_data_ptr<int32_t>(), block_tables.stride(0),
                                   heads_per_kv, threads);
  }
  return batch;
}

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& kv, int64_t layer, const AttentionBatch& batch,
                           double scale, const std::optional<at::Tensor>& scales,
                           const std::optional<at::Tensor>& sink_query, const std::optional<at::Tensor>& key_offset) {
  AttentionArgs args{};
  args.kv = kv_view(kOp, kv, scales, layer);
  const int64_t num_kv_heads = args.kv.num_kv_heads;
  const int64_t head_dim = args.kv.head_dim;
  check_dtype(kOp, "query", query, at::kFloat);
  check_shape(kOp, "query", query, {batch.num_tokens, batch.num_heads, head_dim});
  check_dense_rows(kOp, "query", query);
  if (sink_query.has_value()) {
    check_dtype(kOp, "sink_query", *sink_query, at::kFloat);
    check_shape(kOp, "sink_query", *sink_query, {query.size(0), query.size(1), head_dim});
    check_dense_rows(kOp, "sink_query", *sink_query);
    args.sink_query = sink_query->const_data_ptr<float>();
    args.sink_token_stride = sink_query->stride(0);
    args.sink_head_stride = sink_query->stride(1);
  }
  if (key_offset.has_value()) {
    check_dtype(kOp, "key_offset", *key_offset, at::kFloat);
    check_shape(kOp, "key_offset", *key_offset, {num_kv_heads, head_dim});
    check_contiguous(kOp, "key_offset", *key_offset);
    args.key_offset = key_offset->const_data_ptr<float>();
  }
  at::Tensor out = at::empty(query.sizes(), query.options());
  const AttentionPlan& plan = batch.plan;
  if (plan.items.empty() || query.numel() == 0) return out;
  args.query = query.const_data_ptr<float>();
  args.query_token_stride = query.stride(0);
  args.query_head_stride = query.stride(1);
  args.out = out.data_ptr<float>();
  args.block_tables = batch.block_tables.const_data_ptr<int32_t>();
  args.table_stride = batch.block_tables.stride(0);
  args.num_heads = static_cast<int>(query.size(1));
  args.heads_per_kv = static_cast<int>(query.size(1) / num_kv_heads);
  args.head_dim = static_cast<int>(head_dim);
  args.scale = static_cast<float>(scale);

  const int64_t num_items = static_cast<int64_t>(plan.items.size());
  const int64_t threads = useful_threads(plan.cost, num_items);
  const int64_t scratch_size = scratch_floats(
      plan.max_rows, head_dim, scales_per_vector(args.kv.type, head_dim), args.sink_query != nullptr);
  const at::Tensor scratch = at::empty({threads * scratch_size + plan.partial_floats}, query.options());
  float* memory = scratch.data_ptr<float>();
  args.partials = memory + threads * scratch_size;
  const AttentionKernels& kernels = kernels_for(args.kv.type);
  const AttentionItem* items = plan.items.data();
  for_each_item_and_next(num_items, threads, [&](int64_t thread, int64_t item, int64_t next) {
    kernels.attend(args, items[item], next >= 0 ? items + next : nullptr, memory + thread * scratch_size);
  });
  for_each_item(static_cast<int64_t>(plan.folds.size()), plan.folds.empty() ? 1 : threads,
                [&](int64_t, int64_t fold) { kernels.fold(args, plan.folds[static_cast<size_t>(fold)]); });
  return out;
}

namespace {

at::Tensor paged_attention_once(const at::Tensor& query, const at::Tensor& kv, int64_t layer,
                                const at::Tensor& block_tables, const at::Tensor& query_starts,
                                const at::Tensor& context_lens, double scale, int64_t window,
                                const std::optional<at::Tensor>& scales, const std::optional<at::Tensor>& windows,
                                const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& sink_query,
                                const std::optional<at::Tensor>& key_offset) {
  check_dtype(kOp, "query", query, at::kFloat);
  check_shape(kOp, "query", query, {"num_tokens", "num_heads", kv_view(kOp, kv, scales, layer).head_dim});
  const AttentionBatch batch = prepare_attention(kv, scales, block_tables, query_starts, context_lens, query.size(0),
                                                 query.size(1), window, windows, sinks, sink_query.has_value());
  return paged_attention(query, kv, layer, batch, scale, scales, sink_query, key_offset);
}

}  // namespace

TORCH_LIBRARY_IMPL(kvstrata, CPU, m) { m.impl("paged_attention", paged_attention_once); }

}  // namespace kvstrata
