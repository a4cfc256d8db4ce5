// Broken int8 products for many tokens: one bug each, and the checker must reject them all. The one without a bug is the
// control: the checker must accept it, so it is the bug that it rejects.
#pragma once

#include <cstdint>

#include "kernels/device/cuda.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/mmq/mmq_formats.cuh"
#include "kernels/quant/quantize_acts.hpp"

namespace ladder::wrong {

enum class Bug {
  none,
  half_of_k,          ///< 16 of 32 codes are multiplied
  zero_left_in,       ///< unsigned codes taken as they are
  zero_of_a_nibble,   ///< the zero flipped in the nibble's place, not moved to the sign of a byte
  tokens_exchanged,   ///< a result scaled for the token beside it
  scale_of_first,     ///< every chunk scaled by the first one's
  last_chunk,         ///< the tail of a row, less than a tile, is left out
  small_seed,         ///< sums seeded with 2^23: a negative one leaves the numbers whose last bit counts 1
  late_subtraction,   ///< the seed taken off at the end, when it has swallowed the sums
  half_accumulator,   ///< the sum kept in f16
  second_half_stale,  ///< words of the second 16 codes from the chunk before
};

/// A warp a tile of sixteen rows and eight tokens, Q4_0 in tiles.
template <Bug kBug>
__global__ void __launch_bounds__(32)
    q4_0_tile_product(const unsigned char* weights, const std::int8_t* codes, const std::uint32_t* scales,
                      float* out, int nt, int od, int steps, int chunks) {
  using F = tiles::TileQ4_0;
  constexpr int kTile = tiles::tile_bytes<BlockQ4_0>();
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
  const int token8 = static_cast<int>(blockIdx.x) * 8, plane = token8 / 64, local = token8 % 64;
  const float seed = kBug == Bug::small_seed ? 8388608.0f : mmq::kSeed;
  float sums[4] = {}, seeds[4] = {};
  std::uint32_t before = 0;
  for (int step = 0; step < steps; ++step) {
    F::Raw<8> raw;
    raw.load<tiles::FromShared>(weights + (static_cast<long long>(blockIdx.y) * steps + step) * kTile, lane);
    const auto chunk = [&]<int S>() {
      const int at = 4 * step + S;
      if (at >= (kBug == Bug::last_chunk ? chunks / 4 * 4 : chunks)) return;
      std::uint32_t a[4];
      if constexpr (kBug == Bug::zero_left_in) {
        F::codes<S>(raw, a);
        for (std::uint32_t& w : a) w <<= 4;
      } else if constexpr (kBug == Bug::zero_of_a_nibble) {
        F::codes<S>(raw, a);
        for (std::uint32_t& w : a) w = (w ^ 0x08080808u) << 4;
        for (std::uint32_t& w : a) w = w >> 4 & 0x0f0f0f0fu;
      } else {
        mmq::operand<F, S>(raw, a);
      }
      const long long from = static_cast<long long>(plane) * chunks + at;
      const auto word = [&](int w) {
        return *reinterpret_cast<const std::uint32_t*>(codes + from * kQ8ActsTileBytes +
                                                       q8_acts_code_byte(local + g, w));
      };
      std::uint32_t b[2] = {word(t), word(t + 4)};
      if (kBug == Bug::half_of_k) b[1] = 0;
      if (kBug == Bug::second_half_stale) {
        const std::uint32_t now = b[1];
        b[1] = before;
        before = now;
      }
      int c[4];
      mma_m16n8k32_s8_from(c, a, b, static_cast<int>(__float_as_uint(seed)));
      const long long scales_from =
          kBug == Bug::scale_of_first ? static_cast<long long>(plane) * chunks : from;
      float d[2], x[2];
      const tiles::FloatScales s = F::scales<0>(raw, S);
      for (int i = 0; i < 2; ++i) {
        const int token = local + 2 * t + (kBug == Bug::tokens_exchanged ? 1 - i : i);
        x[i] = mmq::act_scale(scales[scales_from * kQ8ActsTileTokens + q8_acts_scale_word(token)]);
        d[i] = s.d[i];
      }
      for (int i = 0; i < 4; ++i) {
        const float scale = d[i / 2] * x[i % 2];
        if (kBug == Bug::late_subtraction) {
          sums[i] += scale * __int_as_float(c[i]);
          seeds[i] += scale * seed;
        } else {
          sums[i] += scale * (__int_as_float(c[i]) - seed);
        }
        if (kBug == Bug::half_accumulator) sums[i] = __half2float(__float2half_rn(sums[i]));
      }
    };
    chunk.template operator()<0>();
    chunk.template operator()<1>();
    chunk.template operator()<2>();
    chunk.template operator()<3>();
  }
  for (int i = 0; i < 4; ++i) {
    const int token = token8 + 2 * t + i % 2, row = static_cast<int>(blockIdx.y) * 16 + g + i / 2 * 8;
    const float scale = kBug == Bug::zero_of_a_nibble ? 1.0f : 1.0f / 16;
    if (token < nt && row < od) out[static_cast<long long>(token) * od + row] = (sums[i] - seeds[i]) * scale;
  }
}

}  // namespace ladder::wrong
