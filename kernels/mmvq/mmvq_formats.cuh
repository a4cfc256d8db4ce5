// How a lane multiplies a unit of packed weights with int8 activations: the part of the kernels of
// kernels/mmvq/mmvq.cuh that differs from type to type.
//
// A format is a struct with
//   kType          the storage type
//   kUnit          weights that a lane takes at once: 32, which share one scale of the activations, or 64
//   kActsAlign     bytes that the address of the activations must be a multiple of
//   kRoundings     f32 roundings that a term can meet inside a unit
//   kBlocksPerSm   blocks of 256 threads that registers must be left for: few where a unit takes many
//   Raw, load      a unit's bytes in registers, as they lie in the file
//   Codes, codes   Raw -> a byte for every code, four to a word in the order of the activations, and scales
//   Acts, acts     the activations of a unit, read once for all rows
//   dot            Codes . Acts -> f32
//
// The algebra is the same everywhere. A weight is d * (code - offset) or d * code + m, an activation d8 * x:
//   sum over the unit of weight * activation = d8 * d * (dot - offset * sx)      dot = sum code * x
//                                         or = d8 * d * dot + d8 * m * sx        sx  = sum x
// dot and sx are exact integers, four products and their sum in one instruction (dp4a); only then comes f32,
// once a unit. Types with a scale for every 16 weights need dot and sx of both halves. sx of a whole block is
// stored with the activations; sx of a half is dp4a with four ones. All rounding is written down (__fmul_rn,
// __fmaf_rn), so a compiler cannot round the same product differently in two kernels.
//
// Each type is here twice. The plain formats take 32 neighbouring weights and load narrowly: 2 bytes where a
// block can begin at any even address, else 4. The ones named V2 load as widely as an address allows and read
// each byte once:
//   Q4_K, Q5_K              144, 176 bytes: 16-byte loads; 64 weights, low and high nibbles of 32 bytes
//   IQ4_XS, Q5_1            136, 24: 8-byte loads
//   Q4_1, Q2_K              20, 84: 4-byte loads. Q2_K takes 64 weights, all four pairs of bits of 16 bytes
//   Q4_0, IQ4_NL            18
//   Q5_0, Q8_0              22, 34
//   Q3_K, Q6_K              110, 210: 64 weights as with Q2_K
// The last six begin at any even address: a multiple of 4, or two bytes beside one. There are 4-byte loads at
// the multiples of 4, and a shift by 16 bits where needed. Activations come in 8-byte loads with V2: their
// 40 bytes are five of those.
//
// Block layouts: kernels/quant/blocks.hpp.
#pragma once

#include <cstdint>

#include "harness/experiment/weight_types.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/gemv/quant_f32_formats.cuh"
#include "kernels/quant/blocks.hpp"
#include "kernels/quant/q8_acts.hpp"

namespace ladder::mmvq {

using quant_f32::fifth_bits;
using quant_f32::half_value;
using quant_f32::high_nibbles;
using quant_f32::load128;
using quant_f32::load16;
using quant_f32::load32;
using quant_f32::load32_as_16;
using quant_f32::load64;
using quant_f32::low_nibbles;

// ANCHOR: mmvq_units
// Integers ----------------------------------------------------------------------------------------------

/// for (i = 0..4N-1) sum += q[i] * x[i], signed bytes.
template <int N>
__device__ __forceinline__ int dot_words(const unsigned* q, const unsigned* x) {
  int sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum = __dp4a(static_cast<int>(q[i]), static_cast<int>(x[i]), sum);
  return sum;
}
/// for (i = 0..4N-1) sum += x[i], signed bytes.
template <int N>
__device__ __forceinline__ int sum_words(const unsigned* x) {
  int sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum = __dp4a(0x01010101, static_cast<int>(x[i]), sum);
  return sum;
}

// Activations -------------------------------------------------------------------------------------------

// ANCHOR: mmvq_acts
/// The activations of 32 neighbours: one block.
struct BlockActs {
  unsigned q[8];  // four codes each
  float d;
  int sum;
};
/// 4-byte loads; the sum only for types that need it.
template <bool kSum>
__device__ __forceinline__ BlockActs block_acts(const BlockQ8Pad40* x, int u) {
  const auto* p = reinterpret_cast<const unsigned char*>(x + u);  // 4-byte aligned
  BlockActs a;
  a.d = half_value(load16(p));
#pragma unroll
  for (int i = 0; i < 8; ++i) a.q[i] = load32(p + 4 + 4 * i);
  a.sum = kSum ? static_cast<int>(load32(p + 36)) : 0;
  return a;
}
/// The same in five 8-byte loads.
__device__ __forceinline__ BlockActs block_acts_v2(const BlockQ8Pad40* x, int u) {
  const auto* p = reinterpret_cast<const unsigned char*>(x + u);  // 8-byte aligned
  const uint2 a = load64(p), b = load64(p + 8), c = load64(p + 16), d = load64(p + 24), e = load64(p + 32);
  return {{a.y, b.x, b.y, c.x, c.y, d.x, d.y, e.x}, half_value(a.x), static_cast<int>(e.y)};
}
// ANCHOR_END: mmvq_acts

/// Two blocks: what 64 neighbouring weights need.
struct PairActs {
  BlockActs low, high;
};

/// Four runs of 16 activations, 32 apart: what 16 bytes of 2-bit codes need, and their sums.
struct RunActs {
  unsigned q[4][4];
  float d[4];
  int sum[4];
};
/// Unit u of 64 weights is block u/4 of 256, half (u%4)/2 of it, and of every 32 weights there the first or
/// the last 16: run k of the unit is elements 128*half + 32*k + 16*(u%2) .. +15.
__device__ __forceinline__ RunActs run_acts(const BlockQ8Pad40* x, int u) {
  const auto* first = reinterpret_cast<const unsigned char*>(x + 4 * (u / 2));  // 8-byte aligned
  const int odd = u % 2;
  RunActs a;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const unsigned char* p = first + 40 * k;
    const uint2 f = load64(p + 16 * odd),
                g = load64(p + 16 * odd + 8);  // f.x is not ours: the codes begin at byte 4
    a.q[k][0] = f.y;
    a.q[k][1] = g.x;
    a.q[k][2] = g.y;
    a.q[k][3] = load32(p + 16 * odd + 16);
    a.d[k] = half_value(load16(p));
    a.sum[k] = sum_words<4>(a.q[k]);
  }
  return a;
}

