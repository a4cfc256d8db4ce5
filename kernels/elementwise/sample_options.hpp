// What sample_token is asked for, for code that has no device.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "harness/device/status.hpp"

namespace ladder {

inline constexpr int kSampleThreads = 256, kSampleMostBlocks = 128, kSampleMostK = 64;
inline constexpr long long kSampleMostLogits = 1LL * kSampleMostBlocks * kSampleThreads * kSampleMostK;

/// How a token is drawn: first the top_k largest logits, of them the fewest that hold the probability top_p, of those the
/// ones at least min_p times as probable as the first; all this at temperature 1.
struct SampleOptions {
  float temperature;
  int top_k;    ///< 1 to kSampleMostK
  float top_p;  ///< 1 or more: off
  float min_p;  ///< 0 or less: off
  std::uint64_t seed;

  bool operator==(const SampleOptions&) const = default;
};

/// Whether sample_token draws so; otherwise the error that launch_sample would return.
inline Status sample_supported(const SampleOptions& o, int nt, long long n) {
  if (n < 1 || n > kSampleMostLogits) {
    return Status::error("sample_token: n must be 1 to " + std::to_string(kSampleMostLogits) + ", not " +
                         std::to_string(n));
  }
  if (nt < 1 || nt > 65535)
    return Status::error("sample_token: nt must be 1 to 65535, not " + std::to_string(nt));
  if (o.top_k < 1 || o.top_k > kSampleMostK) {
    return Status::error("sample_token: top_k must be 1 to " + std::to_string(kSampleMostK) + ", not " +
                         std::to_string(o.top_k));
  }
  if (!(o.temperature > 0) || std::isinf(o.temperature) || std::isnan(o.top_p) || o.top_p < 0 ||
      !(o.min_p <= 1)) {
    return Status::error(
        "sample_token: temperature must be finite and above 0, top_p no less than 0, min_p no more than 1, "
        "not " +
        std::to_string(o.temperature) + ", " + std::to_string(o.top_p) + " and " + std::to_string(o.min_p));
  }
  return {};
}

}  // namespace ladder
