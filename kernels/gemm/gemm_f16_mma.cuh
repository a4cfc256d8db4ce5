// RUNG      gemm_f16_mma: ldmatrix and mma.sync on large warp tiles, stages of shared memory that fill ahead.
// PREV      gemm_f16_nt: its warp tile of 32 x 32 reads two bytes of shared memory for every eight products
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T, then the epilogue; f16 operands, f32 sums
// LAYOUT    weights and acts row-major f16, out row-major f32; with ksplit > 1 f32 partials [ksplit][nt][od]
// MAP       grid(blocks that fit at once): block -> every gridDim.x-th unit, a tile of TN tokens x TM outputs over one
//           part of k, neighbouring units sharing tokens or outputs; warp -> 64 x 64 outputs of the tile (at most)
// NEEDS     sm_80; id % 8 == 0, operands at multiples of 16 bytes (checked by the launcher); any nt, od
// TRAFFIC   weights 2*od*id B, acts 2*nt*id B, out 4*nt*od B; from L2 2*id*(od*ceil(nt/TN) + nt*ceil(od/TM)) B
// WORK      2*nt*od*id flop
// LOOK FOR  SASS: HMMA.16816.F32, LDSM.16.M88.4, LDGSTS.E.BYPASS.128; no LDL or STL
// EXPECT    90 % of what mma.sync does in a loop on registers; on Hopper that is 60 % of what wgmma could
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/05-tiled-gemm/tiled_gemm.cu -o tiled_gemm
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

#include "harness/device/device.hpp"
#include "kernels/device/cp_async.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/ldmatrix.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/gemm/epilogue.cuh"
#include "kernels/gemm/split_k.cuh"

namespace ladder {

// ANCHOR: gemm_mma_tile
/// A tile and how its block is organised.
/// @tparam TN, TM tokens and outputs of the block's tile @tparam KS elements of k in a stage: 32 or 64
/// @tparam WN, WM tokens and outputs of a warp's tile @tparam RESIDENT blocks on a multiprocessor
/// @tparam SWIZZLED false leaves chunks in their order, to see what that costs
template <int TN_, int TM_, int KS_, int STAGES_, int WN_, int WM_, int RESIDENT_, bool SWIZZLED_ = true>
struct MmaTile {
  static constexpr int TN = TN_, TM = TM_, KS = KS_, STAGES = STAGES_, WN = WN_, WM = WM_;
  static constexpr int RESIDENT = RESIDENT_;
  static constexpr bool SWIZZLED = SWIZZLED_;
  static constexpr int WARPS = TN / WN * (TM / WM), THREADS = 32 * WARPS;
  static constexpr int ROW_BYTES = 2 * KS, CHUNKS = KS / 8;  // 16-byte chunks of a row
  static constexpr int ACTS_BYTES = TN * ROW_BYTES, STAGE_BYTES = (TN + TM) * ROW_BYTES;
  static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;
  static constexpr int COPY_ROWS = THREADS / CHUNKS;  // rows that all threads together copy at once
  static constexpr int K16 = KS / 16;                 // steps of the tensor core in a stage
  static_assert(KS == 32 || KS == 64, "rows of 64 or 128 bytes are swizzled below");
  static_assert(STAGES >= 2 && WN % 16 == 0 && WM % 16 == 0 && TN % WN == 0 && TM % WM == 0);
  static_assert(TN % COPY_ROWS == 0 && TM % COPY_ROWS == 0 && COPY_ROWS % 8 == 0);
};

/// Where in a stage the 16 bytes of `chunk` of `row` lie. Eight rows of 16 bytes that ldmatrix reads at once must lie
/// in different banks, and rows are 64 or 128 bytes, so the chunk number is XOR-ed with the number of the 128-byte
/// line.
template <class T>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int ROWS_PER_LINE = 128 / T::ROW_BYTES;
  const int flipped = T::SWIZZLED ? row / ROWS_PER_LINE & (T::CHUNKS - 1) : 0;
  return row * T::ROW_BYTES + ((chunk ^ flipped) << 4);
}
// ANCHOR_END: gemm_mma_tile

