// Chapter 05's kernels against float64, and the broken ones against the checker.

#define LADDER_NO_MAIN
#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "chapters/05-tiled-gemm/tiled_gemm.cu"
#include "chapters/05-tiled-gemm/wrong/wrong_kernels.cuh"
#include "harness/device/doctest_main.hpp"
#include "harness/device/under_sanitizer.hpp"
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

/// Small operands of a product of our own, as f16, and what it should be. Integers, so every sum is exact.
struct SmallProduct {
  Shape shape;
  std::vector<float> sum;  ///< [nt][od]
  GuardedBuffer<__half> weights, acts;
  /// @param multiplied whether to say what it should be
  explicit SmallProduct(Shape s, bool multiplied = true)
      : shape(s),
        sum(static_cast<std::size_t>(s.nt * s.od)),
        weights(static_cast<std::size_t>(s.od * s.id), "weights"),
        acts(static_cast<std::size_t>(s.nt * s.id), "acts") {
    std::vector<__half> w(weights.size()), a(acts.size());
    for (std::size_t i = 0; i < w.size(); ++i) w[i] = __half(fill_value(FillKind::tiny_int, 3, i));
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = __half(fill_value(FillKind::tiny_int, 4, i));
    weights.upload(w);
    acts.upload(a);
    for (long long t = 0; multiplied && t < s.nt; ++t) {
      for (long long r = 0; r < s.od; ++r) {
        float x = 0;
        for (long long k = 0; k < s.id; ++k) {
          x += static_cast<float>(w[static_cast<std::size_t>(r * s.id + k)]) *
               static_cast<float>(a[static_cast<std::size_t>(t * s.id + k)]);
        }
        sum[static_cast<std::size_t>(t * s.od + r)] = x;
      }
    }
  }
};

}  // namespace

TEST_CASE("every rung is right at every shape") {
  const Chapter chapter = chapter_05();
  std::vector<Shape> shapes;
  // A tile less one, a tile, a tile and one, of 16, 32, 64, 128 and 256; odd od; tails of k of every multiple of 8; two
  // whole steps and one more.
  for (const Shape& s :
       {Shape{1, 2, 8}, Shape{1, 1, 3}, Shape{2, 1, 31}, Shape{7, 9, 16}, Shape{9, 17, 40}, Shape{15, 31, 48},
        Shape{17, 33, 56}, Shape{31, 63, 72}, Shape{63, 65, 136}, Shape{64, 127, 64}, Shape{65, 129, 128},
        Shape{129, 131, 72}, Shape{257, 37, 96}, Shape{5, 257, 288}, Shape{30, 23, 1120}, Shape{3, 21, 2432},
        Shape{65, 7, 256}, Shape{2, 130, 768}}) {
    shapes.push_back(s);
  }
  Context ctx = testing::context_on(kDeviceExecutor);
  const std::size_t few = shapes.size();
  shapes = sampled(shapes, 6, 4);
  if (kDeviceExecutor == Executor::gpu && !under_sanitizer()) {
    // Several times as many tiles as multiprocessors, and a long k: blocks that do not start at once, stages that wrap.
    shapes.push_back({512, 18944, 3584});
    shapes.push_back({2048, 2048, 2048});
  }
  int checked = 0;
  for (const std::string& line : testing::check_chapter(chapter, shapes, ctx, &checked)) FAIL_CHECK(line);
  CHECK(checked >= static_cast<int>(300 * std::min(shapes.size(), few) / few));
}

TEST_CASE("every number of tokens to 130") {
  Context ctx = testing::context_on(kDeviceExecutor);
  Chapter chapter;
  for (const char* id : {"gemm_f16_nt", "gemm_f16_mma", "gemm_f16_mma_splitk", "gemm_qb_nt_q4_0"}) {
    chapter.rungs.push_back(find_rung(chapter_05(), id));
  }
  std::vector<Shape> shapes;
  for (long long nt = 1; nt <= 130; nt += under_sanitizer() ? 23 : 1)
    shapes.push_back({nt, 2 * (nt % 7) + 1, 32 * (2 * (nt % 2) + 1)});
  int checked = 0;
  for (const std::string& line : testing::check_chapter(chapter, shapes, ctx, &checked)) FAIL_CHECK(line);
  CHECK(checked == 4 * static_cast<int>(shapes.size()));
}

