// RUNG      swiglu: one thread four elements, or one.        PREV none: this is the ground floor.
// COMPUTES  out[i] = gate[i] / (1 + exp(-gate[i])) * up[i]    LAYOUT f32
// MAP       grid(ceil(count/1024)) block(256): thread -> four neighbours; one, where count or an address is no multiple of
//           16 bytes
// NEEDS     any count >= 1
// TRAFFIC   gate, up and out 4*count B each     WORK about 5*count FLOP
// LOOK FOR  SASS: LDG.E.128 twice before the first MUFU.EX2, MUFU.RCP, STG.E.128
// EXPECT    the time of a launch for a row of 18944, that of the bytes for hundreds of them; a matmul that did it while
//           storing would save both
// BUILD     part of the engine of chapters/09-qwen; tested by kernels/elementwise/test_elementwise.cpp
#pragma once

#include <cmath>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/elementwise/fours.cuh"

namespace ladder {

// ANCHOR: swiglu
/// @tparam V elements of a thread
template <int V>
__global__ void __launch_bounds__(256) swiglu(const float* gate,  // [count]
                                              const float* up,    // [count]
                                              float* out,         // [count], may be gate
                                              long long count) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const long long i = V * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);  // 0..count-V
  if (i >= count) return;
  Floats<V> g = Floats<V>::load(gate + i);
  const Floats<V> u = Floats<V>::load(up + i);
#pragma unroll
  for (int k = 0; k < V; ++k) {
    // A very negative gate makes the exponential infinite and the quotient -0: no special case.
    g.v[k] = g.v[k] / (1.0f + expf(-g.v[k])) * u.v[k];
  }
  g.store(out + i);
}
// ANCHOR_END: swiglu

/// out[count] = silu(gate) * up[count], silu(g) = g / (1 + exp(-g)): https://arxiv.org/abs/2002.05202. `out` may be
/// `gate`. Does not synchronise.
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
inline Status launch_swiglu(const float* gate, const float* up, float* out, long long count, Stream& stream,
                            bool programmatic = false) {
  if (count < 1) return Status::error("swiglu: count must be at least 1");
  LaunchOptions options;
  options.programmatic = programmatic;
  const int v = floats_at_a_time({gate, up, out}, {count});
  return launch(options, v == 4 ? swiglu<4> : swiglu<1>, dim3(static_cast<unsigned>((count / v + 255) / 256)),
                dim3(256), 0, stream, gate, up, out, count);
}
/// The same in place of the gate.
inline Status launch_swiglu(float* gate, const float* up, long long count, Stream& stream,
                            bool programmatic = false) {
  return launch_swiglu(gate, up, gate, count, stream, programmatic);
}

}  // namespace ladder
