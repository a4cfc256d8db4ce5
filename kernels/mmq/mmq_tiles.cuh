// RUNG      mmq_tiles: weights in tiles times int8 activations for many tokens, by tensor cores.
// PREV      mmq_raw: weights staged as a file has them, tokens on the side of the instruction that has sixteen rows
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T, then the epilogue: bias, residual
// LAYOUT    weights in tiles (kernels/mmvq/tiles.cuh), acts the two planes of kernels/quant/quantize_acts.hpp, out
//           row-major f32
// MAP       grid(ceil(nt/BN), ceil(od/BM), ksplit) block(32 WM WN): warp -> 16 MI rows x 16 NG tokens; lane 4g+t -> rows
//           g and g + 8 of each sixteen, tokens 2t and 2t + 1 of each eight
// NEEDS     id % 32 == 0 (256 for types with blocks of 256), any od and nt, sm_80: checked by the launcher
// TRAFFIC   weights od*id*bpe B (od up to a multiple of 16, id of 128 or 256), acts 1.125*nt*id B (nt up to a multiple of
//           64), out 4*nt*od B; weights pass ceil(nt/BN) times from L2 to shared memory, acts ceil(od/BM) times
// WORK      2*nt*od*id int8_op
// LOOK FOR  SASS: LDGSTS.E.BYPASS.128, LDSM.16.M88.4, IMMA.16832.S8.S8, HMMA.1688.F32, and for each IMMA four I2FP and
//           four FFMA
// EXPECT    the scaling of results is the limit, not the product: nine instructions beside each IMMA, which on an H200
//           overlap it only in part. About a quarter of the mma ceiling
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
#include "kernels/device/pdl.cuh"
#include "kernels/gemm/epilogue.cuh"
#include "kernels/gemm/split_k.cuh"
#include "kernels/mmq/mmq_formats.cuh"
#include "kernels/mmvq/mmvq_tiles_formats.cuh"

namespace ladder {
namespace mmq {

/// Sizes of a block's part of the work.
/// @tparam MI sixteens of rows of a warp @tparam NG sixteens of tokens of a warp
/// @tparam WM, WN warps along rows and along tokens @tparam STAGES steps of k in shared memory at once
template <int MI_, int NG_, int WM_, int WN_, int STAGES_>
struct Sizes {
  static constexpr int MI = MI_, NG = NG_, WM = WM_, WN = WN_, STAGES = STAGES_;
  static constexpr int WARPS = WM * WN, THREADS = 32 * WARPS;
  static constexpr int BM = 16 * MI * WM, BN = 16 * NG * WN;
  static_assert(kQ8ActsTileTokens % BN == 0 || BN % kQ8ActsTileTokens == 0);
};

/// One step of k in shared memory: a tile of each of the block's sixteens of rows, then codes, then scales.
template <class F, class Z>
struct Stage {
  static constexpr int CHUNKS = tiles::Tile<typename F::Block>::kSteps;  // of 32 activations
  static constexpr int TILE = tiles::tile_bytes<typename F::Block>();
  static constexpr int TOKENS = Z::BN < kQ8ActsTileTokens ? Z::BN : kQ8ActsTileTokens;  // of a plane's tile
  static constexpr int PLANES = Z::BN / TOKENS;                                         // tiles of a plane
  static constexpr int CODES = TOKENS * 32;  // bytes of a chunk's codes
  static constexpr int SCALES =
      TOKENS <= 32 ? 128 : 256;  // of its scales; 32 more between chunks, so that lanes which
  static constexpr int SCALE_STRIDE = SCALES + 32;  // read four chunks at once meet no bank twice
  static constexpr int CODES_AT = Z::WM * Z::MI * TILE;
  static constexpr int SCALES_AT = CODES_AT + PLANES * CHUNKS * CODES;
  static constexpr int BYTES = SCALES_AT + PLANES * CHUNKS * SCALE_STRIDE;
  static_assert(BYTES % 16 == 0);
};

/// Products that a warp has under way while it scales the results of earlier ones, and after how many eights of tokens the
/// compiler's view ends (end_of_schedule).
inline constexpr int kAhead = 4, kEightsInView = 2;

struct Arguments {
  const unsigned char* tiles;   // [row_tiles][steps][TILE]
  const std::int8_t* codes;     // [ceil(nt/64)][chunks][2048]
  const std::uint32_t* scales;  // [ceil(nt/64)][chunks][64]
  float* out;                   // [nt][od]
  float* partials;              // [ksplit][nt][od]; null with ksplit 1
  GemmEpilogue epilogue;
  int nt, od, steps, chunks, per_split;
};

// ANCHOR: mmq_stage
/// Where a thread's 16 bytes of each copy come from; one step of k further on in each of them is a constant away.
template <class F, class Z>
class Copies {
  using G = Stage<F, Z>;
  static constexpr int TILES = Z::WM * Z::MI, EACH = (TILES + Z::WARPS - 1) / Z::WARPS;  // tiles of a warp
  static constexpr int PER_CHUNK = G::CODES / 16, PER_PLANE = G::CHUNKS * PER_CHUNK;     // vectors of codes
  static constexpr int ALL = G::PLANES * PER_PLANE, TURNS = (ALL + Z::THREADS - 1) / Z::THREADS;
  static constexpr int PER_SCALES = G::SCALES / 16, SCALES = G::PLANES * G::CHUNKS * PER_SCALES;
  static_assert(Z::THREADS % PER_CHUNK == 0 && SCALES <= Z::THREADS);
  static_assert(G::PLANES == 1 || PER_PLANE % Z::THREADS == 0);

