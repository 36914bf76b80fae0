// The tree-verify kernel for Hopper (sm_90a): the same pieces, masks and results as tree_verify.cuh,
// with warpgroup products (wgmma) and a warpgroup a role. It is launched only when it is asked for
// (launch.cu), as together with its merge it has not run on a GPU yet; ../trials holds its successors.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xptxas -v -c tree_verify_wgmma_bf16.cu
//
// The shape of it. A tile is 64 latent rows; in shared memory it is nine column blocks of 64 rows x 128
// bytes in the 128-byte swizzle, each 8 KB and complete on its own, in a ring of kSlots blocks. Tokens
// and latent columns are the M side (64) of m64nNk16, packed rows the N side, a multiple of 8:
//     S^T[64 tokens, row]  = K Q^T          A = the nine blocks,              B = Q, 4 k16 steps a block
//     O^T[64 columns, row] = V^T P^T        A = one of the 8 latent blocks, transposed, B = P
// so a block of latent columns is the unit of copying, of the product with Q and of the product with P,
// and is free for the next copy as soon as its own product is done.
//
// Four warpgroups, each a role:
//     copy     gathers rows by slot, 16 bytes a thread and copy (cp.async), block after block, as
//              far ahead as the ring allows
//     scores   S^T of a tile, block after block as they land; mask; softmax; P to shared memory. It
//              also works out the pieces and tells the others, a piece ahead
//     values   two of them, each half of the blocks of latent columns: O^T stays in their registers
// The rope block of a tile comes first in the ring: it is free after the scores, before the others.
//
// The softmax reference is lazy (see tree_verify.cuh): only a tile with a score beyond a reference by
// kMaxSlack takes the path that finds maxima and has O rescaled.
#pragma once

#include <cmath>

#include "params.h"
#include "ptx.cuh"
#include "schedule.cuh"
#include "softmax.h"
#include "views.cuh"
#include "wgmma.cuh"

namespace kdtree {

constexpr int kWgThreads = 512;  // four warpgroups
constexpr int kPieceSlots = 4;   // entries of the queue of pieces

template <typename T_, int kRows_, int kSlots_>
struct WgTile {
  using T = T_;
  static constexpr int kRows = kRows_;    // packed rows
  static constexpr int kBlock = 64;       // tokens of a tile
  static constexpr int kSlots = kSlots_;  // column blocks in flight
  static constexpr int kNTiles = kRows / 8;
  static constexpr int kColumnBlocks = 9;

  static constexpr int kSlotBytes = kBlock * 128;
  static constexpr int kQBlockBytes = kRows * 128;
  static constexpr int kKv = 0;
  static constexpr int kQ = kKv + kSlots * kSlotBytes;
  static constexpr int kP = kQ + kColumnBlocks * kQBlockBytes;
  static constexpr int kRef = kP + kRows * 128;             // [row] reference maxima
  static constexpr int kFactor = kRef + kRows * 4;          // [row] what O is rescaled by
  static constexpr int kInverse = kFactor + kRows * 4;      // [row] 1 / sum of the piece
  static constexpr int kMaskBits = kInverse + kRows * 4;    // [node of the tile][4 words]
  static constexpr int kNodeOf = kMaskBits + kRows * 16;    // [row] -> node of the tile
  static constexpr int kMoved = kNodeOf + kRows;
  static constexpr int kPieces = (kMoved + 4 + 15) / 16 * 16;  // the next pieces, see PieceQueue
  static constexpr int kBarriers = kPieces + kPieceSlots * 64;

  // Barriers, by number.
  static constexpr int kFull = 0;               // a block has landed
  static constexpr int kEmpty = kSlots;         // a block is free
  static constexpr int kPFull = 2 * kSlots;     // P, the factors and `moved` are there
  static constexpr int kPEmpty = kPFull + 1;
  static constexpr int kQEmpty = kPFull + 2;    // the piece's scores are done with Q
  static constexpr int kStatsFull = kPFull + 3;
  static constexpr int kStatsEmpty = kPFull + 4;
  static constexpr int kPieceFull = kPFull + 5;  // an entry of the queue is filled
  static constexpr int kPieceEmpty = kPieceFull + kPieceSlots;
  static constexpr int kQFull = kPieceEmpty + kPieceSlots;  // three column blocks of Q have landed
  static constexpr int kBarrierCount = kQFull + 3;
  static constexpr int kSmemBytes = kBarriers + kBarrierCount * 8;

