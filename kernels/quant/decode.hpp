// What the bits of a block mean: codes, scales and values, for the host and for kernels.
//
// Every format is decoded in runs of 16 neighbouring elements. Inside a run the scale does not change and the
// bits of the codes are found at the same place of consecutive bytes, so with the number of the run known at
// compile time a loop over its elements is a plain vector loop.
//
//   run_code(block, run, j)   code of element 16*run + j, j = 0..15, zero point taken off (Q4_0: q - 8)
//   run_scale(block, run)     what turns codes of the run into values: Scale or ScaleOffset, f32
//   value(scale, code)        f32
//   code(block, i)            = run_code(block, i / 16, i % 16)
//   element(block, i)         = value(run_scale(block, i / 16), code(block, i))
//
// Values are f32 and formed in the order that ggml's dequantize_row_* uses, (d*scale)*q - dmin*min, so they
// are equal to its bit for bit. No product may be fused with the addition after it: kernels say so with
// __fmul_rn and __fadd_rn, host code is compiled with -ffp-contract=off.
//
// Formulas: ggml-quants.c of https://github.com/ggml-org/llama.cpp, commit d99724f2, restated.
#pragma once

#include <bit>
#include <cstdint>

#include "harness/device/half_bits.hpp"
#include "kernels/quant/blocks.hpp"

// Functions for host and device. Always inlined: kernels for the emulator are compiled with every memory
// access announced, host code is not, and a linker that merged the two versions of a function would mix them
// up.
#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define LADDER_HD __host__ __device__ __forceinline__
#else
#define LADDER_HD inline __attribute__((always_inline))
#endif

namespace ladder {

// Arithmetic ------------------------------------------------------------------------------------------------

/// f16 bits -> f32, exact. A NaN stays one; its payload may differ between host and device.
LADDER_HD float f16_value(F16Bits bits) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(bits));
#else
  return half_bits_to_float(bits);
#endif
}

/// bf16 bits -> f32, exact.
LADDER_HD float bf16_value(BF16Bits bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
#else
  return bfloat16_bits_to_float(bits);
#endif
}

