// SPDX-License-Identifier: Apache-2.0
// Saves the bytes of the KV caches that a step's draft tokens will overwrite.
//
// One launch for all layers. The slot is saved with the bytes, so that the restore depends on nothing that the rest of
// the step may overwrite.
//
// Only the stable ABI of PyTorch is used; see csrc/README.md.

#include <cstdint>

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "common/arguments.h"
#include "common/cache_rows.cuh"
#include "common/stream.h"

namespace {

using torch::stable::Tensor;

struct Call {
  const int64_t* table;
  int layers;
  uint8_t* log;
  int64_t pitch;
  int64_t* slots;
  int64_t max_rows;
  const int32_t* query_start_loc;
  int drafts;
};

template <typename Word>
__global__ void __launch_bounds__(kWarp * kWarps) log_draft_rows_kernel(const Call call) {
  const int row = static_cast<int>(blockIdx.x);
  const int layer = static_cast<int>(blockIdx.y * kWarps + threadIdx.y);
  if (layer >= call.layers) {
    return;
  }
  const int lane = static_cast<int>(threadIdx.x);
  const CacheRow cache(call.table + static_cast<int64_t>(layer) * kColumns);
  const int64_t slot = cache.slot_of(token_of_row(call.query_start_loc, row, call.drafts));
  if (lane == 0) {
    call.slots[layer * call.max_rows + row] = slot;
  }
  if (slot >= 0) {
    uint8_t* kept = call.log + row * call.pitch + cache.log_offset;
    cache.template each_word<Word>(
        slot, lane, [](const Word* word, int64_t) { return *word; },
        [=](const Word*, int64_t offset, const Word& word) { *reinterpret_cast<Word*>(kept + offset) = word; });
  }
}

void log_draft_rows(
    Tensor table, Tensor log, Tensor slots, Tensor query_start_loc, int64_t num_reqs, int64_t drafts, int64_t word) {
  const Checks checks("log_draft_rows", "table", table);
  check_table(checks, "log_draft_rows", table, word);
  check_query_start_loc(checks, "log_draft_rows", query_start_loc, num_reqs, drafts);
  const int64_t rows = num_reqs * drafts;
  check_rows(checks, "log_draft_rows", log, slots, table, rows);
  if (rows == 0 || table.size(0) == 0) {
    return;
  }
  Call call;
  call.table = static_cast<const int64_t*>(table.const_data_ptr());
  call.layers = static_cast<int>(table.size(0));
  call.log = static_cast<uint8_t*>(log.mutable_data_ptr());
  call.pitch = log.size(1);
  call.slots = static_cast<int64_t*>(slots.mutable_data_ptr());
  call.max_rows = log.size(0);
  call.query_start_loc = static_cast<const int32_t*>(query_start_loc.const_data_ptr());
  call.drafts = static_cast<int>(drafts);
  const dim3 grid = grid_of(rows, table.size(0));
  const dim3 block(kWarp, kWarps);
  const torch::stable::accelerator::DeviceGuard guard(table.get_device_index());
  const cudaStream_t stream = current_stream("log_draft_rows", table.get_device_index());
  if (word == 16) {
    log_draft_rows_kernel<uint4><<<grid, block, 0, stream>>>(call);
  } else if (word == 4) {
    log_draft_rows_kernel<uint32_t><<<grid, block, 0, stream>>>(call);
  } else {
    log_draft_rows_kernel<uint8_t><<<grid, block, 0, stream>>>(call);
  }
  check_launch("log_draft_rows");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hwplugin, CUDA, library) { library.impl("log_draft_rows", TORCH_BOX(&log_draft_rows)); }
