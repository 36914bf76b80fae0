// From scores to trees: the best candidates of each chunk, of each row, then a tree for each request.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90,code=sm_90 -c build.cu
//
// The decisions are in top_k.h and select.h; here are the loads, the warps and the barriers around them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>

#include "kernels.h"

namespace kdtree {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kChunkThreads = 64;
constexpr int kChunkWarps = kChunkThreads / 32;
constexpr int kRuns = kChunkColumns / (kRun * kChunkThreads);
constexpr int kMaxFound = 128;
constexpr int kMergeThreads = 128;
constexpr int kSelectThreads = 512;  // a warp for each row that it may have to rank
static_assert(kChunkWarps * 32 >= kMaxRanks, "each rank has a lane");

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

// A thread's scores of 8 columns.
template <typename T>
struct alignas(16) Run {
  T scores[kRun];

  __device__ __forceinline__ float at(int i) const { return to_float(scores[i]); }

  // The largest; NaN is none's.
  __device__ __forceinline__ float top() const {
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < kRun; ++i) top = fmaxf(top, at(i));
    return top;
  }
};
// A bfloat16 is the upper half of a float32: an instruction each, where nvcc makes three of two.
template <>
struct alignas(16) Run<__nv_bfloat16> {
  __nv_bfloat16 scores[kRun];

  template <typename Pair>
  __device__ __forceinline__ Pair pair(int i) const {
    Pair pair;
    memcpy(&pair, scores + 2 * i, sizeof(pair));
    return pair;
  }

  __device__ __forceinline__ float at(int i) const {
    const uint32_t both = pair<uint32_t>(i / 2);
    return bits_as<float>(i % 2 == 0 ? both << 16 : both & 0xffff0000u);
  }

  __device__ __forceinline__ float top() const {
    __nv_bfloat162 top = pair<__nv_bfloat162>(0);
#pragma unroll
    for (int i = 1; i < kRun / 2; ++i) top = __hmax2(top, pair<__nv_bfloat162>(i));
    return fmaxf(fmaxf(__low2float(top), __high2float(top)), -INFINITY);
  }
};

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

__device__ __forceinline__ int64_t token_of(const BuildParams& p, int row, uint64_t key) {
  const int64_t column = column_of(key);
  return p.token_ids == nullptr ? column : p.token_ids[static_cast<int64_t>(row) * p.columns + column];
}

// What is known of a row's candidates becomes their log-probabilities and tokens. keys: the row's best.
__device__ __forceinline__ void finish_row(const BuildParams& p, int row, const uint64_t* keys, float z,
                                           int thread) {
  if (thread >= p.ranks) return;
  const uint64_t key = keys[thread];
  const int64_t at = static_cast<int64_t>(row) * p.ranks + thread;
  p.log_probs[at] = key == 0 ? -INFINITY : log_prob_of(key, z, p.from_logits);
  p.candidates[at] = key == 0 ? -1 : token_of(p, row, key);
}

// Negative infinity.
__device__ __forceinline__ void set_none(float& x) { x = -INFINITY; }
__device__ __forceinline__ void set_none(__nv_bfloat16& x) { x = bits_as<__nv_bfloat16>(uint16_t{0xff80}); }
__device__ __forceinline__ void set_none(__half& x) { x = bits_as<__half>(uint16_t{0xfc00}); }

// The sum over a chunk's block of what its threads bring. Calls take turns with two halves of `parts`, so that
// a barrier each is enough.
__device__ __forceinline__ int block_sum(int mine, uint32_t (*parts)[kChunkWarps], int turn) {
  const uint32_t all = __reduce_add_sync(kAll, static_cast<unsigned>(mine));
  if (threadIdx.x % 32 == 0) parts[turn % 2][threadIdx.x / 32] = all;
  __syncthreads();
  uint32_t total = 0;
#pragma unroll
  for (int w = 0; w < kChunkWarps; ++w) total += parts[turn % 2][w];
  return static_cast<int>(total);
}

