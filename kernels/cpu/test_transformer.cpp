// Tests of what stands around the matmuls on the CPU, against float64, on every instruction set of this
// machine.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "harness/device/half_bits.hpp"
#include "kernels/cpu/features.hpp"
#include "kernels/cpu/thread_pool.hpp"
#include "kernels/cpu/transformer.hpp"

namespace {

using ladder::cpu::AttentionScratch;
using ladder::cpu::Heads;
using ladder::cpu::KvCache;
using ladder::cpu::ThreadPool;

constexpr double kUnit = 1.0 / 16777216.0;  // u of f32
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void on_every_isa(const std::function<void(const std::string&)>& f) {
  struct Restore {
    ~Restore() { ladder::cpu::force_isa(std::nullopt); }
  } restore;
  for (const auto isa : ladder::cpu::supported_isas()) {
    ladder::cpu::force_isa(isa);
    f(std::string(ladder::cpu::name(isa)));
  }
}

std::vector<float> random_floats(std::size_t count, unsigned seed, float size = 1) {
  std::minstd_rand random(seed);
  std::uniform_real_distribution<float> value(-size, size);
  std::vector<float> v(count);
  for (float& x : v) x = value(random);
  return v;
}

bool within(double got, double expected, double bound) {
  return std::isfinite(got) && std::fabs(got - expected) <= bound;
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return std::ranges::equal(a, b, [](float x, float y) {
    return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
  });
}

TEST_CASE("rms_norm: within its roundings") {
  on_every_isa([](const std::string& isa) {
    CAPTURE(isa);
    for (const int d : {1, 15, 16, 17, 896, 3584}) {
      CAPTURE(d);
      constexpr int kTokens = 40;
      const auto n = static_cast<std::size_t>(d);
      const auto x = random_floats(kTokens * n, 1, 30), weight = random_floats(n, 2);
      std::vector<float> out(x.size(), kNan);
      for (std::size_t t = 0; t < kTokens; ++t) {
        ladder::cpu::rms_norm(x.data() + t * n, weight.data(), out.data() + t * n, d, 1e-6F);
      }
      int wrong = 0;
      for (std::size_t t = 0; t < kTokens; ++t) {
        double squares = 0;
        for (std::size_t i = 0; i < n; ++i) squares += static_cast<double>(x[t * n + i]) * x[t * n + i];
        const double scale = 1 / std::sqrt(squares / d + static_cast<double>(1e-6F));
        for (std::size_t i = 0; i < n; ++i) {
          const double expected = x[t * n + i] * scale * weight[i];
          // A lane adds d / 16 squares, the tree four more; half of the sum's relative error is the root's.
          if (!within(out[t * n + i], expected, (d / 16.0 + 16) * kUnit * std::fabs(expected))) ++wrong;
        }
      }
      CHECK(wrong == 0);
    }
  });
}

TEST_CASE("swiglu: within 2^-20, from one end of f32 to the other") {
  on_every_isa([](const std::string& isa) {
    CAPTURE(isa);
    auto gate = random_floats(50001, 3, 20);
    const auto up = random_floats(gate.size(), 4, 2);
    const float special[] = {0.0F, -0.0F, 1e-38F, -86.9F, 87.0F, 88.5F, 1e30F, -1e30F, -200.0F};
    std::copy(std::begin(special), std::end(special), gate.begin());
    auto out = gate;
    ladder::cpu::swiglu(out.data(), up.data(), static_cast<long long>(out.size()));
    int wrong = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double expected = gate[i] / (1 + std::exp(-static_cast<double>(gate[i]))) * up[i];
      // Below -88 the exponential stays at e^88: what should be almost zero is off by |g| e^-88.
      const double floor =
          std::fabs(static_cast<double>(gate[i])) * std::exp(-88.0) * std::fabs(up[i]) + 0x1p-148;
      if (!within(out[i], expected, 0x1p-20 * std::fabs(expected) + floor)) ++wrong;
    }
    CHECK(wrong == 0);
    gate[5] = kNan;
    ladder::cpu::swiglu(gate.data(), up.data(), 16);
    CHECK(std::isnan(gate[5]));
  });
}

