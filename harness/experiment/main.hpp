// The command line that every chapter binary shares. `--help` is its documentation.
#pragma once

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include "harness/experiment/experiment.hpp"
#include "harness/experiment/qwen_shapes.hpp"
#include "harness/experiment/roofs.hpp"
#include "harness/experiment/tensor_roofs.hpp"
#if !defined(__CUDACC__)
#include "harness/device/cpu_info.hpp"
#include "harness/emulator/counters.hpp"
#endif

namespace ladder {

/// A mistake of the person at the keyboard: one line on stderr, exit status 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Options of a chapter binary, as parsed. Empty vectors mean "not given".
struct Options {
  bool list = false, layers = false, device = false, check_only = false, help = false;
  std::vector<std::string> rungs, layer_names, modes;
  std::vector<long long> nts;
  std::optional<long long> od, id;
  std::optional<Executor> executor;
  std::string json_path;
  std::string compare_a, compare_b;
  int threads = 0;  ///< 0: all hardware threads
  bool report = false,
       annotate = false;  ///< emulator: print counts by source line, or in the source's margin
  std::string pictures;   ///< emulator: folder for a picture of the first request of each line
  MeasureOptions measure;
};

inline std::vector<std::string> split_commas(std::string_view text) {
  std::vector<std::string> parts;
  while (true) {
    const std::size_t comma = text.find(',');
    if (comma > 0 && !text.empty()) parts.emplace_back(text.substr(0, comma));
    if (comma == std::string_view::npos) return parts;
    text.remove_prefix(comma + 1);
  }
}

/// A whole decimal number in [lo, hi], or a UsageError that names the option.
inline long long parse_integer(const std::string& option, const std::string& text, long long lo,
                               long long hi) {
  char* end = nullptr;
  errno = 0;
  const long long v = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || v < lo || v > hi) {
    throw UsageError(option + ": '" + text + "' is not a whole number from " + std::to_string(lo) + " to " +
                     std::to_string(hi));
  }
  return v;
}

inline constexpr long long kMaxAxis = 1 << 24;

inline const char* kUsage =
    "usage: %s [options]\n"
    "  (no options)              run this chapter's default experiment and print a table\n"
    "  --list                    rungs of this binary, one JSON object a line\n"
    "  --layers                  named matmul shapes, one JSON object a line\n"
    "  --device                  the device that would be used, one JSON object\n"
    "  --rung ID[,ID...]         which rungs (default: all that the executor has)\n"
    "  --on gpu|emulator|cpu     executor (a CUDA build has gpu; a host build has emulator and cpu)\n"
    "  --layer NAME[,NAME...]    shapes of real layers, e.g. 0.5b.ffn_down,7b.attn_q\n"
    "  --od N --id N             a shape of your own: output features and input features\n"
    "  --nt N[,N...]             token rows (default 1)\n"
    "  --mode cold,hot           cold (default): operands rotate past the cache; hot: back to back\n"
    "  --check-only              check correctness, measure nothing\n"
    "  --compare A,B             time two rungs alternately and say which is faster\n"
    "  --threads N               CPU threads (default: all)\n"
    "  --time-limit-ms N         sampling time of one measurement (default 300)\n"
    "  --json FILE               append one record a line to FILE; - is stdout\n"
    "on the emulator, where kernels are counted instead of timed:\n"
    "  --report                  requests, sectors and bank passes of every source line\n"
    "  --annotate                the source with these counts in the margin\n"
    "  --pictures FOLDER         one request of each line that accesses memory, as SVG\n";

