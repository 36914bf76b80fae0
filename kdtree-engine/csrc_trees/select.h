// Best-first selection: a tree that grows by the best next child of its nodes, in the oracle's order.
//
// Every node has a *cursor*, the rank of its next child that is not in the tree. The children that the cursors
// point at are the oracle's heap: the best of them is the next node. The lanes of a warp hold them in registers,
// each those of every 32nd node. Plain functions; build.cu has the warp that calls them, and a test calls them
// under g++.
//
// Weights are at most 0, so their negatives are held: *costs*, whose bits are ordered as they are, and whose sums
// round alike. An infinite cost stands for no child.
#pragma once

#include "top_k.h"

namespace kdtree {

constexpr int kMaxNodes = 129;  // a budget of 128, and the root
constexpr int kMaxDepth = 16;
constexpr int kMaskWords = 3;   // of 64 nodes
constexpr int kCostStride = 128;
constexpr uint32_t kInfiniteHigh = 0x7ff00000u;  // the high word of an infinite cost

// A child in 32 bits. From the top: its place in the order of rank tuples among all next children, its parent,
// the parent's depth, its rank, and three zeros, so that the last 15 bits address its step among the costs.
constexpr uint32_t kNextPlace = 1u << 24;
constexpr uint32_t kNextRank = 1u << 3;
KD_BOTH int parent_of(uint32_t child) { return static_cast<int>(child >> 15 & 127); }
KD_BOTH int depth_above(uint32_t child) { return static_cast<int>(child >> 10 & 31); }
KD_BOTH int rank_of(uint32_t child) { return static_cast<int>(child >> 3 & 127); }

// What the block of one request shares.
struct Tree {
  // Of a step to a depth, by rank. Infinite behind the last rank, and in a row behind the last depth.
  double steps[kMaxDepth + 1][kCostStride];
  int64_t tokens[kMaxDepth * kMaxRanks];
  double cost[kMaxNodes];
  uint32_t origin[kMaxNodes];  // the child that became the node; nothing for the root
  uint64_t seen[kMaxNodes][kMaskWords];  // who sees whom
  uint8_t child[kMaxNodes][kMaxRanks];   // by rank; 0: none
  int count;
};

// The cost of a log-probability; never -0, which would come last by its bits.
KD_BOTH double cost_of(double log_prob) { return sum(0.0, -log_prob); }

// Where the step to a child lies among the steps, in bytes; likewise to its own first child, in the next row.
KD_BOTH uint32_t step_of(uint32_t child) { return child & 0x7ff8u; }
KD_BOTH uint32_t first_below(uint32_t child) { return (child & 0x7c00u) + (1u << 10); }

// What a lane holds: of nodes `lane` + 32 i their next children, and their own costs. A tree's last node is no
// parent, so 4 slots do for 129 nodes, and 2 for 65.
template <int kSlots>
struct Frontier {
  uint32_t high[kSlots], low[kSlots];  // of the child's cost
  uint32_t child[kSlots];
  double cost[kSlots];

  KD_BOTH void set(int i, double child_cost) {
    const uint64_t bits = bits_as<uint64_t>(child_cost);
    high[i] = static_cast<uint32_t>(bits >> 32);
    low[i] = static_cast<uint32_t>(bits);
  }

  KD_BOTH void plant(double first_step, int lane) {
    KD_UNROLL
    for (int i = 0; i < kSlots; ++i) {
      high[i] = kInfiniteHigh;
      low[i] = child[i] = 0;
      cost[i] = 0.0;
    }
    if (lane == 0) set(0, first_step);
  }

  // Three steps to the warp's next node: the least high word of all, the least low word among those that have
  // it, and of equal costs the child whose tuple comes first.
  KD_BOTH uint32_t least_high() const {
    uint32_t least = high[0];
    KD_UNROLL
    for (int i = 1; i < kSlots; ++i) least = high[i] < least ? high[i] : least;
    return least;
  }
  KD_BOTH uint32_t least_low(uint32_t least_high) const {
    uint32_t least = 0xffffffffu;
    KD_UNROLL
    for (int i = 0; i < kSlots; ++i) {
      const uint32_t mine = high[i] == least_high ? low[i] : 0xffffffffu;
      least = mine < least ? mine : least;
    }
    return least;
  }
  KD_BOTH uint32_t first_child(uint32_t least_high, uint32_t least_low) const {
    uint32_t first = 0xffffffffu;
    KD_UNROLL
    for (int i = 0; i < kSlots; ++i) {
      const uint32_t mine = high[i] == least_high && low[i] == least_low ? child[i] : 0xffffffffu;
      first = mine < first ? mine : first;
    }
    return first;
  }

