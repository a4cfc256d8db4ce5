// The generation loop, perplexity and bench on an engine whose answers are written down beforehand.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "chapters/09-qwen/bench.hpp"
#include "chapters/09-qwen/generate.hpp"
#include "chapters/09-qwen/interrupt.hpp"
#include "chapters/09-qwen/perplexity.hpp"

using namespace ladder;
using namespace ladder::qwen;

namespace {

constexpr Token kEndOfText = 256, kImEnd = 257, kHello = 258, kUnused = 259;
constexpr int kVocabulary = 260;

/// The character that stands for a byte in a vocabulary: the byte itself where it is printable, U+0100 on
/// otherwise.
std::string mapped_byte(int byte) {
  const auto plain = [](int b) {
    return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
  };
  int code = byte;
  if (!plain(byte)) {
    code = 0x100;
    for (int b = 0; b < byte; ++b) code += plain(b) ? 0 : 1;
  }
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xC0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3F))};
}

/// Token b is byte b; then the two end tokens, "Hello" and an unused row.
Tokenizer byte_tokenizer() {
  std::vector<std::string> tokens;
  tokens.reserve(kVocabulary);
  for (int b = 0; b < 256; ++b) tokens.push_back(mapped_byte(b));
  std::vector<TokenType> types(256, TokenType::normal);
  for (const char* name : {"<|endoftext|>", "<|im_end|>"}) {
    tokens.emplace_back(name);
    types.push_back(TokenType::control);
  }
  tokens.emplace_back("Hello");
  types.push_back(TokenType::normal);
  tokens.emplace_back("[PAD259]");
  types.push_back(TokenType::unused);
  return {std::move(tokens), std::move(types), {}};
}

std::vector<Token> bytes_of(std::string_view text) {
  std::vector<Token> tokens;
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

/// After the first `start` tokens, the likeliest next tokens are `script`, one after another, then byte '.'.
class ScriptedEngine : public Engine {
 public:
  ScriptedEngine(int context, int start, std::vector<Token> script)
      : context_(context), start_(start), script_(std::move(script)) {}
  [[nodiscard]] const EngineInfo& info() const override { return info_; }
  [[nodiscard]] int context() const override { return context_; }
  [[nodiscard]] int position() const override { return static_cast<int>(cache.size()); }
  void truncate(int position) override {
    REQUIRE(position >= 0);
    REQUIRE(position <= this->position());
    cache.resize(static_cast<std::size_t>(position));
    truncated.push_back(position);
  }
  void evaluate(std::span<const std::int32_t> tokens, std::span<float> logits) override {
    REQUIRE_FALSE(tokens.empty());
    if (tokens.size() > static_cast<std::size_t>(context_ - position())) throw ContextFull("scripted: full");
    batches.push_back(tokens.size());
    const std::size_t rows = logits.size() / kVocabulary;
    REQUIRE(logits.size() == rows * kVocabulary);
    REQUIRE((rows == 0 || rows == 1 || rows == tokens.size()));
    if (position() + static_cast<int>(tokens.size()) > interrupted_at) throw Interrupted();
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      REQUIRE(tokens[i] >= 0);
      REQUIRE(tokens[i] < kVocabulary);
      cache.push_back(tokens[i]);
      if (rows == 0 || (rows == 1 && i + 1 < tokens.size())) continue;
      const std::span<float> row = logits.subspan(rows == 1 ? 0 : i * kVocabulary, kVocabulary);
      std::fill(row.begin(), row.end(), 0.0f);
      const int next = position() - start_;
      const bool known = next >= 0 && next < static_cast<int>(script_.size());
      row[static_cast<std::size_t>(known ? script_[static_cast<std::size_t>(next)] : '.')] = 10;
      if (position() == nan_at) row[7] = std::numeric_limits<float>::quiet_NaN();
    }
  }

  [[nodiscard]] bool can_follow(const Drawing& drawing) override {
    CHECK_FALSE(drawing.sample.has_value());
    bias_ = drawing.bias;
    return follows;
  }
  void follow(std::int32_t token, std::span<std::int32_t> drawn) override {
    check_follow(*this, kVocabulary, token, drawn.size());
    followed.push_back(drawn.size());
    for (std::int32_t& next : drawn) {
      if (token < 0) continue;  // nothing after it means anything
      std::vector<float> logits(kVocabulary);
      evaluate(std::span(&token, 1), logits);
      batches.pop_back();
      next = -1;
      for (int i = 0; i < kVocabulary; ++i) {
        const auto at = static_cast<std::size_t>(i);
        logits[at] += bias_.empty() ? 0 : bias_[at];
        if (std::isnan(logits[at])) {
          next = -1;
          break;
        }
        if (next < 0 || logits[at] > logits[static_cast<std::size_t>(next)]) next = i;
      }
      token = next;
    }
  }

  bool follows = false;
  std::vector<std::size_t> followed;
  std::vector<Token> cache;
  std::vector<std::size_t> batches;
  std::vector<int> truncated;
  int interrupted_at =
      std::numeric_limits<int>::max();  ///< tokens in the cache that an interrupt keeps from coming
  int nan_at = -1;

 private:
  std::vector<float> bias_;
  EngineInfo info_{"cpu", "scripted", "none"};
  int context_, start_;
  std::vector<Token> script_;
};

