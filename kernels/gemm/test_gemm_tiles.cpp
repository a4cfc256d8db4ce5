// Packed weights as f16 operands: activations, fragments, both kernels that multiply them, and how one of them divides
// its work.
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "harness/device/doctest_main.hpp"
#include "harness/device/under_sanitizer.hpp"
#include "harness/experiment/qwen_shapes.hpp"
#include "harness/experiment/testing.hpp"
#include "kernels/gemm/acts_f16.cuh"
#include "kernels/gemm/dequantize_tiles.cuh"
#include "kernels/gemm/gemm_tiles_mma.cuh"
#include "kernels/gemm/gemm_tiles_wgmma.cuh"
#include "kernels/quant/dequantize.cuh"

using namespace ladder;

namespace {

std::vector<WeightType> types() {
  std::vector<WeightType> all;
  for (const WeightTypeInfo& t : kWeightTypes) {
    if (tiles::has_tiles(t.type)) all.push_back(t.type);
  }
  return all;
}

Rung rung_of(WeightType type, DeviceMatmul launcher) {
  Rung r;
  r.id = std::string(info(type).name) + " tiles";
  r.weight_type = type;
  r.acts = ActivationFormat::f16_tiles;
  r.layout = &tiles::kLayout;
  r.operand_rounding = tiles::half_rounding(type);
  r.supported = [type](Shape s, const DeviceInfo&) { return gemm_tiles_supported(type, s); };
  r.roundings = [](Shape s, Executor) { return gemm_tiles_roundings(s.id); };
  r.device = std::move(launcher);
  return r;
}

GemmTilesPart part_of(const void* w, float* out, Shape s) { return {w, out, static_cast<int>(s.od)}; }

/// Shapes about the edges of blocks of 64 tokens and 128 rows, and of tiles along k.
std::vector<Shape> shapes() {
  return {{1, 1, 32},    {9, 40, 256},  {7, 17, 96},    {64, 128, 160}, {65, 129, 512},
          {66, 33, 544}, {3, 20, 1280}, {130, 5, 1056}, {10, 131, 768}};
}

/// Those that a type takes.
std::vector<Shape> taken(WeightType type, std::vector<Shape> at) {
  std::erase_if(at, [type](const Shape& s) { return !gemm_tiles_supported(type, s).ok(); });
  return at;
}

/// Checks `launcher` for a type. @return how many shapes it has been checked at
int check_type(WeightType type, const DeviceMatmul& launcher, const std::vector<Shape>& at, Context& ctx) {
  Chapter chapter;
  chapter.rungs = {rung_of(type, launcher)};
  int checked = 0;
  for (const std::string& line : testing::check_chapter(chapter, at, ctx, &checked)) FAIL_CHECK(line);
  return checked;
}

std::vector<float> floats(const Buffer<float>& b) {
  std::vector<float> v(b.size());
  b.download(v);
  return v;
}

/// Whether this device has wgmma.
bool has_wgmma() { return gemm_tiles_wgmma_supported(WeightType::q4_0, {9, 16, 32}, device_info()).ok(); }

/// A workspace for all plans of this device.
struct Workspace {
  Buffer<float> partial{gemm_tiles_most_partial_bytes(multiprocessor_count()) / sizeof(float), "partial"};
  Buffer<unsigned> flags{static_cast<std::size_t>(multiprocessor_count()), "flags"};
  Workspace() { flags.fill_bytes(0); }
  GemmTilesWorkspace get() { return {partial.data(), flags.data()}; }
  bool flags_are_clear() const {
    std::vector<unsigned> f(flags.size());
    flags.download(f);
    return f == std::vector<unsigned>(f.size());
  }
};

}  // namespace

TEST_CASE("gemm_tiles_mma is right for every type and at every edge") {
  Context ctx = testing::context_on(kDeviceExecutor);
  std::size_t n = 0;
  for (const WeightType type : types()) {
    CAPTURE(info(type).name);
    const std::vector<Shape> all = taken(type, shapes()), at = sampled(all, 3, n++);
    CHECK(all.size() == (info(type).block_elems == 32 ? 9 : 4));
    const int checked = check_type(
        type,
        [type](const void* w, const void* x, float* out, Shape s, Stream& stream) {
          const GemmTilesPart part = part_of(w, out, s);
          return launch_gemm_tiles_mma(type, {&part, 1}, x, s.nt, s.id, stream);
        },
        at, ctx);
    CHECK(checked == static_cast<int>(at.size()));
  }
}

