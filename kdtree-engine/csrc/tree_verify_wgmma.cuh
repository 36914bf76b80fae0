// The tree-verify kernel for Hopper (sm_90a): the same pieces, masks and results as tree_verify.cuh,
// with warpgroup products (wgmma), a warpgroup a role, and the merge in the same launch.
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
// Code that runs for the first time is fetched from far away, and a service runs other kernels between two
// of these: at short prefixes that took longer than the attention. So while the first rows are on their
// way, scores and values go once through their code on nothing (`rehearsal`), with all that others would
// see left out.
//
// The softmax reference is lazy (see tree_verify.cuh): only a tile with a score beyond a reference by
// kMaxSlack takes the path that finds maxima and has O rescaled.
#pragma once

#include <cuda.h>

#include <cmath>

#include "merge_tail.cuh"
#include "params.h"
#include "ptx.cuh"
#include "schedule.cuh"
#include "softmax.h"
#include "views.cuh"
#include "wgmma.cuh"

namespace kdtree {

constexpr int kWgThreads = 512;  // four warpgroups
constexpr int kPieceSlots = 2;   // entries of the queue of pieces

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
  static constexpr int kRef = kP + kRows * 128;           // [row] reference maxima
  static constexpr int kFactor = kRef + kRows * 4;        // [row] what O is rescaled by; after the last tile of a
  static constexpr int kInverse = kFactor;                //       piece, 1 / sum of the piece
  static constexpr int kMoved = kFactor + kRows * 4;
  static constexpr int kPieces = (kMoved + 4 + 7) / 8 * 8;  // the next pieces, see PieceQueue
  static constexpr int kBarriers = kPieces + kPieceSlots * static_cast<int>(sizeof(Piece));

  // Barriers, by number.
  static constexpr int kFull = 0;               // a block has landed
  static constexpr int kEmpty = kSlots;         // a block is free
  static constexpr int kPFull = 2 * kSlots;     // P, the factors and `moved` are there
  static constexpr int kPEmpty = kPFull + 1;
  static constexpr int kQEmpty = kPFull + 2;    // the piece's scores are done with Q and its memory
  static constexpr int kStatsFull = kPFull + 3;
  static constexpr int kStatsEmpty = kPFull + 4;
  static constexpr int kPieceFull = kPFull + 5;  // an entry of the queue is filled
  static constexpr int kPieceEmpty = kPieceFull + kPieceSlots;
  static constexpr int kQFull = kPieceEmpty + kPieceSlots;  // four column blocks of Q have landed, or the other five
  static constexpr int kBarrierCount = kQFull + 2;
  static constexpr int kSmemBytes = kBarriers + kBarrierCount * 8;

  static_assert(kRows * 128 <= kColumnBlocks * kQBlockBytes, "the lanes' sums meet in Q's memory");
  static_assert(kRows % 8 == 0, "packed rows are the N side of wgmma: multiples of 8");
  static_assert(kSlots >= 10, "a tile is nine blocks; fewer slots than that and one deadlocks");
  static_assert(kNTiles * 2 <= 32, "a lane's rows of a tile are the bits of a word");
  static_assert(kRows <= 72, "the results' way through the slots is laid out for 64 + 8 rows");
  static_assert(kSlotBytes >= kRows * 17, "the mask's bits pass through the slot of the rope block");
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

