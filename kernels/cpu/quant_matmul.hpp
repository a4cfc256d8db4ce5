// Packed weights times activations on the CPU: the twins of the quantized rungs.
//
//   out[t][r] = sum over k of weights[r][k] * acts[t][k]        t 0..nt-1, r 0..od-1, k 0..id-1
//
// Weights are read as they lie in a GGUF file (kernels/quant/blocks.hpp), rows without gaps, first byte at a
// multiple of 4. Two ways to multiply:
//
// int8 (QuantizedActs, multiply): activations are rounded to int8 in blocks of 32, and codes are multiplied
// with codes in integers, exactly. For a block of activations with largest magnitude amax
//   scale = amax / 127, kept as f32;  code = x * (1 / scale), rounded to the nearest integer, halves to even.
// A block with amax below 127 * 2^-128, the inverse of whose scale is no f32, counts as zero. One with an
// infinity or a NaN makes a NaN of every output that depends on it.
// Error. Let w be the dequantized weights, x' the activations as rounded, u = 2^-24, and a weight = scale *
// code + offset with its zero point in the code. Then, unless a product underflows,
//   |out - exact| <= (1 + 2^-20) * sum of |w| * amax / 254  +  (10 * ceil(id / 256) + 8) * u * S,
//   S = sum of (|scale * code| + |offset|) * |x'|.
// The first term is the rounding of activations: half a code, and a little for the inverse and the product.
// In the second, a lane's sum takes at most 10 additions a group of 256 (AVX2: 8 blocks and 2 vectors of
// offsets; NEON: 4 and 4; AVX-512: 1 and 1), the scales' product and the lanes' tree of additions are the
// rest.
//
// Activations may come as int8 blocks instead (assign): d * q of a block is taken as it is, NaN and infinite
// d included, and the first term of the bound is gone.
//
// f32 (quant_f32_matmul): weights become f32 in registers and are multiplied with the activations as they
// are. Error: |out - exact| <= (id + 3) * u * sum of (|scale * code| + |offset|) * |x|, gemv.hpp's bound with
// up to three roundings that make a weight.
//
// The bits of out[t] depend on the instruction set isa() at the time of the call, the weights and acts[t],
// and on nothing else: not on nt, the other tokens, the number of threads, other products of the call, or
// where the row stands.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "harness/device/shape.hpp"
#include "harness/experiment/weight_types.hpp"
#include "kernels/cpu/thread_pool.hpp"
#include "kernels/quant/q8_acts.hpp"

namespace ladder::cpu {

struct ActGroup;

/// Activations rounded to int8, once for all products that read them.
class QuantizedActs {
 public:
  QuantizedActs();
  ~QuantizedActs();
  QuantizedActs(QuantizedActs&&) noexcept;
  QuantizedActs& operator=(QuantizedActs&&) noexcept;

  /// Memory is kept and grows to the largest activations so far. Throws std::invalid_argument for nt < 1 or
  /// an id that is no positive multiple of 32.
  /// @param acts [nt][id] f32
  void quantize(const float* acts, long long nt, long long id, ThreadPool& pool);
  /// From blocks that are int8 already: codes -127..127 as they are, the scale as f32. Their sums are not
  /// read: the products need those of 16 codes. Otherwise as quantize().
  /// @param blocks [nt][id/32]
  void assign(const BlockQ8Pad40* blocks, long long nt, long long id, ThreadPool& pool);

  [[nodiscard]] long long nt() const { return nt_; }
  [[nodiscard]] long long id() const { return id_; }
  /// Code and scale of element k of token t, as they are multiplied: for tests.
  [[nodiscard]] int code(long long t, long long k) const;
  [[nodiscard]] float scale(long long t, long long k) const;

 private:
  friend class ProductPlan;
  template <class Make>
  void fill(long long nt, long long id, long long worth_forking, ThreadPool& pool, Make&& make);
  long long nt_ = 0, id_ = 0;
  std::size_t capacity_ = 0;
  struct Free {
    void operator()(ActGroup* groups) const;
  };
  std::unique_ptr<ActGroup[], Free> groups_;  // [nt][ceil(id / 256)]
  const void* kernels_ = nullptr;             // whose order of codes it is
};

/// One matrix of a call.
struct Product {
  WeightType type{};
  const void* weights = nullptr;  ///< [od][id], row_bytes(type, id) bytes a row
  long long od = 0;
  float* out = nullptr;  ///< [nt][od] f32
};

/// Whether multiply() uses int8 activations for the type: all quantized types, not F32, F16 and BF16.
[[nodiscard]] bool uses_int8(WeightType type);

/// Several matrices times the same activations, in one parallel region: Q, K and V, or gate and up.
/// F32, F16 and BF16 weights are multiplied with `acts`, quantized ones with `quantized` if it is given and
/// with `acts` otherwise.
/// @param acts [nt][id] f32
/// @param quantized the same activations rounded, or nullptr
/// Throws std::invalid_argument for nt, od or id < 1, an id that is not whole blocks of a type, or
/// `quantized` of another shape; std::logic_error if `quantized` was made for another instruction set.
void multiply(std::span<const Product> products, const float* acts, const QuantizedActs* quantized,
              long long nt, long long id, ThreadPool& pool);

/// The f32 twins, <type>_f32_matmul: as multiply() of one matrix without rounding of activations.
void quant_f32_matmul(WeightType type, const void* weights /*[od][id]*/, const float* acts /*[nt][id]*/,
                      float* out /*[nt][od]*/, Shape shape, ThreadPool& pool);

/// The int8 twins: rounds the activations and multiplies. F32, F16 and BF16 as quant_f32_matmul.
void quant_int8_matmul(WeightType type, const void* weights /*[od][id]*/, const float* acts /*[nt][id]*/,
                       float* out /*[nt][od]*/, Shape shape, ThreadPool& pool);

/// The int8 twins on activations that are int8 already: takes the blocks apart and multiplies. Throws
/// std::invalid_argument also for F32, F16 and BF16.
void quant_int8_matmul(WeightType type, const void* weights /*[od][id]*/,
                       const BlockQ8Pad40* acts /*[nt][id/32]*/, float* out /*[nt][od]*/, Shape shape,
                       ThreadPool& pool);

/// Upper bound on the f32 roundings that a term of the product with blocks meets on the instruction set
/// isa(), those of a reference that decodes weights to f32 included: |out - reference| <= roundings * u * S.
[[nodiscard]] double quant_int8_roundings(WeightType type, long long id);

/// Where the code stands that the product with blocks runs on AVX-512, for Rung::cpu_source: the anchors
/// "file#anchor,file#anchor", what all types share first. Empty for F32, F16 and BF16.
[[nodiscard]] std::string quant_int8_source(WeightType type);

/// The instruction that multiplies int8 codes: "vpdpbusd", "vpmaddwd" (AVX-512 without VNNI), "vpmaddubsw"
/// (AVX2), "sdot" (NEON), ...
[[nodiscard]] const char* quant_int8_instruction();

/// Makes AVX-512 do without VNNI, and NEON without sdot, until called with false: for tests, where both
/// exist.
void avoid_dot_instruction(bool avoid);

}  // namespace ladder::cpu
