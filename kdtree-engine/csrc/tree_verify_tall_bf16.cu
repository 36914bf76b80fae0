// Instantiates the tall tiles for bf16.   nvcc -O3 -std=c++17 -c tree_verify_tall_bf16.cu
#include "kernels.h"
#include "tiles.h"

namespace kdtree {

const void* tree_verify_tall_bf16(int row_tile) {
  switch (row_tile) {
    case 16: return reinterpret_cast<const void*>(&tree_verify_kernel<Tall16<__nv_bfloat16>>);
    case 24: return reinterpret_cast<const void*>(&tree_verify_kernel<Tall24<__nv_bfloat16>>);
    case 40: return reinterpret_cast<const void*>(&tree_verify_kernel<Tall40<__nv_bfloat16>>);
    case 72: return reinterpret_cast<const void*>(&tree_verify_kernel<Tall72<__nv_bfloat16>>);
    default: return nullptr;
  }
}

}  // namespace kdtree
