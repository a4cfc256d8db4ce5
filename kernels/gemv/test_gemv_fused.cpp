// gemv_fused against float64: every type, rows that end inside a step, few rows and more than a block's sums hold, up to
// three matrices, bias, residual in place, normalisation, gate; poisoned outputs and guard bands.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "harness/device/doctest_main.hpp"
#include "harness/device/half_bits.hpp"
#include "harness/experiment/check.hpp"
#include "kernels/gemv/gemv_fused.cuh"

using namespace ladder;

namespace {

constexpr float kEpsilon = 1e-6f;

enum class Values { integers, reals };

/// A matrix, or a vector, of random numbers as a type has them.
struct Numbers {
  std::vector<unsigned char> bytes;
  std::vector<double> value;

  Numbers(WeightType type, std::size_t n, Values values, std::mt19937& generator)
      : bytes(n * info(type).block_bytes), value(n) {
    for (std::size_t i = 0; i < n; ++i) {
      float v = static_cast<float>(static_cast<int>(generator() % 9)) - 4;
      if (values == Values::reals) v = static_cast<float>(generator() >> 8) / 8388608.0f - 1.0f;
      unsigned char* const to = bytes.data() + i * info(type).block_bytes;
      if (type == WeightType::f32) {
        std::memcpy(to, &v, 4);
      } else if (type == WeightType::f16) {
        const std::uint16_t half = float_to_half_bits(v);
        v = half_bits_to_float(half);
        std::memcpy(to, &half, 2);
      } else {  // bf16: the upper half of an f32
        std::uint32_t bits = 0;
        std::memcpy(&bits, &v, 4);
        bits &= 0xffff0000u;
        std::memcpy(&v, &bits, 4);
        const auto upper = static_cast<std::uint16_t>(bits >> 16);
        std::memcpy(to, &upper, 2);
      }
      value[i] = v;
    }
  }
  [[nodiscard]] GuardedBuffer<unsigned char> on_device(const char* name) const {
    GuardedBuffer<unsigned char> b(bytes.size(), name);
    b.upload(bytes);
    return b;
  }
};

/// A matrix and what is added to its product.
struct Matrix {
  Numbers weights, bias, residual;
  GuardedBuffer<unsigned char> weights_there, bias_there;
  GuardedBuffer<float> out;

  Matrix(WeightType type, std::size_t od, std::size_t id, Values values, std::mt19937& generator)
      : weights(type, od * id, values, generator),
        bias(WeightType::f32, od, values, generator),
        residual(WeightType::f32, od, values, generator),
        weights_there(weights.on_device("weights")),
        bias_there(bias.on_device("bias")),
        out(od, "out") {}
};

struct Case {
  WeightType type;
  std::vector<int> ods;
  int id;
  bool norm = false, bias = false, residual = false, gate = false;
};

const float* floats(GuardedBuffer<unsigned char>& b) { return reinterpret_cast<const float*>(b.data()); }

/// One launch of a case, every output compared with float64.
void check(const Case& c, Values values) {
  CAPTURE(std::string(info(c.type).name));
  CAPTURE(c.id);
  CAPTURE(c.ods);
  CAPTURE(c.norm);
  CAPTURE(c.gate);
  std::mt19937 generator(static_cast<unsigned>(c.id));
  const auto id = static_cast<std::size_t>(c.id);
  const Numbers row(WeightType::f32, id, values, generator), norm(WeightType::f32, id, values, generator);
  GuardedBuffer<unsigned char> row_there = row.on_device("acts"), norm_there = norm.on_device("norm");
  FusedActs acts{floats(row_there)};
  std::vector<double> x = row.value;
  double root = 1;
  if (c.norm) {
    acts.norm = floats(norm_there), acts.epsilon = kEpsilon;
    double squares = 0;
    for (const double v : x) squares += v * v;
    root = 1 / std::sqrt(squares / c.id + double{kEpsilon});
    for (std::size_t i = 0; i < id; ++i) x[i] *= norm.value[i] * root;
  }

  std::vector<Matrix> matrices;
  std::vector<FusedPart> parts;
  matrices.reserve(c.ods.size());
  for (const int rows : c.ods) {
    const auto od = static_cast<std::size_t>(rows);
    Matrix& m = matrices.emplace_back(c.type, od, id, values, generator);
    std::vector<float> before(od, NAN);
    if (c.residual) before.assign(m.residual.value.begin(), m.residual.value.end());
    m.out.upload(before);
    parts.push_back({m.weights_there.data(), m.out.data(), rows, c.bias ? floats(m.bias_there) : nullptr,
                     c.residual ? m.out.data() : nullptr});
  }
  Stream stream;
  const Status status = c.gate ? launch_gemv_fused_swiglu(c.type, parts[0].weights, parts[1].weights, acts,
                                                          parts[0].out, c.ods[0], c.id, stream)
                               : launch_gemv_fused(c.type, parts, acts, c.id, stream);
  REQUIRE_MESSAGE(status.ok(), status.message());
  stream.synchronize();

  // A term meets the roundings of its products, of the sums of a lane, of lanes, warps and sums of squares at most.
  const double roundings = 20 + c.id / 32.0 * 2;
  for (std::size_t m = 0; m < (c.gate ? 1 : matrices.size()); ++m) {
    std::vector<float> out(static_cast<std::size_t>(c.ods[m]));
    CHECK_MESSAGE(matrices[m].out.download(out), "wrote outside its buffer");
    for (std::size_t r = 0; r < out.size(); ++r) {
      const auto dot = [&](const Matrix& of, double& magnitude) {
        double sum = 0;
        for (std::size_t i = 0; i < id; ++i) {
          sum += of.weights.value[r * id + i] * x[i];
          magnitude += std::fabs(of.weights.value[r * id + i] * x[i]);
        }
        return sum;
      };
      double magnitude = 0, expected = dot(matrices[m], magnitude);
      if (c.gate) {
        double of_up = 0;
        const double gate = expected, up = dot(matrices[1], of_up), silu = gate / (1 + std::exp(-gate));
        expected = silu * up;
        magnitude = 1.1 * magnitude * std::fabs(up) + std::fabs(silu) * of_up;  // silu's slope is at most 1.1
      } else {
        if (c.bias) expected += matrices[m].bias.value[r], magnitude += std::fabs(matrices[m].bias.value[r]);
        if (c.residual) {
          expected += matrices[m].residual.value[r];
          magnitude += std::fabs(matrices[m].residual.value[r]);
        }
      }
      const double bound =
          values == Values::integers && !c.norm && !c.gate ? 0 : roundings * kUnitRoundoffF32 * magnitude;
      const double error = std::fabs(out[r] - expected);
      CAPTURE(r);
      REQUIRE((std::isfinite(out[r]) && error <= bound));
    }
  }
}

constexpr WeightType kTypes[] = {WeightType::f16, WeightType::bf16, WeightType::f32};

}  // namespace

