// The elementwise kernels against float64: ragged sizes, poisoned outputs, guard bands.

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "harness/device/doctest_main.hpp"
#include "harness/device/half_bits.hpp"
#include "harness/experiment/check.hpp"
#include "kernels/elementwise/add_bias.cuh"
#include "kernels/elementwise/add_residual.cuh"
#include "kernels/elementwise/rms_norm.cuh"
#include "kernels/elementwise/rope_store.cuh"
#include "kernels/elementwise/set_step.cuh"
#include "kernels/elementwise/swiglu.cuh"

using namespace ladder;

namespace {

constexpr double kU = kUnitRoundoffF32;

std::vector<float> reals(std::size_t n, unsigned seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> d(-scale, scale);
  std::vector<float> v(n);
  for (float& x : v) x = d(generator);
  return v;
}

GuardedBuffer<float> on_device(const std::vector<float>& v, const char* name) {
  GuardedBuffer<float> b(v.size(), name);
  b.upload(v);
  return b;
}

std::vector<float> on_host(const GuardedBuffer<float>& b) {
  std::vector<float> v(b.size());
  CHECK_MESSAGE(b.download(v), "wrote outside its buffer");
  return v;
}

/// The first element that is not finite and within `bound` of `expected`; empty when there is none.
std::string offence(const std::vector<float>& out, const std::function<double(std::size_t)>& expected,
                    const std::function<double(std::size_t)>& bound) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double error = std::fabs(out[i] - expected(i));
    if (!(std::isfinite(out[i]) && error <= bound(i))) {
      return "[" + std::to_string(i) + "] is " + std::to_string(out[i]) + ", expected " +
             std::to_string(expected(i)) + " within " + std::to_string(bound(i));
    }
  }
  return "";
}

void check_close(const std::vector<float>& out, const std::function<double(std::size_t)>& expected,
                 const std::function<double(std::size_t)>& bound) {
  const std::string found = offence(out, expected, bound);
  CHECK_MESSAGE(found.empty(), found);
}

}  // namespace

TEST_CASE("the comparison rejects what is wrong or not a number") {
  const auto one = [](std::size_t) { return 1.0; };
  const auto tight = [](std::size_t) { return 1e-6; };
  CHECK(offence({1.0f, 1.0f}, one, tight).empty());
  CHECK(!offence({1.0f, 1.00001f}, one, tight).empty());
  CHECK(!offence({std::nanf(""), 1.0f}, one, tight).empty());
  CHECK(!offence({1.0f, INFINITY}, one, [](std::size_t) { return 1e300; }).empty());
}

TEST_CASE("rms_norm") {
  Stream stream;
  for (const int d : {1, 2, 31, 255, 256, 257, 896, 2049, 3584, 8192, 9220}) {
    for (const int nt : {1, 3}) {
      CAPTURE(d);
      CAPTURE(nt);
      for (const float size : {1.0f, 1e-4f, 3000.0f}) {
        const float epsilon = 1e-6f;
        const std::vector<float> x = reals(static_cast<std::size_t>(nt * d), 1, size),
                                 w = reals(static_cast<std::size_t>(d), 2);
        auto dx = on_device(x, "x"), dw = on_device(w, "weight");
        GuardedBuffer<float> out(x.size(), "out");
        REQUIRE(launch_rms_norm(dx.data(), dw.data(), out.data(), nt, d, epsilon, stream).ok());
        stream.synchronize();
        const auto expected = [&](std::size_t i) {
          double squares = 0;
          for (std::size_t k = i / d * d; k < (i / d + 1) * d; ++k)
            squares += static_cast<double>(x[k]) * x[k];
          return x[i] / std::sqrt(squares / d + epsilon) * w[i % static_cast<std::size_t>(d)];
        };
        // Squares are all positive: the sum is right to (terms a thread + 5 + 8) roundings, and the root
        // halves that.
        check_close(on_host(out), expected, [&](std::size_t i) {
          return (0.5 * (d / 256.0 + 16) + 6) * kU * std::fabs(expected(i));
        });
      }
    }
  }
  CHECK(!launch_rms_norm(nullptr, nullptr, nullptr, 0, 1, 1e-6f, stream).ok());
}

