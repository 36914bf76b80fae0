// Instantiates the short tiles for fp16.   nvcc -O3 -std=c++17 -c tree_verify_short_fp16.cu
#include "kernels.h"
#include "tiles.h"

namespace kdtree {

const void* tree_verify_short_fp16(int row_tile) {
  switch (row_tile) {
    case 16: return reinterpret_cast<const void*>(&tree_verify_kernel<Short16<__half>>);
    case 24: return reinterpret_cast<const void*>(&tree_verify_kernel<Short24<__half>>);
    case 32: return reinterpret_cast<const void*>(&tree_verify_kernel<Short32<__half>>);
    default: return nullptr;
  }
}

}  // namespace kdtree
