#include "chapters/09-qwen/sampler.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>

namespace ladder::qwen {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Larger logit first, then lower id.
bool before(const std::pair<float, Token>& a, const std::pair<float, Token>& b) {
  return a.first != b.first ? a.first > b.first : a.second < b.second;
}

std::string text_of(float x) {
  if (std::isnan(x)) return "NaN";
  return x > 0 ? "+infinity" : "-infinity";
}

/// The largest logit. Throws NotANumber where there is none. Eight maxima side by side, which the compiler
/// keeps in vector registers; NaN and +infinity are looked for the same way.
float checked_maximum(std::span<const float> logits) {
  constexpr std::size_t kLanes = 8;
  std::array<float, kLanes> most;
  most.fill(-kInfinity);
  std::array<std::uint32_t, kLanes> bad{};
  const auto step = [&](std::size_t lane, float x) {
    most[lane] = x > most[lane] ? x : most[lane];
    bad[lane] |= static_cast<std::uint32_t>(!(x < kInfinity));  // NaN is not less than anything
  };
  std::size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) step(lane, logits[i + lane]);
  }
  for (; i < logits.size(); ++i) step(0, logits[i]);
  if (std::any_of(bad.begin(), bad.end(), [](std::uint32_t b) { return b != 0; })) {
    const auto at = std::find_if(logits.begin(), logits.end(), [](float x) { return !(x < kInfinity); });
    throw NotANumber("the logit of token " + std::to_string(at - logits.begin()) + " is " + text_of(*at) +
                     "; logits must be finite or -infinity");
  }
  const float maximum = *std::max_element(most.begin(), most.end());
  if (maximum == -kInfinity) throw NotANumber("all logits are -infinity; at least one token must be allowed");
  return maximum;
}

void require(bool holds, const char* option, float value, const char* allowed) {
  if (!holds)
    throw std::invalid_argument(std::string(option) + " is " + std::to_string(value) + "; " + allowed);
}

}  // namespace

Sampler::Sampler(SamplerOptions options, int vocabulary)
    : options_(std::move(options)), vocabulary_(vocabulary) {
  if (vocabulary <= 0) {
    throw std::invalid_argument("a vocabulary of " + std::to_string(vocabulary) +
                                " tokens; at least 1 is needed");
  }
  const SamplerOptions& o = options_;
  require(std::isfinite(o.temperature), "temperature", o.temperature, "a finite number is allowed");
  require(!std::isnan(o.top_p), "top_p", o.top_p, "a probability is allowed; 1 is off");
  require(o.top_p >= 0, "top_p", o.top_p, "a probability is allowed; 1 is off");
  require(o.min_p <= 1, "min_p", o.min_p, "a probability is allowed; 0 is off");
  require(std::isfinite(o.repeat_penalty) && o.repeat_penalty > 0, "repeat_penalty", o.repeat_penalty,
          "a finite number above 0 is allowed; 1 is off");
  require(std::isfinite(o.presence_penalty), "presence_penalty", o.presence_penalty,
          "a finite number is allowed");
  require(std::isfinite(o.frequency_penalty), "frequency_penalty", o.frequency_penalty,
          "a finite number is allowed");
  if (o.penalty_last_n < -1) {
    throw std::invalid_argument("penalty_last_n is " + std::to_string(o.penalty_last_n) +
                                "; a number of tokens, or -1 for all, is allowed");
  }
  const auto require_token = [vocabulary](const char* option, Token token) {
    if (token < 0 || token >= vocabulary) {
      throw std::invalid_argument(std::string(option) + " names token " + std::to_string(token) +
                                  "; ids from 0 to " + std::to_string(vocabulary - 1) + " are allowed");
    }
  };
  for (const auto& [token, bias] : o.logit_bias) {
    require_token("logit_bias", token);
    require(bias < kInfinity, "logit_bias", bias, "a finite number or -infinity is allowed");
  }
  for (const Token token : o.banned) require_token("banned", token);
  counts_.assign(static_cast<std::size_t>(vocabulary), 0);
}

