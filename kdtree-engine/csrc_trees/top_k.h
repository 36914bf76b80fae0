// The best candidates of a row: within a warp's columns, of a block's warps, and of a row's chunks.
//
// A *key* is a candidate in 64 bits: its score as `ordered` above, the complement of its column below. So the
// larger key is the better candidate, and of equal scores the lower column. 0 is none. Plain functions, which
// g++ compiles too; what needs a warp stands in build.cu.
#pragma once

#include "exact.h"

namespace kdtree {

constexpr int kChunkColumns = 4096;  // of a block: part of the normaliser's definition
constexpr int kChunkWarps = 8;
constexpr int kWarpColumns = kChunkColumns / kChunkWarps;
constexpr int kLaneColumns = kWarpColumns / 32;
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

// What a lane holds of its warp's columns: every 32nd.
struct LaneScores {
  uint32_t order[kLaneColumns];  // 0: no candidate, or taken
  uint32_t best;
  int place;  // of the best; the lowest of equal ones

  KD_BOTH void find_best() {
    best = 0;
    place = 0;
    KD_UNROLL
    for (int i = 0; i < kLaneColumns; ++i)
      if (order[i] > best) {
        best = order[i];
        place = i;
      }
  }

  KD_BOTH void take_best() {
    KD_UNROLL
    for (int i = 0; i < kLaneColumns; ++i)
      if (i == place) order[i] = 0;
    find_best();
  }

  // The best one's column, from the warp's first.
  KD_BOTH uint32_t column(int lane) const { return static_cast<uint32_t>(place * 32 + lane); }
};

// How many keys of a falling list are above `key`.
KD_BOTH int keys_above(const uint64_t* list, int length, uint64_t key) {
  int low = 0, high = length;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (list[middle] > key)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Puts item number `item` of `lists` falling lists of `ranks` keys, kMaxRanks apart, where it stands among
// the `ranks` best of all. Keys are different, so no two items go to one place. `joined` must be zeros.
KD_BOTH void join(const uint64_t* keys, int lists, int ranks, int item, uint64_t* joined) {
  const uint64_t key = keys[item / ranks * kMaxRanks + item % ranks];
  if (key == 0) return;
  int place = 0;
  for (int list = 0; list < lists; ++list) place += keys_above(keys + list * kMaxRanks, ranks, key);
  if (place < ranks) joined[place] = key;
}

// The heads of the two falling lists that a lane of the merging warp walks: chunks `lane` and `lane` + 32.
struct LaneHeads {
  const uint64_t* list[2];
  int left[2];

  KD_BOTH void start(const uint64_t* keys, int chunks, int ranks, int lane) {
    for (int i = 0; i < 2; ++i) {
      list[i] = keys + (lane + 32 * i) * ranks;
      left[i] = lane + 32 * i < chunks ? ranks : 0;
    }
  }

  KD_BOTH uint64_t head(int i) const { return left[i] > 0 ? *list[i] : 0; }
  KD_BOTH uint64_t best() const { return head(0) > head(1) ? head(0) : head(1); }

  // Steps over `key` where it is one of the heads.
  KD_BOTH void take(uint64_t key) {
    for (int i = 0; i < 2; ++i)
      if (key != 0 && head(i) == key) {
        ++list[i];
        --left[i];
      }
  }
};

}  // namespace kdtree
