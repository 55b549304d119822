#include "decoder/stack.h"

#include <ATen/ops/index_select.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "checks.h"
#include "dispatch.h"
#include "operators.h"

namespace kvstrata {
namespace {

constexpr int64_t kProducts = 4;  // of a layer

Reading reading_of(const Product& product) {
  Reading reading;
  for (const at::Tensor& weight : product.weights) reading.push_back(packed_stretch(weight));
  return reading;
}

constexpr const char* kOp = "DecoderStack";

// The operators are called without torch's dispatch, which would send tensors of other devices elsewhere.
void check_place(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided, kOp, ": ", name,
                    " is ", tensor.defined() ? tensor.toString() : "undefined", ", expected a dense tensor on the CPU");
}

void check_place(const char* name, const std::optional<at::Tensor>& tensor) {
  if (tensor.has_value()) check_place(name, *tensor);
}

template <class Tensors>
void check_places(const char* name, const Tensors& tensors) {
  for (const auto& tensor : tensors) check_place(name, tensor);
}

// Raises ValueError unless each wanted row is one of the batch's tokens.
void check_rows(const at::Tensor& rows, int64_t num_tokens) {
  TORCH_CHECK_VALUE((rows.scalar_type() == at::kLong || rows.scalar_type() == at::kInt) && rows.dim() == 1, kOp,
                    ": logit_rows has dtype ", dtype_name(rows.scalar_type()), " and shape ", rows.sizes(),
                    ", expected torch.int64 [num_logits]");
  if (rows.numel() == 0) return;
  const at::Tensor wide = rows.to(at::kLong).contiguous();
  const int64_t* row = wide.const_data_ptr<int64_t>();
  const auto [low, high] = std::minmax_element(row, row + wide.numel());
  TORCH_CHECK_VALUE(*low >= 0 && *high < num_tokens, kOp, ": logit_rows are ", *low, " to ", *high, ", expected 0 to ",
                    num_tokens - 1);
}

// The weights of a norm of `size` floats.
const float* norm_weight(const at::Tensor& weight, int64_t size) {
  check_dtype(kOp, "a norm", weight, at::kFloat);
  check_shape(kOp, "a norm", weight, {size});
  check_contiguous(kOp, "a norm", weight);
  return weight.const_data_ptr<float>();
}

}  // namespace

DecoderStack::DecoderStack(double eps, double attention_scale, const std::string& activation,
                           std::vector<int64_t> windows, at::Tensor final_norm, std::vector<at::Tensor> head, std::optional<at::Tensor> head_bias)
    : eps_(eps),
      attention_scale_(attention_scale),
      activation_(activation_named(kOp, activation)),
      windows_(std::move(windows)),
      final_norm_(std::move(final_norm)),
      head_{std::move(head), std::move(head_bias)},
      readings_{reading_of(head_)} {}

void DecoderStack::add_layer(OptionalTensors norms, std::vector<at::Tensor> qkv, std::vector<at::Tensor> o,
                             std::vector<at::Tensor> gate_up, std::vector<at::Tensor> down, OptionalTensors biases,
                             std::vector<int64_t> place) {
  TORCH_CHECK_VALUE(norms.size() == 6 && norms[0].has_value() && norms[4].has_value(), "add_layer: norms has ",
                    norms.size(), " entries, expected 6, the first and the fifth not None");
  TORCH_CHECK_VALUE(biases.size() == kProducts, "add_layer: biases has ", biases.size(), " entries, expected ",
                    kProducts);
  TORCH_CHECK_VALUE(place.size() == 3 && place[0] >= 0 && place[0] < static_cast<int64_t>(windows_.size()) &&
                        place[2] >= 0,
                    "add_layer: place is ", place, ", expected [group, index, rope] with a group below ",
                    windows_.size());
  Layer layer{*norms[0],
              norms[1],
              norms[2],
              norms[3],
              *norms[4],
              norms[5],
              {std::move(qkv), biases[0]},
              {std::move(o), biases[1]},
              {std::move(gate_up), biases[2]},
              {std::move(down), biases[3]},
              std::nullopt,
              place[0],
              place[1],
              place[2]};
  for (const Product* product : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) {
    readings_.insert(readings_.end() - 1, reading_of(*product));
  }
  layers_.push_back(std::move(layer));
}