TEST_CASE("a token's result is the same bits alone and in company, and in every run") {
  Context ctx = testing::context_on(kDeviceExecutor);
  for (const Rung& r : sampled(chapter_05().rungs, 3)) {
    if (!r.peer_name.empty() || !r.supported({5, 21, 768}, ctx.device).ok()) continue;
    CAPTURE(r.id);
    const long long id = info(r.weight_type).block_elems == 256 ? 768 : 480;
    // Split-K divides k by the number of tiles, which is the same for these numbers of tokens.
    CHECK(testing::same_bits_alone_and_together(r, 5, 21, id, ctx));
    Operands ops({33, 70, id}, 1, r.form());
    ops.fill_inputs(FillKind::uniform, 9, ctx.stream);
    const std::vector<float> a = output(r, ops, ctx), b = output(r, ops, ctx);
    CHECK(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
  }
}

TEST_CASE("what a rung cannot take is refused with the reason") {
  Stream stream;
  Buffer<float> w(4096, "weights"), a(4096, "acts"), out(64, "out");
  for (const Rung& r : chapter_05().rungs) {
    if (!r.peer_name.empty() || r.math == MathUnit::wgmma_f16) continue;  // those have tests of their own
    CAPTURE(r.id);
    const auto refused = [&](Shape shape, const std::string& why) {
      CHECK(r.supported(shape, {}).message().find(why) != std::string::npos);
      CHECK(r.device(w.data(), a.data(), out.data(), shape, stream).message().find(why) != std::string::npos);
    };
    refused({0, 2, 256}, "nt, od and id must all be at least 1");
    refused({1, 0, 256}, "nt, od and id must all be at least 1");
    refused({1LL << 25, 2, 256}, "must be at most");
    if (r.id == "gemm_naive" || r.id == "gemm_shared") continue;  // these take any row, wherever it begins
    const int block = info(r.weight_type).block_elems, multiple = block == 1 ? 8 : block;
    refused({1, 2, multiple + multiple / 2}, "id must be a multiple of " + std::to_string(multiple));
    const auto* bytes = reinterpret_cast<const unsigned char*>(a.data());
    CHECK(r.device(w.data(), bytes + 8, out.data(), {1, 2, 256}, stream)
              .message()
              .find("multiple of 16 bytes") != std::string::npos);
    CHECK(r.device(reinterpret_cast<const unsigned char*>(w.data()) + 2, a.data(), out.data(), {1, 2, 256},
                   stream)
              .message()
              .find("must begin at a multiple of") != std::string::npos);
  }
}

TEST_CASE("epilogues: a bias, a residual that may be the output, and a scale for every token") {
  Stream stream;
  for (const Shape shape : {Shape{37, 66, 328}, Shape{70, 35, 200}, Shape{3, 131, 1032}}) {
    SmallProduct p(shape);
    const auto n = p.sum.size();
    std::vector<float> bias(static_cast<std::size_t>(shape.od)), residual(n),
        scale(static_cast<std::size_t>(shape.nt));
    for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = fill_value(FillKind::small_int, 5, i);
    for (std::size_t i = 0; i < n; ++i) residual[i] = fill_value(FillKind::small_int, 6, i);
    for (std::size_t i = 0; i < scale.size(); ++i) scale[i] = i % 3 == 0 ? 4.0f : 1.0f;
    Buffer<float> bias_on(bias.size(), "bias"), residual_on(n, "residual"),
        scale_on(scale.size(), "row_scale");
    bias_on.upload(bias);
    scale_on.upload(scale);
    for (const int ksplit : {1, 2, 5}) {
      for (int which = 0; which < 16; ++which) {
        CAPTURE(shape.id);
        CAPTURE(ksplit);
        CAPTURE(which);
        const bool in_place = (which & 8) != 0;
        if (in_place && (which & 2) == 0) continue;
        GuardedBuffer<float> out(n, "out");
        residual_on.upload(residual);
        if (in_place) out.upload(residual);
        GuardedBuffer<float> workspace(
            split_k_workspace_bytes(ksplit, shape.nt, shape.od) / sizeof(float) + 1, "workspace");
        GemmEpilogue e;
        if (which & 1) e.bias = bias_on.data();
        if (which & 2) e.residual = in_place ? out.data() : residual_on.data();
        if (which & 4) e.row_scale = scale_on.data();
        require(launch_gemm_f16_mma_tile<MmaTile<64, 64, 64, 3, 32, 32, 2>>(
            p.weights.data(), p.acts.data(), out.data(), shape, e, ksplit, workspace.data(), stream));
        stream.synchronize();
        std::vector<float> got(n);
        REQUIRE(out.download(got));
        std::vector<float> left(workspace.size());
        CHECK(workspace.download(left));  // its guards are whole
        int wrong = 0;
        for (std::size_t i = 0; i < n; ++i) {
          const std::size_t t = i / static_cast<std::size_t>(shape.od),
                            r = i % static_cast<std::size_t>(shape.od);
          float want = p.sum[i];
          if (which & 4) want *= scale[t];
          if (which & 1) want += bias[r];
          if (which & 2) want += residual[i];
          wrong += got[i] == want ? 0 : 1;
        }
        CHECK(wrong == 0);
      }
    }
  }
}

TEST_CASE("the second kernel of a divided k: its workspace and its refusals") {
  Stream stream;
  Buffer<float> f(64, "f");
  CHECK(split_k_workspace_bytes(1, 512, 896) == 0);
  CHECK(split_k_workspace_bytes(3, 512, 896) == std::size_t{3} * 512 * 896 * 4);
  CHECK_FALSE(launch_split_k_reduce(f.data(), f.data(), {}, 0, 1, 1, stream).ok());
  CHECK_FALSE(launch_split_k_reduce(f.data() + 1, f.data(), {}, 1, 1, 1, stream).ok());
}

TEST_CASE("tiles that are cut along k: every step once, and no block waits for one after it") {
  for (const int blocks : {1, 2, 7, 132}) {
    for (const int steps : {1, 4, 5, 56}) {
      for (const int tiles : {1, 3, 131, 133, 300}) {
        for (const int cut : {0, 1, tiles / 2, tiles}) {
          CAPTURE(blocks);
          CAPTURE(steps);
          CAPTURE(tiles);
          CAPTURE(cut);
          const MmaShares shares{tiles, cut, steps, cut * steps / blocks, cut * steps % blocks};
          std::vector<int> times(static_cast<std::size_t>(tiles * steps));
          int wrong = 0;
          for (int block = 0; block < blocks; ++block) {
            MmaPieces piece(shares, block, blocks);
            const int all = piece.all_steps();
            int seen = 0;
            for (bool first = true; piece.next(); first = false) {
              for (int k = piece.step; k < piece.end; ++k)
                ++times[static_cast<std::size_t>(piece.tile * steps + k)];
              seen += piece.end - piece.step;
              wrong += piece.step < piece.end && piece.end <= steps ? 0 : 1;
              // What is left for another block is the first thing that a block does.
              if (piece.end < steps && !first) ++wrong;
              // And what a tile's last piece lacks are the shares of the blocks before this one.
              if (piece.step > 0 && MmaPieces::first_step(shares, block) != piece.tile * steps + piece.step)
                ++wrong;
            }
            wrong += seen == all ? 0 : 1;
          }
          for (const int n : times) wrong += n == 1 ? 0 : 1;
          REQUIRE(wrong == 0);
        }
      }
    }
  }
  CHECK(gemm_f16_mma_tma_plan({512, 3584, 18944}, 132, false).cut == 0);
  for (const Shape s :
       {Shape{1, 1, 8}, Shape{512, 896, 4864}, Shape{512, 3584, 18944}, Shape{8192, 8192, 8192}}) {
    const MmaTmaPlan plan = gemm_f16_mma_tma_plan(s, 132, true);
    CHECK(plan.tile >= 0);
    CHECK(plan.tile < static_cast<int>(std::tuple_size_v<MmaTmaTiles>));
    CHECK(plan.cut >= 0);
  }
}

#if defined(__CUDACC__)
TEST_CASE("gemm_f16_mma_tma: several tiles a block, cut or whole, are right in every run") {
  if (device_info().cc_major != 9) return;
  Stream stream;
  const auto multiply = [&](auto tile, const SmallProduct& p, int cut, const GemmEpilogue& e,
                            std::vector<float>& got) {
    const int sms = multiprocessor_count();
    GuardedBuffer<float> sums(gemm_f16_mma_tma_sums_bytes(sms) / sizeof(float), "sums"),
        out(p.sum.size(), "out");
    Buffer<unsigned> flags(gemm_f16_mma_tma_flags(sms), "flags");
    sums.poison();
    out.poison();
    flags.fill_bytes(0);
    require(launch_gemm_f16_mma_tma_tile<decltype(tile)>(p.weights.data(), p.acts.data(), out.data(), p.shape,
                                                         e, cut, {sums.data(), flags.data()}, stream, true));
    stream.synchronize();
    REQUIRE(out.download(got));
    std::vector<float> left(sums.size());
    CHECK(sums.download(left));  // its guards are whole
    std::vector<unsigned> raised(flags.size());
    flags.download(raised);
    CHECK(std::count(raised.begin(), raised.end(), 0u) == static_cast<long>(raised.size()));
  };
  {
    const SmallProduct p({500, 1207, 328});  // 152 tiles of 64 x 64, 6 steps
    std::vector<float> bias(1207), got(p.sum.size());
    for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = fill_value(FillKind::small_int, 5, i);
    Buffer<float> bias_on(bias.size(), "bias");
    bias_on.upload(bias);
    for (const int cut : sampled<int>({0, 1, 2, 20, 132, 152}, 4)) {
      for (const bool add : {false, true}) {
        CAPTURE(cut);
        GemmEpilogue e;
        if (add) e.bias = bias_on.data();
        const auto wrong = [&](auto tile) {
          multiply(tile, p, std::min(cut, tile.TN == 64 ? 152 : 76), e, got);
          int count = 0;
          for (std::size_t i = 0; i < got.size(); ++i)
            count += got[i] == p.sum[i] + (add ? bias[i % bias.size()] : 0.0f) ? 0 : 1;
          return count;
        };
        CHECK(wrong(MmaTile<64, 64, 64, 8, 32, 32, 1>()) == 0);
        CHECK(wrong(MmaTile<128, 64, 64, 8, 32, 32, 1>()) == 0);
      }
    }
  }
  if (!under_sanitizer()) {
    // Stages that go back to the copy engine too early are wrong in about every other run of this.
    const Shape shape{512, 18944, 3584};
    SmallProduct p(shape, false);
    GuardedBuffer<float> expected(p.sum.size(), "expected");
    require(
        launch_gemm_f16_mma(p.weights.data(), p.acts.data(), expected.data(), shape, {}, nullptr, stream));
    stream.synchronize();
    std::vector<float> want(p.sum.size()), got(p.sum.size());
    REQUIRE(expected.download(want));
    for (int run = 0; run < 12; ++run) {
      CAPTURE(run);
      multiply(MmaTile<128, 128, 64, 6, 64, 32, 1>(), p, run % 2 == 0 ? 0 : 592 - 4 * 132, {}, got);
      CHECK(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) == 0);
    }
  }
}
#endif

