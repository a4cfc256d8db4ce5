// The parts around the matmuls for AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#define LADDER_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,fma")))
#define LADDER_VECTOR LADDER_TARGET inline __attribute__((always_inline))

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of GCC 12's own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace ladder::cpu {
namespace {

using Floats = __m512;
LADDER_VECTOR Floats load(const float* p) { return _mm512_loadu_ps(p); }
LADDER_VECTOR Floats load_halves(const std::uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
LADDER_VECTOR void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
LADDER_VECTOR void store_halves(std::uint16_t* p, Floats v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
LADDER_VECTOR Floats all(float v) { return _mm512_set1_ps(v); }
LADDER_VECTOR Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
LADDER_VECTOR Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
LADDER_VECTOR Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
LADDER_VECTOR Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
LADDER_VECTOR Floats madd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
// Of a NaN and a number, the instruction returns its second operand: a NaN in b stays.
LADDER_VECTOR Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
LADDER_VECTOR Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
LADDER_VECTOR Floats nearest(Floats v) {
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
LADDER_VECTOR Floats times_power(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
LADDER_VECTOR Floats first_or(Floats v, int n, float other) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>(n >= 16 ? 0xffffU : (1U << n) - 1), all(other), v);
}

}  // namespace
}  // namespace ladder::cpu

#include "kernels/cpu/transformer_body.hpp"

namespace ladder::cpu {
const TransformerKernels kTransformerAvx512 = LADDER_TRANSFORMER_KERNELS;
}  // namespace ladder::cpu
#endif
