// The tiles of gemv_vec for AVX-512: 16 floats to a vector, 4 rows x 4 tokens = 16 of the 32 registers for
// sums.
#include "kernels/cpu/gemv_tile.hpp"

#if defined(__x86_64__)
#include "kernels/cpu/lanes_avx512.hpp"

#define LADDER_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))

namespace ladder::cpu {
namespace {

// ANCHOR: cpu_gemv_tile_avx512
template <int Rows, int Tokens>
LADDER_AVX512 void tile_avx512(const Tile& tile) {
  const float* w = tile.weights;  // [Rows][id]
  const float* x = tile.acts;     // [Tokens][id]
  const long long id = tile.id;
  __m512 sum[Rows][Tokens];
#pragma GCC unroll 4  // kTileRows
  for (int r = 0; r < Rows; ++r) {
    for (int t = 0; t < Tokens; ++t) {
      sum[r][t] = tile.first() ? _mm512_setzero_ps() : _mm512_load_ps(tile.sums_of(r, t));
    }
  }
  // Lane l of sum[r][t]: for (k = l; k < id; k += 16) sum += w[r][k] * x[t][k].
  long long k = tile.k_begin;
  for (; k + 16 <= tile.k_end; k += 16) {
    __m512 xs[Tokens];
    for (int t = 0; t < Tokens; ++t) xs[t] = _mm512_loadu_ps(x + t * id + k);
#pragma GCC unroll 4  // kTileRows
    for (int r = 0; r < Rows; ++r) {
      const __m512 ws = _mm512_loadu_ps(w + r * id + k);
      if (Tokens > 1) _mm_prefetch(reinterpret_cast<const char*>(w + r * id + k + tile.ahead), _MM_HINT_T0);
      for (int t = 0; t < Tokens; ++t) sum[r][t] = _mm512_fmadd_ps(ws, xs[t], sum[r][t]);
    }
  }
  if (k < tile.k_end) {  // the end of the row: absent elements are not read and count as zero
    const auto present = static_cast<__mmask16>((1U << (tile.k_end - k)) - 1);
#pragma GCC unroll 4  // kTileRows
    for (int r = 0; r < Rows; ++r) {
      const __m512 ws = _mm512_maskz_loadu_ps(present, w + r * id + k);
      for (int t = 0; t < Tokens; ++t) {
        sum[r][t] = _mm512_fmadd_ps(ws, _mm512_maskz_loadu_ps(present, x + t * id + k), sum[r][t]);
      }
    }
  }
#pragma GCC unroll 4  // kTileRows
  for (int r = 0; r < Rows; ++r) {
    for (int t = 0; t < Tokens; ++t) {
      if (tile.last()) {
        tile.out[t * tile.od + r] = sum_of_lanes(sum[r][t]);
      } else {
        _mm512_store_ps(tile.sums_of(r, t), sum[r][t]);
      }
    }
  }
}
// ANCHOR_END: cpu_gemv_tile_avx512

}  // namespace

const TileKernels kTilesAvx512 = {
    .tokens = 4,
    .full = {tile_avx512<kTileRows, 1>, tile_avx512<kTileRows, 2>, tile_avx512<kTileRows, 3>,
             tile_avx512<kTileRows, 4>},
    .single = {tile_avx512<1, 1>, tile_avx512<1, 2>, tile_avx512<1, 3>, tile_avx512<1, 4>},
};

}  // namespace ladder::cpu
#endif
