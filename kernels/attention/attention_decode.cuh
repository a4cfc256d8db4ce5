// RUNG      attention_decode: one token; the cache is split over the GPU, and the heads of a group share what is read.
// PREV      attention_f32: a head's block is alone with its positions, and each key is fetched heads/kv_heads times
// COMPUTES  with p = *position: keys[p] = rotated k, values[p] = v, and for every head h, g = h / (heads/kv_heads),
//           out[h] = sum over i <= p of softmax_i(rotated q[h] . keys[i][g] / sqrt(head_dim)) * values[i][g]
// LAYOUT    q, k, v, out row-major f32; caches f16 or f32 [context][kv_heads][head_dim]; planes as tile_acts.cuh, nt = 1
// MAP       grid(pieces * C, groups of up to 8 heads) block(256; 128 in clusters): C = 8 blocks of a cluster, or one block (before
//           sm_90, and for many positions of small heads) -> a piece of the positions, its warps -> 16 of them at a time, in
//           turn. Tensor cores multiply q (rows 0..7) and what rounding took from it (rows 8..15) with 8 keys, and 16 elements
//           of values with the weights of 8 heads. Blocks of a cluster send each other what they have of a head, so that each
//           finishes one; pieces are sent as packets to those that bring them together
// NEEDS     head_dim 64 or 128, heads a multiple of kv_heads, pointers at multiples of 16 bytes: checked by the launcher,
//           and said in its error. *position below context
// TRAFFIC   caches 2*(p+1)*kv_length*element B, once; pieces 8*heads*head_dim B each (5.5 without clusters), written and
//           read again (in L2)
//           WORK 4*heads*head_dim*(p+1) FLOP, twice that on tensor cores for the second half of the operands
// LOOK FOR  SASS: LDG.E.128 of keys and values before the first HMMA, no LDSM and no SHFL to bring an operand into place;
//           no LDL, no ATOMG, no MEMBAR
// EXPECT    at short contexts the time of a launch and some trips to L2; at long ones what the cache's bytes cost. An f32
//           cache is multiplied without tensor cores, which cannot hold it, and costs more
// BUILD     part of the engine of chapters/09-qwen and of chapters/08-around-the-matmul; tested by
//           kernels/attention/test_attention_decode.cpp
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/attention/decode_tile.cuh"
#include "kernels/attention/runs.cuh"
#include "kernels/device/cluster.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/elementwise/rope_store.cuh"
#include "kernels/mmvq/tile_acts.cuh"
#include "kernels/token/exchange.cuh"

namespace ladder {

/// What attention_decode works on. All in device memory.
template <class KV>
struct AttentionDecode {
  const float* q = nullptr;                          ///< [heads][head_dim] of the new token, not rotated
  const float *k = nullptr, *v = nullptr;            ///< [kv_heads][head_dim] of it, k not rotated
  const float *cosines = nullptr, *sines = nullptr;  ///< [context][head_dim/2]
  KV *keys = nullptr, *values = nullptr;  ///< [context][kv_heads][head_dim]; row *position is written
  const int* position = nullptr;          ///< of the new token; read when the kernel runs
  float* out = nullptr;                   ///< [heads][head_dim], or null
  unsigned char* planes = nullptr;        ///< the same as int8 (tile_acts.cuh, nt = 1), or null
  unsigned char* workspace = nullptr;     ///< attention_decode_workspace() bytes, zero before the first use
  HeadShape shape{};
  int context = 0;  ///< rows of the caches
  /// *position, and the rows of the caches below it, were there before the last launch that was not programmatic: they
  /// may be read before the kernel before this one has ended.
  bool early = false;
};

/// How the work is cut. Depends on the device and the shape, and on the context in no more than whether that is above
/// `few`: a result has the same bits in all contexts above, and one recording serves every position.
struct AttentionDecodePlan {
  int groups_per_kv = 0;   ///< groups of at most eight heads that share a key and value head
  int heads = 0;           ///< of a group; the last one of a key head may have fewer
  int groups = 0;          ///< of all
  int cluster = 1;         ///< blocks that have a piece together
  int cluster_of_one = 1;  ///< the same where splits = 1
  int splits = 0;          ///< pieces at most; 1 for a launch of its own for few positions
  int few = 0;             ///< positions for which such a launch is the faster one
  int very_few = 0;        ///< and for which it is better without clusters
  int alone = 0;           ///< positions that are one piece
  int least = 0;           ///< positions of one of several pieces, at least
};

namespace attention_decode_detail {

/// Warps of a block. In clusters four: such a block soon finds room beside those of the product before it, and has its keys
/// and values under way while they end.
template <int C>
inline constexpr int kWarps = C == 1 ? 8 : 4;
using decode_tile::kHeads, decode_tile::weight_of;
inline constexpr int kTile = decode_tile::kPositions;  // that a warp takes at a time
inline constexpr int kTogether = 8;                    // pieces whose loads are under way at the same time
/// Whether all blocks of a launch run at the same time, if there is room for them.
inline constexpr bool kBlocksTogether = kDeviceExecutor == Executor::gpu;
/// Positions that are not split, and those of a piece at least, with and without clusters.
inline constexpr int kAlone[2] = {256, 1024}, kLeast[2] = {64, 256};
/// Positions of a piece: no more pieces than splits, whole tiles.
__host__ __device__ constexpr int piece(int positions, const AttentionDecodePlan& plan) {
  if (positions <= plan.alone) return plan.alone;
  const int even = ((positions + plan.splits - 1) / plan.splits + kTile - 1) / kTile * kTile;
  return even > plan.least ? even : plan.least;
}

/// Queries of a group in shared memory, and the new token's row of the caches.
template <class KV, int HD>
struct Queries : decode_tile::Queries<HD> {
  alignas(16) __half newest_key[HD], newest_value[HD];
};
template <int HD>
struct Queries<float, HD> {
  static constexpr int kStride = HD + 4;
  __align__(16) float row[kHeads * kStride], newest_key[HD], newest_value[HD];
  float factor[kHeads];

