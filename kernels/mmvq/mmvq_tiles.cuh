// RUNG      mmvq_tiles: weights in tiles, multiplied by tensor cores, copied by each warp into a ring of its own.
// PREV      mmvq_pf: copies of 16 bytes that straddle blocks of 18; and dp4a, as one token seems too few for a matrix
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T, nt 1..8; a bias or a residual added, or silu(gate) * up. Of
//           one token also: activations that are still to be normalised, and results as int8 for the next product
// LAYOUT    weights in tiles (tiles.cuh), acts int8 planes (tile_acts.cuh), out row-major f32 or planes
// MAP       grid(one to four blocks a multiprocessor) block(32 W): block -> neighbouring sixteens of rows, in turn;
//           warp -> every Wth tile of the block's; rows that are few and long and make planes: cluster of 2 or 4 blocks ->
//           the same sixteens, each a part of their tiles; lane 4g+t -> words t and t+4 of rows g and g+8
// NEEDS     id % 32 == 0 (256 for types with blocks of 256), nt 1..8, sm_80: checked by the launcher
// TRAFFIC   weights od*id*bpe B (od up to a multiple of 16, id of 128 or 256), acts 1.25*NT*id B, out 4*nt*od B
// WORK      2*nt*od*id int8_op, of which the tensor cores do 8/nt times as many
// LOOK FOR  SASS: LDGSTS.E.BYPASS.128, LDSM.16.M88.4 and IMMA.16832.S8.S8 with one token, with eight no LDSM (and
//           IMMA.16816 for scales of 16); no LDG.128 in the loop
// EXPECT    the read roof, or a few percent less, for hundreds of megabytes; a launch costs about 1 us beside them. Types
//           of few bits, and eight tokens with 16 results a lane to scale: the time of their instructions
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/04-mmvq/mmvq.cu -o mmvq
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

#include "harness/device/device.hpp"
#include "kernels/device/cluster.cuh"
#include "kernels/device/cp_async.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/mbarrier.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/device/shared_address.cuh"
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

/// What the matrices are multiplied with.
struct MmvqActs {
  const void* planes = nullptr;    ///< int8, of tile_acts.cuh, nt 1..8
  const float* squares = nullptr;  ///< [id / 32] of a token alone: its row is still to be normalised; or null
  float epsilon = 0.0f;            ///< of that normalisation
};

/// Where the results of one token go as int8: planes for the next product.
struct MmvqPlanes {
  void* planes = nullptr;         ///< tile_acts::bytes(1, od), at a multiple of 16 bytes; or null
  const float* weight = nullptr;  ///< [od] of a normalisation that is still to come
  float* squares = nullptr;       ///< [od / 32], for MmvqActs
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
  unsigned char*
      planes;  ///< with a gate: where results go instead of `out`; else beside it, as MmvqPlanes says
  const float* weight;
  float* squares;
  int unit;         ///< sixteens that stay together in a block: two where results go to planes
  int share, more;  ///< units of a block, and how many blocks have one more
  int ranks;        ///< blocks of a cluster, which have the same rows and each a part of their steps
  int early;        ///< tiles of a warp that are asked for before the kernel before has ended
  bool by_one;      ///< each when the one before has come
};

__device__ __forceinline__ int part_of(const Parts& parts, int rows16) {
  return rows16 < parts.first[1] ? 0 : rows16 < parts.first[2] ? 1 : 2;
}

/// What a block has summed up: for so many turns, its sums side by side; and those of the turns before, which some warps
/// still read. With a gate a block has many turns, few of their outputs, and more to do for each: its first warp would do
/// that after every few turns, and all others wait for it at the next barrier. So the sums of all turns stay, as a rule.
template <int NT, int W, bool SWIGLU>
struct Partial {
  static constexpr bool kOnce = NT == 1 && SWIGLU;
  static constexpr int TURNS = kOnce ? 20 : NT == 1 ? 4 : 2, OUTS = kRows * NT;
  using Turns = float[TURNS][W][OUTS];
  static_assert(NT > 1 || SWIGLU || TURNS * OUTS <= 32 * W, "with one token a thread has one output");
  Turns v[kOnce ? 1 : 2];
};

/// What is added to a thread's output of one token, and multiplied with it on its way to planes: asked for before the sums
/// are there.
struct Early {
  float bias = 0.0f, residual = 0.0f, weight = 0.0f;
  __device__ __forceinline__ void load(const Parts& parts, int first, int turns) {
    const int n = static_cast<int>(threadIdx.x) / kRows, at = first + n, p = part_of(parts, at);
    const MmvqPart& part = parts.part[p];
    const int r = (at - parts.first[p]) * kRows + static_cast<int>(threadIdx.x) % kRows;
    if (n >= turns || r >= part.od) return;
    if (part.bias != nullptr) bias = part.bias[r];
    if (part.residual != nullptr) residual = part.residual[r];
    if (parts.planes != nullptr) weight = parts.weight[r];
  }
};

