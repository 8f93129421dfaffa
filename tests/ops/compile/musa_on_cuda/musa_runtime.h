// SPDX-License-Identifier: Apache-2.0
// For tests: MUSA's names over CUDA, so that nvcc compiles ported sources. Only what the kernels use: a name that is not
// here makes the test fail, and somebody looks whether MUSA has it.
#pragma once

#include <cuda_runtime.h>

#define musaError_t cudaError_t
#define musaGetErrorString cudaGetErrorString
#define musaGetLastError cudaGetLastError
#define musaStream_t cudaStream_t
#define musaSuccess cudaSuccess
