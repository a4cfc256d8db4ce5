// Int8 activations in the order in which tensor cores want them beside tiles of weights (tiles.cuh): the same codes and
// scales as BlockQ8Pad40, the same 40 bytes a block, other addresses.
//
// Tokens come in groups of NT = 1 or 8, the last filled up with zeros; so are the blocks of a row, to a multiple of
// eight (256 activations). Two planes a group, pairs of neighbouring blocks side by side:
//   codes   [pairs][8][4][16]    at t: words t and t + 4 of the first block, then of the second
//           [blocks][32]         of a token alone: as they are
//   scales  [pairs][NT][16]      of each block: the scale as f32, then the sums of codes 0..15 and 16..31 as int16
//
// RUNG      quantize_tile_acts: f32 rows to int8 planes.  PREV quantize_q8_pad40: its blocks have to be taken apart again
// COMPUTES  the codes and scales of quantize_q8_pad40, optionally of x / sqrt(mean(x^2) + epsilon) * weight instead of x
// LAYOUT    acts [nt][id] f32, out as above
// MAP       grid(tokens of all groups, slices) block(256): block -> 1024 activations of a token, and every `slices` times
//           1024 further on; eight lanes -> a block of 32, lane -> four activations
// NEEDS     id % 32 == 0, acts and norm weights at multiples of 16 bytes: checked by the launcher
// TRAFFIC   4*nt*id B read, 1.25*nt*id B written     WORK about 4*nt*id OP
// LOOK FOR  SASS: LDG.E.128, SHFL.BFLY; one STG.E a lane
// EXPECT    no longer than a launch until the rows fill the multiprocessors; a normalisation comes for the price of a barrier
// BUILD     part of chapters/04-mmvq/mmvq.cu
//
// RUNG      unnormalised_tile_acts: int8 of a row before its normalisation.  PREV quantize_tile_acts: reads a row twice,
//           by one block
// COMPUTES  codes and f32 scales of x * weight, and the sum of x^2 for every 32; 1 / sqrt(mean(x^2) + epsilon) is left to
//           the product that follows (MmvqActs)
// LAYOUT    row [id] f32, planes of one token, squares [id/32] f32
// MAP       grid(ceil(id/256)) block(256): warp -> a block of 32, lane -> an activation
// NEEDS     id % 32 == 0, out at a multiple of 16 bytes: checked by the launcher
// TRAFFIC   8*id B read, 1.375*id B written     WORK about 5*id OP
// LOOK FOR  SASS: SHFL.BFLY, STG.E.U8
// EXPECT    the time of a launch; only the first row of a token needs it
// BUILD     part of chapters/04-mmvq/mmvq.cu
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "harness/device/device.hpp"
#include "harness/device/half_bits.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/quant/q8_acts.hpp"
#include "kernels/quant/quantize_acts.cuh"

