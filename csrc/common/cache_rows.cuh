// SPDX-License-Identifier: Apache-2.0
// Rows of paged caches: the bytes of one token in one layer, in any layout.
//
// vllm_hwplugin/nwor/rows.py makes a table on the device, with a line of 64-bit integers for each layer:
//   base, slot_mapping   addresses: of the cache, and of an int64 slot for each token of the batch
//   block_size           tokens of a block
//   block, token         bytes from one block to the next, and from one token of a block to the next
//   outer, outer_stride, inner, inner_stride, run
//                        a row is outer x inner runs of contiguous bytes; no runs in a line that only has slots
//   log_offset           offset of the row in the saved bytes of one token
//   num_slots            slots of the cache: no others may be read or written

#pragma once

#include <cstdint>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "common/arguments.h"
#include "common/warp.cuh"

namespace {

constexpr int64_t kColumns = 12;
// A warp has one row of one layer, and a block as many layers as warps: so a launch is a short chain of dependent loads
// for any number of layers.
constexpr int kWarps = 4;
// Words that a lane loads at the same time, to wait once for the memory's latency. A warp's words of 16 bytes are 4
// KiB:
// keys and values of eight heads of 128 in bfloat16.
constexpr int kUnderWay = 8;

struct CacheRow {
  uint8_t* base;
  int64_t* slot_mapping;
  int64_t block_size;
  int64_t block;
  int64_t token;
  int outer;
  int64_t outer_stride;
  int inner;
  int64_t inner_stride;
  int run;
  int64_t log_offset;
  int64_t num_slots;

  __device__ explicit CacheRow(const int64_t* line)
      : base(reinterpret_cast<uint8_t*>(line[0])),
        slot_mapping(reinterpret_cast<int64_t*>(line[1])),
        block_size(line[2]),
        block(line[3]),
        token(line[4]),
        outer(static_cast<int>(line[5])),
        outer_stride(line[6]),
        inner(static_cast<int>(line[7])),
        inner_stride(line[8]),
        run(static_cast<int>(line[9])),
        log_offset(line[10]),
        num_slots(line[11]) {}

  // -1 for a token without a slot. A dummy batch, which vLLM runs while other ranks have work, maps only its own
  // tokens:
  // other entries of the mapping are of an earlier batch, or arbitrary after a sleep.
  __device__ int64_t slot_of(int64_t token) const {
    const int64_t slot = token < 0 ? -1 : slot_mapping[token];
    return slot < num_slots ? slot : -1;
  }

  __device__ uint8_t* of(int64_t slot) const { return base + slot / block_size * block + slot % block_size * token; }

  // Calls load(address in the cache, offset in the row) for each word of a row and store(address, offset, word) with
  // the result, by the lanes of a warp.
  template <typename Word, typename Load, typename Store>
  __device__ void each_word(int64_t slot, int lane, const Load& load, const Store& store) const {
    constexpr int kBytes = static_cast<int>(sizeof(Word));
    uint8_t* row = of(slot);
    const int words = run / kBytes;
    const int total = outer * inner * words;
    const auto address = [this, row, words](int i) {
      const int at = i / words;
      uint8_t* begin = row + at / inner * outer_stride + at % inner * inner_stride;
      return reinterpret_cast<Word*>(begin) + i % words;
    };
    for (int first = lane; first < total; first += kWarp * kUnderWay) {
      Word held[kUnderWay];
#pragma unroll
      for (int j = 0; j < kUnderWay; ++j) {
        if (const int i = first + j * kWarp; i < total) {
          held[j] = load(address(i), static_cast<int64_t>(i) * kBytes);
        }
      }
#pragma unroll
      for (int j = 0; j < kUnderWay; ++j) {
        if (const int i = first + j * kWarp; i < total) {
          store(address(i), static_cast<int64_t>(i) * kBytes, held[j]);
        }
      }
    }
  }
};

// The last `drafts` tokens of each request may be drafts, its first token never is: row `request * drafts + j` is its
// token `drafts - j` from the end; -1 if the request has no such token.
__device__ inline int64_t token_of_row(const int32_t* query_start_loc, int row, int drafts) {
  const int request = row / drafts;
  const int64_t token = static_cast<int64_t>(query_start_loc[request + 1]) - drafts + row % drafts;
  return token > query_start_loc[request] ? token : -1;
}

// The grid of a launch with a warp for each row and layer.
inline dim3 grid_of(int64_t rows, int64_t layers) {
  return {static_cast<unsigned>(rows), static_cast<unsigned>((layers + kWarps - 1) / kWarps)};
}

inline void check_table(const Checks& checks, const char* op, const torch::stable::Tensor& table, int64_t word) {
  using torch::headeronly::ScalarType;
  checks.check_type(table, "table", ScalarType::Long);
  STD_TORCH_CHECK(
      table.dim() == 2 && table.size(1) == kColumns && table.is_contiguous(), op, ": table has ", table.dim(),
      " dimensions; expected a contiguous [layers, ", kColumns, "]");
  STD_TORCH_CHECK(word == 16 || word == 4 || word == 1, op, ": word is ", word, "; expected 16, 4 or 1 bytes");
}

inline void check_rows(
    const Checks& checks, const char* op, const torch::stable::Tensor& log, const torch::stable::Tensor& slots,
    const torch::stable::Tensor& table, int64_t rows) {
  using torch::headeronly::ScalarType;
  checks.check_device(log, "log");
  checks.check_type(log, "log", ScalarType::Byte);
  checks.check_device(slots, "slots");
  checks.check_type(slots, "slots", ScalarType::Long);
  STD_TORCH_CHECK(
      log.dim() == 2 && log.is_contiguous() && slots.dim() == 2 && slots.is_contiguous() &&
          slots.size(0) == table.size(0) && slots.size(1) == log.size(0),
      op, ": log and slots do not go together; expected contiguous [rows, bytes] and [layers, rows]");
  STD_TORCH_CHECK(
      rows <= log.size(0), op, ": ", rows, " rows are asked for and log has ", log.size(0),
      "; expected at most as many");
}

inline void check_query_start_loc(
    const Checks& checks, const char* op, const torch::stable::Tensor& query_start_loc, int64_t num_reqs,
    int64_t drafts) {
  using torch::headeronly::ScalarType;
  checks.check_device(query_start_loc, "query_start_loc");
  checks.check_type(query_start_loc, "query_start_loc", ScalarType::Int);
  STD_TORCH_CHECK(
      query_start_loc.dim() == 1 && query_start_loc.is_contiguous() && query_start_loc.size(0) > num_reqs, op,
      ": query_start_loc has ", query_start_loc.numel(), " elements; expected at least ", num_reqs + 1,
      ", contiguous");
  STD_TORCH_CHECK(drafts > 0, op, ": drafts is ", drafts, "; expected at least 1");
}

}  // namespace