  static_assert(kRows % 8 == 0, "packed rows are the N side of wgmma: multiples of 8");
  static_assert(kSlots >= 10, "a tile is nine blocks; fewer slots than that and one deadlocks");
  static_assert(kRows <= 72, "the results' way through the slots is laid out for 64 + 8 rows");
  static_assert(sizeof(Piece) <= 64, "an entry of the queue of pieces is 64 bytes");
  static_assert(kQ % 1024 == 0 && kP % 1024 == 0, "wgmma operands start at an atom of the swizzle, 1,024 bytes");
  static_assert(kBarriers % 8 == 0, "an mbarrier is 8 bytes, aligned to them");
  static_assert(kMaxNodes == 128, "mask bits are four 32-bit words a node");
  static_assert(kSmemBytes <= 232448, "227 KB is the most a thread block gets on any part");
};

// Where a role stands in the ring of blocks.
template <class C>
struct Ring {
  int slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ int slot_of(int ahead) const {
    const int s = slot + ahead;
    return s >= C::kSlots ? s - C::kSlots : s;
  }
  __device__ __forceinline__ uint32_t phase_of(int ahead) const {
    return slot + ahead >= C::kSlots ? phase ^ 1 : phase;
  }
  __device__ __forceinline__ void advance(int n) {
    slot += n;
    if (slot >= C::kSlots) {
      slot -= C::kSlots;
      phase ^= 1;
    }
  }
};

template <class C>
__device__ __forceinline__ uint32_t barrier(uint32_t smem, int which) {
  return smem + C::kBarriers + which * 8;
}

// The pieces, from the scores role to the others. Every reader holds an entry for as long as it works on
// the piece and reads fields from there as it needs them: registers are short.
template <class C>
class PieceQueue {
 public:
  __device__ __forceinline__ PieceQueue(char* smem_ptr, uint32_t smem) : smem_ptr_(smem_ptr), smem_(smem) {}

  // Called by whole warps of the scores role. A request of -1 is the end.
  __device__ __forceinline__ void publish(const Piece& piece, bool exists) {
    const int at = published_ % kPieceSlots;
    barrier_wait(barrier<C>(smem_, C::kPieceEmpty + at), ((published_ / kPieceSlots) & 1) ^ 1);
    if ((threadIdx.x & 127) == 0) {
      Piece* entry = reinterpret_cast<Piece*>(smem_ptr_ + C::kPieces + at * 64);
      *entry = piece;
      if (!exists) entry->request = -1;
      mbarrier_arrive(barrier<C>(smem_, C::kPieceFull + at));
    }
    ++published_;
  }
  // The next piece, or null after the last.
  __device__ __forceinline__ const Piece* next() {
    barrier_wait(barrier<C>(smem_, C::kPieceFull + taken_ % kPieceSlots), (taken_ / kPieceSlots) & 1);
    const Piece* piece = reinterpret_cast<const Piece*>(smem_ptr_ + C::kPieces + taken_ % kPieceSlots * 64);
    return piece->request < 0 ? nullptr : piece;
  }
  // The one after it, which is told before anyone begins the last one.
  __device__ __forceinline__ const Piece* after() {
    ++taken_;
    const Piece* piece = next();
    --taken_;
    return piece;
  }
  __device__ __forceinline__ void done() {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(barrier<C>(smem_, C::kPieceEmpty + taken_ % kPieceSlots));
    ++taken_;
  }
  __device__ __forceinline__ uint32_t taken() const { return taken_; }

