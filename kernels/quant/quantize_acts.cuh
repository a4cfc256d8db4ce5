// RUNG      quantize_q8_pad40_plain: a thread per block.  PREV none: this is the ground floor.
// COMPUTES  out[t][b] = activations 32b..32b+31 of row t as int8, by the rule of quantize_acts.hpp
// LAYOUT    acts [nt][id] f32, out [nt][id/32] BlockQ8Pad40
// MAP       grid(ceil(nt*id/8192)) block(256): thread -> 32 neighbouring activations, one block
// NEEDS     id % 32 == 0, acts at a multiple of 16 bytes, out at one of 4: checked by the launcher
// TRAFFIC   4*nt*id B read, 1.25*nt*id B written     WORK about 4*nt*id OP
// LOOK FOR  SASS: eight LDG.E.128, whose lanes are 128 bytes apart; two divisions a block
// EXPECT    each load asks for 32 sectors and uses half of each; one token of 3584 is 112 threads, on one SM
// BUILD     tested by kernels/quant/test_quantize_acts.cpp
//
// RUNG      quantize_q8_pad40: eight lanes per block.  PREV quantize_q8_pad40_plain: its lanes read 128 bytes
//           apart.
// COMPUTES  the same bits   LAYOUT the same
// MAP       grid(ceil(nt*id/1024)) block(256): lane -> four neighbouring activations, eight lanes -> a block
// NEEDS     the same   TRAFFIC the same   WORK the same, and six shuffles a lane
// LOOK FOR  SASS: one LDG.E.128, whose lanes are side by side; SHFL.BFLY
// EXPECT    loses to its predecessor nowhere; with few tokens both only take as long as a launch
// BUILD     as above
//
// RUNG      quantize_q8_pad40_t: the two planes of tensor-core kernels.  PREV quantize_q8_pad40: a matrix of
//           40-byte blocks has to be taken apart by everyone who copies a tile of it.
// COMPUTES  the same d, codes and sum for every token, zeros for the tokens that fill up the last tile of 64
// LAYOUT    acts [nt][id] f32, codes [tiles][id/32][2048] and scales [tiles][id/32][64] (quantize_acts.hpp)
// MAP       grid(ceil(tiles*id/64)) block(256): warp -> four tokens x one block, which are one line of codes
// NEEDS     id % 32 == 0, acts and codes at a multiple of 16 bytes, scales at one of 4
// TRAFFIC   4*nt*id B read, 1.125*nt*id B written, nt rounded up to a multiple of 64     WORK the same
// LOOK FOR  one store of 32 lanes that fills a line of 128 bytes
// EXPECT    as fast as quantize_q8_pad40 from 64 tokens on; with one token it writes 64 times what is needed
// BUILD     as above
//
// RUNG      quantize_q8_0: Q8_0 blocks of activations.  PREV quantize_q8_pad40: six bytes more a block.
// COMPUTES  the same d and codes   LAYOUT acts [nt][id] f32, out [nt][id/32] BlockQ8_0
// MAP       as quantize_q8_pad40
// NEEDS     id % 32 == 0, acts at a multiple of 16 bytes, out at one of 2
// TRAFFIC   4*nt*id B read, 1.0625*nt*id B written     WORK the same
// LOOK FOR  SASS: STG.E.U16: nothing wider fits a block of 34 bytes
// EXPECT    no faster for its fewer bytes; its readers pay for the alignment
// BUILD     as above
#pragma once

#include <cstdint>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/quant/quantize_acts.hpp"

