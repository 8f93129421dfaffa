// SPDX-License-Identifier: Apache-2.0
// Merges attention over two parts of the keys, a prefix and a suffix, into attention over both.
//
// Each part comes normalised, with the logarithm of the sum of exponentials (LSE) that it was divided by; section 2.2
// of FlashInfer (arXiv:2501.01005) has the formula. Loads and stores are its only cost, so every thread moves packs of
// 16 bytes, and loads both parts before it needs the LSEs: no load waits for another one.
//
// Only the stable ABI of PyTorch is used; see csrc/README.md.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
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

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The fastest of 32 to 256 on an H200, or next to it, from 1 to 512 tokens.
constexpr int kThreads = 128;
constexpr int kLoadBytes = 16;

// Elements that one load brings, and one store writes.
template <typename scalar_t>
constexpr int kPack = kLoadBytes / static_cast<int>(sizeof(scalar_t));

template <typename out_t, int kCount>
struct alignas(sizeof(out_t) * kCount) Pack {
  out_t values[kCount];
};

// The location of a token's head in a tensor: of its contiguous elements, or of its LSE. Strides are in elements. With
// 32 bits each, a product is one instruction, and has 64 bits.
template <typename scalar_t>
struct Rows {
  scalar_t* data = nullptr;
  uint32_t token_stride = 0;
  uint32_t head_stride = 0;

  __device__ __forceinline__ scalar_t* at(uint32_t token, uint32_t head) const {
    return data + static_cast<uint64_t>(token) * token_stride + static_cast<uint64_t>(head) * head_stride;
  }
};

struct Shape {
  uint32_t rows;  // tokens * heads
  uint32_t tokens_with_context;
  Divider heads;
  int packs;  // of a head
};

template <>
__device__ __forceinline__ __nv_fp8_e4m3 narrow<__nv_fp8_e4m3>(float x) { return __nv_fp8_e4m3(x); }  // saturates

// The weights of both parts.
struct Weights {
  float prefix = 0.0f;
  float suffix = 1.0f;
  bool prefix_empty = true;
  bool suffix_empty = false;
};

// Both weights need one exponential and one division: their quotient is exp(lower - upper), their sum 1.
__device__ __forceinline__ Weights weigh(float prefix_lse, float suffix_lse, float& lse) {
  // FlashAttention 2 returns +inf for a part without keys, FlashAttention 3 -inf. Parts with keys have a finite LSE.
  const bool prefix_empty = isinf(prefix_lse);
  const bool suffix_empty = isinf(suffix_lse);
  const float prefix = prefix_empty ? -INFINITY : prefix_lse;
  const float suffix = suffix_empty ? -INFINITY : suffix_lse;
  const bool prefix_is_upper = prefix >= suffix;
  const float upper = prefix_is_upper ? prefix : suffix;
  const float lower = prefix_is_upper ? suffix : prefix;
  // Without the test the difference of two empty parts would be NaN.
  const float ratio = expf(lower == upper ? 0.0f : lower - upper);
  const float sum = 1.0f + ratio;
  const float upper_weight = 1.0f / sum;
  const float lower_weight = ratio * upper_weight;
  lse = logf(sum) + upper;
  return {
      prefix_is_upper ? upper_weight : lower_weight, prefix_is_upper ? lower_weight : upper_weight, prefix_empty,
      suffix_empty};
}

