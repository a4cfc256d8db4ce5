// RUNG      gemm_tiles_wgmma: packed weights to f16 in registers, which are the A operand of wgmma.
// PREV      gemm_tiles_mma: mma.sync reaches 63 % of the tensor cores, and every warp loads activations for itself
// COMPUTES  out[nt][od] = epilogue(acts[nt][id] . weights[od][id]^T) for one to three matrices; or silu(gate) * up
// LAYOUT    weights in tiles (kernels/mmvq/tiles.cuh), acts f16 in their order (acts_f16.cuh), out row-major f32; shared
//           memory: two rings, acts [NA][BN][64] halves with the 128-byte swizzle, weights [NW][rows / 16] tiles
// MAP       grid(multiprocessors at most) block(384): two groups of four warps multiply, a warp has MR sixteens of rows
//           by BN tokens; of four more, one copies weights and one activations. A block takes every so-manyth output
//           tile, and its share of the steps of those that would not fill a round
// NEEDS     sm_90a; id % 32 == 0 (256 for types with blocks of 256), any od and nt: checked by the launcher
// TRAFFIC   weights od*id*bpe B for every BN tokens (from L2 after the first), acts 2*nt*id B for every 128 MR rows
// WORK      2*nt*od*id FLOP on tensor cores; 3 to 6 instructions a weight for every BN tokens
// LOOK FOR  SASS: HGMMA.64xBNx16.F32 whose A is a register, PRMT, HADD2 and HMUL2 between them, UBLKCP, UTMALDG.2D; no
//           LDL or STL
// EXPECT    within a tenth of cuBLAS on f16 weights at 512 tokens, and ahead of decoding them first; with few tokens the
//           decoding is the limit
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=compute_90a,code=sm_90a chapters/05-tiled-gemm/tiled_gemm.cu -o
//           tiled_gemm
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/mbarrier.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/device/tma.cuh"
#include "kernels/device/wgmma.cuh"
#include "kernels/gemm/epilogue.cuh"
#include "kernels/gemm/gemm_tiles_formats.cuh"
#include "kernels/gemm/gemm_tiles_parts.cuh"
#include "kernels/mmvq/mmvq_tiles.cuh"

namespace ladder {

namespace tiles {

inline constexpr int kGroups = 2;                         // of four warps that multiply
inline constexpr int kGemmThreads = 128 * kGroups + 128;  // and four of which one copies
inline constexpr int kGemmShared = 227 * 1024;

/// The parts of a block for one configuration.
template <class Format, int MR, int BN>
struct GemmTilesShape {
  static constexpr int kSixteens = 4 * kGroups * MR;  // of rows
  static constexpr int kTile = tile_bytes<typename Format::Block>();
  static constexpr int kSubs = Tile<typename Format::Block>::kSteps;  // sub-blocks of 32 along a tile
  static constexpr int kActStages = kSubs / 2;                        // stages of 64 activations along a tile
  static constexpr int kWeightBytes = kSixteens * kTile, kActBytes = BN * 128;
  static constexpr int kRoom = kGemmShared - 1024 - 1024;  // but for alignment and barriers
  static constexpr int kEven = kRoom / (kWeightBytes + kActStages * kActBytes);
  /// Stages of either ring: as many steps of both as fit, or two of weights and the rest.
  static constexpr int kWeightRing = kEven >= 2 ? (kEven < 12 ? kEven : 12) : 2;
  static constexpr int kActRing =
      kEven >= 12 ? 12 * kActStages : (kRoom - kWeightRing * kWeightBytes) / kActBytes;
  static constexpr int kShared = 1024 + 1024 + kWeightRing * kWeightBytes + kActRing * kActBytes;
  static_assert(MR == 1 || kActRing > kActStages, "a step's activations are read MR times");
  static_assert(2 * (kWeightRing + kActRing) * 8 <= 1024);
};

/// The matrices of a launch and how it is divided.
struct GemmTilesArgs {
  GemmParts parts;
  GemmTilesGate gate;
  int nt, steps;            // tokens; tiles along a row
  int token_blocks, whole;  // output tiles along the tokens; and how many of all are not cut along k
  int cut;                  // those that are
  float* partial;           // [grid][tile]
  unsigned* flags;          // [grid]
};

/// A block's way through its output tiles: first whole ones, then its share of the steps of those that are cut.
struct GemmTilesWork {
  int tile, begin, end;  // steps of the tile

