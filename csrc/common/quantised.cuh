// SPDX-License-Identifier: Apache-2.0
// Elements of 8 bits with a scale: their types, the division by the scale, and the conversion.

#pragma once

#include <cstdint>

#include <cuda_fp8.h>
#include <cuda_runtime.h>

namespace {

// The largest element, and the smallest scale, which is vLLM's.
struct Float8 {
  static constexpr float kMax = 448.0f;
  static constexpr float kSmallestScale = 1.0f / (448.0f * 512.0f);
};

struct Int8 {
  static constexpr float kMax = 127.0f;
  static constexpr float kSmallestScale = 0x1p-23f;
};

// Above, the steps of `Divisor` could overflow.
constexpr float kLarge = 0x1p100f;

// Division of many numbers by the same number: a / b, rounded like `/`, in three steps. The product with the rounded
// reciprocal is corrected once by the remainder, which leads to the nearest number (Brisebarre, Muller and Raina,
// Accelerating Correctly Rounded Floating-Point Division When the Divisor Is Known in Advance). The remainder is taken
// negative for the sign of zero: -0 / b stays -0. Only a quotient that is zero in the types here may differ.
struct Divisor {
  float value;
  float inverse;

  __device__ __forceinline__ float divide(float a) const {
    const float quotient = __fmul_rn(a, inverse);
    return __fmaf_rn(-__fmaf_rn(quotient, value, -a), inverse, quotient);
  }
};

__device__ __forceinline__ int nearest_int8(float x) { return max(-128, min(127, __float2int_rn(x))); }

__device__ __forceinline__ uint32_t bytes_of(int low, int high) {
  return (static_cast<uint32_t>(high) & 0xffu) << 8 | (static_cast<uint32_t>(low) & 0xffu);
}

// Conversion of two elements into the lower and the upper of two bytes. NaN becomes, as in vLLM, the largest float8,
// and zero in int8.
template <typename quant_t>
__device__ __forceinline__ uint32_t quantise(float low, float high);
template <>
__device__ __forceinline__ uint32_t quantise<Float8>(float low, float high) {
  const float2 pair = make_float2(fminf(low, Float8::kMax), fminf(high, Float8::kMax));
  return __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
}
template <>
__device__ __forceinline__ uint32_t quantise<Int8>(float low, float high) {
  const int first = nearest_int8(low);
  return bytes_of(first, nearest_int8(high));
}

}  // namespace
