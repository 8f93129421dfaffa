// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of query and key, in place.
//
// Every product and sum is rounded to the cache's type, as PyTorch's element-wise operations round them. With a cache of
// the tensors' own type the result has the bits of vLLM's RotaryEmbedding.forward_static; with a float32 cache it is
// rounded once. The _rn intrinsics keep the compiler from fusing a product and a sum, which would round once less.
//
// Only the stable ABI of PyTorch is used; see csrc/README.md.

#include <algorithm>
#include <cstdint>
#include <optional>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "common/arguments.h"
#include "common/numbers.cuh"
#include "common/stream.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kThreads = 128;
constexpr int64_t kMaxHeads = 1 << 16;  // keeps the indices of heads and rows within 32 bits

// Heads of one tensor; `data` is its first rotated element, and strides are in elements.
struct Heads {
  void* data = nullptr;
  unsigned count = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

struct Problem {
  const int64_t* positions;
  Heads query;
  Heads key;
  const void* cache;  // a row: the cosines of all pairs and then their sines
  int64_t cache_stride;
  int half_dim;
  bool is_neox;
  float direction;  // -1 for the inverse
  unsigned rows;
};

template <typename cache_t>
__device__ __forceinline__ float product(float a, float b) {
  return widen(narrow<cache_t>(__fmul_rn(a, b)));
}

// threadIdx.y is a row: a token's head of query, or else of key. threadIdx.x is a pair.
template <typename scalar_t, typename cache_t>
__global__ void __launch_bounds__(kThreads) rotary_embedding_kernel(const Problem problem) {
  const unsigned row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= problem.rows) {
    return;
  }
  const unsigned heads = problem.query.count + problem.key.count;
  const unsigned token = row / heads;
  const unsigned head = row - token * heads;
  const bool of_query = head < problem.query.count;
  const Heads& owner = of_query ? problem.query : problem.key;
  scalar_t* data = static_cast<scalar_t*>(owner.data) + token * owner.token_stride +
                   (of_query ? head : head - problem.query.count) * owner.head_stride;
  const cache_t* cos = static_cast<const cache_t*>(problem.cache) + problem.positions[token] * problem.cache_stride;
  for (int pair = threadIdx.x; pair < problem.half_dim; pair += blockDim.x) {
    const float c = widen(cos[pair]);
    const float s = problem.direction * widen(cos[problem.half_dim + pair]);
    scalar_t& first = data[problem.is_neox ? pair : 2 * pair];
    scalar_t& second = data[problem.is_neox ? pair + problem.half_dim : 2 * pair + 1];
    const float x = widen(first);
    const float y = widen(second);
    first = narrow<scalar_t>(__fsub_rn(product<cache_t>(x, c), product<cache_t>(y, s)));
    second = narrow<scalar_t>(__fadd_rn(product<cache_t>(y, c), product<cache_t>(x, s)));
  }
}

template <typename scalar_t, typename cache_t>
void launch(const Problem& problem, cudaStream_t stream) {
  const int across = std::min(kThreads, problem.half_dim);
  const dim3 block(static_cast<unsigned>(across), static_cast<unsigned>(kThreads / across));
  rotary_embedding_kernel<scalar_t, cache_t>
      <<<(problem.rows + block.y - 1) / block.y, block, 0, stream>>>(problem);
}

// [tokens, heads * head_size] or [tokens, heads, head_size].
Heads heads_of(const Checks& checks, const Tensor& tensor, const char* name, int64_t tokens, int64_t head_size) {
  STD_TORCH_CHECK(
      (tensor.dim() == 2 || tensor.dim() == 3) && tensor.size(0) == tokens, "rotary_embedding: ", name, " has ",
      tensor.dim(), " dimensions and ", tensor.size(0), " tokens; expected [", tokens,
      ", heads * head_size] or [", tokens, ", heads, head_size]");
  checks.check_written(tensor, name, " in place");
  checks.check_last_stride(tensor, name);
  const bool split = tensor.dim() == 3;
  const int64_t last = tensor.size(tensor.dim() - 1);
  STD_TORCH_CHECK(
      split ? last == head_size : last % head_size == 0, "rotary_embedding: ", name, " has ", last,
      " elements in its last dimension; expected head_size=", head_size, ", or a multiple of it");
  const int64_t count = split ? tensor.size(1) : last / head_size;
  STD_TORCH_CHECK(
      count <= kMaxHeads, "rotary_embedding: ", name, " has ", count, " heads; expected at most ", kMaxHeads);
  Heads heads;
  heads.count = static_cast<unsigned>(count);
  heads.token_stride = tensor.stride(0);
  heads.head_stride = split ? tensor.stride(1) : head_size;
  return heads;
}

