// How a lane multiplies a few weights of each storage type with f32 activations: the part of the kernels of
// kernels/gemv/quant_f32_matmul.cuh that differs from type to type.
//
// A format is a struct with
//   kType       the storage type
//   kUnit       weights that a lane takes at once; a row is id / kUnit units, dealt to the lanes like cards
//   kInFlight   units whose loads a lane starts together, for each of its rows
//   Raw         a unit's bytes in registers
//   load        unit `u` of a row -> Raw. Never a load wider than its alignment, or that ends past the row.
//   Acts, acts  the activations that belong to unit `u`, read once for all rows
//   dot         Raw . Acts -> f32
//
// Alignment. A row is a multiple of the block, and a matrix begins at a multiple of 16 bytes, so a block is
// aligned to the largest power of two that divides its size: 18, 22, 34, 110, 210 bytes: 2; 20, 84: 4;
// 24, 136: 8; 144, 176: 16.
//
// Block layouts: kernels/quant/blocks.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "harness/experiment/weight_types.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/quant/blocks.hpp"

namespace ladder::quant_f32 {

__device__ __forceinline__ unsigned load16(const unsigned char* p) {  // p: 2-byte aligned
  return *reinterpret_cast<const std::uint16_t*>(p);
}
__device__ __forceinline__ unsigned load32(const unsigned char* p) {  // p: 4-byte aligned
  return *reinterpret_cast<const unsigned*>(p);
}
/// Four bytes that are only 2-byte aligned: two loads.
__device__ __forceinline__ unsigned load32_as_16(const unsigned char* p) {
  return load16(p) | load16(p + 2) << 16;
}
__device__ __forceinline__ uint2 load64(const unsigned char* p) {  // p: 8-byte aligned
  return *reinterpret_cast<const uint2*>(p);
}
__device__ __forceinline__ uint4 load128(const unsigned char* p) {  // p: 16-byte aligned
  return *reinterpret_cast<const uint4*>(p);
}
__device__ __forceinline__ float4 load_acts4(const float* x) { return *reinterpret_cast<const float4*>(x); }

/// The f16 in the low half of a word.
__device__ __forceinline__ float half_value(unsigned bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits & 0xffffu)));
}

// ANCHOR: code_value
/// Byte J of a word, minus BIAS, as a float. The byte becomes the low mantissa bits of 2^23, which is the
/// float 2^23 + byte; the subtraction is exact. One byte permutation and one addition instead of a shift, a
/// mask and a conversion.
template <int J, int BIAS>
__device__ __forceinline__ float code_value(unsigned word) {
  constexpr unsigned kExponent = 0x4b000000u;  // 2^23 as a float
  return __uint_as_float(__byte_perm(word, kExponent, 0x7440u | J)) - (8388608.0f + BIAS);
}
// ANCHOR_END: code_value

/// sum + the four byte codes of a word, each minus BIAS, times a, b, c, d.
template <int BIAS>
__device__ __forceinline__ float dot4(unsigned word, float a, float b, float c, float d, float sum) {
  sum += code_value<0, BIAS>(word) * a;
  sum += code_value<1, BIAS>(word) * b;
  sum += code_value<2, BIAS>(word) * c;
  sum += code_value<3, BIAS>(word) * d;
  return sum;
}
template <int BIAS>
__device__ __forceinline__ float dot4(unsigned word, float4 x, float sum) {
  return dot4<BIAS>(word, x.x, x.y, x.z, x.w, sum);
}
__device__ __forceinline__ float sum4(float4 x, float sum) { return sum + x.x + x.y + x.z + x.w; }

/// The low and the high nibbles of four bytes.
__device__ __forceinline__ unsigned low_nibbles(unsigned word) { return word & 0x0f0f0f0fu; }
__device__ __forceinline__ unsigned high_nibbles(unsigned word) { return word >> 4 & 0x0f0f0f0fu; }

// Types without blocks ----------------------------------------------------------------------------------