  // Called by whole warps of the scores role: the piece at hand (0), or the one after it (1). A request of -1
  // is the end.
  __device__ __forceinline__ void publish(const Piece& piece, bool exists, uint32_t ahead) {
    const uint32_t number = taken_ + ahead;
    const int at = number % kPieceSlots;
    mbarrier_wait(barrier<C>(smem_, C::kPieceEmpty + at), ((number / kPieceSlots) & 1) ^ 1);
    if ((threadIdx.x & 127) == 0) {
      Piece* entry = reinterpret_cast<Piece*>(smem_ptr_ + C::kPieces) + at;
      *entry = piece;
      if (!exists) entry->request = -1;
      mbarrier_arrive(barrier<C>(smem_, C::kPieceFull + at));
    }
  }
  // The next piece, or null after the last.
  __device__ __forceinline__ const Piece* next() {
    mbarrier_wait(barrier<C>(smem_, C::kPieceFull + taken_ % kPieceSlots), (taken_ / kPieceSlots) & 1);
    const Piece* piece = reinterpret_cast<const Piece*>(smem_ptr_ + C::kPieces) + taken_ % kPieceSlots;
    return piece->request < 0 ? nullptr : piece;
  }
  // The piece at hand (0), or the one after it (1), which is told before anyone begins the one at hand.
  __device__ __forceinline__ const Piece* peek(int ahead) {
    taken_ += ahead;
    const Piece* piece = next();
    taken_ -= ahead;
    return piece;
  }
  // Without a wait: for who has seen it already.
  __device__ __forceinline__ const Piece& at_hand() const {
    return reinterpret_cast<const Piece*>(smem_ptr_ + C::kPieces)[taken_ % kPieceSlots];
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
  uint32_t taken_ = 0;
};

// Blocks of a tile in ring order: the rope columns, then the latent ones.
__device__ __forceinline__ int column_block(int ring_block) { return ring_block == 0 ? 8 : ring_block - 1; }

// What other roles will touch for the first time, each on a page of its own: an address that has not been
// translated of late costs more than the memory behind it.
__device__ __forceinline__ void prefetch_pages(const TreeVerifyParams& p, int which) {
  const void* page = nullptr;
  if (which == 0) page = p.kv_indices.data;
  if (which == 1) page = p.draft_slots.data;
  if (which == 2) page = p.mask_indptr.data;
  if (which == 3) page = p.mask;
  if (which == 4) page = p.kv_pool;
  if (which == 5) page = p.partial_out;
  if (which == 6) page = p.partial_ms;
  if (which == 7) page = p.out;
  if (which == 8) page = p.arrivals;
  if (page != nullptr) prefetch(page);
}

template <class C>
__device__ __forceinline__ void init_barriers(uint32_t smem) {
  const int which = threadIdx.x;  // of the copy role
  if (which < C::kBarrierCount) {
    int arrivals = which < C::kEmpty ? 128 : 4;  // kFull: the copying threads; kEmpty, kQEmpty: a warpgroup's warps
    if (which == C::kPFull || which == C::kStatsFull) arrivals = 128;  // the threads of the scores role
    if (which == C::kPEmpty || which == C::kStatsEmpty) arrivals = 8;  // the warps of the values roles
    // kPieceFull: the thread that publishes; kPieceEmpty: the block's warps; kQFull: the thread that copies Q
    if (which >= C::kPieceFull) arrivals = which < C::kPieceEmpty || which >= C::kQFull ? 1 : 16;
    mbarrier_init(barrier<C>(smem, which), arrivals);
    fence_mbarrier_init();
  }
}

// ---- copy ---------------------------------------------------------------------------------------
template <class C>
__device__ __forceinline__ void copy_role(const TreeVerifyParams& p, char* smem_ptr, uint32_t smem) {
  // A warp's 32 copies are 4 rows x 8 chunks; a thread serves rows tid / 8 + 16 k, always chunk tid % 8.
  const int tid = thread_number() & 127;
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
    for (int k = 0; k < 4; ++k) slots[k] = load_now(kv.at(min(at + k * 16, last)));

#pragma unroll 1
    for (int i = piece.begin; i < piece.end; ++i) {
      const char* src[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) src[k] = kv.row(kv.slot(min(at + k * 16, last), slots[k])) + chunk * 16;
      at += C::kBlock;
      // Unrolled, so that a copy's addresses are a register and a constant: a register that has to be
      // computed anew for each copy waits until the last copy has left the queue.
#pragma unroll
      for (int b = 0; b < C::kColumnBlocks; ++b) {
        mbarrier_wait(barrier<C>(smem, C::kEmpty + ring.slot), ring.phase ^ 1);
        const uint32_t dst = dst0 + C::kKv + ring.slot * C::kSlotBytes;
#pragma unroll
        for (int k = 0; k < 4; ++k) cp_async_16(dst + k * 2048, src[k] + column_block(b) * 128);
        mbarrier_arrive_copies(barrier<C>(smem, C::kFull + ring.slot));
        ring.advance(1);
        // Amid the copies: at the head of the loop the addresses of this tile would wait for them as well.
        if (b == 4 && i + 1 < piece.end) {
#pragma unroll
          for (int k = 0; k < 4; ++k) slots[k] = load_now(kv.at(min(at + k * 16, last)));
        }
      }
    }
    queue.done();
  }
}

