// The quantized matmuls for AVX-512 with VNNI.
#if defined(__x86_64__)
#define LADDER_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define LADDER_HAVE_VNNI 1
#include "kernels/cpu/gemm_int8_avx512.hpp"

namespace ladder::cpu {

const QuantKernels kQuantAvx512Vnni = {
    .name = "vpdpbusd",
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