  __device__ __forceinline__ bool first(const GemmTilesArgs& a) {
    next_whole_ = static_cast<int>(blockIdx.x);
    const long long all = static_cast<long long>(a.cut) * a.steps;
    at_ = all * blockIdx.x / gridDim.x;
    stop_ = all * (blockIdx.x + 1) / gridDim.x;
    return next(a);
  }
  __device__ __forceinline__ bool next(const GemmTilesArgs& a) {
    if (next_whole_ < a.whole) {
      tile = next_whole_, begin = 0, end = a.steps;
      next_whole_ += static_cast<int>(gridDim.x);
      return true;
    }
    if (at_ >= stop_) return false;
    const int t = static_cast<int>(at_ / a.steps);
    tile = a.whole + t;
    begin = static_cast<int>(at_ - static_cast<long long>(t) * a.steps);
    end = static_cast<int>(min(static_cast<long long>(a.steps), begin + stop_ - at_));
    at_ += end - begin;
    return true;
  }

 private:
  int next_whole_;
  long long at_, stop_;
};

/// A ring's place and the parity of its phase.
template <int N>
struct RingPlace {
  int at = 0;
  unsigned phase = 0;
  __device__ __forceinline__ void advance() {
    if (++at == N) at = 0, phase ^= 1;
  }
};

/// Rows r and r + 8 of a matrix, tokens token + 8 n and the next one each: sums become outputs.
/// @param v [4 n + 2 row + token]
template <int BN>
__device__ __forceinline__ void finish_rows(float (&v)[BN / 2], const GemmTilesPart& part, int r, int token,
                                            int nt) {
  const GemmEpilogue& e = part.epilogue;
  const int od = part.od, left = nt - token;
  const bool rows[2] = {r < od, r + 8 < od};
  if (e.row_scale != nullptr) {
#pragma unroll
    for (int i = 0; i < BN / 2; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float scale = 2 * i + j < left ? e.row_scale[token + 2 * i + j] : 0.0f;
        v[i + j] *= scale, v[i + 2 + j] *= scale;
      }
    }
  }
  if (e.bias != nullptr) {
    const float b0 = rows[0] ? e.bias[r] : 0.0f, b1 = rows[1] ? e.bias[r + 8] : 0.0f;
#pragma unroll
    for (int i = 0; i < BN / 2; i += 4) v[i] += b0, v[i + 1] += b0, v[i + 2] += b1, v[i + 3] += b1;
  }
  if (e.residual != nullptr) {
    const float* from = e.residual + static_cast<long long>(token) * od + r;
#pragma unroll
    for (int i = 0; i < BN / 2; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (2 * i + j < left && rows[0]) v[i + j] += from[j * od];
        if (2 * i + j < left && rows[1]) v[i + 2 + j] += from[j * od + 8];
      }
      from += 8LL * od;
    }
  }
  float* to = part.out + static_cast<long long>(token) * od + r;
#pragma unroll
  for (int i = 0; i < BN / 2; i += 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (2 * i + j < left && rows[0]) to[j * od] = v[i + j];
      if (2 * i + j < left && rows[1]) to[j * od + 8] = v[i + 2 + j];
    }
    to += 8LL * od;
  }
}

