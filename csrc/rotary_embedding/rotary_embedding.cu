// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of query and key, in place.
//
// The arithmetic is that of the cache's type: every product and sum is rounded to it, as PyTorch's element-wise operations
// round them. With a cache of the tensors' own type the result can be compared bit for bit with vLLM's
// RotaryEmbedding.forward_static; a float32 cache beside half types gives its float32 variant, rounded once at the end.
// The _rn intrinsics keep the compiler from contracting a product and a sum into one fused operation, which would round
// once less.
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
constexpr int kAccess = 16;  // bytes: the widest access of a thread

// Keeps the indices of heads and rows within 32 bits.
constexpr int64_t kMaxHeads = 1 << 16;

// Threads that no device keeps resident at once. With more than these, each thread gets several heads, because sharing
// cosines and having more loads under way then costs no parallelism.
constexpr int64_t kManyThreads = 1 << 19;

// Heads of one tensor, as offsets in elements from the first rotated one. The elements of a head lie side by side.
struct Heads {
  void* data = nullptr;
  unsigned count = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

// A cache row is the cosines of all pairs and then their sines.
struct Table {
  const void* data = nullptr;
  int64_t stride = 0;
  int half_dim = 0;
  float direction = 1.0f;  // -1 for the inverse
};

// Two numbers rounded to a type: one instruction converts a pair to a half type.
template <typename cache_t>
__device__ __forceinline__ float2 round_both(float a, float b);
template <>
__device__ __forceinline__ float2 round_both<float>(float a, float b) { return make_float2(a, b); }
template <>
__device__ __forceinline__ float2 round_both<__half>(float a, float b) {
  return __half22float2(__floats2half2_rn(a, b));
}
template <>
__device__ __forceinline__ float2 round_both<__nv_bfloat16>(float a, float b) {
  return __bfloat1622float2(__floats2bfloat162_rn(a, b));
}

// Moves kBytes between memory and registers in the fewest accesses. Both sides are aligned to min(kBytes, kAccess).
template <int kBytes>
__device__ __forceinline__ void move(const void* from, void* to) {
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
    }
  } else if constexpr (kBytes == 8) {
    *static_cast<uint2*>(to) = *static_cast<const uint2*>(from);
  } else if constexpr (kBytes == 4) {
    *static_cast<uint32_t*>(to) = *static_cast<const uint32_t*>(from);
  } else {
    static_assert(kBytes == 2, "one element of a half type");
    *static_cast<uint16_t*>(to) = *static_cast<const uint16_t*>(from);
  }
}

// The pairs that one thread rotates in one head: kPairs elements of each half in NeoX style, else 2 * kPairs in a row.
template <typename scalar_t, bool kNeox, int kPairs>
struct Pairs {
  static constexpr int kPart = kPairs * sizeof(scalar_t);
  static constexpr int kStep = kNeox ? 1 : 2;

  alignas(kAccess) scalar_t value[2 * kPairs];

  __device__ __forceinline__ void load(const scalar_t* head, int pair, int half_dim) {
    if constexpr (kNeox || kPairs == 1) {
      move<kPart>(head + kStep * pair, value);
      move<kPart>(head + kStep * pair + (kNeox ? half_dim : 1), value + kPairs);
    } else {
      move<2 * kPart>(head + 2 * pair, value);
    }
  }

  __device__ __forceinline__ void store(scalar_t* head, int pair, int half_dim) const {
    if constexpr (kNeox || kPairs == 1) {
      move<kPart>(value, head + kStep * pair);
      move<kPart>(value + kPairs, head + kStep * pair + (kNeox ? half_dim : 1));
    } else {
      move<2 * kPart>(value, head + 2 * pair);
    }
  }

  template <typename cache_t>
  __device__ __forceinline__ void rotate(const cache_t* cos, const cache_t* sin, float direction) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      scalar_t& first = value[kStep * i];
      scalar_t& second = value[kNeox ? kPairs + i : 2 * i + 1];
      const float c = widen(cos[i]);
      const float s = direction * widen(sin[i]);
      const float x = widen(first);
      const float y = widen(second);
      const float2 less = round_both<cache_t>(__fmul_rn(x, c), __fmul_rn(y, s));
      const float2 more = round_both<cache_t>(__fmul_rn(y, c), __fmul_rn(x, s));
      first = narrow<scalar_t>(__fsub_rn(less.x, less.y));
      second = narrow<scalar_t>(__fadd_rn(more.x, more.y));
    }
  }
};

