// Probes with one mistake each. The checks of this chapter must reject every one: a ceiling that was measured
// by a kernel that skips work is worse than none.
#pragma once

#include "kernels/device/mma.cuh"
#include "kernels/roofs/roof_tile.cuh"

namespace ladder::wrong {

/// Leaves out the last tile.
static __global__ void reads_one_tile_less(const uint4* data, unsigned long long tiles, unsigned* sum) {
  unsigned total = 0;
  for (unsigned long long tile = blockIdx.x; tile + 1 < tiles; tile += gridDim.x) {
    const uint4 word = data[tile * kStreamThreads + threadIdx.x];
    total += word.x + word.y + word.z + word.w;
  }
  atomicAdd(sum, total);
}

/// Reads the first tile again and again: much faster, and the right number of bytes by its own account.
static __global__ void reads_one_tile_always(const uint4* data, unsigned long long tiles, unsigned* sum) {
  unsigned total = 0;
  for (unsigned long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const uint4 word = data[threadIdx.x];
    total += word.x + word.y + word.z + word.w;
  }
  atomicAdd(sum, total);
}

/// Makes half of the steps.
static __global__ void makes_half_of_the_steps(const float* operands, int pairs, float* out) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  const float* mine = operands + thread * 5ull;  // one chain
  float value = mine[4];
  for (int i = 0; i < pairs; ++i) value = fmaf(value, mine[0], mine[1]);
  out[thread] = value;
}

/// Treats the signed bytes as unsigned.
static __global__ void takes_bytes_as_unsigned(const int* operands, int pairs, int* out) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int* mine = operands + thread * 3ull;  // one chain
  unsigned sum = 0;
  for (int i = 0; i < pairs; ++i) {
    for (int b = 0; b < 2; ++b)
      sum = __dp4a(static_cast<unsigned>(mine[2]), static_cast<unsigned>(mine[b]), sum);
  }
  out[thread] = static_cast<int>(sum);
}

/// Exchanges two registers of A's fragment: rows 8 to 15 of the first half of k with rows 0 to 7 of the
/// second.
static __global__ void exchanges_fragment_registers(const std::uint32_t* a, const std::uint32_t* b, int steps,
                                                    float* out) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float sum[4] = {};
  std::uint32_t b_fragment[2];
  load_mma_b(b_fragment, b, lane);
  for (int step = 0; step < steps; ++step) {
    std::uint32_t right[4];
    load_mma_a(right, a + (step % 2) * kMmaRows * kMmaWords, lane);
    const std::uint32_t exchanged[4] = {right[0], right[2], right[1], right[3]};
    mma_m16n8k16_f16(sum, exchanged, b_fragment);
  }
  store_mma_d(out, sum, lane);
}

/// Multiplies by the same A in every step.
static __global__ void uses_one_operand_only(const std::uint32_t* a, const std::uint32_t* b, int steps,
                                             int* out) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int sum[4] = {};
  std::uint32_t a_fragment[4], b_fragment[2];
  load_mma_a(a_fragment, a, lane);
  load_mma_b(b_fragment, b, lane);
  for (int step = 0; step < steps; ++step) mma_m16n8k32_s8(sum, a_fragment, b_fragment);
  store_mma_d(out, sum, lane);
}

}  // namespace ladder::wrong