void DecoderStack::offset_keys(int64_t layer, at::Tensor offset) {
  TORCH_CHECK_VALUE(layer >= 0 && layer < static_cast<int64_t>(layers_.size()), "offset_keys: layer is ", layer,
                    ", expected 0 to ", static_cast<int64_t>(layers_.size()) - 1);
  check_place("offset", offset);
  layers_[static_cast<size_t>(layer)].key_offset = std::move(offset);
}

void DecoderStack::check(const at::Tensor& hidden, const StepBatch& batch) const {
  const size_t groups = windows_.size();
  TORCH_CHECK_VALUE(batch.kv.size() == groups && batch.block_tables.size() == groups &&
                        batch.slots.size() == groups && batch.scales.size() == groups,
                    kOp, ": the batch has ", batch.kv.size(), " groups, expected ", groups);
  for (const Layer& layer : layers_) {
    const size_t rope = static_cast<size_t>(layer.rope);
    TORCH_CHECK_VALUE(rope < batch.cos.size() && rope < batch.sin.size(), kOp, ": the batch has ", batch.cos.size(),
                      " rotations, expected one more than ", rope);
    if (batch.sink_cos.empty() || windows_[static_cast<size_t>(layer.group)] != 0) continue;
    TORCH_CHECK_VALUE(rope < batch.sink_cos.size() && rope < batch.sink_sin.size() && batch.sink_cos[rope].has_value() &&
                          batch.sink_sin[rope].has_value() && batch.sink_cos[rope]->sizes() == batch.cos[rope].sizes(),
                      kOp, ": rotation ", rope, " for sinks is missing or of another shape, expected one like cos's, ",
                      batch.cos[rope].sizes());
  }
  check_place("hidden", hidden);
  check_place("logit_rows", batch.logit_rows);
  check_place("query_starts", batch.query_starts);
  check_place("context_lens", batch.context_lens);
  check_place("windows", batch.windows);
  check_place("sinks", batch.sinks);
  check_places("kv", batch.kv);
  check_places("block_tables", batch.block_tables);
  check_places("slots", batch.slots);
  check_places("scales", batch.scales);
  check_places("cos", batch.cos);
  check_places("sin", batch.sin);
  check_places("sink_cos", batch.sink_cos);
  check_places("sink_sin", batch.sink_sin);
  check_dtype(kOp, "hidden", hidden, at::kFloat);
  check_shape(kOp, "hidden", hidden, {"num_tokens", "hidden_size"});
  check_contiguous(kOp, "hidden", hidden);
  check_rows(batch.logit_rows, hidden.size(0));
}

at::Tensor DecoderStack::run(const at::Tensor& hidden, const StepBatch& batch) const {
  check(hidden, batch);
  const int64_t threads = threads_at_hand();
  if (threads <= 1 || Team::led() != nullptr) return go(hidden, batch);
  at::Tensor logits;
  Team::run(threads, readings_, [&] { logits = go(hidden, batch); });
  return logits;
}

// Each group's attention over the batch.
std::vector<AttentionBatch> DecoderStack::prepare(const StepBatch& batch, int64_t num_tokens) const {
  std::vector<AttentionBatch> prepared(windows_.size());
  for (const Layer& layer : layers_) {
    if (layer.index != 0) continue;
    const size_t group = static_cast<size_t>(layer.group);
    const at::Tensor& cos = batch.cos[static_cast<size_t>(layer.rope)];
    check_shape(kOp, "cos", cos, {"num_tokens", "head_dim / 2"});
    TORCH_CHECK_VALUE(cos.size(1) > 0, kOp, ": cos has shape ", cos.sizes(), ", expected at least one angle");
    const int64_t num_heads = packed_inputs(layer.o.weights[0]) / (2 * cos.size(1));
    const bool full = windows_[group] == 0;  // a layer's own window stays
    prepared[group] = prepare_attention(batch.kv[group], batch.scales[group], batch.block_tables[group],
                                        batch.query_starts, batch.context_lens, num_tokens, num_heads, windows_[group],
                                        full ? batch.windows : std::nullopt, full ? batch.sinks : std::nullopt,
                                        has_sink_query(batch, group));
  }
  return prepared;
}

