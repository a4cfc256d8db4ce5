// The quantized matmuls for AVX2 with FMA and F16C: int8 products by vpmaddubsw, and f32 ones.
#if defined(__x86_64__)
#include <algorithm>
#include <type_traits>
#include <utility>

#define LADDER_TARGET __attribute__((target("avx2,fma,f16c")))
#include "kernels/cpu/gemm_int8_tile.hpp"
#include "kernels/cpu/quant_acts.hpp"
#include "kernels/cpu/quant_codes_x86.hpp"

namespace ladder::cpu {
namespace {

// Adds the 8 lanes as a fixed tree: 8 -> 4 -> 2 -> 1.
LADDER_TARGET_INLINE float sum_of_lanes(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/// sum += the group's products with one token.
template <class Block>
LADDER_TARGET_INLINE __m256 add_int8(const DecodedGroup& w, const std::int8_t* magnitudes, const ActGroup& x,
                                     __m256 sum) {
  const __m256i ones = _mm256_set1_epi16(1);
  for (int half = 0; half < 2; ++half) {
    const __m256 x_scales = _mm256_load_ps(x.scales + 8 * half);
    const __m256 scales = _mm256_mul_ps(_mm256_load_ps(w.scales + 8 * half), x_scales);  // of 8 runs
    for (int b = 0; b < 4; ++b) {
      const int at = 128 * half + 32 * b;
      // |w| * (x with w's sign): products of an unsigned and a signed byte. Pairs add up to at most 2 * 128 *
      // 127, which 16 bits hold, because no activation code is -128.
      const __m256i signed_x = _mm256_sign_epi8(load32(x.codes + at), load32(w.codes + at));
      const __m256i pairs = _mm256_maddubs_epi16(load32(magnitudes + at), signed_x);
      const __m256 dots = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));  // four lanes a run
      const __m256i runs =
          _mm256_setr_epi32(2 * b, 2 * b, 2 * b, 2 * b, 2 * b + 1, 2 * b + 1, 2 * b + 1, 2 * b + 1);
      sum = _mm256_fmadd_ps(dots, _mm256_permutevar8x32_ps(scales, runs), sum);
    }
    if constexpr (kHasOffset<Block>) {
      const __m256i negative_sums = load32(x.negative_sums + 8 * half);
      const __m256 negative = _mm256_mul_ps(_mm256_cvtepi32_ps(negative_sums), x_scales);
      sum = _mm256_fnmadd_ps(_mm256_load_ps(w.offsets + 8 * half), negative, sum);
    }
  }
  return sum;
}

/// sums += the group's products with one token, in two chains: even and odd vectors of a run.
template <class Block>
LADDER_TARGET_INLINE void add_f32(const DecodedGroup& w, const float* x, int count, __m256 sums[2]) {
  for (int run = 0; 16 * run < count; ++run) {
    const __m256 scale = _mm256_broadcast_ss(w.scales + run);
    for (int half = 0; half < 2; ++half) {
      const int at = 16 * run + 8 * half;
      const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(w.codes + at));
      const __m256 code = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
      __m256 value = _mm256_mul_ps(code, scale);
      if constexpr (kHasOffset<Block>) value = _mm256_add_ps(value, _mm256_broadcast_ss(w.offsets + run));
      sums[half] = _mm256_fmadd_ps(value, _mm256_loadu_ps(x + at), sums[half]);
    }
  }
}

template <class Block>
constexpr int blocks_of_group(long long id, long long group) {
  constexpr long long kBlocks = kGroupElems / Block::kElems;
  return static_cast<int>(std::min(kBlocks, id / Block::kElems - group * kBlocks));
}

template <class Block>
LADDER_TARGET void multiply_int8(const QuantTile& tile) {
  constexpr long long kBlocks = kGroupElems / Block::kElems;
  const long long groups = (tile.id + kGroupElems - 1) / kGroupElems;
  DecodedGroup w;
  alignas(32) std::int8_t magnitudes[kGroupElems];
  for (long long row = 0; row < tile.rows; ++row) {
    const auto* blocks =
        reinterpret_cast<const Block*>(tile.weights + static_cast<std::size_t>(row) * tile.row_bytes);
    __m256 sums[kMaxQuantTokens];
    for (int t = 0; t < tile.tokens; ++t) sums[t] = _mm256_setzero_ps();
    for (long long g = 0; g < groups; ++g) {
      decode_group(blocks + g * kBlocks, blocks_of_group<Block>(tile.id, g), w);
      for (int i = 0; i < kGroupElems; i += 32) store32(magnitudes + i, _mm256_abs_epi8(load32(w.codes + i)));
      for (int t = 0; t < tile.tokens; ++t) {
        sums[t] = add_int8<Block>(w, magnitudes, tile.acts[t * groups + g], sums[t]);
      }
    }
    for (int t = 0; t < tile.tokens; ++t) tile.out[t * tile.od + row] = sum_of_lanes(sums[t]);
  }
}

