// RUNG      attention_f32: a block per token and head, one pass over the cache.  PREV none: this is the ground floor.
// COMPUTES  out[t][h] = sum over p <= first+t of softmax_p(scale * q[t][h] . keys[p][g]) * values[p][g],
//           g = h / (heads/kv_heads). `first` is read from device memory, so a graph can be replayed further on
// LAYOUT    q, out row-major f32 [nt][heads][head_dim]; caches f16 or f32 [context][kv_heads][head_dim]
// MAP       grid(heads, nt) block(512): some lanes of a warp (8 for 64 elements) -> a position at a time, lane -> eight
//           neighbouring elements of a head; block -> 64 to 512 positions at once
// NEEDS     head_dim even and at most 256, heads a multiple of kv_heads, nt <= 65535; all pointers at multiples of 16
//           bytes: checked by the launcher, and said in its error
// TRAFFIC   at nt = 1: caches 2*(first+1)*kv_length*element B, each read heads/kv_heads times (from L2 after the
//           first)
//           WORK 4*heads*head_dim*sum over t of (first+t+1) FLOP
// LOOK FOR  SASS: LDG.E.128 of keys and values, all of a strip before the first SHFL; MUFU.EX2; no score is stored
// EXPECT    good up to some thousand positions; at long contexts a head's block is alone with its positions, and nt
//           rows read the cache nt times
// BUILD     part of the engine of chapters/09-qwen; tested by kernels/attention/test_attention.cpp
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/elementwise/rope_store.cuh"

