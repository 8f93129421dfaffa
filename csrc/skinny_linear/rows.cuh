// SPDX-License-Identifier: Apache-2.0
// What lies between two linear layers and works row by row: RMS norm, after an optional residual, and the activation of
// more rows than a linear layer here is for. Both are as short as their latencies, and let the next kernel start.

#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "pipe.cuh"

namespace skinny {

// Elements of a load: 16 bytes.
constexpr int kWidth = 8;
constexpr int kMostNormThreads = 1024;
constexpr int kGateThreads = 128;

struct alignas(16) Eight {
  __nv_bfloat16 value[kWidth];
};

__device__ __forceinline__ Eight eight_at(const __nv_bfloat16* from) { return *reinterpret_cast<const Eight*>(from); }

__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16(value)); }

// As `silu(gate) * up` of three PyTorch operations on bfloat16 rounds it.
__device__ __forceinline__ float gate(float gate, float up) {
  const float value = rounded(gate);
  return rounded(value / (1.0f + expf(-value))) * rounded(up);
}

struct Gate {
  __nv_bfloat16* out;
  // Gates, and behind them what these multiply.
  const __nv_bfloat16* x;
  // Of a row of `out`.
  int columns;
  int blocks_of_row;
};

// A thread for each eight elements.
__global__ void __launch_bounds__(kGateThreads) gate_kernel(const Gate p) {
  let_next_start();
  const int64_t row = blockIdx.x / p.blocks_of_row;
  const int column = static_cast<int>(blockIdx.x % p.blocks_of_row * kGateThreads + threadIdx.x) * kWidth;
  wait_for_previous();
  if (column >= p.columns) {
    return;
  }
  const __nv_bfloat16* from = p.x + row * 2 * p.columns + column;
  const Eight gates = eight_at(from), ups = eight_at(from + p.columns);
  Eight out;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    out.value[i] = __float2bfloat16(gate(__bfloat162float(gates.value[i]), __bfloat162float(ups.value[i])));
  }
  *reinterpret_cast<Eight*>(p.out + row * p.columns + column) = out;
}

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

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
  }
  return value;
}

// A block for each row, whose threads have kEights pieces each; blocks are whole warps.
template <bool kAdd, int kEights>
__global__ void __launch_bounds__(kMostNormThreads) norm_kernel(const Norm p) {
  __shared__ float squares[kMostNormThreads / 32];
  let_next_start();
  const int64_t row = blockIdx.x;
  int column[kEights];
  Eight weight[kEights], x[kEights], residual[kEights];
#pragma unroll
  for (int piece = 0; piece < kEights; ++piece) {
    column[piece] = static_cast<int>(piece * blockDim.x + threadIdx.x) * kWidth;
    weight[piece] = eight_at(p.weight + column[piece]);
  }
  wait_for_previous();
#pragma unroll
  for (int piece = 0; piece < kEights; ++piece) {
    x[piece] = eight_at(p.x + row * p.x_stride + column[piece]);
    if constexpr (kAdd) {
      residual[piece] = eight_at(p.residual + row * p.residual_stride + column[piece]);
    }
  }
  float value[kEights][kWidth];
  float square = 0.0f;
#pragma unroll
  for (int piece = 0; piece < kEights; ++piece) {
    Eight sum;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      value[piece][i] = __bfloat162float(x[piece].value[i]);
      if constexpr (kAdd) {
        value[piece][i] += __bfloat162float(residual[piece].value[i]);
        sum.value[i] = __float2bfloat16(value[piece][i]);
      }
      square += value[piece][i] * value[piece][i];
    }
    if constexpr (kAdd) {
      *reinterpret_cast<Eight*>(p.sum + row * p.hidden + column[piece]) = sum;
    }
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
#pragma unroll
  for (int piece = 0; piece < kEights; ++piece) {
    Eight out;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      out.value[i] = __float2bfloat16(value[piece][i] * scale * __bfloat162float(weight[piece].value[i]));
    }
    *reinterpret_cast<Eight*>(p.out + row * p.hidden + column[piece]) = out;
  }
}

}  // namespace skinny
