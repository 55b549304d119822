// From a file's rows to packed tiles, and from packed tiles back to rows of floats.
#pragma once

#include "linear/format.h"

namespace kvstrata {

enum class SourceFormat : int { f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q4_k, q6_k };

// The names of GGML types and of safetensors dtypes that pack_tiles reads; false for any other name.
bool find_source_format(const char* name, SourceFormat* format);

// The packed format that keeps a source's values as they are; int8 where none does.
Format natural_format(SourceFormat source);
bool can_pack(SourceFormat source, Format target);

// Inputs and bytes of a block in a file's row.
int64_t block_inputs(SourceFormat source);
int64_t block_bytes(SourceFormat source);

struct PackTask {
  SourceFormat source;
  Format target;
  const uint8_t* rows;
  int64_t row_bytes;
  const int64_t* row_order;  // packed row r is file row row_order[r]; null: r
  int64_t outputs;
  int64_t inputs;
  uint8_t* tiles;  // zeroed
};
void pack_tiles(const PackTask& task, int64_t first_tile, int64_t last_tile);

// A packed row as `inputs` floats, rounded once as the file's format defines it.
void unpack_row(Format format, int64_t inputs, const uint8_t* tiles, int64_t row, float* out);

}  // namespace kvstrata
