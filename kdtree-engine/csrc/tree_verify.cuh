// The tree-verify kernel: one thread block attends with one tile of packed rows to one split of a
// request's latent rows, each of which is read once from memory and serves as K and as V.
//
// Compiled through tree_verify_*.cu, e.g.
//   nvcc -O3 -std=c++17 -gencode arch=compute_90,code=sm_90 -Xptxas -v -c tree_verify_tall_bf16.cu
//
// The shape of it. A stage is kBlock latent rows in shared memory. With tokens and latent columns on
// the M side of mma.m16n8k16 and packed rows on the N side, whose granularity is 8, 72 rows (8 heads
// x 9 nodes) need no padding:
//     S^T[token, row]  = K[token, 576] Q^T          A = the stage,             B = Q
//     O^T[column, row] = V^T[column, token] P^T     A = the stage, transposed, B = P
// Each of the 8 warps owns 64 of the 512 latent columns of O in registers for the whole split. For S
// the warps are a grid of kWarpsN (over rows) x kWarpsK (over the 576 dimensions): a warp that takes a
// slice of the dimensions reads its part of Q once for all the tokens of the stage, and shared memory
// bandwidth, the limit here, pays less for the exchange of partial sums than for more reads of Q.
//
// One stage, two barriers:
//     O += V(i) P(i) and S(i+1) partial sums -> exchange buffer | barrier |
//     sum, mask, maximum, P(i+1) -> shared memory | barrier ...
//
// The softmax reference is lazy: a row's reference maximum moves only when a stage exceeds it by
// kMaxSlack (in powers of two), so O is rescaled in the first stage and then almost never. The result
// is the same number: the reference cancels, and 2^kMaxSlack is far from overflow.
#pragma once

#include <cmath>
#include <type_traits>

#include "params.h"
#include "ptx.cuh"
#include "schedule.cuh"
#include "softmax.h"
#include "views.cuh"

namespace kdtree {

// Shared memory that tiles are compiled for. sm_80 could hold 163 KB, which no tall tile fits.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kArchSmem = 232448;
#else
constexpr int kArchSmem = 101376;
#endif

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

template <typename T_, int kRows_, int kBlock_, int kStages_, int kWarpsN_>
struct Tile {
  using T = T_;
  static constexpr int kRows = kRows_;      // packed rows
  static constexpr int kBlock = kBlock_;    // tokens of a stage
  static constexpr int kStages = kStages_;  // stages in flight
  static constexpr int kWarpsN = kWarpsN_;  // warps over rows in S
  static constexpr int kWarpsK = 8 / kWarpsN_;

  static constexpr int kNTiles = kRows / 8;
  static constexpr int kMTiles = kBlock / 16;
  static constexpr int kWarpTiles = (kNTiles + kWarpsN - 1) / kWarpsN;   // n tiles of a warp in S, at most
  static constexpr int kOwned = (kNTiles + 7) / 8;  // n tiles that a warp takes through the softmax, at most

  // 16 bytes beyond a multiple of 128 put the rows of an ldmatrix on different banks.
  static constexpr int kPitch = kRowBytes + 16;
  static constexpr int kPPitch = (kRows * 2 / 16) % 2 ? kRows * 2 : kRows * 2 + 16;  // bytes of a token's P

  static constexpr int kQ = 0;
  static constexpr int kKv = kQ + kRows * kPitch;
  static constexpr int kStageBytes = kBlock * kPitch;
  static constexpr int kP = kKv + kStages * kStageBytes;
  static constexpr int kExchange = round_up(kP + kBlock * kPPitch, 16);
  static constexpr int kExchangeTile = kBlock * 8 * 4;  // one n tile of S, float32
  static constexpr int kScale = kExchange + kWarpsK * kNTiles * kExchangeTile;
  static constexpr int kRowMax = kScale + kRows * 4;
  static constexpr int kRowSum = kRowMax + kRows * 4;
  static constexpr int kMaskBits = round_up(kRowSum + kRows * 4, 16);  // [node of the tile][4 words]
  static constexpr int kNodeOf = kMaskBits + kRows * 16;               // [row] -> node of the tile
  static constexpr int kSlots = round_up(kNodeOf + kRows, 4);  // of the next stage to copy, as loaded
  static constexpr int kBarriers = round_up(kSlots + kBlock * 4, 8);
  static constexpr int kOutPitch = kVDim * 4 + 16;  // O on its way out takes the place of Q and the stages
  static constexpr int kSmemBytes = kBarriers + (kStages + 1) * 8;

