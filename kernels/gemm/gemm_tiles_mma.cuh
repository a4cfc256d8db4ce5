// RUNG      gemm_tiles_mma: packed weights to f16 in registers, multiplied by mma.sync.
// PREV      gemm_qb_nt: weights are decoded into shared memory, and read from there by every warp
// COMPUTES  out[nt][od] = epilogue(acts[nt][id] . weights[od][id]^T) for one to three matrices
// LAYOUT    weights in tiles (kernels/mmvq/tiles.cuh), acts f16 in their order (acts_f16.cuh), out row-major f32; shared
//           memory: acts [3][64][64] halves, swizzled, weights [2][8] tiles
// MAP       grid(ceil(nt/64), ceil(sixteens/8)) block(128): warp -> two sixteens of rows by 64 tokens
// NEEDS     sm_80; id % 32 == 0 (256 for types with blocks of 256), any od and nt: checked by the launcher
// TRAFFIC   weights od*id*bpe B a block of 64 tokens (from L2 after the first), acts 2*nt*id B, out 4*nt*od B
// WORK      2*nt*od*id FLOP on tensor cores
// LOOK FOR  SASS: HMMA.16816.F32, LDSM.16.M88.4 in fours beside 32 of them, PRMT and HFMA2; LDGSTS.E.BYPASS.128
// EXPECT    weights are decoded once for 64 tokens, in the shadow of the products; below gemm_tiles_wgmma on Hopper
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/05-tiled-gemm/tiled_gemm.cu -o tiled_gemm
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/device/cp_async.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/ldmatrix.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/gemm/gemm_tiles_formats.cuh"
#include "kernels/gemm/gemm_tiles_parts.cuh"
#include "kernels/mmvq/mmvq_tiles_formats.cuh"

namespace ladder {

namespace tiles {

/// A block of gemm_tiles_mma.
template <class Format>
struct GemmMmaBlock {
  static constexpr int kTokens = 64, kWarps = 4, kSixteens = 2 * kWarps;
  static constexpr int kTile = tile_bytes<typename Format::Block>();
  static constexpr int kPer =
      Tile<typename Format::Block>::kSteps / 2;  // stages of 64 activations along a tile
  static constexpr int kActBytes = kTokens * 128, kActStages = 3;
  static constexpr int kWeightBytes = kSixteens * kTile;
  static constexpr int kShared = kActStages * kActBytes + 2 * kWeightBytes;
};

// ANCHOR: gemm_tiles_mma
template <class Format>
__global__ void __launch_bounds__(128)
    gemm_tiles_mma(const __grid_constant__ GemmParts parts, const __half* acts, int nt, int id, int steps) {
  using B = GemmMmaBlock<Format>;
  constexpr int PER = B::kPer;
  unsigned char* const act_ring = dynamic_shared<unsigned char>();  // [3][64][8 pieces of 16 bytes]
  unsigned char* const weight_ring = act_ring + B::kActStages * B::kActBytes;  // [2][8][kTile]
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int g = lane / 4, t = lane % 4;
  const int token0 = static_cast<int>(blockIdx.x) * B::kTokens, all16 = parts.first[kMostGemmTilesParts];
  const int sixteen0 = static_cast<int>(blockIdx.y) * B::kSixteens + 2 * warp;  // this warp's two

  // 1. Copies of stage s, in one group: 64 activations of 64 tokens, and with a tile's first the warp's own tiles.
  //    Tokens and activations beyond the last ones become zeros.
  const unsigned char* rows[2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int sixteen = min(sixteen0 + m, all16 - 1), p = gemm_part_of(parts, sixteen);
    rows[m] = static_cast<const unsigned char*>(parts.part[p].tiles) +
              static_cast<long long>(sixteen - parts.first[p]) * steps * B::kTile;
  }
  const int stages = steps * PER;
  const auto load = [&](int s) {
    if (s < stages) {
      if (s % PER == 0) {
        unsigned char* const to = weight_ring + s / PER % 2 * B::kWeightBytes + 2 * warp * B::kTile;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const unsigned char* const from = rows[m] + static_cast<long long>(s / PER) * B::kTile;
          for (int b = 16 * lane; b < B::kTile; b += 512) cp_async_cg(to + m * B::kTile + b, from + b);
        }
      }
      unsigned char* const to = act_ring + s % B::kActStages * B::kActBytes;
      const int piece = static_cast<int>(threadIdx.x % 8), k = s * 64 + 8 * piece;
#pragma unroll
      for (int i = 0; i < B::kTokens / 16; ++i) {
        const int row = static_cast<int>(threadIdx.x / 8) + 16 * i, token = token0 + row;  // 0..63
        const bool there = token < nt && k < id;
        cp_async_cg(to + row * 128 + (piece ^ row % 8) * 16,
                    acts + (there ? static_cast<long long>(token) * id + k : 0LL), there ? 16 : 0);
      }
    }
    cp_async_commit_group();  // empty at the end, so that groups count stages
  };
  allow_next_kernel();
  wait_for_previous_kernel();
  load(0);
  load(1);

