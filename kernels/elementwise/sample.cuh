// RUNG      sample_token: the next token, drawn among the most probable ones, without a logit leaving the device.
// PREV      argmax: always the largest; a sampler on the host needs 608 KB of logits for each token
// COMPUTES  ids[t] = a token of the top_k largest logits[t] that top-p and min-p leave, drawn with weights
//           exp((logit - largest) / temperature) by the random number of (seed, *position + t); -1 if no token can be drawn.
//           With a bias: of logits[t][i] + bias[i]. With a step: as argmax, and the number of (seed, step's position + 1)
// LAYOUT    logits row-major f32 [nt][n], ids int32
// MAP       grid(ceil(n/1024), at most 128, nt) block(256): block -> every gridDim.x-th run of 256 of a row; the block that
//           comes last to its row selects once more, among what all blocks have left, and draws
// NEEDS     n from 1 to 2 M, nt from 1 to 65535, top_k from 1 to 64, temperature above 0 (checked by the launcher, and said in
//           its error); a workspace that was zero before the first use
// TRAFFIC   logits 4*nt*n B (those beyond 262,144 twice), a bias as many again     WORK nt*n comparisons, and the
//           selection's
// LOOK FOR  SASS: the two loops of `select` over shared memory, LDS.64 with one address for a warp; MUFU.EX2 of doubles
// EXPECT    some microseconds: two selections of a few steps each that wait for each other, and a sum in order by one thread
// BUILD     part of chapters/08-around-the-matmul; tested by kernels/elementwise/test_sample.cpp
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/elementwise/argmax.cuh"
#include "kernels/elementwise/philox.hpp"
#include "kernels/elementwise/sample_options.hpp"

