// RUNG      token_kernel: whole tokens of a small model in one launch.
// PREV      five launches a layer: each ends when its last block does, and the next begins with an empty ring
// COMPUTES  the logits after each of `tokens` tokens, the first one given, every other the largest logit's place before it:
//           a layer is x += output . attention(rotated q, k, v of norm(x)), then x += down . (silu(gate) * up of norm(x))
// LAYOUT    weights in tiles (tiles.cuh), all of a layer of one type; the embedding's rows as in the file; caches f16
//           [layers][context][kv_heads][head_dim]; between blocks packets (exchange.cuh)
// MAP       grid(one block a multiprocessor) block(512), all resident. A block owns, for the whole kernel: heads (with their
//           rows of q, k, v), sixteens of rows of output and down (and of x), pairs of sixteens of gate and up, sixteens
//           of the head. Its warps take every 16th tile of what is multiplied
// NEEDS     sm_90 and a cooperative launch (on the emulator one block); head_dim 64 or 128, rows multiples of 32 (of 256
//           for such blocks), an embedding of the head's type: checked by token_supported, and said in its error
// TRAFFIC   every weight once, cached keys and values once for each head of their group, from position kDeep on once
//           (attend.cuh); 16 bytes for two f32 or 12 bytes of int8 between blocks      WORK 2 a weight int8_op
// LOOK FOR  SASS: UBLKCP, SYNCS, LDG.E.128.STRONG.GPU, IMMA.16832; no LDL or STL between IMMA, no MEMBAR but at a token's end
// EXPECT    five exchanges a layer, of which two overlap: each some trips to L2 and a product from shared memory, 3 us.
//           Weights do not wait for them: the ring holds what several of them need
// BUILD     part of the engine of chapters/09-qwen; tested by kernels/token/test_token.cpp
//
// The order of a block's tiles is known from the start, whatever tokens come: so one thread asks for them, in that order,
// as places of the ring become free, across layers and tokens. What a product needs has mostly come before its activations.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/attention/powers.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/mbarrier.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/device/tma.cuh"
#include "kernels/elementwise/argmax.cuh"
#include "kernels/elementwise/rope_store.cuh"
#include "kernels/mmvq/mmvq_tiles_formats.cuh"
#include "kernels/mmvq/tile_acts.cuh"
#include "kernels/mmvq/tiles.cuh"
#include "kernels/quant/dequantize.cuh"
#include "kernels/token/attend.cuh"
#include "kernels/token/exchange.cuh"