  __device__ __forceinline__ void set(int head, int i, float x) { row[head * kStride + i] = x; }
};

/// Sixteen positions as a warp multiplies them: see decode_tile.cuh.
template <class KV, int HD>
struct Tile {
  decode_tile::Keys<HD> keys;
  decode_tile::Values values[HD / 64];

  __device__ __forceinline__ void load_keys(const __half* from, int first, int end, int stride, int lane) {
    keys.load(from, first, end, stride, lane);
  }
  __device__ __forceinline__ void load_values(const __half* from, int first, int end, int stride, int lane) {
#pragma unroll
    for (int u = 0; u < HD / 64; ++u) values[u].load(from + 64 * u, first, end, stride, lane);
  }
  __device__ __forceinline__ void put_newest(const Queries<KV, HD>& q, int row, int lane) {
    keys.put(q.newest_key, row, lane);
#pragma unroll
    for (int u = 0; u < HD / 64; ++u) values[u].put(q.newest_value + 64 * u, row, lane);
  }
  __device__ __forceinline__ void multiply(const Queries<KV, HD>& q, const __half*, int, int, int, int lane,
                                           float (&product)[4]) const {
    keys.multiply(q, lane, product);
  }
  __device__ __forceinline__ void add(const Queries<KV, HD>&, float (&sum)[HD / 16][4],
                                      const float (&weight)[4], const __half*, int, int, int, int) const {
#pragma unroll
    for (int u = 0; u < HD / 64; ++u) values[u].add(sum + 4 * u, weight);
  }
};

/// An f32 cache: no tensor core takes its elements whole, so lanes multiply, and read each key where they need it.
template <int HD>
struct Tile<float, HD> {
  int newest = -1;  // the new token's place in the tile, if it has one: its row is in shared memory

  __device__ __forceinline__ void load_keys(const float*, int, int, int, int) {}
  __device__ __forceinline__ void load_values(const float*, int, int, int, int) {}
  __device__ __forceinline__ void put_newest(const Queries<float, HD>&, int row, int) { newest = row; }
  __device__ __forceinline__ void multiply(const Queries<float, HD>& q, const float* keys, int first, int end,
                                           int stride, int lane, float (&product)[4]) const {
    const int row = 4 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) product[i] = 0.0f;
    for (int e = 0; e < HD; e += 4) {
      const float4 x = *reinterpret_cast<const float4*>(q.row + lane / 4 * q.kStride + e);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + row + i >= end) continue;
        const float4 y = *reinterpret_cast<const float4*>(row + i == newest ? q.newest_key + e
                                                                            : keys + (row + i) * stride + e);
        product[i] += (x.x * y.x + x.y * y.y) + (x.z * y.z + x.w * y.w);
      }
    }
  }
  __device__ __forceinline__ void add(const Queries<float, HD>& q, float (&sum)[HD / 16][4],
                                      const float (&weight)[4], const float* values, int first, int end,
                                      int stride, int lane) const {
    const int group = lane / 4, member = lane % 4;
#pragma unroll
    for (int row = 0; row < kTile; ++row) {
      const float a = __shfl_sync(kAllLanes, weight[row % 4], 8 * member + row / 4);
      const float b = __shfl_sync(kAllLanes, weight[row % 4], 8 * member + 4 + row / 4);
      if (first + row >= end) continue;
      const float* from = row == newest ? q.newest_value : values + row * stride;
#pragma unroll
      for (int u = 0; u < HD / 64; ++u) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 x = *reinterpret_cast<const float4*>(from + 64 * u + 8 * group + 4 * half);
          float(&even)[4] = sum[4 * u + 2 * half];
          float(&odd)[4] = sum[4 * u + 2 * half + 1];
          even[0] += a * x.x, even[1] += b * x.x, even[2] += a * x.y, even[3] += b * x.y;
          odd[0] += a * x.z, odd[1] += b * x.z, odd[2] += a * x.w, odd[3] += b * x.w;
        }
      }
    }
  }
};

