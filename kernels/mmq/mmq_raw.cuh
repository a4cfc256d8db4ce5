// RUNG      mmq_raw: a file's blocks, staged as they are, times int8 activations for many tokens.
// PREV      q4_k_q8_mmvq_multi: every token costs dp4a and scaling again; eight of them are its limit
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T, then the epilogue: bias, residual
// LAYOUT    weights blocks of Q4_0 or Q4_K as in a file, optionally with a plane of scales behind them; acts the two
//           planes of kernels/quant/quantize_acts.hpp; out row-major f32
// MAP       grid(ceil(nt/64), ceil(od/128), ksplit) block(256): block -> 64 tokens x 128 rows, 256 of k at a time;
//           warp -> 64 tokens x 16 rows; tokens are the sixteen rows of the instruction, rows of weights its eight columns
// NEEDS     id % 256 == 0, any od and nt, weights at a multiple of 16 bytes, sm_80: checked by the launcher
// TRAFFIC   weights od*id*bpe B, acts 1.125*nt*id B (nt up to a multiple of 64), out 4*nt*od B; from L2 to shared memory
//           weights pass ceil(nt/64) times, acts ceil(od/128) times
// WORK      2*nt*od*id int8_op
// LOOK FOR  SASS: LDSM.16.M88.4 for the activations, LDS.32 for the weights, I2F after each IMMA.16832.S8.S8
// EXPECT    loses to mmq_tiles wherever there are enough tokens: nibbles are unpacked again for every 64 tokens by a warp
//           that has sixteen rows, and each result is converted, scaled and added
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/06-mmq/mmq.cu -o mmq
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "harness/device/device.hpp"
#include "harness/experiment/rung.hpp"
#include "kernels/device/cp_async.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/ldmatrix.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/gemm/epilogue.cuh"
#include "kernels/gemm/split_k.cuh"
#include "kernels/quant/blocks.hpp"
#include "kernels/quant/quantize_acts.hpp"

