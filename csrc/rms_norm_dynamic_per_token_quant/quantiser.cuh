// SPDX-License-Identifier: Apache-2.0
// From the largest element of a row to its scale, and from elements to float8 e4m3 or int8.

#pragma once

#include <cstdint>

#include <cuda_fp8.h>
#include <cuda_runtime.h>

namespace {

// Above, the steps of `Divisor` could overflow.
constexpr float kLarge = 0x1p100f;

struct Float8 {
  static constexpr float kMax = 448.0f;
  static constexpr float kSmallestScale = 1.0f / (448.0f * 512.0f);
};

struct Int8 {
  static constexpr float kMax = 127.0f;
  static constexpr float kSmallestScale = 0x1p-23f;
};

// Division by a number that is the same for many: a / b, rounded as `/` rounds it, in three steps. The product with the
// rounded reciprocal is corrected once by the remainder, which leads to the nearest number (Brisebarre, Muller and
// Raina, Accelerating Correctly Rounded Floating-Point Division When the Divisor Is Known in Advance). The remainder is
// taken negative for the sign of zero: -0 / b stays -0. Only a quotient that is zero in the types here may differ.
struct Divisor {
  float value;
  float inverse;

  __device__ __forceinline__ float divide(float a) const {
    const float quotient = __fmul_rn(a, inverse);
    return __fmaf_rn(-__fmaf_rn(quotient, value, -a), inverse, quotient);
  }
};

// The scale of a row and how its elements are brought to it: float8 by division, int8 by the rounded reciprocal.
template <typename quant_t>
struct Quantiser {
  float scale;
  float inverse;
  bool plain;

  __device__ __forceinline__ Quantiser(float largest, const float* __restrict__ scale_ub) {
    const float bounded = scale_ub == nullptr ? largest : fminf(largest, *scale_ub);
    scale = fmaxf(bounded / quant_t::kMax, quant_t::kSmallestScale);
    inverse = 1.0f / scale;
    // Where a quotient may overflow.
    plain = !(largest < kLarge) || bounded < largest;
  }

  // Into the lower two bytes. What is not a number becomes what it becomes in vLLM: the largest float8, and zero.
  template <bool kPlain>
  __device__ __forceinline__ uint32_t quantise(float2 x) const;
};

template <>
template <bool kPlain>
__device__ __forceinline__ uint32_t Quantiser<Float8>::quantise(float2 x) const {
  float2 quotient;
  if constexpr (kPlain) {
    quotient = make_float2(x.x / scale, x.y / scale);
  } else {
    const Divisor divisor{scale, inverse};
    quotient = make_float2(divisor.divide(x.x), divisor.divide(x.y));
  }
  quotient = make_float2(fminf(quotient.x, Float8::kMax), fminf(quotient.y, Float8::kMax));
  return __nv_cvt_float2_to_fp8x2(quotient, __NV_SATFINITE, __NV_E4M3);
}

template <>
template <bool kPlain>
__device__ __forceinline__ uint32_t Quantiser<Int8>::quantise(float2 x) const {
  const int first = max(-128, min(127, __float2int_rn(__fmul_rn(x.x, inverse))));
  const int second = max(-128, min(127, __float2int_rn(__fmul_rn(x.y, inverse))));
  return (static_cast<uint32_t>(second) & 0xffu) << 8 | (static_cast<uint32_t>(first) & 0xffu);
}

}  // namespace
