// SPDX-License-Identifier: Apache-2.0
// The size of a warp on every device that the kernels are for.

#pragma once

namespace {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

}  // namespace
