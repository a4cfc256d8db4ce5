// Attention of one token inside a kernel whose blocks are all there at once, and whose rows come and go as packets.
//
// A unit is a key head and a run of positions; all heads of its group share what is read. A block has a unit, or none where
// the positions are few. Units of one run alone send what they have on; others send partial sums, and for every 32 elements
// of a head one warp of the grid brings those together. A partial sum is already divided by its total: beside its elements
// one number is enough, the logarithm of that total.
//
// USE     all threads of a block: finish(). On the emulator, where one block has all units: units() for every block's part,
//         then combine() for every block's.
// MAP     block -> units block, block + blocks, ..: warps 0..7 -> 16 positions' scores each, of 128 at a time; warps 8.. ->
//         64 elements of values of every fourth 16 positions. Warp w of block b -> task b + w * blocks of combining
// NEEDS   head_dim 64 or 128, at most 8 heads a key head; k and v with their biases, q likewise, not rotated
// TRAFFIC caches 2*(p+1)*kv_length*2 B, once; 176 B for every run and 32 elements, written and read again (in L2)
// SOURCE  decode_tile.cuh; https://arxiv.org/abs/1805.02867 for the running maximum
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/attention/decode_tile.cuh"
#include "kernels/attention/runs.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/named_barrier.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/elementwise/rope_store.cuh"
#include "kernels/token/exchange.cuh"

namespace ladder::token {

/// A layer's attention, of one token.
struct AttendArgs {
  HeadShape heads;
  int position, blocks, block;
  __half *keys, *values;    // of the layer: [context][kv_heads][head_dim]
  const Packet *q, *k, *v;  // two elements a packet
  Packet *mixed, *partial;  // codes of the result; attend_packets()
  const float2* angle;      // [head_dim / 2] in shared memory: cosine and sine of the position
  unsigned char* scratch;   // Attend::kScratchBytes of shared memory
  unsigned step;
};

inline constexpr int kAttendHeads = decode_tile::kHeads;  ///< of a group at most

/// How positions are cut.
struct Runs {
  int count, size;
};
inline constexpr int kMostRuns = ladder::runs::kMost;  ///< of a key head
inline constexpr int kAloneRun = 128;                  ///< positions that are one run
inline constexpr int kLeastRun = 128;                  ///< positions of one of several
/// Runs of a key head that there may be.
__host__ __device__ constexpr int most_runs(const HeadShape& heads, int blocks) {
  const int each = blocks / heads.kv_heads;
  return each < 1 ? 1 : each < kMostRuns ? each : kMostRuns;
}
__host__ __device__ constexpr Runs runs_of(int positions, int most) {
  if (positions <= kAloneRun || most == 1) return {1, positions};
  constexpr int TILE = decode_tile::kPositions;
  const int even = ((positions + most - 1) / most + TILE - 1) / TILE * TILE,
            size = even < kLeastRun ? kLeastRun : even;
  return {(positions + size - 1) / size, size};
}
/// Elements of AttendArgs::partial.
__host__ __device__ constexpr int attend_packets(const HeadShape& heads, int blocks) {
  return heads.heads * heads.head_dim / 32 * most_runs(heads, blocks) * ladder::runs::kPackets;
}

template <int HD>
struct Attend {
  static constexpr int kHeads = decode_tile::kHeads, kTile = decode_tile::kPositions;
  static constexpr int kHalves = HD / 64, kParts = 4;  // of a row of values; of the tiles
  static constexpr int kTiles = 8;                     // positions that are looked at together, in tiles
  static constexpr int kValueWarps = kParts * kHalves;
  static_assert(kTiles + kValueWarps <= kWarps && kTiles == 2 * kParts);

  struct alignas(16) Shared {
    union {
      decode_tile::Queries<HD> query;
      float sum[kParts][kHeads][HD + 4];  // when all scores are there
    };
    alignas(16) __half newest_key[HD];
    alignas(16) __half newest_value[HD];
    alignas(16) float4 score[kTiles][32];  // of a lane
    float most[kTiles][kHeads], highest[kHeads], total[kParts][kHeads];
  };
  static constexpr int kScratchBytes = sizeof(Shared);

  const AttendArgs& a;
  const int lane = static_cast<int>(threadIdx.x % 32);
  // What branches depend on, from lane 0: so the compiler knows that all lanes have the same. Otherwise every shuffle and
  // barrier behind such a branch is there twice, once for lanes that come one after the other.
  const int warp = same(static_cast<int>(threadIdx.x / 32)), position = same(a.position),
            blocks = same(a.blocks), block = same(a.block);
  const HeadShape heads = {same(a.heads.heads), same(a.heads.kv_heads), HD};

  __device__ __forceinline__ void finish() const {
    units();
    combine();
  }

  __device__ __forceinline__ void units() const {
    const Runs runs = runs_of(position + 1, most_runs(heads, blocks));
    for (int u = block; u < heads.kv_heads * runs.count; u += blocks) {
      if (u != block) meet();  // the last unit's sums have been read
      unit(u % heads.kv_heads, u / heads.kv_heads, runs);
    }
  }

