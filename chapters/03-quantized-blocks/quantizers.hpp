// Chapter 03's other kernels, those that turn activations into int8 blocks (kernels/quant/quantize_acts.cuh): checked
// against the host's quantizer bit for bit, timed, or counted. They are no matmuls, and their records have nt and id
// among the parameters instead of a shape.
//
//   quantized_blocks --rung quantize_q8_pad40 --layer 7b.ffn_down --nt 1,512 --mode cold,hot
//
// A layer stands for its rows of id activations, a shape of numbers too. Quantizers run when they are named.
//
//   quantized_blocks --quantizing 7b --nt 1,512     bytes of quantizing once, or for every product: nothing runs
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "harness/experiment/main.hpp"
#include "harness/experiment/mix_bits.hpp"
#include "harness/experiment/qwen_shapes.hpp"
#include "kernels/quant/quantize_acts.cuh"
#include "kernels/quant/quantize_acts.hpp"

namespace ladder::chapter03 {

/// A kernel that reads [nt][id] activations and writes its own layout of their int8 codes.
struct Quantizer {
  const char* id;
  const char* title;
  const char* source;                                ///< see Rung::source
  std::size_t (*bytes)(long long nt, long long id);  ///< what it writes
  /// Launches it. @param out bytes(nt, id) bytes at a multiple of 16
  Status (*launch)(const float* acts, unsigned char* out, long long nt, long long id, Stream& stream);
  /// The same bytes, made by the host.
  std::vector<unsigned char> (*expected)(std::span<const float> acts, long long nt, long long id);
};

inline std::size_t pad40_bytes(long long nt, long long id) {
  return static_cast<std::size_t>(nt * (id / kQ8ActsPerBlock)) * sizeof(BlockQ8Pad40);
}

inline std::size_t planes_bytes(long long nt, long long id) {
  const Q8ActsPlanes p = q8_acts_planes(nt, id);
  return p.codes + p.scales * sizeof(std::uint32_t);
}

inline std::vector<BlockQ8Pad40> host_blocks(std::span<const float> acts) {
  std::vector<BlockQ8Pad40> blocks(acts.size() / kQ8ActsPerBlock);
  quantize_q8_pad40_row(acts, blocks.data());
  return blocks;
}

inline std::vector<unsigned char> expected_pad40(std::span<const float> acts, long long nt, long long id) {
  std::vector<unsigned char> bytes(pad40_bytes(nt, id));
  std::memcpy(bytes.data(), host_blocks(acts).data(), bytes.size());
  return bytes;
}

inline std::vector<unsigned char> expected_planes(std::span<const float> acts, long long nt, long long id) {
  const Q8ActsPlanes p = q8_acts_planes(nt, id);
  std::vector<std::int8_t> codes(p.codes);
  std::vector<std::uint32_t> scales(p.scales);
  pack_q8_pad40_t(host_blocks(acts).data(), nt, id, codes.data(), scales.data());
  std::vector<unsigned char> bytes(planes_bytes(nt, id));
  std::memcpy(bytes.data(), codes.data(), p.codes);
  std::memcpy(bytes.data() + p.codes, scales.data(), bytes.size() - p.codes);
  return bytes;
}

inline const std::array<Quantizer, 3>& quantizers() {
#define LADDER_ACTS "kernels/quant/quantize_acts.cuh#"
#define LADDER_RULE "," LADDER_ACTS "q8_scale," LADDER_ACTS "q8_codes"
  static const std::array<Quantizer, 3> all = {{
      {"quantize_q8_pad40_plain", "activations to int8, a thread per block",
       LADDER_ACTS "quantize_q8_pad40_plain" LADDER_RULE, pad40_bytes,
       [](const float* acts, unsigned char* out, long long nt, long long id, Stream& stream) {
         return launch_quantize_q8_pad40_plain(acts, reinterpret_cast<BlockQ8Pad40*>(out), nt, id, stream);
       },
       expected_pad40},
      {"quantize_q8_pad40", "activations to int8, eight lanes per block",
       LADDER_ACTS "quantize_q8_pad40," LADDER_ACTS "q8_eighth" LADDER_RULE, pad40_bytes,
       [](const float* acts, unsigned char* out, long long nt, long long id, Stream& stream) {
         return launch_quantize_q8_pad40(acts, reinterpret_cast<BlockQ8Pad40*>(out), nt, id, stream);
       },
       expected_pad40},
      {"quantize_q8_pad40_t", "activations to the two planes of tensor-core kernels",
       LADDER_ACTS "quantize_q8_pad40_t," LADDER_ACTS "q8_eighth" LADDER_RULE
                   ",kernels/quant/quantize_acts.hpp#q8_acts_addresses",
       planes_bytes,
       [](const float* acts, unsigned char* out, long long nt, long long id, Stream& stream) {
         return launch_quantize_q8_pad40_t(
             acts, reinterpret_cast<std::int8_t*>(out),
             reinterpret_cast<std::uint32_t*>(out + q8_acts_planes(nt, id).codes), nt, id, stream);
       },
       expected_planes},
  }};
#undef LADDER_RULE
#undef LADDER_ACTS
  return all;
}

inline const Quantizer* find_quantizer(const std::string& id) {
  for (const Quantizer& q : quantizers()) {
    if (q.id == id) return &q;
  }
  return nullptr;
}

/// Bytes that one call must read and write.
inline double moved_bytes(const Quantizer& q, long long nt, long long id) {
  return activation_bytes(ActivationFormat::f32, nt, id) + static_cast<double>(q.bytes(nt, id));
}

/// What is wrong with one call between guard bands, against the host; empty if nothing is.
inline std::string check(const Quantizer& q, long long nt, long long id, Context& ctx) {
  std::vector<float> host(static_cast<std::size_t>(nt * id));
  Buffer<float> acts(host.size(), "acts");
  GuardedBuffer<unsigned char> out(q.bytes(nt, id), "out");
  std::vector<unsigned char> got(out.size());
  for (const bool ties : {true, false}) {
    if (ties) {  // a scale of 1 in every block, all the others halfway between two codes
      for (std::size_t i = 0; i < host.size(); ++i)
        host[i] = i % kQ8ActsPerBlock == 0 ? 127.0f : static_cast<float>(mix_bits(i) % 253) - 125.5f;
      acts.upload(host);
    } else {
      fill(acts.data(), acts.size(), FillKind::uniform, 7, ctx.stream);
      acts.download(host);
    }
    out.poison();
    if (const Status s = q.launch(acts.data(), out.data(), nt, id, ctx.stream); !s.ok()) return s.message();
    ctx.stream.synchronize();
    if (!out.download(got)) return "wrote outside its output buffer (a guard band changed)";
    const std::vector<unsigned char> want = q.expected(host, nt, id);
    const auto differs = std::mismatch(got.begin(), got.end(), want.begin()).first;
    if (differs != got.end())
      return "byte " + std::to_string(differs - got.begin()) + " of the output is not the host's";
  }
  return "";
}

/// Copies of one size's operands, one after the other in two buffers, so that thousands of small ones cost two
/// allocations. All activations differ.
class Copies {
 public:
  Copies(const Quantizer& q, long long nt, long long id, int count, Stream& stream)
      : q_(q),
        nt_(nt),
        id_(id),
        count_(count),
        out_stride_((q.bytes(nt, id) + 255) / 256 * 256),
        acts_(static_cast<std::size_t>(count) * static_cast<std::size_t>(nt * id), "acts"),
        out_(static_cast<std::size_t>(count) * out_stride_, "out") {
    fill(acts_.data(), acts_.size(), FillKind::uniform, 11, stream);
    out_.fill_bytes(0xFF);
  }
  int count() const { return count_; }
  Status run(int copy, Stream& stream) {
    const auto k = static_cast<std::size_t>(copy);
    return q_.launch(acts_.data() + k * static_cast<std::size_t>(nt_ * id_), out_.data() + k * out_stride_,
                     nt_, id_, stream);
  }
  /// Whether the first copy's output is the host's.
  bool right() const {
    std::vector<float> acts(static_cast<std::size_t>(nt_ * id_));
    std::vector<unsigned char> got(q_.bytes(nt_, id_));
    acts_.download(acts);
    out_.download(got);
    return got == q_.expected(acts, nt_, id_);
  }

