// Attention over pools of all formats but bf16, whose elements are multiplied as float32.
#pragma once

#include "attention/attend.h"

namespace kvstrata {
namespace KVSTRATA_ISA {

void attend(const AttentionArgs& args, const AttentionItem& item, const AttentionItem* next, float* scratch) {
  switch (args.kv.type) {
    case KvType::float32:
      return attend_format<Plain<float>>(args, item, next, scratch);
    case KvType::float16:
      return attend_format<Plain<Fp16>>(args, item, next, scratch);
    case KvType::float8_e4m3:
      return attend_format<Coded<Fp8>>(args, item, next, scratch);
    case KvType::int8:
      return attend_format<Coded<Int8>>(args, item, next, scratch);
    case KvType::int4:
      return attend_format<FourBits>(args, item, next, scratch);
    case KvType::bfloat16:  // attend_bf16.h
      return;
  }
}

extern const AttentionKernels attention_kernels = {attend, fold_partials};

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
