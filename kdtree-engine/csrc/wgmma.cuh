// The Hopper instructions (sm_90a) that the wgmma path uses: warpgroup products, their operands'
// descriptors, barriers, register hand-over.
#pragma once

#include "ptx.cuh"

namespace kdtree {

// A descriptor names 16-bit operand memory in the 128-byte swizzle: rows of 128 bytes, the 16-byte
// chunk c of row r at chunk c ^ (r % 8), eight rows (1,024 bytes, aligned) an atom, atoms 1,024 apart.
// The same bytes serve twice: with the reduction along the row (K-major: scores), and with the
// reduction down the rows (transposed: the products with V).
__device__ __forceinline__ uint64_t operand(uint32_t addr, uint32_t leading = 1, uint32_t stride = 1024 >> 4) {
  return static_cast<uint64_t>(((addr & 0x3ffff) >> 4) | (leading << 16)) |
         (static_cast<uint64_t>(stride | (1u << 30)) << 32);
}

// d[64 x N] += A[64 x 16] B[16 x N], float32 accumulators; without `accumulate`, d is only written. Lane l
// of warp w of the warpgroup holds of each n tile the rows 16 w + l / 4 (and + 8), columns 2 * (l % 4) and
// + 1, as in mma_16816. kTransA: A's memory is [16 x 64]. An instruction names all its registers, so each
// N that the tiles use has an overload, chosen by the size of d; a last argument chooses the type.
#define KD_IDS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KD_IDS_12 KD_IDS_8 ", %8, %9, %10, %11"
#define KD_IDS_20 KD_IDS_12 ", %12, %13, %14, %15, %16, %17, %18, %19"
#define KD_IDS_36 KD_IDS_20 ", %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35"
#define KD_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KD_D8 KD_D4(0), KD_D4(4)
#define KD_D12 KD_D8, KD_D4(8)
#define KD_D20 KD_D12, KD_D4(12), KD_D4(16)
#define KD_D36 KD_D20, KD_D4(20), KD_D4(24), KD_D4(28), KD_D4(32)
#define KD_WGMMA(TYPE, PTX, N, REGISTERS, A, B, ACCUMULATE, TRANSPOSED, ...)                                        \
  template <int kTransA>                                                                                            \
  __device__ __forceinline__ void wgmma_m64k16(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate, TYPE) {   \
    asm volatile(                                                                                                   \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %" ACCUMULATE ", 0;\n"                                                    \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX "." PTX " {" REGISTERS "}, %" A ", %" B               \
        ", p, 1, 1, %" TRANSPOSED ", 0;\n}\n"                                                                       \
        : __VA_ARGS__                                                                                               \
        : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA));                                                           \
  }
#define KD_WGMMA_ALL_N(TYPE, PTX)                                    \
  KD_WGMMA(TYPE, PTX, 16, KD_IDS_8, "8", "9", "10", "11", KD_D8)      \
  KD_WGMMA(TYPE, PTX, 24, KD_IDS_12, "12", "13", "14", "15", KD_D12)  \
  KD_WGMMA(TYPE, PTX, 40, KD_IDS_20, "20", "21", "22", "23", KD_D20)  \
  KD_WGMMA(TYPE, PTX, 72, KD_IDS_36, "36", "37", "38", "39", KD_D36)

KD_WGMMA_ALL_N(__nv_bfloat16, "bf16")
KD_WGMMA_ALL_N(__half, "f16")

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Barriers of some of a block's threads, by number; 0 is __syncthreads.
__device__ __forceinline__ void group_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }
__device__ __forceinline__ bool group_any(int id, bool mine) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 q, %1, 0;\nbar.red.or.pred p, %2, 128, q;\nselp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(mine)), "r"(id)
      : "memory");
  return any != 0;
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// A box of a tensor, as its map says, into shared memory; `bar` counts the bytes as they land.
__device__ __forceinline__ void tensor_copy(uint32_t dst, const void* map, int column, int row, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          dst),
      "l"(map), "r"(column), "r"(row), "r"(bar) : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(uint32_t addr) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(addr) : "memory");
  return v;
}
// threadIdx.x, but asked for here and not before: what follows from it is not kept in registers from the
// kernel's beginning on, for code that comes late.
__device__ __forceinline__ unsigned thread_number() {
  unsigned number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number;
}
// A read-only load that stays where it is written among other volatile instructions.
__device__ __forceinline__ int load_now(const int* from) {
  int value;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}
// Counts the thread as arrived once its cp.async copies so far have landed.
__device__ __forceinline__ void mbarrier_arrive_copies(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// 8x8 matrices of 16-bit values in the layout of an mma accumulator, stored transposed: lane l gives the
// address of the 16 bytes that column l % 8 of matrix l / 8 becomes.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t addr, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(addr), "r"(a), "r"(b),
               "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t addr, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(addr), "r"(a), "r"(b) : "memory");
}

}  // namespace kdtree
