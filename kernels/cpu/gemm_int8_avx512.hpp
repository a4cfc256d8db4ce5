// RUNG      quant_int8_gemm: the CPU twin of packed weights times many int8 tokens, AVX-512 with and without VNNI.
// PREV      quant_int8: every 8 tokens take the same blocks apart again, and each output adds up 16 lanes at its end.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T   LAYOUT weights as in GGUF, row-major blocks
// MAP       thread -> strips of rows; strip -> panels of bytes in L2, 32 rows side by side; tile -> 32 rows x 6 tokens
//           in registers, lane -> a row; k piece by piece: all runs of 16 elements, or pairs of runs that have one
//           scale, that share a lane in quant_int8
// NEEDS     id a multiple of the block length; weights at a multiple of 4 bytes
// TRAFFIC   weights od * row_bytes(type, id) B, once; acts 4*nt*id B and 1.5 B each of panels made of them, once a strip
// WORK      2*nt*od*id OP
// LOOK FOR  96 vpdpbusd with zmm for each pair of runs, beside 12 vmulps and 12 vfmadd; no shuffle but in pack
// EXPECT    bound by the two pipes that multiply: 96 of 120 issues are vpdpbusd, 4/5 of their rate (offsets: 96 of
//           132; a scale for each run: 48 of 72)
// BUILD     c++ -std=c++20 -O3 -I. -c kernels/cpu/quant_avx512_vnni.cpp
//
// quant_int8 gives a vector's 16 lanes to the 16 runs of a group of one row, and adds up the lanes as a tree at the
// end. Here a lane is a row, and what was a lane becomes a chain: the runs of all groups that would have met in it,
// one after the other. The chains come in the order in which the tree pairs them (0, 8, 4, 12, 2, ...: the lane's bits
// reversed), so that a finished chain finds its partner at once. Of formats with one scale for two runs, half of the
// lanes are used, and a chain goes over pairs of runs. Same terms, same order, same bits; and no lanes to
// add up.
//
// The file that includes this one defines what quant_int8_avx512.hpp, which has lanes and formats, asks for.
#include <algorithm>

#include "kernels/cpu/gemm_int8_tile.hpp"
#include "kernels/cpu/quant_int8_avx512.hpp"

