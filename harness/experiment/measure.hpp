// How long does it take? Sampling with a stop rule, batches of short kernels in one graph, cold caches by
// rotation.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <vector>

#include "harness/device/device.hpp"
#include "harness/experiment/record.hpp"

namespace ladder {

struct MeasureOptions {
  double time_limit_ms = 300;  ///< total sampling time for one measurement
  int min_samples = 11;
  int max_samples = 2000;
  double target_relative_iqr = 0.01;
};

/// Calls `once()` (which returns one sample in ns) until the interquartile range is below 1 % of the median
/// or the time limit is reached. Which of the two ended it is part of the result.
template <class F>
TimeStats sample(F&& once, const MeasureOptions& options) {
  std::vector<double> samples;
  const auto start = std::chrono::steady_clock::now();
  TimeStats stats;
  while (true) {
    samples.push_back(once());
    if (static_cast<int>(samples.size()) < options.min_samples) continue;
    stats = summarize(samples);
    stats.stopped_by_iqr = (stats.q3 - stats.q1) <= options.target_relative_iqr * stats.median;
    const double spent_ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    if (stats.stopped_by_iqr || spent_ms >= options.time_limit_ms ||
        static_cast<int>(samples.size()) >= options.max_samples) {
      return stats;
    }
  }
}

/// Kernels shorter than this are timed in batches: an event pair costs about 0.5 us of resolution and the gap
/// before a lone launch several us, neither of which is the kernel's.
inline constexpr double kBatchBelowNs = 300e3;
inline constexpr double kBatchTargetNs = 1e6;
inline constexpr int kMinBatch = 50;  ///< for kernels under 20 us

/// One way to run something on a device: `run(set)` launches it once on operand set `set`.
struct DeviceWorkload {
  std::function<Status(int set, Stream&)> run;
  int sets = 1;  ///< how many operand sets to rotate through
};

#if defined(__CUDACC__)
namespace detail {

/// One multiprocessor's clocks and the GPU's time, in ns.
struct SmTicks {
  unsigned long long clocks, ns;
  unsigned sm;
};

/// A template, so that every program that includes this has one of it.
template <class Ticks>
__global__ void read_sm_ticks(Ticks* to) {
  asm volatile("mov.u32 %0, %%smid;" : "=r"(to->sm));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(to->ns));
  to->clocks = static_cast<unsigned long long>(clock64());
}

}  // namespace detail
#endif

/// A device workload prepared for timing. `once()` returns the time of one launch in ns. Batched launches sit
/// in one graph, so their time includes the gap between two graph nodes, about 1 us on current GPUs.
class DeviceSampler {
 public:
  DeviceSampler(DeviceWorkload w, Stream& stream) : workload_(std::move(w)), stream_(stream) {
    for (int i = 0; i < std::max(3, std::min(workload_.sets, 8)); ++i)
      require(workload_.run(next(), stream_));
    stream_.synchronize();
    constexpr int kProbe = 4;
    timer_.start(stream_);
    for (int i = 0; i < kProbe; ++i) require(workload_.run(next(), stream_));
    timer_.stop(stream_);
    const double estimate = timer_.elapsed_ns() / kProbe;
    if (estimate >= kBatchBelowNs) return;
    int n = static_cast<int>(std::ceil(kBatchTargetNs / std::max(estimate, 500.0)));
    if (estimate < 20e3) n = std::max(n, kMinBatch);
    // A whole number of rotations: otherwise set 0 would be reused while still in cache at the next replay.
    batch_ = (n + workload_.sets - 1) / workload_.sets * workload_.sets;
    graph_ = Graph::capture(stream_, [&](Stream& s) {
      for (int i = 0; i < batch_; ++i) {
        Status status = workload_.run(i % workload_.sets, s);
        if (!status.ok()) return status;
      }
      return Status{};
    });
    graph_.launch(stream_);
    stream_.synchronize();
  }