  /// All warps of the block, whatever their part.
  static __device__ __forceinline__ void meet() { named_barrier(1, 32 * kWarps); }

  static __device__ __forceinline__ int same(int x) { return __shfl_sync(kAllLanes, x, 0); }

  /// A block's unit.
  struct Part {
    int kv, group, begin, end, tiles, stride;
    bool has_newest;  // in its last tile
  };

  // Elements of a row that a lane takes from packets: 2 j, 2 j + 1 and those half a head away.
  static constexpr int kLanes = HD / 4;  // of a head
  static __device__ __forceinline__ int element(int j, int i) { return i / 2 * (HD / 2) + 2 * j + i % 2; }
  __device__ __forceinline__ void take(const Packet* row, int j, float (&x)[4]) const {
    Packet got[2];
    wait_packets(
        got, [&](int n) { return row == nullptr ? nullptr : row + j + n * kLanes; }, a.step);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(got[i / 2].word[i % 2]);
  }
  __device__ __forceinline__ void turn(int j, float (&x)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 angle = a.angle[2 * j + i];
      const float low = x[i], high = x[2 + i];
      x[i] = low * angle.x - high * angle.y;
      x[2 + i] = high * angle.x + low * angle.y;
    }
  }

  /// Queries, rotated, to shared memory: by the first warps. What is no head is zero.
  __device__ __forceinline__ void take_queries(const Part& u, Shared& s) const {
    if (warp >= kHeads * kLanes / 32) return;
    const int head = (warp * 32 + lane) / kLanes, j = lane % kLanes;
    float x[4];
    take(head < u.group ? a.q + (u.kv * u.group + head) * (HD / 2) : nullptr, j, x);
    turn(j, x);
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2)
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, offset));
    const int up = decode_tile::query_power(largest);
    const float times = decode_tile::power(up);
