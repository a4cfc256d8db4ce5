// How well a model predicts a text.
#pragma once

#include <functional>
#include <span>

#include "chapters/09-qwen/engine.hpp"
#include "chapters/09-qwen/tokenizer.hpp"

namespace ladder::qwen {

struct Perplexity {
  int windows = 0;
  int window = 0;             ///< tokens of one
  long long counted = 0;      ///< tokens whose prediction counts
  double mean_nll = 0;        ///< natural logarithm
  double perplexity = 0;      ///< exp(mean_nll)
  double standard_error = 0;  ///< of perplexity, from the spread of the tokens' nll; 0 for one token
};

/// The negative logarithm of the probability that softmax(logits) gives to `token`, in f64. NaN if a logit is
/// NaN.
[[nodiscard]] double negative_log_likelihood(std::span<const float> logits, Token token);

/// llama.cpp's method: the text is cut into windows of `window` tokens that do not overlap (what is left at
/// the end is dropped), each is evaluated from an empty cache, and the tokens of its second half, from
/// window/2 + 1 on, are counted: each has at least window/2 tokens before it.
/// @param tokens of the whole text, at least one window
/// @param windows at most this many; negative: all
/// @param batch most rows of one evaluation
/// @param on_window after each: windows done, windows in all, the result so far; returns false to stop there
/// Throws std::invalid_argument for a window below 4, above the context or longer than the text; NotANumber
/// when a logit is NaN.
[[nodiscard]] Perplexity measure_perplexity(
    Engine& engine, int vocabulary, std::span<const Token> tokens, int window, int windows, int batch,
    const std::function<bool(int, int, const Perplexity&)>& on_window);

}  // namespace ladder::qwen
