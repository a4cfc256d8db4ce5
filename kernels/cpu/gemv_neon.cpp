// The tiles of gemv_vec for aarch64 NEON: 4 floats to a vector, 4 rows x 4 tokens = 16 of the 32 registers
// for sums.
#include "kernels/cpu/gemv_tile.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>

namespace ladder::cpu {
namespace {

// Adds the 4 lanes as a fixed tree: 4 -> 2 -> 1.
inline float sum_of_lanes(float32x4_t v) {
  const float32x2_t two = vadd_f32(vget_low_f32(v), vget_high_f32(v));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

// The last `present` (1..3) elements of a row; absent ones are not read and count as zero.
inline float32x4_t load_end(const float* from, long long present) {
  float32x4_t v = vld1q_lane_f32(from, vdupq_n_f32(0), 0);
  if (present > 1) v = vld1q_lane_f32(from + 1, v, 1);
  if (present > 2) v = vld1q_lane_f32(from + 2, v, 2);
  return v;
}

template <int Rows, int Tokens>
void tile_neon(const Tile& tile) {
  const float* w = tile.weights;  // [Rows][id]
  const float* x = tile.acts;     // [Tokens][id]
  const long long id = tile.id;
  float32x4_t sum[Rows][Tokens];
#pragma GCC unroll 4  // kTileRows
  for (int r = 0; r < Rows; ++r) {
    for (int t = 0; t < Tokens; ++t)
      sum[r][t] = tile.first() ? vdupq_n_f32(0) : vld1q_f32(tile.sums_of(r, t));
  }
  // Lane l of sum[r][t]: for (k = l; k < id; k += 4) sum += w[r][k] * x[t][k].
  long long k = tile.k_begin;
  for (; k + 4 <= tile.k_end; k += 4) {
    float32x4_t xs[Tokens];
    for (int t = 0; t < Tokens; ++t) xs[t] = vld1q_f32(x + t * id + k);
#pragma GCC unroll 4  // kTileRows
    for (int r = 0; r < Rows; ++r) {
      const float32x4_t ws = vld1q_f32(w + r * id + k);
      for (int t = 0; t < Tokens; ++t) sum[r][t] = vfmaq_f32(sum[r][t], ws, xs[t]);
    }
  }
  if (k < tile.k_end) {
#pragma GCC unroll 4  // kTileRows
    for (int r = 0; r < Rows; ++r) {
      const float32x4_t ws = load_end(w + r * id + k, tile.k_end - k);
      for (int t = 0; t < Tokens; ++t) {
        sum[r][t] = vfmaq_f32(sum[r][t], ws, load_end(x + t * id + k, tile.k_end - k));
      }
    }
  }
#pragma GCC unroll 4  // kTileRows
  for (int r = 0; r < Rows; ++r) {
    for (int t = 0; t < Tokens; ++t) {
      if (tile.last()) {
        tile.out[t * tile.od + r] = sum_of_lanes(sum[r][t]);
      } else {
        vst1q_f32(tile.sums_of(r, t), sum[r][t]);
      }
    }
  }
}

}  // namespace

const TileKernels kTilesNeon = {
    .tokens = 4,
    .full = {tile_neon<kTileRows, 1>, tile_neon<kTileRows, 2>, tile_neon<kTileRows, 3>,
             tile_neon<kTileRows, 4>},
    .single = {tile_neon<1, 1>, tile_neon<1, 2>, tile_neon<1, 3>, tile_neon<1, 4>},
};

}  // namespace ladder::cpu
#endif