/// silu(gate) * up
[[maybe_unused]] __device__ __forceinline__ float gated(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// ANCHOR: gemm_tiles_wgmma
template <class Format, int MR, int BN, bool SWIGLU>
__global__ void __launch_bounds__(kGemmThreads, 1)
    gemm_tiles_wgmma(const __grid_constant__ GemmTilesArgs args, const __grid_constant__ TensorMap acts) {
#if LADDER_HAS_WGMMA
  using Shape = GemmTilesShape<Format, MR, BN>;
  constexpr int NW = Shape::kWeightRing, NA = Shape::kActRing, SUBS = Shape::kSubs, PER = Shape::kActStages;
  constexpr int TILE = Shape::kTile, SIXTEENS = Shape::kSixteens, ROWS16 = SWIGLU ? SIXTEENS / 2 : SIXTEENS;
  static_assert(!SWIGLU || MR == 2, "a thread has a gate and what it lets through");
  unsigned char* const shared = reinterpret_cast<unsigned char*>(
      (reinterpret_cast<std::uintptr_t>(dynamic_shared<unsigned char>()) + 1023) / 1024 * 1024);
  unsigned char* const act_ring = shared;                             // [NA][BN][64] halves, swizzled
  unsigned char* const weight_ring = shared + NA * Shape::kActBytes;  // [NW][SIXTEENS][TILE]
  auto* const weights_full = reinterpret_cast<std::uint64_t*>(weight_ring + NW * Shape::kWeightBytes);
  std::uint64_t* const weights_empty = weights_full + NW;
  std::uint64_t* const acts_full = weights_empty + NW;
  std::uint64_t* const acts_empty = acts_full + NA;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);

  allow_next_kernel();
  if (threadIdx.x == 0) {
    for (int i = 0; i < NW; ++i) {
      mbarrier_init(weights_full + i, 1);
      mbarrier_init(weights_empty + i, 4 * kGroups);
    }
    for (int i = 0; i < NA; ++i) {
      mbarrier_init(acts_full + i, 1);
      mbarrier_init(acts_empty + i, 4 * kGroups);
    }
    mbarrier_init_fence();
  }
  __syncthreads();  // barriers exist before anybody uses them

  if (warp >= 4 * kGroups) {
    registers_decrease<40>();
    GemmTilesWork w;
    if (warp == 4 * kGroups) {
      // 1a. Weights, a lane a sixteen of rows. They do not depend on the kernel before this one.
      RingPlace<NW> to;
      for (bool more = w.first(args); more; more = w.next(args)) {
        const int block = w.tile / args.token_blocks, slot = lane % SIXTEENS;
        const unsigned char* from;
        if constexpr (SWIGLU) {
          const int sixteen = min(block * ROWS16 + slot / 8 * 4 + slot % 4, args.parts.first[1] - 1);
          from = static_cast<const unsigned char*>(slot / 4 % 2 == 0 ? args.gate.gate : args.gate.up) +
                 static_cast<long long>(sixteen) * args.steps * TILE;
        } else {
          const int sixteen = min(block * ROWS16 + slot, args.parts.first[kMostGemmTilesParts] - 1);
          const int p = gemm_part_of(args.parts, sixteen);
          from = static_cast<const unsigned char*>(args.parts.part[p].tiles) +
                 static_cast<long long>(sixteen - args.parts.first[p]) * args.steps * TILE;
        }
        from += static_cast<long long>(w.begin) * TILE;
        for (int left = w.end - w.begin; left > 0; --left) {
          if (lane == 0) {
            mbarrier_wait(weights_empty + to.at, to.phase ^ 1);
            mbarrier_arrive_expect_bytes(weights_full + to.at, Shape::kWeightBytes);
          }
          __syncwarp();  // the stage is free
          if (lane < SIXTEENS) {
            bulk_copy(weight_ring + to.at * Shape::kWeightBytes + lane * TILE, from, TILE,
                      weights_full + to.at);
          }
          from += TILE;
          to.advance();
        }
      }
    } else if (warp == 4 * kGroups + 1 && lane == 0) {
      // 1b. Activations.
      prefetch_tensor_map(acts);
      wait_for_previous_kernel();
      RingPlace<NA> to;
      for (bool more = w.first(args); more; more = w.next(args)) {
        const int token = w.tile % args.token_blocks * BN;
        for (int k = w.begin * PER; k < w.end * PER; ++k) {
          mbarrier_wait(acts_empty + to.at, to.phase ^ 1);
          mbarrier_arrive_expect_bytes(acts_full + to.at, Shape::kActBytes);
          tensor_copy_2d(act_ring + to.at * Shape::kActBytes, acts, token, k * 64, acts_full + to.at);
          to.advance();
        }
      }
    }
    return;
  }

  registers_increase<232>();
  // 2. The multiplying warps. Four of them share an instruction's 64 rows, MR times: warp w has their wth sixteen.
  wait_for_previous_kernel();  // for what the results are added to
  const int group = warp / 4, g = lane / 4, t = lane % 4;
  float sums[MR][BN / 2];
  std::uint32_t a[2][2][4] = {};  // sub-block's parity, half of it
  RingPlace<NW> wp;
  RingPlace<NA> ap;
  int release = -1;  // stage of activations whose last product is under way
  const auto release_acts = [&] {
    if (release >= 0 && lane == 0) mbarrier_arrive(acts_empty + release);
    release = -1;
  };
  const std::uint64_t descriptor = wgmma_descriptor_128b(act_ring);
  GemmTilesWork work;
  for (bool more = work.first(args); more; more = work.next(args)) {
#pragma unroll
    for (int m = 0; m < MR; ++m) {
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) sums[m][i] = 0.0f;
    }
    for (int step = work.begin; step < work.end; ++step) {
      mbarrier_wait(weights_full + wp.at, wp.phase);
      const unsigned char* stage = weight_ring + wp.at * Shape::kWeightBytes;
      const auto rows64 = [&]<int M>() {
        HalfRaw<Format> raw;
        raw.template load<FromShared>(stage + (group * 4 * MR + M * 4 + warp % 4) * TILE, lane);
        if constexpr (M == MR - 1) {
          __syncwarp();  // all lanes have their shares
          if (lane == 0) mbarrier_arrive(weights_empty + wp.at);
        }
        const HalfUnits units = half_units<Format>(raw);
        RingPlace<NA> at = ap;
        const auto sub_block = [&]<int S>() {
          half_fragments<Format, S>(raw, units, a[S % 2]);
          if constexpr (S % 2 == 0 && M == 0) mbarrier_wait(acts_full + at.at, at.phase);
          const std::uint64_t b = descriptor + static_cast<unsigned>(at.at) * (Shape::kActBytes / 16);
          wgmma_fence();
          wgmma_f16<BN>(sums[M], a[S % 2][0], wgmma_next_k(b, S % 2 * 2));
          wgmma_f16<BN>(sums[M], a[S % 2][1], wgmma_next_k(b, S % 2 * 2 + 1));
          wgmma_commit_group();
          wgmma_wait_group<1>();  // the sub-block before this one is multiplied: its registers are free
          wgmma_hold(a[1 - S % 2][0]);
          wgmma_hold(a[1 - S % 2][1]);
          if constexpr (S % 2 == 0) {
            release_acts();
          } else {
            if constexpr (M == MR - 1) release = at.at;
            at.advance();
          }
        };
        sub_block.template operator()<0>();
        sub_block.template operator()<1>();
        sub_block.template operator()<2>();
        sub_block.template operator()<3>();
        if constexpr (SUBS == 8) {
          sub_block.template operator()<4>();
          sub_block.template operator()<5>();
          sub_block.template operator()<6>();
          sub_block.template operator()<7>();
        }
        if constexpr (M == MR - 1) ap = at;
      };
      rows64.template operator()<0>();
      if constexpr (MR == 2) rows64.template operator()<1>();
      wp.advance();
    }
    wgmma_wait_group<0>();
    release_acts();
#pragma unroll
    for (int m = 0; m < MR; ++m) wgmma_hold(sums[m]);

    // 3. A tile that is cut: whoever has its first step adds what the others have, in the order of the steps.
    constexpr int kPieces = MR * BN / 8;  // float4 a thread
    const auto piece = [&](unsigned block) {
      return reinterpret_cast<float4*>(args.partial) +
             (static_cast<long long>(block) * kPieces) * (128 * kGroups) + threadIdx.x;
    };
    if (work.begin > 0) {
      float4* to = piece(blockIdx.x);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const float* v = &sums[i / (BN / 8)][i % (BN / 8) * 4];
        __stcg(to + i * (128 * kGroups), make_float4(v[0], v[1], v[2], v[3]));
      }
      __threadfence();
      named_barrier(1, 128 * kGroups);  // all of the piece is written
      if (threadIdx.x == 0) atomicExch(args.flags + blockIdx.x, 1u);
      continue;
    }
    if (work.end < args.steps) {
      const long long all = static_cast<long long>(args.cut) * args.steps;
      const long long last =
          static_cast<long long>(work.tile - args.whole + 1) * args.steps;  // behind the tile
      for (unsigned other = blockIdx.x + 1; all * other / gridDim.x < last; ++other) {
        if (threadIdx.x == 0) {
          while (atomicCAS(args.flags + other, 1u, 0u) != 1u) {
          }
          __threadfence();
        }
        named_barrier(1, 128 * kGroups);  // the piece is there
        const float4* add = piece(other);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          float* v = &sums[i / (BN / 8)][i % (BN / 8) * 4];
          const float4 p = __ldcg(add + i * (128 * kGroups));
          v[0] += p.x, v[1] += p.y, v[2] += p.z, v[3] += p.w;
        }
      }
    }

    // 4. Out: rows g and g + 8 of a sixteen, tokens 2t and 2t + 1 of eight.
    const int token0 = work.tile % args.token_blocks * BN, block = work.tile / args.token_blocks;
    if constexpr (SWIGLU) {
      const int sixteen = block * ROWS16 + group * 4 + warp % 4, od = args.parts.part[0].od;
      if (sixteen >= args.parts.first[1]) continue;
      const int r = sixteen * kRows + g;
#pragma unroll
      for (int i = 0; i < BN / 2; i += 4) {
        const int token = token0 + i * 2 + 2 * t;  // and the next one
        float v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float gate = sums[0][i + j], up = sums[MR - 1][i + j];
          if (args.gate.row_scale != nullptr && token + j % 2 < args.nt) {
            gate *= args.gate.row_scale[token + j % 2], up *= args.gate.row_scale[token + j % 2];
          }
          v[j] = gated(gate, up);
          if (args.gate.out != nullptr && token + j % 2 < args.nt && r + j / 2 * 8 < od) {
            args.gate.out[static_cast<long long>(token + j % 2) * od + r + j / 2 * 8] = v[j];
          }
        }
        if (args.gate.halves != nullptr) {
          // Lanes of rows g and g ^ 1 exchange a token each, so that both have two neighbouring rows of one.
          const float s = args.gate.halves_scale;
          const bool odd = g % 2 != 0;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float mine = odd ? v[2 * h + 1] : v[2 * h], give = odd ? v[2 * h] : v[2 * h + 1];
            const float got = __shfl_xor_sync(0xffffffffu, give, 4);
            const __half2 pair =
                odd ? __floats2half2_rn(got * s, mine * s) : __floats2half2_rn(mine * s, got * s);
            const int to = token + (odd ? 1 : 0), k = g / 2 * 2 + 8 * h;  // rows k, k + 1 of the sixteen
            const int at = k / 4 * 2 + k / 2 % 2 * 8;
            if (to < args.nt) {
              *reinterpret_cast<__half2*>(args.gate.halves + static_cast<long long>(to) * od +
                                          sixteen * kRows + at) = pair;
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int m = 0; m < MR; ++m) {
        const int sixteen = block * ROWS16 + group * 4 * MR + m * 4 + warp % 4;
        if (sixteen >= args.parts.first[kMostGemmTilesParts]) continue;
        const int p = gemm_part_of(args.parts, sixteen);
        finish_rows<BN>(sums[m], args.parts.part[p], (sixteen - args.parts.first[p]) * kRows + g,
                        token0 + 2 * t, args.nt);
      }
    }
  }