#if !defined(__CUDACC__)
namespace {

emu::Counters counts_of(const std::string& id, Shape shape, Context& ctx) {
  const Chapter chapter = chapter_05();
  const Rung& r = find_rung(chapter, id);
  Operands ops(shape, 1, r.form());
  ops.fill_inputs(FillKind::uniform, 1, ctx.stream);
  const emu::counting on;
  require(run_once(r, ops, 0, ctx, ctx.stream));
  emu::Counters c = emu::last_launch();
  CHECK(c.findings.empty());
  return c;
}

}  // namespace

TEST_CASE("tiles turn bytes into products as the text says") {
  Context ctx = testing::context_on(kDeviceExecutor);
  const Shape shape{128, 128, 256};
  const std::uint64_t products = 128ull * 128 * 256;
  // Bytes asked for from global memory, both operands: each product its own two, then each tile's once.
  const auto bytes = [&](const std::string& id) {
    const emu::Counters c = counts_of(id, shape, ctx);
    return c.of_buffer("weights", emu::Access::read).bytes + c.of_buffer("acts", emu::Access::read).bytes;
  };
  CHECK(bytes("gemm_naive") == products * 4);
  CHECK(bytes("gemm_shared") == products * 4 / 32);
  CHECK(bytes("gemm_register") == products * 4 / 128);
  CHECK(bytes("gemm_f16_nt") == products * 2 / 64 + products * 2 / 128);
}

