// The float64 answer that every kernel is compared with, and the sum of |terms| that its error bound is made
// of.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "harness/device/device.hpp"
#include "harness/experiment/fill_blocks.hpp"
#include "harness/experiment/weight_types.hpp"
#include "kernels/device/cuda.cuh"
#if defined(__CUDACC__)
#include "kernels/quant/dequantize.cuh"
#endif

namespace ladder {

/// Both are [nt][od], float64. Packed weights are decoded to f32 first.
struct Reference {
  std::vector<double> value;  ///< sum_i w[r][i] * x[t][i]
  /// sum_i |w[r][i] * x[t][i]|. A type with offsets o (w = code part + o) counts |(w - o) * x| + |o * x|
  /// instead: a kernel may sum the two parts apart, and each sum rounds.
  std::vector<double> magnitude;
};

#if defined(__CUDACC__)
inline constexpr int kReferenceTile = 64,
                     kReferenceStep = 16;  // outputs of a block along either axis; terms at a time

/// A block for 64 x 64 outputs, a thread for 4 x 4 of them, terms in order: plain, but fast enough for prompts. Its own
/// test compares it with a host loop. Rows r0 to r0+rows-1 of a matrix with od rows; `weights` and `offsets` (which may be
/// null) begin at row r0.
static __global__ void __launch_bounds__(256)
    reference_kernel(const float* weights, const float* offsets, const float* acts, double* value,
                     double* magnitude, long long nt, long long od, long long id, long long r0,
                     long long rows) {
  __shared__ float w[kReferenceStep][kReferenceTile + 1], o[kReferenceStep][kReferenceTile + 1],
      x[kReferenceStep][kReferenceTile + 1];
  const int me = static_cast<int>(threadIdx.x), across = me % 16, down = me / 16;
  const long long row0 = static_cast<long long>(blockIdx.x) * kReferenceTile,
                  t0 = static_cast<long long>(blockIdx.y) * kReferenceTile;
  double sum[4][4] = {}, absolute[4][4] = {};
  for (long long i0 = 0; i0 < id; i0 += kReferenceStep) {
    for (int e = me; e < kReferenceStep * kReferenceTile; e += 256) {
      const int k = e % kReferenceStep, n = e / kReferenceStep;
      const bool in_row = row0 + n < rows && i0 + k < id;
      w[k][n] = in_row ? weights[(row0 + n) * id + i0 + k] : 0.0f;
      o[k][n] = in_row && offsets != nullptr ? offsets[(row0 + n) * id + i0 + k] : 0.0f;
      x[k][n] = t0 + n < nt && i0 + k < id ? acts[(t0 + n) * id + i0 + k] : 0.0f;
    }
    __syncthreads();  // the tile is there
    for (int k = 0; k < kReferenceStep; ++k) {
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const double wi = w[k][across + 16 * a], oi = o[k][across + 16 * a];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const double xi = x[k][down + 16 * b];
          sum[a][b] += wi * xi;
          absolute[a][b] += fabs((wi - oi) * xi) + fabs(oi * xi);
        }
      }
    }
    __syncthreads();  // and read before the next one is written
  }
  for (int a = 0; a < 4; ++a) {
    for (int b = 0; b < 4; ++b) {
      const long long row = row0 + across + 16 * a, t = t0 + down + 16 * b;
      if (row >= rows || t >= nt) continue;
      value[t * od + r0 + row] = sum[a][b];
      magnitude[t * od + r0 + row] = absolute[a][b];
    }
  }
}

/// One thread a block.
static __global__ void zero_codes_kernel(unsigned char* blocks, unsigned long long n, int block_bytes,
                                         WeightType type) {
  const unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) zero_codes(type, blocks + i * static_cast<unsigned>(block_bytes));
}
#else
/// Host build, several threads, uninstrumented: harness/experiment/reference.cpp.
void reference_host(const void* weights, WeightType type, const float* acts, double* value, double* magnitude,
                    Shape shape);
#endif

/// @param weights packed [od][id], @param acts [nt][id], both in this build's device memory.
inline Reference reference_matmul(const void* weights, const float* acts, Shape shape, Stream& stream,
                                  WeightType type = WeightType::f32) {
  const auto n = static_cast<std::size_t>(shape.nt * shape.od);
  Reference r;
  r.value.resize(n);
  r.magnitude.resize(n);
#if defined(__CUDACC__)
  Buffer<double> value(n, "reference value"), magnitude(n, "reference magnitude");
  const auto multiply = [&](const float* w, const float* offsets, long long r0, long long rows) {
    const auto tiles = [](long long n) {
      return static_cast<unsigned>((n + kReferenceTile - 1) / kReferenceTile);
    };
    require(launch(reference_kernel, dim3(tiles(rows), tiles(shape.nt)), dim3(256), 0, stream, w, offsets,
                   acts, value.data(), magnitude.data(), shape.nt, shape.od, shape.id, r0, rows));
  };
  if (type == WeightType::f32) {
    multiply(static_cast<const float*>(weights), nullptr, 0, shape.od);
  } else {
    // Decoded a few million weights at a time.
    const long long rows = std::max(1LL, std::min(shape.od, (1LL << 24) / shape.id));
    const std::size_t bytes = row_bytes(type, shape.id);
    Buffer<float> decoded(static_cast<std::size_t>(rows * shape.id), "decoded weights");
    Buffer<float> offsets(has_offset(type) ? decoded.size() : 0, "offsets");
    Buffer<unsigned char> codeless(has_offset(type) ? static_cast<std::size_t>(rows) * bytes : 0,
                                   "blocks without codes");
    for (long long r0 = 0; r0 < shape.od; r0 += rows) {
      const long long now = std::min(rows, shape.od - r0);
      const unsigned char* packed =
          static_cast<const unsigned char*>(weights) + static_cast<std::size_t>(r0) * bytes;
      require(launch_dequantize(type, packed, decoded.data(), now * shape.id, stream));
      if (has_offset(type)) {
        const auto n_blocks = static_cast<unsigned long long>(now * (shape.id / info(type).block_elems));
        LADDER_CUDA(cudaMemcpyAsync(codeless.data(), packed, static_cast<std::size_t>(now) * bytes,
                                    cudaMemcpyDeviceToDevice, stream.handle()));
        require(launch(zero_codes_kernel, dim3(static_cast<unsigned>((n_blocks + 255) / 256)), dim3(256), 0,
                       stream, codeless.data(), n_blocks, info(type).block_bytes, type));
        require(launch_dequantize(type, codeless.data(), offsets.data(), now * shape.id, stream));
      }
      multiply(decoded.data(), has_offset(type) ? offsets.data() : nullptr, r0, now);
    }
    stream.synchronize();
  }
  stream.synchronize();
  value.download(r.value);
  magnitude.download(r.magnitude);
#else
  stream.synchronize();
  reference_host(weights, type, acts, r.value.data(), r.magnitude.data(), shape);
#endif
  return r;
}

}  // namespace ladder
