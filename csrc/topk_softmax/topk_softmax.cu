// SPDX-License-Identifier: Apache-2.0
// Softmax over the experts of each token, and the topk largest of them.
//
// A warp, or a part of one, holds a row in registers: each lane a run of neighbouring experts. Each step of the
// selection finds the largest of the integers that stand for the experts, for which a warp has one instruction.
//
// Logits of 16 bits leave bits of such an integer for the number of the expert: it is then unique, and decides the
// choice. It distinguishes logits that round to one probability, which vLLM's kernel does not. Otherwise the integer is
// the probability, as in vLLM's kernel, and a vote finds the lowest lane with the largest one; as lanes hold runs of
// neighbours, that is also the lowest expert.
//
// Only the stable ABI of PyTorch is used; see csrc/README.md.

#include <cmath>
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
#include "common/stream.h"
#include "row.cuh"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kWarps = 4;  // of a block

// Up to so many rows each warp has a scheduler almost to itself, and a whole warp for a row is fastest. With more rows
// a row takes a part of a warp, which costs fewer instructions.
constexpr int64_t kFewRows = 2048;

// kLanes lanes for each row, kPer experts in each of them. kByLogit: logits have 16 bits, and there is no bias.
template <typename scalar_t, int kPer, int kLanes, bool kByLogit>
__global__ void __launch_bounds__(kWarps* kWarp) topk_softmax_kernel(const Call call, const bool in_words) {
  constexpr int kRows = kWarp / kLanes;  // of a warp
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int place = static_cast<int>(threadIdx.x) % kWarp / kLanes;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (warp * kRows >= call.rows) {
    return;
  }
  const int64_t row = warp * kRows + place;
  // Lanes beyond the last row go along with it, because reductions need every lane; they write nothing.
  const int64_t read = row < call.rows ? row : call.rows - 1;
  const auto* logits = static_cast<const scalar_t*>(call.gating) + read * call.gating_stride;
  const int first = lane * kPer;
  const int count = call.experts - first;

  Run<scalar_t, kPer> run;
  run.load(logits + first, count, in_words);
  float values[kPer];
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    values[i] = i < count ? widen(run.values[i]) : -INFINITY;
    top = fmaxf(top, values[i]);
  }
  Softmax softmax;
  softmax.top = number_of(largest<kLanes>(order_of(top)));
  uint32_t orders[kPer];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if constexpr (kByLogit) {
      orders[i] = LogitAndExpert::order_of(values[i], first + i);
    }
    values[i] = expf(values[i] - softmax.top);
    sum += values[i];
  }
  softmax.inverse_sum = 1.0f / sum_of<kLanes>(sum);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if constexpr (!kByLogit) {
      orders[i] = order_of_choice(call, first + i, i < count, softmax.of_exponential(values[i]));
    }
    orders[i] = i < count ? orders[i] : 0u;
  }

  Results<kLanes> results{call, row, lane};
  for (int first_slot = 0; first_slot < call.topk; first_slot += kLanes) {
    const int slots = min(kLanes, call.topk - first_slot);
    uint32_t my_order = 0;
    int my_expert = 0;
#pragma unroll 1
    for (int slot = 0; slot < slots; ++slot) {
      uint32_t largest_here = 0;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        largest_here = orders[i] > largest_here ? orders[i] : largest_here;
      }
      const uint32_t best = largest<kLanes>(largest_here);
      int expert = 0;
      if constexpr (kByLogit) {
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          orders[i] = orders[i] == best ? 0u : orders[i];
        }
      } else {
        const unsigned with_it = __ballot_sync(kAllLanes, largest_here == best) >> (place * kLanes);
        const int owner = __ffs(static_cast<int>(with_it)) - 1;
        bool wanted = lane == owner;
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          const bool found = wanted && orders[i] == best;
          expert = found ? first + i : expert;
          orders[i] = found ? 0u : orders[i];
          wanted = wanted && !found;
        }
        expert = __shfl_sync(kAllLanes, expert, owner, kLanes);
      }
      if (slot == lane) {
        my_order = best;
        my_expert = expert;
      }
    }
    float weight = 0.0f;
    if constexpr (kByLogit) {
      my_expert = isnan(softmax.inverse_sum) ? first_slot + lane : LogitAndExpert::expert_of(my_order);
      weight = softmax.of(LogitAndExpert::logit_of(my_order));
    } else {
      weight = weight_of(call, softmax, logits, my_expert, my_order);
    }
    results.put(first_slot, slots, my_expert, weight);
  }
}