/// Two of the 16-bit numbers of a word -> f32.
struct HalfPair {
  static __device__ __forceinline__ float first(unsigned w) { return half_value(w); }
  static __device__ __forceinline__ float second(unsigned w) { return half_value(w >> 16); }
};
struct BfloatPair {  // bf16 is the upper half of an f32
  static __device__ __forceinline__ float first(unsigned w) { return __uint_as_float(w << 16); }
  static __device__ __forceinline__ float second(unsigned w) { return __uint_as_float(w & 0xffff0000u); }
};

/// Eight 16-bit weights, one 16-byte load. id % 8 == 0.
template <class Pair>
struct SixteenBitVec {
  static constexpr int kUnit = 8, kInFlight = 2;
  struct Raw {
    uint4 w;
  };
  struct Acts {
    float4 a, b;
  };
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    return {load128(row + 16 * u)};
  }
  static __device__ __forceinline__ Acts acts(const float* x, int u) {
    return {load_acts4(x + 8 * u), load_acts4(x + 8 * u + 4)};
  }
  static __device__ __forceinline__ float dot(const Raw& r, const Acts& x, int) {
    float sum = Pair::first(r.w.x) * x.a.x;
    sum += Pair::second(r.w.x) * x.a.y;
    sum += Pair::first(r.w.y) * x.a.z;
    sum += Pair::second(r.w.y) * x.a.w;
    sum += Pair::first(r.w.z) * x.b.x;
    sum += Pair::second(r.w.z) * x.b.y;
    sum += Pair::first(r.w.w) * x.b.z;
    sum += Pair::second(r.w.w) * x.b.w;
    return sum;
  }
};

/// One 16-bit weight. Any id.
template <class Pair>
struct SixteenBitScalar {
  static constexpr int kUnit = 1, kInFlight = 4;
  struct Raw {
    unsigned w;
  };
  struct Acts {
    float x;
  };
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    return {load16(row + 2 * u)};
  }
  static __device__ __forceinline__ Acts acts(const float* x, int u) { return {x[u]}; }
  static __device__ __forceinline__ float dot(const Raw& r, const Acts& x, int) {
    return Pair::first(r.w) * x.x;
  }
};

// ANCHOR: f16_f32_matmul
struct F16Vec : SixteenBitVec<HalfPair> {
  static constexpr WeightType kType = WeightType::f16;
};
struct F16Scalar : SixteenBitScalar<HalfPair> {
  static constexpr WeightType kType = WeightType::f16;
};
// ANCHOR_END: f16_f32_matmul

// ANCHOR: bf16_f32_matmul
struct BF16Vec : SixteenBitVec<BfloatPair> {
  static constexpr WeightType kType = WeightType::bf16;
};
struct BF16Scalar : SixteenBitScalar<BfloatPair> {
  static constexpr WeightType kType = WeightType::bf16;
};
// ANCHOR_END: bf16_f32_matmul

// Blocks of 32 ------------------------------------------------------------------------------------------
// A pair of lanes shares a block. Lane `half` of the pair (0 or 1) has elements 8*half ..
// 8*half+7, the low nibbles of eight bytes, and 16+8*half .. 16+8*half+7, their high nibbles.

struct PairActs {
  float4 low[2], high[2];
};
__device__ __forceinline__ PairActs pair_acts(const float* x, int u) {
  const float* p = x + 32 * (u / 2) + 8 * (u % 2);
  return {{load_acts4(p), load_acts4(p + 4)}, {load_acts4(p + 16), load_acts4(p + 20)}};
}
__device__ __forceinline__ float pair_sum(const PairActs& x) {
  return sum4(x.low[0], sum4(x.low[1], sum4(x.high[0], sum4(x.high[1], 0.0f))));
}