inline Options parse_options(std::span<const std::string> args) {
  Options o;
  std::size_t i = 0;
  const auto value = [&](const std::string& option) -> const std::string& {
    if (i + 1 >= args.size()) throw UsageError(option + " needs a value");
    return args[++i];
  };
  for (; i < args.size(); ++i) {
    const std::string& a = args[i];
    if (a == "--help" || a == "-h") {
      o.help = true;
    } else if (a == "--list") {
      o.list = true;
    } else if (a == "--layers") {
      o.layers = true;
    } else if (a == "--device") {
      o.device = true;
    } else if (a == "--check-only") {
      o.check_only = true;
    } else if (a == "--rung") {
      o.rungs = split_commas(value(a));
      if (o.rungs.empty()) throw UsageError("--rung needs at least one id");
    } else if (a == "--layer") {
      o.layer_names = split_commas(value(a));
      if (o.layer_names.empty()) throw UsageError("--layer needs at least one name");
    } else if (a == "--on") {
      const std::string& v = value(a);
      if (v == "gpu")
        o.executor = Executor::gpu;
      else if (v == "emulator")
        o.executor = Executor::emulator;
      else if (v == "cpu")
        o.executor = Executor::cpu;
      else
        throw UsageError("--on: '" + v + "' is not one of gpu, emulator, cpu");
    } else if (a == "--nt") {
      o.nts.clear();
      for (const std::string& n : split_commas(value(a))) o.nts.push_back(parse_integer(a, n, 1, kMaxAxis));
      if (o.nts.empty()) throw UsageError("--nt needs at least one number");
    } else if (a == "--od") {
      o.od = parse_integer(a, value(a), 1, kMaxAxis);
    } else if (a == "--id") {
      o.id = parse_integer(a, value(a), 1, kMaxAxis);
    } else if (a == "--mode") {
      o.modes = split_commas(value(a));
      for (const std::string& m : o.modes) {
        if (m != "cold" && m != "hot") throw UsageError("--mode: '" + m + "' is not one of cold, hot");
      }
    } else if (a == "--threads") {
      o.threads = static_cast<int>(parse_integer(a, value(a), 1, 4096));
    } else if (a == "--time-limit-ms") {
      o.measure.time_limit_ms = static_cast<double>(parse_integer(a, value(a), 1, 600000));
    } else if (a == "--report") {
      o.report = true;
    } else if (a == "--annotate") {
      o.annotate = true;
    } else if (a == "--pictures") {
      o.pictures = value(a);
    } else if (a == "--json") {
      o.json_path = value(a);
    } else if (a == "--compare") {
      const std::vector<std::string> ab = split_commas(value(a));
      if (ab.size() != 2) throw UsageError("--compare needs two rung ids: A,B");
      o.compare_a = ab[0];
      o.compare_b = ab[1];
    } else {
      throw UsageError("unknown option '" + a + "'; --help lists the options");
    }
  }
  if (o.od.has_value() != o.id.has_value()) throw UsageError("--od and --id must be given together");
  if (o.od && !o.layer_names.empty()) throw UsageError("give either --layer or --od and --id, not both");
  if ((o.report || o.annotate || !o.pictures.empty()) && o.executor != Executor::emulator) {
    throw UsageError("--report, --annotate and --pictures need --on emulator");
  }
  return o;
}

/// Where records go: nowhere, stdout, or a file that is appended to. Lines are written whole.
class RecordSink {
 public:
  explicit RecordSink(const std::string& path) : to_stdout_(path == "-") {
    if (path.empty() || to_stdout_) return;
    file_.open(path, std::ios::app);
    if (!file_) throw UsageError("--json: cannot open '" + path + "' for appending");
  }
  void write(const Record& r) {
    if (to_stdout_) {
      std::cout << r.json() << std::endl;
    } else if (file_.is_open()) {
      file_ << r.json() << std::endl;
      if (!file_) throw std::runtime_error("--json: writing failed (disk full?)");
    }
  }
  /// The table for people: stdout, unless records are there.
  FILE* table() const { return to_stdout_ ? stderr : stdout; }

 private:
  bool to_stdout_ = false;
  std::ofstream file_;
};

/// Device facts of an executor of this build.
inline DeviceInfo info_of(Executor e) {
  if (e == Executor::cpu) {
#if !defined(__CUDACC__)
    return cpu_info();
#endif
  }
  return device_info();
}