// ANCHOR: mmvq_tiles_finish
/// A thread an output of `turns` turns that began at sixteen `first`: its sums in order, then what is added to them.
/// @param sums of each output: steps of a row, W at most
/// @param root what the sums of a row that was not normalised are multiplied with
/// @param early of the thread's output, with one token and no gate
template <int NT, int W, bool SWIGLU>
__device__ __forceinline__ void finish(const Parts& parts, int first, int turns, int nt, int sums, float root,
                                       const Early& early,
                                       const typename Partial<NT, W, SWIGLU>::Turns& partial) {
  constexpr int OUTS = Partial<NT, W, SWIGLU>::OUTS;
#pragma unroll 1
  for (int o = static_cast<int>(threadIdx.x); o < (SWIGLU ? turns / 2 : turns) * OUTS; o += 32 * W) {
    const int n = o / OUTS, i = o % OUTS, token = i % NT;
    const int at = first + n;
    const int p = SWIGLU ? 0 : part_of(parts, at);
    const MmvqPart& part = parts.part[p];
    const int r = (at - parts.first[p]) * kRows + i / NT;
    if (r >= part.od || token >= nt) continue;
    const auto sum_of = [&](int turn, const MmvqPart& m) {
      float sum = 0.0f, v[W];
#pragma unroll
      for (int w = 0; w < W; ++w)
        v[w] = w < sums ? partial[turn][w][i] : 0.0f;  // all loads before any addition
#pragma unroll
      for (int w = 0; w < W; ++w) sum += v[w];
      if constexpr (NT == 1) sum *= root;
      return NT > 1 && m.bias != nullptr ? sum + m.bias[r] : sum;
    };
    const long long to = static_cast<long long>(token) * part.od + r;
    if constexpr (SWIGLU) {
      // The other matrix's turn is a unit further on. Two sixteens are a warp's lanes, and a block of int8.
      const int turn = parts.unit == 2 ? n / 2 * 4 + n % 2 : n * 2;
      const float gate = sum_of(turn, part), up = sum_of(turn + parts.unit, parts.part[1]);
      const float out = gate / (1.0f + expf(-gate)) * up;
      if (NT == 1 && parts.planes != nullptr) {
        tile_acts::store_lane<true>(out, r / 32, parts.planes, part.od);
      } else {
        part.out[to] = out;
      }
    } else {
      float sum = sum_of(n, part);
      if constexpr (NT == 1) sum += early.bias;
      if (part.residual != nullptr) sum += NT == 1 ? early.residual : part.residual[to];
      part.out[to] = sum;
      if (NT == 1 && parts.planes != nullptr)
        tile_acts::store_unnormalised(sum, early.weight, r / 32, parts.planes, parts.squares, part.od);
    }
  }
}
// ANCHOR_END: mmvq_tiles_finish

/// Activations to shared memory, 16 bytes a vector, by all threads of a block.
/// @param meanwhile called once, when the first loads are on their way
template <class F>
__device__ __forceinline__ void copy_planes(unsigned char* shared, const unsigned char* global, int vectors,
                                            F&& meanwhile) {
  const int threads = static_cast<int>(blockDim.x), me = static_cast<int>(threadIdx.x);
  int i0 = me;
#pragma unroll 1
  do {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (i0 + k * threads < vectors) v[k] = reinterpret_cast<const uint4*>(global)[i0 + k * threads];
    }
    if (i0 == me) meanwhile();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (i0 + k * threads < vectors) reinterpret_cast<uint4*>(shared)[i0 + k * threads] = v[k];
    }
    i0 += 4 * threads;
  } while (i0 < vectors);
}

/// What blocks of NT tokens are made of. The products of eight are more arithmetic a tile and take more registers, and there
/// are more activations, which come behind the rings.
template <int NT>
__host__ __device__ constexpr Plan plan_for(Plan p) {
  if (NT == 1) return p;
  const int tiles = p.tiles < 3 ? p.tiles : 3;
  return {p.warps, tiles, p.warps < 16 ? 16 / p.warps : 1, tiles};
}

/// Blocks that must fit on a multiprocessor, so that the compiler keeps to their registers. A block of a cluster is to begin
/// beside the block of the kernel before.
template <class Format, int W, int BLOCKS, bool RANKS>
__host__ __device__ constexpr int blocks_per_sm() {
  return RANKS && W == 16 && Format::Block::kElems == 32 ? 2 : BLOCKS;
}

/// Threads that a multiprocessor's registers must do for: with one token and one block those of the block, and of a block of
/// attention (attention_decode.cuh), which has its keys and values under way beside the product before it.
template <int NT, int W, int BLOCKS, bool RANKS>
__host__ __device__ constexpr int most_threads() {
  return 32 * W + (NT == 1 && !RANKS && BLOCKS == 1 ? 128 : 0);
}

/// Rows up to this length are short. A warp of sixteen would have one or two tiles of them, and sums to bring together
/// after each; and blocks of few warps leave a multiprocessor one by one, to those of the next kernel. Activations of long
/// rows have room once, not for each of several blocks.
inline constexpr int kShortRow = 4096;

/// The addresses of a warp's tiles. Of the tiles of a block, row of tiles after row of tiles, warp w takes every Wth from
/// the w-th on, of whatever row it is: so no warp has more to do than another.
template <int BYTES, int W, bool SWIGLU>
struct Loader {
  const unsigned char* from;  // the lane's 16 bytes of the next tile
  const unsigned char*
      other;   // with a gate: where the tiles begin that come after those side by side with this one
  int run;     // tiles that the warp still asks for of those that lie side by side
  int left;    // and beyond them
  int ahead;   // tiles of all warps from the end of this run to the end of those side by side
  int part;    // the matrix that has it
  int others;  // tiles of a row that other blocks have