namespace ladder {
namespace mmq {

inline constexpr int kRawTokens = kQ8ActsTileTokens, kRawRows = 128, kRawChunks = 8, kRawThreads = 256;

/// What multiplies the codes of a sub-block of 32, and what is added for each activation: w = scale * code + offset.
struct ScaleOffset {
  float scale, offset;
};

// ANCHOR: mmq_raw_buffer
/// One step of k in shared memory.
struct RawBuffer {
  unsigned char acts[kRawChunks][kQ8ActsTileBytes];         // as in the plane
  std::uint32_t act_scales[kRawChunks][kQ8ActsTileTokens];  // as in the plane
  unsigned char weights[kRawRows][128];                     // 256 nibbles a row, eight pieces of 16 bytes
  ScaleOffset scales[kRawChunks][kRawRows];
};

/// Where piece 0..7 of a row is. With the row's number XORed in, eight rows' equal pieces lie in different banks.
template <bool XOR>
__device__ __forceinline__ int raw_piece(int row, int piece) {
  return (XOR ? piece ^ row % 8 : piece) * 16;
}
// ANCHOR_END: mmq_raw_buffer

/// Scale and offset of sub-block 0..7 of a block of Q4_K. @param head its first 16 bytes: d, dmin and the packed scales
__device__ __forceinline__ ScaleOffset raw_scale(const uint4& head, int sub) {
  const float d = __half2float(__ushort_as_half(static_cast<unsigned short>(head.x & 0xffffu)));
  const float dmin = __half2float(__ushort_as_half(static_cast<unsigned short>(head.x >> 16)));
  const int at = 8 * (sub % 4);
  const unsigned a = head.y >> at, b = head.z >> at, c = head.w >> at;
  const unsigned scale = sub < 4 ? a & 63u : (c & 15u) | (a >> 2 & 48u);
  const unsigned min = sub < 4 ? b & 63u : (c >> 4 & 15u) | (b >> 2 & 48u);
  return {d * static_cast<float>(scale), -dmin * static_cast<float>(min)};
}

struct RawArguments {
  const unsigned char* weights;  // [od][id / block]
  const ScaleOffset* plane;      // [id / 32][od], or null
  const std::int8_t* codes;      // [ceil(nt/64)][chunks][2048]
  const std::uint32_t* scales;   // [ceil(nt/64)][chunks][64]
  float* out;                    // [nt][od]
  float* partials;               // [ksplit][nt][od]; null with ksplit 1
  GemmEpilogue epilogue;
  int nt, od, steps, per_split;
};

// ANCHOR: mmq_raw_stage
/// Starts or does the copies of step `step`; the caller waits for the started ones. Zeros for rows beyond the last.
template <class Block, bool XOR, bool PLANE>
__device__ __forceinline__ void stage_raw(RawBuffer& to, const RawArguments& g, int step) {
  const int thread = static_cast<int>(threadIdx.x);
  const int row0 = static_cast<int>(blockIdx.y) * kRawRows;
  const long long chunk0 = static_cast<long long>(blockIdx.x) * (g.steps * kRawChunks) + step * kRawChunks;

  // 1. Activations: the planes have been made for this, so 16 bytes at a time go where they are wanted.
  for (int v = thread; v < kRawChunks * kQ8ActsTileBytes / 16; v += kRawThreads)
    cp_async_cg(&to.acts[0][0] + 16 * v, g.codes + chunk0 * kQ8ActsTileBytes + 16 * v);
  for (int v = thread; v < kRawChunks * kQ8ActsTileTokens / 4; v += kRawThreads)
    cp_async_cg(&to.act_scales[0][0] + 4 * v, g.scales + chunk0 * kQ8ActsTileTokens + 4 * v);

  // 2. Weights: eight pieces a row.
  for (int v = thread; v < kRawRows * 8; v += kRawThreads) {
    const int row = v / 8, piece = v % 8;
    const bool there = row0 + row < g.od;
    const long long r = there ? row0 + row : 0;
    unsigned char* dst = &to.weights[row][raw_piece<XOR>(row, piece)];
    if constexpr (std::is_same_v<Block, BlockQ4_K>) {
      cp_async_cg(dst, g.weights + (r * g.steps + step) * 144 + 16 + 16 * piece, there ? 16 : 0);
    } else {  // blocks of 18 bytes: nothing wider than two fits their addresses, so they go through registers
      const auto* from =
          reinterpret_cast<const unsigned short*>(g.weights + ((r * g.steps + step) * 8 + piece) * 18);
      uint4 w = make_uint4(0, 0, 0, 0);
      float d = 0.0f;
      if (there) {
        d = __half2float(__ushort_as_half(from[0]));
        w.x = from[1] | static_cast<unsigned>(from[2]) << 16;
        w.y = from[3] | static_cast<unsigned>(from[4]) << 16;
        w.z = from[5] | static_cast<unsigned>(from[6]) << 16;
        w.w = from[7] | static_cast<unsigned>(from[8]) << 16;
      }
      *reinterpret_cast<uint4*>(dst) = w;
      to.scales[piece][row] = {d, -8.0f * d};
    }
  }

  // 3. Scales of Q4_K: from a plane that was made when the weights were loaded, or decoded here, a row a thread.
  if constexpr (std::is_same_v<Block, BlockQ4_K>) {
    if constexpr (PLANE) {
      for (int v = thread; v < kRawChunks * kRawRows; v += kRawThreads) {
        const int chunk = v / kRawRows, row = v % kRawRows;
        const bool there = row0 + row < g.od;
        const ScaleOffset* from =
            g.plane + (static_cast<long long>(step) * kRawChunks + chunk) * g.od + (there ? row0 + row : 0);
        cp_async_ca<8>(&to.scales[chunk][row], from, there ? 8 : 0);
      }
    } else if (thread < kRawRows) {
      const bool there = row0 + thread < g.od;
      uint4 head = make_uint4(0, 0, 0, 0);
      if (there)
        head = *reinterpret_cast<const uint4*>(
            g.weights + (static_cast<long long>(row0 + thread) * g.steps + step) * 144);
#pragma unroll
      for (int sub = 0; sub < kRawChunks; ++sub) to.scales[sub][thread] = raw_scale(head, sub);
    }
  }
}
// ANCHOR_END: mmq_raw_stage

// ANCHOR: mmq_raw
/// @tparam XOR pieces of weights swizzled @tparam BUFFERS 1, or 2 that take turns @tparam PLANE scales from a plane
template <class Block, bool XOR, int BUFFERS, bool PLANE>
__global__ void __launch_bounds__(kRawThreads) mmq_raw(const RawArguments g) {
  static_assert(std::is_same_v<Block, BlockQ4_0> || std::is_same_v<Block, BlockQ4_K>);
  RawBuffer* const buffers = dynamic_shared<RawBuffer>();  // [BUFFERS]
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int member = lane % 4;
  const int begin = static_cast<int>(blockIdx.z) * g.per_split, end = min(begin + g.per_split, g.steps);
  const int sixteens =
      (g.nt - static_cast<int>(blockIdx.x) * kRawTokens + 15) / 16;  // of tokens that there are
  float sums[4][2][4] = {};  // [sixteen tokens][eight rows][token, token + 8][row, row + 1]

  const auto multiply = [&](const RawBuffer& in) {
#pragma unroll
    for (int s = 0; s < kRawChunks; ++s) {
      // 1. Eight rows of weights are the instruction's columns: words t and t + 4 of their 32 codes.
      std::uint32_t b[2][2];
      float4 w_scale[2];  // scale and offset of rows 2t and 2t + 1
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = warp * 16 + e * 8 + lane / 4;
        const auto word = [&](int piece) {
          return *reinterpret_cast<const std::uint32_t*>(
              &in.weights[row][raw_piece<XOR>(row, piece) + 4 * member]);
        };
        if constexpr (std::is_same_v<Block,
                                     BlockQ4_K>) {  // 32 bytes: low nibbles are one sub-block, high the next
          const int shift = s % 2 * 4;
          b[e][0] = word(s / 2 * 2) >> shift & 0x0f0f0f0fu;
          b[e][1] = word(s / 2 * 2 + 1) >> shift & 0x0f0f0f0fu;
        } else {  // 16 bytes: low nibbles are the first 16 codes, high ones the others
          const std::uint32_t w = word(s);
          b[e][0] = w & 0x0f0f0f0fu;
          b[e][1] = w >> 4 & 0x0f0f0f0fu;
        }
        w_scale[e] = *reinterpret_cast<const float4*>(&in.scales[s][warp * 16 + e * 8 + 2 * member]);
      }
      // 2. Tokens, sixteen at a time, are its rows. One vector has the scales of tokens k, k + 8, k + 16 and k + 24.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i >= sixteens) break;
        std::uint32_t a[4];
        ldmatrix<4>(a, in.acts[s] + q8_acts_ldmatrix_byte(i, lane));
        const uint2 x =
            *reinterpret_cast<const uint2*>(&in.act_scales[s][q8_acts_scale_word(16 * i + lane / 4)]);
        const std::uint32_t words[2] = {x.x, x.y};
        float da[2], xs[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          da[h] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[h] & 0xffffu)));
          xs[h] = da[h] * static_cast<float>(static_cast<int>(words[h]) >> 16);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int c[4];
          mma_m16n8k32_s8_zero(c, a, b[e]);
          const float scale[2] = {w_scale[e].x, w_scale[e].z}, offset[2] = {w_scale[e].y, w_scale[e].w};
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            sums[i][e][k] += da[k / 2] * scale[k % 2] * static_cast<float>(c[k]);
            sums[i][e][k] += xs[k / 2] * offset[k % 2];
          }
        }
      }
    }
  };

  if constexpr (BUFFERS == 1) {
    for (int step = begin; step < end; ++step) {
      stage_raw<Block, XOR, PLANE>(buffers[0], g, step);
      cp_async_wait_all();
      __syncthreads();  // everything of this step is there
      multiply(buffers[0]);
      __syncthreads();  // and has been read before the next step takes its place
    }
  } else {
    stage_raw<Block, XOR, PLANE>(buffers[0], g, begin);
    for (int step = begin; step < end; ++step) {
      cp_async_wait_all();
      __syncthreads();  // this step is there, and the other buffer has been read
      if (step + 1 < end) stage_raw<Block, XOR, PLANE>(buffers[(step + 1 - begin) % 2], g, step + 1);
      multiply(buffers[(step - begin) % 2]);
    }
  }

  const long long od = g.od, outs = static_cast<long long>(g.nt) * od;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int token = static_cast<int>(blockIdx.x) * kRawTokens + 16 * i + lane / 4 + k / 2 * 8;
        const int row = static_cast<int>(blockIdx.y) * kRawRows + warp * 16 + e * 8 + member * 2 + k % 2;
        if (token >= g.nt || row >= g.od) continue;
        const long long at = token * od + row;
        if (g.partials != nullptr) {
          g.partials[blockIdx.z * outs + at] = sums[i][e][k];
        } else {
          g.out[at] = apply_epilogue(g.epilogue, sums[i][e][k], token, row, od);
        }
      }
    }
  }
}
// ANCHOR_END: mmq_raw