  static_assert(kRows % 8 == 0, "packed rows are the N side of mma.m16n8k16: multiples of 8");
  static_assert(kBlock % 16 == 0 && kBlock <= 32, "a stage is one or two m16 tiles, one copying lane a row");
  static_assert(kNTiles >= kWarpsN, "every warp column needs at least one n tile");
  static_assert(kStages >= 2, "a stage is read while the next one is in flight");
  static_assert(kRows * kOutPitch <= kP, "O must fit where Q and the stages were");
  static_assert(kOwned <= 2, "a warp takes at most two n tiles through the softmax");
  static_assert(kMaxNodes == 128, "mask bits are four 32-bit words a node");
  static_assert(kSmemBytes <= 232448, "227 KB is the most a thread block gets on any part");
};

// Everything a thread block keeps across pieces.
template <class C>
struct Pipeline {
  uint32_t smem;       // shared-window address of the block's memory
  uint32_t phase = 0;  // bit s: parity that stage s completes next; bit kStages: that of Q
};

template <class C>
__device__ __forceinline__ void run_piece(const TreeVerifyParams& p, const Piece& piece, char* smem,
                                          Pipeline<C>& pipe) {
  using T = typename C::T;
  const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(0xffffffffu, tid >> 5, 0);
  const int rows_total = piece.nodes * p.heads;
  const int row0 = piece.row0;
  const int rows = min(C::kRows, rows_total - row0);
  const int tokens = piece.prefix + piece.nodes;
  const int first_node = row0 / p.heads;
  const int n_blocks = piece.end - piece.begin;
  const int64_t out_row0 = static_cast<int64_t>(piece.token) * p.heads + row0;
  const KvView kv(p, piece);

  float* scale_sm = reinterpret_cast<float*>(smem + C::kScale);
  float* max_sm = reinterpret_cast<float*>(smem + C::kRowMax);
  float* sum_sm = reinterpret_cast<float*>(smem + C::kRowSum);
  uint32_t* bits_sm = reinterpret_cast<uint32_t*>(smem + C::kMaskBits);
  uint8_t* node_sm = reinterpret_cast<uint8_t*>(smem + C::kNodeOf);

  // ---- copies -------------------------------------------------------------------------------
  // Positions past the request's end repeat its last one: P is 0 there, and 0 times a row that the
  // request attends to anyway cannot make a NaN, as 0 times leftover shared memory could.
  const auto position = [&](int block, int i) { return min((piece.begin + block) * C::kBlock + i, tokens - 1); };
  const char* q_src = static_cast<const char*>(p.q) + out_row0 * kRowBytes;

#if KD_BULK_COPY
  // Warps 2 to 5: they have fewer n tiles in S, and no second one in the softmax, so that the copies
  // (60 to 75 cycles each for the warp that issues them) cost little where they are.
  constexpr int kCopyWarps = 4, kFirstCopyWarp = 2;
#else
  constexpr int kCopyWarps = 8, kFirstCopyWarp = 0;
#endif
  constexpr int kWarpRows = C::kBlock / kCopyWarps;
  const int copy_row = (warp - kFirstCopyWarp) * kWarpRows;  // first row of a stage that this warp copies
  const auto my_position = [&](int block) { return position(block, copy_row + (lane & (kWarpRows - 1))); };
#if KD_BULK_COPY
  // One lane issues them, straight-line and with addresses that the compiler knows to be the same in
  // the whole warp: a copy a lane becomes a loop that waits about a hundred cycles a turn.
  const auto copy_block = [&](int stage, int block, int loaded) {
    const uint32_t bar = pipe.smem + C::kBarriers + stage * 8;
    if (tid == kFirstCopyWarp * 32) mbarrier_arrive_expect(bar, C::kBlock * kRowBytes);
    const uint64_t mine = reinterpret_cast<uint64_t>(kv.row(kv.slot(my_position(block), loaded)));
    uint64_t src[kWarpRows];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) src[r] = __shfl_sync(0xffffffffu, mine, r);
    if (elect_lane()) {
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r)
        bulk_copy(pipe.smem + C::kKv + stage * C::kStageBytes + (copy_row + r) * C::kPitch,
                  reinterpret_cast<const void*>(src[r]), kRowBytes, bar);
    }
  };
  // Slots of the next stage travel to shared memory without passing a register: a load under way would
  // be waited for where the inner loops begin.
  const bool copies = warp >= kFirstCopyWarp && warp < kFirstCopyWarp + kCopyWarps;
  const uint32_t slot_cell = pipe.smem + C::kSlots + (copy_row + lane) * 4;
  const auto fetch_slots = [&](int block) {
    if (lane < kWarpRows) cp_async_4(slot_cell, kv.at(my_position(block)));
  };
  const auto fetched_slot = [&] {
    cp_async_wait_all();  // for this lane's own copy only: a lane reads no other lane's cell
    return lane < kWarpRows ? reinterpret_cast<const volatile int*>(smem + C::kSlots)[copy_row + lane] : 0;
  };
