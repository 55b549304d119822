// What operators check of their arguments; a mismatch becomes a ValueError that tells what was given.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace kvstrata {

// Raises unless `tensor` has `dtype` and as many axes as `axes` names.
inline void check_tensor(const char* op, const char* name, const at::Tensor& tensor, at::ScalarType dtype,
                         int64_t rank, const char* axes) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == dtype, op, ": ", name, " has dtype ", tensor.scalar_type(), ", expected ",
                    dtype);
  TORCH_CHECK_VALUE(tensor.dim() == rank, op, ": ", name, " has shape ", tensor.sizes(), ", expected ", axes);
}

inline void check_size(const char* op, const char* name, const at::Tensor& tensor, int64_t axis, int64_t size) {
  TORCH_CHECK_VALUE(tensor.size(axis) == size, op, ": ", name, " has shape ", tensor.sizes(), ", expected size ", size,
                    " in axis ", axis);
}

// Raises unless the last axis is dense, as kernels that read vectors need.
inline void check_dense_rows(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.numel() == 0 || tensor.size(-1) == 1 || tensor.stride(-1) == 1, op, ": ", name,
                    " has strides ", tensor.strides(), ", expected 1 in the last axis");
}

}  // namespace kvstrata
