// The int8 tiles for aarch64 NEON, once with the dot product instructions and once without: the file that
// includes this one says which. Both give the same bits.
//
//   LADDER_NEON           the target attribute of every function
//   LADDER_HAVE_DOTPROD   1 where sdot may be used, else 0
//
// Codes are in the order of the row. Four runs of 16 products each are added up in integers to one vector, a
// run a lane, so that one vector of scales turns them into f32.
#include <arm_neon.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/cpu/gemm_int8_tile.hpp"
#include "kernels/cpu/quant_acts.hpp"
#include "kernels/cpu/quant_tile.hpp"
#include "kernels/quant/decode.hpp"

namespace ladder::cpu {
namespace {

#define LADDER_INLINE LADDER_NEON inline __attribute__((always_inline))

/// 256 weights: value = scale of the run * code + offset of the run.
struct DecodedGroup {
  alignas(64) std::int8_t codes[kGroupElems];
  alignas(64) float scales[kGroupRuns];
  alignas(64) float offsets[kGroupRuns];  // only of formats that have them
};

template <class Block>
inline constexpr bool kHasOffset = std::is_same_v<decltype(run_scale(std::declval<Block>(), 0)), ScaleOffset>;

// Codes of a block, zero point taken off, as run_code() of decode.hpp has them ------------------------------

LADDER_INLINE void store(std::int8_t* out, uint8x16_t codes, int zero = 0) {
  vst1q_s8(out, vsubq_s8(vreinterpretq_s8_u8(codes), vdupq_n_s8(static_cast<std::int8_t>(zero))));
}
LADDER_INLINE uint8x16_t low_nibbles(uint8x16_t v) { return vandq_u8(v, vdupq_n_u8(15)); }
LADDER_INLINE uint8x16_t high_nibbles(uint8x16_t v) { return vshrq_n_u8(v, 4); }
/// `value` in the bytes of v that have one of the bits of `bit`.
LADDER_INLINE uint8x16_t where_set(uint8x16_t v, uint8x16_t bit, int value) {
  return vandq_u8(vtstq_u8(v, bit), vdupq_n_u8(static_cast<std::uint8_t>(value)));
}
/// Two bits of each byte, from bit `shift` on.
LADDER_INLINE uint8x16_t two_bits(uint8x16_t v, int shift) {
  return vandq_u8(vshlq_u8(v, vdupq_n_s8(static_cast<std::int8_t>(-shift))), vdupq_n_u8(3));
}
/// 16 bits, one a byte.
LADDER_INLINE uint8x16_t spread(const std::uint8_t* bits) {
  return vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1]));
}
LADDER_INLINE uint8x16_t bit_of_byte() { return vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ULL)); }
LADDER_INLINE uint8x16_t iq4_values(uint8x16_t places) {
  return vreinterpretq_u8_s8(vqtbl1q_s8(vld1q_s8(kIq4Values.data()), places));
}

LADDER_INLINE void codes_of(const BlockQ4_0& b, std::int8_t* out) {
  const uint8x16_t both = vld1q_u8(b.qs);
  store(out, low_nibbles(both), 8), store(out + 16, high_nibbles(both), 8);
}
LADDER_INLINE void codes_of(const BlockQ4_1& b, std::int8_t* out) {
  const uint8x16_t both = vld1q_u8(b.qs);
  store(out, low_nibbles(both)), store(out + 16, high_nibbles(both));
}
LADDER_INLINE void codes_of_q5(const std::uint8_t* qs, const std::uint8_t* qh, int zero, std::int8_t* out) {
  const uint8x16_t both = vld1q_u8(qs), bit = bit_of_byte();
  store(out, vorrq_u8(low_nibbles(both), where_set(spread(qh), bit, 16)), zero);
  store(out + 16, vorrq_u8(high_nibbles(both), where_set(spread(qh + 2), bit, 16)), zero);
}
LADDER_INLINE void codes_of(const BlockQ5_0& b, std::int8_t* out) { codes_of_q5(b.qs, b.qh, 16, out); }
LADDER_INLINE void codes_of(const BlockQ5_1& b, std::int8_t* out) { codes_of_q5(b.qs, b.qh, 0, out); }
LADDER_INLINE void codes_of(const BlockQ8_0& b, std::int8_t* out) { std::memcpy(out, b.qs, sizeof b.qs); }
LADDER_INLINE void codes_of_iq4(const std::uint8_t* qs, std::int8_t* out) {
  const uint8x16_t both = vld1q_u8(qs);
  store(out, iq4_values(low_nibbles(both))), store(out + 16, iq4_values(high_nibbles(both)));
}
LADDER_INLINE void codes_of(const BlockIQ4_NL& b, std::int8_t* out) { codes_of_iq4(b.qs, out); }
LADDER_INLINE void codes_of(const BlockIQ4_XS& b, std::int8_t* out) {
  for (int s = 0; s < 8; ++s) codes_of_iq4(b.qs + 16 * s, out + 32 * s);
}

