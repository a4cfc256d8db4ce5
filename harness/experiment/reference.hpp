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
/// One warp per (token, output): deliberately the plainest code that is not hopeless. Its own test compares
/// it with a host loop. Rows r0 to r0+rows-1 of a matrix with od rows; `weights` and `offsets` (which may be
/// null) begin at row r0.
static __global__ void reference_kernel(const float* weights, const float* offsets, const float* acts,
                                        double* value, double* magnitude, long long nt, long long od,
                                        long long id, long long r0, long long rows) {
  const long long index = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (index >= nt * rows) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const float* w = weights + (index % rows) * id;
  const float* o = offsets != nullptr ? offsets + (index % rows) * id : nullptr;
  const float* x = acts + (index / rows) * id;
  double sum = 0, absolute = 0;
  for (long long i = lane; i < id; i += 32) {
    const double xi = x[i], wi = w[i], oi = o != nullptr ? o[i] : 0.0;
    sum += wi * xi;
    absolute += fabs((wi - oi) * xi) + fabs(oi * xi);
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    absolute += __shfl_xor_sync(0xffffffffu, absolute, offset);
  }
  if (lane == 0) {
    const long long at = index / rows * od + r0 + index % rows;
    value[at] = sum;
    magnitude[at] = absolute;
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
    const auto blocks = static_cast<unsigned>((shape.nt * rows * 32 + 255) / 256);
    require(launch(reference_kernel, dim3(blocks), dim3(256), 0, stream, w, offsets, acts, value.data(),
                   magnitude.data(), shape.nt, shape.od, shape.id, r0, rows));
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