// A row of threads for each head of each token. A thread has one pack of either part in flight, on an H200 faster than
// two at every size: threads enough are resident to keep memory busy.
template <typename scalar_t, typename out_t>
__global__ void __launch_bounds__(kThreads) merge_attn_states_kernel(
    const Rows<out_t> output, const Rows<float> output_lse, const Rows<const scalar_t> prefix,
    const Rows<const float> prefix_lse, const Rows<const scalar_t> suffix, const Rows<const float> suffix_lse,
    const Shape shape, const float* output_scale) {
  using Out = Pack<out_t, kPack<scalar_t>>;
  // Below 2^31 and a block: no overflow.
  const uint32_t row = blockIdx.x * blockDim.y + threadIdx.y;
  const bool is_row = row < shape.rows;
  const uint32_t token = shape.heads.divide(row);
  const uint32_t head = row - token * shape.heads.divisor;
  const bool has_context = is_row && token < shape.tokens_with_context;
  float lse = is_row ? *suffix_lse.at(token, head) : 0.0f;
  const float context_lse = has_context ? *prefix_lse.at(token, head) : 0.0f;
  const auto* prefix_packs = reinterpret_cast<const uint4*>(prefix.at(token, head));
  const auto* suffix_packs = reinterpret_cast<const uint4*>(suffix.at(token, head));
  auto* output_packs = reinterpret_cast<Out*>(output.at(token, head));
  const int across = static_cast<int>(blockDim.x);
  int pack = is_row ? static_cast<int>(threadIdx.x) : shape.packs;

  // Kept as words until needed: unpacking elements here would wait for each load before the next.
  uint4 context;  // read only if has_context
  uint4 own;
  const auto load = [&] {
    // Two conditions that do not nest become predicates of the loads; nested ones became branches between them.
    if (has_context && pack < shape.packs) {
      context = prefix_packs[pack];
    }
    if (pack < shape.packs) {
      own = suffix_packs[pack];
    }
  };

  load();
  // The result may overwrite one of the LSEs, which every thread of the row reads, in one warp or several.
  __syncthreads();
  Weights weights;
  if (has_context) {
    weights = weigh(context_lse, lse, lse);
  }
  if (is_row && pack == 0 && output_lse.data != nullptr) {
    *output_lse.at(token, head) = lse;
  }
  float inverse_scale = 1.0f;
  if constexpr (!std::is_same_v<scalar_t, out_t>) {
    inverse_scale = 1.0f / *output_scale;
  }
  while (pack < shape.packs) {
    // The output of a part without keys may be NaN, and NaN times a weight of 0 is NaN.
    if (weights.prefix_empty) {
      context = make_uint4(0, 0, 0, 0);
    }
    if (weights.suffix_empty) {
      own = make_uint4(0, 0, 0, 0);
    }
    const auto* x = reinterpret_cast<const scalar_t*>(&context);
    const auto* y = reinterpret_cast<const scalar_t*>(&own);
    Out merged;
#pragma unroll
    for (int j = 0; j < kPack<scalar_t>; ++j) {
      const float sum = widen(x[j]) * weights.prefix + widen(y[j]) * weights.suffix;
      merged.values[j] = narrow<out_t>(sum * inverse_scale);
    }
    output_packs[pack] = merged;
    pack += across;
    load();
  }
}

// Checks that packs of `pack` elements, each of `pack_bytes`, can be moved.
void check_heads(const Checks& checks, const Tensor& tensor, const char* name, int64_t pack, int64_t pack_bytes) {
  const Tensor& output = checks.leading;
  checks.check_device(tensor, name);
  STD_TORCH_CHECK(
      tensor.dim() == 3, "merge_attn_states: ", name, " has ", tensor.dim(),
      " dimensions; expected [tokens, heads, head_size]");
  for (int64_t i = 0; i < 3; ++i) {
    STD_TORCH_CHECK(
        tensor.size(i) == output.size(i), "merge_attn_states: ", name, ".size(", i, ") is ", tensor.size(i),
        "; expected ", output.size(i), ", as output has");
  }
  STD_TORCH_CHECK(
      tensor.size(2) % pack == 0, "merge_attn_states: the heads have ", tensor.size(2),
      " elements; expected a multiple of ", pack, ", which are ", kLoadBytes, " bytes of prefix_output");
  checks.check_last_stride(tensor, name);
  for (int64_t i = 0; i < 2; ++i) {
    STD_TORCH_CHECK(
        tensor.size(i) <= 1 || tensor.size(2) == 0 || tensor.stride(i) % pack == 0, "merge_attn_states: ", name,
        ".stride(", i, ") is ", tensor.stride(i), "; expected a multiple of ", pack, ": call contiguous() first");
  }
  STD_TORCH_CHECK(
      aligned(tensor.const_data_ptr(), static_cast<uintptr_t>(pack_bytes)), "merge_attn_states: ", name,
      " does not begin at a multiple of ", pack_bytes, " bytes: call clone() first");
}

