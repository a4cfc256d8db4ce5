// RUNG      gemm_tiles_wgmma: packed weights to f16 in registers, which are the A operand of wgmma.
// PREV      gemm_tiles_mma: mma.sync reaches 63 % of the tensor cores, and every warp loads activations for itself
// COMPUTES  out[nt][od] = epilogue(acts[nt][id] . weights[od][id]^T) for one to three matrices; or silu(gate) * up
// LAYOUT    weights in tiles (kernels/mmvq/tiles.cuh), acts f16 in their order (acts_f16.cuh), out row-major f32; shared
//           memory: two rings, acts [NA][BN][64] halves with the 128-byte swizzle, weights [NW][rows / 16] tiles
// MAP       grid(multiprocessors at most) block(384, or 640 for few tokens): groups of four warps multiply, a warp has
//           sixteen rows by BN tokens; of four more warps one copies weights and one activations. A cluster takes every
//           so-manyth output tile, and its share of the steps of those that would not fill a round
// NEEDS     sm_90a; id % 32 == 0 (256 for types with blocks of 256), any od and nt: checked by the launcher
// TRAFFIC   weights od*id*bpe B for every BN tokens (from L2 after the first), acts 2*nt*id B for a cluster's rows
// WORK      2*nt*od*id FLOP on tensor cores; 3 to 6 instructions a weight for every BN tokens
// LOOK FOR  SASS: HGMMA.64xBNx16.F32 whose A is a register, PRMT, HADD2 and HMUL2 between them, UBLKCP, UTMALDG.2D; no
//           LDL or STL
// EXPECT    512 tokens: within a tenth of cuBLAS on f16 weights where there are tiles enough (7b.ffn_gate, 7b.ffn_down),
//           and ahead of decoding first everywhere; few tokens: the decoding is the limit
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=compute_90a,code=sm_90a chapters/05-tiled-gemm/tiled_gemm.cu -o
//           tiled_gemm
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "harness/device/device.hpp"
#include "kernels/device/cluster.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/mbarrier.cuh"
#include "kernels/device/named_barrier.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/device/tma.cuh"
#include "kernels/device/wgmma.cuh"
#include "kernels/gemm/epilogue.cuh"
#include "kernels/gemm/gemm_tiles_few.cuh"
#include "kernels/gemm/gemm_tiles_formats.cuh"
#include "kernels/gemm/gemm_tiles_parts.cuh"
#include "kernels/mmvq/mmvq_tiles_formats.cuh"

