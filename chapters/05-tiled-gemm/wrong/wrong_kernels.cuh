// Broken tiled products: one bug each, and the checker must reject them all. The one without a bug is the control: the
// checker must accept it, so it is the bug that it rejects.
#pragma once

#include <cstdint>

#include "kernels/device/cuda.cuh"
#include "kernels/device/mma.cuh"

namespace ladder::wrong {

enum class Bug {
  none,
  half_of_k,             ///< of a step of 32, only the first 16 are multiplied
  fragment_swapped,      ///< the two k halves of an A fragment change places
  tail_dropped,          ///< a last step that is not whole is left out
  tail_unmasked,         ///< a last step that is not whole reads on into the next row
  last_tokens_dropped,   ///< tokens of a tile that is not whole are not written
  half_accumulator,      ///< the sum kept in f16
  stale_buffer,          ///< the first of two buffers is multiplied in every step
  missing_barrier,       ///< nobody waits for the tile to be whole
  missing_last_barrier,  ///< the tile is overwritten while others still read it
};

inline constexpr int kWrongK = 32;  ///< elements of k in shared memory

/// Block: 2 warps, 16 tokens x 16 outputs; warp w -> outputs 8*w.. Steps of k are in shared memory, in two buffers by
/// turns; warp 1 copies them.
template <Bug kBug>
__global__ void product(const __half* weights, const __half* acts, float* out, int nt, int od, int id) {
  __shared__ __align__(16) __half x_tile[2][16][kWrongK], w_tile[2][16][kWrongK];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int t0 = static_cast<int>(blockIdx.x) * 16, r0 = static_cast<int>(blockIdx.y) * 16;
  const __half zero = __float2half(0.0f);
  float sum[4] = {};
  const int end = kBug == Bug::tail_dropped ? id / kWrongK * kWrongK : id;
  int buffer = 0;
  for (int k0 = 0; k0 < end; k0 += kWrongK) {
    for (int i = lane; warp == 1 && i < 16 * kWrongK; i += 32) {
      const int row = i / kWrongK, k = k0 + i % kWrongK;
      const bool in_k =
          k < id || (kBug == Bug::tail_unmasked && row == 0 && t0 + row + 1 < nt && r0 + row + 1 < od);
      x_tile[buffer][row][i % kWrongK] =
          in_k && t0 + row < nt ? acts[static_cast<long long>(t0 + row) * id + k] : zero;
      w_tile[buffer][row][i % kWrongK] =
          in_k && r0 + row < od ? weights[static_cast<long long>(r0 + row) * id + k] : zero;
    }
    if (kBug != Bug::missing_barrier) __syncthreads();
    const int read = kBug == Bug::stale_buffer ? 0 : buffer;
    for (int k = 0; k < (kBug == Bug::half_of_k ? 16 : kWrongK); k += 16) {
      std::uint32_t a[4], b[2];
      const auto pair = [&](const __half(&row)[kWrongK], int at) {
        return *reinterpret_cast<const std::uint32_t*>(&row[k + 2 * at]);
      };
      const int group = lane / 4, member = lane % 4;
      a[0] = pair(x_tile[read][group], member);
      a[1] = pair(x_tile[read][group + 8], member);
      a[2] = pair(x_tile[read][group], member + 4);
      a[3] = pair(x_tile[read][group + 8], member + 4);
      b[0] = pair(w_tile[read][8 * warp + group], member);
      b[1] = pair(w_tile[read][8 * warp + group], member + 4);
      if (kBug == Bug::fragment_swapped) {
        const std::uint32_t keep = a[0];
        a[0] = a[2];
        a[2] = keep;
      }
      mma_m16n8k16_f16(sum, a, b);
      if (kBug == Bug::half_accumulator) {
        for (float& s : sum) s = __half2float(__float2half(s));
      }
    }
    if (kBug == Bug::missing_last_barrier) continue;  // in the buffer that others may still read
    buffer ^= 1;
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i) {
    const int t = t0 + lane / 4 + i / 2 * 8, r = r0 + 8 * warp + lane % 4 * 2 + i % 2;
    if (kBug == Bug::last_tokens_dropped && t0 + 16 > nt) continue;
    if (t < nt && r < od) out[static_cast<long long>(t) * od + r] = sum[i];
  }
}

}  // namespace ladder::wrong
