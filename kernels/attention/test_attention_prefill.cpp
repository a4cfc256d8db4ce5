// attention_prefill against a float64 softmax that is given the same rounded queries: ragged numbers of tokens, prompts
// that go on after a cache, grouped heads, scores of ten thousand, the same bits in one pass and token by token; and
// mistakes that the comparison must see.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "harness/device/doctest_main.hpp"
#include "harness/experiment/check.hpp"
#include "kernels/attention/attention_prefill.cuh"
#include "kernels/attention/attention_reference.hpp"

using namespace ladder;

namespace {

/// Queries for positions first .. first+nt-1 and caches for first+nt positions.
struct Problem {
  HeadShape s;
  int nt, first;
  std::vector<float> q;
  std::vector<__half> keys, values;

  Problem(HeadShape shape, int tokens, int first_position, float q_size, float key_bias, unsigned seed)
      : s(shape), nt(tokens), first(first_position) {
    std::mt19937 generator(seed);
    std::uniform_real_distribution<float> d(-1.0f, 1.0f);
    for (int i = 0; i < nt * s.q_length(); ++i)
      q.push_back(q_size * (d(generator) + (key_bias != 0 ? 1.0f : 0.0f)));
    for (int i = 0; i < (first + nt) * s.kv_length(); ++i) {
      keys.push_back(__float2half_rn(d(generator) + key_bias));
      values.push_back(__float2half_rn(d(generator) + 0.25f));
    }
  }

  /// Launches for tokens t0 .. t0+count-1, twice with a workspace. [count][heads][head_dim]
  std::vector<float> run(int t0, int count, bool divided = false) const {
    Stream stream;
    // Exact sizes: a row that is read too many is a fault of its own.
    const auto rows = static_cast<std::size_t>((first + t0 + count) * s.kv_length());
    GuardedBuffer<__half> dk(rows, "keys"), dv(rows, "values");
    dk.upload(std::span(keys).first(rows));
    dv.upload(std::span(values).first(rows));
    const auto n = static_cast<std::size_t>(count * s.q_length());
    GuardedBuffer<float> dq(n, "q"), out(n, "out");
    dq.upload(std::span(q).subspan(static_cast<std::size_t>(t0 * s.q_length()), n));
    const int at[] = {first + t0};
    Buffer<int> position(1, "position");
    position.upload(at);
    Buffer<unsigned char> workspace(divided ? attention_prefill_workspace(s, multiprocessor_count()) : 0,
                                    "workspace");
    if (divided) {
      workspace.fill_bytes(0xFF);
      workspace.upload(std::vector<unsigned char>(attention_prefill_detail::kCounters));
    }
    std::vector<float> host(n), before;
    for (int times = 0; times < (divided ? 2 : 1); ++times) {
      before = host;
      out.poison();
      const Status status = launch_attention_prefill(dq.data(), dk.data(), dv.data(), out.data(), count,
                                                     position.data(), s, stream, false, workspace.data());
      REQUIRE_MESSAGE(status.ok(), status.message());
      stream.synchronize();
      CHECK(out.download(host));
    }
    if (divided) CHECK(std::memcmp(before.data(), host.data(), n * sizeof(float)) == 0);
    return host;
  }

  /// The first element of `out` that is wrong; empty when there is none.
  std::string compare(const std::vector<float>& out, double* largest_score = nullptr) const {
    for (int t = 0; t < nt; ++t) {
      for (int h = 0; h < s.heads; ++h) {
        const int positions = first + t + 1, g = h / (s.heads / s.kv_heads);
        std::vector<double> query(static_cast<std::size_t>(s.head_dim)), terms(query.size());
        const auto at = static_cast<std::size_t>(t * s.q_length() + h * s.head_dim);
        for (std::size_t i = 0; i < query.size(); ++i) {
          query[i] = attention_prefill_query(q[at + i], s.head_dim);
          terms[i] = std::fabs(query[i]);
        }
        const auto element = [&](const std::vector<__half>& cache, int p, int i) {
          return static_cast<double>(
              __half2float(cache[static_cast<std::size_t>(p * s.kv_length() + g * s.head_dim + i)]));
        };
        const AttentionRow row = attention_row(
            query, terms, positions, [&](int p, int i) { return element(keys, p, i); },
            [&](int p, int i) { return element(values, p, i); });
        if (largest_score != nullptr) *largest_score = std::max(*largest_score, row.score);
        const std::string wrong = compare_row(std::span(out).subspan(at, query.size()), row,
                                              attention_prefill_bound(row, positions, s.head_dim));
        if (!wrong.empty()) return "token " + std::to_string(t) + " head " + std::to_string(h) + wrong;
      }
    }
    return "";
  }
};

void check(HeadShape s, int nt, int first, float q_size = 2.0f, float key_bias = 0.0f,
           double expected_score = 0, bool divided = false) {
  CAPTURE(s.heads);
  CAPTURE(s.head_dim);
  CAPTURE(nt);
  CAPTURE(first);
  const Problem problem(s, nt, first, q_size, key_bias, 11);
#if !defined(__CUDACC__)
  const emu::counting on;
#endif
  const std::vector<float> out = problem.run(0, nt, divided);
#if !defined(__CUDACC__)
  const auto& findings = emu::last_launch().findings;
  CHECK_MESSAGE(findings.empty(), (findings.empty() ? "" : findings.front().text));
  CHECK(emu::last_launch().total.shared_total().conflicts() == 0);
#endif
  double largest = 0;
  const std::string wrong = problem.compare(out, &largest);
  CHECK_MESSAGE(wrong.empty(), wrong);
  CHECK(largest >= expected_score);
}

}  // namespace