namespace ladder {

namespace tiles {

inline constexpr int kGemmShared = 227 * 1024;

/// What gemm_tiles_wgmma is compiled for.
/// @tparam BN tokens of a block @tparam GROUPS groups of four warps that multiply, 64 rows each
/// @tparam CLUSTER blocks that share the activations they load
template <int BN_, int GROUPS_, int CLUSTER_>
struct GemmTilesConfig {
  static constexpr int BN = BN_, GROUPS = GROUPS_, CLUSTER = CLUSTER_;
  static constexpr int kRows = 64 * GROUPS, kMultipliers = 128 * GROUPS, kThreads = kMultipliers + 128;
  /// Registers of a thread that multiplies, and of one that copies. Together no more than a block starts with, or groups
  /// would wait for more for ever: each quarter of a multiprocessor has 16 K of them, shared by warps in steps of 8.
  static constexpr int kMany = GROUPS == 2 ? 232 : 112, kFew = GROUPS == 2 ? 40 : 32;
  static constexpr int kStart = 16384 / 32 / (GROUPS + 1) / 8 * 8;
  static_assert(GROUPS * kMany + kFew <= (GROUPS + 1) * kStart);
  static_assert((GROUPS == 2 || GROUPS == 4) && (CLUSTER == 1 || CLUSTER == 2));
};

/// The parts of a block for one format.
template <class Format, class Config>
struct GemmTilesShape {
  static constexpr int kSixteens = Config::kRows / kRows;
  static constexpr int kTile = tile_bytes<typename Format::Block>();
  static constexpr int kSubs = Tile<typename Format::Block>::kSteps;  // sub-blocks of 32 along a tile
  static constexpr int kActStages = kSubs / 2;                        // stages of 64 activations along a tile
  static constexpr int kWeightBytes = kSixteens * kTile, kActBytes = Config::BN * 128;
  /// Two buffers in which two groups exchange sums of eight tokens; barriers; alignment.
  static constexpr int kExchangeBytes = 2 * Config::kMultipliers * 16, kBarrierBytes = 1024,
                       kAlignment = 1024;
  static constexpr int kRoom = kGemmShared - kExchangeBytes - kBarrierBytes - kAlignment;
  static constexpr int kEven = kRoom / (kWeightBytes + kActStages * kActBytes);
  /// Stages of either ring: as many steps of both as fit, or two of weights and the rest.
  static constexpr int kWeightRing = kEven >= 2 ? (kEven < 12 ? kEven : 12) : 2;
  static constexpr int kActRing =
      kEven >= 12 ? 12 * kActStages : (kRoom - kWeightRing * kWeightBytes) / kActBytes;
  static constexpr int kShared =
      kAlignment + kActRing * kActBytes + kWeightRing * kWeightBytes + kExchangeBytes + kBarrierBytes;
  static_assert(kActRing >= 3 && kWeightBytes % 16 == 0 && 2 * (kWeightRing + kActRing) * 8 <= kBarrierBytes);
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

/// A cluster's way through its output tiles: first whole ones, then its share of the steps of those that are cut.
struct GemmTilesWork {
  int tile, begin, end;  // steps of the tile