 private:
  char* smem_ptr_;
  uint32_t smem_;
  uint32_t published_ = 0, taken_ = 0;
};

// Blocks of a tile in ring order: the rope columns, then the latent ones.
__device__ __forceinline__ int column_block(int ring_block) { return ring_block == 0 ? 8 : ring_block - 1; }

// ---- copy ---------------------------------------------------------------------------------------
template <class C>
__device__ __forceinline__ void copy_role(const TreeVerifyParams& p, char* smem_ptr, uint32_t smem) {
  // A warp's 32 copies are 4 rows x 8 chunks; a thread serves rows tid / 8 + 16 k, always chunk tid % 8.
  const int tid = threadIdx.x & 127;
  const int row0 = tid >> 3, chunk = tid & 7;
  const uint32_t dst0 = smem + row0 * 128 + ((chunk ^ (row0 & 7)) << 4);

  PieceQueue<C> queue(smem_ptr, smem);
  Ring<C> ring;
  while (const Piece* next = queue.next()) {
    const Piece& piece = *next;
    const KvView kv(p, piece);
    const int last = piece.prefix + piece.nodes - 1;
    int at = piece.begin * C::kBlock + row0;
    int slots[4];  // loaded, a tile ahead
    // Positions past the request's end repeat its last one: P is 0 there, and 0 times a row that the
    // request attends to anyway cannot make a NaN.
#pragma unroll
    for (int k = 0; k < 4; ++k) slots[k] = __ldg(kv.at(min(at + k * 16, last)));

#pragma unroll 1
    for (int i = piece.begin; i < piece.end; ++i) {
      const char* src[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) src[k] = kv.row(kv.slot(min(at + k * 16, last), slots[k])) + chunk * 16;
      at += C::kBlock;
      if (i + 1 < piece.end) {
#pragma unroll
        for (int k = 0; k < 4; ++k) slots[k] = __ldg(kv.at(min(at + k * 16, last)));
      }
      // Unrolled, so that a copy's addresses are a register and a constant: a register that has to be
      // computed anew for each copy waits until the last copy has left the queue.
#pragma unroll
      for (int b = 0; b < C::kColumnBlocks; ++b) {
        barrier_wait(barrier<C>(smem, C::kEmpty + ring.slot), ring.phase ^ 1);
        const uint32_t dst = dst0 + C::kKv + ring.slot * C::kSlotBytes;
#pragma unroll
        for (int k = 0; k < 4; ++k) cp_async_16_always(dst + k * 2048, src[k] + column_block(b) * 128);
        mbarrier_arrive_copies(barrier<C>(smem, C::kFull + ring.slot));
        ring.advance(1);
      }
    }
    queue.done();
  }
}

// ---- scores -------------------------------------------------------------------------------------
template <class C>
__device__ __forceinline__ void scores_role(const TreeVerifyParams& p, char* smem_ptr, uint32_t smem) {
  using T = typename C::T;
  constexpr int kGroup = 1;  // number of this warpgroup's own barrier
  const int tid = threadIdx.x & 127, lane = tid & 31, warp = __shfl_sync(0xffffffffu, tid >> 5, 0);
  float* ref = reinterpret_cast<float*>(smem_ptr + C::kRef);
  // While nobody reads P its memory takes what the 32 lanes that share a row have to tell each other.
  float* lanes_sm = reinterpret_cast<float*>(smem_ptr + C::kP);
  float* my_lane_sm = lanes_sm + (warp * 8 + (lane >> 2)) * C::kRows + (lane & 3) * 2;
  float* factor_sm = reinterpret_cast<float*>(smem_ptr + C::kFactor);
  float* inverse_sm = reinterpret_cast<float*>(smem_ptr + C::kInverse);
  uint32_t* bits_sm = reinterpret_cast<uint32_t*>(smem_ptr + C::kMaskBits);
  uint8_t* node_sm = reinterpret_cast<uint8_t*>(smem_ptr + C::kNodeOf);
  const float scale = p.sm_scale * kLog2e;

  // Of a tile's S^T this lane holds tokens warp * 16 + lane / 4 (+ 8) and of each n tile rows col, col + 1.
  const int col = (lane & 3) * 2;
  // P is rows x 64 tokens in the swizzle: a lane's address for the two (n tile, half) pairs of a store.
  const int matrix = lane >> 3;
  const uint32_t p_addr = smem + C::kP + ((matrix >> 1) * 8 + (lane & 7)) * 128 +
                          (((warp * 2 + (matrix & 1)) ^ (lane & 7)) << 4);

  PieceQueue<C> queue(smem_ptr, smem);
  Schedule<true> schedule(p);
  Ring<C> ring;
  uint32_t tiles = 0;
  bool more = true;
#pragma unroll 1
  for (int turn = 0;; ++turn) {  // of the pieces one is told a turn before it is worked on
    if (more) {
      Piece following;
      more = schedule.next(following);
      queue.publish(following, more);
    }
    if (turn == 0) continue;
    const Piece* current = queue.next();
    if (current == nullptr) break;
    const Piece& piece = *current;
    const int row0 = piece.tile * C::kRows;
    const int rows = min(C::kRows, piece.nodes * p.heads - row0);
    const int first_node = row0 / p.heads;

    group_sync(kGroup);  // the last piece's readers of masks are done
    if (tid < C::kRows) ref[tid] = kNothing;
    if (piece.end * C::kBlock > piece.prefix) {
      for (int r = tid; r < C::kRows; r += 128)
        node_sm[r] = static_cast<uint8_t>(min((row0 + r) / p.heads, piece.nodes - 1) - first_node);
      const MaskView mask(p, piece.request, piece.prefix, piece.nodes);
      const int last_node = (row0 + rows - 1) / p.heads;
      const int words = (piece.nodes + 31) / 32;
      for (int w = warp; w < (last_node - first_node + 1) * words; w += 4) {
        const int t = w / words, word = w % words;
        const unsigned bits = __ballot_sync(0xffffffffu, mask.sees(first_node + t, word * 32 + lane));
        if (lane == 0) bits_sm[t * 4 + word] = bits;
      }
    }
    group_sync(kGroup);

    float sum[C::kNTiles][2];
#pragma unroll
    for (int n = 0; n < C::kNTiles; ++n) sum[n][0] = sum[n][1] = 0.0f;

#pragma unroll 1
    for (int i = piece.begin; i < piece.end; ++i) {
      float s[C::kNTiles * 4];
#pragma unroll
      for (int e = 0; e < C::kNTiles * 4; ++e) s[e] = 0.0f;

      const uint32_t rope_slot = ring.slot;
#pragma unroll 1
      for (int b = 0; b < C::kColumnBlocks; ++b) {
        if (i == piece.begin && b % 3 == 0) barrier_wait(barrier<C>(smem, C::kQFull + b / 3), queue.taken() & 1);
        barrier_wait(barrier<C>(smem, C::kFull + ring.slot), ring.phase);
        proxy_fence();  // what cp.async wrote, before what wgmma reads
        wgmma_fence();
        const uint64_t k_op = operand(smem + C::kKv + ring.slot * C::kSlotBytes);
        const uint64_t q_op = operand(smem + C::kQ + column_block(b) * C::kQBlockBytes);
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_m64k16<0>(s, k_op + k * 2, q_op + k * 2, 1, T());
        wgmma_commit();
        ring.advance(1);
      }
      wgmma_wait<0>();
      if (lane == 0) {
        mbarrier_arrive(barrier<C>(smem, C::kEmpty + rope_slot));
        if (i + 1 == piece.end) mbarrier_arrive(barrier<C>(smem, C::kQEmpty));
      }

#pragma unroll
      for (int e = 0; e < C::kNTiles * 4; ++e) s[e] *= scale;
      if ((i + 1) * C::kBlock > piece.prefix) {
        const int j0 = i * C::kBlock + warp * 16 + (lane >> 2) - piece.prefix;  // node, or < 0: prefix
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int j = j0 + h * 8;
          if (j < 0) continue;
          const uint32_t bit = j < piece.nodes ? 1u << (j & 31) : 0u;  // beyond the tree: seen by none
          const uint32_t* bits = bits_sm + (j >> 5 & 3);
#pragma unroll
          for (int n = 0; n < C::kNTiles; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c)
              if (!(bits[node_sm[n * 8 + col + c] * 4] & bit)) s[n * 4 + h * 2 + c] = -INFINITY;
        }
      }

      float over = -INFINITY;
#pragma unroll
      for (int n = 0; n < C::kNTiles; ++n) {
        const float2 r = *reinterpret_cast<const float2*>(ref + n * 8 + col);
        over = fmaxf(over, fmaxf(fmaxf(s[n * 4] - r.x, s[n * 4 + 2] - r.x),
                                 fmaxf(s[n * 4 + 1] - r.y, s[n * 4 + 3] - r.y)));
      }
      const bool moved = group_any(kGroup, over > kMaxSlack);
      barrier_wait(barrier<C>(smem, C::kPEmpty), (tiles & 1) ^ 1);  // the last tile's P and factors are read
      if (moved) {
#pragma unroll
        for (int n = 0; n < C::kNTiles; ++n)
          *reinterpret_cast<float2*>(my_lane_sm + n * 8) =
              make_float2(fmaxf(s[n * 4], s[n * 4 + 2]), fmaxf(s[n * 4 + 1], s[n * 4 + 3]));
        group_sync(kGroup);
        if (tid < C::kRows) {
          float top = -INFINITY;
#pragma unroll 8
          for (int w = 0; w < 32; ++w) top = fmaxf(top, lanes_sm[w * C::kRows + tid]);
          const float before = ref[tid];
          const bool moves = top > before + kMaxSlack;
          factor_sm[tid] = moves ? exp2_approx(before - top) : 1.0f;
          if (moves) ref[tid] = top;
        }
        group_sync(kGroup);
#pragma unroll
        for (int n = 0; n < C::kNTiles; ++n) {
          const float2 factor = *reinterpret_cast<const float2*>(factor_sm + n * 8 + col);
          sum[n][0] *= factor.x;
          sum[n][1] *= factor.y;
        }
      }
#pragma unroll
      for (int n = 0; n < C::kNTiles; n += 2) {
        uint32_t packed[4];
#pragma unroll
        for (int m = n; m < n + 2 && m < C::kNTiles; ++m) {
          const float2 r = *reinterpret_cast<const float2*>(ref + m * 8 + col);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float e0 = exp2_approx(s[m * 4 + h * 2] - r.x), e1 = exp2_approx(s[m * 4 + h * 2 + 1] - r.y);
            sum[m][0] += e0;
            sum[m][1] += e1;
            packed[(m - n) * 2 + h] = pack2<T>(e0, e1);
          }
        }
        if (n + 1 < C::kNTiles) stmatrix_x4_trans(p_addr + n * 1024, packed[0], packed[1], packed[2], packed[3]);
        else stmatrix_x2_trans(p_addr + n * 1024, packed[0], packed[1]);
      }
      if (tid == 0) *reinterpret_cast<int*>(smem_ptr + C::kMoved) = moved;
      proxy_fence();  // P, before what wgmma reads
      mbarrier_arrive(barrier<C>(smem, C::kPFull));
      ++tiles;
    }