// ANCHOR: gemm_mma_units
/// How the units of a launch are numbered: tiles of one part of k first, in bands of `band` token tiles. Units that run at
/// the same time should read the same rows: a band of tokens goes through all outputs before the next band comes.
struct MmaUnits {
  int token_tiles, output_tiles, ksplit;
  int steps;  ///< steps of KS in a part of k; the last part may have fewer
  int band;   ///< token tiles that are multiplied with the same outputs one after the other
  __host__ __device__ int count() const { return token_tiles * output_tiles * ksplit; }
};

/// A tile, and its steps of k.
struct MmaUnit {
  int token, output, z, step, end;
};

template <class T>
__device__ __forceinline__ MmaUnit mma_unit(const MmaUnits& units, int u, int all_steps) {
  const int tiles = units.token_tiles * units.output_tiles, z = u / tiles, tile = u % tiles;
  const int per_band = units.band * units.output_tiles, first = tile / per_band * units.band;
  const int in_band = min(units.band, units.token_tiles - first), at = tile % per_band;
  MmaUnit unit;
  unit.token = (first + at % in_band) * T::TN;
  unit.output = at / in_band * T::TM;
  unit.z = z;
  unit.step = z * units.steps;
  unit.end = min(unit.step + units.steps, all_steps);
  return unit;
}
// ANCHOR_END: gemm_mma_units

// ANCHOR: gemm_mma_warp
/// What a warp does: WN x WM sums, and fragments of both operands, two sets of each: one in the tensor cores while the
/// other is loaded. As ldmatrix's eight rows are neighbours, the swizzle is the same for all fragments of a lane, and the
/// step of k only flips bits of the address.
template <class T>
struct MmaWarp {
  static constexpr int MI = T::WN / 16, NI = T::WM / 8;
  int token, output;  // of the warp in the tile
  int a_at, b_at;     // of this lane's rows in a stage, bytes
  std::uint32_t a[2][MI][4], b[2][NI / 2][4];
  float sum[MI][NI][4];

  __device__ __forceinline__ MmaWarp(int warp, int lane)
      : token(warp % (T::TN / T::WN) * T::WN),
        output(warp / (T::TN / T::WN) * T::WM),
        a_at(swizzled<T>(token + lane % 16, lane / 16)),
        b_at(T::ACTS_BYTES + swizzled<T>(output + lane / 16 * 8 + lane % 8, lane / 8 % 2)) {}

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int mi = 0; mi < MI; ++mi) {
#pragma unroll
      for (int ni = 0; ni < NI; ++ni) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[mi][ni][i] = 0.0f;
      }
    }
  }
  /// @param stage the stage in shared memory @param k16 which sixteen elements of k
  __device__ __forceinline__ void load(int set, const unsigned char* stage, int k16) {
#pragma unroll
    for (int i = 0; i < MI; ++i) ldmatrix<4>(a[set][i], stage + (a_at ^ k16 << 5) + i * 16 * T::ROW_BYTES);
#pragma unroll
    for (int i = 0; i < NI / 2; ++i) {
      ldmatrix<4>(b[set][i], stage + (b_at ^ k16 << 5) + i * 16 * T::ROW_BYTES);
    }
  }
  __device__ __forceinline__ void multiply(int set) {
#pragma unroll
    for (int mi = 0; mi < MI; ++mi) {
#pragma unroll
      for (int n = 0; n < NI; ++n) {
        const int ni = mi % 2 == 0 ? n : NI - 1 - n;  // there and back: the last b stays for the next a
        const std::uint32_t pair[2] = {b[set][ni / 2][ni % 2 * 2], b[set][ni / 2][ni % 2 * 2 + 1]};
        mma_m16n8k16_f16(sum[mi][ni], a[set][mi], pair);
      }
    }
  }
  /// Something of every fragment of a set.
  __device__ __forceinline__ std::uint32_t word_of(int set) const {
    std::uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < MI; ++i) word ^= a[set][i][0];