  /// @param who, of which of how many clusters
  __device__ __forceinline__ bool first(const GemmTilesArgs& a, int who, int of) {
    of_ = of;
    next_whole_ = who;
    const long long all = static_cast<long long>(a.cut) * a.steps;
    at_ = all * who / of;
    stop_ = all * (who + 1) / of;
    return next(a);
  }
  __device__ __forceinline__ bool next(const GemmTilesArgs& a) {
    if (next_whole_ < a.whole) {
      tile = next_whole_, begin = 0, end = a.steps;
      next_whole_ += of_;
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
  int next_whole_, of_;
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

// ANCHOR: gemm_tiles_wgmma
template <class Format, class Config, bool SWIGLU>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gemm_tiles_wgmma(const __grid_constant__ GemmTilesArgs args, const __grid_constant__ TensorMap acts) {
#if LADDER_HAS_WGMMA
  using Shape = GemmTilesShape<Format, Config>;
  constexpr int BN = Config::BN, GROUPS = Config::GROUPS, CLUSTER = Config::CLUSTER;
  constexpr int NW = Shape::kWeightRing, NA = Shape::kActRing, SUBS = Shape::kSubs, PER = Shape::kActStages;
  constexpr int TILE = Shape::kTile, SIXTEENS = Shape::kSixteens, ROWS16 = SWIGLU ? SIXTEENS / 2 : SIXTEENS;
  // By an offset, not by rounding the pointer: so the compiler sees that it is shared memory.
  unsigned char* const shared = dynamic_shared<unsigned char>() +
                                (1024 - shared_address(dynamic_shared<unsigned char>()) % 1024) % 1024;
  unsigned char* const act_ring = shared;                             // [NA][BN][64] halves, swizzled
  unsigned char* const weight_ring = shared + NA * Shape::kActBytes;  // [NW][SIXTEENS][TILE]
  auto* const exchange = reinterpret_cast<float4*>(weight_ring + NW * Shape::kWeightBytes);
  auto* const weights_full = reinterpret_cast<std::uint64_t*>(exchange + Shape::kExchangeBytes / 16);
  std::uint64_t* const weights_empty = weights_full + NW;
  std::uint64_t* const acts_full = weights_empty + NW;
  std::uint64_t* const acts_empty = acts_full + NA;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int cluster = static_cast<int>(blockIdx.x) / CLUSTER,
            clusters = static_cast<int>(gridDim.x) / CLUSTER;
  const int rank = CLUSTER > 1 ? static_cast<int>(cluster_block()) : 0;

  allow_next_kernel();
  if (threadIdx.x == 0) {
    for (int i = 0; i < NW; ++i) {
      mbarrier_init(weights_full + i, 1);
      mbarrier_init(weights_empty + i, Config::kMultipliers);
    }
    for (int i = 0; i < NA; ++i) {
      mbarrier_init(acts_full + i, 1);
      mbarrier_init(acts_empty + i, 4 * GROUPS * CLUSTER);
    }
    mbarrier_init_fence();
  }
  if constexpr (CLUSTER > 1) {
    cluster_barrier();  // barriers exist before anybody uses them, in this block or from the other
  } else {
    __syncthreads();  // barriers exist before anybody uses them
  }

  if (warp >= 4 * GROUPS) {
    registers_decrease<Config::kFew>();
    GemmTilesWork w;
    if (warp == 4 * GROUPS) {
      // 1a. Weights, a lane a sixteen of rows. They do not depend on the kernel before this one.
      RingPlace<NW> to;
      for (bool more = w.first(args, cluster, clusters); more; more = w.next(args)) {
        const int block = w.tile / args.token_blocks * CLUSTER + rank, slot = lane % SIXTEENS;
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
    } else if (warp == 4 * GROUPS + 1 && lane == 0) {
      // 1b. Activations.
      prefetch_tensor_map(acts);
      wait_for_previous_kernel();
      RingPlace<NA> to;
      for (bool more = w.first(args, cluster, clusters); more; more = w.next(args)) {
        const int token = w.tile % args.token_blocks * BN;
        for (int k = w.begin * PER; k < w.end * PER; ++k) {
          mbarrier_wait(acts_empty + to.at, to.phase ^ 1);
          mbarrier_arrive_expect_bytes(acts_full + to.at, Shape::kActBytes);
          unsigned char* const stage = act_ring + to.at * Shape::kActBytes;
          if constexpr (CLUSTER > 1) {
            // Half of the tokens for both blocks: the other block brings the other half.
            tensor_copy_2d_multicast(stage + rank * (Shape::kActBytes / CLUSTER), acts,
                                     token + rank * (BN / CLUSTER), k * 64, acts_full + to.at,
                                     (1u << CLUSTER) - 1);
          } else {
            tensor_copy_2d(stage, acts, token, k * 64, acts_full + to.at);
          }
          to.advance();
        }
      }
    }
  } else {
    registers_increase<Config::kMany>();
    // 2. The multiplying warps. Four of them share an instruction's 64 rows: warp w has the block's wth sixteen.
    wait_for_previous_kernel();  // for what the results are added to
    const int group = warp / 4, g = lane / 4, t = lane % 4;
    float sums[BN / 2];
    std::uint32_t a[2][2][4] = {};  // sub-block's parity, half of it
    RingPlace<NW> wp;
    RingPlace<NA> ap;
    int release = -1;               // stage of activations whose last product is under way
    [[maybe_unused]] int turn = 0;  // of the buffers for exchange
    // In a cluster, a lane tells each block that writes to the stage.
    [[maybe_unused]] const std::uint32_t empty =
        CLUSTER > 1 ? shared_address_in(static_cast<unsigned>(lane % CLUSTER), acts_empty) : 0;
    const auto release_acts = [&] {
      if constexpr (CLUSTER > 1) {
        if (release >= 0 && lane < CLUSTER) mbarrier_arrive_at(empty + 8 * static_cast<unsigned>(release));
      } else {
        if (release >= 0 && lane == 0) mbarrier_arrive(acts_empty + release);
      }
      release = -1;
    };
    // A piece that is written is announced when its stores have had a step's time to arrive.
    bool unannounced = false;
    const auto announce = [&] {
      __threadfence();
      named_barrier(1, Config::kMultipliers);  // all of the piece is written
      if (threadIdx.x == 0) atomicExch(args.flags + blockIdx.x, 1u);
      unannounced = false;
    };
    const std::uint64_t descriptor = wgmma_descriptor_128b(act_ring);
    GemmTilesWork work;
    for (bool more = work.first(args, cluster, clusters); more; more = work.next(args)) {
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) sums[i] = 0.0f;
      for (int step = work.begin; step < work.end; ++step) {
        mbarrier_wait(weights_full + wp.at, wp.phase);
        HalfRaw<Format> raw;
        raw.template load<FromShared>(weight_ring + wp.at * Shape::kWeightBytes + warp * TILE, lane);
        mbarrier_arrive_after(weights_empty + wp.at, word_of(raw));  // all lanes have their shares
        wp.advance();
        const HalfUnits units = half_units<Format>(raw);
        const auto sub_block = [&]<int S>() {
          half_fragments<Format, S>(raw, units, a[S % 2]);
          if constexpr (S % 2 == 0) mbarrier_wait(acts_full + ap.at, ap.phase);
          const std::uint64_t b = descriptor + static_cast<unsigned>(ap.at) * (Shape::kActBytes / 16);
          wgmma_fence();
          wgmma_f16<BN>(sums, a[S % 2][0], wgmma_next_k(b, S % 2 * 2));
          wgmma_f16<BN>(sums, a[S % 2][1], wgmma_next_k(b, S % 2 * 2 + 1));
          wgmma_commit_group();
          wgmma_wait_group<1>();  // the sub-block before this one is multiplied: its registers are free
          wgmma_hold(a[1 - S % 2][0]);
          wgmma_hold(a[1 - S % 2][1]);
          if constexpr (S % 2 == 0) {
            release_acts();
          } else {
            release = ap.at;
            ap.advance();
          }
        };
        [&]<int... S>(std::integer_sequence<int, S...>) { (sub_block.template operator()<S>(), ...); }
        (std::make_integer_sequence<int, SUBS>());
        if (unannounced) announce();
      }
      wgmma_wait_group<0>();
      release_acts();
      wgmma_hold(sums);

      // 3. A tile that is cut: whoever has its first step adds what the others have, in the order of the steps.
      constexpr int kPieces = BN / 8;  // float4 a thread
      const auto piece = [&](int block) {
        return reinterpret_cast<float4*>(args.partial) +
               (static_cast<long long>(block) * kPieces) * Config::kMultipliers + threadIdx.x;
      };
      if (work.begin > 0) {
        float4* to = piece(static_cast<int>(blockIdx.x));
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const float* v = &sums[4 * i];
          __stcg(to + i * Config::kMultipliers, make_float4(v[0], v[1], v[2], v[3]));
        }
        unannounced = true;
        continue;
      }
      if (work.end < args.steps) {
        const long long all = static_cast<long long>(args.cut) * args.steps;
        const long long behind = static_cast<long long>(work.tile - args.whole + 1) * args.steps;
        int end = cluster + 1;  // the tile's last piece is that of the cluster before this one
        while (all * end / clusters < behind) ++end;
        for (int other = cluster + 1 + static_cast<int>(threadIdx.x); other < end;
             other += Config::kMultipliers) {
          while (atomicCAS(args.flags + other * CLUSTER + rank, 1u, 0u) != 1u) {
          }
          __threadfence();
        }
        named_barrier(1, Config::kMultipliers);  // all pieces are there
        constexpr int kAtOnce = kPieces <= 4 ? 4 : 1;
#pragma unroll kAtOnce
        for (int other = cluster + 1; other < end; ++other) {
          const float4* add = piece(other * CLUSTER + rank);
#pragma unroll
          for (int i = 0; i < kPieces; ++i) {
            float* v = &sums[4 * i];
            const float4 p = __ldcg(add + i * Config::kMultipliers);
            v[0] += p.x, v[1] += p.y, v[2] += p.z, v[3] += p.w;
          }
        }
      }

      // 4. Out: rows g and g + 8 of a sixteen, tokens 2t and 2t + 1 of eight.
      const int token0 = work.tile % args.token_blocks * BN,
                block = work.tile / args.token_blocks * CLUSTER + rank;
      if constexpr (SWIGLU) {
        // Groups in pairs have the same rows, of the gate and of what it lets through. One gets the other's sums for the
        // first half of the tokens, the other for the second; eight tokens at a time, in two buffers.
        const int sixteen = block * ROWS16 + group / 2 * 4 + warp % 4, role = group % 2;
        const float4* const from = exchange + (group ^ 1) * 128 + threadIdx.x % 128;
        float4* const to = exchange + group * 128 + threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < BN / 4; i += 4) {
          float own[4], give[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            own[j] = role == 0 ? sums[i + j] : sums[BN / 4 + i + j];
            give[j] = role == 0 ? sums[BN / 4 + i + j] : sums[i + j];
          }
          const int buffer = turn++ % 2 * Config::kMultipliers;
          to[buffer] = make_float4(give[0], give[1], give[2], give[3]);
          named_barrier(2 + group / 2, 256);  // both have written, and have read what was here two rounds ago
          const float4 got = from[buffer];
          const float other[4] = {got.x, got.y, got.z, got.w};
          float gate[4], up[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            gate[j] = role == 0 ? own[j] : other[j];
            up[j] = role == 0 ? other[j] : own[j];
          }
          finish_gate(gate, up, args.gate, args.parts.part[0].od, sixteen,
                      token0 + role * (BN / 2) + 2 * i + 2 * t, args.nt);
        }
      } else {
        const int sixteen = block * ROWS16 + warp;
        if (sixteen < args.parts.first[kMostGemmTilesParts]) {
          const int p = gemm_part_of(args.parts, sixteen);
          finish_rows<BN>(sums, args.parts.part[p], (sixteen - args.parts.first[p]) * kRows + g,
                          token0 + 2 * t, args.nt);
        }
      }
    }
    if (unannounced) announce();
  }
  if constexpr (CLUSTER > 1) {
    __syncwarp();       // lanes that copied have come back to their warps
    cluster_barrier();  // a block stays until nobody reaches into its shared memory any more
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
  int cluster = 1;           ///< blocks that share activations: neighbours along the rows
  int blocks = 0;            ///< of the grid
  int whole = 0, cut = 0;  ///< a cluster's output tiles: multiplied by one cluster alone, and divided along k

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

/// A block that gemm_tiles_wgmma is compiled for.
struct GemmTilesBlock {
  int rows, tokens, cluster;
  bool every_type;  ///< or only for types that Qwen's files are made of
  bool gate;        ///< for silu(gate) * up too
  double step_us;  ///< what 32 of k take: measured on an H200 with Q4_K, other types are within a tenth of it
};
inline constexpr GemmTilesBlock kGemmTilesBlocks[] = {
    {256, 16, 1, false, true, 0.235},  {256, 32, 1, false, true, 0.26},  {128, 64, 1, true, true, 0.145},
    {128, 128, 1, false, true, 0.205}, {128, 256, 2, true, true, 0.363},
};
/// Types whose files have it in most matrices, and which get all blocks; the others get those that lose little anywhere.
constexpr bool is_common(WeightType type) {
  return type == WeightType::q4_0 || type == WeightType::q5_0 || type == WeightType::q8_0 ||
         type == WeightType::q4_k || type == WeightType::q5_k || type == WeightType::q6_k;
}
constexpr bool has_block(const GemmTilesBlock& b, WeightType type, bool gate) {
  return (b.every_type || is_common(type)) && (b.gate || !gate);
}

/// Calls f.operator()<Config>() for the block, if there is one for the type.
template <WeightType TYPE, bool GATE, class F>
Status with_gemm_block(int rows, int tokens, int cluster, F&& f) {
  const auto is = [&](int r, int t, int c) { return rows == r && tokens == t && cluster == c; };
  if constexpr (is_common(TYPE)) {
    if (is(256, 16, 1)) return f.template operator()<GemmTilesConfig<16, 4, 1>>();
    if (is(256, 32, 1)) return f.template operator()<GemmTilesConfig<32, 4, 1>>();
    if (is(128, 128, 1)) return f.template operator()<GemmTilesConfig<128, 2, 1>>();
  }
  if (is(128, 64, 1)) return f.template operator()<GemmTilesConfig<64, 2, 1>>();
  if (is(128, 256, 2)) return f.template operator()<GemmTilesConfig<256, 2, 2>>();
  return Status::error("gemm_tiles_wgmma: no blocks of " + std::to_string(rows) + " rows and " +
                       std::to_string(tokens) + " tokens, " + std::to_string(cluster) +
                       " to a cluster, for " + info(TYPE).name + (GATE ? " with a gate" : ""));
}

/// Divides output tiles of rows x tokens for each of a cluster's blocks among `sms` multiprocessors: tiles alone, or
/// all clusters the same work to a step.
constexpr GemmTilesPlan divide(int rows, int tokens, int cluster, long long rows16, long long nt,
                               long long row_steps, int sms, bool cut) {
  const long long rows_all = static_cast<long long>(rows) * cluster;
  const long long all = (rows16 * kRows + rows_all - 1) / rows_all * ((nt + tokens - 1) / tokens);
  const long long most = sms / cluster;
  GemmTilesPlan p{rows, tokens, cluster, 0, 0, 0};
  if (!cut || all % most == 0) {
    p.blocks = static_cast<int>(all < most ? all : most) * cluster;
    p.whole = static_cast<int>(all);
    return p;
  }
  p.blocks = static_cast<int>(all * row_steps < most ? all * row_steps : most) * cluster;
  // All but the last round and a piece of one are multiplied whole: every cluster's share of the rest is one to two
  // tiles.
  p.whole = static_cast<int>(all < most ? 0 : (all / most - 1) * most);
  p.cut = static_cast<int>(all - p.whole);
  return p;
}

/// How gemm_tiles_few divides a product: a block for each of its output tiles.
constexpr GemmTilesPlan few_plan(const GemmFewBlock& b, long long rows16, long long nt) {
  const long long rows = b.sixteens * b.row_warps;
  const int all = static_cast<int>((rows16 + rows - 1) / rows * ((nt + b.tokens - 1) / b.tokens));
  return {b.rows(), b.tokens, 1, all, all, 0};
}

/// A launch with one configuration.
template <class Format, class Config, bool SWIGLU>
Status launch_gemm_tiles_config(const GemmTilesArgs& args, const void* acts, int id, int blocks,
                                Stream& stream, bool programmatic) {
#if defined(__CUDACC__)
  TensorMap map;
  TensorMapOptions options;
  options.swizzle = TensorSwizzle::bytes_128;
  if (Status ok = make_tensor_map(map, acts, static_cast<std::uint64_t>(args.nt),
                                  static_cast<std::uint64_t>(id), Config::BN / Config::CLUSTER, 64, options);
      !ok.ok()) {
    return ok;
  }
  LaunchOptions how;
  how.programmatic = programmatic;
  how.cluster_blocks = Config::CLUSTER;
  return launch(how, gemm_tiles_wgmma<Format, Config, SWIGLU>, dim3(static_cast<unsigned>(blocks)),
                dim3(Config::kThreads), GemmTilesShape<Format, Config>::kShared, stream, args, map);
#else
  (void)args, (void)acts, (void)id, (void)blocks, (void)stream, (void)programmatic;
  return Status::error(
      "gemm_tiles_wgmma: there is no emulated wgmma; it needs a GPU of compute capability 9.0");
#endif
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
  if constexpr (is_common(Format::Block::kType)) {
    if (is_few(plan.rows, plan.tokens)) {
      return with_few_block<Format::Block::kType, SWIGLU>(
          plan.rows, plan.tokens, [&]<class Config>() -> Status {
            return launch_gemm_few_config<Format, Config, SWIGLU>(args.parts, args.gate, acts, args.nt, id,
                                                                  stream, programmatic);
          });
    }
  }
  return with_gemm_block<Format::Block::kType, SWIGLU>(
      plan.rows, plan.tokens, plan.cluster, [&]<class Config>() -> Status {
        return launch_gemm_tiles_config<Format, Config, SWIGLU>(args, acts, id, plan.blocks, stream,
                                                                programmatic);
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

/// What a division is expected to take, in microseconds on an H200. What matters is the order of divisions, and it should
/// hold for other devices with wgmma.
constexpr double expected_us(const GemmTilesBlock& b, const GemmTilesPlan& p, double weight_bytes,
                             long long k) {
  constexpr double kLaunch = 3, kBytesPerUs = 4.2e6;
  const double outputs = static_cast<double>(p.rows) * p.tokens;
  const double tile = static_cast<double>(k) / 32 * b.step_us + 0.3 + outputs * 5e-5;
  const int clusters = p.blocks / p.cluster;
  double time = static_cast<double>((p.whole + clusters - 1) / clusters) * tile;
  if (p.cut > 0) time += p.cut * tile / clusters + 2.5 + outputs * 1.6e-4;  // sums written, awaited and added
  const double memory = weight_bytes / kBytesPerUs;
  return kLaunch + (time > memory ? time : memory);
}

/// The same of gemm_tiles_few. @param steps tiles along a row, of `span` weights
constexpr double expected_us(const GemmFewBlock& b, const GemmTilesPlan& p, double weight_bytes,
                             long long steps, long long span, int sms) {
  const double warp_steps = static_cast<double>((steps + b.k_warps - 1) / b.k_warps * span) / 128;
  const int rounds = (p.blocks + sms - 1) / sms;
  const double time = rounds * warp_steps * b.step_us + (rounds - 1) * 2.5, memory = weight_bytes / 4.2e6;
  return 1.8 + (time > memory ? time : memory);
}

constexpr GemmTilesPlan best_plan(WeightType type, long long rows16, long long nt, long long id, bool gate,
                                  int sms) {
  if (rows16 < 1 || nt < 1 || id < 1)
    return {};  // no product; the launchers say what is wrong with the shape
  const long long span = info(type).block_elems == 256 ? 256 : 128, row_steps = (id + span - 1) / span;
  const double bytes = static_cast<double>(rows16 * kRows * id) * info(type).bytes_per_element();
  GemmTilesPlan best;
  double least = 0;
  for (const GemmTilesBlock& b : kGemmTilesBlocks) {
    if (b.cluster > sms || !has_block(b, type, gate)) continue;
    for (const bool cut : {false, true}) {
      const GemmTilesPlan p = divide(b.rows, b.tokens, b.cluster, rows16, nt, row_steps, sms, cut);
      const double us = expected_us(b, p, bytes, row_steps * span);
      if (best.blocks == 0 || us < least) best = p, least = us;
    }
  }
  for (const GemmFewBlock& b : kGemmFewBlocks) {
    if (!is_common(type) || nt > b.tokens || !b.exists(type, gate)) continue;
    const GemmTilesPlan p = few_plan(b, rows16, nt);
    const double us = expected_us(b, p, bytes, row_steps, span, sms);
    if (us < least) best = p, least = us;
  }
  return best;
}

}  // namespace tiles

/// How a product is divided on `sms` multiprocessors: the block and the division that should take the shortest. Without
/// blocks where there is nothing to multiply.
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
    const GemmTilesPlan cut{b.rows, b.tokens, b.cluster, sms, 0, 1};
    if (cut.partial_bytes() > most) most = cut.partial_bytes();
  }
  return most;
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