TEST_CASE("gemm_tiles_wgmma is right for every type, block and division") {
  if (!has_wgmma()) {
    MESSAGE("no wgmma on this device; its fragments are those of gemm_tiles_mma");
    return;
  }
  Context ctx = testing::context_on(kDeviceExecutor);
  Workspace workspace;
  const int sms = multiprocessor_count();
  std::size_t n = 0;
  for (const WeightType type : types()) {
    CAPTURE(info(type).name);
    std::vector<Shape> all = taken(type, shapes());
    all.push_back({300, 520, 2048});  // tiles and tokens of every block cut
    CHECK(all.size() == (info(type).block_elems == 32 ? 10 : 5));
    for (const tiles::GemmTilesBlock& b : tiles::kGemmTilesBlocks) {
      if (!tiles::has_block(b, type, false)) continue;
      const std::vector<Shape> at = sampled(all, all.size(), n / 2);
      for (const bool cut : sampled<bool>({false, true}, 2, n++)) {
        CAPTURE(b.rows);
        CAPTURE(b.tokens);
        CAPTURE(cut);
        const int checked = check_type(
            type,
            [&](const void* w, const void* x, float* out, Shape s, Stream& stream) {
              const GemmTilesPart part = part_of(w, out, s);
              const long long span = info(type).block_elems == 256 ? 256 : 128;
              const GemmTilesPlan plan = tiles::divide(b.rows, b.tokens, b.cluster, tiles::row_tiles(s.od),
                                                       s.nt, (s.id + span - 1) / span, sms, cut);
              return launch_gemm_tiles_wgmma(type, {&part, 1}, x, s.nt, s.id, plan, workspace.get(), stream);
            },
            at, ctx);
        CHECK(checked == static_cast<int>(at.size()));
      }
    }
    CHECK(workspace.flags_are_clear());
  }
}

TEST_CASE("gemm_tiles_few is right for every type that has it, with every block") {
  Context ctx = testing::context_on(kDeviceExecutor);
  std::size_t n = 0;
  for (const WeightType type : types()) {
    if (!tiles::is_common(type)) continue;
    CAPTURE(info(type).name);
    // Fewer steps than warps along k, and more; tokens and rows about the edges of all blocks.
    const std::vector<Shape> all =
        taken(type, {{1, 1, 32}, {9, 40, 256}, {65, 33, 544}, {10, 131, 768}, {31, 113, 2304}});
    CHECK(all.size() == (info(type).block_elems == 32 ? 5 : 3));
    for (const tiles::GemmFewBlock& b : tiles::kGemmFewBlocks) {
      if (!b.exists(type, false)) continue;
      const std::vector<Shape> at = sampled(all, all.size(), n++);
      CAPTURE(b.rows());
      CAPTURE(b.tokens);
      const int checked = check_type(
          type,
          [&](const void* w, const void* x, float* out, Shape s, Stream& stream) {
            const GemmTilesPart part = part_of(w, out, s);
            return launch_gemm_tiles_wgmma(type, {&part, 1}, x, s.nt, s.id,
                                           tiles::few_plan(b, tiles::row_tiles(s.od), s.nt), {}, stream);
          },
          at, ctx);
      CHECK(checked == static_cast<int>(at.size()));
    }
  }
}

TEST_CASE("a real layer's rows, divided as planned") {
  if (!has_wgmma()) {
    MESSAGE("no wgmma on this device");
    return;
  }
  Context ctx = testing::context_on(kDeviceExecutor);
  Workspace workspace;
  const WeightType type = WeightType::q4_k;
  std::vector<Shape> at = {{9, 1536, 1536}, {65, 2048, 1536}};
  if (!under_sanitizer()) {
    at.insert(at.end(),
              {{9, 3584, 3584}, {65, 4608, 3584}, {512, 3584, 3584}, {512, 3584, 18944}, {200, 18944, 3584}});
  }
  const int checked = check_type(
      type,
      [&](const void* w, const void* x, float* out, Shape s, Stream& stream) {
        const GemmTilesPart part = part_of(w, out, s);
        return launch_gemm_tiles_wgmma(type, {&part, 1}, x, s.nt, s.id,
                                       gemm_tiles_plan(type, s, multiprocessor_count()), workspace.get(),
                                       stream);
      },
      at, ctx);
  CHECK(checked == static_cast<int>(at.size()));
  CHECK(workspace.flags_are_clear());
}

