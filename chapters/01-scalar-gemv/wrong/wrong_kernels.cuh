// Broken kernels. Each has one bug that people really write, and the checker must reject every one of them: a
// checker that has never said no has not been tested. All have gemv_scalar's signature and grid.
#pragma once

#include "kernels/device/cuda.cuh"

namespace ladder::wrong {

/// Unrolled by four without a tail: the last id % 4 products are missing.
__global__ void dropped_tail(const float* weights, const float* acts, float* out, int nt, int od, int id) {
  const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= static_cast<long long>(nt) * od) return;
  const float* w = weights + (index % od) * id;
  const float* x = acts + (index / od) * id;
  float acc = 0.0f;
  for (int i = 0; i + 3 < id; i += 4)
    acc += w[i] * x[i] + w[i + 1] * x[i + 1] + w[i + 2] * x[i + 2] + w[i + 3] * x[i + 3];
  out[index] = acc;
}

/// Off by one in the grid guard: the last output keeps whatever was there before.
__global__ void stale_output(const float* weights, const float* acts, float* out, int nt, int od, int id) {
  const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= static_cast<long long>(nt) * od - 1) return;
  float acc = 0.0f;
  for (int i = 0; i < id; ++i) acc += weights[(index % od) * id + i] * acts[(index / od) * id + i];
  out[index] = acc;
}

/// Normalises by a norm that is zero: 0/0 in one output. A checker that asks `error > bound` lets it through.
__global__ void makes_nan(const float* weights, const float* acts, float* out, int nt, int od, int id) {
  const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= static_cast<long long>(nt) * od) return;
  float acc = 0.0f;
  for (int i = 0; i < id; ++i) acc += weights[(index % od) * id + i] * acts[(index / od) * id + i];
  const float norm = index == 0 ? 0.0f : 1.0f;
  out[index] = acc * norm / norm;
}

/// Half of k: two accumulators were meant, one was forgotten.
__global__ void half_of_k(const float* weights, const float* acts, float* out, int nt, int od, int id) {
  const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= static_cast<long long>(nt) * od) return;
  float acc = 0.0f;
  for (int i = 0; i < (id + 1) / 2; ++i) acc += weights[(index % od) * id + i] * acts[(index / od) * id + i];
  out[index] = acc;
}

/// `<=` for `<`: reads one element past the row, and for the last row past the matrix.
__global__ void reads_past_the_end(const float* weights, const float* acts, float* out, int nt, int od,
                                   int id) {
  const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= static_cast<long long>(nt) * od) return;
  float acc = 0.0f;
  for (int i = 0; i <= id; ++i) acc += weights[(index % od) * id + i] * acts[(index / od) * id + i];
  out[index] = acc;
}

/// No grid guard at all: threads past nt*od compute something harmless and store it past the output.
__global__ void writes_past_the_end(const float* weights, const float* acts, float* out, int nt, int od,
                                    int id) {
  const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long last = static_cast<long long>(nt) * od - 1;
  const long long safe = index < last ? index : last;
  float acc = 0.0f;
  for (int i = 0; i < id; ++i) acc += weights[(safe % od) * id + i] * acts[(safe / od) * id + i];
  if (index <= last + 1) out[index] = acc;
}

/// Sums in f16: eleven bits of significand instead of twenty-four.
__global__ void accumulates_in_f16(const float* weights, const float* acts, float* out, int nt, int od,
                                   int id) {
  const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= static_cast<long long>(nt) * od) return;
  __half acc = __float2half_rn(0.0f);
  for (int i = 0; i < id; ++i) {
    const float term = weights[(index % od) * id + i] * acts[(index / od) * id + i];
    acc = __float2half_rn(__half2float(acc) + term);
  }
  out[index] = __half2float(acc);
}

}  // namespace ladder::wrong
