// RUNG      mmvq_tiles: weights in tiles, multiplied by tensor cores, copied by each warp into a ring of its own.
// PREV      mmvq_pf: copies of 16 bytes that straddle blocks of 18; and dp4a, as one token seems too few for a matrix
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T, nt 1..8; a bias or a residual added, or silu(gate) * up
// LAYOUT    weights in tiles (tiles.cuh), acts int8 planes (tile_acts.cuh), out row-major f32
// MAP       grid(blocks that fit at once) block(32 W): block -> neighbouring sixteens of rows, one after the other;
//           warp -> every Wth tile of them; lane 4g+t -> words t and t+4 of rows g and g+8
// NEEDS     id % 32 == 0 (256 for types with blocks of 256), nt 1..8, sm_80: checked by the launcher
// TRAFFIC   weights od*id*bpe B (od up to a multiple of 16, id of 128 or 256), acts 1.25*NT*id B, out 4*nt*od B
// WORK      2*nt*od*id int8_op, of which the tensor cores do 8/nt times as many
// LOOK FOR  SASS: LDGSTS.E.BYPASS.128, IMMA.16832.S8.S8 (IMMA.16816 for scales of 16) on RZ; no LDG.128 in the loop
// EXPECT    95 % of the read roof for hundreds of megabytes; a launch costs more than 1 us beside them. With eight
//           tokens the scaling of 16 results a lane is the limit for types of few bits
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/04-mmvq/mmvq.cu -o mmvq
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/device/cp_async.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/mmvq/mmvq_tiles_formats.cuh"
#include "kernels/mmvq/tile_acts.cuh"

