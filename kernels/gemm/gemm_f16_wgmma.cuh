// RUNG      gemm_f16_wgmma: Hopper's own instructions.  PREV gemm_f16_mma: mma.sync reaches 63 % of the tensor cores
// COMPUTES  out[nt][od] = epilogue(acts[nt][id] . weights[od][id]^T), f16 operands, f32 sums
// LAYOUT    acts, weights row-major f16, out row-major f32; ring in shared memory [stages]: acts [BM][64] and weights
//           [BN][64] halves with the 128-byte swizzle
// MAP       cluster of cm * cn * CK blocks -> cm * BM tokens x cn * BN rows, k in CK parts; block(384, or 192 with BM 64):
//           groups of four warps that multiply 64 tokens x BN rows each, and warps of which one thread loads weights and
//           one tokens; as many clusters as run at once, and each takes every so-manyth tile
// NEEDS     sm_90a; id % 8 == 0, operands at multiples of 16 bytes (the launcher checks and says so), any nt, od >= 1
// TRAFFIC   weights 2*od*id B, acts 2*nt*id B, out 4*nt*od B     WORK 2*nt*od*id FLOP
// LOOK FOR  SASS: HGMMA.64x256x16.F32 by fours, UTMALDG.2D.MULTICAST, SYNCS; no LDS beside them, no LDL or STL
// EXPECT    twice gemm_f16_mma's rate where k is long; at 512 tokens and 896 rows the launch and the first loads
//           take longer than the product
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=compute_90a,code=sm_90a chapters/05-tiled-gemm/tiled_gemm.cu -o
//           tiled_gemm
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "harness/device/device.hpp"
#include "kernels/device/cluster.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/mbarrier.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/device/tma.cuh"
#include "kernels/device/wgmma.cuh"
#include "kernels/gemm/epilogue.cuh"

namespace ladder {

namespace gemm_wgmma {

inline constexpr int KS = 64;  ///< k of a stage: 128 bytes, as wide as the swizzle
inline constexpr int kMostStages = 16;
inline constexpr int kSharedLimit = 227 * 1024;  ///< of a multiprocessor's blocks on compute capability 9.0

/// What a block is made of.
/// @tparam BM tokens of its tile, 64 to a group of four warps @tparam BN weight rows of it
template <int BM, int BN>
struct Tile {
  static constexpr int kMultipliers = BM / 64;
  /// Large sums want more registers than all threads can have: they are moved to where they are needed, which goes by
  /// groups of four warps. Otherwise there are two warps that load.
  static constexpr bool kMoves = BM == 128;
  static constexpr int kThreads = 128 * kMultipliers + (kMoves ? 128 : 64);
  static constexpr int kActsBytes = BM * KS * 2, kWeightsBytes = BN * KS * 2;
  static constexpr int kStageBytes = kActsBytes + kWeightsBytes;
  /// The ring begins at a multiple of 1024, which costs up to that much; two barriers a stage stand behind it.
  static constexpr int kBesideBytes = 1024 + 2 * kMostStages * 8;
  static constexpr int kStages = std::min(kMostStages, (kSharedLimit - kBesideBytes) / kStageBytes);
  static constexpr int kSharedBytes = kBesideBytes + kStages * kStageBytes;
  static_assert(kStages >= 3 && kStageBytes % 1024 == 0 && BN % 8 == 0);
  static_assert(BM == 64 || BM == 128);
};

}  // namespace gemm_wgmma

/// How a product is divided.
struct GemmWgmmaPlan {
  int bn = 256;  ///< weight rows of a tile
  int cm = 1;    ///< tiles of a cluster along the tokens: they share weights
  int cn = 1;    ///< tiles of a cluster along the weight rows: they share tokens
  int ck = 1;    ///< parts of k, in a cluster
  int band = 8;  ///< tiles along the tokens that are worked on together, for L2
  int bm = 128;  ///< tokens of a tile

