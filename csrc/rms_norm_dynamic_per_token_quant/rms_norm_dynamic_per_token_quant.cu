// SPDX-License-Identifier: Apache-2.0
// RMS norm of rows, after an optional sum with a residual, quantised to float8 e4m3 or int8 with one scale for a row.
//
// Each step is rounded like in vLLM's operation of this name; only the order in which squares are added differs. The
// order depends only on the row's size and alignment, not on the number of rows, so a row's result is the same in every
// batch.
//
// Only the stable ABI of PyTorch is used; see csrc/README.md.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "common/arguments.h"
#include "common/stream.h"
#include "common/warp.cuh"
#include "elements.cuh"
#include "quantiser.cuh"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kMaxThreads = 1024;
// Rows that one warp holds: so many of them share a block.
constexpr int kWarpRows = 4;
// Up to here the blocks of all rows run at the same time, and wide blocks make a row's time short; beyond, narrow
// blocks with more loads per thread keep the memory busier.
constexpr int64_t kFewRows = 512;
// Chunks of a row from which on each thread of a narrow block holds four: with fewer the block had less than four
// warps.
constexpr int64_t kLongRow = 4 * 4 * kWarp;

struct Arguments {
  uint8_t* result;
  void* residual;
  float* scale;
  const void* input;
  const void* weight;
  const float* scale_ub;
  int64_t rows;
  int64_t input_stride;
  int hidden;
  float epsilon;
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

__device__ __forceinline__ float square_sum(float2 x, float sum) {
  return __fmaf_rn(x.y, x.y, __fmaf_rn(x.x, x.x, sum));
}

__device__ __forceinline__ float inverse_rms(float squares, const Arguments& given) {
  return rsqrtf(squares / given.hidden + given.epsilon);
}

template <typename pair_t>
__device__ __forceinline__ pair_t normalise(float2 x, float inverse, pair_t weight) {
  return pair_t::narrow(make_float2(__fmul_rn(x.x, inverse), __fmul_rn(x.y, inverse))).times(weight);
}

// fmaxf ignores NaN, as in vLLM.
__device__ __forceinline__ float larger(float2 x, float largest) {
  return fmaxf(fmaxf(largest, fabsf(x.x)), fabsf(x.y));
}

__device__ __forceinline__ float2 add(float2 a, float2 b) {
  return make_float2(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y));
}

// The chunks of one thread; `column` is the first chunk's, `step` the distance to the next.
template <bool kPlain, typename quant_t, typename pair_t, int kChunks, int kPairs>
__device__ __forceinline__ void store(
    uint8_t* __restrict__ result, int column, int step, int hidden, const Quantiser<quant_t>& quantiser,
    const pair_t (&pairs)[kChunks][kPairs]) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    uint32_t word[kPairs / 2];
#pragma unroll
    for (int j = 0; j < kPairs; j += 2) {
      word[j / 2] = quantiser.template quantise<kPlain>(pairs[i][j].widen()) |
                    quantiser.template quantise<kPlain>(pairs[i][j + 1].widen()) << 16;
    }
    if (column + i * step < hidden) {
      if constexpr (kPairs == 2) {
        *reinterpret_cast<uint32_t*>(result + column + i * step) = word[0];
      } else {
        *reinterpret_cast<uint2*>(result + column + i * step) = make_uint2(word[0], word[1]);
      }
    }
  }
}

