// RUNG      gemm_f16_wgmma: Hopper's own instructions.  PREV gemm_f16_mma: mma.sync reaches 63 % of the tensor cores
// COMPUTES  out[nt][od] = epilogue(acts[nt][id] . weights[od][id]^T), f16 operands, f32 sums
// LAYOUT    acts, weights row-major f16, out row-major f32; ring in shared memory [stages]: acts [128][64] and
//           weights [BN][64] halves with the 128-byte swizzle
// MAP       cluster of CM * CK blocks -> CM * 128 tokens x BN rows, k in CK parts; block(384): four warps that load,
//           two groups of four that multiply 64 tokens x BN rows each; as many clusters as run at once, and each
//           takes every so-manyth tile
// NEEDS     sm_90a; id % 8 == 0, operands at multiples of 16 bytes (the launcher checks and says so), any nt, od >= 1
// TRAFFIC   weights 2*od*id B, acts 2*nt*id B, out 4*nt*od B     WORK 2*nt*od*id FLOP
// LOOK FOR  SASS: HGMMA.64x256x16.F32 by fours, UTMALDG.2D.MULTICAST, SYNCS; no LDS beside them, no LDL or STL
// EXPECT    twice gemm_f16_mma's rate where k is long; at 512 tokens and 896 rows the launch and the first loads
//           take longer than the product
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=compute_90a,code=sm_90a chapters/05-tiled-gemm/tiled_gemm.cu -o
//           tiled_gemm
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

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

inline constexpr int BM = 128;          ///< tokens of a block's tile
inline constexpr int KS = 64;           ///< k of a stage: 128 bytes, as wide as the swizzle
inline constexpr int kMultipliers = 2;  ///< groups of four warps, 64 tokens each
inline constexpr int kThreads = 128 * (1 + kMultipliers);
inline constexpr int kMostStages = 8;
inline constexpr int kSharedLimit = 227 * 1024;  ///< of a block on compute capability 9.0

/// Shared memory of a block.
template <int BN>
struct Tile {
  static constexpr int kActsBytes = BM * KS * 2, kWeightsBytes = BN * KS * 2;
  static constexpr int kStageBytes = kActsBytes + kWeightsBytes;
  /// The ring begins at a multiple of 1024, which costs up to that much; two barriers a stage stand behind it.
  static constexpr int kStages =
      std::min(kMostStages, (kSharedLimit - 1024 - 2 * kMostStages * 8) / kStageBytes);
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + 2 * kMostStages * 8;
  static_assert(kStages >= 2 && kStageBytes % 1024 == 0 && BN % 32 == 0);
};

}  // namespace gemm_wgmma

/// How a product is divided.
struct GemmWgmmaPlan {
  int bn = 256;  ///< weight rows of a tile
  int cm = 1;    ///< blocks of a cluster that share the weights of their tiles
  int ck = 1;    ///< blocks of a cluster that share a tile's k
  int band = 8;  ///< tiles along the tokens that are worked on together, for L2

  bool operator==(const GemmWgmmaPlan&) const = default;
};

