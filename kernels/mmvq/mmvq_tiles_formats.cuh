// How a warp multiplies a tile of each storage type (tiles.cuh) with int8 activations (tile_acts.cuh): the part of
// mmvq_tiles that differs from type to type.
//
// A format is a struct with
//   Block      the type's block
//   kShort     how blocks of one token are made for short rows (Plan): as measured on an H200
//   kLong      and for long ones, both of products that other launches of this kernel follow
//   kZero      what unsigned codes are too large by
//   kMin       whether a minimum is added to what codes mean
//   kHalves    whether 16 codes have a scale, not 32
//   Raw        a lane's share of a tile, in registers: codes, and scales as NT tokens want them
//   load       tile -> Raw, in loads of 16 bytes where there are that many
//   codes<S>   Raw -> the instruction's operand for sub-block S: 32 codes of 16 rows, one byte each
//   placed<S>  the same, but a code is times 2^place(S): where it stands in a byte already, no shift brings it down; and
//              too large by zero(S), which is 0 for codes that end with a byte: there one bit makes them signed
//   tables<S>  of codes that a table has the values of: two operands whose sum they are
//   scales     Raw -> scales of a sub-block for rows g and g + 8: f32; of types with two in a sub-block integers, and
//   units      what these are multiples of
//   own        these integers of sub-blocks t and 4 + t, all that one token's lane needs, in bytes
//
// Lane 4g + t has rows g and g + 8 of every product. With eight tokens it has those of tokens 2t and 2t + 1, and scales
// all sub-blocks of them. With one token all four lanes of a row have the same product: so each of them scales one
// sub-block in four, and they add their sums at the end. The additions are the same ones: a token's sums are kept apart
// by sub-block, modulo four, in either case.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "harness/device/status.hpp"
#include "kernels/device/cp_async.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/ldmatrix.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/mmvq/tiles.cuh"

namespace ladder::tiles {

/// How a lane's share comes out of a tile in shared memory.
struct FromShared {
  static __device__ __forceinline__ uint4 load16(const unsigned char* p) {
    return *reinterpret_cast<const uint4*>(p);
  }
  static __device__ __forceinline__ uint2 load8(const unsigned char* p) {
    return *reinterpret_cast<const uint2*>(p);
  }
  static __device__ __forceinline__ unsigned load4(const unsigned char* p) {
    return *reinterpret_cast<const unsigned*>(p);
  }
  static __device__ __forceinline__ unsigned load2(const unsigned char* p) {
    return *reinterpret_cast<const unsigned short*>(p);
  }
};

/// A warp starts copies of N times 512 bytes to shared memory, 16 a lane.
template <int N>
__device__ __forceinline__ void copy_vectors(unsigned char* shared, const unsigned char* global) {
  if constexpr (N > 0) {
    copy_vectors<N - 1>(shared, global);
    cp_async_cg_at<512 * (N - 1)>(shared, global);
  }
}

/// Word i of four; i should be a constant after unrolling.
__device__ __forceinline__ unsigned part(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
__device__ __forceinline__ float low_half(unsigned w) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(w & 0xffffu)));
}
__device__ __forceinline__ float high_half(unsigned w) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(w >> 16)));
}
__device__ __forceinline__ unsigned low_nibbles(unsigned w) { return w & 0x0f0f0f0fu; }
__device__ __forceinline__ unsigned high_nibbles(unsigned w) { return w >> 4 & 0x0f0f0f0fu; }
/// Bit S of each byte, as bit TO of it.
template <int S, int TO>
__device__ __forceinline__ unsigned bit_of_bytes(unsigned w) {
  return (S < TO ? w << (TO - S) : w >> (S - TO)) & (0x01010101u << TO);
}

/// Scales of a sub-block, for rows g and g + 8: what a code is multiplied with, and what is then added to it.
struct FloatScales {
  float d[2], min[2];
};
/// Of a sub-block with a scale for each half: multiples of a unit.
struct IntScales {
  int d[2][2], min[2][2];  // [row][half]
};
/// The same of sub-blocks t and 4 + t as signed bytes of a word: halves of the first, then of the second.
struct OwnScales {
  unsigned d[2], min[2];  // [row]
};

/// Byte i of the result is byte s of b:a, where s is the lower three bits of nibble i of `select`; or, if the nibble's
/// fourth bit is set, that byte's sign in all bits.
__device__ __forceinline__ unsigned bytes_or_signs(unsigned a, unsigned b, unsigned select) {
#if defined(__CUDACC__)
  unsigned out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(select));
  return out;
#else
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = select >> (4 * i) & 15u, byte = ((s & 4u) != 0 ? b : a) >> (s % 4 * 8) & 0xffu;
    out |= ((s & 8u) == 0 ? byte : (byte & 0x80u) != 0 ? 0xffu : 0u) << (8 * i);
  }
  return out;
#endif
}
/// Signed byte I of a word.
template <int I>
__device__ __forceinline__ int signed_byte(unsigned w) {
  return static_cast<int>(bytes_or_signs(w, 0, 0x8880u + 0x1111u * I));
}

// Blocks of 32 --------------------------------------------------------------------------------------------------------

/// Scales of four blocks, from `at` on: with one token a lane needs one block's, with eight all four.
template <int NT>
struct ScalePairs {
  unsigned w[NT == 1 ? 1 : 4];
  template <class From>
  __device__ __forceinline__ void load(const unsigned char* at, int lane) {
    if constexpr (NT == 1) {
      w[0] = From::load4(at + 4 * lane);
    } else {
      const uint4 v = From::load16(at + lane / 4 * 16);
      w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    }
  }
  __device__ __forceinline__ FloatScales of(int sub) const {
    const unsigned v = w[NT == 1 ? 0 : sub];
    return {{low_half(v), high_half(v)}, {}};
  }
};
template <int NT>
struct ScalesAndMins {
  uint2 w[NT == 1 ? 1 : 4];
  template <class From>
  __device__ __forceinline__ void load(const unsigned char* at, int lane) {
    if constexpr (NT == 1) {
      w[0] = From::load8(at + 8 * lane);
    } else {
      const uint4 a = From::load16(at + lane / 4 * 32), b = From::load16(at + lane / 4 * 32 + 16);
      w[0] = make_uint2(a.x, a.y), w[1] = make_uint2(a.z, a.w), w[2] = make_uint2(b.x, b.y),
      w[3] = make_uint2(b.z, b.w);
    }
  }
  __device__ __forceinline__ FloatScales of(int sub) const {
    const uint2 v = w[NT == 1 ? 0 : sub];
    return {{low_half(v.x), low_half(v.y)}, {high_half(v.x), high_half(v.y)}};
  }
};

/// How a multiprocessor is filled.
struct Plan {
  int warps;   ///< of a block
  int tiles;   ///< that a warp has under way
  int blocks;  ///< that a multiprocessor has at once
  int early;   ///< tiles that a warp with many asks for before the kernel before has ended
  bool operator==(const Plan&) const = default;
};

/// What formats have unless they say otherwise.
struct PlainCodes {
  static constexpr bool kPlaced = false;  ///< has placed<S>
  static constexpr bool kTables = false;  ///< has tables<S>
  static constexpr int kMostProduct = 0;  ///< of a code and an integer scale, in size
};

