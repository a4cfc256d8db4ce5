// The rule by which 32 neighbouring activations become int8: one rule for all instruction sets, so that they
// get the same codes. And what those instruction sets share that keep codes in order.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "harness/device/half_bits.hpp"
#include "kernels/cpu/quant_tile.hpp"

namespace ladder::cpu {

/// x is nearest to scale * code, and code = round(x * inverse), halves to even. inverse is 0 where all codes
/// are 0.
struct ActScale {
  float scale, inverse;
};

/// @param largest the bits of max |x|, or of any x that is not finite
inline ActScale act_scale(std::uint32_t largest) {
  constexpr std::uint32_t kInfinity = 0x7f800000;
  // Infinities and NaNs: the scale says so, and every product with it is a NaN.
  if ((largest & 0x7fffffffU) >= kInfinity) return {std::numeric_limits<float>::quiet_NaN(), 0};
  const float scale = std::bit_cast<float>(largest) / 127;
  const float inverse = 1 / scale;
  // Zero, or below 2^-121: too small for an inverse.
  if (!(inverse <= std::numeric_limits<float>::max())) return {0, 0};
  return {scale, inverse};
}

/// TakeGroup for codes in order.
inline void take_in_order(const BlockQ8Pad40* blocks, int count, ActGroup& group) {
  group = {};
  for (int b = 0; b < count; ++b) {
    std::memcpy(group.codes + 32 * b, blocks[b].q, 32);
    for (int run = 2 * b; run < 2 * b + 2; ++run) {
      group.scales[run] = half_bits_to_float(blocks[b].d);
      for (int j = 0; j < 16; ++j) group.negative_sums[run] -= group.codes[16 * run + j];
    }
  }
}

}  // namespace ladder::cpu