/// What the warps of a block bring together, and the blocks of a cluster.
template <int HD, int C>
struct Sums {
  static_assert(C == kHeads);             // a block of the cluster finishes a head
  static constexpr int kStride = HD + 4;  // floats
  __align__(16) float of_warp[kWarps<C>][kHeads][kStride];
  float highest[kWarps<C>][kHeads], total[kWarps<C>][kHeads];
  __align__(16) float of_block[C][HD];     // each written by its block of the cluster
  __align__(16) float4 of_block_stats[C];  // highest, total
};
template <int HD>
struct Sums<HD, 1> {
  static constexpr int kStride = HD + 4;
  __align__(16) float of_warp[kWarps<1>][kHeads][kStride];
  float highest[kWarps<1>][kHeads], total[kWarps<1>][kHeads];
  runs::Shared<kWarps<1>> runs;
  bool last;
};

__device__ __forceinline__ void add_scaled(float4& sum, float weight, float4 v) {
  sum.x += weight * v.x, sum.y += weight * v.y, sum.z += weight * v.z, sum.w += weight * v.w;
}

/// @tparam C blocks of a cluster
template <class KV, int HD, int C>
__global__ void __launch_bounds__(32 * kWarps<C>, C == 1 && HD == 128 ? 1 : 2)
    attention_decode(const float* q,                     // [heads][HD]
                     const float* k,                     // [kv_heads][HD]
                     const float* v,                     // [kv_heads][HD]
                     const float* __restrict__ cosines,  // [context][HD/2]
                     const float* __restrict__ sines,    // [context][HD/2]
                     KV* keys,                           // [context][kv_heads][HD]
                     KV* values,                         // [context][kv_heads][HD]
                     const int* position, float* out,    // [heads][HD] or null
                     unsigned char* planes,              // or null
                     unsigned* counters,                 // [groups][C]: launches that had packets
                     Packet* packets,                    // of [groups][splits], see 5 and 6
                     HeadShape s, AttentionDecodePlan plan, float scale, bool early) {
  __shared__ Queries<KV, HD> query;
  __shared__ Sums<HD, C> sums;
  constexpr int WARPS = kWarps<C>, THREADS = 32 * WARPS;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int split = static_cast<int>(blockIdx.x) / C,
            rank = static_cast<int>(blockIdx.x) % C;  // piece, block of it
  const int group = static_cast<int>(blockIdx.y);
  const int kv = group / plan.groups_per_kv;                  // 0..kv_heads-1
  const int in_kv = group % plan.groups_per_kv * plan.heads;  // first head of the group in its key head's
  const int of_kv = s.heads / s.kv_heads;                     // heads that share a key head
  const int heads = min(plan.heads, of_kv - in_kv);           // of the group
  const int head0 = kv * of_kv + in_kv;                       // first head of the group
  const int stride = s.kv_length();
  const int half = HD / 2;
  allow_next_kernel();
  if (!early) wait_for_previous_kernel();

  // 1. The piece of this cluster: positions begin .. end-1, tiles of 16; this block's warps have every C-th of them.
  const int newest = *position, positions = newest + 1;
  const int size = piece(positions, plan), active = (positions + size - 1) / size;
  if (split >= active) return;
  const int begin = split * size, end = min(begin + size, positions);
  const int tiles = (end - begin + kTile - 1) / kTile;
  const int mine = rank + C * warp;  // first tile of this warp, if below `tiles`
  const KV* const my_keys =
      keys + static_cast<long long>(begin) * stride + kv * HD;  // [end-begin] rows, stride apart
  const KV* const my_values = values + static_cast<long long>(begin) * stride + kv * HD;
  constexpr int PAIRS = HD / 64;
  float angle_c[PAIRS], angle_s[PAIRS];  // of the new token
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    angle_c[i] = cosines[static_cast<long long>(newest) * half + PAIRS * lane + i];
    angle_s[i] = sines[static_cast<long long>(newest) * half + PAIRS * lane + i];
  }
  Tile<KV, HD> tile;
  if (mine < tiles) {  // on its way while the kernel before ends; the newest row is not there yet
    tile.load_keys(my_keys + kTile * mine * stride, begin + kTile * mine, newest, stride, lane);
    tile.load_values(my_values + kTile * mine * stride, begin + kTile * mine, newest, stride, lane);
  }
  if constexpr (C > 1)
    cluster_barrier_relaxed();  // the other blocks have begun: their shared memory can be written
  if (early) wait_for_previous_kernel();
  // The number of this launch's packets: one more than the last one's, which is in L2.
  unsigned* const counter = counters + group * C + rank;
  const unsigned step = kBlocksTogether && active > 1 ? __ldcg(counter) + 1 : 1;

  if (planes != nullptr && group == plan.groups - 1 && split == 0 && rank == 0)
    tile_acts::store_padding(planes, s.q_length());

  // 2. Queries, rotated: a warp has a head, a lane one or two pairs of it. Where the newest position is, a warp without a
  //    head, or else the first, has the new row of the caches.
  constexpr int PER = kHeads / WARPS;  // heads of a warp
  float q_low[PER][PAIRS], q_high[PER][PAIRS];
