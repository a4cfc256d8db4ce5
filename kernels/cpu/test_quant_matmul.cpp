// Tests of the CPU's quantized matmuls: every type on every instruction set that this machine has.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "harness/device/half_bits.hpp"
#include "kernels/cpu/features.hpp"
#include "kernels/cpu/quant_matmul.hpp"
#include "kernels/cpu/test_quant_operands.hpp"
#include "kernels/cpu/thread_pool.hpp"
#include "kernels/quant/decode.hpp"
#include "kernels/quant/dequantize.hpp"
#include "kernels/quant/quantize_acts.hpp"

namespace {

using FloatActsMatmul = void (*)(WeightType, const void*, const float*, float*, Shape, ThreadPool&);
constexpr FloatActsMatmul kBoth[] = {ladder::cpu::quant_int8_matmul, ladder::cpu::quant_f32_matmul};

/// Outputs outside their bound, of the int8 and the f32 way, for one problem.
struct Failures {
  int int8_rounding = 0, int8_total = 0, f32 = 0;
  bool bands = true;
};

Failures failures(WeightType type, Shape shape, Scales scales, Acts kind, ThreadPool& pool) {
  const auto [nt, od, id] = shape;
  const auto bytes = random_weights(type, od, id, scales, static_cast<unsigned>(id + od));
  const auto acts = random_acts(nt, id, kind, static_cast<unsigned>(nt + 3));
  const Exact w(type, bytes);
  Failures f;

  Guarded exact_out(nt * od);
  ladder::cpu::quant_f32_matmul(type, bytes.data(), acts.data(), exact_out.data(), shape, pool);
  const bool int8 = ladder::cpu::uses_int8(type);
  Guarded out(nt * od);
  QuantizedActs q;
  if (int8) {
    q.quantize(acts.data(), nt, id, pool);
    const Product product{type, bytes.data(), od, out.data()};
    ladder::cpu::multiply({&product, 1}, acts.data(), &q, nt, id, pool);
  }
  f.bands = out.bands_intact() && exact_out.bands_intact();

  const double groups = static_cast<double>((id + 255) / 256);
  for (long long t = 0; t < nt; ++t) {
    std::vector<double> rounded(static_cast<std::size_t>(id)), half(rounded.size());
    for (long long k = 0; k < id && int8; ++k) {
      const auto i = static_cast<std::size_t>(k);
      rounded[i] = static_cast<double>(q.scale(t, k)) * q.code(t, k);
      double largest = 0;
      for (long long j = k / 32 * 32; j < k / 32 * 32 + 32; ++j) {
        largest =
            std::max(largest, std::fabs(static_cast<double>(acts[static_cast<std::size_t>(t * id + j)])));
      }
      half[i] = largest < 127 * 0x1p-128 ? largest : largest / 254 * (1 + 0x1p-20);
    }
    for (long long r = 0; r < od; ++r) {
      double with_rounded = 0, with_exact = 0, terms = 0, exact_terms = 0, act_rounding = 0;
      for (long long k = 0; k < id; ++k) {
        const auto i = static_cast<std::size_t>(k), wi = static_cast<std::size_t>(r * id + k);
        const double x = acts[static_cast<std::size_t>(t * id + k)];
        const double value = w.scale[wi] * w.code[wi] + w.offset[wi];
        const double magnitude = std::fabs(w.scale[wi] * w.code[wi]) + std::fabs(w.offset[wi]);
        with_exact += value * x;
        exact_terms += magnitude * std::fabs(x);
        with_rounded += value * rounded[i];
        terms += magnitude * std::fabs(rounded[i]);
        act_rounding += std::fabs(value) * half[i];
      }
      // An underflow of a product, a sum or a scale may cost half of the smallest f32 each.
      const double underflow = static_cast<double>(2 * id) * 0x1p-149;
      const double rounding = (10 * groups + 8) * kUnit * terms + underflow;
      if (int8) {
        const double got = out.data()[t * od + r];
        if (!(std::isfinite(got) && std::fabs(got - with_rounded) <= rounding)) ++f.int8_rounding;
        if (!(std::isfinite(got) && std::fabs(got - with_exact) <= rounding + act_rounding)) ++f.int8_total;
      }
      const double got = exact_out.data()[t * od + r];
      const double bound = (static_cast<double>(id) + 3) * kUnit * exact_terms + underflow;
      if (!(std::isfinite(got) && std::fabs(got - with_exact) <= bound)) ++f.f32;
    }
  }
  return f;
}

void check(WeightType type, Shape shape, Scales scales, Acts acts, ThreadPool& pool) {
  const Failures f = failures(type, shape, scales, acts, pool);
  CAPTURE(info(type).name);
  CAPTURE(shape.nt);
  CAPTURE(shape.od);
  CAPTURE(shape.id);
  CHECK(f.int8_rounding == 0);
  CHECK(f.int8_total == 0);
  CHECK(f.f32 == 0);
  CHECK(f.bands);
}

TEST_CASE("every type, ragged shapes: within the bound of the exact product") {
  ThreadPool pool(2);
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    for (const WeightType type : all_types()) {
      const long long block = info(type).block_elems;
      const long long unit = std::max(block, 32LL);
      for (const auto& [nt, od] : {std::pair{1LL, 9LL}, {2LL, 5LL}, {7LL, 3LL}, {8LL, 5LL}, {9LL, 2LL}}) {
        for (const long long multiple : {1LL, 3LL, 7LL, 8LL, 9LL, 15LL}) {
          check(type, {nt, od, unit * multiple}, Scales::random, Acts::random, pool);
        }
      }
      check(type, {65, 3, unit * 3}, Scales::random, Acts::random, pool);
      check(type, {1, 67, 256 * 3}, Scales::random, Acts::random, pool);
      check(type, {1, 2, 18944}, Scales::random, Acts::random, pool);
      if (block == 1) check(type, {3, 5, 77}, Scales::random, Acts::random, pool);
    }
  });
}

