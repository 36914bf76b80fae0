// What the units of csrc/ offer each other: the launchers, and the table of tile configurations.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "params.h"

namespace kdtree {

// A compiled configuration of the attention kernel: `row_tile` packed rows, stages of `block_tokens`.
struct TileKernel {
  int row_tile;
  int block_tokens;
  int smem_bytes;
  int threads;  // of a block
  bool wgmma;   // sm_90a code, which merges in the same launch
  const void* bf16;
  const void* fp16;
};

// The units that instantiate the kernel, each giving its functions.
const void* tree_verify_short_bf16(int row_tile);  // stages of 16 tokens, at most 101,376 bytes: every part
const void* tree_verify_short_fp16(int row_tile);
const void* tree_verify_tall_bf16(int row_tile);   // stages of 32 tokens, sm_90 only (227 KB)
const void* tree_verify_tall_fp16(int row_tile);
const void* tree_verify_wgmma_bf16(int row_tile);  // tiles of 64 tokens on warpgroup products, sm_90a only
const void* tree_verify_wgmma_fp16(int row_tile);

constexpr int kWgmmaBlock = 64;  // the block_tokens that only wgmma tiles have

// A tile and the least stages of a split; 0 is the built-in choice. With block_tokens kWgmmaBlock and no
// row_tile, the built-in choice is among the wgmma tiles, which it never picks otherwise.
struct Tuning {
  int row_tile = 0;      // of the table in launch.cu
  int block_tokens = 0;  // of the same: 16, 32 or 64
  int min_blocks = 0;
};

// The process-wide override, which goes before what calls bring along: for `kd tune`, `kd bench` and tests.
Tuning& tuning();

// What a launch goes by, of the override and what the call brings along. An override of block_tokens alone
// asks for a class of tiles: a call whose tile is one of them keeps it.
inline Tuning resolved_tuning(const Tuning& forced, const Tuning& call) {
  const bool other_class = forced.block_tokens != 0 && forced.block_tokens != call.block_tokens;
  Tuning t = forced.row_tile != 0 || other_class ? forced : call;
  if (forced.min_blocks != 0) t.min_blocks = forced.min_blocks;
  return t;
}

// The tiles that a part of compute capability `cc` (90 for 9.0), whose blocks get `smem_limit` bytes, can
// run: a JSON array of row_tile, block_tokens and shared_bytes. No GPU is asked.
std::string compiled_tiles(int cc, int smem_limit);

// Picks the grid from launch-time constants, and the tile where `t`, of resolved_tuning, leaves it open;
// fills the rest of `p`, and launches the attention and the merge. Captured graphs replay it as it is. Rows
// of `workspace` are workspace_rows().
cudaError_t launch_tree_verify(TreeVerifyParams p, const Tuning& t, void* workspace, cudaStream_t stream);

cudaError_t launch_merge(const TreeVerifyParams& p, int sm_count, bool dependent, cudaStream_t stream);
cudaError_t launch_naive(const TreeVerifyParams& p, cudaStream_t stream);

// Device attributes, read once a device.
struct DeviceInfo {
  int sm_count, smem_optin, cc;
  cudaError_t error;  // of asking for these
  cudaError_t wgmma;  // whether the wgmma tiles can be launched; cudaErrorNotSupported: another capability
  unsigned* arrivals;  // of launches that merge in themselves
};
const DeviceInfo& device_info(int device);

// Why the tile that `tuning` asks for cannot be had on a device; null where it can, or where it asks for
// none. A launch that it stands against does not happen: no other tile takes its place.
const char* tuning_refusal(const DeviceInfo& device, const Tuning& tuning);

}  // namespace kdtree
