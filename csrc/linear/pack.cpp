#include "linear/pack.h"

#include "isa_portable.h"
#include "simd.h"

namespace kvstrata {
namespace {

using portable::bits_of;
using portable::float_of;
using portable::from_fp16;
using portable::to_fp16;

struct SourceTraits {
  const char* name;
  int64_t inputs;
  int64_t bytes;
  Format natural;
};
constexpr SourceTraits kSources[] = {
    {"F32", 1, 4, kInt8},    {"F16", 1, 2, kInt8},    {"BF16", 1, 2, kInt8},
    {"Q8_0", 32, 34, kInt8}, {"Q4_0", 32, 18, kQ40},  {"Q4_1", 32, 20, kQ41},
    {"Q5_0", 32, 22, kInt8}, {"Q4_K", 256, 144, kQ4K}, {"Q6_K", 256, 210, kQ6K},
};
const SourceTraits& traits(SourceFormat source) { return kSources[static_cast<int>(source)]; }
bool is_float(SourceFormat source) { return source <= SourceFormat::bf16; }

// 32 weights of a row on their way from file to tile; what a format lacks stays zero.
struct Group {
  uint8_t codes[32];
  uint16_t scale;  // fp16; d of the K formats
  uint16_t min;    // fp16; dmin of q4_k
  uint8_t sub[2];  // q4_k: scale and min; q6_k: scales of the halves
};

uint16_t read_half(const uint8_t* p) {
  uint16_t half;
  memcpy(&half, p, 2);
  return half;
}

void split_nibbles(const uint8_t* bytes, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = bytes[i] & 15;
    codes[i + 16] = bytes[i] >> 4;
  }
}

void read_q8_0(const uint8_t* block, Group* group) {
  group->scale = read_half(block);
  for (int i = 0; i < 32; ++i) group->codes[i] = block[2 + i] ^ 0x80;
}

// Five bits fit into int8 as they are: value = d * (code - 16).
void read_q5_0(const uint8_t* block, Group* group) {
  group->scale = read_half(block);
  uint32_t fifth;
  memcpy(&fifth, block + 2, 4);
  split_nibbles(block + 6, group->codes);
  for (int i = 0; i < 32; ++i) {
    group->codes[i] = static_cast<uint8_t>((group->codes[i] | (fifth >> i & 1u) << 4) - 16 + 128);
  }
}

// Scale and min of eight groups in twelve bytes: six bits each, the upper two of the last four moved out.
void read_q4_k(const uint8_t* block, int64_t part, Group* group) {
  const uint8_t* packed = block + 4;
  group->scale = read_half(block);
  group->min = read_half(block + 2);
  if (part < 4) {
    group->sub[0] = packed[part] & 63;
    group->sub[1] = packed[part + 4] & 63;
  } else {
    group->sub[0] = static_cast<uint8_t>((packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4);
    group->sub[1] = static_cast<uint8_t>(packed[part + 4] >> 4 | (packed[part] >> 6) << 4);
  }
  const uint8_t* bytes = block + 16 + part / 2 * 32;
  for (int i = 0; i < 32; ++i) group->codes[i] = part % 2 == 0 ? bytes[i] & 15 : bytes[i] >> 4;
}

void read_q6_k(const uint8_t* block, int64_t part, Group* group) {
  const uint8_t* low = block + part / 4 * 64 + part % 2 * 32;
  const uint8_t* high = block + 128 + part / 4 * 32;
  const int shift = static_cast<int>(part % 4) * 2;
  for (int i = 0; i < 32; ++i) {
    const int nibble = part % 4 < 2 ? low[i] & 15 : low[i] >> 4;
    group->codes[i] = static_cast<uint8_t>(nibble | (high[i] >> shift & 3) << 4);
  }
  group->sub[0] = block[192 + 2 * part];
  group->sub[1] = block[192 + 2 * part + 1];
  group->scale = read_half(block + 208);
}

int read_floats(SourceFormat source, const uint8_t* row, int64_t first, int64_t inputs, float* values) {
  const int count = static_cast<int>(inputs - first < 32 ? inputs - first : 32);
  for (int i = 0; i < count; ++i) {
    if (source == SourceFormat::f32) {
      memcpy(values + i, row + 4 * (first + i), 4);
    } else {
      const uint16_t half = read_half(row + 2 * (first + i));
      values[i] = source == SourceFormat::f16 ? from_fp16(half) : float_of(static_cast<uint32_t>(half) << 16);
    }
  }
  return count;
}

// The least fp16 that is no less than x >= 0, so that no code leaves its range.
uint16_t half_above(float x) {
  const uint16_t half = to_fp16(x);
  return from_fp16(half) < x ? static_cast<uint16_t>(half + 1) : half;
}
uint16_t half_below(float x) {
  const uint16_t half = to_fp16(x);
  if (from_fp16(half) <= x) return half;
  return half == 0 ? 0x8001u : static_cast<uint16_t>(half & 0x8000u ? half + 1 : half - 1);
}
float rounded(float x) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
  return (x + kRounder) - kRounder;
}
uint8_t code_within(float x, float low, float high, int shift) {
  const float code = rounded(x);
  return static_cast<uint8_t>(static_cast<int>(code < low ? low : code > high ? high : code) + shift);
}
constexpr uint16_t kHalfNan = 0x7e00;
constexpr uint16_t kHalfInfinity = 0x7c00;

// Weights that are not finite or too large for an fp16 scale make every product of the group NaN.
bool quantisable(const float* values, int count, uint16_t scale) {
  if (scale >= kHalfInfinity) return false;
  for (int i = 0; i < count; ++i) {
    if ((bits_of(values[i]) & 0x7fffffffu) >= 0x7f800000u) return false;
  }
  return true;
}

// The scale that brings the largest to one of the codes 127 down to 112, whichever leaves the least sum of squared
// errors, the largest code among equals: values that lie on a coarser grid, as those of 4-bit files do, can nearly be
// hit.
uint16_t int8_scale(const float* values, int count) {
  constexpr int kTries = 16;
  float largest = 0.0f;
  for (int i = 0; i < count; ++i) largest = fabsf(values[i]) > largest ? fabsf(values[i]) : largest;
  uint16_t halves[kTries];
  float scales[kTries];
  float errors[kTries] = {};
  for (int k = 0; k < kTries; ++k) {
    halves[k] = half_above(largest / static_cast<float>(127 - k));
    scales[k] = from_fp16(halves[k]);
  }
  for (int i = 0; i < count; ++i) {
    for (int k = 0; k < kTries; ++k) {
      const float error = values[i] - rounded(values[i] / scales[k]) * scales[k];
      errors[k] = errors[k] + error * error;
    }
  }
  int best = 0;
  for (int k = 1; k < kTries; ++k) best = errors[k] < errors[best] ? k : best;
  return halves[best];
}

void quantise_int8(const float* values, int count, Group* group) {
  group->scale = int8_scale(values, count);
  const bool usable = quantisable(values, count, group->scale);
  if (!usable) group->scale = kHalfNan;
  const float scale = from_fp16(group->scale);
  for (int i = 0; i < 32; ++i) {
    const bool zero = i >= count || !usable || scale == 0.0f;
    group->codes[i] = zero ? 128 : code_within(values[i] / scale, -127.0f, 127.0f, 128);
  }
}

void quantise_q4_1(const float* values, int count, Group* group) {
  float least = values[0];
  float largest = values[0];
  for (int i = 1; i < count; ++i) {
    least = values[i] < least ? values[i] : least;
    largest = values[i] > largest ? values[i] : largest;
  }
  group->min = half_below(least);
  const float min = from_fp16(group->min);
  group->scale = half_above((largest - min) / 15.0f);
  const bool usable = quantisable(values, count, group->scale) && (group->min & 0x7fffu) < kHalfInfinity;
  if (!usable) group->scale = group->min = kHalfNan;
  const float scale = from_fp16(group->scale);
  for (int i = 0; i < 32; ++i) {
    const bool zero = i >= count || !usable || scale == 0.0f;
    group->codes[i] = zero ? 0 : code_within((values[i] - min) / scale, 0.0f, 15.0f, 0);
  }
}

void read_group(const PackTask& task, const uint8_t* row, int64_t index, Group* group) {
  memset(group, 0, sizeof(Group));
  if (is_float(task.source)) {
    float values[32] = {};
    const int count = read_floats(task.source, row, index * kGroupInputs, task.inputs, values);
    return task.target == kInt8 ? quantise_int8(values, count, group) : quantise_q4_1(values, count, group);
  }
  const bool super = block_inputs(task.source) != kGroupInputs;
  const uint8_t* block = row + (super ? index / kSuperGroups : index) * block_bytes(task.source);
  switch (task.source) {
    case SourceFormat::q8_0:
      return read_q8_0(block, group);
    case SourceFormat::q5_0:
      return read_q5_0(block, group);
    case SourceFormat::q4_0:
      group->scale = read_half(block);
      return split_nibbles(block + 2, group->codes);
    case SourceFormat::q4_1:
      group->scale = read_half(block);
      group->min = read_half(block + 2);
      return split_nibbles(block + 4, group->codes);
    case SourceFormat::q4_k:
      return read_q4_k(block, index % kSuperGroups, group);
    default:
      return read_q6_k(block, index % kSuperGroups, group);
  }
}

void write_group(Format format, int64_t groups, int64_t index, int64_t lane, const Group& group, uint8_t* tile) {
  uint8_t* codes = tile + index * code_bytes(format) + 4 * lane;
  uint32_t words[8];
  memcpy(words, group.codes, 32);
  if (format == kInt8) {
    for (int word = 0; word < 8; ++word) memcpy(codes + 64 * word, words + word, 4);
  } else {
    for (int word = 0; word < 4; ++word) {
      const uint32_t both = (words[word] & 0x0f0f0f0fu) | (words[word + 4] & 0x0f0f0f0fu) << 4;
      memcpy(codes + 64 * word, &both, 4);
    }
  }
  if (format == kQ6K) {
    for (int half = 0; half < 2; ++half) {
      uint32_t upper = 0;
      for (int j = 0; j < 4; ++j) upper |= (words[4 * half + j] >> 4 & 0x03030303u) << (2 * j);
      memcpy(codes + 256 + 64 * half, &upper, 4);
    }
  }
  uint8_t* own = tile + scale_offset(format, groups, index);
  uint8_t* shared = has_super(format) ? tile + super_offset(format, groups, index) : own;
  memcpy(shared + 2 * lane, &group.scale, 2);
  if (format == kQ41 || format == kQ4K) memcpy(shared + 32 + 2 * lane, &group.min, 2);
  if (has_super(format)) {
    own[lane] = group.sub[0];
    own[16 + lane] = group.sub[1];
  }
}

}  // namespace

