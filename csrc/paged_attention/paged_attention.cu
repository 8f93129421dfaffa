// SPDX-License-Identifier: Apache-2.0
// The host's side of the operation: checks, descriptors of queries and cache for the copy engine, launches.

#include <algorithm>
#include <cstdint>
#include <optional>

#include <cuda.h>
#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "attention.cuh"
#include "common/arguments.h"
#include "common/stream.h"
#include "hopper/tensor_map.h"
#include "merge.cuh"
#include "problem.cuh"

namespace {

using namespace paged;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A tensor for the copy engine: its dimensions from the innermost out, and how many elements of each one copy takes.
template <int kDims>
CUtensorMap map_of(const Tensor& tensor, const char* name, const int (&dims)[kDims], const cuuint32_t (&box)[kDims]) {
  cuuint64_t sizes[kDims], strides[kDims - 1];
  for (int i = 0; i < kDims; ++i) {
    sizes[i] = static_cast<cuuint64_t>(tensor.size(dims[i]));
    if (i > 0) {
      // The stride of a dimension of one element means nothing and may be anything; this is one that the driver takes.
      strides[i - 1] = static_cast<cuuint64_t>(sizes[i] == 1 ? tensor.size(dims[0]) : tensor.stride(dims[i])) * 2;
    }
  }
  const auto type =
      tensor.scalar_type() == ScalarType::Half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return tensor_map("paged_attention", name, type, tensor.const_data_ptr(), sizes, strides, box);
}

struct Maps {
  CUtensorMap query, keys, values;
};

// A kernel that may start while the one before it ends: it waits for that one itself, where it needs its results.
template <typename... Parameters, typename... Given>
void start(
    const char* name, void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
    const Given&... given) {
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, given...);
  STD_TORCH_CHECK(error == cudaSuccess, "paged_attention: ", name, " did not start: ", cudaGetErrorString(error));
}

// With so few rows a warp loads all splits of its row at the same time, which takes many registers.
constexpr int kFewRows = 256;

// Programs of a merge that loops: about as many as an H200 has room for at a time.
constexpr int kMergePrograms = 1024;

// `expected`: splits of a row. A row with more splits takes longer.
template <typename T, int kSlices, int kSplits>
void launch_merge(const Problem& p, int columns, int expected, dim3 grid, cudaStream_t stream) {
  int team = 1;
  while (team < kMergeWarps && team * kSplits < expected) {
    team *= 2;
  }
  const int items = p.most_rows * merges_per_row<kSlices>(p.head_size), teams = kMergeWarps / team;
  int each = (items + teams - 1) / teams;
  if (kMergeLoops<kSplits>) {
    each = std::clamp(kMergePrograms / static_cast<int>(grid.x * grid.y), 1, each);
  }
  grid.z = static_cast<unsigned>(each);
  start("the merge", merge_kernel<T, kSlices, kSplits>, grid, kMergeWarps * 32, 0, stream, p, team, columns);
}

template <typename T, int kChunks>
void launch(const Problem& p, const Maps& maps, int blocks, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.kv_heads));
  constexpr size_t kBytes = sizeof(Shared<kChunks>);
  const auto kernel =
      p.blocks_per_request == 1 ? attention_kernel<T, kChunks, true> : attention_kernel<T, kChunks, false>;
  // Once for each device would suffice, but the call costs less than a check.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  STD_TORCH_CHECK(
      error == cudaSuccess, "paged_attention: a program needs ", kBytes, " bytes of shared memory: ",
      cudaGetErrorString(error));
  const dim3 programs = p.programs > 0 ? dim3(static_cast<unsigned>(p.programs), grid.y)
                                       : dim3(grid.x, grid.y, static_cast<unsigned>(p.splits));
  start("the kernel", kernel, programs, kThreads, kBytes, stream, maps.query, maps.keys, maps.values, p);
  if (p.splits > 1) {
    // As many as requests of equal length would have.
    const int expected = p.programs > 0 ? std::clamp(p.at_once / blocks, 2, p.splits) : p.splits;
    const bool few = expected > 8 && blocks * p.kv_heads * p.most_rows <= kFewRows;
    const auto merge = expected <= 2   ? launch_merge<T, 4, 2>
                       : expected <= 4 ? launch_merge<T, 2, 4>
                       : few           ? launch_merge<T, 1, kMaxSplits / kMergeWarps>
                                       : launch_merge<T, 1, 8>;
    merge(p, 2 * kChunks * kChunk, expected, grid, stream);
  }
}