TEST_CASE("bias, residual and rotation") {
  on_every_isa([](const std::string& isa) {
    CAPTURE(isa);
    ThreadPool pool(2);
    for (const int head_dim : {2, 6, 32, 34, 64, 128}) {
      CAPTURE(head_dim);
      constexpr int kTokens = 9, kHeads = 3;
      const auto hd = static_cast<std::size_t>(head_dim), half = hd / 2, row = kHeads * hd;
      const auto x = random_floats(kTokens * row, 5), bias = random_floats(row, 6),
                 other = random_floats(x.size(), 7);
      std::vector<float> c(kTokens * half), s(c.size());
      for (std::size_t i = 0; i < c.size(); ++i) {
        c[i] = static_cast<float>(std::cos(static_cast<double>(i)));
        s[i] = static_cast<float>(std::sin(static_cast<double>(i)));
      }
      auto biased = x, sum = x, rotated = x;
      ladder::cpu::add_bias(biased.data(), bias.data(), kTokens, static_cast<long long>(row), pool);
      ladder::cpu::add_residual(sum.data(), other.data(), static_cast<long long>(sum.size()), pool);
      ladder::cpu::rope(rotated.data(), c.data(), s.data(), kTokens, kHeads, head_dim, pool);
      int wrong = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        if (biased[i] != x[i] + bias[i % row]) ++wrong;
        if (sum[i] != x[i] + other[i]) ++wrong;
        const std::size_t t = i / row, in_head = i % hd, pair = in_head % half;
        const double a = x[i - in_head + pair], b = x[i - in_head + pair + half];
        const double cosine = c[t * half + pair], sine = s[t * half + pair];
        const double expected = in_head < half ? a * cosine - b * sine : a * sine + b * cosine;
        if (!within(rotated[i], expected, 3 * kUnit * (std::fabs(a) + std::fabs(b)))) ++wrong;
      }
      CHECK(wrong == 0);
    }
  });
}

/// A cache and what was put into it, as it is stored.
struct Filled {
  KvCache cache;
  std::vector<double> k, v;  // [positions][kv_heads][head_dim]
  Filled(Heads heads, int context, bool f16, int positions, float key_size, ThreadPool& pool)
      : cache(heads, context, f16) {
    const auto row = static_cast<std::size_t>(heads.kv_heads) * static_cast<std::size_t>(heads.head_dim);
    const auto keys = random_floats(static_cast<std::size_t>(positions) * row, 8, key_size);
    const auto values = random_floats(keys.size(), 9, 3);
    const int first = positions / 3;  // in two parts
    if (first > 0) cache.store(keys.data(), values.data(), first, 0, pool);
    const auto at = static_cast<std::size_t>(first) * row;
    cache.store(keys.data() + at, values.data() + at, positions - first, first, pool);
    const auto kept = [f16](float x) {
      return static_cast<double>(f16 ? ladder::half_bits_to_float(ladder::float_to_half_bits(x)) : x);
    };
    for (const float x : keys) k.push_back(kept(x));
    for (const float x : values) v.push_back(kept(x));
  }
};

/// Outputs of attention() that are not within the bound of a float64 softmax.
int wrong_outputs(const Filled& filled, const std::vector<float>& q, const std::vector<float>& out, int nt,
                  int first) {
  const Heads h = filled.cache.heads();
  const auto hd = static_cast<std::size_t>(h.head_dim);
  int wrong = 0;
  for (int t = 0; t < nt; ++t) {
    for (int head = 0; head < h.heads; ++head) {
      const std::size_t at =
          (static_cast<std::size_t>(t) * static_cast<std::size_t>(h.heads) + static_cast<std::size_t>(head)) *
          hd;
      const auto positions = static_cast<std::size_t>(first + t + 1);
      std::vector<double> scores(positions);
      double most = -std::numeric_limits<double>::infinity(), score_error = 0;
      const auto row = [&](std::size_t p) {
        return (p * static_cast<std::size_t>(h.kv_heads) + static_cast<std::size_t>(head / h.group())) * hd;
      };
      for (std::size_t p = 0; p < positions; ++p) {
        double sum = 0, terms = 0;
        for (std::size_t d = 0; d < hd; ++d) {
          const double product = static_cast<double>(q[at + d]) * filled.k[row(p) + d];
          sum += product;
          terms += std::fabs(product);
        }
        scores[p] = sum / std::sqrt(static_cast<double>(hd));
        score_error = std::max(
            score_error, (static_cast<double>(hd) + 6) * kUnit * terms / std::sqrt(static_cast<double>(hd)));
        most = std::max(most, scores[p]);
      }
      double total = 0;
      for (double& s : scores) total += (s = std::exp(s - most));
      // Relative error of a weight: of its score and the largest, of their difference, and of the
      // exponential; for weight and total. Sums: 256 positions of a piece, and the pieces.
      const double weight_error = std::exp(2 * score_error + 100 * kUnit) * (1 + 0x1p-20) - 1;
      const double relative =
          2.1 * (weight_error + (256 + static_cast<double>(positions) / 256 + 30) * kUnit);
      for (std::size_t d = 0; d < hd; ++d) {
        double expected = 0, terms = 0;
        for (std::size_t p = 0; p < positions; ++p) {
          expected += scores[p] / total * filled.v[row(p) + d];
          terms += scores[p] / total * std::fabs(filled.v[row(p) + d]);
        }
        // Weights below e^-87 are not distinguished from e^-87.
        if (!within(out[at + d], expected,
                    relative * terms + 3 * static_cast<double>(positions) * std::exp(-87.0)))
          ++wrong;
      }
    }
  }
  return wrong;
}

