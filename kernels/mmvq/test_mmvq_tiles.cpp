// Tiles of weights and the kernel that multiplies them, on the device of the build.
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "harness/device/doctest_main.hpp"
#include "harness/device/under_sanitizer.hpp"
#include "harness/experiment/qwen_shapes.hpp"
#include "harness/experiment/testing.hpp"
#include "kernels/elementwise/rms_norm.cuh"
#include "kernels/mmvq/mmvq_tiles.cuh"
#include "kernels/quant/dequantize.cuh"
#include "kernels/quant/dequantize.hpp"

using namespace ladder;

namespace {

std::vector<WeightType> types() {
  std::vector<WeightType> all;
  for (const WeightTypeInfo& t : kWeightTypes) {
    if (tiles::has_tiles(t.type)) all.push_back(t.type);
  }
  return all;
}

Rung rung_of(WeightType type) {
  Rung r;
  r.id = std::string(info(type).name) + " tiles";
  r.weight_type = type;
  r.acts = ActivationFormat::planes40;
  r.layout = &tiles::kLayout;
  r.supported = [type](Shape s, const DeviceInfo&) { return mmvq_tiles_supported(type, s); };
  r.roundings = [type](Shape s, Executor) { return mmvq_tiles_roundings(type, s.id); };
  r.device = [type](const void* w, const void* x, float* out, Shape s, Stream& stream) {
    const MmvqPart part{w, out, static_cast<int>(s.od)};
    return launch_mmvq_tiles(type, {&part, 1}, {x}, static_cast<int>(s.nt), static_cast<int>(s.id), stream);
  };
  return r;
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const long long nt : {1, 2, 3, 5, 8}) {
    for (const auto& [od, id] : {std::pair<long long, long long>{1, 32},
                                 {7, 96},
                                 {16, 256},
                                 {17, 512},
                                 {5, 544},
                                 {33, 1280},
                                 {3, 1056}}) {
      all.push_back({nt, od, id});
    }
  }
  all.push_back({1, 19, 4864});
  all.push_back({4, 31, 896});
  all.push_back({2, 3, 18944});   // eight warps of a block
  all.push_back({1, 2200, 256});  // more sixteens of rows than multiprocessors
  return all;
}

}  // namespace

TEST_CASE("types have tiles of the size of their blocks") {
  CHECK(types().size() == 12);
  CHECK(tiles::bytes(WeightType::q4_0, {1, 16, 128}) == 16 * 4 * 18);
  CHECK(tiles::bytes(WeightType::q6_k, {1, 32, 512}) == 32 * 2 * 210);
  CHECK(tiles::bytes(WeightType::q4_0, {1, 17, 160}) == 32 * 8 * 18);  // filled up in both directions
  CHECK(tiles::bytes(WeightType::f16, {1, 16, 128}) == 0);
  Stream stream;
  Buffer<unsigned char> b(4096, "b");
  CHECK(tiles::launch_repack(WeightType::f16, b.data(), b.data(), {1, 16, 32}, stream).message() ==
        "tiles: f16 weights have no blocks; types with blocks of 32 or 256 have tiles");
}

TEST_CASE("every type is right at every shape, and a token's result the same bits alone and in company") {
  Context ctx = testing::context_on(kDeviceExecutor);
  std::size_t n = 0;
  for (const WeightType type : types()) {
    CAPTURE(info(type).name);
    Chapter chapter;
    chapter.rungs = {rung_of(type)};
    std::vector<Shape> at = shapes();
    std::erase_if(at, [type](const Shape& s) { return !mmvq_tiles_supported(type, s).ok(); });
    CHECK(at.size() >= 16);
    at = sampled(at, 8, n);
    int checked = 0;
    for (const std::string& line : testing::check_chapter(chapter, at, ctx, &checked)) FAIL_CHECK(line);
    CHECK(checked == static_cast<int>(at.size()));
    for (const long long nt : sampled<long long>({2, 3, 8}, 3, n++)) {
      CHECK(testing::same_bits_alone_and_together(chapter.rungs[0], nt, 21, 1280, ctx));
    }
  }
}

