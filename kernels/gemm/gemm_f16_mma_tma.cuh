// RUNG      gemm_f16_mma_tma: Hopper's copy engine fills the stages, and fragments come one by one between products.
// PREV      gemm_f16_mma: its warps issue copies, compute their addresses, and wait for each other at every step
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T, then the epilogue; f16 operands, f32 sums
// LAYOUT    weights and acts row-major f16, out row-major f32; stages in shared memory [STAGES][TN + TM][64] halves, swizzled
//           by the copy engine as gemm_f16_mma swizzles them; sums of cut tiles [block][sums / 4][threads] float4
// MAP       grid(blocks that fit at once): block, or two in a cluster -> its share of the tiles that are cut along k, then
//           whole tiles of TN tokens x TM outputs, as far apart as there are blocks or clusters; warps -> tiles of the
//           tile; four more warps, of which one thread asks for copies
// NEEDS     sm_90a; id % 8 == 0, operands at multiples of 16 bytes (the launcher checks and says so); any nt, od
// TRAFFIC   weights 2*od*id B, acts 2*nt*id B, out 4*nt*od B; from L2 2*id*(od*ceil(nt/TN) + nt*ceil(od/TM)) B, in clusters
//           of two half as much of acts
// WORK      2*nt*od*id flop
// LOOK FOR  SASS: HMMA.16816.F32 with single LDSM.16.M88.4 between them, UTMALDG.2D, SYNCS instead of BAR; no LDL or STL in
//           the loop
// EXPECT    more than eight tenths of what mma.sync does a clock on registers alone, from a few thousand tokens on, at a
//           clock that the power for moving operands lowers
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
#include "kernels/device/cluster.cuh"
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
/// would be looked up if they wrote them themselves. The other warps multiply meanwhile or have to wait, so that it should
/// take few instructions: a lane's places are worked out once, and then are eight tokens further each time.
template <class T>
__device__ __forceinline__ void store_lines(const MmaSums<T>& warp, float* lines, const MmaUnit& unit,
                                            int lane, float* out, int nt, int od) {
  constexpr int PITCH = MmaLines<T>::PITCH, FOURS = T::WM / 4, PASSES = (8 * FOURS + 31) / 32;
  const int token0 = unit.token + warp.token, output0 = unit.output + warp.output;
  float* to[PASSES];
  int from[PASSES],
      tokens[PASSES];  // of a lane's four: its place in `lines`, and tokens from its first one on
#pragma unroll
  for (int i = 0; i < PASSES; ++i) {
    const int at = i * 32 + lane, row = at / FOURS, column = at % FOURS * 4;
    from[i] = row * PITCH + column;
    tokens[i] = row < 8 && output0 + column < od ? nt - token0 - row : 0;
    to[i] = out + static_cast<long long>(token0 + row) * od + output0 + column;
  }
  const bool vectors = od % 4 == 0 && reinterpret_cast<std::uintptr_t>(out) % 16 == 0;
#pragma unroll
  for (int token = 0; token < T::WN; token += 8) {
#pragma unroll
    for (int ni = 0; ni < T::WM / 8; ++ni) {
      const float* const pair = &warp.sum[token / 16][ni][token / 8 % 2 * 2];
      *reinterpret_cast<float2*>(lines + lane / 4 * PITCH + ni * 8 + lane % 4 * 2) =
          make_float2(pair[0], pair[1]);
    }
    __syncwarp();  // eight rows are complete
    if (vectors) {
#pragma unroll
      for (int i = 0; i < PASSES; ++i) {
        if (token < tokens[i]) {
          *reinterpret_cast<float4*>(to[i]) = *reinterpret_cast<const float4*>(lines + from[i]);
        }
        to[i] += 8 * static_cast<long long>(od);
      }
    } else {
#pragma unroll 1
      for (int i = lane; i < 8 * T::WM; i += 32) {
        const int t = token0 + token + i / T::WM, r = output0 + i % T::WM;
        if (t < nt && r < od) out[static_cast<long long>(t) * od + r] = lines[i / T::WM * PITCH + i % T::WM];
      }
    }
    __syncwarp();  // and have been read
  }
}
// ANCHOR_END: gemm_mma_tma_lines

