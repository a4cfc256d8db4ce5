// Chapter 00: what can this machine do at most? Every probe keeps one unit busy and nothing else; the rungs
// of all later chapters are placed under the ceilings that are found here.
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/00-roofs/roofs.cu -o roofs
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "harness/device/device.hpp"
#include "harness/experiment/check.hpp"
#include "harness/experiment/experiment.hpp"
#include "harness/experiment/main.hpp"
#include "harness/experiment/roofs.hpp"
#include "harness/experiment/tensor_roofs.hpp"
#include "kernels/device/mma.cuh"
#include "kernels/roofs/latency_graph_node.cuh"
#include "kernels/roofs/latency_grid_barrier.cuh"
#include "kernels/roofs/latency_launch.cuh"
#include "kernels/roofs/latency_pdl.cuh"
#include "kernels/roofs/roof_copy.cuh"
#include "kernels/roofs/roof_dp4a.cuh"
#include "kernels/roofs/roof_fma_f32.cuh"
#include "kernels/roofs/roof_l2_read.cuh"
#include "kernels/roofs/roof_mma_f16.cuh"
#include "kernels/roofs/roof_mma_s8.cuh"
#include "kernels/roofs/roof_read.cuh"
#include "kernels/roofs/roof_write.cuh"
#if !defined(__CUDACC__)
#include "kernels/cpu/features.hpp"
#include "kernels/cpu/roofs.hpp"
#endif

namespace ladder::chapter00 {

constexpr std::size_t kMiB = std::size_t{1} << 20;

/// What was varied for one point of a sweep: shown in the table and kept in the record.
class Params {
 public:
  Params& add(std::string name, long long value) {
    columns_.emplace_back(name, std::to_string(value));
    json_.add(name, value);
    return *this;
  }
  Params& add(std::string name, const char* value) {
    columns_.emplace_back(name, value);
    json_.add(name, value);
    return *this;
  }
  /// Recorded in bytes, shown in the largest unit that divides it.
  Params& add_bytes(std::string name, std::size_t bytes) {
    constexpr std::pair<std::size_t, const char*> kUnits[] = {{std::size_t{1} << 30, " GiB"},
                                                              {std::size_t{1} << 20, " MiB"},
                                                              {std::size_t{1} << 10, " KiB"},
                                                              {1, " B"}};
    for (const auto& [unit, suffix] : kUnits) {
      if (bytes % unit != 0) continue;
      columns_.emplace_back(name, std::to_string(bytes / unit) + suffix);
      break;
    }
    json_.add(name, bytes);
    return *this;
  }
  const std::vector<std::pair<std::string, std::string>>& columns() const { return columns_; }
  const JsonObject& json() const { return json_; }

 private:
  std::vector<std::pair<std::string, std::string>> columns_;
  JsonObject json_;
};

/// What a point reached, before it is a record.
struct Outcome {
  TimeStats time;
  double bytes = 0;     ///< moved in that time, or 0
  Work work;            ///< done in that time, or count 0
  std::string why_not;  ///< not empty: the point does not stand for the ceiling, and why
};

/// A probe's result does not match its reference: nothing of it is recorded.
class CheckFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One run of one probe: collects the points of its sweep, then prints and records them.
class Sweep {
 public:
  Sweep(std::string rung, Context& ctx, const MeasureOptions& options)
      : rung_(std::move(rung)), ctx_(ctx), options_(options) {}

  Context& ctx() { return ctx_; }
  Stream& stream() { return ctx_.stream; }
  const DeviceInfo& device() const { return ctx_.device; }
  const MeasureOptions& options() const { return options_; }
  void add(Params params, Outcome outcome) { points_.emplace_back(std::move(params), std::move(outcome)); }

  /// Rate in bytes, operations or launches per ns: what makes one point better than another.
  static double rate(const Outcome& o) {
    return (o.bytes > 0 ? o.bytes : o.work.count > 0 ? o.work.count : 1.0) / o.time.median;
  }
  /// The fastest point that may stand for the ceiling.
  std::size_t best() const {
    std::size_t best = points_.size();
    for (std::size_t i = 0; i < points_.size(); ++i) {
      if (!points_[i].second.why_not.empty()) continue;
      if (best == points_.size() || rate(points_[i].second) > rate(points_[best].second)) best = i;
    }
    return best;
  }
  const Params& params(std::size_t i) const { return points_[i].first; }

  void finish(const char* title, RecordSink& sink) const {
    FILE* f = sink.table();
    std::fprintf(f, "\n%s on %s: %s\n", rung_.c_str(), to_string(ctx_.executor), title);
    const std::size_t best_point = best();
    for (std::size_t i = 0; i < points_.size(); ++i) {
      const auto& [params, outcome] = points_[i];
      if (i == 0 || names(params) != names(points_[i - 1].first)) {
        std::fprintf(f, " ");
        for (const auto& [name, value] : params.columns()) std::fprintf(f, " %*s", width(name), name.c_str());
        std::fprintf(f, " %12s %12s %10s\n", "time us", rate_name(outcome), "quartiles");
      }
      std::fprintf(f, " ");
      for (const auto& [name, value] : params.columns()) std::fprintf(f, " %*s", width(name), value.c_str());
      std::fprintf(f, " %12.3f", outcome.time.median / 1e3);
      if (outcome.bytes > 0 || outcome.work.count > 0)
        std::fprintf(f, " %12.1f", rate(outcome));
      else
        std::fprintf(f, " %12s", "");
      std::fprintf(f, "  -%.1f +%.1f %%%s", 100 * (1 - outcome.time.q1 / outcome.time.median),
                   100 * (outcome.time.q3 / outcome.time.median - 1), i == best_point ? "  best" : "");
      if (!outcome.why_not.empty()) std::fprintf(f, "  not the ceiling: %s", outcome.why_not.c_str());
      std::fprintf(f, "\n");
      sink.write(record(i, i == best_point));
    }
    std::fflush(f);
  }

 private:
  static std::vector<std::string> names(const Params& p) {
    std::vector<std::string> n;
    for (const auto& [name, value] : p.columns()) n.push_back(name);
    return n;
  }
  static int width(const std::string& name) { return std::max(10, static_cast<int>(name.size())); }
  static const char* rate_name(const Outcome& o) {
    if (o.bytes > 0) return "GB/s";
    if (o.work.count > 0) return std::strcmp(o.work.unit, "flop") == 0 ? "GFLOP/s" : "GOP/s";
    return "";
  }
  Record record(std::size_t i, bool is_best) const {
    const auto& [params, outcome] = points_[i];
    Record r;
    r.rung = rung_;
    r.executor = ctx_.executor;
    r.device = ctx_.device.slug;
    r.params = params.json();
    if (is_best) r.params.add("best", true);
    if (outcome.bytes > 0) r.bytes_total = outcome.bytes;
    if (outcome.work.count > 0) r.work = outcome.work;
    r.time = outcome.time;
    r.valid = outcome.why_not.empty();
    r.why_not = outcome.why_not;
    return r;
  }

