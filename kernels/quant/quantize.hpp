// f32 to packed weights on the host: the reference quantizers of ggml, byte for byte.
//
// Source: the quantize_row_*_ref functions and helpers of ggml-quants.c of
// https://github.com/ggml-org/llama.cpp, commit d99724f2, restated in own words; without an importance
// matrix. The bytes depend on the order of every rounding, so sums run in index order and the sources are
// compiled with -ffp-contract=off.
#pragma once

#include <cstdint>

#include "harness/experiment/weight_types.hpp"
#include "kernels/quant/blocks.hpp"

namespace ladder {

/// Encodes n neighbouring elements of a row. F32 is copied; F16 and BF16 round to nearest even. A value that
/// is not finite is an error, and so is one that the format cannot hold: for F16 and BF16 a finite value that
/// rounds to infinity, for the others a block whose scale or minimum (f16) does. ggml writes the infinity and
/// the block decodes to NaN.
/// @param src [n] f32
/// @param dst row_bytes(type, n) bytes, of any alignment
/// @param n elements, a multiple of the block length of the type; 0 is allowed
/// @throws std::invalid_argument with the index of the element or of the block's first element; dst then
///         holds the blocks before it
void quantize_row(WeightType type, const float* src, void* dst, std::int64_t n);

/// Activations to Q8_1: as Q8_0, with the sum of the codes times d.
/// @param src [n] f32   @param dst [n/32]   @param n a multiple of 32   @throws as quantize_row
void quantize_row_q8_1(const float* src, BlockQ8_1* dst, std::int64_t n);

/// Activations to Q8_K: f32 scale, sums of 16 codes.
/// @param src [n] f32   @param dst [n/256]   @param n a multiple of 256   @throws as quantize_row
void quantize_row_q8_k(const float* src, BlockQ8_K* dst, std::int64_t n);

/// IQ4_NL with a chosen effort. Files are written with 7 tries, which is what quantize_row does; ggml's
/// reference for activations and tests has -1: one scale, and codes chosen before it.
/// @param src [n] f32   @param dst [n/32]   @param n a multiple of 32   @throws as quantize_row
void quantize_row_iq4_nl(const float* src, BlockIQ4_NL* dst, std::int64_t n, int tries);

}  // namespace ladder
