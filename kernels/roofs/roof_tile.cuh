// Block sizes that the roof probes share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"

namespace ladder {

/// Threads of a block that streams memory.
inline constexpr int kStreamThreads = 256;
/// Blocks that must fit on a multiprocessor together. It is here to raise a limit: left alone, the compiler
/// keeps to 32 registers so that eight blocks fit, and then has room for five 16-byte loads, whatever the
/// source says. Four blocks leave 64 registers.
inline constexpr int kStreamMinBlocks = 4;
/// Threads of a block that computes in registers: four warps, one for each scheduler of a multiprocessor.
inline constexpr int kMathThreads = 128;

/// Pairs of steps in one turn of a tensor-core probe's loop: enough that its counter and branch cost nothing.
inline constexpr int kMmaPairs = 4;

/// Bytes that one block of a streaming probe asks for at once, when each thread has `loads` 16-byte accesses
/// in flight. A buffer must hold a whole number of them, so that the timed loop needs no bounds check per
/// access.
constexpr std::size_t stream_tile_bytes(int loads) {
  return static_cast<std::size_t>(loads) * kStreamThreads * sizeof(uint4);
}

namespace detail {

/// What every streaming launcher asks of its arguments.
inline Status check_stream_arguments(const char* probe, int loads, std::size_t bytes, int blocks) {
  const std::string name(probe);
  if (loads != 1 && loads != 2 && loads != 4 && loads != 8) {
    return Status::error(name + ": " + std::to_string(loads) +
                         " loads per thread; allowed are 1, 2, 4 and 8");
  }
  if (bytes == 0 || bytes % stream_tile_bytes(loads) != 0) {
    return Status::error(name + ": " + std::to_string(bytes) + " bytes; allowed are positive multiples of " +
                         std::to_string(stream_tile_bytes(loads)));
  }
  if (blocks < 1)
    return Status::error(name + ": " + std::to_string(blocks) + " blocks; at least 1 is needed");
  return {};
}

/// What every register-only launcher asks of its arguments.
inline Status check_math_arguments(const char* probe, int chains, int iterations, int blocks) {
  const std::string name(probe);
  if (chains != 1 && chains != 2 && chains != 4 && chains != 8) {
    return Status::error(name + ": " + std::to_string(chains) +
                         " independent chains; allowed are 1, 2, 4 and 8");
  }
  if (iterations < 1 || blocks < 1) {
    return Status::error(name + ": iterations and blocks must both be at least 1");
  }
  return {};
}

}  // namespace detail
}  // namespace ladder