void check_lse(const Checks& checks, const Tensor& tensor, const char* name) {
  const Tensor& output = checks.leading;
  checks.check_device(tensor, name);
  checks.check_type(tensor, name, ScalarType::Float);
  STD_TORCH_CHECK(
      tensor.dim() == 2 && tensor.size(0) == output.size(1) && tensor.size(1) == output.size(0),
      "merge_attn_states: the shape of ", name, " is not [heads, tokens], [", output.size(1), ", ", output.size(0),
      "]");
}

template <typename scalar_t>
Rows<scalar_t> rows_of(const Tensor& tensor, int token_dim, int head_dim) {
  Rows<scalar_t> rows;
  if constexpr (std::is_const_v<scalar_t>) {
    rows.data = static_cast<scalar_t*>(tensor.const_data_ptr());
  } else {
    rows.data = static_cast<scalar_t*>(tensor.mutable_data_ptr());
  }
  const auto stride = [&tensor](int dim) {
    STD_TORCH_CHECK(
        tensor.size(dim) <= 1 || tensor.stride(dim) <= UINT32_MAX, "merge_attn_states: a tensor has stride ",
        tensor.stride(dim), "; expected at most ", UINT32_MAX);
    return tensor.size(dim) <= 1 ? 0 : static_cast<uint32_t>(tensor.stride(dim));
  };
  rows.token_stride = stride(token_dim);
  rows.head_stride = stride(head_dim);
  return rows;
}

template <typename scalar_t>
Rows<scalar_t> heads_of(const Tensor& tensor) {
  return rows_of<scalar_t>(tensor, 0, 1);
}

template <typename scalar_t>
Rows<scalar_t> lse_of(const Tensor& tensor) {
  return rows_of<scalar_t>(tensor, 1, 0);
}

// The tensors of one call, checked.
struct Call {
  const Tensor& output;
  const std::optional<Tensor>& output_lse;
  const Tensor& prefix_output;
  const Tensor& prefix_lse;
  const Tensor& suffix_output;
  const Tensor& suffix_lse;
  int64_t tokens_with_context;
  const std::optional<Tensor>& output_scale;
  cudaStream_t stream;
};

template <typename scalar_t, typename out_t>
void launch(const Call& call) {
  const Shape shape{
      static_cast<uint32_t>(call.output.size(0) * call.output.size(1)),
      static_cast<uint32_t>(call.tokens_with_context), Divider(static_cast<uint32_t>(call.output.size(1))),
      static_cast<int>(call.output.size(2) / kPack<scalar_t>)};
  const auto output_lse = call.output_lse.has_value() ? lse_of<float>(*call.output_lse) : Rows<float>{};
  const float* scale =
      call.output_scale.has_value() ? static_cast<const float*>(call.output_scale->const_data_ptr()) : nullptr;
  const int across = std::clamp(shape.packs, 1, kThreads);
  const int down = kThreads / across;
  const dim3 block(static_cast<unsigned>(across), static_cast<unsigned>(down));
  const dim3 grid((shape.rows + block.y - 1) / block.y);
  merge_attn_states_kernel<scalar_t, out_t><<<grid, block, 0, call.stream>>>(
      heads_of<out_t>(call.output), output_lse, heads_of<const scalar_t>(call.prefix_output),
      lse_of<const float>(call.prefix_lse), heads_of<const scalar_t>(call.suffix_output),
      lse_of<const float>(call.suffix_lse), shape, scale);
}

