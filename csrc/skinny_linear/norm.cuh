// SPDX-License-Identifier: Apache-2.0
// RMS norm of rows, after an optional residual: the kernel between two linear layers. It is as short as its latencies,
// and lets the next layer request its weights meanwhile.

#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "pipe.cuh"

namespace skinny {

// Elements of a thread: 16 bytes.
constexpr int kNormWidth = 8;
constexpr int kMostNormThreads = 1024;

struct Norm {
  __nv_bfloat16* out;
  // x + residual, where there is one.
  __nv_bfloat16* sum;
  const __nv_bfloat16* x;
  const __nv_bfloat16* residual;
  const __nv_bfloat16* weight;
  int64_t x_stride, residual_stride;
  int hidden;
  float epsilon;
};

struct alignas(16) Eight {
  __nv_bfloat16 value[kNormWidth];
};

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
  }
  return value;
}

// A block for each row, a thread for each eight elements; blocks are whole warps.
template <bool kAdd>
__global__ void __launch_bounds__(kMostNormThreads) norm_kernel(const Norm p) {
  __shared__ float squares[kMostNormThreads / 32];
  let_next_start();
  const int column = static_cast<int>(threadIdx.x) * kNormWidth;
  const int64_t row = blockIdx.x;
  const Eight weight = *reinterpret_cast<const Eight*>(p.weight + column);
  wait_for_previous();
  const Eight x = *reinterpret_cast<const Eight*>(p.x + row * p.x_stride + column);
  float value[kNormWidth];
#pragma unroll
  for (int i = 0; i < kNormWidth; ++i) {
    value[i] = __bfloat162float(x.value[i]);
  }
  if constexpr (kAdd) {
    const Eight residual = *reinterpret_cast<const Eight*>(p.residual + row * p.residual_stride + column);
    Eight sum;
#pragma unroll
    for (int i = 0; i < kNormWidth; ++i) {
      value[i] += __bfloat162float(residual.value[i]);
      sum.value[i] = __float2bfloat16(value[i]);
    }
    *reinterpret_cast<Eight*>(p.sum + row * p.hidden + column) = sum;
  }
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < kNormWidth; ++i) {
    square += value[i] * value[i];
  }
  square = sum_of_warp(square);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) {
    squares[threadIdx.x / 32] = square;
  }
  __syncthreads();
  // Each warp adds the warps' sums for itself, in the same order.
  const float total = sum_of_warp(lane < static_cast<int>(blockDim.x) / 32 ? squares[lane] : 0.0f);
  const float scale = rsqrtf(total / static_cast<float>(p.hidden) + p.epsilon);
  Eight out;
#pragma unroll
  for (int i = 0; i < kNormWidth; ++i) {
    out.value[i] = __float2bfloat16(value[i] * scale * __bfloat162float(weight.value[i]));
  }
  *reinterpret_cast<Eight*>(p.out + row * p.hidden + column) = out;
}

}  // namespace skinny