TEST_CASE("outliers, blocks of zeros and subnormal numbers stay within the bound") {
  ThreadPool pool(2);
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    for (const WeightType type : all_types()) {
      check(type, {3, 5, 1280}, Scales::random, Acts::outliers, pool);
      check(type, {3, 5, 1280}, Scales::tiny, Acts::random, pool);
    }
  });
}

TEST_CASE("small integers and unit scales: every bit is right") {
  ThreadPool pool(2);
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    for (const WeightType type : all_types()) {
      CAPTURE(info(type).name);
      const Shape shape{3, 5, 512};
      const auto bytes = random_weights(type, shape.od, shape.id, Scales::ones, 11);
      const auto acts = random_acts(shape.nt, shape.id, Acts::integers, 12);
      const Exact w(type, bytes);
      std::vector<float> int8(15, kNan), f32(15, kNan);
      ladder::cpu::quant_int8_matmul(type, bytes.data(), acts.data(), int8.data(), shape, pool);
      ladder::cpu::quant_f32_matmul(type, bytes.data(), acts.data(), f32.data(), shape, pool);
      for (long long t = 0; t < shape.nt; ++t) {
        for (long long r = 0; r < shape.od; ++r) {
          double sum = 0, magnitude = 0;
          for (long long k = 0; k < shape.id; ++k) {
            const auto wi = static_cast<std::size_t>(r * shape.id + k);
            const double x = acts[static_cast<std::size_t>(t * shape.id + k)];
            sum += (w.scale[wi] * w.code[wi] + w.offset[wi]) * x;
            magnitude += (std::fabs(w.scale[wi] * w.code[wi]) + std::fabs(w.offset[wi])) * std::fabs(x);
          }
          REQUIRE(magnitude < 16777216.0);  // so that every order of summation is exact
          CHECK(static_cast<double>(int8[static_cast<std::size_t>(t * shape.od + r)]) == sum);
          CHECK(static_cast<double>(f32[static_cast<std::size_t>(t * shape.od + r)]) == sum);
        }
      }
    }
  });
}

