// RUNG      quant_int8_gemm: the CPU twin of packed weights times many int8 tokens, AVX-512 with and without VNNI.
// PREV      quant_int8: every 8 tokens take the same blocks apart again, and their activations come from L2.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T   LAYOUT weights as in GGUF, row-major blocks
// MAP       thread -> strips of rows; strip -> panels of codes in L2; block of 8 tokens x up to 10 groups of k in
//           L1; tile -> 2 rows x 8 tokens in registers; lane -> one run of 16 elements of each group of 256
// NEEDS     id a multiple of the block length; weights at a multiple of 4 bytes
// TRAFFIC   weights od * row_bytes(type, id) B, once; acts 4*nt*id B and the panels made of them once a strip
// WORK      2*nt*od*id OP
// LOOK FOR  vpdpbusd with zmm and registers only, four for each vcvtdq2ps; no shuffle in the loop over groups
// EXPECT    beats quant_int8 from 9 tokens on; near the rate of vpdpbusd, two a cycle, from 64 tokens on
// BUILD     c++ -std=c++20 -O3 -I. -c kernels/cpu/quant_avx512_vnni.cpp
//
// The file that includes this one defines what quant_int8_avx512.hpp, which has lanes and formats, asks for.
#include "kernels/cpu/gemm_int8_tile.hpp"
#include "kernels/cpu/quant_int8_avx512.hpp"

namespace ladder::cpu {
namespace {

// ANCHOR: cpu_int8_panels
template <bool Offset>
struct alignas(64) WeightPanel {
  std::uint8_t codes[kGroupElems];  // four vectors, as Weights has them
  float scale[16];
  float offset[16];
};
template <>
struct alignas(64) WeightPanel<false> {
  std::uint8_t codes[kGroupElems];
  float scale[16];
};

template <class Block, bool Whole>
LADDER_INLINE void pack_group(const unsigned char* p, int bytes, WeightPanel<Format<Block>::kOffset>& out) {
  Weights w;
  Format<Block>::decode(Source<Whole>{p, bytes}, w);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) _mm512_store_si512(out.codes + 64 * j, w.codes[j]);
  _mm512_store_ps(out.scale, w.scale);
  if constexpr (Format<Block>::kOffset) _mm512_store_ps(out.offset, w.offset);
}

/// Rows to panels [pairs of rows][groups][2 rows]; of an odd number of rows, the last stands alone: [groups].
template <class Block>
LADDER_AVX512 void pack(const unsigned char* weights, std::size_t row_bytes, int rows, long long id,
                        unsigned char* panels) {
  using Panel = WeightPanel<Format<Block>::kOffset>;
  constexpr int kBlocks = kGroupElems / Block::kElems;  // of a group: 8 or 1
  constexpr int kBytes = kBlocks * static_cast<int>(sizeof(Block));
  const long long whole = id / kGroupElems, groups = (id + kGroupElems - 1) / kGroupElems;
  for (int row = 0; row < rows; ++row) {
    const unsigned char* p = weights + static_cast<std::size_t>(row) * row_bytes;
    const int together = row / 2 * 2 + 1 < rows ? 2 : 1;  // rows of this pair
    Panel* out = reinterpret_cast<Panel*>(panels) + row / 2 * 2 * groups + row % 2;
    for (long long g = 0; g < whole; ++g, p += kBytes, out += together) {
      pack_group<Block, true>(p, kBytes, *out);
    }
    if constexpr (kBlocks > 1) {
      if (whole < groups) {
        const auto rest = static_cast<int>(id % kGroupElems / Block::kElems * sizeof(Block));
        pack_group<Block, false>(p, rest, *out);
      }
    }
  }
}

/// The lanes of 16 vectors added up, vector i to lane i, each by the tree of sum_of_lanes().
LADDER_INLINE __m512 sums_of_lanes(const __m512 v[16]) {
  // 16 -> 8: lanes l + 8 to lanes l; two vectors share one. Then 8 -> 4, 4 -> 2, 2 -> 1.
  __m512 eight[8], four[4], two[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // halves: vectors i, i + 8
    eight[i] =
        _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 8], 0x44), _mm512_shuffle_f32x4(v[i], v[i + 8], 0xee));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // quarters: vectors i, i + 8, i + 4, i + 12
    four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(eight[i], eight[i + 4], 0x88),
                            _mm512_shuffle_f32x4(eight[i], eight[i + 4], 0xdd));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {  // of each quarter, lanes 0 and 1 are vector i's, 2 and 3 vector i + 2's
    const __m512d a = _mm512_castps_pd(four[i]), b = _mm512_castps_pd(four[i + 2]);
    two[i] =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const __m512 one =
      _mm512_add_ps(_mm512_shuffle_ps(two[0], two[1], 0x88), _mm512_shuffle_ps(two[0], two[1], 0xdd));
  // Lane 4q + l is vector 8 * (q % 2) + 4 * (q / 2) + m(l), m = 0, 2, 1, 3.
  static constexpr Dwords kLane = by_lane([](int i) {
    const int quarter = i / 8 + i / 4 % 2 * 2;
    return 4 * quarter + (i % 4 == 1 ? 2 : i % 4 == 2 ? 1 : i % 4);
  });
  return _mm512_permutexvar_ps(vector(kLane), one);
}

