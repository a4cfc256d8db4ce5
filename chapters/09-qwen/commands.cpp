// The command line. Options are llama.cpp's where it has them; `qwen --help` is the documentation.
#include "chapters/09-qwen/commands.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <functional>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <vector>

#include "chapters/09-qwen/interrupt.hpp"
#include "chapters/09-qwen/session.hpp"
#include "chapters/09-qwen/version.hpp"
#include "kernels/dispatch/switches.hpp"

namespace ladder::qwen {
namespace {

std::string footer() {
  return "`qwen COMMAND --help` lists the options of a command.\n"
         "Exit status: 0 done, 1 failed, 2 called wrongly, 130 ended by Ctrl-C, 141 nobody reads the "
         "output.\n"
         "Environment, read once:\n" +
         dispatch::switches_help() +
         "  LADDER_EMULATOR_DEVICE=SLUG   the device whose limits the emulator enforces (a file of "
         "data/devices)\n"
         "  LADDER_EMULATOR_MEMORY=BYTES  free memory of that device; LADDER_EMULATOR_LAUNCHES=N: it is lost "
         "after so many";
}

/// llama.cpp has options of several letters behind one dash, which are a bundle of one-letter options to most
/// parsers.
std::vector<std::string> with_long_names(int argc, char** argv) {
  struct Name {
    const char *short_name, *long_name;
  };
  constexpr Name kNames[] = {{"-ctk", "--cache-type-k"},
                             {"-ctv", "--cache-type-v"},
                             {"-sys", "--system"},
                             {"-ub", "--ubatch-size"},
                             {"-pg", "--pg"}};
  std::vector<std::string> words;
  bool options = true;
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    if (word == "--") options = false;
    for (const Name& name : kNames) {
      if (options && word == name.short_name) word = name.long_name;
    }
    words.push_back(std::move(word));
  }
  return words;
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

/// Options with what may stand for their values: "-n,--n-predict N (-1)", "--on auto|gpu|cpu|emulator
/// (auto)".
class Formatter : public CLI::Formatter {
 public:
  Formatter() { column_width(38); }
  std::string make_option_opts(const CLI::Option* option) const override {
    if (option->get_type_size() == 0) return "";
    const std::string type = option->get_type_name();
    std::string text;
    if (const std::size_t brace = type.find('{'); brace != std::string::npos) {
      text = type.substr(brace + 1, type.find('}') - brace - 1);
      std::replace(text.begin(), text.end(), ',', '|');
    } else if (!option->get_positional()) {
      const std::string kind = type.substr(0, type.find(':'));
      text = kind == "INT" || kind == "UINT" ? "N" : kind == "FLOAT" ? "X" : kind;
    }
    if (!text.empty()) text = " " + text;
    if (!option->get_default_str().empty()) text += " (" + option->get_default_str() + ")";
    return text;
  }
};

class CommandLine {
 public:
  CommandLine()
      : app_("Runs Qwen2 and Qwen2.5 models from GGUF files with the kernels of this workbook.", "qwen") {
    app_.set_version_flag("--version", std::string("qwen ") + build_version() + " (" + build_commit() + ")");
    app_.require_subcommand(1);
    app_.footer(footer());
    app_.formatter(std::make_shared<Formatter>());
    add_run();
    add_chat();
    add_perplexity();
    add_logits();
    add_bench();
    add_explain();
    add_tokenize();
    add_quantize();
    add_synthetic();
  }

  int run(std::vector<std::string> words) {
    if (words.empty() || !words[0].starts_with('-')) {
      std::string known;
      bool found = false;
      for (const CLI::App* sub : app_.get_subcommands({})) {
        known += (known.empty() ? "" : ", ") + sub->get_name();
        found = found || (!words.empty() && words[0] == sub->get_name());
      }
      if (words.empty()) throw CommandError("a command is needed: " + known + "; see qwen --help");
      if (!found) throw CommandError("there is no command '" + words[0] + "'; there are " + known);
    }
    std::reverse(words.begin(), words.end());  // as CLI11 wants them
    try {
      app_.parse(words);
    } catch (const CLI::ParseError& e) {
      if (e.get_exit_code() == 0) {  // --help and --version
        std::ostringstream text;
        app_.exit(e, text, text);
        print(text.str());
        return 0;
      }
      const std::vector<CLI::App*> chosen = app_.get_subcommands();
      const std::string command = chosen.empty() ? "" : " " + chosen[0]->get_name();
      throw CommandError(one_line(e.what()) + "; see qwen" + command + " --help");
    }
    return action_();
  }