// ---- scores -------------------------------------------------------------------------------------
// Of some blocks of a tile, from number b in ring order on. One fence for all of them: it costs as much as
// the products of a block.
template <class C, int kBlocks>
__device__ __forceinline__ void products_with_q(float (&s)[C::kNTiles * 4], uint32_t smem, Ring<C>& ring, int b) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) mbarrier_wait(barrier<C>(smem, C::kFull + ring.slot_of(n)), ring.phase_of(n));
  proxy_fence();  // what cp.async wrote, before what wgmma reads
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    const uint64_t k_op = operand(smem + C::kKv + ring.slot_of(n) * C::kSlotBytes);
    const uint64_t q_op = operand(smem + C::kQ + (b + n) * C::kQBlockBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_m64k16<0>(s, k_op + k * 2, q_op + k * 2, b + n + k > 0, typename C::T());
  }
  wgmma_commit();
  ring.advance(kBlocks);
}

// Of the scores of tile i, those that the tree mask hides become what exp2 makes 0 of. Through `scratch`, a slot
// of the ring that is free but not yet given back, the warps tell each other the bits of the nodes' masks.
template <class C>
__device__ __forceinline__ void hide_unseen(const TreeVerifyParams& p, const Piece& piece, float (&s)[C::kNTiles * 4],
                                            int i, uint32_t* scratch) {
  constexpr int kGroup = 1;
  const int row0 = piece.row0, rows = piece.rows;
  const int first_node = row0 / p.heads;
  const int nodes = (row0 + rows - 1) / p.heads + 1 - first_node, words = (piece.nodes + 31) / 32;
  const MaskView mask(p, piece.request, piece.prefix, piece.nodes);
  group_sync(kGroup);  // nobody's product reads the slot any more
#pragma unroll 1
  for (int w = 0; w < words; ++w) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
#pragma unroll 1
    for (int t = warp; t < nodes; t += 16) {
      bool sees[4];  // four loads under way at once
#pragma unroll
      for (int k = 0; k < 4; ++k) sees[k] = t + 4 * k < nodes && mask.sees(first_node + t + 4 * k, w * 32 + lane);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const unsigned bits = __ballot_sync(0xffffffffu, sees[k]);
        if (lane == 0 && t + 4 * k < nodes) scratch[(t + 4 * k) * 4 + w] = bits;
      }
    }
  }
  uint8_t* const node_of = reinterpret_cast<uint8_t*>(scratch + C::kRows * 4);  // [row]
  if (const int row = threadIdx.x & 127; row < C::kRows)
    node_of[row] = static_cast<uint8_t>(min((row0 + row) / p.heads, piece.nodes - 1) - first_node);
  group_sync(kGroup);

  // Which of this lane's rows see its tokens j0 and j0 + 8, a bit a row. Where the eight rows of an n tile are of
  // one node, the two that the lane has of it are asked for together.
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  const int col = (lane & 3) * 2, step = p.heads % 8 == 0 ? 2 : 1;
  const int j0 = i * C::kBlock + warp * 16 + (lane >> 2) - piece.prefix;  // node, or < 0: prefix
  uint32_t seen0 = 0, seen1 = 0;
#pragma unroll 1
  for (int e = 0; e < C::kNTiles * 2; e += step) {
    const uint32_t* const bits = scratch + node_of[(e >> 1) * 8 + col + (e & 1)] * 4;
    const auto sees = [&](int j) {
      if (j < 0) return true;
      return j < piece.nodes && (bits[j >> 5] >> (j & 31) & 1) != 0;  // beyond the tree: seen by none
    };
    const uint32_t both = step == 2 ? 3u : 1u;
    if (sees(j0)) seen0 |= both << e;
    if (sees(j0 + 8)) seen1 |= both << e;
  }
#pragma unroll
  for (int n = 0; n < C::kNTiles; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (!(seen0 & 1u << (n * 2 + c))) s[n * 4 + c] = -INFINITY;
      if (!(seen1 & 1u << (n * 2 + c))) s[n * 4 + 2 + c] = -INFINITY;
    }
}

