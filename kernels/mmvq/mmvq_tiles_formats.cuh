// How a warp multiplies a tile of each storage type (tiles.cuh) with int8 activations (tile_acts.cuh): the part of
// mmvq_tiles that differs from type to type.
//
// A format is a struct with
//   Block      the type's block
//   kInFlight  tiles that a warp has under way
//   Raw        a lane's share of a tile, in registers
//   load       tile -> Raw, in loads of 16 bytes where there are that many
//   multiply   sums += Raw . activations. sums[0] is row g, sums[1] row g + 8, of lane 4g + t; columns are tokens 2t and
//              2t + 1, or one token, which then all lanes have
//
// The instruction multiplies 16 rows by 32 codes with 8 tokens, exactly. Codes go in unsigned where their zero point is
// not zero; what they are too large by is taken off in the accumulator that the instruction begins with, which has to be
// set to something anyway: -zero * sum(activations).
#pragma once

#include <cstdint>

#include "kernels/device/cuda.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/mmvq/tiles.cuh"

namespace ladder::tiles {

/// 16 bytes of weights, which are read once: past L1, which activations want.
__device__ __forceinline__ uint4 load_once(const unsigned char* p) {
#if defined(__CUDA_ARCH__)
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
#else
  return *reinterpret_cast<const uint4*>(p);
#endif
}
__device__ __forceinline__ uint2 load_once8(const unsigned char* p) {
#if defined(__CUDA_ARCH__)
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(p));
  return v;
#else
  return *reinterpret_cast<const uint2*>(p);
#endif
}
__device__ __forceinline__ unsigned load_once4(const unsigned char* p) {
#if defined(__CUDA_ARCH__)
  unsigned v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
#else
  return *reinterpret_cast<const unsigned*>(p);
#endif
}

