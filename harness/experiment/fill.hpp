// Test data that host and device can both make: element i is a pure function of (seed, i), so a 2 GB matrix
// is filled where it lies and never crosses the bus.
#pragma once

#include <cstdint>

#include "harness/device/device.hpp"
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

enum class FillKind {
  uniform,    ///< reals in [-1, 1) with 24 significant bits
  small_int,  ///< integers of 1 to 15 with either sign: sums of up to 74,565 products are exact in f32
              ///< whatever their order, and no product is zero, so that a term left out or counted twice
              ///< always shows
};

__host__ __device__ inline float fill_value(FillKind kind, std::uint32_t seed, std::uint64_t i) {
  const std::uint32_t bits = mix_bits((static_cast<std::uint64_t>(seed) << 40) ^ i);
  if (kind == FillKind::small_int) {
    const int v = static_cast<int>(bits % 30u);  // 0..29
    return static_cast<float>(v < 15 ? v - 15 : v - 14);
  }
  return static_cast<float>(bits >> 8) * (1.0f / 8388608.0f) - 1.0f;
}

#if defined(__CUDACC__)
static __global__ void fill_kernel(float* dst, unsigned long long n, FillKind kind, unsigned seed) {
  const unsigned long long step = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  for (unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
       i += step) {
    dst[i] = fill_value(kind, seed, i);
  }
}
#else
/// Host build: device memory is host memory. Implemented in harness/experiment/reference.cpp, uninstrumented.
void fill_host(float* dst, unsigned long long n, FillKind kind, unsigned seed);
#endif

/// Fills `n` floats at `dst` (device memory of this build). Synchronous.
inline void fill(float* dst, std::size_t n, FillKind kind, unsigned seed, Stream& stream) {
  if (n == 0) return;
#if defined(__CUDACC__)
  require(launch(fill_kernel, dim3(2048), dim3(256), 0, stream, dst, static_cast<unsigned long long>(n), kind,
                 seed));
  stream.synchronize();
#else
  stream.synchronize();
  fill_host(dst, n, kind, seed);
  emu::note_written(dst, n * sizeof(float));  // behind the buffer's back
#endif
}

}  // namespace ladder
