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
            1];  ///< sixteen rows that part p begins with, counted over all parts; then their number
};

__device__ __forceinline__ int part_of(const Parts& parts, int rows16) {
  return rows16 < parts.first[1] ? 0 : rows16 < parts.first[2] ? 1 : 2;
}

/// What a block has summed up: for so many turns, the warps' sums side by side.
template <int NT, int W>
struct Partial {
  static constexpr int TURNS = NT == 1 ? 8 : 2, OUTS = kRows * NT;
  float v[TURNS][W][OUTS];
};

// ANCHOR: mmvq_tiles_finish
/// A thread an output of the last `turns` turns, which began at sixteen `rows16`: the warps' sums in order, then what is
/// added to them.
template <int NT, int W, bool SWIGLU>
__device__ __forceinline__ void finish(const Parts& parts, int rows16, int turns, int nt,
                                       const Partial<NT, W>& partial) {
  constexpr int OUTS = Partial<NT, W>::OUTS;
  for (int o = static_cast<int>(threadIdx.x); o < (SWIGLU ? turns / 2 : turns) * OUTS; o += 32 * W) {
    const int turn = o / OUTS, i = o % OUTS, token = i % NT;
    const int p = SWIGLU ? 0 : part_of(parts, rows16 + turn);
    const MmvqPart& part = parts.part[p];
    const int r = (rows16 + turn - parts.first[p]) * kRows + i / NT;
    if (r >= part.od || token >= nt) continue;
    const auto sum_of = [&](int n, const MmvqPart& m) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < W; ++w) sum += partial.v[n][w][i];
      return m.bias != nullptr ? sum + m.bias[r] : sum;
    };
    const long long to = static_cast<long long>(token) * part.od + r;
    if constexpr (SWIGLU) {
      const float gate = sum_of(2 * turn, part), up = sum_of(2 * turn + 1, parts.part[1]);
      part.out[to] = gate / (1.0f + expf(-gate)) * up;
    } else {
      const float sum = sum_of(turn, part);
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

/// Blocks that must fit on a multiprocessor, so that the compiler keeps to their registers. The products of eight tokens
/// take more of them.
template <class Format, int NT, int W>
__host__ __device__ constexpr int blocks_per_sm() {
  return (NT > 1 ? 16 : Format::kWarpsPerSm) / W;
}

// ANCHOR: mmvq_tiles
/// @tparam NT tokens of the activations' group: 1 or 8
/// @tparam W warps of a block
/// @tparam SWIGLU part 0 is the gate and part 1 what it lets through: out = silu(gate) * up
/// @param share sixteens of rows of a block
template <class Format, int NT, int W, bool SWIGLU>
__global__ void __launch_bounds__(32 * W, blocks_per_sm<Format, NT, W>())
    mmvq_tiles(Parts parts, const unsigned char* acts, int nt, int id, int steps, int share, int staged) {
  constexpr int D = Format::kInFlight, COLS = LaneSums<NT>::COLS, TURNS = Partial<NT, W>::TURNS;
  constexpr int BYTES = tile_bytes<typename Format::Block>(), STRIDE = W * BYTES;
  constexpr int PAIRS = Tile<typename Format::Block>::kSteps / 2;  // of activations' blocks, in a tile
  __shared__ Partial<NT, W> partial;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int g = lane / 4, t = lane % 4;

  // 1. This block's sixteens of rows, a turn each; with SWIGLU two turns each, of the gate and of the other matrix.
  const int rows16 = SWIGLU ? parts.first[1] : parts.first[kMostMmvqParts];
  const int first = static_cast<int>(blockIdx.x) * share;
  const int turns = (min(first + share, rows16) - first) * (SWIGLU ? 2 : 1);
  const int mine = warp < steps ? (steps - warp + W - 1) / W : 0;  // tiles of a turn that are this warp's
  const auto row_of = [&](int p, int at) {
    return static_cast<const unsigned char*>(parts.part[p].tiles) +
           (static_cast<long long>(at - (SWIGLU ? 0 : parts.first[p])) * steps + warp) * BYTES;
  };

  // 2. D tiles on their way before anything else, into a ring of the warp's own in shared memory. Registers would do, but
  //    a warp can tell only a few of its loads apart (six scoreboards): waiting for the oldest, it would wait for more.
  //    Weights do not depend on the kernel before this one; activations do.
  allow_next_kernel();
  unsigned char* const ring = dynamic_shared<unsigned char>() + warp * (D * BYTES);  // [D][BYTES]
  int load_left = turns * mine, load_turn = 0, load_step = 0;                        // step: of the warp's
  const unsigned char* load_row = row_of(SWIGLU ? 0 : part_of(parts, first), first) + 16 * lane;
  const unsigned char* load_from = load_row;
  const unsigned char* other_row = SWIGLU ? row_of(1, first) + 16 * lane : nullptr;
  const bool has_tail = 16 * lane < BYTES % 512;
  const auto load_next = [&](unsigned char* to) {
    if (load_left > 0) {
      --load_left;
      copy_vectors<BYTES / 512>(to, load_from);
      if (has_tail) cp_async_cg_at<BYTES / 512 * 512>(to, load_from);
      load_from += STRIDE;
      if (++load_step == mine) {
        // The next turn: sixteens of a part follow each other.
        load_step = 0;
        ++load_turn;
        if constexpr (SWIGLU) {
          const unsigned char* after = load_row + static_cast<long long>(steps) * BYTES;
          load_row = other_row;
          other_row = after;
        } else {
          load_row += static_cast<long long>(steps) * BYTES;
          const int at = first + load_turn;
          if (at == parts.first[1] || at == parts.first[2])
            load_row = row_of(part_of(parts, at), at) + 16 * lane;
        }
        load_from = load_row;
      }
    }
    cp_async_commit_group();  // empty at the end, so that groups count tiles
  };
  for (int d = 0; d < D; ++d) load_next(ring + d * BYTES + 16 * lane);
  wait_for_previous_kernel();

  // 3. Activations: one wait for all of them. Too many for shared memory, they are read where they are.
  if (NT == 1 || staged != 0) {
    uint4* to = reinterpret_cast<uint4*>(dynamic_shared<unsigned char>() + W * D * BYTES);
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
    __syncthreads();  // all activations are there
    acts = reinterpret_cast<const unsigned char*>(to);
  }
  const unsigned char* const codes = acts + (g % NT * 4 + t) * 16 + warp * (PAIRS * NT * 64);
  const unsigned char* const scales =
      acts + tile_acts::scale_at(NT == 1 ? t : 0, NT == 1 ? 0 : 2 * t, NT, id) + warp * (PAIRS * NT * 16);

  // 4. As a tile has come to registers, the one D further on takes its place, of whatever turn it is. Warps do not wait
  //    for each other but once in TURNS turns.
  LaneSums<NT> sums;
  int turn = 0, step = 0;
  const auto end_turn = [&] {
    float(&to)[kRows * NT] = partial.v[turn % TURNS][warp];
#pragma unroll
    for (int row16 = 0; row16 < 2; ++row16) {
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        const float sum = sums.total(row16, c);
        if (NT > 1 || t == 0) to[(g + 8 * row16) * NT + (NT == 1 ? 0 : 2 * t) + c] = sum;
      }
    }
    sums = {};
    step = 0;
    ++turn;
    if (turn % TURNS != 0 && turn != turns) return;
    __syncthreads();  // all warps' sums are there
    const int begun = (turn - 1) / TURNS * TURNS;
    finish<NT, W, SWIGLU>(parts, first + (SWIGLU ? begun / 2 : begun), turn - begun, nt, partial);
    __syncthreads();  // and read before the next ones are written
  };
  if (mine == 0) {
    // A row has fewer tiles than the block has warps.
    // NOLINTNEXTLINE(bugprone-infinite-loop): end_turn counts turns
    while (turn < turns) end_turn();
    return;
  }
  unsigned char* stage = ring;
  while (turn < turns) {           // NOLINT(bugprone-infinite-loop): end_turn counts turns
    cp_async_wait_group<D - 1>();  // the oldest of D groups is there
    __syncwarp();                  // for all lanes
    typename Format::template Raw<NT> raw;
    raw.template load<FromShared>(stage, lane);
    __syncwarp();  // all lanes have their shares
    load_next(stage + 16 * lane);
    stage = stage + BYTES == ring + D * BYTES ? ring : stage + BYTES;
    multiply_tile<Format, NT>(raw, codes + static_cast<long long>(step) * (W * PAIRS * NT * 64),
                              scales + static_cast<long long>(step) * (W * PAIRS * NT * 16), t, sums);
    if (++step == mine) end_turn();
  }
}
// ANCHOR_END: mmvq_tiles

