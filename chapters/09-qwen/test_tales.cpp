// An engine with the bundled model against logits and greedy text that a NumPy implementation in float64
// computed (data/models/tales-reference.gguf; its fields: scripts/workbook/tales/reference.py).
// With -DLADDER_ON_DEVICE for the device of the build (GPU or emulator), without for the CPU. -DLADDER_MODELS="..." is
// the folder of the bundled models.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#if !defined(LADDER_MODELS)
#define LADDER_MODELS "data/models"  // from the project's root
#endif

#include "chapters/09-qwen/engine.hpp"
#include "chapters/09-qwen/gguf.hpp"
#include "chapters/09-qwen/model.hpp"
#include "harness/device/under_sanitizer.hpp"
#include "harness/experiment/mix_bits.hpp"

namespace {

using namespace ladder;
using namespace ladder::qwen;

template <class T>
std::vector<T> numbers(const gguf::File& file, const std::string& key) {
  const auto* array = file.get<const gguf::Array*>(key);
  REQUIRE(array->bytes.size() == array->count * sizeof(T));
  std::vector<T> v(array->count);
  std::memcpy(v.data(), array->bytes.data(), array->bytes.size());
  return v;
}

const std::string kModels = LADDER_MODELS;

#if defined(LADDER_ON_DEVICE)
std::unique_ptr<Engine> make_engine(const Model& model, const EngineOptions& options) {
  return make_device_engine(model, options);
}
/// The emulator takes a quarter of a second for a token: it does a part, which has every kernel in it.
bool in_parts() { return std::string(device_executor()) == "emulator" || under_sanitizer(); }
#else
std::unique_ptr<Engine> make_engine(const Model& model, const EngineOptions& options) {
  return make_cpu_engine(model, options);
}
bool in_parts() { return false; }
#endif

std::vector<std::string> sets_of(bool yarn) {
  if (yarn)
    return in_parts() ? std::vector<std::string>{"yarn0"} : std::vector<std::string>{"yarn0", "yarn1"};
  return in_parts() ? std::vector<std::string>{"prompt0", "prompt1"}
                    : std::vector<std::string>{"prompt0", "prompt1", "prompt2", "prompt3"};
}

/// Largest difference of the stored rows of a prompt's logits; infinite if any is not finite.
double worst_difference(Engine& engine, const gguf::File& reference, const std::string& set,
                        std::size_t vocabulary) {
  const auto tokens = numbers<std::int32_t>(reference, set + ".tokens");
  const auto rows = numbers<std::uint32_t>(reference, set + ".rows");
  const gguf::Tensor* stored = reference.tensor(set + ".logits");
  REQUIRE(stored != nullptr);
  REQUIRE(stored->elements() == static_cast<std::int64_t>(rows.size() * vocabulary));
  std::vector<float> expected(rows.size() * vocabulary);
  std::memcpy(expected.data(), stored->data.data(), stored->data.size());
  std::vector<float> logits(tokens.size() * vocabulary, std::numeric_limits<float>::quiet_NaN());
  engine.evaluate(tokens, logits);
  double worst = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t i = 0; i < vocabulary; ++i) {
      const float got = logits[rows[r] * vocabulary + i];
      if (!std::isfinite(got)) return std::numeric_limits<double>::infinity();
      worst = std::max(worst, std::fabs(static_cast<double>(got) - expected[r * vocabulary + i]));
    }
  }
  return worst;
}

