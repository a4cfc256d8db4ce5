// Chapter 02: the vectorised GEMV, in three steps that change one thing each.
//
//   gemv_vec_chunk   16-byte loads; a lane walks a 256-element chunk of a row by itself      (this file)
//   gemv_vec_lane    16-byte loads; the 32 lanes of a warp read 512 neighbouring bytes       (this file)
//   gemv_vec         the same, with 64 KiB of loads under way on every SM                     (kernels/gemv)
//
// and a sweep of the one parameter that the last step leaves open: gemv_vec_w1, _w2, _w4, _w8 warps to a row.
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/02-vector-gemv/vector_gemv.cu -o vector_gemv
#include "harness/experiment/main.hpp"
#include "kernels/device/reduce.cuh"
#include "kernels/gemv/gemv_vec.cuh"
#if !defined(__CUDACC__)
#include "kernels/cpu/gemv.hpp"
#endif
#if defined(LADDER_WITH_CUBLAS)
#include "harness/compare/cublas_sgemv.hpp"
#endif

namespace ladder {

inline constexpr int kRowsPerWarp = 4;
inline constexpr int kWarpsPerBlock = 2;
inline constexpr int kChunk = 256;  ///< elements of a row that one lane walks alone

// RUNG      gemv_vec_chunk: float4 loads, a chunk per lane.  PREV gemv_scalar: 4-byte loads, a row per thread.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T   LAYOUT weights row-major f32
// MAP       grid(ceil(od/8)) block(64): warp -> 4 rows, lane -> every 32nd (chunk, row) pair of them
// NEEDS     id % 8 == 0 (checked by the launcher, and said in its error), any od >= 1, any nt >= 1
// TRAFFIC   weights 4*od*id B, acts 4*nt*id B, out 4*nt*od B     WORK 2*nt*od*id FLOP
// LOOK FOR  SASS: LDG.E.128
// EXPECT    a 16-byte request that touches 32 sectors: neighbouring lanes are 1 KiB apart
// BUILD     as above
// ANCHOR: gemv_vec_chunk
__global__ void __launch_bounds__(kWarpsPerBlock * 32)
    gemv_vec_chunk(const float* __restrict__ weights,  // [od][id]
                   const float* __restrict__ acts,     // [nt][id]
                   float* __restrict__ out,            // [nt][od]
                   int nt, int od, int id) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int r0 = static_cast<int>(blockIdx.x * kWarpsPerBlock + warp) * kRowsPerWarp;  // first of four rows
  if (r0 >= od) return;
  const int chunks = (id + kChunk - 1) / kChunk;

  // 1. The token loop is inside the block: the weights of these rows come from L1 or L2 after the first
  // token.
  for (int t = 0; t < nt; ++t) {
    const float* x = acts + static_cast<long long>(t) * id;  // [id]
    float acc[kRowsPerWarp] = {};

    // 2. Units of work are (row, chunk) pairs, dealt to the lanes like cards.
    for (int u = lane; u < chunks * kRowsPerWarp; u += 32) {
      const int chunk = u % chunks;
      const int k = u / chunks;  // row within the warp, 0..3
      if (r0 + k >= od) continue;
      const float* w = weights + static_cast<long long>(r0 + k) * id + chunk * kChunk;
      const float* xc = x + chunk * kChunk;
      const int length = min(kChunk, id - chunk * kChunk);

      // 3. Eight elements a step, two 16-byte loads from each side.
      float sum = 0.0f;
      for (int i = 0; i < length; i += 8) {
        const float4 w0 = *reinterpret_cast<const float4*>(w + i);
        const float4 w1 = *reinterpret_cast<const float4*>(w + i + 4);
        const float4 x0 = *reinterpret_cast<const float4*>(xc + i);
        const float4 x1 = *reinterpret_cast<const float4*>(xc + i + 4);
        sum += w0.x * x0.x + w0.y * x0.y + w0.z * x0.z + w0.w * x0.w + w1.x * x1.x + w1.y * x1.y +
               w1.z * x1.z + w1.w * x1.w;
      }
      // The row index is not a compile-time constant; selecting by comparison keeps acc in registers.
#pragma unroll
      for (int q = 0; q < kRowsPerWarp; ++q) acc[q] += q == k ? sum : 0.0f;
    }

    // 4. One butterfly per row; lane 0 stores.
#pragma unroll
    for (int k = 0; k < kRowsPerWarp; ++k) {
      const float total = warp_reduce_sum(acc[k]);
      if (lane == 0 && r0 + k < od) out[static_cast<long long>(t) * od + r0 + k] = total;
    }
  }
}
// ANCHOR_END: gemv_vec_chunk