/// Bytes of the rings of W warps.
template <class Format, int W>
constexpr std::size_t ring_bytes() {
  return static_cast<std::size_t>(W) * Format::kInFlight * tile_bytes<typename Format::Block>();
}

/// Warps of a block, by the length of a row and the shared memory that a block may have: never more than a row has
/// tiles, and few where the rings of many would not fit. It decides the order of additions, so it must not depend on nt.
template <class Format>
constexpr int warps(long long id, std::size_t limit) {
  if (id <= 3 * 32 * Tile<typename Format::Block>::kSteps) return 1;
  constexpr int W = Format::kWarps;
  const bool fits =
      ring_bytes<Format, W>() + tile_acts::group_bytes(1, id) + sizeof(Partial<1, W>) <= limit &&
      ring_bytes<Format, W>() + sizeof(Partial<tile_acts::kMostTokens, W>) <= limit;
  return id >= 2048 && fits ? W : 4;
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
Status launch_parts(const Parts& parts, const void* acts, int nt, int id, Stream& stream, bool programmatic,
                    int warps_per_sm) {
  const int row_steps = static_cast<int>(steps<typename Format::Block>(id));
  const int rows16 = SWIGLU ? parts.first[1] : parts.first[kMostMmvqParts];
  // As many blocks as fit at once, or a half, a third ... of the rows' sixteens, all with the same share.
  const int sms = multiprocessor_count();
  const int most = std::max(1, sms * warps_per_sm / W);
  const int share = (rows16 + most - 1) / most;
  const int blocks = (rows16 + share - 1) / share;
  LaunchOptions options;
  options.programmatic = programmatic;
  const std::size_t limit = shared_memory_limit();
  const bool staged = stages<Format, NT, W>(id, limit);
  const std::size_t shared = ring_bytes<Format, W>() + (staged ? tile_acts::group_bytes(NT, id) : 0);
  if (shared + sizeof(Partial<NT, W>) > limit) {
    return Status::error("mmvq_tiles: rows of " + std::to_string(id) +
                         " activations and the weights under way take " +
                         std::to_string(shared + sizeof(Partial<NT, W>)) +
                         " bytes of shared memory; a block of this device has " + std::to_string(limit));
  }
  return launch(options, mmvq_tiles<Format, NT, W, SWIGLU>, dim3(static_cast<unsigned>(blocks)), dim3(32 * W),
                shared, stream, parts, static_cast<const unsigned char*>(acts), nt, id, row_steps, share,
                staged ? 1 : 0);
}

template <class Format, bool SWIGLU>
Status launch_any(const Parts& parts, const void* acts, int nt, int id, Stream& stream, bool programmatic) {
  const auto go = [&]<int NT>() {
    constexpr int kResident = NT > 1 ? 16 : Format::kWarpsPerSm;
    switch (warps<Format>(id, shared_memory_limit())) {
      case 1:
        return launch_parts<Format, NT, 1, SWIGLU>(parts, acts, nt, id, stream, programmatic, kResident);
      case 4:
        return launch_parts<Format, NT, 4, SWIGLU>(parts, acts, nt, id, stream, programmatic, kResident);
      default:
        return launch_parts<Format, NT, Format::kWarps, SWIGLU>(parts, acts, nt, id, stream, programmatic,
                                                                kResident);
    }
  };
  return nt == 1 ? go.template operator()<1>() : go.template operator()<tile_acts::kMostTokens>();
}

/// launch_mmvq_tiles for one format.
template <class Format>
Status launch_format(std::span<const MmvqPart> matrices, const void* acts, int nt, int id, Stream& stream,
                     bool programmatic) {
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
    if (reinterpret_cast<std::uintptr_t>(m.tiles) % 16 != 0 ||
        reinterpret_cast<std::uintptr_t>(acts) % 16 != 0) {
      return Status::error("weights and activations must begin at a multiple of 16 bytes");
    }
    parts.part[p] = m;
    parts.first[p + 1] += static_cast<int>(row_tiles(m.od));
  }
  return launch_any<Format, false>(parts, acts, nt, id, stream, programmatic);
}

}  // namespace tiles