  std::string rung_;
  Context& ctx_;
  MeasureOptions options_;
  std::vector<std::pair<Params, Outcome>> points_;
};

// ----------------------------------------------------------------------------------------------------------
// Checks. Each runs its probe at small sizes on this build's device and throws CheckFailed unless the result
// is the expected one.

void expect(bool ok, const std::string& what) {
  if (!ok) throw CheckFailed(what);
}

constexpr int kAllLoads[] = {1, 2, 4, 8};
constexpr int kAllChains[] = {1, 2, 4, 8};

std::string with_loads(int loads, int tiles, int blocks) {
  return " (loads " + std::to_string(loads) + ", tiles " + std::to_string(tiles) + ", blocks " +
         std::to_string(blocks) + ")";
}

/// Tile and block counts where an index error shows: one tile, fewer tiles than blocks, a remainder.
constexpr std::pair<int, int> kTilesAndBlocks[] = {{1, 1}, {2, 3}, {7, 3}};

void check_read(Context& ctx) {
  // One tile more than the probe is told to read, so that reading past the end changes the sum.
  Buffer<float> buffer(8 * stream_tile_bytes(8) / sizeof(float), "words");
  fill(buffer.data(), buffer.size(), FillKind::uniform, kRoofSeed, ctx.stream);
  const auto* words = reinterpret_cast<const uint4*>(buffer.data());
  Buffer<unsigned> sum(1, "sum");
  for (const int loads : kAllLoads) {
    for (const auto& [tiles, blocks] : kTilesAndBlocks) {
      const std::size_t bytes = static_cast<std::size_t>(tiles) * stream_tile_bytes(loads);
      const std::uint32_t expected = expected_word_sum(bytes / sizeof(float));
      unsigned got = 0;
      sum.fill_bytes(0);
      require(launch_roof_read(loads, words, bytes, sum.data(), blocks, ctx.stream));
      ctx.stream.synchronize();
      sum.download(std::span(&got, 1));
      expect(got == expected, "roof_read: wrong sum" + with_loads(loads, tiles, blocks));
    }
  }
}

void check_l2_read(Context& ctx) {
  Buffer<float> buffer(8 * stream_tile_bytes(8) / sizeof(float), "words");
  fill(buffer.data(), buffer.size(), FillKind::uniform, kRoofSeed, ctx.stream);
  const auto* words = reinterpret_cast<const uint4*>(buffer.data());
  Buffer<unsigned> sum(1, "sum");
  for (const int loads : kAllLoads) {
    for (const auto& [tiles, blocks] : kTilesAndBlocks) {
      constexpr int kPasses = 3;
      const std::size_t bytes = static_cast<std::size_t>(tiles) * stream_tile_bytes(loads);
      unsigned got = 0;
      sum.fill_bytes(0);
      require(launch_roof_l2_read(loads, words, bytes, kPasses, sum.data(), blocks, ctx.stream));
      ctx.stream.synchronize();
      sum.download(std::span(&got, 1));
      expect(got == kPasses * expected_word_sum(bytes / sizeof(float)),
             "roof_l2_read: wrong sum" + with_loads(loads, tiles, blocks));
    }
  }
}

void check_copy(Context& ctx) {
  for (const int loads : kAllLoads) {
    for (const auto& [tiles, blocks] : kTilesAndBlocks) {
      const std::size_t bytes = static_cast<std::size_t>(tiles) * stream_tile_bytes(loads);
      const std::size_t count = bytes / sizeof(float);
      Buffer<float> in(count, "in");
      GuardedBuffer<float> out(count, "out");
      fill(in.data(), count, FillKind::uniform, kRoofSeed, ctx.stream);
      require(launch_roof_copy(loads, reinterpret_cast<const uint4*>(in.data()),
                               reinterpret_cast<uint4*>(out.data()), bytes, blocks, ctx.stream));
      ctx.stream.synchronize();
      std::vector<float> got(count);
      const std::string where = with_loads(loads, tiles, blocks);
      expect(out.download(got), "roof_copy: wrote outside its buffer" + where);
      for (std::size_t i = 0; i < count; ++i) {
        expect(got[i] == fill_value(FillKind::uniform, kRoofSeed, i), "roof_copy: the copy differs" + where);
      }
    }
  }
}

bool holds_written_words(std::span<const std::uint32_t> words) {
  for (std::size_t i = 0; i < words.size(); i += 4) {
    const uint4 expected = roof_write_word(i / 4);
    if (words[i] != expected.x || words[i + 1] != expected.y || words[i + 2] != expected.z ||
        words[i + 3] != expected.w) {
      return false;
    }
  }
  return true;
}

void check_write(Context& ctx) {
  for (const int loads : kAllLoads) {
    for (const auto& [tiles, blocks] : kTilesAndBlocks) {
      const std::size_t bytes = static_cast<std::size_t>(tiles) * stream_tile_bytes(loads);
      GuardedBuffer<std::uint32_t> out(bytes / 4, "out");
      require(launch_roof_write(loads, reinterpret_cast<uint4*>(out.data()), bytes, blocks, ctx.stream));
      ctx.stream.synchronize();
      std::vector<std::uint32_t> got(bytes / 4);
      const std::string where = with_loads(loads, tiles, blocks);
      expect(out.download(got), "roof_write: wrote outside its buffer" + where);
      expect(holds_written_words(got), "roof_write: a word is wrong" + where);
    }
  }
}

/// Operands and results of a register-only probe on the device.
template <class In, class Out>
struct MathBuffers {
  std::vector<In> operands;
  Buffer<In> in;
  Buffer<Out> out;
  MathBuffers(std::vector<In> values, std::size_t results)
      : operands(std::move(values)), in(operands.size(), "operands"), out(results, "results") {
    in.upload(operands);
    out.fill_bytes(0xFF);
  }
  std::vector<Out> results() const {
    std::vector<Out> host(out.size());
    out.download(host);
    return host;
  }
};

std::size_t math_threads(int blocks) { return static_cast<std::size_t>(blocks) * kMathThreads; }

MathBuffers<float, float> make_fma(int chains, int blocks) {
  return {make_fma_operands(math_threads(blocks), chains), math_threads(blocks)};
}

/// Every `stride`-th thread: within the bound of the closed form, and, where few steps were made, equal to
/// the same f32 steps made here.
void verify_fma(const MathBuffers<float, float>& m, int chains, int iterations, std::size_t stride) {
  const std::vector<float> got = m.results();
  const long long pairs = static_cast<long long>(kFmaPairs) * iterations;
  const bool step_by_step = pairs <= 1000;
  for (std::size_t thread = 0; thread < got.size(); thread += stride) {
    const float* mine = &m.operands[thread * static_cast<std::size_t>(4 + chains)];
    const auto [value, bound] = expected_fma_result(mine, chains, static_cast<double>(pairs));
    float same = 0;
    for (int c = 0; c < chains && step_by_step; ++c) {
      float r = mine[4 + c];
      for (long long p = 0; p < pairs; ++p) {
        r = std::fma(std::fma(r, mine[0], mine[1]), mine[2], mine[3]);
      }
      same = c == 0 ? r : same + r;
    }
    expect(std::isfinite(got[thread]) && std::fabs(got[thread] - value) <= bound,
           "roof_fma_f32: thread " + std::to_string(thread) + " is " + std::to_string(got[thread]) +
               ", expected " + std::to_string(value) + " (chains " + std::to_string(chains) + ")");
    expect(!step_by_step || got[thread] == same, "roof_fma_f32: thread " + std::to_string(thread) +
                                                     " does not match fused steps bit for bit (chains " +
                                                     std::to_string(chains) + ")");
  }
}

void check_fma(Context& ctx) {
  constexpr int kBlocks = 2, kIterations = 2;
  for (const int chains : kAllChains) {
    MathBuffers<float, float> m = make_fma(chains, kBlocks);
    require(launch_roof_fma_f32(chains, m.in.data(), kIterations, m.out.data(), kBlocks, ctx.stream));
    ctx.stream.synchronize();
    verify_fma(m, chains, kIterations, 1);
  }
}

std::uint32_t random_word(std::uint64_t i) {
  return mix_bits((static_cast<std::uint64_t>(kRoofSeed) << 40) ^ i);
}

/// Signed byte `i` of `word`.
int signed_byte(std::uint32_t word, int i) { return static_cast<std::int8_t>(word >> (8 * i) & 0xffu); }

MathBuffers<int, int> make_dp4a(int chains, int blocks) {
  std::vector<int> operands(math_threads(blocks) * static_cast<std::size_t>(2 + chains));
  for (std::size_t i = 0; i < operands.size(); ++i) operands[i] = static_cast<int>(random_word(i));
  return {std::move(operands), math_threads(blocks)};
}

void verify_dp4a(const MathBuffers<int, int>& m, int chains, int iterations, std::size_t stride) {
  const std::vector<int> got = m.results();
  for (std::size_t thread = 0; thread < got.size(); thread += stride) {
    const int* mine = &m.operands[thread * static_cast<std::size_t>(2 + chains)];
    long long dots = 0;
    for (int c = 0; c < chains; ++c) {
      for (int b = 0; b < 2; ++b) {
        for (int i = 0; i < 4; ++i) {
          dots += signed_byte(static_cast<std::uint32_t>(mine[2 + c]), i) *
                  signed_byte(static_cast<std::uint32_t>(mine[b]), i);
        }
      }
    }
    const auto expected = static_cast<std::uint32_t>(dots * kDp4aPairs * iterations);
    expect(
        static_cast<std::uint32_t>(got[thread]) == expected,
        "roof_dp4a: thread " + std::to_string(thread) + " is wrong (chains " + std::to_string(chains) + ")");
  }
}

void check_dp4a(Context& ctx) {
  constexpr int kBlocks = 2, kIterations = 3;
  for (const int chains : kAllChains) {
    MathBuffers<int, int> m = make_dp4a(chains, kBlocks);
    require(launch_roof_dp4a(chains, m.in.data(), kIterations, m.out.data(), kBlocks, ctx.stream));
    ctx.stream.synchronize();
    verify_dp4a(m, chains, kIterations, 1);
  }
}

/// Operand matrices of the tensor-core probes, of which every warp takes the set numbered warp % sets.
/// a [sets][2][16][8] words, b [sets][chains][8][8] words.
template <class Out>
struct MmaBuffers {
  int sets, chains;
  std::vector<std::uint32_t> a_host, b_host;
  Buffer<std::uint32_t> a, b;
  Buffer<Out> out;
  MmaBuffers(int set_count, int chain_count, int blocks,
             const std::function<std::uint32_t(std::uint64_t)>& word)
      : sets(set_count),
        chains(chain_count),
        a_host(static_cast<std::size_t>(sets) * 2 * kMmaRows * kMmaWords),
        b_host(static_cast<std::size_t>(sets * chains) * kMmaColumns * kMmaWords),
        a(a_host.size(), "a"),
        b(b_host.size(), "b"),
        out(static_cast<std::size_t>(blocks) * (kMathThreads / 32) * kMmaRows * kMmaColumns, "results") {
    for (std::size_t i = 0; i < a_host.size(); ++i) a_host[i] = word(i);
    for (std::size_t i = 0; i < b_host.size(); ++i) b_host[i] = word(a_host.size() + i);
    a.upload(a_host);
    b.upload(b_host);
    out.fill_bytes(0xFF);
  }
  std::vector<Out> results() const {
    std::vector<Out> host(out.size());
    out.download(host);
    return host;
  }
};

/// Two random halves with magnitudes in [2^-4, 1): no sum of the probe can reach infinity.
std::uint32_t random_halves(std::uint64_t i) {
  const std::uint32_t bits = random_word(i);
  const auto half = [](std::uint32_t b) {
    return (b & 0x83ffu) |
           ((11 + (b >> 10 & 3u)) << 10);  // sign and fraction from b, exponent 11..14 (bias 15)
  };
  return half(bits & 0xffffu) | half(bits >> 16) << 16;
}

/// Two small integers -3..3 as halves: every sum of the check is exact.
std::uint32_t integer_halves(std::uint64_t i) {
  constexpr std::uint32_t kHalf[] = {0xC200, 0xC000, 0xBC00, 0x0000, 0x3C00, 0x4000, 0x4200};
  const std::uint32_t bits = random_word(i);
  return kHalf[bits % 7] | kHalf[bits / 7 % 7] << 16;
}

double half_of(std::uint32_t word, int part) {
  return half_bits_to_float(static_cast<std::uint16_t>(word >> (16 * part) & 0xffffu));
}

/// For every warp, row and column: calls see(index in out, the sum over chains of (A[0] + A[1]) . B[c], the
/// same of absolute values). `product(word of A, word of B)` gives the two sums of one pair of words.
template <class Out, class Product, class See>
void for_each_mma_output(const MmaBuffers<Out>& m, std::size_t warps, const Product& product,
                         const See& see) {
  for (std::size_t warp = 0; warp < warps; ++warp) {
    const std::size_t set = warp % static_cast<std::size_t>(m.sets);
    for (std::size_t row = 0; row < kMmaRows; ++row) {
      for (std::size_t column = 0; column < kMmaColumns; ++column) {
        double value = 0, magnitude = 0;  // float64 holds every sum of the integer cases exactly
        for (std::size_t c = 0; c < static_cast<std::size_t>(m.chains); ++c) {
          for (std::size_t i = 0; i < 2; ++i) {
            for (std::size_t w = 0; w < kMmaWords; ++w) {
              const std::uint32_t a = m.a_host[((set * 2 + i) * kMmaRows + row) * kMmaWords + w];
              const std::uint32_t b =
                  m.b_host[((set * static_cast<std::size_t>(m.chains) + c) * kMmaColumns + column) *
                               kMmaWords +
                           w];
              const auto [v, g] = product(a, b);
              value += v;
              magnitude += g;
            }
          }
        }
        see((warp * kMmaRows + row) * kMmaColumns + column, value, magnitude);
      }
    }
  }
}

/// @param exact the operands are small integers and few: the result must match bit for bit
void verify_mma_f16(const MmaBuffers<float>& m, int iterations, std::size_t warps, bool exact) {
  const std::vector<float> got = m.results();
  const double steps = 2.0 * kMmaPairs * iterations;
  const auto product = [](std::uint32_t a, std::uint32_t b) {
    const double p = half_of(a, 0) * half_of(b, 0), q = half_of(a, 1) * half_of(b, 1);
    return std::pair(p + q, std::fabs(p) + std::fabs(q));
  };
  for_each_mma_output(m, warps, product, [&](std::size_t i, double value, double magnitude) {
    const double expected = value * steps / 2;
    // Products of halves are exact in f32. Each of the 16 additions of a step, and of the last ones over the
    // chains, may lose one unit in the last place (2u): tensor cores cut digits off instead of rounding.
    const double roundings = 2 * (17 * steps + m.chains);
    const double bound = exact ? 0.0 : roundings * kUnitRoundoffF32 * magnitude * steps / 2;
    expect(std::isfinite(got[i]) && std::fabs(got[i] - expected) <= bound,
           "roof_mma_f16: output " + std::to_string(i) + " is " + std::to_string(got[i]) + ", expected " +
               std::to_string(expected) + " within " + std::to_string(bound));
  });
}

void check_mma_f16(Context& ctx) {
  constexpr int kBlocks = 2, kSets = 3, kIterations = 1;
  for (const int chains : kAllChains) {
    for (const bool exact : {true, false}) {
      MmaBuffers<float> m(kSets, chains, kBlocks, exact ? integer_halves : random_halves);
      require(launch_roof_mma_f16(chains, m.a.data(), m.b.data(), kSets, kIterations, m.out.data(), kBlocks,
                                  ctx.stream));
      ctx.stream.synchronize();
      verify_mma_f16(m, kIterations, kBlocks * (kMathThreads / 32), exact);
    }
  }
}

void verify_mma_s8(const MmaBuffers<int>& m, int iterations, std::size_t warps) {
  const std::vector<int> got = m.results();
  const auto product = [](std::uint32_t a, std::uint32_t b) {
    int sum = 0;
    for (int i = 0; i < 4; ++i) sum += signed_byte(a, i) * signed_byte(b, i);
    return std::pair(static_cast<double>(sum), 0.0);
  };
  for_each_mma_output(m, warps, product, [&](std::size_t i, double value, double) {
    const auto expected = static_cast<std::uint32_t>(static_cast<long long>(value) * kMmaPairs * iterations);
    expect(static_cast<std::uint32_t>(got[i]) == expected,
           "roof_mma_s8: output " + std::to_string(i) + " is " + std::to_string(got[i]) + ", expected " +
               std::to_string(static_cast<int>(expected)));
  });
}

void check_mma_s8(Context& ctx) {
  constexpr int kBlocks = 2, kSets = 3, kIterations = 1;
  for (const int chains : kAllChains) {
    MmaBuffers<int> m(kSets, chains, kBlocks, random_word);
    require(launch_roof_mma_s8(chains, m.a.data(), m.b.data(), kSets, kIterations, m.out.data(), kBlocks,
                               ctx.stream));
    ctx.stream.synchronize();
    verify_mma_s8(m, kIterations, kBlocks * (kMathThreads / 32));
  }
}

unsigned read_word(const Buffer<unsigned>& buffer) {
  unsigned value = 0;
  buffer.download(std::span(&value, 1));
  return value;
}

constexpr int kCheckedKernels = 20;

void check_launch(Context& ctx) {
  Buffer<unsigned> counter(1, "counter");
  counter.fill_bytes(0);
  for (int i = 0; i < kCheckedKernels; ++i) require(launch_latency_launch(counter.data(), 3, 32, ctx.stream));
  ctx.stream.synchronize();
  expect(read_word(counter) == kCheckedKernels,
         "latency_launch: the kernels of a stream did not run in order");
}

void check_graph_node(Context& ctx) {
  Buffer<unsigned> counter(1, "counter");
  counter.fill_bytes(0);
  Graph chain = capture_empty_chain(counter.data(), kCheckedKernels, 3, 32, ctx.stream);
  chain.launch(ctx.stream);
  chain.launch(ctx.stream);
  ctx.stream.synchronize();
  expect(read_word(counter) == 2 * kCheckedKernels,
         "latency_graph_node: two replays did not run every node once");
}

#if defined(__CUDACC__)
Graph capture_pdl_chain(unsigned* counter, int nodes, int blocks, int threads, Stream& stream) {
  return Graph::capture(stream, [&](Stream& s) {
    for (int i = 0; i < nodes; ++i) {
      if (Status status = launch_latency_pdl(counter, blocks, threads, s); !status.ok()) return status;
    }
    return Status{};
  });
}

void check_pdl(Context& ctx) {
  Buffer<unsigned> counter(1, "counter");
  counter.fill_bytes(0);
  for (int i = 0; i < kCheckedKernels; ++i) require(launch_latency_pdl(counter.data(), 3, 32, ctx.stream));
  Graph chain = capture_pdl_chain(counter.data(), kCheckedKernels, 3, 32, ctx.stream);
  chain.launch(ctx.stream);
  ctx.stream.synchronize();
  expect(read_word(counter) == 2 * kCheckedKernels,
         "latency_pdl: a kernel ran before the results of the one before it could be seen");
}

void check_grid_barrier(Context& ctx) {
  constexpr int kRounds = 50;
  for (const bool groups : {false, true}) {
    for (const int blocks : {1, 3, ctx.device.sms}) {
      Buffer<unsigned> arrived(1, "arrived"), faults(1, "faults"),
          flag(static_cast<std::size_t>(blocks), "flag");
      for (Buffer<unsigned>* b : {&arrived, &faults, &flag}) b->fill_bytes(0);
      require(launch_latency_grid_barrier(groups, arrived.data(), kRounds, flag.data(), faults.data(), blocks,
                                          64, ctx.stream));
      ctx.stream.synchronize();
      expect(read_word(faults) == 0, "latency_grid_barrier: a block passed the barrier early");
      if (!groups) {
        expect(read_word(arrived) == static_cast<unsigned>(2 * kRounds * blocks),
               "latency_grid_barrier: wrong number of arrivals");
      }
    }
  }
}

// ----------------------------------------------------------------------------------------------------------
// Measurements on the GPU.

/// Bytes of loads that one multiprocessor has in flight when every resident thread has issued all of its own.
template <class Kernel>
std::size_t bytes_in_flight_per_sm(Kernel* kernel, int loads, int blocks_per_sm) {
  int resident = 0;
  LADDER_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kStreamThreads, 0));
  return static_cast<std::size_t>(std::min(resident, blocks_per_sm)) * stream_tile_bytes(loads);
}

