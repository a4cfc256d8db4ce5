// How a warp multiplies a tile of each storage type (tiles.cuh) with int8 activations (tile_acts.cuh): the part of
// mmvq_tiles that differs from type to type.
//
// A format is a struct with
//   Block      the type's block
//   kInFlight  tiles that a warp has under way
//   kWarps, kWarpsPerSm  warps of a block, and how many of a launch a multiprocessor works with
//   kResidentWarps  how many it has registers for: of a launch and of the next, which waits with its first tiles
//   kZero      what unsigned codes are too large by
//   kMin       whether a minimum is added to what codes mean
//   kHalves    whether 16 codes have a scale, not 32
//   Raw        a lane's share of a tile, in registers: codes, and scales as NT tokens want them
//   load       tile -> Raw, in loads of 16 bytes where there are that many
//   codes<S>   Raw -> the instruction's operand for sub-block S: 32 codes of 16 rows, one byte each
//   scales     Raw -> scales of a sub-block for rows g and g + 8 (types with blocks of 32: f32, else integers)
//
// Lane 4g + t has rows g and g + 8 of every product. With eight tokens it has those of tokens 2t and 2t + 1, and scales
// all sub-blocks of them. With one token all four lanes of a row have the same product: so each of them scales one
// sub-block in four, and they add their sums at the end. The additions are the same ones: a token's sums are kept apart
// by sub-block, modulo four, in either case.
#pragma once

#include <cstdint>

#include "kernels/device/cuda.cuh"
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
};

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

/// Scales of a sub-block, for rows g and g + 8.
struct FloatScales {
  float d[2], min[2];
};
struct IntScales {
  int d[2][2];    // [row][half]; a scale of 32 codes in [0]
  int min[2][2];  // the same
};

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
struct TileQ4_0 {
  using Block = BlockQ4_0;
  static constexpr int kInFlight = 4, kWarps = 16, kWarpsPerSm = 16, kResidentWarps = 32;
  static constexpr int kZero = 8;
  static constexpr bool kMin = false, kHalves = false;
  template <int NT>
  using Raw = NibbleRaw<NT, ScalePairs, 1024>;
  template <int S, class R>
  static __device__ __forceinline__ void codes(const R& r, std::uint32_t (&a)[4]) {
    r.template nibbles<S>(a);
  }
  template <class R>
  static __device__ __forceinline__ FloatScales scales(const R& r, int, int sub) {
    return r.scales.of(sub);
  }
};
// ANCHOR_END: tile_q4_0

// ANCHOR: tile_q4_1
struct TileQ4_1 : TileQ4_0 {
  using Block = BlockQ4_1;
  static constexpr int kInFlight = 4, kWarps = 16, kWarpsPerSm = 16, kResidentWarps = 32;
  static constexpr int kZero = 0;
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
  static constexpr int kInFlight = 3, kWarps = 16, kWarpsPerSm = 16, kResidentWarps = 32;
  static constexpr int kZero = 16;
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
  static constexpr int kInFlight = 3, kWarps = 16, kWarpsPerSm = 16, kResidentWarps = 32;
  static constexpr int kZero = 0;
  static constexpr bool kMin = true;
  template <int NT>
  using Raw = FiveBitRaw<NT, ScalesAndMins>;
};
// ANCHOR_END: tile_q5_1