// The heads of query and then those of key. Fields are chosen one by one: choosing a struct would put it into memory.
template <typename scalar_t>
__device__ __forceinline__ scalar_t* head_at(const Heads& query, const Heads& key, unsigned token, unsigned head) {
  const bool of_query = head < query.count;
  void* data = of_query ? query.data : key.data;
  const int64_t token_stride = of_query ? query.token_stride : key.token_stride;
  const int64_t head_stride = of_query ? query.head_stride : key.head_stride;
  const unsigned index = of_query ? head : head - query.count;
  return static_cast<scalar_t*>(data) + token * token_stride + index * head_stride;
}

// threadIdx.x is a place in the head and threadIdx.y a row: a token and every `groups`-th of its heads, those of query
// and then those of key, which all share one row of the cache. Threads side by side touch memory side by side.
template <typename scalar_t, typename cache_t, bool kNeox, int kPairs, int kHeads>
__global__ void __launch_bounds__(kThreads) rotary_embedding_kernel(
    const int64_t* __restrict__ positions, const Heads query, const Heads key, const Table table, const unsigned groups,
    const unsigned rows) {
  const unsigned row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) {
    return;
  }
  const unsigned token = row / groups;
  const unsigned group = row - token * groups;
  const int64_t position = positions[token];
  const int half_dim = table.half_dim;
  for (int pair = threadIdx.x * kPairs; pair < half_dim; pair += blockDim.x * kPairs) {
    // All loads come before the first store: the compiler cannot know that heads do not overlap.
    Pairs<scalar_t, kNeox, kPairs> pairs[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const unsigned head = group + i * groups;
      if (head < query.count + key.count) {
        pairs[i].load(head_at<scalar_t>(query, key, token, head), pair, half_dim);
      }
    }
    const cache_t* __restrict__ cos_row = static_cast<const cache_t*>(table.data) + position * table.stride + pair;
    alignas(kAccess) cache_t cos[kPairs];
    alignas(kAccess) cache_t sin[kPairs];
    move<kPairs * sizeof(cache_t)>(cos_row, cos);
    move<kPairs * sizeof(cache_t)>(cos_row + half_dim, sin);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const unsigned head = group + i * groups;
      if (head < query.count + key.count) {
        pairs[i].rotate(cos, sin, table.direction);
        pairs[i].store(head_at<scalar_t>(query, key, token, head), pair, half_dim);
      }
    }
  }
}

// The distance between tokens, which have to lie at even distances over all dimensions that positions has.
int64_t token_stride_of(const Tensor& tensor, const char* name, int64_t leading) {
  int64_t first = 0;
  int64_t next = 0;
  for (int64_t i = leading - 1; i >= 0; --i) {
    if (tensor.size(i) == 1) {
      continue;  // its stride means nothing
    }
    STD_TORCH_CHECK(
        next == 0 || tensor.stride(i) == next, "rotary_embedding: ", name,
        " has strides that differ between batches; expected tokens at even distances: call contiguous() first");
    first = next == 0 ? tensor.stride(i) : first;
    next = tensor.stride(i) * tensor.size(i);
  }
  return first;
}

unsigned count_of(int64_t heads, const char* name) {
  STD_TORCH_CHECK(heads <= kMaxHeads, "rotary_embedding: ", name, " has ", heads, " heads; expected at most ", kMaxHeads);
  return static_cast<unsigned>(heads);
}