 public:
  __device__ __forceinline__ Copies(const Arguments& g, int step)
      : chunks_left_(g.chunks - step * G::CHUNKS) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int rows16 = (g.od + tiles::kRows - 1) / tiles::kRows;
    const int planes = (g.nt + kQ8ActsTileTokens - 1) / kQ8ActsTileTokens;
    const int token = static_cast<int>(blockIdx.x) * Z::BN, plane = token / kQ8ActsTileTokens;
    const int inside = token % kQ8ActsTileTokens;  // of a plane's tile, where a block has a part of one
    // Beyond the last row the last sixteen again, beyond the last tokens the last tile: their results are not stored.
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const long long row16 = min(static_cast<int>(blockIdx.y) * TILES + i * Z::WARPS + warp, rows16 - 1);
      weights_[i] = g.tiles + (row16 * g.steps + step) * G::TILE + 16 * lane;
    }
    const long long chunk = static_cast<long long>(step) * G::CHUNKS;
#pragma unroll
    for (int p = 0; p < G::PLANES; ++p) {
      codes_[p] = g.codes +
                  (static_cast<long long>(min(plane + p, planes - 1)) * g.chunks + chunk) * kQ8ActsTileBytes +
                  thread / PER_CHUNK * kQ8ActsTileBytes + inside * 32 + thread % PER_CHUNK * 16;
    }
    scale_chunk_ = thread / PER_SCALES % G::CHUNKS;
    const long long scale_plane = min(plane + thread / (PER_SCALES * G::CHUNKS), planes - 1);
    scales_ = reinterpret_cast<const unsigned char*>(
                  g.scales + (scale_plane * g.chunks + chunk + scale_chunk_) * kQ8ActsTileTokens + inside) +
              thread % PER_SCALES * 16;
  }

  /// Starts the copies of this step's weights, which no kernel before this one has written.
  __device__ __forceinline__ void start_weights(unsigned char* stage) {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (TILES % Z::WARPS != 0 && i * Z::WARPS + warp >= TILES) break;
      unsigned char* to = stage + (i * Z::WARPS + warp) * G::TILE + 16 * lane;
      tiles::copy_vectors<G::TILE / 512>(to, weights_[i]);
      if (16 * lane < G::TILE % 512) cp_async_cg_at<G::TILE / 512 * 512>(to, weights_[i]);
      weights_[i] += G::TILE;
    }
  }

  /// The same for activations: zeros beyond the last chunk, where the weights are zeros too, but scales could be NaN.
  __device__ __forceinline__ void start_acts(unsigned char* stage) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      if (ALL % Z::THREADS != 0 && thread >= ALL) break;
      constexpr int A_TURN = Z::THREADS / PER_CHUNK;  // chunks
      const int plane = i * Z::THREADS / PER_PLANE, chunk = i * A_TURN % G::CHUNKS;
      const bool there = chunk + thread / PER_CHUNK < chunks_left_;
      cp_async_cg(stage + G::CODES_AT + 16 * (i * Z::THREADS + thread),
                  codes_[plane] + (there ? chunk : -(thread / PER_CHUNK)) * kQ8ActsTileBytes, there ? 16 : 0);
    }
    if (thread < SCALES) {
      const bool there = scale_chunk_ < chunks_left_;
      cp_async_cg(stage + G::SCALES_AT + thread / PER_SCALES * G::SCALE_STRIDE + thread % PER_SCALES * 16,
                  scales_ - (there ? 0 : scale_chunk_ * kQ8ActsTileTokens * 4), there ? 16 : 0);
    }
    chunks_left_ -= G::CHUNKS;
#pragma unroll
    for (int p = 0; p < G::PLANES; ++p) codes_[p] += G::CHUNKS * kQ8ActsTileBytes;
    scales_ += G::CHUNKS * kQ8ActsTileTokens * 4;
  }

 private:
  const unsigned char* weights_[EACH];
  const std::int8_t* codes_[G::PLANES];
  const unsigned char* scales_;
  int scale_chunk_, chunks_left_;
};
// ANCHOR_END: mmq_stage

/// f32 sums of a warp: [sixteen rows][eight tokens][row g: tokens 2t, 2t+1; row g + 8: the same].
template <class Z>
using Sums = float[Z::MI][2 * Z::NG][4];

