// SPDX-License-Identifier: Apache-2.0
// Attention over a paged KV cache for large heads on Hopper, with its keys split over several programs if the batch has
// too few to fill the device.
//
// A program has 64 rows, each a token and one of the query heads that share a KV head, and walks over tiles of 64 keys.
// The sums of 64 rows of 512 are half of a multiprocessor's registers, so two warpgroups divide the *head* between
// them:
// each has its half of the columns of queries, keys, values and sums, copies its own tiles, and waits only for itself.
// Only the logits are sums over both halves; the warpgroups exchange theirs through shared memory and then compute the
// same weights. (FlashMLA, which also has 64 rows of 512, divides keys and values instead and exchanges weights.)
//
// The online softmax and the split over the keys are FlashAttention 2's and Flash-Decoding's. While the products with
// the values of a tile run, the weights of the next tile are computed, as in FlashAttention 3.
//
// The copy engine reads the keys by the cache's strides: 16 tokens of one page and 64 columns at a time, so pages of
// any multiple of 16 tokens work.

#pragma once

#include <cstdint>

#include "balance.cuh"
#include "hopper.cuh"
#include "problem.cuh"
#include "results.cuh"

namespace paged {

// Hardware barriers; the warpgroups' own are kOwn and kOwn + 1, and so on.
constexpr int kOwn = 1;
constexpr int kExchanged = 3;
constexpr int kTaken = 4;

// Shared memory of one program. Tiles of a warpgroup are chunks of 64 columns, each of 64 rows of 128 bytes.
template <int kChunks>
struct Shared {
  alignas(1024) uint8_t query[2][kChunks * kChunkBytes];
  alignas(1024) uint8_t keys[2][kChunks * kChunkBytes];
  alignas(1024) uint8_t values[2][kChunks * kChunkBytes];
  float4 logits[2][8][kGroupThreads];
  uint64_t keys_full[2];
  uint64_t values_full[2];
};

// Where in the cache a sub-tile lies. One without a key that any row sees has block `num_blocks`, which copies as
// zeros.
struct Place {
  int block, token;
};

// The half of a tile's columns that a warpgroup has. Each of its warps copies one sub-tile: a copy takes operands that
// are the same for a whole warp, so 16 copies by one warp would keep the other three waiting.
template <int kChunks, bool kOnce>
struct Copier {
  const CUtensorMap* map;
  uint64_t* full;
  uint8_t* to;
  int column, kv_head;

  __device__ __forceinline__ void start(int warp, int lane, Place place) const {
    if (lane != 0) {
      return;
    }
    // Bytes may arrive before they are expected: the barrier also waits for this arrival.
    if (warp == 0) {
      hopper::barrier_arrive_expecting(full, kChunks * kChunkBytes);
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      hopper::tma_load<kOnce>(
          to + chunk * kChunkBytes + warp * (kSubTile * kChunk * 2), map, full, column + chunk * kChunk, place.token,
          kv_head, place.block);
    }
  }
};

// kOnce: keys that only one block of queries reads would drive from the cache what is read again, the splits' results.
template <typename T, int kChunks, bool kOnce>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(
    const __grid_constant__ CUtensorMap query_map, const __grid_constant__ CUtensorMap key_map,
    const __grid_constant__ CUtensorMap value_map, const Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Not aligned by hand: the compiler would lose sight of where it lies, and address it as any memory.
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<Shared<kChunks>*>(raw);
  if (hopper::shared_address(raw) % 1024 != 0) {
    __trap();
  }

  if (threadIdx.x == 0) {
    hopper::tma_prefetch(&query_map);
    hopper::tma_prefetch(&key_map);
    hopper::tma_prefetch(&value_map);
    hopper::barrier_init(&shared.keys_full[0]);
    hopper::barrier_init(&shared.keys_full[1]);
    hopper::barrier_init(&shared.values_full[0]);
    hopper::barrier_init(&shared.values_full[1]);
    hopper::fence_barrier_init();
  }
  __syncthreads();
  // So far nothing was read that the kernel before this one may still write.
  cudaGridDependencySynchronize();
  const bool shared_out = kOnce && p.programs > 0;
  Task task{0, static_cast<int>(blockIdx.z), 0};
  if (shared_out) {
    task = task_of(p, blockIdx.x);
    if (task.request < 0) {
      return;
    }
  }
  const Block block = shared_out ? block_from(p, task.request, task.request, 0) : block_of(p);
  if (block.tokens <= 0) {
    return;
  }
  const int kv_head = blockIdx.y, split = task.split;
  const Span span = span_of(p, block);
  const int splits = shared_out ? task.splits : splits_of(p, span.tiles, 1);
  if (split >= max(splits, 1)) {
    return;
  }
  const Keys keys = keys_of(span, splits, split);
  const int tiles = max((keys.end - keys.begin + kKeys - 1) / kKeys, 0);
  // The shuffle tells the compiler that they are the same for a whole warp, which descriptors must be.
  const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / kGroupThreads, 0);
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32;
  const int warp = __shfl_sync(kAllLanes, thread / 32, 0);
  const int own = kOwn + warpgroup;

