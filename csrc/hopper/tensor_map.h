// SPDX-License-Identifier: Apache-2.0
// The descriptor of a tensor for Hopper's copy engine.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <torch/headeronly/util/Exception.h>

using EncodeTiled = CUresult (*)(
    CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
    const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, without linking against the driver: the library must also load without a driver.
inline EncodeTiled encode_tiled(const char* op) {
  static const EncodeTiled function = [op] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    STD_TORCH_CHECK(
        error == cudaSuccess && result == cudaDriverEntryPointSuccess && found != nullptr, op,
        ": the driver has no cuTensorMapEncodeTiled; it is of CUDA 12.0 or later");
    return reinterpret_cast<EncodeTiled>(found);
  }();
  return function;
}

// Dimensions go from the innermost out; strides are in bytes, and the innermost dimension has none. `box` is how many
// elements of each dimension one copy takes. Rows of 128 bytes are swizzled; what lies beyond the tensor arrives as
// zeros.
template <int kDims>
CUtensorMap tensor_map(
    const char* op, const char* name, CUtensorMapDataType type, const void* data, const cuuint64_t (&sizes)[kDims],
    const cuuint64_t (&strides)[kDims - 1], const cuuint32_t (&box)[kDims]) {
  cuuint32_t steps[kDims];
  for (cuuint32_t& step : steps) {
    step = 1;
  }
  CUtensorMap map;
  const CUresult result = encode_tiled(op)(
      &map, type, kDims, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(
      result == CUDA_SUCCESS, op, ": the driver refused the layout of ", name, " (error ", static_cast<int>(result), ")");
  return map;
}