 private:
  const Quantizer& q_;
  long long nt_, id_;
  int count_;
  std::size_t out_stride_;
  Buffer<float> acts_;
  Buffer<unsigned char> out_;
};

/// As many copies as are four last-level caches, as far as memory allows; one when hot.
inline Copies make_copies(const Quantizer& q, long long nt, long long id, bool cold, Context& ctx) {
  const double each = moved_bytes(q, nt, id) + 255;
  const double wanted = std::ceil(4.0 * static_cast<double>(ctx.device.l2_bytes) / each);
  const double room = std::floor(ladder::detail::operand_budget(ctx) / each);
  if (room < 1) throw UsageError(std::string(q.id) + ": not enough memory for this size");
  return {q, nt, id, cold ? static_cast<int>(std::max(1.0, std::min(wanted, room))) : 1, ctx.stream};
}

inline DeviceSampler make_sampler(Copies& copies, Context& ctx) {
  return {DeviceWorkload{[&copies](int copy, Stream& s) { return copies.run(copy, s); }, copies.count()},
          ctx.stream};
}

inline Record describe(const Quantizer& q, long long nt, long long id, const Context& ctx) {
  Record r;
  r.rung = q.id;
  r.executor = ctx.executor;
  r.device = ctx.device.slug;
  r.params.add("nt", nt).add("id", id);
  r.bytes_total = moved_bytes(q, nt, id);
  r.check_exact_case = true;
  if (ctx.roofs.read_gbps > 0) r.roof = Roof{ctx.roofs.read_gbps, 0, "flop", "measured"};
  return r;
}

#if !defined(__CUDACC__)
/// Counts one call on the emulator. Returns what its checks found wrong.
inline std::string count(const Quantizer& q, long long nt, long long id, const Options& o, Context& ctx,
                         FILE* f, Record& record) {
  const emu::counting on;
  Copies one(q, nt, id, 1, ctx.stream);
  const Status status = one.run(0, ctx.stream);
  const emu::Counters c = emu::last_launch();
  record.counters_json = emu::record_json(c);
  if (o.report) std::fprintf(f, "%s\n", emu::text_report(c).c_str());
  if (o.annotate) std::fprintf(f, "%s\n", emu::annotated_source(c).c_str());
  if (!o.pictures.empty()) throw UsageError("--pictures is for the matmuls of this chapter");
  if (!c.findings.empty()) return c.findings.front().text;
  return status.ok() ? "" : status.message();
}
#endif

/// Prints and records one measurement.
inline void finish(Record r, const TimeStats& time, const std::string& mode, const std::string& note,
                   Context& ctx, RecordSink& sink) {
  r.mode = mode;
  r.time = time;
  judge(r, ctx);
  std::fprintf(sink.table(), " %-4s %11.2f us %9.1f GB/s  -%.1f +%.1f %%%s%s%s\n", mode.c_str(),
               time.median / 1e3, r.moved_bytes() / time.median, 100 * (1 - time.q1 / time.median),
               100 * (time.q3 / time.median - 1), note.c_str(),
               r.why_not.empty() ? "" : "; INVALID: ", r.why_not.c_str());
  std::fflush(sink.table());
  sink.write(r);
}

/// Alternates two quantizers at one size. @return false if a check failed
inline bool compare(const Quantizer& a, const Quantizer& b, long long nt, long long id, const Options& o,
                    Context& ctx, RecordSink& sink) {
  FILE* f = sink.table();
  for (const Quantizer* q : {&a, &b}) {
    if (const std::string wrong = check(*q, nt, id, ctx); !wrong.empty()) {
      std::fprintf(f, "%s: CHECK FAILED, not timed: %s\n", q->id, wrong.c_str());
      return false;
    }
  }
  Copies of_a = make_copies(a, nt, id, true, ctx), of_b = make_copies(b, nt, id, true, ctx);
  DeviceSampler sampler_a = make_sampler(of_a, ctx), sampler_b = make_sampler(of_b, ctx);
  const Comparison c =
      compare_interleaved([&] { return sampler_a.once(); }, [&] { return sampler_b.once(); }, o.measure);
  std::fprintf(f, "nt %lld, id %lld: %s is %s than %s, ratio %.3f (quartiles %.3f to %.3f, %d pairs)\n", nt,
               id, a.id, c.verdict, b.id, c.ratio.median, c.ratio.q1, c.ratio.q3, c.ratio.n);
  for (const bool first : {true, false}) {
    const Quantizer &self = first ? a : b, &other = first ? b : a;
    if (!(first ? of_a : of_b).right()) {
      std::fprintf(f, "%s: CHECK FAILED after timing, not recorded\n", self.id);
      return false;
    }
    Record r = describe(self, nt, id, ctx);
    r.params.add("compared_with", other.id)
        .add("ratio_median", first ? c.ratio.median : 1 / c.ratio.median)
        .add("ratio_q1", first ? c.ratio.q1 : 1 / c.ratio.q3)
        .add("ratio_q3", first ? c.ratio.q3 : 1 / c.ratio.q1);
    std::fprintf(f, "%-24s", self.id);
    finish(r, first ? c.a : c.b, "cold", "", ctx, sink);
  }
  return true;
}

/// Row lengths that the options ask for, each once.
inline std::vector<long long> row_lengths(const Options& o, const Chapter& chapter) {
  std::vector<long long> ids;
  for (const NamedMatrix& m : chosen_matrices(o, chapter.default_layers)) {
    if (std::find(ids.begin(), ids.end(), m.id) == ids.end()) ids.push_back(m.id);
  }
  return ids;
}

/// Checks, times or counts the quantizers named in `o`. @return the process exit status
inline int run_quantizers(const Chapter& chapter, const Options& o) {
  Context ctx = make_context(o, false);
  if (ctx.executor == Executor::cpu)
    throw UsageError("the quantizers of this chapter do not run on cpu: they have no CPU twin");
  const bool compares = !o.compare_a.empty();
  if (compares && ctx.executor == Executor::emulator)
    throw UsageError("--compare times kernels, and the emulator has no clock; use a CUDA build");
  const bool timed = !o.check_only && ctx.executor != Executor::emulator;
  RecordSink sink(o.json_path);
  FILE* f = sink.table();
  if (timed) ctx.roofs = measure_roofs(ctx);
  std::fprintf(f, "%s, activations to int8, on %s (%s)", chapter.name.c_str(), ctx.device.name.c_str(),
               to_string(ctx.executor));
  if (timed) std::fprintf(f, ": read roof %.1f GB/s, measured now", ctx.roofs.read_gbps);
  std::fprintf(f, "\n");
  int failures = 0;
  for (const long long id : row_lengths(o, chapter)) {
    for (const long long nt : o.nts.empty() ? chapter.default_nts : o.nts) {
      if (compares) {
        failures +=
            compare(*find_quantizer(o.compare_a), *find_quantizer(o.compare_b), nt, id, o, ctx, sink) ? 0 : 1;
        continue;
      }
      for (const std::string& name : o.rungs) {
        const Quantizer* q = find_quantizer(name);
        if (q == nullptr) continue;
        if (id % kQ8ActsPerBlock != 0) {
          throw UsageError(name + ": id must be a multiple of " + std::to_string(kQ8ActsPerBlock) + ", not " +
                           std::to_string(id));
        }
        const std::string where = name + std::string(name.size() < 24 ? 24 - name.size() : 0, ' ') + " id " +
                                  std::to_string(id) + ", nt " + std::to_string(nt) + ":";
        if (const std::string wrong = check(*q, nt, id, ctx); !wrong.empty()) {
          ++failures;
          std::fprintf(f, "%s CHECK FAILED, not measured: %s\n", where.c_str(), wrong.c_str());
          continue;
        }
        Record base = describe(*q, nt, id, ctx);
        if (!timed) {
          std::string wrong;
#if !defined(__CUDACC__)
          if (!o.check_only) wrong = count(*q, nt, id, o, ctx, f, base);
#endif
          std::fprintf(f, "%s %s\n", where.c_str(),
                       wrong.empty() ? "the host's bits" : ("FOUND " + wrong).c_str());
          failures += wrong.empty() ? 0 : 1;
          if (wrong.empty()) sink.write(base);
          continue;
        }
        for (const std::string& mode : o.modes.empty() ? std::vector<std::string>{"cold"} : o.modes) {
          Copies copies = make_copies(*q, nt, id, mode == "cold", ctx);
          DeviceSampler sampler = make_sampler(copies, ctx);
          const TimeStats time = sample([&] { return sampler.once(); }, o.measure);
          if (!copies.right()) {
            ++failures;
            std::fprintf(f, "%s CHECK FAILED after timing, not recorded\n", where.c_str());
            continue;
          }
          std::fprintf(f, "%s", where.c_str());
          finish(base, time, mode, "", ctx, sink);
        }
      }
    }
  }
  if (failures > 0) std::fprintf(f, "%d check(s) failed\n", failures);
  return failures == 0 ? 0 : 1;
}

inline void list_quantizers(const Chapter& chapter) {
  for (const Quantizer& q : quantizers()) {
    std::printf("%s\n", JsonObject()
                            .add("rung", q.id)
                            .add("chapter", chapter.name)
                            .add("title", q.title)
                            .raw("executors", "[" + json_quote(to_string(kDeviceExecutor)) + "]")
                            .add("source", q.source)
                            .str()
                            .c_str());
  }
}

/// What it takes to quantize the activations of one layer of a model, by the byte model: for each product, or for each
/// set of activations, of which several products read the same one.
inline void print_quantizing(const QwenSize& size, std::span<const long long> nts, FILE* f) {
  const std::vector<QwenLayer> all = qwen_layers(size);
  const auto layer = [&](const char* name) {
    return *std::find_if(all.begin(), all.end(),
                         [&](const QwenLayer& l) { return l.name == std::string(size.name) + "." + name; });
  };
  const std::vector<std::vector<QwenLayer>> sets = {{layer("attn_q"), layer("attn_k"), layer("attn_v")},
                                                    {layer("attn_output")},
                                                    {layer("ffn_gate"), layer("ffn_up")},
                                                    {layer("ffn_down")}};
  double weights = 0;
  std::size_t products = 0;
  for (const std::vector<QwenLayer>& set : sets) {
    products += set.size();
    for (const QwenLayer& l : set) weights += weight_bytes(WeightType::q4_0, l.od, l.id);
  }
  std::fprintf(f, "int8 activations of a layer of %s, beside its %.1f MB of Q4_0 weights\n%-22s%8s",
               size.name, weights / 1e6, "quantized", "launches");
  for (const long long nt : nts) std::fprintf(f, "%20s", ("nt " + std::to_string(nt) + ", MB").c_str());
  const auto line = [&](const char* what, std::size_t launches, bool each_product, bool reads) {
    std::fprintf(f, "\n%-22s%8zu", what, launches);
    for (const long long nt : nts) {
      double bytes = 0;
      for (const std::vector<QwenLayer>& set : sets) {
        const long long id = set.front().id;
        const double once = activation_bytes(ActivationFormat::pad40, nt, id) +
                            (reads ? activation_bytes(ActivationFormat::f32, nt, id) : 0);
        bytes += once * static_cast<double>(each_product ? set.size() : 1);
      }
      std::fprintf(f, "%10.3f (%5.2f %%)", bytes / 1e6, 100 * bytes / weights);
    }
  };
  line("once per product", products, true, true);
  line("once per set", sets.size(), false, true);
  line("where they are made", 0, false, false);
  std::fprintf(f, "\n");
}

/// Takes `--quantizing SIZE` out of the arguments; null if it is not there.
inline const QwenSize* take_quantizing(std::vector<std::string>& args) {
  const auto at = std::find(args.begin(), args.end(), "--quantizing");
  if (at == args.end()) return nullptr;
  std::string known;
  for (const QwenSize& size : kQwenSizes) {
    if (at + 1 != args.end() && at[1] == size.name) {
      args.erase(at, at + 2);
      return &size;
    }
    known += (known.empty() ? "" : ", ") + std::string(size.name);
  }
  throw UsageError("--quantizing needs the size of a model: " + known);
}

/// The `main` of this chapter: chapter_main for the matmuls; quantizers as well, where they are named.
inline int main_of_chapter(const Chapter& chapter, int argc, char** argv) {
  std::vector<std::string> args(argv + 1, argv + argc);
  Options o;
  try {
    const QwenSize* size = take_quantizing(args);
    o = parse_options(args);
    if (size != nullptr) {
      print_quantizing(*size, o.nts.empty() ? chapter.default_nts : o.nts, stdout);
      return 0;
    }
    const bool a = find_quantizer(o.compare_a) != nullptr, b = find_quantizer(o.compare_b) != nullptr;
    if (a != b) throw UsageError("--compare: a quantizer and a matmul have nothing to compare");
    const auto named = std::count_if(o.rungs.begin(), o.rungs.end(),
                                     [](const std::string& id) { return find_quantizer(id) != nullptr; });
    const bool mine = !o.help && !o.list && !o.layers && !o.device && (a || named > 0);
    if (mine && !a && static_cast<std::size_t>(named) != o.rungs.size())
      throw UsageError("--rung: quantizers (quantize_...) and matmuls need a run each");
    if (mine) return run_quantizers(chapter, o);
  } catch (const UsageError& e) {
    std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
    return 1;
  }
  const int status = chapter_main(chapter, argc, argv);
  if (status == 0 && o.list && !o.help) list_quantizers(chapter);
  return status;
}

}  // namespace ladder::chapter03