std::size_t read_bytes_in_flight(int loads, int blocks_per_sm) {
  switch (loads) {
    case 1:
      return bytes_in_flight_per_sm(roof_read<1>, loads, blocks_per_sm);
    case 2:
      return bytes_in_flight_per_sm(roof_read<2>, loads, blocks_per_sm);
    case 4:
      return bytes_in_flight_per_sm(roof_read<4>, loads, blocks_per_sm);
    default:
      return bytes_in_flight_per_sm(roof_read<8>, loads, blocks_per_sm);
  }
}

/// Smaller buffers are partly still in L2 when they are read again.
std::string too_small_for_memory(std::size_t bytes, const DeviceInfo& device) {
  if (bytes >= 4 * device.l2_bytes) return "";
  return "the buffer is smaller than four L2 caches, so part of it came from there";
}

void measure_read(Sweep& sweep) {
  const std::size_t all = roof_buffer_bytes();
  Buffer<float> buffer(all / sizeof(float), "words");
  fill(buffer.data(), buffer.size(), FillKind::uniform, kRoofSeed, sweep.stream());
  const auto* words = reinterpret_cast<const uint4*>(buffer.data());
  const auto point = [&](int loads, int blocks_per_sm, std::size_t bytes) {
    const int blocks = blocks_per_sm * sweep.device().sms;
    const TimeStats t = time_back_to_back(
        [&](Stream& s) { return launch_roof_read(loads, words, bytes, nullptr, blocks, s); }, sweep.stream(),
        sweep.options());
    sweep.add(Params()
                  .add("loads", loads)
                  .add("blocks_per_sm", blocks_per_sm)
                  .add_bytes("bytes_in_flight_per_sm", read_bytes_in_flight(loads, blocks_per_sm))
                  .add_bytes("buffer_bytes", bytes),
              Outcome{t, static_cast<double>(bytes), {}, too_small_for_memory(bytes, sweep.device())});
  };
  for (const int loads : kAllLoads) {
    for (const int blocks_per_sm : {1, 2, 4, 8, 16, 32, 64}) point(loads, blocks_per_sm, all);
  }
  // How large must a matrix be before it can reach the roof at all? With all blocks resident from the start.
  constexpr int kLoads = 4, kBlocksPerSm = 8;
  for (std::size_t bytes = 16 * kMiB; bytes < all; bytes *= 2) point(kLoads, kBlocksPerSm, bytes);

  Buffer<unsigned> sum(1, "sum");
  sum.fill_bytes(0);
  require(
      launch_roof_read(kLoads, words, all, sum.data(), kBlocksPerSm * sweep.device().sms, sweep.stream()));
  sweep.stream().synchronize();
  expect(read_word(sum) == expected_word_sum(buffer.size()),
         "roof_read: wrong sum over the whole timed buffer");
}