namespace ladder {

inline constexpr int kQuantizeActsThreads = 256;

// ANCHOR: q8_scale
/// d and 1/d of a block. The inverse is 0 where all codes are 0.
struct Q8Scale {
  float d, inverse;
};

/// @param largest the bits of max |x|: magnitudes are in the order of their bits, infinities and NaNs last
__device__ __forceinline__ Q8Scale q8_scale(unsigned largest) {
  if (largest >= 0x7f800000u) return {__uint_as_float(0x7fffffffu), 0.0f};  // not finite: NaN
  const float d = __uint_as_float(largest) / 127.0f;
  const float inverse = 1.0f / d;
  if (inverse > 3.402823466e38f) return {0.0f, 0.0f};  // no finite inverse, as of zero
  return {d, inverse};
}
// ANCHOR_END: q8_scale

// ANCHOR: q8_codes
/// Magnitudes as bits, of which the largest decides.
__device__ __forceinline__ unsigned q8_largest(float4 x) {
  const unsigned a = __float_as_uint(x.x) & 0x7fffffffu, b = __float_as_uint(x.y) & 0x7fffffffu;
  const unsigned c = __float_as_uint(x.z) & 0x7fffffffu, d = __float_as_uint(x.w) & 0x7fffffffu;
  return max(max(a, b), max(c, d));
}

/// Four codes, the first in the lowest byte. rn is to the nearest, halves to even. No clamp: for the largest
/// x of the block, x * inverse is 127 but for its last bits.
__device__ __forceinline__ unsigned q8_codes(float4 x, float inverse) {
  if (inverse == 0.0f) return 0;  // x may be infinite, and x * 0 a NaN
  const unsigned a = static_cast<unsigned>(__float2int_rn(x.x * inverse)) & 0xffu;
  const unsigned b = static_cast<unsigned>(__float2int_rn(x.y * inverse)) & 0xffu;
  const unsigned c = static_cast<unsigned>(__float2int_rn(x.z * inverse)) & 0xffu;
  const unsigned d = static_cast<unsigned>(__float2int_rn(x.w * inverse)) & 0xffu;
  return a | b << 8 | c << 16 | d << 24;
}

/// sum + the four codes of a word.
__device__ __forceinline__ int q8_add(unsigned codes, int sum) {
  return __dp4a(static_cast<int>(codes), 0x01010101, sum);
}
// ANCHOR_END: q8_codes

/// f16 bits of d, and zeros above them: the first word of BlockQ8Pad40.
__device__ __forceinline__ unsigned q8_stored_scale(float d) { return __half_as_ushort(__float2half_rn(d)); }

// ANCHOR: quantize_q8_pad40_plain
__global__ void __launch_bounds__(kQuantizeActsThreads)
    quantize_q8_pad40_plain(const float* __restrict__ acts,  // [blocks][32]
                            BlockQ8Pad40* __restrict__ out,  // [blocks]
                            long long blocks) {
  const long long b = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;  // 0..blocks-1
  if (b >= blocks) return;

  // 1. The block, 16 bytes at a time, and its largest magnitude.
  const float4* from = reinterpret_cast<const float4*>(acts) + b * 8;  // [8]
  float4 x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = from[i];
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, q8_largest(x[i]));

  // 2. Codes and their sum. A block is ten words: scale, eight times four codes, sum.
  const Q8Scale scale = q8_scale(largest);
  unsigned* to = reinterpret_cast<unsigned*>(out + b);  // [10]
  to[0] = q8_stored_scale(scale.d);
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const unsigned codes = q8_codes(x[i], scale.inverse);
    to[1 + i] = codes;
    sum = q8_add(codes, sum);
  }
  to[9] = static_cast<unsigned>(sum);
}
// ANCHOR_END: quantize_q8_pad40_plain

// ANCHOR: q8_eighth
/// A block as one of eight neighbouring lanes sees it: four codes of its own, and what all eight know.
struct Q8Eighth {
  unsigned codes;  // the lane's, the first in the lowest byte
  unsigned d;      // f16 bits
  int sum;         // of all 32 codes
};

/// All 32 lanes of the warp must call this; lanes 8k..8k+7 bring the 32 activations of a block in order.
__device__ __forceinline__ Q8Eighth q8_eighth(float4 x) {
  unsigned largest = q8_largest(x);
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2)
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, offset));
  const Q8Scale scale = q8_scale(largest);
  const unsigned codes = q8_codes(x, scale.inverse);
  int sum = q8_add(codes, 0);
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  return {codes, q8_stored_scale(scale.d), sum};
}
// ANCHOR_END: q8_eighth

