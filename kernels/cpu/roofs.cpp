#include "kernels/cpu/roofs.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/cpu/features.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
// The file is compiled for any x86-64; only functions marked with these may use more, and only a CPU that has
// it calls them.
#define LADDER_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))
#define LADDER_AVX512_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define LADDER_AVX2 __attribute__((target("avx2,fma")))
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ladder::cpu {
namespace {

constexpr std::size_t kLineWords = 64 / sizeof(std::uint32_t);

// ---------------------------------------------------------------------------------------------------------
// Any CPU.

/// Runs that a thread reads side by side.
constexpr std::size_t kReadRuns = 4;

std::uint32_t read_portable(const std::uint32_t* words, std::size_t count) {
  std::array<std::uint32_t, 16> sum{};
  std::size_t i = 0;
  for (; i + sum.size() <= count; i += sum.size()) {
    for (std::size_t l = 0; l < sum.size(); ++l) sum[l] += words[i + l];
  }
  std::uint32_t total = 0;
  for (const std::uint32_t s : sum) total += s;
  for (; i < count; ++i) total += words[i];
  return total;
}

void copy_portable(const std::uint32_t* in, std::uint32_t* out, std::size_t count) {
  std::copy_n(in, count, out);
}

/// @param first index of out[0] in the whole buffer
void write_portable(std::uint32_t* out, std::size_t count, std::uint32_t seed, std::size_t first) {
  for (std::size_t i = 0; i < count; ++i) out[i] = roof_write_word(seed, first + i);
}

constexpr int kPortableValues = 32;

void fma_portable(const float* operands, int pairs, float* out) {
  const float x0 = operands[0], y0 = operands[1], x1 = operands[2], y1 = operands[3];
  std::array<float, kPortableValues> r{};
  std::copy_n(operands + 4, r.size(), r.begin());
  for (int p = 0; p < pairs; ++p) {
    for (float& v : r) v = v * x0 + y0;
    for (float& v : r) v = v * x1 + y1;
  }
  std::copy(r.begin(), r.end(), out);
}

std::uint32_t dot4(std::uint32_t a, std::uint32_t b) {
  int sum = 0;
  for (int i = 0; i < 4; ++i) {
    sum += static_cast<int>(a >> (8 * i) & 0xffU) * static_cast<std::int8_t>(b >> (8 * i) & 0xffU);
  }
  return static_cast<std::uint32_t>(sum);
}

/// In this and the other int8 probes an empty asm statement hides from the compiler, at no cost, that b is
/// the same in every step. Otherwise it would compute the products once and only repeat the additions.
void int8_portable(const std::uint32_t* operands, int steps, std::uint32_t* out) {
  std::array<std::uint32_t, kPortableValues> sum{};
  for (int s = 0; s < steps; ++s) {
    std::uint32_t b = operands[0];
    asm volatile("" : "+r"(b));
    for (std::size_t v = 0; v < sum.size(); ++v) sum[v] += dot4(operands[1 + v], b);
  }
  std::copy(sum.begin(), sum.end(), out);
}

#if defined(__x86_64__)
// ---------------------------------------------------------------------------------------------------------
// AVX-512.

// ANCHOR: cpu_roof_read
/// The plain loop: for (i = 0; i < count; ++i) total += words[i]. Here as four runs side by side with two loads of 64
/// bytes each: a core keeps more requests to memory open for several runs than for one, and rows of a matrix that are
/// read together are several runs too.
LADDER_AVX512 std::uint32_t read_avx512(const std::uint32_t* words, std::size_t count) {
  constexpr std::size_t kLoads = kReadRuns * 2, kStep = 2 * kLineWords;
  const std::size_t run = count / kReadRuns / kStep * kStep;  // words in one run
  __m512i sum[kLoads];
  for (__m512i& s : sum) s = _mm512_setzero_si512();
  for (std::size_t i = 0; i < run; i += kStep) {
#pragma GCC unroll 8
    for (std::size_t l = 0; l < kLoads; ++l) {
      const std::uint32_t* p = words + l / 2 * run + i + l % 2 * kLineWords;
      sum[l] = _mm512_add_epi32(sum[l], _mm512_loadu_si512(p));
    }
  }
  std::size_t i = kReadRuns * run;
  alignas(64) std::array<std::uint32_t, kLineWords> lanes{};
  for (std::size_t l = 1; l < kLoads; ++l) sum[0] = _mm512_add_epi32(sum[0], sum[l]);
  _mm512_store_si512(lanes.data(), sum[0]);
  std::uint32_t total = 0;
  for (const std::uint32_t lane : lanes) total += lane;
  for (; i < count; ++i) total += words[i];
  return total;
}
// ANCHOR_END: cpu_roof_read

/// Words before the next address that is a multiple of `bytes`: streaming stores must be aligned.
std::size_t words_to_alignment(const std::uint32_t* p, std::size_t bytes, std::size_t count) {
  const std::size_t past = reinterpret_cast<std::uintptr_t>(p) % bytes;
  return past == 0 ? 0 : std::min(count, (bytes - past) / sizeof(std::uint32_t));
}

// ANCHOR: cpu_roof_copy
template <Stores kStores>
LADDER_AVX512 void copy_avx512(const std::uint32_t* in, std::uint32_t* out, std::size_t count) {
  std::size_t i = words_to_alignment(out, 64, count);
  copy_portable(in, out, i);
  for (; i + 4 * kLineWords <= count; i += 4 * kLineWords) {
    __m512i v[4];
#pragma GCC unroll 4
    for (std::size_t l = 0; l < 4; ++l) v[l] = _mm512_loadu_si512(in + i + l * kLineWords);
#pragma GCC unroll 4
    for (std::size_t l = 0; l < 4; ++l) {
      if constexpr (kStores == Stores::streaming) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i + l * kLineWords), v[l]);
      } else {
        _mm512_storeu_si512(out + i + l * kLineWords, v[l]);
      }
    }
  }
  copy_portable(in + i, out + i, count - i);
  if constexpr (kStores == Stores::streaming)
    _mm_sfence();  // they are not ordered with the join of the threads
}
// ANCHOR_END: cpu_roof_copy