TEST_CASE("logits of the bundled model within the reference's limit, YaRN included") {
  const gguf::File file(kModels + "/tales-f16.gguf"), reference(kModels + "/tales-reference.gguf");
  for (const bool yarn : {false, true}) {
    Model model(file);
    if (yarn) {
      model.hp.yarn =
          Yarn{reference.get<float>("yarn.factor"), reference.get<std::int32_t>("yarn.original_context")};
    }
    const auto v = static_cast<std::size_t>(model.hp.vocabulary);
    for (const std::string& set : sets_of(yarn)) {
      CAPTURE(set);
      EngineOptions options;
      options.kv_f16 = false;
      options.exact = true;
      const auto engine = make_engine(model, options);
      CHECK(worst_difference(*engine, reference, set, v) <=
            static_cast<double>(reference.get<float>(set + ".limit")));
    }
    if (yarn) continue;
    // A cache in f16 is another computation: near, and not the same.
    EngineOptions exact;
    exact.exact = true;
    const double f16 = worst_difference(*make_engine(model, exact), reference, "prompt1", v);
    CHECK(f16 <= 5e-3);
    CHECK(f16 > static_cast<double>(reference.get<float>("prompt1.limit")));
    // And so are prompts whose activations become f16 on their way to tensor cores.
    const double halves = worst_difference(*make_engine(model, EngineOptions{}), reference, "prompt1", v);
    CHECK(halves <= 2e-2);
  }
}

TEST_CASE("greedy text of the bundled model: 128 tokens") {
  const gguf::File file(kModels + "/tales-f16.gguf"), reference(kModels + "/tales-reference.gguf");
  const Model model(file);
  const std::vector<std::string> sets = in_parts()
                                            ? std::vector<std::string>{"prompt1"}
                                            : std::vector<std::string>{"prompt0", "prompt1", "prompt2"};
  for (const std::string& set : sets) {
    CAPTURE(set);
    const auto expected = numbers<std::int32_t>(reference, set + ".greedy");
    REQUIRE(expected.size() == 128);
    for (const bool f16 : {true, false}) {
      if (in_parts() && !f16) continue;
      EngineOptions options;
      options.kv_f16 = f16;
      const auto engine = make_engine(model, options);
      std::vector<float> logits(static_cast<std::size_t>(model.hp.vocabulary));
      engine->evaluate(numbers<std::int32_t>(reference, set + ".tokens"), logits);
      std::vector<std::int32_t> greedy;
      while (greedy.size() < expected.size()) {
        greedy.push_back(
            static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
        engine->evaluate({&greedy.back(), 1}, logits);
      }
      CHECK(greedy == expected);
    }
  }
}

TEST_CASE("random prompts: every logit a number, and the same again after others") {
  const gguf::File file(kModels + "/tales-f16.gguf");
  const Model model(file);
  const int prompts = in_parts() ? 4 : 1000;
  constexpr int kLongest = 24;
  const auto v = static_cast<std::size_t>(model.hp.vocabulary);
  EngineOptions options;
  options.context = 64;
  options.batch = 7;  // so that prompts come in pieces of every length
  const auto engine = make_engine(model, options);
  const auto random = [](std::uint64_t n) { return mix_bits(n * 0x9e3779b97f4a7c15ULL); };
  const auto run = [&](int prompt) {
    std::vector<std::int32_t> tokens(1 + random(static_cast<std::uint64_t>(prompt)) % kLongest);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = static_cast<std::int32_t>(random((static_cast<std::uint64_t>(prompt) << 8) + i + 1) % v);
    }
    std::vector<float> logits(v, std::numeric_limits<float>::quiet_NaN());
    engine->truncate(0);
    engine->evaluate(tokens, logits);
    return logits;
  };
  const std::vector<float> first = run(0);
  int bad = 0;
  for (int prompt = 1; prompt < prompts; ++prompt) {
    for (const float logit : run(prompt)) bad += std::isfinite(logit) ? 0 : 1;
  }
  CHECK(bad == 0);
  CHECK(run(0) == first);
}

}  // namespace

int main(int argc, char** argv) {
#if defined(LADDER_ON_DEVICE)
  if (!device_present()) {
    std::printf("no CUDA device, or no driver for one\n");
    return 77;  // Meson: skipped
  }
#endif
  doctest::Context context(argc, argv);
  return context.run();
}
