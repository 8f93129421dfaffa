// SPDX-License-Identifier: Apache-2.0
// One row of a call: loads, probabilities of its experts, and stores of its results.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include <cuda_runtime.h>

#include "order.cuh"

namespace {

constexpr int kMaxLoadBytes = 16;

struct Call {
  const void* gating;  // [rows, experts]
  int64_t gating_stride;
  float* weights;                 // [rows, topk], as the next two
  void* indices;
  int32_t* token_expert_indices;
  const float* bias;       // [experts], or null
  const bool* is_padding;  // [rows], or null
  int64_t rows;
  int experts;
  int topk;
  bool wide_indices;  // 64 bits
  bool renormalize;
};

// The probability of a logit. A row whose softmax is NaN, as in padding, has only probabilities of 0: then the first
// experts are chosen, each once.
struct Softmax {
  float top;
  float inverse_sum;

  __device__ __forceinline__ float of(float logit) const { return of_exponential(expf(logit - top)); }

  __device__ __forceinline__ float of_exponential(float exponential) const {
    const float probability = __fmul_rn(exponential, inverse_sum);
    return isnan(probability) ? 0.0f : probability;
  }
};

__device__ __forceinline__ uint32_t order_of_choice(const Call& call, int expert, bool exists, float probability) {
  // Rounded once more, not contracted with the product that the probability is.
  return order_of(call.bias != nullptr && exists ? __fadd_rn(probability, call.bias[expert]) : probability);
}

// The probability of an expert that was chosen by `order`, without the bias.
template <typename scalar_t>
__device__ __forceinline__ float weight_of(
    const Call& call, const Softmax& softmax, const scalar_t* logits, int expert, uint32_t order) {
  return call.bias == nullptr ? number_of(order) : softmax.of(widen(logits[expert]));
}

// Writes the results of one row, as many slots at a time as lanes share it: neighbouring lanes write neighbouring
// addresses.
template <int kLanes>
struct Results {
  const Call& call;
  const int64_t row;
  const int lane;
  float sum = 0.0f;

  // Every lane of the warp takes part; the first `count` have a slot.
  __device__ __forceinline__ void put(int first_slot, int count, int expert, float weight) {
    const bool has_slot = lane < count;
    const bool last = first_slot + kLanes >= call.topk;
    if (call.renormalize) {
      sum += sum_of<kLanes>(has_slot ? weight : 0.0f);
      weight = last ? weight / divisor() : weight;
    }
    if (row >= call.rows) {
      return;
    }
    const int slot = first_slot + lane;
    const int64_t at = row * call.topk + slot;
    if (has_slot) {
      const int index = call.is_padding != nullptr && call.is_padding[row] ? -1 : expert;
      call.weights[at] = weight;
      call.token_expert_indices[at] = static_cast<int32_t>(slot * call.rows + row);
      if (call.wide_indices) {
        static_cast<int64_t*>(call.indices)[at] = index;
      } else {
        static_cast<int32_t*>(call.indices)[at] = index;
      }
    }
    if (last && call.renormalize) {
      // The earlier slots of this lane, written before the sum was known.
#pragma unroll 1
      for (int earlier = lane; earlier < first_slot; earlier += kLanes) {
        call.weights[row * call.topk + earlier] /= divisor();
      }
    }
  }

  __device__ __forceinline__ float divisor() const { return sum > 0.0f ? sum : 1.0f; }
};

template <int kBytes>
using Word = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;

// The kPer logits of a lane, in the widest loads that they divide into.
template <typename scalar_t, int kPer>
struct Run {
  static constexpr int kBytes = kPer * static_cast<int>(sizeof(scalar_t));
  static constexpr int kLoadBytes = std::min(kMaxLoadBytes, kBytes & -kBytes);
  static constexpr int kLoads = kBytes / kLoadBytes;
  static constexpr int kElements = kPer / kLoads;  // of a load

  alignas(kLoadBytes) scalar_t values[kPer];

  // Elements from `count` on are not read and not written here.
  __device__ __forceinline__ void load(const scalar_t* from, int count, bool in_words) {
    if (in_words) {
      using W = Word<kLoadBytes>;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (i * kElements < count) {
          reinterpret_cast<W*>(values)[i] = reinterpret_cast<const W*>(from)[i];
        }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (i < count) {
        values[i] = from[i];
      }
    }
  }
};

}  // namespace
