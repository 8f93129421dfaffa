// SPDX-License-Identifier: Apache-2.0
// silu(`gate`) * `up`, quantised to float8 e4m3 or int8 with one scale for each group of 64 or 128 elements of a row.
//
// The arithmetic is the same as in vLLM's operation of this name, in float32 from load to store, and no sum depends on
// an order, so the result can be compared with vLLM's bit for bit.
//
// Only the stable ABI of PyTorch is used; see csrc/README.md.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
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
#include "common/numbers.cuh"
#include "common/quantised.cuh"
#include "common/stream.h"
#include "common/warp.cuh"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kThreads = 256;
// Elements of a thread: 16 bytes of `gate`, 16 of `up`.
constexpr int kWide = 8;
// With few elements only latency counts: threads have half as much to compute, and smaller blocks spread over more
// multiprocessors, each with its own part of the bandwidth. On an H200 this still gains for 64 rows of 12288 elements,
// the most that count as few here, and would lose for 512 of them.
constexpr int kNarrow = 4;
constexpr int kNarrowThreads = 128;
constexpr int64_t kFewElements = 64 * 12288;
// So that the rows of the last block can be counted in 32 bits.
constexpr int64_t kMaxTokens = 1 << 30;
// What the second dimension of a grid can cover.
constexpr int64_t kMaxHidden = int64_t{65535} * (kThreads / 2) * kWide;
// From here on a thread has two rows, so that twice as many loads are under way; below, more threads are of more use.
constexpr int64_t kManyElements = 1 << 22;
// `exp(-gate)` is below kLarge above this one.
constexpr float kLowGate = -69.0f;

template <typename scalar_t, int kWidth>
struct alignas(kWidth * sizeof(scalar_t)) Chunk {
  scalar_t value[kWidth];
};

template <typename scalar_t, int kWidth>
__device__ __forceinline__ void widen(const Chunk<scalar_t, kWidth>& chunk, float (&value)[kWidth]) {
  uint32_t pairs[kWidth / 2];
  memcpy(pairs, chunk.value, sizeof(pairs));
#pragma unroll
  for (int i = 0; i < kWidth; i += 2) {
    if constexpr (std::is_same_v<scalar_t, __nv_bfloat16>) {
      const float2 wide = widen_bfloat16s(pairs[i / 2]);
      value[i] = wide.x;
      value[i + 1] = wide.y;
    } else {
      value[i] = __half2float(chunk.value[i]);
      value[i + 1] = __half2float(chunk.value[i + 1]);
    }
  }
}

// 1 / x for a normal x below kLarge, rounded as `/` rounds it: the compiler's own steps without their branches, which
// would keep the elements of a thread from overlapping.
__device__ __forceinline__ float reciprocal(float x) {
  const float near = __fdividef(1.0f, x);
  return __fmaf_rn(-__fmaf_rn(x, near, -1.0f), near, near);
}

template <typename scalar_t, int kWidth, bool kAligned>
__device__ __forceinline__ Chunk<scalar_t, kWidth> load(const scalar_t* __restrict__ from) {
  Chunk<scalar_t, kWidth> chunk;
  if constexpr (kAligned) {
    using Word = std::conditional_t<kWidth == 8, uint4, uint2>;
    static_assert(sizeof(Word) == sizeof(chunk), "one access");
    const Word word = *reinterpret_cast<const Word*>(from);
    memcpy(chunk.value, &word, sizeof(word));
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      chunk.value[i] = from[i];
    }
  }
  return chunk;
}

template <bool kAligned, int kPairs>
__device__ __forceinline__ void store(uint8_t* __restrict__ to, const uint32_t (&pairs)[kPairs]) {
  if constexpr (kAligned && kPairs == 4) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
  } else if constexpr (kAligned) {
    static_assert(kPairs == 2, "one access");
    *reinterpret_cast<uint32_t*>(to) = pairs[0] | pairs[1] << 16;
  } else {
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      to[i] = static_cast<uint8_t>(pairs[i / 2] >> (i % 2 * 8));
    }
  }
}

struct Arguments {
  uint8_t* out;
  float* scales;
  const void* input;
  const float* scale_ub;
  // Of 32 bits, so that an offset takes one multiplication.
  int tokens;
  int hidden;
  int input_stride;
  int scale_token_stride;
  int scale_group_stride;
};

