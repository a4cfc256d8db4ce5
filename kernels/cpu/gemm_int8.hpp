// Packed weights times many tokens on the CPU: the int8 twins of prefill.
//
//   out[t][r] = sum over k of weights[r][k] * acts[t][k]        t 0..nt-1, r 0..od-1, k 0..id-1
//
// The arithmetic is that of quant_matmul.hpp's int8 products, term by term and in the same order, so that every
// output has the same bits as there, whatever nt: the bound on errors is the one that is derived there. What
// differs is what is done how often. quant_matmul takes weights out of their blocks once for 8 tokens; here a
// strip of rows is taken out once for all of them, and the products read it from L2 as plain bytes.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "kernels/cpu/quant_matmul.hpp"

namespace ladder::cpu {

/// From so many tokens on it is faster than quant_matmul.hpp, whatever the type; what takes weights to panels is made
/// up for by then.
inline constexpr int kInt8GemmTokens = 24;

/// Memory of int8 products with many tokens, kept between calls: activations as panels, and weights' panels of
/// each thread.
class Int8Gemm {
 public:
  /// Rounds activations by the rule of quant_matmul.hpp. Throws std::invalid_argument for nt < 1 or an id that
  /// is no positive multiple of 32.
  /// @param acts [nt][id] f32
  void quantize(const float* acts, long long nt, long long id, ThreadPool& pool);
  /// Activations that a thread makes when it rounds them, so that they are in its cache: make(token, room) is called once
  /// for each token, on any thread, and returns its row, which may be in `room`. @param room [id]
  void quantize(const std::function<const float*(long long, float*)>& make, long long nt, long long id,
                ThreadPool& pool);
  /// From blocks that are int8 already, as QuantizedActs::assign().
  /// @param blocks [nt][id/32]
  void assign(const BlockQ8Pad40* blocks, long long nt, long long id, ThreadPool& pool);

  /// Several matrices times the activations of the last quantize() or assign(). F32, F16 and BF16 weights are
  /// multiplied with `acts` as quant_f32_matmul does. Throws std::invalid_argument for od < 1, an id that is not
  /// whole blocks of a type, nt or id other than those of the activations, or a matrix of F32, F16 or BF16
  /// without `acts`; std::logic_error if the activations were made for another instruction set.
  /// @param acts [nt][id] f32, or nullptr
  void multiply(std::span<const Product> products, const float* acts, long long nt, long long id,
                ThreadPool& pool);

 private:
  template <class Row, class Make>
  void fill(long long nt, long long id, ThreadPool& pool, Row&& row, Make&& make);
  /// Bytes at a multiple of 64, or of a huge page if they fill one.
  struct Kept {
    struct Free {
      std::size_t alignment;
      void operator()(unsigned char* p) const;
    };
    std::unique_ptr<unsigned char[], Free> memory{nullptr, Free{1}};
    std::size_t bytes = 0;
    unsigned char* grown(std::size_t wanted);
  };
  Kept acts_;     // tiles of tokens
  Kept rows_;     // of each thread: rows of a tile that are being made
  Kept scratch_;  // of each thread: panels of a strip, and sums
  long long nt_ = 0, id_ = 0;
  const void* kernels_ = nullptr;  // whose order of codes it is
};

/// The twins: takes the blocks of activations apart and multiplies. Throws std::invalid_argument for F32, F16 and
/// BF16 and for shapes that multiply() does not take.
void quant_int8_gemm(WeightType type, const void* weights /*[od][id]*/,
                     const BlockQ8Pad40* acts /*[nt][id/32]*/, float* out /*[nt][od]*/, Shape shape,
                     ThreadPool& pool);

/// The same with activations in the two planes of quantize_acts.hpp, one right behind the other.
void quant_int8_gemm_planes(WeightType type, const void* weights /*[od][id]*/, const void* acts,
                            float* out /*[nt][od]*/, Shape shape, ThreadPool& pool);

/// Anchors of the code, for Rung::cpu_source. Empty for F32, F16 and BF16.
[[nodiscard]] std::string quant_int8_gemm_source(WeightType type);

}  // namespace ladder::cpu
