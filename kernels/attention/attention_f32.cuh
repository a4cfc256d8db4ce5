// RUNG      attention_f32: a block per token and head, one pass over the cache.  PREV none.
// COMPUTES  out[t][h] = sum over p <= first+t of softmax_p(scale * q[t][h] . keys[p][g]) * values[p][g],
//           g = h / (heads/kv_heads)
// LAYOUT    q, out row-major f32 [nt][heads][head_dim]; caches f16 or f32 [context][kv_heads][head_dim]
// MAP       grid(heads, nt) block(256): warp -> four positions of every 32, lane -> pairs of a head's
//           elements
// NEEDS     head_dim even and at most 256, heads a multiple of kv_heads, nt <= 65535
// TRAFFIC   at nt = 1: caches 2*(first+1)*kv_length*element B, each read heads/kv_heads times (from L2 after the
//           first)
//           WORK 4*heads*head_dim*sum over t of (first+t+1) FLOP
// LOOK FOR  SASS: SHFL five times a position, MUFU.EX2; no score is stored
// EXPECT    good at short contexts; at long ones a head's block is alone with its positions, and nt rows read
//           the cache nt times
// BUILD     part of the engine of chapters/09-qwen; tested by kernels/attention/test_attention.cpp
#pragma once

#include <cmath>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/elementwise/rope_store.cuh"

namespace ladder {

inline constexpr int kAttentionWarps = 8, kAttentionStrip = 4, kAttentionMaxHeadDim = 256;

__device__ __forceinline__ float2 load_kv_pair(const float* p) { return *reinterpret_cast<const float2*>(p); }
__device__ __forceinline__ float2 load_kv_pair(const __half* p) {
  return __half22float2(*reinterpret_cast<const __half2*>(p));
}

/// PAIRS: pairs of a head's elements that a lane holds; 64*PAIRS >= head_dim.
template <class KV, int PAIRS>
__global__ void __launch_bounds__(kAttentionWarps * 32)
    attention_f32(const float* __restrict__ q,    // [nt][heads][head_dim]
                  const KV* __restrict__ keys,    // [context][kv_heads][head_dim]
                  const KV* __restrict__ values,  // [context][kv_heads][head_dim]
                  float* __restrict__ out,        // [nt][heads][head_dim]
                  int first, HeadShape s, float scale) {
  constexpr int WARPS = kAttentionWarps, STRIP = kAttentionStrip;
  __shared__ float warp_max[WARPS], warp_sum[WARPS], warp_out[WARPS][64 * PAIRS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = static_cast<int>(blockIdx.x), t = static_cast<int>(blockIdx.y);
  const int positions = first + t + 1;  // causal: a token sees itself and what came before
  const long long kv_length = s.kv_length();
  const int kv_at =
      head / (s.heads / s.kv_heads) * s.head_dim;  // where its key and value head begins in a row
  const long long q_at = static_cast<long long>(t) * s.q_length() + head * s.head_dim;

  // 1. The query in registers, scaled once.
  float2 query[PAIRS], acc[PAIRS];
  bool mine[PAIRS];
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const int i = 2 * (lane + 32 * j);  // 0..head_dim-2 if mine
    mine[j] = i < s.head_dim;
    query[j] = mine[j] ? load_kv_pair(q + q_at + i) : make_float2(0.0f, 0.0f);
    query[j].x *= scale;
    query[j].y *= scale;
    acc[j] = make_float2(0.0f, 0.0f);
  }

  // 2. Softmax in one pass: running maximum, sum of exponentials and weighted sum of values; the two sums are
  //    scaled down whenever the maximum rises, so no exponent is ever positive.
  //    https://arxiv.org/abs/1805.02867
  float running_max = -INFINITY, sum = 0.0f;
  for (int p0 = STRIP * warp; p0 < positions; p0 += STRIP * WARPS) {
    float score[STRIP];
    float2 value[STRIP][PAIRS];
#pragma unroll
    for (int n = 0; n < STRIP; ++n) {
      const long long row =
          min(p0 + n, positions - 1) * kv_length + kv_at;  // past the end: the last one again
      score[n] = 0.0f;
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        const int i = 2 * (lane + 32 * j);
        const float2 key = mine[j] ? load_kv_pair(keys + row + i) : make_float2(0.0f, 0.0f);
        value[n][j] = mine[j] ? load_kv_pair(values + row + i) : make_float2(0.0f, 0.0f);
        score[n] += query[j].x * key.x;
        score[n] += query[j].y * key.y;
      }
    }
    float highest = running_max;
#pragma unroll
    for (int n = 0; n < STRIP; ++n) {
      score[n] = warp_reduce_sum(score[n]);  // in all lanes the same bits
      if (p0 + n >= positions) score[n] = -INFINITY;
      highest = fmaxf(highest, score[n]);
    }
    const float shrink = expf(running_max - highest);  // 0 the first time: exp(-infinity)
    running_max = highest;
    sum *= shrink;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      acc[j].x *= shrink;
      acc[j].y *= shrink;
    }
#pragma unroll
    for (int n = 0; n < STRIP; ++n) {
      const float weight = expf(score[n] - highest);
      sum += weight;
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        acc[j].x += weight * value[n][j].x;
        acc[j].y += weight * value[n][j].y;
      }
    }
  }

  // 3. The warps' results are brought to the common maximum and added in the order of the warps. A warp
  //    without positions has maximum -infinity, weight 0.
  if (lane == 0) {
    warp_max[warp] = running_max;
    warp_sum[warp] = sum;
  }
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    warp_out[warp][2 * (lane + 32 * j)] = acc[j].x;
    warp_out[warp][2 * (lane + 32 * j) + 1] = acc[j].y;
  }
  __syncthreads();  // all warps have written before anyone reads
  if (static_cast<int>(threadIdx.x) >= s.head_dim) return;
  float highest = warp_max[0];  // finite: warp 0 has position 0
