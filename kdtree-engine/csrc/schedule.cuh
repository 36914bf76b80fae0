// Who does what: cuts the batch into pieces of (request, run of tokens, tile of packed rows), on the
// device, from the lengths in memory, the same way in every thread block and in the merge.
//
// Shared share (the default). The batch is laid out on one line, request after request, a request
// being piece_cost + its stages of `block_tokens` tokens long; the line is cut into `groups` equal
// runs. A group is `lanes` blocks, one for each tile of packed rows, that walk the same tokens at the
// same time, so that the tiles after the first find the latent rows in L2.
//
// Deterministic. A request is cut by its own length and node count only, and pieces are dealt out to
// the blocks in order. Which block takes a piece does not show in the result.
//
// This runs once a launch, from instruction memory that other kernels have emptied, where an instruction
// costs several cycles: so it is written for few instructions. A warp reads 32 requests at once, a lane
// each, and hands them round by shuffles.
#pragma once

#include "params.h"
#include "workspace.h"

namespace kdtree {

// What starting a request costs, in stages. A batch of one has nothing to balance it against.
constexpr int kPieceCost = 2;
__host__ __device__ constexpr int piece_cost(int batch) { return batch > 1 ? kPieceCost : 0; }

constexpr int kDeterministicSplits = 128;
constexpr int kDeterministicBlocks = 8;  // least stages of a split in deterministic mode

struct Piece {
  int request;
  int begin, end;          // stages, of the prefix followed by the tree nodes
  int row0, rows;          // packed rows of the request
  int prefix, nodes;       // L and T
  int token;               // first token: qo_indptr[request]
  int partial_row;         // where its rows go in the workspace, or -1: the piece is the whole request
};

// What one request is on the line.
struct Request {
  int token;                 // first token: qo_indptr[request]
  int prefix, nodes, blocks;
  int start, width;          // on the line
  int splits, split_blocks;  // deterministic mode only
};

// The line, as a warp sees it: 32 requests at a time. All of it is called by whole warps.
// Positions on the line are int32: 2^31 stages of 16 tokens are more than any pool holds.
class Line {
 public:
  __device__ __forceinline__ explicit Line(const TreeVerifyParams& p) : p_(p) {}

  // Goes before the beginning: what is looked for next is looked for from there on.
  __device__ __forceinline__ void rewind() {
    first_ = -32;
    after_ = 0;
  }
  // Length of the whole line.
  __device__ __forceinline__ int length() {
    rewind();
#pragma unroll 1
    while (advance()) {
    }
    return after_;
  }
  // The lane whose request covers a position, from here on; -1: none does.
  __device__ __forceinline__ int find(int pos) {
#pragma unroll 1
    for (;;) {
      const unsigned past = __ballot_sync(0xffffffffu, first_ >= 0 && mine_.start + mine_.width > pos);
      if (past) return __ffs(past) - 1;
      if (!advance()) return -1;
    }
  }
  // The lane whose request has a token, from here on; -1: padding.
  __device__ __forceinline__ int find_token(int token) {
#pragma unroll 1
    for (;;) {
      const unsigned has = __ballot_sync(0xffffffffu, first_ >= 0 && mine_.token <= token && token < end_token_);
      if (has) return __ffs(has) - 1;
      if (!advance()) return -1;
    }
  }
  __device__ __forceinline__ int number(int lane) const { return first_ + lane; }
  __device__ __forceinline__ Request request(int lane) const {
    Request r;
    r.token = told(mine_.token, lane);
    r.prefix = told(mine_.prefix, lane);
    r.nodes = told(mine_.nodes, lane);
    r.blocks = told(mine_.blocks, lane);
    r.start = told(mine_.start, lane);
    r.width = told(mine_.width, lane);
    r.splits = p_.deterministic ? told(mine_.splits, lane) : 1;
    r.split_blocks = p_.deterministic ? told(mine_.split_blocks, lane) : r.blocks;
    return r;
  }

