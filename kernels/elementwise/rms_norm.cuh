// RUNG      rms_norm: a block per row, which stays in registers.  PREV none: this is the ground floor.
// COMPUTES  out[t][i] = x[t][i] / sqrt(mean over i of x[t][i]^2 + epsilon) * weight[i]   LAYOUT row-major f32
// MAP       grid(nt) block(256): block -> row, thread -> every 256th four of it; every 256th element, where d or an address
//           is no multiple of 16 bytes
// NEEDS     any nt >= 1, d >= 1; out must not overlap x
// TRAFFIC   x 4*nt*d B (of rows above 8192 elements, or read one by one, the rest a second time), weight 4*d B,
//           out 4*nt*d B     WORK 4*nt*d FLOP
// LOOK FOR  SASS: LDG.E.128 one after the other before the first FFMA, MUFU.RSQ or MUFU.SQRT once a thread, BAR.SYNC once
// EXPECT    latency, not bytes: a row of 3584 floats is 14 KB
// BUILD     part of the engine of chapters/09-qwen; tested by kernels/elementwise/test_elementwise.cpp
#pragma once

#include <cmath>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/elementwise/fours.cuh"

namespace ladder {

inline constexpr int kRmsNormThreads = 256;

// ANCHOR: rms_norm
/// @tparam V elements of a load
template <int V>
__global__ void __launch_bounds__(kRmsNormThreads) rms_norm(const float* x,                    // [nt][d]
                                                            const float* __restrict__ weight,  // [d]
                                                            float* out,                        // [nt][d]
                                                            int d, float epsilon) {
  allow_next_kernel();
  wait_for_previous_kernel();
  constexpr int WARPS = kRmsNormThreads / 32, HELD = 8, STEP = V * kRmsNormThreads;
  __shared__ float partial[WARPS];
  const int i0 = V * static_cast<int>(threadIdx.x);
  const float* row = x + static_cast<long long>(blockIdx.x) * d;
  float* to = out + static_cast<long long>(blockIdx.x) * d;

  // 1. The row, all loads before the first sum; then the sum of squares: threads, warps, block.
  Floats<V> held[HELD];
#pragma unroll
  for (int n = 0; n < HELD; ++n) {
    if (i0 + n * STEP < d) held[n] = Floats<V>::load(row + i0 + n * STEP);
  }
  float sum = 0.0f;
  const auto add = [&sum](const Floats<V>& f) {
#pragma unroll
    for (int k = 0; k < V; ++k) sum += f.v[k] * f.v[k];
  };
#pragma unroll
  for (int n = 0; n < HELD; ++n) {
    if (i0 + n * STEP < d) add(held[n]);
  }
  for (int i = i0 + HELD * STEP; i < d; i += STEP) add(Floats<V>::load(row + i));
  sum = warp_reduce_sum(sum);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();  // partial sums are written before any is read

  // 2. Every thread adds them in the same order.
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) total += partial[w];
  const float scale = 1.0f / sqrtf(total / static_cast<float>(d) + epsilon);

  // 3. Out.
  const auto put = [&](Floats<V> f, int i) {
    const Floats<V> w = Floats<V>::load(weight + i);
#pragma unroll
    for (int k = 0; k < V; ++k) f.v[k] = f.v[k] * scale * w.v[k];
    f.store(to + i);
  };
#pragma unroll
  for (int n = 0; n < HELD; ++n) {
    if (i0 + n * STEP < d) put(held[n], i0 + n * STEP);
  }
  for (int i = i0 + HELD * STEP; i < d; i += STEP) put(Floats<V>::load(row + i), i);
}
// ANCHOR_END: rms_norm

/// out[nt][d] = x / sqrt(mean(x^2) + epsilon) * weight[d], row by row. Root-mean-square layer normalisation:
/// https://arxiv.org/abs/1910.07467. Does not synchronise.
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
inline Status launch_rms_norm(const float* x, const float* weight, float* out, long long nt, int d,
                              float epsilon, Stream& stream, bool programmatic = false) {
  if (nt < 1 || d < 1) return Status::error("rms_norm: nt and d must be at least 1");
  LaunchOptions options;
  options.programmatic = programmatic;
  const int v = floats_at_a_time({x, weight, out}, {d});
  return launch(options, v == 4 ? rms_norm<4> : rms_norm<1>, dim3(static_cast<unsigned>(nt)),
                dim3(kRmsNormThreads), 0, stream, x, weight, out, d, epsilon);
}

}  // namespace ladder