struct Outcome {
  Generation generation;
  std::string streamed;
  std::vector<std::string> pieces;
  std::vector<Token> history;
};

Outcome run(ScriptedEngine& engine, std::string_view prompt, GenerateOptions options) {
  const Tokenizer tokenizer = byte_tokenizer();
  SamplerOptions greedy;
  greedy.temperature = 0;
  Sampler sampler(greedy, kVocabulary);
  Outcome outcome;
  options.on_text = [&outcome](std::string_view piece) {
    outcome.streamed += piece;
    outcome.pieces.emplace_back(piece);
  };
  outcome.generation =
      generate(engine, tokenizer, sampler, kVocabulary, outcome.history, bytes_of(prompt), options);
  CHECK(outcome.streamed == outcome.generation.text);
  CHECK(outcome.history == engine.cache);
  CHECK(outcome.history.size() == prompt.size() + outcome.generation.evaluated);
  return outcome;
}

GenerateOptions limit(int n) {
  GenerateOptions options;
  options.limit = n;
  return options;
}

}  // namespace

TEST_CASE("an engine that draws several tokens at once: the same text, history and reason") {
  std::string story;
  for (int i = 0; i < 60; ++i)
    story += std::string(1, static_cast<char>('a' + i % 26)) + (i % 7 == 3 ? "\n" : "");
  std::vector<Token> ending = bytes_of(story);
  ending.insert(ending.begin() + 45, kEndOfText);
  GenerateOptions stop_string = limit(50), two = limit(2), all = limit(-1), ignore = limit(-1);
  stop_string.stops = {"kl"};
  ignore.ignore_eos = true;
  int asked = 0;
  GenerateOptions interrupt = limit(-1);
  interrupt.interrupted = [&asked] { return ++asked > 20; };
  for (const GenerateOptions& options :
       {limit(0), limit(1), two, limit(17), limit(40), all, ignore, stop_string, interrupt}) {
    for (const int context : {4, 20, 200}) {
      for (const std::vector<Token>& script : {bytes_of(story), ending}) {
        ScriptedEngine singly(context, 3, script), ahead(context, 3, script);
        ahead.follows = true;
        asked = 0;
        const Outcome a = run(singly, "abc", options);
        asked = 0;
        const Outcome b = run(ahead, "abc", options);
        CHECK(a.generation.text == b.generation.text);
        CHECK(a.generation.tokens == b.generation.tokens);
        CHECK(a.generation.reason == b.generation.reason);
        CHECK(a.generation.evaluated == b.generation.evaluated);
        CHECK(a.generation.statistics.decode_steps == b.generation.statistics.decode_steps);
        CHECK(a.pieces == b.pieces);
        CHECK(a.history == b.history);
        CHECK(ahead.batches == std::vector<std::size_t>{3});  // only the prompt
        if (b.generation.evaluated > 20)
          CHECK(*std::max_element(ahead.followed.begin(), ahead.followed.end()) == 16);
      }
    }
  }
}

