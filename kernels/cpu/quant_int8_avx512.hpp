// The int8 tiles for AVX-512, once with VNNI and once without: the file that includes this one says which.
//
//   LADDER_AVX512      the target attribute of every function
//   LADDER_HAVE_VNNI   1 where vpdpbusd may be used, else 0
//
// Lanes. A 512-bit vector of codes has 16 lanes of 4 codes. All codes of a lane belong to one run, four
// vectors together hold a group, and vector j holds codes 4j..4j+3 of each run:
//   vector j, lane 4i + k = codes 4j..4j+3 of run 4k + i        i, k, j = 0..3
// So four multiply-and-add instructions leave one int32 a run, and one vector of scales turns them into f32. Where two
// runs share a scale, their integers are added up first, in the lane of the first.
// The order of the runs is the one that a transpose of four vectors of bytes as they lie in memory gives:
// 128-bit lane i of vector k is run 4k + i, which becomes lane k of 128-bit lane i.
#include <immintrin.h>

#include <array>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "kernels/cpu/lanes_avx512.hpp"
#include "kernels/cpu/quant_acts.hpp"
#include "kernels/cpu/quant_tile.hpp"
#include "kernels/quant/blocks.hpp"

// GCC 12 builds the unmasked intrinsics from a value that is undefined on purpose, and then warns of it.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace ladder::cpu {
namespace {

#define LADDER_INLINE LADDER_AVX512 inline __attribute__((always_inline))

// ANCHOR: cpu_int8_lanes
// Where things go -------------------------------------------------------------------------------------------

constexpr int run_of_lane(int lane) { return 4 * (lane % 4) + lane / 4; }
constexpr int block_of_lane(int lane) { return run_of_lane(lane) / 2; }  // of 32 elements

struct alignas(64) Dwords {
  std::uint32_t at[16];
};
struct alignas(64) Words {
  std::uint16_t at[32];
};
struct alignas(64) Bytes {
  std::uint8_t at[64];
};

template <class F>
constexpr Dwords by_lane(F&& value) {
  Dwords d{};
  for (int lane = 0; lane < 16; ++lane) d.at[lane] = static_cast<std::uint32_t>(value(lane));
  return d;
}
/// Shuffles, inside each 128-bit lane, byte `of(lane)` to the lowest byte of a lane; the other bytes become
/// zero.
template <class F>
constexpr Bytes byte_to_lane(F&& of) {
  Bytes b{};
  for (int i = 0; i < 64; ++i) b.at[i] = static_cast<std::uint8_t>(i % 4 == 0 ? of(i / 4) : 0x80);
  return b;
}

/// Word `word(lane, half)` of a group as seen through two vectors of 32 words, loaded at byte offsets low and
/// high. No constant expression, and so an error of the compiler, for a word that is in neither.
template <class F>
constexpr Words words_through(int low, int high, F&& word) {
  Words w{};
  for (int i = 0; i < 32; ++i) {
    const int at = word(i / 2, i % 2);
    if (at >= low / 2 && at < low / 2 + 32) {
      w.at[i] = static_cast<std::uint16_t>(at - low / 2);
    } else if (at >= high / 2 && at < high / 2 + 32) {
      w.at[i] = static_cast<std::uint16_t>(32 + at - high / 2);
    } else {
      throw "a word is in neither vector";
    }
  }
  return w;
}
/// The same for the 16 words of a half vector, one a lane: f16 scales.
template <class F>
constexpr Words halves_through(int low, int high, F&& word) {
  return words_through(low, high, [&](int dword, int half) { return word((2 * dword + half) % 16); });
}

LADDER_INLINE __m512i vector(const Dwords& d) { return _mm512_load_si512(d.at); }
LADDER_INLINE __m512i vector(const Words& w) { return _mm512_load_si512(w.at); }
LADDER_INLINE __m512i vector(const Bytes& b) { return _mm512_load_si512(b.at); }

/// The bytes of a group of a row. The last group of a row may be cut: what is missing reads as zero.
template <bool Whole>
struct Source {
  const unsigned char* p;
  int bytes;  // an even number
  /// 64 bytes from an even offset on. They may lie beyond a cut group, but not beyond a whole one.
  LADDER_INLINE __m512i load(int offset) const {
    if constexpr (Whole) {
      __m512i v = _mm512_loadu_si512(p + offset);
      // Stays in a register: GCC would load it again for each use, across two cache lines each time.
      asm("" : "+v"(v));
      return v;
    } else {
      const int words = (bytes - offset) / 2;
      const auto present = words >= 32 ? ~0U : words <= 0 ? 0U : (1U << words) - 1;
      return _mm512_maskz_loadu_epi16(present, p + offset);
    }
  }
  /// `into` with the words of `mask` replaced.
  LADDER_INLINE __m512i load(__m512i into, __mmask32 mask, int offset) const {
    if constexpr (!Whole) {
      const int words = (bytes - offset) / 2;
      const auto present = words >= 32 ? ~0U : words <= 0 ? 0U : (1U << words) - 1;
      into = _mm512_mask_blend_epi16(mask, into, _mm512_setzero_si512());
      mask &= present;
    }
    return _mm512_mask_loadu_epi16(into, mask, p + offset);
  }
};
LADDER_INLINE __m128i load16(const unsigned char* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
LADDER_INLINE __m512i everywhere(__m128i v) { return _mm512_broadcast_i32x4(v); }
LADDER_INLINE __m512i dwords(std::uint32_t v) { return _mm512_set1_epi32(static_cast<int>(v)); }
LADDER_INLINE __m512i bytes(int v) { return _mm512_set1_epi8(static_cast<char>(v)); }

/// f16 words 0..15 to f32.
LADDER_INLINE __m512 halves_to_float(__m512i v) {
  return _mm512_cvtph_ps(_mm512_maskz_extracti64x4_epi64(0xff, v, 0));
}
/// One f16 to all lanes.
LADDER_INLINE __m512 half_everywhere(const unsigned char* p) {
  std::uint16_t h;
  std::memcpy(&h, p, sizeof h);
  return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(h)));
}