/// Makes the context for `o`, or a UsageError when this build or machine has no such executor.
inline Context make_context(const Options& o, bool any_cpu_rung) {
  Context ctx;
#if defined(__CUDACC__)
  (void)any_cpu_rung;
  if (o.executor && *o.executor != Executor::gpu) {
    throw UsageError(std::string("this is a CUDA build: it has --on gpu, not --on ") +
                     to_string(*o.executor));
  }
  ctx.executor = Executor::gpu;
#else
  if (o.executor && *o.executor == Executor::gpu) {
    throw UsageError("this is a host build: it has --on emulator and --on cpu, not --on gpu");
  }
  ctx.executor = o.executor.value_or(any_cpu_rung ? Executor::cpu : Executor::emulator);
  if (ctx.executor == Executor::cpu) {
    const unsigned hardware = std::max(1u, std::thread::hardware_concurrency());
    ctx.pool = std::make_unique<cpu::ThreadPool>(o.threads > 0 ? o.threads : static_cast<int>(hardware));
  }
#endif
  ctx.device = info_of(ctx.executor);
  return ctx;
}

inline std::string device_json(const DeviceInfo& d) {
  JsonObject o;
  o.add("executor", to_string(d.executor)).add("device", d.name).add("slug", d.slug).add("sms", d.sms);
  if (d.cc_major > 0)
    o.add("compute_capability", std::to_string(d.cc_major) + "." + std::to_string(d.cc_minor));
  if (d.l2_bytes > 0) o.add("l2_bytes", d.l2_bytes);
  if (d.shared_per_block_optin > 0) o.add("shared_per_block_optin", d.shared_per_block_optin);
  if (d.total_bytes > 0) o.add("total_bytes", d.total_bytes);
  return o.str();
}

/// A matrix shape to run at, and the layer it belongs to ("" for a shape given by numbers).
struct NamedMatrix {
  std::string layer;
  long long od, id;
};

inline std::vector<NamedMatrix> chosen_matrices(const Options& o,
                                                std::span<const char* const> default_layers) {
  std::vector<NamedMatrix> m;
  if (o.od) {
    m.push_back({"", *o.od, *o.id});
    return m;
  }
  std::vector<std::string> names = o.layer_names;
  if (names.empty()) names.assign(default_layers.begin(), default_layers.end());
  for (const std::string& name : names) {
    const std::optional<QwenLayer> l = find_qwen_layer(name);
    if (!l) throw UsageError("unknown layer '" + name + "'; --layers lists them, e.g. 0.5b.ffn_down");
    m.push_back({l->name, l->od, l->id});
  }
  return m;
}

/// Everything a chapter of matmul rungs tells the shared main.
struct Chapter {
  std::string name;                         ///< "01-scalar-gemv"
  std::vector<Rung> rungs;                  ///< in the order of the text
  std::vector<const char*> default_layers;  ///< for a run without shape options
  std::vector<long long> default_nts = {1};
};

inline const Rung& find_rung(const Chapter& c, const std::string& id) {
  for (const Rung& r : c.rungs) {
    if (r.id == id) return r;
  }
  std::string known;
  for (const Rung& r : c.rungs) known += (known.empty() ? "" : ", ") + r.id;
  throw UsageError("unknown rung '" + id + "'; this chapter has: " + known);
}

