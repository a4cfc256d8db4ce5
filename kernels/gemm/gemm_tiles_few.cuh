// RUNG      gemm_tiles_few: packed weights to f16 in registers, for prompts of few tokens.
// PREV      gemm_tiles_wgmma: groups of four warps wait for each other at every instruction, which nothing hides
// COMPUTES  out[nt][od] = epilogue(acts[nt][id] . weights[od][id]^T) for one to three matrices; or silu(gate) * up
// LAYOUT    weights in tiles (kernels/mmvq/tiles.cuh), acts f16 in their order (acts_f16.cuh), out row-major f32; shared
//           memory: rings of acts [KW][BN][128] halves, swizzled, and of weights, each warp its own [SIXTEENS] tiles
// MAP       grid(ceil(nt/BN), ceil(sixteens/(RW*SIXTEENS))) block(32*RW*KW): warp -> SIXTEENS sixteens of rows by BN tokens
//           by a share of k
// NEEDS     sm_90; id % 32 == 0 (256 for types with blocks of 256), any od and nt: checked by the launcher
// TRAFFIC   weights od*id*bpe B for every BN tokens, acts 2*nt*id B a block (from L2), out 4*nt*od B
// WORK      2*nt*od*id FLOP on tensor cores; about 60 instructions for 16 rows by 32 weights
// LOOK FOR  SASS: HMMA.16816.F32, LDSM.16.M88.4, PRMT and HFMA2; UBLKCP and LDGSTS.E.BYPASS.128; no LDL or STL
// EXPECT    to 32 tokens and a few thousand rows half of gemm_tiles_wgmma's time; with as many rows as 7b.ffn_gate a tenth
//           less, to 16 tokens; more tokens, no gain: 60 instructions for 288 bytes of weights are slower than memory
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/05-tiled-gemm/tiled_gemm.cu -o tiled_gemm
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <type_traits>
#include <utility>

#include "harness/device/device.hpp"
#include "kernels/device/cp_async.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/ldmatrix.cuh"
#include "kernels/device/mbarrier.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/device/named_barrier.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/device/tma.cuh"
#include "kernels/gemm/gemm_tiles_formats.cuh"
#include "kernels/gemm/gemm_tiles_parts.cuh"
#include "kernels/mmvq/mmvq_tiles_formats.cuh"

