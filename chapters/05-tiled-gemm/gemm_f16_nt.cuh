// RUNG      gemm_f16_nt: wmma fragments on tiles that arrive by cp.async, one step of k ahead; gemm_qb_nt: the same from
//           packed weights, decoded on their way into shared memory.
// PREV      gemm_register: ordinary multiply-adds, one product an instruction of a lane
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T; f16 operands (f32 activations rounded to f16), f32 sums
// LAYOUT    weights row-major f16, or blocks of a file; acts row-major f16 (or f32); out row-major f32
// MAP       grid(ceil(nt/64), ceil(od/TM)) block(256): block -> 64 tokens x TM outputs; warp w -> tokens
//           32*(w%2).. and outputs TM/4*(w/2).. of them, in fragments of 16 x 16
// NEEDS     sm_70 (cp.async: sm_80); id % 8 == 0 (packed: id % 32 or 256), operands at multiples of 16 bytes,
//           ceil(od/TM) <= 65535: checked by the launcher
// TRAFFIC   weights 2*od*id B (packed: od*id*bpe B), acts 2*nt*id B, out 4*nt*od B; from L2 weights ceil(nt/64) times,
//           acts ceil(od/TM) times
// WORK      2*nt*od*id flop
// LOOK FOR  SASS: HMMA.16816.F32, LDGSTS.E.BYPASS.128; what wmma makes of load_matrix_sync (LDSM or LDS)
// EXPECT    a tenth of what tensor cores can: shared memory feeds them 2 bytes for every 8 products
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/05-tiled-gemm/tiled_gemm.cu -o tiled_gemm
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "chapters/05-tiled-gemm/gemm_steps.cuh"
#include "harness/device/device.hpp"
#include "kernels/device/cp_async.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/wmma.cuh"
#include "kernels/quant/decode.hpp"

namespace ladder {

inline constexpr int kNtTokens = 64;  ///< tokens of a block's tile

// ANCHOR: nt_tile
/// How a variant of gemm_f16_nt is made.
/// @tparam TM_ outputs of a block's tile: 64 or 128 @tparam KS_ elements of k in shared memory: 32 or 64
/// @tparam STRIDE_ halves from one row in shared memory to the next: KS, or KS + 8
/// @tparam BUFFERS_ 1: a tile is copied, then multiplied; 2: copied while the one before it is multiplied
/// @tparam Acts_ __half, or float: rounded to f16 on the way
/// @tparam TOKENS_FIRST_ blocks that follow each other share outputs (token axis on grid.x), not tokens
template <int TM_, int KS_, int STRIDE_, int BUFFERS_ = 2, class Acts_ = __half, bool TOKENS_FIRST_ = true>
struct NtTile {
  static constexpr int TM = TM_, KS = KS_, STRIDE = STRIDE_, BUFFERS = BUFFERS_;
  static constexpr bool TOKENS_FIRST = TOKENS_FIRST_;
  using Acts = Acts_;
  static constexpr bool ACTS_ARE_F32 = std::is_same_v<Acts, float>;
  static constexpr int CHUNKS = KS / 8;  // 16-byte chunks of a row
  static constexpr int ACTS_HALVES = kNtTokens * STRIDE, WEIGHTS_HALVES = TM * STRIDE;
  static constexpr std::size_t OPERAND_BYTES = std::size_t{2} * BUFFERS * (ACTS_HALVES + WEIGHTS_HALVES);
  static constexpr std::size_t RAW_ACTS_BYTES = ACTS_ARE_F32 ? std::size_t{4} * BUFFERS * kNtTokens * KS : 0;
  static constexpr std::size_t OUT_BYTES = std::size_t{4} * 8 * 256;  // a fragment of each warp
  static constexpr std::size_t SHARED_BYTES = OPERAND_BYTES + RAW_ACTS_BYTES + OUT_BYTES;
  static_assert((TM == 64 || TM == 128) && (KS == 32 || KS == 64) && STRIDE >= KS && STRIDE % 8 == 0);
  static_assert(BUFFERS == 1 || BUFFERS == 2);
};
// ANCHOR_END: nt_tile

namespace detail {

// ANCHOR: gemm_f16_nt_multiply
/// A warp's products of one tile: 32 tokens x TM/4 outputs, KS elements of k.
template <class T>
struct NtSums {
  static constexpr int COLUMNS = T::TM / 64;  // fragments along the outputs
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[2][COLUMNS];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) wmma::fill_fragment(sum[i][j], 0.0f);
    }
  }
  /// @param acts [64][STRIDE] @param weights [TM][STRIDE] @param wn, wm the warp's place: 0..1, 0..3
  __device__ __forceinline__ void multiply(const __half* acts, const __half* weights, int wn, int wm) {
#pragma unroll
    for (int k = 0; k < T::KS; k += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> a[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        wmma::load_matrix_sync(a[i], acts + (wn * 32 + i * 16) * T::STRIDE + k, T::STRIDE);
      }
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        // A row of weights is a column of the right operand.
        wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::col_major> b;
        wmma::load_matrix_sync(b, weights + (wm * (T::TM / 4) + j * 16) * T::STRIDE + k, T::STRIDE);
#pragma unroll
        for (int i = 0; i < 2; ++i) wmma::mma_sync(sum[i][j], a[i], b, sum[i][j]);
      }
    }
  }
  /// Through shared memory, as nobody may know which lane has which element; a fragment at a time, masked.
  /// @param staged [16][16] of this warp
  __device__ __forceinline__ void store(float* staged, float* out, int token, int output, int nt, int od) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        __syncwarp();  // the fragment before this one is out
        wmma::store_matrix_sync(staged, sum[i][j], 16, wmma::mem_row_major);
        __syncwarp();  // this one is in
