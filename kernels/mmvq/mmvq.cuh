// Products of packed weights with int8 activations for few tokens: four kernels, each with its own header
// below. What a unit of weights is and how it is multiplied is Format's (mmvq_formats.cuh).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "harness/device/device.hpp"
#include "harness/experiment/weight_types.hpp"
#include "kernels/device/cp_async.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/mmvq/mmvq_formats.cuh"

namespace ladder {

// What the launchers share ------------------------------------------------------------------------------

/// Most tokens of one launch of the kernels that have tokens on a grid axis: what that axis can count to.
inline constexpr long long kMmvqMaxTokens = 65535;
/// Most tokens of mmvq_multi, which has an accumulator for each.
inline constexpr long long kMmvqMultiMaxTokens = 8;

/// Shapes of all int8 products: rows of whole blocks of `type`, at most `max_nt` tokens.
inline Status mmvq_supported(WeightType type, Shape s, long long max_nt = kMmvqMaxTokens) {
  if (s.nt < 1 || s.od < 1 || s.id < 1) return Status::error("nt, od and id must all be at least 1");
  if (s.nt > max_nt) {
    return Status::error("nt must be 1 to " + std::to_string(max_nt) + ", not " + std::to_string(s.nt));
  }
  const WeightTypeInfo& t = info(type);
  if (s.id % t.block_elems == 0) return {};
  return Status::error("id must be a multiple of " + std::to_string(t.block_elems) + ", the block of " +
                       t.name + ", not " + std::to_string(s.id));
}

/// mmvq_supported, and operands where the format's loads may read.
template <class Format>
Status mmvq_arguments(const void* weights, const BlockQ8Pad40* acts, Shape s, long long max_nt) {
  if (Status ok = mmvq_supported(Format::kType, s, max_nt); !ok.ok()) return ok;
  if (reinterpret_cast<std::uintptr_t>(weights) % 16 != 0) {
    return Status::error("weights must begin at a multiple of 16 bytes");
  }
  if (reinterpret_cast<std::uintptr_t>(acts) % Format::kActsAlign != 0) {
    return Status::error("activations must begin at a multiple of " + std::to_string(Format::kActsAlign) +
                         " bytes");
  }
  return {};
}

/// How rows are dealt to warps. Depends on the shape of the matrix only, never on nt: the order in which a
/// row is added up does not either.
struct MmvqPlan {
  int warps_per_group;   ///< warps that share the rows of a group
  int groups_per_block;  ///< groups with rows of their own
  int warps() const { return warps_per_group * groups_per_block; }
  dim3 block() const {
    return dim3(32, static_cast<unsigned>(warps_per_group), static_cast<unsigned>(groups_per_block));
  }
};

inline constexpr int kMmvqMaxWarps = 8;

/// As few passes as 8 warps need, and then as few warps as make that many passes: 152 units are one pass of 5
/// warps, where 8 would leave 104 lanes without a unit. Small groups share a block once there are blocks
/// enough.
inline MmvqPlan mmvq_plan(long long units, long long groups) {
  const long long warp_loads = (units + 31) / 32;
  const long long passes = (warp_loads + kMmvqMaxWarps - 1) / kMmvqMaxWarps;
  MmvqPlan p;
  p.warps_per_group = static_cast<int>((warp_loads + passes - 1) / passes);
  p.groups_per_block = static_cast<int>(
      std::clamp(groups / 1024, 1LL, static_cast<long long>(kMmvqMaxWarps / p.warps_per_group)));
  return p;
}

/// Upper bound on the f32 roundings that a term meets: inside its unit, along its lane, in the butterfly,
/// across the warps of its row, and two of the decoded weight that it is compared with.
template <class Format>
double mmvq_roundings(long long id, int warps) {
  const long long units = id / Format::kUnit;
  const double steps = static_cast<double>((units + 32LL * warps - 1) / (32LL * warps));
  return Format::kRoundings + steps + 5 + warps + 2;
}

// One block, one row ------------------------------------------------------------------------------------
//
// RUNG      mmvq_block: int8 products, a block of 256 threads for every output.
// PREV      quant_f32_matmul: turns every code into a float.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T, acts in int8 blocks
// LAYOUT    weights row-major blocks of the type, acts [nt][id/32] BlockQ8Pad40, out row-major f32
// MAP       grid(od, nt) block(THREADS): thread -> every THREADS-th unit of 32 weights of one row
// NEEDS     id a multiple of the type's block, 1 <= nt <= 65535 (checked by the launcher, and said in its
//           error), weights 16-byte and acts 4-byte aligned, any od >= 1
// TRAFFIC   weights od*id/block_elems*block_bytes B, acts 40*nt*id/32 B, out 4*nt*od B
// WORK      2*nt*od*id FLOP
// LOOK FOR  SASS: IDP.4A.S8.S8, eight to a unit, and I2FP only for what they have summed up; LDG.E.U16 for
//           weights in blocks of 18, 22, 34, 110 and 210 bytes
// EXPECT    beats quant_f32_matmul where that one was limited by instructions. Asks for the activations once
//           for every row, 9 or 10 requests a unit beside 9 for Q4_0's weights; with id = 4864, 104 of 256
//           threads have no unit
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/04-mmvq/mmvq.cu -o mmvq

// ANCHOR: mmvq_block
/// Sum over the block: a butterfly in every warp, then the warps' sums in order. The result is thread 0's.
template <int WARPS>
__device__ __forceinline__ float mmvq_block_reduce(float sum, float* partial) {  // partial: shared [WARPS]
  sum = warp_reduce_sum(sum);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();  // thread 0 reads what other warps have written
  if (threadIdx.x == 0) {
    sum = partial[0];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) sum += partial[w];
  }
  return sum;
}

