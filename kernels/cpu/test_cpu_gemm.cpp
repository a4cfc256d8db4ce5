// Tests of the CPU's GEMMs, f32 and int8, on every instruction set that this machine has.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "harness/device/half_bits.hpp"
#include "kernels/cpu/features.hpp"
#include "kernels/cpu/gemm_f32.hpp"
#include "kernels/cpu/gemm_int8.hpp"
#include "kernels/cpu/test_quant_operands.hpp"
#include "kernels/quant/quantize_acts.hpp"

namespace {

using ladder::cpu::Int8Gemm;

std::size_t at(long long i) { return static_cast<std::size_t>(i); }

// f32 and f16 -----------------------------------------------------------------------------------------------

enum class Operands { f32, f16, f16_af32 };
constexpr Operands kAllOperands[] = {Operands::f32, Operands::f16, Operands::f16_af32};

/// Weights and activations as floats, and as the f16 bits of the same numbers.
struct Problem {
  Shape shape;
  std::vector<float> weights, acts;
  std::vector<std::uint16_t> weight_bits, act_bits;

  Problem(Shape s, bool integers, unsigned seed) : shape(s) {
    std::minstd_rand random(seed);
    std::uniform_real_distribution<float> real(-1, 1);
    std::uniform_int_distribution<int> integer(-4, 4);
    const auto number = [&] {
      const float v = integers ? static_cast<float>(integer(random)) : real(random);
      return ladder::half_bits_to_float(ladder::float_to_half_bits(v));
    };
    weights.resize(at(s.od * s.id));
    acts.resize(at(s.nt * s.id));
    for (float& w : weights) weight_bits.push_back(ladder::float_to_half_bits(w = number()));
    for (float& x : acts) act_bits.push_back(ladder::float_to_half_bits(x = number()));
  }

  void run(Operands operands, float* out, ThreadPool& pool) const {
    switch (operands) {
      case Operands::f32:
        return ladder::cpu::gemm_f32(weights.data(), acts.data(), out, shape, pool);
      case Operands::f16:
        return ladder::cpu::gemm_f16(weight_bits.data(), act_bits.data(), out, shape, pool);
      case Operands::f16_af32:
        return ladder::cpu::gemm_f16_af32(weight_bits.data(), acts.data(), out, shape, pool);
    }
  }

