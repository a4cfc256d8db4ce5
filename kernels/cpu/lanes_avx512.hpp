// What the AVX-512 twins share. A file is compiled for any x86-64; only functions with the target attribute may use
// AVX-512, and only a CPU that has it calls them.
#pragma once

#include <immintrin.h>

namespace ladder::cpu {

/// The sum of the 16 lanes, as a fixed tree: 16 -> 8 -> 4 -> 2 -> 1.
__attribute__((target("avx512f,avx512bw,avx512vl"), always_inline)) inline float sum_of_lanes(__m512 v) {
  // The zero-masking form with every lane kept: GCC 12 builds the plain one from an undefined value and warns
  // of it.
  const __m512d halves = _mm512_castps_pd(v);
  const __m256 low = _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(0xff, halves, 0));
  const __m256 high = _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(0xff, halves, 1));
  const __m256 eight = _mm256_add_ps(low, high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

}  // namespace ladder::cpu
