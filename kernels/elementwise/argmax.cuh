// RUNG      argmax: the largest of a row of logits, by many blocks and one atomic each.
// PREV      none: without it, 608 KB of logits go to the host for one number
// COMPUTES  ids[t] = the lowest i at which logits[t][i] is largest; -1 if any of them is NaN. +0 and -0 are equal.
//           With a bias: of logits[t][i] + bias[i], and -1 too if one of them is +infinity or all are -infinity. With a step:
//           step = {position + 1, ids[0]}, drawn[position + 1] = ids[0], for the next token's pass
// LAYOUT    logits row-major f32 [nt][n], ids int32
// MAP       grid(ceil(n/1024), at most 128, nt) block(256): block -> a contiguous part of a row, thread -> every 256th of it
// NEEDS     n from 1 to 2^31 - 1, nt from 1 to 65535 (checked by the launcher, and said in its error); a workspace that was
//           zero before the first use
// TRAFFIC   logits 4*nt*n B, a bias as many again     WORK nt*n comparisons
// LOOK FOR  SASS: LDG.E with four under way, one ATOMG.E.MAX.64 and one ATOMG.E a block
// EXPECT    a launch and a trip to memory: the order of atomics does not matter to a maximum, so no bits depend on it
// BUILD     part of chapters/08-around-the-matmul; tested by kernels/elementwise/test_argmax.cpp
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/device/reduce.cuh"

namespace ladder {

inline constexpr int kArgmaxThreads = 256, kArgmaxPart = 1024, kArgmaxMostBlocks = 128;

/// Where a token that was drawn goes, for the pass that follows without the host.
struct DrawnNext {
  int* step = nullptr;   ///< {position, token}: of the pass that is ending, then of the next; or null
  int* drawn = nullptr;  ///< [context + 1]: by position

  /// By one thread, when nobody reads the step any more.
  __device__ __forceinline__ void store(int id) const {
    const int position = step[0] + 1;
    step[0] = position;
    step[1] = id;
    drawn[position] = id;
  }
  [[nodiscard]] Status supported(const char* kernel, int nt) const {
    if (step == nullptr || (nt == 1 && drawn != nullptr)) return {};
    return Status::error(std::string(kernel) +
                         ": only one row has a next step, with a place for what is drawn");
  }
};

/// Of a row, between and during launches. All zero at rest.
struct ArgmaxState {
  unsigned long long best;  // key of the best so far; every key is above zero
  unsigned arrived;         // blocks that are done
  unsigned unused;
};

// ANCHOR: argmax_key
/// Larger for larger values, and among equals for lower places; NaN beats all.
__device__ __forceinline__ unsigned long long argmax_key(float v, int i) {
  if (v != v) return ~0ull;
  const unsigned bits = __float_as_uint(v + 0.0f);  // -0 becomes +0
  const unsigned ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<unsigned long long>(ordered) << 32 | (0xffffffffu - static_cast<unsigned>(i));
}
// ANCHOR_END: argmax_key

__global__ void __launch_bounds__(kArgmaxThreads) argmax(const float* logits,  // [nt][n]
                                                         int* ids,             // [nt]
                                                         ArgmaxState* state,   // [nt]
                                                         int n,
                                                         const float* __restrict__ bias,  // [n] or null
                                                         DrawnNext next) {
  __shared__ unsigned long long partial[kArgmaxThreads / 32];
  const long long t = blockIdx.y;
  const float* row = logits + t * n;
  allow_next_kernel();
  wait_for_previous_kernel();

  // 1. The best of a thread, of its warp, of its block.
  const int part = (n - 1) / static_cast<int>(gridDim.x) + 1;
  const long long begin = static_cast<long long>(blockIdx.x) * part;
  const int end = static_cast<int>(min(begin + part, static_cast<long long>(n)));
  unsigned long long best = 0;
#pragma unroll 4
  for (long long i = begin + threadIdx.x; i < end; i += kArgmaxThreads) {
    float v = row[i];
    if (bias != nullptr) {
      v += bias[i];
      if (v == -INFINITY) continue;
      if (v == INFINITY) v = NAN;
    }
    best = max(best, argmax_key(v, static_cast<int>(i)));
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(kAllLanes, best, offset));
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = best;
  __syncthreads();  // all warps' best are written before any is read

  // ANCHOR: argmax
  // 2. Of all blocks; the one that comes last has the answer, and leaves the state as it was.
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kArgmaxThreads / 32; ++w) best = max(best, partial[w]);
  atomicMax(&state[t].best, best);
  __threadfence();  // counted only after the maximum is in
  if (atomicAdd(&state[t].arrived, 1u) != gridDim.x - 1) return;
  best = atomicExch(&state[t].best, 0ull);
  atomicExch(&state[t].arrived, 0u);
  const int id =
      best == ~0ull || best == 0 ? -1 : static_cast<int>(0xffffffffu - static_cast<unsigned>(best));
  ids[t] = id;
  if (next.step != nullptr) next.store(id);
  // ANCHOR_END: argmax
}

/// Bytes of the workspace of launch_argmax.
constexpr std::size_t argmax_workspace(int nt) { return static_cast<std::size_t>(nt) * sizeof(ArgmaxState); }

/// ids[t] = the lowest place of the largest of logits[t][0..n-1], -1 where one of them is NaN. Does not synchronise.
/// @param workspace argmax_workspace(nt) bytes at a multiple of 16, zero before the first use; zero again afterwards
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
/// @param bias [n] added to every row; none of it NaN or +infinity. Or null
/// @param next of one row: what the next token's pass reads
inline Status launch_argmax(const float* logits, int* ids, int nt, long long n, void* workspace,
                            Stream& stream, bool programmatic = false, const float* bias = nullptr,
                            const DrawnNext& next = {}) {
  constexpr long long kMost = 0x7fffffff;
  if (n < 1 || n > kMost)
    return Status::error("argmax: n must be 1 to " + std::to_string(kMost) + ", not " + std::to_string(n));
  if (nt < 1 || nt > 65535) return Status::error("argmax: nt must be 1 to 65535, not " + std::to_string(nt));
  if (Status s = next.supported("argmax", nt); !s.ok()) return s;
  const auto blocks =
      static_cast<unsigned>(std::min<long long>((n - 1) / kArgmaxPart + 1, kArgmaxMostBlocks));
  LaunchOptions options;
  options.programmatic = programmatic;
  return launch(options, argmax, dim3(blocks, static_cast<unsigned>(nt)), dim3(kArgmaxThreads), 0, stream,
                logits, ids, static_cast<ArgmaxState*>(workspace), static_cast<int>(n), bias, next);
}

}  // namespace ladder