#pragma unroll
    for (int i = 0; i < NI / 2; ++i) word ^= b[set][i][0];
    return word;
  }
  /// What the epilogue adds. All of it is loaded before anything is stored, as `residual` may be `out`.
  __device__ __forceinline__ void finish(const MmaUnit& unit, int lane, const GemmEpilogue& epilogue, int nt,
                                         int od) {
    if (epilogue.bias == nullptr && epilogue.residual == nullptr && epilogue.row_scale == nullptr) return;
    const int token0 = unit.token + token + lane / 4, output0 = unit.output + output + 2 * (lane % 4);
#pragma unroll
    for (int mi = 0; mi < MI; ++mi) {
#pragma unroll
      for (int ni = 0; ni < NI; ++ni) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int t = token0 + mi * 16 + i / 2 * 8, r = output0 + ni * 8 + i % 2;
          if (t < nt && r < od) sum[mi][ni][i] = apply_epilogue(epilogue, sum[mi][ni][i], t, r, od);
        }
      }
    }
  }
  /// Sums leave in pairs.
  __device__ __forceinline__ void store(const MmaUnit& unit, int lane, float* out, int nt, int od) const {
    float* const to = out + static_cast<long long>(unit.z) * nt * od;
    const bool pairs = od % 2 == 0 && reinterpret_cast<std::uintptr_t>(out) % 8 == 0;
    const int token0 = unit.token + token + lane / 4, output0 = unit.output + output + 2 * (lane % 4);
#pragma unroll
    for (int mi = 0; mi < MI; ++mi) {
#pragma unroll
      for (int ni = 0; ni < NI; ++ni) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int t = token0 + mi * 16 + half * 8, r = output0 + ni * 8;
          if (t >= nt || r >= od) continue;
          float* const p = to + static_cast<long long>(t) * od + r;
          if (pairs) {
            *reinterpret_cast<float2*>(p) = make_float2(sum[mi][ni][2 * half], sum[mi][ni][2 * half + 1]);
          } else {
            p[0] = sum[mi][ni][2 * half];
            if (r + 1 < od) p[1] = sum[mi][ni][2 * half + 1];
          }
        }
      }
    }
  }
};
// ANCHOR_END: gemm_mma_warp