TEST_CASE("a token's bits depend neither on its company nor on the number of threads") {
  constexpr long long kTokens = 65, kRows = 37, kLength = 1024 + 256;
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    for (const WeightType type : all_types()) {
      CAPTURE(info(type).name);
      const auto bytes = random_weights(type, kRows, kLength, Scales::random, 3);
      const auto acts = random_acts(kTokens, kLength, Acts::random, 4);
      for (const FloatActsMatmul multiply : kBoth) {
        ThreadPool pool(1);
        std::vector<float> alone(static_cast<std::size_t>(kTokens * kRows), kNan);
        for (long long t = 0; t < kTokens; ++t) {
          multiply(type, bytes.data(), acts.data() + t * kLength, alone.data() + t * kRows,
                   {1, kRows, kLength}, pool);
        }
        for (const int threads : {1, 2, 3}) {
          ThreadPool several(threads);
          for (const long long nt : {2LL, 3LL, 5LL, 7LL, 8LL, 9LL, 64LL, 65LL}) {
            std::vector<float> together(static_cast<std::size_t>(nt * kRows), kNan);
            multiply(type, bytes.data(), acts.data(), together.data(), {nt, kRows, kLength}, several);
            CAPTURE(nt);
            CHECK(same_bits(together.data(), alone.data(), nt * kRows));
          }
        }
        // A row stands where it likes: the last rows as a matrix of their own.
        std::vector<float> last(3, kNan);
        multiply(type, bytes.data() + static_cast<std::size_t>(kRows - 3) * ladder::row_bytes(type, kLength),
                 acts.data(), last.data(), {1, 3, kLength}, pool);
        CHECK(same_bits(last.data(), alone.data() + kRows - 3, 3));
      }
    }
  });
}

TEST_CASE("the instruction that multiplies does not change a bit") {
  constexpr Shape kShape{3, 9, 1280};
  ThreadPool pool(1);
  for (const WeightType type : all_types()) {
    CAPTURE(info(type).name);
    const auto bytes = random_weights(type, kShape.od, kShape.id, Scales::random, 3);
    const auto acts = random_acts(kShape.nt, kShape.id, Acts::random, 4);
    std::vector<std::vector<float>> of_isa(8);
    on_every_isa([&](const std::string& isa) {
      CAPTURE(isa);
      std::vector<float> out(static_cast<std::size_t>(kShape.nt * kShape.od), kNan);
      ladder::cpu::quant_int8_matmul(type, bytes.data(), acts.data(), out.data(), kShape, pool);
      auto& first = of_isa[static_cast<std::size_t>(ladder::cpu::isa())];
      if (first.empty()) first = out;
      CHECK(same_bits(out.data(), first.data(), kShape.nt * kShape.od));
    });
  }
}

TEST_CASE("several matrices in one call give what each gives alone") {
  ThreadPool pool(2);
  constexpr long long kTokens = 3, kLength = 768;
  const auto acts = random_acts(kTokens, kLength, Acts::random, 1);
  const WeightType types[] = {WeightType::q4_k, WeightType::f16, WeightType::q6_k};
  const long long rows[] = {33, 1, 18};
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    QuantizedActs q;
    q.quantize(acts.data(), kTokens, kLength, pool);
    std::vector<std::vector<unsigned char>> weights;
    std::vector<std::vector<float>> out, alone;
    std::vector<Product> products;
    for (std::size_t i = 0; i < 3; ++i) {
      weights.push_back(random_weights(types[i], rows[i], kLength, Scales::random, static_cast<unsigned>(i)));
      out.emplace_back(static_cast<std::size_t>(kTokens * rows[i]), kNan);
      alone.push_back(out.back());
    }
    for (std::size_t i = 0; i < 3; ++i) {
      products.push_back({types[i], weights[i].data(), rows[i], out[i].data()});
      ladder::cpu::quant_int8_matmul(types[i], weights[i].data(), acts.data(), alone[i].data(),
                                     {kTokens, rows[i], kLength}, pool);
    }
    ladder::cpu::multiply(products, acts.data(), &q, kTokens, kLength, pool);
    for (std::size_t i = 0; i < 3; ++i) CHECK(same_bits(out[i].data(), alone[i].data(), kTokens * rows[i]));
  });
}

