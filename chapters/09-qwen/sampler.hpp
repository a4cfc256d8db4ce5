// From logits to a token.
//
// Order and defaults are llama.cpp's: logit bias, penalties, top-k, top-p, min-p, temperature, draw.
// Probabilities of top-p and min-p are therefore those at temperature 1. Wherever candidates are ordered, it
// is by logit, largest first, and by id, lowest first, among equal logits: a result depends on nothing but
// the arguments.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "chapters/09-qwen/tokenizer.hpp"
#include "kernels/elementwise/philox.hpp"
#include "kernels/elementwise/sample_options.hpp"

namespace ladder::qwen {

struct SamplerOptions {
  /// <= 0: greedy, the lowest id on ties, and top-k, top-p and min-p do not matter. Else logits are divided
  /// by it.
  float temperature = 0.8f;
  int top_k = 40;  ///< keep the k largest logits; <= 0: off
  /// Keep the shortest beginning of the order with this probability, at least one; >= 1: off.
  float top_p = 0.95f;
  float min_p = 0.05f;  ///< keep those at least this probable relative to the most probable; <= 0: off
  // A token that stands c > 0 times among the last ones:
  //   l = l <= 0 ? l * repeat : l / repeat;  l -= c * frequency + presence.
  float repeat_penalty = 1.0f;  ///< > 0; 1: off
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  int penalty_last_n = 64;                          ///< tokens that penalties look back over; -1: all
  std::uint64_t seed = 0;                           ///< a (seed, position) pair always draws the same
  std::vector<std::pair<Token, float>> logit_bias;  ///< added to logits; -infinity bans
  std::vector<Token> banned;                        ///< never drawn (padding rows of the vocabulary)
};

/// Logits that nothing can be drawn from.
class NotANumber : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A draw as the device makes it: the same for every position.
struct Drawing {
  std::vector<float> bias;  ///< [vocabulary] added to logits, none of it NaN or +infinity; empty for none
  std::optional<SampleOptions> sample;  ///< nothing: the largest logit, the lowest id of equals
};

class Sampler {
 public:
  /// Throws std::invalid_argument, naming the option and what is allowed.
  Sampler(SamplerOptions options, int vocabulary);
  /// @param logits [vocabulary]; not changed
  /// @param history all tokens so far, prompt and output: for the penalties
  /// @param position of the token to be drawn: counter of the generator
  /// Throws NotANumber if a logit is NaN or +infinity, or all are -infinity, and std::invalid_argument for
  /// logits or a history that do not fit the vocabulary. After an error the sampler is as it was.
  [[nodiscard]] Token sample(std::span<const float> logits, std::span<const Token> history,
                             std::uint64_t position);
  /// What a draw comes down to where it depends on nothing but the logits and the position: what an engine needs to draw
  /// the same. Nothing where it depends on more, or on more candidates than a device keeps: then penalties, no top-k, one of
  /// more than kSampleMostK, or two biases for a token were asked for.
  [[nodiscard]] std::optional<Drawing> drawing() const;

 private:
  using Candidate = std::pair<float, Token>;  // logit, id
  [[nodiscard]] bool draws_largest() const { return options_.temperature <= 0 || options_.top_k == 1; }
  [[nodiscard]] bool has_penalties() const {
    return options_.repeat_penalty != 1 || options_.presence_penalty != 0 || options_.frequency_penalty != 0;
  }
  void collect_history(std::span<const Token> history);
  [[nodiscard]] std::span<const float> adjusted(std::span<const float> logits);
  void keep_top_k(std::span<const float> logits);
  void keep_top_p();
  void keep_min_p();
  [[nodiscard]] Token draw(std::uint64_t position) const;

  SamplerOptions options_;
  int vocabulary_;
  std::vector<float> adjusted_;  // logits after bias and penalties, if there are any
  std::vector<int> counts_;      // of each token among the last ones; all 0 between calls
  std::vector<Token> seen_;      // tokens with a count
  std::vector<Candidate> candidates_;
};

}  // namespace ladder::qwen