/// To each run what it and the other run of its 32 elements have together.
LADDER_INLINE __m512i both_runs(__m512i v) {
  return _mm512_add_epi32(v, _mm512_shuffle_i32x4(v, v, 0xb1));  // 128-bit lanes 0 and 1, 2 and 3
}

/// Vectors of memory order to vectors of lanes: see the top.
LADDER_INLINE void transpose(const __m512i v[4], __m512i w[4]) {
  const __m512i low01 = _mm512_unpacklo_epi32(v[0], v[1]), high01 = _mm512_unpackhi_epi32(v[0], v[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(v[2], v[3]), high23 = _mm512_unpackhi_epi32(v[2], v[3]);
  w[0] = _mm512_unpacklo_epi64(low01, low23);
  w[1] = _mm512_unpackhi_epi64(low01, low23);
  w[2] = _mm512_unpacklo_epi64(high01, high23);
  w[3] = _mm512_unpackhi_epi64(high01, high23);
}

// ANCHOR_END: cpu_int8_lanes

// Formats ---------------------------------------------------------------------------------------------------

// ANCHOR: cpu_int8_blocks
/// A group of weights: value = scale * (code - zero point of the format) + offset.
struct Weights {
  __m512i codes[4];  // unsigned bytes
  __m512 scale;      // a lane
  __m512 offset;     // a lane; only of formats that have one
};

/// What a lane of nibbles is shifted by, when run 4k + i is in the high nibbles of its bytes for odd i.
constexpr Dwords kNibbleOfOddRuns = by_lane([](int lane) { return 4 * (run_of_lane(lane) % 2); });

/// Four code vectors out of the 128 nibble bytes of eight 32-element blocks. @param c block b's bytes are
/// 16b..16b+15
LADDER_INLINE void nibbles_of_blocks(const __m512i c[2], __m512i w[4]) {
  static constexpr auto kDword = [](int j) {
    return by_lane([j](int lane) { return 4 * block_of_lane(lane) + j; });
  };
  static constexpr Dwords kPick[4] = {kDword(0), kDword(1), kDword(2), kDword(3)};
  const __m512i shift = vector(kNibbleOfOddRuns), mask = bytes(15);
  for (int j = 0; j < 4; ++j) {
    const __m512i both = _mm512_permutex2var_epi32(c[0], vector(kPick[j]), c[1]);
    w[j] = _mm512_and_si512(_mm512_srlv_epi32(both, shift), mask);
  }
}

/// Eight blocks of 20 to 24 bytes: two vectors see all of four.
template <int BlockBytes>
struct Blocks {
  static constexpr int kSecond = 4 * BlockBytes - 64;  // where the second vector of four blocks begins
  __m512i low[2], high[2];                             // blocks 0..3, blocks 4..7

  template <bool Whole>
  LADDER_INLINE explicit Blocks(const Source<Whole>& s)
      : low{s.load(0), s.load(4 * BlockBytes)}, high{s.load(kSecond), s.load(4 * BlockBytes + kSecond)} {}

  /// The 16-byte field at byte Field of blocks 4n..4n+3, one after the other.
  template <int Field>
  LADDER_INLINE __m512i fields(int n) const {
    static constexpr Words kPick = words_through(0, kSecond, [](int lane, int half) {
      return (lane / 4 * BlockBytes + Field) / 2 + 2 * (lane % 4) + half;
    });
    return _mm512_permutex2var_epi16(low[n], vector(kPick), high[n]);
  }
  /// The f16 at byte Field of each block, by lane.
  template <int Field>
  LADDER_INLINE __m512 halves() const {
    static constexpr Words kPick = halves_through(
        0, kSecond, [](int lane) { return (block_of_lane(lane) % 4 * BlockBytes + Field) / 2; });
    const __m512i first = _mm512_permutex2var_epi16(low[0], vector(kPick), high[0]);
    const __m512i last = _mm512_permutex2var_epi16(low[1], vector(kPick), high[1]);
    return halves_to_float(_mm512_mask_blend_epi16(kLastBlocks, first, last));
  }
  /// The fifth bits of each lane's run in its low word, of 32 bits at byte Field of each block.
  template <int Field>
  LADDER_INLINE __m512i fifth_bits() const {
    static constexpr Words kPick = words_through(0, kSecond, [](int lane, int) {
      return (block_of_lane(lane) % 4 * BlockBytes + Field) / 2 + run_of_lane(lane) % 2;
    });
    const __m512i first = _mm512_permutex2var_epi16(low[0], vector(kPick), high[0]);
    const __m512i last = _mm512_permutex2var_epi16(low[1], vector(kPick), high[1]);
    return _mm512_mask_blend_epi32(kLastBlocks, first, last);
  }

 private:
  static constexpr __mmask16 last_blocks() {
    unsigned mask = 0;
    for (int lane = 0; lane < 16; ++lane) mask |= static_cast<unsigned>(block_of_lane(lane) / 4) << lane;
    return static_cast<__mmask16>(mask);
  }
  static constexpr __mmask16 kLastBlocks = last_blocks();  // lanes of blocks 4..7
};

/// Adds 16 to the codes whose bit is set. @param high one bit a code: the lowest 16 bits of a
/// lane are codes 0..15
LADDER_INLINE void add_fifth_bits(__m512i high, __m512i w[4]) {
  static constexpr auto kByte = [](int half) {
    Bytes b{};
    for (int i = 0; i < 64; ++i) b.at[i] = static_cast<std::uint8_t>(i % 16 / 4 * 4 + half);
    return b;
  };
  static constexpr Bytes kLow = kByte(0), kHigh = kByte(1);
  const __m512i first = _mm512_shuffle_epi8(high, vector(kLow)),
                last = _mm512_shuffle_epi8(high, vector(kHigh));
  const __m512i even = dwords(0x08040201), odd = dwords(0x80402010), sixteen = bytes(16);
  w[0] = _mm512_mask_add_epi8(w[0], _mm512_test_epi8_mask(first, even), w[0], sixteen);
  w[1] = _mm512_mask_add_epi8(w[1], _mm512_test_epi8_mask(first, odd), w[1], sixteen);
  w[2] = _mm512_mask_add_epi8(w[2], _mm512_test_epi8_mask(last, even), w[2], sixteen);
  w[3] = _mm512_mask_add_epi8(w[3], _mm512_test_epi8_mask(last, odd), w[3], sixteen);
}
// ANCHOR_END: cpu_int8_blocks

template <class Block>
struct
    Format;  // kShift: log2 of the zero point, or -1 for none; kOffset: whether there are offsets; kRuns: neighbouring
             // runs, 1 or 2, that share a scale; decode()

// ANCHOR: cpu_int8_q4_0
template <>
struct Format<BlockQ4_0> {
  static constexpr int kShift = 3;
  static constexpr bool kOffset = false;
  static constexpr int kRuns = 2;
  template <bool Whole>
  static LADDER_INLINE void decode(const Source<Whole>& s, Weights& out) {
    // The dwords j of all eight blocks are in sight of two vectors, for j = 0, 1 and for j = 2, 3.
    static constexpr auto kDword = [](int low, int j) {
      return words_through(low, low + 72,
                           [j](int lane, int half) { return 9 * block_of_lane(lane) + 1 + 2 * j + half; });
    };
    static constexpr Words kPick[4] = {kDword(0, 0), kDword(0, 1), kDword(8, 2), kDword(8, 3)};
    static constexpr Words kScale = halves_through(0, 72, [](int lane) { return 9 * block_of_lane(lane); });
    const __m512i a[2] = {s.load(0), s.load(72)}, b[2] = {s.load(8), s.load(80)};
    const __m512i shift = vector(kNibbleOfOddRuns), mask = bytes(15);
    for (int j = 0; j < 4; ++j) {
      const __m512i* from = j < 2 ? a : b;
      const __m512i both = _mm512_permutex2var_epi16(from[0], vector(kPick[j]), from[1]);
      out.codes[j] = _mm512_and_si512(_mm512_srlv_epi32(both, shift), mask);
    }
    out.scale = halves_to_float(_mm512_permutex2var_epi16(a[0], vector(kScale), a[1]));
  }
};
// ANCHOR_END: cpu_int8_q4_0

// ANCHOR: cpu_int8_q4_1
template <>
struct Format<BlockQ4_1> {
  static constexpr int kShift = -1;
  static constexpr bool kOffset = true;
  static constexpr int kRuns = 2;
  template <bool Whole>
  static LADDER_INLINE void decode(const Source<Whole>& s, Weights& out) {
    const Blocks<20> blocks(s);
    const __m512i c[2] = {blocks.fields<4>(0), blocks.fields<4>(1)};
    nibbles_of_blocks(c, out.codes);
    out.scale = blocks.halves<0>();
    out.offset = blocks.halves<2>();
  }
};
// ANCHOR_END: cpu_int8_q4_1

// ANCHOR: cpu_int8_q5_0
template <>
struct Format<BlockQ5_0> {
  static constexpr int kShift = 4;
  static constexpr bool kOffset = false;
  static constexpr int kRuns = 2;
  template <bool Whole>
  static LADDER_INLINE void decode(const Source<Whole>& s, Weights& out) {
    const Blocks<22> blocks(s);
    const __m512i c[2] = {blocks.fields<6>(0), blocks.fields<6>(1)};
    nibbles_of_blocks(c, out.codes);
    add_fifth_bits(blocks.fifth_bits<2>(), out.codes);
    out.scale = blocks.halves<0>();
  }
};
// ANCHOR_END: cpu_int8_q5_0

// ANCHOR: cpu_int8_q5_1
template <>
struct Format<BlockQ5_1> {
  static constexpr int kShift = -1;
  static constexpr bool kOffset = true;
  static constexpr int kRuns = 2;
  template <bool Whole>
  static LADDER_INLINE void decode(const Source<Whole>& s, Weights& out) {
    const Blocks<24> blocks(s);
    const __m512i c[2] = {blocks.fields<8>(0), blocks.fields<8>(1)};
    nibbles_of_blocks(c, out.codes);
    add_fifth_bits(blocks.fifth_bits<4>(), out.codes);
    out.scale = blocks.halves<0>();
    out.offset = blocks.halves<2>();
  }
};
// ANCHOR_END: cpu_int8_q5_1

// ANCHOR: cpu_int8_q8_0
/// The scales of eight Q8_0 blocks, by lane. Those of blocks 2n and 2n + 1 are words 0 and 17 of the vector
/// at 64n bytes plus 2n words; the four vectors are laid over each other, and each scale gets a word of its
/// own: 17 * (block % 2) + 2n.
template <bool Whole>
LADDER_INLINE __m512 scales_of_q8_0(const Source<Whole>& s) {
  static constexpr Words kPick = halves_through(
      0, 64, [](int lane) { return 17 * (block_of_lane(lane) % 2) + block_of_lane(lane) / 2 * 2; });
  __m512i all = s.load(0);
  all = s.load(all, 1U << 2 | 1U << 19, 64);
  all = s.load(all, 1U << 4 | 1U << 21, 128);
  all = s.load(all, 1U << 6 | 1U << 23, 192);
  return halves_to_float(_mm512_permutexvar_epi16(vector(kPick), all));
}

template <>
struct Format<BlockQ8_0> {
  static constexpr int kShift = 7;  // signed codes become unsigned ones by adding 128
  static constexpr bool kOffset = false;
  static constexpr int kRuns = 2;
  template <bool Whole>
  static LADDER_INLINE void decode(const Source<Whole>& s, Weights& out) {
    const __m512i top = bytes(0x80);
    __m512i v[4];
    for (int k = 0; k < 4; ++k) {  // blocks 2k and 2k + 1: runs 4k..4k+3
      const int at = 68 * k + 2;
      if constexpr (Whole) {
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s.p + at));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s.p + at + 34));
        v[k] = _mm512_inserti64x4(_mm512_zextsi256_si512(low), high, 1);
      } else {
        v[k] = s.load(_mm512_maskz_mov_epi16(0x0000ffffU, s.load(at)), 0xffff0000U, at + 2);
      }
      v[k] = _mm512_xor_si512(v[k], top);
    }
    transpose(v, out.codes);
    out.scale = scales_of_q8_0(s);
  }
};
// ANCHOR_END: cpu_int8_q8_0

