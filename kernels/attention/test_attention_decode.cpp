// attention_decode against a float64 softmax over the caches it leaves behind: positions around tiles, pieces and the
// whole context, grouped heads, both caches, scores that need every bit of f32, one recording for all positions; and
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
#include "kernels/attention/attention_decode.cuh"
#include "kernels/attention/attention_f32.cuh"
#include "kernels/attention/attention_reference.hpp"

using namespace ladder;

namespace {

constexpr double kU = kUnitRoundoffF32;

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

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// What a launch leaves behind.
template <class KV>
struct Result {
  std::vector<float> out;
  std::vector<unsigned char> planes;
  std::vector<KV> keys, values;  // all rows
};

/// A layer's operands, on the host. Positions above the largest one are NaN.
template <class KV>
struct Problem {
  HeadShape s;
  int context;
  std::vector<float> q, k, v, cosines, sines;
  std::vector<KV> keys, values;

  Problem(HeadShape shape, int rows, float q_size, float key_bias, unsigned seed) : s(shape), context(rows) {
    std::mt19937 generator(seed);
    std::uniform_real_distribution<float> d(-1.0f, 1.0f);
    const auto fill = [&](std::vector<float>& to, int n, float size, float bias) {
      for (int i = 0; i < n; ++i) to.push_back(size * d(generator) + bias);
    };
    fill(q, s.q_length(), q_size, key_bias == 0 ? 0.0f : q_size);
    fill(k, s.kv_length(), 1.0f, key_bias);
    fill(v, s.kv_length(), 1.0f, 0.25f);
    for (int i = 0; i < context * s.head_dim / 2; ++i) {
      const float angle = key_bias == 0 ? 3.0f * d(generator) : 0.0f;
      cosines.push_back(std::cos(angle));
      sines.push_back(std::sin(angle));
    }
    for (int i = 0; i < context * s.kv_length(); ++i) {
      keys.push_back(from_float<KV>(d(generator) + key_bias));
      values.push_back(from_float<KV>(d(generator) + 0.25f));
    }
  }

  /// Rows below `position` are there, the others are poison; so is all that is written.
  Result<KV> run(int position, const AttentionDecodePlan* plan = nullptr, bool early = true) const {
    Stream stream;
    const auto rows = static_cast<std::size_t>(context * s.kv_length());
    const auto known = static_cast<std::size_t>(position * s.kv_length());
    GuardedBuffer<KV> dk(rows, "keys"), dv(rows, "values");
    dk.upload(std::span(keys).first(known));
    dv.upload(std::span(values).first(known));
    GuardedBuffer<float> dq(q.size(), "q"), new_k(k.size(), "k"), new_v(v.size(), "v"), out(q.size(), "out");
    dq.upload(q);
    new_k.upload(k);
    new_v.upload(v);
    Buffer<float> c(cosines.size(), "cosines"), d(sines.size(), "sines");
    c.upload(cosines);
    d.upload(sines);
    GuardedBuffer<unsigned char> planes(tile_acts::bytes(1, s.q_length()), "planes");
    const int sms = multiprocessor_count();
    const AttentionDecodePlan cut =
        plan != nullptr ? *plan : attention_decode_plan(s, context, sms, most_cluster_blocks());
    Buffer<unsigned char> workspace(attention_decode_workspace(s, cut), "workspace");
    workspace.fill_bytes(0xFF);
    std::vector<unsigned char> zeros(attention_decode_detail::counters_bytes(cut));
    workspace.upload(zeros);
    Buffer<int> at(1, "position");
    at.upload({{position}});
    AttentionDecode<KV> a;
    a.q = dq.data(), a.k = new_k.data(), a.v = new_v.data(), a.cosines = c.data(), a.sines = d.data();
    a.keys = dk.data(), a.values = dv.data(), a.position = at.data(), a.out = out.data(),
    a.planes = planes.data();
    a.workspace = workspace.data(), a.shape = s, a.context = context, a.early = early;
    Result<KV> r;
    for (int twice = 0; twice < 2; ++twice) {  // the counters are ready again after the first time
      out.poison();
      planes.poison();
      const Status status = launch_attention_decode(a, stream, false, cut);
      REQUIRE_MESSAGE(status.ok(), status.message());
      stream.synchronize();
      const std::vector<float> before = r.out;
      r.out.resize(q.size());
      CHECK(out.download(r.out));
      if (twice == 1) CHECK(same_bits(before, r.out));
    }
    r.planes.resize(planes.size());
    CHECK(planes.download(r.planes));
    r.keys.resize(rows);
    r.values.resize(rows);
    CHECK(dk.download(r.keys));
    CHECK(dv.download(r.values));
    return r;
  }