namespace ladder {

namespace token {

inline constexpr int kPlaceBytes = 16128;  ///< of the ring: 14 tiles of Q4_0, 7 of Q8_0
inline constexpr int kMostPlaces = 16, kLeastPlaces = 4;
inline constexpr int kMostPieces = 192,
                     kMostLoads = 512;  ///< runs of tiles of a block, and copies that bring them
inline constexpr int kGateUnits = 2;    ///< pairs of sixteens of gate and up, summed up together
inline constexpr int kTurns = 8;        ///< sixteens of other matrices, summed up together
inline constexpr int kDeep = 512;       ///< position from which on all blocks share attention
static_assert(4 * kGateUnits <= kTurns && 128 / tiles::kRows <= kTurns);

enum Matrix : int { kQ, kK, kV, kOutput, kGate, kUp, kDown, kMatrices };  ///< kMatrices: the head

/// Of a layer, in device memory.
struct LayerWeights {
  const unsigned char* tiles[kMatrices];
  const float* bias[3];  // of q, k, v
  const float *attn_norm, *ffn_norm;
};

/// A run of tiles that lie side by side, whose first sixteen rows are turn `turn` of their batch.
struct Piece {
  int tiles, turn;
};
/// A copy that brings some of them to a place of the ring.
struct Load {
  int matrix;
  unsigned first16, bytes;  // from the matrix's beginning, in 16 bytes
};
/// Pieces whose rows are summed up together.
struct Batch {
  int end;           // of its pieces; they begin where those before it end
  int first, count;  // heads, sixteens or pairs of sixteens
};

struct Range {
  int first, count;
};
/// The part-th of so many parts of 0 .. total-1, as even as possible; nothing beyond the last part.
__host__ __device__ constexpr Range share(int total, int parts, int part) {
  if (part >= parts) return {total, 0};
  const int each = total / parts, more = total % parts;
  return {part * each + (part < more ? part : more), each + (part < more ? 1 : 0)};
}

}  // namespace token

/// The model, what the kernel works on, and the tokens of a launch. All in device memory.
struct TokenProgram {
  const token::LayerWeights* layers = nullptr;       ///< [layer_count]
  const unsigned char* head = nullptr;               ///< [vocabulary][embedding] in tiles
  const void* rows = nullptr;                        ///< the embedding's, of the same type, as in a file
  const float* output_norm = nullptr;                ///< [embedding]
  const float *cosines = nullptr, *sines = nullptr;  ///< [context][head_dim / 2]
  __half *keys = nullptr, *values = nullptr;         ///< [layer_count][context][kv_heads][head_dim]
  Packet* packets = nullptr;                         ///< token_packets(), zero before the first launch
  float* logits = nullptr;  ///< [vocabulary], of the last token; may be the host's memory
  int* ids = nullptr;       ///< [tokens] the largest logit's place, -1 for a NaN; or null
  HeadShape heads{};
  int layer_count = 0, embedding = 0, feed_forward = 0, vocabulary = 0, context = 0;
  float epsilon = 0.0f;
  int first_token = 0, position = 0, tokens = 1;
  unsigned step = 0;  ///< grows by token_steps() from launch to launch, and wraps around
};

namespace token {

/// What blocks send each other: where each kind of row begins in TokenProgram::packets.
struct Rows {
  int x, between, queries, keys, mixed, gated, best, partial, end;
  Rows(const HeadShape& heads, int feed_forward, int blocks)
      : x(0),
        between(heads.q_length() / tiles::kRows * kFloatPackets),
        queries(2 * between),
        keys(3 * between),  // and values
        mixed(keys + 2 * (heads.kv_length() / tiles::kRows) * kFloatPackets),
        gated(mixed + heads.q_length() / 32 * kBlockPackets),
        best(gated + feed_forward / 32 * kBlockPackets),
        partial(best + blocks),
        end(partial + attend_packets(heads, blocks)) {}
};

/// How work is divided over blocks.
struct Division {
  int blocks, owners, workers;
  Division(const TokenProgram& p, int all)
      : blocks(all),
        owners(std::min(p.embedding / tiles::kRows, all)),
        workers(all - p.heads.heads >= (all + 1) / 2 ? all - p.heads.heads : all) {}
  /// Heads are dealt from the last block on: the first one of a block, the others so many blocks further on.
  __host__ __device__ int first_head(int block) const { return blocks - 1 - block; }
  /// Sixteens of k, then of v: to blocks without heads before others.
  __host__ __device__ int first_key(int heads, int block) const {
    return (2 * blocks - 1 - heads % blocks - block) % blocks;
  }
  /// Sixteens of x.
  __host__ __device__ Range own(int embedding, int block) const {
    return share(embedding / tiles::kRows, owners, block);
  }
  /// Pairs of sixteens of gate and up: first to blocks that own nothing, and none to those with heads if there are
  /// enough others.
  __host__ __device__ Range gate(int feed_forward, int block) const {
    if (block >= workers) return {0, 0};
    return share(feed_forward / 32, workers, (block + workers - owners % workers) % workers);
  }
  /// Sixteens of the head.
  __host__ __device__ Range head(int vocabulary, int block) const {
    return share((vocabulary - 1) / tiles::kRows + 1, blocks, block);
  }
};

/// Bytes of dynamic shared memory, part by part.
struct Layout {
  int zeros, row, mixed, gated, sums, squares, residual, attention, layers, ring, places;
  /// @param limit what a block may have
  Layout(const TokenProgram& p, int blocks, std::size_t limit);
  [[nodiscard]] std::size_t bytes() const {
    return static_cast<std::size_t>(ring) + static_cast<std::size_t>(places) * kPlaceBytes;
  }
};

/// All that the host knows, in the kernel's constants.
struct Plan {
  TokenProgram program;
  Division division;
  Rows rows;
  Layout at;
  int row_steps, gated_steps, head_steps;  // tiles along a row
};

/// Parts of a layer, and the head.
enum Stage : int { kKeyRows, kAttention, kOutputRows, kGateRows, kDownRows, kHeadRows, kStages };

/// Shared memory that does not depend on the model.
struct alignas(16) Fixed {
  unsigned long long best[kWarps];
  float root;
  Range own;
  AttendArgs attention;
  // This block's work, in its order: batches are summed up together, pieces multiplied one after the other.
  Batch batch[kMostPieces];
  Piece piece[kMostPieces];
  Load load[kMostLoads];
  int begin[kStages + 1];       // of each stage, in batches
  int layer_loads, head_loads;  // copies of a layer, and of the head behind them
  int next_token, next_layer, next_load,
      next_place;  // of the warp that fills the ring: the next copy, and its place
  std::uint64_t barrier[kMostPlaces];
  float2 angle[64];  // cosine and sine, of the token's position
};

/// A block's work, in its order.
/// @param sink has begin(stage), piece(matrix, first tile, tiles, turn), end_batch(first, count)
template <class Sink>
__host__ __device__ void list_work(const Plan& plan, int block, Sink& sink) {
  const TokenProgram& p = plan.program;
  const int of_head = p.heads.head_dim / tiles::kRows, of_keys = p.heads.kv_heads * of_head;
  const Range own = plan.division.own(p.embedding, block), gate = plan.division.gate(p.feed_forward, block);
  const auto rows_of = [&](int matrix, const Range& range, int steps) {
    for (int i = 0; i < range.count; i += kTurns) {
      const int count = kTurns < range.count - i ? kTurns : range.count - i;
      sink.piece(matrix, (range.first + i) * steps, count * steps, 0);
      sink.end_batch(range.first + i, count);
    }
  };
  sink.begin(kKeyRows);
  for (int i = plan.division.first_key(p.heads.heads, block); i < 2 * of_keys; i += plan.division.blocks) {
    sink.piece(i < of_keys ? kK : kV, i % of_keys * plan.row_steps, plan.row_steps, 0);
    sink.end_batch(i, 1);
  }
  sink.begin(kAttention);
  for (int h = plan.division.first_head(block); h < p.heads.heads; h += plan.division.blocks) {
    sink.piece(kQ, h * of_head * plan.row_steps, of_head * plan.row_steps, 0);
    sink.end_batch(h, 1);
  }
  sink.begin(kOutputRows);
  rows_of(kOutput, own, plan.row_steps);
  sink.begin(kGateRows);
  for (int i = 0; i < gate.count; i += kGateUnits) {
    const int count = kGateUnits < gate.count - i ? kGateUnits : gate.count - i, first = gate.first + i;
    sink.piece(kGate, 2 * first * plan.row_steps, 2 * count * plan.row_steps, 0);
    sink.piece(kUp, 2 * first * plan.row_steps, 2 * count * plan.row_steps, 2 * count);
    sink.end_batch(first, count);
  }
  sink.begin(kDownRows);
  rows_of(kDown, own, plan.gated_steps);
  sink.begin(kHeadRows);
  rows_of(kMatrices, plan.division.head(p.vocabulary, block), plan.head_steps);
  sink.begin(kStages);
}
/// Tables of it. @tparam WRITE whether there are any; or they are only counted
template <bool WRITE>
struct Tables {
  Fixed* fixed = nullptr;
  int layer_tile = 0, head_tile = 0;  // bytes
  int pieces = 0, batches = 0, loads = 0;
  __host__ __device__ void begin(int stage) {
    if constexpr (WRITE) {
      fixed->begin[stage] = batches;
      if (stage == kHeadRows) fixed->layer_loads = loads;
    }
  }
  __host__ __device__ void piece(int matrix, int first, int tiles, int turn) {
    if constexpr (WRITE) fixed->piece[pieces] = {tiles, turn};
    ++pieces;
    const int bytes = matrix == kMatrices ? head_tile : layer_tile, most = kPlaceBytes / bytes;
    for (int i = 0; i < tiles; i += most, ++loads) {
      if constexpr (WRITE)
        fixed->load[loads] = {matrix, static_cast<unsigned>(first + i) * static_cast<unsigned>(bytes / 16),
                              static_cast<unsigned>((most < tiles - i ? most : tiles - i) * bytes)};
    }
  }
  __host__ __device__ void end_batch(int first, int count) {
    if constexpr (WRITE) fixed->batch[batches] = {pieces, first, count};
    ++batches;
  }
};

inline Layout::Layout(const TokenProgram& p, int blocks, std::size_t limit) {
  const auto planes = [](int id) { return static_cast<int>(tile_acts::group_bytes(1, id)); };
  const int head_dim = p.heads.head_dim, owned = (p.embedding / tiles::kRows - 1) / blocks + 1;
  zeros = (static_cast<int>(sizeof(Fixed)) + 15) / 16 * 16;
  row = zeros + tiles::Columns::kZeros;
  mixed = row + planes(p.embedding);
  gated = mixed + planes(p.embedding);
  sums = (gated + planes(p.feed_forward) + 15) / 16 * 16;
  squares = sums + std::max(2 * kTurns * kWarps * tiles::kRows * 4,
                            head_dim == 64 ? Attend<64>::kScratchBytes : Attend<128>::kScratchBytes);
  residual = (squares + p.embedding / 32 * 4 + 15) / 16 * 16;
  attention = residual + owned * tiles::kRows * 4;
  layers = (attention + (2 * head_dim + kWarps * head_dim + (kWarps + 1) * (2 + head_dim / 32)) * 4 + 15) /
           16 * 16;
  ring = (layers + p.layer_count * static_cast<int>(sizeof(LayerWeights)) + 127) / 128 * 128;
  const long long room = static_cast<long long>(limit) - ring;
  places = static_cast<int>(std::max(0LL, std::min<long long>(kMostPlaces, room / kPlaceBytes)));
}

/// Attention of many positions: a function of its own, whose registers others do not have to leave free.
template <int HEAD_DIM>
[[gnu::noinline]] __device__ void attend_together(const AttendArgs& args) {
  Attend<HEAD_DIM>{args}.finish();
}

/// One block of the grid, at work.
template <class LayerFormat, class HeadFormat, int HEAD_DIM>
struct Worker {
  static constexpr int LAYER_BYTES = tiles::tile_bytes<typename LayerFormat::Block>(),
                       HEAD_BYTES = tiles::tile_bytes<typename HeadFormat::Block>();
  using Rows16 = float[kWarps][tiles::kRows];  // sums of a turn

