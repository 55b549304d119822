// linear, pack_weight and packed_embedding: what their arguments must be, and how the work is shared out.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "linear/kernels.h"
#include "linear/pack.h"
#include "operators.h"
#include "parallel.h"

namespace kvstrata {
namespace {

const LinearKernels& kernels() { return KVSTRATA_PICK(linear_kernels); }

constexpr int64_t kLargestSize = int64_t{1} << 31;  // of an axis, so that no size in bytes overflows

struct PackedWeight {
  Format format;
  int64_t outputs;
  int64_t inputs;
  int64_t groups;
  const uint8_t* tiles;
};

PackedWeight open_packed(const char* op, const at::Tensor& weight) {
  TORCH_CHECK_VALUE(weight.scalar_type() == at::kByte && weight.dim() == 1 && weight.is_contiguous(), op,
                    ": a packed weight has dtype ", weight.scalar_type(), " and shape ", weight.sizes(),
                    ", expected contiguous torch.uint8 [bytes] made by pack_weight");
  PackedHeader header;
  TORCH_CHECK_VALUE(weight.numel() >= static_cast<int64_t>(sizeof(header)), op, ": a packed weight has ",
                    weight.numel(), " bytes, expected at least its header of ", sizeof(header));
  std::memcpy(&header, weight.const_data_ptr<uint8_t>(), sizeof(header));
  TORCH_CHECK_VALUE(std::memcmp(header.magic, kPackedMagic, sizeof(kPackedMagic)) == 0 &&
                        header.version == kPackedVersion && header.format >= 0 && header.format < kFormats &&
                        header.outputs > 0 && header.outputs <= kLargestSize && header.inputs > 0 &&
                        header.inputs <= kLargestSize,
                    op, ": a weight does not start with the header of a packed weight, expected one made by "
                        "pack_weight");
  const Format format = static_cast<Format>(header.format);
  const int64_t groups = group_count(format, header.inputs);
  const int64_t expected =
      static_cast<int64_t>(sizeof(header)) + tile_count(header.outputs) * tile_bytes(format, groups);
  TORCH_CHECK_VALUE(weight.numel() == expected, op, ": a packed weight of [", header.outputs, ", ",
                    header.inputs, "] has ", weight.numel(), " bytes, expected ", expected);
  return {format, header.outputs, header.inputs, groups, weight.const_data_ptr<uint8_t>() + sizeof(header)};
}

struct QuantRows {
  at::Tensor storage;
  QuantGroup* rows;
  int64_t stride;
};

QuantRows room_for_rows(int64_t rows, int64_t groups) {
  const int64_t stride = row_stride_groups(groups);
  const int64_t line = static_cast<int64_t>(sizeof(QuantGroup));
  at::Tensor storage = at::empty({rows * stride * line + line}, at::TensorOptions().dtype(at::kByte));
  const uintptr_t start = reinterpret_cast<uintptr_t>(storage.mutable_data_ptr<uint8_t>());
  return {storage, reinterpret_cast<QuantGroup*>((start + line - 1) / line * line), stride};
}

// Two tiles of one weight times some rows: what one thread takes at a time.
struct Unit {
  size_t weight;
  int64_t first_tile;
  int64_t first_row;
  int64_t last_row;
};

std::vector<Unit> share_out(const std::vector<PackedWeight>& weights, int64_t rows) {
  int64_t pairs = 0;
  for (const PackedWeight& weight : weights) pairs += (tile_count(weight.outputs) + 1) / 2;
  // Each unit expands its tiles anew, so rows are cut only where tiles are too few to occupy the threads.
  constexpr int64_t kFewestRows = 64;
  const int64_t threads = threads_at_hand();
  const int64_t most = std::max<int64_t>(1, rows / kFewestRows);
  int64_t chunks = std::clamp<int64_t>((4 * threads + pairs - 1) / std::max<int64_t>(pairs, 1), 1, most);
  // With many rows each thread has its own in all products, and finds what it wrote in its own cache.
  constexpr int64_t kOwnRows = 128;
  if (rows >= threads * kOwnRows) chunks = std::max(chunks, threads);
  std::vector<Unit> units;
  units.reserve(static_cast<size_t>(pairs * chunks));
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (size_t w = 0; w < weights.size(); ++w) {
      for (int64_t tile = 0; tile < tile_count(weights[w].outputs); tile += 2) {
        units.push_back({w, tile, rows * chunk / chunks, rows * (chunk + 1) / chunks});
      }
    }
  }
  return units;
}

}  // namespace

Stretch packed_stretch(const at::Tensor& tensor) {
  const PackedWeight weight = open_packed("packed_stretch", tensor);
  const int64_t bytes = tile_bytes(weight.format, weight.groups);
  return {weight.tiles, tile_count(weight.outputs) * bytes, 2 * bytes};
}

