// The harness itself: byte model, shapes, statistics, checker, records, command line.
#include "harness/device/doctest_main.hpp"
#include "harness/device/half_bits.hpp"
#include "harness/experiment/main.hpp"
#include "harness/experiment/testing.hpp"

using namespace ladder;

TEST_CASE("the byte model, to the byte") {
  // Compulsory bytes of Qwen2.5-0.5B ffn_down [896, 4864], and of 7B's [3584, 18944].
  struct Row {
    WeightType type;
    ActivationFormat acts;
    Shape shape;
    long long weights, act_bytes, out, total, flop;
    double intensity;
  };
  using enum WeightType;
  const auto f32a = ActivationFormat::f32, pad40 = ActivationFormat::pad40;
  const Row rows[] = {
      {f32, f32a, {1, 896, 4864}, 17432576, 19456, 3584, 17455616, 8716288, 0.50},
      {f16, f32a, {1, 896, 4864}, 8716288, 19456, 3584, 8739328, 8716288, 1.00},
      {q8_0, pad40, {1, 896, 4864}, 4630528, 6080, 3584, 4640192, 8716288, 1.88},
      {q6_k, pad40, {1, 896, 4864}, 3575040, 6080, 3584, 3584704, 8716288, 2.43},
      {q5_0, pad40, {1, 896, 4864}, 2996224, 6080, 3584, 3005888, 8716288, 2.90},
      {q4_0, pad40, {1, 896, 4864}, 2451456, 6080, 3584, 2461120, 8716288, 3.54},
      {q4_0, pad40, {2, 896, 4864}, 2451456, 12160, 7168, 2470784, 17432576, 7.06},
      {q4_0, pad40, {8, 896, 4864}, 2451456, 48640, 28672, 2528768, 69730304, 27.57},
      {q4_0, pad40, {9, 896, 4864}, 2451456, 54720, 32256, 2538432, 78446592, 30.90},
      {q4_0, pad40, {64, 896, 4864}, 2451456, 389120, 229376, 3069952, 557842432, 181.71},
      {q4_0, pad40, {128, 896, 4864}, 2451456, 778240, 458752, 3688448, 1115684864, 302.48},
      {q4_0, pad40, {512, 896, 4864}, 2451456, 3112960, 1835008, 7399424, 4462739456, 603.12},
      {q4_0, pad40, {2048, 896, 4864}, 2451456, 12451840, 7340032, 22243328, 17850957824, 802.53},
      {q4_k, pad40, {1, 3584, 18944}, 38191104, 23680, 14336, 38229120, 135790592, 3.55},
      {q4_k, pad40, {512, 3584, 18944}, 38191104, 12124160, 7340032, 57655296, 69524783104, 1205.87},
  };
  for (const Row& row : rows) {
    CAPTURE(info(row.type).name);
    CAPTURE(row.shape.nt);
    const Traffic t = compulsory_traffic(row.type, row.acts, row.shape);
    CHECK(static_cast<long long>(t.weights) == row.weights);
    CHECK(static_cast<long long>(t.acts) == row.act_bytes);
    CHECK(static_cast<long long>(t.out) == row.out);
    CHECK(static_cast<long long>(t.total()) == row.total);
    CHECK(static_cast<long long>(matmul_ops(row.shape)) == row.flop);
    CHECK(arithmetic_intensity(row.type, row.acts, row.shape) ==
          doctest::Approx(row.intensity).epsilon(0.005));
  }
  CHECK(decode_intensity_limit(f32) == 0.5);
  CHECK(decode_intensity_limit(q4_0) == doctest::Approx(3.5556).epsilon(1e-4));
}

TEST_CASE("bytes per element of every type") {
  const std::pair<WeightType, double> expected[] = {
      {WeightType::f32, 4},         {WeightType::f16, 2},         {WeightType::bf16, 2},
      {WeightType::q8_0, 1.0625},   {WeightType::q6_k, .8203125}, {WeightType::q5_1, .75},
      {WeightType::q5_0, .6875},    {WeightType::q5_k, .6875},    {WeightType::q4_1, .625},
      {WeightType::q4_0, .5625},    {WeightType::q4_k, .5625},    {WeightType::iq4_nl, .5625},
      {WeightType::iq4_xs, .53125}, {WeightType::q3_k, .4296875}, {WeightType::q2_k, .328125},
  };
  CHECK(std::size(expected) == kWeightTypes.size());
  for (const auto& [type, bytes] : expected) CHECK(info(type).bytes_per_element() == bytes);
  for (const WeightTypeInfo& w : kWeightTypes) CHECK(info(w.type).name == w.name);
}

