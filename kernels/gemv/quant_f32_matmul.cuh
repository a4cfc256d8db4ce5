// RUNG      quant_f32_matmul: packed weights, decoded in registers.
// PREV      gemv_vec: reads 4 bytes where fewer would do.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T
// LAYOUT    weights row-major blocks of the type, acts and out row-major f32
// MAP       grid(ceil(od/8)) block(64): warp -> 4 rows, lane -> every 32nd unit (1 to 32 weights) of them
// NEEDS     id a multiple of the type's block (checked by the launcher, and said in its error), weights and
//           acts 16-byte aligned, any od >= 1, any nt >= 1
// TRAFFIC   weights od*id/block_elems*block_bytes B, acts 4*nt*id B, out 4*nt*od B     WORK 2*nt*od*id FLOP
// LOOK FOR  SASS: LDG.E.U16 for 18, 22, 34, 110 and 210 byte blocks, LDG.E.128 for Q4_K and Q5_K; PRMT and
//           FADD where a code becomes a float, I2FP for codes only in Q4_0
// EXPECT    time follows the bytes as long as they are many per weight; with 2 and 3 bits the instructions
//           per weight limit it. Loses to wider grids where od is small: 896 rows are 112 blocks of 2 warps
// BUILD     nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/03-quantized-blocks/quantized_blocks.cu -o quantized_blocks
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "harness/device/device.hpp"
#include "harness/experiment/weight_types.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/gemv/gemv_scalar.cuh"
#include "kernels/gemv/gemv_vec.cuh"
#include "kernels/gemv/quant_f32_formats.cuh"

namespace ladder {

inline constexpr int kQuantF32Rows = 4;   ///< rows of a warp: they share every load of activations
inline constexpr int kQuantF32Warps = 2;  ///< warps of a block

// ANCHOR: quant_f32_matmul
/// One skeleton for all types; what a unit is and how it is multiplied is Format's (quant_f32_formats.cuh).
template <class Format>
__global__ void __launch_bounds__(kQuantF32Warps * 32, 8)
    quant_f32_matmul(const unsigned char* __restrict__ weights,  // [od][row_bytes]
                     const float* __restrict__ acts,             // [nt][id]
                     float* __restrict__ out,                    // [nt][od]
                     int nt, int od, int id, long long row_bytes) {
  constexpr int ROWS = kQuantF32Rows, U = Format::kInFlight;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int r0 = static_cast<int>(blockIdx.x * kQuantF32Warps + warp) * ROWS;  // first of four rows
  if (r0 >= od) return;
  const int units = id / Format::kUnit;

  // 1. Four rows. One past the end reads the last row instead and is never stored: no branch inside the loop.
  const unsigned char* w[ROWS];  // ROWS x [row_bytes]
#pragma unroll
  for (int k = 0; k < ROWS; ++k) w[k] = weights + min(r0 + k, od - 1) * row_bytes;

  // 2. The token loop is inside the block: after the first token the rows come from L1 or L2. Every token
  //    runs the very same additions, so its result does not depend on its company.
  for (int t = 0; t < nt; ++t) {
    const float* x = acts + static_cast<long long>(t) * id;  // [id]
    float acc[ROWS] = {};
    for (int u0 = lane; u0 < units; u0 += 32 * U) {
      // 3. All loads first: U*ROWS units are under way together.
      typename Format::Raw raw[U][ROWS];
#pragma unroll
      for (int j = 0; j < U; ++j) {
        const int u = min(u0 + 32 * j, units - 1);  // a unit past the end is loaded again, and left out below
#pragma unroll
        for (int k = 0; k < ROWS; ++k) raw[j][k] = Format::load(w[k], u);
      }
      // 4. Then the arithmetic. The activations of a unit serve ROWS rows.
#pragma unroll
      for (int j = 0; j < U; ++j) {
        const int u = u0 + 32 * j;
        if (u >= units) break;
        const typename Format::Acts a = Format::acts(x, u);
#pragma unroll
        for (int k = 0; k < ROWS; ++k) acc[k] += Format::dot(raw[j][k], a, u);
      }
    }

    // 5. One butterfly per row; lane 0 stores.
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
      const float total = warp_reduce_sum(acc[k]);
      if (lane == 0 && r0 + k < od) out[static_cast<long long>(t) * od + r0 + k] = total;
    }
  }
}
// ANCHOR_END: quant_f32_matmul

