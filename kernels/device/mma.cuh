// The tensor core as a warp sees it: one instruction multiplies a 16-row matrix A with an 8-column matrix B
// and adds the product to a 16x8 matrix D. No lane holds a whole matrix; each holds a fragment.
//
// The instructions below see A as 16 rows and B as 8 columns of eight 32-bit words along k. A word is two
// halves (k = 16) or four signed bytes (k = 32; with k = 16 there are four words). With group = lane / 4
// (0..7) and member = lane % 4 (0..3):
//
//   a[0]  row group,     word member          b[0]  column group, word member
//   a[1]  row group + 8, word member          b[1]  column group, word member + 4
//   a[2]  row group,     word member + 4
//   a[3]  row group + 8, word member + 4      d[0], d[1]  row group,     columns 2 * member, 2 * member + 1
//                                             d[2], d[3]  row group + 8, the same columns
//
// The first element along k is in a word's lowest bits. On the emulator the lanes of the warp meet, and one
// mma is counted at the line of the call.
//
// ERRORS  a warp whose 32 lanes do not all get here: undefined on the GPU, a finding on the emulator.
// SOURCE  PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type", "... with integer type" and
//         "Matrix Fragments for mma.m16n8k32". Needs sm_80.
#pragma once

#include <cstdint>

#include "harness/device/half_bits.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/reduce.cuh"
#if !defined(__CUDACC__)
#include "harness/emulator/building_blocks.hpp"
#endif

namespace ladder {

inline constexpr int kMmaRows = 16;    ///< rows of A and D
inline constexpr int kMmaColumns = 8;  ///< columns of B and D
inline constexpr int kMmaWords = 8;    ///< 32-bit words of a row of A, or of a column of B

/// This lane's fragment of A. @param a row-major [16][8] words @param lane 0..31
__device__ __forceinline__ void load_mma_a(std::uint32_t (&fragment)[4], const std::uint32_t* a, int lane) {
  const int group = lane / 4, member = lane % 4;
  fragment[0] = a[group * kMmaWords + member];
  fragment[1] = a[(group + 8) * kMmaWords + member];
  fragment[2] = a[group * kMmaWords + member + 4];
  fragment[3] = a[(group + 8) * kMmaWords + member + 4];
}

/// This lane's fragment of B. @param b one row per column of B: [8][8] words, k contiguous, as weights are
/// stored
__device__ __forceinline__ void load_mma_b(std::uint32_t (&fragment)[2], const std::uint32_t* b, int lane) {
  const int group = lane / 4, member = lane % 4;
  fragment[0] = b[group * kMmaWords + member];
  fragment[1] = b[group * kMmaWords + member + 4];
}

/// Stores this lane's fragment of D. @param d row-major [16][8]
template <class T>
__device__ __forceinline__ void store_mma_d(T* d, const T (&fragment)[4], int lane) {
  const int group = lane / 4, member = lane % 4;
  d[group * kMmaColumns + 2 * member] = fragment[0];
  d[group * kMmaColumns + 2 * member + 1] = fragment[1];
  d[(group + 8) * kMmaColumns + 2 * member] = fragment[2];
  d[(group + 8) * kMmaColumns + 2 * member + 1] = fragment[3];
}

/// D += A . B for f16 operands with f32 sums, k = 16. The order in which the hardware adds the 16 products,
/// and how it rounds on the way, is not specified; the emulator adds them in float64 and rounds once.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const std::uint32_t (&a)[4],
                                                 const std::uint32_t (&b)[2]) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  emu::mma_m16n8k16_f16(d, a, b);
#endif
}

/// d = a . b for f16 operands, k = 8: the lower half of the fragments of k = 16. a[0] is row group, a[1] row group + 8,
/// b[0] column group, each word member.
__device__ __forceinline__ void mma_m16n8k8_f16_zero(float (&d)[4], const std::uint32_t (&a)[2],
                                                     const std::uint32_t (&b)[1]) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]), "f"(0.0f));
#else
  d[0] = d[1] = d[2] = d[3] = 0.0f;
  emu::mma_m16n8k8_f16(d, a, b);
#endif
}

/// D += A . B for operands of 32 bits a word, k = 8: floats of which the last 13 bits do not count ("tf32").
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const std::uint32_t (&a)[4],
                                                 const std::uint32_t (&b)[2]) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  emu::mma_m16n8k8_tf32(d, a, b);
#endif
}

/// D += A . B for signed int8 operands with int32 sums (which wrap around), k = 16: the lower half of the
/// fragments of k = 32. a[0] is row group, a[1] row group + 8, b[0] column group, each word member (0..3).
__device__ __forceinline__ void mma_m16n8k16_s8(int (&d)[4], const std::uint32_t (&a)[2],
                                                const std::uint32_t (&b)[1]) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]));
#else
  emu::mma_m16n8k16_s8(d, a, b);
#endif
}

/// D += A . B for signed int8 operands with int32 sums (which wrap around), k = 32.
__device__ __forceinline__ void mma_m16n8k32_s8(int (&d)[4], const std::uint32_t (&a)[4],
                                                const std::uint32_t (&b)[2]) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  emu::mma_m16n8k32_s8(d, a, b);
#endif
}

/// d = a . b: as mma_m16n8k32_s8 on sums of zero, which then take no registers.
__device__ __forceinline__ void mma_m16n8k32_s8_zero(int (&d)[4], const std::uint32_t (&a)[4],
                                                     const std::uint32_t (&b)[2]) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(0));
#else
  d[0] = d[1] = d[2] = d[3] = 0;
  emu::mma_m16n8k32_s8(d, a, b);
#endif
}

/// The same for 16 columns of A.
__device__ __forceinline__ void mma_m16n8k16_s8_zero(int (&d)[4], const std::uint32_t (&a)[2],
                                                     const std::uint32_t (&b)[1]) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(0));
#else
  d[0] = d[1] = d[2] = d[3] = 0;
  emu::mma_m16n8k16_s8(d, a, b);
#endif
}

/// d = a . b + seed in every element, k = 32.
__device__ __forceinline__ void mma_m16n8k32_s8_from(int (&d)[4], const std::uint32_t (&a)[4],
                                                     const std::uint32_t (&b)[2], int seed) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(seed));
#else
  d[0] = d[1] = d[2] = d[3] = seed;
  emu::mma_m16n8k32_s8(d, a, b);
#endif
}

/// The same for 16 columns of A.
__device__ __forceinline__ void mma_m16n8k16_s8_from(int (&d)[4], const std::uint32_t (&a)[2],
                                                     const std::uint32_t (&b)[1], int seed) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(seed));
#else
  d[0] = d[1] = d[2] = d[3] = seed;
  emu::mma_m16n8k16_s8(d, a, b);
#endif
}

}  // namespace ladder