TEST_CASE("several matrices, biases, residuals and scales in one launch") {
  Stream stream;
  const WeightType type = WeightType::q5_0;
  const int nt = 70, id = 288;
  const std::array<int, 3> ods = {37, 16, 150};
  std::vector<GuardedBuffer<float>> outs, plain;
  std::vector<Buffer<unsigned char>> weights;
  Buffer<float> x(nt * id, "x"), bias(150, "bias"), residual(nt * 150, "residual"), scale(nt, "scale");
  fill(x.data(), x.size(), FillKind::uniform, 3, stream);
  fill(bias.data(), bias.size(), FillKind::uniform, 4, stream);
  fill(residual.data(), residual.size(), FillKind::uniform, 5, stream);
  std::vector<float> scales(nt);
  for (int t = 0; t < nt; ++t) scales[static_cast<std::size_t>(t)] = std::ldexp(1.0f, t % 5);
  scale.upload(scales);
  Buffer<__half> h(nt * id, "h");
  require(launch_acts_f16(x.data(), nullptr, 0.0f, h.data(), nullptr, nt, id, HalfOrder::tiles, stream));
  std::vector<GemmTilesPart> parts;
  for (std::size_t p = 0; p < 3; ++p) {
    const Shape s{nt, ods[p], id};
    Buffer<unsigned char> blocks(static_cast<std::size_t>(s.od) * row_bytes(type, id), "blocks");
    fill_weights(blocks.data(), type, s.od, id, FillKind::uniform, static_cast<unsigned>(s.od), stream);
    weights.emplace_back(tiles::bytes(type, s), "tiles");
    require(tiles::launch_repack(type, blocks.data(), weights.back().data(), s, stream));
    stream.synchronize();
    outs.emplace_back(static_cast<std::size_t>(nt * s.od), "out");
    plain.emplace_back(static_cast<std::size_t>(nt * s.od), "plain");
    const GemmTilesPart alone = part_of(weights.back().data(), plain.back().data(), s);
    require(launch_gemm_tiles_mma(type, {&alone, 1}, h.data(), nt, id, stream));
    parts.push_back({weights.back().data(),
                     outs.back().data(),
                     ods[p],
                     {p == 1 ? nullptr : bias.data(), p == 2 ? residual.data() : nullptr,
                      p == 0 ? scale.data() : nullptr}});
  }
  stream.synchronize();
  const std::vector<float> b = floats(bias), r = floats(residual);
  /// @param ulps how far sums may lie apart: 0 for the same kernel
  const auto check_parts = [&](double relative) {
    for (std::size_t p = 0; p < 3; ++p) {
      CAPTURE(p);
      std::vector<float> got(outs[p].size()), want(plain[p].size());
      CHECK(outs[p].download(got));
      CHECK(plain[p].download(want));
      int wrong = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        const std::size_t od = static_cast<std::size_t>(ods[p]);
        float v = want[i];
        if (p == 0) v *= scales[i / od];
        if (p != 1) v += b[i % od];
        if (p == 2) v += r[i];
        const double most = relative * (16 + std::fabs(v));
        if (!(std::fabs(static_cast<double>(got[i]) - v) <= most)) ++wrong;
      }
      CHECK(wrong == 0);
      outs[p].poison();
    }
  };
  require(launch_gemm_tiles_mma(type, parts, h.data(), nt, id, stream));
  stream.synchronize();
  check_parts(0);
  for (const tiles::GemmFewBlock& block : tiles::kGemmFewBlocks) {
    if (!block.exists(type, false)) continue;
    CAPTURE(block.rows());
    const GemmTilesPlan plan = tiles::few_plan(block, gemm_tiles_rows(parts) / tiles::kRows, nt);
    require(launch_gemm_tiles_wgmma(type, parts, h.data(), nt, id, plan, {}, stream));
    stream.synchronize();
    check_parts(1e-5);
  }
  if (!has_wgmma()) return;
  Workspace workspace;
  for (const tiles::GemmTilesBlock& block : tiles::kGemmTilesBlocks) {
    for (const bool cut : {false, true}) {
      const GemmTilesPlan plan =
          tiles::divide(block.rows, block.tokens, block.cluster, gemm_tiles_rows(parts) / tiles::kRows, nt, 3,
                        multiprocessor_count(), cut);
      require(launch_gemm_tiles_wgmma(type, parts, h.data(), nt, id, plan, workspace.get(), stream));
      stream.synchronize();
      check_parts(1e-5);
    }
  }
}