  /// Outputs that are not finite or further from the exact sum than `roundings` allow.
  [[nodiscard]] int wrong(const float* out, double roundings) const {
    int count = 0;
    for (long long t = 0; t < shape.nt; ++t) {
      for (long long r = 0; r < shape.od; ++r) {
        double sum = 0, terms = 0;
        for (long long k = 0; k < shape.id; ++k) {
          const double p = static_cast<double>(weights[at(r * shape.id + k)]) * acts[at(t * shape.id + k)];
          sum += p;
          terms += std::fabs(p);
        }
        const double got = out[t * shape.od + r];
        if (!(std::isfinite(got) && std::fabs(got - sum) <= roundings * kUnit * terms)) ++count;
      }
    }
    return count;
  }
};

void on_isas(const std::function<void()>& f) {
  struct Restore {
    ~Restore() { ladder::cpu::force_isa(std::nullopt); }
  } restore;
  for (const Isa isa : ladder::cpu::supported_isas()) {
    ladder::cpu::force_isa(isa);
    CAPTURE(ladder::cpu::name(isa));
    f();
  }
}

TEST_CASE("ragged shapes: within the bound, integers exactly") {
  ThreadPool pool(2);
  std::vector<Shape> shapes;
  // Around the tiles of every instruction set: 4 to 12 tokens, 8 to 32 rows, squares of 4 to 16.
  for (const long long nt : {1, 3, 4, 5, 7, 12, 13, 25}) {
    for (const long long od : {1, 7, 9, 33}) {
      for (const long long id : {1, 15, 17, 35}) shapes.push_back({nt, od, id});
    }
  }
  for (const long long nt : {2, 6, 8, 11}) {
    for (const long long od : {8, 16, 31, 32}) shapes.push_back({nt, od, 16});
  }
  // Around blocks of k, strips of rows, blocks of tokens.
  shapes.insert(shapes.end(), {{3, 5, 255},
                               {3, 5, 256},
                               {3, 5, 257},
                               {5, 33, 1300},
                               {5, 3, 2048},
                               {7, 3, 2049},
                               {2, 5, 4865},
                               {97, 130, 40},
                               {193, 3, 19},
                               {13, 700, 33}});
  on_isas([&] {
    for (const Shape& s : shapes) {
      CAPTURE(s.nt);
      CAPTURE(s.od);
      CAPTURE(s.id);
      for (const bool integers : {false, true}) {
        const Problem p(s, integers, static_cast<unsigned>(s.nt * 7 + s.id));
        for (const Operands operands : kAllOperands) {
          Guarded out(s.nt * s.od);
          p.run(operands, out.data(), pool);
          CHECK(p.wrong(out.data(), integers ? 0 : ladder::cpu::gemm_roundings(s.id)) == 0);
          CHECK(out.bands_intact());
        }
      }
    }
  });
}

TEST_CASE("more tokens and a longer row than one pass takes") {
  ThreadPool pool(2);
  on_isas([&] {
    const Problem tokens({2051, 3, 20}, false, 1), row({3, 2, 4096 + 300}, false, 2);
    for (const Problem* p : {&tokens, &row}) {
      Guarded out(p->shape.nt * p->shape.od);
      p->run(Operands::f32, out.data(), pool);
      CHECK(p->wrong(out.data(), ladder::cpu::gemm_roundings(p->shape.id)) == 0);
      CHECK(out.bands_intact());
    }
  });
}

TEST_CASE("f16 operands give the bits of the same numbers in f32; company and threads change none") {
  static constexpr Shape kShape{29, 75, 700};
  const Problem p(kShape, false, 5);
  on_isas([&] {
    ThreadPool pool(1);
    std::vector<float> first(at(kShape.nt * kShape.od), kNan);
    p.run(Operands::f32, first.data(), pool);
    for (const Operands operands : kAllOperands) {
      for (const int threads : {1, 2, 5}) {
        ThreadPool several(threads);
        std::vector<float> out(first.size(), kNan);
        p.run(operands, out.data(), several);
        CHECK(same_bits(out.data(), first.data(), kShape.nt * kShape.od));
      }
    }
    for (const long long t : {0LL, 13LL, 28LL}) {  // alone, and the last rows as a matrix of their own
      std::vector<float> out(at(kShape.od), kNan);
      ladder::cpu::gemm_f32(p.weights.data() + 40 * kShape.id, p.acts.data() + t * kShape.id, out.data(),
                            {1, kShape.od - 40, kShape.id}, pool);
      CHECK(same_bits(out.data(), first.data() + t * kShape.od + 40, kShape.od - 40));
    }
  });
}

TEST_CASE("infinities and NaNs reach the outputs that depend on them, and no other") {
  static constexpr Shape kShape{14, 35, 300};
  ThreadPool pool(2);
  on_isas([&] {
    for (const float odd : {kNan, std::numeric_limits<float>::infinity()}) {
      Problem p(kShape, true, 6);
      p.weights[at(33 * kShape.id + 299)] = odd;
      p.acts[at(12 * kShape.id + 7)] = odd;
      std::vector<float> out(at(kShape.nt * kShape.od), 0.0F);
      p.run(Operands::f32, out.data(), pool);
      for (long long t = 0; t < kShape.nt; ++t) {
        for (long long r = 0; r < kShape.od; ++r) {
          const bool depends = t == 12 || r == 33;
          // Infinity times zero is a NaN, times anything else an infinity.
          CHECK(std::isfinite(out[at(t * kShape.od + r)]) == !depends);
        }
      }
    }
  });
}

TEST_CASE("wrong products are found") {
  static constexpr Shape kShape{13, 40, 600};
  const Problem p(kShape, false, 9);
  ThreadPool pool(1);
  const double roundings = ladder::cpu::gemm_roundings(kShape.id);
  std::vector<float> right(at(kShape.nt * kShape.od));
  p.run(Operands::f32, right.data(), pool);
  REQUIRE(p.wrong(right.data(), roundings) == 0);
  const int all = static_cast<int>(kShape.nt * kShape.od);
  const auto sums = [&](long long begin, long long end, auto&& round) {
    std::vector<float> out(right.size());
    for (long long t = 0; t < kShape.nt; ++t) {
      for (long long r = 0; r < kShape.od; ++r) {
        float sum = 0;
        for (long long k = begin; k < end; ++k) {
          sum = round(sum + p.weights[at(r * kShape.id + k)] * p.acts[at(t * kShape.id + k)]);
        }
        out[at(t * kShape.od + r)] = sum;
      }
    }
    return out;
  };
  const auto as_it_is = [](float f) { return f; };
  CHECK(p.wrong(sums(0, kShape.id / 2, as_it_is).data(), roundings) == all);          // half of k
  CHECK(p.wrong(sums(0, kShape.id - 1, as_it_is).data(), roundings) > all * 9 / 10);  // a dropped tail
  CHECK(p.wrong(sums(512, kShape.id, as_it_is).data(), roundings) ==
        all);  // the last block of k replaces the others
  const auto to_half = [](float f) { return ladder::half_bits_to_float(ladder::float_to_half_bits(f)); };
  CHECK(p.wrong(sums(0, kShape.id, to_half).data(), roundings) > all / 2);  // f16 accumulation
  std::vector<float> swapped = right;                                       // two vectors of rows
  for (long long t = 0; t < kShape.nt; ++t) {
    std::swap_ranges(swapped.begin() + t * kShape.od, swapped.begin() + t * kShape.od + 16,
                     swapped.begin() + t * kShape.od + 16);
  }
  CHECK(p.wrong(swapped.data(), roundings) == static_cast<int>(kShape.nt) * 32);
  std::vector<float> stale = right;
  stale[at(12 * kShape.od + 39)] = kNan;  // an output that nobody wrote
  CHECK(p.wrong(stale.data(), roundings) == 1);
}

TEST_CASE("f32 and f16: shapes that are none are refused") {
  ThreadPool pool(1);
  const std::vector<float> floats(4);
  const std::vector<std::uint16_t> halves(4);
  std::vector<float> out(4);
  for (const Shape s : {Shape{0, 1, 1}, Shape{1, 0, 1}, Shape{1, 1, 0}, Shape{-1, 1, 1}}) {
    CHECK_THROWS_AS(ladder::cpu::gemm_f32(floats.data(), floats.data(), out.data(), s, pool),
                    std::invalid_argument);
    CHECK_THROWS_AS(ladder::cpu::gemm_f16(halves.data(), halves.data(), out.data(), s, pool),
                    std::invalid_argument);
    CHECK_THROWS_AS(ladder::cpu::gemm_f16_af32(halves.data(), floats.data(), out.data(), s, pool),
                    std::invalid_argument);
  }
  CHECK(ladder::cpu::gemm_roundings(1) == 1);
  CHECK(ladder::cpu::gemm_roundings(256) == 256);
  CHECK(ladder::cpu::gemm_roundings(513) == 258);
}

// int8 ------------------------------------------------------------------------------------------------------

std::vector<float> int8_gemm(WeightType type, const std::vector<unsigned char>& weights,
                             const std::vector<float>& acts, Shape s, ThreadPool& pool) {
  Guarded out(s.nt * s.od);
  Int8Gemm gemm;
  gemm.quantize(acts.data(), s.nt, s.id, pool);
  const Product product{type, weights.data(), s.od, out.data()};
  gemm.multiply({&product, 1}, acts.data(), s.nt, s.id, pool);
  CHECK(out.bands_intact());
  return {out.data(), out.data() + s.nt * s.od};
}

std::vector<WeightType> int8_types() {
  std::vector<WeightType> types = all_types();
  std::erase_if(types, [](WeightType t) { return !ladder::cpu::uses_int8(t); });
  return types;
}

TEST_CASE("every type: the bits of the product that decodes as it goes, whatever the shape") {
  ThreadPool pool(2);
  std::set<std::string> seen;
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    seen.insert(isa);
    for (const WeightType type : int8_types()) {
      CAPTURE(info(type).name);
      const long long unit = info(type).block_elems;
      std::vector<Shape> shapes = {{8, 2, unit}, {9, 67, 3 * unit}, {16, 8, 8 * unit}, {65, 3, 15 * unit}};
      // Blocks of k: 10 groups at most. 11 groups are two blocks, 21 three.
      shapes.insert(shapes.end(), {{11, 5, 256 * 10}, {12, 3, 256 * 11}, {10, 9, 256 * 21}});
      for (long long nt = 1; nt <= 8; ++nt) shapes.push_back({nt, nt % 3 + 1, 2 * unit});
      if (unit == 32) shapes.push_back({13, 4, 256 * 10 + 32});  // the cut group begins a block
      for (const Shape& s : shapes) {
        CAPTURE(s.nt);
        CAPTURE(s.od);
        CAPTURE(s.id);
        const auto weights = random_weights(type, s.od, s.id, Scales::random, static_cast<unsigned>(s.id));
        const auto acts = random_acts(s.nt, s.id, Acts::random, static_cast<unsigned>(s.nt));
        std::vector<float> expected(at(s.nt * s.od), kNan);
        ladder::cpu::quant_int8_matmul(type, weights.data(), acts.data(), expected.data(), s, pool);
        CHECK(same_bits(int8_gemm(type, weights, acts, s, pool).data(), expected.data(), s.nt * s.od));
      }
    }
  });
  CHECK(seen.size() >= ladder::cpu::supported_isas().size());
}

