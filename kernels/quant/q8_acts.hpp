// The block of int8 activations that the int8 products read: the 32 codes and the scale of Q8_0 with the sum
// of the codes beside them, all at multiples of their own size. An array [nt][id/32]. How it is made is in
// quantize_acts.hpp.
#pragma once

#include <cstdint>

namespace ladder {

/// Activations that share a scale.
inline constexpr int kQ8ActsPerBlock = 32;

// ANCHOR: block_q8_pad40
/// 32 activations: x[i] = d * q[i].
struct alignas(4) BlockQ8Pad40 {
  std::uint16_t d;    // f16
  std::uint16_t pad;  // zero: puts the codes at a multiple of 4 bytes
  std::int8_t q[32];  // -127..127
  std::int32_t sum;   // of the codes
};
// ANCHOR_END: block_q8_pad40
static_assert(sizeof(BlockQ8Pad40) == 40 && alignof(BlockQ8Pad40) == 4);

}  // namespace ladder
