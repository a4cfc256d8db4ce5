// The quantized matmuls for AVX-512 with VNNI.
#if defined(__x86_64__)
#define LADDER_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define LADDER_HAVE_VNNI 1
#include "kernels/cpu/quant_int8_avx512.hpp"

namespace ladder::cpu {
namespace {

constexpr QuantKernel kInt8[kWeightTypes.size()] = {nullptr,
                                                    nullptr,
                                                    nullptr,
                                                    multiply<BlockQ4_0>,
                                                    multiply<BlockQ4_1>,
                                                    multiply<BlockQ5_0>,
                                                    multiply<BlockQ5_1>,
                                                    multiply<BlockQ8_0>,
                                                    multiply<BlockQ2_K>,
                                                    multiply<BlockQ3_K>,
                                                    multiply<BlockQ4_K>,
                                                    multiply<BlockQ5_K>,
                                                    multiply<BlockQ6_K>,
                                                    multiply<BlockIQ4_NL>,
                                                    multiply<BlockIQ4_XS>};

}  // namespace

const QuantKernels kQuantAvx512Vnni = {
    .name = "vpdpbusd",
    .lanes = true,
    .quantize = quantize,
    .int8 = kInt8,
    .f32 = kQuantF32Avx512,
};

}  // namespace ladder::cpu
#endif