namespace {

/// Shared memory of a block for one token and for eight, with the plan that is chosen for both.
template <class Format, tiles::Plan P, bool SWIGLU>
void check_shared(long long id, std::size_t limit) {
  constexpr int MOST = tile_acts::kMostTokens;
  CHECK(tiles::ring_bytes<Format>(P) + tiles::staged_bytes<1>(id) +
            tiles::fixed_bytes<1, P.warps, SWIGLU>() <=
        limit);
  const std::size_t planes =
      tiles::stages<Format, MOST, P, SWIGLU>(id, limit) ? tile_acts::group_bytes(MOST, id) : 0;
  CHECK(tiles::ring_bytes<Format>(tiles::plan_for<MOST>(P)) + planes +
            tiles::fixed_bytes<MOST, P.warps, SWIGLU>() <=
        limit);
}

template <class Format, bool SWIGLU>
void check_plan(tiles::Rows rows, std::size_t limit) {
  const tiles::Plan plan = tiles::plan_of<Format, SWIGLU>(rows, limit);
  const bool one = SWIGLU || rows.between || rows.id <= tiles::kShortestRow;
  const tiles::Plan wanted = one                           ? tiles::kOneBlock<Format>
                             : rows.id <= tiles::kShortRow ? Format::kShort
                                                           : Format::kLong;
  CHECK((plan == wanted || plan == tiles::kFewWarps<Format>));
  if (limit == 227UL * 1024) CHECK(plan == wanted);
  if (plan == tiles::kOneBlock<Format>) {
    check_shared<Format, tiles::kOneBlock<Format>, SWIGLU>(rows.id, limit);
  } else if (plan == Format::kShort) {
    check_shared<Format, Format::kShort, SWIGLU>(rows.id, limit);
  } else if (plan == Format::kLong) {
    check_shared<Format, Format::kLong, SWIGLU>(rows.id, limit);
  } else {
    check_shared<Format, tiles::kFewWarps<Format>, SWIGLU>(rows.id, limit);
  }
}

}  // namespace

TEST_CASE("every layer of every model fits the shared memory of GPUs with little of it") {
  for (const WeightType type : types()) {
    CAPTURE(info(type).name);
    REQUIRE(tiles::with_tile_format(type, [](auto format) -> Status {
              using Format = decltype(format);
              // Compute capability 8.6 and 8.9, 8.0, 9.0.
              for (const std::size_t limit : {99UL * 1024, 163UL * 1024, 227UL * 1024}) {
                for (const QwenLayer& l : all_qwen_layers()) {
                  CAPTURE(l.name);
                  CAPTURE(limit);
                  for (const bool between : {false, true}) {
                    check_plan<Format, false>({l.id, between}, limit);
                    check_plan<Format, true>({l.id, between}, limit);
                  }
                }
              }
              return {};
            }).ok());
  }
}

TEST_CASE("shapes and operands that it cannot take are refused with the reason") {
  Stream stream;
  Buffer<float> out(64, "out"), w(4096, "w"), x(4096, "x");
  const auto go = [&](WeightType type, const void* weights, int nt, int id) {
    const MmvqPart part{weights, out.data(), 2};
    return launch_mmvq_tiles(type, {&part, 1}, {x.data()}, nt, id, stream).message();
  };
  CHECK(go(WeightType::q4_0, w.data(), 9, 64) == "nt must be 1 to 8, not 9");
  CHECK(go(WeightType::q4_0, w.data(), 0, 64) == "nt, od and id must all be at least 1");
  CHECK(go(WeightType::q4_k, w.data(), 1, 128) == "id must be a multiple of 256, the block of q4_k, not 128");
  CHECK(go(WeightType::q4_0, w.data() + 1, 1, 64) ==
        "weights and activations must begin at a multiple of 16 bytes");
  CHECK(go(WeightType::f16, w.data(), 1, 64) ==
        "tiles: f16 weights have no blocks; types with blocks of 32 or 256 have tiles");
  const auto with = [&](const MmvqActs& acts, int nt, int od, const MmvqPlanes& also) {
    const MmvqPart one{w.data(), out.data(), od};
    return launch_mmvq_tiles(WeightType::q4_0, {&one, 1}, acts, nt, 64, stream, false, also).message();
  };
  CHECK(with({x.data(), x.data()}, 2, 32, {}) ==
        "mmvq_tiles: only a token alone can be normalised here, and nt is 2");
  CHECK(with({x.data()}, 1, 33, {x.data(), x.data(), x.data()}) ==
        "mmvq_tiles: planes of results are one token's and whole blocks of 32, not nt 1 and od 33");
  CHECK(
      with({x.data()}, 1, 32, {x.data(), x.data()}) ==
      "mmvq_tiles: planes of results are those of one matrix, with weights and squares for a normalisation");
  CHECK(with({x.data()}, 1, 32, {x.data() + 1, x.data(), x.data()}) ==
        "weights and activations must begin at a multiple of 16 bytes");
  const auto gated = [&](float* rows, void* planes, Shape s) {
    return launch_mmvq_tiles_swiglu(WeightType::q4_0, w.data(), w.data(), {x.data()}, rows, planes, s, stream)
        .message();
  };
  const std::string one_of_them =
      "mmvq_tiles: with a gate, results go either to f32 rows or to planes, one of them";
  CHECK(gated(nullptr, nullptr, {1, 32, 64}) == one_of_them);
  CHECK(gated(out.data(), out.data(), {1, 32, 64}) == one_of_them);
  CHECK(gated(nullptr, out.data(), {1, 33, 64}) ==
        "mmvq_tiles: planes of results are one token's and whole blocks of 32, not nt 1 and od 33");
  CHECK(gated(nullptr, out.data(), {2, 32, 64}) ==
        "mmvq_tiles: planes of results are one token's and whole blocks of 32, not nt 2 and od 32");
  CHECK(launch_mmvq_tiles(WeightType::q4_0, {}, {x.data()}, 1, 64, stream).message() ==
        "mmvq_tiles: 1 to 3 matrices at once, not 0");
}