// A warp for each row of any length. Nothing is kept: each step looks for the best expert that comes after the last one
// in the order of the choice, which reads the row once more.
template <typename scalar_t>
__global__ void __launch_bounds__(kWarps* kWarp) topk_softmax_long_kernel(const Call call) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (row >= call.rows) {
    return;
  }
  const auto* logits = static_cast<const scalar_t*>(call.gating) + row * call.gating_stride;
  float top = -INFINITY;
  for (int expert = lane; expert < call.experts; expert += kWarp) {
    top = fmaxf(top, widen(logits[expert]));
  }
  Softmax softmax;
  softmax.top = number_of(largest<kWarp>(order_of(top)));
  float sum = 0.0f;
  for (int expert = lane; expert < call.experts; expert += kWarp) {
    sum += expf(widen(logits[expert]) - softmax.top);
  }
  softmax.inverse_sum = 1.0f / sum_of<kWarp>(sum);

  Results<kWarp> results{call, row, lane};
  uint32_t last = UINT32_MAX;
  int last_expert = -1;
  for (int first_slot = 0; first_slot < call.topk; first_slot += kWarp) {
    const int slots = min(kWarp, call.topk - first_slot);
    uint32_t my_order = 0;
    int my_expert = 0;
    for (int slot = 0; slot < slots; ++slot) {
      uint32_t best_here = 0;
      int expert_here = call.experts;
      for (int expert = lane; expert < call.experts; expert += kWarp) {
        const uint32_t order = order_of_choice(call, expert, true, softmax.of(widen(logits[expert])));
        const bool comes_after = order < last || (order == last && expert > last_expert);
        if (comes_after && order > best_here) {
          best_here = order;
          expert_here = expert;
        }
      }
      last = largest<kWarp>(best_here);
      last_expert = smallest<kWarp>(best_here == last ? expert_here : call.experts);
      if (slot == lane) {
        my_order = last;
        my_expert = last_expert;
      }
    }
    results.put(first_slot, slots, my_expert, weight_of(call, softmax, logits, my_expert, my_order));
  }
}

unsigned blocks_for(int64_t rows, int rows_of_a_warp) {
  const int64_t rows_of_a_block = static_cast<int64_t>(rows_of_a_warp) * kWarps;
  return static_cast<unsigned>((rows + rows_of_a_block - 1) / rows_of_a_block);
}

template <typename scalar_t, int kPer, int kLanes>
void launch(const Call& call, cudaStream_t stream) {
  using Logits = Run<scalar_t, kPer>;
  const bool in_words = call.experts % Logits::kElements == 0 &&
                        (call.rows <= 1 || call.gating_stride % Logits::kElements == 0) &&
                        aligned(call.gating, Logits::kLoadBytes);
  const unsigned blocks = blocks_for(call.rows, kWarp / kLanes);
  if constexpr (sizeof(scalar_t) == 2) {
    if (call.bias == nullptr) {
      topk_softmax_kernel<scalar_t, kPer, kLanes, true><<<blocks, kWarps * kWarp, 0, stream>>>(call, in_words);
      return;
    }
  }
  topk_softmax_kernel<scalar_t, kPer, kLanes, false><<<blocks, kWarps * kWarp, 0, stream>>>(call, in_words);
}

template <typename scalar_t>
void launch(const Call& call, cudaStream_t stream) {
  if (call.experts > kMaxExpertsInRegisters) {
    topk_softmax_long_kernel<scalar_t><<<blocks_for(call.rows, 1), kWarps * kWarp, 0, stream>>>(call);
    return;
  }
  using Launch = void (*)(const Call&, cudaStream_t);
  struct Choice {
    int experts;
    Launch launch;
  };
  // The first that holds the experts is taken.
  static constexpr Choice kManyRows[] = {
      {8, launch<scalar_t, 8, 1>},  {16, launch<scalar_t, 8, 2>},   {32, launch<scalar_t, 8, 4>},
      {64, launch<scalar_t, 8, 8>}, {128, launch<scalar_t, 16, 8>}, {256, launch<scalar_t, 16, 16>}};
  static constexpr Choice kAnyRows[] = {
      {32, launch<scalar_t, 1, 32>},  {64, launch<scalar_t, 2, 32>},   {128, launch<scalar_t, 4, 32>},
      {256, launch<scalar_t, 8, 32>}, {384, launch<scalar_t, 12, 32>}, {512, launch<scalar_t, 16, 32>},
      {kMaxExpertsInRegisters, launch<scalar_t, 32, 32>}};
  if (call.rows > kFewRows) {
    for (const Choice& choice : kManyRows) {
      if (call.experts <= choice.experts) {
        choice.launch(call, stream);
        return;
      }
    }
  }
  for (const Choice& choice : kAnyRows) {
    if (call.experts <= choice.experts) {
      choice.launch(call, stream);
      return;
    }
  }
}