 private:
  CLI::App* command(const char* name, const char* description, std::function<int()> action) {
    CLI::App* sub = app_.add_subcommand(name, description);
    sub->footer("");
    sub->callback([this, action = std::move(action)] { action_ = action; });
    return sub;
  }

  static void add_load(CLI::App* sub, LoadOptions& load, bool with_context = true) {
    sub->add_option("--on", load.on,
                    "where it runs: auto (the GPU if there is one, else the CPU), gpu, cpu, emulator")
        ->check(CLI::IsMember({"auto", "gpu", "cpu", "emulator"}))
        ->capture_default_str();
    if (with_context) {
      sub->add_option("-c,--ctx-size", load.context,
                      "tokens that the KV cache holds; 0: the model's, at most 4096")
          ->check(CLI::Range(0, 1 << 24))
          ->capture_default_str();
      sub->add_option("-t,--threads", load.threads, "CPU threads; 0: one for each CPU")
          ->check(CLI::Range(0, 4096))
          ->capture_default_str();
    }
    sub->add_option("-b,--batch-size,--ubatch-size", load.batch, "most tokens of a prompt evaluated at once")
        ->check(CLI::Range(1, 1 << 16))
        ->capture_default_str();
    sub->add_option("--cache-type-k,--cache-type-v", load.cache_type,
                    "type of the KV cache, f16 or f32 (also -ctk, -ctv; keys and values have the same)")
        ->check(CLI::IsMember({"f16", "f32"}))
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
        ->capture_default_str();
    sub->add_flag("--exact", load.exact,
                  "multiply with activations as they are (f32), not rounded to int8; slower");
  }

  static void add_sampling(CLI::App* sub, SamplingOptions& sampling) {
    const std::string group = "Sampling";
    SamplerOptions& s = sampling.sampler;
    const auto add = [&](const char* names, auto& value, const char* help) {
      return sub->add_option(names, value, help)->group(group)->capture_default_str();
    };
    add("-s,--seed", sampling.seed, "-1: another one each time")
        ->check(CLI::Range(std::int64_t{-1}, INT64_MAX));
    add("--temp,--temperature", s.temperature, "0: always the likeliest token");
    add("--top-k", s.top_k, "keep the K likeliest tokens; 0: off");
    add("--top-p", s.top_p, "keep the likeliest tokens of this probability together; 1: off");
    add("--min-p", s.min_p, "keep tokens at least this likely relative to the likeliest; 0: off");
    add("--repeat-penalty", s.repeat_penalty, "divides the logits of recent tokens; 1: off");
    add("--repeat-last-n", s.penalty_last_n, "recent means this many tokens; -1: all");
    add("--presence-penalty", s.presence_penalty, "subtracted once from the logits of recent tokens");
    add("--frequency-penalty", s.frequency_penalty, "subtracted for each occurrence");
    sub->add_option("-l,--logit-bias", sampling.logit_bias, "ID+BIAS, ID-BIAS or ID-inf; may be repeated")
        ->group(group)
        ->expected(1)
        ->take_all();
    sub->add_flag("--ignore-eos", sampling.ignore_eos,
                  "never end by itself: end-of-generation tokens are not drawn")
        ->group(group);
    sub->footer(
        "A GPU draws tokens itself, several between two looks at them, unless a penalty is asked for, or\n"
        "a --top-k of 0 or above " +
        std::to_string(kSampleMostK) + " (which --temp 0 ignores): then the CPU draws each from all logits.");
  }

  static void add_nfc(CLI::App* sub, bool& nfc) {
    sub->add_flag_callback(
        "--no-nfc", [&nfc] { nfc = false; }, "leave the text as it is, instead of normalising it to NFC");
  }

