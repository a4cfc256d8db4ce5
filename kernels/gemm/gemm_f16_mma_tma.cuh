// RUNG      gemm_f16_mma_tma: gemm_f16_mma's warps, and a warp beside them that has Hopper's copy engine fill the stages.
// PREV      gemm_f16_mma: its warps issue copies, compute their addresses, and wait for each other at every step
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T, then the epilogue; f16 operands, f32 sums
// LAYOUT    weights and acts row-major f16, out row-major f32; with ksplit > 1 f32 partials [ksplit][nt][od]; stages in
//           shared memory [STAGES][TN + TM][64] halves, swizzled by the copy engine as gemm_f16_mma swizzles them
// MAP       grid(units): block -> a unit; warps -> tiles of the unit; one more group of four warps, of which one thread
//           asks for copies
// NEEDS     sm_90a; id % 8 == 0, operands at multiples of 16 bytes (the launcher checks and says so); any nt, od
// TRAFFIC   weights 2*od*id B, acts 2*nt*id B, out 4*nt*od B; from L2 2*id*(od*ceil(nt/TN) + nt*ceil(od/TM)) B
// WORK      2*nt*od*id flop
// LOOK FOR  SASS: HMMA.16816.F32 and LDSM.16.M88.4 by turns, UTMALDG.2D, SYNCS instead of BAR; no LDL or STL in the loop
// EXPECT    four fifths of what mma.sync does on registers alone, from a few thousand tokens on
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=compute_90a,code=sm_90a chapters/05-tiled-gemm/tiled_gemm.cu -o
//           tiled_gemm
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/mbarrier.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/device/tma.cuh"
#include "kernels/device/wgmma.cuh"
#include "kernels/gemm/epilogue.cuh"
#include "kernels/gemm/gemm_f16_mma.cuh"
#include "kernels/gemm/split_k.cuh"