// One scale, and perhaps one minimum, for 32 weights ----------------------------------------------------

// ANCHOR: mmvq_dot
struct Scaled {
  unsigned q[8];
  float d;
};
/// sum d8 d (code - OFFSET) x = d8 d (dot - OFFSET sx). d8 * d is exact (two f16), the last product rounds.
template <int OFFSET>
__device__ __forceinline__ float dot_scaled(const Scaled& c, const BlockActs& a) {
  const int dot = dot_words<8>(c.q, a.q) - OFFSET * a.sum;
  return __fmul_rn(__fmul_rn(a.d, c.d), static_cast<float>(dot));
}

struct ScaledMin {
  unsigned q[8];
  float d, m;
};
/// sum d8 (d code + m) x = d8 d dot + d8 m sx
__device__ __forceinline__ float dot_scaled_min(const ScaledMin& c, const BlockActs& a) {
  const float low = __fmul_rn(__fmul_rn(a.d, c.m), static_cast<float>(a.sum));
  return __fmaf_rn(__fmul_rn(a.d, c.d), static_cast<float>(dot_words<8>(c.q, a.q)), low);
}
// ANCHOR_END: mmvq_dot
/// Of dot_scaled: d8 * d if d is a product itself, the product with the integer.
inline constexpr int kScaledRoundings = 2;
/// Of dot_scaled_min, along the minimum: d8 * m, the product with sx, the addition.
inline constexpr int kScaledMinRoundings = 3;

/// The halves of a block of 32 have scales of their own.
struct Halves {
  unsigned q[8];
  float d;
  int scale[2];
};
/// d8 d (s0 (dot0 - OFFSET sx0) + s1 (dot1 - OFFSET sx1)): the integer is below 2^24 for all codes and
/// scales.
template <int OFFSET>
__device__ __forceinline__ float dot_halves(const Halves& c, const BlockActs& a) {
  const int sum0 = sum_words<4>(a.q);  // the other half: what is left of the stored sum
  const int dot0 = dot_words<4>(c.q, a.q) - OFFSET * sum0;
  const int dot1 = dot_words<4>(c.q + 4, a.q + 4) - OFFSET * (a.sum - sum0);
  return __fmul_rn(__fmul_rn(a.d, c.d), static_cast<float>(c.scale[0] * dot0 + c.scale[1] * dot1));
}

// Scales for 16 weights each, four runs of them ---------------------------------------------------------

struct Runs {
  unsigned q[4][4];
  float d;
  int scale[4];
};
/// d sum over k of d8[k] * scale[k] * (dot[k] - OFFSET * sx[k])
template <int OFFSET>
__device__ __forceinline__ float dot_runs(const Runs& c, const RunActs& a) {
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int dot = c.scale[k] * (dot_words<4>(c.q[k], a.q[k]) - OFFSET * a.sum[k]);
    sum = __fmaf_rn(a.d[k], static_cast<float>(dot), sum);
  }
  return __fmul_rn(c.d, sum);
}
inline constexpr int kRunsRoundings = 4 + 1;

// Unpacking ---------------------------------------------------------------------------------------------

/// Four words of nibbles -> eight words of codes: low nibbles are elements 0..15, high ones 16..31.
__device__ __forceinline__ void split_nibbles(const unsigned* nibbles, unsigned* q) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    q[i] = low_nibbles(nibbles[i]);
    q[i + 4] = high_nibbles(nibbles[i]);
  }
}
/// The same with the fifth bits of the 32 codes.
__device__ __forceinline__ void split_five_bits(const unsigned* nibbles, unsigned bits, unsigned* q) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    q[i] = low_nibbles(nibbles[i]) | fifth_bits(bits, 4 * i);
    q[i + 4] = high_nibbles(nibbles[i]) | fifth_bits(bits, 16 + 4 * i);
  }
}

// ANCHOR: load_half_and_words
/// A half and N words behind it, in N + 1 loads where pairs of bytes would take 2N + 1. Either the words
/// begin at a multiple of 4, or the half does: then each loaded word has the end of one of ours and the
/// beginning of the next.
template <int N>
struct HalfAndWords {
  unsigned half, w[N];  // the half in the low 16 bits, anything above it
};
template <int N>
__device__ __forceinline__ HalfAndWords<N> load_half_and_words(const unsigned char* p) {  // p: 2-byte aligned
  const bool words_aligned = (reinterpret_cast<std::uintptr_t>(p) & 2) != 0;
  const unsigned char* first = p + (words_aligned ? 2 : 0);        // 4-byte aligned
  const unsigned extra = load16(p + (words_aligned ? 0 : 4 * N));  // what the N words at `first` leave out
  unsigned loaded[N + 1];
#pragma unroll
  for (int i = 0; i < N; ++i) loaded[i] = load32(first + 4 * i);
  loaded[N] = extra;
  HalfAndWords<N> r;
  r.half = words_aligned ? extra : loaded[0];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    r.w[i] = __funnelshift_r(loaded[i], loaded[i + 1], words_aligned ? 0 : 16);
  }
  return r;
}
// ANCHOR_END: load_half_and_words