#else
  // 64 of a row's 72 chunks of 16 bytes by the whole warp, the last 8 of its rows together.
  int next_slot;  // as loaded, of the next stage to copy
  const bool copies = true;
  const auto fetch_slots = [&](int block) { next_slot = __ldg(kv.at(my_position(block))); };
  const auto fetched_slot = [&] { return next_slot; };
  const auto copy_block = [&](int stage, int block, int loaded) {
    const int slot = kv.slot(my_position(block), loaded);
    const uint32_t dst = pipe.smem + C::kKv + stage * C::kStageBytes + copy_row * C::kPitch;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const char* src = kv.row(__shfl_sync(0xffffffffu, slot, r)) + lane * 16;
      cp_async_16(dst + r * C::kPitch + lane * 16, src);
      cp_async_16(dst + r * C::kPitch + lane * 16 + 512, src + 512);
    }
    const int r = lane >> 3;
    const char* src = kv.row(__shfl_sync(0xffffffffu, slot, r & (kWarpRows - 1))) + 1024 + (lane & 7) * 16;
    if (r < kWarpRows) cp_async_16(dst + r * C::kPitch + 1024 + (lane & 7) * 16, src);
  };
#endif
  __syncthreads();  // the last piece's readers are done
  {
    int slots[C::kStages] = {};
    if (copies) {
#pragma unroll
      for (int s = 0; s < C::kStages; ++s) slots[s] = __ldg(kv.at(my_position(s)));
    }
#if KD_BULK_COPY
    proxy_fence();
    const uint32_t bar = pipe.smem + C::kBarriers + C::kStages * 8;
    if (tid == 0) mbarrier_arrive_expect(bar, rows * kRowBytes);
#pragma unroll
    for (int r = 0; r < C::kRows / 8; ++r) {
      const int row = warp * (C::kRows / 8) + r;
      if (row < rows && elect_lane()) bulk_copy(pipe.smem + C::kQ + row * C::kPitch, q_src + row * kRowBytes, kRowBytes, bar);
    }
#else
    for (int c = tid; c < rows * 72; c += kThreads) {
      const int r = c / 72, at = c % 72 * 16;
      cp_async_16(pipe.smem + C::kQ + r * C::kPitch + at, q_src + static_cast<int64_t>(r) * kRowBytes + at);
    }
#endif
#pragma unroll
    for (int s = 0; s < C::kStages; ++s) {
      if (copies && s < n_blocks) copy_block(s, s, slots[s]);
#if !KD_BULK_COPY
      cp_async_commit();
#endif
    }
    if (copies) fetch_slots(C::kStages);
  }

  // Rows of the tile beyond the request's: zeros, so that they stay finite.
  for (int c = rows * 72 + tid; c < C::kRows * 72; c += kThreads)
    *reinterpret_cast<uint4*>(smem + C::kQ + c / 72 * C::kPitch + c % 72 * 16) = make_uint4(0, 0, 0, 0);

  // The tree mask of this tile's nodes, as bits. Only a split that reaches the tree needs it.
  const bool has_draft = piece.end * C::kBlock > piece.prefix;
  if (has_draft) {
    for (int r = tid; r < C::kRows; r += kThreads)
      node_sm[r] = static_cast<uint8_t>(min((row0 + r) / p.heads, piece.nodes - 1) - first_node);
    const MaskView mask(p, piece.request, piece.prefix, piece.nodes);
    const int last_node = (row0 + rows - 1) / p.heads;
    const int words = (piece.nodes + 31) / 32;
    for (int w = warp; w < (last_node - first_node + 1) * words; w += 8) {
      const int t = w / words, word = w % words;
      const unsigned bits = __ballot_sync(0xffffffffu, mask.sees(first_node + t, word * 32 + lane));
      if (lane == 0) bits_sm[t * 4 + word] = bits;
    }
  }

  // ---- the warp's share of S ------------------------------------------------------------------
  // n tiles [n0, n0 + n_mine) and k16 steps [k0, k1). The warp columns that have one n tile more sit at
  // the low end for even slices of the dimensions and at the high end for odd ones: the four tensor
  // cores, each serving warps w and w + 4, then get nearly equal work.
  const int wn = warp % C::kWarpsN, wk = warp / C::kWarpsN;
  constexpr int kExtra = C::kNTiles % C::kWarpsN, kFew = C::kNTiles / C::kWarpsN;
  const int ahead = wk & 1 ? max(0, wn - (C::kWarpsN - kExtra)) : min(wn, kExtra);
  const bool has_extra = kExtra == 0 || (wk & 1 ? wn >= C::kWarpsN - kExtra : wn < kExtra);
  const int n0 = wn * kFew + ahead;
  const int k0 = 36 * wk / C::kWarpsK, k1 = 36 * (wk + 1) / C::kWarpsK;
  const int n_mine = C::kWarpTiles - (has_extra ? 0 : 1);
  const uint32_t a_lane = (lane & 15) * C::kPitch + (lane >> 4) * 16;
  const uint32_t b_addr = pipe.smem + C::kQ + (n0 * 8 + (lane & 7) + ((lane >> 4) << 3)) * C::kPitch +
                          ((lane >> 3) & 1) * 16 + k0 * 32;
  const uint32_t b_addr_last = pipe.smem + C::kQ + ((n0 + C::kWarpTiles - 1) * 8 + (lane & 7)) * C::kPitch +
                               ((lane >> 3) & 1) * 16 + k0 * 32;
  const uint32_t v_lane = ((lane & 7) + ((lane >> 4) << 3)) * C::kPitch + warp * 128 + ((lane >> 3) & 1) * 16;
  const uint32_t p_lane = pipe.smem + C::kP + ((lane & 7) + ((lane >> 3) & 1) * 8) * C::kPPitch + (lane >> 4) * 16;

  float o[4][C::kNTiles][4];
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int n = 0; n < C::kNTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[m][n][e] = 0.0f;

  // Softmax of n tiles warp, warp + 8: this lane's two rows' reference maxima, and its part of the sums.
  float row_max[C::kOwned][2], row_sum[C::kOwned][2];