#pragma unroll
  for (int n = 0; n < PER; ++n) {
    const int head = warp + n * WARPS;
    const float* const row = q + (head0 + head) * HD + PAIRS * lane;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      q_low[n][i] = head < heads ? row[i] : 0.0f;
      q_high[n][i] = head < heads ? row[i + half] : 0.0f;
    }
  }
  const bool has_newest = split == active - 1 && rank == (tiles - 1) % C;  // in its last tile
  if (has_newest && warp == heads % WARPS) {
    const float* const new_k = k + kv * HD + PAIRS * lane;
    const float* const new_v = v + kv * HD + PAIRS * lane;
    KV* const key_row = keys + static_cast<long long>(newest) * stride + kv * HD + PAIRS * lane;
    KV* const value_row = values + static_cast<long long>(newest) * stride + kv * HD + PAIRS * lane;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float a = new_k[i], b = new_k[i + half], c = angle_c[i], d = angle_s[i];
      const int at = PAIRS * lane + i;
      store_kv(query.newest_key + at, a * c - b * d);
      store_kv(query.newest_key + at + half, b * c + a * d);
      store_kv(query.newest_value + at, new_v[i]);
      store_kv(query.newest_value + at + half, new_v[i + half]);
      if (in_kv == 0) {  // groups that share a key head have the same row
        key_row[i] = query.newest_key[at];
        key_row[i + half] = query.newest_key[at + half];
        value_row[i] = query.newest_value[at];
        value_row[i + half] = query.newest_value[at + half];
      }
    }
  }