TEST_CASE("activations go to planes as to blocks") {
  Stream stream;
  for (const Shape& s :
       {Shape{1, 1, 32}, Shape{3, 1, 256}, Shape{8, 1, 896}, Shape{9, 1, 96}, Shape{21, 1, 1056}}) {
    const auto nt = static_cast<int>(s.nt), id = static_cast<int>(s.id);
    CAPTURE(nt);
    Buffer<float> x(static_cast<std::size_t>(nt * id), "x");
    fill(x.data(), x.size(), FillKind::uniform, 3, stream);
    Buffer<BlockQ8Pad40> blocks(static_cast<std::size_t>(nt * id / 32), "blocks");
    GuardedBuffer<unsigned char> planes(tile_acts::bytes(nt, id), "planes");
    require(launch_quantize_q8_pad40(x.data(), blocks.data(), nt, id, stream));
    require(tile_acts::launch_quantize(x.data(), nullptr, 0.0f, planes.data(), nt, id, stream));
    stream.synchronize();
    std::vector<BlockQ8Pad40> host(blocks.size());
    blocks.download(host);
    std::vector<unsigned char> got(planes.size());
    CHECK(planes.download(got));
    CHECK(got == tile_acts::from_blocks(host.data(), nt, id));
  }
}

TEST_CASE("a normalisation on the way to planes is that of rms_norm") {
  Stream stream;
  const int nt = 3, id = 896;
  Buffer<float> x(nt * id, "x"), w(id, "w"), normed(nt * id, "normed");
  fill(x.data(), x.size(), FillKind::uniform, 3, stream);
  fill(w.data(), w.size(), FillKind::uniform, 4, stream);
  require(launch_rms_norm(x.data(), w.data(), normed.data(), nt, id, 1e-6f, stream));
  Buffer<unsigned char> a(tile_acts::bytes(nt, id), "a"), b(a.size(), "b");
  require(tile_acts::launch_quantize(x.data(), w.data(), 1e-6f, a.data(), nt, id, stream));
  require(tile_acts::launch_quantize(normed.data(), nullptr, 0.0f, b.data(), nt, id, stream));
  stream.synchronize();
  std::vector<unsigned char> fused(a.size()), apart(b.size());
  a.download(fused);
  b.download(apart);
  // The sums of squares are added in another order, so a code may differ by one where it is close to a tie.
  const auto number = [&](const std::vector<unsigned char>& planes, int t, int i) {
    const tile_acts::Place p = tile_acts::place_of(t, nt, id);
    const int blk = i / 32, word = i % 32 / 4;
    float d;
    std::memcpy(&d, planes.data() + p.group + tile_acts::scale_at(blk, p.token, p.tokens, id), 4);
    return d * static_cast<float>(static_cast<signed char>(
                   planes[p.group + tile_acts::code_at(blk, p.token, p.tokens, word) +
                          static_cast<std::size_t>(i % 4)]));
  };
  int different = 0;
  for (int t = 0; t < nt; ++t) {
    for (int i = 0; i < id; ++i) {
      const double error = std::fabs(number(fused, t, i) - number(apart, t, i));
      CHECK(error <= 2.0 / 127);
      different += error > 1e-5 ? 1 : 0;
    }
  }
  CHECK(different <= 3);
}

