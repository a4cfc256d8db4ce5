// attention_f32 against a float64 softmax: contexts around the strips and warps, grouped heads, scores that
// would overflow an exponential, and the same bits in one pass and token by token.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "harness/device/doctest_main.hpp"
#include "harness/experiment/check.hpp"
#include "kernels/attention/attention_f32.cuh"
#include "kernels/attention/attention_reference.hpp"

using namespace ladder;

namespace {

template <class KV>
KV from_float(float v) {
  if constexpr (sizeof(KV) == sizeof(float)) {
    return v;
  } else {
    return __float2half_rn(v);
  }
}
double as_double(float v) { return v; }
double as_double(__half v) { return __half2float(v); }

/// Queries for positions first .. first+nt-1 and caches for first+nt positions.
template <class KV>
struct Problem {
  HeadShape s;
  int nt, first;
  std::vector<float> q;
  std::vector<KV> keys, values;

  /// @param key_bias added to every element of every key: large scores, nearly equal
  Problem(HeadShape shape, int tokens, int first_position, float q_size, float key_bias, unsigned seed)
      : s(shape), nt(tokens), first(first_position) {
    std::mt19937 generator(seed);
    std::uniform_real_distribution<float> d(-1.0f, 1.0f);
    q.resize(static_cast<std::size_t>(nt * s.q_length()));
    for (float& x : q) x = q_size * (d(generator) + (key_bias != 0 ? 1.0f : 0.0f));
    const auto n = static_cast<std::size_t>((first + nt) * s.kv_length());
    for (std::size_t i = 0; i < n; ++i) {
      keys.push_back(from_float<KV>(d(generator) + key_bias));
      values.push_back(from_float<KV>(d(generator) + 0.25f));
    }
  }

  /// Launches for tokens t0 .. t0+count-1. [count][heads][head_dim]
  std::vector<float> run(int t0, int count) const {
    Stream stream;
    // Exact sizes: a row that is read too many is a fault of its own.
    const auto rows = static_cast<std::size_t>((first + t0 + count) * s.kv_length());
    GuardedBuffer<KV> dk(rows, "keys"), dv(rows, "values");
    dk.upload(std::span(keys).first(rows));
    dv.upload(std::span(values).first(rows));
    const auto n = static_cast<std::size_t>(count * s.q_length());
    GuardedBuffer<float> dq(n, "q"), out(n, "out");
    dq.upload(std::span(q).subspan(static_cast<std::size_t>(t0 * s.q_length()), n));
    const int at[] = {first + t0};
    Buffer<int> position(1, "position");
    position.upload(at);
    const Status status =
        launch_attention_f32(dq.data(), dk.data(), dv.data(), out.data(), count, position.data(), s, stream);
    REQUIRE_MESSAGE(status.ok(), status.message());
    stream.synchronize();
    std::vector<float> host(n);
    CHECK(out.download(host));
    return host;
  }

  /// The first element of `out` that is wrong; empty when there is none. `*largest_score` is set.
  std::string compare(const std::vector<float>& out, double* largest_score) const {
    *largest_score = 0;
    for (int t = 0; t < nt; ++t) {
      for (int h = 0; h < s.heads; ++h) {
        const int positions = first + t + 1, g = h / (s.heads / s.kv_heads);
        const auto at = static_cast<std::size_t>(t * s.q_length() + h * s.head_dim);
        const auto length = static_cast<std::size_t>(s.head_dim);
        std::vector<double> query(length), terms(length);
        for (std::size_t i = 0; i < length; ++i) query[i] = q[at + i], terms[i] = std::fabs(query[i]);
        const auto element = [&](const std::vector<KV>& cache, int p, int i) {
          return as_double(cache[static_cast<std::size_t>(p * s.kv_length() + g * s.head_dim + i)]);
        };
        const AttentionRow row = attention_row(
            query, terms, positions, [&](int p, int i) { return element(keys, p, i); },
            [&](int p, int i) { return element(values, p, i); });
        *largest_score = std::max(*largest_score, row.score);
        const std::string wrong =
            compare_row(std::span(out).subspan(at, length), row, attention_f32_bound(row, positions));
        if (!wrong.empty()) return "token " + std::to_string(t) + " head " + std::to_string(h) + wrong;
      }
    }
    return "";
  }
};

template <class KV>
void check(HeadShape s, int nt, int first, float q_size, float key_bias, double expected_score = 0) {
  CAPTURE(s.heads);
  CAPTURE(s.head_dim);
  CAPTURE(nt);
  CAPTURE(first);
  const Problem<KV> problem(s, nt, first, q_size, key_bias, 11);
  double largest = 0;
  const std::string found = problem.compare(problem.run(0, nt), &largest);
  CHECK_MESSAGE(found.empty(), found);
  CHECK(largest >= expected_score);
}

}  // namespace