// ANCHOR: q4_0_f32_matmul
/// d f16, 16 bytes of nibbles; weight = (code - 8) * d.
struct Q4_0 {
  static constexpr WeightType kType = WeightType::q4_0;
  static constexpr int kUnit = 16, kInFlight = 2;
  struct Raw {
    unsigned q[4], d;  // 16 bits each
  };
  struct Acts {
    float low[8], high[8], sum;
  };
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 18 * (u / 2);  // 2-byte aligned
    const unsigned char* q = block + 2 + 8 * (u % 2);
    return {{load16(q), load16(q + 2), load16(q + 4), load16(q + 6)}, load16(block)};
  }
  // A 16-bit word holds four codes, 0 to 3 nibbles up. They are masked where they are and never shifted: what
  // they are too large by, a power of 16, is divided out of the activations, once for all rows and without
  // rounding.
  static __device__ __forceinline__ Acts acts(const float* x, int u) {
    const PairActs p = pair_acts(x, u);
    Acts a;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a.low[4 * i + 0] = p.low[i].x;                    // & 0x000f: 1
      a.low[4 * i + 1] = p.low[i].y * (1.0f / 256.0f);  // & 0x0f00: 16^2
      a.low[4 * i + 2] = p.low[i].z;
      a.low[4 * i + 3] = p.low[i].w * (1.0f / 256.0f);
      a.high[4 * i + 0] = p.high[i].x * (1.0f / 16.0f);    // & 0x00f0: 16
      a.high[4 * i + 1] = p.high[i].y * (1.0f / 4096.0f);  // & 0xf000: 16^3
      a.high[4 * i + 2] = p.high[i].z * (1.0f / 16.0f);
      a.high[4 * i + 3] = p.high[i].w * (1.0f / 4096.0f);
    }
    a.sum = pair_sum(p);
    return a;
  }
  // sum (q - 8) x = sum q x - 8 sum x, and the scale only once.
  static __device__ __forceinline__ float dot(const Raw& r, const Acts& x, int) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum += static_cast<float>(r.q[i] & 0x000fu) * x.low[2 * i];
      sum += static_cast<float>(r.q[i] & 0x0f00u) * x.low[2 * i + 1];
      sum += static_cast<float>(r.q[i] & 0x00f0u) * x.high[2 * i];
      sum += static_cast<float>(r.q[i] & 0xf000u) * x.high[2 * i + 1];
    }
    return half_value(r.d) * (sum - 8.0f * x.sum);
  }
};
// ANCHOR_END: q4_0_f32_matmul

struct PairSumActs {
  PairActs x;
  float sum;
};

// ANCHOR: q4_1_f32_matmul
/// d, m f16, 16 bytes of nibbles; weight = code * d + m.
struct Q4_1 {
  static constexpr WeightType kType = WeightType::q4_1;
  static constexpr int kUnit = 16, kInFlight = 2;
  struct Raw {
    unsigned q[2], dm;
  };
  using Acts = PairSumActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 20 * (u / 2);  // 4-byte aligned
    const unsigned char* q = block + 4 + 8 * (u % 2);
    return {{load32(q), load32(q + 4)}, load32(block)};
  }
  static __device__ __forceinline__ Acts acts(const float* x, int u) {
    const PairActs p = pair_acts(x, u);
    return {p, pair_sum(p)};
  }
  static __device__ __forceinline__ float dot(const Raw& r, const Acts& a, int) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum = dot4<0>(low_nibbles(r.q[i]), a.x.low[i], sum);
      sum = dot4<0>(high_nibbles(r.q[i]), a.x.high[i], sum);
    }
    return half_value(r.dm) * sum + half_value(r.dm >> 16) * a.sum;
  }
};
// ANCHOR_END: q4_1_f32_matmul

/// Bits `shift` .. `shift`+3 of a word of fifth bits, each at bit 4 of a byte of its own: b0 goes to bit 4,
/// b1 to bit 12, ... The product writes every bit to four places; no two of the sixteen coincide, and the
/// mask keeps four.
__device__ __forceinline__ unsigned fifth_bits(unsigned bits, int shift) {
  return ((bits >> shift & 0xfu) * 0x02040810u) & 0x10101010u;
}