#pragma unroll
  for (int n = 0; n < PER; ++n) {
    const int head = warp + n * WARPS;
    float low[PAIRS], high[PAIRS];
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float a = q_low[n][i], b = q_high[n][i];
      const float c = angle_c[i], d = angle_s[i];
      low[i] = a * c - b * d;
      high[i] = b * c + a * d;
      largest =
          max(largest, max(__float_as_uint(low[i]) & 0x7fffffffu, __float_as_uint(high[i]) & 0x7fffffffu));
    }
    int up = 0;  // the power of two
    if constexpr (sizeof(KV) == sizeof(__half)) {
      largest = __reduce_max_sync(kAllLanes, largest);
      up = decode_tile::query_power(largest);
    }
    const float times = decode_tile::power(up);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      query.set(head, PAIRS * lane + i, low[i] * times);
      query.set(head, PAIRS * lane + i + half, high[i] * times);
    }
    if (lane == 0) query.factor[head] = scale * decode_tile::power(-up);
  }
  __syncthreads();  // queries and the new row are written before any warp multiplies them

  // 3. Softmax in one pass, 16 positions at a time: running maximum, sum of the powers and weighted sum of the values.
  float running = -INFINITY, total = 0.0f;  // of head lane / 4
  float sum[HD / 16][4] = {};               // of heads 2 * member, 2 * member + 1
  const float factor = query.factor[lane / 4];
  // ANCHOR: attention_decode
  for (int n = mine; n < tiles; n += C * WARPS) {
    const int first = begin + kTile * n;
    const KV* const tile_keys = my_keys + kTile * n * stride;
    const KV* const tile_values = my_values + kTile * n * stride;
    if (has_newest && n == tiles - 1) tile.put_newest(query, newest - first, lane);
    float score[4], highest = running;
    tile.multiply(query, tile_keys, first, end, stride, lane, score);
    const int next = kTile * C * WARPS;
    tile.load_keys(tile_keys + next * stride, first + next, min(end, newest), stride, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      score[i] = first + 4 * (lane % 4) + i < end ? score[i] * factor : -INFINITY;
      highest = fmaxf(highest, score[i]);
    }
    highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 2));
    const float shrink = weight_of(running, highest);
    running = highest;
    total *= shrink;
    float weight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weight[i] = weight_of(score[i], highest, kWeightLog2);
      total += weight[i];
    }
    const float even = __shfl_sync(kAllLanes, shrink, lane % 4 * 8);  // of the heads whose sums the lane has
    const float odd = __shfl_sync(kAllLanes, shrink, lane % 4 * 8 + 4);