namespace ladder {

namespace tiles {

/// What gemm_tiles_few is compiled for.
/// @tparam BN tokens of a block @tparam SIXTEENS of rows that a warp multiplies with the activations it loads
/// @tparam ROW_WARPS warps side by side along the rows @tparam K_WARPS and along k: each has its share of the steps
template <int BN_, int SIXTEENS_, int ROW_WARPS_, int K_WARPS_>
struct GemmFewConfig {
  static constexpr int BN = BN_, SIXTEENS = SIXTEENS_, ROW_WARPS = ROW_WARPS_, K_WARPS = K_WARPS_;
  static constexpr int kWarps = ROW_WARPS * K_WARPS, kThreads = 32 * kWarps;
  static constexpr int kRows16 =
      SIXTEENS * ROW_WARPS;  ///< sixteens of a block; of both matrices, with a gate
  static_assert(BN % 16 == 0 && BN <= 64 && kWarps <= 20 && K_WARPS < 16);  // of 16 barriers
};

/// How a block's shared memory is divided into rings.
struct FewRings {
  int stage;  ///< k of a stage of activations: long where there is room, so that warps wait for each other less often
  int act_stages;  ///< of them
  int tiles;  ///< of a sixteen: the one that is multiplied and those under way; two at least, or it does not fit
};
/// @param sixteens of all warps @param tile bytes
constexpr FewRings few_rings(int sixteens, int k_warps, int tokens, int tile) {
  constexpr int kRoom = 226 * 1024;
  const int weights = sixteens * tile, long_stage = k_warps * tokens * 256;
  const int stage = tokens <= 32 && kRoom - 4 * long_stage >= 2 * weights ? 128 : 64;
  const int acts = k_warps * tokens * stage * 2;
  const int act_stages = kRoom - 6 * acts >= 3 * weights ? 6 : kRoom - 4 * acts >= 2 * weights ? 4 : 3;
  const int fit = (kRoom - act_stages * acts) / weights;
  return {stage, act_stages, fit < 8 ? fit : 8};
}

/// A block's shared memory for one format: rings of activations and of weights, for each warp along k and for each warp.
template <class Format, class Config>
struct GemmFewShape {
  static constexpr int kTile = tile_bytes<typename Format::Block>();
  static constexpr int kSpan = 32 * Tile<typename Format::Block>::kSteps;         // k of a tile
  static constexpr int kWeightBytes = Config::kWarps * Config::SIXTEENS * kTile;  // of all warps' tiles
  static constexpr FewRings kRings =
      few_rings(Config::kWarps * Config::SIXTEENS, Config::K_WARPS, Config::BN, kTile);
  static constexpr int kStage = kRings.stage, kActStages = kRings.act_stages, kTiles = kRings.tiles;
  static constexpr int kPer = kSpan / kStage;                                  // stages along a tile
  static constexpr int kActBytes = Config::K_WARPS * Config::BN * kStage * 2;  // of a stage
  static constexpr int kRingBytes = kActStages * kActBytes + kTiles * kWeightBytes;
  static constexpr int kSumBytes =
      Config::K_WARPS == 1 ? 0 : Config::kWarps * Config::SIXTEENS * Config::BN * kRows * 4;
  static constexpr int kBarriersAt = kRingBytes > kSumBytes ? kRingBytes : kSumBytes;
  static constexpr int kShared = kBarriersAt + Config::kWarps * 2 * kTiles * 8;
  static_assert(kTiles >= 2 && kShared <= 227 * 1024);
};

/// Waits for the warps that share a warp's k.
template <int ROW_WARPS>
__device__ __forceinline__ void row_warps_barrier(int k_warp) {
  named_barrier(1 + k_warp, 32 * ROW_WARPS);
}

// ANCHOR: gemm_tiles_few
template <class Format, class Config, bool SWIGLU>
__global__ void __launch_bounds__(Config::kThreads)
    gemm_tiles_few(const __grid_constant__ GemmParts parts, const __grid_constant__ GemmTilesGate gate,
                   const __half* acts, int nt, int id, int steps) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  (void)parts, (void)gate, (void)acts, (void)nt, (void)id, (void)steps;
  needs_sm90("cp.async.bulk");
#else
  using B = GemmFewShape<Format, Config>;
  constexpr int PER = B::kPer, BN = Config::BN, M = Config::SIXTEENS, RW = Config::ROW_WARPS,
                KW = Config::K_WARPS, A = B::kActStages, W = B::kTiles, TILE = B::kTile, STAGE = B::kStage,
                PIECES = STAGE / 8;  // pieces of 16 bytes of a token in a stage
  static_assert(!SWIGLU || M == 2);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int g = lane / 4, t = lane % 4, row_warp = warp % RW, k_warp = warp / RW;
  unsigned char* const act_ring =
      dynamic_shared<unsigned char>() + k_warp * (BN * STAGE * 2);  // [A] stages of [BN][PIECES], swizzled
  unsigned char* const weight_ring =
      dynamic_shared<unsigned char>() + A * B::kActBytes + warp * (W * M * TILE);  // [W][M][TILE]
  std::uint64_t* const full =
      reinterpret_cast<std::uint64_t*>(dynamic_shared<unsigned char>() + B::kBarriersAt) +
      warp * (2 * W);                     // [W]
  std::uint64_t* const empty = full + W;  // [W]
  const int token0 = static_cast<int>(blockIdx.x) * BN, all16 = parts.first[kMostGemmTilesParts];
  // The warp's sixteens: M neighbours, or the same one of both matrices.
  const int sixteen0 = SWIGLU ? static_cast<int>(blockIdx.y) * RW + row_warp
                              : (static_cast<int>(blockIdx.y) * RW + row_warp) * M;
  const int begin = static_cast<int>(static_cast<long long>(steps) * k_warp / KW),
            end = static_cast<int>(static_cast<long long>(steps) * (k_warp + 1) / KW);
  const int most_stages = (steps + KW - 1) / KW * PER;  // of any warp: barriers are everybody's