template <class C>
__device__ __forceinline__ void scores_role(const TreeVerifyParams& p, char* smem_ptr, uint32_t smem) {
  using T = typename C::T;
  constexpr int kGroup = 1;  // number of this warpgroup's own barrier
  const int tid = thread_number() & 127, lane = tid & 31, warp = __shfl_sync(0xffffffffu, tid >> 5, 0);
  float* ref = reinterpret_cast<float*>(smem_ptr + C::kRef);
  // While nobody reads P its memory takes what the 32 lanes that share a row have to tell each other.
  float* lanes_sm = reinterpret_cast<float*>(smem_ptr + C::kP);
  float* my_lane_sm = lanes_sm + (warp * 8 + (lane >> 2)) * C::kRows + (lane & 3) * 2;
  float* factor_sm = reinterpret_cast<float*>(smem_ptr + C::kFactor);
  float* inverse_sm = reinterpret_cast<float*>(smem_ptr + C::kInverse);
  const float scale = p.sm_scale * kLog2e;

  // Of a tile's S^T this lane holds tokens warp * 16 + lane / 4 (+ 8) and of each n tile rows col, col + 1.
  const int col = (lane & 3) * 2;
  // P is rows x 64 tokens in the swizzle: a lane's address for the two (n tile, half) pairs of a store.
  const int matrix = lane >> 3;
  const uint32_t p_addr = smem + C::kP + ((matrix >> 1) * 8 + (lane & 7)) * 128 +
                          (((warp * 2 + (matrix & 1)) ^ (lane & 7)) << 4);

  PieceQueue<C> queue(smem_ptr, smem);
  Schedule schedule(p);
  Ring<C> ring;
  uint32_t given_back = 0;  // the barrier (and the parity, in bit 0) of the last tile's first latent slot
  // Of the pieces one is told a turn before it is worked on; kTold: there are no more.
  constexpr int kTold = 1 << 8, kOdd = 1 << 9;  // kOdd: an odd number of tiles so far
#pragma unroll 1
  for (int turn = 0;; turn = min((turn & 0xff) + 1, 3) | (turn & (kTold | kOdd))) {
    const int number = turn & 0xff;
    if (number != 1 && !(turn & kTold)) {
      Piece following;
      const bool exists = schedule.next(following);
      if (number == 0) __syncthreads();  // from here on the barriers are used
      queue.publish(following, exists, number > 0);
      if (!exists) turn |= kTold;
    }
    if (number == 0) continue;
    const Piece* current = queue.next();
    if (current == nullptr) break;
    const Piece& piece = *current;
    const bool rehearsal = number == 1;  // see the head of this file
    if (tid < C::kRows) ref[tid] = kNothing;
    group_sync(kGroup);

    float sum[C::kNTiles][2];
#pragma unroll
    for (int n = 0; n < C::kNTiles; ++n) sum[n][0] = sum[n][1] = 0.0f;

#pragma unroll 1
    for (int i = rehearsal ? piece.end - 1 : piece.begin; i < piece.end; ++i) {
      float s[C::kNTiles * 4];
#pragma unroll
      for (int e = 0; e < C::kNTiles * 4; ++e) s[e] = 0.0f;

      const uint32_t rope_slot = ring.slot;
      if (!rehearsal) {
        const uint32_t first = barrier<C>(smem, C::kEmpty + ring.slot_of(1)) | ring.phase_of(1);
#pragma unroll 1
        for (int b = 0; b < 8; b += 4) {
          if (i == piece.begin) mbarrier_wait(barrier<C>(smem, C::kQFull + b / 4), queue.taken() & 1);
          // The last tile's first product with V goes before most of the products with Q, which could all run
          // already: its slot is where the last block of this tile has to land.
          else if (b == 4) mbarrier_wait(given_back & ~1u, given_back & 1);
          products_with_q<C, 4>(s, smem, ring, b);
        }
        given_back = first;
        products_with_q<C, 1>(s, smem, ring, 8);
      }
      wgmma_wait<0>();
      const auto give_back = [&] {
        __syncwarp();  // all lanes have read what they wanted of the slot
        if (lane != 0 || rehearsal) return;
        mbarrier_arrive(barrier<C>(smem, C::kEmpty + rope_slot));
      };
      const bool tail = (i + 1) * C::kBlock > piece.prefix;
      if (!tail) give_back();
#pragma unroll
      for (int e = 0; e < C::kNTiles * 4; ++e) s[e] *= scale;
      if (tail && !rehearsal) {
        hide_unseen<C>(p, piece, s, i, reinterpret_cast<uint32_t*>(smem_ptr + C::kKv + rope_slot * C::kSlotBytes));
        give_back();
      }

      float over = -INFINITY;
#pragma unroll
      for (int n = 0; n < C::kNTiles; ++n) {
        const float2 r = *reinterpret_cast<const float2*>(ref + n * 8 + col);
        over = fmaxf(over, fmaxf(fmaxf(s[n * 4] - r.x, s[n * 4 + 2] - r.x),
                                 fmaxf(s[n * 4 + 1] - r.y, s[n * 4 + 3] - r.y)));
      }
      const bool moved = group_any(kGroup, over > kMaxSlack);
      mbarrier_wait(barrier<C>(smem, C::kPEmpty), turn & kOdd ? 0 : 1);  // the last tile's P and factors are read
      // And the last piece's sums, in whose place the factors go.
      if (i == piece.begin) mbarrier_wait(barrier<C>(smem, C::kStatsEmpty), (queue.taken() & 1) ^ 1);
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
          if (!rehearsal) factor_sm[tid] = moves ? exp2_approx(before - top) : 1.0f;
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
      if (rehearsal) break;
      if (tid == 0) *reinterpret_cast<int*>(smem_ptr + C::kMoved) = moved;
      proxy_fence();  // P, before what wgmma reads
      mbarrier_arrive(barrier<C>(smem, C::kPFull));
      turn ^= kOdd;
    }

    // The lanes' sums meet where Q was, which no product of this piece reads any more.
    float* const sums_sm = reinterpret_cast<float*>(smem_ptr + C::kQ);
    float* const my_sums = sums_sm + (warp * 8 + (lane >> 2)) * C::kRows + (lane & 3) * 2;
    if (!rehearsal) {
#pragma unroll
      for (int n = 0; n < C::kNTiles; ++n)
        *reinterpret_cast<float2*>(my_sums + n * 8) = make_float2(sum[n][0], sum[n][1]);
    }
    group_sync(kGroup);
    float total = 0.0f;
    if (tid < C::kRows && !rehearsal) {
#pragma unroll 8
      for (int w = 0; w < 32; ++w) total += sums_sm[w * C::kRows + tid];
    }
    if (!rehearsal) {
      proxy_fence();  // these, before what the copy engine writes there
      __syncwarp();
      if (lane == 0) mbarrier_arrive(barrier<C>(smem, C::kQEmpty));
    }
    mbarrier_wait(barrier<C>(smem, C::kPEmpty), turn & kOdd ? 0 : 1);  // the last tile's factors are read
    if (tid < C::kRows) {
      const float top = ref[tid];
      const float inverse = total > 0.0f ? 1.0f / total : total;  // 0 for a row that saw nothing, NaN stays
      if (!rehearsal) inverse_sm[tid] = inverse;
      const int row0 = piece.row0;
      if (tid < piece.rows && !rehearsal) {
        if (piece.partial_row >= 0) p.partial_ms[piece.partial_row + tid] = make_float2(top, total);
        else if (p.lse != nullptr)
          p.lse[static_cast<int64_t>(piece.token) * p.heads + row0 + tid] = total == 0.0f ? -INFINITY : (top + log2f(total)) / kLog2e;
      }
    }
    if (rehearsal) continue;
    mbarrier_arrive(barrier<C>(smem, C::kStatsFull));
    queue.done();
  }
}