template <class Format, int THREADS>
__global__ void __launch_bounds__(THREADS)
    mmvq_block(const unsigned char* __restrict__ weights,  // [od][row_bytes]
               const BlockQ8Pad40* __restrict__ acts,      // [nt][id/32]
               float* __restrict__ out,                    // [nt][od]
               int od, int id, long long row_bytes) {
  __shared__ float partial[THREADS / 32];
  const int r = static_cast<int>(blockIdx.x);                                         // 0..od-1
  const int t = static_cast<int>(blockIdx.y);                                         // 0..nt-1
  const unsigned char* w = weights + r * row_bytes;                                   // [row_bytes]
  const BlockQ8Pad40* x = acts + static_cast<long long>(t) * (id / kQ8ActsPerBlock);  // [id/32]

  // 1. Units are dealt to the threads like cards.
  float acc = 0.0f;
  for (int u = static_cast<int>(threadIdx.x); u < id / Format::kUnit; u += THREADS) {
    const typename Format::Raw raw = Format::load(w, u);
    acc += Format::dot(Format::codes(raw, u), Format::acts(x, u));
  }

  // 2. 256 sums to one.
  const float total = mmvq_block_reduce<THREADS / 32>(acc, partial);
  if (threadIdx.x == 0) out[static_cast<long long>(t) * od + r] = total;
}
// ANCHOR_END: mmvq_block

/// out[nt][od] = acts[nt][id] . weights[od][id]^T. Weights packed as Format::kType, acts [nt][id/32], all in
/// device memory. Does not synchronise.
template <class Format, int THREADS = 256>
Status launch_mmvq_block(const void* weights, const BlockQ8Pad40* acts, float* out, Shape s, Stream& stream) {
  if (Status ok = mmvq_arguments<Format>(weights, acts, s, kMmvqMaxTokens); !ok.ok()) return ok;
  const dim3 grid(static_cast<unsigned>(s.od), static_cast<unsigned>(s.nt));
  return launch(mmvq_block<Format, THREADS>, grid, dim3(THREADS), 0, stream,
                static_cast<const unsigned char*>(weights), acts, out, static_cast<int>(s.od),
                static_cast<int>(s.id), static_cast<long long>(row_bytes(Format::kType, s.id)));
}