    barrier_wait(barrier<C>(smem, C::kPEmpty), (tiles & 1) ^ 1);  // the last tile's P is read
#pragma unroll
    for (int n = 0; n < C::kNTiles; ++n)
      *reinterpret_cast<float2*>(my_lane_sm + n * 8) = make_float2(sum[n][0], sum[n][1]);
    barrier_wait(barrier<C>(smem, C::kStatsEmpty), (queue.taken() & 1) ^ 1);
    group_sync(kGroup);
    if (tid < C::kRows) {
      float total = 0.0f;
#pragma unroll 8
      for (int w = 0; w < 32; ++w) total += lanes_sm[w * C::kRows + tid];
      const float top = ref[tid];
      inverse_sm[tid] = total > 0.0f ? 1.0f / total : total;  // 0 for a row that saw nothing, NaN stays
      if (tid < rows) {
        if (piece.partial_row >= 0) p.partial_ms[piece.partial_row + tid] = make_float2(top, total);
        else if (p.lse != nullptr)
          p.lse[piece.token * p.heads + row0 + tid] = total == 0.0f ? -INFINITY : (top + log2f(total)) / kLog2e;
      }
    }
    mbarrier_arrive(barrier<C>(smem, C::kStatsFull));
    queue.done();
  }
}

// Q of a piece, by the threads of both values roles, which have nothing else to do when a piece begins.
template <class C>
__device__ __forceinline__ void load_q(const TreeVerifyParams& p, const Piece& piece, uint32_t smem, uint32_t index) {
  const int tid = threadIdx.x & 255, row0 = tid >> 3, chunk = tid & 7;
  const int tile_row = piece.tile * C::kRows;
  const int rows = min(C::kRows, piece.nodes * p.heads - tile_row);
  const char* src =
      static_cast<const char*>(p.q) + (piece.token * p.heads + tile_row + row0) * kRowBytes + chunk * 16;
  const uint32_t dst = smem + C::kQ + row0 * 128 + ((chunk ^ (row0 & 7)) << 4);
  barrier_wait(barrier<C>(smem, C::kQEmpty), (index & 1) ^ 1);
#pragma unroll 1
  for (int b = 0; b < C::kColumnBlocks; ++b) {
    const char* from = src + column_block(b) * 128;
    const uint32_t to = dst + column_block(b) * C::kQBlockBytes;
#pragma unroll
    for (int k = 0; k < (C::kRows + 31) / 32; ++k)
      if (row0 + k * 32 < C::kRows)
        cp_async_16_or_zero(to + k * 4096, from + k * 32 * kRowBytes, row0 + k * 32 < rows);
    if (b % 3 == 2) mbarrier_arrive_copies(barrier<C>(smem, C::kQFull + b / 3));
  }
}

