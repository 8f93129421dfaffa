// SPDX-License-Identifier: Apache-2.0
// Elements of the three input types, two at a time and 16 bytes at a time.

#pragma once

#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common/numbers.cuh"

namespace {

// Two elements side by side, and what is done with them in their own type.
struct FloatPair {
  using scalar_t = float;
  float2 value;
  static __device__ __forceinline__ FloatPair narrow(float2 x) { return {x}; }
  __device__ __forceinline__ float2 widen() const { return value; }
  __device__ __forceinline__ FloatPair times(FloatPair other) const {
    return {make_float2(__fmul_rn(value.x, other.value.x), __fmul_rn(value.y, other.value.y))};
  }
};

struct HalfPair {
  using scalar_t = __half;
  __half2 value;
  static __device__ __forceinline__ HalfPair narrow(float2 x) { return {__float22half2_rn(x)}; }
  __device__ __forceinline__ float2 widen() const { return __half22float2(value); }
  __device__ __forceinline__ HalfPair times(HalfPair other) const { return {__hmul2(value, other.value)}; }
};

struct BFloat16Pair {
  using scalar_t = __nv_bfloat16;
  __nv_bfloat162 value;
  static __device__ __forceinline__ BFloat16Pair narrow(float2 x) { return {__float22bfloat162_rn(x)}; }
  __device__ __forceinline__ float2 widen() const {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return widen_bfloat16s(bits);
  }
  __device__ __forceinline__ BFloat16Pair times(BFloat16Pair other) const { return {__hmul2(value, other.value)}; }
};

// One element, as a pair with itself.
template <typename pair_t>
__device__ __forceinline__ pair_t pair_of(typename pair_t::scalar_t x) {
  pair_t pair;
  pair.value.x = x;
  pair.value.y = x;
  return pair;
}

// One load of a thread.
template <typename pair_t>
struct alignas(16) Chunk {
  static constexpr int kPairs = 16 / sizeof(pair_t);
  static constexpr int kWidth = 2 * kPairs;
  pair_t pair[kPairs];

  // As one word: member by member the compiler would take four loads.
  __device__ __forceinline__ void load(const void* __restrict__ from) {
    const uint4 word = *static_cast<const uint4*>(from);
    memcpy(pair, &word, sizeof(word));
  }
  __device__ __forceinline__ void store(void* __restrict__ to) const {
    uint4 word;
    memcpy(&word, pair, sizeof(word));
    *static_cast<uint4*>(to) = word;
  }
};

}  // namespace
