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
// TRAFFIC   every weight once, cached keys and values once for each head of their group; 16 bytes for three f32 or 12 bytes of int8
//           between blocks      WORK 2 a weight int8_op
// LOOK FOR  SASS: UBLKCP, SYNCS, LDG.E.128.STRONG.GPU, IMMA.16832; no LDL, STL, MEMBAR
// EXPECT    five exchanges a layer, of which two overlap: each some trips to L2 and a product from shared memory, 3 us.
//           Weights do not wait for them: the ring holds what several of them need
// BUILD     part of the engine of chapters/09-qwen; tested by kernels/token/test_token.cpp
//
// The order of a block's tiles is known from the start, whatever tokens come: so one thread asks for them, in that order,
// as places of the ring become free, across layers and tokens. What a product needs has mostly come before its activations.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/mbarrier.cuh"
#include "kernels/device/pdl.cuh"
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

inline constexpr int kAllThreads = kThreads + kWarp;  ///< with the warp that copies weights
inline constexpr int kPlaceBytes = 16128;             ///< of the ring: 14 tiles of Q4_0, 7 of Q4_K
inline constexpr int kMostPlaces = 16, kLeastPlaces = 4;
inline constexpr int kAhead = 12;        ///< places behind the ring whose tiles are asked to come to L2
inline constexpr int kMostPieces = 128;  ///< runs of tiles of a block
inline constexpr int kMostBlocks = 160;
inline constexpr int kGateUnits = 2;  ///< pairs of sixteens of gate and up, summed up together
inline constexpr int kTurns = 8;      ///< sixteens of other matrices, summed up together
static_assert(4 * kGateUnits <= kTurns);

/// Types of weights that the kernel takes; a format is a place in this list.
template <class... Format>
struct FormatList {
  static constexpr std::array kTypes = {Format::Block::kType...};
  static constexpr int kCount = sizeof...(Format);
  /// Calls f with format i.
  template <class F>
  static __device__ __forceinline__ void with(int i, F&& f) {
    int n = 0;
    (void)((i == n++ && (f(Format{}), true)) || ...);
  }
  /// Calls f with each place and its format.
  template <class F>
  static void each(F&& f) {
    int n = 0;
    (f(n++, Format{}), ...);
  }
};
using Formats = FormatList<tiles::TileQ4_0, tiles::TileQ8_0, tiles::TileQ6_K, tiles::TileQ4_K,
                           tiles::TileQ5_K, tiles::TileQ5_0>;
/// The place of a type; -1 for one that is not there.
inline int format_of(WeightType type) {
  const auto* const at = std::find(Formats::kTypes.begin(), Formats::kTypes.end(), type);
  return at == Formats::kTypes.end() ? -1 : static_cast<int>(at - Formats::kTypes.begin());
}

enum Matrix : int { kQ, kK, kV, kOutput, kGate, kUp, kDown, kMatrices };  ///< kMatrices: the head

/// Of a layer, in device memory.
struct LayerWeights {
  const unsigned char* tiles[kMatrices];
  const float* bias[3];  // of q, k, v
  const float *attn_norm, *ffn_norm;
  unsigned char format[8];  // format_of each matrix's type
};

/// Rows of a matrix that lie side by side, whose first sixteen are turn `turn` of their batch.
struct Piece {
  int first;                                  // sixteen
  unsigned char matrix, turn, count, unused;  // sixteens
};
/// Pieces whose rows are summed up together.
struct Batch {
  int end;           // of its pieces; they begin where those before it end
  int first, count;  // sixteens or pairs of sixteens
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

/// Types of a model's weights.
struct TokenTypes {
  std::vector<std::array<WeightType, token::kMatrices>> layers;
  WeightType head, rows;  // rows: of the embedding
};

/// The model, what the kernel works on, and the tokens of a launch. All in device memory.
struct TokenProgram {
  const token::LayerWeights* layers = nullptr;       ///< [layer_count]
  const unsigned char* head = nullptr;               ///< [vocabulary][embedding] in tiles
  const void* rows = nullptr;                        ///< the embedding's, as in a file
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
  int x, between, queries, mixed, gated, best, partial, end;
  Rows(const HeadShape& heads, int feed_forward, int blocks)
      : x(0),
        between(heads.q_length() / tiles::kRows * kFloatPackets),
        queries(2 * between),  // then keys and values
        mixed(3 * between + 2 * (heads.kv_length() / tiles::kRows) * kFloatPackets),
        gated(mixed + heads.q_length() / 32 * kBlockPackets),
        best(gated + feed_forward / 32 * kBlockPackets),
        partial(best + blocks),
        end(partial + attend_packets(heads, blocks)) {}
};

/// How work is divided over blocks: each has about the same bytes of a layer, and the same ones for the whole kernel.
struct Division {
  int blocks, owners;
  unsigned short gate[kMostBlocks + 1], key[kMostBlocks + 1];  // where a block's units begin

