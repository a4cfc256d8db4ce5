#include "chapters/09-qwen/generate.hpp"

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>

#include "chapters/09-qwen/interrupt.hpp"

namespace ladder::qwen {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kUnnoticed = 0.02;      ///< seconds between pieces of text
constexpr std::size_t kMostAtOnce = 16;  ///< tokens drawn before one is looked at

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
    try {
      engine.evaluate(piece, last ? logits : std::span<float>());
    } catch (const Interrupted&) {  // between two layers, of an engine that takes long for a piece
      engine.truncate(before);
      result.reason = StopReason::interrupted;
      return result;
    }
  }
  statistics.prompt_seconds = seconds_since(prompt_start);
  statistics.prompt_tokens = static_cast<int>(prompt.size());
  history.insert(history.end(), prompt.begin(), prompt.end());

  // 2. Where a draw depends on logits and position alone, and the engine makes it itself, several tokens are drawn before
  //    they are looked at: so many that a user does not notice.
  const std::optional<Drawing> drawing = sampler.drawing();
  const bool follow = drawing && engine.can_follow(*drawing);
  std::vector<Token> ahead;  // what the engine has drawn; all but the last are in its cache
  std::size_t looked_at = 0, at_once = 1;
  const auto position = [&] { return before + static_cast<int>(prompt.size() + result.evaluated); };

  // 3. One token at a time. `position` of the draw is where the token will stand, so that a seed gives the
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
    Token token = looked_at < ahead.size() ? ahead[looked_at++] : -1;
    if (token < 0) {
      if (!ahead.empty()) {  // what the engine cannot draw: the sampler says why
        engine.truncate(position() - 1);
        engine.evaluate(std::span(&history.back(), 1), logits);
        ahead.clear();
        looked_at = 0;
      }
      const Clock::time_point sample_start = Clock::now();
      token = sampler.sample(logits, history, static_cast<std::uint64_t>(position()));
      statistics.sample_seconds += seconds_since(sample_start);
    }
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
    if (position() >= engine.context()) {
      result.reason = StopReason::context_full;
      break;
    }
    if (!follow) {
      engine.evaluate(std::span(&token, 1), logits);
    } else if (looked_at == ahead.size()) {  // and so this token is not in the cache yet
      std::size_t most = static_cast<std::size_t>(engine.context() - position());
      if (options.limit >= 0)
        most = std::min(most, static_cast<std::size_t>(options.limit) - result.tokens.size());
      ahead.resize(std::min(most, at_once));
      looked_at = 0;
      const Clock::time_point start = Clock::now();
      engine.follow(token, ahead);
      if (seconds_since(start) < kUnnoticed) at_once = std::min(2 * at_once, kMostAtOnce);
    }
    history.push_back(token);
    ++result.evaluated;
    ++statistics.decode_steps;
  }
  statistics.decode_seconds = seconds_since(decode_start);
  if (engine.position() > position()) engine.truncate(position());
  output.finish();
  return result;
}

}  // namespace ladder::qwen
