// SPDX-License-Identifier: Apache-2.0
// For tests: see musa_runtime.h. MUSA's half types have CUDA's names.
#pragma once

#include <cuda_fp16.h>
