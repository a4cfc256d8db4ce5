// Speed of a whole model by llama-bench's conventions: pp (prompt processing) and tg (text generation) tests.
// Conventions: https://github.com/ggml-org/llama.cpp/tree/master/tools/llama-bench
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chapters/09-qwen/engine.hpp"
#include "harness/experiment/json.hpp"

namespace ladder::qwen {

/// One test: `prompt` tokens at once, then `generate` tokens one by one, after `depth` tokens that are not
/// timed.
struct BenchTest {
  int prompt = 0, generate = 0, depth = 0;
  /// "pp512", "tg128", "pp512+tg128", with `at` and the depth behind it: " @ d4096" or "@d4096".
  [[nodiscard]] std::string name(std::string_view at = " @ ") const;
  [[nodiscard]] int tokens() const { return prompt + generate; }
  bool operator==(const BenchTest&) const = default;
};

/// A list of whole numbers as llama-bench takes it: "1,2", "1-4", "1-9+2", "1-64*2", and any of these between
/// commas. Throws std::invalid_argument for another form, or a number outside [least, most].
[[nodiscard]] std::vector<int> parse_list(std::string_view text, int least, int most);

struct MeanAndDeviation {
  double mean = 0, deviation = 0;  ///< sample standard deviation (n - 1); 0 for one sample
};
[[nodiscard]] MeanAndDeviation mean_and_deviation(std::span<const double> samples);

/// Samples of one test, one a repetition.
struct BenchResult {
  BenchTest test;
  std::string time;  ///< when it began, ISO 8601
  std::vector<double> samples_ns;
  std::vector<double> roof_gbps;  ///< read roofs taken in turns with the samples; empty: none was measured
  [[nodiscard]] std::vector<double> rates() const;  ///< tokens/s
};

/// Runs one test: one untimed warm-up, then `repetitions` timed ones, each from a cache that holds `depth`
/// tokens. Tokens are random; nothing is tokenized or sampled.
/// @param roof called before each repetition, the read roof in GB/s now; may be empty
/// @param interrupted asked between evaluations; true ends the test, whose result has fewer samples then
[[nodiscard]] BenchResult run_bench(Engine& engine, int vocabulary, const BenchTest& test, int repetitions,
                                    int batch, bool warm_up, const std::function<double()>& roof,
                                    const std::function<bool()>& interrupted);

/// Everything a line of a report says of where it was measured.
struct BenchSetting {
  std::string file, model;            ///< path; "qwen2 0.5B Q4_0"
  std::string size_label, file_type;  ///< "0.5B", "Q4_0"
  std::int64_t model_bytes = 0, parameters = 0, bytes_per_token = 0;
  std::string executor, device, device_slug, kernels;
  int threads = 0, batch = 0;
  int kernels_per_token = 0;  ///< launches of a decoded token; 0: none, or not known
  std::string cache_type;
  double given_roof_gbps = 0;  ///< of --roof; 0: none
};

/// The read roof in GB/s that a result is placed under: the median of those measured with it, else the given
/// one, else 0.
[[nodiscard]] double roof_of(const BenchSetting& setting, const BenchResult& result);
/// GB/s of weights that pure generation read; 0 for tests with a prompt part, whose rows share the weights.
[[nodiscard]] double achieved_gbps(const BenchSetting& setting, const BenchResult& result);

/// Writes results in one form as they come.
class BenchReport {
 public:
  /// @param format "md", "csv", "json", "jsonl" or "record"; @param write gets text for stdout
  BenchReport(std::string format, std::function<void(std::string_view)> write);
  void add(const BenchSetting& setting, const BenchResult& result);
  void finish();

 private:
  std::string format_;
  std::function<void(std::string_view)> write_;
  bool first_ = true;
};

/// The read roof of the device of the build (engine_device.cu): a function that reads a buffer larger than any cache
/// and says how many GB/s that were. Throws DeviceError if the device returns a wrong sum.
[[nodiscard]] std::function<double()> make_device_read_probe();

/// One line of data/runs: a record of rung "engine".
[[nodiscard]] std::string bench_record(const BenchSetting& setting, const BenchResult& result);

}  // namespace ladder::qwen
