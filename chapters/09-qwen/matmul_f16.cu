// Products of f16 rows for the engine (matmul_kernels.hpp).
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... -c chapters/09-qwen/matmul_f16.cu
#define LADDER_STATIC_KERNELS
#include "chapters/09-qwen/matmul_kernels.hpp"
#include "kernels/gemm/gemm_f16_mma.cuh"
#include "kernels/gemm/gemm_f16_wgmma.cuh"

namespace ladder::qwen {

Status multiply_f16(bool wgmma, const __half* weights, const __half* acts, float* out, Shape s,
                    const GemmEpilogue& epilogue, float* workspace, Stream& stream, bool programmatic) {
  return wgmma ? launch_gemm_f16_wgmma(acts, weights, out, epilogue, s, stream, programmatic)
               : launch_gemm_f16_mma(weights, acts, out, s, epilogue, workspace, stream, programmatic);
}

std::size_t f16_workspace_bytes(bool wgmma, Shape s, int sms) {
  return wgmma ? 0 : gemm_f16_mma_workspace_bytes(s, sms);
}

}  // namespace ladder::qwen
