// The tile configurations that are compiled, by name.
//
//   short: stages of 16 tokens and at most 101,376 bytes of shared memory, so that sm_89 and sm_120
//          can pick any of them. Compiled for every architecture.
//   tall:  stages of 32 tokens, for sm_90's 227 KB a block. Compiled for sm_90 only.
//   wg:    tiles of 64 tokens, on warpgroup products: sm_90a only.
#pragma once

#include "tree_verify.cuh"
#include "tree_verify_wgmma.cuh"

namespace kdtree {

//                                     rows block stages warps over rows
template <class T> using Short16 = Tile<T, 16, 16, 3, 1>;
template <class T> using Short24 = Tile<T, 24, 16, 3, 1>;
template <class T> using Short32 = Tile<T, 32, 16, 3, 4>;
template <class T> using Tall16 = Tile<T, 16, 32, 4, 1>;
template <class T> using Tall24 = Tile<T, 24, 32, 4, 1>;
template <class T> using Tall40 = Tile<T, 40, 32, 4, 2>;
template <class T> using Tall72 = Tile<T, 72, 32, 3, 4>;

//                                      rows column blocks in flight
template <class T> using Wg16 = WgTile<T, 16, 24>;
template <class T> using Wg24 = WgTile<T, 24, 22>;
template <class T> using Wg40 = WgTile<T, 40, 20>;
template <class T> using Wg72 = WgTile<T, 72, 17>;

constexpr int kSmallSmem = 101376;  // what a block gets on sm_89 and sm_120
static_assert(Short16<__half>::kSmemBytes <= kSmallSmem, "a short tile must fit sm_120");
static_assert(Short24<__half>::kSmemBytes <= kSmallSmem, "a short tile must fit sm_120");
static_assert(Short32<__half>::kSmemBytes <= kSmallSmem, "a short tile must fit sm_120");

}  // namespace kdtree