namespace detail {

/// Column heads; the emulator has no clock, so there the columns of times are left out.
inline void print_header(FILE* f, Executor e) {
  std::fprintf(f, "%-18s %-8s %-17s %5s ", "rung", "on", "layer or od x id", "nt");
  if (e != Executor::emulator) {
    std::fprintf(f, "%-4s %11s %9s %10s %7s", "mode", "time us", "GB/s", "GFLOP/s", "% roof");
  }
  std::fprintf(f, "  %s\n", "check and verdict");
}

inline void print_row(FILE* f, const Record& r, const std::string& note) {
  const std::string shape =
      r.layer.empty() ? std::to_string(r.shape->od) + "x" + std::to_string(r.shape->id) : r.layer;
  std::fprintf(f, "%-18s %-8s %-17s %5lld ", r.rung.c_str(), to_string(r.executor), shape.c_str(),
               r.shape->nt);
  if (r.time) {
    std::fprintf(f, "%-4s %11.2f %9.1f %10.1f ", r.mode.c_str(), r.time->median / 1e3,
                 r.moved_bytes() / r.time->median, r.work->count / r.time->median);
    if (r.floor_ns() > 0)
      std::fprintf(f, "%7.1f", 100.0 * r.floor_ns() / r.time->median);
    else
      std::fprintf(f, "%7s", "-");
  } else if (r.executor != Executor::emulator) {
    std::fprintf(f, "%-4s %11s %9s %10s %7s", "-", "-", "-", "-", "-");
  }
  std::fprintf(f, "  %s\n", note.c_str());
  std::fflush(f);
}

inline std::string check_note(const RungCheck& c) {
  char buf[64];
  std::snprintf(buf, sizeof buf, "ok, error %.3f of bound", c.random.max_error_over_bound);
  return buf;
}

/// Memory that operand copies may take: most of what is free, or a quarter of a host's.
inline double operand_budget(const Context& ctx) {
#if defined(__CUDACC__)
  (void)ctx;
  return 0.8 * static_cast<double>(device_free_bytes());
#else
  return 0.25 * static_cast<double>(ctx.device.total_bytes);
#endif
}

#if !defined(__CUDACC__)
/// Runs the rung once more on set 0 with counting on, puts the totals into the record and prints what was asked
/// for. Returns what the emulator's checks found wrong, one line each.
inline std::vector<std::string> count_on_emulator(const Rung& rung, Operands& ops, Context& ctx,
                                                  const Options& o, FILE* f, Record& record) {
  const emu::counting on;
  ops.out_buffer(0).poison();
  const Status status = run_once(rung, ops, 0, ctx, ctx.stream);  // a finding makes it an error
  const emu::Counters c = emu::last_launch();
  record.counters_json = emu::record_json(c);
  const emu::GlobalCounts& loads = c.total.loads();
  const auto megabytes = [](std::uint64_t sectors) {
    return static_cast<double>(sectors * emu::kSectorBytes) / 1e6;
  };
  std::fprintf(f, "  %llu load requests, %.1f sectors each where %.1f would do; %llu bank conflicts\n",
               static_cast<unsigned long long>(loads.requests), loads.sectors_per_request(),
               loads.requests == 0
                   ? 0.0
                   : static_cast<double>(loads.ideal_sectors) / static_cast<double>(loads.requests),
               static_cast<unsigned long long>(c.total.shared_total().conflicts()));
  std::fprintf(f, "  %.3f MB asked for, %.3f MB in sectors, %.3f MB distinct, %.3f MB declared\n",
               static_cast<double>(loads.bytes) / 1e6, megabytes(loads.sectors),
               megabytes(c.unique_sectors_read() + c.unique_sectors_written()),
               record.traffic->total() / 1e6);
  if (o.report) std::fprintf(f, "%s\n", emu::text_report(c).c_str());
  if (o.annotate) std::fprintf(f, "%s\n", emu::annotated_source(c).c_str());
  if (!o.pictures.empty()) {
    std::filesystem::create_directories(o.pictures);
    for (const emu::CapturedRequest& r : c.captured) {
      const std::filesystem::path file =
          std::filesystem::path(o.pictures) /
          (rung.id + "-line" + std::to_string(r.line.line) + "-" + (r.shared ? "shared" : r.buffer) + ".svg");
      std::ofstream out(file);
      out << (r.shared ? emu::bank_picture(r) : emu::access_picture(r));
      if (!out) throw std::runtime_error("--pictures: cannot write " + file.string());
    }
    std::fprintf(f, "  pictures of %zu requests are in %s\n", c.captured.size(), o.pictures.c_str());
  }
  std::vector<std::string> wrong;
  for (const emu::Finding& finding : c.findings) {
    wrong.push_back(std::string(emu::to_string(finding.check)) + ": " + finding.text);
  }
  if (wrong.empty() && !status.ok()) wrong.push_back(status.message());
  return wrong;
}
#endif

inline int run_compare(const Chapter& chapter, const Options& o, const std::vector<NamedMatrix>& matrices,
                       const std::vector<long long>& nts, Context& ctx, RecordSink& sink) {
  const Rung& a = find_rung(chapter, o.compare_a);
  const Rung& b = find_rung(chapter, o.compare_b);
  for (const Rung* r : {&a, &b}) {
    if (!r->runs_on(ctx.executor)) throw UsageError(r->id + " does not run on " + to_string(ctx.executor));
  }
  if (ctx.executor == Executor::emulator) {
    throw UsageError("--compare times kernels, and the emulator has no clock; use --on cpu or a CUDA build");
  }
  FILE* f = sink.table();
  int failures = 0;
  for (const NamedMatrix& m : matrices) {
    for (const long long nt : nts) {
      const Shape shape{nt, m.od, m.id};
      for (const Rung* r : {&a, &b}) {
        if (Status s = r->supported(shape, ctx.device); !s.ok()) throw UsageError(r->id + ": " + s.message());
      }
      // One set of operands if both read the same form, else one each.
      const bool shared = a.form() == b.form();
      const double budget = operand_budget(ctx) / (shared ? 1 : 2);
      Operands ops_a(shape, sets_for_cold(shape, ctx.device, budget, a.form()), a.form());
      std::optional<Operands> other_operands;
      if (!shared) {
        other_operands.emplace(shape, sets_for_cold(shape, ctx.device, budget, b.form()), b.form());
      }
      Operands& ops_b = shared ? ops_a : *other_operands;
      Reference reference;
      std::vector<RungCheck> checks;
      if (shared) {
        checks = check_rungs({&a, &b}, ops_a, ctx, reference);
      } else {
        checks = check_rungs({&a}, ops_a, ctx, reference);
        checks.push_back(check_rungs({&b}, ops_b, ctx, reference)[0]);
      }
      bool ok = true;
      for (std::size_t i = 0; i < 2; ++i) {
        if (!checks[i].ok()) {
          std::fprintf(f, "%s: check failed, not timed: %s\n", (i == 0 ? a : b).id.c_str(),
                       checks[i].message().c_str());
          ok = false;
        }
      }
      if (!ok) {
        ++failures;
        continue;
      }
      RungSampler sampler_a(a, ops_a, ctx, true), sampler_b(b, ops_b, ctx, true);
      const Comparison c =
          compare_interleaved([&] { return sampler_a.once(); }, [&] { return sampler_b.once(); }, o.measure);
      const std::string where = m.layer.empty() ? std::to_string(m.od) + "x" + std::to_string(m.id) : m.layer;
      std::fprintf(
          f,
          "%s nt %lld: %s is %s than %s: %.2f us against %.2f us, ratio %.3f (quartiles %.3f to %.3f, "
          "%d pairs)\n",
          where.c_str(), nt, a.id.c_str(), c.verdict, b.id.c_str(), c.a.median / 1e3, c.b.median / 1e3,
          c.ratio.median, c.ratio.q1, c.ratio.q3, c.ratio.n);
      std::fflush(f);
      for (std::size_t i = 0; i < 2; ++i) {
        const Rung& self = i == 0 ? a : b;
        const Rung& other = i == 0 ? b : a;
        Record r = describe(self, shape, m.layer, ctx);
        r.mode = "cold";
        r.time = i == 0 ? c.a : c.b;
        r.check_exact_case = checks[i].exact.ok;
        r.check_max_error_over_bound = checks[i].random.max_error_over_bound;
        const double invert = i == 0 ? 1.0 : -1.0;
        r.params.add("compared_with", other.id)
            .add("ratio_median", std::pow(c.ratio.median, invert))
            .add("ratio_q1", i == 0 ? c.ratio.q1 : 1 / c.ratio.q3)
            .add("ratio_q3", i == 0 ? c.ratio.q3 : 1 / c.ratio.q1);
        judge(r, ctx);
        sink.write(r);
      }
    }
  }
  return failures == 0 ? 0 : 1;
}

/// Checks and then measures or counts rungs that read the same form of operands, at one shape. Returns the
/// number of failures.
inline int run_group(const std::vector<const Rung*>& rungs, Shape shape, const std::string& layer,
                     const Options& o, Context& ctx, RecordSink& sink) {
  FILE* f = sink.table();
  const OperandForm form = rungs.front()->form();
  const bool timed = !o.check_only && ctx.executor != Executor::emulator;
  const std::vector<std::string> modes = o.modes.empty() ? std::vector<std::string>{"cold"} : o.modes;
  int failures = 0;
  const double budget = operand_budget(ctx), bytes = Operands::bytes_per_set(shape, form);
  if (bytes > budget) {
    throw UsageError((layer.empty() ? "this shape" : layer) + " needs " + std::to_string(bytes / 1e9) +
                     " GB of memory; " + std::to_string(budget / 1e9) + " GB may be used here");
  }
  Operands ops(shape, timed ? sets_for_cold(shape, ctx.device, budget, form) : 1, form);
  Reference reference;
  const std::vector<RungCheck> checks = check_rungs(rungs, ops, ctx, reference);
  for (std::size_t i = 0; i < rungs.size(); ++i) {
    const Rung& rung = *rungs[i];
    Record base = describe(rung, shape, layer, ctx);
    if (!checks[i].ok()) {
      ++failures;
      print_row(f, base, "CHECK FAILED, not measured: " + checks[i].message());
      continue;
    }
    base.check_exact_case = true;
    base.check_max_error_over_bound = checks[i].random.max_error_over_bound;
    if (!timed) {
      print_row(f, base, check_note(checks[i]));
      int found = 0;
#if !defined(__CUDACC__)
      if (ctx.executor == Executor::emulator && !o.check_only) {
        for (const std::string& line : count_on_emulator(rung, ops, ctx, o, f, base)) {
          ++found;
          std::fprintf(f, "  FOUND %s\n", line.c_str());
        }
      }
#endif
      failures += found;
      if (found == 0) sink.write(base);
      continue;
    }
    for (const std::string& mode : modes) {
      Record r = base;
      r.mode = mode;
      RungSampler sampler(rung, ops, ctx, mode == "cold");
      r.time = sample_with_roof(sampler, o.measure, ctx, r);
      judge(r, ctx);
      // A kernel that was right when checked can still be wrong when hurried.
      const CheckResult after = check_once(rung, ops, reference, CheckKind::random, ctx);
      if (!after.ok) {
        ++failures;
        print_row(f, base, "CHECK FAILED after timing, not recorded: " + after.message);
        continue;
      }
      print_row(f, r,
                check_note(checks[i]) + (r.bound.empty() ? "" : ", " + r.bound) +
                    (r.valid.value_or(true) ? "" : "; INVALID: " + r.why_not));
      sink.write(r);
    }
  }
  return failures;
}

}  // namespace detail

