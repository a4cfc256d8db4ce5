// Test data that host and device can both make: element i is a pure function of (seed, i), so a 2 GB matrix
// is filled where it lies and never crosses the bus.
#pragma once

#include <cstdint>

#include "harness/device/device.hpp"
#include "harness/experiment/fill_blocks.hpp"
#include "harness/experiment/mix_bits.hpp"
#include "harness/experiment/weight_types.hpp"
#include "kernels/device/cuda.cuh"

namespace ladder {

enum class FillKind {
  uniform,    ///< reals in [-1, 1) with 24 significant bits
  small_int,  ///< integers of 1 to 15 with either sign: sums of up to 74,565 products are exact in f32
              ///< whatever their order, and no product is zero, so that a term left out or counted twice
              ///< always shows
  tiny_int,   ///< integers of 1 to 4 with either sign: activations beside packed integers, whose codes are
              ///< larger
};

__host__ __device__ inline float fill_value(FillKind kind, std::uint32_t seed, std::uint64_t i) {
  const std::uint32_t bits = mix_bits((static_cast<std::uint64_t>(seed) << 40) ^ i);
  if (kind == FillKind::small_int) {
    const int v = static_cast<int>(bits % 30u);  // 0..29
    return static_cast<float>(v < 15 ? v - 15 : v - 14);
  }
  if (kind == FillKind::tiny_int) {
    const int v = static_cast<int>(bits % 8u);  // 0..7
    return static_cast<float>(v < 4 ? v - 4 : v - 3);
  }
  return static_cast<float>(bits >> 8) * (1.0f / 8388608.0f) - 1.0f;
}

/// Which blocks of a packed type stand for a kind of reals.
__host__ __device__ inline BlockFill block_fill(FillKind kind) {
  return kind == FillKind::uniform ? BlockFill::random : BlockFill::integers;
}

#if defined(__CUDACC__)
/// One thread a block of the packed type.
static __global__ void fill_blocks_kernel(unsigned char* dst, unsigned long long blocks, int block_bytes,
                                          WeightType type, BlockFill kind, unsigned seed) {
  const unsigned long long step = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  for (unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < blocks; i += step) {
    fill_block(type, kind, seed, i, dst + i * static_cast<unsigned>(block_bytes), block_bytes);
  }
}
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
void fill_blocks_host(unsigned char* dst, unsigned long long blocks, WeightType type, BlockFill kind,
                      unsigned seed);
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

/// Fills packed weights [od][id] of any type (device memory of this build). Synchronous.
inline void fill_weights(void* dst, WeightType type, long long od, long long id, FillKind kind, unsigned seed,
                         Stream& stream) {
  if (type == WeightType::f32) {
    fill(static_cast<float*>(dst), static_cast<std::size_t>(od) * static_cast<std::size_t>(id), kind, seed,
         stream);
    return;
  }
  auto* bytes = static_cast<unsigned char*>(dst);
  const auto blocks = static_cast<unsigned long long>(od * (id / info(type).block_elems));
#if defined(__CUDACC__)
  require(launch(fill_blocks_kernel, dim3(2048), dim3(256), 0, stream, bytes, blocks, info(type).block_bytes,
                 type, block_fill(kind), seed));
  stream.synchronize();
#else
  stream.synchronize();
  fill_blocks_host(bytes, blocks, type, block_fill(kind), seed);
  emu::note_written(bytes, blocks * static_cast<unsigned long long>(info(type).block_bytes));
#endif
}

}  // namespace ladder
