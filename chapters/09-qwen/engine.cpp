// What every engine checks before it does anything.
#include "chapters/09-qwen/engine.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace ladder::qwen {
namespace {

constexpr int kDefaultMostContext = 4096;  // tokens, where nothing else is asked for

}  // namespace

EngineOptions completed(EngineOptions options, const Hyperparameters& hp) {
  const auto refuse = [](const char* what, int value) {
    throw std::invalid_argument(std::string(what) + ", not " + std::to_string(value));
  };
  if (options.context < 0) refuse("context must be at least 1 token", options.context);
  if (options.batch < 1) refuse("batch must be at least 1 row", options.batch);
  if (options.threads < 0) refuse("threads must be at least 0", options.threads);
  if (options.context == 0) options.context = std::min(hp.context_length, kDefaultMostContext);
  options.batch = std::min(options.batch, options.context);
  return options;
}

std::string what_would_fit(std::uint64_t available, std::uint64_t fixed, std::uint64_t token) {
  if (available >= fixed + token) return "; -c " + std::to_string((available - fixed) / token) + " would fit";
  return "; with any context it would have to be " + std::to_string(fixed + token - available) +
         " bytes smaller: quantized to a type of fewer bits (qwen quantize), or a smaller model";
}

namespace {

void check_token(const char* function, std::int32_t id, int vocabulary) {
  if (id >= 0 && id < vocabulary) return;
  throw std::invalid_argument(std::string(function) + ": token " + std::to_string(id) +
                              " is outside the vocabulary, 0 to " + std::to_string(vocabulary - 1));
}

void check_room(const Engine& engine, std::size_t tokens) {
  if (tokens <= static_cast<std::size_t>(engine.context() - engine.position())) return;
  throw ContextFull("the context is full: " + std::to_string(engine.position()) + " of " +
                    std::to_string(engine.context()) + " tokens are taken, and " + std::to_string(tokens) +
                    " more do not fit");
}

}  // namespace

void check_evaluate(const Engine& engine, int vocabulary, std::span<const std::int32_t> tokens,
                    std::size_t logits) {
  if (tokens.empty()) throw std::invalid_argument("evaluate: no tokens");
  for (const std::int32_t id : tokens) check_token("evaluate", id, vocabulary);
  const auto row = static_cast<std::size_t>(vocabulary);
  if (logits != 0 && logits != row && logits != tokens.size() * row) {
    throw std::invalid_argument("evaluate: room for " + std::to_string(logits) + " logits, expected 0, " +
                                std::to_string(row) + " or " + std::to_string(tokens.size() * row));
  }
  check_room(engine, tokens.size());
}

void check_follow(const Engine& engine, int vocabulary, std::int32_t token, std::size_t steps) {
  if (steps == 0) throw std::invalid_argument("follow: no room for a token");
  check_token("follow", token, vocabulary);
  check_room(engine, steps);
}

void check_truncate(const Engine& engine, int position) {
  if (position < 0 || position > engine.position()) {
    throw std::invalid_argument("truncate: position must be 0 to " + std::to_string(engine.position()) +
                                ", not " + std::to_string(position));
  }
}

}  // namespace ladder::qwen