namespace ladder {

inline constexpr int kMostMmvqParts = 3;  ///< matrices of one launch: Q, K and V

/// One of the matrices that are multiplied with the same activations.
struct MmvqPart {
  const void* tiles;  ///< [od][id] in tiles, at a multiple of 16 bytes
  float* out;         ///< [nt][od]
  int od;
  const float* bias = nullptr;      ///< [od], added; or null
  const float* residual = nullptr;  ///< [nt][od], added, may be `out` itself; or null
};

/// What the matrices are multiplied with: planes of int8, or the f32 row of one token, of which every block makes planes
/// for itself, the bits of tile_acts::launch_quantize.
struct MmvqActs {
  const void* planes = nullptr;  ///< tile_acts::launch_quantize's, nt 1..8
  const float* row = nullptr;    ///< [id], nt 1
  const float* norm = nullptr;   ///< [id] weights of a root-mean-square normalisation of the row; or null
  float epsilon = 0.0f;
};

/// Weights that a later launch begins with.
struct MmvqNext {
  const void* from = nullptr;
  std::size_t bytes = 0;
};

/// How a launch stands among its neighbours in the stream.
struct MmvqLaunch {
  bool programmatic =
      false;  ///< may start before the kernel before it has ended, and waits for that one's results
  MmvqNext next[kMostMmvqParts] =
      {};  ///< brought to L2 as soon as this launch's own weights are all on their way
};

/// Shapes of mmvq_tiles.
inline Status mmvq_tiles_supported(WeightType type, Shape s) {
  if (!tiles::has_tiles(type)) {
    return Status::error(std::string("mmvq_tiles: ") + info(type).name +
                         " weights have no blocks; types with blocks of 32 or 256 have tiles");
  }
  if (Status ok = whole_blocks(type, s); !ok.ok()) return ok;
  if (s.nt > tile_acts::kMostTokens) {
    return Status::error("nt must be 1 to " + std::to_string(tile_acts::kMostTokens) + ", not " +
                         std::to_string(s.nt));
  }
  return {};
}

namespace tiles {

/// The parts of a launch and how its blocks divide their rows.
struct Parts {
  MmvqPart part[kMostMmvqParts];
  int first[kMostMmvqParts +
            1];           ///< sixteen rows that part p begins with, counted over all parts; then their number
  unsigned char* planes;  ///< with a gate: where results go as int8 planes instead of `out`, or null
  int unit;               ///< sixteens that stay together in a block: two where results go to planes
  const unsigned char* next[kMostMmvqParts];  ///< what a later launch begins with
  unsigned next_lines[kMostMmvqParts];        ///< of 128 bytes
  /// The sixteen that is number n of this block's: its units are every gridDim.x-th one, so that all blocks together
  /// go through the matrix from its beginning to its end.
  __device__ __forceinline__ int sixteen(int n) const {
    const int u = unit == 2 ? n / 2 : n;
    return (static_cast<int>(blockIdx.x) + u * static_cast<int>(gridDim.x)) * unit + (unit == 2 ? n % 2 : 0);
  }
};

__device__ __forceinline__ int part_of(const Parts& parts, int rows16) {
  return rows16 < parts.first[1] ? 0 : rows16 < parts.first[2] ? 1 : 2;
}

/// What a block has summed up: for so many turns, its sums side by side.
template <int NT, int W>
struct Partial {
  static constexpr int TURNS = NT == 1 ? 8 : 2, OUTS = kRows * NT;
  float v[TURNS][W][OUTS];
};

// ANCHOR: mmvq_tiles_finish
/// A thread an output of `turns` turns from turn `begun` on: its sums in order, then what is added to them.
/// @param sums of each output: steps of a row, W at most
template <int NT, int W, bool SWIGLU>
__device__ __forceinline__ void finish(const Parts& parts, int begun, int turns, int nt, int sums,
                                       const Partial<NT, W>& partial) {
  constexpr int OUTS = Partial<NT, W>::OUTS;
  for (int o = static_cast<int>(threadIdx.x); o < (SWIGLU ? turns / 2 : turns) * OUTS; o += 32 * W) {
    const int n = o / OUTS, i = o % OUTS, token = i % NT;
    const int at = parts.sixteen((SWIGLU ? begun / 2 : begun) + n);
    const int p = SWIGLU ? 0 : part_of(parts, at);
    const MmvqPart& part = parts.part[p];
    const int r = (at - parts.first[p]) * kRows + i / NT;
    if (r >= part.od || token >= nt) continue;
    const auto sum_of = [&](int turn, const MmvqPart& m) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < W; ++w) {
        if (w < sums) sum += partial.v[turn][w][i];
      }
      return m.bias != nullptr ? sum + m.bias[r] : sum;
    };
    const long long to = static_cast<long long>(token) * part.od + r;
    if constexpr (SWIGLU) {
      const int turn =
          parts.unit == 2 ? n / 2 * 4 + n % 2 : n * 2;  // the other matrix's is a unit further on
      const float gate = sum_of(turn, part), up = sum_of(turn + parts.unit, parts.part[1]);
      const float out = gate / (1.0f + expf(-gate)) * up;
      if (NT == 1 && parts.planes != nullptr) {
        tile_acts::store_lane(out, r / 32, parts.planes,
                              part.od);  // two sixteens are a warp's lanes, and a block
      } else {
        part.out[to] = out;
      }
    } else {
      const float sum = sum_of(n, part);
      part.out[to] = part.residual != nullptr ? sum + part.residual[to] : sum;
    }
  }
}
// ANCHOR_END: mmvq_tiles_finish

/// N times 512 bytes, 16 a lane.
template <int N>
__device__ __forceinline__ void copy_vectors(unsigned char* shared, const unsigned char* global) {
  if constexpr (N > 0) {
    copy_vectors<N - 1>(shared, global);
    cp_async_cg_at<512 * (N - 1)>(shared, global);
  }
}

/// Blocks that must fit on a multiprocessor, so that the compiler keeps to their registers: with one token those of this
/// launch and as many of the next one. The products of eight tokens take more of them.
template <class Format, int NT, int W>
__host__ __device__ constexpr int blocks_per_sm() {
  return (NT > 1 ? 16 : Format::kResidentWarps) / W;
}