template <typename scalar_t>
void launch(const Call& call) {
  if (call.output_scale.has_value()) {
    launch<scalar_t, __nv_fp8_e4m3>(call);
  } else {
    launch<scalar_t, scalar_t>(call);
  }
}

int64_t element_bytes(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return 4;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    default:
      STD_TORCH_CHECK(
          false, "merge_attn_states: prefix_output is ", torch::headeronly::toString(type),
          "; expected Float, Half or BFloat16");
  }
  return 0;
}

void check_types(
    const Checks& checks, const Tensor& prefix, const Tensor& suffix, const std::optional<Tensor>& scale) {
  const Tensor& output = checks.leading;
  const char* type = torch::headeronly::toString(prefix.scalar_type());
  checks.check_type(
      suffix, "suffix_output", suffix.scalar_type() == prefix.scalar_type(), "prefix_output's type, ", type);
  if (!scale.has_value()) {
    checks.check_type(
        output, "output", output.scalar_type() == prefix.scalar_type(), "prefix_output's type, ", type,
        ", where there is no output_scale");
    return;
  }
  checks.check_type(
      output, "output", output.scalar_type() == ScalarType::Float8_e4m3fn,
      "Float8_e4m3fn, as there is an output_scale");
  checks.check_device(*scale, "output_scale");
  STD_TORCH_CHECK(
      scale->scalar_type() == ScalarType::Float && scale->numel() == 1,
      "merge_attn_states: output_scale has to be one Float");
}

void merge_attn_states(
    Tensor output, std::optional<Tensor> output_lse, Tensor prefix_output, Tensor prefix_lse, Tensor suffix_output,
    Tensor suffix_lse, std::optional<int64_t> prefill_tokens_with_context, std::optional<Tensor> output_scale) {
  const Checks checks("merge_attn_states", "output", output);
  const int64_t bytes = element_bytes(prefix_output.scalar_type());
  check_types(checks, prefix_output, suffix_output, output_scale);
  const int64_t pack = kLoadBytes / bytes;
  check_heads(checks, output, "output", pack, output_scale.has_value() ? pack : kLoadBytes);
  check_heads(checks, prefix_output, "prefix_output", pack, kLoadBytes);
  check_heads(checks, suffix_output, "suffix_output", pack, kLoadBytes);
  checks.check_written(output, "output");
  check_lse(checks, prefix_lse, "prefix_lse");
  check_lse(checks, suffix_lse, "suffix_lse");
  if (output_lse.has_value()) {
    check_lse(checks, *output_lse, "output_lse");
    checks.check_written(*output_lse, "output_lse");
  }
  const int64_t tokens = output.size(0);
  const int64_t tokens_with_context = prefill_tokens_with_context.value_or(tokens);
  STD_TORCH_CHECK(
      tokens_with_context >= 0 && tokens_with_context <= tokens, "merge_attn_states: prefill_tokens_with_context is ",
      tokens_with_context, "; expected 0 to ", tokens);
  STD_TORCH_CHECK(
      tokens * output.size(1) <= INT32_MAX, "merge_attn_states: ", tokens, " tokens of ", output.size(1),
      " heads; expected at most ", INT32_MAX, " heads in all");
  if (tokens * output.size(1) == 0) {
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(output.get_device_index());
  const Call call{output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse, tokens_with_context,
                  output_scale, current_stream("merge_attn_states", output.get_device_index())};
  switch (prefix_output.scalar_type()) {
    case ScalarType::Half:
      launch<__half>(call);
      break;
    case ScalarType::BFloat16:
      launch<__nv_bfloat16>(call);
      break;
    default:
      launch<float>(call);
  }
  check_launch("merge_attn_states");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hwplugin, CUDA, library) { library.impl("merge_attn_states", TORCH_BOX(&merge_attn_states)); }
