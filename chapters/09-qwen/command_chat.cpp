// `qwen chat`: a conversation. The KV cache keeps it, so that each turn evaluates only what is new.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>

#include "chapters/09-qwen/chat.hpp"
#include "chapters/09-qwen/commands.hpp"
#include "chapters/09-qwen/generate.hpp"
#include "chapters/09-qwen/handover.hpp"
#include "chapters/09-qwen/interrupt.hpp"
#include "chapters/09-qwen/session.hpp"

namespace ladder::qwen {
namespace {

constexpr const char* kHelp =
    "  /clear  forget the conversation     /exit  end the program (so does the end of input)\n"
    "  /help   this                        a line that ends with \\ is continued on the next\n"
    "  Ctrl-C stops an answer; at the prompt it ends the program\n";

/// Lines of stdin, read so that Ctrl-C is noticed while waiting.
class Lines {
 public:
  explicit Lines(const Interrupt& interrupt) : interrupt_(interrupt) {}

  /// The next line without its newline; std::nullopt at the end of input or after Ctrl-C (interrupted()
  /// tells).
  std::optional<std::string> next() {
    while (true) {
      if (const std::size_t end = held_.find('\n'); end != std::string::npos) {
        std::string line = held_.substr(0, end);
        held_.erase(0, end + 1);
        if (line.ends_with('\r')) line.pop_back();
        return line;
      }
      if (ended_) {
        if (held_.empty()) return std::nullopt;
        return std::exchange(held_, {});
      }
      if (!interrupt_.wait_readable(STDIN_FILENO)) return std::nullopt;
      char buffer[4096];
      const ssize_t n = ::read(STDIN_FILENO, buffer, sizeof buffer);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) throw std::runtime_error(std::string("reading stdin failed: ") + std::strerror(errno));
      if (n == 0) ended_ = true;
      held_.append(buffer, static_cast<std::size_t>(n));
    }
  }

 private:
  const Interrupt& interrupt_;
  std::string held_;
  bool ended_ = false;
};

/// One conversation and what of it the cache holds.
class Conversation {
 public:
  Conversation(const ChatOptions& options, const Session& session, Engine& engine, const Interrupt& interrupt)
      : options_(options),
        session_(session),
        engine_(engine),
        format_(session.file, session.tokenizer, options.chat_template),
        sampler_(sampler_options(options.sampling, session), session.model.hp.vocabulary) {
    generate_options_.limit = options.limit;
    generate_options_.ignore_eos = options.sampling.ignore_eos;
    generate_options_.stops = options.stops;
    generate_options_.batch = options.load.batch;
    generate_options_.interrupted = [&interrupt] { return interrupt.requested(); };
  }

  /// Evaluates the user's words and prints the answer. Throws ContextFull when there is no room for them; the
  /// conversation is then as it was.
  Generation answer(const std::string& user) {
    std::vector<Token> tokens = pending_;
    if (history_.empty()) {
      std::vector<Message> messages;
      if (options_.system_given) messages.push_back({"system", options_.system});
      messages.push_back({"user", user});
      tokens = format_.prompt(messages);
    } else {
      const std::vector<Token> turn = format_.next_turn(user);
      tokens.insert(tokens.end(), turn.begin(), turn.end());
    }
    bool line_open = false;
    generate_options_.on_text = [&line_open](std::string_view piece) {
      print(piece);
      line_open = piece.back() != '\n';
    };
    const std::size_t before = history_.size();
    Generation generation;
    try {
      generation = generate(engine_, session_.tokenizer, sampler_, session_.model.hp.vocabulary, history_,
                            tokens, generate_options_);
    } catch (...) {
      if (line_open) print("\n");
      throw;
    }
    if (line_open || generation.text.empty()) print("\n");
    // Interrupted while the words were read: the conversation is as it was, and so is what it still has to
    // evaluate.
    if (history_.size() == before) return generation;
    pending_.assign(generation.tokens.begin() + static_cast<std::ptrdiff_t>(generation.evaluated),
                    generation.tokens.end());
    return generation;
  }

  void clear() {
    engine_.truncate(0);
    history_.clear();
    pending_.clear();
  }

 private:
  const ChatOptions& options_;
  const Session& session_;
  Engine& engine_;
  ChatFormat format_;
  Sampler sampler_;
  GenerateOptions generate_options_;
  std::vector<Token> history_;  ///< in the cache
  std::vector<Token> pending_;  ///< said, but not in the cache yet
};

/// "/word" alone on a line; other text that begins with a slash is meant for the model.
bool is_command(const std::string& line) {
  return line.size() > 1 && line[0] == '/' && line.find_first_of(" \t/", 1) == std::string::npos;
}

}  // namespace

int chat_command(const ChatOptions& options) {
  require_readable(options.load.model, "model");
  const bool on_device = choose_device(options.load.on);
  Interrupt interrupt;
  const Session session(options.load.model);
  const bool terminal = ::isatty(STDIN_FILENO) == 1;
  const std::unique_ptr<Engine> engine = load_engine(session, options.load, on_device);
  Conversation conversation(options, session, *engine, interrupt);
  Lines lines(interrupt);
  if (terminal) {
    std::fprintf(stderr, "%s on %s (%s), %d tokens of context; /help lists the commands\n",
                 session.model.name.c_str(), engine->info().executor.c_str(), engine->info().device.c_str(),
                 engine->context());
  }
  int status = 0;
  while (true) {
    if (terminal) print("> ");
    std::optional<std::string> line = lines.next();
    while (line && line->ends_with('\\')) {
      line->back() = '\n';
      if (terminal) print("  ");
      const std::optional<std::string> more = lines.next();
      if (!more) break;
      *line += *more;
    }
    if (interrupt.requested()) {
      if (terminal) print("\n");
      return kInterruptedStatus;
    }
    if (!line) {
      if (terminal) print("\n");
      return status;
    }
    if (line->find_first_not_of(" \t\n") == std::string::npos) continue;
    if (is_command(*line)) {
      if (*line == "/exit") return status;
      if (*line == "/clear") {
        conversation.clear();
        std::fprintf(stderr, "cleared\n");
      } else if (*line == "/help") {
        print(kHelp);
      } else {
        std::fprintf(stderr, "there is no command %s; /help lists them\n", line->c_str());
      }
      continue;
    }
    try {
      const Generation generation = conversation.answer(*line);
      if (generation.reason == StopReason::context_full) {
        std::fprintf(stderr,
                     "the context of %d tokens is full, and the answer was cut; /clear starts again\n",
                     engine->context());
        status = terminal ? 0 : 1;
      } else if (generation.reason == StopReason::interrupted) {
        std::fprintf(stderr, "(stopped)\n");
      }
      if (options.report) {
        const Statistics& s = generation.statistics;
        std::fprintf(stderr,
                     "(%d tokens read at %.1f tok/s, %d written at %.1f tok/s, %d of %d in the context)\n",
                     s.prompt_tokens, s.prompt_rate(), s.decode_steps, s.decode_rate(), engine->position(),
                     engine->context());
      }
    } catch (const ContextFull& e) {
      std::fprintf(stderr, "not answered: %s; /clear starts again\n", e.what());
      status = terminal ? 0 : 1;
    }
    interrupt.clear();
  }
}

}  // namespace ladder::qwen
