// Sixteen positions of an f16 cache, as a warp multiplies them on tensor cores with up to eight heads that share a key and
// value head. With group = lane / 4 (0..7), member = lane % 4:
//   scores   a lane has those of head `group` at positions 4 * member .. 4 * member + 3
//   sums     a lane has those of heads 2 * member and 2 * member + 1, elements 8 * group .. + 7 of 64
// so the scores of a lane are, in this order, the words of an mma's B operand, and nothing has to change lanes.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/attention/powers.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/mma.cuh"

namespace ladder::decode_tile {

inline constexpr int kPositions = 16;
inline constexpr int kHeads = 8;  ///< that share keys: columns of an mma instruction

/// 2^(score - highest + unit); 0 for a score of -infinity even where nothing is larger.
__device__ __forceinline__ float weight_of(float score, float highest, float unit = 0.0f) {
  return score == -INFINITY ? 0.0f : power_of_two(score - highest + unit);
}

/// What rounding to f16 takes from v, rounded itself.
__device__ __forceinline__ float half_rest(float v) { return v - __half2float(__float2half_rn(v)); }

/// The power of two by which a query is multiplied whose largest element has these bits: it brings that to 2^12.
__device__ __forceinline__ int query_power(unsigned largest) {
  return min(12 - (static_cast<int>(largest >> 23) - 127), 120);
}
__device__ __forceinline__ float power(int exponent) {
  return __uint_as_float(static_cast<unsigned>(127 + exponent) << 23);
}

/// Queries in shared memory, ready to be multiplied: f16 in two parts, each head times a power of two so that neither part
/// leaves the range of f16.
template <int HD>
struct Queries {
  static constexpr int kStride =
      HD + 32;  // halves: rows 64 bytes apart in the banks, so that eight lanes never meet
  alignas(16) __half high[kHeads * kStride], rest[kHeads * kStride];
  float factor[kHeads];  // what a product is times to be a score in powers of two

  __device__ __forceinline__ void set(int head, int i, float x) {
    high[head * kStride + i] = __float2half_rn(x);
    rest[head * kStride + i] = __float2half_rn(half_rest(x));
  }
};

template <int HD>
struct Keys {
  uint4 row[2][HD / 32];  // of rows 4 * (group / 2) + group % 2 and + 2: elements 32 * c + 8 * member ..

  static __device__ __forceinline__ int number(int group, int t) {
    return 4 * (group / 2) + 2 * t + group % 2;
  }
  /// Rows of positions below `end`; the others are zero. @param keys of the head, row `first`
  __device__ __forceinline__ void load(const __half* keys, int first, int end, int stride, int lane) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int n = number(lane / 4, t);
      const bool there = first + n < end;
#pragma unroll
      for (int c = 0; c < HD / 32; ++c) {
        row[t][c] = make_uint4(0, 0, 0, 0);
        if (there) row[t][c] = *reinterpret_cast<const uint4*>(keys + n * stride + 32 * c + 8 * (lane % 4));
      }
    }
  }
  /// Row n of the tile, from shared memory.
  __device__ __forceinline__ void put(const __half* key, int n, int lane) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      if (number(lane / 4, t) != n) continue;
#pragma unroll
      for (int c = 0; c < HD / 32; ++c)
        row[t][c] = *reinterpret_cast<const uint4*>(key + 32 * c + 8 * (lane % 4));
    }
  }
  // ANCHOR: decode_keys
  /// Products of the lane's head with four keys.
  __device__ __forceinline__ void multiply(const Queries<HD>& q, int lane, float (&product)[4]) const {
    float d[2][2][4] = {};  // two sums each, so that no instruction waits for the one before
#pragma unroll
    for (int c = 0; c < HD / 32; ++c) {
      const int at = lane / 4 * q.kStride + 32 * c + 8 * (lane % 4);
      const uint4 h = *reinterpret_cast<const uint4*>(q.high + at),
                  l = *reinterpret_cast<const uint4*>(q.rest + at);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        mma_m16n8k16_f16(d[t][0], {h.x, l.x, h.y, l.y}, {row[t][c].x, row[t][c].y});
        mma_m16n8k16_f16(d[t][1], {h.z, l.z, h.w, l.w}, {row[t][c].z, row[t][c].w});
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = i / 2, j = i % 2;
      product[i] = (d[t][0][j] + d[t][1][j]) + (d[t][0][2 + j] + d[t][1][2 + j]);
    }
  }
  // ANCHOR_END: decode_keys
};

/// Sixty-four elements of values.
struct Values {
  uint4 row[4];  // of rows 4 * member + r: elements 8 * group ..

  /// Rows of positions below `end`; the others are zero. @param values of the head, row `first`
  __device__ __forceinline__ void load(const __half* values, int first, int end, int stride, int lane) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int n = 4 * (lane % 4) + r;
      row[r] = make_uint4(0, 0, 0, 0);
      if (first + n < end) row[r] = *reinterpret_cast<const uint4*>(values + n * stride + 8 * (lane / 4));
    }
  }
  /// Row n of the tile, from shared memory.
  __device__ __forceinline__ void put(const __half* value, int n, int lane) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (4 * (lane % 4) + r == n) row[r] = *reinterpret_cast<const uint4*>(value + 8 * (lane / 4));
    }
  }
  // ANCHOR: decode_values
  /// sums += values * weights. @param weight of the lane's head at its four positions
  /// @param sum four times: of the even head elements 2 j and 2 j + 1 of the lane's eight are [j][0] and [j][2]
  __device__ __forceinline__ void add(float (*sum)[4], const float (&weight)[4]) const {
    const std::uint32_t high[2] = {pack_halves(weight[0], weight[1]), pack_halves(weight[2], weight[3])};
    const std::uint32_t rest[2] = {pack_halves(half_rest(weight[0]), half_rest(weight[1])),
                                   pack_halves(half_rest(weight[2]), half_rest(weight[3]))};
#pragma unroll
    for (int j = 0; j < 4;
         ++j) {  // row `group` of A: element 2 * j of the lane's eight, row `group` + 8: 2 * j + 1
      const unsigned x[4] = {word(row[0], j), word(row[1], j), word(row[2], j), word(row[3], j)};
      const std::uint32_t a[4] = {__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[0], x[1], 0x7632),
                                  __byte_perm(x[2], x[3], 0x5410), __byte_perm(x[2], x[3], 0x7632)};
      mma_m16n8k16_f16(sum[j], a, high);
      mma_m16n8k16_f16(sum[j], a, rest);
    }
  }
  // ANCHOR_END: decode_values
  static __device__ __forceinline__ unsigned word(const uint4& v, int j) {
    return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w;
  }
};

}  // namespace ladder::decode_tile
