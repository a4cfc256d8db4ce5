// RUNG      gemv_scalar (CPU twin): one core plays one thread after another.
// PREV      none: this is the first rung.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T   LAYOUT weights row-major f32
// MAP       index 0..nt*od-1 -> (token, row) as on the GPU; thread -> ranges of indices; one lane adds
// NEEDS     any nt, od, id >= 1
// TRAFFIC   weights 4*od*id B per token (nt streams of them), acts 4*nt*id B, out 4*nt*od B
// WORK      2*nt*od*id FLOP
// LOOK FOR  addss (x86-64) or fadd of s registers (aarch64): a chain in which each waits for the last
// EXPECT    bound by the latency of one add per element, a few cycles, below the read roof; time grows as nt
// BUILD     c++ -std=c++20 -O3 -I. -c kernels/cpu/gemv_scalar.cpp
#include <algorithm>

#include "kernels/cpu/gemv.hpp"
#include "kernels/cpu/gemv_shape.hpp"

namespace ladder::cpu {

// ANCHOR: cpu_gemv_scalar
void gemv_scalar(const float* weights, const float* acts, float* out, Shape shape, ThreadPool& pool) {
  require_valid("gemv_scalar", shape);
  const long long outputs = shape.nt * shape.od;
  const long long od = shape.od, id = shape.id;
  // A few ranges per thread, so that a thread that the system interrupts does not hold up the others.
  const long long chunk = std::max(1LL, outputs / (8LL * pool.size()));
  pool.parallel_for(outputs, chunk, [=](long long begin, long long end, int /*thread*/) {
    for (long long index = begin; index < end; ++index) {  // index: the global thread index on the GPU
      const long long token = index / od;                  // 0..nt-1
      const long long row = index % od;                    // 0..od-1
      const float* w = weights + row * id;                 // [id]
      const float* x = acts + token * id;                  // [id]
      // One accumulator. Without fast-math the compiler may multiply several elements at once, but has to
      // add them one after another.
      float sum = 0;
      for (long long k = 0; k < id; ++k) sum += w[k] * x[k];
      out[index] = sum;
    }
  });
}
// ANCHOR_END: cpu_gemv_scalar

}  // namespace ladder::cpu
