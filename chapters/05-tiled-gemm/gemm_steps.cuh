// RUNG      gemm_naive: a thread per output.  gemm_shared: tiles in shared memory.  gemm_register: tiles in registers.
// PREV      gemv_scalar and gemv_vec: every token reads all the weights again
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T; f16 operands, f32 products and sums
// LAYOUT    weights and acts row-major f16, out row-major f32
// MAP       naive: grid(ceil(nt/16), ceil(od/16)) block(16,16): thread -> one output
//           shared: grid(ceil(nt/32), ceil(od/32)) block(32,32): block -> 32 x 32 outputs, thread -> one of them
//           register: grid(ceil(nt/128), ceil(od/128)) block(256): block -> 128 x 128 outputs, thread -> 8 x 8 of them
// NEEDS     naive and shared: any shape; register: id % 8 == 0, operands at multiples of 16 bytes; ceil(od/16) <= 65535:
//           checked by the launchers
// TRAFFIC   weights 2*od*id B, acts 2*nt*id B, out 4*nt*od B; each is read again by every block that needs it
// WORK      2*nt*od*id flop
// LOOK FOR  SASS: FFMA and what surrounds it: two LDG a product (naive), two LDS (shared), 16 LDS.128 for 64 (register)
// EXPECT    naive: as slow as its loads; shared: 1/4 of the f32 peak; register: most of it, and a tenth of tensor cores
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/05-tiled-gemm/tiled_gemm.cu -o tiled_gemm
#pragma once

#include <cstdint>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"

namespace ladder {

// ANCHOR: gemm_naive
__global__ void __launch_bounds__(256)
    gemm_naive(const __half* weights, const __half* acts, float* out, int nt, int od, int id) {
  const int t = static_cast<int>(blockIdx.x * 16 + threadIdx.y);  // token
  const int r = static_cast<int>(blockIdx.y * 16 + threadIdx.x);  // output
  if (t >= nt || r >= od) return;
  const __half* w = weights + static_cast<long long>(r) * id;  // [id]
  const __half* x = acts + static_cast<long long>(t) * id;     // [id]
  float sum = 0.0f;
  for (int k = 0; k < id; ++k) sum += __half2float(w[k]) * __half2float(x[k]);
  out[static_cast<long long>(t) * od + r] = sum;
}
// ANCHOR_END: gemm_naive

inline constexpr int kSharedTile = 32;  ///< tokens, outputs and elements of k of gemm_shared's tiles

// ANCHOR: gemm_shared
__global__ void __launch_bounds__(kSharedTile* kSharedTile)
    gemm_shared(const __half* weights, const __half* acts, float* out, int nt, int od, int id) {
  // A column more than the tile has: lanes read a column of w_tile, and rows of 32 words would all be in one bank.
  __shared__ float x_tile[kSharedTile][kSharedTile + 1], w_tile[kSharedTile][kSharedTile + 1];
  const int column = static_cast<int>(threadIdx.x), row = static_cast<int>(threadIdx.y);
  const int t0 = static_cast<int>(blockIdx.x) * kSharedTile, r0 = static_cast<int>(blockIdx.y) * kSharedTile;
  float sum = 0.0f;
  for (int k0 = 0; k0 < id; k0 += kSharedTile) {
    // 1. Each thread brings one element of each operand. Neighbouring lanes bring neighbours along k: 64 bytes a warp.
    const int k = k0 + column;
    const bool inside = k < id;
    x_tile[row][column] =
        inside && t0 + row < nt ? __half2float(acts[static_cast<long long>(t0 + row) * id + k]) : 0.0f;
    w_tile[row][column] =
        inside && r0 + row < od ? __half2float(weights[static_cast<long long>(r0 + row) * id + k]) : 0.0f;
    __syncthreads();  // the tiles are whole
    // 2. 32 products for two elements brought.
    for (int i = 0; i < kSharedTile; ++i) sum += x_tile[row][i] * w_tile[column][i];
    __syncthreads();  // everybody has read the tiles: they may be overwritten
  }
  if (t0 + row < nt && r0 + column < od) out[static_cast<long long>(t0 + row) * od + r0 + column] = sum;
}
// ANCHOR_END: gemm_shared

inline constexpr int kRegisterTile = 128;  ///< tokens and outputs of gemm_register's tiles
inline constexpr int kRegisterK = 16;      ///< elements of k in shared memory

// ANCHOR: gemm_register
__global__ void __launch_bounds__(256, 2)
    gemm_register(const __half* weights, const __half* acts, float* out, int nt, int od, int id) {
  // k is the row, so that the eight tokens and eight outputs of a thread are vectors.
  __shared__ __align__(16) float x_tile[kRegisterK][kRegisterTile + 4], w_tile[kRegisterK][kRegisterTile + 4];
  const int thread = static_cast<int>(threadIdx.x);
  const int t0 = static_cast<int>(blockIdx.x) * kRegisterTile,
            r0 = static_cast<int>(blockIdx.y) * kRegisterTile;
  // 1. A thread copies eight neighbours of one row of each operand.
  const int copy_row = thread / 2, copy_k = thread % 2 * 8;
  const auto copy = [&](float(&tile)[kRegisterK][kRegisterTile + 4], const __half* from, int first, int rows,
                        int k0) {
    uint4 chunk = make_uint4(0, 0, 0, 0);
    if (first + copy_row < rows && k0 + copy_k < id) {
      chunk =
          *reinterpret_cast<const uint4*>(from + static_cast<long long>(first + copy_row) * id + k0 + copy_k);
    }
    const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      tile[copy_k + i][copy_row] =
          __half2float(__ushort_as_half(static_cast<unsigned short>(words[i / 2] >> (16 * (i % 2)))));
    }
  };
  // 2. Its 64 outputs: tokens 4*y..4*y+3 and 64 further on, outputs 4*x..4*x+3 and 64 further on. So the lanes of a warp
  //    read neighbouring vectors, which are in different banks.
  const int x = thread % 16, y = thread / 16;
  float sum[8][8] = {};
  for (int k0 = 0; k0 < id; k0 += kRegisterK) {
    copy(x_tile, acts, t0, nt, k0);
    copy(w_tile, weights, r0, od, k0);
    __syncthreads();  // the tiles are whole
#pragma unroll
    for (int k = 0; k < kRegisterK; ++k) {
      // 3. Sixteen numbers are read for 64 products.
      float a[8], b[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 va = *reinterpret_cast<const float4*>(&x_tile[k][64 * half + 4 * y]);
        const float4 vb = *reinterpret_cast<const float4*>(&w_tile[k][64 * half + 4 * x]);
        a[4 * half] = va.x, a[4 * half + 1] = va.y, a[4 * half + 2] = va.z, a[4 * half + 3] = va.w;
        b[4 * half] = vb.x, b[4 * half + 1] = vb.y, b[4 * half + 2] = vb.z, b[4 * half + 3] = vb.w;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[i][j] += a[i] * b[j];
      }
    }
    __syncthreads();  // everybody has read the tiles: they may be overwritten
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int t = t0 + i / 4 * 64 + 4 * y + i % 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int r = r0 + j / 4 * 64 + 4 * x + j % 4;
      if (t < nt && r < od) out[static_cast<long long>(t) * od + r] = sum[i][j];
    }
  }
}
// ANCHOR_END: gemm_register

