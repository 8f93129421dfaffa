// SPDX-License-Identifier: Apache-2.0
// The merge: the results of the splits of a row, weighted by the log-sum-exp of each, as in Flash-Decoding.

#pragma once

#include <cstdint>

#include "problem.cuh"

namespace paged {

constexpr int kMergeColumns = 128;  // of a program, four a thread
constexpr int kMergeWarps = 16;     // at most: few threads a row, so that many rows are under way at once
constexpr int kMergeLoads = kMaxSplits / kMergeWarps;

// One row of a block of queries, 128 columns of it, from its splits. Rows with one split have their result already.
template <typename T>
__global__ void __launch_bounds__(kMergeWarps * 32) merge_kernel(const Problem p) {
  __shared__ float weights[kMaxSplits];
  __shared__ float4 parts[kMergeWarps][32];
  const Block block = block_of(p);
  const int slices = (p.head_size + kMergeColumns - 1) / kMergeColumns;
  const int kv_head = blockIdx.y, row = blockIdx.z / slices, token = token_of_row(p, row);
  const int used = block.tokens > 0 ? keys_of(p, block, 0).used : 0;
#if __CUDA_ARCH__ >= 900
  // By every program, those without work as well: this grid must not be complete before the attention kernel is.
  cudaGridDependencySynchronize();
#endif
  if (token >= block.tokens || used <= 1) {
    return;
  }
  const int64_t slot = (static_cast<int64_t>(block.index) * p.kv_heads + kv_head) * p.splits * kRows + row;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int column = blockIdx.z % slices * kMergeColumns + lane * 4;
  const bool real = column < p.head_size;

  // Asked for before the weights are known, so that both are on their way at once.
  float4 part[kMergeLoads];
#pragma unroll
  for (int i = 0; i < kMergeLoads; ++i) {
    const int split = warp + i * warps;
    part[i] = real && split < used
                  ? *reinterpret_cast<const float4*>(p.partial_out + (slot + split * kRows) * p.head_size + column)
                  : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  // Every warp sees all of them; only the first one writes them down.
  float lse[kMaxSplits / 32], largest = -INFINITY, total = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    const int split = lane + i * 32;
    lse[i] = split < used ? p.partial_lse[slot + split * kRows] : -INFINITY;
    largest = fmaxf(largest, lse[i]);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, distance));
  }
  const float reference = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    lse[i] = power_of_two(lse[i] - reference);
    total += lse[i];
    if (warp == 0) {
      weights[lane + i * 32] = lse[i];
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    total += __shfl_xor_sync(0xffffffff, total, distance);
  }
  __syncthreads();
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < kMergeLoads; ++i) {
    const int split = warp + i * warps;
    const float weight = split < used ? weights[split] : 0.0f;
    sum.x += weight * part[i].x;
    sum.y += weight * part[i].y;
    sum.z += weight * part[i].z;
    sum.w += weight * part[i].w;
  }
  parts[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || !real) {
    return;
  }
  for (int other = 1; other < warps; ++other) {
    const float4 more = parts[other][lane];
    sum.x += more.x;
    sum.y += more.y;
    sum.z += more.z;
    sum.w += more.w;
  }
  const float factor = total == 0.0f ? 0.0f : 1.0f / total;
  T* to = static_cast<T*>(p.out) + (block.token + token) * p.out_token + (kv_head * p.group + row - token * p.group) * p.out_head;
  *reinterpret_cast<uint2*>(to + column) =
      make_uint2(pack<T>(sum.x * factor, sum.y * factor), pack<T>(sum.z * factor, sum.w * factor));
}

}  // namespace paged
