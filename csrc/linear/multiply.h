// The product of packed weights and quantised rows, written once and compiled for each instruction set.
//
// For each row and output, over the groups in increasing order:
//   acc = fma(float(dot), w_scale * x_scale, acc)            dot: exact int32, of 16 inputs for q6_k, else 32
//   acc = fma(w_min, x_scale * float(sum of x codes), acc)   q4_1 and q4_k only
// Lanes are outputs, so neither the width of a vector nor the number of rows changes a bit.
#pragma once

#include "linear/kernels.h"

#define KVSTRATA_METHOD inline __attribute__((always_inline))
#define KVSTRATA_LAMBDA __attribute__((always_inline))

namespace kvstrata {
namespace KVSTRATA_ISA {
namespace {

template <int kValue>
struct Index {
  static constexpr int value = kValue;
};
template <int kCount, class Body>
KVSTRATA_INLINE void unroll(const Body& body) {
  if constexpr (kCount > 0) {
    unroll<kCount - 1>(body);
    body(Index<kCount - 1>{});
  }
}

#include "linear/sources.h"

template <class Source, class Half>
KVSTRATA_INLINE int32_t start_of(const QuantGroup& x, Half half) {
  if constexpr (Source::kShift < 0) return 0;
  const int32_t minus_sum = Source::Kind::kSpans == 1 ? x.minus_sum : x.minus_half_sums[half.value];
  return minus_sum * (1 << (Source::kShift < 0 ? 0 : Source::kShift));
}

// Which groups of the tiles to come a block of rows fetches: every `period`th from `phase` on, `ahead` bytes on.
struct Fetch {
  int64_t ahead;
  int64_t period;
  int64_t phase;
};

// kRows rows times kTiles tiles.
template <class Source, int kRows, int kTiles>
inline void block(const Source* source, const LinearTask& task, const QuantGroup* x, float* out,
                  const int* outputs, const Fetch& fetch) {
  using Kind = typename Source::Kind;
  constexpr int kWords = 8 / Kind::kSpans;
  const int64_t stride = task.row_stride;
  F16 acc[kRows][kTiles];
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTiles; ++t) acc[r][t] = zero();
    // Stores wait for their lines one after another; asked for now, those are there by the end.
    for (int t = 0; t < kTiles; ++t) __builtin_prefetch(out + r * task.out_stride + t * kTileOutputs, 1);
  }
  int64_t until_fetch = fetch.phase;
  for (int64_t group = 0; group < task.groups; ++group, ++x) {
    if (task.ahead != nullptr) fetch_ahead(task.ahead);
    if (--until_fetch < 0) {
      for (int t = 0; t < kTiles; ++t) source[t].prefetch(group, fetch.ahead);
      until_fetch = fetch.period - 1;
    }
    unroll<Kind::kSpans>([&](auto half) KVSTRATA_LAMBDA {
      Dot<Kind> dot[kRows][kTiles];
      unroll<kRows>([&](auto r) KVSTRATA_LAMBDA {
        const int32_t start = start_of<Source>(x[r.value * stride], half);
        unroll<kTiles>([&](auto t) KVSTRATA_LAMBDA { dot[r.value][t.value] = begin<Kind>(start); });
      });
      unroll<kWords>([&](auto i) KVSTRATA_LAMBDA {
        constexpr int kWord = half.value * kWords + i.value;
        Codes<Kind> codes[kTiles];
        unroll<kTiles>([&](auto t) KVSTRATA_LAMBDA {
          codes[t.value] = source[t.value].template codes<kWord>(group);
        });
        unroll<kRows>([&](auto r) KVSTRATA_LAMBDA {
          const Word word = broadcast(x[r.value * stride].codes + 4 * kWord);
          unroll<kTiles>([&](auto t) KVSTRATA_LAMBDA { step(dot[r.value][t.value], codes[t.value], word); });
        });
      });
      unroll<kTiles>([&](auto t) KVSTRATA_LAMBDA {
        const F16 scale = source[t.value].scale(group, half.value);
        unroll<kRows>([&](auto r) KVSTRATA_LAMBDA {
          const QuantGroup& row = x[r.value * stride];
          F16& sum = acc[r.value][t.value];
          sum = fma(finish(dot[r.value][t.value], start_of<Source>(row, half)), scale * set1(row.scale), sum);
        });
      });
    });
    if constexpr (Source::kMin) {
      unroll<kTiles>([&](auto t) KVSTRATA_LAMBDA {
        const F16 least = source[t.value].min(group);
        unroll<kRows>([&](auto r) KVSTRATA_LAMBDA {
          F16& sum = acc[r.value][t.value];
          sum = fma(least, set1(x[r.value * stride].scaled_sum), sum);
        });
      });
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTiles; ++t) {
      float* p = out + r * task.out_stride + t * kTileOutputs;
      if (outputs[t] == kTileOutputs) {
        store(p, acc[r][t]);
      } else {
        store_first(p, acc[r][t], outputs[t]);
      }
    }
  }
}

template <class Source, int kTiles, int kRows = kMaxRows>
inline void block_of(int64_t rows, const Source* source, const LinearTask& task, const QuantGroup* x, float* out,
                     const int* outputs, const Fetch& fetch) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return block_of<Source, kTiles, kRows - 1>(rows, source, task, x, out, outputs, fetch);
  }
  block<Source, kRows, kTiles>(source, task, x, out, outputs, fetch);
}