// ANCHOR: mmq_scale
/// A product that is under way: what the tensor core sums up in integers, and what will multiply it.
struct Pending {
  int c[4];                     // 32 codes, or 16
  [[maybe_unused]] int c16[4];  // Scaling::integers: of the second 16
  float s[4];                   // products of rows' and tokens' scales; Scaling::integers: two tokens' scales
  [[maybe_unused]] int d[2][2];  // Scaling::integers: [row g, g + 8][16 codes]
};

/// 32 codes, or the first or last 16 of them, of sixteen rows and eight tokens.
template <Scaling SCALING, int WORDS, int FIRST = 0>
__device__ __forceinline__ void product(int (&c)[4], const std::uint32_t (&a)[4],
                                        const std::uint32_t (&b)[2]) {
  constexpr int SEED = is_seeded(SCALING) ? kSeedBits : 0;
  if constexpr (WORDS == 2) {
    mma_m16n8k32_s8_from(c, a, b, SEED);
  } else {
    mma_m16n8k16_s8_from(c, {a[2 * FIRST], a[2 * FIRST + 1]}, {b[FIRST]}, SEED);
  }
}

// ANCHOR: mmq_schedule
/// Ends the stretch of code inside which the assembler orders instructions as it likes. Left to itself it puts all products
/// of a step first and most of their scaling last, so that the tensor core has to wait for one half of the time and
/// everything else for the other. It does not move instructions past a branch: so this is one, never taken.
/// @param positive any number above zero, unknown to the compiler @param place 0 or more, another one for each call
__device__ __forceinline__ void end_of_schedule(int positive, int place) {
#if defined(__CUDACC__)
  asm volatile("" : "+r"(positive));  // so that one test does not stand for all
  if (positive == -1 - place) __trap();
#else
  (void)positive;
  (void)place;
#endif
}
// ANCHOR_END: mmq_schedule

/// sums += what has been under way.
template <Scaling SCALING, bool INTEGERS, bool HALVES>
__device__ __forceinline__ void finish(const Pending& p, float (&sums)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (INTEGERS) {
      int dot = p.d[i / 2][0] * p.c[i];
      if constexpr (HALVES) dot += p.d[i / 2][1] * p.c16[i];
      sums[i] += p.s[i % 2] * static_cast<float>(dot);
    } else {
      sums[i] += p.s[i] * (is_seeded(SCALING) ? __int_as_float(p.c[i]) - kSeed : static_cast<float>(p.c[i]));
    }
  }
}
// ANCHOR_END: mmq_scale