inline constexpr int kMostGridY = 65535;

/// Shapes of the kernels whose grid is (token tiles, output tiles of `tile` rows).
inline Status gemm_grid_supported(Shape s, int tile, int multiple) {
  if (s.nt < 1 || s.od < 1 || s.id < 1) return Status::error("nt, od and id must all be at least 1");
  if (s.id % multiple != 0) {
    return Status::error("id must be a multiple of " + std::to_string(multiple) + ", not " +
                         std::to_string(s.id));
  }
  const long long most = static_cast<long long>(kMostGridY) * tile;
  if (s.od > most) return Status::error("od must be at most " + std::to_string(most));
  constexpr long long kMost = 1 << 24;
  if (s.nt > kMost || s.id > kMost)
    return Status::error("nt and id must be at most " + std::to_string(kMost));
  return {};
}

inline Status gemm_naive_supported(Shape s) { return gemm_grid_supported(s, 16, 1); }
inline Status gemm_shared_supported(Shape s) { return gemm_grid_supported(s, kSharedTile, 1); }
inline Status gemm_register_supported(Shape s) { return gemm_grid_supported(s, kRegisterTile, 8); }

inline Status launch_gemm_naive(const __half* weights, const __half* acts, float* out, Shape s,
                                Stream& stream) {
  if (Status ok = gemm_naive_supported(s); !ok.ok()) return ok;
  const dim3 grid(static_cast<unsigned>((s.nt + 15) / 16), static_cast<unsigned>((s.od + 15) / 16));
  return launch(gemm_naive, grid, dim3(16, 16), 0, stream, weights, acts, out, static_cast<int>(s.nt),
                static_cast<int>(s.od), static_cast<int>(s.id));
}

inline Status launch_gemm_shared(const __half* weights, const __half* acts, float* out, Shape s,
                                 Stream& stream) {
  if (Status ok = gemm_shared_supported(s); !ok.ok()) return ok;
  const dim3 grid(static_cast<unsigned>((s.nt + kSharedTile - 1) / kSharedTile),
                  static_cast<unsigned>((s.od + kSharedTile - 1) / kSharedTile));
  return launch(gemm_shared, grid, dim3(kSharedTile, kSharedTile), 0, stream, weights, acts, out,
                static_cast<int>(s.nt), static_cast<int>(s.od), static_cast<int>(s.id));
}

inline Status launch_gemm_register(const __half* weights, const __half* acts, float* out, Shape s,
                                   Stream& stream) {
  if (Status ok = gemm_register_supported(s); !ok.ok()) return ok;
  if ((reinterpret_cast<std::uintptr_t>(weights) | reinterpret_cast<std::uintptr_t>(acts)) % 16 != 0) {
    return Status::error("weights and activations must begin at a multiple of 16 bytes");
  }
  const dim3 grid(static_cast<unsigned>((s.nt + kRegisterTile - 1) / kRegisterTile),
                  static_cast<unsigned>((s.od + kRegisterTile - 1) / kRegisterTile));
  return launch(gemm_register, grid, dim3(256), 0, stream, weights, acts, out, static_cast<int>(s.nt),
                static_cast<int>(s.od), static_cast<int>(s.id));
}

}  // namespace ladder
