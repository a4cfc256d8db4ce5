// wgmma: four warps multiply one tile, with B (and A, or A from registers) in shared memory, while they do
// other things.
//
// SHAPE   D[64][N] (f32) += A[64][16] . B[N][16]^T, both f16 with k contiguous, as weights are stored; N is 8,
//         16, 32, 64, 96, 112, 128, 144, 160, 192, 224 or 256.
// LAYOUT  of D, for lane 0..31 of warp 0..3 of the four, d[N / 2] registers:
//           d[i]  row 16 * warp + lane / 4 + 8 * (i / 2 % 2), column 8 * (i / 4) + 2 * (lane % 4) + i % 2
//         of A in registers, a[4], two halves each, the lower k in the lower half:
//           a[i]  row 16 * warp + lane / 4 + 8 * (i % 2), k = 8 * (i / 2) + 2 * (lane % 4) and the next one
//         of A and B in shared memory, with the 128-byte swizzle (wgmma_descriptor_128b): rows of 64 halves,
//         128 bytes apart, from an address that is a multiple of 1024; the 16 bytes that hold (row, k) are
//         number (k / 8) ^ (row % 8) of their row. A tensor map with TensorSwizzle::bytes_128 writes this.
//         The next 16 k are 32 bytes further: wgmma_next_k(descriptor, 1).
//         without swizzle (wgmma_descriptor): core matrices of 8 rows by 8 halves, each 128 contiguous bytes.
//         Element (row, k) lies in half
//           (row / 8 * 2 + k / 8) * 64 + row % 8 * 8 + k % 8
// USE     1. fill A and B: by tensor_copy_2d and a wait for its mbarrier, or by stores, wgmma_smem_fence() by
//            the threads that wrote, and a barrier
//         2. wgmma_fence(), any number of wgmma_f16<N>, wgmma_commit_group()
//         3. wgmma_wait_group<0>() before d is read, or A and B (registers too) are written again; then
//            wgmma_hold(d), so that the compiler does not read d before the wait
//         All 128 threads of four warps, the first of which is a multiple of 4, do all of it together.
//         Registers: a block of one such group that loads and others that multiply gives each what it needs
//         with registers_decrease / registers_increase, as the first thing of each group's branch.
// ERRORS  there is no emulated body: on the emulator, and on every GPU but compute capability 9.0, the kernel
//         ends with an error that says so. Compile for sm_90a.
// LOOK FOR SASS: HGMMA; a warning C7510 of ptxas says that it made every wgmma wait for the one before it.
// SOURCE  PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": "wgmma.mma_async", "Matrix Descriptor
//         Format", "Register Fragments for wgmma.mma_async.m64nNk16"; "setmaxnreg".
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

/// Describes an operand in shared memory with the 128-byte swizzle.
/// @param operand [rows][64] halves, 1024-byte aligned
__device__ __forceinline__ std::uint64_t wgmma_descriptor_128b(const void* operand) {
#if LADDER_HAS_WGMMA
  // Eight rows are 1024 bytes; the distance along k has no meaning with this swizzle and is 1 by convention.
  constexpr std::uint64_t kAlongK = 1, kAlongRows = 1024 / 16, kSwizzle128 = 1;
  return (shared_address(operand) & 0x3ffffu) >> 4 | kAlongK << 16 | kAlongRows << 32 | kSwizzle128 << 62;
#else
  (void)operand;
  needs_sm90("wgmma");
  return 0;
#endif
}

/// The same operand, `steps` times 16 k further (0..3 within its 64 halves).
__device__ __forceinline__ std::uint64_t wgmma_next_k(std::uint64_t descriptor, int steps) {
  return descriptor + static_cast<std::uint64_t>(steps * 2);
}

/// The same operand, `rows` rows further: a multiple of 8.
__device__ __forceinline__ std::uint64_t wgmma_next_rows(std::uint64_t descriptor, int rows) {
  return descriptor + static_cast<std::uint64_t>(rows * 8);
}

