#include "chapters/09-qwen/bench.hpp"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <random>
#include <stdexcept>
#include <utility>

#include "chapters/09-qwen/tokenizer.hpp"
#include "chapters/09-qwen/version.hpp"

namespace ladder::qwen {
namespace {

using Clock = std::chrono::steady_clock;

double ns_since(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

std::string format(const char* form, double value) {
  char text[64];
  std::snprintf(text, sizeof text, form, value);
  return text;
}

/// "346.21 MiB", "4.36 GiB"
std::string size_text(std::int64_t bytes) {
  const auto b = static_cast<double>(bytes);
  return b < 1024.0 * 1024 * 1024 ? format("%.2f MiB", b / 1024 / 1024)
                                  : format("%.2f GiB", b / 1024 / 1024 / 1024);
}

/// "630.17 M", "7.62 B"
std::string count_text(std::int64_t n) {
  const auto v = static_cast<double>(n);
  return v < 1e9 ? format("%.2f M", v / 1e6) : format("%.2f B", v / 1e9);
}

std::string backend(const std::string& executor) {
  if (executor == "gpu") return "CUDA";
  return executor == "cpu" ? "CPU" : executor;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

int parse_number(std::string_view text, std::string_view whole, int least, int most) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > most) {
    std::string message = whole.empty() ? "nothing" : std::string(whole);
    message += " is not a list such as 128, 128,512, 1-8, 1-9+2 or 1-64*2 of whole numbers from ";
    throw std::invalid_argument(message + std::to_string(least) + " to " + std::to_string(most));
  }
  return value;
}

/// A field of the csv, json and jsonl reports: its name, its value as JSON, and whether that is a string.
struct Field {
  std::string name, value;
  bool text = false;
};

/// llama-bench's fields in its order, then ours. What does not apply has an empty value.
std::vector<Field> fields_of(const BenchSetting& s, const BenchResult& r) {
  const std::vector<double> rates = r.rates();
  const MeanAndDeviation ns = mean_and_deviation(r.samples_ns), rate = mean_and_deviation(rates);
  const double gbps = achieved_gbps(s, r), roof = roof_of(s, r);
  const auto whole = [](double v) { return std::to_string(std::llround(v)); };
  const auto known = [](double v, const char* form = "%.6f") {
    return v > 0 ? format(form, v) : std::string();
  };
  const bool gpu = s.executor == "gpu";
  return {
      {"build_commit", build_commit(), true},
      {"build_version", build_version(), true},
      {"cpu_info", gpu ? "" : s.device, true},
      {"gpu_info", gpu ? s.device : "", true},
      {"backends", backend(s.executor), true},
      {"model_filename", s.file, true},
      {"model_type", s.model, true},
      {"model_size", std::to_string(s.model_bytes)},
      {"model_n_params", std::to_string(s.parameters)},
      {"n_batch", std::to_string(s.batch)},
      {"n_ubatch", std::to_string(s.batch)},
      {"n_threads", gpu ? "" : std::to_string(s.threads)},
      {"type_k", s.cache_type, true},
      {"type_v", s.cache_type, true},
      {"n_gpu_layers", gpu ? "99" : "0"},
      {"n_prompt", std::to_string(r.test.prompt)},
      {"n_gen", std::to_string(r.test.generate)},
      {"n_depth", std::to_string(r.test.depth)},
      {"test_time", r.time, true},
      {"avg_ns", whole(ns.mean)},
      {"stddev_ns", whole(ns.deviation)},
      {"avg_ts", format("%.6f", rate.mean)},
      {"stddev_ts", format("%.6f", rate.deviation)},
      {"bytes_per_token", r.test.prompt == 0 ? std::to_string(s.bytes_per_token) : ""},
      {"gbps", known(gbps)},
      {"roof_gbps", known(roof)},
      {"percent_of_roof", gbps > 0 && roof > 0 ? format("%.3f", 100 * gbps / roof) : ""},
      {"kernels_per_token",
       r.test.prompt == 0 && s.kernels_per_token > 0 ? std::to_string(s.kernels_per_token) : ""},
      {"kernels", s.kernels, true},
  };
}

std::string number_array(std::span<const double> values, const char* form) {
  std::string out = "[";
  for (const double v : values) out += (out.size() > 1 ? ", " : "") + format(form, v);
  return out + "]";
}

std::string json_object(const BenchSetting& s, const BenchResult& r) {
  JsonObject o;
  for (const Field& f : fields_of(s, r)) {
    if (f.value.empty()) continue;
    o.raw(f.name, f.text ? json_quote(f.value) : f.value);
  }
  return o.raw("samples_ns", number_array(r.samples_ns, "%.0f"))
      .raw("samples_ts", number_array(r.rates(), "%.6f"))
      .str();
}

std::string csv_line(const std::vector<Field>& fields, bool names) {
  std::string line;
  for (const Field& f : fields) {
    line += line.empty() ? "\"" : ",\"";
    for (const char c : names ? f.name : f.value) line += c == '"' ? std::string("\"\"") : std::string(1, c);
    line += '"';
  }
  return line + "\n";
}

/// Columns of the table: head, width, and whether it is aligned to the right.
struct Column {
  const char* head;
  int width;
  bool right;
};
constexpr Column kColumns[] = {
    {"model", 30, false}, {"size", 10, true},      {"params", 10, true},        {"backend", 10, false},
    {"threads", 7, true}, {"test", 15, true},      {"t/s", 20, true},           {"bytes/token", 12, true},
    {"GB/s", 8, true},    {"% of roof", 10, true}, {"kernels/token", 13, true},
};

/// Columns that a terminal shows for UTF-8 text of one-column characters.
int shown_width(std::string_view text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string table_row(const std::vector<std::string>& cells) {
  std::string line = "|";
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const Column& c = kColumns[i];
    const std::string pad(static_cast<std::size_t>(std::max(0, c.width - shown_width(cells[i]))), ' ');
    line += ' ';
    line += c.right ? pad + cells[i] : cells[i] + pad;
    line += " |";
  }
  return line + "\n";
}

std::string table_head() {
  std::vector<std::string> heads, rules;
  for (const Column& c : kColumns) {
    heads.emplace_back(c.head);
    rules.push_back(std::string(static_cast<std::size_t>(c.width - (c.right ? 1 : 0)), '-') +
                    (c.right ? ":" : ""));
  }
  return table_row(heads) + table_row(rules);
}

}  // namespace

std::string BenchTest::name(std::string_view at) const {
  std::string text;
  if (prompt > 0) text = "pp" + std::to_string(prompt);
  if (generate > 0) text += (text.empty() ? "tg" : "+tg") + std::to_string(generate);
  if (depth > 0) text += std::string(at) + "d" + std::to_string(depth);
  return text;
}

std::vector<int> parse_list(std::string_view text, int least, int most) {
  std::vector<int> values;
  std::string_view rest = text;
  while (true) {
    const std::string_view part = rest.substr(0, rest.find(','));
    const std::size_t dash = part.find('-', 1);
    if (dash == std::string_view::npos) {
      values.push_back(parse_number(part, text, least, most));
    } else {
      const std::size_t step_at = part.find_first_of("+*", dash);
      const int first = parse_number(part.substr(0, dash), text, least, most);
      const int last = parse_number(
          part.substr(dash + 1, step_at == std::string_view::npos ? step_at : step_at - dash - 1), text,
          least, most);
      const bool times = step_at != std::string_view::npos && part[step_at] == '*';
      const int step = step_at == std::string_view::npos
                           ? 1
                           : parse_number(part.substr(step_at + 1), text, times ? 2 : 1, most);
      if (times && first == 0) (void)parse_number("", text, least, most);  // 0 * step never grows
      for (long long v = first; v <= last; v = times ? v * step : v + step)
        values.push_back(static_cast<int>(v));
    }
    if (part.size() == rest.size()) return values;
    rest.remove_prefix(part.size() + 1);
  }
}

MeanAndDeviation mean_and_deviation(std::span<const double> samples) {
  if (samples.empty()) return {};
  MeanAndDeviation m;
  for (const double s : samples) m.mean += s;
  m.mean /= static_cast<double>(samples.size());
  if (samples.size() < 2) return m;
  double squares = 0;
  for (const double s : samples) squares += (s - m.mean) * (s - m.mean);
  m.deviation = std::sqrt(squares / static_cast<double>(samples.size() - 1));
  return m;
}

std::vector<double> BenchResult::rates() const {
  std::vector<double> all;
  for (const double ns : samples_ns) all.push_back(test.tokens() * 1e9 / ns);
  return all;
}

BenchResult run_bench(Engine& engine, int vocabulary, const BenchTest& test, int repetitions, int batch,
                      bool warm_up, const std::function<double()>& roof,
                      const std::function<bool()>& interrupted) {
  BenchResult result;
  result.test = test;
  result.time = utc_now();
  std::mt19937 random(1);
  std::uniform_int_distribution<Token> any(0, vocabulary - 1);
  const std::span<float> room = engine.logits_room();
  std::vector<float> own(room.empty() ? static_cast<std::size_t>(vocabulary) : 0);
  const std::span<float> logits = room.empty() ? std::span(own) : room;
  const auto stop = [&interrupted] { return interrupted && interrupted(); };
  const auto evaluate_many = [&](int count) {
    std::vector<Token> tokens(static_cast<std::size_t>(count));
    for (Token& t : tokens) t = any(random);
    const auto step = static_cast<std::size_t>(std::max(1, batch));
    for (std::size_t i = 0; i < tokens.size() && !stop(); i += step) {
      const std::size_t n = std::min(step, tokens.size() - i);
      engine.evaluate(std::span<const Token>(tokens).subspan(i, n),
                      i + n == tokens.size() ? logits : std::span<float>());
    }
  };
  constexpr int kAtOnce = 16;  // tokens that the engine draws before the host hears of them
  const bool follow = engine.can_follow({});
  const auto evaluate_singly = [&](int count) {
    std::vector<Token> drawn;
    for (int i = 0; follow && i < count && !stop(); i += kAtOnce) {
      drawn.resize(static_cast<std::size_t>(std::min(kAtOnce, count - i)));
      engine.follow(any(random), drawn);
    }
    for (int i = 0; !follow && i < count && !stop(); ++i) {
      const Token token = any(random);
      engine.evaluate(std::span(&token, 1), logits);
    }
  };

  engine.truncate(0);
  if (test.depth > 0) evaluate_many(test.depth);
  if (warm_up && !stop()) {
    if (test.prompt > 0) evaluate_many(test.prompt);
    if (test.generate > 0) evaluate_singly(1);
  }
  for (int r = 0; r < repetitions && !stop(); ++r) {
    engine.truncate(test.depth);
    const double roof_now = roof ? roof() : 0;
    const Clock::time_point start = Clock::now();
    if (test.prompt > 0) evaluate_many(test.prompt);
    if (test.generate > 0) evaluate_singly(test.generate);
    const double ns = ns_since(start);
    if (stop()) break;
    result.samples_ns.push_back(ns);
    if (roof) result.roof_gbps.push_back(roof_now);
  }
  return result;
}

double roof_of(const BenchSetting& setting, const BenchResult& result) {
  return result.roof_gbps.empty() ? setting.given_roof_gbps : median(result.roof_gbps);
}

double achieved_gbps(const BenchSetting& setting, const BenchResult& result) {
  if (result.test.prompt > 0) return 0;
  return static_cast<double>(setting.bytes_per_token) * mean_and_deviation(result.rates()).mean / 1e9;
}

std::string bench_record(const BenchSetting& setting, const BenchResult& result) {
  const std::vector<double> rates = result.rates();
  const MeanAndDeviation rate = mean_and_deviation(rates);
  const double gbps = achieved_gbps(setting, result), roof = roof_of(setting, result);
  JsonObject o;
  o.add("schema", 1)
      .add("rung", "engine")
      .add("executor", setting.executor)
      .add("device", setting.device_slug);
  o.add("model", JsonObject()
                     .add("size", setting.size_label)
                     .add("file_type", setting.file_type)
                     .add("bytes_per_token", setting.bytes_per_token));
  o.add("test", result.test.name("@"));
  JsonObject params;
  if (setting.executor == "cpu") params.add("threads", setting.threads);
  o.add("params", params.add("batch", setting.batch).add("cache_type", setting.cache_type));
  o.add("tokens_per_s", JsonObject()
                            .add("mean", rate.mean)
                            .add("stddev", rate.deviation)
                            .raw("samples", number_array(rates, "%.6g")));
  if (gbps > 0) {
    if (setting.kernels_per_token > 0) o.add("kernels_per_token", setting.kernels_per_token);
    o.add("gbps", gbps);
    if (roof > 0) {
      o.add("roof", JsonObject().add("bandwidth_gbps", roof).add("source", "measured"));
      o.add("percent_of_roof", 100 * gbps / roof).add("bound", "memory");
    }
  }
  return o.str();
}

BenchReport::BenchReport(std::string format, std::function<void(std::string_view)> write)
    : format_(std::move(format)), write_(std::move(write)) {}

void BenchReport::add(const BenchSetting& setting, const BenchResult& result) {
  if (format_ == "json") {
    write_((first_ ? "[\n  " : ",\n  ") + json_object(setting, result));
  } else if (format_ == "jsonl") {
    write_(json_object(setting, result) + "\n");
  } else if (format_ == "record") {
    write_(bench_record(setting, result) + "\n");
  } else if (format_ == "csv") {
    const std::vector<Field> fields = fields_of(setting, result);
    write_((first_ ? csv_line(fields, true) : std::string()) + csv_line(fields, false));
  } else {
    if (first_) write_(table_head());
    const MeanAndDeviation rate = mean_and_deviation(result.rates());
    const double gbps = achieved_gbps(setting, result), roof = roof_of(setting, result);
    write_(table_row(
        {setting.model, size_text(setting.model_bytes), count_text(setting.parameters),
         backend(setting.executor), setting.executor == "gpu" ? "-" : std::to_string(setting.threads),
         result.test.name(), format("%.2f", rate.mean) + " ± " + format("%.2f", rate.deviation),
         gbps > 0 ? std::to_string(setting.bytes_per_token) : "-", gbps > 0 ? format("%.2f", gbps) : "-",
         gbps > 0 && roof > 0 ? format("%.1f", 100 * gbps / roof) : "-",
         gbps > 0 && setting.kernels_per_token > 0 ? std::to_string(setting.kernels_per_token) : "-"}));
  }
  first_ = false;
}

void BenchReport::finish() {
  if (format_ == "json") write_(first_ ? "[]\n" : "\n]\n");
  if (format_ == "md" && !first_) {
    write_(std::string("\nbuild: ") + build_commit() + " (" + build_version() + ")\n");
  }
}

}  // namespace ladder::qwen
