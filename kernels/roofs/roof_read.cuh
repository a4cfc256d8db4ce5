// RUNG      roof_read: read a large buffer once, with a chosen number of bytes in flight.  PREV none
// COMPUTES  the sum of the buffer's 32-bit words modulo 2^32    LAYOUT words [tiles][kLoads][256][4]
// MAP       grid(blocks) block(256): block -> every blocks-th tile, thread -> kLoads 16-byte words of it
// NEEDS     bytes % (4096 * kLoads) == 0 and kLoads in 1, 2, 4, 8 (the launcher checks and says so)
// TRAFFIC   bytes, read once                                    WORK none that counts
// LOOK FOR  SASS: kLoads LDG.E.128 in a row before the first IADD3
// EXPECT    more bytes in flight, more bandwidth, until the memory is busy all the time; then nothing helps
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/00-roofs/roofs.cu -o roofs
#pragma once

#include "kernels/roofs/roof_tile.cuh"

namespace ladder {

// ANCHOR: roof_read
template <int kLoads>
__global__ void __launch_bounds__(kStreamThreads, kStreamMinBlocks)
    roof_read(const uint4* __restrict__ data, unsigned long long tiles, unsigned* sum) {
  unsigned total = 0;
#pragma unroll 1  // unrolling would put the next tile's loads in flight too, and the count would be wrong
  for (unsigned long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const uint4* source = data + tile * (kLoads * kStreamThreads) + threadIdx.x;  // [kLoads][256]
    // 1. All loads are issued before any result is used: this is what "in flight" means.
    uint4 word[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) word[i] = source[i * kStreamThreads];
      // 2. The first add waits for the memory; the others find their data there.
#pragma unroll
    for (int i = 0; i < kLoads; ++i) total += word[i].x + word[i].y + word[i].z + word[i].w;
  }
  // 3. Timed runs pass no `sum`, so nothing is written; but the compiler cannot know that and must keep the
  // loads.
  if (sum != nullptr) atomicAdd(sum, total);
}
// ANCHOR_END: roof_read

/// Reads `bytes` at `data`. If `sum` is not null, adds the sum of all 32-bit words to it (modulo 2^32).
inline Status launch_roof_read(int loads, const uint4* data, std::size_t bytes, unsigned* sum, int blocks,
                               Stream& stream) {
  Status arguments = detail::check_stream_arguments("roof_read", loads, bytes, blocks);
  if (!arguments.ok()) return arguments;
  const unsigned long long tiles = bytes / stream_tile_bytes(loads);
  const dim3 grid(static_cast<unsigned>(blocks)), block(kStreamThreads);
  switch (loads) {
    case 1:
      return launch(roof_read<1>, grid, block, 0, stream, data, tiles, sum);
    case 2:
      return launch(roof_read<2>, grid, block, 0, stream, data, tiles, sum);
    case 4:
      return launch(roof_read<4>, grid, block, 0, stream, data, tiles, sum);
    default:
      return launch(roof_read<8>, grid, block, 0, stream, data, tiles, sum);
  }
}

}  // namespace ladder