/// 1 or 2 rows times some tokens. @param Shift log2 of the format's zero point, -1 for offsets
template <int Shift, int Rows, int Tokens>
LADDER_AVX512 void panel_tile(const PanelTile& tile, int row) {
  using Panel = WeightPanel<(Shift < 0)>;
  // 1. Sums of the groups so far.
  float* sums = tile.sums + row * kMaxQuantTokens * 16;  // [Rows][kMaxQuantTokens][16]
  __m512 sum[Rows][Tokens];
#pragma GCC unroll 2
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; ++t) {
      sum[r][t] = tile.first ? _mm512_setzero_ps() : _mm512_load_ps(sums + (r * kMaxQuantTokens + t) * 16);
    }
  }
  // 2. Group by group: the weights in registers, activations as they are needed.
  const Panel* w = reinterpret_cast<const Panel*>(tile.panels) + row * tile.row_groups + Rows * tile.group;
  const ActPanel* x = tile.acts;
  for (int g = 0; g < tile.groups; ++g, w += Rows, x += kMaxQuantTokens) {
    __m512i codes[Rows][4];
    __m512 scale[Rows], offset[Rows];
#pragma GCC unroll 2
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) codes[r][j] = _mm512_load_si512(w[r].codes + 64 * j);
      scale[r] = _mm512_load_ps(w[r].scale);
      if constexpr (Shift < 0) offset[r] = _mm512_load_ps(w[r].offset);
    }
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; ++t) {
      const ActGroup& group = x[t].group;
      __m512 x_scale = _mm512_load_ps(group.scales);
      asm("" : "+v"(x_scale));  // loaded once for both rows: as operands in memory, loads would set the pace
      const __m512i start =
          Shift < 0 ? _mm512_setzero_si512()
                    : _mm512_slli_epi32(_mm512_load_si512(group.negative_sums), Shift < 0 ? 0 : Shift);
      __m512i dot[Rows];
#pragma GCC unroll 2
      for (int r = 0; r < Rows; ++r) dot[r] = start;
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        __m512i acts = _mm512_load_si512(group.codes + 64 * j);
        asm("" : "+v"(acts));
#pragma GCC unroll 2
        for (int r = 0; r < Rows; ++r) dot[r] = dot4(dot[r], codes[r][j], acts);
      }
#pragma GCC unroll 2
      for (int r = 0; r < Rows; ++r) {
        sum[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r]), _mm512_mul_ps(scale[r], x_scale), sum[r][t]);
      }
      if constexpr (Shift < 0) {
        const __m512 negative = _mm512_load_ps(x[t].negatives);
#pragma GCC unroll 2
        for (int r = 0; r < Rows; ++r) sum[r][t] = _mm512_fnmadd_ps(offset[r], negative, sum[r][t]);
      }
    }
  }
  // 3. What is not finished waits; what is becomes outputs.
  if (!tile.last) {
#pragma GCC unroll 2
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int t = 0; t < Tokens; ++t) _mm512_store_ps(sums + (r * kMaxQuantTokens + t) * 16, sum[r][t]);
    }
    return;
  }
  float* out = tile.out + row;
  if constexpr (Rows * Tokens == 16) {
    __m512 all[16];  // token by token, a token's two rows side by side
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; ++t) all[2 * t] = sum[0][t], all[2 * t + 1] = sum[Rows - 1][t];
    alignas(64) float done[16];
    _mm512_store_ps(done, sums_of_lanes(all));
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; ++t) std::memcpy(out + t * tile.od, done + 2 * t, 2 * sizeof(float));
  } else {
#pragma GCC unroll 2
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int t = 0; t < Tokens; ++t) out[t * tile.od + r] = sum_of_lanes(sum[r][t]);
    }
  }
}

template <int Shift, int Tokens>
LADDER_AVX512 void panel_rows(const PanelTile& tile) {
  int row = 0;
  for (; row + 2 <= tile.rows; row += 2) panel_tile<Shift, 2, Tokens>(tile, row);
  if (row < tile.rows) panel_tile<Shift, 1, Tokens>(tile, row);
}

template <int Shift>
LADDER_AVX512 void multiply_panels(const PanelTile& tile) {
  PanelTile some = tile;
  const auto next = [&](int tokens) {
    some.acts += tokens;
    some.sums += 16 * tokens;
    some.out += tokens * some.od;
  };
  if (tile.tokens == 8) return panel_rows<Shift, 8>(some);
  if (tile.tokens & 4) panel_rows<Shift, 4>(some), next(4);
  if (tile.tokens & 2) panel_rows<Shift, 2>(some), next(2);
  if (tile.tokens & 1) panel_rows<Shift, 1>(some);
}

template <class Block>
constexpr PanelKernels panels_of() {
  return {pack<Block>, multiply_panels<Format<Block>::kShift>, sizeof(WeightPanel<Format<Block>::kOffset>)};
}
// ANCHOR_END: cpu_int8_panels

/// In the order of WeightType.
constexpr PanelKernels kPanels[kWeightTypes.size()] = {{},
                                                       {},
                                                       {},
                                                       panels_of<BlockQ4_0>(),
                                                       panels_of<BlockQ4_1>(),
                                                       panels_of<BlockQ5_0>(),
                                                       panels_of<BlockQ5_1>(),
                                                       panels_of<BlockQ8_0>(),
                                                       panels_of<BlockQ2_K>(),
                                                       panels_of<BlockQ3_K>(),
                                                       panels_of<BlockQ4_K>(),
                                                       panels_of<BlockQ5_K>(),
                                                       panels_of<BlockQ6_K>(),
                                                       panels_of<BlockIQ4_NL>(),
                                                       panels_of<BlockIQ4_XS>()};

}  // namespace
}  // namespace ladder::cpu
