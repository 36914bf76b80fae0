// Copies that arrive late, of cuda_pipeline.h: here not before they are waited for.
#pragma once

#include "cuda_runtime.h"

namespace simt {

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};
inline std::vector<Copy> copies[1024];  // of each thread

}  // namespace simt

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(to) % bytes != 0 || reinterpret_cast<uintptr_t>(from) % bytes != 0) std::abort();
  simt::copies[simt::block->current].push_back({to, from, bytes});
}
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(size_t) {
  auto& mine = simt::copies[simt::block->current];
  for (const simt::Copy& copy : mine) memcpy(copy.to, copy.from, copy.bytes);
  mine.clear();
}
