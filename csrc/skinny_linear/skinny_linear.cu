// SPDX-License-Identifier: Apache-2.0
// The host's side: checks, descriptors of weights and inputs for the copy engine, launches.
//
// Kernels of this folder follow one another by programmatic dependent launch: each lets the next kernel start
// immediately, and waits for the previous kernel before it reads that kernel's results and before it writes anything.
// So the start of a kernel and its loads of weights overlap. After another kernel, which does not let the next one
// start, and before a kernel launched without the attribute, they run in the stream's order.

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

#include "common/arguments.h"
#include "common/stream.h"
#include "hopper/tensor_map.h"
#include "linear.cuh"
#include "norm.cuh"

namespace {

using namespace skinny;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// One block on a multiprocessor, which leaves room for one of a norm: 1 KB of a block is the system's, and a block that
// cannot start while the previous linear layer runs would end the overlap.
constexpr int64_t kSharedBytes = 224 * 1024;
constexpr int kMostTokens = 32;

// A matrix for the copy engine: chunks of 64 columns, each row by row; one copy takes `depth` / 64 chunks. Its rows may
// be two halves; then a copy takes `box_rows` / 2 rows of each. Copies divide the matrix, so no copy must be filled.
CUtensorMap map_of(
    const char* name, const void* data, int64_t rows, int64_t columns, int64_t stride, int halves, int box_rows,
    int depth) {
  const cuuint64_t sizes[4] = {
      kChunk, static_cast<cuuint64_t>(rows / halves), static_cast<cuuint64_t>(halves),
      static_cast<cuuint64_t>(columns / kChunk)};
  const cuuint64_t strides[3] = {
      static_cast<cuuint64_t>(stride * 2),
      // Without meaning if there is one half.
      static_cast<cuuint64_t>((halves > 1 ? rows / halves : 1) * stride * 2), kChunk * 2};
  const cuuint32_t box[4] = {
      kChunk, static_cast<cuuint32_t>(box_rows / halves), static_cast<cuuint32_t>(halves),
      static_cast<cuuint32_t>(depth / kChunk)};
  return tensor_map("skinny_linear", name, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, data, sizes, strides, box);
}

template <typename... Parameters, typename... Given>
void start(
    const char* op, void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes, bool overlap,
    cudaStream_t stream, const Given&... given) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, given...);
  STD_TORCH_CHECK(error == cudaSuccess, op, ": the kernel did not start: ", cudaGetErrorString(error));
}

struct Operands {
  const Tensor& x;
  const Tensor& weight;
  bool overlap;
  int32_t device;
  cudaStream_t stream;
};

template <int kRows, int kTokens, int kDepth>
void launch_tile(Problem p, const Operands& given) {
  using Shape = Tile<kRows, kTokens, kDepth>;
  const int64_t rows = given.weight.size(0), columns = given.weight.size(1);
  STD_TORCH_CHECK(
      rows % kRows == 0 && columns % kDepth == 0, "skinny_linear: weight is [", rows, ", ", columns,
      "]; expected multiples of ", kRows, " and ", kDepth);
  int multiprocessors = 0;
  const cudaError_t asked = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, given.device);
  STD_TORCH_CHECK(
      asked == cudaSuccess && multiprocessors > 0, "skinny_linear: no answer from the device: ",
      cudaGetErrorString(asked));
  p.tiles = static_cast<int>(rows / kRows);
  p.steps = static_cast<int>(columns / kDepth);
  // The fewest blocks with the same most tiles each: other multiprocessors are free for the next kernel.
  const int each = (p.tiles + multiprocessors - 1) / multiprocessors;
  const int blocks = (p.tiles + each - 1) / each;
  const int64_t sums = each > 1 ? Shape::kPartialBytes : 0;
  p.stages = static_cast<int>(std::min<int64_t>(
      {(kSharedBytes - kBoxAlignment - sums) / Shape::kStageBytes, int64_t{each} * p.steps, kMostStages}));
  const int64_t ring = std::max<int64_t>(int64_t{p.stages} * Shape::kStageBytes + sums, Shape::kPartialBytes);
  const int64_t bytes = kBoxAlignment + ring;
  const auto kernel = linear_kernel<kRows, kTokens, kDepth>;
  // Once for each device would suffice, but the call costs less than a check.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
  STD_TORCH_CHECK(
      error == cudaSuccess, "skinny_linear: a block needs ", kSharedBytes, " bytes of shared memory: ",
      cudaGetErrorString(error));
  const CUtensorMap weight_map = map_of(
      "weight", given.weight.const_data_ptr(), rows, columns, columns, p.gated ? 2 : 1, kRows, kDepth);
  // The stride of a single row may be anything.
  const int64_t stride = p.tokens > 1 ? given.x.stride(0) : columns;
  const CUtensorMap x_map = map_of("x", given.x.const_data_ptr(), p.tokens, columns, stride, 1, p.tokens, kDepth);
  start(
      "skinny_linear", kernel, blocks, kThreads, static_cast<size_t>(bytes), given.overlap, given.stream, weight_map,
      x_map, p);
}