// ANCHOR: mmq_step
/// sums += tiles . activations of one step of k. @param wm, wn the warp's place in the block
/// @param positive for end_of_schedule
template <class F, Scaling SCALING, class Z>
__device__ __forceinline__ void multiply_step(const unsigned char* stage, int wm, int wn, int lane,
                                              int positive, Sums<Z>& sums) {
  using G = Stage<F, Z>;
  using P = Properties<F>;
  constexpr bool TENSOR = on_tensor_core(SCALING), INTEGERS = SCALING == Scaling::integers && P::kBlockSums;
  // Whose scales a lane loads: its own chunk's, or all chunks'. Codes that are scaled before the product need all of them.
  constexpr int NT = TENSOR && !F::kHalves ? 1 : 8;
  constexpr int EIGHTS = 2 * Z::NG, VECTORS = (EIGHTS + 3) / 4;  // of tokens; of their scales in a chunk
  const int g = lane / 4, t = lane % 4;

  // 1. A lane's share of each sixteen's tile.
  typename F::template Raw<NT> raw[Z::MI];
#pragma unroll
  for (int mi = 0; mi < Z::MI; ++mi)
    raw[mi].template load<tiles::FromShared>(stage + (wm * Z::MI + mi) * G::TILE, lane);

  // 2. Where the warp's tokens are. They begin at `group` of a tile of the planes. Matrices are loaded in the order of the
  //    operand's registers: a token's words 0..3, then 4..7, then those of the next eight tokens.
  const int plane = wn * Z::NG / 4 % G::PLANES, group = wn * Z::NG % 4;
  const unsigned char* const codes = stage + G::CODES_AT + plane * (G::CHUNKS * G::CODES);
  const unsigned char* const scales = stage + G::SCALES_AT + plane * (G::CHUNKS * G::SCALE_STRIDE);
  const auto load_codes = [&](std::uint32_t(&r)[4], int sixteen) {  // counted over the chunks
    ldmatrix<4>(r, codes + sixteen / Z::NG * G::CODES +
                       q8_acts_code_byte(16 * (group + sixteen % Z::NG) + lane / 16 * 8 + lane % 8,
                                         lane / 8 % 2 * 4));
  };
  const auto scale_words = [&](int chunk, int token, int vector) {  // of tokens 8 n + token, n = 0..3
    return *reinterpret_cast<const uint4*>(scales + chunk * G::SCALE_STRIDE + (group / 2 + vector) * 128 +
                                           token * 16);
  };
  const int first8 = Z::NG >= 2 ? 0 : group % 2 * 2;  // of the four eights of a vector

  [[maybe_unused]] float block[Z::MI][EIGHTS][4];
  if constexpr (P::kBlockSums) {
#pragma unroll
    for (int mi = 0; mi < Z::MI; ++mi)
#pragma unroll
      for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) block[mi][n][i] = 0.0f;
  }

  // 3. A product takes the tensor core some thirty cycles. So it is finished when AHEAD others have been started, not
  //    before: a warp has enough to do meanwhile, and the tensor core gets the next ones while results are scaled.
  constexpr int PRODUCTS = 1 + (P::kHalves && !INTEGERS ? 1 : 0) + (P::kMinProduct ? 1 : 0), AHEAD = kAhead;
  constexpr int ALL = G::CHUNKS * EIGHTS * Z::MI * PRODUCTS;
  Pending ring[AHEAD];
  const auto finish_one = [&](int at) {
    const int mi = at / PRODUCTS % Z::MI, n = at / (PRODUCTS * Z::MI) % EIGHTS;
    finish<SCALING, INTEGERS, P::kHalves>(ring[at % AHEAD], P::kBlockSums ? block[mi][n] : sums[mi][n]);
  };
  std::uint32_t fragments[2][4];  // of sixteen tokens, and of the next
  load_codes(fragments[0], 0);

  const auto chunks_of_half = [&]<int H>() {
    // 4. Rows' scales as an operand: lane 4g + t has those of chunk 4 H + t, at the instruction's k = 2 t (and 2 t + 1
    //    for the second 16 codes).
    [[maybe_unused]] std::uint32_t scale_a[Z::MI][2];
    if constexpr (TENSOR) {
#pragma unroll
      for (int mi = 0; mi < Z::MI; ++mi) {
        float d[2][2];
        row_scales<F, H>(raw[mi], t, d);
#pragma unroll
        for (int row = 0; row < 2; ++row) scale_a[mi][row] = halves(d[row][0], P::kHalves ? d[row][1] : 0.0f);
      }
    }
    // 5. Minima times sums of activations: a product along the chunks, of floats in two parts each.
    if constexpr (TENSOR && P::kMinSums) {
#pragma unroll
      for (int vector = 0; vector < VECTORS; ++vector) {
        const uint4 w = scale_words(4 * H + t, g, vector);
#pragma unroll
        for (int k = 0; k < 4 && 4 * vector + k < EIGHTS; ++k) {
          const Tf32Pair x = tf32_pair(act_sum(tiles::part(w, first8 + k)));
#pragma unroll
          for (int mi = 0; mi < Z::MI; ++mi) {
            float m[2];
            row_minima<F, H>(raw[mi], t, m);
            float(&to)[4] = sums[mi][4 * vector + k];
            if constexpr (P::kBlocks256) {
              const Tf32Pair m0 = tf32_pair(m[0]), m1 = tf32_pair(m[1]);
              mma_m16n8k8_tf32(to, {m0.high, m1.high, m0.high, m1.high}, {x.high, x.low});
              mma_m16n8k8_tf32(to, {m0.low, m1.low, m0.low, m1.low}, {x.high, x.low});
            } else {
              const std::uint32_t m0 = __float_as_uint(m[0]);
              const std::uint32_t m1 = __float_as_uint(m[1]);  // halves: exact in tf32
              mma_m16n8k8_tf32(to, {m0, m1, m0, m1}, {x.high, x.low});
            }
          }
        }
      }
    }

    const auto chunk = [&]<int S>() {
      constexpr int C = 4 * H + S;
      // 6. Codes of the rows.
      std::uint32_t a[Z::MI][4];
      [[maybe_unused]] std::uint32_t min_a[Z::MI][4];
      [[maybe_unused]] float row_d[Z::MI][2][2], row_m[Z::MI][2];
      [[maybe_unused]] std::uint32_t min_scale_a[Z::MI][2];
#pragma unroll
      for (int mi = 0; mi < Z::MI; ++mi) {
        operand<F, C>(raw[mi], a[mi]);
        if constexpr (P::kMinProduct) min_operand<F, C>(raw[mi], min_a[mi]);
        if constexpr (!TENSOR) {
          row_scales<F, H>(raw[mi], S, row_d[mi]);
          if constexpr (P::kMinSums) row_minima<F, H>(raw[mi], S, row_m[mi]);
        }
        if constexpr (P::kMinProduct) {
          const tiles::FloatScales u = units<F>(raw[mi]);
          row_m[mi][0] = -u.min[0], row_m[mi][1] = -u.min[1];
          min_scale_a[mi][0] = halves(row_m[mi][0], 0.0f), min_scale_a[mi][1] = halves(row_m[mi][1], 0.0f);
        }
      }
      // A token's scale goes to the instruction's k = 2 S alone, that is to lanes t = S; zeros elsewhere.
      [[maybe_unused]] const unsigned pick_low = t == S ? 0x4410u : 0x4444u;
      [[maybe_unused]] const unsigned pick_high = t == S ? 0x1044u : 0x4444u;

      // 7. Eight tokens at a time.
      [[maybe_unused]] uint4 mine, even,
          odd;  // scales of token g, or of tokens 2 t and 2 t + 1, in four eights
#pragma unroll
      for (int n = 0; n < EIGHTS; ++n) {
        if (n % 4 == 0) {
          if constexpr (TENSOR) {
            mine = scale_words(C, g, n / 4);
          } else {
            even = scale_words(C, 2 * t, n / 4);
            odd = scale_words(C, 2 * t + 1, n / 4);
          }
        }
        const int sixteen = C * Z::NG + n / 2, k = first8 + n % 4;
        if (n % 2 == 0 && sixteen + 1 < G::CHUNKS * Z::NG)
          load_codes(fragments[(sixteen + 1) % 2], sixteen + 1);
        const std::uint32_t(&r)[4] = fragments[sixteen % 2];
        const std::uint32_t b[2] = {r[n % 2 * 2], r[n % 2 * 2 + 1]};
        [[maybe_unused]] float x[2], x_sum[2];
        [[maybe_unused]] std::uint32_t low[1], high[1];
        if constexpr (TENSOR) {
          low[0] = __byte_perm(tiles::part(mine, k), 0, pick_low);
          if constexpr (P::kHalves) high[0] = __byte_perm(tiles::part(mine, k), 0, pick_high);
        } else {
          x[0] = act_scale(tiles::part(even, k)), x[1] = act_scale(tiles::part(odd, k));
          if constexpr (P::kMinSums)
            x_sum[0] = act_sum(tiles::part(even, k)), x_sum[1] = act_sum(tiles::part(odd, k));
        }
        if (n % kEightsInView == 0) end_of_schedule(positive, C * EIGHTS + n);
#pragma unroll
        for (int mi = 0; mi < Z::MI; ++mi) {
          const int first = ((C * EIGHTS + n) * Z::MI + mi) * PRODUCTS;
          // One product and the scales that go with it, in place of one that is finished.
          const auto start = [&]<int WORDS, int FIRST>(int at, const std::uint32_t(&codes_a)[4], float d0,
                                                       float d1, const std::uint32_t(&sa)[2],
                                                       const std::uint32_t(&sb)[1]) {
            if (at >= AHEAD) finish_one(at - AHEAD);
            Pending& p = ring[at % AHEAD];
            product<SCALING, WORDS, FIRST>(p.c, codes_a, b);
            if constexpr (TENSOR) {
              mma_m16n8k8_f16_zero(p.s, sa, sb);
            } else {
              p.s[0] = d0 * x[0], p.s[1] = d0 * x[1], p.s[2] = d1 * x[0], p.s[3] = d1 * x[1];
            }
          };
          if constexpr (INTEGERS) {
            if (first >= AHEAD) finish_one(first - AHEAD);
            Pending& p = ring[first % AHEAD];
            if constexpr (P::kHalves) {
              product<SCALING, 1, 0>(p.c, a[mi], b);
              product<SCALING, 1, 1>(p.c16, a[mi], b);
            } else {
              product<SCALING, 2>(p.c, a[mi], b);
            }
            const tiles::IntScales s = integer_scales<F, H>(raw[mi], S);
#pragma unroll
            for (int i = 0; i < 2; ++i) p.s[i] = x[i], p.d[i][0] = s.d[i][0], p.d[i][1] = s.d[i][1];
          } else if constexpr (P::kHalves) {
            start.template operator()<1, 0>(first, a[mi], row_d[mi][0][0], row_d[mi][1][0], scale_a[mi], low);
            start.template operator()<1, 1>(first + 1, a[mi], row_d[mi][0][1], row_d[mi][1][1], scale_a[mi],
                                            high);
          } else {
            start.template operator()<2, 0>(first, a[mi], row_d[mi][0][0], row_d[mi][1][0], scale_a[mi], low);
          }
          if constexpr (P::kMinProduct)
            start.template operator()<2, 0>(first + 1, min_a[mi], row_m[mi][0], row_m[mi][1], min_scale_a[mi],
                                            low);
          if constexpr (!TENSOR && P::kMinSums) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[mi][n][i] += row_m[mi][i / 2] * x_sum[i % 2];
          }
        }
      }
    };
    chunk.template operator()<0>();
    chunk.template operator()<1>();
    chunk.template operator()<2>();
    chunk.template operator()<3>();
  };
  chunks_of_half.template operator()<0>();
  if constexpr (G::CHUNKS == 8) chunks_of_half.template operator()<1>();