#pragma unroll
    for (int i = 0; i < 4; ++i) s.query.set(head, element(j, i), x[i] * times);
    constexpr float SCALE = HD == 64 ? 1.44269504f / 8.0f : 1.44269504f / 11.3137085f;
    if (j == 0) s.query.factor[head] = SCALE * decode_tile::power(-up);
  }
  /// The new row of the caches, by the last two warps of the unit that has it.
  __device__ __forceinline__ void take_newest(const Part& u, Shared& s) const {
    if (!u.has_newest || warp < kWarps - 2) return;
    const bool is_key = warp == kWarps - 1;
    const int j = lane % kLanes;
    float x[4];
    take((is_key ? a.k : a.v) + u.kv * (HD / 2), j, x);
    if (is_key) turn(j, x);
    if (lane >= kLanes) return;
    __half* const newest = is_key ? s.newest_key : s.newest_value;
    __half* const cache =
        (is_key ? a.keys : a.values) + static_cast<long long>(position) * u.stride + u.kv * HD;
#pragma unroll
    for (int i = 0; i < 4; ++i) newest[element(j, i)] = cache[element(j, i)] = __float2half_rn(x[i]);
  }

  /// A warp's part: scores of every eighth tile.
  __device__ __forceinline__ void scores(const Part& u, Shared& s) const {
    const int stored = min(u.end, position);
    int first = u.begin + kTile * warp;
    const __half* keys = a.keys + static_cast<long long>(first) * u.stride + u.kv * HD;
    decode_tile::Keys<HD> key;
    key.load(keys, first, stored, u.stride, lane);  // on their way before the query is there
    take_queries(u, s);
    meet();
#pragma unroll 1
    for (int n0 = 0; n0 < u.tiles; n0 += kTiles) {
      if (n0 > 0) meet();
      if (first < u.end) {
        if (u.has_newest && first + kTile >= u.end) key.put(s.newest_key, position - first, lane);
        float score[4];
        key.multiply(s.query, lane, score);
        const float factor = s.query.factor[lane / 4];
        float most = -INFINITY;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          score[i] = first + 4 * (lane % 4) + i < u.end ? score[i] * factor : -INFINITY;
          most = fmaxf(most, score[i]);
        }
        s.score[warp][lane] = make_float4(score[0], score[1], score[2], score[3]);
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
        if (lane % 4 == 0) s.most[warp][lane / 4] = most;
        first += kTiles * kTile;
        keys += kTiles * kTile * u.stride;
        key.load(keys, first, stored, u.stride, lane);
      }
      meet();
    }
  }

  /// A warp's part: values times weights, of 64 elements and every fourth tile.
  __device__ __forceinline__ void sums(const Part& u, Shared& s) const {
    const int part = (warp - kTiles) / kHalves, half = (warp - kTiles) % kHalves;
    const int stored = min(u.end, position);
    int first = u.begin + kTile * part;
    const __half* values = a.values + static_cast<long long>(first) * u.stride + u.kv * HD + 64 * half;
    decode_tile::Values value[2];
    const auto load = [&](int t) {
      value[t].load(values + t * (kParts * kTile) * u.stride, first + t * (kParts * kTile), stored, u.stride,
                    lane);
    };
    load(0), load(1);
    take_newest(u, s);
    meet();
    float running = -INFINITY, total = 0.0f;  // of head lane / 4
    float sum[4][4] = {};                     // of heads 2 * member, 2 * member + 1
#pragma unroll 1
    for (int n0 = 0; n0 < u.tiles; n0 += kTiles) {
      if (n0 > 0) meet();
      meet();
      float highest = running;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if (t < u.tiles - n0) highest = fmaxf(highest, s.most[t][lane / 4]);
      }
      const float shrink = decode_tile::weight_of(running, highest);
      running = highest;
      total *= shrink;
      const float even =
          __shfl_sync(kAllLanes, shrink, lane % 4 * 8);  // of the heads whose sums the lane has
      const float odd = __shfl_sync(kAllLanes, shrink, lane % 4 * 8 + 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i][0] *= even, sum[i][1] *= odd, sum[i][2] *= even, sum[i][3] *= odd;
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int at = first + t * (kParts * kTile);
        if (at >= u.end) continue;
        const float4 score = s.score[part + t * kParts][lane];
        const float weight[4] = {decode_tile::weight_of(score.x, highest, kWeightLog2),
                                 decode_tile::weight_of(score.y, highest, kWeightLog2),
                                 decode_tile::weight_of(score.z, highest, kWeightLog2),
                                 decode_tile::weight_of(score.w, highest, kWeightLog2)};
        total += (weight[0] + weight[1]) + (weight[2] + weight[3]);
        if (u.has_newest && at + kTile >= u.end)
          value[t].put(s.newest_value + 64 * half, position - at, lane);
        value[t].add(sum, weight);
      }
      first += kTiles * kTile;
      values += kTiles * kTile * u.stride;
      load(0), load(1);
    }

    // The parts' sums have a common maximum: they are added as they are. Queries are not needed any more.
    total += __shfl_xor_sync(kAllLanes, total, 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
    if (half == 0 && lane % 4 == 0) {
      s.total[part][lane / 4] = total;
      if (part == 0) s.highest[lane / 4] = running;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 64 * half + lane / 4 * 8 + 2 * i, head = lane % 4 * 2;
      *reinterpret_cast<float2*>(&s.sum[part][head][at]) = make_float2(sum[i][0], sum[i][2]);
      *reinterpret_cast<float2*>(&s.sum[part][head + 1][at]) = make_float2(sum[i][1], sum[i][3]);
    }
  }

  __device__ __forceinline__ void unit(int kv, int run, const Runs& runs) const {
    Shared& s = *reinterpret_cast<Shared*>(a.scratch);
    const int group = heads.heads / heads.kv_heads, positions = position + 1;
    Part u;
    u.kv = kv, u.group = group, u.stride = heads.kv_length();
    u.begin = run * runs.size, u.end = min(u.begin + runs.size, positions);
    u.tiles = (u.end - u.begin + kTile - 1) / kTile;
    u.has_newest = run == runs.count - 1;

    // 1. Warps have one of three parts; they meet when queries and the new row are there, when the scores of some tiles
    //    are, and when these have been read.
    if (warp < kTiles) {
      scores(u, s);
    } else if (warp < kTiles + kValueWarps) {
      sums(u, s);
    } else {
      take_newest(u, s);
      meet();
      for (int n0 = 0; n0 < u.tiles; n0 += kTiles) {
        if (n0 > 0) meet();
        meet();
      }
    }
    meet();  // all sums are there

    // 2. Out, 32 elements a warp.
    for (int task = warp; task < group * (HD / 32); task += kWarps) {
      const int head = task / (HD / 32), at = task % (HD / 32) * 32 + lane,
                to = kv * group * (HD / 32) + task;
      float x = 0.0f, all = 0.0f;
#pragma unroll
      for (int p = 0; p < kParts; ++p) x += s.sum[p][head][at], all += s.total[p][head];
      x /= all;
      if (runs.count == 1) {
        send_codes(x, a.mixed + to * kBlockPackets, a.step);
        continue;
      }
      ladder::runs::send(x, s.highest[head] + log2f(all), partial_of(to, run), a.step);
    }
  }

  /// What units with several runs have sent, 32 elements at a time.
  __device__ __forceinline__ void combine() const {
    const Runs runs = runs_of(position + 1, most_runs(heads, blocks));
    if (runs.count == 1) return;
    for (int task = block; task < heads.heads * (HD / 32); task += blocks) {
      const float x = ladder::runs::combine(*reinterpret_cast<Combined*>(a.scratch), partial_of(task, 0),
                                            runs.count, a.step, meet);
      if (warp == 0) send_codes(x, a.mixed + task * kBlockPackets, a.step);
    }
  }
  using Combined = ladder::runs::Shared<kWarps>;
  static_assert(sizeof(Combined) <= kScratchBytes);

  /// Packets of a run's 32 elements.
  __device__ __forceinline__ Packet* partial_of(int task, int run) const {
    return a.partial +
           (static_cast<long long>(task) * most_runs(heads, blocks) + run) * ladder::runs::kPackets;
  }
};

}  // namespace ladder::token