TEST_CASE("activations: halves go to even, and every instruction set rounds alike") {
  ThreadPool pool(1);
  std::vector<float> acts(64, 0.0F);
  acts[0] = 127;  // scale 1
  acts[1] = 0.5F, acts[2] = 1.5F, acts[3] = -2.5F, acts[4] = 3.4999998F, acts[5] = -126.5F;
  acts[40] = -1e-3F, acts[41] = 9e-4F;
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    QuantizedActs q;
    q.quantize(acts.data(), 1, 64, pool);
    CHECK(q.scale(0, 0) == 1.0F);
    const int expected[] = {127, 0, 2, -2, 3, -126};
    for (int k = 0; k < 6; ++k) CHECK(q.code(0, k) == expected[k]);
    CHECK(q.scale(0, 40) == 1e-3F / 127);
    CHECK(q.code(0, 40) == -127);
    CHECK(q.code(0, 41) == 114);
    CHECK(q.code(0, 63) == 0);
  });
  // Random activations: equal codes and scales everywhere.
  const auto random = random_acts(2, 1056, Acts::random, 9);
  std::vector<int> codes;
  std::vector<float> scales;
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    QuantizedActs q;
    q.quantize(random.data(), 2, 1056, pool);
    std::vector<int> c;
    std::vector<float> s;
    for (int i = 0; i < 2 * 1056; ++i) {
      c.push_back(q.code(i / 1056, i % 1056));
      s.push_back(q.scale(i / 1056, i % 1056));
    }
    if (codes.empty()) codes = c, scales = s;
    CHECK(c == codes);
    CHECK(s == scales);
  });
}

TEST_CASE("what is not finite reaches its outputs and no others") {
  ThreadPool pool(2);
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    for (const WeightType type : all_types()) {
      CAPTURE(info(type).name);
      const auto bytes = random_weights(type, 4, 512, Scales::random, 5);
      for (const float bad : {kNan, std::numeric_limits<float>::infinity()}) {
        auto acts = random_acts(2, 512, Acts::random, 6);
        acts[512 + 300] = bad;  // of token 1
        for (const FloatActsMatmul multiply : kBoth) {
          std::vector<float> out(8, 0.0F);
          multiply(type, bytes.data(), acts.data(), out.data(), {2, 4, 512}, pool);
          for (int r = 0; r < 4; ++r) {
            CHECK(std::isfinite(out[static_cast<std::size_t>(r)]));
            CHECK_FALSE(std::isfinite(out[static_cast<std::size_t>(4 + r)]));
          }
        }
      }
    }
  });
}

/// Bytes that end where a page begins that may not be read, as the last tensor of a map may.
class EndOfMap {
 public:
  explicit EndOfMap(const std::vector<unsigned char>& bytes)
      : page_(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))) {
    const std::size_t body = (bytes.size() + page_ - 1) / page_ * page_;
    size_ = body + page_;
    map_ = static_cast<unsigned char*>(
        ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(map_ != MAP_FAILED);
    data_ = map_ + body - bytes.size();
    std::copy(bytes.begin(), bytes.end(), data_);
    REQUIRE(::mprotect(map_ + body, page_, PROT_NONE) == 0);
  }
  ~EndOfMap() { ::munmap(map_, size_); }
  EndOfMap(const EndOfMap&) = delete;
  EndOfMap& operator=(const EndOfMap&) = delete;
  [[nodiscard]] const unsigned char* data() const { return data_; }

 private:
  std::size_t page_, size_ = 0;
  unsigned char *map_ = nullptr, *data_ = nullptr;
};

TEST_CASE("nothing is read behind the last row, and a matrix may stand at any even address") {
  ThreadPool pool(2);
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    for (const WeightType type : all_types()) {
      CAPTURE(info(type).name);
      const long long unit = std::max(info(type).block_elems, 32);
      for (const long long multiple : {1LL, 3LL, 4LL, 5LL, 7LL, 8LL, 9LL, 31LL}) {
        for (const long long nt : {1LL, 2LL, 8LL}) {
          const Shape shape{nt, 3, unit * multiple};
          const auto bytes = random_weights(type, shape.od, shape.id, Scales::random, 21);
          const auto acts = random_acts(nt, shape.id, Acts::random, 22);
          const EndOfMap end(bytes);
          std::vector<float> out(static_cast<std::size_t>(nt * shape.od), kNan), there = out;
          for (const FloatActsMatmul multiply : kBoth) {
            multiply(type, bytes.data(), acts.data(), out.data(), shape, pool);
            multiply(type, end.data(), acts.data(), there.data(), shape, pool);
            CHECK(same_bits(out.data(), there.data(), nt * shape.od));
          }
        }
      }
    }
  });
}

// Activations that are int8 blocks --------------------------------------------------------------------------

enum class Blocks { rounded, outliers, any_scale, integers };