// The 256-element formats, 16 bytes at a time: half n = 0, 1 of the row, place p = 0, 1 of the 32 bytes.

LADDER_INLINE void codes_of(const BlockQ2_K& b, std::int8_t* out) {
  for (int n = 0; n < 2; ++n) {
    for (int p = 0; p < 2; ++p) {
      const uint8x16_t two = vld1q_u8(b.qs + 32 * n + 16 * p);
      for (int k = 0; k < 4; ++k) store(out + 128 * n + 32 * k + 16 * p, two_bits(two, 2 * k));
    }
  }
}
LADDER_INLINE void codes_of(const BlockQ3_K& b, std::int8_t* out) {
  for (int n = 0; n < 2; ++n) {
    for (int p = 0; p < 2; ++p) {
      const uint8x16_t two = vld1q_u8(b.qs + 32 * n + 16 * p), high = vld1q_u8(b.hmask + 16 * p);
      for (int k = 0; k < 4; ++k) {
        const uint8x16_t bit = vdupq_n_u8(static_cast<std::uint8_t>(1 << (4 * n + k)));
        store(out + 128 * n + 32 * k + 16 * p, vorrq_u8(two_bits(two, 2 * k), where_set(high, bit, 4)), 4);
      }
    }
  }
}
LADDER_INLINE void codes_of(const BlockQ4_K& b, std::int8_t* out) {
  for (int c = 0; c < 4; ++c) {
    for (int p = 0; p < 2; ++p) {
      const uint8x16_t both = vld1q_u8(b.qs + 32 * c + 16 * p);
      store(out + 64 * c + 16 * p, low_nibbles(both));
      store(out + 64 * c + 32 + 16 * p, high_nibbles(both));
    }
  }
}
LADDER_INLINE void codes_of(const BlockQ5_K& b, std::int8_t* out) {
  for (int p = 0; p < 2; ++p) {
    const uint8x16_t high = vld1q_u8(b.qh + 16 * p);
    for (int c = 0; c < 4; ++c) {
      const uint8x16_t both = vld1q_u8(b.qs + 32 * c + 16 * p);
      const uint8x16_t even = vdupq_n_u8(static_cast<std::uint8_t>(1 << (2 * c)));
      const uint8x16_t odd = vdupq_n_u8(static_cast<std::uint8_t>(2 << (2 * c)));
      store(out + 64 * c + 16 * p, vorrq_u8(low_nibbles(both), where_set(high, even, 16)));
      store(out + 64 * c + 32 + 16 * p, vorrq_u8(high_nibbles(both), where_set(high, odd, 16)));
    }
  }
}
LADDER_INLINE void codes_of(const BlockQ6_K& b, std::int8_t* out) {
  for (int n = 0; n < 2; ++n) {
    for (int p = 0; p < 2; ++p) {
      const uint8x16_t high = vld1q_u8(b.qh + 32 * n + 16 * p);
      for (int k = 0; k < 4; ++k) {
        const uint8x16_t both = vld1q_u8(b.ql + 64 * n + 32 * (k % 2) + 16 * p);
        const uint8x16_t low = k / 2 == 0 ? low_nibbles(both) : high_nibbles(both);
        const uint8x16_t top = vshlq_n_u8(two_bits(high, 2 * k), 4);
        store(out + 128 * n + 32 * k + 16 * p, vorrq_u8(low, top), 32);
      }
    }
  }
}