// ANCHOR: cpu_int8_iq4_table
/// Table values plus 128.
constexpr Bytes iq4_table() {
  Bytes b{};
  for (std::size_t i = 0; i < 64; ++i) b.at[i] = static_cast<std::uint8_t>(kIq4Values[i % 16] + 128);
  return b;
}
constexpr Bytes kIq4Table = iq4_table();
// ANCHOR_END: cpu_int8_iq4_table

// ANCHOR: cpu_int8_iq4_nl
template <>
struct Format<BlockIQ4_NL> {
  static constexpr int kShift = 7;
  static constexpr bool kOffset = false;
  static constexpr int kRuns = 2;
  template <bool Whole>
  static LADDER_INLINE void decode(const Source<Whole>& s, Weights& out) {
    Format<BlockQ4_0>::decode(s, out);  // nibbles and scales lie at the same places
    for (__m512i& c : out.codes) c = _mm512_shuffle_epi8(vector(kIq4Table), c);
  }
};
// ANCHOR_END: cpu_int8_iq4_nl

// ANCHOR: cpu_int8_iq4_xs
template <>
struct Format<BlockIQ4_XS> {
  static constexpr int kShift = 7;
  static constexpr bool kOffset = false;
  static constexpr int kRuns = 2;
  template <bool Whole>
  static LADDER_INLINE void decode(const Source<Whole>& s, Weights& out) {
    const __m512i c[2] = {s.load(8), s.load(72)};
    nibbles_of_blocks(c, out.codes);
    for (__m512i& w : out.codes) w = _mm512_shuffle_epi8(vector(kIq4Table), w);
    static constexpr Dwords kLow = by_lane([](int lane) { return 4 * block_of_lane(lane); });
    static constexpr Dwords kHigh = by_lane([](int lane) { return 2 * block_of_lane(lane); });
    std::uint16_t high;
    std::uint32_t low;
    std::memcpy(&high, s.p + 2, sizeof high);
    std::memcpy(&low, s.p + 4, sizeof low);
    const __m512i lows = _mm512_and_si512(_mm512_srlv_epi32(dwords(low), vector(kLow)), dwords(15));
    const __m512i highs = _mm512_and_si512(_mm512_srlv_epi32(dwords(high), vector(kHigh)), dwords(3));
    const __m512i scale = _mm512_sub_epi32(_mm512_or_si512(lows, _mm512_slli_epi32(highs, 4)), dwords(32));
    out.scale = _mm512_mul_ps(half_everywhere(s.p), _mm512_cvtepi32_ps(scale));
  }
};
// ANCHOR_END: cpu_int8_iq4_xs

