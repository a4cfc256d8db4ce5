// The ceilings of tensor cores, in the same process as the rungs that are placed under them. Measured only when such a
// rung runs: half a second each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "harness/device/device.hpp"
#include "harness/device/half_bits.hpp"
#include "harness/experiment/mix_bits.hpp"
#include "harness/experiment/roofs.hpp"
#include "harness/experiment/rung.hpp"
#include "kernels/roofs/roof_mma_f16.cuh"
#include "kernels/roofs/roof_mma_s8.cuh"
#include "kernels/roofs/roof_wgmma_f16.cuh"

namespace ladder {

/// The measured compute ceiling of a unit, 1e9 operations/s; 0 where it was not measured.
inline double peak_gops(const MeasuredRoofs& roofs, MathUnit unit) {
  switch (unit) {
    case MathUnit::f32:
      return roofs.f32_gflops;
    case MathUnit::mma_f16:
      return roofs.mma_f16_gflops;
    case MathUnit::mma_s8:
      return roofs.mma_s8_gops;
    case MathUnit::wgmma_f16:
      return roofs.wgmma_f16_gflops;
  }
  return 0;
}

namespace detail {

/// A word of operands: two halves of either sign with magnitudes from 1/16 to 2, or small integers; or four bytes.
inline std::uint32_t tensor_roof_word(std::uint64_t i, bool halves, bool exact) {
  const std::uint32_t bits = mix_bits((static_cast<std::uint64_t>(kRoofSeed) << 40) ^ i);
  if (!halves) return bits;
  const auto half = [exact](std::uint32_t b) -> std::uint32_t {
    if (exact) return float_to_half_bits(static_cast<float>(static_cast<int>(b % 7) - 3));
    return (b & 0x83ffu) | (11 + (b >> 10 & 3u)) << 10;
  };
  return half(bits & 0xffffu) | half(bits >> 16) << 16;
}

/// Product of two words as the instruction sees them.
inline double tensor_roof_product(std::uint32_t a, std::uint32_t b, bool halves) {
  double sum = 0;
  for (int i = 0; i < (halves ? 2 : 4); ++i) {
    if (halves) {
      sum += static_cast<double>(half_bits_to_float(static_cast<std::uint16_t>(a >> (16 * i)))) *
             static_cast<double>(half_bits_to_float(static_cast<std::uint16_t>(b >> (16 * i))));
    } else {
      sum += static_cast<std::int8_t>(a >> (8 * i)) * static_cast<std::int8_t>(b >> (8 * i));
    }
  }
  return sum;
}

/// Ceiling of mma.sync: checks a short run on integers exactly, then times random operands.
/// @param launch (a, b, sets, iterations, out, blocks, stream) -> Status, with kChains chains
/// @param ops (iterations, blocks) -> operations
template <class Out, class Launch, class Ops>
double measure_mma_roof(const char* name, bool halves, const DeviceInfo& device, Stream& stream,
                        const Launch& launch, const Ops& ops) {
  constexpr int kChains = 4, kSets = 4;
  const int blocks = 8 * device.sms;
  constexpr std::size_t kA = 2 * kMmaRows * kMmaWords, kB = kChains * kMmaColumns * kMmaWords;
  Buffer<std::uint32_t> a(kSets * kA, "A"), b(kSets * kB, "B");
  Buffer<Out> out(static_cast<std::size_t>(blocks) * (kMathThreads / 32) * kMmaRows * kMmaColumns, "D");
  std::vector<std::uint32_t> a_host(a.size()), b_host(b.size());
  const auto fill_operands = [&](bool exact) {
    for (std::size_t i = 0; i < a_host.size(); ++i) a_host[i] = tensor_roof_word(i, halves, exact);
    for (std::size_t i = 0; i < b_host.size(); ++i)
      b_host[i] = tensor_roof_word(a_host.size() + i, halves, exact);
    a.upload(a_host);
    b.upload(b_host);
  };
  fill_operands(true);
  out.fill_bytes(0xFF);
  require(launch(a.data(), b.data(), kSets, 1, out.data(), 1, stream));
  stream.synchronize();
  std::vector<Out> got(kMathThreads / 32 * kMmaRows * kMmaColumns);
  out.download(got);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::size_t column = i % kMmaColumns, row = i / kMmaColumns % kMmaRows,
                      set = i / (kMmaRows * kMmaColumns) % kSets;
    double expected = 0;
    for (std::size_t c = 0; c < kChains; ++c) {
      for (std::size_t step = 0; step < 2; ++step) {
        for (std::size_t w = 0; w < kMmaWords; ++w) {
          expected += kMmaPairs * tensor_roof_product(
                                      a_host[set * kA + (step * kMmaRows + row) * kMmaWords + w],
                                      b_host[set * kB + (c * kMmaColumns + column) * kMmaWords + w], halves);
        }
      }
    }
    if (static_cast<double>(got[i]) != expected)
      throw DeviceError(std::string(name) +
                        " returned a wrong value; no roof can be measured on this device");
  }
  fill_operands(false);
  const auto run = [&](int iterations, Stream& s) {
    return launch(a.data(), b.data(), kSets, iterations, out.data(), blocks, s);
  };
  MeasureOptions options;
  options.time_limit_ms = 60;
  options.min_samples = 7;
  const int iterations = calibrate_iterations(run, stream, 1e6);
  const TimeStats t = time_back_to_back([&](Stream& s) { return run(iterations, s); }, stream, options);
  return ops(iterations, blocks) / t.median;
}

/// Operands of roof_wgmma_f16 and what they multiply to.
struct WgmmaRoofOperands {
  static constexpr int kSets = 3;
  std::vector<std::uint32_t> a, b;  // words of two halves: [sets][128][32], [sets][256][32]
  explicit WgmmaRoofOperands(bool exact)
      : a(kSets * kWgmmaRoofRows * kWgmmaRoofK / 2), b(kSets * kWgmmaRoofColumns * kWgmmaRoofK / 2) {
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = tensor_roof_word(i, true, exact);
    for (std::size_t i = 0; i < b.size(); ++i) b[i] = tensor_roof_word(a.size() + i, true, exact);
  }
  /// A . B^T of a set. Every sum is exact if the operands are integers.
  [[nodiscard]] double product(int set, int row, int column) const {
    double sum = 0;
    for (int w = 0; w < kWgmmaRoofK / 2; ++w) {
      const auto word = [w](int r) { return static_cast<std::size_t>(r * (kWgmmaRoofK / 2) + w); };
      sum += tensor_roof_product(a[word(set * kWgmmaRoofRows + row)],
                                 b[word(set * kWgmmaRoofColumns + column)], true);
    }
    return sum;
  }
};

/// Throws DeviceError unless roof_wgmma_f16 is exact on small integers.
inline void check_wgmma_roof(Stream& stream) {
  constexpr int kBlocks = 4, kIterations = 3;
  const WgmmaRoofOperands integers(true);
  Buffer<std::uint32_t> a(integers.a.size(), "A"), b(integers.b.size(), "B");
  Buffer<float> out(std::size_t{kBlocks} * kWgmmaRoofRows * kWgmmaRoofColumns, "D");
  a.upload(integers.a);
  b.upload(integers.b);
  out.fill_bytes(0xFF);
  require(launch_roof_wgmma_f16(a.data(), b.data(), WgmmaRoofOperands::kSets, kIterations, out.data(),
                                kBlocks, stream));
  stream.synchronize();
  std::vector<float> got(out.size());
  out.download(got);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const int column = static_cast<int>(i % kWgmmaRoofColumns),
              rows = static_cast<int>(i / kWgmmaRoofColumns);
    const double expected = kIterations * integers.product(rows / kWgmmaRoofRows % WgmmaRoofOperands::kSets,
                                                           rows % kWgmmaRoofRows, column);
    if (static_cast<double>(got[i]) != expected)
      throw DeviceError("roof_wgmma_f16: output " + std::to_string(i) + " is " + std::to_string(got[i]) +
                        ", expected " + std::to_string(expected));
  }
}