 private:
  __device__ __forceinline__ static int told(int value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

  // Reads the next 32 requests; false where there are none.
  __device__ __forceinline__ bool advance() {
    if (first_ + 32 >= p_.batch) return false;
    first_ += 32;
    const int lane = threadIdx.x & 31, b = min(first_ + lane, p_.batch);
    const int next = min(b + 1, p_.batch);  // a lane past the batch has no tokens
    const int q0 = p_.qo_indptr[b], q1 = p_.qo_indptr[next];
    const int k0 = p_.kv_indptr[b], k1 = p_.kv_indptr[next];
    Request r;
    r.token = q0;
    end_token_ = q1;
    r.nodes = min(max(q1 - q0, 0), p_.max_nodes);
    r.prefix = max(k1 - k0, 0);
    r.blocks = r.nodes == 0 ? 0 : (r.prefix + r.nodes + p_.block_tokens - 1) >> (31 - __clz(p_.block_tokens));
    r.width = r.nodes == 0 ? 0 : piece_cost(p_.batch) + r.blocks;
    r.splits = 1;
    r.split_blocks = r.blocks;
    if (p_.deterministic && r.nodes > 0) {
      const int rows = r.nodes * p_.heads;
      const int most = min(max(1, kDeterministicRows / rows), kDeterministicSplits);
      const int wanted = min(most, max(1, r.blocks / kDeterministicBlocks));
      r.split_blocks = (r.blocks + wanted - 1) / wanted;
      r.splits = (r.blocks + r.split_blocks - 1) / r.split_blocks;
      r.width = r.splits * ((rows + p_.row_tile - 1) / p_.row_tile);
    }
    int upto = r.width;  // inclusive prefix sum over the lanes
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int v = __shfl_up_sync(0xffffffffu, upto, o);
      if (lane >= o) upto += v;
    }
    r.start = after_ + upto - r.width;
    after_ += told(upto, 31);
    mine_ = r;
    return true;
  }

  const TreeVerifyParams& p_;
  int first_ = -32;    // request of lane 0
  int after_ = 0;      // where these requests end on the line
  Request mine_ = {};  // this lane's
  int end_token_ = 0;
};

__device__ __forceinline__ int share_of(const TreeVerifyParams& p, int length) {
  return max((length + p.groups - 1) / p.groups, p.min_blocks);
}

// Which groups a request's stages fall to (shared share).
struct GroupRange {
  int first, last;
};
__device__ __forceinline__ GroupRange groups_of(const TreeVerifyParams& p, const Request& r, int share) {
  const int first = r.start + piece_cost(p.batch);
  return {first / share, (first + r.blocks - 1) / share};
}

// Workspace rows are int, and in units of 16 bytes they are unsigned: the launcher sees to it that they fit.
// The partial rows of group `g`, lane `lane` of it: two tiles a block, one for either end of its run.
__device__ __forceinline__ int partial_row_of(const TreeVerifyParams& p, int g, int lane, bool first) {
  return ((g * p.lanes + lane) * 2 + (first ? 1 : 0)) * p.row_tile;
}

// Where the partial rows of one packed row lie: `first`, `second`, and from there on `step` apart.
struct Partials {
  int splits;  // 0: padding; 1: the attention wrote the row itself
  unsigned first, second, step;
};

// Of the packed row `local` of request `number`. share: share_of the whole line.
__device__ __forceinline__ Partials partials_of(const TreeVerifyParams& p, const Request& r, int number, int local,
                                                int share) {
  Partials x = {0, 0, 0, 0};
  if (local >= r.nodes * p.heads) return x;
  if (p.deterministic) {
    x.splits = r.splits;
    x.step = r.nodes * p.heads;
    x.first = static_cast<unsigned>(number) * kDeterministicRows + local;
    x.second = x.first + x.step;
  } else {
    const GroupRange range = groups_of(p, r, share);
    const int tile = local / p.row_tile, in_tile = local - tile * p.row_tile;
    x.splits = range.last - range.first + 1;
    x.step = p.lanes * 2 * p.row_tile;
    x.first = partial_row_of(p, range.first, tile, true) + in_tile;
    x.second = partial_row_of(p, range.first + 1, tile, false) + in_tile;
  }
  return x;
}

// The commonest launch, one request cut by the shared share, told the same in fewer instructions.
__device__ __forceinline__ bool is_one_request(const TreeVerifyParams& p) {
  return p.batch == 1 && !p.deterministic && p.groups > 1;
}
//
// Where it is so short that a third of the blocks, or half, would have all of it (wgmma path), two or three blocks
// share the rows of a tile that would take them all: `cut` each. What a block leaves for the merge takes longer
// then than its products.
struct OneRequest {
  int token, prefix, nodes, blocks, lanes, cut, share;

