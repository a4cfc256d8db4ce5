// The matmuls of packed weights and f32 activations for AVX-512.
#if defined(__x86_64__)
#include <algorithm>
#include <type_traits>
#include <utility>

#define LADDER_TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl")))
#include "kernels/cpu/lanes_avx512.hpp"
#include "kernels/cpu/quant_codes_x86.hpp"

namespace ladder::cpu {
namespace {

// Two chains of sums for each row and token, even and odd runs, so that one multiply-add need not wait for
// the last.
template <int Rows, int Tokens>
LADDER_TARGET_INLINE void clear(__m512 sums[Rows][Tokens][2]) {
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; ++t) sums[r][t][0] = sums[r][t][1] = _mm512_setzero_ps();
  }
}
template <int Rows, int Tokens>
LADDER_TARGET_INLINE void store(const QuantTile& tile, long long row, long long token,
                                const __m512 sums[Rows][Tokens][2]) {
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; ++t) {
      tile.out[(token + t) * tile.od + row + r] = sum_of_lanes(_mm512_add_ps(sums[r][t][0], sums[r][t][1]));
    }
  }
}

// Quantized types
// -----------------------------------------------------------------------------------------------

template <class Block, int Tokens>
LADDER_TARGET void multiply_rows(const QuantTile& tile, long long token) {
  constexpr long long kBlocks = kGroupElems / Block::kElems;
  const long long blocks_of_row = tile.id / Block::kElems, groups = (tile.id + kGroupElems - 1) / kGroupElems;
  const float* x = tile.floats + token * tile.id;  // [Tokens][id]
  DecodedGroup w;
  for (long long row = 0; row < tile.rows; ++row) {
    const auto* blocks =
        reinterpret_cast<const Block*>(tile.weights + static_cast<std::size_t>(row) * tile.row_bytes);
    __m512 sums[1][Tokens][2];
    clear<1, Tokens>(sums);
    for (long long g = 0; g < groups; ++g) {
      const auto count = static_cast<int>(std::min(kBlocks, blocks_of_row - g * kBlocks));
      decode_group(blocks + g * kBlocks, count, w);
      for (int run = 0; run < count * Block::kElems / 16; run += 2) {
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; ++odd) {
          const auto* codes = reinterpret_cast<const __m128i*>(w.codes + 16 * (run + odd));
          __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(codes))),
                                       _mm512_set1_ps(w.scales[run + odd]));
          if constexpr (kHasOffset<Block>) value = _mm512_add_ps(value, _mm512_set1_ps(w.offsets[run + odd]));
#pragma GCC unroll 4
          for (int t = 0; t < Tokens; ++t) {
            const __m512 acts = _mm512_loadu_ps(x + t * tile.id + g * kGroupElems + 16 * (run + odd));
            sums[0][t][odd] = _mm512_fmadd_ps(value, acts, sums[0][t][odd]);
          }
        }
      }
    }
    store<1, Tokens>(tile, row, token, sums);
  }
}

template <class Block>
LADDER_TARGET void multiply(const QuantTile& tile) {
  int token = 0;
  for (; token + 4 <= tile.tokens; token += 4) multiply_rows<Block, 4>(tile, token);
  if (token + 2 <= tile.tokens) multiply_rows<Block, 2>(tile, token), token += 2;
  if (token < tile.tokens) multiply_rows<Block, 1>(tile, token);
}

// How far ahead of its row a tile of one token prefetches weights, in bytes: as in quant_int8_avx512.hpp.
constexpr int kAhead = 8192;

// Types without blocks
// --------------------------------------------------------------------------------------------

/// 16 elements, of which the first count(present) are there.
LADDER_TARGET_INLINE __m512 sixteen(const BlockF32* w, __mmask16 present) {
  return _mm512_maskz_loadu_ps(present, &w->value);
}
LADDER_TARGET_INLINE __m512 sixteen(const BlockF16* w, __mmask16 present) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(present, w));
}
LADDER_TARGET_INLINE __m512 sixteen(const BlockBF16* w, __mmask16 present) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(present, w)), 16));
}

