// Clusters: a few neighbouring blocks that run at the same time and reach each other's shared memory.
//
// USE     launch with LaunchOptions::cluster_blocks = n and a grid that is a multiple of n; block blockIdx.x is
//         number blockIdx.x % n of its cluster. cluster_barrier() before the first access to another block's
//         shared memory (its barriers exist from then on) and after the last (nobody ends while others still
//         reach it).
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

/// The same without the fence of the whole GPU: what a thread wrote before is not made visible to other blocks. For
/// blocks that only need to know that the others have come this far; barriers, after mbarrier_init_fence(), are
/// visible.
__device__ __forceinline__ void cluster_barrier_relaxed() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n\t"
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

/// The address, for the functions below, of what lies in another block of the cluster (or in this one) where
/// `p` lies in this block's shared memory.
__device__ __forceinline__ std::uint32_t shared_address_in(unsigned block, const void* p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  std::uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(block));
  return there;
#else
  (void)block, (void)p;
  needs_sm90("mapa");
  return 0;
#endif
}

/// One arrival at the mbarrier at `address`: for what the copy engine and the tensor cores do with shared memory. It
/// orders no ordinary accesses of other blocks; an arrival that does costs a fence of the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_at(std::uint32_t address) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
#else
  (void)address;
  needs_sm90("mbarrier in a cluster");
#endif
}

/// Writes 16 bytes at `address`, a multiple of 16. Visible to its block after a cluster_barrier().
__device__ __forceinline__ void store_at(std::uint32_t address, float4 v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
#else
  (void)address, (void)v;
  needs_sm90("stores in a cluster");
#endif
}

/// Writes a float at `address` and tells the mbarrier at `barrier`, of the same block, of its 4 bytes: who waits there sees
/// it, and no fence is needed. mbarrier_init_fence() and a cluster_barrier_relaxed() must have been before.
__device__ __forceinline__ void store_async_at(std::uint32_t address, float v, std::uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(__float_as_uint(v)), "r"(barrier)
               : "memory");
#else
  (void)address, (void)v, (void)barrier;
  needs_sm90("st.async");
#endif
}

}  // namespace ladder