TEST_CASE("a swizzle or a stride of an odd number of 16-byte chunks takes the conflicts away") {
  Context ctx = testing::context_on(kDeviceExecutor);
  const Shape shape{64, 128, 256};
  const auto conflicts = [&](const std::string& id) {
    return counts_of(id, shape, ctx).total.shared_total().conflicts();
  };
  const std::uint64_t plain = conflicts("gemm_f16_nt"), k64 = conflicts("gemm_f16_nt_k64");
  CHECK(conflicts("gemm_f16_nt_s80") * 4 < plain);
  CHECK(conflicts("gemm_f16_nt_k64_s144") * 8 < k64);
  CHECK(k64 > 2 * plain);
  // ldmatrix: eight rows 64 bytes apart are four passes where one would do, so three conflicts for each of four matrices.
  const emu::Counters c = counts_of("gemm_f16_mma_w32_plain", shape, ctx);
  const std::uint64_t ldmatrix = 8ull * (256 / 16) * (2 + 2);  // warps, steps of 16, fragments
  CHECK(c.total.shared_total().conflicts() == ldmatrix * 4 * 3);
  for (const char* id : {"gemm_f16_mma_w32", "gemm_f16_mma_w64", "gemm_f16_mma_w64_s4", "gemm_f16_mma"}) {
    CHECK_MESSAGE(conflicts(id) == 0, id);
  }
}
#endif

