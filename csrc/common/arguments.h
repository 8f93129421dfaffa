// SPDX-License-Identifier: Apache-2.0
// Checks of operations' tensors, with equal messages. Every check throws, and none reads a tensor's elements.

#pragma once

#include <cstdint>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

namespace {

// The checks of one call. All tensors are compared with the leading tensor.
struct Checks {
  const char* op;
  const char* leading_name;
  const torch::stable::Tensor& leading;

  Checks(const char* op, const char* leading_name, const torch::stable::Tensor& leading)
      : op(op), leading_name(leading_name), leading(leading) {
    STD_TORCH_CHECK(leading.is_cuda(), op, ": ", leading_name, " is not on a CUDA device");
  }

  bool same_device(const torch::stable::Tensor& tensor) const {
    return tensor.is_cuda() && tensor.get_device_index() == leading.get_device_index();
  }

  void check_device(const torch::stable::Tensor& tensor, const char* name) const {
    STD_TORCH_CHECK(
        same_device(tensor), op, ": ", name, " is not on ", leading_name,
        "'s device, cuda:", static_cast<int>(leading.get_device_index()));
  }

  // `expected` describes the condition `good`.
  template <typename... Words>
  void check_type(const torch::stable::Tensor& tensor, const char* name, bool good, const Words&... expected) const {
    STD_TORCH_CHECK(
        good, op, ": ", name, " is ", torch::headeronly::toString(tensor.scalar_type()), "; expected ", expected...);
  }

  void check_type(
      const torch::stable::Tensor& tensor, const char* name, torch::headeronly::ScalarType expected) const {
    check_type(tensor, name, tensor.scalar_type() == expected, torch::headeronly::toString(expected));
  }

  void check_type_of_leading(const torch::stable::Tensor& tensor, const char* name) const {
    check_type(
        tensor, name, tensor.scalar_type() == leading.scalar_type(), leading_name, "'s type, ",
        torch::headeronly::toString(leading.scalar_type()));
  }

  void check_last_stride(const torch::stable::Tensor& tensor, const char* name) const {
    const int64_t last = tensor.dim() - 1;
    STD_TORCH_CHECK(
        tensor.size(last) <= 1 || tensor.stride(last) == 1, op, ": ", name, " has stride ", tensor.stride(last),
        " in its last dimension; expected 1: call contiguous() first");
  }

  // No two elements share memory by a stride of 0.
  void check_written(const torch::stable::Tensor& tensor, const char* name, const char* how = "") const {
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      STD_TORCH_CHECK(
          tensor.size(i) <= 1 || tensor.stride(i) > 0, op, ": ", name, ".stride(", i,
          ") is 0, so its elements overlap; expected a tensor that can be written", how);
    }
  }
};

inline bool is_floating(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  return type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
}

inline bool aligned(const void* data, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

}  // namespace