  /// @param bytes of a sixteen of rows of each matrix, in the mean of layers
  Division(const TokenProgram& p, int all, const std::array<double, kMatrices>& bytes)
      : blocks(all), owners(std::min(p.embedding / tiles::kRows, all)) {
    std::vector<double> load;
    for (int b = 0; b < blocks; ++b)
      load.push_back(own(p.embedding, b).count * (bytes[kOutput] + bytes[kDown]));
    deal(p.feed_forward / 32, 2 * (bytes[kGate] + bytes[kUp]), load, gate);
    deal((p.heads.q_length() + 2 * p.heads.kv_length()) / tiles::kRows, bytes[kQ], load, key);
  }
  /// Units of so many bytes, each to the block that has least to do.
  void deal(int units, double bytes, std::vector<double>& load, unsigned short* first) const {
    std::vector<int> count(load.size());
    for (int i = 0; i < units; ++i) {
      const auto least = std::min_element(load.begin(), load.end());
      *least += bytes;
      ++count[static_cast<std::size_t>(least - load.begin())];
    }
    first[0] = 0;
    for (int b = 0; b < blocks; ++b)
      first[b + 1] = static_cast<unsigned short>(first[b] + count[static_cast<std::size_t>(b)]);
  }
  /// Sixteens of x.
  __host__ __device__ Range own(int embedding, int block) const {
    return share(embedding / tiles::kRows, owners, block);
  }
  /// Pairs of sixteens of gate and up.
  __host__ __device__ Range gates(int block) const { return {gate[block], gate[block + 1] - gate[block]}; }
  /// Sixteens of q, then k, then v.
  __host__ __device__ Range keys(int block) const { return {key[block], key[block + 1] - key[block]}; }
  /// Sixteens of the head.
  __host__ __device__ Range head(int vocabulary, int block) const {
    return share((vocabulary - 1) / tiles::kRows + 1, blocks, block);
  }
};

/// Bytes of dynamic shared memory, part by part.
struct Layout {
  int zeros, planes, sums, squares, residual, layers, ring, places;
  /// @param limit what a block may have
  Layout(const TokenProgram& p, int blocks, std::size_t limit);
  [[nodiscard]] std::size_t bytes() const {
    return static_cast<std::size_t>(ring) + static_cast<std::size_t>(places) * kPlaceBytes;
  }
};

/// Of a format: bytes of a tile, tiles of a place of the ring, and along rows of the embedding's and feed_forward's length.
struct FormatShape {
  int bytes, per_place, row_steps, gated_steps;
};

/// All that the host knows, in the kernel's constants.
struct Plan {
  TokenProgram program;
  Rows rows;
  Layout at;
  int head, embedded;  // formats of the head, and of the embedding's rows
  FormatShape format[Formats::kCount];
  Division division;
};

/// Parts of a layer, and the head.
enum Stage : int { kKeyRows, kOutputRows, kGateRows, kDownRows, kHeadRows, kStages };

/// Shared memory that does not depend on the model.
struct alignas(16) Fixed {
  unsigned long long best[kWarps];
  float root;
  Range own;
  // This block's work, in its order: batches are summed up together, pieces multiplied one after the other.
  Batch batch[kMostPieces];
  Piece piece[kMostPieces];
  int begin[kStages + 1];    // of each stage, in batches
  int layer_pieces, pieces;  // of a layer, and with those of the head behind them
  std::uint64_t meeting;
  std::uint64_t full[kMostPlaces], empty[kMostPlaces];
  float2 angle[64];  // cosine and sine, of the token's position
};

/// A block's work, in its order.
/// @param sink has begin(stage), piece(matrix, first sixteen, sixteens, turn), end_batch(first, count)
template <class Sink>
__host__ __device__ void list_work(const Plan& plan, int block, Sink& sink) {
  const TokenProgram& p = plan.program;
  const Range own = plan.division.own(p.embedding, block), gate = plan.division.gates(block),
              keys = plan.division.keys(block);
  const auto batches = [&](const Range& range, int most, const auto& pieces) {
    for (int i = 0; i < range.count; i += most) {
      const int count = most < range.count - i ? most : range.count - i;
      pieces(range.first + i, count);
      sink.end_batch(range.first + i, count);
    }
  };
  const auto rows_of = [&](int matrix) {
    return [&sink, matrix](int first, int count) { sink.piece(matrix, first, count, 0); };
  };
  sink.begin(kKeyRows);
  batches(keys, kTurns, [&](int first, int count) {
    const int q = p.heads.q_length() / tiles::kRows, kv = p.heads.kv_length() / tiles::kRows;
    const int begin[] = {0, q, q + kv, q + 2 * kv};
    for (int m = kQ; m <= kV; ++m) {
      const int from = first > begin[m] ? first : begin[m],
                to = first + count < begin[m + 1] ? first + count : begin[m + 1];
      if (from < to) sink.piece(m, from - begin[m], to - from, from - first);
    }
  });
  sink.begin(kOutputRows);
  batches(own, kTurns, rows_of(kOutput));
  sink.begin(kGateRows);
  batches(gate, kGateUnits, [&](int first, int count) {
    sink.piece(kGate, 2 * first, 2 * count, 0);
    sink.piece(kUp, 2 * first, 2 * count, 2 * count);
  });
  sink.begin(kDownRows);
  batches(own, kTurns, rows_of(kDown));
  sink.begin(kHeadRows);
  batches(plan.division.head(p.vocabulary, block), kTurns, rows_of(kMatrices));
  sink.begin(kStages);
}
/// Tables of it. @tparam WRITE whether there are any; or they are only counted
template <bool WRITE>
struct Tables {
  Fixed* fixed = nullptr;
  int pieces = 0, batches = 0;
  __host__ __device__ void begin(int stage) {
    if constexpr (WRITE) {
      fixed->begin[stage] = batches;
      if (stage == kHeadRows) fixed->layer_pieces = pieces;
    }
  }
  __host__ __device__ void piece(int matrix, int first, int count, int turn) {
    if constexpr (WRITE)
      fixed->piece[pieces] = {first, static_cast<unsigned char>(matrix), static_cast<unsigned char>(turn),
                              static_cast<unsigned char>(count), 0};
    ++pieces;
  }
  __host__ __device__ void end_batch(int first, int count) {
    if constexpr (WRITE) fixed->batch[batches] = {pieces, first, count};
    ++batches;
  }
};

inline Layout::Layout(const TokenProgram& p, int blocks, std::size_t limit) {
  const int longest = static_cast<int>(tile_acts::group_bytes(1, std::max(p.embedding, p.feed_forward)));
  const int owned = (p.embedding / tiles::kRows - 1) / blocks + 1;
  zeros = (static_cast<int>(sizeof(Fixed)) + 15) / 16 * 16;
  planes = zeros + tiles::Columns::kZeros;
  sums = (planes +
          std::max(longest, p.heads.head_dim == 64 ? Attend<64>::kScratchBytes : Attend<128>::kScratchBytes) +
          15) /
         16 * 16;
  squares = sums + 2 * kTurns * kWarps * tiles::kRows * 4;
  residual = (squares + p.embedding / 32 * 4 + 15) / 16 * 16;
  layers = residual + owned * tiles::kRows * 4;
  ring = (layers + p.layer_count * static_cast<int>(sizeof(LayerWeights)) + 127) / 128 * 128;
  const long long room = static_cast<long long>(limit) - ring;
  places = static_cast<int>(std::max(0LL, std::min<long long>(kMostPlaces, room / kPlaceBytes)));
}

/// One block of the grid, at work.
template <int HEAD_DIM>
struct Worker {
  using Rows16 = float[kWarps][tiles::kRows];  // sums of a turn

