// The lazy softmax reference, which both bodies of the kernel share; tree_verify.cuh tells why.
#pragma once

namespace kdtree {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kMaxSlack = 8.0f;  // powers of two by which a score may exceed its row's reference
// A reference for rows that have seen nothing: finite, so that exp2(-inf - reference) is 0, not NaN.
constexpr float kNothing = -1e30f;

}  // namespace kdtree