// ANCHOR: q5_0_f32_matmul
/// d f16, 32 fifth bits, 16 bytes of nibbles; weight = (code - 16) * d.
struct Q5_0 {
  static constexpr WeightType kType = WeightType::q5_0;
  static constexpr int kUnit = 16, kInFlight = 1;
  struct Raw {
    unsigned q[2], bits, d;
  };
  using Acts = PairActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 22 * (u / 2);  // 2-byte aligned: also the fifth bits take two loads
    const unsigned char* q = block + 6 + 8 * (u % 2);
    return {{load32_as_16(q), load32_as_16(q + 4)}, load32_as_16(block + 2), load16(block)};
  }
  static __device__ __forceinline__ Acts acts(const float* x, int u) { return pair_acts(x, u); }
  static __device__ __forceinline__ float dot(const Raw& r, const Acts& x, int u) {
    const int first = 8 * (u % 2);  // fifth bit of element j is bit j
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum = dot4<16>(low_nibbles(r.q[i]) | fifth_bits(r.bits, first + 4 * i), x.low[i], sum);
      sum = dot4<16>(high_nibbles(r.q[i]) | fifth_bits(r.bits, first + 16 + 4 * i), x.high[i], sum);
    }
    return half_value(r.d) * sum;
  }
};
// ANCHOR_END: q5_0_f32_matmul

// ANCHOR: q5_1_f32_matmul
/// d, m f16, 32 fifth bits, 16 bytes of nibbles; weight = code * d + m.
struct Q5_1 {
  static constexpr WeightType kType = WeightType::q5_1;
  static constexpr int kUnit = 16, kInFlight = 2;
  struct Raw {
    uint2 header, q;  // d and m, fifth bits; nibbles
  };
  using Acts = PairSumActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 24 * (u / 2);  // 8-byte aligned
    return {load64(block), load64(block + 8 + 8 * (u % 2))};
  }
  static __device__ __forceinline__ Acts acts(const float* x, int u) {
    const PairActs p = pair_acts(x, u);
    return {p, pair_sum(p)};
  }
  static __device__ __forceinline__ float dot(const Raw& r, const Acts& a, int u) {
    const int first = 8 * (u % 2);
    const unsigned q[2] = {r.q.x, r.q.y};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum = dot4<0>(low_nibbles(q[i]) | fifth_bits(r.header.y, first + 4 * i), a.x.low[i], sum);
      sum = dot4<0>(high_nibbles(q[i]) | fifth_bits(r.header.y, first + 16 + 4 * i), a.x.high[i], sum);
    }
    return half_value(r.header.x) * sum + half_value(r.header.x >> 16) * a.sum;
  }
};
// ANCHOR_END: q5_1_f32_matmul

// ANCHOR: q8_0_f32_matmul
/// d f16, 32 signed bytes; weight = code * d. The lane's share is two runs of eight bytes, as with
/// the nibbles.
struct Q8_0 {
  static constexpr WeightType kType = WeightType::q8_0;
  static constexpr int kUnit = 16, kInFlight = 1;
  struct Raw {
    unsigned low[2], high[2], d;
  };
  using Acts = PairActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 34 * (u / 2);  // 2-byte aligned
    const unsigned char* q = block + 2 + 8 * (u % 2);
    return {
        {load32_as_16(q), load32_as_16(q + 4)}, {load32_as_16(q + 16), load32_as_16(q + 20)}, load16(block)};
  }
  static __device__ __forceinline__ Acts acts(const float* x, int u) { return pair_acts(x, u); }
  static __device__ __forceinline__ float dot(const Raw& r, const Acts& x, int) {
    constexpr unsigned kFlip = 0x80808080u;  // signed byte + 128 as an unsigned one
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum = dot4<128>(r.low[i] ^ kFlip, x.low[i], sum);
      sum = dot4<128>(r.high[i] ^ kFlip, x.high[i], sum);
    }
    return half_value(r.d) * sum;
  }
};
// ANCHOR_END: q8_0_f32_matmul

/// Levels `first` .. `first`+3 of IQ4, each plus 128, a byte each.
constexpr unsigned iq4_levels_word(std::size_t first) {
  unsigned word = 0;
  for (std::size_t j = 0; j < 4; ++j) word |= static_cast<unsigned>(kIq4Values[first + j] + 128) << (8 * j);
  return word;
}
inline constexpr unsigned kIq4Levels0 = iq4_levels_word(0), kIq4Levels1 = iq4_levels_word(4),
                          kIq4Levels2 = iq4_levels_word(8), kIq4Levels3 = iq4_levels_word(12);

