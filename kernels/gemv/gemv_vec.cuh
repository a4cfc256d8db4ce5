// RUNG      gemv_vec: many 16-byte loads in flight.          PREV gemv_vec_lane: dense requests, too few at once.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T   LAYOUT weights row-major f32
// MAP       grid(ceil(od/rows)) block(256), rows = ROWS*8/WPR: WPR warps share ROWS rows; lane -> every
//           (32*WPR)th float4 of each; a thread issues ROWS*U loads before it uses the first
// NEEDS     id % 4 == 0 (checked by the launcher, and said in its error), any od >= 1, any nt >= 1
// TRAFFIC   weights 4*od*id B per group of NT <= 8 tokens, acts 4*nt*id B, out 4*nt*od B   WORK 2*nt*od*id FLOP
// LOOK FOR  SASS: LDG.E.EF.128 in pairs (NT = 1) or fours, no FFMA between them; ACQBULK, PREEXIT (overlap)
// EXPECT    reaches the read roof from 64 MB on; nt = 8 costs a quarter more than nt = 1 where rows are long, and up
//           to twice as much where they are short (896)
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/02-vector-gemv/vector_gemv.cu -o vector_gemv
#pragma once

#include <string>
#include <type_traits>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/device/reduce.cuh"

namespace ladder {

/// How gemv_vec is cut for NT tokens per pass. What the memory wants is bytes in flight: threads on an SM x
/// ROWS*U loads x 16 B, here 64 KiB (32 KiB for NT = 8). More tokens need more accumulators (ROWS*NT), so
/// fewer threads with more rows each. The cuts are the best of a sweep on an H200.
template <int NT>
struct GemvVecTile {
  static constexpr int kWarps = 8;                                    ///< warps in a block
  static constexpr int kRows = NT == 8 ? 4 : NT == 1 ? 1 : 2;         ///< rows that share an activation load
  static constexpr int kInFlight = NT == 8 ? 1 : 2;                   ///< loads per row before first use
  static constexpr int kBlocksPerSm = NT == 8 ? 2 : NT == 1 ? 8 : 4;  ///< resident blocks asked for
};

/// Warps to a row, for every NT: the number decides the order in which a row is added up, and a token's
/// result must not depend on its company. 4 is the best single choice of gemv_vec_w1 to gemv_vec_w8.
inline constexpr int kGemvVecWarpsPerRow = 4;

// ANCHOR: gemv_vec
/// NT tokens are served by one pass over the weights; WPR warps share a row.
template <int NT, int WPR>
__global__ void __launch_bounds__(GemvVecTile<NT>::kWarps * 32, GemvVecTile<NT>::kBlocksPerSm)
    gemv_vec(const float* __restrict__ weights,  // [od][id]
             const float* __restrict__ acts,     // [nt][id]
             float* __restrict__ out,            // [nt][od]
             int nt, int od, int id, int first_wave) {
  constexpr int WARPS = GemvVecTile<NT>::kWarps, ROWS = GemvVecTile<NT>::kRows,
                U = GemvVecTile<NT>::kInFlight;
  __shared__ float partial[2][WARPS][ROWS][NT];

  // 1. WPR warps form a group that owns ROWS rows; each takes part `part` of them.
  const int lane = threadIdx.x % 32;  // 0..31
  const int warp = threadIdx.x / 32;  // 0..WARPS-1
  const int part = warp % WPR;        // 0..WPR-1
  const int r0 = (blockIdx.x * (WARPS / WPR) + warp / WPR) * ROWS;
  const int n4 = id / 4;            // float4s in a row
  constexpr int stride = WPR * 32;  // float4s between two of a lane's loads
  const float4* w[ROWS];            // ROWS x [id/4]
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    // A row past the end reads the last row instead and is never stored: no branch inside the loop.
    w[k] = reinterpret_cast<const float4*>(weights + static_cast<long long>(min(r0 + k, od - 1)) * id);
  }

