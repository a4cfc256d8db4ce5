#include "chapters/09-qwen/generate.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace ladder::qwen {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Bytes of tokens -> whole characters -> text before a stop string, which is kept and passed on.
class Output {
 public:
  Output(const GenerateOptions& options, std::string& text)
      : stops_(options.stops), options_(options), text_(text) {}

  /// false: a stop string is complete, and no more text will come.
  bool push(std::string_view bytes) {
    emit(stops_.push(characters_.push(bytes)));
    return !stops_.stopped();
  }
  void finish() {
    if (stops_.stopped()) return;
    emit(stops_.push(characters_.flush()));
    emit(stops_.flush());
  }
  [[nodiscard]] bool stopped() const { return stops_.stopped(); }

 private:
  void emit(const std::string& piece) {
    if (piece.empty()) return;
    text_ += piece;
    if (options_.on_text) options_.on_text(piece);
  }
  Utf8Stream characters_;
  StopStrings stops_;
  const GenerateOptions& options_;
  std::string& text_;
};

}  // namespace

const char* to_string(StopReason reason) {
  switch (reason) {
    case StopReason::limit:
      return "limit";
    case StopReason::end_of_generation:
      return "end_of_generation";
    case StopReason::stop_string:
      return "stop_string";
    case StopReason::context_full:
      return "context_full";
    case StopReason::interrupted:
      return "interrupted";
  }
  return "?";
}

Generation generate(Engine& engine, const Tokenizer& tokenizer, Sampler& sampler, int vocabulary,
                    std::vector<Token>& history, std::span<const Token> prompt,
                    const GenerateOptions& options) {
  if (prompt.empty()) throw std::invalid_argument("the prompt has no token; at least one is needed");
  const int before = engine.position();
  const auto room = static_cast<std::size_t>(engine.context() - before);
  if (prompt.size() > room) {
    throw ContextFull("the prompt has " + std::to_string(prompt.size()) + " tokens, and " +
                      std::to_string(room) + " of the context's " + std::to_string(engine.context()) +
                      " are free; -c sets its size");
  }
  const auto interrupted = [&options] { return options.interrupted && options.interrupted(); };
  Generation result;
  Statistics& statistics = result.statistics;
  const std::span<float> theirs = engine.logits_room();
  std::vector<float> own(theirs.empty() ? static_cast<std::size_t>(vocabulary) : 0);
  const std::span<float> logits = theirs.empty() ? std::span(own) : theirs;

  // 1. The prompt, many rows at a time. Only its last row's logits are of use.
  const auto batch = static_cast<std::size_t>(std::max(1, options.batch));
  const Clock::time_point prompt_start = Clock::now();
  for (std::size_t i = 0; i < prompt.size(); i += batch) {
    if (interrupted()) {
      engine.truncate(before);
      result.reason = StopReason::interrupted;
      return result;
    }
    const std::span<const Token> piece = prompt.subspan(i, std::min(batch, prompt.size() - i));
    const bool last = i + piece.size() == prompt.size();
    engine.evaluate(piece, last ? logits : std::span<float>());
  }
  statistics.prompt_seconds = seconds_since(prompt_start);
  statistics.prompt_tokens = static_cast<int>(prompt.size());
  history.insert(history.end(), prompt.begin(), prompt.end());

  // 2. One token at a time. `position` of the draw is where the token will stand, so that a seed gives the
  // same text however the tokens before it came into the cache.
  Output output(options, result.text);
  const Clock::time_point decode_start = Clock::now();
  while (true) {
    if (options.limit >= 0 && result.tokens.size() >= static_cast<std::size_t>(options.limit)) {
      result.reason = StopReason::limit;
      break;
    }
    if (interrupted()) {
      result.reason = StopReason::interrupted;
      break;
    }
    const Clock::time_point sample_start = Clock::now();
    const Token token = sampler.sample(logits, history, static_cast<std::uint64_t>(engine.position()));
    statistics.sample_seconds += seconds_since(sample_start);
    if (!options.ignore_eos && tokenizer.ends_generation(token)) {
      result.reason = StopReason::end_of_generation;
      break;
    }
    result.tokens.push_back(token);
    if (!output.push(tokenizer.bytes(token, options.special))) {
      result.reason = StopReason::stop_string;
      break;
    }
    if (options.limit >= 0 && result.tokens.size() >= static_cast<std::size_t>(options.limit)) {
      result.reason = StopReason::limit;
      break;  // nothing follows this token, so its row of the cache is not needed
    }
    if (engine.position() >= engine.context()) {
      result.reason = StopReason::context_full;
      break;
    }
    engine.evaluate(std::span(&token, 1), logits);
    history.push_back(token);
    ++result.evaluated;
    ++statistics.decode_steps;
  }
  statistics.decode_seconds = seconds_since(decode_start);
  output.finish();
  return result;
}

}  // namespace ladder::qwen