/// @param count blocks that are there, 1 to 256 / kElems. What is missing has codes and scales of zero.
template <class Block>
LADDER_INLINE void decode_group(const Block* b, int count, DecodedGroup& out) {
  constexpr int kRuns = Block::kElems / 16;
  if (count * kRuns < kGroupRuns) out = {};
  for (int i = 0; i < count; ++i) {
    codes_of(b[i], out.codes + Block::kElems * i);
    for (int run = 0; run < kRuns; ++run) {
      const auto scale = run_scale(b[i], run);
      out.scales[kRuns * i + run] = scale.d;
      if constexpr (kHasOffset<Block>) out.offsets[kRuns * i + run] = scale.offset;
    }
  }
}

// Products --------------------------------------------------------------------------------------------------

/// The 16 products of a run, in four sums. Codes are -128..127.
LADDER_INLINE int32x4_t dot16(const std::int8_t* codes, const std::int8_t* acts) {
  const int8x16_t w = vld1q_s8(codes), x = vld1q_s8(acts);
#if LADDER_HAVE_DOTPROD
  // vdotq_s32 by its instruction: older compilers know it only where the whole file may use it.
  int32x4_t dot = vdupq_n_s32(0);
  asm("sdot %0.4s, %1.16b, %2.16b" : "+w"(dot) : "w"(w), "w"(x));
  return dot;
#else
  return vpadalq_s16(vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x))), vmull_high_s8(w, x));
#endif
}

/// sum += the group's products with one token; lane l has runs l, l + 4, l + 8 and l + 12.
template <class Block>
LADDER_INLINE float32x4_t add_int8(const DecodedGroup& w, const ActGroup& x, float32x4_t sum) {
  for (int run = 0; run < kGroupRuns; run += 4) {
    int32x4_t dot[4];
    for (int i = 0; i < 4; ++i) dot[i] = dot16(w.codes + 16 * (run + i), x.codes + 16 * (run + i));
    const int32x4_t dots = vpaddq_s32(vpaddq_s32(dot[0], dot[1]), vpaddq_s32(dot[2], dot[3]));
    const float32x4_t x_scale = vld1q_f32(x.scales + run);
    sum = vfmaq_f32(sum, vcvtq_f32_s32(dots), vmulq_f32(vld1q_f32(w.scales + run), x_scale));
    if constexpr (kHasOffset<Block>) {
      const float32x4_t negative = vmulq_f32(vcvtq_f32_s32(vld1q_s32(x.negative_sums + run)), x_scale);
      sum = vfmsq_f32(sum, vld1q_f32(w.offsets + run), negative);
    }
  }
  return sum;
}

template <class Block>
LADDER_NEON void multiply(const QuantTile& tile) {
  constexpr long long kBlocks = kGroupElems / Block::kElems;
  const long long blocks_of_row = tile.id / Block::kElems, groups = (tile.id + kGroupElems - 1) / kGroupElems;
  DecodedGroup w;
  for (long long row = 0; row < tile.rows; ++row) {
    const auto* blocks =
        reinterpret_cast<const Block*>(tile.weights + static_cast<std::size_t>(row) * tile.row_bytes);
    float32x4_t sums[kMaxQuantTokens];
    for (int t = 0; t < tile.tokens; ++t) sums[t] = vdupq_n_f32(0);
    for (long long g = 0; g < groups; ++g) {
      decode_group(blocks + g * kBlocks, static_cast<int>(std::min(kBlocks, blocks_of_row - g * kBlocks)), w);
      for (int t = 0; t < tile.tokens; ++t) sums[t] = add_int8<Block>(w, tile.acts[t * groups + g], sums[t]);
    }
    for (int t = 0; t < tile.tokens; ++t) {  // lanes as a fixed tree: 4 -> 2 -> 1
      const float32x2_t two = vadd_f32(vget_low_f32(sums[t]), vget_high_f32(sums[t]));
      tile.out[t * tile.od + row] = vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
    }
  }
}

