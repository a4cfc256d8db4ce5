// Panels of the instruction sets that keep codes in order: one row after the other, a group of 256 weights as its
// decoder leaves it. The file that includes this one defines, in ladder::cpu's unnamed namespace,
//   LADDER_PANEL            the target attribute of every function
//   Panel                   a decoded group
//   make_panel<Block>(b, count, panel)
//   Sum                     the lanes of one output, with zero_sum, load_sum, store_sum and total
//   add_panel<Block, Tokens>(panel, acts, sums)   the group's products with Tokens tokens, acts [Tokens]
#include <algorithm>

#include "kernels/cpu/gemm_int8_tile.hpp"

namespace ladder::cpu {
namespace {

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

template <class Block, int Tokens>
LADDER_PANEL void multiply_row(const PanelTile& tile, int row, int token) {
  float* kept = tile.sums + (row * kMaxQuantTokens + token) * 16;  // [Tokens][16]
  Sum sums[Tokens];
  for (int t = 0; t < Tokens; ++t) sums[t] = tile.first ? zero_sum() : load_sum(kept + 16 * t);
  const Panel* w = reinterpret_cast<const Panel*>(tile.panels) + row * tile.row_groups + tile.group;
  const ActPanel* x = tile.acts + token;
  for (int g = 0; g < tile.groups; ++g, ++w, x += kMaxQuantTokens) add_panel<Block, Tokens>(*w, x, sums);
  for (int t = 0; t < Tokens; ++t) {
    if (tile.last) {
      tile.out[(token + t) * tile.od + row] = total(sums[t]);
    } else {
      store_sum(kept + 16 * t, sums[t]);
    }
  }
}

template <class Block>
LADDER_PANEL void multiply_groups(const PanelTile& tile) {
  for (int row = 0; row < tile.rows; ++row) {
    int token = 0;
    for (; token + 4 <= tile.tokens; token += 4) multiply_row<Block, 4>(tile, row, token);
    for (; token < tile.tokens; ++token) multiply_row<Block, 1>(tile, row, token);
  }
}

template <class Block>
constexpr PanelKernels panels_of() {
  return {pack_groups<Block>, multiply_groups<Block>, sizeof(Panel)};
}

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
