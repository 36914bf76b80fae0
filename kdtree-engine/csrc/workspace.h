// The workspace: how many bytes a launch needs, as integer arithmetic on launch-time constants only.
//
// A *partial row* is what one split leaves for one packed row: 512 float32 of unnormalised output
// and a float32 pair (running maximum, sum of exponentials): 2,056 bytes. The wgmma path's outputs are
// normalised and 16 bits wide, so they take the first half of the same place.
//
//   not deterministic: a block works through one contiguous run of the batch's tokens. So it has at
//     most two unfinished tiles, one at either end of its run (those between are whole requests and
//     go straight to `out`). Rows = 2 * sm_count * 72 (the tallest tile), whatever batch and length:
//     39.1 MB on 132 SMs, 55.7 MB on 188.
//   deterministic: a request is cut by its own length and node count alone, into at most
//     max(1, 1920 / (nodes * heads)) splits, so it has at most 1,920 partial rows. Rows = batch * 1920:
//     252.6 MB at batch 64, 3.9 MB at batch 1.
#pragma once

#include <cstdint>

namespace kdtree {

constexpr int64_t kPartialRowBytes = 512 * 4 + 8;
constexpr int kTallestTile = 72;
constexpr int kDeterministicRows = 1920;

inline int64_t workspace_rows(int64_t batch, int64_t sm_count, bool deterministic) {
  return deterministic ? batch * kDeterministicRows : 2 * sm_count * kTallestTile;
}

inline int64_t workspace_bytes(int64_t /*num_tokens*/, int64_t batch, int64_t /*heads*/,
                               int64_t /*max_nodes*/, int64_t sm_count, bool deterministic) {
  return workspace_rows(batch, sm_count, deterministic) * kPartialRowBytes;
}

}  // namespace kdtree