/// N words at an even address, in N + 1 loads. Where the address is no multiple of 4 the first load begins
/// two bytes before it: inside the matrix, since that begins at a multiple of 16.
template <int N>
__device__ __forceinline__ void load_words(const unsigned char* p, unsigned* w) {      // p: 2-byte aligned
  const auto before = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(p) & 2);  // 0 or 2
  unsigned loaded[N + 1];
#pragma unroll
  for (int i = 0; i < N; ++i) loaded[i] = load32(p - before + 4 * i);
  loaded[N] = load16(p + 4 * N - 2);
#pragma unroll
  for (int i = 0; i < N; ++i) w[i] = __funnelshift_r(loaded[i], loaded[i + 1], 8 * before);
}

// The table of the IQ4 types as bytes of words: levels first..first+3.
constexpr unsigned iq4_signed_word(std::size_t first) {
  unsigned word = 0;
  for (std::size_t j = 0; j < 4; ++j) {
    word |= static_cast<unsigned>(static_cast<std::uint8_t>(kIq4Values[first + j])) << (8 * j);
  }
  return word;
}
inline constexpr unsigned kIq4Word0 = iq4_signed_word(0), kIq4Word1 = iq4_signed_word(4),
                          kIq4Word2 = iq4_signed_word(8), kIq4Word3 = iq4_signed_word(12);

/// The levels of the four codes in the low 16 bits, a byte each. A byte permutation chooses among eight bytes
/// by three bits; the codes' fourth bits then choose between the two halves of the table.
__device__ __forceinline__ unsigned iq4_four(unsigned codes) {
  const unsigned three = codes & 0x7777u;
  const unsigned lower = __byte_perm(kIq4Word0, kIq4Word1, three);
  const unsigned upper = __byte_perm(kIq4Word2, kIq4Word3, three);
  return __byte_perm(lower, upper, 0x3210u | (codes & 0x8888u) >> 1);
}
/// Four words of nibbles -> eight words of levels.
__device__ __forceinline__ void split_levels(const unsigned* nibbles, unsigned* q) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned a = iq4_four(nibbles[i]), b = iq4_four(nibbles[i] >> 16);  // elements j, 16+j, j+1, 17+j
    q[i] = __byte_perm(a, b, 0x6420u);
    q[i + 4] = __byte_perm(a, b, 0x7531u);
  }
}

/// Scale and minimum number j (0..7) of the 12 packed bytes of Q4_K and Q5_K.
struct ScaleMin {
  float scale, min;
};
__device__ __forceinline__ ScaleMin six_bits(unsigned s0, unsigned s1, unsigned s2, int j) {
  const int byte = 8 * (j % 4);
  const unsigned a = s0 >> byte, b = s1 >> byte, c = s2 >> byte;
  const unsigned scale = j < 4 ? a & 63u : (c & 15u) | (a >> 6 & 3u) << 4;
  const unsigned min = j < 4 ? b & 63u : (c >> 4 & 15u) | (b >> 6 & 3u) << 4;
  return {static_cast<float>(scale), static_cast<float>(min)};
}
/// Their products with d and dmin, exact: 11 bits and 6.
__device__ __forceinline__ void set_scale_min(ScaledMin& c, unsigned d, unsigned s0, unsigned s1, unsigned s2,
                                              int j) {
  const ScaleMin s = six_bits(s0, s1, s2, j);
  c.d = __fmul_rn(half_value(d), s.scale);
  c.m = -__fmul_rn(half_value(d >> 16), s.min);
}

/// Two sub-blocks: the low and the high nibbles of 32 bytes.
struct ScaledMinPair {
  ScaledMin low, high;
};
// ANCHOR_END: mmvq_units

// Types with blocks of 32 -------------------------------------------------------------------------------

// ANCHOR: mmvq_q4_0
/// d f16, 16 bytes of nibbles; weight = d * (code - 8).
struct Q4_0 {
  static constexpr WeightType kType = WeightType::q4_0;
  static constexpr int kUnit = 32, kActsAlign = 4, kRoundings = kScaledRoundings;
  static constexpr int kBlocksPerSm = 3;
  struct Raw {
    unsigned d, q[4];
  };
  using Codes = Scaled;
  using Acts = BlockActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 18 * u;  // 2-byte aligned
    return {load16(block),
            {load32_as_16(block + 2), load32_as_16(block + 6), load32_as_16(block + 10),
             load32_as_16(block + 14)}};
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int) {
    Codes c;
    split_nibbles(r.q, c.q);
    c.d = half_value(r.d);
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return block_acts<true>(x, u); }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) { return dot_scaled<8>(c, a); }
};
// ANCHOR_END: mmvq_q4_0