// Q of a piece, column blocks in ring order, by one thread of a values role and the tensor copy engine, which
// knows the swizzle. Rows of the tile beyond the request's are another's, or zeros: nothing of them is kept.
template <class C>
__device__ __forceinline__ void load_q(const TreeVerifyParams& p, const CUtensorMap& map, const Piece& piece,
                                       uint32_t smem, uint32_t index) {
  mbarrier_wait(barrier<C>(smem, C::kQEmpty), (index & 1) ^ 1);
  const int row = piece.token * p.heads + piece.row0;  // num_tokens * heads passes the launcher
#pragma unroll 1
  for (int b = 0; b < C::kColumnBlocks; ++b) {
    const uint32_t bar = barrier<C>(smem, C::kQFull + (b >= 4));
    if (b == 0) mbarrier_arrive_expect(bar, 4 * C::kQBlockBytes);
    if (b == 4) mbarrier_arrive_expect(bar, 5 * C::kQBlockBytes);
    tensor_copy(smem + C::kQ + b * C::kQBlockBytes, &map, column_block(b) * 64, row, bar);
  }
}

// ---- values -------------------------------------------------------------------------------------
template <class C>
__device__ __forceinline__ void values_role(const TreeVerifyParams& p, const CUtensorMap& q_map, char* smem_ptr,
                                            uint32_t smem, int half) {
  using T = typename C::T;
  const int group = 2 + half;  // number of this warpgroup's own barrier
  const int lane = threadIdx.x & 31, col = (lane & 3) * 2;
  const float* factor_sm = reinterpret_cast<const float*>(smem_ptr + C::kFactor);
  const float* inverse_sm = reinterpret_cast<const float*>(smem_ptr + C::kInverse);

  float o[4][C::kNTiles * 4];  // of latent columns 128 j + 64 half ...
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int e = 0; e < C::kNTiles * 4; ++e) o[j][e] = 0.0f;

  PieceQueue<C> queue(smem_ptr, smem);
  Ring<C> ring;
  // Two bits: whether the tiles so far are an odd number, and whether there is no piece at hand yet.
  constexpr uint32_t kOdd = 1, kNone = 2;
  uint32_t state = kNone;
