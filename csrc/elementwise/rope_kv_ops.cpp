// torch.ops.kvstrata.{rope, write_kv, rope_write_kv} on the CPU: from projected queries, keys and values to
// rotated queries and a written pool.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "checks.h"
#include "dispatch.h"
#include "elementwise/elementwise.h"
#include "kv_view.h"
#include "operators.h"
#include "parallel.h"

namespace kvstrata {
namespace {

constexpr int64_t kTokensPerItem = 4;

// Where a token's vectors and their scales go: those of the first KV head's key.
struct Target {
  uint8_t* vector;
  uint8_t* scales;
};

Target target_of(const KvView& kv, int64_t slot) {
  const int64_t offset = slot % kv.block_size;
  uint8_t* block = const_cast<uint8_t*>(kv.base) + slot / kv.block_size * kv.block_stride;
  const int bytes = scales_per_vector(kv.type, kv.head_dim) * scale_bytes(kv.type);
  return {block + offset * kv.token_stride, block + kv.scale_offset + offset * bytes};
}

void store_part(const ElementwiseKernels& kernels, const KvView& kv, const Target& target, Part part, int64_t head,
                const float* x) {
  const int64_t index = static_cast<int64_t>(part);
  kernels.store_vector(x, kv.type, part, kv.head_dim, target.vector + head * kv.head_stride + index * kv.part_stride,
                       target.scales + head * kv.scale_head_stride + index * kv.scale_part_stride);
}

// The slots, once all are known to lie in the pool.
const int64_t* checked_slots(const char* op, const at::Tensor& kv, const at::Tensor& slots, int64_t num_tokens) {
  check_dtype(op, "slots", slots, at::kLong);
  check_shape(op, "slots", slots, {num_tokens});
  check_contiguous(op, "slots", slots);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const int64_t end = kv.size(0) * kv.size(4);
  if (num_tokens > 0) {
    const auto [low, high] = std::minmax_element(slot, slot + num_tokens);
    TORCH_CHECK_VALUE(*low >= 0 && *high < end, op, ": slots are ", *low, " to ", *high, ", expected 0 to ", end - 1);
  }
  return slot;
}

// Brings the lines that a token's K and V will be written to into the cache: they lie apart, and come from memory.
void fetch_target(const KvView& kv, const Target& target) {
  const bool scaled = scales_per_vector(kv.type, kv.head_dim) > 0;
  for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
    for (int64_t part = 0; part < 2; ++part) {
      const uint8_t* vector = target.vector + head * kv.head_stride + part * kv.part_stride;
      for (int64_t i = 0; i < kv.vector_bytes; i += 64) __builtin_prefetch(vector + i, 1, 3);
      if (scaled) __builtin_prefetch(target.scales + head * kv.scale_head_stride + part * kv.scale_part_stride, 1, 3);
    }
  }
}

// Calls prepare(token) for some tokens, then run(token) for them, and so on.
template <class Prepare, class Run>
void for_each_token(int64_t num_tokens, int64_t floats_per_token, const Prepare& prepare, const Run& run) {
  const int64_t items = (num_tokens + kTokensPerItem - 1) / kTokensPerItem;
  for_each_item(items, useful_threads(num_tokens * floats_per_token, items), [&](int64_t, int64_t item) {
    const int64_t end = std::min(num_tokens, (item + 1) * kTokensPerItem);
    for (int64_t token = item * kTokensPerItem; token < end; ++token) prepare(token);
    for (int64_t token = item * kTokensPerItem; token < end; ++token) run(token);
  });
}

}  // namespace