TEST_CASE("attention: any heads, both caches, against a float64 softmax") {
  ThreadPool pool(2);
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    for (const bool f16 : {false, true}) {
      for (const Heads h : {Heads{1, 1, 16}, Heads{2, 2, 8}, Heads{4, 2, 64}, Heads{3, 1, 128},
                            Heads{10, 2, 20}, Heads{14, 2, 64}, Heads{8, 1, 32}, Heads{6, 1, 128}}) {
        CAPTURE(h.heads);
        CAPTURE(h.head_dim);
        const auto row = static_cast<std::size_t>(h.heads * h.head_dim);
        for (const auto& tokens :
             {std::pair{1, 0}, {1, 14}, {1, 16}, {1, 255}, {1, 256}, {1, 600}, {20, 0}, {3, 254}}) {
          const int nt = tokens.first, first = tokens.second;
          CAPTURE(nt);
          CAPTURE(first);
          const Filled filled(h, first + nt + 3, f16, first + nt, 2, pool);
          const auto q = random_floats(static_cast<std::size_t>(nt) * row, 10, 3);
          std::vector<float> out(q.size(), kNan);
          AttentionScratch scratch;
          ladder::cpu::attention(q.data(), filled.cache, out.data(), nt, first, scratch, pool);
          CHECK(wrong_outputs(filled, q, out, nt, first) == 0);
        }
      }
    }
  });
}

TEST_CASE("attention: large scores neither overflow nor lose the winner") {
  ThreadPool pool(1);
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    const Heads h{4, 2, 64};
    const Filled filled(h, 300, true, 300, 300, pool);
    const auto q = random_floats(256, 11, 300);
    std::vector<float> out(q.size(), kNan);
    AttentionScratch scratch;
    ladder::cpu::attention(q.data(), filled.cache, out.data(), 1, 299, scratch, pool);
    CHECK(wrong_outputs(filled, q, out, 1, 299) == 0);
  });
}

TEST_CASE("attention: bits depend neither on company nor on threads, and later positions are not looked at") {
  on_every_isa([](const std::string& isa) {
    CAPTURE(isa);
    const Heads h{6, 2, 64};
    constexpr int kFirst = 500, kTokens = 40;
    const auto row = static_cast<std::size_t>(h.heads * h.head_dim);
    ThreadPool one(1);
    const Filled filled(h, 1024, true, kFirst + kTokens, 1, one);
    const auto q = random_floats(kTokens * row, 12, 2);
    std::vector<float> alone(q.size(), kNan);
    AttentionScratch scratch;
    for (int t = 0; t < kTokens; ++t) {
      const auto at = static_cast<std::size_t>(t) * row;
      ladder::cpu::attention(q.data() + at, filled.cache, alone.data() + at, 1, kFirst + t, scratch, one);
    }
    for (const int threads : {1, 2, 3}) {
      ThreadPool pool(threads);
      std::vector<float> together(q.size(), kNan);
      ladder::cpu::attention(q.data(), filled.cache, together.data(), kTokens, kFirst, scratch, pool);
      CHECK(same_bits(together, alone));
      std::vector<float> last(row, kNan);
      ladder::cpu::attention(q.data(), filled.cache, last.data(), 1, kFirst, scratch, pool);
      CHECK(same_bits(last, std::span(alone).first(row)));
    }
    // NaNs behind a position, as keys of another text may be, stay there.
    Filled poisoned(h, 1024, false, 20, 1, one);
    const std::vector<float> bad(static_cast<std::size_t>(h.kv_heads * h.head_dim), kNan);
    poisoned.cache.store(bad.data(), bad.data(), 1, 17, one);
    std::vector<float> out(row, kNan);
    ladder::cpu::attention(q.data(), poisoned.cache, out.data(), 1, 16, scratch, one);
    CHECK(wrong_outputs(poisoned, q, out, 1, 16) == 0);
    ladder::cpu::attention(q.data(), poisoned.cache, out.data(), 1, 17, scratch, one);
    CHECK(std::isnan(out[0]));
  });
}

TEST_CASE("what does not fit is refused") {
  ThreadPool pool(1);
  CHECK_THROWS_AS(KvCache(Heads{3, 2, 64}, 8, true), std::invalid_argument);
  CHECK_THROWS_AS(KvCache(Heads{2, 2, 64}, 0, true), std::invalid_argument);
  KvCache cache(Heads{2, 1, 16}, 8, true);
  const std::vector<float> floats(1024);
  std::vector<float> out(1024);
  AttentionScratch scratch;
  CHECK_THROWS_AS(cache.store(floats.data(), floats.data(), 2, 7, pool), std::invalid_argument);
  CHECK_THROWS_AS(cache.store(floats.data(), floats.data(), 1, -1, pool), std::invalid_argument);
  CHECK_THROWS_AS(ladder::cpu::attention(floats.data(), cache, out.data(), 1, 8, scratch, pool),
                  std::invalid_argument);
  CHECK_THROWS_AS(ladder::cpu::attention(floats.data(), cache, out.data(), 0, 0, scratch, pool),
                  std::invalid_argument);
}

}  // namespace
