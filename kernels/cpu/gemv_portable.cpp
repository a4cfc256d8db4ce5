// The tiles of gemv_vec for any CPU: 4 floats to a vector in the vector type that GCC and Clang have for
// every architecture (SSE on x86-64, NEON on aarch64, plain floats where there is nothing). 4 rows x 2 tokens
// of sums, because x86-64 without extensions has 16 registers and no fused multiply-add, so that products
// need registers as well.
#include <cstring>

#include "kernels/cpu/gemv_tile.hpp"

namespace ladder::cpu {
namespace {

using Vector = float __attribute__((vector_size(16)));  // four floats; + and * work lane by lane

inline Vector load(const float* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);  // a load without a demand on alignment
  return v;
}

// The last `present` (1..3) elements of a row; absent ones are not read and count as zero.
inline Vector load_end(const float* from, long long present) {
  return Vector{from[0], present > 1 ? from[1] : 0, present > 2 ? from[2] : 0, 0};
}

template <int Rows, int Tokens>
void tile_portable(const Tile& tile) {
  const float* w = tile.weights;  // [Rows][id]
  const float* x = tile.acts;     // [Tokens][id]
  const long long id = tile.id;
  Vector sum[Rows][Tokens];
#pragma GCC unroll 4  // kTileRows
  for (int r = 0; r < Rows; ++r) {
    for (int t = 0; t < Tokens; ++t) sum[r][t] = tile.first() ? Vector{} : load(tile.sums_of(r, t));
  }
  // Lane l of sum[r][t]: for (k = l; k < id; k += 4) sum += w[r][k] * x[t][k].
  long long k = tile.k_begin;
  for (; k + 4 <= tile.k_end; k += 4) {
    Vector xs[Tokens];
    for (int t = 0; t < Tokens; ++t) xs[t] = load(x + t * id + k);
#pragma GCC unroll 4  // kTileRows
    for (int r = 0; r < Rows; ++r) {
      const Vector ws = load(w + r * id + k);
      for (int t = 0; t < Tokens; ++t) sum[r][t] += ws * xs[t];
    }
  }
  if (k < tile.k_end) {
#pragma GCC unroll 4  // kTileRows
    for (int r = 0; r < Rows; ++r) {
      const Vector ws = load_end(w + r * id + k, tile.k_end - k);
      for (int t = 0; t < Tokens; ++t) sum[r][t] += ws * load_end(x + t * id + k, tile.k_end - k);
    }
  }
#pragma GCC unroll 4  // kTileRows
  for (int r = 0; r < Rows; ++r) {
    for (int t = 0; t < Tokens; ++t) {
      if (tile.last()) {
        const Vector& v = sum[r][t];
        tile.out[t * tile.od + r] = (v[0] + v[2]) + (v[1] + v[3]);  // a fixed tree: 4 -> 2 -> 1
      } else {
        std::memcpy(tile.sums_of(r, t), &sum[r][t], sizeof sum[r][t]);
      }
    }
  }
}

}  // namespace

const TileKernels kTilesPortable = {
    .tokens = 2,
    .full = {tile_portable<kTileRows, 1>, tile_portable<kTileRows, 2>},
    .single = {tile_portable<1, 1>, tile_portable<1, 2>},
};

}  // namespace ladder::cpu
