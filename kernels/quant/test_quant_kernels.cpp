// The decoding kernels on whatever device this build has, against the host's decoder bit for bit: random
// blocks, every f16 scale, and the launchers' refusals. On the emulator buffers have the exact size, so that
// an access beyond them is an error; on a GPU the outputs have guard bands.
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... -x cu kernels/quant/test_quant_kernels.cpp
//        kernels/quant/dequantize.cpp -o quant_kernels
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "harness/device/device.hpp"
#include "harness/device/doctest_main.hpp"
#include "harness/device/half_bits.hpp"
#include "kernels/quant/decode.hpp"
#include "kernels/quant/dequantize.cuh"
#include "kernels/quant/dequantize.hpp"

using namespace ladder;

namespace {

constexpr bool kOnEmulator = kDeviceExecutor == Executor::emulator;
constexpr std::size_t kGuard = kOnEmulator ? 0 : 256;  // elements before and after an output

Stream& stream() {
  static Stream s;
  return s;
}

struct Random {
  std::uint32_t state;
  std::uint32_t next() { return (state = state * 1664525u + 1013904223u) >> 8; }
};

std::vector<unsigned char> random_bytes(std::size_t n, std::uint32_t seed) {
  Random r{seed};
  std::vector<unsigned char> b(n);
  for (unsigned char& c : b) c = static_cast<unsigned char>(r.next());
  return b;
}

/// An output, poisoned.
template <class T>
class Output {
 public:
  explicit Output(std::size_t n) : n_(n), buffer_(n + 2 * kGuard, "out") { buffer_.fill_bytes(0xff); }
  T* data() { return buffer_.data() + kGuard; }
  /// What was written; the guard bands must still be poison.
  std::vector<T> get() {
    std::vector<T> all(buffer_.size());
    stream().synchronize();
    buffer_.download(all);
    const std::vector<unsigned char> poison(kGuard * sizeof(T), 0xff);
    const bool before = std::memcmp(all.data(), poison.data(), poison.size()) == 0;
    const bool after = std::memcmp(all.data() + kGuard + n_, poison.data(), poison.size()) == 0;
    CHECK(before);
    CHECK(after);
    return {all.begin() + kGuard, all.begin() + static_cast<std::ptrdiff_t>(kGuard + n_)};
  }

 private:
  std::size_t n_;
  Buffer<T> buffer_;
};

template <class T>
Buffer<T> on_device(const std::vector<T>& v, const char* name) {
  Buffer<T> b(v.size(), name);
  b.upload(v);
  return b;
}

void require_ok(const Status& s) {
  INFO(s.message());
  REQUIRE(s.ok());
}

std::vector<float> host_values(WeightType type, const std::vector<unsigned char>& packed) {
  std::vector<float> y(packed.size() / static_cast<std::size_t>(info(type).block_bytes) *
                       static_cast<std::size_t>(info(type).block_elems));
  dequantize_row(type, packed.data(), y.data(), static_cast<std::int64_t>(y.size()));
  return y;
}

/// Elements whose bits differ; two NaNs are equal.
std::size_t differing(const std::vector<float>& got, const std::vector<float>& want) {
  REQUIRE(got.size() == want.size());
  std::size_t n = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool both_nan = std::isnan(got[i]) && std::isnan(want[i]);
    n += !both_nan && std::bit_cast<std::uint32_t>(got[i]) != std::bit_cast<std::uint32_t>(want[i]);
  }
  return n;
}

std::vector<float> as_floats(const std::vector<__half>& v) {
  std::vector<float> y;
  y.reserve(v.size());
  for (const __half h : v) y.push_back(half_bits_to_float(__half_as_ushort(h)));
  return y;
}

void check_both_outputs(WeightType type, const std::vector<unsigned char>& packed) {
  const std::vector<float> want = host_values(type, packed);
  const auto n = static_cast<long long>(want.size());
  const Buffer<unsigned char> on = on_device(packed, "packed");

  Output<float> f32(want.size());
  require_ok(launch_dequantize(type, on.data(), f32.data(), n, stream()));
  CHECK(differing(f32.get(), want) == 0);

  Output<__half> f16(want.size());
  require_ok(launch_dequantize(type, on.data(), f16.data(), n, stream()));
  std::vector<float> rounded;
  rounded.reserve(want.size());
  for (const float v : want) rounded.push_back(half_bits_to_float(float_to_half_bits(v)));
  CHECK(differing(as_floats(f16.get()), rounded) == 0);
}

}  // namespace

TEST_CASE("random blocks of every type, in several numbers") {
#if !defined(__CUDACC__)
  const emu::counting on;
#endif
  for (const WeightTypeInfo& t : kWeightTypes) {
    CAPTURE(std::string(t.name));
    for (const int blocks : {1, 2, 3, 7, 8, 9, 33, 257}) {
      CAPTURE(blocks);
      check_both_outputs(
          t.type, random_bytes(static_cast<std::size_t>(blocks) * static_cast<std::size_t>(t.block_bytes),
                               static_cast<std::uint32_t>(blocks)));
    }
  }
}