TEST_CASE("a gate and what it lets through, as f32 and as the next product's activations") {
  Stream stream;
  Workspace workspace;
  const WeightType type = WeightType::q4_k;
  const int nt = 70, od = 336, id = 512;
  const Shape s{nt, od, id};
  Buffer<float> x(nt * id, "x"), gate_out(nt * od, "gate"), up_out(nt * od, "up"), scale(nt, "scale");
  fill(x.data(), x.size(), FillKind::uniform, 3, stream);
  std::vector<float> scales(nt, 0.25f);
  scales[3] = 2.0f;
  scale.upload(scales);
  Buffer<__half> h(nt * id, "h");
  require(launch_acts_f16(x.data(), nullptr, 0.0f, h.data(), nullptr, nt, id, HalfOrder::tiles, stream));
  std::vector<Buffer<unsigned char>> weights;
  for (const unsigned seed : {1u, 2u}) {
    Buffer<unsigned char> blocks(static_cast<std::size_t>(od) * row_bytes(type, id), "blocks");
    fill_weights(blocks.data(), type, od, id, FillKind::uniform, seed, stream);
    weights.emplace_back(tiles::bytes(type, s), "tiles");
    require(tiles::launch_repack(type, blocks.data(), weights.back().data(), s, stream));
    stream.synchronize();
  }
  const std::array<GemmTilesPart, 2> apart = {
      GemmTilesPart{weights[0].data(), gate_out.data(), od, {nullptr, nullptr, scale.data()}},
      GemmTilesPart{weights[1].data(), up_out.data(), od, {nullptr, nullptr, scale.data()}}};
  require(launch_gemm_tiles_mma(type, apart, h.data(), nt, id, stream));
  stream.synchronize();
  const std::vector<float> gate = floats(gate_out), up = floats(up_out);
  GuardedBuffer<float> out(static_cast<std::size_t>(nt * od), "out");
  GuardedBuffer<std::uint16_t> halves(static_cast<std::size_t>(nt * od), "halves");
  std::vector<GemmTilesPlan> plans;
  for (const tiles::GemmFewBlock& b : tiles::kGemmFewBlocks) {
    if (b.exists(type, true)) plans.push_back(tiles::few_plan(b, 2 * tiles::row_tiles(od), nt));
  }
  for (const tiles::GemmTilesBlock& b : tiles::kGemmTilesBlocks) {
    if (!has_wgmma() || !tiles::has_block(b, type, true)) continue;
    for (const bool cut : {false, true}) {
      plans.push_back(tiles::divide(b.rows, b.tokens, b.cluster, 2 * tiles::row_tiles(od), nt, 2,
                                    multiprocessor_count(), cut));
    }
  }
  for (const GemmTilesPlan& plan : plans) {
    CAPTURE(plan.rows);
    CAPTURE(plan.tokens);
    CAPTURE(plan.cut);
    out.poison();
    halves.poison();
    GemmTilesGate g{weights[0].data(), weights[1].data(), out.data(),
                    reinterpret_cast<__half*>(halves.data())};
    g.halves_scale = 0.125f;
    g.row_scale = scale.data();
    require(launch_gemm_tiles_wgmma_swiglu(type, g, h.data(), s, plan, workspace.get(), stream));
    stream.synchronize();
    std::vector<float> got(out.size());
    std::vector<std::uint16_t> got_halves(halves.size());
    CHECK(out.download(got));
    CHECK(halves.download(got_halves));
    int wrong = 0, wrong_halves = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double z = gate[i], want = z / (1 + std::exp(-z)) * up[i];
      if (!(std::fabs(got[i] - want) <= 2e-5 * (1 + std::fabs(z)) * (1 + std::fabs(up[i])))) ++wrong;
      const std::size_t at = i / 16 * 16 + place_in_sixteen(i % 16);
      if (got_halves[at] != float_to_half_bits(got[i] * 0.125f)) ++wrong_halves;
    }
    CHECK(wrong == 0);
    CHECK(wrong_halves == 0);
  }
  CHECK(workspace.flags_are_clear());
}