#pragma unroll
        for (int e = lane; e < 256; e += 32) {
          const int t = token + i * 16 + e / 16, r = output + j * 16 + e % 16;
          if (t < nt && r < od) out[static_cast<long long>(t) * od + r] = staged[e];
        }
      }
    }
  }
};
// ANCHOR_END: gemm_f16_nt_multiply

/// Starts the copies of a tile of f16 rows, 16 bytes a thread and pass; chunks outside the matrix become zeros.
/// @param to [ROWS][STRIDE] @param from [rows][id]
template <int ROWS, int KS, int STRIDE, bool ASYNC>
__device__ __forceinline__ void copy_f16_tile(__half* to, const __half* from, int first, int rows, int k0,
                                              int id) {
  constexpr int CHUNKS = KS / 8;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < ROWS * CHUNKS; i += 256) {
    const int row = i / CHUNKS, k = k0 + i % CHUNKS * 8;
    const bool inside = first + row < rows && k < id;
    const __half* source = from + (inside ? static_cast<long long>(first + row) * id + k : 0);
    __half* const target = to + row * STRIDE + i % CHUNKS * 8;
    if constexpr (ASYNC) {
      cp_async_cg(target, source, inside ? 16 : 0);
    } else {
      *reinterpret_cast<uint4*>(target) =
          inside ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
    }
  }
}

/// The same of f32 rows into `raw` [64][KS]; round_f32_tile then makes halves of what this thread copied.
template <int KS, bool ASYNC>
__device__ __forceinline__ void copy_f32_tile(float* raw, const float* from, int first, int rows, int k0,
                                              int id) {
  constexpr int CHUNKS = KS / 4;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kNtTokens * CHUNKS; i += 256) {
    const int row = i / CHUNKS, k = k0 + i % CHUNKS * 4;
    const bool inside = first + row < rows && k < id;
    const float* source = from + (inside ? static_cast<long long>(first + row) * id + k : 0);
    if constexpr (ASYNC) {
      cp_async_cg(raw + 4 * i, source, inside ? 16 : 0);
    } else {
      *reinterpret_cast<float4*>(raw + 4 * i) =
          inside ? *reinterpret_cast<const float4*>(source) : make_float4(0, 0, 0, 0);
    }
  }
}

template <int KS, int STRIDE>
__device__ __forceinline__ void round_f32_tile(__half* to, const float* raw) {
  constexpr int CHUNKS = KS / 4;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kNtTokens * CHUNKS; i += 256) {
    const float4 v = *reinterpret_cast<const float4*>(raw + 4 * i);
    __half2* const pair = reinterpret_cast<__half2*>(to + i / CHUNKS * STRIDE + i % CHUNKS * 4);
    pair[0] = __floats2half2_rn(v.x, v.y);
    pair[1] = __floats2half2_rn(v.z, v.w);
  }
}