namespace ladder::tile_acts {

inline constexpr int kMostTokens = 8;  ///< of a group: the columns of an mma instruction
inline constexpr int kThreads = 256;

/// Tokens of a group that holds nt of them: one alone, or the columns of the instruction. nt 1..8
__host__ __device__ constexpr int group_tokens(long long nt) { return nt <= 1 ? 1 : kMostTokens; }
/// Pairs of blocks of a row, filled up to whole steps of 256 activations.
__host__ __device__ constexpr long long pairs(long long id) { return (id + 255) / 256 * 4; }
/// Bytes of a group of nt tokens, nt 1..8.
__host__ __device__ constexpr std::size_t group_bytes(long long nt, long long id) {
  return static_cast<std::size_t>(pairs(id)) * static_cast<std::size_t>(group_tokens(nt)) * 80;
}
/// Bytes of nt tokens: groups of eight, and one of the rest.
__host__ __device__ constexpr std::size_t bytes(long long nt, long long id) {
  return static_cast<std::size_t>(nt / kMostTokens) * group_bytes(kMostTokens, id) +
         (nt % kMostTokens > 0 ? group_bytes(nt % kMostTokens, id) : 0);
}

/// Where a token's planes are: those of its group, and its place in it.
struct Place {
  std::size_t group;  // byte
  int token, tokens;  // of the group
};
__host__ __device__ constexpr Place place_of(long long t, long long nt, long long id) {
  const long long group = t / kMostTokens, rest = nt - group * kMostTokens;
  return {static_cast<std::size_t>(group) * group_bytes(kMostTokens, id), static_cast<int>(t % kMostTokens),
          group_tokens(rest < kMostTokens ? rest : kMostTokens)};
}
/// Byte of word w = 0..7 of the codes of block b, and of its scale, in the planes of a group.
__host__ __device__ constexpr std::size_t code_at(long long b, int token, int tokens, int w) {
  if (tokens == 1) return static_cast<std::size_t>(b * 32 + w * 4);
  return static_cast<std::size_t>(((b / 2 * tokens + token) * 4 + w % 4) * 16 + b % 2 * 8 + w / 4 * 4);
}
__host__ __device__ constexpr std::size_t scale_at(long long b, int token, int tokens, long long id) {
  return static_cast<std::size_t>(pairs(id) * tokens * 64 + (b / 2 * tokens + token) * 16 + b % 2 * 8);
}

/// The host's way from blocks to planes: what the kernel makes, for tests and experiments. [nt][id/32] -> bytes(nt, id)
inline std::vector<unsigned char> from_blocks(const BlockQ8Pad40* blocks, long long nt, long long id) {
  std::vector<unsigned char> out(bytes(nt, id));
  for (long long t = 0; t < nt; ++t) {
    const Place p = place_of(t, nt, id);
    unsigned char* planes = out.data() + p.group;
    for (long long b = 0; b < id / kQ8ActsPerBlock; ++b) {
      const BlockQ8Pad40& block = blocks[t * (id / kQ8ActsPerBlock) + b];
      for (int w = 0; w < 8; ++w) std::memcpy(planes + code_at(b, p.token, p.tokens, w), block.q + 4 * w, 4);
      std::int16_t sums[2] = {};
      for (int j = 0; j < 32; ++j) sums[j / 16] = static_cast<std::int16_t>(sums[j / 16] + block.q[j]);
      const float d = half_bits_to_float(block.d);
      std::memcpy(planes + scale_at(b, p.token, p.tokens, id), &d, 4);
      std::memcpy(planes + scale_at(b, p.token, p.tokens, id) + 4, sums, 4);
    }
  }
  return out;
}

/// Four activations of a block, lanes 8k..8k+7 together, to the planes of a group. All 32 lanes of a warp call this.
/// @param b block of the row; beyond the row x must be zero
/// @param store whether these eight lanes store what they have
__device__ __forceinline__ void store_eighth(float4 x, long long b, unsigned char* planes, int token,
                                             int tokens, long long id, bool store = true) {
  const int w = static_cast<int>(threadIdx.x % 8);
  unsigned largest = q8_largest(x);
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2)
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, offset));
  const Q8Scale scale = q8_scale(largest);
  const unsigned codes = q8_codes(x, scale.inverse);
  // Sums of either half: of lanes 0..3 and 4..7.
  int half = q8_add(codes, 0);
  half += __shfl_xor_sync(kAllLanes, half, 1);
  half += __shfl_xor_sync(kAllLanes, half, 2);
  const int upper = __shfl_xor_sync(kAllLanes, half, 4);
  if (!store) return;
  *reinterpret_cast<unsigned*>(planes + code_at(b, token, tokens, w)) = codes;
  if (w == 0) {
    const unsigned sums = (static_cast<unsigned>(half) & 0xffffu) | static_cast<unsigned>(upper) << 16;
    const auto d = static_cast<unsigned short>(q8_stored_scale(scale.d));
    *reinterpret_cast<uint2*>(planes + scale_at(b, token, tokens, id)) =
        make_uint2(__float_as_uint(__half2float(__ushort_as_half(d))), sums);
  }
}

/// One activation of each lane, a block of 32 together, to the planes of a token alone.
/// @tparam F16 the scale is rounded to f16: the bits of store_eighth. Otherwise it stays f32, which has a place for it and
///   no need of an activation's size to be known.
template <bool F16>
__device__ __forceinline__ void store_lane(float x, long long b, unsigned char* planes, long long id) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const Q8Scale scale = q8_scale(__reduce_max_sync(kAllLanes, __float_as_uint(x) & 0x7fffffffu));
  const int code = scale.inverse == 0.0f ? 0 : __float2int_rn(x * scale.inverse);
  const int half = __reduce_add_sync(kAllLanes, lane < 16 ? code : 0);
  const int upper = __reduce_add_sync(kAllLanes, lane < 16 ? 0 : code);
  planes[code_at(b, 0, 1, lane / 4) + static_cast<std::size_t>(lane % 4)] = static_cast<unsigned char>(code);
  if (lane == 0) {
    const unsigned sums = (static_cast<unsigned>(half) & 0xffffu) | static_cast<unsigned>(upper) << 16;
    const auto d = static_cast<unsigned short>(q8_stored_scale(scale.d));
    *reinterpret_cast<uint2*>(planes + scale_at(b, 0, 1, id)) =
        make_uint2(__float_as_uint(F16 ? __half2float(__ushort_as_half(d)) : scale.d), sums);
  }
}

