// How sixteen rows of a tile (kernels/mmvq/tiles.cuh) become operands of mma.m16n8k32.s8 for many tokens: what
// mmq_tiles adds to the formats of kernels/mmvq/mmvq_tiles_formats.cuh.
//
// With many tokens a result of the instruction is used once, while a code that has been unpacked serves every token of
// the warp. So work moves from results to codes:
//   centred   unsigned codes whose zero is z = 4, 8, 16 or 32 are shifted up until z is 128, the sign bit of a byte, and
//             that bit is flipped: signed codes, too large by 128 / z, for one operation a word. Sums of activations are
//             not needed then. Results are divided by 128 / z at the very end, which is exact.
//   scaled    Q2_K and Q3_K have codes so small that their product with a scale of 16 codes still fits a byte:
//             multiplied in, four codes for one multiplication, before the tensor core sees them. So one instruction
//             takes 32 codes although the scale changes after 16.
//
// THE SEED of a sum: the instruction adds to integers that it is given. If these are the bits of 12582912.0f =
// 1.5 * 2^23, whose last bit counts 1, then the integer sum is, read as a float, that number plus the sum: a subtraction
// makes it a float. It holds for sums below 2^22 in magnitude: those of 32 products of -128..127 with -127..127 are below
// 2^19. (mmq.cu measures what that is worth: the chapter's text has the surprise.)
#pragma once

#include <cstdint>

#include "kernels/device/cuda.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/mmvq/mmvq_tiles_formats.cuh"
#include "kernels/quant/quantize_acts.hpp"

namespace ladder::mmq {

inline constexpr float kSeed = 12582912.0f;
inline constexpr int kSeedBits = 0x4b400000;  // of kSeed

/// How a 16x8 block of integer sums of 32 codes becomes part of f32 sums.
enum class Scaling {
  convert,   ///< integer to float, a product of two scales, a fused multiply-add: three operations a result
  integers,  ///< scales of K-quants are integers: multiplied first, converted then
  seeded,    ///< a subtraction instead of the conversion
  seeded_tensor,  ///< and the products of scales by the tensor core, as an outer product
  tensor,         ///< the tensor core for the scales, and the conversion
};
__host__ __device__ constexpr bool is_seeded(Scaling s) {
  return s == Scaling::seeded || s == Scaling::seeded_tensor;
}
__host__ __device__ constexpr bool on_tensor_core(Scaling s) {
  return s == Scaling::tensor || s == Scaling::seeded_tensor;
}

// ANCHOR: mmq_properties
/// What follows from a format of mmvq_tiles_formats.cuh.
template <class F>
struct Properties {
  static constexpr WeightType kType = F::Block::kType;
  static constexpr bool kBlocks256 = F::Block::kElems == 256;
  /// Codes are multiplied with their scale before the product.
  static constexpr bool kScaledCodes = kType == WeightType::q2_k || kType == WeightType::q3_k;
  /// Scales change after 16 codes, and nothing could be done about it.
  static constexpr bool kHalves = F::kHalves && !kScaledCodes;
  /// A second product for the minima: their scales change after 16 codes too.
  static constexpr bool kMinProduct = F::kMin && kScaledCodes;
  static constexpr bool kMinSums = F::kMin && !kMinProduct;
  /// Sums of a block of 256 are scaled once more at its end.
  static constexpr bool kBlockSums = kBlocks256 && !kScaledCodes;
  static constexpr int kTooLarge = F::kZero > 0 && !kScaledCodes ? 128 / F::kZero : 1;
  /// What programs use: the fastest one measured on an H200.
  static constexpr Scaling kScaling = kHalves ? Scaling::integers : Scaling::tensor;
};
// ANCHOR_END: mmq_properties

// ANCHOR: mmq_operand
/// Codes of sub-block S as signed bytes: the A operand for rows g and g + 8.
template <class F, int S, class R>
__device__ __forceinline__ void operand(const R& r, std::uint32_t (&a)[4]) {
  using P = Properties<F>;
  F::template codes<S>(r, a);
  if constexpr (P::kScaledCodes) {
    const auto s = F::template scales<S / 4>(r, S % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int scale = s.d[i % 2][i / 2];
      if constexpr (F::kZero > 0) {
        // -scale * (code - zero) is -128..124, while the other sign would need +128. Added to 128 it is a byte, so four
        // of them are one multiplication and addition of words: no byte carries into the next.
        const auto offset = static_cast<std::uint32_t>(128 + F::kZero * scale) * 0x01010101u;
        a[i] = (offset - a[i] * static_cast<std::uint32_t>(scale)) ^ 0x80808080u;
      } else {
        a[i] *= static_cast<std::uint32_t>(scale);  // at most 15 * 3 a byte
      }
    }
  } else if constexpr (F::kZero > 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = a[i] * static_cast<std::uint32_t>(P::kTooLarge) ^ 0x80808080u;
  }
}
// ANCHOR_END: mmq_operand

/// Minima of sub-block S in place of codes.
template <class F, int S, class R>
__device__ __forceinline__ void min_operand(const R& r, std::uint32_t (&a)[4]) {
  const auto s = F::template scales<S / 4>(r, S % 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = static_cast<std::uint32_t>(s.min[i % 2][i / 2]) * 0x01010101u;
}

/// Integer scales of a sub-block of a K-quant, for rows g and g + 8: [row][16 codes], a scale of 32 codes in the first.
/// @param sub 0..3, of the tile's half H
template <class F, int H, class R>
__device__ __forceinline__ tiles::IntScales integer_scales(const R& r, int sub) {
  tiles::IntScales s{};
  if constexpr (F::kHalves) {
    s = F::template scales<H>(r, sub);
  } else if constexpr (F::kMin) {  // Q4_K, Q5_K: six bits each
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int at = 8 * sub;
      const unsigned a = r.head[row].y >> at, b = r.head[row].z >> at, c = r.head[row].w >> at;
      s.d[row][0] = static_cast<int>(H == 0 ? a & 63u : (c & 15u) | (a >> 2 & 48u));
      s.min[row][0] = static_cast<int>(H == 0 ? b & 63u : (c >> 4 & 15u) | (b >> 2 & 48u));
    }
  } else {  // IQ4_XS
    const int at = 4 * H + sub;
    s.d[0][0] = static_cast<int>((r.head.y >> (4 * at) & 15u) | (r.head.x >> (16 + 2 * at) & 3u) << 4) - 32;
    s.d[1][0] = static_cast<int>((r.head.w >> (4 * at) & 15u) | (r.head.z >> (16 + 2 * at) & 3u) << 4) - 32;
  }
  return s;
}

/// What these are multiples of.
template <class F, class R>
__device__ __forceinline__ tiles::FloatScales units(const R& r) {
  if constexpr (F::kHalves) {
    return F::units(r);
  } else if constexpr (F::kMin) {
    return {{tiles::low_half(r.head[0].x), tiles::low_half(r.head[1].x)},
            {tiles::high_half(r.head[0].x), tiles::high_half(r.head[1].x)}};
  } else {
    return {{tiles::low_half(r.head.x), tiles::low_half(r.head.z)}, {}};
  }
}

/// Scales of a sub-block as they multiply its sum: [row g, g + 8][16 codes], all exact in f16.
template <class F, int H, class R>
__device__ __forceinline__ void row_scales(const R& r, int sub, float (&d)[2][2]) {
  using P = Properties<F>;
  if constexpr (P::kScaledCodes) {
    const tiles::FloatScales u = units<F>(r);
#pragma unroll
    for (int row = 0; row < 2; ++row) d[row][0] = d[row][1] = F::kZero > 0 ? -u.d[row] : u.d[row];
  } else if constexpr (P::kBlocks256) {
    const tiles::IntScales s = integer_scales<F, H>(r, sub);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      d[row][0] = static_cast<float>(s.d[row][0]);
      d[row][1] = P::kHalves ? static_cast<float>(s.d[row][1]) : 0.0f;
    }
  } else {
    const tiles::FloatScales s = F::template scales<H>(r, sub);
#pragma unroll
    for (int row = 0; row < 2; ++row) d[row][0] = s.d[row], d[row][1] = 0.0f;
  }
}