  bool operator==(const GemmWgmmaPlan&) const = default;
};

// ANCHOR: gemm_f16_wgmma_multiply
/// One of the groups that multiply: waits for stages, starts their wgmmas, and gives a stage back when the next
/// one's have started, so that the tensor cores always have work queued.
template <int BN, class T>
__device__ __forceinline__ void gemm_wgmma_sums(float (&d)[BN / 2], const unsigned char* ring,
                                                std::uint64_t* full, std::uint32_t empty, bool release,
                                                int group, int steps, int& slot, unsigned& parity) {
  const std::uint64_t acts = wgmma_descriptor_128b(ring + group * 64 * 128);
  const std::uint64_t weights = wgmma_descriptor_128b(ring + T::kActsBytes);
  int before = 0;
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(&full[slot], parity);
    const std::uint64_t at = static_cast<std::uint64_t>(slot * (T::kStageBytes / 16));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < gemm_wgmma::KS / 16; ++k) {
      wgmma_f16<BN>(d, wgmma_next_k(acts + at, k), wgmma_next_k(weights + at, k), step > 0 || k > 0);
    }
    wgmma_commit_group();
    if (step > 0) {
      // The wgmmas of the step before are done: its stage may be written again, here and in the blocks whose
      // weights come from there.
      wgmma_wait_group<1>();
      if (release) mbarrier_arrive_at(empty + static_cast<std::uint32_t>(before) * 8);
    }
    before = slot;
    if (++slot == T::kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
  wgmma_wait_group<0>();
  wgmma_hold(d);
  if (release) mbarrier_arrive_at(empty + static_cast<std::uint32_t>(before) * 8);
}
// ANCHOR_END: gemm_f16_wgmma_multiply

// ANCHOR: gemm_f16_wgmma_parts
/// Adds up the parts of k of a cluster: part p gets columns [p * slice, (p + 1) * slice) of the tile, in groups of
/// eight, from all parts. Its other registers are of no use to it afterwards.
/// @param apart blocks between two parts of a tile
/// @param inbox shared memory that nobody needs any more, [CK][slice][threads that multiply] float4
/// @param thread of these
template <int BN, int CK, class T>
__device__ __forceinline__ void gemm_wgmma_add_parts(float (&d)[BN / 2], unsigned char* inbox, int part,
                                                     int apart, int thread) {
  constexpr int kSenders = 128 * T::kMultipliers, kSlice = (BN / 8 + CK - 1) / CK;
  static_assert(CK * kSlice * kSenders * 16 <= T::kStages * T::kStageBytes);
  cluster_barrier_relaxed();  // every block of the cluster is done with its ring
  const unsigned me = cluster_block() % static_cast<unsigned>(apart);
#pragma unroll
  for (int owner = 0; owner < CK; ++owner) {
    const std::uint32_t there = shared_address_in(static_cast<unsigned>(owner * apart) + me, inbox) +
                                static_cast<std::uint32_t>((part * kSlice * kSenders + thread) * 16);
#pragma unroll
    for (int g = owner * kSlice; g < min((owner + 1) * kSlice, BN / 8); ++g) {
      store_at(there + static_cast<std::uint32_t>((g - owner * kSlice) * kSenders * 16),
               make_float4(d[4 * g], d[4 * g + 1], d[4 * g + 2], d[4 * g + 3]));
    }
  }
  cluster_barrier();  // all parts are here
  const float4* in = reinterpret_cast<const float4*>(inbox) + thread;
#pragma unroll
  for (int g = 0; g < BN / 8; ++g) {
    if (g / kSlice != part) continue;
    // Parts ascending, whoever adds: the same bits in every run.
    float4 sum = in[g % kSlice * kSenders];
#pragma unroll
    for (int p = 1; p < CK; ++p) {
      const float4 v = in[(p * kSlice + g % kSlice) * kSenders];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    d[4 * g] = sum.x, d[4 * g + 1] = sum.y, d[4 * g + 2] = sum.z, d[4 * g + 3] = sum.w;
  }
}
// ANCHOR_END: gemm_f16_wgmma_parts

/// What the epilogue adds, in place. @param token, row of d[0] @param low, high of the tile's columns, those that
/// are written, seen from `row`
template <int BN>
__device__ __forceinline__ void gemm_wgmma_finish(float (&d)[BN / 2], const GemmEpilogue& e, int token,
                                                  int row, int nt, int od, int low, int high) {
  const bool pairs = od % 2 == 0;  // two neighbours are one access of 8 bytes
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = token + 8 * half;
    if (t >= nt) break;
    const float scale = e.row_scale != nullptr ? e.row_scale[t] : 1.0f;
    const float* bias = e.bias + row;                                             // [od - row]
    const float* residual = e.residual + (static_cast<long long>(t) * od + row);  // [od - row]
#pragma unroll
    for (int chunk = 0; chunk < BN / 8; chunk += 4) {
      if (8 * chunk >= high || 8 * chunk + 32 <= low) continue;
      float2 plus[4];
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        if (chunk + g >= BN / 8) break;
        const int i = 4 * (chunk + g) + 2 * half;
        d[i] *= scale, d[i + 1] *= scale;
      }
      // In this order, and only where it is given: adding 0 would turn -0 into 0.
      if (e.bias != nullptr) {
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          if (chunk + g >= BN / 8) break;
          const int column = 8 * (chunk + g);
          if (column < high) d[4 * (chunk + g) + 2 * half] += bias[column];
          if (column + 1 < high) d[4 * (chunk + g) + 2 * half + 1] += bias[column + 1];
        }
      }
      if (e.residual != nullptr) {
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          if (chunk + g >= BN / 8) break;
          const int column = 8 * (chunk + g);
          plus[g] = make_float2(0.0f, 0.0f);
          if (pairs) {
            if (column < high) plus[g] = *reinterpret_cast<const float2*>(residual + column);
          } else {
            if (column < high) plus[g].x = residual[column];
            if (column + 1 < high) plus[g].y = residual[column + 1];
          }
        }
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          if (chunk + g >= BN / 8) break;
          d[4 * (chunk + g) + 2 * half] += plus[g].x;
          d[4 * (chunk + g) + 2 * half + 1] += plus[g].y;
        }
      }
    }
  }
}