#pragma unroll
  for (int at = ALL - AHEAD; at < ALL; ++at) finish_one(at);

  // 8. The scale that a block of 256 has for all of its scales.
  if constexpr (P::kBlockSums) {
#pragma unroll
    for (int mi = 0; mi < Z::MI; ++mi) {
      const tiles::FloatScales u = units<F>(raw[mi]);
#pragma unroll
      for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[mi][n][i] += u.d[i / 2] * block[mi][n][i];
    }
  }
}
// ANCHOR_END: mmq_step

// ANCHOR: mmq_tiles
template <class F, Scaling SCALING, class Z, int BLOCKS_PER_SM>
__global__ void __launch_bounds__(Z::THREADS, BLOCKS_PER_SM) mmq_tiles(const Arguments g) {
  using G = Stage<F, Z>;
  using P = Properties<F>;
  unsigned char* const ring = dynamic_shared<unsigned char>();  // [STAGES][G::BYTES]
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int wm = warp % Z::WM, wn = warp / Z::WM;

  // 1. This block's steps of k.
  const int begin = static_cast<int>(blockIdx.z) * g.per_split;
  const int end = min(begin + g.per_split, g.steps);

  // 2. The first steps on their way; weights before the kernel that writes the activations has ended.
  allow_next_kernel();
  Copies<F, Z> copies(g, begin);
#pragma unroll
  for (int i = 0; i < Z::STAGES - 1; ++i) {
    if (begin + i < end) copies.start_weights(ring + i * G::BYTES);
  }
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < Z::STAGES - 1; ++i) {
    if (begin + i < end) copies.start_acts(ring + i * G::BYTES);
    cp_async_commit_group();
  }

  // 3. One barrier a step.
  Sums<Z> sums = {};
  unsigned char *from = ring, *to = ring + (Z::STAGES - 1) * G::BYTES;