#if defined(__CUDACC__)
/// The thread's number, read where this stands.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// ANCHOR: gemm_mma_stream
/// A warp whose fragments come one after the other, so that no instruction waits for many loads at once: one set of the
/// tokens', each replaced behind its last product, and a ring of the outputs'. A chunk is 16 outputs (the last may be 8)
/// and 16 elements of k; chunk j of a step is multiplied while chunk j + RING - 1 is loaded, from the next step at its end.
template <class T>
struct MmaStream : MmaSums<T> {
  using MmaSums<T>::MI, MmaSums<T>::NI, MmaSums<T>::token, MmaSums<T>::output, MmaSums<T>::sum;
  static constexpr int CHUNKS = (T::WM + 15) / 16, ALL = T::K16 * CHUNKS;
  static constexpr int RING = CHUNKS == 3 || CHUNKS == 4 ? 4 : 2;
  static constexpr int TURN = ALL - RING + 1;  ///< the first chunk behind which a load is of the next step
  static_assert(ALL % RING == 0 && RING < CHUNKS + 2, "at TURN, all of the tokens' fragments are loaded");
  std::uint32_t a_at, b_at;  // of this lane's rows in a stage, bytes
  std::uint32_t a[MI][4], b[RING][4];

  __device__ __forceinline__ MmaStream(int warp, int lane)
      : MmaSums<T>(warp),
        a_at(static_cast<std::uint32_t>(swizzled<T>(token + lane % 16, lane / 16))),
        b_at(T::ACTS_BYTES +
             static_cast<std::uint32_t>(swizzled<T>(output + lane / 16 * 8 + lane % 8, lane / 8 % 2))) {}

  /// @param stage its address, a multiple of 1024
  __device__ __forceinline__ void load_a(int mi, std::uint32_t stage, int k16) {
    ldmatrix_at(a[mi], ((stage + a_at) ^ k16 << 5) + mi * 16 * T::ROW_BYTES);
  }
  __device__ __forceinline__ void load_b(int j, std::uint32_t stage) {
    const int c = j % CHUNKS;
    const std::uint32_t at = ((stage + b_at) ^ j / CHUNKS << 5) + c * 16 * T::ROW_BYTES;
    std::uint32_t(&to)[4] = b[j % RING];
    if (2 * c + 1 < NI) {
      ldmatrix_at(to, at);
    } else {
      std::uint32_t two[2];
      ldmatrix_at(two, at);
      to[0] = two[0], to[1] = two[1];
    }
  }
  /// What is loaded before the first step.
  __device__ __forceinline__ void begin(std::uint32_t stage) {
#pragma unroll
    for (int mi = 0; mi < MI; ++mi) load_a(mi, stage, 0);
#pragma unroll
    for (int j = 0; j < RING - 1; ++j) load_b(j, stage);
  }
  /// A step. @param stage its address
  /// @param turn waits for the next stage and returns its address; fragments of it are loaded thereafter
  /// @param done gives the stage back, and takes a word of what was read of it last
  template <class Turn, class Done>
  __device__ __forceinline__ void step(std::uint32_t stage, const Turn& turn, const Done& done) {
    std::uint32_t next = stage;
#pragma unroll
    for (int j = 0; j < ALL; ++j) {
      if (j == TURN) next = turn();
      load_b((j + RING - 1) % ALL, j < TURN ? stage : next);
      const int c = j % CHUNKS, k16 = j / CHUNKS;
      const bool last = c == CHUNKS - 1;
#pragma unroll
      for (int m = 0; m < MI; ++m) {
        const int mi = last || j % 2 == 0 ? m : MI - 1 - m;  // there and back, but for what is replaced
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int half = (m + n) % 2, ni = 2 * c + half;
          if (ni >= NI) continue;
          const std::uint32_t pair[2] = {b[j % RING][2 * half], b[j % RING][2 * half + 1]};
          mma_m16n8k16_f16(sum[mi][ni], a[mi], pair);
        }
        if (j == TURN && m == 0) done(b[(ALL - 1) % RING][0]);
        if (last) load_a(mi, k16 + 1 < T::K16 ? stage : next, (k16 + 1) % T::K16);
      }
    }
  }
};
// ANCHOR_END: gemm_mma_stream
#endif