// ANCHOR: gemm_f16_wgmma_store
/// Writes a lane's sums: four lanes write 32 neighbouring bytes of one token, a whole sector, straight from
/// registers. The stores are on their way when the next tile's wgmmas start.
/// @param token, row of d[0] @param low, high of the tile's columns, those that are written, seen from `row`
template <int BN>
__device__ __forceinline__ void gemm_wgmma_store(const float (&d)[BN / 2], float* out, int token, int row,
                                                 int nt, int od, int low, int high) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (token + 8 * half >= nt) break;
    float* to = out + (static_cast<long long>(token + 8 * half) * od + row);
    if (od % 2 == 0) {
#pragma unroll
      for (int g = 0; g < BN / 8; ++g) {
        const float2 v = make_float2(d[4 * g + 2 * half], d[4 * g + 2 * half + 1]);
        if (8 * g >= low && 8 * g < high) *reinterpret_cast<float2*>(to + 8 * g) = v;
      }
    } else {
#pragma unroll
      for (int g = 0; g < BN / 8; ++g) {
        if (8 * g >= low && 8 * g < high) to[8 * g] = d[4 * g + 2 * half];
        if (8 * g >= low && 8 * g + 1 < high) to[8 * g + 1] = d[4 * g + 2 * half + 1];
      }
    }
  }
}
// ANCHOR_END: gemm_f16_wgmma_store

/// Where a cluster's tile number `unit` lies: bands of `band` tiles along the tokens, and within a band all
/// tokens of one panel of weights before the next panel.
__device__ __forceinline__ void gemm_wgmma_place(int unit, int tiles_m, int tiles_n, int band, int& m,
                                                 int& n) {
  const int first = unit / (band * tiles_n) * band, height = min(band, tiles_m - first);
  const int inside = unit - first * tiles_n;
  m = first + inside % height;
  n = inside / height;
}