#else
  (void)args, (void)acts;
  needs_sm90("wgmma");
#endif
}
// ANCHOR_END: gemm_tiles_wgmma

}  // namespace tiles

/// How a launch is divided.
struct GemmTilesPlan {
  int rows = 0, tokens = 0;  ///< of a block's output tile; with a gate, rows of both matrices together
  int blocks = 0;            ///< of the grid
  int whole = 0, cut = 0;    ///< output tiles that one block multiplies alone, and those divided along k

  bool operator==(const GemmTilesPlan&) const = default;
  /// Bytes of sums that blocks leave for others.
  constexpr std::size_t partial_bytes() const {
    return cut == 0
               ? 0
               : sizeof(float) * static_cast<std::size_t>(blocks) * static_cast<std::size_t>(rows * tokens);
  }
};

/// Where blocks leave sums of tiles that are cut. The flags are zero before the first launch, and every launch leaves
/// them so; launches that use the same memory must be ordered.
struct GemmTilesWorkspace {
  float* partial =
      nullptr;  ///< GemmTilesPlan::partial_bytes() bytes, at a multiple of 16; may be null for none
  unsigned* flags = nullptr;  ///< [GemmTilesPlan::blocks]; may be null where partial may
};

namespace tiles {

/// Blocks that gemm_tiles_wgmma is compiled for: rows by tokens. MR * 128 rows, BN tokens.
struct GemmTilesBlock {
  int rows, tokens;
};
inline constexpr GemmTilesBlock kGemmTilesBlocks[] = {{256, 16},  {256, 32},  {256, 64},
                                                      {128, 128}, {256, 128}, {128, 256}};

/// Calls f.operator()<MR, BN>() for the block.
template <class F>
Status with_gemm_block(int rows, int tokens, F&& f) {
  if (rows == 256 && tokens == 16) return f.template operator()<2, 16>();
  if (rows == 256 && tokens == 32) return f.template operator()<2, 32>();
  if (rows == 256 && tokens == 64) return f.template operator()<2, 64>();
  if (rows == 256 && tokens == 128) return f.template operator()<2, 128>();
  if (rows == 128 && tokens == 128) return f.template operator()<1, 128>();
  if (rows == 128 && tokens == 256) return f.template operator()<1, 256>();
  return Status::error("gemm_tiles_wgmma: no blocks of " + std::to_string(rows) + " rows and " +
                       std::to_string(tokens) + " tokens");
}

/// Divides output tiles of rows x tokens among `most` blocks: tiles alone, or all of them the same work to a step.
constexpr GemmTilesPlan divide(int rows, int tokens, long long rows16, long long nt, long long row_steps,
                               int most, bool cut) {
  const long long all = (rows16 * kRows + rows - 1) / rows * ((nt + tokens - 1) / tokens);
  GemmTilesPlan p{rows, tokens, 0, 0, 0};
  if (!cut || all % most == 0) {
    p.blocks = static_cast<int>(all < most ? all : most);
    p.whole = static_cast<int>(all);
    return p;
  }
  p.blocks = static_cast<int>(all * row_steps < most ? all * row_steps : most);
  // All but the last round and a piece of one are multiplied whole: every block's share of the rest is one to two tiles.
  p.whole = static_cast<int>(all < most ? 0 : (all / most - 1) * most);
  p.cut = static_cast<int>(all - p.whole);
  return p;
}

template <class Format, bool SWIGLU>
Status launch_gemm_tiles(GemmTilesArgs& args, const void* acts, int id, const GemmTilesPlan& plan,
                         const GemmTilesWorkspace& workspace, Stream& stream, bool programmatic) {
  args.token_blocks = (args.nt + plan.tokens - 1) / plan.tokens;
  args.whole = plan.whole;
  args.cut = plan.cut;
  args.partial = workspace.partial;
  args.flags = workspace.flags;
  if (plan.cut > 0 && (args.partial == nullptr || args.flags == nullptr ||
                       reinterpret_cast<std::uintptr_t>(args.partial) % 16 != 0)) {
    return Status::error(
        "gemm_tiles_wgmma: tiles that are cut need a workspace, at a multiple of 16 bytes, and flags");
  }
  return with_gemm_block(plan.rows, plan.tokens, [&]<int MR, int BN>() -> Status {
    if constexpr (SWIGLU && MR != 2) {
      return Status::error("gemm_tiles_wgmma: a gate needs blocks of 256 rows, not " +
                           std::to_string(plan.rows));
    } else {
#if defined(__CUDACC__)
      TensorMap map;
      TensorMapOptions options;
      options.swizzle = TensorSwizzle::bytes_128;
      if (Status ok = make_tensor_map(map, acts, static_cast<std::uint64_t>(args.nt),
                                      static_cast<std::uint64_t>(id), BN, 64, options);
          !ok.ok()) {
        return ok;
      }
      LaunchOptions how;
      how.programmatic = programmatic;
      return launch(how, gemm_tiles_wgmma<Format, MR, BN, SWIGLU>, dim3(static_cast<unsigned>(plan.blocks)),
                    dim3(kGemmThreads), GemmTilesShape<Format, MR, BN>::kShared, stream, args, map);
#else
      (void)acts, (void)id, (void)stream, (void)programmatic;
      return Status::error("gemm_tiles_wgmma: there is no emulated wgmma; it needs a GPU of compute capability 9.0");
#endif
    }
  });
}

}  // namespace tiles

