// Groups of weights to signed codes in the order of the row, and to scales: for the x86 tiles that are not
// quant_int8_avx512.hpp's. The file that includes this one defines LADDER_TARGET, the target attribute of
// every function: AVX2, FMA and F16C at least.
#include <immintrin.h>

#include <cstring>

#include "kernels/cpu/quant_tile.hpp"
#include "kernels/quant/decode.hpp"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of GCC 12's own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace ladder::cpu {
namespace {

#define LADDER_TARGET_INLINE LADDER_TARGET inline __attribute__((always_inline))

/// 256 weights: value = scale of the run * code + offset of the run.
struct DecodedGroup {
  alignas(64) std::int8_t codes[kGroupElems];
  alignas(64) float scales[kGroupRuns];
  alignas(64) float offsets[kGroupRuns];  // only of formats that have them
};

template <class Block>
inline constexpr bool kHasOffset = std::is_same_v<decltype(run_scale(std::declval<Block>(), 0)), ScaleOffset>;

LADDER_TARGET_INLINE __m256i load32(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
LADDER_TARGET_INLINE void store32(std::int8_t* p, __m256i v) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(p), v);
}
LADDER_TARGET_INLINE __m256i every(int v) { return _mm256_set1_epi8(static_cast<char>(v)); }
/// Bytes shifted right by 0..7 and masked.
LADDER_TARGET_INLINE __m256i bits(__m256i v, int shift, int mask) {
  return _mm256_and_si256(_mm256_srli_epi16(v, shift), every(mask));
}
/// `value` in the bytes of v that have one of the bits of `bit`.
LADDER_TARGET_INLINE __m256i where_set(__m256i v, __m256i bit, int value) {
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(v, bit), bit), every(value));
}

/// 16 bytes of nibbles: the low ones first.
LADDER_TARGET_INLINE __m256i nibbles(const std::uint8_t* qs) {
  const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(qs));
  return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(both, 4), both), every(15));
}
/// `value` in each of 32 bytes whose bit is set.
LADDER_TARGET_INLINE __m256i where_bit(const std::uint8_t* qh, int value) {
  std::int32_t word;
  std::memcpy(&word, qh, sizeof word);
  const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ULL));
  return where_set(_mm256_shuffle_epi8(_mm256_set1_epi32(word), spread), bit, value);
}
LADDER_TARGET_INLINE __m256i iq4_values(__m256i codes) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4Values.data()));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}

// Codes of a block, zero point taken off, as run_code() of decode.hpp has them.

