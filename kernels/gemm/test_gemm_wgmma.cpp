// The product with wgmma: every tile, cluster and division of k, on a GPU of compute capability 9.0; its plans and its
// refusals everywhere.
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=compute_90a,code=sm_90a -x cu kernels/gemm/test_gemm_wgmma.cpp ... -o
//        gemm_wgmma
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "harness/device/doctest_main.hpp"
#include "harness/device/under_sanitizer.hpp"
#include "harness/experiment/qwen_shapes.hpp"
#include "harness/experiment/testing.hpp"
#include "kernels/gemm/gemm_f16_wgmma.cuh"

using namespace ladder;

namespace {

DeviceInfo hopper() {
  DeviceInfo d;
  d.executor = Executor::gpu;
  d.cc_major = 9;
  d.sms = 132;
  return d;
}

#if defined(__CUDACC__)

std::vector<GemmWgmmaPlan> all_plans() {
  std::vector<GemmWgmmaPlan> all;
  for (const GemmWgmmaKernel& k : kGemmWgmmaKernels) {
    for (const int cm : {1, 2, 4}) {
      for (const int cn : {1, 2, 4}) {
        if (cm * cn * k.ck <= 8 && k.bn / cm % 8 == 0) all.push_back({k.bn, cm, cn, k.ck, 2, k.bm});
      }
    }
  }
  return all;
}

std::string name(const GemmWgmmaPlan& p) {
  return "bm " + std::to_string(p.bm) + " bn " + std::to_string(p.bn) + " cm " + std::to_string(p.cm) +
         " cn " + std::to_string(p.cn) + " ck " + std::to_string(p.ck);
}

/// Tensor cores add sixteen products and a sum at once, cutting off what lies below the largest's last place.
double roundings(long long id, int parts) {
  return 2.0 * (static_cast<double>(id) / 16 + 1) + 2 * 17 + parts;
}

bool on_hopper() {
  if (device_info().cc_major == 9) return true;
  MESSAGE("skipped: needs compute capability 9.0");
  return false;
}

Rung rung_of(const GemmWgmmaPlan& plan) {
  Rung r;
  r.id = "gemm_f16_wgmma " + name(plan);
  r.weight_type = WeightType::f16;
  r.acts = ActivationFormat::f16;
  r.math = MathUnit::wgmma_f16;
  r.supported = [plan](Shape s, const DeviceInfo& d) {
    if (Status e = gemm_f16_wgmma_supported(s, d); !e.ok()) return e;
    return (s.id + 63) / 64 < plan.ck ? Status::error("fewer steps than parts of k") : Status{};
  };
  r.roundings = [plan](Shape s, Executor) { return roundings(s.id, plan.ck); };
  r.device = [plan](WeightsPointer w, ActsPointer x, float* out, Shape s, Stream& stream) {
    return launch_gemm_f16_wgmma(static_cast<const __half*>(x), static_cast<const __half*>(w), out, {}, s,
                                 plan, stream);
  };
  return r;
}

#endif

}  // namespace

TEST_CASE("gemm_f16_wgmma says what it does not take") {
  CHECK(gemm_f16_wgmma_supported({1, 1, 8}, hopper()).ok());
  CHECK(gemm_f16_wgmma_supported({512, 151936, 18944}, hopper()).ok());
  CHECK(gemm_f16_wgmma_supported({1, 1, 12}, hopper()).message() ==
        "gemm_f16_wgmma: id 12; it must be a positive multiple of 8, with nt and od at least 1");
  CHECK(!gemm_f16_wgmma_supported({0, 1, 8}, hopper()).ok());
  CHECK(!gemm_f16_wgmma_supported({1, 0, 8}, hopper()).ok());
  CHECK(!gemm_f16_wgmma_supported({1, 1, 0}, hopper()).ok());
  DeviceInfo ampere = hopper();
  ampere.cc_major = 8;
  CHECK(gemm_f16_wgmma_supported({1, 1, 8}, ampere).message() ==
        "gemm_f16_wgmma: needs a GPU of compute capability 9.0: no other has wgmma");
  DeviceInfo emulator = hopper();
  emulator.executor = Executor::emulator;
  CHECK(!gemm_f16_wgmma_supported({1, 1, 8}, emulator).ok());
}