// ANCHOR: mmvq_tiles_loader
/// The addresses of a warp's tiles. Of the tiles of a block, row of tiles after row of tiles, warp w takes every Wth from
/// the w-th on, of whatever row it is: so no warp has more to do than another.
template <int BYTES, bool SWIGLU>
struct Loader {
  const unsigned char* from;   // the lane's 16 bytes of the next tile
  const unsigned char* other;  // with a gate: where the next run of tiles begins, after this one
  long long jump;              // bytes from the end of a run to this block's next one in the same matrix
  int run;                     // tiles that lie side by side
  int left;                    // tiles that this warp still asks for
  int ahead;                   // tiles from the next one to the end of its run
  int at, part;                // the run's sixteen; the matrix that has it

  __device__ __forceinline__ void begin(const Parts& parts, int sixteen, int steps, int tiles, int lane) {
    run = parts.unit * steps;
    jump = static_cast<long long>(gridDim.x - 1) * run * BYTES;
    left = tiles;
    ahead = run;
    at = sixteen;
    part = SWIGLU ? 0 : part_of(parts, at);
    const long long to = static_cast<long long>(at - parts.first[part]) * steps * BYTES + 16 * lane;
    from = static_cast<const unsigned char*>(parts.part[part].tiles) + to;
    other = SWIGLU ? static_cast<const unsigned char*>(parts.part[1].tiles) + to : nullptr;
  }

  /// n tiles further on.
  __device__ __forceinline__ void advance(const Parts& parts, int n, int steps) {
    from += n * BYTES;
    ahead -= n;
    while (ahead <= 0 && left > 0) {
      // Over the end by -ahead tiles.
      if constexpr (SWIGLU) {
        const unsigned char* after = from + ahead * BYTES + jump;
        from = other - ahead * BYTES;
        other = after;
      } else {
        from += jump;
        at += static_cast<int>(gridDim.x);
        if (at >= parts.first[part + 1]) {
          part = part_of(parts, at);
          from = static_cast<const unsigned char*>(parts.part[part].tiles) +
                 static_cast<long long>(at - parts.first[part]) * steps * BYTES - ahead * BYTES +
                 threadIdx.x % 32 * 16;
        }
      }
      ahead += run;
    }
  }
};
// ANCHOR_END: mmvq_tiles_loader

