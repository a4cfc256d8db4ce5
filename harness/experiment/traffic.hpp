// The byte model: how many bytes a matmul must move when every operand is moved exactly once, and how many
// operations it must do. The only copy; kernels, plots and tests all ask here.
#pragma once

#include <array>
#include <string_view>

#include "harness/device/shape.hpp"
#include "harness/experiment/record.hpp"
#include "harness/experiment/weight_types.hpp"

namespace ladder {

/// How the activation rows are stored when the kernel reads them.
enum class ActivationFormat {
  f32,        ///< 4 bytes an element
  f32_q8,     ///< the same, and the kernel itself makes int8 blocks of them: the result is that of pad40
  f16,        ///< 2 bytes an element
  pad40,      ///< int8 blocks of 32 with scale and sum, 40 bytes a block
  planes40,   ///< the same 40 bytes a block in two planes (kernels/mmvq/tile_acts.cuh)
  pad40_t,    ///< 36 bytes a block in two planes, tokens in tiles of 64 (kernels/quant/quantize_acts.hpp)
  f16_tiles,  ///< 2 bytes an element, each sixteen of a row in the order of weights in tiles
};

/// Bytes of a weight matrix. Rows are stored whole, so `id` must be a multiple of the block length.
constexpr double weight_bytes(WeightType t, long long od, long long id) {
  const WeightTypeInfo& w = info(t);
  return static_cast<double>(od) * static_cast<double>(id / w.block_elems) * w.block_bytes;
}

constexpr double activation_bytes(ActivationFormat f, long long nt, long long id) {
  switch (f) {
    case ActivationFormat::f32:
    case ActivationFormat::f32_q8:
      return 4.0 * static_cast<double>(nt) * static_cast<double>(id);
    case ActivationFormat::f16:
    case ActivationFormat::f16_tiles:
      return 2.0 * static_cast<double>(nt) * static_cast<double>(id);
    case ActivationFormat::pad40:
    case ActivationFormat::planes40:
      return 40.0 * static_cast<double>(nt) * static_cast<double>((id + 31) / 32);
    case ActivationFormat::pad40_t:
      return 36.0 * 64 * static_cast<double>((nt + 63) / 64) * static_cast<double>((id + 31) / 32);
  }
  return 0;
}

/// Compulsory traffic of one matmul, in bytes. Outputs are f32.
constexpr Traffic compulsory_traffic(WeightType w, ActivationFormat a, const Shape& s) {
  return Traffic{weight_bytes(w, s.od, s.id), activation_bytes(a, s.nt, s.id),
                 4.0 * static_cast<double>(s.nt) * static_cast<double>(s.od)};
}

/// A multiply and an add for every weight and token row.
constexpr double matmul_ops(const Shape& s) {
  return 2.0 * static_cast<double>(s.nt) * static_cast<double>(s.od) * static_cast<double>(s.id);
}

/// Operations per byte of compulsory traffic.
constexpr double arithmetic_intensity(WeightType w, ActivationFormat a, const Shape& s) {
  return matmul_ops(s) / compulsory_traffic(w, a, s).total();
}

/// Largest intensity any nt can reach at nt = 1: two operations for each weight, over its bytes.
constexpr double decode_intensity_limit(WeightType w) { return 2.0 / info(w).bytes_per_element(); }

}  // namespace ladder
