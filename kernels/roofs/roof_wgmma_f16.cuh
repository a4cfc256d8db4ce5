// RUNG      roof_wgmma_f16: Hopper's tensor cores at their own pace, on operands that stay in shared memory.
// PREV      roof_mma_f16: one warp at a time asks, and registers feed the tensor core
// COMPUTES  out[block][128][256] = iterations * A . B^T in f32, with the block's own A [128][64] and B [256][64]
// LAYOUT    a [sets][128][64], b [sets][256][64] halves, row-major; block b uses set b % sets
// MAP       grid(blocks) block(256): two groups of four warps, group -> 64 rows of A and all of B
// NEEDS     compute capability 9.0, compiled for sm_90a; sets, iterations, blocks >= 1 (the launcher checks and says so)
// TRAFFIC   none in the loop                WORK 2 * 128 * 256 * 64 FLOP * iterations * blocks
// LOOK FOR  SASS: four HGMMA.64x256x16.F32 a trip, and one wait for the group before last
// EXPECT    near the datasheet's peak, as far as the power limit lets the clock stay up: half as much again as
//           roof_mma_f16
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=compute_90a,code=sm_90a chapters/00-roofs/roofs.cu -o roofs
#pragma once

#include <cstdint>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/wgmma.cuh"

namespace ladder {

inline constexpr int kWgmmaRoofRows = 128, kWgmmaRoofColumns = 256, kWgmmaRoofK = 64;
inline constexpr std::size_t kWgmmaRoofShared =
    std::size_t{2} * (kWgmmaRoofRows + kWgmmaRoofColumns) * kWgmmaRoofK + 1024;  // and room for alignment

constexpr double roof_wgmma_f16_flop(int iterations, int blocks) {
  return 2.0 * kWgmmaRoofRows * kWgmmaRoofColumns * kWgmmaRoofK * iterations * static_cast<double>(blocks);
}

/// Whether this device has wgmma.
inline Status supported_roof_wgmma_f16(const DeviceInfo& d) {
  if (d.executor == Executor::gpu && d.cc_major == 9 && d.cc_minor == 0) return {};
  return Status::error("wgmma needs compute capability 9.0 (Hopper); this device has " +
                       std::to_string(d.cc_major) + "." + std::to_string(d.cc_minor) +
                       (d.executor == Executor::gpu ? "" : ", and the emulator has no such instruction"));
}

// ANCHOR: roof_wgmma_f16
__global__ void __launch_bounds__(256, 1)
    roof_wgmma_f16(const uint4* __restrict__ a,  // [sets][128][8], eight halves each
                   const uint4* __restrict__ b,  // [sets][256][8]
                   int sets, int iterations, float* __restrict__ out) {
  constexpr int CHUNKS = kWgmmaRoofK / 8;
  const int me = static_cast<int>(threadIdx.x), set = static_cast<int>(blockIdx.x) % sets;
  // 1. Operands go into shared memory once, swizzled as the descriptor says: chunk k of row r at place k ^ (r % 8).
  unsigned char* base = dynamic_shared<unsigned char>();
  base += (1024 - reinterpret_cast<std::uintptr_t>(base) % 1024) % 1024;
  uint4* const as = reinterpret_cast<uint4*>(base);  // [128][8]
  uint4* const bs = as + kWgmmaRoofRows * CHUNKS;    // [256][8]
  for (int i = me; i < kWgmmaRoofRows * CHUNKS; i += 256)
    as[i / CHUNKS * CHUNKS + (i % CHUNKS ^ i / CHUNKS % 8)] = a[set * kWgmmaRoofRows * CHUNKS + i];
  for (int i = me; i < kWgmmaRoofColumns * CHUNKS; i += 256)
    bs[i / CHUNKS * CHUNKS + (i % CHUNKS ^ i / CHUNKS % 8)] = b[set * kWgmmaRoofColumns * CHUNKS + i];
  wgmma_smem_fence();
  __syncthreads();  // all operands are there, and the tensor cores may see them

  // 2. Four instructions a trip; while they run, the next four are already waiting.
  const int group = me / 128;
  const std::uint64_t a_tile = wgmma_descriptor_128b(as + group * 64 * CHUNKS),
                      b_tile = wgmma_descriptor_128b(bs);
  float sum[kWgmmaRoofColumns / 2] = {};
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kWgmmaRoofK / 16; ++k)
      wgmma_f16<kWgmmaRoofColumns>(sum, wgmma_next_k(a_tile, k), wgmma_next_k(b_tile, k));
    wgmma_commit_group();
    wgmma_wait_group<1>();
  }
  wgmma_wait_group<0>();
  wgmma_hold(sum);

  // 3. All sums go out, or the compiler might leave some of the work out.
  const int warp = me % 128 / 32, lane = me % 32;
  float* const to = out + static_cast<long long>(blockIdx.x) * kWgmmaRoofRows * kWgmmaRoofColumns;
#pragma unroll
  for (int i = 0; i < kWgmmaRoofColumns / 2; ++i) {
    const int row = group * 64 + 16 * warp + lane / 4 + 8 * (i / 2 % 2),
              column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    to[row * kWgmmaRoofColumns + column] = sum[i];
  }
}
// ANCHOR_END: roof_wgmma_f16

/// @param a [sets][128][64] halves @param b [sets][256][64] halves @param out [blocks][128][256]
inline Status launch_roof_wgmma_f16(const void* a, const void* b, int sets, int iterations, float* out,
                                    int blocks, Stream& stream) {
  if (sets < 1 || iterations < 1 || blocks < 1)
    return Status::error("roof_wgmma_f16: sets, iterations and blocks must all be at least 1");
  return launch(roof_wgmma_f16, dim3(static_cast<unsigned>(blocks)), dim3(256), kWgmmaRoofShared, stream,
                static_cast<const uint4*>(a), static_cast<const uint4*>(b), sets, iterations, out);
}

}  // namespace ladder
