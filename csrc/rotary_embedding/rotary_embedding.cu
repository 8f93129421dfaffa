// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of query and key, in place.
//
// Every product and sum is rounded to the tensors' own type, as PyTorch's element-wise operations round it, so that the
// result can be compared bit for bit with vLLM's RotaryEmbedding.forward_static. The _rn intrinsics keep the compiler
// from contracting a product and a sum into one fused operation, which would round once less.
//
// Only the stable ABI of PyTorch is used (torch/csrc/stable, torch/headeronly): one library serves every Python version
// and later PyTorch releases, and its headers are complete in a CPU build of PyTorch too, which c10/cuda's are not.

#include <algorithm>
#include <cstdint>
#include <optional>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

// Defined by CUDA builds of PyTorch alone. As a weak symbol it lets the library load, and refuse, beside a CPU build.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream) __attribute__((weak));

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kMaxThreads = 512;
constexpr int64_t kWarp = 32;

// Heads of one tensor, as offsets in elements from its first one. The elements of a head lie side by side.
struct Heads {
  void* data = nullptr;
  int64_t count = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename scalar_t>
__device__ __forceinline__ scalar_t narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

template <typename scalar_t>
__device__ __forceinline__ float product(float a, float b) {
  return widen(narrow<scalar_t>(__fmul_rn(a, b)));
}

template <typename scalar_t, bool kNeox>
__device__ __forceinline__ void rotate_heads(const Heads heads, const scalar_t* __restrict__ cos_sin, int half_dim) {
  scalar_t* token = static_cast<scalar_t*>(heads.data) + blockIdx.x * heads.token_stride;
  const int64_t pairs = heads.count * half_dim;
  for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
    const int64_t head = i / half_dim;
    const int pair = static_cast<int>(i - head * half_dim);
    scalar_t* first = token + head * heads.head_stride + (kNeox ? pair : 2 * pair);
    scalar_t* second = first + (kNeox ? half_dim : 1);
    const float cos = widen(cos_sin[pair]);
    const float sin = widen(cos_sin[half_dim + pair]);
    const float x = widen(*first);
    const float y = widen(*second);
    *first = narrow<scalar_t>(__fsub_rn(product<scalar_t>(x, cos), product<scalar_t>(y, sin)));
    *second = narrow<scalar_t>(__fadd_rn(product<scalar_t>(y, cos), product<scalar_t>(x, sin)));
  }
}

// One block for each token: its rows of query and key share one row of the cache.
template <typename scalar_t, bool kNeox>
__global__ void rotary_embedding_kernel(
    const int64_t* __restrict__ positions, const Heads query, const Heads key,
    const scalar_t* __restrict__ cos_sin_cache, const int64_t cache_stride, const int half_dim) {
  const scalar_t* cos_sin = cos_sin_cache + positions[blockIdx.x] * cache_stride;
  rotate_heads<scalar_t, kNeox>(query, cos_sin, half_dim);
  rotate_heads<scalar_t, kNeox>(key, cos_sin, half_dim);
}

// Checks one tensor against the positions and finds its strides.
// Shapes: positions' sizes, then [heads * head_size] or [heads, head_size].
Heads heads_of(const Tensor& tensor, const char* name, const Tensor& positions, int64_t head_size) {
  const int64_t leading = positions.dim();
  STD_TORCH_CHECK(
      tensor.dim() == leading + 1 || tensor.dim() == leading + 2, "rotary_embedding: ", name, " has ", tensor.dim(),
      " dimensions; expected those of positions (", leading, ") and [heads * head_size] or [heads, head_size]");
  for (int64_t i = 0; i < leading; ++i) {
    STD_TORCH_CHECK(
        tensor.size(i) == positions.size(i), "rotary_embedding: ", name, ".size(", i, ") is ", tensor.size(i),
        "; expected ", positions.size(i), ", as positions has");
  }
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    STD_TORCH_CHECK(
        tensor.size(i) <= 1 || tensor.stride(i) > 0, "rotary_embedding: ", name, ".stride(", i,
        ") is 0, so its elements overlap; expected a tensor that can be written in place");
  }
  const int64_t last = tensor.dim() - 1;
  STD_TORCH_CHECK(
      tensor.size(last) <= 1 || tensor.stride(last) == 1, "rotary_embedding: ", name, " has stride ",
      tensor.stride(last), " in its last dimension; expected 1: call contiguous() first");
  for (int64_t i = 0; i + 1 < leading; ++i) {
    STD_TORCH_CHECK(
        tensor.size(i) <= 1 || tensor.stride(i) == tensor.size(i + 1) * tensor.stride(i + 1), "rotary_embedding: ", name,
        " has strides that differ between batches; expected tokens at even distances: call contiguous() first");
  }
  Heads heads;
  heads.token_stride = tensor.stride(leading - 1);
  if (tensor.dim() == leading + 2) {
    STD_TORCH_CHECK(
        tensor.size(last) == head_size, "rotary_embedding: the heads of ", name, " have ", tensor.size(last),
        " elements; expected head_size=", head_size);
    heads.count = tensor.size(leading);
    heads.head_stride = tensor.stride(leading);
  } else {
    STD_TORCH_CHECK(
        tensor.size(last) % head_size == 0, "rotary_embedding: ", name, " has ", tensor.size(last),
        " elements a token; expected a multiple of head_size=", head_size);
    heads.count = tensor.size(last) / head_size;
    heads.head_stride = head_size;
  }
  heads.data = tensor.mutable_data_ptr();
  return heads;
}

