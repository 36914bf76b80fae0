// How a piece sees memory: where the latent row of position j lies, and which nodes a node sees.
#pragma once

#include "params.h"
#include "ptx.cuh"
#include "schedule.cuh"

namespace kdtree {

// Position j of a request is prefix token j, or tree node j - L. The paged and the contiguous
// ("offline") pool differ only in where a prefix position's slot comes from.
class KvView {
 public:
  __device__ __forceinline__ KvView(const TreeVerifyParams& p, const Piece& piece)
      : p_(p), token_(piece.token), start_(p.kv_indptr[piece.request]), prefix_(piece.prefix) {}

  // Reading a slot takes two steps, so that the load can be under way for a while: a load from at(j)
  // starts it, slot(j, loaded) uses it.
  __device__ __forceinline__ const int* at(int j) const {
    const bool node = j >= prefix_ || p_.kv_indices.data == nullptr;
    return node ? p_.draft_slots.at(token_ + max(j - prefix_, 0)) : p_.kv_indices.at(start_ + j);
  }
  __device__ __forceinline__ int slot(int j, int loaded) const {
    return p_.kv_indices.data == nullptr && j < prefix_ ? start_ + j : loaded;
  }

  __device__ __forceinline__ const char* row(int slot) const {
    return static_cast<const char*>(p_.kv_pool) + slot * (p_.slot_stride * 2);
  }

 private:
  const TreeVerifyParams& p_;
  int64_t token_;
  int start_, prefix_;
};

// One bit of the tree mask, in whichever layout: does node t see node j?
class MaskView {
 public:
  __device__ __forceinline__ MaskView(const TreeVerifyParams& p, int request, int prefix, int nodes)
      : mask_(p.mask), layout_(p.mask_layout), nodes_(nodes) {
    if (layout_ == MaskLayout::kCausal) return;
    // By the request's own T: `nodes` may have been cut to what the launch has room for.
    const int all = p.qo_indptr[request + 1] - p.qo_indptr[request];
    base_ = p.mask_indptr.wide(request);
    if (layout_ == MaskLayout::kPacked) {
      stride_ = (all + 63) / 64;
    } else {
      const int before = p.mask_indptr.wide(request + 1) - base_ == all * all ? 0 : prefix;
      stride_ = before + all;
      base_ += before;
    }
  }

  // Brings the first bytes of node t's row near.
  __device__ __forceinline__ void prefetch_row(int t) const {
    if (layout_ == MaskLayout::kCausal || t >= nodes_) return;
    const int64_t row = base_ + static_cast<int64_t>(t) * stride_;
    prefetch(static_cast<const char*>(mask_) + (layout_ == MaskLayout::kPacked ? row * 8 : row));
  }

  __device__ __forceinline__ bool sees(int t, int j) const {
    if (t >= nodes_ || j >= nodes_) return false;
    const int64_t row = base_ + static_cast<int64_t>(t) * stride_;
    switch (layout_) {
      case MaskLayout::kBytes:
        return static_cast<const uint8_t*>(mask_)[row + j] != 0;
      case MaskLayout::kPacked:
        return (static_cast<const uint64_t*>(mask_)[row + (j >> 6)] >> (j & 63)) & 1;
      default:
        return j <= t;
    }
  }

 private:
  const void* mask_;
  MaskLayout layout_;
  int64_t base_ = 0;  // of the first row's first node
  int stride_ = 0;    // from row to row
  int nodes_;
};

}  // namespace kdtree