  double once() {
    timer_.start(stream_);
    if (batch_ > 0) {
      graph_.launch(stream_);
    } else {
      require(workload_.run(next(), stream_));
    }
    timer_.stop(stream_);
    const double ns = timer_.elapsed_ns() / std::max(batch_, 1);
#if defined(__CUDACC__)
    // After the sample, which it must not disturb; from one sample to the next, that says at which clock it ran.
    require(launch(detail::read_sm_ticks<detail::SmTicks>, dim3(1), dim3(1), 0, stream_, ticks_.data()));
    stream_.synchronize();
    std::vector<detail::SmTicks> now(1);
    ticks_.download(now);
    if (now[0].sm == before_.sm && now[0].ns > before_.ns && before_.ns > 0) {
      mhz_.push_back(1e3 * static_cast<double>(now[0].clocks - before_.clocks) /
                     static_cast<double>(now[0].ns - before_.ns));
    }
    before_ = now[0];
#endif
    return ns;
  }
  /// Clock of a multiprocessor, median over the samples: what kernels counted, not what the driver says. 0 if unknown.
  double sm_mhz() const { return mhz_.empty() ? 0.0 : summarize(mhz_).median; }

 private:
  int next() {
    const int set = position_;
    position_ = (position_ + 1) % workload_.sets;
    return set;
  }

  DeviceWorkload workload_;
  Stream& stream_;
  Timer timer_;
  Graph graph_;
  int batch_ = 0;
  int position_ = 0;
  std::vector<double> mhz_;
#if defined(__CUDACC__)
  Buffer<detail::SmTicks> ticks_{1, "clocks"};
  detail::SmTicks before_{};
#endif
};

/// The same for host code: wall-clock time of one call, short calls repeated and divided.
class HostSampler {
 public:
  HostSampler(std::function<void(int set)> run, int sets) : run_(std::move(run)), sets_(sets) {
    for (int i = 0; i < std::max(2, std::min(sets_, 4)); ++i) run_(next());
    const double estimate = timed(1);
    if (estimate < 200e3) repeats_ = static_cast<int>(std::ceil(200e3 / std::max(estimate, 100.0)));
  }
  double once() { return timed(repeats_) / repeats_; }

 private:
  double timed(int n) {
    const auto t0 = std::chrono::steady_clock::now();
    for (int i = 0; i < n; ++i) run_(next());
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - t0).count();
  }
  int next() {
    const int set = position_;
    position_ = (position_ + 1) % sets_;
    return set;
  }

  std::function<void(int)> run_;
  int sets_;
  int repeats_ = 1;
  int position_ = 0;
};

/// Result of timing two variants alternately in one process.
struct Comparison {
  TimeStats a, b;
  TimeStats ratio;                    ///< quartiles of (time of A) / (time of B), pair by pair
  const char* verdict = "ambiguous";  ///< of A against B: "faster", "slower", or "ambiguous"
};

/// Alternates A and B, so that a clock that drifts hits both alike. The verdict is ambiguous unless the whole
/// interquartile range of the ratio lies on one side of 1.
template <class FA, class FB>
Comparison compare_interleaved(FA&& once_a, FB&& once_b, const MeasureOptions& options) {
  std::vector<double> a, b, ratio;
  const auto start = std::chrono::steady_clock::now();
  double spent_ms = 0;
  while (static_cast<int>(a.size()) < options.min_samples ||
         (spent_ms < 2 * options.time_limit_ms && static_cast<int>(a.size()) < options.max_samples)) {
    a.push_back(once_a());
    b.push_back(once_b());
    ratio.push_back(a.back() / b.back());
    spent_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  }
  Comparison c{summarize(a), summarize(b), summarize(ratio), "ambiguous"};
  if (c.ratio.q3 < 1) c.verdict = "faster";
  if (c.ratio.q1 > 1) c.verdict = "slower";
  return c;
}

}  // namespace ladder