TEST_CASE("layer shapes give the published parameter counts") {
  // Weights of the matmuls, the embedding (tied or not), norms and biases, against the counts of the model cards.
  const std::pair<const char*, long long> published[] = {
      {"0.5b", 494032768},  {"1.5b", 1543714304}, {"3b", 3085938688},   {"7b", 7615616512},
      {"14b", 14770033664}, {"32b", 32763876352}, {"72b", 72706203648},
  };
  for (std::size_t i = 0; i < kQwenSizes.size(); ++i) {
    const QwenSize& s = kQwenSizes[i];
    CAPTURE(s.name);
    long long n = 0;
    for (const QwenLayer& l : qwen_layers(s)) n += l.count * l.od * l.id;
    if (!s.tied) n += static_cast<long long>(s.vocab) * s.d_model;                       // token_embd
    n += static_cast<long long>(s.layers) * (2 * s.d_model + s.d_model + 2 * s.d_kv());  // norms, biases
    n += s.d_model;                                                                      // output_norm
    CHECK(std::string(s.name) == published[i].first);
    CHECK(n == published[i].second);
  }
  CHECK(find_qwen_layer("0.5B.FFN_DOWN")->id == 4864);
  CHECK_FALSE(find_qwen_layer("0.5b.ffn").has_value());
}

TEST_CASE("median and quartiles") {
  const TimeStats s = summarize({4, 1, 3, 2, 5});
  CHECK(s.median == 3);
  CHECK(s.q1 == 2);
  CHECK(s.q3 == 4);
  CHECK(s.n == 5);
  const TimeStats even = summarize({1, 2, 3, 4});
  CHECK(even.median == 2.5);
  CHECK(even.q1 == 1.75);
  CHECK(summarize({7}).median == 7);
}

TEST_CASE("sampling stops when quiet, or at the limit, and says which") {
  MeasureOptions o;
  o.min_samples = 5;
  o.time_limit_ms = 20;
  CHECK(sample([] { return 100.0; }, o).stopped_by_iqr);
  int i = 0;
  const TimeStats noisy = sample([&] { return ++i % 2 == 0 ? 100.0 : 200.0; }, o);
  CHECK_FALSE(noisy.stopped_by_iqr);
  CHECK(noisy.n >= 5);
}

TEST_CASE("the interleaved comparison has three verdicts") {
  MeasureOptions o;
  o.min_samples = 8;
  o.time_limit_ms = 1;
  o.max_samples = 8;
  CHECK(std::string(compare_interleaved([] { return 1.0; }, [] { return 2.0; }, o).verdict) == "faster");
  CHECK(std::string(compare_interleaved([] { return 2.0; }, [] { return 1.0; }, o).verdict) == "slower");
  int i = 0;
  const Comparison c = compare_interleaved([&] { return ++i % 2 == 0 ? 1.0 : 3.0; }, [] { return 2.0; }, o);
  CHECK(std::string(c.verdict) == "ambiguous");
}

TEST_CASE("the checker accepts only what is finite and within the bound") {
  const Shape shape{1, 3, 8};
  const std::vector<double> value = {1, 2, 3}, magnitude = {1, 2, 3};
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  CHECK(check_outputs(std::vector<float>{1, 2, 3}, value, magnitude, 0, shape).ok);
  CHECK_FALSE(check_outputs(std::vector<float>{1, 2, nan}, value, magnitude, 10, shape).ok);
  CHECK_FALSE(check_outputs(std::vector<float>{1, inf, 3}, value, magnitude, 10, shape).ok);
  const CheckResult off = check_outputs(std::vector<float>{1, 2.0001f, 3}, value, magnitude, 10, shape);
  CHECK_FALSE(off.ok);
  CHECK(off.message.find("out[0][1]") != std::string::npos);
  const float ulp_off = std::nextafter(2.0f, 3.0f);
  CHECK(check_outputs(std::vector<float>{1, ulp_off, 3}, value, magnitude, 4, shape).ok);
  CHECK_FALSE(check_outputs(std::vector<float>{1, ulp_off, 3}, value, magnitude, 0, shape).ok);
  // A reference that is not finite accepts nothing.
  CHECK_FALSE(
      check_outputs(std::vector<float>{1, 2, 3}, std::vector<double>{1, 2, nan}, magnitude, 10, shape).ok);
  CHECK(rounding_factor(16) == 16);
  CHECK(rounding_factor(10000) == 800);
}