LADDER_TARGET_INLINE void codes_of(const BlockQ4_0& b, std::int8_t* out) {
  store32(out, _mm256_sub_epi8(nibbles(b.qs), every(8)));
}
LADDER_TARGET_INLINE void codes_of(const BlockQ4_1& b, std::int8_t* out) { store32(out, nibbles(b.qs)); }
LADDER_TARGET_INLINE void codes_of(const BlockQ5_0& b, std::int8_t* out) {
  store32(out, _mm256_sub_epi8(_mm256_or_si256(nibbles(b.qs), where_bit(b.qh, 16)), every(16)));
}
LADDER_TARGET_INLINE void codes_of(const BlockQ5_1& b, std::int8_t* out) {
  store32(out, _mm256_or_si256(nibbles(b.qs), where_bit(b.qh, 16)));
}
LADDER_TARGET_INLINE void codes_of(const BlockQ8_0& b, std::int8_t* out) { store32(out, load32(b.qs)); }
LADDER_TARGET_INLINE void codes_of(const BlockIQ4_NL& b, std::int8_t* out) {
  store32(out, iq4_values(nibbles(b.qs)));
}
LADDER_TARGET_INLINE void codes_of(const BlockQ2_K& b, std::int8_t* out) {
  for (int n = 0; n < 2; ++n) {
    const __m256i two = load32(b.qs + 32 * n);
    for (int k = 0; k < 4; ++k) store32(out + 128 * n + 32 * k, bits(two, 2 * k, 3));
  }
}
LADDER_TARGET_INLINE void codes_of(const BlockQ3_K& b, std::int8_t* out) {
  const __m256i high = load32(b.hmask);
  for (int n = 0; n < 2; ++n) {
    const __m256i two = load32(b.qs + 32 * n);
    for (int k = 0; k < 4; ++k) {
      const __m256i code = _mm256_or_si256(bits(two, 2 * k, 3), where_set(high, every(1 << (4 * n + k)), 4));
      store32(out + 128 * n + 32 * k, _mm256_sub_epi8(code, every(4)));
    }
  }
}
LADDER_TARGET_INLINE void codes_of(const BlockQ4_K& b, std::int8_t* out) {
  for (int c = 0; c < 4; ++c) {
    const __m256i both = load32(b.qs + 32 * c);
    store32(out + 64 * c, bits(both, 0, 15));
    store32(out + 64 * c + 32, bits(both, 4, 15));
  }
}
LADDER_TARGET_INLINE void codes_of(const BlockQ5_K& b, std::int8_t* out) {
  const __m256i high = load32(b.qh);
  for (int s = 0; s < 8; ++s) {
    const __m256i low = bits(load32(b.qs + s / 2 * 32), 4 * (s % 2), 15);
    store32(out + 32 * s, _mm256_or_si256(low, where_set(high, every(1 << s), 16)));
  }
}
LADDER_TARGET_INLINE void codes_of(const BlockQ6_K& b, std::int8_t* out) {
  for (int n = 0; n < 2; ++n) {
    const __m256i high = load32(b.qh + 32 * n);
    for (int k = 0; k < 4; ++k) {
      const __m256i low = bits(load32(b.ql + 64 * n + 32 * (k % 2)), 4 * (k / 2), 15);
      const __m256i code = _mm256_or_si256(low, _mm256_slli_epi16(bits(high, 2 * k, 3), 4));
      store32(out + 128 * n + 32 * k, _mm256_sub_epi8(code, every(32)));
    }
  }
}
LADDER_TARGET_INLINE void codes_of(const BlockIQ4_XS& b, std::int8_t* out) {
  for (int s = 0; s < 8; ++s) store32(out + 32 * s, iq4_values(nibbles(b.qs + 16 * s)));
}

/// @param count blocks that are there, 1 to 256 / kElems. What is missing has codes and scales of zero.
template <class Block>
LADDER_TARGET_INLINE void decode_group(const Block* b, int count, DecodedGroup& out) {
  constexpr int kRuns = Block::kElems / 16;
  if (count * kRuns < kGroupRuns) {
    std::memset(out.codes, 0, sizeof out.codes);
    std::memset(out.scales, 0, sizeof out.scales);
    std::memset(out.offsets, 0, sizeof out.offsets);
  }
  if constexpr (kRuns == 2) {
    alignas(16) F16Bits d[8] = {}, m[8] = {};
    for (int i = 0; i < count; ++i) {
      codes_of(b[i], out.codes + 32 * i);
      d[i] = b[i].d;
      if constexpr (kHasOffset<Block>) m[i] = b[i].m;
    }
    const auto spread = [](const F16Bits* h, float* f) LADDER_TARGET {  // one a block to one a run
      const __m256 v = _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(h)));
      _mm256_store_ps(f, _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)));
      _mm256_store_ps(f + 8, _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7)));
    };
    spread(d, out.scales);
    if constexpr (kHasOffset<Block>) spread(m, out.offsets);
  } else {
    codes_of(*b, out.codes);
    for (int run = 0; run < kGroupRuns; ++run) {
      const auto scale = run_scale(*b, run);
      out.scales[run] = scale.d;
      if constexpr (kHasOffset<Block>) out.offsets[run] = scale.offset;
    }
  }
}

}  // namespace
}  // namespace ladder::cpu