TEST_CASE("every type against float64: within the derived bound, and half of k is not") {
  static constexpr Shape kShape{19, 11, 256 * 12};
  ThreadPool pool(2);
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    for (const WeightType type : int8_types()) {
      CAPTURE(info(type).name);
      const auto weights = random_weights(type, kShape.od, kShape.id, Scales::random, 21);
      const auto acts = random_acts(kShape.nt, kShape.id, Acts::random, 22);
      const auto out = int8_gemm(type, weights, acts, kShape, pool);
      const Exact w(type, weights);
      QuantizedActs rounded;
      rounded.quantize(acts.data(), kShape.nt, kShape.id, pool);
      const double roundings = ladder::cpu::quant_int8_roundings(type, kShape.id);
      int wrong = 0, half_found = 0;
      for (long long t = 0; t < kShape.nt; ++t) {
        for (long long r = 0; r < kShape.od; ++r) {
          double sum = 0, half = 0, terms = 0;
          for (long long k = 0; k < kShape.id; ++k) {
            const std::size_t i = at(r * kShape.id + k);
            const double x = static_cast<double>(rounded.scale(t, k)) * rounded.code(t, k);
            sum += (w.scale[i] * w.code[i] + w.offset[i]) * x;
            terms += (std::fabs(w.scale[i] * w.code[i]) + std::fabs(w.offset[i])) * std::fabs(x);
            if (k < kShape.id / 2) half = sum;
          }
          const double got = out[at(t * kShape.od + r)], bound = roundings * kUnit * terms;
          if (!(std::isfinite(got) && std::fabs(got - sum) <= bound)) ++wrong;
          if (!(std::fabs(half - sum) <= bound)) ++half_found;
        }
      }
      CHECK(wrong == 0);
      CHECK(half_found == kShape.nt * kShape.od);
    }
  });
}