/// The sum of all words of a buffer on the device, by roof_read, which has been checked by then.
unsigned word_sum(const Buffer<float>& buffer, Stream& stream) {
  Buffer<unsigned> sum(1, "sum");
  sum.fill_bytes(0);
  require(launch_roof_read(4, reinterpret_cast<const uint4*>(buffer.data()), buffer.bytes(), sum.data(), 1024,
                           stream));
  stream.synchronize();
  return read_word(sum);
}

void measure_copy(Sweep& sweep) {
  const std::size_t bytes = roof_buffer_bytes() / 2 / stream_tile_bytes(8) * stream_tile_bytes(8);
  Buffer<float> in(bytes / sizeof(float), "in"), out(bytes / sizeof(float), "out");
  fill(in.data(), in.size(), FillKind::uniform, kRoofSeed, sweep.stream());
  out.fill_bytes(0xFF);
  for (const int loads : kAllLoads) {
    for (const int blocks_per_sm : {4, 8, 16, 32, 64}) {
      const TimeStats t = time_back_to_back(
          [&](Stream& s) {
            return launch_roof_copy(loads, reinterpret_cast<const uint4*>(in.data()),
                                    reinterpret_cast<uint4*>(out.data()), bytes,
                                    blocks_per_sm * sweep.device().sms, s);
          },
          sweep.stream(), sweep.options());
      sweep.add(
          Params().add("loads", loads).add("blocks_per_sm", blocks_per_sm).add_bytes("buffer_bytes", bytes),
          Outcome{t, 2.0 * static_cast<double>(bytes), {}, too_small_for_memory(bytes, sweep.device())});
    }
  }
  expect(word_sum(out, sweep.stream()) == word_sum(in, sweep.stream()), "roof_copy: the timed copy differs");
}