// A block: the best `ranks` of 4,096 columns of a row, and from logits their sum of exponentials.
//
// In each warp as many lanes as half of the ranks have a column that is at least the last of their maxima, so
// `ranks` columns of the block are at least the lower of both bounds. The few that are get ranked by counting.
template <typename T>
__global__ void __launch_bounds__(kChunkThreads) chunk_kernel(const __grid_constant__ BuildParams p) {
  __shared__ Run<T> chunk[kRuns * kChunkThreads];
  __shared__ uint64_t found[kMaxFound];
  __shared__ uint64_t ranked[kMaxRanks];
  __shared__ uint32_t tops[kChunkWarps], bounds[kChunkWarps], coarse[kChunkWarps], fine[kChunkWarps];
  __shared__ uint32_t parts[2][kChunkWarps];
  __shared__ int found_count;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int first = blockIdx.x * kChunkColumns, columns = p.columns - first;
  const int row = blockIdx.z * p.depth + blockIdx.y;
  const T* scores =
      static_cast<const T*>(p.scores) + blockIdx.z * p.batch_stride + blockIdx.y * p.depth_stride + first;
  T* const staged = reinterpret_cast<T*>(chunk);
  // A thread reads what it wrote itself, until the first barrier. A row may begin anywhere: 16 bytes at once only
  // where they are aligned.
  if (columns >= kChunkColumns && reinterpret_cast<uintptr_t>(scores) % 16 == 0) {
    constexpr int kVectors = sizeof(Run<T>) / 16;
#pragma unroll
    for (int i = 0; i < kRuns * kVectors; ++i) {
      const int at = i / kVectors * kChunkThreads + thread, part = i % kVectors;
      __pipeline_memcpy_async(reinterpret_cast<uint4*>(chunk + at) + part,
                              reinterpret_cast<const uint4*>(scores) + at * kVectors + part, 16);
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncwarp();  // keeps the compiler from reading earlier, which the wait alone does not
  } else {
    for (int i = 0; i < kRuns; ++i)
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        const int column = (i * kChunkThreads + thread) * kRun + j;
        if (column < columns)
          staged[column] = scores[column];
        else
          set_none(staged[column]);
      }
  }
  const float most = p.from_logits ? kMaxFloat : 0.0f;
  float run_tops[kRuns], best;
#pragma unroll 1
  for (;;) {
    best = -INFINITY;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      run_tops[i] = chunk[i * kChunkThreads + thread].top();
      best = fmaxf(best, run_tops[i]);
    }
    if (!(best > most)) break;
    // Rare: what is no candidate goes, then once more.
#pragma unroll 1
    for (int i = 0; i < kRuns * kRun; ++i) {
      T& score = staged[(i / kRun * kChunkThreads + thread) * kRun + i % kRun];
      if (to_float(score) > most) set_none(score);
    }
  }

  // The last five bits tell the lane, so that no two are equal; that may lower the bound.
  const uint32_t order = best >= -kMaxFloat ? ordered(best) : 0;
  tops[warp] = __reduce_max_sync(kAll, order);  // all lanes the same
  uint32_t left = (order & ~31u) | lane, last = 0;
#pragma unroll 1
  for (int round = 0; round < p.ranks; round += kChunkWarps) {
    last = __reduce_max_sync(kAll, left);
    if (left == last) left = 0;
  }
  bounds[warp] = last & ~31u;
  if (thread == 0) found_count = 0;
  __syncthreads();

  uint32_t top_order = 0, bound = 0xffffffffu;
