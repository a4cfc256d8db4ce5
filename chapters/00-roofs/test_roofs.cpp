// Chapter 00's probes against their references, and the broken ones against the checks.

#define LADDER_NO_MAIN
#include <set>

#include "chapters/00-roofs/roofs.cu"
#include "chapters/00-roofs/wrong/wrong_probes.cuh"
#include "harness/device/doctest_main.hpp"
#include "harness/experiment/testing.hpp"

using namespace ladder;
using namespace ladder::chapter00;

TEST_CASE("every probe computes what it says") {
  for (const Executor e : testing::executors()) {
    Context ctx = testing::context_on(e);
    int checked = 0;
    for (const Probe& p : probes()) {
      if (!runs_here(p, ctx.device).ok()) continue;
      CAPTURE(p.id);
      CAPTURE(to_string(e));
      CHECK_NOTHROW(check(p, ctx));
      ++checked;
    }
    CHECK(checked >= (e == Executor::cpu ? 5 : 9));
  }
}

TEST_CASE("what needs a GPU says so in one line") {
  for (const Probe& p : probes()) {
    DeviceInfo emulator, ampere, hopper;
    emulator.executor = Executor::emulator;
    ampere.executor = hopper.executor = Executor::gpu;
    ampere.cc_major = 8;
    hopper.cc_major = 9;
    CAPTURE(p.id);
    if (p.id == "latency_pdl" || p.id == "latency_grid_barrier") {
      const std::string why = runs_here(p, emulator).message();
      CHECK(why.find("needs a GPU") != std::string::npos);
      CHECK(why.find('\n') == std::string::npos);
    }
    if (p.id == "latency_pdl") CHECK(runs_here(p, ampere).message().find("9.0") != std::string::npos);
    CHECK(runs_here(p, hopper).ok() == (p.id != "roof_int8_dot"));
  }
}

TEST_CASE("launchers refuse what their kernels cannot do, with the reason") {
  Stream stream;
  Buffer<float> buffer(stream_tile_bytes(8) / sizeof(float), "words");
  Buffer<unsigned> sum(1, "sum");
  const auto* words = reinterpret_cast<const uint4*>(buffer.data());
  const auto says = [](const Status& s, const char* what) {
    return s.message().find(what) != std::string::npos;
  };
  CHECK(says(launch_roof_read(3, words, stream_tile_bytes(8), sum.data(), 1, stream), "1, 2, 4 and 8"));
  CHECK(says(launch_roof_read(8, words, stream_tile_bytes(8) - 16, sum.data(), 1, stream),
             "multiples of 32768"));
  CHECK(says(launch_roof_read(8, words, 0, sum.data(), 1, stream), "positive"));
  CHECK(says(launch_roof_read(8, words, stream_tile_bytes(8), sum.data(), 0, stream), "at least 1"));
  CHECK(says(launch_roof_fma_f32(16, buffer.data(), 1, buffer.data(), 1, stream), "1, 2, 4 and 8"));
  CHECK(says(launch_roof_fma_f32(8, buffer.data(), 0, buffer.data(), 1, stream), "at least 1"));
  CHECK(says(launch_roof_l2_read(1, words, stream_tile_bytes(1), 0, sum.data(), 1, stream), "passes"));
  CHECK(says(launch_latency_launch(nullptr, 1, 1025, stream), "1024"));
}

TEST_CASE("the closed form of the multiply-add chain is the chain") {
  const FmaSteps s{0.75f, -0.3f, -0.6f, 0.9f};
  double r = 0.4;
  for (int pairs = 1; pairs <= 40; ++pairs) {
    r = (r * s.x0 + s.y0) * s.x1 + s.y1;
    const auto [value, bound] = expected_fma(s, 0.4f, pairs);
    CHECK(std::fabs(value - r) < 1e-6);
    CHECK(bound > 0);
    CHECK(bound < 1e-5);  // a bound that accepts anything would be no check
  }
}

