// The ceilings of this machine, measured in the same process as the rungs that are placed under them.
#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "harness/device/device.hpp"
#include "harness/experiment/cpu_read_probe.hpp"
#include "harness/experiment/fill.hpp"
#include "harness/experiment/measure.hpp"
#include "harness/experiment/record.hpp"
#include "kernels/roofs/latency_graph_node.cuh"
#include "kernels/roofs/roof_fma_f32.cuh"
#include "kernels/roofs/roof_read.cuh"
#if !defined(__CUDACC__)
#include "kernels/cpu/roofs.hpp"
#include "kernels/cpu/thread_pool.hpp"
#endif

namespace ladder {

/// Measured ceilings of one executor. A field that was not measured is 0.
struct MeasuredRoofs {
  double read_gbps = 0;         ///< best read-only bandwidth from device memory, 1e9 bytes/s
  double f32_gflops = 0;        ///< FMA peak, 1e9 FLOP/s, a fused multiply-add counted as two
  double mma_f16_gflops = 0;    ///< mma.sync, f16 operands and f32 sums; measured only for rungs that need it
  double mma_s8_gops = 0;       ///< mma.sync, int8 operands; the same
  double wgmma_f16_gflops = 0;  ///< wgmma, f16 operands and f32 sums; the same
  double graph_node_ns = 0;     ///< time of one empty kernel in a graph: below this a kernel is latency
};

/// Seed of every buffer that the bandwidth probes read.
inline constexpr unsigned kRoofSeed = 77;

/// The answer that roof_read must give for a buffer of `words` floats filled with (uniform, kRoofSeed).
inline std::uint32_t expected_word_sum(std::size_t words) {
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i < words; ++i) {
    sum += std::bit_cast<std::uint32_t>(fill_value(FillKind::uniform, kRoofSeed, i));
  }
  return sum;
}

/// Two affine steps that are applied in turn: r -> r * x0 + y0, then r -> r * x1 + y1.
struct FmaSteps {
  float x0, y0, x1, y1;
};

/// Where `pairs` pairs of steps take `start`, in float64 by the closed form of a linear recurrence, and how
/// far f32 may be from it: each rounding adds at most u * |value| (|values| <= |start| + |y| / (1 - |x|)),
/// which later steps shrink by |x|. Needs |x0|, |x1| < 1.
/// @param roundings_per_step 1 where the multiply-add is fused, 2 where it is not
inline std::pair<double, double> expected_fma(const FmaSteps& s, double start, double pairs,
                                              double roundings_per_step = 1) {
  const double p = static_cast<double>(s.x0) * s.x1;
  const double q = static_cast<double>(s.x1) * s.y0 + s.y1;
  const double power = std::pow(p, pairs);
  const double value = power * start + q * (1 - power) / (1 - p);
  const double x = std::max(std::fabs(static_cast<double>(s.x0)), std::fabs(static_cast<double>(s.x1)));
  const double y = std::max(std::fabs(static_cast<double>(s.y0)), std::fabs(static_cast<double>(s.y1)));
  const double largest = std::fabs(start) + y / (1 - x);
  constexpr double kUnitRoundoff = 1.0 / 16777216.0;
  // 1.01 covers the products of two roundings that the first-order bound leaves out.
  return {value, 1.01 * roundings_per_step * kUnitRoundoff * largest / (1 - x)};
}

/// What one thread of roof_fma_f32 must store, and how far f32 may be from it: the sum of its chains' ends.
/// @param mine [4 + chains]: the thread's operands
inline std::pair<double, double> expected_fma_result(const float* mine, int chains, double pairs) {
  double value = 0, bound = 0, magnitude = 0;
  for (int c = 0; c < chains; ++c) {
    const auto [v, b] = expected_fma({mine[0], mine[1], mine[2], mine[3]}, mine[4 + c], pairs);
    value += v;
    bound += b;
    magnitude += std::fabs(v) + b;
  }
  constexpr double kUnitRoundoff = 1.0 / 16777216.0;
  return {value, bound + 1.01 * chains * kUnitRoundoff * magnitude};
}