template <class Block>
LADDER_TARGET void multiply_f32(const QuantTile& tile) {
  constexpr long long kBlocks = kGroupElems / Block::kElems;
  const long long groups = (tile.id + kGroupElems - 1) / kGroupElems;
  DecodedGroup w;
  for (long long row = 0; row < tile.rows; ++row) {
    const auto* blocks =
        reinterpret_cast<const Block*>(tile.weights + static_cast<std::size_t>(row) * tile.row_bytes);
    __m256 sums[kMaxQuantTokens][2];
    for (int t = 0; t < tile.tokens; ++t) sums[t][0] = sums[t][1] = _mm256_setzero_ps();
    for (long long g = 0; g < groups; ++g) {
      const int count = blocks_of_group<Block>(tile.id, g);
      decode_group(blocks + g * kBlocks, count, w);
      for (int t = 0; t < tile.tokens; ++t) {
        add_f32<Block>(w, tile.floats + t * tile.id + g * kGroupElems, count * Block::kElems, sums[t]);
      }
    }
    for (int t = 0; t < tile.tokens; ++t) {
      tile.out[t * tile.od + row] = sum_of_lanes(_mm256_add_ps(sums[t][0], sums[t][1]));
    }
  }
}

// Types without blocks
// ----------------------------------------------------------------------------------------

LADDER_TARGET_INLINE __m256 eight(const BlockF32* w) { return _mm256_loadu_ps(&w->value); }
LADDER_TARGET_INLINE __m256 eight(const BlockF16* w) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
}
LADDER_TARGET_INLINE __m256 eight(const BlockBF16* w) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

template <class Element>
LADDER_TARGET void multiply_floats(const QuantTile& tile) {
  const long long whole = tile.id / 16 * 16;
  for (long long row = 0; row < tile.rows; ++row) {
    const auto* w =
        reinterpret_cast<const Element*>(tile.weights + static_cast<std::size_t>(row) * tile.row_bytes);
    __m256 sums[kMaxQuantTokens][2];
    for (int t = 0; t < tile.tokens; ++t) sums[t][0] = sums[t][1] = _mm256_setzero_ps();
    for (long long k = 0; k < whole; k += 16) {
      const __m256 w0 = eight(w + k), w1 = eight(w + k + 8);
      for (int t = 0; t < tile.tokens; ++t) {
        const float* x = tile.floats + t * tile.id + k;
        sums[t][0] = _mm256_fmadd_ps(w0, _mm256_loadu_ps(x), sums[t][0]);
        sums[t][1] = _mm256_fmadd_ps(w1, _mm256_loadu_ps(x + 8), sums[t][1]);
      }
    }
    if (whole < tile.id) {  // the end of the row, padded with zeros
      const auto rest = static_cast<std::size_t>(tile.id - whole);
      Element end[16] = {};
      std::copy_n(w + whole, rest, end);
      for (int t = 0; t < tile.tokens; ++t) {
        float x[16] = {};
        std::copy_n(tile.floats + t * tile.id + whole, rest, x);
        sums[t][0] = _mm256_fmadd_ps(eight(end), _mm256_loadu_ps(x), sums[t][0]);
        sums[t][1] = _mm256_fmadd_ps(eight(end + 8), _mm256_loadu_ps(x + 8), sums[t][1]);
      }
    }
    for (int t = 0; t < tile.tokens; ++t) {
      tile.out[t * tile.od + row] = sum_of_lanes(_mm256_add_ps(sums[t][0], sums[t][1]));
    }
  }
}

// Activations
// -------------------------------------------------------------------------------------------------

LADDER_TARGET void quantize(const float* acts, int count, ActGroup& group) {
  group = {};
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  for (int block = 0; 32 * block < count; ++block) {
    const float* x = acts + 32 * block;
    __m256i largest = _mm256_setzero_si256();
    for (int i = 0; i < 32;
         i += 8) {  // the order of magnitudes is that of their bits; infinities and NaNs come last
      largest = _mm256_max_epu32(largest, _mm256_and_si256(load32(x + i), magnitude));
    }
    alignas(32) std::uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest);
    const ActScale scale = act_scale(*std::max_element(lanes, lanes + 8));
    group.scales[2 * block] = group.scales[2 * block + 1] = scale.scale;
    if (scale.inverse == 0) continue;
    const __m256 inverse = _mm256_set1_ps(scale.inverse);
    for (int i = 0; i < 32; i += 8) {
      alignas(32) std::int32_t codes[8];
      const __m256i rounded =
          _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse));  // halves to even
      _mm256_store_si256(reinterpret_cast<__m256i*>(codes), rounded);
      for (int j = 0; j < 8; ++j) {
        group.codes[32 * block + i + j] = static_cast<std::int8_t>(codes[j]);
        group.negative_sums[2 * block + i / 16] -= codes[j];
      }
    }
  }
}