#pragma unroll
  for (int w = 1; w < WARPS; ++w) highest = fmaxf(highest, warp_max[w]);
  float total = 0.0f, result = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const float weight = expf(warp_max[w] - highest);
    total += weight * warp_sum[w];
    result += weight * warp_out[w][threadIdx.x];
  }
  out[q_at + threadIdx.x] = result / total;
}

/// Causal attention of nt tokens at positions first .. first+nt-1 over caches that hold all positions up to
/// theirs; scores are scaled by 1/sqrt(head_dim). KV is float or __half. Grouped queries: heads/kv_heads
/// neighbouring heads share a key and value head. A token's result does not depend on how many tokens came
/// with it. Does not synchronise.
template <class KV>
Status launch_attention_f32(const float* q, const KV* keys, const KV* values, float* out, int nt, int first,
                            HeadShape s, Stream& stream) {
  if (nt < 1 || nt > 65535 || first < 0) {
    return Status::error("attention_f32: nt must be 1 to 65535 and the first position at least 0");
  }
  if (s.kv_heads < 1 || s.heads < 1 || s.heads % s.kv_heads != 0) {
    return Status::error("attention_f32: heads must be a multiple of kv_heads, not " +
                         std::to_string(s.heads) + " of " + std::to_string(s.kv_heads));
  }
  if (s.head_dim < 2 || s.head_dim % 2 != 0 || s.head_dim > kAttentionMaxHeadDim) {
    return Status::error("attention_f32: head_dim must be even and at most 256, not " +
                         std::to_string(s.head_dim));
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  const dim3 grid(static_cast<unsigned>(s.heads), static_cast<unsigned>(nt)), block(kAttentionWarps * 32);
  const auto kernel = s.head_dim <= 64    ? attention_f32<KV, 1>
                      : s.head_dim <= 128 ? attention_f32<KV, 2>
                                          : attention_f32<KV, 4>;
  return launch(kernel, grid, block, 0, stream, q, keys, values, out, first, s, scale);
}

}  // namespace ladder
