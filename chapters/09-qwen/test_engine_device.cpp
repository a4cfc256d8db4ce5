// The device engine against a float64 forward pass of tiny random models, one for each weight type and one of many,
// with activations as they are and rounded to int8; pieces of a prompt against single tokens, bit by bit. Linked with
// engine_device.cu as compiled for the device of the build.

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chapters/09-qwen/engine.hpp"
#include "chapters/09-qwen/gguf.hpp"
#include "chapters/09-qwen/model.hpp"
#include "chapters/09-qwen/sampler.hpp"
#include "harness/device/half_bits.hpp"
#include "harness/device/status.hpp"
#include "harness/device/under_sanitizer.hpp"
#include "harness/experiment/fill_blocks.hpp"
#include "harness/experiment/mix_bits.hpp"
#include "kernels/quant/dequantize.hpp"
#include "kernels/quant/quantize_acts.hpp"

using namespace ladder;
using namespace ladder::qwen;

int main(int argc, char** argv) {
  constexpr int kSkipStatus = 77;  // what Meson takes for "skipped"
  if (!device_present()) {
    std::printf("skipped: no CUDA device, or no driver for one\n");
    return kSkipStatus;
  }
  return doctest::Context(argc, argv).run();
}

namespace {

constexpr int kVocabulary = 72, kContext = 40;

/// A random model on disk, opened. Small enough for the emulator, with rows of whole blocks of every type: d
/// 256, ff 512, heads 4 of 64, key and value heads 2.
class TinyModel {
 public:
  explicit TinyModel(WeightType type, bool tied = false, int layers = 2)
      : TinyModel([type](const std::string&) { return type; }, tied, layers) {}
  /// @param type_of the type of the matrix of a name, such as "blk.0.attn_q.weight"
  TinyModel(const std::function<WeightType(const std::string&)>& type_of, bool tied, int layers) {
    path_ = std::filesystem::temp_directory_path() /
            ("ladder-tiny-" + std::to_string(getpid()) + "-" + std::to_string(++made_) + ".gguf");
    gguf::Writer w;
    w.set("general.architecture", std::string_view("qwen2"));
    const auto number = [&](const char* key, std::uint32_t v) { w.set(std::string("qwen2.") + key, v); };
    number("block_count", static_cast<std::uint32_t>(layers));
    number("context_length", kContext);
    number("embedding_length", 256);
    number("feed_forward_length", 512);
    number("attention.head_count", 4);
    number("attention.head_count_kv", 2);
    w.set("qwen2.attention.layer_norm_rms_epsilon", 1e-6f);
    w.set("qwen2.rope.freq_base", 10000.0f);
    unsigned seed = 100;
    const auto matrix = [&](const std::string& name, std::int64_t id, std::int64_t od) {
      const WeightType type = type_of(name);
      w.add(name, type, {id, od},
            [type, id, od, s = ++seed](std::span<std::byte> out) { random_matrix(type, id, od, s, out); });
    };
    // Random blocks have weights of about 1/2: what enters a matmul through a norm is made small by the norm.
    const auto vector = [&](const std::string& name, std::int64_t n, float middle, float spread) {
      w.add(name, WeightType::f32, {n}, [n, middle, spread, s = ++seed](std::span<std::byte> out) {
        for (std::int64_t i = 0; i < n; ++i) {
          const float v = middle + spread * unit(s, static_cast<std::uint64_t>(i));
          std::memcpy(out.data() + 4 * i, &v, 4);
        }
      });
    };
    matrix("token_embd.weight", 256, kVocabulary);
    for (int i = 0; i < layers; ++i) {
      const std::string p = "blk." + std::to_string(i) + ".";
      vector(p + "attn_norm.weight", 256, 0.1f, 0.05f);
      matrix(p + "attn_q.weight", 256, 256);
      matrix(p + "attn_k.weight", 256, 128);
      matrix(p + "attn_v.weight", 256, 128);
      vector(p + "attn_q.bias", 256, 0.0f, 0.5f);
      vector(p + "attn_k.bias", 128, 0.0f, 0.5f);
      vector(p + "attn_v.bias", 128, 0.0f, 0.5f);
      matrix(p + "attn_output.weight", 256, 256);
      vector(p + "ffn_norm.weight", 256, 0.1f, 0.05f);
      matrix(p + "ffn_gate.weight", 256, 512);
      matrix(p + "ffn_up.weight", 256, 512);
      matrix(p + "ffn_down.weight", 512, 256);
    }
    vector("output_norm.weight", 256, 0.1f, 0.05f);
    if (!tied) matrix("output.weight", 256, kVocabulary);
    w.write(path_);
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
  const Model& operator*() const { return *model_; }

 private:
  static float unit(unsigned seed, std::uint64_t i) {
    return static_cast<float>(mix_bits(static_cast<std::uint64_t>(seed) << 40 ^ i) >> 8) / 8388608.0f - 1.0f;
  }
  static void random_matrix(WeightType type, std::int64_t id, std::int64_t od, unsigned seed,
                            std::span<std::byte> out) {
    const WeightTypeInfo& t = info(type);
    for (std::int64_t b = 0; b < od * id / t.block_elems; ++b) {
      auto* block = reinterpret_cast<unsigned char*>(out.data()) + b * t.block_bytes;
      const float v = unit(seed, static_cast<std::uint64_t>(b));
      if (type == WeightType::f32) {
        std::memcpy(block, &v, 4);
      } else {
        fill_block(type, BlockFill::random, seed, static_cast<std::uint64_t>(b), block, t.block_bytes);
      }
    }
  }
  static inline int made_ = 0;
  std::filesystem::path path_;
  std::unique_ptr<gguf::File> file_;
  std::unique_ptr<Model> model_;
};

/// What the reference does wrong on purpose, to see that the comparison notices.
enum class Mistake { none, no_bias, rope_one_late, attends_ahead, wrong_kv_head, norm_without_weight };

/// What a matrix with blocks is multiplied with.
enum class Activations { as_they_are, int8, f16 };

/// A forward pass in float64 over a whole text. Only the rotations come from the code under test's own table.
class Reference64 {
 public:
  Reference64(const Model& model, bool kv_f16, Activations acts = Activations::as_they_are,
              Mistake mistake = Mistake::none)
      : m_(model), kv_f16_(kv_f16), acts_(acts), mistake_(mistake) {}