// A row in the registers of one block, or of one warp. Chunk c belongs to lane c % 32 of the row's segment c / 32. The
// squares of a chunk are added, then the lanes of each segment, then the segments, 32 apart first: an order that is the
// same for however many chunks a thread has. What lies beyond the row counts as zero.
template <typename pair_t, typename quant_t, bool kResidual, int kChunks, bool kWarpRow>
__global__ void __launch_bounds__(kWarpRow ? kWarp * kWarpRows : kChunks == 4 ? kMaxThreads / 2 : kMaxThreads)
    row_in_registers_kernel(const Arguments given) {
  using chunk_t = Chunk<pair_t>;
  using scalar_t = typename pair_t::scalar_t;
  constexpr int kWidth = chunk_t::kWidth;
  constexpr int kPairs = chunk_t::kPairs;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kWarpRow ? kWarpRows : 1) + (kWarpRow ? threadIdx.y : 0);
  if (kWarpRow && row >= given.rows) {
    return;
  }
  const scalar_t* __restrict__ input = static_cast<const scalar_t*>(given.input) + row * given.input_stride;
  const scalar_t* __restrict__ weight = static_cast<const scalar_t*>(given.weight);
  scalar_t* __restrict__ residual = static_cast<scalar_t*>(given.residual) + (kResidual ? row * given.hidden : 0);
  const int step = kWarpRow ? kWarp : static_cast<int>(blockDim.x);

  chunk_t inputs[kChunks] = {};
  chunk_t residuals[kChunks] = {};
  chunk_t weights[kChunks] = {};
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int column = (static_cast<int>(threadIdx.x) + i * step) * kWidth;
    if (column < given.hidden) {
      inputs[i].load(input + column);
      if constexpr (kResidual) {
        residuals[i].load(residual + column);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int column = (static_cast<int>(threadIdx.x) + i * step) * kWidth;
    if (column < given.hidden) {
      weights[i].load(weight + column);
    }
  }

  // The sum with the residual stays in float32, and is rounded when stored.
  float2 value[kChunks][kPairs];
  float segment[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    segment[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      value[i][j] = inputs[i].pair[j].widen();
      if constexpr (kResidual) {
        value[i][j] = add(value[i][j], residuals[i].pair[j].widen());
        residuals[i].pair[j] = pair_t::narrow(value[i][j]);
      }
      segment[i] = square_sum(value[i][j], segment[i]);
    }
    if constexpr (kResidual) {
      const int column = (static_cast<int>(threadIdx.x) + i * step) * kWidth;
      if (column < given.hidden) {
        residuals[i].store(residual + column);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    segment[i] = warp_sum(segment[i]);
  }

  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = step / kWarp;
  float squares = 0.0f;
  if constexpr (kWarpRow) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      squares = lane == i ? segment[i] : squares;
    }
  } else {
    __shared__ float segments[kChunks * kMaxThreads / kWarp];
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        segments[i * warps + warp] = segment[i];
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int from = lane + i * kWarp;
      squares = __fadd_rn(squares, from < kChunks * warps ? segments[from] : 0.0f);
    }
  }
  const float inverse = inverse_rms(warp_sum(squares), given);

  pair_t normal[kChunks][kPairs];
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      normal[i][j] = normalise(value[i][j], inverse, weights[i].pair[j]);
      largest = larger(normal[i][j].widen(), largest);
    }
  }
  largest = warp_max(largest);
  if constexpr (!kWarpRow) {
    __shared__ float maxima[kMaxThreads / kWarp];
    if (lane == 0) {
      maxima[warp] = largest;
    }
    __syncthreads();
    largest = warp_max(lane < warps ? maxima[lane] : 0.0f);
  }

  const Quantiser<quant_t> quantiser(largest, given.scale_ub);
  if (threadIdx.x == 0) {
    given.scale[row] = quantiser.scale;
  }
  uint8_t* result = given.result + row * given.hidden;
  const int column = static_cast<int>(threadIdx.x) * kWidth;
  if (std::is_same_v<quant_t, Float8> && quantiser.plain) {
    store<true>(result, column, step * kWidth, given.hidden, quantiser, normal);
  } else {
    store<false>(result, column, step * kWidth, given.hidden, quantiser, normal);
  }
}

// Rows that are too long for registers, or whose elements do not lie at multiples of 16 bytes: read three times,
// element by element. The residual is written in the last pass, after all reads of the element.
template <typename pair_t, typename quant_t, bool kResidual>
__global__ void __launch_bounds__(kMaxThreads) any_row_kernel(const Arguments given) {
  using scalar_t = typename pair_t::scalar_t;
  const int64_t row = blockIdx.x;
  const scalar_t* input = static_cast<const scalar_t*>(given.input) + row * given.input_stride;
  const scalar_t* weight = static_cast<const scalar_t*>(given.weight);
  scalar_t* residual = static_cast<scalar_t*>(given.residual) + (kResidual ? row * given.hidden : 0);
  uint8_t* result = given.result + row * given.hidden;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  __shared__ float partial[2][kMaxThreads / kWarp];

  const auto value = [&](int column) {
    float2 x = pair_of<pair_t>(input[column]).widen();
    if constexpr (kResidual) {
      x = add(x, pair_of<pair_t>(residual[column]).widen());
    }
    return x;
  };
  float sum = 0.0f;
  for (int column = threadIdx.x; column < given.hidden; column += blockDim.x) {
    const float x = value(column).x;
    sum = __fmaf_rn(x, x, sum);
  }
  sum = warp_sum(sum);
  if (lane == 0) {
    partial[0][warp] = sum;
  }
  __syncthreads();
  const float inverse = inverse_rms(warp_sum(lane < warps ? partial[0][lane] : 0.0f), given);

  const auto normal = [&](float2 x, int column) {
    return normalise(x, inverse, pair_of<pair_t>(weight[column])).widen();
  };
  float largest = 0.0f;
  for (int column = threadIdx.x; column < given.hidden; column += blockDim.x) {
    largest = larger(normal(value(column), column), largest);
  }
  largest = warp_max(largest);
  if (lane == 0) {
    partial[1][warp] = largest;
  }
  __syncthreads();
  const Quantiser<quant_t> quantiser(warp_max(lane < warps ? partial[1][lane] : 0.0f), given.scale_ub);
  if (threadIdx.x == 0) {
    given.scale[row] = quantiser.scale;
  }
  for (int column = threadIdx.x; column < given.hidden; column += blockDim.x) {
    const float2 x = value(column);
    if constexpr (kResidual) {
      residual[column] = pair_t::narrow(x).value.x;
    }
    result[column] = static_cast<uint8_t>(quantiser.template quantise<true>(normal(x, column)));
  }
}