// ANCHOR: gemm_f16_wgmma_multiply
/// One of the groups that multiply: waits for stages, starts their wgmmas, and gives a stage back when the next
/// one's have started, so that the tensor cores always have work queued.
template <int BN>
__device__ __forceinline__ void gemm_wgmma_sums(float (&d)[BN / 2], const unsigned char* ring,
                                                std::uint64_t* full, std::uint32_t empty, bool release,
                                                int group, int steps, int signal, int& slot,
                                                unsigned& parity) {
  using T = gemm_wgmma::Tile<BN>;
  const std::uint64_t acts = wgmma_descriptor_128b(ring + group * 64 * 128);
  const std::uint64_t weights = wgmma_descriptor_128b(ring + T::kActsBytes);
  int before = 0;
  for (int step = 0; step < steps; ++step) {
    if (step == signal) named_barrier_arrive(1, 128 * gemm_wgmma::kMultipliers);
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
/// @param inbox shared memory that nobody needs any more, [CK][slice][256] float4 @param thread 0..255
template <int BN, int CK>
__device__ __forceinline__ void gemm_wgmma_add_parts(float (&d)[BN / 2], unsigned char* inbox, int part,
                                                     int cm, int thread) {
  constexpr int kSenders = 128 * gemm_wgmma::kMultipliers, kSlice = (BN / 8 + CK - 1) / CK;
  static_assert(CK * kSlice * kSenders * 16 <=
                gemm_wgmma::Tile<BN>::kStages * gemm_wgmma::Tile<BN>::kStageBytes);
  cluster_barrier_relaxed();  // every block of the cluster is done with its ring
  const unsigned me = cluster_block() % static_cast<unsigned>(cm);
#pragma unroll
  for (int owner = 0; owner < CK; ++owner) {
    const std::uint32_t there = shared_address_in(static_cast<unsigned>(owner * cm) + me, inbox) +
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
        const int i = 4 * (chunk + g) + 2 * half;
        d[i] *= scale, d[i + 1] *= scale;
      }
      // In this order, and only where it is given: adding 0 would turn -0 into 0.
      if (e.bias != nullptr) {
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          const int column = 8 * (chunk + g);
          if (column < high) d[4 * (chunk + g) + 2 * half] += bias[column];
          if (column + 1 < high) d[4 * (chunk + g) + 2 * half + 1] += bias[column + 1];
        }
      }
      if (e.residual != nullptr) {
#pragma unroll
        for (int g = 0; g < 4; ++g) {
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
/// @tparam BN weight rows of a tile @tparam CK parts of k @param steps of 64 k @param tiles_m of a cluster's cm * 128 tokens
/// @param tiles_n of BN rows
template <int BN, int CK>
__global__ void __launch_bounds__(gemm_wgmma::kThreads, 1)
    gemm_f16_wgmma(const __grid_constant__ TensorMap acts_map, const __grid_constant__ TensorMap weights_map,
                   float* out, GemmEpilogue epilogue, int nt, int od, int steps, int tiles_m, int tiles_n,
                   int cm, int band, int skew) {
  using namespace gemm_wgmma;
  using T = Tile<BN>;
  // 1. The ring, and two barriers for each of its stages: `full` when the copy engine has brought all bytes, `empty`
  //    when all warps that read it are done, in this block and in those that get the same weights.
  unsigned char* ring = dynamic_shared<unsigned char>();
  ring += (1024 - reinterpret_cast<std::uintptr_t>(ring) % 1024) % 1024;  // [kStages][acts | weights]
  auto* full = reinterpret_cast<std::uint64_t*>(ring + T::kStages * T::kStageBytes);  // [kMostStages]
  auto* empty = full + kMostStages;                                                   // [kMostStages]
  const int blocks = cm * CK, rank = static_cast<int>(blockIdx.x) % blocks;
  const int mine = rank % cm, part = rank / cm;  // 0..cm-1: tokens; 0..ck-1: k
  if (threadIdx.x == 0) {
    prefetch_tensor_map(acts_map);
    prefetch_tensor_map(weights_map);
    for (int s = 0; s < T::kStages; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], static_cast<unsigned>(4 * kMultipliers * cm));
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  cluster_barrier_relaxed();  // copies of other blocks may come from here on

  const int clusters = static_cast<int>(gridDim.x) / blocks, units = tiles_m * tiles_n;
  const int begin = static_cast<int>(static_cast<long long>(steps) * part / CK);
  const int end = static_cast<int>(static_cast<long long>(steps) * (part + 1) / CK);
  const int role = static_cast<int>(threadIdx.x) / 128;  // 0: loads, 1 and 2: multiply

  if (role == 0) {
    // 2. One thread asks for everything. Tokens are this block's; of the weights it asks for its share of the rows,
    //    for all blocks of the cluster that need them.
    registers_decrease<40>();
    if (threadIdx.x == 0) {
      const unsigned mask = ((1u << cm) - 1) << (part * cm);
      const int share = BN / cm;
      int slot = 0;
      unsigned parity = 1;
      int m, n;
      const auto load_weights = [&](int at, int step) {
        unsigned char* to = ring + at * T::kStageBytes + T::kActsBytes + mine * share * KS * 2;
        if (cm > 1) {
          tensor_copy_2d_multicast(to, weights_map, n * BN + mine * share, step * KS, &full[at], mask);
        } else {
          tensor_copy_2d(to, weights_map, n * BN, step * KS, &full[at]);
        }
      };
      const auto load_acts = [&](int at, int step) {
        tensor_copy_2d(ring + at * T::kStageBytes, acts_map, (m * cm + mine) * BM, step * KS, &full[at]);
      };
      int unit = static_cast<int>(blockIdx.x) / blocks;
      if (unit < units) {
        // The weights do not depend on the kernel before this one: fill the ring with them while that one ends.
        gemm_wgmma_place(unit, tiles_m, tiles_n, band, m, n);
        const int lead = min(T::kStages, end - begin);
        for (int s = 0; s < lead; ++s) {
          mbarrier_arrive_expect_bytes(&full[s], T::kStageBytes);
          load_weights(s, begin + s);
        }
        wait_for_previous_kernel();
        for (int s = 0; s < lead; ++s) load_acts(s, begin + s);
        int step = begin + lead;
        slot = lead % T::kStages;
        if (lead == T::kStages) parity ^= 1;
        while (true) {
          for (; step < end; ++step) {
            mbarrier_wait(&empty[slot], parity);
            mbarrier_arrive_expect_bytes(&full[slot], T::kStageBytes);
            load_weights(slot, step);
            load_acts(slot, step);
            if (++slot == T::kStages) {
              slot = 0;
              parity ^= 1;
            }
          }
          unit += clusters;
          if (unit >= units) break;
          gemm_wgmma_place(unit, tiles_m, tiles_n, band, m, n);
          step = begin;
        }
      }
      allow_next_kernel();
    }
    __syncwarp();
    if (CK > 1) cluster_barrier_relaxed();
    cluster_barrier_relaxed();
  } else {
    // 3. Two groups of four warps multiply.
    registers_increase<232>();
    const int group = role - 1, thread = static_cast<int>(threadIdx.x) - 128;  // 0..255
    const int warp = thread / 32 % 4, lane = thread % 32;
    // Lane i of each warp tells block i of those that share weights.
    const bool release = lane < cm;
    const std::uint32_t empty_there =
        shared_address_in(static_cast<unsigned>(part * cm + (release ? lane : 0)), empty);
    int slot = 0;
    unsigned parity = 0;
    float d[BN / 2];  // this lane's sums: 64 tokens x BN rows among 128 lanes
    wait_for_previous_kernel();
    int signal = group == 0 && skew > 0 ? min(skew, end - begin - 1) : -1;
    if (group == 1 && skew > 0) named_barrier(1, 128 * kMultipliers);
    for (int unit = static_cast<int>(blockIdx.x) / blocks; unit < units; unit += clusters) {
      gemm_wgmma_sums<BN>(d, ring, full, empty_there, release, group, end - begin, signal, slot, parity);
      signal = -1;
      int m, n;
      gemm_wgmma_place(unit, tiles_m, tiles_n, band, m, n);
      const int token = (m * cm + mine) * BM + group * 64 + warp * 16 + lane / 4;
      const int row = n * BN + lane % 4 * 2;
      int low = 0, high = od - row;
      if constexpr (CK > 1) {
        // 4. Parts of k: each block of the cluster adds up its share of the columns. There is one tile a cluster
        //    then, so that the ring is free.
        constexpr int kColumns = (BN / 8 + CK - 1) / CK * 8;
        gemm_wgmma_add_parts<BN, CK>(d, ring, part, cm, thread);
        low = part * kColumns;
        high = min(high, low + kColumns);
      }
      // 5. Out, while the loads of the next tile go on.
      if (epilogue.bias != nullptr || epilogue.residual != nullptr || epilogue.row_scale != nullptr) {
        gemm_wgmma_finish<BN>(d, epilogue, token, row, nt, od, low, high);
      }
      gemm_wgmma_store<BN>(d, out, token, row, nt, od, low, high);
    }
    // No block ends while others still arrive at its barriers.
    if (CK == 1) cluster_barrier_relaxed();
  }
}
// ANCHOR_END: gemm_f16_wgmma

/// Clusters of `blocks` blocks that run at once, where every block fills a multiprocessor. Multiprocessors come in
/// groups of 16 or 18 that a cluster cannot cross, so that large clusters leave some of them idle.
constexpr int gemm_wgmma_clusters(int sms, int blocks) {
  if (blocks <= 2) return sms / blocks;
  return std::max(1, blocks <= 4 ? (sms - 2) / blocks : sms / 8 * 8 / blocks);
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

// ANCHOR: gemm_f16_wgmma_plan
/// The plan with the fewest clocks by a model of what a step of 64 k costs: the tensor cores (4 clocks a weight row),
/// shared memory (128 bytes a clock, read by wgmma and written by the copy engine) or L2, whichever is most.
inline GemmWgmmaPlan plan_gemm_f16_wgmma(const Shape& s, int sms) {
  const int steps = static_cast<int>((s.id + 63) / 64);
  GemmWgmmaPlan best;
  double least = 0;
  for (const int bn : {256, 224, 192, 160, 128, 96, 64}) {
    for (const int cm : {1, 2, 4}) {
      if (cm > 1 && s.nt <= 128LL * (cm / 2)) continue;  // half of the cluster would have no tokens
      for (const int ck : {1, 2, 4}) {
        if (cm * ck > 8 || steps < 2 * ck) continue;
        const int slots = gemm_wgmma_clusters(sms, cm * ck);
        const long long tiles = (s.nt + 128LL * cm - 1) / (128LL * cm) * ((s.od + bn - 1) / bn);
        const long long rounds = (tiles + slots - 1) / slots;
        const double busy = static_cast<double>(std::min<long long>(tiles, slots)) * cm * ck;
        const double tensor = 4.0 * bn;
        const double shared = (8.0 * (2048 + 32 * bn) + 128.0 * (128 + bn)) / 128;
        const double l2 = 128.0 * (128 + static_cast<double>(bn) / cm) * busy / (28.0 * sms);
        const double step = std::max({tensor, shared, l2});
        const double store = 4.0 * bn + (ck > 1 ? 1500.0 + 4.0 * bn : 0.0);
        const double clocks = static_cast<double>(rounds) * ((steps + ck - 1) / ck * step + store / ck);
        if (least == 0 || clocks < least) {
          least = clocks;
          best = {bn, cm, ck, std::max(1, 8 / cm * 2)};
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
template <int BN, int CK>
int resident_clusters(int blocks) {
  static int known[9] = {};
  if (known[blocks] == 0) {
    cudaLaunchAttribute size{};
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim.x = static_cast<unsigned>(blocks);
    size.val.clusterDim.y = size.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = Tile<BN>::kSharedBytes;
    config.attrs = &size;
    config.numAttrs = 1;
    int n = 0;
    LADDER_CUDA(cudaFuncSetAttribute(gemm_f16_wgmma<BN, CK>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     Tile<BN>::kSharedBytes));
    LADDER_CUDA(cudaOccupancyMaxActiveClusters(&n, gemm_f16_wgmma<BN, CK>, &config));
    known[blocks] = n;
  }
  return known[blocks];
}
#else
template <int BN, int CK>
int resident_clusters(int) {
  return 1;
}
#endif

template <int BN, int CK>
Status launch_tile(const __half* acts, const __half* weights, float* out, const GemmEpilogue& epilogue,
                   const Shape& s, const GemmWgmmaPlan& plan, int skew, Stream& stream, bool programmatic) {
  const int blocks = plan.cm * CK, steps = static_cast<int>((s.id + KS - 1) / KS);
  if ((plan.cm != 1 && plan.cm != 2 && plan.cm != 4) || blocks > 8 || CK > steps || BN / plan.cm % 8 != 0 ||
      plan.band < 1) {
    return Status::error(
        "gemm_f16_wgmma: a plan of bn " + std::to_string(BN) + ", cm " + std::to_string(plan.cm) + ", ck " +
        std::to_string(CK) + ", band " + std::to_string(plan.band) +
        "; cm is 1, 2 or 4, cm * ck at most 8, ck at most the steps of 64 k, band at least 1");
  }
  const TensorMapOptions options{TensorElement::f16, TensorSwizzle::bytes_128, true};
  TensorMap acts_map, weights_map;
  const auto rows = [](long long n) { return static_cast<std::uint64_t>(n); };
  if (Status e = make_tensor_map(acts_map, acts, rows(s.nt), rows(s.id), BM, KS, options); !e.ok()) return e;
  const auto share = static_cast<unsigned>(BN / plan.cm);
  if (Status e = make_tensor_map(weights_map, weights, rows(s.od), rows(s.id), share, KS, options); !e.ok())
    return e;
  const int tiles_m = static_cast<int>((s.nt + BM * plan.cm - 1) / (BM * plan.cm));
  const int tiles_n = static_cast<int>((s.od + BN - 1) / BN);
  const long long units = static_cast<long long>(tiles_m) * tiles_n;
  // Parts of k are added up in the ring's memory, so that a cluster has one tile then.
  const long long clusters =
      CK > 1 ? units : std::min<long long>(units, std::max(1, resident_clusters<BN, CK>(blocks)));
  if (units * blocks > (1LL << 30)) return Status::error("gemm_f16_wgmma: more than 2^30 blocks");
  LaunchOptions launch_options;
  launch_options.programmatic = programmatic;
  launch_options.cluster_blocks = static_cast<unsigned>(blocks);
  return launch(launch_options, gemm_f16_wgmma<BN, CK>, dim3(static_cast<unsigned>(clusters * blocks)),
                dim3(kThreads), Tile<BN>::kSharedBytes, stream, acts_map, weights_map, out, epilogue,
                static_cast<int>(s.nt), static_cast<int>(s.od), steps, tiles_m, tiles_n, plan.cm, plan.band,
                skew);
}

}  // namespace gemm_wgmma

/// @param acts [nt][id], weights [od][id], at multiples of 16 bytes @param out [nt][od]
/// @param programmatic starts before its predecessor in the stream has ended: only weights are read until then
inline Status launch_gemm_f16_wgmma(const __half* acts, const __half* weights, float* out,
                                    const GemmEpilogue& epilogue, const Shape& s, const GemmWgmmaPlan& plan,
                                    Stream& stream, bool programmatic = false, int skew = 0) {
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
  const auto launch_parts = [&](auto bn) -> Status {
    constexpr int BN = decltype(bn)::value;
    switch (plan.ck) {
      case 1:
        return launch_tile<BN, 1>(acts, weights, out, epilogue, s, plan, skew, stream, programmatic);
      case 2:
        return launch_tile<BN, 2>(acts, weights, out, epilogue, s, plan, skew, stream, programmatic);
      case 4:
        return launch_tile<BN, 4>(acts, weights, out, epilogue, s, plan, skew, stream, programmatic);
      default:
        return Status::error("gemm_f16_wgmma: k in " + std::to_string(plan.ck) +
                             " parts; allowed are 1, 2 and 4");
    }
  };
  switch (plan.bn) {
    case 64:
      return launch_parts(std::integral_constant<int, 64>{});
    case 96:
      return launch_parts(std::integral_constant<int, 96>{});
    case 128:
      return launch_parts(std::integral_constant<int, 128>{});
    case 160:
      return launch_parts(std::integral_constant<int, 160>{});
    case 192:
      return launch_parts(std::integral_constant<int, 192>{});
    case 224:
      return launch_parts(std::integral_constant<int, 224>{});
    case 256:
      return launch_parts(std::integral_constant<int, 256>{});
    default:
      return Status::error("gemm_f16_wgmma: no tile of " + std::to_string(plan.bn) +
                           " weight rows; there are 64, 96, 128, 160, 192, 224 and 256");
  }
}

inline Status launch_gemm_f16_wgmma(const __half* acts, const __half* weights, float* out,
                                    const GemmEpilogue& epilogue, const Shape& s, Stream& stream,
                                    bool programmatic = false) {
  return launch_gemm_f16_wgmma(acts, weights, out, epilogue, s,
                               plan_gemm_f16_wgmma(s, multiprocessor_count()), stream, programmatic);
}

}  // namespace ladder
