// wgmma: four warps multiply one tile, with both operands in shared memory, while they do other things.
//
// SHAPE   D[64][64] (f32) += A[64][16] . B[64][16]^T, both f16 with k contiguous, as weights are stored.
// LAYOUT  of D, for lane 0..31 of warp 0..3 of the four:
//           d[i]  row 16 * warp + lane / 4 + 8 * (i / 2 % 2), column 8 * (i / 4) + 2 * (lane % 4) + i % 2
//         of A and B in shared memory, without swizzle: core matrices of 8 rows by 8 halves, each 128
//         contiguous bytes. Element (row, k) lies in half
//           (row / 8 * 2 + k / 8) * 64 + row % 8 * 8 + k % 8
// USE     1. fill A and B, wgmma_smem_fence() by the threads that wrote, __syncthreads()
//         2. wgmma_fence(), any number of wgmma_m64n64k16_f16, wgmma_commit_group()
//         3. wgmma_wait_group<0>() before d is read, or A and B are written again
//         All 128 threads of four warps, the first of which is a multiple of 4, do all of it together.
// ERRORS  there is no emulated body: on the emulator, and on every GPU but compute capability 9.0, the kernel
//         ends with an error that says so. Compile for sm_90a.
// SOURCE  PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": "wgmma.mma_async", "Matrix Descriptor
//         Format", "Register Fragments for wgmma.mma_async.m64nNk16".
#pragma once

#include <cstdint>

#include "kernels/device/cuda.cuh"
#include "kernels/device/shared_address.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define LADDER_HAS_WGMMA 1
#else
#define LADDER_HAS_WGMMA 0
#endif

namespace ladder {

/// Makes this thread's writes to shared memory visible to the tensor cores and the copy engine.
__device__ __forceinline__ void wgmma_smem_fence() {
#if LADDER_HAS_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
  needs_sm90("wgmma");
#endif
}

/// Orders accesses to the registers of d before the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() {
#if LADDER_HAS_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
  needs_sm90("wgmma");
#endif
}

__device__ __forceinline__ void wgmma_commit_group() {
#if LADDER_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
  needs_sm90("wgmma");
#endif
}

template <int N>
__device__ __forceinline__ void wgmma_wait_group() {
  static_assert(N >= 0 && N <= 7);
#if LADDER_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#else
  needs_sm90("wgmma");
#endif
}

#if LADDER_HAS_WGMMA
/// What the instruction is told about an operand: where it starts, and how far apart core matrices are, along
/// k and along rows. All in units of 16 bytes.
__device__ __forceinline__ std::uint64_t wgmma_descriptor(const void* operand) {
  constexpr std::uint64_t kAlongK = 128 / 16, kAlongRows = 256 / 16;
  return (shared_address(operand) & 0x3ffffu) >> 4 | kAlongK << 16 | kAlongRows << 32;
}
#endif

/// @param a, b 2048 bytes of shared memory each, aligned to 128 @param d this lane's part of D, [32]
__device__ __forceinline__ void wgmma_m64n64k16_f16(float (&d)[32], const void* a, const void* b) {
#if LADDER_HAS_WGMMA
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, "
      "1, 1, 1, 0, 0;"  // add to d; neither operand negated, neither transposed
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]),
        "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
        "+f"(d[30]), "+f"(d[31])
      : "l"(wgmma_descriptor(a)), "l"(wgmma_descriptor(b))
      : "memory");
#else
  (void)d, (void)a, (void)b;
  needs_sm90("wgmma");
#endif
}

}  // namespace ladder
