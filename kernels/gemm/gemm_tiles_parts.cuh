// What the gemm_tiles kernels multiply: one to three matrices in tiles with the same activations, or a gate and what it
// lets through.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "harness/device/device.hpp"
#include "harness/experiment/rung.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/gemm/epilogue.cuh"
#include "kernels/mmvq/tiles.cuh"

namespace ladder {

inline constexpr int kMostGemmTilesParts = 3;  ///< matrices of one launch: Q, K and V

/// One of the matrices that are multiplied with the same activations.
struct GemmTilesPart {
  const void* tiles;  ///< [od][id] in tiles, at a multiple of 16 bytes
  float* out;         ///< [nt][od]
  int od;
  GemmEpilogue epilogue = {};
};

/// silu(gate) * up, silu(z) = z / (1 + e^-z), and what it is written as: f32 for whoever wants it, f16 in the order of
/// tiles for the next product, or both.
struct GemmTilesGate {
  const void *gate, *up;      ///< [od][id] in tiles of one type, at multiples of 16 bytes
  float* out = nullptr;       ///< [nt][od], or null
  __half* halves = nullptr;   ///< [nt][od], every 16 in the order of f16_tiles, times halves_scale; or null
  float halves_scale = 1.0f;  ///< a power of two, for numbers that f16 could not hold
  const float* row_scale = nullptr;  ///< [nt], of the activations: as GemmEpilogue's
};

/// Shapes of the gemm_tiles kernels, but for what a device must have.
inline Status gemm_tiles_supported(WeightType type, Shape s) {
  if (!tiles::has_tiles(type)) {
    return Status::error(std::string("gemm_tiles: ") + info(type).name +
                         " weights have no blocks; types with blocks of 32 or 256 have tiles");
  }
  if (Status ok = whole_blocks(type, s); !ok.ok()) return ok;
  constexpr long long kMost = 1LL << 30;
  if (s.nt > kMost || s.od > kMost || s.id > kMost) {
    return Status::error("gemm_tiles: nt, od and id must each be at most " + std::to_string(kMost));
  }
  return {};
}

/// Upper bound on the f32 roundings of a term: tensor cores add 16 products with one rounding or more to a sum, and cut
/// off where f32 arithmetic rounds, which is twice as much; then the pieces of a cut tile, and the epilogue.
inline double gemm_tiles_roundings(long long id) { return static_cast<double>(id) + 16 + 3; }

namespace tiles {

/// The matrices of a launch.
struct GemmParts {
  GemmTilesPart part[kMostGemmTilesParts];
  int first[kMostGemmTilesParts + 1];  // sixteen that part p begins with, counted over all; then their number
};

__device__ __forceinline__ int gemm_part_of(const GemmParts& parts, int sixteen) {
  return sixteen < parts.first[1] ? 0 : sixteen < parts.first[2] ? 1 : 2;
}

/// Checks the matrices and numbers their sixteens of rows.
inline Status gather_parts(WeightType type, std::span<const GemmTilesPart> matrices, const void* acts,
                           long long nt, long long id, GemmParts& parts) {
  if (matrices.empty() || matrices.size() > kMostGemmTilesParts) {
    return Status::error("gemm_tiles: 1 to " + std::to_string(kMostGemmTilesParts) +
                         " matrices at once, not " + std::to_string(matrices.size()));
  }
  parts = {};
  for (std::size_t p = 0; p < kMostGemmTilesParts; ++p) {
    parts.first[p + 1] = parts.first[p];
    if (p >= matrices.size()) continue;
    const GemmTilesPart& m = matrices[p];
    if (Status ok = gemm_tiles_supported(type, {nt, m.od, id}); !ok.ok()) return ok;
    if ((reinterpret_cast<std::uintptr_t>(m.tiles) | reinterpret_cast<std::uintptr_t>(acts)) % 16 != 0) {
      return Status::error("weights and activations must begin at a multiple of 16 bytes");
    }
    parts.part[p] = m;
    parts.first[p + 1] += static_cast<int>(row_tiles(m.od));
  }
  return {};
}

/// Sums of rows r and r + 8 of a matrix, `token` and the next one, become outputs. @param v [2 row + token]
__device__ __forceinline__ void finish_fragment(const float (&v)[4], const GemmTilesPart& part, int r,
                                                int token, int nt) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = token + i % 2, row = r + i / 2 * 8;
    if (at >= nt || row >= part.od) continue;
    part.out[static_cast<long long>(at) * part.od + row] =
        apply_epilogue(part.epilogue, v[i], at, row, part.od);
  }
}

/// silu(gate) * up of rows r and r + 8 of a sixteen, `token` and the next one, r = lane / 4 and token = 2 (lane % 4) on from
/// the warp's first. All lanes of the warp call this.
/// @param gate, up [2 row + token] @param od of both matrices @param nt tokens there are
[[maybe_unused]] __device__ __forceinline__ void finish_gate(const float (&gate)[4], const float (&up)[4],
                                                             const GemmTilesGate& to, int od, int sixteen,
                                                             int token, int nt) {
  const int g = static_cast<int>(threadIdx.x % 32 / 4), r = sixteen * kRows + g;
  float scale[2] = {1.0f, 1.0f}, v[4];
  if (to.row_scale != nullptr) {
    if (token < nt) scale[0] = to.row_scale[token];
    if (token + 1 < nt) scale[1] = to.row_scale[token + 1];
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float z = gate[j] * scale[j % 2];
    v[j] = __fdividef(z, 1.0f + __expf(-z)) * (up[j] * scale[j % 2]);
  }
  if (to.out != nullptr) {
    float* const out = to.out + static_cast<long long>(token) * od + r;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (token + j % 2 < nt && r + j / 2 * 8 < od) out[j % 2 * od + j / 2 * 8] = v[j];
    }
  }
  if (to.halves != nullptr) {
    // Lanes of rows g and g ^ 1 exchange a token each, so that both have two neighbouring rows of one.
    const bool odd = g % 2 != 0;
    const int mine_token = token + (odd ? 1 : 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float mine = odd ? v[2 * h + 1] : v[2 * h], give = odd ? v[2 * h] : v[2 * h + 1];
      const float got = __shfl_xor_sync(kAllLanes, give, 4), s = to.halves_scale;
      const __half2 pair = odd ? __floats2half2_rn(got * s, mine * s) : __floats2half2_rn(mine * s, got * s);
      const int k = g / 2 * 2 + 8 * h, at = k / 4 * 2 + k / 2 % 2 * 8;  // rows k and k + 1 of the sixteen
      if (mine_token < nt && sixteen * kRows < od) {
        *reinterpret_cast<__half2*>(to.halves + static_cast<long long>(mine_token) * od + sixteen * kRows +
                                    at) = pair;
      }
    }
  }
}

}  // namespace tiles
}  // namespace ladder