#pragma unroll
  for (int w = 0; w < C::kOwned; ++w) {
    row_max[w][0] = row_max[w][1] = kNothing;
    row_sum[w][0] = row_sum[w][1] = 0.0f;
  }

  const float scale = p.sm_scale * kLog2e;

  // S^T = K Q^T of one stage, over my dimensions and n tiles; partial sums of n tiles that another warp
  // finishes go to the exchange buffer. The fragments of a k16 step are loaded during the one before.
  const auto scores = [&](uint32_t kv_stage) {
    float s[C::kMTiles][C::kWarpTiles][4];
#pragma unroll
    for (int m = 0; m < C::kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < C::kWarpTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] = 0.0f;

    uint32_t a[2][C::kMTiles][4], b[2][C::kWarpTiles][2];
    const uint32_t a_addr = kv_stage + a_lane + k0 * 32;
    const auto load = [&](int buffer, int k) {
#pragma unroll
      for (int m = 0; m < C::kMTiles; ++m) ldmatrix_x4(a[buffer][m], a_addr + m * 16 * C::kPitch + k * 32);
#pragma unroll
      for (int n = 0; n + 1 < C::kWarpTiles; n += 2)
        ldmatrix_x4(b[buffer][n][0], b[buffer][n][1], b[buffer][n + 1][0], b[buffer][n + 1][1],
                    b_addr + n * 8 * C::kPitch + k * 32);
      if constexpr (C::kWarpTiles % 2)
        if (has_extra)
          ldmatrix_x2(b[buffer][C::kWarpTiles - 1][0], b[buffer][C::kWarpTiles - 1][1], b_addr_last + k * 32);
    };
    const auto multiply = [&](int buffer) {
#pragma unroll
      for (int n = 0; n < C::kWarpTiles; ++n)
        if (n < C::kWarpTiles - 1 || has_extra)
#pragma unroll
          for (int m = 0; m < C::kMTiles; ++m)
            mma_16816<T>(s[m][n], a[buffer][m], b[buffer][n][0], b[buffer][n][1]);
    };
    constexpr int kSteps = 36 / C::kWarpsK;
    load(0, 0);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (k + 1 < kSteps) load((k + 1) & 1, k + 1);
      multiply(k & 1);
    }
    if constexpr (36 % C::kWarpsK) {
      if (k0 + kSteps < k1) {
        load(0, kSteps);
        multiply(0);
      }
    }

    // All partial sums go through shared memory, this warp's own too: registers are what the steps above
    // are short of, at 72 rows.