// Checks one tensor against the positions and finds its strides; `data` is left for the caller.
// Shapes: positions' sizes, then [heads * head_size] or [heads, head_size].
Heads heads_of(
    const Checks& checks, const Tensor& tensor, const char* name, const Tensor& positions, int64_t head_size) {
  const int64_t leading = positions.dim();
  STD_TORCH_CHECK(
      tensor.dim() == leading + 1 || tensor.dim() == leading + 2, "rotary_embedding: ", name, " has ", tensor.dim(),
      " dimensions; expected those of positions (", leading, ") and [heads * head_size] or [heads, head_size]");
  bool empty = false;
  for (int64_t i = 0; i < leading; ++i) {
    STD_TORCH_CHECK(
        tensor.size(i) == positions.size(i), "rotary_embedding: ", name, ".size(", i, ") is ", tensor.size(i),
        "; expected ", positions.size(i), ", as positions has");
    empty = empty || tensor.size(i) == 0;
  }
  checks.check_written(tensor, name, " in place");
  checks.check_last_stride(tensor, name);
  const int64_t last = tensor.dim() - 1;
  Heads heads;
  if (tensor.dim() == leading + 2) {
    STD_TORCH_CHECK(
        tensor.size(last) == head_size, "rotary_embedding: the heads of ", name, " have ", tensor.size(last),
        " elements; expected head_size=", head_size);
    heads.count = count_of(tensor.size(leading), name);
    heads.head_stride = heads.count > 1 ? tensor.stride(leading) : 0;
  } else {
    STD_TORCH_CHECK(
        tensor.size(last) % head_size == 0, "rotary_embedding: ", name, " has ", tensor.size(last),
        " elements a token; expected a multiple of head_size=", head_size);
    heads.count = count_of(tensor.size(last) / head_size, name);
    heads.head_stride = heads.count > 1 ? head_size : 0;
  }
  if (!empty) {
    heads.token_stride = token_stride_of(tensor, name, leading);
  }
  return heads;
}

template <typename scalar_t, typename cache_t, bool kNeox, int kPairs, int kHeads>
void launch(
    const int64_t* positions, const Heads& query, const Heads& key, const Table& table, int64_t tokens,
    cudaStream_t stream) {
  const unsigned groups = (query.count + key.count + kHeads - 1) / kHeads;
  STD_TORCH_CHECK(
      tokens <= INT32_MAX / groups, "rotary_embedding: ", tokens, " tokens of ", query.count + key.count,
      " heads are too many for one launch");
  const auto rows = static_cast<unsigned>(tokens * groups);
  const int across = std::min(kThreads, (table.half_dim + kPairs - 1) / kPairs);
  const dim3 block(static_cast<unsigned>(across), static_cast<unsigned>(kThreads / across));
  const dim3 grid((rows + block.y - 1) / block.y);
  rotary_embedding_kernel<scalar_t, cache_t, kNeox, kPairs, kHeads><<<grid, block, 0, stream>>>(
      positions, query, key, table, groups, rows);
}

// Whether the first element of every head lies at a multiple of kAccess bytes.
bool all_aligned(const Heads& heads, int64_t element) {
  return heads.count == 0 ||
         (aligned(heads.data, kAccess) && heads.token_stride * element % kAccess == 0 &&
          heads.head_stride * element % kAccess == 0);
}

template <typename scalar_t, typename cache_t, bool kNeox>
void choose(
    const int64_t* positions, const Heads& query, const Heads& key, const Table& table, int64_t tokens,
    cudaStream_t stream) {
  constexpr int kWide = kAccess / sizeof(scalar_t);
  constexpr int kPairs = kNeox ? kWide : kWide / 2;
  constexpr int kHeads = 2;
  const bool wide = table.half_dim % kPairs == 0 && all_aligned(query, sizeof(scalar_t)) &&
                    all_aligned(key, sizeof(scalar_t)) && aligned(table.data, kAccess) &&
                    table.stride * sizeof(cache_t) % kAccess == 0;
  const int64_t threads = tokens * (query.count + key.count) * (table.half_dim / kPairs);
  if (!wide) {
    launch<scalar_t, cache_t, kNeox, 1, 1>(positions, query, key, table, tokens, stream);
  } else if (threads < kManyThreads) {
    launch<scalar_t, cache_t, kNeox, kPairs, 1>(positions, query, key, table, tokens, stream);
  } else {
    launch<scalar_t, cache_t, kNeox, kPairs, kHeads>(positions, query, key, table, tokens, stream);
  }
}

// The tensors after their checks.
struct Call {
  const int64_t* positions;
  int64_t tokens;
  Heads query;
  Heads key;
  Table table;
  bool float_cache;
  bool is_neox;
  int64_t offset;
  cudaStream_t stream;
};

