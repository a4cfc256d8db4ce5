// RUNG      attention_prefill: many tokens on tensor cores; scores never leave the registers.
// PREV      attention_f32: every token and head reads the cache again, and multiplies one element at a time
// COMPUTES  out[t][h] = sum over p <= first+t of softmax_p(q[t][h] . keys[p][g] / sqrt(head_dim)) * values[p][g],
//           g = h / (heads/kv_heads). `first` is read from device memory
// LAYOUT    q, out row-major f32 [nt][heads][head_dim]; caches f16 [context][kv_heads][head_dim]
// MAP       grid(tiles of rows * kv_heads) block(32*WARPS): the tokens of all heads of a group are the rows of one matrix,
//           row = token * (heads/kv_heads) + head, so that they share keys; warp -> 16*MF rows, block -> KEYS positions
//           at a time, copied to shared memory while the ones before are multiplied. Long tiles of rows start first; few
//           tiles are divided along the positions, and the block of a tile that comes last adds the pieces
// NEEDS     head_dim 64 or 128, heads a multiple of kv_heads, an f16 cache, pointers at multiples of 16 bytes: checked by
//           the launcher, and said in its error. Any nt >= 1
// TRAFFIC   q and out 8*nt*q_length B; caches 2*(first+nt)*kv_length*2 B from memory, and from L2 again for each tile of
//           rows: about ceil(nt*(heads/kv_heads)/ROWS) times the part that it sees
//           WORK 4*heads*head_dim*sum over t of (first+t+1) FLOP, and up to KEYS/2 masked positions a row
// LOOK FOR  SASS: HMMA.16816.F32, LDSM.16.M88.4 and LDSM.16.MT88.4, LDGSTS.E.BYPASS.128, MUFU.EX2; no bank conflicts
// EXPECT    queries times 1/sqrt(head_dim), and weights, are rounded to f16: 2^-11 of each. Scores stay f32, and no query
//           of a model comes near the end of f16
// BUILD     part of the engine of chapters/09-qwen and of chapters/08-around-the-matmul; tested by
//           kernels/attention/test_attention_prefill.cpp
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/attention/powers.cuh"
#include "kernels/device/cp_async.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/ldmatrix.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/elementwise/rope_store.cuh"

