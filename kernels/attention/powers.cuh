// What the attention kernels on tensor cores share: weights as powers of two, and pairs of halves.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels/device/cuda.cuh"

namespace ladder {

/// Weights are at most 2^14 when they are rounded to f16: what is 2^-28 of the largest still has all its digits.
inline constexpr float kWeightLog2 = 14.0f;

/// 2^x, 0 where that is below 2^-126: one instruction, good to 2^-22 (PTX ISA, ex2.approx).
__device__ __forceinline__ float power_of_two(float x) {
#if defined(__CUDACC__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

/// Two floats rounded to f16, the first in the lower half of the word.
__device__ __forceinline__ unsigned pack_halves(float a, float b) {
  const __half2 pair = __floats2half2_rn(a, b);
  unsigned word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

}  // namespace ladder
