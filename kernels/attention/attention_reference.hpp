// Attention of one query in float64, and what the bounds of the tests of this folder are made of.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

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

/// Empty if |out - row.value| <= relative * row.magnitude + absolute * row.plain everywhere, and finite; otherwise the
/// first element that is wrong. `*used` is raised to the largest part of the bound that an error takes.
inline std::string compare_row(std::span<const float> out, const AttentionRow& row, double relative,
                               double absolute, double* used = nullptr) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double bound = relative * row.magnitude[i] + absolute * row.plain[i];
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
