// The one portability switch of the workbook. Kernel files include this and nothing else of CUDA: under nvcc
// it is the CUDA headers, under the host compiler the emulator's versions of the same names.
#pragma once

#if defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#if defined(LADDER_STATIC_KERNELS)
// A kernel that is no template has one name in the whole program. Where several of its sources include the same kernels,
// all but one of them define this first, and have kernels of their own.
#undef __global__
#define __global__ static __attribute__((global, unused))
#endif

namespace ladder {

/// The block's dynamic shared memory as an array of T. Every call in a kernel returns the same address, which
/// is 128-byte aligned; the launch says how many bytes there are.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  // At a line of the 32 banks, so that what static shared memory comes before it does not move rings of cp.async off one.
  extern __shared__ __align__(128) unsigned char ladder_dynamic_shared_bytes[];
  return reinterpret_cast<T*>(ladder_dynamic_shared_bytes);
}

}  // namespace ladder

#else

#include "harness/emulator/cuda.hpp"

namespace ladder {

template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  return static_cast<T*>(emu::dynamic_shared_bytes());
}

}  // namespace ladder

#endif