  const int column = warpgroup * kChunks * kChunk;
  const Copier<kChunks, kOnce> copy_keys{
      &key_map, &shared.keys_full[warpgroup], shared.keys[warpgroup], column, kv_head};
  const Copier<kChunks, kOnce> copy_values{
      &value_map, &shared.values_full[warpgroup], shared.values[warpgroup], column, kv_head};
  const int* table = p.block_table + block.request * p.table;
  // Of this warp's sub-tile of a tile.
  const auto place_of = [&](int tile) {
    const int token = keys.begin + tile * kKeys + warp * kSubTile;
    const int index = token / p.page;
    return Place{token < keys.end ? table[index] : p.num_blocks, token - index * p.page};
  };
  Place place = place_of(0), next_place = place_of(1);
  // Bytes before the window may be NaN, like bytes behind the keys; only the first tile begins before the window.
  if (p.window_left >= 0 && keys.begin + (warp + 1) * kSubTile <= block.position - p.window_left) {
    place.block = p.num_blocks;
  }
  if (tiles > 0) {
    // Queries before keys: after all programs' first tiles they would arrive last, and nothing begins without them.
    // Rows behind a block's last row belong to another request or none; their results are not written.
    if (lane == 0) {
      if (warp == 0) {
        hopper::barrier_expect(&shared.keys_full[warpgroup], kChunks * p.most_rows * kChunk * 2);
      }
      for (int chunk = warp; chunk < kChunks; chunk += kGroupThreads / 32) {
        hopper::tma_load(
            shared.query[warpgroup] + chunk * kChunkBytes, &query_map, &shared.keys_full[warpgroup],
            column + chunk * kChunk, kv_head * p.group, block.token);
      }
    }
    copy_keys.start(warp, lane, place);
    copy_values.start(warp, lane, place);
  }