// RUNG      gemv_vec_lane: neighbouring lanes read neighbours.  PREV gemv_vec_chunk: 32 sectors per request.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T   LAYOUT weights row-major f32
// MAP       grid(ceil(od/8)) block(64): warp -> 4 rows in turn; lane -> every 32nd float4 of a row
// NEEDS     id % 4 == 0 (checked by the launcher, and said in its error), any od >= 1, any nt >= 1
// TRAFFIC   weights 4*od*id B, acts 4*nt*id B, out 4*nt*od B     WORK 2*nt*od*id FLOP
// LOOK FOR  SASS: LDG.E.128
// EXPECT    16 sectors per weight request, the least that 512 bytes can touch
// BUILD     as above
// ANCHOR: gemv_vec_lane
__global__ void __launch_bounds__(kWarpsPerBlock * 32)
    gemv_vec_lane(const float* __restrict__ weights,  // [od][id]
                  const float* __restrict__ acts,     // [nt][id]
                  float* __restrict__ out,            // [nt][od]
                  int nt, int od, int id) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int r0 = static_cast<int>(blockIdx.x * kWarpsPerBlock + warp) * kRowsPerWarp;
  const int n4 = id / 4;  // float4s in a row
  for (int t = 0; t < nt; ++t) {
    const float4* x = reinterpret_cast<const float4*>(acts + static_cast<long long>(t) * id);  // [id/4]
#pragma unroll 1
    for (int k = 0; k < kRowsPerWarp && r0 + k < od; ++k) {
      const float4* w =
          reinterpret_cast<const float4*>(weights + static_cast<long long>(r0 + k) * id);  // [id/4]
      float acc = 0.0f;
      for (int i = lane; i < n4; i += 32) {
        const float4 a = w[i];
        const float4 b = x[i];
        acc += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
      }
      const float total = warp_reduce_sum(acc);
      if (lane == 0) out[static_cast<long long>(t) * od + r0 + k] = total;
    }
  }
}
// ANCHOR_END: gemv_vec_lane

/// Shapes of gemv_vec_chunk: a lane takes eight elements a step and never a part of eight.
inline Status gemv_vec_chunk_supported(Shape s, const DeviceInfo& d) {
  if (Status ok = any_shape(s, d); !ok.ok()) return ok;
  if (s.id % 8 != 0) return Status::error("id must be a multiple of 8, not " + std::to_string(s.id));
  return {};
}

/// As launch_gemv_vec; id % 8 == 0.
inline Status launch_gemv_vec_chunk(const float* weights, const float* acts, float* out, Shape s,
                                    Stream& stream) {
  if (Status ok = gemv_vec_chunk_supported(s, {}); !ok.ok()) return ok;
  const dim3 grid(
      static_cast<unsigned>((s.od + kWarpsPerBlock * kRowsPerWarp - 1) / (kWarpsPerBlock * kRowsPerWarp)));
  return launch(gemv_vec_chunk, grid, dim3(kWarpsPerBlock * 32), 0, stream, weights, acts, out,
                static_cast<int>(s.nt), static_cast<int>(s.od), static_cast<int>(s.id));
}

/// As launch_gemv_vec.
inline Status launch_gemv_vec_lane(const float* weights, const float* acts, float* out, Shape s,
                                   Stream& stream) {
  if (Status ok = gemv_vec_supported(s, {}); !ok.ok()) return ok;
  const dim3 grid(
      static_cast<unsigned>((s.od + kWarpsPerBlock * kRowsPerWarp - 1) / (kWarpsPerBlock * kRowsPerWarp)));
  return launch(gemv_vec_lane, grid, dim3(kWarpsPerBlock * 32), 0, stream, weights, acts, out,
                static_cast<int>(s.nt), static_cast<int>(s.od), static_cast<int>(s.id));
}