namespace ladder {

inline constexpr int kSamplePart = 1024;  ///< logits of a block at least

/// What blocks of a row leave for the last one. `arrived` is zero at rest.
struct SampleRow {
  unsigned arrived, unused;
  unsigned long long best[kSampleMostBlocks][kSampleMostK];  // keys, largest first, then zeros
};

namespace sample_detail {

inline constexpr unsigned long long kBad = ~0ull;  // the key of what is no logit

/// argmax_key, but nothing (0) for what cannot be drawn, and kBad for what no logit may be.
__device__ __forceinline__ unsigned long long key_of(float logit, int i) {
  if (logit == -INFINITY) return 0;
  return logit < INFINITY ? argmax_key(logit, i) : kBad;
}
__device__ __forceinline__ float logit_of(unsigned long long key) {
  const auto ordered = static_cast<unsigned>(key >> 32);
  return __uint_as_float((ordered & 0x80000000u) != 0 ? ordered ^ 0x80000000u : ~ordered);
}
__device__ __forceinline__ int token_of(unsigned long long key) {
  return static_cast<int>(0xffffffffu - static_cast<unsigned>(key));
}

struct Selection {
  unsigned long long largest[kSampleThreads];  // of each thread
  unsigned long long kept[kSampleMostK * kSampleMostK];
  unsigned long long best[kSampleMostK];  // largest first
  double weight[kSampleMostK];            // at temperature 1
  double drawn[kSampleMostK];             // and at that of the draw
  unsigned long long bound;
  int count, bad, last;
};

// ANCHOR: select
/// The `most` largest of key(0..count-1), largest first, in s.best: keys differ from each other, but for 0, which is none.
/// Key i belongs to thread i % 256, and no thread may have more than kSampleMostK. @return how many, or -1 if one is kBad
/// @tparam SORTED those of a thread are in order, largest first: few of them are looked at
template <bool SORTED, class Key>
__device__ int select(Selection& s, int count, int most, Key key) {
  const int me = static_cast<int>(threadIdx.x);
  // 1. `most` keys at least are not below the most-th largest of what threads have as their largest. Only the threads of
  //    those can have a key that is not below it.
  constexpr int HELD = SORTED ? 1 : 8;  // keys that are not asked for again
  unsigned long long held[HELD], mine = 0;
#pragma unroll
  for (int r = 0; r < HELD; ++r) {
    const int i = me + r * kSampleThreads;
    held[r] = i < count ? key(i) : 0ull;
  }
#pragma unroll
  for (const unsigned long long k : held) mine = max(mine, k);
  for (int i = me + HELD * kSampleThreads; !SORTED && i < count; i += kSampleThreads)
    mine = max(mine, key(i));
  s.largest[me] = mine;
  if (me == 0) s.bound = 0, s.count = 0, s.bad = 0;
  __syncthreads();
  int larger = 0;
  for (const unsigned long long other : s.largest) larger += other > mine ? 1 : 0;
  if (mine == kBad) {
    atomicExch(&s.bad, 1);
  } else if (larger == most - 1 && mine != 0) {
    s.bound = mine;
  }
  __syncthreads();
  if (s.bad != 0) return -1;

  // 2. Those, in the order in which they come.
  const auto keep = [&s](unsigned long long k) {
    if (k == 0 || k < s.bound) return false;
    s.kept[atomicAdd(&s.count, 1)] = k;
    return true;
  };
  bool on = true;
#pragma unroll
  for (const unsigned long long k : held) on = keep(k) || !SORTED;
  for (int i = me + HELD * kSampleThreads; on && i < count; i += kSampleThreads) on = keep(key(i)) || !SORTED;
  __syncthreads();

  // 3. The place of a key is how many are larger. So the order of 2 does not matter.
  for (int i = me; i < s.count; i += kSampleThreads) {
    const unsigned long long k = s.kept[i];
    int place = 0;
    for (int j = 0; j < s.count; ++j) place += s.kept[j] > k ? 1 : 0;
    if (place < most) s.best[place] = k;
  }
  __syncthreads();
  return min(s.count, most);
}
// ANCHOR_END: select

// ANCHOR: draw
/// The token that a random number from [0, 1) draws among `count` keys in order. By one thread, with sums in order, so that
/// the host's sampler draws the same.
__device__ inline int draw(const Selection& s, int count, const SampleOptions& o, double random) {
  const double largest = logit_of(s.best[0]);
  if (o.top_p < 1) {
    double total = 0, sum = 0;
    for (int i = 0; i < count; ++i) total += s.weight[i];
    for (int i = 0; i < count; ++i) {
      sum += s.weight[i];
      if (sum >= o.top_p * total) count = i + 1;
    }
  }
  if (o.min_p > 0) {
    const double least = largest + log(static_cast<double>(o.min_p));
    while (count > 1 && logit_of(s.best[count - 1]) < least) --count;
  }
  double total = 0, sum = 0;
  for (int i = 0; i < count; ++i) total += s.drawn[i];
  int drawn = 0;
  for (int i = 0; i < count && sum <= random * total; ++i) {
    if (s.drawn[i] == 0) continue;
    sum += s.drawn[i];
    drawn = i;
  }
  return token_of(s.best[drawn]);
}
// ANCHOR_END: draw

}  // namespace sample_detail

__global__ void __launch_bounds__(kSampleThreads)
    sample_token(const float* logits,  // [nt][n]
                 int* ids,             // [nt]
                 const int* position,  // of the first row's token, or null with a step
                 SampleRow* rows,      // [nt]
                 int n, SampleOptions options,
                 const float* __restrict__ bias,  // [n] or null
                 DrawnNext next) {
  using namespace sample_detail;
  __shared__ Selection s;
  const int me = static_cast<int>(threadIdx.x);
  const long long t = blockIdx.y;
  const float* const row = logits + t * n;
  SampleRow& state = rows[t];
  const auto blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  allow_next_kernel();
  wait_for_previous_kernel();

  // ANCHOR: sample
  // 1. The best of this block's runs of 256 logits.
  const int runs = (n + kSampleThreads - 1) / kSampleThreads;
  const int my_runs = (runs - block + blocks - 1) / blocks;
  int count = select<false>(s, my_runs * kSampleThreads, options.top_k, [&](int i) {
    const int at = (i / kSampleThreads * blocks + block) * kSampleThreads + i % kSampleThreads;
    if (at >= n) return 0ull;
    return key_of(bias != nullptr ? row[at] + bias[at] : row[at], at);
  });
  for (int i = me; i < options.top_k; i += kSampleThreads) {
    state.best[block][i] = count < 0 ? kBad : i < count ? s.best[i] : 0ull;
    __threadfence();  // there before the block is counted
  }
  __syncthreads();  // and so are those of the other threads
  if (me == 0) s.last = atomicInc(&state.arrived, gridDim.x - 1) == gridDim.x - 1 ? 1 : 0;
  __syncthreads();
  if (s.last == 0) return;

  // 2. The best of all blocks', of which each is one thread's, past L1, which does not see what others write.
  count = select<true>(s, options.top_k * kSampleThreads, options.top_k, [&](int i) {
    const int of = i % kSampleThreads;
    return of < blocks ? __ldcg(&state.best[of][i / kSampleThreads]) : 0ull;
  });
  // 3. Probabilities side by side, then the draw.
  if (count > 0 && me < count) {
    const double below = static_cast<double>(logit_of(s.best[me])) - static_cast<double>(logit_of(s.best[0]));
    s.weight[me] = exp(below);
    s.drawn[me] = exp(below / options.temperature);
  }
  __syncthreads();
  if (me != 0) return;
  const long long at = next.step != nullptr ? next.step[0] + 1 : *position + t;
  const int id =
      count < 1 ? -1 : draw(s, count, options, uniform(options.seed, static_cast<std::uint64_t>(at)));
  ids[t] = id;
  if (next.step != nullptr) next.store(id);
  // ANCHOR_END: sample
}

/// Bytes of the workspace of launch_sample.
constexpr std::size_t sample_workspace(int nt) { return static_cast<std::size_t>(nt) * sizeof(SampleRow); }

/// ids[t] = a token drawn from logits[t][0..n-1]; -1 where a logit is NaN or +infinity, or none is above -infinity. Does not
/// synchronise.
/// @param position device memory: the counter of the first row's random number; null with a step
/// @param workspace sample_workspace(nt) bytes at a multiple of 16, zero before the first use
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
/// @param bias [n] added to every row; none of it NaN or +infinity. Or null
/// @param next of one row: what the next token's pass reads; the counter is then the drawn token's position
inline Status launch_sample(const float* logits, int* ids, const int* position, const SampleOptions& o,
                            int nt, long long n, void* workspace, Stream& stream, bool programmatic = false,
                            const float* bias = nullptr, const DrawnNext& next = {}) {
  if (Status s = sample_supported(o, nt, n); !s.ok()) return s;
  if (Status s = next.supported("sample_token", nt); !s.ok()) return s;
  const auto blocks =
      static_cast<unsigned>(std::min<long long>((n - 1) / kSamplePart + 1, kSampleMostBlocks));
  LaunchOptions options;
  options.programmatic = programmatic;
  return launch(options, sample_token, dim3(blocks, static_cast<unsigned>(nt)), dim3(kSampleThreads), 0,
                stream, logits, ids, position, static_cast<SampleRow*>(workspace), static_cast<int>(n), o,
                bias, next);
}

}  // namespace ladder