TEST_CASE("guard bands notice one changed byte") {
  for (const bool before : {true, false}) {
    GuardedBuffer<float> b(100, "guarded");
    std::vector<float> host(100, 1.0f);
    b.upload(host);
    CHECK(b.download(host));
    Stream stream;
    fill(before ? b.data() - 1 : b.data() + 100, 1, FillKind::uniform, 1, stream);
    CHECK_FALSE(b.download(host));
    CHECK(host[0] == 1.0f);
  }
}

TEST_CASE("test data") {
  double mean = 0;
  for (std::uint64_t i = 0; i < 10000; ++i) {
    const float u = fill_value(FillKind::uniform, 3, i);
    CHECK_UNARY(u >= -1.0f && u < 1.0f);
    mean += u;
    const float n = fill_value(FillKind::small_int, 3, i);
    CHECK_UNARY(n == std::round(n) && n != 0 && std::fabs(n) <= 15);
    const float tiny = fill_value(FillKind::tiny_int, 3, i);
    CHECK_UNARY(tiny == std::round(tiny) && tiny != 0 && std::fabs(tiny) <= 4);
  }
  CHECK(std::fabs(mean / 10000) < 0.03);
  CHECK(fill_value(FillKind::uniform, 3, 5) != fill_value(FillKind::uniform, 4, 5));
}

TEST_CASE("the reference is the plain sum") {
  Stream stream;
  const Shape s{3, 13, 70};
  Operands ops(s, 1);
  ops.fill_inputs(FillKind::uniform, 11, stream);
  const Reference r = reference_matmul(ops.weights(0), ops.acts(0), s, stream);
  for (long long t = 0; t < s.nt; ++t) {
    for (long long row = 0; row < s.od; ++row) {
      double sum = 0, magnitude = 0;
      for (long long i = 0; i < s.id; ++i) {
        const double term = static_cast<double>(fill_value(FillKind::uniform, 11, row * s.id + i)) *
                            fill_value(FillKind::uniform, 12, t * s.id + i);
        sum += term;
        magnitude += std::fabs(term);
      }
      const auto at = static_cast<std::size_t>(t * s.od + row);
      CHECK(r.value[at] == doctest::Approx(sum).epsilon(1e-13));
      CHECK(r.magnitude[at] == doctest::Approx(magnitude).epsilon(1e-13));
    }
  }
}

TEST_CASE("the reference of packed weights is the plain sum of what they decode to") {
  Stream stream;
  const Shape s{2, 11, 256};
  for (const WeightType type : {WeightType::q8_0, WeightType::q4_1}) {
    Operands ops(s, 1, type);
    ops.fill_inputs(FillKind::uniform, 11, stream);
    const Reference r = reference_matmul(ops.weights(0), ops.acts(0), s, stream, type);
    for (long long row = 0; row < s.od; ++row) {
      double sum = 0, magnitude = 0;
      for (long long b = 0; b < s.id / 32; ++b) {
        unsigned char block[256];
        fill_block(type, BlockFill::random, 11, static_cast<std::uint64_t>(row * s.id / 32 + b), block,
                   info(type).block_bytes);
        const auto f16_at = [&block](int at) {
          return static_cast<double>(
              half_bits_to_float(static_cast<std::uint16_t>(block[at] | block[at + 1] << 8)));
        };
        for (int j = 0; j < 32; ++j) {
          const double x =
              fill_value(FillKind::uniform, 12, static_cast<std::uint64_t>(s.id + 32 * b + j));  // token 1
          const int nibble = j < 16 ? block[4 + j] & 15 : block[4 + j - 16] >> 4;
          const double codes = type == WeightType::q8_0 ? static_cast<signed char>(block[2 + j]) * f16_at(0)
                                                        : nibble * f16_at(0);
          const double offset = type == WeightType::q8_0 ? 0.0 : f16_at(2);
          sum += (codes + offset) * x;
          magnitude += std::fabs(codes * x) + std::fabs(offset * x);
        }
      }
      // Weights of Q4_1 are rounded to f32 when decoded.
      const auto at = static_cast<std::size_t>(s.od + row);
      CHECK(std::fabs(r.value[at] - sum) <= 1e-7 * magnitude);
      CHECK(r.magnitude[at] == doctest::Approx(magnitude).epsilon(1e-6));
    }
  }
}