// ANCHOR: mmvq_tiles
/// @tparam NT tokens of the activations' group: 1 or 8
/// @tparam W warps of a block
/// @tparam SWIGLU part 0 is the gate and part 1 what it lets through: out = silu(gate) * up
template <class Format, int NT, int W, bool SWIGLU>
__global__ void __launch_bounds__(32 * W, blocks_per_sm<Format, NT, W>())
    mmvq_tiles(Parts parts, MmvqActs x, int nt, int id, int steps, int staged) {
  constexpr int D = Format::kInFlight, COLS = LaneSums<NT>::COLS, TURNS = Partial<NT, W>::TURNS;
  constexpr int BYTES = tile_bytes<typename Format::Block>();
  constexpr int PAIRS = Tile<typename Format::Block>::kSteps / 2;  // of activations' blocks, in a tile
  __shared__ Partial<NT, W> partial;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int g = lane / 4, t = lane % 4;

  // 1. This block's sixteens of rows, a turn each; with SWIGLU two turns each, of the gate and of the other matrix. All
  //    blocks have as many, or one unit less.
  allow_next_kernel();
  const int rows16 = SWIGLU ? parts.first[1] : parts.first[kMostMmvqParts];
  const int grid = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int turns = (rows16 / parts.unit - block + grid - 1) / grid * parts.unit * (SWIGLU ? 2 : 1);

  // 2. D tiles on their way before anything else, into a ring of the warp's own in shared memory. Registers would do, but
  //    a warp can tell only a few of its loads apart (six scoreboards): waiting for the oldest, it would wait for more.
  //    Weights do not depend on the kernel before this one; activations do.
  unsigned char* const ring = dynamic_shared<unsigned char>() + warp * (D * BYTES);  // [D][BYTES]
  Loader<BYTES, SWIGLU> loader;
  loader.begin(parts, parts.sixteen(0), steps, turns * steps > warp ? (turns * steps - warp + W - 1) / W : 0,
               lane);
  loader.advance(parts, warp, steps);
  // Nothing is left to ask for: the memory's time until the next launch goes to what that one begins with.
  const auto ask_ahead = [&] {
    for (int n = 0; n < kMostMmvqParts; ++n) {
      for (unsigned l = blockIdx.x * (32 * W) + threadIdx.x; l < parts.next_lines[n];
           l += gridDim.x * (32 * W))
        prefetch_l2(parts.next[n] + 128ULL * l);
    }
  };
  if (loader.left == 0) ask_ahead();
  const bool has_tail = 16 * lane < BYTES % 512;
  const auto load_next = [&](unsigned char* to) {
    if (loader.left > 0) {
      copy_vectors<BYTES / 512>(to, loader.from);
      if (has_tail) cp_async_cg_at<BYTES / 512 * 512>(to, loader.from);
      if (--loader.left == 0) ask_ahead();
      loader.advance(parts, W, steps);
    }
    cp_async_commit_group();  // empty at the end, so that groups count tiles
  };
  for (int d = 0; d < D; ++d) load_next(ring + d * BYTES + 16 * lane);

  // 3. Activations: one wait for all of them. Planes that are too many for shared memory are read where they are.
  unsigned char* const planes = dynamic_shared<unsigned char>() + W * D * BYTES;
  const unsigned char* acts = static_cast<const unsigned char*>(x.planes);
  if (NT == 1 && x.row != nullptr) {
    tile_acts::RowQuantizer<W> row;
    row.load_weights(x.norm, id);
    wait_for_previous_kernel();
    row.store(x.row, x.norm, x.epsilon, id, planes, 0, 1, &partial.v[0][0][0]);
  } else {
    wait_for_previous_kernel();
    if (NT == 1 || staged != 0) {
      uint4* to = reinterpret_cast<uint4*>(planes);
      const uint4* from = reinterpret_cast<const uint4*>(acts);
      const int all = static_cast<int>(tile_acts::group_bytes(NT, id) / 16);
      for (int i0 = static_cast<int>(threadIdx.x); i0 < all; i0 += 4 * 32 * W) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (i0 + k * 32 * W < all) v[k] = from[i0 + k * 32 * W];
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (i0 + k * 32 * W < all) to[i0 + k * 32 * W] = v[k];
        }
      }
    }
  }
  if (NT == 1 || staged != 0) {
    __syncthreads();  // all activations are there, and what the quantizer needed of `partial` is free
    acts = planes;
  }
  const unsigned char* const codes = acts + (g % NT * 4 + t) * 16;
  const unsigned char* const scales =
      acts + tile_acts::scale_at(NT == 1 ? t : 0, NT == 1 ? 0 : 2 * t, NT, id);

  // 4. As a tile has come to registers, the one D further on takes its place, of whatever turn it is. Warps do not wait
  //    for each other but once in TURNS turns. A row's sums are told apart by step modulo W, whichever warp has them: so
  //    their order does not depend on how many rows a block has.
  unsigned char* stage = ring;
  int turn = 0, step = warp;  // of the warp's next tile
  while (step >= steps) step -= steps, ++turn;
  LaneSums<NT> sums;
  int begun = 0;
  do {
    const int until = min(begun + TURNS, turns);
    int sum_at = step;  // step modulo W
    while (turn < until) {
      cp_async_wait_group<D - 1>();  // the oldest of D groups is there
      __syncwarp();                  // for all lanes
      typename Format::template Raw<NT> raw;
      raw.template load<FromShared>(stage, lane);
      __syncwarp();  // all lanes have their shares
      load_next(stage + 16 * lane);
      stage = stage + BYTES == ring + D * BYTES ? ring : stage + BYTES;
      multiply_tile<Format, NT>(raw, codes + step * (PAIRS * NT * 64), scales + step * (PAIRS * NT * 16), t,
                                sums);
      step += W;
      if (step < steps) continue;
      // The warp's last tile of the turn.
      float(&to)[kRows * NT] = partial.v[turn - begun][sum_at];
#pragma unroll
      for (int row16 = 0; row16 < 2; ++row16) {
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
          const float sum = sums.total(row16, c);
          if (NT > 1 || t == 0) to[(g + 8 * row16) * NT + (NT == 1 ? 0 : 2 * t) + c] = sum;
        }
      }
      sums = {};
      while (step >= steps) step -= steps, ++turn;
      sum_at = step;
    }
    __syncthreads();  // all warps' sums are there
    finish<NT, W, SWIGLU>(parts, begun, until - begun, nt, min(steps, W), partial);
    begun = until;
    if (begun < turns) __syncthreads();  // and read before the next ones are written
  } while (begun < turns);
  if constexpr (SWIGLU && NT == 1) {
    if (parts.planes != nullptr && blockIdx.x + 1 == gridDim.x)
      tile_acts::store_padding(parts.planes, parts.part[0].od);
  }
}
// ANCHOR_END: mmvq_tiles