  const Plan& plan;
  const TokenProgram& p;
  unsigned char* const shared;
  Fixed& fixed;
  const int blocks, block;
  int lane, warp, thread;

  int place = 0;        // of the ring, that is multiplied next
  unsigned parity = 0;  // of its barrier
  int piece = 0;        // likewise
  int side = 0;         // half of the sums that the next batch takes
  int used = 0;         // places since the ring was filled
  float4 ahead;         // the thread's weights of the next normalisation

  __device__ __forceinline__ explicit Worker(const Plan& of)
      : plan(of),
        p(of.program),
        shared(dynamic_shared<unsigned char>()),
        fixed(*dynamic_shared<Fixed>()),
        blocks(static_cast<int>(gridDim.x)),
        block(static_cast<int>(blockIdx.x)) {
    know_thread();
  }
  /// The thread's numbers, anew: the compiler takes them for results of shuffles. Otherwise it would make up, before all
  /// loops, whatever depends on them in any part of the kernel, and would have no registers to keep that in.
  __device__ __forceinline__ void know_thread() {
    lane = static_cast<int>(tiles::kept(threadIdx.x % 32));
    // From lane 0: so the compiler knows that all lanes have the same, and branches on it are those of a warp.
    warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
    thread = 32 * warp + lane;
  }

  __device__ __forceinline__ float* floats(int offset) const {
    return reinterpret_cast<float*>(shared + offset);
  }
  __device__ __forceinline__ const LayerWeights& layer(int l) const {
    return reinterpret_cast<const LayerWeights*>(shared + plan.at.layers)[l];
  }
  /// On the emulator a block waits for nobody else; what its own threads sent must be there.
  __device__ __forceinline__ static void meet() {
#if !defined(__CUDACC__)
    __syncthreads();
#endif
  }

  // 1. The ring: filled by one thread, in the order in which it is emptied -------------------------------------------

  // ANCHOR: token_fill
  /// Asks for as many places of tiles as have been used, a lane for a place. By one warp, when no other reads them.
  __device__ __forceinline__ void fill() {
    int token = fixed.next_token, l = fixed.next_layer, load = fixed.next_load + lane;  // of the lane's place
    const int place_next = fixed.next_place;
    const int of_layer = fixed.layer_loads, of_head = fixed.head_loads;
    while (token < p.tokens) {
      const int all = l < p.layer_count ? of_layer : of_head;
      if (load < all) break;
      load -= all;
      if (++l > p.layer_count) l = 0, ++token;
    }
    if (lane < used && token < p.tokens) {
      const Load what = fixed.load[l < p.layer_count ? load : of_layer + load];
      const int to =
          place_next + lane < plan.at.places ? place_next + lane : place_next + lane - plan.at.places;
      const unsigned char* const tiles = l < p.layer_count ? layer(l).tiles[what.matrix] : p.head;
      std::uint64_t* const barrier = &fixed.barrier[to];
      mbarrier_arrive_expect_bytes(barrier, what.bytes);
      bulk_copy(shared + plan.at.ring + to * kPlaceBytes,
                tiles + static_cast<unsigned long long>(what.first16) * 16, what.bytes, barrier);
    }
    __syncwarp();  // all lanes have read what is written now
    if (lane == used) {
      fixed.next_token = token, fixed.next_layer = l, fixed.next_load = load;
      fixed.next_place =
          place_next + used < plan.at.places ? place_next + used : place_next + used - plan.at.places;
    }
    __syncwarp();  // and it is there for the next time
    used = 0;
  }
  // ANCHOR_END: token_fill