#pragma unroll
    for (int j = 0; j < HD / 16; ++j) {
      sum[j][0] *= even, sum[j][1] *= odd, sum[j][2] *= even, sum[j][3] *= odd;
    }
    tile.add(query, sum, weight, tile_values, first, end, stride, lane);
    tile.load_values(tile_values + next * stride, first + next, min(end, newest), stride, lane);
  }
  // ANCHOR_END: attention_decode

  // 4. The warps' sums, brought to the common maximum and added in their order. A warp that had positions has a finite
  //    maximum. Each head goes to the block of the cluster that finishes it.
  if (mine < tiles) {
    total += __shfl_xor_sync(kAllLanes, total, 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
    if (lane % 4 == 0) {
      sums.highest[warp][lane / 4] = running;
      sums.total[warp][lane / 4] = total;
    }
#pragma unroll
    for (int j = 0; j < HD / 16; ++j) {
      const int at = j / 4 * 64 + lane / 4 * 8 + j % 4 * 2, head = lane % 4 * 2;
      *reinterpret_cast<float2*>(&sums.of_warp[warp][head][at]) = make_float2(sum[j][0], sum[j][2]);
      *reinterpret_cast<float2*>(&sums.of_warp[warp][head + 1][at]) = make_float2(sum[j][1], sum[j][3]);
    }
  }
  __syncthreads();  // all sums are written before any is read
  const int warps =
      min(WARPS, (tiles - rank + C - 1) / C);  // with tiles; none if there are fewer tiles than blocks
  if constexpr (C == 1) {
    // ANCHOR: runs
    // 5. Without clusters: 32 elements a warp, from all warps with tiles. Of several pieces they go as packets to a block that
    //    brings the pieces together, each block some of the elements; what is one piece is ready.
    constexpr int BLOCKS = HD / 32;  // of a head
    const auto put = [&](int n, float x) {
      const int to = head0 * BLOCKS + n;
      if (out != nullptr) out[to * 32 + lane] = x;
      if (planes != nullptr) tile_acts::store_lane<true>(x, to, planes, s.q_length());
    };
    const auto packets_of = [&](int n) {
      return packets + static_cast<long long>(group * kHeads * BLOCKS + n) * (plan.splits * runs::kPackets);
    };
    for (int n = warp; n < heads * BLOCKS; n += WARPS) {
      const int head = n / BLOCKS, at = n % BLOCKS * 32 + lane;
      float highest = -INFINITY, all = 0.0f, x = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        if (w < warps) highest = fmaxf(highest, sums.highest[w][head]);
      }
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        if (w >= warps) continue;
        const float weight = weight_of(sums.highest[w][head], highest);
        all += weight * sums.total[w][head];
        x += weight * sums.of_warp[w][head][at];
      }
      if (active == 1) {
        put(n, x / all);
      } else {
        runs::send(x / all, highest + log2f(all), packets_of(n) + split * runs::kPackets, step);
      }
    }
    if (active == 1) return;

    // 6. All blocks of the launch are there at once, so each may wait for packets. On the emulator blocks come one after the
    //    other: there the last one finds all packets, and the counter goes round to zero by itself.
    int first = split, every = active;
    if constexpr (!kBlocksTogether) {
      __threadfence();  // this thread's packets are there before the block is counted
      __syncthreads();  // and so are those of the others
      if (threadIdx.x == 0) {
        const auto most = static_cast<unsigned>(active - 1);
        sums.last = atomicInc(counter, most) == most;
      }
      __syncthreads();  // `last` is known
      if (!sums.last) return;
      first = 0, every = 1;
    }
    for (int n = first; n < heads * BLOCKS; n += every) {
      const float x = runs::combine(sums.runs, packets_of(n), active, step, [] { __syncthreads(); });
      if (warp == 0) put(n, x);
    }
    // Who has sent a packet has read the number.
    if (kBlocksTogether && split == 0 && threadIdx.x == 0) *counter = step;
    // ANCHOR_END: runs
  } else {
    for (int i = static_cast<int>(threadIdx.x); i < heads * HD / 4 && warps > 0; i += THREADS) {
      const int head = i / (HD / 4), at = i % (HD / 4) * 4;
      float highest = -INFINITY, all = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        if (w < warps) highest = fmaxf(highest, sums.highest[w][head]);
      }
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        if (w >= warps) continue;
        const float weight = weight_of(sums.highest[w][head], highest);
        all += weight * sums.total[w][head];
        add_scaled(x, weight, *reinterpret_cast<const float4*>(&sums.of_warp[w][head][at]));
      }
      const auto there = static_cast<unsigned>(head);
      store_at(shared_address_in(there, &sums.of_block[rank][at]), x);
      if (at == 0)
        store_at(shared_address_in(there, &sums.of_block_stats[rank]), make_float4(highest, all, 0.0f, 0.0f));
    }
    cluster_barrier();  // what the other blocks sent is here, and nobody writes to a block that has ended

    // 5. The blocks' sums of this block's head, in the same way, by one warp: a lane has four elements.
    if (warp > 0 || rank >= heads) return;
    const int at = 4 * lane, blocks = min(C, tiles);
    const bool mine_too = at < HD;
    float4 result = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float highest = -INFINITY, all = 0.0f;
    if (mine_too) {
#pragma unroll
      for (int b = 0; b < C; ++b) {
        if (b < blocks) highest = fmaxf(highest, sums.of_block_stats[b].x);
      }
#pragma unroll
      for (int b = 0; b < C; ++b) {
        if (b >= blocks) continue;
        const float weight = weight_of(sums.of_block_stats[b].x, highest);
        all += weight * sums.of_block_stats[b].y;
        add_scaled(result, weight, *reinterpret_cast<const float4*>(&sums.of_block[b][at]));
      }
    }

    // ANCHOR: pieces
    // 6. The cluster with the last piece brings all together, in their order. The others send what they have as packets: all
    //    clusters are there at once, and what is waited for comes with its number.
    if (active > 1) {
      constexpr int OF_HEAD = HD / 2;  // packets: two for four elements
      Packet* const sent = packets + static_cast<long long>(group * C + rank) * plan.splits * OF_HEAD +
                           2 * lane;  // of piece 0
      const float4 own = result;
      const float2 own_stats = make_float2(highest, all);
      if (split < active - 1) {
        if (!mine_too) return;
        Packet* const to = sent + split * OF_HEAD;
        store_packet(to, {{__float_as_uint(own.x), __float_as_uint(own.y), __float_as_uint(highest)}, step});
        store_packet(to + 1, {{__float_as_uint(own.z), __float_as_uint(own.w), __float_as_uint(all)}, step});
        return;
      }
      highest = -INFINITY, all = 0.0f, result = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      for (int n0 = 0; n0 < active; n0 += kTogether) {
        Packet got[2 * kTogether];
        wait_packets(
            got,
            [&](int n) {
              return n0 + n / 2 < active - 1 && mine_too ? sent + (n0 + n / 2) * OF_HEAD + n % 2 : nullptr;
            },
            step);
        float4 x[kTogether];
        float2 of[kTogether];
        float higher = highest;
#pragma unroll
        for (int n = 0; n < kTogether; ++n) {
          const Packet &a = got[2 * n], &b = got[2 * n + 1];
          x[n] = make_float4(__uint_as_float(a.word[0]), __uint_as_float(a.word[1]),
                             __uint_as_float(b.word[0]), __uint_as_float(b.word[1]));
          of[n] = make_float2(__uint_as_float(a.word[2]), __uint_as_float(b.word[2]));
          if (n0 + n == active - 1) x[n] = own, of[n] = own_stats;
          if (n0 + n >= active) of[n] = make_float2(-INFINITY, 0.0f);
          higher = fmaxf(higher, of[n].x);
        }
        const float shrink = weight_of(highest, higher);
        highest = higher;
        all *= shrink;
        result = make_float4(result.x * shrink, result.y * shrink, result.z * shrink, result.w * shrink);
#pragma unroll
        for (int n = 0; n < kTogether; ++n) {
          const float weight = weight_of(of[n].x, highest);
          all += weight * of[n].y;
          add_scaled(result, weight, x[n]);
        }
      }
      if (lane == 0) *counter = step;  // who has sent a piece has read the number
    }
    // ANCHOR_END: pieces

    // 7. Out, as floats and as the codes that the next matmul takes.
    const float scale_down = 1.0f / all;  // one division where four would be four times as slow
    result = make_float4(result.x * scale_down, result.y * scale_down, result.z * scale_down,
                         result.w * scale_down);
    const int to = (head0 + rank) * HD + at;
    if (out != nullptr && mine_too) *reinterpret_cast<float4*>(out + to) = result;
    if (planes != nullptr) {
      if (!mine_too) result = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      tile_acts::store_eighth(result, to / 32, planes, 0, 1, s.q_length(), mine_too);
    }
  }
}