#pragma unroll 1
  for (int left = end - begin; left > 0; --left) {
    cp_async_wait_group<Z::STAGES - 2>();
    __syncthreads();  // all threads' copies of this step are there; and nobody reads the one that is replaced next
    if (left >= Z::STAGES) {
      copies.start_weights(to);
      copies.start_acts(to);
    }
    cp_async_commit_group();  // empty at the end, so that groups count steps
    multiply_step<F, SCALING, Z>(from, wm, wn, lane, g.nt, sums);
    to = from;
    from = from == ring + (Z::STAGES - 1) * G::BYTES ? ring : from + G::BYTES;
  }

  // 4. Sums change places in shared memory, tokens one after the other: lanes then store neighbouring rows, and the
  //    epilogue is a loop instead of hundreds of copies of it.
  constexpr int STRIDE = Z::BM + 4;  // floats of a token: lanes of neighbouring tokens meet no bank twice
  static_assert(sizeof(float) * STRIDE * Z::BN <= static_cast<std::size_t>(Z::STAGES) * G::BYTES);
  cp_async_wait_group<0>();
  __syncthreads();                                       // all steps have been read
  float* const shared = reinterpret_cast<float*>(ring);  // [BN][STRIDE]
#pragma unroll
  for (int mi = 0; mi < Z::MI; ++mi) {
#pragma unroll
    for (int n = 0; n < 2 * Z::NG; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        shared[(wn * (16 * Z::NG) + 8 * n + lane % 4 * 2 + i % 2) * STRIDE + (wm * Z::MI + mi) * 16 +
               lane / 4 + i / 2 * 8] = sums[mi][n][i] * (1.0f / static_cast<float>(P::kTooLarge));
      }
    }
  }
  __syncthreads();  // all sums are there
  const long long od = g.od, outs = static_cast<long long>(g.nt) * od;
  const int row0 = static_cast<int>(blockIdx.y) * Z::BM, token0 = static_cast<int>(blockIdx.x) * Z::BN;
  const int tokens = min(Z::BN, g.nt - token0), rows = min(Z::BM, g.od - row0);
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < tokens * Z::BM; i += Z::THREADS) {
    const int token = i / Z::BM, row = i % Z::BM;
    if (row >= rows) continue;
    const long long at = (token0 + token) * od + row0 + row;
    const float sum = shared[token * STRIDE + row];
    if (g.partials != nullptr) {
      g.partials[blockIdx.z * outs + at] = sum;
    } else {
      g.out[at] = apply_epilogue(g.epilogue, sum, token0 + token, row0 + row, od);
    }
  }
}
// ANCHOR_END: mmq_tiles

/// A block's shared memory: as many steps of k as two blocks of a multiprocessor, or one of a small one, have room for.
inline constexpr std::size_t kMostShared = 99 * 1024;

template <class F, class Z>
constexpr bool fits() {
  return static_cast<std::size_t>(Z::STAGES) * Stage<F, Z>::BYTES <= kMostShared;
}