  // ANCHOR: token_multiply
  /// Tiles of a piece, whose first sixteen rows are turn `turn` of this half of the sums. Sums of a row are told apart by
  /// step modulo kWarps, as in mmvq_tiles.
  template <class Format>
  __device__ __forceinline__ void multiply(int all, int steps, int turn, int planes, int id) {
    constexpr int BYTES = tiles::tile_bytes<typename Format::Block>(), PER_PLACE = kPlaceBytes / BYTES;
    constexpr int PAIRS = tiles::Tile<typename Format::Block>::kSteps / 2;
    const int t = lane % 4;
    tiles::Codes<1> codes;
    codes.begin<Format::kHalves>(shared + planes, shared + plan.at.zeros, 2 * PAIRS * 32, lane);
    const tiles::LaneConstants<Format> constants(t);
    const unsigned char* const scales = shared + planes + tile_acts::scale_at(t, 0, 1, id);
    Rows16* const to = reinterpret_cast<Rows16*>(shared + plan.at.sums) + side * kTurns;
    int tile = warp, step = warp;
    while (step >= steps) step -= steps, ++turn;
    int sum_at = step;
    tiles::LaneSums<1> sums;
#pragma unroll 1
    for (int first = 0; first < all; first += PER_PLACE) {
      const int end = min(first + PER_PLACE, all);
      if (tile < end) mbarrier_wait(&fixed.barrier[place], parity);
      __syncwarp();  // lanes have waited each for itself, and a shuffle of lanes that are apart takes long
      const unsigned char* const from = shared + plan.at.ring + place * kPlaceBytes;
#pragma unroll 1
      while (tile < end) {
        typename Format::template Raw<1> raw;
        raw.template load<tiles::FromShared>(from + (tile - first) * BYTES, lane);
        tiles::multiply_tile<Format, 1>(raw, codes, scales + step * (PAIRS * 16), step, t, constants, sums);
        tile += kWarps;
        step += kWarps;
        if (step < steps) continue;
        // Four lanes have shares of rows g and g + 8: the even ones take those of the first, the odd ones of the other.
        float sum = t % 2 == 0 ? sums.v[0][0][0] : sums.v[0][1][0];
        sum += __shfl_xor_sync(kAllLanes, t % 2 == 0 ? sums.v[0][1][0] : sums.v[0][0][0], 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        if (t < 2) to[turn][sum_at][lane / 4 + 8 * t] = sum;
        sums = {};
        while (step >= steps) step -= steps, ++turn;
        sum_at = step;
      }
      ++used;
      if (++place == plan.at.places) place = 0, parity ^= 1u;
    }
  }
  // ANCHOR_END: token_multiply
  /// A row's sum.
  __device__ __forceinline__ float sum_of(int turn, int row, int steps) const {
    const Rows16& of = reinterpret_cast<const Rows16*>(shared + plan.at.sums)[side * kTurns + turn];
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += w < steps ? of[w][row] : 0.0f;
    return sum;
  }

  // 2. Rows from other blocks, and to them --------------------------------------------------------------------------

  /// Weights of the next normalisation: asked for long before they are wanted, because they come from afar.
  __device__ __forceinline__ void take_ahead(const float* norm) {
    const int b = min(4 * warp + lane / 8, p.embedding / 32 - 1);
    ahead = *reinterpret_cast<const float4*>(norm + 32 * b + lane % 8 * 4);
  }
  /// x times the normalisation's weights as int8, eight lanes a block of 32; the factor that is common to the row follows as
  /// fixed.root. @param row of packets, or null for the embedding of `id` @param next weights of the normalisation after it
  __device__ __forceinline__ void take_x(const Packet* row, unsigned step, const float* norm, int id,
                                         const float* next) {
    meet();
    const int n = p.embedding / 32, q = lane % 8;
#pragma unroll 1
    for (int b0 = 4 * warp; b0 < n; b0 += 4 * kWarps) {
      const int b = min(b0 + lane / 8, n - 1),
                i = 32 * b + 4 * q;  // lanes beyond the row repeat its last block
      const float4 w = b0 == 4 * warp ? ahead : *reinterpret_cast<const float4*>(norm + i);
      float4 x;
      if (row == nullptr) {
        x = embedded(id, i);
      } else {
        Packet got[2];
        wait_packets(
            got, [&](int k) { return row + i / 2 + k; }, step);
        const Packet &a = got[0], &c = got[1];
        x = make_float4(__uint_as_float(a.word[0]), __uint_as_float(a.word[1]), __uint_as_float(c.word[0]),
                        __uint_as_float(c.word[1]));
      }
      __syncwarp();  // lanes have waited each for itself
      float squares = x.x * x.x + x.y * x.y + (x.z * x.z + x.w * x.w);
      x = make_float4(x.x * w.x, x.y * w.y, x.z * w.z, x.w * w.w);
      unsigned largest = q8_largest(x);
#pragma unroll
      for (int offset = 1; offset < 8; offset *= 2) {
        largest = max(largest, __shfl_xor_sync(kAllLanes, largest, offset));
        squares += __shfl_xor_sync(kAllLanes, squares, offset);
      }
      const Q8Scale scale = quick_scale(largest);
      const unsigned codes = q8_codes(x, scale.inverse);
      int half = q8_add(codes, 0);  // of sixteen: four lanes
      half += __shfl_xor_sync(kAllLanes, half, 1);
      half += __shfl_xor_sync(kAllLanes, half, 2);
      const int upper = __shfl_xor_sync(kAllLanes, half, 4);
      unsigned char* const to = shared + plan.at.row;
      *reinterpret_cast<unsigned*>(to + 32 * b + 4 * q) = codes;
      if (q == 0) {
        *reinterpret_cast<uint2*>(to + tile_acts::scale_at(b, 0, 1, p.embedding)) =
            make_uint2(__float_as_uint(scale.d), pack_sums(half, upper));
        floats(plan.at.squares)[b] = squares;
      }
    }
    take_ahead(next);
    __syncthreads();  // planes and squares are there
    if (warp == kWarps - 1) {
      const float root = tile_acts::root_of(floats(plan.at.squares), p.embedding, p.epsilon);
      if (lane == 0) fixed.root = root;  // read behind the barrier after the next product
    }
  }

  /// Four elements of a token's row; NaN where there is no such token.
  __device__ __forceinline__ float4 embedded(int id, int i) const {
    using Block = typename HeadFormat::Block;
    const float nan = __int_as_float(0x7fffffff);
    if (id < 0 || id >= p.vocabulary) return make_float4(nan, nan, nan, nan);
    const Block* const row =
        static_cast<const Block*>(p.rows) + static_cast<long long>(id) * (p.embedding / Block::kElems);
    return decode_four(row[i / Block::kElems], i % Block::kElems);
  }

  /// Rows that come as int8, see send_codes.
  __device__ __forceinline__ void take_codes(const Packet* row, unsigned step, int planes, int id) const {
    meet();
    const int n = id / 32 * kBlockPackets;
    unsigned char* const to = shared + planes;
    const auto put = [&](const Packet& packet, int i) {
      const int b = i / kBlockPackets, j = i % kBlockPackets;
      *reinterpret_cast<uint2*>(to + 32 * b + 8 * j) = make_uint2(packet.word[0], packet.word[1]);
      if (j < 2) *reinterpret_cast<unsigned*>(to + tile_acts::scale_at(b, 0, 1, id) + 4 * j) = packet.word[2];
    };
#pragma unroll 1
    for (int i0 = 32 * warp; i0 < n; i0 += 2 * kThreads) {
      const int i = i0 + lane;
      Packet got[2];
      wait_packets(
          got,
          [&](int k) -> const Packet* { return i + k * kThreads < n ? row + i + k * kThreads : nullptr; },
          step);
      if (i < n) put(got[0], i);
      if (i + kThreads < n) put(got[1], i + kThreads);
    }
    __syncthreads();  // planes are there
  }
  // 3. Parts of a layer ----------------------------------------------------------------------------------------------

  /// Sums of a batch are added to this block's rows of x, and x goes to all.
  __device__ __forceinline__ void add_to_x(const Batch& of, int steps, Packet* to, unsigned step) const {
    if (warp >= (of.count + 1) / 2) return;
    float* const residual = floats(plan.at.residual) + (of.first - fixed.own.first) * tiles::kRows + thread;
    const bool mine = thread < of.count * tiles::kRows;
    float x = 0.0f;
    if (mine) *residual = x = *residual + sum_of(thread / tiles::kRows, thread % tiles::kRows, steps);
    const float next = __shfl_xor_sync(kAllLanes, x, 1);
    if (mine && lane % 2 == 0)
      store_packet(to + of.first * kFloatPackets + thread / 2,
                   {{__float_as_uint(x), __float_as_uint(next), 0u}, step});
  }

  /// What is added to a lane's row of a sixteen of k, then v.
  __device__ __forceinline__ float key_bias(const Batch& of, const LayerWeights& w) const {
    const int of_keys = p.heads.kv_length() / tiles::kRows;
    return w.bias[of.first < of_keys ? 1 : 2][of.first % of_keys * tiles::kRows + lane % tiles::kRows];
  }
  /// Rows of a sixteen of k or v go to all that have heads of their group.
  __device__ __forceinline__ void send_keys(const Batch& of, float bias, unsigned step) const {
    if (warp > 0) return;
    const float x = lane < tiles::kRows ? sum_of(0, lane, plan.row_steps) * fixed.root + bias : 0.0f;
    const float next = __shfl_xor_sync(kAllLanes, x, 1);
    if (lane < tiles::kRows && lane % 2 == 0)
      store_packet(p.packets + plan.rows.keys + of.first * kFloatPackets + lane / 2,
                   {{__float_as_uint(x), __float_as_uint(next), 0u}, step});
  }

  /// silu(gate) * up of a batch goes to all that own rows of x.
  __device__ __forceinline__ void gate_and_up(const Batch& of, unsigned step) const {
    if (warp >= of.count) return;
    const int turn = thread / tiles::kRows, row = thread % tiles::kRows;
    const float g = sum_of(turn, row, plan.row_steps) * fixed.root,
                u = sum_of(turn + 2 * of.count, row, plan.row_steps) * fixed.root;
    send_codes(g / (1.0f + expf(-g)) * u, p.packets + plan.rows.gated + (of.first + warp) * kBlockPackets,
               step);
  }

  // Attention. With 8 positions of a warp at a time, lane 4 j + m has of key j elements 8 m .. 8 m + 7 of every 32; of the
  // values it has elements 8 (lane % VALUE_LANES) .. + 7 of every so many-th row.
  static constexpr int KEY_LOADS = HEAD_DIM / 32, VALUE_LANES = HEAD_DIM / 8, VALUE_ROWS = 32 / VALUE_LANES,
                       VALUE_LOADS = 8 / VALUE_ROWS, MANY = HEAD_DIM == 64 ? 2 : 1;

  static __device__ __forceinline__ void to_floats(const uint4& v, float (&f)[8]) {
    const unsigned w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(w[i] & 0xffffu)));
      f[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(w[i] >> 16)));
    }
  }
  static __device__ __forceinline__ float weight_of(float score, float highest) {
    return score == -INFINITY ? 0.0f : power_of_two(score - highest);
  }

  /// Positions first .. of a warp, N times eight.
  template <int N>
  struct Rows8 {
    uint4 k[N][KEY_LOADS], v[N][VALUE_LOADS];
    __device__ __forceinline__ void load(const __half* keys, const __half* values, int first, int end,
                                         long long stride, int me) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int of_keys = first + n * 8 * kWarps + me / 4,
                  of_values = first + n * 8 * kWarps + me / VALUE_LANES;
#pragma unroll
        for (int i = 0; i < KEY_LOADS; ++i) {
          k[n][i] = make_uint4(0, 0, 0, 0);
          if (of_keys < end)
            k[n][i] = *reinterpret_cast<const uint4*>(keys + of_keys * stride + 32 * i + me % 4 * 8);
        }
#pragma unroll
        for (int i = 0; i < VALUE_LOADS; ++i) {
          v[n][i] = make_uint4(0, 0, 0, 0);
          if (of_values + i * VALUE_ROWS < end)
            v[n][i] = *reinterpret_cast<const uint4*>(values + (of_values + i * VALUE_ROWS) * stride +
                                                      me % VALUE_LANES * 8);
        }
      }
    }
  };
  /// What a warp has of a head: sums relative to the highest score that it has met.
  struct Softmax {
    float highest = -INFINITY, total = 0.0f, sum[8] = {};
    template <int N>
    __device__ __forceinline__ void add(const Rows8<N>& rows, const float (&q)[HEAD_DIM / 4], int first,
                                        int end, int me) {
      float score[N], most = highest;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < KEY_LOADS; ++i) {
          float f[8];
          to_floats(rows.k[n][i], f);
#pragma unroll
          for (int j = 0; j < 8; ++j) dot += q[8 * i + j] * f[j];
        }
        dot += __shfl_xor_sync(kAllLanes, dot, 1);
        dot += __shfl_xor_sync(kAllLanes, dot, 2);
        score[n] = first + n * 8 * kWarps + me / 4 < end ? dot : -INFINITY;
        most = fmaxf(most, score[n]);
      }
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2)
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, offset));
      const float shrink = weight_of(highest, most);
      highest = most;
      total *= shrink;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] *= shrink;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float weight = weight_of(score[n], most);
        total += weight;
