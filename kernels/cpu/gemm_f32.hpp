// The CPU twins of chapter 05: a matrix of weights times many tokens, in f32.
//
//   out[t][r] = sum over k of weights[r][k] * acts[t][k]        t 0..nt-1, r 0..od-1, k 0..id-1
//
// The tiles are those of a GPU's GEMM: where a block copies a tile of both operands to shared memory, a thread here
// packs panels of both, which stay in L2 and L1; where a warp keeps a tile of sums in registers, so does the core.
//
// All three take any shape with nt, od, id >= 1, need no alignment beyond that of an element, and throw
// std::invalid_argument for other shapes. `out` must not overlap the inputs. A NaN or infinity in an input reaches
// every output that depends on it. f16 operands become f32, exactly, when they are packed.
//
// Error. Sums of kGemmDepth = 256 products each are added up one after the other, so that a term meets at most
// gemm_roundings(id) roundings, and with u = 2^-24 and s the exact sum of |weights[r][k] * acts[t][k]|
//   |out[t][r] - exact| <= gemm_roundings(id) * u * s          (gemv.hpp has the argument)
// unless a product underflows. The bits of out[t][r] depend on the instruction set isa() at the time of the call,
// weights[r] and acts[t], and on nothing else.
#pragma once

#include <cstdint>
#include <string>

#include "harness/device/shape.hpp"
#include "kernels/cpu/thread_pool.hpp"

namespace ladder::cpu {

void gemm_f32(const float* weights /*[od][id]*/, const float* acts /*[nt][id]*/, float* out /*[nt][od]*/,
              Shape shape, ThreadPool& pool);

/// f16 weights and activations, as bits.
void gemm_f16(const std::uint16_t* weights /*[od][id]*/, const std::uint16_t* acts /*[nt][id]*/,
              float* out /*[nt][od]*/, Shape shape, ThreadPool& pool);

/// f16 weights, f32 activations.
void gemm_f16_af32(const std::uint16_t* weights /*[od][id]*/, const float* acts /*[nt][id]*/,
                   float* out /*[nt][od]*/, Shape shape, ThreadPool& pool);

/// Roundings that a term meets at most, its product's included.
[[nodiscard]] double gemm_roundings(long long id);

/// Anchors of the code, for Rung::cpu_source.
[[nodiscard]] std::string gemm_source();

}  // namespace ladder::cpu
