// SPDX-License-Identifier: Apache-2.0
// Integers that order experts for the choice, and reductions over the lanes that share a row.

#pragma once

#include <cmath>
#include <cstdint>

#include <cuda_runtime.h>

#include "common/numbers.cuh"
#include "common/warp.cuh"

namespace {

// More than a warp holds in registers.
constexpr int64_t kMaxExpertsInRegisters = 1024;

// Integers in the order of the numbers; 0 is below all of them. NaN counts as -inf.
__device__ __forceinline__ uint32_t order_of(float x) {
  const uint32_t bits = __float_as_uint(isnan(x) ? -INFINITY : x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float number_of(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// Reductions over the kLanes neighbouring lanes that share a row. All lanes of the warp take part.
template <int kLanes>
__device__ __forceinline__ uint32_t largest(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  constexpr bool kAtOnce = kLanes == kWarp;
#else
  constexpr bool kAtOnce = false;
#endif
  if constexpr (kAtOnce) {
    return __reduce_max_sync(kAllLanes, x);
  } else {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, x, distance);
      x = other > x ? other : x;
    }
    return x;
  }
}

template <int kLanes>
__device__ __forceinline__ int smallest(int x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const int other = __shfl_xor_sync(kAllLanes, x, distance);
    x = other < x ? other : x;
  }
  return x;
}

template <int kLanes>
__device__ __forceinline__ float sum_of(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}

// The integer of an expert whose logit has 16 bits: the logit, because a float of it has more than kExpertBits unused
// bits, and the expert, the lower the larger.
struct LogitAndExpert {
  static constexpr int kExpertBits = 10;
  static constexpr uint32_t kLast = (1u << kExpertBits) - 1;

  static __device__ __forceinline__ uint32_t order_of(float logit, int expert) {
    // The sum turns -0 into +0.
    return (::order_of(logit + 0.0f) & ~kLast) | (kLast - static_cast<uint32_t>(expert));
  }
  static __device__ __forceinline__ float logit_of(uint32_t order) {
    return __uint_as_float(__float_as_uint(number_of(order)) & ~kLast);
  }
  static __device__ __forceinline__ int expert_of(uint32_t order) {
    return static_cast<int>(kLast - (order & kLast));
  }
};
static_assert(kMaxExpertsInRegisters <= int64_t{1} << LogitAndExpert::kExpertBits);

}  // namespace
