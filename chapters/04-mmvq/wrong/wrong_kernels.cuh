// Broken int8 products: one bug each, and the checker must reject them all. Those without a bug are the
// control: the checker must accept them, so it is the bug that it rejects.
#pragma once

#include <cstdint>

#include "kernels/device/cuda.cuh"
#include "kernels/quant/q8_acts.hpp"

namespace ladder::wrong {

enum class Bug {
  none,
  sum_forgotten,         ///< the offset of the codes is not taken off
  sum_of_first_block,    ///< it is, with the sum of another block
  half_of_k,             ///< every second block is left out
  neighbouring_nibbles,  ///< the two nibbles of a byte taken for neighbours
  tokens_mixed_up,       ///< a token's accumulator gets another token's product
  half_accumulator,      ///< the sum kept in f16
  last_row_dropped,      ///< rows in pairs, and an odd last one is not written
  scale_of_first_half,   ///< 16 weights multiplied with the scale of the 16 before them
  minimum_unscaled,   ///< the minimum multiplied with the codes of the activations, not with the activations
  half_sum_is_whole,  ///< the sum of 32 activations where that of 16 is wanted
};

__device__ inline float half_at(const unsigned char* p) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(p[0] | p[1] << 8)));
}

/// One thread an output, Q4_0.
template <Bug kBug>
__global__ void q4_0_product(const unsigned char* weights, const BlockQ8Pad40* acts, float* out, int nt,
                             int od, int id) {
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), r = index % od, t = index / od;
  if (t >= nt) return;
  if (kBug == Bug::last_row_dropped && r >= od / 2 * 2) return;
  const int blocks = id / 32, source = kBug == Bug::tokens_mixed_up ? t ^ 1 : t;
  const BlockQ8Pad40* x = acts + (source < nt ? source : t) * blocks;
  float acc = 0.0f;
  for (int b = 0; b < blocks; b += kBug == Bug::half_of_k ? 2 : 1) {
    const unsigned char* block = weights + (static_cast<long long>(r) * blocks + b) * 18;
    int dot = 0;
    for (int j = 0; j < 32; ++j) {
      const int byte = kBug == Bug::neighbouring_nibbles ? j / 2 : j % 16;
      const bool high = kBug == Bug::neighbouring_nibbles ? j % 2 != 0 : j >= 16;
      dot += (block[2 + byte] >> (high ? 4 : 0) & 15) * x[b].q[j];
    }
    if (kBug != Bug::sum_forgotten) dot -= 8 * x[kBug == Bug::sum_of_first_block ? 0 : b].sum;
    const float d8 = __half2float(__ushort_as_half(x[b].d));
    acc += d8 * half_at(block) * static_cast<float>(dot);
    if (kBug == Bug::half_accumulator) acc = __half2float(__float2half(acc));
  }
  out[static_cast<long long>(t) * od + r] = acc;
}

/// One thread an output, Q4_1.
template <Bug kBug>
__global__ void q4_1_product(const unsigned char* weights, const BlockQ8Pad40* acts, float* out, int nt,
                             int od, int id) {
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), r = index % od, t = index / od;
  if (t >= nt) return;
  const int blocks = id / 32;
  const BlockQ8Pad40* x = acts + t * blocks;
  float acc = 0.0f;
  for (int b = 0; b < blocks; ++b) {
    const unsigned char* block = weights + (static_cast<long long>(r) * blocks + b) * 20;
    int dot = 0;
    for (int j = 0; j < 32; ++j) dot += (block[4 + j % 16] >> (j < 16 ? 0 : 4) & 15) * x[b].q[j];
    const float d8 = __half2float(__ushort_as_half(x[b].d));
    const float low = half_at(block + 2) * static_cast<float>(x[b].sum);
    acc += d8 * half_at(block) * static_cast<float>(dot) + (kBug == Bug::minimum_unscaled ? low : d8 * low);
  }
  out[static_cast<long long>(t) * od + r] = acc;
}

/// One thread an output, Q6_K.
template <Bug kBug>
__global__ void q6_k_product(const unsigned char* weights, const BlockQ8Pad40* acts, float* out, int nt,
                             int od, int id) {
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), r = index % od, t = index / od;
  if (t >= nt) return;
  const BlockQ8Pad40* x = acts + t * (id / 32);
  float acc = 0.0f;
  for (int run = 0; run < id / 16; ++run) {  // 16 weights with one scale
    const unsigned char* block = weights + (static_cast<long long>(r) * (id / 256) + run / 16) * 210;
    const int half = run % 16 / 8, k = run % 8 / 2, odd = run % 2;
    const BlockQ8Pad40& b = x[run / 2];
    int dot = 0, sum = 0;
    for (int j = 0; j < 16; ++j) {
      const int low = block[64 * half + 32 * (k % 2) + 16 * odd + j] >> (4 * (k / 2)) & 15;
      const int high = block[128 + 32 * half + 16 * odd + j] >> (2 * k) & 3;
      dot += (low | high << 4) * b.q[16 * odd + j];
      sum += b.q[16 * odd + j];
    }
    if (kBug == Bug::half_sum_is_whole) sum = b.sum;
    const int scale =
        static_cast<signed char>(block[192 + run % 16 - (kBug == Bug::scale_of_first_half ? odd : 0)]);
    acc += __half2float(__ushort_as_half(b.d)) * half_at(block + 208) *
           static_cast<float>(scale * (dot - 32 * sum));
  }
  out[static_cast<long long>(t) * od + r] = acc;
}

}  // namespace ladder::wrong