// ANCHOR: cpu_int8_k4
/// Scales and offsets of Q4_K and Q5_K, whose first 16 bytes are alike: d, dmin, twelve bytes of 6-bit
/// numbers.
LADDER_INLINE void scales_of_k4(const unsigned char* p, Weights& out) {
  // Sub-blocks j < 4 have their six bits in byte j (scale) and j + 4 (minimum); the others have four bits in
  // byte j + 4, low and high nibble, and two at the top of byte j - 4 and of byte j.
  static constexpr int kFirst = 4;  // byte 0 of the twelve
  static constexpr Bytes kScale = byte_to_lane([](int lane) {
    const int j = block_of_lane(lane);
    return kFirst + (j < 4 ? j : j + 4);
  });
  static constexpr Bytes kScaleTop = byte_to_lane([](int lane) {
    const int j = block_of_lane(lane);
    return j < 4 ? 0x80 : kFirst + j - 4;
  });
  static constexpr Bytes kMin = byte_to_lane([](int lane) { return kFirst + block_of_lane(lane) + 4; });
  static constexpr Bytes kMinTop = byte_to_lane([](int lane) {
    const int j = block_of_lane(lane);
    return j < 4 ? 0x80 : kFirst + j;
  });
  static constexpr Dwords kScaleMask = by_lane([](int lane) { return block_of_lane(lane) < 4 ? 63 : 15; });
  static constexpr Dwords kMinMask = by_lane([](int lane) { return block_of_lane(lane) < 4 ? 63 : 15; });
  static constexpr Dwords kMinShift = by_lane([](int lane) { return block_of_lane(lane) < 4 ? 0 : 4; });
  const __m128i head = load16(p);
  const __m512i all = everywhere(head), top = dwords(0x30);
  const __m512i scale = _mm512_and_si512(_mm512_shuffle_epi8(all, vector(kScale)), vector(kScaleMask));
  const __m512i scale_top = _mm512_srli_epi32(_mm512_shuffle_epi8(all, vector(kScaleTop)), 2);
  const __m512i min = _mm512_and_si512(
      _mm512_srlv_epi32(_mm512_shuffle_epi8(all, vector(kMin)), vector(kMinShift)), vector(kMinMask));
  const __m512i min_top = _mm512_srli_epi32(_mm512_shuffle_epi8(all, vector(kMinTop)), 2);
  const __m512i scales = _mm512_or_si512(scale, _mm512_and_si512(scale_top, top));
  const __m512i mins = _mm512_or_si512(min, _mm512_and_si512(min_top, top));
  out.scale = _mm512_mul_ps(half_everywhere(p), _mm512_cvtepi32_ps(scales));
  out.offset = _mm512_mul_ps(half_everywhere(p + 2), _mm512_cvtepi32_ps(_mm512_sub_epi32(dwords(0), mins)));
}

