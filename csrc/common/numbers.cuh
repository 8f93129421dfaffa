// SPDX-License-Identifier: Apache-2.0
// Conversion of tensors' types to float32 and back, rounded to nearest even.

#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace {

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// Two elements of bfloat16 in a word, the first in its lower half. A bfloat16 is the upper half of a float32; the
// compiler would take two steps for the second one.
__device__ __forceinline__ float2 widen_bfloat16s(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

template <typename scalar_t>
__device__ __forceinline__ scalar_t narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

}  // namespace
