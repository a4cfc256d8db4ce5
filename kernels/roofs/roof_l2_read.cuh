// RUNG      roof_l2_read: read a buffer that fits in L2 many times.  PREV roof_read: every byte from memory
// COMPUTES  passes * (the sum of the buffer's 32-bit words) modulo 2^32  LAYOUT words [tiles][kLoads][256][4]
// MAP       grid(blocks) block(256): block -> every blocks-th visit, where visit v is to tile v % tiles
// NEEDS     bytes % (4096 * kLoads) == 0 and kLoads in 1, 2, 4, 8 (the launcher checks and says so)
// TRAFFIC   passes * bytes from L2, bytes from memory           WORK none that counts
// LOOK FOR  SASS: LDG.E.128.STRONG.GPU, which looks in L2 and not in L1
// EXPECT    a small multiple of roof_read, falling as the buffer nears the L2's size
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/00-roofs/roofs.cu -o roofs
#pragma once

#include "kernels/roofs/roof_tile.cuh"

namespace ladder {

// ANCHOR: roof_l2_read
template <int kLoads>
__global__ void __launch_bounds__(kStreamThreads, kStreamMinBlocks)
    roof_l2_read(const uint4* data, unsigned tiles, unsigned passes, unsigned* sum) {
  const unsigned long long visits = static_cast<unsigned long long>(tiles) * passes;
  const unsigned step = gridDim.x % tiles;
  unsigned tile = blockIdx.x % tiles;  // always visit % tiles, without a division in the loop
  unsigned total = 0;
#pragma unroll 1
  for (unsigned long long visit = blockIdx.x; visit < visits; visit += gridDim.x) {
    const uint4* source =
        data + static_cast<unsigned long long>(tile) * (kLoads * kStreamThreads) + threadIdx.x;
    // A plain load would look in L1 first, and all L1s together hold more than the buffer. __ldcg looks in
    // L2.
    uint4 word[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) word[i] = __ldcg(source + i * kStreamThreads);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) total += word[i].x + word[i].y + word[i].z + word[i].w;
    tile += step;
    if (tile >= tiles) tile -= tiles;
  }
  if (sum != nullptr) atomicAdd(sum, total);
}
// ANCHOR_END: roof_l2_read

/// Reads `bytes` at `data` `passes` times. If `sum` is not null, adds passes * (sum of all words) to it.
inline Status launch_roof_l2_read(int loads, const uint4* data, std::size_t bytes, int passes, unsigned* sum,
                                  int blocks, Stream& stream) {
  Status arguments = detail::check_stream_arguments("roof_l2_read", loads, bytes, blocks);
  if (!arguments.ok()) return arguments;
  const std::size_t count = bytes / stream_tile_bytes(loads);
  if (passes < 1 || count > 0x7fffffffu) {
    return Status::error("roof_l2_read: passes must be at least 1 and the buffer at most 2^31 - 1 tiles");
  }
  const auto tiles = static_cast<unsigned>(count);
  const auto times = static_cast<unsigned>(passes);
  const dim3 grid(static_cast<unsigned>(blocks)), block(kStreamThreads);
  switch (loads) {
    case 1:
      return launch(roof_l2_read<1>, grid, block, 0, stream, data, tiles, times, sum);
    case 2:
      return launch(roof_l2_read<2>, grid, block, 0, stream, data, tiles, times, sum);
    case 4:
      return launch(roof_l2_read<4>, grid, block, 0, stream, data, tiles, times, sum);
    default:
      return launch(roof_l2_read<8>, grid, block, 0, stream, data, tiles, times, sum);
  }
}

}  // namespace ladder
