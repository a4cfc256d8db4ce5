// What the AVX-512 twins share. A file is compiled for any x86-64; only functions with the target attribute may use
// AVX-512, and only a CPU that has it calls them.
#pragma once

#include <immintrin.h>

#define LADDER_LANES __attribute__((target("avx512f,avx512bw,avx512vl"), always_inline))

namespace ladder::cpu {

/// The sum of the 16 lanes, as a fixed tree: 16 -> 8 -> 4 -> 2 -> 1.
LADDER_LANES inline float sum_of_lanes(__m512 v) {
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

LADDER_LANES inline __m512 low_pairs(__m512 a, __m512 b) {
  return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
LADDER_LANES inline __m512 high_pairs(__m512 a, __m512 b) {
  return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
/// sum_of_lanes() of each of 16 vectors, the same additions.
LADDER_LANES inline __m512 sums_of_lanes(const __m512 v[16]) {
  // Each step adds the halves of what is left of a vector, and puts those of two vectors beside each other.
  __m512 eight[8], four[4], two[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // halves: vectors i, i + 8
    eight[i] =
        _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 8], 0x44), _mm512_shuffle_f32x4(v[i], v[i + 8], 0xee));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // quarters: vectors i, i + 8, i + 4, i + 12
    four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(eight[i], eight[i + 4], 0x88),
                            _mm512_shuffle_f32x4(eight[i], eight[i + 4], 0xdd));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2;
       ++i) {  // quarters of pairs: vectors i and i + 2, then those 8 after, 4 after, 12 after
    two[i] = _mm512_add_ps(low_pairs(four[i], four[i + 2]), high_pairs(four[i], four[i + 2]));
  }
  // Of each quarter: vectors 0, 2, 1, 3.
  const __m512 one =
      _mm512_add_ps(_mm512_shuffle_ps(two[0], two[1], 0x88), _mm512_shuffle_ps(two[0], two[1], 0xdd));
  const __m512i place = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return _mm512_permutexvar_ps(place, one);
}

/// 16 vectors as a square matrix, transposed.
LADDER_LANES inline void transpose16(__m512 v[16]) {
  // Pairs of floats, pairs of pairs, then 128-bit lanes, twice.
  __m512 a[16], b[16];
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
    const __m512 even01 = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88);       // columns j, 8 + j of rows 0..7
    const __m512 even23 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88);  // ... of rows 8..15
    const __m512 odd01 = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);        // columns 4 + j, 12 + j
    const __m512 odd23 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
    v[j] = _mm512_shuffle_f32x4(even01, even23, 0x88);
    v[4 + j] = _mm512_shuffle_f32x4(odd01, odd23, 0x88);
    v[8 + j] = _mm512_shuffle_f32x4(even01, even23, 0xdd);
    v[12 + j] = _mm512_shuffle_f32x4(odd01, odd23, 0xdd);
  }
}

}  // namespace ladder::cpu