  /// @param first the block's first sixteen @param steps of a row @param from_step the first of the block's
  /// @param own the block's steps of a row, all if it has several matrices @param tiles of the warp
  __device__ __forceinline__ void begin(const Parts& parts, int first, int steps, int from_step, int own,
                                        int warp, int tiles) {
    part = SWIGLU ? 0 : part_of(parts, first);
    const long long at = (static_cast<long long>(first - parts.first[part]) * steps + from_step) * BYTES +
                         threadIdx.x % 32 * 16;
    from = static_cast<const unsigned char*>(parts.part[part].tiles) + at + warp * BYTES;
    other = SWIGLU ? static_cast<const unsigned char*>(parts.part[1].tiles) + at : nullptr;
    left = tiles;
    others = steps - own;
    ahead = (SWIGLU ? parts.unit * steps : others > 0 ? own : (parts.first[part + 1] - first) * steps) - warp;
    next_run(parts, own);
  }

  /// `from` is over the end by -ahead tiles, unless none are left. @param steps of a row, the block's
  __device__ __forceinline__ void next_run(const Parts& parts, int steps) {
    while (ahead <= 0 && left > 0) {
      if constexpr (SWIGLU) {
        const unsigned char* end = from + ahead * BYTES;
        from = other - ahead * BYTES;
        other = end;
        ahead += parts.unit * steps;
      } else if (others > 0) {
        from += others * BYTES;
        ahead += steps;
      } else {
        ++part;
        from =
            static_cast<const unsigned char*>(parts.part[part].tiles) + threadIdx.x % 32 * 16 - ahead * BYTES;
        ahead += (parts.first[part + 1] - parts.first[part]) * steps;
      }
    }
    run = min(left, (ahead + W - 1) / W);
    left -= run;
    ahead -= run * W;
  }
};

/// A block of a cluster brings what its warps have summed up to block 0, where it is as a warp's of finish().
/// @param sums of each output: the block's steps of a row, W at most
/// @param partial of `turns` turns; `of_ranks` and `arrived` of block 0, at the same place in every block
template <int W>
__device__ __forceinline__ void bring_to_first(int turns, int sums, int rank,
                                               const typename Partial<1, W, false>::Turns& partial,
                                               typename Partial<1, W, false>::Turns& of_ranks,
                                               std::uint64_t* arrived) {
  const int n = static_cast<int>(threadIdx.x) / kRows, i = static_cast<int>(threadIdx.x) % kRows;
  if (n < turns) {
    float sum = 0.0f;
#pragma unroll 4
    for (int w = 0; w < sums; ++w) sum += partial[n][w][i];
    store_async_at(shared_address_in(0, &of_ranks[n][rank][i]), sum, shared_address_in(0, arrived));
  }
  if (rank == 0) mbarrier_wait(arrived, 0);
}

