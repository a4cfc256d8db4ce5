// A pure function from a counter to random bits: what all test data is made of.
#pragma once

#include <cstdint>

#include "kernels/device/cuda.cuh"

namespace ladder {

/// A 32-bit mix of a 64-bit counter (the finaliser of MurmurHash3, public domain constants).
__host__ __device__ inline std::uint32_t mix_bits(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return static_cast<std::uint32_t>(x);
}

}  // namespace ladder