  // 1. Weights: a warp copies its own tiles, W of each sixteen under way. They do not depend on the kernel before this one.
  if (lane == 0) {
    for (int i = 0; i < W; ++i) {
      mbarrier_init(full + i, 1);
      mbarrier_init(empty + i, 32);
    }
    mbarrier_init_fence();
  }
  __syncwarp();  // barriers exist before anybody of the warp waits at them
  allow_next_kernel();
  const unsigned char* rows[M];
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const unsigned char* from;
    int sixteen;
    if constexpr (SWIGLU) {
      sixteen = min(sixteen0, parts.first[1] - 1);
      from = static_cast<const unsigned char*>(m == 0 ? gate.gate : gate.up);
    } else {
      sixteen = min(sixteen0 + m, all16 - 1);
      const int p = gemm_part_of(parts, sixteen);
      from = static_cast<const unsigned char*>(parts.part[p].tiles);
      sixteen -= parts.first[p];
    }
    rows[m] = from + (static_cast<long long>(sixteen) * steps + begin) * TILE;
  }
  const auto load_weights = [&](int tile) {
    if (lane != 0 || tile >= end - begin) return;
    if (tile >= W) mbarrier_wait(empty + tile % W, static_cast<unsigned>(tile / W + 1) % 2);
    mbarrier_arrive_expect_bytes(full + tile % W, M * TILE);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      bulk_copy(weight_ring + (tile % W * M + m) * TILE, rows[m] + static_cast<long long>(tile) * TILE, TILE,
                full + tile % W);
    }
  };
  for (int tile = 0; tile < W; ++tile) load_weights(tile);

  // 2. Activations: warps that share their k share them. Tokens and activations beyond the last ones become zeros.
  constexpr int AT_ONCE = 32 * RW / PIECES;  // tokens that these warps copy at once
  const int piece = lane % PIECES, first_row = row_warp * (32 / PIECES) + lane / PIECES;
  const auto load_acts = [&](int s) {
    if (s < (end - begin) * PER) {
      const int k = (begin * PER + s) * STAGE + 8 * piece;
      unsigned char* const to = act_ring + s % A * B::kActBytes;
#pragma unroll
      for (int r0 = 0; r0 < BN; r0 += AT_ONCE) {
        const int r = r0 + first_row;
        if (BN % AT_ONCE != 0 && r >= BN) break;
        const bool there = token0 + r < nt && k < id;
        cp_async_cg(to + r * (STAGE * 2) + (piece ^ r % 8) * 16,
                    there ? acts + static_cast<long long>(token0 + r) * id + k : acts, there ? 16 : 0);
      }
    }
    cp_async_commit_group();  // empty at the end, so that groups count stages
  };
  wait_for_previous_kernel();
