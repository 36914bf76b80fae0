// The torch-independent ABI of the tree kernels: functions exported through apache-tvm-ffi.
//
//   nvcc -O3 -std=c++17 -I $(python -c "import tvm_ffi.libinfo as l; print(l.find_include_path())") -c binding.cu
//
// kdtree_engine.ops has checked what its callers gave, and made the outputs. Checked here is what would let a
// kernel write or read out of bounds: types, extents, contiguity and devices. No value on the device is read.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <initializer_list>
#include <string>

#include "kernels.h"

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
  if (cond) {                \
  } else /* NOLINT */        \
    TVM_FFI_THROW(kind)

bool is_type(const TensorView& t, int code, int bits) {
  return t.dtype().code == code && t.dtype().bits == bits && t.dtype().lanes == 1;
}

std::string shape_of(const TensorView& t) {
  std::string s = "[";
  for (int i = 0; i < t.ndim(); ++i) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + "]";
}

char* pointer(const TensorView& t) { return static_cast<char*>(t.data_ptr()) + t.byte_offset(); }

// A contiguous tensor on the device of `like`, with elements of `bits` bits and the type code that is wanted.
// The last extent may be longer where `longer` is set.
template <typename T>
T* checked(const TensorView& t, const TensorView& like, const char* name, int code, std::initializer_list<int64_t> shape,
           bool longer = false) {
  KD_CHECK(is_type(t, code, 8 * sizeof(T)), TypeError) << name << ": expected another dtype";
  bool fits = t.ndim() == static_cast<int>(shape.size());
  int i = 0;
  for (const int64_t extent : shape) {
    if (!fits) break;
    const bool last = i + 1 == static_cast<int>(shape.size());
    fits = longer && last ? t.size(i) >= extent : t.size(i) == extent;
    ++i;
  }
  KD_CHECK(fits, ValueError) << name << ": expected another shape, got " << shape_of(t);
  KD_CHECK(t.device().device_type == like.device().device_type && t.device().device_id == like.device().device_id,
           ValueError)
      << name << ": expected on the device of the other tensors";
  KD_CHECK(t.IsContiguous(), ValueError) << name << ": expected contiguous strides";
  return reinterpret_cast<T*>(pointer(t));
}

void check_cuda(const TensorView& t, const char* name) {
  KD_CHECK(t.device().device_type == kDLCUDA, ValueError) << name << ": expected a CUDA tensor";
}

int narrow(int64_t value, int64_t low, int64_t high, const char* name) {
  KD_CHECK(value >= low && value <= high, ValueError)
      << name << ": expected " << low << ".." << high << ", got " << value;
  return static_cast<int>(value);
}

