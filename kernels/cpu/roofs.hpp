// The CPU's ceilings: memory bandwidth, f32 multiply-adds and int8 dot products, each with one instruction
// set chosen at run time (features.hpp). They are the CPU twins of the probes in kernels/roofs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cpu/thread_pool.hpp"

namespace ladder::cpu {

/// How a probe writes. An ordinary store first brings the line into the cache, so every byte written is also
/// read from memory; a streaming store goes around the cache and does not.
enum class Stores { cached, streaming };

/// "cached" or "streaming".
[[nodiscard]] const char* name(Stores stores);

/// Whether the instruction set in use has streaming stores (x86-64 has; the others write as with
/// Stores::cached).
[[nodiscard]] bool has_streaming_stores();

/// Reads `count` words once. Each thread reads one contiguous part.
/// @return their sum modulo 2^32
[[nodiscard]] std::uint32_t roof_read(const std::uint32_t* words, std::size_t count, ThreadPool& pool);

/// out[i] = in[i]. The buffers must not overlap. Stores::streaming is refused with std::invalid_argument
/// where has_streaming_stores() is false.
void roof_copy(const std::uint32_t* in, std::uint32_t* out, std::size_t count, Stores stores,
               ThreadPool& pool);

/// What roof_write stores at word `i`.
[[nodiscard]] constexpr std::uint32_t roof_write_word(std::uint32_t seed, std::size_t i) {
  return seed + static_cast<std::uint32_t>(i) * 0x9E3779B9U;
}

/// out[i] = roof_write_word(seed, i). Stores::streaming as in roof_copy.
void roof_write(std::uint32_t* out, std::size_t count, std::uint32_t seed, Stores stores, ThreadPool& pool);

/// How many independent f32 values a thread of roof_fma_f32 keeps in registers.
[[nodiscard]] int fma_values();

/// Every thread takes fma_values() start values through `pairs` pairs of steps, r = r * x0 + y0 and r = r *
/// x1 + y1, in registers. Only the portable code may round the product before it adds.
/// @param operands [4 + fma_values()]: x0, y0, x1, y1, then the start values
/// @param out [threads][fma_values()]
void roof_fma_f32(std::span<const float> operands, int pairs, std::span<float> out, ThreadPool& pool);

/// FLOP of one call on `threads` threads.
[[nodiscard]] double roof_fma_flop(int pairs, int threads);

/// How many independent int32 sums a thread of roof_int8_dot keeps in registers.
[[nodiscard]] int int8_values();

/// The instruction that roof_int8_dot uses: "vpdpbusd", "vpmaddubsw", "sdot", "smull" or "portable".
[[nodiscard]] const char* int8_instruction();

/// Every thread adds `steps` times the dot product of four unsigned and four signed bytes to each of its
/// sums.
/// @param operands [1 + int8_values()]: four signed bytes, then four unsigned bytes 0..127 for every sum
/// @param out [threads][int8_values()], modulo 2^32
void roof_int8_dot(std::span<const std::uint32_t> operands, int steps, std::span<std::uint32_t> out,
                   ThreadPool& pool);

/// int8 operations of one call on `threads` threads: four products and four additions for every sum and step.
[[nodiscard]] double roof_int8_ops(int steps, int threads);

}  // namespace ladder::cpu
