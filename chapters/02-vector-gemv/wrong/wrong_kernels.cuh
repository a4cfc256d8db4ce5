// Broken block-per-row kernels: one bug each, and the checker must reject them all. Grid od, block 64, nt
// = 1.
#pragma once

#include "kernels/device/cuda.cuh"
#include "kernels/device/reduce.cuh"

namespace ladder::wrong {

/// No barrier between writing the warps' partial sums and reading them: whoever reads first reads stale
/// memory.
__global__ void missing_barrier(const float* weights, const float* acts, float* out, int id) {
  __shared__ float partial[2];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float acc = 0.0f;
  // The second warp has the longer share, so that the mistake shows on any scheduler.
  const int begin = warp == 0 ? 0 : id / 4, end = warp == 0 ? id / 4 : id;
  for (int i = begin + lane; i < end; i += 32)
    acc += weights[static_cast<long long>(blockIdx.x) * id + i] * acts[i];
  const float sum = warp_reduce_sum(acc);
  if (lane == 0) partial[warp] = sum;
  if (threadIdx.x == 0) out[blockIdx.x] = partial[0] + partial[1];
}

/// A butterfly with four steps instead of five: sums 16 lanes and forgets the other half.
__global__ void short_butterfly(const float* weights, const float* acts, float* out, int id) {
  float acc = 0.0f;
  if (threadIdx.x < 32) {
    for (int i = static_cast<int>(threadIdx.x); i < id; i += 32) {
      acc += weights[static_cast<long long>(blockIdx.x) * id + i] * acts[i];
    }
    for (int offset = 8; offset > 0; offset /= 2) acc += __shfl_xor_sync(kAllLanes, acc, offset);
    if (threadIdx.x == 0) out[blockIdx.x] = acc;
  }
}

/// float4 loads with the tail rounded up instead of checked: reads up to three floats past the row.
__global__ void rounds_the_tail_up(const float* weights, const float* acts, float* out, int id) {
  float acc = 0.0f;
  if (threadIdx.x < 32) {
    for (int i = 4 * static_cast<int>(threadIdx.x); i < id; i += 128) {
      for (int c = 0; c < 4; ++c)
        acc += weights[static_cast<long long>(blockIdx.x) * id + i + c] * acts[i + c];
    }
    acc = warp_reduce_sum(acc);
    if (threadIdx.x == 0) out[blockIdx.x] = acc;
  }
}

}  // namespace ladder::wrong