TEST_CASE("add_bias and add round once") {
  Stream stream;
  for (const int od : {1, 7, 255, 256, 257, 1000, 1028}) {
    const int nt = 3;
    CAPTURE(od);
    const std::vector<float> x = reals(static_cast<std::size_t>(nt * od), 3, 10),
                             b = reals(static_cast<std::size_t>(od), 4, 100), y = reals(x.size(), 5, 10);
    auto dx = on_device(x, "x"), db = on_device(b, "bias"), dy = on_device(y, "y");
    REQUIRE(launch_add_bias(dx.data(), db.data(), nt, od, stream).ok());
    stream.synchronize();
    const auto zero = [](std::size_t) { return 0.0; };
    check_close(
        on_host(dx), [&](std::size_t i) { return x[i] + b[i % static_cast<std::size_t>(od)]; }, zero);
    dx.upload(x);
    REQUIRE(launch_add_residual(dx.data(), dy.data(), nt * od, stream).ok());
    stream.synchronize();
    check_close(
        on_host(dx), [&](std::size_t i) { return x[i] + y[i]; }, zero);
  }
  CHECK(!launch_add_bias(nullptr, nullptr, 1, 0, stream).ok());
  CHECK(!launch_add_residual(nullptr, nullptr, 0, stream).ok());
}

TEST_CASE("swiglu, also where the exponential overflows") {
  Stream stream;
  for (const std::size_t n :
       {std::size_t{1}, std::size_t{255}, std::size_t{257}, std::size_t{1028}, std::size_t{5000}}) {
    CAPTURE(n);
    std::vector<float> gate = reals(n, 6, 8);
    const std::vector<float> up = reals(n, 7, 4);
    if (n > 200) {
      gate[0] = -1e4f;
      gate[1] = 1e4f;
      gate[2] = -88.7f;
      gate[3] = 0.0f;
      gate[4] = -3e38f;
    }
    auto dg = on_device(gate, "gate"), du = on_device(up, "up");
    REQUIRE(launch_swiglu(dg.data(), du.data(), static_cast<long long>(n), stream).ok());
    stream.synchronize();
    const auto expected = [&](std::size_t i) {
      return gate[i] / (1.0 + std::exp(-static_cast<double>(gate[i]))) * up[i];
    };
    // Two units in the last place of the exponential, the addition, the quotient, the product; results below
    // the normal range have an absolute error instead.
    check_close(on_host(dg), expected,
                [&](std::size_t i) { return 8 * kU * std::fabs(expected(i)) + 1e-36; });
  }
  CHECK(!launch_swiglu(nullptr, nullptr, 0, stream).ok());
}