template <typename scalar_t>
void dispatch(Call call) {
  for (Heads* heads : {&call.query, &call.key}) {
    heads->data = static_cast<scalar_t*>(heads->data) + (heads->count > 0 ? call.offset : 0);
  }
  auto* run = call.float_cache ? (call.is_neox ? choose<scalar_t, float, true> : choose<scalar_t, float, false>)
                               : (call.is_neox ? choose<scalar_t, scalar_t, true> : choose<scalar_t, scalar_t, false>);
  run(call.positions, call.query, call.key, call.table, call.tokens, call.stream);
}

void rotary_embedding(
    Tensor positions, Tensor query, std::optional<Tensor> key, int64_t head_size, Tensor cos_sin_cache, bool is_neox,
    int64_t rope_dim_offset, bool inverse) {
  const Checks checks("rotary_embedding", "query", query);
  const ScalarType type = query.scalar_type();
  checks.check_type(query, "query", is_floating(type), "Float, Half or BFloat16");
  checks.check_device(positions, "positions");
  checks.check_type(positions, "positions", ScalarType::Long);
  STD_TORCH_CHECK(
      positions.dim() >= 1 && positions.is_contiguous(),
      "rotary_embedding: positions has to be contiguous and to have a dimension");
  STD_TORCH_CHECK(head_size > 0, "rotary_embedding: head_size is ", head_size, "; expected a positive number");
  checks.check_device(cos_sin_cache, "cos_sin_cache");
  const ScalarType cache_type = cos_sin_cache.scalar_type();
  checks.check_type(
      cos_sin_cache, "cos_sin_cache", cache_type == type || cache_type == ScalarType::Float, "query's type, ",
      torch::headeronly::toString(type), ", or Float");
  STD_TORCH_CHECK(
      cos_sin_cache.dim() == 2, "rotary_embedding: cos_sin_cache has ", cos_sin_cache.dim(),
      " dimensions; expected [max_position, rotary_dim]");
  const int64_t rotary_dim = cos_sin_cache.size(1);
  STD_TORCH_CHECK(
      rotary_dim % 2 == 0 && rotary_dim <= head_size, "rotary_embedding: rotary_dim is ", rotary_dim,
      "; expected an even number of at most head_size=", head_size);
  STD_TORCH_CHECK(
      rope_dim_offset >= 0 && rope_dim_offset <= head_size - rotary_dim, "rotary_embedding: rope_dim_offset is ",
      rope_dim_offset, "; expected 0 to head_size - rotary_dim, ", head_size - rotary_dim);
  STD_TORCH_CHECK(
      rotary_dim == 0 || cos_sin_cache.stride(1) == 1, "rotary_embedding: cos_sin_cache has stride ",
      cos_sin_cache.stride(1), " in its last dimension; expected 1");
  Heads query_heads = heads_of(checks, query, "query", positions, head_size);
  Heads key_heads;
  if (key.has_value()) {
    checks.check_device(*key, "key");
    checks.check_type_of_leading(*key, "key");
    key_heads = heads_of(checks, *key, "key", positions, head_size);
  }
  if (positions.numel() == 0 || rotary_dim == 0 || query_heads.count + key_heads.count == 0) {
    return;
  }
  query_heads.data = query.mutable_data_ptr();
  key_heads.data = key_heads.count > 0 ? key->mutable_data_ptr() : nullptr;
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const Table table{
      cos_sin_cache.const_data_ptr(), cos_sin_cache.stride(0), static_cast<int>(rotary_dim / 2),
      inverse ? -1.0f : 1.0f};
  const Call call{
      static_cast<const int64_t*>(positions.const_data_ptr()),
      positions.numel(),
      query_heads,
      key_heads,
      table,
      cache_type == ScalarType::Float,
      is_neox,
      rope_dim_offset,
      current_stream("rotary_embedding", query.get_device_index())};
  if (type == ScalarType::Float) {
    dispatch<float>(call);
  } else if (type == ScalarType::Half) {
    dispatch<__half>(call);
  } else {
    dispatch<__nv_bfloat16>(call);
  }
  check_launch("rotary_embedding");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hwplugin, CUDA, library) { library.impl("rotary_embedding", TORCH_BOX(&rotary_embedding)); }