  const Plan& plan;
  const TokenProgram& p;
  unsigned char* const shared;
  Fixed& fixed;
  Meeting join;  // of all warps but the one that copies
  const int blocks, block, thread, lane, warp;

  int place = 0;        // of the ring, that is multiplied next
  unsigned parity = 0;  // of its barrier
  int side = 0;         // half of the sums that the next batch takes
  float4 ahead[2];      // the thread's weights of the next normalisation

  __device__ __forceinline__ explicit Worker(const Plan& of)
      : plan(of),
        p(of.program),
        shared(dynamic_shared<unsigned char>()),
        fixed(*dynamic_shared<Fixed>()),
        join{&dynamic_shared<Fixed>()->meeting},
        blocks(static_cast<int>(gridDim.x)),
        block(static_cast<int>(blockIdx.x)),
        thread(static_cast<int>(threadIdx.x)),
        lane(static_cast<int>(threadIdx.x % 32)),
        // From lane 0, so that the compiler knows that all lanes have the same: branches on it then are those of a warp.
        warp(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0)) {}

  __device__ __forceinline__ float* floats(int offset) const {
    return reinterpret_cast<float*>(shared + offset);
  }
  __device__ __forceinline__ const LayerWeights& layer(int l) const {
    return reinterpret_cast<const LayerWeights*>(shared + plan.at.layers)[l];
  }
  /// A matrix of a layer; those of the head are behind the last layer.
  __device__ __forceinline__ int format_of(int l, int matrix) const {
    return matrix == kMatrices ? plan.head : layer(l).format[matrix];
  }
  __device__ __forceinline__ int steps_of(int format, int matrix) const {
    const FormatShape& f = plan.format[format];
    return matrix == kDown ? f.gated_steps : f.row_steps;
  }
  /// On the emulator a block waits for nobody else; what its own threads sent must be there.
  __device__ __forceinline__ void meet() {
#if !defined(__CUDACC__)
    join();
#endif
  }