int64_t packed_inputs(const at::Tensor& weight) { return open_packed("packed_inputs", weight).inputs; }

at::Tensor linear(int64_t rows, int64_t inputs, InputRow row, at::TensorList weights,
                  const std::optional<at::Tensor>& bias) {
  TORCH_CHECK_VALUE(!weights.empty(), "linear: weights has 0 entries, expected at least 1");
  std::vector<PackedWeight> packed;
  std::vector<int64_t> columns;
  packed.reserve(weights.size());
  columns.reserve(weights.size());
  int64_t groups = 0;
  int64_t outputs = 0;
  int64_t bytes = 0;
  for (const at::Tensor& tensor : weights) {
    packed.push_back(open_packed("linear", tensor));
    const PackedWeight& weight = packed.back();
    TORCH_CHECK_VALUE(weight.inputs == inputs, "linear: x has shape [", rows, ", ", inputs,
                      "], expected [num_tokens, ", weight.inputs, "] for a weight of [", weight.outputs, ", ",
                      weight.inputs, "]");
    columns.push_back(outputs);
    outputs += weight.outputs;
    bytes += tensor.numel();
    groups = std::max(groups, weight.groups);
  }
  if (bias.has_value()) {
    TORCH_CHECK_VALUE(bias->scalar_type() == at::kFloat && bias->dim() == 1 && bias->size(0) == outputs,
                      "linear: bias has dtype ", bias->scalar_type(), " and shape ", bias->sizes(),
                      ", expected torch.float32 [", outputs, "]");
  }
  at::Tensor result = at::empty({rows, outputs}, at::TensorOptions().dtype(at::kFloat));
  if (rows == 0) return result;
  float* out = result.mutable_data_ptr<float>();
  const QuantRows quantized = room_for_rows(rows, groups);
  const std::vector<Unit> units = share_out(packed, rows);
  const LinearKernels& table = kernels();
  const int64_t count = static_cast<int64_t>(units.size());
  // One row is bound by reading the weights, many by multiplying: 64 products a step, 5 bytes meanwhile.
  const int64_t threads = useful_threads(rows * outputs * inputs / 64 + bytes / 5, count);
  std::unique_ptr<uint8_t[]> scratch;
  uint8_t* aligned = nullptr;
  const int64_t scratch_size = rows > table.direct_rows ? table.scratch_bytes(groups) : 0;
  if (scratch_size > 0) {
    scratch.reset(new uint8_t[static_cast<size_t>(threads * scratch_size + 64)]);
    aligned = scratch.get() + (64 - reinterpret_cast<uintptr_t>(scratch.get()) % 64) % 64;
  }
  constexpr int64_t kGroupsPerPart = 128;
  const int64_t part_rows = std::max<int64_t>(1, kGroupsPerPart / groups);
  const auto quantize_part = [&](int64_t part) {
    thread_local std::vector<float> room;
    room.resize(static_cast<size_t>(inputs));
    const int64_t end = std::min(rows, (part + 1) * part_rows);
    for (int64_t r = part * part_rows; r < end; ++r) {
      table.quantize(row(r, room.data()), inputs, groups, quantized.rows + r * quantized.stride);
    }
  };
  Team* team = Team::led();
  const auto multiply_unit = [&](int64_t thread, int64_t i) {
    const Unit& unit = units[static_cast<size_t>(i)];
    const PackedWeight& weight = packed[unit.weight];
    const LinearTask task = {weight.format,
                             weight.groups,
                             weight.outputs,
                             weight.tiles,
                             unit.first_tile,
                             std::min(unit.first_tile + 2, tile_count(weight.outputs)),
                             quantized.rows + unit.first_row * quantized.stride,
                             quantized.stride,
                             unit.last_row - unit.first_row,
                             out + unit.first_row * outputs + columns[unit.weight],
                             outputs,
                             team == nullptr ? nullptr : team->ahead(thread)};
    table.multiply(task, aligned + thread * scratch_size);
  };
  prepare_and_run((rows + part_rows - 1) / part_rows, count, threads, quantize_part, multiply_unit);
  if (bias.has_value()) result.add_(*bias);
  return result;
}

at::Tensor linear(const at::Tensor& x, at::TensorList weights, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat && x.dim() == 2, "linear: x has dtype ", x.scalar_type(),
                    " and shape ", x.sizes(), ", expected torch.float32 [num_tokens, in_features]");
  const at::Tensor input = x.size(1) <= 1 || x.stride(1) == 1 ? x : x.contiguous();
  const float* data = input.const_data_ptr<float>();
  const int64_t stride = input.stride(0);
  return linear(x.size(0), x.size(1), [&](int64_t row, float*) { return data + row * stride; }, weights, bias);
}