/// Shapes of the f32-activation kernels: rows of whole blocks of `type`.
inline Status quant_f32_supported(WeightType type, Shape s) {
  if (s.nt < 1 || s.od < 1 || s.id < 1) return Status::error("nt, od and id must all be at least 1");
  const WeightTypeInfo& t = info(type);
  if (s.id % t.block_elems == 0) return {};
  return Status::error("id must be a multiple of " + std::to_string(t.block_elems) + ", the block of " +
                       t.name + ", not " + std::to_string(s.id));
}

/// Upper bound on the f32 roundings that a term meets in quant_f32_matmul: inside its unit (product,
/// additions, scales), along its lane, in the butterfly, and two of the decoded weight it is compared with.
template <class Format>
double quant_f32_roundings(long long id) {
  const double units = static_cast<double>(id) / Format::kUnit;
  return Format::kUnit + 8 + (units / 32 + 1) + 5 + 2;
}

/// out[nt][od] = acts[nt][id] . weights[od][id]^T. Weights packed as Format::kType, acts and out f32, all in
/// device memory, weights and acts 16-byte aligned. Does not synchronise.
template <class Format>
Status launch_quant_f32_matmul(const void* weights, const float* acts, float* out, Shape s, Stream& stream) {
  if (Status ok = quant_f32_supported(Format::kType, s); !ok.ok()) return ok;
  if (Format::kUnit > 1 &&
      (reinterpret_cast<std::uintptr_t>(weights) | reinterpret_cast<std::uintptr_t>(acts)) % 16 != 0) {
    return Status::error("weights and activations must begin at a multiple of 16 bytes");
  }
  constexpr long long rows = kQuantF32Warps * kQuantF32Rows;
  const dim3 grid(static_cast<unsigned>((s.od + rows - 1) / rows));
  return launch(quant_f32_matmul<Format>, grid, dim3(kQuantF32Warps * 32), 0, stream,
                static_cast<const unsigned char*>(weights), acts, out, static_cast<int>(s.nt),
                static_cast<int>(s.od), static_cast<int>(s.id),
                static_cast<long long>(row_bytes(Format::kType, s.id)));
}

