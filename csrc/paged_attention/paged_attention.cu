// SPDX-License-Identifier: Apache-2.0
// Attention over a paged KV cache for large heads on Hopper, with its keys split over several programs where the batch
// alone would not fill the device.
//
// A program has 64 rows, each a token and one of the query heads that share a KV head, and walks over tiles of 64 keys.
// The sums of 64 rows of 512 are half of a multiprocessor's registers, so two warpgroups divide the *head* between them:
// each has its half of the columns of queries, keys, values and sums, copies its own tiles, and waits for nobody but
// itself. Only the logits are sums over both halves; the two exchange theirs through shared memory and then compute the
// same weights. (FlashMLA, which has 64 rows of 512 as well, divides keys and values instead and exchanges weights.)
//
// The online softmax and the split over the keys are those of FlashAttention 2 and Flash-Decoding. While the products
// with the values of a tile run, the weights of the next one are made, as in FlashAttention 3.
//
// The copy engine takes the keys from wherever the cache has them, by strides: 16 tokens of one page and 64 columns at a
// time, so that any page of a multiple of 16 tokens will do.

#include <algorithm>
#include <cstdint>
#include <optional>

#include <cuda_runtime.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "hopper.cuh"

// Defined by CUDA builds of PyTorch alone. As a weak symbol it lets the library load, and refuse, beside a CPU build.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream) __attribute__((weak));

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kRows = 64;
constexpr int kKeys = 64;
constexpr int kSubTile = 16;       // tokens that one copy takes: the smallest page
constexpr int kChunk = 64;         // columns in a row of 128 bytes
constexpr int kChunkBytes = kKeys * kChunk * 2;
constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kThreads = 2 * kGroupThreads;
constexpr int kMinTiles = 1;        // of a split
constexpr int kMaxSplits = 128;
constexpr float kLog2e = 1.4426950408889634f;

// Hardware barriers; the warpgroups' own are kOwn and kOwn + 1, and so on.
constexpr int kOwn = 1;
constexpr int kExchanged = 3;
constexpr int kTaken = 4;

struct Problem {
  const void* query;
  void* out;
  float* partial_out;
  float* partial_lse;
  const float* sinks;
  const int* query_start_loc;
  const int* seq_lens;
  const int* block_table;
  int64_t query_token, query_head, out_token, out_head, table;  // strides in elements
  int requests, blocks_per_request;                              // 0: requests have different numbers of blocks
  int kv_heads, group, head_size, page, num_blocks;
  int splits;
  int block_tokens;  // tokens of a block of queries: kRows / group
  int most_tokens;   // that any block has
  int window_left, window_right;
  float scale, softcap;  // in units of log2(e)
  float one_over_group;
  bool causal;
};

// A block of queries. No tokens: nothing to do.
struct Block {
  int index, request, token, tokens, position;
};

__device__ Block block_of(const Problem& p) {
  Block block;
  // The last blocks of a causal prefill see the most keys: they start first, so that no long one is left at the end.
  block.index = gridDim.x - 1 - blockIdx.x;
  int skipped;
  if (p.blocks_per_request > 0) {
    block.request = block.index / p.blocks_per_request;
    skipped = block.index % p.blocks_per_request * p.block_tokens;
  } else {
    // Request r has the blocks from query_start_loc[r] / block_tokens + r on: as many as it needs or one more, and
    // known without a sum over the requests before it.
    int low = 0, high = p.requests - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (p.query_start_loc[middle] / p.block_tokens + middle <= block.index) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    block.request = low;
    skipped = (block.index - (p.query_start_loc[low] / p.block_tokens + low)) * p.block_tokens;
  }
  const int start = p.query_start_loc[block.request];
  const int count = p.query_start_loc[block.request + 1] - start;
  block.token = start + skipped;
  block.tokens = min(count - skipped, p.block_tokens);
  block.position = p.seq_lens[block.request] - count + skipped;
  return block;
}

