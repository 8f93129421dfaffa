// SPDX-License-Identifier: Apache-2.0
// RMS norm of each query and key head and then rotary position embedding, in place in the joined qkv tensor.
//
// All arithmetic is float32 and the result is rounded once, so it is nearer to the exact result than the two operations
// that it replaces. The order of each sum is fixed, and fused operations are written out so that the compiler has no
// choice: a head gets the same bits in every batch.
//
// Only the stable ABI of PyTorch is used; see csrc/README.md.

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "common/arguments.h"
#include "common/divider.cuh"
#include "common/numbers.cuh"
#include "common/stream.h"
#include "common/warp.cuh"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kThreads = 128;
constexpr int kAccess = 16;            // bytes: the widest access of a thread
constexpr int kWide = kAccess / 2;     // elements of a half type in it
constexpr int kOwn = 2 * kWide;        // elements of a head that one thread holds: two accesses
constexpr int kUsualLanes = 8;         // threads for a head of 128, which have their own kernel
constexpr int64_t kMaxHeads = 1 << 16;  // keeps the indices of heads and rows within 32 bits

// From here on each thread gets several heads: far more threads than a device keeps resident, so that sharing
// cosines and having more loads under way costs no parallelism. On an H200 two heads lose with 0.6 million threads,
// gain with 2.6 million, and are faster than four.
constexpr int64_t kManyThreads = 1 << 20;
constexpr int kManyHeads = 2;
// Blocks of a multiprocessor that has several heads a thread, which bounds the registers of a thread. Cosines of four
// bytes take more of them.
template <typename cache_t>
constexpr int kResident = sizeof(cache_t) > 2 ? 7 : 8;

struct Problem {
  void* qkv;
  const void* q_weight;
  const void* k_weight;
  const void* cos_sin_cache;
  const int64_t* positions;
  int64_t token_stride;
  unsigned tokens;
  unsigned q_heads;
  unsigned heads;  // of query and key together: they lie side by side
  int head_dim;
  int rotary_dim;
  float inverse_head_dim;
  float eps;
};

// kWide elements as they lie in memory, at a multiple of kAccess bytes. They are widened where they are used, so that
// they take few registers until then and no load waits for another one.
template <typename scalar_t>
struct Run {
  static constexpr int kWords = kWide * sizeof(scalar_t) / sizeof(uint4);
  uint4 words[kWords];

  __device__ __forceinline__ void load(const scalar_t* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  }

  __device__ __forceinline__ void store(scalar_t* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      reinterpret_cast<uint4*>(to)[i] = words[i];
    }
  }

  __device__ __forceinline__ void widen_to(float* to) const {
    if constexpr (std::is_same_v<scalar_t, __nv_bfloat16>) {
      const unsigned pairs[] = {words[0].x, words[0].y, words[0].z, words[0].w};
#pragma unroll
      for (int i = 0; i < kWide; i += 2) {
        const float2 wide = widen_bfloat16s(pairs[i / 2]);
        to[i] = wide.x;
        to[i + 1] = wide.y;
      }
    } else {
      scalar_t values[kWide];
      memcpy(values, words, sizeof(values));
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        to[i] = widen(values[i]);
      }
    }
  }

  __device__ __forceinline__ void narrow_from(const float* from) {
    scalar_t values[kWide];
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      values[i] = narrow<scalar_t>(from[i]);
    }
    memcpy(words, values, sizeof(values));
  }
};

// What one thread holds of a head, or of its weight: two runs.
template <typename scalar_t>
struct Runs {
  Run<scalar_t> first;
  Run<scalar_t> second;

  __device__ __forceinline__ void load(const scalar_t* from, int first_at, int second_at) {
    first.load(from + first_at);
    second.load(from + second_at);
  }

  __device__ __forceinline__ void store(scalar_t* to, int first_at, int second_at) const {
    first.store(to + first_at);
    second.store(to + second_at);
  }

