// RUNG      rope_store: one thread a pair.                   PREV none: this is the ground floor.
// COMPUTES  q[t][h] and k[t][h] rotated pair by pair by the angles of position first+t; q in place, k and v into
//           the caches at row first+t. `first` is read from device memory, so a graph can be replayed further on
// LAYOUT    q, k, v row-major f32; caches f16 or f32 [context][kv_heads][head_dim]
// MAP       grid(ceil(nt*(heads+2*kv_heads)*head_dim/2 / 256)) block(256): thread -> elements i and
//           i+head_dim/2 of one head
// NEEDS     head_dim even, any nt >= 1; first+nt rows in the caches and in the tables
// TRAFFIC   q 8*nt*heads*head_dim B, k and v (4+cache)*nt*kv_heads*head_dim B each, tables 4*nt*head_dim B
//           WORK 6 FLOP a pair
// LOOK FOR  SASS: no MUFU: sines and cosines come from the tables
// EXPECT    the time of a launch
// BUILD     part of the engine of chapters/09-qwen; tested by kernels/elementwise/test_elementwise.cpp
#pragma once

#include <string>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"

namespace ladder {

/// Sizes of an attention layer.
struct HeadShape {
  int heads, kv_heads, head_dim;
  [[nodiscard]] __host__ __device__ constexpr int q_length() const { return heads * head_dim; }
  [[nodiscard]] __host__ __device__ constexpr int kv_length() const { return kv_heads * head_dim; }
};

// An element of a KV cache: f16 rounds to nearest even, and what is beyond 65504 becomes infinite.
__device__ __forceinline__ void store_kv(float* to, float v) { *to = v; }
__device__ __forceinline__ void store_kv(__half* to, float v) { *to = __float2half_rn(v); }

// ANCHOR: rope_store
template <class KV>
__global__ void __launch_bounds__(256)
    rope_store(float* q,                           // [nt][heads][head_dim]
               const float* k,                     // [nt][kv_heads][head_dim]
               const float* v,                     // [nt][kv_heads][head_dim]
               const float* __restrict__ cosines,  // [positions][head_dim/2]
               const float* __restrict__ sines,    // [positions][head_dim/2]
               KV* keys,                           // [context][kv_heads][head_dim]
               KV* values,                         // [context][kv_heads][head_dim]
               int nt, const int* first, HeadShape s) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int half = s.head_dim / 2;
  const int heads = s.heads + 2 * s.kv_heads;  // of q, then k, then v
  const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= static_cast<long long>(nt) * heads * half) return;
  const int i = static_cast<int>(index % half);  // pair, 0..half-1
  const int h = static_cast<int>(index / half % heads);
  const int t = static_cast<int>(index / half / heads);
  const long long position = *first + t;

  // 1. Values are copied.
  if (h >= s.heads + s.kv_heads) {
    const int at = (h - s.heads - s.kv_heads) * s.head_dim + i;
    const float* from = v + static_cast<long long>(t) * s.kv_length() + at;
    KV* to = values + position * s.kv_length() + at;
    store_kv(to, from[0]);
    store_kv(to + half, from[half]);
    return;
  }

  // 2. The pair (a, b) is a head's elements i and i + half ("NEOX" order), turned by the position's angle.
  const float c = cosines[position * half + i], d = sines[position * half + i];
  if (h < s.heads) {
    float* at = q + static_cast<long long>(t) * s.q_length() + h * s.head_dim + i;
    const float a = at[0], b = at[half];
    at[0] = a * c - b * d;
    at[half] = b * c + a * d;
  } else {
    const int at = (h - s.heads) * s.head_dim + i;
    const float* from = k + static_cast<long long>(t) * s.kv_length() + at;
    KV* to = keys + position * s.kv_length() + at;
    store_kv(to, from[0] * c - from[half] * d);
    store_kv(to + half, from[half] * c + from[0] * d);
  }
}
// ANCHOR_END: rope_store

/// Rotates q in place, and stores rotated k and plain v at rows first .. first+nt-1 of the caches. Rotary
/// position embedding: https://arxiv.org/abs/2104.09864. KV is float or __half. Does not synchronise.
/// @param cosines, sines [positions >= first+nt][head_dim/2]
/// @param first a position in device memory, at least 0, read when the kernel runs
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
template <class KV>
Status launch_rope_store(float* q, const float* k, const float* v, const float* cosines, const float* sines,
                         KV* keys, KV* values, int nt, const int* first, HeadShape s, Stream& stream,
                         bool programmatic = false) {
  if (nt < 1) return Status::error("rope_store: nt must be at least 1");
  if (s.heads < 1 || s.kv_heads < 1 || s.head_dim < 2 || s.head_dim % 2 != 0) {
    return Status::error("rope_store: heads must be at least 1 and head_dim even, not " +
                         std::to_string(s.head_dim));
  }
  const long long pairs = static_cast<long long>(nt) * (s.heads + 2 * s.kv_heads) * (s.head_dim / 2);
  LaunchOptions options;
  options.programmatic = programmatic;
  return launch(options, rope_store<KV>, dim3(static_cast<unsigned>((pairs + 255) / 256)), dim3(256), 0,
                stream, q, k, v, cosines, sines, keys, values, nt, first, s);
}

}  // namespace ladder