// ANCHOR: gemm_qb_nt_decode
/// Sixteen neighbouring weights of a row, which share a scale, decoded and rounded to f16. @param run of the row
template <class Block>
__device__ __forceinline__ void decode_run(__half* to, const Block* row, int run) {
  constexpr int RUNS = Block::kElems / 16;
  const Block& block = row[run / RUNS];
  const auto scale = run_scale(block, run % RUNS);
  __half2* const pair = reinterpret_cast<__half2*>(to);
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    pair[j / 2] = __floats2half2_rn(value(scale, run_code(block, run % RUNS, j)),
                                    value(scale, run_code(block, run % RUNS, j + 1)));
  }
}
// ANCHOR_END: gemm_qb_nt_decode

}  // namespace detail

// ANCHOR: gemm_f16_nt
template <class T>
__global__ void __launch_bounds__(256)
    gemm_f16_nt(const __half* weights, const typename T::Acts* acts, float* out, int nt, int od, int id) {
  __half* const x_tiles = dynamic_shared<__half>();               // [BUFFERS][64][STRIDE]
  __half* const w_tiles = x_tiles + T::BUFFERS * T::ACTS_HALVES;  // [BUFFERS][TM][STRIDE]
  float* const raw =
      reinterpret_cast<float*>(w_tiles + T::BUFFERS * T::WEIGHTS_HALVES);  // [BUFFERS][64][KS] if f32
  float* const staged = raw + T::RAW_ACTS_BYTES / 4;                       // [8][256]
  const int warp = static_cast<int>(threadIdx.x / 32), wn = warp % 2, wm = warp / 2;
  const int t0 = static_cast<int>(T::TOKENS_FIRST ? blockIdx.x : blockIdx.y) * kNtTokens;
  const int r0 = static_cast<int>(T::TOKENS_FIRST ? blockIdx.y : blockIdx.x) * T::TM;
  constexpr bool ASYNC = T::BUFFERS > 1;
  const auto stage = [&](int buffer, int k0) {
    if constexpr (T::ACTS_ARE_F32) {
      detail::copy_f32_tile<T::KS, ASYNC>(raw + buffer * kNtTokens * T::KS, acts, t0, nt, k0, id);
    } else {
      detail::copy_f16_tile<kNtTokens, T::KS, T::STRIDE, ASYNC>(x_tiles + buffer * T::ACTS_HALVES, acts, t0,
                                                                nt, k0, id);
    }
    detail::copy_f16_tile<T::TM, T::KS, T::STRIDE, ASYNC>(w_tiles + buffer * T::WEIGHTS_HALVES, weights, r0,
                                                          od, k0, id);
    if constexpr (ASYNC) cp_async_commit_group();
  };

  detail::NtSums<T> sums;
  sums.clear();
  if constexpr (ASYNC) stage(0, 0);
  int buffer = 0;
  for (int k0 = 0; k0 < id; k0 += T::KS) {
    if constexpr (ASYNC) {
      // 1. The next tile sets out before this one is waited for.
      if (k0 + T::KS < id) {
        stage(buffer ^ 1, k0 + T::KS);
        cp_async_wait_group<1>();
      } else {
        cp_async_wait_group<0>();
      }
    } else {
      stage(0, k0);
    }
    // 2. A thread rounds what it copied itself, so nobody has to be waited for yet.
    if constexpr (T::ACTS_ARE_F32) {
      detail::round_f32_tile<T::KS, T::STRIDE>(x_tiles + buffer * T::ACTS_HALVES,
                                               raw + buffer * kNtTokens * T::KS);
    }
    __syncthreads();  // the copies of all threads are there
    sums.multiply(x_tiles + buffer * T::ACTS_HALVES, w_tiles + buffer * T::WEIGHTS_HALVES, wn, wm);
    __syncthreads();  // everybody has read this buffer: it may be overwritten
    if constexpr (ASYNC) buffer ^= 1;
  }
  sums.store(staged + warp * 256, out, t0 + wn * 32, r0 + wm * (T::TM / 4), nt, od);
}
// ANCHOR_END: gemm_f16_nt

// ANCHOR: gemm_qb_nt
/// Tile of gemm_qb_nt: a step of k is two runs of 16 weights, one for each of 256 threads.
using QbTile = NtTile<128, 32, 40>;