// ANCHOR: gemm_f16_wgmma
/// A cluster is cm * cn * CK blocks: cm tiles along the tokens, cn along the weight rows, and CK parts of their k.
/// @tparam BN weight rows of a tile @param steps of 64 k
/// @param tiles_m, tiles_n clusters side by side @param early whether to fill the ring with weights while the kernel
/// before this one ends
template <int BM, int BN, int CK>
__global__ void __launch_bounds__(gemm_wgmma::Tile<BM, BN>::kThreads, 1)
    gemm_f16_wgmma(const __grid_constant__ TensorMap acts_map, const __grid_constant__ TensorMap weights_map,
                   float* out, GemmEpilogue epilogue, int nt, int od, int steps, int tiles_m, int tiles_n,
                   int cm, int cn, int band, bool early) {
  using namespace gemm_wgmma;
  using T = Tile<BM, BN>;
  constexpr int kMultipliers = T::kMultipliers;
  // 1. The ring, and two barriers for each of its stages: `full` when the copy engine has brought all bytes, `empty`
  //    when all warps that read it are done, in this block and in those that get the same bytes.
  unsigned char* ring = dynamic_shared<unsigned char>();
  ring += (1024 - reinterpret_cast<std::uintptr_t>(ring) % 1024) % 1024;  // [kStages][acts | weights]
  auto* full = reinterpret_cast<std::uint64_t*>(ring + T::kStages * T::kStageBytes);  // [kMostStages]
  auto* empty = full + kMostStages;                                                   // [kMostStages]
  const int blocks = cm * cn * CK, rank = static_cast<int>(blockIdx.x) % blocks;
  const int my_m = rank % cm, my_n = rank / cm % cn, part = rank / (cm * cn);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(acts_map);
    prefetch_tensor_map(weights_map);
    for (int s = 0; s < T::kStages; ++s) {
      mbarrier_init(&full[s], 2);  // weights, tokens
      mbarrier_init(&empty[s], static_cast<unsigned>(4 * kMultipliers * (cm + cn - 1)));
    }
    mbarrier_init_fence();
  }
  __syncthreads();            // barriers exist before anybody here waits at them
  cluster_barrier_relaxed();  // and before other blocks' copies arrive at them

  const int clusters = static_cast<int>(gridDim.x) / blocks, units = tiles_m * tiles_n;
  const int begin = static_cast<int>(static_cast<long long>(steps) * part / CK);
  const int end = static_cast<int>(static_cast<long long>(steps) * (part + 1) / CK);
  const int group = static_cast<int>(threadIdx.x) / 128;  // the last one loads

  if (group == kMultipliers) {
    // 2. One thread asks for weights and one for tokens: of each tile for this block's share, for all blocks that need it.
    //    Those with the same rows lie side by side in the cluster, those with the same tokens cm apart. Weights do not
    //    depend on the kernel before this one: they fill the ring while that one ends.
    if constexpr (T::kMoves) registers_decrease<40>();
    const int column = part * cn;
    const auto each_step = [&](auto&& load) {
      int slot = 0;
      unsigned parity = 1;
      for (int unit = static_cast<int>(blockIdx.x) / blocks; unit < units; unit += clusters) {
        int m, n;
        gemm_wgmma_place(unit, tiles_m, tiles_n, band, m, n);
        for (int step = begin; step < end; ++step) {
          mbarrier_wait(&empty[slot], parity);
          load(slot, step, m, n);
          if (++slot == T::kStages) {
            slot = 0;
            parity ^= 1;
          }
        }
      }
    };
    if (threadIdx.x == 128 * kMultipliers) {
      const int share = BN / cm;
      const unsigned blocks_for = ((1u << cm) - 1) << ((column + my_n) * cm);
      if (!early) wait_for_previous_kernel();
      each_step([&](int at, int step, int, int n) {
        unsigned char* to = ring + at * T::kStageBytes + T::kActsBytes + my_m * share * KS * 2;
        const int row = (n * cn + my_n) * BN + my_m * share;
        mbarrier_arrive_expect_bytes(&full[at], T::kWeightsBytes);
        if (cm > 1) {
          tensor_copy_2d_multicast(to, weights_map, row, step * KS, &full[at], blocks_for);
        } else {
          tensor_copy_2d(to, weights_map, row, step * KS, &full[at]);
        }
      });
    } else if (threadIdx.x == 128 * kMultipliers + 32) {
      const int share = BM / cn;
      unsigned blocks_for = 0;
      for (int i = 0; i < cn; ++i) blocks_for |= 1u << ((column + i) * cm + my_m);
      wait_for_previous_kernel();
      each_step([&](int at, int step, int m, int) {
        unsigned char* to = ring + at * T::kStageBytes + my_n * share * KS * 2;
        const int row = (m * cm + my_m) * BM + my_n * share;
        mbarrier_arrive_expect_bytes(&full[at], T::kActsBytes);
        if (cn > 1) {
          tensor_copy_2d_multicast(to, acts_map, row, step * KS, &full[at], blocks_for);
        } else {
          tensor_copy_2d(to, acts_map, row, step * KS, &full[at]);
        }
      });
      // The next kernel may start where a block ends. Not sooner: its weights would be in the way of these loads.
      allow_next_kernel();
    }
    __syncwarp();  // lanes that loaded have come back to their warps
    if constexpr (CK > 1) {
      // Those of gemm_wgmma_add_parts. Nothing was written here: a fence of the whole GPU would only take time.
      cluster_barrier_relaxed();
      cluster_barrier_relaxed();
    }
  } else {
    // 3. Two groups of four warps multiply. When a warp is done with a stage, its lanes tell the blocks that write
    //    there: those that share its rows, and those that share its tokens.
    if constexpr (T::kMoves) registers_increase<232>();
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32 % 4, lane = thread % 32;
    const bool tells = lane < cm || (lane < cm + cn && lane - cm != my_n);
    const int told = lane < cm ? (part * cn + my_n) * cm + lane : (part * cn + lane - cm) * cm + my_m;
    const std::uint32_t empty_there = shared_address_in(static_cast<unsigned>(tells ? told : rank), empty);
    int slot = 0;
    unsigned parity = 0;
    float d[BN / 2];  // this lane's sums: 64 tokens x BN rows among 128 lanes
    wait_for_previous_kernel();
    for (int unit = static_cast<int>(blockIdx.x) / blocks; unit < units; unit += clusters) {
      gemm_wgmma_sums<BN, T>(d, ring, full, empty_there, tells, group, end - begin, slot, parity);
      int m, n;
      gemm_wgmma_place(unit, tiles_m, tiles_n, band, m, n);
      const int token = (m * cm + my_m) * BM + group * 64 + warp * 16 + lane / 4;
      const int row = (n * cn + my_n) * BN + lane % 4 * 2;
      int low = 0, high = od - row;
      if constexpr (CK > 1) {
        // 4. Parts of k: each block of the cluster adds up its share of the columns. There is one tile a cluster then,
        //    so that the ring is free.
        constexpr int kColumns = (BN / 8 + CK - 1) / CK * 8;
        gemm_wgmma_add_parts<BN, CK, T>(d, ring, part, cm * cn, thread);
        low = part * kColumns;
        high = min(high, low + kColumns);
      }
      // 5. Out, while the loads of the next tile go on.
      if (epilogue.bias != nullptr || epilogue.residual != nullptr || epilogue.row_scale != nullptr) {
        gemm_wgmma_finish<BN>(d, epilogue, token, row, nt, od, low, high);
      }
      gemm_wgmma_store<BN>(d, out, token, row, nt, od, low, high);
    }
  }
  // No block ends while others still arrive at its barriers. One place for all warps, as this is the block's own barrier
  // where a cluster is one block.
  if constexpr (CK == 1) cluster_barrier_relaxed();
}
// ANCHOR_END: gemm_f16_wgmma

