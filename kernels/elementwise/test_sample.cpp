// sample against a sampler that sorts: sizes around runs and blocks, ties, every option alone and together, what cannot be
// drawn, several rows, and the same workspace again.

#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "harness/device/doctest_main.hpp"
#include "harness/device/under_sanitizer.hpp"
#include "harness/experiment/check.hpp"
#include "kernels/elementwise/sample_reference.hpp"

using namespace ladder;

namespace {

struct Rows {
  int nt;
  long long n;
  Stream stream;
  Buffer<unsigned char> workspace;
  Buffer<int> position{1, "position"};

  Rows(int rows, long long length) : nt(rows), n(length), workspace(sample_workspace(rows), "workspace") {
    workspace.fill_bytes(0);
  }
  std::vector<int> run(const std::vector<float>& logits, const SampleOptions& o, int first) {
    GuardedBuffer<float> in(logits.size(), "logits");
    in.upload(logits);
    const std::array<int, 1> at = {first};
    position.upload(at);
    GuardedBuffer<int> ids(static_cast<std::size_t>(nt), "ids");
    const Status status =
        launch_sample(in.data(), ids.data(), position.data(), o, nt, n, workspace.data(), stream);
    REQUIRE_MESSAGE(status.ok(), status.message());
    stream.synchronize();
    std::vector<int> out(static_cast<std::size_t>(nt));
    CHECK(ids.download(out));
    return out;
  }
  void check(const std::vector<float>& logits, const SampleOptions& o, int first) {
    const std::vector<int> got = run(logits, o, first);
    for (int t = 0; t < nt; ++t) {
      CAPTURE(n);
      CAPTURE(t);
      CAPTURE(first);
      CAPTURE(o.top_k);
      CAPTURE(o.top_p);
      CAPTURE(o.min_p);
      CAPTURE(o.temperature);
      CHECK(got[static_cast<std::size_t>(t)] ==
            sample_reference(logits.data() + t * n, n, o,
                             static_cast<std::uint64_t>(first) + static_cast<unsigned>(t)));
    }
  }
};

constexpr SampleOptions kPlain = {1.0f, 40, 1.0f, 0.0f, 7};

std::vector<float> logits_like_a_models(std::size_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> all;
  all.reserve(n);
  for (std::size_t i = 0; i < n; ++i) all.push_back(normal(generator));
  return all;
}

}  // namespace

TEST_CASE("sizes around runs and blocks; few values, so that many are equal") {
  std::mt19937 generator(1);
  for (const int n : {1, 2, 39, 40, 41, 255, 256, 257, 1024, 1025, 5000}) {
    Rows rows(2, n);
    for (const int values : {1, 3, 1000000}) {
      std::vector<float> logits;
      logits.reserve(static_cast<std::size_t>(2 * n));
      for (int i = 0; i < 2 * n; ++i)
        logits.push_back(static_cast<float>(static_cast<int>(generator() % static_cast<unsigned>(values))) /
                         7);
      rows.check(logits, kPlain, n);
    }
  }
}

TEST_CASE("every number of candidates, and all options") {
  Rows rows(1, 3000);
  const std::vector<float> logits = logits_like_a_models(3000, 2);
  for (int i = 0; i < 48; ++i) {
    SampleOptions o = kPlain;
    o.top_k = i < 4 ? std::array{1, 2, 63, 64}[static_cast<std::size_t>(i)] : 1 + 17 * i % 64;
    o.top_p = i % 3 == 0 ? 1.0f : 0.2f * static_cast<float>(i % 5);
    o.min_p = i % 4 == 0 ? 0.0f : 0.1f * static_cast<float>(i % 7);
    o.temperature = 0.1f + 0.3f * static_cast<float>(i % 6);
    rows.check(logits, o, 1000 * i);
  }
}

TEST_CASE("the largest all with one thread, one block, or one in each block") {
  for (const int stride : sampled<int>({1, 256, 1024}, 2)) {
    Rows rows(1, 70000);
    std::vector<float> logits(70000, -1.0f);
    for (int i = 0; i < 60; ++i)
      logits[static_cast<std::size_t>(3 + i * stride)] = 0.01f * static_cast<float>(i);
    SampleOptions o = kPlain;
    o.top_k = 64;
    for (const int at : sampled<int>({0, 1, 2}, 3)) rows.check(logits, o, at);
  }
}

TEST_CASE("more logits than threads keep at once") {
  Rows rows(1, 300001);
  const std::vector<float> logits = logits_like_a_models(300001, 6);
  for (const int at : {0, 1, 2}) rows.check(logits, kPlain, at);
}

