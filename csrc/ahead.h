// What a thread brings into its cache while it works on something else. Plain C++ for every instruction set.
#pragma once

#include <stdint.h>

namespace kvstrata {

// A stretch of memory that is read, cut into pieces of `piece` bytes which threads take whole.
struct Stretch {
  const uint8_t* begin;
  int64_t bytes;
  int64_t piece;
};

// Stretches that a thread reads later, `offset` bytes on from where they are written down.
struct Ahead {
  const Stretch* next;
  const Stretch* last;
  int64_t offset;
  const uint8_t* line;
  const uint8_t* end;
};

// Asks for a few lines more, if there are any: as many as memory gives beside a group of a product's weights.
#if defined(__GNUC__)
__attribute__((always_inline))
#endif
static inline void fetch_ahead(Ahead* ahead) {
  constexpr int kLines = 3;
  constexpr int64_t kLine = 64;
  for (int i = 0; i < kLines; ++i, ahead->line += kLine) {
    if (ahead->line >= ahead->end) {
      if (ahead->next == ahead->last) return;
      ahead->line = ahead->next->begin + ahead->offset;
      ahead->end = ahead->line + ahead->next->bytes;
      ++ahead->next;
    }
    __builtin_prefetch(ahead->line, 0, 2);
  }
}

}  // namespace kvstrata