TEST_CASE("several matrices, biases, residuals and a gate in one launch") {
  Stream stream;
  const WeightType type = WeightType::q5_0;
  const int nt = 3, id = 288;
  const std::array<int, 3> ods = {37, 16, 5};
  std::vector<GuardedBuffer<float>> outs, plain;
  std::vector<Buffer<unsigned char>> weights;
  Buffer<float> x(nt * id, "x"), bias(64, "bias"), residual(nt * 64, "residual");
  fill(x.data(), x.size(), FillKind::uniform, 3, stream);
  fill(bias.data(), bias.size(), FillKind::uniform, 4, stream);
  fill(residual.data(), residual.size(), FillKind::uniform, 5, stream);
  Buffer<unsigned char> planes(tile_acts::bytes(nt, id), "planes");
  require(tile_acts::launch_quantize(x.data(), nullptr, 0.0f, planes.data(), nt, id, stream));
  std::vector<MmvqPart> parts;
  for (const int od : ods) {
    const Shape s{nt, od, id};
    Buffer<unsigned char> blocks(static_cast<std::size_t>(od) * row_bytes(type, id), "blocks");
    fill_weights(blocks.data(), type, od, id, FillKind::uniform, static_cast<unsigned>(od), stream);
    weights.emplace_back(tiles::bytes(type, s), "tiles");
    require(tiles::launch_repack(type, blocks.data(), weights.back().data(), s, stream));
    stream.synchronize();
    outs.emplace_back(static_cast<std::size_t>(nt * od), "out");
    plain.emplace_back(static_cast<std::size_t>(nt * od), "plain");
    const MmvqPart alone{weights.back().data(), plain.back().data(), od};
    require(launch_mmvq_tiles(type, {&alone, 1}, {planes.data()}, nt, id, stream));
  }
  for (std::size_t p = 0; p < 3; ++p) {
    parts.push_back({weights[p].data(), outs[p].data(), ods[p], p == 1 ? nullptr : bias.data(),
                     p == 2 ? residual.data() : nullptr});
  }
  require(launch_mmvq_tiles(type, parts, {planes.data()}, nt, id, stream));
  GuardedBuffer<float> gated(static_cast<std::size_t>(nt * 37), "gated");
  require(launch_mmvq_tiles_swiglu(type, weights[0].data(), weights[0].data(), {planes.data()}, gated.data(),
                                   nullptr, {nt, 37, id}, stream));
  stream.synchronize();
  std::vector<float> b(64), res(nt * 64), g(nt * 37);
  bias.download(b);
  residual.download(res);
  CHECK(gated.download(g));
  for (std::size_t p = 0; p < 3; ++p) {
    std::vector<float> got(outs[p].size()), want(plain[p].size());
    CHECK(outs[p].download(got));
    CHECK(plain[p].download(want));
    bool same = true;
    for (std::size_t i = 0; i < got.size(); ++i) {
      float v = want[i];
      if (p != 1) v += b[i % static_cast<std::size_t>(ods[p])];
      if (p == 2) v += res[i];
      same = same && std::bit_cast<std::uint32_t>(v) == std::bit_cast<std::uint32_t>(got[i]);
      if (p == 0)
        CHECK(std::fabs(g[i] - want[i] / (1 + std::exp(-want[i])) * want[i]) <=
              1e-5 * (1 + want[i] * want[i]));
    }
    CHECK(same);
  }
}

namespace {

/// A random matrix in tiles.
Buffer<unsigned char> random_tiles(WeightType type, int od, int id, unsigned seed, Stream& stream) {
  Buffer<unsigned char> blocks(static_cast<std::size_t>(od) * row_bytes(type, id), "blocks");
  fill_weights(blocks.data(), type, od, id, FillKind::uniform, seed, stream);
  Buffer<unsigned char> made(tiles::bytes(type, {1, od, id}), "tiles");
  require(tiles::launch_repack(type, blocks.data(), made.data(), {1, od, id}, stream));
  stream.synchronize();
  return made;
}

template <class T>
std::vector<T> downloaded(const GuardedBuffer<T>& b) {
  std::vector<T> host(b.size());
  CHECK(b.download(host));
  return host;
}
bool same_bytes(const auto& a, const auto& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
}

}  // namespace