  // 2. The kernel before this one may still be running. Its results are not needed to fetch weights, so the
  //    blocks that start first bring their first loads into L2 while they wait. Later blocks find the memory
  //    busy anyway.
  allow_next_kernel();
  if (static_cast<int>(blockIdx.x) < first_wave) {
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int i = part * 32 + lane + u * stride;
        if (i < n4) prefetch_l2(w[k] + i);
      }
    }
  }
  wait_for_previous_kernel();

  // 3. Tokens in groups of NT. A token's additions run in the same order for every NT and ROWS, so its result
  //    is the same bits whether it came alone or in company.
  int buffer = 0;
  for (int t0 = 0; t0 < nt; t0 += NT, buffer ^= 1) {
    float acc[ROWS][NT] = {};
    for (int i0 = part * 32 + lane; i0 < n4; i0 += U * stride) {
      // 4. All loads first. None depends on a loaded value, so ROWS*U of them are under way together.
      float4 wv[ROWS][U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int i = i0 + u * stride;
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
          wv[k][u] = i < n4 ? __ldcs(w[k] + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
      }
      // 5. Then the arithmetic. One activation load serves ROWS rows.
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int i = i0 + u * stride;
        if (i >= n4) break;
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          const int t = min(t0 + j, nt - 1);
          const float4 x = *reinterpret_cast<const float4*>(acts + static_cast<long long>(t) * id + 4 * i);
#pragma unroll
          for (int k = 0; k < ROWS; ++k) {
            acc[k][j] += wv[k][u].x * x.x;
            acc[k][j] += wv[k][u].y * x.y;
            acc[k][j] += wv[k][u].z * x.z;
            acc[k][j] += wv[k][u].w * x.w;
          }
        }
      }
    }

    // 6. Lanes to one sum, then the WPR partial sums of a row in fixed order.
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const float sum = warp_reduce_sum(acc[k][j]);
        if (lane == 0) partial[buffer][warp][k][j] = sum;
      }
    }
    // Partial sums are written before any is read. The two buffers alternate, so the next trip's writes
    // cannot reach what is still being read here: a warp gets there only past the next barrier.
    __syncthreads();
    if (part == 0 && lane < ROWS * NT) {
      const int k = lane / NT, j = lane % NT;
      float sum = 0.0f;
#pragma unroll
      for (int p = 0; p < WPR; ++p) sum += partial[buffer][warp + p][k][j];
      if (r0 + k < od && t0 + j < nt) out[static_cast<long long>(t0 + j) * od + r0 + k] = sum;
    }
  }
}
// ANCHOR_END: gemv_vec

/// Shapes that gemv_vec takes: 16-byte loads need every row to start at a multiple of 16 bytes.
inline Status gemv_vec_supported(Shape s, const DeviceInfo&) {
  if (s.nt < 1 || s.od < 1 || s.id < 1) return Status::error("nt, od and id must all be at least 1");
  if (s.id % 4 != 0) {
    return Status::error("id must be a multiple of 4 (16-byte loads), not " + std::to_string(s.id));
  }
  return {};
}

/// Launches gemv_vec<NT, WPR>, allowed to start before its predecessor in the stream has ended.
template <int NT, int WPR>
Status launch_gemv_vec_tile(const float* weights, const float* acts, float* out, Shape s, Stream& stream) {
  using Tile = GemvVecTile<NT>;
  constexpr long long rows_per_block = Tile::kRows * Tile::kWarps / WPR;
  const dim3 grid(static_cast<unsigned>((s.od + rows_per_block - 1) / rows_per_block));
  const int first_wave = multiprocessor_count() * Tile::kBlocksPerSm;
  return launch(LaunchOptions{.programmatic = true}, gemv_vec<NT, WPR>, grid, dim3(Tile::kWarps * 32), 0,
                stream, weights, acts, out, static_cast<int>(s.nt), static_cast<int>(s.od),
                static_cast<int>(s.id), first_wave);
}

/// Calls f with std::integral_constant<int, NT> for the number of tokens that one pass serves at this nt.
template <class F>
Status with_gemv_vec_tokens(long long nt, F&& f) {
  if (nt == 1) return f(std::integral_constant<int, 1>{});
  if (nt == 2) return f(std::integral_constant<int, 2>{});
  if (nt <= 4) return f(std::integral_constant<int, 4>{});
  return f(std::integral_constant<int, 8>{});
}

/// As launch_gemv_vec, with WPR warps to a row.
template <int WPR>
Status launch_gemv_vec_warps(const float* weights, const float* acts, float* out, Shape s, Stream& stream) {
  if (Status ok = gemv_vec_supported(s, {}); !ok.ok()) return ok;
  return with_gemv_vec_tokens(
      s.nt, [&](auto nt) { return launch_gemv_vec_tile<nt(), WPR>(weights, acts, out, s, stream); });
}

/// out[nt][od] = acts[nt][id] . weights[od][id]^T, all f32 in device memory, id % 4 == 0. Does not
/// synchronise.
inline Status launch_gemv_vec(const float* weights, const float* acts, float* out, Shape s, Stream& stream) {
  if (Status ok = gemv_vec_supported(s, {}); !ok.ok()) return ok;
  return with_gemv_vec_tokens(s.nt, [&](auto nt) {
    return launch_gemv_vec_tile<nt(), kGemvVecWarpsPerRow>(weights, acts, out, s, stream);
  });
}

}  // namespace ladder
