// RUNG      add_bias: one thread an element.                 PREV none: this is the ground floor.
// COMPUTES  x[t][i] += bias[i]                               LAYOUT row-major f32
// MAP       grid(ceil(nt*od/256)) block(256): thread -> one (token, output)
// NEEDS     any nt >= 1, od >= 1
// TRAFFIC   x 8*nt*od B, bias 4*od B     WORK nt*od FLOP
// LOOK FOR  SASS: one FADD
// EXPECT    the time of a launch; a matmul that added its bias while storing would save it
// BUILD     part of the engine of chapters/09-qwen; tested by kernels/elementwise/test_elementwise.cpp
#pragma once

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"

namespace ladder {

__global__ void __launch_bounds__(256) add_bias(float* x,           // [nt][od]
                                                const float* bias,  // [od]
                                                long long count, int od) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;  // 0..nt*od-1
  if (index < count) x[index] += bias[index % od];
}

/// x[nt][od] += bias[od], every row. Does not synchronise.
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
inline Status launch_add_bias(float* x, const float* bias, long long nt, int od, Stream& stream,
                              bool programmatic = false) {
  if (nt < 1 || od < 1) return Status::error("add_bias: nt and od must be at least 1");
  const long long count = nt * od;
  LaunchOptions options;
  options.programmatic = programmatic;
  return launch(options, add_bias, dim3(static_cast<unsigned>((count + 255) / 256)), dim3(256), 0, stream, x,
                bias, count, od);
}

}  // namespace ladder
