// The merge: joins the partial rows that the splits of a request left, and zeroes padding tokens.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90,code=sm_90 -c merge.cu
//
// A block takes half a packed row (256 of 512 columns): 8 groups of 64 threads walk the splits side by
// side, so that a row of 132 splits is 17 loads deep. It works out from the lengths in memory, as the
// attention kernel did, which splits there are. So it can be launched before that kernel ends
// (programmatic dependent launch) and waits only to read what it wrote. The order of the sum is fixed.
#include "kernels.h"
#include "ptx.cuh"
#include "schedule.cuh"
#include "workspace.h"

namespace kdtree {
namespace {

constexpr int kMergeThreads = 512;
constexpr int kSplitGroups = 8;
constexpr int kColumns = 256;
constexpr float kLn2 = 0.6931471805599453f;

// The request that a token belongs to, or -1 for padding.
__device__ __forceinline__ int request_of_token(const TreeVerifyParams& p, int64_t token) {
  const int lane = threadIdx.x & 31;
  int before = 0;  // requests that end at or before the token
  for (int b = 0; b < p.batch; b += 32) {
    const bool past = b + lane < p.batch && p.qo_indptr[b + lane + 1] <= token;
    before += __popc(__ballot_sync(0xffffffffu, past));
  }
  return before < p.batch && p.qo_indptr[before] <= token ? before : -1;
}

template <typename T>
__global__ void __launch_bounds__(kMergeThreads, 2) merge_kernel(const __grid_constant__ TreeVerifyParams p) {
  __shared__ float4 sums[kSplitGroups][kColumns / 4];
  const int tid = threadIdx.x, lane = tid & 31;
  const int group = tid / (kColumns / 4), column = tid % (kColumns / 4) * 4;
  const int share = p.deterministic ? 1 : share_of(p, line_length(p));
  bool waited = false;

  const int64_t units = static_cast<int64_t>(p.num_tokens) * p.heads * 2;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t row = unit >> 1;
    const int half = static_cast<int>(unit & 1);
    const int64_t token = row / p.heads;
    const int b = request_of_token(p, token);
    const Request r = b < 0 ? Request{} : request_of(p, b);
    const int64_t local = b < 0 ? 0 : row - p.qo_indptr[b] * p.heads;  // packed row of the request

    int splits = 0;       // 0: padding
    int64_t first = 0, step = 0, second = 0;  // partial rows of split 0, of split 1, and their distance from there
    if (local < static_cast<int64_t>(r.nodes) * p.heads) {
      if (p.deterministic) {
        splits = r.splits;
        step = static_cast<int64_t>(r.nodes) * p.heads;
        first = static_cast<int64_t>(b) * kDeterministicRows + local;
        second = first + step;
      } else {
        const GroupRange range = groups_of(r, line_start(p, b), share);
        const int tile = static_cast<int>(local) / p.row_tile;
        const int64_t in_tile = local - static_cast<int64_t>(tile) * p.row_tile;
        splits = range.last - range.first + 1;
        step = static_cast<int64_t>(p.lanes) * 2 * p.row_tile;
        first = partial_row_of(p, range.first, tile, true) + in_tile;
        second = partial_row_of(p, range.first + 1, tile, false) + in_tile;
      }
      if (splits == 1) continue;  // the attention kernel wrote it
    }
    if (!waited) {
      wait_for_primary();
      waited = true;
    }

    T* out = static_cast<T*>(p.out) + row * kVDim + half * kColumns + column;
    const auto partial_row = [&](int k) { return k == 0 ? first : second + (k - 1) * step; };

    // Every warp for itself: the maximum over the splits, then the sum at that reference.
    float top = -INFINITY;
    for (int k = lane; k < splits; k += 32) {
      const float2 ms = __ldcg(p.partial_ms + partial_row(k));
      if (ms.y != 0.0f) top = fmaxf(top, ms.x);  // a split whose tokens are all masked has sum 0
    }
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
    float total = 0.0f;
    for (int k = lane; k < splits; k += 32) {
      const float2 ms = __ldcg(p.partial_ms + partial_row(k));
      if (ms.y != 0.0f) total += ms.y * exp2_approx(ms.x - top);
    }
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);

    float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 6
    for (int k = group; k < splits; k += kSplitGroups) {
      const int64_t at = partial_row(k);
      const float2 ms = __ldcg(p.partial_ms + at);
      const float4 v = __ldcg(reinterpret_cast<const float4*>(p.partial_out + at * kVDim + half * kColumns + column));
      const float w = ms.y != 0.0f ? exp2_approx(ms.x - top) : 0.0f;
      acc.x += w * v.x;
      acc.y += w * v.y;
      acc.z += w * v.z;
      acc.w += w * v.w;
    }
    sums[group][column / 4] = acc;
    __syncthreads();
    if (group == 0) {
#pragma unroll
      for (int g = 1; g < kSplitGroups; ++g) {
        const float4 v = sums[g][column / 4];
        acc.x += v.x;
        acc.y += v.y;
        acc.z += v.z;
        acc.w += v.w;
      }
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
      *reinterpret_cast<uint2*>(out) =
          make_uint2(pack2<T>(acc.x * inverse, acc.y * inverse), pack2<T>(acc.z * inverse, acc.w * inverse));
      if (tid == 0 && half == 0 && p.lse != nullptr) p.lse[row] = total == 0.0f ? -INFINITY : (top + log2f(total)) * kLn2;
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_merge(const TreeVerifyParams& p, int sm_count, bool dependent, cudaStream_t stream) {
  const int64_t units = static_cast<int64_t>(p.num_tokens) * p.heads * 2;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(units < 4 * sm_count ? units : 4 * sm_count));
  config.blockDim = dim3(kMergeThreads);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return p.is_bf16 ? cudaLaunchKernelEx(&config, merge_kernel<__nv_bfloat16>, p)
                   : cudaLaunchKernelEx(&config, merge_kernel<__half>, p);
}

}  // namespace kdtree
