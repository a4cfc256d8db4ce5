// RUNG      swiglu: one thread an element.                   PREV none: this is the ground floor.
// COMPUTES  gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i]   LAYOUT f32
// MAP       grid(ceil(count/256)) block(256): thread -> one element
// NEEDS     any count >= 1
// TRAFFIC   gate 8*count B, up 4*count B     WORK about 5*count FLOP
// LOOK FOR  SASS: MUFU.EX2, MUFU.RCP
// EXPECT    the time of a launch for a row of 18944
// BUILD     part of the engine of chapters/09-qwen; tested by kernels/elementwise/test_elementwise.cpp
#pragma once

#include <cmath>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"

namespace ladder {

__global__ void __launch_bounds__(256) swiglu(float* gate,      // [count]
                                              const float* up,  // [count]
                                              long long count) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;  // 0..count-1
  if (i >= count) return;
  const float g = gate[i];
  // A very negative gate makes the exponential infinite and the quotient -0: no special case.
  gate[i] = g / (1.0f + expf(-g)) * up[i];
}

/// gate[count] = silu(gate) * up[count], silu(g) = g / (1 + exp(-g)): https://arxiv.org/abs/2002.05202. Does
/// not synchronise.
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
inline Status launch_swiglu(float* gate, const float* up, long long count, Stream& stream,
                            bool programmatic = false) {
  if (count < 1) return Status::error("swiglu: count must be at least 1");
  LaunchOptions options;
  options.programmatic = programmatic;
  return launch(options, swiglu, dim3(static_cast<unsigned>((count + 255) / 256)), dim3(256), 0, stream, gate,
                up, count);
}

}  // namespace ladder
