// SPDX-License-Identifier: Apache-2.0
// The merge: the results of the splits of a row, weighted by the log-sum-exp of each, as in Flash-Decoding.

#pragma once

#include <cstdint>

#include "balance.cuh"
#include "problem.cuh"
#include "results.cuh"

namespace paged {

constexpr int kMergeColumns = 128;  // of a warp's slice, four a thread
constexpr int kMergeWarps = 4;      // of a program

template <int kSlices>
__host__ __device__ constexpr int merges_per_row(int head_size) {
  return (head_size + kSlices * kMergeColumns - 1) / (kSlices * kMergeColumns);
}

// Whether a program takes several parts, one after the other: for large batches, which may have no splits, so that the
// programs that would start only to find that stay few. For small ones a loop costs more than it saves.
template <int kSplits>
constexpr bool kMergeLoops = kSplits <= 2;

// kSlices slices of a row of a block of queries, from its splits, by a team of `team` warps that read up to kSplits
// each at a time. Rows with one split have their result already.
template <typename T, int kSlices, int kSplits>
__device__ __forceinline__ void merge_part(
    const Problem& p, const Block& block, int splits, int item, int team, int columns, float4 (&parts)[kMergeWarps][32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, member = warp % team, kv_head = blockIdx.y;
  const int per_row = merges_per_row<kSlices>(p.head_size), row = item / per_row;
  const int token = token_of_row(p, min(row, kRows - 1));
  const int used = token < block.tokens && row < p.most_rows ? splits : 0;
  const Partials partials(p, block, kv_head, columns);
  const int first = item % per_row * kSlices * (kMergeColumns / Partials::kPiece) + lane / 4, pair = lane % 4;

  // The LSEs of this warp's parts, one a lane; and of all splits, so that no warp waits for another.
  const int mine = member + lane * team;
  float weight = lane < kSplits && mine < used ? p.partial_lse[partials.lse(mine, row)] : -INFINITY;
  float lse[kMaxSplits / 32], largest = -INFINITY, total = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    const int split = lane + i * 32;
    lse[i] = split < used ? p.partial_lse[partials.lse(split, row)] : -INFINITY;
  }
  // Asked for before the weights are known, so that both are on their way together, but behind them.
  float4 part[kSlices][kSplits];
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    const int piece = first + slice * (kMergeColumns / Partials::kPiece);
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      const int split = member + i * team;
      part[slice][i] = piece * Partials::kPiece < columns && split < used
                           ? *reinterpret_cast<const float4*>(p.partial_out + partials.out(split, row, piece, pair))
                           : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    largest = fmaxf(largest, lse[i]);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
  }
  const float reference = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    total += power_of_two(lse[i] - reference);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    total += __shfl_xor_sync(kAllLanes, total, distance);
  }
  weight = power_of_two(weight - reference);
  float factors[kSplits];
#pragma unroll
  for (int i = 0; i < kSplits; ++i) {
    factors[i] = __shfl_sync(kAllLanes, weight, i);
  }
  const float scale = total == 0.0f ? 0.0f : 1.0f / total;
  T* to = static_cast<T*>(p.out) + (block.token + token) * p.out_token +
          (kv_head * p.group + row - token * p.group) * p.out_head;
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      sum.x += factors[i] * part[slice][i].x;
      sum.y += factors[i] * part[slice][i].y;
      sum.z += factors[i] * part[slice][i].z;
      sum.w += factors[i] * part[slice][i].w;
    }
    // A loop around all of it would keep the compiler from asking for the first ones early.
    const int piece = first + slice * (kMergeColumns / Partials::kPiece);
#pragma unroll 8
    for (int split = kSplits * team + member; split < (piece * Partials::kPiece < columns ? used : 0); split += team) {
      const float factor = power_of_two(p.partial_lse[partials.lse(split, row)] - reference);
      const float4 more = *reinterpret_cast<const float4*>(p.partial_out + partials.out(split, row, piece, pair));
      sum.x += factor * more.x;
      sum.y += factor * more.y;
      sum.z += factor * more.z;
      sum.w += factor * more.w;
    }
    if constexpr (kSlices == 1) {
      parts[warp][lane] = sum;
      __syncthreads();
      for (int other = warp + 1; member == 0 && other < warp + team; ++other) {
        const float4 more = parts[other][lane];
        sum.x += more.x;
        sum.y += more.y;
        sum.z += more.z;
        sum.w += more.w;
      }
    }
    const int column = (first + slice * (kMergeColumns / Partials::kPiece)) * Partials::kPiece + pair * 2;
    const bool writes = member == 0 && used > 1;
    if (writes && column < p.head_size) {
      *reinterpret_cast<uint32_t*>(to + column) = pack<T>(sum.x * scale, sum.y * scale);
    }
    if (writes && column + 8 < p.head_size) {
      *reinterpret_cast<uint32_t*>(to + column + 8) = pack<T>(sum.z * scale, sum.w * scale);
    }
  }
}

template <typename T, int kSlices, int kSplits>
__global__ void __launch_bounds__(kMergeWarps * 32) merge_kernel(const Problem p, int team, int columns) {
  __shared__ float4 parts[kMergeWarps][32];
  __shared__ int shared_tiles;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int share = 1;
  if (p.programs > 0) {
    if (warp == 0) {
      const int tiles = shares_of(p).tiles;
      if (lane == 0) {
        shared_tiles = tiles;
      }
    }
    __syncthreads();
    share = shared_tiles;
  }
  const Block block = block_of(p);
  const int splits = splits_of(p, span_of(p, block).tiles, share);
  const int teams = kMergeWarps / team;
  int item = blockIdx.z * teams + warp / team;
  // So far this kernel only read what the attention kernel had waited for before it let this one start.
#if __CUDA_ARCH__ >= 900
  // By every program, also without work: this grid must not be complete before the attention kernel is.
  cudaGridDependencySynchronize();
#endif
  if constexpr (kMergeLoops<kSplits>) {
    static_assert(kSlices > 1, "warps of a team wait for each other, and would do so a different number of times");
    const int items = p.most_rows * merges_per_row<kSlices>(p.head_size);
    for (; splits > 1 && item < items; item += gridDim.z * teams) {
      merge_part<T, kSlices, kSplits>(p, block, splits, item, team, columns, parts);
    }
  } else {
    merge_part<T, kSlices, kSplits>(p, block, splits, item, team, columns, parts);
  }
}

}  // namespace paged
