// Tests of the sampler: rules with examples worked out by hand, and random logits against a naive
// implementation.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "chapters/09-qwen/sampler.hpp"

using namespace ladder;
using namespace ladder::qwen;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

using Logits = std::vector<float>;

/// Everything off but the draw at temperature 1.
SamplerOptions plain() {
  SamplerOptions o;
  o.temperature = 1;
  o.top_k = 0;
  o.top_p = 1;
  o.min_p = 0;
  return o;
}

SamplerOptions greedy() {
  SamplerOptions o = plain();
  o.temperature = 0;
  return o;
}

Token sample(const SamplerOptions& options, const Logits& logits, const std::vector<Token>& history = {},
             std::uint64_t position = 0) {
  return Sampler(options, static_cast<int>(logits.size())).sample(logits, history, position);
}

/// The tokens that come up in many draws: those that the rules keep, if none of them is improbable.
std::set<Token> drawn(const SamplerOptions& options, const Logits& logits,
                      const std::vector<Token>& history = {}) {
  Sampler sampler(options, static_cast<int>(logits.size()));
  std::set<Token> seen;
  for (std::uint64_t position = 0; position < 3000; ++position)
    seen.insert(sampler.sample(logits, history, position));
  return seen;
}

/// Logits of given probabilities.
Logits of_probabilities(const std::vector<double>& p) {
  Logits logits;
  for (const double x : p) logits.push_back(static_cast<float>(std::log(x)));
  return logits;
}

