// Packed weights to f32 on the host. row_bytes() is in harness/experiment/weight_types.hpp.
#pragma once

#include <cstdint>

#include "harness/experiment/weight_types.hpp"

namespace ladder {

/// Decodes n neighbouring elements of a row, with the bits that ggml's dequantize_row_* gives (decode.hpp).
/// Infinite and NaN scales go through as arithmetic has them.
/// @param src row_bytes(type, n) bytes, of any alignment
/// @param dst [n] f32
/// @param n elements, a multiple of the block length of the type; 0 is allowed
/// @throws std::invalid_argument if n is negative or no multiple of the block length
void dequantize_row(WeightType type, const void* src, float* dst, std::int64_t n);

}  // namespace ladder
