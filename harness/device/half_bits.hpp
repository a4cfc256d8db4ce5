// f16 as bits, for host code and the emulator: conversions that are exact or round to nearest even.
#pragma once

#include <bit>
#include <cstdint>

namespace ladder {

/// f16 bits -> f32: exact for every bit pattern.
constexpr float half_bits_to_float(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1fu;
  std::uint32_t mantissa = h & 0x3ffu;
  if (exponent == 0x1f) {  // infinity, NaN (made quiet)
    return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13) | (mantissa != 0 ? 0x00400000u : 0u));
  }
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  // Subnormal: mantissa * 2^-24, and both factors are exact.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

/// f32 -> f16 bits, round to nearest even; beyond 65519.99 becomes infinity.
constexpr std::uint16_t float_to_half_bits(float f) {
  const std::uint32_t x = std::bit_cast<std::uint32_t>(f);
  const auto sign = static_cast<std::uint16_t>((x >> 16) & 0x8000u);
  const std::uint32_t a = x & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7fffu);   // NaN: CUDA's canonical one
  if (a >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more
  if (a >= 0x38800000u) {                                                   // normal f16
    const std::uint32_t r = a + 0xfffu + ((a >> 13) & 1u);
    return static_cast<std::uint16_t>(sign | ((r - 0x38000000u) >> 13));
  }
  if (a < 0x33000000u) return sign;  // below half of the smallest subnormal
  // Subnormal f16: the value in units of 2^-24, rounded by hand. The implicit bit is made explicit first.
  const std::uint32_t shift = 126u - (a >> 23);  // 14..24
  const std::uint32_t m = (a & 0x7fffffu) | 0x800000u;
  const std::uint32_t q = m >> shift;
  const std::uint32_t rest = m & ((1u << shift) - 1u), tie = 1u << (shift - 1);
  return static_cast<std::uint16_t>(sign | (q + ((rest > tie || (rest == tie && (q & 1u))) ? 1u : 0u)));
}

/// bf16 bits -> f32: exact.
constexpr float bfloat16_bits_to_float(std::uint16_t b) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(b) << 16);
}

/// f32 -> bf16 bits, round to nearest even; a NaN keeps its upper bits and is made quiet.
constexpr std::uint16_t float_to_bfloat16_bits(float f) {
  const std::uint32_t x = std::bit_cast<std::uint32_t>(f);
  if ((x & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((x >> 16) | 0x40u);
  return static_cast<std::uint16_t>((x + 0x7fffu + ((x >> 16) & 1u)) >> 16);
}

}  // namespace ladder