namespace ladder::cpu {
namespace {

// ANCHOR: cpu_int8_panels
constexpr int kPanelRows = 32;  // two vectors
constexpr int kTileTokens = 6;  // 12 sums and 12 dot products of a run fill the registers
constexpr int kMostLevels = 4;  // of the tree above the chains
constexpr int panels_of_strip(int rows) { return (rows + kPanelRows - 1) / kPanelRows; }

/// Where the runs of a group go when Runs neighbours, 1 or 2, share a scale: lane l + 4 has the second of two.
template <int Runs>
struct Chains {
  static constexpr int kCount = 16 / Runs;
  static constexpr int kLevels = Runs == 1 ? 4 : 3;
  static constexpr int lane(int c) {
    return Runs == 1 ? c % 2 * 8 + c / 2 % 2 * 4 + c / 4 % 2 * 2 + c / 8 : c % 2 * 8 + c / 2 % 2 * 2 + c / 4;
  }
  static constexpr int chain(int lane) {
    return Runs == 1 ? lane / 8 + lane / 4 % 2 * 2 + lane / 2 % 2 * 4 + lane % 2 * 8
                     : lane / 8 + lane / 2 % 2 * 2 + lane % 2 * 4;
  }
  /// Which of the runs that share a scale.
  static constexpr int part(int lane) { return Runs == 1 ? 0 : lane / 4 % 2; }
};

/// 16 * Runs elements of 32 rows: value = scale * code + offset, codes signed.
template <bool Offset, int Runs>
struct alignas(64) Panel {
  std::int8_t codes[4 * Runs][kPanelRows][4];  // element 4j + i of a row at [j][row][i]
  std::int32_t start[kPanelRows];  // -128 * sum of the codes: activations are unsigned, 128 too large
  float scale[kPanelRows];
  float offset[kPanelRows];
};
template <int Runs>
struct alignas(64) Panel<false, Runs> {
  std::int8_t codes[4 * Runs][kPanelRows][4];
  std::int32_t start[kPanelRows];
  float scale[kPanelRows];
};
template <class Block>
using PanelOf = Panel<Format<Block>::kOffset, Format<Block>::kRuns>;

/// A block of 32 elements of a tile of tokens, two runs.
struct BlockActs {
  struct Run {
    std::uint32_t codes[4][kTileTokens];  // four codes + 128 each
    float negative[kTileTokens];          // scale * minus the sum of the codes, for formats with offsets
  } runs[2];
  float scale[kTileTokens];
  float negative[kTileTokens];  // of both runs
};
constexpr int kActBlocks = kGroupElems / 32;

/// 16 vectors whose lanes are the runs of a group, to vectors of one run each: store(lane, vector).
template <class Store>
LADDER_INLINE void lanes_apart(const __m512i from[16], Store&& store) {
  __m512 v[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = _mm512_castsi512_ps(from[i]);
  transpose16(v);
#pragma GCC unroll 16
  for (int lane = 0; lane < 16; ++lane) store(lane, v[lane]);
}

/// A group of activations to its blocks: vectors, a lane a run, become words, 30 of a run and 12 of both.
/// @param tile [kActBlocks][groups] of BlockActs
LADDER_AVX512 void put_in_chains(const ActGroup* acts, int count, long long g, long long groups,
                                 unsigned char* tile) {
  static_assert(sizeof(BlockActs::Run) == 30 * sizeof(float) && sizeof(BlockActs) == 72 * sizeof(float));
  constexpr int kOfRun = 5 * kTileTokens;
  auto* block = reinterpret_cast<BlockActs*>(tile) + g;
  __m512i words[48];
  for (auto& w : words) w = _mm512_setzero_si512();
  for (int t = 0; t < count; ++t) {
    for (int j = 0; j < 4; ++j) {
      words[kTileTokens * j + t] = _mm512_xor_si512(_mm512_load_si512(acts[t].codes + 64 * j), bytes(0x80));
    }
    const __m512 scale = _mm512_load_ps(acts[t].scales);
    const __m512i sums = _mm512_load_si512(acts[t].negative_sums);
    const auto scaled = [&](__m512i sum) LADDER_AVX512 {
      return _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale));
    };
    words[4 * kTileTokens + t] = scaled(sums);
    words[32 + t] = _mm512_castps_si512(scale);
    words[32 + kTileTokens + t] = scaled(both_runs(sums));
  }
  const auto words_of = [&](int lane, int first) {
    return reinterpret_cast<float*>(block + block_of_lane(lane) * groups) + first;
  };
  const auto run = [](int lane) { return run_of_lane(lane) % 2 * kOfRun; };
  lanes_apart(words + 32, [&](int lane, __m512 v) LADDER_AVX512 {
    if (run(lane) == 0) _mm512_mask_storeu_ps(words_of(lane, 2 * kOfRun), 0xfff, v);
  });
  lanes_apart(words + 16, [&](int lane, __m512 v) LADDER_AVX512 {
    _mm512_mask_storeu_ps(words_of(lane, run(lane) + 16), 0x3fff, v);
  });
  lanes_apart(words,
              [&](int lane, __m512 v) LADDER_AVX512 { _mm512_storeu_ps(words_of(lane, run(lane)), v); });
}

/// A group of up to 16 rows. @param out [chains][groups], at the group; rows come to lanes first..first+15
template <class Block, bool Whole>
LADDER_AVX512 void pack_group(const unsigned char* p, std::size_t row_bytes, int bytes_of_row, int rows,
                              int first, long long groups, PanelOf<Block>* out) {
  using F = Format<Block>;
  using To = Chains<F::kRuns>;
  const __m512i zero_point = bytes(F::kShift >= 0 ? 1 << (F::kShift >= 0 ? F::kShift : 0) : 0);
  __m512i codes[4][16], start[16], scale[16], offset[16];
  for (int r = 0; r < 16; ++r) {
    if (r >= rows) {
      for (int j = 0; j < 4; ++j) codes[j][r] = _mm512_setzero_si512();
      start[r] = scale[r] = offset[r] = _mm512_setzero_si512();
      continue;
    }
    Weights w;
    F::decode(Source<Whole>{p + static_cast<std::size_t>(r) * row_bytes, bytes_of_row}, w);
    __m512i sum = _mm512_setzero_si512();
    for (int j = 0; j < 4; ++j) {
      codes[j][r] = F::kShift >= 0 ? _mm512_sub_epi8(w.codes[j], zero_point) : w.codes[j];
      sum = dot4(sum, bytes(1), codes[j][r]);
    }
    if constexpr (F::kRuns == 2) sum = both_runs(sum);
    start[r] = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), sum), 7);
    scale[r] = _mm512_castps_si512(w.scale);
    if constexpr (F::kOffset) offset[r] = _mm512_castps_si512(w.offset);
  }
  const auto to = [&](auto&& place) LADDER_AVX512 {
    return [out, groups, place](int lane, __m512 v) LADDER_AVX512 {
      if (To::part(lane) == 0) _mm512_store_ps(place(out[To::chain(lane) * groups]), v);
    };
  };
  for (int j = 0; j < 4; ++j) {
    lanes_apart(codes[j], [&](int lane, __m512 v) LADDER_AVX512 {
      _mm512_store_ps(
          reinterpret_cast<float*>(out[To::chain(lane) * groups].codes[4 * To::part(lane) + j][first]), v);
    });
  }
  lanes_apart(start, to([&](auto& panel) { return reinterpret_cast<float*>(panel.start + first); }));
  lanes_apart(scale, to([&](auto& panel) { return panel.scale + first; }));
  if constexpr (F::kOffset) lanes_apart(offset, to([&](auto& panel) { return panel.offset + first; }));
}