// ANCHOR: gemm_f16_mma
template <class T>
__global__ void __launch_bounds__(T::THREADS, T::RESIDENT)
    gemm_f16_mma(const __half* weights, const __half* acts, float* out, GemmEpilogue epilogue, int nt, int od,
                 int id, MmaUnits units) {
  constexpr int K16 = T::K16, STAGES = T::STAGES;
  unsigned char* const shared = dynamic_shared<unsigned char>();  // [STAGES][TN + TM][KS] halves, swizzled
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int all_steps = (id + T::KS - 1) / T::KS;
  const int stride = static_cast<int>(gridDim.x), count = units.count();

  // 1. Copies run STAGES - 1 steps ahead of the products, from one unit into the next. A thread copies one chunk of
  //    every COPY_ROWS-th row; chunks outside the matrices become zeros.
  const int copy_row = thread / T::CHUNKS, copy_chunk = thread % T::CHUNKS;
  const int copy_at = swizzled<T>(copy_row, copy_chunk);  // and COPY_ROWS, a multiple of 8, rows further
  int copy_unit = static_cast<int>(blockIdx.x), copy_stage = 0;
  MmaUnit copy = mma_unit<T>(units, min(copy_unit, count - 1), all_steps);
  const auto copy_rows = [&](int part, int parts, int tile_rows, int rows, int first_row, const __half* from,
                             int offset) {
    const int k = copy.step * T::KS + copy_chunk * 8, passes = tile_rows / T::COPY_ROWS;
    unsigned char* const to = shared + copy_stage * T::STAGE_BYTES + offset + copy_at;
#pragma unroll
    for (int i = passes * part / parts; i < passes * (part + 1) / parts; ++i) {
      const int row = first_row + copy_row + i * T::COPY_ROWS;
      const bool inside = row < rows && k < id;
      cp_async_cg(to + i * T::COPY_ROWS * T::ROW_BYTES,
                  from + (inside ? static_cast<long long>(row) * id + k : 0), inside ? 16 : 0);
    }
  };
  /// One of `parts` parts of a stage; the last closes the group.
  const auto copy_part = [&](int part, int parts) {
    if (copy_unit < count) {
      copy_rows(part, parts, T::TN, nt, copy.token, acts, 0);
      copy_rows(part, parts, T::TM, od, copy.output, weights, T::ACTS_BYTES);
    }
    if (part + 1 < parts) return;
    cp_async_commit_group();  // empty at the end, so that groups count stages
    copy_stage = copy_stage + 1 == STAGES ? 0 : copy_stage + 1;
    if (copy_unit < count && ++copy.step == copy.end) {
      copy_unit += stride;
      copy = mma_unit<T>(units, min(copy_unit, count - 1), all_steps);
    }
  };
  allow_next_kernel();
  wait_for_previous_kernel();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) copy_part(0, 1);

  MmaWarp<T> warp(thread / 32, lane);
  cp_async_wait_group<STAGES - 2>();
  __syncthreads();  // the first stage of every thread is there
  warp.load(0, shared, 0);
  int stage = 0;
  for (int u = static_cast<int>(blockIdx.x); u < count; u += stride) {
    const MmaUnit unit = mma_unit<T>(units, u, all_steps);
    warp.clear();
    // 2. The products of a tile.
    for (int step = unit.step; step < unit.end; ++step) {
#pragma unroll
      for (int k16 = 0; k16 < K16; ++k16) {
        copy_part(k16, K16);  // into the stage of the step before this one, which all warps have read
        if (k16 + 1 < K16) {
          warp.load((k16 + 1) % 2, shared + stage * T::STAGE_BYTES, k16 + 1);
        } else {
          cp_async_wait_group<STAGES - 2>();
          __syncthreads();  // the next stage is there; nobody reads this one any more
          stage = stage + 1 == STAGES ? 0 : stage + 1;
          if (step + 1 < unit.end || u + stride < count) warp.load(0, shared + stage * T::STAGE_BYTES, 0);
        }
        warp.multiply(k16 % 2);
      }
    }
    // 3. The copies of the next tile are on their way meanwhile.
    warp.finish(unit, lane, epilogue, nt, od);
    warp.store(unit, lane, out, nt, od);
  }
}
// ANCHOR_END: gemm_f16_mma

/// Shapes of gemm_f16_mma.
inline Status gemm_f16_mma_supported(Shape s) {
  if (s.nt < 1 || s.od < 1 || s.id < 1) return Status::error("nt, od and id must all be at least 1");
  if (s.id % 8 != 0) {
    return Status::error("id must be a multiple of 8, 16 bytes of f16, not " + std::to_string(s.id));
  }
  constexpr long long kMost = 1 << 24;
  if (s.nt > kMost || s.od > kMost || s.id > kMost) {
    return Status::error("nt, od and id must be at most " + std::to_string(kMost));
  }
  return {};
}

