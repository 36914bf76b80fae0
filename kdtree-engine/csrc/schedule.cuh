// Who does what: cuts the batch into pieces of (request, run of tokens, tile of packed rows), on the
// device, from the lengths in memory, the same way in every thread block and in the merge.
//
// Shared share (the default). The batch is laid out on one line, request after request, a request
// being kPieceCost + its stages of `block_tokens` tokens long; the line is cut into `groups` equal
// runs. A group is `lanes` blocks, one for each tile of packed rows, that walk the same tokens at the
// same time, so that the tiles after the first find the latent rows in L2.
//
// Deterministic. A request is cut by its own length and node count only, and pieces are dealt out to
// the blocks in order. Which block takes a piece does not show in the result.
#pragma once

#include "params.h"
#include "workspace.h"

namespace kdtree {

constexpr int kPieceCost = 2;            // what starting a request costs, in stages
constexpr int kDeterministicSplits = 128;
constexpr int kDeterministicBlocks = 8;  // least stages of a split in deterministic mode

struct Piece {
  int request;
  int begin, end;          // stages, of the prefix followed by the tree nodes
  int tile;                // of packed rows
  int prefix, nodes;       // L and T
  int64_t token;           // first token: qo_indptr[request]
  int64_t partial_row;     // where its rows go in the workspace, or -1: the piece is the whole request
};

// What one request is on the line.
struct Request {
  int prefix, nodes, blocks;
  int width;   // on the line
  int splits, split_blocks;  // deterministic mode only
};

__device__ __forceinline__ Request request_of(const TreeVerifyParams& p, int b) {
  Request r{};
  if (b >= p.batch) return r;
  const int q0 = p.qo_indptr[b], q1 = p.qo_indptr[b + 1];
  const int k0 = p.kv_indptr[b], k1 = p.kv_indptr[b + 1];
  r.nodes = min(max(q1 - q0, 0), p.max_nodes);
  r.prefix = max(k1 - k0, 0);
  if (r.nodes == 0) return r;
  r.blocks = (r.prefix + r.nodes + p.block_tokens - 1) / p.block_tokens;
  if (p.deterministic) {
    const int rows = r.nodes * p.heads;
    const int most = min(max(1, kDeterministicRows / rows), kDeterministicSplits);
    const int wanted = min(most, max(1, r.blocks / kDeterministicBlocks));
    r.split_blocks = (r.blocks + wanted - 1) / wanted;
    r.splits = (r.blocks + r.split_blocks - 1) / r.split_blocks;
    r.width = r.splits * ((rows + p.row_tile - 1) / p.row_tile);
  } else {
    r.width = kPieceCost + r.blocks;
  }
  return r;
}

// Positions on the line are int32: 2^31 stages of 16 tokens are more than any pool holds.
__device__ __forceinline__ int warp_sum(int v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

// Length of the whole line. Every warp computes it for itself.
__device__ __forceinline__ int line_length(const TreeVerifyParams& p) {
  const int lane = threadIdx.x & 31;
  int sum = 0;
  for (int b = lane; b < p.batch; b += 32) sum += request_of(p, b).width;
  return warp_sum(sum);
}

// Where request b starts on the line.
__device__ __forceinline__ int line_start(const TreeVerifyParams& p, int b) {
  const int lane = threadIdx.x & 31;
  int sum = 0;
  for (int i = lane; i < b; i += 32) sum += request_of(p, i).width;
  return warp_sum(sum);
}

// The request that covers position `pos` of the line, from (b, start) on, both moved forward.
__device__ __forceinline__ void line_find(const TreeVerifyParams& p, int pos, int& b, int& start) {
  const int lane = threadIdx.x & 31;
  while (b < p.batch) {
    const int width = request_of(p, b + lane).width;
    int upto = width;  // inclusive prefix sum over the lanes
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int v = __shfl_up_sync(0xffffffffu, upto, o);
      if (lane >= o) upto += v;
    }
    const unsigned past = __ballot_sync(0xffffffffu, start + upto > pos);
    if (past) {
      const int hit = __ffs(past) - 1;
      start += __shfl_sync(0xffffffffu, upto - width, hit);
      b += hit;
      return;
    }
    start += __shfl_sync(0xffffffffu, upto, 31);
    b += 32;
  }
}

__device__ __forceinline__ int share_of(const TreeVerifyParams& p, int length) {
  return max((length + p.groups - 1) / p.groups, p.min_blocks);
}

// Which groups a request's stages fall to (shared share).
struct GroupRange {
  int first, last;
};
__device__ __forceinline__ GroupRange groups_of(const Request& r, int start, int share) {
  return {(start + kPieceCost) / share, (start + kPieceCost + r.blocks - 1) / share};
}

// The partial rows of group `g`, lane `lane` of it: two tiles a block, one for either end of its run.
__device__ __forceinline__ int64_t partial_row_of(const TreeVerifyParams& p, int g, int lane, bool first) {
  return static_cast<int64_t>((g * p.lanes + lane) * 2 + (first ? 1 : 0)) * p.row_tile;
}

// The pieces of this thread block, one after another. kShortCut: a batch of one request is not searched
// (of use where one warpgroup alone works out the pieces and the others wait).
template <bool kShortCut = false>
class Schedule {
 public:
  __device__ __forceinline__ explicit Schedule(const TreeVerifyParams& p) : p_(p) {
    if constexpr (kShortCut) found_ = p.batch == 1;
    length_ = found_ ? request_of(p, 0).width : line_length(p);
    if (p.deterministic) {
      pos_ = blockIdx.x;
      end_ = length_;
    } else {
      share_ = share_of(p, length_);
      group_ = blockIdx.x / p.lanes;
      lane_ = blockIdx.x % p.lanes;
      pos_ = group_ * share_;
      end_ = min(pos_ + share_, length_);
      tile_ = lane_;
    }
  }

