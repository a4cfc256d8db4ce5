// What a matrix product's sums become on their way out. All kernels for many tokens do it the same way and in one
// order, so that they can stand in for each other.
#pragma once

#include "kernels/device/cuda.cuh"

namespace ladder {

/// out[t][r] = sum * row_scale[t] + bias[r] + residual[t][r], each only where it is given.
struct GemmEpilogue {
  const float* bias = nullptr;       ///< [od]
  const float* residual = nullptr;   ///< [nt][od], may be the output itself
  const float* row_scale = nullptr;  ///< [nt], powers of two: what the activations of a token were divided by

  bool operator==(const GemmEpilogue&) const = default;
};

// ANCHOR: apply_epilogue
/// One output. @param token 0..nt-1 @param row 0..od-1
__device__ __forceinline__ float apply_epilogue(const GemmEpilogue& e, float sum, long long token,
                                                long long row, long long od) {
  if (e.row_scale != nullptr) sum *= e.row_scale[token];
  if (e.bias != nullptr) sum += e.bias[row];
  if (e.residual != nullptr) sum += e.residual[token * od + row];
  return sum;
}
// ANCHOR_END: apply_epilogue

}  // namespace ladder