// The keys that a split reads, and how many splits have any. `begin` is a multiple of a tile whatever the batch is, so a
// row's rounding does not depend on what runs beside it.
struct Keys {
  int begin, end, used;
};

__device__ Keys keys_of(const Problem& p, const Block& block, int split) {
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
  const int tiles = (max(end - begin, 0) + kKeys - 1) / kKeys;
  const int tiles_per_split = max((tiles + p.splits - 1) / p.splits, kMinTiles);
  begin += split * tiles_per_split * kKeys;
  return {begin, min(end, begin + tiles_per_split * kKeys), (tiles + tiles_per_split - 1) / tiles_per_split};
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

// Where in the cache a sub-tile lies. One that is behind the keys has block `num_blocks`, which copies as zeros.
struct Place {
  int block, token;
};

// The half of a tile's columns that a warpgroup has. Each of its warps copies one sub-tile: a copy takes operands that
// are the same for a whole warp, so 16 copies by one warp would keep the other three waiting.
template <int kChunks>
struct Copier {
  const CUtensorMap* map;
  uint64_t* full;
  uint8_t* to;
  int column, kv_head;

  __device__ __forceinline__ void start(int warp, int lane, Place place) const {
    if (lane != 0) {
      return;
    }
    // Bytes may arrive before they are expected: the barrier waits for this arrival as well.
    if (warp == 0) {
      hopper::barrier_expect(full, kChunks * kChunkBytes);
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      hopper::tma_load(
          to + chunk * kChunkBytes + warp * (kSubTile * kChunk * 2), map, full, column + chunk * kChunk, place.token,
          kv_head, place.block);
    }
  }
};

template <typename T, int kChunks>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(
    const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap value_map, const Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Not aligned by hand: the compiler would lose sight of where it lies, and address it as any memory.
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<Shared<kChunks>*>(raw);
  if (hopper::shared_address(raw) % 1024 != 0) {
    __trap();
  }

  const Block block = block_of(p);
  if (block.tokens <= 0) {
    return;
  }
  const int kv_head = blockIdx.y, split = blockIdx.z;
  const Keys keys = keys_of(p, block, split);
  if (split >= max(keys.used, 1)) {
    return;
  }
  const int tiles = max((keys.end - keys.begin + kKeys - 1) / kKeys, 0);
  // The shuffle tells the compiler that they are the same for a whole warp, which descriptors have to be.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kGroupThreads, 0);
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32;
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  const int own = kOwn + warpgroup;

  if (threadIdx.x == 0) {
    hopper::barrier_init(&shared.keys_full[0]);
    hopper::barrier_init(&shared.keys_full[1]);
    hopper::barrier_init(&shared.values_full[0]);
    hopper::barrier_init(&shared.values_full[1]);
    hopper::fence_barrier_init();
    hopper::tma_prefetch(&key_map);
    hopper::tma_prefetch(&value_map);
  }
  __syncthreads();

  const int column = warpgroup * kChunks * kChunk;
  const Copier<kChunks> copy_keys{&key_map, &shared.keys_full[warpgroup], shared.keys[warpgroup], column, kv_head};
  const Copier<kChunks> copy_values{&value_map, &shared.values_full[warpgroup], shared.values[warpgroup], column, kv_head};
  const int* table = p.block_table + block.request * p.table;
  // Of this warp's sub-tile of a tile.
  const auto place_of = [&](int tile) {
    const int token = keys.begin + tile * kKeys + warp * kSubTile;
    const int index = token / p.page;
    return Place{token < keys.end ? table[index] : p.num_blocks, token - index * p.page};
  };
  Place place = place_of(0), next_place = place_of(1);
  if (tiles > 0) {
    copy_keys.start(warp, lane, place);
    copy_values.start(warp, lane, place);
  }

  // Queries, into the places where TMA would put them: rows of 128 bytes, 16-byte pieces swizzled by the row.
  const T* query = static_cast<const T*>(p.query);
  constexpr int kPieces = kChunks * 8;  // of a row
  constexpr int kAtOnce = 8;            // on their way before the first is needed
  for (int first = thread; first < kRows * kPieces; first += kAtOnce * kGroupThreads) {
    uint4 data[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + i * kGroupThreads, row = at / kPieces;
      const int token = token_of_row(p, row), column = (warpgroup * kPieces + at % kPieces) * 8;
      data[i] = make_uint4(0, 0, 0, 0);
      if (at < kRows * kPieces && token < block.tokens && column < p.head_size) {
        const int head = kv_head * p.group + row - token * p.group;
        data[i] = *reinterpret_cast<const uint4*>(
            query + (block.token + token) * p.query_token + head * p.query_head + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + i * kGroupThreads, row = at / kPieces, piece = at % kPieces;
      if (at < kRows * kPieces) {
        *reinterpret_cast<uint4*>(
            shared.query[warpgroup] + piece / 8 * kChunkBytes + row * 128 + ((piece % 8) ^ (row % 8)) * 16) = data[i];
      }
    }
  }
  hopper::fence_async();
  hopper::named_sync(own, kGroupThreads);

  // In an accumulator of 64 x 64 this thread has rows `row` and `row + 8`, of each eight columns two (PTX ISA, wgmma).
  const int row = warp * 16 + lane / 4;
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
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
      // A row that has seen no key yet: any finite number does, its weights are zero.
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
  // Not before the products that read the last weights have ended: the compiler would wait for them at once.
  const auto pack_weights = [&](const float(&logits)[32]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      weights[i] = pack<T>(logits[2 * i], logits[2 * i + 1]);
    }
  };

  // The merge may take its place on the multiprocessors as this kernel leaves them.
  cudaTriggerProgrammaticLaunchCompletion();
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
    // Only now: these values were asked for when the last products with values had ended, and the logits since then have
    // covered their way.
    hopper::barrier_wait(&shared.values_full[warpgroup], tile & 1);
    start_sums();
    weigh(tile + 1, logits);
    finish_sums();
    hopper::named_sync(own, kGroupThreads);
    copy_values.start(warp, lane, place);
    pack_weights(logits);
    // Once the largest logits have been seen, nothing shrinks any more.
    if (__any_sync(0xffffffff, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
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
    // Behind a request's last token the cache may hold anything, also what is not a number, which a weight of zero does
    // not undo. Whole sub-tiles behind it were not copied.
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
    total[half] += __shfl_xor_sync(0xffffffff, total[half], 1);
    total[half] += __shfl_xor_sync(0xffffffff, total[half], 2);
    const int at = row + 8 * half, token = token_of_row(p, at);
    if (token >= block.tokens) {
      continue;
    }
    const float factor = total[half] == 0.0f ? 0.0f : 1.0f / total[half];
    const int column = warpgroup * kChunks * kChunk + lane % 4 * 2;
    if (keys.used > 1) {
      const int64_t slot =
          ((static_cast<int64_t>(block.index) * p.kv_heads + kv_head) * p.splits + split) * kRows + at;
      float* to = p.partial_out + slot * p.head_size;
#pragma unroll
      for (int i = 0; i < kChunks * 8; ++i) {
        if (column + i * 8 < p.head_size) {
          *reinterpret_cast<float2*>(to + column + i * 8) = make_float2(
              sums[i / 8][i % 8 * 4 + half * 2] * factor, sums[i / 8][i % 8 * 4 + half * 2 + 1] * factor);
        }
      }
      if (warpgroup == 0 && lane % 4 == 0) {
        p.partial_lse[slot] = largest[half] + log2f(total[half]);
      }
    } else {
      T* to = static_cast<T*>(p.out) + (block.token + token) * p.out_token +
              (kv_head * p.group + at - token * p.group) * p.out_head;
#pragma unroll
      for (int i = 0; i < kChunks * 8; ++i) {
        if (column + i * 8 < p.head_size) {
          *reinterpret_cast<uint32_t*>(to + column + i * 8) = pack<T>(
              sums[i / 8][i % 8 * 4 + half * 2] * factor, sums[i / 8][i % 8 * 4 + half * 2 + 1] * factor);
        }
      }
    }
  }
#endif
}

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

// Starts while the attention kernel ends, and waits for it where it needs its results.
template <typename T>
void launch_merge(const Problem& p, dim3 grid, cudaStream_t stream) {
  int warps = 1;
  while (warps * kMergeLoads < p.splits) {
    warps *= 2;
  }
  const int slices = (p.head_size + kMergeColumns - 1) / kMergeColumns;
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.x, grid.y, static_cast<unsigned>(p.most_tokens * p.group * slices));
  config.blockDim = dim3(static_cast<unsigned>(warps * 32));
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, merge_kernel<T>, p);
  STD_TORCH_CHECK(error == cudaSuccess, "paged_attention: the merge did not start: ", cudaGetErrorString(error));
}

using EncodeTiled = CUresult (*)(
    CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
    const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, without linking against the driver: the library has to load where there is none.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    STD_TORCH_CHECK(
        error == cudaSuccess && result == cudaDriverEntryPointSuccess && found != nullptr,
        "paged_attention: the driver has no cuTensorMapEncodeTiled; it is of CUDA 12.0 or later");
    return reinterpret_cast<EncodeTiled>(found);
  }();
  return function;
}