/// The codes of Q4_K and the low four bits of Q5_K. @param c group n = 0..3 of 64 codes is bytes 32n..32n+31
LADDER_INLINE void nibbles_of_k4(const __m512i c[2], __m512i w[4]) {
  // Run 4k + i is in the low (i < 2) or high nibbles of 16-byte unit 2k + i % 2.
  static constexpr auto kDword = [](int j) {
    return by_lane([j](int lane) { return 4 * (2 * (lane % 4) + lane / 4 % 2) + j; });
  };
  static constexpr Dwords kPick[4] = {kDword(0), kDword(1), kDword(2), kDword(3)};
  static constexpr Dwords kShift = by_lane([](int lane) { return lane / 4 < 2 ? 0 : 4; });
  const __m512i shift = vector(kShift), mask = bytes(15);
  for (int j = 0; j < 4; ++j) {
    const __m512i both = _mm512_permutex2var_epi32(c[0], vector(kPick[j]), c[1]);
    w[j] = _mm512_and_si512(_mm512_srlv_epi32(both, shift), mask);
  }
}
// ANCHOR_END: cpu_int8_k4

// ANCHOR: cpu_int8_bits_of_k
/// Adds `value` to the codes whose bit is set, where bit s of byte l belongs to element 32s + l.
LADDER_INLINE void add_bits_of_k(const unsigned char* bits, int value, __m512i w[4]) {
  static constexpr auto kDword = [](int j) {
    return by_lane([j](int lane) { return 4 * (run_of_lane(lane) % 2) + j; });
  };
  static constexpr Dwords kPick[4] = {kDword(0), kDword(1), kDword(2), kDword(3)};
  static constexpr Dwords kBit = by_lane([](int lane) { return 0x01010101U << block_of_lane(lane); });
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits));
  const __m512i all = _mm512_zextsi256_si512(low), bit = vector(kBit), add = bytes(value);
  for (int j = 0; j < 4; ++j) {
    const __m512i mine = _mm512_permutexvar_epi32(vector(kPick[j]), all);
    w[j] = _mm512_mask_add_epi8(w[j], _mm512_test_epi8_mask(mine, bit), w[j], add);
  }
}
// ANCHOR_END: cpu_int8_bits_of_k

// ANCHOR: cpu_int8_q4_k
template <>
struct Format<BlockQ4_K> {
  static constexpr int kShift = -1;
  static constexpr bool kOffset = true;
  static constexpr int kRuns = 2;
  template <bool Whole>
  static LADDER_INLINE void decode(const Source<Whole>& s, Weights& out) {
    const __m512i c[2] = {s.load(16), s.load(80)};
    nibbles_of_k4(c, out.codes);
    scales_of_k4(s.p, out);
  }
};
// ANCHOR_END: cpu_int8_q4_k

// ANCHOR: cpu_int8_q5_k
template <>
struct Format<BlockQ5_K> {
  static constexpr int kShift = -1;
  static constexpr bool kOffset = true;
  static constexpr int kRuns = 2;
  template <bool Whole>
  static LADDER_INLINE void decode(const Source<Whole>& s, Weights& out) {
    const __m512i c[2] = {s.load(48), s.load(112)};
    nibbles_of_k4(c, out.codes);
    add_bits_of_k(s.p + 16, 16, out.codes);
    scales_of_k4(s.p, out);
  }
};
// ANCHOR_END: cpu_int8_q5_k

// ANCHOR: cpu_int8_two_bits
/// Dword j of 16-byte unit 2 * (k / 2) + i % 2 of 64 bytes: where Q2_K, Q3_K and Q6_K have two bits of run 4k
/// + i, at bit 2 * (2 * (k % 2) + i / 2) of each byte.
LADDER_INLINE __m512i two_bit_dword(__m512i units, int j) {
  static constexpr auto kDword = [](int d) {
    return by_lane([d](int lane) { return 4 * (2 * (lane % 4 / 2) + lane / 4 % 2) + d; });
  };
  static constexpr Dwords kPick[4] = {kDword(0), kDword(1), kDword(2), kDword(3)};
  return _mm512_permutexvar_epi32(vector(kPick[j]), units);
}
constexpr int two_bit_shift(int lane) { return 2 * (2 * (lane % 4 % 2) + lane / 4 / 2); }
// ANCHOR_END: cpu_int8_two_bits

// ANCHOR: cpu_int8_q6_k
template <>
struct Format<BlockQ6_K> {
  static constexpr int kShift = 5;
  static constexpr bool kOffset = false;
  static constexpr int kRuns = 1;
  template <bool Whole>
  static LADDER_INLINE void decode(const Source<Whole>& s, Weights& out) {
    // Low bits of run 4k + i: unit 4 * (k / 2) + i, the high nibbles for odd k.
    static constexpr auto kDword = [](int j) {
      return by_lane([j](int lane) { return 4 * (4 * (lane % 4 / 2) + lane / 4) + j; });
    };
    static constexpr Dwords kPick[4] = {kDword(0), kDword(1), kDword(2), kDword(3)};
    static constexpr Dwords kShiftLow = by_lane([](int lane) { return 4 * (lane % 2); });
    // Two high bits: rotated to bits 4 and 5 of their byte.
    static constexpr Dwords kRotate = by_lane([](int lane) { return (two_bit_shift(lane) + 28) % 32; });
    static constexpr Bytes kScale = byte_to_lane([](int lane) { return run_of_lane(lane); });
    const __m512i c[2] = {s.load(0), s.load(64)}, high = s.load(128);
    for (int j = 0; j < 4; ++j) {
      const __m512i both = _mm512_permutex2var_epi32(c[0], vector(kPick[j]), c[1]);
      const __m512i low = _mm512_and_si512(_mm512_srlv_epi32(both, vector(kShiftLow)), bytes(15));
      const __m512i top = _mm512_rorv_epi32(two_bit_dword(high, j), vector(kRotate));
      out.codes[j] = _mm512_or_si512(low, _mm512_and_si512(top, bytes(0x30)));
    }
    const __m512i scale = _mm512_shuffle_epi8(everywhere(load16(s.p + 192)), vector(kScale));
    const __m512i wide = _mm512_srai_epi32(_mm512_slli_epi32(scale, 24), 24);
    out.scale = _mm512_mul_ps(half_everywhere(s.p + 208), _mm512_cvtepi32_ps(wide));
  }
};
// ANCHOR_END: cpu_int8_q6_k