#pragma unroll
  for (int w = 0; w < kChunkWarps; ++w) {
    top_order = max(top_order, tops[w]);
    bound = min(bound, bounds[w]);
  }
  bound = max(bound, ordered(-kMaxFloat));
  // Puts those of this thread's columns that are at least `least` among what was found; of those that are equal
  // to it, only columns below `cut`.
  const auto gather = [&](float least, int cut) {
    unsigned runs = 0;
#pragma unroll
    for (int i = 0; i < kRuns; ++i)
      if (run_tops[i] >= least) runs |= 1u << i;
    for (; runs != 0; runs &= runs - 1) {
      const int at = (__ffs(static_cast<int>(runs)) - 1) * kChunkThreads + thread;
      const Run<T> run = chunk[at];
      unsigned mine = 0;
#pragma unroll
      for (int j = 0; j < kRun; ++j)
        if (run.at(j) >= least) mine |= 1u << j;
      if (cut < kChunkColumns)
#pragma unroll
        for (int j = 0; j < kRun; ++j)
          if (run.at(j) == least && at * kRun + j >= cut) mine &= ~(1u << j);
      int number = atomicAdd(&found_count, __popc(mine));
      for (; mine != 0; mine &= mine - 1) {
        const int column = at * kRun + __ffs(static_cast<int>(mine)) - 1;
        if (number < kMaxFound)
          found[number++] = key_of(ordered(to_float(staged[column])), static_cast<uint32_t>(first + column));
      }
    }
  };
  gather(value_of(bound), kChunkColumns);

  const float top = top_order == 0 ? -INFINITY : value_of(top_order);
  if (p.from_logits && top_order != 0) {
    uint32_t whole = 0, rest = 0;
#pragma unroll 1
    for (int i = 0; i < kRuns; ++i) {
      const Run<T> run = chunk[i * kChunkThreads + thread];
      ExpSum terms;
#pragma unroll
      for (int j = 0; j < kRun; ++j) terms.add(sum(run.at(j), -top));
      whole += terms.coarse_units();
      rest += terms.fine_units();
    }
    coarse[warp] = __reduce_add_sync(kAll, whole);
    fine[warp] = __reduce_add_sync(kAll, rest);
  }
  __syncthreads();

  int count = found_count;
  if (count > kMaxFound) {
    // Many ranks, many equal scores, or a warp with few columns. By bisection: the largest bound that `ranks`
    // columns reach, or any that few enough reach; and where too many are equal to it, the lowest columns.
    const auto block_count = [&](float least, int cut, int turn) {
      int mine = 0;
#pragma unroll 1
      for (int i = 0; i < kRuns; ++i) {
        const Run<T> run = chunk[i * kChunkThreads + thread];
#pragma unroll
        for (int j = 0; j < kRun; ++j)
          mine += run.at(j) > least || (run.at(j) == least && (i * kChunkThreads + thread) * kRun + j < cut);
      }
      return block_sum(mine, parts, turn);
    };
    uint32_t low = bound, high = top_order + 1;
    int turn = 0, cut = kChunkColumns, few = 0;
#pragma unroll 1
    while (count > kMaxFound) {
      const bool by_score = high - low > 1;
      const uint32_t middle = by_score ? low + (high - low) / 2 : low;
      const int before = by_score ? kChunkColumns : few + (cut - few) / 2;
      const int reach = block_count(value_of(middle), before, turn++);
      if (by_score)
        (reach >= p.ranks ? low : high) = middle;
      else
        (reach >= p.ranks ? cut : few) = before;
      if (reach >= p.ranks) count = reach;
    }
    // All have read the number: the sums had barriers.
    if (thread == 0) found_count = 0;
    __syncthreads();
    gather(value_of(low), cut);
    __syncthreads();
  }

  const int64_t block = static_cast<int64_t>(row) * p.chunks + blockIdx.x;
  uint64_t* const best_keys = p.chunks == 1 ? ranked : p.keys + block * p.ranks;
  for (int i = thread; i < max(count, p.ranks); i += kChunkThreads) {
    const uint64_t key = i < count ? found[i] : 0;
    const int place = i < count ? keys_above(found, count, key) : i;
    if (place < p.ranks) best_keys[place] = key;
  }
  uint64_t total = 0;
  if (p.from_logits && top_order != 0) {
#pragma unroll
    for (int w = 0; w < kChunkWarps; ++w) total += of_units(coarse[w], fine[w]);
  }
  if (p.chunks == 1) {
    __syncthreads();
    finish_row(p, row, ranked, normaliser(top, total), thread);
  } else if (thread == 0) {
    p.tops[block] = top;
    p.sums[block] = total;
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
#pragma unroll 4
  for (int i = thread; i < many; i += kMergeThreads) keys[i] = p.keys[row * many + i];
  __syncthreads();

  if (warp == 0) {
    LaneHeads heads;
    heads.start(keys, p.chunks, p.ranks, lane);
#pragma unroll 1
    for (int rank = 0; rank < p.ranks; ++rank) {
      const uint64_t key = warp_max(heads.best());
      if (lane == 0) merged[rank] = key;
      heads.take(key);
    }
  } else if (warp == 1) {
    float top = -INFINITY;
    uint64_t total = 0;
    if (p.from_logits) {
      float tops[2];
      uint64_t sums[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int chunk = lane + 32 * i;
        tops[i] = chunk < p.chunks ? p.tops[row * p.chunks + chunk] : -INFINITY;
        sums[i] = chunk < p.chunks ? p.sums[row * p.chunks + chunk] : 0;
        top = fmaxf(top, tops[i]);
      }
#pragma unroll
      for (int o = 16; o > 0; o >>= 1) top = fmaxf(top, __shfl_xor_sync(kAll, top, o));
#pragma unroll
      for (int i = 0; i < 2; ++i) total += scaled(sums[i], fixed_exp(sum(tops[i], -top)));
      total = warp_sum(total);
    }
    if (lane == 0) normal = normaliser(top, total);
  }
  __syncthreads();
  finish_row(p, static_cast<int>(row), merged, normal, thread);
}

