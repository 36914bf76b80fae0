// Picks the tile and the grid of a launch from launch-time constants, and launches.
//
//   nvcc -O3 -std=c++17 -c launch.cu
#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>

#include "kernels.h"
#include "merge.cuh"
#include "tiles.h"
#include "workspace.h"

namespace kdtree {
namespace {

constexpr int kMaxDevices = 64;

// Where the blocks of a launch that merges in itself wait for each other: a cell a launch, so that two
// launches on the GPU at the same time, on different streams, do not meet. A captured launch keeps its
// cell for every replay, so such launches have cells of their own, which come round after 262,144 captured
// calls of a process; those of the others come round after 65,536 launches.
constexpr unsigned kEagerCells = 1u << 16, kCapturedCells = 1u << 18;
__device__ unsigned arrival_cells[kEagerCells + kCapturedCells];

// Q as the tensor copy engine sees it: boxes of 64 columns and a tile's rows, in the 128-byte swizzle. The
// driver's function is asked for by name, so that the library does not link libcuda.
bool make_q_map(const TreeVerifyParams& p, CUtensorMap& map) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
    return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(f) : nullptr;
  }();
  if (encode == nullptr) return false;
  const cuuint64_t dims[] = {kQkDim, static_cast<cuuint64_t>(p.num_tokens) * p.heads};
  const cuuint64_t pitch[] = {kRowBytes};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(p.row_tile)};
  const cuuint32_t steps[] = {1, 1};
  return encode(&map, p.is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
                const_cast<void*>(p.q), dims, pitch, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

unsigned* next_arrivals(const DeviceInfo& device, bool captured) {
  static std::atomic<unsigned> eager{0}, kept{0};
  if (captured) return device.arrivals + kEagerCells + kept.fetch_add(1, std::memory_order_relaxed) % kCapturedCells;
  return device.arrivals + eager.fetch_add(1, std::memory_order_relaxed) % kEagerCells;
}

template <template <class> class C>
TileKernel entry(const void* bf16, const void* fp16) {
  using B = C<__nv_bfloat16>;
  constexpr bool kWgmma = B::kBlock == kWgmmaBlock;
  return {B::kRows, B::kBlock, B::kSmemBytes, kWgmma ? kWgThreads : kThreads, kWgmma, bf16, fp16};
}

// Every compiled configuration.
const TileKernel* tile_table(int& count) {
  static const TileKernel table[] = {
      entry<Short16>(tree_verify_short_bf16(16), tree_verify_short_fp16(16)),
      entry<Short24>(tree_verify_short_bf16(24), tree_verify_short_fp16(24)),
      entry<Short32>(tree_verify_short_bf16(32), tree_verify_short_fp16(32)),
      entry<Tall16>(tree_verify_tall_bf16(16), tree_verify_tall_fp16(16)),
      entry<Tall24>(tree_verify_tall_bf16(24), tree_verify_tall_fp16(24)),
      entry<Tall40>(tree_verify_tall_bf16(40), tree_verify_tall_fp16(40)),
      entry<Tall72>(tree_verify_tall_bf16(72), tree_verify_tall_fp16(72)),
      entry<Wg16>(tree_verify_wgmma_bf16(16), tree_verify_wgmma_fp16(16)),
      entry<Wg24>(tree_verify_wgmma_bf16(24), tree_verify_wgmma_fp16(24)),
      entry<Wg40>(tree_verify_wgmma_bf16(40), tree_verify_wgmma_fp16(40)),
      entry<Wg72>(tree_verify_wgmma_bf16(72), tree_verify_wgmma_fp16(72)),
  };
  count = sizeof(table) / sizeof(table[0]);
  return table;
}

// Whether a part of compute capability `cc` whose blocks get `smem_limit` bytes can run a tile.
bool can_run(const TileKernel& tile, int cc, int smem_limit) {
  const bool short_stage = tile.block_tokens == 16;  // of those that are compiled for every architecture
  return tile.smem_bytes <= smem_limit && (short_stage || cc == 90);
}

const TileKernel* find_tile(int row_tile, int block_tokens, int smem_limit) {
  int count;
  const TileKernel* table = tile_table(count);
  for (int i = 0; i < count; ++i)
    if (table[i].row_tile == row_tile && table[i].block_tokens == block_tokens && table[i].smem_bytes <= smem_limit)
      return &table[i];
  return nullptr;
}

// block_tokens where nothing forces them: tall tiles are compiled for sm_90 only.
int usual_block(const DeviceInfo& device) { return device.cc == 90 ? 32 : 16; }

const TileKernel* named_tile(const DeviceInfo& device, const Tuning& t) {
  return find_tile(t.row_tile, t.block_tokens ? t.block_tokens : usual_block(device), device.smem_optin);
}

// One of the wgmma tiles, for calls that ask for them without naming one.
const TileKernel* choose_wgmma_tile(const DeviceInfo& device, int rows, bool deterministic) {
  if (!deterministic)
    for (int size : {16, 24, 40})
      if (size >= rows) return find_tile(size, kWgmmaBlock, device.smem_optin);
  return find_tile(72, kWgmmaBlock, device.smem_optin);
}

// The tile for a launch whose requests have up to `rows` packed rows. In deterministic mode the choice
// may depend on the part only: tiles differ in the order of their sums.
const TileKernel* choose_tile(const DeviceInfo& device, const Tuning& t, int rows, bool deterministic) {
  if (tuning_refusal(device, t) != nullptr) return nullptr;
  if (t.row_tile) return named_tile(device, t);
  if (t.block_tokens == kWgmmaBlock) return choose_wgmma_tile(device, rows, deterministic);
  const int block = usual_block(device);
  const int tallest = block == 32 ? 72 : 32;
  if (deterministic) return find_tile(24, block, device.smem_optin);
  const int sizes[] = {16, 24, 32, 40, 72};
  for (int size : sizes)
    if (size >= rows && size <= tallest)
      if (const TileKernel* t = find_tile(size, block, device.smem_optin)) return t;
  // Several tiles: 72 and 48 rows (8 heads, 9 or 6 nodes) are whole tiles of 24, not of 32.
  if (block == 16 && rows % 24 == 0 && rows <= 96) return find_tile(24, block, device.smem_optin);
  return find_tile(tallest, block, device.smem_optin);
}

}  // namespace