#pragma unroll 1
  for (;;) {
    const bool rehearsal = (state & kNone) != 0;  // see the head of this file
    // First of all the next piece's Q, which the scores wait for.
    const Piece* const following = queue.peek(rehearsal ? 0 : 1);
    const bool more = following != nullptr;
    if (more && half == 0 && (threadIdx.x & 96) == 0 && elect_lane())
      load_q<C>(p, q_map, *following, smem, queue.taken() + (rehearsal ? 0 : 1));
    __syncwarp();
    if (rehearsal && !more) break;
    if (more && half == 1 && following->end * C::kBlock > following->prefix)
      MaskView(p, following->request, following->prefix, following->nodes).prefetch_row(threadIdx.x & 127);

    // Results, divided by their sums and 16 bits wide, to `out` or to the workspace. They pass through the
    // slots of the last tile's blocks, two column blocks at a time, a row of 64 columns being 128 bytes
    // in the swizzle: rows 0-63 of either block in a slot of its own, rows 64-71 of both in a third.
    const Piece& piece = queue.at_hand();
    if (!rehearsal) mbarrier_wait(barrier<C>(smem, C::kStatsFull), queue.taken() & 1);
    const int rows = rehearsal ? 0 : piece.rows;
    const bool partial = piece.partial_row >= 0;
    const int64_t row0 = partial ? piece.partial_row
                                 : static_cast<int64_t>(piece.token) * p.heads + piece.row0;
    T* const results = static_cast<T*>(partial ? static_cast<void*>(p.partial_out) : p.out) + row0 * kVDim;
    const int tid = thread_number() & 127, warp = tid >> 5, matrix = tid >> 3 & 3;
    const uint32_t turned = ((matrix >> 1) * 8 + (tid & 7)) * 128 + (((warp * 2 + (matrix & 1)) ^ (tid & 7)) << 4);
    const int chunk = tid & 7;
#pragma unroll
    for (int round = 0; round < 2; ++round) {
      group_sync(group);
#pragma unroll
      for (int n = 0; n < C::kNTiles; n += 2) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float(&x)[C::kNTiles * 4] = o[round * 2 + side];
          uint32_t packed[4];
#pragma unroll
          for (int m = n; m < n + 2 && m < C::kNTiles; ++m) {
            float2 inverse = make_float2(0.0f, 0.0f);
            if (!rehearsal) inverse = *reinterpret_cast<const float2*>(inverse_sm + m * 8 + col);
#pragma unroll
            for (int h = 0; h < 2; ++h)
              packed[(m - n) * 2 + h] = pack2<T>(x[m * 4 + h * 2] * inverse.x, x[m * 4 + h * 2 + 1] * inverse.y);
          }
          const int slot = ring.slot_of(n < 8 ? 1 + 2 * side + half : 5 + half);
          const uint32_t to = turned + smem + C::kKv + slot * C::kSlotBytes + (n < 8 ? n : side) * 1024;
          if (rehearsal) continue;
          if (n + 1 < C::kNTiles) stmatrix_x4_trans(to, packed[0], packed[1], packed[2], packed[3]);
          else stmatrix_x2_trans(to, packed[0], packed[1]);
        }
      }
      group_sync(group);
      const int out_row = tid >> 3;  // of 16 at a time
      const uint32_t turned_back = smem + C::kKv + out_row * 128 + ((chunk ^ (out_row & 7)) << 4);
      const uint32_t third = turned_back + ring.slot_of(5 + half) * C::kSlotBytes;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const uint32_t from = turned_back + ring.slot_of(1 + 2 * side + half) * C::kSlotBytes;
        T* const to = results + out_row * kVDim + (2 * (round * 2 + side) + half) * 64 + chunk * 8;
