// RUNG      acts_f16: f32 rows to f16, for matrix products with f16 operands.   PREV rms_norm, which leaves rounding to others
// COMPUTES  out[t][i] = f16(x / row_scale[t]), x = acts[t][i], or acts[t][i] / sqrt(mean(acts[t]^2) + epsilon) * norm[i];
//           row_scale[t] the power of two that brings the row's largest magnitude to 2^14 or less: 1 where it is already
// LAYOUT    acts [nt][id] f32; out [nt][id] f16, row-major or, in every 16, in the order of weights in tiles
// MAP       grid(nt) block(256): block -> a row, thread -> every 256th four of it
// NEEDS     id % 4 == 0 (% 16 in the order of tiles), operands at multiples of 16 bytes: checked by the launcher
// TRAFFIC   4*nt*id B read (what a row has beyond 5,120 numbers again for each of norm and row_scale, from L2), 2*nt*id B
//           written   WORK about 5*nt*id FLOP
// LOOK FOR  SASS: LDG.E.128, F2FP.F16.F32.PACK_AB
// EXPECT    a small part of the product that follows; nothing overflows, and infinities and NaNs stay what they are
// BUILD     part of chapters/05-tiled-gemm
#pragma once

#include <cstdint>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/device/reduce.cuh"

namespace ladder {

/// Order of f16 activations.
enum class HalfOrder {
  plain,  ///< that of the row
  tiles,  ///< of every 16, number 2t + j is k = 4t + j and number 8 + 2t + j is k = 4t + 2 + j (gemm_tiles_formats.cuh)
};

namespace acts_f16_detail {

inline constexpr int kThreads = 256;
inline constexpr int kKept = 5;  ///< fours that a thread keeps: rows of 5,120

/// The same result in all threads of the block: `f` of all their values, in one order.
/// @param partial [kThreads / 32] shared
template <class F>
__device__ __forceinline__ float over_block(float v, float* partial, F&& f) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v = f(v, __shfl_xor_sync(kAllLanes, v, offset));
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();  // partial results are written before any is read
  float all = partial[0];
  for (int w = 1; w < kThreads / 32; ++w) all = f(all, partial[w]);
  __syncthreads();  // and read before the next ones are written
  return all;
}

}  // namespace acts_f16_detail

// ANCHOR: acts_f16
__global__ void __launch_bounds__(acts_f16_detail::kThreads)
    acts_f16(const float* acts,  // [nt][id]; written by the kernel before this one, so not __restrict__
             const float* __restrict__ norm,  // [id] or null
             float epsilon,
             __half* __restrict__ out,       // [nt][id]
             float* __restrict__ row_scale,  // [nt] or null
             int id, bool tiles) {
  using namespace acts_f16_detail;
  __shared__ float partial[kThreads / 32];
  allow_next_kernel();
  wait_for_previous_kernel();
  const long long t = blockIdx.x;
  const int me = static_cast<int>(threadIdx.x), fours = id / 4;
  const float4* row = reinterpret_cast<const float4*>(acts + t * id);  // [fours]
  // 1. The row's first fours stay in registers: their loads are all under way at once, and of rows that are longer only
  //    the rest is read again when the sum and the maximum are known.
  float4 kept[kKept];
  const auto each = [&](auto&& f, auto&& of_rest) {
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      if (const int i = me + j * kThreads; i < fours) f(i, kept[j]);
    }
    for (int i = me + kKept * kThreads; i < fours; i += kThreads) {
      float4 v = of_rest(i);
      f(i, v);
    }
  };
  const auto read = [&](int i) { return row[i]; };
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    if (const int i = me + j * kThreads; i < fours) kept[j] = row[i];
  }

  // 2. Normalised.
  float scale = 1.0f;
  const auto normalise = [&](int i, float4& v) {
    const float4 n = reinterpret_cast<const float4*>(norm)[i];
    v = make_float4(v.x * scale * n.x, v.y * scale * n.y, v.z * scale * n.z, v.w * scale * n.w);
  };
  const auto number = [&](int i) {
    float4 v = row[i];
    if (norm != nullptr) normalise(i, v);
    return v;
  };
  if (norm != nullptr) {
    float sum = 0.0f;
    each([&](int, const float4& v) { sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }, read);
    sum = over_block(sum, partial, [](float a, float b) { return a + b; });
    scale = 1.0f / sqrtf(sum / static_cast<float>(id) + epsilon);
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      if (const int i = me + j * kThreads; i < fours) normalise(i, kept[j]);
    }
  }

  // 3. Divided by a power of two.
  float down = 1.0f;  // 1 / row_scale
  if (row_scale != nullptr) {
    float most = 0.0f;
    each(
        [&](int, const float4& v) {
          most = fmaxf(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))), most);
        },
        number);
    most = over_block(most, partial, [](float a, float b) { return fmaxf(a, b); });
    // 2^(e - 14) for a largest magnitude in [2^e, 2^(e + 1)): from the exponent's bits. An infinite row stays as it is.
    const unsigned exponent = __float_as_uint(most) >> 23;  // e + 127
    float up = 1.0f;
    if (exponent >= 127 + 14 && exponent < 255) {
      up = __uint_as_float((exponent - 13) << 23);
      down = __uint_as_float((2 * 127 - (exponent - 13)) << 23);
    }
    if (me == 0) row_scale[t] = up;
  }

  // 4. Rounded.
  each(
      [&](int i, const float4& v) {
        const __half2 low = __floats2half2_rn(v.x * down, v.y * down),
                      high = __floats2half2_rn(v.z * down, v.w * down);
        __half2* const to = reinterpret_cast<__half2*>(out + t * id);
        if (tiles) {
          to[i / 4 * 8 + i % 4] = low;
          to[i / 4 * 8 + i % 4 + 4] = high;
        } else {
          to[2 * i] = low;
          to[2 * i + 1] = high;
        }
      },
      number);
}
// ANCHOR_END: acts_f16

/// Rows to f16, in device memory. With `norm` [id] they are normalised first: x / sqrt(mean(x^2) + epsilon) * norm. With
/// `row_scale` [nt] every row is divided by a power of two, stored there, so that no finite number overflows; without it
/// numbers beyond the largest f16 become infinite. Does not synchronise.
inline Status launch_acts_f16(const float* acts, const float* norm, float epsilon, __half* out,
                              float* row_scale, long long nt, long long id, HalfOrder order, Stream& stream,
                              bool programmatic = false) {
  const long long unit = order == HalfOrder::tiles ? 16 : 4;
  if (nt < 1 || id < 1 || id % unit != 0) {
    return Status::error("acts_f16: nt must be at least 1 and id a positive multiple of " +
                         std::to_string(unit) + ", not " + std::to_string(nt) + " and " + std::to_string(id));
  }
  if ((reinterpret_cast<std::uintptr_t>(acts) | reinterpret_cast<std::uintptr_t>(norm) |
       reinterpret_cast<std::uintptr_t>(out)) %
          16 !=
      0) {
    return Status::error("acts_f16: activations, weights and output must begin at a multiple of 16 bytes");
  }
  LaunchOptions options;
  options.programmatic = programmatic;
  return launch(options, acts_f16, dim3(static_cast<unsigned>(nt)), dim3(acts_f16_detail::kThreads), 0,
                stream, acts, norm, epsilon, out, row_scale, static_cast<int>(id), order == HalfOrder::tiles);
}

}  // namespace ladder