// ANCHOR: gemm_f16_mma_tma
template <class T>
__global__ void __launch_bounds__(T::THREADS + 128, 1)
    gemm_f16_mma_tma(const __grid_constant__ TensorMap weights_map,
                     const __grid_constant__ TensorMap acts_map, float* out, GemmEpilogue epilogue, int nt,
                     int od, MmaUnits tiles, MmaShares shares, MmaWorkspace workspace) {
#if defined(__CUDACC__)
  constexpr int STAGES = T::STAGES, C = T::CLUSTER,
                SUMS = T::WN / 16 * (T::WM / 8);  // SUMS: float4 of a thread
  static_assert(C == 1 || C == 2, "acts come in halves");
  static_assert(T::KS == 64, "a row of a stage is as wide as the copy engine's swizzle");
  // 1. The stages, and two barriers for each: `full` when the copy engine has brought all bytes, `empty` when all warps
  //    that read it are done. In a cluster, acts come in halves that each block fetches for both, so that a third one says
  //    that the stage is free in the other block.
  __shared__ std::uint64_t full[STAGES], empty[STAGES], vacant[STAGES];
  unsigned char* stages = dynamic_shared<unsigned char>();
  stages += (1024 - shared_address(stages) % 1024) % 1024;  // [STAGES][TN + TM][64] halves
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, block = static_cast<int>(blockIdx.x);
  const int rank = block % C, cluster = block / C, clusters = static_cast<int>(gridDim.x) / C;
  if (thread == 0) {
    prefetch_tensor_map(weights_map);
    prefetch_tensor_map(acts_map);
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], T::THREADS);
      mbarrier_init(&vacant[s], 1);
    }
    mbarrier_init_fence();
  }
  if constexpr (C > 1) {
    cluster_barrier();  // the barriers of both blocks are ready
  } else {
    __syncthreads();
  }
  allow_next_kernel();

  MmaPieces piece(shares, cluster, clusters);
  int stage = 0;
  if (thread >= T::THREADS) {
    // 2. One thread asks for everything, as far ahead as there are stages. What hangs over a matrix becomes zeros.
    if constexpr (T::WARPS == 8) registers_decrease<40>();
    if (thread != T::THREADS) return;
    const auto weights = [&](const MmaUnit& unit, int step, int at) {
      mbarrier_arrive_expect_bytes(&full[at], T::STAGE_BYTES);
      tensor_copy_2d(stages + at * T::STAGE_BYTES + T::ACTS_BYTES, weights_map, unit.output + rank * T::TM,
                     step * T::KS, &full[at]);
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
        unsigned char* const acts = stages + stage * T::STAGE_BYTES;
        if constexpr (C > 1) {
          mbarrier_arrive_at(shared_address_in(1 - rank, &vacant[stage]));
          mbarrier_wait(&vacant[stage], parity ^ 1);
          tensor_copy_2d_multicast(acts + rank * (T::ACTS_BYTES / C), acts_map,
                                   unit.token + rank * (T::TN / C), step * T::KS, &full[stage], 3);
        } else {
          tensor_copy_2d(acts, acts_map, unit.token, step * T::KS, &full[stage]);
        }
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    if constexpr (C > 1) cluster_barrier();
    return;
  }
  // 3. The others multiply. No warp waits for another: those that share a tensor core drift apart, and one loads fragments
  //    while the other multiplies.
  if constexpr (T::WARPS == 8) registers_increase<232>();
  wait_for_previous_kernel();
  MmaStream<T> warp(thread / 32, lane);
  const std::uint32_t stages_at = shared_address(stages);
  unsigned parity = 0;
  int left = piece.all_steps();
  if (left > 0) {
    mbarrier_wait(&full[0], parity);
    warp.begin(stages_at);
  }
  while (piece.next()) {
    warp.clear();
    for (int step = piece.step; step < piece.end; ++step) {
      --left;
      std::uint64_t* const read = &empty[stage];
      warp.step(
          stages_at + stage * T::STAGE_BYTES,
          [&] {
            if (++stage == STAGES) {
              stage = 0;
              parity ^= 1;
            }
            // The next step may be another piece's. Behind the very last, what is loaded is not used.
            if (left > 0) mbarrier_wait(&full[stage], parity);
            return stages_at + stage * T::STAGE_BYTES;
          },
          [&](std::uint32_t word) { mbarrier_arrive_after(read, word); });
    }
    // What follows needs numbers that are worked out here, and not kept in registers through the loop.
    const int self = thread_again(), w = self / 32, at = self % 32;
    warp.place(w);
    float4* const sums = reinterpret_cast<float4*>(workspace.sums) + self;
    unsigned* const flags = workspace.flags + w;  // one a warp: its sums go to the same warp of another block
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
      if (at == 0) atomicExch(flags + block * kMmaFlags, 1u);
      continue;
    }
    // 5. A tile's last piece: the others are added from back to front, in the same order in every run.
    for (int other = cluster, first = piece.tile * shares.steps, step = first + piece.step; step > first;) {
      step = MmaPieces::first_step(shares, --other);
      if (at == 0) {
        while (atomicCAS(flags + (other * C + rank) * kMmaFlags, 1u, 0u) != 1u) {
        }
      }
      __syncwarp();  // that block's warp has written
      __threadfence();
      const float4* const from = sums + static_cast<long long>(other * C + rank) * SUMS * T::THREADS;
#pragma unroll
      for (int i = 0; i < SUMS; ++i) {
        float(&v)[4] = warp.sum[i / (T::WM / 8)][i % (T::WM / 8)];
        const float4 add = __ldcg(from + i * T::THREADS);
        v[0] += add.x, v[1] += add.y, v[2] += add.z, v[3] += add.w;
      }
    }
    MmaUnit unit = mma_unit<T>(tiles, piece.tile, shares.steps);
    unit.output += rank * T::TM;
    warp.finish(unit, at, epilogue, nt, od);
    if constexpr (MmaLines<T>::USED) {
      float* const lines = reinterpret_cast<float*>(stages + T::SHARED_BYTES + w * MmaLines<T>::BYTES);
      store_lines(warp, lines, unit, at, out, nt, od);
    } else {
      warp.store(unit, at, out, nt, od);
    }
  }
  if constexpr (C > 1) cluster_barrier();  // no copy into a block, and no arrival, after it has ended
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
/// @param cut tiles, or pairs of them in clusters, that are divided along k; 0 without a workspace
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
  const int clusters = multiprocessor_count() / T::CLUSTER;
  const long long steps = static_cast<long long>(cut) * tiles.steps;
  if (steps > std::numeric_limits<int>::max() / 2) {
    return Status::error("gemm_f16_mma_tma: too many tiles to cut");
  }
  const int used = cut == 0 ? std::min(tiles.count(), clusters)
                            : static_cast<int>(std::clamp<long long>(steps / kFewestCutSteps, 1, clusters));
  const MmaShares shares{tiles.count(), cut, tiles.steps, static_cast<int>(steps / used),
                         static_cast<int>(steps % used)};
  const TensorMapOptions swizzled_128{TensorElement::f16, TensorSwizzle::bytes_128, true};
  TensorMap weights_map, acts_map;
  const auto size = [](long long n) { return static_cast<std::uint64_t>(n); };
  if (Status ok = make_tensor_map(weights_map, weights, size(s.od), size(s.id), T::TM, T::KS, swizzled_128);
      !ok.ok()) {
    return ok;
  }
  if (Status ok =
          make_tensor_map(acts_map, acts, size(s.nt), size(s.id), T::TN / T::CLUSTER, T::KS, swizzled_128);
      !ok.ok()) {
    return ok;
  }
  LaunchOptions options;
  options.programmatic = programmatic;
  options.cluster_blocks = T::CLUSTER;
  return launch(options, gemm_f16_mma_tma<T>, dim3(static_cast<unsigned>(used * T::CLUSTER)),
                dim3(T::THREADS + 128), T::SHARED_BYTES + 1024 + T::WARPS * MmaLines<T>::BYTES, stream,
                weights_map, acts_map, out, epilogue, static_cast<int>(s.nt), static_cast<int>(s.od), tiles,
                shares, workspace);
}

