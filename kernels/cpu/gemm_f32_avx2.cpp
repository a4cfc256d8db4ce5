// The tiles of gemm_f32 for AVX2 with FMA and F16C: 8 floats to a vector; 2 vectors of rows x 6 tokens = 12 of the 16
// registers.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "harness/device/half_bits.hpp"

#define LADDER_TARGET __attribute__((target("avx2,fma,f16c")))
#define LADDER_VECTOR LADDER_TARGET inline __attribute__((always_inline))

namespace ladder::cpu {
namespace {

using Floats = __m256;
constexpr int kLanes = 8, kVectors = 2, kTokens = 6;
LADDER_VECTOR Floats load(const float* p) { return _mm256_loadu_ps(p); }
LADDER_VECTOR Floats load_halves(const std::uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
LADDER_VECTOR void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
LADDER_VECTOR Floats all(float v) { return _mm256_set1_ps(v); }
LADDER_VECTOR void keep(Floats& v) { asm("" : "+x"(v)); }
LADDER_VECTOR Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
LADDER_VECTOR Floats madd(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

LADDER_VECTOR void transpose(Floats v[8]) {
  Floats a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {  // b[i + j], 128-bit lane q: column 4q + j of rows i..i+3
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44), b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    v[j] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
    v[4 + j] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
  }
}

}  // namespace
}  // namespace ladder::cpu

#include "kernels/cpu/gemm_f32_body.hpp"

namespace ladder::cpu {
const GemmKernels kGemmAvx2 = kGemm;
}  // namespace ladder::cpu
#endif
