// RUNG      add_residual: one thread four elements, or one.  PREV none: this is the ground floor.
// COMPUTES  x[i] += y[i]                                     LAYOUT f32
// MAP       grid(ceil(count/1024)) block(256): thread -> four neighbours; one, where count or an address is no multiple of
//           16 bytes
// NEEDS     any count >= 1
// TRAFFIC   x 8*count B, y 4*count B     WORK count FLOP
// LOOK FOR  SASS: LDG.E.128, four FADD, STG.E.128
// EXPECT    the time of a launch for a row; a matmul that added the residual while storing would save it
// BUILD     part of the engine of chapters/09-qwen; tested by kernels/elementwise/test_elementwise.cpp
#pragma once

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/elementwise/fours.cuh"

namespace ladder {

// ANCHOR: add_residual
/// @tparam V elements of a thread
template <int V>
__global__ void __launch_bounds__(256) add_residual(float* x,        // [count]
                                                    const float* y,  // [count]
                                                    long long count) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const long long i = V * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);  // 0..count-V
  if (i >= count) return;
  Floats<V> a = Floats<V>::load(x + i);
  const Floats<V> b = Floats<V>::load(y + i);
#pragma unroll
  for (int k = 0; k < V; ++k) a.v[k] += b.v[k];
  a.store(x + i);
}
// ANCHOR_END: add_residual

/// x[count] += y[count]: the residual connection. Does not synchronise.
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
inline Status launch_add_residual(float* x, const float* y, long long count, Stream& stream,
                                  bool programmatic = false) {
  if (count < 1) return Status::error("add_residual: count must be at least 1");
  LaunchOptions options;
  options.programmatic = programmatic;
  const int v = floats_at_a_time({x, y}, {count});
  return launch(options, v == 4 ? add_residual<4> : add_residual<1>,
                dim3(static_cast<unsigned>((count / v + 255) / 256)), dim3(256), 0, stream, x, y, count);
}

}  // namespace ladder