/// Bytes of the rings of W warps.
template <class Format, int W>
constexpr std::size_t ring_bytes() {
  return static_cast<std::size_t>(W) * Format::kInFlight * tile_bytes<typename Format::Block>();
}

inline constexpr int kFewWarps = 4;  ///< of a block, where the rings of more would not fit

/// Warps of a block, by the length of a row and the shared memory that a block may have: few where the rings of many
/// would not fit. It decides the order of additions, so it must not depend on nt.
template <class Format>
constexpr int warps(long long id, std::size_t limit) {
  constexpr int W = Format::kWarps;
  const bool fits =
      ring_bytes<Format, W>() + tile_acts::group_bytes(1, id) + sizeof(Partial<1, W>) <= limit &&
      ring_bytes<Format, W>() + sizeof(Partial<tile_acts::kMostTokens, W>) <= limit;
  return fits ? W : kFewWarps;
}

/// Most shared memory that the activations of eight tokens may take.
inline constexpr std::size_t kMostStagedBytes = 96 * 1024;

/// Whether the activations are copied to shared memory: always those of one token, those of eight if there is room.
template <class Format, int NT, int W>
constexpr bool stages(long long id, std::size_t limit) {
  const std::size_t planes = tile_acts::group_bytes(NT, id);
  return NT == 1 ||
         (planes <= kMostStagedBytes && ring_bytes<Format, W>() + planes + sizeof(Partial<NT, W>) <= limit);
}

template <class F>
Status with_tile_format(WeightType type, F&& f) {
  switch (type) {
    case WeightType::q4_0:
      return f(TileQ4_0{});
    case WeightType::q4_1:
      return f(TileQ4_1{});
    case WeightType::q5_0:
      return f(TileQ5_0{});
    case WeightType::q5_1:
      return f(TileQ5_1{});
    case WeightType::q8_0:
      return f(TileQ8_0{});
    case WeightType::q2_k:
      return f(TileQ2_K{});
    case WeightType::q3_k:
      return f(TileQ3_K{});
    case WeightType::q4_k:
      return f(TileQ4_K{});
    case WeightType::q5_k:
      return f(TileQ5_K{});
    case WeightType::q6_k:
      return f(TileQ6_K{});
    case WeightType::iq4_nl:
      return f(TileIQ4_NL{});
    case WeightType::iq4_xs:
      return f(TileIQ4_XS{});
    case WeightType::f32:
    case WeightType::f16:
    case WeightType::bf16:
      break;
  }
  return Status::error(std::string("mmvq_tiles: ") + info(type).name +
                       " weights have no blocks; types with blocks of 32 or 256 have tiles");
}

