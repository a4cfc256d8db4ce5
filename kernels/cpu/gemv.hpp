// The CPU twins of chapters 01 and 02: f32 weights times f32 activations.
//
//   out[t][r] = sum over k of weights[r][k] * acts[t][k]        t 0..nt-1, r 0..od-1, k 0..id-1
//
// Both twins take any shape with nt, od, id >= 1, need no alignment beyond that of a float, and throw
// std::invalid_argument for other shapes. `out` must not overlap the inputs. A NaN or infinity in an input
// reaches every output that depends on it.
//
// Error. Let u = 2^-24, and s the exact sum of |weights[r][k] * acts[t][k]|. Then, unless a product
// underflows,
//   |out[t][r] - exact| <= id * u * s.
// Each of the id products and id - 1 additions rounds once, with relative error at most u (a fused
// multiply-add saves the product's). A term takes part in its own product and in at most id - 1 additions,
// whatever the order, so it is scaled by at most id factors (1 + e), |e| <= u. To first order that is the
// bound; that the terms of higher order are not needed, for any order of summation, is Jeannerod and Rump,
// "Improved error bounds for inner products in floating-point arithmetic", SIAM J. Matrix Anal. Appl. 34
// (2013). Its induction carries over to the fused multiply-add: adding a product p to a float is still off by
// at most min(u * |sum|, |p|), because the float itself is a candidate for the result. The zeros that pad a
// row's end to whole vectors add nothing and round nothing.
#pragma once

#include "harness/device/shape.hpp"
#include "kernels/cpu/thread_pool.hpp"

namespace ladder::cpu {

/// gemv_scalar.cpp: one multiply-add at a time, a core in the part of a CUDA thread.
void gemv_scalar(const float* weights /*[od][id]*/, const float* acts /*[nt][id]*/, float* out /*[nt][od]*/,
                 Shape shape, ThreadPool& pool);

/// gemv_vec.cpp: rows shared out over the threads, elements over SIMD lanes; the instruction set is isa() at
/// the time of the call. The bits of out[t] depend on that instruction set, weights and acts[t], and on
/// nothing else: not on nt, the other tokens, the number of threads, or where the row stands.
void gemv_vec(const float* weights /*[od][id]*/, const float* acts /*[nt][id]*/, float* out /*[nt][od]*/,
              Shape shape, ThreadPool& pool);

}  // namespace ladder::cpu
