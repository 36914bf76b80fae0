// The torch-independent ABI: functions exported through apache-tvm-ffi, with checks that name the argument.
//
//   nvcc -O3 -std=c++17 -I $(python -c "import tvm_ffi.libinfo as l; print(l.find_include_path())") -c binding.cu
//
// All checks are on shapes, types, strides and devices: values on the device are never read here.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <string>

#include "kernels.h"
#include "workspace.h"

#ifndef KD_VERSION
#define KD_VERSION "0.1.0"
#endif
#ifndef KD_ARCH_LIST
#define KD_ARCH_LIST "unknown"
#endif

namespace {

using tvm::ffi::Optional;
using tvm::ffi::String;
using tvm::ffi::TensorView;

#define KD_CHECK(cond, kind) \
  if (cond) {              \
  } else /* NOLINT */      \
    TVM_FFI_THROW(kind)

bool is_type(const TensorView& t, int code, int bits) {
  return t.dtype().code == code && t.dtype().bits == bits && t.dtype().lanes == 1;
}

std::string shape_of(const TensorView& t) {
  std::string s = "[";
  for (int i = 0; i < t.ndim(); ++i) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + "]";
}

void* pointer(const TensorView& t) { return static_cast<char*>(t.data_ptr()) + t.byte_offset(); }

void check_device(const TensorView& t, const TensorView& like, const char* name) {
  KD_CHECK(t.device().device_type == like.device().device_type && t.device().device_id == like.device().device_id,
           ValueError)
      << name << ": expected on the device of q";
}

void check_contiguous(const TensorView& t, const char* name) {
  KD_CHECK(t.IsContiguous(), ValueError) << name << ": expected contiguous, got strides of another layout";
}

kdtree::IndexArray index_array(const TensorView& t, const TensorView& q, int64_t least, const char* name) {
  const bool wide = is_type(t, kDLInt, 64);
  KD_CHECK(wide || is_type(t, kDLInt, 32), TypeError) << name << ": expected int32 or int64";
  KD_CHECK(t.ndim() == 1 && t.size(0) >= least, ValueError)
      << name << ": expected [>= " << least << "], got " << shape_of(t);
  check_device(t, q, name);
  check_contiguous(t, name);
  kdtree::IndexArray a;
  a.data = pointer(t);
  a.is_int64 = wide;
  return a;
}

kdtree::TreeVerifyParams make_params(const TensorView& q, const TensorView& kv_pool, const TensorView& qo_indptr,
                                     const TensorView& kv_indptr, const Optional<TensorView>& kv_indices,
                                     const TensorView& draft_slots, const Optional<TensorView>& mask,
                                     const Optional<TensorView>& mask_indptr, double sm_scale, int64_t max_nodes,
                                     const TensorView& out, const Optional<TensorView>& lse) {
  kdtree::TreeVerifyParams p = {};
  KD_CHECK(q.device().device_type == kDLCUDA, ValueError) << "q: expected a CUDA tensor";
  p.is_bf16 = is_type(q, kDLBfloat, 16);
  KD_CHECK(p.is_bf16 || is_type(q, kDLFloat, 16), TypeError) << "q: expected bfloat16 or float16";
  KD_CHECK(q.ndim() == 3 && q.size(2) == kdtree::kQkDim && q.size(1) >= 1, ValueError)
      << "q: expected [num_tokens, heads, 576], got " << shape_of(q);
  check_contiguous(q, "q");
  KD_CHECK(reinterpret_cast<uintptr_t>(pointer(q)) % 16 == 0, ValueError) << "q: expected 16-byte aligned";
  p.num_tokens = static_cast<int>(q.size(0));
  p.heads = static_cast<int>(q.size(1));
  p.q = pointer(q);

  KD_CHECK(kv_pool.dtype().code == q.dtype().code && kv_pool.dtype().bits == 16, TypeError)
      << "kv_pool: expected the dtype of q";
  KD_CHECK((kv_pool.ndim() == 2 || (kv_pool.ndim() == 3 && kv_pool.size(1) == 1)) &&
               kv_pool.size(-1) == kdtree::kQkDim,
           ValueError)
      << "kv_pool: expected [num_slots, 576] or [num_slots, 1, 576], got " << shape_of(kv_pool);
  check_device(kv_pool, q, "kv_pool");
  p.slot_stride = kv_pool.stride(0);
  KD_CHECK(kv_pool.stride(-1) == 1 && p.slot_stride % 8 == 0 && reinterpret_cast<uintptr_t>(pointer(kv_pool)) % 16 == 0,
           ValueError)
      << "kv_pool: expected unit stride inside a slot, a slot stride that is a multiple of 8 values, 16-byte aligned";
  p.kv_pool = pointer(kv_pool);

  p.batch = static_cast<int>(qo_indptr.ndim() == 1 ? qo_indptr.size(0) - 1 : -1);
  KD_CHECK(p.batch >= 0, ValueError) << "qo_indptr: expected [batch + 1], got " << shape_of(qo_indptr);
  p.qo_indptr = index_array(qo_indptr, q, 1, "qo_indptr");
  p.kv_indptr = index_array(kv_indptr, q, p.batch + 1, "kv_indptr");
  if (kv_indices.has_value()) p.kv_indices = index_array(*kv_indices, q, 0, "kv_indices");
  p.draft_slots = index_array(draft_slots, q, p.num_tokens, "draft_slots");
  if (kv_indices.has_value() && p.kv_indices.data == nullptr) p.kv_indices.data = p.draft_slots.data;  // empty: never read

  p.mask_layout = kdtree::MaskLayout::kCausal;
  if (mask.has_value()) {
    KD_CHECK(mask_indptr.has_value(), ValueError) << "mask_indptr: expected with a mask";
    const TensorView& m = *mask;
    const bool words = is_type(m, kDLInt, 64) || is_type(m, kDLUInt, 64);
    KD_CHECK(words || (m.dtype().bits == 8 && m.dtype().lanes == 1), TypeError)
        << "mask: expected bool, uint8 or int64 words";
    p.mask_layout = words ? kdtree::MaskLayout::kPacked : kdtree::MaskLayout::kBytes;
    check_device(m, q, "mask");
    check_contiguous(m, "mask");
    p.mask = pointer(m);
    p.mask_indptr = index_array(*mask_indptr, q, p.batch + 1, "mask_indptr");
  }

  KD_CHECK(max_nodes >= 1 && max_nodes <= kdtree::kMaxNodes, ValueError)
      << "max_nodes: expected 1.." << kdtree::kMaxNodes << ", got " << max_nodes;
  p.max_nodes = static_cast<int>(max_nodes);
  p.sm_scale = static_cast<float>(sm_scale);

  KD_CHECK(out.dtype().code == q.dtype().code && out.dtype().bits == 16, TypeError) << "out: expected the dtype of q";
  KD_CHECK(out.ndim() == 3 && out.size(0) == q.size(0) && out.size(1) == q.size(1) && out.size(2) == kdtree::kVDim,
           ValueError)
      << "out: expected [" << q.size(0) << ", " << q.size(1) << ", 512], got " << shape_of(out);
  check_device(out, q, "out");
  check_contiguous(out, "out");
  p.out = pointer(out);
  if (lse.has_value()) {
    KD_CHECK(is_type(*lse, kDLFloat, 32), TypeError) << "lse: expected float32";
    KD_CHECK((*lse).ndim() == 2 && (*lse).size(0) == q.size(0) && (*lse).size(1) == q.size(1), ValueError)
        << "lse: expected [" << q.size(0) << ", " << q.size(1) << "], got " << shape_of(*lse);
    check_device(*lse, q, "lse");
    check_contiguous(*lse, "lse");
    p.lse = static_cast<float*>(pointer(*lse));
  }
  return p;
}

// Makes q's device current for the launch; torch's current device may be another.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    cudaGetDevice(&before_);
    if (before_ != device) cudaSetDevice(device);
    device_ = device;
  }
  ~DeviceScope() {
    if (before_ != device_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0, device_ = 0;
};

cudaStream_t stream_of(const TensorView& t) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(t.device().device_type, t.device().device_id));
}

