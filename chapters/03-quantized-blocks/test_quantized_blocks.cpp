// Chapter 03's kernels against float64, and the broken ones against the checker.

#define LADDER_NO_MAIN
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "chapters/03-quantized-blocks/quantized_blocks.cu"
#include "chapters/03-quantized-blocks/wrong/wrong_kernels.cuh"
#include "harness/device/doctest_main.hpp"
#include "harness/experiment/testing.hpp"

using namespace ladder;

TEST_CASE("every rung is right at every shape") {
  const Chapter chapter = chapter_03();
  CHECK(chapter.rungs.size() == kWeightTypes.size() - 1);  // all but f32
  for (const Executor e : testing::executors()) {
    Context ctx = testing::context_on(e);
    int checked = 0;
    std::vector<Shape> shapes = testing::block_shapes();
    for (const Shape& s : {Shape{1, 3, 1}, Shape{2, 9, 31}, Shape{1, 5, 104}})
      shapes.push_back(s);  // 16-bit types only
    for (const std::string& line : testing::check_chapter(chapter, sampled(shapes, 7), ctx, &checked)) {
      FAIL_CHECK(to_string(e) << ": " << line);
    }
    CHECK(checked >= (under_sanitizer() ? 30 : 250));
  }
}

TEST_CASE("a token's result is the same bits alone and in company") {
  for (const Executor e : testing::executors()) {
    Context ctx = testing::context_on(e);
    for (const Rung& r : chapter_03().rungs) {
      CAPTURE(r.id);
      for (const long long nt : sampled<long long>({2, 9}, 2))
        CHECK(testing::same_bits_alone_and_together(r, nt, 13, 1280, ctx));
    }
  }
}

TEST_CASE(
    "rows that are not whole blocks, and pointers that wide loads cannot take, are refused with the reason") {
  Stream stream;
  Buffer<float> w(4096, "weights"), a(1024, "acts"), out(64, "out");
  for (const Rung& r : chapter_03().rungs) {
    CAPTURE(r.id);
    const int block = info(r.weight_type).block_elems;
    if (block > 1) {
      const Shape ragged{1, 2, block + block / 2};
      const std::string why = "id must be a multiple of " + std::to_string(block) + ", the block of " +
                              info(r.weight_type).name + ", not " + std::to_string(ragged.id);
      CHECK(r.supported(ragged, {}).message() == why);
      CHECK(r.device(w.data(), a.data(), out.data(), ragged, stream).message() == why);
    }
    CHECK(!r.supported({0, 2, 256}, {}).ok());
    const Status unaligned = r.device(w.data(), a.data() + 1, out.data(), {1, 2, 256}, stream);
    CHECK(unaligned.message().find("multiple of 16 bytes") != std::string::npos);
  }
}

TEST_CASE("one function multiplies every type") {
  Context ctx = testing::context_on(kDeviceExecutor);
  const std::vector<Rung> rungs = chapter_03().rungs;
  for (const WeightTypeInfo& t : kWeightTypes) {
    CAPTURE(t.name);
    Rung any;
    any.id = t.name;
    any.weight_type = t.type;
    any.device = [type = t.type](const void* w, const float* a, float* out, Shape s, Stream& stream) {
      return launch_f32_matmul(type, w, a, out, s, stream);
    };
    any.roundings = [](Shape s, Executor) { return static_cast<double>(s.id) + 2; };
    for (const long long id : {512LL, 33LL}) {
      if (id % t.block_elems != 0) continue;
      const Shape shape{2, 9, id};
      Operands ops(shape, 1, t.type);
      Reference reference;
      const RungCheck check = check_rungs({&any}, ops, ctx, reference)[0];
      CHECK_MESSAGE(check.ok(), check.message());
    }
  }
}

TEST_CASE("random blocks are valid: finite, of the size of real weights, integers when asked for") {
  Stream stream;
  for (const WeightTypeInfo& t : kWeightTypes) {
    CAPTURE(t.name);
    const Shape shape{1, 16, 512};
    Operands ops(shape, 1, t.type);
    // One activation of 1 in an otherwise zero row picks a weight out of the reference.
    for (const FillKind kind : {FillKind::uniform, FillKind::small_int}) {
      ops.fill_inputs(kind, 5, stream);
      bool sound = true;
      double largest = 0, mean = 0;
      for (const long long i : {0, 1, 17, 31, 255, 256, 511}) {
        std::vector<float> acts(512, 0.0f);
        acts[static_cast<std::size_t>(i)] = 1.0f;
        ops.upload_acts(acts, stream);
        const Reference r = reference_matmul(ops.weights(0), ops.acts(0), shape, stream, t.type);
        for (std::size_t k = 0; k < r.value.size(); ++k) {
          const double w = r.value[k], parts = r.magnitude[k];
          sound = sound && std::isfinite(w) && parts >= std::fabs(w);
          if (kind == FillKind::small_int) sound = sound && w == std::round(w) && parts <= 127;
          largest = std::max(largest, std::fabs(w));
          mean += std::fabs(w) / (7 * 16);
        }
      }
      CHECK(sound);
      CHECK(largest <= (kind == FillKind::uniform ? 4.0 : 127.0));
      CHECK(mean >= (kind == FillKind::uniform ? 0.05 : 0.5));
    }
  }
}