// Several rows ------------------------------------------------------------------------------------------
//
// RUNG      mmvq_rows: four rows share the activations; as many warps as a row has work for. With the formats
//           V2 it is rung v2: loads as wide as the addresses allow.
// PREV      mmvq_block: every row asks for the same activations again, and many threads have nothing to do.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T, acts in int8 blocks
// LAYOUT    weights row-major blocks of the type, acts [nt][id/32] BlockQ8Pad40, out row-major f32
// MAP       grid(ceil(od/(ROWS*groups)), nt) block(32, warps, groups): group -> ROWS rows, lane -> every
//           (32*warps)-th unit of them (mmvq_plan)
// NEEDS     as mmvq_block; with V2 acts 8-byte aligned
// TRAFFIC   weights od*id/block_elems*block_bytes B, acts 40*nt*id/32 B, out 4*nt*od B
// WORK      2*nt*od*id FLOP
// LOOK FOR  SASS: all LDG of a step before its first IDP.4A, but for plain Q8_0, Q6_K and Q3_K, whose many
//           narrow loads find no more registers; with V2 LDG.E.128 for Q4_K and Q5_K, LDG.E.64 for
//           activations, one LDG.E.U16 a row and SHF.R.W for Q4_0
// EXPECT    beats mmvq_block on long rows and on short ones. V2 beats the plain formats most where bytes were
//           read several times over (Q3_K, Q6_K, Q2_K), least for Q4_1. Loses where od is small: there are a
//           quarter as many groups as rows
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/04-mmvq/mmvq.cu -o mmvq

inline constexpr int kMmvqRows = 4;

// ANCHOR: mmvq_rows
template <class Format, int ROWS>
__global__ void __launch_bounds__(kMmvqMaxWarps * 32, Format::kBlocksPerSm)
    mmvq_rows(const unsigned char* __restrict__ weights,  // [od][row_bytes]
              const BlockQ8Pad40* __restrict__ acts,      // [nt][id/32]
              float* __restrict__ out,                    // [nt][od]
              int od, int id, long long row_bytes) {
  __shared__ float partial[kMmvqMaxWarps][ROWS];
  const int lane = static_cast<int>(threadIdx.x);   // 0..31
  const int part = static_cast<int>(threadIdx.y);   // which of the group's warps this is
  const int group = static_cast<int>(threadIdx.z);  // which of the block's groups
  const int warps = static_cast<int>(blockDim.y), groups = static_cast<int>(blockDim.z);
  const int warp = group * warps + part;                                              // of the block
  const int r0 = (static_cast<int>(blockIdx.x) * groups + group) * ROWS;              // first of ROWS rows
  const int t = static_cast<int>(blockIdx.y);                                         // 0..nt-1
  const BlockQ8Pad40* x = acts + static_cast<long long>(t) * (id / kQ8ActsPerBlock);  // [id/32]

  // 1. One row past the end reads the last row instead and is never stored: no branch inside the loop.
  const unsigned char* w[ROWS];  // ROWS x [row_bytes]
#pragma unroll
  for (int k = 0; k < ROWS; ++k) w[k] = weights + min(r0 + k, od - 1) * row_bytes;

  float acc[ROWS] = {};
  for (int u = part * 32 + lane; u < id / Format::kUnit; u += warps * 32) {
    // 2. All loads first: ROWS units are under way together.
    typename Format::Raw raw[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; ++k) raw[k] = Format::load(w[k], u);
    // 3. One set of activations for all rows.
    const typename Format::Acts a = Format::acts(x, u);
#pragma unroll
    for (int k = 0; k < ROWS; ++k) acc[k] += Format::dot(Format::codes(raw[k], u), a);
  }

  // 4. Lanes to one sum, then the sums of the group's warps in order.
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    const float sum = warp_reduce_sum(acc[k]);
    if (lane == 0) partial[warp][k] = sum;
  }
  __syncthreads();  // the group's first warp reads what its others have written
  if (part == 0 && lane < ROWS && r0 + lane < od) {
    float sum = partial[warp][lane];
    for (int p = 1; p < warps; ++p) sum += partial[warp + p][lane];
    out[static_cast<long long>(t) * od + r0 + lane] = sum;
  }
}
// ANCHOR_END: mmvq_rows

