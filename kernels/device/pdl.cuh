// Programmatic dependent launch: a kernel that starts while its predecessor is still finishing.
#pragma once

#include "kernels/device/cuda.cuh"

namespace ladder {

/// Lets the next kernel of the stream start, if it was launched with LaunchOptions::programmatic. It starts
/// once every block has called this or ended. Before sm_90, and on the emulator, kernels never overlap and
/// this does nothing.
__device__ __forceinline__ void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the previous kernel of the stream has ended and its writes are visible. What does not depend
/// on that kernel (weights never do) may be loaded before.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Asks for the 128-byte line at p to be brought into L2. A hint: it has no result and cannot fault a correct
/// program.
__device__ __forceinline__ void prefetch_l2(const void* p) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#else
  (void)p;
#endif
}

}  // namespace ladder
