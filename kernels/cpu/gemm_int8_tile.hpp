// The inside of gemm_int8.hpp: what one instruction set has to provide.
//
// A strip of rows is taken out of its blocks once, to panels: codes a byte each and scales in f32, in the order
// in which the products read them. Then all tokens pass it, tile by tile. Terms are added to a (row, token) in the
// order of quant_tile.hpp, so that the bits are those of the products that decode as they go.
#pragma once

#include <cstddef>

#include "kernels/cpu/quant_tile.hpp"

namespace ladder::cpu {

/// Rows of a strip times all tokens.
struct PanelStrip {
  const unsigned char* panels;  // as PanelKernels::pack left them
  int rows;
  const unsigned char* acts;  // tiles of tokens, as GemmInt8Kernels::put left them
  long long nt, id;
  float* out;      // [nt][od], at the first row
  long long od;    // distance of the tokens in `out`
  float* scratch;  // of GemmInt8Kernels::scratch floats, at a multiple of 64 bytes
};

/// Of one type; all null and 0 for those that are not quantized.
struct PanelKernels {
  /// Rows of a matrix to panels, in an order of its own. @param panels at a multiple of 64 bytes
  void (*pack)(const unsigned char* weights, std::size_t row_bytes, int rows, long long id,
               unsigned char* panels);
  void (*multiply)(const PanelStrip& strip);
  std::size_t bytes;  // of 256 weights of a row
};

struct GemmInt8Kernels {
  /// Of a strip, but for the last of a matrix. @param fair that leave each thread enough strips to end together
  int (*rows)(long long fair, long long id, std::size_t panel_bytes);
  int tokens;             // of a tile
  std::size_t act_bytes;  // of 256 activations of a tile of tokens
  /// A group of a tile's tokens to its place. @param acts [count] @param tile [groups] of act_bytes, in an order of
  /// its own
  void (*put)(const ActGroup* acts, int count, long long g, long long groups, unsigned char* tile);
  std::size_t (*scratch)(int rows, long long nt, long long id);  // floats
  PanelKernels types[kWeightTypes.size()];                       // by WeightType
};

inline long long groups_of_row(long long id) { return (id + kGroupElems - 1) / kGroupElems; }

}  // namespace ladder::cpu
