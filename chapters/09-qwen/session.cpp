#include "chapters/09-qwen/session.hpp"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include "chapters/09-qwen/interrupt.hpp"
#include "chapters/09-qwen/progress.hpp"
#include "kernels/dispatch/tables.hpp"

namespace ladder::qwen {
namespace {

/// Of a prompt or a text in bytes: so that an endless one, such as /dev/zero, is refused before it fills the memory.
constexpr std::size_t kMostText = std::size_t{256} << 20;

/// "ID+BIAS" or "ID-BIAS", BIAS a number or "inf".
std::pair<Token, float> parse_bias(const std::string& text, int vocabulary) {
  const std::size_t sign = text.find_first_of("+-");
  Token token = 0;
  const char* const begin = text.data();
  const char* const middle = begin + std::min(sign, text.size());
  const auto [end, error] = std::from_chars(begin, middle, token);
  char* rest = nullptr;
  const double bias = sign == std::string::npos ? 0 : std::strtod(middle, &rest);
  if (sign == std::string::npos || error != std::errc() || end != middle || rest == middle || *rest != '\0' ||
      std::isnan(bias) || bias == std::numeric_limits<double>::infinity()) {
    throw CommandError("--logit-bias: '" + text + "' is not ID+BIAS or ID-BIAS, such as 42+1.5 or 42-inf");
  }
  if (token < 0 || token >= vocabulary) {
    throw CommandError("--logit-bias: there is no token " + std::to_string(token) + "; allowed are 0 to " +
                       std::to_string(vocabulary - 1));
  }
  return {token, static_cast<float>(bias)};
}

const std::string& readable(const std::string& path) {
  require_readable(path, "model");
  return path;
}

}  // namespace

void require_readable(const std::string& path, const char* what) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error))
    throw CommandError(std::string(what) + ": " + path + " is a folder");
  const std::ifstream file(path, std::ios::binary);
  if (!file) throw CommandError(std::string(what) + ": cannot open " + path + ": " + std::strerror(errno));
}

void require_writable(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::absolute(path).parent_path();
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error))
    throw CommandError("OUT: there is no folder " + folder.string());
  if (std::filesystem::is_directory(path, error)) throw CommandError("OUT: " + path + " is a folder");
}

std::string read_whole(const std::string& path, const char* what) {
  if (path != "-") require_readable(path, what);
  std::ifstream file;
  if (path != "-") file.open(path, std::ios::binary);
  std::istream& in = path == "-" ? std::cin : file;
  std::string text;
  std::vector<char> part(1 << 16);
  while (in.read(part.data(), static_cast<std::streamsize>(part.size())), in.gcount() > 0) {
    text.append(part.data(), static_cast<std::size_t>(in.gcount()));
    if (text.size() > kMostText) {
      throw CommandError(std::string(what) + ": " + path + " has more than " +
                         std::to_string(kMostText >> 20) + " MiB, the most that a text may have");
    }
  }
  if (in.bad()) throw std::runtime_error(std::string(what) + ": reading " + path + " failed");
  return text;
}

std::string valid_utf8(std::string_view bytes) {
  Utf8Stream stream;
  std::string text = stream.push(bytes);
  return text + stream.flush();
}

std::string json_array(std::span<const Token> tokens) {
  std::string out = "[";
  for (const Token t : tokens) out += (out.size() > 1 ? ", " : "") + std::to_string(t);
  return out + "]";
}

std::string json_array(std::span<const double> numbers) {
  std::string out = "[";
  for (const double v : numbers) {
    char text[40];
    std::snprintf(text, sizeof text, "%.9g", v);
    out += (out.size() > 1 ? ", " : "") + std::string(text);
  }
  return out + "]";
}

void print(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    if (errno == EPIPE) throw OutputClosed();
    throw std::runtime_error(std::string("writing to stdout failed: ") + std::strerror(errno));
  }
}

Session::Session(const std::string& path) : file(readable(path)), model(file), tokenizer(file) {}

dispatch::Switches environment_switches() {
  dispatch::Switches switches;
  if (Status ok = dispatch::read_switches(std::getenv, &switches); !ok.ok()) throw CommandError(ok.message());
  return switches;
}

dispatch::Table gates_for(const dispatch::Switches& switches, const DeviceInfo& device) {
  dispatch::Table table;
  if (Status ok = dispatch::choose_table(switches.gates, device.slug, dispatch::gates_files(), &table);
      !ok.ok()) {
    throw CommandError(ok.message());
  }
  return table;
}

std::vector<Token> Session::padding() const {
  std::vector<Token> padding;
  for (Token t = 0; t < model.hp.vocabulary; ++t) {
    if (t >= tokenizer.size() || tokenizer.type(t) == TokenType::unused) padding.push_back(t);
  }
  return padding;
}

std::string to_text(const LoadTime& time) {
  char text[96];
  int n = std::snprintf(text, sizeof text, "%.2f GB in %.2f s", static_cast<double>(time.bytes) / 1e9,
                        time.seconds);
  if (time.gbps > 0)
    std::snprintf(text + n, sizeof text - static_cast<std::size_t>(n), " (%.1f GB/s)", time.gbps);
  return text;
}

std::unique_ptr<Engine> load_engine(const Session& session, const LoadOptions& options, bool on_device,
                                    LoadTime* time) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  Clock::time_point first{}, last{};
  std::uint64_t first_bytes = 0, bytes = 0;
  EngineOptions engine;
  engine.context = options.context;
  engine.kv_f16 = options.cache_type == "f16";
  engine.threads = options.threads;
  engine.batch = options.batch;
  engine.exact = options.exact;
  engine.switches = environment_switches();
  if (on_device) engine.gates = gates_for(engine.switches, build_device());
  ProgressBar bar("loading " + session.model.name);
  engine.on_progress = [&](std::uint64_t done, std::uint64_t total) {
    Interrupt::check();
    bar.update(done, total);
    last = Clock::now();
    bytes = done;
    if (first_bytes == 0) first = last, first_bytes = done;
  };
  try {
    std::unique_ptr<Engine> made =
        on_device ? make_device_engine(session.model, engine) : make_cpu_engine(session.model, engine);
    if (time != nullptr) {
      const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
      const double copying = seconds(last - first);
      *time = {bytes, seconds(Clock::now() - begin),
               on_device && copying > 0 ? static_cast<double>(bytes - first_bytes) / copying / 1e9 : 0.0};
    }
    return made;
  } catch (const std::invalid_argument& e) {
    throw CommandError(e.what());  // an option that does not suit the model
  }
}

SamplerOptions sampler_options(const SamplingOptions& options, const Session& session) {
  SamplerOptions sampler = options.sampler;
  sampler.seed = options.seed >= 0 ? static_cast<std::uint64_t>(options.seed) : std::random_device{}();
  for (const std::string& text : options.logit_bias) {
    sampler.logit_bias.push_back(parse_bias(text, session.model.hp.vocabulary));
  }
  sampler.banned = session.padding();
  if (options.ignore_eos) {
    for (Token t = 0; t < std::min(session.tokenizer.size(), session.model.hp.vocabulary); ++t) {
      if (session.tokenizer.ends_generation(t)) sampler.banned.push_back(t);
    }
  }
  try {
    (void)Sampler(sampler, session.model.hp.vocabulary);
  } catch (const std::invalid_argument& e) {
    throw CommandError(e.what());
  }
  return sampler;
}

}  // namespace ladder::qwen
