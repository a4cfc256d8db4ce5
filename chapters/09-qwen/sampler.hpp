// From logits to a token.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "chapters/09-qwen/tokenizer.hpp"

namespace ladder::qwen {

/// Order: logit bias, penalties, top-k, top-p, min-p, temperature, draw (llama.cpp's; its defaults).
struct SamplerOptions {
  float temperature = 0.8f;  ///< <= 0: greedy, the lowest id on ties
  int top_k = 40;            ///< <= 0: off
  float top_p = 0.95f;       ///< >= 1: off
  float min_p = 0.05f;       ///< <= 0: off
  float repeat_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  int penalty_last_n = 64;   ///< tokens that penalties look back over; -1: all
  std::uint64_t seed = 0;    ///< a (seed, position) pair always draws the same
  std::vector<std::pair<Token, float>> logit_bias;
  std::vector<Token> banned; ///< never drawn (padding rows of the vocabulary)
};

class NotANumber : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Sampler {
 public:
  /// Throws std::invalid_argument, naming the option and what is allowed.
  Sampler(SamplerOptions options, int vocabulary);
  /// @param logits [vocabulary]; not changed
  /// @param history all tokens so far, prompt and output: for the penalties
  /// @param position of the token to be drawn: counter of the generator
  /// Throws NotANumber if a logit is NaN (or all are -infinity).
  [[nodiscard]] Token sample(std::span<const float> logits, std::span<const Token> history, std::uint64_t position);

 private:
  SamplerOptions options_;
  std::vector<std::pair<float, Token>> candidates_;
};

}  // namespace ladder::qwen