template <typename T>
void launch_for(const Problem& p, const Maps& maps, int blocks, cudaStream_t stream) {
  if (p.head_size <= 2 * (kMostChunks - 1) * kChunk) {
    launch<T, kMostChunks - 1>(p, maps, blocks, stream);
  } else {
    launch<T, kMostChunks>(p, maps, blocks, stream);
  }
}

void check_half(const Checks& checks, const Tensor& tensor, const char* name, int dims) {
  checks.check_device(tensor, name);
  checks.check_type_of_leading(tensor, name);
  STD_TORCH_CHECK(tensor.dim() == dims, "paged_attention: ", name, " has ", tensor.dim(), " dimensions; expected ", dims);
  STD_TORCH_CHECK(
      tensor.stride(dims - 1) == 1, "paged_attention: ", name, " has stride ", tensor.stride(dims - 1),
      " in its last dimension; expected 1");
  for (int dim = 0; dim < dims - 1; ++dim) {
    STD_TORCH_CHECK(
        tensor.size(dim) <= 1 || (tensor.stride(dim) > 0 && tensor.stride(dim) % kAlignment == 0), "paged_attention: ",
        name, " has stride ", tensor.stride(dim), " in dimension ", dim, "; expected a multiple of ", kAlignment);
  }
  STD_TORCH_CHECK(
      aligned(tensor.const_data_ptr(), kAccess), "paged_attention: ", name, " does not start at a multiple of ",
      kAccess, " bytes");
}

void check_ints(const Checks& checks, const Tensor& tensor, const char* name, int dims) {
  STD_TORCH_CHECK(
      checks.same_device(tensor) && tensor.scalar_type() == ScalarType::Int && tensor.dim() == dims &&
          (tensor.numel() <= 1 || tensor.stride(dims - 1) == 1),
      "paged_attention: ", name, " has to be int32 on query's device, of ", dims, " dimensions, the last with stride 1");
}

void check_floats(const Checks& checks, const Tensor& tensor, const char* name, int64_t count, uintptr_t alignment) {
  STD_TORCH_CHECK(
      checks.same_device(tensor) && tensor.scalar_type() == ScalarType::Float && tensor.is_contiguous() &&
          tensor.numel() >= count && aligned(tensor.const_data_ptr(), alignment),
      "paged_attention: ", name, " has to be float32 on query's device, contiguous, of ", count,
      " elements or more, and to start at a multiple of ", alignment, " bytes");
}