// ---- values -------------------------------------------------------------------------------------
template <class C>
__device__ __forceinline__ void values_role(const TreeVerifyParams& p, char* smem_ptr, uint32_t smem, int half) {
  using T = typename C::T;
  const int group = 2 + half;  // number of this warpgroup's own barrier
  const int tid = threadIdx.x & 127, lane = tid & 31, warp = __shfl_sync(0xffffffffu, tid >> 5, 0);
  const int col = (lane & 3) * 2;
  const float* factor_sm = reinterpret_cast<const float*>(smem_ptr + C::kFactor);
  const float* inverse_sm = reinterpret_cast<const float*>(smem_ptr + C::kInverse);

  float o[4][C::kNTiles * 4];  // of latent columns 128 j + 64 half ...
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int e = 0; e < C::kNTiles * 4; ++e) o[j][e] = 0.0f;

  PieceQueue<C> queue(smem_ptr, smem);
  Ring<C> ring;
  uint32_t tiles = 0;
  const Piece* current = queue.next();
  if (current != nullptr) load_q<C>(p, *current, smem, queue.taken());
  while (current != nullptr) {
    const Piece& piece = *current;
#pragma unroll 1
    for (int i = piece.begin; i < piece.end; ++i) {
      barrier_wait(barrier<C>(smem, C::kPFull), tiles & 1);
      proxy_fence();
      const int begun = i > piece.begin;
      if (begun && *reinterpret_cast<const volatile int*>(smem_ptr + C::kMoved)) {
#pragma unroll
        for (int n = 0; n < C::kNTiles; ++n) {
          const float2 f = *reinterpret_cast<const float2*>(factor_sm + n * 8 + col);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            o[j][n * 4] *= f.x;
            o[j][n * 4 + 1] *= f.y;
            o[j][n * 4 + 2] *= f.x;
            o[j][n * 4 + 3] *= f.y;
          }
        }
      }
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint64_t v_op = operand(smem + C::kKv + ring.slot_of(1 + 2 * j + half) * C::kSlotBytes);
        const uint64_t p_op = operand(smem + C::kP);
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma_m64k16<1>(o[j], v_op + k * (2048 >> 4), p_op + k * 2, k > 0 ? 1 : begun, T());
        wgmma_commit();
      }
      // The last tile's blocks stay: they are where O is turned over.
      const bool release = lane == 0 && i + 1 < piece.end;
      wgmma_wait<3>();
      if (release) mbarrier_arrive(barrier<C>(smem, C::kEmpty + ring.slot_of(1 + half)));
      wgmma_wait<2>();
      if (release) mbarrier_arrive(barrier<C>(smem, C::kEmpty + ring.slot_of(3 + half)));
      wgmma_wait<1>();
      if (release) mbarrier_arrive(barrier<C>(smem, C::kEmpty + ring.slot_of(5 + half)));
      wgmma_wait<0>();
      if (release) mbarrier_arrive(barrier<C>(smem, C::kEmpty + ring.slot_of(7 + half)));
      if (lane == 0) mbarrier_arrive(barrier<C>(smem, C::kPEmpty));
      if (i + 1 < piece.end) ring.advance(9);
      ++tiles;
    }

    const Piece* const following = queue.after();
    if (following != nullptr) load_q<C>(p, *following, smem, queue.taken() + 1);

    // Results, divided by their sums and 16 bits wide, to `out` or to the workspace. They pass through the
    // slots of the last tile's blocks, two column blocks at a time, a row of 64 columns being 128 bytes
    // in the swizzle: rows 0-63 of either block in a slot of its own, rows 64-71 of both in a third.
    barrier_wait(barrier<C>(smem, C::kStatsFull), queue.taken() & 1);
    const int rows = min(C::kRows, piece.nodes * p.heads - piece.tile * C::kRows);
    T* const results = piece.partial_row >= 0
                           ? reinterpret_cast<T*>(p.partial_out) + piece.partial_row * kVDim
                           : static_cast<T*>(p.out) + (piece.token * p.heads + piece.tile * C::kRows) * kVDim;
    const int matrix = lane >> 3;
    const uint32_t turned = ((matrix >> 1) * 8 + (lane & 7)) * 128 + (((warp * 2 + (matrix & 1)) ^ (lane & 7)) << 4);
    const int out_row = tid >> 3, chunk = tid & 7;  // of 16 rows at a time