/// Keeps the compiler from reading registers of d before this point, or writing them after it.
template <int R>
__device__ __forceinline__ void wgmma_hold(float (&d)[R]) {
#if LADDER_HAS_WGMMA
#pragma unroll
  for (int i = 0; i < R; ++i) asm volatile("" : "+f"(d[i])::"memory");
#else
  (void)d;
#endif
}

/// The same for the registers of A: written before this point.
template <int R>
__device__ __forceinline__ void wgmma_hold(std::uint32_t (&a)[R]) {
#if LADDER_HAS_WGMMA
#pragma unroll
  for (int i = 0; i < R; ++i) asm volatile("" : "+r"(a[i])::"memory");
#else
  (void)a;
#endif
}

// clang-format off
// Operands of the instruction, by their numbers in tens: LADDER_TEN(12) is %120 to %129.
#define LADDER_TEN(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define LADDER_NAMES_4 "%0, %1, %2, %3"
#define LADDER_NAMES_8 LADDER_NAMES_4 ", %4, %5, %6, %7"
#define LADDER_NAMES_16 LADDER_TEN() ", %10, %11, %12, %13, %14, %15"
#define LADDER_NAMES_32 LADDER_TEN() ", " LADDER_TEN(1) ", " LADDER_TEN(2) ", %30, %31"
#define LADDER_NAMES_36 LADDER_NAMES_32 ", %32, %33, %34, %35"
#define LADDER_NAMES_40 LADDER_TEN() ", " LADDER_TEN(1) ", " LADDER_TEN(2) ", " LADDER_TEN(3)
#define LADDER_NAMES_48 LADDER_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define LADDER_NAMES_56 LADDER_NAMES_40 ", " LADDER_TEN(4) ", %50, %51, %52, %53, %54, %55"
#define LADDER_NAMES_60 LADDER_NAMES_40 ", " LADDER_TEN(4) ", " LADDER_TEN(5)
#define LADDER_NAMES_64 LADDER_NAMES_60 ", %60, %61, %62, %63"
#define LADDER_NAMES_72 LADDER_NAMES_60 ", " LADDER_TEN(6) ", %70, %71"
#define LADDER_NAMES_76 LADDER_NAMES_72 ", %72, %73, %74, %75"
#define LADDER_NAMES_80 LADDER_NAMES_60 ", " LADDER_TEN(6) ", " LADDER_TEN(7)
#define LADDER_NAMES_90 LADDER_NAMES_80 ", " LADDER_TEN(8)
#define LADDER_NAMES_96 LADDER_NAMES_90 ", %90, %91, %92, %93, %94, %95"
#define LADDER_NAMES_110 LADDER_NAMES_90 ", " LADDER_TEN(9) ", " LADDER_TEN(10)
#define LADDER_NAMES_112 LADDER_NAMES_110 ", %110, %111"
#define LADDER_NAMES_128 LADDER_NAMES_110 ", " LADDER_TEN(11) ", %120, %121, %122, %123, %124, %125, %126, %127"
#define LADDER_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LADDER_SUMS_8(i) LADDER_SUMS_4(i), LADDER_SUMS_4(i + 4)
#define LADDER_SUMS_16(i) LADDER_SUMS_8(i), LADDER_SUMS_8(i + 8)
#define LADDER_SUMS_32(i) LADDER_SUMS_16(i), LADDER_SUMS_16(i + 16)
#define LADDER_SUMS_36(i) LADDER_SUMS_32(i), LADDER_SUMS_4(i + 32)
#define LADDER_SUMS_48(i) LADDER_SUMS_32(i), LADDER_SUMS_16(i + 32)
#define LADDER_SUMS_56(i) LADDER_SUMS_48(i), LADDER_SUMS_8(i + 48)
#define LADDER_SUMS_64(i) LADDER_SUMS_32(i), LADDER_SUMS_32(i + 32)
#define LADDER_SUMS_72(i) LADDER_SUMS_64(i), LADDER_SUMS_8(i + 64)
#define LADDER_SUMS_76(i) LADDER_SUMS_72(i), LADDER_SUMS_4(i + 72)
#define LADDER_SUMS_80(i) LADDER_SUMS_64(i), LADDER_SUMS_16(i + 64)
#define LADDER_SUMS_96(i) LADDER_SUMS_64(i), LADDER_SUMS_32(i + 64)
#define LADDER_SUMS_112(i) LADDER_SUMS_96(i), LADDER_SUMS_16(i + 96)
#define LADDER_SUMS_128(i) LADDER_SUMS_64(i), LADDER_SUMS_64(i + 64)
// R = N / 2 registers of d; the operands behind them have the numbers p, q, ... After the predicate: neither
// operand negated; then, for each operand in shared memory, not transposed.
#define LADDER_WGMMA_SHARED(N, R, p, q, r)                                                          \
  asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %" #r ", 0;\n\t"                            \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" LADDER_NAMES_##R "}, "     \
               "%" #p ", %" #q ", add, 1, 1, 0, 0;\n\t}"                                            \
               : LADDER_SUMS_##R(0)                                                                 \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))
