// The tiles of gemm_f32 for AVX-512: 16 floats to a vector; 2 vectors of rows x 12 tokens = 24 of the 32 registers.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "harness/device/half_bits.hpp"

#define LADDER_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,fma")))
#define LADDER_VECTOR LADDER_TARGET inline __attribute__((always_inline))

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of GCC 12's own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace ladder::cpu {
namespace {

using Floats = __m512;
constexpr int kLanes = 16, kVectors = 2, kTokens = 12;
LADDER_VECTOR Floats load(const float* p) { return _mm512_loadu_ps(p); }
LADDER_VECTOR Floats load_halves(const std::uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
LADDER_VECTOR void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
LADDER_VECTOR Floats all(float v) { return _mm512_set1_ps(v); }
LADDER_VECTOR void keep(Floats& v) { asm("" : "+v"(v)); }
LADDER_VECTOR Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
LADDER_VECTOR Floats madd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

LADDER_VECTOR Floats low_pairs(Floats a, Floats b) {
  return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
LADDER_VECTOR Floats high_pairs(Floats a, Floats b) {
  return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
LADDER_VECTOR void transpose(Floats v[16]) {
  // Pairs of floats, pairs of pairs, then 128-bit lanes, twice.
  Floats a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // b[i + j], 128-bit lane q: column 4q + j of rows i..i+3
    b[i] = low_pairs(a[i], a[i + 2]), b[i + 1] = high_pairs(a[i], a[i + 2]);
    b[i + 2] = low_pairs(a[i + 1], a[i + 3]), b[i + 3] = high_pairs(a[i + 1], a[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const Floats even01 = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88);       // columns j, 8 + j of rows 0..7
    const Floats even23 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88);  // ... of rows 8..15
    const Floats odd01 = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);        // columns 4 + j, 12 + j
    const Floats odd23 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
    v[j] = _mm512_shuffle_f32x4(even01, even23, 0x88);
    v[4 + j] = _mm512_shuffle_f32x4(odd01, odd23, 0x88);
    v[8 + j] = _mm512_shuffle_f32x4(even01, even23, 0xdd);
    v[12 + j] = _mm512_shuffle_f32x4(odd01, odd23, 0xdd);
  }
}

}  // namespace
}  // namespace ladder::cpu

#include "kernels/cpu/gemm_f32_body.hpp"

namespace ladder::cpu {
const GemmKernels kGemmAvx512 = kGemm;
}  // namespace ladder::cpu
#endif