/// As launch_mmvq_block.
template <class Format, int ROWS = kMmvqRows>
Status launch_mmvq_rows(const void* weights, const BlockQ8Pad40* acts, float* out, Shape s, Stream& stream) {
  if (Status ok = mmvq_arguments<Format>(weights, acts, s, kMmvqMaxTokens); !ok.ok()) return ok;
  const long long groups = (s.od + ROWS - 1) / ROWS;
  const MmvqPlan p = mmvq_plan(s.id / Format::kUnit, groups);
  const dim3 grid(static_cast<unsigned>((groups + p.groups_per_block - 1) / p.groups_per_block),
                  static_cast<unsigned>(s.nt));
  return launch(mmvq_rows<Format, ROWS>, grid, p.block(), 0, stream,
                static_cast<const unsigned char*>(weights), acts, out, static_cast<int>(s.od),
                static_cast<int>(s.id), static_cast<long long>(row_bytes(Format::kType, s.id)));
}

// Several tokens ----------------------------------------------------------------------------------------
//
// RUNG      mmvq_multi: up to eight tokens in one pass over the weights.
// PREV      mmvq_rows: reads and unpacks every weight again for every token.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T, acts in int8 blocks
// LAYOUT    weights row-major blocks of the type, acts [nt][id/32] BlockQ8Pad40, out row-major f32
// MAP       grid(ceil(od/(ROWS*groups))) block(32, warps, groups): as mmvq_rows, each lane for all tokens
// NEEDS     id a multiple of the type's block, 1 <= nt <= 8 (checked by the launcher, and said in its error),
//           weights 16-byte and acts 8-byte aligned, any od >= 1
// TRAFFIC   weights od*id/block_elems*block_bytes B, acts 40*nt*id/32 B, out 4*nt*od B
// WORK      2*nt*od*id FLOP
// LOOK FOR  SASS: NT times as many IDP.4A as for one token, for the same LDG of weights; no LDL or STL (local
//           memory)
// EXPECT    two tokens cost little more than one; eight cost more, since activations take eight times the
//           requests and dp4a eight times the instructions. Loses to tensor cores above that
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/04-mmvq/mmvq.cu -o mmvq

inline constexpr int kMmvqMultiRows = 2;