/// The levels of the four codes in 16 bits, plus 128, a byte each. Byte permutations choose among eight bytes
/// by three bits; the codes' fourth bits then choose between the halves of the table.
__device__ __forceinline__ unsigned iq4_levels(unsigned codes) {
  const unsigned three = codes & 0x7777u;
  const unsigned lower = __byte_perm(kIq4Levels0, kIq4Levels1, three);
  const unsigned upper = __byte_perm(kIq4Levels2, kIq4Levels3, three);
  return __byte_perm(lower, upper, 0x3210u | (codes & 0x8888u) >> 1);
}

/// sum + the four levels of the 16 low bits times their activations: two bytes are elements
/// j, 16+j, j+1, 17+j.
__device__ __forceinline__ float iq4_dot4(unsigned codes, float low0, float high0, float low1, float high1,
                                          float sum) {
  return dot4<128>(iq4_levels(codes), low0, high0, low1, high1, sum);
}
__device__ __forceinline__ float iq4_dot8(unsigned codes, float4 low, float4 high, float sum) {
  sum = iq4_dot4(codes, low.x, high.x, low.y, high.y, sum);
  return iq4_dot4(codes >> 16, low.z, high.z, low.w, high.w, sum);
}

// ANCHOR: iq4_nl_f32_matmul
/// d f16, 16 bytes of nibbles; weight = level[code] * d.
struct IQ4_NL {
  static constexpr WeightType kType = WeightType::iq4_nl;
  static constexpr int kUnit = 16, kInFlight = 2;
  struct Raw {
    unsigned q[2], d;
  };
  using Acts = PairActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 18 * (u / 2);  // 2-byte aligned
    const unsigned char* q = block + 2 + 8 * (u % 2);
    return {{load32_as_16(q), load32_as_16(q + 4)}, load16(block)};
  }
  static __device__ __forceinline__ Acts acts(const float* x, int u) { return pair_acts(x, u); }
  static __device__ __forceinline__ float dot(const Raw& r, const Acts& x, int) {
    const float sum = iq4_dot8(r.q[0], x.low[0], x.high[0], 0.0f);
    return half_value(r.d) * iq4_dot8(r.q[1], x.low[1], x.high[1], sum);
  }
};
// ANCHOR_END: iq4_nl_f32_matmul

// Blocks of 256: eight lanes share a block, 32 elements each --------------------------------------------

/// Four runs of eight activations, 32 apart.
struct QuarterActs {
  float4 x[4][2];
};
/// Unit u is block u/8, half (u%8)/4 of it, bytes 8*(u%4) .. 8*(u%4)+7 of a run of 32; shift k of these bytes
/// is elements 128*half + 32*k + 8*(u%4) .. +7.
__device__ __forceinline__ QuarterActs quarter_acts(const float* x, int u) {
  const float* p = x + 256 * (u / 8) + 128 * (u % 8 / 4) + 8 * (u % 4);
  QuarterActs a;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    a.x[k][0] = load_acts4(p + 32 * k);
    a.x[k][1] = load_acts4(p + 32 * k + 4);
  }
  return a;
}