namespace {

/// What roof_read's check compares, for another kernel with one load per thread.
bool sum_is_right(void (*kernel)(const uint4*, unsigned long long, unsigned*)) {
  constexpr int kTiles = 7;
  Context ctx = testing::context_on(kDeviceExecutor);
  Buffer<float> buffer(kTiles * stream_tile_bytes(1) / sizeof(float), "words");
  fill(buffer.data(), buffer.size(), FillKind::uniform, kRoofSeed, ctx.stream);
  Buffer<unsigned> sum(1, "sum");
  sum.fill_bytes(0);
  require(launch(kernel, dim3(3), dim3(kStreamThreads), 0, ctx.stream,
                 reinterpret_cast<const uint4*>(buffer.data()), kTiles, sum.data()));
  ctx.stream.synchronize();
  unsigned got = 0;
  sum.download(std::span(&got, 1));
  return got == expected_word_sum(buffer.size());
}

}  // namespace

TEST_CASE("the checks reject every broken probe") {
  Context ctx = testing::context_on(kDeviceExecutor);
  CHECK_FALSE(sum_is_right(wrong::reads_one_tile_less));
  CHECK_FALSE(sum_is_right(wrong::reads_one_tile_always));
  {
    MathBuffers<float, float> m = make_fma(1, 1);
    CHECK_THROWS_AS(verify_fma(m, 1, 1, 1), CheckFailed);  // nothing was written: still poison
    require(launch(wrong::makes_half_of_the_steps, dim3(1), dim3(kMathThreads), 0, ctx.stream, m.in.data(),
                   kFmaPairs, m.out.data()));
    ctx.stream.synchronize();
    CHECK_THROWS_AS(verify_fma(m, 1, 1, 1), CheckFailed);
  }
  {
    MathBuffers<int, int> m = make_dp4a(1, 1);
    CHECK_THROWS_AS(verify_dp4a(m, 1, 1, 1), CheckFailed);
    require(launch(wrong::takes_bytes_as_unsigned, dim3(1), dim3(kMathThreads), 0, ctx.stream, m.in.data(),
                   kDp4aPairs, m.out.data()));
    ctx.stream.synchronize();
    CHECK_THROWS_AS(verify_dp4a(m, 1, 1, 1), CheckFailed);
  }
  for (const bool exact : {true, false}) {
    MmaBuffers<float> m(1, 1, 1, exact ? integer_halves : random_halves);
    CHECK_THROWS_AS(verify_mma_f16(m, 1, 1, exact), CheckFailed);
    require(launch(wrong::exchanges_fragment_registers, dim3(1), dim3(32), 0, ctx.stream, m.a.data(),
                   m.b.data(), 2 * kMmaPairs, m.out.data()));
    ctx.stream.synchronize();
    CHECK_THROWS_AS(verify_mma_f16(m, 1, 1, exact), CheckFailed);
  }
  {
    MmaBuffers<int> m(1, 1, 1, random_word);
    CHECK_THROWS_AS(verify_mma_s8(m, 1, 1), CheckFailed);
    require(launch(wrong::uses_one_operand_only, dim3(1), dim3(32), 0, ctx.stream, m.a.data(), m.b.data(),
                   2 * kMmaPairs, m.out.data()));
    ctx.stream.synchronize();
    CHECK_THROWS_AS(verify_mma_s8(m, 1, 1), CheckFailed);
  }
  // One wrong word in otherwise right data.
  std::vector<std::uint32_t> words;
  for (unsigned long long i = 0; i < 16; ++i) {
    const uint4 w = roof_write_word(i);
    words.insert(words.end(), {w.x, w.y, w.z, w.w});
  }
  CHECK(holds_written_words(words));
  words[37] ^= 1;
  CHECK_FALSE(holds_written_words(words));
}

TEST_CASE("half-precision bit patterns are read correctly") {
  const std::pair<std::uint32_t, float> known[] = {
      {0x0000, 0.0f},     {0x3C00, 1.0f},          {0xC000, -2.0f},        {0x3555, 0.33325195f},
      {0x7BFF, 65504.0f}, {0x0001, 5.9604645e-8f}, {0x0400, 6.1035156e-5f}};
  for (const auto& [bits, value] : known) CHECK(half_bits_to_float(bits) == value);
  CHECK(std::isinf(half_bits_to_float(0x7C00)));
  CHECK(std::isnan(half_bits_to_float(0x7E00)));
  for (std::uint64_t i = 0; i < 1000; ++i) {
    for (const int part : {0, 1}) {
      const double magnitude = std::fabs(half_of(random_halves(i), part));
      CHECK((magnitude >= 1.0 / 16 && magnitude < 1));
    }
  }
}

