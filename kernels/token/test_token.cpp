// Whole tokens of small models against float64 on the host, which rounds activations to int8 where the kernel does; and
// against themselves: launch by launch, several at once, and on the GPU with other numbers of blocks.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "harness/device/doctest_main.hpp"
#include "harness/device/half_bits.hpp"
#include "kernels/quant/dequantize.hpp"
#include "kernels/quant/quantize.hpp"
#include "kernels/token/token_kernel.cuh"

using namespace ladder;

namespace {

using Vector = std::vector<double>;

/// Random numbers of about this size.
std::vector<float> noise(std::size_t n, float size, unsigned seed, float middle = 0.0f) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> any(-size, size);
  std::vector<float> v(n);
  for (float& x : v) x = middle + any(random);
  return v;
}

std::size_t product(long long a, long long b) { return static_cast<std::size_t>(a * b); }

/// A matrix of a type: its values for the host, tiles and rows for the device.
struct Weights {
  long long od, id;
  std::vector<float> values;  // [od][id]
  Buffer<unsigned char> rows, tiled;

  Weights(WeightType type, long long outputs, long long inputs, unsigned seed, Stream& stream)
      : od(outputs),
        id(inputs),
        values(noise(product(od, id), 1.7f / std::sqrt(static_cast<float>(id)), seed)) {
    const std::size_t row = static_cast<std::size_t>(id / info(type).block_elems * info(type).block_bytes);
    std::vector<unsigned char> packed(row * static_cast<std::size_t>(od));
    for (long long r = 0; r < od; ++r) {
      unsigned char* const to = packed.data() + row * static_cast<std::size_t>(r);
      quantize_row(type, values.data() + r * id, to, id);
      dequantize_row(type, to, values.data() + r * id, id);
    }
    rows = Buffer<unsigned char>(packed.size(), "rows");
    rows.upload(packed);
    tiled = Buffer<unsigned char>(tiles::bytes(type, {1, od, id}), "tiles");
    REQUIRE(tiles::launch_repack(type, rows.data(), tiled.data(), {1, od, id}, stream).ok());
    stream.synchronize();
  }
  [[nodiscard]] Vector times(const Vector& x) const {
    Vector y(static_cast<std::size_t>(od), 0.0);
    for (std::size_t r = 0; r < y.size(); ++r) {
      for (std::size_t i = 0; i < x.size(); ++i) y[r] += x[i] * static_cast<double>(values[r * x.size() + i]);
    }
    return y;
  }
};

struct Floats {
  std::vector<float> host;
  Buffer<float> device;
  explicit Floats(std::vector<float> v) : host(std::move(v)), device(host.size(), "floats") {
    device.upload(host);
  }
};

/// What is left of a row that goes through int8, scales in f16 or in f32.
Vector through_int8(const Vector& x, bool f16) {
  Vector y(x.size());
  for (std::size_t b = 0; b < x.size(); b += 32) {
    float largest = 0.0f;
    for (std::size_t i = b; i < b + 32; ++i) largest = std::max(largest, std::fabs(static_cast<float>(x[i])));
    const float d = largest / 127.0f, inverse = d > 0.0f ? 1.0f / d : 0.0f;
    const double scale = f16 ? static_cast<double>(half_bits_to_float(float_to_half_bits(d))) : d;
    for (std::size_t i = b; i < b + 32; ++i)
      y[i] = scale * std::nearbyint(static_cast<float>(x[i]) * inverse);
  }
  return y;
}

struct Size {
  WeightType layer_type, head_type;
  HeadShape heads;
  int layers, feed_forward, vocabulary, context;
};

struct SmallModel {
  struct Layer {
    Weights q, k, v, output, gate, up, down;
    Floats q_bias, k_bias, v_bias, attn_norm, ffn_norm;
  };
  Size size;
  int embedding;
  Stream stream;
  std::vector<Layer> layers;
  Weights head;
  Floats output_norm, cosines, sines;
  Buffer<token::LayerWeights> table;
  Buffer<__half> keys, values;
  Buffer<float> logits;
  Buffer<int> ids;
  Buffer<Packet> packets;
  TokenProgram program;

