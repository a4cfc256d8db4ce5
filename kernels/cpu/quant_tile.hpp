// The inside of the quantized matmuls: what one instruction set has to provide.
//
// All formats are taken in groups of 256 elements, 16 runs of 16 (kernels/quant/decode.hpp): the elements of
// a run share the scale of their weights and of their activations. Formats of 32-element blocks put 8 blocks
// in a group, and the last group of a row may have fewer.
//
// Each (row, token) has exactly one vector of f32 partial sums, to which the groups are added in order. What
// is added for a group does not depend on how many rows and tokens share the tile, which is what makes a
// token's bits independent of its company.
#pragma once

#include <cstddef>
#include <cstdint>

#include "harness/experiment/weight_types.hpp"
#include "kernels/quant/q8_acts.hpp"

namespace ladder::cpu {

inline constexpr int kGroupElems = 256;
inline constexpr int kGroupRuns = 16;
inline constexpr int kMaxQuantTokens = 8;  // tokens that share one decoding of the weights

/// 256 activations of a token as int8. The order of runs and codes is that of the instruction set that
/// made them: in order, but for AVX-512, for which see quant_int8_avx512.hpp.
struct alignas(64) ActGroup {
  std::int8_t codes[kGroupElems];
  std::int32_t negative_sums[kGroupRuns];  // minus the sum of the codes of a run
  float scales[kGroupRuns];                // of a run; two neighbouring runs have one scale
};

/// Rows of a matrix times 1 to kMaxQuantTokens tokens.
struct QuantTile {
  const unsigned char* weights;  // first row
  std::size_t row_bytes;
  long long rows;
  long long id;
  const ActGroup* acts;  // int8 kernels: [tokens][groups], first token
  const float* floats;   // f32 kernels: [tokens][id], first token
  int tokens;
  float* out;    // [tokens][od], at the first row and token
  long long od;  // distance of the tokens in `out`
  bool cold;     // the weights come from memory and are worth prefetching
};

using QuantKernel = void (*)(const QuantTile&);

/// One group of f32 activations to int8.
/// @param acts [count] 32 <= count <= 256, a multiple of 32; what is missing counts as zero
using QuantizeGroup = void (*)(const float* acts, int count, ActGroup& group);

/// One group of blocks that are int8 already.
/// @param blocks [count] 1 to 8; what is missing counts as zero
using TakeGroup = void (*)(const BlockQ8Pad40* blocks, int count, ActGroup& group);

struct GemmInt8Kernels;  // gemm_int8_tile.hpp

struct QuantKernels {
  const char* name;  // the instruction that multiplies
  bool lanes;        // activations are in the order of quant_int8_avx512.hpp
  QuantizeGroup quantize;
  TakeGroup take;
  // Of the int8 products, for their error bound: f32 additions to a lane for a group of codes, those for a
  // group of offsets, and those of the tree that adds up the lanes.
  int code_additions, offset_additions, tree_additions;
  const QuantKernel*
      int8;  // [kWeightTypes.size()], by WeightType; nullptr for the types that are not quantized
  const QuantKernel* f32;  // [kWeightTypes.size()], by WeightType
  const GemmInt8Kernels& gemm;
};

/// Those of the instruction set in use.
const QuantKernels& quant_kernels();

extern const QuantKernels kQuantPortable;
extern const QuantKernel kQuantF32Portable[kWeightTypes.size()];
#if defined(__x86_64__)
extern const QuantKernels kQuantAvx2;
extern const QuantKernels kQuantAvx512;      // AVX-512 F, BW, VL
extern const QuantKernels kQuantAvx512Vnni;  // and VNNI
extern const QuantKernel kQuantF32Avx512[kWeightTypes.size()];
#elif defined(__aarch64__)
extern const QuantKernels kQuantNeon;
extern const QuantKernels kQuantNeonDotprod;  // with sdot
#endif

}  // namespace ladder::cpu