TEST_CASE("the best point of a sweep is the fastest one that stands for the ceiling") {
  Context ctx = testing::context_on(kDeviceExecutor);
  Sweep sweep("roof_read", ctx, {});
  CHECK(sweep.best() == 0);  // and there is no point 0
  const auto point = [&](long long n, double bytes, double ns, const char* why_not) {
    Outcome o;
    o.time = summarize({ns});
    o.bytes = bytes;
    o.why_not = why_not;
    sweep.add(Params().add("n", n), o);
  };
  point(0, 100, 10, "");
  point(1, 100, 1, "came from a cache");
  point(2, 100, 5, "");
  point(3, 50, 4, "");
  CHECK(sweep.best() == 2);

  Sweep latency("latency_launch", ctx, {});
  for (const double ns : {30.0, 20.0, 25.0}) {
    Outcome o;
    o.time = summarize({ns});
    latency.add(Params(), o);
  }
  CHECK(latency.best() == 1);
}

TEST_CASE("sizes are shown in the largest unit that divides them") {
  const auto shown = [](std::size_t bytes) { return Params().add_bytes("b", bytes).columns()[0].second; };
  CHECK(shown(std::size_t{4} << 30) == "4 GiB");
  CHECK(shown(48 << 10) == "48 KiB");
  CHECK(shown(1000) == "1000 B");
  CHECK(Params().add_bytes("b", 48 << 10).json().str() == "{\"b\": 49152}");
}

TEST_CASE("every probe has one id and a source") {
  std::set<std::string> ids;
  for (const Probe& p : probes()) {
    CHECK(ids.insert(p.id).second);
    CHECK_FALSE(p.source.empty());
    CHECK((p.on_device || p.on_cpu));
  }
  CHECK(ids.size() == 14);
}

#if !defined(__CUDACC__)
TEST_CASE("streaming stores are refused where there are none") {
  cpu::ThreadPool pool(1);
  std::vector<std::uint32_t> words(64);
  cpu::force_isa(cpu::Isa::portable);
  CHECK_FALSE(cpu::has_streaming_stores());
  CHECK_THROWS_AS(cpu::roof_write(words.data(), words.size(), 1, cpu::Stores::streaming, pool),
                  std::invalid_argument);
  CHECK_THROWS_AS(cpu::roof_copy(words.data(), words.data() + 32, 32, cpu::Stores::streaming, pool),
                  std::invalid_argument);
  cpu::force_isa(std::nullopt);
}

TEST_CASE("the CPU's probes are right with every number of threads, and refuse wrong lengths") {
  for (const int threads : {1, 2, 3, 7}) {
    Context ctx = testing::context_on(Executor::cpu);
    ctx.pool = std::make_unique<cpu::ThreadPool>(threads);
    CAPTURE(threads);
    for (const Probe& p : probes()) {
      if (runs_here(p, ctx.device).ok()) CHECK_NOTHROW(check(p, ctx));
    }
    std::vector<float> operands(3), out(1);
    CHECK_THROWS_AS(cpu::roof_fma_f32(operands, 1, out, *ctx.pool), std::invalid_argument);
    std::vector<std::uint32_t> bytes(2), sums(1);
    CHECK_THROWS_AS(cpu::roof_int8_dot(bytes, 1, sums, *ctx.pool), std::invalid_argument);
  }
}

TEST_CASE("the emulator has no roofs") {
  Context ctx = testing::context_on(Executor::emulator);
  const MeasuredRoofs roofs = measure_roofs(ctx);
  CHECK(roofs.read_gbps == 0);
  CHECK(roofs.f32_gflops == 0);
  CHECK(roofs.graph_node_ns == 0);
}
#endif