/// Nibbles of four blocks and their scales: Q4_0, and with more to them Q4_1, Q5_0, Q5_1 and IQ4_NL.
template <int NT, template <int> class Scales, int SCALES_AT>
struct NibbleRaw {
  uint4 w[2];  // rows g and g + 8: word t of each block
  Scales<NT> scales;
  template <class From>
  __device__ __forceinline__ void load(const unsigned char* tile, int lane) {
    w[0] = From::load16(tile + 16 * lane);
    w[1] = From::load16(tile + 512 + 16 * lane);
    scales.template load<From>(tile + SCALES_AT, lane);
  }
  template <int S>
  __device__ __forceinline__ void nibbles(std::uint32_t (&a)[4]) const {
    a[0] = low_nibbles(part(w[0], S));
    a[1] = low_nibbles(part(w[1], S));
    a[2] = high_nibbles(part(w[0], S));
    a[3] = high_nibbles(part(w[1], S));
  }
};

// ANCHOR: tile_q4_0
struct TileQ4_0 : PlainCodes {
  using Block = BlockQ4_0;
  static constexpr Plan kShort = {8, 4, 4, 3}, kLong = {16, 4, 2, 3};
  static constexpr int kZero = 8;
  static constexpr bool kMin = false, kHalves = false;
  template <int NT>
  using Raw = NibbleRaw<NT, ScalePairs, 1024>;
  template <int S, class R>
  static __device__ __forceinline__ void codes(const R& r, std::uint32_t (&a)[4]) {
    r.template nibbles<S>(a);
  }
  template <int H, class R>
  static __device__ __forceinline__ FloatScales scales(const R& r, int sub) {
    return r.scales.of(sub);
  }
  static constexpr bool kPlaced = true;
  static __host__ __device__ constexpr int place(int /*sub*/) { return 4; }
  static __host__ __device__ constexpr int zero(int /*sub*/) { return 0; }
  template <int S, class R>
  static __device__ __forceinline__ void placed(const R& r, unsigned signs, std::uint32_t (&a)[4]) {
    a[0] = (part(r.w[0], S) << 4 & 0xf0f0f0f0u) ^ signs;
    a[1] = (part(r.w[1], S) << 4 & 0xf0f0f0f0u) ^ signs;
    a[2] = (part(r.w[0], S) & 0xf0f0f0f0u) ^ signs;
    a[3] = (part(r.w[1], S) & 0xf0f0f0f0u) ^ signs;
  }
};
// ANCHOR_END: tile_q4_0

// ANCHOR: tile_q4_1
struct TileQ4_1 : TileQ4_0 {
  using Block = BlockQ4_1;
  static constexpr Plan kShort = {8, 4, 4, 3}, kLong = {16, 5, 1, 4};
  static constexpr int kZero = 0;
  static constexpr bool kPlaced = false;
  static constexpr bool kMin = true;
  template <int NT>
  using Raw = NibbleRaw<NT, ScalesAndMins, 1024>;
};
// ANCHOR_END: tile_q4_1

/// Nibbles and fifth bits.
template <int NT, template <int> class Scales>
struct FiveBitRaw : NibbleRaw<NT, Scales, 1280> {
  uint2 fifth;  // rows g and g + 8
  template <class From>
  __device__ __forceinline__ void load(const unsigned char* tile, int lane) {
    NibbleRaw<NT, Scales, 1280>::template load<From>(tile, lane);
    fifth = From::load8(tile + 1024 + 8 * lane);
  }
};

// ANCHOR: tile_q5_0
struct TileQ5_0 : TileQ4_0 {
  using Block = BlockQ5_0;
  static constexpr Plan kShort = {8, 5, 3, 4}, kLong = {16, 5, 1, 5};
  static constexpr int kZero = 16;
  static constexpr bool kPlaced = false;
  template <int NT>
  using Raw = FiveBitRaw<NT, ScalePairs>;
  template <int S, class R>
  static __device__ __forceinline__ void codes(const R& r, std::uint32_t (&a)[4]) {
    r.template nibbles<S>(a);
    a[0] |= bit_of_bytes<2 * S, 4>(r.fifth.x);
    a[1] |= bit_of_bytes<2 * S, 4>(r.fifth.y);
    a[2] |= bit_of_bytes<2 * S + 1, 4>(r.fifth.x);
    a[3] |= bit_of_bytes<2 * S + 1, 4>(r.fifth.y);
  }
};
// ANCHOR_END: tile_q5_0

// ANCHOR: tile_q5_1
struct TileQ5_1 : TileQ5_0 {
  using Block = BlockQ5_1;
  static constexpr Plan kShort = {8, 5, 3, 2}, kLong = {16, 5, 1, 5};
  static constexpr int kZero = 0;
  static constexpr bool kMin = true;
  template <int NT>
  using Raw = FiveBitRaw<NT, ScalesAndMins>;
};
// ANCHOR_END: tile_q5_1

// ANCHOR: tile_q8_0
struct TileQ8_0 : TileQ4_0 {
  using Block = BlockQ8_0;
  static constexpr Plan kShort = {8, 3, 3, 2}, kLong = {8, 5, 2, 5};
  static constexpr int kZero = 0;
  static constexpr bool kPlaced = false;
  template <int NT>
  struct Raw {
    uint4 w[4];  // row g, then row g + 8: words t and t + 4 of two blocks each
    ScalePairs<NT> scales;
    template <class From>
    __device__ __forceinline__ void load(const unsigned char* tile, int lane) {
#pragma unroll
      for (int v = 0; v < 4; ++v) w[v] = From::load16(tile + 512 * v + 16 * lane);
      scales.template load<From>(tile + 2048, lane);
    }
  };
  template <int S, class R>
  static __device__ __forceinline__ void codes(const R& r, std::uint32_t (&a)[4]) {
    constexpr int V = S / 2, I = S % 2 * 2;
    a[0] = part(r.w[V], I);
    a[1] = part(r.w[2 + V], I);
    a[2] = part(r.w[V], I + 1);
    a[3] = part(r.w[2 + V], I + 1);
  }
};
// ANCHOR_END: tile_q8_0

/// Eight nibbles to eight bytes of IQ4's table: low 16 bits to `low`, high ones to `high`. A byte permutation looks three
/// bits up in eight bytes; the fourth bit chooses between two of them.
__device__ __forceinline__ void iq4_bytes(unsigned nibbles, unsigned& low, unsigned& high) {
  using detail::kIq4High, detail::kIq4Low;
  constexpr unsigned T0 = kIq4Low & 0xffffffffu, T1 = kIq4Low >> 32, T2 = kIq4High & 0xffffffffu,
                     T3 = kIq4High >> 32;
  const unsigned three = nibbles & 0x77777777u;
  const unsigned fourth = (nibbles & 0x88888888u) >> 1 | 0x32103210u;
  low = __byte_perm(__byte_perm(T0, T1, three), __byte_perm(T2, T3, three), fourth);
  high = __byte_perm(__byte_perm(T0, T1, three >> 16), __byte_perm(T2, T3, three >> 16), fourth >> 16);
}