#pragma unroll
  for (int s = 0; s < A - 1; ++s) load_acts(s);

  // 3. Stage by stage: sub-blocks of M sixteens by BN tokens.
  float sums[M][BN / 8][4] = {};
  for (int step = 0; step * PER < most_stages; ++step) {
    const bool mine = KW == 1 || step < end - begin;
    const unsigned char* const w = weight_ring + step % W * M * TILE;
    const auto stage = [&]<int J>() {
      const int s = step * PER + J;
      cp_async_wait_group<A - 2>();
      row_warps_barrier<RW>(
          k_warp);  // stage s is there for all, and the one before is read: its place can be filled
      load_acts(s + A - 1);
      if (!mine) return;
      if constexpr (J == 0) mbarrier_wait(full + step % W, static_cast<unsigned>(step / W % 2));
      const unsigned char* const x = act_ring + s % A * B::kActBytes;
      HalfRaw<Format> raw[M];
      HalfUnits units[M];
#pragma unroll
      for (int m = 0; m < M; ++m) {
        raw[m].template load<FromShared>(w + m * TILE, lane);  // what this stage's sub-blocks need of it
        units[m] = half_units<Format>(raw[m]);
      }
      if constexpr (J == PER - 1) {
        std::uint32_t words = 0;
#pragma unroll
        for (int m = 0; m < M; ++m) words ^= word_of(raw[m]);
        mbarrier_arrive_after(empty + step % W, words);  // nothing of these tiles is left to be read
        load_weights(step + W);
      }
      const auto sub_block = [&]<int H>() {
        std::uint32_t a[M][2][4];  // [sixteen][half of the sub-block]
#pragma unroll
        for (int m = 0; m < M; ++m) half_fragments<Format, STAGE / 32 * J + H>(raw[m], units[m], a[m]);
#pragma unroll
        for (int h16 = 0; h16 < 2; ++h16) {
          // Matrices of an ldmatrix: eight tokens by the first and the last 8 of these 16 k, then the next eight tokens.
          const int row = lane / 16 * 8 + lane % 8, place = H * 4 + h16 * 2 + lane / 8 % 2;
          const unsigned char* const from = x + row * (STAGE * 2) + (place ^ row % 8) * 16;
#pragma unroll
          for (int n = 0; n < BN / 16; ++n) {
            std::uint32_t b[4];
            ldmatrix(b, from + n * 16 * (STAGE * 2));
            const std::uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
#pragma unroll
            for (int m = 0; m < M; ++m) {
              mma_m16n8k16_f16(sums[m][2 * n], a[m][h16], b0);
              mma_m16n8k16_f16(sums[m][2 * n + 1], a[m][h16], b1);
            }
          }
        }
      };
      sub_block.template operator()<0>();
      sub_block.template operator()<1>();
      if constexpr (STAGE == 128) {
        sub_block.template operator()<2>();
        sub_block.template operator()<3>();
      }
    };
    stage.template operator()<0>();
    if constexpr (PER >= 2) stage.template operator()<1>();
    if constexpr (PER == 4) {
      stage.template operator()<2>();
      stage.template operator()<3>();
    }
  }

  // 4. Shares of k are added in their order, whoever adds: of each eight tokens the warps along k take turns.
  if constexpr (KW > 1) {
    float4* const all = dynamic_shared<float4>() + lane;  // [KW][RW][M][BN / 8][32]
    cp_async_wait_group<0>();
    __syncthreads();  // nobody reads the rings any more
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < BN / 8; ++n) {
        const float* v = sums[m][n];
        all[((warp * M + m) * (BN / 8) + n) * 32] = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
    __syncthreads();  // all sums are there
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < BN / 8; ++n) {
        if ((SWIGLU ? n : m * (BN / 8) + n) % KW != k_warp) continue;
        float(&v)[4] = sums[m][n];
#pragma unroll
        for (int k = 0; k < KW; ++k) {
          const float4 add = all[(((k * RW + row_warp) * M + m) * (BN / 8) + n) * 32];
          if (k == 0) {
            v[0] = add.x, v[1] = add.y, v[2] = add.z, v[3] = add.w;
          } else {
            v[0] += add.x, v[1] += add.y, v[2] += add.z, v[3] += add.w;
          }
        }
      }
    }
  }

  // 5. Out: rows g and g + 8 of a sixteen, tokens 2t and 2t + 1 of eight.
  if constexpr (SWIGLU) {
    if (sixteen0 >= parts.first[1]) return;
#pragma unroll
    for (int n = 0; n < BN / 8; ++n) {
      if (n % KW != k_warp) continue;
      finish_gate(sums[0][n], sums[1][n], gate, parts.part[0].od, sixteen0, token0 + 8 * n + 2 * t, nt);
    }
  } else {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      if (sixteen0 + m >= all16) continue;
      const int p = gemm_part_of(parts, sixteen0 + m);
      const int r = (sixteen0 + m - parts.first[p]) * kRows + g;
#pragma unroll
      for (int n = 0; n < BN / 8; ++n) {
        if ((m * (BN / 8) + n) % KW != k_warp) continue;
        finish_fragment(sums[m][n], parts.part[p], r, token0 + 8 * n + 2 * t, nt);
      }
    }
  }