inline std::size_t counters_bytes(const AttentionDecodePlan& p) {
  return (static_cast<std::size_t>(p.groups * kHeads) * sizeof(unsigned) + 255) / 256 * 256;
}
/// Packets of a plan.
inline std::size_t packets_of(HeadShape s, const AttentionDecodePlan& p) {
  const int of_head = p.cluster > 1 ? s.head_dim / 2 : s.head_dim / 32 * runs::kPackets;
  return static_cast<std::size_t>(p.groups * p.splits) * static_cast<std::size_t>(kHeads * of_head);
}

}  // namespace attention_decode_detail

/// Whether attention_decode takes these heads; otherwise the error that it would return.
template <class KV>
Status attention_decode_supported(HeadShape s) {
  if (s.kv_heads < 1 || s.heads < 1 || s.heads % s.kv_heads != 0) {
    return Status::error("attention_decode: heads must be a multiple of kv_heads, not " +
                         std::to_string(s.heads) + " of " + std::to_string(s.kv_heads));
  }
  if (s.head_dim != 64 && s.head_dim != 128) {
    return Status::error("attention_decode: head_dim must be 64 or 128, not " + std::to_string(s.head_dim) +
                         "; rope_store and attention_f32 take others");
  }
  return {};
}

/// How attention_decode cuts the positions of up to `context`. @param sms multiprocessors of the device
/// @param cluster 8 where there are clusters of blocks, otherwise 1
inline AttentionDecodePlan attention_decode_plan(HeadShape s, int context, int sms, int cluster) {
  namespace d = attention_decode_detail;
  AttentionDecodePlan p;
  const int of_kv = s.heads / s.kv_heads;
  p.groups_per_kv = (of_kv + d::kHeads - 1) / d::kHeads;
  p.heads = (of_kv + p.groups_per_kv - 1) / p.groups_per_kv;
  p.groups = s.kv_heads * p.groups_per_kv;
  // Pieces of small heads are brought together faster by blocks than by clusters, those of large ones more slowly.
  p.cluster_of_one = cluster;
  p.cluster = s.head_dim == 64 ? 1 : cluster;
  p.few = cluster == 1 ? d::kAlone[0] : s.head_dim == 64 ? 512 : d::kAlone[1];
  p.very_few = cluster > p.cluster ? d::kWarps<1> * d::kTile : 0;  // a tile for each warp of a block
  p.alone = d::kAlone[p.cluster > 1 ? 1 : 0];
  p.least = d::kLeast[p.cluster > 1 ? 1 : 0];
  const int most = std::min({sms / (p.groups * p.cluster), runs::kMost, (context + p.least - 1) / p.least});
  p.splits = context <= p.few ? 1 : std::max(1, most);
  return p;
}

/// Launches for tokens at different positions, which differ in how they are cut: of very few, few and many positions.
inline constexpr int kAttentionDecodeReaches = 3;
inline int attention_decode_reach(const AttentionDecodePlan& p, int position) {
  return position < p.very_few ? 0 : position < p.few ? 1 : 2;
}
inline AttentionDecodePlan attention_decode_plan_of(AttentionDecodePlan p, int reach) {
  if (reach < 2) p.splits = 1;
  if (reach == 0) p.cluster_of_one = 1;
  return p;
}