/// Shapes and devices of gemm_tiles_wgmma.
inline Status gemm_tiles_wgmma_supported(WeightType type, Shape s, const DeviceInfo& device) {
  if (Status ok = gemm_tiles_supported(type, s); !ok.ok()) return ok;
  if (device.executor == Executor::gpu && device.cc_major == 9 && device.cc_minor == 0) return {};
  return Status::error(
      "gemm_tiles_wgmma: there is no emulated wgmma; it needs a GPU of compute capability 9.0");
}

namespace tiles {

/// What a division is expected to take, in cycles of a multiprocessor. The numbers are fitted to measurements on an H200;
/// what matters is the order of divisions, not the time.
struct GemmTilesCost {
  double weight_bytes;    // of a weight
  double decode;          // cycles for 64 rows by 32 weights, on each quarter of a multiprocessor
  long long rows, nt, k;  // rows of all matrices

  constexpr double of(const GemmTilesPlan& p, int sms) const {
    constexpr double kL2 = 26, kMemory = 2500, kSlowest = 24,
                     kLaunch = 4000;  // B/cycle, of a multiprocessor and of all
    const double steps = static_cast<double>(k) / 32, groups = static_cast<double>(p.rows) / 64;
    const double multiply = groups * steps * (p.tokens < kSlowest ? kSlowest : p.tokens) * 1.1;
    const double decoding = groups * steps * decode;
    const double bytes = static_cast<double>(k) * (p.rows * weight_bytes + 2.0 * p.tokens);
    double tile = multiply + 0.25 * decoding;
    if (tile < decoding * 1.25) tile = decoding * 1.25;
    if (tile < bytes / kL2) tile = bytes / kL2;
    const double end = 600 + p.rows * p.tokens / 16.0;  // a tile's results on their way out
    const double whole_rounds = p.blocks > 0 ? static_cast<double>((p.whole + p.blocks - 1) / p.blocks) : 0;
    double time = whole_rounds * (tile + end);
    if (p.cut > 0) time += p.cut * tile / p.blocks + 2 * end + 1500 + p.rows * p.tokens / 4.0;
    const double memory = (static_cast<double>(rows) * static_cast<double>(k) * weight_bytes) / kMemory;
    (void)sms;
    return kLaunch + (time > memory ? time : memory);
  }
};

constexpr GemmTilesPlan best_plan(WeightType type, long long rows16, long long nt, long long id, bool gate,
                                  int sms) {
  const WeightTypeInfo& t = info(type);
  const long long span = t.block_elems == 256 ? 256 : 128, row_steps = (id + span - 1) / span;
  const GemmTilesCost cost{t.bytes_per_element(), t.block_elems == 256 ? 50.0 : 40.0, rows16 * kRows, nt,
                           row_steps * span};
  GemmTilesPlan best;
  double least = 0;
  for (const GemmTilesBlock& b : kGemmTilesBlocks) {
    if (gate && b.rows != 256) continue;
    for (const bool cut : {false, true}) {
      const GemmTilesPlan p = divide(b.rows, b.tokens, rows16, nt, row_steps, sms, cut);
      const double c = cost.of(p, sms);
      if (best.blocks == 0 || c < least) best = p, least = c;
    }
  }
  return best;
}

}  // namespace tiles

