// RUNG      gemv_scalar: one thread per output.              PREV none: this is the ground floor.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T   LAYOUT weights row-major f32
// MAP       grid(ceil(nt*od/256)) block(256): thread -> one (token, output), walks the row alone
// NEEDS     any nt >= 1, od >= 1, id >= 1
// TRAFFIC   weights 4*od*id B, acts 4*nt*id B, out 4*nt*od B     WORK 2*nt*od*id FLOP
// LOOK FOR  SASS: LDG.E (32 bits), one FFMA per pair of loads
// EXPECT    32 sectors per weight request where 4 would do; the other seven eighths of each sector serve the next
//           seven steps, from L1. There, rows that are a multiple of 128 B apart put all 32 lanes into one data
//           bank: 32 turns for one request, which is what limits the kernel
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/01-scalar-gemv/scalar_gemv.cu -o scalar_gemv
#pragma once

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"

namespace ladder {

// ANCHOR: gemv_scalar
__global__ void __launch_bounds__(256) gemv_scalar(const float* __restrict__ weights,  // [od][id]
                                                   const float* __restrict__ acts,     // [nt][id]
                                                   float* __restrict__ out,            // [nt][od]
                                                   int nt, int od, int id) {
  // 1. One thread, one output. 64-bit, because nt*od alone passes 2^31 for a head of 152,064 rows.
  const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;  // 0..nt*od-1
  if (index >= static_cast<long long>(nt) * od) return;
  const int t = static_cast<int>(index / od);  // token,  0..nt-1
  const int r = static_cast<int>(index % od);  // output, 0..od-1

  // 2. Its two rows. Neighbouring threads own neighbouring *rows*: at any step their addresses are 4*id bytes
  // apart.
  const float* w = weights + static_cast<long long>(r) * id;  // [id]
  const float* x = acts + static_cast<long long>(t) * id;     // [id]

  // 3. One accumulator, one weight a step. All lanes of the warp load from rows that start a multiple of 128 bytes
  //    apart: 32 sectors, and for most layers one and the same bank of the L1's data store.
  float acc = 0.0f;
  for (int i = 0; i < id; ++i) acc += w[i] * x[i];

  // 4. Neighbouring threads store neighbouring floats: this access, at least, is coalesced.
  out[index] = acc;
}
// ANCHOR_END: gemv_scalar

/// out[nt][od] = acts[nt][id] . weights[od][id]^T, all f32 in device memory. Any shape. Does not synchronise.
inline Status launch_gemv_scalar(const float* weights, const float* acts, float* out, Shape s,
                                 Stream& stream) {
  const long long threads = s.nt * s.od;
  const auto blocks = static_cast<unsigned>((threads + 255) / 256);
  return launch(gemv_scalar, dim3(blocks), dim3(256), 0, stream, weights, acts, out, static_cast<int>(s.nt),
                static_cast<int>(s.od), static_cast<int>(s.id));
}

}  // namespace ladder
