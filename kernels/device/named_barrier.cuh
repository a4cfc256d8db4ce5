// Barriers of some of a block's warps, or of all of them wherever they are in the code.
//
// __syncthreads() is one barrier for the whole block, and all its threads must come to the same call of it. A barrier that is
// told its number and how many threads come may be met by warps from different places, each with a part of its own. The
// form of it that does not end in .aligned also lets the lanes of a warp come one after the other, as they do after a loop
// that each leaves when its own packet is there.
//
// SOURCE  PTX ISA, barrier.sync; the emulator has the block's barrier only, see below
#pragma once

#include "kernels/device/cuda.cuh"

namespace ladder {

/// Waits until `threads` threads of the block (whole warps) have called it with the same id, 1..15 (0 is
/// __syncthreads()). The emulator waits for all threads of the block: there every warp must call as often as the others.
__device__ __forceinline__ void named_barrier([[maybe_unused]] int id, [[maybe_unused]] int threads) {
#if defined(__CUDACC__)
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  __syncthreads();  // of all threads: stricter, as the comment above says
#endif
}

}  // namespace ladder
