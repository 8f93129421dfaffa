// SPDX-License-Identifier: Apache-2.0
// For tests: see musa_runtime.h.
#pragma once

#include <cuda_bf16.h>

#define __mt_bfloat16 __nv_bfloat16
#define __mt_bfloat162 __nv_bfloat162
