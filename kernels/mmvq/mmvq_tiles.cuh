// RUNG      mmvq_tiles: weights in tiles, multiplied by tensor cores, several loads of 16 bytes a lane under way.
// PREV      mmvq_pf: two-byte loads, because blocks are 18 bytes; and dp4a, because one token seems too few for a matrix
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T, nt 1..8; a bias or a residual added, or silu(gate) * up
// LAYOUT    weights in tiles (tiles.cuh), acts int8 planes (tile_acts.cuh), out row-major f32
// MAP       grid(at most a few blocks an SM) block(32 W): block -> every gridDim'th sixteen rows, warp -> every Wth tile
//           of them, lane 4g+t -> words t and t+4 of rows g and g+8
// NEEDS     id % 32 == 0 (256 for types with blocks of 256), nt 1..8, sm_80: checked by the launcher
// TRAFFIC   weights od*id*bpe B (od up to a multiple of 16, id of 128 or 256), acts 1.25*NT*id B, out 4*nt*od B
// WORK      2*nt*od*id int8 OP, of which the tensor cores do 8/nt times as many
// LOOK FOR  SASS: LDG.E.128.CONSTANT with NA, IMMA.16832.S8.S8 (IMMA.16816 for scales of 16); no LDS in the loop
// EXPECT    the read roof from some 30 MB on, for every type and every nt up to 8: the time of nt = 8 is that of nt = 1
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/04-mmvq/mmvq.cu -o mmvq
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "harness/device/device.hpp"
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

// ANCHOR: mmvq_tiles
/// @tparam NT tokens of the activations' group: 1, 2, 4, 8
/// @tparam W warps of a block
/// @tparam SWIGLU part 0 is the gate and part 1 what it lets through: out = silu(gate) * up
template <class Format, int NT, int W, bool SWIGLU>
__global__ void __launch_bounds__(32 * W)
    mmvq_tiles(Parts parts, const unsigned char* acts, int nt, int id, int steps) {
  constexpr int D = Format::kInFlight, COLS = StepActs<NT>::COLS, OUTS = kRows * NT;
  constexpr int BYTES = tile_bytes<typename Format::Block>();
  constexpr int PAIRS = Tile<typename Format::Block>::kSteps / 2;  // of activations' blocks, in a tile
  __shared__ float partial[2][W][OUTS];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int g = lane / 4, t = lane % 4;
  const int mine = warp < steps ? (steps - warp + W - 1) / W : 0;  // tiles of a row that are this warp's
  // 1. Sixteen rows at a time; with SWIGLU, those of the gate and then the same of the other matrix.
  const int rows16 = SWIGLU ? parts.first[1] : parts.first[kMostMmvqParts];
  const int turns = (rows16 - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
                    static_cast<int>(gridDim.x) * (SWIGLU ? 2 : 1);
  const auto place = [&](int turn) {  // part and sixteen rows of it
    const int at = static_cast<int>(blockIdx.x + static_cast<unsigned>(SWIGLU ? turn / 2 : turn) * gridDim.x);
    const int p = SWIGLU ? turn % 2 : part_of(parts, at);
    return make_int2(p, SWIGLU ? at : at - parts.first[p]);
  };
  const auto first_tile = [&](int turn) {
    const int2 at = place(turn);
    return static_cast<const unsigned char*>(parts.part[at.x].tiles) +
           (static_cast<long long>(at.y) * steps + warp) * BYTES;
  };

  // 2. D tiles on their way before anything else. They do not depend on the kernel before this one; activations do.
  allow_next_kernel();
  typename Format::Raw raw[D];
  const unsigned char* row = first_tile(0);
#pragma unroll
  for (int d = 0; d < D; ++d) {
    if (d < mine) raw[d] = Format::load(row + static_cast<long long>(d) * W * BYTES, lane);
  }
  wait_for_previous_kernel();

  const unsigned char* codes = acts + (g % NT * 4 + t) * 16;
  const unsigned char* scales = acts + tile_acts::scale_at(0, NT == 1 ? 0 : 2 * t % NT, NT, id);
  float held = 0.0f;  // SWIGLU: the gate of this thread's output
  for (int turn = 0; turn < turns; ++turn) {
    const unsigned char* next_row = turn + 1 < turns ? first_tile(turn + 1) : nullptr;
    float sums[2][COLS] = {};
    // 3. As a tile is used up, the one D further on takes its registers: of these rows, or of the next.
    for (int n = 0; n < mine; n += D) {
#pragma unroll
      for (int d = 0; d < D; ++d) {
        if (n + d >= mine) break;
        const long long step = warp + static_cast<long long>(n + d) * W;
        Format::template multiply<NT>(
            raw[d], StepActs<NT>{codes + step * (PAIRS * NT * 64), scales + step * (PAIRS * NT * 16)}, sums);
        if (n + d + D < mine) {
          raw[d] = Format::load(row + static_cast<long long>(n + d + D) * W * BYTES, lane);
        } else if (next_row != nullptr) {
          raw[d] = Format::load(next_row + static_cast<long long>(d) * W * BYTES, lane);
        }
      }
    }

    // 4. The warps' sums side by side, then added in order. Two buffers: who is still reading one is not disturbed.
    float(&buffer)[W][OUTS] = partial[turn % 2];
    if (NT == 1 ? t == 0 : 2 * t < NT) {
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        buffer[warp][g * NT + (NT == 1 ? 0 : 2 * t) + c] = sums[0][c];
        buffer[warp][(g + 8) * NT + (NT == 1 ? 0 : 2 * t) + c] = sums[1][c];
      }
    }
    __syncthreads();  // all warps' sums are there
    const int2 at = place(turn);
    const MmvqPart& part = parts.part[at.x];
    static_assert(OUTS <= 32 * W, "a thread an output");
    const int o = static_cast<int>(threadIdx.x), r = at.y * kRows + o / NT, token = o % NT;
    if (o < OUTS && r < part.od && token < nt) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < W; ++w) sum += buffer[w][o];
      if (part.bias != nullptr) sum += part.bias[r];
      const long long to = static_cast<long long>(token) * part.od + r;
      if (part.residual != nullptr) sum += part.residual[to];
      if (!SWIGLU) {
        part.out[to] = sum;
      } else if (at.x == 0) {
        held = sum;
      } else {
        part.out[to] = held / (1.0f + expf(-held)) * sum;
      }
    }
    row = next_row;
  }
}
// ANCHOR_END: mmvq_tiles

