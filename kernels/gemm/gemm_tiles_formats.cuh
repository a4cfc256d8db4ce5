// Weights of a tile (kernels/mmvq/tiles.cuh) as the f16 operand of tensor cores: the part of the gemm_tiles kernels that
// differs from type to type.
//
// A sub-block is sixteen rows by 32 weights. mmvq_tiles_formats.cuh takes its codes out of a tile as four words of four
// bytes: lane 4g + t has words t and t + 4 of rows g and g + 8, so weights k = 4t .. 4t + 3 and 16 + 4t .. 16 + 4t + 3.
// The instruction wants, of every 16 weights, numbers 2t, 2t + 1 and 8 + 2t, 8 + 2t + 1. Which weights have these
// numbers is ours to say, as long as the activations say the same: number 2t + j is weight 4t + j, and number 8 + 2t + j
// is weight 4t + 2 + j, j = 0, 1. So a lane's codes are its operand, two to a register, and no lane asks another. The
// activations stand in that order (acts_f16.cuh).
//
// From a code to a weight:
//   1. a byte q below the byte 0x64 is the f16 number 1024 + q: one byte permutation makes two of them. Signed codes get
//      128 added first.
//   2. minus 1024, and what unsigned codes are too large by: the code, exactly.
//   3. times the scale, rounded once; plus the minimum in the same rounding, where the type has one.
// Scales of types with blocks of 32 are f16 already. Those of a block of 256 are d times a small integer, rounded to f16
// once more. So a weight is off by at most 2^-11 of itself, in a block of 256 by 2^-10 of its part and its minimum's
// together (half_rounding below), as long as neither is below the smallest normal f16, 2^-14.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/device/cuda.cuh"
#include "kernels/mmvq/mmvq_tiles_formats.cuh"

namespace ladder::tiles {

__device__ __forceinline__ __half2 halves_of(std::uint32_t bits) {
  __half2 h;
  std::memcpy(&h, &bits, sizeof h);
  return h;
}
__device__ __forceinline__ std::uint32_t bits_of(__half2 h) {
  std::uint32_t bits;
  std::memcpy(&bits, &h, sizeof bits);
  return bits;
}
/// Twice the lower, or the upper, half of a word.
__device__ __forceinline__ __half2 low_twice(unsigned w) { return halves_of(__byte_perm(w, 0, 0x1010)); }
__device__ __forceinline__ __half2 high_twice(unsigned w) { return halves_of(__byte_perm(w, 0, 0x3232)); }
/// Twice an integer of -128 to 127, exactly.
__device__ __forceinline__ __half2 twice_int(int v) {
  return __hsub2(halves_of(static_cast<unsigned>(v) * 0x10001u + 0x64806480u), __float2half2_rn(1152.0f));
}

/// Whether codes<S> gives signed bytes.
template <class Format>
inline constexpr bool kSignedCodes =
    Format::Block::kType == WeightType::q8_0 || Format::Block::kType == WeightType::iq4_nl ||
    Format::Block::kType == WeightType::iq4_xs;
template <class Format>
inline constexpr bool kBlocksOf256 = Format::Block::kElems == 256;

/// Most that a weight as the kernels multiply it differs from the file's, relative to its code's part and its offset's
/// together.
constexpr double half_rounding(WeightType type) {
  return info(type).block_elems == 256 ? 1.0 / 1024 : 1.0 / 2048;
}

/// A lane's share of a tile: that of eight tokens, scales of all sub-blocks.
template <class Format>
using HalfRaw = typename Format::template Raw<8>;

/// What the scales of a block of 256 are multiples of, of rows g and g + 8; nothing for the others.
struct HalfUnits {
  __half2 d[2], min[2];
};
template <class Format>
__device__ __forceinline__ HalfUnits half_units([[maybe_unused]] const HalfRaw<Format>& r) {
  constexpr WeightType T = Format::Block::kType;
  HalfUnits u{};
  if constexpr (T == WeightType::q4_k || T == WeightType::q5_k) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      u.d[row] = low_twice(r.head[row].x);
      u.min[row] = __hneg2(high_twice(r.head[row].x));
    }
  } else if constexpr (T == WeightType::q2_k) {
    u.d[0] = low_twice(r.dm.x), u.d[1] = low_twice(r.dm.y);
    u.min[0] = __hneg2(high_twice(r.dm.x)), u.min[1] = __hneg2(high_twice(r.dm.y));
  } else if constexpr (T == WeightType::q6_k) {
    u.d[0] = low_twice(r.d), u.d[1] = high_twice(r.d);
  } else if constexpr (T == WeightType::q3_k) {
    u.d[0] = low_twice(r.head.w), u.d[1] = high_twice(r.head.w);
  } else if constexpr (T == WeightType::iq4_xs) {
    u.d[0] = low_twice(r.head.x), u.d[1] = low_twice(r.head.z);
  }
  return u;
}

