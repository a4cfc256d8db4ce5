// Which rows gemv_fused multiplies, and what shared memory a block takes for them: known without a device, so that a
// program can say beforehand which kernel runs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>

#include "harness/device/status.hpp"
#include "harness/experiment/weight_types.hpp"

namespace ladder {

/// Its name in tables and traces: the dispatch function does not know it, as it stands in for the float kernels where a token
/// is alone.
inline constexpr const char* kFusedName = "gemv_fused";

namespace gemv_fused_detail {

inline constexpr int kWarps = 16, kInFlight = 2;  ///< of a block; steps of a warp under way
inline constexpr int kMostSums = 2048;            ///< of a block: rows times the warps that share one

/// Weights of 16 bytes; 0 for types that gemv_fused does not multiply.
constexpr int elements_of(WeightType type) {
  return type == WeightType::f32 ? 4 : type == WeightType::f16 || type == WeightType::bf16 ? 8 : 0;
}

/// Bytes of dynamic shared memory.
/// @param elements weights of 16 bytes @param split warps that share a row
constexpr std::size_t shared_bytes(int elements, int id, int split) {
  const std::size_t units = static_cast<std::size_t>(id / elements),
                    stride = static_cast<std::size_t>(32 * split);
  return std::size_t{kWarps * kInFlight * 1024} +
         (units + stride - 1) / stride * stride * static_cast<std::size_t>(elements) * 4;
}

/// Shared memory of a block at most, whatever its rows: activations filled up to a step of all warps, and sums.
constexpr std::size_t most_shared_bytes(int elements, int id) {
  return std::max(shared_bytes(elements, id, 1), shared_bytes(elements, id, kWarps)) +
         sizeof(float) * (kMostSums + kWarps);
}

inline Status no_format(WeightType type) {
  return Status::error(std::string("gemv_fused: weights must be f16, bf16 or f32, not ") + info(type).name);
}

}  // namespace gemv_fused_detail

/// Whether gemv_fused multiplies rows of `id` weights of this type; otherwise the error that it would return.
/// @param shared_limit shared memory of a block, in bytes
inline Status gemv_fused_supported(WeightType type, long long id, std::size_t shared_limit) {
  const int elements = gemv_fused_detail::elements_of(type);
  if (elements == 0) return gemv_fused_detail::no_format(type);
  if (id < 1 || id % elements != 0) {
    return Status::error("gemv_fused: id must be a multiple of " + std::to_string(elements) +
                         " (16-byte loads), not " + std::to_string(id));
  }
  constexpr long long kMost = 1 << 20;  // far more than any shared memory
  const std::size_t needed =
      gemv_fused_detail::most_shared_bytes(elements, static_cast<int>(std::min(id, kMost)));
  if (needed <= shared_limit) return {};
  return Status::error("gemv_fused: rows of " + std::to_string(id) + " activations take " +
                       std::to_string(needed) + " bytes of shared memory; a block of this device has " +
                       std::to_string(shared_limit));
}

}  // namespace ladder