/// The values of codes 0..3 and 4..7; one more than those of 8..11 and 12..15.
inline constexpr unsigned kIq4Below = detail::kIq4Low & 0xffffffffu, kIq4Below4 = detail::kIq4Low >> 32,
                          kIq4Above = (detail::kIq4High & 0xffffffffu) + 0x01010101u,
                          kIq4Above4 = (detail::kIq4High >> 32) + 0x01010101u;
static_assert((kIq4Below & kIq4Below4 & 0x80808080u) == 0x80808080u &&
              ((kIq4Above | kIq4Above4) & 0x80808080u) == 0);

/// Eight nibbles to two operands for each half of them, whose sum is IQ4's values. The lower half of the table is negative
/// and the upper one is not: so a permutation in the first that meets an upper code gives -1, in the second one that meets
/// a lower code gives 0. The second one's table is larger by one.
/// @param table kIq4Below and kIq4Above
__device__ __forceinline__ void iq4_terms(unsigned nibbles, const unsigned (&table)[2], unsigned (&low)[2],
                                          unsigned (&high)[2]) {
  const unsigned other = nibbles ^ 0x88888888u;
  low[0] = bytes_or_signs(table[0], kIq4Below4, nibbles);
  low[1] = bytes_or_signs(table[1], kIq4Above4, other);
  high[0] = bytes_or_signs(table[0], kIq4Below4, nibbles >> 16);
  high[1] = bytes_or_signs(table[1], kIq4Above4, other >> 16);
}
/// The operands of words of rows g and g + 8.
__device__ __forceinline__ void iq4_operands(unsigned row, unsigned row8, const unsigned (&table)[2],
                                             std::uint32_t (&a)[2][4]) {
  unsigned low[2], high[2];
  iq4_terms(row, table, low, high);
  a[0][0] = low[0], a[1][0] = low[1], a[0][2] = high[0], a[1][2] = high[1];
  iq4_terms(row8, table, low, high);
  a[0][1] = low[0], a[1][1] = low[1], a[0][3] = high[0], a[1][3] = high[1];
}

// ANCHOR: tile_iq4_nl
struct TileIQ4_NL : TileQ4_0 {
  using Block = BlockIQ4_NL;
  static constexpr Plan kShort = {8, 5, 3, 2}, kLong = {12, 5, 2, 2};
  static constexpr int kZero = 0;
  static constexpr bool kPlaced = false;
  template <int S, class R>
  static __device__ __forceinline__ void codes(const R& r, std::uint32_t (&a)[4]) {
    iq4_bytes(part(r.w[0], S), a[0], a[2]);
    iq4_bytes(part(r.w[1], S), a[1], a[3]);
  }
  static constexpr bool kTables = true;
  template <int S, class R>
  static __device__ __forceinline__ void tables(const R& r, const unsigned (&table)[2],
                                                std::uint32_t (&a)[2][4]) {
    iq4_operands(part(r.w[0], S), part(r.w[1], S), table, a);
  }
};
// ANCHOR_END: tile_iq4_nl

// Blocks of 256: integer scales inside, multiples of one or two f32 units --------------------------------------------------
// H = 0, 1: the block's eight sub-blocks, four at a time; sub = 0..3 in it.

/// unit * byte i of a word, rounded once. The byte is put below the exponent of 2^23, of which it is taken off again in the
/// product: unit * 2^23 is exact. An instruction that converts bytes is four times as slow.
__device__ __forceinline__ float times_byte(float unit, unsigned w, int i) {
  const float biased = __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7540u + static_cast<unsigned>(i)));
  return fmaf(unit, biased, unit * -8388608.0f);
}
/// The 6-bit scales of Q4_K and Q5_K of four sub-blocks, a byte each; then the minima.
template <int H>
__device__ __forceinline__ unsigned scales_k4(const uint4& head) {
  return H == 0 ? head.y & 0x3f3f3f3fu : (head.w & 0x0f0f0f0fu) | (head.y >> 2 & 0x30303030u);
}
template <int H>
__device__ __forceinline__ unsigned minima_k4(const uint4& head) {
  return H == 0 ? head.z & 0x3f3f3f3fu : (head.w >> 4 & 0x0f0f0f0fu) | (head.z >> 2 & 0x30303030u);
}

// ANCHOR: tile_q4_k
struct TileQ4_K : PlainCodes {
  using Block = BlockQ4_K;
  static constexpr Plan kShort = {8, 4, 2, 3}, kLong = {16, 3, 1, 2};
  static constexpr int kZero = 0;
  static constexpr bool kMin = true, kHalves = false;
  template <int NT>
  struct Raw {
    uint4 w[4];     // row g, then row g + 8: words t and t + 4 of two groups of 32 bytes each
    uint4 head[2];  // d and dmin, then the packed scales
    template <class From>
    __device__ __forceinline__ void load(const unsigned char* tile, int lane) {
#pragma unroll
      for (int v = 0; v < 4; ++v) w[v] = From::load16(tile + 512 * v + 16 * lane);
      head[0] = From::load16(tile + 2048 + lane / 4 * 16);
      head[1] = From::load16(tile + 2048 + 128 + lane / 4 * 16);
    }
  };
  /// Group S / 2: its low nibbles are sub-block S for even S, its high ones for odd S.
  template <int S, class R>
  static __device__ __forceinline__ void codes(const R& r, std::uint32_t (&a)[4]) {
    constexpr int V = S / 4, I = S / 2 % 2 * 2;
    const unsigned w[4] = {part(r.w[V], I), part(r.w[2 + V], I), part(r.w[V], I + 1),
                           part(r.w[2 + V], I + 1)};
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = S % 2 == 0 ? low_nibbles(w[i]) : high_nibbles(w[i]);
  }
  template <int H, class R>
  static __device__ __forceinline__ FloatScales scales(const R& r, int sub) {
    FloatScales s;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      s.d[row] = times_byte(low_half(r.head[row].x), scales_k4<H>(r.head[row]), sub);
      s.min[row] = times_byte(-high_half(r.head[row].x), minima_k4<H>(r.head[row]), sub);
    }
    return s;
  }
};
// ANCHOR_END: tile_q4_k

// ANCHOR: tile_q5_k
struct TileQ5_K : TileQ4_K {
  using Block = BlockQ5_K;
  static constexpr Plan kShort = {8, 4, 2, 3}, kLong = {16, 3, 1, 2};
  template <int NT>
  struct Raw {
    uint4 w[4], head[2];
    uint4 fifth;  // words t and t + 4 of row g, then of row g + 8
    template <class From>
    __device__ __forceinline__ void load(const unsigned char* tile, int lane) {
#pragma unroll
      for (int v = 0; v < 4; ++v) w[v] = From::load16(tile + 512 * v + 16 * lane);
      fifth = From::load16(tile + 2048 + 16 * lane);
      head[0] = From::load16(tile + 2560 + lane / 4 * 16);
      head[1] = From::load16(tile + 2560 + 128 + lane / 4 * 16);
    }
  };
  template <int S, class R>
  static __device__ __forceinline__ void codes(const R& r, std::uint32_t (&a)[4]) {
    TileQ4_K::codes<S>(r, a);
    a[0] |= bit_of_bytes<S, 4>(r.fifth.x);
    a[1] |= bit_of_bytes<S, 4>(r.fifth.z);
    a[2] |= bit_of_bytes<S, 4>(r.fifth.y);
    a[3] |= bit_of_bytes<S, 4>(r.fifth.w);
  }
};
// ANCHOR_END: tile_q5_k

