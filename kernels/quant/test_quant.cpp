// Host quantizers and decoders: bytes and values of ggml, the bit layouts one field at a time, edge cases,
// errors.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "harness/device/half_bits.hpp"
#include "kernels/quant/decode.hpp"
#include "kernels/quant/dequantize.hpp"
#include "kernels/quant/quantize.hpp"

using namespace ladder;

namespace {

using Bytes = std::vector<unsigned char>;
using Floats = std::vector<float>;

// Golden data -----------------------------------------------------------------------------------------------

/// The numbers that data/golden/quants.txt describes.
struct Random {
  std::uint32_t state;
  std::uint32_t bits() {
    state = (state * 1103515245u + 12345u) & 0x7fffffffu;
    return (state >> 16) & 0x7fffu;
  }
  float unit() { return static_cast<float>(bits()) / 16384.0f - 1.0f; }
};

template <class F>
Floats numbers(std::size_t n, std::uint32_t seed, F next) {
  Random r{seed};
  Floats x(n);
  for (std::size_t i = 0; i < n; ++i) x[i] = next(r, i);
  return x;
}

Floats golden_input() {
  return numbers(256, 1, [](Random& r, std::size_t) { return r.unit(); });
}

Floats family(const std::string& name) {
  constexpr std::size_t n = 8192;
  float held = 0.0f;
  int exponent = 0;
  if (name == "uniform") return numbers(n, 219, [](Random& r, std::size_t) { return r.unit(); });
  if (name == "cubed") {
    return numbers(n, 3, [](Random& r, std::size_t) {
      const float u = r.unit();
      return u * u * u;
    });
  }
  if (name == "positive")
    return numbers(n, 4, [](Random& r, std::size_t) { return std::fabs(r.unit()) + 0.0625f; });
  if (name == "offset")
    return numbers(n, 5, [](Random& r, std::size_t) { return r.unit() * 0x1p-10f - 5.0f; });
  if (name == "sparse") {
    return numbers(n, 6, [](Random& r, std::size_t) {
      const bool keep = r.bits() % 16 == 0;
      const float u = r.unit();
      return keep ? u : 0.0f;
    });
  }
  if (name == "grouped") {
    return numbers(n, 7, [&](Random& r, std::size_t i) {
      if (i % 16 == 0) exponent = static_cast<int>(r.bits() % 20) - 12;
      return std::ldexp(r.unit(), exponent);
    });
  }
  if (name == "tiny") return numbers(n, 8, [](Random& r, std::size_t) { return r.unit() * 0x1p-24f; });
  REQUIRE(name == "flat");
  return numbers(n, 9, [&](Random& r, std::size_t i) {
    if (i % 32 == 0) held = r.unit();
    return held;
  });
}

std::string lower(std::string s) {
  for (char& c : s) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  return s;
}

const WeightTypeInfo* find_type(const std::string& name) {
  for (const WeightTypeInfo& t : kWeightTypes) {
    if (lower(name) == t.name) return &t;
  }
  return nullptr;
}

Bytes quantized(WeightType type, const Floats& x) {
  Bytes out(row_bytes(type, static_cast<long long>(x.size())));
  quantize_row(type, x.data(), out.data(), static_cast<std::int64_t>(x.size()));
  return out;
}

Floats dequantized(WeightType type, const Bytes& b) {
  Floats y(b.size() / static_cast<std::size_t>(info(type).block_bytes) *
           static_cast<std::size_t>(info(type).block_elems));
  dequantize_row(type, b.data(), y.data(), static_cast<std::int64_t>(y.size()));
  return y;
}

template <class Block>
Bytes bytes_of(const std::vector<Block>& blocks) {
  Bytes out(blocks.size() * sizeof(Block));
  std::memcpy(out.data(), blocks.data(), out.size());
  return out;
}

/// By the name that the golden file uses; activation formats too.
Bytes quantized_by_name(const std::string& name, const Floats& x) {
  const auto n = static_cast<std::int64_t>(x.size());
  if (name == "Q8_1") {
    std::vector<BlockQ8_1> b(x.size() / 32);
    quantize_row_q8_1(x.data(), b.data(), n);
    return bytes_of(b);
  }
  if (name == "Q8_K") {
    std::vector<BlockQ8_K> b(x.size() / 256);
    quantize_row_q8_k(x.data(), b.data(), n);
    return bytes_of(b);
  }
  if (name == "IQ4_NL_REF") {
    std::vector<BlockIQ4_NL> b(x.size() / 32);
    quantize_row_iq4_nl(x.data(), b.data(), n, -1);
    return bytes_of(b);
  }
  const WeightTypeInfo* t = find_type(name);
  REQUIRE_MESSAGE(t != nullptr, "unknown type in the golden file: " << name);
  return quantized(t->type, x);
}

/// Values by the formulas of Q8_1 and Q8_K, of the others by dequantize_row.
Floats dequantized_by_name(const std::string& name, const Bytes& bytes) {
  if (name != "Q8_K") return dequantized(find_type(name)->type, bytes);
  Floats y;
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(BlockQ8_K)) {
    BlockQ8_K b;
    std::memcpy(&b, bytes.data() + at, sizeof b);
    for (const std::int8_t q : b.qs) y.push_back(b.d * static_cast<float>(q));
  }
  return y;
}