/// Operands of roof_fma_f32 for `threads` threads: steps with |x| <= 0.9, so that nothing overflows, and
/// start values in [-1, 1). @return [threads][4 + chains]
inline std::vector<float> make_fma_operands(std::size_t threads, int chains) {
  const auto stride = static_cast<std::size_t>(4 + chains);
  std::vector<float> operands(threads * stride);
  for (std::size_t i = 0; i < operands.size(); ++i) {
    operands[i] = fill_value(FillKind::uniform, kRoofSeed + 1, i);
    if (i % stride == 0 || i % stride == 2) operands[i] *= 0.9f;
  }
  return operands;
}

/// Time of one launch in ns, when `run` is launched several times in a row: a lone launch would also be
/// charged the few microseconds that pass between the start event and its arrival at the device.
template <class Run>
TimeStats time_back_to_back(Run&& run, Stream& stream, const MeasureOptions& options) {
  constexpr int kInARow = 4;
  const auto several = [&run](int, Stream& s) {
    for (int i = 0; i < kInARow; ++i) {
      if (Status status = run(s); !status.ok()) return status;
    }
    return Status{};
  };
  DeviceSampler sampler(DeviceWorkload{several, 1}, stream);
  TimeStats time = sample([&] { return sampler.once() / kInARow; }, options);
  time.sm_mhz = sampler.sm_mhz();
  return time;
}

/// Iterations with which `run(iterations, stream)` takes about `target_ns`, found by timing a short run.
template <class Run>
int calibrate_iterations(Run&& run, Stream& stream, double target_ns) {
  constexpr int kTrial = 256;
  Timer timer;
  double elapsed = 0;
  for (int i = 0; i < 3; ++i) {  // the first two load the kernel and wake the clocks
    timer.start(stream);
    require(run(kTrial, stream));
    timer.stop(stream);
    elapsed = timer.elapsed_ns();
  }
  return static_cast<int>(std::clamp(kTrial * target_ns / std::max(elapsed, 1.0), 64.0, 4e6));
}

/// Bytes of a buffer that no cache holds: 4 GiB, or what half of the free memory allows, in whole tiles.
inline std::size_t roof_buffer_bytes() {
#if defined(__CUDACC__)
  const std::size_t most = device_free_bytes() / 2;
#else
  const std::size_t most = std::size_t{1} << 30;
#endif
  const std::size_t tile = stream_tile_bytes(8);
  return std::max(tile, std::min(std::size_t{4} << 30, most) / tile * tile);
}