template <class Element, int Rows, int Tokens>
LADDER_TARGET_INLINE void add_sixteen(const QuantTile& tile, const Element* w, const float* x,
                                      __mmask16 present, int chain, __m512 sums[Rows][Tokens][2]) {
  __m512 acts[Tokens];
#pragma GCC unroll 4
  for (int t = 0; t < Tokens; ++t) acts[t] = _mm512_maskz_loadu_ps(present, x + t * tile.id);
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    const __m512 value = sixteen(w + r * tile.id, present);
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; ++t) sums[r][t][chain] = _mm512_fmadd_ps(value, acts[t], sums[r][t][chain]);
  }
}

template <class Element, int Rows, int Tokens>
LADDER_TARGET void multiply_float_tile(const QuantTile& tile, long long row, long long token) {
  constexpr __mmask16 kAll = 0xffff;
  const auto* w =
      reinterpret_cast<const Element*>(tile.weights + static_cast<std::size_t>(row) * tile.row_bytes);
  const float* x = tile.floats + token * tile.id;
  const char* ahead = reinterpret_cast<const char*>(w) + tile.row_bytes + kAhead;
  __m512 sums[Rows][Tokens][2];
  clear<Rows, Tokens>(sums);
  long long k = 0;
  for (; k + 32 <= tile.id; k += 32) {
    if (Rows == 1 && Tokens == 1) {
      for (std::size_t line = 0; line < 32 * sizeof(Element); line += 64)
        _mm_prefetch(ahead + line, _MM_HINT_T0);
      ahead += 32 * sizeof(Element);
    }
    add_sixteen<Element, Rows, Tokens>(tile, w + k, x + k, kAll, 0, sums);
    add_sixteen<Element, Rows, Tokens>(tile, w + k + 16, x + k + 16, kAll, 1, sums);
  }
  for (int chain = 0; k < tile.id; k += 16, ++chain) {
    const long long left = tile.id - k;
    const auto present = static_cast<__mmask16>(left >= 16 ? 0xffffU : (1U << left) - 1);
    if (chain == 0) {
      add_sixteen<Element, Rows, Tokens>(tile, w + k, x + k, present, 0, sums);
    } else {
      add_sixteen<Element, Rows, Tokens>(tile, w + k, x + k, present, 1, sums);
    }
  }
  store<Rows, Tokens>(tile, row, token, sums);
}

template <class Element, int Rows, int Tokens>
LADDER_TARGET void multiply_float_rows(const QuantTile& tile, long long token) {
  long long row = 0;
  for (; row + Rows <= tile.rows; row += Rows) multiply_float_tile<Element, Rows, Tokens>(tile, row, token);
  for (; row < tile.rows; ++row) multiply_float_tile<Element, 1, Tokens>(tile, row, token);
}

template <class Element>
LADDER_TARGET void multiply_floats(const QuantTile& tile) {
  int token = 0;
  for (; token + 4 <= tile.tokens; token += 4) multiply_float_rows<Element, 2, 4>(tile, token);
  if (token + 2 <= tile.tokens) multiply_float_rows<Element, 4, 2>(tile, token), token += 2;
  if (token < tile.tokens) multiply_float_rows<Element, 1, 1>(tile, token);  // one stream of weights
}

}  // namespace

const QuantKernel kQuantF32Avx512[kWeightTypes.size()] = {
    multiply_floats<BlockF32>, multiply_floats<BlockF16>, multiply_floats<BlockBF16>, multiply<BlockQ4_0>,
    multiply<BlockQ4_1>,       multiply<BlockQ5_0>,       multiply<BlockQ5_1>,        multiply<BlockQ8_0>,
    multiply<BlockQ2_K>,       multiply<BlockQ3_K>,       multiply<BlockQ4_K>,        multiply<BlockQ5_K>,
    multiply<BlockQ6_K>,       multiply<BlockIQ4_NL>,     multiply<BlockIQ4_XS>};

}  // namespace ladder::cpu
#endif
