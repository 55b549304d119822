// The layers of a decoder and its head, gone through at one go.
#pragma once

#include <torch/custom_class.h>

#include <optional>
#include <string>
#include <vector>

#include "attention/batch.h"
#include "elementwise/elementwise.h"
#include "team.h"

namespace kvstrata {

using OptionalTensors = std::vector<std::optional<at::Tensor>>;

// Weights that share an input, packed, with the bias of all.
struct Product {
  std::vector<at::Tensor> weights;
  std::optional<at::Tensor> bias;
};

struct Layer {
  at::Tensor attn_norm;
  std::optional<at::Tensor> q_norm;
  std::optional<at::Tensor> k_norm;
  std::optional<at::Tensor> post_attn_norm;
  at::Tensor mlp_norm;
  std::optional<at::Tensor> post_mlp_norm;
  Product qkv;
  Product o;
  Product gate_up;
  Product down;
  std::optional<at::Tensor> key_offset;
  int64_t group;  // whose pool it writes to
  int64_t index;  // among the group's layers
  int64_t rope;   // which of a step's rotations it takes
};

// What a step's layers have in common: for each group its pool, for each kind of RoPE its rotations.
struct StepBatch {
  at::Tensor logit_rows;
  at::Tensor query_starts;
  at::Tensor context_lens;
  std::vector<at::Tensor> kv;
  std::vector<at::Tensor> block_tables;
  std::vector<at::Tensor> slots;
  OptionalTensors scales;
  std::vector<at::Tensor> cos;
  std::vector<at::Tensor> sin;
  std::optional<at::Tensor> windows;  // of the sequences, in groups without a window of their own
  std::optional<at::Tensor> sinks;
  OptionalTensors sink_cos;  // by kind of RoPE; empty where no token hides others behind sinks
  OptionalTensors sink_sin;
};

// A decoder whose products are all packed: `torch.classes.kvstrata.DecoderStack`. It calls the operators that
// kvstrata.models.decoder calls, in the same order: that loop is its specification, and the bits are the same.
class DecoderStack : public torch::CustomClassHolder {
 public:
  // windows: of each layer group, 0 for all tokens. final_norm, head: behind the last layer.
  DecoderStack(double eps, double attention_scale, const std::string& activation, std::vector<int64_t> windows,
               at::Tensor final_norm, std::vector<at::Tensor> head, std::optional<at::Tensor> head_bias);

  // norms: attn, q, k, post_attn, mlp, post_mlp. biases: of qkv, o, gate_up, down. place: group, index, rope.
  void add_layer(OptionalTensors norms, std::vector<at::Tensor> qkv, std::vector<at::Tensor> o,
                 std::vector<at::Tensor> gate_up, std::vector<at::Tensor> down, OptionalTensors biases,
                 std::vector<int64_t> place);

  void offset_keys(int64_t layer, at::Tensor offset);

  // hidden: float32 [num_tokens, hidden_size], used up. Returns logits, float32 [num_logits, vocab_size].
  // Raises ValueError where parts of the batch do not fit together or are not on the CPU.
  at::Tensor run(const at::Tensor& hidden, const StepBatch& batch) const;

 private:
  // What becomes of `hidden` before a product: `added`, if defined, through the norm `post` that some models put behind
  // a block, is added to it, and then the norm `weight` taken.
  struct Norm {
    const at::Tensor& added;
    const std::optional<at::Tensor>* post;
    const at::Tensor& weight;
  };

  void check(const at::Tensor& hidden, const StepBatch& batch) const;
  at::Tensor go(at::Tensor hidden, const StepBatch& batch) const;
  std::vector<AttentionBatch> prepare(const StepBatch& batch, int64_t num_tokens) const;
  at::Tensor attend(const Layer& layer, const at::Tensor& projected, const StepBatch& batch,
                    const AttentionBatch& attention) const;
  bool has_sink_query(const StepBatch& batch, size_t group) const;
  at::Tensor sink_query(const Layer& layer, const at::Tensor& projected, const StepBatch& batch) const;
  at::Tensor multiply(const Product& product, const at::Tensor& x, int64_t number) const;
  at::Tensor multiply_normed(const Product& product, const at::Tensor& hidden, const Norm& norm, int64_t number) const;
  at::Tensor multiply_gated(const Product& product, const at::Tensor& gate_up, int64_t number) const;
  void expect_after(int64_t product) const;

  double eps_;
  double attention_scale_;
  Activation activation_;
  std::vector<int64_t> windows_;
  at::Tensor final_norm_;
  Product head_;
  std::vector<Layer> layers_;
  std::vector<Reading> readings_;  // of all products, in the order in which a step meets them
};

}  // namespace kvstrata
