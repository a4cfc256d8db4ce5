// The CPU engine against a forward pass in float64 that shares no code with it, on tiny random models; and
// against itself: a prompt in one piece and token by token, truncated and filled again.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numbers>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "chapters/09-qwen/engine.hpp"
#include "chapters/09-qwen/gguf.hpp"
#include "chapters/09-qwen/model.hpp"
#include "harness/device/half_bits.hpp"
#include "kernels/cpu/features.hpp"
#include "kernels/quant/dequantize.hpp"
#include "kernels/quant/quantize.hpp"

namespace {

using namespace ladder;
using namespace ladder::qwen;

struct Sizes {
  int layers = 2, d = 64, ff = 96, heads = 4, kv_heads = 2, vocabulary = 61, context = 96;
  bool tied = false, yarn = false;
};

/// A random model in a file of its own. Weights are normal, as a trained model's are by size; `values` keeps
/// what the file holds, dequantized, for the reference.
class TinyModel {
 public:
  TinyModel(WeightType type, const Sizes& sizes) : sizes_(sizes), type_(type) {
    static int made = 0;
    path_ = std::filesystem::temp_directory_path() /
            ("ladder-engine-" + std::to_string(::getpid()) + "-" + std::to_string(++made) + ".gguf");
    const auto number = [&](const char* key, int v) {
      writer_.set(std::string("qwen2.") + key, static_cast<std::uint32_t>(v));
    };
    writer_.set("general.architecture", std::string_view("qwen2"));
    number("block_count", sizes.layers);
    number("context_length", sizes.context);
    number("embedding_length", sizes.d);
    number("feed_forward_length", sizes.ff);
    number("attention.head_count", sizes.heads);
    number("attention.head_count_kv", sizes.kv_heads);
    writer_.set("qwen2.attention.layer_norm_rms_epsilon", 1e-5F);
    writer_.set("qwen2.rope.freq_base", 10000.0F);
    if (sizes.yarn) {
      writer_.set("qwen2.rope.scaling.type", std::string_view("yarn"));
      writer_.set("qwen2.rope.scaling.factor", 4.0F);
      number("rope.scaling.original_context_length", 24);
    }
    const int kv = sizes.d / sizes.heads * sizes.kv_heads;
    matrix("token_embd.weight", sizes.d, sizes.vocabulary, 1);
    for (int i = 0; i < sizes.layers; ++i) {
      const std::string p = "blk." + std::to_string(i) + ".";
      vector(p + "attn_norm.weight", sizes.d, 1, 0.3F);
      vector(p + "ffn_norm.weight", sizes.d, 1, 0.3F);
      matrix(p + "attn_q.weight", sizes.d, sizes.d);
      matrix(p + "attn_k.weight", sizes.d, kv);
      matrix(p + "attn_v.weight", sizes.d, kv);
      vector(p + "attn_q.bias", sizes.d, 0, 0.5F);
      vector(p + "attn_k.bias", kv, 0, 0.5F);
      vector(p + "attn_v.bias", kv, 0, 0.5F);
      matrix(p + "attn_output.weight", sizes.d, sizes.d);
      matrix(p + "ffn_gate.weight", sizes.d, sizes.ff);
      matrix(p + "ffn_up.weight", sizes.d, sizes.ff);
      matrix(p + "ffn_down.weight", sizes.ff, sizes.d);
    }
    vector("output_norm.weight", sizes.d, 1, 0.3F);
    if (!sizes.tied) matrix("output.weight", sizes.d, sizes.vocabulary);
    writer_.write(path_);
    file_ = std::make_unique<gguf::File>(path_);
    model_ = std::make_unique<Model>(*file_);
  }
  ~TinyModel() {
    model_.reset();
    file_.reset();
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  TinyModel(const TinyModel&) = delete;
  TinyModel& operator=(const TinyModel&) = delete;

  [[nodiscard]] const Model& model() const { return *model_; }
  [[nodiscard]] const Sizes& sizes() const { return sizes_; }
  [[nodiscard]] const std::vector<float>& operator[](const std::string& name) const {
    return values_.at(name);
  }

 private:
  void matrix(const std::string& name, int id, int od, float deviation = 0) {
    if (deviation == 0) deviation = 1 / std::sqrt(static_cast<float>(id));
    std::normal_distribution<float> normal(0, deviation);
    std::vector<float> v(static_cast<std::size_t>(id) * static_cast<std::size_t>(od));
    for (float& x : v) x = normal(random_);
    std::vector<std::byte> bytes(row_bytes(type_, id) * static_cast<std::size_t>(od));
    quantize_row(type_, v.data(), bytes.data(), static_cast<std::int64_t>(v.size()));
    dequantize_row(type_, bytes.data(), v.data(), static_cast<std::int64_t>(v.size()));
    values_[name] = std::move(v);
    writer_.add(name, type_, {id, od},
                [bytes](std::span<std::byte> out) { std::ranges::copy(bytes, out.begin()); });
  }
  void vector(const std::string& name, int n, float middle, float spread) {
    std::uniform_real_distribution<float> uniform(middle - spread, middle + spread);
    std::vector<float> v(static_cast<std::size_t>(n));
    for (float& x : v) x = uniform(random_);
    writer_.add(name, WeightType::f32, {n},
                [v](std::span<std::byte> out) { std::memcpy(out.data(), v.data(), out.size()); });
    values_[name] = std::move(v);
  }

  Sizes sizes_;
  WeightType type_;
  std::filesystem::path path_;
  std::minstd_rand random_{12};
  gguf::Writer writer_;
  std::map<std::string, std::vector<float>> values_;
  std::unique_ptr<gguf::File> file_;
  std::unique_ptr<Model> model_;
};

// The reference: one token after the other, everything in float64 but the rounding of an f16 cache
// ----------------------

using Row = std::vector<double>;

/// What the reference does wrong on purpose, to see that the comparison notices.
enum class Mistake {
  none,
  no_bias,
  late_position,
  interleaved_pairs,
  wrong_kv_head,
  no_epsilon_weight,
  no_yarn_magnitude
};

class Reference {
 public:
  Reference(const TinyModel& m, bool f16, Mistake mistake)
      : m_(m), s_(m.sizes()), f16_(f16), mistake_(mistake) {
    keys_.resize(static_cast<std::size_t>(s_.layers));
    values_.resize(keys_.size());
  }