/// Warps of a block, by the tiles of a row. It decides the order of additions, so it must not depend on nt or the device.
constexpr int warps(long long row_steps) { return row_steps >= 64 ? 8 : 4; }

/// How many warps a launch keeps on a multiprocessor: half of what fits, so that the next kernel's first loads find room.
inline constexpr int kWarpsPerSm = 12;

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
Status launch_parts(const Parts& parts, const void* acts, int nt, int id, Stream& stream, bool programmatic) {
  const int row_steps = static_cast<int>(steps<typename Format::Block>(id));
  const int rows16 = SWIGLU ? parts.first[1] : parts.first[kMostMmvqParts];
  // As many blocks as fit at once, or a half, a third ... of the rows' sixteens, all with the same share.
  const int most = std::max(1, multiprocessor_count() * kWarpsPerSm / W);
  const int share = (rows16 + most - 1) / most;
  LaunchOptions options;
  options.programmatic = programmatic;
  return launch(options, mmvq_tiles<Format, NT, W, SWIGLU>,
                dim3(static_cast<unsigned>((rows16 + share - 1) / share)), dim3(32 * W), 0, stream, parts,
                static_cast<const unsigned char*>(acts), nt, id, row_steps);
}

template <bool SWIGLU>
Status launch_any(WeightType type, const Parts& parts, const void* acts, int nt, int id, Stream& stream,
                  bool programmatic) {
  return with_tile_format(type, [&](auto format) -> Status {
    using Format = decltype(format);
    const bool tall = warps(steps<typename Format::Block>(id)) == 8;
    const auto go = [&]<int NT>() {
      return tall ? launch_parts<Format, NT, 8, SWIGLU>(parts, acts, nt, id, stream, programmatic)
                  : launch_parts<Format, NT, 4, SWIGLU>(parts, acts, nt, id, stream, programmatic);
    };
    switch (tile_acts::group_tokens(nt)) {
      case 1:
        return go.template operator()<1>();
      case 2:
        return go.template operator()<2>();
      case 4:
        return go.template operator()<4>();
      default:
        return go.template operator()<8>();
    }
  });
}

}  // namespace tiles

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

/// out[nt][od] = acts[nt][id] . weights[od][id]^T for one to three matrices of a type, with bias and residual as the
/// parts say. A token's result is the same bits for every nt and whatever other parts there are.
/// @param acts tile_acts::launch_quantize's, nt 1..8
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
/// Does not synchronise.
inline Status launch_mmvq_tiles(WeightType type, std::span<const MmvqPart> matrices, const void* acts, int nt,
                                int id, Stream& stream, bool programmatic = false) {
  if (matrices.empty() || matrices.size() > kMostMmvqParts) {
    return Status::error("mmvq_tiles: 1 to " + std::to_string(kMostMmvqParts) + " matrices at once, not " +
                         std::to_string(matrices.size()));
  }
  tiles::Parts parts{};
  for (std::size_t p = 0; p < kMostMmvqParts; ++p) {
    parts.first[p + 1] = parts.first[p];
    if (p >= matrices.size()) continue;
    const MmvqPart& m = matrices[p];
    if (Status ok = mmvq_tiles_supported(type, {nt, m.od, id}); !ok.ok()) return ok;
    if (reinterpret_cast<std::uintptr_t>(m.tiles) % 16 != 0 ||
        reinterpret_cast<std::uintptr_t>(acts) % 16 != 0) {
      return Status::error("weights and activations must begin at a multiple of 16 bytes");
    }
    parts.part[p] = m;
    parts.first[p + 1] += static_cast<int>(tiles::row_tiles(m.od));
  }
  return tiles::launch_any<false>(type, parts, acts, nt, id, stream, programmatic);
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
  return tiles::launch_any<true>(type, parts, acts, static_cast<int>(s.nt), static_cast<int>(s.id), stream,
                                 programmatic);
}

/// Upper bound on the f32 roundings that a term meets in mmvq_tiles: with its block (scales, sums of up to eight
/// sub-blocks, the block's scale), along its warp, over the warps.
inline double mmvq_tiles_roundings(WeightType type, long long id) {
  const double span = info(type).block_elems == 32 ? 128 : 256,
               row_steps = static_cast<double>((id + 255) / 256 * 256) / span;
  const double w = tiles::warps(static_cast<long long>(row_steps));
  const double a_step =
      info(type).block_elems == 32 ? 4 * 2 : 2;  // additions to the warp's sum, with their products
  return 2 + 8 * 2 + a_step * (row_steps / w + 1) + w + 2;
}

}  // namespace ladder
