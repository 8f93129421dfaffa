// SPDX-License-Identifier: Apache-2.0
// Writes the sums of a block of queries: to the result, or, if its keys are split, to the memory of partial results.

#pragma once

#include <cstdint>

#include "hopper.cuh"
#include "problem.cuh"

namespace paged {

// Up to as many rows of a split the threads write themselves.
constexpr int kDirectRows = 16;

// Where the results of a split lie until they are merged: rows of float32, cut into pieces of 16 columns, the same
// piece of all rows side by side. The threads that have a piece of eight rows of an accumulator (PTX ISA, wgmma) then
// write 512 bytes in a row, 16 each, and so one thread's four columns are two pairs that are 8 apart.
struct Partials {
  static constexpr int kPiece = 16;

  int64_t first;  // row of partial_lse
  int rows, columns;

  __device__ __forceinline__ Partials(const Problem& p, const Block& block, int kv_head, int columns)
      : first((static_cast<int64_t>(block.index) * p.kv_heads + kv_head) * p.splits * p.most_rows),
        rows(p.most_rows),
        columns(columns) {}

  __device__ __forceinline__ int64_t lse(int split, int row) const { return first + split * rows + row; }

  // Of columns 2 * pair, 2 * pair + 1 of a piece, and those 8 behind them.
  __device__ __forceinline__ int64_t out(int split, int row, int piece, int pair) const {
    return (first + static_cast<int64_t>(split) * rows) * columns + (piece * rows + row) * kPiece + pair * 4;
  }
};

// The rows that a thread has of its warpgroup's accumulators, `first` and `first + 8`, if they are below `count`.
struct Rows {
  int warpgroup, lane, first, count;
};

// Few rows of a split go straight to their place. Many go by way of two buffers in shared memory, from where the copy
// engine writes them out faster than the threads would: true, and `store_partial` must follow.
template <int kChunks>
__device__ __forceinline__ bool write_partial(
    const Problem& p, const Partials& partials, int split, const Rows& rows, const float (&sums)[kChunks][32],
    float* const (&buffers)[2]) {
  constexpr int kPieces = kChunks * 2;  // in each buffer
  const bool direct = p.most_rows <= kDirectRows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float* to = direct ? p.partial_out + partials.out(split, 0, (rows.warpgroup * 2 + i) * kPieces, 0) : buffers[i];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = rows.first + 8 * half;
      if (row < rows.count) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const int column = (i * kPieces + piece) * 2;  // in units of the eight columns of four threads
          const float* sum = &sums[column / 8][column % 8 * 4 + half * 2];
          *reinterpret_cast<float4*>(to + (piece * p.most_rows + row) * Partials::kPiece + rows.lane % 4 * 4) =
              make_float4(sum[0], sum[1], sum[4], sum[5]);
        }
      }
    }
  }
  return !direct;
}

// By one thread of a warpgroup, when all have written their rows.
template <int kChunks>
__device__ __forceinline__ void store_partial(
    const Problem& p, const Partials& partials, int split, int warpgroup, float* const (&buffers)[2]) {
  constexpr int kPieces = kChunks * 2;
  const uint32_t bytes = kPieces * Partials::kPiece * sizeof(float) * p.most_rows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    hopper::bulk_store(p.partial_out + partials.out(split, 0, (warpgroup * 2 + i) * kPieces, 0), buffers[i], bytes);
  }
  hopper::bulk_store_wait();
}

template <typename T, int kChunks>
__device__ __forceinline__ void write_result(
    const Problem& p, const Block& block, int kv_head, const Rows& rows, const float (&sums)[kChunks][32]) {
  const int column = rows.warpgroup * kChunks * kChunk + rows.lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = rows.first + 8 * half, token = token_of_row(p, row);
    if (row < rows.count) {
      T* to = static_cast<T*>(p.out) + (block.token + token) * p.out_token +
              (kv_head * p.group + row - token * p.group) * p.out_head;
#pragma unroll
      for (int i = 0; i < kChunks * 8; ++i) {
        if (column + i * 8 < p.head_size) {
          const float* sum = &sums[i / 8][i % 8 * 4 + half * 2];
          *reinterpret_cast<uint32_t*>(to + column + i * 8) = pack<T>(sum[0], sum[1]);
        }
      }
    }
  }
}

}  // namespace paged