namespace ladder {

namespace attention_prefill_detail {

/// Where eight halves of a row are: pieces of 16 bytes, their number XORed with the row's, so that eight rows of a matrix
/// are in eight different groups of banks.
template <int HD>
__host__ __device__ constexpr int swizzled(int row, int piece) {
  return row * HD + (piece ^ row % 8) * 8;
}

/// What is taken from scores so that the largest weight is 2^14; 1 where scores are so large that 14 would be lost, or
/// round to more than f16 holds.
__device__ __forceinline__ float weight_base(float highest) {
  constexpr float kLarge = 4194304.0f;
  return fabsf(highest) < kLarge ? highest - kWeightLog2 : highest;
}
inline constexpr float kNoBase =
    -3e38f;  ///< before any score; finite, so that a difference to -infinity is one

/// Pieces of the positions of a tile of rows. None are used where there is one.
struct Pieces {
  int most = 1;                 ///< pieces of a tile, at most
  unsigned* arrived = nullptr;  ///< [blocks of a piece], zero before and after
  float2* stats = nullptr;      ///< [blocks of a piece][most][ROWS]: base, total
  float* sums = nullptr;        ///< [blocks of a piece][most][ROWS][HD]
};
inline constexpr int kLeastSteps = 4;                 // of a piece
inline constexpr int kMostPieces = 16;                // of a tile
inline constexpr int kFewRows = 64, kManyRows = 128;  // of a tile, where there are few or many
inline constexpr std::size_t kCounters = 4096;        // bytes
inline constexpr int kMostBlocks =
    kCounters / sizeof(unsigned);  // of a piece, where there are several pieces

template <int HD, int ROWS, int KEYS>
constexpr std::size_t shared_bytes() {
  return static_cast<std::size_t>(ROWS + 4 * KEYS) * HD * sizeof(__half);
}

/// Rows first .. first+KEYS-1 of a cache on their way to shared memory; zeros for those from `end` on.
template <int HD, int KEYS, int THREADS>
__device__ __forceinline__ void copy_rows(__half* to, const __half* cache, int first, int end,
                                          long long stride) {
  constexpr int PIECES = HD / 8;
#pragma unroll
  for (int i0 = 0; i0 < KEYS * PIECES; i0 += THREADS) {
    const int i = i0 + static_cast<int>(threadIdx.x), row = i / PIECES, piece = i % PIECES;
    const bool there = first + row < end;
    cp_async_cg(to + swizzled<HD>(row, piece), cache + (there ? first + row : 0) * stride + piece * 8,
                there ? 16 : 0);
  }
}

/// @tparam MF matrices of 16 rows of a warp @tparam KEYS positions at a time
template <int HD, int MF, int WARPS, int KEYS>
__global__ void __launch_bounds__(32 * WARPS, MF == 2 && WARPS == 4 ? 2 : 1)
    attention_prefill(const float* q,        // [nt][heads][HD]
                      const __half* keys,    // [context][kv_heads][HD]
                      const __half* values,  // [context][kv_heads][HD]
                      float* out,            // [nt][heads][HD]
                      int nt, const int* first, HeadShape s, float scale, Pieces pieces) {
  constexpr int THREADS = 32 * WARPS, ROWS = 16 * MF * WARPS, PIECES = HD / 8;
  static_assert(KEYS % 16 == 0 && KEYS * PIECES % THREADS == 0 && ROWS * PIECES % THREADS == 0);
  __half* const query = dynamic_shared<__half>();  // [ROWS][HD]
  __half* const key = query + ROWS * HD;           // [2][KEYS][HD]
  __half* const value = key + 2 * KEYS * HD;       // [2][KEYS][HD]
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int of_kv = s.heads / s.kv_heads, rows = nt * of_kv;
  const int kv = static_cast<int>(blockIdx.x) % s.kv_heads;
  const int tile = (rows + ROWS - 1) / ROWS - 1 - static_cast<int>(blockIdx.x) / s.kv_heads;
  const int row0 = tile * ROWS;                                   // of the group's rows
  const int last_token = min(row0 + ROWS - 1, rows - 1) / of_kv;  // of the tile
  const long long stride = s.kv_length();
  keys += kv * HD;
  values += kv * HD;
  allow_next_kernel();
  wait_for_previous_kernel();
  const int start = *first, end = start + last_token + 1;  // positions that the tile sees
  const int all_steps = (end + KEYS - 1) / KEYS;
  const int per = max(kLeastSteps, (all_steps + pieces.most - 1) / pieces.most),
            active = (all_steps + per - 1) / per;
  const int part = static_cast<int>(blockIdx.y), step0 = part * per, steps = min(step0 + per, all_steps);
  if (part >= active) return;

  // 1. The first keys and values on their way; queries to f16, times what makes scores powers of two.
  copy_rows<HD, KEYS, THREADS>(key, keys, step0 * KEYS, end, stride);
  copy_rows<HD, KEYS, THREADS>(value, values, step0 * KEYS, end, stride);
  cp_async_commit_group();
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < ROWS * PIECES; i += THREADS) {
    const int row = i / PIECES, piece = i % PIECES, r = row0 + row;
    float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
    if (r < rows) {
      const float* from =
          q + static_cast<long long>(r / of_kv) * s.q_length() + (kv * of_kv + r % of_kv) * HD + piece * 8;
      a = reinterpret_cast<const float4*>(from)[0];
      b = reinterpret_cast<const float4*>(from)[1];
    }
    *reinterpret_cast<uint4*>(query + swizzled<HD>(row, piece)) =
        make_uint4(pack_halves(a.x * scale, a.y * scale), pack_halves(a.z * scale, a.w * scale),
                   pack_halves(b.x * scale, b.y * scale), pack_halves(b.z * scale, b.w * scale));
  }

