// How a token's key or value vector is found and read, one policy per pool format.
//
// A policy gives `Row` (what locates one head vector: a pointer, and for quantised formats its scales),
// `row`, `load` (sixteen elements from d on, as float) and `prefetch`. Nothing else knows the format.
#pragma once

namespace kvstrata {
namespace KVSTRATA_ISA {

// Where a token lies: its block and the offset in it.
struct Place {
  const uint8_t* block;
  int32_t offset;
};

enum Part : int { kKey = 0, kValue = 1 };

template <class T>
struct Plain {
  using Row = const T*;

  static KVSTRATA_INLINE Row row(const KvView& kv, Place place, Part part, int head) {
    return reinterpret_cast<const T*>(place.block + part * kv.part_stride + head * kv.head_stride +
                                      place.offset * kv.token_stride);
  }
  static KVSTRATA_INLINE F16 load(Row row, int d) { return KVSTRATA_ISA::load(row + d); }
  // Into the second level: there the machine keeps far more reads in flight than its first level has buffers
  // for (measured: 18 GB/s a core against 11).
  static KVSTRATA_INLINE void prefetch(Row row, int head_dim) {
    const char* p = reinterpret_cast<const char*>(row);
    for (int i = 0; i < head_dim * static_cast<int>(sizeof(T)); i += 64) __builtin_prefetch(p + i, 0, 2);
  }
};

// Places of the tokens [lo, hi) of a tile.
inline void find_places(const AttentionArgs& args, int sequence, int tile, int lo, int hi, Place* places) {
  const int32_t* table = args.block_tables + sequence * args.table_stride;
  const int size = args.kv.block_size;
  int position = tile * kTile + lo;
  int index = position / size;
  int offset = position % size;
  for (int j = lo; j < hi; ++index, offset = 0) {
    const uint8_t* block = args.kv.base + table[index] * args.kv.block_stride;
    for (; offset < size && j < hi; ++offset, ++j) places[j] = {block, offset};
  }
}

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
