// ldmatrix: a warp loads 8x8 matrices of 16-bit elements from shared memory, straight into mma fragments.
//
// SHAPE   N = 1, 2 or 4 matrices, each of eight rows of 16 bytes. Rows may lie anywhere: lane 8 * m + r (r =
//         0..7) gives the address of row r of matrix m. The addresses of lanes from 8 * N on are ignored.
// LAYOUT  register m of a lane holds two neighbouring elements of matrix m, the first in the low half:
//           plain       row lane / 4,                columns 2 * (lane % 4) and 2 * (lane % 4) + 1
//           transposed  rows 2 * (lane % 4) and + 1, column lane / 4
//         So one call with N = 4 gives the A fragment of mma m16n8k16 (matrices: rows 0..7 and 8..15 of k
//         0..7, then of k 8..15), and a transposed one with N = 2 the B fragment of a matrix that is stored
//         [k][n].
// TRAFFIC eight rows of 16 bytes are one pass over the 32 banks if no two of them share a bank. Rows 64 bytes
//         apart share four ways, 128 bytes apart eight ways; 80 or 144 bytes apart not at all.
// ERRORS  a row that is not aligned to 16 bytes or not in shared memory; lanes that do not all get here.
//         Undefined on the GPU, an error of the launch on the emulator.
// SOURCE  PTX ISA, "Warp-level matrix load instruction: ldmatrix". Needs sm_75.
#pragma once

#include <cstdint>

#include "kernels/device/cuda.cuh"
#include "kernels/device/shared_address.cuh"
#if !defined(__CUDACC__)
#include "harness/emulator/building_blocks.hpp"
#endif

namespace ladder {

/// @param fragment [N] registers @param row this lane's row address in shared memory
template <int N>
__device__ __forceinline__ void ldmatrix(std::uint32_t (&fragment)[N], const void* row) {
  static_assert(N == 1 || N == 2 || N == 4, "ldmatrix loads 1, 2 or 4 matrices");
#if defined(__CUDACC__)
  const std::uint32_t address = shared_address(row);
  if constexpr (N == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(fragment[0])
                 : "r"(address)
                 : "memory");
  } else if constexpr (N == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(fragment[0]), "=r"(fragment[1])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address)
                 : "memory");
  }
#else
  emu::ldmatrix(fragment, row, N, false);
#endif
}

/// The same, with each matrix transposed on the way.
template <int N>
__device__ __forceinline__ void ldmatrix_transposed(std::uint32_t (&fragment)[N], const void* row) {
  static_assert(N == 1 || N == 2 || N == 4, "ldmatrix loads 1, 2 or 4 matrices");
#if defined(__CUDACC__)
  const std::uint32_t address = shared_address(row);
  if constexpr (N == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(fragment[0])
                 : "r"(address)
                 : "memory");
  } else if constexpr (N == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(fragment[0]), "=r"(fragment[1])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address)
                 : "memory");
  }
#else
  emu::ldmatrix(fragment, row, N, true);
#endif
}

}  // namespace ladder
