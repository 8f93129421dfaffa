// SPDX-License-Identifier: Apache-2.0
// out = x * weight^T for up to 32 rows of x. It takes the time of reading the weights once, so the kernel is a ring of
// copies that is filled before the previous kernel has ended: weights depend on no kernel.
//
// A block has tiles of kRows rows of the weights. Each stage of its ring holds kDepth columns of them and the same
// columns of x, only of existing rows: the copy engine takes longer if it must fill rows. One warp starts copies. Eight
// multiply: each has its own part of a stage's columns and sums in registers, weights as the 16 rows of mma's first
// operand and tokens as the 8 columns of its second. At the end of a tile the eight sums are added in a fixed order, so
// the result depends only on the operands.

#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "pipe.cuh"

namespace skinny {

constexpr int kConsumers = 8;
constexpr int kThreads = (kConsumers + 1) * 32;
constexpr int kMostStages = 16;
// Columns that the copy engine writes side by side: 128 bytes, the width of its swizzle.
constexpr int kChunk = 64;
// The alignment of a swizzled box.
constexpr int kBoxAlignment = 1024;

struct Problem {
  __nv_bfloat16* out;
  int tokens;
  // A row of `out`, which is contiguous.
  int columns;
  int tiles;
  // Stages of a tile: columns of the weights / kDepth.
  int steps;
  // Stages of the ring.
  int stages;
  // The first half of the weights' rows are `gate`, and silu(`gate`) is multiplied with the second half. A tile
  // then has kRows / 2 of each.
  bool gated;
};

template <int kRows, int kTokens, int kDepth>
struct Tile {
  static_assert(kRows % 16 == 0 && (kTokens == 8 || kTokens % 16 == 0) && kDepth % (32 * kConsumers) == 0, "");
  static constexpr uint32_t kWeightBytes = kRows * kDepth * 2;
  static constexpr uint32_t kStageBytes = kWeightBytes + kTokens * kDepth * 2;
  static_assert(kWeightBytes % kBoxAlignment == 0 && kStageBytes % kBoxAlignment == 0, "");
  // Partial sums are [warp][token][row]. With these rows no two lanes write to one bank.
  static constexpr int kPitch = kRows + 4;
  static constexpr uint32_t kPartialBytes = kConsumers * kTokens * kPitch * sizeof(float);
};

// Where the 16 bytes of 8 columns lie in a box with `rows` rows, by the copy engine's swizzle, which goes by addresses.
__device__ __forceinline__ uint32_t in_box(uint32_t box, int rows, int row, int eighth) {
  const int line = (eighth >> 3) * rows + row;
  return box + line * 128 + (((eighth & 7) ^ (line & 7)) << 4);
}

__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16(value)); }

// Rounded like `silu(gate) * up` in three PyTorch operations on bfloat16.
__device__ __forceinline__ float gate(float gate, float up) {
  const float value = rounded(gate);
  return rounded(value / (1.0f + expf(-value))) * rounded(up);
}

template <int kRows, int kTokens, int kDepth>
__device__ __forceinline__ void produce(
    const CUtensorMap& weight_map, const CUtensorMap& x_map, const Problem& p, uint32_t ring, uint64_t* full,
    uint64_t* empty, int first, int last) {
  using Shape = Tile<kRows, kTokens, kDepth>;
  constexpr int kChunks = kDepth / kChunk;
  const int tile_rows = p.gated ? kRows / 2 : kRows;
  const uint64_t once = read_once_policy(), again = read_again_policy();
  const int total = (last - first) * p.steps;
  const auto load_weights = [&](int tile, int step, int stage) {
    // Bytes of both boxes: a stage is full when its part of x has also arrived.
    barrier_arrive_expecting(&full[stage], Shape::kWeightBytes + p.tokens * kDepth * 2);
    tma_load(
        ring + stage * Shape::kStageBytes, &weight_map, &full[stage], tile * tile_rows, step * kChunks, once);
  };
  const auto load_x = [&](int step, int stage) {
    tma_load(
        ring + stage * Shape::kStageBytes + Shape::kWeightBytes, &x_map, &full[stage], 0, step * kChunks, again);
  };
  int tile = first, step = 0;
  const int ahead = min(total, p.stages);
  for (int i = 0; i < ahead; ++i) {
    load_weights(tile, step, i);
    if (++step == p.steps) {
      step = 0;
      ++tile;
    }
  }
  wait_for_previous();
  fence_proxies();
  for (int i = 0, x_step = 0; i < ahead; ++i) {
    load_x(x_step, i);
    if (++x_step == p.steps) {
      x_step = 0;
    }
  }
  int stage = 0;
  uint32_t parity = 0;
  for (int i = ahead; i < total; ++i) {
    // Here the ring is full (ahead == p.stages), so this is a stage that was used before.
    barrier_wait(&empty[stage], parity);
    load_weights(tile, step, stage);
    load_x(step, stage);
    if (++step == p.steps) {
      step = 0;
      ++tile;
    }
    if (++stage == p.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// Adds the eight warps' sums of one tile and writes them.
template <int kRows, int kTokens, int kDepth>
__device__ __forceinline__ void write_tile(const Problem& p, const float* partial, int tile) {
  using Shape = Tile<kRows, kTokens, kDepth>;
  const int width = p.gated ? kRows / 2 : kRows;
  const int pairs = width / 2;
  for (int i = threadIdx.x; i < p.tokens * pairs; i += kConsumers * 32) {
    const int token = i / pairs, row = i % pairs * 2;
    float2 sum = {0.0f, 0.0f}, up = {0.0f, 0.0f};
#pragma unroll
    for (int warp = 0; warp < kConsumers; ++warp) {
      const float* from = partial + (warp * kTokens + token) * Shape::kPitch + row;
      const float2 part = *reinterpret_cast<const float2*>(from);
      sum.x += part.x;
      sum.y += part.y;
      if (p.gated) {
        const float2 other = *reinterpret_cast<const float2*>(from + kRows / 2);
        up.x += other.x;
        up.y += other.y;
      }
    }
    if (p.gated) {
      sum.x = gate(sum.x, up.x);
      sum.y = gate(sum.y, up.y);
    }
    __nv_bfloat16* to = p.out + static_cast<int64_t>(token) * p.columns + tile * width + row;
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(sum.x, sum.y);
  }
}

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers * 32) : "memory"); }