// ANCHOR: mmvq_q4_0_v2
/// 5 loads instead of 9, of 4 bytes instead of 2, and activations in 5 instead of 10.
struct Q4_0V2 : Q4_0 {
  static constexpr int kActsAlign = 8;
  using Raw = HalfAndWords<4>;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    return load_half_and_words<4>(row + 18 * u);
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int) {
    Codes c;
    split_nibbles(r.w, c.q);
    c.d = half_value(r.half);
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return block_acts_v2(x, u); }
};
// ANCHOR_END: mmvq_q4_0_v2

// ANCHOR: mmvq_q4_1
/// d, m f16, 16 bytes of nibbles; weight = d * code + m.
struct Q4_1 {
  static constexpr WeightType kType = WeightType::q4_1;
  static constexpr int kUnit = 32, kActsAlign = 4, kRoundings = kScaledMinRoundings;
  static constexpr int kBlocksPerSm = 3;
  struct Raw {
    unsigned dm, q[4];
  };
  using Codes = ScaledMin;
  using Acts = BlockActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 20 * u;  // 4-byte aligned
    return {load32(block), {load32(block + 4), load32(block + 8), load32(block + 12), load32(block + 16)}};
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int) {
    Codes c;
    split_nibbles(r.q, c.q);
    c.d = half_value(r.dm);
    c.m = half_value(r.dm >> 16);
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return block_acts<true>(x, u); }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) { return dot_scaled_min(c, a); }
};
// ANCHOR_END: mmvq_q4_1

// ANCHOR: mmvq_q4_1_v2
/// A block of 20 bytes allows no more than 4-byte loads; the activations allow 8.
struct Q4_1V2 : Q4_1 {
  static constexpr int kActsAlign = 8;
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return block_acts_v2(x, u); }
};
// ANCHOR_END: mmvq_q4_1_v2

// ANCHOR: mmvq_q5_0
/// d f16, 32 fifth bits, 16 bytes of nibbles; weight = d * (code - 16).
struct Q5_0 {
  static constexpr WeightType kType = WeightType::q5_0;
  static constexpr int kUnit = 32, kActsAlign = 4, kRoundings = kScaledRoundings;
  static constexpr int kBlocksPerSm = 3;
  struct Raw {
    unsigned d, bits, q[4];
  };
  using Codes = Scaled;
  using Acts = BlockActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 22 * u;  // 2-byte aligned: also the fifth bits take two loads
    return {load16(block),
            load32_as_16(block + 2),
            {load32_as_16(block + 6), load32_as_16(block + 10), load32_as_16(block + 14),
             load32_as_16(block + 18)}};
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int) {
    Codes c;
    split_five_bits(r.q, r.bits, c.q);
    c.d = half_value(r.d);
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return block_acts<true>(x, u); }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) { return dot_scaled<16>(c, a); }
};
// ANCHOR_END: mmvq_q5_0

// ANCHOR: mmvq_q5_0_v2
struct Q5_0V2 : Q5_0 {
  static constexpr int kActsAlign = 8;
  using Raw = HalfAndWords<5>;  // the first word is the fifth bits
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    return load_half_and_words<5>(row + 22 * u);
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int) {
    Codes c;
    split_five_bits(r.w + 1, r.w[0], c.q);
    c.d = half_value(r.half);
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return block_acts_v2(x, u); }
};
// ANCHOR_END: mmvq_q5_0_v2

// ANCHOR: mmvq_q5_1
/// d, m f16, 32 fifth bits, 16 bytes of nibbles; weight = d * code + m.
struct Q5_1 {
  static constexpr WeightType kType = WeightType::q5_1;
  static constexpr int kUnit = 32, kActsAlign = 4, kRoundings = kScaledMinRoundings;
  static constexpr int kBlocksPerSm = 3;
  struct Raw {
    unsigned dm, bits, q[4];
  };
  using Codes = ScaledMin;
  using Acts = BlockActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 24 * u;
    return {load32(block),
            load32(block + 4),
            {load32(block + 8), load32(block + 12), load32(block + 16), load32(block + 20)}};
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int) {
    Codes c;
    split_five_bits(r.q, r.bits, c.q);
    c.d = half_value(r.dm);
    c.m = half_value(r.dm >> 16);
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return block_acts<true>(x, u); }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) { return dot_scaled_min(c, a); }
};
// ANCHOR_END: mmvq_q5_1

// ANCHOR: mmvq_q5_1_v2
/// 3 loads of 8 bytes.
struct Q5_1V2 : Q5_1 {
  static constexpr int kActsAlign = 8;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 24 * u;  // 8-byte aligned
    const uint2 a = load64(block), b = load64(block + 8), c = load64(block + 16);
    return {a.x, a.y, {b.x, b.y, c.x, c.y}};
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return block_acts_v2(x, u); }
};
// ANCHOR_END: mmvq_q5_1_v2

// ANCHOR: mmvq_q8_0
/// d f16, 32 signed bytes; weight = d * code. Nothing to unpack.
struct Q8_0 {
  static constexpr WeightType kType = WeightType::q8_0;
  static constexpr int kUnit = 32, kActsAlign = 4, kRoundings = kScaledRoundings;
  static constexpr int kBlocksPerSm = 3;
  struct Raw {
    unsigned d, q[8];
  };
  using Codes = Scaled;
  using Acts = BlockActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 34 * u;  // 2-byte aligned
    Raw r;
    r.d = load16(block);
#pragma unroll
    for (int i = 0; i < 8; ++i) r.q[i] = load32_as_16(block + 2 + 4 * i);
    return r;
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int) {
    return {{r.q[0], r.q[1], r.q[2], r.q[3], r.q[4], r.q[5], r.q[6], r.q[7]}, half_value(r.d)};
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) {
    return block_acts<false>(x, u);
  }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) { return dot_scaled<0>(c, a); }
};
// ANCHOR_END: mmvq_q8_0