TEST_CASE("every layer of every model has a plan that the launcher takes") {
  for (const QwenLayer& l : all_qwen_layers()) {
    for (const long long nt : {9, 64, 129, 512, 2048}) {
      CAPTURE(l.name);
      CAPTURE(nt);
      const GemmWgmmaPlan p = plan_gemm_f16_wgmma({nt, l.od, l.id}, 132);
      CHECK(std::any_of(kGemmWgmmaKernels.begin(), kGemmWgmmaKernels.end(), [&](const GemmWgmmaKernel& k) {
        return k.bm == p.bm && k.bn == p.bn && k.ck == p.ck;
      }));
      CHECK((p.cm == 1 || p.cm == 2 || p.cm == 4));
      CHECK((p.cn == 1 || p.cn == 2 || p.cn == 4));
      CHECK(p.cm * p.cn * p.ck <= 8);
      CHECK(p.band >= 1);
      CHECK(p.bn / p.cm % 8 == 0);
      CHECK(p.ck <= (l.id + 63) / 64);
      CHECK(static_cast<long long>(p.bm) * (p.cm / 2) <
            nt);  // no cluster without tokens for half of its blocks
    }
  }
  // Large products take large tiles, small ones small tiles.
  CHECK(plan_gemm_f16_wgmma({8192, 8192, 8192}, 132).bn >= 192);
  CHECK(plan_gemm_f16_wgmma({512, 896, 896}, 132).bn <= 128);
  // k is divided where it is long and there are few tiles, and only there.
  CHECK(plan_gemm_f16_wgmma({512, 896, 4864}, 132).ck == 2);
  CHECK(plan_gemm_f16_wgmma({512, 3584, 18944}, 132).ck == 1);
  // The same plan for a shape whatever was asked before: it is a function.
  CHECK(plan_gemm_f16_wgmma({512, 896, 896}, 132) == plan_gemm_f16_wgmma({512, 896, 896}, 132));
}

TEST_CASE("clusters that run at once") {
  CHECK(gemm_wgmma_clusters(132, 1) == 132);
  CHECK(gemm_wgmma_clusters(132, 2) == 66);
  CHECK(gemm_wgmma_clusters(132, 4) == 30);
  CHECK(gemm_wgmma_clusters(132, 8) == 15);
  CHECK(gemm_wgmma_clusters(2, 8) == 1);
}

#if defined(__CUDACC__)

TEST_CASE("every plan is right at ragged shapes: exactly on integers, within the bound on random operands") {
  if (!on_hopper()) return;
  Context ctx = testing::context_on(kDeviceExecutor);
  const std::vector<Shape> shapes = {{1, 1, 8},      {2, 3, 16},     {9, 31, 264},    {64, 65, 72},
                                     {65, 127, 128}, {127, 129, 64}, {129, 255, 200}, {257, 513, 1000},
                                     {513, 7, 2056}, {300, 899, 328}};
  for (const GemmWgmmaPlan& plan : all_plans()) {
    Chapter chapter;
    chapter.rungs = {rung_of(plan)};
    int checked = 0;
    for (const std::string& line : testing::check_chapter(chapter, shapes, ctx, &checked)) FAIL_CHECK(line);
    CHECK(checked >= 5);  // parts of k need as many steps
  }
}

TEST_CASE("the chosen plan is right at layers of the models, and at many tiles a block") {
  if (!on_hopper()) return;
  Context ctx = testing::context_on(kDeviceExecutor);
  std::vector<Shape> shapes = {{512, 896, 896}, {512, 896, 4864}};
  if (!under_sanitizer())
    shapes.insert(shapes.end(), {{512, 4864, 896}, {512, 3584, 3584}, {2000, 9000, 136}, {1, 151936, 896}});
  for (const Shape& s : shapes) {
    Chapter chapter;
    chapter.rungs = {rung_of(plan_gemm_f16_wgmma(s, ctx.device.sms))};
    int checked = 0;
    for (const std::string& line : testing::check_chapter(chapter, {s}, ctx, &checked)) FAIL_CHECK(line);
    CHECK(checked == 1);
  }
}

TEST_CASE("bias, residual and scales of tokens are applied once, in place too") {
  if (!on_hopper()) return;
  Stream stream;
  for (const Shape& s : std::vector<Shape>{{130, 300, 264}, {65, 71, 328}}) {
    const auto n = [](long long a, long long b) { return static_cast<std::size_t>(a * b); };
    // Small integers, so that every order of additions gives the same bits.
    const auto value = [](std::size_t i, int seed) {
      return static_cast<float>((i * 7 + i / 13 + seed) % 9) - 4.0f;
    };
    std::vector<__half> acts(n(s.nt, s.id)), weights(n(s.od, s.id));
    std::vector<float> bias(n(s.od, 1)), residual(n(s.nt, s.od)), scale(n(s.nt, 1));
    for (std::size_t i = 0; i < acts.size(); ++i) acts[i] = __float2half(value(i, 1));
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = __float2half(value(i, 2));
    for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = value(i, 3);
    for (std::size_t i = 0; i < residual.size(); ++i) residual[i] = value(i, 4);
    for (std::size_t i = 0; i < scale.size(); ++i) scale[i] = i % 3 == 0 ? 4.0f : 1.0f;
    std::vector<float> want(residual.size());
    for (long long t = 0; t < s.nt; ++t) {
      for (long long r = 0; r < s.od; ++r) {
        double sum = 0;
        for (long long k = 0; k < s.id; ++k) {
          sum += static_cast<double>(__half2float(acts[n(t, s.id) + n(k, 1)])) *
                 static_cast<double>(__half2float(weights[n(r, s.id) + n(k, 1)]));
        }
        const std::size_t i = n(t, s.od) + n(r, 1);
        want[i] = static_cast<float>(sum * static_cast<double>(scale[n(t, 1)]) +
                                     static_cast<double>(bias[n(r, 1)]) + static_cast<double>(residual[i]));
      }
    }
    const auto on_device = [](const auto& v) {
      Buffer<typename std::decay_t<decltype(v)>::value_type> b(v.size(), "operand");
      b.upload(v);
      return b;
    };
    const auto a = on_device(acts), w = on_device(weights);
    const auto b = on_device(bias), sc = on_device(scale);
    for (const GemmWgmmaPlan& plan : {GemmWgmmaPlan{256, 2, 1, 1, 1},
                                      {128, 1, 2, 2, 1, 64},
                                      {32, 2, 1, 2, 1, 64},
                                      {112, 2, 4, 1, 1},
                                      {72, 1, 2, 1, 1, 64}}) {
      INFO(name(plan));
      Buffer<float> out = on_device(residual);
      const Status e = launch_gemm_f16_wgmma(a.data(), w.data(), out.data(),
                                             {b.data(), out.data(), sc.data()}, s, plan, stream);
      REQUIRE_MESSAGE(e.ok(), e.message());
      stream.synchronize();
      std::vector<float> got(want.size());
      out.download(got);
      CHECK(got == want);
    }
  }
}