void measure_write(Sweep& sweep) {
  const std::size_t bytes = roof_buffer_bytes();
  Buffer<std::uint32_t> out(bytes / sizeof(std::uint32_t), "out");
  out.fill_bytes(0xFF);
  for (const int loads : kAllLoads) {
    for (const int blocks_per_sm : {4, 8, 16, 32, 64}) {
      const TimeStats t = time_back_to_back(
          [&](Stream& s) {
            return launch_roof_write(loads, reinterpret_cast<uint4*>(out.data()), bytes,
                                     blocks_per_sm * sweep.device().sms, s);
          },
          sweep.stream(), sweep.options());
      sweep.add(
          Params().add("stores", loads).add("blocks_per_sm", blocks_per_sm).add_bytes("buffer_bytes", bytes),
          Outcome{t, static_cast<double>(bytes), {}, too_small_for_memory(bytes, sweep.device())});
    }
  }
  std::vector<std::uint32_t> got(std::min<std::size_t>(out.size(), 64 * kMiB / 4));
  out.download(got);
  expect(holds_written_words(got), "roof_write: a word of the timed buffer is wrong");
}

void measure_l2_read(Sweep& sweep) {
  const std::size_t l2 = sweep.device().l2_bytes;
  const std::size_t tile = stream_tile_bytes(8);
  const std::size_t largest = std::max(tile, l2 / tile * tile);
  Buffer<float> buffer(largest / sizeof(float), "words");
  fill(buffer.data(), buffer.size(), FillKind::uniform, kRoofSeed, sweep.stream());
  const auto* words = reinterpret_cast<const uint4*>(buffer.data());
  Buffer<unsigned> sum(1, "sum");
  const auto point = [&](int loads, int blocks_per_sm, std::size_t bytes) {
    const int blocks = blocks_per_sm * sweep.device().sms;
    const int passes = static_cast<int>(std::max<std::size_t>(8, (std::size_t{4} << 30) / bytes));
    const TimeStats t = time_back_to_back(
        [&](Stream& s) { return launch_roof_l2_read(loads, words, bytes, passes, nullptr, blocks, s); },
        sweep.stream(), sweep.options());
    sum.fill_bytes(0);
    require(launch_roof_l2_read(loads, words, bytes, passes, sum.data(), blocks, sweep.stream()));
    sweep.stream().synchronize();
    expect(read_word(sum) == static_cast<unsigned>(passes) * expected_word_sum(bytes / sizeof(float)),
           "roof_l2_read: wrong sum over the timed buffer");
    sweep.add(
        Params()
            .add("loads", loads)
            .add("blocks_per_sm", blocks_per_sm)
            .add_bytes("buffer_bytes", bytes)
            .add("passes", passes),
        Outcome{
            t,
            static_cast<double>(passes) * static_cast<double>(bytes),
            {},
            bytes <= l2 / 2 ? "" : "the buffer is larger than half of L2, so part of it came from memory"});
  };
  const auto fraction = [&](std::size_t part, std::size_t of) {
    return std::max(tile, l2 * part / of / tile * tile);
  };
  for (const int loads : kAllLoads) {
    for (const int blocks_per_sm : {4, 8}) point(loads, blocks_per_sm, fraction(1, 8));
  }
  for (const std::size_t sixteenths : {1, 4, 6, 8, 10, 12, 14, 16}) point(4, 8, fraction(sixteenths, 16));
}

constexpr double kMathTargetNs = 2e6;
constexpr int kMathBlocksPerSm[] = {1, 2, 4, 8};

Params math_params(int chains, int blocks_per_sm) {
  return Params().add("chains", chains).add("warps_per_sm", blocks_per_sm * (kMathThreads / 32));
}

/// Times `run(iterations, stream)` at an iteration count that lasts long enough, then checks what it left
/// behind.
template <class Run, class Operations, class Verify>
void math_point(Sweep& sweep, int chains, int blocks_per_sm, const char* unit, const Run& run,
                const Operations& operations, const Verify& verify) {
  const int iterations = calibrate_iterations(run, sweep.stream(), kMathTargetNs);
  const TimeStats t =
      time_back_to_back([&](Stream& s) { return run(iterations, s); }, sweep.stream(), sweep.options());
  verify(iterations);
  sweep.add(math_params(chains, blocks_per_sm), Outcome{t, 0, {operations(iterations), unit}, ""});
}

void measure_fma(Sweep& sweep) {
  for (const int chains : kAllChains) {
    for (const int blocks_per_sm : kMathBlocksPerSm) {
      const int blocks = blocks_per_sm * sweep.device().sms;
      MathBuffers<float, float> m = make_fma(chains, blocks);
      math_point(
          sweep, chains, blocks_per_sm, "flop",
          [&](int n, Stream& s) {
            return launch_roof_fma_f32(chains, m.in.data(), n, m.out.data(), blocks, s);
          },
          [&](int n) { return roof_fma_flop(chains, n, blocks); },
          [&](int n) { verify_fma(m, chains, n, 1009); });
    }
  }
}

void measure_dp4a(Sweep& sweep) {
  for (const int chains : kAllChains) {
    for (const int blocks_per_sm : kMathBlocksPerSm) {
      const int blocks = blocks_per_sm * sweep.device().sms;
      MathBuffers<int, int> m = make_dp4a(chains, blocks);
      math_point(
          sweep, chains, blocks_per_sm, "int8_op",
          [&](int n, Stream& s) { return launch_roof_dp4a(chains, m.in.data(), n, m.out.data(), blocks, s); },
          [&](int n) { return roof_dp4a_ops(chains, n, blocks); },
          [&](int n) { verify_dp4a(m, chains, n, 1009); });
    }
  }
}

constexpr int kMmaSets = 61;  ///< different operand matrices; a prime, so that neighbouring blocks differ

void measure_mma_f16(Sweep& sweep) {
  for (const int chains : kAllChains) {
    for (const int blocks_per_sm : kMathBlocksPerSm) {
      const int blocks = blocks_per_sm * sweep.device().sms;
      MmaBuffers<float> m(kMmaSets, chains, blocks, random_halves);
      math_point(
          sweep, chains, blocks_per_sm, "flop",
          [&](int n, Stream& s) {
            return launch_roof_mma_f16(chains, m.a.data(), m.b.data(), kMmaSets, n, m.out.data(), blocks, s);
          },
          [&](int n) { return roof_mma_f16_flop(chains, n, blocks); },
          [&](int n) { verify_mma_f16(m, n, kMmaSets, false); });
    }
  }
}

void measure_mma_s8(Sweep& sweep) {
  for (const int chains : kAllChains) {
    for (const int blocks_per_sm : kMathBlocksPerSm) {
      const int blocks = blocks_per_sm * sweep.device().sms;
      MmaBuffers<int> m(kMmaSets, chains, blocks, random_word);
      math_point(
          sweep, chains, blocks_per_sm, "int8_op",
          [&](int n, Stream& s) {
            return launch_roof_mma_s8(chains, m.a.data(), m.b.data(), kMmaSets, n, m.out.data(), blocks, s);
          },
          [&](int n) { return roof_mma_s8_ops(chains, n, blocks); },
          [&](int n) { verify_mma_s8(m, n, kMmaSets); });
    }
  }
}

#if defined(__CUDACC__)
void check_wgmma_f16(Context& ctx) { detail::check_wgmma_roof(ctx.stream); }

void measure_wgmma_f16(Sweep& sweep) {
  const int blocks = sweep.device().sms;  // shared memory and registers are for one block an SM
  int iterations = 0;
  const TimeStats t = detail::time_wgmma_roof(blocks, sweep.stream(), sweep.options(), &iterations);
  sweep.add(Params().add("warps_per_sm", 8),
            Outcome{t, 0, {roof_wgmma_f16_flop(iterations, blocks), "flop"}, ""});
}
#endif

/// Time of one of `count` things that `start` sets off on the stream.
template <class Start>
TimeStats time_many(Sweep& sweep, int count, const Start& start) {
  start();  // the first run loads the code
  sweep.stream().synchronize();
  Timer timer;
  return sample(
      [&] {
        timer.start(sweep.stream());
        start();
        timer.stop(sweep.stream());
        return timer.elapsed_ns() / count;
      },
      sweep.options());
}

constexpr int kLatencyThreads = 256;

