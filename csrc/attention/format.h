// How a token's key or value vector is found and read, one policy per pool format.
//
// A policy gives `Row` (what locates one head vector: a pointer, and for int4 its scales), `row`, and `part`: sixteen
// elements from d on as float, zeros past head_dim; D, where it is known, is head_dim and a multiple of 16. Nothing
// else knows the format, but the `Products` it names: how its elements are multiplied.
// Scales are of type `Scale`, brought into a tile's scratch as floats times `kUnit`. Where they are
// `kFolded`, elements are bare codes, and a score is multiplied by its key's scale, a weight by its value's; otherwise
// the elements are what they stand for.
#pragma once

namespace kvstrata {
namespace KVSTRATA_ISA {

struct FloatProducts;
struct PairProducts;

// Where a token lies: its block, the offset in it, and the bytes of the block's first vector of that offset.
struct Place {
  const uint8_t* block;
  const uint8_t* token;  // block + offset * token_stride
  int32_t offset;
};

inline const uint8_t* address(const KvView& kv, const Place& place, Part part, int head) {
  return place.token + static_cast<int>(part) * kv.part_stride + head * kv.head_stride;
}

// Those of a block's tokens lie side by side.
inline const uint8_t* scale_address(const KvView& kv, const Place& place, Part part, int head) {
  return place.block + kv.scale_offset + static_cast<int>(part) * kv.scale_part_stride + head * kv.scale_head_stride;
}

// n elements of type T, then zeros.
template <class T>
inline F16 load_some(const T* p, int n) {
  T part[16] = {};
  memcpy(part, p, sizeof(T) * static_cast<size_t>(n));
  return load(part);
}

// Elements of one type side by side: floats, or codes with one scale a vector.
template <class T>
struct Elements {
  using Row = const T*;

  static KVSTRATA_INLINE Row row(const KvView& kv, const Place& place, Part part, int head, const float*) {
    return reinterpret_cast<const T*>(address(kv, place, part, head));
  }
  template <int D>
  static KVSTRATA_INLINE F16 part(Row row, int d, int head_dim) {
    if constexpr (D > 0) return load(row + d);
    return d + 16 <= head_dim ? load(row + d) : load_some(row + d, head_dim - d);
  }
  static constexpr int bytes(int head_dim) { return head_dim * static_cast<int>(sizeof(T)); }
};

template <class T>
struct Plain : Elements<T> {
  using Products = FloatProducts;
  static constexpr bool kScaled = false;
  static constexpr bool kFolded = false;
};

// Multiplied as they lie, by bf16.
struct PairedBf16 : Plain<Bf16> {
  using Products = PairProducts;
};

template <class T>
struct Coded : Elements<T> {
  using Products = FloatProducts;
  using Scale = Bf16;
  static constexpr bool kScaled = true;
  static constexpr bool kFolded = true;
  static constexpr float kUnit = T::kUnit;
};

// Two codes a byte, a scale and a zero for each 16 elements: element = (code + zero) * scale, which is exact. A tile's
// scratch has zero * scale in the place of the zero.
struct FourBits {
  using Products = FloatProducts;
  using Scale = ScaleAndZero;
  static constexpr bool kScaled = true;
  static constexpr bool kFolded = false;
  static constexpr float kUnit = 1.0f;
  struct Row {
    const uint8_t* codes;
    const float* scales;
  };

  static KVSTRATA_INLINE Row row(const KvView& kv, const Place& place, Part part, int head, const float* scales) {
    return {address(kv, place, part, head), scales};
  }
  template <int D>
  static KVSTRATA_INLINE F16 part(Row row, int d, int head_dim) {
    const int group = d / kInt4Group;
    if ((group + 1) * kInt4Group > (D > 0 ? D : head_dim)) return last(row, d, D > 0 ? D : head_dim);
    const float* scales = row.scales + d / kInt4Scaled * 2;
    return nibbles(row.codes + group * (kInt4Group / 2), d % kInt4Group != 0, scales[0], scales[1]);
  }
  // Of a last group with fewer elements, whose two halves share its bytes.
  static inline F16 last(Row row, int d, int head_dim) {
    const int group = d / kInt4Group;
    const int half = (head_dim - group * kInt4Group) / 2;
    const uint8_t* codes = row.codes + group * (kInt4Group / 2);
    float code[16] = {};
    const int n = head_dim - d < 16 ? head_dim - d : 16;
    for (int i = 0; i < n; ++i) {
      const int at = d - group * kInt4Group + i;
      code[i] = static_cast<float>(at < half ? codes[at] & 15 : codes[at - half] >> 4);
    }
    const float* scales = row.scales + d / kInt4Scaled * 2;
    const F16 element = fma(load(code), set1(scales[0]), set1(scales[1]));
    return select((1u << n) - 1u, element, zero());
  }
  static constexpr int bytes(int head_dim) { return head_dim / 2; }
};

// Brings one vector, and the scales of its block where it is the first of them, into the second level of the cache:
// there the machine keeps far more reads in flight than its first level has buffers for (measured: 18 GB/s a core
// against 11).
template <class Format, int D>
KVSTRATA_INLINE void fetch_vector(const KvView& kv, const Place& place, Part part, int head) {
  const uint8_t* p = address(kv, place, part, head);
  const int bytes = Format::bytes(D > 0 ? D : kv.head_dim);
#pragma GCC unroll 8
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
  if constexpr (Format::kScaled) {
    if (place.offset % 16 == 0) {
      const int count = scales_per_vector(kv.type, kv.head_dim);
      const int bytes_each = count * static_cast<int>(sizeof(typename Format::Scale));
      const uint8_t* s = scale_address(kv, place, part, head) + place.offset * bytes_each;
      for (int i = 0; i < bytes_each * 16; i += 64) __builtin_prefetch(s + i, 0, 2);
    }
  }
}

// The scales of the tokens [lo, hi) of a tile, [kTile, count] floats.
template <class Format>
inline void load_scales(const KvView& kv, const Place* places, Part part, int head, int lo, int hi, float* out) {
  using Scale = typename Format::Scale;
  const int count = scales_per_vector(kv.type, kv.head_dim);
  const F16 unit = set1(Format::kUnit);
  for (int j = lo; j < hi;) {
    const Place& place = places[j];
    const int run = hi - j < kv.block_size - place.offset ? hi - j : kv.block_size - place.offset;
    const Scale* scales = reinterpret_cast<const Scale*>(scale_address(kv, place, part, head)) + place.offset * count;
    const int n = run * count;
    float* target = out + j * count;
    int i = 0;
    for (; i + 16 <= n; i += 16) store(target + i, load(scales + i) * unit);
    if (i < n) store_first(target + i, load_some(scales + i, n - i) * unit, n - i);
    j += run;
  }
}

// Places of the tokens [lo, hi) of a tile.
inline void find_places(const AttentionArgs& args, int sequence, int tile, int lo, int hi, Place* places) {
  const int32_t* table = args.block_tables + sequence * args.table_stride;
  const int size = args.kv.block_size;
  int position = tile * kTile + lo;
  int index = position / size;
  int offset = position % size;
  for (int j = lo; j < hi; ++index, offset = 0) {
    const uint8_t* block = args.kv.base + table[index] * args.kv.block_stride;
    const uint8_t* token = block + offset * args.kv.token_stride;
    for (; offset < size && j < hi; ++offset, ++j, token += args.kv.token_stride) places[j] = {block, token, offset};
  }
}

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