namespace {

/// Whether the checker accepts a decoder of `type` at a shape with an odd number of 32-blocks where the type
/// has them.
template <class Decoder>
bool accepted(WeightType type, Context& ctx) {
  Rung r;
  r.id = "decoder";
  r.weight_type = type;
  r.roundings = [](Shape s, Executor) { return static_cast<double>(s.id + 8); };
  r.device = [type](const unsigned char* w, const float* a, float* out, Shape s, Stream& stream) {
    return launch(wrong::decode_and_multiply<Decoder>, dim3(1), dim3(64), 0, stream, w, a, out,
                  static_cast<int>(s.od), static_cast<int>(s.id),
                  static_cast<long long>(row_bytes(type, s.id)));
  };
  Operands ops({1, 33, info(type).block_elems == 32 ? 1120 : 1280}, 1, type);
  Reference reference;
  return check_rungs({&r}, ops, ctx, reference)[0].ok();
}

}  // namespace

TEST_CASE("quantizers are checked against the host, ties and guard bands included") {
  Context ctx = testing::context_on(kDeviceExecutor);
  for (const chapter03::Quantizer& q : chapter03::quantizers()) {
    CAPTURE(q.id);
    for (const auto& [nt, id] : {std::pair{1LL, 32LL}, {3LL, 96LL}, {65LL, 288LL}})
      CHECK(chapter03::check(q, nt, id, ctx) == "");
    CHECK(chapter03::check(q, 2, 40, ctx).find("multiple of 32") != std::string::npos);
  }
  chapter03::Quantizer away = *chapter03::find_quantizer("quantize_q8_pad40");
  away.expected = [](std::span<const float> acts, long long nt, long long id) {
    std::vector<BlockQ8Pad40> blocks = chapter03::host_blocks(acts);
    for (std::size_t i = 0; i < acts.size(); ++i) {  // where the scale is 1, C's rounding instead
      BlockQ8Pad40& b = blocks[i / kQ8ActsPerBlock];
      if (b.d == 0x3c00)
        b.q[i % kQ8ActsPerBlock] = static_cast<std::int8_t>(std::min(127.0f, std::round(acts[i])));
    }
    std::vector<unsigned char> bytes(chapter03::pad40_bytes(nt, id));
    std::memcpy(bytes.data(), blocks.data(), bytes.size());
    return bytes;
  };
  CHECK(chapter03::check(away, 1, 64, ctx).find("is not the host's") != std::string::npos);
  chapter03::Quantizer longer = *chapter03::find_quantizer("quantize_q8_pad40");
  longer.bytes = [](long long nt, long long id) { return chapter03::pad40_bytes(nt, id) - 4; };
  CHECK(chapter03::check(longer, 1, 64, ctx).find("guard band") != std::string::npos);
}

TEST_CASE("the checker rejects every broken decoder, and accepts those that differ by the bug only") {
  Context ctx = testing::context_on(kDeviceExecutor);
  CHECK(accepted<wrong::Q4_0Right>(WeightType::q4_0, ctx));
  CHECK_FALSE(accepted<wrong::HighNibblesInterleaved>(WeightType::q4_0, ctx));
  CHECK_FALSE(accepted<wrong::OffsetForgotten>(WeightType::q4_0, ctx));
  CHECK_FALSE(accepted<wrong::TailBlockDropped>(WeightType::q4_0, ctx));
  CHECK_FALSE(accepted<wrong::FirstScaleForAll>(WeightType::q4_0, ctx));
  CHECK(accepted<wrong::Q5_0Right>(WeightType::q5_0, ctx));
  CHECK_FALSE(accepted<wrong::FifthBitsReversed>(WeightType::q5_0, ctx));
  CHECK(accepted<wrong::Q4_KRight>(WeightType::q4_k, ctx));
  CHECK_FALSE(accepted<wrong::NeighboursScale>(WeightType::q4_k, ctx));
  CHECK_FALSE(accepted<wrong::ScaleHighBitsForgotten>(WeightType::q4_k, ctx));
}
