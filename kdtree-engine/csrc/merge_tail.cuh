// The merge as the last act of the attention kernel (wgmma path): every thread block waits until all of
// the grid have left their partial rows, then joins its share of the packed rows. No second launch, no
// second kernel whose code has to be fetched, and no gap between the two.
//
// Waiting on other blocks is safe as the launch is cooperative: the whole grid is on the GPU at once.
//
// A *team* of 128 threads joins one row, or a quarter of its columns where there are few rows. Partial
// rows are 16 bits wide and already divided by their own sums. The order of a sum follows from the number
// of its splits and of the parts that its row is taken in; in deterministic mode there are always four.
#pragma once

#include "merge.cuh"
#include "ptx.cuh"
#include "schedule.cuh"
#include "wgmma.cuh"
#include "workspace.h"

namespace kdtree {

constexpr int kTeamThreads = 128;
constexpr int kTeamValues = 36 * 1024;                           // bytes of partial rows at a time
constexpr int kTeamBytes = kTeamValues + kMostSplits * 8 + kTeamThreads * 32;  // of shared memory

// Where all blocks of the grid wait for each other, in two steps, so that a block can do something in between.
// `arrivals` counts the blocks below bit 31; block 0 brings what is missing to 2^31, so that the last to arrive
// turns bit 31 over and leaves the rest at 0: ready for the next launch. What any thread of a block wrote before
// it arrived is then seen by all.
class GridBarrier {
 public:
  __device__ __forceinline__ explicit GridBarrier(unsigned* arrivals) : arrivals_(arrivals) {}

  // Called by all threads of the block.
  __device__ __forceinline__ void arrive() {
    __syncthreads();
    if (threadIdx.x == 0) {
      // Bit 31 cannot turn before this block has arrived, so it may be read first.
      asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(before_) : "l"(arrivals_) : "memory");
      __threadfence();
      asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(arrivals_),
                   "r"(blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u) : "memory");
    }
  }
  __device__ __forceinline__ void wait() {
    if (threadIdx.x == 0) {
      unsigned now;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrivals_) : "memory");
      } while (((before_ ^ now) & 0x80000000u) == 0);
      __threadfence();
    }
    __syncthreads();
  }

 private:
  unsigned* arrivals_;
  unsigned before_ = 0;
};

__device__ __forceinline__ void team_sync(int team) { asm volatile("bar.sync %0, 128;" ::"r"(4 + team) : "memory"); }