/// Rows to panels [rows / 32][chains][groups]; what is missing of 32 rows is zero.
template <class Block>
LADDER_AVX512 void pack(const unsigned char* weights, std::size_t row_bytes, int rows, long long id,
                        unsigned char* panels) {
  constexpr int kBlocks = kGroupElems / Block::kElems;  // of a group: 8 or 1
  constexpr int kBytes = kBlocks * static_cast<int>(sizeof(Block));
  const long long whole = id / kGroupElems, groups = groups_of_row(id);
  const auto rest = static_cast<int>(id % kGroupElems / Block::kElems * sizeof(Block));
  for (int row = 0; row < panels_of_strip(rows) * kPanelRows; row += 16) {
    const int first = row % kPanelRows;
    const unsigned char* p = weights + static_cast<std::size_t>(row) * row_bytes;
    auto* out = reinterpret_cast<PanelOf<Block>*>(panels) +
                row / kPanelRows * Chains<Format<Block>::kRuns>::kCount * groups;
    for (long long g = 0; g < groups; ++g, p += kBytes) {
      if (g < whole) {
        pack_group<Block, true>(p, row_bytes, kBytes, rows - row, first, groups, out + g);
      } else if constexpr (kBlocks > 1) {
        pack_group<Block, false>(p, row_bytes, rest, rows - row, first, groups, out + g);
      }
    }
  }
}

