// RUNG      repack_tiles: from a file's blocks to tiles, once, when weights are loaded.
// PREV      mmvq_pf: its lanes ask for what blocks of 18 bytes let them
// COMPUTES  the same bits in the order in which a warp multiplies them
// LAYOUT    blocks [od][id / block] of kernels/quant/blocks.hpp, out [ceil(od/16)][steps][tile]: below
// MAP       grid(ceil(words/256)) block(256): thread -> a word of a tile
// NEEDS     id a whole number of blocks, out at a multiple of 16 bytes: checked by the launcher
// TRAFFIC   the matrix read, and written with od up to a multiple of 16 and id of 128 or 256     WORK none
// LOOK FOR  SASS: LDG.E.U8, four a word: simple, and run once
// EXPECT    far below the copy roof, and still a small part of loading a model from a disk
// BUILD     part of chapters/04-mmvq/mmvq.cu
//
// Weights in tiles: the bytes of a file's blocks, in the order in which a warp multiplies them.
//
// A tile is sixteen rows by 128 weights (types with blocks of 32) or by 256 (types with blocks of 256), one tile for
// each instruction's sixteen rows and each step of a warp along them. Its bits are those of the blocks, no more and no
// fewer: codes first, then scales, each in the order in which lanes want them, so that every load is 16 bytes wide and
// a warp's loads are side by side. Tiles of the same sixteen rows follow each other; the last rows and the last step
// are filled up with zeros, which multiply to nothing.
//
// What a lane wants is decided by mma.m16n8k32 (kernels/device/mma.cuh): lane 4g + t holds, of rows g and g + 8, the
// words t and t + 4 of every eight words (32 codes of one byte). So that is what its 16 bytes are made of:
//   plane of codes    vector v, lane l, word i at byte 512 v + 16 l + 4 i
//   what follows      as each format says
// A fifth or third bit of code s and byte b, s = 0..7, stands at bit 8 b + s of a word: one shift brings it to where it
// is wanted, for four codes at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "harness/device/device.hpp"
#include "harness/experiment/rung.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/quant/blocks.hpp"