  static std::vector<float> angles(const Size& s, double (*of)(double)) {
    std::vector<float> v;
    for (int p = 0; p < s.context; ++p) {
      for (int i = 0; i < s.heads.head_dim / 2; ++i)
        v.push_back(static_cast<float>(of(p * std::pow(10000.0, -2.0 * i / s.heads.head_dim))));
    }
    return v;
  }

  explicit SmallModel(const Size& s)
      : size(s),
        embedding(s.heads.q_length()),
        head(s.head_type, s.vocabulary, embedding, 5, stream),
        output_norm(noise(static_cast<std::size_t>(embedding), 0.2f, 6, 1.0f)),
        cosines(angles(s, [](double a) { return std::cos(a); })),
        sines(angles(s, [](double a) { return std::sin(a); })),
        table(static_cast<std::size_t>(s.layers), "layers"),
        keys(product(s.layers, static_cast<long long>(s.context) * s.heads.kv_length()), "keys"),
        values(keys.size(), "values"),
        logits(static_cast<std::size_t>(s.vocabulary), "logits"),
        ids(16, "ids"),
        packets(token_packets(s.heads, s.feed_forward, token_blocks()), "packets") {
    const int kv = s.heads.kv_length();
    unsigned seed = 100;
    const auto matrix = [&](long long od, long long id) {
      return Weights(s.layer_type, od, id, ++seed, stream);
    };
    const auto floats = [&](int n, float amount, float middle) {
      return Floats(noise(static_cast<std::size_t>(n), amount, ++seed, middle));
    };
    std::vector<token::LayerWeights> pointers;
    for (int l = 0; l < s.layers; ++l) {
      layers.push_back({matrix(embedding, embedding), matrix(kv, embedding), matrix(kv, embedding),
                        matrix(embedding, embedding), matrix(s.feed_forward, embedding),
                        matrix(s.feed_forward, embedding), matrix(embedding, s.feed_forward),
                        floats(embedding, 1.0f, 0.0f), floats(kv, 1.0f, 0.0f), floats(kv, 1.0f, 0.0f),
                        floats(embedding, 0.2f, 1.0f), floats(embedding, 0.2f, 1.0f)});
      Layer& w = layers.back();
      pointers.push_back({{w.q.tiled.data(), w.k.tiled.data(), w.v.tiled.data(), w.output.tiled.data(),
                           w.gate.tiled.data(), w.up.tiled.data(), w.down.tiled.data()},
                          {w.q_bias.device.data(), w.k_bias.device.data(), w.v_bias.device.data()},
                          w.attn_norm.device.data(),
                          w.ffn_norm.device.data()});
    }
    table.upload(pointers);
    packets.fill_bytes(0);
    program.layers = table.data(), program.head = head.tiled.data(), program.rows = head.rows.data();
    program.output_norm = output_norm.device.data();
    program.cosines = cosines.device.data(), program.sines = sines.device.data();
    program.keys = keys.data(), program.values = values.data();
    program.packets = packets.data(), program.logits = logits.data(), program.ids = ids.data();
    program.heads = s.heads, program.layer_count = s.layers, program.embedding = embedding;
    program.feed_forward = s.feed_forward, program.vocabulary = s.vocabulary, program.context = s.context;
    program.epsilon = 1e-6f;
    fill_cache();
  }

  /// Earlier positions hold noise.
  void fill_cache() {
    const auto some = [](Buffer<__half>& to, unsigned seed) {
      std::vector<__half> v;
      for (const float x : noise(to.size(), 1.0f, seed)) v.push_back(__float2half_rn(x));
      to.upload(v);
    };
    some(keys, 7);
    some(values, 8);
  }
  static Vector doubles(const Buffer<__half>& b) {
    std::vector<__half> v(b.size());
    b.download(v);
    Vector d;
    for (const __half x : v) d.push_back(static_cast<double>(__half2float(x)));
    return d;
  }

