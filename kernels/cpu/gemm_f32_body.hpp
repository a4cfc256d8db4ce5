// The code of gemm_f32_tile.hpp, compiled once for each instruction set. The file that includes this one defines, in
// ladder::cpu's unnamed namespace,
//   LADDER_TARGET     the target attribute of every function
//   Floats, kLanes    a vector and how many floats it has, with load, load_halves, store, all, add,
//                     madd(a, b, c) = a * b + c, and transpose(v): kLanes vectors as a square matrix
//   kVectors          vectors of rows of a tile
//   kTokens           tokens of a tile: kVectors * kTokens sums and some more vectors fit in the registers
#include <cstring>
#include <utility>

#include "kernels/cpu/gemm_f32_tile.hpp"

namespace ladder::cpu {
namespace {

#define LADDER_TARGET_INLINE LADDER_TARGET inline __attribute__((always_inline))

constexpr int kRows = kVectors * kLanes;

// ANCHOR: cpu_gemm_tile
/// out[t][r] = (out[t][r] +) sum over k of weights[k][r] * acts[k][t]; a lane has one row, so that outputs of a
/// token are neighbours and nothing is added up across lanes.
template <int Tokens>
LADDER_TARGET void gemm_tile(const GemmTile& tile) {
  Floats sum[Tokens][kVectors];
#pragma GCC unroll 16
  for (int t = 0; t < Tokens; ++t) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[t][v] = all(0);
  }
  // 1. An outer product for every k: kVectors loads, Tokens broadcasts, their product multiply-adds.
  const float* w = tile.weights;
  const float* x = tile.acts;
  for (int k = 0; k < tile.depth; ++k, w += kRows, x += Tokens) {
    Floats row[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) row[v] = load(w + v * kLanes);
#pragma GCC unroll 16
    for (int t = 0; t < Tokens; ++t) {
      Floats one = all(x[t]);
      keep(one);  // a broadcast for all vectors of rows, not one for each
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[t][v] = madd(row[v], one, sum[t][v]);
    }
  }
  // 2. To the outputs; where rows are missing, through a whole tile's row aside.
#pragma GCC unroll 16
  for (int t = 0; t < Tokens; ++t) {
    float* out = tile.out + t * tile.od;
    float aside[kRows];
    if (tile.rows < kRows) {
      if (tile.accumulates) std::memcpy(aside, out, static_cast<std::size_t>(tile.rows) * sizeof(float));
      out = aside;
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      store(out + v * kLanes, tile.accumulates ? add(load(out + v * kLanes), sum[t][v]) : sum[t][v]);
    }
    if (tile.rows < kRows) {
      std::memcpy(tile.out + t * tile.od, aside, static_cast<std::size_t>(tile.rows) * sizeof(float));
    }
  }
}
// ANCHOR_END: cpu_gemm_tile

LADDER_TARGET_INLINE Floats load_any(const float* p) { return load(p); }
LADDER_TARGET_INLINE Floats load_any(const std::uint16_t* p) { return load_halves(p); }
LADDER_TARGET_INLINE float float_of(float f) { return f; }
LADDER_TARGET_INLINE float float_of(std::uint16_t half) { return half_bits_to_float(half); }

// ANCHOR: cpu_gemm_pack
/// Squares of kLanes x kLanes, transposed in registers; what is left over, an element at a time.
template <class Element>
LADDER_TARGET void pack(const Element* from, long long row_stride, int rows, int depth, int width,
                        float* out) {
  int r = 0;
  for (; r + kLanes <= rows; r += kLanes) {
    int k = 0;
    for (; k + kLanes <= depth; k += kLanes) {
      Floats square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = load_any(from + (r + i) * row_stride + k);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(out + (k + i) * width + r, square[i]);
    }
    for (; k < depth; ++k) {
      for (int i = r; i < r + kLanes; ++i) out[k * width + i] = float_of(from[i * row_stride + k]);
    }
  }
  for (; r < rows; ++r) {
    for (int k = 0; k < depth; ++k) out[k * width + r] = float_of(from[r * row_stride + k]);
  }
  for (; r < width; ++r) {
    for (int k = 0; k < depth; ++k) out[k * width + r] = 0;
  }
}
// ANCHOR_END: cpu_gemm_pack

template <int... Tokens>
constexpr GemmKernels gemm_kernels(std::integer_sequence<int, Tokens...>) {
  return {kRows, kTokens, pack<float>, pack<std::uint16_t>, {gemm_tile<Tokens + 1>...}};
}
constexpr GemmKernels kGemm = gemm_kernels(std::make_integer_sequence<int, kTokens>{});

}  // namespace
}  // namespace ladder::cpu