TEST_CASE("an engine that draws tokens itself and meets a NaN: the sampler says which") {
  ScriptedEngine engine(100, 3, bytes_of("some words"));
  engine.follows = true;
  engine.nan_at = 9;
  std::string message;
  try {
    (void)run(engine, "abc", limit(-1));
  } catch (const NotANumber& e) {
    message = e.what();
  }
  CHECK(message.find("the logit of token 7 is NaN") != std::string::npos);
  CHECK(engine.position() == 9);
}

TEST_CASE("the limit counts drawn tokens, and the last one is not evaluated") {
  ScriptedEngine engine(64, 2, bytes_of("abcdef"));
  const Outcome o = run(engine, "xy", limit(3));
  CHECK(o.generation.text == "abc");
  CHECK(o.generation.tokens == bytes_of("abc"));
  CHECK(o.generation.reason == StopReason::limit);
  CHECK(o.generation.evaluated == 2);
  CHECK(engine.cache == bytes_of("xyab"));
  CHECK(o.generation.statistics.prompt_tokens == 2);
  CHECK(o.generation.statistics.decode_steps == 2);
}

TEST_CASE("a limit of 0 reads the prompt and draws nothing") {
  ScriptedEngine engine(64, 2, bytes_of("abc"));
  const Outcome o = run(engine, "xy", limit(0));
  CHECK(o.generation.text.empty());
  CHECK(o.generation.reason == StopReason::limit);
  CHECK(engine.cache == bytes_of("xy"));
}

TEST_CASE("both end tokens end it; with ignore_eos neither does") {
  for (const Token end : {kEndOfText, kImEnd}) {
    const std::vector<Token> script{'a', 'b', end, 'c', 'd'};
    ScriptedEngine engine(64, 1, script);
    const Outcome o = run(engine, "x", limit(10));
    CHECK(o.generation.reason == StopReason::end_of_generation);
    CHECK(o.generation.text == "ab");
    CHECK(o.generation.tokens == bytes_of("ab"));
    CHECK(o.generation.evaluated == 2);

    ScriptedEngine another(64, 1, script);
    GenerateOptions options = limit(5);
    options.ignore_eos = true;
    const Outcome ignored = run(another, "x", options);
    CHECK(ignored.generation.reason == StopReason::limit);
    CHECK(ignored.generation.tokens == script);
    CHECK(ignored.generation.text == "abcd");  // a control token is not printed ...

    ScriptedEngine third(64, 1, script);
    options.special = true;
    const std::string name = end == kEndOfText ? "<|endoftext|>" : "<|im_end|>";
    CHECK(run(third, "x", options).generation.text == "ab" + name + "cd");  // ... unless asked for
  }
}

TEST_CASE("text ends before a stop string, also one that spans tokens; false starts are printed") {
  GenerateOptions options = limit(40);
  options.stops = {"\nUser:", "STOP"};
  {
    ScriptedEngine engine(64, 1, bytes_of("one\nUs two STO STOP three"));
    const Outcome o = run(engine, "x", options);
    CHECK(o.generation.reason == StopReason::stop_string);
    CHECK(o.generation.text == "one\nUs two STO ");
  }
  {
    ScriptedEngine engine(64, 1, {'a', kHello, 'b', kEndOfText});
    options.stops = {"ell"};
    const Outcome o = run(engine, "x", options);
    CHECK(o.generation.text == "aH");
    CHECK(o.generation.reason == StopReason::stop_string);
  }
  {  // what was held back comes out when something else ends it
    ScriptedEngine engine(64, 1, {'a', 'S', 'T', kEndOfText});
    options.stops = {"STOP"};
    CHECK(run(engine, "x", options).generation.text == "aST");
  }
}

TEST_CASE("characters split over tokens are printed whole; what stays incomplete is U+FFFD") {
  ScriptedEngine engine(64, 1, bytes_of("a\xF0\x9F\x98\x80\xC3\xA9"));
  const Outcome o = run(engine, "x", limit(7));
  CHECK(o.generation.text == "a\xF0\x9F\x98\x80\xC3\xA9");
  CHECK(o.pieces == std::vector<std::string>{"a", "\xF0\x9F\x98\x80", "\xC3\xA9"});

  ScriptedEngine another(64, 1, bytes_of("a\xF0\x9F\x98\x80"));
  CHECK(run(another, "x", limit(3)).generation.text == "a\xEF\xBF\xBD");
}