namespace {

/// The blocks of a file the other way round: a layout that no kernel would like.
const WeightLayout kReversed = {
    "reversed",
    [](WeightType type, Shape s) { return static_cast<std::size_t>(weight_bytes(type, s.od, s.id)); },
    [](WeightType type, const void* blocks, void* out, Shape s, Stream& stream) -> Status {
      stream.synchronize();
      const auto size = static_cast<std::size_t>(info(type).block_bytes);
      const auto n = static_cast<std::size_t>(weight_bytes(type, s.od, s.id)) / size;
      for (std::size_t i = 0; i < n; ++i) {
        std::memcpy(static_cast<unsigned char*>(out) + (n - 1 - i) * size,
                    static_cast<const unsigned char*>(blocks) + i * size, size);
      }
      return {};
    }};

}  // namespace

TEST_CASE("operands of another form: int8 activations, weights in another order") {
  Stream stream;
  const Shape s{2, 3, 96};
  Operands ops(s, 2, {WeightType::q8_0, ActivationFormat::pad40, &kReversed});
  for (const FillKind kind : {FillKind::uniform, FillKind::small_int}) {
    ops.fill_inputs(kind, 4, stream);
    const BlockQ8Pad40* acts = ops.acts(1);
    const unsigned char* weights = ops.weights(1);
    const Reference r = ops.reference(stream);
    for (long long t = 0; t < s.nt; ++t) {
      for (long long row = 0; row < s.od; ++row) {
        double sum = 0;
        for (long long b = 0; b < 3; ++b) {
          const unsigned char* w = weights + 34 * (8 - (row * 3 + b));
          const BlockQ8Pad40& x = acts[t * 3 + b];
          int dot = 0, codes = 0;
          for (int j = 0; j < 32; ++j) {
            dot += static_cast<signed char>(w[2 + j]) * x.q[j];
            codes += x.q[j];
            const float original = fill_value(kind == FillKind::small_int ? FillKind::tiny_int : kind, 5,
                                              static_cast<std::uint64_t>(t * 96 + b * 32 + j));
            const double step = half_bits_to_float(x.d);
            CHECK(std::fabs(step * x.q[j] - original) <= (kind == FillKind::small_int ? 0.0 : 0.51 * step));
          }
          CHECK(codes == x.sum);
          sum += static_cast<double>(half_bits_to_float(static_cast<std::uint16_t>(w[0] | w[1] << 8))) *
                 half_bits_to_float(x.d) * dot;
        }
        CHECK(r.value[static_cast<std::size_t>(t * s.od + row)] == doctest::Approx(sum).epsilon(1e-13));
      }
    }
  }
  CHECK_THROWS_AS((void)Operands({1, 2, 48}, 1, {WeightType::f32, ActivationFormat::pad40}), DeviceError);
}

