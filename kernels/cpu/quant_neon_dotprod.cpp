// The quantized matmuls for NEON with the dot product instructions (Armv8.2).
#if defined(__aarch64__)
#if defined(__clang__)
#define LADDER_NEON __attribute__((target("dotprod")))
#else
#define LADDER_NEON __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#define LADDER_HAVE_DOTPROD 1
#include "kernels/cpu/quant_int8_neon.hpp"

namespace ladder::cpu {

const QuantKernels kQuantNeonDotprod = {
    .name = "sdot",
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
