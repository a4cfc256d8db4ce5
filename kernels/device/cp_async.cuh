// cp.async: copies from global to shared memory that go on while the thread does other things. Nothing passes
// through registers.
//
// USE     1. cp_async_...(shared, global)   any number of copies of this thread
//         2. cp_async_commit_group()        closes a group of all copies since the last call, perhaps of none
//         3. cp_async_wait_group<N>()       until all but the N newest groups of this thread have arrived
//         4. __syncthreads()                what arrived is now visible to the thread that waited; others
//            need this
// SHAPE   one copy is 4, 8 or 16 bytes of one thread; both addresses are multiples of it.
// ZEROS   with source_bytes < Bytes the rest is filled with zeros and only source_bytes are read: a tail
//         needs no branch. With 0 the source is not read at all, but must still be an aligned address.
//         compute-sanitizer does not know this and takes every copy for a whole one: give a source allocation
//         room for it.
// CACHE   .ca goes through L1 and L2, .cg (16 bytes only) through L2 alone.
// ERRORS  reading, or writing, the destination before step 3, or from another thread before step 4. On the
//         GPU the value is then old or new or part of each. On the emulator the destination is poison (all
//         bits set) until step 3, and while counting each such access is a finding that names its line and
//         that of the copy. Misaligned addresses, source_bytes > Bytes: undefined on the GPU, an error on the
//         emulator.
// SOURCE  PTX ISA, "Data Movement and Conversion Instructions: cp.async" and what follows it. Needs sm_80.
#pragma once

#include <cstdint>

#include "kernels/device/cuda.cuh"
#include "kernels/device/shared_address.cuh"

namespace ladder {

/// Starts a copy through L1. @param source_bytes 0..Bytes
template <int Bytes>
__device__ __forceinline__ void cp_async_ca(void* shared, const void* global, int source_bytes = Bytes) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async.ca copies 4, 8 or 16 bytes");
#if defined(__CUDACC__)
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global),
               "n"(Bytes), "r"(source_bytes)
               : "memory");
#else
  emu::cp_async(shared, global, Bytes, static_cast<unsigned>(source_bytes), true);
#endif
}

/// Starts a copy of 16 bytes past L1. @param source_bytes 0..16
__device__ __forceinline__ void cp_async_cg(void* shared, const void* global, int source_bytes = 16) {
#if defined(__CUDACC__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(source_bytes)
               : "memory");
#else
  emu::cp_async(shared, global, 16, static_cast<unsigned>(source_bytes), false);
#endif
}

/// As cp_async_cg, OFFSET bytes further on both sides: the offset is part of the instruction, no addition.
template <int OFFSET>
__device__ __forceinline__ void cp_async_cg_at(void* shared, const void* global) {
#if defined(__CUDACC__)
  asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %2], 16;" ::"r"(shared_address(shared)),
               "l"(global), "n"(OFFSET)
               : "memory");
#else
  cp_async_cg(static_cast<unsigned char*>(shared) + OFFSET,
              static_cast<const unsigned char*>(global) + OFFSET);
#endif
}

__device__ __forceinline__ void cp_async_commit_group() {
#if defined(__CUDACC__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emu::cp_async_commit_group();
#endif
}

/// Waits until at most N of the groups that this thread has committed are on their way, the newest ones.
template <int N>
__device__ __forceinline__ void cp_async_wait_group() {
  static_assert(N >= 0);
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#else
  emu::cp_async_wait_group(N);
#endif
}

/// Waits for every copy of this thread, committed or not.
__device__ __forceinline__ void cp_async_wait_all() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_all;" ::: "memory");
#else
  emu::cp_async_wait_all();
#endif
}

}  // namespace ladder