template <int kRows, int kTokens, int kDepth>
__device__ __forceinline__ void consume(
    const Problem& p, uint32_t ring, float* partial, uint64_t* full, uint64_t* empty, int first, int last) {
  using Shape = Tile<kRows, kTokens, kDepth>;
  constexpr int kGroups = kRows / 16, kColumns = kTokens / 8, kShare = kDepth / kConsumers;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int stage = 0;
  uint32_t parity = 0;
  for (int tile = first; tile < last; ++tile) {
    float sums[kGroups][kColumns][4] = {};
    for (int step = 0; step < p.steps; ++step) {
      barrier_wait(&full[stage], parity);
      const uint32_t weights = ring + stage * Shape::kStageBytes, x = weights + Shape::kWeightBytes;
#pragma unroll
      for (int part = 0; part < kShare / 32; ++part) {
        // 32 columns, two products' worth: 4 pieces of 8 columns.
        const int eighth = (warp * kShare + part * 32) / 8;
        // [product][16 tokens][8 pieces * 2 + half of the 16 columns]
        uint32_t tokens[2][(kColumns + 1) / 2][4];
        if constexpr (kTokens == 8) {
          uint32_t loaded[4];
          ldmatrix(loaded, in_box(x, p.tokens, lane & 7, eighth + (lane >> 3)));
          tokens[0][0][0] = loaded[0];
          tokens[0][0][1] = loaded[1];
          tokens[1][0][0] = loaded[2];
          tokens[1][0][1] = loaded[3];
        } else {
#pragma unroll
          for (int sixteen = 0; sixteen < kTokens / 16; ++sixteen) {
            // Matrices 0 and 1 are of the first eight tokens, 2 and 3 of the others.
            const int row = sixteen * 16 + (lane & 7) + ((lane >> 4) << 3);
            ldmatrix(tokens[0][sixteen], in_box(x, p.tokens, row, eighth + ((lane >> 3) & 1)));
            ldmatrix(tokens[1][sixteen], in_box(x, p.tokens, row, eighth + 2 + ((lane >> 3) & 1)));
          }
        }
#pragma unroll
        for (int product = 0; product < 2; ++product) {
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            uint32_t rows[4];
            ldmatrix(rows, in_box(weights, kRows, group * 16 + (lane & 15), eighth + product * 2 + (lane >> 4)));
#pragma unroll
            for (int column = 0; column < kColumns; ++column) {
              const auto& pair = tokens[product][column / 2];
              mma(sums[group][column], rows, pair[column % 2 * 2], pair[column % 2 * 2 + 1]);
            }
          }
        }
      }
      // All lanes have read what they need of the stage.
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&empty[stage]);
      }
      if (++stage == p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    // Behind this no warp reads the sums of the tile before. Where a block has one tile, these lie over its ring, which
    // no warp reads and no copy fills any more.
    sync_consumers();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = column * 8 + (lane & 3) * 2 + (i & 1);
          const int row = group * 16 + (lane >> 2) + (i >> 1) * 8;
          partial[(warp * kTokens + token) * Shape::kPitch + row] = sums[group][column][i];
        }
      }
    }
    sync_consumers();
    write_tile<kRows, kTokens, kDepth>(p, partial, tile);
  }
}

// A block has at least one tile. Dynamic shared memory: the ring, and behind it partial sums where a block has several.
template <int kRows, int kTokens, int kDepth>
__global__ void __launch_bounds__(kThreads, 1) linear_kernel(
    const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap x_map, const Problem p) {
  extern __shared__ uint8_t memory[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages];
  let_next_start();
  // As a pointer too: partial sums are written by ordinary stores.
  uint8_t* ring = memory + ((kBoxAlignment - (shared_address(memory) % kBoxAlignment)) % kBoxAlignment);
  if (threadIdx.x == 0) {
    tma_prefetch(&weight_map);
    tma_prefetch(&x_map);
    for (int i = 0; i < p.stages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], kConsumers);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int64_t tiles = p.tiles;
  const int first = static_cast<int>(tiles * blockIdx.x / gridDim.x);
  const int last = static_cast<int>(tiles * (blockIdx.x + 1) / gridDim.x);
  if (threadIdx.x / 32 == kConsumers) {
    if (threadIdx.x % 32 == 0) {
      produce<kRows, kTokens, kDepth>(weight_map, x_map, p, shared_address(ring), full, empty, first, last);
    }
  } else {
    // Costs nothing, as the first stage is full only when its x has come. What is written below may be memory that
    // kernels before this one still read.
    wait_for_previous();
    const bool behind = p.tiles > static_cast<int>(gridDim.x);
    float* partial = reinterpret_cast<float*>(
        behind ? ring + static_cast<size_t>(p.stages) * Tile<kRows, kTokens, kDepth>::kStageBytes : ring);
    consume<kRows, kTokens, kDepth>(p, shared_address(ring), partial, full, empty, first, last);
  }
}

}  // namespace skinny
