// `qwen run`: a prompt and its continuation.
#include <unistd.h>

#include <cstdio>

#include "chapters/09-qwen/chat.hpp"
#include "chapters/09-qwen/commands.hpp"
#include "chapters/09-qwen/generate.hpp"
#include "chapters/09-qwen/handover.hpp"
#include "chapters/09-qwen/interrupt.hpp"
#include "chapters/09-qwen/session.hpp"
#include "harness/experiment/json.hpp"

namespace ladder::qwen {
namespace {

/// From the argument, -f, or stdin. Of a file or stdin one newline at the end is dropped, since editors and
/// echo add it and it would change what a model expects next.
std::string prompt_text(const RunOptions& options) {
  if (options.prompt_given && options.prompt != "-") return options.prompt;
  std::string text;
  if (!options.file.empty()) {
    text = read_whole(options.file, "-f");
  } else if (options.prompt_given || ::isatty(STDIN_FILENO) == 0) {
    text = read_whole("-", "prompt");
  } else {
    throw CommandError("no prompt: give it as an argument, with -f FILE, or on stdin");
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

std::vector<Token> prompt_tokens(const RunOptions& options, const std::string& text, const Session& session) {
  if (options.chat) {
    const ChatFormat format(session.file, session.tokenizer, options.chat_template);
    std::vector<Message> messages;
    if (options.system_given) messages.push_back({"system", options.system});
    messages.push_back({"user", text});
    return format.prompt(messages);
  }
  bool changed = false;
  std::vector<Token> tokens =
      session.tokenizer.encode(text, {.special = options.parse_special, .nfc = options.nfc}, &changed);
  if (changed) std::fprintf(stderr, "note: the prompt was normalised to NFC (--no-nfc leaves it as it is)\n");
  if (session.tokenizer.bos() >= 0) tokens.insert(tokens.begin(), session.tokenizer.bos());
  if (tokens.empty()) {
    // Qwen2 has no token that opens a text, but in training this one stood between any two documents.
    const Token start = session.tokenizer.find("<|endoftext|>");
    if (start < 0) {
      throw CommandError(
          "the prompt is empty, and this vocabulary has no <|endoftext|> to begin a text with");
    }
    tokens.push_back(start);
  }
  return tokens;
}

std::string json_report(const RunOptions& options, const std::string& text, const Session& session,
                        const EngineInfo& engine, const LoadTime& load, std::uint64_t seed,
                        std::span<const Token> prompt, const Generation& generation) {
  const Statistics& s = generation.statistics;
  JsonObject timings;
  timings.add("load_bytes", load.bytes).add("load_seconds", load.seconds);
  if (load.gbps > 0) timings.add("load_gbps", load.gbps);
  timings.add("prompt_tokens", s.prompt_tokens)
      .add("prompt_seconds", s.prompt_seconds)
      .add("prompt_tokens_per_s", s.prompt_rate())
      .add("generated_tokens", generation.tokens.size())
      .add("decode_steps", s.decode_steps)
      .add("decode_seconds", s.decode_seconds)
      .add("decode_tokens_per_s", s.decode_rate())
      .add("sample_seconds", s.sample_seconds);
  return JsonObject()
      .add("model", valid_utf8(session.model.name))
      .add("file", valid_utf8(options.load.model))
      .add("executor", engine.executor)
      .add("device", engine.device)
      .add("prompt", valid_utf8(text))
      .raw("prompt_tokens", json_array(prompt))
      .add("text", generation.text)
      .raw("tokens", json_array(std::span<const Token>(generation.tokens)))
      .add("stop", to_string(generation.reason))
      .add("seed", seed)
      .add("timings", timings)
      .str();
}

}  // namespace

int run_command(const RunOptions& options) {
  require_readable(options.load.model, "model");
  const bool on_device = choose_device(options.load.on);
  const std::string text = prompt_text(options);
  const Interrupt interrupt;
  const Session session(options.load.model);
  const std::vector<Token> prompt = prompt_tokens(options, text, session);
  const SamplerOptions sampling = sampler_options(options.sampling, session);
  Sampler sampler(sampling, session.model.hp.vocabulary);
  LoadTime load_time;
  const std::unique_ptr<Engine> engine = load_engine(session, options.load, on_device, &load_time);

  bool line_open = false;
  const auto show = [&line_open](std::string_view piece) {
    if (piece.empty()) return;
    print(piece);
    line_open = piece.back() != '\n';
  };
  const bool stream = !options.json;
  if (stream && options.display_prompt && !options.chat) show(text);

  GenerateOptions generate_options;
  generate_options.limit = options.limit;
  generate_options.ignore_eos = options.sampling.ignore_eos;
  generate_options.special = options.special;
  generate_options.stops = options.stops;
  generate_options.batch = options.load.batch;
  if (stream) generate_options.on_text = show;
  generate_options.interrupted = [&interrupt] { return interrupt.requested(); };
  std::vector<Token> history;
  Generation generation;
  try {
    generation = generate(*engine, session.tokenizer, sampler, session.model.hp.vocabulary, history, prompt,
                          generate_options);
  } catch (...) {
    if (line_open) print("\n");
    throw;
  }
  if (line_open) print("\n");
  if (options.json) {
    print(json_report(options, text, session, engine->info(), load_time, sampling.seed, prompt, generation) +
          "\n");
  }
  if (options.report && !options.json) {
    const Statistics& s = generation.statistics;
    std::fprintf(stderr, "loaded: %s\n", to_text(load_time).c_str());
    std::fprintf(stderr,
                 "prompt: %d tokens in %.2f s (%.1f tok/s); decode: %d tokens in %.2f s (%.1f tok/s)\n",
                 s.prompt_tokens, s.prompt_seconds, s.prompt_rate(), s.decode_steps, s.decode_seconds,
                 s.decode_rate());
    std::fprintf(stderr, "stopped: %s; on %s: %s; %s; seed %llu\n", to_string(generation.reason),
                 engine->info().executor.c_str(), engine->info().device.c_str(),
                 engine->info().kernels.c_str(), static_cast<unsigned long long>(sampling.seed));
  }
  return generation.reason == StopReason::interrupted ? kInterruptedStatus : 0;
}

}  // namespace ladder::qwen