template <int kRows, int kDepth>
void launch_rows(const Problem& p, const Operands& given) {
  if (p.tokens <= 8) {
    launch_tile<kRows, 8, kDepth>(p, given);
  } else if (p.tokens <= 16) {
    launch_tile<kRows, 16, kDepth>(p, given);
  } else {
    launch_tile<kRows, 32, kDepth>(p, given);
  }
}

// The copy engine and loads of 16 bytes need these strides and addresses.
void check_rows(const Checks& checks, const Tensor& tensor, const char* name) {
  checks.check_device(tensor, name);
  checks.check_type(tensor, name, ScalarType::BFloat16);
  STD_TORCH_CHECK(tensor.dim() == 2, checks.op, ": ", name, " has ", tensor.dim(), " dimensions; expected 2");
  checks.check_last_stride(tensor, name);
  STD_TORCH_CHECK(
      tensor.size(0) <= 1 || (tensor.stride(0) >= tensor.size(1) && tensor.stride(0) % 8 == 0), checks.op, ": ", name,
      " has rows ", tensor.stride(0), " elements apart; expected a multiple of 8, not below ", tensor.size(1));
  STD_TORCH_CHECK(
      aligned(tensor.const_data_ptr(), 16), checks.op, ": ", name, " does not start at a multiple of 16 bytes");
}