// Makes a tensor's device current for the launch; torch's current device may be another.
class DeviceScope {
 public:
  explicit DeviceScope(const TensorView& t) : device_(t.device().device_id) {
    cudaGetDevice(&before_);
    if (before_ != device_) cudaSetDevice(device_);
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

constexpr int64_t kAlign = 256;

int64_t padded(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// The parts of the workspace, one after the other; `base` may be null, to learn what they take.
int64_t lay_out(kdtree::BuildParams& p, char* base) {
  const int64_t rows = static_cast<int64_t>(p.batch) * p.depth;
  int64_t at = 0;
  const auto part = [&](int64_t bytes) {
    char* begin = base + at;
    at += padded(bytes);
    return begin;
  };
  p.keys = reinterpret_cast<uint64_t*>(part(rows * p.chunks * p.ranks * 8));
  p.sums = reinterpret_cast<uint64_t*>(part(rows * p.chunks * 8));
  p.log_probs = reinterpret_cast<double*>(part(rows * p.ranks * 8));
  p.candidates = reinterpret_cast<int64_t*>(part(rows * p.ranks * 8));
  p.tops = reinterpret_cast<float*>(part(rows * p.chunks * 4));
  return at;
}

void set_sizes(kdtree::BuildParams& p, int64_t batch, int64_t depth, int64_t columns, int64_t ranks) {
  p.batch = narrow(batch, 0, 65535, "batch");  // of a grid
  p.depth = narrow(depth, 1, kdtree::kMaxDepth, "depth");
  p.columns = narrow(columns, 1, kdtree::kMaxChunks * kdtree::kChunkColumns, "columns");
  p.ranks = narrow(ranks, 1, columns < kdtree::kMaxRanks ? columns : kdtree::kMaxRanks, "ranks");
  p.chunks = (p.columns + kdtree::kChunkColumns - 1) / kdtree::kChunkColumns;
}

int64_t build_workspace_bytes(int64_t batch, int64_t depth, int64_t columns, int64_t ranks) {
  kdtree::BuildParams p = {};
  set_sizes(p, batch, depth, columns, ranks);
  return lay_out(p, nullptr);
}

void build_draft_trees(TensorView scores, Optional<TensorView> token_ids, Optional<TensorView> root_tokens,
                       TensorView prefix_lengths, bool from_logits, int64_t ranks, TensorView tokens,
                       TensorView parents, TensorView depths, TensorView positions, TensorView log_weights,
                       TensorView counts, TensorView retrieve_index, TensorView retrieve_next_token,
                       TensorView retrieve_next_sibling, TensorView draft_mask, TensorView packed_mask,
                       Optional<TensorView> full_mask, TensorView workspace) {
  kdtree::BuildParams p = {};
  check_cuda(scores, "scores");
  KD_CHECK(scores.ndim() == 3 && (scores.size(2) == 1 || scores.stride(2) == 1), ValueError)
      << "scores: expected [batch, depth, columns], the columns contiguous, got " << shape_of(scores);
  if (is_type(scores, kDLFloat, 32)) {
    p.type = kdtree::ScoreType::kFloat32;
  } else if (is_type(scores, kDLBfloat, 16)) {
    p.type = kdtree::ScoreType::kBfloat16;
  } else {
    KD_CHECK(is_type(scores, kDLFloat, 16), TypeError) << "scores: expected float32, bfloat16 or float16";
    p.type = kdtree::ScoreType::kFloat16;
  }
  set_sizes(p, scores.size(0), scores.size(1), scores.size(2), ranks);
  p.scores = pointer(scores);
  p.batch_stride = scores.stride(0);
  p.depth_stride = scores.stride(1);
  p.from_logits = from_logits;
  const int64_t batch = p.batch;
  if (token_ids.has_value())
    p.token_ids = checked<int64_t>(*token_ids, scores, "token_ids", kDLInt, {batch, p.depth, p.columns});
  if (root_tokens.has_value())
    p.root_tokens = checked<int64_t>(*root_tokens, scores, "root_tokens", kDLInt, {batch});
  p.prefix_lengths = checked<int64_t>(prefix_lengths, scores, "prefix_lengths", kDLInt, {batch});

  KD_CHECK(tokens.ndim() == 2, ValueError) << "tokens: expected [batch, nodes], got " << shape_of(tokens);
  const int64_t nodes = narrow(tokens.size(1), 2, kdtree::kMaxNodes, "nodes");
  p.out.nodes = static_cast<int>(nodes);
  const auto per_node = [&](const TensorView& t, const char* name) {
    return checked<int64_t>(t, scores, name, kDLInt, {batch, nodes});
  };
  p.out.tokens = per_node(tokens, "tokens");
  p.out.parents = per_node(parents, "parents");
  p.out.depths = per_node(depths, "depths");
  p.out.positions = per_node(positions, "positions");
  p.out.log_weights = checked<double>(log_weights, scores, "log_weights", kDLFloat, {batch, nodes});
  p.out.counts = checked<int64_t>(counts, scores, "counts", kDLInt, {batch});
  p.out.retrieve_index = per_node(retrieve_index, "retrieve_index");
  p.out.retrieve_next_token = per_node(retrieve_next_token, "retrieve_next_token");
  p.out.retrieve_next_sibling = per_node(retrieve_next_sibling, "retrieve_next_sibling");
  p.out.draft_mask = checked<uint8_t>(draft_mask, scores, "draft_mask", kDLUInt, {batch * nodes * nodes});
  p.out.packed_mask =
      checked<int64_t>(packed_mask, scores, "packed_mask", kDLInt, {batch * nodes * ((nodes + 63) / 64)});
  if (full_mask.has_value()) {
    const int code = is_type(*full_mask, kDLBool, 8) ? kDLBool : kDLUInt;
    p.out.full_mask = checked<uint8_t>(*full_mask, scores, "full_mask", code, {batch * nodes * nodes}, true);
  }
  uint8_t* begin =
      checked<uint8_t>(workspace, scores, "workspace", kDLUInt, {lay_out(p, nullptr)}, true);
  KD_CHECK(reinterpret_cast<uintptr_t>(begin) % 8 == 0, ValueError) << "workspace: expected 8-byte aligned";
  lay_out(p, reinterpret_cast<char*>(begin));
  DeviceScope scope(scores);
  check_launch(kdtree::launch_build(p, stream_of(scores)), "build_draft_trees");
}

void sample_tokens(TensorView probs, TensorView draws, TensorView tokens) {
  check_cuda(probs, "probs");
  KD_CHECK(probs.ndim() == 2, ValueError) << "probs: expected [rows, columns], got " << shape_of(probs);
  kdtree::SampleParams p = {};
  p.rows = narrow(probs.size(0), 0, INT32_MAX, "rows");
  p.columns = narrow(probs.size(1), 1, 1 << 18, "columns");
  p.probs = checked<float>(probs, probs, "probs", kDLFloat, {p.rows, p.columns});
  p.draws = checked<float>(draws, probs, "draws", kDLFloat, {p.rows});
  p.tokens = checked<int64_t>(tokens, probs, "tokens", kDLInt, {p.rows});
  DeviceScope scope(probs);
  check_launch(kdtree::launch_sample(p, stream_of(probs)), "sample_tokens");
}

void accept_trees(TensorView tokens, TensorView parents, TensorView targets, TensorView nodes, TensorView counts,
                  TensorView bonus) {
  check_cuda(tokens, "tokens");
  KD_CHECK(tokens.ndim() == 2, ValueError) << "tokens: expected [batch, nodes], got " << shape_of(tokens);
  KD_CHECK(nodes.ndim() == 2, ValueError) << "nodes: expected [batch, steps], got " << shape_of(nodes);
  kdtree::AcceptParams p = {};
  p.batch = narrow(tokens.size(0), 0, 1 << 16, "batch");
  p.nodes = narrow(tokens.size(1), 1, kdtree::kMaxNodes, "nodes");
  p.steps = narrow(nodes.size(1), 1, kdtree::kMaxNodes, "steps");
  p.tokens = checked<int64_t>(tokens, tokens, "tokens", kDLInt, {p.batch, p.nodes});
  p.parents = checked<int64_t>(parents, tokens, "parents", kDLInt, {p.batch, p.nodes});
  p.targets = checked<int64_t>(targets, tokens, "targets", kDLInt, {p.batch, p.nodes});
  p.path = checked<int64_t>(nodes, tokens, "nodes", kDLInt, {p.batch, p.steps});
  p.counts = checked<int64_t>(counts, tokens, "counts", kDLInt, {p.batch});
  p.bonus = checked<int64_t>(bonus, tokens, "bonus", kDLInt, {p.batch});
  DeviceScope scope(tokens);
  check_launch(kdtree::launch_accept(p, stream_of(tokens)), "accept_trees");
}

// pointers: int64 [layers] in the host's memory, the address of each layer's pool on the device of `nodes`.
void compact_kv(TensorView nodes, TensorView counts, TensorView windows, TensorView pointers, int64_t row_bytes) {
  check_cuda(nodes, "nodes");
  KD_CHECK(nodes.ndim() == 2, ValueError) << "nodes: expected [batch, steps], got " << shape_of(nodes);
  KD_CHECK(windows.ndim() == 2, ValueError) << "windows: expected [batch, nodes], got " << shape_of(windows);
  kdtree::CompactParams p = {};
  p.batch = narrow(nodes.size(0), 0, 65535, "batch");
  p.steps = narrow(nodes.size(1), 1, 1 << 20, "steps");
  p.nodes = narrow(windows.size(1), 1, 1 << 20, "nodes");
  p.path = checked<int64_t>(nodes, nodes, "nodes", kDLInt, {p.batch, p.steps});
  p.counts = checked<int64_t>(counts, nodes, "counts", kDLInt, {p.batch});
  p.windows = checked<int64_t>(windows, nodes, "windows", kDLInt, {p.batch, p.nodes});
  KD_CHECK(row_bytes > 0 && row_bytes % 16 == 0, ValueError)
      << "row_bytes: expected a multiple of 16, got " << row_bytes;
  p.row_bytes = row_bytes;
  KD_CHECK(pointers.device().device_type == kDLCPU && is_type(pointers, kDLInt, 64) && pointers.ndim() == 1 &&
               pointers.IsContiguous(),
           ValueError)
      << "pointers: expected contiguous int64 [layers] in the host's memory";
  p.layers = narrow(pointers.size(0), 1, kdtree::kMaxLayers, "layers");
  const int64_t* addresses = reinterpret_cast<const int64_t*>(pointer(pointers));
  for (int layer = 0; layer < p.layers; ++layer) {
    KD_CHECK(addresses[layer] != 0 && addresses[layer] % 16 == 0, ValueError)
        << "pointers: expected addresses that are multiples of 16, layer " << layer << " has none";
    p.pools[layer] = reinterpret_cast<char*>(addresses[layer]);
  }
  DeviceScope scope(nodes);
  check_launch(kdtree::launch_compact(p, stream_of(nodes)), "compact_kv");
}

// A tensor [batch] of int64 or int32: its elements, and whether they are the wide ones.
const void* integers(const TensorView& t, const TensorView& like, const char* name, int64_t batch, bool& wide) {
  wide = is_type(t, kDLInt, 64);
  if (wide) return checked<int64_t>(t, like, name, kDLInt, {batch});
  return checked<int32_t>(t, like, name, kDLInt, {batch});
}

void fill_kv_indices(TensorView req_to_token, TensorView requests, TensorView lengths, TensorView kv_indptr,
                     TensorView kv_indices) {
  check_cuda(req_to_token, "req_to_token");
  KD_CHECK(req_to_token.ndim() == 2, ValueError)
      << "req_to_token: expected [rows, width], got " << shape_of(req_to_token);
  KD_CHECK(requests.ndim() == 1, ValueError) << "requests: expected [batch], got " << shape_of(requests);
  KD_CHECK(kv_indices.ndim() == 1, ValueError) << "kv_indices: expected [room], got " << shape_of(kv_indices);
  kdtree::IndexParams p = {};
  p.batch = narrow(requests.size(0), 0, 65535, "batch");
  p.rows = req_to_token.size(0);
  p.width = narrow(req_to_token.size(1), 1, INT32_MAX, "width");
  p.room = kv_indices.size(0);
  p.req_to_token = checked<int32_t>(req_to_token, req_to_token, "req_to_token", kDLInt, {p.rows, p.width});
  p.requests = integers(requests, req_to_token, "requests", p.batch, p.requests_wide);
  p.lengths = integers(lengths, req_to_token, "lengths", p.batch, p.lengths_wide);
  p.kv_indptr = checked<int32_t>(kv_indptr, req_to_token, "kv_indptr", kDLInt, {p.batch + 1});
  p.kv_indices = checked<int64_t>(kv_indices, req_to_token, "kv_indices", kDLInt, {p.room});
  DeviceScope scope(req_to_token);
  check_launch(kdtree::launch_indices(p, stream_of(req_to_token)), "fill_kv_indices");
}

String build_info() { return String(std::string("version " KD_VERSION "; arch " KD_ARCH_LIST)); }

}  // namespace

// The export macro leaves a parameter unused.
#pragma GCC diagnostic ignored "-Wunused-parameter"
TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_draft_trees, build_draft_trees);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_workspace_bytes, build_workspace_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_tokens, sample_tokens);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(accept_trees, accept_trees);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(compact_kv, compact_kv);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fill_kv_indices, fill_kv_indices);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_info, build_info);
