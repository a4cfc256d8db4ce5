// The quantized formats of GGUF, bit by bit: one struct a format. A row of a matrix is an array of blocks.
// Layouts: ggml-common.h of https://github.com/ggml-org/llama.cpp, commit d99724f2, restated.
#pragma once

#include <cstddef>
#include <cstdint>

#include "harness/experiment/weight_types.hpp"

namespace ladder {

// Blocks hold 2-byte scales at 2-byte offsets and have odd multiples of 2 bytes as sizes: inside a row they are 2-byte
// aligned, no better. f16 fields are raw bits, so that host and device read them with their own conversions.
using F16Bits = std::uint16_t;