#pragma unroll
        for (int r = 0; r < C::kRows; r += 16)
          if (r + out_row < rows)
            *reinterpret_cast<uint4*>(to + r * kVDim) =
                load_shared_16(r < 64 ? from + r * 128 : third + side * 1024);
      }
    }
    if (!rehearsal) {
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int j = 0; j < 4; ++j) mbarrier_arrive(barrier<C>(smem, C::kEmpty + ring.slot_of(1 + 2 * j + half)));
        mbarrier_arrive(barrier<C>(smem, C::kStatsEmpty));
      }
      ring.advance(9);
      queue.done();
    }
    if (!more) break;

    state &= ~kNone;
    const int begin = queue.at_hand().begin, end = queue.at_hand().end;
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      mbarrier_wait(barrier<C>(smem, C::kPFull), state & kOdd);
      const int begun = i > begin;
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
      // The last tile's blocks stay: they are where O is turned over. The first of the others is released as
      // soon as its product is done, the rest a block behind the products: a warp that issued all 16 first
      // would be held up until nearly the last is done.
      const bool release = lane == 0 && i + 1 < end;
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint64_t v_op = operand(smem + C::kKv + ring.slot_of(1 + 2 * j + half) * C::kSlotBytes);
        const uint64_t p_op = operand(smem + C::kP);
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma_m64k16<1>(o[j], v_op + k * (2048 >> 4), p_op + k * 2, k > 0 ? 1 : begun, T());
        wgmma_commit();
        if (j == 0) wgmma_wait<0>();
        if (j > 1) wgmma_wait<1>();
        if (release && j != 1)
          mbarrier_arrive(barrier<C>(smem, C::kEmpty + ring.slot_of((j == 0 ? 1 : 2 * j - 1) + half)));
      }
      wgmma_wait<0>();
      if (release) mbarrier_arrive(barrier<C>(smem, C::kEmpty + ring.slot_of(7 + half)));
      if (lane == 0) mbarrier_arrive(barrier<C>(smem, C::kPEmpty));
      if (i + 1 < end) ring.advance(9);
      state ^= kOdd;
    }
  }
}

template <class C>
__global__ void __launch_bounds__(kWgThreads, 1)
    tree_verify_wgmma_kernel(const __grid_constant__ TreeVerifyParams p, const __grid_constant__ CUtensorMap q_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem_ptr[];
  const uint32_t smem = smem_addr(smem_ptr);
  const int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  // Registers: 40 + 120 + 2 x 176 of the 512 a thread of each role would share; for the merge, 128 each.
  if (role == 0) {
    registers_release<40>();
    init_barriers<C>(smem);
    prefetch_pages(p, threadIdx.x - 64);
    __syncthreads();
    copy_role<C>(p, smem_ptr, smem);
    registers_take<128>();
  } else if (role == 1) {
    registers_release<120>();
    scores_role<C>(p, smem_ptr, smem);
    registers_take<128>();
  } else {
    registers_take<176>();
    __syncthreads();  // of the scores role: once it knows the first piece
    values_role<C>(p, q_map, smem_ptr, smem, role - 2);
    registers_release<128>();
  }
  static_assert(kWgThreads / kTeamThreads * kTeamBytes <= C::kRef, "the merge's memory is that of the ring, Q and P");
  merge_rows<typename C::T, kWgThreads / kTeamThreads>(p, smem_ptr + C::kKv);
#endif
}

}  // namespace kdtree
