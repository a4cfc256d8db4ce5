// RUNG      roof_dp4a: four int8 products and their sum, on registers only.  PREV roof_fma_f32: one product
// COMPUTES  out[thread] = sum over chains c of n * (a[c] . b[0] + a[c] . b[1]) modulo 2^32, where "." is the
//           dot product of four signed bytes and n = kDp4aPairs * iterations
// LAYOUT    operands [threads][2 + kChains], four int8 in each int
// MAP       grid(blocks) block(128): every thread works alone on kChains independent sums
// NEEDS     kChains in 1, 2, 4, 8 (the launcher checks and says so)
// TRAFFIC   none in the loop                WORK 8 int8_op * 2 * kDp4aPairs * iterations * kChains * threads
// LOOK FOR  SASS: IDP.4A.S8.S8 between two branches, almost nothing else
// EXPECT    four times the operations of an FMA, at the rate at which this chip starts dp4a
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/00-roofs/roofs.cu -o roofs
#pragma once

#include "kernels/roofs/roof_tile.cuh"

namespace ladder {

inline constexpr int kDp4aPairs = 16;

constexpr double roof_dp4a_ops(int chains, int iterations, int blocks) {
  return 8.0 * 2 * kDp4aPairs * iterations * chains * static_cast<double>(blocks) * kMathThreads;
}

// ANCHOR: roof_dp4a
template <int kChains>
__global__ void __launch_bounds__(kMathThreads)
    roof_dp4a(const int* __restrict__ operands, int iterations, int* __restrict__ out) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int* mine = operands + thread * (2ull + kChains);  // [2 + kChains], four int8 in each int
  const int b0 = mine[0], b1 = mine[1];
  int a[kChains], sum[kChains];
#pragma unroll
  for (int c = 0; c < kChains; ++c) {
    a[c] = mine[2 + c];
    sum[c] = 0;
  }
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
#pragma unroll
    for (int pair = 0; pair < kDp4aPairs; ++pair) {
#pragma unroll
      for (int c = 0; c < kChains; ++c) sum[c] = __dp4a(a[c], b0, sum[c]);
#pragma unroll
      for (int c = 0; c < kChains; ++c) sum[c] = __dp4a(a[c], b1, sum[c]);
    }
  }
  // Unsigned, because the sums are meant to wrap around.
  unsigned total = 0;
#pragma unroll
  for (int c = 0; c < kChains; ++c) total += static_cast<unsigned>(sum[c]);
  out[thread] = static_cast<int>(total);
}
// ANCHOR_END: roof_dp4a

/// @param operands [blocks * 128][2 + chains], four signed bytes in each int
/// @param out [blocks * 128]
inline Status launch_roof_dp4a(int chains, const int* operands, int iterations, int* out, int blocks,
                               Stream& stream) {
  Status arguments = detail::check_math_arguments("roof_dp4a", chains, iterations, blocks);
  if (!arguments.ok()) return arguments;
  const dim3 grid(static_cast<unsigned>(blocks)), block(kMathThreads);
  switch (chains) {
    case 1:
      return launch(roof_dp4a<1>, grid, block, 0, stream, operands, iterations, out);
    case 2:
      return launch(roof_dp4a<2>, grid, block, 0, stream, operands, iterations, out);
    case 4:
      return launch(roof_dp4a<4>, grid, block, 0, stream, operands, iterations, out);
    default:
      return launch(roof_dp4a<8>, grid, block, 0, stream, operands, iterations, out);
  }
}

}  // namespace ladder