  __device__ __forceinline__ explicit OneRequest(const TreeVerifyParams& p) {
    token = p.qo_indptr[0];
    nodes = min(max(p.qo_indptr[1] - token, 0), p.max_nodes);
    prefix = max(p.kv_indptr[1] - p.kv_indptr[0], 0);
    blocks = nodes == 0 ? 0 : (prefix + nodes + p.block_tokens - 1) >> (31 - __clz(p.block_tokens));
    lanes = p.lanes;
    cut = p.row_tile;
    share = share_of(p, blocks);
    const int rows = nodes * p.heads;
    if (p.arrivals != nullptr && lanes == 1 && blocks * 2 <= p.groups && rows > 24) {
      lanes = blocks * 3 <= p.groups ? 3 : 2;
      cut = ((lanes == 3 ? (rows + 2) / 3 : (rows + 1) / 2) + 7) & ~7;
    }
  }
  // The partial rows of the block that is number `lane` of split `g`.
  __device__ __forceinline__ int partial_row(int g, int lane) const {
    return ((g * lanes + lane) * 2 + (g == 0 ? 1 : 0)) * cut;
  }
  // Of packed row `local`; 0 splits: padding.
  __device__ __forceinline__ Partials partials(const TreeVerifyParams& p, int local) const {
    Partials x = {0, 0, 0, 0};
    if (local < 0 || local >= nodes * p.heads) return x;
    const int lane = local / cut, in_cut = local - lane * cut;
    x.splits = (blocks + share - 1) / share;
    x.step = lanes * 2 * cut;
    x.first = partial_row(0, lane) + in_cut;
    x.second = partial_row(1, lane) + in_cut;
    return x;
  }
};

// The pieces of this thread block, one after another. Between two pieces no request stays in registers, which
// are short: they are read again, from the first-level cache.
class Schedule {
 public:
  __device__ __forceinline__ explicit Schedule(const TreeVerifyParams& p) : p_(p) {
    if (is_one_request(p)) return;
    const int length = Line(p).length();
    if (p.deterministic) {
      pos_ = blockIdx.x;
      end_ = length;
    } else {
      share_ = share_of(p, length);
      const int group = blockIdx.x / p.lanes;
      tile_ = blockIdx.x - group * p.lanes;
      pos_ = group * share_;
      end_ = min(pos_ + share_, length);
    }
  }

  __device__ __forceinline__ bool next(Piece& piece) {
    if (is_one_request(p_)) {
      const OneRequest r(p_);
      const int group = blockIdx.x / r.lanes, lane = blockIdx.x - group * r.lanes;
      piece.request = 0;
      piece.token = r.token;
      piece.prefix = r.prefix;
      piece.nodes = r.nodes;
      piece.row0 = lane * r.cut;
      piece.rows = min(r.cut, r.nodes * p_.heads - piece.row0);
      piece.begin = group * r.share;
      piece.end = min(piece.begin + r.share, r.blocks);
      piece.partial_row = r.share >= r.blocks ? -1 : r.partial_row(group, lane);
      const bool first = pos_ == 0;
      pos_ = 1;
      return first && piece.begin < piece.end && piece.rows > 0;
    }
    Line line(p_);
    const int group = blockIdx.x / p_.lanes, lane = blockIdx.x - group * p_.lanes;
#pragma unroll 1
    while (pos_ < end_) {
      const int at = line.find(pos_);
      if (at < 0) return false;
      const Request r = line.request(at);
      const int rows = r.nodes * p_.heads;
      piece.request = line.number(at);
      piece.prefix = r.prefix;
      piece.nodes = r.nodes;
      piece.token = r.token;
      if (p_.deterministic) {
        const int tiles = (rows + p_.row_tile - 1) / p_.row_tile;
        const int split = (pos_ - r.start) / tiles;  // tiles of one split are neighbours: they share its rows in L2
        piece.row0 = (pos_ - r.start - split * tiles) * p_.row_tile;
        piece.rows = min(p_.row_tile, rows - piece.row0);
        piece.begin = split * r.split_blocks;
        piece.end = min(piece.begin + r.split_blocks, r.blocks);
        piece.partial_row = r.splits == 1
                                ? -1
                                : piece.request * kDeterministicRows + split * rows + piece.row0;
        pos_ += gridDim.x;
        return true;
      }
      const int first = r.start + piece_cost(p_.batch);
      piece.begin = max(pos_ - first, 0);
      piece.end = min(end_ - first, r.blocks);
      if (piece.begin < piece.end && tile_ * p_.row_tile < rows) {
        const GroupRange range = groups_of(p_, r, share_);
        piece.row0 = tile_ * p_.row_tile;
        piece.rows = min(p_.row_tile, rows - piece.row0);
        piece.partial_row =
            range.first == range.last ? -1 : partial_row_of(p_, group, lane, group == range.first);
        tile_ += p_.lanes;
        return true;
      }
      // This request is done with: the next one on the line. (More tiles than lanes happens with one
      // group only, where no piece is a partial one.)
      tile_ = lane;
      pos_ = r.start + r.width;
    }
    return false;
  }

 private:
  const TreeVerifyParams& p_;
  int share_ = 1, pos_ = 0, end_ = 0, tile_ = 0;
};

}  // namespace kdtree
