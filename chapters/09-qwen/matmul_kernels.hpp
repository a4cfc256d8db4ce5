// The kernels of many tokens, and those of the file's blocks, as plain functions: they are compiled apart from the engine
// (matmul_int8.cu, matmul_f16.cu, matmul_tiles.cu), which is most of what there is to compile. All take device memory,
// never allocate and never synchronise; shapes and errors are the launchers'.
#pragma once

#include <cstdint>
#include <span>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/gemm/epilogue.cuh"
#include "kernels/gemm/gemm_tiles_parts.cuh"
#include "kernels/quant/q8_acts.hpp"

namespace ladder::qwen {

// matmul_int8.cu ----------------------------------------------------------------------------------------------------

/// mmvq_multi: a file's blocks, nt 1..8. @param acts [nt][id/32]
Status multiply_blocks(WeightType type, const void* rows, const BlockQ8Pad40* acts, float* out, Shape s,
                       Stream& stream);
/// Int8 planes of mmq_tiles (kernels/quant/quantize_acts.hpp): codes, and scales behind them.
Status planes_for_mmq(const float* acts, unsigned char* planes, long long nt, long long id, Stream& stream);
std::size_t mmq_planes_bytes(long long nt, long long id);
/// mmq_tiles. @param planes planes_for_mmq's @param workspace workspace_of_mmq's bytes
Status multiply_mmq(WeightType type, const void* tiles, const unsigned char* planes, float* out, Shape s,
                    const GemmEpilogue& epilogue, float* workspace, Stream& stream, bool programmatic);
std::size_t workspace_of_mmq(WeightType type, Shape s, int sms);

// matmul_f16.cu -----------------------------------------------------------------------------------------------------

/// What LADDER_GEMM_TM and LADDER_GEMM_K64 ask of gemm_f16_mma: blocks of 64 tokens and `outputs`, steps of `step` along
/// k; or nothing.
struct F16Tile {
  int outputs = 0, step = 0;  // 64 or 128; 32 or 64; both 0: as the shape asks
};
/// gemm_f16_wgmma, or gemm_f16_mma. @param weights [od][id] @param acts [nt][id], both f16
Status multiply_f16(bool wgmma, F16Tile tile, const __half* weights, const __half* acts, float* out, Shape s,
                    const GemmEpilogue& epilogue, float* workspace, Stream& stream, bool programmatic);
std::size_t f16_workspace_bytes(bool wgmma, Shape s, int sms);

// matmul_tiles.cu ---------------------------------------------------------------------------------------------------

/// gemm_tiles_wgmma, or gemm_tiles_mma. @param acts [nt][id] f16 in the order of tiles
/// @param partial, flags of the first (GemmTilesWorkspace)
Status multiply_tiles(bool wgmma, WeightType type, std::span<const GemmTilesPart> matrices,
                      const __half* acts, long long nt, long long id, float* partial, unsigned* flags,
                      Stream& stream, bool programmatic);
/// gemm_tiles_wgmma with a gate.
Status multiply_tiles_swiglu(WeightType type, const GemmTilesGate& gate, const __half* acts, Shape s,
                             float* partial, unsigned* flags, Stream& stream, bool programmatic);
/// Of `partial`, whatever the shape; flags are one for each multiprocessor.
std::size_t tiles_workspace_bytes(int sms);

}  // namespace ladder::qwen