/// Bytes from the blocks to the plane of scales behind them.
inline std::size_t raw_plane_at(Shape s) {
  return (static_cast<std::size_t>(s.od) * row_bytes(WeightType::q4_k, s.id) + 15) / 16 * 16;
}

/// A thread a sub-block: blocks as they are, and the scale and offset of each 32 weights, rows side by side.
static __global__ void __launch_bounds__(256)
    make_raw_plane(const unsigned char* __restrict__ blocks, unsigned char* __restrict__ copy,
                   ScaleOffset* __restrict__ plane, long long od, long long per_row) {
  const long long at = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= od * per_row * 8) return;
  const long long block = at / 8, row = block / per_row, b = block % per_row;
  const int sub = static_cast<int>(at % 8);
  const uint4* from = reinterpret_cast<const uint4*>(blocks + block * 144);
  plane[(b * 8 + sub) * od + row] = raw_scale(from[0], sub);
  uint4* to = reinterpret_cast<uint4*>(copy + block * 144);
  to[sub] = from[sub];
  if (sub == 0) to[8] = from[8];
}

inline std::size_t raw_plane_bytes(WeightType type, Shape s) {
  return type == WeightType::q4_k
             ? raw_plane_at(s) + sizeof(ScaleOffset) * static_cast<std::size_t>(s.od * (s.id / 32))
             : 0;
}
inline Status launch_raw_plane(WeightType type, const void* blocks, void* out, Shape s, Stream& stream) {
  if (type != WeightType::q4_k) return Status::error("mmq_raw: only q4_k weights have a plane of scales");
  if (Status ok = whole_blocks(type, s); !ok.ok()) return ok;
  if ((reinterpret_cast<std::uintptr_t>(blocks) | reinterpret_cast<std::uintptr_t>(out)) % 16 != 0)
    return Status::error("mmq_raw: blocks and their copy must begin at a multiple of 16 bytes");
  auto* copy = static_cast<unsigned char*>(out);
  const long long subs = s.od * (s.id / 32);
  return launch(make_raw_plane, dim3(static_cast<unsigned>((subs + 255) / 256)), dim3(256), 0, stream,
                static_cast<const unsigned char*>(blocks), copy,
                reinterpret_cast<ScaleOffset*>(copy + raw_plane_at(s)), s.od, s.id / 256);
}