TEST_CASE("tiles to f16 rows: what the kernels multiply") {
  Stream stream;
  for (const WeightType type : types()) {
    CAPTURE(info(type).name);
    const Shape s{1, 21, info(type).block_elems == 256 ? 512 : 288};
    const auto count = static_cast<std::size_t>(s.od * s.id);
    Buffer<unsigned char> blocks(static_cast<std::size_t>(s.od) * row_bytes(type, s.id), "blocks");
    Buffer<unsigned char> packed(tiles::bytes(type, s), "tiles");
    GuardedBuffer<std::uint16_t> out(count, "out");
    Buffer<float> exact(count, "exact");
    for (const FillKind kind : {FillKind::small_int, FillKind::uniform}) {
      fill_weights(blocks.data(), type, s.od, s.id, kind, 9, stream);
      require(tiles::launch_repack(type, blocks.data(), packed.data(), s, stream));
      require(launch_dequantize(type, blocks.data(), exact.data(), s.od * s.id, stream));
      require(
          launch_dequantize_tiles_f16(type, packed.data(), reinterpret_cast<__half*>(out.data()), s, stream));
      stream.synchronize();
      const std::vector<float> want = floats(exact);
      std::vector<std::uint16_t> got(count);
      CHECK(out.download(got));
      int wrong = 0;
      for (std::size_t i = 0; i < count; ++i) {
        const double v = half_bits_to_float(got[i]), w = want[i];
        // The largest weight stands for its part and its offset: they are of one size in these blocks.
        const double most =
            kind == FillKind::small_int ? 0.0 : tiles::half_rounding(type) * (std::fabs(w) + 2.0);
        if (!(std::fabs(v - w) <= most)) ++wrong;
      }
      CHECK(wrong == 0);
    }
  }
}

/// Order, normalisation, and rows that would overflow.
void check_acts(int id) {
  Stream stream;
  const int nt = 5;
  std::vector<float> x(static_cast<std::size_t>(nt * id)), norm(static_cast<std::size_t>(id));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = fill_value(FillKind::uniform, 3, i);
  for (std::size_t i = 0; i < norm.size(); ++i) norm[i] = fill_value(FillKind::uniform, 4, i);
  const auto at = [&](int t, int i) { return static_cast<std::size_t>(t * id + i); };
  x[at(1, 7)] = 1e6f;
  x[at(2, 3)] = 16384.0f;  // 2^14 is halved, to keep one bound for all rows
  x[at(3, 0)] = std::numeric_limits<float>::infinity();
  x[at(4, 9)] = std::numeric_limits<float>::quiet_NaN();
  Buffer<float> acts(x.size(), "acts"), weights(norm.size(), "norm"), scale(nt, "scale");
  acts.upload(x);
  weights.upload(norm);
  GuardedBuffer<std::uint16_t> out(x.size(), "out");
  auto* const half_out = reinterpret_cast<__half*>(out.data());
  const auto run = [&](const float* n, float* s, HalfOrder order) {
    out.poison();
    require(launch_acts_f16(acts.data(), n, 1e-6f, half_out, s, nt, id, order, stream));
    stream.synchronize();
    std::vector<std::uint16_t> got(out.size());
    CHECK(out.download(got));
    return got;
  };
  const std::vector<std::uint16_t> plain = run(nullptr, scale.data(), HalfOrder::plain);
  const std::vector<float> s = floats(scale);
  CHECK(s == std::vector<float>{1.0f, 64.0f, 2.0f, 1.0f, 1.0f});
  for (int t = 0; t < nt; ++t) {
    int wrong = 0;
    for (int i = 0; i < id; ++i) {
      const float v = x[at(t, i)] / s[static_cast<std::size_t>(t)];
      const float h = half_bits_to_float(plain[at(t, i)]);
      if (std::isnan(v) ? !std::isnan(h) : plain[at(t, i)] != float_to_half_bits(v)) ++wrong;
    }
    CHECK(wrong == 0);
  }
  const std::vector<std::uint16_t> ordered = run(nullptr, scale.data(), HalfOrder::tiles);
  int misplaced = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (ordered[i / 16 * 16 + place_in_sixteen(i % 16)] != plain[i]) ++misplaced;
  }
  CHECK(misplaced == 0);
  CHECK(half_bits_to_float(run(nullptr, nullptr, HalfOrder::plain)[at(1, 7)]) ==
        std::numeric_limits<float>::infinity());

  const std::vector<std::uint16_t> normed = run(weights.data(), nullptr, HalfOrder::plain);
  double sum = 0;
  for (int i = 0; i < id; ++i) sum += static_cast<double>(x[at(0, i)]) * x[at(0, i)];
  for (int i = 0; i < id; ++i) {
    const double want = x[at(0, i)] / std::sqrt(sum / id + 1e-6) * norm[static_cast<std::size_t>(i)];
    CHECK(std::fabs(half_bits_to_float(normed[at(0, i)]) - want) <= std::fabs(want) / 1024 + 1e-7);
  }
}

