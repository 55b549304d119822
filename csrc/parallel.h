// Runs independent items on torch's threads, handed out one by one so that no thread waits for a dear one.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace kvstrata {

// How many threads are worth waking for `cost`, in the time of fused multiply-adds of 16 floats, and `items`.
inline int64_t useful_threads(int64_t cost, int64_t items) {
  constexpr int64_t kCostPerThread = 20000;  // several times what it takes to wake one
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  return std::max<int64_t>(1, std::min({threads, items, cost / kCostPerThread}));
}

// Calls run(thread, item) for each item once; `thread` < `threads` names the caller's scratch.
template <class Run>
void for_each_item(int64_t items, int64_t threads, const Run& run) {
  if (threads <= 1) {
    for (int64_t item = 0; item < items; ++item) run(int64_t{0}, item);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      for (int64_t item = next.fetch_add(1); item < items; item = next.fetch_add(1)) run(thread, item);
    }
  });
}

}  // namespace kvstrata
