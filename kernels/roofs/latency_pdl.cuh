// RUNG      latency_pdl: a kernel starts before the one before it has ended.  PREV latency_graph_node: a node
//           waits for the end of the one before it
// COMPUTES  counter[0] += 1 when it is given a counter    LAYOUT one word
// MAP       grid(blocks) block(threads): only thread 0 of block 0 ever does anything
// NEEDS     sm_90: programmatic dependent launch (checked by supported_latency_pdl, and said in its error)
// TRAFFIC   none                                          WORK none
// LOOK FOR  SASS: PREEXIT, then ACQBULK
// EXPECT    less than a graph node: the launch itself overlaps with the kernel before, only the wait for its
//           results remains
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/00-roofs/roofs.cu -o roofs
#pragma once

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"

namespace ladder {

/// Whether this device can start a kernel before its predecessor has ended.
inline Status supported_latency_pdl(const DeviceInfo& device) {
  if (device.executor != Executor::gpu) {
    return Status::error("latency_pdl needs a GPU: the emulator runs one kernel after the other");
  }
  if (device.cc_major < 9) {
    return Status::error("latency_pdl needs compute capability 9.0 or later; this device has " +
                         std::to_string(device.cc_major) + "." + std::to_string(device.cc_minor));
  }
  return {};
}

#if defined(__CUDACC__)
// ANCHOR: latency_pdl
static __global__ void latency_pdl(unsigned* counter) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // 1. From here on the next kernel may start. It will see nothing that this one writes until its own step 2.
  cudaTriggerProgrammaticLaunchCompletion();
  // 2. Wait until the kernel before this one has ended and its writes can be seen.
  cudaGridDependencySynchronize();
#endif
  if (counter != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *counter += 1;
}
// ANCHOR_END: latency_pdl

/// The caller asks supported_latency_pdl() first.
inline Status launch_latency_pdl(unsigned* counter, int blocks, int threads, Stream& stream) {
  if (blocks < 1 || threads < 1 || threads > 1024) {
    return Status::error("latency_pdl: at least 1 block of 1 to 1024 threads is needed");
  }
  return launch(LaunchOptions{.programmatic = true}, latency_pdl, dim3(static_cast<unsigned>(blocks)),
                dim3(static_cast<unsigned>(threads)), 0, stream, counter);
}
#endif

}  // namespace ladder