// ANCHOR: cpu_roof_write
template <Stores kStores>
LADDER_AVX512 void write_avx512(std::uint32_t* out, std::size_t count, std::uint32_t seed,
                                std::size_t first) {
  std::size_t i = words_to_alignment(out, 64, count);
  write_portable(out, i, seed, first);
  alignas(64) std::array<std::uint32_t, kLineWords> start{};
  write_portable(start.data(), start.size(), seed, first + i);
  __m512i v = _mm512_load_si512(start.data());
  const __m512i step = _mm512_set1_epi32(static_cast<int>(roof_write_word(0, kLineWords)));
  for (; i + kLineWords <= count; i += kLineWords) {
    if constexpr (kStores == Stores::streaming) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), v);
    } else {
      _mm512_storeu_si512(out + i, v);
    }
    v = _mm512_add_epi32(v, step);
  }
  write_portable(out + i, count - i, seed, first + i);
  if constexpr (kStores == Stores::streaming) _mm_sfence();
}
// ANCHOR_END: cpu_roof_write

// Two multiply-add units with a latency of four cycles need eight sums; sixteen hide what else comes between.
constexpr int kFmaVectorsAvx512 = 16;

// ANCHOR: cpu_roof_fma_f32
LADDER_AVX512 void fma_avx512(const float* operands, int pairs, float* out) {
  const __m512 x0 = _mm512_set1_ps(operands[0]), y0 = _mm512_set1_ps(operands[1]);
  const __m512 x1 = _mm512_set1_ps(operands[2]), y1 = _mm512_set1_ps(operands[3]);
  __m512 r[kFmaVectorsAvx512];
#pragma GCC unroll 16
  for (int v = 0; v < kFmaVectorsAvx512; ++v) r[v] = _mm512_loadu_ps(operands + 4 + 16 * v);
  for (int p = 0; p < pairs; ++p) {
#pragma GCC unroll 16
    for (int v = 0; v < kFmaVectorsAvx512; ++v) r[v] = _mm512_fmadd_ps(r[v], x0, y0);
#pragma GCC unroll 16
    for (int v = 0; v < kFmaVectorsAvx512; ++v) r[v] = _mm512_fmadd_ps(r[v], x1, y1);
  }
#pragma GCC unroll 16
  for (int v = 0; v < kFmaVectorsAvx512; ++v) _mm512_storeu_ps(out + 16 * v, r[v]);
}
// ANCHOR_END: cpu_roof_fma_f32