#pragma unroll
    for (int n = 0; n < C::kWarpTiles; ++n) {
      if (n < n_mine) {
        float4* dst = reinterpret_cast<float4*>(smem + C::kExchange + (wk * C::kNTiles + n0 + n) * C::kExchangeTile);
#pragma unroll
        for (int m = 0; m < C::kMTiles; ++m)
          dst[m * 32 + lane] = make_float4(s[m][n][0], s[m][n][1], s[m][n][2], s[m][n][3]);
      }
    }
  };

  // Softmax of my n tiles of stage i: sum over the slices, scale, mask, maximum, exponentials -> P.
  // True if a reference maximum moved.
  const auto softmax_of = [&](auto count, int i) {
    const int pos0 = (piece.begin + i) * C::kBlock;
    const bool masked = pos0 + C::kBlock > piece.prefix;
    bool moved = false;
#pragma unroll
    for (int w = 0; w < decltype(count)::value; ++w) {
      const int n = warp + w * 8;
      const int col = n * 8 + (lane & 3) * 2;  // my two rows of the tile: col, col + 1
      const float4* partial = reinterpret_cast<const float4*>(smem + C::kExchange + n * C::kExchangeTile) + lane;
      float x[C::kMTiles][4];
#pragma unroll
      for (int m = 0; m < C::kMTiles; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][e] = 0.0f;
#pragma unroll
        for (int plane = 0; plane < C::kWarpsK; ++plane) {
          const float4 part = partial[plane * C::kNTiles * (C::kExchangeTile / 16) + m * 32];
          x[m][0] += part.x;
          x[m][1] += part.y;
          x[m][2] += part.z;
          x[m][3] += part.w;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][e] *= scale;
      }
      if (masked) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const uint32_t* bits = bits_sm + node_sm[col + c] * 4;
#pragma unroll
          for (int m = 0; m < C::kMTiles; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int j = pos0 + m * 16 + h * 8 + (lane >> 2) - piece.prefix;  // node, or < 0: prefix
              const bool seen = j < 0 || (j < piece.nodes && ((bits[j >> 5] >> (j & 31)) & 1));
              if (!seen) x[m][h * 2 + c] = -INFINITY;
            }
        }
      }
      float factor[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float top = fmaxf(x[0][c], x[0][c + 2]);
#pragma unroll
        for (int m = 1; m < C::kMTiles; ++m) top = fmaxf(top, fmaxf(x[m][c], x[m][c + 2]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 4));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 8));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 16));
        factor[c] = 1.0f;
        if (top > row_max[w][c] + kMaxSlack) {
          factor[c] = exp2_approx(row_max[w][c] - top);
          row_max[w][c] = top;
          row_sum[w][c] *= factor[c];
          moved = true;
        }
      }
      if (lane < 4) *reinterpret_cast<float2*>(scale_sm + col) = make_float2(factor[0], factor[1]);
      char* p_dst = smem + C::kP + (lane >> 2) * C::kPPitch + col * 2;