template <typename pair_t, typename quant_t, bool kResidual, int kChunks>
void start_block(const Arguments& given, int64_t chunks, cudaStream_t stream) {
  const int64_t threads = ((chunks + kChunks - 1) / kChunks + kWarp - 1) / kWarp * kWarp;
  row_in_registers_kernel<pair_t, quant_t, kResidual, kChunks, false>
      <<<static_cast<unsigned>(given.rows), static_cast<unsigned>(threads), 0, stream>>>(given);
}

template <typename pair_t, typename quant_t, bool kResidual, int kChunks>
void start_warps(const Arguments& given, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((given.rows + kWarpRows - 1) / kWarpRows));
  row_in_registers_kernel<pair_t, quant_t, kResidual, kChunks, true>
      <<<grid, dim3(kWarp, kWarpRows), 0, stream>>>(given);
}

template <typename pair_t, typename quant_t, bool kResidual>
void start(const Arguments& given, cudaStream_t stream) {
  constexpr int kWidth = Chunk<pair_t>::kWidth;
  const int64_t chunks = given.hidden / kWidth;
  constexpr uintptr_t kBytes = sizeof(Chunk<pair_t>);
  const bool in_words = given.hidden % kWidth == 0 && given.input_stride % kWidth == 0 &&
                        aligned(given.input, kBytes) && aligned(given.weight, kBytes) &&
                        aligned(given.residual, kBytes) && aligned(given.result, kWidth);
  const bool few = given.rows <= kFewRows;
  if (!in_words || chunks > 2 * kMaxThreads) {
    any_row_kernel<pair_t, quant_t, kResidual>
        <<<static_cast<unsigned>(given.rows), std::min(kMaxThreads, (given.hidden + kWarp - 1) / kWarp * kWarp), 0,
           stream>>>(given);
  } else if (chunks <= kWarp) {
    start_warps<pair_t, quant_t, kResidual, 1>(given, stream);
  } else if (chunks <= 4 * kWarp) {
    start_warps<pair_t, quant_t, kResidual, 4>(given, stream);
  } else if (few && chunks <= kMaxThreads) {
    start_block<pair_t, quant_t, kResidual, 1>(given, chunks, stream);
  } else if (few || chunks < kLongRow) {
    start_block<pair_t, quant_t, kResidual, 2>(given, chunks, stream);
  } else {
    start_block<pair_t, quant_t, kResidual, 4>(given, chunks, stream);
  }
}

template <typename pair_t>
void launch(const Arguments& given, bool float8, cudaStream_t stream) {
  const bool residual = given.residual != nullptr;
  if (float8) {
    residual ? start<pair_t, Float8, true>(given, stream) : start<pair_t, Float8, false>(given, stream);
  } else {
    residual ? start<pair_t, Int8, true>(given, stream) : start<pair_t, Int8, false>(given, stream);
  }
}

void check_like(const Tensor& tensor, const char* name, const Tensor& input) {
  bool same = tensor.dim() == input.dim();
  for (int64_t i = 0; same && i < input.dim(); ++i) {
    same = tensor.size(i) == input.size(i);
  }
  STD_TORCH_CHECK(same, "rms_norm_dynamic_per_token_quant: ", name, " has another shape than input");
  STD_TORCH_CHECK(tensor.is_contiguous(), "rms_norm_dynamic_per_token_quant: ", name, " is not contiguous");
}