constexpr int kDotVectorsAvx512 = 12;

// ANCHOR: roof_int8_dot
/// vpdpbusd: in every 32-bit lane, sum += a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3] over its
/// bytes.
LADDER_AVX512_VNNI void int8_vnni(const std::uint32_t* operands, int steps, std::uint32_t* out) {
  const __m512i b = _mm512_set1_epi32(static_cast<int>(operands[0]));
  __m512i a[kDotVectorsAvx512], sum[kDotVectorsAvx512];
#pragma GCC unroll 12
  for (int v = 0; v < kDotVectorsAvx512; ++v) {
    a[v] = _mm512_loadu_si512(operands + 1 + 16 * v);
    sum[v] = _mm512_setzero_si512();
  }
  for (int s = 0; s < steps; ++s) {
#pragma GCC unroll 12
    for (int v = 0; v < kDotVectorsAvx512; ++v) sum[v] = _mm512_dpbusd_epi32(sum[v], a[v], b);
  }
#pragma GCC unroll 12
  for (int v = 0; v < kDotVectorsAvx512; ++v) _mm512_storeu_si512(out + 16 * v, sum[v]);
}
// ANCHOR_END: roof_int8_dot

// ---------------------------------------------------------------------------------------------------------
// AVX2.

constexpr std::size_t kHalfLine = 32 / sizeof(std::uint32_t);

LADDER_AVX2 inline __m256i load256(const std::uint32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
LADDER_AVX2 inline void store256(std::uint32_t* p, __m256i v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
}

LADDER_AVX2 std::uint32_t read_avx2(const std::uint32_t* words, std::size_t count) {
  constexpr std::size_t kLoads = kReadRuns * 2, kStep = 2 * kHalfLine;
  const std::size_t run = count / kReadRuns / kStep * kStep;
  __m256i sum[kLoads];
  for (__m256i& s : sum) s = _mm256_setzero_si256();
  for (std::size_t i = 0; i < run; i += kStep) {
#pragma GCC unroll 8
    for (std::size_t l = 0; l < kLoads; ++l) {
      sum[l] = _mm256_add_epi32(sum[l], load256(words + l / 2 * run + i + l % 2 * kHalfLine));
    }
  }
  std::size_t i = kReadRuns * run;
  std::array<std::uint32_t, kHalfLine> lanes{};
  for (std::size_t l = 1; l < kLoads; ++l) sum[0] = _mm256_add_epi32(sum[0], sum[l]);
  store256(lanes.data(), sum[0]);
  std::uint32_t total = 0;
  for (const std::uint32_t lane : lanes) total += lane;
  for (; i < count; ++i) total += words[i];
  return total;
}

template <Stores kStores>
LADDER_AVX2 void copy_avx2(const std::uint32_t* in, std::uint32_t* out, std::size_t count) {
  std::size_t i = words_to_alignment(out, 32, count);
  copy_portable(in, out, i);
  for (; i + 4 * kHalfLine <= count; i += 4 * kHalfLine) {
    __m256i v[4];
#pragma GCC unroll 4
    for (std::size_t l = 0; l < 4; ++l) v[l] = load256(in + i + l * kHalfLine);
#pragma GCC unroll 4
    for (std::size_t l = 0; l < 4; ++l) {
      if constexpr (kStores == Stores::streaming) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i + l * kHalfLine), v[l]);
      } else {
        store256(out + i + l * kHalfLine, v[l]);
      }
    }
  }
  copy_portable(in + i, out + i, count - i);
  if constexpr (kStores == Stores::streaming) _mm_sfence();
}

