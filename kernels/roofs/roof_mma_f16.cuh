// RUNG      roof_mma_f16: f16 tensor-core products on registers only.  PREV roof_fma_f32: a product per lane
// COMPUTES  out[warp][16][8] = n * sum over chains c of (A[0] + A[1]) . B[c] in f32, with the warp's own A
//           and B and n = kMmaPairs * iterations
// LAYOUT    a [sets][2][16][8], b [sets][kChains][8][8] words of two halves; warp w uses set w % sets
// MAP       grid(blocks) block(128): every warp works alone on kChains independent 16x8 sums
// NEEDS     sm_80; kChains in 1, 2, 4, 8; sets >= 1 (the launcher checks and says so)
// TRAFFIC   none in the loop                WORK 4096 FLOP * 2 * kMmaPairs * iterations * kChains * warps
// LOOK FOR  SASS: HMMA.16816.F32 between two branches, almost nothing else; no LDL or STL
// EXPECT    on Hopper about 63 % of the datasheet's peak: only wgmma reaches the rest
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/00-roofs/roofs.cu -o roofs
#pragma once

#include "kernels/device/mma.cuh"
#include "kernels/roofs/roof_tile.cuh"

namespace ladder {

constexpr double roof_mma_f16_flop(int chains, int iterations, int blocks) {
  return 4096.0 * 2 * kMmaPairs * iterations * chains * static_cast<double>(blocks) * (kMathThreads / 32);
}

// ANCHOR: roof_mma_f16
template <int kChains>
__global__ void __launch_bounds__(kMathThreads)
    roof_mma_f16(const std::uint32_t* __restrict__ a, const std::uint32_t* __restrict__ b, int sets,
                 int iterations, float* __restrict__ out) {
  const int lane = static_cast<int>(threadIdx.x % 32);                              // 0..31
  const int warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);  // 0..4*blocks-1
  const int set = warp % sets;
  // 1. All operands go into registers once.
  std::uint32_t a_fragment[2][4], b_fragment[kChains][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) load_mma_a(a_fragment[i], a + (set * 2 + i) * kMmaRows * kMmaWords, lane);
#pragma unroll
  for (int c = 0; c < kChains; ++c) {
    load_mma_b(b_fragment[c], b + (set * kChains + c) * kMmaColumns * kMmaWords, lane);
  }
  float sum[kChains][4] = {};
  // 2. Neighbouring instructions belong to different chains, so none waits for the one before it.
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
#pragma unroll
    for (int step = 0; step < 2 * kMmaPairs; ++step) {
#pragma unroll
      for (int c = 0; c < kChains; ++c) mma_m16n8k16_f16(sum[c], a_fragment[step % 2], b_fragment[c]);
    }
  }
  // 3. Every sum goes into the output: what nobody reads, the compiler may leave out.
  float total[4] = {};
#pragma unroll
  for (int c = 0; c < kChains; ++c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] += sum[c][i];
  }
  store_mma_d(out + static_cast<long long>(warp) * kMmaRows * kMmaColumns, total, lane);
}
// ANCHOR_END: roof_mma_f16

/// @param a [sets][2][16][8] @param b [sets][chains][8][8] words of two halves
/// @param out [blocks * 4][16][8]
inline Status launch_roof_mma_f16(int chains, const std::uint32_t* a, const std::uint32_t* b, int sets,
                                  int iterations, float* out, int blocks, Stream& stream) {
  Status arguments = detail::check_math_arguments("roof_mma_f16", chains, iterations, blocks);
  if (!arguments.ok()) return arguments;
  if (sets < 1) return Status::error("roof_mma_f16: at least 1 operand set is needed");
  const dim3 grid(static_cast<unsigned>(blocks)), block(kMathThreads);
  switch (chains) {
    case 1:
      return launch(roof_mma_f16<1>, grid, block, 0, stream, a, b, sets, iterations, out);
    case 2:
      return launch(roof_mma_f16<2>, grid, block, 0, stream, a, b, sets, iterations, out);
    case 4:
      return launch(roof_mma_f16<4>, grid, block, 0, stream, a, b, sets, iterations, out);
    default:
      return launch(roof_mma_f16<8>, grid, block, 0, stream, a, b, sets, iterations, out);
  }
}

}  // namespace ladder