TEST_CASE("rungs of different forms do not share operands") {
  Rung a, b, c, d;
  a.weight_type = c.weight_type = d.weight_type = WeightType::q4_0;
  b.weight_type = WeightType::f16;
  d.acts = ActivationFormat::pad40;
  const auto groups = group_by_form({&a, &b, &c, &d});
  REQUIRE(groups.size() == 3);
  CHECK(groups[0] == std::vector<const Rung*>{&a, &c});
  CHECK(groups[1] == std::vector<const Rung*>{&b});
  CHECK(groups[2] == std::vector<const Rung*>{&d});
  Context ctx;
  Operands ops({1, 2, 32}, 1, WeightType::q4_0);
  Reference reference;
  CHECK_THROWS_AS((void)check_rungs({&b}, ops, ctx, reference), DeviceError);
  CHECK_THROWS_AS((void)check_rungs({&d}, ops, ctx, reference), DeviceError);
  CHECK_THROWS_AS((void)Operands({1, 2, 48}, 1, WeightType::q4_0), DeviceError);
}

TEST_CASE("a set of packed operands is as large as its weights") {
  const Shape s{2, 8, 512};
  const double guards = 6.0 * GuardedBuffer<float>::kGuardBytes, rest = 4.0 * 2 * (512 + 8);
  CHECK(Operands::bytes_per_set(s, WeightType::q4_k) == 8 * 2 * 144 + rest + guards);
  CHECK(Operands::bytes_per_set(s) == 8 * 512 * 4 + rest + guards);
  DeviceInfo d;
  d.l2_bytes = 1 << 20;
  CHECK(sets_for_cold(s, d, 1e12, WeightType::q4_k) > sets_for_cold(s, d, 1e12));
}

TEST_CASE("records leave out what does not apply") {
  Record r;
  r.rung = "x\"y";
  r.executor = Executor::cpu;
  r.device = "d";
  CHECK(r.json() == R"({"schema": 1, "rung": "x\"y", "executor": "cpu", "device": "d"})");
  r.traffic = Traffic{100, 20, 4};
  r.work = Work{62, "flop"};
  r.time = TimeStats{31, 30, 32, 9, true};
  r.roof = Roof{8, 4, "flop", "measured"};
  CHECK(r.floor_ns() == 15.5);  // both terms are 15.5: 124 B / 8 GB/s and 62 FLOP / 4 GFLOP/s
  const std::string json = r.json();
  for (const char* part : {R"("total": 124)", R"("intensity": 0.5)", R"("gbps": 4)", R"("gops": 2)",
                           R"("percent_of_roof": 50)", R"("stop": "iqr")"}) {
    CAPTURE(part);
    CHECK(json.find(part) != std::string::npos);
  }
  CHECK(JsonObject().add("nan", std::nan("")).add("n", 1).str() == R"({"n": 1})");
  CHECK(json_quote("a\nb\\") == R"("a\u000ab\\")");
}

TEST_CASE("cold measurements rotate through four times the cache") {
  DeviceInfo d;
  d.l2_bytes = 50 << 20;
  const Shape s{1, 896, 896};
  CHECK(sets_for_cold(s, d, 1e12) * Operands::bytes_per_set(s) >= 4.0 * d.l2_bytes);
  CHECK(sets_for_cold(s, d, 3.5 * Operands::bytes_per_set(s)) == 3);
  CHECK(sets_for_cold({1, 151936, 896}, d, 1e12) == 1);
}

TEST_CASE("the command line says what was wrong and what is allowed") {
  const auto message = [](std::vector<std::string> args) -> std::string {
    try {
      (void)parse_options(args);
      return "";
    } catch (const UsageError& e) {
      return e.what();
    }
  };
  CHECK(message({"--nt", "1,8,512", "--layer", "7b.attn_q", "--on", "cpu"}).empty());
  CHECK(message({"--nt", "0"}).find("from 1 to") != std::string::npos);
  CHECK(message({"--nt", "8x"}).find("'8x'") != std::string::npos);
  CHECK(message({"--on", "tpu"}).find("gpu, emulator, cpu") != std::string::npos);
  CHECK(message({"--mode", "warm"}).find("cold, hot") != std::string::npos);
  CHECK(message({"--od", "8"}).find("together") != std::string::npos);
  CHECK(message({"--rung"}).find("needs a value") != std::string::npos);
  CHECK(message({"--frobnicate"}).find("--help") != std::string::npos);
  CHECK(message({"--compare", "a"}).find("two rung ids") != std::string::npos);
  CHECK(message({"--od", "8", "--id", "8", "--layer", "7b.attn_q"}).find("not both") != std::string::npos);
}
