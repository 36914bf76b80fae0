// What the units of csrc/ offer each other: the launchers, and the table of tile configurations.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace kdtree {

// A compiled configuration of the attention kernel: `row_tile` packed rows, stages of `block_tokens`.
struct TileKernel {
  int row_tile;
  int block_tokens;
  int smem_bytes;
  const void* bf16;
  const void* fp16;
};

// The units that instantiate the kernel, each giving its functions.
const void* tree_verify_short_bf16(int row_tile);  // stages of 16 tokens, at most 101,376 bytes: every part
const void* tree_verify_short_fp16(int row_tile);
const void* tree_verify_tall_bf16(int row_tile);   // stages of 32 tokens, sm_90 only (227 KB)
const void* tree_verify_tall_fp16(int row_tile);

// Process-wide overrides for `kd tune`; 0 is the built-in choice.
struct Tuning {
  int row_tile = 0;      // of the table
  int block_tokens = 0;  // of the table: 16 or 32
  int min_blocks = 0;
};
Tuning& tuning();

// Picks the tile and the grid from launch-time constants, fills the rest of `p`, and launches the
// attention and the merge. Captured graphs replay it as it is. Rows of `workspace` are workspace_rows().
cudaError_t launch_tree_verify(TreeVerifyParams p, void* workspace, cudaStream_t stream);

cudaError_t launch_merge(const TreeVerifyParams& p, int sm_count, bool dependent, cudaStream_t stream);
cudaError_t launch_naive(const TreeVerifyParams& p, cudaStream_t stream);

// Device attributes, read once a device.
struct DeviceInfo {
  int sm_count, smem_optin, cc;
};
const DeviceInfo& device_info(int device);

}  // namespace kdtree