/// @return [nt][id/32]
std::vector<BlockQ8Pad40> random_blocks(long long nt, long long id, Blocks kind, unsigned seed) {
  std::vector<BlockQ8Pad40> blocks(static_cast<std::size_t>(nt * id / 32));
  if (kind == Blocks::any_scale) {  // of either sign, many of them subnormal, some zero
    std::minstd_rand random(seed);
    for (auto& b : blocks) {
      const unsigned exponent = random() % 3 == 0 ? 0 : random() % 20;
      b.d = static_cast<std::uint16_t>(random() % 2 << 15 | exponent << 10 | random() % 1024);
      if (random() % 8 == 0) b.d = 0;
      b.pad = 0;
      b.sum = 0;
      for (auto& q : b.q) {
        q = static_cast<std::int8_t>(static_cast<int>(random() % 255) - 127);
        b.sum += q;
      }
    }
    return blocks;
  }
  const Acts acts = kind == Blocks::rounded    ? Acts::random
                    : kind == Blocks::outliers ? Acts::outliers
                                               : Acts::integers;
  ladder::quantize_q8_pad40_row(random_acts(nt, id, acts, seed), blocks.data());
  return blocks;
}

/// The product of weights and blocks in f64, and what its error is measured by.
struct BlockProduct {
  std::vector<double> value, magnitude;  // [nt][od]
  BlockProduct(WeightType type, const std::vector<unsigned char>& bytes,
               const std::vector<BlockQ8Pad40>& blocks, Shape shape) {
    const Exact w(type, bytes);
    for (long long t = 0; t < shape.nt; ++t) {
      for (long long r = 0; r < shape.od; ++r) {
        double sum = 0, terms = 0;
        for (long long k = 0; k < shape.id; ++k) {
          const BlockQ8Pad40& b = blocks[static_cast<std::size_t>((t * shape.id + k) / 32)];
          const double x = static_cast<double>(ladder::half_bits_to_float(b.d)) * b.q[k % 32];
          const auto i = static_cast<std::size_t>(r * shape.id + k);
          sum += (w.scale[i] * w.code[i] + w.offset[i]) * x;
          terms += (std::fabs(w.scale[i] * w.code[i]) + std::fabs(w.offset[i])) * std::fabs(x);
        }
        value.push_back(sum);
        magnitude.push_back(terms);
      }
    }
  }
  /// Outputs that check_outputs() of the harness would refuse.
  [[nodiscard]] int refused(const float* out, double roundings) const {
    const double factor = std::min(roundings, 8 * std::sqrt(roundings));
    int count = 0;
    for (std::size_t i = 0; i < value.size(); ++i) {
      const double error = std::fabs(static_cast<double>(out[i]) - value[i]);
      if (!(std::isfinite(out[i]) && error <= factor * kUnit * magnitude[i])) ++count;
    }
    return count;
  }
};

std::vector<WeightType> int8_types() {
  std::vector<WeightType> types;
  for (const WeightType t : all_types()) {
    if (ladder::cpu::uses_int8(t)) types.push_back(t);
  }
  return types;
}

TEST_CASE("int8 blocks: within the bound of the product of the very blocks") {
  ThreadPool pool(2);
  for (const WeightType type : int8_types()) {
    CAPTURE(info(type).name);
    const long long unit = info(type).block_elems;
    const auto check_blocks = [&](Shape shape, Scales scales, Blocks kind) {
      CAPTURE(shape.nt);
      CAPTURE(shape.od);
      CAPTURE(shape.id);
      CAPTURE(static_cast<int>(kind));
      const auto bytes = random_weights(type, shape.od, shape.id, scales, static_cast<unsigned>(shape.id));
      const auto blocks = random_blocks(shape.nt, shape.id, kind, static_cast<unsigned>(shape.nt + 7));
      const BlockProduct exact(type, bytes, blocks, shape);
      on_every_isa([&](const std::string& isa) {
        CAPTURE(isa);
        Guarded out(shape.nt * shape.od);
        ladder::cpu::quant_int8_matmul(type, bytes.data(), blocks.data(), out.data(), shape, pool);
        const double roundings =
            kind == Blocks::integers ? 0 : ladder::cpu::quant_int8_roundings(type, shape.id);
        CHECK(exact.refused(out.data(), roundings) == 0);
        CHECK(out.bands_intact());
      });
    };
    for (const long long multiple : {1LL, 3LL, 5LL, 7LL, 8LL, 9LL, 15LL, 33LL}) {
      for (const auto& [nt, od] : {std::pair{1LL, 9LL}, {2LL, 5LL}, {7LL, 3LL}, {9LL, 2LL}}) {
        check_blocks({nt, od, unit * multiple}, Scales::random, Blocks::rounded);
      }
      check_blocks({3, 4, unit * multiple}, Scales::random, Blocks::any_scale);
    }
    check_blocks({1, 3, 18944 - (unit == 32 ? 32 : 0)}, Scales::random, Blocks::rounded);
    check_blocks({1, 3, 18944}, Scales::random, Blocks::any_scale);
    check_blocks({65, 3, unit * 3}, Scales::random, Blocks::rounded);
    check_blocks({3, 5, 1280}, Scales::random, Blocks::outliers);
    check_blocks({3, 5, 1280}, Scales::tiny, Blocks::any_scale);
    check_blocks({3, 5, 512}, Scales::ones, Blocks::integers);
  }
}

