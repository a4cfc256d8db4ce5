// The quantized matmuls for AVX-512 without VNNI: products of 16-bit numbers instead.
#if defined(__x86_64__)
#define LADDER_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define LADDER_HAVE_VNNI 0
#include "kernels/cpu/gemm_int8_avx512.hpp"

namespace ladder::cpu {

const QuantKernels kQuantAvx512 = {
    .name = "vpmaddwd",
    .lanes = true,
    .quantize = quantize,
    .take = take,
    .code_additions = 1,
    .offset_additions = 1,
    .tree_additions = 4,
    .int8 = kInt8,
    .f32 = kQuantF32Avx512,
    .gemm = kGemmInt8,
};

}  // namespace ladder::cpu
#endif
