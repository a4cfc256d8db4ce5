// The inside of gemm_f32.hpp: what one instruction set has to provide (gemm_f32_body.hpp writes it in its vectors).
//
// Panels. Rows of the weights are taken kRows at a time and tokens kTokens at a time, and inside such a panel
// neighbours in k lie one after the other: element k of all its rows or tokens is one piece. Both operands have k
// along their rows, so that packing is a transpose; the inner loop then reads two streams from front to back.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ladder::cpu {

/// Elements of k that are summed in registers before they are added to an output: a panel of rows of that length
/// lies in L1.
inline constexpr long long kGemmDepth = 256;

/// A tile of out: kRows x some tokens, over some elements of k.
struct GemmTile {
  const float* weights;  // panel [depth][rows of a panel]
  const float* acts;     // panel [depth][tokens]
  int depth;
  float* out;        // [tokens][od], at the first row and token
  long long od;      // distance of the tokens in `out`
  int rows;          // that exist, 1 to those of a panel
  bool accumulates;  // adds to `out` instead of replacing it
};
using GemmTileKernel = void (*)(const GemmTile&);

/// A panel: element k of row r goes to out[k * width + r], and what is missing of `width` is zero.
/// @param row_stride elements from a row of `from` to the next
using PackF32 = void (*)(const float* from, long long row_stride, int rows, int depth, int width, float* out);
using PackF16 = void (*)(const std::uint16_t* from, long long row_stride, int rows, int depth, int width,
                         float* out);

inline constexpr int kMostGemmTokens = 12;

struct GemmKernels {
  int rows;    // of a panel of weights
  int tokens;  // of a panel of activations: at most kMostGemmTokens
  PackF32 pack_f32;
  PackF16 pack_f16;
  GemmTileKernel tile[kMostGemmTokens];  // for 1 to `tokens` tokens
};

extern const GemmKernels kGemmPortable;
#if defined(__x86_64__)
extern const GemmKernels kGemmAvx2;
extern const GemmKernels kGemmAvx512;
#elif defined(__aarch64__)
extern const GemmKernels kGemmNeon;
#endif

}  // namespace ladder::cpu
