// SPDX-License-Identifier: Apache-2.0
// Takes rejected draft tokens out of the KV caches: restores what log_draft_rows saved, or writes zeros.
//
// One launch for all layers. The rejected rows are read from the sampler's output on the device: as a number for each
// request, or as sampled token ids, in which -1 follows the last accepted token. Their slots also become -1 in the slot
// mappings: a drafter whose first pass reads the mappings does not write the rejected tokens into its own cache.
//
// Only the stable ABI of PyTorch is used; see csrc/README.md.

#include <cstdint>
#include <optional>

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "common/arguments.h"
#include "common/cache_rows.cuh"
#include "common/stream.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kZeroWarps = 16;

struct Call {
  const int64_t* table;
  int layers;
  const uint8_t* log;  // null: zeros are written
  int64_t pitch;
  int64_t* slots;
  int64_t max_rows;
  const int32_t* query_start_loc;
  const int32_t* num_rejected;  // null: counted in sampled_token_ids
  const int32_t* sampled_token_ids;
  int64_t sampled_stride;
  int sampled;
  const int32_t* cu_num_draft_tokens;
  int drafts;
};

__device__ inline int rejected_of(const Call& call, int request) {
  if (call.num_rejected != nullptr) {
    return call.num_rejected[request];
  }
  const int before = request == 0 ? 0 : call.cu_num_draft_tokens[request - 1];
  const int verified = call.cu_num_draft_tokens[request] - before;
  int valid = 0;
  for (int i = 0; i < call.sampled; ++i) {
    valid += call.sampled_token_ids[request * call.sampled_stride + i] != -1 ? 1 : 0;
  }
  // One valid token was no draft. A request without valid tokens was not sampled, and had no drafts.
  return min(verified, verified + 1 - valid);
}

template <typename Word>
__global__ void __launch_bounds__(kWarp * kWarps) restore_draft_rows_kernel(const Call call) {
  const int row = static_cast<int>(blockIdx.x);
  const int layer = static_cast<int>(blockIdx.y * kWarps + threadIdx.y);
  const int lane = static_cast<int>(threadIdx.x);
  const bool there = layer < call.layers;
  int64_t* noted = call.slots + layer * call.max_rows + row;
  const int64_t slot = there ? *noted : -1;
  const int64_t token = token_of_row(call.query_start_loc, row, call.drafts);
  const bool rejected = call.drafts - row % call.drafts <= rejected_of(call, row / call.drafts);
  // A saved slot is used once, so a step that saved nothing writes nothing.
  __syncthreads();
  if (there && lane == 0) {
    *noted = -1;
  }
  if (rejected && slot >= 0) {
    const CacheRow cache(call.table + static_cast<int64_t>(layer) * kColumns);
    if (lane == 0 && token >= 0) {
      cache.slot_mapping[token] = -1;
    }
    const uint8_t* kept = call.log + row * call.pitch + cache.log_offset;
    cache.template each_word<Word>(
        slot, lane,
        [=](const Word*, int64_t offset) { return *reinterpret_cast<const Word*>(kept + offset); },
        [](Word* address, int64_t, const Word& word) { *address = word; });
  }
}

// A block of threads has all layers of a row: no slot may be cleared before all have read it.
template <typename Word>
__global__ void __launch_bounds__(kWarp * kZeroWarps) zero_draft_rows_kernel(const Call call) {
  const int row = static_cast<int>(blockIdx.x);
  const int64_t token = token_of_row(call.query_start_loc, row, call.drafts);
  if (token < 0 || call.drafts - row % call.drafts > rejected_of(call, row / call.drafts)) {
    return;
  }
  const int lane = static_cast<int>(threadIdx.x);
  const int warp = static_cast<int>(threadIdx.y);
  for (int layer = warp; layer < call.layers; layer += kZeroWarps) {
    const CacheRow cache(call.table + static_cast<int64_t>(layer) * kColumns);
    const int64_t slot = cache.slot_of(token);
    if (slot >= 0) {
      cache.template each_word<Word>(
          slot, lane, [](const Word*, int64_t) { return Word{}; },
          [](Word* address, int64_t, const Word& word) { *address = word; });
    }
  }
  __syncthreads();
  for (int layer = warp * kWarp + lane; layer < call.layers; layer += kWarp * kZeroWarps) {
    CacheRow(call.table + static_cast<int64_t>(layer) * kColumns).slot_mapping[token] = -1;
  }
}

template <typename Word>
void launch(const Call& call, int64_t rows, cudaStream_t stream) {
  if (call.log != nullptr) {
    restore_draft_rows_kernel<Word><<<grid_of(rows, call.layers), dim3(kWarp, kWarps), 0, stream>>>(call);
  } else {
    zero_draft_rows_kernel<Word><<<static_cast<unsigned>(rows), dim3(kWarp, kZeroWarps), 0, stream>>>(call);
  }
}

