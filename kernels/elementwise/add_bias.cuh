// RUNG      add_bias: one thread four elements, or one.      PREV none: this is the ground floor.
// COMPUTES  x[t][i] += bias[i]                               LAYOUT row-major f32
// MAP       grid(ceil(nt*od/1024)) block(256): thread -> four neighbouring outputs of a token; one, where od or an address
//           is no multiple of 16 bytes
// NEEDS     any nt >= 1, od >= 1
// TRAFFIC   x 8*nt*od B, bias 4*od B     WORK nt*od FLOP
// LOOK FOR  SASS: LDG.E.128, four FADD, STG.E.128
// EXPECT    the time of a launch; a matmul that added its bias while storing would save it
// BUILD     part of the engine of chapters/09-qwen; tested by kernels/elementwise/test_elementwise.cpp
#pragma once

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/elementwise/fours.cuh"

namespace ladder {

// ANCHOR: add_bias
/// @tparam V elements of a thread
template <int V>
__global__ void __launch_bounds__(256) add_bias(float* x,           // [nt][od]
                                                const float* bias,  // [od]
                                                long long count, int od) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const long long i = V * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);  // 0..nt*od-V
  if (i >= count) return;
  Floats<V> a = Floats<V>::load(x + i);
  const Floats<V> b = Floats<V>::load(bias + i % od);
#pragma unroll
  for (int k = 0; k < V; ++k) a.v[k] += b.v[k];
  a.store(x + i);
}
// ANCHOR_END: add_bias

/// x[nt][od] += bias[od], every row. Does not synchronise.
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
inline Status launch_add_bias(float* x, const float* bias, long long nt, int od, Stream& stream,
                              bool programmatic = false) {
  if (nt < 1 || od < 1) return Status::error("add_bias: nt and od must be at least 1");
  const long long count = nt * od;
  LaunchOptions options;
  options.programmatic = programmatic;
  const int v = floats_at_a_time({x, bias}, {od});
  return launch(options, v == 4 ? add_bias<4> : add_bias<1>,
                dim3(static_cast<unsigned>((count / v + 255) / 256)), dim3(256), 0, stream, x, bias, count,
                od);
}

}  // namespace ladder