/// f16 weights: 16-byte loads where every row begins at a multiple of 16 bytes (id % 8 == 0), 2-byte loads
/// elsewhere.
inline Status launch_f16_f32_matmul(const void* weights, const float* acts, float* out, Shape s,
                                    Stream& stream) {
  return s.id % 8 == 0 ? launch_quant_f32_matmul<quant_f32::F16Vec>(weights, acts, out, s, stream)
                       : launch_quant_f32_matmul<quant_f32::F16Scalar>(weights, acts, out, s, stream);
}
/// bf16 weights, as launch_f16_f32_matmul.
inline Status launch_bf16_f32_matmul(const void* weights, const float* acts, float* out, Shape s,
                                     Stream& stream) {
  return s.id % 8 == 0 ? launch_quant_f32_matmul<quant_f32::BF16Vec>(weights, acts, out, s, stream)
                       : launch_quant_f32_matmul<quant_f32::BF16Scalar>(weights, acts, out, s, stream);
}
inline Status launch_q4_0_f32_matmul(const void* weights, const float* acts, float* out, Shape s,
                                     Stream& stream) {
  return launch_quant_f32_matmul<quant_f32::Q4_0>(weights, acts, out, s, stream);
}
inline Status launch_q4_1_f32_matmul(const void* weights, const float* acts, float* out, Shape s,
                                     Stream& stream) {
  return launch_quant_f32_matmul<quant_f32::Q4_1>(weights, acts, out, s, stream);
}
inline Status launch_q5_0_f32_matmul(const void* weights, const float* acts, float* out, Shape s,
                                     Stream& stream) {
  return launch_quant_f32_matmul<quant_f32::Q5_0>(weights, acts, out, s, stream);
}
inline Status launch_q5_1_f32_matmul(const void* weights, const float* acts, float* out, Shape s,
                                     Stream& stream) {
  return launch_quant_f32_matmul<quant_f32::Q5_1>(weights, acts, out, s, stream);
}
inline Status launch_q8_0_f32_matmul(const void* weights, const float* acts, float* out, Shape s,
                                     Stream& stream) {
  return launch_quant_f32_matmul<quant_f32::Q8_0>(weights, acts, out, s, stream);
}
inline Status launch_q2_k_f32_matmul(const void* weights, const float* acts, float* out, Shape s,
                                     Stream& stream) {
  return launch_quant_f32_matmul<quant_f32::Q2_K>(weights, acts, out, s, stream);
}
inline Status launch_q3_k_f32_matmul(const void* weights, const float* acts, float* out, Shape s,
                                     Stream& stream) {
  return launch_quant_f32_matmul<quant_f32::Q3_K>(weights, acts, out, s, stream);
}
inline Status launch_q4_k_f32_matmul(const void* weights, const float* acts, float* out, Shape s,
                                     Stream& stream) {
  return launch_quant_f32_matmul<quant_f32::Q4_K>(weights, acts, out, s, stream);
}
inline Status launch_q5_k_f32_matmul(const void* weights, const float* acts, float* out, Shape s,
                                     Stream& stream) {
  return launch_quant_f32_matmul<quant_f32::Q5_K>(weights, acts, out, s, stream);
}
inline Status launch_q6_k_f32_matmul(const void* weights, const float* acts, float* out, Shape s,
                                     Stream& stream) {
  return launch_quant_f32_matmul<quant_f32::Q6_K>(weights, acts, out, s, stream);
}
inline Status launch_iq4_nl_f32_matmul(const void* weights, const float* acts, float* out, Shape s,
                                       Stream& stream) {
  return launch_quant_f32_matmul<quant_f32::IQ4_NL>(weights, acts, out, s, stream);
}
inline Status launch_iq4_xs_f32_matmul(const void* weights, const float* acts, float* out, Shape s,
                                       Stream& stream) {
  return launch_quant_f32_matmul<quant_f32::IQ4_XS>(weights, acts, out, s, stream);
}

/// out[nt][od] = acts[nt][id] . weights[od][id]^T for weights of any type. f32 weights go to gemv_vec, or to
/// gemv_scalar where id is no multiple of 4. Errors as the launchers'.
inline Status launch_f32_matmul(WeightType type, const void* weights, const float* acts, float* out, Shape s,
                                Stream& stream) {
  switch (type) {
    case WeightType::f32: {
      const float* w = static_cast<const float*>(weights);
      return s.id % 4 == 0 ? launch_gemv_vec(w, acts, out, s, stream)
                           : launch_gemv_scalar(w, acts, out, s, stream);
    }
    case WeightType::f16:
      return launch_f16_f32_matmul(weights, acts, out, s, stream);
    case WeightType::bf16:
      return launch_bf16_f32_matmul(weights, acts, out, s, stream);
    case WeightType::q4_0:
      return launch_q4_0_f32_matmul(weights, acts, out, s, stream);
    case WeightType::q4_1:
      return launch_q4_1_f32_matmul(weights, acts, out, s, stream);
    case WeightType::q5_0:
      return launch_q5_0_f32_matmul(weights, acts, out, s, stream);
    case WeightType::q5_1:
      return launch_q5_1_f32_matmul(weights, acts, out, s, stream);
    case WeightType::q8_0:
      return launch_q8_0_f32_matmul(weights, acts, out, s, stream);
    case WeightType::q2_k:
      return launch_q2_k_f32_matmul(weights, acts, out, s, stream);
    case WeightType::q3_k:
      return launch_q3_k_f32_matmul(weights, acts, out, s, stream);
    case WeightType::q4_k:
      return launch_q4_k_f32_matmul(weights, acts, out, s, stream);
    case WeightType::q5_k:
      return launch_q5_k_f32_matmul(weights, acts, out, s, stream);
    case WeightType::q6_k:
      return launch_q6_k_f32_matmul(weights, acts, out, s, stream);
    case WeightType::iq4_nl:
      return launch_iq4_nl_f32_matmul(weights, acts, out, s, stream);
    case WeightType::iq4_xs:
      return launch_iq4_xs_f32_matmul(weights, acts, out, s, stream);
  }
  return Status::error("unknown weight type");
}

}  // namespace ladder
