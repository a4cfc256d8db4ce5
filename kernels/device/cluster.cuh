// Clusters: a few neighbouring blocks that run at the same time and reach each other's shared memory.
//
// USE     a kernel with __cluster_dims__(n, 1, 1) and a grid that is a multiple of n; block blockIdx.x is number
//         blockIdx.x % n of its cluster. cluster_barrier() before the first access to another block's shared
//         memory (its barriers exist from then on) and after the last (nobody ends while others still reach
//         it). mbarrier_arrive_in(b, block): an arrival at the barrier that lies at the place of `b` in
//         another block.
// ERRORS  there is no emulated body: on the emulator and below sm_90 the kernel ends with an error.
// SOURCE  PTX ISA, "barrier.cluster", "mapa", "mbarrier.arrive" with .shared::cluster.
#pragma once

#include <cstdint>

#include "kernels/device/cuda.cuh"
#include "kernels/device/shared_address.cuh"

namespace ladder {

/// All threads of all blocks of the cluster: none goes on before all are here, and what they wrote is visible.
__device__ __forceinline__ void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n\t"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#else
  needs_sm90("barrier.cluster");
#endif
}

/// This block's number in its cluster.
__device__ __forceinline__ unsigned cluster_block() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  needs_sm90("cluster_ctarank");
  return 0;
#endif
}

/// One arrival at a barrier of block `block` of this cluster (this block itself is allowed).
/// @param b the same barrier of this block: the other one lies at its place
__device__ __forceinline__ void mbarrier_arrive_in(std::uint64_t* b, unsigned block) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .b32 there;\n\t"
      "mapa.shared::cluster.u32 there, %0, %1;\n\t"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n\t}" ::"r"(shared_address(b)),
      "r"(block)
      : "memory");
#else
  (void)b, (void)block;
  needs_sm90("mbarrier in a cluster");
#endif
}

}  // namespace ladder