// ANCHOR: q2_k_f32_matmul
/// 16 bytes of scales and minima, 64 of 2-bit codes, d, dmin f16; weight = d * scale * code - dmin * min.
struct Q2_K {
  static constexpr WeightType kType = WeightType::q2_k;
  static constexpr int kUnit = 32, kInFlight = 1;
  struct Raw {
    unsigned q[2], scales[2], d;  // d and dmin
  };
  struct Acts {
    QuarterActs x;
    float sum[4];
  };
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 84 * (u / 8);  // 4-byte aligned
    const int half = u % 8 / 4;
    const unsigned char* q = block + 16 + 32 * half + 8 * (u % 4);
    const unsigned char* scales = block + 8 * half;
    return {{load32(q), load32(q + 4)}, {load32(scales), load32(scales + 4)}, load32(block + 80)};
  }
  static __device__ __forceinline__ Acts acts(const float* x, int u) {
    Acts a{quarter_acts(x, u), {}};
#pragma unroll
    for (int k = 0; k < 4; ++k) a.sum[k] = sum4(a.x.x[k][0], sum4(a.x.x[k][1], 0.0f));
    return a;
  }
  static __device__ __forceinline__ float dot(const Raw& r, const Acts& a, int u) {
    const int odd = 8 * (u % 4 / 2);  // second sub-block of 16: the next scale byte
    float codes = 0.0f, minima = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const unsigned scale = r.scales[k / 2] >> (16 * (k % 2) + odd);
      float sum = dot4<0>(r.q[0] >> (2 * k) & 0x03030303u, a.x.x[k][0], 0.0f);
      sum = dot4<0>(r.q[1] >> (2 * k) & 0x03030303u, a.x.x[k][1], sum);
      codes += static_cast<float>(scale & 0xfu) * sum;
      minima += static_cast<float>(scale >> 4 & 0xfu) * a.sum[k];
    }
    return half_value(r.d) * codes - half_value(r.d >> 16) * minima;
  }
};
// ANCHOR_END: q2_k_f32_matmul

// ANCHOR: q3_k_f32_matmul
/// 32 bytes of third bits, 64 of two low bits, 12 of 6-bit scales, d f16;
/// weight = d * (scale - 32) * (code - 4).
struct Q3_K {
  static constexpr WeightType kType = WeightType::q3_k;
  static constexpr int kUnit = 32, kInFlight = 1;
  struct Raw {
    unsigned q[2], third[2], scales[3], d;
  };
  using Acts = QuarterActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 110 * (u / 8);  // 2-byte aligned
    const unsigned char* third = block + 8 * (u % 4);
    const unsigned char* q = block + 32 + 32 * (u % 8 / 4) + 8 * (u % 4);
    const unsigned char* scales = block + 96;
    return {{load32_as_16(q), load32_as_16(q + 4)},
            {load32_as_16(third), load32_as_16(third + 4)},
            {load32_as_16(scales), load32_as_16(scales + 4), load32_as_16(scales + 8)},
            load16(block + 108)};
  }
  static __device__ __forceinline__ Acts acts(const float* x, int u) { return quarter_acts(x, u); }
  static __device__ __forceinline__ float dot(const Raw& r, const Acts& a, int u) {
    const int half = u % 8 / 4, odd = u % 4 / 2;  // sub-block j = 8*half + 2*k + odd
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int byte = 8 * (2 * (k % 2) + odd);  // of byte j % 4, in bits
      const unsigned low = r.scales[k / 2] >> (byte + 4 * half) & 0xfu;
      const unsigned high = r.scales[2] >> (byte + 4 * half + 2 * (k / 2)) & 3u;
      const float scale = static_cast<float>(static_cast<int>(low | high << 4) - 32);
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned code = (r.q[i] >> (2 * k) & 0x03030303u) | (r.third[i] >> (4 * half + k) & 0x01010101u)
                                                                      << 2;
        sum = dot4<4>(code, a.x[k][i], sum);
      }
      total += scale * sum;
    }
    return half_value(r.d) * total;
  }
};
// ANCHOR_END: q3_k_f32_matmul

/// Scale and minimum number j (0..7) of the 12 packed bytes of Q4_K and Q5_K, which are words y, z, w of the
/// header.
struct ScaleMin {
  float scale, min;
};
__device__ __forceinline__ ScaleMin six_bits(const uint4& header, int j) {
  const int byte = 8 * (j % 4);
  const unsigned a = header.y >> byte, b = header.z >> byte, c = header.w >> byte;
  const unsigned scale = j < 4 ? a & 63u : (c & 15u) | (a >> 6 & 3u) << 4;
  const unsigned min = j < 4 ? b & 63u : (c >> 4 & 15u) | (b >> 6 & 3u) << 4;
  return {static_cast<float>(scale), static_cast<float>(min)};
}