  // 1. The ring: filled by one warp, in the order in which it is emptied ----------------------------------------------

  // ANCHOR: token_fill
  /// All copies of the launch, across layers and tokens, by a warp that does nothing else: the first lane starts a copy when
  /// its place is free. The second one is ahead of it by more places than the ring has: what it finds is asked to come to
  /// L2. So memory goes on where the ring is full because warps wait for other blocks.
  __device__ __forceinline__ void supply() {
    int token = 0, l = 0, next = 0;       // of the lane's next piece
    const unsigned char* from = nullptr;  // what is left of this one
    unsigned left = 0, most = 0;
    const auto take = [&]() -> unsigned {  // bytes of the next copy, none behind the last one
      while (left == 0) {
        if (token >= p.tokens) return 0;
        if (next == (l < p.layer_count ? fixed.layer_pieces : fixed.pieces)) {
          if (l < p.layer_count) {
            if (++l < p.layer_count) next = 0;  // pieces of the head are behind those of a layer
          } else {
            ++token, l = 0, next = 0;
          }
          continue;
        }
        const Piece what = fixed.piece[next++];
        const int format = format_of(l, what.matrix);
        const unsigned bytes = static_cast<unsigned>(plan.format[format].bytes),
                       sixteen = static_cast<unsigned>(steps_of(format, what.matrix)) * bytes;
        from = (what.matrix == kMatrices ? p.head : layer(l).tiles[what.matrix]) +
               static_cast<unsigned long long>(what.first) * sixteen;
        left = what.count * sixteen;
        most = static_cast<unsigned>(plan.format[format].per_place) * bytes;
      }
      return min(left, most);
    };
    const int before = lane == 0 || kAhead == 0 ? 0 : plan.at.places + kAhead;
#pragma unroll 1
    for (int i = 0; i < before; ++i) {
      const unsigned bytes = take();
      from += bytes, left -= bytes;
    }
    int to = 0;
    unsigned phase = 1;  // of the place before it was first filled
#pragma unroll 1
    for (;;) {
      const unsigned bytes = take();
      if (__shfl_sync(kAllLanes, bytes, 0) == 0) break;
      if (lane == 0) {
        mbarrier_wait(&fixed.empty[to], phase);
        mbarrier_arrive_expect_bytes(&fixed.full[to], bytes);
        bulk_copy(shared + plan.at.ring + to * kPlaceBytes, from, bytes, &fixed.full[to]);
      }
      __syncwarp();  // nobody is further ahead than that
      if (kAhead > 0 && lane == 1 && bytes > 0) bulk_prefetch_l2(from, bytes);
      from += bytes, left -= bytes;
      if (++to == plan.at.places) to = 0, phase ^= 1u;
    }
  }
  // ANCHOR_END: token_fill