/// Sizes for many tokens, and for up to 32: there the weights' bytes are the limit, so that more rows of them are under
/// way at once.
template <class F, int MI, int NG, int WM, int WN>
using Deepest = std::conditional_t<fits<F, Sizes<MI, NG, WM, WN, 4>>(), Sizes<MI, NG, WM, WN, 4>,
                                   std::conditional_t<fits<F, Sizes<MI, NG, WM, WN, 3>>(),
                                                      Sizes<MI, NG, WM, WN, 3>, Sizes<MI, NG, WM, WN, 2>>>;
template <class F>
using ManyTokens = Deepest<F, 2, 4, 4, 1>;
template <class F>
using FewTokens = Deepest<F, 1, 2, 8, 1>;
inline constexpr int kBlocksPerSm = 2;

/// What blocks of a size take, in microseconds of an H200 (fitted to 312 products of chapter 06's kind, each with every
/// number of parts; what matters is the order of plans).
struct Cost {
  double launch;     ///< once
  double alone;      ///< 128 of k, of a block that has a multiprocessor to itself
  double shared;     ///< and of each of two that share one
  double round;      ///< before the first step and after the last
  double reduce;     ///< the second kernel, besides its bytes
  double bytes_per;  ///< of partial sums, written and read: a microsecond's
};
inline constexpr Cost kFewCost = {2.0, 0.70, 0.60, 0.9, 1.3, 2.8e6};
inline constexpr Cost kManyCost = {3.2, 1.15, 0.92, 2.0, 0.3, 4.0e6};

struct Plan {
  bool few;    ///< FewTokens' sizes, or ManyTokens'
  int ksplit;  ///< parts of k
};

/// The plan that is expected to take the shortest.
/// @param sms multiprocessors @param from, to parts of k that are allowed
template <class F>
constexpr Plan plan(Shape s, int sms, int from = 1, int to = kMostKSplit) {
  const int steps = static_cast<int>(tiles::steps<typename F::Block>(s.id));
  constexpr double kPer128 = tiles::Tile<typename F::Block>::kSteps / 4.0;
  Plan best{true, from};
  double least = 0;
  const auto consider = [&](bool few, long long tile_rows, long long tile_tokens, const Cost& cost) {
    const long long tiles = (s.nt + tile_tokens - 1) / tile_tokens * ((s.od + tile_rows - 1) / tile_rows);
    for (int parts = from; parts <= to && parts <= steps; ++parts) {
      const int per = (steps + parts - 1) / parts;
      if (parts > from && (steps + per - 1) / per != parts) continue;  // a part without a step
      // Blocks of the busiest multiprocessor, one or two at a time.
      const long long blocks = (tiles * parts + sms - 1) / sms;
      const auto rounds = static_cast<double>((blocks + kBlocksPerSm - 1) / kBlocksPerSm);
      const double alone = rounds * cost.alone, together = static_cast<double>(blocks) * cost.shared;
      double us = cost.launch + per * kPer128 * (alone > together ? alone : together) + rounds * cost.round;
      if (parts > 1) {
        us += cost.reduce +
              8.0 * parts * static_cast<double>(s.nt) * static_cast<double>(s.od) / cost.bytes_per;
      }
      if (least == 0 || us < least) {
        least = us;
        best = {few, parts};
      }
    }
  };
  consider(true, FewTokens<F>::BM, FewTokens<F>::BN, kFewCost);
  consider(false, ManyTokens<F>::BM, ManyTokens<F>::BN, kManyCost);
  return best;
}

/// Launches with sizes Z. @param ksplit parts of k, 1..steps
template <class F, Scaling SCALING, class Z>
Status launch_sizes(const void* weights, const std::int8_t* codes, const std::uint32_t* scales, float* out,
                    Shape s, int ksplit, float* workspace, const GemmEpilogue& epilogue, Stream& stream,
                    bool programmatic = false) {
  using G = Stage<F, Z>;
  constexpr std::size_t kShared = static_cast<std::size_t>(Z::STAGES) * G::BYTES;
  static_assert(kShared <= kMostShared);
  const long long steps = tiles::steps<typename F::Block>(s.id);
  if (ksplit < 1 || ksplit > steps) {
    return Status::error("mmq_tiles: ksplit must be 1 to " + std::to_string(steps) + ", not " +
                         std::to_string(ksplit));
  }
  const long long rows = (s.od + Z::BM - 1) / Z::BM;
  if (rows > 65535) {
    return Status::error("mmq_tiles: od must be at most " + std::to_string(65535LL * Z::BM) + ", not " +
                         std::to_string(s.od));
  }
  if ((reinterpret_cast<std::uintptr_t>(weights) | reinterpret_cast<std::uintptr_t>(codes) |
       reinterpret_cast<std::uintptr_t>(scales)) %
          16 !=
      0) {
    return Status::error("weights and activations must begin at a multiple of 16 bytes");
  }
  Arguments g{};
  g.tiles = static_cast<const unsigned char*>(weights);
  g.codes = codes;
  g.scales = scales;
  g.out = out;
  g.nt = static_cast<int>(s.nt);
  g.od = static_cast<int>(s.od);
  g.chunks = static_cast<int>(s.id / kQ8ActsPerBlock);
  g.steps = static_cast<int>(steps);
  g.epilogue = epilogue;
  g.per_split = (g.steps + ksplit - 1) / ksplit;
  const int parts = (g.steps + g.per_split - 1) / g.per_split;
  if (parts > 1 && workspace == nullptr) return Status::error("mmq_tiles: ksplit above 1 needs a workspace");
  g.partials = parts > 1 ? workspace : nullptr;
  const dim3 grid(static_cast<unsigned>((s.nt + Z::BN - 1) / Z::BN), static_cast<unsigned>(rows),
                  static_cast<unsigned>(parts));
  LaunchOptions options;
  options.programmatic = programmatic;
  if (Status ok =
          launch(options, mmq_tiles<F, SCALING, Z, kBlocksPerSm>, grid, dim3(Z::THREADS), kShared, stream, g);
      !ok.ok() || parts == 1) {
    return ok;
  }
  return launch_split_k_reduce(workspace, out, epilogue, parts, s.nt, s.od, stream, programmatic);
}