namespace {

Format target_format(const std::string& target, SourceFormat source, const std::string& name) {
  const Format format = target == "int4" ? kQ41 : target == "int8" ? kInt8 : natural_format(source);
  TORCH_CHECK_VALUE(target == "auto" || target == "int8" || target == "int4", "pack_weight: target is ", target,
                    ", expected auto, int8 or int4");
  TORCH_CHECK_VALUE(can_pack(source, format), "pack_weight: ", name, " rows cannot be packed as ", target,
                    ", expected auto, or rows of F32, F16 or BF16");
  return format;
}

at::Tensor pack_weight(const at::Tensor& data, const std::string& format, int64_t outputs, int64_t inputs,
                       const std::string& target, const std::optional<at::Tensor>& row_order) {
  SourceFormat source;
  TORCH_CHECK_VALUE(find_source_format(format.c_str(), &source), "pack_weight: format is ", format,
                    ", expected one of F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q4_K, Q6_K");
  TORCH_CHECK_VALUE(outputs > 0 && inputs > 0 && outputs <= kLargestSize && inputs <= kLargestSize &&
                        inputs % block_inputs(source) == 0, "pack_weight: shape is [",
                    outputs, ", ", inputs, "], expected positive sizes, inputs a multiple of ",
                    block_inputs(source), " for ", format);
  const int64_t row_bytes = inputs / block_inputs(source) * block_bytes(source);
  TORCH_CHECK_VALUE(data.scalar_type() == at::kByte && data.dim() == 2 && data.size(0) == outputs &&
                        data.size(1) == row_bytes,
                    "pack_weight: data has dtype ", data.scalar_type(), " and shape ", data.sizes(),
                    ", expected torch.uint8 [", outputs, ", ", row_bytes, "]");
  const at::Tensor rows = data.contiguous();
  at::Tensor order;
  if (row_order.has_value()) {
    TORCH_CHECK_VALUE(row_order->scalar_type() == at::kLong && row_order->dim() == 1 &&
                          row_order->size(0) == outputs,
                      "pack_weight: row_order has dtype ", row_order->scalar_type(), " and shape ",
                      row_order->sizes(), ", expected torch.int64 [", outputs, "]");
    order = row_order->contiguous();
    const int64_t* p = order.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < outputs; ++i) {
      TORCH_CHECK_VALUE(p[i] >= 0 && p[i] < outputs, "pack_weight: row_order[", i, "] is ", p[i],
                        ", expected 0 to ", outputs - 1);
    }
  }
  const Format packed = target_format(target, source, format);
  const int64_t tiles = tile_count(outputs);
  at::Tensor result = at::zeros({static_cast<int64_t>(sizeof(PackedHeader)) +
                                 tiles * tile_bytes(packed, group_count(packed, inputs))},
                                data.options());
  PackedHeader header = {};
  std::memcpy(header.magic, kPackedMagic, sizeof(kPackedMagic));
  header.version = kPackedVersion;
  header.format = packed;
  header.outputs = outputs;
  header.inputs = inputs;
  uint8_t* bytes = result.mutable_data_ptr<uint8_t>();
  std::memcpy(bytes, &header, sizeof(header));
  const PackTask task = {source,
                         packed,
                         rows.const_data_ptr<uint8_t>(),
                         row_bytes,
                         order.defined() ? order.const_data_ptr<int64_t>() : nullptr,
                         outputs,
                         inputs,
                         bytes + sizeof(header)};
  at::parallel_for(0, tiles, 4, [&](int64_t begin, int64_t end) { pack_tiles(task, begin, end); });
  return result;
}

at::Tensor packed_embedding(const at::Tensor& ids, const at::Tensor& weight) {
  TORCH_CHECK_VALUE(ids.scalar_type() == at::kLong && ids.dim() == 1, "packed_embedding: ids has dtype ",
                    ids.scalar_type(), " and shape ", ids.sizes(), ", expected torch.int64 [num_tokens]");
  const PackedWeight packed = open_packed("packed_embedding", weight);
  const at::Tensor rows = ids.contiguous();
  const int64_t* p = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows.size(0); ++i) {
    TORCH_CHECK_VALUE(p[i] >= 0 && p[i] < packed.outputs, "packed_embedding: ids[", i, "] is ", p[i],
                      ", expected 0 to ", packed.outputs - 1);
  }
  at::Tensor result = at::empty({rows.size(0), packed.inputs}, weight.options().dtype(at::kFloat));
  float* out = result.mutable_data_ptr<float>();
  at::parallel_for(0, rows.size(0), 32, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      unpack_row(packed.format, packed.inputs, packed.tiles, p[i], out + i * packed.inputs);
    }
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(kvstrata, CPU, m) {
  using Linear = at::Tensor(const at::Tensor&, at::TensorList, const std::optional<at::Tensor>&);
  m.impl("linear", static_cast<Linear*>(linear));
  m.impl("pack_weight", pack_weight);
  m.impl("packed_embedding", packed_embedding);
}

}  // namespace kvstrata