// ANCHOR: mmvq_q8_0_v2
/// 9 loads instead of 17.
struct Q8_0V2 : Q8_0 {
  static constexpr int kActsAlign = 8;
  using Raw = HalfAndWords<8>;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    return load_half_and_words<8>(row + 34 * u);
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int) {
    return {{r.w[0], r.w[1], r.w[2], r.w[3], r.w[4], r.w[5], r.w[6], r.w[7]}, half_value(r.half)};
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return block_acts_v2(x, u); }
};
// ANCHOR_END: mmvq_q8_0_v2

// ANCHOR: mmvq_iq4_nl
/// d f16, 16 bytes of nibbles; weight = d * level[code]. The levels are bytes, so the table is four
/// registers.
struct IQ4_NL : Q4_0 {
  static constexpr WeightType kType = WeightType::iq4_nl;
  static __device__ __forceinline__ Codes codes(const Raw& r, int) {
    Codes c;
    split_levels(r.q, c.q);
    c.d = half_value(r.d);
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) {
    return block_acts<false>(x, u);
  }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) { return dot_scaled<0>(c, a); }
};
// ANCHOR_END: mmvq_iq4_nl

// ANCHOR: mmvq_iq4_nl_v2
struct IQ4_NLV2 : Q4_0V2 {
  static constexpr WeightType kType = WeightType::iq4_nl;
  static __device__ __forceinline__ Codes codes(const Raw& r, int) {
    Codes c;
    split_levels(r.w, c.q);
    c.d = half_value(r.half);
    return c;
  }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) { return dot_scaled<0>(c, a); }
};
// ANCHOR_END: mmvq_iq4_nl_v2

// Types with blocks of 256 ------------------------------------------------------------------------------
// A unit of 32 is sub-block u%8 of block u/8. Where codes are 2 or 4 bits, neighbouring lanes read the same
// bytes and take other bits of them.

// ANCHOR: mmvq_q4_k
/// d, dmin f16, 12 bytes of 6-bit scales and minima, 128 of nibbles; weight = d * scale * code - dmin * min.
struct Q4_K {
  static constexpr WeightType kType = WeightType::q4_k;
  static constexpr int kUnit = 32, kActsAlign = 4, kRoundings = kScaledMinRoundings;
  static constexpr int kBlocksPerSm = 3;
  struct Raw {
    unsigned d, scales[3], q[8];
  };
  using Codes = ScaledMin;
  using Acts = BlockActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 144 * (u / 8);
    const unsigned char* q = block + 16 + 32 * (u % 8 / 2);  // low nibbles of these 32 bytes, or high ones
    Raw r{load32(block), {load32(block + 4), load32(block + 8), load32(block + 12)}, {}};
#pragma unroll
    for (int i = 0; i < 8; ++i) r.q[i] = load32(q + 4 * i);
    return r;
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int u) {
    Codes c;
#pragma unroll
    for (int i = 0; i < 8; ++i) c.q[i] = low_nibbles(r.q[i] >> (4 * (u % 2)));
    set_scale_min(c, r.d, r.scales[0], r.scales[1], r.scales[2], u % 8);
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return block_acts<true>(x, u); }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) { return dot_scaled_min(c, a); }
};
// ANCHOR_END: mmvq_q4_k

// ANCHOR: mmvq_q4_k_v2
/// 64 weights in 3 loads of 16 bytes, where two units of Q4_K take 24 loads of 4.
struct Q4_KV2 {
  static constexpr WeightType kType = WeightType::q4_k;
  static constexpr int kUnit = 64, kActsAlign = 8, kRoundings = kScaledMinRoundings + 1;
  static constexpr int kBlocksPerSm = 2;
  struct Raw {
    uint4 header, q[2];
  };
  using Codes = ScaledMinPair;
  using Acts = PairActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 144 * (u / 4);  // 16-byte aligned
    const unsigned char* q = block + 16 + 32 * (u % 4);
    return {load128(block), {load128(q), load128(q + 16)}};
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int u) {
    const unsigned q[8] = {r.q[0].x, r.q[0].y, r.q[0].z, r.q[0].w, r.q[1].x, r.q[1].y, r.q[1].z, r.q[1].w};
    Codes c;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      c.low.q[i] = low_nibbles(q[i]);
      c.high.q[i] = high_nibbles(q[i]);
    }
    set_scale_min(c.low, r.header.x, r.header.y, r.header.z, r.header.w, 2 * (u % 4));
    set_scale_min(c.high, r.header.x, r.header.y, r.header.z, r.header.w, 2 * (u % 4) + 1);
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) {
    return {block_acts_v2(x, 2 * u), block_acts_v2(x, 2 * u + 1)};
  }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) {
    return __fadd_rn(dot_scaled_min(c.low, a.low), dot_scaled_min(c.high, a.high));
  }
};
// ANCHOR_END: mmvq_q4_k_v2

