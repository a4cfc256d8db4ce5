// `qwen logits`: what the engine computes, before anything is drawn from it. For tests and for comparing engines.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "chapters/09-qwen/commands.hpp"
#include "chapters/09-qwen/handover.hpp"
#include "chapters/09-qwen/interrupt.hpp"
#include "chapters/09-qwen/sampler.hpp"
#include "chapters/09-qwen/session.hpp"
#include "harness/experiment/json.hpp"

namespace ladder::qwen {
namespace {

/// "1,2,3" as whole numbers from `low` to `high`. Throws CommandError, naming the option.
std::vector<std::int32_t> parse_numbers(const char* option, std::string_view text, int low, int high) {
  std::vector<std::int32_t> numbers;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view word = text.substr(begin, end - begin);
    std::int32_t number = 0;
    const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), number);
    if (error != std::errc() || stop != word.data() + word.size() || number < low || number > high) {
      throw CommandError(std::string(option) + ": '" + std::string(word) + "' is not a number from " +
                         std::to_string(low) + " to " + std::to_string(high));
    }
    numbers.push_back(number);
    begin = end + 1;
  }
  return numbers;
}

}  // namespace

int logits_command(const LogitsOptions& options) {
  require_readable(options.load.model, "model");
  const bool on_device = choose_device(options.load.on);
  const Session session(options.load.model);
  const int vocabulary = session.model.hp.vocabulary;
  const std::vector<Token> tokens = parse_numbers("--tokens", options.tokens, 0, vocabulary - 1);
  const int last = static_cast<int>(tokens.size()) - 1;
  std::vector<std::int32_t> rows = {last};
  if (!options.rows.empty()) rows = parse_numbers("--rows", options.rows, 0, last);
  if (!std::is_sorted(rows.begin(), rows.end()) ||
      std::adjacent_find(rows.begin(), rows.end()) != rows.end()) {
    throw CommandError("--rows: the numbers must increase");
  }
  const Interrupt interrupt;
  const std::unique_ptr<Engine> engine = load_engine(session, options.load, on_device);

  // An evaluation ends behind every wanted row, so that no more than the wanted logits are computed and held.
  std::vector<float> logits(rows.size() * static_cast<std::size_t>(vocabulary));
  int begin = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const std::span<float> row = std::span(logits).subspan(r * static_cast<std::size_t>(vocabulary),
                                                           static_cast<std::size_t>(vocabulary));
    while (begin <= rows[r]) {
      Interrupt::check();
      const int count = std::min(options.load.batch, rows[r] + 1 - begin);
      const std::span<const Token> piece =
          std::span(tokens).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count));
      begin += count;
      engine->evaluate(piece, begin > rows[r] ? row : std::span<float>());
    }
    if (!std::all_of(row.begin(), row.end(), [](float l) { return std::isfinite(l); })) {
      throw NotANumber("the logits of token " + std::to_string(rows[r]) + " are not all finite numbers");
    }
  }

  if (options.format == "bin") {
    print({reinterpret_cast<const char*>(logits.data()), logits.size() * sizeof(float)});
    return 0;
  }
  std::string all = "[";
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const auto first = logits.begin() + static_cast<std::ptrdiff_t>(r) * vocabulary;
    const std::vector<double> row(first, first + vocabulary);
    all += (r > 0 ? ", " : "") + json_array(std::span<const double>(row));
  }
  print(JsonObject()
            .add("model", valid_utf8(session.model.name))
            .add("file", valid_utf8(options.load.model))
            .add("executor", engine->info().executor)
            .add("kernels", engine->info().kernels)
            .raw("tokens", json_array(std::span<const Token>(tokens)))
            .raw("rows", json_array(std::span<const Token>(rows)))
            .raw("logits", all + "]")
            .str() +
        "\n");
  return 0;
}

}  // namespace ladder::qwen
