// What stands around the matmuls of a transformer, on the CPU: RMSNorm, bias, RoPE, SwiGLU, residuals, and
// attention over a KV cache. f32 throughout; keys and values may be kept as f16.
//
// The instruction set is isa() at the time of the call. The bits of a token's results depend on it and on
// that token's inputs (for attention: on the cache up to its position), and on nothing else: not on nt or on
// the number of threads. Matrices are row-major; `out` must not overlap the inputs unless a function says
// that it works in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels/cpu/thread_pool.hpp"

namespace ladder::cpu {

/// out = x / sqrt(mean(x^2) + epsilon) * weight, one row, on the calling thread   (https://arxiv.org/abs/1910.07467)
/// @param x, out, weight [d]
void rms_norm(const float* x, const float* weight, float* out, long long d, float epsilon);

/// x[t] += bias, in place. @param x [nt][d]   @param bias [d]
void add_bias(float* x, const float* bias, long long nt, long long d, ThreadPool& pool);

/// x += y, in place. @param x, y [count]
void add_residual(float* x, const float* y, long long count, ThreadPool& pool);

/// gate = silu(gate) * up, in place, on the calling thread; silu(g) = g / (1 + exp(-g))
/// (https://arxiv.org/abs/2002.05202)
/// @param gate, up [count]
void swiglu(float* gate, const float* up, long long count);

/// Rotates pairs (i, i + head_dim / 2) of every head of token t, in place: RoPE in NEOX pairing.
/// @param x [nt][heads][head_dim]   @param cosines, sines [nt][head_dim / 2]
void rope(float* x, const float* cosines, const float* sines, long long nt, int heads, int head_dim,
          ThreadPool& pool);

/// Heads of an attention layer. heads is a multiple of kv_heads: query head h reads keys and values of head
/// h / (heads / kv_heads).
struct Heads {
  int heads, kv_heads, head_dim;
  [[nodiscard]] int group() const { return heads / kv_heads; }
};

/// Keys and values of one layer. Keys stand position by position in SIMD lanes, so that a query meets 16 of
/// them at once:
///   keys [kv_heads][ceil(context / 16)][head_dim][16]      values [kv_heads][context][head_dim rounded up to
/// 16]
class KvCache {
 public:
  /// Memory is zero and is only taken as it is written. Throws std::invalid_argument for sizes below 1 or
  /// heads that are no multiple of kv_heads, std::bad_alloc.
  /// @param f16 elements are f16 (round to nearest even; infinite beyond 65504), else f32
  KvCache(Heads heads, int context, bool f16);

  /// Positions first, first + 1, ... of all heads. @param k, v [nt][kv_heads][head_dim]
  /// Throws std::invalid_argument for positions outside the context.
  void store(const float* k, const float* v, long long nt, int first, ThreadPool& pool);

  [[nodiscard]] Heads heads() const { return heads_; }
  [[nodiscard]] int context() const { return context_; }
  [[nodiscard]] bool f16() const { return f16_; }
  [[nodiscard]] std::size_t bytes() const { return key_bytes() + value_bytes(); }

 private:
  friend class AttentionPlan;
  [[nodiscard]] int blocks() const { return (context_ + 15) / 16; }
  [[nodiscard]] int value_length() const { return (heads_.head_dim + 15) / 16 * 16; }
  [[nodiscard]] std::size_t key_bytes() const;
  [[nodiscard]] std::size_t value_bytes() const;
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  Heads heads_;
  int context_;
  bool f16_;
  std::unique_ptr<void, Free> keys_, values_;
};

/// Memory that attention works in, kept between calls.
struct AttentionScratch {
  std::vector<float> floats;
};

/// out[t][h] = softmax(q[t][h] . k / sqrt(head_dim)) v over positions 0 .. first + t, which are in the cache.
/// Scores, softmax and sums are f32. Work is shared out over tokens, kv heads and, while decoding, pieces of
/// 256 positions.
/// @param q, out [nt][heads][head_dim]
/// Throws std::invalid_argument for nt < 1 or positions outside the context.
void attention(const float* q, const KvCache& cache, float* out, long long nt, int first,
               AttentionScratch& scratch, ThreadPool& pool);

}  // namespace ladder::cpu