  // 2. What a lane has of its warp's rows: rows lane / 4 and lane / 4 + 8 of each matrix.
  int limit[MF][2];  // last position that the row sees
  float base[MF][2], total[MF][2], sum[MF][HD / 8][4] = {};
#pragma unroll
  for (int f = 0; f < MF; ++f) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      limit[f][h] = start + min(row0 + 16 * (MF * warp + f) + lane / 4 + 8 * h, rows - 1) / of_kv;
      base[f][h] = kNoBase;
      total[f][h] = 0.0f;
    }
  }
  const int first_limit = start + min(row0, rows - 1) / of_kv;  // of the tile's first row

  for (int step = step0; step < steps; ++step) {
    const int now = (step - step0) % 2, key0 = step * KEYS;
    // ANCHOR: attention_prefill
    // 3. Scores: queries times keys. The next step's are copied meanwhile.
    cp_async_wait_group<0>();
    __syncthreads();  // everyone's part of this step is there; and the other buffer has been read
    if (step + 1 < steps) {
      copy_rows<HD, KEYS, THREADS>(key + (1 - now) * KEYS * HD, keys, key0 + KEYS, end, stride);
      copy_rows<HD, KEYS, THREADS>(value + (1 - now) * KEYS * HD, values, key0 + KEYS, end, stride);
      cp_async_commit_group();
    }
    float score[MF][KEYS / 8][4] = {};
    const __half* const my_key = key + now * KEYS * HD;
#pragma unroll
    for (int k = 0; k < HD / 16; ++k) {
      std::uint32_t a[MF][4];
#pragma unroll
      for (int f = 0; f < MF; ++f)
        ldmatrix(a[f], query + swizzled<HD>(16 * (MF * warp + f) + lane % 16, 2 * k + lane / 16));
#pragma unroll
      for (int n = 0; n < KEYS / 16; ++n) {
        std::uint32_t b[4];
        ldmatrix(b, my_key + swizzled<HD>(16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
        for (int f = 0; f < MF; ++f) {
          mma_m16n8k16_f16(score[f][2 * n], a[f], {b[0], b[1]});
          mma_m16n8k16_f16(score[f][2 * n + 1], a[f], {b[2], b[3]});
        }
      }
    }

    // 4. No token sees what comes after it.
    if (key0 + KEYS - 1 > first_limit) {
#pragma unroll
      for (int f = 0; f < MF; ++f) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (key0 + 8 * n + lane % 4 * 2 + i % 2 > limit[f][i / 2]) score[f][n][i] = -INFINITY;
          }
        }
      }
    }

    // 5. Softmax in one pass: what scores are compared with, and weights in powers of two up to 2^14. Four lanes have a
    //    row.
    float shrink[MF][2];
    bool shrinks = false;
#pragma unroll
    for (int f = 0; f < MF; ++f) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float most = -INFINITY;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
          most = fmaxf(most, fmaxf(score[f][n][2 * h], score[f][n][2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
        const float now_base = fmaxf(base[f][h], weight_base(most));
        shrink[f][h] = power_of_two(base[f][h] - now_base);
        shrinks = shrinks || shrink[f][h] != 1.0f;
        base[f][h] = now_base;
        total[f][h] *= shrink[f][h];
      }
    }
    if (__any_sync(kAllLanes, shrinks)) {  // after some steps the largest score has mostly been seen
#pragma unroll
      for (int f = 0; f < MF; ++f) {
#pragma unroll
        for (int d = 0; d < HD / 8; ++d) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[f][d][i] *= shrink[f][i / 2];
        }
      }
    }

#pragma unroll
    for (int f = 0; f < MF; ++f) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          score[f][n][i] = power_of_two(score[f][n][i] - base[f][i / 2]);
          total[f][i / 2] += score[f][n][i];
        }
      }
    }

    // 6. Weights times values. What a lane has of the scores is what it has to have of the weights.
    const __half* const my_value = value + now * KEYS * HD;
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
      std::uint32_t a[MF][4];
#pragma unroll
      for (int f = 0; f < MF; ++f) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[f][i] = pack_halves(score[f][2 * k + i / 2][i % 2 * 2], score[f][2 * k + i / 2][i % 2 * 2 + 1]);
      }
#pragma unroll
      for (int d = 0; d < HD / 16; ++d) {
        std::uint32_t b[4];
        ldmatrix_transposed(b, my_value + swizzled<HD>(16 * k + lane % 16, 2 * d + lane / 16));
#pragma unroll
        for (int f = 0; f < MF; ++f) {
          mma_m16n8k16_f16(sum[f][2 * d], a[f], {b[0], b[1]});
          mma_m16n8k16_f16(sum[f][2 * d + 1], a[f], {b[2], b[3]});
        }
      }
    }
    // ANCHOR_END: attention_prefill
  }

  // 7. Pieces: the block that comes last to its tile adds them, in their order. A thread reads what threads with its own
  //    place have written. The counter goes round to zero by itself.
