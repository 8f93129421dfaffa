// SPDX-License-Identifier: Apache-2.0
// Division on the device by a number known to the host.

#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace {

// For numbers below 2^31: a multiplication instead of about twenty steps (Granlund and Montgomery, Division by
// Invariant Integers using Multiplication).
struct Divider {
  uint32_t divisor;
  uint32_t factor;
  uint32_t shift;

  explicit Divider(uint32_t by) : divisor(by), factor(0), shift(31) {
    while ((uint64_t{1} << (shift - 31)) < by) {
      ++shift;
    }
    factor = static_cast<uint32_t>((uint64_t{1} << shift) / by + 1);
  }

  __device__ __forceinline__ uint32_t divide(uint32_t number) const {
    return static_cast<uint32_t>(static_cast<uint64_t>(number) * factor >> shift);
  }
};

}  // namespace