namespace detail {

inline MeasuredRoofs measure_device_roofs(const DeviceInfo& device, Stream& stream) {
  MeasureOptions options;
  options.time_limit_ms = 60;
  options.min_samples = 7;
  MeasuredRoofs roofs;
  {
    const std::size_t bytes = roof_buffer_bytes();
    Buffer<float> buffer(bytes / sizeof(float), "read roof");
    fill(buffer.data(), buffer.size(), FillKind::uniform, kRoofSeed, stream);
    const auto* words = reinterpret_cast<const uint4*>(buffer.data());
    Buffer<unsigned> sum(1, "read roof sum");
    struct Configuration {
      int loads, blocks_per_sm;
    };
    for (const Configuration c :
         {Configuration{4, 4}, Configuration{4, 16}, Configuration{4, 64}, Configuration{8, 16}}) {
      const int blocks = c.blocks_per_sm * device.sms;
      // A few tiles and an odd number of them are enough to see a wrong index.
      const std::size_t some = std::min(bytes, 37 * stream_tile_bytes(8));
      sum.fill_bytes(0);
      require(launch_roof_read(c.loads, words, some, sum.data(), blocks, stream));
      stream.synchronize();
      unsigned got = 0;
      sum.download(std::span(&got, 1));
      if (got != expected_word_sum(some / sizeof(float))) {
        throw DeviceError("roof_read returned a wrong sum; no roof can be measured on this device");
      }
      const TimeStats t = time_back_to_back(
          [&](Stream& s) { return launch_roof_read(c.loads, words, bytes, nullptr, blocks, s); }, stream,
          options);
      roofs.read_gbps = std::max(roofs.read_gbps, static_cast<double>(bytes) / t.median);
    }
  }
  {
    constexpr int kChains = 8;
    const int blocks = 8 * device.sms;
    const auto threads = static_cast<std::size_t>(blocks) * kMathThreads;
    const std::vector<float> operands = make_fma_operands(threads, kChains);
    Buffer<float> in(operands.size(), "FMA operands"), out(threads, "FMA results");
    in.upload(operands);
    const auto run = [&](int iterations, Stream& s) {
      return launch_roof_fma_f32(kChains, in.data(), iterations, out.data(), blocks, s);
    };
    const int iterations = calibrate_iterations(run, stream, 1e6);
    const TimeStats t = time_back_to_back([&](Stream& s) { return run(iterations, s); }, stream, options);
    std::vector<float> results(threads);
    out.download(results);
    for (std::size_t i = 0; i < threads; i += 1009) {
      const auto [value, bound] = expected_fma_result(&operands[i * (4 + kChains)], kChains,
                                                      static_cast<double>(kFmaPairs) * iterations);
      if (!(std::fabs(results[i] - value) <= bound)) {
        throw DeviceError("roof_fma_f32 returned a wrong value; no roof can be measured on this device");
      }
    }
    roofs.f32_gflops = roof_fma_flop(kChains, iterations, blocks) / t.median;
  }
  {
    constexpr int kNodes = 256;
    Graph chain = capture_empty_chain(nullptr, kNodes, 1, 32, stream);
    chain.launch(stream);
    stream.synchronize();
    Timer timer;
    roofs.graph_node_ns = sample(
                              [&] {
                                timer.start(stream);
                                chain.launch(stream);
                                timer.stop(stream);
                                return timer.elapsed_ns() / kNodes;
                              },
                              options)
                              .median;
  }
  return roofs;
}

#if !defined(__CUDACC__)
inline MeasuredRoofs measure_cpu_roofs(CpuReadProbe& probe, cpu::ThreadPool& pool) {
  MeasureOptions options;
  options.time_limit_ms = 400;
  options.min_samples = 7;
  MeasuredRoofs roofs;
  roofs.read_gbps = probe.bytes() / sample([&] { return probe.once(); }, options).median;
  {
    const int values = cpu::fma_values();
    const auto threads = static_cast<std::size_t>(pool.size());
    const std::vector<float> operands = make_fma_operands(1, values);
    std::vector<float> out(threads * static_cast<std::size_t>(values));
    constexpr int kPairs = 200000;
    HostSampler sampler([&](int) { cpu::roof_fma_f32(operands, kPairs, out, pool); }, 1);
    options.time_limit_ms = 200;
    const TimeStats t = sample([&] { return sampler.once(); }, options);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto [value, bound] = expected_fma({operands[0], operands[1], operands[2], operands[3]},
                                               operands[4 + i % static_cast<std::size_t>(values)], kPairs, 2);
      if (!(std::fabs(out[i] - value) <= bound)) {
        throw DeviceError("the CPU's roof_fma_f32 returned a wrong value; no roof can be measured");
      }
    }
    roofs.f32_gflops = cpu::roof_fma_flop(kPairs, pool.size()) / t.median;
  }
  return roofs;
}
#endif

}  // namespace detail

/// Measures the ceilings that rungs are placed under: about one second on a GPU, two on a CPU. The emulator
/// has no clock, so all its roofs are 0. Throws DeviceError if a probe computes a wrong result.
/// @param ctx anything with the members of harness/experiment/experiment.hpp's Context
template <class AnyContext>
MeasuredRoofs measure_roofs(AnyContext& ctx) {
#if defined(__CUDACC__)
  return detail::measure_device_roofs(ctx.device, ctx.stream);
#else
  if (ctx.executor == Executor::cpu) {
    ctx.read_probe = std::make_unique<CpuReadProbe>(ctx.device, *ctx.pool);
    return detail::measure_cpu_roofs(*ctx.read_probe, *ctx.pool);
  }
  return {};
#endif
}

}  // namespace ladder