// ANCHOR: quantize_q8_pad40
__global__ void __launch_bounds__(kQuantizeActsThreads)
    quantize_q8_pad40(const float* __restrict__ acts,  // [blocks][32]
                      BlockQ8Pad40* __restrict__ out,  // [blocks]
                      long long blocks) {
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long b = thread / 8;                      // 0..blocks-1
  const int lane = static_cast<int>(threadIdx.x % 8);  // of the block's eight

  // 1. Four activations each: 512 neighbouring bytes a warp. Lanes past the end stay, for the shuffles.
  float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (b < blocks) x = reinterpret_cast<const float4*>(acts)[thread];
  const Q8Eighth block = q8_eighth(x);
  if (b >= blocks) return;

  // 2. Ten words: one lane has the scale, each lane four codes, one the sum.
  unsigned* to = reinterpret_cast<unsigned*>(out + b);  // [10]
  to[1 + lane] = block.codes;
  if (lane == 0) to[0] = block.d;
  if (lane == 7) to[9] = static_cast<unsigned>(block.sum);
}
// ANCHOR_END: quantize_q8_pad40

// ANCHOR: quantize_q8_pad40_t
__global__ void __launch_bounds__(kQuantizeActsThreads)
    quantize_q8_pad40_t(const float* __restrict__ acts,      // [nt][chunks][32]
                        std::int8_t* __restrict__ codes,     // [tiles][chunks][2048]
                        std::uint32_t* __restrict__ scales,  // [tiles][chunks][64]
                        long long nt, unsigned chunks, unsigned warps) {
  const unsigned warp = blockIdx.x * (kQuantizeActsThreads / 32) + threadIdx.x / 32;
  if (warp >= warps) return;                                                // the whole warp
  const unsigned line = warp / chunks;                                      // 0..16*tiles-1, of four tokens
  const unsigned chunk = warp % chunks;                                     // 0..chunks-1
  const int token = static_cast<int>(line % 16 * 4 + threadIdx.x / 8 % 4);  // 0..63, of the tile
  const int word = static_cast<int>(threadIdx.x % 8);                       // of the block's eight
  const unsigned tile = line / 16;

  // 1. Four rows of 128 bytes. The tokens that fill up a tile are zeros, and stay zeros: d, codes and sum.
  const long long t = static_cast<long long>(tile) * kQ8ActsTileTokens + token;
  float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (t < nt) x = reinterpret_cast<const float4*>(acts)[(t * chunks + chunk) * 8 + word];
  const Q8Eighth block = q8_eighth(x);

  // 2. The swizzle moves words inside the warp's own 128 bytes, so that they are one store all the same.
  const long long to = static_cast<long long>(tile) * chunks + chunk;
  *reinterpret_cast<unsigned*>(codes + to * kQ8ActsTileBytes + q8_acts_code_byte(token, word)) = block.codes;
  if (word == 0) {
    scales[to * kQ8ActsTileTokens + q8_acts_scale_word(token)] = block.d | static_cast<unsigned>(block.sum)
                                                                               << 16;
  }
}
// ANCHOR_END: quantize_q8_pad40_t

__global__ void __launch_bounds__(kQuantizeActsThreads)
    quantize_q8_0(const float* __restrict__ acts,  // [blocks][32]
                  BlockQ8_0* __restrict__ out,     // [blocks]
                  long long blocks) {
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long b = thread / 8;                      // 0..blocks-1
  const int lane = static_cast<int>(threadIdx.x % 8);  // of the block's eight
  float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (b < blocks) x = reinterpret_cast<const float4*>(acts)[thread];
  const Q8Eighth block = q8_eighth(x);
  if (b >= blocks) return;
  unsigned short* to = reinterpret_cast<unsigned short*>(out + b);  // [17]
  to[1 + 2 * lane] = static_cast<unsigned short>(block.codes);
  to[2 + 2 * lane] = static_cast<unsigned short>(block.codes >> 16);
  if (lane == 0) to[0] = static_cast<unsigned short>(block.d);
}