/// Blocks of Q4_K, and behind them a plane of what their scales mean.
inline const WeightLayout kRawPlane = {"blocks and scales", raw_plane_bytes, launch_raw_plane};

}  // namespace mmq

/// Shapes of mmq_raw.
inline Status mmq_raw_supported(WeightType type, Shape s) {
  if (type != WeightType::q4_0 && type != WeightType::q4_k) {
    return Status::error(std::string("mmq_raw: weights must be q4_0 or q4_k, not ") + info(type).name);
  }
  if (Status ok = any_shape(s, {}); !ok.ok()) return ok;
  if (s.id % 256 != 0) return Status::error("id must be a multiple of 256, not " + std::to_string(s.id));
  constexpr long long kMostOd = 65535LL * mmq::kRawRows;
  if (s.od > kMostOd)
    return Status::error("od must be at most " + std::to_string(kMostOd) + ", not " + std::to_string(s.od));
  return {};
}

/// Parts of k that fill the device where there are few tokens; with more than 64 there are tiles enough.
/// @param sms multiprocessors
constexpr int mmq_raw_ksplit(Shape s, int sms) {
  if (s.nt > mmq::kRawTokens) return 1;
  const long long rows = (s.od + mmq::kRawRows - 1) / mmq::kRawRows, steps = s.id / 256;
  const long long wanted = (std::max(256LL, 2LL * sms) + rows - 1) / rows;
  return static_cast<int>(std::min({std::max(2LL, wanted), steps, static_cast<long long>(kMostKSplit)}));
}