__device__ __forceinline__ float score_at(const BuildParams& p, int64_t place) {
  if (p.type == ScoreType::kFloat32) return static_cast<const float*>(p.scores)[place];
  if (p.type == ScoreType::kBfloat16) return to_float(static_cast<const __nv_bfloat16*>(p.scores)[place]);
  return to_float(static_cast<const __half*>(p.scores)[place]);
}

// A warp: a row of at most 64 columns to the costs and tokens of its depth.
__device__ __forceinline__ void rank_row(const BuildParams& p, int request, int depth, uint64_t* keys, double* steps,
                                         int64_t* tokens, int lane) {
  const int64_t begin = request * p.batch_stride + depth * p.depth_stride;
  const int row = request * p.depth + depth;
  uint64_t mine[2];
  int64_t carried[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = lane + 32 * i;
    const float x = column < p.columns ? score_at(p, begin + column) : -INFINITY;
    mine[i] = is_candidate(x, p.from_logits) ? key_of(ordered(x), static_cast<uint32_t>(column)) : 0;
    carried[i] = column < p.columns ? token_of(p, row, key_of(0, static_cast<uint32_t>(column))) : -1;
    keys[column] = mine[i];
  }
  __syncwarp();
  float z = 0.0f;
  if (p.from_logits) {
    const uint32_t order = __reduce_max_sync(kAll, max(order_of(mine[0]), order_of(mine[1])));
    const float top = order == 0 ? -INFINITY : value_of(order);
    uint64_t total = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (mine[i] != 0) total += fixed_exp(sum(value_of(order_of(mine[i])), -top));
    z = normaliser(top, warp_sum(total));
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int place = mine[i] == 0 ? kMaxRanks : keys_above(keys, p.columns, mine[i]);
    if (place < p.ranks) {
      steps[place] = cost_of(log_prob_of(mine[i], z, p.from_logits));
      tokens[place] = carried[i];
    }
  }
}

// The steps of a tree, by bytes. nvcc finds the address of shared memory anew for every load, which takes longer
// than the load: so it is found once.
struct Steps {
#ifdef __CUDA_ARCH__
  uint32_t base;
  __device__ __forceinline__ explicit Steps(const Tree& tree)
      : base(static_cast<uint32_t>(__cvta_generic_to_shared(tree.steps))) {
    asm volatile("" : "+r"(base));
  }
  __device__ __forceinline__ double at(uint32_t offset) const {
    double step;
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(step) : "r"(base + offset) : "memory");
    return step;
  }
#else
  const char* base;
  explicit Steps(const Tree& tree) : base(reinterpret_cast<const char*>(tree.steps)) {}
  double at(uint32_t offset) const { return *reinterpret_cast<const double*>(base + offset); }
