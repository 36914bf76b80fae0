// What the two merges share.
#pragma once

namespace kdtree {

constexpr int kMergeThreads = 256;  // of the separate merge
constexpr int kMostSplits = 512;    // of a request: launch.cu makes no more groups; deterministic mode has 128
constexpr float kLn2 = 0.6931471805599453f;

}  // namespace kdtree