void check_launch(cudaError_t error, const char* what) {
  KD_CHECK(error == cudaSuccess, RuntimeError) << what << ": " << cudaGetErrorString(error);
}

kdtree::Tuning make_tuning(int64_t row_tile, int64_t block_tokens, int64_t min_blocks) {
  const auto narrow = [](int64_t value, const char* name) {
    KD_CHECK(value >= 0 && value <= 1 << 20, ValueError) << name << ": expected 0 or a small number, got " << value;
    return static_cast<int>(value);
  };
  return {narrow(row_tile, "row_tile"), narrow(block_tokens, "block_tokens"), narrow(min_blocks, "min_blocks")};
}

// row_tile, block_tokens, min_blocks: what the tuning table says of this call; 0 is the built-in choice.
void tree_verify_attention(TensorView q, TensorView kv_pool, TensorView qo_indptr, TensorView kv_indptr,
                           Optional<TensorView> kv_indices, TensorView draft_slots, Optional<TensorView> mask,
                           Optional<TensorView> mask_indptr, double sm_scale, int64_t max_nodes,
                           TensorView out, Optional<TensorView> lse, TensorView workspace, bool deterministic,
                           int64_t row_tile, int64_t block_tokens, int64_t min_blocks) {
  kdtree::TreeVerifyParams p = make_params(q, kv_pool, qo_indptr, kv_indptr, kv_indices, draft_slots, mask,
                                           mask_indptr, sm_scale, max_nodes, out, lse);
  p.deterministic = deterministic;
  DeviceScope scope(q.device().device_id);
  check_device(workspace, q, "workspace");
  check_contiguous(workspace, "workspace");
  const kdtree::Tuning tuning =
      kdtree::resolved_tuning(kdtree::tuning(), make_tuning(row_tile, block_tokens, min_blocks));
  const char* refusal = kdtree::tuning_refusal(kdtree::device_info(q.device().device_id), tuning);
  KD_CHECK(refusal == nullptr, RuntimeError)
      << "the tile that was asked for (by set_tuning, the tuning table, or KDTREE_WGMMA=1 for block_tokens "
      << kdtree::kWgmmaBlock << "; row_tile " << tuning.row_tile << ", block_tokens " << tuning.block_tokens
      << ") cannot be launched on device " << q.device().device_id << ": " << refusal;
  const int64_t bytes = workspace.numel() * (workspace.dtype().bits / 8);
  const int64_t needed = kdtree::workspace_bytes(p.num_tokens, p.batch, p.heads, p.max_nodes,
                                                 kdtree::device_info(q.device().device_id).sm_count, deterministic);
  KD_CHECK(bytes >= needed, ValueError) << "workspace: expected at least " << needed << " bytes, got " << bytes;
  KD_CHECK(reinterpret_cast<uintptr_t>(pointer(workspace)) % 16 == 0, ValueError)
      << "workspace: expected 16-byte aligned";
  check_launch(kdtree::launch_tree_verify(p, tuning, pointer(workspace), stream_of(q)), "tree_verify_attention");
}

