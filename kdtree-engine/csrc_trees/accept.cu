// The walk: a token of the target for each node, by its draw, and which nodes carry what the target wants.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90,code=sm_90 -c accept.cu
#include "kernels.h"

namespace kdtree {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kLaneNodes = (kMaxNodes + 31) / 32;
constexpr int kSampleThreads = 512;
constexpr int kSectionColumns = 1024;
constexpr int kMaxSections = (1 << 18) / kSectionColumns;
constexpr int kThreadColumns = kSectionColumns / kSampleThreads;
static_assert(kMaxSections <= kSampleThreads, "a thread looks at one section");

// A warp for each request. At every step it looks at all nodes: the lowest one that is a child of where the
// walk stands and carries the target's token there.
__global__ void __launch_bounds__(32) accept_kernel(const __grid_constant__ AcceptParams p) {
  const int lane = threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * p.nodes;
  int64_t token[kLaneNodes];
  int parent[kLaneNodes];
#pragma unroll
  for (int i = 0; i < kLaneNodes; ++i) {
    const int node = lane + 32 * i;
    token[i] = node < p.nodes ? p.tokens[first + node] : 0;
    parent[i] = node < p.nodes ? static_cast<int>(p.parents[first + node]) : -1;
  }
  int64_t* path = p.path + static_cast<int64_t>(blockIdx.x) * p.steps;
  int here = 0, count = 1;
  int64_t target = p.targets[first];
  if (lane == 0) path[0] = 0;
  while (count < p.steps) {
    unsigned child = kAll;
#pragma unroll
    for (int i = kLaneNodes - 1; i >= 0; --i)
      if (parent[i] == here && token[i] == target) child = lane + 32 * i;
    child = __reduce_min_sync(kAll, child);
    if (child == kAll) break;
    here = static_cast<int>(child);
    target = p.targets[first + here];
    if (lane == 0) path[count] = here;
    ++count;
  }
  for (int step = count + lane; step < p.steps; step += 32) path[step] = -1;
  if (lane == 0) {
    p.counts[blockIdx.x] = count;
    p.bonus[blockIdx.x] = target;
  }
}

// The sum of the first `length` numbers. The loads do not wait for each other.
__device__ __forceinline__ uint64_t sum_of_first(const uint64_t* numbers, int length) {
  uint64_t total = 0;
#pragma unroll 8
  for (int i = 0; i < length; ++i) total += numbers[i];
  return total;
}

// A block for each row: sums of sections of 1,024 columns, the section that the draw falls into, then the
// column in it. Sums are integers, so it does not matter who adds what.
__global__ void __launch_bounds__(kSampleThreads) sample_kernel(const __grid_constant__ SampleParams p) {
  __shared__ uint64_t sums[kSampleThreads];
  __shared__ uint64_t reach, before_section;
  __shared__ int section, found;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const float* row = p.probs + static_cast<int64_t>(blockIdx.x) * p.columns;
  const int sections = (p.columns + kSectionColumns - 1) / kSectionColumns;
  for (int s = warp; s < sections; s += kSampleThreads / 32) {
    uint64_t total = 0;
#pragma unroll
    for (int i = 0; i < kSectionColumns / 32; ++i) {
      const int column = s * kSectionColumns + i * 32 + lane;
      total += column < p.columns ? weight_of(row[column]) : 0;
    }
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) total += __shfl_xor_sync(kAll, total, o);
    if (lane == 0) sums[s] = total;
  }
  if (thread == 0) section = found = -1;
  __syncthreads();

  uint64_t before = 0, own = 0;
  if (thread < sections) {
    before = sum_of_first(sums, thread);
    own = sums[thread];
    if (thread == sections - 1) reach = reach_of(p.draws[blockIdx.x], before + own);
  }
  __syncthreads();
  // At most one thread: where its numbers end, the next one's begin. None where all weights are 0.
  if (thread < sections && before <= reach && reach < before + own) {
    section = thread;
    before_section = before;
  }
  __syncthreads();

  if (section >= 0) {
    uint64_t weights[kThreadColumns];
    own = 0;
#pragma unroll
    for (int i = 0; i < kThreadColumns; ++i) {
      const int column = section * kSectionColumns + thread * kThreadColumns + i;
      weights[i] = column < p.columns ? weight_of(row[column]) : 0;
      own += weights[i];
    }
    sums[thread] = own;
    __syncthreads();
    before = before_section + sum_of_first(sums, thread);
#pragma unroll
    for (int i = 0; i < kThreadColumns; ++i) {
      if (before <= reach && reach < before + weights[i])
        found = section * kSectionColumns + thread * kThreadColumns + i;
      before += weights[i];
    }
  }
  __syncthreads();
  if (thread == 0) p.tokens[blockIdx.x] = found;
}

}  // namespace

cudaError_t launch_accept(const AcceptParams& p, cudaStream_t stream) {
  if (p.batch == 0) return cudaSuccess;
  accept_kernel<<<static_cast<unsigned>(p.batch), 32, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_sample(const SampleParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  sample_kernel<<<static_cast<unsigned>(p.rows), kSampleThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace kdtree