void measure_launch(Sweep& sweep) {
  constexpr int kLaunches = 1000;
  for (const int blocks : {1, sweep.device().sms}) {
    const TimeStats t = time_many(sweep, kLaunches, [&] {
      for (int i = 0; i < kLaunches; ++i)
        require(launch_latency_launch(nullptr, blocks, kLatencyThreads, sweep.stream()));
    });
    sweep.add(Params().add("from", "stream").add("blocks", blocks), Outcome{t, 0, {}, ""});
  }
  HostSampler round_trip(
      [&](int) {
        require(launch_latency_launch(nullptr, 1, kLatencyThreads, sweep.stream()));
        sweep.stream().synchronize();
      },
      1);
  sweep.add(Params().add("from", "cpu_and_back").add("blocks", 1),
            Outcome{sample([&] { return round_trip.once(); }, sweep.options()), 0, {}, ""});
}

constexpr int kNodes = 256;

/// `dependent_word` 1: each kernel reads a word that the one before it wrote, as the kernels of a model do.
template <class Capture>
void measure_chain(Sweep& sweep, const Capture& capture) {
  Buffer<unsigned> counter(1, "counter");
  counter.fill_bytes(0);
  for (const int dependent : {0, 1}) {
    for (const int blocks : {1, sweep.device().sms}) {
      Graph chain =
          capture(dependent == 1 ? counter.data() : nullptr, kNodes, blocks, kLatencyThreads, sweep.stream());
      const TimeStats t = time_many(sweep, kNodes, [&] { chain.launch(sweep.stream()); });
      sweep.add(Params().add("nodes", kNodes).add("blocks", blocks).add("dependent_word", dependent),
                Outcome{t, 0, {}, ""});
    }
  }
}

void measure_graph_node(Sweep& sweep) { measure_chain(sweep, capture_empty_chain); }
void measure_pdl(Sweep& sweep) { measure_chain(sweep, capture_pdl_chain); }

void measure_grid_barrier(Sweep& sweep) {
  constexpr int kRounds = 1000;
  Buffer<unsigned> arrived(1, "arrived");
  for (const bool groups : {false, true}) {
    for (const int blocks_per_sm : {1, 2, 4}) {
      const int blocks = blocks_per_sm * sweep.device().sms;
      Timer timer;
      const auto once = [&] {
        arrived.fill_bytes(0);
        timer.start(sweep.stream());
        require(launch_latency_grid_barrier(groups, arrived.data(), kRounds, nullptr, nullptr, blocks,
                                            kLatencyThreads, sweep.stream()));
        timer.stop(sweep.stream());
        return timer.elapsed_ns() / kRounds;
      };
      (void)once();
      sweep.add(Params().add("barrier", groups ? "cooperative_groups" : "atomic").add("blocks", blocks),
                Outcome{sample(once, sweep.options()), 0, {}, ""});
    }
  }
}
#endif  // __CUDACC__

#if !defined(__CUDACC__)
// ----------------------------------------------------------------------------------------------------------
// The CPU's probes.

/// Word counts with every kind of remainder, and around the length of an unrolled loop.
constexpr std::size_t kCheckedWords[] = {1, 3, 16, 63, 64, 65, 1021, 4096, 100003};

/// Stands behind every output: it must not change.
constexpr std::uint32_t kGuard = 0xA5A5A5A5u;

template <class Body>
void for_each_isa(const Body& body) {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    cpu::force_isa(isa);
    try {
      body(" (" + std::string(cpu::name(isa)) + ")");
    } catch (...) {
      cpu::force_isa(std::nullopt);
      throw;
    }
  }
  cpu::force_isa(std::nullopt);
}

std::vector<cpu::Stores> store_kinds() {
  if (cpu::has_streaming_stores()) return {cpu::Stores::cached, cpu::Stores::streaming};
  return {cpu::Stores::cached};
}

void check_cpu_read(Context& ctx) {
  std::vector<std::uint32_t> words(100003 + 64);
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = random_word(i);
  for_each_isa([&](const std::string& where) {
    for (const std::size_t count : kCheckedWords) {
      std::uint32_t expected = 0;
      for (std::size_t i = 0; i < count; ++i) expected += words[i];
      expect(cpu::roof_read(words.data(), count, *ctx.pool) == expected,
             "roof_read: wrong sum of " + std::to_string(count) + " words" + where);
    }
  });
}

void check_cpu_copy(Context& ctx) {
  std::vector<std::uint32_t> in(100003);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = random_word(i);
  for_each_isa([&](const std::string& where) {
    for (const cpu::Stores stores : store_kinds()) {
      for (const std::size_t count : kCheckedWords) {
        std::vector<std::uint32_t> out(count + 64, kGuard);
        cpu::roof_copy(in.data(), out.data(), count, stores, *ctx.pool);
        expect(std::equal(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(count), in.begin()),
               "roof_copy: the copy of " + std::to_string(count) + " words differs" + where);
        expect(std::all_of(out.begin() + static_cast<std::ptrdiff_t>(count), out.end(),
                           [](std::uint32_t w) { return w == kGuard; }),
               "roof_copy: wrote outside its buffer" + where);
      }
    }
  });
}

void check_cpu_write(Context& ctx) {
  for_each_isa([&](const std::string& where) {
    for (const cpu::Stores stores : store_kinds()) {
      for (const std::size_t count : kCheckedWords) {
        std::vector<std::uint32_t> out(count + 64, kGuard);
        cpu::roof_write(out.data(), count, kRoofSeed, stores, *ctx.pool);
        for (std::size_t i = 0; i < out.size(); ++i) {
          expect(
              out[i] == (i < count ? cpu::roof_write_word(kRoofSeed, i) : kGuard),
              "roof_write: word " + std::to_string(i) + " of " + std::to_string(count) + " is wrong" + where);
        }
      }
    }
  });
}

void verify_cpu_fma(std::span<const float> operands, std::span<const float> out, int pairs,
                    const std::string& where) {
  const auto values = static_cast<std::size_t>(cpu::fma_values());
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto [value, bound] = expected_fma({operands[0], operands[1], operands[2], operands[3]},
                                             operands[4 + i % values], pairs, 2);
    expect(std::isfinite(out[i]) && std::fabs(out[i] - value) <= bound,
           "roof_fma_f32: value " + std::to_string(i) + " is " + std::to_string(out[i]) + ", expected " +
               std::to_string(value) + where);
  }
}

void check_cpu_fma(Context& ctx) {
  for_each_isa([&](const std::string& where) {
    const std::vector<float> operands = make_fma_operands(1, cpu::fma_values());
    for (const int pairs : {1, 2, 7}) {
      std::vector<float> out(static_cast<std::size_t>(ctx.pool->size() * cpu::fma_values()), NAN);
      cpu::roof_fma_f32(operands, pairs, out, *ctx.pool);
      verify_cpu_fma(operands, out, pairs, where);
    }
  });
}

/// Unsigned bytes 0..127 against signed bytes: the range in which every instruction agrees.
std::vector<std::uint32_t> make_int8_operands() {
  std::vector<std::uint32_t> operands(static_cast<std::size_t>(1 + cpu::int8_values()));
  for (std::size_t i = 0; i < operands.size(); ++i)
    operands[i] = random_word(i) & (i == 0 ? 0xffffffffu : 0x7f7f7f7fu);
  return operands;
}

void verify_cpu_int8(std::span<const std::uint32_t> operands, std::span<const std::uint32_t> out, int steps,
                     const std::string& where) {
  const auto values = static_cast<std::size_t>(cpu::int8_values());
  for (std::size_t i = 0; i < out.size(); ++i) {
    int dot = 0;
    for (int b = 0; b < 4; ++b) dot += signed_byte(operands[1 + i % values], b) * signed_byte(operands[0], b);
    expect(out[i] == static_cast<std::uint32_t>(static_cast<long long>(dot) * steps),
           "roof_int8_dot: value " + std::to_string(i) + " is wrong" + where);
  }
}

void check_cpu_int8(Context& ctx) {
  for_each_isa([&](const std::string& where) {
    const std::vector<std::uint32_t> operands = make_int8_operands();
    for (const int steps : {1, 2, 7}) {
      std::vector<std::uint32_t> out(static_cast<std::size_t>(ctx.pool->size() * cpu::int8_values()),
                                     0xffffffffu);
      cpu::roof_int8_dot(operands, steps, out, *ctx.pool);
      verify_cpu_int8(operands, out, steps, where);
    }
  });
}