namespace ladder {

inline constexpr int kAttentionWarps = 16, kAttentionStrip = 4, kAttentionMaxHeadDim = 256;

/// VEC neighbouring elements of a cache: 8 in loads of 16 bytes, or 2.
template <class KV, int VEC>
struct KvVector;
template <>
struct KvVector<__half, 8> {
  uint4 raw;
  __device__ __forceinline__ void load(const __half* p) { raw = *reinterpret_cast<const uint4*>(p); }
  __device__ __forceinline__ void zero() { raw = make_uint4(0, 0, 0, 0); }
  __device__ __forceinline__ void to_floats(float (&v)[8]) const {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] & 0xffffu)));
      v[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] >> 16)));
    }
  }
};
template <>
struct KvVector<float, 8> {
  float4 raw[2];
  __device__ __forceinline__ void load(const float* p) {
    raw[0] = reinterpret_cast<const float4*>(p)[0];
    raw[1] = reinterpret_cast<const float4*>(p)[1];
  }
  __device__ __forceinline__ void zero() { raw[0] = raw[1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
  __device__ __forceinline__ void to_floats(float (&v)[8]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      v[4 * i] = raw[i].x;
      v[4 * i + 1] = raw[i].y;
      v[4 * i + 2] = raw[i].z;
      v[4 * i + 3] = raw[i].w;
    }
  }
};
template <class KV>
struct KvVector<KV, 2> {
  float2 pair;
  __device__ __forceinline__ void load(const float* p) { pair = *reinterpret_cast<const float2*>(p); }
  __device__ __forceinline__ void load(const __half* p) {
    pair = __half22float2(*reinterpret_cast<const __half2*>(p));
  }
  __device__ __forceinline__ void zero() { pair = make_float2(0.0f, 0.0f); }
  __device__ __forceinline__ void to_floats(float (&v)[2]) const {
    v[0] = pair.x;
    v[1] = pair.y;
  }
};

/// exp(score - highest), 0 for a score of -infinity even where nothing is higher.
__device__ __forceinline__ float attention_weight(float score, float highest) {
  return score == -INFINITY ? 0.0f : expf(score - highest);
}

/// @tparam VEC elements of a load
/// @tparam LANES lanes that share a position
/// @tparam UNITS loads of a lane for a position: VEC * LANES * UNITS >= head_dim
template <class KV, int VEC, int LANES, int UNITS>
__global__ void __launch_bounds__(kAttentionWarps * 32)
    attention_f32(const float* q,    // [nt][heads][head_dim]
                  const KV* keys,    // [context][kv_heads][head_dim]
                  const KV* values,  // [context][kv_heads][head_dim]
                  float* out,        // [nt][heads][head_dim]
                  const int* first, HeadShape s, float scale) {
  // No pointer is __restrict__: what the kernels before have written must not go through loads that need not see it.
  constexpr int WARPS = kAttentionWarps, STRIP = kAttentionStrip, SUBS = 32 / LANES;
  __shared__ float warp_max[WARPS], warp_sum[WARPS], warp_out[WARPS][VEC * LANES * UNITS];
  allow_next_kernel();
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sub = lane / LANES, part = lane % LANES;  // position of the warp's, share of its elements
  const int head = static_cast<int>(blockIdx.x), t = static_cast<int>(blockIdx.y);
  const int positions = *first + t + 1;  // causal: a token sees itself and what came before
  const int warps = min(WARPS, (positions + SUBS - 1) / SUBS);  // that have a position at all
  const long long kv_length = s.kv_length();
  const int kv_at =
      head / (s.heads / s.kv_heads) * s.head_dim;  // where its key and value head begins in a row
  const long long q_at = static_cast<long long>(t) * s.q_length() + head * s.head_dim;

  if (warp < warps) {
    // 1. The query in registers, scaled once.
    float query[UNITS][VEC], acc[UNITS][VEC];
    bool mine[UNITS];
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
      const int i = VEC * (part + LANES * j);  // 0..head_dim-VEC if mine
      mine[j] = i < s.head_dim;
#pragma unroll
      for (int e = 0; e < VEC; ++e) {
        query[j][e] = mine[j] ? q[q_at + i + e] * scale : 0.0f;
        acc[j][e] = 0.0f;
      }
    }

    // 2. Softmax in one pass: running maximum, sum of exponentials and weighted sum of values; the two sums are
    //    scaled down whenever the maximum rises, so no exponent is ever positive.
    //    https://arxiv.org/abs/1805.02867
    float running_max = -INFINITY, sum = 0.0f;
    for (int p0 = SUBS * warp; p0 < positions; p0 += STRIP * SUBS * WARPS) {
      KvVector<KV, VEC> key[STRIP][UNITS], value[STRIP][UNITS];
#pragma unroll
      for (int n = 0; n < STRIP; ++n) {
        const int p = p0 + sub + n * SUBS * WARPS;
        const long long row = p * kv_length + kv_at + VEC * part;
#pragma unroll
        for (int j = 0; j < UNITS; ++j) {
          if (mine[j] && p < positions) {
            key[n][j].load(keys + row + VEC * LANES * j);
            value[n][j].load(values + row + VEC * LANES * j);
          } else {
            key[n][j].zero();
            value[n][j].zero();
          }
        }
      }
      // ANCHOR: attention_f32
      float score[STRIP], highest = running_max;
#pragma unroll
      for (int n = 0; n < STRIP; ++n) {
        score[n] = 0.0f;
#pragma unroll
        for (int j = 0; j < UNITS; ++j) {
          float k[VEC];
          key[n][j].to_floats(k);
#pragma unroll
          for (int e = 0; e < VEC; ++e) score[n] += query[j][e] * k[e];
        }
#pragma unroll
        for (int offset = LANES / 2; offset > 0; offset /= 2) {  // in all lanes of a position the same bits
          score[n] += __shfl_xor_sync(kAllLanes, score[n], offset);
        }
        if (p0 + sub + n * SUBS * WARPS >= positions) score[n] = -INFINITY;
        highest = fmaxf(highest, score[n]);
      }
      const float shrink = attention_weight(running_max, highest);
      running_max = highest;
      sum *= shrink;
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {
#pragma unroll
        for (int e = 0; e < VEC; ++e) acc[j][e] *= shrink;
      }
#pragma unroll
      for (int n = 0; n < STRIP; ++n) {
        const float weight = attention_weight(score[n], highest);
        sum += weight;
#pragma unroll
        for (int j = 0; j < UNITS; ++j) {
          float v[VEC];
          value[n][j].to_floats(v);
#pragma unroll
          for (int e = 0; e < VEC; ++e) acc[j][e] += weight * v[e];
        }
      }
      // ANCHOR_END: attention_f32
    }

    // 3. The results of a warp's positions: brought to the common maximum and added, pairs of neighbours first.
#pragma unroll
    for (int offset = LANES; offset < 32; offset *= 2) {
      const float other = __shfl_xor_sync(kAllLanes, running_max, offset);
      const float highest = fmaxf(running_max, other);
      const float shrink = attention_weight(running_max, highest);
      running_max = highest;
      sum *= shrink;
      sum += __shfl_xor_sync(kAllLanes, sum, offset);
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
          acc[j][e] *= shrink;
          acc[j][e] += __shfl_xor_sync(kAllLanes, acc[j][e], offset);
        }
      }
    }
    if (lane == 0) {
      warp_max[warp] = running_max;
      warp_sum[warp] = sum;
    }
    if (sub == 0) {
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {
#pragma unroll
        for (int e = 0; e < VEC; ++e) warp_out[warp][VEC * (part + LANES * j) + e] = acc[j][e];
      }
    }
  }
  __syncthreads();  // all warps have written before anyone reads

  // 4. The same over the warps, in their order. Each has a position, so its maximum is finite.
  if (static_cast<int>(threadIdx.x) >= s.head_dim) return;
  float highest = warp_max[0];
  for (int w = 1; w < warps; ++w) highest = fmaxf(highest, warp_max[w]);
  float total = 0.0f, result = 0.0f;
  for (int w = 0; w < warps; ++w) {
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
/// @param first a position in device memory, at least 0, read when the kernel runs
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
template <class KV>
Status launch_attention_f32(const float* q, const KV* keys, const KV* values, float* out, int nt,
                            const int* first, HeadShape s, Stream& stream, bool programmatic = false) {
  if (nt < 1 || nt > 65535) return Status::error("attention_f32: nt must be 1 to 65535");
  if (s.kv_heads < 1 || s.heads < 1 || s.heads % s.kv_heads != 0) {
    return Status::error("attention_f32: heads must be a multiple of kv_heads, not " +
                         std::to_string(s.heads) + " of " + std::to_string(s.kv_heads));
  }
  if (s.head_dim < 2 || s.head_dim % 2 != 0 || s.head_dim > kAttentionMaxHeadDim) {
    return Status::error("attention_f32: head_dim must be even and at most 256, not " +
                         std::to_string(s.head_dim));
  }
  if ((reinterpret_cast<std::uintptr_t>(q) | reinterpret_cast<std::uintptr_t>(keys) |
       reinterpret_cast<std::uintptr_t>(values)) %
          16 !=
      0) {
    return Status::error("attention_f32: queries and caches must begin at a multiple of 16 bytes");
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  const dim3 grid(static_cast<unsigned>(s.heads), static_cast<unsigned>(nt)), block(kAttentionWarps * 32);
  const auto kernel = s.head_dim % 8 != 0 ? s.head_dim <= 64    ? attention_f32<KV, 2, 32, 1>
                                            : s.head_dim <= 128 ? attention_f32<KV, 2, 32, 2>
                                                                : attention_f32<KV, 2, 32, 4>
                      : s.head_dim <= 32 ? attention_f32<KV, 8, 4, 1>
                      : s.head_dim <= 64  ? attention_f32<KV, 8, 8, 1>
                      : s.head_dim <= 128 ? attention_f32<KV, 8, 16, 1>
                                          : attention_f32<KV, 8, 32, 1>;
  LaunchOptions options;
  options.programmatic = programmatic;
  return launch(options, kernel, grid, block, 0, stream, q, keys, values, out, first, s, scale);
}

}  // namespace ladder
