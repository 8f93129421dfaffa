// SPDX-License-Identifier: Apache-2.0
// Instructions of sm_90a that CUDA C++ lacks: barriers that count bytes, copies of tiles by the tensor memory
// accelerator
// (TMA), and matrix products of a warpgroup (wgmma). Instructions and bits of the descriptors are from the PTX ISA,
// sections "mbarrier", "cp.async.bulk.tensor" and "wgmma.mma_async".

#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace hopper {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)));
}

// Makes this thread's changes to barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Ordinary writes to shared memory become visible to TMA and wgmma, which read it by another way.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The one arrival that a phase waits for, and the bytes that it waits for besides.
__device__ __forceinline__ void barrier_arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// More bytes for the phase that this thread will arrive at next.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// A hardware barrier of `threads` threads; `arrive` does not wait.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Start the copy of one box. What lies outside of the tensor arrives as zeros, and counts as bytes all the same. What
// is read `once` leaves the L2 cache before anything else does.
template <bool kOnce>
__device__ __forceinline__ void tma_load(
    void* to, const CUtensorMap* map, uint64_t* barrier, int column, int token, int head, int block) {
  if constexpr (kOnce) {
    asm volatile(
        "{\n"
        ".reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], policy;\n"
        "}\n" ::"r"(shared_address(to)),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "r"(column), "r"(token), "r"(head), "r"(block)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "r"(column), "r"(token), "r"(head), "r"(block)
        : "memory");
  }
}

__device__ __forceinline__ void tma_load(
    void* to, const CUtensorMap* map, uint64_t* barrier, int column, int head, int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "r"(column), "r"(head), "r"(token)
      : "memory");
}

// Start to write out `bytes` that lie in a row, a multiple of 16.
__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   static_cast<uint64_t>(__cvta_generic_to_global(to))),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

// Until all that this thread has started to write out is written.
__device__ __forceinline__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// An operand in shared memory: rows of 128 bytes in groups of eight, swizzled within a group as TMA writes them.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  constexpr uint64_t kGroup = 1024;
  constexpr uint64_t kSwizzle128 = 1;
  return (static_cast<uint64_t>(address & 0x3FFFF) >> 4) | (1ull << 16) | ((kGroup >> 4) << 32) | (kSwizzle128 << 62);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving operands in registers around a product that is still running.
template <int kCount>
__device__ __forceinline__ void wgmma_hold(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(values[i])::"memory");
  }
}

#define HOPPER_ACCUMULATORS(d)                                                                                         \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),          \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),           \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),          \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

#define HOPPER_REGISTERS                                                                                               \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "     \
  "%24, %25, %26, %27, %28, %29, %30, %31}, "

// d (64 x 64) = a (64 x 16, shared memory) * b (64 x 16, shared memory), transposed; added to d if `accumulate`.
template <typename T>
__device__ __forceinline__ void wgmma_shared(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " HOPPER_REGISTERS "%32, %33, p, 1, 1, 0, 0;\n}\n"
        : HOPPER_ACCUMULATORS(d)
        : "l"(a), "l"(b), "r"(accumulate));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " HOPPER_REGISTERS "%32, %33, p, 1, 1, 0, 0;\n}\n"
        : HOPPER_ACCUMULATORS(d)
        : "l"(a), "l"(b), "r"(accumulate));
  }
}

// d (64 x 64) += a (64 x 16, registers) * b (16 x 64, shared memory).
template <typename T>
__device__ __forceinline__ void wgmma_registers(float (&d)[32], const uint32_t* a, uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " HOPPER_REGISTERS
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
        : HOPPER_ACCUMULATORS(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " HOPPER_REGISTERS "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
        : HOPPER_ACCUMULATORS(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

#undef HOPPER_ACCUMULATORS
#undef HOPPER_REGISTERS

}  // namespace hopper
