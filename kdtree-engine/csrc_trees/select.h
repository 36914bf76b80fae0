// Best-first selection: a tree that grows by the best next child of its nodes, in the oracle's order.
//
// Every node has a *cursor*, the rank of its next child that is not in the tree. The children that the cursors
// point at are the oracle's heap: the best of them is the next node. Plain functions over a struct that lies in
// shared memory; build.cu has the warp that calls them, and a test calls them under g++.
#pragma once

#include "top_k.h"

namespace kdtree {

constexpr int kMaxNodes = 129;  // a budget of 128, and the root
constexpr int kMaxDepth = 16;
constexpr int kMaskWords = 3;   // of 64 nodes

// The candidates of one request: falling log-probabilities [depth][ranks], -inf where there is none.
struct Ranked {
  const double* log_probs;
  int depth;
  int ranks;
};

struct Tree {
  double weight[kMaxNodes];
  uint64_t next[kMaxNodes];  // `ordered` weight of the child at the cursor; 0: there is none
  // The rank tuple: a digit of 7 bits a depth, rank + 1, the first one highest. Compared as integers, high
  // word first, tuples are ordered as Python's; a prefix comes before its extensions.
  uint64_t high[kMaxNodes], low[kMaxNodes];
  uint64_t seen[kMaxNodes][kMaskWords];  // who sees whom, filled in at the end
  int16_t parent[kMaxNodes], depth[kMaxNodes], rank[kMaxNodes], cursor[kMaxNodes];
  int16_t first_child[kMaxNodes], last_child[kMaxNodes], next_sibling[kMaxNodes];  // -1: none
  int count;
};

KD_BOTH void set_next(Tree& t, const Ranked& c, int node, int rank) {
  t.cursor[node] = static_cast<int16_t>(rank);
  t.next[node] = 0;
  if (t.depth[node] == c.depth || rank >= c.ranks) return;
  const double step = c.log_probs[t.depth[node] * c.ranks + rank];
  // -inf is a token that is never chosen; the ranks behind it are -inf too.
  if (step >= -1.7976931348623157e308) t.next[node] = ordered(sum(t.weight[node], step));
}

KD_BOTH void plant(Tree& t, const Ranked& c) {
  t.weight[0] = 0.0;
  t.high[0] = t.low[0] = 0;
  t.parent[0] = -1;
  t.depth[0] = t.rank[0] = 0;
  t.first_child[0] = t.last_child[0] = t.next_sibling[0] = -1;
  t.count = 1;
  set_next(t, c, 0, 0);
}

// The tuple of the child at a node's cursor, one word of it.
KD_BOTH uint64_t next_word(const Tree& t, int node, int word) {
  const int depth = t.depth[node];
  const uint64_t digit = static_cast<uint64_t>(t.cursor[node] + 1) << 7 * (7 - depth % 8);
  return (word == 0 ? t.high[node] : t.low[node]) | (depth / 8 == word ? digit : 0);
}

// Whether the next child of `a` comes before that of `b`; both have one.
KD_BOTH bool comes_before(const Tree& t, int a, int b) {
  if (t.next[a] != t.next[b]) return t.next[a] > t.next[b];
  const uint64_t high_a = next_word(t, a, 0), high_b = next_word(t, b, 0);
  if (high_a != high_b) return high_a < high_b;
  return next_word(t, a, 1) < next_word(t, b, 1);
}

// Of every `lanes`-th node from `lane` on, the one whose next child comes first; -1 where none has one.
KD_BOTH int best_of_lane(const Tree& t, int lane, int lanes) {
  int best = -1;
  for (int node = lane; node < t.count; node += lanes)
    if (t.next[node] != 0 && (best < 0 || comes_before(t, node, best))) best = node;
  return best;
}

// The child of `from` at `rank`, its cursor, becomes `node`. `advance` moves the cursor: the two write
// different places, and neither reads what the other writes.
KD_BOTH void emit(Tree& t, const Ranked& c, int from, int rank, int node) {
  const int depth = t.depth[from];
  const uint64_t digit = static_cast<uint64_t>(rank + 1) << 7 * (7 - depth % 8);
  t.weight[node] = sum(t.weight[from], c.log_probs[depth * c.ranks + rank]);
  t.high[node] = t.high[from] | (depth < 8 ? digit : 0);
  t.low[node] = t.low[from] | (depth < 8 ? 0 : digit);
  t.parent[node] = static_cast<int16_t>(from);
  t.depth[node] = static_cast<int16_t>(depth + 1);
  t.rank[node] = static_cast<int16_t>(rank);
  t.first_child[node] = t.last_child[node] = t.next_sibling[node] = -1;
  if (rank == 0)
    t.first_child[from] = static_cast<int16_t>(node);
  else
    t.next_sibling[t.last_child[from]] = static_cast<int16_t>(node);
  t.last_child[from] = static_cast<int16_t>(node);
  t.count = node + 1;
  set_next(t, c, node, 0);
}

KD_BOTH void advance(Tree& t, const Ranked& c, int from, int rank) { set_next(t, c, from, rank + 1); }

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

// Thread by thread: who sees whom, by walking up. Padding sees itself alone.
KD_BOTH void mark_seen(Tree& t, int nodes, int thread, int threads) {
  for (int node = thread; node < nodes; node += threads) {
    uint64_t words[kMaskWords] = {0, 0, 0};
    words[node / 64] = uint64_t{1} << node % 64;
    if (node < t.count)
      for (int above = t.parent[node]; above >= 0; above = t.parent[above])
        words[above / 64] |= uint64_t{1} << above % 64;
    for (int word = 0; word < kMaskWords; ++word) t.seen[node][word] = words[word];
  }
}

// Where request `request`'s part of SGLang's full mask begins: N * (its prefix + N) bytes for each before.
KD_BOTH int64_t full_mask_begin(const int64_t* prefix_lengths, int request, int nodes) {
  int64_t columns = static_cast<int64_t>(request) * nodes;
  for (int before = 0; before < request; ++before) columns += prefix_lengths[before];
  return columns * nodes;
}

// Thread by thread: everything that a request has, once mark_seen is done. `tokens` is [depth][ranks].
KD_BOTH void write_tree(const Tree& t, const Ranked& c, const int64_t* tokens, int64_t root, int64_t prefix,
                        int64_t full_begin, int request, const TreeOutputs& out, int thread, int threads) {
  const int nodes = out.nodes, words = (nodes + 63) / 64;
  const int64_t first = static_cast<int64_t>(request) * nodes;
  for (int node = thread; node < nodes; node += threads) {
    const bool real = node < t.count;
    const int depth = real ? t.depth[node] : 0;
    const int64_t at = first + node;
    out.tokens[at] = depth > 0 ? tokens[(depth - 1) * c.ranks + t.rank[node]] : root;
    out.parents[at] = real ? t.parent[node] : -1;
    out.depths[at] = depth;
    out.positions[at] = prefix + depth;
    out.log_weights[at] = real ? t.weight[node] : -INFINITY;
    out.retrieve_index[at] = at;
    out.retrieve_next_token[at] = real ? t.first_child[node] : -1;
    out.retrieve_next_sibling[at] = real ? t.next_sibling[node] : -1;
    for (int word = 0; word < words; ++word)
      out.packed_mask[at * words + word] = static_cast<int64_t>(t.seen[node][word]);
  }
  if (thread == 0) out.counts[request] = t.count;
  for (int item = thread; item < nodes * nodes; item += threads) {
    const int node = item / nodes, other = item % nodes;
    const uint8_t bit = t.seen[node][other / 64] >> other % 64 & 1;
    out.draft_mask[first * nodes + item] = bit;
    if (out.full_mask != nullptr) out.full_mask[full_begin + node * (prefix + nodes) + prefix + other] = bit;
  }
}

}  // namespace kdtree