TEST_CASE("a full context ends it after the last token that could be drawn") {
  ScriptedEngine engine(8, 3, bytes_of("abcdefghijkl"));
  const Outcome o = run(engine, "xyz", limit(-1));
  CHECK(o.generation.reason == StopReason::context_full);
  CHECK(o.generation.text == "abcdef");  // five in the cache, and the sixth was still predicted
  CHECK(engine.position() == 8);
}

TEST_CASE("a prompt that does not fit changes nothing and says the numbers") {
  ScriptedEngine engine(8, 3, {});
  const Tokenizer tokenizer = byte_tokenizer();
  Sampler sampler({}, kVocabulary);
  std::vector<Token> history;
  CHECK_THROWS_WITH_AS(
      (void)generate(engine, tokenizer, sampler, kVocabulary, history, bytes_of("123456789"), limit(1)),
      doctest::Contains("9 tokens, and 8 of the context's 8"), ContextFull);
  CHECK(engine.position() == 0);
  CHECK(history.empty());
  CHECK_THROWS_AS((void)generate(engine, tokenizer, sampler, kVocabulary, history, {}, limit(1)),
                  std::invalid_argument);
}

TEST_CASE("the prompt goes in pieces; a prompt that fills the context gives one token") {
  ScriptedEngine engine(10, 10, bytes_of("ab"));
  GenerateOptions options = limit(5);
  options.batch = 4;
  const Outcome o = run(engine, "0123456789", options);
  CHECK(engine.batches == std::vector<std::size_t>{4, 4, 2});
  CHECK(o.generation.text == "a");
  CHECK(o.generation.reason == StopReason::context_full);
}

TEST_CASE("logits that are not numbers are an error, after the text so far") {
  ScriptedEngine engine(64, 1, bytes_of("abcdef"));
  engine.nan_at = 3;
  const Tokenizer tokenizer = byte_tokenizer();
  SamplerOptions greedy;
  greedy.temperature = 0;
  Sampler sampler(greedy, kVocabulary);
  std::vector<Token> history;
  std::string text;
  GenerateOptions options = limit(6);
  options.on_text = [&text](std::string_view piece) { text += piece; };
  CHECK_THROWS_AS((void)generate(engine, tokenizer, sampler, kVocabulary, history, bytes_of("x"), options),
                  NotANumber);
  CHECK(text == "ab");
}

TEST_CASE("an interrupt between tokens keeps the text; one in the prompt puts the cache back") {
  ScriptedEngine engine(64, 1, bytes_of("abcdef"));
  GenerateOptions options = limit(6);
  int asked = 0;
  options.interrupted = [&asked] { return ++asked > 4; };
  const Outcome o = run(engine, "x", options);
  CHECK(o.generation.reason == StopReason::interrupted);
  CHECK(o.generation.text == "abc");
  CHECK(o.generation.evaluated == 3);

  ScriptedEngine another(64, 6, {});
  another.cache = bytes_of("old");
  asked = 3;
  options.batch = 2;
  const Tokenizer tokenizer = byte_tokenizer();
  Sampler sampler({}, kVocabulary);
  std::vector<Token> history = bytes_of("old");
  const Generation g =
      generate(another, tokenizer, sampler, kVocabulary, history, bytes_of("newer"), options);
  CHECK(g.reason == StopReason::interrupted);
  CHECK(another.batches == std::vector<std::size_t>{2});
  CHECK(another.cache == bytes_of("old"));
  CHECK(history == bytes_of("old"));

  // An engine may also stop in the middle of a piece.
  ScriptedEngine slow(64, 6, {});
  slow.cache = bytes_of("old");
  slow.interrupted_at = 6;
  options.interrupted = {};
  CHECK(generate(slow, tokenizer, sampler, kVocabulary, history, bytes_of("newer"), options).reason ==
        StopReason::interrupted);
  CHECK(slow.cache == bytes_of("old"));
  CHECK(history == bytes_of("old"));
}