#pragma unroll
      for (int m = 0; m < C::kMTiles; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float e0 = exp2_approx(x[m][h * 2] - row_max[w][0]);
          const float e1 = exp2_approx(x[m][h * 2 + 1] - row_max[w][1]);
          row_sum[w][0] += e0;
          row_sum[w][1] += e1;
          *reinterpret_cast<uint32_t*>(p_dst + (m * 16 + h * 8) * C::kPPitch) = pack2<T>(e0, e1);
        }
    }
    return moved;
  };
  // Two tiles in one go, so that their latencies overlap.
  const auto softmax = [&](int i) {
    if constexpr (C::kOwned == 2)
      if (warp + 8 < C::kNTiles) return softmax_of(std::integral_constant<int, 2>{}, i);
    return warp < C::kNTiles ? softmax_of(std::integral_constant<int, 1>{}, i) : false;
  };

  // O^T += V^T P^T of stage i, over my 64 latent columns.
  const auto accumulate = [&](uint32_t kv_stage) {
#pragma unroll
    for (int k = 0; k < C::kMTiles; ++k) {
      uint32_t a[4][4];
#pragma unroll
      for (int m = 0; m < 4; ++m) ldmatrix_x4_trans(a[m], kv_stage + v_lane + k * 16 * C::kPitch + m * 32);
#pragma unroll
      for (int n = 0; n < C::kNTiles; n += 2) {
        uint32_t b[4];
        const uint32_t addr = p_lane + k * 16 * C::kPPitch + n * 16;
        if (n + 1 < C::kNTiles) ldmatrix_x4_trans(b, addr);
        else ldmatrix_x2_trans(b[0], b[1], addr);
#pragma unroll
        for (int m = 0; m < 4; ++m) mma_16816<T>(o[m][n], a[m], b[0], b[1]);
        if (n + 1 < C::kNTiles)
#pragma unroll
          for (int m = 0; m < 4; ++m) mma_16816<T>(o[m][n + 1], a[m], b[2], b[3]);
      }
    }
  };

  // Waits for the stage that block i is in.
  const auto wait_block = [&](int i, int stage) {
#if KD_BULK_COPY
    static_cast<void>(i);
    mbarrier_wait(pipe.smem + C::kBarriers + stage * 8, (pipe.phase >> stage) & 1);
    pipe.phase ^= 1u << stage;
#else
    // Copies committed but not yet needed: kStages - 1 at the start, one less later, since a stage is
    // refilled a round after it was last waited for.
    static_cast<void>(stage);
    if (i == 0) cp_async_wait<C::kStages - 1>();
    else cp_async_wait<C::kStages - 2>();
    __syncthreads();
#endif
  };

  __syncthreads();  // mask bits, zero rows
#if KD_BULK_COPY
  mbarrier_wait(pipe.smem + C::kBarriers + C::kStages * 8, (pipe.phase >> C::kStages) & 1);
  pipe.phase ^= 1u << C::kStages;
#endif
  int stage = C::kStages - 1, next_stage = 0;
#pragma unroll 1
  for (int i = -1; i < n_blocks; ++i) {
    // O += V(i) P(i) is bound by the tensor cores, S(i + 1) by shared memory: of the two warps that
    // share a tensor core one does the first first, the other the second.
    const bool more = i + 1 < n_blocks;

    // Refill the stage that everyone left at the barrier before the last one.
    if (i >= 1) {
      const int block = i - 1 + C::kStages;
      if (copies && block < n_blocks) {
        copy_block(stage == 0 ? C::kStages - 1 : stage - 1, block, fetched_slot());
        fetch_slots(block + 1);
      }
#if !KD_BULK_COPY
      cp_async_commit();
#endif
    }
#if !KD_BULK_COPY
    if (more) wait_block(i + 1, next_stage);
#endif
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if (turn == (warp >> 2)) {
        if (i >= 0) accumulate(pipe.smem + C::kKv + stage * C::kStageBytes);
      } else if (more) {
#if KD_BULK_COPY
        wait_block(i + 1, next_stage);
#endif
        scores(pipe.smem + C::kKv + next_stage * C::kStageBytes);
      }
    }
    if (!more) break;
    __syncthreads();  // partial sums are there; P and stage i are free
    const bool moved = softmax(i + 1);
    if (__syncthreads_or(moved)) {  // P and the factors are there
#pragma unroll
      for (int n = 0; n < C::kNTiles; ++n) {
        const float2 f = *reinterpret_cast<const float2*>(scale_sm + n * 8 + (lane & 3) * 2);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          o[m][n][0] *= f.x;
          o[m][n][1] *= f.y;
          o[m][n][2] *= f.x;
          o[m][n][3] *= f.y;
        }
      }
    }
    stage = next_stage;
    next_stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }
  // The next piece starts at stage 0 again; the parities in pipe.phase go on from where they are.
  cp_async_wait_all();

  // ---- results ---------------------------------------------------------------------------------