  __device__ __forceinline__ void widen_to(float* to) const {
    first.widen_to(to);
    second.widen_to(to + kWide);
  }

  __device__ __forceinline__ void narrow_from(const float* from) {
    first.narrow_from(from);
    second.narrow_from(from + kWide);
  }
};

__device__ __forceinline__ void rotate(float& x, float& y, float cos, float sin) {
  const float first = fmaf(x, cos, -__fmul_rn(y, sin));
  y = fmaf(y, cos, __fmul_rn(x, sin));
  x = first;
}

// `lanes` is a power of two; every thread of the warp takes part.
__device__ __forceinline__ float sum_over(float value, int lanes) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    if (step < lanes) {
      value += __shfl_xor_sync(kAllLanes, value, step);
    }
  }
  return value;
}

// The threads that hold a head: kLanes, or where that is 0, as many as the launch says.
template <int kLanes>
__device__ __forceinline__ int lanes() {
  return kLanes > 0 ? kLanes : static_cast<int>(blockDim.x);
}

// Where the elements of a thread lie. threadIdx.x is one of head_dim / kOwn places in a head. The two runs that a
// thread holds are partners in NeoX style; else, and past the rotated elements, they are neighbours.
template <bool kNeox>
struct Place {
  int first;
  int second;
  bool rotates;

  __device__ __forceinline__ explicit Place(const Problem& problem) {
    const int lane = threadIdx.x;
    rotates = lane * kOwn < problem.rotary_dim;
    const bool apart = kNeox && rotates;
    first = apart ? lane * kWide : lane * kOwn;
    second = apart ? first + problem.rotary_dim / 2 : first + kWide;
  }

  // The cosines and sines. Elements that are not rotated load arbitrary ones, because with a branch the load of the
  // position would wait for the loads before it.
  template <typename cache_t>
  __device__ __forceinline__ Runs<cache_t> angles(const Problem& problem, int64_t position) const {
    const int half_dim = problem.rotary_dim / 2;
    const int at = rotates ? threadIdx.x * kWide : 0;
    Runs<cache_t> found;
    found.load(static_cast<const cache_t*>(problem.cos_sin_cache) + position * problem.rotary_dim, at, half_dim + at);
    return found;
  }
};

// Norms and rotates one head.
template <int kLanes, bool kNeox, typename scalar_t, typename cache_t>
__device__ __forceinline__ void norm_and_rotate(
    const Problem& problem, bool rotates, const Runs<scalar_t>& weights, const Runs<cache_t>& angles,
    Runs<scalar_t>& data) {
  float value[kOwn];
  data.widen_to(value);
  // Two sums, so that half as many additions wait for each other.
  float square = value[0] * value[0];
  float more = value[kWide] * value[kWide];
#pragma unroll
  for (int j = 1; j < kWide; ++j) {
    square = fmaf(value[j], value[j], square);
    more = fmaf(value[j + kWide], value[j + kWide], more);
  }
  // The size of a head is a power of two here, so that this is exactly the quotient.
  const float mean = sum_over(square + more, lanes<kLanes>()) * problem.inverse_head_dim;
  const float scale = rsqrtf(mean + problem.eps);
  float weight[kOwn];
  weights.widen_to(weight);
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    value[j] *= scale * weight[j];
  }
  if (rotates) {
    float angle[kOwn];
    angles.widen_to(angle);
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      rotate(value[kNeox ? j : 2 * j], value[kNeox ? j + kWide : 2 * j + 1], angle[j], angle[j + kWide]);
    }
  }
  data.narrow_from(value);
}