TEST_CASE("every 16-bit pattern as number, scale and minimum") {
  for (const WeightTypeInfo& t : kWeightTypes) {
    CAPTURE(std::string(t.name));
    with_block(t.type, [&](auto tag) {
      using Block = typename decltype(tag)::type;
      if constexpr (Block::kType != WeightType::f32) {
        // All patterns of the conversion itself; as scales all of them where the device is fast, else every
        // 61st.
        constexpr std::size_t kStep = kOnEmulator && Block::kElems > 1 ? 61 : 1;
        std::vector<unsigned char> packed = random_bytes((65535 / kStep + 1) * sizeof(Block), 5);
        std::size_t at = 0;
        for (std::size_t pattern = 0; pattern < 65536; pattern += kStep, at += sizeof(Block)) {
          Block b;
          std::memcpy(&b, packed.data() + at, sizeof b);
          const auto bits = static_cast<F16Bits>(pattern);
          if constexpr (requires { b.d; }) b.d = bits;
          if constexpr (requires { b.value; }) b.value = bits;
          if constexpr (requires { b.m; })
            b.m = static_cast<F16Bits>(bits * 40503u);  // odd: every pattern again
          if constexpr (requires { b.dmin; }) b.dmin = static_cast<F16Bits>(bits * 40503u);
          std::memcpy(packed.data() + at, &b, sizeof b);
        }
        check_both_outputs(t.type, packed);
      }
    });
  }
}

TEST_CASE("embedding: rows of every type, repeated, in any order, and no row where there is no token") {
  for (const WeightTypeInfo& t : kWeightTypes) {
    CAPTURE(std::string(t.name));
    constexpr long long kVocabulary = 11;
    for (const long long id : {static_cast<long long>(t.block_elems), 3LL * t.block_elems, 512LL}) {
      CAPTURE(id);
      const std::vector<unsigned char> table =
          random_bytes(static_cast<std::size_t>(kVocabulary) * row_bytes(t.type, id), 9);
      const std::vector<float> values = host_values(t.type, table);
      const Buffer<unsigned char> packed = on_device(table, "table");
      for (const std::vector<int>& tokens :
           std::vector<std::vector<int>>{{10},
                                         {0, 10, 0},
                                         {5, -1, 4, 11, 3, 2147483647, -2147483647, 9},
                                         {1, 2, 3, 4, 5, 6, 7, 8, 9}}) {
        const Buffer<int> at = on_device(tokens, "tokens");
        Output<float> out(tokens.size() * static_cast<std::size_t>(id));
        require_ok(launch_embedding_rows(t.type, packed.data(), at.data(), out.data(),
                                         static_cast<long long>(tokens.size()), id, kVocabulary, stream()));
        std::vector<float> want;
        for (const int token : tokens) {
          for (long long i = 0; i < id; ++i) {
            const bool exists = token >= 0 && token < kVocabulary;
            want.push_back(exists ? values[static_cast<std::size_t>(token * id + i)]
                                  : std::numeric_limits<float>::quiet_NaN());
          }
        }
        CHECK(differing(out.get(), want) == 0);
      }
    }
  }
}

TEST_CASE("what the launchers refuse") {
  const Buffer<unsigned char> packed(4096, "packed");
  const Buffer<int> tokens(4, "tokens");
  Buffer<float> out(4096, "out");
  const auto refused = [](const Status& s, const std::string& part) {
    INFO("message: '" << s.message() << "', wanted: '" << part << "'");
    CHECK(s.message().find(part) != std::string::npos);
  };
  refused(launch_dequantize(WeightType::q4_k, packed.data(), out.data(), 128, stream()),
          "dequantize_f32 (q4_k): the number of elements must be a positive multiple of 256, not 128");
  refused(
      launch_dequantize(WeightType::q4_0, packed.data(), reinterpret_cast<__half*>(out.data()), 33, stream()),
      "dequantize_f16 (q4_0): the number of elements must be a positive multiple of 32, not 33");
  refused(launch_dequantize(WeightType::f16, packed.data(), out.data(), 0, stream()),
          "positive multiple of 1, not 0");
  refused(launch_dequantize(WeightType::q4_0, packed.data(), out.data(), -32, stream()), "not -32");
  refused(launch_dequantize(WeightType::q4_0, packed.data(), out.data() + 1, 32, stream()),
          "a multiple of 16 bytes");
  refused(launch_dequantize(WeightType::q4_0, packed.data() + 1, out.data(), 32, stream()),
          "a multiple of 2 bytes");
  refused(launch_dequantize(static_cast<WeightType>(99), packed.data(), out.data(), 32, stream()),
          "unknown weight type");
  refused(launch_dequantize(WeightType::f16, packed.data(), out.data(), 1LL << 50, stream()),
          "at most 549755813632");
  refused(
      launch_embedding_rows(WeightType::q8_0, packed.data(), tokens.data(), out.data(), 1, 40, 5, stream()),
      "embedding_rows (q8_0): the number of elements of a row must be a positive multiple of 32, not 40");
  refused(
      launch_embedding_rows(WeightType::q8_0, packed.data(), tokens.data(), out.data(), 0, 32, 5, stream()),
      "nt and vocabulary must be at least 1");
  refused(
      launch_embedding_rows(WeightType::q8_0, packed.data(), tokens.data(), out.data(), 1, 32, 0, stream()),
      "nt and vocabulary must be at least 1");
}