#pragma unroll
  for (int w = 0; w < C::kOwned; ++w) {
    if (warp + w * 8 >= C::kNTiles) break;
    const int row = (warp + w * 8) * 8 + lane * 2;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      row_sum[w][c] += __shfl_xor_sync(0xffffffffu, row_sum[w][c], 4);
      row_sum[w][c] += __shfl_xor_sync(0xffffffffu, row_sum[w][c], 8);
      row_sum[w][c] += __shfl_xor_sync(0xffffffffu, row_sum[w][c], 16);
      if (lane < 4) {
        max_sm[row + c] = row_max[w][c];
        sum_sm[row + c] = row_sum[w][c];
      }
    }
  }
  __syncthreads();

  // O goes out through shared memory, row by row, in whole lines.
  {
    float* o_sm = reinterpret_cast<float*>(smem) + warp * 64 + (lane >> 2);
#pragma unroll
    for (int n = 0; n < C::kNTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            o_sm[(n * 8 + (lane & 3) * 2 + c) * (C::kOutPitch / 4) + m * 16 + h * 8] = o[m][n][h * 2 + c];
  }
  __syncthreads();
  if (piece.partial_row >= 0) {
    float* dst = p.partial_out + static_cast<int64_t>(piece.partial_row) * kVDim;
#pragma unroll 4
    for (int c = tid; c < rows * (kVDim / 4); c += kThreads) {
      const int r = c / (kVDim / 4), at = c % (kVDim / 4) * 4;
      *reinterpret_cast<float4*>(dst + r * kVDim + at) =
          *reinterpret_cast<const float4*>(smem + r * C::kOutPitch + at * 4);
    }
    if (tid < rows) p.partial_ms[piece.partial_row + tid] = make_float2(max_sm[tid], sum_sm[tid]);
  } else {
    T* dst = static_cast<T*>(p.out) + out_row0 * kVDim;
#pragma unroll 2
    for (int c = tid; c < rows * (kVDim / 8); c += kThreads) {
      const int r = c / (kVDim / 8), at = c % (kVDim / 8) * 8;
      const float sum = sum_sm[r];
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      const float4 lo = *reinterpret_cast<const float4*>(smem + r * C::kOutPitch + at * 4);
      const float4 hi = *reinterpret_cast<const float4*>(smem + r * C::kOutPitch + at * 4 + 16);
      *reinterpret_cast<uint4*>(dst + r * kVDim + at) =
          make_uint4(pack2<T>(lo.x * inverse, lo.y * inverse), pack2<T>(lo.z * inverse, lo.w * inverse),
                     pack2<T>(hi.x * inverse, hi.y * inverse), pack2<T>(hi.z * inverse, hi.w * inverse));
    }
    if (p.lse != nullptr && tid < rows)
      p.lse[out_row0 + tid] = sum_sm[tid] == 0.0f ? -INFINITY : (max_sm[tid] + log2f(sum_sm[tid])) / kLog2e;
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 1) tree_verify_kernel(const __grid_constant__ TreeVerifyParams p) {
  if constexpr (C::kSmemBytes > kArchSmem) {
    __trap();  // compiled for a part that cannot hold the tile: launch.cu never picks it there
  } else {
    extern __shared__ __align__(128) char smem[];
    Pipeline<C> pipe;
    pipe.smem = smem_addr(smem);
    launch_dependents();  // the merge may take its place; it waits for this grid's writes itself
#if KD_BULK_COPY
    if (threadIdx.x == 0) {
      for (int s = 0; s <= C::kStages; ++s) mbarrier_init(pipe.smem + C::kBarriers + s * 8, 1);
      fence_mbarrier_init();
    }
    // Every thread sees the barriers after run_piece's first __syncthreads.
#endif
    Schedule schedule(p);
    Piece piece;
    while (schedule.next(piece)) run_piece<C>(p, piece, smem, pipe);
  }
}

}  // namespace kdtree
