// From scores to trees: the best candidates of each chunk, of each row, then a tree for each request.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90,code=sm_90 -c build.cu
//
// The decisions are in top_k.h and select.h; here are the loads, the warps and the barriers around them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels.h"

namespace kdtree {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kChunkThreads = 32 * kChunkWarps;
constexpr int kMergeThreads = 128;
constexpr int kSelectThreads = 128;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(kAll, x, o);
  return x;
}

// The largest key of a warp; 0 where no lane has one.
__device__ __forceinline__ uint64_t warp_max(uint64_t key) {
  const uint32_t high = __reduce_max_sync(kAll, static_cast<uint32_t>(key >> 32));
  const uint32_t low = __reduce_max_sync(kAll, key >> 32 == high ? static_cast<uint32_t>(key) : 0u);
  return uint64_t{high} << 32 | low;
}

// What is known of a row's candidates becomes their log-probabilities and tokens. keys: the row's best.
__device__ __forceinline__ void finish_row(const BuildParams& p, int row, const uint64_t* keys, float z,
                                           int thread) {
  if (thread >= p.ranks) return;
  const uint64_t key = keys[thread];
  double log_prob = -INFINITY;
  int64_t token = -1;
  if (key != 0) {
    log_prob = log_prob_of(key, z, p.from_logits);
    const int64_t column = column_of(key);
    token = p.token_ids == nullptr ? column : p.token_ids[static_cast<int64_t>(row) * p.columns + column];
  }
  const int64_t at = static_cast<int64_t>(row) * p.ranks + thread;
  p.log_probs[at] = log_prob;
  p.candidates[at] = token;
}

// A block: the best `ranks` of 4,096 columns of a row, and from logits their sum of exponentials.
template <typename T>
__global__ void __launch_bounds__(kChunkThreads) chunk_kernel(const __grid_constant__ BuildParams p) {
  __shared__ uint64_t lists[kChunkWarps * kMaxRanks];
  __shared__ uint64_t joined[kMaxRanks];
  __shared__ uint32_t warp_tops[kChunkWarps];
  __shared__ uint64_t warp_sums[kChunkWarps];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int row = blockIdx.x / p.chunks, chunk = blockIdx.x % p.chunks;
  const T* scores = static_cast<const T*>(p.scores) + row / p.depth * p.batch_stride + row % p.depth * p.depth_stride;
  const int first = chunk * kChunkColumns + warp * kWarpColumns;  // of the warp's columns

  float loaded[kLaneColumns];
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    const int column = first + i * 32 + lane;
    loaded[i] = column < p.columns ? to_float(scores[column]) : -INFINITY;
  }
  LaneScores mine;
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i)
    mine.order[i] = is_candidate(loaded[i], p.from_logits) ? ordered(loaded[i]) : 0;
  mine.find_best();

  float top = -INFINITY;
  if (p.from_logits) {
    const uint32_t warp_top = __reduce_max_sync(kAll, mine.best);
    if (lane == 0) warp_tops[warp] = warp_top;
    __syncthreads();
    uint32_t order = 0;
#pragma unroll
    for (int w = 0; w < kChunkWarps; ++w) order = max(order, warp_tops[w]);
    if (order != 0) top = value_of(order);
    uint64_t total = 0;
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i)
      if (mine.order[i] != 0) total += fixed_exp(sum(value_of(mine.order[i]), -top));
    total = warp_sum(total);
    if (lane == 0) warp_sums[warp] = total;
  }

  // The warp's best, one after the other: the largest score, then the lowest column that has it.
  for (int rank = 0; rank < p.ranks; ++rank) {
    const uint32_t best = __reduce_max_sync(kAll, mine.best);
    const uint32_t own = mine.best == best ? mine.column(lane) : 0xffffffffu;
    const uint32_t column = __reduce_min_sync(kAll, own);
    if (lane == 0) lists[warp * kMaxRanks + rank] = best == 0 ? 0 : key_of(best, first + column);
    if (best != 0 && own == column) mine.take_best();
  }
  if (thread < kMaxRanks) joined[thread] = 0;
  __syncthreads();

  for (int item = thread; item < kChunkWarps * p.ranks; item += kChunkThreads)
    join(lists, kChunkWarps, p.ranks, item, joined);
  __syncthreads();

  uint64_t total = 0;
  if (p.from_logits) {
#pragma unroll
    for (int w = 0; w < kChunkWarps; ++w) total += warp_sums[w];
  }
  if (p.chunks == 1) {
    finish_row(p, row, joined, normaliser(top, total), thread);
    return;
  }
  if (thread < p.ranks) p.keys[static_cast<int64_t>(blockIdx.x) * p.ranks + thread] = joined[thread];
  if (thread == 0) {
    p.tops[blockIdx.x] = top;
    p.sums[blockIdx.x] = total;
  }
}