  // `taken`, at `taken_cost`, becomes `node`. In the order of tuples its own first child takes its place and its
  // next sibling the one behind: only what is below the child stands between the two. All others move on.
  // below_step, sibling_step: to its first child and to its next sibling.
  KD_BOTH void grow(int lane, uint32_t taken, double taken_cost, int node, double below_step, double sibling_step) {
    const double below = sum(taken_cost, below_step);
    const int parent = parent_of(taken);
    double parent_cost = cost[0];
    KD_UNROLL
    for (int i = 1; i < kSlots; ++i)
      if (lane + 32 * i == parent) parent_cost = cost[i];  // of one lane; others' sums are not used
    const double sibling = sum(parent_cost, sibling_step);
    KD_UNROLL
    for (int i = 0; i < kSlots; ++i) {
      if (child[i] > (taken | (kNextPlace - 1))) child[i] += kNextPlace;
      if (lane + 32 * i == parent) {
        set(i, sibling);
        child[i] = taken + kNextPlace + kNextRank;
      }
      if (lane + 32 * i == node) {
        set(i, below);
        child[i] = (taken & ~(kNextPlace - 1)) | static_cast<uint32_t>(node) << 15 | first_below(taken);
        cost[i] = taken_cost;
      }
    }
  }
};

// Where the trees go; every pointer is of the whole batch, N nodes a request (ops/draft_trees.py).
struct TreeOutputs {
  int64_t *tokens, *parents, *depths, *positions;
  double* log_weights;
  int64_t* counts;
  int64_t *retrieve_index, *retrieve_next_token, *retrieve_next_sibling;
  uint8_t* draft_mask;
  int64_t* packed_mask;
  uint8_t* full_mask;  // or null
  int nodes;
};

// Thread by thread: children by rank, and who sees whom, by walking up. Padding sees itself alone. `child` must
// be zeros.
KD_BOTH void link_nodes(Tree& t, int nodes, int thread, int threads) {
  for (int node = thread; node < nodes; node += threads) {
    uint64_t low = 0, high = 0;
    const bool below = node > 0 && node < t.count;
    if (below) {
      // Node 128 is nobody's parent.
      for (int above = parent_of(t.origin[node]); above > 0; above = parent_of(t.origin[above]))
        (above < 64 ? low : high) |= uint64_t{1} << above % 64;
      low |= 1;
      t.child[parent_of(t.origin[node])][rank_of(t.origin[node])] = static_cast<uint8_t>(node);
    }
    const uint64_t own = uint64_t{1} << node % 64;
    t.seen[node][0] = node / 64 == 0 ? low | own : low;
    t.seen[node][1] = node / 64 == 1 ? high | own : high;
    t.seen[node][2] = node / 64 == 2 ? own : 0;
  }
}

// Where request `request`'s part of SGLang's full mask begins: N * (its prefix + N) bytes for each before.
KD_BOTH int64_t full_mask_begin(const int64_t* prefix_lengths, int request, int nodes) {
  int64_t columns = static_cast<int64_t>(request) * nodes;
  for (int before = 0; before < request; ++before) columns += prefix_lengths[before];
  return columns * nodes;
}

// Thread by thread: everything that a request has, once link_nodes is done. A warp writes rows of the masks.
KD_BOTH void write_tree(const Tree& t, int ranks, int64_t root, int64_t prefix, int64_t full_begin, int request,
                        const TreeOutputs& out, int thread, int threads) {
  const int nodes = out.nodes, words = (nodes + 63) / 64;
  const int64_t first = static_cast<int64_t>(request) * nodes;
  for (int node = thread; node < nodes; node += threads) {
    const bool real = node < t.count, below = real && node > 0;
    const uint32_t origin = below ? t.origin[node] : 0;
    const int depth = below ? depth_above(origin) + 1 : 0, rank = rank_of(origin);
    const int next = real ? t.child[node][0] : 0;
    const int sibling = below && rank + 1 < kMaxRanks ? t.child[parent_of(origin)][rank + 1] : 0;
    const int64_t at = first + node;
    out.tokens[at] = below ? t.tokens[(depth - 1) * ranks + rank] : root;
    out.parents[at] = below ? parent_of(origin) : -1;
    out.depths[at] = depth;
    out.positions[at] = prefix + depth;
    out.log_weights[at] = real ? sum(0.0, -t.cost[node]) : -INFINITY;
    out.retrieve_index[at] = at;
    out.retrieve_next_token[at] = next > 0 ? next : -1;
    out.retrieve_next_sibling[at] = sibling > 0 ? sibling : -1;
    for (int word = 0; word < words; ++word)
      out.packed_mask[at * words + word] = static_cast<int64_t>(t.seen[node][word]);
  }
  if (thread == 0) out.counts[request] = t.count;
  for (int node = thread / 32; node < nodes; node += threads / 32)
    for (int other = thread % 32; other < nodes; other += 32) {
      const uint8_t bit = t.seen[node][other / 64] >> other % 64 & 1;
      out.draft_mask[(first + node) * nodes + other] = bit;
      if (out.full_mask != nullptr) out.full_mask[full_begin + node * (prefix + nodes) + prefix + other] = bit;
    }
}

}  // namespace kdtree