namespace ladder {

// ANCHOR: gemm_f16_mma_tma
template <class T>
__global__ void __launch_bounds__(T::THREADS + 128, 1)
    gemm_f16_mma_tma(const __grid_constant__ TensorMap weights_map,
                     const __grid_constant__ TensorMap acts_map, float* out, GemmEpilogue epilogue, int nt,
                     int od, int id, MmaUnits units) {
  constexpr int K16 = T::K16, STAGES = T::STAGES;
  static_assert(T::KS == 64, "a row of a stage is as wide as the copy engine's swizzle");
  // 1. The stages, and two barriers for each: `full` when the copy engine has brought all bytes, `empty` when all warps
  //    that read it are done.
  __shared__ std::uint64_t full[STAGES], empty[STAGES];
  unsigned char* stages = dynamic_shared<unsigned char>();
  stages += (1024 - reinterpret_cast<std::uintptr_t>(stages) % 1024) % 1024;  // [STAGES][TN + TM][64] halves
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, all_steps = (id + T::KS - 1) / T::KS;
  const MmaUnit unit = mma_unit<T>(units, static_cast<int>(blockIdx.x), all_steps);
  if (thread == 0) {
    prefetch_tensor_map(weights_map);
    prefetch_tensor_map(acts_map);
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], T::WARPS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are ready
  allow_next_kernel();
  wait_for_previous_kernel();

  int stage = 0;
  if (thread >= T::THREADS) {
    // 2. One thread asks for everything, as far ahead as there are stages. What hangs over a matrix becomes zeros.
    if constexpr (T::WARPS == 8) registers_decrease<24>();
    if (thread == T::THREADS) {
      unsigned parity = 1;  // the first wait for each stage returns at once
      for (int step = unit.step; step < unit.end; ++step) {
        unsigned char* const to = stages + stage * T::STAGE_BYTES;
        mbarrier_wait(&empty[stage], parity);
        mbarrier_arrive_expect_bytes(&full[stage], T::STAGE_BYTES);
        tensor_copy_2d(to, acts_map, unit.token, step * T::KS, &full[stage]);
        tensor_copy_2d(to + T::ACTS_BYTES, weights_map, unit.output, step * T::KS, &full[stage]);
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
  } else {
    // 3. The others multiply. No warp waits for another: those that share a tensor core drift apart, and one loads
    //    fragments while the other multiplies.
    if constexpr (T::WARPS == 8) registers_increase<240>();
    MmaWarp<T> warp(thread / 32, lane);
    unsigned parity = 0;
    mbarrier_wait(&full[0], parity);
    warp.load(0, stages, 0);
    warp.clear();
    for (int step = unit.step; step < unit.end; ++step) {
#pragma unroll
      for (int k16 = 0; k16 < K16; ++k16) {
        if (k16 + 1 < K16) {
          warp.load((k16 + 1) % 2, stages + stage * T::STAGE_BYTES, k16 + 1);
        } else if (step + 1 < unit.end) {
          if (lane == 0) mbarrier_arrive(&empty[stage]);  // all fragments of this stage are in registers
          if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
          }
          mbarrier_wait(&full[stage], parity);
          warp.load(0, stages + stage * T::STAGE_BYTES, 0);
        }
        warp.multiply(k16 % 2);
      }
    }
    warp.store(unit, lane, epilogue, out, nt, od);
  }
}
// ANCHOR_END: gemm_f16_mma_tma

inline Status gemm_f16_mma_tma_supported(Shape s, const DeviceInfo& device) {
  if (Status ok = gemm_f16_mma_supported(s); !ok.ok()) return ok;
  if (device.executor == Executor::gpu && device.cc_major == 9) return {};
  return Status::error(
      "gemm_f16_mma_tma: needs a GPU of compute capability 9.0: its copies of tiles are not emulated");
}

/// As launch_gemm_f16_mma_tile.
template <class T>
Status launch_gemm_f16_mma_tma_tile(const __half* weights, const __half* acts, float* out, Shape s,
                                    const GemmEpilogue& epilogue, int ksplit, float* workspace,
                                    Stream& stream, bool programmatic = false, int band = 8) {
  if (Status ok = gemm_f16_mma_supported(s); !ok.ok()) return ok;
  if (Status ok = detail::check_gemm_pointers(weights, acts); !ok.ok()) return ok;
  if (ksplit < 1 || (ksplit > 1 && workspace == nullptr)) {
    return Status::error("ksplit must be at least 1, and more than 1 needs a workspace");
  }
  MmaUnits units;
  if (Status ok = detail::divide_mma<T>(units, s, ksplit, band); !ok.ok()) return ok;
  const TensorMapOptions swizzled_128{TensorElement::f16, TensorSwizzle::bytes_128, true};
  TensorMap weights_map, acts_map;
  const auto size = [](long long n) { return static_cast<std::uint64_t>(n); };
  if (Status ok = make_tensor_map(weights_map, weights, size(s.od), size(s.id), T::TM, T::KS, swizzled_128);
      !ok.ok()) {
    return ok;
  }
  if (Status ok = make_tensor_map(acts_map, acts, size(s.nt), size(s.id), T::TN, T::KS, swizzled_128);
      !ok.ok()) {
    return ok;
  }
  const bool split = units.ksplit > 1;
  LaunchOptions options;
  options.programmatic = programmatic;
  if (Status ok = launch(options, gemm_f16_mma_tma<T>, dim3(static_cast<unsigned>(units.count())),
                         dim3(T::THREADS + 128), T::SHARED_BYTES + 1024, stream, weights_map, acts_map,
                         split ? workspace : out, split ? GemmEpilogue{} : epilogue, static_cast<int>(s.nt),
                         static_cast<int>(s.od), static_cast<int>(s.id), units);
      !ok.ok() || !split) {
    return ok;
  }
  return launch_split_k_reduce(workspace, out, epilogue, units.ksplit, s.nt, s.od, stream, true);
}

// ANCHOR: gemm_mma_tma_plan
using MmaTmaTiles = std::tuple<MmaTile<256, 128, 64, 4, 64, 64, 1>, MmaTile<128, 128, 64, 6, 64, 32, 1>,
                               MmaTile<128, 64, 64, 8, 32, 32, 1>, MmaTile<64, 64, 64, 8, 32, 32, 1>>;
inline constexpr detail::MmaTileCost kMmaTmaTileCosts[] = {
    {1620, 1620, 6490}, {900, 900, 3260}, {556, 556, 1870}, {407, 407, 1000}};

/// As gemm_f16_mma_plan, of MmaTmaTiles.
inline MmaPlan gemm_f16_mma_tma_plan(Shape s, int sms, int most_parts = kMostKSplit) {
  MmaPlan best{0, 1};
  double least = 0;
  detail::consider<std::tuple_element_t<0, MmaTmaTiles>>(best, least, 0, kMmaTmaTileCosts[0], s, sms,
                                                         most_parts);
  detail::consider<std::tuple_element_t<1, MmaTmaTiles>>(best, least, 1, kMmaTmaTileCosts[1], s, sms,
                                                         most_parts);
  detail::consider<std::tuple_element_t<2, MmaTmaTiles>>(best, least, 2, kMmaTmaTileCosts[2], s, sms,
                                                         most_parts);
  detail::consider<std::tuple_element_t<3, MmaTmaTiles>>(best, least, 3, kMmaTmaTileCosts[3], s, sms,
                                                         most_parts);
  return best;
}

/// Bytes of workspace that launch_gemm_f16_mma_tma can use at this shape.
inline std::size_t gemm_f16_mma_tma_workspace_bytes(Shape s, int sms) {
  return split_k_workspace_bytes(gemm_f16_mma_tma_plan(s, sms).ksplit, s.nt, s.od);
}
// ANCHOR_END: gemm_mma_tma_plan

/// As launch_gemm_f16_mma.
inline Status launch_gemm_f16_mma_tma(const __half* weights, const __half* acts, float* out, Shape s,
                                      const GemmEpilogue& epilogue, float* workspace, Stream& stream,
                                      bool programmatic = false) {
  if (Status ok = gemm_f16_mma_supported(s); !ok.ok()) return ok;
  const MmaPlan plan =
      gemm_f16_mma_tma_plan(s, multiprocessor_count(), workspace != nullptr ? kMostKSplit : 1);
  const auto with = [&](auto tile) {
    return launch_gemm_f16_mma_tma_tile<decltype(tile)>(weights, acts, out, s, epilogue, plan.ksplit,
                                                        workspace, stream, programmatic);
  };
  switch (plan.tile) {
    case 0:
      return with(std::tuple_element_t<0, MmaTmaTiles>());
    case 1:
      return with(std::tuple_element_t<1, MmaTmaTiles>());
    case 2:
      return with(std::tuple_element_t<2, MmaTmaTiles>());
    default:
      return with(std::tuple_element_t<3, MmaTmaTiles>());
  }
}

}  // namespace ladder
