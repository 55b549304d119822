// Threads that stay together for a whole step, handed one job after another by the thread that leads them.
//
// A parallel region of torch costs microseconds to open and to close, and a step of decode has hundreds of jobs
// that take not many more. A team opens one region: its leader goes through the step, the others wait for jobs
// without sleep, and bring meanwhile into their caches what the step reads next.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "ahead.h"

namespace kvstrata {

// What is read one after another.
using Reading = std::vector<Stretch>;

// Walks over the part of a reading that a thread takes first.
class Fetcher {
 public:
  // Begins at the thread's share of the reading.
  void start(const Reading& reading, int64_t thread, int64_t threads) {
    int64_t pieces = 0;
    for (const Stretch& stretch : reading) pieces += count(stretch);
    int64_t skip = pieces * thread / threads;
    reading_ = &reading;
    stretch_ = 0;
    while (stretch_ < reading.size() && skip >= count(reading[stretch_])) skip -= count(reading[stretch_++]);
    offset_ = stretch_ < reading.size() ? skip * reading[stretch_].piece : 0;
    left_ = kMost;
  }

  // Asks for a few lines more; nothing once the cache has enough.
  void fetch() {
    if (left_ <= 0 || reading_ == nullptr || stretch_ >= reading_->size()) return;
    const Stretch& stretch = (*reading_)[stretch_];
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(stretch.begin + offset_ + line * kLine, 0, 2);
    offset_ += kLines * kLine;
    left_ -= kLines * kLine;
    if (offset_ >= stretch.bytes) {
      ++stretch_;
      offset_ = 0;
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  static constexpr int64_t kLines = 4;
  static constexpr int64_t kMost = 64 << 10;  // bytes; half as much does as well, twice as much no better

  static int64_t count(const Stretch& stretch) { return (stretch.bytes + stretch.piece - 1) / stretch.piece; }

  const Reading* reading_ = nullptr;
  size_t stretch_ = 0;
  int64_t offset_ = 0;
  int64_t left_ = 0;
};

class Team {
 public:
  // readings: of a step's products in order; they stay as they are for as long as the team.
  Team(int64_t threads, const std::vector<Reading>& readings)
      : threads_(threads), readings_(readings), ahead_(static_cast<size_t>(threads)) {}
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // The team that the calling thread leads; null where it leads none.
  static Team* led() { return led_; }

  int64_t threads() const { return threads_; }

  // From now on threads that wait fetch this reading.
  void expect(int64_t reading) { expected_.store(reading, std::memory_order_relaxed); }

  // From now on each thread brings its reading, `offset` bytes on, while it multiplies; until `bring` once more, of
  // none at the end. Between jobs only.
  void bring(const std::vector<Reading>& readings, int64_t offset) {
    for (size_t t = 0; t < ahead_.size(); ++t) {
      ahead_[t].what = {};
      if (t >= readings.size() || readings[t].empty()) continue;
      const Stretch* first = readings[t].data();
      ahead_[t].what = {first, first + readings[t].size(), offset, nullptr, nullptr};
    }
  }

  // What a thread of a job brings while it multiplies.
  Ahead* ahead(int64_t thread) { return &ahead_[static_cast<size_t>(thread)].what; }

  // Runs program() as the leader of torch's threads. What it throws is thrown on.
  template <class Program>
  static void run(int64_t threads, const std::vector<Reading>& readings, const Program& program) {
    Team team(threads, readings);
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t) {
      if (begin > 0) return team.follow(begin);
      const Lead lead(&team);
      program();
    });
  }

  // Calls body(thread) by the leader and by those who come in time; `body` must not throw, and must itself see to
  // it that each piece of work is done once. Ends when all who came are done.
  template <class Body>
  void share(int64_t threads, const Body& body) {
    if (threads <= 1) return body(int64_t{0});
    body_ = &body;
    call_ = [](const void* job, int64_t thread) { (*static_cast<const Body*>(job))(thread); };
    wanted_ = threads;
    gate_.store((gate_.load(std::memory_order_relaxed) & ~kInside) + kJob + kOpen, std::memory_order_release);
    body(int64_t{0});
    gate_.fetch_and(~kOpen, std::memory_order_relaxed);
    Waiting waiting(this, 0);
    while ((gate_.load(std::memory_order_acquire) & kInside) != 0) waiting.spend();
  }

 private:
  // The gate holds the number of the job, whether it may still be entered, and how many followers are inside.
  static constexpr uint64_t kInside = 0xffff;
  static constexpr uint64_t kOpen = 0x10000;
  static constexpr uint64_t kJob = 0x20000;

  struct alignas(64) Bringing {
    Ahead what{};
  };

  // A thread's time between jobs.
  class Waiting {
   public:
    Waiting(Team* team, int64_t thread) : team_(team), thread_(thread) {}

    void spend() {
      const int64_t expected = team_->expected_.load(std::memory_order_relaxed);
      if (expected != reading_) {
        reading_ = expected;
        if (expected < static_cast<int64_t>(team_->readings_.size())) {
          fetcher_.start(team_->readings_[static_cast<size_t>(expected)], thread_, team_->threads_);
        }
      }
      fetcher_.fetch();
      constexpr int kSpins = 20000;  // then another process may need this core
      if (++spins_ > kSpins) std::this_thread::yield();
    }

    void worked() { spins_ = 0; }

   private:
    Team* team_;
    int64_t thread_;
    int64_t reading_ = -1;
    int spins_ = 0;
    Fetcher fetcher_;
  };

  // The leader's time; lets the followers go at its end.
  class Lead {
   public:
    explicit Lead(Team* team) : team_(team), before_(led_) { led_ = team; }
    ~Lead() {
      led_ = before_;
      team_->over_.store(true, std::memory_order_release);
    }
    Lead(const Lead&) = delete;
    Lead& operator=(const Lead&) = delete;

   private:
    Team* team_;
    Team* before_;
  };

  void follow(int64_t thread) {
    Waiting waiting(this, thread);
    uint64_t done = 0;
    while (!over_.load(std::memory_order_acquire)) {
      uint64_t gate = gate_.load(std::memory_order_acquire);
      if ((gate & kOpen) != 0 && gate / kJob != done) {
        if (!gate_.compare_exchange_strong(gate, gate + 1, std::memory_order_acquire)) continue;
        done = gate / kJob;
        if (thread < wanted_) call_(body_, thread);
        gate_.fetch_sub(1, std::memory_order_release);
        waiting.worked();
      } else {
        waiting.spend();
      }
    }
  }

  static inline thread_local Team* led_ = nullptr;

  const int64_t threads_;
  const std::vector<Reading>& readings_;
  std::vector<Bringing> ahead_;
  const void* body_ = nullptr;
  void (*call_)(const void*, int64_t) = nullptr;
  int64_t wanted_ = 0;
  alignas(64) std::atomic<uint64_t> gate_{0};
  alignas(64) std::atomic<int64_t> expected_{0};
  std::atomic<bool> over_{false};
};

// How many threads a job may be shared between.
inline int64_t threads_at_hand() {
  if (const Team* team = Team::led()) return team->threads();
  return at::in_parallel_region() ? 1 : at::get_num_threads();
}

// Calls body(thread) by up to so many threads, numbered from 0; fewer may come. `body` must itself see to it that
// each piece of work is done once.
template <class Body>
void on_threads(int64_t threads, const Body& body) {
  if (Team* team = Team::led()) return team->share(threads, body);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) body(thread);
  });
}

}  // namespace kvstrata