TEST_CASE("integers are exact: rows of any length and number, with and without all that is added") {
  for (const WeightType type : kTypes) {
    for (const int id : {8, 248, 256, 264, 896}) {
      for (const int od : {1, 7, 133}) check({type, {od}, id}, Values::integers);
    }
    check({type, {5, 3, 9}, 512, false, true}, Values::integers);
    check({type, {300}, 1000, false, true, true}, Values::integers);
  }
  check({WeightType::f32, {3}, 4}, Values::integers);
  check({WeightType::f16, {2}, 4864, false, false, true}, Values::integers);
}

TEST_CASE("normalised, gated, and everything of a layer") {
  for (const WeightType type : kTypes) {
    check({type, {64, 16, 16}, 256, true, true}, Values::reals);
    check({type, {140, 140}, 200, true, false, false, true}, Values::reals);
    check({type, {200}, 2056, true, true, true}, Values::reals);
    check({type, {3, 3}, 256, false, false, false, true}, Values::reals);
  }
}

TEST_CASE("more rows than the sums of one block a multiprocessor hold") {
  const int most = multiprocessor_count() * gemv_fused_detail::kMostSums;
  check({WeightType::f16, {most + 77}, 8, false, true}, Values::integers);
  check({WeightType::f16, {most / 2 + 77, most / 2 + 77}, 8, true, false, false, true}, Values::reals);
}

TEST_CASE("so many bytes that a multiprocessor has two blocks") {
  const int id = 1024;
  const auto od = static_cast<int>(multiprocessor_count() * gemv_fused_detail::kManyBytes / (4 * id)) + 3;
  check({WeightType::f32, {od}, id, false, true, true}, Values::integers);
}

TEST_CASE("rows as long as shared memory takes") {
  using namespace gemv_fused_detail;
  int id = 8;
  while (gemv_fused_supported(WeightType::f16, id + 1024, shared_memory_limit()).ok()) id += 1024;
  check({WeightType::f16, {3, 2}, id, true, true, true}, Values::reals);
}

#if !defined(__CUDACC__)
TEST_CASE("warps do not race") {
  const emu::counting on;
  check({WeightType::f16, {64, 16, 16}, 256, true, true}, Values::reals);
  CHECK(emu::last_launch().findings.empty());
  check({WeightType::f32, {9, 9}, 520, true, false, false, true}, Values::reals);
  CHECK(emu::last_launch().findings.empty());
}
#endif

TEST_CASE("what the kernel does not take is refused with the reason") {
  Stream stream;
  Buffer<float> some(1024);
  const auto refused = [&](WeightType type, int parts, int id, int od, int offset) {
    const FusedPart part{some.data(), some.data(), od};
    const std::vector<FusedPart> all(static_cast<std::size_t>(parts), part);
    return std::string(launch_gemv_fused(type, all, {some.data() + offset}, id, stream).message());
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  CHECK(has(refused(WeightType::q4_0, 1, 32, 1, 0), "weights must be f16, bf16 or f32, not q4_0"));
  CHECK(has(refused(WeightType::f16, 1, 12, 1, 0), "id must be a multiple of 8 (16-byte loads), not 12"));
  CHECK(has(refused(WeightType::f32, 1, 6, 1, 0), "id must be a multiple of 4 (16-byte loads), not 6"));
  CHECK(has(refused(WeightType::f16, 4, 8, 1, 0), "1 to 3 matrices at once, not 4"));
  CHECK(has(refused(WeightType::f16, 0, 8, 1, 0), "1 to 3 matrices at once, not 0"));
  CHECK(has(refused(WeightType::f16, 1, 8, 0, 0), "od must be at least 1, not 0"));
  CHECK(has(refused(WeightType::f16, 1, 8, 1, 1), "must begin at a multiple of 16 bytes"));
  CHECK(has(refused(WeightType::f16, 1, 1 << 20, 1, 0), "activations take "));
}