template <Stores kStores>
LADDER_AVX2 void write_avx2(std::uint32_t* out, std::size_t count, std::uint32_t seed, std::size_t first) {
  std::size_t i = words_to_alignment(out, 32, count);
  write_portable(out, i, seed, first);
  std::array<std::uint32_t, kHalfLine> start{};
  write_portable(start.data(), start.size(), seed, first + i);
  __m256i v = load256(start.data());
  const __m256i step = _mm256_set1_epi32(static_cast<int>(roof_write_word(0, kHalfLine)));
  for (; i + kHalfLine <= count; i += kHalfLine) {
    if constexpr (kStores == Stores::streaming) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i), v);
    } else {
      store256(out + i, v);
    }
    v = _mm256_add_epi32(v, step);
  }
  write_portable(out + i, count - i, seed, first + i);
  if constexpr (kStores == Stores::streaming) _mm_sfence();
}

constexpr int kFmaVectorsAvx2 = 12;  // and four operands: all sixteen registers

LADDER_AVX2 void fma_avx2(const float* operands, int pairs, float* out) {
  const __m256 x0 = _mm256_set1_ps(operands[0]), y0 = _mm256_set1_ps(operands[1]);
  const __m256 x1 = _mm256_set1_ps(operands[2]), y1 = _mm256_set1_ps(operands[3]);
  __m256 r[kFmaVectorsAvx2];
#pragma GCC unroll 12
  for (int v = 0; v < kFmaVectorsAvx2; ++v) r[v] = _mm256_loadu_ps(operands + 4 + 8 * v);
  for (int p = 0; p < pairs; ++p) {
#pragma GCC unroll 12
    for (int v = 0; v < kFmaVectorsAvx2; ++v) r[v] = _mm256_fmadd_ps(r[v], x0, y0);
#pragma GCC unroll 12
    for (int v = 0; v < kFmaVectorsAvx2; ++v) r[v] = _mm256_fmadd_ps(r[v], x1, y1);
  }
#pragma GCC unroll 12
  for (int v = 0; v < kFmaVectorsAvx2; ++v) _mm256_storeu_ps(out + 8 * v, r[v]);
}

constexpr int kDotVectorsAvx2 = 4;  // only the additions wait for each other, one cycle each

/// Without vpdpbusd it takes three instructions: products of neighbouring bytes summed in pairs to 16 bits
/// (which saturates from 128 * 127 * 2 on, hence unsigned bytes up to 127), pairs of those summed to 32 bits,
/// and the addition.
LADDER_AVX2 void int8_avx2(const std::uint32_t* operands, int steps, std::uint32_t* out) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i b = _mm256_set1_epi32(static_cast<int>(operands[0]));
  __m256i a[kDotVectorsAvx2], sum[kDotVectorsAvx2];
#pragma GCC unroll 4
  for (int v = 0; v < kDotVectorsAvx2; ++v) {
    a[v] = load256(operands + 1 + 8 * v);
    sum[v] = _mm256_setzero_si256();
  }
  for (int s = 0; s < steps; ++s) {
    asm volatile("" : "+x"(b));
#pragma GCC unroll 4
    for (int v = 0; v < kDotVectorsAvx2; ++v) {
      sum[v] = _mm256_add_epi32(sum[v], _mm256_madd_epi16(_mm256_maddubs_epi16(a[v], b), ones));
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kDotVectorsAvx2; ++v) store256(out + 8 * v, sum[v]);
}
#elif defined(__aarch64__)
// ---------------------------------------------------------------------------------------------------------
// NEON.