/// out[nt][od] = acts . weights^T. Does not synchronise.
/// @param codes, scales launch_quantize_q8_pad40_t's @param ksplit parts of k, 1..id/256
/// @param workspace split_k_workspace_bytes(ksplit, nt, od) bytes at a multiple of 16, may be null with ksplit 1
template <class Block, bool XOR = true, int BUFFERS = 1, bool PLANE = false>
Status launch_mmq_raw(const void* weights, const std::int8_t* codes, const std::uint32_t* scales, float* out,
                      Shape s, int ksplit, float* workspace, const GemmEpilogue& epilogue, Stream& stream) {
  if (Status ok = mmq_raw_supported(Block::kType, s); !ok.ok()) return ok;
  if ((reinterpret_cast<std::uintptr_t>(weights) | reinterpret_cast<std::uintptr_t>(codes) |
       reinterpret_cast<std::uintptr_t>(scales)) %
          16 !=
      0) {
    return Status::error("weights and activations must begin at a multiple of 16 bytes");
  }
  mmq::RawArguments g{};
  g.steps = static_cast<int>(s.id / 256);
  if (ksplit < 1 || ksplit > g.steps) {
    return Status::error("mmq_raw: ksplit must be 1 to " + std::to_string(g.steps) + ", not " +
                         std::to_string(ksplit));
  }
  g.weights = static_cast<const unsigned char*>(weights);
  if constexpr (PLANE) g.plane = reinterpret_cast<const mmq::ScaleOffset*>(g.weights + mmq::raw_plane_at(s));
  g.codes = codes;
  g.scales = scales;
  g.out = out;
  g.epilogue = epilogue;
  g.nt = static_cast<int>(s.nt);
  g.od = static_cast<int>(s.od);
  g.per_split = (g.steps + ksplit - 1) / ksplit;
  const int parts = (g.steps + g.per_split - 1) / g.per_split;
  if (parts > 1 && workspace == nullptr) return Status::error("mmq_raw: ksplit above 1 needs a workspace");
  g.partials = parts > 1 ? workspace : nullptr;
  const dim3 grid(static_cast<unsigned>((s.nt + mmq::kRawTokens - 1) / mmq::kRawTokens),
                  static_cast<unsigned>((s.od + mmq::kRawRows - 1) / mmq::kRawRows),
                  static_cast<unsigned>(parts));
  Status ok = launch(mmq::mmq_raw<Block, XOR, BUFFERS, PLANE>, grid, dim3(mmq::kRawThreads),
                     BUFFERS * sizeof(mmq::RawBuffer), stream, g);
  if (!ok.ok() || parts == 1) return ok;
  return launch_split_k_reduce(workspace, out, epilogue, parts, s.nt, s.od, stream);
}

/// Upper bound on the f32 roundings that a term meets: scale, product, its place in the chunk's two additions; a sum over
/// the chunks of a part; the parts.
inline double mmq_raw_roundings(long long id) { return 4 + 2.0 * static_cast<double>(id) / 32 + kMostKSplit; }

}  // namespace ladder