/// What the header says, done in the plainest way: the order of all tokens, and then one rule after another.
Token naive(const SamplerOptions& o, Logits logits, const std::vector<Token>& history,
            std::uint64_t position) {
  for (const auto& [token, bias] : o.logit_bias) logits[static_cast<std::size_t>(token)] += bias;
  std::map<Token, int> counts;
  const std::size_t n = history.size();
  const std::size_t window =
      o.penalty_last_n < 0 ? n : std::min(n, static_cast<std::size_t>(o.penalty_last_n));
  for (std::size_t i = n - window; i < n; ++i) ++counts[history[i]];
  for (const auto& [token, count] : counts) {
    float& l = logits[static_cast<std::size_t>(token)];
    l = l <= 0 ? l * o.repeat_penalty : l / o.repeat_penalty;
    l -= static_cast<float>(count) * o.frequency_penalty + o.presence_penalty;
  }
  for (const Token token : o.banned) logits[static_cast<std::size_t>(token)] = -kInfinity;
  std::vector<Token> order(logits.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<Token>(i);
  const auto logit = [&](Token t) { return static_cast<double>(logits[static_cast<std::size_t>(t)]); };
  std::stable_sort(order.begin(), order.end(), [&](Token a, Token b) { return logit(a) > logit(b); });
  if (o.temperature <= 0) return order[0];
  const double most = logit(order[0]);
  std::erase_if(order, [&](Token t) { return std::isinf(logit(t)); });
  if (o.top_k > 0 && order.size() > static_cast<std::size_t>(o.top_k))
    order.resize(static_cast<std::size_t>(o.top_k));
  if (o.top_p < 1) {
    double total = 0, sum = 0;
    for (const Token t : order) total += std::exp(logit(t) - most);
    std::size_t kept = 0;
    do sum += std::exp(logit(order[kept++]) - most);
    while (kept < order.size() && sum / total < o.top_p);
    order.resize(kept);
  }
  if (o.min_p > 0) std::erase_if(order, [&](Token t) { return std::exp(logit(t) - most) < o.min_p; });
  // Where nothing asked for the order of logits, the draw is in order of id.
  const bool no_top_k = o.top_k <= 0 || static_cast<std::size_t>(o.top_k) >= logits.size();
  if (no_top_k && o.top_p >= 1) std::sort(order.begin(), order.end());
  double total = 0, sum = 0;
  for (const Token t : order) total += std::exp((logit(t) - most) / o.temperature);
  const double target = uniform(o.seed, position) * total;
  for (const Token t : order) {
    sum += std::exp((logit(t) - most) / o.temperature);
    if (sum > target) return t;
  }
  return order.back();
}

template <class Error, class Action>
std::string error_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("greedy: the largest, the lowest id on ties") {
  CHECK(sample(greedy(), {1, 3, 2}) == 1);
  CHECK(sample(greedy(), {2, 3, 3, 3}) == 1);
  CHECK(sample(greedy(), {-5, -2, -kInfinity}) == 1);
  CHECK(sample(greedy(), {-kInfinity, 0}) == 1);
  CHECK(sample(greedy(), {7}) == 0);
  CHECK(sample(greedy(), {-0.0f, 0.0f}) == 0);
  SamplerOptions o = plain();
  o.temperature = -1;
  CHECK(sample(o, {1, 3, 2}) == 1);
  o = plain();
  o.top_k = 1;  // one candidate: the same
  CHECK(sample(o, {2, 3, 3}, {}, 17) == 1);
  for (const std::size_t at : {0u, 7u, 8u, 30u, 31u, 32u, 63u, 64u, 99u}) {  // wherever it stands
    Logits logits(100, 1);
    logits[at] = 2;
    CHECK(sample(greedy(), logits) == static_cast<Token>(at));
  }
}

TEST_CASE("top-k: exactly k, ties to the lowest ids") {
  SamplerOptions o = plain();
  o.top_k = 2;
  CHECK(drawn(o, {1, 3, 2, 3}) == std::set<Token>{1, 3});
  CHECK(drawn(o, {1, 1, 1, 1}) == std::set<Token>{0, 1});
  CHECK(drawn(o, {1, 2, 1, 1}) == std::set<Token>{0, 1});
  o.top_k = 3;
  CHECK(drawn(o, {0, 1, 1, 1, 1}) == std::set<Token>{1, 2, 3});
  CHECK(drawn(o, {0, -kInfinity, -kInfinity, 0}) == std::set<Token>{0, 3});
  for (const int off : {0, -1, 4, 9}) {
    o.top_k = off;
    CHECK(drawn(o, {1, 1, 1, 1}) == std::set<Token>{0, 1, 2, 3});
  }
  Logits many(1000, 0);
  for (const std::size_t i : {3u, 500u, 999u}) many[i] = 9;
  o.top_k = 3;
  CHECK(drawn(o, many) == std::set<Token>{3, 500, 999});
}

TEST_CASE("top-p: the shortest beginning that reaches p, at least one") {
  SamplerOptions o = plain();
  const Logits logits = of_probabilities({0.1, 0.5, 0.15, 0.25});
  o.top_p = 0.49f;
  CHECK(drawn(o, logits) == std::set<Token>{1});
  o.top_p = 0.51f;
  CHECK(drawn(o, logits) == std::set<Token>{1, 3});
  o.top_p = 0.74f;
  CHECK(drawn(o, logits) == std::set<Token>{1, 3});
  o.top_p = 0.76f;
  CHECK(drawn(o, logits) == std::set<Token>{1, 2, 3});
  o.top_p = 0.91f;
  CHECK(drawn(o, logits) == std::set<Token>{0, 1, 2, 3});
  o.top_p = 0;
  CHECK(drawn(o, logits) == std::set<Token>{1});
  // Of four equal ones half the probability is exactly two, those with the lowest ids.
  o.top_p = 0.5f;
  CHECK(drawn(o, {0, 0, 0, 0}) == std::set<Token>{0, 1});
  // Probabilities are those after top-k: 2/3 and 1/3 of the two that are left.
  o.top_k = 2;
  o.top_p = 0.6f;
  CHECK(drawn(o, logits) == std::set<Token>{1});
  o.top_p = 0.7f;
  CHECK(drawn(o, logits) == std::set<Token>{1, 3});
}

TEST_CASE("min-p: relative to the most probable") {
  SamplerOptions o = plain();
  const Logits logits = of_probabilities({0.1, 0.5, 0.15, 0.25});
  o.min_p = 0.19f;  // of 0.5: 0.095
  CHECK(drawn(o, logits) == std::set<Token>{0, 1, 2, 3});
  o.min_p = 0.21f;  // 0.105
  CHECK(drawn(o, logits) == std::set<Token>{1, 2, 3});
  o.min_p = 0.49f;  // 0.245
  CHECK(drawn(o, logits) == std::set<Token>{1, 3});
  o.min_p = 1;
  CHECK(drawn(o, logits) == std::set<Token>{1});
  CHECK(drawn(o, {2, 2, 1}) == std::set<Token>{0, 1});
  // It looks at logits before the temperature.
  o.min_p = 0.49f;
  o.temperature = 5;
  CHECK(drawn(o, logits) == std::set<Token>{1, 3});
}

TEST_CASE("penalties: repeat first, then frequency and presence") {
  SamplerOptions o = greedy();
  o.repeat_penalty = 2;
  CHECK(sample(o, {4, 3}, {0}) == 1);  // 4 / 2 = 2 < 3
  CHECK(sample(o, {4, 1.9f}, {0}) == 0);
  CHECK(sample(o, {-1, -1.5f}, {0}) == 1);  // -1 * 2 = -2 < -1.5
  CHECK(sample(o, {-1, -2.5f}, {0}) == 0);
  CHECK(sample(o, {4, 1.9f}, {0, 0, 0}) == 0);  // once, however often the token stands there
  o = greedy();
  o.presence_penalty = 1;
  CHECK(sample(o, {4, 3.5f}, {0}) == 1);
  CHECK(sample(o, {4, 2.5f}, {0, 0, 0}) == 0);
  o = greedy();
  o.frequency_penalty = 1;
  CHECK(sample(o, {4, 2.5f}, {0}) == 0);
  CHECK(sample(o, {4, 2.5f}, {0, 0}) == 1);
  // 4 / 2 - (1 * 0.25 + 0.5) = 1.25. The other way round it would be (4 - 0.75) / 2 = 1.625.
  o.repeat_penalty = 2;
  o.frequency_penalty = 0.25f;
  o.presence_penalty = 0.5f;
  CHECK(sample(o, {4, 1.3f}, {0}) == 1);
  CHECK(sample(o, {4, 1.2f}, {0}) == 0);
  // Only the last N.
  o = greedy();
  o.presence_penalty = 1;
  o.penalty_last_n = 2;
  CHECK(sample(o, {4, 3.5f, 0}, {0, 2, 2}) == 0);
  CHECK(sample(o, {4, 3.5f, 0}, {2, 0, 2}) == 1);
  o.penalty_last_n = 0;
  CHECK(sample(o, {4, 3.5f, 0}, {0, 0, 0}) == 0);
  o.penalty_last_n = -1;
  std::vector<Token> long_history(200, 2);
  long_history[0] = 0;
  CHECK(sample(o, {4, 3.5f, 0}, long_history) == 1);
  o.penalty_last_n = 64;
  CHECK(sample(o, {4, 3.5f, 0}, long_history) == 0);
}

TEST_CASE("penalties do not linger from one call to the next") {
  SamplerOptions o = greedy();
  o.frequency_penalty = 1;
  Sampler sampler(o, 3);
  const Logits logits{4, 3.5f, 0};
  const std::vector<Token> once{0}, none;
  for (int i = 0; i < 3; ++i) {
    CHECK(sampler.sample(logits, once, 0) == 1);
    CHECK(sampler.sample(logits, none, 0) == 0);
  }
  const std::vector<Token> bad{0, 3};
  CHECK_THROWS_AS((void)sampler.sample(logits, bad, 0), std::invalid_argument);
  CHECK_THROWS_AS((void)sampler.sample(Logits{kNaN, 0, 0}, once, 0), NotANumber);
  CHECK(sampler.sample(logits, none, 0) == 0);
}

TEST_CASE("bias and bans come first") {
  SamplerOptions o = greedy();
  o.logit_bias = {{1, 2.0f}};
  CHECK(sample(o, {3, 2, 0}) == 1);
  o.logit_bias = {{1, 2.0f}, {0, -kInfinity}};
  CHECK(sample(o, {9, 0, 1}) == 1);
  o.logit_bias = {};
  o.banned = {0, 2};
  CHECK(sample(o, {9, 0, 8}) == 1);
  // Bias before the repeat penalty: (1 + 3) / 2 = 2; the other way round it would be 3.5.
  o = greedy();
  o.logit_bias = {{0, 3.0f}};
  o.repeat_penalty = 2;
  CHECK(sample(o, {1, 2.5f}, {0}) == 1);
  o = plain();
  o.banned = {1, 3};
  CHECK(drawn(o, {0, 9, 0, 9}) == std::set<Token>{0, 2});
}

TEST_CASE("NaN and infinity are errors, wherever they stand") {
  for (const std::size_t size : {1u, 3u, 8u, 17u, 64u}) {
    for (std::size_t at = 0; at < size; ++at) {
      for (const SamplerOptions& o : {greedy(), plain(), SamplerOptions{}}) {
        Logits logits(size, 1);
        logits[at] = kNaN;
        const std::string message = error_of<NotANumber>([&] { (void)sample(o, logits); });
        CHECK(contains(message, "the logit of token " + std::to_string(at) + " is NaN"));
        logits[at] = kInfinity;
        CHECK(contains(error_of<NotANumber>([&] { (void)sample(o, logits); }), "+infinity"));
      }
    }
  }
  CHECK(contains(error_of<NotANumber>([] {
                   (void)sample(plain(), {-kInfinity, -kInfinity});
                 }),
                 "all logits"));
  SamplerOptions o = plain();
  o.banned = {0, 1};
  CHECK_THROWS_AS((void)sample(o, {1, 1}), NotANumber);
  CHECK_THROWS_AS((void)sample(o, {kNaN, 1, 1}), NotANumber);  // a ban does not hide it
  o.banned = {};
  o.repeat_penalty = 3;
  CHECK_THROWS_AS((void)sample(o, {kNaN, 1, 1}, {0}), NotANumber);
}

TEST_CASE("options and arguments that cannot be") {
  const auto refused = [](auto change) {
    SamplerOptions o;
    change(o);
    return error_of<std::invalid_argument>([&] { Sampler(o, 10); });
  };
  CHECK(refused([](SamplerOptions&) {}) == "");
  CHECK(contains(refused([](SamplerOptions& o) { o.temperature = kNaN; }), "temperature is nan"));
  CHECK(contains(refused([](SamplerOptions& o) { o.temperature = kInfinity; }), "temperature"));
  CHECK(contains(refused([](SamplerOptions& o) { o.top_p = kNaN; }), "top_p"));
  CHECK(contains(refused([](SamplerOptions& o) { o.top_p = -0.1f; }), "top_p"));
  CHECK(contains(refused([](SamplerOptions& o) { o.min_p = 1.5f; }), "min_p"));
  CHECK(contains(refused([](SamplerOptions& o) { o.min_p = kNaN; }), "min_p"));
  CHECK(contains(refused([](SamplerOptions& o) { o.repeat_penalty = 0; }), "repeat_penalty"));
  CHECK(contains(refused([](SamplerOptions& o) { o.repeat_penalty = kNaN; }), "repeat_penalty"));
  CHECK(contains(refused([](SamplerOptions& o) { o.presence_penalty = kInfinity; }), "presence_penalty"));
  CHECK(contains(refused([](SamplerOptions& o) { o.frequency_penalty = kNaN; }), "frequency_penalty"));
  CHECK(contains(refused([](SamplerOptions& o) { o.penalty_last_n = -2; }), "penalty_last_n is -2"));
  CHECK(contains(refused([](SamplerOptions& o) {
                   o.logit_bias = {{10, 1.0f}};
                 }),
                 "logit_bias names token 10"));
  CHECK(contains(refused([](SamplerOptions& o) { o.logit_bias = {{1, kNaN}}; }), "logit_bias"));
  CHECK(contains(refused([](SamplerOptions& o) { o.logit_bias = {{1, kInfinity}}; }), "logit_bias"));
  CHECK(contains(refused([](SamplerOptions& o) { o.banned = {-1}; }), "banned names token -1"));
  CHECK_THROWS_AS(Sampler({}, 0), std::invalid_argument);
  Sampler sampler({}, 3);
  CHECK_THROWS_AS((void)sampler.sample(Logits{1, 2}, {}, 0), std::invalid_argument);
}

TEST_CASE("Philox4x32-10: the known answers of its authors' library") {
  const auto same = [](const PhiloxWords& got, std::array<std::uint32_t, 4> want) {
    return std::equal(want.begin(), want.end(), got.word);
  };
  CHECK(same(philox4x32({{0, 0, 0, 0}}, 0, 0), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t kOnes = 0xffffffff;
  CHECK(same(philox4x32({{kOnes, kOnes, kOnes, kOnes}}, kOnes, kOnes),
             {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  CHECK(same(philox4x32({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0),
             {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST_CASE("a seed and a position always draw the same") {
  const Logits logits(1000, 0);
  SamplerOptions o = plain();
  o.seed = 1234567890123;
  Sampler one(o, 1000), two(o, 1000);
  std::vector<Token> forward, backward;
  for (std::uint64_t i = 0; i < 50; ++i) forward.push_back(one.sample(logits, {}, i));
  for (std::uint64_t i = 50; i-- > 0;) backward.insert(backward.begin(), two.sample(logits, {}, i));
  CHECK(forward == backward);
  o.seed += std::uint64_t{1} << 32;  // all of the seed counts, and all of the position
  Sampler other(o, 1000);
  int same = 0, far = 0;
  for (std::uint64_t i = 0; i < 50; ++i) {
    same += other.sample(logits, {}, i) == forward[i];
    far += one.sample(logits, {}, i + (std::uint64_t{1} << 32)) == forward[i];
  }
  CHECK(same < 5);
  CHECK(far < 5);
  for (std::uint64_t i = 0; i < 1000; ++i) {
    const double u = uniform(7, i);
    CHECK((u >= 0 && u < 1));
  }
}

TEST_CASE("what a device can draw is said, with what is added to logits") {
  SamplerOptions o;
  o.seed = 9;
  o.logit_bias = {{4, 1.5f}};
  o.banned = {2};
  const auto drawing = [&] { return Sampler(o, 100).drawing(); };
  REQUIRE(drawing().has_value());
  CHECK(drawing()->sample == SampleOptions{0.8f, 40, 0.95f, 0.05f, 9});
  std::vector<float> bias(100, 0.0f);
  bias[4] = 1.5f, bias[2] = -kInfinity;
  CHECK(drawing()->bias == bias);
  for (const int top_k : {0, -1, 65, 100}) {
    o.top_k = top_k;
    CHECK_FALSE(drawing().has_value());
  }
  o.top_k = 64;
  CHECK(drawing().has_value());
  CHECK_FALSE(Sampler(SamplerOptions(), 40).drawing().has_value());  // top-k 40 of 40
  o.repeat_penalty = 1.1f;
  CHECK_FALSE(drawing().has_value());
  o.repeat_penalty = 1;
  o.logit_bias.emplace_back(4, 0.5f);
  CHECK_FALSE(drawing().has_value());
  o.logit_bias.clear();
  o.banned.clear();
  CHECK(drawing()->bias.empty());
  for (const auto& [temperature, top_k] : {std::pair{0.0f, 0}, std::pair{0.7f, 1}}) {  // the largest
    o.temperature = temperature, o.top_k = top_k;
    REQUIRE(drawing().has_value());
    CHECK_FALSE(drawing()->sample.has_value());
  }
}

TEST_CASE("draws have the softmax's distribution") {
  // Chi-square over 9 tokens, so 8 degrees of freedom: above 26.12 in one of 1000 cases. The seed is fixed.
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 1);
  Logits logits(9);
  for (float& l : logits) l = normal(random);
  for (const float temperature : {1.0f, 0.5f, 2.0f}) {
    for (const int top_k : {0, 9}) {  // drawn in order of id, and of logit
      SamplerOptions o = plain();
      o.temperature = temperature;
      o.top_k = top_k;
      o.seed = 42;
      Sampler sampler(o, 9);
      constexpr int kDraws = 50000;
      std::vector<int> count(9);
      for (std::uint64_t i = 0; i < kDraws; ++i)
        ++count[static_cast<std::size_t>(sampler.sample(logits, {}, i))];
      double total = 0, chi_square = 0;
      for (const float l : logits) total += std::exp(static_cast<double>(l) / temperature);
      for (std::size_t i = 0; i < 9; ++i) {
        const double expected = kDraws * std::exp(static_cast<double>(logits[i]) / temperature) / total;
        chi_square += (count[i] - expected) * (count[i] - expected) / expected;
      }
      CAPTURE(temperature);
      CAPTURE(top_k);
      CHECK(chi_square < 26.12);
    }
  }
}

TEST_CASE("extreme logits and temperatures") {
  SamplerOptions o = plain();
  o.temperature = 1e-30f;
  CHECK(drawn(o, {1, 1.0001f, 0}) == std::set<Token>{1});
  o.temperature = 1;
  CHECK(drawn(o, {3e38f, -3e38f}) == std::set<Token>{0});
  CHECK(drawn(o, {-3e38f, -3e38f, -kInfinity}) == std::set<Token>{0, 1});
  o.temperature = 1e30f;
  CHECK(drawn(o, {100, -100, -kInfinity}) == std::set<Token>{0, 1});
}

TEST_CASE("random logits: as the naive implementation") {
  std::mt19937 random(6);
  const auto pick = [&](std::initializer_list<float> values) {
    return values.begin()[random() % values.size()];
  };
  int differ = 0, trials = 0;
  for (int i = 0; i < 4000; ++i) {
    const std::size_t size = 1 + random() % (i % 20 == 0 ? 3000 : 80);
    SamplerOptions o;
    o.temperature = pick({0, 0.5f, 0.8f, 1, 1.7f});
    o.top_k = static_cast<int>(pick({0, 1, 2, 5, 40, 100}));
    o.top_p = pick({0, 0.3f, 0.8f, 0.95f, 1});
    o.min_p = pick({0, 0.05f, 0.3f});
    o.repeat_penalty = pick({1, 1, 1.1f, 2});
    o.presence_penalty = pick({0, 0, 0.5f, -1});
    o.frequency_penalty = pick({0, 0, 0.25f});
    o.penalty_last_n = static_cast<int>(pick({-1, 0, 5, 64}));
    o.seed = random();
    if (random() % 4 == 0) o.logit_bias = {{static_cast<Token>(random() % size), pick({-kInfinity, 3, -2})}};
    if (random() % 4 == 0) o.banned = {static_cast<Token>(random() % size)};
    // Few different values, so that there are many ties.
    const bool ties = random() % 2 == 0;
    std::normal_distribution<float> normal(0, 3);
    Logits logits(size);
    for (float& l : logits)
      l = ties ? static_cast<float>(static_cast<int>(random() % 7) - 3) : normal(random);
    std::vector<Token> history(random() % 100);
    for (Token& t : history) t = static_cast<Token>(random() % size);
    const std::uint64_t position = random();
    Token got = -1;
    if (!error_of<NotANumber>([&] { got = sample(o, logits, history, position); }).empty())
      continue;  // all banned
    ++trials;
    differ += got != naive(o, logits, history, position);
  }
  CHECK(trials > 3800);
  CHECK(differ == 0);
}
