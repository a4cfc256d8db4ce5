// Chapter 06's kernels against float64, and the broken ones against the checker.

#define LADDER_NO_MAIN
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "chapters/06-mmq/mmq.cu"
#include "chapters/06-mmq/wrong/wrong_kernels.cuh"
#include "harness/device/doctest_main.hpp"
#include "harness/experiment/qwen_shapes.hpp"
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

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

TEST_CASE("every rung is right at every shape") {
  Context ctx = testing::context_on(kDeviceExecutor);
  const Chapter chapter = chapter_06();
  std::vector<Shape> shapes;
  // Tokens around the instruction's eight and sixteen, the sizes' 32 and 64, and the planes' tiles; rows around sixteen,
  // 64 and 128; id one block, less than a tile, odd multiples of a block, and more than the steps in shared memory.
  const long long ods[] = {1, 7, 16, 17, 33, 127, 129, 5}, ids[] = {32, 96, 256, 544, 768, 1056};
  int i = 0;
  for (const long long nt : {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 130}) {
    shapes.push_back({nt, ods[i % 8], ids[i % 6]});
    ++i;
  }
  for (const Shape& s : {Shape{9, 13, 2048}, Shape{33, 3, 2304}, Shape{70, 9, 1280}, Shape{3, 261, 256}})
    shapes.push_back(s);
  int checked = 0;
  shapes = sampled(shapes, 5, 2);
  for (const std::string& line : testing::check_chapter(chapter, shapes, ctx, &checked)) FAIL_CHECK(line);
  CHECK(checked >= (under_sanitizer() ? 80 : 420));
}

#if !defined(__CUDACC__)
TEST_CASE("CPU twins are right") {
  Context ctx = testing::context_on(Executor::cpu);
  int checked = 0;
  const std::vector<Shape> shapes = {{1, 7, 256}, {9, 13, 2048}, {70, 33, 1280}};
  for (const std::string& line : testing::check_chapter(chapter_06(), shapes, ctx, &checked))
    FAIL_CHECK(line);
  CHECK(checked == 6);
}
#endif

TEST_CASE("every token has its result for every number of tokens up to three tiles") {
  Context ctx = testing::context_on(kDeviceExecutor);
  Chapter chapter;
  const Chapter all = chapter_06();
  for (const char* id :
       {"q4_0_q8_mmq", "q4_k_q8_mmq", "q6_k_q8_mmq", "q6_k_q8_mmq_mma", "q4_k_q8_mmq_raw_b2"})
    chapter.rungs.push_back(find_rung(all, id));
  std::vector<Shape> shapes;
  for (long long nt = 1; nt <= 130; nt += nt < 70 ? 3 : 7) shapes.push_back({nt, 18, 256});
  shapes = sampled(shapes, 6);
  int checked = 0;
  for (const std::string& line : testing::check_chapter(chapter, shapes, ctx, &checked)) FAIL_CHECK(line);
  CHECK(checked == static_cast<int>(chapter.rungs.size() * shapes.size()));
}

TEST_CASE(
    "parts of k are added in one order: the same bits in every run, and with one part for any company") {
  Context ctx = testing::context_on(kDeviceExecutor);
  const Chapter chapter = chapter_06();
  for (const char* id : {"q4_0_q8_mmq_k1", "q4_0_q8_mmq_k2", "q4_0_q8_mmq_k4", "q4_0_q8_mmq_k8",
                         "q4_k_q8_mmq", "q4_k_q8_mmq_raw", "q4_0_q8_mmq_raw"}) {
    CAPTURE(id);
    const Rung& r = find_rung(chapter, id);
    Operands ops({19, 35, 2048}, 1, r.form());
    ops.fill_inputs(FillKind::uniform, 21, ctx.stream);
    const std::vector<float> first = output(r, ops, ctx);
    for (int run = 0; run < 3; ++run) CHECK(same_bits(output(r, ops, ctx), first));
  }
  for (const char* id : {"q4_0_q8_mmq_k1", "q4_k_q8_mmq_raw_k1"}) {
    CAPTURE(id);
    CHECK(testing::same_bits_alone_and_together(find_rung(chapter, id), 37, 21, 512, ctx));
  }
}