#define LADDER_WGMMA_REGISTERS(N, R, p, q, r, s, t, u)                                              \
  asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %" #u ", 0;\n\t"                            \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" LADDER_NAMES_##R "}, "     \
               "{%" #p ", %" #q ", %" #r ", %" #s "}, %" #t ", add, 1, 1, 0;\n\t}"                  \
               : LADDER_SUMS_##R(0)                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)))
// clang-format on

template <int N>
concept WgmmaColumns = N == 8 || N == 16 || N == 32 || N == 64 || N == 72 || N == 96 || N == 112 ||
                       N == 128 || N == 144 || N == 152 || N == 160 || N == 192 || N == 224 || N == 256;

/// Starts D[64][N] += A . B^T over 16 k, both operands in shared memory.
/// @param a, b descriptors @param d this lane's part of D, [N / 2]
/// @param accumulate false: D = A . B^T. A constant costs nothing, a variable one predicate.
template <int N>
requires WgmmaColumns<N> __device__ __forceinline__ void wgmma_f16(float (&d)[N / 2], std::uint64_t a,
                                                                   std::uint64_t b, bool accumulate = true) {
#if LADDER_HAS_WGMMA
  if constexpr (N == 8) LADDER_WGMMA_SHARED(8, 4, 4, 5, 6);
  if constexpr (N == 16) LADDER_WGMMA_SHARED(16, 8, 8, 9, 10);
  if constexpr (N == 32) LADDER_WGMMA_SHARED(32, 16, 16, 17, 18);
  if constexpr (N == 64) LADDER_WGMMA_SHARED(64, 32, 32, 33, 34);
  if constexpr (N == 72) LADDER_WGMMA_SHARED(72, 36, 36, 37, 38);
  if constexpr (N == 96) LADDER_WGMMA_SHARED(96, 48, 48, 49, 50);
  if constexpr (N == 112) LADDER_WGMMA_SHARED(112, 56, 56, 57, 58);
  if constexpr (N == 128) LADDER_WGMMA_SHARED(128, 64, 64, 65, 66);
  if constexpr (N == 144) LADDER_WGMMA_SHARED(144, 72, 72, 73, 74);
  if constexpr (N == 152) LADDER_WGMMA_SHARED(152, 76, 76, 77, 78);
  if constexpr (N == 160) LADDER_WGMMA_SHARED(160, 80, 80, 81, 82);
  if constexpr (N == 192) LADDER_WGMMA_SHARED(192, 96, 96, 97, 98);
  if constexpr (N == 224) LADDER_WGMMA_SHARED(224, 112, 112, 113, 114);
  if constexpr (N == 256) LADDER_WGMMA_SHARED(256, 128, 128, 129, 130);
#else
  (void)d, (void)a, (void)b, (void)accumulate;
  needs_sm90("wgmma");
#endif
}