constexpr QuantKernel kInt8[kWeightTypes.size()] = {nullptr,
                                                    nullptr,
                                                    nullptr,
                                                    multiply_int8<BlockQ4_0>,
                                                    multiply_int8<BlockQ4_1>,
                                                    multiply_int8<BlockQ5_0>,
                                                    multiply_int8<BlockQ5_1>,
                                                    multiply_int8<BlockQ8_0>,
                                                    multiply_int8<BlockQ2_K>,
                                                    multiply_int8<BlockQ3_K>,
                                                    multiply_int8<BlockQ4_K>,
                                                    multiply_int8<BlockQ5_K>,
                                                    multiply_int8<BlockQ6_K>,
                                                    multiply_int8<BlockIQ4_NL>,
                                                    multiply_int8<BlockIQ4_XS>};
constexpr QuantKernel kF32[kWeightTypes.size()] = {
    multiply_floats<BlockF32>, multiply_floats<BlockF16>, multiply_floats<BlockBF16>, multiply_f32<BlockQ4_0>,
    multiply_f32<BlockQ4_1>,   multiply_f32<BlockQ5_0>,   multiply_f32<BlockQ5_1>,    multiply_f32<BlockQ8_0>,
    multiply_f32<BlockQ2_K>,   multiply_f32<BlockQ3_K>,   multiply_f32<BlockQ4_K>,    multiply_f32<BlockQ5_K>,
    multiply_f32<BlockQ6_K>,   multiply_f32<BlockIQ4_NL>, multiply_f32<BlockIQ4_XS>};

// Many tokens -----------------------------------------------------------------------------------------------

#define LADDER_PANEL LADDER_TARGET

struct alignas(64) ActPanel {
  ActGroup group;
  float negatives[kGroupRuns];  // scale of the run * minus the sum of its codes
};
LADDER_TARGET_INLINE void put_panel(const ActGroup& group, ActPanel& out) {
  out.group = group;
  for (int run = 0; run < kGroupRuns; ++run) {
    out.negatives[run] = static_cast<float>(group.negative_sums[run]) * group.scales[run];
  }
}

struct alignas(64) Panel {
  DecodedGroup group;
  alignas(64) std::int8_t magnitudes[kGroupElems];
};

template <class Block>
LADDER_TARGET_INLINE void make_panel(const Block* b, int count, Panel& out) {
  decode_group(b, count, out.group);
  for (int i = 0; i < kGroupElems; i += 32) {
    store32(out.magnitudes + i, _mm256_abs_epi8(load32(out.group.codes + i)));
  }
}

using Sum = __m256;
LADDER_TARGET_INLINE Sum zero_sum() { return _mm256_setzero_ps(); }
LADDER_TARGET_INLINE Sum load_sum(const float* p) { return _mm256_load_ps(p); }
LADDER_TARGET_INLINE void store_sum(float* p, Sum v) { _mm256_store_ps(p, v); }
LADDER_TARGET_INLINE float total(Sum v) { return sum_of_lanes(v); }

/// add_int8 for several tokens, which share the loads of weights: each sum gets the same terms in the same order.
template <class Block, int Tokens>
LADDER_TARGET_INLINE void add_panel(const Panel& w, const ActPanel* x, __m256* sums) {
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m256 scales = _mm256_load_ps(w.group.scales + 8 * half);  // of 8 runs
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b) {
      const int at = 128 * half + 32 * b;
      const __m256i codes = load32(w.group.codes + at), magnitudes = load32(w.magnitudes + at);
      const __m256i runs =
          _mm256_setr_epi32(2 * b, 2 * b, 2 * b, 2 * b, 2 * b + 1, 2 * b + 1, 2 * b + 1, 2 * b + 1);
      const __m256 w_scale = _mm256_permutevar8x32_ps(scales, runs);
#pragma GCC unroll 4
      for (int t = 0; t < Tokens; ++t) {
        const ActGroup& acts = x[t].group;
        const __m256i pairs =
            _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(load32(acts.codes + at), codes));
        const __m256 dots = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));  // four lanes a run
        const __m256 scale = _mm256_mul_ps(w_scale, _mm256_broadcast_ss(acts.scales + 8 * half + 2 * b));
        sums[t] = _mm256_fmadd_ps(dots, scale, sums[t]);
      }
    }
    if constexpr (kHasOffset<Block>) {
      const __m256 offsets = _mm256_load_ps(w.group.offsets + 8 * half);
#pragma GCC unroll 4
      for (int t = 0; t < Tokens; ++t) {
        sums[t] = _mm256_fnmadd_ps(offsets, _mm256_load_ps(x[t].negatives + 8 * half), sums[t]);
      }
    }
  }
}

}  // namespace
}  // namespace ladder::cpu

#include "kernels/cpu/gemm_int8_groups.hpp"

namespace ladder::cpu {

const QuantKernels kQuantAvx2 = {
    .name = "vpmaddubsw",
    .lanes = false,
    .quantize = quantize,
    .take = take_in_order,
    .code_additions = 8,
    .offset_additions = 2,
    .tree_additions = 3,
    .int8 = kInt8,
    .f32 = kF32,
    .gemm = kGemmInt8,
};

}  // namespace ladder::cpu
#endif
