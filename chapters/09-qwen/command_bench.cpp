// `qwen bench`: tokens a second, and what share of the memory's speed that is.
#include <algorithm>
#include <cstdio>
#include <optional>

#include "chapters/09-qwen/bench.hpp"
#include "chapters/09-qwen/commands.hpp"
#include "chapters/09-qwen/handover.hpp"
#include "chapters/09-qwen/interrupt.hpp"
#include "chapters/09-qwen/session.hpp"
#include "harness/device/cpu_info.hpp"
#include "harness/experiment/cpu_read_probe.hpp"

namespace ladder::qwen {
namespace {

constexpr int kMostTokens = 1 << 24;

std::vector<int> numbers(const char* option, const std::vector<std::string>& texts,
                         std::vector<int> otherwise, int least, int most) {
  if (texts.empty()) return otherwise;
  std::vector<int> all;
  for (const std::string& text : texts) {
    try {
      const std::vector<int> part = parse_list(text, least, most);
      all.insert(all.end(), part.begin(), part.end());
    } catch (const std::invalid_argument& e) {
      throw CommandError(std::string(option) + ": " + e.what());
    }
  }
  return all;
}

/// All combinations: every depth with every test, prompts first, as llama-bench orders them.
std::vector<BenchTest> tests_of(const BenchOptions& options) {
  const bool pairs_only = !options.pairs.empty() && options.prompts.empty() && options.generations.empty();
  const std::vector<int> prompts =
      numbers("-p", options.prompts, pairs_only ? std::vector<int>{} : std::vector<int>{512}, 0, kMostTokens);
  const std::vector<int> generations = numbers(
      "-n", options.generations, pairs_only ? std::vector<int>{} : std::vector<int>{128}, 0, kMostTokens);
  std::vector<BenchTest> tests;
  for (const int depth : numbers("-d", options.depths, {0}, 0, kMostTokens)) {
    for (const int p : prompts) {
      if (p > 0) tests.push_back({p, 0, depth});
    }
    for (const int n : generations) {
      if (n > 0) tests.push_back({0, n, depth});
    }
    for (const std::string& pair : options.pairs) {
      const std::vector<int> both = numbers("-pg", {pair}, {}, 0, kMostTokens);
      if (both.size() != 2) throw CommandError("-pg: '" + pair + "' is not PP,TG, such as 512,128");
      if (both[0] + both[1] > 0) tests.push_back({both[0], both[1], depth});
    }
  }
  if (tests.empty()) throw CommandError("nothing to measure: -p 0 and -n 0 leave no test");
  return tests;
}

}  // namespace

int bench_command(const BenchOptions& options) {
  const std::vector<BenchTest> tests = tests_of(options);
  const std::vector<int> thread_counts = numbers("-t", options.threads, {options.load.threads}, 1, 4096);
  for (const std::string& model : options.models) require_readable(model, "model");
  if (options.load.on == "emulator") {
    throw CommandError("bench measures time, and the emulator has no clock; use --on cpu or --on gpu");
  }
  const bool on_device = choose_device(options.load.on);
  const auto longest = std::max_element(
      tests.begin(), tests.end(),
      [](const BenchTest& a, const BenchTest& b) { return a.tokens() + a.depth < b.tokens() + b.depth; });
  const Interrupt interrupt;
  BenchReport report(options.format, [](std::string_view text) { print(text); });
  for (const std::string& path : options.models) {
    const Session session(path);
    // One more than the longest test: the warm-up of a pair generates a token too.
    const int context = longest->tokens() + longest->depth + 1;
    if (context > session.model.hp.context_length) {
      std::fprintf(
          stderr,
          "note: %s reaches past the model's context of %d tokens; its speed is still that of the work\n",
          longest->name().c_str(), session.model.hp.context_length);
    }
    for (const int threads : thread_counts) {
      LoadOptions load = options.load;
      load.context = context;
      load.threads = threads;
      LoadTime load_time;
      const std::unique_ptr<Engine> engine = load_engine(session, load, on_device, &load_time);
      if (options.progress)
        std::fprintf(stderr, "qwen bench: loaded %s: %s\n", path.c_str(), to_text(load_time).c_str());
      const EngineInfo& info = engine->info();
      std::optional<cpu::ThreadPool> pool;
      std::optional<CpuReadProbe> probe;
      std::function<double()> roof;
      const DeviceInfo host = cpu_info();
      if (!on_device) {
        // Pinned where that is possible: a worker that shares a core with its caller reads at half the speed.
        pool.emplace(threads, threads <= cpu::available_cpus());
        if (options.roof_gbps == 0) {
          probe.emplace(host, *pool);
          roof = [&probe] { return probe->bytes() / probe->once(); };
        }
      } else if (options.roof_gbps == 0) {
        roof = make_device_read_probe();
      }
      BenchSetting setting;
      setting.file = path;
      setting.size_label = session.model.size_label;
      setting.file_type = session.model.file_type;
      setting.model = "qwen2 " + setting.size_label + " " + setting.file_type;
      setting.model_bytes = session.model.tensor_bytes();
      setting.parameters = session.model.parameters();
      setting.bytes_per_token = session.model.bytes_per_token();
      setting.executor = info.executor;
      setting.device = info.device;
      setting.device_slug = on_device ? slugify(info.device) : host.slug;
      setting.threads = pool ? pool->size() : 0;
      setting.batch = load.batch;
      setting.cache_type = load.cache_type;
      setting.given_roof_gbps = options.roof_gbps;
      for (std::size_t i = 0; i < tests.size(); ++i) {
        if (options.progress) {
          std::fprintf(stderr, "qwen bench: %s, test %zu of %zu: %s\n", setting.model.c_str(), i + 1,
                       tests.size(), tests[i].name().c_str());
        }
        BenchResult result;
        try {
          result = run_bench(*engine, session.model.hp.vocabulary, tests[i], options.repetitions, load.batch,
                             options.warm_up, roof, [&interrupt] { return interrupt.requested(); });
        } catch (const Interrupted&) {  // in the middle of a piece; asked about below
        }
        if (interrupt.requested()) report.finish();
        Interrupt::check();
        setting.kernels = info.kernels;  // which say more once a token was decoded
        setting.kernels_per_token = info.kernels_per_token;
        report.add(setting, result);
      }
    }
  }
  report.finish();
  return 0;
}

}  // namespace ladder::qwen