/// A block of 32 of a row whose root-mean-square normalisation is still to come, an activation a lane: planes of
/// x * weight, with scales in f32, and the sum of x^2. The factor 1 / sqrt(mean(x^2) + epsilon), common to the row, is for
/// those who multiply: root_of.
__device__ __forceinline__ void store_unnormalised(float x, float weight, long long b, unsigned char* planes,
                                                   float* squares, long long id) {
  const float sum = warp_reduce_sum(x * x);
  if (threadIdx.x % kWarp == 0) squares[b] = sum;
  store_lane<false>(x * weight, b, planes, id);
}
/// That factor, by a warp. @param squares [id / 32]
__device__ __forceinline__ float root_of(const float* squares, long long id, float epsilon) {
  constexpr int kTogether = 4;  // loads under way at the same time
  float sum = 0.0f;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x % kWarp); i < id / 32; i += kTogether * kWarp) {
    float v[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) v[k] = i + k * kWarp < id / 32 ? squares[i + k * kWarp] : 0.0f;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) sum += v[k];
  }
  return 1.0f / sqrtf(warp_reduce_sum(sum) / static_cast<float>(id) + epsilon);
}

/// Zeros behind the last block of a token alone, to the end of its planes. By all threads of a block.
__device__ __forceinline__ void store_padding(unsigned char* planes, long long id) {
  const int words = static_cast<int>(pairs(id) * 2 - id / 32) * 10;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x)) {
    const long long b = id / 32 + i / 10;
    const int w = i % 10;  // eight words of codes, two of scale and sums
    *reinterpret_cast<unsigned*>(
        planes +
        (w < 8 ? code_at(b, 0, 1, w) : scale_at(b, 0, 1, id) + static_cast<std::size_t>(w - 8) * 4)) = 0;
  }
}

