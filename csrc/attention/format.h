// How a token's key or value vector is found and read, one policy per pool format.
//
// A policy gives `Row` (what locates one head vector: a pointer, and for quantised formats its scales),
// `row`, `load` (sixteen elements from d on, as float), `load_first` (fewer, then zeros) and `prefetch`. Nothing
// else knows the format.
#pragma once

namespace kvstrata {
namespace KVSTRATA_ISA {

// Where a token lies: its block, the offset in it, and the bytes of the block's first vector of that offset.
struct Place {
  const uint8_t* block;
  const uint8_t* token;  // block + offset * token_stride
  int32_t offset;
};

enum Part : int { kKey = 0, kValue = 1 };

template <class T>
struct Plain {
  using Row = const T*;

  static KVSTRATA_INLINE Row row(const KvView& kv, Place place, Part part, int head) {
    return reinterpret_cast<const T*>(place.token + part * kv.part_stride + head * kv.head_stride);
  }
  static KVSTRATA_INLINE F16 load(Row row, int d) { return KVSTRATA_ISA::load(row + d); }
  static inline F16 load_first(Row row, int d, int n) {
    T part[16] = {};
    memcpy(part, row + d, sizeof(T) * static_cast<size_t>(n));
    return KVSTRATA_ISA::load(part);
  }
  // Into the second level: there the machine keeps far more reads in flight than its first level has buffers
  // for (measured: 18 GB/s a core against 11).
  template <int D>
  static KVSTRATA_INLINE void prefetch(Row row, int head_dim) {
    const char* p = reinterpret_cast<const char*>(row);
    const int bytes = (D > 0 ? D : head_dim) * static_cast<int>(sizeof(T));
#pragma GCC unroll 8
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
  }
};

// Sixteen elements from d on, zeros past head_dim; D, where it is known, is a multiple of 16.
template <class Format, int D>
KVSTRATA_INLINE F16 load_part(typename Format::Row row, int d, int head_dim) {
  if constexpr (D > 0) return Format::load(row, d);
  return d + 16 <= head_dim ? Format::load(row, d) : Format::load_first(row, d, head_dim - d);
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
