// Products of f16 rows for the engine (matmul_kernels.hpp).
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... -c chapters/09-qwen/matmul_f16.cu
#define LADDER_STATIC_KERNELS
#include "chapters/09-qwen/matmul_kernels.hpp"
#include "kernels/gemm/gemm_f16_mma.cuh"
#include "kernels/gemm/gemm_f16_wgmma.cuh"

namespace ladder::qwen {

Status multiply_f16(bool wgmma, F16Tile tile, const __half* weights, const __half* acts, float* out, Shape s,
                    const GemmEpilogue& epilogue, float* workspace, Stream& stream, bool programmatic) {
  if (wgmma) return launch_gemm_f16_wgmma(acts, weights, out, epilogue, s, stream, programmatic);
  if (tile.outputs == 0) {
    return launch_gemm_f16_mma(weights, acts, out, s, epilogue, workspace, stream, programmatic);
  }
  const auto with = [&]<int TM, int KS>() {
    return launch_gemm_f16_mma_tile<MmaTile<64, TM, KS, 4, 32, TM / 2, 2>>(weights, acts, out, s, epilogue, 1,
                                                                           nullptr, stream, programmatic);
  };
  if (tile.outputs == 64) {
    return tile.step == 64 ? with.operator()<64, 64>() : with.operator()<64, 32>();
  }
  return tile.step == 64 ? with.operator()<128, 64>() : with.operator()<128, 32>();
}

std::size_t f16_workspace_bytes(bool wgmma, Shape s, int sms) {
  return wgmma ? 0 : gemm_f16_mma_workspace_bytes(s, sms);
}

}  // namespace ladder::qwen
