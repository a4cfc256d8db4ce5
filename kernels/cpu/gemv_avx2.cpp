// The tiles of gemv_vec for AVX2 with FMA: 8 floats to a vector. Of 16 registers, 4 rows x 3 tokens hold
// sums, 3 hold activations, and one the weights.
#include "kernels/cpu/gemv_tile.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

// The file is compiled for any x86-64; only these functions may use AVX2, and only a CPU that has it calls
// them.
#define LADDER_AVX2 __attribute__((target("avx2,fma")))

namespace ladder::cpu {
namespace {

// Adds the 8 lanes as a fixed tree: 8 -> 4 -> 2 -> 1.
LADDER_AVX2 inline float sum_of_lanes(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

template <int Rows, int Tokens>
LADDER_AVX2 void tile_avx2(const Tile& tile) {
  const float* w = tile.weights;  // [Rows][id]
  const float* x = tile.acts;     // [Tokens][id]
  const long long id = tile.id;
  __m256 sum[Rows][Tokens];
#pragma GCC unroll 4  // kTileRows
  for (int r = 0; r < Rows; ++r) {
    for (int t = 0; t < Tokens; ++t) {
      sum[r][t] = tile.first() ? _mm256_setzero_ps() : _mm256_load_ps(tile.sums_of(r, t));
    }
  }
  // Lane l of sum[r][t]: for (k = l; k < id; k += 8) sum += w[r][k] * x[t][k].
  long long k = tile.k_begin;
  for (; k + 8 <= tile.k_end; k += 8) {
    __m256 xs[Tokens];
    for (int t = 0; t < Tokens; ++t) xs[t] = _mm256_loadu_ps(x + t * id + k);
#pragma GCC unroll 4  // kTileRows
    for (int r = 0; r < Rows; ++r) {
      const __m256 ws = _mm256_loadu_ps(w + r * id + k);
      if (Tokens > 1) _mm_prefetch(reinterpret_cast<const char*>(w + r * id + k + tile.ahead), _MM_HINT_T0);
      for (int t = 0; t < Tokens; ++t) sum[r][t] = _mm256_fmadd_ps(ws, xs[t], sum[r][t]);
    }
  }
  if (k < tile.k_end) {  // the end of the row: absent elements are not read and count as zero
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i present = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(tile.k_end - k)), lane);
#pragma GCC unroll 4  // kTileRows
    for (int r = 0; r < Rows; ++r) {
      const __m256 ws = _mm256_maskload_ps(w + r * id + k, present);
      for (int t = 0; t < Tokens; ++t) {
        sum[r][t] = _mm256_fmadd_ps(ws, _mm256_maskload_ps(x + t * id + k, present), sum[r][t]);
      }
    }
  }
#pragma GCC unroll 4  // kTileRows
  for (int r = 0; r < Rows; ++r) {
    for (int t = 0; t < Tokens; ++t) {
      if (tile.last()) {
        tile.out[t * tile.od + r] = sum_of_lanes(sum[r][t]);
      } else {
        _mm256_store_ps(tile.sums_of(r, t), sum[r][t]);
      }
    }
  }
}

}  // namespace

const TileKernels kTilesAvx2 = {
    .tokens = 3,
    .full = {tile_avx2<kTileRows, 1>, tile_avx2<kTileRows, 2>, tile_avx2<kTileRows, 3>},
    .single = {tile_avx2<1, 1>, tile_avx2<1, 2>, tile_avx2<1, 3>},
};

}  // namespace ladder::cpu
#endif