TEST_CASE("signs, zeros and infinities; and what nothing can be drawn from") {
  Rows rows(1, 1100);
  std::vector<float> logits(1100, -INFINITY);
  CHECK(rows.run(logits, kPlain, 0)[0] == -1);
  logits[700] = -1e30f;
  CHECK(rows.run(logits, kPlain, 0)[0] == 700);
  logits[5] = -0.0f, logits[6] = 0.0f;
  for (int i = 0; i < 8; ++i) rows.check(logits, kPlain, i);
  logits[900] = INFINITY;
  CHECK(rows.run(logits, kPlain, 0)[0] == -1);
  logits[900] = std::nanf("");
  CHECK(rows.run(logits, kPlain, 0)[0] == -1);
  CHECK(rows.run(std::vector<float>(1100, -std::nanf("")), kPlain, 0)[0] == -1);
  logits[900] = 3.0f;  // the workspace is as good as new
  rows.check(logits, kPlain, 1);
}

TEST_CASE("a bias, and a step that the next pass reads") {
  constexpr int kN = 3000;
  Rows rows(1, kN);
  const std::vector<float> logits = logits_like_a_models(kN, 4);
  std::vector<float> bias = logits_like_a_models(kN, 5), biased = logits;
  for (int i = 0; i < kN; i += 3) bias[static_cast<std::size_t>(i)] = -INFINITY;
  for (std::size_t i = 0; i < biased.size(); ++i) biased[i] += bias[i];
  Buffer<float> in(kN), added(kN);
  in.upload(logits);
  added.upload(bias);
  GuardedBuffer<int> step(2, "step"), drawn(12, "drawn"), id(1, "id");
  const std::vector<int> before = {6, 1};
  step.upload(before);
  std::vector<int> expected(12, -7), got(12), one(1), next(2);
  drawn.upload(expected);
  for (int position = 7; position < 12; ++position) {
    const Status status = launch_sample(in.data(), id.data(), nullptr, kPlain, 1, kN, rows.workspace.data(),
                                        rows.stream, false, added.data(), {step.data(), drawn.data()});
    REQUIRE_MESSAGE(status.ok(), status.message());
    rows.stream.synchronize();
    const int token = sample_reference(biased.data(), kN, kPlain, static_cast<std::uint64_t>(position));
    CHECK(token % 3 != 0);
    expected[static_cast<std::size_t>(position)] = token;
    CHECK(id.download(one));
    CHECK(one[0] == token);
    CHECK(step.download(next));
    CHECK(next == std::vector<int>{position, token});
  }
  CHECK(drawn.download(got));
  CHECK(got == expected);
}

TEST_CASE("draws have the softmax's distribution") {
  // Chi-square over 5 tokens, so 4 degrees of freedom: above 18.47 in one of 1000 cases. The seed is fixed.
  const std::vector<float> one = {0.3f, -0.5f, 1.0f, 0.0f, -2.0f};
  constexpr int kDraws = 1000;
  Rows rows(kDraws, 5);
  std::vector<float> logits;
  for (int t = 0; t < kDraws; ++t) logits.insert(logits.end(), one.begin(), one.end());
  std::array<double, 5> times{}, weights{};
  for (const int id : rows.run(logits, kPlain, 0)) times[static_cast<std::size_t>(id)] += 1;
  double total = 0, distance = 0;
  for (std::size_t i = 0; i < 5; ++i) total += weights[i] = std::exp(double{one[i]});
  for (std::size_t i = 0; i < 5; ++i) {
    const double expected = kDraws * weights[i] / total;
    distance += (times[i] - expected) * (times[i] - expected) / expected;
  }
  CHECK(distance < 18.47);
}

#if !defined(__CUDACC__)
TEST_CASE("blocks hand over in order") {
  Rows rows(2, 4100);
  const emu::counting on;
  rows.check(logits_like_a_models(8200, 3), kPlain, 0);
  CHECK(emu::last_launch().findings.empty());
}
#endif

TEST_CASE("what the kernel cannot do is refused with the reason") {
  Stream stream;
  const auto refused = [&](SampleOptions o, int nt, long long n) {
    return std::string(launch_sample(nullptr, nullptr, nullptr, o, nt, n, nullptr, stream).message());
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  CHECK(has(refused(kPlain, 1, 0), "n must be 1 to 2097152, not 0"));
  CHECK(has(refused(kPlain, 0, 5), "nt must be 1 to 65535, not 0"));
  SampleOptions o = kPlain;
  o.top_k = 65;
  CHECK(has(refused(o, 1, 5), "top_k must be 1 to 64, not 65"));
  int somewhere[2] = {};
  const Status two_rows = launch_sample(nullptr, nullptr, nullptr, kPlain, 2, 5, nullptr, stream, false,
                                        nullptr, {somewhere, somewhere});
  CHECK(has(two_rows.message(), "sample_token: only one row has a next step"));
  o = kPlain;
  o.temperature = 0;
  CHECK(has(refused(o, 1, 5), "temperature must be finite and above 0"));
  o.temperature = std::nanf("");
  CHECK(has(refused(o, 1, 5), "temperature must be finite and above 0"));
}
