// The tensor core as a warp sees it: one instruction multiplies a 16-row matrix A with an 8-column matrix B
// and adds the product to a 16x8 matrix D. No lane holds a whole matrix; each holds a fragment.
//
// Both instructions below see A as 16 rows and B as 8 columns of eight 32-bit words along k. A word is two
// halves (k = 16) or four signed bytes (k = 32). With group = lane / 4 (0..7) and member = lane % 4 (0..3):
//
//   a[0]  row group,     word member          b[0]  column group, word member
//   a[1]  row group + 8, word member          b[1]  column group, word member + 4
//   a[2]  row group,     word member + 4
//   a[3]  row group + 8, word member + 4      d[0], d[1]  row group,     columns 2 * member, 2 * member + 1
//                                             d[2], d[3]  row group + 8, the same columns
//
// Source: PTX ISA, "Matrix fragments for mma.m16n8k16" (f16) and "mma.m16n8k32" (s8). Needs sm_80.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/device/cuda.cuh"
#include "kernels/device/reduce.cuh"

namespace ladder {

inline constexpr int kMmaRows = 16;    ///< rows of A and D
inline constexpr int kMmaColumns = 8;  ///< columns of B and D
inline constexpr int kMmaWords = 8;    ///< 32-bit words of a row of A, or of a column of B

/// This lane's fragment of A. @param a row-major [16][8] words @param lane 0..31
__device__ inline void load_mma_a(std::uint32_t (&fragment)[4], const std::uint32_t* a, int lane) {
  const int group = lane / 4, member = lane % 4;
  fragment[0] = a[group * kMmaWords + member];
  fragment[1] = a[(group + 8) * kMmaWords + member];
  fragment[2] = a[group * kMmaWords + member + 4];
  fragment[3] = a[(group + 8) * kMmaWords + member + 4];
}

/// This lane's fragment of B. @param b one row per column of B: [8][8] words, k contiguous, as weights are
/// stored
__device__ inline void load_mma_b(std::uint32_t (&fragment)[2], const std::uint32_t* b, int lane) {
  const int group = lane / 4, member = lane % 4;
  fragment[0] = b[group * kMmaWords + member];
  fragment[1] = b[group * kMmaWords + member + 4];
}

/// Stores this lane's fragment of D. @param d row-major [16][8]
template <class T>
__device__ inline void store_mma_d(T* d, const T (&fragment)[4], int lane) {
  const int group = lane / 4, member = lane % 4;
  d[group * kMmaColumns + 2 * member] = fragment[0];
  d[group * kMmaColumns + 2 * member + 1] = fragment[1];
  d[(group + 8) * kMmaColumns + 2 * member] = fragment[2];
  d[(group + 8) * kMmaColumns + 2 * member + 1] = fragment[3];
}

/// The value of an IEEE binary16 bit pattern. Host code.
inline float half_bits_to_float(std::uint32_t bits) {
  const float sign = (bits & 0x8000u) != 0 ? -1.0f : 1.0f;
  const int exponent = static_cast<int>((bits >> 10) & 0x1fu);
  const auto mantissa = static_cast<float>(bits & 0x3ffu);
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  if (exponent == 31) return mantissa == 0 ? sign * INFINITY : NAN;
  return sign * std::ldexp(mantissa + 1024.0f, exponent - 25);
}

#if !defined(__CUDACC__)
namespace detail {

/// Emulator: the two rows of A and the two columns of B that this lane's part of D needs, from the lanes that
/// hold them. Every lane of the warp must call it.
struct MmaOperands {
  std::uint32_t row[2][kMmaWords];     // rows group, group + 8
  std::uint32_t column[2][kMmaWords];  // columns 2 * member, 2 * member + 1
};

inline MmaOperands gather_mma_operands(const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int group = lane / 4, member = lane % 4;
  MmaOperands m;
  for (int owner = 0; owner < 4; ++owner) {
    const int a_lane = 4 * group + owner;
    m.row[0][owner] = __shfl_sync(kAllLanes, a[0], a_lane);
    m.row[1][owner] = __shfl_sync(kAllLanes, a[1], a_lane);
    m.row[0][owner + 4] = __shfl_sync(kAllLanes, a[2], a_lane);
    m.row[1][owner + 4] = __shfl_sync(kAllLanes, a[3], a_lane);
    for (int j = 0; j < 2; ++j) {
      const int b_lane = 4 * (2 * member + j) + owner;
      m.column[j][owner] = __shfl_sync(kAllLanes, b[0], b_lane);
      m.column[j][owner + 4] = __shfl_sync(kAllLanes, b[1], b_lane);
    }
  }
  return m;
}

}  // namespace detail
#endif

/// D += A . B for f16 operands with f32 sums, k = 16. The order in which the hardware adds the 16 products,
/// and how it rounds on the way, is not specified; the emulator adds them in float64 and rounds once.
__device__ inline void mma_m16n8k16_f16(float (&d)[4], const std::uint32_t (&a)[4],
                                        const std::uint32_t (&b)[2]) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  const detail::MmaOperands m = detail::gather_mma_operands(a, b);
  for (int i = 0; i < 4; ++i) {
    double sum = d[i];
    for (int w = 0; w < kMmaWords; ++w) {
      for (int part = 0; part < 2; ++part) {
        sum += static_cast<double>(half_bits_to_float(m.row[i / 2][w] >> (16 * part) & 0xffffu)) *
               static_cast<double>(half_bits_to_float(m.column[i % 2][w] >> (16 * part) & 0xffffu));
      }
    }
    d[i] = static_cast<float>(sum);
  }
#endif
}

/// D += A . B for signed int8 operands with int32 sums (which wrap around), k = 32.
__device__ inline void mma_m16n8k32_s8(int (&d)[4], const std::uint32_t (&a)[4],
                                       const std::uint32_t (&b)[2]) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  const detail::MmaOperands m = detail::gather_mma_operands(a, b);
  for (int i = 0; i < 4; ++i) {
    auto sum = static_cast<std::uint32_t>(d[i]);
    for (int w = 0; w < kMmaWords; ++w) {
      for (int byte = 0; byte < 4; ++byte) {
        const auto x = static_cast<std::int8_t>(m.row[i / 2][w] >> (8 * byte) & 0xffu);
        const auto y = static_cast<std::int8_t>(m.column[i % 2][w] >> (8 * byte) & 0xffu);
        sum += static_cast<std::uint32_t>(x * y);
      }
    }
    d[i] = static_cast<int>(sum);
  }
#endif
}

}  // namespace ladder