std::optional<Drawing> Sampler::drawing() const {
  if (has_penalties()) return std::nullopt;
  Drawing all;
  if (!draws_largest()) {
    // All of them would be in another order here: that of ids.
    if (options_.top_k >= vocabulary_) return std::nullopt;
    all.sample = {options_.temperature, options_.top_k, options_.top_p, options_.min_p, options_.seed};
    if (!sample_supported(*all.sample, 1, vocabulary_).ok()) return std::nullopt;
  }
  if (options_.logit_bias.empty() && options_.banned.empty()) return all;
  std::vector<float>& bias = all.bias;
  bias.resize(static_cast<std::size_t>(vocabulary_));
  for (const auto& [token, b] : options_.logit_bias) {
    float& sum = bias[static_cast<std::size_t>(token)];
    if (sum != 0) return std::nullopt;  // two for a token are added one after the other
    sum = b;
  }
  for (const Token token : options_.banned) bias[static_cast<std::size_t>(token)] = -kInfinity;
  return all;
}

/// Counts the tokens that penalties look at, into counts_ and seen_.
void Sampler::collect_history(std::span<const Token> history) {
  const SamplerOptions& o = options_;
  if (!has_penalties()) return;
  const std::size_t window = o.penalty_last_n < 0
                                 ? history.size()
                                 : std::min(history.size(), static_cast<std::size_t>(o.penalty_last_n));
  const std::span<const Token> last = history.last(window);
  for (const Token token : last) {
    if (token < 0 || token >= vocabulary_) {
      throw std::invalid_argument("the history holds token " + std::to_string(token) + "; ids from 0 to " +
                                  std::to_string(vocabulary_ - 1) + " are allowed");
    }
  }
  for (const Token token : last) {
    if (counts_[static_cast<std::size_t>(token)]++ == 0) seen_.push_back(token);
  }
}

/// Logits after bias, penalties and bans: the given ones if there is nothing to do.
std::span<const float> Sampler::adjusted(std::span<const float> logits) {
  const SamplerOptions& o = options_;
  if (o.logit_bias.empty() && o.banned.empty() && seen_.empty()) return logits;
  adjusted_.assign(logits.begin(), logits.end());
  for (const auto& [token, bias] : o.logit_bias) adjusted_[static_cast<std::size_t>(token)] += bias;
  for (const Token token : seen_) {
    float& l = adjusted_[static_cast<std::size_t>(token)];
    l = l <= 0 ? l * o.repeat_penalty : l / o.repeat_penalty;
    const auto count = static_cast<float>(std::exchange(counts_[static_cast<std::size_t>(token)], 0));
    l -= count * o.frequency_penalty + o.presence_penalty;
  }
  seen_.clear();
  for (const Token token : o.banned) {
    float& l = adjusted_[static_cast<std::size_t>(token)];
    if (l < kInfinity) l = -kInfinity;  // anything else is an error of the model, which a ban must not hide
  }
  return adjusted_;
}

/// The k largest, in order; all of them, in order of id, if top-k is off or no less than the vocabulary.
void Sampler::keep_top_k(std::span<const float> logits) {
  candidates_.clear();
  const auto k = static_cast<std::size_t>(std::max(0, options_.top_k));
  if (k == 0 || k >= logits.size()) {
    for (std::size_t i = 0; i < logits.size(); ++i) {
      if (logits[i] != -kInfinity) candidates_.emplace_back(logits[i], static_cast<Token>(i));
    }
    return;
  }
  // A heap of the k best so far, the worst of them in front. Ids rise, so an equal logit that comes later is
  // no better, and nearly all logits are refused by one comparison, a block of them by that of its maximum.
  constexpr std::size_t kBlock = 32;
  float worst = -kInfinity;
  for (std::size_t begin = 0; begin < logits.size(); begin += kBlock) {
    const std::size_t end = std::min(begin + kBlock, logits.size());
    if (end - begin == kBlock) {
      std::array<float, 8> most;
      most.fill(-kInfinity);
      for (std::size_t i = begin; i < end; i += most.size()) {
        for (std::size_t lane = 0; lane < most.size(); ++lane) {
          most[lane] = logits[i + lane] > most[lane] ? logits[i + lane] : most[lane];
        }
      }
      if (!(*std::max_element(most.begin(), most.end()) > worst)) continue;
    }
    for (std::size_t i = begin; i < end; ++i) {
      if (!(logits[i] > worst)) continue;
      if (candidates_.size() == k) {
        std::pop_heap(candidates_.begin(), candidates_.end(), before);
        candidates_.pop_back();
      }
      candidates_.emplace_back(logits[i], static_cast<Token>(i));
      std::push_heap(candidates_.begin(), candidates_.end(), before);
      if (candidates_.size() == k) worst = candidates_.front().first;
    }
  }
  std::sort(candidates_.begin(), candidates_.end(), before);
}

