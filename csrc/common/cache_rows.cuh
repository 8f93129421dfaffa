// SPDX-License-Identifier: Apache-2.0
// Rows of paged caches: the bytes that one token has in one layer, wherever a layout puts them.
//
// A table on the device has a line of 64-bit integers for each layer, which vllm_hwplugin/nwor/rows.py makes:
//   base, slot_mapping   addresses: of the cache, and of an int64 slot for each token of the batch
//   block_size           tokens of a block
//   block, token         bytes from one block to the next, and from one token of a block to the next
//   outer, outer_stride, inner, inner_stride, run
//                        a row is outer x inner runs of contiguous bytes; none at all in a line that has only slots
//   log_offset           where the row lies among the bytes that are kept of one token

#pragma once

#include <cstdint>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "common/arguments.h"

namespace {

constexpr int64_t kColumns = 11;
constexpr int kThreads = 128;
// Blocks of a launch, about: enough for every GPU of today, and few enough that those without a row cost next to nothing.
constexpr int64_t kBlocks = 4096;

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
        log_offset(line[10]) {}

  __device__ uint8_t* of(int64_t slot) const { return base + slot / block_size * block + slot % block_size * token; }

  // Calls visit(address in the cache, offset in the row) for each word of a row, by all threads of a block.
  template <typename Word, typename Visit>
  __device__ void each_word(int64_t slot, const Visit& visit) const {
    uint8_t* row = of(slot);
    const int words = run / static_cast<int>(sizeof(Word));
    const int total = outer * inner * words;
    for (int i = static_cast<int>(threadIdx.x); i < total; i += kThreads) {
      const int word = i % words;
      const int at = i / words;
      uint8_t* address = row + at / inner * outer_stride + at % inner * inner_stride;
      visit(reinterpret_cast<Word*>(address) + word, static_cast<int64_t>(i) * static_cast<int64_t>(sizeof(Word)));
    }
  }
};

// The last `drafts` tokens of each request may be drafts, its first never is: row `request * drafts + j` is its token
// `drafts - j` from the end. -1 where the request has no such token.
__device__ inline int64_t token_of_row(const int32_t* query_start_loc, int row, int drafts) {
  const int request = row / drafts;
  const int64_t token = static_cast<int64_t>(query_start_loc[request + 1]) - drafts + row % drafts;
  return token > query_start_loc[request] ? token : -1;
}

// How many layers a block of threads serves, one after the other.
inline int layers_per_block(int64_t rows, int64_t layers) {
  const int64_t per_block = rows * layers / kBlocks + 1;
  return static_cast<int>(per_block < layers ? per_block : layers);
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
