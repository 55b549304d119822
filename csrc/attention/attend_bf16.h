// Attention over bf16 pools, whose elements are multiplied as they are.
#pragma once

#include "attention/attend.h"

#include "attention/denormals.h"
#include "attention/pairs.h"
#include "attention/products_bf16.h"

namespace kvstrata {
namespace KVSTRATA_ISA {

void attend_bf16(const AttentionArgs& args, const AttentionItem& item, const AttentionItem* next, float* scratch) {
  const FlushDenormals flush;
  attend_format<PairedBf16>(args, item, next, scratch);
}

void fold_bf16(const AttentionArgs& args, const AttentionFold& fold) {
  const FlushDenormals flush;
  fold_partials(args, fold);
}

extern const AttentionKernels bf16_attention_kernels = {attend_bf16, fold_bf16};

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