TEST_CASE("the same seed gives the same text however the prompt was evaluated") {
  const Tokenizer tokenizer = byte_tokenizer();
  const auto text = [&tokenizer](std::uint64_t seed, int batch) {
    ScriptedEngine engine(64, 1000, {});  // nearly flat: every draw counts
    SamplerOptions flat;
    flat.temperature = 100;
    flat.top_k = 0;
    flat.top_p = 1;
    flat.min_p = 0;
    flat.seed = seed;
    Sampler sampler(flat, kVocabulary);
    std::vector<Token> history;
    GenerateOptions options = limit(20);
    options.batch = batch;
    options.ignore_eos = true;
    return generate(engine, tokenizer, sampler, kVocabulary, history, bytes_of("some prompt"), options)
        .tokens;
  };
  CHECK(text(1, 512) == text(1, 3));
  CHECK(text(1, 512) != text(2, 512));
}

TEST_CASE("negative log likelihood against the definition; NaN stays NaN") {
  const std::vector<float> logits{1.5f, -2.0f, 0.25f, 80.0f};
  double sum = 0;
  for (const float l : logits) sum += std::exp(static_cast<double>(l));
  for (Token t = 0; t < 4; ++t) {
    const double expected =
        -std::log(std::exp(static_cast<double>(logits[static_cast<std::size_t>(t)])) / sum);
    const double got = negative_log_likelihood(logits, t);
    CHECK(std::isfinite(got));
    CHECK(std::fabs(got - expected) <= 1e-12 * (1 + std::fabs(expected)));
  }
  CHECK(std::isnan(negative_log_likelihood(std::vector<float>{0, std::nanf("")}, 0)));
}

TEST_CASE("perplexity counts the second halves of whole windows") {
  // Logits are 10 for one token and 0 for the others, so a token costs log(e^10 + V - 1) - 10 if foretold,
  // else that + 10.
  const double low = std::log(std::exp(10.0) + kVocabulary - 1) - 10, high = low + 10;
  std::vector<Token> text(16 + 5, 'q');  // two windows of 8 and a rest that is dropped
  text[6] = '.';                         // foretold, in the second half of window 0
  text[8 + 2] = '.';                     // foretold, but in a first half
  text[8 + 5] = text[8 + 7] = '.';
  for (const int batch : {1, 3, 512}) {
    ScriptedEngine engine(64, 1000, {});
    int calls = 0;
    const Perplexity p = measure_perplexity(engine, kVocabulary, text, 8, -1, batch,
                                            [&](int done, int total, const Perplexity&) {
                                              ++calls;
                                              CHECK(done == calls);
                                              CHECK(total == 2);
                                              return true;
                                            });
    CHECK(p.windows == 2);
    CHECK(p.counted == 6);  // tokens 5, 6, 7 of each
    const double mean = (3 * low + 3 * high) / 6;
    CHECK(std::fabs(p.mean_nll - mean) <= 1e-5);
    CHECK(std::fabs(p.perplexity - std::exp(mean)) <= 1e-5 * std::exp(mean));
    const double error = std::exp(mean) * std::sqrt(25.0 / 5);  // variance 25, n - 1 = 5
    CHECK(std::fabs(p.standard_error - error) <= 1e-4 * error);
  }
}

TEST_CASE("perplexity refuses what it cannot measure") {
  ScriptedEngine engine(16, 1000, {});
  const std::vector<Token> text(20, 'q');
  const auto measure = [&](int window) {
    return measure_perplexity(engine, kVocabulary, text, window, -1, 8, {});
  };
  CHECK_THROWS_AS((void)measure(3), std::invalid_argument);
  CHECK_THROWS_AS((void)measure(17), std::invalid_argument);
  ScriptedEngine large(64, 1000, {});
  CHECK_THROWS_WITH_AS((void)measure_perplexity(large, kVocabulary, text, 32, -1, 8, {}),
                       doctest::Contains("20 tokens"), std::invalid_argument);
  engine.nan_at = 6;
  CHECK_THROWS_AS((void)measure(8), NotANumber);
}

TEST_CASE("lists of numbers as llama-bench writes them") {
  using Numbers = std::vector<int>;
  CHECK(parse_list("512", 0, 9999) == Numbers{512});
  CHECK(parse_list("1,2,3", 0, 9999) == Numbers{1, 2, 3});
  CHECK(parse_list("1-4", 0, 9999) == Numbers{1, 2, 3, 4});
  CHECK(parse_list("1-9+4", 0, 9999) == Numbers{1, 5, 9});
  CHECK(parse_list("1-70*4,5", 0, 9999) == Numbers{1, 4, 16, 64, 5});
  for (const char* wrong :
       {"", "a", "1,", ",1", "1-", "-1", "1-4+", "1-4+0", "1-4*1", "0-4*2", "1 2", "10000", "99999999999"}) {
    INFO(wrong);
    CHECK_THROWS_AS((void)parse_list(wrong, 0, 9999), std::invalid_argument);
  }
}