namespace ladder::tiles {

inline constexpr int kRows = 16;

/// Sixteen rows of a matrix, from where a tile begins in them.
template <class Block>
struct Source {
  const Block* blocks;  // [od][per_row]
  long long per_row, row, first, od;
  /// Block j of row r of the tile; null beyond the matrix.
  __host__ __device__ const Block* at(int r, int j = 0) const {
    const long long rr = row + r, b = first + j;
    return rr < od && b < per_row ? blocks + rr * per_row + b : nullptr;
  }
};

/// Bytes 4 i .. 4 i + 3 of an array of bytes, the first in the lowest.
__host__ __device__ __forceinline__ unsigned word(const std::uint8_t* bytes, int i) {
  const std::uint8_t* p = bytes + 4 * i;
  return p[0] | static_cast<unsigned>(p[1]) << 8 | static_cast<unsigned>(p[2]) << 16 |
         static_cast<unsigned>(p[3]) << 24;
}

/// A word of codes' upper bits: bit 8 b + s is bit 4 (t + 4 (s % 2)) + b of word s / 2 of `bits`, b = 0..3, s = 0..7.
/// @param bits four words of 32 bits, one bit a code
__host__ __device__ __forceinline__ unsigned spread_bits(const unsigned (&bits)[4], int t) {
  unsigned out = 0;
  for (int s = 0; s < 8; ++s) {
    const unsigned four = bits[s / 2] >> (4 * (t + 4 * (s % 2))) & 15u;
    for (int b = 0; b < 4; ++b) out |= (four >> b & 1u) << (8 * b + s);
  }
  return out;
}

/// The nibbles of a word, low ones of bytes 0 to 3 into the lower half, high ones into the upper.
__host__ __device__ __forceinline__ unsigned part_nibbles(unsigned w) {
  unsigned out = 0;
  for (int b = 0; b < 4; ++b) {
    out |= (w >> (8 * b) & 15u) << (4 * b) | (w >> (8 * b + 4) & 15u) << (16 + 4 * b);
  }
  return out;
}

// How each format fills a tile --------------------------------------------------------------------------------------
// word(source, i) is word i of the tile.

// ANCHOR: nibble_tile
/// Codes of four blocks of 32 nibbles: vectors 0 and 1 are rows g and g + 8; word j of a lane is word t of block j.
template <class Block>
struct NibbleTile {
  static constexpr int kSteps = 4;    // activations' blocks of 32 that a tile spans
  static constexpr int kCodes = 256;  // words of codes
  static __host__ __device__ unsigned codes(const Source<Block>& s, int i) {
    const int lane = i % 128 / 4;
    const Block* b = s.at(lane / 4 + i / 128 * 8, i % 4);
    return b != nullptr ? word(b->qs, lane % 4) : 0;
  }
};

/// Scales of four blocks: word 4 g + t has block t of row g in its lower half, of row g + 8 in its upper.
template <class Block>
__host__ __device__ unsigned scale_pair(const Source<Block>& s, int i) {
  const Block *a = s.at(i / 4, i % 4), *b = s.at(i / 4 + 8, i % 4);
  return (a != nullptr ? a->d : 0u) | (b != nullptr ? static_cast<unsigned>(b->d) << 16 : 0u);
}
// ANCHOR_END: nibble_tile
/// Scales and minima of four blocks: words 2 (4 g + t) and the next have block t of rows g and g + 8.
template <class Block>
__host__ __device__ unsigned scale_and_min(const Source<Block>& s, int i) {
  const Block* b = s.at(i / 8 + i % 2 * 8, i / 2 % 4);
  return b != nullptr ? b->d | static_cast<unsigned>(b->m) << 16 : 0;
}
/// Fifth bits of four blocks: word i / 2 % 32 is lane's, of row g (i % 2 == 0) or g + 8.
template <class Block>
__host__ __device__ unsigned fifth_bits(const Source<Block>& s, int i) {
  const int lane = i / 2;
  unsigned bits[4] = {};
  for (int j = 0; j < 4; ++j) {
    const Block* b = s.at(lane / 4 + i % 2 * 8, j);
    if (b != nullptr) bits[j] = word(b->qh, 0);
  }
  return spread_bits(bits, lane % 4);
}

template <class Block>
struct Tile;

// ANCHOR: tile_of_q4_0
template <>
struct Tile<BlockQ4_0> : NibbleTile<BlockQ4_0> {
  static constexpr int kWords = kCodes + 32;
  static __host__ __device__ unsigned word_at(const Source<BlockQ4_0>& s, int i) {
    return i < kCodes ? codes(s, i) : scale_pair(s, i - kCodes);
  }
};
// ANCHOR_END: tile_of_q4_0
template <>
struct Tile<BlockIQ4_NL> : NibbleTile<BlockIQ4_NL> {
  static constexpr int kWords = kCodes + 32;
  static __host__ __device__ unsigned word_at(const Source<BlockIQ4_NL>& s, int i) {
    return i < kCodes ? part_nibbles(codes(s, i)) : scale_pair(s, i - kCodes);
  }
};
template <>
struct Tile<BlockQ4_1> : NibbleTile<BlockQ4_1> {
  static constexpr int kWords = kCodes + 64;
  static __host__ __device__ unsigned word_at(const Source<BlockQ4_1>& s, int i) {
    return i < kCodes ? codes(s, i) : scale_and_min(s, i - kCodes);
  }
};
template <>
struct Tile<BlockQ5_0> : NibbleTile<BlockQ5_0> {
  static constexpr int kWords = kCodes + 64 + 32;
  static __host__ __device__ unsigned word_at(const Source<BlockQ5_0>& s, int i) {
    if (i < kCodes) return codes(s, i);
    return i < kCodes + 64 ? fifth_bits(s, i - kCodes) : scale_pair(s, i - kCodes - 64);
  }
};
template <>
struct Tile<BlockQ5_1> : NibbleTile<BlockQ5_1> {
  static constexpr int kWords = kCodes + 64 + 64;
  static __host__ __device__ unsigned word_at(const Source<BlockQ5_1>& s, int i) {
    if (i < kCodes) return codes(s, i);
    return i < kCodes + 64 ? fifth_bits(s, i - kCodes) : scale_and_min(s, i - kCodes - 64);
  }
};
/// Vectors 0 and 1 are row g, 2 and 3 row g + 8; a vector has words t and t + 4 of two blocks.
template <>
struct Tile<BlockQ8_0> {
  static constexpr int kSteps = 4, kCodes = 512, kWords = kCodes + 32;
  static __host__ __device__ unsigned word_at(const Source<BlockQ8_0>& s, int i) {
    if (i >= kCodes) return scale_pair(s, i - kCodes);
    const int v = i / 128, lane = i % 128 / 4;
    const BlockQ8_0* b = s.at(lane / 4 + v / 2 * 8, v % 2 * 2 + i % 4 / 2);
    return b != nullptr ? word(reinterpret_cast<const std::uint8_t*>(b->qs), lane % 4 + i % 2 * 4) : 0;
  }
};

/// Nibbles of Q4_K and Q5_K: vectors 0 and 1 are row g, 2 and 3 row g + 8; a vector has words t and t + 4 of two groups
/// of 32 bytes.
template <class Block>
struct NibbleTileK {
  static constexpr int kSteps = 8, kCodes = 512;
  static __host__ __device__ unsigned codes(const Source<Block>& s, int i) {
    const int v = i / 128, lane = i % 128 / 4, group = v % 2 * 2 + i % 4 / 2;
    const Block* b = s.at(lane / 4 + v / 2 * 8);
    return b != nullptr ? word(b->qs, 8 * group + lane % 4 + i % 2 * 4) : 0;
  }
  /// d, dmin and the packed scales of row i / 4, as in the block.
  static __host__ __device__ unsigned head(const Source<Block>& s, int i) {
    const Block* b = s.at(i / 4);
    if (b == nullptr) return 0;
    return i % 4 == 0 ? b->d | static_cast<unsigned>(b->dmin) << 16 : word(b->scales, i % 4 - 1);
  }
};
template <>
struct Tile<BlockQ4_K> : NibbleTileK<BlockQ4_K> {
  static constexpr int kWords = kCodes + 64;
  static __host__ __device__ unsigned word_at(const Source<BlockQ4_K>& s, int i) {
    return i < kCodes ? codes(s, i) : head(s, i - kCodes);
  }
};
/// Fifth bits: a lane's vector is words t and t + 4 of row g, then of row g + 8.
template <>
struct Tile<BlockQ5_K> : NibbleTileK<BlockQ5_K> {
  static constexpr int kWords = kCodes + 128 + 64;
  static __host__ __device__ unsigned word_at(const Source<BlockQ5_K>& s, int i) {
    if (i < kCodes) return codes(s, i);
    if (i >= kCodes + 128) return head(s, i - kCodes - 128);
    const int lane = (i - kCodes) / 4, j = i % 4;
    const BlockQ5_K* b = s.at(lane / 4 + j / 2 * 8);
    return b != nullptr ? word(b->qh, lane % 4 + j % 2 * 4) : 0;
  }
};
/// Low bits: vectors 0 and 1 are the halves of row g, 2 and 3 of row g + 8; a vector has words t, t + 4, t + 8, t + 12 of
/// its half's 64 bytes. High bits: vector 4 is row g, 5 row g + 8: words t and t + 4 of each half's 32 bytes.
template <>
struct Tile<BlockQ6_K> {
  static constexpr int kSteps = 8, kCodes = 512, kHigh = 256, kWords = kCodes + kHigh + 64 + 8;
  static __host__ __device__ unsigned word_at(const Source<BlockQ6_K>& s, int i) {
    if (i < kCodes) {
      const int v = i / 128, lane = i % 128 / 4;
      const BlockQ6_K* b = s.at(lane / 4 + v / 2 * 8);
      return b != nullptr ? word(b->ql, v % 2 * 16 + lane % 4 + i % 4 * 4) : 0;
    }
    i -= kCodes;
    if (i < kHigh) {
      const int lane = i % 128 / 4;
      const BlockQ6_K* b = s.at(lane / 4 + i / 128 * 8);
      return b != nullptr ? word(b->qh, i % 4 / 2 * 8 + lane % 4 + i % 2 * 4) : 0;
    }
    i -= kHigh;
    if (i < 64) {  // scales of row i / 4
      const BlockQ6_K* b = s.at(i / 4);
      return b != nullptr ? word(reinterpret_cast<const std::uint8_t*>(b->scales), i % 4) : 0;
    }
    const BlockQ6_K *a = s.at(i - 64), *b = s.at(i - 64 + 8);  // d of rows g and g + 8
    return (a != nullptr ? a->d : 0u) | (b != nullptr ? static_cast<unsigned>(b->d) << 16 : 0u);
  }
};
/// Two-bit codes: vector 0 is row g, 1 row g + 8; words t and t + 4 of each half's 32 bytes.
template <>
struct Tile<BlockQ2_K> {
  static constexpr int kSteps = 8, kCodes = 256, kWords = kCodes + 64 + 16;
  static __host__ __device__ unsigned word_at(const Source<BlockQ2_K>& s, int i) {
    if (i < kCodes) {
      const int lane = i % 128 / 4;
      const BlockQ2_K* b = s.at(lane / 4 + i / 128 * 8);
      return b != nullptr ? word(b->qs, i % 4 / 2 * 8 + lane % 4 + i % 2 * 4) : 0;
    }
    i -= kCodes;
    if (i < 64) {  // scales and minima of row i / 4
      const BlockQ2_K* b = s.at(i / 4);
      return b != nullptr ? word(b->scales, i % 4) : 0;
    }
    const BlockQ2_K* b = s.at((i - 64) / 2 + i % 2 * 8);  // rows g and g + 8 side by side
    return b != nullptr ? b->d | static_cast<unsigned>(b->dmin) << 16 : 0;
  }
};
/// Code of sub-block `sub` and place k = 0..31 in it: two low bits and a third one, 0..7.
__host__ __device__ __forceinline__ unsigned three_bits(const BlockQ3_K& b, int sub, int k) {
  const unsigned low = static_cast<unsigned>(b.qs[sub / 4 * 32 + k]) >> (2 * (sub % 4)) & 3u;
  return low | (static_cast<unsigned>(b.hmask[k]) >> sub & 1u) << 2;
}
/// Three-bit codes, two of them and two bits of a third one in a byte: word i of vector v is made of sub-blocks v and 4 + v,
/// of words t (i < 2) or t + 4 of rows g (i even) or g + 8. Left are sub-blocks 3 and 7: their two high bits are the upper
/// ones of vectors 0 and 2, their low ones bits 7 and 6 of vector 1.
/// Then 16 bytes for each g: the three words of row g's scales, and d of rows g and g + 8; then 8 bytes: the first two words
/// of row g + 8's scales; then 4: its third.
template <>
struct Tile<BlockQ3_K> {
  static constexpr int kSteps = 8, kCodes = 384, kWords = kCodes + 32 + 16 + 8;
  static __host__ __device__ unsigned word_at(const Source<BlockQ3_K>& s, int i) {
    if (i < kCodes) {
      const int v = i / 128, lane = i % 128 / 4;
      const BlockQ3_K* b = s.at(lane / 4 + i % 2 * 8);
      unsigned out = 0;
      for (int byte = 0; b != nullptr && byte < 4; ++byte) {
        const int k = 4 * (lane % 4 + i % 4 / 2 * 4) + byte;
        const unsigned third = three_bits(*b, 3, k), seventh = three_bits(*b, 7, k);
        const unsigned left = v == 0   ? third >> 1
                              : v == 2 ? seventh >> 1
                                       : (third & 1u) << 1 | (seventh & 1u);
        out |= (three_bits(*b, v, k) | three_bits(*b, 4 + v, k) << 3 | left << 6) << (8 * byte);
      }
      return out;
    }
    i -= kCodes;
    if (i < 32 && i % 4 == 3) {
      const BlockQ3_K *a = s.at(i / 4), *b = s.at(i / 4 + 8);
      return (a != nullptr ? a->d : 0u) | (b != nullptr ? static_cast<unsigned>(b->d) << 16 : 0u);
    }
    const int row = i < 32 ? i / 4 : i < 48 ? (i - 32) / 2 + 8 : i - 48 + 8;
    const int part = i < 32 ? i % 4 : i < 48 ? i % 2 : 2;
    const BlockQ3_K* b = s.at(row);
    return b != nullptr ? word(b->scales, part) : 0;
  }
};
/// Vectors 0 and 1 are row g, 2 and 3 row g + 8; word i of a vector is word t of sub-block i or 4 + i, its low nibbles in
/// the lower half. Heads of 8 bytes, rows g and g + 8 side by side.
template <>
struct Tile<BlockIQ4_XS> {
  static constexpr int kSteps = 8, kCodes = 512, kWords = kCodes + 32;
  static __host__ __device__ unsigned word_at(const Source<BlockIQ4_XS>& s, int i) {
    if (i < kCodes) {
      const int v = i / 128, lane = i % 128 / 4;
      const BlockIQ4_XS* b = s.at(lane / 4 + v / 2 * 8);
      return b != nullptr ? part_nibbles(word(b->qs, (v % 2 * 4 + i % 4) * 4 + lane % 4)) : 0;
    }
    i -= kCodes;
    const BlockIQ4_XS* b = s.at(i / 4 + i % 4 / 2 * 8);
    if (b == nullptr) return 0;
    return i % 2 == 0 ? b->d | static_cast<unsigned>(b->scales_h) << 16 : word(b->scales_l, 0);
  }
};

/// Whether matrices of the type can be put into tiles: all types with blocks of 32 or 256.
constexpr bool has_tiles(WeightType type) { return info(type).block_elems > 1; }

/// Calls f(BlockTag<Block>) for a type that has tiles; Status of an error for one that has none.
template <class F>
Status with_tile_block(WeightType type, F&& f) {
  return with_block(type, [&](auto tag) -> Status {
    if constexpr (decltype(tag)::type::kElems > 1) {
      return f(tag);
    } else {
      return Status::error(std::string("tiles: ") + info(decltype(tag)::type::kType).name +
                           " weights have no blocks; types with blocks of 32 or 256 have tiles");
    }
  });
}

/// Bytes of a tile: those of its blocks.
template <class Block>
__host__ __device__ constexpr int tile_bytes() {
  static_assert(Tile<Block>::kWords * 4 ==
                kRows * (Tile<Block>::kSteps * 32 / Block::kElems) * int{sizeof(Block)});
  return Tile<Block>::kWords * 4;
}

/// Tiles along a row: steps of a warp.
template <class Block>
constexpr long long steps(long long id) {
  constexpr long long kSpan = 32LL * Tile<Block>::kSteps;
  return (id + kSpan - 1) / kSpan;
}
constexpr long long row_tiles(long long od) { return (od + kRows - 1) / kRows; }

/// Bytes of a matrix in tiles; 0 for a type that has none.
inline std::size_t bytes(WeightType type, Shape shape) {
  std::size_t n = 0;
  (void)with_tile_block(type, [&](auto tag) -> Status {
    using Block = typename decltype(tag)::type;
    n = static_cast<std::size_t>(row_tiles(shape.od) * steps<Block>(shape.id)) * tile_bytes<Block>();
    return {};
  });
  return n;
}

/// A thread a word.
template <class Block>
__global__ void __launch_bounds__(256)
    repack_tiles(const Block* __restrict__ blocks,  // [od][id / kElems]
                 unsigned* __restrict__ out,        // [row_tiles][steps][kWords]
                 long long od, long long per_row, long long row_steps, long long words) {
  const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= words) return;
  constexpr int kWords = Tile<Block>::kWords;
  constexpr int kBlocks = Tile<Block>::kSteps * 32 / Block::kElems;  // of a row, in a tile
  const long long tile = at / kWords;
  const Source<Block> s{blocks, per_row, tile / row_steps * kRows, tile % row_steps * kBlocks, od};
  out[at] = Tile<Block>::word_at(s, static_cast<int>(at % kWords));
}

/// From a file's blocks [od][id / block] to tiles, both in device memory; `out` has bytes(type, shape) bytes and begins
/// at a multiple of 16. Does not synchronise.
inline Status launch_repack(WeightType type, const void* blocks, void* out, Shape shape, Stream& stream) {
  if (Status ok = whole_blocks(type, shape); !ok.ok()) return ok;
  if (reinterpret_cast<std::uintptr_t>(out) % 16 != 0) {
    return Status::error("tiles must begin at a multiple of 16 bytes");
  }
  return with_tile_block(type, [&](auto tag) -> Status {
    using Block = typename decltype(tag)::type;
    const long long words = static_cast<long long>(bytes(type, shape) / 4);
    return launch(repack_tiles<Block>, dim3(static_cast<unsigned>((words + 255) / 256)), dim3(256), 0, stream,
                  static_cast<const Block*>(blocks), static_cast<unsigned*>(out), shape.od,
                  shape.id / Block::kElems, steps<Block>(shape.id), words);
  });
}

/// The layout as the harness wants it.
inline const WeightLayout kLayout = {"tiles", bytes, launch_repack};

}  // namespace ladder::tiles