  /// Logits [tokens][vocabulary].
  [[nodiscard]] std::vector<double> logits(const std::vector<std::int32_t>& tokens) const {
    const auto n = tokens.size(), d = static_cast<std::size_t>(m_.hp.embedding_length);
    const std::vector<float> embedding = decoded(m_.token_embd);
    std::vector<double> x(n * d);
    for (std::size_t t = 0; t < n; ++t) {
      for (std::size_t i = 0; i < d; ++i)
        x[t * d + i] = embedding[static_cast<std::size_t>(tokens[t]) * d + i];
    }
    for (const Layer& l : m_.layers) {
      std::vector<double> h = norm(x, l.attn_norm);
      std::vector<double> q = biased(times(l.attn_q, h), l.attn_q_bias),
                          k = biased(times(l.attn_k, h), l.attn_k_bias),
                          v = biased(times(l.attn_v, h), l.attn_v_bias);
      rotate(q, m_.hp.head_count);
      rotate(k, m_.hp.head_count_kv);
      add(x, times(l.attn_output, attention(q, stored(k), stored(v))));
      h = norm(x, l.ffn_norm);
      std::vector<double> gate = times(l.ffn_gate, h);
      const std::vector<double> up = times(l.ffn_up, h);
      for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
      add(x, times(l.ffn_down, gate));
    }
    return times(m_.output, norm(x, m_.output_norm));
  }

 private:
  static std::vector<float> decoded(const gguf::Tensor* t) {
    std::vector<float> v(static_cast<std::size_t>(t->elements()));
    dequantize_row(t->type, t->data.data(), v.data(), t->elements());
    return v;
  }
  static void add(std::vector<double>& x, const std::vector<double>& y) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }
  /// Rounded to f32, then by blocks of 32 to int8.
  static std::vector<double> rounded(const std::vector<double>& x) {
    std::vector<float> f(x.begin(), x.end());
    std::vector<BlockQ8Pad40> blocks(f.size() / kQ8ActsPerBlock);
    quantize_q8_pad40_row(f, blocks.data());
    dequantize_q8_pad40_row(blocks, f.data());
    return {f.begin(), f.end()};
  }
  std::vector<double> times(const gguf::Tensor* w, const std::vector<double>& acts) const {
    const bool blocks = info(w->type).block_elems > 1;
    const std::vector<double> x = acts_ == Activations::int8 && blocks ? rounded(acts)
                                  : acts_ == Activations::f16 && (blocks || w->type == WeightType::f16)
                                      ? halves(acts)
                                      : acts;
    const auto id = static_cast<std::size_t>(w->row_length()), od = static_cast<std::size_t>(w->rows());
    const std::vector<float> weights = decoded(w);
    std::vector<double> out(x.size() / id * od);
    for (std::size_t t = 0; t < x.size() / id; ++t) {
      for (std::size_t r = 0; r < od; ++r) {
        double sum = 0;
        for (std::size_t i = 0; i < id; ++i) sum += weights[r * id + i] * x[t * id + i];
        out[t * od + r] = sum;
      }
    }
    return out;
  }
  std::vector<double> biased(std::vector<double> x, const gguf::Tensor* bias) const {
    const std::vector<float> b = decoded(bias);
    if (mistake_ != Mistake::no_bias) {
      for (std::size_t i = 0; i < x.size(); ++i) x[i] += b[i % b.size()];
    }
    return x;
  }
  std::vector<double> norm(const std::vector<double>& x, const gguf::Tensor* weight) const {
    const std::vector<float> w = decoded(weight);
    const std::size_t d = w.size();
    std::vector<double> out(x.size());
    for (std::size_t t = 0; t < x.size() / d; ++t) {
      double squares = 0;
      for (std::size_t i = 0; i < d; ++i) squares += x[t * d + i] * x[t * d + i];
      const double scale = 1 / std::sqrt(squares / static_cast<double>(d) + m_.hp.rms_epsilon);
      for (std::size_t i = 0; i < d; ++i) {
        out[t * d + i] = x[t * d + i] * scale *
                         (mistake_ == Mistake::norm_without_weight ? 0.1 : static_cast<double>(w[i]));
      }
    }
    return out;
  }
  void rotate(std::vector<double>& x, int heads) const {
    const auto dim = static_cast<std::size_t>(m_.hp.head_dim()), half = dim / 2;
    std::vector<float> cosines(half), sines(half);
    const std::size_t rows = x.size() / (static_cast<std::size_t>(heads) * dim);
    for (std::size_t t = 0; t < rows; ++t) {
      rope_row(m_.hp, static_cast<int>(t) + (mistake_ == Mistake::rope_one_late && t > 3 ? 1 : 0), cosines,
               sines);
      for (std::size_t h = 0; h < static_cast<std::size_t>(heads); ++h) {
        for (std::size_t i = 0; i < half; ++i) {
          double& a = x[(t * static_cast<std::size_t>(heads) + h) * dim + i];
          double& b = x[(t * static_cast<std::size_t>(heads) + h) * dim + i + half];
          const double a0 = a;
          a = a0 * cosines[i] - b * sines[i];
          b = b * cosines[i] + a0 * sines[i];
        }
      }
    }
  }
  static std::vector<double> halves(std::vector<double> x) {
    for (double& v : x) v = half_bits_to_float(float_to_half_bits(static_cast<float>(v)));
    return x;
  }
  std::vector<double> stored(std::vector<double> x) const { return kv_f16_ ? halves(std::move(x)) : x; }
  std::vector<double> attention(const std::vector<double>& q, const std::vector<double>& k,
                                const std::vector<double>& v) const {
    const auto heads = static_cast<std::size_t>(m_.hp.head_count),
               kv = static_cast<std::size_t>(m_.hp.head_count_kv),
               dim = static_cast<std::size_t>(m_.hp.head_dim());
    std::vector<double> out(q.size());
    const std::size_t n = q.size() / (heads * dim);
    for (std::size_t t = 0; t < n; ++t) {
      for (std::size_t h = 0; h < heads; ++h) {
        const std::size_t g = mistake_ == Mistake::wrong_kv_head ? h % kv : h / (heads / kv);
        const std::size_t positions = mistake_ == Mistake::attends_ahead ? std::min(n, t + 2) : t + 1;
        std::vector<double> weight(positions);
        double highest = -1e300, total = 0;
        for (std::size_t p = 0; p < positions; ++p) {
          double sum = 0;
          for (std::size_t i = 0; i < dim; ++i)
            sum += q[(t * heads + h) * dim + i] * k[(p * kv + g) * dim + i];
          weight[p] = sum / std::sqrt(static_cast<double>(dim));
          highest = std::max(highest, weight[p]);
        }
        for (double& w : weight) total += w = std::exp(w - highest);
        for (std::size_t i = 0; i < dim; ++i) {
          double sum = 0;
          for (std::size_t p = 0; p < positions; ++p) sum += weight[p] / total * v[(p * kv + g) * dim + i];
          out[(t * heads + h) * dim + i] = sum;
        }
      }
    }
    return out;
  }

