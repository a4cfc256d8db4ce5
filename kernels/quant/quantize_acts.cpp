#include "kernels/quant/quantize_acts.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "harness/device/half_bits.hpp"
#include "kernels/cpu/quant_acts.hpp"

namespace ladder {
namespace {

void require_blocks(std::size_t n) {
  if (n % kQ8ActsPerBlock != 0) {
    throw std::invalid_argument("activations are quantized in blocks: their number must be a multiple of " +
                                std::to_string(kQ8ActsPerBlock) + ", not " + std::to_string(n));
  }
}

BlockQ8Pad40 quantized(const float* x) {
  // The order of magnitudes is that of their bits; infinities and NaNs come last.
  std::uint32_t largest = 0;
  for (int i = 0; i < kQ8ActsPerBlock; ++i)
    largest = std::max(largest, std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffU);
  const cpu::ActScale scale = cpu::act_scale(largest);

  BlockQ8Pad40 b{};
  b.d = float_to_half_bits(scale.scale);
  if (scale.inverse == 0) return b;
  for (int i = 0; i < kQ8ActsPerBlock; ++i) {
    b.q[i] = static_cast<std::int8_t>(std::nearbyint(x[i] * scale.inverse));  // halves to even
    b.sum += b.q[i];
  }
  return b;
}

}  // namespace

void quantize_q8_pad40_row(std::span<const float> x, BlockQ8Pad40* out) {
  require_blocks(x.size());
  for (std::size_t i = 0; i < x.size(); i += kQ8ActsPerBlock) *out++ = quantized(x.data() + i);
}

void quantize_q8_0_acts_row(std::span<const float> x, BlockQ8_0* out) {
  require_blocks(x.size());
  for (std::size_t i = 0; i < x.size(); i += kQ8ActsPerBlock) {
    const BlockQ8Pad40 b = quantized(x.data() + i);
    out->d = b.d;
    std::memcpy(out->qs, b.q, sizeof b.q);
    ++out;
  }
}

void dequantize_q8_pad40_row(std::span<const BlockQ8Pad40> blocks, float* out) {
  for (const BlockQ8Pad40& b : blocks) {
    const float d = half_bits_to_float(b.d);
    for (const std::int8_t q : b.q) *out++ = d * static_cast<float>(q);
  }
}

void unpack_q8_pad40_t(const std::int8_t* codes, const std::uint32_t* scales, long long nt, long long id,
                       BlockQ8Pad40* blocks) {
  const Q8ActsPlanes p = detail::checked_q8_acts_planes(nt, id);
  for (long long t = 0; t < nt; ++t) {
    const int token = static_cast<int>(t % kQ8ActsTileTokens);
    for (long long c = 0; c < p.chunks; ++c) {
      BlockQ8Pad40& b = blocks[t * p.chunks + c];
      const long long tile = t / kQ8ActsTileTokens * p.chunks + c;
      for (int word = 0; word < 8; ++word)
        std::memcpy(b.q + 4 * word, codes + tile * kQ8ActsTileBytes + q8_acts_code_byte(token, word), 4);
      const std::uint32_t scale = scales[tile * kQ8ActsTileTokens + q8_acts_scale_word(token)];
      b.d = static_cast<std::uint16_t>(scale);
      b.pad = 0;
      b.sum = static_cast<std::int16_t>(scale >> 16);
    }
  }
}

}  // namespace ladder
