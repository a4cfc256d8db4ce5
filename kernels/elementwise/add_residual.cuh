// RUNG      add_residual: one thread an element.            PREV none: this is the ground floor.
// COMPUTES  x[i] += y[i]                                     LAYOUT f32
// MAP       grid(ceil(count/256)) block(256): thread -> one element
// NEEDS     any count >= 1
// TRAFFIC   x 8*count B, y 4*count B     WORK count FLOP
// LOOK FOR  SASS: one FADD
// EXPECT    the time of a launch for a row; a matmul that added the residual while storing would save it
// BUILD     part of the engine of chapters/09-qwen; tested by kernels/elementwise/test_elementwise.cpp
#pragma once

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"

namespace ladder {

__global__ void __launch_bounds__(256) add_residual(float* x,        // [count]
                                                    const float* y,  // [count]
                                                    long long count) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;  // 0..count-1
  if (i < count) x[i] += y[i];
}

/// x[count] += y[count]: the residual connection. Does not synchronise.
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
inline Status launch_add_residual(float* x, const float* y, long long count, Stream& stream,
                                  bool programmatic = false) {
  if (count < 1) return Status::error("add_residual: count must be at least 1");
  LaunchOptions options;
  options.programmatic = programmatic;
  return launch(options, add_residual, dim3(static_cast<unsigned>((count + 255) / 256)), dim3(256), 0, stream,
                x, y, count);
}

}  // namespace ladder