  // 2. A tile of each sixteen in registers, then stage by stage: two sub-blocks of it by 64 tokens.
  float sums[2][B::kTokens / 8][4] = {};
  HalfRaw<Format> raw[2];
  HalfUnits units[2];
  for (int step = 0; step < steps; ++step) {
    const auto stage = [&]<int J>() {
      const int s = step * PER + J;
      cp_async_wait_group<1>();
      __syncthreads();  // stage s is there for all, and the one before is read: its place can be filled
      load(s + 2);
      if constexpr (J == 0) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          raw[m].template load<FromShared>(
              weight_ring + step % 2 * B::kWeightBytes + (2 * warp + m) * B::kTile, lane);
          units[m] = half_units<Format>(raw[m]);
        }
      }
      const unsigned char* const x = act_ring + s % B::kActStages * B::kActBytes;
      const auto sub_block = [&]<int H>() {
        std::uint32_t a[2][2][4];  // [sixteen][half of the sub-block]
        half_fragments<Format, 2 * J + H>(raw[0], units[0], a[0]);
        half_fragments<Format, 2 * J + H>(raw[1], units[1], a[1]);
#pragma unroll
        for (int h16 = 0; h16 < 2; ++h16) {
          // Matrices of an ldmatrix: eight tokens by the first and the last 8 of these 16 k, then the next eight tokens.
          const int row = lane / 16 * 8 + lane % 8, piece = H * 4 + h16 * 2 + lane / 8 % 2;
          const unsigned char* const from = x + row * 128 + (piece ^ row % 8) * 16;
#pragma unroll
          for (int n = 0; n < B::kTokens / 16; ++n) {
            std::uint32_t b[4];
            ldmatrix(b, from + n * 16 * 128);
            const std::uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              mma_m16n8k16_f16(sums[m][2 * n], a[m][h16], b0);
              mma_m16n8k16_f16(sums[m][2 * n + 1], a[m][h16], b1);
            }
          }
        }
      };
      sub_block.template operator()<0>();
      sub_block.template operator()<1>();
    };
    stage.template operator()<0>();
    stage.template operator()<1>();
    if constexpr (PER == 4) {
      stage.template operator()<2>();
      stage.template operator()<3>();
    }
  }

  // 3. Out: rows g and g + 8 of a sixteen, tokens 2t and 2t + 1 of eight.
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    if (sixteen0 + m >= all16) continue;
    const int p = gemm_part_of(parts, sixteen0 + m);
    const int r = (sixteen0 + m - parts.first[p]) * kRows + g;
#pragma unroll
    for (int n = 0; n < B::kTokens / 8; ++n) {
      finish_fragment(sums[m][n], parts.part[p], r, token0 + 8 * n + 2 * t, nt);
    }
  }
}
// ANCHOR_END: gemm_tiles_mma

}  // namespace tiles

/// out[nt][od] = epilogue(acts . weights^T) for one to three matrices of a type.
/// @param acts [nt][id] f16 in the order of tiles, at a multiple of 16 bytes
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
/// Does not synchronise.
inline Status launch_gemm_tiles_mma(WeightType type, std::span<const GemmTilesPart> matrices,
                                    const void* acts, long long nt, long long id, Stream& stream,
                                    bool programmatic = false) {
  tiles::GemmParts parts;
  if (Status ok = tiles::gather_parts(type, matrices, acts, nt, id, parts); !ok.ok()) return ok;
  return tiles::with_tile_format(type, [&](auto format) -> Status {
    using Format = decltype(format);
    using B = tiles::GemmMmaBlock<Format>;
    const long long row_blocks = (parts.first[kMostGemmTilesParts] + B::kSixteens - 1) / B::kSixteens;
    if (row_blocks > 65535) {
      return Status::error("gemm_tiles_mma: od must be at most " +
                           std::to_string(65535 * B::kSixteens * tiles::kRows));
    }
    LaunchOptions options;
    options.programmatic = programmatic;
    return launch(
        options, tiles::gemm_tiles_mma<Format>,
        dim3(static_cast<unsigned>((nt + B::kTokens - 1) / B::kTokens), static_cast<unsigned>(row_blocks)),
        dim3(32 * B::kWarps), B::kShared, stream, parts, static_cast<const __half*>(acts),
        static_cast<int>(nt), static_cast<int>(id),
        static_cast<int>(tiles::steps<typename Format::Block>(id)));
  });
}

}  // namespace ladder
