// The quantized matmuls for NEON without the dot product instructions.
#if defined(__aarch64__)
#define LADDER_NEON
#define LADDER_HAVE_DOTPROD 0
#include "kernels/cpu/quant_int8_neon.hpp"

namespace ladder::cpu {

const QuantKernels kQuantNeon = {
    .name = "smull",
    .lanes = false,
    .quantize = quantize,
    .take = take_in_order,
    .code_additions = 4,
    .offset_additions = 4,
    .tree_additions = 2,
    .int8 = kInt8,
    .f32 = kQuantF32Portable,
    .gemm = kGemmInt8,
};

}  // namespace ladder::cpu
#endif
