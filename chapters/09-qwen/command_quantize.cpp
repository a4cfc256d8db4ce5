// `qwen quantize`: a file with its matrices in another type.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "chapters/09-qwen/commands.hpp"
#include "chapters/09-qwen/interrupt.hpp"
#include "chapters/09-qwen/quantize_model.hpp"
#include "chapters/09-qwen/session.hpp"
#include "kernels/cpu/thread_pool.hpp"

namespace ladder::qwen {
namespace {

namespace fs = std::filesystem;

/// Whether writing `out` would replace `in`, or another part of it: parts are called
/// <prefix>-00001-of-00003.gguf.
bool replaces(const fs::path& in, const fs::path& out, std::size_t parts) {
  std::error_code error;
  if (fs::equivalent(in, out, error) && !error) return true;
  if (parts < 2) return false;
  constexpr std::size_t kSuffix = std::string_view("-00001-of-00003.gguf").size();
  const std::string name = in.string();
  if (name.size() < kSuffix) return false;
  const std::string prefix = name.substr(0, name.size() - kSuffix);
  for (std::size_t i = 1; i <= parts; ++i) {
    char suffix[64];
    std::snprintf(suffix, sizeof suffix, "-%05zu-of-%05zu.gguf", i, parts);
    if (fs::equivalent(prefix + suffix, out, error) && !error) return true;
  }
  return false;
}

}  // namespace

int quantize_command(const QuantizeOptions& options) {
  const FileType* type = find_file_type(options.type);
  if (type == nullptr) {
    throw CommandError("there is no file type '" + options.type + "'; known: " + file_type_names());
  }
  require_readable(options.in, "IN");
  const gguf::File from(options.in);
  if (replaces(options.in, options.out, from.parts())) {
    throw CommandError("OUT: " + options.out + " is the file that is read; give another name");
  }
  require_writable(options.out);
  const Interrupt interrupt;
  const int threads = options.threads > 0 ? options.threads : cpu::available_cpus();
  const QuantizeReport report =
      quantize_model(from, options.out, *type, threads, ::isatty(STDERR_FILENO) == 1);
  for (const std::string& line : report.fallbacks) print("fallback: " + line + "\n");
  for (const std::string& line : report.requantized) print("quantized before: " + line + "\n");
  char line[160];
  std::snprintf(line, sizeof line, ": %.2f MB of tensors became %.2f MB (%.1f %%), %s\n",
                static_cast<double>(report.bytes_before) / 1e6, static_cast<double>(report.bytes_after) / 1e6,
                100.0 * static_cast<double>(report.bytes_after) /
                    static_cast<double>(std::max<std::uint64_t>(report.bytes_before, 1)),
                std::string(type->description).c_str());
  print(options.out + line);
  return 0;
}

}  // namespace ladder::qwen