void find_counts(
    const Checks& checks, const std::optional<Tensor>& num_rejected, const std::optional<Tensor>& sampled_token_ids,
    const std::optional<Tensor>& cu_num_draft_tokens, int64_t num_reqs, Call& call) {
  if (num_rejected.has_value()) {
    checks.check_device(*num_rejected, "num_rejected");
    checks.check_type(*num_rejected, "num_rejected", ScalarType::Int);
    STD_TORCH_CHECK(
        num_rejected->dim() == 1 && num_rejected->is_contiguous() && num_rejected->size(0) >= num_reqs,
        "restore_draft_rows: num_rejected has ", num_rejected->numel(), " elements; expected ", num_reqs,
        ", contiguous");
    call.num_rejected = static_cast<const int32_t*>(num_rejected->const_data_ptr());
    return;
  }
  STD_TORCH_CHECK(
      sampled_token_ids.has_value() && cu_num_draft_tokens.has_value(),
      "restore_draft_rows: there is no num_rejected; expected sampled_token_ids and cu_num_draft_tokens then");
  checks.check_device(*sampled_token_ids, "sampled_token_ids");
  checks.check_type(*sampled_token_ids, "sampled_token_ids", ScalarType::Int);
  checks.check_device(*cu_num_draft_tokens, "cu_num_draft_tokens");
  checks.check_type(*cu_num_draft_tokens, "cu_num_draft_tokens", ScalarType::Int);
  STD_TORCH_CHECK(
      sampled_token_ids->dim() == 2 && sampled_token_ids->size(0) >= num_reqs,
      "restore_draft_rows: sampled_token_ids has ", sampled_token_ids->numel(), " elements; expected a row for each of ",
      num_reqs, " requests");
  checks.check_last_stride(*sampled_token_ids, "sampled_token_ids");
  STD_TORCH_CHECK(
      cu_num_draft_tokens->dim() == 1 && cu_num_draft_tokens->is_contiguous() &&
          cu_num_draft_tokens->size(0) >= num_reqs,
      "restore_draft_rows: cu_num_draft_tokens has ", cu_num_draft_tokens->numel(), " elements; expected ", num_reqs,
      ", contiguous");
  call.sampled_token_ids = static_cast<const int32_t*>(sampled_token_ids->const_data_ptr());
  call.sampled_stride = sampled_token_ids->stride(0);
  call.sampled = static_cast<int>(sampled_token_ids->size(1));
  call.cu_num_draft_tokens = static_cast<const int32_t*>(cu_num_draft_tokens->const_data_ptr());
}

void restore_draft_rows(
    Tensor table, std::optional<Tensor> log, std::optional<Tensor> slots, Tensor query_start_loc,
    std::optional<Tensor> num_rejected, std::optional<Tensor> sampled_token_ids,
    std::optional<Tensor> cu_num_draft_tokens, int64_t num_reqs, int64_t drafts, int64_t word) {
  const Checks checks("restore_draft_rows", "table", table);
  check_table(checks, "restore_draft_rows", table, word);
  check_query_start_loc(checks, "restore_draft_rows", query_start_loc, num_reqs, drafts);
  const int64_t rows = num_reqs * drafts;
  Call call{};
  if (log.has_value()) {
    STD_TORCH_CHECK(slots.has_value(), "restore_draft_rows: there is a log and no slots; expected both or none");
    check_rows(checks, "restore_draft_rows", *log, *slots, table, rows);
    call.log = static_cast<const uint8_t*>(log->const_data_ptr());
    call.pitch = log->size(1);
    call.slots = static_cast<int64_t*>(slots->mutable_data_ptr());
    call.max_rows = log->size(0);
  }
  find_counts(checks, num_rejected, sampled_token_ids, cu_num_draft_tokens, num_reqs, call);
  if (rows == 0 || table.size(0) == 0) {
    return;
  }
  call.table = static_cast<const int64_t*>(table.const_data_ptr());
  call.layers = static_cast<int>(table.size(0));
  call.query_start_loc = static_cast<const int32_t*>(query_start_loc.const_data_ptr());
  call.drafts = static_cast<int>(drafts);
  const torch::stable::accelerator::DeviceGuard guard(table.get_device_index());
  const cudaStream_t stream = current_stream("restore_draft_rows", table.get_device_index());
  if (word == 16) {
    launch<uint4>(call, rows, stream);
  } else if (word == 4) {
    launch<uint32_t>(call, rows, stream);
  } else {
    launch<uint8_t>(call, rows, stream);
  }
  check_launch("restore_draft_rows");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hwplugin, CUDA, library) {
  library.impl("restore_draft_rows", TORCH_BOX(&restore_draft_rows));
}
