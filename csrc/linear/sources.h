// Where a product takes a tile's codes and scales from: a packed format as it lies, or the scratch that a
// packed tile was expanded to. Included by multiply.h only.
//
// A source has: Kind, which integer steps its codes need; kShift, log2 of what was added to a value to make
// its code unsigned (-1: nothing); kMin, whether values are scale * code + min; codes<word>(group),
// scale(group, half), min(group).
#pragma once

// Kinds of codes: kSpans scales for the 32 inputs of a group.
struct Bytes {
  static constexpr int kSpans = 1;
};
struct Nibbles {
  static constexpr int kSpans = 1;
};
struct Sixes {
  static constexpr int kSpans = 2;
};

// Sanitized code takes minutes to compile for each number of rows; two of them stand for all.
#if defined(__SANITIZE_ADDRESS__)
constexpr int kRowsLimit = 2;
#else
constexpr int kRowsLimit = 8;
#endif
constexpr int rows_within_limit(int rows) { return rows < kRowsLimit ? rows : kRowsLimit; }

#if defined(KVSTRATA_ISA_AVX512)
#include "linear/dot_avx512.h"
#elif defined(KVSTRATA_ISA_AVX2)
#include "linear/dot_avx2.h"
#else
#include "linear/dot_portable.h"
#endif

KVSTRATA_INLINE const Fp16* as_fp16(const uint8_t* p) { return reinterpret_cast<const Fp16*>(p); }

// What the five packed formats share. The tile is read front to back, and what lies `ahead` bytes on is fetched early
// into the second level cache: fetching into the first is limited by its few miss buffers (measured: half the rate).
template <Format kFormat>
struct Packed {
  const uint8_t* tile;
  int64_t groups;

  Packed(const uint8_t* tile_, int64_t groups_) : tile(tile_), groups(groups_) {}

  KVSTRATA_METHOD const uint8_t* group_codes(int64_t group) const { return tile + group * code_bytes(kFormat); }
  KVSTRATA_METHOD const uint8_t* group_scales(int64_t group) const {
    return tile + scale_offset(kFormat, groups, group);
  }
  KVSTRATA_METHOD const uint8_t* shared_scales(int64_t group) const {
    return tile + super_offset(kFormat, groups, group);
  }
  KVSTRATA_METHOD void prefetch(int64_t group, int64_t ahead) const {
    constexpr int64_t bytes = code_bytes(kFormat) + scale_bytes(kFormat) + super_bytes(kFormat) / kSuperGroups;
    const uint8_t* p = tile + group * bytes + ahead;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
  }
};

struct PackedInt8 : Packed<kInt8> {
  using Kind = Bytes;
  static constexpr bool kUnpacks = false;
  static constexpr int kShift = 7;
  static constexpr bool kMin = false;
  using Packed::Packed;
  template <int kWord>
  KVSTRATA_METHOD Codes<Bytes> codes(int64_t group) const {
    return load_byte_codes(group_codes(group) + 64 * kWord);
  }
  KVSTRATA_METHOD F16 scale(int64_t group, int) const { return load(as_fp16(group_scales(group))); }
};

template <Format kFormat>
struct PackedNibbles : Packed<kFormat> {
  using Kind = Nibbles;
  static constexpr bool kUnpacks = true;
  using Packed<kFormat>::Packed;
  template <int kWord>
  KVSTRATA_METHOD Codes<Nibbles> codes(int64_t group) const {
    return load_nibble_codes<kWord / 4 == 1>(this->group_codes(group) + 64 * (kWord % 4));
  }
};

struct PackedQ40 : PackedNibbles<kQ40> {
  static constexpr int kShift = 3;
  static constexpr bool kMin = false;
  using PackedNibbles::PackedNibbles;
  KVSTRATA_METHOD F16 scale(int64_t group, int) const { return load(as_fp16(group_scales(group))); }
};

struct PackedQ41 : PackedNibbles<kQ41> {
  static constexpr int kShift = -1;
  static constexpr bool kMin = true;
  using PackedNibbles::PackedNibbles;
  KVSTRATA_METHOD F16 scale(int64_t group, int) const { return load(as_fp16(group_scales(group))); }
  KVSTRATA_METHOD F16 min(int64_t group) const { return load(as_fp16(group_scales(group) + 32)); }
};

struct PackedQ4K : PackedNibbles<kQ4K> {
  static constexpr int kShift = -1;
  static constexpr bool kMin = true;
  using PackedNibbles::PackedNibbles;
  // d has 11 significant bits and a scale 6: the product is exact.
  KVSTRATA_METHOD F16 scale(int64_t group, int) const {
    return load(as_fp16(shared_scales(group))) * from_u8(group_scales(group));
  }
  KVSTRATA_METHOD F16 min(int64_t group) const {
    return zero() - load(as_fp16(shared_scales(group) + 32)) * from_u8(group_scales(group) + 16);
  }
};

struct PackedQ6K : Packed<kQ6K> {
  using Kind = Sixes;
  static constexpr bool kUnpacks = true;
  static constexpr int kShift = 5;
  static constexpr bool kMin = false;
  using Packed::Packed;
  template <int kWord>
  KVSTRATA_METHOD Codes<Sixes> codes(int64_t group) const {
    const uint8_t* low = group_codes(group);
    return load_six_codes<kWord / 4 == 1, kWord % 4>(low + 64 * (kWord % 4), low + 256 + 64 * (kWord / 4));
  }
  KVSTRATA_METHOD F16 scale(int64_t group, int half) const {
    return load(as_fp16(shared_scales(group))) * from_i8(group_scales(group) + 16 * half);
  }
};

// A tile in scratch: 512 bytes of codes, then float scales[spans][16] and min[16], group after group.
constexpr int64_t kExpandedGroup = 512 + 3 * 64;

template <class Of>
struct Expanded {
  using Kind = typename Of::Kind;
  static constexpr int kShift = Of::kShift;
  static constexpr bool kMin = Of::kMin;
  const uint8_t* scratch;
  Of packed;

  KVSTRATA_METHOD void prefetch(int64_t group, int64_t ahead) const { packed.prefetch(group, ahead); }
  template <int kWord>
  KVSTRATA_METHOD Codes<Kind> codes(int64_t group) const {
    return load_codes<Kind>(scratch + group * kExpandedGroup + 64 * kWord);
  }
  KVSTRATA_METHOD F16 scale(int64_t group, int half) const { return floats(group, half); }
  KVSTRATA_METHOD F16 min(int64_t group) const { return floats(group, Kind::kSpans); }
  KVSTRATA_METHOD F16 floats(int64_t group, int index) const {
    return load(reinterpret_cast<const float*>(scratch + group * kExpandedGroup + 512 + 64 * index));
  }
};

template <class Source>
inline void expand(const Source& source, int64_t groups, uint8_t* scratch) {
  using Kind = typename Source::Kind;
  for (int64_t group = 0; group < groups; ++group, scratch += kExpandedGroup) {
    unroll<8>([&](auto word) KVSTRATA_LAMBDA {
      store_codes(scratch + 64 * word.value, source.template codes<word.value>(group));
    });
    float* floats = reinterpret_cast<float*>(scratch + 512);
    for (int half = 0; half < Kind::kSpans; ++half) store(floats + 16 * half, source.scale(group, half));
    if constexpr (Source::kMin) store(floats + 16 * Kind::kSpans, source.min(group));
  }
}