namespace {

/// Planes of a row that is still to be normalised, as numbers; and the factor.
struct Unnormalised {
  std::vector<double> x;
  double root = 0;
  Unnormalised(const std::vector<unsigned char>& planes, const std::vector<float>& squares, int id,
               float epsilon) {
    double sum = 0;
    for (const float s : squares) sum += s;
    root = 1 / std::sqrt(sum / id + epsilon);
    for (int i = 0; i < id; ++i) {
      const int b = i / 32, word = i % 32 / 4;
      float d;
      std::memcpy(&d, planes.data() + tile_acts::scale_at(b, 0, 1, id), 4);
      x.push_back(static_cast<double>(d) *
                  static_cast<signed char>(
                      planes[tile_acts::code_at(b, 0, 1, word) + static_cast<std::size_t>(i % 4)]));
    }
  }
};

}  // namespace

// A row x goes to the next product as int8 of x * weight and the sums of x^2: what that one makes of it is the product
// with normalised activations. Against float64, from the residual on.
TEST_CASE("a product leaves the row of the next one, whose normalisation is still to come") {
  Stream stream;
  const float epsilon = 1e-5f;
  constexpr int kLongRow = 2048;
  const auto check = [&](WeightType type, int od, int id, int next_od) {
    CAPTURE(info(type).name);
    CAPTURE(od);
    CAPTURE(id);
    const auto n = static_cast<std::size_t>(od);
    const Buffer<unsigned char> weights = random_tiles(type, od, id, 5, stream);
    Buffer<unsigned char> blocks(static_cast<std::size_t>(next_od) * row_bytes(type, od), "blocks"),
        tiled(tiles::bytes(type, {1, next_od, od}), "tiles"), acts(tile_acts::bytes(1, id), "acts");
    fill_weights(blocks.data(), type, next_od, od, FillKind::uniform, 6, stream);
    require(tiles::launch_repack(type, blocks.data(), tiled.data(), {1, next_od, od}, stream));
    Buffer<float> x(static_cast<std::size_t>(id), "x"), norm(n, "norm"), residual(n, "residual"),
        bias(static_cast<std::size_t>(next_od), "bias");
    fill(x.data(), x.size(), FillKind::uniform, 3, stream);
    fill(norm.data(), n, FillKind::uniform, 4, stream);
    fill(residual.data(), n, FillKind::uniform, 7, stream);
    fill(bias.data(), bias.size(), FillKind::uniform, 8, stream);
    require(tile_acts::launch_quantize(x.data(), nullptr, 0.0f, acts.data(), 1, id, stream));

    // 1. The row, alone and with its planes: the same bits.
    GuardedBuffer<float> plain(n, "plain"), row(n, "row"), squares(n / 32, "squares"),
        squares2(n / 32, "squares 2");
    GuardedBuffer<unsigned char> planes(tile_acts::bytes(1, od), "planes"),
        planes2(planes.size(), "planes 2");
    const MmvqPart a{weights.data(), plain.data(), od, nullptr, residual.data()},
        b{weights.data(), row.data(), od, nullptr, residual.data()};
    require(launch_mmvq_tiles(type, {&a, 1}, {acts.data()}, 1, id, stream));
    require(launch_mmvq_tiles(type, {&b, 1}, {acts.data()}, 1, id, stream, true,
                              {planes.data(), norm.data(), squares.data()}));
    require(
        tile_acts::launch_unnormalised(row.data(), norm.data(), planes2.data(), squares2.data(), od, stream));
    stream.synchronize();
    const std::vector<float> got = downloaded(row), sums = downloaded(squares);
    const std::vector<unsigned char> codes = downloaded(planes);
    // Few and long rows are shared by the blocks of a cluster, which add up a row in another order, always the same.
    const std::vector<float> alone = downloaded(plain);
    double difference = 0, most = 0;
    for (std::size_t i = 0; i < n; ++i) {
      difference = std::max(difference, std::fabs(static_cast<double>(got[i]) - alone[i]));
      most = std::max(most, std::fabs(static_cast<double>(alone[i])));
    }
    CHECK(difference <= (id < kLongRow ? 0 : 1e-5 * most));
    require(launch_mmvq_tiles(type, {&b, 1}, {acts.data()}, 1, id, stream, true,
                              {planes.data(), norm.data(), squares.data()}));
    stream.synchronize();
    CHECK(same_bytes(got, downloaded(row)));
    CHECK(same_bytes(codes, downloaded(planes)));
    CHECK(same_bytes(codes, downloaded(planes2)));
    CHECK(same_bytes(sums, downloaded(squares2)));

    // 2. The planes are the row times the weights, to half a step of its block; the sums are those of its squares.
    std::vector<float> w(n);
    norm.download(w);
    const Unnormalised u(codes, sums, od, epsilon);
    double square = 0;
    for (std::size_t i = 0; i < n; ++i) square += static_cast<double>(got[i]) * got[i];
    CHECK(u.root == doctest::Approx(1 / std::sqrt(square / od + epsilon)).epsilon(1e-6));
    for (std::size_t blk = 0; blk < n / 32; ++blk) {
      double largest = 0;
      for (std::size_t i = 32 * blk; i < 32 * blk + 32; ++i)
        largest = std::max(largest, std::fabs(static_cast<double>(got[i]) * w[i]));
      for (std::size_t i = 32 * blk; i < 32 * blk + 32; ++i)
        CHECK(std::fabs(u.x[i] - static_cast<double>(got[i]) * w[i]) <= largest / 254 * 1.0001);
    }

    // 3. The next product of these very codes, normalised, with a bias.
    GuardedBuffer<float> next(static_cast<std::size_t>(next_od), "next");
    const MmvqPart c{tiled.data(), next.data(), next_od, bias.data()};
    require(launch_mmvq_tiles(type, {&c, 1}, {planes.data(), squares.data(), epsilon}, 1, od, stream));
    stream.synchronize();
    std::vector<unsigned char> file(blocks.size());
    blocks.download(file);
    std::vector<float> added(bias.size()), decoded(static_cast<std::size_t>(next_od) * n);
    bias.download(added);
    dequantize_row(type, file.data(), decoded.data(), static_cast<long long>(decoded.size()));
    const std::vector<float> out = downloaded(next);
    const double roundings = mmvq_tiles_roundings(type, od) + 4;  // the factor and its product
    for (std::size_t r = 0; r < out.size(); ++r) {
      double sum = 0, magnitude = 0;
      for (std::size_t i = 0; i < n; ++i) {
        sum += decoded[r * n + i] * u.x[i];
        magnitude += std::fabs(decoded[r * n + i] * u.x[i]);
      }
      const double want = sum * u.root + added[r];
      // Offsets of unsigned codes are terms of their own, at most as large as fifteen codes.
      CHECK(std::isfinite(out[r]));
      CHECK(std::fabs(out[r] - want) <=
            roundings * 0x1p-24 * (16 * magnitude * u.root + std::fabs(added[r])));
    }
  };
  for (const WeightType type : sampled(types(), 3)) check(type, 256, 512, 19);
  check(WeightType::q4_0, 96, 32, 1);
  check(WeightType::q8_0, 896, 96, 35);
  check(WeightType::q4_k, 2304, 256, 33);
  check(WeightType::q4_0, 96, 4864, 3);  // two blocks or four have a row, where there are clusters
  check(WeightType::q8_0, 32, 2080, 3);
  check(WeightType::q5_0, 64, 4896, 3);
  check(WeightType::q6_k, 256, 6400, 3);
  check(WeightType::q4_k, 256, 4352, 3);
  check(WeightType::q5_0, 4896, 32, 5);  // two pairs of sixteens for some blocks, and padding behind the row
}

