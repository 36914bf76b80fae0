// What the units of csrc_trees offer each other: parameters by value, and a launcher for each operation.
// Each launcher returns the first error of its launches; none allocates, waits or reads from the device.
#pragma once

#include <cuda_runtime.h>

#include "select.h"

namespace kdtree {

enum class ScoreType : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

struct BuildParams {
  const void* scores;  // [batch][depth][columns]; strides in elements, that of the columns is 1
  ScoreType type;
  int64_t batch_stride, depth_stride;
  int batch, depth, columns;
  int chunks;  // ceil(columns / kChunkColumns)
  int ranks;   // candidates of a position that may be chosen: at most kMaxRanks and `columns`
  int from_logits;
  const int64_t* token_ids;       // [batch][depth][columns], or null: a column's number
  const int64_t* root_tokens;     // [batch], or null: -1
  const int64_t* prefix_lengths;  // [batch]

  // Workspace; written before it is read, in every call.
  uint64_t* keys;       // [batch * depth][chunks][ranks], each falling, 0 behind the last
  float* tops;          // [batch * depth][chunks] largest logit, -inf where there is none
  uint64_t* sums;       // [batch * depth][chunks] sums of exponentials, in units of 2^-40
  double* log_probs;    // [batch * depth][ranks]
  int64_t* candidates;  // [batch * depth][ranks] tokens

  TreeOutputs out;
};

struct AcceptParams {
  const int64_t *tokens, *parents, *targets;  // [batch][nodes]
  int64_t* path;                              // [batch][steps]
  int64_t *counts, *bonus;                    // [batch]
  int batch, nodes, steps;
};

struct SampleParams {
  const float* probs;  // [rows][columns]
  const float* draws;  // [rows]
  int64_t* tokens;     // [rows]
  int rows, columns;
};

constexpr int kMaxLayers = 256;

struct CompactParams {
  char* pools[kMaxLayers];
  int layers;
  int64_t row_bytes;       // a multiple of 16
  const int64_t* path;     // [batch][steps]
  const int64_t* counts;   // [batch]
  const int64_t* windows;  // [batch][nodes]
  int batch, steps, nodes;
};

struct IndexParams {
  const int32_t* req_to_token;  // [rows][width]
  const void *requests, *lengths;  // [batch], int64 where wide, else int32
  bool requests_wide, lengths_wide;
  int32_t* kv_indptr;   // [batch + 1]
  int64_t* kv_indices;  // [room]
  int64_t rows, width, room;
  int batch;
  int blocks;  // of a request; the launcher's
};

cudaError_t launch_build(const BuildParams& p, cudaStream_t stream);
cudaError_t launch_accept(const AcceptParams& p, cudaStream_t stream);
cudaError_t launch_sample(const SampleParams& p, cudaStream_t stream);
cudaError_t launch_compact(const CompactParams& p, cudaStream_t stream);
cudaError_t launch_indices(const IndexParams& p, cudaStream_t stream);

}  // namespace kdtree
