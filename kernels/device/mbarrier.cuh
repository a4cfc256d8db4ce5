// mbarrier: a barrier in shared memory that counts arrivals of threads and bytes of asynchronous copies.
//
// USE     1. one thread: mbarrier_init(&b, arrivals), then mbarrier_init_fence(); all: __syncthreads()
//         2. every phase: `arrivals` calls of mbarrier_arrive (or mbarrier_arrive_expect_bytes, with the
//            bytes that copies will bring), in any order
//         3. mbarrier_wait(&b, parity) returns once the phase of that parity is complete: all arrivals are in
//            and all bytes are there. Phases count 0, 1, 2, ...; a phase's parity is its lowest bit. So
//            waiters of phase p pass p % 2, and a wait with parity 1 on a fresh barrier returns at once.
// ORDER   what a thread did before it arrived is visible to those that have waited. Bulk copies are no part of that: they
//         may overwrite what a thread still reads, see mbarrier_arrive_after.
// SHAPE   8 bytes of shared memory, aligned to 8, whose contents nobody may touch; 1 to 2^20 - 1 arrivals.
// ERRORS  waiting for a phase that nobody completes: on the GPU the kernel hangs, on the emulator the launch
//         ends with an error that says who waits where, and for how many arrivals and bytes. More arrivals
//         than the phase has left, use before init: undefined on the GPU, an error on the emulator.
// COUNTS  on the emulator init counts as a store to shared memory of 8 bytes, every other call as an atomic
//         of 8.
// SOURCE  PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier". Needs sm_90 in this
//         form.
#pragma once

#include <cstdint>

#include "kernels/device/cuda.cuh"
#include "kernels/device/shared_address.cuh"

namespace ladder {

/// Makes a barrier of 8 bytes of shared memory. One thread calls it.
__device__ __forceinline__ void mbarrier_init(std::uint64_t* b, unsigned arrivals) {
#if !defined(__CUDACC__)
  emu::mbarrier_init(b, arrivals);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  needs_sm90("mbarrier");
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
#endif
}

/// After the inits, by the same thread: makes them visible to the engine of asynchronous copies.
__device__ __forceinline__ void mbarrier_init_fence() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void mbarrier_arrive(std::uint64_t* b, unsigned arrivals = 1) {
#if !defined(__CUDACC__)
  emu::mbarrier_arrive(b, arrivals, 0);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  needs_sm90("mbarrier");
#else
  [[maybe_unused]] std::uint64_t state;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], %2;"
               : "=l"(state)
               : "r"(shared_address(b)), "r"(arrivals)
               : "memory");
#endif
}

/// An arrival of every lane of a warp, all of which call this, but not before `word` is in all lanes' registers: for giving a
/// stage back to the copy engine after reading it with ordinary loads. A plain arrival overtakes loads that were issued before
/// it and still queue in the load and store unit, behind the stores of an epilogue for example; what the engine then writes
/// is what they read.
/// @param word made of something of every load (their exclusive or, for example)
__device__ __forceinline__ void mbarrier_arrive_after(std::uint64_t* b, std::uint32_t word) {
#if !defined(__CUDACC__)
  (void)word;
  emu::mbarrier_arrive(b, 1, 0);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  needs_sm90("mbarrier");
#else
  // It arrives whatever the word is; but to know by which of the two instructions, it needs the word.
  asm volatile(
      "{\n\t.reg .pred one, other;\n\t.reg .b64 state;\n\t"
      "setp.ne.u32 one|other, %1, 0;\n\t"
      "@one mbarrier.arrive.shared::cta.b64 state, [%0];\n\t"
      "@other mbarrier.arrive.shared::cta.b64 state, [%0];\n\t}" ::"r"(shared_address(b)),
      "r"(word)
      : "memory");
#endif
}

/// One arrival, and the phase waits for `bytes` more: called before or after the copy that brings them is
/// started.
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(std::uint64_t* b, unsigned bytes) {
#if !defined(__CUDACC__)
  emu::mbarrier_arrive(b, 1, bytes);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  needs_sm90("mbarrier");
#else
  [[maybe_unused]] std::uint64_t state;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 %0, [%1], %2;"
               : "=l"(state)
               : "r"(shared_address(b)), "r"(bytes)
               : "memory");
#endif
}

/// The phase waits for `bytes` more; no arrival.
__device__ __forceinline__ void mbarrier_expect_bytes(std::uint64_t* b, unsigned bytes) {
#if !defined(__CUDACC__)
  emu::mbarrier_expect_bytes(b, bytes);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  needs_sm90("mbarrier");
#else
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
#endif
}

#if defined(__CUDACC__)
/// Whether the phase of this parity is complete. The hardware may let the thread sleep for a while before it
/// says no.
__device__ __forceinline__ bool mbarrier_try_wait(std::uint64_t* b, unsigned parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  needs_sm90("mbarrier");
  return false;
#else
  std::uint32_t complete;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(complete)
      : "r"(shared_address(b)), "r"(parity)
      : "memory");
  return complete != 0;
#endif
}
#endif

/// Returns once the phase of this parity is complete. On the emulator the thread is set aside until it is,
/// and one wait is counted; on the GPU it asks again and again.
__device__ __forceinline__ void mbarrier_wait(std::uint64_t* b, unsigned parity) {
#if defined(__CUDACC__)
  while (!mbarrier_try_wait(b, parity)) {
  }
#else
  emu::mbarrier_wait(b, parity);
#endif
}

}  // namespace ladder