TEST_CASE("a gate's results as planes are those of its rows") {
  Stream stream;
  struct Case {
    WeightType type;
    int od, id;
  };
  for (const Case& c :
       {Case{WeightType::q4_0, 32, 32}, Case{WeightType::q4_0, 96, 896}, Case{WeightType::q8_0, 288, 96},
        Case{WeightType::q4_k, 512, 256}, Case{WeightType::q6_k, 160, 1280}, Case{WeightType::q5_0, 4864, 64},
        Case{WeightType::q4_0, 27648, 32}}) {  // more turns than a block keeps the sums of
    const WeightType type = c.type;
    const int od = c.od, id = c.id;
    CAPTURE(info(type).name);
    CAPTURE(od);
    const Buffer<unsigned char> gate = random_tiles(type, od, id, 5, stream),
                                up = random_tiles(type, od, id, 6, stream);
    Buffer<float> x(static_cast<std::size_t>(id), "x");
    fill(x.data(), x.size(), FillKind::uniform, 3, stream);
    GuardedBuffer<float> rows(static_cast<std::size_t>(od), "rows");
    GuardedBuffer<unsigned char> want(tile_acts::bytes(1, od), "want"), got(want.size(), "got");
    Buffer<unsigned char> planes(tile_acts::bytes(1, id), "planes");
    require(tile_acts::launch_quantize(x.data(), nullptr, 0.0f, planes.data(), 1, id, stream));
    const MmvqActs acts{planes.data()};
    require(launch_mmvq_tiles_swiglu(type, gate.data(), up.data(), acts, rows.data(), nullptr, {1, od, id},
                                     stream));
    require(tile_acts::launch_quantize(rows.data(), nullptr, 0.0f, want.data(), 1, od, stream));
    require(launch_mmvq_tiles_swiglu(type, gate.data(), up.data(), acts, nullptr, got.data(), {1, od, id},
                                     stream));
    stream.synchronize();
    CHECK(same_bytes(downloaded(got), downloaded(want)));
  }
}