void check_alike(const Tensor& tensor, const char* name, const Tensor& query) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == query.scalar_type(), "rotary_embedding: ", name, " is ",
      torch::headeronly::toString(tensor.scalar_type()), "; expected query's type, ",
      torch::headeronly::toString(query.scalar_type()));
  STD_TORCH_CHECK(
      tensor.is_cuda() && tensor.get_device_index() == query.get_device_index(), "rotary_embedding: ", name,
      " is not on query's device, cuda:", static_cast<int>(query.get_device_index()));
}

template <typename scalar_t>
void launch(
    const Tensor& positions, const Heads& query, const Heads& key, const Tensor& cache, bool is_neox,
    cudaStream_t stream) {
  const int half_dim = static_cast<int>(cache.size(1) / 2);
  const int64_t pairs = std::max(query.count, key.count) * half_dim;
  const int64_t threads = std::min(kMaxThreads, (pairs + kWarp - 1) / kWarp * kWarp);
  const dim3 grid(static_cast<unsigned>(positions.numel()));
  const dim3 block(static_cast<unsigned>(threads));
  const auto* where = static_cast<const int64_t*>(positions.const_data_ptr());
  const auto* cos_sin = static_cast<const scalar_t*>(cache.const_data_ptr());
  if (is_neox) {
    rotary_embedding_kernel<scalar_t, true>
        <<<grid, block, 0, stream>>>(where, query, key, cos_sin, cache.stride(0), half_dim);
  } else {
    rotary_embedding_kernel<scalar_t, false>
        <<<grid, block, 0, stream>>>(where, query, key, cos_sin, cache.stride(0), half_dim);
  }
}

void rotary_embedding(
    Tensor positions, Tensor query, std::optional<Tensor> key, int64_t head_size, Tensor cos_sin_cache, bool is_neox) {
  STD_TORCH_CHECK(query.is_cuda(), "rotary_embedding: query is not on a CUDA device");
  STD_TORCH_CHECK(
      positions.is_cuda() && positions.get_device_index() == query.get_device_index(),
      "rotary_embedding: positions is not on query's device, cuda:", static_cast<int>(query.get_device_index()));
  STD_TORCH_CHECK(
      positions.scalar_type() == ScalarType::Long, "rotary_embedding: positions is ",
      torch::headeronly::toString(positions.scalar_type()), "; expected Long");
  STD_TORCH_CHECK(
      positions.dim() >= 1 && positions.is_contiguous(),
      "rotary_embedding: positions has to be contiguous and to have a dimension");
  STD_TORCH_CHECK(
      positions.numel() <= INT32_MAX, "rotary_embedding: ", positions.numel(), " tokens; expected at most ", INT32_MAX);
  STD_TORCH_CHECK(head_size > 0, "rotary_embedding: head_size is ", head_size, "; expected a positive number");
  check_alike(cos_sin_cache, "cos_sin_cache", query);
  STD_TORCH_CHECK(
      cos_sin_cache.dim() == 2, "rotary_embedding: cos_sin_cache has ", cos_sin_cache.dim(),
      " dimensions; expected [max_position, rotary_dim]");
  const int64_t rotary_dim = cos_sin_cache.size(1);
  STD_TORCH_CHECK(
      rotary_dim % 2 == 0 && rotary_dim <= head_size, "rotary_embedding: rotary_dim is ", rotary_dim,
      "; expected an even number of at most head_size=", head_size);
  STD_TORCH_CHECK(
      rotary_dim == 0 || cos_sin_cache.stride(1) == 1, "rotary_embedding: cos_sin_cache has stride ",
      cos_sin_cache.stride(1), " in its last dimension; expected 1");
  const Heads query_heads = heads_of(query, "query", positions, head_size);
  Heads key_heads;
  if (key.has_value()) {
    check_alike(*key, "key", query);
    key_heads = heads_of(*key, "key", positions, head_size);
  }
  if (positions.numel() == 0 || rotary_dim == 0 || query_heads.count + key_heads.count == 0) {
    return;
  }
  STD_TORCH_CHECK(
      aoti_torch_get_current_cuda_stream != nullptr, "rotary_embedding: this PyTorch was built without CUDA");
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(query.get_device_index(), &stream));
  const auto current = static_cast<cudaStream_t>(stream);
  switch (query.scalar_type()) {
    case ScalarType::Float:
      launch<float>(positions, query_heads, key_heads, cos_sin_cache, is_neox, current);
      break;
    case ScalarType::Half:
      launch<__half>(positions, query_heads, key_heads, cos_sin_cache, is_neox, current);
      break;
    case ScalarType::BFloat16:
      launch<__nv_bfloat16>(positions, query_heads, key_heads, cos_sin_cache, is_neox, current);
      break;
    default:
      STD_TORCH_CHECK(
          false, "rotary_embedding: query is ", torch::headeronly::toString(query.scalar_type()),
          "; expected Float, Half or BFloat16");
  }
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "rotary_embedding: the kernel did not start: ", cudaGetErrorString(error));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hwplugin, CUDA, library) { library.impl("rotary_embedding", TORCH_BOX(&rotary_embedding)); }