  __device__ __forceinline__ bool next(Piece& piece) {
    return p_.deterministic ? next_deterministic(piece) : next_shared(piece);
  }

 private:
  __device__ __forceinline__ bool next_deterministic(Piece& piece) {
    if (pos_ >= end_) return false;
    line_find(p_, pos_, b_, start_);
    if (b_ >= p_.batch) return false;
    const Request r = request_of(p_, b_);
    const int rows = r.nodes * p_.heads;
    const int tiles = (rows + p_.row_tile - 1) / p_.row_tile;
    const int at = pos_ - start_;
    const int split = at / tiles;  // tiles of one split are neighbours: they share its rows in L2
    fill(piece, r);
    piece.tile = at % tiles;
    piece.begin = split * r.split_blocks;
    piece.end = min(piece.begin + r.split_blocks, r.blocks);
    piece.partial_row = r.splits == 1
                            ? -1
                            : static_cast<int64_t>(b_) * kDeterministicRows + static_cast<int64_t>(split) * rows +
                                  static_cast<int64_t>(piece.tile) * p_.row_tile;
    pos_ += gridDim.x;
    return true;
  }

  __device__ __forceinline__ bool next_shared(Piece& piece) {
    while (pos_ < end_) {
      if (!found_) {
        line_find(p_, pos_, b_, start_);
        found_ = true;
      }
      if (b_ >= p_.batch) return false;
      const Request r = request_of(p_, b_);
      const int after = start_ + r.width;
      const int begin = max(pos_ - start_ - kPieceCost, 0);
      const int end = min(end_ - start_ - kPieceCost, r.blocks);
      if (r.width > 0 && begin < end && tile_ * p_.row_tile < r.nodes * p_.heads) {
        const GroupRange range = groups_of(r, start_, share_);
        fill(piece, r);
        piece.tile = tile_;
        piece.begin = begin;
        piece.end = end;
        piece.partial_row =
            range.first == range.last ? -1 : partial_row_of(p_, group_, lane_, group_ == range.first);
        tile_ += p_.lanes;
        return true;
      }
      // This request is done with: the next one on the line. (More tiles than lanes happens with one
      // group only, where no piece is a partial one.)
      tile_ = lane_;
      start_ = after;
      pos_ = max(pos_, after);
      ++b_;
    }
    return false;
  }

  __device__ __forceinline__ void fill(Piece& piece, const Request& r) {
    piece.request = b_;
    piece.prefix = r.prefix;
    piece.nodes = r.nodes;
    piece.token = p_.qo_indptr[b_];
  }

  const TreeVerifyParams& p_;
  int length_ = 0, share_ = 1, pos_ = 0, end_ = 0, start_ = 0, group_ = 0;
  int b_ = 0, lane_ = 0, tile_ = 0;
  bool found_ = false;
};

}  // namespace kdtree
