// RUNG      latency_launch: a kernel that does nothing.  PREV none: the price of one kernel
// COMPUTES  counter[0] += 1 when it is given a counter    LAYOUT one word
// MAP       grid(blocks) block(threads): only thread 0 of block 0 ever does anything
// NEEDS     blocks >= 1, threads in 1..1024 (the launcher checks and says so)
// TRAFFIC   none                                          WORK none
// LOOK FOR  SASS: a branch to EXIT
// EXPECT    a few us from a stream; a kernel that is shorter than its launch is bound by latency, whatever
//           its bytes say
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/00-roofs/roofs.cu -o roofs
#pragma once

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"

namespace ladder {

// ANCHOR: latency_launch
static __global__ void latency_launch(unsigned* counter) {
  // Timed runs pass no counter. Checked runs do: a stream is an order, so n kernels in a row must count to n.
  if (counter != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *counter += 1;
}
// ANCHOR_END: latency_launch

inline Status launch_latency_launch(unsigned* counter, int blocks, int threads, Stream& stream) {
  if (blocks < 1 || threads < 1 || threads > 1024) {
    return Status::error("latency_launch: at least 1 block of 1 to 1024 threads is needed");
  }
  return launch(latency_launch, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), 0,
                stream, counter);
}

}  // namespace ladder