  struct Result {
    std::vector<float> logits;
    std::vector<int> ids;
  };
  Result run(int token, int position, int tokens = 1, int blocks = token_blocks()) {
    program.first_token = token, program.position = position, program.tokens = tokens;
    const Status ok = token_supported(size.layer_type, size.head_type, program, blocks, device_info());
    REQUIRE_MESSAGE(ok.ok(), ok.message());
    logits.fill_bytes(0xff);
    ids.fill_bytes(0xff);
    const Status status = launch_token(size.layer_type, size.head_type, program, blocks, stream);
    REQUIRE_MESSAGE(status.ok(), status.message());
    stream.synchronize();
    program.step += token_steps(program);
    Result r{std::vector<float>(logits.size()), std::vector<int>(ids.size())};
    logits.download(r.logits);
    ids.download(r.ids);
    r.ids.resize(static_cast<std::size_t>(tokens));
    return r;
  }

  /// norm(x) as the products get it: x times weights through int8, and the factor afterwards.
  [[nodiscard]] Vector normed(const Vector& x, const std::vector<float>& weight) const {
    double squares = 0;
    Vector y(x);
    for (std::size_t i = 0; i < x.size(); ++i) {
      squares += x[i] * x[i];
      y[i] *= static_cast<double>(weight[i]);
    }
    y = through_int8(y, false);
    for (double& v : y) v /= std::sqrt(squares / static_cast<double>(x.size()) + 1e-6);
    return y;
  }
  void turn(double* row, int position) const {
    const int half = size.heads.head_dim / 2;
    for (int i = 0; i < half; ++i) {
      const double c = static_cast<double>(
                       cosines.host[product(position, half) + static_cast<std::size_t>(i)]),
                   s = static_cast<double>(sines.host[product(position, half) + static_cast<std::size_t>(i)]);
      const double a = row[i], b = row[i + half];
      row[i] = a * c - b * s;
      row[i + half] = b * c + a * s;
    }
  }
  /// The logits of a token at a position, with the caches as they are on the device.
  /// @param skip an earlier position that is left out; -1 for none
  [[nodiscard]] Vector reference(int token, int position, int skip = -1) const {
    const HeadShape& h = size.heads;
    const int dim = h.head_dim, kv = h.kv_length();
    const Vector all_keys = doubles(keys), all_values = doubles(values);
    Vector x;
    for (int i = 0; i < embedding; ++i)
      x.push_back(static_cast<double>(head.values[product(token, embedding) + static_cast<std::size_t>(i)]));
    const auto add = [](Vector& to, const Vector& v) {
      for (std::size_t i = 0; i < to.size(); ++i) to[i] += v[i];
    };
    const auto with_bias = [](Vector v, const std::vector<float>& bias) {
      for (std::size_t i = 0; i < v.size(); ++i) v[i] += static_cast<double>(bias[i]);
      return v;
    };
    const auto rounded = [](double v) {
      return static_cast<double>(half_bits_to_float(float_to_half_bits(static_cast<float>(v))));
    };
    for (std::size_t l = 0; l < layers.size(); ++l) {
      const Layer& w = layers[l];
      const Vector a = normed(x, w.attn_norm.host);
      Vector q = with_bias(w.q.times(a), w.q_bias.host), k = with_bias(w.k.times(a), w.k_bias.host),
             v = with_bias(w.v.times(a), w.v_bias.host), mixed(q.size(), 0.0);
      for (int i = 0; i < h.heads; ++i) turn(q.data() + i * dim, position);
      for (int i = 0; i < h.kv_heads; ++i) turn(k.data() + i * dim, position);
      for (double& e : k) e = rounded(e);
      for (double& e : v) e = rounded(e);
      for (int i = 0; i < h.heads; ++i) {
        const int at = i / (h.heads / h.kv_heads) * dim;
        const auto row_of = [&](const Vector& cache, const Vector& newest, int p) {
          return p == position
                     ? newest.data() + at
                     : cache.data() + product(static_cast<long long>(l) * size.context + p, kv) + at;
        };
        Vector weight(static_cast<std::size_t>(position) + 1, 0.0);
        double total = 0;
        for (int p = 0; p <= position; ++p) {
          const double* const key = row_of(all_keys, k, p);
          double score = 0;
          for (int d = 0; d < dim; ++d) score += q[product(i, dim) + static_cast<std::size_t>(d)] * key[d];
          if (p == skip) continue;
          total += weight[static_cast<std::size_t>(p)] = std::exp(score / std::sqrt(dim));
        }
        for (int p = 0; p <= position; ++p) {
          for (int d = 0; d < dim; ++d)
            mixed[product(i, dim) + static_cast<std::size_t>(d)] +=
                weight[static_cast<std::size_t>(p)] / total * row_of(all_values, v, p)[d];
        }
      }
      add(x, w.output.times(through_int8(mixed, true)));
      const Vector f = normed(x, w.ffn_norm.host);
      Vector gate = w.gate.times(f);
      const Vector up = w.up.times(f);
      for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
      add(x, w.down.times(through_int8(gate, true)));
    }
    return head.times(normed(x, output_norm.host));
  }
};