// threadIdx.y is a row: a token and every `groups`-th of its heads, which share one row of the cache.
template <typename scalar_t, typename cache_t, bool kNeox, int kLanes, int kHeads>
__global__ void __launch_bounds__(kThreads, kHeads > 1 ? kResident<cache_t> : 1)
    wide_kernel(const Problem problem, const Divider groups, const unsigned rows) {
  // Rows past the end repeat the last one without storing, so that all threads reach the sums.
  const unsigned own_row = blockIdx.x * blockDim.y + threadIdx.y;
  const unsigned row = min(own_row, rows - 1);
  const unsigned token = groups.divide(row);
  const unsigned group = row - token * groups.divisor;
  // First of all, because the load of the angles waits for it.
  const int64_t position = problem.positions[token];
  const Place<kNeox> place(problem);
  scalar_t* data = static_cast<scalar_t*>(problem.qkv) + token * problem.token_stride;
  Runs<scalar_t> held[kHeads];
  unsigned head[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    head[i] = min(group + i * groups.divisor, problem.heads - 1);
    held[i].load(data + head[i] * lanes<kLanes>() * kOwn, place.first, place.second);
  }
  Runs<scalar_t> weights[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    weights[i].load(
        static_cast<const scalar_t*>(head[i] < problem.q_heads ? problem.q_weight : problem.k_weight), place.first,
        place.second);
  }
  const auto angles = place.template angles<cache_t>(problem, position);
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    norm_and_rotate<kLanes, kNeox>(problem, place.rotates, weights[i], angles, held[i]);
    if (own_row < rows && group + i * groups.divisor < problem.heads) {
      held[i].store(data + head[i] * lanes<kLanes>() * kOwn, place.first, place.second);
    }
  }
}

// Any sizes and alignment: a warp for each head of each token.
template <typename scalar_t, typename cache_t, bool kNeox>
__global__ void __launch_bounds__(kThreads) narrow_kernel(const Problem problem, const unsigned rows) {
  const unsigned row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) {
    return;
  }
  const unsigned token = row / problem.heads;
  const unsigned head = row - token * problem.heads;
  const int lane = threadIdx.x;
  scalar_t* data =
      static_cast<scalar_t*>(problem.qkv) + token * problem.token_stride + static_cast<int64_t>(head) * problem.head_dim;
  const auto* weight = static_cast<const scalar_t*>(head < problem.q_heads ? problem.q_weight : problem.k_weight);
  const cache_t* cos =
      static_cast<const cache_t*>(problem.cos_sin_cache) + problem.positions[token] * problem.rotary_dim;
  const int half_dim = problem.rotary_dim / 2;

  float square = 0.0f;
  for (int i = lane; i < problem.head_dim; i += kWarp) {
    const float x = widen(data[i]);
    square = fmaf(x, x, square);
  }
  // Each thread has read all that it needs for the sum before any thread passes it and writes.
  const float scale = rsqrtf(sum_over(square, kWarp) / problem.head_dim + problem.eps);
  for (int i = lane; i < half_dim; i += kWarp) {
    const int first = kNeox ? i : 2 * i;
    const int second = kNeox ? i + half_dim : 2 * i + 1;
    float x = widen(data[first]) * (scale * widen(weight[first]));
    float y = widen(data[second]) * (scale * widen(weight[second]));
    rotate(x, y, widen(cos[i]), widen(cos[half_dim + i]));
    data[first] = narrow<scalar_t>(x);
    data[second] = narrow<scalar_t>(y);
  }
  for (int i = problem.rotary_dim + lane; i < problem.head_dim; i += kWarp) {
    data[i] = narrow<scalar_t>(widen(data[i]) * (scale * widen(weight[i])));
  }
}

// The wide kernel holds a head in 1 to 32 threads, a power of two, and rotates whole threads, one at least.
bool fits_wide(const Problem& problem) {
  const int lanes = problem.head_dim / kOwn;
  return problem.head_dim % kOwn == 0 && lanes <= kWarp && (lanes & (lanes - 1)) == 0 && problem.rotary_dim > 0 &&
         problem.rotary_dim % kOwn == 0 && problem.token_stride % kWide == 0 && aligned(problem.qkv, kAccess) &&
         aligned(problem.q_weight, kAccess) && aligned(problem.k_weight, kAccess) &&
         aligned(problem.cos_sin_cache, kAccess);
}