// Registered with vLLM's schema.
void rotary_embedding(
    Tensor positions, Tensor query, std::optional<Tensor> key, int64_t head_size, Tensor cos_sin_cache, bool is_neox,
    int64_t rope_dim_offset, bool inverse) {
  const Checks checks("rotary_embedding", "query", query);
  const ScalarType type = query.scalar_type();
  checks.check_type(query, "query", is_floating(type), "Float, Half or BFloat16");
  checks.check_device(positions, "positions");
  checks.check_type(positions, "positions", ScalarType::Long);
  STD_TORCH_CHECK(
      positions.dim() == 1 && positions.is_contiguous(), "rotary_embedding: positions has ", positions.dim(),
      " dimensions; expected [tokens], contiguous");
  STD_TORCH_CHECK(head_size > 0, "rotary_embedding: head_size is ", head_size, "; expected a positive number");
  checks.check_device(cos_sin_cache, "cos_sin_cache");
  const ScalarType cache_type = cos_sin_cache.scalar_type();
  checks.check_type(
      cos_sin_cache, "cos_sin_cache", cache_type == type || cache_type == ScalarType::Float, "query's type, ",
      torch::headeronly::toString(type), ", or Float");
  STD_TORCH_CHECK(
      cos_sin_cache.dim() == 2, "rotary_embedding: cos_sin_cache has ", cos_sin_cache.dim(),
      " dimensions; expected [max_position, rotary_dim]");
  checks.check_last_stride(cos_sin_cache, "cos_sin_cache");
  const int64_t rotary_dim = cos_sin_cache.size(1);
  STD_TORCH_CHECK(
      rotary_dim % 2 == 0 && rotary_dim <= head_size, "rotary_embedding: rotary_dim is ", rotary_dim,
      "; expected an even number of at most head_size=", head_size);
  STD_TORCH_CHECK(
      rope_dim_offset >= 0 && rope_dim_offset <= head_size - rotary_dim, "rotary_embedding: rope_dim_offset is ",
      rope_dim_offset, "; expected 0 to ", head_size - rotary_dim);
  const int64_t tokens = positions.size(0);
  Heads query_heads = heads_of(checks, query, "query", tokens, head_size);
  Heads key_heads;
  const int64_t offset = rope_dim_offset * (type == ScalarType::Float ? 4 : 2);
  if (key.has_value()) {
    checks.check_device(*key, "key");
    checks.check_type_of_leading(*key, "key");
    key_heads = heads_of(checks, *key, "key", tokens, head_size);
    key_heads.data = static_cast<char*>(key->mutable_data_ptr()) + offset;
  }
  query_heads.data = static_cast<char*>(query.mutable_data_ptr()) + offset;
  const int64_t heads = int64_t{query_heads.count} + key_heads.count;
  if (tokens == 0 || rotary_dim == 0 || heads == 0) {
    return;
  }
  STD_TORCH_CHECK(
      tokens <= INT32_MAX / heads, "rotary_embedding: ", tokens, " tokens of ", heads,
      " heads are too many for one launch");
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const cudaStream_t stream = current_stream("rotary_embedding", query.get_device_index());
  const Problem problem{
      static_cast<const int64_t*>(positions.const_data_ptr()),
      query_heads,
      key_heads,
      cos_sin_cache.const_data_ptr(),
      cos_sin_cache.stride(0),
      static_cast<int>(rotary_dim / 2),
      is_neox,
      inverse ? -1.0f : 1.0f,
      static_cast<unsigned>(tokens * heads)};
  const bool float_cache = cache_type == ScalarType::Float;
  if (type == ScalarType::Float) {
    launch<float, float>(problem, stream);
  } else if (type == ScalarType::Half) {
    (float_cache ? launch<__half, float> : launch<__half, __half>)(problem, stream);
  } else {
    (float_cache ? launch<__nv_bfloat16, float> : launch<__nv_bfloat16, __nv_bfloat16>)(problem, stream);
  }
  check_launch("rotary_embedding");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hwplugin, CUDA, library) { library.impl("rotary_embedding", TORCH_BOX(&rotary_embedding)); }
