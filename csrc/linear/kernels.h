// What a translation unit of one instruction set offers to the operators: plain functions and raw pointers.
#pragma once

#include "ahead.h"
#include "dispatch.h"
#include "linear/format.h"

namespace kvstrata {

// Some tiles of one weight times some rows.
struct LinearTask {
  Format format;
  int64_t groups;   // of 32 inputs, padding included
  int64_t outputs;  // of the whole weight
  const uint8_t* tiles;
  int64_t first_tile;
  int64_t last_tile;
  const QuantGroup* rows;
  int64_t row_stride;  // in groups
  int64_t row_count;
  float* out;  // row 0, output 0
  int64_t out_stride;
  Ahead* ahead;  // what to bring into the cache meanwhile; or null
};

struct LinearKernels {
  // inputs floats of a row into groups; groups beyond the inputs become zero.
  void (*quantize)(const float* x, int64_t inputs, int64_t groups, QuantGroup* row);
  // scratch: scratch_bytes, 64-byte aligned; unused for up to direct_rows rows.
  void (*multiply)(const LinearTask& task, uint8_t* scratch);
  int64_t (*scratch_bytes)(int64_t groups);
  int64_t direct_rows;
};

namespace portable {
extern const LinearKernels linear_kernels;
}
#if KVSTRATA_X86
namespace avx2 {
extern const LinearKernels linear_kernels;
}
namespace avx512 {
extern const LinearKernels linear_kernels;
}
#endif

}  // namespace kvstrata