/// The largest difference, in parts of the largest logit; infinite if one is not finite.
double distance(const std::vector<float>& got, const Vector& expected) {
  double most = 0, largest = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    most = std::max(most, std::fabs(static_cast<double>(got[i]) - expected[i]));
    largest = std::max(largest, std::fabs(expected[i]));
  }
  return most / largest;
}

// Float64 and the kernel round to int8 at the same places, so they differ by f32 roundings; where such a difference brings
// an activation over the border of two codes, by a code in 32 products of a row.
constexpr double kMostDistance = 4e-3;

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

Size small(WeightType layers, WeightType head, HeadShape heads) {
  return {layers, head, heads, 2, 96, 50, 700};
}

}  // namespace

TEST_CASE("logits are those of float64 at every length of the cache, for all types and heads") {
  using enum WeightType;
  for (const Size& size : {small(q4_0, q8_0, {2, 1, 64}), small(q8_0, q8_0, {3, 3, 64}),
                           small(q4_0, q6_k, {4, 2, 64}), small(q4_0, q8_0, {2, 1, 128})}) {
    SmallModel m(size);
    CAPTURE(info(size.head_type).name);
    CAPTURE(size.heads.head_dim);
    const bool first = size.heads.heads == 2 && size.heads.head_dim == 64;
    for (const int position :
         first ? std::vector{0, 1, 7, 8, 9, 127, 130, 513, 699} : std::vector{0, 300, 600}) {
      CAPTURE(position);
      const SmallModel::Result got = m.run(11 + position % 30, position);
      CHECK(distance(got.logits, m.reference(11 + position % 30, position)) < kMostDistance);
      CHECK(got.ids[0] == std::max_element(got.logits.begin(), got.logits.end()) - got.logits.begin());
    }
  }
}

TEST_CASE("the bound sees a key that is left out") {
  SmallModel m(small(WeightType::q4_0, WeightType::q8_0, {2, 1, 64}));
  const std::vector<float> got = m.run(3, 20).logits;
  CHECK(distance(got, m.reference(3, 20)) < kMostDistance);
  CHECK(distance(got, m.reference(3, 20, 19)) > kMostDistance);
}

TEST_CASE("several tokens of a launch are those of a launch each, and their keys are kept") {
  SmallModel m(small(WeightType::q4_0, WeightType::q8_0, {2, 1, 64}));
  for (const int first : {9, token::kDeep - 2}) {
    CAPTURE(first);
    m.fill_cache();
    const SmallModel::Result together = m.run(4, first, 4);
    m.fill_cache();
    int token = 4;
    std::vector<float> logits;
    for (int n = 0; n < 4; ++n) {
      const SmallModel::Result one = m.run(token, first + n);
      token = one.ids[0];
      CHECK(token == together.ids[static_cast<std::size_t>(n)]);
      logits = one.logits;
    }
    CHECK(same_bits(together.logits, logits));
  }
}