std::uint32_t read_neon(const std::uint32_t* words, std::size_t count) {
  constexpr std::size_t kLoads = kReadRuns * 2, kStep = 2 * 4;
  const std::size_t run = count / kReadRuns / kStep * kStep;
  uint32x4_t sum[kLoads];
  for (uint32x4_t& s : sum) s = vdupq_n_u32(0);
  for (std::size_t i = 0; i < run; i += kStep) {
#pragma GCC unroll 8
    for (std::size_t l = 0; l < kLoads; ++l) {
      sum[l] = vaddq_u32(sum[l], vld1q_u32(words + l / 2 * run + i + l % 2 * 4));
    }
  }
  std::size_t i = kReadRuns * run;
  for (std::size_t l = 1; l < kLoads; ++l) sum[0] = vaddq_u32(sum[0], sum[l]);
  std::uint32_t total = vaddvq_u32(sum[0]);
  for (; i < count; ++i) total += words[i];
  return total;
}

constexpr int kFmaVectorsNeon = 20;  // up to four units with a latency of four cycles, and some more

void fma_neon(const float* operands, int pairs, float* out) {
  const float32x4_t x0 = vdupq_n_f32(operands[0]), y0 = vdupq_n_f32(operands[1]);
  const float32x4_t x1 = vdupq_n_f32(operands[2]), y1 = vdupq_n_f32(operands[3]);
  float32x4_t r[kFmaVectorsNeon];
#pragma GCC unroll 20
  for (int v = 0; v < kFmaVectorsNeon; ++v) r[v] = vld1q_f32(operands + 4 + 4 * v);
  for (int p = 0; p < pairs; ++p) {
    // fmla adds to its destination, so the addend is copied first; cores with register renaming do that for
    // free.
#pragma GCC unroll 20
    for (int v = 0; v < kFmaVectorsNeon; ++v) r[v] = vfmaq_f32(y0, r[v], x0);
#pragma GCC unroll 20
    for (int v = 0; v < kFmaVectorsNeon; ++v) r[v] = vfmaq_f32(y1, r[v], x1);
  }
#pragma GCC unroll 20
  for (int v = 0; v < kFmaVectorsNeon; ++v) vst1q_f32(out + 4 * v, r[v]);
}

constexpr int kDotVectorsNeon = 12;

/// Base NEON: products of 8 bytes at a time to 16 bits, neighbours added (127 * 128 * 2 still fits), and
/// neighbours of those added to the 32-bit sums.
void int8_neon(const std::uint32_t* operands, int steps, std::uint32_t* out) {
  int8x16_t b = vreinterpretq_s8_u32(vdupq_n_u32(operands[0]));
  int8x16_t a[kDotVectorsNeon];
  int32x4_t sum[kDotVectorsNeon];
#pragma GCC unroll 12
  for (int v = 0; v < kDotVectorsNeon; ++v) {
    a[v] = vreinterpretq_s8_u32(vld1q_u32(operands + 1 + 4 * v));
    sum[v] = vdupq_n_s32(0);
  }
  for (int s = 0; s < steps; ++s) {
    asm volatile("" : "+w"(b));
#pragma GCC unroll 12
    for (int v = 0; v < kDotVectorsNeon; ++v) {
      const int16x8_t low = vmull_s8(vget_low_s8(a[v]), vget_low_s8(b));
      const int16x8_t high = vmull_high_s8(a[v], b);
      sum[v] = vpadalq_s16(sum[v], vpaddq_s16(low, high));
    }
  }
#pragma GCC unroll 12
  for (int v = 0; v < kDotVectorsNeon; ++v) vst1q_u32(out + 4 * v, vreinterpretq_u32_s32(sum[v]));
}