// Called by all threads of a block, which have written what they had to. kTeams: of a block; memory: kTeams *
// kTeamBytes of shared memory that nothing else uses any more.
//
// As all code that runs once a launch it is written for few instructions: rows are copied to shared memory
// and summed from there, in loops of a few instructions each.
template <typename T, int kTeams>
__device__ __forceinline__ void merge_rows(const TreeVerifyParams& p, char* memory) {
  static_assert(kVDim * sizeof(T) + sizeof(float2) <= kPartialRowBytes,
                "a 16-bit partial row takes the place of a float32 one");
  const unsigned thread = thread_number();
  const int team = thread / kTeamThreads, t = thread % kTeamThreads, lane = t & 31;
  char* const values_sm = memory + team * kTeamBytes;
  float2* const ms_sm = reinterpret_cast<float2*>(values_sm + kTeamValues);
  float* const sums = reinterpret_cast<float*>(ms_sm + kMostSplits);  // [split group][column]
  const bool one = is_one_request(p);
  GridBarrier everyone(p.arrivals);
  everyone.arrive();
  bool met = false;

  const int rows = p.num_tokens * p.heads;
  const int parts = p.deterministic || rows < 2 * static_cast<int>(gridDim.x) ? 4 : 1;
  const int columns = kVDim / parts, lanes = columns / 8;  // a thread takes 8 columns of every so-manieth split
  const int lanes_log2 = parts == 4 ? 4 : 6;
  const int group = t >> lanes_log2, at = t & (lanes - 1), groups = kTeamThreads >> lanes_log2;
  const int chunk = kTeamValues / kVDim / 2 * parts;  // splits that fit at a time: a multiple of `groups`

#pragma unroll 1
  for (int unit = team * gridDim.x + blockIdx.x; unit < rows * parts; unit += gridDim.x * kTeams) {
    const int row = parts == 4 ? unit >> 2 : unit;
    const int column0 = (parts == 4 ? unit & 3 : 0) * columns;
    Partials of = {0, 0, 0, 0};  // padding
    if (one) {
      const OneRequest r(p);
      of = r.partials(p, row - r.token * p.heads);
    } else {
      Line line(p);
      const int share = share_of(p, line.length());
      line.rewind();
      const int lane_of = line.find_token(row / p.heads);
      if (lane_of >= 0) {
        const Request r = line.request(lane_of);
        of = partials_of(p, r, line.number(lane_of), row - r.token * p.heads, share);
      }
    }
    const int splits = of.splits;
    if (splits == 1) continue;  // it went straight to `out`

    if (!met) everyone.wait();
    met = true;

    // Maxima and sums are asked for first, and put down once the rows are on their way as well.
    float2 ms[kMostSplits / kTeamThreads];
#pragma unroll
    for (int i = 0; i < kMostSplits / kTeamThreads; ++i) {
      const int k = t + i * kTeamThreads;
      if (k < splits) ms[i] = __ldcg(p.partial_ms + (k == 0 ? of.first : of.second + (k - 1) * of.step));
    }
    team_sync(team);  // the last unit's readers are done

    // Addresses in units of 16 bytes, which 32 bits can count. Split 0 alone lies out of the row.
    const uint4* const values = reinterpret_cast<const uint4*>(p.partial_out);
    const unsigned stride = of.step * groups * (kVDim / 8);
    unsigned from = (of.second + (group - 1) * of.step) * (kVDim / 8) + column0 / 8 + at;
    unsigned now = group == 0 ? of.first * (kVDim / 8) + column0 / 8 + at : from;
    float top = -INFINITY, total = 0.0f;
    float acc[8] = {};
#pragma unroll 1
    for (int base = 0; base < splits; base += chunk) {
      const int end = min(base + chunk, splits);
      uint32_t to = smem_addr(values_sm) + t * 16;
#pragma unroll 1
      for (int k = base + group; k < end; k += groups) {
        cp_async_16(to, values + now);
        from += stride;
        now = from;
        to += kTeamThreads * 16;
      }
      if (base == 0) {  // while the rows are under way
#pragma unroll
        for (int i = 0; i < kMostSplits / kTeamThreads; ++i)
          if (t + i * kTeamThreads < splits) ms_sm[t + i * kTeamThreads] = ms[i];
        team_sync(team);
        // Every warp for itself: the maximum over the splits. A split whose tokens are all masked has sum 0.
#pragma unroll 1
        for (int k = lane; k < splits; k += 32)
          if (ms_sm[k].y != 0.0f) top = fmaxf(top, ms_sm[k].x);
#pragma unroll
        for (int o = 16; o > 0; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
        team_sync(team);
#pragma unroll 1
        for (int k = t; k < splits; k += kTeamThreads) {
          const float2 ms = ms_sm[k];
          ms_sm[k].x = ms.y != 0.0f ? ms.y * exp2_approx(ms.x - top) : 0.0f;  // its weight
        }
      }
      cp_async_wait_all();
      team_sync(team);
      const char* x = values_sm + t * 16;
#pragma unroll 1
      for (int k = base + group; k < end; k += groups) {
        const uint4 v = *reinterpret_cast<const uint4*>(x);
        const float w = ms_sm[k].x;
        const T* values8 = reinterpret_cast<const T*>(&v);
#pragma unroll
        for (int c = 0; c < 8; ++c) acc[c] += w * to_float(values8[c]);
        x += kTeamThreads * 16;
      }
    }
#pragma unroll 1
    for (int k = lane; k < splits; k += 32) total += ms_sm[k].x;
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
    float4* const mine = reinterpret_cast<float4*>(sums + group * columns + at * 8);
    mine[0] = make_float4(acc[0], acc[1], acc[2], acc[3]);
    mine[1] = make_float4(acc[4], acc[5], acc[6], acc[7]);
    team_sync(team);

    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    T* const out = static_cast<T*>(p.out) + static_cast<int64_t>(row) * kVDim + column0;
#pragma unroll 1
    for (int c = t * 2; c < columns; c += kTeamThreads * 2) {
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 1
      for (int g = 0; g < groups; ++g) {
        const float2 x = *reinterpret_cast<const float2*>(sums + g * columns + c);
        sum.x += x.x;
        sum.y += x.y;
      }
      *reinterpret_cast<uint32_t*>(out + c) = pack2<T>(sum.x * inverse, sum.y * inverse);
    }
    if (t == 0 && column0 == 0 && p.lse != nullptr)
      p.lse[row] = total == 0.0f ? -INFINITY : (top + log2f(total)) * kLn2;
  }
  if (!met) everyone.wait();  // a barrier of the block
}

}  // namespace kdtree
