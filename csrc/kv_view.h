// One layer of a pool tensor as plain strides.
#pragma once

#include "attention/attention.h"
#include "checks.h"

namespace kvstrata {

// Raises ValueError unless `kv` is a pool of a supported dtype that holds `layer`.
inline KvView kv_view(const char* op, const at::Tensor& kv, int64_t layer) {
  check_shape(op, "kv", kv, {"num_blocks", "group_layers", 2, "num_kv_heads", "block_size", "head_dim"});
  TORCH_CHECK_VALUE(layer >= 0 && layer < kv.size(1), op, ": layer is ", layer, ", expected 0 to ", kv.size(1) - 1,
                    " (kv's layers)");
  check_dense_rows(op, "kv", kv);
  KvView view{};
  switch (kv.scalar_type()) {
    case at::kFloat:
      view.type = KvType::float32;
      break;
    case at::kBFloat16:
      view.type = KvType::bfloat16;
      break;
    case at::kHalf:
      view.type = KvType::float16;
      break;
    default:
      TORCH_CHECK_VALUE(false, op, ": kv has dtype ", dtype_name(kv.scalar_type()),
                        ", expected a floating point dtype of 16 or 32 bits");
  }
  const int64_t bytes = kv.element_size();
  view.base = static_cast<const uint8_t*>(kv.data_ptr()) + layer * kv.stride(1) * bytes;
  view.block_stride = kv.stride(0) * bytes;
  view.part_stride = kv.stride(2) * bytes;
  view.head_stride = kv.stride(3) * bytes;
  view.token_stride = kv.stride(4) * bytes;
  view.block_size = static_cast<int>(kv.size(4));
  return view;
}

}  // namespace kvstrata