// ANCHOR: cpu_int8_q3_k
template <>
struct Format<BlockQ3_K> {
  static constexpr int kShift = 2;
  static constexpr bool kOffset = false;
  static constexpr int kRuns = 1;
  template <bool Whole>
  static LADDER_INLINE void decode(const Source<Whole>& s, Weights& out) {
    static constexpr Dwords kShiftTwo = by_lane(two_bit_shift);
    const __m512i two = s.load(32);
    for (int j = 0; j < 4; ++j) {
      out.codes[j] = _mm512_and_si512(_mm512_srlv_epi32(two_bit_dword(two, j), vector(kShiftTwo)), bytes(3));
    }
    add_bits_of_k(s.p, 4, out.codes);
    // Twelve bytes of scales from byte 2 of these 16: four low bits of run r at byte r % 8, two high ones at
    // 8 + r % 4.
    static constexpr Bytes kLow = byte_to_lane([](int lane) { return 2 + run_of_lane(lane) % 8; });
    static constexpr Bytes kHigh = byte_to_lane([](int lane) { return 10 + run_of_lane(lane) % 4; });
    static constexpr Dwords kLowShift = by_lane([](int lane) { return run_of_lane(lane) / 8 * 4; });
    static constexpr Dwords kHighShift = by_lane([](int lane) { return run_of_lane(lane) / 4 * 2; });
    const __m512i all = everywhere(load16(s.p + 94));
    const __m512i low = _mm512_and_si512(
        _mm512_srlv_epi32(_mm512_shuffle_epi8(all, vector(kLow)), vector(kLowShift)), dwords(15));
    const __m512i high = _mm512_and_si512(
        _mm512_srlv_epi32(_mm512_shuffle_epi8(all, vector(kHigh)), vector(kHighShift)), dwords(3));
    const __m512i scale = _mm512_sub_epi32(_mm512_or_si512(low, _mm512_slli_epi32(high, 4)), dwords(32));
    out.scale = _mm512_mul_ps(half_everywhere(s.p + 108), _mm512_cvtepi32_ps(scale));
  }
};
// ANCHOR_END: cpu_int8_q3_k

// ANCHOR: cpu_int8_q2_k
template <>
struct Format<BlockQ2_K> {
  static constexpr int kShift = -1;
  static constexpr bool kOffset = true;
  static constexpr int kRuns = 1;
  template <bool Whole>
  static LADDER_INLINE void decode(const Source<Whole>& s, Weights& out) {
    static constexpr Dwords kShiftTwo = by_lane(two_bit_shift);
    static constexpr Bytes kScale = byte_to_lane([](int lane) { return run_of_lane(lane); });
    const __m512i two = s.load(16);
    for (int j = 0; j < 4; ++j) {
      out.codes[j] = _mm512_and_si512(_mm512_srlv_epi32(two_bit_dword(two, j), vector(kShiftTwo)), bytes(3));
    }
    const __m512i both = _mm512_shuffle_epi8(everywhere(load16(s.p)), vector(kScale));
    const __m512i scale = _mm512_and_si512(both, dwords(15)), min = _mm512_srli_epi32(both, 4);
    out.scale = _mm512_mul_ps(half_everywhere(s.p + 80), _mm512_cvtepi32_ps(scale));
    out.offset =
        _mm512_mul_ps(half_everywhere(s.p + 82), _mm512_cvtepi32_ps(_mm512_sub_epi32(dwords(0), min)));
  }
};
// ANCHOR_END: cpu_int8_q2_k

// Products --------------------------------------------------------------------------------------------------

// ANCHOR: cpu_int8_tiles
/// sum + the four products of unsigned and signed bytes of each lane, exact.
LADDER_INLINE __m512i dot4(__m512i sum, __m512i codes, __m512i acts) {
#if LADDER_HAVE_VNNI
  return _mm512_dpbusd_epi32(sum, codes, acts);
#else
  // vpmaddubsw would saturate at codes of 128 and more, so bytes are widened first, even and odd ones apart.
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0xff)),
                                         _mm512_srai_epi16(_mm512_slli_epi16(acts, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(codes, 8), _mm512_srai_epi16(acts, 8));
  return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
#endif
}

// How far ahead of its rows a tile prefetches weights, in bytes: the hardware alone does not keep
// enough lines under way. Beyond the end of the map a prefetch is ignored.
constexpr int kAhead = 8192;

/// One group of Rows x Tokens. @param lanes of which the row has weights
template <class Block, int Rows, int Tokens, bool Whole>
LADDER_INLINE void add_group(const QuantTile& tile, const unsigned char* p, const ActGroup* acts,
                             long long groups, int bytes, __mmask16 lanes, const char* ahead,
                             __m512 sum[Rows][Tokens]) {
  using F = Format<Block>;
  // Two runs that share a scale are added up as integers, in the lane of the first.
  constexpr __mmask16 kFirst = F::kRuns == 2 ? 0x0f0f : 0xffff;
  Weights w[Rows];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    const unsigned char* row = p + static_cast<std::size_t>(r) * tile.row_bytes;
    F::decode(Source<Whole>{row, bytes}, w[r]);
    w[r].scale = _mm512_maskz_mov_ps(lanes, w[r].scale);
    if constexpr (F::kOffset) w[r].offset = _mm512_maskz_mov_ps(lanes, w[r].offset);
  }
  if (ahead != nullptr) {
#pragma GCC unroll 10
    for (int line = 0; line < Rows * bytes; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T0);
  }
#pragma GCC unroll 8
  for (int t = 0; t < Tokens; ++t) {
    const ActGroup& x = acts[t * groups];
    const __m512 x_scale = _mm512_load_ps(x.scales);
    const __m512i negative_sum = _mm512_load_si512(x.negative_sums);
    const __m512i start = F::kShift >= 0 ? _mm512_slli_epi32(negative_sum, F::kShift >= 0 ? F::kShift : 0)
                                         : _mm512_setzero_si512();
    __m512i dot[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) dot[r] = start;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i codes = _mm512_load_si512(x.codes + 64 * j);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) dot[r] = dot4(dot[r], w[r].codes[j], codes);
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      // sum += weight scale * activation scale * sum of (code - zero point) * activation code
      if constexpr (F::kRuns == 2) dot[r] = both_runs(dot[r]);
      sum[r][t] = _mm512_mask3_fmadd_ps(_mm512_cvtepi32_ps(dot[r]), _mm512_mul_ps(w[r].scale, x_scale),
                                        sum[r][t], kFirst);
    }
    if constexpr (F::kOffset) {  // sum += weight offset * activation scale * sum of activation codes
      const __m512i codes = F::kRuns == 2 ? both_runs(negative_sum) : negative_sum;
      const __m512 negative = _mm512_mul_ps(_mm512_cvtepi32_ps(codes), x_scale);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        sum[r][t] = _mm512_mask3_fnmadd_ps(w[r].offset, negative, sum[r][t], kFirst);
      }
    }
  }
}

