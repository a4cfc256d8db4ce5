// The quantized formats of GGUF, bit by bit: one struct a format. A row of a matrix is an array of blocks.
// What the bits mean is in decode.hpp.
// Layouts: ggml-common.h of https://github.com/ggml-org/llama.cpp, commit d99724f2, restated.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "harness/experiment/weight_types.hpp"

namespace ladder {

// Blocks hold 2-byte scales at 2-byte offsets and many have odd multiples of 2 bytes as sizes: inside a row
// they are 2-byte aligned, no better. f16 fields are raw bits, so that host and device read them with their
// own conversions. Fields wider than 16 bits are arrays.
using F16Bits = std::uint16_t;
using BF16Bits = std::uint16_t;

// One element a block ---------------------------------------------------------------------------------------

struct BlockF32 {
  static constexpr WeightType kType = WeightType::f32;
  static constexpr int kElems = 1;
  float value;
};
struct BlockF16 {
  static constexpr WeightType kType = WeightType::f16;
  static constexpr int kElems = 1;
  F16Bits value;
};
struct BlockBF16 {
  static constexpr WeightType kType = WeightType::bf16;
  static constexpr int kElems = 1;
  BF16Bits value;
};

// 32 elements a block ---------------------------------------------------------------------------------------
// Nibbles: the low one of byte j is element j, the high one is element j + 16.

// ANCHOR: block_q4_0
/// d * (q - 8)
struct BlockQ4_0 {
  static constexpr WeightType kType = WeightType::q4_0;
  static constexpr int kElems = 32;
  F16Bits d;            // scale
  std::uint8_t qs[16];  // nibbles
};
// ANCHOR_END: block_q4_0

/// d * q + m
struct BlockQ4_1 {
  static constexpr WeightType kType = WeightType::q4_1;
  static constexpr int kElems = 32;
  F16Bits d;            // scale
  F16Bits m;            // value of code 0
  std::uint8_t qs[16];  // nibbles
};

/// d * (q - 16)
struct BlockQ5_0 {
  static constexpr WeightType kType = WeightType::q5_0;
  static constexpr int kElems = 32;
  F16Bits d;            // scale
  std::uint8_t qh[4];   // bit i%8 of byte i/8: the fifth bit of element i
  std::uint8_t qs[16];  // nibbles: the low four bits
};

/// d * q + m
struct BlockQ5_1 {
  static constexpr WeightType kType = WeightType::q5_1;
  static constexpr int kElems = 32;
  F16Bits d;            // scale
  F16Bits m;            // value of code 0
  std::uint8_t qh[4];   // as in Q5_0
  std::uint8_t qs[16];  // nibbles: the low four bits
};

/// d * q
struct BlockQ8_0 {
  static constexpr WeightType kType = WeightType::q8_0;
  static constexpr int kElems = 32;
  F16Bits d;           // scale
  std::int8_t qs[32];  // codes
};

/// d * T[q], T = kIq4Values
struct BlockIQ4_NL {
  static constexpr WeightType kType = WeightType::iq4_nl;
  static constexpr int kElems = 32;
  F16Bits d;            // scale
  std::uint8_t qs[16];  // nibbles: places in the table
};

// 256 elements a block --------------------------------------------------------------------------------------
// A block is cut into sub-blocks of 16 or 32 elements with an integer scale each, in units of d.

/// d * (scale & 15) * q - dmin * (scale >> 4), a scale for every 16 elements
struct BlockQ2_K {
  static constexpr WeightType kType = WeightType::q2_k;
  static constexpr int kElems = 256;
  std::uint8_t scales[16];  // low nibble: scale, high nibble: minimum
  std::uint8_t qs[64];      // half n, l = 0..31: bits 2k..2k+1 of byte 32n+l are element 128n + 32k + l
  F16Bits d;                // unit of the scales
  F16Bits dmin;             // unit of the minima
};

/// d * scale * q, q = -4..3, a scale for every 16 elements
struct BlockQ3_K {
  static constexpr WeightType kType = WeightType::q3_k;
  static constexpr int kElems = 256;
  std::uint8_t hmask[32];   // bit 4n+k of byte l: set if 4 is NOT to be taken off element 128n + 32k + l
  std::uint8_t qs[64];      // two low bits, placed as in Q2_K
  std::uint8_t scales[12];  // sixteen 6-bit scales: q3_k_scale()
  F16Bits d;                // unit of the scales
};

// ANCHOR: block_q4_k
/// d * scale * q - dmin * min, a scale and a minimum for every 32 elements
struct BlockQ4_K {
  static constexpr WeightType kType = WeightType::q4_k;
  static constexpr int kElems = 256;
  F16Bits d;                // unit of the scales
  F16Bits dmin;             // unit of the minima
  std::uint8_t scales[12];  // eight 6-bit scales and eight 6-bit minima: scale_min_k4()
  std::uint8_t qs[128];  // group c = 0..3, l = 0..31: byte 32c+l has elements 64c+l (low) and 64c+32+l (high)
};
// ANCHOR_END: block_q4_k

/// As Q4_K with a fifth bit
struct BlockQ5_K {
  static constexpr WeightType kType = WeightType::q5_k;
  static constexpr int kElems = 256;
  F16Bits d;                // unit of the scales
  F16Bits dmin;             // unit of the minima
  std::uint8_t scales[12];  // as in Q4_K
  std::uint8_t qh[32];      // bit s of byte l: the fifth bit of element 32s + l
  std::uint8_t qs[128];     // nibbles, placed as in Q4_K
};

/// d * scale * (q - 32), a scale for every 16 elements
struct BlockQ6_K {
  static constexpr WeightType kType = WeightType::q6_k;
  static constexpr int kElems = 256;
  std::uint8_t
      ql[128];  // half n, l = 0..63: byte 64n+l has the low four bits of elements 128n+l and 128n+64+l
  std::uint8_t qh[64];     // half n, l = 0..31: bits 2k..2k+1 of byte 32n+l belong to element 128n + 32k + l
  std::int8_t scales[16];  // scales
  F16Bits d;               // unit of the scales
};

/// d * (scale - 32) * T[q], a scale for every 32 elements
struct BlockIQ4_XS {
  static constexpr WeightType kType = WeightType::iq4_xs;
  static constexpr int kElems = 256;
  F16Bits d;                 // unit of the scales
  std::uint16_t scales_h;    // bits 2s..2s+1: the two high bits of scale s
  std::uint8_t scales_l[4];  // nibbles, two neighbouring scales a byte: the four low bits
  std::uint8_t qs[128];      // sub-block s: bytes 16s..16s+15, nibbles as in the 32-element formats
};

// Activations only ------------------------------------------------------------------------------------------
// No tensor of a file is stored like this. They are what a weight block is multiplied with in integers, made
// on the fly from f32 activations.

/// d * q
struct BlockQ8_1 {
  static constexpr int kElems = 32;
  F16Bits d;           // scale
  F16Bits s;           // d * (sum of the codes), which a weight's minimum is multiplied with
  std::int8_t qs[32];  // codes
};

/// d * q
struct BlockQ8_K {
  static constexpr int kElems = 256;
  float d;                 // scale
  std::int8_t qs[256];     // codes
  std::int16_t bsums[16];  // sums of 16 neighbouring codes
};
static_assert(sizeof(BlockQ8_1) == 36 && sizeof(BlockQ8_K) == 292);

// Block types by storage type -------------------------------------------------------------------------------

/// Carries a block type as a value, for lambdas: `using Block = typename decltype(tag)::type`.
template <class Block>
struct BlockTag {
  using type = Block;
};

/// Calls f(BlockTag<Block>{}) with the block type of a storage type.
/// @throws std::invalid_argument if `type` is no value of the enumeration
template <class F>
decltype(auto) with_block(WeightType type, F&& f) {
  switch (type) {
    case WeightType::f32:
      return f(BlockTag<BlockF32>{});
    case WeightType::f16:
      return f(BlockTag<BlockF16>{});
    case WeightType::bf16:
      return f(BlockTag<BlockBF16>{});
    case WeightType::q4_0:
      return f(BlockTag<BlockQ4_0>{});
    case WeightType::q4_1:
      return f(BlockTag<BlockQ4_1>{});
    case WeightType::q5_0:
      return f(BlockTag<BlockQ5_0>{});
    case WeightType::q5_1:
      return f(BlockTag<BlockQ5_1>{});
    case WeightType::q8_0:
      return f(BlockTag<BlockQ8_0>{});
    case WeightType::q2_k:
      return f(BlockTag<BlockQ2_K>{});
    case WeightType::q3_k:
      return f(BlockTag<BlockQ3_K>{});
    case WeightType::q4_k:
      return f(BlockTag<BlockQ4_K>{});
    case WeightType::q5_k:
      return f(BlockTag<BlockQ5_K>{});
    case WeightType::q6_k:
      return f(BlockTag<BlockQ6_K>{});
    case WeightType::iq4_nl:
      return f(BlockTag<BlockIQ4_NL>{});
    case WeightType::iq4_xs:
      return f(BlockTag<BlockIQ4_XS>{});
  }
  throw std::invalid_argument("unknown weight type number " + std::to_string(static_cast<int>(type)));
}

namespace detail {

template <class Block>
constexpr bool block_matches_table() {
  constexpr WeightTypeInfo kInfo = info(Block::kType);
  return sizeof(Block) == static_cast<std::size_t>(kInfo.block_bytes) && Block::kElems == kInfo.block_elems &&
         (alignof(Block) <= 2 || Block::kType == WeightType::f32) && std::is_trivially_copyable_v<Block>;
}
template <class... Blocks>
constexpr bool blocks_match_table() {
  return (block_matches_table<Blocks>() && ...) && sizeof...(Blocks) == kWeightTypes.size();
}
static_assert(
    blocks_match_table<BlockF32, BlockF16, BlockBF16, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0,
                       BlockQ2_K, BlockQ3_K, BlockQ4_K, BlockQ5_K, BlockQ6_K, BlockIQ4_NL, BlockIQ4_XS>(),
    "block structs against the sizes of weight_types.hpp");

}  // namespace detail

// The table of the IQ4 formats ------------------------------------------------------------------------------

/// Table T of IQ4_NL and IQ4_XS: 16 levels, denser about zero, where weights are.
inline constexpr std::array<std::int8_t, 16> kIq4Values = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                           1,    13,   25,  38,  53,  69,  89,  113};

namespace detail {

/// Eight table values as the bytes of a word, first one lowest: registers, where an array would be memory.
constexpr std::uint64_t iq4_word(int first) {
  std::uint64_t word = 0;
  for (int i = 0; i < 8; ++i) {
    const auto byte = static_cast<std::uint8_t>(kIq4Values[static_cast<std::size_t>(first + i)]);
    word |= static_cast<std::uint64_t>(byte) << (8 * i);
  }
  return word;
}
inline constexpr std::uint64_t kIq4Low = iq4_word(0), kIq4High = iq4_word(8);

}  // namespace detail
}  // namespace ladder