#pragma unroll
    for (int round = 0; round < 2; ++round) {
      group_sync(group);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const float(&x)[C::kNTiles * 4] = o[round * 2 + side];
        const uint32_t low = turned + smem + C::kKv + ring.slot_of(1 + 2 * side + half) * C::kSlotBytes;
        const uint32_t high = turned + smem + C::kKv + ring.slot_of(5 + half) * C::kSlotBytes + side * 1024;
#pragma unroll
        for (int n = 0; n < C::kNTiles; n += 2) {
          uint32_t packed[4];
#pragma unroll
          for (int m = n; m < n + 2 && m < C::kNTiles; ++m) {
            const float2 inverse = *reinterpret_cast<const float2*>(inverse_sm + m * 8 + col);
#pragma unroll
            for (int h = 0; h < 2; ++h)
              packed[(m - n) * 2 + h] = pack2<T>(x[m * 4 + h * 2] * inverse.x, x[m * 4 + h * 2 + 1] * inverse.y);
          }
          const uint32_t to = n < 8 ? low + n * 1024 : high;
          if (n + 1 < C::kNTiles) stmatrix_x4_trans(to, packed[0], packed[1], packed[2], packed[3]);
          else stmatrix_x2_trans(to, packed[0], packed[1]);
        }
      }
      group_sync(group);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const char* low = smem_ptr + C::kKv + ring.slot_of(1 + 2 * side + half) * C::kSlotBytes;
        const char* high = smem_ptr + C::kKv + ring.slot_of(5 + half) * C::kSlotBytes + side * 1024;
        const int column = (2 * (round * 2 + side) + half) * 64 + chunk * 8;