namespace detail {

inline Status check_gemm_pointers(const void* weights, const void* acts) {
  if ((reinterpret_cast<std::uintptr_t>(weights) | reinterpret_cast<std::uintptr_t>(acts)) % 16 == 0)
    return {};
  return Status::error("weights and activations must begin at a multiple of 16 bytes");
}

/// The units of a launch. @param ksplit parts of k that are wanted; fewer are made where a part would have no step
template <class T>
Status divide_mma(MmaUnits& units, Shape s, int ksplit, int band) {
  const int steps = static_cast<int>((s.id + T::KS - 1) / T::KS);
  units.token_tiles = static_cast<int>((s.nt + T::TN - 1) / T::TN);
  units.output_tiles = static_cast<int>((s.od + T::TM - 1) / T::TM);
  units.steps = (steps + ksplit - 1) / ksplit;
  units.ksplit = (steps + units.steps - 1) / units.steps;
  units.band = band;
  const long long count = static_cast<long long>(units.token_tiles) * units.output_tiles * units.ksplit;
  if (count > std::numeric_limits<int>::max() / 2)
    return Status::error("nt * od is too large for one launch");
  return {};
}

}  // namespace detail

/// gemm_f16_mma with a tile of the caller's choice.
/// @param ksplit parts of k, at least 1; fewer are made where a part would have no step
/// @param workspace split_k_workspace_bytes(ksplit, nt, od) bytes at a multiple of 16, or null if ksplit is 1
/// @param band see MmaUnits
template <class T>
Status launch_gemm_f16_mma_tile(const __half* weights, const __half* acts, float* out, Shape s,
                                const GemmEpilogue& epilogue, int ksplit, float* workspace, Stream& stream,
                                bool programmatic = false, int band = 8) {
  if (Status ok = gemm_f16_mma_supported(s); !ok.ok()) return ok;
  if (Status ok = detail::check_gemm_pointers(weights, acts); !ok.ok()) return ok;
  if (ksplit < 1 || (ksplit > 1 && workspace == nullptr)) {
    return Status::error("ksplit must be at least 1, and more than 1 needs a workspace");
  }
  MmaUnits units;
  if (Status ok = detail::divide_mma<T>(units, s, ksplit, band); !ok.ok()) return ok;
  const int blocks = std::min(units.count(), multiprocessor_count() * T::RESIDENT);
  const bool split = units.ksplit > 1;
  LaunchOptions options;
  options.programmatic = programmatic;
  if (Status ok = launch(options, gemm_f16_mma<T>, dim3(static_cast<unsigned>(blocks)), dim3(T::THREADS),
                         T::SHARED_BYTES, stream, weights, acts, split ? workspace : out,
                         split ? GemmEpilogue{} : epilogue, static_cast<int>(s.nt), static_cast<int>(s.od),
                         static_cast<int>(s.id), units);
      !ok.ok() || !split) {
    return ok;
  }
  return launch_split_k_reduce(workspace, out, epilogue, units.ksplit, s.nt, s.od, stream, true);
}

// ANCHOR: gemm_mma_plan
/// Tiles that gemm_f16_mma chooses from, the largest first. Fewer bytes per product in the large ones, more blocks to share
/// out with the small ones.
using MmaTiles = std::tuple<MmaTile<256, 128, 64, 4, 64, 64, 1>, MmaTile<128, 128, 64, 3, 64, 64, 2>,
                            MmaTile<64, 64, 64, 4, 32, 32, 3>>;

struct MmaPlan {
  int tile;    ///< of MmaTiles
  int ksplit;  ///< parts of k
};

