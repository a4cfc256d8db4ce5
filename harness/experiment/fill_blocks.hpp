// Random blocks of the packed types: valid, with scales that a real model could have, and made where they
// lie. Real quantizers are far too slow to fill a 447 MB matrix several times over.
#pragma once

#include <cstdint>

#include "harness/experiment/mix_bits.hpp"
#include "harness/experiment/weight_types.hpp"
#include "kernels/device/cuda.cuh"

namespace ladder {

enum class BlockFill {
  /// All codes equally likely, scales of one binade, weights within about (-2, 2).
  random,
  /// Unit scales and small integer sub-scales. Beside activations of up to 4, code and offset parts of a
  /// product are at most 508 in magnitude together, so sums of 33,026 products are exact in f32 in any order.
  integers,
};

namespace detail {

/// f16 bits of a number in [2^(exponent-15), 2^(exponent-14)).
__host__ __device__ inline std::uint16_t half_in_binade(std::uint32_t random, int exponent, bool signed_too) {
  const std::uint32_t sign = signed_too ? (random & 0x400u) << 5 : 0;
  return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(exponent) << 10 | (random & 0x3ffu));
}

/// Bits of a whole number of 1 to 15 with either sign, in a format of 1 sign bit, an exponent of `bias` and
/// `mantissa` bits.
__host__ __device__ inline std::uint16_t small_int_bits(std::uint32_t random, int bias, int mantissa,
                                                        int limit) {
  const int v = 1 + static_cast<int>(random % static_cast<std::uint32_t>(limit));  // 1..limit
  const int log2 = v >= 8 ? 3 : v >= 4 ? 2 : v >= 2 ? 1 : 0;
  const int fraction = (v << (mantissa - log2)) & ((1 << mantissa) - 1);
  return static_cast<std::uint16_t>((random >> 16 & 1u) << 15 |
                                    static_cast<std::uint32_t>((bias + log2) << mantissa | fraction));
}

__host__ __device__ inline void store16(unsigned char* p, std::uint16_t v) {
  p[0] = static_cast<unsigned char>(v & 0xff);
  p[1] = static_cast<unsigned char>(v >> 8);
}

}  // namespace detail