// ANCHOR: mmvq_tiles
/// What a block does. @tparam NT tokens of the activations' group: 1 or 8
/// @tparam W warps of a block @tparam D tiles that a warp has under way
/// @tparam SWIGLU part 0 is the gate and part 1 what it lets through: out = silu(gate) * up
/// @tparam STAGED the activations are copied to shared memory; too many, they are read where they are
/// @tparam RANKS blocks of a cluster have the same rows, each a part of their steps
/// @param index of the block among those that have these parts
template <class Format, int NT, int W, int D, bool SWIGLU, bool STAGED, bool RANKS>
__device__ __forceinline__ void multiply_parts(const Parts& parts, const MmvqActs& x, int nt, int id,
                                               int all_steps, int index) {
  constexpr int COLS = LaneSums<NT>::COLS, TURNS = Partial<NT, W, SWIGLU>::TURNS;
  constexpr int BYTES = tile_bytes<typename Format::Block>();
  constexpr int PAIRS = Tile<typename Format::Block>::kSteps / 2;  // of activations' blocks, in a tile
  __shared__ Partial<NT, W, SWIGLU> partial;
  __shared__ float root;
  const int lane = static_cast<int>(kept(threadIdx.x % 32)), warp = static_cast<int>(threadIdx.x / 32);
  const int g = lane / 4, t = lane % 4;

  // 1. This block's sixteens of rows, a turn each; with SWIGLU two turns each, of the gate and of the other matrix. All
  //    blocks have as many, or one unit less. Where there are far fewer rows than multiprocessors, the blocks of a cluster
  //    have the same ones, and each a part of their steps.
  allow_next_kernel();
  static_assert(!RANKS || (NT == 1 && !SWIGLU));
  const int ranks = RANKS ? parts.ranks : 1, rank = index % ranks, block = index / ranks;
  const int from_step = all_steps * rank / ranks, steps = all_steps * (rank + 1) / ranks - from_step;
  const int first = (block * parts.share + min(block, parts.more)) * parts.unit;
  const int turns = (parts.share + (block < parts.more ? 1 : 0)) * parts.unit * (SWIGLU ? 2 : 1);

  // 2. Tiles on their way before anything else, into a ring of the warp's own in shared memory. Registers would do, but
  //    a warp can tell only a few of its loads apart (six scoreboards): waiting for the oldest, it would wait for more.
  //    Weights do not depend on the kernel before this one; activations do.
  unsigned char* const ring = dynamic_shared<unsigned char>() + warp * (D * BYTES);  // [D][BYTES]
  Loader<BYTES, W, SWIGLU> loader;
  loader.begin(parts, first, all_steps, from_step, steps, warp,
               turns * steps > warp ? (turns * steps - warp + W - 1) / W : 0);
  const bool has_tail = 16 * lane < BYTES % 512;
  const auto load_next = [&](unsigned char* to) {
    if (loader.run > 0) {
      copy_vectors<BYTES / 512>(to, loader.from);
      if (has_tail) cp_async_cg_at<BYTES / 512 * 512>(to, loader.from);
      loader.from += W * BYTES;
      if (--loader.run == 0) loader.next_run(parts, steps);
    }
    cp_async_commit_group();  // empty at the end, so that groups count tiles
  };
  const auto load_some = [&](int from, int to) {
#pragma unroll 1
    for (int d = from; d < to; ++d) {
      load_next(ring + d * BYTES + 16 * lane);
      if (parts.by_one) cp_async_wait_group<0>();
    }
  };
  load_some(0, parts.early);

  __shared__ std::uint64_t arrived;  // block 0: the sums of all blocks of the cluster
  if constexpr (RANKS) {
    if (threadIdx.x == 0) {
      mbarrier_init(&arrived, 1);
      mbarrier_init_fence();
      mbarrier_arrive_expect_bytes(&arrived, static_cast<unsigned>(ranks * turns * kRows) * 4u);
    }
    cluster_barrier_relaxed();  // all blocks have begun, and block 0 waits for so many bytes
  }

  Codes<NT> codes;
  unsigned char* const planes = dynamic_shared<unsigned char>() + W * D * BYTES;  // if they are staged
  const int all = static_cast<int>(tile_acts::group_bytes(NT, id));
  if constexpr (NT == 1) {
    if (threadIdx.x < Columns::kZeros / 4) reinterpret_cast<unsigned*>(planes + all)[threadIdx.x] = 0;
    codes.template begin<Format::kHalves>(planes, planes + all, PAIRS * 64, lane);
  }

  // 3. Activations: one wait for all of them. They come before the weights that have not been asked for yet: behind a whole
  //    ring of them they would be there when it is. Those that no kernel has just written are in memory, and asked for now
  //    they are in L2 then. Of short rows one block asks: many blocks would ask for the same few lines, and wait for them.
  const unsigned char* acts = static_cast<const unsigned char*>(x.planes);
  if ((NT == 1 && id > kShortRow) || index == 0) {
    for (int i = static_cast<int>(threadIdx.x) * 128; i < all; i += 32 * W * 128) prefetch_l2(acts + i);
  }
  wait_for_previous_kernel();
  if constexpr (STAGED) {
    copy_planes(planes, acts, all / 16, [&] { load_some(parts.early, D); });
    __syncthreads();  // all activations are there
    acts = planes;
  } else {
    load_some(parts.early, D);
  }
  if (NT == 1 && warp == W - 1) {  // which has no more to do than others, and often less
    const float factor = x.squares != nullptr ? tile_acts::root_of(x.squares, id, x.epsilon) : 1.0f;
    if (lane == 0) root = factor;  // read behind the barriers of step 4
  }
  if constexpr (NT > 1) codes.at = acts + (g * 4 + t) * 16;
  std::conditional_t<NT == 1, SharedPlace, const unsigned char*> scales;
  if constexpr (NT == 1) {
    scales.set(acts + tile_acts::scale_at(t, 0, 1, id));
  } else {
    scales = acts + tile_acts::scale_at(0, 2 * t, NT, id);
  }

  // 4. As a tile has come to registers, the one D further on takes its place, of whatever turn it is. Warps do not wait
  //    for each other but once in TURNS turns. A row's sums are told apart by step modulo W, whichever warp has them: so
  //    their order does not depend on how many rows a block has.
  unsigned char* stage = ring;
  int place = 0;
  int turn = 0, step = warp;  // of the warp's next tile
  while (step >= steps) step -= steps, ++turn;
  const LaneConstants<Format> constants(t);
  LaneSums<NT> sums;
  int begun = 0, side = 0;
  do {
    const int until = min(begun + TURNS, turns);
    int sum_at = step;  // step modulo W
    Early early;
    if constexpr (NT == 1 && !SWIGLU) early.load(parts, first + begun, until - begun);
    while (turn < until) {
      cp_async_wait_group<D - 1>();  // the oldest of D groups is there
      __syncwarp();                  // for all lanes
      typename Format::template Raw<NT> raw;
      raw.template load<FromShared>(stage, lane);
      __syncwarp();  // all lanes have their shares
      load_next(stage + 16 * lane);
      const bool last = ++place == D;  // of the ring
      stage += last ? BYTES - D * BYTES : BYTES;
      if (last) place = 0;
      multiply_tile<Format, NT>(raw, codes, scales + (from_step + step) * (PAIRS * NT * 16), from_step + step,
                                t, constants, sums);
      step += W;
      if (step < steps) continue;
      // The warp's last tile of the turn.
      float(&to)[kRows * NT] = partial.v[side][turn - begun][sum_at];
#pragma unroll
      for (int row16 = 0; row16 < 2; ++row16) {
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
          const float sum = sums.total(row16, c) * sums_down<Format, NT>();
          if (NT > 1 || t == 0) to[(g + 8 * row16) * NT + (NT == 1 ? 0 : 2 * t) + c] = sum;
        }
      }
      sums = {};
      while (step >= steps) step -= steps, ++turn;
      sum_at = step;
    }
    __syncthreads();  // all warps' sums are there; and those before them, which are next overwritten, are read
    if constexpr (RANKS) {  // and all turns are these
      bring_to_first<W>(turns, min(steps, W), rank, partial.v[0], partial.v[1], &arrived);
      if (rank > 0) return;
      side = 1;
    }
    finish<NT, W, SWIGLU>(parts, first + (SWIGLU ? begun / 2 : begun), until - begun, nt,
                          RANKS ? ranks : min(steps, W), root, early, partial.v[side]);
    begun = until;
    if constexpr (Partial<NT, W, SWIGLU>::kOnce) {
      if (begun < turns) __syncthreads();  // the sums are read before others take their places
    } else {
      side ^= 1;
    }
  } while (begun < turns);
  if constexpr (NT == 1) {
    if (parts.planes != nullptr && blockIdx.x + static_cast<unsigned>(ranks) == gridDim.x)
      tile_acts::store_padding(parts.planes, parts.part[0].od);
  }
}
// ANCHOR_END: mmvq_tiles