/// What can go wrong with a block.
enum class Bug { none, sum_forgotten, scale_of_neighbour, sum_of_half, last_block_dropped };

/// The product block by block, in the plainest way that uses the sums: codes made unsigned, as vpdpbusd wants
/// them, and what that adds taken off by means of the sum.
std::vector<float> plain_twin(WeightType type, const std::vector<unsigned char>& bytes,
                              const std::vector<BlockQ8Pad40>& blocks, Shape shape, Bug bug) {
  constexpr int kZero = 128;
  const Exact w(type, bytes);
  const long long blocks_of_row = shape.id / 32;
  std::vector<float> out;
  for (long long t = 0; t < shape.nt; ++t) {
    for (long long r = 0; r < shape.od; ++r) {
      float sum = 0;
      for (long long n = 0; n < blocks_of_row; ++n) {
        if (bug == Bug::last_block_dropped && n + 1 == blocks_of_row) continue;
        const BlockQ8Pad40& b = blocks[static_cast<std::size_t>(t * blocks_of_row + n)];
        const long long scale_from = bug == Bug::scale_of_neighbour ? (n + 1) % blocks_of_row : n;
        const float d =
            ladder::half_bits_to_float(blocks[static_cast<std::size_t>(t * blocks_of_row + scale_from)].d);
        for (int half = 0; half < 2; ++half) {  // a run of weights with one scale
          const auto at = static_cast<std::size_t>(r * shape.id + 32 * n + 16 * half);
          int dot = 0, codes = 0;
          for (int j = 0; j < 16; ++j) {
            const int q = b.q[16 * half + j];
            dot += (static_cast<int>(w.code[at + static_cast<std::size_t>(j)]) + kZero) * q;
            codes += q;
          }
          // The first run's sum is what the block's leaves for it.
          int rest = 0;
          for (int j = 0; j < 16; ++j) rest += b.q[16 * (1 - half) + j];
          int s = b.sum - rest;
          if (bug == Bug::sum_forgotten) s = 0;
          if (bug == Bug::sum_of_half) s = codes / 2;
          sum += static_cast<float>(w.scale[at]) * d * static_cast<float>(dot - kZero * s);
          sum += static_cast<float>(w.offset[at]) * d * static_cast<float>(s);
        }
      }
      out.push_back(sum);
    }
  }
  return out;
}

