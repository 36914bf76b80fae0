// What the two merges share: how a packed row finds its request, and how large a block is.
#pragma once

#include "params.h"

namespace kdtree {

constexpr int kMergeThreads = 256;
constexpr int kMostSplits = 512;  // more than any part has SMs
constexpr float kLn2 = 0.6931471805599453f;

// The request that a token belongs to, or -1 for padding.
__device__ __forceinline__ int request_of_token(const TreeVerifyParams& p, int token) {
  const int lane = threadIdx.x & 31;
  int before = 0;  // requests that end at or before the token
  for (int b = 0; b < p.batch; b += 32) {
    const bool past = b + lane < p.batch && p.qo_indptr[b + lane + 1] <= token;
    before += __popc(__ballot_sync(0xffffffffu, past));
  }
  return before < p.batch && p.qo_indptr[before] <= token ? before : -1;
}

}  // namespace kdtree