/// Bytes of AttentionDecode::workspace.
inline std::size_t attention_decode_workspace(HeadShape s, const AttentionDecodePlan& p) {
  namespace d = attention_decode_detail;
  return d::counters_bytes(p) + d::packets_of(s, p) * sizeof(Packet);
}
/// The same, with clusters or without.
inline std::size_t attention_decode_workspace(HeadShape s, int context, int sms) {
  return std::max(attention_decode_workspace(s, attention_decode_plan(s, context, sms, 1)),
                  attention_decode_workspace(s, attention_decode_plan(s, context, sms, 8)));
}

/// Attention of one new token; see the head of this file. Heads of a group, heads/kv_heads neighbours, share a key and
/// value head. Results have the same bits every time. Does not synchronise.
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
/// @param plan how the positions are cut; by default attention_decode_plan of this device
template <class KV>
Status launch_attention_decode(const AttentionDecode<KV>& a, Stream& stream, bool programmatic,
                               const AttentionDecodePlan& plan) {
  namespace d = attention_decode_detail;
  Status ok = attention_decode_supported<KV>(a.shape);
  if (!ok.ok()) return ok;
  if (a.context < 1) return Status::error("attention_decode: context must be at least 1");
  if (a.out == nullptr && a.planes == nullptr)
    return Status::error("attention_decode: out or planes must be given, or both");
  std::uintptr_t together = 0;
  for (const void* p :
       {static_cast<const void*>(a.q), static_cast<const void*>(a.k), static_cast<const void*>(a.v),
        static_cast<const void*>(a.cosines), static_cast<const void*>(a.sines),
        static_cast<const void*>(a.keys), static_cast<const void*>(a.values), static_cast<const void*>(a.out),
        static_cast<const void*>(a.planes), static_cast<const void*>(a.workspace)}) {
    together |= reinterpret_cast<std::uintptr_t>(p);
  }
  if (together % 16 != 0)
    return Status::error("attention_decode: all arrays must begin at a multiple of 16 bytes");
  constexpr double kLog2E = 1.4426950408889634;
  const auto scale = static_cast<float>(kLog2E / std::sqrt(static_cast<double>(a.shape.head_dim)));
  auto* counters = reinterpret_cast<unsigned*>(a.workspace);
  auto* packets = reinterpret_cast<Packet*>(a.workspace + d::counters_bytes(plan));
  LaunchOptions options;
  options.programmatic = programmatic;
  const int cluster = plan.splits == 1 ? plan.cluster_of_one : plan.cluster;
  options.cluster_blocks = static_cast<unsigned>(cluster);
  if (cluster != 1 && cluster != d::kHeads)
    return Status::error("attention_decode: a cluster has 1 or 8 blocks, not " + std::to_string(cluster));
  if (plan.splits > runs::kMost || (plan.splits > 1 && d::kBlocksTogether &&
                                    plan.splits * cluster * plan.groups > multiprocessor_count())) {
    return Status::error("attention_decode: blocks that wait for each other must all have room: " +
                         std::to_string(plan.splits) + " pieces, of " +
                         std::to_string(plan.groups * cluster) + " blocks, are more than " +
                         std::to_string(runs::kMost) + " or have more than " +
                         std::to_string(multiprocessor_count()));
  }
  const auto of = [&]<int HD>() {
    return cluster == 1 ? d::attention_decode<KV, HD, 1> : d::attention_decode<KV, HD, 8>;
  };
  const auto kernel = a.shape.head_dim == 64 ? of.template operator()<64>() : of.template operator()<128>();
  return launch(options, kernel,
                dim3(static_cast<unsigned>(plan.splits * cluster), static_cast<unsigned>(plan.groups)),
                dim3(cluster == 1 ? 32 * d::kWarps<1> : 32 * d::kWarps<8>), 0, stream, a.q, a.k, a.v,
                a.cosines, a.sines, a.keys, a.values, a.position, a.out, a.planes, counters, packets, a.shape,
                plan, scale, a.early);
}
template <class KV>
Status launch_attention_decode(const AttentionDecode<KV>& a, Stream& stream, bool programmatic = false) {
  Status ok = attention_decode_supported<KV>(a.shape);
  if (!ok.ok()) return ok;
  return launch_attention_decode(
      a, stream, programmatic,
      attention_decode_plan(a.shape, a.context, multiprocessor_count(), most_cluster_blocks()));
}

}  // namespace ladder