#pragma unroll
        for (int i = 0; i < VALUE_LOADS; ++i) {
          const float w = __shfl_sync(kAllLanes, weight, 4 * (i * VALUE_ROWS + me / VALUE_LANES));
          float f[8];
          to_floats(rows.v[n][i], f);
#pragma unroll
          for (int j = 0; j < 8; ++j) sum[j] += w * f[j];
        }
      }
    }
    /// The lanes' sums to the warp's. @param to [HEAD_DIM]
    __device__ __forceinline__ void store(float* to, int me) {
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) total += __shfl_xor_sync(kAllLanes, total, offset);
      // Lanes with other rows have the same elements: of what two of them have, each adds up one half.
      int at = me % VALUE_LANES * 8;
#pragma unroll
      for (int offset = 16, n = 4; offset >= VALUE_LANES; offset /= 2, n /= 2) {
        const bool second = (me & offset) != 0;
        at += second ? n : 0;
#pragma unroll
        for (int j = 0; j < n; ++j) {
          const float keep = second ? sum[n + j] : sum[j], give = second ? sum[j] : sum[n + j];
          sum[j] = keep + __shfl_xor_sync(kAllLanes, give, offset);
        }
      }
#pragma unroll
      for (int j = 0; j < 8 / VALUE_ROWS; ++j) to[at + j] = sum[j];
    }
  };

  /// What is added to a thread's rows of q.
  __device__ __forceinline__ float2 query_bias(const LayerWeights& w, int h) const {
    if (thread >= HEAD_DIM / 2) return make_float2(0.0f, 0.0f);
    const float* const from = w.bias[0] + h * HEAD_DIM + thread;
    return make_float2(from[0], from[HEAD_DIM / 2]);
  }
  /// A thread's two rows of q, half a head apart.
  __device__ __forceinline__ float2 query(const float2& bias) const {
    constexpr int HALF = HEAD_DIM / 2;
    return make_float2(
        sum_of(thread / tiles::kRows, thread % tiles::kRows, plan.row_steps) * fixed.root + bias.x,
        sum_of((thread + HALF) / tiles::kRows, thread % tiles::kRows, plan.row_steps) * fixed.root + bias.y);
  }
  /// Head h's q to all blocks.
  __device__ __forceinline__ void send_query(int h, const float2& bias, unsigned step) const {
    constexpr int HALF = HEAD_DIM / 2;
    if (thread >= HALF) return;
    const float2 own = query(bias);
    const float low = __shfl_xor_sync(kAllLanes, own.x, 1), high = __shfl_xor_sync(kAllLanes, own.y, 1);
    if (lane % 2 != 0) return;
    Packet* const to = p.packets + plan.rows.queries + (h * HEAD_DIM + thread) / 2;
    store_packet(to, {{__float_as_uint(own.x), __float_as_uint(low), 0u}, step});
    store_packet(to + HALF / 2, {{__float_as_uint(own.y), __float_as_uint(high), 0u}, step});
  }
  /// What all blocks need for a layer's attention of many positions.
  __device__ __forceinline__ AttendArgs attention(int l, int position, unsigned step) const {
    const long long of_layer = static_cast<long long>(l) * p.context * p.heads.kv_length();
    const Packet* const keys = p.packets + plan.rows.keys;
    return {p.heads,
            position,
            blocks,
            block,
            p.keys + of_layer,
            p.values + of_layer,
            p.packets + plan.rows.queries,
            keys,
            keys + p.heads.kv_length() / 2,
            p.packets + plan.rows.mixed,
            p.packets + plan.rows.partial,
            fixed.angle,
            shared + plan.at.sums,
            step};
  }

  /// Head h of this token, whose rows' sums are there: to all that own rows of x.
  /// @param some the first positions of a warp, where one time is enough for all
  __device__ __forceinline__ void attend(int l, int h, int position, const Rows8<1>& some, const float2& bias,
                                         unsigned step) const {
    constexpr int HALF = HEAD_DIM / 2;
    const int group = p.heads.heads / p.heads.kv_heads;
    const long long stride = p.heads.kv_length();
    const long long from = static_cast<long long>(l) * p.context * stride + h / group * HEAD_DIM;
    __half* const keys = p.keys + from;
    __half* const values = p.values + from;
    float* const q = floats(plan.at.attention);       // [HEAD_DIM]
    float* const newest_value = q + HEAD_DIM;         // [HEAD_DIM], as the cache has it
    float* const sums = newest_value + HEAD_DIM;      // [kWarps][HEAD_DIM]
    float* const highest = sums + kWarps * HEAD_DIM;  // [kWarps + 1], the last one of the new position
    float* const totals = highest + kWarps + 1;       // [kWarps + 1]
    float* const weights = totals + kWarps + 1;       // [HEAD_DIM / 32][kWarps + 2]
    const bool few = position <= 8 * kWarps;

    // 1. A thread two rows of q, which it turns.
    if (thread < HALF) {
      const float2 own = query(bias);
      constexpr float SCALE = HEAD_DIM == 64 ? 1.44269504f / 8.0f : 1.44269504f / 11.3137085f;
      const float2 angle = fixed.angle[thread];
      q[thread] = (own.x * angle.x - own.y * angle.y) * SCALE;
      q[thread + HALF] = (own.y * angle.x + own.x * angle.y) * SCALE;
    }
    // And the new position's k and v, which other blocks send, by a warp each. One of the heads of a group stores them.
    constexpr int N = HEAD_DIM / 64;  // packets of a lane: elements 2 lane and 2 lane + 1 of every 64
    float2 fresh[N];
    if (warp >= kWarps - 2) {
      const bool is_k = warp == kWarps - 1;
      const Packet* const row =
          p.packets + plan.rows.keys + ((is_k ? 0 : stride) + h / group * HEAD_DIM) / 2 + lane;
      Packet packet[N];
#pragma unroll
      for (int n = 0; n < N; ++n) packet[n] = load_packet(row + 32 * n);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        packet[n] = wait_packet(row + 32 * n, packet[n], step);
        fresh[n] = make_float2(__uint_as_float(packet[n].word[0]), __uint_as_float(packet[n].word[1]));
      }
      __syncwarp();  // lanes have waited each for itself
      if (is_k) {
        // The other element of a pair is half a head away: in this lane, or in one of the other half of the warp.
        float2 other[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
          other[n] = fresh[N - 1 - n];
          if constexpr (N == 1)
            other[n] = make_float2(__shfl_xor_sync(kAllLanes, fresh[0].x, 16),
                                   __shfl_xor_sync(kAllLanes, fresh[0].y, 16));
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const float sign = (N == 1 ? lane >= 16 : n == 1) ? 1.0f : -1.0f;
          const float2 a = fixed.angle[2 * lane % HALF], b = fixed.angle[2 * lane % HALF + 1];
          fresh[n] = make_float2(fresh[n].x * a.x + sign * (other[n].x * a.y),
                                 fresh[n].y * b.x + sign * (other[n].y * b.y));
        }
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int d = 64 * n + 2 * lane;
        const __half a = __float2half_rn(fresh[n].x), b = __float2half_rn(fresh[n].y);
        if (h % group == 0) {
          __half* const to = (is_k ? keys : values) + position * stride + d;
          to[0] = a, to[1] = b;
        }
        fresh[n] = make_float2(__half2float(a), __half2float(b));
        if (!is_k) newest_value[d] = fresh[n].x, newest_value[d + 1] = fresh[n].y;
      }
    }
    __syncthreads();  // q is there

    // 2. Earlier positions, each warp its own.
    Softmax softmax;
    if (8 * warp < position) {
      float query[HEAD_DIM / 4];
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 16; ++i) {
        const float4 v = *reinterpret_cast<const float4*>(q + i / 2 * 32 + lane % 4 * 8 + i % 2 * 4);
        query[4 * i] = v.x, query[4 * i + 1] = v.y, query[4 * i + 2] = v.z, query[4 * i + 3] = v.w;
      }
      if (few) {
        softmax.add(some, query, 8 * warp, position, lane);
      } else {
#pragma unroll 1
        for (int first = 8 * warp; first < position; first += 8 * kWarps * MANY) {
          Rows8<MANY> many;
          many.load(keys, values, first, position, stride, lane);
          softmax.add(many, query, first, position, lane);
        }
      }
      softmax.store(sums + warp * HEAD_DIM, lane);
      if (lane == 0) highest[warp] = softmax.highest, totals[warp] = softmax.total;
    }
    if (warp == kWarps - 1) {
      float newest = 0.0f;
#pragma unroll
      for (int n = 0; n < N; ++n)
        newest += q[64 * n + 2 * lane] * fresh[n].x + q[64 * n + 2 * lane + 1] * fresh[n].y;
      newest = warp_reduce_sum(newest);
      if (lane == 0) highest[kWarps] = newest, totals[kWarps] = 1.0f;
    }
    __syncthreads();  // all warps' sums are there

    // 3. All of them, in their order.
    if (warp >= HEAD_DIM / 32) return;
    const int warps = min(kWarps, (position + 7) / 8);
    const bool has = lane < warps || lane == kWarps;
    float most = has ? highest[lane] : -INFINITY;
    const float own_highest = most;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2)
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, offset));
    const float weight = has ? power_of_two(own_highest - most) : 0.0f;
    const float total = warp_reduce_sum(has ? weight * totals[lane] : 0.0f);
    float* const mine_of = weights + warp * (kWarps + 1);
    if (lane <= kWarps) mine_of[lane] = weight;
    __syncwarp();  // weights are there
    float out = mine_of[kWarps] * newest_value[thread];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) out += w < warps ? mine_of[w] * sums[w * HEAD_DIM + thread] : 0.0f;
    send_codes(out / total, p.packets + plan.rows.mixed + (h * (HEAD_DIM / 32) + warp) * kBlockPackets, step);
  }

  /// Logits of a batch. @return the best of the thread's and `best`
  __device__ __forceinline__ unsigned long long logits(const Batch& of, bool wanted,
                                                       unsigned long long best) const {
    const int r = of.first * tiles::kRows + thread;
    if (thread >= of.count * tiles::kRows || r >= p.vocabulary) return best;
    const float v = sum_of(thread / tiles::kRows, thread % tiles::kRows, plan.head_steps) * fixed.root;
    if (wanted) p.logits[r] = v;
    return max(best, argmax_key(v, r));
  }

  /// The largest of all threads'. By all threads, of which each has the result.
  __device__ __forceinline__ unsigned long long best_of_block(unsigned long long best) const {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(kAllLanes, best, offset));
    __syncthreads();  // the last ones are read
    if (lane == 0) fixed.best[warp] = best;
    __syncthreads();  // all warps' are there
    for (int w = 0; w < kWarps; ++w) best = max(best, fixed.best[w]);
    return best;
  }
  __device__ __forceinline__ void run() {
    // 1. The ring is filled while tables and planes are made.
    const auto* const from = reinterpret_cast<const unsigned*>(p.layers);
    auto* const to = reinterpret_cast<unsigned*>(shared + plan.at.layers);
    for (int i = thread; i < p.layer_count * static_cast<int>(sizeof(LayerWeights) / 4); i += kThreads)
      to[i] = from[i];
    for (int i = plan.at.zeros / 4 + thread; i < plan.at.sums / 4; i += kThreads)
      reinterpret_cast<unsigned*>(shared)[i] = 0;  // zeros, and planes: what is behind their rows stays zero
    if (thread == 0) {
      Tables<true> tables{&fixed, LAYER_BYTES, HEAD_BYTES};
      list_work(plan, block, tables);
      fixed.head_loads = tables.loads - fixed.layer_loads;
      fixed.own = plan.division.own(p.embedding, block);
      fixed.next_token = fixed.next_layer = fixed.next_load = fixed.next_place = 0;
      for (int i = 0; i < plan.at.places; ++i) mbarrier_init(&fixed.barrier[i], 1);
      mbarrier_init_fence();
    }
    __syncthreads();  // all of it is there
    used = plan.at.places;
    if (warp == kWarps - 1) fill();
    used = 0;
    const bool attends = has(kKeyRows) || has(kAttention);
    take_ahead(norm_from(0, true));

    const int group = p.heads.heads / p.heads.kv_heads;
    int id = p.first_token;
    unsigned step = p.step;  // of the packets that come next
#pragma unroll 1
    for (int n = 0; n < p.tokens; ++n) {
      // 2. A token: its row to those that own it, its angles to those that turn with them.
      const int position = p.position + n;
      const Range own = fixed.own;
      for (int k = thread; k < own.count * tiles::kRows / 4; k += kThreads)
        reinterpret_cast<float4*>(shared + plan.at.residual)[k] =
            embedded(id, own.first * tiles::kRows + 4 * k);
      if (thread < HEAD_DIM / 2) {  // read behind many barriers
        const int angle = position * (HEAD_DIM / 2) + thread;
        fixed.angle[thread] = make_float2(p.cosines[angle], p.sines[angle]);
      }
      const bool last = n + 1 == p.tokens;
      unsigned long long best = 0;

      // 3. Its layers, and behind them the head. What a stage sends has the layer's step. A packet's place is written again
      //    a layer later: by then all that read it have sent what the writer has waited for.
      Packet* const x = p.packets + plan.rows.x;
      Packet* const between = p.packets + plan.rows.between;
#pragma unroll 1
      for (int l = 0; l < p.layer_count; ++l) {
        const LayerWeights& w = layer(l);
        ++step;
        piece = side = 0;
        know_thread();
        const bool deep = position >= kDeep;
        if (attends) {
          float of_key = 0.0f;
          float2 of_query = make_float2(0.0f, 0.0f);
          int key_batch = fixed.begin[kKeyRows];
          if (has(kKeyRows)) of_key = key_bias(fixed.batch[key_batch], w);
          if (has(kAttention)) of_query = query_bias(w, fixed.batch[fixed.begin[kAttention]].first);
          take_x(l > 0 ? x : nullptr, step - 1, w.attn_norm, id, norm_from(l, false));
          batches<LayerFormat>(kKeyRows, plan.row_steps, plan.at.row, p.embedding, [&](const Batch& of) {
            send_keys(of, of_key, step);
            if (++key_batch < fixed.begin[kAttention]) of_key = key_bias(fixed.batch[key_batch], w);
          });
          for (int b = fixed.begin[kAttention]; b < fixed.begin[kOutputRows]; ++b) {
            const int h = fixed.batch[b].first;
            if (b > fixed.begin[kAttention]) of_query = query_bias(w, h);
            Rows8<1> some;
            if (position <= 8 * kWarps) {
              const long long cached =
                  static_cast<long long>(l) * p.context * p.heads.kv_length() + h / group * HEAD_DIM;
              some.load(p.keys + cached, p.values + cached, 8 * warp, position, p.heads.kv_length(), lane);
            }
            multiply_batch<LayerFormat>(fixed.batch[b], plan.row_steps, plan.at.row, p.embedding, false);
            if (deep) {
              send_query(h, of_query, step);
            } else {
              attend(l, h, position, some, of_query, step);
            }
            if (warp == kWarps - 1) fill();
            used = 0;
            side ^= 1;
          }
        }
        if (deep) {
          if (thread == 0) fixed.attention = attention(l, position, step);
          __syncthreads();  // arguments are there, and sums are read
          attend_together<HEAD_DIM>(fixed.attention);
          __syncthreads();  // sums' memory is free
        }
        know_thread();
        if (has(kOutputRows)) {
          take_codes(p.packets + plan.rows.mixed, step, plan.at.mixed, p.embedding);
          batches<LayerFormat>(kOutputRows, plan.row_steps, plan.at.mixed, p.embedding,
                               [&](const Batch& of) { add_to_x(of, plan.row_steps, between, step); });
        }
        know_thread();
        if (has(kGateRows)) {
          take_x(between, step, w.ffn_norm, 0, norm_from(l + 1, true));
          batches<LayerFormat>(kGateRows, plan.row_steps, plan.at.row, p.embedding,
                               [&](const Batch& of) { gate_and_up(of, step); });
        }
        know_thread();
        if (has(kDownRows)) {
          take_codes(p.packets + plan.rows.gated, step, plan.at.gated, p.feed_forward);
          batches<LayerFormat>(kDownRows, plan.gated_steps, plan.at.gated, p.feed_forward,
                               [&](const Batch& of) { add_to_x(of, plan.gated_steps, x, step); });
        }
      }
      know_thread();
      take_x(x, step, p.output_norm, 0, norm_from(0, true));
      batches<HeadFormat>(kHeadRows, plan.head_steps, plan.at.row, p.embedding,
                          [&](const Batch& of) { best = logits(of, last && p.logits != nullptr, best); });

      // 4. The largest logit of all blocks'. The next token needs the best of every block: so no block is left behind.
      if (!last)
        __threadfence();  // this token's rows of the caches are there for all that have seen what follows
      best = best_of_block(best);
      if (thread == 0)
        store_packet(p.packets + plan.rows.best + block,
                     {{static_cast<unsigned>(best), static_cast<unsigned>(best >> 32), 0u}, step});
      if (last && (p.ids == nullptr || block != 0)) break;
      meet();
      best = 0;
      for (int i = thread; i < blocks; i += kThreads) {
        const Packet* const packet = p.packets + plan.rows.best + i;
        const Packet got = wait_packet(packet, load_packet(packet), step);
        best = max(best, static_cast<unsigned long long>(got.word[1]) << 32 | got.word[0]);
      }
      if (!last) __threadfence();
      best = best_of_block(best);
      id = best == ~0ull ? -1 : static_cast<int>(0xffffffffu - static_cast<unsigned>(best));
      if (block == 0 && thread == 0 && p.ids != nullptr) p.ids[n] = id;
    }
  }

  __device__ __forceinline__ bool has(int stage) const { return fixed.begin[stage] < fixed.begin[stage + 1]; }

  /// Weights of the first normalisation of this block from layer l on. @param whole whether from its beginning
  __device__ __forceinline__ const float* norm_from(int l, bool whole) const {
    for (; l < p.layer_count; ++l, whole = true) {
      if (whole && (has(kKeyRows) || has(kAttention))) return layer(l).attn_norm;
      if (has(kGateRows)) return layer(l).ffn_norm;
    }
    return p.output_norm;
  }

  template <class Format>
  __device__ __forceinline__ void multiply_batch(const Batch& of, int steps, int planes, int id,
                                                 bool fills = true) {
#pragma unroll 1
    for (; piece < of.end; ++piece)
      multiply<Format>(fixed.piece[piece].tiles, steps, fixed.piece[piece].turn, planes, id);
    __syncthreads();  // all sums are there, and places of the ring are free
    if (!fills) return;
    if (warp == kWarps - 1) fill();  // which has the least to do now
    used = 0;
  }
  /// A stage's batches, and what follows each.
  template <class Format, class F>
  __device__ __forceinline__ void batches(int stage, int steps, int planes, int id, const F& finish) {
#pragma unroll 1
    for (int b = fixed.begin[stage]; b < fixed.begin[stage + 1]; ++b) {
      const Batch of = fixed.batch[b];
      multiply_batch<Format>(of, steps, planes, id);
      finish(of);
      side ^= 1;
    }
  }
};