/// One chain of 32 rows x some tokens: sums of its panels, in order. @param run of activations, if a panel has one
template <bool Offset, int Runs, int Tokens>
LADDER_INLINE void add_chain(const Panel<Offset, Runs>* w, const BlockActs* x, int run, long long count,
                             __m512 sum[Tokens][2]) {
#pragma GCC unroll 6
  for (int t = 0; t < Tokens; ++t) sum[t][0] = sum[t][1] = _mm512_setzero_ps();
  for (; count > 0; --count, ++w, ++x) {
    // 1. Dot products, exact.
    __m512i dot[Tokens][2];
#pragma GCC unroll 6
    for (int t = 0; t < Tokens; ++t) {
      dot[t][0] = _mm512_load_si512(w->start);
      dot[t][1] = _mm512_load_si512(w->start + 16);
    }
#pragma GCC unroll 8
    for (int j = 0; j < 4 * Runs; ++j) {
      const __m512i codes[2] = {_mm512_load_si512(w->codes[j][0]), _mm512_load_si512(w->codes[j][16])};
      const auto& four = x->runs[Runs == 2 ? j / 4 : run].codes[j % 4];
#pragma GCC unroll 6
      for (int t = 0; t < Tokens; ++t) {
        __m512i acts = dwords(four[t]);
        asm("" : "+v"(acts));  // one broadcast for both vectors of rows
        dot[t][0] = dot4(dot[t][0], acts, codes[0]);
        dot[t][1] = dot4(dot[t][1], acts, codes[1]);
      }
    }
    // 2. sum += weight scale * activation scale * dot product, sum += offset * activation scale * sum of codes
    const __m512 scale[2] = {_mm512_load_ps(w->scale), _mm512_load_ps(w->scale + 16)};
#pragma GCC unroll 6
    for (int t = 0; t < Tokens; ++t) {
      const __m512 x_scale = _mm512_set1_ps(x->scale[t]);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        sum[t][v] =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[t][v]), _mm512_mul_ps(scale[v], x_scale), sum[t][v]);
      }
    }
    if constexpr (Offset) {
      const __m512 offset[2] = {_mm512_load_ps(w->offset), _mm512_load_ps(w->offset + 16)};
#pragma GCC unroll 6
      for (int t = 0; t < Tokens; ++t) {
        const __m512 negative = _mm512_set1_ps(Runs == 2 ? x->negative[t] : x->runs[run].negative[t]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) sum[t][v] = _mm512_fnmadd_ps(offset[v], negative, sum[t][v]);
      }
    }
  }
}

/// sum + 0, which makes +0 of -0: what lanes without a run add.
template <int Tokens>
LADDER_INLINE void add_nothing(__m512 sum[Tokens][2]) {
#pragma GCC unroll 6
  for (int t = 0; t < Tokens; ++t) {
    for (int v = 0; v < 2; ++v) sum[t][v] = _mm512_add_ps(sum[t][v], _mm512_setzero_ps());
  }
}

/// Some chains of a tile. @param waiting [kMostLevels][kTileTokens][2][16]: subtrees whose partners are to come
template <bool Offset, int Runs, int Tokens>
LADDER_AVX512 void multiply_tile_chains(const Panel<Offset, Runs>* w, const BlockActs* x, int begin, int end,
                                        long long id, float* waiting, float* out, long long od, int rows) {
  using To = Chains<Runs>;
  const long long groups = groups_of_row(id);
  const auto runs_of_last = static_cast<int>((id - 1) % kGroupElems / 16 + 1);
  for (int c = begin; c < end; ++c) {
    __m512 sum[Tokens][2];
    const int run = run_of_lane(To::lane(c));
    const bool cut = run >= runs_of_last;  // the row ends before the last group's run
    add_chain<Offset, Runs, Tokens>(w + c * groups, x + run / 2 * groups, run % 2, groups - cut, sum);
    if (cut) add_nothing<Tokens>(sum);
    int level = 0;
    for (int tree = c; tree % 2 == 1;
         tree /= 2, ++level) {  // with the partner, then with the partner of both, ...
      const float* partner = waiting + level * kTileTokens * 32;
#pragma GCC unroll 6
      for (int t = 0; t < Tokens; ++t) {
        for (int v = 0; v < 2; ++v) {
          sum[t][v] = _mm512_add_ps(_mm512_load_ps(partner + t * 32 + v * 16), sum[t][v]);
        }
      }
      if (Runs == 2 && level == 0) add_nothing<Tokens>(sum);  // lanes 8 apart are added, then those 4 apart
    }
    if (level < To::kLevels) {
      float* wait = waiting + level * kTileTokens * 32;
#pragma GCC unroll 6
      for (int t = 0; t < Tokens; ++t) {
        for (int v = 0; v < 2; ++v) _mm512_store_ps(wait + t * 32 + v * 16, sum[t][v]);
      }
      continue;
    }
    const auto present = rows >= kPanelRows ? ~0U : (1U << rows) - 1;
#pragma GCC unroll 6
    for (int t = 0; t < Tokens; ++t) {
      _mm512_mask_storeu_ps(out + t * od, static_cast<__mmask16>(present), sum[t][0]);
      _mm512_mask_storeu_ps(out + t * od + 16, static_cast<__mmask16>(present >> 16), sum[t][1]);
    }
  }
}