void check_result(const Checks& checks, const Tensor& tensor, const char* name, int64_t topk) {
  checks.check_device(tensor, name);
  const int64_t tokens = checks.leading.size(0);
  STD_TORCH_CHECK(
      tensor.dim() == 2 && tensor.size(0) == tokens && tensor.size(1) == topk, "topk_softmax: the shape of ", name,
      " is not [tokens, topk], [", tokens, ", ", topk, "]");
  STD_TORCH_CHECK(tensor.is_contiguous(), "topk_softmax: ", name, " is not contiguous; expected a contiguous tensor");
}

void check_vector(const Checks& checks, const Tensor& tensor, const char* name, int64_t size, ScalarType type) {
  checks.check_device(tensor, name);
  checks.check_type(tensor, name, type);
  STD_TORCH_CHECK(
      tensor.dim() == 1 && tensor.size(0) == size && tensor.is_contiguous(), "topk_softmax: ", name,
      " has to be contiguous, with the shape [", size, "]");
}

void topk_softmax(
    Tensor topk_weights, Tensor topk_indices, Tensor token_expert_indices, Tensor gating_output, bool renormalize,
    std::optional<Tensor> bias, std::optional<Tensor> is_padding) {
  const Checks checks("topk_softmax", "gating_output", gating_output);
  STD_TORCH_CHECK(
      gating_output.dim() == 2, "topk_softmax: gating_output has ", gating_output.dim(),
      " dimensions; expected [tokens, experts]");
  const ScalarType type = gating_output.scalar_type();
  checks.check_type(gating_output, "gating_output", is_floating(type), "Float, Half or BFloat16");
  const int64_t rows = gating_output.size(0);
  const int64_t experts = gating_output.size(1);
  checks.check_last_stride(gating_output, "gating_output");
  STD_TORCH_CHECK(
      topk_weights.dim() == 2, "topk_softmax: topk_weights has ", topk_weights.dim(),
      " dimensions; expected [tokens, topk]");
  const int64_t topk = topk_weights.size(1);
  STD_TORCH_CHECK(
      topk <= experts, "topk_softmax: topk is ", topk, "; expected at most the number of experts, ", experts);
  STD_TORCH_CHECK(
      experts <= INT32_MAX && rows * topk <= INT32_MAX, "topk_softmax: ", rows, " tokens, ", experts,
      " experts and topk=", topk, "; expected numbers of 32 bits for experts and for tokens * topk");
  check_result(checks, topk_weights, "topk_weights", topk);
  check_result(checks, topk_indices, "topk_indices", topk);
  check_result(checks, token_expert_indices, "token_expert_indices", topk);
  checks.check_type(topk_weights, "topk_weights", ScalarType::Float);
  const ScalarType index = topk_indices.scalar_type();
  checks.check_type(
      topk_indices, "topk_indices",
      index == ScalarType::Int || index == ScalarType::Long || index == ScalarType::UInt32, "Int, Long or UInt32");
  checks.check_type(token_expert_indices, "token_expert_indices", ScalarType::Int);
  if (bias.has_value()) {
    check_vector(checks, *bias, "bias", experts, ScalarType::Float);
  }
  if (is_padding.has_value()) {
    check_vector(checks, *is_padding, "is_padding", rows, ScalarType::Bool);
  }
  if (rows == 0 || topk == 0) {
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(gating_output.get_device_index());
  const cudaStream_t stream = current_stream("topk_softmax", gating_output.get_device_index());
  Call call;
  call.gating = gating_output.const_data_ptr();
  call.gating_stride = gating_output.stride(0);
  call.weights = static_cast<float*>(topk_weights.mutable_data_ptr());
  call.indices = topk_indices.mutable_data_ptr();
  call.token_expert_indices = static_cast<int32_t*>(token_expert_indices.mutable_data_ptr());
  call.bias = bias.has_value() ? static_cast<const float*>(bias->const_data_ptr()) : nullptr;
  call.is_padding = is_padding.has_value() ? static_cast<const bool*>(is_padding->const_data_ptr()) : nullptr;
  call.rows = rows;
  call.experts = static_cast<int>(experts);
  call.topk = static_cast<int>(topk);
  call.wide_indices = index == ScalarType::Long;
  call.renormalize = renormalize;
  switch (type) {
    case ScalarType::Half:
      launch<__half>(call, stream);
      break;
    case ScalarType::BFloat16:
      launch<__nv_bfloat16>(call, stream);
      break;
    default:
      launch<float>(call, stream);
  }
  check_launch("topk_softmax");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hwplugin, CUDA, library) { library.impl("topk_softmax", TORCH_BOX(&topk_softmax)); }
