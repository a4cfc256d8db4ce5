#include "chapters/09-qwen/perplexity.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "chapters/09-qwen/sampler.hpp"

namespace ladder::qwen {

double negative_log_likelihood(std::span<const float> logits, Token token) {
  // nll = log(sum exp(l_i - max)) - (l_token - max)
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float l : logits) sum += std::exp(static_cast<double>(l) - largest);
  return std::log(sum) - (static_cast<double>(logits[static_cast<std::size_t>(token)]) - largest);
}

Perplexity measure_perplexity(Engine& engine, int vocabulary, std::span<const Token> tokens, int window,
                              int windows, int batch,
                              const std::function<bool(int, int, const Perplexity&)>& on_window) {
  if (window < 4 || window > engine.context()) {
    throw std::invalid_argument(
        "a window of " + std::to_string(window) + " tokens; allowed are 4 or more" +
        (window < 4 ? "" : ", up to " + std::to_string(engine.context()) + ", the context"));
  }
  const auto fit = static_cast<long long>(tokens.size()) / window;
  if (fit == 0) {
    throw std::invalid_argument("the text has " + std::to_string(tokens.size()) +
                                " tokens, fewer than one window of " + std::to_string(window) +
                                "; -c sets a smaller one");
  }
  Perplexity result;
  result.window = window;
  const auto total = static_cast<int>(windows < 0 ? fit : std::min<long long>(fit, windows));
  // Logits are 4 * vocabulary bytes a row: no more rows at once than fit in 64 MiB.
  const int rows_at_once =
      std::clamp(static_cast<int>((std::int64_t{64} << 20) / (4LL * vocabulary)), 1, std::max(1, batch));
  std::vector<float> logits(static_cast<std::size_t>(rows_at_once) * static_cast<std::size_t>(vocabulary));
  const int first = window / 2;  // the first row whose prediction counts
  double sum = 0, sum_of_squares = 0;
  for (int w = 0; w < total; ++w) {
    const std::span<const Token> part = tokens.subspan(
        static_cast<std::size_t>(w) * static_cast<std::size_t>(window), static_cast<std::size_t>(window));
    engine.truncate(0);
    for (int i = 0; i < first; i += batch) {
      engine.evaluate(
          part.subspan(static_cast<std::size_t>(i), static_cast<std::size_t>(std::min(batch, first - i))),
          {});
    }
    // Row i predicts token i + 1, so the last token is not needed as an input.
    for (int i = first; i < window - 1; i += rows_at_once) {
      const int rows = std::min(rows_at_once, window - 1 - i);
      const std::span<float> out =
          std::span(logits).first(static_cast<std::size_t>(rows) * static_cast<std::size_t>(vocabulary));
      engine.evaluate(part.subspan(static_cast<std::size_t>(i), static_cast<std::size_t>(rows)), out);
      for (int r = 0; r < rows; ++r) {
        const std::span<const float> row =
            out.subspan(static_cast<std::size_t>(r) * static_cast<std::size_t>(vocabulary),
                        static_cast<std::size_t>(vocabulary));
        const double nll = negative_log_likelihood(row, part[static_cast<std::size_t>(i + r + 1)]);
        if (std::isnan(nll)) {
          throw NotANumber("the logits of window " + std::to_string(w) + ", token " + std::to_string(i + r) +
                           " are not numbers");
        }
        sum += nll;
        sum_of_squares += nll * nll;
        ++result.counted;
      }
    }
    ++result.windows;
    const auto n = static_cast<double>(result.counted);
    result.mean_nll = sum / n;
    result.perplexity = std::exp(result.mean_nll);
    // exp'(x) = exp(x) carries the standard error of the mean over to the perplexity.
    const double variance = std::max(0.0, sum_of_squares / n - result.mean_nll * result.mean_nll);
    result.standard_error = n > 1 ? result.perplexity * std::sqrt(variance / (n - 1)) : 0;
    if (on_window && !on_window(result.windows, total, result)) break;
  }
  return result;
}

}  // namespace ladder::qwen
