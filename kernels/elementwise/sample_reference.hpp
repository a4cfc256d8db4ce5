// What the sample kernel draws, by sorting all logits, in float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/elementwise/sample.cuh"

namespace ladder {

/// What sample_token draws from row[0..n-1] at a position; -1 where nothing can be drawn.
inline int sample_reference(const float* row, long long n, const SampleOptions& o, std::uint64_t position) {
  std::vector<std::pair<double, int>> all;
  for (int i = 0; i < n; ++i) {
    if (std::isnan(row[i]) || row[i] == INFINITY) return -1;
    if (row[i] != -INFINITY) all.emplace_back(row[i], i);
  }
  if (all.empty()) return -1;
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  if (all.size() > static_cast<std::size_t>(o.top_k)) all.resize(static_cast<std::size_t>(o.top_k));
  const double largest = all[0].first;
  double total = 0, sum = 0;
  for (const auto& c : all) total += std::exp(c.first - largest);
  std::size_t kept = 0;
  while (kept < all.size() && (o.top_p >= 1 || kept == 0 || sum < o.top_p * total))
    sum += std::exp(all[kept++].first - largest);
  all.resize(kept);
  if (o.min_p > 0) {
    std::erase_if(all, [&](const auto& c) { return c.first < largest + std::log(double{o.min_p}); });
  }
  std::vector<double> weights;
  weights.reserve(all.size());
  for (const auto& c : all) weights.push_back(std::exp((c.first - largest) / o.temperature));
  total = 0, sum = 0;
  for (const double w : weights) total += w;
  const double target = uniform(o.seed, position) * total;
  int drawn = all[0].second;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (weights[i] == 0) continue;
    sum += weights[i];
    drawn = all[i].second;
    if (sum > target) break;
  }
  return drawn;
}

}  // namespace ladder
