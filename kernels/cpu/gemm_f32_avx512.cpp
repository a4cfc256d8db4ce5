// The tiles of gemm_f32 for AVX-512: 16 floats to a vector; 2 vectors of rows x 12 tokens = 24 of the 32 registers.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "harness/device/half_bits.hpp"
#include "kernels/cpu/lanes_avx512.hpp"

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
LADDER_VECTOR void transpose(Floats v[16]) { transpose16(v); }

}  // namespace
}  // namespace ladder::cpu

#include "kernels/cpu/gemm_f32_body.hpp"

namespace ladder::cpu {
const GemmKernels kGemmAvx512 = kGemm;
}  // namespace ladder::cpu
#endif