/// Clusters of `blocks` blocks that run at once, where every block fills a multiprocessor. Multiprocessors come in
/// groups of 16 or 18 that a cluster cannot cross, so that large clusters leave some of them idle.
constexpr int gemm_wgmma_clusters(int sms, int blocks) {
  if (blocks <= 2) return sms / blocks;
  return std::max(1, sms * 10 / 11 / blocks);  // 30 of 4 and 15 of 8 on an H200
}

inline Status gemm_f16_wgmma_supported(const Shape& s, const DeviceInfo& device) {
  if (device.executor != Executor::gpu || device.cc_major != 9) {
    return Status::error("gemm_f16_wgmma: needs a GPU of compute capability 9.0: no other has wgmma");
  }
  if (s.nt < 1 || s.od < 1 || s.id < 8 || s.id % 8 != 0) {
    return Status::error("gemm_f16_wgmma: id " + std::to_string(s.id) +
                         "; it must be a positive multiple of 8, with nt and od at least 1");
  }
  constexpr long long kMost = 1LL << 30;
  if (s.nt > kMost || s.od > kMost || s.id > kMost) {
    return Status::error("gemm_f16_wgmma: nt, od and id must be at most 2^30");
  }
  return {};
}

/// Kernels that exist. Small tiles have k in parts too; the sums of larger ones take longer to move than what parts would
/// save.
struct GemmWgmmaKernel {
  int bm, bn, ck;
};
inline constexpr auto kGemmWgmmaKernels = std::to_array<GemmWgmmaKernel>({{64, 32, 2},
                                                                          {64, 64, 1},
                                                                          {64, 72, 1},
                                                                          {64, 96, 1},
                                                                          {64, 96, 2},
                                                                          {64, 128, 2},
                                                                          {128, 112, 1},
                                                                          {128, 144, 1},
                                                                          {128, 152, 1},
                                                                          {128, 160, 1},
                                                                          {128, 192, 1},
                                                                          {128, 224, 1},
                                                                          {128, 256, 1}});