TEST_CASE("activations to f16, in rows that stay in registers and in one that does not") {
  check_acts(352);
  check_acts(5472);
}

TEST_CASE("a plan covers all tiles, on no more blocks than there are multiprocessors") {
  for (const int sms : {1, 16, 132}) {
    for (const QwenLayer& l : all_qwen_layers()) {
      for (const long long nt : {1LL, 9LL, 17LL, 64LL, 200LL, 512LL, 4096LL}) {
        for (const WeightType type : {WeightType::q4_0, WeightType::q6_k}) {
          if (l.id % info(type).block_elems != 0) continue;
          const Shape s{nt, l.od, l.id};
          for (const bool gate : {false, true}) {
            const GemmTilesPlan p = gate ? gemm_tiles_gate_plan(type, s, sms) : gemm_tiles_plan(type, s, sms);
            const long long rows = tiles::row_tiles(l.od) * tiles::kRows * (gate ? 2 : 1);
            const long long rows_all = static_cast<long long>(p.rows) * p.cluster;
            const long long all = (rows + rows_all - 1) / rows_all * ((nt + p.tokens - 1) / p.tokens);
            CHECK(p.whole + p.cut == all);
            CHECK(p.blocks >= 1);
            if (!tiles::is_few(p.rows, p.tokens)) CHECK(p.blocks <= sms);
            CHECK(p.partial_bytes() <= gemm_tiles_most_partial_bytes(sms));
            CHECK(p.blocks % p.cluster == 0);
            if (p.cut > 0) CHECK(p.whole % (p.blocks / p.cluster) == 0);
          }
        }
      }
    }
  }
  // Few tokens of small matrices are not for groups of four warps.
  const GemmTilesPlan few = gemm_tiles_plan(WeightType::q4_0, {16, 896, 896}, 132);
  CHECK(tiles::is_few(few.rows, few.tokens));
  CHECK(gemm_tiles_plan(WeightType::q4_0, {16, 3584, 18944}, 132).rows == 256);
  // A block for each multiprocessor, where a type's tiles are small enough.
  CHECK(gemm_tiles_plan(WeightType::q4_0, {16, 18944, 3584}, 132).rows == 144);
  CHECK(gemm_tiles_gate_plan(WeightType::q4_0, {16, 18944, 3584}, 132).rows == 288);
  CHECK(gemm_tiles_plan(WeightType::q6_k, {16, 18944, 3584}, 132).rows != 144);
  // Nothing to multiply.
  CHECK(gemm_tiles_plan(WeightType::q4_0, {16, 0, 896}, 132) == GemmTilesPlan{});
  CHECK(gemm_tiles_gate_plan(WeightType::q4_0, {16, 0, 896}, 132) == GemmTilesPlan{});
  // All tiles of one round are whole; a round and a bit are cut to even shares.
  CHECK(tiles::divide(256, 64, 1, 16 * 66, 128, 28, 132, true) == GemmTilesPlan{256, 64, 1, 132, 132, 0});
  CHECK(tiles::divide(256, 64, 1, 16 * 74, 256, 28, 132, true) == GemmTilesPlan{256, 64, 1, 132, 132, 164});
  CHECK(tiles::divide(256, 64, 1, 16 * 74, 256, 28, 132, false) == GemmTilesPlan{256, 64, 1, 132, 296, 0});
  CHECK(tiles::divide(256, 64, 1, 16, 64, 7, 132, true) == GemmTilesPlan{256, 64, 1, 7, 0, 1});
  CHECK(tiles::divide(128, 256, 2, 8 * 28, 512, 14, 132, true) == GemmTilesPlan{128, 256, 2, 132, 0, 28});
  CHECK(tiles::divide(128, 256, 2, 8 * 28, 512, 14, 132, false) == GemmTilesPlan{128, 256, 2, 56, 28, 0});
}