void skinny_linear(
    Tensor out, Tensor x, Tensor weight, bool gated, int64_t rows, int64_t depth, bool overlap) {
  const Checks checks("skinny_linear", "x", x);
  check_rows(checks, x, "x");
  check_rows(checks, weight, "weight");
  check_rows(checks, out, "out");
  const int64_t tokens = x.size(0), columns = weight.size(0) / (gated ? 2 : 1);
  STD_TORCH_CHECK(
      tokens <= kMostTokens && x.size(1) == weight.size(1) && out.size(0) == tokens && out.size(1) == columns,
      "skinny_linear: x is [", tokens, ", ", x.size(1), "], weight [", weight.size(0), ", ", weight.size(1),
      "] and out [", out.size(0), ", ", out.size(1), "]; expected [tokens, in], [outputs, in] and [tokens, ",
      gated ? "outputs / 2" : "outputs", "] with up to ", kMostTokens, " tokens");
  STD_TORCH_CHECK(out.is_contiguous() && weight.is_contiguous(), "skinny_linear: out or weight is not contiguous");
  STD_TORCH_CHECK(
      weight.size(0) <= INT32_MAX && weight.size(1) <= INT32_MAX, "skinny_linear: weight is too large");
  if (tokens == 0 || columns == 0) {
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Operands given{
      x, weight, overlap, x.get_device_index(), current_stream("skinny_linear", x.get_device_index())};
  Problem p{};
  p.out = static_cast<__nv_bfloat16*>(out.mutable_data_ptr());
  p.tokens = static_cast<int>(tokens);
  p.columns = static_cast<int>(columns);
  p.gated = gated;
  if (rows == 16 && depth == 512) {
    launch_rows<16, 512>(p, given);
  } else if (rows == 32 && depth == 256) {
    launch_rows<32, 256>(p, given);
  } else if (rows == 32 && depth == 512) {
    launch_rows<32, 512>(p, given);
  } else if (rows == 48 && depth == 256) {
    launch_rows<48, 256>(p, given);
  } else if (rows == 64 && depth == 256) {
    launch_rows<64, 256>(p, given);
  } else {
    STD_TORCH_CHECK(false, "skinny_linear: there is no tile of ", rows, " rows and ", depth, " columns");
  }
}

void skinny_norm(
    Tensor out, std::optional<Tensor> sum, Tensor x, std::optional<Tensor> residual, Tensor weight, double epsilon,
    bool overlap) {
  const Checks checks("skinny_norm", "x", x);
  check_rows(checks, x, "x");
  check_rows(checks, out, "out");
  const int64_t tokens = x.size(0), hidden = x.size(1);
  STD_TORCH_CHECK(
      hidden % (32 * kNormWidth) == 0 && hidden <= kMostNormThreads * kNormWidth, "skinny_norm: x has ", hidden,
      " columns; expected a multiple of ", 32 * kNormWidth, " up to ", kMostNormThreads * kNormWidth);
  checks.check_device(weight, "weight");
  checks.check_type(weight, "weight", ScalarType::BFloat16);
  STD_TORCH_CHECK(
      weight.dim() == 1 && weight.size(0) == hidden && weight.is_contiguous() && aligned(weight.const_data_ptr(), 16),
      "skinny_norm: weight is not [", hidden, "], contiguous and at a multiple of 16 bytes");
  STD_TORCH_CHECK(
      out.is_contiguous() && out.size(0) == tokens && out.size(1) == hidden, "skinny_norm: out is not as x");
  STD_TORCH_CHECK(
      sum.has_value() == residual.has_value(), "skinny_norm: a residual has a sum, and a sum has a residual");
  Norm p{};
  if (residual.has_value()) {
    check_rows(checks, *residual, "residual");
    check_rows(checks, *sum, "sum");
    STD_TORCH_CHECK(
        residual->size(0) == tokens && residual->size(1) == hidden && sum->is_contiguous() &&
            sum->size(0) == tokens && sum->size(1) == hidden,
        "skinny_norm: residual or sum is not as x");
    p.residual = static_cast<const __nv_bfloat16*>(residual->const_data_ptr());
    p.residual_stride = residual->stride(0);
    p.sum = static_cast<__nv_bfloat16*>(sum->mutable_data_ptr());
  }
  if (tokens == 0) {
    return;
  }
  STD_TORCH_CHECK(tokens <= INT32_MAX, "skinny_norm: x has ", tokens, " rows");
  p.out = static_cast<__nv_bfloat16*>(out.mutable_data_ptr());
  p.x = static_cast<const __nv_bfloat16*>(x.const_data_ptr());
  p.weight = static_cast<const __nv_bfloat16*>(weight.const_data_ptr());
  p.x_stride = x.stride(0);
  p.hidden = static_cast<int>(hidden);
  p.epsilon = static_cast<float>(epsilon);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream("skinny_norm", x.get_device_index());
  const int threads = static_cast<int>(hidden / kNormWidth);
  start(
      "skinny_norm", residual.has_value() ? norm_kernel<true> : norm_kernel<false>, tokens, threads, 0, overlap,
      stream, p);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hwplugin, CUDA, library) {
  library.impl("skinny_linear", TORCH_BOX(&skinny_linear));
  library.impl("skinny_norm", TORCH_BOX(&skinny_norm));
}
