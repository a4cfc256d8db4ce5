// What the gemm_tiles kernels multiply: one to three matrices in tiles with the same activations, or a gate and what it
// lets through.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "harness/device/device.hpp"
#include "harness/experiment/rung.hpp"
#include "kernels/device/cuda.cuh"
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

}  // namespace tiles
}  // namespace ladder