#if defined(__ARM_FEATURE_DOTPROD) || !defined(__clang__)
#define LADDER_HAS_SDOT 1
#if defined(__clang__)
#define LADDER_DOTPROD
#else
#define LADDER_DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
LADDER_DOTPROD void int8_sdot(const std::uint32_t* operands, int steps, std::uint32_t* out) {
  const int8x16_t b = vreinterpretq_s8_u32(vdupq_n_u32(operands[0]));
  int8x16_t a[kDotVectorsNeon];
  int32x4_t sum[kDotVectorsNeon];
#pragma GCC unroll 12
  for (int v = 0; v < kDotVectorsNeon; ++v) {
    a[v] = vreinterpretq_s8_u32(vld1q_u32(operands + 1 + 4 * v));
    sum[v] = vdupq_n_s32(0);
  }
  for (int s = 0; s < steps; ++s) {
#pragma GCC unroll 12
    for (int v = 0; v < kDotVectorsNeon; ++v) sum[v] = vdotq_s32(sum[v], a[v], b);
  }
#pragma GCC unroll 12
  for (int v = 0; v < kDotVectorsNeon; ++v) vst1q_u32(out + 4 * v, vreinterpretq_u32_s32(sum[v]));
}
#endif
#endif

// ---------------------------------------------------------------------------------------------------------
// Which code runs.

using ReadPart = std::uint32_t (*)(const std::uint32_t*, std::size_t);
using CopyPart = void (*)(const std::uint32_t*, std::uint32_t*, std::size_t);
using WritePart = void (*)(std::uint32_t*, std::size_t, std::uint32_t, std::size_t);

struct FmaPart {
  void (*run)(const float*, int, float*);
  int values;
};

struct Int8Part {
  void (*run)(const std::uint32_t*, int, std::uint32_t*);
  int values;
  const char* instruction;
};

ReadPart read_part() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return read_avx512;
  if (isa() == Isa::avx2) return read_avx2;
#elif defined(__aarch64__)
  if (isa() == Isa::neon) return read_neon;
#endif
  return read_portable;
}

void require_stores(Stores stores) {
  if (stores == Stores::streaming && !has_streaming_stores()) {
    throw std::invalid_argument("the instruction set in use, " + std::string(name(isa())) +
                                ", has no streaming stores here");
  }
}

CopyPart copy_part([[maybe_unused]] Stores stores) {
#if defined(__x86_64__)
  const bool streaming = stores == Stores::streaming;
  if (isa() == Isa::avx512) return streaming ? copy_avx512<Stores::streaming> : copy_avx512<Stores::cached>;
  if (isa() == Isa::avx2) return streaming ? copy_avx2<Stores::streaming> : copy_avx2<Stores::cached>;
#endif
  return copy_portable;
}

WritePart write_part([[maybe_unused]] Stores stores) {
#if defined(__x86_64__)
  const bool streaming = stores == Stores::streaming;
  if (isa() == Isa::avx512) return streaming ? write_avx512<Stores::streaming> : write_avx512<Stores::cached>;
  if (isa() == Isa::avx2) return streaming ? write_avx2<Stores::streaming> : write_avx2<Stores::cached>;
#endif
  return write_portable;
}

FmaPart fma_part() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return {fma_avx512, 16 * kFmaVectorsAvx512};
  if (isa() == Isa::avx2) return {fma_avx2, 8 * kFmaVectorsAvx2};
#elif defined(__aarch64__)
  if (isa() == Isa::neon) return {fma_neon, 4 * kFmaVectorsNeon};
#endif
  return {fma_portable, kPortableValues};
}

Int8Part int8_part() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512 && features().avx512vnni) return {int8_vnni, 16 * kDotVectorsAvx512, "vpdpbusd"};
  if (isa() == Isa::avx512 || isa() == Isa::avx2) return {int8_avx2, 8 * kDotVectorsAvx2, "vpmaddubsw"};
#elif defined(__aarch64__)
#if defined(LADDER_HAS_SDOT)
  if (isa() == Isa::neon && features().dotprod) return {int8_sdot, 4 * kDotVectorsNeon, "sdot"};