// Whether queries of a group's layers are rotated for sinks as well.
bool DecoderStack::has_sink_query(const StepBatch& batch, size_t group) const {
  return windows_[group] == 0 && !batch.sink_cos.empty();
}

at::Tensor DecoderStack::go(at::Tensor hidden, const StepBatch& batch) const {
  const std::vector<AttentionBatch> attention = prepare(batch, hidden.size(0));
  const auto bring_kv = [&](size_t i) {
    Team* team = Team::led();
    if (team == nullptr || i >= layers_.size()) return;
    const size_t group = static_cast<size_t>(layers_[i].group);
    const at::Tensor& kv = batch.kv[group];
    team->bring(attention[group].readings, layers_[i].index * kv.stride(1) * kv.element_size());
  };
  int64_t product = 0;
  bring_kv(0);
  at::Tensor out;  // of the block before, to be added to `hidden`
  const std::optional<at::Tensor>* post_norm = nullptr;
  for (size_t i = 0; i < layers_.size(); ++i, product += kProducts) {
    const Layer& layer = layers_[i];
    const at::Tensor projected =
        multiply_normed(layer.qkv, hidden, {out, post_norm, layer.attn_norm}, product);
    at::Tensor attended = attend(layer, projected, batch, attention[static_cast<size_t>(layer.group)]);
    if (i + 1 == layers_.size()) {  // from here on nothing is written to the pool: only the wanted rows go on
      attended = at::index_select(attended, 0, batch.logit_rows);
      hidden = at::index_select(hidden, 0, batch.logit_rows);
    }
    out = multiply(layer.o, attended, product + 1);
    bring_kv(i + 1);  // memory has time for the next layer's keys and values while many rows are multiplied
    out = multiply_normed(layer.gate_up, hidden, {out, &layer.post_attn_norm, layer.mlp_norm}, product + 2);
    out = multiply_gated(layer.down, out, product + 3);
    post_norm = &layer.post_mlp_norm;
  }
  return multiply_normed(head_, hidden, {out, post_norm, final_norm_}, product);
}

// Writes the layer's K and V, then attends: [num_tokens, num_heads * head_dim].
at::Tensor DecoderStack::attend(const Layer& layer, const at::Tensor& projected, const StepBatch& batch,
                                const AttentionBatch& attention) const {
  const size_t group = static_cast<size_t>(layer.group);
  const size_t rope = static_cast<size_t>(layer.rope);
  const at::Tensor query =
      rope_write_kv(projected, layer.q_norm, layer.k_norm, eps_, batch.cos[rope], batch.sin[rope], std::nullopt,
                    batch.slots[group], batch.kv[group], layer.index, batch.scales[group], layer.key_offset);
  if (Team* team = Team::led()) team->bring({}, 0);
  std::optional<at::Tensor> sinks;
  if (has_sink_query(batch, group)) sinks = sink_query(layer, projected, batch);
  const at::Tensor attended = paged_attention(query, batch.kv[group], layer.index, attention, attention_scale_,
                                              batch.scales[group], sinks, layer.key_offset);
  return attended.flatten(1);
}

// The queries once more, rotated to where the sinks stay within reach.
at::Tensor DecoderStack::sink_query(const Layer& layer, const at::Tensor& projected, const StepBatch& batch) const {
  const at::Tensor& kv = batch.kv[static_cast<size_t>(layer.group)];
  const at::Tensor& cos = *batch.sink_cos[static_cast<size_t>(layer.rope)];
  const at::Tensor& sin = *batch.sink_sin[static_cast<size_t>(layer.rope)];
  const int64_t dim = 2 * cos.size(1);
  at::Tensor query = projected.view({projected.size(0), -1, dim});
  query = query.narrow(1, 0, query.size(1) - 2 * kv.size(3));
  if (layer.q_norm.has_value()) query = rms_norm(query, *layer.q_norm, eps_);
  return rope(query, cos, sin);
}