  const Model& m_;
  bool kv_f16_;
  Activations acts_;
  Mistake mistake_;
};

std::vector<std::int32_t> text(std::size_t n) {
  std::vector<std::int32_t> tokens(n);
  for (std::size_t i = 0; i < n; ++i) tokens[i] = static_cast<std::int32_t>((i * 29 + 7) % kVocabulary);
  return tokens;
}

/// Largest |out - reference| over the largest |reference|; infinite if anything is not finite.
double relative_error(const std::vector<float>& out, const std::vector<double>& reference) {
  REQUIRE(out.size() == reference.size());
  double error = 0, largest = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (!std::isfinite(out[i])) return INFINITY;
    error = std::max(error, std::fabs(out[i] - reference[i]));
    largest = std::max(largest, std::fabs(reference[i]));
  }
  return error / largest;
}

/// Logits of every token, in one call.
std::vector<float> evaluated(Engine& engine, const std::vector<std::int32_t>& tokens) {
  std::vector<float> logits(tokens.size() * kVocabulary, NAN);
  engine.evaluate(tokens, logits);
  return logits;
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

// Of the largest logit. f32 rounding through two layers. With an f16 cache a key or value that the reference rounds to the
// neighbouring number is off by 2^-11; and attention on tensor cores rounds its weights, which sum up to 1, to f16, so that
// a mixture of values is off by up to 2^-12 of the largest. Two layers of either, at random signs: about 2^-11.
constexpr double kF32Tolerance = 5e-6, kF16Tolerance = 5e-4;
// An activation rounded to int8 is off by up to 1/254 of its block's largest, at random, seven times a layer. Where the
// reference rounds as well, few are left: those so near the middle of two codes that f32 falls on the other side.
constexpr double kInt8Error = 0.03, kInt8Tolerance = 8e-3;
// An activation rounded to f16, and a weight of many bits with its scale, are off by up to 2^-12 each. Where the reference
// rounds activations as well, the weights are left.
constexpr double kHalfError = 3e-3, kHalfTolerance = 3e-3;

EngineOptions options_of(bool exact, bool kv_f16 = true) {
  EngineOptions o;
  o.exact = exact;
  o.kv_f16 = kv_f16;
  return o;
}

/// Rows of a prompt eight at a time, through the kernels of single tokens: the same bits however a prompt is divided.
EngineOptions by_eights(bool exact, bool kv_f16 = true) {
  EngineOptions o = options_of(exact, kv_f16);
  o.switches.conditions = dispatch::kNoPrefillGemm;
  return o;
}

/// Whether prompts go through Hopper's own kernels here.
bool wgmma() { return dispatch::runs_on(dispatch::Kernel::gemm_tiles_wgmma, build_device()); }

/// The default gates behind one that gives everything to a kernel, as far as it goes.
dispatch::Table gates_with(dispatch::Kernel kernel) {
  dispatch::Table t = dispatch::default_table();
  t.gates.insert(t.gates.begin(), dispatch::Gate{"test", kernel});
  return t;
}

/// What a kernel rounds activations to.
Activations activations_of(dispatch::Kernel k) {
  using dispatch::Kernel;
  if (k == Kernel::f32_matmul) return Activations::as_they_are;
  const bool int8 = k == Kernel::mmvq_tiles || k == Kernel::mmvq_multi || k == Kernel::mmq_tiles;
  return int8 ? Activations::int8 : Activations::f16;
}
double tolerance_of(Activations a) {
  return a == Activations::as_they_are ? kF32Tolerance
         : a == Activations::int8      ? kInt8Tolerance
                                       : kHalfTolerance;
}

/// Q, K and V of three types, gate and up of two, a matrix without blocks in every place of the second layer, and an
/// embedding that is looked up as bf16.
WeightType mixture(const std::string& name) {
  static const std::map<std::string, WeightType> types = {
      {"token_embd.weight", WeightType::bf16},       {"blk.0.attn_q.weight", WeightType::q4_0},
      {"blk.0.attn_k.weight", WeightType::f16},      {"blk.0.attn_v.weight", WeightType::q6_k},
      {"blk.0.attn_output.weight", WeightType::f32}, {"blk.0.ffn_gate.weight", WeightType::q5_0},
      {"blk.0.ffn_up.weight", WeightType::q8_0},     {"blk.0.ffn_down.weight", WeightType::bf16},
      {"blk.1.attn_q.weight", WeightType::f16},      {"blk.1.attn_k.weight", WeightType::q4_k},
      {"blk.1.attn_v.weight", WeightType::q4_k},     {"blk.1.ffn_gate.weight", WeightType::f16},
      {"blk.1.ffn_up.weight", WeightType::q3_k},
  };
  const auto found = types.find(name);
  return found != types.end() ? found->second : WeightType::q4_1;
}

/// As files of mixed types have it: V in more bits than Q and K.
WeightType v_in_q6_k(const std::string& name) {
  return name.ends_with("attn_v.weight") ? WeightType::q6_k : WeightType::q4_k;
}

/// Logits of a short text against the reference.
void check_model(const Model& model, bool kv_f16) {
  const std::vector<std::int32_t> tokens = text(4);
  const std::vector<double> as_they_are = Reference64(model, kv_f16).logits(tokens),
                            int8 = Reference64(model, kv_f16, Activations::int8).logits(tokens);
  const double tolerance = kv_f16 ? kF16Tolerance : kF32Tolerance;
  const WeightType type = model.layers[0].ffn_up->type;
  const bool blocks = info(type).block_elems > 1;
  for (const bool exact : {false, true}) {
    CAPTURE(exact);
    const std::unique_ptr<Engine> engine = make_device_engine(model, options_of(exact, kv_f16));
    CHECK(engine->info().executor == device_executor());
    CHECK(engine->context() == kContext);
    const std::vector<float> logits = evaluated(*engine, tokens);
    CHECK(engine->position() == 4);
    const double error = relative_error(logits, as_they_are);
    std::string kernel = std::string(info(type).name) + "_f32_matmul";
    if (blocks && !exact) {
      CHECK(error <= kInt8Error);
      CHECK(error > 10 * tolerance);  // int8 is what was multiplied with
      // Attention on tensor cores, over a cache of f16, moves more codes to the other side.
      if (!kv_f16) CHECK(relative_error(logits, int8) <= kInt8Tolerance);
      kernel = std::string("mmvq_tiles of ") + info(type).name;
    } else {
      CHECK(error <= tolerance);
      if (!blocks) kernel = std::string("gemv_fused of ") + info(type).name;
    }
    CHECK(engine->info().kernels.find(kernel) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("every weight type, tied and untied") {
  for (const WeightTypeInfo& t : kWeightTypes) {
    CAPTURE(std::string(t.name));
    const TinyModel model(t.type, static_cast<int>(t.type) % 2 == 0, 1);
    check_model(*model, false);
  }
}

TEST_CASE("two layers, f16 cache") {
  for (const WeightType type : {WeightType::q4_0, WeightType::q4_k}) check_model(*TinyModel(type), true);
}

TEST_CASE("Q and K of one type and V of another in one launch") {
  for (const bool kv_f16 : {false, true}) check_model(*TinyModel(v_in_q6_k, false, 2), kv_f16);
}

TEST_CASE("a type for every matrix") {
  const TinyModel model(mixture, false, 2);
  const std::vector<std::int32_t> tokens = text(4);
  const std::unique_ptr<Engine> exact = make_device_engine(*model, options_of(true, false)),
                                int8 = make_device_engine(*model, options_of(false, false));
  CHECK(int8->info().kernels ==
        "gemv_fused of f32, f16, bf16; mmvq_tiles of q4_0, q4_1, q5_0, q8_0, q3_k, q4_k, q6_k; "
        "prompts: bf16_f32_matmul; " +
            std::string(
                wgmma() ? "gemm_f16_wgmma of f16; gemm_tiles_wgmma of q4_0, q4_1, q5_0, q8_0, q3_k, q4_k, "
                          "q6_k; gemv_vec; mmvq_tiles of q4_1"
                        : "gemm_f16_mma of f16; gemv_vec; mmq_tiles of q4_0, q4_1, q5_0, q8_0, q3_k, q4_k, "
                          "q6_k; mmvq_tiles of q4_1"));
  CHECK(relative_error(evaluated(*exact, tokens), Reference64(*model, false).logits(tokens)) <=
        kF32Tolerance);
  CHECK(relative_error(evaluated(*int8, tokens),
                       Reference64(*model, false, Activations::int8).logits(tokens)) <= kInt8Tolerance);
}

TEST_CASE("the comparison notices a wrong forward pass") {
  const std::vector<std::int32_t> tokens = text(6);
  const TinyModel model(WeightType::q8_0);
  for (const bool exact : {true, false}) {
    CAPTURE(exact);
    const Activations acts = exact ? Activations::as_they_are : Activations::int8;
    const double tolerance = exact ? kF32Tolerance : kInt8Tolerance;
    const std::vector<float> logits =
        evaluated(*make_device_engine(*model, options_of(exact, false)), tokens);
    const auto error = [&](Mistake mistake) {
      return relative_error(logits, Reference64(*model, false, acts, mistake).logits(tokens));
    };
    CHECK(error(Mistake::none) <= tolerance);
    for (const Mistake mistake : {Mistake::no_bias, Mistake::rope_one_late, Mistake::attends_ahead,
                                  Mistake::wrong_kv_head, Mistake::norm_without_weight}) {
      CAPTURE(static_cast<int>(mistake));
      CHECK(error(mistake) > 5 * kF16Tolerance);
      CHECK(error(mistake) > 2 * tolerance);
    }
    std::vector<float> broken = logits;
    broken[3] = NAN;
    CHECK(!(relative_error(broken, Reference64(*model, false, acts).logits(tokens)) <= tolerance));
  }
}

// A token alone has other kernels than several: its attention adds up in another order, and its rows become int8 before
// they are normalised, with scales of f32. It is as far from the others as either is from f32 activations.
TEST_CASE(
    "a prompt at once and in pieces: the same bits; token by token: nearly, and the same bits each time") {
  // Groups of eight tokens, and last ones of three and two; from the second single token on a graph is replayed.
  const std::vector<std::int32_t> tokens = text(11);
  const auto check = [&](const Model& model, bool exact) {
    EngineOptions options = by_eights(exact);
    const std::unique_ptr<Engine> whole = make_device_engine(model, options);
    const std::vector<float> all = evaluated(*whole, tokens);
    for (const int batch : sampled<int>({3, 9}, 2)) {
      CAPTURE(batch);
      options.batch = batch;
      const std::unique_ptr<Engine> pieces = make_device_engine(model, options);
      CHECK(same_bits(evaluated(*pieces, tokens), all));
    }
    std::vector<float> before;
    for (int turn = 0; turn < (under_sanitizer() ? 1 : 2); ++turn) {
      whole->truncate(0);
      std::vector<float> singly;
      for (const std::int32_t token : tokens) {
        const std::vector<float> one = evaluated(*whole, {token});
        singly.insert(singly.end(), one.begin(), one.end());
      }
      CHECK(relative_error(singly, {all.begin(), all.end()}) <= (exact ? kF16Tolerance : kInt8Error));
      if (turn > 0) CHECK(same_bits(singly, before));
      before = singly;
    }
  };
  for (const WeightType type :
       sampled<WeightType>({WeightType::q4_k, WeightType::q4_0, WeightType::f32}, 3)) {
    CAPTURE(std::string(info(type).name));
    const TinyModel model(type, false, type == WeightType::q4_k ? 2 : 1);
    check(*model, false);
  }
  check(*TinyModel(mixture, false, 2), false);
  check(*TinyModel(WeightType::q5_1, true, 1), true);
}

TEST_CASE("one prompt and then single tokens replay what one by one would give") {
  const std::vector<std::int32_t> tokens = text(12);
  const TinyModel model(WeightType::q6_k, true, 1);
  const std::unique_ptr<Engine> engine = make_device_engine(*model, by_eights(false));
  const std::vector<float> all = evaluated(*engine, tokens);
  const std::span<float> room = engine->logits_room();
  REQUIRE(room.size() == kVocabulary);
  std::map<std::size_t, std::vector<float>> before;
  // The graph has no position of its own.
  for (const std::size_t prompt : sampled<std::size_t>({5, 2, 7, 1, 7, 5, 2, 1}, 3)) {
    engine->truncate(0);
    engine->evaluate(std::span(tokens).first(prompt), {});
    std::vector<float> singly, own(kVocabulary);
    for (std::size_t t = prompt; t < tokens.size(); ++t) {
      const bool copied = t % 2 == 0;  // or left where the kernel has written it
      engine->evaluate(std::span(tokens).subspan(t, 1), copied ? std::span(own) : room);
      const float* from = copied ? own.data() : room.data();
      singly.insert(singly.end(), from, from + kVocabulary);
    }
    CHECK(relative_error(singly, {all.begin() + static_cast<std::ptrdiff_t>(prompt * kVocabulary),
                                  all.end()}) <= kInt8Error);
    if (before.contains(prompt)) CHECK(same_bits(singly, before.at(prompt)));
    before.emplace(prompt, singly);
  }
}

TEST_CASE("prompts: every kernel of many rows against float64, on both sides of each gate") {
  using dispatch::Kernel;
  // Tiles of 16, 64 and more rows begin and end between these.
  const std::vector<std::size_t> rows = sampled<std::size_t>({2, 8, 9, 17, 33}, 3);
  const std::vector<WeightType> types = {WeightType::q4_0, WeightType::q8_0, WeightType::q4_k,
                                         WeightType::q6_k, WeightType::f16};
  for (const WeightType type : sampled(types, 2)) {
    const TinyModel model(type, false, 1);
    std::map<Activations, std::vector<double>> reference;
    for (const Activations a : {Activations::as_they_are, Activations::int8, Activations::f16}) {
      reference[a] = Reference64(*model, false, a).logits(text(rows.back()));
    }
    for (const dispatch::KernelInfo& k : dispatch::kKernels) {
      if (!dispatch::runs_on(k.kernel, build_device()) || !dispatch::has(k.types, type)) continue;
      CAPTURE(std::string(info(type).name));
      CAPTURE(std::string(k.id));
      EngineOptions options = options_of(false, false);
      options.gates = gates_with(k.kernel);
      const std::unique_ptr<Engine> engine = make_device_engine(*model, options);
      const Activations acts = activations_of(k.kernel);
      for (const std::size_t n : rows) {
        CAPTURE(n);
        engine->truncate(0);
        const std::vector<float> logits = evaluated(*engine, text(n));
        const auto first = [&](Activations a) {
          const std::vector<double>& all = reference[a];
          return std::vector<double>(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(n * kVocabulary));
        };
        CHECK(relative_error(logits, first(acts)) <= tolerance_of(acts));
        // What was multiplied with is what the kernel's name says.
        const double error = relative_error(logits, first(Activations::as_they_are));
        CHECK(error <= (acts == Activations::int8 ? kInt8Error : kHalfError));
        if (acts != Activations::as_they_are) CHECK(error > 5 * kF32Tolerance);
        if (acts == Activations::int8) CHECK(error > kHalfError);
      }
      const std::string& kernels = engine->info().kernels;
      const bool named = kernels.find(dispatch::kernel_name(k.kernel, type, 256)) != std::string::npos ||
                         kernels.find(std::string(k.id) + " of " + info(type).name) != std::string::npos;
      CHECK(named);
    }
  }
}

TEST_CASE("prompts of every type and of a type for every matrix, by the default gates") {
  const std::vector<std::int32_t> tokens = text(12);
  const auto check = [&](const Model& model) {
    const std::unique_ptr<Engine> engine = make_device_engine(model, options_of(false, false));
    const std::vector<float> logits = evaluated(*engine, tokens);
    const Activations acts = wgmma() ? Activations::f16 : Activations::int8;
    CHECK(relative_error(logits, Reference64(model, false).logits(tokens)) <= kInt8Error);
    CHECK(relative_error(logits, Reference64(model, false, acts).logits(tokens)) <=
          2 * kInt8Tolerance);  // F16 weights take f16 rows beside matrices that take int8
  };
  for (const WeightTypeInfo& t : kWeightTypes) {
    CAPTURE(std::string(t.name));
    check(*TinyModel(t.type, static_cast<int>(t.type) % 2 == 0, 1));
  }
  check(*TinyModel(mixture, false, 2));
}

TEST_CASE("every switch: what it changes, and that results stay within their bounds") {
  using namespace ladder::dispatch;
  struct Case {
    Conditions conditions;
    bool small;
    WeightType type;
    std::size_t rows;
    const char* kernel;  // that the report names then, and without the switch does not
    Activations acts;
  };
  const Activations many = wgmma() ? Activations::f16 : Activations::int8;
  const std::string f16 = wgmma() ? "gemm_f16_wgmma of q4_0" : "gemm_f16_mma of q4_0";
  const std::vector<Case> cases = {
      {kMmqOff, false, WeightType::q4_0, 12, f16.c_str(), Activations::f16},
      {kMmqOn, false, WeightType::q4_0, 12, "mmq_tiles of q4_0", Activations::int8},
      {kNoPrefillGemm, false, WeightType::q4_0, 12, nullptr, Activations::int8},
      {0, true, WeightType::q4_0, 5, nullptr, many},
      {kNoQ40Mmvq, false, WeightType::q4_0, 5, "q4_0_f32_matmul", Activations::as_they_are},
      {kNoQ80Mmvq, false, WeightType::q8_0, 5, "q8_0_f32_matmul", Activations::as_they_are},
      {kNoKqMmvq, false, WeightType::q5_k, 5, "q5_k_f32_matmul", Activations::as_they_are},
      {kMmvqV1, false, WeightType::q4_k, 5, "mmvq_multi of q4_k", Activations::int8},
  };
  for (const Case& c : sampled(cases, 2, 1)) {
    CAPTURE(condition_names(c.conditions));
    const TinyModel model(c.type, false, 1);
    const std::vector<std::int32_t> tokens = text(c.rows);
    EngineOptions options = options_of(false, false);
    const std::unique_ptr<Engine> without = make_device_engine(*model, options);
    options.switches.conditions = c.conditions;
    options.switches.small_m_gemm = c.small;
    const std::unique_ptr<Engine> with = make_device_engine(*model, options);
    // Logits are of eight rows at a time, so that their activations are int8 where those of the layers are not.
    CHECK(relative_error(evaluated(*with, tokens), Reference64(*model, false, c.acts).logits(tokens)) <=
          (c.acts == Activations::f16 ? 2 * kInt8Tolerance : tolerance_of(c.acts)));
    if (c.kernel != nullptr) {
      CHECK(with->info().kernels.find(c.kernel) != std::string::npos);
      if (c.conditions != kMmqOn || wgmma())
        CHECK(without->info().kernels.find(c.kernel) == std::string::npos);
    }
    // And token by token, from the third one on replayed.
    with->truncate(0);
    std::vector<float> singly;
    for (const std::int32_t token : tokens) {
      const std::vector<float> one = evaluated(*with, {token});
      singly.insert(singly.end(), one.begin(), one.end());
    }
    CHECK(relative_error(singly, Reference64(*model, false).logits(tokens)) <= kInt8Error);
  }
}

TEST_CASE("tiles of gemm_f16_mma by switch") {
  const TinyModel model(WeightType::q8_0, false, 1);
  const std::vector<std::int32_t> tokens = text(20);
  const std::vector<double> reference = Reference64(*model, false, Activations::f16).logits(tokens);
  for (const int tm : {0, 64, 128}) {
    for (const bool k64 : {false, true}) {
      if (tm == 0 && !k64) continue;
      CAPTURE(tm);
      CAPTURE(k64);
      EngineOptions options = options_of(false, false);
      options.switches.conditions = dispatch::kMmqOff | dispatch::kGemmTile;
      options.switches.gemm_tm = tm;
      options.switches.gemm_k64 = k64;
      const std::unique_ptr<Engine> engine = make_device_engine(*model, options);
      CHECK(engine->info().kernels.find("gemm_f16_mma of q8_0") != std::string::npos);
      CHECK(relative_error(evaluated(*engine, tokens), reference) <= 2 * kInt8Tolerance);
    }
  }
}

TEST_CASE("without a graph: the same bits, for tokens and for prompts that come again") {
  const std::vector<std::int32_t> tokens = text(11);
  const TinyModel model(WeightType::q4_0, false, 1);
  EngineOptions options = options_of(false);
  const std::unique_ptr<Engine> graph = make_device_engine(*model, options);
  options.switches.no_cuda_graph = true;
  const std::unique_ptr<Engine> launched = make_device_engine(*model, options);
  std::vector<float> before;
  for (int turn = 0; turn < 3; ++turn) {  // launched, recorded, replayed
    graph->truncate(0);
    launched->truncate(0);
    const std::vector<float> logits = evaluated(*graph, tokens);
    CHECK(same_bits(logits, evaluated(*launched, tokens)));
    if (turn > 0) CHECK(same_bits(logits, before));
    before = logits;
    CHECK(same_bits(evaluated(*graph, {5}), evaluated(*launched, {5})));
  }
}

TEST_CASE("tokens drawn on the device are those that the logits give, whatever is recorded or banned") {
  const auto check = [](const Model& model, const EngineOptions& options) {
    const std::unique_ptr<Engine> engine = make_device_engine(model, options);
    const auto steps = static_cast<std::size_t>(options.context - 5);
    std::vector<float> bias(kVocabulary);
    for (const int banned : {0, 1}) {  // the ones that were drawn before
      CAPTURE(banned);
      std::vector<std::int32_t> singly(steps);
      std::vector<float> logits(kVocabulary);
      engine->truncate(0);
      engine->evaluate(text(5), {});
      std::int32_t token = 7;
      for (std::int32_t& next : singly) {
        engine->evaluate(std::span(&token, 1), logits);
        for (std::size_t i = 0; i < bias.size(); ++i) logits[i] += bias[i];
        next = static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
        token = next;
      }
      REQUIRE(engine->can_follow({banned == 0 ? std::vector<float>() : bias, {}}));
      for (const std::size_t most : sampled<std::size_t>({1, 3, steps}, 3, 2)) {
        engine->truncate(5);
        std::vector<std::int32_t> drawn(steps, -2);
        for (std::size_t at = 0; at < steps; at += most) {
          const std::size_t n = std::min(most, steps - at);
          engine->follow(at == 0 ? 7 : drawn[at - 1], std::span(drawn).subspan(at, n));
        }
        CHECK(drawn == singly);
        CHECK(engine->position() == options.context);
      }
      CHECK_THROWS_AS(engine->follow(1, std::span(&token, 1)), ContextFull);
      bias[static_cast<std::size_t>(singly[0])] = -std::numeric_limits<float>::infinity();
      bias[static_cast<std::size_t>((singly[0] + 1) % kVocabulary)] += 0.25f;
    }
    engine->truncate(9);
    std::vector<std::int32_t> none(2);
    CHECK_THROWS_WITH(engine->follow(kVocabulary, none),
                      "follow: token 72 is outside the vocabulary, 0 to 71");
    CHECK_THROWS_AS(engine->follow(1, {}), std::invalid_argument);
    CHECK(engine->position() == 9);
    // Nothing is left to draw.
    REQUIRE(
        engine->can_follow({std::vector<float>(kVocabulary, -std::numeric_limits<float>::infinity()), {}}));
    engine->follow(1, none);
    CHECK(none[0] == -1);
  };
  EngineOptions options = options_of(false);
  options.context = 11;
  check(*TinyModel(WeightType::q4_0, false, 1), options);
  if (!under_sanitizer()) {
    check(*TinyModel(mixture, false, 2), options);
    check(*TinyModel(WeightType::f16, true, 1), options);
  }
  options.switches.no_cuda_graph = true;
  check(*TinyModel(WeightType::q4_k, true, 1), options);
  options.switches.token_kernel = true;
  check(*TinyModel(WeightType::q8_0, true, 2), options);
}

TEST_CASE("tokens sampled on the device are those of the host's sampler, whatever is recorded") {
  const TinyModel model(WeightType::f16, true, 1);
  EngineOptions engine_options = options_of(false);
  for (const bool no_graph : {false, true}) {
    CAPTURE(no_graph);
    engine_options.switches.no_cuda_graph = no_graph;
    const std::unique_ptr<Engine> engine = make_device_engine(*model, engine_options);
    std::vector<std::int32_t> greedy;
    // The same engine with one set of options after another, the last of them as the first.
    for (const int kind : no_graph ? std::vector<int>{0, 2} : std::vector<int>{0, 1, 3, 2, 1}) {
      CAPTURE(kind);
      SamplerOptions options;
      options.temperature = kind == 0 ? 0.0f : kind == 3 ? 50.0f : 1.5f;
      options.top_k = kind == 2 ? 64 : 9;
      options.top_p = kind == 1 ? 0.7f : 1.0f;
      options.min_p = kind == 2 ? 0.02f : 0.0f;
      options.seed = 5;
      if (kind > 0) options.logit_bias = {{greedy[0], -std::numeric_limits<float>::infinity()}, {3, 0.5f}};
      Sampler sampler(options, kVocabulary);
      const std::optional<Drawing> drawing = sampler.drawing();
      REQUIRE(drawing.has_value());
      CHECK(drawing->sample.has_value() == (kind > 0));

      constexpr std::size_t kSteps = 5;
      std::vector<std::int32_t> singly(kSteps), history = text(5);
      std::vector<float> logits(kVocabulary);
      engine->truncate(0);
      engine->evaluate(history, {});
      history.push_back(7);
      for (std::int32_t& next : singly) {
        engine->evaluate(std::span(&history.back(), 1), logits);
        next = sampler.sample(logits, history, history.size());
        history.push_back(next);
      }
      REQUIRE(engine->can_follow(*drawing));
      for (const std::size_t most : {std::size_t{2}, kSteps}) {
        engine->truncate(5);
        std::vector<std::int32_t> drawn(kSteps, -2);
        for (std::size_t at = 0; at < kSteps; at += most) {
          const std::size_t n = std::min(most, kSteps - at);
          engine->follow(at == 0 ? 7 : drawn[at - 1], std::span(drawn).subspan(at, n));
        }
        CHECK(drawn == singly);
      }
      if (kind == 0) greedy = singly;
      if (kind > 0) CHECK(singly != greedy);
    }
    // Nothing is left to draw.
    std::vector<std::int32_t> none(2);
    const SampleOptions sample{1.0f, 5, 1.0f, 0.0f, 1};
    engine->truncate(5);
    REQUIRE(engine->can_follow(
        {std::vector<float>(kVocabulary, -std::numeric_limits<float>::infinity()), sample}));
    engine->follow(1, none);
    CHECK(none[0] == -1);
    CHECK_FALSE(engine->can_follow({{}, SampleOptions{1.0f, kSampleMostK + 1, 1.0f, 0.0f, 1}}));
  }
}

TEST_CASE(
    "whole tokens in one launch, by switch: as near to float64 as launches of parts, and refused where it "
    "cannot be") {
  const auto head_q8_0 = [](const std::string& name) {
    return name == "token_embd.weight" ? WeightType::q8_0 : WeightType::q4_0;
  };
  const std::vector<std::int32_t> tokens = text(12);
  const TinyModel models[] = {{head_q8_0, true, 2}, TinyModel(WeightType::q8_0)};
  for (const TinyModel& model : models) {
    EngineOptions options = options_of(false);
    const auto singly = [&](bool whole) {
      options.switches.token_kernel = whole;
      const std::unique_ptr<Engine> engine = make_device_engine(*model, options);
      CHECK((engine->info().kernels.find("token_kernel") != std::string::npos) == whole);
      std::vector<float> all = evaluated(*engine, {tokens.begin(), tokens.begin() + 5});  // among others
      for (std::size_t i = 5; i < tokens.size(); ++i) {
        const std::vector<float> one = evaluated(*engine, {tokens[i]});
        all.insert(all.end(), one.begin(), one.end());
      }
      return all;
    };
    const std::vector<float> whole = singly(true), parts = singly(false);
    CHECK(relative_error(whole, Reference64(*model, true).logits(tokens)) <= kInt8Error);
    CHECK(relative_error(whole, {parts.begin(), parts.end()}) <= 2 * kInt8Tolerance);
    CHECK(!same_bits(whole, parts));
  }
  EngineOptions asked = options_of(false);
  asked.switches.token_kernel = true;
  CHECK_THROWS_WITH(
      (void)make_device_engine(*TinyModel(WeightType::f16), asked),
      "token_kernel: all matrices of layers must be of one type and decoded as tiles, and the embedding of "
      "the head's type");
}

TEST_CASE("a trace has every launch of a multiplication, with its shape") {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("ladder-trace-" + std::to_string(getpid()) + ".json");
  const TinyModel model(WeightType::q4_0, false, 1);
  EngineOptions options = options_of(false);
  options.switches.trace = path.string();
  {
    const std::unique_ptr<Engine> engine = make_device_engine(*model, options);
    std::vector<float> logits(kVocabulary);
    engine->evaluate(text(12), logits);
    for (int i = 0; i < 3; ++i) engine->evaluate(text(1), logits);
  }
  std::ifstream file(path);
  const std::string all{std::istreambuf_iterator<char>(file), {}};
  const auto count = [&](const std::string& what) {
    int n = 0;
    for (std::size_t at = all.find(what); at != std::string::npos; at = all.find(what, at + 1)) ++n;
    return n;
  };
  CHECK(all.starts_with("[\n"));
  CHECK(all.ends_with("}\n]\n"));
  CHECK(count("\"gate\": \"decode.mmvq\"") ==
        3 * 5 + 1);  // of three tokens, and the prompt's last row's logits
  CHECK(count("\"weights\": \"blk.0.attn_q.weight + blk.0.attn_k.weight + blk.0.attn_v.weight\"") >= 3);
  CHECK(count("\"weights\": \"output.weight\", \"type\": \"q4_0\", \"nt\": 1, \"od\": 72, \"id\": 256") == 4);
  CHECK(count("\"name\": \"attention_decode\"") == 3);
  CHECK(count("\"percent_of_roof\"") == (std::string(device_executor()) == "gpu" ? count("\"gate\"") : 0));
  CHECK(count("\"ph\": \"X\"") == count("\"dur\""));
  std::filesystem::remove(path);

  options.switches.trace = "/no/such/folder/trace.json";
  CHECK_THROWS_WITH((void)make_device_engine(*model, options),
                    "LADDER_TRACE: cannot write /no/such/folder/trace.json: No such file or directory");
}

TEST_CASE(
    "launches of a token: five a layer with tiles or float weights, sixteen where blocks are not to be "
    "rounded to") {
  const auto kernels = [](const TinyModel& model, bool exact) {
    EngineOptions options = options_of(exact);
    options.switches.token_kernel = false;
    const std::unique_ptr<Engine> engine = make_device_engine(*model, options);
    std::vector<float> logits(kVocabulary);
    engine->evaluate(text(3), logits);
    CHECK(engine->info().kernels.find("launches") == std::string::npos);  // none was decoded yet
    for (int i = 0; i < 2; ++i) engine->evaluate(text(1), logits);
    return engine->info().kernels;
  };
  // Before the layers the step, the embedding and its int8, behind them the logits; with float weights no int8; where
  // nothing is fused, a norm.
  CHECK(kernels(TinyModel(WeightType::q4_0), false) ==
        "mmvq_tiles of q4_0; prompts: " +
            std::string(wgmma() ? "gemm_tiles_wgmma of q4_0; mmvq_tiles of q4_0"
                                : "mmq_tiles of q4_0; mmvq_tiles of q4_0") +
            "; 14 launches a token");
  CHECK(kernels(TinyModel(v_in_q6_k, false, 2), false).ends_with("; 14 launches a token"));
  CHECK(kernels(TinyModel(WeightType::q4_0), true) == "q4_0_f32_matmul; 36 launches a token");
  CHECK(kernels(TinyModel(WeightType::f32), false) ==
        "gemv_fused of f32; prompts: gemv_vec; 13 launches a token");
}

TEST_CASE("logits of the last token only, of none, and after going back") {
  const std::vector<std::int32_t> tokens = text(11);
  const TinyModel model(WeightType::q6_k, false, 1);
  EngineOptions options;
  options.batch = 4;
  const std::unique_ptr<Engine> engine = make_device_engine(*model, options);
  const std::vector<float> all = evaluated(*engine, tokens);
  const auto row = [&](std::size_t t) { return std::span(all).subspan(t * kVocabulary, kVocabulary); };
  std::vector<float> last(kVocabulary, NAN);

  engine->truncate(0);
  engine->evaluate(tokens, last);
  CHECK(same_bits(last, row(10)));

  engine->truncate(7);
  CHECK(engine->position() == 7);
  engine->evaluate(std::span(tokens).subspan(7, 2), {});
  CHECK(engine->position() == 9);
  engine->evaluate(std::span(tokens).subspan(9, 2), last);
  CHECK(same_bits(last, row(10)));

  // Other tokens in between leave no trace.
  engine->truncate(3);
  engine->evaluate(std::vector<std::int32_t>{1, 2, 3, 4, 5, 6, 7, 8}, last);
  CHECK(!same_bits(last, row(10)));
  engine->truncate(3);
  engine->evaluate(std::span(tokens).subspan(3), last);
  CHECK(same_bits(last, row(10)));
}

TEST_CASE("the context can be filled to its end and not beyond") {
  const TinyModel model(WeightType::q4_0, false, 1);
  EngineOptions options;
  options.context = 12;
  const std::unique_ptr<Engine> engine = make_device_engine(*model, options);
  CHECK(engine->context() == 12);
  engine->evaluate(text(10), {});
  std::vector<float> last(kVocabulary, NAN);
  CHECK_THROWS_WITH_AS(engine->evaluate(text(3), last),
                       "the context is full: 10 of 12 tokens are taken, and 3 more do not fit", ContextFull);
  CHECK(engine->position() == 10);
  CHECK(std::isnan(last[0]));
  engine->evaluate(std::vector<std::int32_t>{5, 6}, last);
  CHECK(engine->position() == 12);
  CHECK(std::isfinite(last[0]));
  CHECK_THROWS_AS(engine->evaluate(std::vector<std::int32_t>{1}, last), ContextFull);
  engine->truncate(11);
  engine->evaluate(std::vector<std::int32_t>{6}, last);
}

TEST_CASE("wrong arguments are refused, and change nothing") {
  const TinyModel model(WeightType::q4_0, true, 1);
  EngineOptions options;
  const std::unique_ptr<Engine> engine = make_device_engine(*model, options);
  engine->evaluate(text(2), {});
  std::vector<float> logits(kVocabulary), wrong(kVocabulary + 1);
  CHECK_THROWS_AS(engine->evaluate({}, logits), std::invalid_argument);
  CHECK_THROWS_WITH(engine->evaluate(std::vector<std::int32_t>{1, kVocabulary}, logits),
                    "evaluate: token 72 is outside the vocabulary, 0 to 71");
  CHECK_THROWS_AS(engine->evaluate(std::vector<std::int32_t>{-1}, logits), std::invalid_argument);
  CHECK_THROWS_WITH(engine->evaluate(text(3), wrong), "evaluate: room for 73 logits, expected 0, 72 or 216");
  CHECK_THROWS_AS(engine->truncate(3), std::invalid_argument);
  CHECK_THROWS_AS(engine->truncate(-1), std::invalid_argument);
  CHECK(engine->position() == 2);

  options.context = -1;
  CHECK_THROWS_AS((void)make_device_engine(*model, options), std::invalid_argument);
  options.context = 0;
  options.batch = 0;
  CHECK_THROWS_AS((void)make_device_engine(*model, options), std::invalid_argument);
}

TEST_CASE("what does not fit is refused before anything is loaded, with the bytes that it takes") {
  const TinyModel model(WeightType::q4_0, true, 1);
  EngineOptions options;
  options.context = 1 << 30;
  int calls = 0;
  options.on_progress = [&](std::uint64_t, std::uint64_t) { ++calls; };
  std::string message;
  try {
    (void)make_device_engine(*model, options);
  } catch (const DeviceError& e) {
    message = e.what();
  }
  // Keys and values of one layer: 2 * 2^30 tokens * 128 elements * 2 bytes.
  CHECK(message.find("KV cache 549755813888,") != std::string::npos);
  CHECK(message.find(" are free; -c ") != std::string::npos);
  CHECK(message.ends_with(" would fit"));
  CHECK(message.find(" with the tied embedding in two forms, loading them ") != std::string::npos);
  CHECK(calls == 0);
}

TEST_CASE("progress ends at the total") {
  const TinyModel model(WeightType::q5_k);
  EngineOptions options;
  std::uint64_t before = 0, last_total = 0;
  bool rising = true;
  options.on_progress = [&](std::uint64_t done, std::uint64_t total) {
    rising = rising && done > before && done <= total;
    before = done;
    last_total = total;
  };
  (void)make_device_engine(*model, options);
  CHECK(rising);
  CHECK(before == last_total);
  CHECK(static_cast<std::int64_t>(last_total) == (*model).tensor_bytes());
}
