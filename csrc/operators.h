// The operators that a decoder's layers are made of, for code that calls them without torch's dispatch. Their
// arguments are those of the schemas in kvstrata.kernels.schemas.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <optional>

#include "elementwise/elementwise.h"
#include "team.h"

namespace kvstrata {

at::Tensor linear(const at::Tensor& x, at::TensorList weights, const std::optional<at::Tensor>& bias);
// A row of a product's input, float32 [in_features]: where it lies, or `room` of as many floats, filled with it.
using InputRow = c10::function_ref<const float*(int64_t row, float* room)>;
// The product with rows that are made when they are quantised, each once, by any thread. Must not throw.
at::Tensor linear(int64_t rows, int64_t inputs, InputRow row, at::TensorList weights,
                  const std::optional<at::Tensor>& bias);
// What the product with a packed weight reads, in the pieces that threads take. Raises ValueError on another tensor.
Stretch packed_stretch(const at::Tensor& weight);
int64_t packed_inputs(const at::Tensor& weight);

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
// Raises ValueError for one that is not known.
Activation activation_named(const char* op, c10::string_view kind);

at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
at::Tensor rope_write_kv(const at::Tensor& qkv, const std::optional<at::Tensor>& q_norm,
                         const std::optional<at::Tensor>& k_norm, double eps, const at::Tensor& cos,
                         const at::Tensor& sin, const std::optional<at::Tensor>& positions, const at::Tensor& slots,
                         const at::Tensor& kv, int64_t layer, const std::optional<at::Tensor>& scales,
                         const std::optional<at::Tensor>& key_offset);

}  // namespace kvstrata