// ANCHOR: mmvq_multi
/// Tokens 0..nt-1, nt <= NT. The order in which a token's terms are added is that of mmvq_rows, for every NT
/// and nt.
template <class Format, int ROWS, int NT>
__global__ void __launch_bounds__(kMmvqMaxWarps * 32, 2)
    mmvq_multi(const unsigned char* __restrict__ weights,  // [od][row_bytes]
               const BlockQ8Pad40* __restrict__ acts,      // [nt][id/32]
               float* __restrict__ out,                    // [nt][od]
               int nt, int od, int id, long long row_bytes) {
  __shared__ float partial[kMmvqMaxWarps][ROWS * NT];
  const int lane = static_cast<int>(threadIdx.x);   // 0..31
  const int part = static_cast<int>(threadIdx.y);   // which of the group's warps this is
  const int group = static_cast<int>(threadIdx.z);  // which of the block's groups
  const int warps = static_cast<int>(blockDim.y), groups = static_cast<int>(blockDim.z);
  const int warp = group * warps + part;                                  // of the block
  const int r0 = (static_cast<int>(blockIdx.x) * groups + group) * ROWS;  // first of ROWS rows
  const int blocks = id / kQ8ActsPerBlock;
  const unsigned char* w[ROWS];  // ROWS x [row_bytes]
#pragma unroll
  for (int k = 0; k < ROWS; ++k) w[k] = weights + min(r0 + k, od - 1) * row_bytes;

  float acc[ROWS][NT] = {};
  for (int u = part * 32 + lane; u < id / Format::kUnit; u += warps * 32) {
    // 1. A unit of each row is loaded and unpacked once.
    typename Format::Codes codes[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; ++k) codes[k] = Format::codes(Format::load(w[k], u), u);
      // 2. And multiplied with every token. One past the last is the last again and never stored.
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      const typename Format::Acts a = Format::acts(acts + static_cast<long long>(min(t, nt - 1)) * blocks, u);
#pragma unroll
      for (int k = 0; k < ROWS; ++k) acc[k][t] += Format::dot(codes[k], a);
    }
  }

  // 3. As in mmvq_rows, for ROWS * NT sums.
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      const float sum = warp_reduce_sum(acc[k][t]);
      if (lane == 0) partial[warp][k * NT + t] = sum;
    }
  }
  __syncthreads();  // the group's first warp reads what its others have written
  const int k = lane / NT, t = lane % NT;
  if (part == 0 && lane < ROWS * NT && r0 + k < od && t < nt) {
    float sum = partial[warp][lane];
    for (int p = 1; p < warps; ++p) sum += partial[warp + p][lane];
    out[static_cast<long long>(t) * od + r0 + k] = sum;
  }
}
// ANCHOR_END: mmvq_multi

/// As launch_mmvq_block, for 1 to 8 tokens.
template <class Format, int ROWS = kMmvqMultiRows>
Status launch_mmvq_multi(const void* weights, const BlockQ8Pad40* acts, float* out, Shape s, Stream& stream) {
  static_assert(ROWS * kMmvqMultiMaxTokens <= 32, "a lane for every sum");
  if (Status ok = mmvq_arguments<Format>(weights, acts, s, kMmvqMultiMaxTokens); !ok.ok()) return ok;
  const long long groups = (s.od + ROWS - 1) / ROWS;
  const MmvqPlan p = mmvq_plan(s.id / Format::kUnit, groups);
  const dim3 grid(static_cast<unsigned>((groups + p.groups_per_block - 1) / p.groups_per_block));
  const auto run = [&](auto kernel) {
    return launch(kernel, grid, p.block(), 0, stream, static_cast<const unsigned char*>(weights), acts, out,
                  static_cast<int>(s.nt), static_cast<int>(s.od), static_cast<int>(s.id),
                  static_cast<long long>(row_bytes(Format::kType, s.id)));
  };
  if (s.nt <= 2) return run(mmvq_multi<Format, ROWS, 2>);
  if (s.nt <= 4) return run(mmvq_multi<Format, ROWS, 4>);
  return run(mmvq_multi<Format, ROWS, 8>);
}

// Pipelined ---------------------------------------------------------------------------------------------
//
// RUNG      mmvq_pf: weights on their way into shared memory while those before them are multiplied.
// PREV      mmvq_rows with the formats V2: a lane's next loads wait for its present arithmetic.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T, acts in int8 blocks
// LAYOUT    weights row-major blocks of the type, acts [nt][id/32] BlockQ8Pad40, out row-major f32
// MAP       grid(ceil(od/(ROWS*groups)), nt) block(32, warps, groups): group -> ROWS rows, warp -> every
//           `warps`-th chunk of 32 units, lane -> one unit of it (mmvq_pf_plan)
// NEEDS     as mmvq_rows with V2. Where od*row_bytes is no multiple of 16, up to 14 bytes after the matrix
//           should be readable: they are not read, but compute-sanitizer takes a shortened cp.async for a
//           whole one
// TRAFFIC   weights od*id/block_elems*block_bytes B, acts 40*nt*id/32 B, out 4*nt*od B
// WORK      2*nt*od*id FLOP
// LOOK FOR  SASS: LDGSTS.E.BYPASS.128 and LDS for weights, LDG for activations only
// EXPECT    wins on rows of many chunks, whatever the block's size: 16-byte copies know nothing of blocks.
//           Loses on rows of one or two chunks, where there is nothing to run ahead of
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/04-mmvq/mmvq.cu -o mmvq

