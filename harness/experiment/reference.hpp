// The float64 answer that every kernel is compared with, and the sum of |terms| that its error bound is made
// of.
#pragma once

#include <span>
#include <vector>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"

namespace ladder {

/// Both are [nt][od], float64.
struct Reference {
  std::vector<double> value;      ///< sum_i w[r][i] * x[t][i]
  std::vector<double> magnitude;  ///< sum_i |w[r][i] * x[t][i]|
};

#if defined(__CUDACC__)
/// One warp per (token, output): deliberately the plainest code that is not hopeless. Its own test compares
/// it with a host loop.
static __global__ void reference_kernel(const float* weights, const float* acts, double* value,
                                        double* magnitude, long long nt, long long od, long long id) {
  const long long index = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (index >= nt * od) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const float* w = weights + (index % od) * id;
  const float* x = acts + (index / od) * id;
  double sum = 0, absolute = 0;
  for (long long i = lane; i < id; i += 32) {
    const double term = static_cast<double>(w[i]) * static_cast<double>(x[i]);
    sum += term;
    absolute += term < 0 ? -term : term;
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    absolute += __shfl_xor_sync(0xffffffffu, absolute, offset);
  }
  if (lane == 0) {
    value[index] = sum;
    magnitude[index] = absolute;
  }
}
#else
/// Host build, several threads, uninstrumented: harness/experiment/reference.cpp.
void reference_host(const float* weights, const float* acts, double* value, double* magnitude, Shape shape);
#endif

/// @param weights [od][id], @param acts [nt][id], both in this build's device memory.
inline Reference reference_matmul(const float* weights, const float* acts, Shape shape, Stream& stream) {
  const auto n = static_cast<std::size_t>(shape.nt * shape.od);
  Reference r;
  r.value.resize(n);
  r.magnitude.resize(n);
#if defined(__CUDACC__)
  Buffer<double> value(n, "reference value"), magnitude(n, "reference magnitude");
  const auto blocks = static_cast<unsigned>((n * 32 + 255) / 256);
  require(launch(reference_kernel, dim3(blocks), dim3(256), 0, stream, weights, acts, value.data(),
                 magnitude.data(), shape.nt, shape.od, shape.id));
  stream.synchronize();
  value.download(r.value);
  magnitude.download(r.magnitude);
#else
  stream.synchronize();
  reference_host(weights, acts, r.value.data(), r.magnitude.data(), shape);
#endif
  return r;
}

}  // namespace ladder
