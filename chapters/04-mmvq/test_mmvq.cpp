// Chapter 04's kernels against float64, and the broken ones against the checker.

#define LADDER_NO_MAIN
#include <cmath>
#include <cstring>

#include "chapters/04-mmvq/mmvq.cu"
#include "chapters/04-mmvq/wrong/wrong_kernels.cuh"
#include "harness/device/doctest_main.hpp"
#include "harness/experiment/testing.hpp"

using namespace ladder;

namespace {

/// Output of a rung on operands as they are.
std::vector<float> output(const Rung& rung, Operands& ops, Context& ctx) {
  ops.out_buffer(0).poison();
  require(run_once(rung, ops, 0, ctx, ctx.stream));
  ctx.stream.synchronize();
  std::vector<float> out(ops.out_buffer(0).size());
  if (!ops.out_buffer(0).download(out)) throw DeviceError("guard band changed");
  return out;
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace

TEST_CASE("every rung is right at every shape") {
  const Chapter chapter = chapter_04();
  std::vector<Shape> shapes = testing::block_shapes();
  // Every od to 20 with an odd multiple of 32 or 256, then primes; tokens of mmvq_multi's two sizes; long
  // rows.
  for (long long od = 1; od <= 20; ++od)
    shapes.push_back({1 + od % 3, od, (od % 2 != 0 ? 32 : 256) * (2 * od - 1)});
  for (const Shape& s : {Shape{1, 23, 1120}, Shape{4, 29, 768}, Shape{5, 31, 1248}, Shape{8, 37, 1792},
                         Shape{1, 3, 18944}, Shape{2, 1, 18944}, Shape{1, 2, 8448}}) {
    shapes.push_back(s);
  }
  Context ctx = testing::context_on(kDeviceExecutor);
  int checked = 0;
  shapes = sampled(shapes, 18, 7);
  for (const std::string& line : testing::check_chapter(chapter, shapes, ctx, &checked)) FAIL_CHECK(line);
  CHECK(checked >= (under_sanitizer() ? 100 : 2000));
}

TEST_CASE("a token's result is the same bits alone and in company") {
  Context ctx = testing::context_on(kDeviceExecutor);
  for (const Rung& r : chapter_04().rungs) {
    CAPTURE(r.id);
    for (const long long nt : sampled<long long>({2, 3, 4, 5, 6, 7, 8}, 7, 1)) {
      if (nt != 3 && nt != 8 && !ends_with(r.id, "_multi"))
        continue;  // these launch every token alone anyway
      CHECK(testing::same_bits_alone_and_together(r, nt, 13, 1280, ctx));
    }
  }
}

TEST_CASE("several tokens in one pass give the bits of one after the other") {
  Context ctx = testing::context_on(kDeviceExecutor);
  const Chapter chapter = chapter_04();
  int compared = 0;
  for (const Rung& multi : chapter.rungs) {
    if (!ends_with(multi.id, "_multi")) continue;
    CAPTURE(multi.id);
    const Rung& single = find_rung(chapter, multi.id.substr(0, multi.id.size() - 6) + "_v2");
    for (const long long nt : {1, 2, 5, 8}) {
      for (const long long id : sampled<long long>({256, 4864}, 2)) {
        Operands ops({nt, 7, id}, 1, multi.form());
        ops.fill_inputs(FillKind::uniform, 21, ctx.stream);
        const std::vector<float> a = output(multi, ops, ctx), b = output(single, ops, ctx);
        CHECK(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
        ++compared;
      }
    }
  }
  CHECK(compared == 12 * 4 * (under_sanitizer() ? 1 : 2));
}

TEST_CASE("what a rung cannot take is refused with the reason") {
  Stream stream;
  Buffer<float> w(4096, "weights"), a(4096, "acts"), out(64, "out");
  const auto refused = [&](const Rung& r, Shape shape, const std::string& why) {
    CHECK(r.supported(shape, {}).message() == why);
    CHECK(r.device(w.data(), a.data(), out.data(), shape, stream).message() == why);
  };
  for (const Rung& r : chapter_04().rungs) {
    CAPTURE(r.id);
    const int block = info(r.weight_type).block_elems;
    refused(r, {1, 2, block + block / 2},
            "id must be a multiple of " + std::to_string(block) + ", the block of " +
                info(r.weight_type).name + ", not " + std::to_string(block + block / 2));
    refused(r, {0, 2, 256}, "nt, od and id must all be at least 1");
    refused(r, {1, 0, 256}, "nt, od and id must all be at least 1");
    const bool tiled = r.acts == ActivationFormat::planes40;
    if (tiled || ends_with(r.id, "_multi")) {
      refused(r, {9, 2, 256}, "nt must be 1 to 8, not 9");
    } else {
      refused(r, {65536, 2, 256}, "nt must be 1 to 65535, not 65536");
      CHECK(r.supported({65535, 2, 256}, {}).ok());
    }
    const std::string both = "weights and activations must begin at a multiple of 16 bytes";
    CHECK(r.device(w.data() + 1, a.data(), out.data(), {1, 2, 256}, stream).message() ==
          (tiled ? both : "weights must begin at a multiple of 16 bytes"));
    const auto* bytes = reinterpret_cast<const unsigned char*>(a.data());
    if (tiled) {
      CHECK(r.device(w.data(), bytes + 4, out.data(), {1, 2, 256}, stream).message() == both);
      continue;
    }
    CHECK(r.device(w.data(), bytes + 2, out.data(), {1, 2, 256}, stream)
              .message()
              .find("activations must begin at a multiple of ") == 0);
  }
}

TEST_CASE("blocks of outliers, of zeros, and with subnormal scales") {
  Context ctx = testing::context_on(kDeviceExecutor);
  const Shape shape{2, 9, 768};
  std::vector<float> acts(static_cast<std::size_t>(shape.nt * shape.id));
  for (std::size_t i = 0; i < acts.size(); ++i) {
    const float x = fill_value(FillKind::uniform, 3, i);
    // f16 scales: 23.6; 787; 0; 7.9e-7, a subnormal; 0 though the codes are not; one element alone.
    const float sizes[] = {3000.0f, 1e5f, 0.0f, 1e-4f, 1e-7f, i % 32 == 5 ? -1e5f : 1e-3f, 1.0f, 1.0f};
    acts[i] = x * sizes[i / 32 % 8];
  }
  for (const Rung& r : chapter_04().rungs) {
    CAPTURE(r.id);
    Operands ops(shape, 1, r.form());
    ops.fill_inputs(FillKind::uniform, 11, ctx.stream);
    ops.upload_acts(acts, ctx.stream);
    const CheckResult check = check_once(r, ops, ops.reference(ctx.stream), CheckKind::random, ctx);
    CHECK_MESSAGE(check.ok, check.message);
    ops.upload_acts(std::vector<float>(acts.size(), 0.0f), ctx.stream);
    for (const float v : output(r, ops, ctx)) CHECK(v == 0.0f);
  }
}

TEST_CASE("every unit of a row has a lane, and no more warps than that needs") {
  for (long long units = 1; units <= 3000; ++units) {
    for (const long long groups : {1LL, 896LL, 37984LL}) {
      const MmvqPlan p = mmvq_plan(units, groups);
      CAPTURE(units);
      REQUIRE(p.warps_per_group >= 1);
      REQUIRE(p.groups_per_block >= 1);
      REQUIRE(p.warps() <= kMmvqMaxWarps);
      const auto passes = [&](long long warps) { return (units + 32 * warps - 1) / (32 * warps); };
      REQUIRE(passes(p.warps_per_group) == passes(kMmvqMaxWarps));
      if (p.warps_per_group > 1) REQUIRE(passes(p.warps_per_group - 1) > passes(p.warps_per_group));
      REQUIRE(mmvq_plan(units, 1).warps_per_group == p.warps_per_group);
    }
  }
  CHECK(mmvq_plan(152, 224).warps() == 5);
  CHECK(mmvq_plan(28, 37984).groups_per_block == 8);
}

#if !defined(__CUDACC__)
TEST_CASE("requests and sectors are what the text says") {
  Context ctx = testing::context_on(kDeviceExecutor);
  const Chapter chapter = chapter_04();
  // Rows of whole warps: 4 warps' worth of units of 32, or 2 of units of 64.
  const auto counts = [&](const std::string& id, long long nt = 1) {
    const Rung& r = find_rung(chapter, id);
    Operands ops({nt, 64, 4096}, 1, r.form());
    ops.fill_inputs(FillKind::uniform, 1, ctx.stream);
    const emu::counting on;
    require(run_once(r, ops, 0, ctx, ctx.stream));
    const emu::Counters c = emu::last_launch();
    CHECK(c.findings.empty());
    return std::pair(c.of_buffer("weights", emu::Access::read), c.of_buffer("acts", emu::Access::read));
  };
  {
    const auto [w, a] = counts("q4_0_q8_mmvq");  // 18 and 40 bytes apart
    CHECK(w.sectors == 64 * 4 * 9 * 18);
    CHECK(a.requests == 64 * 4 * 10);
    CHECK(a.sectors == 64 * 4 * 10 * 32);
  }
  {
    const auto [w, a] = counts("q4_0_q8_mmvq_rows");  // a quarter of the requests for activations
    CHECK(w.sectors == 64 * 4 * 9 * 18);
    CHECK(a.requests == 16 * 4 * 10);
  }
  {
    const auto [w, a] = counts("q4_0_q8_mmvq_v2");  // half of those
    CHECK(a.requests == 16 * 4 * 5);
  }
  {
    const auto [w, a] = counts("q8_0_q8_mmvq");  // 34 bytes apart: a sector for every lane
    CHECK(w.sectors == 64 * 4 * 17 * 32);
  }
  {
    const auto [w, a] = counts("q4_k_q8_mmvq");  // 32 lanes share 4 blocks: 4 words of a header, 8 of nibbles
    CHECK(w.sectors == 64 * 4 * (4 * 4 + 8 * 16));
    CHECK(a.sectors == 64 * 4 * 10 * 32);
  }
  {
    const auto [w, a] = counts("q4_k_q8_mmvq_v2");  // a header for four lanes, and twice 16 bytes of 32
    CHECK(w.sectors == 64 * 2 * (8 + 32 + 32));
    CHECK(a.requests == 16 * 2 * 10);
  }
  {
    const auto [w, a] = counts("q4_0_q8_mmvq_multi", 8);  // the weights once, the activations of each token
    CHECK(w.requests == 64 * 4 * 5);
    CHECK(a.requests == 8 * 32 * 4 * 5);
  }
  {
    const auto [w, a] = counts("q4_0_q8_mmvq_pf");  // a chunk is 576 bytes, 36 copies: two requests
    CHECK(w.requests == 64 * 4 * 2);
    CHECK(w.sectors == 64 * 4 * 18);  // each sector once
    CHECK(a.requests == 32 * 4 * 5);
  }
  // Loads for 64 weights, plain and V2.
  struct Loads {
    const char* type;
    std::uint64_t plain, v2;
  };
  for (const Loads& l :
       {Loads{"q8_0", 34, 18}, Loads{"q5_1", 12, 6}, Loads{"q5_0", 22, 12}, Loads{"q4_1", 10, 10},
        Loads{"q4_0", 18, 10}, Loads{"iq4_nl", 18, 10}, Loads{"q6_k", 68, 19}, Loads{"q5_k", 40, 5},
        Loads{"q4_k", 24, 3}, Loads{"iq4_xs", 12, 6}, Loads{"q3_k", 70, 15}, Loads{"q2_k", 20, 7}}) {
    const std::string id = std::string(l.type) + "_q8_mmvq";
    CHECK_MESSAGE(counts(id).first.requests == 64 * 2 * l.plain, l.type);
    CHECK_MESSAGE(counts(id + "_rows").first.requests == 64 * 2 * l.plain, l.type);
    CHECK_MESSAGE(counts(id + "_v2").first.requests == 64 * 2 * l.v2, l.type);
  }
}
#endif

namespace {

using Product = void (*)(const unsigned char*, const BlockQ8Pad40*, float*, int, int, int);

/// Whether the checker accepts a product.
bool accepted(WeightType type, Product kernel, Context& ctx) {
  Rung r;
  r.id = "product";
  r.weight_type = type;
  r.acts = ActivationFormat::pad40;
  r.roundings = [](Shape s, Executor) { return static_cast<double>(s.id / 16 + 8); };
  r.device = [kernel](const unsigned char* w, const BlockQ8Pad40* a, float* out, Shape s, Stream& stream) {
    return launch(kernel, dim3(static_cast<unsigned>((s.nt * s.od + 63) / 64)), dim3(64), 0, stream, w, a,
                  out, static_cast<int>(s.nt), static_cast<int>(s.od), static_cast<int>(s.id));
  };
  Operands ops({3, 33, info(type).block_elems == 32 ? 1120 : 1280}, 1, r.form());
  Reference reference;
  return check_rungs({&r}, ops, ctx, reference)[0].ok();
}

}  // namespace

TEST_CASE("the checker rejects every broken product, and accepts those that differ by the bug only") {
  using wrong::Bug;
  Context ctx = testing::context_on(kDeviceExecutor);
  CHECK(accepted(WeightType::q4_0, wrong::q4_0_product<Bug::none>, ctx));
  CHECK_FALSE(accepted(WeightType::q4_0, wrong::q4_0_product<Bug::sum_forgotten>, ctx));
  CHECK_FALSE(accepted(WeightType::q4_0, wrong::q4_0_product<Bug::sum_of_first_block>, ctx));
  CHECK_FALSE(accepted(WeightType::q4_0, wrong::q4_0_product<Bug::half_of_k>, ctx));
  CHECK_FALSE(accepted(WeightType::q4_0, wrong::q4_0_product<Bug::neighbouring_nibbles>, ctx));
  CHECK_FALSE(accepted(WeightType::q4_0, wrong::q4_0_product<Bug::tokens_mixed_up>, ctx));
  CHECK_FALSE(accepted(WeightType::q4_0, wrong::q4_0_product<Bug::half_accumulator>, ctx));
  CHECK_FALSE(accepted(WeightType::q4_0, wrong::q4_0_product<Bug::last_row_dropped>, ctx));
  CHECK(accepted(WeightType::q4_1, wrong::q4_1_product<Bug::none>, ctx));
  CHECK_FALSE(accepted(WeightType::q4_1, wrong::q4_1_product<Bug::minimum_unscaled>, ctx));
  CHECK(accepted(WeightType::q6_k, wrong::q6_k_product<Bug::none>, ctx));
  CHECK_FALSE(accepted(WeightType::q6_k, wrong::q6_k_product<Bug::scale_of_first_half>, ctx));
  CHECK_FALSE(accepted(WeightType::q6_k, wrong::q6_k_product<Bug::half_sum_is_whole>, ctx));
}