inline constexpr int kMmvqPfRows = 2;
inline constexpr int kMmvqPfMaxWarps = 4;

/// A chunk is 32 units of one row. Rows begin at any even address and chunks are multiples of 16 bytes, so
/// all chunks of a row begin equally far, 0 to 14 bytes, behind a multiple of 16. That is where the copy
/// begins, and the distance is the same in shared memory: every load finds the alignment that it would find
/// in global memory.
template <class Format>
struct MmvqPfTile {
  static constexpr int kBlocks = 32 * Format::kUnit / info(Format::kType).block_elems;  ///< of a chunk
  static constexpr int kBytes = kBlocks * info(Format::kType).block_bytes;              ///< of a chunk
  static constexpr int kWindow = kBytes + 16;                  ///< that holds it, in shared memory
  static constexpr int kStageBytes = kMmvqPfRows * kWindow;    ///< of a warp
  static constexpr int kStages = kStageBytes <= 2048 ? 4 : 3;  ///< one is read, the others arrive
  static constexpr int kWarpBytes = kStages * kStageBytes;
  static_assert(32 * Format::kUnit % info(Format::kType).block_elems == 0 && kBytes % 16 == 0);
  static_assert(kMmvqPfMaxWarps * kWarpBytes <= 48 * 1024 - 1024, "what every device gives without asking");
};

/// About four chunks to a warp. Depends on the shape of the matrix only.
template <class Format>
MmvqPlan mmvq_pf_plan(long long id, long long groups) {
  const long long chunks = (id / Format::kUnit + 31) / 32;
  MmvqPlan p;
  p.warps_per_group =
      static_cast<int>(std::clamp((chunks + 3) / 4, 1LL, static_cast<long long>(kMmvqPfMaxWarps)));
  p.groups_per_block = static_cast<int>(
      std::clamp(groups / 1024, 1LL, static_cast<long long>(kMmvqPfMaxWarps / p.warps_per_group)));
  return p;
}