/// a * b, rounded, never part of an FMA.
LADDER_HD float mul_rounded(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

/// a + b, rounded, never part of an FMA.
LADDER_HD float add_rounded(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

/// value = d * code
struct Scale {
  float d;
};
/// value = d * code + offset
struct ScaleOffset {
  float d, offset;
};
LADDER_HD float value(Scale s, int code) { return mul_rounded(s.d, static_cast<float>(code)); }
LADDER_HD float value(ScaleOffset s, int code) {
  return add_rounded(mul_rounded(s.d, static_cast<float>(code)), s.offset);
}

// Integer scales --------------------------------------------------------------------------------------------

/// Scale and minimum of a sub-block, both 0..63.
struct ScaleMin {
  int scale, min;
};

// ANCHOR: scale_min_k4
/// Sub-block j = 0..7 of Q4_K and Q5_K. The first four have their six bits in one byte; the others have four
/// bits in bytes 8..11 and two in the unused top bits of the first eight bytes.
/// @param s [12] the `scales` of the block
LADDER_HD ScaleMin scale_min_k4(const std::uint8_t* s, int j) {
  if (j < 4) return {s[j] & 63, s[j + 4] & 63};
  return {(s[j + 4] & 15) | (s[j - 4] >> 6) << 4, s[j + 4] >> 4 | (s[j] >> 6) << 4};
}
// ANCHOR_END: scale_min_k4

/// Scale j = 0..15 of Q3_K, -32..31. Four low bits in bytes 0..7, two high bits in bytes 8..11.
/// @param s [12] the `scales` of the block
LADDER_HD int q3_k_scale(const std::uint8_t* s, int j) {
  const int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4;
  const int high = s[8 + j % 4] >> (2 * (j / 4)) & 3;
  return (low | high << 4) - 32;
}

/// Scale j = 0..7 of IQ4_XS, -32..31.
LADDER_HD int iq4_xs_scale(const BlockIQ4_XS& b, int j) {
  const int low = b.scales_l[j / 2] >> (4 * (j % 2)) & 15;
  const int high = b.scales_h >> (2 * j) & 3;
  return (low | high << 4) - 32;
}

/// T[q], q = 0..15.
LADDER_HD int iq4_value(int q) {
  return static_cast<std::int8_t>((q < 8 ? detail::kIq4Low : detail::kIq4High) >> (8 * (q & 7)) & 0xff);
}

// Formats of one element ------------------------------------------------------------------------------------

LADDER_HD float element(const BlockF32& b, int) { return b.value; }
LADDER_HD float element(const BlockF16& b, int) { return f16_value(b.value); }
LADDER_HD float element(const BlockBF16& b, int) { return bf16_value(b.value); }

// Formats of 32 elements: two runs, the low and the high nibbles --------------------------------------------

LADDER_HD int run_code(const BlockQ4_0& b, int run, int j) { return (b.qs[j] >> (4 * run) & 15) - 8; }
LADDER_HD Scale run_scale(const BlockQ4_0& b, int) { return {f16_value(b.d)}; }

LADDER_HD int run_code(const BlockQ4_1& b, int run, int j) { return b.qs[j] >> (4 * run) & 15; }
LADDER_HD ScaleOffset run_scale(const BlockQ4_1& b, int) { return {f16_value(b.d), f16_value(b.m)}; }

namespace detail {
/// The fifth bit of element 16*run + j, in place.
LADDER_HD int q5_high(const std::uint8_t* qh, int run, int j) {
  return (qh[2 * run + j / 8] >> (j % 8) & 1) << 4;
}
}  // namespace detail
LADDER_HD int run_code(const BlockQ5_0& b, int run, int j) {
  return ((b.qs[j] >> (4 * run) & 15) | detail::q5_high(b.qh, run, j)) - 16;
}
LADDER_HD Scale run_scale(const BlockQ5_0& b, int) { return {f16_value(b.d)}; }

LADDER_HD int run_code(const BlockQ5_1& b, int run, int j) {
  return (b.qs[j] >> (4 * run) & 15) | detail::q5_high(b.qh, run, j);
}
LADDER_HD ScaleOffset run_scale(const BlockQ5_1& b, int) { return {f16_value(b.d), f16_value(b.m)}; }

LADDER_HD int run_code(const BlockQ8_0& b, int run, int j) { return b.qs[16 * run + j]; }
LADDER_HD Scale run_scale(const BlockQ8_0& b, int) { return {f16_value(b.d)}; }

LADDER_HD int run_code(const BlockIQ4_NL& b, int run, int j) { return iq4_value(b.qs[j] >> (4 * run) & 15); }
LADDER_HD Scale run_scale(const BlockIQ4_NL& b, int) { return {f16_value(b.d)}; }

// Formats of 256 elements: sixteen runs ---------------------------------------------------------------------

namespace detail {
/// The two bits of element 16*run + j that Q2_K and Q3_K store alike: byte 32n + l, bits 2k..2k+1, where the
/// run is half n = run/8, shift k = run/2 % 4, and l = 16*(run%2) + j.
LADDER_HD int two_bits(const std::uint8_t* qs, int run, int j) {
  return qs[32 * (run / 8) + 16 * (run % 2) + j] >> (2 * (run / 2 % 4)) & 3;
}
/// The nibble of element 16*run + j that Q4_K and Q5_K store alike: sub-block s = run/2 is half s%2 of group
/// s/2.
LADDER_HD int nibble_k(const std::uint8_t* qs, int run, int j) {
  return qs[32 * (run / 4) + 16 * (run % 2) + j] >> (4 * (run / 2 % 2)) & 15;
}
}  // namespace detail

LADDER_HD int run_code(const BlockQ2_K& b, int run, int j) { return detail::two_bits(b.qs, run, j); }
LADDER_HD ScaleOffset run_scale(const BlockQ2_K& b, int run) {
  const int s = b.scales[run];
  return {mul_rounded(f16_value(b.d), static_cast<float>(s & 15)),
          -mul_rounded(f16_value(b.dmin), static_cast<float>(s >> 4))};
}

LADDER_HD int run_code(const BlockQ3_K& b, int run, int j) {
  const int high = b.hmask[16 * (run % 2) + j] >> (run / 2) & 1;
  return (detail::two_bits(b.qs, run, j) | high << 2) - 4;
}
LADDER_HD Scale run_scale(const BlockQ3_K& b, int run) {
  return {mul_rounded(f16_value(b.d), static_cast<float>(q3_k_scale(b.scales, run)))};
}

namespace detail {
/// d*scale and -(dmin*min) of sub-block run/2, for Q4_K and Q5_K.
LADDER_HD ScaleOffset scale_offset_k(F16Bits d, F16Bits dmin, const std::uint8_t* scales, int run) {
  const ScaleMin s = scale_min_k4(scales, run / 2);
  return {mul_rounded(f16_value(d), static_cast<float>(s.scale)),
          -mul_rounded(f16_value(dmin), static_cast<float>(s.min))};
}
}  // namespace detail
LADDER_HD int run_code(const BlockQ4_K& b, int run, int j) { return detail::nibble_k(b.qs, run, j); }
LADDER_HD ScaleOffset run_scale(const BlockQ4_K& b, int run) {
  return detail::scale_offset_k(b.d, b.dmin, b.scales, run);
}

LADDER_HD int run_code(const BlockQ5_K& b, int run, int j) {
  const int high = b.qh[16 * (run % 2) + j] >> (run / 2) & 1;
  return detail::nibble_k(b.qs, run, j) | high << 4;
}
LADDER_HD ScaleOffset run_scale(const BlockQ5_K& b, int run) {
  return detail::scale_offset_k(b.d, b.dmin, b.scales, run);
}

LADDER_HD int run_code(const BlockQ6_K& b, int run, int j) {
  const int half = run / 8,
            r = run % 8;  // 64 bytes of ql and 32 of qh a half; runs 4..7 are the high nibbles
  const int low = b.ql[64 * half + 16 * (r % 4) + j] >> (4 * (r / 4)) & 15;
  const int high = b.qh[32 * half + 16 * (r % 2) + j] >> (2 * (r / 2)) & 3;
  return (low | high << 4) - 32;
}
LADDER_HD Scale run_scale(const BlockQ6_K& b, int run) {
  return {mul_rounded(f16_value(b.d), static_cast<float>(b.scales[run]))};
}

LADDER_HD int run_code(const BlockIQ4_XS& b, int run, int j) {
  return iq4_value(b.qs[16 * (run / 2) + j] >> (4 * (run % 2)) & 15);
}
LADDER_HD Scale run_scale(const BlockIQ4_XS& b, int run) {
  return {mul_rounded(f16_value(b.d), static_cast<float>(iq4_xs_scale(b, run / 2)))};
}

// Any element -----------------------------------------------------------------------------------------------

/// Integer code of element i = 0..kElems-1, zero point taken off.
template <class Block>
LADDER_HD int code(const Block& b, int i) {
  return run_code(b, i / 16, i % 16);
}

/// Value of element i = 0..kElems-1.
template <class Block>
LADDER_HD float element(const Block& b, int i) {
  return value(run_scale(b, i / 16), run_code(b, i / 16, i % 16));
}

}  // namespace ladder