at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  constexpr const char* op = "rope";
  check_dtype(op, "x", x, at::kFloat);
  check_shape(op, "x", x, {"num_tokens", "num_heads", "head_dim"});
  TORCH_CHECK_VALUE(x.size(2) % 2 == 0, op, ": x has head_dim ", x.size(2), ", expected an even one");
  for (const auto& [name, table] : {std::pair{"cos", &cos}, std::pair{"sin", &sin}}) {
    check_dtype(op, name, *table, at::kFloat);
    check_shape(op, name, *table, {x.size(0), x.size(2) / 2});
    check_dense_rows(op, name, *table);
  }
  check_dense_rows(op, "x", x);
  at::Tensor out = at::empty(x.sizes(), x.options());
  const int64_t heads = x.size(1);
  const int64_t dim = x.size(2);
  const ElementwiseKernels& kernels = KVSTRATA_PICK(elementwise_kernels);
  const float* source = x.const_data_ptr<float>();
  float* target = out.data_ptr<float>();
  for_each_token(x.size(0), heads * dim, [](int64_t) {}, [&](int64_t token) {
    const float* c = cos.const_data_ptr<float>() + token * cos.stride(0);
    const float* s = sin.const_data_ptr<float>() + token * sin.stride(0);
    for (int64_t head = 0; head < heads; ++head) {
      kernels.rope(source + token * x.stride(0) + head * x.stride(1), c, s, dim, target + (token * heads + head) * dim);
    }
  });
  return out;
}

namespace {

void write_kv(const at::Tensor& kv, int64_t layer, const at::Tensor& key, const at::Tensor& value,
              const at::Tensor& slots, const std::optional<at::Tensor>& scales) {
  constexpr const char* op = "write_kv";
  const KvView view = kv_view(op, kv, scales, layer);
  for (const auto& [name, tensor] : {std::pair{"key", &key}, std::pair{"value", &value}}) {
    check_dtype(op, name, *tensor, at::kFloat);
    check_shape(op, name, *tensor, {key.dim() > 0 ? key.size(0) : 0, view.num_kv_heads, view.head_dim});
    check_dense_rows(op, name, *tensor);
  }
  const int64_t heads = view.num_kv_heads;
  const int64_t* slot = checked_slots(op, kv, slots, key.size(0));
  const ElementwiseKernels& kernels = KVSTRATA_PICK(elementwise_kernels);
  const float* keys = key.const_data_ptr<float>();
  const float* values = value.const_data_ptr<float>();
  const auto fetch = [&](int64_t token) { fetch_target(view, target_of(view, slot[token])); };
  for_each_token(key.size(0), 2 * heads * view.head_dim, fetch, [&](int64_t token) {
    const Target target = target_of(view, slot[token]);
    for (int64_t head = 0; head < heads; ++head) {
      store_part(kernels, view, target, Part::key, head, keys + token * key.stride(0) + head * key.stride(1));
      store_part(kernels, view, target, Part::value, head, values + token * value.stride(0) + head * value.stride(1));
    }
  });
}

const float* norm_weight(const char* op, const char* name, const std::optional<at::Tensor>& weight, int64_t dim) {
  if (!weight.has_value()) return nullptr;
  check_dtype(op, name, *weight, at::kFloat);
  check_shape(op, name, *weight, {dim});
  check_contiguous(op, name, *weight);
  return weight->const_data_ptr<float>();
}

}  // namespace