  // In an accumulator of 64 x 64 this thread has rows `row` and `row + 8`, of each eight columns two (PTX ISA, wgmma).
  const int row = warp * 16 + lane / 4, rows = block.tokens * p.group;
  int position[2], first[2];
  float largest[2], total[2] = {0.0f, 0.0f};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = token_of_row(p, row + 8 * half);
    position[half] = block.position + token;
    first[half] = p.window_left < 0 ? 0 : position[half] - p.window_left;
    largest[half] = -INFINITY;
    if (p.sinks != nullptr && split == 0 && token < block.tokens) {
      // A key without a value. The four threads of a row add up their totals, so one of them has it.
      largest[half] = p.sinks[kv_head * p.group + row + 8 * half - token * p.group] * kLog2e;
      total[half] = lane % 4 == 0 ? 1.0f : 0.0f;
    }
  }
  float sums[kChunks][32];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      sums[chunk][i] = 0.0f;
    }
  }
  uint32_t weights[16];
  float shrink[2];

  const uint64_t query_at = hopper::descriptor(hopper::shared_address(shared.query[warpgroup]));
  const uint64_t keys_at = hopper::descriptor(hopper::shared_address(shared.keys[warpgroup]));
  const uint64_t values_at = hopper::descriptor(hopper::shared_address(shared.values[warpgroup]));

  const auto start_logits = [&](int tile, float(&logits)[32]) {
    hopper::barrier_wait(&shared.keys_full[warpgroup], tile & 1);
    hopper::wgmma_fence();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        // Addresses in a descriptor count 16 bytes; a step along the head is 32 bytes.
        const uint64_t offset = chunk * (kChunkBytes / 16) + step * 2;
        hopper::wgmma_shared<T>(logits, query_at + offset, keys_at + offset, chunk + step);
      }
    }
    hopper::wgmma_commit();
  };

  const auto start_sums = [&] {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      hopper::wgmma_hold(sums[chunk]);
    }
    hopper::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        // A step is 16 keys: two groups of eight rows.
        hopper::wgmma_registers<T>(
            sums[chunk], weights + 4 * step, values_at + chunk * (kChunkBytes / 16) + step * (2048 / 16));
      }
    }
    hopper::wgmma_commit();
  };
  const auto finish_sums = [&] {
    hopper::wgmma_wait<0>();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      hopper::wgmma_hold(sums[chunk]);
    }
  };

  // After the products of this warpgroup's half of the head: add the other half.
  const auto exchange_logits = [&](int tile, float(&logits)[32]) {
    if (tile > 0) {
      // The other warpgroup has taken what it was last given.
      hopper::named_sync(kTaken + warpgroup, kThreads);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      shared.logits[warpgroup][i][thread] =
          make_float4(logits[4 * i], logits[4 * i + 1], logits[4 * i + 2], logits[4 * i + 3]);
    }
    hopper::named_sync(kExchanged, kThreads);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 other = shared.logits[1 - warpgroup][i][thread];
      logits[4 * i] += other.x;
      logits[4 * i + 1] += other.y;
      logits[4 * i + 2] += other.z;
      logits[4 * i + 3] += other.w;
    }
    if (tile + 1 < tiles) {
      hopper::named_arrive(kTaken + 1 - warpgroup, kThreads);
    }
  };
  // Mask, and put the weights of a tile in the place of its logits.
  const auto weigh = [&](int tile, float(&logits)[32]) {
    const int begin = keys.begin + tile * kKeys;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      logits[i] *= p.scale;
    }
    if (p.softcap > 0.0f) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        // tanh(x) = 1 - 2 / (1 + exp(2 x)), which is right at both ends.
        const float e = power_of_two(logits[i] / p.softcap * (2.0f * kLog2e));
        logits[i] = p.softcap - __fdividef(2.0f * p.softcap, 1.0f + e);
      }
    }
    // Most tiles are seen by all rows whole.
    const int last_token = block.position + block.tokens - 1;
    const bool whole = begin + kKeys <= keys.end && (!p.causal || begin + kKeys - 1 <= block.position) &&
                       (p.window_left < 0 || begin >= last_token - p.window_left) &&
                       (p.window_right < 0 || begin + kKeys - 1 <= block.position + p.window_right);
    if (!whole) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int end = keys.end;
        end = p.causal ? min(end, position[half] + 1) : end;
        end = p.window_right < 0 ? end : min(end, position[half] + p.window_right + 1);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int at = begin + i / 2 * 8 + lane % 4 * 2 + i % 2;
          float& logit = logits[i / 2 * 4 + half * 2 + i % 2];
          logit = at >= first[half] && at < end ? logit : -INFINITY;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = largest[half];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        top = fmaxf(top, fmaxf(logits[i * 4 + half * 2], logits[i * 4 + half * 2 + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      // For a row that has seen no key yet any finite number works, because its weights are zero.
      const float reference = top == -INFINITY ? 0.0f : top;
      shrink[half] = power_of_two(largest[half] - reference);
      largest[half] = top;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& logit = logits[i * 4 + half * 2 + j];
          logit = power_of_two(logit - reference);
          sum += logit;
        }
      }
      total[half] = total[half] * shrink[half] + sum;
    }
  };
  // Not before the products that read the last weights have ended: otherwise the compiler waits for them here.
  const auto pack_weights = [&](const float(&logits)[32]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      weights[i] = pack<T>(logits[2 * i], logits[2 * i + 1]);
    }
  };

  // The merge may take its place on the multiprocessors as this kernel leaves them. Without one the next kernel would.
  if (p.splits > 1) {
    cudaTriggerProgrammaticLaunchCompletion();
  }
  if (tiles > 0) {
    float logits[32];
    start_logits(0, logits);
    hopper::wgmma_wait<0>();
    hopper::wgmma_hold(logits);
    hopper::named_sync(own, kGroupThreads);
    if (tiles > 1) {
      copy_keys.start(warp, lane, next_place);
    }
    exchange_logits(0, logits);
    weigh(0, logits);
    pack_weights(logits);
  }
  // The last tile comes after the loop, so that in the loop the compiler sees every product from its start to its end.
  for (int tile = 0; tile + 1 < tiles; ++tile) {
    place = next_place;
    next_place = place_of(tile + 2);
    float logits[32];
    start_logits(tile + 1, logits);
    hopper::wgmma_wait<0>();
    hopper::wgmma_hold(logits);
    hopper::named_sync(own, kGroupThreads);
    if (tile + 2 < tiles) {
      copy_keys.start(warp, lane, next_place);
    }
    exchange_logits(tile + 1, logits);
    // Only now: these values were asked for when the last products with values had ended, and the logits since then
    // have covered their way.
    hopper::barrier_wait(&shared.values_full[warpgroup], tile & 1);
    start_sums();
    weigh(tile + 1, logits);
    finish_sums();
    hopper::named_sync(own, kGroupThreads);
    copy_values.start(warp, lane, place);
    pack_weights(logits);
    // Once the largest logits have been seen, nothing shrinks any more. Missing rows may hold anything.
    if (__any_sync(kAllLanes, (row < rows && shrink[0] != 1.0f) || (row + 8 < rows && shrink[1] != 1.0f))) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          sums[chunk][i] *= shrink[i / 2 % 2];
        }
      }
    }
  }
  if (tiles > 0) {
    hopper::barrier_wait(&shared.values_full[warpgroup], (tiles - 1) & 1);
    // Behind a request's last token the cache may hold NaN, and NaN times a weight of zero is NaN. Whole sub-tiles
    // behind it were not copied.
    const int valid = keys.end - (keys.begin + (tiles - 1) * kKeys);
    const int upto = min((valid + kSubTile - 1) / kSubTile * kSubTile, kKeys);
    for (int i = thread; i < (upto - valid) * kChunks * 8; i += kGroupThreads) {
      const int key = valid + i / (kChunks * 8), piece = i % (kChunks * 8);
      *reinterpret_cast<uint4*>(shared.values[warpgroup] + piece / 8 * kChunkBytes + key * 128 + piece % 8 * 16) =
          make_uint4(0, 0, 0, 0);
    }
    hopper::fence_async();
    hopper::named_sync(own, kGroupThreads);
    start_sums();
    finish_sums();
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] += __shfl_xor_sync(kAllLanes, total[half], 1);
    total[half] += __shfl_xor_sync(kAllLanes, total[half], 2);
    const float factor = total[half] == 0.0f ? 0.0f : 1.0f / total[half];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        sums[chunk][i + 2 * half] *= factor;
        sums[chunk][i + 2 * half + 1] *= factor;
      }
    }
  }
  const Rows mine{warpgroup, lane, row, rows};
  if (splits > 1) {
    // Both buffers are free once the whole warpgroup's last products have ended.
    hopper::named_sync(own, kGroupThreads);
    float* buffers[2] = {
        reinterpret_cast<float*>(shared.keys[warpgroup]), reinterpret_cast<float*>(shared.values[warpgroup])};
    const Partials partials(p, block, kv_head, 2 * kChunks * kChunk);
    if (write_partial(p, partials, split, mine, sums, buffers)) {
      hopper::fence_async();
      hopper::named_sync(own, kGroupThreads);
      if (thread == 0) {
        store_partial<kChunks>(p, partials, split, warpgroup, buffers);
      }
    }
    if (warpgroup == 0 && lane % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row + 8 * half < rows) {
          p.partial_lse[partials.lse(split, row + 8 * half)] = largest[half] + log2f(total[half]);
        }
      }
    }
  } else {
    write_result<T>(p, block, kv_head, mine, sums);
  }
#endif
}

}  // namespace paged
