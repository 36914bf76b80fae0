// Instantiates the wgmma tiles for bf16, sm_90a only.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -c tree_verify_wgmma_bf16.cu
#include "kernels.h"
#include "tiles.h"

namespace kdtree {

const void* tree_verify_wgmma_bf16(int row_tile) {
  switch (row_tile) {
    case 16: return reinterpret_cast<const void*>(&tree_verify_wgmma_kernel<Wg16<__nv_bfloat16>>);
    case 24: return reinterpret_cast<const void*>(&tree_verify_wgmma_kernel<Wg24<__nv_bfloat16>>);
    case 40: return reinterpret_cast<const void*>(&tree_verify_wgmma_kernel<Wg40<__nv_bfloat16>>);
    case 72: return reinterpret_cast<const void*>(&tree_verify_wgmma_kernel<Wg72<__nv_bfloat16>>);
    default: return nullptr;
  }
}

}  // namespace kdtree
