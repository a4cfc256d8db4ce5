// A model file opened for a command: the file, what it describes, its tokenizer; and an engine on request.
#pragma once

#include <csignal>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "chapters/09-qwen/commands.hpp"
#include "chapters/09-qwen/engine.hpp"
#include "chapters/09-qwen/gguf.hpp"
#include "chapters/09-qwen/model.hpp"
#include "chapters/09-qwen/tokenizer.hpp"
#include "harness/device/device_info.hpp"
#include "kernels/dispatch/dispatch.hpp"

namespace ladder::qwen {

/// Throws CommandError unless `path` is a file that can be read; `what` names the argument.
void require_readable(const std::string& path, const char* what);

/// Throws CommandError unless `path` can be the name of a file to write: its folder is there, and it is none
/// itself.
void require_writable(const std::string& path);

/// Reads all of a file, or of stdin for "-". Throws CommandError for a file that cannot be opened.
[[nodiscard]] std::string read_whole(const std::string& path, const char* what);

/// Text as JSON can hold it: bytes that are no UTF-8 become U+FFFD.
[[nodiscard]] std::string valid_utf8(std::string_view bytes);

/// [1, 2, 3]
[[nodiscard]] std::string json_array(std::span<const Token> tokens);
[[nodiscard]] std::string json_array(std::span<const double> numbers);

/// Nobody reads stdout any more.
class OutputClosed : public std::exception {};
inline constexpr int kOutputClosedStatus = 128 + SIGPIPE;
/// One line to stdout, or all of `text` as it is. Throws if it cannot be written (disk full): OutputClosed for a pipe
/// whose reader has gone.
void print(std::string_view text);

/// The switches of this process's environment. Throws CommandError for a value that a switch does not have.
[[nodiscard]] dispatch::Switches environment_switches();
/// The table of gates that the switches ask for. Throws CommandError for a file that is none.
[[nodiscard]] dispatch::Table gates_for(const dispatch::Switches& switches, const DeviceInfo& device);

/// Members point into each other, so it stays where it was made.
class Session {
 public:
  /// Throws CommandError for a path that is no file, gguf::FileError for what is wrong in it.
  explicit Session(const std::string& path);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const gguf::File file;
  const Model model;
  const Tokenizer tokenizer;

  /// Rows of the embedding that are no token, or an unused one: they must never be drawn.
  [[nodiscard]] std::vector<Token> padding() const;
};

/// How long a model took to load.
struct LoadTime {
  std::uint64_t bytes = 0;  ///< of weights
  double seconds = 0;       ///< all of it: the device's start, buffers, weights
  double gbps =
      0;  ///< while weights were brought to it, from the first to the last; 0 where nothing is copied
};
/// "4.68 GB in 1.10 s (6.2 GB/s)"
[[nodiscard]] std::string to_text(const LoadTime& time);

/// Loads the weights on the device or on the CPU (choose_device). @param time filled, unless it is null
[[nodiscard]] std::unique_ptr<Engine> load_engine(const Session& session, const LoadOptions& options,
                                                  bool on_device, LoadTime* time = nullptr);

/// Resolves what SamplingOptions leaves open (the seed, the biases, the tokens that are never drawn). Throws
/// CommandError, also for what Sampler would refuse.
[[nodiscard]] SamplerOptions sampler_options(const SamplingOptions& options, const Session& session);

}  // namespace ladder::qwen
