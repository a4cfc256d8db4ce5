// RUNG      roof_copy: read one buffer and write another.  PREV roof_read: only half of a copy's traffic
// COMPUTES  out[i] = in[i]                                      LAYOUT words [tiles][kLoads][256][4]
// MAP       grid(blocks) block(256): block -> every blocks-th tile, thread -> kLoads 16-byte words of it
// NEEDS     bytes % (4096 * kLoads) == 0 and kLoads in 1, 2, 4, 8 (the launcher checks and says so)
// TRAFFIC   bytes read and bytes written: 2 * bytes             WORK none
// LOOK FOR  SASS: kLoads LDG.E.128, then kLoads STG.E.128
// EXPECT    less than roof_read: the memory loses time each time its bus turns from reading to writing
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/00-roofs/roofs.cu -o roofs
#pragma once

#include "kernels/roofs/roof_tile.cuh"

namespace ladder {

// ANCHOR: roof_copy
template <int kLoads>
__global__ void __launch_bounds__(kStreamThreads, kStreamMinBlocks)
    roof_copy(const uint4* __restrict__ in, uint4* __restrict__ out, unsigned long long tiles) {
#pragma unroll 1
  for (unsigned long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const unsigned long long first = tile * (kLoads * kStreamThreads) + threadIdx.x;
    uint4 word[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) word[i] = in[first + i * kStreamThreads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) out[first + i * kStreamThreads] = word[i];
  }
}
// ANCHOR_END: roof_copy

/// Copies `bytes` from `in` to `out`, which must not overlap.
inline Status launch_roof_copy(int loads, const uint4* in, uint4* out, std::size_t bytes, int blocks,
                               Stream& stream) {
  Status arguments = detail::check_stream_arguments("roof_copy", loads, bytes, blocks);
  if (!arguments.ok()) return arguments;
  const unsigned long long tiles = bytes / stream_tile_bytes(loads);
  const dim3 grid(static_cast<unsigned>(blocks)), block(kStreamThreads);
  switch (loads) {
    case 1:
      return launch(roof_copy<1>, grid, block, 0, stream, in, out, tiles);
    case 2:
      return launch(roof_copy<2>, grid, block, 0, stream, in, out, tiles);
    case 4:
      return launch(roof_copy<4>, grid, block, 0, stream, in, out, tiles);
    default:
      return launch(roof_copy<8>, grid, block, 0, stream, in, out, tiles);
  }
}

}  // namespace ladder