  static std::string not_empty(const std::string& text) { return text.empty() ? "it must not be empty" : ""; }

  static void add_stops(CLI::App* sub, std::vector<std::string>& stops) {
    sub->add_option("-r,--reverse-prompt,--stop", stops, "end before this text; may be repeated")
        ->expected(1)
        ->check(not_empty)
        ->type_name("TEXT")
        ->take_all();
  }

  void add_run() {
    CLI::App* sub = command("run", "print a prompt and its continuation", [this] {
      run_.prompt_given = prompt_->count() > 0;
      run_.system_given = run_system_->count() > 0;
      if (run_.system_given && !run_.chat) throw CommandError("--system needs --chat");
      return run_command(run_);
    });
    sub->add_option("MODEL", run_.load.model, "GGUF file, or the first part of a split one")->required();
    prompt_ = sub->add_option(
        "PROMPT", run_.prompt,
        "the text to continue; - or none: stdin. An empty one begins with <|endoftext|>, which "
        "stands between texts in training");
    sub->add_option("-f,--file", run_.file, "read the prompt from a file (a newline at its end is dropped)")
        ->excludes(prompt_);
    sub->add_option("-n,--n-predict", run_.limit, "most tokens to draw; -1: until the context is full")
        ->check(CLI::Range(-1, 1 << 30))
        ->capture_default_str();
    add_stops(sub, run_.stops);
    sub->add_flag("--chat", run_.chat,
                  "the prompt is a user's message: format it as a conversation of one turn");
    run_system_ = sub->add_option("--system", run_.system, "system message of --chat (also -sys)");
    sub->add_option("--template", run_.chat_template, "chatml: use ChatML whatever the file's template is")
        ->check(CLI::IsMember({"chatml"}));
    sub->add_flag("--special", run_.special, "print control tokens");
    sub->add_flag("--parse-special", run_.parse_special,
                  "recognise control tokens such as <|im_start|> in the prompt");
    add_nfc(sub, run_.nfc);
    sub->add_flag_callback(
        "--no-display-prompt", [this] { run_.display_prompt = false; }, "print the continuation alone");
    sub->add_flag_callback(
        "--no-perf", [this] { run_.report = false; }, "no timings on stderr");
    sub->add_flag("--json", run_.json, "one JSON object: text, tokens, why it ended, timings");
    add_load(sub, run_.load);
    add_sampling(sub, run_.sampling);
  }

  void add_chat() {
    CLI::App* sub =
        command("chat", "hold a conversation (lines of stdin; /help there lists its commands)", [this] {
          chat_.system_given = chat_system_->count() > 0;
          return chat_command(chat_);
        });
    sub->add_option("MODEL", chat_.load.model, "GGUF file of a model trained to converse (Instruct)")
        ->required();
    chat_system_ =
        sub->add_option("--system", chat_.system, "system message (also -sys); default: the model's own");
    sub->add_option("--template", chat_.chat_template, "chatml: use ChatML whatever the file's template is")
        ->check(CLI::IsMember({"chatml"}));
    sub->add_option("-n,--n-predict", chat_.limit, "most tokens of an answer; -1: until the context is full")
        ->check(CLI::Range(-1, 1 << 30))
        ->capture_default_str();
    add_stops(sub, chat_.stops);
    sub->add_flag("--perf", chat_.report, "timings on stderr after each answer");
    add_load(sub, chat_.load);
    add_sampling(sub, chat_.sampling);
  }

  void add_perplexity() {
    CLI::App* sub =
        command("perplexity",
                "how well a model predicts a text: exp of the mean negative log likelihood of the tokens in "
                "the second half of each window",
                [this] { return perplexity_command(perplexity_); });
    sub->add_option("MODEL", perplexity_.load.model, "GGUF file")->required();
    sub->add_option("FILE", perplexity_.file, "the text; - is stdin")->required();
    sub->add_option("--chunks", perplexity_.chunks, "windows to evaluate; -1: all")
        ->check(CLI::Range(-1, 1 << 30))
        ->capture_default_str();
    sub->add_flag("--parse-special", perplexity_.parse_special, "recognise control tokens in the text");
    add_nfc(sub, perplexity_.nfc);
    sub->add_flag("--json", perplexity_.json, "one JSON object");
    add_load(sub, perplexity_.load);
    sub->get_option("-c")->description(
        "tokens of a window; windows do not overlap; 0: 512, or the model's context");
  }

