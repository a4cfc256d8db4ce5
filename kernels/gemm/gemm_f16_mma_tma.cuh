// RUNG      gemm_f16_mma_tma: gemm_f16_mma's warps, and a warp beside them that has Hopper's copy engine fill the stages.
// PREV      gemm_f16_mma: its warps issue copies, compute their addresses, and wait for each other at every step
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T, then the epilogue; f16 operands, f32 sums
// LAYOUT    weights and acts row-major f16, out row-major f32; stages in shared memory [STAGES][TN + TM][64] halves, swizzled
//           by the copy engine as gemm_f16_mma swizzles them; sums of cut tiles [block][sums / 4][threads] float4
// MAP       grid(blocks that fit at once): block -> its share of the tiles that are cut along k, then every gridDim.x-th whole
//           tile of TN tokens x TM outputs; warps -> tiles of the tile; four more warps, of which one thread asks for copies
// NEEDS     sm_90a; id % 8 == 0, operands at multiples of 16 bytes (the launcher checks and says so); any nt, od
// TRAFFIC   weights 2*od*id B, acts 2*nt*id B, out 4*nt*od B; from L2 2*id*(od*ceil(nt/TN) + nt*ceil(od/TM)) B
// WORK      2*nt*od*id flop
// LOOK FOR  SASS: HMMA.16816.F32 and LDSM.16.M88.4 by turns, UTMALDG.2D, SYNCS instead of BAR; no LDL or STL in the loop
// EXPECT    nine tenths of what mma.sync does a clock on registers alone, from a few thousand tokens on, at a clock that the
//           power for moving operands lowers
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=compute_90a,code=sm_90a chapters/05-tiled-gemm/tiled_gemm.cu -o
//           tiled_gemm
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/mbarrier.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/device/tma.cuh"
#include "kernels/device/wgmma.cuh"
#include "kernels/gemm/epilogue.cuh"
#include "kernels/gemm/gemm_f16_mma.cuh"

namespace ladder {

inline constexpr int kMmaFlags = 8;        ///< of a block: one for every warp that multiplies
inline constexpr int kFewestCutSteps = 4;  ///< steps of cut tiles of a block

// ANCHOR: gemm_mma_share
/// How the tiles of a launch are shared out. Of the first `cut` tiles, every block gets as many steps of k as every other,
/// wherever a tile ends (stream-K); the others stay whole, and as many as there are blocks are multiplied at a time.
struct MmaShares {
  int tiles, cut, steps;  ///< steps: of k, of a tile
  int share, longer;      ///< a block's steps of the cut tiles; the first `longer` blocks have one more
};

/// The pieces of tiles of one block, in the order in which it multiplies them: the cut ones from the last to the first, so
/// that what it leaves for others comes first and what it needs from others, blocks before it, comes last; then whole ones.
struct MmaPieces {
  int tile = 0, step = 0, end = 0;  ///< the piece: steps [step, end) of a tile

  __host__ __device__ __forceinline__ MmaPieces(const MmaShares& s, int block, int blocks)
      : shares_(s),
        low_(first_step(s, block)),
        high_(first_step(s, block + 1)),
        next_(s.cut + block),
        stride_(blocks) {}
  /// Where a block's share of the cut tiles' steps begins.
  __host__ __device__ static __forceinline__ int first_step(const MmaShares& s, int block) {
    return block * s.share + (block < s.longer ? block : s.longer);
  }
  /// Steps of all pieces.
  __host__ __device__ __forceinline__ int all_steps() const {
    const int whole = next_ < shares_.tiles ? (shares_.tiles - next_ + stride_ - 1) / stride_ : 0;
    return high_ - low_ + whole * shares_.steps;
  }
  /// Goes to the next piece, the first one at first; whether there is one.
  __host__ __device__ __forceinline__ bool next() {
    if (high_ > low_) {
      tile = (high_ - 1) / shares_.steps;
      const int begin = tile * shares_.steps;
      end = high_ - begin;
      step = low_ > begin ? low_ - begin : 0;
      high_ = begin + step;
      return true;
    }
    if (next_ >= shares_.tiles) return false;
    tile = next_;
    next_ += stride_;
    step = 0;
    end = shares_.steps;
    return true;
  }