// All rows times kTiles tiles, in blocks of rows as equal as they can be. Together they fetch the next tiles: in the
// first block alone that would be more than memory gives in its time.
template <class Source, int kTiles>
inline void all_rows(const Source* source, const LinearTask& task, int64_t tile) {
  int outputs[kTiles];
  for (int t = 0; t < kTiles; ++t) {
    const int64_t left = task.outputs - (tile + t) * kTileOutputs;
    outputs[t] = static_cast<int>(left < kTileOutputs ? left : kTileOutputs);
  }
  const int64_t blocks = (task.row_count + kMaxRows - 1) / kMaxRows;
  constexpr int64_t kAhead = 16384;  // one block is bound by memory: that far is as fast as it can be
  const int64_t ahead = blocks == 1 ? kAhead : kTiles * tile_bytes(task.format, task.groups);
  int64_t row = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t rows = task.row_count / blocks + (b < task.row_count % blocks ? 1 : 0);
    block_of<Source, kTiles>(rows, source, task, task.rows + row * task.row_stride,
                             task.out + row * task.out_stride + tile * kTileOutputs, outputs, Fetch{ahead, blocks, b});
    row += rows;
  }
}

// Up to so many rows unpack codes as they go; more share tiles expanded once. Bytes have nothing to unpack.
template <class Kind>
constexpr int64_t kDirectRows = kDirectBlocks<Kind> * kMaxRows;
static_assert(kDirectRows<Sixes> <= kDirectRows<Nibbles>, "scratch is there from where any kind wants it");

template <class Source, int kTiles>
inline void multiply_tiles(const LinearTask& task, int64_t tile, uint8_t* scratch) {
  const int64_t bytes = tile_bytes(task.format, task.groups);
  const Source packed[2] = {{task.tiles + tile * bytes, task.groups},
                            {task.tiles + (tile + kTiles - 1) * bytes, task.groups}};
  if constexpr (Source::kUnpacks) {
    if (task.row_count > kDirectRows<typename Source::Kind>) {
      const int64_t size = task.groups * kExpandedGroup;
      for (int t = 0; t < kTiles; ++t) expand(packed[t], task.groups, scratch + t * size);
      const Expanded<Source> expanded[2] = {{scratch, packed[0]}, {scratch + size, packed[1]}};
      return all_rows<Expanded<Source>, kTiles>(expanded, task, tile);
    }
  }
  all_rows<Source, kTiles>(packed, task, tile);
}

template <class Source>
inline void multiply_format(const LinearTask& task, uint8_t* scratch) {
  int64_t tile = task.first_tile;
  if constexpr (kMaxTiles == 2) {
    for (; tile + 1 < task.last_tile; tile += 2) multiply_tiles<Source, 2>(task, tile, scratch);
  }
  for (; tile < task.last_tile; ++tile) multiply_tiles<Source, 1>(task, tile, scratch);
}

void multiply(const LinearTask& task, uint8_t* scratch) {
  switch (task.format) {
    case kInt8:
      return multiply_format<PackedInt8>(task, scratch);
    case kQ40:
      return multiply_format<PackedQ40>(task, scratch);
    case kQ41:
      return multiply_format<PackedQ41>(task, scratch);
    case kQ4K:
      return multiply_format<PackedQ4K>(task, scratch);
    default:
      return multiply_format<PackedQ6K>(task, scratch);
  }
}

int64_t scratch_bytes(int64_t groups) { return 2 * groups * kExpandedGroup; }

// Below this a group counts as zero, so that no scale is subnormal and no code exceeds 127.
constexpr float kSmallest = 7.8886090522101181e-31f;  // 2^-100
constexpr uint32_t kInfinityBits = 0x7f800000u;

inline void quantize_group(F16 a, F16 b, QuantGroup* group) {
  const uint32_t bits = largest_bits(a, b);
  float largest;
  memcpy(&largest, &bits, 4);
  memset(group, 0, sizeof(QuantGroup));
  if (bits >= kInfinityBits) {
    const uint32_t nan = 0x7fc00000u;
    memcpy(&group->scale, &nan, 4);
    memcpy(&group->scaled_sum, &nan, 4);
    return;
  }
  if (largest < kSmallest) return;
  const float scale = largest / 127.0f;
  const int32_t first = store_rounded(group->codes, a / set1(scale));
  const int32_t second = store_rounded(group->codes + 16, b / set1(scale));
  group->scale = scale;
  group->scaled_sum = scale * static_cast<float>(first + second);
  group->minus_sum = -(first + second);
  group->minus_half_sums[0] = -first;
  group->minus_half_sums[1] = -second;
}

void quantize(const float* x, int64_t inputs, int64_t groups, QuantGroup* row) {
  int64_t group = 0;
  for (; (group + 1) * kGroupInputs <= inputs; ++group) {
    quantize_group(load(x + 32 * group), load(x + 32 * group + 16), row + group);
  }
  for (; group < groups; ++group) {
    const int64_t left = inputs - group * kGroupInputs;
    const int first = left <= 0 ? 0 : left < 16 ? static_cast<int>(left) : 16;
    const int second = left <= 16 ? 0 : static_cast<int>(left - 16);
    const float* p = x + (left <= 0 ? 0 : 32 * group);
    quantize_group(load_first(p, first), second == 0 ? zero() : load_first(p + 16, second), row + group);
  }
}

}  // namespace

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {quantize, multiply, scratch_bytes,
                                      kDirectRows<Sixes>};

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