TEST_CASE("a bench test evaluates exactly its tokens, each repetition from the same depth") {
  ScriptedEngine engine(1000, 1000, {});
  int roofs = 0;
  const BenchResult r =
      run_bench(engine, kVocabulary, {6, 3, 10}, 2, 4, true, [&roofs] { return 10.0 + roofs++; }, {});
  // depth 4+4+2, warm-up 4+2 and 1, then twice 4+2 and 1+1+1
  CHECK(engine.batches == std::vector<std::size_t>{4, 4, 2, 4, 2, 1, 4, 2, 1, 1, 1, 4, 2, 1, 1, 1});
  CHECK(engine.truncated == std::vector<int>{0, 10, 10});
  CHECK(engine.position() == 19);
  CHECK(r.samples_ns.size() == 2);
  CHECK(r.roof_gbps == std::vector<double>{10, 11});
  CHECK(r.test.name() == "pp6+tg3 @ d10");
  CHECK(r.test.name("@") == "pp6+tg3@d10");
  CHECK(BenchTest{0, 128, 0}.name() == "tg128");
}

TEST_CASE("rates, deviation and share of the roof") {
  CHECK(mean_and_deviation(std::vector<double>{5}).deviation == 0);
  const MeanAndDeviation m = mean_and_deviation(std::vector<double>{2, 4, 4, 4, 5, 5, 7, 9});
  CHECK(m.mean == 5);
  CHECK(std::fabs(m.deviation - std::sqrt(32.0 / 7)) <= 1e-12);

  BenchSetting s;
  s.size_label = "0.5B";
  s.file_type = "Q4_0";
  s.executor = "cpu";
  s.device_slug = "some-cpu";
  s.threads = 2;
  s.batch = 512;
  s.cache_type = "f16";
  s.bytes_per_token = 500'000'000;
  BenchResult r{{0, 10, 0}, "2026-01-01T00:00:00Z", {1e9, 2e9}, {8, 12, 9}};
  CHECK(r.rates() == std::vector<double>{10, 5});
  CHECK(achieved_gbps(s, r) == doctest::Approx(3.75));
  CHECK(roof_of(s, r) == 9);
  const std::string record = bench_record(s, r);
  CHECK(record.find("\"rung\": \"engine\"") != std::string::npos);
  CHECK(record.find("\"test\": \"tg10\"") != std::string::npos);
  CHECK(record.find("\"percent_of_roof\": 41.6666667") != std::string::npos);
  // What is launched for a token, in every form of the report; the CPU launches nothing.
  CHECK(record.find("kernels_per_token") == std::string::npos);
  s.kernels_per_token = 124;
  CHECK(bench_record(s, r).find("\"kernels_per_token\": 124") != std::string::npos);
  struct Form {
    const char *name, *said;
  };
  for (const Form form : {Form{"md", " 124 |"},
                          {"csv", ",\"124\","},
                          {"json", "\"kernels_per_token\": 124"},
                          {"jsonl", "\"kernels_per_token\": 124"}}) {
    CAPTURE(form.name);
    std::string text;
    BenchReport report(form.name, [&text](std::string_view piece) { text += piece; });
    report.add(s, r);
    report.finish();
    CHECK(text.find(form.said) != std::string::npos);
    CHECK(text.find("41.") != std::string::npos);   // per cent of the roof
    CHECK(text.find("3.75") != std::string::npos);  // GB/s
  }
  r.test = {10, 0, 0};  // rows of a prompt share the weights: no bandwidth is claimed
  CHECK(bench_record(s, r).find("percent_of_roof") == std::string::npos);

  std::string table;
  BenchReport md("md", [&table](std::string_view text) { table += text; });
  md.add(s, r);
  md.finish();
  CHECK(table.starts_with("| model "));
  CHECK(table.find("7.50 ± 3.54") != std::string::npos);
}
