// The merge: joins the partial rows that the splits of a request left, and zeroes padding tokens.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90,code=sm_90 -c merge.cu
//
// A block takes a quarter of a packed row (128 of 512 columns): its 8 warps walk the splits side by side,
// so that a row of 132 splits is 17 loads deep, of which 9 are under way at once. It works out from the lengths in memory, as the
// attention kernel did, which splits there are. So it can be launched before that kernel ends
// (programmatic dependent launch) and waits only to read what it wrote. The order of the sum is fixed.
#include "kernels.h"
#include "merge.cuh"
#include "ptx.cuh"
#include "schedule.cuh"
#include "workspace.h"

namespace kdtree {
namespace {

constexpr int kSplitGroups = 8;   // warps, each over every eighth split
constexpr int kColumns = 128;     // of a block
constexpr int kParts = kVDim / kColumns;
constexpr int kAhead = 9;         // loads a thread has under way

template <typename T>
__global__ void __launch_bounds__(kMergeThreads, 4) merge_kernel(const __grid_constant__ TreeVerifyParams p) {
  __shared__ float2 ms_sm[kMostSplits];
  __shared__ float4 sums[kSplitGroups][32];
  const int tid = threadIdx.x, lane = tid & 31, group = tid >> 5;
  Line line(p);
  const int share = share_of(p, line.length());
  bool waited = false;

  const unsigned units = static_cast<unsigned>(p.num_tokens) * p.heads * kParts;
  for (unsigned unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const unsigned row = unit / kParts;
    const int column = unit % kParts * kColumns + lane * 4;
    const int token = static_cast<int>(row / p.heads);
    if (p.batch > 32) line.rewind();
    const int at = line.find_token(token);
    Partials of = {0, 0, 0, 0};  // padding
    if (at >= 0) {
      const Request r = line.request(at);
      of = partials_of(p, r, line.number(at), static_cast<int>(row) - r.token * p.heads, share);
    }
    const int splits = of.splits;
    if (splits == 1) continue;  // the attention kernel wrote it
    if (!waited) {
      wait_for_primary();
      waited = true;
    }
    const auto partial_row = [&](int k) -> int64_t { return k == 0 ? of.first : of.second + (k - 1) * of.step; };

    __syncthreads();  // the last row's readers of ms_sm and sums are done
    for (int k = tid; k < splits; k += kMergeThreads) ms_sm[k] = __ldcg(p.partial_ms + partial_row(k));

    // The first loads need no weights: they are under way while the maximum is found.
    float4 v[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int k = group + j * kSplitGroups;
      v[j] = k < splits ? __ldcg(reinterpret_cast<const float4*>(p.partial_out + partial_row(k) * kVDim + column))
                        : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    __syncthreads();

    // Every warp for itself: the maximum over the splits, then the sum at that reference. A split
    // whose tokens are all masked has sum 0.
    float top = -INFINITY, total = 0.0f;
    for (int k = lane; k < splits; k += 32)
      if (ms_sm[k].y != 0.0f) top = fmaxf(top, ms_sm[k].x);
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
    for (int k = lane; k < splits; k += 32)
      if (ms_sm[k].y != 0.0f) total += ms_sm[k].y * exp2_approx(ms_sm[k].x - top);
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);

    float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto add = [&](int k, const float4& x) {
      const float w = ms_sm[k].y != 0.0f ? exp2_approx(ms_sm[k].x - top) : 0.0f;
      acc.x += w * x.x;
      acc.y += w * x.y;
      acc.z += w * x.z;
      acc.w += w * x.w;
    };
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int k = group + j * kSplitGroups;
      if (k < splits) add(k, v[j]);
    }
#pragma unroll 8
    for (int k = group + kAhead * kSplitGroups; k < splits; k += kSplitGroups)
      add(k, __ldcg(reinterpret_cast<const float4*>(p.partial_out + partial_row(k) * kVDim + column)));
    sums[group][lane] = acc;
    __syncthreads();
    if (group == 0) {
#pragma unroll
      for (int g = 1; g < kSplitGroups; ++g) {
        const float4 x = sums[g][lane];
        acc.x += x.x;
        acc.y += x.y;
        acc.z += x.z;
        acc.w += x.w;
      }
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
      *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + static_cast<int64_t>(row) * kVDim + column) =
          make_uint2(pack2<T>(acc.x * inverse, acc.y * inverse), pack2<T>(acc.z * inverse, acc.w * inverse));
      if (tid == 0 && column == 0 && p.lse != nullptr)
        p.lse[row] = total == 0.0f ? -INFINITY : (top + log2f(total)) * kLn2;
    }
  }
}

}  // namespace

cudaError_t launch_merge(const TreeVerifyParams& p, int sm_count, bool dependent, cudaStream_t stream) {
  const int64_t units = static_cast<int64_t>(p.num_tokens) * p.heads * kParts;
  if (units > INT32_MAX) return cudaErrorInvalidValue;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(units < 8 * sm_count ? units : 8 * sm_count));
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
