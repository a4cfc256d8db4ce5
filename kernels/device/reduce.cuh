// Sums across the lanes of a warp and across the warps of a block.
#pragma once

#include "kernels/device/cuda.cuh"

namespace ladder {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// ANCHOR: warp_reduce_sum
/// Butterfly sum: after step k every lane holds the sum of 2^k lanes, so after five steps all hold the total,
/// and all hold the same bits because every lane adds the same pairs. All 32 lanes must call it.
__device__ inline float warp_reduce_sum(float v) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(kAllLanes, v, offset);
  return v;
}
// ANCHOR_END: warp_reduce_sum

}  // namespace ladder
