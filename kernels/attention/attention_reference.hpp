// Attention of one query in float64, and what the bounds of the tests of this folder are made of.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "harness/device/half_bits.hpp"

namespace ladder {

/// softmax(scale * q . keys) . values of one query and head.
struct AttentionRow {
  std::vector<double> value;      ///< [head_dim]
  std::vector<double> magnitude;  ///< [head_dim] the sum of |weight * value|, weights adding up to 1
  std::vector<double> plain;      ///< [head_dim] the sum of |value|
  double score = 0;               ///< largest |score|
  double terms = 0;               ///< largest sum of the magnitudes of a score's terms
  double range = 0;               ///< between the highest and the lowest score
};

/// @param q [head_dim] @param terms [head_dim] magnitudes of what the elements of q were computed from, or |q|
/// @param key, value of a position and an element, as double
template <class Key, class Value>
AttentionRow attention_row(std::span<const double> q, std::span<const double> terms, int positions, Key key,
                           Value value) {
  const std::size_t head_dim = q.size();
  const double scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  AttentionRow row;
  std::vector<double> weight(static_cast<std::size_t>(positions));
  double highest = -1e300, lowest = 1e300;
  for (int p = 0; p < positions; ++p) {
    double sum = 0, magnitude = 0;
    for (std::size_t i = 0; i < head_dim; ++i) {
      const double k = scale * key(p, static_cast<int>(i));
      sum += q[i] * k;
      magnitude += terms[i] * std::fabs(k);
    }
    weight[static_cast<std::size_t>(p)] = sum;
    highest = std::max(highest, sum);
    lowest = std::min(lowest, sum);
    row.score = std::max(row.score, std::fabs(sum));
    row.terms = std::max(row.terms, magnitude);
  }
  row.range = highest - lowest;
  double total = 0;
  for (double& x : weight) total += x = std::exp(x - highest);
  for (std::size_t i = 0; i < head_dim; ++i) {
    double sum = 0, magnitude = 0, plain = 0;
    for (int p = 0; p < positions; ++p) {
      const double v = value(p, static_cast<int>(i)), term = weight[static_cast<std::size_t>(p)] / total * v;
      sum += term;
      magnitude += std::fabs(term);
      plain += std::fabs(v);
    }
    row.value.push_back(sum);
    row.magnitude.push_back(magnitude);
    row.plain.push_back(plain);
  }
  return row;
}

/// Bounds of an output's error: relative times AttentionRow::magnitude, plus absolute times AttentionRow::plain.
struct AttentionBound {
  double relative, absolute;
};

/// What both kernels on tensor cores lose to weights that vanish in f16: 2^-25 of 2^14, and of the largest.
inline constexpr double kVanishingWeight = 0x1p-38;

/// attention_f32. A score: scale, product, additions of a lane's elements (eight, at most) and of the butterfly, the
/// scale's own rounding. A weight is off by the error of its score and the highest one, by the rounding of the differences
/// of which it is the exponential (together no more than the range), and by the exponentials and products of its strips
/// (of 64 positions, at least), of its warp's positions and of the warps; weights appear above and below the fraction.
inline AttentionBound attention_f32_bound(const AttentionRow& row, int positions) {
  constexpr double kU = 0x1p-24;
  const double score = (8 + 5 + 4) * kU * row.terms, strips = positions / 64.0 + 1;
  return {2 * (2 * score + 2 * kU * row.range + (6 * strips + 40) * kU), 0};
}

/// attention_decode; AttentionRow::terms are of the query before its rotation. A score: rotation 3, the two f16 parts of
/// the query 4, up to head_dim / 32 instructions or head_dim / 4 additions in a row (an instruction's own sum of 16: up to
/// 16), six more to its end; its factor 3. The difference to the highest one and the power, which is good to four units.
/// Sums: instructions of 16 for each tile of a warp, twice; the tiles, warps, blocks and pieces on the way.
inline AttentionBound attention_decode_bound(const AttentionRow& row, int positions, int head_dim) {
  constexpr double kU = 0x1p-24;
  const double score = (3 + 4 + 16 * head_dim / 32.0 + 6 + 3) * kU * row.terms + 3 * kU * row.score;
  const double tiles = positions / 128.0 + 1;
  return {2 * (2 * score + 2 * kU * row.range + (36 * tiles + 70) * kU), kVanishingWeight};
}

/// attention_prefill; AttentionRow is of the query as it is rounded (attention_prefill_query). A score: head_dim / 16
/// instructions in a row, up to 16 for each one's own sum; the difference to the highest one and the power, good to four
/// units. A weight is rounded to f16 above the fraction, not below. Sums: instructions of 16 and a scaling for each tile.
inline AttentionBound attention_prefill_bound(const AttentionRow& row, int positions, int head_dim) {
  constexpr double kU = 0x1p-24;
  const double score = head_dim * kU * row.terms + 2 * kU * row.score, tiles = positions / 64.0 + 1;
  return {2 * (2 * score + 2 * kU * row.range + (40 * tiles + 60) * kU) + 0x1p-11, kVanishingWeight};
}

/// The query that attention_prefill multiplies, on the scale of q: times log2(e)/sqrt(head_dim), rounded to f16, and back.
inline double attention_prefill_query(float q, int head_dim) {
  const double factor = 1.4426950408889634 / std::sqrt(static_cast<double>(head_dim));
  return half_bits_to_float(float_to_half_bits(q * static_cast<float>(factor))) / factor;
}

/// Empty if every output is finite and within its bound; otherwise the first element that is wrong. `*used` is raised to
/// the largest part of the bound that an error takes.
inline std::string compare_row(std::span<const float> out, const AttentionRow& row, AttentionBound b,
                               double* used = nullptr) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double bound = b.relative * row.magnitude[i] + b.absolute * row.plain[i];
    const double error = std::fabs(out[i] - row.value[i]);
    if (!(std::isfinite(out[i]) && error <= bound)) {
      return "[" + std::to_string(i) + "] is " + std::to_string(out[i]) + ", expected " +
             std::to_string(row.value[i]) + " within " + std::to_string(bound);
    }
    if (used != nullptr && bound > 0) *used = std::max(*used, error / bound);
  }
  return "";
}

}  // namespace ladder