namespace detail {

/// What the kernels of this file ask of their arguments. @param most elements that a grid reaches
inline Status check_quantize_acts(const char* kernel, long long nt, long long id, const float* acts,
                                  const void* out, std::size_t out_alignment, long long most) {
  const std::string name = std::string(kernel) + ": ";
  if (nt < 1) return Status::error(name + "nt must be at least 1, not " + std::to_string(nt));
  if (id < 1 || id % kQ8ActsPerBlock != 0) {
    return Status::error(name + "id must be a positive multiple of " + std::to_string(kQ8ActsPerBlock) +
                         ", not " + std::to_string(id));
  }
  if (id > most / nt) {
    return Status::error(name + "at most " + std::to_string(most) + " activations at once, not " +
                         std::to_string(nt) + " x " + std::to_string(id));
  }
  if (reinterpret_cast<std::uintptr_t>(acts) % 16 != 0)
    return Status::error(name + "the activations must begin at a multiple of 16 bytes");
  if (reinterpret_cast<std::uintptr_t>(out) % out_alignment != 0) {
    return Status::error(name + "the output must begin at a multiple of " + std::to_string(out_alignment) +
                         " bytes");
  }
  return {};
}

inline constexpr long long kMostQuantizeBlocks = 0x7fffffffLL;  // of a grid

/// Launches a kernel whose threads take `per_thread` neighbouring activations each.
template <class Block>
Status launch_quantize_acts(const char* name, void (*kernel)(const float*, Block*, long long), int per_thread,
                            const float* acts, Block* out, long long nt, long long id, Stream& stream) {
  const long long per_block = static_cast<long long>(per_thread) * kQuantizeActsThreads;
  Status ok = check_quantize_acts(name, nt, id, acts, out, alignof(Block), kMostQuantizeBlocks * per_block);
  if (!ok.ok()) return ok;
  const dim3 grid(static_cast<unsigned>((nt * id - 1) / per_block + 1));
  return launch(kernel, grid, dim3(kQuantizeActsThreads), 0, stream, acts, out, nt * id / kQ8ActsPerBlock);
}

}  // namespace detail

/// out[nt][id/32] = acts[nt][id] as int8 blocks, both in device memory: the bits of quantize_q8_pad40_row. A
/// thread per block. Does not synchronise.
/// @param id a positive multiple of 32
inline Status launch_quantize_q8_pad40_plain(const float* acts, BlockQ8Pad40* out, long long nt, long long id,
                                             Stream& stream) {
  return detail::launch_quantize_acts("quantize_q8_pad40_plain", quantize_q8_pad40_plain, kQ8ActsPerBlock,
                                      acts, out, nt, id, stream);
}

/// The same bits with eight lanes per block: the one that programs use.
inline Status launch_quantize_q8_pad40(const float* acts, BlockQ8Pad40* out, long long nt, long long id,
                                       Stream& stream) {
  return detail::launch_quantize_acts("quantize_q8_pad40", quantize_q8_pad40, 4, acts, out, nt, id, stream);
}

/// The same d and codes as Q8_0 blocks. Does not synchronise.
/// @param id a positive multiple of 32
inline Status launch_quantize_q8_0(const float* acts, BlockQ8_0* out, long long nt, long long id,
                                   Stream& stream) {
  return detail::launch_quantize_acts("quantize_q8_0", quantize_q8_0, 4, acts, out, nt, id, stream);
}

/// The two planes of quantize_acts.hpp, the last tile of 64 tokens filled up with zeros. Does not
/// synchronise.
/// @param codes [q8_acts_planes(nt, id).codes], at a multiple of 16 bytes @param scales [....scales]
/// @param id a positive multiple of 32
inline Status launch_quantize_q8_pad40_t(const float* acts, std::int8_t* codes, std::uint32_t* scales,
                                         long long nt, long long id, Stream& stream) {
  constexpr const char* kName = "quantize_q8_pad40_t";
  constexpr int kPerWarp = 4 * kQ8ActsPerBlock;
  // Warps are counted in 31 bits; what fills up the last tile counts too.
  constexpr long long kMost = detail::kMostQuantizeBlocks * kPerWarp;
  Status ok = detail::check_quantize_acts(kName, nt, id, acts, codes, 16, kMost);
  if (!ok.ok()) return ok;
  const long long rows = (nt - 1) / kQ8ActsTileTokens * kQ8ActsTileTokens + kQ8ActsTileTokens;
  Status padded = detail::check_quantize_acts(kName, rows, id, acts, scales, alignof(std::uint32_t), kMost);
  if (!padded.ok()) return padded;
  const auto warps = static_cast<unsigned>(rows * id / kPerWarp);
  const dim3 grid((warps - 1) / (kQuantizeActsThreads / 32) + 1);
  return launch(quantize_q8_pad40_t, grid, dim3(kQuantizeActsThreads), 0, stream, acts, codes, scales, nt,
                static_cast<unsigned>(id / kQ8ActsPerBlock), warps);
}

}  // namespace ladder
