// As much of CUDA as csrc_trees uses, for g++: every thread of a block is a fiber.
//
// Blocks run one after the other. The threads of a block take turns, in an order drawn anew each round; a turn
// ends where a thread waits for others: at __syncthreads, __syncwarp and the warp's reductions. One warp of a
// block runs ahead, the others rest most of the rounds. So a missing barrier shows as a result that depends on
// the order. Shared memory is not cleared between blocks.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

using std::max;
using std::min;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  dim3(unsigned x_, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint4 {
  unsigned x, y, z, w;
};
using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline dim3 threadIdx, blockIdx;

namespace simt {

constexpr size_t kStackBytes = 64 * 1024;

// Where some threads wait for each other: what each brought, and how often all have come.
struct Meeting {
  unsigned size = 0, arrived = 0;
  uint64_t round = 0;
  uint64_t brought[32] = {}, seen[2][32] = {};
};

struct Block {
  std::vector<ucontext_t> fibers;
  std::vector<std::unique_ptr<char[]>> stacks;
  std::vector<char> done;
  std::vector<Meeting> warps;
  Meeting all;
  ucontext_t scheduler;
  unsigned current = 0;
  std::function<void()> body;
};

inline Block* block = nullptr;
inline std::mt19937 order{1};

inline void yield() { swapcontext(&block->fibers[block->current], &block->scheduler); }

// Waits until all have come; returns what each lane of a warp brought.
inline const uint64_t* meet(Meeting& at, unsigned lane, uint64_t value) {
  const uint64_t round = at.round;
  if (lane < 32) at.brought[lane] = value;
  if (++at.arrived == at.size) {
    std::copy(at.brought, at.brought + 32, at.seen[round % 2]);
    at.arrived = 0;
    ++at.round;
  }
  while (at.round == round) yield();
  return at.seen[round % 2];
}

inline const uint64_t* meet_warp(uint64_t value) {
  const unsigned thread = block->current;
  return meet(block->warps[thread / 32], thread % 32, value);
}

inline void enter() {
  block->body();
  block->done[block->current] = 1;
  yield();
}

inline void launch(dim3 grid, unsigned threads, std::function<void()> body) {
  for (unsigned number = 0; number < grid.x * grid.y * grid.z; ++number) {
      const dim3 at(number % grid.x, number / grid.x % grid.y, number / (grid.x * grid.y));
      Block here;
      block = &here;
      here.body = body;
      here.fibers.resize(threads);
      here.done.assign(threads, 0);
      here.warps.resize(threads / 32);
      for (Meeting& warp : here.warps) warp.size = 32;
      here.all.size = threads;
      for (unsigned thread = 0; thread < threads; ++thread) {
        here.stacks.emplace_back(new char[kStackBytes]);
        getcontext(&here.fibers[thread]);
        here.fibers[thread].uc_stack.ss_sp = here.stacks[thread].get();
        here.fibers[thread].uc_stack.ss_size = kStackBytes;
        here.fibers[thread].uc_link = nullptr;
        makecontext(&here.fibers[thread], enter, 0);
      }
      const unsigned ahead = order() % (threads / 32);
      std::vector<unsigned> turns(threads);
      for (unsigned thread = 0; thread < threads; ++thread) turns[thread] = thread;
      for (unsigned left = threads, idle = 0; left > 0;) {
        std::shuffle(turns.begin(), turns.end(), order);
        const unsigned before = left, resting = order() | order() | order() | order();
        for (const unsigned thread : turns) {
          const unsigned warp = thread / 32;
          if (here.done[thread] || (warp != ahead && resting >> warp % 32 & 1)) continue;
          here.current = thread;
          threadIdx = dim3(thread);
          blockIdx = at;
          swapcontext(&here.scheduler, &here.fibers[thread]);
          left -= here.done[thread];
        }
        // Threads that wait for one that has ended wait forever.
        idle = left == before ? idle + 1 : 0;
        if (idle > 50000) std::abort();
      }
    }
  block = nullptr;
}

}  // namespace simt

inline void __syncthreads() { simt::meet(simt::block->all, 32, 0); }
inline void __syncwarp() { simt::meet_warp(0); }
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  const uint64_t* all = simt::meet_warp(x);
  return static_cast<unsigned>(*std::max_element(all, all + 32));
}
inline unsigned __reduce_min_sync(unsigned, unsigned x) {
  const uint64_t* all = simt::meet_warp(x);
  return static_cast<unsigned>(*std::min_element(all, all + 32));
}
inline unsigned __reduce_add_sync(unsigned, unsigned x) {
  const uint64_t* all = simt::meet_warp(x);
  return static_cast<unsigned>(std::accumulate(all, all + 32, uint64_t{0}));
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const uint64_t* all = simt::meet_warp(x);
  unsigned found = 0;
  for (int lane = 0; lane < 32; ++lane) found |= static_cast<unsigned>(all[lane]) << lane;
  return found;
}
template <typename T>
T __shfl_sync(unsigned, T x, int lane) {
  uint64_t bits = 0;
  memcpy(&bits, &x, sizeof(x));
  bits = simt::meet_warp(bits)[lane];
  memcpy(&x, &bits, sizeof(x));
  return x;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int lanes) {
  return __shfl_sync(mask, x, static_cast<int>(simt::block->current % 32) ^ lanes);
}
// One thread runs at a time; here another may take its turn before and after.
inline int atomicAdd(int* at, int x) {
  simt::yield();
  const int before = *at;
  *at += x;
  simt::yield();
  return before;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