TEST_CASE("shapes and operands that cannot be taken are refused with the reason") {
  Stream stream;
  Buffer<float> out(64, "out"), w(4096, "w"), x(4096, "x");
  const auto mma = [&](WeightType type, const void* weights, int nt, int id) {
    const GemmTilesPart part{weights, out.data(), 2};
    return launch_gemm_tiles_mma(type, {&part, 1}, x.data(), nt, id, stream).message();
  };
  CHECK(mma(WeightType::q4_0, w.data(), 0, 64) == "nt, od and id must all be at least 1");
  CHECK(mma(WeightType::q4_k, w.data(), 1, 128) ==
        "id must be a multiple of 256, the block of q4_k, not 128");
  CHECK(mma(WeightType::q4_0, w.data() + 1, 1, 64) ==
        "weights and activations must begin at a multiple of 16 bytes");
  CHECK(mma(WeightType::f16, w.data(), 1, 64) ==
        "gemm_tiles: f16 weights have no blocks; types with blocks of 32 or 256 have tiles");
  CHECK(launch_gemm_tiles_mma(WeightType::q4_0, {}, x.data(), 1, 64, stream).message() ==
        "gemm_tiles: 1 to 3 matrices at once, not 0");

  const GemmTilesPart part{w.data(), out.data(), 2};
  const auto wgmma = [&](GemmTilesPlan plan, GemmTilesWorkspace workspace) {
    return launch_gemm_tiles_wgmma(WeightType::q4_0, {&part, 1}, x.data(), 1, 64, plan, workspace, stream)
        .message();
  };
  CHECK(wgmma({80, 16, 1, 1, 1, 0}, {}) ==
        "gemm_tiles_wgmma: no blocks of 80 rows and 16 tokens, 1 to a cluster, for q4_0");
  CHECK(wgmma({256, 16, 1, 2, 0, 1}, {}) ==
        "gemm_tiles_wgmma: tiles that are cut need a workspace, at a multiple of 16 bytes, and flags");
  const GemmTilesPart none{w.data(), out.data(), 0};
  CHECK(launch_gemm_tiles_wgmma(WeightType::q4_0, {&none, 1}, x.data(), 1, 64, {}, {}, stream).message() ==
        "nt, od and id must all be at least 1");
  const GemmTilesGate gate{w.data(), w.data(), out.data(), reinterpret_cast<__half*>(x.data())};
  CHECK(launch_gemm_tiles_wgmma_swiglu(WeightType::q4_0, gate, x.data(), {1, 16, 64}, {16, 16, 1, 1, 1, 0},
                                       {}, stream)
            .message() == "gemm_tiles_few: no blocks of 16 rows and 16 tokens for q4_0 with a gate");
  CHECK(launch_gemm_tiles_wgmma_swiglu(WeightType::q4_0, gate, x.data(), {1, 2, 64}, {256, 16, 1, 1, 1, 0},
                                       {}, stream)
            .message() ==
        "gemm_tiles_wgmma: od must be a multiple of 16 for f16 output in the order of tiles, not 2");
  if (!has_wgmma()) {
    CHECK(wgmma({256, 16, 1, 1, 1, 0}, {}) ==
          "gemm_tiles_wgmma: there is no emulated wgmma; it needs a GPU of compute capability 9.0");
  }

  Buffer<__half> h(64, "h");
  const auto acts = [&](const float* from, int nt, int id) {
    return launch_acts_f16(from, nullptr, 0.0f, h.data(), nullptr, nt, id, HalfOrder::tiles, stream)
        .message();
  };
  CHECK(acts(x.data(), 1, 24) ==
        "acts_f16: nt must be at least 1 and id a positive multiple of 16, not 1 and 24");
  CHECK(acts(x.data() + 1, 1, 32) ==
        "acts_f16: activations, weights and output must begin at a multiple of 16 bytes");
  CHECK(launch_dequantize_tiles_f16(WeightType::q4_0, w.data() + 1, h.data(), {1, 1, 32}, stream).message() ==
        "dequantize_tiles_f16: weights and output must begin at a multiple of 16 bytes");
}