/// Runs every chosen rung at every chosen shape. Returns the process exit status.
inline int run_experiment(const Chapter& chapter, const Options& o) {
  bool any_cpu = false;
  for (const Rung& r : chapter.rungs) any_cpu = any_cpu || r.runs_on(Executor::cpu);
  const std::vector<NamedMatrix> matrices = chosen_matrices(o, chapter.default_layers);
  const std::vector<long long> nts = o.nts.empty() ? chapter.default_nts : o.nts;
  for (const std::string& id : o.rungs) (void)find_rung(chapter, id);
  Context ctx = make_context(o, any_cpu);

  std::vector<const Rung*> rungs;
  for (const Rung& r : chapter.rungs) {
    const bool named = std::find(o.rungs.begin(), o.rungs.end(), r.id) != o.rungs.end();
    if (!o.rungs.empty() && !named) continue;
    if (r.runs_on(ctx.executor)) {
      rungs.push_back(&r);
    } else if (named) {
      throw UsageError(r.id + " does not run on " + to_string(ctx.executor) +
                       (ctx.executor == Executor::cpu ? ": it has no CPU twin" : ""));
    }
  }
  if (rungs.empty())
    throw UsageError(std::string("no rung of this chapter runs on ") + to_string(ctx.executor));

  RecordSink sink(o.json_path);
  const bool timed = !o.check_only && ctx.executor != Executor::emulator;
  if (timed) {
    ctx.roofs = measure_roofs(ctx);
    measure_tensor_roofs(rungs, ctx);
  }
  FILE* f = sink.table();
  std::fprintf(f, "%s on %s (%s)", chapter.name.c_str(), ctx.device.name.c_str(), to_string(ctx.executor));
  if (timed) {
    std::fprintf(f, ": read roof %.1f GB/s, f32 peak %.1f GFLOP/s, both measured now", ctx.roofs.read_gbps,
                 ctx.roofs.f32_gflops);
    for (const auto& [name, peak, unit] : {std::tuple{"mma f16", ctx.roofs.mma_f16_gflops, "FLOP"},
                                           {"mma int8", ctx.roofs.mma_s8_gops, "OP"},
                                           {"wgmma f16", ctx.roofs.wgmma_f16_gflops, "FLOP"}}) {
      if (peak > 0) std::fprintf(f, ", %s %.1f T%s/s", name, peak / 1e3, unit);
    }
  }
  std::fprintf(f, "\n");
  if (!o.compare_a.empty()) return detail::run_compare(chapter, o, matrices, nts, ctx, sink);

  detail::print_header(f, ctx.executor);
  int failures = 0;
  for (const NamedMatrix& m : matrices) {
    for (const long long nt : nts) {
      const Shape shape{nt, m.od, m.id};
      std::vector<const Rung*> able;
      for (const Rung* r : rungs) {
        if (Status s = r->supported(shape, ctx.device); s.ok()) {
          able.push_back(r);
        } else if (!o.rungs.empty()) {
          throw UsageError(r->id + ": " + s.message());
        } else {
          detail::print_row(f, describe(*r, shape, m.layer, ctx), "not run: " + s.message());
        }
      }
      for (const std::vector<const Rung*>& group : group_by_form(able)) {
        failures += detail::run_group(group, shape, m.layer, o, ctx, sink);
      }
    }
  }
  if (failures > 0) std::fprintf(f, "%d check(s) failed\n", failures);
  return failures == 0 ? 0 : 1;
}