// ANCHOR: mmvq_q5_k
/// As Q4_K, with 32 bytes of fifth bits between scales and nibbles: bit j of byte l belongs to element 32*j +
/// l.
struct Q5_K {
  static constexpr WeightType kType = WeightType::q5_k;
  static constexpr int kUnit = 32, kActsAlign = 4, kRoundings = kScaledMinRoundings;
  static constexpr int kBlocksPerSm = 2;
  struct Raw {
    unsigned d, scales[3], fifth[8], q[8];
  };
  using Codes = ScaledMin;
  using Acts = BlockActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 176 * (u / 8);
    const unsigned char* q = block + 48 + 32 * (u % 8 / 2);
    Raw r{load32(block), {load32(block + 4), load32(block + 8), load32(block + 12)}, {}, {}};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      r.fifth[i] = load32(block + 16 + 4 * i);
      r.q[i] = load32(q + 4 * i);
    }
    return r;
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int u) {
    Codes c;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      c.q[i] = low_nibbles(r.q[i] >> (4 * (u % 2))) | (r.fifth[i] >> (u % 8) & 0x01010101u) << 4;
    }
    set_scale_min(c, r.d, r.scales[0], r.scales[1], r.scales[2], u % 8);
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return block_acts<true>(x, u); }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) { return dot_scaled_min(c, a); }
};
// ANCHOR_END: mmvq_q5_k

// ANCHOR: mmvq_q5_k_v2
/// 64 weights in 5 loads of 16 bytes.
struct Q5_KV2 {
  static constexpr WeightType kType = WeightType::q5_k;
  static constexpr int kUnit = 64, kActsAlign = 8, kRoundings = kScaledMinRoundings + 1;
  static constexpr int kBlocksPerSm = 2;
  struct Raw {
    uint4 header, fifth[2], q[2];
  };
  using Codes = ScaledMinPair;
  using Acts = PairActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 176 * (u / 4);  // 16-byte aligned
    const unsigned char* q = block + 48 + 32 * (u % 4);
    return {load128(block), {load128(block + 16), load128(block + 32)}, {load128(q), load128(q + 16)}};
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int u) {
    const unsigned q[8] = {r.q[0].x, r.q[0].y, r.q[0].z, r.q[0].w, r.q[1].x, r.q[1].y, r.q[1].z, r.q[1].w};
    const unsigned fifth[8] = {r.fifth[0].x, r.fifth[0].y, r.fifth[0].z, r.fifth[0].w,
                               r.fifth[1].x, r.fifth[1].y, r.fifth[1].z, r.fifth[1].w};
    const int j = 2 * (u % 4);  // sub-block of the low nibbles
    Codes c;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned bits = fifth[i] >> j;
      c.low.q[i] = low_nibbles(q[i]) | (bits & 0x01010101u) << 4;
      c.high.q[i] = high_nibbles(q[i]) | (bits >> 1 & 0x01010101u) << 4;
    }
    set_scale_min(c.low, r.header.x, r.header.y, r.header.z, r.header.w, j);
    set_scale_min(c.high, r.header.x, r.header.y, r.header.z, r.header.w, j + 1);
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) {
    return {block_acts_v2(x, 2 * u), block_acts_v2(x, 2 * u + 1)};
  }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) {
    return __fadd_rn(dot_scaled_min(c.low, a.low), dot_scaled_min(c.high, a.high));
  }
};
// ANCHOR_END: mmvq_q5_k_v2

// ANCHOR: mmvq_iq4_xs
/// d f16, high bits of eight 6-bit scales, their low bits, 128 bytes of nibbles;
/// weight = d * (scale - 32) * level[code].
struct IQ4_XS {
  static constexpr WeightType kType = WeightType::iq4_xs;
  static constexpr int kUnit = 32, kActsAlign = 4, kRoundings = kScaledRoundings;
  static constexpr int kBlocksPerSm = 3;
  struct Raw {
    unsigned d, scales, q[4];  // high bits of the scales above d; their low bits
  };
  using Codes = Scaled;
  using Acts = BlockActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 136 * (u / 8);
    const unsigned char* q = block + 8 + 16 * (u % 8);
    return {load32(block), load32(block + 4), {load32(q), load32(q + 4), load32(q + 8), load32(q + 12)}};
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int u) {
    const int j = u % 8;
    const unsigned low = r.scales >> (4 * j) & 0xfu, high = r.d >> (16 + 2 * j) & 3u;
    Codes c;
    split_levels(r.q, c.q);
    c.d = __fmul_rn(half_value(r.d), static_cast<float>(static_cast<int>(low | high << 4) - 32));  // exact
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) {
    return block_acts<false>(x, u);
  }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) { return dot_scaled<0>(c, a); }
};
// ANCHOR_END: mmvq_iq4_xs

// ANCHOR: mmvq_iq4_xs_v2
/// 3 loads of 8 bytes.
struct IQ4_XSV2 : IQ4_XS {
  static constexpr int kActsAlign = 8;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 136 * (u / 8);  // 8-byte aligned
    const unsigned char* q = block + 8 + 16 * (u % 8);
    const uint2 header = load64(block), a = load64(q), b = load64(q + 8);
    return {header.x, header.y, {a.x, a.y, b.x, b.y}};
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return block_acts_v2(x, u); }
};
// ANCHOR_END: mmvq_iq4_xs_v2

