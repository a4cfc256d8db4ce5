// RUNG      roof_write: write a large buffer once.  PREV roof_copy: reads and writes together
// COMPUTES  out[i] = roof_write_word(i) for every 16-byte word i    LAYOUT words [tiles][kLoads][256][4]
// MAP       grid(blocks) block(256): block -> every blocks-th tile, thread -> kLoads 16-byte words of it
// NEEDS     bytes % (4096 * kLoads) == 0 and kLoads in 1, 2, 4, 8 (the launcher checks and says so)
// TRAFFIC   bytes, written once                                 WORK none that counts
// LOOK FOR  SASS: STG.E.128
// EXPECT    insensitive to kLoads: a store is sent and forgotten, so a thread never waits for one
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/00-roofs/roofs.cu -o roofs
#pragma once

#include "kernels/roofs/roof_tile.cuh"

namespace ladder {

/// What roof_write stores at 16-byte word `i`: cheap to make, never zero for long, different everywhere.
__host__ __device__ inline uint4 roof_write_word(unsigned long long i) {
  const auto mixed = static_cast<unsigned>(i) * 0x9E3779B9u + static_cast<unsigned>(i >> 32);
  return make_uint4(mixed, mixed ^ 0x5BD1E995u, mixed + 0x27D4EB2Fu, ~mixed);
}

// ANCHOR: roof_write
template <int kLoads>
__global__ void __launch_bounds__(kStreamThreads, kStreamMinBlocks)
    roof_write(uint4* __restrict__ out, unsigned long long tiles) {
#pragma unroll 1
  for (unsigned long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const unsigned long long first = tile * (kLoads * kStreamThreads) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      out[first + i * kStreamThreads] = roof_write_word(first + i * kStreamThreads);
    }
  }
}
// ANCHOR_END: roof_write

/// Writes `bytes` at `out`: 16-byte word i becomes roof_write_word(i).
inline Status launch_roof_write(int loads, uint4* out, std::size_t bytes, int blocks, Stream& stream) {
  Status arguments = detail::check_stream_arguments("roof_write", loads, bytes, blocks);
  if (!arguments.ok()) return arguments;
  const unsigned long long tiles = bytes / stream_tile_bytes(loads);
  const dim3 grid(static_cast<unsigned>(blocks)), block(kStreamThreads);
  switch (loads) {
    case 1:
      return launch(roof_write<1>, grid, block, 0, stream, out, tiles);
    case 2:
      return launch(roof_write<2>, grid, block, 0, stream, out, tiles);
    case 4:
      return launch(roof_write<4>, grid, block, 0, stream, out, tiles);
    default:
      return launch(roof_write<8>, grid, block, 0, stream, out, tiles);
  }
}

}  // namespace ladder