/// How a product is divided on `sms` multiprocessors: the block and the division that should take the shortest.
/// @param s od is that of all matrices of the launch together, each up to a multiple of 16
constexpr GemmTilesPlan gemm_tiles_plan(WeightType type, Shape s, int sms) {
  return tiles::best_plan(type, tiles::row_tiles(s.od), s.nt, s.id, false, sms);
}
/// The same for a gate and what it lets through, [od][id] each.
constexpr GemmTilesPlan gemm_tiles_gate_plan(WeightType type, Shape s, int sms) {
  return tiles::best_plan(type, 2 * tiles::row_tiles(s.od), s.nt, s.id, true, sms);
}
/// Rows of several matrices as gemm_tiles_plan wants them.
constexpr long long gemm_tiles_rows(std::span<const GemmTilesPart> matrices) {
  long long rows16 = 0;
  for (const GemmTilesPart& m : matrices) rows16 += tiles::row_tiles(m.od);
  return rows16 * tiles::kRows;
}
/// Bytes of sums that any division on `sms` multiprocessors may leave, whatever the shape.
constexpr std::size_t gemm_tiles_most_partial_bytes(int sms) {
  std::size_t most = 0;
  for (const tiles::GemmTilesBlock& b : tiles::kGemmTilesBlocks) {
    const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(b.rows * b.tokens);
    if (bytes > most) most = bytes;
  }
  return most * static_cast<std::size_t>(sms);
}