  void add_logits() {
    CLI::App* sub = command("logits", "the logits after given tokens, to compare engines by",
                            [this] { return logits_command(logits_); });
    sub->add_option("MODEL", logits_.load.model, "GGUF file")->required();
    sub->add_option("--tokens", logits_.tokens, "ids, as in 1,2,3 (qwen tokenize finds them)")->required();
    sub->add_option(
        "--rows", logits_.rows,
        "the logits after which of them, as in 0,2: places from 0, increasing; default: the last");
    sub->add_option("-o,--output", logits_.format, "json, or bin: f32 [rows][vocabulary], little-endian")
        ->check(CLI::IsMember({"json", "bin"}))
        ->capture_default_str();
    add_load(sub, logits_.load);
  }

  void add_bench() {
    CLI::App* sub = command("bench", "tokens a second, by llama-bench's conventions",
                            [this] { return bench_command(bench_); });
    sub->add_option("MODEL,-m,--model", bench_.models, "GGUF files")->required();
    const auto list = [&](const char* names, std::vector<std::string>& to, const char* help) {
      sub->add_option(names, to, help)->expected(1)->take_all();
    };
    list("-p,--n-prompt", bench_.prompts, "prompt tokens of the pp tests; 0: none (default 512)");
    list("-n,--n-gen", bench_.generations, "generated tokens of the tg tests; 0: none (default 128)");
    list("--pg", bench_.pairs, "PP,TG: a prompt and a generation in one test (also -pg)");
    list("-d,--n-depth", bench_.depths, "tokens in the KV cache before the test (default 0)");
    list("-t,--threads", bench_.threads, "CPU threads (default: one for each CPU)");
    sub->add_option("-r,--repetitions", bench_.repetitions, "timed runs of each test")
        ->check(CLI::Range(1, 100000))
        ->capture_default_str();
    sub->add_option("-o,--output", bench_.format, "md, csv, json, jsonl, or record (lines for data/runs)")
        ->check(CLI::IsMember({"md", "csv", "json", "jsonl", "record"}))
        ->capture_default_str();
    sub->add_option("--roof", bench_.roof_gbps,
                    "read bandwidth in GB/s for % of roof (default: measured in turns with the tests)")
        ->check(CLI::Range(0.001, 1e6))
        ->check(
            [](const std::string& text) { return std::isnan(std::stod(text)) ? "it must be a number" : ""; });
    sub->add_flag_callback(
        "--no-warmup", [this] { bench_.warm_up = false; }, "no untimed run first");
    sub->add_flag("--progress", bench_.progress, "say on stderr which test runs");
    add_load(sub, bench_.load, /*with_context=*/false);
    sub->footer("Numbers may be lists: 128,512 or 1-8 or 1-9+2 or 1-64*2, and options may be repeated.");
  }

  void add_explain() {
    CLI::App* sub = command(
        "explain",
        "what a file holds, how fast each device could decode it at best, and which kernel multiplies what",
        [this] { return explain_command(explain_); });
    sub->add_option("MODEL", explain_.model, "GGUF file; its headers are enough")->required();
    sub->add_option("--bandwidth", explain_.bandwidths, "NAME=GBPS: a device more; may be repeated")
        ->expected(1)
        ->take_all();
    sub->add_option("-c,--ctx-size", explain_.context, "tokens in the KV cache, which a step reads too")
        ->check(CLI::Range(0, 1 << 24))
        ->capture_default_str();
    sub->add_option(
        "--device", explain_.device,
        "slug of the GPU that kernels are chosen for (default: this machine's, else the emulator's)");
    sub->add_option("--gates", explain_.gates,
                    "table of gates: default, seed, or a file (default: the device's)");
    sub->add_option("--nt", explain_.rows, "numbers of token rows to choose kernels for")
        ->capture_default_str();
    sub->add_flag("--exact", explain_.exact, "as run --exact would multiply");
    sub->add_flag("--reasons", explain_.reasons, "say why the gates before did not decide");
    sub->add_flag("--show-gates", explain_.show_gates, "print the table of gates too");
    sub->add_flag("--json", explain_.json, "one JSON object");
  }