std::string hex(const Bytes& b) {
  std::string s;
  for (const unsigned char c : b) {
    s += "0123456789abcdef"[c >> 4];
    s += "0123456789abcdef"[c & 15];
  }
  return s;
}

std::string fnv(const Bytes& bytes) {
  std::uint64_t h = 1469598103934665603ull;
  for (const unsigned char c : bytes) h = (h ^ c) * 1099511628211ull;
  Bytes big_endian;
  for (int shift = 56; shift >= 0; shift -= 8) big_endian.push_back(static_cast<unsigned char>(h >> shift));
  return hex(big_endian);
}

/// The words of every line of the golden file that begins with `kind`, without that word.
std::vector<std::vector<std::string>> golden_lines(const std::string& kind) {
  const auto path = std::filesystem::path(__FILE__).parent_path() / "../../data/golden/quants.txt";
  std::ifstream file(path);
  REQUIRE_MESSAGE(file.good(), "cannot open " << path.string());
  std::vector<std::vector<std::string>> lines;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    if (!(words >> word) || word != kind) continue;
    lines.emplace_back();
    while (words >> word) lines.back().push_back(word);
  }
  return lines;
}

// Properties ------------------------------------------------------------------------------------------------

bool has_blocks(WeightType t) { return info(t).block_elems > 1; }

bool has_minimum(WeightType t) {
  return t == WeightType::q4_1 || t == WeightType::q5_1 || t == WeightType::q2_k || t == WeightType::q4_k ||
         t == WeightType::q5_k;
}

/// A block of type T as bytes, zero but for what `edit` sets.
template <class Block, class F>
Floats decoded(F edit) {
  Block b{};
  edit(b);
  Floats y(Block::kElems);
  dequantize_row(Block::kType, &b, y.data(), Block::kElems);
  return y;
}

constexpr F16Bits kOne = 0x3c00;

/// Bits of two arrays of f32, NaNs counted as equal.
std::size_t differing_bits(const Floats& a, const Floats& b) {
  REQUIRE(a.size() == b.size());
  std::size_t n = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const bool both_nan = std::isnan(a[i]) && std::isnan(b[i]);
    n += !both_nan && std::bit_cast<std::uint32_t>(a[i]) != std::bit_cast<std::uint32_t>(b[i]);
  }
  return n;
}

/// Largest |x - y| over a block of the type, divided by the largest |x|.
double worst_error(const Floats& x, const Floats& y) {
  double error = 0.0, extreme = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (!std::isfinite(y[i])) return std::numeric_limits<double>::infinity();
    error = std::max(error, std::fabs(static_cast<double>(x[i]) - static_cast<double>(y[i])));
    extreme = std::max(extreme, std::fabs(static_cast<double>(x[i])));
  }
  return error / extreme;
}

/// What must be thrown and what its message must contain.
template <class F>
void check_refused(F f, const std::string& part) {
  std::string message;
  try {
    f();
  } catch (const std::invalid_argument& e) {
    message = e.what();
  }
  INFO("message: '" << message << "', wanted: '" << part << "'");
  CHECK(message.find(part) != std::string::npos);
}

}  // namespace

TEST_CASE("golden bytes of ggml") {
  const Floats x = golden_input();
  CHECK(x[0] == doctest::Approx(0.0277099609));
  CHECK(x[7] == doctest::Approx(-0.547180176));
  const auto lines = golden_lines("bytes");
  CHECK(lines.size() == 14);
  for (const auto& line : lines) {
    CAPTURE(line[0]);
    REQUIRE(line.size() == 3);
    const Bytes b = quantized_by_name(line[0], x);
    CHECK(std::to_string(b.size()) == line[1]);
    CHECK(hex(b) == line[2]);
  }
}