/// Sums of Rows x Tokens whose lanes are still apart.
/// @param more what follows the rows may be read: they are not the last of the tile
template <class Block, int Rows, int Tokens>
LADDER_INLINE void add_rows(const QuantTile& tile, long long row, long long token, bool more,
                            __m512 sum[Rows][Tokens]) {
  constexpr int kBlocks = kGroupElems / Block::kElems;  // of a group: 8 or 1
  constexpr int kBytes = kBlocks * static_cast<int>(sizeof(Block));
  constexpr __mmask16 kAll = 0xffff;
  const long long whole = tile.id / kGroupElems, groups = (tile.id + kGroupElems - 1) / kGroupElems;
  const unsigned char* p = tile.weights + static_cast<std::size_t>(row) * tile.row_bytes;
  const ActGroup* acts = tile.acts + token * groups;
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; ++t) sum[r][t] = _mm512_setzero_ps();
  }
  // Only the first tokens of a call find the weights in memory; for later ones they are in L2.
  const bool cold = tile.cold && token == 0;
  const char* ahead = cold ? reinterpret_cast<const char*>(p) + Rows * tile.row_bytes + kAhead : nullptr;
  for (long long g = 0; g < whole; ++g, p += kBytes, ++acts) {
    add_group<Block, Rows, Tokens, true>(tile, p, acts, groups, kBytes, kAll, ahead, sum);
    if (cold) ahead += Rows * kBytes;
  }
  if constexpr (kBlocks > 1) {
    if (whole < groups) {
      const auto blocks = static_cast<std::uint32_t>(tile.id % kGroupElems / Block::kElems);
      const auto rest = static_cast<int>(blocks * sizeof(Block));
      if (more && tile.row_bytes >= static_cast<std::size_t>(kBytes)) {
        // A whole group, of which the scales of what belongs to the next row are dropped.
        static constexpr Dwords kBlock = by_lane(block_of_lane);
        const __mmask16 lanes = _mm512_cmplt_epu32_mask(vector(kBlock), dwords(blocks));
        add_group<Block, Rows, Tokens, true>(tile, p, acts, groups, rest, lanes, ahead, sum);
      } else {
        add_group<Block, Rows, Tokens, false>(tile, p, acts, groups, rest, kAll, ahead, sum);
      }
    }
  }
}

template <class Block, int Rows, int Tokens>
LADDER_AVX512 void multiply_tile(const QuantTile& tile, long long row, long long token) {
  __m512 sum[Rows][Tokens];
  add_rows<Block, Rows, Tokens>(tile, row, token, row + Rows < tile.rows, sum);
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; ++t) tile.out[(token + t) * tile.od + row + r] = sum_of_lanes(sum[r][t]);
  }
}

template <class Block, int Rows, int Tokens>
LADDER_AVX512 void multiply_rows(const QuantTile& tile, long long token) {
  long long row = 0;
  if constexpr (Rows == 1 &&
                Tokens == 1) {  // lanes of 16 rows are added up together: of short rows a third of the time
    for (; row + 16 <= tile.rows; row += 16) {
      __m512 sums[16];
      for (int r = 0; r < 16; ++r) {
        __m512 sum[1][1];
        add_rows<Block, 1, 1>(tile, row + r, token, row + r + 1 < tile.rows, sum);
        sums[r] = sum[0][0];
      }
      _mm512_storeu_ps(tile.out + token * tile.od + row, sums_of_lanes(sums));
    }
  }
  for (; row + Rows <= tile.rows; row += Rows) multiply_tile<Block, Rows, Tokens>(tile, row, token);
  for (; row < tile.rows; ++row) multiply_tile<Block, 1, Tokens>(tile, row, token);
}

template <class Block>
LADDER_AVX512 void multiply(const QuantTile& tile) {
  int token = 0;
  for (; token + 8 <= tile.tokens; token += 8) multiply_rows<Block, 2, 8>(tile, token);
  if (token + 4 <= tile.tokens) multiply_rows<Block, 2, 4>(tile, token), token += 4;
  if (token + 2 <= tile.tokens) multiply_rows<Block, 2, 2>(tile, token), token += 2;
  // One token: a single stream of weights. (Two rows at a time take fewer instructions and get less from
  // memory.)
  if (token < tile.tokens) multiply_rows<Block, 1, 1>(tile, token);
}

// ANCHOR_END: cpu_int8_tiles

// Activations -----------------------------------------------------------------------------------------------

// ANCHOR: cpu_int8_acts
/// @param v 256 codes in order
/// @param scale f32 of a lane
LADDER_INLINE void put(const __m512i v[4], __m512 scale, ActGroup& group) {
  __m512i w[4];
  transpose(v, w);
  __m512i sum = _mm512_setzero_si512();
  for (int j = 0; j < 4; ++j) {
    _mm512_store_si512(group.codes + 64 * j, w[j]);
    sum = dot4(sum, bytes(1), w[j]);
  }
  _mm512_store_si512(group.negative_sums, _mm512_sub_epi32(_mm512_setzero_si512(), sum));
  _mm512_store_ps(group.scales, scale);
}