TEST_CASE("contexts around strips and warps, one token") {
  // A warp has four positions of 64 elements at a time, a block 64, and 256 under way.
  for (const int context : {1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 257}) {
    check<float>({4, 2, 64}, 1, context - 1, 2.0f, 0.0f);
    check<__half>({4, 2, 64}, 1, context - 1, 2.0f, 0.0f);
  }
}

TEST_CASE("head sizes and groups") {
  for (const int head_dim : {2, 6, 8, 24, 32, 62, 64, 66, 72, 128, 130, 248, 256}) {
    check<float>({3, 1, head_dim}, 2, 36, 2.0f, 0.0f);
    check<__half>({2, 2, head_dim}, 2, 36, 2.0f, 0.0f);
  }
  check<__half>({14, 2, 64}, 3, 10, 2.0f, 0.0f);
  check<__half>({28, 4, 128}, 1, 40, 2.0f, 0.0f);
}

TEST_CASE("a prompt: every token sees itself and what came before") {
  check<float>({2, 1, 64}, 37, 0, 2.0f, 0.0f);
  check<__half>({2, 1, 32}, 9, 30, 2.0f, 0.0f);
}

TEST_CASE("scores of ten thousand do not overflow") {
  check<float>({2, 1, 64}, 1, 256, 30.0f, 50.0f, 1e4);
  check<__half>({2, 1, 64}, 3, 40, 30.0f, 50.0f, 1e4);
}

TEST_CASE("one token takes almost all the weight") { check<float>({2, 1, 64}, 1, 99, 200.0f, 0.0f, 100); }

TEST_CASE("a token's result is the same bits alone and in company") {
  const Problem<__half> problem({4, 2, 64}, 34, 5, 2.0f, 0.0f, 3);
  const std::vector<float> together = problem.run(0, problem.nt);
  const auto row = static_cast<std::size_t>(problem.s.q_length());
  for (int t = 0; t < problem.nt; ++t) {
    const std::vector<float> alone = problem.run(t, 1);
    CAPTURE(t);
    CHECK(std::memcmp(alone.data(), together.data() + static_cast<std::size_t>(t) * row,
                      row * sizeof(float)) == 0);
  }
}

TEST_CASE("the comparison rejects a cache that is one position off, and one too short") {
  Problem<float> problem({2, 1, 32}, 1, 40, 2.0f, 0.0f, 5);
  double largest = 0;
  std::vector<float> out = problem.run(0, 1);
  CHECK(problem.compare(out, &largest).empty());
  problem.first = 39;  // the answer for 40 positions is not that for 41
  CHECK(!problem.compare(out, &largest).empty());
  problem.first = 40;
  std::rotate(problem.values.begin(), problem.values.begin() + problem.s.kv_length(), problem.values.end());
  CHECK(!problem.compare(out, &largest).empty());
  out[0] = std::nanf("");
  CHECK(!problem.compare(out, &largest).empty());
}

TEST_CASE("what the kernel cannot take is refused with the reason") {
  Stream stream;
  const float* none = nullptr;
  float* out = nullptr;
  const int* first = nullptr;
  const auto refusal = [&](int nt, HeadShape s) {
    return launch_attention_f32(none, none, none, out, nt, first, s, stream).message();
  };
  CHECK(refusal(1, {4, 3, 64}).find("multiple of kv_heads, not 4 of 3") != std::string::npos);
  CHECK(refusal(1, {4, 2, 63}).find("even and at most 256, not 63") != std::string::npos);
  CHECK(refusal(1, {4, 2, 258}).find("even and at most 256, not 258") != std::string::npos);
  CHECK(refusal(70000, {4, 2, 64}).find("nt must be 1 to 65535") != std::string::npos);
  Buffer<float> odd(8, "odd");
  CHECK(launch_attention_f32(odd.data() + 1, none, none, out, 1, first, {4, 2, 64}, stream)
            .message()
            .find("multiple of 16 bytes") != std::string::npos);
}