// ANCHOR: gemm_mma_tma_plan
/// Large tiles of two widths: one may fill the last round of multiprocessors where the other leaves it half empty.
using MmaTmaTiles =
    std::tuple<MmaTile<256, 160, 64, 3, 64, 80, 1, true, 2>, MmaTile<256, 144, 64, 4, 64, 72, 1>,
               MmaTile<256, 128, 64, 4, 64, 64, 1, true, 2>, MmaTile<128, 112, 64, 6, 32, 56, 1>,
               MmaTile<128, 64, 64, 8, 32, 32, 1>, MmaTile<64, 64, 64, 8, 32, 32, 1>>;

namespace detail {

/// What a tile costs, in clocks of a multiprocessor, fitted to measurements on an H200: a step of k, a whole tile besides its
/// steps, what comes once a launch, and what a launch with cut tiles costs beyond that.
struct MmaTmaCost {
  double step, tile, launch, cut;
};
inline constexpr MmaTmaCost kMmaTmaCosts[] = {{2060, 10910, 890, 38000}, {1890, 9240, 2570, 31600},
                                              {1680, 10240, 910, 33550}, {830, 3530, 4160, 15830},
                                              {600, 2100, 4050, 11020},  {410, 1110, 4580, 6250}};

template <class T>
void consider(MmaTmaPlan& best, double& least, int tile, const MmaTmaCost& cost, Shape s, int sms,
              bool may_cut) {
  constexpr int OUTPUTS = T::TM * T::CLUSTER;
  const long long tiles = (s.nt + T::TN - 1) / T::TN * ((s.od + OUTPUTS - 1) / OUTPUTS);
  const int clusters = sms / T::CLUSTER;
  const double steps = static_cast<double>((s.id + T::KS - 1) / T::KS);
  // Cut: nothing, what a last round would not fill, or that and a round more, so that a tile has two pieces at most.
  const long long over = tiles % clusters,
                  cuts[] = {0, over, over > 0 && tiles > clusters ? over + clusters : 0};
  for (const long long cut : cuts) {
    if (cut > 0 && (!may_cut || cut * steps < kFewestCutSteps * clusters)) continue;
    const double whole = static_cast<double>((tiles - cut + clusters - 1) / clusters);
    double clocks = cost.launch + whole * (steps * cost.step + cost.tile);
    if (cut > 0) clocks += static_cast<double>(cut) * steps / clusters * cost.step + cost.cut;
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