  /// Logits behind one more token.
  Row step(int token) {
    const auto d = static_cast<std::size_t>(s_.d);
    const auto& embedding = m_["token_embd.weight"];
    Row x(d);
    for (std::size_t i = 0; i < d; ++i) x[i] = embedding[static_cast<std::size_t>(token) * d + i];
    for (int layer = 0; layer < s_.layers; ++layer) {
      const std::string p = "blk." + std::to_string(layer) + ".";
      const Row a = norm(x, p + "attn_norm.weight");
      const Row q = turned(biased(times(p + "attn_q.weight", a), p + "attn_q.bias"));
      auto& keys = keys_[static_cast<std::size_t>(layer)];
      auto& values = values_[static_cast<std::size_t>(layer)];
      keys.push_back(kept(turned(biased(times(p + "attn_k.weight", a), p + "attn_k.bias"))));
      values.push_back(kept(biased(times(p + "attn_v.weight", a), p + "attn_v.bias")));
      add(x, times(p + "attn_output.weight", attended(q, keys, values)));
      const Row f = norm(x, p + "ffn_norm.weight");
      Row gate = times(p + "ffn_gate.weight", f);
      const Row up = times(p + "ffn_up.weight", f);
      for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
      add(x, times(p + "ffn_down.weight", gate));
    }
    ++position_;
    return times(s_.tied ? "token_embd.weight" : "output.weight", norm(x, "output_norm.weight"));
  }