#endif
}
// ANCHOR_END: gemm_tiles_few

/// A launch with one configuration.
template <class Format, class Config, bool SWIGLU>
Status launch_gemm_few_config(const GemmParts& parts, const GemmTilesGate& gate, const void* acts,
                              long long nt, long long id, Stream& stream, bool programmatic) {
  const int rows16 = parts.first[kMostGemmTilesParts] * (SWIGLU ? 2 : 1);
  const long long row_blocks = (rows16 + Config::kRows16 - 1) / Config::kRows16;
  if (row_blocks > 65535) {
    return Status::error("gemm_tiles_few: od must be at most " +
                         std::to_string(65535 * Config::kRows16 * kRows));
  }
  LaunchOptions options;
  options.programmatic = programmatic;
  return launch(
      options, gemm_tiles_few<Format, Config, SWIGLU>,
      dim3(static_cast<unsigned>((nt + Config::BN - 1) / Config::BN), static_cast<unsigned>(row_blocks)),
      dim3(Config::kThreads), GemmFewShape<Format, Config>::kShared, stream, parts, gate,
      static_cast<const __half*>(acts), static_cast<int>(nt), static_cast<int>(id),
      static_cast<int>(steps<typename Format::Block>(id)));
}

/// A block that gemm_tiles_few is compiled for.
struct GemmFewBlock {
  int sixteens, row_warps, k_warps, tokens;
  bool plain, gate;  ///< for products as they are; for silu(gate) * up
  double step_us;    ///< what a warp's 128 of k take with four-bit weights, measured on an H200
  constexpr int rows() const { return kRows * sixteens * row_warps; }
  /// Whether there are kernels of this block for a type, with a gate or without.
  constexpr bool exists(WeightType type, bool with_gate) const {
    const int elements = info(type).block_elems, span = elements == 256 ? 256 : 128;
    const int tile = kRows * span / elements * info(type).block_bytes;
    return (with_gate ? gate : plain) &&
           few_rings(sixteens * row_warps * k_warps, k_warps, tokens, tile).tiles >= 2;
  }
};
/// Those of nine sixteens are for 18944 rows, 7b.ffn_gate's: a block for each of 132 multiprocessors.
inline constexpr GemmFewBlock kGemmFewBlocks[] = {
    {1, 1, 14, 16, true, false, 1.25}, {1, 2, 7, 16, true, false, 1.2},  {2, 3, 4, 16, true, true, 1.3},
    {3, 3, 4, 16, true, false, 2.4},   {2, 9, 2, 16, false, true, 2.25}, {1, 1, 10, 32, true, false, 1.25},
    {1, 2, 7, 32, true, false, 1.55}};

/// Whether a plan's blocks are those of gemm_tiles_few.
constexpr bool is_few(int rows, int tokens) {
  for (const GemmFewBlock& b : kGemmFewBlocks) {
    if (b.rows() == rows && b.tokens == tokens) return true;
  }
  return false;
}

/// Calls f.operator()<Config>() for the block of so many rows and tokens, if there is one.
template <WeightType TYPE, bool GATE, class F>
Status with_few_block(int rows, int tokens, F&& f) {
  Status status =
      Status::error("gemm_tiles_few: no blocks of " + std::to_string(rows) + " rows and " +
                    std::to_string(tokens) + " tokens for " + info(TYPE).name + (GATE ? " with a gate" : ""));
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    const auto try_block = [&]<std::size_t K>(std::integral_constant<std::size_t, K>) {
      constexpr GemmFewBlock b = kGemmFewBlocks[K];
      if constexpr (b.exists(TYPE, GATE)) {
        if (b.rows() != rows || b.tokens != tokens) return;
        (void)(status = f.template operator()<GemmFewConfig<b.tokens, b.sixteens, b.row_warps, b.k_warps>>());
      }
    };
    (try_block(std::integral_constant<std::size_t, I>{}), ...);
  }
  (std::make_index_sequence<std::size(kGemmFewBlocks)>{});
  return status;
}

}  // namespace tiles
}  // namespace ladder