namespace {

using Product = void (*)(const __half*, const __half*, float*, int, int, int);

Rung product_rung(Product kernel) {
  Rung r;
  r.id = "product";
  r.weight_type = WeightType::f16;
  r.acts = ActivationFormat::f16;
  r.roundings = [](Shape s, Executor) { return gemm_rungs::mma_roundings(s.id); };
  r.device = [kernel](const __half* w, const __half* a, float* out, Shape s, Stream& stream) {
    const dim3 grid(static_cast<unsigned>((s.nt + 15) / 16), static_cast<unsigned>((s.od + 15) / 16));
    return launch(kernel, grid, dim3(64), 0, stream, w, a, out, static_cast<int>(s.nt),
                  static_cast<int>(s.od), static_cast<int>(s.id));
  };
  return r;
}

/// Whether the checker accepts a product.
bool accepted(Product kernel, Context& ctx) {
  const Rung r = product_rung(kernel);
  Operands ops({19, 33, 1000}, 1, r.form());
  Reference reference;
  return check_rungs({&r}, ops, ctx, reference)[0].ok();
}

}  // namespace

TEST_CASE("the checker rejects every broken product, and accepts the one that differs by the bug only") {
  using wrong::Bug;
  Context ctx = testing::context_on(kDeviceExecutor);
  CHECK(accepted(wrong::product<Bug::none>, ctx));
  CHECK_FALSE(accepted(wrong::product<Bug::half_of_k>, ctx));
  CHECK_FALSE(accepted(wrong::product<Bug::fragment_swapped>, ctx));
  CHECK_FALSE(accepted(wrong::product<Bug::tail_dropped>, ctx));
  CHECK_FALSE(accepted(wrong::product<Bug::tail_unmasked>, ctx));
  CHECK_FALSE(accepted(wrong::product<Bug::last_tokens_dropped>, ctx));
  CHECK_FALSE(accepted(wrong::product<Bug::half_accumulator>, ctx));
  CHECK_FALSE(accepted(wrong::product<Bug::stale_buffer>, ctx));
  CHECK_FALSE(accepted(wrong::product<Bug::missing_barrier>, ctx));
#if !defined(__CUDACC__)
  // Without the second barrier the results are right as long as no warp falls far behind. Only a check of the accesses
  // themselves finds that.
  const auto races = [&](Product kernel) {
    const Rung r = product_rung(kernel);
    Operands ops({19, 33, 1000}, 1, r.form());
    ops.fill_inputs(FillKind::uniform, 1, ctx.stream);
    const emu::counting on;
    (void)run_once(r, ops, 0, ctx, ctx.stream);
    return emu::last_launch().findings.size();
  };
  CHECK(races(wrong::product<Bug::none>) == 0);
  CHECK(races(wrong::product<Bug::missing_last_barrier>) > 0);
#endif
}