/// The same with A in registers. They must not change until a wgmma_wait_group has covered this one.
/// @param a this lane's part of A, by the layout above
template <int N>
requires WgmmaColumns<N> __device__ __forceinline__ void wgmma_f16(float (&d)[N / 2],
                                                                   const std::uint32_t (&a)[4],
                                                                   std::uint64_t b, bool accumulate = true) {
#if LADDER_HAS_WGMMA
  if constexpr (N == 8) LADDER_WGMMA_REGISTERS(8, 4, 4, 5, 6, 7, 8, 9);
  if constexpr (N == 16) LADDER_WGMMA_REGISTERS(16, 8, 8, 9, 10, 11, 12, 13);
  if constexpr (N == 32) LADDER_WGMMA_REGISTERS(32, 16, 16, 17, 18, 19, 20, 21);
  if constexpr (N == 64) LADDER_WGMMA_REGISTERS(64, 32, 32, 33, 34, 35, 36, 37);
  if constexpr (N == 72) LADDER_WGMMA_REGISTERS(72, 36, 36, 37, 38, 39, 40, 41);
  if constexpr (N == 96) LADDER_WGMMA_REGISTERS(96, 48, 48, 49, 50, 51, 52, 53);
  if constexpr (N == 112) LADDER_WGMMA_REGISTERS(112, 56, 56, 57, 58, 59, 60, 61);
  if constexpr (N == 128) LADDER_WGMMA_REGISTERS(128, 64, 64, 65, 66, 67, 68, 69);
  if constexpr (N == 144) LADDER_WGMMA_REGISTERS(144, 72, 72, 73, 74, 75, 76, 77);
  if constexpr (N == 152) LADDER_WGMMA_REGISTERS(152, 76, 76, 77, 78, 79, 80, 81);
  if constexpr (N == 160) LADDER_WGMMA_REGISTERS(160, 80, 80, 81, 82, 83, 84, 85);
  if constexpr (N == 192) LADDER_WGMMA_REGISTERS(192, 96, 96, 97, 98, 99, 100, 101);
  if constexpr (N == 224) LADDER_WGMMA_REGISTERS(224, 112, 112, 113, 114, 115, 116, 117);
  if constexpr (N == 256) LADDER_WGMMA_REGISTERS(256, 128, 128, 129, 130, 131, 132, 133);
#else
  (void)d, (void)a, (void)b, (void)accumulate;
  needs_sm90("wgmma");
#endif
}

#undef LADDER_WGMMA_SHARED
#undef LADDER_WGMMA_REGISTERS
#undef LADDER_NAMES_4
#undef LADDER_NAMES_8
#undef LADDER_NAMES_16
#undef LADDER_NAMES_32
#undef LADDER_NAMES_40
#undef LADDER_NAMES_48
#undef LADDER_NAMES_56
#undef LADDER_NAMES_60
#undef LADDER_NAMES_64
#undef LADDER_NAMES_72
#undef LADDER_NAMES_80
#undef LADDER_NAMES_90
#undef LADDER_NAMES_96
#undef LADDER_NAMES_110
#undef LADDER_NAMES_112
#undef LADDER_NAMES_128
#undef LADDER_SUMS_4
#undef LADDER_SUMS_8
#undef LADDER_SUMS_16
#undef LADDER_SUMS_32
#undef LADDER_SUMS_48
#undef LADDER_SUMS_56
#undef LADDER_SUMS_64
#undef LADDER_SUMS_72
#undef LADDER_SUMS_80
#undef LADDER_SUMS_96
#undef LADDER_SUMS_112
#undef LADDER_SUMS_128
#undef LADDER_TEN

/// Every thread of this group of four warps may have up to N registers from here on; waits until others have
/// given enough back. N is a multiple of 8 in 24..256. The kernel needs __launch_bounds__(threads, 1).
template <int N>
__device__ __forceinline__ void registers_increase() {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0);
#if LADDER_HAS_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#else
  needs_sm90("setmaxnreg");
#endif
}

/// Gives back all registers but N a thread.
template <int N>
__device__ __forceinline__ void registers_decrease() {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0);
#if LADDER_HAS_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#else
  needs_sm90("setmaxnreg");
#endif
}

/// An arrival at named_barrier that waits for nobody: `threads` counts these too.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
#if defined(__CUDA_ARCH__)
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  (void)id, (void)threads;
  needs_sm90("named barriers beside wgmma");
#endif
}

}  // namespace ladder