/// A row's sixteen bytes, two for each sub-block: with one token those of sub-blocks t and 4 + t, with eight all of them.
template <int NT>
using SubBlockPairs = std::conditional_t<NT == 1, unsigned, uint4>;
template <int NT, class From>
__device__ __forceinline__ SubBlockPairs<NT> load_pairs(const unsigned char* row, int t) {
  if constexpr (NT == 1) {
    return __byte_perm(From::load2(row + 2 * t), From::load2(row + 8 + 2 * t), 0x5410);
  } else {
    return From::load16(row);
  }
}

/// Bytes 2 sub and 2 sub + 1 of two words.
__device__ __forceinline__ unsigned two_bytes(unsigned low, unsigned high, int sub) {
  return (sub < 2 ? low : high) >> (16 * (sub % 2)) & 0xffffu;
}

// ANCHOR: tile_q6_k
struct TileQ6_K : PlainCodes {
  using Block = BlockQ6_K;
  static constexpr Plan kShort = {8, 3, 2, 3}, kLong = {12, 3, 1, 3};
  static constexpr int kZero = 32;
  static constexpr bool kMin = false, kHalves = true;
  static constexpr int kMostProduct = 32 * 128;
  template <int NT>
  struct Raw {
    uint4 low[4];   // row g, then row g + 8: words t, t + 4, t + 8, t + 12 of each half's 64 bytes
    uint4 high[2];  // rows g and g + 8: words t and t + 4 of each half's 32 bytes
    SubBlockPairs<NT> scale[2];  // rows g and g + 8: sixteen int8
    unsigned d;
    template <class From>
    __device__ __forceinline__ void load(const unsigned char* tile, int lane) {
#pragma unroll
      for (int v = 0; v < 4; ++v) low[v] = From::load16(tile + 512 * v + 16 * lane);
      high[0] = From::load16(tile + 2048 + 16 * lane);
      high[1] = From::load16(tile + 2560 + 16 * lane);
      scale[0] = load_pairs<NT, From>(tile + 3072 + lane / 4 * 16, lane % 4);
      scale[1] = load_pairs<NT, From>(tile + 3200 + lane / 4 * 16, lane % 4);
      d = From::load4(tile + 3328 + lane / 4 * 4);
    }
  };
  /// Sub-block S = 4 half + k: low bits in words 0 and 1 (k even) or 2 and 3 of the half, in its low nibbles for k < 2;
  /// two high bits at 2 k.
  template <int S, class R>
  static __device__ __forceinline__ void codes(const R& r, std::uint32_t (&a)[4]) {
    constexpr int HALF = S / 4, K = S % 4, I = K % 2 * 2;
    const unsigned w[4] = {part(r.low[HALF], I), part(r.low[2 + HALF], I), part(r.low[HALF], I + 1),
                           part(r.low[2 + HALF], I + 1)};
    const unsigned h[4] = {part(r.high[0], 2 * HALF), part(r.high[1], 2 * HALF),
                           part(r.high[0], 2 * HALF + 1), part(r.high[1], 2 * HALF + 1)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = (K < 2 ? low_nibbles(w[i]) : high_nibbles(w[i])) |
             ((K < 2 ? h[i] << (4 - 2 * K) : h[i] >> (2 * K - 4)) & 0x30303030u);
    }
  }
  template <int H, class R>
  static __device__ __forceinline__ IntScales scales(const R& r, int sub) {
    IntScales s;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const unsigned two = two_bytes(part(r.scale[row], 2 * H), part(r.scale[row], 2 * H + 1), sub);
      s.d[row][0] = static_cast<signed char>(two & 0xffu);
      s.d[row][1] = static_cast<signed char>(two >> 8);
    }
    return s;
  }
  static __device__ __forceinline__ OwnScales own(const Raw<1>& r) { return {{r.scale[0], r.scale[1]}, {}}; }
  template <class R>
  static __device__ __forceinline__ FloatScales units(const R& r) {
    return {{low_half(r.d), high_half(r.d)}, {}};
  }
};
// ANCHOR_END: tile_q6_k

// ANCHOR: tile_q2_k
struct TileQ2_K : PlainCodes {
  using Block = BlockQ2_K;
  static constexpr Plan kShort = {8, 5, 3, 1}, kLong = {16, 5, 1, 1};
  static constexpr int kZero = 0;
  static constexpr bool kMin = true, kHalves = true;
  template <int NT>
  struct Raw {
    uint4 w[2];                  // rows g and g + 8
    SubBlockPairs<NT> scale[2];  // rows g and g + 8: a scale in the low nibble, a minimum in the high one
    uint2 dm;                    // d and dmin of rows g and g + 8
    template <class From>
    __device__ __forceinline__ void load(const unsigned char* tile, int lane) {
      w[0] = From::load16(tile + 16 * lane);
      w[1] = From::load16(tile + 512 + 16 * lane);
      scale[0] = load_pairs<NT, From>(tile + 1024 + lane / 4 * 16, lane % 4);
      scale[1] = load_pairs<NT, From>(tile + 1152 + lane / 4 * 16, lane % 4);
      dm = From::load8(tile + 1280 + lane / 4 * 8);
    }
  };
  template <int S, class R>
  static __device__ __forceinline__ void codes(const R& r, std::uint32_t (&a)[4]) {
    constexpr int I = S / 4 * 2, SHIFT = S % 4 * 2;
    a[0] = part(r.w[0], I) >> SHIFT & 0x03030303u;
    a[1] = part(r.w[1], I) >> SHIFT & 0x03030303u;
    a[2] = part(r.w[0], I + 1) >> SHIFT & 0x03030303u;
    a[3] = part(r.w[1], I + 1) >> SHIFT & 0x03030303u;
  }
  static constexpr bool kPlaced = true;
  static constexpr int kMostProduct = 3 * 15;
  static __host__ __device__ constexpr int place(int sub) { return sub % 4 == 3 ? 0 : sub % 4 * 2; }
  static __host__ __device__ constexpr int zero(int /*sub*/) { return 0; }
  template <int S, class R>
  static __device__ __forceinline__ void placed(const R& r, unsigned /*signs*/, std::uint32_t (&a)[4]) {
    constexpr int I = S / 4 * 2, DOWN = S % 4 == 3 ? 6 : 0;  // the highest ones would be a byte's sign
    constexpr unsigned MASK = 0x03030303u << place(S);
    a[0] = part(r.w[0], I) >> DOWN & MASK;
    a[1] = part(r.w[1], I) >> DOWN & MASK;
    a[2] = part(r.w[0], I + 1) >> DOWN & MASK;
    a[3] = part(r.w[1], I + 1) >> DOWN & MASK;
  }
  static __device__ __forceinline__ OwnScales own(const Raw<1>& r) {
    return {{r.scale[0] & 0x0f0f0f0fu, r.scale[1] & 0x0f0f0f0fu},
            {r.scale[0] >> 4 & 0x0f0f0f0fu, r.scale[1] >> 4 & 0x0f0f0f0fu}};
  }
  template <int H, class R>
  static __device__ __forceinline__ IntScales scales(const R& r, int sub) {
    IntScales s;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const unsigned two = two_bytes(part(r.scale[row], 2 * H), part(r.scale[row], 2 * H + 1), sub);
      s.d[row][0] = static_cast<int>(two & 15u);
      s.d[row][1] = static_cast<int>(two >> 8 & 15u);
      s.min[row][0] = static_cast<int>(two >> 4 & 15u);
      s.min[row][1] = static_cast<int>(two >> 12);
    }
    return s;
  }
  template <class R>
  static __device__ __forceinline__ FloatScales units(const R& r) {
    return {{low_half(r.dm.x), low_half(r.dm.y)}, {high_half(r.dm.x), high_half(r.dm.y)}};
  }
};
// ANCHOR_END: tile_q2_k