TEST_CASE("as many parts of k as fill the device, and never an empty one") {
  CHECK(mmq_raw_ksplit({64, 896, 4864}, 132) == 16);
  CHECK(mmq_raw_ksplit({16, 18944, 3584}, 132) == 2);
  CHECK(mmq_raw_ksplit({65, 896, 4864}, 132) == 1);
  CHECK(mmq_raw_ksplit({1, 896, 256}, 132) == 1);
  // Tiles enough for several rounds: sums written and read cost more than the last round's empty places.
  CHECK(mmq::plan<tiles::TileQ4_0>({512, 18944, 3584}, 132).ksplit == 1);
  CHECK(mmq::plan<tiles::TileQ4_K>({512, 3584, 3584}, 132).ksplit == 1);
  // Few tiles: small ones, and k in parts.
  CHECK(mmq::plan<tiles::TileQ4_0>({16, 896, 4864}, 132).few);
  CHECK(mmq::plan<tiles::TileQ4_0>({16, 896, 4864}, 132).ksplit > 8);
  CHECK_FALSE(mmq::plan<tiles::TileQ4_0>({512, 3584, 18944}, 132).few);
  for (const QwenLayer& l : all_qwen_layers()) {
    for (const long long nt : {1, 16, 32, 33, 64, 512}) {
      CAPTURE(l.name);
      const Shape s{nt, l.od, l.id};
      if (l.id % 256 == 0) CHECK(mmq_raw_ksplit(s, 132) <= l.id / 256);
      const int parts = mmq::plan<tiles::TileQ4_0>(s, 132).ksplit;
      const auto steps = tiles::steps<BlockQ4_0>(l.id);
      CHECK(parts >= 1);
      CHECK(parts <= kMostKSplit);
      CHECK((steps + parts - 1) / parts * (parts - 1) < steps);
      CHECK(mmq_workspace_bytes(WeightType::q4_0, s, 132) == split_k_workspace_bytes(parts, nt, l.od));
    }
  }
}

TEST_CASE("a bias and a residual are added, with k in one part and in several") {
  Context ctx = testing::context_on(kDeviceExecutor);
  Stream& stream = ctx.stream;
  const Shape s{19, 37, 1280};
  const WeightType type = WeightType::q5_1;
  Operands ops(s, 1, {type, ActivationFormat::pad40_t, &tiles::kLayout});
  ops.fill_inputs(FillKind::uniform, 3, stream);
  Buffer<float> bias(37, "bias"), residual(19 * 37, "residual");
  fill(bias.data(), bias.size(), FillKind::uniform, 4, stream);
  fill(residual.data(), residual.size(), FillKind::uniform, 5, stream);
  std::vector<float> b(bias.size()), res(residual.size());
  bias.download(b);
  residual.download(res);
  Workspace workspace;
  const mmq_rungs::Planes x(static_cast<const void*>(static_cast<const unsigned char*>(ops.acts(0))), s);
  const auto run = [&](int ksplit, const GemmEpilogue& e) {
    ops.out_buffer(0).poison();
    require(mmq::launch_format<tiles::TileQ5_1, mmq::Scaling::tensor>(
        static_cast<const unsigned char*>(ops.weights(0)), x.codes, x.scales, ops.out(0), s, ksplit,
        workspace.floats(split_k_workspace_bytes(ksplit, s.nt, s.od)), e, stream));
    stream.synchronize();
    std::vector<float> out(ops.out_buffer(0).size());
    CHECK(ops.out_buffer(0).download(out));
    return out;
  };
  for (const int ksplit : {1, 3}) {
    const std::vector<float> plain = run(ksplit, {});
    const std::vector<float> got = run(ksplit, {.bias = bias.data(), .residual = residual.data()});
    bool same = true;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const float want = (plain[i] + b[i % 37]) + res[i];
      same = same && std::bit_cast<std::uint32_t>(want) == std::bit_cast<std::uint32_t>(got[i]);
    }
    CHECK(same);
  }
}

