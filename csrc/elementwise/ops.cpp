// torch.ops.kvstrata.{rms_norm, add_rms_norm, gated_activation, fused_gated_activation} on the CPU.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <string>

#include "checks.h"
#include "dispatch.h"
#include "elementwise/elementwise.h"
#include "operators.h"
#include "parallel.h"

namespace kvstrata {
namespace {

// Calls run(row) for each row, in pieces of rows worth a thread's while.
template <class Run>
void for_each_row(int64_t rows, int64_t cost_of_row, const Run& run) {
  constexpr int64_t kPieceCost = 4096;
  const int64_t piece = std::max<int64_t>(1, kPieceCost / std::max<int64_t>(1, cost_of_row));
  const int64_t pieces = (rows + piece - 1) / piece;
  for_each_item(pieces, useful_threads(rows * cost_of_row, pieces), [&](int64_t, int64_t item) {
    const int64_t end = std::min(rows, (item + 1) * piece);
    for (int64_t row = item * piece; row < end; ++row) run(row);
  });
}

// Rows [num_rows, size] of vectors whose last axis is dense, copied only where no single stride leads from row
// to row.
at::Tensor as_rows(const at::Tensor& x) {
  if (x.dim() == 2 && (x.size(1) <= 1 || x.stride(1) == 1)) return x;
  return x.reshape({-1, x.size(-1)}).contiguous();
}

void check_vectors(const char* op, const char* name, const at::Tensor& x, const at::Tensor& weight) {
  check_dtype(op, name, x, at::kFloat);
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) > 0, op, ": ", name, " has shape ", x.sizes(),
                    ", expected [..., size]");
  check_dtype(op, "weight", weight, at::kFloat);
  check_shape(op, "weight", weight, {x.size(-1)});
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  check_vectors("rms_norm", "x", x, weight);
  at::Tensor out = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return out;
  const int64_t size = x.size(-1);
  const at::Tensor rows = as_rows(x);
  const at::Tensor dense_weight = weight.contiguous();
  const float* source = rows.const_data_ptr<float>();
  const float* scale = dense_weight.const_data_ptr<float>();
  float* target = out.data_ptr<float>();
  const int64_t stride = rows.stride(0);
  const ElementwiseKernels& kernels = KVSTRATA_PICK(elementwise_kernels);
  for_each_row(rows.size(0), size / 4, [&](int64_t row) {
    kernels.rms_norm(source + row * stride, scale, static_cast<float>(eps), size, target + row * size);
  });
  return out;
}

namespace {

at::Tensor add_rms_norm(const at::Tensor& residual, const at::Tensor& x, const at::Tensor& weight, double eps) {
  constexpr const char* op = "add_rms_norm";
  check_vectors(op, "residual", residual, weight);
  check_contiguous(op, "residual", residual);
  check_dtype(op, "x", x, at::kFloat);
  TORCH_CHECK_VALUE(x.sizes() == residual.sizes(), op, ": x has shape ", x.sizes(), ", expected ", residual.sizes());
  at::Tensor out = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return out;
  const int64_t size = x.size(-1);
  const at::Tensor rows = as_rows(x);
  const at::Tensor dense_weight = weight.contiguous();
  const float* source = rows.const_data_ptr<float>();
  const float* scale = dense_weight.const_data_ptr<float>();
  float* sum = residual.data_ptr<float>();
  float* target = out.data_ptr<float>();
  const int64_t stride = rows.stride(0);
  const ElementwiseKernels& kernels = KVSTRATA_PICK(elementwise_kernels);
  for_each_row(rows.size(0), size / 3, [&](int64_t row) {
    kernels.add_rms_norm(sum + row * size, source + row * stride, scale, static_cast<float>(eps), size,
                         target + row * size);
  });
  return out;
}

}  // namespace

Activation activation_named(const char* op, c10::string_view kind) {
  if (kind == "silu") return Activation::silu;
  TORCH_CHECK_VALUE(kind == "gelu_tanh", op, ": kind is '", std::string(kind), "', expected one of silu, gelu_tanh");
  return Activation::gelu_tanh;
}

namespace {

// Rows `stride` apart of `size` gates and as many ups.
at::Tensor gate_rows(const float* gates, int64_t gate_stride, const float* ups, int64_t up_stride, int64_t rows,
                     int64_t size, Activation kind, const at::TensorOptions& options) {
  at::Tensor out = at::empty({rows, size}, options);
  if (out.numel() == 0) return out;
  float* target = out.data_ptr<float>();
  const ElementwiseKernels& kernels = KVSTRATA_PICK(elementwise_kernels);
  // Pieces of rows, so that one row occupies several threads: each value stands for itself.
  constexpr int64_t kPiece = 256;
  const int64_t pieces = (size + kPiece - 1) / kPiece;
  for_each_row(rows * pieces, std::min(kPiece, size), [&](int64_t piece) {
    const int64_t row = piece / pieces;
    const int64_t first = piece % pieces * kPiece;
    kernels.gate(gates + row * gate_stride + first, ups + row * up_stride + first, kind, std::min(kPiece, size - first),
                 target + row * size + first);
  });
  return out;
}

at::Tensor gated_activation(const at::Tensor& gate, const at::Tensor& up, c10::string_view kind) {
  constexpr const char* op = "gated_activation";
  check_dtype(op, "gate", gate, at::kFloat);
  check_dtype(op, "up", up, at::kFloat);
  TORCH_CHECK_VALUE(gate.dim() >= 1, op, ": gate has shape ", gate.sizes(),
                    ", expected [num_tokens, intermediate_size]");
  TORCH_CHECK_VALUE(up.sizes() == gate.sizes(), op, ": up has shape ", up.sizes(), ", expected ", gate.sizes());
  const at::Tensor gates = as_rows(gate);
  const at::Tensor ups = as_rows(up);
  return gate_rows(gates.const_data_ptr<float>(), gates.stride(0), ups.const_data_ptr<float>(), ups.stride(0),
                   gates.size(0), gates.size(1), activation_named(op, kind), gate.options())
      .view(gate.sizes());
}

at::Tensor fused_gated_activation(const at::Tensor& gate_up, c10::string_view kind) {
  constexpr const char* op = "fused_gated_activation";
  check_dtype(op, "gate_up", gate_up, at::kFloat);
  check_shape(op, "gate_up", gate_up, {"num_tokens", "2 * intermediate_size"});
  TORCH_CHECK_VALUE(gate_up.size(1) % 2 == 0, op, ": gate_up has shape ", gate_up.sizes(),
                    ", expected [num_tokens, 2 * intermediate_size]");
  const at::Tensor rows = as_rows(gate_up);
  const int64_t size = rows.size(1) / 2;
  const float* first = rows.const_data_ptr<float>();
  return gate_rows(first, rows.stride(0), first + size, rows.stride(0), rows.size(0), size, activation_named(op, kind),
                   rows.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(kvstrata, CPU, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("gated_activation", gated_activation);
  m.impl("fused_gated_activation", fused_gated_activation);
}

}  // namespace kvstrata
