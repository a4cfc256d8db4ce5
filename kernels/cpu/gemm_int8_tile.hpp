// The inside of gemm_int8.hpp: what one instruction set has to provide.
//
// A strip of rows is taken out of its blocks once, to panels: codes a byte each and scales in f32, in the order
// in which the products read them. Then all tokens pass it, kMaxQuantTokens at a time. Terms are added to a
// (row, token) in the order of quant_tile.hpp, so that the bits are those of the products that decode as they go.
#pragma once

#include <cstddef>

#include "kernels/cpu/quant_tile.hpp"

namespace ladder::cpu {

/// 256 activations of a token: what both kinds of formats need, each in one load.
struct alignas(64) ActPanel {
  ActGroup group;
  float negatives[kGroupRuns];  // scale of the run * minus the sum of its codes, for formats with offsets
};

/// Rows of a strip times 1 to kMaxQuantTokens tokens, over some groups of k.
struct PanelTile {
  const unsigned char* panels;  // of the strip, as PackPanels left them
  long long row_groups;         // groups of a row
  const ActPanel* acts;         // [groups][kMaxQuantTokens], at the first group
  int tokens;
  int rows;
  int group, groups;  // of a row: the first one, and how many
  bool first, last;   // whether sums begin at zero, and whether they become outputs
  float* sums;        // of what is neither: [rows][kMaxQuantTokens][16]
  float* out;         // [tokens][od], at the first row and token
  long long od;       // distance of the tokens in `out`
};

/// Rows of a matrix to panels, in an order that MultiplyPanels of the same kernels knows.
/// @param panels at a multiple of 64 bytes
using PackPanels = void (*)(const unsigned char* weights, std::size_t row_bytes, int rows, long long id,
                            unsigned char* panels);
using MultiplyPanels = void (*)(const PanelTile&);

/// Of one type; all null and 0 for those that are not quantized.
struct PanelKernels {
  PackPanels pack;
  MultiplyPanels multiply;
  std::size_t bytes;  // of 256 weights of a row
};

}  // namespace ladder::cpu