template <class LayerFormat, class HeadFormat, int HEAD_DIM>
__global__ void __launch_bounds__(kThreads, 1) token_kernel(const __grid_constant__ Plan plan) {
  Worker<LayerFormat, HeadFormat, HEAD_DIM>(plan).run();
}

/// Numbers of a block's work.
struct Counts : Tables<false> {
  int before = 0, most = 0;  // copies of earlier batches, and of the batch that has the most
  __host__ __device__ void end_batch(int first, int count) {
    Tables<false>::end_batch(first, count);
    most = most < loads - before ? loads - before : most;
    before = loads;
  }
};
/// Whether the tables have room for the work of every block, and the ring for that of every batch.
/// @param layer_tile, head_tile bytes
inline bool tables_suffice(const Plan& plan, int layer_tile, int head_tile) {
  for (int b = 0; b < plan.division.blocks; ++b) {
    Counts c;
    c.layer_tile = layer_tile, c.head_tile = head_tile;
    list_work(plan, b, c);
    if (c.batches > kMostPieces || c.pieces > kMostPieces || c.loads > kMostLoads || c.most > plan.at.places)
      return false;
  }
  return true;
}

/// @param limit bytes of shared memory that a block may have
template <class LayerFormat, class HeadFormat>
Plan make_plan(const TokenProgram& p, int blocks, std::size_t limit) {
  const auto steps = [](auto format, int id) {
    return static_cast<int>(tiles::steps<typename decltype(format)::Block>(id));
  };
  return {p,
          Division(p, blocks),
          Rows(p.heads, p.feed_forward, blocks),
          Layout(p, blocks, limit),
          steps(LayerFormat{}, p.embedding),
          steps(LayerFormat{}, p.feed_forward),
          steps(HeadFormat{}, p.embedding)};
}

