// Chapter 01: the scalar GEMV. Three kernels with the same dot product; only the place of the token loop differs.
//
//   gemv_scalar_grid2d   tokens on grid.y: the weight matrix is read once for each token      (this file)
//   gemv_scalar          one flat grid over all (token, output) pairs; reads as much          (kernels/gemv)
//   gemv_scalar_inner    tokens innermost: a weight is loaded once for up to eight tokens      (this file)
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/01-scalar-gemv/scalar_gemv.cu -o scalar_gemv
#include "harness/experiment/main.hpp"
#include "kernels/gemv/gemv_scalar.cuh"
#if !defined(__CUDACC__)
#include "kernels/cpu/gemv.hpp"
#endif

namespace ladder {

// RUNG      gemv_scalar_grid2d: the token axis on the grid.  PREV gemv_scalar: the same thread, launched flat.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T   LAYOUT weights row-major f32
// MAP       grid(ceil(od/256), nt) block(256): thread.x -> output, block.y -> token
// NEEDS     any od >= 1, id >= 1, 1 <= nt <= 65535 (limit of grid.y)
// TRAFFIC   weights 4*od*id B for *each* token, acts 4*nt*id B, out 4*nt*od B     WORK 2*nt*od*id FLOP
// LOOK FOR  a loop like gemv_scalar's: two LDG.E and one FFMA a step
// EXPECT    the same time as gemv_scalar to a few per cent, at any nt: both ask for every weight once per token
// BUILD     as above
// ANCHOR: gemv_scalar_grid2d
__global__ void __launch_bounds__(256) gemv_scalar_grid2d(const float* __restrict__ weights,  // [od][id]
                                                          const float* __restrict__ acts,     // [nt][id]
                                                          float* __restrict__ out,            // [nt][od]
                                                          int od, int id) {
  const int r = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);  // output, 0..od-1
  const int t = static_cast<int>(blockIdx.y);                             // token,  0..nt-1
  if (r >= od) return;
  const float* w = weights + static_cast<long long>(r) * id;  // [id]
  const float* x = acts + static_cast<long long>(t) * id;     // [id]
  float acc = 0.0f;
  for (int i = 0; i < id; ++i) acc += w[i] * x[i];
  out[static_cast<long long>(t) * od + r] = acc;
}
// ANCHOR_END: gemv_scalar_grid2d

// RUNG      gemv_scalar_inner: the token loop innermost.     PREV gemv_scalar: one thread per (token, output).
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T   LAYOUT weights row-major f32
// MAP       grid(ceil(od/256)) block(256): thread -> output, which it computes for all tokens, eight at a time
// NEEDS     any nt >= 1, od >= 1, id >= 1
// TRAFFIC   weights 4*od*id B for every eight tokens, acts 4*nt*id B, out 4*nt*od B     WORK 2*nt*od*id FLOP
// LOOK FOR  SASS: one LDG for a weight, then eight FFMA
// EXPECT    slower than gemv_scalar at nt = 1; nt = 8 asks for the weights once where the other two ask eight times,
//           but with an eighth of gemv_scalar's threads to ask with
// BUILD     as above
// ANCHOR: gemv_scalar_inner
__global__ void __launch_bounds__(256) gemv_scalar_inner(const float* __restrict__ weights,  // [od][id]
                                                         const float* __restrict__ acts,     // [nt][id]
                                                         float* __restrict__ out,            // [nt][od]
                                                         int nt, int od, int id) {
  constexpr int NT = 8;                                                   // tokens for one load of a weight
  const int r = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);  // output, 0..od-1
  if (r >= od) return;
  const float* w = weights + static_cast<long long>(r) * id;  // [id]
  for (int t0 = 0; t0 < nt; t0 += NT) {
    float acc[NT] = {};
    for (int i = 0; i < id; ++i) {
      const float wi = w[i];
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        // Uniform over the warp: a token past the end costs nothing and loads nothing.
        if (t0 + j < nt) acc[j] += wi * acts[static_cast<long long>(t0 + j) * id + i];
      }
    }
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      if (t0 + j < nt) out[static_cast<long long>(t0 + j) * od + r] = acc[j];
    }
  }
}
// ANCHOR_END: gemv_scalar_inner

/// As launch_gemv_scalar; nt at most 65535.
inline Status launch_gemv_scalar_grid2d(const float* weights, const float* acts, float* out, Shape s,
                                        Stream& stream) {
  const dim3 grid(static_cast<unsigned>((s.od + 255) / 256), static_cast<unsigned>(s.nt));
  return launch(gemv_scalar_grid2d, grid, dim3(256), 0, stream, weights, acts, out, static_cast<int>(s.od),
                static_cast<int>(s.id));
}

/// As launch_gemv_scalar.
inline Status launch_gemv_scalar_inner(const float* weights, const float* acts, float* out, Shape s,
                                       Stream& stream) {
  const dim3 grid(static_cast<unsigned>((s.od + 255) / 256));
  return launch(gemv_scalar_inner, grid, dim3(256), 0, stream, weights, acts, out, static_cast<int>(s.nt),
                static_cast<int>(s.od), static_cast<int>(s.id));
}

/// The rungs of this chapter, in the order of the text.
inline Chapter chapter_01() {
  Chapter c;
  c.name = "01-scalar-gemv";
  c.default_layers = {"0.5b.attn_q", "0.5b.attn_k", "0.5b.ffn_gate", "0.5b.ffn_down"};
  // The product is rounded once, and a term can meet every later addition of its row; one more for the bound.
  const auto roundings = [](Shape s, Executor) { return static_cast<double>(s.id + 2); };

  Rung grid2d;
  grid2d.id = "gemv_scalar_grid2d";
  grid2d.chapter = c.name;
  grid2d.title = "one thread per output, one grid layer per token";
  grid2d.source = "chapters/01-scalar-gemv/scalar_gemv.cu";
  grid2d.supported = [](Shape s, const DeviceInfo& d) {
    if (s.nt > 65535) return Status::error("nt must be at most 65535 (grid.y), not " + std::to_string(s.nt));
    return any_shape(s, d);
  };
  grid2d.device = launch_gemv_scalar_grid2d;
  grid2d.roundings = roundings;

  Rung scalar;
  scalar.id = "gemv_scalar";
  scalar.chapter = c.name;
  scalar.title = "one thread per output";
  scalar.source = "kernels/gemv/gemv_scalar.cuh";
  scalar.supported = any_shape;
  scalar.device = launch_gemv_scalar;
  scalar.roundings = roundings;
#if !defined(__CUDACC__)
  scalar.cpu = cpu::gemv_scalar;
#endif

  Rung inner;
  inner.id = "gemv_scalar_inner";
  inner.chapter = c.name;
  inner.title = "one thread per output, tokens innermost";
  inner.source = "chapters/01-scalar-gemv/scalar_gemv.cu";
  inner.supported = any_shape;
  inner.device = launch_gemv_scalar_inner;
  inner.roundings = roundings;

  c.rungs = {grid2d, scalar, inner};
  return c;
}

}  // namespace ladder

#ifndef LADDER_NO_MAIN
int main(int argc, char** argv) { return ladder::chapter_main(ladder::chapter_01(), argc, argv); }
#endif
