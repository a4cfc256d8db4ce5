// RUNG      latency_grid_barrier: all blocks of one kernel wait for each other.  PREV latency_graph_node:
//           the end of a kernel is a barrier too, and costs one launch
// COMPUTES  per round: flag[block] = round, barrier, faults[0] += (the next block's flag is another),
//           barrier; without flags it just waits    LAYOUT arrived, faults: one word
// MAP       grid(blocks) block(threads), all resident at once; thread 0 of a block speaks for it
// NEEDS     a cooperative launch, so no more blocks than fit on the device together; arrived[0] == 0 at
//           the start; rounds * blocks < 2^31 (the launcher checks and says so)
// TRAFFIC   one atomic per block and round, and the polling of one word    WORK none
// LOOK FOR  SASS: one ATOM or RED, then a loop around LD.E.STRONG.GPU
// EXPECT    1 to 3 us, more with more blocks
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/00-roofs/roofs.cu -o roofs
#pragma once

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"

#if defined(__CUDACC__)
#include <cooperative_groups.h>

#include <cuda/atomic>
#endif

namespace ladder {

/// Whether all blocks of a grid can wait for each other on this device.
inline Status supported_latency_grid_barrier(const DeviceInfo& device) {
  if (device.executor == Executor::gpu) return {};
  return Status::error(
      "latency_grid_barrier needs a GPU: the emulator does not keep all blocks alive at once");
}

#if defined(__CUDACC__)
// ANCHOR: latency_grid_barrier
/// Waits until `expected` arrivals have been counted in all. The counter only grows, so a block that is still
/// polling for this round cannot be confused by blocks that have arrived at the next one.
__device__ inline void grid_barrier(unsigned* arrived, unsigned expected) {
  __syncthreads();  // all threads of the block have finished what the barrier must order
  if (threadIdx.x == 0) {
    cuda::atomic_ref<unsigned, cuda::thread_scope_device> count(*arrived);
    // Whoever sees this arrival sees everything that the block wrote before it.
    count.fetch_add(1, cuda::memory_order_release);
    while (count.load(cuda::memory_order_relaxed) < expected) {
    }
    // And from here on the block reads nothing that is older than the arrivals it has seen.
    cuda::atomic_thread_fence(cuda::memory_order_acquire, cuda::thread_scope_device);
  }
  __syncthreads();  // nobody goes on before thread 0 has seen all blocks
}

/// @param flag one word per block, or null to time the bare barrier
template <bool kCooperativeGroups>
__global__ void latency_grid_barrier(unsigned* arrived, int rounds, volatile unsigned* flag,
                                     unsigned* faults) {
  unsigned expected = 0;
  const auto barrier = [&] {
    if constexpr (kCooperativeGroups) {
      cooperative_groups::this_grid().sync();
    } else {
      expected += gridDim.x;
      grid_barrier(arrived, expected);
    }
  };
  for (int round = 1; round <= rounds; ++round) {
    if (flag != nullptr && threadIdx.x == 0) flag[blockIdx.x] = static_cast<unsigned>(round);
    barrier();
    if (flag != nullptr) {
      if (threadIdx.x == 0 && flag[(blockIdx.x + 1) % gridDim.x] != static_cast<unsigned>(round)) {
        atomicAdd(faults, 1u);
      }
      barrier();  // the flags of this round have been read; the next round may overwrite them
    }
  }
}
// ANCHOR_END: latency_grid_barrier

inline Status launch_latency_grid_barrier(bool cooperative_groups, unsigned* arrived, int rounds,
                                          unsigned* flag, unsigned* faults, int blocks, int threads,
                                          Stream& stream) {
  if (rounds < 1 || blocks < 1 || threads < 1 || threads > 1024 || 2.0 * rounds * blocks >= 4294967296.0) {
    return Status::error(
        "latency_grid_barrier: needs rounds >= 1, blocks >= 1, 1 to 1024 threads, and rounds * blocks below "
        "2^31");
  }
  const LaunchOptions options{.cooperative = true};
  const dim3 grid(static_cast<unsigned>(blocks)), block(static_cast<unsigned>(threads));
  volatile unsigned* flags = flag;
  if (cooperative_groups) {
    return launch(options, latency_grid_barrier<true>, grid, block, 0, stream, arrived, rounds, flags,
                  faults);
  }
  return launch(options, latency_grid_barrier<false>, grid, block, 0, stream, arrived, rounds, flags, faults);
}
#endif

}  // namespace ladder
