// Instantiates the short tiles for bf16.   nvcc -O3 -std=c++17 -c tree_verify_short_bf16.cu
#include "kernels.h"
#include "tiles.h"

namespace kdtree {

const void* tree_verify_short_bf16(int row_tile) {
  switch (row_tile) {
    case 16: return reinterpret_cast<const void*>(&tree_verify_kernel<Short16<__nv_bfloat16>>);
    case 24: return reinterpret_cast<const void*>(&tree_verify_kernel<Short24<__nv_bfloat16>>);
    case 32: return reinterpret_cast<const void*>(&tree_verify_kernel<Short32<__nv_bfloat16>>);
    default: return nullptr;
  }
}

}  // namespace kdtree