/// 1, 2, 4, ... and the pool's own size: how many threads does it take?
std::vector<int> thread_counts(const Context& ctx) {
  std::vector<int> counts;
  for (int n = 1; n < ctx.pool->size(); n *= 2) counts.push_back(n);
  counts.push_back(ctx.pool->size());
  return counts;
}

/// Runs `body(pool)` with pools of every thread count.
template <class Body>
void for_each_thread_count(Sweep& sweep, const Body& body) {
  for (const int threads : thread_counts(sweep.ctx())) {
    if (threads == sweep.ctx().pool->size()) {
      body(*sweep.ctx().pool);
    } else {
      cpu::ThreadPool pool(threads);
      body(pool);
    }
  }
}

TimeStats time_host(Sweep& sweep, const std::function<void()>& run) {
  HostSampler sampler([&](int) { run(); }, 1);
  return sample([&] { return sampler.once(); }, sweep.options());
}

std::string too_small_for_host_memory(std::size_t bytes, const DeviceInfo& device) {
  if (bytes >= 4 * device.l2_bytes) return "";
  return "the buffer is smaller than four last-level caches, so part of it came from there";
}

Params cpu_params(const cpu::ThreadPool& pool) {
  return Params().add("threads", pool.size()).add("isa", std::string(cpu::name(cpu::isa())).c_str());
}

void measure_cpu_read(Sweep& sweep) {
  const std::size_t all = cpu_roof_bytes(sweep.device());
  Buffer<std::uint32_t> words(all / sizeof(std::uint32_t), "words");
  cpu::roof_write(words.data(), words.size(), kRoofSeed, cpu::Stores::cached, *sweep.ctx().pool);
  std::uint32_t sum = 0;
  const auto point = [&](cpu::ThreadPool& pool, std::size_t bytes) {
    const TimeStats t =
        time_host(sweep, [&] { sum = cpu::roof_read(words.data(), bytes / sizeof(std::uint32_t), pool); });
    sweep.add(cpu_params(pool).add_bytes("buffer_bytes", bytes),
              Outcome{t, static_cast<double>(bytes), {}, too_small_for_host_memory(bytes, sweep.device())});
  };
  for_each_thread_count(sweep, [&](cpu::ThreadPool& pool) { point(pool, all); });
  std::uint32_t expected = 0;
  for (std::size_t i = 0; i < words.size(); ++i) expected += cpu::roof_write_word(kRoofSeed, i);
  expect(sum == expected, "roof_read: wrong sum over the whole timed buffer");
  for (std::size_t bytes = 64 * 1024; bytes < all; bytes *= 4) point(*sweep.ctx().pool, bytes);
}

void measure_cpu_copy(Sweep& sweep) {
  const std::size_t bytes = cpu_roof_bytes(sweep.device()) / 2 / 64 * 64;
  const std::size_t count = bytes / sizeof(std::uint32_t);
  Buffer<std::uint32_t> in(count, "in"), out(count, "out");
  cpu::roof_write(in.data(), count, kRoofSeed, cpu::Stores::cached, *sweep.ctx().pool);
  for (const cpu::Stores stores : store_kinds()) {
    // Poisoned before each kind, and by all threads, so that every page lies near the thread that uses it.
    cpu::roof_write(out.data(), count, kRoofSeed + 1, cpu::Stores::cached, *sweep.ctx().pool);
    for_each_thread_count(sweep, [&](cpu::ThreadPool& pool) {
      const TimeStats t =
          time_host(sweep, [&] { cpu::roof_copy(in.data(), out.data(), count, stores, pool); });
      sweep.add(
          cpu_params(pool).add("stores", cpu::name(stores)).add_bytes("buffer_bytes", bytes),
          Outcome{t, 2.0 * static_cast<double>(bytes), {}, too_small_for_host_memory(bytes, sweep.device())});
    });
    expect(std::memcmp(in.data(), out.data(), bytes) == 0, "roof_copy: the timed copy differs");
  }
}

void measure_cpu_write(Sweep& sweep) {
  const std::size_t bytes = cpu_roof_bytes(sweep.device());
  const std::size_t count = bytes / sizeof(std::uint32_t);
  Buffer<std::uint32_t> out(count, "out");
  for (const cpu::Stores stores : store_kinds()) {
    cpu::roof_write(out.data(), count, kRoofSeed + 1, cpu::Stores::cached, *sweep.ctx().pool);
    for_each_thread_count(sweep, [&](cpu::ThreadPool& pool) {
      const TimeStats t =
          time_host(sweep, [&] { cpu::roof_write(out.data(), count, kRoofSeed, stores, pool); });
      sweep.add(cpu_params(pool).add("stores", cpu::name(stores)).add_bytes("buffer_bytes", bytes),
                Outcome{t, static_cast<double>(bytes), {}, too_small_for_host_memory(bytes, sweep.device())});
    });
    for (std::size_t i = 0; i < count; i += 61) {
      expect(out.data()[i] == cpu::roof_write_word(kRoofSeed, i),
             "roof_write: a word of the timed buffer is wrong");
    }
  }
}

void measure_cpu_fma(Sweep& sweep) {
  constexpr int kPairs = 400000;
  const std::vector<float> operands = make_fma_operands(1, cpu::fma_values());
  for_each_thread_count(sweep, [&](cpu::ThreadPool& pool) {
    std::vector<float> out(static_cast<std::size_t>(pool.size() * cpu::fma_values()), NAN);
    const TimeStats t = time_host(sweep, [&] { cpu::roof_fma_f32(operands, kPairs, out, pool); });
    verify_cpu_fma(operands, out, kPairs, "");
    sweep.add(cpu_params(pool), Outcome{t, 0, {cpu::roof_fma_flop(kPairs, pool.size()), "flop"}, ""});
  });
}

void measure_cpu_int8(Sweep& sweep) {
  constexpr int kSteps = 800000;
  const std::vector<std::uint32_t> operands = make_int8_operands();
  for_each_thread_count(sweep, [&](cpu::ThreadPool& pool) {
    std::vector<std::uint32_t> out(static_cast<std::size_t>(pool.size() * cpu::int8_values()), 0xffffffffu);
    const TimeStats t = time_host(sweep, [&] { cpu::roof_int8_dot(operands, kSteps, out, pool); });
    verify_cpu_int8(operands, out, kSteps, "");
    sweep.add(cpu_params(pool).add("instruction", cpu::int8_instruction()),
              Outcome{t, 0, {cpu::roof_int8_ops(kSteps, pool.size()), "int8_op"}, ""});
  });
}
#endif  // !__CUDACC__

// ----------------------------------------------------------------------------------------------------------
// The table of probes, and main.

/// One ceiling. An empty function means that this build cannot do it.
struct Probe {
  std::string id;
  std::string title;
  std::string source;  ///< file with the anchor of that name
  std::function<Status(const DeviceInfo&)> supported;
  std::function<void(Context&)> check_device;
  std::function<void(Sweep&)> measure_device;
  std::function<void(Context&)> check_cpu;
  std::function<void(Sweep&)> measure_cpu;
  bool on_device = true, on_cpu = false;  ///< what it is for, whatever this build can do
};

#if defined(__CUDACC__)
#define LADDER_GPU(function) function
#define LADDER_CPU(function) nullptr
#else
#define LADDER_GPU(function) nullptr
#define LADDER_CPU(function) function
#endif