namespace detail {

/// What a tile costs, in clocks of a multiprocessor, fitted to measurements on an H200: a step of k while it is full of
/// blocks and for a block alone, and what comes before the first step and after the last.
struct MmaTileCost {
  double full, alone, round;
};
inline constexpr MmaTileCost kMmaTileCosts[] = {{2040, 2040, 5800}, {1050, 1360, 2860}, {425, 550, 2010}};

/// Keeps the better of `best`, which takes `least` clocks, and a plan with tile T.
template <class T>
void consider(MmaPlan& best, double& least, int tile, MmaTileCost cost, Shape s, int sms, int most_parts) {
  const long long tiles = (s.nt + T::TN - 1) / T::TN * ((s.od + T::TM - 1) / T::TM);
  const int steps = static_cast<int>((s.id + T::KS - 1) / T::KS);
  for (int parts = 1; parts <= most_parts && (parts == 1 || parts * 4 <= steps); ++parts) {
    if (tiles * (parts - 1) > static_cast<long long>(sms) * T::RESIDENT) break;  // enough blocks without it
    const int per = (steps + parts - 1) / parts;
    if ((steps + per - 1) / per != parts) continue;  // a part without a step
    // Blocks of the busiest multiprocessor, and how long it has them.
    const long long blocks = (tiles * parts + sms - 1) / sms,
                    rounds = (blocks + T::RESIDENT - 1) / T::RESIDENT;
    double clocks =
        per * std::max(static_cast<double>(blocks) * cost.full, static_cast<double>(rounds) * cost.alone);
    clocks += static_cast<double>(rounds) * cost.round;
    // Another kernel, and the partial sums there and back at 16 bytes a clock and multiprocessor.
    if (parts > 1) {
      clocks += 2500 + 0.5 * parts * static_cast<double>(s.nt) * static_cast<double>(s.od) / sms;
    }
    if (least == 0 || clocks < least) {
      least = clocks;
      best = {tile, parts};
    }
  }
}

/// The best plan with one of Tiles. @param costs of each of them
template <class Tiles>
MmaPlan best_mma_plan(const MmaTileCost (&costs)[std::tuple_size_v<Tiles>], Shape s, int sms,
                      int most_parts) {
  MmaPlan best{0, 1};
  double least = 0;
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    (consider<std::tuple_element_t<I, Tiles>>(best, least, static_cast<int>(I), costs[I], s, sms, most_parts),
     ...);
  }
  (std::make_index_sequence<std::tuple_size_v<Tiles>>());
  return best;
}

/// What f says of the tile with this number.
template <class Tiles, class F>
Status with_mma_tile(int tile, const F& f) {
  Status status;
  const auto take = [&](auto candidate, int number) {
    if (number == tile) static_cast<void>(status = f(candidate));
  };
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    (take(std::tuple_element_t<I, Tiles>(), static_cast<int>(I)), ...);
  }
  (std::make_index_sequence<std::tuple_size_v<Tiles>>());
  return status;
}

}  // namespace detail

/// The tile, and the parts of k, that are expected to be fastest.
/// @param most_parts 1 where there is no workspace
inline MmaPlan gemm_f16_mma_plan(Shape s, int sms, int most_parts = kMostKSplit) {
  return detail::best_mma_plan<MmaTiles>(detail::kMmaTileCosts, s, sms, most_parts);
}

/// Bytes of workspace that launch_gemm_f16_mma can use at this shape.
inline std::size_t gemm_f16_mma_workspace_bytes(Shape s, int sms) {
  return split_k_workspace_bytes(gemm_f16_mma_plan(s, sms).ksplit, s.nt, s.od);
}
// ANCHOR_END: gemm_mma_plan

/// out[nt][od] = epilogue(acts[nt][id] . weights[od][id]^T). Does not allocate or synchronise.
/// @param workspace gemm_f16_mma_workspace_bytes(s, multiprocessor_count()) bytes at a multiple of 16; or null: then k is
///        never divided
/// @param programmatic may start before the kernel before it has ended, and waits for it on the device
inline Status launch_gemm_f16_mma(const __half* weights, const __half* acts, float* out, Shape s,
                                  const GemmEpilogue& epilogue, float* workspace, Stream& stream,
                                  bool programmatic = false) {
  if (Status ok = gemm_f16_mma_supported(s); !ok.ok()) return ok;
  const MmaPlan plan = gemm_f16_mma_plan(s, multiprocessor_count(), workspace != nullptr ? kMostKSplit : 1);
  return detail::with_mma_tile<MmaTiles>(plan.tile, [&](auto tile) {
    return launch_gemm_f16_mma_tile<decltype(tile)>(weights, acts, out, s, epilogue, plan.ksplit, workspace,
                                                    stream, programmatic);
  });
}

}  // namespace ladder