/// Calls f(LayerFormat, HeadFormat) for the pairs of types that files of small models have.
template <class F>
Status with_formats(WeightType layers, WeightType head, F&& f) {
  using enum WeightType;
  if (layers == q4_0 && head == q8_0) return f(tiles::TileQ4_0{}, tiles::TileQ8_0{});
  if (layers == q4_0 && head == q6_k) return f(tiles::TileQ4_0{}, tiles::TileQ6_K{});
  if (layers == q8_0 && head == q8_0) return f(tiles::TileQ8_0{}, tiles::TileQ8_0{});
  return Status::error(std::string("token_kernel: layers of ") + info(layers).name + " with a head of " +
                       info(head).name + "; it takes q4_0 with q8_0 or q6_k, and q8_0 with q8_0");
}

}  // namespace token

/// Blocks of a launch.
inline int token_blocks() { return kDeviceExecutor == Executor::gpu ? multiprocessor_count() : 1; }
/// Elements of TokenProgram::packets.
inline std::size_t token_packets(const HeadShape& heads, int feed_forward, int blocks) {
  return static_cast<std::size_t>(token::Rows(heads, feed_forward, blocks).end);
}
/// What TokenProgram::step grows by.
inline unsigned token_steps(const TokenProgram& p) {
  return static_cast<unsigned>(p.layer_count) * static_cast<unsigned>(p.tokens);
}