// A block: the best `ranks` of a row's chunks by one warp, the row's normaliser by another.
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ BuildParams p) {
  __shared__ uint64_t keys[kMaxChunks * kMaxRanks];
  __shared__ uint64_t merged[kMaxRanks];
  __shared__ float normal;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int64_t row = blockIdx.x;
  const int many = p.chunks * p.ranks;
  for (int i = thread; i < many; i += kMergeThreads) keys[i] = p.keys[row * many + i];
  __syncthreads();

  if (warp == 0) {
    LaneHeads heads;
    heads.start(keys, p.chunks, p.ranks, lane);
    for (int rank = 0; rank < p.ranks; ++rank) {
      const uint64_t key = warp_max(heads.best());
      if (lane == 0) merged[rank] = key;
      heads.take(key);
    }
  } else if (warp == 1) {
    float top = -INFINITY;
    uint64_t total = 0;
    if (p.from_logits) {
      const float* tops = p.tops + row * p.chunks;
      for (int chunk = lane; chunk < p.chunks; chunk += 32) top = fmaxf(top, tops[chunk]);
#pragma unroll
      for (int o = 16; o > 0; o >>= 1) top = fmaxf(top, __shfl_xor_sync(kAll, top, o));
      for (int chunk = lane; chunk < p.chunks; chunk += 32)
        total += scaled(p.sums[row * p.chunks + chunk], fixed_exp(sum(tops[chunk], -top)));
      total = warp_sum(total);
    }
    if (lane == 0) normal = normaliser(top, total);
  }
  __syncthreads();
  finish_row(p, static_cast<int>(row), merged, normal, thread);
}

// A block: one request's tree. One warp grows it, then all threads write it out.
__global__ void __launch_bounds__(kSelectThreads) select_kernel(const __grid_constant__ BuildParams p) {
  __shared__ Tree tree;
  __shared__ double log_probs[kMaxDepth * kMaxRanks];
  __shared__ int64_t full_begin;
  const int thread = threadIdx.x, lane = thread % 32;
  const int request = blockIdx.x;
  const int many = p.depth * p.ranks;
  const int64_t first = static_cast<int64_t>(request) * many;
  const Ranked ranked = {log_probs, p.depth, p.ranks};
  for (int i = thread; i < many; i += kSelectThreads) log_probs[i] = p.log_probs[first + i];
  if (thread == kSelectThreads - 1 && p.out.full_mask != nullptr)
    full_begin = full_mask_begin(p.prefix_lengths, request, p.out.nodes);
  __syncthreads();

  if (thread < 32) {
    if (lane == 0) plant(tree, ranked);
    __syncwarp();
    for (int node = 1; node < p.out.nodes; ++node) {
      const int mine = best_of_lane(tree, lane, 32);
      const uint64_t key = mine < 0 ? 0 : tree.next[mine];
      const uint64_t best = warp_max(key);
      if (best == 0) break;  // the tree has run out
      // Lanes whose weight is the largest, decided by their tuples.
      unsigned tied = __ballot_sync(kAll, key == best);
      int from = __shfl_sync(kAll, mine, __ffs(static_cast<int>(tied)) - 1);
      for (tied &= tied - 1; tied != 0; tied &= tied - 1) {
        const int other = __shfl_sync(kAll, mine, __ffs(static_cast<int>(tied)) - 1);
        if (comes_before(tree, other, from)) from = other;
      }
      const int rank = tree.cursor[from];
      __syncwarp();  // every lane has read what is written now
      if (lane == 0) emit(tree, ranked, from, rank, node);
      if (lane == 1) advance(tree, ranked, from, rank);
      __syncwarp();
    }
  }
  __syncthreads();
  mark_seen(tree, p.out.nodes, thread, kSelectThreads);
  __syncthreads();
  const int64_t root = p.root_tokens == nullptr ? -1 : p.root_tokens[request];
  write_tree(tree, ranked, p.candidates + first, root, p.prefix_lengths[request],
             p.out.full_mask == nullptr ? 0 : full_begin, request, p.out, thread, kSelectThreads);
}

}  // namespace

cudaError_t launch_build(const BuildParams& p, cudaStream_t stream) {
  if (p.batch == 0) return cudaSuccess;
  const unsigned rows = static_cast<unsigned>(p.batch) * p.depth;
  const unsigned blocks = rows * p.chunks;
  switch (p.type) {
    case ScoreType::kFloat32:
      chunk_kernel<float><<<blocks, kChunkThreads, 0, stream>>>(p);
      break;
    case ScoreType::kBfloat16:
      chunk_kernel<__nv_bfloat16><<<blocks, kChunkThreads, 0, stream>>>(p);
      break;
    case ScoreType::kFloat16:
      chunk_kernel<__half><<<blocks, kChunkThreads, 0, stream>>>(p);
      break;
  }
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess && p.chunks > 1) {
    merge_kernel<<<rows, kMergeThreads, 0, stream>>>(p);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) {
    select_kernel<<<static_cast<unsigned>(p.batch), kSelectThreads, 0, stream>>>(p);
    error = cudaGetLastError();
  }
  return error;
}

}  // namespace kdtree
