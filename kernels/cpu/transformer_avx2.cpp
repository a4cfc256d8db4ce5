// The parts around the matmuls for AVX2 with FMA and F16C: two registers make a vector of 16.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#define LADDER_TARGET __attribute__((target("avx2,fma,f16c")))
#define LADDER_VECTOR LADDER_TARGET inline __attribute__((always_inline))

namespace ladder::cpu {
namespace {

struct Floats {
  __m256 a, b;
};
LADDER_VECTOR Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
LADDER_VECTOR Floats load_halves(const std::uint16_t* p) {
  const auto* h = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
}
LADDER_VECTOR void store(float* p, Floats v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
LADDER_VECTOR void store_halves(std::uint16_t* p, Floats v) {
  auto* h = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(h, _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128(h + 1, _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
LADDER_VECTOR Floats all(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
LADDER_VECTOR Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
LADDER_VECTOR Floats sub(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
LADDER_VECTOR Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
LADDER_VECTOR Floats div(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
LADDER_VECTOR Floats madd(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
// Of a NaN and a number, the instruction returns its second operand: a NaN in y stays.
LADDER_VECTOR Floats larger(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
LADDER_VECTOR Floats smaller(Floats x, Floats y) {
  return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
LADDER_VECTOR Floats nearest(Floats v) {
  constexpr int kEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(v.a, kEven), _mm256_round_ps(v.b, kEven)};
}
LADDER_VECTOR __m256 power(__m256 n) {  // 2^n by its exponent bits
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
LADDER_VECTOR Floats times_power(Floats x, Floats n) {
  return {_mm256_mul_ps(x.a, power(n.a)), _mm256_mul_ps(x.b, power(n.b))};
}
LADDER_VECTOR Floats first_or(Floats v, int n, float other) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 keep_a = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes));
  const __m256 keep_b = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lanes));
  const __m256 o = _mm256_set1_ps(other);
  return {_mm256_blendv_ps(o, v.a, keep_a), _mm256_blendv_ps(o, v.b, keep_b)};
}

}  // namespace
}  // namespace ladder::cpu

#include "kernels/cpu/transformer_body.hpp"

namespace ladder::cpu {
const TransformerKernels kTransformerAvx2 = LADDER_TRANSFORMER_KERNELS;
}  // namespace ladder::cpu
#endif