/// Models whose tokens the kernel computes with so many blocks on this device. Reads no memory of the program.
inline Status token_supported(WeightType layers, WeightType head, const TokenProgram& p, int blocks,
                              const DeviceInfo& device) {
  const auto refuse = [](const std::string& why) { return Status::error("token_kernel: " + why); };
  const HeadShape& h = p.heads;
  if (Status s = token::with_formats(layers, head, [](auto, auto) { return Status(); }); !s.ok()) return s;
  if (device.executor == Executor::gpu && device.cc_major < 9)
    return refuse("needs compute capability 9.0 or later");
  if (blocks < 1 || blocks > (device.executor == Executor::gpu ? device.sms : 1))
    return refuse("as many blocks as are resident at once, one on the emulator, not " +
                  std::to_string(blocks));
  if (h.head_dim != 64 && h.head_dim != 128)
    return refuse("head_dim must be 64 or 128, not " + std::to_string(h.head_dim));
  if (h.kv_heads < 1 || h.heads < 1 || h.heads % h.kv_heads != 0 || h.q_length() != p.embedding)
    return refuse("heads must be a multiple of kv_heads, and all of them as long as the embedding");
  if (h.heads / h.kv_heads > token::kAttendHeads)
    return refuse("at most " + std::to_string(token::kAttendHeads) + " heads may share keys, not " +
                  std::to_string(h.heads / h.kv_heads));
  for (const int n : {p.embedding, p.feed_forward}) {
    if (n < 32 || n % std::max(32, info(layers).block_elems) != 0 ||
        p.embedding % info(head).block_elems != 0)
      return refuse("rows must be whole blocks, of 32 at least, not " + std::to_string(n));
  }
  if (p.layer_count < 1 || p.vocabulary < 1 || p.tokens < 1 || p.position < 0 ||
      p.context - p.position < p.tokens) {
    return refuse("at least one layer, a vocabulary, and tokens within the context");
  }
  Status tables = token::with_formats(layers, head, [&](auto l, auto t) {
    return token::tables_suffice(
               token::make_plan<decltype(l), decltype(t)>(p, blocks, device.shared_per_block_optin),
               tiles::tile_bytes<typename decltype(l)::Block>(),
               tiles::tile_bytes<typename decltype(t)::Block>())
               ? Status()
               : refuse(
                     "the work of a block does not fit its tables, or that of a batch the ring: too large a "
                     "model, "
                     "or too few blocks");
  });
  if (!tables.ok()) return tables;
  if (token::Layout(p, blocks, device.shared_per_block_optin).places < token::kLeastPlaces)
    return refuse("rows and tables leave too little shared memory for weights");
  return {};
}

/// Tokens of a model; see the head of this file. Does not synchronise.
/// @param head the type of the embedding too
inline Status launch_token(WeightType layers, WeightType head, const TokenProgram& p, int blocks,
                           Stream& stream) {
  return token::with_formats(layers, head, [&]<class L, class H>(L, H) -> Status {
    const token::Plan plan = token::make_plan<L, H>(p, blocks, shared_memory_limit());
    if (plan.at.places < token::kLeastPlaces)
      return Status::error("token_kernel: rows and tables leave too little shared memory for weights");
    LaunchOptions options;
    options.cooperative = kDeviceExecutor == Executor::gpu;
    const auto kernel =
        p.heads.head_dim == 64 ? token::token_kernel<L, H, 64> : token::token_kernel<L, H, 128>;
    return launch(options, kernel, dim3(static_cast<unsigned>(blocks)), dim3(token::kThreads),
                  plan.at.bytes(), stream, plan);
  });
}

}  // namespace ladder