// ANCHOR: gemm_f16_wgmma_plan
/// Clocks that a product takes by a model, in which the constants are what an H200 was seen to do.
inline double gemm_wgmma_clocks(const GemmWgmmaPlan& p, const Shape& s, int sms) {
  const int blocks = p.cm * p.cn * p.ck, steps = static_cast<int>((s.id + 63) / 64);
  const double tall = std::ceil(static_cast<double>(s.nt) / (p.bm * p.cm));
  const double wide = std::ceil(static_cast<double>(s.od) / (p.bn * p.cn));
  const double rounds = std::ceil(tall * wide / gemm_wgmma_clusters(sms, blocks));
  // A step: what the tensor cores need, or shared memory at 128 bytes a clock, to which both operands are written once
  // and from which each group of four warps reads its tokens and all rows. What a cluster shares comes from L2 once,
  // which matters most where all read the same tokens.
  const double tensor = p.bm * p.bn / 32.0, shared = 0.96 * (p.bm + p.bn + p.bm / 64 * (64.0 + p.bn));
  const double from_l2 = 0.1 * 2 * p.bn / p.cm + (tall * p.cm > 1 ? 0.01 : 0.2) * 2 * p.bm / p.cn;
  // Writing the sums, which the next tile's loads overlap, but not its products; and moving parts of them to other
  // multiprocessors of the cluster, at 6 bytes a clock.
  const double outputs = static_cast<double>(p.bm) * p.bn / p.ck;
  const double move = p.ck > 1 ? 1500 + 4 * outputs * (p.ck - 1) / 6 : 0;
  return 2000 + 70 * std::log2(blocks) +
         rounds *
             ((steps + p.ck - 1) / p.ck * (std::max(tensor, shared) + from_l2) + 600 + outputs / 8 + move);
}