/// launch_mmq for one format and one way of scaling.
/// @param ksplit parts of k, or 0: as many as are expected to be best, if there is a workspace
template <class F, Scaling SCALING>
Status launch_format(const void* weights, const std::int8_t* codes, const std::uint32_t* scales, float* out,
                     Shape s, int ksplit, float* workspace, const GemmEpilogue& epilogue, Stream& stream,
                     bool programmatic = false) {
  const int from = std::max(ksplit, 1), to = ksplit == 0 && workspace != nullptr ? kMostKSplit : from;
  const Plan p = plan<F>(s, multiprocessor_count(), from, to);
  const auto launch_with = [&](auto sizes) {
    return launch_sizes<F, SCALING, decltype(sizes)>(weights, codes, scales, out, s, p.ksplit, workspace,
                                                     epilogue, stream, programmatic);
  };
  return p.few ? launch_with(FewTokens<F>{}) : launch_with(ManyTokens<F>{});
}

}  // namespace mmq

/// Shapes of mmq_tiles.
inline Status mmq_supported(WeightType type, Shape s) {
  if (!tiles::has_tiles(type)) {
    return Status::error(std::string("mmq_tiles: ") + info(type).name +
                         " weights have no blocks; types with blocks of 32 or 256 have tiles");
  }
  if (Status ok = whole_blocks(type, s); !ok.ok()) return ok;
  constexpr long long kMost = 1 << 30;
  if (s.nt > kMost || s.id > kMost) return Status::error("nt and id must be at most 2^30");
  return {};
}

/// Bytes of workspace with which launch_mmq divides k among blocks where there are few tiles of outputs; 0 where it does
/// not. @param sms multiprocessors
inline std::size_t mmq_workspace_bytes(WeightType type, Shape s, int sms) {
  std::size_t n = 0;
  if (!mmq_supported(type, s).ok()) return n;
  (void)tiles::with_tile_format(type, [&](auto format) -> Status {
    using F = decltype(format);
    n = split_k_workspace_bytes(mmq::plan<F>(s, sms).ksplit, s.nt, s.od);
    return {};
  });
  return n;
}

/// out[nt][od] = acts[nt][id] . weights[od][id]^T, then the epilogue. The same bits in every run.
/// @param weights in tiles @param codes, scales launch_quantize_q8_pad40_t's, all three at multiples of 16 bytes
/// @param workspace mmq_workspace_bytes(type, s, ...) bytes at a multiple of 16, or null: k is not divided then
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
/// Does not synchronise.
template <class = void>  // so that only programs which call it have the kernels of all types
Status launch_mmq(WeightType type, const void* weights, const std::int8_t* codes, const std::uint32_t* scales,
                  float* out, Shape s, const GemmEpilogue& epilogue, float* workspace, Stream& stream,
                  bool programmatic = false) {
  if (Status ok = mmq_supported(type, s); !ok.ok()) return ok;
  return tiles::with_tile_format(type, [&](auto format) -> Status {
    using F = decltype(format);
    return mmq::launch_format<F, mmq::Properties<F>::kScaling>(weights, codes, scales, out, s, 0, workspace,
                                                               epilogue, stream, programmatic);
  });
}

/// Upper bound on the f32 roundings that a term meets: its own (scales of a K-quant's block, minima in two parts of 11
/// bits), two additions a chunk of 32, of which those of tensor cores cut off and count twice; the parts of k.
inline double mmq_roundings(long long id) {
  return 12 + 4.0 * static_cast<double>((id + 31) / 32) + kMostKSplit;
}

}  // namespace ladder
