// The launchers of csrc_trees as C functions, for a test: tensors are pointers of this machine.
#include "kernels.h"

using namespace kdtree;

extern "C" {

void set_order(unsigned seed) { simt::order.seed(seed); }

void build_trees(const void* scores, int type, int64_t batch_stride, int64_t depth_stride, int batch, int depth,
                 int columns, int ranks, int from_logits, const int64_t* token_ids, const int64_t* root_tokens,
                 const int64_t* prefix_lengths, const TreeOutputs* out) {
  BuildParams p = {};
  p.scores = scores;
  p.type = static_cast<ScoreType>(type);
  p.batch_stride = batch_stride;
  p.depth_stride = depth_stride;
  p.batch = batch;
  p.depth = depth;
  p.columns = columns;
  p.chunks = (columns + kChunkColumns - 1) / kChunkColumns;
  p.ranks = ranks;
  p.from_logits = from_logits;
  p.token_ids = token_ids;
  p.root_tokens = root_tokens;
  p.prefix_lengths = prefix_lengths;
  const size_t rows = static_cast<size_t>(batch) * depth;
  std::vector<uint64_t> keys(rows * p.chunks * ranks, 7), sums(rows * p.chunks, 7);
  std::vector<float> tops(rows * p.chunks, 7);
  std::vector<double> log_probs(rows * ranks, 7);
  std::vector<int64_t> candidates(rows * ranks, 7);
  p.keys = keys.data();
  p.sums = sums.data();
  p.tops = tops.data();
  p.log_probs = log_probs.data();
  p.candidates = candidates.data();
  p.out = *out;
  launch_build(p, nullptr);
}

void accept(const int64_t* tokens, const int64_t* parents, const int64_t* targets, int64_t* path, int64_t* counts,
            int64_t* bonus, int batch, int nodes, int steps) {
  launch_accept({tokens, parents, targets, path, counts, bonus, batch, nodes, steps}, nullptr);
}

void sample(const float* probs, const float* draws, int64_t* tokens, int rows, int columns) {
  launch_sample({probs, draws, tokens, rows, columns}, nullptr);
}

void compact(char* const* pools, int layers, int64_t row_bytes, const int64_t* path, const int64_t* counts,
             const int64_t* windows, int batch, int steps, int nodes) {
  CompactParams p = {};
  std::copy(pools, pools + layers, p.pools);
  p.layers = layers;
  p.row_bytes = row_bytes;
  p.path = path;
  p.counts = counts;
  p.windows = windows;
  p.batch = batch;
  p.steps = steps;
  p.nodes = nodes;
  launch_compact(p, nullptr);
}

void fill_indices(const int32_t* req_to_token, const void* requests, int requests_wide, const void* lengths,
                  int lengths_wide, int32_t* kv_indptr, int64_t* kv_indices, int64_t rows, int64_t width, int64_t room,
                  int batch) {
  launch_indices({req_to_token, requests, lengths, requests_wide != 0, lengths_wide != 0, kv_indptr, kv_indices, rows,
                  width, room, batch, 0},
                 nullptr);
}

}  // extern "C"