#pragma unroll
        for (int r0 = 0; r0 < C::kRows; r0 += 16) {
          const int r = r0 + out_row;
          const char* from = r0 < 64 ? low + r * 128 : high + (r - 64) * 128;
          if (r < rows)
            *reinterpret_cast<uint4*>(results + static_cast<int64_t>(r) * kVDim + column) =
                *reinterpret_cast<const uint4*>(from + ((chunk ^ (r & 7)) << 4));
        }
      }
    }
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int j = 0; j < 4; ++j) mbarrier_arrive(barrier<C>(smem, C::kEmpty + ring.slot_of(1 + 2 * j + half)));
      mbarrier_arrive(barrier<C>(smem, C::kStatsEmpty));
    }
    ring.advance(9);
    queue.done();
    current = following;
  }
}

template <class C>
__global__ void __launch_bounds__(kWgThreads, 1) tree_verify_wgmma_kernel(const __grid_constant__ TreeVerifyParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem_ptr[];
  const uint32_t smem = smem_addr(smem_ptr);
  launch_dependents();  // the merge may take its place; it waits for this grid's writes itself
  const int which = threadIdx.x;
  if (which < C::kBarrierCount) {
    int arrivals = which < C::kEmpty ? 128 : 4;  // kFull: the copying threads; kEmpty, kQEmpty: a warpgroup's warps
    if (which == C::kPFull || which == C::kStatsFull) arrivals = 128;  // the threads of the scores role
    if (which == C::kPEmpty || which == C::kStatsEmpty) arrivals = 8;  // the warps of the values roles
    // kPieceFull: the thread that publishes; kPieceEmpty: the block's warps; kQFull: the values roles' threads
    if (which >= C::kPieceFull) arrivals = which < C::kPieceEmpty ? 1 : (which < C::kQFull ? 16 : 256);
    barrier_init(barrier<C>(smem, which), arrivals);
    barrier_init_done();
  }
  __syncthreads();
  const int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  // Registers: 40 + 120 + 2 x 176 of the 512 a thread of each role would share.
  if (role == 0) {
    registers_release<40>();
    copy_role<C>(p, smem_ptr, smem);
  } else if (role == 1) {
    registers_release<120>();
    scores_role<C>(p, smem_ptr, smem);
  } else {
    registers_take<176>();
    values_role<C>(p, smem_ptr, smem, role - 2);
  }
#endif
}

}  // namespace kdtree