 private:
  static void add(Row& x, const Row& y) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }
  [[nodiscard]] Row times(const std::string& name, const Row& x) const {
    const auto& w = m_[name];
    Row out(w.size() / x.size());
    for (std::size_t r = 0; r < out.size(); ++r) {
      for (std::size_t i = 0; i < x.size(); ++i) out[r] += static_cast<double>(w[r * x.size() + i]) * x[i];
    }
    return out;
  }
  [[nodiscard]] Row biased(Row x, const std::string& name) const {
    if (mistake_ != Mistake::no_bias) {
      for (std::size_t i = 0; i < x.size(); ++i) x[i] += m_[name][i];
    }
    return x;
  }
  [[nodiscard]] Row norm(const Row& x, const std::string& name) const {
    double squares = 0;
    for (const double v : x) squares += v * v;
    const double epsilon = mistake_ == Mistake::no_epsilon_weight ? 1e-2 : static_cast<double>(1e-5F);
    Row out(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      out[i] = x[i] / std::sqrt(squares / static_cast<double>(x.size()) + epsilon) * m_[name][i];
    }
    return out;
  }
  /// RoPE of every head: pairs (i, i + half).
  [[nodiscard]] Row turned(Row x) const {
    const auto dim = static_cast<std::size_t>(s_.d / s_.heads), half = dim / 2;
    const double position = position_ + (mistake_ == Mistake::late_position ? position_ / 4 : 0);
    for (std::size_t head = 0; head < x.size() / dim; ++head) {
      for (std::size_t i = 0; i < half; ++i) {
        double angle = position / std::pow(10000.0, 2.0 * static_cast<double>(i) / static_cast<double>(dim));
        double magnitude = 1;
        if (s_.yarn) {
          // Pair number at which a full turn takes 24 / turns positions; between 32 turns and 1 the share of
          // the original angle falls from 1 to 0.
          const auto pair = [&](double turns) {
            return static_cast<double>(dim) * std::log(24 / (turns * 2 * std::numbers::pi)) /
                   (2 * std::log(10000.0));
          };
          const double low = std::max(std::floor(pair(32)), 0.0);
          const double high = std::min(std::ceil(pair(1)), static_cast<double>(dim) - 1);
          const double ramp = (static_cast<double>(i) - low) / std::max(0.001, high - low);
          const double original = 1 - std::min(1.0, std::max(0.0, ramp));
          angle = angle * original + angle / 4 * (1 - original);
          if (mistake_ != Mistake::no_yarn_magnitude) magnitude = 1 + 0.1 * std::log(4.0);
        }
        const bool interleaved = mistake_ == Mistake::interleaved_pairs;
        double& a = x[head * dim + (interleaved ? 2 * i : i)];
        double& b = x[head * dim + (interleaved ? 2 * i + 1 : i + half)];
        const double a0 = a, b0 = b;
        a = magnitude * (a0 * std::cos(angle) - b0 * std::sin(angle));
        b = magnitude * (a0 * std::sin(angle) + b0 * std::cos(angle));
      }
    }
    return x;
  }
  [[nodiscard]] Row kept(Row x) const {
    if (f16_) {
      for (double& v : x) v = half_bits_to_float(float_to_half_bits(static_cast<float>(v)));
    }
    return x;
  }
  [[nodiscard]] Row attended(const Row& q, const std::vector<Row>& keys,
                             const std::vector<Row>& values) const {
    const auto dim = static_cast<std::size_t>(s_.d / s_.heads);
    Row out(q.size());
    for (int head = 0; head < s_.heads; ++head) {
      const int group = s_.heads / s_.kv_heads;
      const auto kv =
          static_cast<std::size_t>(mistake_ == Mistake::wrong_kv_head ? head % s_.kv_heads : head / group);
      const auto h = static_cast<std::size_t>(head);
      Row weight(keys.size());
      double most = -std::numeric_limits<double>::infinity(), total = 0;
      for (std::size_t p = 0; p < keys.size(); ++p) {
        for (std::size_t i = 0; i < dim; ++i) weight[p] += q[h * dim + i] * keys[p][kv * dim + i];
        weight[p] /= std::sqrt(static_cast<double>(dim));
        most = std::max(most, weight[p]);
      }
      for (double& w : weight) total += (w = std::exp(w - most));
      for (std::size_t p = 0; p < keys.size(); ++p) {
        for (std::size_t i = 0; i < dim; ++i) out[h * dim + i] += weight[p] / total * values[p][kv * dim + i];
      }
    }
    return out;
  }

  const TinyModel& m_;
  Sizes s_;
  bool f16_;
  Mistake mistake_;
  int position_ = 0;
  std::vector<std::vector<Row>> keys_, values_;  // [layer][position]
};

std::vector<std::int32_t> text(int n, int vocabulary) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(n));
  for (int i = 0; i < n; ++i) tokens[static_cast<std::size_t>(i)] = (i * 29 + 7) % vocabulary;
  return tokens;
}

