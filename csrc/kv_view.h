// One layer of a pool tensor as plain strides.
#pragma once

#include <optional>

#include "attention/attention.h"
#include "checks.h"
#include "kv_rotation.h"

namespace kvstrata {

inline KvType kv_type(const char* op, const at::Tensor& kv) {
  switch (kv.scalar_type()) {
    case at::kFloat:
      return KvType::float32;
    case at::kBFloat16:
      return KvType::bfloat16;
    case at::kHalf:
      return KvType::float16;
    case at::kFloat8_e4m3fn:
      return KvType::float8_e4m3;
    case at::kChar:
      return KvType::int8;
    case at::kByte:
      return KvType::int4;
    default:
      TORCH_CHECK_VALUE(false, op, ": kv has dtype ", dtype_name(kv.scalar_type()),
                        ", expected a floating point dtype of 8 (e4m3), 16 or 32 bits, int8 or uint8 (two int4 a byte)");
  }
}

// Finds the scales of a quantised pool, which must lie in its blocks.
inline void view_scales(const char* op, const at::Tensor& kv, const std::optional<at::Tensor>& scales, int64_t layer,
                        KvView* view) {
  const int count = scales_per_vector(view->type, view->head_dim);
  TORCH_CHECK_VALUE(scales.has_value() == (count > 0), op, ": scales are ", scales.has_value() ? "given" : "missing",
                    ", expected ", count > 0 ? "them" : "none", " for a pool of ", dtype_name(kv.scalar_type()));
  if (count == 0) return;
  check_dtype(op, "scales", *scales, view->type == KvType::int4 ? at::kByte : at::kBFloat16);
  check_shape(op, "scales", *scales, {kv.size(0), kv.size(1), 2, kv.size(3), kv.size(4), count});
  const int64_t bytes = scales->element_size();
  const auto* first = static_cast<const uint8_t*>(scales->data_ptr()) + layer * scales->stride(1) * bytes;
  const bool dense = (count == 1 || scales->stride(5) == 1) && (kv.size(4) == 1 || scales->stride(4) == count);
  TORCH_CHECK_VALUE(dense && (kv.size(0) == 1 || scales->stride(0) * bytes == view->block_stride), op,
                    ": scales have strides ", scales->strides(), ", expected kv's blocks and ", count,
                    " side by side for each token");
  view->scale_offset = first - view->base;
  view->scale_part_stride = scales->stride(2) * bytes;
  view->scale_head_stride = scales->stride(3) * bytes;
}

// Raises ValueError unless `kv` is a pool of a supported dtype that holds `layer`, and `scales` are its scales.
inline KvView kv_view(const char* op, const at::Tensor& kv, const std::optional<at::Tensor>& scales, int64_t layer) {
  check_shape(op, "kv", kv, {"num_blocks", "group_layers", 2, "num_kv_heads", "block_size", "head_dim"});
  TORCH_CHECK_VALUE(layer >= 0 && layer < kv.size(1), op, ": layer is ", layer, ", expected 0 to ", kv.size(1) - 1,
                    " (kv's layers)");
  check_dense_rows(op, "kv", kv);
  KvView view{};
  view.type = kv_type(op, kv);
  const int64_t bytes = kv.element_size();
  view.base = static_cast<const uint8_t*>(kv.data_ptr()) + layer * kv.stride(1) * bytes;
  view.block_stride = kv.stride(0) * bytes;
  view.part_stride = kv.stride(2) * bytes;
  view.head_stride = kv.stride(3) * bytes;
  view.token_stride = kv.stride(4) * bytes;
  view.block_size = static_cast<int>(kv.size(4));
  view.num_kv_heads = static_cast<int>(kv.size(3));
  view.head_dim = static_cast<int>(kv.size(5) * (view.type == KvType::int4 ? 2 : 1));
  view.vector_bytes = static_cast<int>(kv.size(5) * bytes);
  TORCH_CHECK_VALUE(view.type != KvType::int4 || can_rotate(view.head_dim), op, ": kv has head_dim ", view.head_dim,
                    " in int4, expected a power of two, or that times 12 or 20, up to ", kMaxRotated);
  view_scales(op, kv, scales, layer, &view);
  return view;
}

}  // namespace kvstrata
