// The merge of the wgmma path: partial rows are 16 bits wide and already divided by their own sums.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -c merge_wgmma.cu
//
// Otherwise as merge.cu: it works out from the lengths in memory which splits there are, may be launched
// before the attention kernel ends, and sums in a fixed order. In how many parts a row is taken follows
// the number of rows, and the order of a sum with it; in deterministic mode it is always the same number.
#include "kernels.h"
#include "merge.cuh"
#include "ptx.cuh"
#include "schedule.cuh"
#include "workspace.h"

namespace kdtree {
namespace {

constexpr int kAhead = 8;         // loads a thread has under way

template <typename T, int kParts>
__global__ void __launch_bounds__(kMergeThreads, 4) merge_wgmma_kernel(const __grid_constant__ TreeVerifyParams p) {
  static_assert(kVDim * sizeof(T) + sizeof(float2) <= kPartialRowBytes,
                "a 16-bit partial row takes the place of a float32 one");
  __shared__ float2 ms_sm[kMostSplits];
  constexpr int kColumns = kVDim / kParts;              // of a block
  constexpr int kLanes = kColumns / 8;                  // threads of a group, 8 columns each
  constexpr int kSplitGroups = kMergeThreads / kLanes;  // each over every so-manieth split
  __shared__ float sums[8][kSplitGroups][kLanes];
  const int tid = threadIdx.x, lane = tid & 31, group = tid / kLanes, at = tid % kLanes;
  const T* partial = reinterpret_cast<const T*>(p.partial_out);
  const int share = p.deterministic ? 1 : share_of(p, line_length(p));
  bool waited = false;

  const unsigned units = static_cast<unsigned>(p.num_tokens) * p.heads * kParts;
  for (unsigned unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const unsigned row = unit / kParts;
    const int column = unit % kParts * kColumns + at * 8;
    const int token = static_cast<int>(row / p.heads);
    const int b = request_of_token(p, token);
    const Request r = b < 0 ? Request{} : request_of(p, b);
    const int local = b < 0 ? 0 : static_cast<int>(row - p.qo_indptr[b] * p.heads);  // packed row of the request

    int splits = 0;  // 0: padding
    int64_t first = 0, second = 0, step = 0;  // partial rows of split 0 and of split 1, and from there on
    if (local < r.nodes * p.heads) {
      if (p.deterministic) {
        splits = r.splits;
        step = r.nodes * p.heads;
        first = static_cast<int64_t>(b) * kDeterministicRows + local;
        second = first + step;
      } else {
        const GroupRange range = groups_of(r, line_start(p, b), share);
        const int tile = local / p.row_tile, in_tile = local % p.row_tile;
        splits = range.last - range.first + 1;
        step = p.lanes * 2 * p.row_tile;
        first = partial_row_of(p, range.first, tile, true) + in_tile;
        second = partial_row_of(p, range.first + 1, tile, false) + in_tile;
      }
      if (splits == 1) continue;  // the attention kernel wrote it
    }
    if (!waited) {
      wait_for_primary();
      waited = true;
    }
    const auto partial_row = [&](int k) { return k == 0 ? first : second + (k - 1) * step; };

    __syncthreads();  // the last row's readers of ms_sm and sums are done
    for (int k = tid; k < splits; k += kMergeThreads) ms_sm[k] = __ldcg(p.partial_ms + partial_row(k));

    // The first loads need no weights: they are under way while the maximum is found.
    uint4 v[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int k = group + j * kSplitGroups;
      v[j] = k < splits ? __ldcg(reinterpret_cast<const uint4*>(partial + partial_row(k) * kVDim + column))
                        : make_uint4(0, 0, 0, 0);
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

    float acc[8] = {};
    const auto add = [&](int k, const uint4& x) {
      const float w = ms_sm[k].y != 0.0f ? ms_sm[k].y * exp2_approx(ms_sm[k].x - top) : 0.0f;
      const T* values = reinterpret_cast<const T*>(&x);
#pragma unroll
      for (int c = 0; c < 8; ++c) acc[c] += w * to_float(values[c]);
    };
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int k = group + j * kSplitGroups;
      if (k < splits) add(k, v[j]);
    }
#pragma unroll 8
    for (int k = group + kAhead * kSplitGroups; k < splits; k += kSplitGroups)
      add(k, __ldcg(reinterpret_cast<const uint4*>(partial + partial_row(k) * kVDim + column)));
#pragma unroll
    for (int c = 0; c < 8; ++c) sums[c][group][at] = acc[c];
    __syncthreads();
    if (group == 0) {
#pragma unroll
      for (int c = 0; c < 8; ++c)
#pragma unroll
        for (int g = 1; g < kSplitGroups; ++g) acc[c] += sums[c][g][at];
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
      *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + static_cast<int64_t>(row) * kVDim + column) =
          make_uint4(pack2<T>(acc[0] * inverse, acc[1] * inverse), pack2<T>(acc[2] * inverse, acc[3] * inverse),
                     pack2<T>(acc[4] * inverse, acc[5] * inverse), pack2<T>(acc[6] * inverse, acc[7] * inverse));
      if (tid == 0 && column == 0 && p.lse != nullptr)
        p.lse[row] = total == 0.0f ? -INFINITY : (top + log2f(total)) * kLn2;
    }
  }
}

}  // namespace

cudaError_t launch_merge_wgmma(const TreeVerifyParams& p, int sm_count, bool dependent, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(p.num_tokens) * p.heads;
  // Few rows: more blocks a row. Deterministic: always four, as the order of a sum depends on it.
  const int parts = !p.deterministic && rows >= 2 * sm_count ? 1 : 4;
  const int64_t units = rows * parts;
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
  if (parts == 1)
    return p.is_bf16 ? cudaLaunchKernelEx(&config, merge_wgmma_kernel<__nv_bfloat16, 1>, p)
                     : cudaLaunchKernelEx(&config, merge_wgmma_kernel<__half, 1>, p);
  return p.is_bf16 ? cudaLaunchKernelEx(&config, merge_wgmma_kernel<__nv_bfloat16, 4>, p)
                   : cudaLaunchKernelEx(&config, merge_wgmma_kernel<__half, 4>, p);
}

}  // namespace kdtree