/// @tparam BLOCKS that fit on a multiprocessor
template <class Format, int NT, int W, int D, int BLOCKS, bool SWIGLU, bool STAGED, bool RANKS = false>
__global__ void __launch_bounds__(most_threads<NT, W, BLOCKS, RANKS>(),
                                  blocks_per_sm<Format, W, BLOCKS, RANKS>())
    mmvq_tiles(Parts parts, MmvqActs x, int nt, int id, int all_steps) {
  multiply_parts<Format, NT, W, D, SWIGLU, STAGED, RANKS>(parts, x, nt, id, all_steps,
                                                          static_cast<int>(blockIdx.x));
}

/// Matrices of two types in one launch, of one token: the first `blocks` blocks have those of A, the others those of B.
template <class A, class B, int W, int DA, int DB>
__global__ void __launch_bounds__(most_threads<1, W, 1, false>())
    mmvq_tiles_two(Parts a, Parts b, int blocks, MmvqActs x, int id, int steps_a, int steps_b) {
  const int index = static_cast<int>(blockIdx.x);
  if (index < blocks) {
    multiply_parts<A, 1, W, DA, false, true, false>(a, x, 1, id, steps_a, index);
  } else {
    multiply_parts<B, 1, W, DB, false, true, false>(b, x, 1, id, steps_b, index - blocks);
  }
}

/// Bytes of a block's rings.
template <class Format>
constexpr std::size_t ring_bytes(Plan p) {
  return static_cast<std::size_t>(p.warps) * static_cast<std::size_t>(p.tiles) *
         tile_bytes<typename Format::Block>();
}
/// Shared memory beside rings and activations: sums, what they are multiplied with.
template <int NT, int W, bool SWIGLU>
constexpr std::size_t fixed_bytes() {
  return sizeof(Partial<NT, W, SWIGLU>) + sizeof(float) + 2 * sizeof(std::uint64_t);
}
/// Bytes of staged activations.
template <int NT>
constexpr std::size_t staged_bytes(long long id) {
  return tile_acts::group_bytes(NT, id) + (NT == 1 ? Columns::kZeros : 0);
}

inline constexpr int kMostRanks = 4;  ///< blocks that have the same rows

/// Where not even the activations of one token would have room beside the rings.
template <class Format>
inline constexpr Plan kFewWarps = {4, Format::kLong.tiles, 4, Format::kLong.tiles};

/// One block of a multiprocessor, which leaves registers and shared memory to one of the next kernel. Where different
/// kernels follow each other, as in a token, this one's ring fills before the block here has ended.
template <class Format>
constexpr Plan one_block() {
  if (Format::kLong.blocks == 1) return Format::kLong;
  constexpr int W = 16, D = 110 * 1024 / (W * tile_bytes<typename Format::Block>());
  return {W, D, 1, D};
}
template <class Format>
inline constexpr Plan kOneBlock = one_block<Format>();
/// Rows up to this length are shared by that block's warps, too: a launch of them is short, whatever else it has.
inline constexpr int kShortestRow = 1024;

/// Rows of a launch as far as its blocks depend on them. They decide the order of additions, so nothing here may depend on
/// nt, nor on how many rows there are.
struct Rows {
  long long id;
  bool between;  ///< other kernels: activations are still to be normalised, or results go to planes
};

/// What a block is made of, by its rows and the shared memory that it may have.
template <class Format, bool SWIGLU>
constexpr Plan plan_of(Rows rows, std::size_t limit) {
  const auto fits = [&]<Plan P>() {
    constexpr int NT = tile_acts::kMostTokens, W = P.warps;
    return ring_bytes<Format>(P) + staged_bytes<1>(rows.id) + fixed_bytes<1, W, SWIGLU>() <= limit &&
           ring_bytes<Format>(plan_for<NT>(P)) + fixed_bytes<NT, W, SWIGLU>() <= limit;
  };
  // So do all products with a gate.
  if (SWIGLU || rows.between || rows.id <= kShortestRow) {
    if (fits.template operator()<kOneBlock<Format>>()) return kOneBlock<Format>;
  } else if (rows.id <= kShortRow) {
    if (fits.template operator()<Format::kShort>()) return Format::kShort;
  } else if (fits.template operator()<Format::kLong>()) {
    return Format::kLong;
  }
  return kFewWarps<Format>;
}

/// Most shared memory that the activations of eight tokens may take.
inline constexpr std::size_t kMostStagedBytes = 96 * 1024;