// The distance between rows: the leading dimensions must be evenly spaced.
int64_t row_stride(const Checks& checks) {
  const Tensor& input = checks.leading;
  checks.check_last_stride(input, "input");
  int64_t stride = 0;
  int64_t rows = 1;
  for (int64_t i = input.dim() - 2; i >= 0; --i) {
    if (input.size(i) == 1) {
      continue;
    }
    STD_TORCH_CHECK(
        rows == 1 || input.stride(i) == stride * rows,
        "rms_norm_dynamic_per_token_quant: input's rows do not lie at even distances: call contiguous() first");
    stride = rows == 1 ? input.stride(i) : stride;
    rows *= input.size(i);
  }
  return stride;
}

void rms_norm_dynamic_per_token_quant(
    Tensor result, Tensor input, Tensor weight, Tensor scale, double epsilon, std::optional<Tensor> scale_ub,
    std::optional<Tensor> residual) {
  const Checks checks("rms_norm_dynamic_per_token_quant", "input", input);
  STD_TORCH_CHECK(
      input.dim() >= 1 && input.size(input.dim() - 1) > 0,
      "rms_norm_dynamic_per_token_quant: input has no elements in its last dimension, so its rows have no norm");
  const int64_t hidden = input.size(input.dim() - 1);
  const int64_t rows = input.numel() / hidden;
  STD_TORCH_CHECK(
      rows <= INT32_MAX && hidden <= INT32_MAX - kMaxThreads, "rms_norm_dynamic_per_token_quant: input has ", rows,
      " rows of ", hidden, " elements; expected sizes that 32 bits can hold");
  checks.check_device(result, "result");
  checks.check_device(weight, "weight");
  checks.check_device(scale, "scale");
  const bool float8 = result.scalar_type() == ScalarType::Float8_e4m3fn;
  checks.check_type(result, "result", float8 || result.scalar_type() == ScalarType::Char, "Float8_e4m3fn or Char");
  checks.check_type(weight, "weight", input.scalar_type());
  checks.check_type(scale, "scale", ScalarType::Float);
  check_like(result, "result", input);
  STD_TORCH_CHECK(
      weight.dim() == 1 && weight.size(0) == hidden && weight.is_contiguous(),
      "rms_norm_dynamic_per_token_quant: weight has ", weight.numel(), " elements in ", weight.dim(),
      " dimensions; expected [", hidden, "], contiguous");
  STD_TORCH_CHECK(
      scale.numel() == rows && scale.is_contiguous(), "rms_norm_dynamic_per_token_quant: scale has ", scale.numel(),
      " elements; expected ", rows, ", contiguous");
  Arguments given{};
  if (scale_ub.has_value()) {
    checks.check_device(*scale_ub, "scale_ub");
    checks.check_type(*scale_ub, "scale_ub", ScalarType::Float);
    STD_TORCH_CHECK(float8, "rms_norm_dynamic_per_token_quant: scale_ub is given; expected only for Float8_e4m3fn");
    STD_TORCH_CHECK(
        scale_ub->numel() == 1, "rms_norm_dynamic_per_token_quant: scale_ub has ", scale_ub->numel(),
        " elements; expected 1");
    given.scale_ub = static_cast<const float*>(scale_ub->const_data_ptr());
  }
  if (residual.has_value()) {
    checks.check_device(*residual, "residual");
    checks.check_type(*residual, "residual", input.scalar_type());
    check_like(*residual, "residual", input);
    given.residual = residual->mutable_data_ptr();
  }
  given.input_stride = row_stride(checks);
  const ScalarType type = input.scalar_type();
  checks.check_type(input, "input", is_floating(type), "Float, Half or BFloat16");
  if (rows == 0) {
    return;
  }
  given.result = static_cast<uint8_t*>(result.mutable_data_ptr());
  given.scale = static_cast<float*>(scale.mutable_data_ptr());
  given.input = input.const_data_ptr();
  given.weight = weight.const_data_ptr();
  given.rows = rows;
  given.hidden = static_cast<int>(hidden);
  given.epsilon = static_cast<float>(epsilon);
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const cudaStream_t stream = current_stream("rms_norm_dynamic_per_token_quant", input.get_device_index());
  if (type == ScalarType::Float) {
    launch<FloatPair>(given, float8, stream);
  } else if (type == ScalarType::Half) {
    launch<HalfPair>(given, float8, stream);
  } else {
    launch<BFloat16Pair>(given, float8, stream);
  }
  check_launch("rms_norm_dynamic_per_token_quant");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hwplugin, CUDA, library) {
  library.impl("rms_norm_dynamic_per_token_quant", TORCH_BOX(&rms_norm_dynamic_per_token_quant));
}