  double cosine(int position, int i) const {
    return cosines[static_cast<std::size_t>(position * s.head_dim / 2 + i)];
  }
  double sine(int position, int i) const {
    return sines[static_cast<std::size_t>(position * s.head_dim / 2 + i)];
  }

  /// A row's pair i of head `h`, rotated, and the magnitudes of its terms.
  struct Pair {
    double low, high, low_terms, high_terms;
  };
  Pair rotated(const std::vector<float>& x, int h, int i, int position) const {
    const double a = x[static_cast<std::size_t>(h * s.head_dim + i)];
    const double b = x[static_cast<std::size_t>(h * s.head_dim + i + s.head_dim / 2)];
    const double c = cosine(position, i), d = sine(position, i);
    return {a * c - b * d, b * c + a * d, std::fabs(a * c) + std::fabs(b * d),
            std::fabs(b * c) + std::fabs(a * d)};
  }

  /// What is wrong with the caches: rows below the position changed, the new row not the rotated one, rows above touched.
  std::string compare_caches(const Result<KV>& r, int position) const {
    const auto row = static_cast<std::size_t>(s.kv_length()), at = static_cast<std::size_t>(position) * row;
    if (std::memcmp(r.keys.data(), keys.data(), at * sizeof(KV)) != 0 ||
        std::memcmp(r.values.data(), values.data(), at * sizeof(KV)) != 0) {
      return "a row below the position changed";
    }
    for (std::size_t i = (at + row) * sizeof(KV); i < r.keys.size() * sizeof(KV); ++i) {
      if (reinterpret_cast<const unsigned char*>(r.keys.data())[i] != 0xFF ||
          reinterpret_cast<const unsigned char*>(r.values.data())[i] != 0xFF) {
        return "a row above the position was written";
      }
    }
    const double unit = sizeof(KV) == 2 ? std::ldexp(1.0, -11) : 0.0;
    for (int h = 0; h < s.kv_heads; ++h) {
      for (int i = 0; i < s.head_dim / 2; ++i) {
        const Pair p = rotated(k, h, i, position);
        const std::size_t to = at + static_cast<std::size_t>(h * s.head_dim + i);
        const double low = as_double(r.keys[to]),
                     high = as_double(r.keys[to + static_cast<std::size_t>(s.head_dim / 2)]);
        const auto off = [&](double got, double want, double terms) {
          return !(std::fabs(got - want) <=
                   (unit + 3 * kU) * std::fabs(want) + 3 * kU * terms + unit * 6.2e-5);
        };
        if (off(low, p.low, p.low_terms) || off(high, p.high, p.high_terms)) {
          return "new key, head " + std::to_string(h) + " pair " + std::to_string(i) + " is " +
                 std::to_string(low) + ", " + std::to_string(high) + ", expected " + std::to_string(p.low) +
                 ", " + std::to_string(p.high);
        }
      }
      for (int i = 0; i < s.head_dim; ++i) {
        const auto to = static_cast<std::size_t>(h * s.head_dim + i);
        const KV want = from_float<KV>(v[to]);
        if (as_double(want) != as_double(r.values[at + to]))
          return "new value, element " + std::to_string(to);
      }
    }
    return "";
  }