/// The shortest beginning of the order whose probability is at least p.
void Sampler::keep_top_p() {
  if (options_.top_p >= 1) return;
  const float maximum = std::min_element(candidates_.begin(), candidates_.end(), before)->first;
  const auto weight = [maximum](const Candidate& c) {
    return std::exp(static_cast<double>(c.first) - maximum);
  };
  double total = 0;
  for (const Candidate& c : candidates_) total += weight(c);
  // Few are needed as a rule, so the order is made a part at a time, each larger than the one before.
  const double enough = options_.top_p * total;
  double sum = 0;
  std::size_t kept = 0;
  for (std::size_t ordered = 0, part = 256; ordered < candidates_.size(); part *= 4) {
    const auto from = candidates_.begin() + static_cast<std::ptrdiff_t>(ordered);
    ordered = std::min(ordered + part, candidates_.size());
    const auto to = candidates_.begin() + static_cast<std::ptrdiff_t>(ordered);
    if (to != candidates_.end()) std::nth_element(from, to, candidates_.end(), before);
    std::sort(from, to, before);
    while (kept < ordered) {
      sum += weight(candidates_[kept++]);
      if (sum >= enough) {
        candidates_.resize(kept);
        return;
      }
    }
  }
}

void Sampler::keep_min_p() {
  if (options_.min_p <= 0) return;
  const float maximum = std::min_element(candidates_.begin(), candidates_.end(), before)->first;
  const double least = static_cast<double>(maximum) + std::log(static_cast<double>(options_.min_p));
  std::erase_if(candidates_, [least](const Candidate& c) { return static_cast<double>(c.first) < least; });
}

Token Sampler::draw(std::uint64_t position) const {
  const float maximum = std::min_element(candidates_.begin(), candidates_.end(), before)->first;
  const auto weight = [this, maximum](const Candidate& c) {
    return std::exp((static_cast<double>(c.first) - maximum) / options_.temperature);
  };
  double total = 0;
  for (const Candidate& c : candidates_) total += weight(c);
  const double target = uniform(options_.seed, position) * total;
  double sum = 0;
  Token drawn = -1;
  for (const Candidate& c : candidates_) {
    const double w = weight(c);
    if (w == 0) continue;
    sum += w;
    drawn = c.second;
    if (sum > target) break;
  }
  return drawn;  // the last one with a weight, should rounding have left the sum at the target
}

Token Sampler::sample(std::span<const float> logits, std::span<const Token> history, std::uint64_t position) {
  if (logits.size() != static_cast<std::size_t>(vocabulary_)) {
    throw std::invalid_argument(std::to_string(logits.size()) + " logits; the vocabulary has " +
                                std::to_string(vocabulary_) + " tokens");
  }
  collect_history(history);
  const std::span<const float> adjusted_logits = adjusted(logits);
  const float maximum = checked_maximum(adjusted_logits);
  if (draws_largest()) {
    const auto at = std::find(adjusted_logits.begin(), adjusted_logits.end(), maximum);
    return static_cast<Token>(at - adjusted_logits.begin());
  }
  keep_top_k(adjusted_logits);
  keep_top_p();
  keep_min_p();
  return draw(position);
}

}  // namespace ladder::qwen