// A cache as the copy engine sees it: columns, tokens of a page, heads, pages.
CUtensorMap map_of(const Tensor& cache, const char* name) {
  const int64_t blocks = cache.size(0), page = cache.size(1), heads = cache.size(2), head_size = cache.size(3);
  // The stride of a dimension of one element means nothing and may be anything; this is one that the driver takes.
  const auto bytes = [&](int dim) {
    return static_cast<cuuint64_t>(cache.size(dim) == 1 ? head_size * 2 : cache.stride(dim) * 2);
  };
  const cuuint64_t sizes[4] = {
      static_cast<cuuint64_t>(head_size), static_cast<cuuint64_t>(page), static_cast<cuuint64_t>(heads),
      static_cast<cuuint64_t>(blocks)};
  const cuuint64_t strides[3] = {bytes(1), bytes(2), bytes(0)};
  const cuuint32_t box[4] = {kChunk, kSubTile, 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const auto type =
      cache.scalar_type() == ScalarType::Half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result = encode_tiled()(
      &map, type, 4, const_cast<void*>(cache.const_data_ptr()), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(
      result == CUDA_SUCCESS, "paged_attention: the driver refused the layout of ", name, " (error ",
      static_cast<int>(result), ")");
  return map;
}

template <typename T, int kChunks>
void launch(const Problem& p, const CUtensorMap& keys, const CUtensorMap& values, dim3 grid, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(Shared<kChunks>);
  // Once for a device would do; the call costs less than finding out.
  const cudaError_t error = cudaFuncSetAttribute(
      attention_kernel<T, kChunks>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  STD_TORCH_CHECK(
      error == cudaSuccess, "paged_attention: a program needs ", kBytes, " bytes of shared memory: ",
      cudaGetErrorString(error));
  attention_kernel<T, kChunks><<<grid, kThreads, kBytes, stream>>>(keys, values, p);
  if (p.splits > 1) {
    launch_merge<T>(p, grid, stream);
  }
}

template <typename T>
void launch_for(const Problem& p, const CUtensorMap& keys, const CUtensorMap& values, dim3 grid, cudaStream_t stream) {
  if (p.head_size <= 2 * 3 * kChunk) {
    launch<T, 3>(p, keys, values, grid, stream);
  } else {
    launch<T, 4>(p, keys, values, grid, stream);
  }
}

void check_half(const Tensor& tensor, const char* name, const Tensor& query, int dims) {
  STD_TORCH_CHECK(
      tensor.is_cuda() && tensor.get_device_index() == query.get_device_index(), "paged_attention: ", name,
      " is not on query's device");
  STD_TORCH_CHECK(
      tensor.scalar_type() == query.scalar_type(), "paged_attention: ", name, " is ",
      torch::headeronly::toString(tensor.scalar_type()), "; expected query's type, ",
      torch::headeronly::toString(query.scalar_type()));
  STD_TORCH_CHECK(tensor.dim() == dims, "paged_attention: ", name, " has ", tensor.dim(), " dimensions; expected ", dims);
  STD_TORCH_CHECK(
      tensor.stride(dims - 1) == 1, "paged_attention: ", name, " has stride ", tensor.stride(dims - 1),
      " in its last dimension; expected 1");
  for (int dim = 0; dim < dims - 1; ++dim) {
    STD_TORCH_CHECK(
        tensor.size(dim) <= 1 || (tensor.stride(dim) > 0 && tensor.stride(dim) % 8 == 0), "paged_attention: ", name,
        " has stride ", tensor.stride(dim), " in dimension ", dim, "; expected a multiple of 8");
  }
  STD_TORCH_CHECK(
      reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0, "paged_attention: ", name,
      " does not start at a multiple of 16 bytes");
}

void check_ints(const Tensor& tensor, const char* name, const Tensor& query, int dims) {
  STD_TORCH_CHECK(
      tensor.is_cuda() && tensor.get_device_index() == query.get_device_index() &&
          tensor.scalar_type() == ScalarType::Int && tensor.dim() == dims &&
          (tensor.numel() <= 1 || tensor.stride(dims - 1) == 1),
      "paged_attention: ", name, " has to be int32 on query's device, of ", dims, " dimensions, the last with stride 1");
}

void check_floats(const Tensor& tensor, const char* name, const Tensor& query, int64_t count) {
  STD_TORCH_CHECK(
      tensor.is_cuda() && tensor.get_device_index() == query.get_device_index() &&
          tensor.scalar_type() == ScalarType::Float && tensor.is_contiguous() && tensor.numel() >= count,
      "paged_attention: ", name, " has to be float32 on query's device, contiguous, of ", count, " elements or more");
}

void paged_attention(
    Tensor query, Tensor keys, Tensor values, Tensor out, Tensor partial_out, Tensor partial_lse,
    std::optional<Tensor> sinks, Tensor query_start_loc, Tensor seq_lens, Tensor block_table, double scale, bool causal,
    int64_t window_left, int64_t window_right, double softcap, int64_t max_query_len, int64_t blocks,
    int64_t blocks_per_request, int64_t splits) {
  STD_TORCH_CHECK(query.is_cuda(), "paged_attention: query is not on a CUDA device");
  check_half(query, "query", query, 3);
  check_half(out, "out", query, 3);
  check_half(keys, "keys", query, 4);
  check_half(values, "values", query, 4);
  check_ints(query_start_loc, "query_start_loc", query, 1);
  check_ints(seq_lens, "seq_lens", query, 1);
  check_ints(block_table, "block_table", query, 2);
  const int64_t head_size = query.size(2), kv_heads = keys.size(2), page = keys.size(1), requests = seq_lens.size(0);
  STD_TORCH_CHECK(
      head_size % 8 == 0 && head_size > 0 && head_size <= 512, "paged_attention: head size is ", head_size,
      "; expected a multiple of 8 up to 512");
  STD_TORCH_CHECK(
      page % kSubTile == 0 && page > 0, "paged_attention: a page has ", page, " tokens; expected a multiple of ", kSubTile);
  STD_TORCH_CHECK(
      kv_heads > 0 && query.size(1) % kv_heads == 0 && query.size(1) / kv_heads <= kRows, "paged_attention: ",
      query.size(1), " query heads and ", kv_heads, " KV heads; expected a multiple of up to ", kRows, " times");
  for (int dim = 0; dim < 4; ++dim) {
    STD_TORCH_CHECK(keys.size(dim) == values.size(dim), "paged_attention: keys and values differ in dimension ", dim);
  }
  STD_TORCH_CHECK(keys.size(3) == head_size, "paged_attention: keys have head size ", keys.size(3), ", query ", head_size);
  for (int dim = 0; dim < 3; ++dim) {
    STD_TORCH_CHECK(query.size(dim) == out.size(dim), "paged_attention: query and out differ in dimension ", dim);
  }
  STD_TORCH_CHECK(
      query_start_loc.size(0) == requests + 1 && block_table.size(0) >= requests,
      "paged_attention: query_start_loc and block_table do not go with ", requests, " requests");
  STD_TORCH_CHECK(
      splits >= 1 && splits <= kMaxSplits && blocks >= 0 && blocks_per_request >= 0,
      "paged_attention: a plan that cannot be launched");
  const int64_t group = query.size(1) / kv_heads;
  if (splits > 1) {
    check_floats(partial_out, "partial_out", query, blocks * kv_heads * splits * kRows * head_size);
    check_floats(partial_lse, "partial_lse", query, blocks * kv_heads * splits * kRows);
  }
  if (sinks.has_value()) {
    check_floats(*sinks, "sinks", query, query.size(1));
  }
  if (blocks == 0 || requests == 0 || query.size(0) == 0 || max_query_len <= 0) {
    return;
  }
  STD_TORCH_CHECK(
      aoti_torch_get_current_cuda_stream != nullptr, "paged_attention: this PyTorch was built without CUDA");
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(query.get_device_index(), &stream));

  Problem p;
  p.query = query.const_data_ptr();
  p.out = out.mutable_data_ptr();
  p.partial_out = static_cast<float*>(partial_out.mutable_data_ptr());
  p.partial_lse = static_cast<float*>(partial_lse.mutable_data_ptr());
  p.sinks = sinks.has_value() ? static_cast<const float*>(sinks->const_data_ptr()) : nullptr;
  p.query_start_loc = static_cast<const int*>(query_start_loc.const_data_ptr());
  p.seq_lens = static_cast<const int*>(seq_lens.const_data_ptr());
  p.block_table = static_cast<const int*>(block_table.const_data_ptr());
  p.query_token = query.stride(0);
  p.query_head = query.stride(1);
  p.out_token = out.stride(0);
  p.out_head = out.stride(1);
  p.table = block_table.stride(0);
  p.requests = static_cast<int>(requests);
  p.blocks_per_request = static_cast<int>(blocks_per_request);
  p.kv_heads = static_cast<int>(kv_heads);
  p.group = static_cast<int>(group);
  p.head_size = static_cast<int>(head_size);
  p.page = static_cast<int>(page);
  p.num_blocks = static_cast<int>(keys.size(0));
  p.splits = static_cast<int>(splits);
  p.block_tokens = static_cast<int>(kRows / group);
  p.most_tokens = static_cast<int>(std::min(kRows / group, max_query_len));
  p.one_over_group = 1.0f / static_cast<float>(group);
  p.window_left = static_cast<int>(window_left);
  p.window_right = static_cast<int>(window_right);
  p.scale = static_cast<float>(scale) * kLog2e;
  p.softcap = static_cast<float>(softcap) * kLog2e;
  p.causal = causal;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(kv_heads), static_cast<unsigned>(splits));
  const CUtensorMap key_map = map_of(keys, "keys"), value_map = map_of(values, "values");
  const auto current = static_cast<cudaStream_t>(stream);
  switch (query.scalar_type()) {
    case ScalarType::Half:
      launch_for<__half>(p, key_map, value_map, grid, current);
      break;
    case ScalarType::BFloat16:
      launch_for<__nv_bfloat16>(p, key_map, value_map, grid, current);
      break;
    default:
      STD_TORCH_CHECK(
          false, "paged_attention: query is ", torch::headeronly::toString(query.scalar_type()),
          "; expected Half or BFloat16");
  }
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "paged_attention: the kernel did not start: ", cudaGetErrorString(error));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hwplugin, CUDA, library) { library.impl("paged_attention", TORCH_BOX(&paged_attention)); }