  /// The first output that is wrong; empty when there is none.
  std::string compare(const Result<KV>& r, int position, double* used = nullptr) const {
    const int positions = position + 1;
    for (int h = 0; h < s.heads; ++h) {
      const int g = h / (s.heads / s.kv_heads);
      std::vector<double> query(static_cast<std::size_t>(s.head_dim)), terms(query.size());
      for (int i = 0; i < s.head_dim / 2; ++i) {
        const Pair p = rotated(q, h, i, position);
        const auto at = static_cast<std::size_t>(i), half = static_cast<std::size_t>(s.head_dim / 2);
        query[at] = p.low, query[at + half] = p.high;
        terms[at] = p.low_terms, terms[at + half] = p.high_terms;
      }
      const auto element = [&](const std::vector<KV>& cache, int p, int i) {
        return as_double(cache[static_cast<std::size_t>(p * s.kv_length() + g * s.head_dim + i)]);
      };
      const AttentionRow row = attention_row(
          query, terms, positions, [&](int p, int i) { return element(r.keys, p, i); },
          [&](int p, int i) { return element(r.values, p, i); });
      const std::string wrong =
          compare_row(std::span(r.out).subspan(static_cast<std::size_t>(h * s.head_dim), query.size()), row,
                      attention_decode_bound(row, positions, s.head_dim), used);
      if (!wrong.empty()) return "head " + std::to_string(h) + wrong;
    }
    return "";
  }

  /// Whether the planes are those of the floats.
  bool planes_match(const Result<KV>& r) const {
    std::vector<BlockQ8Pad40> blocks(static_cast<std::size_t>(s.q_length() / 32));
    quantize_q8_pad40_row(r.out, blocks.data());
    return tile_acts::from_blocks(blocks.data(), 1, s.q_length()) == r.planes;
  }
};

template <class KV>
void check(const Problem<KV>& problem, int position, bool early = true) {
  CAPTURE(problem.s.heads);
  CAPTURE(problem.s.head_dim);
  CAPTURE(position);
  CAPTURE(sizeof(KV));
#if !defined(__CUDACC__)
  const emu::counting on;
#endif
  const Result<KV> r = problem.run(position, nullptr, early);
#if !defined(__CUDACC__)
  const auto& findings = emu::last_launch().findings;
  CHECK_MESSAGE(findings.empty(), (findings.empty() ? "" : findings.front().text));
#endif
  std::string wrong = problem.compare_caches(r, position);
  CHECK_MESSAGE(wrong.empty(), wrong);
  double used = 0;
  wrong = problem.compare(r, position, &used);
  CHECK_MESSAGE(wrong.empty(), wrong);
  CHECK(problem.planes_match(r));
}

}  // namespace

TEST_CASE("positions around tiles, one block and pieces, to the end of the context") {
  const Problem<__half> problem({14, 2, 64}, 700, 2.0f, 0.0f, 11);
  for (const int position :
       {0, 1, 3, 14, 15, 16, 17, 126, 127, 128, 129, 254, 255, 256, 257, 383, 384, 511, 512, 698, 699})
    check(problem, position);
}

TEST_CASE("head sizes and groups") {
  for (const HeadShape s : {HeadShape{28, 4, 128},
                            {12, 2, 128},
                            {16, 2, 128},
                            {1, 1, 64},
                            {3, 3, 128},
                            {5, 1, 64},
                            {16, 1, 64},
                            {9, 1, 128},
                            {22, 2, 64}}) {
    const Problem<__half> problem(s, 300, 2.0f, 0.0f, 5);
    check(problem, 40);
    check(problem, 290);
  }
}

TEST_CASE("an f32 cache") {
  for (const HeadShape s : {HeadShape{14, 2, 64}, {7, 1, 128}, {9, 1, 64}}) {
    const Problem<float> problem(s, 400, 2.0f, 0.0f, 7);
    for (const int position : {0, 16, 130, 255, 256, 399}) check(problem, position);
  }
}

