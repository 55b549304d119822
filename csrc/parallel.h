// Runs independent items on torch's threads, handed out one by one so that no thread waits for a dear one.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "team.h"

namespace kvstrata {

// How many threads are worth waking for `cost`, in the time of fused multiply-adds of 16 floats, and `items`.
inline int64_t useful_threads(int64_t cost, int64_t items) {
  // About what it takes to hand work to a thread that waits for it, in a team or asleep.
  const int64_t cost_per_thread = Team::led() != nullptr ? 2000 : 8000;
  return std::max<int64_t>(1, std::min({threads_at_hand(), items, cost / cost_per_thread}));
}

// Neighbouring items to one thread each, thread t's being first(t) to first(t + 1), which it takes from its own end; who
// is done takes from the other end of another's. So each thread reads memory front to back, and none waits for long.
class Shares {
 public:
  Shares(int64_t items, int64_t threads) : spans_(static_cast<size_t>(threads)) {
    for (int64_t t = 0; t < threads; ++t) {
      spans_[static_cast<size_t>(t)].bounds = pack(first(t, items, threads), first(t + 1, items, threads));
    }
  }

  static int64_t first(int64_t thread, int64_t items, int64_t threads) { return items * thread / threads; }

  // The next item for `thread`; -1 where none is left.
  int64_t take(int64_t thread) {
    const int64_t count = static_cast<int64_t>(spans_.size());
    int64_t item = take(&spans_[static_cast<size_t>(thread)].bounds, true);
    for (int64_t t = 1; item < 0 && t < count; ++t) {
      item = take(&spans_[static_cast<size_t>((thread + t) % count)].bounds, false);
    }
    return item;
  }

 private:
  struct alignas(64) Span {
    std::atomic<uint64_t> bounds;
  };

  static uint64_t pack(int64_t begin, int64_t end) {
    return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end);
  }
  static int64_t take(std::atomic<uint64_t>* bounds, bool front) {
    uint64_t seen = bounds->load();
    while (true) {
      const int64_t begin = static_cast<int64_t>(seen >> 32);
      const int64_t end = static_cast<int64_t>(seen & 0xffffffffu);
      if (begin >= end) return -1;
      if (bounds->compare_exchange_weak(seen, front ? pack(begin + 1, end) : pack(begin, end - 1))) {
        return front ? begin : end - 1;
      }
    }
  }

  std::vector<Span> spans_;
};

// Calls run(thread, item) for each item once; `thread` < `threads` names the caller's scratch. A thread begins with the
// same share of the items each time: where these are rows, with what it wrote itself one phase before.
template <class Run>
void for_each_item(int64_t items, int64_t threads, const Run& run) {
  if (threads <= 1) {
    for (int64_t item = 0; item < items; ++item) run(int64_t{0}, item);
    return;
  }
  Shares shares(items, threads);
  on_threads(threads, [&](int64_t thread) {
    for (int64_t item = shares.take(thread); item >= 0; item = shares.take(thread)) run(thread, item);
  });
}

// The same, but run(thread, item, next) is told which item its thread takes next, -1 if none: each claims one ahead, so
// that it can fetch what that needs.
template <class Run>
void for_each_item_and_next(int64_t items, int64_t threads, const Run& run) {
  if (threads <= 1) {
    for (int64_t item = 0; item < items; ++item) run(int64_t{0}, item, item + 1 < items ? item + 1 : -1);
    return;
  }
  Shares shares(items, threads);
  on_threads(threads, [&](int64_t thread) {
    int64_t next = shares.take(thread);
    while (next >= 0) {
      const int64_t item = next;
      next = shares.take(thread);
      run(thread, item, next);
    }
  });
}

// Calls prepare(part) for each part once, then run(thread, item) for each item, in one go: nobody runs before all parts
// are prepared. Fewer threads than asked for may come; what none of them has claimed is there for all.
template <class Prepare, class Run>
void prepare_and_run(int64_t parts, int64_t items, int64_t threads, const Prepare& prepare, const Run& run) {
  if (threads <= 1) {
    for (int64_t part = 0; part < parts; ++part) prepare(part);
    for (int64_t item = 0; item < items; ++item) run(int64_t{0}, item);
    return;
  }
  Shares to_prepare(parts, threads);
  std::atomic<int64_t> prepared{0};
  Shares shares(items, threads);
  on_threads(threads, [&](int64_t thread) {
    for (int64_t part = to_prepare.take(thread); part >= 0; part = to_prepare.take(thread)) {
      prepare(part);
      prepared.fetch_add(1);
    }
    constexpr int kSpins = 2000;  // then another thread may need this core
    for (int spins = 0; prepared.load() < parts; ++spins) {
      if (spins > kSpins) std::this_thread::yield();
    }
    for (int64_t item = shares.take(thread); item >= 0; item = shares.take(thread)) run(thread, item);
  });
}

}  // namespace kvstrata