#endif
};

// A warp grows a tree, a node after the other.
template <int kSlots>
__device__ __forceinline__ void grow_tree(Tree& tree, int nodes, int lane) {
  const Steps steps(tree);
  Frontier<kSlots> mine;
  mine.plant(steps.at(0), lane);
  int node = 1;
#pragma unroll 1
  for (; node < nodes; ++node) {
    const uint32_t high = __reduce_min_sync(kAll, mine.least_high());
    const uint32_t low = __reduce_min_sync(kAll, mine.least_low(high));
    const uint32_t child = __reduce_min_sync(kAll, mine.first_child(high, low));
    if (high == kInfiniteHigh) break;  // the tree has run out
    const double cost = bits_as<double>(uint64_t{high} << 32 | low);
    mine.grow(lane, child, cost, node, steps.at(first_below(child)), steps.at(step_of(child + kNextRank)));
    if (lane == 0) {
      tree.cost[node] = cost;
      tree.origin[node] = child;
    }
  }
  if (lane == 0) tree.count = node;
}

// A block: one request's tree. One warp grows it, then all threads write it out. Rows of at most 64 columns come
// as they are, and a warp ranks each.
__global__ void __launch_bounds__(kSelectThreads) select_kernel(const __grid_constant__ BuildParams p) {
  __shared__ Tree tree;
  __shared__ uint64_t keys[kMaxDepth][kMaxRanks];
  __shared__ int64_t full_begin;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int request = blockIdx.x, nodes = p.out.nodes;
  const int64_t prefix = p.prefix_lengths[request];
  const int64_t root = p.root_tokens == nullptr ? -1 : p.root_tokens[request];
  // A row's steps are filled in below, by the same lanes or behind a barrier of the warp.
  if (warp <= p.depth)
    for (int rank = lane; rank <= p.ranks; rank += 32) tree.steps[warp][rank] = INFINITY;
  if (p.depth == kMaxDepth && thread <= p.ranks) tree.steps[kMaxDepth][thread] = INFINITY;
  for (int i = thread; i < kMaxNodes * kMaxRanks / 4; i += kSelectThreads)
    reinterpret_cast<uint32_t*>(tree.child)[i] = 0;
  if (thread == 0) tree.cost[0] = 0.0;
  if (thread == kSelectThreads - 1)
    full_begin = p.out.full_mask == nullptr ? 0 : full_mask_begin(p.prefix_lengths, request, nodes);
  if (warp < p.depth) {
    const int row = request * p.depth + warp;
    double* steps = tree.steps[warp];
    int64_t* tokens = tree.tokens + warp * p.ranks;
    if (p.columns > kMaxRanks) {
      for (int rank = lane; rank < p.ranks; rank += 32) {
        steps[rank] = cost_of(p.log_probs[static_cast<int64_t>(row) * p.ranks + rank]);
        tokens[rank] = p.candidates[static_cast<int64_t>(row) * p.ranks + rank];
      }
    } else {
      rank_row(p, request, warp, keys[warp], steps, tokens, lane);
    }
  }
  __syncthreads();

  if (warp == 0) {
    if (nodes <= 65)
      grow_tree<2>(tree, nodes, lane);
    else
      grow_tree<4>(tree, nodes, lane);
  }
  __syncthreads();
  link_nodes(tree, nodes, thread, kSelectThreads);
  __syncthreads();
  write_tree(tree, p.ranks, root, prefix, full_begin, request, p.out, thread, kSelectThreads);
}

}  // namespace

cudaError_t launch_build(const BuildParams& p, cudaStream_t stream) {
  if (p.batch == 0) return cudaSuccess;
  const unsigned rows = static_cast<unsigned>(p.batch) * p.depth;
  const dim3 blocks(static_cast<unsigned>(p.chunks), static_cast<unsigned>(p.depth), static_cast<unsigned>(p.batch));
  cudaError_t error = cudaSuccess;
  if (p.columns > kMaxRanks) {
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
    error = cudaGetLastError();
  }
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