TEST_CASE("scores of ten thousand, and queries of any size") {
  check(Problem<__half>({7, 1, 64}, 300, 30.0f, 50.0f, 3), 280);
  check(Problem<float>({7, 1, 64}, 300, 30.0f, 50.0f, 3), 280);
  for (const float size : {1e-30f, 1e-6f, 1.0f, 3e3f, 1e8f})
    check(Problem<__half>({7, 1, 128}, 40, size, 0.0f, 3), 39);
}

TEST_CASE("without reading ahead of the kernel before") {
  check(Problem<__half>({14, 2, 64}, 300, 2.0f, 0.0f, 4), 270, false);
}

TEST_CASE("pieces of every size give what one block gives, within the bound") {
  for (const HeadShape s : {HeadShape{7, 1, 64}, {7, 1, 128}}) {
    const Problem<__half> problem(s, 300, 2.0f, 0.0f, 9);
    AttentionDecodePlan plan = attention_decode_plan(s, problem.context, 132, most_cluster_blocks());
    for (const int least : {16, 32, 112, 4096}) {
      for (const int splits : {1, 2, 16}) {
        plan.alone = 1, plan.least = least, plan.splits = splits;
        const std::string wrong = problem.compare(problem.run(299, &plan), 299);
        CHECK_MESSAGE(wrong.empty(), wrong);
      }
    }
  }
}

TEST_CASE("the bits do not depend on the room that the cache has, if many positions have room") {
  for (const HeadShape s : {HeadShape{7, 1, 64}, {7, 1, 128}}) {
    Problem<__half> problem(s, 2000, 2.0f, 0.0f, 9);
    const int position = 1290, context = 1300;
    const Result<__half> large = problem.run(position);
    const auto rows = static_cast<std::size_t>(context * s.head_dim);
    problem.context = context;
    problem.keys.resize(rows);
    problem.values.resize(rows);
    problem.cosines.resize(rows / 2);
    problem.sines.resize(rows / 2);
    const Result<__half> small = problem.run(position);
    CHECK(same_bits(large.out, small.out));
  }
}

TEST_CASE("launches for very few, few and many positions") {
  for (const HeadShape s : {HeadShape{14, 2, 64}, {7, 1, 128}}) {
    const Problem<__half> problem(s, 1100, 2.0f, 0.0f, 5);
    const AttentionDecodePlan plan =
        attention_decode_plan(s, 1100, multiprocessor_count(), most_cluster_blocks());
    for (const int position : {0, 127, 128, 511, 512, 1023, 1024}) {
      const AttentionDecodePlan cut = attention_decode_plan_of(plan, attention_decode_reach(plan, position));
      const std::string wrong = problem.compare(problem.run(position, &cut), position);
      CHECK_MESSAGE(wrong.empty(), "position " << position << ": " << wrong);
    }
  }
}

TEST_CASE("one recording serves every position") {
  const Problem<__half> problem({14, 2, 64}, 600, 2.0f, 0.0f, 2);
  const HeadShape s = problem.s;
  Stream stream;
  Buffer<__half> keys(problem.keys.size(), "keys"), values(problem.values.size(), "values");
  Buffer<float> q(problem.q.size(), "q"), k(problem.k.size(), "k"), v(problem.v.size(), "v"),
      out(problem.q.size(), "out");
  Buffer<float> cosines(problem.cosines.size(), "cosines"), sines(problem.sines.size(), "sines");
  Buffer<unsigned char> workspace(attention_decode_workspace(s, problem.context, multiprocessor_count()),
                                  "workspace");
  workspace.fill_bytes(0);
  Buffer<int> position(1, "position");
  q.upload(problem.q), k.upload(problem.k), v.upload(problem.v);
  cosines.upload(problem.cosines), sines.upload(problem.sines);
  AttentionDecode<__half> a;
  a.q = q.data(), a.k = k.data(), a.v = v.data(), a.cosines = cosines.data(), a.sines = sines.data();
  a.keys = keys.data(), a.values = values.data(), a.position = position.data(), a.out = out.data();
  a.workspace = workspace.data(), a.shape = s, a.context = problem.context;
  Graph graph = Graph::capture(stream, [&](Stream& on) { return launch_attention_decode(a, on); });
  for (const int at : {599, 0, 256, 255, 300}) {
    CAPTURE(at);
    keys.upload(problem.keys), values.upload(problem.values);
    position.upload({{at}});
    out.fill_bytes(0xFF);
    graph.launch(stream);
    stream.synchronize();
    Result<__half> r;
    r.out.resize(problem.q.size()), r.keys.resize(problem.keys.size()),
        r.values.resize(problem.values.size());
    out.download(r.out), keys.download(r.keys), values.download(r.values);
    const std::string wrong = problem.compare(r, at);
    CHECK_MESSAGE(wrong.empty(), wrong);
  }
}

