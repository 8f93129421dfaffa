// SPDX-License-Identifier: Apache-2.0
// From the largest element of a row to its scale, and from elements to float8 e4m3 or int8.

#pragma once

#include <cstdint>

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "common/quantised.cuh"

namespace {

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

  // Into the lower two bytes.
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
  // `::quantise` written out: with another function around the conversion, which devices before 8.9 emulate, the
  // compiler orders their code differently.
  quotient = make_float2(fminf(quotient.x, Float8::kMax), fminf(quotient.y, Float8::kMax));
  return __nv_cvt_float2_to_fp8x2(quotient, __NV_SATFINITE, __NV_E4M3);
}

template <>
template <bool kPlain>
__device__ __forceinline__ uint32_t Quantiser<Int8>::quantise(float2 x) const {
  // One after the other, for the same reason.
  const int first = nearest_int8(__fmul_rn(x.x, inverse));
  return bytes_of(first, nearest_int8(__fmul_rn(x.y, inverse)));
}

}  // namespace