TEST_CASE("small integers and unit scales: every bit is right") {
  static constexpr Shape kShape{17, 5, 512};
  ThreadPool pool(2);
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    for (const WeightType type : int8_types()) {
      CAPTURE(info(type).name);
      const auto weights = random_weights(type, kShape.od, kShape.id, Scales::ones, 11);
      const auto acts = random_acts(kShape.nt, kShape.id, Acts::integers, 12);
      const Exact w(type, weights);
      const auto out = int8_gemm(type, weights, acts, kShape, pool);
      for (long long t = 0; t < kShape.nt; ++t) {
        for (long long r = 0; r < kShape.od; ++r) {
          double sum = 0, magnitude = 0;
          for (long long k = 0; k < kShape.id; ++k) {
            const std::size_t i = at(r * kShape.id + k);
            const double x = acts[at(t * kShape.id + k)];
            sum += (w.scale[i] * w.code[i] + w.offset[i]) * x;
            magnitude += (std::fabs(w.scale[i] * w.code[i]) + std::fabs(w.offset[i])) * std::fabs(x);
          }
          REQUIRE(magnitude < 16777216.0);  // so that every order of summation is exact
          CHECK(static_cast<double>(out[at(t * kShape.od + r)]) == sum);
        }
      }
    }
  });
}