unsigned blocks(unsigned rows, const dim3& block) { return (rows + block.y - 1) / block.y; }

template <typename scalar_t, typename cache_t, bool kNeox, int kLanes, int kHeads>
void launch_wide(const Problem& problem, cudaStream_t stream) {
  const unsigned groups = (problem.heads + kHeads - 1) / kHeads;
  const unsigned rows = problem.tokens * groups;
  const unsigned lanes = problem.head_dim / kOwn;
  const dim3 block(lanes, kThreads / lanes);
  wide_kernel<scalar_t, cache_t, kNeox, kLanes, kHeads>
      <<<blocks(rows, block), block, 0, stream>>>(problem, Divider(groups), rows);
}

template <typename scalar_t, typename cache_t, bool kNeox, int kLanes>
void choose(const Problem& problem, cudaStream_t stream) {
  const int64_t threads = static_cast<int64_t>(problem.tokens) * problem.heads * (problem.head_dim / kOwn);
  if (threads < kManyThreads) {
    launch_wide<scalar_t, cache_t, kNeox, kLanes, 1>(problem, stream);
  } else {
    launch_wide<scalar_t, cache_t, kNeox, kLanes, kManyHeads>(problem, stream);
  }
}

template <typename scalar_t, typename cache_t, bool kNeox>
void launch(const Problem& problem, cudaStream_t stream) {
  if (!fits_wide(problem)) {
    const unsigned rows = problem.tokens * problem.heads;
    const dim3 block(kWarp, kThreads / kWarp);
    narrow_kernel<scalar_t, cache_t, kNeox><<<blocks(rows, block), block, 0, stream>>>(problem, rows);
  } else if (problem.head_dim == kUsualLanes * kOwn) {
    choose<scalar_t, cache_t, kNeox, kUsualLanes>(problem, stream);
  } else {
    choose<scalar_t, cache_t, kNeox, 0>(problem, stream);
  }
}

template <typename scalar_t>
void dispatch(const Problem& problem, bool float_cache, bool is_neox, cudaStream_t stream) {
  auto* run = float_cache ? (is_neox ? launch<scalar_t, float, true> : launch<scalar_t, float, false>)
                          : (is_neox ? launch<scalar_t, scalar_t, true> : launch<scalar_t, scalar_t, false>);
  run(problem, stream);
}

void check_contiguous(const Checks& checks, const Tensor& tensor, const char* name) {
  checks.check_device(tensor, name);
  STD_TORCH_CHECK(tensor.is_contiguous(), "fused_qk_norm_rope: ", name, " has to be contiguous");
}

void check_vector(const Checks& checks, const Tensor& tensor, const char* name, ScalarType type, int64_t size) {
  check_contiguous(checks, tensor, name);
  checks.check_type(tensor, name, type);
  STD_TORCH_CHECK(
      tensor.dim() == 1 && tensor.size(0) == size, "fused_qk_norm_rope: ", name, " has ", tensor.dim(),
      " dimensions and ", tensor.numel(), " elements; expected [", size, "]");
}

