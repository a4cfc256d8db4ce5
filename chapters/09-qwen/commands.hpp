// What `qwen` can do: one function a command, with its options as plain values. main.cpp's command line fills
// them.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "chapters/09-qwen/sampler.hpp"

namespace ladder::qwen {

/// A mistake of the person at the keyboard: one line on stderr, exit status 2. Any other exception is status
/// 1.
class CommandError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// How a model is loaded and where it runs.
struct LoadOptions {
  std::string model;        ///< path of a GGUF file, or of the first part of a split one
  std::string on = "auto";  ///< "auto", "gpu", "emulator" or "cpu"
  int context = 0;          ///< tokens; 0: the engine's default
  int threads = 0;
  int batch = 512;
  std::string cache_type = "f16";  ///< "f16" or "f32"
  bool exact = false;              ///< EngineOptions::exact
};

struct SamplingOptions {
  SamplerOptions sampler;
  std::int64_t seed = -1;               ///< -1: another one each time
  std::vector<std::string> logit_bias;  ///< "ID+BIAS", "ID-BIAS", "ID-inf"
  bool ignore_eos = false;
};

struct RunOptions {
  LoadOptions load;
  SamplingOptions sampling;
  std::string prompt;         ///< "-": stdin
  bool prompt_given = false;  ///< false: from `file`, or from stdin where that is no terminal
  std::string file;
  int limit = -1;
  std::vector<std::string> stops;
  bool special = false, parse_special = false, nfc = true;
  bool display_prompt = true, json = false, report = true;
  bool chat = false;
  std::string system, chat_template;
  bool system_given = false;
};
int run_command(const RunOptions& options);

struct ChatOptions {
  LoadOptions load;
  SamplingOptions sampling;
  int limit = -1;  ///< tokens of one answer
  std::vector<std::string> stops;
  bool nfc = true, report = false;
  std::string system, chat_template;
  bool system_given = false;
};
int chat_command(const ChatOptions& options);

struct PerplexityOptions {
  LoadOptions load;
  std::string file;  ///< "-": stdin
  int chunks = -1;
  bool nfc = true, parse_special = false, json = false;
};
int perplexity_command(const PerplexityOptions& options);

struct LogitsOptions {
  LoadOptions load;
  std::string tokens;           ///< ids, "1,2,3"
  std::string rows;             ///< increasing places in `tokens`; empty: the last
  std::string format = "json";  ///< "json", or "bin": f32 [rows][vocabulary] little-endian
};
int logits_command(const LogitsOptions& options);

struct QuantizeOptions {
  std::string in, out, type;
  int threads = 0;
};
int quantize_command(const QuantizeOptions& options);

struct TokenizeOptions {
  std::string model;
  std::vector<std::string> text;  ///< none or "-": stdin
  bool decode = false, json = false, ids = false;
  bool parse_special = false, nfc = true;
};
int tokenize_command(const TokenizeOptions& options);

struct ExplainOptions {
  std::string model;
  std::vector<std::string> bandwidths;  ///< "NAME=GBPS"
  int context = 0;                      ///< tokens in the KV cache that a step also reads
  std::string device;            ///< slug; empty: the GPU of this machine, else what the emulator models
  std::string gates;             ///< as LADDER_GATES; empty: what that says
  std::string rows = "1,8,512";  ///< numbers of token rows, a list
  bool exact = false, reasons = false, show_gates = false;
  bool json = false;
};
int explain_command(const ExplainOptions& options);

struct BenchOptions {
  std::vector<std::string> models;
  LoadOptions load;  ///< all but the path, context and threads
  std::vector<std::string> prompts, generations, pairs, depths,
      threads;  ///< lists as llama-bench writes them
  int repetitions = 5;
  std::string format = "md";
  bool warm_up = true, progress = false;
  double roof_gbps = 0;  ///< 0: measured in turns with the tests, on any executor
};
int bench_command(const BenchOptions& options);

struct SyntheticOptions {
  std::string size, type, out;
  std::string layer_types;  ///< "q4_0,q6_k": a type for each layer; empty: the size's layers, by `type`
  std::string vocabulary;   ///< a GGUF file whose tokenizer is copied; empty: a made-up one
  std::uint64_t seed = 0;
  int threads = 0;
  bool untied = false;
};
int synthetic_command(const SyntheticOptions& options);

/// Parses the command line and runs a command. Returns the process's exit status: 0, 1 (it failed), 2 (it was
/// called wrongly), 130 (Ctrl-C), 141 (nobody reads stdout).
int command_line(int argc, char** argv);

}  // namespace ladder::qwen