/// Ceiling of wgmma, FLOP/s * 1e-9, on random operands.
inline TimeStats time_wgmma_roof(int blocks, Stream& stream, const MeasureOptions& options, int* iterations) {
  const WgmmaRoofOperands random(false);
  Buffer<std::uint32_t> a(random.a.size(), "A"), b(random.b.size(), "B");
  Buffer<float> out(static_cast<std::size_t>(blocks) * kWgmmaRoofRows * kWgmmaRoofColumns, "D");
  a.upload(random.a);
  b.upload(random.b);
  const auto run = [&](int n, Stream& s) {
    return launch_roof_wgmma_f16(a.data(), b.data(), WgmmaRoofOperands::kSets, n, out.data(), blocks, s);
  };
  *iterations = calibrate_iterations(run, stream, 1e6);
  return time_back_to_back([&](Stream& s) { return run(*iterations, s); }, stream, options);
}

}  // namespace detail

/// Measures the ceilings that these rungs need beside those of measure_roofs. On a GPU only: elsewhere no roof depends on
/// the unit. Throws DeviceError if a probe computes a wrong result.
/// @param ctx as for measure_roofs, whose result is in ctx.roofs
template <class AnyContext>
void measure_tensor_roofs([[maybe_unused]] const std::vector<const Rung*>& rungs,
                          [[maybe_unused]] AnyContext& ctx) {
#if defined(__CUDACC__)
  constexpr int kChains = 4;
  const auto wanted = [&](MathUnit unit) {
    return std::any_of(rungs.begin(), rungs.end(), [unit](const Rung* r) { return r->math == unit; });
  };
  if (ctx.device.cc_major >= 8 && wanted(MathUnit::mma_f16)) {
    ctx.roofs.mma_f16_gflops = detail::measure_mma_roof<float>(
        "roof_mma_f16", true, ctx.device, ctx.stream,
        [](auto&&... arguments) { return launch_roof_mma_f16(kChains, arguments...); },
        [](int iterations, int blocks) { return roof_mma_f16_flop(kChains, iterations, blocks); });
  }
  if (ctx.device.cc_major >= 8 && wanted(MathUnit::mma_s8)) {
    ctx.roofs.mma_s8_gops = detail::measure_mma_roof<int>(
        "roof_mma_s8", false, ctx.device, ctx.stream,
        [](auto&&... arguments) { return launch_roof_mma_s8(kChains, arguments...); },
        [](int iterations, int blocks) { return roof_mma_s8_ops(kChains, iterations, blocks); });
  }
  if (wanted(MathUnit::wgmma_f16) && supported_roof_wgmma_f16(ctx.device).ok()) {
    detail::check_wgmma_roof(ctx.stream);
    MeasureOptions options;
    options.time_limit_ms = 60;
    options.min_samples = 7;
    int iterations = 0;
    const TimeStats t = detail::time_wgmma_roof(ctx.device.sms, ctx.stream, options, &iterations);
    ctx.roofs.wgmma_f16_gflops = roof_wgmma_f16_flop(iterations, ctx.device.sms) / t.median;
  }
#endif
}

}  // namespace ladder
