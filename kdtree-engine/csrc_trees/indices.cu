// The slots of a batch's requests, one after the other, and where each request's begin.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90,code=sm_90 -c indices.cu
#include "kernels.h"

namespace kdtree {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;         // slots that a thread has in flight
constexpr int kBlocksWanted = 512;  // about two for each processor of the parts that this is made for

__device__ __forceinline__ int64_t integer(const void* values, bool wide, int64_t at) {
  return wide ? static_cast<const int64_t*>(values)[at] : static_cast<const int32_t*>(values)[at];
}

// What is read of a request: its table row's first slots, and none where there is no such row.
__device__ __forceinline__ int64_t length_of(const IndexParams& p, int request) {
  const int64_t length = integer(p.lengths, p.lengths_wide, request);
  return length < 0 ? 0 : length < p.width ? length : p.width;
}

// blockIdx.y is the request, whose slots the blocks along x share. Each block adds up the lengths before its
// request itself: at most a few thousand integers, in cache, and no second launch waits for the first.
__global__ void __launch_bounds__(kThreads) indices_kernel(const __grid_constant__ IndexParams p) {
  __shared__ int64_t before[kThreads / 32];
  const int thread = threadIdx.x;
  const int request = blockIdx.y;
  int64_t mine = 0;  // many requests of a long prefix have more than 2^31 slots, and none lies before the list
  for (int other = thread; other < request; other += kThreads) mine += length_of(p, other);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, lanes);
  if (thread % 32 == 0) before[thread / 32] = mine;
  __syncthreads();
  int64_t begin = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) begin += before[warp];

  const int64_t length = length_of(p, request);
  if (blockIdx.x == 0 && thread == 0) {
    p.kv_indptr[request + 1] = static_cast<int32_t>(begin + length);
    if (request == 0) p.kv_indptr[0] = 0;
  }
  const int64_t row = integer(p.requests, p.requests_wide, request);
  if (row < 0 || row >= p.rows) return;
  const int32_t* slots = p.req_to_token + row * p.width;
  const int64_t room = p.room - begin;
  const int64_t end = length < room ? length : room;
  const int64_t step = static_cast<int64_t>(p.blocks) * kThreads * kAtOnce;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kAtOnce + thread; first < end; first += step) {
    int32_t found[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = first + i * kThreads;
      if (at < end) found[i] = slots[at];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = first + i * kThreads;
      if (at < end) p.kv_indices[begin + at] = found[i];
    }
  }
}

}  // namespace

cudaError_t launch_indices(const IndexParams& given, cudaStream_t stream) {
  if (given.batch == 0) return cudaSuccess;
  IndexParams p = given;
  const int64_t useful = (p.width + kThreads * kAtOnce - 1) / (kThreads * kAtOnce);
  const int64_t share = (kBlocksWanted + p.batch - 1) / p.batch;
  p.blocks = static_cast<int>(useful < share ? useful : share);
  const dim3 grid(static_cast<unsigned>(p.blocks), static_cast<unsigned>(p.batch));
  indices_kernel<<<grid, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace kdtree
