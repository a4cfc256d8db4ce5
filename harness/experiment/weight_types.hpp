// Storage types of weights, with the block sizes of GGUF. The only copy of these constants.
#pragma once

#include <array>
#include <cstddef>

namespace ladder {

/// Storage types of a weight matrix. Block sizes are GGUF's (ggml-common.h), where a block is the smallest
/// number of neighbouring elements of a row that can be stored.
enum class WeightType {
  f32,
  f16,
  bf16,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_nl,
  iq4_xs,
};

struct WeightTypeInfo {
  WeightType type;
  const char* name;
  int block_elems;
  int block_bytes;
  constexpr double bytes_per_element() const { return static_cast<double>(block_bytes) / block_elems; }
};

inline constexpr std::array<WeightTypeInfo, 15> kWeightTypes = {{
    {WeightType::f32, "f32", 1, 4},
    {WeightType::f16, "f16", 1, 2},
    {WeightType::bf16, "bf16", 1, 2},
    {WeightType::q4_0, "q4_0", 32, 18},
    {WeightType::q4_1, "q4_1", 32, 20},
    {WeightType::q5_0, "q5_0", 32, 22},
    {WeightType::q5_1, "q5_1", 32, 24},
    {WeightType::q8_0, "q8_0", 32, 34},
    {WeightType::q2_k, "q2_k", 256, 84},
    {WeightType::q3_k, "q3_k", 256, 110},
    {WeightType::q4_k, "q4_k", 256, 144},
    {WeightType::q5_k, "q5_k", 256, 176},
    {WeightType::q6_k, "q6_k", 256, 210},
    {WeightType::iq4_nl, "iq4_nl", 32, 18},
    {WeightType::iq4_xs, "iq4_xs", 256, 136},
}};

constexpr const WeightTypeInfo& info(WeightType t) { return kWeightTypes[static_cast<std::size_t>(t)]; }

/// Bytes of a row of `id` elements, a multiple of the block length.
constexpr std::size_t row_bytes(WeightType t, long long id) {
  return static_cast<std::size_t>(id / info(t).block_elems) * static_cast<std::size_t>(info(t).block_bytes);
}

}  // namespace ladder