/// What codes of a sub-block are multiplied with and what is added then, twice each: [row][its lower or upper 16 codes].
/// Types with a scale for 32 codes have it in [row][0].
struct HalfScales {
  __half2 d[2][2], min[2][2];
};
template <class Format, int S>
__device__ __forceinline__ HalfScales half_scales(const HalfRaw<Format>& r, const HalfUnits& u) {
  HalfScales s{};
  if constexpr (kBlocksOf256<Format>) {
    const IntScales ints = Format::scales(r, S / 4, S % 4);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int h = 0; h < (Format::kHalves ? 2 : 1); ++h) {
        s.d[row][h] = __hmul2(twice_int(ints.d[row][h]), u.d[row]);
        if constexpr (Format::kMin) s.min[row][h] = __hmul2(twice_int(ints.min[row][h]), u.min[row]);
      }
    }
  } else if constexpr (Format::kMin) {
    const uint2 w = r.scales.w[S];
    s.d[0][0] = low_twice(w.x), s.d[1][0] = low_twice(w.y);
    s.min[0][0] = high_twice(w.x), s.min[1][0] = high_twice(w.y);
  } else {
    const unsigned w = r.scales.w[S];
    s.d[0][0] = low_twice(w), s.d[1][0] = high_twice(w);
  }
  return s;
}

// ANCHOR: half_fragments
/// Sub-block S of a tile as two A fragments of mma m16n8k16 or wgmma m64nNk16, f16: of its first sixteen weights and of
/// the others.
template <class Format, int S>
__device__ __forceinline__ void half_fragments(const HalfRaw<Format>& r, const HalfUnits& u,
                                               std::uint32_t (&a)[2][4]) {
  constexpr bool SIGNED = kSignedCodes<Format>;
  constexpr unsigned k1024 = 0x64646464u;  // upper bytes of 1024 .. 1279
  const __half2 zero = __float2half2_rn(1024.0f + (SIGNED ? 128.0f : static_cast<float>(Format::kZero)));
  std::uint32_t codes[4];  // rows g, g + 8 of word t; the same of word t + 4
  Format::template codes<S>(r, codes);
  const HalfScales s = half_scales<Format, S>(r, u);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i % 2, h16 = i / 2, h = Format::kHalves ? h16 : 0;
    const unsigned c = SIGNED ? codes[i] ^ 0x80808080u : codes[i];
    const __half2 low = __hsub2(halves_of(__byte_perm(c, k1024, 0x4140)), zero);
    const __half2 high = __hsub2(halves_of(__byte_perm(c, k1024, 0x4342)), zero);
    if constexpr (Format::kMin) {
      a[h16][row] = bits_of(__hfma2(low, s.d[row][h], s.min[row][h]));
      a[h16][2 + row] = bits_of(__hfma2(high, s.d[row][h], s.min[row][h]));
    } else {
      a[h16][row] = bits_of(__hmul2(low, s.d[row][h]));
      a[h16][2 + row] = bits_of(__hmul2(high, s.d[row][h]));
    }
  }
}
// ANCHOR_END: half_fragments

}  // namespace ladder::tiles
