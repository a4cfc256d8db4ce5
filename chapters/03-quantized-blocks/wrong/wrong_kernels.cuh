// Broken decoders: one bug each, and the checker must reject them all. The three without a bug are the
// control: the checker must accept them, so it is the bug that it rejects.
#pragma once

#include <cstdint>

#include "kernels/device/cuda.cuh"

namespace ladder::wrong {

/// One thread a row, one weight a step, nt = 1. Decoder::weight(row, i) is weight i of a packed row.
template <class Decoder>
__global__ void decode_and_multiply(const unsigned char* weights, const float* acts, float* out, int od,
                                    int id, long long row_bytes) {
  const int r = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (r >= od) return;
  float acc = 0.0f;
  for (int i = 0; i < Decoder::length(id); ++i) acc += Decoder::weight(weights + r * row_bytes, i) * acts[i];
  out[r] = acc;
}

__device__ inline float half_at(const unsigned char* p) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(p[0] | p[1] << 8)));
}

struct WholeRow {
  __device__ static int length(int id) { return id; }
};

/// Q4_0: element j is the low nibble of byte j, element j + 16 its high nibble.
struct Q4_0Right : WholeRow {
  __device__ static float weight(const unsigned char* row, int i) {
    const unsigned char* block = row + 18 * (i / 32);
    const int j = i % 32;
    const int code = j < 16 ? block[2 + j] & 15 : block[2 + j - 16] >> 4;
    return half_at(block) * static_cast<float>(code - 8);
  }
};

/// The two nibbles of a byte taken for neighbours.
struct HighNibblesInterleaved : WholeRow {
  __device__ static float weight(const unsigned char* row, int i) {
    const unsigned char* block = row + 18 * (i / 32);
    const int j = i % 32;
    const int code = j % 2 == 0 ? block[2 + j / 2] & 15 : block[2 + j / 2] >> 4;
    return half_at(block) * static_cast<float>(code - 8);
  }
};

/// Codes taken for unsigned numbers.
struct OffsetForgotten : WholeRow {
  __device__ static float weight(const unsigned char* row, int i) {
    const unsigned char* block = row + 18 * (i / 32);
    const int j = i % 32;
    return half_at(block) * static_cast<float>(j < 16 ? block[2 + j] & 15 : block[2 + j - 16] >> 4);
  }
};

/// Two blocks a step, and an odd last one is left out.
struct TailBlockDropped : Q4_0Right {
  __device__ static int length(int id) { return id / 64 * 64; }
};

/// The scale of the row's first block for all of them.
struct FirstScaleForAll : WholeRow {
  __device__ static float weight(const unsigned char* row, int i) {
    const float right = half_at(row + 18 * (i / 32));
    return right == 0.0f ? 0.0f : Q4_0Right::weight(row, i) / right * half_at(row);
  }
};

/// Q5_0: bit j of the fifth bits belongs to element j, so the word is read from its low end.
struct Q5_0Right : WholeRow {
  __device__ static int fifth(const unsigned char* block, int j) { return block[2 + j / 8] >> (j % 8) & 1; }
  __device__ static float weight(const unsigned char* row, int i) {
    const unsigned char* block = row + 22 * (i / 32);
    const int j = i % 32;
    const int nibble = j < 16 ? block[6 + j] & 15 : block[6 + j - 16] >> 4;
    return half_at(block) * static_cast<float>((nibble | fifth(block, j) << 4) - 16);
  }
};

/// The word of fifth bits read from its high end.
struct FifthBitsReversed : WholeRow {
  __device__ static float weight(const unsigned char* row, int i) {
    const unsigned char* block = row + 22 * (i / 32);
    const int j = i % 32;
    const int nibble = j < 16 ? block[6 + j] & 15 : block[6 + j - 16] >> 4;
    return half_at(block) * static_cast<float>((nibble | Q5_0Right::fifth(block, 31 - j) << 4) - 16);
  }
};

/// Q4_K. Scale and minimum of sub-block `j + SHIFT` are used for sub-block j; UPPER = false leaves out the
/// two high bits of the packed scales and minima.
template <int SHIFT, bool UPPER>
struct Q4_KWith : WholeRow {
  __device__ static float weight(const unsigned char* row, int i) {
    const unsigned char* block = row + 144 * (i / 256);
    const int e = i % 256, group = e / 64, l = e % 32;
    const int code = e % 64 < 32 ? block[16 + 32 * group + l] & 15 : block[16 + 32 * group + l] >> 4;
    const unsigned char* s = block + 4;
    const int j = (e / 32 + SHIFT) % 8;
    int scale = 0, min = 0;
    if (j < 4) {
      scale = s[j] & 63;
      min = s[j + 4] & 63;
    } else {
      scale = (s[j + 4] & 15) | (UPPER ? (s[j - 4] >> 6) << 4 : 0);
      min = (s[j + 4] >> 4) | (UPPER ? (s[j] >> 6) << 4 : 0);
    }
    return half_at(block) * static_cast<float>(scale * code) - half_at(block + 2) * static_cast<float>(min);
  }
};
using Q4_KRight = Q4_KWith<0, true>;
using NeighboursScale = Q4_KWith<1, true>;
using ScaleHighBitsForgotten = Q4_KWith<0, false>;

}  // namespace ladder::wrong