/// What multiplies the sum of a sub-block's activations, for rows g and g + 8.
template <class F, int H, class R>
__device__ __forceinline__ void row_minima(const R& r, int sub, float (&m)[2]) {
  if constexpr (Properties<F>::kBlocks256) {
    const tiles::FloatScales u = units<F>(r);
    const tiles::IntScales s = integer_scales<F, H>(r, sub);
#pragma unroll
    for (int row = 0; row < 2; ++row)
      m[row] = -(u.min[row] * static_cast<float>(s.min[row][0]));  // exact: 17 bits
  } else {
    const tiles::FloatScales s = F::template scales<H>(r, sub);
    m[0] = s.min[0], m[1] = s.min[1];
  }
}

/// Two halves in a word, the first in its lower half.
__device__ __forceinline__ std::uint32_t halves(float low, float high) {
  return static_cast<std::uint32_t>(__half_as_ushort(__float2half_rn(low))) |
         static_cast<std::uint32_t>(__half_as_ushort(__float2half_rn(high))) << 16;
}

/// A float as two of tf32: the first 11 bits, and the next ones.
struct Tf32Pair {
  std::uint32_t high, low;
};
__device__ __forceinline__ Tf32Pair tf32_pair(float v) {
  const std::uint32_t high = __float_as_uint(v) & 0xffffe000u;
  return {high, __float_as_uint(v - __uint_as_float(high))};
}

/// Scale of a token's 32 activations, and the sum of their codes.
__device__ __forceinline__ float act_scale(std::uint32_t word) { return tiles::low_half(word); }
__device__ __forceinline__ float act_sum(std::uint32_t word) {  // of codes, times the scale
  return tiles::low_half(word) * static_cast<float>(static_cast<int>(word) >> 16);
}

}  // namespace ladder::mmq
