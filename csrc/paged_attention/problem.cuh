// SPDX-License-Identifier: Apache-2.0
// The arguments of a launch, and each program's queries, keys and rows. The attention kernel and the merge must compute
// the same, so both use this header and balance.cuh.

#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/warp.cuh"

namespace paged {

constexpr int kRows = 64;          // of a program, and so the most query heads that share a KV head
constexpr int kKeys = 64;
constexpr int kSubTile = 16;       // tokens that one copy of keys takes: the smallest page
constexpr int kChunk = 64;         // columns in a row of 128 bytes
constexpr int kMostChunks = 4;     // of a warpgroup: the sums of more would not fit into its registers
constexpr int kMaxHeadSize = 2 * kMostChunks * kChunk;
constexpr int kAccess = 16;        // bytes: what the copy engine asks of addresses and strides
constexpr int kAlignment = kAccess / 2;  // elements
constexpr int kChunkBytes = kKeys * kChunk * 2;
constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kThreads = 2 * kGroupThreads;
constexpr int kMaxSplits = 128;
constexpr float kLog2e = 1.4426950408889634f;

struct Problem {
  void* out;
  float* partial_out;  // as Partials (results.cuh) says
  float* partial_lse;
  const float* sinks;
  const int* query_start_loc;
  const int* seq_lens;
  const int* block_table;
  int64_t out_token, out_head, table;  // strides in elements
  int requests, blocks_per_request;                              // 0: requests have different numbers of blocks
  int kv_heads, group, head_size, page, num_blocks;
  int splits;        // of a block of queries at most: there is room for as many results
  int programs;      // of a KV head, among which the keys of all requests are shared out; 0: every block has all splits
  int at_once;       // programs of a KV head that the device runs at a time
  int block_tokens;  // tokens of a block of queries: kRows / group
  int most_tokens;   // that any block has
  int most_rows;     // most_tokens * group
  int window_left, window_right;
  float scale, softcap;  // in units of log2(e)
  float one_over_group;
  bool causal;
};

// The quotient rounded down, of numbers below 2^23: a float represents them, and its quotient, which may be off by two
// units in the last place, is off by one at most. Faster than a division of integers.
__device__ __forceinline__ int divide(int number, int by) {
  const int quotient = __float2int_rz(__fdividef(static_cast<float>(number), static_cast<float>(by)));
  const int rest = number - quotient * by;
  return quotient + (rest >= by ? 1 : 0) - (rest < 0 ? 1 : 0);
}

__device__ __forceinline__ int divide_up(int number, int by) { return divide(number + by - 1, by); }

// A block of queries. No tokens: nothing to do.
struct Block {
  int index, request, token, tokens, position;
};

__device__ inline Block block_from(const Problem& p, int index, int request, int skipped) {
  Block block;
  block.index = index;
  block.request = request;
  const int start = p.query_start_loc[request];
  const int count = p.query_start_loc[request + 1] - start;
  block.token = start + skipped;
  // No more than were announced: the copy of the queries and the splits' results have no room for them.
  block.tokens = min(count - skipped, p.most_tokens);
  block.position = p.seq_lens[request] - count + skipped;
  return block;
}

__device__ inline Block block_of(const Problem& p) {
  // The last blocks of a causal prefill see the most keys and take longest, so they start first.
  const int index = gridDim.x - 1 - blockIdx.x;
  int request, skipped;
  if (p.blocks_per_request > 0) {
    request = divide(index, p.blocks_per_request);
    skipped = (index - request * p.blocks_per_request) * p.block_tokens;
  } else {
    // Request r has the blocks from query_start_loc[r] / block_tokens + r on: as many as it needs or one more, and
    // known without a sum over the requests before it.
    int low = 0, high = p.requests - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (p.query_start_loc[middle] / p.block_tokens + middle <= index) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    request = low;
    skipped = (index - (p.query_start_loc[low] / p.block_tokens + low)) * p.block_tokens;
  }
  return block_from(p, index, request, skipped);
}

// The keys that a block of queries sees. `begin` is a multiple of a tile in every batch, so, if keys are not split, a
// row's rounding does not depend on other rows.
struct Span {
  int begin, end, tiles;
};

__device__ inline Span span_of(const Problem& p, const Block& block) {
  int begin = 0, end = p.seq_lens[block.request];
  const int last = block.position + block.tokens - 1;
  if (p.causal) {
    end = min(end, last + 1);
  }
  if (p.window_left >= 0) {
    begin = max(block.position - p.window_left, 0) / kKeys * kKeys;
  }
  if (p.window_right >= 0) {
    end = min(end, last + p.window_right + 1);
  }
  return {begin, end, (max(end - begin, 0) + kKeys - 1) / kKeys};
}

// The number of splits of a span, of at most `share` tiles each, limited by the room for results. 0 without keys.
__device__ __forceinline__ int splits_of(const Problem& p, int tiles, int share) {
  return divide_up(tiles, tiles > share * p.splits ? divide_up(tiles, p.splits) : share);
}

// The keys that a split reads. All but the last have as many tiles.
struct Keys {
  int begin, end;
};

__device__ __forceinline__ Keys keys_of(const Span& span, int splits, int split) {
  const int each = divide_up(span.tiles, max(splits, 1)), begin = span.begin + split * each * kKeys;
  return {begin, min(span.end, begin + each * kKeys)};
}

// Rows are fewer than 64, for which the product with a rounded reciprocal is exact.
__device__ __forceinline__ int token_of_row(const Problem& p, int row) {
  return static_cast<int>((static_cast<float>(row) + 0.5f) * p.one_over_group);
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

__device__ __forceinline__ float power_of_two(float exponent) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
  return result;
}

}  // namespace paged
