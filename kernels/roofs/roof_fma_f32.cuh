// RUNG      roof_fma_f32: fused multiply-adds on registers only.  PREV roof_read: the other ceiling
// COMPUTES  out[thread] = sum over chains c of r[2 * kFmaPairs * iterations] where r[0] = start[c] and
//           r[k + 1] = r[k] * x[k % 2] + y[k % 2] in f32        LAYOUT operands [threads][4 + kChains]
// MAP       grid(blocks) block(128): every thread works alone on kChains independent values
// NEEDS     kChains in 1, 2, 4, 8 (the launcher checks and says so)
// TRAFFIC   none in the loop                WORK 2 FLOP * 2 * kFmaPairs * iterations * kChains * threads
// LOOK FOR  SASS: FFMA between two branches, almost nothing else; no LDL or STL
// EXPECT    four warps with one chain each wait for every result; many warps or many chains reach the peak
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/00-roofs/roofs.cu -o roofs
#pragma once

#include "kernels/roofs/roof_tile.cuh"

namespace ladder {

/// Pairs of steps in one turn of the loop: enough that its counter and branch cost nothing.
inline constexpr int kFmaPairs = 16;

constexpr double roof_fma_flop(int chains, int iterations, int blocks) {
  return 2.0 * 2 * kFmaPairs * iterations * chains * static_cast<double>(blocks) * kMathThreads;
}

// ANCHOR: roof_fma_f32
template <int kChains>
__global__ void __launch_bounds__(kMathThreads)
    roof_fma_f32(const float* __restrict__ operands, int iterations, float* __restrict__ out) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  const float* mine = operands + thread * (4ull + kChains);  // [4 + kChains]
  const float x0 = mine[0], y0 = mine[1], x1 = mine[2], y1 = mine[3];
  float value[kChains];
#pragma unroll
  for (int c = 0; c < kChains; ++c) value[c] = mine[4 + c];
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
#pragma unroll
    for (int pair = 0; pair < kFmaPairs; ++pair) {
      // Two different steps in turn, so that the operands keep changing.
#pragma unroll
      for (int c = 0; c < kChains; ++c) value[c] = fmaf(value[c], x0, y0);
#pragma unroll
      for (int c = 0; c < kChains; ++c) value[c] = fmaf(value[c], x1, y1);
    }
  }
  float total = value[0];
#pragma unroll
  for (int c = 1; c < kChains; ++c) total += value[c];
  out[thread] = total;
}
// ANCHOR_END: roof_fma_f32

/// @param operands [blocks * 128][4 + chains]: x0, y0, x1, y1, then the start values; |x| < 1 keeps them
/// bounded.
/// @param out [blocks * 128]
inline Status launch_roof_fma_f32(int chains, const float* operands, int iterations, float* out, int blocks,
                                  Stream& stream) {
  Status arguments = detail::check_math_arguments("roof_fma_f32", chains, iterations, blocks);
  if (!arguments.ok()) return arguments;
  const dim3 grid(static_cast<unsigned>(blocks)), block(kMathThreads);
  switch (chains) {
    case 1:
      return launch(roof_fma_f32<1>, grid, block, 0, stream, operands, iterations, out);
    case 2:
      return launch(roof_fma_f32<2>, grid, block, 0, stream, operands, iterations, out);
    case 4:
      return launch(roof_fma_f32<4>, grid, block, 0, stream, operands, iterations, out);
    default:
      return launch(roof_fma_f32<8>, grid, block, 0, stream, operands, iterations, out);
  }
}

}  // namespace ladder