at::Tensor DecoderStack::multiply(const Product& product, const at::Tensor& x, int64_t number) const {
  expect_after(number);
  return linear(x, product.weights, product.bias);
}

// The product with normed rows, which are made a row at a time where they are quantised, and never lie in memory.
at::Tensor DecoderStack::multiply_normed(const Product& product, const at::Tensor& hidden, const Norm& norm,
                                         int64_t number) const {
  expect_after(number);
  const int64_t size = hidden.size(1);
  const float eps = static_cast<float>(eps_);
  const ElementwiseKernels& kernels = KVSTRATA_PICK(elementwise_kernels);
  const float* weight = norm_weight(norm.weight, size);
  float* rows = hidden.mutable_data_ptr<float>();
  if (!norm.added.defined()) {
    return linear(hidden.size(0), size, [&](int64_t row, float* room) {
      kernels.rms_norm(rows + row * size, weight, eps, size, room);
      return room;
    }, product.weights, product.bias);
  }
  check_shape(kOp, "a block's output", norm.added, {hidden.size(0), size});
  const float* added = norm.added.const_data_ptr<float>();
  const float* post = norm.post->has_value() ? norm_weight(**norm.post, size) : nullptr;
  return linear(hidden.size(0), size, [&](int64_t row, float* room) {
    const float* x = added + row * size;
    if (post != nullptr) kernels.rms_norm(x, post, eps, size, room);
    kernels.add_rms_norm(rows + row * size, post != nullptr ? room : x, weight, eps, size, room);
    return room;
  }, product.weights, product.bias);
}

// The same with gated activations; gate_up: [num_tokens, 2 * intermediate_size].
at::Tensor DecoderStack::multiply_gated(const Product& product, const at::Tensor& gate_up, int64_t number) const {
  expect_after(number);
  const int64_t size = gate_up.size(1) / 2;
  const float* gates = gate_up.const_data_ptr<float>();
  const ElementwiseKernels& kernels = KVSTRATA_PICK(elementwise_kernels);
  return linear(gate_up.size(0), size, [&](int64_t row, float* room) {
    const float* gate = gates + row * 2 * size;
    kernels.gate(gate, gate + size, activation_, size, room);
    return room;
  }, product.weights, product.bias);
}

// Threads that wait during this product fetch the next one's weights.
void DecoderStack::expect_after(int64_t product) const {
  if (Team* team = Team::led()) team->expect(product + 1);
}

TORCH_LIBRARY_FRAGMENT(kvstrata, m) {
  m.class_<DecoderStack>("DecoderStack")
      .def(torch::init<double, double, std::string, std::vector<int64_t>, at::Tensor, std::vector<at::Tensor>,
                       std::optional<at::Tensor>>())
      .def("add_layer", &DecoderStack::add_layer)
      .def("offset_keys", &DecoderStack::offset_keys)
      .def("run", [](const c10::intrusive_ptr<DecoderStack>& self, const at::Tensor& hidden, at::Tensor logit_rows,
                     at::Tensor query_starts, at::Tensor context_lens, std::vector<at::Tensor> kv,
                     std::vector<at::Tensor> block_tables, std::vector<at::Tensor> slots, OptionalTensors scales,
                     std::vector<at::Tensor> cos, std::vector<at::Tensor> sin, std::optional<at::Tensor> windows,
                     std::optional<at::Tensor> sinks, OptionalTensors sink_cos, OptionalTensors sink_sin) {
        const StepBatch batch{std::move(logit_rows),   std::move(query_starts), std::move(context_lens), std::move(kv),
                              std::move(block_tables), std::move(slots),        std::move(scales),       std::move(cos),
                              std::move(sin),          std::move(windows),      std::move(sinks),
                              std::move(sink_cos),     std::move(sink_sin)};
        return self->run(hidden, batch);
      });
}

}  // namespace kvstrata
