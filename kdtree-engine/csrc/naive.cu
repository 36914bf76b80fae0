// The GPU oracle: tree-verify attention with nothing clever in it. One thread block a (token, head).
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90,code=sm_90 -c naive.cu
//
// Reads the same params struct through the same views as the fast kernel; shares no arithmetic with it.
#include <cmath>

#include "kernels.h"
#include "ptx.cuh"
#include "views.cuh"

namespace kdtree {
namespace {

template <typename T>
__global__ void __launch_bounds__(kThreads) naive_kernel(const __grid_constant__ TreeVerifyParams p) {
  __shared__ float q[kQkDim];
  __shared__ float prob[kThreads];
  __shared__ int slots[kThreads];
  __shared__ float reduce[kThreads];
  const int tid = threadIdx.x;
  const int64_t row = blockIdx.x, token = row / p.heads;

  int b = 0;
  while (b < p.batch && p.qo_indptr[b + 1] <= token) ++b;
  T* out = static_cast<T*>(p.out) + row * kVDim;
  Piece piece{};
  piece.request = b;
  int t = 0;
  if (b < p.batch) {
    piece.token = p.qo_indptr[b];
    piece.nodes = min(p.qo_indptr[b + 1] - p.qo_indptr[b], p.max_nodes);
    piece.prefix = p.kv_indptr[b + 1] - p.kv_indptr[b];
    t = static_cast<int>(token - piece.token);
  }
  if (b == p.batch || t >= piece.nodes) {  // padding
    out[tid] = out[tid + kThreads] = from_float<T>(0.0f);
    if (tid == 0 && p.lse != nullptr) p.lse[row] = -INFINITY;
    return;
  }

  for (int d = tid; d < kQkDim; d += kThreads) q[d] = to_float(static_cast<const T*>(p.q)[row * kQkDim + d]);
  const KvView kv(p, piece);
  const MaskView mask(p, b, piece.prefix, piece.nodes);
  const int tokens = piece.prefix + piece.nodes;
  float top = -INFINITY, sum = 0.0f, o0 = 0.0f, o1 = 0.0f;

  for (int j0 = 0; j0 < tokens; j0 += kThreads) {
    __syncthreads();
    const int j = j0 + tid;
    float score = -INFINITY;
    if (j < tokens) {
      slots[tid] = kv.slot(j, __ldg(kv.at(j)));
      if (j < piece.prefix || mask.sees(t, j - piece.prefix)) {
        const T* k = reinterpret_cast<const T*>(kv.row(slots[tid]));
        float dot = 0.0f;
        for (int d = 0; d < kQkDim; ++d) dot += q[d] * to_float(k[d]);
        score = dot * p.sm_scale;
      }
    }
    reduce[tid] = score;
    __syncthreads();
    float block_top = top;
    for (int i = 0; i < kThreads; ++i) block_top = fmaxf(block_top, reduce[i]);
    prob[tid] = score == -INFINITY ? 0.0f : expf(score - block_top);
    __syncthreads();
    const float factor = top == -INFINITY ? 0.0f : expf(top - block_top);
    sum *= factor;
    o0 *= factor;
    o1 *= factor;
    top = block_top;
    for (int i = 0; i < min(kThreads, tokens - j0); ++i) {
      if (prob[i] == 0.0f) continue;
      const T* v = reinterpret_cast<const T*>(kv.row(slots[i]));
      sum += prob[i];
      o0 += prob[i] * to_float(v[tid]);
      o1 += prob[i] * to_float(v[tid + kThreads]);
    }
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  out[tid] = from_float<T>(o0 * inverse);
  out[tid + kThreads] = from_float<T>(o1 * inverse);
  if (tid == 0 && p.lse != nullptr) p.lse[row] = sum == 0.0f ? -INFINITY : top + logf(sum);
}

}  // namespace

cudaError_t launch_naive(const TreeVerifyParams& p, cudaStream_t stream) {
  const unsigned rows = static_cast<unsigned>(p.num_tokens) * p.heads;
  if (rows == 0) return cudaSuccess;
  if (p.is_bf16)
    naive_kernel<__nv_bfloat16><<<rows, kThreads, 0, stream>>>(p);
  else
    naive_kernel<__half><<<rows, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace kdtree