at::Tensor rope_write_kv(const at::Tensor& qkv, const std::optional<at::Tensor>& q_norm,
                         const std::optional<at::Tensor>& k_norm, double eps, const at::Tensor& cos,
                         const at::Tensor& sin, const std::optional<at::Tensor>& positions, const at::Tensor& slots,
                         const at::Tensor& kv, int64_t layer, const std::optional<at::Tensor>& scales,
                         const std::optional<at::Tensor>& key_offset) {
  constexpr const char* op = "rope_write_kv";
  const KvView view = kv_view(op, kv, scales, layer);
  const int64_t kv_heads = view.num_kv_heads;
  const int64_t dim = view.head_dim;
  check_dtype(op, "qkv", qkv, at::kFloat);
  check_shape(op, "qkv", qkv, {"num_tokens", "(num_heads + 2 * num_kv_heads) * head_dim"});
  check_dense_rows(op, "qkv", qkv);
  const int64_t tokens = qkv.size(0);
  const int64_t heads = dim > 0 ? qkv.size(1) / dim - 2 * kv_heads : 0;
  TORCH_CHECK_VALUE(dim > 0 && dim % 2 == 0 && heads > 0 && qkv.size(1) % dim == 0, op, ": qkv has shape ", qkv.sizes(),
                    ", expected [num_tokens, (num_heads + ", 2 * kv_heads, ") * ", dim, "] (kv's heads and head_dim)");
  const int64_t* position = nullptr;
  if (positions.has_value()) {
    check_dtype(op, "positions", *positions, at::kLong);
    check_shape(op, "positions", *positions, {tokens});
    check_contiguous(op, "positions", *positions);
    position = positions->const_data_ptr<int64_t>();
  }
  for (const auto& [name, table] : {std::pair{"cos", &cos}, std::pair{"sin", &sin}}) {
    check_dtype(op, name, *table, at::kFloat);
    check_shape(op, name, *table, {position == nullptr ? tokens : (cos.dim() > 0 ? cos.size(0) : 0), dim / 2});
    check_dense_rows(op, name, *table);
  }
  if (position != nullptr && tokens > 0) {
    const auto [low, high] = std::minmax_element(position, position + tokens);
    TORCH_CHECK_VALUE(*low >= 0 && *high < cos.size(0), op, ": positions are ", *low, " to ", *high,
                      ", expected 0 to ", cos.size(0) - 1, " (cos's rows)");
  }
  const float* query_weight = norm_weight(op, "q_norm", q_norm, dim);
  const float* key_weight = norm_weight(op, "k_norm", k_norm, dim);
  const float* offset = nullptr;
  if (key_offset.has_value()) {
    check_dtype(op, "key_offset", *key_offset, at::kFloat);
    check_shape(op, "key_offset", *key_offset, {kv_heads, dim});
    check_contiguous(op, "key_offset", *key_offset);
    offset = key_offset->const_data_ptr<float>();
  }
  const int64_t* slot = checked_slots(op, kv, slots, tokens);

  at::Tensor query = at::empty({tokens, heads, dim}, qkv.options());
  const ElementwiseKernels& kernels = KVSTRATA_PICK(elementwise_kernels);
  const float* rows = qkv.const_data_ptr<float>();
  float* queries = query.data_ptr<float>();
  const auto fetch = [&](int64_t token) { fetch_target(view, target_of(view, slot[token])); };
  for_each_token(tokens, qkv.size(1), fetch, [&](int64_t token) {
    const Target target = target_of(view, slot[token]);
    const float* row = rows + token * qkv.stride(0);
    const int64_t angle = position == nullptr ? token : position[token];
    const float* c = cos.const_data_ptr<float>() + angle * cos.stride(0);
    const float* s = sin.const_data_ptr<float>() + angle * sin.stride(0);
    const auto rotate = [&](const float* head, const float* weight, float* out) {
      if (weight != nullptr) kernels.rms_norm(head, weight, static_cast<float>(eps), dim, out);
      kernels.rope(weight != nullptr ? out : head, c, s, dim, out);
    };
    for (int64_t h = 0; h < heads; ++h) rotate(row + h * dim, query_weight, queries + (token * heads + h) * dim);
    thread_local std::vector<float> key;
    key.resize(static_cast<size_t>(dim));
    for (int64_t h = 0; h < kv_heads; ++h) {
      rotate(row + (heads + h) * dim, key_weight, key.data());
      if (offset != nullptr) {
        for (int64_t i = 0; i < dim; ++i) key[static_cast<size_t>(i)] -= offset[h * dim + i];
      }
      store_part(kernels, view, target, Part::key, h, key.data());
      store_part(kernels, view, target, Part::value, h, row + (heads + kv_heads + h) * dim);
    }
  });
  return query;
}

TORCH_LIBRARY_IMPL(kvstrata, CPU, m) {
  m.impl("rope", rope);
  m.impl("write_kv", write_kv);
  m.impl("rope_write_kv", rope_write_kv);
}

}  // namespace kvstrata