/// The plan with the fewest clocks by that model.
inline GemmWgmmaPlan plan_gemm_f16_wgmma(const Shape& s, int sms) {
  GemmWgmmaPlan best;
  double least = 0;
  for (const GemmWgmmaKernel& k : kGemmWgmmaKernels) {
    for (const int cm : {1, 2, 4}) {
      for (const int cn : {1, 2, 4}) {
        const GemmWgmmaPlan p{k.bn, cm, cn, k.ck, std::max(1, 2048 / k.bm / cm), k.bm};
        if (cn > 1 && s.nt > k.bm) continue;  // other tiles of the same rows are better company
        if (cm * cn * k.ck > 8 || k.bn / cm % 8 != 0 || (s.id + 63) / 64 < 2 * k.ck) continue;
        if (s.nt <= static_cast<long long>(k.bm) * (cm / 2) ||
            s.od <= static_cast<long long>(k.bn) * (cn / 2))
          continue;  // half of it idle
        const double clocks = gemm_wgmma_clocks(p, s, sms);
        if (least == 0 || clocks < least) {
          least = clocks;
          best = p;
        }
      }
    }
  }
  return best;
}
// ANCHOR_END: gemm_f16_wgmma_plan

namespace gemm_wgmma {

#if defined(__CUDACC__)
/// Clusters of this kernel that the current device runs at once; asked once for each size.
template <int BM, int BN, int CK>
int resident_clusters(int blocks) {
  static int known[9] = {};
  if (known[blocks] == 0) {
    cudaLaunchAttribute size{};
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim.x = static_cast<unsigned>(blocks);
    size.val.clusterDim.y = size.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(Tile<BM, BN>::kThreads);
    config.dynamicSmemBytes = Tile<BM, BN>::kSharedBytes;
    config.attrs = &size;
    config.numAttrs = 1;
    int n = 0;
    LADDER_CUDA(cudaFuncSetAttribute(gemm_f16_wgmma<BM, BN, CK>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     Tile<BM, BN>::kSharedBytes));
    LADDER_CUDA(cudaOccupancyMaxActiveClusters(&n, gemm_f16_wgmma<BM, BN, CK>, &config));
    known[blocks] = n;
  }
  return known[blocks];
}
#else
template <int BM, int BN, int CK>
int resident_clusters(int) {
  return 1;
}
#endif

template <int BM, int BN, int CK>
Status launch_tile(const __half* acts, const __half* weights, float* out, const GemmEpilogue& epilogue,
                   const Shape& s, const GemmWgmmaPlan& plan, Stream& stream, bool programmatic) {
  const int blocks = plan.cm * plan.cn * CK, steps = static_cast<int>((s.id + KS - 1) / KS);
  const auto power = [](int n) { return n == 1 || n == 2 || n == 4; };
  if (!power(plan.cm) || !power(plan.cn) || blocks > 8 || CK > steps || BN / plan.cm % 8 != 0 ||
      plan.band < 1) {
    return Status::error(
        "gemm_f16_wgmma: a plan of bn " + std::to_string(BN) + ", cm " + std::to_string(plan.cm) + ", cn " +
        std::to_string(plan.cn) + ", ck " + std::to_string(CK) + ", band " + std::to_string(plan.band) +
        "; cm and cn are 1, 2 or 4, bn / cm a multiple of 8, cm * cn * ck at most 8, ck at most the "
        "steps of 64 k, band at least 1");
  }
  const TensorMapOptions options{TensorElement::f16, TensorSwizzle::bytes_128, true};
  TensorMap acts_map, weights_map;
  const auto rows = [](long long n) { return static_cast<std::uint64_t>(n); };
  const auto acts_share = static_cast<unsigned>(BM / plan.cn),
             weights_share = static_cast<unsigned>(BN / plan.cm);
  if (Status e = make_tensor_map(acts_map, acts, rows(s.nt), rows(s.id), acts_share, KS, options); !e.ok())
    return e;
  if (Status e = make_tensor_map(weights_map, weights, rows(s.od), rows(s.id), weights_share, KS, options);
      !e.ok()) {
    return e;
  }
  const int tiles_m = static_cast<int>((s.nt + BM * plan.cm - 1) / (BM * plan.cm));
  const int tiles_n = static_cast<int>((s.od + BN * plan.cn - 1) / (BN * plan.cn));
  const long long units = static_cast<long long>(tiles_m) * tiles_n;
  if (units * blocks > (1LL << 30)) return Status::error("gemm_f16_wgmma: more than 2^30 blocks");
  // Parts of k are added up in the ring's memory, so that a cluster has one tile then.
  const long long clusters =
      CK > 1 ? units : std::min<long long>(units, std::max(1, resident_clusters<BM, BN, CK>(blocks)));
  LaunchOptions launch_options;
  launch_options.programmatic = programmatic;
  launch_options.cluster_blocks = static_cast<unsigned>(blocks);
  return launch(launch_options, gemm_f16_wgmma<BM, BN, CK>, dim3(static_cast<unsigned>(clusters * blocks)),
                dim3(Tile<BM, BN>::kThreads), Tile<BM, BN>::kSharedBytes, stream, acts_map, weights_map, out,
                epilogue, static_cast<int>(s.nt), static_cast<int>(s.od), steps, tiles_m, tiles_n, plan.cm,
                plan.cn, plan.band, programmatic);
}

}  // namespace gemm_wgmma