__device__ __forceinline__ int64_t offset(int row, int stride) { return static_cast<int64_t>(row) * stride; }

template <typename scalar_t, typename quant_t, int kGroup, int kWidth>
__device__ __forceinline__ void activate_and_quantise(
    const Chunk<scalar_t, kWidth>& gates, const Chunk<scalar_t, kWidth>& ups, const float* __restrict__ scale_ub,
    float& scale, uint32_t (&pairs)[kWidth / 2]) {
  float gate[kWidth];
  float up[kWidth];
  float value[kWidth];
  widen(gates, gate);
  widen(ups, up);
  float lowest = gate[0];
#pragma unroll
  for (int i = 1; i < kWidth; ++i) {
    lowest = fminf(lowest, gate[i]);
  }
  if (lowest > kLowGate) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      value[i] = gate[i] * reciprocal(1.0f + expf(-gate[i])) * up[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      value[i] = gate[i] * (1.0f / (1.0f + expf(-gate[i]))) * up[i];
    }
  }
  // fmaxf ignores NaN, as in vLLM.
  float largest = fabsf(value[0]);
#pragma unroll
  for (int i = 1; i < kWidth; ++i) {
    largest = fmaxf(largest, fabsf(value[i]));
  }
#pragma unroll
  for (int distance = kGroup / kWidth / 2; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
  }
  bool bounded = false;
  const bool large = !(largest < kLarge);
  scale = large ? largest / quant_t::kMax : Divisor{quant_t::kMax, 1.0f / quant_t::kMax}.divide(largest);
  if (scale_ub != nullptr) {
    const float bound = *scale_ub;
    bounded = !(scale <= bound);
    scale = fminf(scale, bound);
  }
  scale = fmaxf(scale, quant_t::kSmallestScale);
  if (large || bounded) {
    // Here quotients may overflow.
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      value[i] = value[i] / scale;
    }
  } else {
    const Divisor by_scale{scale, reciprocal(scale)};
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      value[i] = by_scale.divide(value[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; i += 2) {
    pairs[i / 2] = quantise<quant_t>(value[i], value[i + 1]);
  }
}

// A thread has kWidth elements of each of kRows rows; the lanes that share a group lie side by side in a warp.
template <typename scalar_t, typename quant_t, int kGroup, int kWidth, int kRows, bool kAligned>
__global__ void __launch_bounds__(kThreads) silu_and_mul_per_block_quant_kernel(const Arguments given) {
  constexpr int kLanes = kGroup / kWidth;
  static_assert(kWarp % kLanes == 0, "the groups have to fill the warps");
  const int column = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  const int first = static_cast<int>(blockIdx.x * (kRows * blockDim.y) + threadIdx.y);
  Chunk<scalar_t, kWidth> gates[kRows];
  Chunk<scalar_t, kWidth> ups[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    // Threads beyond the tensor read its last chunk, because the lanes of a warp exchange values, and store nothing.
    const int token = min(first + row * static_cast<int>(blockDim.y), given.tokens - 1);
    const scalar_t* from = static_cast<const scalar_t*>(given.input) + offset(token, given.input_stride);
    from += min(column, given.hidden - kWidth);
    gates[row] = load<scalar_t, kWidth, kAligned>(from);
    ups[row] = load<scalar_t, kWidth, kAligned>(from + given.hidden);
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    float scale;
    uint32_t pairs[kWidth / 2];
    activate_and_quantise<scalar_t, quant_t, kGroup>(gates[row], ups[row], given.scale_ub, scale, pairs);
    const int token = first + row * static_cast<int>(blockDim.y);
    if (token < given.tokens && column < given.hidden) {
      store<kAligned>(given.out + offset(token, given.hidden) + column, pairs);
      if (threadIdx.x % kLanes == 0) {
        const int group = static_cast<int>(static_cast<unsigned>(column) / kGroup);
        given.scales[offset(token, given.scale_token_stride) + offset(group, given.scale_group_stride)] = scale;
      }
    }
  }
}

template <typename scalar_t, typename quant_t, int kGroup, int kWidth, int kRows, bool kAligned>
void start(const Arguments& given, int threads, cudaStream_t stream) {
  const int64_t chunks = given.hidden / kWidth;
  int64_t width = kGroup / kWidth;
  if (chunks > kWarp) {
    // Blocks of a row that are equally wide.
    const int64_t blocks = (chunks + threads - 1) / threads;
    width = ((chunks + blocks - 1) / blocks + kWarp - 1) / kWarp * kWarp;
  } else {
    while (width < chunks) {
      width *= 2;
    }
  }
  // A power of two below a warp, else whole warps, so that a block is made of whole warps.
  const int64_t rows = std::max<int64_t>(1, threads / width);
  const dim3 block(static_cast<unsigned>(width), static_cast<unsigned>(rows));
  const dim3 grid(
      static_cast<unsigned>((given.tokens + rows * kRows - 1) / (rows * kRows)),
      static_cast<unsigned>((chunks + width - 1) / width));
  silu_and_mul_per_block_quant_kernel<scalar_t, quant_t, kGroup, kWidth, kRows, kAligned>
      <<<grid, block, 0, stream>>>(given);
}

template <typename scalar_t, typename quant_t, int kGroup>
void choose(const Arguments& given, cudaStream_t stream) {
  const bool in_words = aligned(given.input, sizeof(Chunk<scalar_t, kWide>)) && given.input_stride % kWide == 0 &&
                        aligned(given.out, kWide);
  const int64_t elements = int64_t{given.tokens} * given.hidden;
  if (!in_words) {
    start<scalar_t, quant_t, kGroup, kWide, 1, false>(given, kThreads, stream);
  } else if (elements <= kFewElements) {
    start<scalar_t, quant_t, kGroup, kNarrow, 1, true>(given, kNarrowThreads, stream);
  } else if (elements < kManyElements) {
    start<scalar_t, quant_t, kGroup, kWide, 1, true>(given, kThreads, stream);
  } else {
    start<scalar_t, quant_t, kGroup, kWide, 2, true>(given, kThreads, stream);
  }
}

template <typename scalar_t>
void launch(const Arguments& given, bool float8, int64_t group_size, cudaStream_t stream) {
  if (float8) {
    group_size == 64 ? choose<scalar_t, Float8, 64>(given, stream) : choose<scalar_t, Float8, 128>(given, stream);
  } else {
    group_size == 64 ? choose<scalar_t, Int8, 64>(given, stream) : choose<scalar_t, Int8, 128>(given, stream);
  }
}

// The strides of a scale by token and group. Transposed scales have one of two forms: [tokens, groups] with transposed
// memory, and [groups, tokens].
void find_scale_strides(const Tensor& scales, int64_t groups, bool transposed, Arguments& given) {
  STD_TORCH_CHECK(
      scales.dim() == 2, "silu_and_mul_per_block_quant: scales has ", scales.dim(), " dimensions; expected 2");
  int token = 0;
  if (!(scales.size(0) == given.tokens && scales.size(1) == groups)) {
    STD_TORCH_CHECK(
        transposed && scales.size(0) == groups && scales.size(1) == given.tokens,
        "silu_and_mul_per_block_quant: scales has shape [", scales.size(0), ", ", scales.size(1), "]; expected [",
        given.tokens, ", ", groups, "], tokens and groups");
    token = 1;
  } else if (transposed && given.tokens == groups && scales.stride(1) == 1 && groups > 1) {
    // With as many tokens as groups the strides tell the two forms apart.
    token = 1;
  }
  const int64_t inner = scales.stride(transposed ? token : 1 - token);
  const int64_t outer = scales.stride(transposed ? 1 - token : token);
  const int64_t inner_size = transposed ? given.tokens : groups;
  const int64_t outer_size = transposed ? groups : given.tokens;
  STD_TORCH_CHECK(
      (inner_size <= 1 || inner == 1) && (outer_size <= 1 || (outer >= inner_size && outer <= INT32_MAX)),
      "silu_and_mul_per_block_quant: scales has strides ", scales.stride(0), " and ", scales.stride(1),
      "; expected those of a ", transposed ? "transposed" : "contiguous", " tensor");
  given.scale_token_stride = static_cast<int>(transposed ? 1 : outer);
  given.scale_group_stride = static_cast<int>(transposed ? outer : 1);
}

void silu_and_mul_per_block_quant(
    Tensor out, Tensor input, Tensor scales, int64_t group_size, std::optional<Tensor> scale_ub,
    bool is_scale_transposed) {
  const Checks checks("silu_and_mul_per_block_quant", "input", input);
  checks.check_device(out, "out");
  checks.check_device(scales, "scales");
  const bool float8 = out.scalar_type() == ScalarType::Float8_e4m3fn;
  checks.check_type(out, "out", float8 || out.scalar_type() == ScalarType::Char, "Float8_e4m3fn or Char");
  checks.check_type(scales, "scales", ScalarType::Float);
  STD_TORCH_CHECK(
      group_size == 64 || group_size == 128, "silu_and_mul_per_block_quant: group_size is ", group_size,
      "; expected 64 or 128");
  STD_TORCH_CHECK(
      input.dim() == 2 && out.dim() == 2, "silu_and_mul_per_block_quant: input has ", input.dim(),
      " dimensions and out has ", out.dim(), "; expected [tokens, 2 * hidden_size] and [tokens, hidden_size]");
  Arguments given{};
  const int64_t tokens = input.size(0);
  const int64_t hidden = out.size(1);
  STD_TORCH_CHECK(
      out.size(0) == tokens && input.size(1) == 2 * hidden, "silu_and_mul_per_block_quant: input is [",
      input.size(0), ", ", input.size(1), "] and out is [", out.size(0), ", ", out.size(1),
      "]; expected [tokens, 2 * hidden_size] and [tokens, hidden_size]");
  STD_TORCH_CHECK(
      hidden % group_size == 0, "silu_and_mul_per_block_quant: hidden_size is ", hidden,
      "; expected a multiple of group_size=", group_size);
  STD_TORCH_CHECK(out.is_contiguous(), "silu_and_mul_per_block_quant: out is not contiguous");
  STD_TORCH_CHECK(
      hidden == 0 || input.stride(1) == 1, "silu_and_mul_per_block_quant: input has stride ", input.stride(1),
      " in its last dimension; expected 1: call contiguous() first");
  STD_TORCH_CHECK(
      tokens <= kMaxTokens && hidden <= kMaxHidden && input.stride(0) <= INT32_MAX,
      "silu_and_mul_per_block_quant: input is [", input.size(0), ", ", input.size(1), "] with rows ", input.stride(0),
      " elements apart; expected at most ", kMaxTokens, " tokens, hidden_size=", kMaxHidden, " and ", INT32_MAX,
      " elements");
  given.tokens = static_cast<int>(tokens);
  given.hidden = static_cast<int>(hidden);
  find_scale_strides(scales, hidden / group_size, is_scale_transposed, given);
  if (scale_ub.has_value()) {
    checks.check_device(*scale_ub, "scale_ub");
    STD_TORCH_CHECK(float8, "silu_and_mul_per_block_quant: scale_ub is given; expected only for Float8_e4m3fn");
    STD_TORCH_CHECK(
        scale_ub->scalar_type() == ScalarType::Float && scale_ub->numel() == 1,
        "silu_and_mul_per_block_quant: scale_ub has ", scale_ub->numel(), " elements of type ",
        torch::headeronly::toString(scale_ub->scalar_type()), "; expected one Float");
    given.scale_ub = static_cast<const float*>(scale_ub->const_data_ptr());
  }
  const ScalarType type = input.scalar_type();
  checks.check_type(input, "input", type == ScalarType::Half || type == ScalarType::BFloat16, "Half or BFloat16");
  if (tokens == 0 || hidden == 0) {
    return;
  }
  given.out = static_cast<uint8_t*>(out.mutable_data_ptr());
  given.scales = static_cast<float*>(scales.mutable_data_ptr());
  given.input = input.const_data_ptr();
  given.input_stride = static_cast<int>(input.stride(0));
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const cudaStream_t stream = current_stream("silu_and_mul_per_block_quant", input.get_device_index());
  if (type == ScalarType::Half) {
    launch<__half>(given, float8, group_size, stream);
  } else {
    launch<__nv_bfloat16>(given, float8, group_size, stream);
  }
  check_launch("silu_and_mul_per_block_quant");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hwplugin, CUDA, library) {
  library.impl("silu_and_mul_per_block_quant", TORCH_BOX(&silu_and_mul_per_block_quant));
}
