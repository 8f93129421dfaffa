// SPDX-License-Identifier: Apache-2.0
// The stream of a launch, and its errors.

#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/Exception.h>

// Only CUDA builds of PyTorch define it. As a weak symbol it lets the library load with a CPU build, and refuse calls.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream) __attribute__((weak));

namespace {

// PyTorch's current stream of a device. `op` begins the error's text.
inline cudaStream_t current_stream(const char* op, int32_t device_index) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, op, ": this PyTorch was built without CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Call after a launch.
inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, op, ": the kernel did not start: ", cudaGetErrorString(error));
}

}  // namespace