// ANCHOR: mmvq_pf
template <class Format, int ROWS>
__global__ void __launch_bounds__(kMmvqPfMaxWarps * 32)
    mmvq_pf(const unsigned char* __restrict__ weights,  // [od][row_bytes]
            const BlockQ8Pad40* __restrict__ acts,      // [nt][id/32]
            float* __restrict__ out,                    // [nt][od]
            int od, int id, long long row_bytes) {
  using Tile = MmvqPfTile<Format>;
  constexpr int STAGES = Tile::kStages;
  __shared__ float partial[kMmvqPfMaxWarps][ROWS];
  const int lane = static_cast<int>(threadIdx.x);   // 0..31
  const int part = static_cast<int>(threadIdx.y);   // which of the group's warps this is
  const int group = static_cast<int>(threadIdx.z);  // which of the block's groups
  const int warps = static_cast<int>(blockDim.y), groups = static_cast<int>(blockDim.z);
  const int warp = group * warps + part;                                              // of the block
  const int r0 = (static_cast<int>(blockIdx.x) * groups + group) * ROWS;              // first of ROWS rows
  const int t = static_cast<int>(blockIdx.y);                                         // 0..nt-1
  const BlockQ8Pad40* x = acts + static_cast<long long>(t) * (id / kQ8ActsPerBlock);  // [id/32]
  const int units = id / Format::kUnit;
  const int chunks = (units + 31) / 32;
  unsigned char* ring = dynamic_shared<unsigned char>() + warp * Tile::kWarpBytes;  // [STAGES][ROWS][kWindow]

  // A row's place, rounded down to a multiple of 16 bytes, and what that took off. Its end, and that of the
  // matrix, count from there.
  const unsigned char* w[ROWS];
  int skew[ROWS], row_end[ROWS], matrix_end[ROWS];
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    const long long first = min(r0 + k, od - 1) * row_bytes;
    skew[k] = static_cast<int>(first % 16);
    w[k] = weights + (first - skew[k]);
    row_end[k] = skew[k] + static_cast<int>(row_bytes);
    matrix_end[k] = static_cast<int>(min(od * row_bytes - (first - skew[k]), 1LL << 30));
  }

  // Begins the copy of chunk c of all rows into a stage, 16 bytes a lane and step, and closes the group. Past
  // the last chunk the group is empty.
  const auto fetch = [&](int c, int stage) {
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
      unsigned char* window = ring + (stage * ROWS + k) * Tile::kWindow;
      const int end = min(row_end[k], c * Tile::kBytes + skew[k] + Tile::kBytes);
#pragma unroll
      for (int piece = 0; piece < Tile::kWindow; piece += 16 * 32) {
        const int at = c * Tile::kBytes + piece + 16 * lane;
        if (at < end) {
          cp_async_cg(window + piece + 16 * lane, w[k] + at, min(16, matrix_end[k] - at));
        }
      }
    }
    cp_async_commit_group();
  };

  // 1. All stages but one are filled before the first is read.
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch(part + s * warps, s);

  float acc[ROWS] = {};
  int stage = 0;
  for (int c = part; c < chunks; c += warps) {
    // 2. One unit a lane. Its activations are asked for before the wait.
    const int u = c * 32 + lane;
    const typename Format::Acts a = Format::acts(x, min(u, units - 1));
    // 3. Chunk c has arrived when STAGES-2 later groups may still be under way.
    cp_async_wait_group<STAGES - 2>();
    __syncwarp();  // for all lanes; and all have read the stage that is filled next
    // 4. The next chunk goes where the one before this one was.
    fetch(c + (STAGES - 1) * warps, stage == 0 ? STAGES - 1 : stage - 1);
    if (u < units) {
#pragma unroll
      for (int k = 0; k < ROWS; ++k) {
        const unsigned char* chunk = ring + (stage * ROWS + k) * Tile::kWindow + skew[k];  // [kBytes]
        acc[k] += Format::dot(Format::codes(Format::load(chunk, lane), u), a);
      }
    }
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }

  // 5. As in mmvq_rows.
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    const float sum = warp_reduce_sum(acc[k]);
    if (lane == 0) partial[warp][k] = sum;
  }
  __syncthreads();  // the group's first warp reads what its others have written
  if (part == 0 && lane < ROWS && r0 + lane < od) {
    float sum = partial[warp][lane];
    for (int p = 1; p < warps; ++p) sum += partial[warp + p][lane];
    out[static_cast<long long>(t) * od + r0 + lane] = sum;
  }
}
// ANCHOR_END: mmvq_pf

/// As launch_mmvq_block.
template <class Format>
Status launch_mmvq_pf(const void* weights, const BlockQ8Pad40* acts, float* out, Shape s, Stream& stream) {
  constexpr int ROWS = kMmvqPfRows;
  if (Status ok = mmvq_arguments<Format>(weights, acts, s, kMmvqMaxTokens); !ok.ok()) return ok;
  const long long groups = (s.od + ROWS - 1) / ROWS;
  const MmvqPlan p = mmvq_pf_plan<Format>(s.id, groups);
  const dim3 grid(static_cast<unsigned>((groups + p.groups_per_block - 1) / p.groups_per_block),
                  static_cast<unsigned>(s.nt));
  const auto shared = static_cast<std::size_t>(p.warps()) * MmvqPfTile<Format>::kWarpBytes;
  return launch(mmvq_pf<Format, ROWS>, grid, p.block(), shared, stream,
                static_cast<const unsigned char*>(weights), acts, out, static_cast<int>(s.od),
                static_cast<int>(s.id), static_cast<long long>(row_bytes(Format::kType, s.id)));
}

}  // namespace ladder