TEST_CASE("a product has the same bits every time, alone, after another kernel and started early") {
  if (!on_hopper()) return;
  Stream stream;
  const Shape s{300, 1000, 2056};
  Buffer<__half> acts(static_cast<std::size_t>(s.nt * s.id), "acts"),
      weights(static_cast<std::size_t>(s.od * s.id), "w");
  Buffer<float> out(static_cast<std::size_t>(s.nt * s.od), "out");
  std::vector<__half> host(weights.size());
  for (std::size_t i = 0; i < host.size(); ++i)
    host[i] = __float2half(static_cast<float>(i * 37 % 1013) / 512.0f - 1.0f);
  weights.upload(host);
  acts.upload(std::span(host).subspan(host.size() - acts.size()));
  for (const GemmWgmmaPlan& plan : all_plans()) {
    INFO(name(plan));
    std::vector<float> first, again(out.size());
    for (int run = 0; run < 4; ++run) {
      out.fill_bytes(0xff);
      // The second to fourth run follow one another and may overlap.
      for (int i = 0; i < (run == 0 ? 1 : 3); ++i) {
        const Status e =
            launch_gemm_f16_wgmma(acts.data(), weights.data(), out.data(), {}, s, plan, stream, run > 0);
        REQUIRE_MESSAGE(e.ok(), e.message());
      }
      stream.synchronize();
      out.download(again);
      if (run == 0) first = again;
      CHECK(again == first);
    }
  }
}

TEST_CASE("plans and pointers that the launcher does not take") {
  if (!on_hopper()) return;
  Stream stream;
  Buffer<__half> half(4096, "half");
  Buffer<float> out(4096, "out");
  const auto launched = [&](GemmWgmmaPlan plan, const __half* acts, float* to, Shape s) {
    return launch_gemm_f16_wgmma(acts, half.data(), to, {}, s, plan, stream).message();
  };
  const GemmWgmmaPlan good{64, 1, 1, 1, 1, 64};
  const Shape shape{8, 8, 64};
  CHECK(launched(good, half.data(), out.data(), shape).empty());
  CHECK(launched({100, 1, 1, 1, 1}, half.data(), out.data(), shape)
            .find("no kernel for tiles of 128 tokens and 100") != std::string::npos);
  CHECK(launched({160, 1, 1, 2, 1}, half.data(), out.data(), shape).find("k in 2 parts") !=
        std::string::npos);
  CHECK(launched({64, 3, 1, 1, 1, 64}, half.data(), out.data(), shape).find("cm and cn are") !=
        std::string::npos);
  CHECK(launched({64, 1, 3, 1, 1, 64}, half.data(), out.data(), shape).find("cm and cn are") !=
        std::string::npos);
  CHECK(launched({112, 4, 1, 1, 1}, half.data(), out.data(), shape).find("bn / cm") != std::string::npos);
  CHECK(launched({64, 4, 4, 1, 1, 64}, half.data(), out.data(), shape).find("at most 8") !=
        std::string::npos);
  CHECK(launched({32, 1, 1, 2, 1, 64}, half.data(), out.data(), shape).find("ck at most") !=
        std::string::npos);
  CHECK(launched({64, 1, 1, 1, 0, 64}, half.data(), out.data(), shape).find("band at least 1") !=
        std::string::npos);
  CHECK(launched(good, half.data() + 1, out.data(), shape).find("multiples of 16") != std::string::npos);
  CHECK(launched(good, half.data(), out.data() + 1, shape).find("multiples of 8") != std::string::npos);
  stream.synchronize();
}

#endif