/// A slice of a row of activations to planes, by all threads of a block. Includes a barrier if `norm` is given.
/// @param x [id], or null for a token that only fills up its group
/// @param norm [id] weights of a root-mean-square normalisation, or null for none
/// @param slice of `slices`: the fours that a block's threads take, every `slices`th time
/// @param partial [threads / 32] shared
__device__ __forceinline__ void quantize_row(const float* x, const float* norm, float epsilon, int id,
                                             unsigned char* planes, int token, int tokens, int slice,
                                             int slices, float* partial) {
  const int threads = static_cast<int>(blockDim.x), me = static_cast<int>(threadIdx.x);
  const float4* row = reinterpret_cast<const float4*>(x);
  float scale = 1.0f;
  if (norm != nullptr) {
    // The sum of squares: lanes, warps, block, of the whole row whatever the slice. Every thread adds the warps' sums in the
    // same order.
    float sum = 0.0f;
#pragma unroll 4
    for (int i = me; x != nullptr && i < id / 4; i += threads) {
      const float4 v = row[i];
      sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    sum = warp_reduce_sum(sum);
    if (me % 32 == 0) partial[me / 32] = sum;
    __syncthreads();  // partial sums are written before any is read
    float total = 0.0f;
    for (int w = 0; w < threads / 32; ++w) total += partial[w];
    scale = 1.0f / sqrtf(total / static_cast<float>(id) + epsilon);
  }
  const int all = static_cast<int>(pairs(id)) * 16;  // fours of activations, padding included
  for (int i0 = slice * threads; i0 < all; i0 += slices * threads) {
    const int i = i0 + me;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (x != nullptr && i < id / 4) {
      v = row[i];
      if (norm != nullptr) {
        const float4 n = reinterpret_cast<const float4*>(norm)[i];
        v = make_float4(v.x * scale * n.x, v.y * scale * n.y, v.z * scale * n.z, v.w * scale * n.w);
      }
    }
    store_eighth(v, i / 8, planes, token, tokens, id, i < all);
  }
}

/// Blocks that share a row, of `rows` of them: a thread has one four of activations until the multiprocessors are busy. The
/// results do not depend on it.
inline unsigned slices_of(long long rows, long long id) {
  const long long most = (pairs(id) * 16 + kThreads - 1) / kThreads;
  return static_cast<unsigned>(std::clamp<long long>(2 * multiprocessor_count() / rows, 1, most));
}

// ANCHOR: quantize_tile_acts
__global__ void __launch_bounds__(kThreads) quantize_tile_acts(
    const float* acts,               // [nt][id]; written by the kernel before this one, so not __restrict__
    const float* __restrict__ norm,  // [id] or null
    float epsilon, unsigned char* __restrict__ out, int nt, int id) {
  __shared__ float partial[kThreads / 32];
  allow_next_kernel();
  wait_for_previous_kernel();
  const long long t = blockIdx.x;  // 0..nt-1, and on to the end of the last group
  const long long last_group = (nt - 1) / kMostTokens;
  const Place p = place_of(t < nt ? t : nt - 1, nt, id);
  const int token = static_cast<int>(t < nt ? p.token : t - last_group * kMostTokens);
  quantize_row(t < nt ? acts + t * id : nullptr, norm, epsilon, id, out + p.group, token, p.tokens,
               static_cast<int>(blockIdx.y), static_cast<int>(gridDim.y), partial);
}
// ANCHOR_END: quantize_tile_acts

/// Int8 planes of acts [nt][id], of bytes(nt, id) bytes at a multiple of 16, in device memory. With `norm` [id] the rows
/// are normalised first: x / sqrt(mean(x^2) + epsilon) * norm. Does not synchronise.
inline Status launch_quantize(const float* acts, const float* norm, float epsilon, void* out, long long nt,
                              long long id, Stream& stream, bool programmatic = false) {
  if (nt < 1 || id < 1 || id % kQ8ActsPerBlock != 0) {
    return Status::error("quantize_tile_acts: nt must be at least 1 and id a positive multiple of " +
                         std::to_string(kQ8ActsPerBlock) + ", not " + std::to_string(nt) + " and " +
                         std::to_string(id));
  }
  if ((reinterpret_cast<std::uintptr_t>(acts) | reinterpret_cast<std::uintptr_t>(norm) |
       reinterpret_cast<std::uintptr_t>(out)) %
          16 !=
      0) {
    return Status::error(
        "quantize_tile_acts: activations, weights and output must begin at a multiple of 16 bytes");
  }
  const long long whole = nt / kMostTokens * kMostTokens;
  const long long blocks = whole + (nt > whole ? group_tokens(nt - whole) : 0);
  LaunchOptions options;
  options.programmatic = programmatic;
  return launch(options, quantize_tile_acts, dim3(static_cast<unsigned>(blocks), slices_of(blocks, id)),
                dim3(kThreads), 0, stream, acts, norm, epsilon, static_cast<unsigned char*>(out),
                static_cast<int>(nt), static_cast<int>(id));
}

/// A row as store_unnormalised leaves it: for the first product of a token, whose row no product has made.
__global__ void __launch_bounds__(kThreads)
    unnormalised_tile_acts(const float* row,                  // [id]; written by the kernel before this one
                           const float* __restrict__ weight,  // [id]
                           unsigned char* __restrict__ out, float* __restrict__ squares, int id) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x), b = i / 32;  // a warp a block of 32
  if (b < id / 32) store_unnormalised(row[i], weight[i], b, out, squares, id);
  if (blockIdx.x + 1 == gridDim.x) store_padding(out, id);
}

/// Planes of a row whose normalisation is still to come. @param out bytes(1, id) @param squares [id / 32]
/// Does not synchronise.
inline Status launch_unnormalised(const float* row, const float* weight, void* out, float* squares,
                                  long long id, Stream& stream, bool programmatic = false) {
  if (id < 1 || id % kQ8ActsPerBlock != 0) {
    return Status::error("unnormalised_tile_acts: id must be a positive multiple of " +
                         std::to_string(kQ8ActsPerBlock) + ", not " + std::to_string(id));
  }
  if (reinterpret_cast<std::uintptr_t>(out) % 16 != 0)
    return Status::error("unnormalised_tile_acts: the output must begin at a multiple of 16 bytes");
  LaunchOptions options;
  options.programmatic = programmatic;
  return launch(options, unnormalised_tile_acts, dim3(static_cast<unsigned>((id + kThreads - 1) / kThreads)),
                dim3(kThreads), 0, stream, row, weight, static_cast<unsigned char*>(out), squares,
                static_cast<int>(id));
}

}  // namespace ladder::tile_acts