  // ANCHOR: token_multiply
  /// Tiles of a piece, whose first sixteen rows are turn `turn` of this half of the sums. Sums of a row are told apart by
  /// step modulo kWarps, as in mmvq_tiles.
  template <class Format>
  __device__ __forceinline__ void multiply(int all, int steps, int turn, int id) {
    constexpr int BYTES = tiles::tile_bytes<typename Format::Block>(), PER_PLACE = kPlaceBytes / BYTES;
    constexpr int PAIRS = tiles::Tile<typename Format::Block>::kSteps / 2;
    const int t = lane % 4;
    tiles::Codes<1> codes;
    codes.template begin<Format::kHalves>(shared + plan.at.planes, shared + plan.at.zeros, 2 * PAIRS * 32,
                                          lane);
    const tiles::LaneConstants<Format> constants(t);
    const unsigned char* const scales = shared + plan.at.planes + tile_acts::scale_at(t, 0, 1, id);
    Rows16* const to = reinterpret_cast<Rows16*>(shared + plan.at.sums) + side * kTurns;
    int tile = warp, step = warp;
    while (step >= steps) step -= steps, ++turn;
    int sum_at = step;
    tiles::LaneSums<1> sums;
#pragma unroll 1
    for (int first = 0; first < all; first += PER_PLACE) {
      const int end = min(first + PER_PLACE, all);
      mbarrier_wait(&fixed.full[place], parity);
      __syncwarp();  // lanes have waited each for itself, and a shuffle of lanes that are apart takes long
      const unsigned char* const from = shared + plan.at.ring + place * kPlaceBytes;
      unsigned read = 0;  // made of what was read last
#pragma unroll 1
      while (tile < end) {
        typename Format::template Raw<1> raw;
        raw.template load<tiles::FromShared>(from + (tile - first) * BYTES, lane);
        tiles::multiply_tile<Format, 1>(raw, codes, scales + step * (PAIRS * 16), step, t, constants, sums);
        read = __float_as_uint(sums.v[0][0][0]) ^ __float_as_uint(sums.v[0][1][0]);
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
      mbarrier_arrive_after(&fixed.empty[place], read);
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
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int b = min(4 * (warp + i * kWarps) + lane / 8, p.embedding / 32 - 1);
      ahead[i] = *reinterpret_cast<const float4*>(norm + 32 * b + lane % 8 * 4);
    }
  }
  /// x times the normalisation's weights as int8, eight lanes a block of 32; the factor that is common to the row follows as
  /// fixed.root. @param row of packets, or null for the embedding of `id` @param next weights of the normalisation after it
  __device__ __forceinline__ void take_x(const Packet* row, unsigned step, const float* norm, int id,
                                         const float* next) {
    meet();
    const int n = p.embedding / 32, q = lane % 8;
    unsigned char* const to = shared + plan.at.planes;
    if (p.embedding % 256 != 0) tile_acts::store_padding(to, p.embedding);
    // Lanes beyond the row repeat its last block.
    const auto block_of = [&](int pass) { return min(4 * (warp + pass * kWarps) + lane / 8, n - 1); };
    Packet a{}, c{};
    const auto ask = [&](int pass) {
      const Packet* const from = row + 16 * block_of(pass) + 2 * q;
      a = load_packet(from), c = load_packet(from + 1);
    };
    if (row != nullptr) ask(0);
#pragma unroll 1
    for (int pass = 0; 4 * (warp + pass * kWarps) < n; ++pass) {
      const int b = block_of(pass), i = 32 * b + 4 * q;
      const float4 w = pass == 0   ? ahead[0]
                       : pass == 1 ? ahead[1]
                                   : *reinterpret_cast<const float4*>(norm + i);
      float4 x;
      if (row == nullptr) {
        x = embedded(id, i);
        const int mine = i / tiles::kRows - fixed.own.first;
        if (mine >= 0 && mine < fixed.own.count)
          *reinterpret_cast<float4*>(floats(plan.at.residual) + mine * tiles::kRows + i % tiles::kRows) = x;
      } else {
        const Packet* const from = row + i / 2;
        const Packet first = a, second = c;
        if (4 * (warp + (pass + 1) * kWarps) < n) ask(pass + 1);
        const Packet low = wait_packet(from, first, step), high = wait_packet(from + 1, second, step);
        x = make_float4(__uint_as_float(low.word[0]), __uint_as_float(low.word[1]),
                        __uint_as_float(high.word[0]), __uint_as_float(high.word[1]));
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
      *reinterpret_cast<unsigned*>(to + 32 * b + 4 * q) = codes;
      if (q == 0) {
        *reinterpret_cast<uint2*>(to + tile_acts::scale_at(b, 0, 1, p.embedding)) =
            make_uint2(__float_as_uint(scale.d), pack_sums(half, upper));
        floats(plan.at.squares)[b] = squares;
      }
    }
    take_ahead(next);
    join();  // planes and squares are there
    if (warp == kWarps - 1) {
      const float root = tile_acts::root_of(floats(plan.at.squares), p.embedding, p.epsilon);
      if (lane == 0) fixed.root = root;  // read behind the barrier after the next product
    }
  }

  /// Four elements of a token's row; NaN where there is no such token.
  __device__ __forceinline__ float4 embedded(int id, int i) const {
    const float nan = __int_as_float(0x7fffffff);
    float4 four = make_float4(nan, nan, nan, nan);
    if (id < 0 || id >= p.vocabulary) return four;
    Formats::with(plan.embedded, [&](auto format) {
      using Block = typename decltype(format)::Block;
      const Block* const row =
          static_cast<const Block*>(p.rows) + static_cast<long long>(id) * (p.embedding / Block::kElems);
      four = decode_four(row[i / Block::kElems], i % Block::kElems);
    });
    return four;
  }

  /// Rows that come as int8, see send_codes.
  __device__ __forceinline__ void take_codes(const Packet* row, unsigned step, int id) {
    meet();
    constexpr int MOST = 4;  // under way at once
    const int n = id / 32 * kBlockPackets;
    unsigned char* const to = shared + plan.at.planes;
    if (id % 256 != 0) tile_acts::store_padding(to, id);
#pragma unroll 1
    for (int i0 = thread; i0 < n; i0 += MOST * kThreads) {
      Packet packet[MOST];
#pragma unroll
      for (int k = 0; k < MOST; ++k)
        packet[k] = i0 + k * kThreads < n ? load_packet(row + i0 + k * kThreads) : Packet{};
#pragma unroll
      for (int k = 0; k < MOST; ++k) {
        const int i = i0 + k * kThreads, b = i / kBlockPackets, j = i % kBlockPackets;
        if (i >= n) break;
        const Packet got = wait_packet(row + i, packet[k], step);
        *reinterpret_cast<uint2*>(to + 32 * b + 8 * j) = make_uint2(got.word[0], got.word[1]);
        if (j < 2) *reinterpret_cast<unsigned*>(to + tile_acts::scale_at(b, 0, 1, id) + 4 * j) = got.word[2];
      }
    }
    join();  // planes are there
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

  /// Which of q, k, v a sixteen of all of them belongs to, and its place there.
  struct Key {
    int matrix, sixteen;
  };
  __device__ __forceinline__ Key key_of(int sixteen) const {
    const int q = p.heads.q_length() / tiles::kRows, kv = p.heads.kv_length() / tiles::kRows;
    return sixteen < q        ? Key{kQ, sixteen}
           : sixteen < q + kv ? Key{kK, sixteen - q}
                              : Key{kV, sixteen - q - kv};
  }
  /// What is added to the thread's row of a batch of q, k and v.
  __device__ __forceinline__ float bias_of(const Batch& of, int l) const {
    if (thread >= of.count * tiles::kRows) return 0.0f;
    const Key key = key_of(of.first + thread / tiles::kRows);
    return layer(l).bias[key.matrix][key.sixteen * tiles::kRows + thread % tiles::kRows];
  }
  /// Rows of q, k and v go to the blocks that have heads.
  __device__ __forceinline__ void send_keys(const Batch& of, int l, float bias, unsigned step) const {
    if (warp >= (of.count + 1) / 2) return;
    float x = 0.0f;
    if (thread < of.count * tiles::kRows) {
      const int matrix = key_of(of.first + thread / tiles::kRows).matrix;
      x = sum_of(thread / tiles::kRows, thread % tiles::kRows, steps_of(format_of(l, matrix), matrix)) *
              fixed.root +
          bias;
    }
    const float next = __shfl_xor_sync(kAllLanes, x, 1);
    if (thread < of.count * tiles::kRows && lane % 2 == 0)
      store_packet(p.packets + plan.rows.queries + of.first * kFloatPackets + thread / 2,
                   {{__float_as_uint(x), __float_as_uint(next), 0u}, step});
  }

  /// silu(gate) * up of a batch goes to all that own rows of x.
  __device__ __forceinline__ void gate_and_up(const Batch& of, int l, unsigned step) const {
    if (warp >= of.count) return;
    const int turn = thread / tiles::kRows, row = thread % tiles::kRows;
    const float g = sum_of(turn, row, steps_of(format_of(l, kGate), kGate)) * fixed.root,
                u = sum_of(turn + 2 * of.count, row, steps_of(format_of(l, kUp), kUp)) * fixed.root;
    send_codes(g / (1.0f + expf(-g)) * u, p.packets + plan.rows.gated + (of.first + warp) * kBlockPackets,
               step);
  }

  /// This token's attention in a layer.
  __device__ __forceinline__ AttendArgs attention(int l, int position, unsigned step) const {
    const long long of_layer = static_cast<long long>(l) * p.context * p.heads.kv_length();
    const Packet* const q = p.packets + plan.rows.queries;
    return {p.heads,
            position,
            blocks,
            blocks - 1 - block,  // the last ones own least
            p.keys + of_layer,
            p.values + of_layer,
            q,
            q + p.heads.q_length() / 2,
            q + (p.heads.q_length() + p.heads.kv_length()) / 2,
            p.packets + plan.rows.mixed,
            p.packets + plan.rows.partial,
            fixed.angle,
            shared + plan.at.planes,
            step};
  }

  /// Logits of a batch. @return the best of the thread's and `best`
  __device__ __forceinline__ unsigned long long logits(const Batch& of, bool wanted,
                                                       unsigned long long best) const {
    const int r = of.first * tiles::kRows + thread;
    if (thread >= of.count * tiles::kRows || r >= p.vocabulary) return best;
    const float v =
        sum_of(thread / tiles::kRows, thread % tiles::kRows, steps_of(plan.head, kMatrices)) * fixed.root;
    if (wanted) p.logits[r] = v;
    return max(best, argmax_key(v, r));
  }

  /// The largest of all threads'. By all threads, of which each has the result.
  __device__ __forceinline__ unsigned long long best_of_block(unsigned long long best) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(kAllLanes, best, offset));
    join();  // the last ones are read
    if (lane == 0) fixed.best[warp] = best;
    join();  // all warps' are there
    for (int w = 0; w < kWarps; ++w) best = max(best, fixed.best[w]);
    return best;
  }
  __device__ __forceinline__ void run() {
    // 1. Tables, then one warp for copies.
    const auto* const from = reinterpret_cast<const unsigned*>(p.layers);
    auto* const to = reinterpret_cast<unsigned*>(shared + plan.at.layers);
    for (int i = thread; i < p.layer_count * static_cast<int>(sizeof(LayerWeights) / 4); i += kAllThreads)
      to[i] = from[i];
    for (int i = plan.at.zeros / 4 + thread; i < plan.at.planes / 4; i += kAllThreads)
      reinterpret_cast<unsigned*>(shared)[i] = 0;
    if (thread == 0) {
      Tables<true> tables{&fixed};
      list_work(plan, block, tables);
      fixed.pieces = tables.pieces;
      fixed.own = plan.division.own(p.embedding, block);
      mbarrier_init(&fixed.meeting, kThreads);
      for (int i = 0; i < plan.at.places; ++i) {
        mbarrier_init(&fixed.full[i], 1);
        mbarrier_init(&fixed.empty[i], kWarps);
      }
      mbarrier_init_fence();
    }
    __syncthreads();  // all of it is there
    if (warp == kWarps) return supply();
    take_ahead(layer(0).attn_norm);

    int id = p.first_token;
    unsigned step = p.step;  // of the packets that come next
#pragma unroll 1
    for (int n = 0; n < p.tokens; ++n) {
      // 2. A token: its angles to those that turn with them.
      const int position = p.position + n;
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
        side = 0;
        const AttendArgs args = attention(l, position, step);
        const Attend<HEAD_DIM> attend{args};
        if (warp == kWarps - 1) attend.begin();
        if (l == 0 || has(kKeyRows))
          take_x(l > 0 ? x : nullptr, step - 1, w.attn_norm, id, norm_from(l, false));
        batches(
            kKeyRows, l, p.embedding, [&](const Batch& of) { return bias_of(of, l); },
            [&](const Batch& of, float bias) { send_keys(of, l, bias, step); });
        meet();
        attend.finish(join);
        join();  // and its memory is free
        if (has(kOutputRows)) {
          take_codes(p.packets + plan.rows.mixed, step, p.embedding);
          batches(kOutputRows, l, p.embedding, nothing, [&](const Batch& of, float) {
            add_to_x(of, steps_of(w.format[kOutput], kOutput), between, step);
          });
        }
        if (has(kGateRows)) {
          take_x(between, step, w.ffn_norm, 0, norm_from(l + 1, true));
          batches(kGateRows, l, p.embedding, nothing,
                  [&](const Batch& of, float) { gate_and_up(of, l, step); });
        }
        if (has(kDownRows)) {
          take_codes(p.packets + plan.rows.gated, step, p.feed_forward);
          batches(kDownRows, l, p.feed_forward, nothing,
                  [&](const Batch& of, float) { add_to_x(of, steps_of(w.format[kDown], kDown), x, step); });
        }
      }
      take_x(x, step, p.output_norm, 0, layer(0).attn_norm);
      batches(kHeadRows, p.layer_count, p.embedding, nothing,
              [&](const Batch& of, float) { best = logits(of, last && p.logits != nullptr, best); });

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
      if (whole && has(kKeyRows)) return layer(l).attn_norm;
      if (has(kGateRows)) return layer(l).ffn_norm;
    }
    return p.output_norm;
  }