TEST_CASE("blocks and planes of activations: one product; threads change nothing, memory is kept") {
  static constexpr Shape kShape{70, 33, 1280};
  ThreadPool pool(2);
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    Int8Gemm kept;
    for (const WeightType type : {WeightType::q4_0, WeightType::q4_k, WeightType::q6_k}) {
      CAPTURE(info(type).name);
      const auto weights = random_weights(type, kShape.od, kShape.id, Scales::random, 31);
      const auto acts = random_acts(kShape.nt, kShape.id, Acts::outliers, 32);
      std::vector<BlockQ8Pad40> blocks(at(kShape.nt * kShape.id / 32));
      ladder::quantize_q8_pad40_row(acts, blocks.data());
      const long long count = kShape.nt * kShape.od;
      std::vector<float> expected(at(count), kNan), out(at(count), kNan);
      ladder::cpu::quant_int8_matmul(type, weights.data(), blocks.data(), expected.data(), kShape, pool);
      ladder::cpu::quant_int8_gemm(type, weights.data(), blocks.data(), out.data(), kShape, pool);
      CHECK(same_bits(out.data(), expected.data(), count));

      const ladder::Q8ActsPlanes planes = ladder::q8_acts_planes(kShape.nt, kShape.id);
      std::vector<std::uint32_t> both((planes.codes + 3) / 4 + planes.scales);
      REQUIRE(planes.codes % 4 == 0);
      ladder::pack_q8_pad40_t(blocks.data(), kShape.nt, kShape.id,
                              reinterpret_cast<std::int8_t*>(both.data()), both.data() + planes.codes / 4);
      out.assign(out.size(), kNan);
      ladder::cpu::quant_int8_gemm_planes(type, weights.data(), both.data(), out.data(), kShape, pool);
      CHECK(same_bits(out.data(), expected.data(), count));

      for (const int threads : {1, 3}) {
        ThreadPool several(threads);
        for (const long long nt : {70LL, 9LL, 40LL}) {
          out.assign(out.size(), kNan);
          kept.assign(blocks.data(), nt, kShape.id, several);
          const Product product{type, weights.data(), kShape.od, out.data()};
          kept.multiply({&product, 1}, nullptr, nt, kShape.id, several);
          CHECK(same_bits(out.data(), expected.data(), nt * kShape.od));
        }
      }
    }
  });
}

TEST_CASE("several matrices of different types in one call") {
  ThreadPool pool(2);
  static constexpr long long kTokens = 21, kLength = 768;
  const auto acts = random_acts(kTokens, kLength, Acts::random, 1);
  const WeightType types[] = {WeightType::q4_k, WeightType::f16, WeightType::q6_k, WeightType::q8_0};
  const long long rows[] = {33, 3, 18, 130};
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    std::vector<std::vector<unsigned char>> weights;
    std::vector<std::vector<float>> out, alone;
    std::vector<Product> products;
    for (std::size_t i = 0; i < 4; ++i) {
      weights.push_back(random_weights(types[i], rows[i], kLength, Scales::random, static_cast<unsigned>(i)));
      out.emplace_back(at(kTokens * rows[i]), kNan);
      alone.push_back(out.back());
    }
    for (std::size_t i = 0; i < 4; ++i) {
      products.push_back({types[i], weights[i].data(), rows[i], out[i].data()});
      ladder::cpu::quant_int8_matmul(types[i], weights[i].data(), acts.data(), alone[i].data(),
                                     {kTokens, rows[i], kLength}, pool);
    }
    Int8Gemm gemm;
    gemm.quantize(acts.data(), kTokens, kLength, pool);
    gemm.multiply(products, acts.data(), kTokens, kLength, pool);
    for (std::size_t i = 0; i < 4; ++i) CHECK(same_bits(out[i].data(), alone[i].data(), kTokens * rows[i]));

    // Rows that are made on the way, in place or not.
    std::vector<std::atomic<int>> made(at(kTokens));
    gemm.quantize(
        [&](long long t, float* room) -> const float* {
          ++made[at(t)];
          const float* row = acts.data() + t * kLength;
          return t % 2 == 0 ? row : (std::copy_n(row, kLength, room), room);
        },
        kTokens, kLength, pool);
    for (auto& o : out) std::fill(o.begin(), o.end(), kNan);
    gemm.multiply(products, acts.data(), kTokens, kLength, pool);
    for (std::size_t i = 0; i < 4; ++i) CHECK(same_bits(out[i].data(), alone[i].data(), kTokens * rows[i]));
    CHECK(std::all_of(made.begin(), made.end(), [](const auto& n) { return n == 1; }));
  });
}

