// `qwen perplexity`: the score of a model on a text.
#include <algorithm>
#include <cstdio>

#include "chapters/09-qwen/commands.hpp"
#include "chapters/09-qwen/handover.hpp"
#include "chapters/09-qwen/interrupt.hpp"
#include "chapters/09-qwen/perplexity.hpp"
#include "chapters/09-qwen/progress.hpp"
#include "chapters/09-qwen/session.hpp"
#include "harness/device/cpu_info.hpp"
#include "harness/experiment/json.hpp"

namespace ladder::qwen {

int perplexity_command(const PerplexityOptions& options) {
  require_readable(options.load.model, "model");
  if (options.file != "-") require_readable(options.file, "text");
  const bool on_device = choose_device(options.load.on);
  const Session session(options.load.model);
  const std::vector<Token> tokens = session.tokenizer.encode(
      read_whole(options.file, "text"), {.special = options.parse_special, .nfc = options.nfc});
  LoadOptions load = options.load;
  constexpr int kWindow = 512;
  if (load.context == 0) load.context = std::min(kWindow, session.model.hp.context_length);
  if (tokens.size() < static_cast<std::size_t>(load.context)) {
    throw CommandError("the text has " + std::to_string(tokens.size()) +
                       " tokens, fewer than one window of " + std::to_string(load.context) +
                       "; -c sets a smaller one");
  }
  const Interrupt interrupt;
  const std::unique_ptr<Engine> engine = load_engine(session, load, on_device);
  Perplexity result;
  {
    ProgressBar bar("perplexity");
    result =
        measure_perplexity(*engine, session.model.hp.vocabulary, tokens, load.context, options.chunks,
                           load.batch, [&](int done, int total, const Perplexity&) {
                             bar.update(static_cast<std::uint64_t>(done), static_cast<std::uint64_t>(total));
                             return !interrupt.requested();
                           });
  }
  Interrupt::check();
  if (options.json) {
    print(JsonObject()
              .add("model", valid_utf8(session.model.name))
              .add("file_type", session.model.file_type)
              .add("file", valid_utf8(options.load.model))
              .add("text", valid_utf8(options.file))
              .add("executor", engine->info().executor)
              .add("device", on_device ? slugify(engine->info().device) : cpu_info().slug)
              .add("perplexity", result.perplexity)
              .add("standard_error", result.standard_error)
              .add("mean_nll", result.mean_nll)
              .add("window", result.window)
              .add("stride", result.window)
              .add("windows", result.windows)
              .add("text_tokens", tokens.size())
              .add("counted_tokens", result.counted)
              .str() +
          "\n");
    return 0;
  }
  char line[256];
  std::snprintf(line, sizeof line, "perplexity %.4f +- %.4f\n", result.perplexity, result.standard_error);
  print(line);
  std::snprintf(
      line, sizeof line,
      "%d windows of %d tokens, stride %d; counted: the %lld tokens of their second halves, of %zu\n",
      result.windows, result.window, result.window, result.counted, tokens.size());
  print(line);
  return 0;
}

}  // namespace ladder::qwen