// ANCHOR: tile_q3_k
struct TileQ3_K : PlainCodes {
  using Block = BlockQ3_K;
  static constexpr Plan kShort = {8, 4, 3, 2}, kLong = {16, 4, 1, 2};
  static constexpr int kZero = 4;
  static constexpr bool kMin = false, kHalves = true;
  /// Four low bits of every scale, its two high bits, and d of both rows: a row's twelve bytes of scales are apart.
  struct Heads {
    uint4 head;            // three words of row g's scales, then d of both rows
    uint2 scale8;          // two words of row g + 8's scales
    unsigned scale8_high;  // the third
    template <class From>
    __device__ __forceinline__ void load(const unsigned char* heads, int lane) {
      head = From::load16(heads + lane / 4 * 16);
      scale8 = From::load8(heads + 128 + lane / 4 * 8);
      scale8_high = From::load4(heads + 192 + lane / 4 * 4);
    }
  };
  /// With one token: of sub-blocks t and 4 + t.
  struct OwnHeads {
    // Of rows g and g + 8, two bytes each. Low bits: of one sub-block in low nibbles, of the other in high ones. High bits:
    // in bits 0 and 1, and in bits 4 and 5.
    unsigned low[2], high[2];
    unsigned d;  // of both rows
    template <class From>
    __device__ __forceinline__ void load(const unsigned char* heads, int lane) {
      const int g = lane / 4, t = lane % 4;
      low[0] = From::load2(heads + g * 16 + 2 * t);
      high[0] = From::load2(heads + g * 16 + 8 + t % 2 * 2) >> (t / 2 * 2);
      low[1] = From::load2(heads + 128 + g * 8 + 2 * t);
      high[1] = From::load2(heads + 192 + g * 4 + t % 2 * 2) >> (t / 2 * 2);
      d = From::load4(heads + g * 16 + 12);
    }
  };
  template <int NT>
  struct Raw : std::conditional_t<NT == 1, OwnHeads, Heads> {
    uint4 w[3];  // word i: of operand i
    template <class From>
    __device__ __forceinline__ void load(const unsigned char* tile, int lane) {
#pragma unroll
      for (int v = 0; v < 3; ++v) w[v] = From::load16(tile + 512 * v + 16 * lane);
      std::conditional_t<NT == 1, OwnHeads, Heads>::template load<From>(tile + 1536, lane);
    }
  };
  /// A byte of vector v: codes of sub-blocks v and 4 + v, three bits each. The upper two bits are left: those of vector 0
  /// are the upper ones of sub-block 3, those of vector 2 of sub-block 7, and vector 1 has the lowest ones of both.
  template <int S, class R>
  static __device__ __forceinline__ void codes(const R& r, std::uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (S % 4 == 3) {
        a[i] = (part(r.w[S / 4 * 2], i) >> 5 & 0x06060606u) | (part(r.w[1], i) >> (7 - S / 4) & 0x01010101u);
      } else {
        a[i] = part(r.w[S % 4], i) >> (S / 4 * 3) & 0x07070707u;
      }
    }
  }
  static constexpr bool kPlaced = true;
  static constexpr int kMostProduct = 4 * 32;
  static __host__ __device__ constexpr int place(int sub) { return sub % 4 == 3 ? 5 : sub / 4 * 3; }
  static __host__ __device__ constexpr int zero(int sub) { return sub % 4 == 3 ? 0 : kZero; }
  template <int S, class R>
  static __device__ __forceinline__ void placed(const R& r, unsigned signs, std::uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (S % 4 == 3) {
        const unsigned lowest = (part(r.w[1], i) >> (2 - S / 4) & 0x20202020u) | signs;
        a[i] = (part(r.w[S / 4 * 2], i) & 0xc0c0c0c0u) ^ lowest;
      } else {
        a[i] = part(r.w[S % 4], i) & 0x07070707u << place(S);
      }
    }
  }
  static __device__ __forceinline__ OwnScales own(const Raw<1>& r) {
    // Bytes a and b: the first sub-block's halves in low nibbles and the second one's in high ones, as are two bits above
    // each. 32 less, without a borrow from one byte to the next.
    OwnScales s{};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const unsigned low = (r.low[row] | r.low[row] << 12) & 0x0f0f0f0fu;
      const unsigned high = (r.high[row] << 4 | r.high[row] << 16) & 0x30303030u;
      s.d[row] = ((low | high | 0x80808080u) - 0x20202020u) ^ 0x80808080u;
    }
    return s;
  }
  template <int H>
  static __device__ __forceinline__ IntScales scales(const Raw<8>& r, int sub) {
    // Scale j = 8 H + 2 sub: four low bits in a nibble of byte j % 8, low nibbles for j < 8; two high bits at
    // 2 (j / 4) of byte 8 + j % 4.
    IntScales s;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const unsigned low = row == 0 ? r.head.x : r.scale8.x, low4 = row == 0 ? r.head.y : r.scale8.y;
      const unsigned high = row == 0 ? r.head.z : r.scale8_high;
      const unsigned two = two_bytes(low, low4, sub) >> (4 * H);
      const unsigned top = high >> (16 * (sub % 2) + 4 * H + 2 * (sub / 2));
      s.d[row][0] = static_cast<int>((two & 15u) | (top << 4 & 48u)) - 32;
      s.d[row][1] = static_cast<int>((two >> 8 & 15u) | (top >> 4 & 48u)) - 32;
    }
    return s;
  }
  static __device__ __forceinline__ FloatScales units(const Raw<1>& r) {
    return {{low_half(r.d), high_half(r.d)}, {}};
  }
  static __device__ __forceinline__ FloatScales units(const Raw<8>& r) {
    return {{low_half(r.head.w), high_half(r.head.w)}, {}};
  }
};
// ANCHOR_END: tile_q3_k

