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
/// Twice byte I of a word, less `zero`: exactly.
template <int I>
__device__ __forceinline__ __half2 byte_twice(unsigned w, int zero) {
  constexpr unsigned k1024 = 0x64646464u;  // upper bytes of 1024 .. 1279
  return __hsub2(halves_of(__byte_perm(w, k1024, 0x4040u + 0x0101u * I)),
                 __float2half2_rn(static_cast<float>(1024 + zero)));
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

/// Made of the words of what was loaded: what needs it comes after the loads. Of the last 16 bytes only the first word, since
/// there may be nothing behind it.
template <class Loaded>
__device__ __forceinline__ std::uint32_t word_of(const Loaded& loaded) {
  constexpr int WORDS = (sizeof(Loaded) - 1) / 16 * 4 + 1;
  std::uint32_t words[WORDS], all = 0;
  std::memcpy(words, &loaded, sizeof words);
#pragma unroll
  for (const std::uint32_t w : words) all ^= w;
  return all;
}

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

/// Integer scales of four sub-blocks with one each, or two with two, as bytes of a word; and the minima, where the type has
/// them. Of row g (ROW 0) or g + 8.
struct ByteScales {
  unsigned d, min;
};
template <class Format, int S, int ROW>
__device__ __forceinline__ ByteScales byte_scales(const HalfRaw<Format>& r) {
  constexpr WeightType T = Format::Block::kType;
  constexpr int H = S / 4;
  if constexpr (T == WeightType::q4_k || T == WeightType::q5_k) {
    const uint4 h =
        r.head[ROW];  // six bits each: four of sub-blocks 4 to 7 in h.w, two above those of 0 to 3
    if constexpr (H == 0) return {h.y & 0x3f3f3f3fu, h.z & 0x3f3f3f3fu};
    return {(h.w & 0x0f0f0f0fu) | (h.y >> 2 & 0x30303030u),
            (h.w >> 4 & 0x0f0f0f0fu) | (h.z >> 2 & 0x30303030u)};
  } else if constexpr (T == WeightType::q2_k) {
    const unsigned w = part(r.scale[ROW], S / 2);
    return {w & 0x0f0f0f0fu, w >> 4 & 0x0f0f0f0fu};
  } else if constexpr (T == WeightType::q6_k) {
    return {part(r.scale[ROW], S / 2) ^ 0x80808080u, 0};
  } else if constexpr (T == WeightType::q3_k) {
    // Scale j: four low bits in a nibble of byte j % 8, two high bits at 2 (j / 4) of byte 8 + j % 4.
    const unsigned low = ROW == 0 ? (S % 4 < 2 ? r.head.x : r.head.y) : (S % 4 < 2 ? r.scale8.x : r.scale8.y);
    const unsigned high = ROW == 0 ? r.head.z : r.scale8_high;
    return {(low >> (4 * H) & 0x0f0f0f0fu) | (high >> (2 * (S / 2)) & 0x03030303u) << 4, 0};
  } else {
    static_assert(T == WeightType::iq4_xs);
    // Scale S: four low bits in a nibble, two high bits; in the byte from which the others would take it.
    const unsigned low = ROW == 0 ? r.head.y : r.head.w, high = ROW == 0 ? r.head.x : r.head.z;
    return {((low >> (4 * S) & 15u) | (high >> (16 + 2 * S) & 3u) << 4) << (8 * (S % 4)), 0};
  }
}
/// What byte_scales are too large by.
template <class Format>
inline constexpr int kScaleZero =
    Format::Block::kType == WeightType::q6_k                                                 ? 128
    : Format::Block::kType == WeightType::q3_k || Format::Block::kType == WeightType::iq4_xs ? 32
                                                                                             : 0;

/// What codes of a sub-block are multiplied with and what is added then, twice each: [row][its lower or upper 16 codes].
/// Types with a scale for 32 codes have it in [row][0].
struct HalfScales {
  __half2 d[2][2], min[2][2];
};
template <class Format, int S>
__device__ __forceinline__ HalfScales half_scales(const HalfRaw<Format>& r, const HalfUnits& u) {
  HalfScales s{};
  if constexpr (kBlocksOf256<Format>) {
    constexpr int ZERO = kScaleZero<Format>;
    constexpr int FIRST = Format::kHalves ? 2 * S % 4 : S % 4;  // byte of the first scale
    const auto of_row = [&]<int ROW>() {
      const ByteScales b = byte_scales<Format, S, ROW>(r);
      s.d[ROW][0] = __hmul2(byte_twice<FIRST>(b.d, ZERO), u.d[ROW]);
      if constexpr (Format::kMin) s.min[ROW][0] = __hmul2(byte_twice<FIRST>(b.min, 0), u.min[ROW]);
      if constexpr (Format::kHalves) {
        s.d[ROW][1] = __hmul2(byte_twice<FIRST + 1>(b.d, ZERO), u.d[ROW]);
        if constexpr (Format::kMin) s.min[ROW][1] = __hmul2(byte_twice<FIRST + 1>(b.min, 0), u.min[ROW]);
      }
    };
    of_row.template operator()<0>();
    of_row.template operator()<1>();
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