/// The rungs of this chapter, in the order of the text.
inline Chapter chapter_02() {
  Chapter c;
  c.name = "02-vector-gemv";
  c.default_layers = {"0.5b.attn_q", "0.5b.attn_k", "0.5b.ffn_gate", "0.5b.ffn_down"};
  const auto add = [&](const char* id, const char* title, const char* source) -> Rung& {
    Rung r;
    r.id = id;
    r.chapter = c.name;
    r.title = title;
    r.source = source;
    r.supported = gemv_vec_supported;
    c.rungs.push_back(r);
    return c.rungs.back();
  };
  const char* here = "chapters/02-vector-gemv/vector_gemv.cu";
  const char* final_rung = "kernels/gemv/gemv_vec.cuh";

  // A term is rounded as a product, by the additions of its own chunk, by the chunks that follow on its lane,
  // and by the butterfly. The same count without the chunk structure is smaller, so `id/32 + 16` covers both
  // mappings.
  Rung& chunk = add("gemv_vec_chunk", "16-byte loads, a chunk of the row per lane", here);
  chunk.supported = gemv_vec_chunk_supported;
  chunk.device = launch_gemv_vec_chunk;
  chunk.roundings = [](Shape s, Executor) {
    const double passes = static_cast<double>((s.id + kChunk - 1) / kChunk * kRowsPerWarp + 31) / 32;
    return kChunk + passes + 5 + 2;
  };

  Rung& lane = add("gemv_vec_lane", "16-byte loads, neighbouring lanes read neighbouring bytes", here);
  lane.device = launch_gemv_vec_lane;
  lane.roundings = [](Shape s, Executor) { return static_cast<double>(s.id) / 32 + 4 + 5 + 2; };

  // On the GPU: the terms of one lane, five butterfly steps, up to eight partial sums. The CPU twin's bound
  // is the plain one of a serial sum.
  const auto vec_roundings = [](Shape s, Executor e) {
    return e == Executor::cpu ? static_cast<double>(s.id + 2)
                              : static_cast<double>(s.id) / 32 + 4 + 5 + 8 + 2;
  };
  Rung& vec = add("gemv_vec", "64 KiB of 16-byte loads in flight on every SM", final_rung);
  vec.device = launch_gemv_vec;
  vec.roundings = vec_roundings;
#if !defined(__CUDACC__)
  vec.cpu = cpu::gemv_vec;
#endif
  const auto add_width = [&](const char* id, const char* title, DeviceMatmul launcher) {
    Rung& w = add(id, title, final_rung);
    w.device = std::move(launcher);
    w.roundings = vec_roundings;
  };
  add_width("gemv_vec_w1", "gemv_vec with 1 warp to a row", launch_gemv_vec_warps<1>);
  add_width("gemv_vec_w2", "gemv_vec with 2 warps to a row", launch_gemv_vec_warps<2>);
  add_width("gemv_vec_w4", "gemv_vec with 4 warps to a row", launch_gemv_vec_warps<4>);
  add_width("gemv_vec_w8", "gemv_vec with 8 warps to a row", launch_gemv_vec_warps<8>);

#if defined(LADDER_WITH_CUBLAS)
  Rung& peer = add("cublas_sgemv", "cuBLAS, for comparison only", "harness/compare/cublas_sgemv.hpp");
  peer.supported = any_shape;
  peer.device = launch_cublas_sgemv;
  peer.roundings = [](Shape s, Executor) { return static_cast<double>(s.id + 2); };
  peer.peer_name = "cuBLAS";
  peer.peer_version = cublas_version();
#endif
  return c;
}

}  // namespace ladder

#ifndef LADDER_NO_MAIN
int main(int argc, char** argv) { return ladder::chapter_main(ladder::chapter_02(), argc, argv); }
#endif