std::vector<Probe> probes() {
  const auto any = [](const DeviceInfo&) { return Status{}; };
  const auto tensor_cores = [](const DeviceInfo& d) {
    if (d.executor != Executor::gpu || d.cc_major >= 8) return Status{};
    return Status::error(
        "these tensor-core instructions need compute capability 8.0 or later; this device has " +
        std::to_string(d.cc_major) + "." + std::to_string(d.cc_minor));
  };
  return {
      {"roof_read", "read a large buffer once", "kernels/roofs/roof_read.cuh", any, check_read,
       LADDER_GPU(measure_read), LADDER_CPU(check_cpu_read), LADDER_CPU(measure_cpu_read), true, true},
      {"roof_copy", "copy a large buffer, bytes read plus bytes written", "kernels/roofs/roof_copy.cuh", any,
       check_copy, LADDER_GPU(measure_copy), LADDER_CPU(check_cpu_copy), LADDER_CPU(measure_cpu_copy), true,
       true},
      {"roof_write", "write a large buffer once", "kernels/roofs/roof_write.cuh", any, check_write,
       LADDER_GPU(measure_write), LADDER_CPU(check_cpu_write), LADDER_CPU(measure_cpu_write), true, true},
      {"roof_l2_read", "read a buffer that fits in L2, many times", "kernels/roofs/roof_l2_read.cuh", any,
       check_l2_read, LADDER_GPU(measure_l2_read), nullptr, nullptr, true, false},
      {"roof_fma_f32", "f32 fused multiply-adds in registers", "kernels/roofs/roof_fma_f32.cuh", any,
       check_fma, LADDER_GPU(measure_fma), LADDER_CPU(check_cpu_fma), LADDER_CPU(measure_cpu_fma), true,
       true},
      {"roof_dp4a", "dp4a in registers: four int8 products and their sum", "kernels/roofs/roof_dp4a.cuh", any,
       check_dp4a, LADDER_GPU(measure_dp4a), nullptr, nullptr, true, false},
      {"roof_mma_f16", "mma.sync m16n8k16 in registers, f16 products and f32 sums",
       "kernels/roofs/roof_mma_f16.cuh", tensor_cores, check_mma_f16, LADDER_GPU(measure_mma_f16), nullptr,
       nullptr, true, false},
      {"roof_mma_s8", "mma.sync m16n8k32 in registers, int8 products and int32 sums",
       "kernels/roofs/roof_mma_s8.cuh", tensor_cores, check_mma_s8, LADDER_GPU(measure_mma_s8), nullptr,
       nullptr, true, false},
      {"roof_wgmma_f16", "wgmma m64n256k16 on shared memory, f16 products and f32 sums",
       "kernels/roofs/roof_wgmma_f16.cuh", supported_roof_wgmma_f16, LADDER_GPU(check_wgmma_f16),
       LADDER_GPU(measure_wgmma_f16), nullptr, nullptr, true, false},
      {"roof_int8_dot", "int8 dot products in registers", "kernels/cpu/roofs.cpp", any, nullptr, nullptr,
       LADDER_CPU(check_cpu_int8), LADDER_CPU(measure_cpu_int8), false, true},
      {"latency_launch", "one empty kernel, launched by the CPU", "kernels/roofs/latency_launch.cuh", any,
       check_launch, LADDER_GPU(measure_launch), nullptr, nullptr, true, false},
      {"latency_graph_node", "one empty kernel in a replayed graph", "kernels/roofs/latency_graph_node.cuh",
       any, check_graph_node, LADDER_GPU(measure_graph_node), nullptr, nullptr, true, false},
      {"latency_pdl", "one empty kernel in a graph, started before the one before it has ended",
       "kernels/roofs/latency_pdl.cuh", supported_latency_pdl, LADDER_GPU(check_pdl), LADDER_GPU(measure_pdl),
       nullptr, nullptr, true, false},
      {"latency_grid_barrier", "all blocks of one kernel wait for each other",
       "kernels/roofs/latency_grid_barrier.cuh", supported_latency_grid_barrier,
       LADDER_GPU(check_grid_barrier), LADDER_GPU(measure_grid_barrier), nullptr, nullptr, true, false},
  };
}

#undef LADDER_GPU
#undef LADDER_CPU

bool is_for(const Probe& p, Executor e) { return e == Executor::cpu ? p.on_cpu : p.on_device; }

/// Whether `p` can run on this device; the error is one line.
Status runs_here(const Probe& p, const DeviceInfo& device) {
  if (!is_for(p, device.executor)) {
    return Status::error(p.id + " is not a ceiling of the " + to_string(device.executor));
  }
  return p.supported(device);
}

/// Checks one probe on the context's executor; throws CheckFailed.
void check(const Probe& p, Context& ctx) {
  (ctx.executor == Executor::cpu ? p.check_cpu : p.check_device)(ctx);
}

void print_list() {
  for (const Probe& p : probes()) {
    std::string executors;
    for (const Executor e : {kDeviceExecutor, Executor::cpu}) {
      DeviceInfo device;
      device.executor = e;
      device.cc_major = 9;  // what the kind of executor can do at best; --rung says what this one can
#if defined(__CUDACC__)
      if (e == Executor::cpu) continue;
#endif
      if (!runs_here(p, device).ok()) continue;
      executors += (executors.empty() ? "" : ", ") + json_quote(to_string(e));
    }
    if (executors.empty()) continue;
    std::printf("%s\n", JsonObject()
                            .add("rung", p.id)
                            .add("chapter", "00-roofs")
                            .add("title", p.title)
                            .raw("executors", "[" + executors + "]")
                            .add("source", p.source)
                            .str()
                            .c_str());
  }
}

int run(const Options& o) {
  const std::vector<Probe> all = probes();
  std::vector<const Probe*> chosen;
  for (const Probe& p : all) {
    if (o.rungs.empty() || std::find(o.rungs.begin(), o.rungs.end(), p.id) != o.rungs.end())
      chosen.push_back(&p);
  }
  for (const std::string& id : o.rungs) {
    std::string known;
    bool found = false;
    for (const Probe& p : all) {
      found = found || p.id == id;
      known += (known.empty() ? "" : ", ") + p.id;
    }
    if (!found) throw UsageError("unknown rung '" + id + "'; this chapter has: " + known);
  }
  if (!o.layer_names.empty() || o.od || !o.nts.empty() || !o.modes.empty() || !o.compare_a.empty()) {
    throw UsageError(
        "chapter 00 measures ceilings, which have no matmul shape: --layer, --od, --id, --nt, --mode and "
        "--compare do not apply");
  }
  Context ctx = make_context(o, true);
  for (const Probe* p : chosen) {
    if (const Status s = runs_here(*p, ctx.device); !s.ok() && !o.rungs.empty())
      throw UsageError(s.message());
  }
  RecordSink sink(o.json_path);
  FILE* f = sink.table();
  std::fprintf(f, "00-roofs on %s (%s)\n", ctx.device.name.c_str(), to_string(ctx.executor));
  const bool timed = !o.check_only && ctx.executor != Executor::emulator;
  int failures = 0;
  for (const Probe* p : chosen) {
    if (const Status s = runs_here(*p, ctx.device); !s.ok()) {
      if (is_for(*p, ctx.executor))
        std::fprintf(f, "%-21s not run: %s\n", p->id.c_str(), s.message().c_str());
      continue;
    }
    try {
      check(*p, ctx);
      if (!timed) {
        std::fprintf(f, "%-21s check ok\n", p->id.c_str());
        continue;
      }
      Sweep sweep(p->id, ctx, o.measure);
      (ctx.executor == Executor::cpu ? p->measure_cpu : p->measure_device)(sweep);
      sweep.finish(p->title.c_str(), sink);
    } catch (const CheckFailed& e) {
      ++failures;
      std::fprintf(f, "%-21s CHECK FAILED, nothing recorded: %s\n", p->id.c_str(), e.what());
    }
  }
  if (failures > 0) std::fprintf(f, "%d check(s) failed\n", failures);
  return failures == 0 ? 0 : 1;
}

int main_of_chapter(int argc, char** argv) {
  try {
    const std::vector<std::string> args(argv + 1, argv + argc);
    Options o = parse_options(args);
    if (o.help) {
      std::printf(kUsage, argv[0]);
      return 0;
    }
    if (o.list) {
      print_list();
      return 0;
    }
    if (o.layers) return 0;  // ceilings have no shapes
    if (o.device) {
      std::printf("%s\n", device_json(make_context(o, true).device).c_str());
      return 0;
    }
    // A sweep has dozens of points: a fifth of the time for each is enough to see its shape.
    if (std::find(args.begin(), args.end(), "--time-limit-ms") == args.end()) o.measure.time_limit_ms = 60;
    return run(o);
  } catch (const UsageError& e) {
    std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
    return 1;
  }
}

}  // namespace ladder::chapter00

#if !defined(LADDER_NO_MAIN)
int main(int argc, char** argv) { return ladder::chapter00::main_of_chapter(argc, argv); }
#endif