/// Unit u of Q4_K and Q5_K is block u/8, group (u%8)/2 of 64 elements, bytes 16*(u%2) .. +15 of its 32: the
/// low nibbles are elements 64*group + 16*(u%2) .. +15, of sub-block 2*group; the high nibbles are 32
/// further.
struct GroupActs {
  float4 low[4], high[4];
  float low_sum, high_sum;
};
__device__ __forceinline__ GroupActs group_acts(const float* x, int u) {
  const float* p = x + 256 * (u / 8) + 64 * (u % 8 / 2) + 16 * (u % 2);
  GroupActs a;
  a.low_sum = a.high_sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a.low[i] = load_acts4(p + 4 * i);
    a.high[i] = load_acts4(p + 32 + 4 * i);
    a.low_sum = sum4(a.low[i], a.low_sum);
    a.high_sum = sum4(a.high[i], a.high_sum);
  }
  return a;
}
/// d * scale * codes - dmin * min * activations for both sub-blocks of a group.
__device__ __forceinline__ float scaled_group(const uint4& header, int u, float low, float high,
                                              const GroupActs& a) {
  const int j = 2 * (u % 8 / 2);
  const ScaleMin s0 = six_bits(header, j), s1 = six_bits(header, j + 1);
  return half_value(header.x) * (s0.scale * low + s1.scale * high) -
         half_value(header.x >> 16) * (s0.min * a.low_sum + s1.min * a.high_sum);
}

// ANCHOR: q4_k_f32_matmul
/// d, dmin f16, 12 bytes of 6-bit scales and minima, 128 of nibbles; weight = d * scale * code - dmin * min.
struct Q4_K {
  static constexpr WeightType kType = WeightType::q4_k;
  static constexpr int kUnit = 32, kInFlight = 1;
  struct Raw {
    uint4 header, q;
  };
  using Acts = GroupActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 144 * (u / 8);  // 16-byte aligned
    return {load128(block), load128(block + 16 + 16 * (u % 8))};
  }
  static __device__ __forceinline__ Acts acts(const float* x, int u) { return group_acts(x, u); }
  static __device__ __forceinline__ float dot(const Raw& r, const Acts& a, int u) {
    const unsigned q[4] = {r.q.x, r.q.y, r.q.z, r.q.w};
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      low = dot4<0>(low_nibbles(q[i]), a.low[i], low);
      high = dot4<0>(high_nibbles(q[i]), a.high[i], high);
    }
    return scaled_group(r.header, u, low, high, a);
  }
};
// ANCHOR_END: q4_k_f32_matmul

// ANCHOR: q5_k_f32_matmul
/// As Q4_K, with 32 bytes of fifth bits between scales and nibbles: bit j of byte l belongs to element
/// 32*j + l.
struct Q5_K {
  static constexpr WeightType kType = WeightType::q5_k;
  static constexpr int kUnit = 32, kInFlight = 1;
  struct Raw {
    uint4 header, fifth, q;
  };
  using Acts = GroupActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 176 * (u / 8);  // 16-byte aligned
    return {load128(block), load128(block + 16 + 16 * (u % 2)), load128(block + 48 + 16 * (u % 8))};
  }
  static __device__ __forceinline__ Acts acts(const float* x, int u) { return group_acts(x, u); }
  static __device__ __forceinline__ float dot(const Raw& r, const Acts& a, int u) {
    const int j = 2 * (u % 8 / 2);  // sub-block of the low nibbles
    const unsigned q[4] = {r.q.x, r.q.y, r.q.z, r.q.w};
    const unsigned fifth[4] = {r.fifth.x, r.fifth.y, r.fifth.z, r.fifth.w};
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned bits = fifth[i] >> j;
      low = dot4<0>(low_nibbles(q[i]) | (bits & 0x01010101u) << 4, a.low[i], low);
      high = dot4<0>(high_nibbles(q[i]) | (bits >> 1 & 0x01010101u) << 4, a.high[i], high);
    }
    return scaled_group(r.header, u, low, high, a);
  }
};
// ANCHOR_END: q5_k_f32_matmul