/// Whether the activations are copied to shared memory: always those of one token, those of eight if there is room.
template <class Format, int NT, Plan P, bool SWIGLU>
constexpr bool stages(long long id, std::size_t limit) {
  const std::size_t planes = staged_bytes<NT>(id);
  return NT == 1 ||
         (planes <= kMostStagedBytes &&
          ring_bytes<Format>(plan_for<NT>(P)) + planes + fixed_bytes<NT, P.warps, SWIGLU>() <= limit);
}

template <class Format, int NT, Plan P, bool SWIGLU>
Status launch_parts(Parts parts, const MmvqActs& acts, int nt, int id, Stream& stream, bool programmatic) {
  parts.unit = parts.planes != nullptr ? 2 : 1;  // whole: od is then a multiple of 32
  const int row_steps = static_cast<int>(steps<typename Format::Block>(id));
  const int units = (SWIGLU ? parts.first[1] : parts.first[kMostMmvqParts]) / parts.unit;
  constexpr int W = P.warps, D = plan_for<NT>(P).tiles, BLOCKS = plan_for<NT>(P).blocks;
  const int most = multiprocessor_count() * BLOCKS;
  LaunchOptions options;
  options.programmatic = programmatic;
  const std::size_t limit = shared_memory_limit();
  const bool staged = stages<Format, NT, P, SWIGLU>(id, limit);
  const int blocks = std::min(units, most);
  parts.share = units / blocks;
  parts.more = units % blocks;
  const int turns = (parts.share + (parts.more > 0 ? 1 : 0)) * parts.unit * (SWIGLU ? 2 : 1);
  parts.ranks = 1;
  if (NT == 1 && !SWIGLU &&
      parts.planes != nullptr) {  // rows that make planes have an order of their own anyway
    const int most_ranks = std::min(kMostRanks, most_cluster_blocks());
    while (2 * parts.ranks <= most_ranks && 2 * parts.ranks * units <= multiprocessor_count() &&
           parts.unit * row_steps >= 2 * parts.ranks * W) {
      parts.ranks *= 2;
    }
  }
  options.cluster_blocks = static_cast<unsigned>(parts.ranks);

  // A block with few tiles asks for all of them while the kernel before ends. One with many begins, as a rule, when another
  // block has left its multiprocessor, and what counts is when its first product begins.
  const long long tiles_of_warp =
      (static_cast<long long>(turns) * ((row_steps + parts.ranks - 1) / parts.ranks) + W - 1) / W;
  parts.early = tiles_of_warp > D ? plan_for<NT>(P).early : D;
  // Where attention and a few tiles that go on as planes wait for the same kernel, attention has little time, they have much.
  parts.by_one = NT == 1 && !SWIGLU && parts.planes != nullptr && parts.ranks == 1 && tiles_of_warp <= D;
  const std::size_t shared = ring_bytes<Format>(plan_for<NT>(P)) + (staged ? staged_bytes<NT>(id) : 0);
  if (shared + fixed_bytes<NT, W, SWIGLU>() > limit) {
    return Status::error("mmvq_tiles: rows of " + std::to_string(id) +
                         " activations and the weights under way take " +
                         std::to_string(shared + fixed_bytes<NT, W, SWIGLU>()) +
                         " bytes of shared memory; a block of this device has " + std::to_string(limit));
  }
  const dim3 grid(static_cast<unsigned>(blocks * parts.ranks)), block(32 * W);
  if constexpr (NT > 1) {
    if (!staged) {
      return launch(options, mmvq_tiles<Format, NT, W, D, BLOCKS, SWIGLU, false>, grid, block, shared, stream,
                    parts, acts, nt, id, row_steps);
    }
  }
  if constexpr (NT == 1 && !SWIGLU) {
    if (parts.ranks > 1) {
      return launch(options, mmvq_tiles<Format, NT, W, D, BLOCKS, SWIGLU, true, true>, grid, block, shared,
                    stream, parts, acts, nt, id, row_steps);
    }
  }
  return launch(options, mmvq_tiles<Format, NT, W, D, BLOCKS, SWIGLU, true>, grid, block, shared, stream,
                parts, acts, nt, id, row_steps);
}

inline Status aligned_operands(const MmvqActs& acts, const Parts& parts) {
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  bool all = aligned(acts.planes) && aligned(parts.planes);
  for (const MmvqPart& p : parts.part) all = all && aligned(p.tiles);
  return all ? Status{} : Status::error("weights and activations must begin at a multiple of 16 bytes");
}

template <class Format, bool SWIGLU>
Status launch_any(const Parts& parts, const MmvqActs& acts, int nt, int id, Stream& stream,
                  bool programmatic) {
  if (Status ok = aligned_operands(acts, parts); !ok.ok()) return ok;
  if (acts.squares != nullptr && nt != 1) {
    return Status::error("mmvq_tiles: only a token alone can be normalised here, and nt is " +
                         std::to_string(nt));
  }
  const Plan plan = plan_of<Format, SWIGLU>({id, acts.squares != nullptr || parts.planes != nullptr},
                                            shared_memory_limit());
  const auto go = [&]<int NT>() {
    if constexpr (!SWIGLU) {
      if (plan == Format::kShort)
        return launch_parts<Format, NT, Format::kShort, SWIGLU>(parts, acts, nt, id, stream, programmatic);
      if (plan == Format::kLong)
        return launch_parts<Format, NT, Format::kLong, SWIGLU>(parts, acts, nt, id, stream, programmatic);
    }
    if (plan == kOneBlock<Format>)
      return launch_parts<Format, NT, kOneBlock<Format>, SWIGLU>(parts, acts, nt, id, stream, programmatic);
    return launch_parts<Format, NT, kFewWarps<Format>, SWIGLU>(parts, acts, nt, id, stream, programmatic);
  };
  return nt == 1 ? go.template operator()<1>() : go.template operator()<tile_acts::kMostTokens>();
}

