// The generation loop: read the prompt, then draw, print and feed back one token after another.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chapters/09-qwen/engine.hpp"
#include "chapters/09-qwen/sampler.hpp"
#include "chapters/09-qwen/tokenizer.hpp"

namespace ladder::qwen {

struct GenerateOptions {
  int limit = -1;  ///< most tokens to draw; 0: only read the prompt; negative: until the context is full
  bool ignore_eos = false;         ///< end-of-generation tokens do not end it
  bool special = false;            ///< control tokens appear in the text
  std::vector<std::string> stops;  ///< the text ends before the first of these
  int batch = 512;                 ///< tokens of the prompt between two looks at `interrupted`
  /// Gets the text in pieces of whole characters as it comes; may be empty.
  std::function<void(std::string_view)> on_text;
  /// Asked between two evaluations; may be empty.
  std::function<bool()> interrupted;
};

enum class StopReason { limit, end_of_generation, stop_string, context_full, interrupted };
/// "limit", "end_of_generation", "stop_string", "context_full" or "interrupted".
[[nodiscard]] const char* to_string(StopReason reason);

struct Statistics {
  int prompt_tokens = 0;  ///< evaluated
  double prompt_seconds = 0;
  int decode_steps = 0;       ///< evaluations of one drawn token: the first token comes out of the prompt's
  double decode_seconds = 0;  ///< of drawing and evaluating
  double sample_seconds = 0;  ///< of drawing alone
  [[nodiscard]] double prompt_rate() const { return prompt_seconds > 0 ? prompt_tokens / prompt_seconds : 0; }
  [[nodiscard]] double decode_rate() const { return decode_seconds > 0 ? decode_steps / decode_seconds : 0; }
};

struct Generation {
  std::string text;           ///< whole UTF-8; what on_text got, concatenated
  std::vector<Token> tokens;  ///< drawn, without the end-of-generation token that ended it
  StopReason reason = StopReason::limit;
  Statistics statistics;
  /// Of `tokens`, how many are in the KV cache. The last one drawn is usually not: nothing was to follow it.
  std::size_t evaluated = 0;
};

/// Continues from what is in the engine's cache.
/// @param history the tokens in the cache; grows by the prompt and the drawn tokens that were evaluated
/// @param prompt at least one token
/// When the prompt is interrupted the reason says so and the cache is as before.
/// Throws std::invalid_argument for an empty prompt, ContextFull when it does not fit (nothing is then
/// changed), NotANumber for logits that are none.
[[nodiscard]] Generation generate(Engine& engine, const Tokenizer& tokenizer, Sampler& sampler,
                                  int vocabulary, std::vector<Token>& history, std::span<const Token> prompt,
                                  const GenerateOptions& options);

}  // namespace ladder::qwen