// ANCHOR: q6_k_f32_matmul
/// 128 bytes of four low bits, 64 of two high bits, 16 signed scales, d f16;
/// weight = d * scale * (code - 32).
struct Q6_K {
  static constexpr WeightType kType = WeightType::q6_k;
  static constexpr int kUnit = 32, kInFlight = 1;
  struct Raw {
    unsigned a[2], b[2], high[2], d;  // two runs of eight bytes of nibbles, eight bytes of high bits
    int scale[4];
  };
  using Acts = QuarterActs;
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 210 * (u / 8);  // 2-byte aligned
    const int half = u % 8 / 4, w = u % 4;
    const unsigned char* low = block + 64 * half + 8 * w;
    const unsigned char* high = block + 128 + 32 * half + 8 * w;
    const auto* scale = reinterpret_cast<const signed char*>(block + 192 + 8 * half + w / 2);
    return {{load32_as_16(low), load32_as_16(low + 4)},
            {load32_as_16(low + 32), load32_as_16(low + 36)},
            {load32_as_16(high), load32_as_16(high + 4)},
            load16(block + 208),
            {scale[0], scale[2], scale[4], scale[6]}};
  }
  static __device__ __forceinline__ Acts acts(const float* x, int u) { return quarter_acts(x, u); }
  static __device__ __forceinline__ float dot(const Raw& r, const Acts& x, int) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned h = r.high[i];
      sum[0] = dot4<32>(low_nibbles(r.a[i]) | (h & 0x03030303u) << 4, x.x[0][i], sum[0]);
      sum[1] = dot4<32>(low_nibbles(r.b[i]) | (h >> 2 & 0x03030303u) << 4, x.x[1][i], sum[1]);
      sum[2] = dot4<32>(high_nibbles(r.a[i]) | (h >> 4 & 0x03030303u) << 4, x.x[2][i], sum[2]);
      sum[3] = dot4<32>(high_nibbles(r.b[i]) | (h >> 6 & 0x03030303u) << 4, x.x[3][i], sum[3]);
    }
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) total += static_cast<float>(r.scale[k]) * sum[k];
    return half_value(r.d) * total;
  }
};
// ANCHOR_END: q6_k_f32_matmul

// ANCHOR: iq4_xs_f32_matmul
/// d f16, high bits of eight 6-bit scales, their low bits, 128 bytes of nibbles;
/// weight = d * (scale - 32) * level[code].
struct IQ4_XS {
  static constexpr WeightType kType = WeightType::iq4_xs;
  static constexpr int kUnit = 32, kInFlight = 1;
  struct Raw {
    uint2 header, q[2];
  };
  struct Acts {
    float4 low[4], high[4];
  };
  static __device__ __forceinline__ Raw load(const unsigned char* row, int u) {
    const unsigned char* block = row + 136 * (u / 8);  // 8-byte aligned
    const unsigned char* q = block + 8 + 16 * (u % 8);
    return {load64(block), {load64(q), load64(q + 8)}};
  }
  static __device__ __forceinline__ Acts acts(const float* x, int u) {
    Acts a;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a.low[i] = load_acts4(x + 32 * u + 4 * i);
      a.high[i] = load_acts4(x + 32 * u + 16 + 4 * i);
    }
    return a;
  }
  static __device__ __forceinline__ float dot(const Raw& r, const Acts& x, int u) {
    const int j = u % 8;  // sub-block
    const unsigned low = r.header.y >> (4 * j) & 0xfu, high = r.header.x >> (16 + 2 * j) & 3u;
    const float scale = static_cast<float>(static_cast<int>(low | high << 4) - 32);
    float sum = iq4_dot8(r.q[0].x, x.low[0], x.high[0], 0.0f);
    sum = iq4_dot8(r.q[0].y, x.low[1], x.high[1], sum);
    sum = iq4_dot8(r.q[1].x, x.low[2], x.high[2], sum);
    sum = iq4_dot8(r.q[1].y, x.low[3], x.high[3], sum);
    return half_value(r.header.x) * scale * sum;
  }
};
// ANCHOR_END: iq4_xs_f32_matmul

}  // namespace ladder::quant_f32
