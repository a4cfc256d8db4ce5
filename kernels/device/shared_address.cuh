// The 32-bit address of shared memory that PTX instructions take, and what a kernel says on a GPU that lacks
// one.
#pragma once

#include <cstdint>
#include <cstdio>

#include "kernels/device/cuda.cuh"
#if !defined(__CUDACC__)
#include "harness/emulator/building_blocks.hpp"
#endif

namespace ladder {

#if defined(__CUDACC__)
/// @param p into shared memory
__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
#endif

/// Ends the kernel with an error that names the instruction: this device cannot execute it.
__device__ __forceinline__ void needs_sm90(const char* what) {
#if defined(__CUDACC__)
  if (threadIdx.x == 0) std::printf("%s: this kernel needs a GPU of compute capability 9.0\n", what);
  __trap();
#else
  emu::needs_gpu(what);
#endif
}

}  // namespace ladder