/// The `main` of a chapter: parses, lists or runs. Exit status 0, 1 (a check failed or the device failed), or
/// 2 (usage).
inline int chapter_main(const Chapter& chapter, int argc, char** argv) {
  try {
    const std::vector<std::string> args(argv + 1, argv + argc);
    const Options o = parse_options(args);
    if (o.help) {
      std::printf(kUsage, argv[0]);
      return 0;
    }
    if (o.list) {
      for (const Rung& r : chapter.rungs) {
        std::string executors;
        for (const Executor e : {kDeviceExecutor, Executor::cpu}) {
          if (!r.runs_on(e)) continue;
          executors += (executors.empty() ? "" : ", ") + json_quote(to_string(e));
        }
        JsonObject listed;
        listed.add("rung", r.id)
            .add("chapter", r.chapter)
            .add("title", r.title)
            .raw("executors", "[" + executors + "]")
            .add("source", r.source);
        if (!r.cpu_source.empty()) listed.add("cpu_source", r.cpu_source);
        std::printf("%s\n", listed.str().c_str());
      }
      return 0;
    }
    if (o.layers) {
      for (const QwenLayer& l : all_qwen_layers()) {
        std::printf("%s\n", JsonObject()
                                .add("layer", l.name)
                                .add("od", l.od)
                                .add("id", l.id)
                                .add("count", l.count)
                                .str()
                                .c_str());
      }
      return 0;
    }
    if (o.device) {
      std::printf("%s\n", device_json(make_context(o, true).device).c_str());
      return 0;
    }
    return run_experiment(chapter, o);
  } catch (const UsageError& e) {
    std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
    return 1;
  }
}

}  // namespace ladder