// A strip that is longer than this goes through L2 some chains at a time.
constexpr std::size_t kStripBytes = std::size_t{512} << 10;
constexpr std::size_t kTileSums = kMostLevels * kTileTokens * kPanelRows;  // floats that wait in a tile

/// @param bytes of the panels of a strip
inline int chains_at_once(std::size_t bytes, int chains) {
  for (; chains > 1 && bytes > kStripBytes; bytes /= 2) chains /= 2;
  return chains;
}

template <bool Offset, int Runs>
LADDER_AVX512 void multiply_panels(const PanelStrip& strip) {
  constexpr int kChains = Chains<Runs>::kCount;
  const long long groups = groups_of_row(strip.id);
  const int panels = panels_of_strip(strip.rows);
  const int chains = chains_at_once(
      sizeof(Panel<Offset, Runs>) * kChains * static_cast<std::size_t>(panels * groups), kChains);
  for (int c = 0; c < kChains; c += chains) {
    const auto* x = reinterpret_cast<const BlockActs*>(strip.acts);
    float* waiting = strip.scratch;
    for (long long t = 0; t < strip.nt; t += kTileTokens, x += kActBlocks * groups) {
      const auto some = [&](auto tokens) LADDER_AVX512 {
        // All rows of the strip meet the tokens while these are in L1 or L2.
        const auto* w = reinterpret_cast<const Panel<Offset, Runs>*>(strip.panels);
        for (int row = 0; row < strip.rows; row += kPanelRows, w += kChains * groups) {
          multiply_tile_chains<Offset, Runs, decltype(tokens)::value>(
              w, x, c, c + chains, strip.id, waiting + static_cast<std::size_t>(row / kPanelRows) * kTileSums,
              strip.out + t * strip.od + row, strip.od, strip.rows - row);
        }
      };
      switch (strip.nt - t) {
        case 1:
          some(std::integral_constant<int, 1>{});
          break;
        case 2:
          some(std::integral_constant<int, 2>{});
          break;
        case 3:
          some(std::integral_constant<int, 3>{});
          break;
        case 4:
          some(std::integral_constant<int, 4>{});
          break;
        case 5:
          some(std::integral_constant<int, 5>{});
          break;
        default:
          some(std::integral_constant<int, kTileTokens>{});
          break;
      }
      if (chains < kChains) waiting += static_cast<std::size_t>(panels) * kTileSums;
    }
  }
}

/// Activations of long rows come from beyond L2 for every strip: four panels of rows share the way.
inline int rows_of_strip(long long fair, long long id, std::size_t) {
  constexpr long long kLongRow = 8192, kMostPanels = 4;
  return kPanelRows * (id > kLongRow ? static_cast<int>(std::clamp(fair / kPanelRows, 1LL, kMostPanels)) : 1);
}

/// What waits for its partner, of every tile if chains come apart.
inline std::size_t waiting_sums(int rows, long long nt, long long id) {
  constexpr int kChains = Chains<1>::kCount;  // the largest panels
  const auto panels = static_cast<std::size_t>(panels_of_strip(rows));
  const std::size_t bytes =
      sizeof(Panel<true, 1>) * kChains * panels * static_cast<std::size_t>(groups_of_row(id));
  const bool apart = chains_at_once(bytes, kChains) < kChains;
  return kTileSums * panels * static_cast<std::size_t>(apart ? (nt + kTileTokens - 1) / kTileTokens : 1);
}

template <class Block>
constexpr PanelKernels panels_of() {
  using F = Format<Block>;
  return {pack<Block>, multiply_panels<F::kOffset, F::kRuns>,
          Chains<F::kRuns>::kCount * sizeof(PanelOf<Block>) / kPanelRows};
}
// ANCHOR_END: cpu_int8_panels

constexpr GemmInt8Kernels kGemmInt8 = {
    .rows = rows_of_strip,
    .tokens = kTileTokens,
    .act_bytes = kActBlocks * sizeof(BlockActs),
    .put = put_in_chains,
    .scratch = waiting_sums,
    .types = {{},
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
              panels_of<BlockIQ4_XS>()},
};

}  // namespace
}  // namespace ladder::cpu