// Activations -----------------------------------------------------------------------------------------------

LADDER_NEON void quantize(const float* acts, int count, ActGroup& group) {
  group = {};
  for (int block = 0; 32 * block < count; ++block) {
    const float* x = acts + 32 * block;
    // The order of magnitudes is that of their bits; infinities and NaNs come last.
    uint32x4_t largest = vdupq_n_u32(0);
    for (int i = 0; i < 32; i += 4) {
      largest = vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + i))));
    }
    const ActScale scale = act_scale(vmaxvq_u32(largest));
    group.scales[2 * block] = group.scales[2 * block + 1] = scale.scale;
    if (scale.inverse == 0) continue;
    for (int run = 0; run < 2; ++run) {
      int32x4_t codes[4];
      for (int i = 0; i < 4; ++i) {  // halves to even
        codes[i] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 16 * run + 4 * i), scale.inverse));
      }
      const int16x8_t low = vcombine_s16(vmovn_s32(codes[0]), vmovn_s32(codes[1]));
      const int16x8_t high = vcombine_s16(vmovn_s32(codes[2]), vmovn_s32(codes[3]));
      vst1q_s8(group.codes + 32 * block + 16 * run, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
      group.negative_sums[2 * block + run] = -vaddlvq_s16(vaddq_s16(low, high));
    }
  }
}

/// In the order of WeightType; types without codes have no integer product.
constexpr QuantKernel kInt8[kWeightTypes.size()] = {nullptr,
                                                    nullptr,
                                                    nullptr,
                                                    multiply<BlockQ4_0>,
                                                    multiply<BlockQ4_1>,
                                                    multiply<BlockQ5_0>,
                                                    multiply<BlockQ5_1>,
                                                    multiply<BlockQ8_0>,
                                                    multiply<BlockQ2_K>,
                                                    multiply<BlockQ3_K>,
                                                    multiply<BlockQ4_K>,
                                                    multiply<BlockQ5_K>,
                                                    multiply<BlockQ6_K>,
                                                    multiply<BlockIQ4_NL>,
                                                    multiply<BlockIQ4_XS>};

// Many tokens -----------------------------------------------------------------------------------------------

#define LADDER_PANEL LADDER_NEON

struct ActPanel {
  ActGroup group;
};
LADDER_INLINE void put_panel(const ActGroup& group, ActPanel& out) { out.group = group; }

using Panel = DecodedGroup;
template <class Block>
LADDER_INLINE void make_panel(const Block* b, int count, Panel& out) {
  decode_group(b, count, out);
}

using Sum = float32x4_t;
LADDER_INLINE Sum zero_sum() { return vdupq_n_f32(0); }
LADDER_INLINE Sum load_sum(const float* p) { return vld1q_f32(p); }
LADDER_INLINE void store_sum(float* p, Sum v) { vst1q_f32(p, v); }
LADDER_INLINE float total(Sum v) {  // lanes as a fixed tree: 4 -> 2 -> 1
  const float32x2_t two = vadd_f32(vget_low_f32(v), vget_high_f32(v));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

template <class Block, int Tokens>
LADDER_INLINE void add_panel(const Panel& w, const ActPanel* x, Sum* sums) {
  for (int t = 0; t < Tokens; ++t) sums[t] = add_int8<Block>(w, x[t].group, sums[t]);
}

}  // namespace
}  // namespace ladder::cpu

#include "kernels/cpu/gemm_int8_groups.hpp"