TEST_CASE("NaNs and infinities of activations and scales reach their outputs only") {
  static constexpr Shape kShape{12, 6, 512};
  ThreadPool pool(2);
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    auto weights = random_weights(WeightType::q8_0, kShape.od, kShape.id, Scales::random, 3);
    auto acts = random_acts(kShape.nt, kShape.id, Acts::random, 4);
    acts[at(10 * kShape.id + 500)] = std::numeric_limits<float>::infinity();
    const std::uint16_t nan = 0x7e00;  // the scale of row 3's second block
    std::memcpy(weights.data() + 3 * ladder::row_bytes(WeightType::q8_0, kShape.id) + 34, &nan, sizeof nan);
    const auto out = int8_gemm(WeightType::q8_0, weights, acts, kShape, pool);
    for (long long t = 0; t < kShape.nt; ++t) {
      for (long long r = 0; r < kShape.od; ++r) {
        CHECK(std::isfinite(out[at(t * kShape.od + r)]) == !(t == 10 || r == 3));
      }
    }
  });
}

TEST_CASE("int8: what does not fit is refused") {
  ThreadPool pool(1);
  std::vector<float> acts(1024, 1.0F), out(64);
  const std::vector<unsigned char> weights(4096);
  Int8Gemm gemm;
  const auto multiply = [&](WeightType type, Shape s, const float* floats) {
    const Product product{type, weights.data(), s.od, out.data()};
    gemm.multiply({&product, 1}, floats, s.nt, s.id, pool);
  };
  CHECK_THROWS_AS(multiply(WeightType::q4_0, {1, 1, 32}, nullptr),
                  std::invalid_argument);  // no activations yet
  CHECK_THROWS_AS(gemm.quantize(acts.data(), 0, 32, pool), std::invalid_argument);
  CHECK_THROWS_AS(gemm.quantize(acts.data(), 1, 33, pool), std::invalid_argument);
  gemm.quantize(acts.data(), 2, 64, pool);
  CHECK_NOTHROW(multiply(WeightType::q4_0, {2, 1, 64}, nullptr));
  CHECK_THROWS_AS(multiply(WeightType::q4_0, {1, 1, 64}, nullptr), std::invalid_argument);
  CHECK_THROWS_AS(multiply(WeightType::q4_0, {2, 1, 32}, nullptr), std::invalid_argument);
  CHECK_THROWS_AS(multiply(WeightType::q4_0, {2, 0, 64}, nullptr), std::invalid_argument);
  CHECK_THROWS_AS(multiply(WeightType::q4_k, {2, 1, 64}, nullptr), std::invalid_argument);
  CHECK_THROWS_AS(multiply(WeightType::f16, {2, 1, 64}, nullptr), std::invalid_argument);
  CHECK_NOTHROW(multiply(WeightType::f16, {2, 1, 64}, acts.data()));
  const std::vector<BlockQ8Pad40> blocks(16);
  CHECK_THROWS_AS(ladder::cpu::quant_int8_gemm(WeightType::f16, weights.data(), blocks.data(), out.data(),
                                               {1, 1, 32}, pool),
                  std::invalid_argument);
  CHECK_THROWS_AS(ladder::cpu::quant_int8_gemm_planes(WeightType::q4_0, weights.data(), blocks.data(),
                                                      out.data(), {1, 1, 48}, pool),
                  std::invalid_argument);
  if (ladder::cpu::isa() != Isa::portable) {
    ladder::cpu::force_isa(Isa::portable);
    CHECK_THROWS_AS(multiply(WeightType::q4_0, {2, 1, 64}, nullptr), std::logic_error);
    ladder::cpu::force_isa(std::nullopt);
  }
  CHECK(ladder::cpu::quant_int8_gemm_source(WeightType::f16).empty());
  CHECK(ladder::cpu::quant_int8_gemm_source(WeightType::q4_k).find("#cpu_int8_panels") != std::string::npos);
}

}  // namespace