TEST_CASE("matrices of two types in one launch have the products of a launch each") {
  Stream stream;
  for (const WeightType type : {WeightType::q4_k, WeightType::q5_k}) {
    for (const int id : {256, 1280, 3584}) {
      CAPTURE(info(type).name);
      CAPTURE(id);
      const int q = 200, k = 33, v = id == 1280 ? 1 : 528;
      Buffer<unsigned char> w[3] = {random_tiles(type, q, id, 5, stream),
                                    random_tiles(type, k, id, 6, stream),
                                    random_tiles(WeightType::q6_k, v, id, 7, stream)};
      Buffer<float> x(static_cast<std::size_t>(id), "x"), bias(static_cast<std::size_t>(v), "bias");
      fill(x.data(), x.size(), FillKind::uniform, 3, stream);
      fill(bias.data(), bias.size(), FillKind::uniform, 4, stream);
      Buffer<unsigned char> planes(tile_acts::bytes(1, id), "planes");
      require(tile_acts::launch_quantize(x.data(), nullptr, 0.0f, planes.data(), 1, id, stream));
      GuardedBuffer<float> want[3] = {{q, "want q"}, {k, "want k"}, {static_cast<std::size_t>(v), "want v"}};
      GuardedBuffer<float> got[3] = {{q, "got q"}, {k, "got k"}, {static_cast<std::size_t>(v), "got v"}};
      const auto parts = [&](GuardedBuffer<float>(&to)[3]) {
        return std::array<MmvqPart, 3>{MmvqPart{w[0].data(), to[0].data(), q},
                                       MmvqPart{w[1].data(), to[1].data(), k},
                                       MmvqPart{w[2].data(), to[2].data(), v, bias.data()}};
      };
      const auto one = parts(want), two = parts(got);
      const MmvqActs acts{planes.data()};
      require(launch_mmvq_tiles(type, std::span(one).first(2), acts, 1, id, stream));
      require(launch_mmvq_tiles(WeightType::q6_k, std::span(one).last(1), acts, 1, id, stream));
      require(launch_mmvq_tiles_two(type, std::span(two).first(2), WeightType::q6_k, std::span(two).last(1),
                                    acts, id, stream));
      stream.synchronize();
      for (int m = 0; m < 3; ++m) {
        std::vector<float> a(want[m].size()), b(a.size());
        want[m].download(a);
        CHECK(got[m].download(b));
        float largest = 0.0f, apart = 0.0f;
        for (std::size_t i = 0; i < a.size(); ++i) {
          largest = std::max(largest, std::abs(a[i]));
          apart = std::max(apart, std::isfinite(b[i]) ? std::abs(a[i] - b[i]) : INFINITY);
        }
        CHECK(largest > 0.0f);
        CHECK(apart <= 1e-5f * largest);  // the same terms, added up in another order
      }
    }
  }
  Buffer<float> out(64, "out");
  Buffer<unsigned char> w(4096, "w");
  const MmvqPart part{w.data(), out.data(), 16};
  CHECK(launch_mmvq_tiles_two(WeightType::q6_k, {&part, 1}, WeightType::q4_k, {&part, 1}, {w.data()}, 256,
                              stream)
            .message() == "mmvq_tiles_two: takes q4_k or q5_k with q6_k, not q6_k with q4_k");
}
