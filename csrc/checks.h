// What operators check of their arguments: a mismatch becomes a ValueError that tells what was given and what
// would be right, in the words of the Python reference's checks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <initializer_list>
#include <string>

namespace kvstrata {

// An axis of a given size, or of any size under a name.
struct Axis {
  Axis(int64_t size) : size(size) {}
  Axis(const char* name) : name(name) {}

  int64_t size = -1;
  const char* name = nullptr;
};

inline std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "torch.float32";
    case at::kDouble:
      return "torch.float64";
    case at::kHalf:
      return "torch.float16";
    case at::kLong:
      return "torch.int64";
    case at::kInt:
      return "torch.int32";
    case at::kShort:
      return "torch.int16";
    case at::kChar:
      return "torch.int8";
    case at::kByte:
      return "torch.uint8";
    default: {
      std::string name = c10::toString(dtype);
      std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
      return "torch." + name;
    }
  }
}

inline void check_dtype(const char* op, const char* name, const at::Tensor& tensor, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == dtype, op, ": ", name, " has dtype ", dtype_name(tensor.scalar_type()),
                    ", expected ", dtype_name(dtype));
}

inline void check_shape(const char* op, const char* name, const at::Tensor& tensor, std::initializer_list<Axis> axes) {
  bool fits = tensor.dim() == static_cast<int64_t>(axes.size());
  int64_t i = 0;
  for (const Axis& axis : axes) {
    fits = fits && (axis.name != nullptr || tensor.size(i) == axis.size);
    ++i;
  }
  if (fits) return;
  std::string expected;
  for (const Axis& axis : axes) {
    if (!expected.empty()) expected += ", ";
    expected += axis.name != nullptr ? axis.name : std::to_string(axis.size);
  }
  TORCH_CHECK_VALUE(false, op, ": ", name, " has shape ", tensor.sizes(), ", expected [", expected, "]");
}

// Raises unless the last axis is dense, as kernels that read vectors need.
inline void check_dense_rows(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.numel() == 0 || tensor.size(-1) == 1 || tensor.stride(-1) == 1, op, ": ", name,
                    " has strides ", tensor.strides(), ", expected 1 in the last axis");
}

inline void check_contiguous(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), op, ": ", name, " has strides ", tensor.strides(),
                    ", expected contiguous");
}

}  // namespace kvstrata