TEST_CASE("int8 blocks: a wrong product is refused") {
  constexpr Shape kShape{2, 6, 768};
  ThreadPool pool(1);
  for (const WeightType type : int8_types()) {
    CAPTURE(info(type).name);
    const auto bytes = random_weights(type, kShape.od, kShape.id, Scales::random, 31);
    const auto blocks = random_blocks(kShape.nt, kShape.id, Blocks::rounded, 32);
    const BlockProduct exact(type, bytes, blocks, kShape);
    const double serial = 4 * kShape.id / 32 + 4;  // roundings of the plain twin
    CHECK(exact.refused(plain_twin(type, bytes, blocks, kShape, Bug::none).data(), serial) == 0);
    for (const Bug bug :
         {Bug::sum_forgotten, Bug::scale_of_neighbour, Bug::sum_of_half, Bug::last_block_dropped}) {
      CAPTURE(static_cast<int>(bug));
      CHECK(exact.refused(plain_twin(type, bytes, blocks, kShape, bug).data(), serial) > 6);  // of 12
    }
    // The twin itself on blocks with one thing wrong in one of them.
    on_every_isa([&](const std::string& isa) {
      CAPTURE(isa);
      for (const int wrong : {0, 1, 2}) {
        CAPTURE(wrong);
        auto changed = blocks;
        BlockQ8Pad40& b = changed[5];  // of token 0
        if (wrong == 0) b.d = changed[6].d;
        if (wrong == 1) std::swap(b.q[15], b.q[16]);
        if (wrong == 2) b.q[31] = static_cast<std::int8_t>(b.q[31] > 0 ? b.q[31] - 60 : b.q[31] + 60);
        std::vector<float> out(12, kNan);
        ladder::cpu::quant_int8_matmul(type, bytes.data(), changed.data(), out.data(), kShape, pool);
        CHECK(exact.refused(out.data(), ladder::cpu::quant_int8_roundings(type, kShape.id)) > 0);
      }
    });
  }
}

TEST_CASE("int8 blocks: a token's bits depend neither on its company nor on the number of threads") {
  constexpr long long kTokens = 9, kRows = 37, kLength = 1024 + 256;
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    for (const WeightType type : int8_types()) {
      CAPTURE(info(type).name);
      const auto bytes = random_weights(type, kRows, kLength, Scales::random, 3);
      auto blocks = random_blocks(kTokens, kLength, Blocks::rounded, 4);
      ThreadPool pool(1);
      std::vector<float> alone(static_cast<std::size_t>(kTokens * kRows), kNan);
      for (long long t = 0; t < kTokens; ++t) {
        ladder::cpu::quant_int8_matmul(type, bytes.data(), blocks.data() + t * (kLength / 32),
                                       alone.data() + t * kRows, {1, kRows, kLength}, pool);
      }
      for (const int threads : {1, 2, 3}) {
        ThreadPool several(threads);
        for (long long nt = 1; nt <= kTokens; ++nt) {
          std::vector<float> together(static_cast<std::size_t>(nt * kRows), kNan);
          ladder::cpu::quant_int8_matmul(type, bytes.data(), blocks.data(), together.data(),
                                         {nt, kRows, kLength}, several);
          CAPTURE(nt);
          CHECK(same_bits(together.data(), alone.data(), nt * kRows));
        }
      }
      // Sums are not read.
      for (auto& b : blocks) b.sum = 12345, b.pad = 0xffff;
      std::vector<float> again(alone.size(), kNan);
      ladder::cpu::quant_int8_matmul(type, bytes.data(), blocks.data(), again.data(),
                                     {kTokens, kRows, kLength}, pool);
      CHECK(same_bits(again.data(), alone.data(), kTokens * kRows));
    }
  });
}

TEST_CASE("int8 blocks are taken as they are, and nothing behind them is read") {
  for (const int threads : {1, 2}) {
    ThreadPool pool(threads);
    on_every_isa([&](const std::string& isa) {
      CAPTURE(isa);
      QuantizedActs q;
      for (const auto& [nt, id] : {std::pair{1LL, 32LL}, {2LL, 1056LL}, {3LL, 256LL}, {700LL, 288LL}}) {
        const auto blocks = random_blocks(nt, id, Blocks::any_scale, static_cast<unsigned>(id));
        std::vector<unsigned char> bytes(blocks.size() * sizeof blocks[0]);
        std::memcpy(bytes.data(), blocks.data(), bytes.size());
        const EndOfMap end(bytes);
        q.assign(reinterpret_cast<const BlockQ8Pad40*>(end.data()), nt, id, pool);
        CHECK(q.nt() == nt);
        CHECK(q.id() == id);
        int wrong = 0;
        for (long long i = 0; i < nt * id; ++i) {
          const BlockQ8Pad40& b = blocks[static_cast<std::size_t>(i / 32)];
          if (q.code(i / id, i % id) != b.q[i % 32]) ++wrong;
          if (q.scale(i / id, i % id) != ladder::half_bits_to_float(b.d)) ++wrong;
        }
        CHECK(wrong == 0);
      }
    });
  }
}