namespace {

float as_float(float v) { return v; }
float as_float(__half v) { return __half2float(v); }

/// Rotation and cache of KV, with rows before and after the written ones untouched.
template <class KV>
void check_rope_store(HeadShape s, int nt, int first, double kv_roundoff) {
  CAPTURE(s.head_dim);
  CAPTURE(nt);
  Stream stream;
  const int half = s.head_dim / 2, context = first + nt + 2;
  const auto n_q = static_cast<std::size_t>(nt * s.q_length()),
             n_kv = static_cast<std::size_t>(nt * s.kv_length());
  const std::vector<float> q = reals(n_q, 8, 30), k = reals(n_kv, 9, 30), v = reals(n_kv, 10, 30);
  std::vector<float> cosines(static_cast<std::size_t>(context * half)), sines(cosines.size());
  for (std::size_t i = 0; i < cosines.size(); ++i) {  // angles that differ in every place
    cosines[i] = static_cast<float>(std::cos(0.37 * static_cast<double>(i)));
    sines[i] = static_cast<float>(std::sin(0.37 * static_cast<double>(i)));
  }
  auto dq = on_device(q, "q"), dk = on_device(k, "k"), dv = on_device(v, "v"),
       dc = on_device(cosines, "cosines"), ds = on_device(sines, "sines");
  const auto cache_size = static_cast<std::size_t>(context * s.kv_length());
  GuardedBuffer<KV> keys(cache_size, "keys"), values(cache_size, "values");
  const int from[] = {first};
  Buffer<int> position(1, "position");
  position.upload(from);
  REQUIRE(launch_rope_store(dq.data(), dk.data(), dv.data(), dc.data(), ds.data(), keys.data(), values.data(),
                            nt, position.data(), s, stream)
              .ok());
  stream.synchronize();

  // Element i of a rotated row of `length` elements: its pair is half further or half back.
  const auto rotated = [&](const std::vector<float>& x, int length, std::size_t i, bool magnitude) {
    const auto t = i / static_cast<std::size_t>(length);
    const auto e = i % static_cast<std::size_t>(s.head_dim);
    const auto pair = e % static_cast<std::size_t>(half);
    const std::size_t at = (static_cast<std::size_t>(first) + t) * static_cast<std::size_t>(half) + pair;
    const double c = cosines[at], d = sines[at];
    const bool upper = e >= static_cast<std::size_t>(half);
    const double a = x[i] * c, b = upper ? x[i - half] * d : -x[i + half] * d;
    return magnitude ? std::fabs(a) + std::fabs(b) : a + b;
  };
  check_close(
      on_host(dq), [&](std::size_t i) { return rotated(q, s.q_length(), i, false); },
      [&](std::size_t i) { return 2 * kU * rotated(q, s.q_length(), i, true); });
  std::vector<KV> host_keys(cache_size), host_values(cache_size);
  CHECK(keys.download(host_keys));
  CHECK(values.download(host_values));
  const auto skip = static_cast<std::size_t>(first * s.kv_length());
  std::vector<float> stored_keys, stored_values;
  bool untouched = true;
  for (std::size_t i = 0; i < cache_size; ++i) {
    if (i >= skip && i < skip + n_kv) {
      stored_keys.push_back(as_float(host_keys[i]));
      stored_values.push_back(as_float(host_values[i]));
    } else {
      untouched = untouched && std::isnan(as_float(host_keys[i])) && std::isnan(as_float(host_values[i]));
    }
  }
  CHECK(untouched);
  check_close(
      stored_keys, [&](std::size_t i) { return rotated(k, s.kv_length(), i, false); },
      [&](std::size_t i) { return (2 * kU + kv_roundoff) * rotated(k, s.kv_length(), i, true); });
  check_close(
      stored_values, [&](std::size_t i) { return v[i]; },
      [&](std::size_t i) { return kv_roundoff * std::fabs(v[i]); });
}

}  // namespace

TEST_CASE("rope_store rotates pairs half a head apart and fills its rows of the caches") {
  for (const HeadShape s :
       {HeadShape{1, 1, 2}, HeadShape{4, 2, 6}, HeadShape{14, 2, 64}, HeadShape{3, 3, 130}}) {
    for (const auto& [nt, first] : {std::pair{1, 0}, std::pair{1, 5}, std::pair{7, 3}}) {
      check_rope_store<float>(s, nt, first, 0);
      check_rope_store<__half>(s, nt, first, 1.0 / 2048);
    }
  }
  Stream stream;
  float* none = nullptr;
  CHECK(launch_rope_store(none, none, none, none, none, none, none, 1, nullptr, {1, 1, 3}, stream)
            .message()
            .find("head_dim even, not 3") != std::string::npos);
}

TEST_CASE("set_step stores a position and its tokens, and no more") {
  Stream stream;
  for (const std::size_t nt : {1u, 3u, 8u}) {
    std::vector<std::int32_t> tokens(nt), expected = {41};
    for (std::size_t t = 0; t < nt; ++t)
      expected.push_back(tokens[t] = static_cast<std::int32_t>(1000 + 7 * t));
    GuardedBuffer<std::int32_t> out(nt + 1, "step");
    REQUIRE(launch_set_step(out.data(), 41, tokens, stream).ok());
    stream.synchronize();
    std::vector<std::int32_t> got(nt + 1);
    CHECK(out.download(got));
    CHECK(got == expected);
  }
  const std::vector<std::int32_t> none, nine(9);
  CHECK(launch_set_step(nullptr, 0, none, stream).message() == "set_step: 1 to 8 tokens at once, not 0");
  CHECK(launch_set_step(nullptr, 0, nine, stream).message() == "set_step: 1 to 8 tokens at once, not 9");
}