// Registered with vLLM's schema. forced_token_heads_per_warp is for the launch of vLLM's kernel; results do not depend
// on it, and this kernel ignores it.
void fused_qk_norm_rope(
    Tensor qkv, int64_t num_heads_q, int64_t num_heads_k, int64_t num_heads_v, int64_t head_dim, double eps,
    Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, bool is_neox, Tensor position_ids,
    int64_t forced_token_heads_per_warp) {
  static_cast<void>(forced_token_heads_per_warp);
  const Checks checks("fused_qk_norm_rope", "qkv", qkv);
  const ScalarType type = qkv.scalar_type();
  checks.check_type(qkv, "qkv", type == ScalarType::Half || type == ScalarType::BFloat16, "Half or BFloat16");
  STD_TORCH_CHECK(
      num_heads_q >= 0 && num_heads_k >= 0 && num_heads_v >= 0 && num_heads_q <= kMaxHeads &&
          num_heads_k <= kMaxHeads && num_heads_v <= kMaxHeads,
      "fused_qk_norm_rope: the numbers of heads are ", num_heads_q, ", ", num_heads_k, ", ", num_heads_v,
      "; expected 0 to ", kMaxHeads);
  STD_TORCH_CHECK(
      head_dim > 0 && head_dim <= kMaxHeads, "fused_qk_norm_rope: head_dim is ", head_dim, "; expected 1 to ",
      kMaxHeads);
  const int64_t width = (num_heads_q + num_heads_k + num_heads_v) * head_dim;
  STD_TORCH_CHECK(
      qkv.dim() == 2 && qkv.size(1) == width, "fused_qk_norm_rope: qkv has ", qkv.dim(), " dimensions and ",
      qkv.numel(), " elements; expected [tokens, ", width, "], for heads of head_dim=", head_dim);
  check_contiguous(checks, qkv, "qkv");
  check_vector(checks, position_ids, "position_ids", ScalarType::Long, qkv.size(0));
  check_vector(checks, q_weight, "q_weight", type, head_dim);
  check_vector(checks, k_weight, "k_weight", type, head_dim);
  check_contiguous(checks, cos_sin_cache, "cos_sin_cache");
  const ScalarType cache_type = cos_sin_cache.scalar_type();
  checks.check_type(
      cos_sin_cache, "cos_sin_cache", cache_type == type || cache_type == ScalarType::Float, "qkv's type, ",
      torch::headeronly::toString(type), ", or Float");
  STD_TORCH_CHECK(
      cos_sin_cache.dim() == 2, "fused_qk_norm_rope: cos_sin_cache has ", cos_sin_cache.dim(),
      " dimensions; expected [max_position, rotary_dim]");
  const int64_t rotary_dim = cos_sin_cache.size(1);
  STD_TORCH_CHECK(
      rotary_dim % 2 == 0 && rotary_dim <= head_dim, "fused_qk_norm_rope: rotary_dim is ", rotary_dim,
      "; expected an even number of at most head_dim=", head_dim);
  const int64_t tokens = qkv.size(0);
  const int64_t heads = num_heads_q + num_heads_k;
  if (tokens == 0 || heads == 0) {
    return;
  }
  STD_TORCH_CHECK(
      tokens <= INT32_MAX / heads, "fused_qk_norm_rope: ", tokens, " tokens of ", heads,
      " heads are too many for one launch");
  const torch::stable::accelerator::DeviceGuard guard(qkv.get_device_index());
  const cudaStream_t stream = current_stream("fused_qk_norm_rope", qkv.get_device_index());
  const Problem problem{
      qkv.mutable_data_ptr(),
      q_weight.const_data_ptr(),
      k_weight.const_data_ptr(),
      cos_sin_cache.const_data_ptr(),
      static_cast<const int64_t*>(position_ids.const_data_ptr()),
      width,
      static_cast<unsigned>(tokens),
      static_cast<unsigned>(num_heads_q),
      static_cast<unsigned>(heads),
      static_cast<int>(head_dim),
      static_cast<int>(rotary_dim),
      1.0f / static_cast<float>(head_dim),
      static_cast<float>(eps)};
  if (type == ScalarType::Half) {
    dispatch<__half>(problem, cache_type == ScalarType::Float, is_neox, stream);
  } else {
    dispatch<__nv_bfloat16>(problem, cache_type == ScalarType::Float, is_neox, stream);
  }
  check_launch("fused_qk_norm_rope");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hwplugin, CUDA, library) {
  library.impl("fused_qk_norm_rope", TORCH_BOX(&fused_qk_norm_rope));
}