std::vector<float> evaluated(Engine& engine, std::span<const std::int32_t> tokens, int vocabulary) {
  std::vector<float> logits(tokens.size() * static_cast<std::size_t>(vocabulary),
                            std::numeric_limits<float>::quiet_NaN());
  engine.evaluate(tokens, logits);
  return logits;
}

/// Largest difference over the largest reference logit; infinite if a logit is not finite.
double relative_error(const TinyModel& m, const std::vector<std::int32_t>& tokens,
                      const std::vector<float>& logits, bool f16, Mistake mistake = Mistake::none) {
  Reference reference(m, f16, mistake);
  double error = 0, largest = 0;
  std::size_t at = 0;
  for (const std::int32_t token : tokens) {
    for (const double expected : reference.step(token)) {
      if (!std::isfinite(logits[at])) return std::numeric_limits<double>::infinity();
      error = std::max(error, std::fabs(logits[at++] - expected));
      largest = std::max(largest, std::fabs(expected));
    }
  }
  return error / largest;
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

EngineOptions options(bool exact, bool f16 = false, int threads = 2) {
  EngineOptions o;
  o.exact = exact;
  o.kv_f16 = f16;
  o.threads = threads;
  return o;
}

// Of the largest logit. Two layers of f32 roundings, each of some u = 6e-8 of its own size; where the
// reference rounds a key or value to the other neighbour in f16, 2^-11 of that element.
constexpr double kF32 = 5e-6, kF16 = 3e-4;
// int8 activations: an element is off by up to 1/254 of its block's largest, at random. Seven roundings a
// layer.
constexpr double kInt8 = 0.03;

TEST_CASE("F32 weights: the logits of float64, and mistakes would show") {
  for (const bool yarn : {false, true}) {
    const Sizes sizes{.yarn = yarn};
    const TinyModel m(WeightType::f32, sizes);
    CHECK(m.model().hp.yarn.has_value() == yarn);
    const auto tokens = text(60, sizes.vocabulary);
    for (const bool f16 : {false, true}) {
      for (const bool exact : {false, true}) {  // no difference for F32 weights
        const auto engine = make_cpu_engine(m.model(), options(exact, f16));
        const auto logits = evaluated(*engine, tokens, sizes.vocabulary);
        CHECK(relative_error(m, tokens, logits, f16) <= (f16 ? kF16 : kF32));
        if (f16 || exact) continue;
        for (const Mistake mistake :
             {Mistake::no_bias, Mistake::late_position, Mistake::interleaved_pairs, Mistake::wrong_kv_head,
              Mistake::no_epsilon_weight, Mistake::no_yarn_magnitude}) {
          if (mistake == Mistake::no_yarn_magnitude && !yarn) continue;
          CAPTURE(static_cast<int>(mistake));
          CHECK(relative_error(m, tokens, logits, f16, mistake) > 10 * kF32);
        }
      }
    }
  }
}

TEST_CASE("every weight type: exact against float64, int8 near it; any instruction set") {
  for (const auto& type : kWeightTypes) {
    CAPTURE(type.name);
    Sizes sizes;
    sizes.d = sizes.ff = 256;
    sizes.vocabulary = 40;
    sizes.tied = type.type == WeightType::q4_0 || type.type == WeightType::q6_k;
    const TinyModel m(type.type, sizes);
    const auto tokens = text(12, sizes.vocabulary);
    for (const auto isa : cpu::supported_isas()) {
      CAPTURE(cpu::name(isa));
      cpu::force_isa(isa);
      const auto exact = make_cpu_engine(m.model(), options(true)),
                 int8 = make_cpu_engine(m.model(), options(false));
      CHECK(relative_error(m, tokens, evaluated(*exact, tokens, sizes.vocabulary), false) <= kF32);
      CHECK(relative_error(m, tokens, evaluated(*int8, tokens, sizes.vocabulary), false) <= kInt8);
      cpu::force_isa(std::nullopt);
    }
  }
}

TEST_CASE("a prompt in any pieces, on any number of threads, equals its tokens one by one, bit for bit") {
  for (const WeightType type : {WeightType::f32, WeightType::q4_0, WeightType::q4_k, WeightType::f16}) {
    CAPTURE(info(type).name);
    Sizes sizes;
    sizes.d = 256;
    sizes.ff = 512;
    sizes.context = 320;
    const TinyModel m(type, sizes);
    const auto tokens = text(300, sizes.vocabulary);  // more than one piece of attention
    const auto v = static_cast<std::size_t>(sizes.vocabulary);
    for (const bool exact : {false, true}) {
      const auto engine = make_cpu_engine(m.model(), options(exact, true, 1));
      std::vector<float> one_by_one;
      for (const std::int32_t token : tokens) {
        const auto logits = evaluated(*engine, {&token, 1}, sizes.vocabulary);
        one_by_one.insert(one_by_one.end(), logits.begin(), logits.end());
      }
      for (const int threads : {1, 2, 3}) {
        for (const int batch : {512, 64, 7}) {
          EngineOptions o = options(exact, true, threads);
          o.batch = batch;
          const auto other = make_cpu_engine(m.model(), o);
          CHECK(same_bits(evaluated(*other, tokens, sizes.vocabulary), one_by_one));
          other->truncate(0);
          std::vector<float> last(v, std::numeric_limits<float>::quiet_NaN());  // the last row only
          other->evaluate(tokens, last);
          CHECK(same_bits(last, std::span(one_by_one).last(v)));
          other->truncate(0);
          other->evaluate(std::span(tokens).first(299), {});  // none
          other->evaluate(std::span(tokens).last(1), last);
          CHECK(same_bits(last, std::span(one_by_one).last(v)));
        }
      }
    }
  }
}

TEST_CASE("truncate: another continuation, then the old one again") {
  const Sizes sizes;
  const TinyModel m(WeightType::q8_0, sizes);
  const auto engine = make_cpu_engine(m.model(), options(false, true));
  const auto tokens = text(20, sizes.vocabulary);
  const auto whole = evaluated(*engine, tokens, sizes.vocabulary);
  CHECK(engine->position() == 20);
  engine->truncate(5);
  CHECK(engine->position() == 5);
  const std::vector<std::int32_t> others = {3, 1, 4, 1, 5, 9, 2, 6};
  const auto changed = evaluated(*engine, others, sizes.vocabulary);
  engine->truncate(5);
  const auto again = evaluated(*engine, std::span(tokens).subspan(5), sizes.vocabulary);
  CHECK(same_bits(again, std::span(whole).subspan(5 * static_cast<std::size_t>(sizes.vocabulary))));
  CHECK_FALSE(
      same_bits(std::span(changed).first(again.size() / 15), std::span(again).first(again.size() / 15)));
  CHECK_THROWS_AS(engine->truncate(21), std::invalid_argument);
  CHECK_THROWS_AS(engine->truncate(-1), std::invalid_argument);
  CHECK(engine->position() == 20);
}

TEST_CASE("a full context and wrong arguments change nothing") {
  const Sizes sizes;
  const TinyModel m(WeightType::f16, sizes);
  EngineOptions o = options(false);
  o.context = 10;
  const auto engine = make_cpu_engine(m.model(), o);
  CHECK(engine->context() == 10);
  const auto v = static_cast<std::size_t>(sizes.vocabulary);
  const auto tokens = text(10, sizes.vocabulary);
  std::vector<float> logits(v, 42.0F), two(2 * v);
  engine->evaluate(std::span(tokens).first(8), {});
  CHECK_THROWS_AS(engine->evaluate(std::span(tokens).first(3), logits), ContextFull);
  CHECK(engine->position() == 8);
  CHECK(logits[0] == 42.0F);
  const std::vector<std::int32_t> high = {1, sizes.vocabulary}, low = {-1};
  CHECK_THROWS_AS(engine->evaluate(high, {}), std::invalid_argument);
  CHECK_THROWS_AS(engine->evaluate(low, {}), std::invalid_argument);
  CHECK_THROWS_AS(engine->evaluate({}, {}), std::invalid_argument);
  CHECK_THROWS_AS(engine->evaluate(std::span(tokens).first(1), two), std::invalid_argument);
  CHECK_THROWS_AS(engine->evaluate(std::span(tokens).first(1), std::span(two).first(v - 1)),
                  std::invalid_argument);
  CHECK(engine->position() == 8);
  engine->evaluate(std::span(tokens).last(2), logits);  // exactly full
  const auto fresh = make_cpu_engine(m.model(), o);
  const auto all = evaluated(*fresh, tokens, sizes.vocabulary);
  CHECK(same_bits(logits, std::span(all).last(v)));
  CHECK_THROWS_AS(engine->evaluate(std::span(tokens).first(1), logits), ContextFull);

  o.context = -1;
  CHECK_THROWS_AS((void)make_cpu_engine(m.model(), o), std::invalid_argument);
  o.context = 0;
  CHECK(make_cpu_engine(m.model(), o)->context() == sizes.context);
  o.batch = 0;
  CHECK_THROWS_AS((void)make_cpu_engine(m.model(), o), std::invalid_argument);
  o.batch = 1;
  o.threads = -1;
  CHECK_THROWS_AS((void)make_cpu_engine(m.model(), o), std::invalid_argument);
}

TEST_CASE("what the engine says of itself, and progress") {
  const Sizes sizes;
  const TinyModel m(WeightType::q5_0, sizes);
  EngineOptions o = options(false, true, 2);
  std::uint64_t before = 0, total = 0;
  bool rising = true;
  o.on_progress = [&](std::uint64_t done, std::uint64_t of) {
    rising = rising && done > before && done <= of;
    before = done;
    total = of;
  };
  const auto engine = make_cpu_engine(m.model(), o);
  CHECK(rising);
  CHECK(before == total);
  CHECK(total > 0);
  CHECK(engine->info().executor == "cpu");
  CHECK_FALSE(engine->info().device.empty());
  CHECK(engine->info().kernels.find("q5_0 x int8") != std::string::npos);
  CHECK(engine->info().kernels.find("2 threads") != std::string::npos);
  o.exact = true;
  CHECK(make_cpu_engine(m.model(), o)->info().kernels.find("q5_0 x f32") != std::string::npos);
}

TEST_CASE("rotations: the unit circle, and known numbers of YaRN") {
  Hyperparameters hp;
  hp.embedding_length = 128;
  hp.head_count = 1;
  hp.rope_base = 1e6F;
  std::vector<float> c(64), s(64);
  rope_row(hp, 0, c, s);
  for (std::size_t i = 0; i < 64; ++i) {
    CHECK(c[i] == 1.0F);
    CHECK(s[i] == 0.0F);
  }
  rope_row(hp, 3, c, s);
  CHECK(static_cast<double>(c[0]) == doctest::Approx(std::cos(3.0)).epsilon(1e-7));
  CHECK(static_cast<double>(s[63]) ==
        doctest::Approx(std::sin(3 * std::pow(1e6, -126.0 / 128))).epsilon(1e-7));
  // Qwen2.5's YaRN: factor 4 over 32,768. dim(32) = 23.6 and dim(1) = 39.7: pairs up to 23 keep their angle,
  // from 40 on it is a quarter.
  hp.yarn = Yarn{4, 32768};
  const double magnitude = 1 + 0.1 * std::log(4.0);
  rope_row(hp, 1000, c, s);
  const auto expected = [&](int i, double share) {
    const double angle = 1000 * std::pow(1e6, -2.0 * i / 128);
    return magnitude * std::cos(angle * share + angle / 4 * (1 - share));
  };
  CHECK(static_cast<double>(c[0]) == doctest::Approx(expected(0, 1)).epsilon(1e-6));
  CHECK(static_cast<double>(c[23]) == doctest::Approx(expected(23, 1)).epsilon(1e-6));
  CHECK(static_cast<double>(c[30]) == doctest::Approx(expected(30, 10.0 / 17)).epsilon(1e-6));
  CHECK(static_cast<double>(c[40]) == doctest::Approx(expected(40, 0)).epsilon(1e-6));
  CHECK(static_cast<double>(c[63]) == doctest::Approx(expected(63, 0)).epsilon(1e-6));
  CHECK_THROWS_AS(rope_row(hp, -1, c, s), std::invalid_argument);
  CHECK_THROWS_AS(rope_row(hp, 1, std::span(c).first(63), s), std::invalid_argument);
}

}  // namespace