TEST_CASE("every type names the code that multiplies it") {
  for (const WeightType type : all_types()) {
    const std::string source = ladder::cpu::quant_int8_source(type);
    CAPTURE(source);
    const bool own =
        (source + ",").find(std::string("#cpu_int8_") + info(type).name + ",") != std::string::npos;
    CHECK(own == ladder::cpu::uses_int8(type));
    CHECK(source.empty() != ladder::cpu::uses_int8(type));
  }
}

TEST_CASE("int8 blocks that are not finite reach their outputs and no others") {
  ThreadPool pool(2);
  on_every_isa([&](const std::string& isa) {
    CAPTURE(isa);
    for (const WeightType type : int8_types()) {
      CAPTURE(info(type).name);
      const auto bytes = random_weights(type, 4, 512, Scales::random, 5);
      for (const std::uint16_t bad : {0x7c00, 0xfc00, 0x7e00, 0x7d01}) {
        auto blocks = random_blocks(2, 512, Blocks::rounded, 6);
        blocks[16 + 9].d = bad;  // of token 1
        std::vector<float> out(8, 0.0F);
        ladder::cpu::quant_int8_matmul(type, bytes.data(), blocks.data(), out.data(), {2, 4, 512}, pool);
        for (int r = 0; r < 4; ++r) {
          CHECK(std::isfinite(out[static_cast<std::size_t>(r)]));
          CHECK_FALSE(std::isfinite(out[static_cast<std::size_t>(4 + r)]));
        }
      }
    }
  });
}

TEST_CASE("wrong arguments are refused") {
  ThreadPool pool(1);
  std::vector<float> acts(256), out(4);
  const std::vector<unsigned char> weights(4096);
  const auto int8 = [&](WeightType type, Shape shape) {
    ladder::cpu::quant_int8_matmul(type, weights.data(), acts.data(), out.data(), shape, pool);
  };
  CHECK_THROWS_AS(int8(WeightType::q4_0, {1, 1, 33}), std::invalid_argument);
  CHECK_THROWS_AS(int8(WeightType::q4_k, {1, 1, 128}), std::invalid_argument);
  CHECK_THROWS_AS(int8(WeightType::q4_0, {0, 1, 32}), std::invalid_argument);
  CHECK_THROWS_AS(int8(WeightType::q4_0, {1, 0, 32}), std::invalid_argument);
  CHECK_THROWS_AS(int8(WeightType::f16, {1, 1, 0}), std::invalid_argument);
  QuantizedActs q;
  CHECK_THROWS_AS(q.quantize(acts.data(), 1, 16, pool), std::invalid_argument);
  const std::vector<BlockQ8Pad40> blocks(16);
  CHECK_THROWS_AS(q.assign(blocks.data(), 1, 16, pool), std::invalid_argument);
  CHECK_THROWS_AS(q.assign(blocks.data(), 0, 32, pool), std::invalid_argument);
  const auto on_blocks = [&](WeightType type, Shape shape) {
    ladder::cpu::quant_int8_matmul(type, weights.data(), blocks.data(), out.data(), shape, pool);
  };
  CHECK_THROWS_AS(on_blocks(WeightType::f16, {1, 1, 32}), std::invalid_argument);
  CHECK_THROWS_AS(on_blocks(WeightType::f32, {1, 1, 32}), std::invalid_argument);
  CHECK_THROWS_AS(on_blocks(WeightType::q4_0, {1, 1, 33}), std::invalid_argument);
  CHECK_THROWS_AS(on_blocks(WeightType::q4_k, {1, 1, 32}), std::invalid_argument);
  CHECK_THROWS_AS(on_blocks(WeightType::q4_0, {1, 0, 32}), std::invalid_argument);
  q.quantize(acts.data(), 1, 64, pool);
  const Product product{WeightType::q4_0, weights.data(), 1, out.data()};
  CHECK_THROWS_AS(ladder::cpu::multiply({&product, 1}, acts.data(), &q, 2, 64, pool), std::invalid_argument);
  CHECK_THROWS_AS(ladder::cpu::multiply({&product, 1}, acts.data(), &q, 1, 32, pool), std::invalid_argument);
  if (ladder::cpu::isa() != Isa::portable) {
    ladder::cpu::force_isa(Isa::portable);
    CHECK_THROWS_AS(ladder::cpu::multiply({&product, 1}, acts.data(), &q, 1, 64, pool), std::logic_error);
    ladder::cpu::force_isa(std::nullopt);
  }
}

}  // namespace