LADDER_AVX512 void take(const BlockQ8Pad40* blocks, int count, ActGroup& group) {
  static constexpr Words kLane = halves_through(0, 64, block_of_lane);
  alignas(64) std::int8_t codes[kGroupElems] = {};
  alignas(64) std::uint16_t scales[32] = {};  // f16, of a block
  for (int b = 0; b < count; ++b) {
    std::memcpy(codes + 32 * b, blocks[b].q, sizeof blocks[b].q);
    scales[b] = blocks[b].d;
  }
  const __m512i all = _mm512_load_si512(scales);
  __m512i v[4];
  for (int k = 0; k < 4; ++k) v[k] = _mm512_load_si512(codes + 64 * k);
  put(v, halves_to_float(_mm512_permutexvar_epi16(vector(kLane), all)), group);
}
// ANCHOR_END: cpu_int8_acts

/// Largest unsigned words of eight vectors, vector i's in lane i of the lower half.
LADDER_INLINE __m256i largest_of_each(const __m512i v[8]) {
  __m512i four[4], two[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // halves: vectors i and i + 4
    four[i] = _mm512_max_epu32(_mm512_shuffle_i32x4(v[i], v[i + 4], 0x44),
                               _mm512_shuffle_i32x4(v[i], v[i + 4], 0xee));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {  // quarters: vectors i, i + 4, i + 2, i + 6
    two[i] = _mm512_max_epu32(_mm512_shuffle_i32x4(four[i], four[i + 2], 0x88),
                              _mm512_shuffle_i32x4(four[i], four[i + 2], 0xdd));
  }
  // Quarters: vectors 0, 4, 2, 6 in their lanes 0 and 1, vectors 1, 5, 3, 7 in lanes 2 and 3.
  const __m512i one =
      _mm512_max_epu32(_mm512_unpacklo_epi64(two[0], two[1]), _mm512_unpackhi_epi64(two[0], two[1]));
  const __m512i all = _mm512_max_epu32(one, _mm512_shuffle_epi32(one, _MM_PERM_CDAB));
  static constexpr Dwords kPlace = by_lane([](int i) { return i / 2 % 2 * 8 + i / 4 % 2 * 4 + i % 2 * 2; });
  return _mm512_castsi512_si256(_mm512_permutexvar_epi32(vector(kPlace), all));
}

/// act_scale() of eight blocks at a time.
LADDER_AVX512 void quantize(const float* acts, int count, ActGroup& group) {
  alignas(64) float padded[kGroupElems];
  if (count < kGroupElems) {  // what is missing counts as zero
    std::memcpy(padded, acts, static_cast<std::size_t>(count) * sizeof(float));
    std::memset(padded + count, 0, static_cast<std::size_t>(kGroupElems - count) * sizeof(float));
    acts = padded;
  }
  // 1. The largest magnitude of each block. The order of magnitudes is that of their bits; infinities and NaNs come
  //    last.
  const __m512i magnitude = dwords(0x7fffffff);
  __m512i most[8];
#pragma GCC unroll 8
  for (int b = 0; b < 8; ++b) {
    const __m512i x0 = _mm512_loadu_si512(acts + 32 * b), x1 = _mm512_loadu_si512(acts + 32 * b + 16);
    most[b] = _mm512_max_epu32(_mm512_and_si512(x0, magnitude), _mm512_and_si512(x1, magnitude));
  }
  const __m256i largest = largest_of_each(most);
  // 2. Scales and their inverses, by the rules of act_scale().
  const __m256 quotient = _mm256_div_ps(_mm256_castsi256_ps(largest), _mm256_set1_ps(127));
  const __m256 reciprocal = _mm256_div_ps(_mm256_set1_ps(1), quotient);
  const __mmask8 numbers = _mm256_cmplt_epu32_mask(largest, _mm256_set1_epi32(0x7f800000));
  const __mmask8 regular = static_cast<__mmask8>(
      numbers &
      _mm256_cmp_ps_mask(reciprocal, _mm256_set1_ps(std::numeric_limits<float>::max()), _CMP_LE_OQ));
  const __m256 scales = _mm256_mask_blend_ps(numbers, _mm256_set1_ps(std::numeric_limits<float>::quiet_NaN()),
                                             _mm256_maskz_mov_ps(regular, quotient));
  // 3. Codes, to the nearest integer, halves to even; 64 at a time to bytes: packing takes four of each vector in turn.
  static constexpr Dwords kInOrder = by_lane([](int i) { return i % 4 * 4 + i / 4; });
  const __m512 inverses = _mm512_castps256_ps512(_mm256_maskz_mov_ps(regular, reciprocal));
  __m512i codes[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {  // blocks 2k and 2k + 1
    __m512i rounded[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int b = 2 * k + i / 2;
      const __m512 inverse = _mm512_permutexvar_ps(dwords(static_cast<std::uint32_t>(b)), inverses);
      const auto here = static_cast<__mmask16>((regular >> b & 1) != 0 ? 0xffff : 0);
      rounded[i] =
          _mm512_maskz_cvtps_epi32(here, _mm512_mul_ps(_mm512_loadu_ps(acts + 64 * k + 16 * i), inverse));
    }
    const __m512i packed = _mm512_packs_epi16(_mm512_packs_epi32(rounded[0], rounded[1]),
                                              _mm512_packs_epi32(rounded[2], rounded[3]));
    codes[k] = _mm512_permutexvar_epi32(vector(kInOrder), packed);
  }
  static constexpr Dwords kLane = by_lane(block_of_lane);
  put(codes, _mm512_permutexvar_ps(vector(kLane), _mm512_castps256_ps512(scales)), group);
}

/// In the order of WeightType; types without codes have no integer product.
constexpr QuantKernel kInt8[kWeightTypes.size()] = {nullptr,
                                                    nullptr,
                                                    nullptr,
                                                    multiply<BlockQ4_0>,
                                                    multiply<BlockQ4_1>,
                                                    multiply<BlockQ5_0>,
                                                    multiply<BlockQ5_1>,
                                                    multiply<BlockQ8_0>,
                                                    multiply<BlockQ2_K>,
                                                    multiply<BlockQ3_K>,
                                                    multiply<BlockQ4_K>,
                                                    multiply<BlockQ5_K>,
                                                    multiply<BlockQ6_K>,
                                                    multiply<BlockIQ4_NL>,
                                                    multiply<BlockIQ4_XS>};

}  // namespace
}  // namespace ladder::cpu