// ANCHOR: mmvq_q2_k
/// 16 bytes of 4-bit scales and minima, 64 of 2-bit codes, d, dmin f16; weight = d * scale * code - dmin *
/// min, a scale for every 16. Sub-block u%8 is shift k = u%4 of the 32 bytes of half (u%8)/4.
struct Q2_K {
  static constexpr WeightType kType = WeightType::q2_k;
  static constexpr int kUnit = 32, kActsAlign = 4, kRoundings = kScaledMinRoundings;
  static constexpr int kBlocksPerSm = 3;
  struct Raw {
    unsigned d, scales, q[8];  // d and dmin; the scale bytes of both halves
  };
  struct Codes {
    unsigned q[8];
    float d, dmin;
    int scale[2], min[2];
  };
  using Acts = BlockActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 84 * (u / 8);  // 4-byte aligned
    const unsigned char* q = block + 16 + 32 * (u % 8 / 4);
    Raw r{load32(block + 80), load16(block + 2 * (u % 8)), {}};
#pragma unroll
    for (int i = 0; i < 8; ++i) r.q[i] = load32(q + 4 * i);
    return r;
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int u) {
    Codes c;
#pragma unroll
    for (int i = 0; i < 8; ++i) c.q[i] = r.q[i] >> (2 * (u % 4)) & 0x03030303u;
    c.d = half_value(r.d);
    c.dmin = half_value(r.d >> 16);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      c.scale[h] = static_cast<int>(r.scales >> (8 * h) & 15u);
      c.min[h] = static_cast<int>(r.scales >> (8 * h + 4) & 15u);
    }
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return block_acts<true>(x, u); }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) {
    const int sum0 = sum_words<4>(a.q);
    const int codes = c.scale[0] * dot_words<4>(c.q, a.q) + c.scale[1] * dot_words<4>(c.q + 4, a.q + 4);
    const int minima = c.min[0] * sum0 + c.min[1] * (a.sum - sum0);
    const float low = __fmul_rn(__fmul_rn(a.d, c.dmin), static_cast<float>(minima));
    return __fmaf_rn(__fmul_rn(a.d, c.d), static_cast<float>(codes), -low);
  }
};
// ANCHOR_END: mmvq_q2_k

// ANCHOR: mmvq_q2_k_v2
/// 64 weights, all of 16 bytes: 7 loads of 4 bytes, where two units of Q2_K take 20.
struct Q2_KV2 {
  static constexpr WeightType kType = WeightType::q2_k;
  static constexpr int kUnit = 64, kActsAlign = 8, kRoundings = kRunsRoundings + 1;
  static constexpr int kBlocksPerSm = 2;
  struct Raw {
    unsigned d, scales[2], q[4];
  };
  struct Codes {
    unsigned q[4][4];
    float d, dmin;
    int scale[4], min[4];
  };
  using Acts = RunActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 84 * (u / 4);  // 4-byte aligned
    const unsigned char* q = block + 16 + 16 * (u % 4);
    const unsigned char* scales = block + 8 * (u % 4 / 2);
    return {load32(block + 80),
            {load32(scales), load32(scales + 4)},
            {load32(q), load32(q + 4), load32(q + 8), load32(q + 12)}};
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int u) {
    Codes c;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c.q[k][i] = r.q[i] >> (2 * k) & 0x03030303u;
      const unsigned scale = r.scales[k / 2] >> (16 * (k % 2) + 8 * (u % 2));  // byte 2*k + u%2
      c.scale[k] = static_cast<int>(scale & 15u);
      c.min[k] = static_cast<int>(scale >> 4 & 15u);
    }
    c.d = half_value(r.d);
    c.dmin = half_value(r.d >> 16);
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return run_acts(x, u); }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) {
    float codes = 0.0f, minima = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      codes = __fmaf_rn(a.d[k], static_cast<float>(c.scale[k] * dot_words<4>(c.q[k], a.q[k])), codes);
      minima = __fmaf_rn(a.d[k], static_cast<float>(c.min[k] * a.sum[k]), minima);
    }
    return __fmaf_rn(c.d, codes, -__fmul_rn(c.dmin, minima));
  }
};
// ANCHOR_END: mmvq_q2_k_v2

// ANCHOR: mmvq_q3_k
/// 32 bytes of third bits, 64 of two low bits, 12 of 6-bit scales, d f16; weight = d * (scale - 32) * (code -
/// 4).
struct Q3_K {
  static constexpr WeightType kType = WeightType::q3_k;
  static constexpr int kUnit = 32, kActsAlign = 4, kRoundings = kScaledRoundings;
  static constexpr int kBlocksPerSm = 2;
  struct Raw {
    unsigned d, low, high, third[8], q[8];  // four low bits of two scales, two high bits of them
  };
  using Codes = Halves;
  using Acts = BlockActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 110 * (u / 8);  // 2-byte aligned
    const unsigned char* q = block + 32 + 32 * (u % 8 / 4);
    const int j = 2 * (u % 8);  // first of two sub-blocks of 16
    Raw r{load16(block + 108), load16(block + 96 + j % 8), load16(block + 104 + j % 4), {}, {}};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      r.third[i] = load32_as_16(block + 4 * i);
      r.q[i] = load32_as_16(q + 4 * i);
    }
    return r;
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int u) {
    Codes c;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      c.q[i] = (r.q[i] >> (2 * (u % 4)) & 0x03030303u) | (r.third[i] >> (u % 8) & 0x01010101u) << 2;
    }
    c.d = half_value(r.d);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned low = r.low >> (8 * h + 4 * (u % 8 / 4)) & 15u;
      const unsigned high = r.high >> (8 * h + 2 * (u % 8 / 2)) & 3u;
      c.scale[h] = static_cast<int>(low | high << 4) - 32;
    }
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return block_acts<true>(x, u); }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) { return dot_halves<4>(c, a); }
};
// ANCHOR_END: mmvq_q3_k

