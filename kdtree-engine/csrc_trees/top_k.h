// The best candidates of a row: of a block's columns, and of a row's chunks.
//
// A *key* is a candidate in 64 bits: its score as `ordered` above, the complement of its column below. So the
// larger key is the better candidate, and of equal scores the lower column. 0 is none. Plain functions, which
// g++ compiles too; what needs a warp stands in build.cu.
#pragma once

#include "exact.h"

namespace kdtree {

constexpr int kChunkColumns = 4096;  // of a block: part of the normaliser's definition
constexpr int kRun = 8;              // columns that a thread takes at once
constexpr int kMaxChunks = 64;
constexpr int kMaxRanks = 64;

KD_BOTH uint64_t key_of(uint32_t order, uint32_t column) { return uint64_t{order} << 32 | ~column; }
KD_BOTH uint32_t order_of(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
KD_BOTH uint32_t column_of(uint64_t key) { return ~static_cast<uint32_t>(key); }

// The log-probability of a candidate, given its row's normaliser where scores are logits.
KD_BOTH double log_prob_of(uint64_t key, float z, bool from_logits) {
  const double score = value_of(order_of(key));
  return from_logits ? sum(score, -static_cast<double>(z)) : score;
}

// How many of `count` keys are above `key`: its place among them, as keys are different.
KD_BOTH int keys_above(const uint64_t* keys, int count, uint64_t key) {
  int above = 0;
#ifdef __CUDA_ARCH__
#pragma unroll 4
#endif
  for (int i = 0; i < count; ++i) above += keys[i] > key;
  return above;
}

// The heads of the two falling lists that a lane of the merging warp walks: chunks `lane` and `lane` + 32.
struct LaneHeads {
  const uint64_t* list[2];
  uint64_t head[2];  // 0 behind the last
  int left[2];

  KD_BOTH void start(const uint64_t* keys, int chunks, int ranks, int lane) {
    KD_UNROLL
    for (int i = 0; i < 2; ++i) {
      list[i] = keys + (lane + 32 * i) * ranks;
      left[i] = lane + 32 * i < chunks ? ranks : 0;
      head[i] = left[i] > 0 ? *list[i] : 0;
    }
  }

  KD_BOTH uint64_t best() const { return head[0] > head[1] ? head[0] : head[1]; }

  // Steps over `key` where it is one of the heads.
  KD_BOTH void take(uint64_t key) {
    KD_UNROLL
    for (int i = 0; i < 2; ++i)
      if (key != 0 && head[i] == key) {
        ++list[i];
        --left[i];
        head[i] = left[i] > 0 ? *list[i] : 0;
      }
  }
};

}  // namespace kdtree