bool find_source_format(const char* name, SourceFormat* format) {
  for (size_t i = 0; i < sizeof(kSources) / sizeof(kSources[0]); ++i) {
    if (strcmp(name, kSources[i].name) == 0) {
      *format = static_cast<SourceFormat>(i);
      return true;
    }
  }
  return false;
}

Format natural_format(SourceFormat source) { return traits(source).natural; }
bool can_pack(SourceFormat source, Format target) {
  return target == natural_format(source) || (is_float(source) && target == kQ41);
}
int64_t block_inputs(SourceFormat source) { return traits(source).inputs; }
int64_t block_bytes(SourceFormat source) { return traits(source).bytes; }

void pack_tiles(const PackTask& task, int64_t first_tile, int64_t last_tile) {
  const int64_t groups = group_count(task.target, task.inputs);
  const int64_t used = (task.inputs + kGroupInputs - 1) / kGroupInputs;
  const int64_t last_row = last_tile * kTileOutputs < task.outputs ? last_tile * kTileOutputs : task.outputs;
  for (int64_t row = first_tile * kTileOutputs; row < last_row; ++row) {
    const int64_t file_row = task.row_order == nullptr ? row : task.row_order[row];
    const uint8_t* data = task.rows + file_row * task.row_bytes;
    uint8_t* tile = task.tiles + row / kTileOutputs * tile_bytes(task.target, groups);
    for (int64_t index = 0; index < used; ++index) {
      Group group;
      read_group(task, data, index, &group);
      write_group(task.target, groups, index, row % kTileOutputs, group, tile);
    }
  }
}