/// out[nt][od] = acts[nt][id] . weights[od][id]^T for one to three matrices of a type, with bias and residual as the
/// parts say. A token's result is the same bits for every nt and whatever other parts there are.
/// @param acts tile_acts::launch_quantize's, nt 1..8
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
/// Does not synchronise.
inline Status launch_mmvq_tiles(WeightType type, std::span<const MmvqPart> matrices, const void* acts, int nt,
                                int id, Stream& stream, bool programmatic = false) {
  return tiles::with_tile_format(type, [&](auto format) -> Status {
    return tiles::launch_format<decltype(format)>(matrices, acts, nt, id, stream, programmatic);
  });
}

/// out[nt][od] = silu(acts . gate^T) * (acts . up^T), silu(z) = z / (1 + e^-z): both matrices [od][id] in tiles of one
/// type. Otherwise as the other.
inline Status launch_mmvq_tiles_swiglu(WeightType type, const void* gate, const void* up, const void* acts,
                                       float* out, Shape s, Stream& stream, bool programmatic = false) {
  if (Status ok = mmvq_tiles_supported(type, s); !ok.ok()) return ok;
  if ((reinterpret_cast<std::uintptr_t>(gate) | reinterpret_cast<std::uintptr_t>(up) |
       reinterpret_cast<std::uintptr_t>(acts)) %
          16 !=
      0) {
    return Status::error("weights and activations must begin at a multiple of 16 bytes");
  }
  tiles::Parts parts{};
  const int od = static_cast<int>(s.od), rows16 = static_cast<int>(tiles::row_tiles(s.od));
  parts.part[0] = {gate, out, od};
  parts.part[1] = {up, out, od};
  parts.first[1] = rows16;
  parts.first[2] = parts.first[3] = 2 * rows16;
  return tiles::with_tile_format(type, [&](auto format) -> Status {
    return tiles::launch_any<decltype(format), true>(parts, acts, static_cast<int>(s.nt),
                                                     static_cast<int>(s.id), stream, programmatic);
  });
}

/// Upper bound on the f32 roundings that a term meets in mmvq_tiles: with its block (scales, sums of up to eight
/// sub-blocks, the block's scale), along its warp, over the warps.
inline double mmvq_tiles_roundings(WeightType type, long long id) {
  const double span = info(type).block_elems == 32 ? 128 : 256,
               row_steps = static_cast<double>((id + 255) / 256 * 256) / span;
  const double most_warps = 16, fewest_warps = 4;  // where there are fewer, a row has four steps at most
  const double a_step =
      info(type).block_elems == 32 ? 4 * 2 : 2;  // additions to the warp's sum, with their products
  return 2 + 8 * 2 + a_step * (row_steps / fewest_warps + 4) + most_warps + 2;
}

}  // namespace ladder