#pragma unroll
  for (int f = 0; f < MF; ++f) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      total[f][h] += __shfl_xor_sync(kAllLanes, total[f][h], 1);
      total[f][h] += __shfl_xor_sync(kAllLanes, total[f][h], 2);
    }
  }
  if (active > 1) {
    __shared__ bool last;
    const long long rows_before = static_cast<long long>(blockIdx.x) * pieces.most * ROWS;
    const auto place = [&](int f, int h, int n) {  // of a row, in piece n
      return rows_before + n * ROWS + 16 * (MF * warp + f) + lane / 4 + 8 * h;
    };
#pragma unroll
    for (int f = 0; f < MF; ++f) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const long long at = place(f, h, part);
        if (lane % 4 == 0) pieces.stats[at] = make_float2(base[f][h], total[f][h]);
#pragma unroll
        for (int d = 0; d < HD / 8; ++d) {
          *reinterpret_cast<float2*>(pieces.sums + at * HD + 8 * d + lane % 4 * 2) =
              make_float2(sum[f][d][2 * h], sum[f][d][2 * h + 1]);
        }
      }
    }
    __threadfence();  // this thread's part of the piece is there before the block is counted
    __syncthreads();  // and so are those of the others
    if (threadIdx.x == 0) {
      const auto others = static_cast<unsigned>(active - 1);
      last = atomicInc(pieces.arrived + blockIdx.x, others) == others;
    }
    __syncthreads();  // `last` is known
    if (!last) return;
#pragma unroll
    for (int f = 0; f < MF; ++f) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float highest = kNoBase;
        for (int n = 0; n < active; ++n) highest = fmaxf(highest, __ldcg(pieces.stats + place(f, h, n)).x);
        total[f][h] = 0.0f;
#pragma unroll
        for (int d = 0; d < HD / 8; ++d) sum[f][d][2 * h] = sum[f][d][2 * h + 1] = 0.0f;
        for (int n = 0; n < active; ++n) {
          const long long at = place(f, h, n);
          const float2 of = __ldcg(pieces.stats + at);  // past L1, which does not see what others write
          const float shrink = power_of_two(of.x - highest);
          total[f][h] += shrink * of.y;
#pragma unroll
          for (int d = 0; d < HD / 8; ++d) {
            const float2 x =
                __ldcg(reinterpret_cast<const float2*>(pieces.sums + at * HD + 8 * d + lane % 4 * 2));
            sum[f][d][2 * h] += shrink * x.x;
            sum[f][d][2 * h + 1] += shrink * x.y;
          }
        }
      }
    }
  }

  // 8. Out.
#pragma unroll
  for (int f = 0; f < MF; ++f) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row0 + 16 * (MF * warp + f) + lane / 4 + 8 * h;
      if (r >= rows) continue;
      float* to = out + static_cast<long long>(r / of_kv) * s.q_length() + (kv * of_kv + r % of_kv) * HD +
                  lane % 4 * 2;
#pragma unroll
      for (int d = 0; d < HD / 8; ++d) {
        *reinterpret_cast<float2*>(to + 8 * d) =
            make_float2(sum[f][d][2 * h] / total[f][h], sum[f][d][2 * h + 1] / total[f][h]);
      }
    }
  }
}

constexpr long long row_tiles(long long nt, HeadShape s, int rows_of_tile) {
  return (nt * (s.heads / s.kv_heads) + rows_of_tile - 1) / rows_of_tile;
}

template <int HD, int MF, int WARPS, int KEYS>
Status launch_with(const float* q, const __half* keys, const __half* values, float* out, int nt,
                   const int* first, HeadShape s, Stream& stream, bool programmatic, int splits = 1,
                   unsigned char* workspace = nullptr) {
  constexpr int ROWS = 16 * MF * WARPS;
  constexpr double kLog2E = 1.4426950408889634;
  const auto scale = static_cast<float>(kLog2E / std::sqrt(static_cast<double>(HD)));
  const auto blocks = static_cast<unsigned>(row_tiles(nt, s, ROWS) * s.kv_heads);
  Pieces pieces;
  if (splits > 1) {
    const std::size_t places = static_cast<std::size_t>(blocks) * static_cast<std::size_t>(splits) * ROWS;
    pieces.most = splits;
    pieces.sums = reinterpret_cast<float*>(workspace + kCounters);
    pieces.stats = reinterpret_cast<float2*>(pieces.sums + places * HD);
    pieces.arrived = reinterpret_cast<unsigned*>(workspace);
  }
  LaunchOptions options;
  options.programmatic = programmatic;
  return launch(options, attention_prefill<HD, MF, WARPS, KEYS>, dim3(blocks, static_cast<unsigned>(splits)),
                dim3(32 * WARPS), shared_bytes<HD, ROWS, KEYS>(), stream, q, keys, values, out, nt, first, s,
                scale, pieces);
}

}  // namespace attention_prefill_detail

