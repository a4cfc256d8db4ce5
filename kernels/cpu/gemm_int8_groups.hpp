// Panels of the instruction sets that keep codes in order: one row after the other, a group of 256 weights as its
// decoder leaves it. The file that includes this one defines, in ladder::cpu's unnamed namespace,
//   LADDER_PANEL            the target attribute of every function
//   ActPanel                what a token has for a group: an ActGroup and what add_panel wants beside it, with
//                           put_panel(group, panel)
//   Panel                   a decoded group
//   make_panel<Block>(b, count, panel)
//   Sum                     the lanes of one output, with zero_sum, load_sum, store_sum and total
//   add_panel<Block, Tokens>(panel, acts, sums)   the group's products with Tokens tokens, acts [Tokens]
#include <algorithm>

#include "kernels/cpu/gemm_int8_tile.hpp"

namespace ladder::cpu {
namespace {

// Groups of k at a time: 8 tokens of them, 31 KB, stay in L1 while all rows of a strip pass. Sums wait meanwhile.
constexpr long long kMostGroups = 10;

template <class Block>
LADDER_PANEL void pack_groups(const unsigned char* weights, std::size_t row_bytes, int rows, long long id,
                              unsigned char* panels) {
  constexpr long long kBlocks = kGroupElems / Block::kElems;
  const long long blocks_of_row = id / Block::kElems;
  auto* out = reinterpret_cast<Panel*>(panels);
  for (int row = 0; row < rows; ++row) {
    const auto* blocks = reinterpret_cast<const Block*>(weights + static_cast<std::size_t>(row) * row_bytes);
    for (long long at = 0; at < blocks_of_row; at += kBlocks) {
      make_panel(blocks + at, static_cast<int>(std::min(kBlocks, blocks_of_row - at)), *out++);
    }
  }
}

LADDER_PANEL void put_in_order(const ActGroup* acts, int count, long long g, long long, unsigned char* tile) {
  auto* out = reinterpret_cast<ActPanel*>(tile) + g * kMaxQuantTokens;
  for (int t = 0; t < count; ++t) put_panel(acts[t], out[t]);
}

/// Groups `from` to `to` of a row and some tokens. @param kept [Tokens][16], sums of other groups
template <class Block, int Tokens>
LADDER_PANEL void multiply_row(const Panel* w, const ActPanel* x, long long from, long long to,
                               long long groups, float* kept, float* out, long long od) {
  Sum sums[Tokens];
  for (int t = 0; t < Tokens; ++t) sums[t] = from == 0 ? zero_sum() : load_sum(kept + 16 * t);
  for (long long g = from; g < to; ++g) add_panel<Block, Tokens>(w[g], x + g * kMaxQuantTokens, sums);
  for (int t = 0; t < Tokens; ++t) {
    if (to == groups) {
      out[t * od] = total(sums[t]);
    } else {
      store_sum(kept + 16 * t, sums[t]);
    }
  }
}

template <class Block>
LADDER_PANEL void multiply_groups(const PanelStrip& strip) {
  const long long groups = groups_of_row(strip.id), blocks = (groups + kMostGroups - 1) / kMostGroups;
  const long long step = (groups + blocks - 1) / blocks;
  for (long long first = 0; first < strip.nt; first += kMaxQuantTokens) {
    const auto tokens = static_cast<int>(std::min<long long>(kMaxQuantTokens, strip.nt - first));
    const auto* acts = reinterpret_cast<const ActPanel*>(strip.acts) + first * groups;
    for (long long from = 0; from < groups; from += step) {
      const long long to = std::min(from + step, groups);
      for (int row = 0; row < strip.rows; ++row) {
        const Panel* w = reinterpret_cast<const Panel*>(strip.panels) + row * groups;
        float* kept = strip.scratch + row * kMaxQuantTokens * 16;
        float* out = strip.out + first * strip.od + row;
        int t = 0;
        for (; t + 4 <= tokens; t += 4) {
          multiply_row<Block, 4>(w, acts + t, from, to, groups, kept + 16 * t, out + t * strip.od, strip.od);
        }
        for (; t < tokens; ++t) {
          multiply_row<Block, 1>(w, acts + t, from, to, groups, kept + 16 * t, out + t * strip.od, strip.od);
        }
      }
    }
  }
}

/// Of panels that take half of a megabyte of L2.
int rows_of_strip(long long fair, long long id, std::size_t panel_bytes) {
  const auto row = panel_bytes * static_cast<std::size_t>(groups_of_row(id));
  return static_cast<int>(
      std::clamp<long long>(std::min<long long>(fair, (std::size_t{512} << 10) / row), 8, 64));
}

std::size_t sums_of_strip(int rows, long long, long long) {
  return static_cast<std::size_t>(rows) * kMaxQuantTokens * 16;
}

template <class Block>
constexpr PanelKernels panels_of() {
  return {pack_groups<Block>, multiply_groups<Block>, sizeof(Panel)};
}

constexpr GemmInt8Kernels kGemmInt8 = {
    .rows = rows_of_strip,
    .tokens = kMaxQuantTokens,
    .act_bytes = kMaxQuantTokens * sizeof(ActPanel),
    .put = put_in_order,
    .scratch = sums_of_strip,
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
