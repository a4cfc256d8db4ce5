#include <algorithm>
#include <cmath>
#include <numbers>
#include <span>
#include <stdexcept>
#include <string>

#include "chapters/09-qwen/engine.hpp"

namespace ladder::qwen {
namespace {

/// How the frequencies of YaRN are mixed (arXiv 2309.00071, section 3.2). Pairs that turn often within the
/// original context keep their angle, pairs that turn less than once have it divided by the factor, and
/// between the two limits the share is linear in the pair's number.
struct YarnRamp {
  double lowest, highest;  ///< numbers of the pairs that turn 32 times and once

  YarnRamp(const Yarn& yarn, int head_dim, double base) {
    const auto pair_that_turns = [&](double turns) {
      return head_dim * std::log(yarn.original_context / (turns * 2 * std::numbers::pi)) /
             (2 * std::log(base));
    };
    lowest = std::max(0.0, std::floor(pair_that_turns(32)));
    highest = std::min(head_dim - 1.0, std::ceil(pair_that_turns(1)));
  }
  /// 1: the angle is kept, 0: it is divided by the factor.
  [[nodiscard]] double kept(int pair) const {
    return 1 - std::clamp((pair - lowest) / std::max(0.001, highest - lowest), 0.0, 1.0);
  }
};

}  // namespace

void rope_row(const Hyperparameters& hp, int position, std::span<float> cosines, std::span<float> sines) {
  const int head_dim = hp.head_dim(), pairs = head_dim / 2;
  if (position < 0) {
    throw std::invalid_argument("rope: the position must be at least 0, not " + std::to_string(position));
  }
  if (cosines.size() != static_cast<std::size_t>(pairs) || sines.size() != cosines.size()) {
    throw std::invalid_argument("rope: room for " + std::to_string(cosines.size()) + " cosines and " +
                                std::to_string(sines.size()) + " sines; a head has " + std::to_string(pairs) +
                                " pairs");
  }
  const double base = hp.rope_base;
  for (int i = 0; i < pairs; ++i) {
    double angle = position * std::pow(base, -2.0 * i / head_dim);
    double magnitude = 1;
    if (hp.yarn) {
      const double factor = hp.yarn->factor;
      const double kept = YarnRamp(*hp.yarn, head_dim, base).kept(i);
      angle = angle / factor * (1 - kept) + angle * kept;
      magnitude = 1 + 0.1 * std::log(factor);
    }
    cosines[static_cast<std::size_t>(i)] = static_cast<float>(std::cos(angle) * magnitude);
    sines[static_cast<std::size_t>(i)] = static_cast<float>(std::sin(angle) * magnitude);
  }
}

}  // namespace ladder::qwen