inline Status planes_supported(long long nt, long long od) {
  if (nt == 1 && od % kQ8ActsPerBlock == 0) return {};
  return Status::error("mmvq_tiles: planes of results are one token's and whole blocks of " +
                       std::to_string(kQ8ActsPerBlock) + ", not nt " + std::to_string(nt) + " and od " +
                       std::to_string(od));
}

/// Matrices of one format as parts of a launch.
template <class Format>
Status set_parts(Parts& parts, std::span<const MmvqPart> matrices, int nt, int id) {
  if (matrices.empty() || matrices.size() > kMostMmvqParts) {
    return Status::error("mmvq_tiles: 1 to " + std::to_string(kMostMmvqParts) + " matrices at once, not " +
                         std::to_string(matrices.size()));
  }
  for (std::size_t p = 0; p < kMostMmvqParts; ++p) {
    parts.first[p + 1] = parts.first[p];
    if (p >= matrices.size()) continue;
    const MmvqPart& m = matrices[p];
    if (Status ok = mmvq_tiles_supported(Format::Block::kType, {nt, m.od, id}); !ok.ok()) return ok;
    parts.part[p] = m;
    parts.first[p + 1] += static_cast<int>(row_tiles(m.od));
  }
  return {};
}

/// launch_mmvq_tiles_two for two formats.
template <class A, class B>
Status launch_two_formats(std::span<const MmvqPart> of_a, std::span<const MmvqPart> of_b,
                          const MmvqActs& acts, int id, Stream& stream, bool programmatic) {
  static constexpr Plan PLAN = kOneBlock<A>;
  constexpr int W = PLAN.warps, DA = PLAN.tiles,
                DB = static_cast<int>(ring_bytes<A>(PLAN) /
                                      (static_cast<std::size_t>(W) * tile_bytes<typename B::Block>()));
  static_assert(DB > 0);
  Parts a{}, b{};
  if (Status ok = set_parts<A>(a, of_a, 1, id); !ok.ok()) return ok;
  if (Status ok = set_parts<B>(b, of_b, 1, id); !ok.ok()) return ok;
  for (const Parts* parts : {&a, &b}) {
    if (Status ok = aligned_operands(acts, *parts); !ok.ok()) return ok;
  }
  const int sms = multiprocessor_count(), units_a = a.first[kMostMmvqParts],
            units_b = b.first[kMostMmvqParts];
  if (sms < 2) return Status::error("mmvq_tiles_two: needs two multiprocessors");
  // Blocks in the proportion of the bytes.
  const int all = std::min(sms, units_a + units_b);
  const double bytes_a = static_cast<double>(units_a) * tile_bytes<typename A::Block>(),
               bytes_b = static_cast<double>(units_b) * tile_bytes<typename B::Block>();
  const int share_b = std::clamp(static_cast<int>(all * bytes_b / (bytes_a + bytes_b)), 1, all - 1);
  const int blocks_a = std::min(units_a, all - share_b), blocks_b = std::min(units_b, share_b);
  const auto deal = [](Parts& parts, int units, int blocks, long long row_steps, int tiles) {
    parts.unit = parts.ranks = 1;
    parts.share = units / blocks;
    parts.more = units % blocks;
    const long long turns = parts.share + (parts.more > 0 ? 1 : 0);
    parts.early = turns * row_steps > static_cast<long long>(W) * tiles ? std::min(PLAN.early, tiles) : tiles;
  };
  const auto steps_a = static_cast<int>(steps<typename A::Block>(id)),
             steps_b = static_cast<int>(steps<typename B::Block>(id));
  deal(a, units_a, blocks_a, steps_a, DA);
  deal(b, units_b, blocks_b, steps_b, DB);
  const std::size_t shared = ring_bytes<A>(PLAN) + staged_bytes<1>(id),
                    both = shared + 2 * fixed_bytes<1, W, false>();
  if (both > shared_memory_limit()) {
    return Status::error("mmvq_tiles_two: rows of " + std::to_string(id) +
                         " activations and the weights under way take " + std::to_string(both) +
                         " bytes of shared memory; a block of this device has " +
                         std::to_string(shared_memory_limit()));
  }
  LaunchOptions options;
  options.programmatic = programmatic;
  return launch(options, mmvq_tiles_two<A, B, W, DA, DB>, dim3(static_cast<unsigned>(blocks_a + blocks_b)),
                dim3(32 * W), shared, stream, a, b, blocks_a, acts, id, steps_a, steps_b);
}