// ANCHOR: tile_q8_0
struct TileQ8_0 : TileQ4_0 {
  using Block = BlockQ8_0;
  static constexpr int kInFlight = 5, kWarps = 8, kWarpsPerSm = 8, kResidentWarps = 16;
  static constexpr int kZero = 0;
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

// ANCHOR: tile_iq4_nl
struct TileIQ4_NL : TileQ4_0 {
  using Block = BlockIQ4_NL;
  static constexpr int kInFlight = 4, kWarps = 16, kWarpsPerSm = 16, kResidentWarps = 32;
  static constexpr int kZero = 0;
  template <int S, class R>
  static __device__ __forceinline__ void codes(const R& r, std::uint32_t (&a)[4]) {
    iq4_bytes(part(r.w[0], S), a[0], a[2]);
    iq4_bytes(part(r.w[1], S), a[1], a[3]);
  }
};
// ANCHOR_END: tile_iq4_nl

// Blocks of 256: integer scales inside, one or two f32 products at the end ---------------------------------------------
// half = 0, 1: the block's eight sub-blocks, four at a time; sub = 0..3 in it.

/// A 6-bit scale and minimum of Q4_K and Q5_K: sub-block 4 half + sub.
__device__ __forceinline__ void scale_min_k4(const uint4& head, int half, int sub, int& scale, int& min) {
  const unsigned a = head.y >> (8 * sub), b = head.z >> (8 * sub), c = head.w >> (8 * sub);
  scale = static_cast<int>(half == 0 ? a & 63u : (c & 15u) | (a >> 2 & 48u));
  min = static_cast<int>(half == 0 ? b & 63u : (c >> 4 & 15u) | (b >> 2 & 48u));
}

// ANCHOR: tile_q4_k
struct TileQ4_K {
  using Block = BlockQ4_K;
  static constexpr int kInFlight = 3, kWarps = 12, kWarpsPerSm = 12, kResidentWarps = 24;
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
  template <class R>
  static __device__ __forceinline__ IntScales scales(const R& r, int half, int sub) {
    IntScales s;
#pragma unroll
    for (int row = 0; row < 2; ++row) scale_min_k4(r.head[row], half, sub, s.d[row][0], s.min[row][0]);
    return s;
  }
  template <class R>
  static __device__ __forceinline__ FloatScales units(const R& r) {
    return {{low_half(r.head[0].x), low_half(r.head[1].x)}, {high_half(r.head[0].x), high_half(r.head[1].x)}};
  }
};
// ANCHOR_END: tile_q4_k

// ANCHOR: tile_q5_k
struct TileQ5_K : TileQ4_K {
  using Block = BlockQ5_K;
  static constexpr int kInFlight = 3, kWarps = 8, kWarpsPerSm = 8, kResidentWarps = 16;
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

/// Bytes 2 sub and 2 sub + 1 of two words.
__device__ __forceinline__ unsigned two_bytes(unsigned low, unsigned high, int sub) {
  return (sub < 2 ? low : high) >> (16 * (sub % 2)) & 0xffffu;
}

// ANCHOR: tile_q6_k
struct TileQ6_K {
  using Block = BlockQ6_K;
  static constexpr int kInFlight = 3, kWarps = 8, kWarpsPerSm = 8, kResidentWarps = 16;
  static constexpr int kZero = 32;
  static constexpr bool kMin = false, kHalves = true;
  template <int NT>
  struct Raw {
    uint4 low[4];    // row g, then row g + 8: words t, t + 4, t + 8, t + 12 of each half's 64 bytes
    uint4 high[2];   // rows g and g + 8: words t and t + 4 of each half's 32 bytes
    uint4 scale[2];  // rows g and g + 8: sixteen int8
    unsigned d;
    template <class From>
    __device__ __forceinline__ void load(const unsigned char* tile, int lane) {
#pragma unroll
      for (int v = 0; v < 4; ++v) low[v] = From::load16(tile + 512 * v + 16 * lane);
      high[0] = From::load16(tile + 2048 + 16 * lane);
      high[1] = From::load16(tile + 2560 + 16 * lane);
      scale[0] = From::load16(tile + 3072 + lane / 4 * 16);
      scale[1] = From::load16(tile + 3200 + lane / 4 * 16);
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
  template <class R>
  static __device__ __forceinline__ IntScales scales(const R& r, int half, int sub) {
    IntScales s;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const unsigned two = two_bytes(part(r.scale[row], 2 * half), part(r.scale[row], 2 * half + 1), sub);
      s.d[row][0] = static_cast<signed char>(two & 0xffu);
      s.d[row][1] = static_cast<signed char>(two >> 8);
    }
    return s;
  }
  template <class R>
  static __device__ __forceinline__ FloatScales units(const R& r) {
    return {{low_half(r.d), high_half(r.d)}, {}};
  }
};
// ANCHOR_END: tile_q6_k

/// Two-bit codes: sub-block S is at 2 (S % 4) of words t and t + 4 of half S / 4.
template <int S>
__device__ __forceinline__ void two_bits(const uint4 (&w)[2], std::uint32_t (&a)[4]) {
  constexpr int I = S / 4 * 2, SHIFT = S % 4 * 2;
  a[0] = part(w[0], I) >> SHIFT & 0x03030303u;
  a[1] = part(w[1], I) >> SHIFT & 0x03030303u;
  a[2] = part(w[0], I + 1) >> SHIFT & 0x03030303u;
  a[3] = part(w[1], I + 1) >> SHIFT & 0x03030303u;
}

// ANCHOR: tile_q2_k
struct TileQ2_K {
  using Block = BlockQ2_K;
  static constexpr int kInFlight = 5, kWarps = 12, kWarpsPerSm = 24, kResidentWarps = 24;
  static constexpr int kZero = 0;
  static constexpr bool kMin = true, kHalves = true;
  template <int NT>
  struct Raw {
    uint4 w[2];      // rows g and g + 8
    uint4 scale[2];  // rows g and g + 8: sixteen bytes, a scale in the low nibble, a minimum in the high one
    uint2 dm;        // d and dmin of rows g and g + 8
    template <class From>
    __device__ __forceinline__ void load(const unsigned char* tile, int lane) {
      w[0] = From::load16(tile + 16 * lane);
      w[1] = From::load16(tile + 512 + 16 * lane);
      scale[0] = From::load16(tile + 1024 + lane / 4 * 16);
      scale[1] = From::load16(tile + 1152 + lane / 4 * 16);
      dm = From::load8(tile + 1280 + lane / 4 * 8);
    }
  };
  template <int S, class R>
  static __device__ __forceinline__ void codes(const R& r, std::uint32_t (&a)[4]) {
    two_bits<S>(r.w, a);
  }
  template <class R>
  static __device__ __forceinline__ IntScales scales(const R& r, int half, int sub) {
    IntScales s;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const unsigned two = two_bytes(part(r.scale[row], 2 * half), part(r.scale[row], 2 * half + 1), sub);
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
struct TileQ3_K {
  using Block = BlockQ3_K;
  static constexpr int kInFlight = 4, kWarps = 12, kWarpsPerSm = 24, kResidentWarps = 24;
  static constexpr int kZero = 4;
  static constexpr bool kMin = false, kHalves = true;
  template <int NT>
  struct Raw {
    uint4 w[2];            // rows g and g + 8
    uint4 third;           // words t and t + 4 of row g, then of row g + 8
    uint4 head;            // three words of row g's scales, then d of both rows
    uint2 scale8;          // two words of row g + 8's scales
    unsigned scale8_high;  // the third
    template <class From>
    __device__ __forceinline__ void load(const unsigned char* tile, int lane) {
      w[0] = From::load16(tile + 16 * lane);
      w[1] = From::load16(tile + 512 + 16 * lane);
      third = From::load16(tile + 1024 + 16 * lane);
      head = From::load16(tile + 1536 + lane / 4 * 16);
      scale8 = From::load8(tile + 1664 + lane / 4 * 8);
      scale8_high = From::load4(tile + 1728 + lane / 4 * 4);
    }
  };
  template <int S, class R>
  static __device__ __forceinline__ void codes(const R& r, std::uint32_t (&a)[4]) {
    two_bits<S>(r.w, a);
    a[0] |= bit_of_bytes<S, 2>(r.third.x);
    a[1] |= bit_of_bytes<S, 2>(r.third.z);
    a[2] |= bit_of_bytes<S, 2>(r.third.y);
    a[3] |= bit_of_bytes<S, 2>(r.third.w);
  }
  template <class R>
  static __device__ __forceinline__ IntScales scales(const R& r, int half, int sub) {
    // Scale j = 8 half + 2 sub: four low bits in a nibble of byte j % 8, low nibbles for j < 8; two high bits at
    // 2 (j / 4) of byte 8 + j % 4.
    IntScales s;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const unsigned low = row == 0 ? r.head.x : r.scale8.x, low4 = row == 0 ? r.head.y : r.scale8.y;
      const unsigned high = row == 0 ? r.head.z : r.scale8_high;
      const unsigned two = two_bytes(low, low4, sub) >> (4 * half);
      const unsigned top = high >> (16 * (sub % 2) + 4 * half + 2 * (sub / 2));
      s.d[row][0] = static_cast<int>((two & 15u) | (top << 4 & 48u)) - 32;
      s.d[row][1] = static_cast<int>((two >> 8 & 15u) | (top >> 4 & 48u)) - 32;
    }
    return s;
  }
  template <class R>
  static __device__ __forceinline__ FloatScales units(const R& r) {
    return {{low_half(r.head.w), high_half(r.head.w)}, {}};
  }
};
// ANCHOR_END: tile_q3_k

// ANCHOR: tile_iq4_xs
struct TileIQ4_XS {
  using Block = BlockIQ4_XS;
  static constexpr int kInFlight = 3, kWarps = 12, kWarpsPerSm = 24, kResidentWarps = 24;
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
  template <class R>
  static __device__ __forceinline__ IntScales scales(const R& r, int half, int sub) {
    IntScales s;
    const int at = 4 * half + sub;
    s.d[0][0] = static_cast<int>((r.head.y >> (4 * at) & 15u) | (r.head.x >> (16 + 2 * at) & 3u) << 4) - 32;
    s.d[1][0] = static_cast<int>((r.head.w >> (4 * at) & 15u) | (r.head.z >> (16 + 2 * at) & 3u) << 4) - 32;
    return s;
  }
  template <class R>
  static __device__ __forceinline__ FloatScales units(const R& r) {
    return {{low_half(r.head.x), low_half(r.head.z)}, {}};
  }
};
// ANCHOR_END: tile_iq4_xs

// A tile times activations ---------------------------------------------------------------------------------------------

/// Activations' scale and sums of codes 0..15 and 16..31 of a block.
struct ActsScale {
  float d;
  int low, high;
};
__device__ __forceinline__ ActsScale acts_scale(uint2 packed) {
  return {__uint_as_float(packed.x), static_cast<short>(packed.y & 0xffffu),
          static_cast<int>(packed.y) >> 16};
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

/// One of four values, by t: two bits, three selections.
__device__ __forceinline__ int choose(int a, int b, int c, int d, int t) {
  const int low = (t & 1) != 0 ? b : a, high = (t & 1) != 0 ? d : c;
  return (t & 2) != 0 ? high : low;
}

// ANCHOR: multiply_tile
/// sums += tile . activations of one step.
/// @param codes, scales the lane's place in the planes of the step's first pair of blocks: of token g % NT, word t; and
///   with one token of block t, with eight of token 2 t
template <class Format, int NT>
__device__ __forceinline__ void multiply_tile(const typename Format::template Raw<NT>& r,
                                              const unsigned char* codes, const unsigned char* scales, int t,
                                              LaneSums<NT>& sums) {
  constexpr int HALVES = Tile<typename Format::Block>::kSteps / 4, SUBS = LaneSums<NT>::SUBS,
                COLS = LaneSums<NT>::COLS;
  constexpr bool K = Format::Block::kElems == 256;
  float block[SUBS][2][COLS] = {}, minima[SUBS][2][COLS] = {};  // of types with blocks of 256
  const auto half = [&]<int H>() {
    // 1. Four sub-blocks of 32 codes, sixteen rows, eight tokens: exact integers. Scales of 16: in two instructions.
    int low[4][4];
    [[maybe_unused]] int high[4][4];
    const auto sub_block = [&]<int S>(uint4 q) {
      std::uint32_t a[4];
      Format::template codes<4 * H + S>(r, a);
      const std::uint32_t b[2] = {S % 2 == 0 ? q.x : q.z, S % 2 == 0 ? q.y : q.w};
      if constexpr (Format::kHalves) {
        mma_m16n8k16_s8_zero(low[S], {a[0], a[1]}, {b[0]});
        mma_m16n8k16_s8_zero(high[S], {a[2], a[3]}, {b[1]});
      } else {
        mma_m16n8k32_s8_zero(low[S], a, b);
      }
    };
    const uint4 q0 = *reinterpret_cast<const uint4*>(codes + (2 * H) * NT * 64);
    const uint4 q1 = *reinterpret_cast<const uint4*>(codes + (2 * H + 1) * NT * 64);
    sub_block.template operator()<0>(q0);
    sub_block.template operator()<1>(q0);
    sub_block.template operator()<2>(q1);
    sub_block.template operator()<3>(q1);

    // 2. Scales. With one token the lane takes sub-block t out of the four.
#pragma unroll
    for (int n = 0; n < SUBS; ++n) {
      const int sub = NT == 1 ? t : n;
      const auto s = Format::scales(r, H, sub);
#pragma unroll
      for (int col = 0; col < COLS; ++col) {
        const unsigned char* at =
            scales + (NT == 1 ? H * 32 : (2 * H + n / 2) * NT * 16 + col * 16 + n % 2 * 8);
        const ActsScale x = acts_scale(*reinterpret_cast<const uint2*>(at));
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int i = 2 * row + col;
          const int c = NT == 1 ? choose(low[0][i], low[1][i], low[2][i], low[3][i], t) : low[n][i];
          if constexpr (Format::kHalves) {
            const int c16 = NT == 1 ? choose(high[0][i], high[1][i], high[2][i], high[3][i], t) : high[n][i];
            const int dot =
                s.d[row][0] * (c - Format::kZero * x.low) + s.d[row][1] * (c16 - Format::kZero * x.high);
            block[n][row][col] += x.d * static_cast<float>(dot);
            if constexpr (Format::kMin) {
              minima[n][row][col] += x.d * static_cast<float>(s.min[row][0] * x.low + s.min[row][1] * x.high);
            }
          } else if constexpr (K) {
            block[n][row][col] += x.d * static_cast<float>(s.d[row][0] * c);
            if constexpr (Format::kMin) {
              minima[n][row][col] += x.d * static_cast<float>(s.min[row][0] * (x.low + x.high));
            }
          } else {
            const int dot = c - Format::kZero * (x.low + x.high);
            sums.v[n][row][col] += s.d[row] * x.d * static_cast<float>(dot);
            if constexpr (Format::kMin) {
              sums.v[n][row][col] += s.min[row] * (x.d * static_cast<float>(x.low + x.high));
            }
          }
        }
      }
    }
  };
  half.template operator()<0>();
  if constexpr (HALVES == 2) half.template operator()<1>();

  // 3. The scales that a block of 256 has for all of its scales.
  if constexpr (K) {
    const FloatScales unit = Format::units(r);
#pragma unroll
    for (int n = 0; n < SUBS; ++n) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int col = 0; col < COLS; ++col) {
          sums.v[n][row][col] += unit.d[row] * block[n][row][col];
          if constexpr (Format::kMin) sums.v[n][row][col] -= unit.min[row] * minima[n][row][col];
        }
      }
    }
  }
}
// ANCHOR_END: multiply_tile

}  // namespace ladder::tiles
