// SPDX-License-Identifier: Apache-2.0
// For tests: see musa_runtime.h.
#pragma once

#include <cuda_fp8.h>

#define __MT_E4M3 __NV_E4M3
#define __MT_SATFINITE __NV_SATFINITE
#define __mt_fp8_e4m3 __nv_fp8_e4m3
#define __musa_cvt_float2_to_fp8x2 __nv_cvt_float2_to_fp8x2