/// @param weights [od][id / kElems]
template <class Block>
__global__ void __launch_bounds__(256)
    gemm_qb_nt(const Block* weights, const __half* acts, float* out, int nt, int od, int id) {
  using T = QbTile;
  __half* const x_tiles = dynamic_shared<__half>();               // [2][64][STRIDE]
  __half* const w_tiles = x_tiles + T::BUFFERS * T::ACTS_HALVES;  // [2][TM][STRIDE]
  float* const staged = reinterpret_cast<float*>(w_tiles + T::BUFFERS * T::WEIGHTS_HALVES);  // [8][256]
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, wn = warp % 2, wm = warp / 2;
  const int t0 = static_cast<int>(blockIdx.x) * kNtTokens, r0 = static_cast<int>(blockIdx.y) * T::TM;
  const int row = thread / 2;  // 0..127
  const Block* const mine = weights + static_cast<long long>(min(r0 + row, od - 1)) * (id / Block::kElems);
  const auto stage = [&](int buffer, int k0) {
    detail::copy_f16_tile<kNtTokens, T::KS, T::STRIDE, true>(x_tiles + buffer * T::ACTS_HALVES, acts, t0, nt,
                                                             k0, id);
    cp_async_commit_group();
    // A row past the last decodes the last one again: its outputs are not stored.
    detail::decode_run(w_tiles + buffer * T::WEIGHTS_HALVES + row * T::STRIDE + thread % 2 * 16, mine,
                       k0 / 16 + thread % 2);
  };
  detail::NtSums<T> sums;
  sums.clear();
  stage(0, 0);
  int buffer = 0;
  for (int k0 = 0; k0 < id; k0 += T::KS) {
    cp_async_wait_group<0>();
    __syncthreads();  // this buffer is whole, and everybody has read the other one
    if (k0 + T::KS < id) stage(buffer ^ 1, k0 + T::KS);
    sums.multiply(x_tiles + buffer * T::ACTS_HALVES, w_tiles + buffer * T::WEIGHTS_HALVES, wn, wm);
    buffer ^= 1;
  }
  sums.store(staged + warp * 256, out, t0 + wn * 32, r0 + wm * (T::TM / 4), nt, od);
}
// ANCHOR_END: gemm_qb_nt

/// Shapes of gemm_f16_nt<T>.
template <class T>
Status gemm_f16_nt_supported(Shape s) {
  if (Status ok = gemm_grid_supported(s, T::TM, 8); !ok.ok()) return ok;
  const long long most = static_cast<long long>(kMostGridY) * kNtTokens;
  if (!T::TOKENS_FIRST && s.nt > most) return Status::error("nt must be at most " + std::to_string(most));
  return {};
}

template <class T>
Status launch_gemm_f16_nt(const __half* weights, const typename T::Acts* acts, float* out, Shape s,
                          Stream& stream) {
  if (Status ok = gemm_f16_nt_supported<T>(s); !ok.ok()) return ok;
  if ((reinterpret_cast<std::uintptr_t>(weights) | reinterpret_cast<std::uintptr_t>(acts)) % 16 != 0) {
    return Status::error("weights and activations must begin at a multiple of 16 bytes");
  }
  const auto tokens = static_cast<unsigned>((s.nt + kNtTokens - 1) / kNtTokens);
  const auto outputs = static_cast<unsigned>((s.od + T::TM - 1) / T::TM);
  const dim3 grid = T::TOKENS_FIRST ? dim3(tokens, outputs) : dim3(outputs, tokens);
  return launch(gemm_f16_nt<T>, grid, dim3(256), T::SHARED_BYTES, stream, weights, acts, out,
                static_cast<int>(s.nt), static_cast<int>(s.od), static_cast<int>(s.id));
}

/// Shapes of gemm_qb_nt<Block>.
template <class Block>
Status gemm_qb_nt_supported(Shape s) {
  return gemm_grid_supported(s, QbTile::TM, Block::kElems);
}

/// @param weights blocks as a file has them
template <class Block>
Status launch_gemm_qb_nt(const Block* weights, const __half* acts, float* out, Shape s, Stream& stream) {
  if (Status ok = gemm_qb_nt_supported<Block>(s); !ok.ok()) return ok;
  if (reinterpret_cast<std::uintptr_t>(acts) % 16 != 0 ||
      reinterpret_cast<std::uintptr_t>(weights) % 4 != 0) {
    return Status::error(
        "weights must begin at a multiple of 4 bytes, activations at a multiple of 16 bytes");
  }
  const dim3 grid(static_cast<unsigned>((s.nt + kNtTokens - 1) / kNtTokens),
                  static_cast<unsigned>((s.od + QbTile::TM - 1) / QbTile::TM));
  return launch(gemm_qb_nt<Block>, grid, dim3(256), QbTile::SHARED_BYTES, stream, weights, acts, out,
                static_cast<int>(s.nt), static_cast<int>(s.od), static_cast<int>(s.id));
}

}  // namespace ladder