// ANCHOR: tile_iq4_xs
struct TileIQ4_XS : PlainCodes {
  using Block = BlockIQ4_XS;
  static constexpr Plan kShort = {8, 3, 3, 2}, kLong = {16, 3, 1, 2};
  static constexpr int kZero = 0;
  static constexpr bool kMin = false, kHalves = false;
  template <int NT>
  struct Raw {
    uint4 w[4];  // row g, then row g + 8: word t of four sub-blocks each
    uint4 head;  // of rows g and g + 8: d and high bits of the scales, then low ones
    template <class From>
    __device__ __forceinline__ void load(const unsigned char* tile, int lane) {
#pragma unroll
      for (int v = 0; v < 4; ++v) w[v] = From::load16(tile + 512 * v + 16 * lane);
      head = From::load16(tile + 2048 + lane / 4 * 16);
    }
  };
  template <int S, class R>
  static __device__ __forceinline__ void codes(const R& r, std::uint32_t (&a)[4]) {
    iq4_bytes(part(r.w[S / 4], S % 4), a[0], a[2]);
    iq4_bytes(part(r.w[2 + S / 4], S % 4), a[1], a[3]);
  }
  static constexpr bool kTables = true;
  template <int S, class R>
  static __device__ __forceinline__ void tables(const R& r, const unsigned (&table)[2],
                                                std::uint32_t (&a)[2][4]) {
    iq4_operands(part(r.w[S / 4], S % 4), part(r.w[2 + S / 4], S % 4), table, a);
  }
  template <int H, class R>
  static __device__ __forceinline__ FloatScales scales(const R& r, int sub) {
    // 32 more than a scale, below the exponent of 2^23: no conversion.
    const int at = 4 * H + sub;
    const auto scale = [at](unsigned high, unsigned low) {
      const unsigned biased = (low >> (4 * at) & 15u) | (high >> (12 + 2 * at) & 48u) | 0x4b000000u;
      return low_half(high) * (__uint_as_float(biased) - 8388640.0f);
    };
    return {{scale(r.head.x, r.head.y), scale(r.head.z, r.head.w)}, {}};
  }
};
// ANCHOR_END: tile_iq4_xs

/// Calls f with the format of a type that has tiles; Status of an error for one that has none.
template <class F>
Status with_tile_format(WeightType type, F&& f) {
  switch (type) {
    case WeightType::q4_0:
      return f(TileQ4_0{});
    case WeightType::q4_1:
      return f(TileQ4_1{});
    case WeightType::q5_0:
      return f(TileQ5_0{});
    case WeightType::q5_1:
      return f(TileQ5_1{});
    case WeightType::q8_0:
      return f(TileQ8_0{});
    case WeightType::q2_k:
      return f(TileQ2_K{});
    case WeightType::q3_k:
      return f(TileQ3_K{});
    case WeightType::q4_k:
      return f(TileQ4_K{});
    case WeightType::q5_k:
      return f(TileQ5_K{});
    case WeightType::q6_k:
      return f(TileQ6_K{});
    case WeightType::iq4_nl:
      return f(TileIQ4_NL{});
    case WeightType::iq4_xs:
      return f(TileIQ4_XS{});
    case WeightType::f32:
    case WeightType::f16:
    case WeightType::bf16:
      break;
  }
  return Status::error(std::string("tiles: ") + info(type).name +
                       " weights have no blocks; types with blocks of 32 or 256 have tiles");
}

// A tile times activations ---------------------------------------------------------------------------------------------

/// Activations' scale and sums of codes 0..15 and 16..31 of a block.
struct ActsScale {
  float d;
  unsigned sums;  // two int16
  /// add + low * the first sum + high * the second. @param factors low and high, two int8 of a word
  __device__ __forceinline__ int sum(int factors, int add = 0) const {
#if defined(__CUDACC__)
    return __dp2a_lo(static_cast<int>(sums), factors, add);
#else
    return add + static_cast<signed char>(factors & 0xff) * static_cast<short>(sums & 0xffffu) +
           static_cast<signed char>(factors >> 8 & 0xff) * (static_cast<int>(sums) >> 16);
#endif
  }
  template <int LOW, int HIGH>
  __device__ __forceinline__ int sum(int add = 0) const {
    return sum((LOW & 0xff) | (HIGH & 0xff) << 8, add);
  }
  /// The first sum times byte 2 H of a word, plus the second one times the byte after it.
  template <int H>
  __device__ __forceinline__ int halves(unsigned factors) const {
#if defined(__CUDACC__)
    return H == 0 ? __dp2a_lo(static_cast<int>(sums), static_cast<int>(factors), 0)
                  : __dp2a_hi(static_cast<int>(sums), static_cast<int>(factors), 0);
#else
    return sum(static_cast<int>(factors >> (16 * H) & 0xffffu));
#endif
  }
};

/// An integer of less than 2^22 that is added to the bits of 1.5 * 2^23 makes the bits of 1.5 * 2^23 + the integer: sums
/// that begin with it are floats at the end, but for a subtraction.
inline constexpr int kFloatBits = 0x4b400000;
__device__ __forceinline__ float float_of_bits(int sum) {
  return __uint_as_float(static_cast<unsigned>(sum)) - 12582912.0f;
}

/// A lane's sums: by sub-block modulo four (with one token: the lane's own only), row, token.
template <int NT>
struct LaneSums {
  static constexpr int SUBS = NT == 1 ? 1 : 4, COLS = NT == 1 ? 1 : 2;
  float v[SUBS][2][COLS] = {};
  /// The four together, in one order.
  __device__ __forceinline__ float total(int row, int col) const {
    if constexpr (NT == 1) {
      float s = v[0][row][col];
      s += __shfl_xor_sync(kAllLanes, s, 1);
      s += __shfl_xor_sync(kAllLanes, s, 2);
      return s;
    } else {
      return (v[0][row][col] + v[1][row][col]) + (v[2][row][col] + v[3][row][col]);
    }
  }
};

/// A value that the compiler must keep in a register: it takes it for the result of a shuffle. A constant would be moved
/// to one before every use.
__device__ __forceinline__ unsigned kept(unsigned x) {
  return __shfl_sync(kAllLanes, x, static_cast<int>(threadIdx.x % kWarp));
}

/// The same of a constant, which the compiler would see through: a block has fewer than 2^16 threads.
__device__ __forceinline__ unsigned kept_constant(unsigned x) { return x + (kept(threadIdx.x) >> 16); }

/// A place in shared memory whose address stays in a register: the compiler would make it up again for every load, beginning
/// with the block's number in its cluster.
struct SharedPlace {
#if defined(__CUDACC__)
  std::uint32_t at;
  __device__ __forceinline__ SharedPlace operator+(int bytes) const {
    return {at + static_cast<std::uint32_t>(bytes)};
  }
  __device__ __forceinline__ void set(const unsigned char* p) { at = kept(shared_address(p)); }
  __device__ __forceinline__ uint2 load8(int offset) const {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "r"(at + static_cast<std::uint32_t>(offset))
                 : "memory");
    return v;
  }
  /// ldmatrix<4>
  __device__ __forceinline__ void load_rows(std::uint32_t (&b)[4], int offset) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(at + static_cast<std::uint32_t>(offset))
                 : "memory");
  }
