// Attention of one token whose positions are cut into runs that blocks have: a block's share of 32 elements of a head goes
// as packets (kernels/token/exchange.cuh) to the block that brings all of them together.
//
// A share is already divided by its total: beside its elements one number is enough, the logarithm of that total. Packet i
// has elements i, i + 11 and i + 22; the last one has the logarithm instead of the third.
#pragma once

#include <cmath>

#include "kernels/attention/decode_tile.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/token/exchange.cuh"

namespace ladder::runs {

inline constexpr int kPackets = 11;  ///< of a run's 32 elements
inline constexpr int kMost = 64;     ///< runs

/// By a warp, an element a lane.
/// @param x weighted sum over the run's positions, divided by the sum of the weights
/// @param logarithm to base 2 of that sum
__device__ __forceinline__ void send(float x, float logarithm, Packet* to, unsigned step) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const float second = __shfl_down_sync(kAllLanes, x, kPackets),
              third = __shfl_down_sync(kAllLanes, x, 2 * kPackets);
  if (lane < kPackets)
    store_packet(to + lane, {{__float_as_uint(x), __float_as_uint(second),
                              __float_as_uint(lane == kPackets - 1 ? logarithm : third)},
                             step});
}

/// What the warps of a block have of 32 elements.
template <int WARPS>
struct Shared {
  float sum[WARPS][32], highest[WARPS], total[WARPS];
};

/// 32 elements of all runs, by all warps of a block: half a warp takes a run. Anything may be in `s` that no thread will read
/// after its barrier.
/// @param from kPackets packets of each run, one run after the other
/// @param barrier of the block
/// @return for warp 0: the lane's element
template <int WARPS, class Barrier>
__device__ __forceinline__ float combine(Shared<WARPS>& s, const Packet* from, int count, unsigned step,
                                         Barrier&& barrier) {
  constexpr int LOADS = kMost / (2 * WARPS);
  static_assert(kMost % (2 * WARPS) == 0 && WARPS <= 16);
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  const int mine = 2 * warp + lane / 16, i = lane % 16;  // the first run; packet
  barrier();                                             // what was in `s` has been read
  if (2 * warp < count) {
    Packet got[LOADS];
    const auto run = [&](int n) { return mine + n * 2 * WARPS; };
    wait_packets(
        got, [&](int n) { return i < kPackets && run(n) < count ? from + run(n) * kPackets + i : nullptr; },
        step);
    float logarithm[LOADS], highest = -INFINITY;
#pragma unroll
    for (int n = 0; n < LOADS; ++n) {
      const float l = __uint_as_float(__shfl_sync(kAllLanes, got[n].word[2], lane / 16 * 16 + kPackets - 1));
      logarithm[n] = run(n) < count ? l : -INFINITY;
      highest = fmaxf(highest, logarithm[n]);
    }
    highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 16));
    float total = 0.0f, sum[3] = {};
#pragma unroll
    for (int n = 0; n < LOADS; ++n) {
      const float weight = decode_tile::weight_of(logarithm[n], highest);
      total += weight;
#pragma unroll
      for (int w = 0; w < 3; ++w) sum[w] += weight * __uint_as_float(got[n].word[w]);
    }
    total += __shfl_xor_sync(kAllLanes, total, 16);
#pragma unroll
    for (int w = 0; w < 3; ++w) {
      sum[w] += __shfl_xor_sync(kAllLanes, sum[w], 16);
      if (lane < kPackets && w * kPackets + lane < 32) s.sum[warp][w * kPackets + lane] = sum[w];
    }
    if (lane == 0) s.highest[warp] = highest, s.total[warp] = total;
  }
  barrier();  // all warps' sums are there
  if (warp > 0) return 0.0f;
  const int warps = min(WARPS, (count + 1) / 2);
  const float own = lane < warps ? s.highest[lane] : -INFINITY;
  float highest = own;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, offset));
  const float weight = decode_tile::weight_of(own, highest);
  const float total = warp_reduce_sum(lane < warps ? weight * s.total[lane] : 0.0f);
  float x = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const float of_warp = __shfl_sync(kAllLanes, weight, w);
    if (w < warps) x += of_warp * s.sum[w][lane];
  }
  return x / total;
}

}  // namespace ladder::runs
