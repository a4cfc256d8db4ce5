// Chapter 03: weights in blocks. One kernel skeleton with f32 activations, one rung for each storage type:
// the time follows the bytes, as far as unpacking them is cheap enough.
//
// The kernel is kernels/gemv/quant_f32_matmul.cuh; what differs from type to type is in quant_f32_formats.cuh
// beside it. The kernels that turn activations into int8 are timed here too (quantizers.hpp).
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/03-quantized-blocks/quantized_blocks.cu
//        kernels/quant/quantize_acts.cpp -o quantized_blocks
#include "chapters/03-quantized-blocks/quantizers.hpp"
#include "harness/experiment/main.hpp"
#include "kernels/gemv/quant_f32_matmul.cuh"
#if !defined(__CUDACC__)
#include "kernels/cpu/quant_matmul.hpp"
#endif

namespace ladder {

/// The rungs of this chapter, from the largest type to the smallest of each family.
inline Chapter chapter_03() {
  Chapter c;
  c.name = "03-quantized-blocks";
  c.default_layers = {"7b.attn_q", "7b.ffn_down"};
  const auto add = [&](const char* id, const char* title, WeightType type, DeviceMatmul launcher,
                       double (*roundings)(long long)) {
    Rung r;
    r.id = id;
    r.chapter = c.name;
    r.title = title;
    r.source = "kernels/gemv/quant_f32_formats.cuh";
    r.weight_type = type;
    r.supported = [type](Shape s, const DeviceInfo&) { return quant_f32_supported(type, s); };
    r.device = std::move(launcher);
    // The CPU twin's bound is the plain one of a serial sum, with the decoding of a weight and of its
    // reference.
    r.roundings = [roundings](Shape s, Executor e) {
      return e == Executor::cpu ? static_cast<double>(s.id) + 8 : roundings(s.id);
    };
#if !defined(__CUDACC__)
    r.cpu = [type](const void* weights, const float* acts, float* out, Shape s, cpu::ThreadPool& pool) {
      cpu::quant_f32_matmul(type, weights, acts, out, s, pool);
    };
#endif
    c.rungs.push_back(std::move(r));
  };
  using namespace quant_f32;
  const auto f16_roundings = [](long long id) {
    return id % 8 == 0 ? quant_f32_roundings<F16Vec>(id) : quant_f32_roundings<F16Scalar>(id);
  };
  add("f16_f32_matmul", "16 bits: half of f32", WeightType::f16, launch_f16_f32_matmul, f16_roundings);
  add("bf16_f32_matmul", "16 bits: the upper half of f32", WeightType::bf16, launch_bf16_f32_matmul,
      f16_roundings);
  add("q8_0_f32_matmul", "8 bits and a scale for 32", WeightType::q8_0, launch_q8_0_f32_matmul,
      quant_f32_roundings<Q8_0>);
  add("q5_1_f32_matmul", "5 bits, a scale and a minimum for 32", WeightType::q5_1, launch_q5_1_f32_matmul,
      quant_f32_roundings<Q5_1>);
  add("q5_0_f32_matmul", "5 bits and a scale for 32", WeightType::q5_0, launch_q5_0_f32_matmul,
      quant_f32_roundings<Q5_0>);
  add("q4_1_f32_matmul", "4 bits, a scale and a minimum for 32", WeightType::q4_1, launch_q4_1_f32_matmul,
      quant_f32_roundings<Q4_1>);
  add("q4_0_f32_matmul", "4 bits and a scale for 32, masked in place", WeightType::q4_0,
      launch_q4_0_f32_matmul, quant_f32_roundings<Q4_0>);
  add("iq4_nl_f32_matmul", "4 bits into a table of levels", WeightType::iq4_nl, launch_iq4_nl_f32_matmul,
      quant_f32_roundings<IQ4_NL>);
  add("q6_k_f32_matmul", "6 bits, 8-bit scales for 16, in blocks of 256", WeightType::q6_k,
      launch_q6_k_f32_matmul, quant_f32_roundings<Q6_K>);
  add("q5_k_f32_matmul", "5 bits, 6-bit scales and minima for 32, in blocks of 256", WeightType::q5_k,
      launch_q5_k_f32_matmul, quant_f32_roundings<Q5_K>);
  add("q4_k_f32_matmul", "4 bits, 6-bit scales and minima for 32, in blocks of 256", WeightType::q4_k,
      launch_q4_k_f32_matmul, quant_f32_roundings<Q4_K>);
  add("iq4_xs_f32_matmul", "4 bits into a table, 6-bit scales for 32", WeightType::iq4_xs,
      launch_iq4_xs_f32_matmul, quant_f32_roundings<IQ4_XS>);
  add("q3_k_f32_matmul", "3 bits, 6-bit scales for 16", WeightType::q3_k, launch_q3_k_f32_matmul,
      quant_f32_roundings<Q3_K>);
  add("q2_k_f32_matmul", "2 bits, 4-bit scales and minima for 16", WeightType::q2_k, launch_q2_k_f32_matmul,
      quant_f32_roundings<Q2_K>);
  return c;
}

}  // namespace ladder

#ifndef LADDER_NO_MAIN
int main(int argc, char** argv) {
  return ladder::chapter03::main_of_chapter(ladder::chapter_03(), argc, argv);
}
#endif