TEST_CASE("what a rung cannot take is refused with the reason") {
  Stream stream;
  Buffer<float> w(4096, "weights"), a(8192, "acts"), out(256, "out");
  const auto refused = [&](const Rung& r, Shape shape, const std::string& why) {
    CHECK(r.supported(shape, {}).message() == why);
    CHECK(r.device(w.data(), a.data(), out.data(), shape, stream).message() == why);
  };
  for (const Rung& r : chapter_06().rungs) {
    CAPTURE(r.id);
    const int block = info(r.weight_type).block_elems;
    refused(r, {0, 2, 256}, "nt, od and id must all be at least 1");
    if (r.id.find("_raw") != std::string::npos) {
      refused(r, {1, 2, 288}, "id must be a multiple of 256, not 288");
    } else {
      refused(r, {1, 2, block + block / 2},
              "id must be a multiple of " + std::to_string(block) + ", the block of " +
                  info(r.weight_type).name + ", not " + std::to_string(block + block / 2));
    }
    if (!r.supported({1, 2, 256}, {}).ok()) continue;
    CHECK(r.device(w.data() + 1, a.data(), out.data(), {1, 2, 256}, stream).message() ==
          "weights and activations must begin at a multiple of 16 bytes");
    CHECK(r.device(w.data(), a.data() + 1, out.data(), {1, 2, 256}, stream).message() ==
          "weights and activations must begin at a multiple of 16 bytes");
  }
  CHECK(mmq_supported(WeightType::f16, {1, 1, 32}).message() ==
        "mmq_tiles: f16 weights have no blocks; types with blocks of 32 or 256 have tiles");
  CHECK(mmq_raw_supported(WeightType::q8_0, {1, 1, 256}).message() ==
        "mmq_raw: weights must be q4_0 or q4_k, not q8_0");
  const auto* codes = reinterpret_cast<const std::int8_t*>(a.data());
  const auto* scales = reinterpret_cast<const std::uint32_t*>(a.data());
  const auto split = [&](int ksplit, float* workspace) {
    return mmq::launch_format<tiles::TileQ4_0, mmq::Scaling::tensor>(
               w.data(), codes, scales, out.data(), {1, 2, 512}, ksplit, workspace, {}, stream)
        .message();
  };
  CHECK(split(5, out.data()) == "mmq_tiles: ksplit must be 1 to 4, not 5");
  CHECK(split(2, nullptr) == "mmq_tiles: ksplit above 1 needs a workspace");
  CHECK(launch_mmq_raw<BlockQ4_0>(w.data(), codes, scales, out.data(), {1, 2, 512}, 3, nullptr, {}, stream)
            .message() == "mmq_raw: ksplit must be 1 to 2, not 3");
  CHECK(mmq::launch_raw_plane(WeightType::q4_0, w.data(), w.data(), {1, 2, 256}, stream).message() ==
        "mmq_raw: only q4_k weights have a plane of scales");
}