TEST_CASE("infinities and NaNs come out") {
  Problem<__half> problem({7, 1, 64}, 40, 2.0f, 0.0f, 8);
  problem.v[3] = std::nanf("");
  problem.q[64] = INFINITY;
  const Result<__half> r = problem.run(20);
  for (int h = 0; h < 7; ++h) CHECK(std::isnan(r.out[static_cast<std::size_t>(h * 64 + 3)]));
  for (int i = 0; i < 64; ++i) CHECK(std::isnan(r.out[static_cast<std::size_t>(64 + i)]));
  CHECK(std::isfinite(r.out[0]));
}

TEST_CASE(
    "the comparison sees a position too few or too many, an unrotated query, and a query rounded to f16") {
  Problem<__half> problem({7, 1, 64}, 80, 2.0f, 0.0f, 6);
  Result<__half> r = problem.run(50);
  REQUIRE(problem.compare(r, 50).empty());
  r.keys = problem.keys, r.values = problem.values;
  CHECK(!problem.compare(r, 50).empty());  // another newest row
  CHECK(!problem.compare(r, 49).empty());
  CHECK(!problem.compare(r, 51).empty());
  const Result<__half> good = problem.run(50);
  Problem<__half> other = problem;
  for (float& x : other.sines) x = 0.0f;
  CHECK(!other.compare(good, 50).empty());
  // A query without its second part is seen where scores are large.
  Problem<__half> large({7, 1, 64}, 80, 10.0f, 0.0f, 6), rounded = large;
  for (float& x : rounded.q) x = __half2float(__float2half_rn(x));
  CHECK(large.compare(large.run(50), 50).empty());
  CHECK(!large.compare(rounded.run(50), 50).empty());
}

TEST_CASE("what the kernel cannot take is refused with the reason") {
  Stream stream;
  AttentionDecode<__half> a;
  const auto refusal = [&](HeadShape s, int context) {
    a.shape = s, a.context = context;
    return launch_attention_decode(a, stream).message();
  };
  CHECK(refusal({4, 3, 64}, 8).find("multiple of kv_heads, not 4 of 3") != std::string::npos);
  CHECK(refusal({4, 2, 96}, 8).find("64 or 128, not 96; rope_store and attention_f32 take others") !=
        std::string::npos);
  CHECK(refusal({4, 2, 64}, 0).find("context must be at least 1") != std::string::npos);
  CHECK(refusal({4, 2, 64}, 8).find("out or planes") != std::string::npos);
  Buffer<float> odd(8, "odd");
  a.out = odd.data() + 1;
  CHECK(refusal({4, 2, 64}, 8).find("multiple of 16 bytes") != std::string::npos);
  a.out = odd.data();
  AttentionDecodePlan plan = attention_decode_plan(a.shape, 8, multiprocessor_count(), 1);
  plan.splits = runs::kMost + 1;
  CHECK(launch_attention_decode(a, stream, false, plan).message().find("more than 64") != std::string::npos);
}
