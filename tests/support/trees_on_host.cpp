// The headers of csrc_trees under g++: blocks, warps and lanes are loops, all else is the kernels' own code.
//
//   g++ -O2 -std=c++17 -ffp-contract=off -shared -fPIC -I kdtree-engine/csrc_trees trees_on_host.cpp
#include <algorithm>
#include <memory>
#include <vector>

#include "select.h"

using namespace kdtree;

namespace {

constexpr int kThreads = 512;  // of the block that selects

// The warp of select_kernel, lane by lane.
template <int kSlots>
void grow_tree(Tree& tree, int nodes) {
  Frontier<kSlots> lanes[32];
  for (int lane = 0; lane < 32; ++lane) lanes[lane].plant(tree.steps[0][0], lane);
  int& node = tree.count;
  for (node = 1; node < nodes; ++node) {
    uint32_t high = 0xffffffffu, low = high, child = high;
    for (const auto& one : lanes) high = std::min(high, one.least_high());
    if (high == kInfiniteHigh) break;
    for (const auto& one : lanes) low = std::min(low, one.least_low(high));
    for (const auto& one : lanes) child = std::min(child, one.first_child(high, low));
    tree.cost[node] = bits_as<double>(uint64_t{high} << 32 | low);
    tree.origin[node] = child;
    const auto step = [&](uint32_t bytes) { return tree.steps[bytes / 8 / kCostStride][bytes / 8 % kCostStride]; };
    for (int lane = 0; lane < 32; ++lane)
      lanes[lane].grow(lane, child, tree.cost[node], node, step(first_below(child)), step(step_of(child + kNextRank)));
  }
}

}  // namespace

extern "C" {

void exponentials(const float* x, int count, int64_t* found) {
  for (int i = 0; i < count; ++i) found[i] = static_cast<int64_t>(fixed_exp(x[i]));
}

// The sum of terms, 8 at a time.
void exponential_sums(const float* x, int count, int64_t* found) {
  for (int first = 0; first < count; first += 8) {
    ExpSum sum;
    for (int i = first; i < std::min(count, first + 8); ++i) sum.add(x[i]);
    found[first / 8] = static_cast<int64_t>(of_units(sum.coarse_units(), sum.fine_units()));
  }
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
      std::vector<uint64_t> found;
      for (int column = first; column < end; ++column) {
        if (is_candidate(row[column], true)) tops[chunk] = std::max(tops[chunk], value_of(ordered(row[column])));
        if (is_candidate(row[column], from_logits)) found.push_back(key_of(ordered(row[column]), column));
      }
      for (int run = first; run < end && std::isfinite(tops[chunk]); run += kRun) {
        ExpSum terms;
        for (int column = run; column < std::min(end, run + kRun); ++column)
          if (row[column] < INFINITY) terms.add(sum(row[column], -tops[chunk]));
        sums[chunk] += of_units(terms.coarse_units(), terms.fine_units());
      }
      std::sort(found.rbegin(), found.rend());
      for (int place = 0; place < std::min<int>(ranks, found.size()); ++place)
        keys[chunk * ranks + keys_above(found.data(), found.size(), found[place])] = found[place];
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
    const auto made = std::make_unique<Tree>();  // zeros
    Tree& tree = *made;
    for (int row = 0; row <= depth; ++row)
      for (int rank = 0; rank <= ranks; ++rank)
        tree.steps[row][rank] =
            row < depth && rank < ranks ? cost_of(log_probs[first + row * ranks + rank]) : INFINITY;
    std::copy(tokens + first, tokens + first + depth * ranks, tree.tokens);
    if (out->nodes <= 65)
      grow_tree<2>(tree, out->nodes);
    else
      grow_tree<4>(tree, out->nodes);
    for (int thread = 0; thread < kThreads; ++thread) link_nodes(tree, out->nodes, thread, kThreads);
    const int64_t begin = full_mask_begin(prefixes, request, out->nodes);
    for (int thread = 0; thread < kThreads; ++thread)
      write_tree(tree, ranks, roots[request], prefixes[request], begin, request, *out, thread, kThreads);
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
