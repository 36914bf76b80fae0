// Compaction: the accepted path's rows to the front of each window, in all layers at once.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90,code=sm_90 -c compact.cu
#include "kernels.h"

namespace kdtree {
namespace {

constexpr int kThreads = 96;  // a latent row of 1,152 bytes is 72 vectors
constexpr int kMovesAtOnce = 16;

// A block for each layer and request. A thread owns 16-byte columns of all rows: it reads up to 16 rows, then
// writes them, as a destination may be another move's source. Turns of 16 are safe one after the other, since
// no destination is the source of a later move: node numbers rise along a path.
__global__ void __launch_bounds__(kThreads) compact_kernel(const __grid_constant__ CompactParams p) {
  __shared__ int64_t source[kMovesAtOnce], destination[kMovesAtOnce];
  const int thread = threadIdx.x;
  const int request = blockIdx.y;
  char* pool = p.pools[blockIdx.x];
  const int64_t* path = p.path + static_cast<int64_t>(request) * p.steps;
  const int64_t* window = p.windows + static_cast<int64_t>(request) * p.nodes;
  const int64_t said = p.counts[request];
  const int count = said < p.steps ? static_cast<int>(said) : p.steps;
  for (int first = 1; first < count; first += kMovesAtOnce) {
    __syncthreads();  // the last turn's readers are done
    if (thread < kMovesAtOnce) {
      const int place = first + thread;
      const int64_t node = place < count ? path[place] : place;
      // -1: the row stays where it is, or there is none.
      const bool moves = node > place && node < p.nodes;
      source[thread] = moves ? window[node] : -1;
      destination[thread] = moves ? window[place] : -1;
    }
    __syncthreads();
    for (int64_t at = thread * 16; at < p.row_bytes; at += kThreads * 16) {
      uint4 rows[kMovesAtOnce];
#pragma unroll
      for (int i = 0; i < kMovesAtOnce; ++i)
        if (source[i] >= 0) rows[i] = *reinterpret_cast<const uint4*>(pool + source[i] * p.row_bytes + at);
#pragma unroll
      for (int i = 0; i < kMovesAtOnce; ++i)
        if (source[i] >= 0) *reinterpret_cast<uint4*>(pool + destination[i] * p.row_bytes + at) = rows[i];
    }
  }
}

}  // namespace

cudaError_t launch_compact(const CompactParams& p, cudaStream_t stream) {
  if (p.batch == 0) return cudaSuccess;
  compact_kernel<<<dim3(static_cast<unsigned>(p.layers), static_cast<unsigned>(p.batch)), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace kdtree