/// launch_mmvq_tiles for one format.
template <class Format>
Status launch_format(std::span<const MmvqPart> matrices, const MmvqActs& acts, int nt, int id, Stream& stream,
                     bool programmatic, const MmvqPlanes& also = {}) {
  Parts parts{};
  if (Status ok = set_parts<Format>(parts, matrices, nt, id); !ok.ok()) return ok;
  if (also.planes != nullptr) {
    if (Status ok = planes_supported(nt, matrices[0].od); !ok.ok()) return ok;
    if (matrices.size() != 1 || also.weight == nullptr || also.squares == nullptr) {
      return Status::error(
          "mmvq_tiles: planes of results are those of one matrix, with weights and squares for a "
          "normalisation");
    }
    parts.planes = static_cast<unsigned char*>(also.planes);
    parts.weight = also.weight;
    parts.squares = also.squares;
  }
  return launch_any<Format, false>(parts, acts, nt, id, stream, programmatic);
}

/// launch_mmvq_tiles_swiglu for one format.
template <class Format>
Status launch_swiglu_format(const void* gate, const void* up, const MmvqActs& acts, float* out, void* planes,
                            Shape s, Stream& stream, bool programmatic) {
  if (Status ok = mmvq_tiles_supported(Format::Block::kType, s); !ok.ok()) return ok;
  if ((out != nullptr) == (planes != nullptr)) {
    return Status::error("mmvq_tiles: with a gate, results go either to f32 rows or to planes, one of them");
  }
  if (planes != nullptr) {
    if (Status ok = planes_supported(s.nt, s.od); !ok.ok()) return ok;
  }
  Parts parts{};
  const int od = static_cast<int>(s.od), rows16 = static_cast<int>(row_tiles(s.od));
  parts.part[0] = {gate, out, od};
  parts.part[1] = {up, out, od};
  parts.first[1] = rows16;
  parts.first[2] = parts.first[3] = 2 * rows16;
  parts.planes = static_cast<unsigned char*>(planes);
  return launch_any<Format, true>(parts, acts, static_cast<int>(s.nt), static_cast<int>(s.id), stream,
                                  programmatic);
}

}  // namespace tiles

/// out[nt][od] = acts[nt][id] . weights[od][id]^T for one to three matrices of a type, with bias and residual as the
/// parts say. A token's result is the same bits for every nt and whatever other parts there are, but for rows
/// that come unnormalised or also go to planes, whose sums may be added up in another order. Does not synchronise.
/// @param also of one matrix and one token, od % 32 == 0: the row for the next product, beside `out`
inline Status launch_mmvq_tiles(WeightType type, std::span<const MmvqPart> matrices, const MmvqActs& acts,
                                int nt, int id, Stream& stream, bool programmatic = false,
                                const MmvqPlanes& also = {}) {
  return tiles::with_tile_format(type, [&](auto format) -> Status {
    return tiles::launch_format<decltype(format)>(matrices, acts, nt, id, stream, programmatic, also);
  });
}

/// Whether launch_mmvq_tiles_two takes these types, in this order: mixes that files have of a layer's Q, K and V.
constexpr bool mmvq_tiles_two_supported(WeightType a, WeightType b) {
  return (a == WeightType::q4_k || a == WeightType::q5_k) && b == WeightType::q6_k;
}
/// launch_mmvq_tiles for one token and matrices of two types, all of rows of `id`, in one launch. The bits are those of no
/// other launch: sums are added up in an order of their own.
inline Status launch_mmvq_tiles_two(WeightType type_a, std::span<const MmvqPart> of_a, WeightType type_b,
                                    std::span<const MmvqPart> of_b, const MmvqActs& acts, int id,
                                    Stream& stream, bool programmatic = false) {
  if (!mmvq_tiles_two_supported(type_a, type_b)) {
    return Status::error(std::string("mmvq_tiles_two: takes q4_k or q5_k with q6_k, not ") +
                         info(type_a).name + " with " + info(type_b).name);
  }
  if (type_a == WeightType::q4_k) {
    return tiles::launch_two_formats<tiles::TileQ4_K, tiles::TileQ6_K>(of_a, of_b, acts, id, stream,
                                                                       programmatic);
  }
  return tiles::launch_two_formats<tiles::TileQ5_K, tiles::TileQ6_K>(of_a, of_b, acts, id, stream,
                                                                     programmatic);
}

/// out[nt][od] = silu(acts . gate^T) * (acts . up^T), silu(z) = z / (1 + e^-z): both matrices [od][id] in tiles of one
/// type. Otherwise as the other.
/// @param out [nt][od], or null
/// @param planes where `out` is null: tile_acts::bytes(1, od), the result as int8 planes, nt 1 and od % 32 == 0
inline Status launch_mmvq_tiles_swiglu(WeightType type, const void* gate, const void* up,
                                       const MmvqActs& acts, float* out, void* planes, Shape s,
                                       Stream& stream, bool programmatic = false) {
  return tiles::with_tile_format(type, [&](auto format) -> Status {
    return tiles::launch_swiglu_format<decltype(format)>(gate, up, acts, out, planes, s, stream,
                                                         programmatic);
  });
}

/// Upper bound on the f32 roundings that a term meets in mmvq_tiles: with its sub-block (the scale, two products and a
/// conversion), along its lane, over lanes and warps, and with a bias and a residual.
inline double mmvq_tiles_roundings(WeightType type, long long id) {
  const double span = info(type).block_elems == 32 ? 128 : 256,
               row_steps = static_cast<double>((id + 255) / 256 * 256) / span;
  const double most_warps = 16, fewest_warps = 4;
  const double a_step =
      info(type).block_elems == 32 ? 2 : 4;  // additions to the lane's sum, with those of minima
  return 4 + a_step * (row_steps / fewest_warps + 1) + 2 + most_warps + 2;
}

}  // namespace ladder