TEST_CASE("golden hashes, errors and values of ggml") {
  const Floats x = golden_input();
  const auto lines = golden_lines("summary");
  CHECK(lines.size() == 15);
  for (const auto& line : lines) {
    CAPTURE(line[0]);
    REQUIRE(line.size() == 8);
    const Bytes b = quantized_by_name(line[0], x);
    CHECK(std::to_string(b.size()) == line[1]);
    CHECK(fnv(b) == line[2]);
    if (line[3] == "-") continue;
    const Floats y = dequantized_by_name(line[0] == "IQ4_NL_REF" ? "IQ4_NL" : line[0], b);
    double sum = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i)
      sum += (double{x[i]} - double{y[i]}) * (double{x[i]} - double{y[i]});
    // Printed with six or seven digits.
    CHECK(std::sqrt(sum / 256.0) == doctest::Approx(std::stod(line[3])).epsilon(1e-5));
    for (std::size_t i = 0; i < 4 && line[4] != "-"; ++i) {
      CHECK(y[i] == doctest::Approx(std::stod(line[4 + i])).epsilon(1e-6));
      CHECK(std::signbit(y[i]) == (line[4 + i][0] == '-'));
    }
  }
}

TEST_CASE("8192 numbers of each family: the bytes of ggml") {
  const auto lines = golden_lines("family");
  CHECK(lines.size() == 8 * 14);
  std::map<std::string, Floats> inputs;
  for (const auto& line : lines) {
    REQUIRE(line.size() == 3);
    CAPTURE(line[0]);
    CAPTURE(line[1]);
    Floats& x = inputs[line[0]];
    if (x.empty()) x = family(line[0]);
    CHECK(fnv(quantized_by_name(line[1], x)) == line[2]);
  }
}

TEST_CASE("16-bit numbers: every pattern there and back") {
  std::vector<std::uint16_t> finite, all(65536);
  for (unsigned h = 0; h < 65536; ++h) all[h] = static_cast<std::uint16_t>(h);
  for (const WeightType type : {WeightType::f16, WeightType::bf16}) {
    const Floats y = [&] {
      Bytes b(2 * all.size());
      std::memcpy(b.data(), all.data(), b.size());
      return dequantized(type, b);
    }();
    Floats x;
    std::vector<std::uint16_t> expected;
    for (std::size_t h = 0; h < all.size(); ++h) {
      const bool half = type == WeightType::f16;
      const bool number = half ? (h & 0x7c00u) != 0x7c00u : (h & 0x7f80u) != 0x7f80u;
      CHECK_MESSAGE(std::isfinite(y[h]) == number, "pattern " << h);
      if (!number) continue;
      x.push_back(y[h]);
      expected.push_back(all[h]);
    }
    const Bytes b = quantized(type, x);
    CHECK(std::memcmp(b.data(), expected.data(), b.size()) == 0);
  }
  CHECK(dequantized(WeightType::f16, {0x01, 0x00})[0] == 0x1p-24f);
  CHECK(dequantized(WeightType::f16, {0xff, 0x03})[0] == 1023.0f * 0x1p-24f);
  CHECK(dequantized(WeightType::f16, {0xff, 0xfb})[0] == -65504.0f);
  CHECK(dequantized(WeightType::bf16, {0x80, 0x3f})[0] == 1.0f);
}

TEST_CASE("16-bit numbers: round to nearest, ties to even") {
  const auto half = [](float v) { return half_bits_to_float(float_to_half_bits(v)); };
  for (const auto& [from, to] :
       std::map<float, float>{{2049.0f, 2048.0f}, {2051.0f, 2052.0f}, {65519.0f, 65504.0f}}) {
    CHECK(dequantized(WeightType::f16, quantized(WeightType::f16, {from}))[0] == to);
    CHECK(half(from) == to);
  }
  for (const auto& [from, to] : std::map<float, float>{{257.0f, 256.0f}, {259.0f, 260.0f}}) {
    CHECK(dequantized(WeightType::bf16, quantized(WeightType::bf16, {from}))[0] == to);
  }
}

