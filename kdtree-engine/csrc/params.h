// The whole interface between the binding and the kernels: one struct, passed by value.
// Compiled as part of every unit of csrc/ (nvcc -std=c++17).
//
// Names: a *request* b has a *prefix* of L_b cached tokens and T_b *tree nodes*; a *slot* is a row of
// the latent pool; a *packed row* r of a request is node r / heads, head r % heads; a *split* is a run
// of a request's tokens that one thread block attends to; a *tile* is the packed rows it attends for.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kdtree {

constexpr int kQkDim = 576;       // latent 512 + rope 64: the width of q and of a pool row
constexpr int kVDim = 512;        // the latent part, which is also V: columns 0..511 of the same row
constexpr int kMaxNodes = 128;    // tree nodes a request may have (mask bits kept on chip)
constexpr int kThreads = 256;     // of the mma.sync attention kernels
constexpr int kRowBytes = kQkDim * 2;

// How `mask` is laid out; request b's part begins at element mask_indptr[b], row-major, a row a node. Only
// the T x T part over the request's own nodes is read: the whole prefix is always visible.
enum class MaskLayout : int {
  kCausal = 0,     // no mask: node t sees nodes 0..t
  kBytes = 1,      // T x T where that is the step of mask_indptr, else T x (L + T): SGLang's custom_mask
  kPacked = 2,     // int64 words, ceil(T / 64) words a node
};

// An index tensor that may hold int32 or int64: eager and captured buffers of one server differ.
// Slots, token counts and prefix lengths are below 2^31, so the low word is the value, and reading it
// takes one load without a branch, which leaves the load under way until the value is used. Mask
// offsets can be larger: wide().
struct IndexArray {
  const void* data = nullptr;
  int is_int64 = 0;

#ifdef __CUDACC__
  __device__ __forceinline__ const int* at(unsigned i) const {  // below 2^31, so that twice that is 32 bits
    return static_cast<const int*>(data) + (i << is_int64);
  }
  __device__ __forceinline__ int operator[](unsigned i) const { return __ldg(at(i)); }
  __device__ __forceinline__ int64_t wide(int64_t i) const {
    return is_int64 ? __ldg(static_cast<const long long*>(data) + i)
                    : static_cast<int64_t>(__ldg(static_cast<const int*>(data) + i));
  }
#endif
};

struct TreeVerifyParams {
  // Inputs. q is [num_tokens, heads, 576], contiguous; a pool row is 576 values, rows `slot_stride`
  // values apart (64-bit: slot * 576 leaves int32 from slot 3,728,270 on).
  const void* q;
  const void* kv_pool;
  int64_t slot_stride;
  IndexArray qo_indptr;    // [batch + 1] tree nodes of each request, cumulative
  IndexArray kv_indptr;    // [batch + 1] prefix lengths, cumulative
  IndexArray kv_indices;   // prefix slots; null: request b's prefix is the run of slots from kv_indptr[b]
  IndexArray draft_slots;  // [num_tokens] slots of the tree nodes' own rows
  const void* mask;
  IndexArray mask_indptr;  // [batch + 1]
  MaskLayout mask_layout;

  // Outputs. out is [num_tokens, heads, 512]; lse is [num_tokens, heads] natural log, or null.
  void* out;
  float* lse;

  // Launch-time constants: all that a captured graph fixes. Everything else is read on the device.
  int num_tokens;   // capacity; tokens from qo_indptr[batch] on are padding and give zeros
  int batch;
  int heads;
  int max_nodes;    // T_b never exceeds it; nodes beyond give zeros
  float sm_scale;
  int is_bf16;      // else fp16
  int deterministic;

  // The grid, chosen by the host from the constants above: `groups` splits of the work, each by
  // `lanes` blocks that attend for different tiles of packed rows over the same tokens.
  int groups;
  int lanes;
  int row_tile;     // packed rows a block attends for
  int block_tokens; // tokens of one pipeline stage: the unit of splitting; a power of two
  int min_blocks;   // least stages a split has: below, merging costs more than it saves

  // Workspace: partial rows, [rows][512] unnormalised outputs, then [rows] (max, sum) pairs. Nothing
  // in it is read before this launch has written it. The wgmma path reads partial_out as [rows][512]
  // normalised values of q's type.
  float* partial_out;
  float2* partial_ms;

  // Of kernels that merge in the same launch: where their blocks wait for each other (merge_tail.cuh), 0 or
  // 2^31 between launches.
  unsigned* arrivals;
};

}  // namespace kdtree