Tuning& tuning() {
  static Tuning t;
  return t;
}

std::string compiled_tiles(int cc, int smem_limit) {
  int count;
  const TileKernel* table = tile_table(count);
  std::string json;
  for (int i = 0; i < count; ++i) {
    const TileKernel& t = table[i];
    if (!can_run(t, cc, smem_limit)) continue;
    json += std::string(json.empty() ? "" : ", ") + "{\"row_tile\": " + std::to_string(t.row_tile) +
            ", \"block_tokens\": " + std::to_string(t.block_tokens) +
            ", \"shared_bytes\": " + std::to_string(t.smem_bytes) + "}";
  }
  return "[" + json + "]";
}

const DeviceInfo& device_info(int device) {
  static DeviceInfo info[kMaxDevices];
  static std::once_flag once[kMaxDevices];
  std::call_once(once[device], [device] {
    int major = 0, minor = 0;
    DeviceInfo& d = info[device];
    const auto ask = [&](int* value, cudaDeviceAttr attribute) {
      const cudaError_t error = cudaDeviceGetAttribute(value, attribute, device);
      if (d.error == cudaSuccess) d.error = error;
    };
    ask(&d.sm_count, cudaDevAttrMultiProcessorCount);
    ask(&d.smem_optin, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    ask(&major, cudaDevAttrComputeCapabilityMajor);
    ask(&minor, cudaDevAttrComputeCapabilityMinor);
    d.cc = major * 10 + minor;
    d.wgmma = d.cc == 90 ? cudaSuccess : cudaErrorNotSupported;
    if (d.wgmma == cudaSuccess) {
      int cooperative = 0;
      ask(&cooperative, cudaDevAttrCooperativeLaunch);
      void* cells = nullptr;
      d.wgmma = cooperative ? cudaGetSymbolAddress(&cells, arrival_cells) : cudaErrorNotSupported;
      d.arrivals = static_cast<unsigned*>(cells);
    }
    int count;
    const TileKernel* table = tile_table(count);
    for (int i = 0; i < count; ++i) {
      if (!can_run(table[i], d.cc, d.smem_optin)) continue;
      for (const void* kernel : {table[i].bf16, table[i].fp16}) {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, table[i].smem_bytes);
        if (table[i].wgmma && d.wgmma == cudaSuccess) d.wgmma = error;
      }
    }
    cudaGetLastError();
  });
  return info[device];
}

