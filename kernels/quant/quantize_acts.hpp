// Activations to int8 on the host: the bits that the kernels of quantize_acts.cuh write, and the way back.
// The two-plane layout has its addresses here, for host and device.
//
// THE RULE, for each 32 neighbouring activations x of a row:
//   amax = max |x|,  d = amax / 127,  inverse = 1 / d,  all f32
//   q    = x * inverse, rounded to the nearest integer, halves to the even one: -127..127, never more
//   sum  = sum of q
// What is stored is f16(d), to nearest even; the codes come from d before that rounding.
//
//   largest magnitude of the block   what is stored
//   infinite or NaN                  d NaN, codes 0: everything that is multiplied with the block is NaN
//   8321040 and more                 d infinite, true codes: what is multiplied with it is infinite or NaN
//   below 127 * 2^-14 (0.0078)       d is a subnormal f16 with an error of up to 2^-25
//   at most 127 * 2^-25 (3.8e-6)     d 0, true codes: the block counts as zero
//   at most 127 * 2^-128             d 0, codes 0: d has no finite inverse
//
// So what is stored for x, with a finite scale, differs from it by at most
//   d/2 * (1 + 2^-13) + |q| * max(d * 2^-11, 2^-25).
// ggml rounds halves away from zero: another code where x * inverse is exactly half an odd number.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>

#include "kernels/quant/blocks.hpp"
#include "kernels/quant/decode.hpp"
#include "kernels/quant/q8_acts.hpp"

namespace ladder {

/// Quantizes one row, or several one after the other.
/// @param x a multiple of 32 activations @param out [x.size() / 32]
/// @throws std::invalid_argument if x is no whole number of blocks
void quantize_q8_pad40_row(std::span<const float> x, BlockQ8Pad40* out);

/// The same d and codes as Q8_0 blocks, 34 bytes each, without a sum.
/// @throws std::invalid_argument if x is no whole number of blocks
void quantize_q8_0_acts_row(std::span<const float> x, BlockQ8_0* out);

/// d * q for every element, exact in f32.
/// @param out [32 * blocks.size()]
void dequantize_q8_pad40_row(std::span<const BlockQ8Pad40> blocks, float* out);

// Two planes ------------------------------------------------------------------------------------------------
// The layout of tensor-core kernels: tokens in tiles of 64, the last tile filled up with zeros.
//   codes   [ceil(nt/64)][id/32][2048 bytes]   64 tokens x 32 codes, swizzled
//   scales  [ceil(nt/64)][id/32][64 words]     a word a token: f16 bits of d, and above them the sum as int16
// A kernel copies a tile of either plane to shared memory as it stands.

inline constexpr int kQ8ActsTileTokens = 64;
inline constexpr int kQ8ActsTileBytes = kQ8ActsTileTokens * kQ8ActsPerBlock;  // of codes

/// What the planes need, and how much of it is there.
struct Q8ActsPlanes {
  long long tiles = 0;     ///< of 64 tokens, along nt
  long long chunks = 0;    ///< of 32 activations, along id
  std::size_t codes = 0;   ///< bytes of the plane of codes
  std::size_t scales = 0;  ///< 32-bit words of the plane of scales
};

/// @param nt at least 1 @param id a multiple of 32
constexpr Q8ActsPlanes q8_acts_planes(long long nt, long long id) {
  Q8ActsPlanes p;
  p.tiles = (nt + kQ8ActsTileTokens - 1) / kQ8ActsTileTokens;
  p.chunks = id / kQ8ActsPerBlock;
  p.codes = static_cast<std::size_t>(p.tiles * p.chunks) * kQ8ActsTileBytes;
  p.scales = static_cast<std::size_t>(p.tiles * p.chunks) * kQ8ActsTileTokens;
  return p;
}

// ANCHOR: q8_acts_addresses
/// Byte of a tile at which word 0..7 of a token's 32 codes is. Four tokens share a line of 128 bytes, eight
/// pieces of 16; the number of the piece is XORed with that of the line.
/// @param token 0..63
LADDER_HD int q8_acts_code_byte(int token, int word) {
  const int line = token / 4, piece = token % 4 * 2 + word / 4;
  return line * 128 + (piece ^ line % 8) * 16 + word % 4 * 4;
}

/// Word of a tile at which a token's scale is. Tokens k, k+8, k+16 and k+24, rows of the fragments of lanes
/// 4k..4k+3, are side by side: one load of 16 bytes. @param token 0..63
LADDER_HD int q8_acts_scale_word(int token) {
  return token / 32 * 32 + token % 8 * 4 + token / 16 % 2 * 2 + token / 8 % 2;
}

/// Byte of a tile from which a lane's ldmatrix of four matrices reads; the warp gets the A fragment of mma
/// m16n8k32 for 16 tokens. @param group 0..3, of 16 tokens @param lane 0..31
LADDER_HD int q8_acts_ldmatrix_byte(int group, int lane) {
  const int piece = lane % 4 * 2 + lane / 16, line = lane / 4 % 4;  // the line inside the group
  return group * 512 + line * 128 + (piece ^ line ^ group % 2 * 4) * 16;
}
// ANCHOR_END: q8_acts_addresses

namespace detail {
inline Q8ActsPlanes checked_q8_acts_planes(long long nt, long long id) {
  if (nt < 1) throw std::invalid_argument("nt must be at least 1, not " + std::to_string(nt));
  if (id < 1 || id % kQ8ActsPerBlock != 0) {
    throw std::invalid_argument("id must be a positive multiple of " + std::to_string(kQ8ActsPerBlock) +
                                ", not " + std::to_string(id));
  }
  return q8_acts_planes(nt, id);
}
}  // namespace detail

/// @param blocks [nt][id/32] @param codes [q8_acts_planes(nt, id).codes] @param scales [....scales]
/// @throws std::invalid_argument for nt < 1 or an id that is no positive multiple of 32
inline void pack_q8_pad40_t(const BlockQ8Pad40* blocks, long long nt, long long id, std::int8_t* codes,
                            std::uint32_t* scales) {
  const Q8ActsPlanes p = detail::checked_q8_acts_planes(nt, id);
  std::fill_n(codes, p.codes, std::int8_t{0});
  std::fill_n(scales, p.scales, 0U);
  for (long long t = 0; t < nt; ++t) {
    const int token = static_cast<int>(t % kQ8ActsTileTokens);
    for (long long c = 0; c < p.chunks; ++c) {
      const BlockQ8Pad40& b = blocks[t * p.chunks + c];
      const long long tile = t / kQ8ActsTileTokens * p.chunks + c;
      for (int word = 0; word < 8; ++word)
        std::memcpy(codes + tile * kQ8ActsTileBytes + q8_acts_code_byte(token, word), b.q + 4 * word, 4);
      scales[tile * kQ8ActsTileTokens + q8_acts_scale_word(token)] = b.d | static_cast<std::uint32_t>(b.sum)
                                                                               << 16;
    }
  }
}

/// The other way: blocks of the tokens that there are. @throws as pack_q8_pad40_t
void unpack_q8_pad40_t(const std::int8_t* codes, const std::uint32_t* scales, long long nt, long long id,
                       BlockQ8Pad40* blocks);

}  // namespace ladder
