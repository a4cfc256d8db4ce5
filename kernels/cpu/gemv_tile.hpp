// The inside of gemv_vec: what one instruction set has to provide.
//
// A tile is a few rows by a few tokens whose sums stay in SIMD registers while k runs. Each (row, token) has
// exactly one vector of partial sums: lane l adds up the elements k = l, l + lanes, l + 2 * lanes, ... in
// that order, and at the end the lanes are added in a fixed tree. That order does not know how many rows and
// tokens share the tile, which is what makes a token's bits independent of its company.
//
// The tile kernels index arrays of vectors in loops over rows and tokens. Those become registers only once
// the loops are unrolled: GCC does so by itself, Clang needs the pragma on the row loops or keeps the sums in
// memory.
#pragma once

namespace ladder::cpu {

inline constexpr int kTileRows = 4;       // rows of a full tile; single-row tiles do the rest
inline constexpr int kMaxTileTokens = 4;  // no instruction set has the registers for more
inline constexpr int kMaxLanes = 16;      // floats of the widest vector
inline constexpr int kGroupTokens = 8;    // tokens that share one pass over the weights

/// One call of a tile kernel: tile rows x tile tokens, elements k_begin..k_end-1 of each.
struct Tile {
  const float* weights;  // [rows][id], first row of the tile
  const float* acts;     // [tokens][id], first token of the tile
  float* out;            // [tokens][od], at the tile's first row and token
  long long od, id;
  long long k_begin, k_end;  // k_begin is a multiple of kMaxLanes, and so is k_end unless it is id
  long long ahead;  // how many elements ahead of its loads a tile of several tokens prefetches weights
  float* sums;      // [rows][kGroupTokens][kMaxLanes]: carries the partial sums from one panel to the next

  [[nodiscard]] bool first() const { return k_begin == 0; }
  [[nodiscard]] bool last() const { return k_end == id; }
  [[nodiscard]] float* sums_of(int row, int token) const {
    return sums + (static_cast<long long>(row) * kGroupTokens + token) * kMaxLanes;
  }
};

/// Starts from zero if tile.first(), else from `sums`; writes `out` if tile.last(), else `sums`.
using TileKernel = void (*)(const Tile&);

struct TileKernels {
  int tokens;                         // widest tile, 1..kMaxTileTokens
  TileKernel full[kMaxTileTokens];    // [t - 1]: kTileRows rows x t tokens
  TileKernel single[kMaxTileTokens];  // [t - 1]: one row x t tokens
};

// One per instruction set, each in its own file. Only those that this build's architecture knows exist.
extern const TileKernels kTilesPortable;
#if defined(__x86_64__)
extern const TileKernels kTilesAvx2;
extern const TileKernels kTilesAvx512;
#elif defined(__aarch64__)
extern const TileKernels kTilesNeon;
#endif

}  // namespace ladder::cpu