 private:
  MmaShares shares_;
  int low_, high_;  // steps of cut tiles that are left
  int next_, stride_;
};
// ANCHOR_END: gemm_mma_share

/// Sums of pieces that blocks leave for others. The flags are zero before the first launch, and every launch leaves them
/// zero. Launches that may run at the same time need a workspace each.
struct MmaWorkspace {
  float* sums =
      nullptr;  ///< gemm_f16_mma_tma_sums_bytes(sms) bytes at a multiple of 16; null: no tile is cut
  unsigned* flags = nullptr;  ///< [gemm_f16_mma_tma_flags(sms)]
};

/// Where a warp turns sums into lines of the output: eight tokens, rows so far apart that neither the pairs that come in
/// nor the fours that go out meet in a bank.
template <class T>
struct MmaLines {
  static constexpr bool USED =
      T::WN * T::WM > 32 * 32;  // for a small tile, the way there and back takes longer
  static constexpr int PITCH = (T::WM + 23) / 32 * 32 + 8,
                       BYTES = USED ? 8 * PITCH * 4 : 0;  ///< floats; bytes of a warp
};

// ANCHOR: gemm_mma_tma_lines
/// A warp's sums leave as whole lines: four lanes have 32 bytes of a token, and eight times as many tags for the L1 as lines
/// would be looked up if they wrote them themselves.
template <class T>
__device__ __forceinline__ void store_lines(const MmaWarp<T>& warp, float* lines, const MmaUnit& unit,
                                            int lane, float* out, int nt, int od) {
  constexpr int PITCH = MmaLines<T>::PITCH, FOURS = T::WM / 4;
  const bool vectors = od % 4 == 0 && reinterpret_cast<std::uintptr_t>(out) % 16 == 0;
  const int output0 = unit.output + warp.output;
#pragma unroll
  for (int eight = 0; eight < T::WN / 8; ++eight) {
    const int token0 = unit.token + warp.token + 8 * eight;
#pragma unroll
    for (int ni = 0; ni < T::WM / 8; ++ni) {
      const float* const pair = &warp.sum[eight / 2][ni][eight % 2 * 2];
      *reinterpret_cast<float2*>(lines + lane / 4 * PITCH + ni * 8 + lane % 4 * 2) =
          make_float2(pair[0], pair[1]);
    }
    __syncwarp();  // eight rows are complete
    if (vectors) {
#pragma unroll
      for (int i = 0; i < 8 * FOURS / 32; ++i) {
        const int row = (i * 32 + lane) / FOURS, column = (i * 32 + lane) % FOURS * 4;
        const int t = token0 + row, r = output0 + column;
        if (t >= nt || r >= od) continue;
        *reinterpret_cast<float4*>(out + static_cast<long long>(t) * od + r) =
            *reinterpret_cast<const float4*>(lines + row * PITCH + column);
      }
    } else {
#pragma unroll 1
      for (int i = lane; i < 8 * T::WM; i += 32) {
        const int row = i / T::WM, t = token0 + row, r = output0 + i % T::WM;
        if (t < nt && r < od) out[static_cast<long long>(t) * od + r] = lines[row * PITCH + i % T::WM];
      }
    }
    __syncwarp();  // and have been read
  }
}
// ANCHOR_END: gemm_mma_tma_lines

// ANCHOR: gemm_f16_mma_tma
template <class T>
__global__ void __launch_bounds__(T::THREADS + 128, 1)
    gemm_f16_mma_tma(const __grid_constant__ TensorMap weights_map,
                     const __grid_constant__ TensorMap acts_map, float* out, GemmEpilogue epilogue, int nt,
                     int od, MmaUnits tiles, MmaShares shares, MmaWorkspace workspace) {
#if defined(__CUDACC__)
  constexpr int K16 = T::K16, STAGES = T::STAGES,
                SUMS = T::WN / 16 * (T::WM / 8);  // SUMS: float4 of a thread
  static_assert(T::KS == 64, "a row of a stage is as wide as the copy engine's swizzle");
  // 1. The stages, and two barriers for each: `full` when the copy engine has brought all bytes, `empty` when all warps
  //    that read it are done.
  __shared__ std::uint64_t full[STAGES], empty[STAGES];
  unsigned char* stages = dynamic_shared<unsigned char>();
  stages += (1024 - shared_address(stages) % 1024) % 1024;  // [STAGES][TN + TM][64] halves
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, block = static_cast<int>(blockIdx.x);
  if (thread == 0) {
    prefetch_tensor_map(weights_map);
    prefetch_tensor_map(acts_map);
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], T::THREADS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are ready
  allow_next_kernel();

  MmaPieces piece(shares, block, static_cast<int>(gridDim.x));
  int stage = 0;
  if (thread >= T::THREADS) {
    // 2. One thread asks for everything, as far ahead as there are stages. What hangs over a matrix becomes zeros.
    if constexpr (T::WARPS == 8) registers_decrease<40>();
    if (thread != T::THREADS) return;
    const auto weights = [&](const MmaUnit& unit, int step, int at) {
      mbarrier_arrive_expect_bytes(&full[at], T::STAGE_BYTES);
      tensor_copy_2d(stages + at * T::STAGE_BYTES + T::ACTS_BYTES, weights_map, unit.output, step * T::KS,
                     &full[at]);
    };
    unsigned parity = 1;  // the first wait for each stage returns at once
    int early = -1;       // the first stages get their weights while the kernel before this one ends
    while (piece.next()) {
      const MmaUnit unit = mma_unit<T>(tiles, piece.tile, shares.steps);
      if (early < 0) {
        early = min(STAGES, piece.end - piece.step);
        for (int s = 0; s < early; ++s) weights(unit, piece.step + s, s);
        wait_for_previous_kernel();
      }
      for (int step = piece.step; step < piece.end; ++step) {
        mbarrier_wait(&empty[stage], parity);
        if (early > 0) {
          --early;
        } else {
          weights(unit, step, stage);
        }
        tensor_copy_2d(stages + stage * T::STAGE_BYTES, acts_map, unit.token, step * T::KS, &full[stage]);
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    return;
  }
  // 3. The others multiply. No warp waits for another: those that share a tensor core drift apart, and one loads fragments
  //    while the other multiplies.
  if constexpr (T::WARPS == 8) registers_increase<232>();
  wait_for_previous_kernel();
  const int w = thread / 32;
  MmaWarp<T> warp(w, lane);
  float* const lines =
      reinterpret_cast<float*>(stages + T::SHARED_BYTES + w * MmaLines<T>::BYTES);  // [8][PITCH]
  float4* const sums = reinterpret_cast<float4*>(workspace.sums) + thread;
  unsigned* const flags = workspace.flags + w;  // one a warp: its sums go to the same warp of another block
  unsigned parity = 0;
  int left = piece.all_steps();
  if (left > 0) {
    mbarrier_wait(&full[0], parity);
    warp.load(0, stages, 0);
  }
  while (piece.next()) {
    warp.clear();
    for (int step = piece.step; step < piece.end; ++step) {
      --left;
#pragma unroll
      for (int k16 = 0; k16 < K16; ++k16) {
        if (k16 + 1 < K16) {
          warp.load((k16 + 1) % 2, stages + stage * T::STAGE_BYTES, k16 + 1);
        } else {
          std::uint64_t* const read = &empty[stage];
          if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
          }
          if (left > 0) {  // the next step may be another piece's
            mbarrier_wait(&full[stage], parity);
            warp.load(0, stages + stage * T::STAGE_BYTES, 0);
          }
          // Its last fragments are in registers: it may go back.
          mbarrier_arrive_after(read, warp.word_of(k16 % 2));
        }
        warp.multiply(k16 % 2);
      }
    }
    // 4. A piece that is not its tile's last goes to the block that has that one.
    if (piece.end < shares.steps) {
      float4* const to = sums + static_cast<long long>(block) * SUMS * T::THREADS;
#pragma unroll
      for (int i = 0; i < SUMS; ++i) {
        const float(&v)[4] = warp.sum[i / (T::WM / 8)][i % (T::WM / 8)];
        __stcg(to + i * T::THREADS, make_float4(v[0], v[1], v[2], v[3]));
      }
      __threadfence();
      __syncwarp();  // the sums of all lanes are out
      if (lane == 0) atomicExch(flags + block * kMmaFlags, 1u);
      continue;
    }
    // 5. A tile's last piece: the others are added from back to front, in the same order in every run.
    for (int other = block, first = piece.tile * shares.steps, at = first + piece.step; at > first;) {
      at = MmaPieces::first_step(shares, --other);
      if (lane == 0) {
        while (atomicCAS(flags + other * kMmaFlags, 1u, 0u) != 1u) {
        }
      }
      __syncwarp();  // that block's warp has written
      __threadfence();
      const float4* const from = sums + static_cast<long long>(other) * SUMS * T::THREADS;
#pragma unroll
      for (int i = 0; i < SUMS; ++i) {
        float(&v)[4] = warp.sum[i / (T::WM / 8)][i % (T::WM / 8)];
        const float4 add = __ldcg(from + i * T::THREADS);
        v[0] += add.x, v[1] += add.y, v[2] += add.z, v[3] += add.w;
      }
    }
    const MmaUnit unit = mma_unit<T>(tiles, piece.tile, shares.steps);
    warp.finish(unit, lane, epilogue, nt, od);
    if constexpr (MmaLines<T>::USED) {
      store_lines(warp, lines, unit, lane, out, nt, od);
    } else {
      warp.store(unit, lane, out, nt, od);
    }
  }
#else
  (void)weights_map, (void)acts_map, (void)out, (void)epilogue, (void)nt, (void)od, (void)tiles, (void)shares,
      (void)workspace;
  needs_sm90("cp.async.bulk.tensor");
#endif
}
// ANCHOR_END: gemm_f16_mma_tma

inline Status gemm_f16_mma_tma_supported(Shape s, const DeviceInfo& device) {
  if (Status ok = gemm_f16_mma_supported(s); !ok.ok()) return ok;
  if (device.executor == Executor::gpu && device.cc_major == 9) return {};
  return Status::error(
      "gemm_f16_mma_tma: needs a GPU of compute capability 9.0: its copies of tiles are not emulated");
}

/// What a launch is compiled for, and how many of its tiles are cut.
struct MmaTmaPlan {
  int tile;  ///< of MmaTmaTiles
  int cut;

  bool operator==(const MmaTmaPlan&) const = default;
};

/// gemm_f16_mma_tma with a tile of the caller's choice.
/// @param cut tiles that are divided along k; 0 without a workspace
/// @param band see MmaUnits
template <class T>
Status launch_gemm_f16_mma_tma_tile(const __half* weights, const __half* acts, float* out, Shape s,
                                    const GemmEpilogue& epilogue, int cut, MmaWorkspace workspace,
                                    Stream& stream, bool programmatic = false, int band = 8) {
  if (Status ok = gemm_f16_mma_supported(s); !ok.ok()) return ok;
  if (Status ok = detail::check_gemm_pointers(weights, acts); !ok.ok()) return ok;
  MmaUnits tiles;
  if (Status ok = detail::divide_mma<T>(tiles, s, 1, band); !ok.ok()) return ok;
  if (cut < 0 || cut > tiles.count()) {
    return Status::error("gemm_f16_mma_tma: " + std::to_string(cut) + " tiles to cut; there are " +
                         std::to_string(tiles.count()));
  }
  if (cut > 0 && (workspace.sums == nullptr || workspace.flags == nullptr ||
                  reinterpret_cast<std::uintptr_t>(workspace.sums) % 16 != 0)) {
    return Status::error(
        "gemm_f16_mma_tma: tiles that are cut need a workspace, at a multiple of 16 bytes, and flags");
  }
  // At least kFewestSteps steps of cut tiles a block. Blocks wait for each other, so all of them must run at once.
  const int sms = multiprocessor_count();
  const long long steps = static_cast<long long>(cut) * tiles.steps;
  if (steps > std::numeric_limits<int>::max() / 2) {
    return Status::error("gemm_f16_mma_tma: too many tiles to cut");
  }
  const int blocks = cut == 0 ? std::min(tiles.count(), sms)
                              : static_cast<int>(std::clamp<long long>(steps / kFewestCutSteps, 1, sms));
  const MmaShares shares{tiles.count(), cut, tiles.steps, static_cast<int>(steps / blocks),
                         static_cast<int>(steps % blocks)};
  const TensorMapOptions swizzled_128{TensorElement::f16, TensorSwizzle::bytes_128, true};
  TensorMap weights_map, acts_map;
  const auto size = [](long long n) { return static_cast<std::uint64_t>(n); };
  if (Status ok = make_tensor_map(weights_map, weights, size(s.od), size(s.id), T::TM, T::KS, swizzled_128);
      !ok.ok()) {
    return ok;
  }
  if (Status ok = make_tensor_map(acts_map, acts, size(s.nt), size(s.id), T::TN, T::KS, swizzled_128);
      !ok.ok()) {
    return ok;
  }
  LaunchOptions options;
  options.programmatic = programmatic;
  return launch(options, gemm_f16_mma_tma<T>, dim3(static_cast<unsigned>(blocks)), dim3(T::THREADS + 128),
                T::SHARED_BYTES + 1024 + T::WARPS * MmaLines<T>::BYTES, stream, weights_map, acts_map, out,
                epilogue, static_cast<int>(s.nt), static_cast<int>(s.od), tiles, shares, workspace);
}

// ANCHOR: gemm_mma_tma_plan
using MmaTmaTiles = std::tuple<MmaTile<256, 128, 64, 4, 64, 64, 1>, MmaTile<128, 128, 64, 6, 64, 32, 1>,
                               MmaTile<128, 64, 64, 8, 32, 32, 1>, MmaTile<64, 64, 64, 8, 32, 32, 1>>;

namespace detail {

/// What a tile costs, in clocks of a multiprocessor, fitted to measurements on an H200: a step of k, a whole tile besides its
/// steps, what comes once a launch, and what a launch with cut tiles costs beyond that.
struct MmaTmaCost {
  double step, tile, launch, cut;
};
inline constexpr MmaTmaCost kMmaTmaCosts[] = {
    {1820, 8000, 0, 30000}, {1110, 3250, 1100, 17400}, {630, 1700, 2600, 11000}, {510, 700, 3200, 5300}};

template <class T>
void consider(MmaTmaPlan& best, double& least, int tile, const MmaTmaCost& cost, Shape s, int sms,
              bool may_cut) {
  const long long tiles = (s.nt + T::TN - 1) / T::TN * ((s.od + T::TM - 1) / T::TM);
  const double steps = static_cast<double>((s.id + T::KS - 1) / T::KS);
  // Cut: nothing, what a last round would not fill, or that and a round more, so that a tile has two pieces at most.
  const long long over = tiles % sms, cuts[] = {0, over, over > 0 && tiles > sms ? over + sms : 0};
  for (const long long cut : cuts) {
    if (cut > 0 && (!may_cut || cut * steps < kFewestCutSteps * sms)) continue;
    const double whole = static_cast<double>((tiles - cut + sms - 1) / sms);
    double clocks = cost.launch + whole * (steps * cost.step + cost.tile);
    if (cut > 0) clocks += static_cast<double>(cut) * steps / sms * cost.step + cost.cut;
    if (least == 0 || clocks < least) {
      least = clocks;
      best = {tile, static_cast<int>(cut)};
    }
  }
}

}  // namespace detail

/// The tile, and how many of them to cut, that are expected to be fastest.
/// @param may_cut whether there is a workspace
inline MmaTmaPlan gemm_f16_mma_tma_plan(Shape s, int sms, bool may_cut) {
  MmaTmaPlan best{0, 0};
  double least = 0;
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    (detail::consider<std::tuple_element_t<I, MmaTmaTiles>>(best, least, static_cast<int>(I),
                                                            detail::kMmaTmaCosts[I], s, sms, may_cut),
     ...);
  }
  (std::make_index_sequence<std::tuple_size_v<MmaTmaTiles>>());
  return best;
}
// ANCHOR_END: gemm_mma_tma_plan

/// Bytes of MmaWorkspace::sums, and the number of its flags, with which any product may be cut.
constexpr std::size_t gemm_f16_mma_tma_sums_bytes(int sms) {
  using Largest = std::tuple_element_t<0, MmaTmaTiles>;
  return static_cast<std::size_t>(sms) * Largest::TN * Largest::TM * sizeof(float);
}
constexpr std::size_t gemm_f16_mma_tma_flags(int sms) { return static_cast<std::size_t>(sms) * kMmaFlags; }

/// As launch_gemm_f16_mma.
/// @param programmatic may start before the kernel before it has ended, and then reads weights before that
inline Status launch_gemm_f16_mma_tma(const __half* weights, const __half* acts, float* out, Shape s,
                                      const GemmEpilogue& epilogue, MmaWorkspace workspace, Stream& stream,
                                      bool programmatic = false) {
  if (Status ok = gemm_f16_mma_supported(s); !ok.ok()) return ok;
  const MmaTmaPlan plan = gemm_f16_mma_tma_plan(s, multiprocessor_count(), workspace.sums != nullptr);
  return detail::with_mma_tile<MmaTmaTiles>(plan.tile, [&](auto tile) {
    return launch_gemm_f16_mma_tma_tile<decltype(tile)>(weights, acts, out, s, epilogue, plan.cut, workspace,
                                                        stream, programmatic);
  });
}

}  // namespace ladder