void paged_attention(
    Tensor query, Tensor keys, Tensor values, Tensor out, Tensor partial_out, Tensor partial_lse,
    std::optional<Tensor> sinks, Tensor query_start_loc, Tensor seq_lens, Tensor block_table, double scale, bool causal,
    int64_t window_left, int64_t window_right, double softcap, int64_t max_query_len, int64_t blocks,
    int64_t blocks_per_request, int64_t splits, int64_t programs, int64_t at_once) {
  const Checks checks("paged_attention", "query", query);
  check_half(checks, query, "query", 3);
  check_half(checks, out, "out", 3);
  check_half(checks, keys, "keys", 4);
  check_half(checks, values, "values", 4);
  check_ints(checks, query_start_loc, "query_start_loc", 1);
  check_ints(checks, seq_lens, "seq_lens", 1);
  check_ints(checks, block_table, "block_table", 2);
  const int64_t head_size = query.size(2), kv_heads = keys.size(2), page = keys.size(1), requests = seq_lens.size(0);
  STD_TORCH_CHECK(
      head_size % kAlignment == 0 && head_size > 0 && head_size <= kMaxHeadSize, "paged_attention: head size is ",
      head_size, "; expected a multiple of ", kAlignment, " up to ", kMaxHeadSize);
  STD_TORCH_CHECK(
      page % kSubTile == 0 && page > 0, "paged_attention: a page has ", page, " tokens; expected a multiple of ", kSubTile);
  STD_TORCH_CHECK(
      kv_heads > 0 && query.size(1) > 0 && query.size(1) % kv_heads == 0 && query.size(1) / kv_heads <= kRows,
      "paged_attention: ",
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
      splits >= 1 && splits <= kMaxSplits && blocks >= 0 && blocks_per_request >= 0 &&
          (blocks_per_request == 0 || blocks <= requests * blocks_per_request),
      "paged_attention: a plan that cannot be launched: ", blocks, " blocks, ", blocks_per_request,
      " for each of ", requests, " requests, ", splits, " splits");
  STD_TORCH_CHECK(
      programs == 0 || (blocks_per_request == 1 && blocks == requests && splits > 1 && programs >= blocks &&
                        at_once > 0 && at_once <= programs),
      "paged_attention: keys that cannot be shared out: ", programs, " programs, ", at_once,
      " of them at a time, for ", blocks, " blocks of ", requests, " requests, ", blocks_per_request,
      " for each, and ", splits, " splits");
  const int64_t group = query.size(1) / kv_heads, most_tokens = std::min(kRows / group, max_query_len);
  if (splits > 1) {
    const int64_t rows = blocks * kv_heads * splits * most_tokens * group;
    check_floats(checks, partial_out, "partial_out", rows * kMaxHeadSize, kAccess);
    check_floats(checks, partial_lse, "partial_lse", rows, sizeof(float));
  }
  if (sinks.has_value()) {
    check_floats(checks, *sinks, "sinks", query.size(1), sizeof(float));
    STD_TORCH_CHECK(
        sinks->numel() == query.size(1), "paged_attention: ", sinks->numel(), " sinks for ", query.size(1), " heads");
  }
  if (blocks == 0 || requests == 0 || query.size(0) == 0 || max_query_len <= 0) {
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const cudaStream_t stream = current_stream("paged_attention", query.get_device_index());

  Problem p;
  p.out = out.mutable_data_ptr();
  p.partial_out = static_cast<float*>(partial_out.mutable_data_ptr());
  p.partial_lse = static_cast<float*>(partial_lse.mutable_data_ptr());
  p.sinks = sinks.has_value() ? static_cast<const float*>(sinks->const_data_ptr()) : nullptr;
  p.query_start_loc = static_cast<const int*>(query_start_loc.const_data_ptr());
  p.seq_lens = static_cast<const int*>(seq_lens.const_data_ptr());
  p.block_table = static_cast<const int*>(block_table.const_data_ptr());
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
  p.programs = static_cast<int>(programs);
  p.at_once = static_cast<int>(at_once);
  p.block_tokens = static_cast<int>(kRows / group);
  p.most_tokens = static_cast<int>(most_tokens);
  p.most_rows = p.most_tokens * p.group;
  p.one_over_group = 1.0f / static_cast<float>(group);
  p.window_left = static_cast<int>(window_left);
  p.window_right = static_cast<int>(window_right);
  p.scale = static_cast<float>(scale) * kLog2e;
  p.softcap = static_cast<float>(softcap) * kLog2e;
  p.causal = causal;
  const cuuint32_t box[4] = {kChunk, kSubTile, 1, 1};
  const Maps maps = {
      map_of(
          query, "query", {2, 1, 0},
          {kChunk, static_cast<cuuint32_t>(p.group), static_cast<cuuint32_t>(p.most_tokens)}),
      map_of(keys, "keys", {3, 1, 2, 0}, box), map_of(values, "values", {3, 1, 2, 0}, box)};
  switch (query.scalar_type()) {
    case ScalarType::Half:
      launch_for<__half>(p, maps, static_cast<int>(blocks), stream);
      break;
    case ScalarType::BFloat16:
      launch_for<__nv_bfloat16>(p, maps, static_cast<int>(blocks), stream);
      break;
    default:
      STD_TORCH_CHECK(
          false, "paged_attention: query is ", torch::headeronly::toString(query.scalar_type()),
          "; expected Half or BFloat16");
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hwplugin, CUDA, library) { library.impl("paged_attention", TORCH_BOX(&paged_attention)); }