TEST_CASE("bits do not depend on the number of blocks") {
  if (kDeviceExecutor != Executor::gpu) return;  // the emulator has one
  Size size = small(WeightType::q4_0, WeightType::q8_0, {14, 2, 64});
  size.feed_forward = 1216;
  size.vocabulary = 3001;
  SmallModel m(size);
  const SmallModel::Result expected = m.run(17, 200, 5);
  CHECK(expected.ids[4] >= 0);
  for (const int blocks : {8, 15, 57, 101, token_blocks() - 1}) {
    CAPTURE(blocks);
    if (blocks > token_blocks()) continue;
    const SmallModel::Result got = m.run(17, 200, 5, blocks);
    CHECK(got.ids == expected.ids);
    CHECK(same_bits(got.logits, expected.logits));
  }
}

TEST_CASE("a token that is none gives NaN, and no id") {
  SmallModel m(small(WeightType::q4_0, WeightType::q8_0, {2, 1, 64}));
  const SmallModel::Result got = m.run(50, 3);
  CHECK(std::all_of(got.logits.begin(), got.logits.end(), [](float v) { return std::isnan(v); }));
  CHECK(got.ids[0] == -1);
}

TEST_CASE("what the kernel does not take is refused with the reason") {
  using enum WeightType;
  SmallModel m(small(q4_0, q8_0, {2, 1, 64}));
  const auto says = [&](const std::function<void(TokenProgram&)>& change, WeightType layers = q4_0,
                        WeightType head = q8_0, int blocks = 1) {
    TokenProgram p = m.program;
    change(p);
    return token_supported(layers, head, p, blocks, device_info()).message();
  };
  const auto nothing = [](TokenProgram&) {};
  CHECK(says(nothing).empty());
  CHECK(says(nothing, q4_k, q8_0) ==
        "token_kernel: layers of q4_k with a head of q8_0; it takes q4_0 with q8_0 or q6_k, and q8_0 with "
        "q8_0");
  CHECK(says(nothing, q4_0, q6_k) == "token_kernel: rows must be whole blocks, of 32 at least, not 128");
  CHECK(says(nothing, q4_0, q8_0, 0) ==
        "token_kernel: as many blocks as are resident at once, one on the emulator, not 0");
  CHECK(says([](TokenProgram& p) {
          p.heads = {4, 2, 32};
        }) == "token_kernel: head_dim must be 64 or 128, not 32");
  CHECK(says([](TokenProgram& p) {
          p.heads = {3, 2, 64};
        }) == "token_kernel: heads must be a multiple of kv_heads, and all of them as long as the embedding");
  CHECK(says([](TokenProgram& p) {
          p.heads = {18, 2, 64}, p.embedding = 18 * 64;
        }) == "token_kernel: at most 8 heads may share keys, not 9");
  CHECK(says([](TokenProgram& p) { p.feed_forward = 100; }) ==
        "token_kernel: rows must be whole blocks, of 32 at least, not 100");
  CHECK(says([](TokenProgram& p) { p.position = p.context; }) ==
        "token_kernel: at least one layer, a vocabulary, and tokens within the context");
  CHECK(says([](TokenProgram& p) { p.feed_forward = 64 * 1024; }) ==
        "token_kernel: the work of a block does not fit its tables, or that of a batch the ring: too large a "
        "model, or "
        "too few blocks");
  CHECK(says([](TokenProgram& p) { p.layer_count = 2000; }) ==
        "token_kernel: the work of a block does not fit its tables, or that of a batch the ring: too large a "
        "model, or "
        "too few blocks");
  DeviceInfo old = device_info();
  old.executor = Executor::gpu, old.cc_major = 8, old.sms = 100;
  CHECK(token_supported(q4_0, q8_0, m.program, 1, old).message() ==
        "token_kernel: needs compute capability 9.0 or later");
}