  void add_tokenize() {
    CLI::App* sub = command("tokenize", "text to token ids and pieces, or back",
                            [this] { return tokenize_command(tokenize_); });
    sub->add_option("MODEL", tokenize_.model, "GGUF file; its headers are enough")->required();
    sub->add_option("TEXT", tokenize_.text, "the text, or ids for --decode; - or none: stdin");
    sub->add_flag("--decode", tokenize_.decode, "ids to text");
    CLI::Option* ids = sub->add_flag("--ids", tokenize_.ids, "print the ids alone, on one line");
    sub->add_flag("--json", tokenize_.json, "one JSON object")->excludes(ids);
    sub->add_flag("--parse-special", tokenize_.parse_special, "recognise control tokens in the text");
    add_nfc(sub, tokenize_.nfc);
  }

  void add_quantize() {
    CLI::App* sub = command("quantize", "write a file with its matrices in another type",
                            [this] { return quantize_command(quantize_); });
    sub->add_option("IN", quantize_.in, "GGUF file, best of F16, BF16 or F32")->required();
    sub->add_option("OUT", quantize_.out, "GGUF file to write")->required();
    sub->add_option("TYPE", quantize_.type, "Q4_0, Q4_K_M, Q8_0, ...; a wrong one lists them all")
        ->required();
    sub->add_option("-t,--threads", quantize_.threads, "0: one for each CPU")
        ->check(CLI::Range(0, 4096))
        ->capture_default_str();
  }

  void add_synthetic() {
    CLI::App* sub = command("synthetic", "write a model of any size with random weights, for measurements",
                            [this] { return synthetic_command(synthetic_); });
    sub->add_option("SIZE", synthetic_.size, "0.5b, 1.5b, 3b, 7b, 14b, 32b, 72b or tales")->required();
    sub->add_option("TYPE", synthetic_.type, "as in quantize")->required();
    sub->add_option("OUT", synthetic_.out, "GGUF file to write")->required();
    sub->add_option("--vocabulary", synthetic_.vocabulary,
                    "GGUF file whose tokenizer it gets; default: a made-up one");
    sub->add_option(
           "--layer-types", synthetic_.layer_types,
           "types of the layers, as in q4_0,q6_k: a model of so many layers; default: all layers, by TYPE")
        ->check(not_empty);
    sub->add_flag("--untied", synthetic_.untied,
                  "an output matrix of its own, as the official files up to 3b have");
    sub->add_option("-s,--seed", synthetic_.seed, "of the weights")->capture_default_str();
    sub->add_option("-t,--threads", synthetic_.threads, "0: one for each CPU")
        ->check(CLI::Range(0, 4096))
        ->capture_default_str();
  }

  CLI::App app_;
  std::function<int()> action_;
  RunOptions run_;
  ChatOptions chat_;
  PerplexityOptions perplexity_;
  LogitsOptions logits_;
  BenchOptions bench_;
  ExplainOptions explain_;
  TokenizeOptions tokenize_;
  QuantizeOptions quantize_;
  SyntheticOptions synthetic_;
  CLI::Option *prompt_ = nullptr, *run_system_ = nullptr, *chat_system_ = nullptr;
};

}  // namespace

int command_line(int argc, char** argv) {
  // Whoever reads our output may go (head, a pager), a file may become too large. Then writing fails, and destructors run.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    return CommandLine().run(with_long_names(argc, argv));
  } catch (const CommandError& e) {
    std::fprintf(stderr, "qwen: %s\n", one_line(e.what()).c_str());
    return 2;
  } catch (const Interrupted& e) {
    std::fprintf(stderr, "qwen: %s\n", e.what());
    return kInterruptedStatus;
  } catch (const OutputClosed&) {
    return kOutputClosedStatus;  // nobody is there to be told
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "qwen: there is not enough memory\n");
    return 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "qwen: %s\n", one_line(e.what()).c_str());
    return 1;
  }
}

}  // namespace ladder::qwen