template <class Format, int NT, int W, bool SWIGLU>
Status launch_parts(Parts parts, const MmvqActs& acts, int nt, int id, Stream& stream,
                    const MmvqLaunch& how) {
  for (std::size_t n = 0; n < kMostMmvqParts; ++n) {
    parts.next[n] = static_cast<const unsigned char*>(how.next[n].from);
    parts.next_lines[n] = static_cast<unsigned>(how.next[n].bytes / 128);
  }
  parts.unit = parts.planes != nullptr ? 2 : 1;  // whole: od is then a multiple of 32
  const int row_steps = static_cast<int>(steps<typename Format::Block>(id));
  const int units = (SWIGLU ? parts.first[1] : parts.first[kMostMmvqParts]) / parts.unit;
  const int most = std::max(1, multiprocessor_count() * (NT > 1 ? 16 : Format::kWarpsPerSm) / W);
  LaunchOptions options;
  options.programmatic = how.programmatic;
  const std::size_t limit = shared_memory_limit();
  const bool staged = stages<Format, NT, W>(id, limit);
  const std::size_t shared = ring_bytes<Format, W>() + (staged ? tile_acts::group_bytes(NT, id) : 0);
  if (shared + sizeof(Partial<NT, W>) > limit) {
    return Status::error("mmvq_tiles: rows of " + std::to_string(id) +
                         " activations and the weights under way take " +
                         std::to_string(shared + sizeof(Partial<NT, W>)) +
                         " bytes of shared memory; a block of this device has " + std::to_string(limit));
  }
  return launch(options, mmvq_tiles<Format, NT, W, SWIGLU>,
                dim3(static_cast<unsigned>(std::min(units, most))), dim3(32 * W), shared, stream, parts, acts,
                nt, id, row_steps, staged ? 1 : 0);
}

template <class Format, bool SWIGLU>
Status launch_any(const Parts& parts, const MmvqActs& acts, int nt, int id, Stream& stream,
                  const MmvqLaunch& how) {
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  bool all_aligned = aligned(acts.planes) && aligned(acts.row) && aligned(acts.norm) && aligned(parts.planes);
  for (const MmvqPart& p : parts.part) all_aligned = all_aligned && aligned(p.tiles);
  if (!all_aligned) return Status::error("weights and activations must begin at a multiple of 16 bytes");
  if ((acts.planes != nullptr) == (acts.row != nullptr)) {
    return Status::error("mmvq_tiles: activations are either planes or a row of f32, one of them");
  }
  if (acts.row != nullptr && nt != 1) {
    return Status::error("mmvq_tiles: a row of f32 is one token's, and nt is " + std::to_string(nt) +
                         "; more tokens come as planes");
  }
  const auto go = [&]<int NT>() {
    return warps<Format>(id, shared_memory_limit()) == Format::kWarps
               ? launch_parts<Format, NT, Format::kWarps, SWIGLU>(parts, acts, nt, id, stream, how)
               : launch_parts<Format, NT, kFewWarps, SWIGLU>(parts, acts, nt, id, stream, how);
  };
  return nt == 1 ? go.template operator()<1>() : go.template operator()<tile_acts::kMostTokens>();
}

/// launch_mmvq_tiles for one format.
template <class Format>
Status launch_format(std::span<const MmvqPart> matrices, const MmvqActs& acts, int nt, int id, Stream& stream,
                     const MmvqLaunch& how) {
  if (matrices.empty() || matrices.size() > kMostMmvqParts) {
    return Status::error("mmvq_tiles: 1 to " + std::to_string(kMostMmvqParts) + " matrices at once, not " +
                         std::to_string(matrices.size()));
  }
  Parts parts{};
  for (std::size_t p = 0; p < kMostMmvqParts; ++p) {
    parts.first[p + 1] = parts.first[p];
    if (p >= matrices.size()) continue;
    const MmvqPart& m = matrices[p];
    if (Status ok = mmvq_tiles_supported(Format::Block::kType, {nt, m.od, id}); !ok.ok()) return ok;
    parts.part[p] = m;
    parts.first[p + 1] += static_cast<int>(row_tiles(m.od));
  }
  return launch_any<Format, false>(parts, acts, nt, id, stream, how);
}

