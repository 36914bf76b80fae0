// The headers of csrc_trees under g++: blocks, warps and lanes are loops, all else is the kernels' own code.
//
//   g++ -O2 -std=c++17 -ffp-contract=off -shared -fPIC -I kdtree-engine/csrc_trees trees_on_host.cpp
#include <algorithm>
#include <vector>

#include "select.h"

using namespace kdtree;

namespace {

constexpr int kThreads = 128;  // of the block that selects

// The best of one warp's columns, as chunk_kernel takes them; zeros behind the last.
void best_of_warp(const float* row, int columns, int first, bool from_logits, int ranks, uint64_t* list) {
  LaneScores lanes[32];
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < kLaneColumns; ++i) {
      const int column = first + i * 32 + lane;
      const float x = column < columns ? row[column] : -INFINITY;
      lanes[lane].order[i] = is_candidate(x, from_logits) ? ordered(x) : 0;
    }
    lanes[lane].find_best();
  }
  for (int rank = 0; rank < ranks; ++rank) {
    uint32_t best = 0, column = 0xffffffffu;
    for (const LaneScores& one : lanes) best = std::max(best, one.best);
    for (int lane = 0; lane < 32; ++lane)
      if (lanes[lane].best == best) column = std::min(column, lanes[lane].column(lane));
    list[rank] = best == 0 ? 0 : key_of(best, first + column);
    for (int lane = 0; lane < 32; ++lane)
      if (best != 0 && lanes[lane].best == best && lanes[lane].column(lane) == column) lanes[lane].take_best();
  }
}

}  // namespace

extern "C" {

void exponentials(const float* x, int count, int64_t* found) {
  for (int i = 0; i < count; ++i) found[i] = static_cast<int64_t>(fixed_exp(x[i]));
}

// chunk_kernel and merge_kernel: scores [rows][columns] to log-probabilities and columns [rows][ranks].
void candidates(const float* scores, int rows, int columns, int ranks, int from_logits, double* log_probs,
                int64_t* tokens, float* normalisers) {
  const int chunks = (columns + kChunkColumns - 1) / kChunkColumns;
  for (int r = 0; r < rows; ++r) {
    const float* row = scores + static_cast<int64_t>(r) * columns;
    std::vector<uint64_t> keys(kMaxChunks * kMaxRanks);
    std::vector<float> tops(chunks, -INFINITY);
    std::vector<uint64_t> sums(chunks);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int first = chunk * kChunkColumns, end = std::min(columns, first + kChunkColumns);
      for (int column = first; column < end; ++column)
        if (is_candidate(row[column], true)) tops[chunk] = std::max(tops[chunk], value_of(ordered(row[column])));
      for (int column = first; column < end; ++column)
        if (is_candidate(row[column], true))
          sums[chunk] += fixed_exp(sum(value_of(ordered(row[column])), -tops[chunk]));
      std::vector<uint64_t> lists(kChunkWarps * kMaxRanks), joined(kMaxRanks);
      for (int warp = 0; warp < kChunkWarps; ++warp)
        best_of_warp(row, columns, first + warp * kWarpColumns, from_logits, ranks, &lists[warp * kMaxRanks]);
      for (int item = 0; item < kChunkWarps * ranks; ++item)
        join(lists.data(), kChunkWarps, ranks, item, joined.data());
      std::copy(joined.begin(), joined.begin() + ranks, keys.begin() + chunk * ranks);
    }
    const float top = *std::max_element(tops.begin(), tops.end());
    uint64_t total = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) total += scaled(sums[chunk], fixed_exp(sum(tops[chunk], -top)));
    normalisers[r] = normaliser(top, total);
    LaneHeads heads[32];
    for (int lane = 0; lane < 32; ++lane) heads[lane].start(keys.data(), chunks, ranks, lane);
    for (int rank = 0; rank < ranks; ++rank) {
      uint64_t key = 0;
      for (const LaneHeads& one : heads) key = std::max(key, one.best());
      for (LaneHeads& one : heads) one.take(key);
      log_probs[r * ranks + rank] = key == 0 ? -INFINITY : log_prob_of(key, normalisers[r], from_logits);
      tokens[r * ranks + rank] = key == 0 ? -1 : static_cast<int64_t>(column_of(key));
    }
  }
}

// select_kernel, for each request of a batch.
void grow(const double* log_probs, const int64_t* tokens, int batch, int depth, int ranks, const int64_t* roots,
            const int64_t* prefixes, const TreeOutputs* out) {
  for (int request = 0; request < batch; ++request) {
    const int64_t first = static_cast<int64_t>(request) * depth * ranks;
    const Ranked ranked = {log_probs + first, depth, ranks};
    Tree tree;
    plant(tree, ranked);
    for (int node = 1; node < out->nodes; ++node) {
      int from = -1;
      for (int lane = 0; lane < 32; ++lane) {
        const int mine = best_of_lane(tree, lane, 32);
        if (mine >= 0 && (from < 0 || comes_before(tree, mine, from))) from = mine;
      }
      if (from < 0) break;
      const int rank = tree.cursor[from];
      emit(tree, ranked, from, rank, node);
      advance(tree, ranked, from, rank);
    }
    for (int thread = 0; thread < kThreads; ++thread) mark_seen(tree, out->nodes, thread, kThreads);
    const int64_t begin = full_mask_begin(prefixes, request, out->nodes);
    for (int thread = 0; thread < kThreads; ++thread)
      write_tree(tree, ranked, tokens + first, roots[request], prefixes[request], begin, request, *out, thread,
                 kThreads);
  }
}

int64_t full_mask_offset(const int64_t* prefixes, int request, int nodes) {
  return full_mask_begin(prefixes, request, nodes);
}

// sample_kernel, without its sections: weights and where a draw falls.
void sample(const float* probs, const float* draws, int rows, int columns, int64_t* tokens) {
  for (int r = 0; r < rows; ++r) {
    const float* row = probs + static_cast<int64_t>(r) * columns;
    uint64_t total = 0, below = 0;
    for (int column = 0; column < columns; ++column) total += weight_of(row[column]);
    const uint64_t reach = reach_of(draws[r], total);
    tokens[r] = -1;
    for (int column = 0; column < columns && tokens[r] < 0; ++column) {
      below += weight_of(row[column]);
      if (below > reach) tokens[r] = column;
    }
  }
}

}  // extern "C"