void unpack_row(Format format, int64_t inputs, const uint8_t* tiles, int64_t row, float* out) {
  const int64_t groups = group_count(format, inputs);
  const uint8_t* tile = tiles + row / kTileOutputs * tile_bytes(format, groups);
  const int64_t lane = row % kTileOutputs;
  for (int64_t first = 0; first < inputs; first += kGroupInputs) {
    const int64_t group = first / kGroupInputs;
    const uint8_t* codes = tile + group * code_bytes(format) + 4 * lane;
    const uint8_t* own = tile + scale_offset(format, groups, group);
    const uint8_t* shared = has_super(format) ? tile + super_offset(format, groups, group) : own;
    const float d = from_fp16(read_half(shared + 2 * lane));
    float scale[2] = {d, d};
    float min = 0.0f;
    int shift = format == kInt8 ? 128 : format == kQ40 ? 8 : 0;
    if (format == kQ41) min = from_fp16(read_half(shared + 32 + 2 * lane));
    if (format == kQ4K) {
      scale[0] = scale[1] = d * static_cast<float>(own[lane]);
      min = -(from_fp16(read_half(shared + 32 + 2 * lane)) * static_cast<float>(own[16 + lane]));
    }
    if (format == kQ6K) {
      for (int half = 0; half < 2; ++half) {
        scale[half] = d * static_cast<float>(static_cast<int8_t>(own[16 * half + lane]));
      }
      shift = 32;
    }
    const int64_t count = inputs - first < kGroupInputs ? inputs - first : kGroupInputs;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t word = i / 4;
      const int64_t byte = i % 4;
      int code = codes[64 * (format == kInt8 ? word : word % 4) + byte];
      if (format != kInt8) code = word < 4 ? code & 15 : code >> 4;
      if (format == kQ6K) code |= (codes[256 + 64 * (word / 4) + byte] >> (2 * (word % 4)) & 3) << 4;
      // The product is exact, so that the sum rounds once, as a fused multiply-add would.
      out[first + i] = scale[i / 16] * static_cast<float>(code - shift) + min;
    }
  }
}

}  // namespace kvstrata