/// launch_mmvq_tiles_swiglu for one format.
template <class Format>
Status launch_swiglu_format(const void* gate, const void* up, const MmvqActs& acts, float* out, void* planes,
                            Shape s, Stream& stream, const MmvqLaunch& how) {
  if (Status ok = mmvq_tiles_supported(Format::Block::kType, s); !ok.ok()) return ok;
  if ((out != nullptr) == (planes != nullptr)) {
    return Status::error("mmvq_tiles: with a gate, results go either to f32 rows or to planes, one of them");
  }
  if (planes != nullptr && (s.nt != 1 || s.od % kQ8ActsPerBlock != 0)) {
    return Status::error("mmvq_tiles: planes of results are one token's and whole blocks of " +
                         std::to_string(kQ8ActsPerBlock) + ", not nt " + std::to_string(s.nt) + " and od " +
                         std::to_string(s.od));
  }
  Parts parts{};
  const int od = static_cast<int>(s.od), rows16 = static_cast<int>(row_tiles(s.od));
  parts.part[0] = {gate, out, od};
  parts.part[1] = {up, out, od};
  parts.first[1] = rows16;
  parts.first[2] = parts.first[3] = 2 * rows16;
  parts.planes = static_cast<unsigned char*>(planes);
  return launch_any<Format, true>(parts, acts, static_cast<int>(s.nt), static_cast<int>(s.id), stream, how);
}

}  // namespace tiles

/// out[nt][od] = acts[nt][id] . weights[od][id]^T for one to three matrices of a type, with bias and residual as the
/// parts say. A token's result is the same bits for every nt, whatever other parts there are, and whether it comes as
/// planes or as a row. Does not synchronise.
inline Status launch_mmvq_tiles(WeightType type, std::span<const MmvqPart> matrices, const MmvqActs& acts,
                                int nt, int id, Stream& stream, const MmvqLaunch& how = {}) {
  return tiles::with_tile_format(type, [&](auto format) -> Status {
    return tiles::launch_format<decltype(format)>(matrices, acts, nt, id, stream, how);
  });
}

/// out[nt][od] = silu(acts . gate^T) * (acts . up^T), silu(z) = z / (1 + e^-z): both matrices [od][id] in tiles of one
/// type. Otherwise as the other.
/// @param out [nt][od], or null
/// @param planes where `out` is null: tile_acts::bytes(1, od), the result as int8 planes, nt 1 and od % 32 == 0
inline Status launch_mmvq_tiles_swiglu(WeightType type, const void* gate, const void* up,
                                       const MmvqActs& acts, float* out, void* planes, Shape s,
                                       Stream& stream, const MmvqLaunch& how = {}) {
  return tiles::with_tile_format(type, [&](auto format) -> Status {
    return tiles::launch_swiglu_format<decltype(format)>(gate, up, acts, out, planes, s, stream, how);
  });
}

/// Upper bound on the f32 roundings that a term meets in mmvq_tiles: with its block (scales, sums of up to eight
/// sub-blocks, the block's scale), along its warp, over the warps.
inline double mmvq_tiles_roundings(WeightType type, long long id) {
  const double span = info(type).block_elems == 32 ? 128 : 256,
               row_steps = static_cast<double>((id + 255) / 256 * 256) / span;
  const double most_warps = 16, fewest_warps = 4;
  const double a_step =
      info(type).block_elems == 32 ? 4 * 2 : 2;  // additions to the warp's sum, with their products
  return 2 + 8 * 2 + a_step * (row_steps / fewest_warps + 4) + most_warps + 2;
}

}  // namespace ladder