/// Word I of four.
template <int I>
__device__ __forceinline__ unsigned part(const uint4& v) {
  static_assert(I >= 0 && I < 4);
  return I == 0 ? v.x : I == 1 ? v.y : I == 2 ? v.z : v.w;
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
/// Byte J of a word: unsigned, signed.
template <int J>
__device__ __forceinline__ int byte_of(unsigned w) {
  return static_cast<int>(w >> (8 * J) & 0xffu);
}
template <int J>
__device__ __forceinline__ int signed_byte_of(unsigned w) {
  return static_cast<signed char>(w >> (8 * J) & 0xffu);
}

/// The activations of two neighbouring blocks, as a lane has them.
template <int COLS>
struct PairActs {
  uint4 q;        // words t and t + 4 of the first block, then of the second, of the lane's token
  uint4 s[COLS];  // scale and sums of the first block, then of the second, of the lane's columns
  template <int J>
  __device__ __forceinline__ void codes(std::uint32_t (&b)[2]) const {
    b[0] = J == 0 ? q.x : q.z;
    b[1] = J == 0 ? q.y : q.w;
  }
  template <int J>
  __device__ __forceinline__ float d(int col) const {
    return __uint_as_float(J == 0 ? s[col].x : s[col].z);
  }
  /// Sums of codes 0..15 and 16..31.
  template <int J>
  __device__ __forceinline__ int low_sum(int col) const {
    return static_cast<short>((J == 0 ? s[col].y : s[col].w) & 0xffffu);
  }
  template <int J>
  __device__ __forceinline__ int high_sum(int col) const {
    return static_cast<int>(J == 0 ? s[col].y : s[col].w) >> 16;
  }
  template <int J>
  __device__ __forceinline__ int sum(int col) const {
    return low_sum<J>(col) + high_sum<J>(col);
  }
};

/// Where a lane finds the activations of a step.
template <int NT>
struct StepActs {
  static constexpr int COLS = NT == 1 ? 1 : 2;
  const unsigned char *codes, *scales;  // of the step's first pair
  template <int P>
  __device__ __forceinline__ PairActs<COLS> pair() const {
    PairActs<COLS> a;
    a.q = *reinterpret_cast<const uint4*>(codes + P * NT * 64);
#pragma unroll
    for (int c = 0; c < COLS; ++c) a.s[c] = *reinterpret_cast<const uint4*>(scales + P * NT * 16 + c * 16);
    return a;
  }
};

/// sums of 32 codes a row and column, begun with -ZERO * sum(activations).
template <int ZERO, int J, int COLS>
__device__ __forceinline__ void dot32(const std::uint32_t (&a)[4], const PairActs<COLS>& x, int (&c)[4]) {
  const int first = ZERO == 0 ? 0 : -ZERO * x.template sum<J>(0);
  const int second = ZERO == 0 || COLS == 1 ? 0 : -ZERO * x.template sum<J>(COLS - 1);
  c[0] = c[2] = first;
  c[1] = c[3] = second;
  std::uint32_t b[2];
  x.template codes<J>(b);
  mma_m16n8k32_s8(c, a, b);
}
/// The same by halves of 16, which have scales of their own.
template <int ZERO, int J, int COLS>
__device__ __forceinline__ void dot16(const std::uint32_t (&a)[4], const PairActs<COLS>& x, int (&low)[4],
                                      int (&high)[4]) {
  low[0] = low[2] = -ZERO * x.template low_sum<J>(0);
  low[1] = low[3] = COLS == 1 ? 0 : -ZERO * x.template low_sum<J>(COLS - 1);
  high[0] = high[2] = -ZERO * x.template high_sum<J>(0);
  high[1] = high[3] = COLS == 1 ? 0 : -ZERO * x.template high_sum<J>(COLS - 1);
  std::uint32_t b[2];
  x.template codes<J>(b);
  const std::uint32_t a_low[2] = {a[0], a[1]}, a_high[2] = {a[2], a[3]};
  const std::uint32_t b_low[1] = {b[0]}, b_high[1] = {b[1]};
  mma_m16n8k16_s8(low, a_low, b_low);
  mma_m16n8k16_s8(high, a_high, b_high);
}

// Blocks of 32: a scale of its own for every instruction --------------------------------------------------------------

/// sums += scale * (activations' scale) * dot, for both rows.
template <int J, int COLS>
__device__ __forceinline__ void add_scaled(float row_g, float row_g8, const PairActs<COLS>& x,
                                           const int (&c)[4], float (&sums)[2][COLS]) {
#pragma unroll
  for (int col = 0; col < COLS; ++col) {
    const float d = x.template d<J>(col);
    sums[0][col] += row_g * d * static_cast<float>(c[col]);
    sums[1][col] += row_g8 * d * static_cast<float>(c[2 + col]);
  }
}
/// sums += minimum * (activations' scale) * sum(activations).
template <int J, int COLS>
__device__ __forceinline__ void add_minimum(float row_g, float row_g8, const PairActs<COLS>& x,
                                            float (&sums)[2][COLS]) {
#pragma unroll
  for (int col = 0; col < COLS; ++col) {
    const float s = x.template d<J>(col) * static_cast<float>(x.template sum<J>(col));
    sums[0][col] += row_g * s;
    sums[1][col] += row_g8 * s;
  }
}

/// Calls f.operator()<0>() .. <N-1>().
template <int N, class F>
__device__ __forceinline__ void unrolled(F&& f) {
  if constexpr (N > 0) {
    unrolled<N - 1>(f);
    f.template operator()<N - 1>();
  }
}

// ANCHOR: tile_q4_0
struct TileQ4_0 {
  using Block = BlockQ4_0;
  static constexpr int kInFlight = 4;
  struct Raw {
    uint4 w[2], d;
  };
  static __device__ __forceinline__ Raw load(const unsigned char* tile, int lane) {
    return {{load_once(tile + 16 * lane), load_once(tile + 512 + 16 * lane)},
            load_once(tile + 1024 + lane / 4 * 16)};
  }
  template <int NT, int COLS>
  static __device__ __forceinline__ void multiply(const Raw& r, const StepActs<NT>& acts,
                                                  float (&sums)[2][COLS]) {
    unrolled<2>([&]<int P>() {  // pairs of blocks
      const auto x = acts.template pair<P>();
      unrolled<2>([&]<int J>() {
        const unsigned g = part<2 * P + J>(r.w[0]), g8 = part<2 * P + J>(r.w[1]);
        const std::uint32_t a[4] = {low_nibbles(g), low_nibbles(g8), high_nibbles(g), high_nibbles(g8)};
        int c[4];
        dot32<8, J>(a, x, c);
        const unsigned d = part<P>(r.d), d8 = part<2 + P>(r.d);
        add_scaled<J>(J == 0 ? low_half(d) : high_half(d), J == 0 ? low_half(d8) : high_half(d8), x, c, sums);
      });
    });
  }
};
// ANCHOR_END: tile_q4_0

// ANCHOR: tile_q4_1
struct TileQ4_1 {
  using Block = BlockQ4_1;
  static constexpr int kInFlight = 3;
  struct Raw {
    uint4 w[2], dm[2];
  };
  static __device__ __forceinline__ Raw load(const unsigned char* tile, int lane) {
    const unsigned char* dm = tile + 1024 + lane / 4 * 16;
    return {{load_once(tile + 16 * lane), load_once(tile + 512 + 16 * lane)},
            {load_once(dm), load_once(dm + 128)}};
  }
  template <int NT, int COLS>
  static __device__ __forceinline__ void multiply(const Raw& r, const StepActs<NT>& acts,
                                                  float (&sums)[2][COLS]) {
    unrolled<2>([&]<int P>() {
      const auto x = acts.template pair<P>();
      unrolled<2>([&]<int J>() {
        constexpr int I = 2 * P + J;
        const unsigned g = part<I>(r.w[0]), g8 = part<I>(r.w[1]);
        const std::uint32_t a[4] = {low_nibbles(g), low_nibbles(g8), high_nibbles(g), high_nibbles(g8)};
        int c[4];
        dot32<0, J>(a, x, c);
        add_scaled<J>(low_half(part<I>(r.dm[0])), low_half(part<I>(r.dm[1])), x, c, sums);
        add_minimum<J>(high_half(part<I>(r.dm[0])), high_half(part<I>(r.dm[1])), x, sums);
      });
    });
  }
};
// ANCHOR_END: tile_q4_1

/// Nibbles and fifth bits of block I: codes of five bits.
template <int I>
__device__ __forceinline__ void five_bits(const uint4 (&w)[2], uint2 fifth, std::uint32_t (&a)[4]) {
  const unsigned g = part<I>(w[0]), g8 = part<I>(w[1]);
  a[0] = low_nibbles(g) | bit_of_bytes<2 * I, 4>(fifth.x);
  a[1] = low_nibbles(g8) | bit_of_bytes<2 * I, 4>(fifth.y);
  a[2] = high_nibbles(g) | bit_of_bytes<2 * I + 1, 4>(fifth.x);
  a[3] = high_nibbles(g8) | bit_of_bytes<2 * I + 1, 4>(fifth.y);
}

// ANCHOR: tile_q5_0
struct TileQ5_0 {
  using Block = BlockQ5_0;
  static constexpr int kInFlight = 3;
  struct Raw {
    uint4 w[2], d;
    uint2 fifth;
  };
  static __device__ __forceinline__ Raw load(const unsigned char* tile, int lane) {
    return {{load_once(tile + 16 * lane), load_once(tile + 512 + 16 * lane)},
            load_once(tile + 1280 + lane / 4 * 16),
            load_once8(tile + 1024 + 8 * lane)};
  }
  template <int NT, int COLS>
  static __device__ __forceinline__ void multiply(const Raw& r, const StepActs<NT>& acts,
                                                  float (&sums)[2][COLS]) {
    unrolled<2>([&]<int P>() {
      const auto x = acts.template pair<P>();
      unrolled<2>([&]<int J>() {
        std::uint32_t a[4];
        five_bits<2 * P + J>(r.w, r.fifth, a);
        int c[4];
        dot32<16, J>(a, x, c);
        const unsigned d = part<P>(r.d), d8 = part<2 + P>(r.d);
        add_scaled<J>(J == 0 ? low_half(d) : high_half(d), J == 0 ? low_half(d8) : high_half(d8), x, c, sums);
      });
    });
  }
};
// ANCHOR_END: tile_q5_0

// ANCHOR: tile_q5_1
struct TileQ5_1 {
  using Block = BlockQ5_1;
  static constexpr int kInFlight = 3;
  struct Raw {
    uint4 w[2], dm[2];
    uint2 fifth;
  };
  static __device__ __forceinline__ Raw load(const unsigned char* tile, int lane) {
    const unsigned char* dm = tile + 1280 + lane / 4 * 16;
    return {{load_once(tile + 16 * lane), load_once(tile + 512 + 16 * lane)},
            {load_once(dm), load_once(dm + 128)},
            load_once8(tile + 1024 + 8 * lane)};
  }
  template <int NT, int COLS>
  static __device__ __forceinline__ void multiply(const Raw& r, const StepActs<NT>& acts,
                                                  float (&sums)[2][COLS]) {
    unrolled<2>([&]<int P>() {
      const auto x = acts.template pair<P>();
      unrolled<2>([&]<int J>() {
        constexpr int I = 2 * P + J;
        std::uint32_t a[4];
        five_bits<I>(r.w, r.fifth, a);
        int c[4];
        dot32<0, J>(a, x, c);
        add_scaled<J>(low_half(part<I>(r.dm[0])), low_half(part<I>(r.dm[1])), x, c, sums);
        add_minimum<J>(high_half(part<I>(r.dm[0])), high_half(part<I>(r.dm[1])), x, sums);
      });
    });
  }
};
// ANCHOR_END: tile_q5_1

// ANCHOR: tile_q8_0
struct TileQ8_0 {
  using Block = BlockQ8_0;
  static constexpr int kInFlight = 2;
  struct Raw {
    uint4 w[4], d;
  };
  static __device__ __forceinline__ Raw load(const unsigned char* tile, int lane) {
    Raw r;
#pragma unroll
    for (int v = 0; v < 4; ++v) r.w[v] = load_once(tile + 512 * v + 16 * lane);
    r.d = load_once(tile + 2048 + lane / 4 * 16);
    return r;
  }
  template <int NT, int COLS>
  static __device__ __forceinline__ void multiply(const Raw& r, const StepActs<NT>& acts,
                                                  float (&sums)[2][COLS]) {
    unrolled<2>([&]<int P>() {
      const auto x = acts.template pair<P>();
      unrolled<2>([&]<int J>() {
        const std::uint32_t a[4] = {part<2 * J>(r.w[P]), part<2 * J>(r.w[2 + P]), part<2 * J + 1>(r.w[P]),
                                    part<2 * J + 1>(r.w[2 + P])};
        int c[4];
        dot32<0, J>(a, x, c);
        const unsigned d = part<P>(r.d), d8 = part<2 + P>(r.d);
        add_scaled<J>(J == 0 ? low_half(d) : high_half(d), J == 0 ? low_half(d8) : high_half(d8), x, c, sums);
      });
    });
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
struct TileIQ4_NL {
  using Block = BlockIQ4_NL;
  static constexpr int kInFlight = 4;
  using Raw = TileQ4_0::Raw;
  static __device__ __forceinline__ Raw load(const unsigned char* tile, int lane) {
    return TileQ4_0::load(tile, lane);
  }
  template <int NT, int COLS>
  static __device__ __forceinline__ void multiply(const Raw& r, const StepActs<NT>& acts,
                                                  float (&sums)[2][COLS]) {
    unrolled<2>([&]<int P>() {
      const auto x = acts.template pair<P>();
      unrolled<2>([&]<int J>() {
        std::uint32_t a[4];
        iq4_bytes(part<2 * P + J>(r.w[0]), a[0], a[2]);
        iq4_bytes(part<2 * P + J>(r.w[1]), a[1], a[3]);
        int c[4];
        dot32<0, J>(a, x, c);
        const unsigned d = part<P>(r.d), d8 = part<2 + P>(r.d);
        add_scaled<J>(J == 0 ? low_half(d) : high_half(d), J == 0 ? low_half(d8) : high_half(d8), x, c, sums);
      });
    });
  }
};
// ANCHOR_END: tile_iq4_nl

// Blocks of 256: integer scales inside, one or two f32 products at the end ---------------------------------------------

/// sums += (activations' scale) * scale * dot, integers as far as possible. |scale * dot| < 2^24: exact.
template <int J, int COLS>
__device__ __forceinline__ void add_integer(int row_g, int row_g8, const PairActs<COLS>& x, const int (&c)[4],
                                            float (&sums)[2][COLS]) {
#pragma unroll
  for (int col = 0; col < COLS; ++col) {
    const float d = x.template d<J>(col);
    sums[0][col] += d * static_cast<float>(row_g * c[col]);
    sums[1][col] += d * static_cast<float>(row_g8 * c[2 + col]);
  }
}
/// The same with a scale for each half of 16.
template <int J, int COLS>
__device__ __forceinline__ void add_integer_halves(const int (&row_g)[2], const int (&row_g8)[2],
                                                   const PairActs<COLS>& x, const int (&low)[4],
                                                   const int (&high)[4], float (&sums)[2][COLS]) {
#pragma unroll
  for (int col = 0; col < COLS; ++col) {
    const float d = x.template d<J>(col);
    sums[0][col] += d * static_cast<float>(row_g[0] * low[col] + row_g[1] * high[col]);
    sums[1][col] += d * static_cast<float>(row_g8[0] * low[2 + col] + row_g8[1] * high[2 + col]);
  }
}
/// sums += scale * block, row by row.
template <int COLS>
__device__ __forceinline__ void add_block(float row_g, float row_g8, const float (&block)[2][COLS],
                                          float (&sums)[2][COLS]) {
#pragma unroll
  for (int col = 0; col < COLS; ++col) {
    sums[0][col] += row_g * block[0][col];
    sums[1][col] += row_g8 * block[1][col];
  }
}

/// The eight 6-bit scales and minima of Q4_K and Q5_K, a byte each.
struct ScaleMins {
  unsigned scale[2], min[2];
  __device__ __forceinline__ explicit ScaleMins(const uint4& head)
      : scale{head.y & 0x3f3f3f3fu, (head.w & 0x0f0f0f0fu) | (head.y >> 2 & 0x30303030u)},
        min{head.z & 0x3f3f3f3fu, (head.w >> 4 & 0x0f0f0f0fu) | (head.z >> 2 & 0x30303030u)} {}
};

/// What Q4_K and Q5_K share: four groups of two sub-blocks. codes.operator()<P, J>(a) makes the instruction's operand.
template <int NT, int COLS, class Codes>
__device__ __forceinline__ void multiply_scale_min(const uint4 (&head)[2], const StepActs<NT>& acts,
                                                   float (&sums)[2][COLS], Codes&& codes) {
  const ScaleMins g(head[0]), g8(head[1]);
  float block[2][COLS] = {}, minima[2][COLS] = {};
  unrolled<4>([&]<int P>() {
    const auto x = acts.template pair<P>();
    unrolled<2>([&]<int J>() {
      constexpr int S = 2 * P + J;
      std::uint32_t a[4];
      codes.template operator()<P, J>(a);
      int c[4];
      dot32<0, J>(a, x, c);
      add_integer<J>(byte_of<S % 4>(g.scale[S / 4]), byte_of<S % 4>(g8.scale[S / 4]), x, c, block);
      add_minimum<J>(static_cast<float>(byte_of<S % 4>(g.min[S / 4])),
                     static_cast<float>(byte_of<S % 4>(g8.min[S / 4])), x, minima);
    });
  });
  add_block(low_half(head[0].x), low_half(head[1].x), block, sums);
  add_block(-high_half(head[0].x), -high_half(head[1].x), minima, sums);
}

// ANCHOR: tile_q4_k
struct TileQ4_K {
  using Block = BlockQ4_K;
  static constexpr int kInFlight = 2;
  struct Raw {
    uint4 w[4], head[2];
  };
  static __device__ __forceinline__ Raw load(const unsigned char* tile, int lane) {
    Raw r;
#pragma unroll
    for (int v = 0; v < 4; ++v) r.w[v] = load_once(tile + 512 * v + 16 * lane);
    r.head[0] = load_once(tile + 2048 + lane / 4 * 16);
    r.head[1] = load_once(tile + 2048 + 128 + lane / 4 * 16);
    return r;
  }
  template <int NT, int COLS>
  static __device__ __forceinline__ void multiply(const Raw& r, const StepActs<NT>& acts,
                                                  float (&sums)[2][COLS]) {
    multiply_scale_min<NT>(r.head, acts, sums, [&]<int P, int J>(std::uint32_t(&a)[4]) {
      constexpr int V = P / 2, I = P % 2 * 2;  // group P: low nibbles are sub-block 2P, high ones 2P + 1
      const unsigned w[4] = {part<I>(r.w[V]), part<I>(r.w[2 + V]), part<I + 1>(r.w[V]),
                             part<I + 1>(r.w[2 + V])};
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = J == 0 ? low_nibbles(w[i]) : high_nibbles(w[i]);
    });
  }
};
// ANCHOR_END: tile_q4_k

// ANCHOR: tile_q5_k
struct TileQ5_K {
  using Block = BlockQ5_K;
  static constexpr int kInFlight = 2;
  struct Raw {
    uint4 w[4], fifth, head[2];
  };
  static __device__ __forceinline__ Raw load(const unsigned char* tile, int lane) {
    Raw r;
#pragma unroll
    for (int v = 0; v < 4; ++v) r.w[v] = load_once(tile + 512 * v + 16 * lane);
    r.fifth = load_once(tile + 2048 + 16 * lane);
    r.head[0] = load_once(tile + 2560 + lane / 4 * 16);
    r.head[1] = load_once(tile + 2560 + 128 + lane / 4 * 16);
    return r;
  }
  template <int NT, int COLS>
  static __device__ __forceinline__ void multiply(const Raw& r, const StepActs<NT>& acts,
                                                  float (&sums)[2][COLS]) {
    multiply_scale_min<NT>(r.head, acts, sums, [&]<int P, int J>(std::uint32_t(&a)[4]) {
      constexpr int V = P / 2, I = P % 2 * 2, S = 2 * P + J;
      const unsigned w[4] = {part<I>(r.w[V]), part<I>(r.w[2 + V]), part<I + 1>(r.w[V]),
                             part<I + 1>(r.w[2 + V])};
      const unsigned f[4] = {r.fifth.x, r.fifth.z, r.fifth.y, r.fifth.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[i] = (J == 0 ? low_nibbles(w[i]) : high_nibbles(w[i])) | bit_of_bytes<S, 4>(f[i]);
    });
  }
};
// ANCHOR_END: tile_q5_k

// ANCHOR: tile_q6_k
struct TileQ6_K {
  using Block = BlockQ6_K;
  static constexpr int kInFlight = 2;
  struct Raw {
    uint4 low[4], high[2], scale[2];
    unsigned d;
  };
  static __device__ __forceinline__ Raw load(const unsigned char* tile, int lane) {
    Raw r;
#pragma unroll
    for (int v = 0; v < 4; ++v) r.low[v] = load_once(tile + 512 * v + 16 * lane);
    r.high[0] = load_once(tile + 2048 + 16 * lane);
    r.high[1] = load_once(tile + 2560 + 16 * lane);
    r.scale[0] = load_once(tile + 3072 + lane / 4 * 16);
    r.scale[1] = load_once(tile + 3200 + lane / 4 * 16);
    r.d = load_once4(tile + 3328 + lane / 4 * 4);
    return r;
  }
  template <int NT, int COLS>
  static __device__ __forceinline__ void multiply(const Raw& r, const StepActs<NT>& acts,
                                                  float (&sums)[2][COLS]) {
    float block[2][COLS] = {};
    unrolled<4>([&]<int P>() {
      const auto x = acts.template pair<P>();
      unrolled<2>([&]<int J>() {
        // Sub-block S = 4 half + k: low bits in words 0 and 1 (k even) or 2 and 3 of a half, in nibbles by k / 2; two
        // high bits at 2 k of the half's words.
        constexpr int S = 2 * P + J, HALF = S / 4, K = S % 4, I = K % 2 * 2;
        const unsigned w[4] = {part<I>(r.low[HALF]), part<I>(r.low[2 + HALF]), part<I + 1>(r.low[HALF]),
                               part<I + 1>(r.low[2 + HALF])};
        const unsigned h[4] = {part<2 * HALF>(r.high[0]), part<2 * HALF>(r.high[1]),
                               part<2 * HALF + 1>(r.high[0]), part<2 * HALF + 1>(r.high[1])};
        std::uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[i] = (K < 2 ? low_nibbles(w[i]) : high_nibbles(w[i])) |
                 ((K < 2 ? h[i] << (4 - 2 * K) : h[i] >> (2 * K - 4)) & 0x30303030u);
        }
        int low[4], high[4];
        dot16<32, J>(a, x, low, high);
        constexpr int B = 2 * S % 4;
        const int g[2] = {signed_byte_of<B>(part<S / 2>(r.scale[0])),
                          signed_byte_of<B + 1>(part<S / 2>(r.scale[0]))};
        const int g8[2] = {signed_byte_of<B>(part<S / 2>(r.scale[1])),
                           signed_byte_of<B + 1>(part<S / 2>(r.scale[1]))};
        add_integer_halves<J>(g, g8, x, low, high, block);
      });
    });
    add_block(low_half(r.d), high_half(r.d), block, sums);
  }
};
// ANCHOR_END: tile_q6_k

/// Two-bit codes of sub-block S.
template <int S>
__device__ __forceinline__ void two_bits(const uint4 (&w)[2], std::uint32_t (&a)[4]) {
  constexpr int I = S / 4 * 2, SHIFT = S % 4 * 2;
  a[0] = part<I>(w[0]) >> SHIFT & 0x03030303u;
  a[1] = part<I>(w[1]) >> SHIFT & 0x03030303u;
  a[2] = part<I + 1>(w[0]) >> SHIFT & 0x03030303u;
  a[3] = part<I + 1>(w[1]) >> SHIFT & 0x03030303u;
}

// ANCHOR: tile_q2_k
struct TileQ2_K {
  using Block = BlockQ2_K;
  static constexpr int kInFlight = 3;
  struct Raw {
    uint4 w[2], scale[2];
    uint2 dm;
  };
  static __device__ __forceinline__ Raw load(const unsigned char* tile, int lane) {
    const unsigned char* scales = tile + 1024 + lane / 4 * 16;
    return {{load_once(tile + 16 * lane), load_once(tile + 512 + 16 * lane)},
            {load_once(scales), load_once(scales + 128)},
            load_once8(tile + 1280 + lane / 4 * 8)};
  }
  template <int NT, int COLS>
  static __device__ __forceinline__ void multiply(const Raw& r, const StepActs<NT>& acts,
                                                  float (&sums)[2][COLS]) {
    float block[2][COLS] = {}, minima[2][COLS] = {};
    unrolled<4>([&]<int P>() {
      const auto x = acts.template pair<P>();
      unrolled<2>([&]<int J>() {
        constexpr int S = 2 * P + J, B = 2 * S % 4;
        std::uint32_t a[4];
        two_bits<S>(r.w, a);
        int low[4], high[4];
        dot16<0, J>(a, x, low, high);
        // A byte a half: the scale in its low nibble, the minimum in its high one.
        const unsigned s = part<S / 2>(r.scale[0]), s8 = part<S / 2>(r.scale[1]);
        const int g[2] = {byte_of<B>(low_nibbles(s)), byte_of<B + 1>(low_nibbles(s))};
        const int g8[2] = {byte_of<B>(low_nibbles(s8)), byte_of<B + 1>(low_nibbles(s8))};
        add_integer_halves<J>(g, g8, x, low, high, block);
#pragma unroll
        for (int col = 0; col < COLS; ++col) {
          const float d = x.template d<J>(col);
          const int x0 = x.template low_sum<J>(col), x1 = x.template high_sum<J>(col);
          minima[0][col] +=
              d * static_cast<float>(byte_of<B>(high_nibbles(s)) * x0 + byte_of<B + 1>(high_nibbles(s)) * x1);
          minima[1][col] += d * static_cast<float>(byte_of<B>(high_nibbles(s8)) * x0 +
                                                   byte_of<B + 1>(high_nibbles(s8)) * x1);
        }
      });
    });
    add_block(low_half(r.dm.x), low_half(r.dm.y), block, sums);
    add_block(-high_half(r.dm.x), -high_half(r.dm.y), minima, sums);
  }
};
// ANCHOR_END: tile_q2_k

// ANCHOR: tile_q3_k
struct TileQ3_K {
  using Block = BlockQ3_K;
  static constexpr int kInFlight = 2;
  struct Raw {
    uint4 w[2], third, head;
    uint2 scale8;
    unsigned scale8_high;
  };
  static __device__ __forceinline__ Raw load(const unsigned char* tile, int lane) {
    return {{load_once(tile + 16 * lane), load_once(tile + 512 + 16 * lane)},
            load_once(tile + 1024 + 16 * lane),
            load_once(tile + 1536 + lane / 4 * 16),
            load_once8(tile + 1664 + lane / 4 * 8),
            load_once4(tile + 1728 + lane / 4 * 4)};
  }
  /// The sixteen scales of a row plus 32, a byte each.
  struct Scales {
    unsigned s[4];
    __device__ __forceinline__ Scales(unsigned a, unsigned b, unsigned high)
        : s{low_nibbles(a) | (high << 4 & 0x30303030u), low_nibbles(b) | (high << 2 & 0x30303030u),
            high_nibbles(a) | (high & 0x30303030u), high_nibbles(b) | (high >> 2 & 0x30303030u)} {}
  };
  template <int NT, int COLS>
  static __device__ __forceinline__ void multiply(const Raw& r, const StepActs<NT>& acts,
                                                  float (&sums)[2][COLS]) {
    const Scales row_g(r.head.x, r.head.y, r.head.z), row_g8(r.scale8.x, r.scale8.y, r.scale8_high);
    float block[2][COLS] = {};
    unrolled<4>([&]<int P>() {
      const auto x = acts.template pair<P>();
      unrolled<2>([&]<int J>() {
        constexpr int S = 2 * P + J, B = 2 * S % 4;
        std::uint32_t a[4];
        two_bits<S>(r.w, a);
        a[0] |= bit_of_bytes<S, 2>(r.third.x);
        a[1] |= bit_of_bytes<S, 2>(r.third.z);
        a[2] |= bit_of_bytes<S, 2>(r.third.y);
        a[3] |= bit_of_bytes<S, 2>(r.third.w);
        int low[4], high[4];
        dot16<4, J>(a, x, low, high);
        const int g[2] = {byte_of<B>(row_g.s[S / 2]) - 32, byte_of<B + 1>(row_g.s[S / 2]) - 32};
        const int g8[2] = {byte_of<B>(row_g8.s[S / 2]) - 32, byte_of<B + 1>(row_g8.s[S / 2]) - 32};
        add_integer_halves<J>(g, g8, x, low, high, block);
      });
    });
    add_block(low_half(r.head.w), high_half(r.head.w), block, sums);
  }
};
// ANCHOR_END: tile_q3_k

// ANCHOR: tile_iq4_xs
struct TileIQ4_XS {
  using Block = BlockIQ4_XS;
  static constexpr int kInFlight = 2;
  struct Raw {
    uint4 w[4], head;
  };
  static __device__ __forceinline__ Raw load(const unsigned char* tile, int lane) {
    Raw r;
#pragma unroll
    for (int v = 0; v < 4; ++v) r.w[v] = load_once(tile + 512 * v + 16 * lane);
    r.head = load_once(tile + 2048 + lane / 4 * 16);
    return r;
  }
  /// Scale S of a row: four low bits in the second word, two high ones in the upper half of the first.
  template <int S>
  static __device__ __forceinline__ int scale(unsigned first, unsigned second) {
    return static_cast<int>((second >> (4 * S) & 15u) | (first >> (16 + 2 * S) & 3u) << 4) - 32;
  }
  template <int NT, int COLS>
  static __device__ __forceinline__ void multiply(const Raw& r, const StepActs<NT>& acts,
                                                  float (&sums)[2][COLS]) {
    float block[2][COLS] = {};
    unrolled<4>([&]<int P>() {
      const auto x = acts.template pair<P>();
      unrolled<2>([&]<int J>() {
        constexpr int S = 2 * P + J;
        std::uint32_t a[4];
        iq4_bytes(part<S % 4>(r.w[S / 4]), a[0], a[2]);
        iq4_bytes(part<S % 4>(r.w[2 + S / 4]), a[1], a[3]);
        int c[4];
        dot32<0, J>(a, x, c);
        add_integer<J>(scale<S>(r.head.x, r.head.y), scale<S>(r.head.z, r.head.w), x, c, block);
      });
    });
    add_block(low_half(r.head.x), low_half(r.head.z), block, sums);
  }
};
// ANCHOR_END: tile_iq4_xs

}  // namespace ladder::tiles