const char* tuning_refusal(const DeviceInfo& device, const Tuning& tuning) {
  if (tuning.block_tokens == kWgmmaBlock) {
    if (device.cc != 90) return "wgmma needs compute capability 9.0";
    if (device.wgmma != cudaSuccess) return cudaGetErrorString(device.wgmma);  // no sm_90a code, say
  }
  if (tuning.row_tile == 0) return nullptr;
  if (tuning.block_tokens == 32 && device.cc != 90) return "stages of 32 tokens are compiled for sm_90 only";
  return named_tile(device, tuning) ? nullptr : "no such tile is compiled, or it takes too much shared memory";
}

cudaError_t launch_tree_verify(TreeVerifyParams p, const Tuning& t, void* workspace, cudaStream_t stream) {
  if (p.num_tokens == 0) return cudaSuccess;
  // Rows of q are counted in int, and the workspace in unsigned units of 16 bytes.
  if (static_cast<int64_t>(p.num_tokens) * p.heads > INT32_MAX / 4) return cudaErrorInvalidValue;
  if (p.batch > static_cast<int>(UINT32_MAX / (kDeterministicRows * (kVDim * 2 / 16)))) return cudaErrorInvalidValue;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  const DeviceInfo& info = device_info(device);
  if (info.error != cudaSuccess) return info.error;

  const TileKernel* tile = choose_tile(info, t, p.max_nodes * p.heads, p.deterministic != 0);
  if (tile == nullptr) return cudaErrorInvalidConfiguration;
  p.row_tile = tile->row_tile;
  p.block_tokens = tile->block_tokens;
  p.min_blocks = t.min_blocks ? t.min_blocks : tile->wgmma ? 1 : 2;  // of 64 tokens, of 16 or 32
  const int tiles = (p.max_nodes * p.heads + p.row_tile - 1) / p.row_tile;
  p.lanes = p.deterministic || tiles > info.sm_count ? info.sm_count : tiles;
  p.groups = std::min(info.sm_count / p.lanes, kMostSplits);

  const int64_t rows = workspace_rows(p.batch, info.sm_count, p.deterministic != 0);
  p.partial_out = static_cast<float*>(workspace);
  p.partial_ms = reinterpret_cast<float2*>(p.partial_out + rows * kVDim);

  const void* kernel = p.is_bf16 ? tile->bf16 : tile->fp16;
  void* args[] = {&p};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p.groups * p.lanes);
  config.blockDim = dim3(tile->threads);
  config.dynamicSmemBytes = tile->smem_bytes;
  config.stream = stream;
  if (tile->wgmma) {  // merges in the same launch: all its blocks have to be there at once
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if ((error = cudaStreamIsCapturing(stream, &capture)) != cudaSuccess) return error;
    p.arrivals = next_arrivals(info, capture != cudaStreamCaptureStatusNone);
    CUtensorMap q_map;
    if (!make_q_map(p, q_map)) return cudaErrorInvalidValue;
    void* with_map[] = {&p, &q_map};
    cudaLaunchAttribute cooperative = {};
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
    config.attrs = &cooperative;
    config.numAttrs = 1;
    return cudaLaunchKernelExC(&config, kernel, with_map);
  }
  error = cudaLaunchKernelExC(&config, kernel, args);
  if (error != cudaSuccess) return error;
  return launch_merge(p, info.sm_count, info.cc >= 90, stream);
}

}  // namespace kdtree