TEST_CASE("ragged numbers of tokens, with heads that do not divide a tile of rows") {
  for (const int nt : {1, 2, 7, 8, 9, 18, 19, 63, 64, 65}) check({7, 1, 64}, nt, 0);
  for (const int nt : {1, 17, 64}) check({6, 2, 128}, nt, 0);
}

TEST_CASE("a prompt that goes on after a cache") {
  for (const int first : {1, 62, 63, 64, 65, 127, 200}) check({2, 1, 64}, 5, first);
  check({4, 4, 128}, 33, 100);
}

TEST_CASE("heads of models") {
  check({14, 2, 64}, 21, 50);
  check({28, 4, 128}, 9, 70);
  check({40, 8, 128}, 3, 10);
  check({1, 1, 64}, 130, 0);
}

TEST_CASE("tiles divided along the positions") {
  for (const int first : {0, 255, 256, 600}) check({2, 1, 64}, 5, first, 2.0f, 0.0f, 0, true);
  for (const int nt : {1, 20}) check({14, 2, 64}, nt, 520, 2.0f, 0.0f, 0, true);
  check({7, 1, 128}, 11, 400, 2.0f, 0.0f, 0, true);
  check({2, 1, 64}, 40, 500, 30.0f, 50.0f, 1e4, true);
  CHECK(attention_prefill_pieces(1, {28, 4, 128}, 132) == 16);
  CHECK(attention_prefill_pieces(128, {28, 4, 128}, 132) == 4);
  CHECK(attention_prefill_pieces(512, {28, 4, 128}, 132) == 1);
  CHECK(attention_prefill_pieces(100000, {28, 4, 128}, 132) == 1);
}

TEST_CASE("scores of ten thousand do not overflow") { check({2, 1, 64}, 40, 90, 30.0f, 50.0f, 1e4); }

TEST_CASE("queries of any size") {
  for (const float size : {1e-30f, 1e-4f, 1e3f, 2e5f}) check({7, 1, 128}, 40, 30, size);
  check({2, 1, 64}, 40, 90, 1e5f, 3e3f, 1e8);
}

TEST_CASE("one token takes almost all the weight") { check({2, 1, 64}, 3, 99, 200.0f, 0.0f, 100); }

TEST_CASE("a token's result is the same bits alone and in company") {
  const Problem problem({4, 2, 64}, 70, 45, 2.0f, 0.0f, 3);
  const std::vector<float> together = problem.run(0, problem.nt);
  const auto row = static_cast<std::size_t>(problem.s.q_length());
  for (const int t : {0, 1, 17, 18, 19, 63, 64, 69}) {
    const std::vector<float> alone = problem.run(t, 1);
    CAPTURE(t);
    CHECK(std::memcmp(alone.data(), together.data() + static_cast<std::size_t>(t) * row,
                      row * sizeof(float)) == 0);
  }
}

TEST_CASE(
    "the comparison rejects a cache that is one position off, one too short, and a future that is seen") {
  Problem problem({2, 1, 64}, 6, 40, 2.0f, 0.0f, 5);
  std::vector<float> out = problem.run(0, 6);
  CHECK(problem.compare(out).empty());
  Problem other = problem;
  other.first = 39;  // the answer for 40 positions is not that for 41
  CHECK(!other.compare(out).empty());
  std::rotate(other.values.begin(), other.values.begin() + other.s.kv_length(), other.values.end());
  other.first = 40;
  CHECK(!other.compare(out).empty());
  // All tokens see the last one's positions.
  std::vector<float> seen(out.size());
  for (int t = 0; t < 6; ++t) {
    Problem alone = problem;
    alone.nt = 1, alone.first = 45;
    alone.q.assign(problem.q.begin() + t * problem.s.q_length(),
                   problem.q.begin() + (t + 1) * problem.s.q_length());
    const std::vector<float> one = alone.run(0, 1);
    std::copy(one.begin(), one.end(), seen.begin() + t * problem.s.q_length());
  }
  CHECK(!problem.compare(seen).empty());
  out[0] = std::nanf("");
  CHECK(!problem.compare(out).empty());
}

TEST_CASE("what the kernel cannot take is refused with the reason") {
  Stream stream;
  const __half* none = nullptr;
  float* out = nullptr;
  const int* first = nullptr;
  const auto refusal = [&](int nt, HeadShape s) {
    return launch_attention_prefill(out, none, none, out, nt, first, s, stream).message();
  };
  CHECK(refusal(1, {4, 3, 64}).find("multiple of kv_heads, not 4 of 3") != std::string::npos);
  CHECK(refusal(1, {4, 2, 96}).find("64 or 128, not 96; attention_f32 takes others") != std::string::npos);
  CHECK(refusal(0, {4, 2, 64}).find("nt must be at least 1") != std::string::npos);
  CHECK(refusal(1 << 29, {4, 2, 64}).find("nt * heads at most") != std::string::npos);
  Buffer<float> odd(8, "odd");
  CHECK(launch_attention_prefill(odd.data() + 1, none, none, out, 1, first, {4, 2, 64}, stream)
            .message()
            .find("multiple of 16 bytes") != std::string::npos);
}