#else
  const unsigned char* at;
  SharedPlace operator+(int bytes) const { return {at + bytes}; }
  void set(const unsigned char* p) { at = p; }
  uint2 load8(int offset) const { return FromShared::load8(at + offset); }
  void load_rows(std::uint32_t (&b)[4], int offset) const { ldmatrix<4>(b, at + offset); }
#endif
};
/// Eight bytes from a pointer, or from a SharedPlace.
__device__ __forceinline__ uint2 load8_at(const unsigned char* p, int offset) {
  return FromShared::load8(p + offset);
}
__device__ __forceinline__ uint2 load8_at(const SharedPlace& p, int offset) { return p.load8(offset); }

/// One token's activations as the instruction's B. It has eight columns, and there is one token: so columns 2 S and 2 S + 1
/// are sub-block S of four, and nothing elsewhere. All four products add to the same registers, and lane 4 g + t, which
/// has columns 2 t and 2 t + 1, finds its own sub-block there. Of types with two scales in a sub-block the first of its
/// columns is the first half, and the second one the second.
///
/// In shared memory a block of 32 codes is two rows of 16 bytes, words 0..3 and 4..7, and ldmatrix brings four rows of
/// eight columns: of sub-blocks 0 and 1, then of 2 and 3. A lane has the address of a row of each: a block's, or zeros.
struct Columns {
  static constexpr int kZeros = 256;  // bytes: rows of two groups of four sub-blocks
  SharedPlace row[2];                 // of sub-blocks 0 and 1, and 2 and 3
  int stride[2];                      // of a step: zeros stay where they are

  /// @param codes of the step's first block @param zeros kZeros bytes @param step_bytes codes of a step
  /// @tparam HALVES whether a sub-block has two scales
  template <bool HALVES>
  __device__ __forceinline__ void begin(const unsigned char* codes, const unsigned char* zeros,
                                        int step_bytes, int lane) {
    const int matrix = lane / 8, column = lane % 8, part = matrix % 2;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int s = 2 * pair + matrix / 2;
      const bool mine = column / 2 == s && (!HALVES || column % 2 == part);
      // Zeros of other banks than the two rows that are not.
      row[pair].set(mine ? codes + s * 32 + part * 16 : zeros + (2 * s + part + 1) % 8 * 16);
      stride[pair] = mine ? step_bytes : 0;
    }
  }
  /// Fragments of sub-blocks 2 pair and 2 pair + 1 of group H. @param step from the first one on
  template <int H>
  __device__ __forceinline__ void load(int pair, int step, std::uint32_t (&b)[4]) const {
    row[pair].load_rows(b, step * stride[pair] + H * 128);
  }
};
/// Where a lane reads activations: of one token as Columns has it; of eight those of token g, word t, [step][pairs][8][4][16].
template <int NT>
struct Codes {
  const unsigned char* at;
};
template <>
struct Codes<1> : Columns {};

/// Where codes of sub-block `sub` of a tile stand in their bytes, as they are multiplied.
template <class Format>
__host__ __device__ constexpr int place_of(int sub) {
  if constexpr (Format::kPlaced) return Format::place(sub);
  return 0;
}
/// And what they are then too large by.
template <class Format>
__host__ __device__ constexpr int zero_of(int sub) {
  if constexpr (Format::kPlaced) return Format::zero(sub) << Format::place(sub);
  return Format::kZero;
}

/// With eight tokens, what sums of types with a scale for 32 codes are still to be multiplied with: all their codes stand in
/// the same place.
template <class Format, int NT>
__host__ __device__ constexpr float sums_down() {
  return NT > 1 && !Format::kHalves ? 1.0f / static_cast<float>(1 << place_of<Format>(0)) : 1.0f;
}

/// What a lane needs for every tile.
template <class Format>
struct LaneConstants {
  float down[2] = {1.0f, 1.0f};  // with one token: takes off how high codes of sub-blocks t and 4 + t stand
  int zero[2] = {};              // and what is added to them
  unsigned table[2] = {};        // of tables: the first word of each
  unsigned signs = 0;  // of placed: of all bytes; in a register, as an instruction has room for one constant

  __device__ __forceinline__ explicit LaneConstants(int t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (Format::kPlaced) down[h] = 1.0f / static_cast<float>(1 << Format::place(4 * h + t));
      zero[h] = -zero_of<Format>(4 * h + t);
    }
    if constexpr (Format::kPlaced) signs = kept_constant(0x80808080u);
    if constexpr (Format::kTables) table[0] = kept_constant(kIq4Below), table[1] = kept_constant(kIq4Above);
  }
};

/// A operands of sub-block S.
template <class Format, int S, class R>
__device__ __forceinline__ void operand(const R& r, [[maybe_unused]] const LaneConstants<Format>& constants,
                                        std::uint32_t (&a)[4]) {
  if constexpr (Format::kPlaced) {
    Format::template placed<S>(r, constants.signs, a);
  } else {
    Format::template codes<S>(r, a);
  }
}
/// sums += sub-block S of a tile times b.
template <class Format, int S, class R>
__device__ __forceinline__ void add_product(const R& r,
                                            [[maybe_unused]] const LaneConstants<Format>& constants,
                                            const std::uint32_t (&b)[2], int (&sums)[4]) {
  if constexpr (Format::kTables) {
    std::uint32_t a[2][4];
    Format::template tables<S>(r, constants.table, a);
    mma_m16n8k32_s8(sums, a[0], b);
    mma_m16n8k32_s8(sums, a[1], b);
  } else {
    std::uint32_t a[4];
    operand<Format, S>(r, constants, a);
    mma_m16n8k32_s8(sums, a, b);
  }
}
/// Sub-block S in halves, from what `low` and `high` are.
template <class Format, int S, class R>
__device__ __forceinline__ void add_halves(const R& r,
                                           [[maybe_unused]] const LaneConstants<Format>& constants,
                                           const std::uint32_t (&b)[2], int (&low)[4], int (&high)[4]) {
  std::uint32_t a[4];
  operand<Format, S>(r, constants, a);
  mma_m16n8k16_s8(low, {a[0], a[1]}, {b[0]});
  mma_m16n8k16_s8(high, {a[2], a[3]}, {b[1]});
}

/// Whether 32 products of a code at its place, an activation and a scale fit float_of_bits.
template <class Format>
__host__ __device__ constexpr bool fits_float_bits(int place) {
  return static_cast<long long>(Format::kMostProduct) * 32 * 127 << place < 1 << 22;
}
/// s0 * c0 + s1 * c1 as a float, exactly.
template <bool BITS>
__device__ __forceinline__ float float_of_two(int s0, int c0, int s1, int c1) {
  return BITS ? float_of_bits(s0 * c0 + (s1 * c1 + kFloatBits)) : static_cast<float>(s0 * c0 + s1 * c1);
}

