// Products of packed tiles and f16 activations for the engine (matmul_kernels.hpp).
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... -c chapters/09-qwen/matmul_tiles.cu
#define LADDER_STATIC_KERNELS
#include "chapters/09-qwen/matmul_kernels.hpp"
#include "kernels/gemm/gemm_tiles_mma.cuh"
#include "kernels/gemm/gemm_tiles_wgmma.cuh"

namespace ladder::qwen {

Status multiply_tiles(bool wgmma, WeightType type, std::span<const GemmTilesPart> matrices,
                      const __half* acts, long long nt, long long id, float* partial, unsigned* flags,
                      Stream& stream, bool programmatic) {
  if (!wgmma) return launch_gemm_tiles_mma(type, matrices, acts, nt, id, stream, programmatic);
  const GemmTilesPlan plan =
      gemm_tiles_plan(type, {nt, gemm_tiles_rows(matrices), id}, multiprocessor_count());
  return launch_gemm_tiles_wgmma(type, matrices, acts, nt, id, plan, {partial, flags}, stream, programmatic);
}

Status multiply_tiles_swiglu(WeightType type, const GemmTilesGate& gate, const __half* acts, Shape s,
                             float* partial, unsigned* flags, Stream& stream, bool programmatic) {
  const GemmTilesPlan plan = gemm_tiles_gate_plan(type, s, multiprocessor_count());
  return launch_gemm_tiles_wgmma_swiglu(type, gate, acts, s, plan, {partial, flags}, stream, programmatic);
}

std::size_t tiles_workspace_bytes(int sms) { return gemm_tiles_most_partial_bytes(sms); }

}  // namespace ladder::qwen