// ANCHOR: mmvq_q3_k_v2
/// 64 weights in 15 loads, where two units of Q3_K take 70.
struct Q3_KV2 {
  static constexpr WeightType kType = WeightType::q3_k;
  static constexpr int kUnit = 64, kActsAlign = 8, kRoundings = kRunsRoundings;
  static constexpr int kBlocksPerSm = 2;
  struct Raw {
    unsigned d, scales[3], third[4], q[4];
  };
  using Codes = Runs;
  using Acts = RunActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 110 * (u / 4);  // 2-byte aligned
    Raw r;
    r.d = load16(block + 108);
    load_words<3>(block + 96, r.scales);
    load_words<4>(block + 16 * (u % 2), r.third);
    load_words<4>(block + 32 + 16 * (u % 4), r.q);
    return r;
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int u) {
    const int half = u % 4 / 2;
    Codes c;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        c.q[k][i] = (r.q[i] >> (2 * k) & 0x03030303u) | (r.third[i] >> (4 * half + k) & 0x01010101u) << 2;
      }
      const int byte = 8 * (2 * (k % 2) + u % 2);  // of byte j % 4, in bits; j = 8*half + 2*k + u%2
      const unsigned low = r.scales[k / 2] >> (byte + 4 * half) & 15u;
      const unsigned high = r.scales[2] >> (byte + 4 * half + 2 * (k / 2)) & 3u;
      c.scale[k] = static_cast<int>(low | high << 4) - 32;
    }
    c.d = half_value(r.d);
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return run_acts(x, u); }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) { return dot_runs<4>(c, a); }
};
// ANCHOR_END: mmvq_q3_k_v2

// ANCHOR: mmvq_q6_k
/// 128 bytes of four low bits, 64 of two high bits, 16 signed scales, d f16; weight = d * scale * (code -
/// 32). Sub-block u%8 is number k = u%4 of half (u%8)/4.
struct Q6_K {
  static constexpr WeightType kType = WeightType::q6_k;
  static constexpr int kUnit = 32, kActsAlign = 4, kRoundings = kScaledRoundings;
  static constexpr int kBlocksPerSm = 2;
  struct Raw {
    unsigned d, scales, high[8], q[8];
  };
  using Codes = Halves;
  using Acts = BlockActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 210 * (u / 8);  // 2-byte aligned
    const int half = u % 8 / 4;
    const unsigned char* q = block + 64 * half + 32 * (u % 2);
    const unsigned char* high = block + 128 + 32 * half;
    Raw r{load16(block + 208), load16(block + 192 + 2 * (u % 8)), {}, {}};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      r.high[i] = load32_as_16(high + 4 * i);
      r.q[i] = load32_as_16(q + 4 * i);
    }
    return r;
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int u) {
    const int k = u % 4;
    Codes c;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      c.q[i] = low_nibbles(r.q[i] >> (4 * (k / 2))) | (r.high[i] >> (2 * k) & 0x03030303u) << 4;
    }
    c.d = half_value(r.d);
    c.scale[0] = static_cast<signed char>(r.scales & 0xffu);
    c.scale[1] = static_cast<signed char>(r.scales >> 8);
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return block_acts<true>(x, u); }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) { return dot_halves<32>(c, a); }
};
// ANCHOR_END: mmvq_q6_k

// ANCHOR: mmvq_q6_k_v2
/// 64 weights in 19 loads, where two units of Q6_K take 68.
struct Q6_KV2 {
  static constexpr WeightType kType = WeightType::q6_k;
  static constexpr int kUnit = 64, kActsAlign = 8, kRoundings = kRunsRoundings;
  static constexpr int kBlocksPerSm = 2;
  struct Raw {
    unsigned d, scales[2], high[4], a[4], b[4];
  };
  using Codes = Runs;
  using Acts = RunActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 210 * (u / 4);  // 2-byte aligned
    const int half = u % 4 / 2, odd = u % 2;
    Raw r;
    r.d = load16(block + 208);
    load_words<2>(block + 192 + 8 * half, r.scales);
    load_words<4>(block + 128 + 32 * half + 16 * odd, r.high);
    load_words<4>(block + 64 * half + 16 * odd, r.a);
    load_words<4>(block + 64 * half + 32 + 16 * odd, r.b);
    return r;
  }
  static __device__ __forceinline__ Codes codes(const Raw& r, int u) {
    Codes c;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned h = r.high[i];
      c.q[0][i] = low_nibbles(r.a[i]) | (h & 0x03030303u) << 4;
      c.q[1][i] = low_nibbles(r.b[i]) | (h >> 2 & 0x03030303u) << 4;
      c.q[2][i] = high_nibbles(r.a[i]) | (h >> 4 & 0x03030303u) << 4;
      c.q[3][i] = high_nibbles(r.b[i]) | (h >> 6 & 0x03030303u) << 4;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      c.scale[k] = static_cast<signed char>(r.scales[k / 2] >> (16 * (k % 2) + 8 * (u % 2)) &
                                            0xffu);  // byte 2*k + u%2
    }
    c.d = half_value(r.d);
    return c;
  }
  static __device__ __forceinline__ Acts acts(const BlockQ8Pad40* x, int u) { return run_acts(x, u); }
  static __device__ __forceinline__ float dot(const Codes& c, const Acts& a) { return dot_runs<32>(c, a); }
};
// ANCHOR_END: mmvq_q6_k_v2

}  // namespace ladder::mmvq