// ANCHOR: multiply_tile
/// sums += tile . activations of one step.
/// @param scales the lane's place in the step's scales: with one token of block t, with eight of token 2 t
template <class Format, int NT, class Scales>
__device__ __forceinline__ void multiply_tile(const typename Format::template Raw<NT>& r,
                                              const Codes<NT>& codes, const Scales& scales, int step, int t,
                                              const LaneConstants<Format>& constants, LaneSums<NT>& sums) {
  constexpr int HALVES = Tile<typename Format::Block>::kSteps / 4;
  constexpr bool TWO = Format::kHalves;  // scales in a sub-block, and a unit for both halves of the tile
  constexpr int SUBS = LaneSums<NT>::SUBS, COLS = LaneSums<NT>::COLS;
  [[maybe_unused]] float d_sum[SUBS][2][COLS], min_sum[SUBS][2][COLS];  // in these units
  const auto half = [&]<int H>() {
    // What 32 codes and a scale for each half of them are, times the activations' scale.
    [[maybe_unused]] const auto add = [](float& to, float scale, float sum) {
      to = H == 0 ? scale * sum : fmaf(scale, sum, to);
    };
    if constexpr (NT == 1) {
      // 1. The activations' scale of sub-block t.
      const uint2 v = load8_at(scales, H * 32);
      const ActsScale x = {__uint_as_float(v.x), v.y};
      const float d = Format::kPlaced ? x.d * constants.down[H] : x.d;

      // 2. Four sub-blocks of 32 codes, sixteen rows: exact integers, in two chains that do not wait for each other. Codes of a
      //    table are two products each, and those of IQ4_XS with their scales leave no registers for a second chain.
      constexpr bool CHAINS = !Format::kTables || HALVES == 1;
      int c[4] = {}, second[4] = {};
      int(&other)[4] = CHAINS ? second : c;
      std::uint32_t b[4];
      codes.template load<H>(0, step, b);
      add_product<Format, 4 * H>(r, constants, {b[0], b[1]}, c);
      add_product<Format, 4 * H + 1>(r, constants, {b[2], b[3]}, other);
      codes.template load<H>(1, step, b);
      add_product<Format, 4 * H + 2>(r, constants, {b[0], b[1]}, c);
      add_product<Format, 4 * H + 3>(r, constants, {b[2], b[3]}, other);
#pragma unroll
      for (int i = 0; CHAINS && i < 4; ++i) c[i] += second[i];

      // 3. Scales of sub-block t.
      if constexpr (TWO) {
        const OwnScales own = Format::own(r);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          int sum = signed_byte<2 * H>(own.d[row]) * c[2 * row] +
                    signed_byte<2 * H + 1>(own.d[row]) * c[2 * row + 1];
          if constexpr (Format::kZero != 0) sum += constants.zero[H] * x.template halves<H>(own.d[row]);
          add(d_sum[0][row][0], d, static_cast<float>(sum));
          if constexpr (Format::kMin)
            add(min_sum[0][row][0], x.d, static_cast<float>(x.template halves<H>(own.min[row])));
        }
      } else {
        constexpr int ZERO = zero_of<Format>(0);
        const FloatScales s = Format::template scales<H>(r, t);
        [[maybe_unused]] float sum = 0.0f;  // what a minimum is multiplied with
        if constexpr (Format::kMin) sum = x.d * static_cast<float>(x.sum<1, 1>());
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          float& to = sums.v[0][row][0];
          const int product = ZERO == 0 ? c[2 * row] : x.sum<-ZERO, -ZERO>(c[2 * row]);
          to = fmaf(s.d[row] * d, static_cast<float>(product), to);
          if constexpr (Format::kMin) to = fmaf(s.min[row], sum, to);
        }
      }
    } else {
      // The same for two tokens and all four sub-blocks.
      ActsScale x[4][2];
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
#pragma unroll
        for (int col = 0; col < 2; ++col) {
          const uint4 v = *reinterpret_cast<const uint4*>(scales + (2 * H + n / 2) * NT * 16 + col * 16);
          x[n][col] = {__uint_as_float(v.x), v.y};
          x[n + 1][col] = {__uint_as_float(v.z), v.w};
        }
      }
      const auto sub_block = [&]<int S>(std::uint32_t q0, std::uint32_t q1) {
        constexpr int PLACE = place_of<Format>(4 * H + S), ZERO = zero_of<Format>(4 * H + S);
        [[maybe_unused]] constexpr float DOWN = 1.0f / static_cast<float>(1 << PLACE);
        int low[4];
        [[maybe_unused]] int high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const ActsScale& at = x[S][i % 2];
          if constexpr (TWO) {
            low[i] = ZERO == 0 ? 0 : at.template sum<-ZERO, 0>();
            high[i] = ZERO == 0 ? 0 : at.template sum<0, -ZERO>();
          } else {
            low[i] = ZERO == 0 ? kFloatBits : at.template sum<-ZERO, -ZERO>(kFloatBits);
          }
        }
        if constexpr (TWO) {
          add_halves<Format, 4 * H + S>(r, constants, {q0, q1}, low, high);
        } else {
          add_product<Format, 4 * H + S>(r, constants, {q0, q1}, low);
        }
        const auto s = Format::template scales<H>(r, S);
#pragma unroll
        for (int col = 0; col < 2; ++col) {
          const ActsScale& at = x[S][col];
          const float d = TWO && Format::kPlaced ? at.d * DOWN : at.d;
          [[maybe_unused]] float sum = 0.0f;
          if constexpr (Format::kMin && !TWO) sum = at.d * static_cast<float>(at.template sum<1, 1>());
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const int i = 2 * row + col;
            if constexpr (TWO) {
              add(d_sum[S][row][col], d,
                  float_of_two<fits_float_bits<Format>(PLACE)>(s.d[row][0], low[i], s.d[row][1], high[i]));
              if constexpr (Format::kMin) {
                add(min_sum[S][row][col], at.d,
                    float_of_two<true>(s.min[row][0], at.template sum<1, 0>(), s.min[row][1],
                                       at.template sum<0, 1>()));
              }
            } else {
              float& to = sums.v[S][row][col];
              to = fmaf(s.d[row] * d, float_of_bits(low[i]), to);
              if constexpr (Format::kMin) to = fmaf(s.min[row], sum, to);
            }
          }
        }
      };
      const unsigned char* const at = codes.at + step * (HALVES * 2 * NT * 64);
      const uint4 q0 = *reinterpret_cast<const uint4*>(at + (2 * H) * NT * 64);
      const uint4 q1 = *reinterpret_cast<const uint4*>(at + (2 * H + 1) * NT * 64);
      sub_block.template operator()<0>(q0.x, q0.y);
      sub_block.template operator()<1>(q0.z, q0.w);
      sub_block.template operator()<2>(q1.x, q1.y);
      sub_block.template operator()<3>(q1.z, q1.w);
    }
  };
  half.template operator()<0>();
  if constexpr (HALVES == 2) half.template operator()<1>();
  if constexpr (TWO) {
    const FloatScales unit = Format::units(r);
#pragma unroll
    for (int i = 0; i < SUBS * 2 * COLS; ++i) {
      const int sub = i / (2 * COLS), row = i / COLS % 2, col = i % COLS;
      float& to = sums.v[sub][row][col];
      to = fmaf(unit.d[row], d_sum[sub][row][col], to);
      if constexpr (Format::kMin) to = fmaf(-unit.min[row], min_sum[sub][row][col], to);
    }
  }
}
// ANCHOR_END: multiply_tile

}  // namespace ladder::tiles