#endif
  if (isa() == Isa::neon) return {int8_neon, 4 * kDotVectorsNeon, "smull"};
#endif
  return {int8_portable, kPortableValues, "portable"};
}

/// The part [begin, end) of `count` words that one thread works on: equal shares of whole cache lines.
struct Part {
  std::size_t begin, end;
};

Part part_of(std::size_t count, int thread, int threads) {
  const std::size_t lines = (count + kLineWords - 1) / kLineWords;
  const auto edge = [&](int t) {
    return std::min(count,
                    lines * static_cast<std::size_t>(t) / static_cast<std::size_t>(threads) * kLineWords);
  };
  return {edge(thread), edge(thread + 1)};
}

}  // namespace

const char* name(Stores stores) { return stores == Stores::streaming ? "streaming" : "cached"; }

bool has_streaming_stores() {
#if defined(__x86_64__)
  return isa() != Isa::portable;
#else
  return false;
#endif
}

std::uint32_t roof_read(const std::uint32_t* words, std::size_t count, ThreadPool& pool) {
  const ReadPart read = read_part();
  // One cache line each: threads that wrote to the same line would wait for each other.
  struct alignas(64) Sum {
    std::uint32_t value = 0;
  };
  std::vector<Sum> sums(static_cast<std::size_t>(pool.size()));
  pool.run([&](int thread, int threads) {
    const Part p = part_of(count, thread, threads);
    sums[static_cast<std::size_t>(thread)].value = read(words + p.begin, p.end - p.begin);
  });
  std::uint32_t total = 0;
  for (const Sum& s : sums) total += s.value;
  return total;
}

void roof_copy(const std::uint32_t* in, std::uint32_t* out, std::size_t count, Stores stores,
               ThreadPool& pool) {
  require_stores(stores);
  const CopyPart copy = copy_part(stores);
  pool.run([&](int thread, int threads) {
    const Part p = part_of(count, thread, threads);
    copy(in + p.begin, out + p.begin, p.end - p.begin);
  });
}

void roof_write(std::uint32_t* out, std::size_t count, std::uint32_t seed, Stores stores, ThreadPool& pool) {
  require_stores(stores);
  const WritePart write = write_part(stores);
  pool.run([&](int thread, int threads) {
    const Part p = part_of(count, thread, threads);
    write(out + p.begin, p.end - p.begin, seed, p.begin);
  });
}

int fma_values() { return fma_part().values; }

void roof_fma_f32(std::span<const float> operands, int pairs, std::span<float> out, ThreadPool& pool) {
  const FmaPart part = fma_part();
  const auto values = static_cast<std::size_t>(part.values);
  if (operands.size() != 4 + values || out.size() != values * static_cast<std::size_t>(pool.size())) {
    throw std::invalid_argument("roof_fma_f32: operands or out have the wrong length");
  }
  pool.run([&](int thread, int) {
    part.run(operands.data(), pairs, out.data() + static_cast<std::size_t>(thread) * values);
  });
}

double roof_fma_flop(int pairs, int threads) { return 2.0 * 2 * pairs * fma_values() * threads; }

int int8_values() { return int8_part().values; }

const char* int8_instruction() { return int8_part().instruction; }

void roof_int8_dot(std::span<const std::uint32_t> operands, int steps, std::span<std::uint32_t> out,
                   ThreadPool& pool) {
  const Int8Part part = int8_part();
  const auto values = static_cast<std::size_t>(part.values);
  if (operands.size() != 1 + values || out.size() != values * static_cast<std::size_t>(pool.size())) {
    throw std::invalid_argument("roof_int8_dot: operands or out have the wrong length");
  }
  pool.run([&](int thread, int) {
    part.run(operands.data(), steps, out.data() + static_cast<std::size_t>(thread) * values);
  });
}

double roof_int8_ops(int steps, int threads) { return 8.0 * steps * int8_values() * threads; }

}  // namespace ladder::cpu