  static __device__ __forceinline__ float nothing(const Batch& /*of*/) { return 0.0f; }
  /// A stage's batches: what is asked for before a batch is multiplied is handed to what follows it.
  template <class A, class F>
  __device__ __forceinline__ void batches(int stage, int l, int id, const A& ask, const F& finish) {
#pragma unroll 1
    for (int b = fixed.begin[stage]; b < fixed.begin[stage + 1]; ++b) {
      const Batch of = fixed.batch[b];
      const float asked = ask(of);
#pragma unroll 1
      for (int piece = b > 0 ? fixed.batch[b - 1].end : 0; piece < of.end; ++piece) {
        const Piece what = fixed.piece[piece];
        const int format = format_of(l, what.matrix), steps = steps_of(format, what.matrix);
        Formats::with(format,
                      [&](auto f) { multiply<decltype(f)>(what.count * steps, steps, what.turn, id); });
      }
      join();  // all sums are there
      finish(of, asked);
      side ^= 1;
    }
  }
};

template <int HEAD_DIM>
__global__ void __launch_bounds__(kAllThreads, 1) token_kernel(const __grid_constant__ Plan plan) {
  Worker<HEAD_DIM>(plan).run();
}

/// Whether the tables have room for the work of every block.
inline bool tables_suffice(const Plan& plan) {
  for (int b = 0; b < plan.division.blocks; ++b) {
    Tables<false> t;
    list_work(plan, b, t);
    if (t.batches > kMostPieces || t.pieces > kMostPieces) return false;
  }
  return true;
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

/// A program with its work divided over so many blocks: made once, for any number of launches, whose first_token, position,
/// tokens, step, logits and ids may differ. @param limit bytes of shared memory that a block may have
inline token::Plan token_plan(const TokenTypes& types, const TokenProgram& p, int blocks, std::size_t limit) {
  std::array<double, token::kMatrices> bytes{};
  for (const auto& layer : types.layers) {
    for (std::size_t m = 0; m < bytes.size(); ++m)
      bytes[m] += static_cast<double>(
          tiles::bytes(layer[m], {1, tiles::kRows, m == token::kDown ? p.feed_forward : p.embedding}));
  }
  token::Plan plan{p,
                   token::Rows(p.heads, p.feed_forward, blocks),
                   token::Layout(p, blocks, limit),
                   token::format_of(types.head),
                   token::format_of(types.rows),
                   {},
                   token::Division(p, blocks, bytes)};
  token::Formats::each([&](int i, auto format) {
    using Block = typename decltype(format)::Block;
    constexpr int BYTES = tiles::tile_bytes<Block>();
    plan.format[i] = {BYTES, token::kPlaceBytes / BYTES, static_cast<int>(tiles::steps<Block>(p.embedding)),
                      static_cast<int>(tiles::steps<Block>(p.feed_forward))};
  });
  return plan;
}

/// Models whose tokens the kernel computes with so many blocks on this device. Reads no memory of the program.
inline Status token_supported(const TokenTypes& types, const TokenProgram& p, int blocks,
                              const DeviceInfo& device) {
  const auto refuse = [](const std::string& why) { return Status::error("token_kernel: " + why); };
  const HeadShape& h = p.heads;
  if (device.executor == Executor::gpu && device.cc_major < 9)
    return refuse("needs compute capability 9.0 or later");
  const int most = device.executor == Executor::gpu ? std::min(device.sms, token::kMostBlocks) : 1;
  if (blocks < 1 || blocks > most)
    return refuse("as many blocks as are resident at once, one on the emulator, not " +
                  std::to_string(blocks));
  if (h.head_dim != 64 && h.head_dim != 128)
    return refuse("head_dim must be 64 or 128, not " + std::to_string(h.head_dim));
  if (h.kv_heads < 1 || h.heads < 1 || h.heads % h.kv_heads != 0 || h.q_length() != p.embedding)
    return refuse("heads must be a multiple of kv_heads, and all of them as long as the embedding");
  if (h.heads / h.kv_heads > token::kAttendHeads)
    return refuse("at most " + std::to_string(token::kAttendHeads) + " heads may share keys, not " +
                  std::to_string(h.heads / h.kv_heads));
  if (p.layer_count < 1 || p.vocabulary < 1 || p.tokens < 1 || p.position < 0 ||
      p.context - p.position < p.tokens || types.layers.size() != static_cast<std::size_t>(p.layer_count)) {
    return refuse("at least one layer, a vocabulary, and tokens within the context");
  }
  const auto row_fits = [&](WeightType type, int n) -> Status {
    if (token::format_of(type) < 0)
      return refuse(std::string("weights of ") + info(type).name +
                    "; it takes q4_0, q5_0, q8_0, q4_k, q5_k and q6_k");
    if (n < 32 || n % std::max(32, info(type).block_elems) != 0)
      return refuse("rows must be whole blocks, of 32 at least, not " + std::to_string(n));
    return {};
  };
  for (const auto& layer : types.layers) {
    for (std::size_t m = 0; m < layer.size(); ++m) {
      if (Status s = row_fits(layer[m], m == token::kDown ? p.feed_forward : p.embedding); !s.ok()) return s;
    }
  }
  if (p.feed_forward % 32 != 0)
    return refuse("rows must be whole blocks, of 32 at least, not " + std::to_string(p.feed_forward));
  for (const WeightType type : {types.head, types.rows}) {
    if (Status s = row_fits(type, p.embedding); !s.ok()) return s;
  }
  const token::Plan plan = token_plan(types, p, blocks, device.shared_per_block_optin);
  if (!token::tables_suffice(plan))
    return refuse("the work of a block does not fit its tables: too large a model, or too few blocks");
  if (plan.at.places < token::kLeastPlaces)
    return refuse("rows and tables leave too little shared memory for weights");
  return {};
}

/// Tokens of a model; see the head of this file. Does not synchronise.
/// @param plan of token_plan, for a model that token_supported takes
inline Status launch_token(const token::Plan& plan, Stream& stream) {
  if (plan.at.places < token::kLeastPlaces)
    return Status::error("token_kernel: rows and tables leave too little shared memory for weights");
  LaunchOptions options;
  options.cooperative = kDeviceExecutor == Executor::gpu;
  const auto kernel = plan.program.heads.head_dim == 64 ? token::token_kernel<64> : token::token_kernel<128>;
  return launch(options, kernel, dim3(static_cast<unsigned>(plan.division.blocks)), dim3(token::kAllThreads),
                plan.at.bytes(), stream, plan);
}

}  // namespace ladder
