// RUNG      split_k_reduce: sums of a product whose k was divided among blocks, added up.  PREV none: a product in one
//           piece needs no second kernel
// COMPUTES  out[nt][od] = epilogue(partials[0] + partials[1] + ... + partials[ksplit - 1])
// LAYOUT    partials [ksplit][nt][od] f32, out row-major f32
// MAP       grid(ceil(nt*od/1024)) block(256): thread -> four neighbouring outputs
// NEEDS     any nt, od, ksplit >= 1 (the launcher checks and says so)
// TRAFFIC   4*ksplit*nt*od B read, 4*nt*od B written; the product wrote as much as is read
// WORK      ksplit*nt*od flop
// LOOK FOR  SASS: LDG.E.128 where od % 4 == 0
// EXPECT    2-4 us beside the product, so it pays only where blocks would otherwise be missing
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/05-tiled-gemm/tiled_gemm.cu -o tiled_gemm
#pragma once

#include <cstddef>
#include <cstdint>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/gemm/epilogue.cuh"

namespace ladder {

inline constexpr int kMostKSplit = 16;  ///< parts of k; more would spend the time on adding them up

/// Bytes of workspace that a product with `ksplit` parts of k needs.
inline std::size_t split_k_workspace_bytes(int ksplit, long long nt, long long od) {
  return ksplit > 1 ? sizeof(float) * static_cast<std::size_t>(ksplit) * static_cast<std::size_t>(nt * od)
                    : 0;
}

// ANCHOR: split_k_reduce
/// @param vectors whether four neighbours are one access: od % 4 == 0 and out at a multiple of 16 bytes
template <bool VECTORS>
__global__ void __launch_bounds__(256)
    split_k_reduce(const float* partials, float* out, GemmEpilogue epilogue, int ksplit, long long nt,
                   long long od) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const long long count = nt * od, first = 4 * (static_cast<long long>(blockIdx.x) * 256 + threadIdx.x);
  if (first >= count) return;
  float sum[4] = {};
  // z ascending: the same bits in every run, which atomic additions would not give.
  if constexpr (VECTORS) {
    for (int z = 0; z < ksplit; ++z) {
      const float4 v = *reinterpret_cast<const float4*>(partials + z * count + first);
      sum[0] += v.x;
      sum[1] += v.y;
      sum[2] += v.z;
      sum[3] += v.w;
    }
    const long long token = first / od, row = first % od;  // four of one token, as od % 4 == 0
    float4 v;
    v.x = apply_epilogue(epilogue, sum[0], token, row, od);
    v.y = apply_epilogue(epilogue, sum[1], token, row + 1, od);
    v.z = apply_epilogue(epilogue, sum[2], token, row + 2, od);
    v.w = apply_epilogue(epilogue, sum[3], token, row + 3, od);
    *reinterpret_cast<float4*>(out + first) = v;
  } else {
    for (int i = 0; i < 4 && first + i < count; ++i) {
      for (int z = 0; z < ksplit; ++z) sum[i] += partials[z * count + first + i];
      out[first + i] = apply_epilogue(epilogue, sum[i], (first + i) / od, (first + i) % od, od);
    }
  }
}
// ANCHOR_END: split_k_reduce

/// @param partials [ksplit][nt][od], at a multiple of 16 bytes
/// @param programmatic starts before the product that writes the partials has ended, and waits for it on the device
inline Status launch_split_k_reduce(const float* partials, float* out, const GemmEpilogue& epilogue,
                                    int ksplit, long long nt, long long od, Stream& stream,
                                    bool programmatic = false) {
  if (ksplit < 1 || nt < 1 || od < 1) {
    return Status::error("split_k_reduce: ksplit, nt and od must all be at least 1");
  }
  if (reinterpret_cast<std::uintptr_t>(partials) % 16 != 0) {
    return Status::error("split_k_reduce: the workspace must begin at a multiple of 16 bytes");
  }
  const bool vectors = od % 4 == 0 && reinterpret_cast<std::uintptr_t>(out) % 16 == 0;
  LaunchOptions options;
  options.programmatic = programmatic;
  const dim3 grid(static_cast<unsigned>((nt * od + 1023) / 1024)), block(256);
  return launch(options, vectors ? split_k_reduce<true> : split_k_reduce<false>, grid, block, 0, stream,
                partials, out, epilogue, ksplit, nt, od);
}

}  // namespace ladder
