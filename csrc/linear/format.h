// The memory layout of packed weights and quantised activations, shared by all instruction sets.
//
// A packed weight is a 64-byte header and then one tile for every 16 outputs, each [codes][scales] padded to
// 64 bytes, so that a product reads memory front to back. The inputs are cut into groups of 32, a group into
// eight words of 4. In a tile the codes of a word lie as 16 outputs x 4 inputs: one 64-byte vector, which
// meets one broadcast word of activations.
//
//   format  codes a group                                   scales
//   int8    8 words x 64 bytes, value + 128                 fp16[16] a group
//   q4_0    4 x 64 bytes: word j low, word j + 4 high       fp16[16] a group; value = scale * (code - 8)
//   q4_1    as q4_0                                         fp16 scale[16], min[16] a group
//   q4_k    as q4_0                                         8 groups: fp16 d[16], dmin[16], then for each
//                                                           group u8 scale[16], u8 min[16]
//   q6_k    as q4_0, then 2 x 64 bytes with the upper two   8 groups: fp16 d[16], then for each group
//           bits: word j at bit 2 (j % 4) of vector j / 4   i8 scale[2][16], one for 16 inputs; code - 32
//
// Internal linkage on purpose: these are compiled for different instruction sets.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvstrata {

constexpr int64_t kTileOutputs = 16;
constexpr int64_t kGroupInputs = 32;
constexpr int64_t kSuperGroups = 8;  // groups that share d and dmin in q4_k and q6_k

enum Format : int32_t { kInt8 = 0, kQ40 = 1, kQ41 = 2, kQ4K = 3, kQ6K = 4, kFormats = 5 };

struct PackedHeader {
  char magic[8];
  int32_t version;
  int32_t format;
  int64_t outputs;
  int64_t inputs;
  uint8_t padding[32];
};
static_assert(sizeof(PackedHeader) == 64, "tiles start on a cache line");

constexpr char kPackedMagic[8] = {'K', 'V', 'S', 'L', 'I', 'N', 'E', 'A'};
constexpr int32_t kPackedVersion = 1;

static constexpr int64_t code_bytes(Format format) {  // of a group in a tile
  return format == kInt8 ? 512 : format == kQ6K ? 384 : 256;
}
static constexpr int64_t super_bytes(Format format) {  // of what kSuperGroups groups share in a tile
  return format == kQ4K ? 64 : format == kQ6K ? 32 : 0;
}
static constexpr int64_t scale_bytes(Format format) {  // of a group in a tile, besides super_bytes
  return format == kQ41 ? 64 : 32;
}
static constexpr bool has_super(Format format) { return super_bytes(format) != 0; }

static constexpr int64_t group_count(Format format, int64_t inputs) {
  const int64_t groups = (inputs + kGroupInputs - 1) / kGroupInputs;
  return has_super(format) ? (groups + kSuperGroups - 1) / kSuperGroups * kSuperGroups : groups;
}
// Where a group's own scales lie in its tile; what its super-group shares lies super_bytes before group 0's.
static constexpr int64_t super_offset(Format format, int64_t groups, int64_t group) {
  return groups * code_bytes(format) +
         group / kSuperGroups * (super_bytes(format) + kSuperGroups * scale_bytes(format));
}
static constexpr int64_t scale_offset(Format format, int64_t groups, int64_t group) {
  if (!has_super(format)) return groups * code_bytes(format) + group * scale_bytes(format);
  return super_offset(format, groups, group) + super_bytes(format) + group % kSuperGroups * scale_bytes(format);
}
static constexpr int64_t tile_bytes(Format format, int64_t groups) {
  const int64_t bytes = groups * (code_bytes(format) + scale_bytes(format)) +
                        (has_super(format) ? groups / kSuperGroups * super_bytes(format) : 0);
  return (bytes + 63) / 64 * 64;
}
static constexpr int64_t tile_count(int64_t outputs) { return (outputs + kTileOutputs - 1) / kTileOutputs; }

// 32 activations of a row with everything a product needs of them, on one cache line.
struct alignas(64) QuantGroup {
  int8_t codes[32];   // -127..127
  float scale;        // activation = scale * code; NaN where one of the 32 was not finite
  float scaled_sum;   // scale * (sum of codes), for formats with a minimum
  int32_t minus_sum;  // -(sum of codes), for formats whose codes are shifted to be unsigned
  int32_t minus_half_sums[2];
  int32_t padding[3];
};
static_assert(sizeof(QuantGroup) == 64, "a group is a cache line");

// Rows lie an odd number of lines apart, so that the same group of several rows falls into different cache sets.
static constexpr int64_t row_stride_groups(int64_t groups) { return groups | 1; }

}  // namespace kvstrata
