// torch.ops.kvstrata.{finite_rows, argmax, logsumexp, top_k} on the CPU.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "checks.h"
#include "dispatch.h"
#include "parallel.h"
#include "sampling/sampling.h"

namespace kvstrata {
namespace {

void check_logits(const char* op, const at::Tensor& logits) {
  check_dtype(op, "logits", logits, at::kFloat);
  check_shape(op, "logits", logits, {"num_rows", "vocab_size"});
  TORCH_CHECK_VALUE(logits.size(1) > 0, op, ": logits has shape ", logits.sizes(), ", expected at least one token");
  check_dense_rows(op, "logits", logits);
}

template <class Run>
void for_each_logits_row(const at::Tensor& logits, const Run& run) {
  const int64_t rows = logits.size(0);
  const float* first = logits.const_data_ptr<float>();
  for_each_item(rows, useful_threads(logits.numel() / 4, rows),
                [&](int64_t, int64_t row) { run(row, first + row * logits.stride(0)); });
}

at::Tensor finite_rows(const at::Tensor& logits) {
  check_logits("finite_rows", logits);
  at::Tensor out = at::empty({logits.size(0)}, logits.options().dtype(at::kBool));
  bool* finite = out.data_ptr<bool>();
  const SamplingKernels& kernels = KVSTRATA_PICK(sampling_kernels);
  for_each_logits_row(logits, [&](int64_t row, const float* x) { finite[row] = kernels.finite(x, logits.size(1)); });
  return out;
}

at::Tensor argmax(const at::Tensor& logits) {
  check_logits("argmax", logits);
  at::Tensor ids = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
  int64_t* id = ids.data_ptr<int64_t>();
  const SamplingKernels& kernels = KVSTRATA_PICK(sampling_kernels);
  for_each_logits_row(logits, [&](int64_t row, const float* x) { id[row] = kernels.argmax(x, logits.size(1)); });
  return ids;
}

at::Tensor logsumexp(const at::Tensor& logits) {
  check_logits("logsumexp", logits);
  at::Tensor out = at::empty({logits.size(0)}, logits.options());
  float* sum = out.data_ptr<float>();
  const SamplingKernels& kernels = KVSTRATA_PICK(sampling_kernels);
  for_each_logits_row(logits, [&](int64_t row, const float* x) { sum[row] = kernels.logsumexp(x, logits.size(1)); });
  return out;
}

std::tuple<at::Tensor, at::Tensor> top_k(const at::Tensor& logits, int64_t k) {
  check_logits("top_k", logits);
  TORCH_CHECK_VALUE(k >= 0 && k <= logits.size(1), "top_k: k is ", k, ", expected 0 to ", logits.size(1),
                    " (vocab_size)");
  at::Tensor values = at::empty({logits.size(0), k}, logits.options());
  at::Tensor ids = at::empty({logits.size(0), k}, logits.options().dtype(at::kLong));
  float* value = values.data_ptr<float>();
  int64_t* id = ids.data_ptr<int64_t>();
  const SamplingKernels& kernels = KVSTRATA_PICK(sampling_kernels);
  for_each_logits_row(logits, [&](int64_t row, const float* x) {
    kernels.top_k(x, logits.size(1), k, value + row * k, id + row * k);
  });
  return {values, ids};
}

}  // namespace

TORCH_LIBRARY_IMPL(kvstrata, CPU, m) {
  m.impl("finite_rows", finite_rows);
  m.impl("argmax", argmax);
  m.impl("logsumexp", logsumexp);
  m.impl("top_k", top_k);
}

}  // namespace kvstrata