/// Whether attention_prefill takes these heads; otherwise the error that it would return.
inline Status attention_prefill_supported(HeadShape s) {
  if (s.kv_heads < 1 || s.heads < 1 || s.heads % s.kv_heads != 0) {
    return Status::error("attention_prefill: heads must be a multiple of kv_heads, not " +
                         std::to_string(s.heads) + " of " + std::to_string(s.kv_heads));
  }
  if (s.head_dim != 64 && s.head_dim != 128) {
    return Status::error("attention_prefill: head_dim must be 64 or 128, not " + std::to_string(s.head_dim) +
                         "; attention_f32 takes others");
  }
  return {};
}

/// Pieces that a tile's positions are divided into at most: more than one only where tiles alone leave multiprocessors
/// without work. @param sms multiprocessors of the device
constexpr int attention_prefill_pieces(long long nt, HeadShape s, int sms) {
  namespace d = attention_prefill_detail;
  const long long blocks = d::row_tiles(nt, s, d::kFewRows) * s.kv_heads;
  if (blocks > d::kMostBlocks) return 1;
  return static_cast<int>(std::max<long long>(1, std::min<long long>(d::kMostPieces, 2LL * sms / blocks)));
}

/// Bytes of the workspace of launch_attention_prefill, for every nt.
constexpr std::size_t attention_prefill_workspace(HeadShape s, int sms) {
  namespace d = attention_prefill_detail;
  return d::kCounters + static_cast<std::size_t>(2 * sms * d::kFewRows) *
                            (static_cast<std::size_t>(s.head_dim) * sizeof(float) + sizeof(float2));
}

/// Causal attention of nt tokens at positions first .. first+nt-1 over f16 caches that hold all positions up to theirs,
/// on tensor cores. An f32 cache is for attention_f32: tensor cores would round it. A value that is not a number reaches
/// the tokens at most KEYS positions before its own, too. Without a workspace a token's result has the same bits
/// whatever came with it; with one, few tokens after a long context are faster, and the bits are the same for the same
/// tokens. Does not synchronise.
/// @param q [nt][heads][head_dim], rotated @param first a position in device memory, at least 0, read when the kernel runs
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
/// @param workspace attention_prefill_workspace() bytes at a multiple of 16, zero before the first use; or null
inline Status launch_attention_prefill(const float* q, const __half* keys, const __half* values, float* out,
                                       int nt, const int* first, HeadShape s, Stream& stream,
                                       bool programmatic = false, unsigned char* workspace = nullptr) {
  namespace d = attention_prefill_detail;
  Status ok = attention_prefill_supported(s);
  if (!ok.ok()) return ok;
  constexpr long long kMostRows = 1 << 30;
  if (nt < 1 || static_cast<long long>(nt) * s.heads > kMostRows)
    return Status::error("attention_prefill: nt must be at least 1, and nt * heads at most " +
                         std::to_string(kMostRows));
  if ((reinterpret_cast<std::uintptr_t>(q) | reinterpret_cast<std::uintptr_t>(keys) |
       reinterpret_cast<std::uintptr_t>(values) | reinterpret_cast<std::uintptr_t>(out) |
       reinterpret_cast<std::uintptr_t>(workspace)) %
          16 !=
      0) {
    return Status::error("attention_prefill: all arrays must begin at a multiple of 16 bytes");
  }
  // Large tiles need less of shared memory's bandwidth, small ones occupy more multiprocessors.
  const int sms = multiprocessor_count();
  const bool many = d::row_tiles(nt, s, d::kManyRows) * s.kv_heads >= 3LL * sms;
  const int pieces = workspace == nullptr || many ? 1 : attention_prefill_pieces(nt, s, sms);
  const auto run = [&](auto launch_it) {
    return launch_it(q, keys, values, out, nt, first, s, stream, programmatic, pieces, workspace);
  };
  if (s.head_dim == 64) return many ? run(d::launch_with<64, 2, 4, 64>) : run(d::launch_with<64, 1, 4, 64>);
  return many ? run(d::launch_with<128, 2, 4, 64>) : run(d::launch_with<128, 1, 4, 64>);
}

}  // namespace ladder