TEST_CASE("layouts: one bit set, one element moves") {
  // For every format: which element each code bit of the block belongs to, and what it is worth. Worked out
  // here from the field descriptions of blocks.hpp, not from the decoder.
  struct Place {
    int element, worth;
  };
  const auto check = [](auto block, std::size_t offset, std::size_t count, auto place) {
    using Block = decltype(block);
    CAPTURE(std::string(info(Block::kType).name));
    Floats base(Block::kElems), y(Block::kElems);
    dequantize_row(Block::kType, &block, base.data(), Block::kElems);
    for (std::size_t bit = 0; bit < 8 * count; ++bit) {
      Block b = block;
      reinterpret_cast<unsigned char*>(&b)[offset + bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
      dequantize_row(Block::kType, &b, y.data(), Block::kElems);
      const Place p = place(static_cast<int>(bit / 8), static_cast<int>(bit % 8));
      for (int i = 0; i < Block::kElems; ++i) {
        const float expected =
            base[static_cast<std::size_t>(i)] + static_cast<float>(i == p.element ? p.worth : 0);
        REQUIRE_MESSAGE(y[static_cast<std::size_t>(i)] == expected, "bit " << bit << ", element " << i);
      }
    }
  };
  const auto nibbles32 = [](int byte, int bit) { return Place{bit < 4 ? byte : byte + 16, 1 << (bit % 4)}; };
  const auto nibbles_k = [](int byte, int bit) {
    return Place{64 * (byte / 32) + byte % 32 + (bit < 4 ? 0 : 32), 1 << (bit % 4)};
  };
  const auto fifth_k = [](int byte, int bit) { return Place{32 * bit + byte, 16}; };
  const auto fifth32 = [](int byte, int bit) { return Place{8 * byte + bit, 16}; };
  const auto two_bits = [](int byte, int bit) {
    return Place{128 * (byte / 32) + 32 * (bit / 2) + byte % 32, 1 << (bit % 2)};
  };

  BlockQ4_0 q4_0{};
  q4_0.d = kOne;
  check(q4_0, 2, 16, nibbles32);
  BlockQ4_1 q4_1{};
  q4_1.d = q4_1.m = kOne;
  check(q4_1, 4, 16, nibbles32);
  BlockQ5_0 q5_0{};
  q5_0.d = kOne;
  check(q5_0, 2, 4, fifth32);
  check(q5_0, 6, 16, nibbles32);
  BlockQ5_1 q5_1{};
  q5_1.d = q5_1.m = kOne;
  check(q5_1, 4, 4, fifth32);
  check(q5_1, 8, 16, nibbles32);
  BlockQ8_0 q8_0{};
  q8_0.d = kOne;
  check(q8_0, 2, 32, [](int byte, int bit) { return Place{byte, bit == 7 ? -128 : 1 << bit}; });

  BlockQ2_K q2_k{};
  q2_k.d = q2_k.dmin = kOne;
  std::fill_n(q2_k.scales, 16, std::uint8_t{0x21});  // scale 1, minimum 2
  check(q2_k, 16, 64, two_bits);
  BlockQ3_K q3_k{};
  q3_k.d = kOne;
  // Sixteen scales of 33 - 32 = 1: low bits 1, high bits 2.
  std::fill_n(q3_k.scales, 8, std::uint8_t{0x11});
  std::fill_n(q3_k.scales + 8, 4, std::uint8_t{0xaa});
  check(q3_k, 32, 64, two_bits);
  check(q3_k, 0, 32, [](int byte, int bit) { return Place{32 * bit + byte, 4}; });
  const auto unit_scales = [](std::uint8_t* s) {  // scales 1, minima 2
    const std::uint8_t bytes[12] = {1, 1, 1, 1, 2, 2, 2, 2, 0x21, 0x21, 0x21, 0x21};
    std::copy_n(bytes, 12, s);
  };
  BlockQ4_K q4_k{};
  q4_k.d = q4_k.dmin = kOne;
  unit_scales(q4_k.scales);
  check(q4_k, 16, 128, nibbles_k);
  BlockQ5_K q5_k{};
  q5_k.d = q5_k.dmin = kOne;
  unit_scales(q5_k.scales);
  check(q5_k, 16, 32, fifth_k);
  check(q5_k, 48, 128, nibbles_k);
  BlockQ6_K q6_k{};
  q6_k.d = kOne;
  std::fill_n(q6_k.scales, 16, std::int8_t{1});
  check(q6_k, 0, 128, [](int byte, int bit) {
    return Place{128 * (byte / 64) + byte % 64 + (bit < 4 ? 0 : 64), 1 << (bit % 4)};
  });
  check(q6_k, 128, 64, [](int byte, int bit) {
    return Place{128 * (byte / 32) + 32 * (bit / 2) + byte % 32, 16 << (bit % 2)};
  });
}

TEST_CASE("IQ4: every place of the table, in every position") {
  const int table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  for (int q = 0; q < 16; ++q) {
    for (int i = 0; i < 256; ++i) {
      const int byte = i % 32 % 16, shift = i % 32 < 16 ? 0 : 4;
      const Floats nl = decoded<BlockIQ4_NL>([&](BlockIQ4_NL& b) {
        b.d = kOne;
        b.qs[byte] = static_cast<std::uint8_t>(q << shift);
      });
      const Floats xs = decoded<BlockIQ4_XS>([&](BlockIQ4_XS& b) {
        b.d = kOne;
        b.scales_h = 0xaaaa;  // scales 33 - 32 = 1
        std::fill_n(b.scales_l, 4, std::uint8_t{0x11});
        b.qs[16 * (i / 32) + byte] = static_cast<std::uint8_t>(q << shift);
      });
      for (int k = 0; k < 256; ++k) {
        REQUIRE(xs[static_cast<std::size_t>(k)] == static_cast<float>(table[k == i ? q : 0]));
        if (k < 32)
          REQUIRE(nl[static_cast<std::size_t>(k)] == static_cast<float>(table[k == i % 32 ? q : 0]));
      }
    }
  }
}

TEST_CASE("six-bit scales: every value in every place") {
  for (int place = 0; place < 16; ++place) {
    for (int v = 0; v < 64; ++v) {
      // Q3_K.
      std::uint8_t s[12] = {};
      s[place % 8] = static_cast<std::uint8_t>((v & 15) << (place < 8 ? 0 : 4));
      s[8 + place % 4] = static_cast<std::uint8_t>((v >> 4) << (2 * (place / 4)));
      for (int j = 0; j < 16; ++j) REQUIRE(q3_k_scale(s, j) == (j == place ? v : 0) - 32);
      // Q4_K and Q5_K: places 0..7 scales, 8..15 minima.
      std::uint8_t k[12] = {};
      const int j = place % 8;
      const bool min = place >= 8;
      if (j < 4) {
        k[j + (min ? 4 : 0)] = static_cast<std::uint8_t>(v);
      } else {
        k[j + 4] = static_cast<std::uint8_t>((v & 15) << (min ? 4 : 0));
        k[min ? j : j - 4] = static_cast<std::uint8_t>((v >> 4) << 6);
      }
      for (int i = 0; i < 8; ++i) {
        const ScaleMin found = scale_min_k4(k, i);
        REQUIRE(found.scale == (i == j && !min ? v : 0));
        REQUIRE(found.min == (i == j && min ? v : 0));
      }
      // IQ4_XS has eight.
      BlockIQ4_XS b{};
      b.scales_l[j / 2] = static_cast<std::uint8_t>((v & 15) << (4 * (j % 2)));
      b.scales_h = static_cast<std::uint16_t>((v >> 4) << (2 * j));
      for (int i = 0; i < 8; ++i) REQUIRE(iq4_xs_scale(b, i) == (i == j ? v : 0) - 32);
    }
  }
}

TEST_CASE("scales and minima reach their own elements") {
  // Codes all 1 (or the table's 1), the scale of sub-block j is j + 1 and its minimum j.
  const auto expect = [](const Floats& y, int sub, auto f) {
    for (std::size_t i = 0; i < y.size(); ++i)
      REQUIRE(y[i] == static_cast<float>(f(static_cast<int>(i) / sub)));
  };
  expect(decoded<BlockQ2_K>([](BlockQ2_K& b) {
           b.d = b.dmin = kOne;
           for (int j = 0; j < 16; ++j) b.scales[j] = static_cast<std::uint8_t>((15 - j) | j << 4);
           std::fill_n(b.qs, 64, std::uint8_t{0x55});
         }),
         16, [](int j) { return 15 - j - j; });
  expect(decoded<BlockQ6_K>([](BlockQ6_K& b) {
           b.d = kOne;
           for (int j = 0; j < 16; ++j) b.scales[j] = static_cast<std::int8_t>(j - 8);
           std::fill_n(b.ql, 128, std::uint8_t{0x11});
           std::fill_n(b.qh, 64, std::uint8_t{0xaa});  // 1 + 2*16 - 32 = 1
         }),
         16, [](int j) { return j - 8; });
  const auto fill = [](std::uint8_t* s) {  // scale j+1, minimum j: all below 16
    for (int j = 0; j < 4; ++j) {
      s[j] = static_cast<std::uint8_t>(j + 1);
      s[j + 4] = static_cast<std::uint8_t>(j);
      s[j + 8] = static_cast<std::uint8_t>((j + 5) | (j + 4) << 4);
    }
  };
  expect(decoded<BlockQ4_K>([&](BlockQ4_K& b) {
           b.d = kOne;
           b.dmin = 0x4000;  // 2
           fill(b.scales);
           std::fill_n(b.qs, 128, std::uint8_t{0x33});
         }),
         32, [](int j) { return 3 * (j + 1) - 2 * j; });
  expect(decoded<BlockQ5_K>([&](BlockQ5_K& b) {
           b.d = kOne;
           b.dmin = 0x4000;
           fill(b.scales);
           std::fill_n(b.qs, 128, std::uint8_t{0x11});
           std::fill_n(b.qh, 32, std::uint8_t{0xff});
         }),
         32, [](int j) { return 17 * (j + 1) - 2 * j; });
}

TEST_CASE("element() and dequantize_row() agree on random blocks") {
  Random r{77};
  for (const WeightTypeInfo& t : kWeightTypes) {
    CAPTURE(std::string(t.name));
    with_block(t.type, [&](auto tag) {
      using Block = typename decltype(tag)::type;
      for (int repeat = 0; repeat < 200; ++repeat) {
        Bytes bytes(sizeof(Block));
        for (unsigned char& c : bytes) c = static_cast<unsigned char>(r.bits() >> 3);
        Block b;
        std::memcpy(&b, bytes.data(), sizeof b);
        Floats one_by_one;
        for (int i = 0; i < Block::kElems; ++i) one_by_one.push_back(element(b, i));
        REQUIRE(differing_bits(one_by_one, dequantized(t.type, bytes)) == 0);
      }
    });
  }
}

TEST_CASE("rows: any alignment, any number of blocks, nothing beyond") {
  for (const WeightTypeInfo& t : kWeightTypes) {
    CAPTURE(std::string(t.name));
    for (const std::int64_t blocks : {0, 1, 2, 3, 4, 5, 7}) {
      const std::int64_t n = blocks * t.block_elems;
      const Floats x =
          numbers(static_cast<std::size_t>(n), 11, [](Random& r, std::size_t) { return r.unit(); });
      const std::size_t bytes = row_bytes(t.type, n);
      Bytes odd(bytes + 3, 0xcd);
      quantize_row(t.type, x.data(), odd.data() + 1, n);
      CHECK(odd[0] == 0xcd);
      CHECK(odd[bytes + 1] == 0xcd);
      // A block does not depend on its neighbours.
      Bytes single;
      for (std::int64_t i = 0; i < n; i += t.block_elems) {
        const Bytes b = quantized(t.type, Floats(x.begin() + i, x.begin() + i + t.block_elems));
        single.insert(single.end(), b.begin(), b.end());
      }
      CHECK(std::equal(single.begin(), single.end(), odd.begin() + 1,
                       odd.begin() + 1 + static_cast<std::ptrdiff_t>(bytes)));
      Floats y(static_cast<std::size_t>(n) + 1, 123.0f);
      dequantize_row(t.type, odd.data() + 1, y.data(), n);
      CHECK(y.back() == 123.0f);
      y.pop_back();
      CHECK(differing_bits(y, dequantized(t.type, single)) == 0);
    }
  }
}

TEST_CASE("what a quantizer made, it makes again from its own values") {
  // True of formats whose codes and scale follow from the extreme alone.
  const Floats x = family("cubed");
  for (const WeightType type : {WeightType::f32, WeightType::f16, WeightType::bf16, WeightType::q8_0}) {
    CAPTURE(std::string(info(type).name));
    const Floats y = dequantized(type, quantized(type, x));
    const Floats again = dequantized(type, quantized(type, y));
    std::size_t far = 0;
    for (std::size_t i = 0; i < y.size(); ++i)
      far += !(std::fabs(again[i] - y[i]) <= std::fabs(y[i]) * 0x1p-10f);
    CHECK(far == 0);
  }
}

TEST_CASE("errors stay below a step of each format") {
  // Half a step in units of the block's largest magnitude, with room for the rounding of scales; the formats
  // of two and three bits trade the extreme for the rest.
  const std::map<std::string, double> bounds = {
      {"f32", 0.0},     {"f16", 0x1p-11}, {"bf16", 0x1p-8}, {"q4_0", 0.126},  {"q4_1", 0.07},
      {"q5_0", 0.0632}, {"q5_1", 0.034},  {"q8_0", 0.0045}, {"q2_k", 0.62},   {"q3_k", 0.27},
      {"q4_k", 0.11},   {"q5_k", 0.06},   {"q6_k", 0.034},  {"iq4_nl", 0.13}, {"iq4_xs", 0.16},
  };
  const Floats x = family("uniform");
  for (const WeightTypeInfo& t : kWeightTypes) {
    CAPTURE(std::string(t.name));
    const double worst = worst_error(x, dequantized(t.type, quantized(t.type, x)));
    CHECK(std::isfinite(worst));
    CHECK(worst <= bounds.at(t.name));
    if (bounds.at(t.name) > 0.0)
      CHECK(worst > bounds.at(t.name) / 8.0);  // a bound that could not fail is none
  }
}

TEST_CASE("all zero") {
  const Floats zeros(256, 0.0f);
  for (const WeightTypeInfo& t : kWeightTypes) {
    CAPTURE(std::string(t.name));
    for (const float y : dequantized(t.type, quantized(t.type, zeros))) REQUIRE(y == 0.0f);
  }
  // ggml divides 0 by -8 and stores a negative zero; code 8 is zero.
  CHECK(hex(quantized(WeightType::q4_0, Floats(32))) == "0080" + std::string(32, '8'));
  CHECK(hex(quantized(WeightType::q5_0, Floats(32))) == "0080ffffffff" + std::string(32, '0'));
  CHECK(hex(quantized(WeightType::iq4_nl, Floats(32))) == "0000" + std::string(32, '8'));
  for (const WeightType type : {WeightType::q4_1, WeightType::q5_1, WeightType::q8_0, WeightType::q2_k,
                                WeightType::q3_k, WeightType::q4_k, WeightType::q5_k, WeightType::q6_k}) {
    const Bytes b = quantized(type, zeros);
    CHECK(std::all_of(b.begin(), b.end(), [](unsigned char c) { return c == 0; }));
  }
}

TEST_CASE("single spike, of either sign, in any place") {
  for (const WeightTypeInfo& t : kWeightTypes) {
    CAPTURE(std::string(t.name));
    const int n = t.block_elems;
    for (int place = 0; place < n; place += std::max(1, n / 19)) {
      for (const float spike : {1.0f, -1.0f, 0.25f}) {
        CAPTURE(place);
        CAPTURE(spike);
        Floats x(static_cast<std::size_t>(n), 0.0f);
        x[static_cast<std::size_t>(place)] = spike;
        const Floats y = dequantized(t.type, quantized(t.type, x));
        for (int i = 0; i < n; ++i) {
          // IQ4 has no zero: its value nearest to it is 1/113 of the spike at most. With a minimum, zero is a
          // difference of two rounded numbers. The others have an exact zero.
          const bool iq4 = t.type == WeightType::iq4_nl || t.type == WeightType::iq4_xs;
          const float zero_error = iq4 ? 0.0098f : has_minimum(t.type) ? 0.001f : 0.0f;
          const float bound = std::fabs(spike) * (i == place ? 0.005f : zero_error);
          const float expected = i == place ? spike : 0.0f;
          REQUIRE_MESSAGE(std::fabs(y[static_cast<std::size_t>(i)] - expected) <= bound, "element " << i);
        }
      }
    }
  }
}

TEST_CASE("all equal, and a negative extreme") {
  for (const WeightTypeInfo& t : kWeightTypes) {
    if (!has_blocks(t.type)) continue;
    CAPTURE(std::string(t.name));
    for (const float v : {1.0f, -1.0f, 0.3f, -7.5f, 0.06f}) {
      CAPTURE(v);
      const Floats x(static_cast<std::size_t>(t.block_elems), v);
      // A positive constant is the largest code times the scale, a negative one the minimum or the extreme:
      // f16 scales (and 6-bit ones that are their own maximum) meet both closely.
      CHECK(worst_error(x, dequantized(t.type, quantized(t.type, x))) <= 0.01);
    }
    Floats x =
        numbers(static_cast<std::size_t>(t.block_elems), 21, [](Random& r, std::size_t) { return r.unit(); });
    for (const std::size_t place : {std::size_t{0}, x.size() / 2, x.size() - 1}) {
      const float before = x[place];
      x[place] = -4.0f;
      const Floats y = dequantized(t.type, quantized(t.type, x));
      CHECK(std::fabs(y[place] + 4.0f) <= (t.type == WeightType::q2_k ? 0.9f : 0.35f));
      x[place] = before;
    }
  }
}

TEST_CASE("subnormal scales and vanishing blocks") {
  for (const WeightTypeInfo& t : kWeightTypes) {
    if (!has_blocks(t.type)) continue;
    CAPTURE(std::string(t.name));
    // Around the smallest f16, 2^-24, and far below it, where scales and even 1/scale leave f32.
    for (const int exponent : {-14, -18, -22, -26, -40, -100, -126, -140, -149}) {
      CAPTURE(exponent);
      const Floats x = numbers(static_cast<std::size_t>(4 * t.block_elems), 31,
                               [&](Random& r, std::size_t) { return std::ldexp(r.unit(), exponent); });
      const Floats y = dequantized(t.type, quantized(t.type, x));
      for (std::size_t i = 0; i < x.size(); ++i) {
        // A scale is off by at most half of 2^-24 and a code (times a sub-scale) is at most 127*32.
        REQUIRE(std::isfinite(y[i]));
        REQUIRE(std::fabs(y[i] - x[i]) <= std::ldexp(1.0f, exponent) * 0.7f + 0x1p-25f * 127.0f * 33.0f);
        if (exponent < -50) REQUIRE(y[i] == 0.0f);
      }
    }
  }
}

TEST_CASE("blocks beyond f16 are refused, with their place") {
  for (const WeightTypeInfo& t : kWeightTypes) {
    CAPTURE(std::string(t.name));
    if (t.type == WeightType::f32) continue;
    Floats x(static_cast<std::size_t>(3 * t.block_elems), 1.0f);
    for (const float big : {3e38f, -3e38f}) {
      x[static_cast<std::size_t>(2 * t.block_elems - 1)] = big;
      if (t.type == WeightType::bf16) continue;
      Bytes out(row_bytes(t.type, static_cast<long long>(x.size())), 0xcd);
      const std::string first = "element " + std::to_string(t.type == WeightType::f16 ? 1 : t.block_elems);
      check_refused([&] { quantize_row(t.type, x.data(), out.data(), static_cast<std::int64_t>(x.size())); },
                    first);
    }
  }
  // 127 * 65504 is the last amax that Q8_0 can hold, and a little more rounds down to it.
  Floats x(32, 0.0f);
  x[3] = 127.0f * 65504.0f;
  CHECK(dequantized(WeightType::q8_0, quantized(WeightType::q8_0, x))[3] == x[3]);
  x[3] = 127.0f * 65520.0f;
  check_refused([&] { (void)quantized(WeightType::q8_0, x); }, "exceeds the largest f16, 65504");
  // Q4_1 and the K formats with a minimum: the minimum can overflow where the scale does not.
  std::fill(x.begin(), x.end(), -70000.0f);
  check_refused([&] { (void)quantized(WeightType::q4_1, x); }, "scale or minimum exceeds");
  // Activations: the sum overflows first.
  std::fill(x.begin(), x.end(), 3000.0f);
  std::vector<BlockQ8_1> q8_1(1);
  check_refused([&] { quantize_row_q8_1(x.data(), q8_1.data(), 32); }, "exceeds the largest f16");
  // 16-bit numbers.
  check_refused([] { (void)quantized(WeightType::f16, {0.0f, 65520.0f}); }, "element 1 is 65520, beyond");
  check_refused([] { (void)quantized(WeightType::bf16, {std::numeric_limits<float>::max()}); },
                "element 0 is 3.40282e+38");
}

TEST_CASE("what is no number is refused, with its place") {
  for (const WeightTypeInfo& t : kWeightTypes) {
    CAPTURE(std::string(t.name));
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity()}) {
      for (const int place : {0, t.block_elems, 2 * t.block_elems - 1}) {
        Floats x(static_cast<std::size_t>(2 * t.block_elems), 0.5f);
        x[static_cast<std::size_t>(place)] = bad;
        check_refused([&] { (void)quantized(t.type, x); },
                      "quantize " + std::string(t.name) + ": element " + std::to_string(place) + " is ");
      }
    }
  }
}

TEST_CASE("lengths that are no whole blocks are refused") {
  Floats x(512, 0.5f);
  Bytes b(4096);
  for (const WeightTypeInfo& t : kWeightTypes) {
    CAPTURE(std::string(t.name));
    for (const std::int64_t n :
         {std::int64_t{-1}, std::int64_t{-256}, std::int64_t{t.block_elems + 1}, std::int64_t{17}}) {
      if (n > 0 && !has_blocks(t.type)) continue;
      const std::string part = "multiple of " + std::to_string(t.block_elems) + ", not " + std::to_string(n);
      check_refused([&] { quantize_row(t.type, x.data(), b.data(), n); }, part);
      check_refused([&] { dequantize_row(t.type, b.data(), x.data(), n); }, part);
    }
  }
  check_refused([&] { quantize_row(static_cast<WeightType>(99), x.data(), b.data(), 32); },
                "unknown weight type number 99");
  check_refused([&] { dequantize_row(static_cast<WeightType>(99), b.data(), x.data(), 32); },
                "unknown weight type");
}