/// Writes block number `index` of a packed matrix: a pure function of type, kind, seed and index.
/// @param block [block_bytes], block_bytes = info(type).block_bytes (a parameter because device code cannot
/// ask)
__host__ __device__ inline void fill_block(WeightType type, BlockFill kind, std::uint32_t seed,
                                           std::uint64_t index, unsigned char* block, int block_bytes) {
  const std::uint64_t base =
      (static_cast<std::uint64_t>(seed) << 40) ^ (index * 64);  // a block has at most 210 bytes
  for (int i = 0; i < block_bytes; i += 4) {
    const std::uint32_t bits = mix_bits(base + static_cast<std::uint64_t>(i / 4));
    for (int j = i; j < i + 4 && j < block_bytes; ++j) {
      block[j] = static_cast<unsigned char>(bits >> (8 * (j - i)) & 0xff);
    }
  }
  const std::uint32_t a = mix_bits(base + 61), b = mix_bits(base + 62);
  const bool integers = kind == BlockFill::integers;
  // 1.0, or a scale in a binade such that the largest code becomes about 1. `sign`: whether the scale may be
  // negative.
  const auto scale = [&](int offset, std::uint32_t random, int exponent, bool sign) {
    detail::store16(block + offset,
                    integers ? static_cast<std::uint16_t>(0x3c00u | (sign ? (random & 0x400u) << 5 : 0u))
                             : detail::half_in_binade(random, exponent, sign));
  };
  const auto minimum = [&](int offset) {
    detail::store16(block + offset, integers ? detail::small_int_bits(b, 15, 10, 7)
                                             : detail::half_in_binade(b | 0x400u, 14, true));
  };
  // Sub-scales and mins of Q4_K and Q5_K: 1 to 3 and 0 to 3 fit in the low bits of every place.
  const auto six_bit_scales = [&](unsigned char* s) {
    if (!integers) return;
    for (int j = 0; j < 4; ++j) {
      s[j] = static_cast<unsigned char>(1 + s[j] % 3);
      s[j + 4] = static_cast<unsigned char>(s[j + 4] % 4);
      s[j + 8] = static_cast<unsigned char>((1 + (s[j + 8] & 0xf) % 3) | (s[j + 8] >> 4) % 4 << 4);
    }
  };

  switch (type) {
    case WeightType::f32:
      break;  // not packed: fill()
    case WeightType::f16:
      // One in 64 is subnormal.
      detail::store16(block, integers ? detail::small_int_bits(a, 15, 10, 15)
                                      : detail::half_in_binade(
                                            a, (b & 63u) == 0 ? 0 : 11 + static_cast<int>(b & 3u), true));
      break;
    case WeightType::bf16:
      detail::store16(
          block, integers ? detail::small_int_bits(a, 127, 7, 15)
                          : static_cast<std::uint16_t>((a & 0x8000u) | (123u + (b & 3u)) << 7 | (a & 0x7fu)));
      break;
    case WeightType::q4_0:
      scale(0, a, 11, true);
      break;
    case WeightType::q4_1:
      scale(0, a, 11, false);
      minimum(2);
      break;
    case WeightType::q5_0:
      scale(0, a, 10, true);
      break;
    case WeightType::q5_1:
      scale(0, a, 10, false);
      minimum(2);
      break;
    case WeightType::q8_0:
      scale(0, a, 7, true);
      if (integers) {
        for (int j = 2; j < 34; ++j) {
          const int v = block[j] % 30;  // 0..29
          block[j] = static_cast<unsigned char>(v < 15 ? v - 15 : v - 14);
        }
      }
      break;
    case WeightType::q2_k:
      scale(80, a, 9, false);
      scale(82, b, 10, false);
      if (integers) {
        for (int j = 0; j < 16; ++j) {
          block[j] = static_cast<unsigned char>((1 + (block[j] & 0xf) % 3) | (block[j] >> 4) % 4 << 4);
        }
      }
      break;
    case WeightType::q3_k:
      scale(108, a, 7, true);
      if (integers) {
        // -7 to 7 but not 0, stored plus 32: four low bits in bytes 0..7, two high bits in bytes 8..11.
        unsigned char packed[12] = {};
        for (int j = 0; j < 16; ++j) {
          const int v = static_cast<int>(mix_bits(base + 40 + static_cast<std::uint64_t>(j)) % 14u);  // 0..13
          const int stored = 32 + (v < 7 ? v - 7 : v - 6);
          packed[j % 8] = static_cast<unsigned char>(packed[j % 8] | (stored & 15) << (j < 8 ? 0 : 4));
          packed[8 + j % 4] = static_cast<unsigned char>(packed[8 + j % 4] | (stored >> 4) << (2 * (j / 4)));
        }
        for (int j = 0; j < 12; ++j) block[96 + j] = packed[j];
      }
      break;
    case WeightType::q4_k:
      scale(0, a, 5, false);
      scale(2, b, 8, false);
      six_bit_scales(block + 4);
      break;
    case WeightType::q5_k:
      scale(0, a, 4, false);
      scale(2, b, 8, false);
      six_bit_scales(block + 4);
      break;
    case WeightType::q6_k:
      scale(208, a, 3, true);
      if (integers) {
        for (int j = 192; j < 208; ++j) block[j] = static_cast<unsigned char>((block[j] & 1) != 0 ? 1 : 0xff);
      }
      break;
    case WeightType::iq4_nl:
      scale(0, a, 7, true);
      break;
    case WeightType::iq4_xs:
      scale(0, a, 3, true);
      if (integers) {
        // 1 or -1, stored plus 32: 33 is low bits 1, high bits 2; 31 is low bits 15, high bits 1.
        std::uint32_t high = 0;
        for (int j = 0; j < 8; ++j) {
          const bool negative = (b >> j & 1u) != 0;
          high |= (negative ? 1u : 2u) << (2 * j);
          const int shift = j % 2 * 4;
          unsigned char& low = block[4 + j / 2];
          low = static_cast<unsigned char>((low & (0xf0 >> shift)) | (negative ? 15 : 1) << shift);
        }
        detail::store16(block + 2, static_cast<std::uint16_t>(high));
      }
      break;
  }
}

/// Whether a weight of the type is a code part plus an offset (a stored minimum, or the middle of the codes).
__host__ __device__ constexpr bool has_offset(WeightType type) {
  switch (type) {
    case WeightType::q4_0:
    case WeightType::q4_1:
    case WeightType::q5_0:
    case WeightType::q5_1:
    case WeightType::q2_k:
    case WeightType::q3_k:
    case WeightType::q4_k:
    case WeightType::q5_k:
    case WeightType::q6_k:
      return true;
    default:
      return false;
  }
}

/// Sets every code of a block to zero and keeps its scales, so that it decodes to its offsets. For types with
/// offsets.
__host__ __device__ inline void zero_codes(WeightType type, unsigned char* block) {
  const auto zero = [block](int begin, int end) {
    for (int i = begin; i < end; ++i) block[i] = 0;
  };
  switch (type) {
    case WeightType::q4_0:
      zero(2, 18);
      break;
    case WeightType::q4_1:
      zero(4, 20);
      break;
    case WeightType::q5_0:
      zero(2, 22);
      break;
    case WeightType::q5_1:
      zero(4, 24);
      break;
    case WeightType::q2_k:
      zero(16, 80);
      break;
    case WeightType::q3_k:
      zero(0, 96);
      break;
    case WeightType::q4_k:
      zero(16, 144);
      break;
    case WeightType::q5_k:
      zero(16, 176);
      break;
    case WeightType::q6_k:
      zero(0, 192);
      break;
    default:
      break;
  }
}

}  // namespace ladder