TEST_CASE("blocks of outliers, of zeros, and with subnormal scales; activations that are not finite") {
  Context ctx = testing::context_on(kDeviceExecutor);
  const Shape shape{18, 9, 768};
  std::vector<float> acts(static_cast<std::size_t>(shape.nt * shape.id));
  for (std::size_t i = 0; i < acts.size(); ++i) {
    const float x = fill_value(FillKind::uniform, 3, i);
    // f16 scales: 23.6; 787; 0; 7.9e-7, a subnormal; 0 though the codes are not; one element alone.
    const float sizes[] = {3000.0f, 1e5f, 0.0f, 1e-4f, 1e-7f, i % 32 == 5 ? -1e5f : 1e-3f, 1.0f, 1.0f};
    acts[i] = x * sizes[i / 32 % 8];
  }
  for (const Rung& r : chapter_06().rungs) {
    if (!r.supported(shape, {}).ok()) continue;
    CAPTURE(r.id);
    Operands ops(shape, 1, r.form());
    ops.fill_inputs(FillKind::uniform, 11, ctx.stream);
    ops.upload_acts(acts, ctx.stream);
    const CheckResult check = check_once(r, ops, ops.reference(ctx.stream), CheckKind::random, ctx);
    CHECK_MESSAGE(check.ok, check.message);
    ops.upload_acts(std::vector<float>(acts.size(), 0.0f), ctx.stream);
    for (const float v : output(r, ops, ctx)) CHECK(v == 0.0f);
    std::vector<float> bad = acts;
    bad[static_cast<std::size_t>(3 * shape.id + 40)] = std::numeric_limits<float>::infinity();
    ops.upload_acts(bad, ctx.stream);
    const std::vector<float> out = output(r, ops, ctx);
    for (std::size_t i = 0; i < out.size(); ++i) CHECK(std::isnan(out[i]) == (i / 9 == 3));
  }
}

namespace {

using Product = void (*)(const unsigned char*, const std::int8_t*, const std::uint32_t*, float*, int, int,
                         int, int);

/// Whether the checker accepts a product.
bool accepted(Product kernel, Context& ctx, Shape shape = {67, 33, 1056}) {
  Rung r;
  r.id = "product";
  r.weight_type = WeightType::q4_0;
  r.acts = ActivationFormat::pad40_t;
  r.layout = &tiles::kLayout;
  r.roundings = [](Shape s, Executor) { return mmq_roundings(s.id); };
  r.device = [kernel](const unsigned char* w, const void* a, float* out, Shape s, Stream& stream) {
    const mmq_rungs::Planes x(a, s);
    return launch(
        kernel, dim3(static_cast<unsigned>((s.nt + 7) / 8), static_cast<unsigned>((s.od + 15) / 16)),
        dim3(32), 0, stream, w, x.codes, x.scales, out, static_cast<int>(s.nt), static_cast<int>(s.od),
        static_cast<int>(tiles::steps<BlockQ4_0>(s.id)), static_cast<int>(s.id / 32));
  };
  Operands ops(shape, 1, r.form());
  Reference reference;
  return check_rungs({&r}, ops, ctx, reference)[0].ok();
}

}  // namespace

TEST_CASE("the checker rejects every broken product, and accepts the one that differs by the bug only") {
  using wrong::Bug;
  Context ctx = testing::context_on(kDeviceExecutor);
  CHECK(accepted(wrong::q4_0_tile_product<Bug::none>, ctx));
  CHECK_FALSE(accepted(wrong::q4_0_tile_product<Bug::half_of_k>, ctx));
  CHECK_FALSE(accepted(wrong::q4_0_tile_product<Bug::zero_left_in>, ctx));
  CHECK_FALSE(accepted(wrong::q4_0_tile_product<Bug::zero_of_a_nibble>, ctx));
  CHECK_FALSE(accepted(wrong::q4_0_tile_product<Bug::tokens_exchanged>, ctx));
  CHECK_FALSE(accepted(wrong::q4_0_tile_product<Bug::scale_of_first>, ctx));
  CHECK_FALSE(accepted(wrong::q4_0_tile_product<Bug::last_chunk>, ctx));
  CHECK_FALSE(accepted(wrong::q4_0_tile_product<Bug::small_seed>, ctx));
  CHECK_FALSE(accepted(wrong::q4_0_tile_product<Bug::late_subtraction>, ctx, {9, 17, 4864}));
  CHECK_FALSE(accepted(wrong::q4_0_tile_product<Bug::half_accumulator>, ctx));
  CHECK_FALSE(accepted(wrong::q4_0_tile_product<Bug::second_half_stale>, ctx));
}