/// out[nt][od] = epilogue(acts . weights^T) for one to three matrices of a type, divided as `plan` says.
/// @param acts [nt][id] f16 in the order of tiles, at a multiple of 16 bytes
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
/// Does not synchronise.
inline Status launch_gemm_tiles_wgmma(WeightType type, std::span<const GemmTilesPart> matrices,
                                      const void* acts, long long nt, long long id, const GemmTilesPlan& plan,
                                      const GemmTilesWorkspace& workspace, Stream& stream,
                                      bool programmatic = false) {
  tiles::GemmTilesArgs args{};
  if (Status ok = tiles::gather_parts(type, matrices, acts, nt, id, args.parts); !ok.ok()) return ok;
  args.nt = static_cast<int>(nt);
  return tiles::with_tile_format(type, [&](auto format) -> Status {
    using Format = decltype(format);
    args.steps = static_cast<int>(tiles::steps<typename Format::Block>(id));
    return tiles::launch_gemm_tiles<Format, false>(args, acts, static_cast<int>(id), plan, workspace, stream,
                                                   programmatic);
  });
}

/// silu(acts . gate^T) * (acts . up^T), [nt][od], as f32, as f16 activations of the next product, or both.
/// @param plan gemm_tiles_gate_plan's
inline Status launch_gemm_tiles_wgmma_swiglu(WeightType type, const GemmTilesGate& gate, const void* acts,
                                             Shape s, const GemmTilesPlan& plan,
                                             const GemmTilesWorkspace& workspace, Stream& stream,
                                             bool programmatic = false) {
  if (Status ok = gemm_tiles_supported(type, s); !ok.ok()) return ok;
  if ((reinterpret_cast<std::uintptr_t>(gate.gate) | reinterpret_cast<std::uintptr_t>(gate.up) |
       reinterpret_cast<std::uintptr_t>(gate.halves) | reinterpret_cast<std::uintptr_t>(acts)) %
          16 !=
      0) {
    return Status::error("weights, activations and f16 output must begin at a multiple of 16 bytes");
  }
  if (gate.halves != nullptr && s.od % tiles::kRows != 0) {
    return Status::error(
        "gemm_tiles_wgmma: od must be a multiple of 16 for f16 output in the order of tiles, not " +
        std::to_string(s.od));
  }
  tiles::GemmTilesArgs args{};
  const int rows16 = static_cast<int>(tiles::row_tiles(s.od));
  args.parts.part[0].od = static_cast<int>(s.od);
  for (int p = 1; p <= kMostGemmTilesParts; ++p) args.parts.first[p] = rows16;
  args.gate = gate;
  args.nt = static_cast<int>(s.nt);
  return tiles::with_tile_format(type, [&](auto format) -> Status {
    using Format = decltype(format);
    args.steps = static_cast<int>(tiles::steps<typename Format::Block>(s.id));
    return tiles::launch_gemm_tiles<Format, true>(args, acts, static_cast<int>(s.id), plan, workspace, stream,
                                                  programmatic);
  });
}

}  // namespace ladder