/// @param acts [nt][id], weights [od][id], at multiples of 16 bytes @param out [nt][od]
/// @param programmatic starts before its predecessor in the stream has ended. Weights are read from then on, so that
/// the predecessor must not be what writes them; nothing else is.
inline Status launch_gemm_f16_wgmma(const __half* acts, const __half* weights, float* out,
                                    const GemmEpilogue& epilogue, const Shape& s, const GemmWgmmaPlan& plan,
                                    Stream& stream, bool programmatic = false) {
  using namespace gemm_wgmma;
  DeviceInfo hopper;
  hopper.executor = kDeviceExecutor;
  hopper.cc_major = 9;
  if (Status e = gemm_f16_wgmma_supported(s, hopper); !e.ok()) return e;
  const auto at = [](const void* p, unsigned bytes) {
    return reinterpret_cast<std::uintptr_t>(p) % bytes == 0;
  };
  if (!at(acts, 16) || !at(weights, 16)) {
    return Status::error("gemm_f16_wgmma: activations and weights must begin at multiples of 16 bytes");
  }
  if (s.od % 2 == 0 && (!at(out, 8) || !at(epilogue.residual, 8))) {
    return Status::error(
        "gemm_f16_wgmma: out and residual must begin at multiples of 8 bytes when od is even");
  }
  Status status =
      Status::error("gemm_f16_wgmma: no kernel for tiles of " + std::to_string(plan.bm) + " tokens and " +
                    std::to_string(plan.bn) + " weight rows with k in " + std::to_string(plan.ck) +
                    " parts; kGemmWgmmaKernels has those that there are");
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    const auto try_kernel = [&]<std::size_t K>(std::integral_constant<std::size_t, K>) {
      constexpr GemmWgmmaKernel k = kGemmWgmmaKernels[K];
      if (plan.bm != k.bm || plan.bn != k.bn || plan.ck != k.ck) return;
      (void)(status =
                 launch_tile<k.bm, k.bn, k.ck>(acts, weights, out, epilogue, s, plan, stream, programmatic));
    };
    (try_kernel(std::integral_constant<std::size_t, I>{}), ...);
  }
  (std::make_index_sequence<kGemmWgmmaKernels.size()>{});
  return status;
}

inline Status launch_gemm_f16_wgmma(const __half* acts, const __half* weights, float* out,
                                    const GemmEpilogue& epilogue, const Shape& s, Stream& stream,
                                    bool programmatic = false) {
  return launch_gemm_f16_wgmma(acts, weights, out, epilogue, s,
                               plan_gemm_f16_wgmma(s, multiprocessor_count()), stream, programmatic);
}

}  // namespace ladder