void tree_verify_attention_naive(TensorView q, TensorView kv_pool, TensorView qo_indptr, TensorView kv_indptr,
                                 Optional<TensorView> kv_indices, TensorView draft_slots, Optional<TensorView> mask,
                                 Optional<TensorView> mask_indptr, double sm_scale, int64_t max_nodes,
                                 TensorView out, Optional<TensorView> lse) {
  const kdtree::TreeVerifyParams p = make_params(q, kv_pool, qo_indptr, kv_indptr, kv_indices, draft_slots, mask,
                                                 mask_indptr, sm_scale, max_nodes, out, lse);
  DeviceScope scope(q.device().device_id);
  check_launch(kdtree::launch_naive(p, stream_of(q)), "tree_verify_attention_naive");
}

int64_t workspace_bytes(int64_t num_tokens, int64_t batch, int64_t heads, int64_t max_nodes, int64_t sm_count,
                        bool deterministic) {
  return kdtree::workspace_bytes(num_tokens, batch, heads, max_nodes, sm_count, deterministic);
}

String build_info() { return String(std::string("version " KD_VERSION "; arch " KD_ARCH_LIST)); }

// For `kd tune` and `kd bench`: forces the tile (row_tile, block_tokens of tiles.h) and the least stages
// of a split for every later call of this process, whatever the calls bring along; 0 leaves it to them. A
// call raises RuntimeError where the tile cannot be had on its device. block_tokens 64 with row_tile 0
// asks for the wgmma tiles: a call's own where it is one of them, else one by the built-in rule.
void set_tuning(int64_t row_tile, int64_t block_tokens, int64_t min_blocks) {
  kdtree::tuning() = make_tuning(row_tile, block_tokens, min_blocks);
}

String compiled_tiles(int64_t cc, int64_t smem_limit) {
  return String(kdtree::compiled_tiles(static_cast<int>(cc), static_cast<int>(smem_limit)));
}

}  // namespace

// The export macro leaves a parameter unused.
#pragma GCC diagnostic ignored "-Wunused-parameter"
TVM_FFI_DLL_EXPORT_TYPED_FUNC(tree_verify_attention, tree_verify_attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(tree_verify_attention_naive, tree_verify_attention_naive);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_bytes, workspace_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_info, build_info);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_tuning, set_tuning);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(compiled_tiles, compiled_tiles);
