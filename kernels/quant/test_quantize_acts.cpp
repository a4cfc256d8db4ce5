// Activations to int8 on whatever device this build has, against the host's quantizer bit for bit; the host's
// against numbers worked out by hand, float64, and ggml's quantizer, which rounds halves the other way.
// Broken quantizers must be told from right ones. What only the emulator knows (sectors, bank passes) is
// tested on it alone.
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... -x cu kernels/quant/test_quantize_acts.cpp
//        kernels/quant/{dequantize,quantize,quantize_acts}.cpp -o quantize_acts
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "harness/device/device.hpp"
#include "harness/device/doctest_main.hpp"
#include "harness/device/half_bits.hpp"
#include "kernels/device/ldmatrix.cuh"
#include "kernels/quant/quantize.hpp"
#include "kernels/quant/quantize_acts.cuh"
#include "kernels/quant/quantize_acts.hpp"

using namespace ladder;

namespace {

constexpr bool kOnEmulator = kDeviceExecutor == Executor::emulator;
constexpr std::size_t kGuard = kOnEmulator ? 0 : 1024;  // bytes before and after an output
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kBlock = kQ8ActsPerBlock;

Stream& stream() {
  static Stream s;
  return s;
}

struct Random {
  std::uint32_t state;
  std::uint32_t next() { return (state = state * 1664525u + 1013904223u) >> 8; }
  float real() { return static_cast<float>(next()) / (1 << 23) - 1.0f; }  // -1..1
};

/// An output of n elements, poisoned, with guard bands on a GPU.
template <class T>
class Output {
 public:
  explicit Output(std::size_t n) : n_(n), buffer_(n * sizeof(T) + 2 * kGuard, "out") {
    buffer_.fill_bytes(0xff);
  }
  T* data() { return reinterpret_cast<T*>(buffer_.data() + kGuard); }
  /// What was written; the guard bands must still be poison.
  std::vector<T> get() {
    std::vector<unsigned char> all(buffer_.size());
    stream().synchronize();
    buffer_.download(all);
    const auto is_poison = [](unsigned char c) { return c == 0xff; };
    const auto guard = static_cast<std::ptrdiff_t>(kGuard);
    CHECK(std::all_of(all.begin(), all.begin() + guard, is_poison));
    CHECK(std::all_of(all.end() - guard, all.end(), is_poison));
    std::vector<T> out(n_);
    std::memcpy(static_cast<void*>(out.data()), all.data() + kGuard, n_ * sizeof(T));
    return out;
  }

 private:
  std::size_t n_;
  Buffer<unsigned char> buffer_;
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

/// Elements whose bytes differ.
template <class T>
std::size_t differing(const std::vector<T>& got, const std::vector<T>& want) {
  REQUIRE(got.size() == want.size());
  std::size_t n = 0;
  for (std::size_t i = 0; i < got.size(); ++i) n += std::memcmp(&got[i], &want[i], sizeof(T)) != 0;
  return n;
}

// Inputs ----------------------------------------------------------------------------------------------------

enum Kind {
  plain,         // random, up to 4
  ties,          // d a power of two, x * inverse half an odd number
  zeros,         // of both signs
  outlier,       // one of 3000
  large,         // one of +-100000
  one,           // a single number
  small_scale,   // d is a subnormal f16
  no_scale,      // d is 0 as f16, the codes are not
  subnormal,     // d has no inverse
  least,         // about the least block that has one
  f16_limit,     // about the largest d of f16
  beyond_f16,    // d is infinite as f16
  largest,       // the largest floats
  nan,           // a NaN among numbers
  infinite,      // an infinity
  all_infinite,  // nothing else
  kKinds
};

void fill(float* x, int kind, Random& r) {
  const auto scaled = [&](float by) {
    for (int i = 0; i < kBlock; ++i) x[i] = r.real() * by;
  };
  float& chosen = x[r.next() % kBlock];
  const float sign = r.next() % 2 != 0 ? -1.0f : 1.0f;
  switch (kind) {
    case ties: {
      const float d = std::ldexp(1.0f, static_cast<int>(r.next() % 21) - 10);
      for (int i = 0; i < kBlock; ++i) {
        const int odd = 2 * static_cast<int>(r.next() % 253) - 253 + 2 * (i % 2);  // -253..253
        x[i] = static_cast<float>(odd) / 2 * d;
      }
      chosen = sign * 127.0f * d;
      break;
    }
    case zeros:
      for (int i = 0; i < kBlock; ++i) x[i] = r.next() % 2 != 0 ? -0.0f : 0.0f;
      break;
    case outlier:
      scaled(2.0f);
      chosen = sign * 3000.0f;
      break;
    case large:
      scaled(100.0f);
      chosen = sign * 1e5f;
      break;
    case one:
      scaled(0.0f);
      chosen = r.real();
      break;
    case small_scale:
      scaled(127 * 0x1p-17f);
      break;
    case no_scale:
      scaled(127 * 0x1p-26f);
      break;
    case subnormal:
      scaled(0x1p-127f);
      break;
    case least:
      scaled(127 * 0x1p-130f);
      chosen = sign * 127 * 0x1p-128f * (1.0f + static_cast<float>(r.next() % 5) * 0x1p-22f);
      break;
    case f16_limit:
      scaled(1e6f);
      chosen = sign * (8321040.0f - static_cast<float>(r.next() % 3));
      break;
    case beyond_f16:
      scaled(1e9f);
      break;
    case largest:
      scaled(std::numeric_limits<float>::max());
      chosen = sign * std::numeric_limits<float>::max();
      break;
    case nan:
      scaled(1.0f);
      chosen = std::copysign(kNan, sign);
      break;
    case infinite:
      scaled(1.0f);
      chosen = sign * kInfinity;
      break;
    case all_infinite:
      for (int i = 0; i < kBlock; ++i) x[i] = sign * kInfinity;
      break;
    default:
      scaled(4.0f);
  }
}

/// Blocks of all kinds, in an order without a period that a mapping could have.
std::vector<float> all_kinds(long long nt, long long id, std::uint32_t seed) {
  std::vector<float> x(static_cast<std::size_t>(nt * id));
  Random r{seed};
  int block = 0;
  for (std::size_t i = 0; i < x.size(); i += kBlock, ++block)
    fill(x.data() + i, block < kKinds ? block : static_cast<int>(r.next() % kKinds), r);
  return x;
}

std::vector<float> of_kind(int kind, int blocks, std::uint32_t seed) {
  std::vector<float> x(static_cast<std::size_t>(blocks) * kBlock);
  Random r{seed};
  for (std::size_t i = 0; i < x.size(); i += kBlock) fill(x.data() + i, kind, r);
  return x;
}

std::vector<BlockQ8Pad40> host_pad40(const std::vector<float>& x) {
  std::vector<BlockQ8Pad40> b(x.size() / kBlock);
  quantize_q8_pad40_row(x, b.data());
  return b;
}

std::vector<BlockQ8_0> host_q8_0(const std::vector<float>& x) {
  std::vector<BlockQ8_0> b(x.size() / kBlock);
  quantize_q8_0_acts_row(x, b.data());
  return b;
}

struct Planes {
  std::vector<std::int8_t> codes;
  std::vector<std::uint32_t> scales;
};

Planes host_planes(const std::vector<BlockQ8Pad40>& blocks, long long nt, long long id) {
  const Q8ActsPlanes p = q8_acts_planes(nt, id);
  Planes planes{std::vector<std::int8_t>(p.codes, 1), std::vector<std::uint32_t>(p.scales, 1)};
  pack_q8_pad40_t(blocks.data(), nt, id, planes.codes.data(), planes.scales.data());
  return planes;
}

}  // namespace

// The host's quantizer --------------------------------------------------------------------------------------

TEST_CASE("a block by hand: d = 1/4, halves go to the even code") {
  std::vector<float> x(kBlock, 0.0f);
  const std::array<float, 14> quarters = {127,   -127,   0.5f,   1.5f,  2.5f,  -0.5f,  -1.5f,
                                          -2.5f, 126.5f, 125.5f, 0.49f, 0.51f, -3.49f, -3.51f};
  const std::array<int, 14> codes = {127, -127, 0, 2, 2, 0, -2, -2, 126, 126, 0, 1, -3, -4};
  for (std::size_t i = 0; i < quarters.size(); ++i) x[2 * i + 1] = quarters[i] / 4;
  const BlockQ8Pad40 b = host_pad40(x)[0];
  CHECK(b.d == 0x3400);  // 2^-2
  CHECK(b.pad == 0);
  for (std::size_t i = 0; i < kBlock; ++i)
    CHECK(b.q[i] == (i % 2 == 1 && i / 2 < codes.size() ? codes[i / 2] : 0));
  CHECK(b.sum == 246);
  CHECK(sizeof b == 40);
  CHECK(std::memcmp(&b, "\x00\x34\x00\x00\x00\x7f\x00\x81", 8) == 0);  // d, pad, q[0..3]

  const BlockQ8_0 plain_block = host_q8_0(x)[0];
  CHECK(plain_block.d == b.d);
  CHECK(std::memcmp(plain_block.qs, b.q, kBlock) == 0);
}

TEST_CASE("the rule against float64: nearest codes, and errors within the stated bound") {
  for (const int kind : {plain, ties, outlier, large, one, small_scale, no_scale, f16_limit}) {
    CAPTURE(kind);
    const std::vector<float> x = of_kind(kind, 200, 3);
    const std::vector<BlockQ8Pad40> blocks = host_pad40(x);
    std::vector<float> back(x.size());
    dequantize_q8_pad40_row(blocks, back.data());
    std::size_t wrong_codes = 0, wrong_values = 0, wrong_sums = 0;
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      double amax = 0;
      int sum = 0;
      for (std::size_t i = 0; i < kBlock; ++i) amax = std::max(amax, std::abs(double{x[b * kBlock + i]}));
      const double d = amax / 127;
      for (std::size_t i = 0; i < kBlock; ++i) {
        const double v = x[b * kBlock + i], q = blocks[b].q[i];
        sum += blocks[b].q[i];
        wrong_codes += !(std::abs(q) <= 127 && std::abs(v - d * q) <= d / 2 * (1 + 0x1p-13));
        const bool finite = half_bits_to_float(blocks[b].d) < kInfinity;
        const double bound = d / 2 * (1 + 0x1p-13) + std::abs(q) * std::max(d * 0x1p-11, 0x1p-25);
        wrong_values += finite && !(std::abs(v - back[b * kBlock + i]) <= bound);
      }
      wrong_sums += blocks[b].sum != sum;
    }
    CHECK(wrong_codes == 0);
    CHECK(wrong_values == 0);
    CHECK(wrong_sums == 0);
  }
}

TEST_CASE("where numbers end: what is stored, and what becomes of it") {
  const auto block = [](float largest) {
    std::vector<float> x(kBlock, 0.0f);
    x[7] = largest;
    x[8] = 1.0f;
    return host_pad40(x)[0];
  };
  const auto lone = [](float largest) {
    std::vector<float> x(kBlock, 0.0f);
    x[7] = largest;
    return host_pad40(x)[0];
  };
  const auto is_empty = [](const BlockQ8Pad40& b) {
    return b.pad == 0 && b.sum == 0 && std::all_of(b.q, b.q + kBlock, [](int q) { return q == 0; });
  };
  for (const float v : {kInfinity, -kInfinity, kNan, -kNan}) {
    const BlockQ8Pad40 b = block(v);
    CHECK(b.d == 0x7fff);
    CHECK(is_empty(b));
    std::vector<float> back(kBlock);
    dequantize_q8_pad40_row({&b, 1}, back.data());
    CHECK(std::all_of(back.begin(), back.end(), [](float y) { return std::isnan(y); }));
  }
  // f16 ends: 65504 is its largest number, 65520 the first that rounds to infinity.
  CHECK(lone(8321040.0f).d == 0x7c00);
  CHECK(lone(8321040.0f).q[7] == 127);
  CHECK(lone(8321039.0f).d == 0x7bff);
  CHECK(lone(-1e5f).d == float_to_half_bits(1e5f / 127));
  CHECK(lone(-1e5f).q[7] == -127);
  // Below 2^-25 as f16 there is nothing, and the codes are there all the same.
  CHECK(lone(127 * 0x1p-25f).d == 0);
  CHECK(lone(127 * 0x1p-25f).q[7] == 127);
  CHECK(lone(127 * 0x1.004p-25f).d == 1);
  // Of 2^-128 there is no inverse.
  CHECK(is_empty(lone(127 * 0x1p-128f)));
  CHECK(lone(127 * 0x1p-128f).d == 0);
  CHECK(lone(127 * 0x1.00001p-128f).q[7] == 127);
  CHECK(lone(0x1p-149f).d == 0);
  CHECK(is_empty(lone(0x1p-149f)));
  CHECK(is_empty(lone(0.0f)));
  CHECK(lone(-0.0f).d == 0);
}

TEST_CASE("no whole blocks are refused") {
  const std::vector<float> x(40);
  std::vector<BlockQ8Pad40> pad40(4);
  std::vector<BlockQ8_0> q8_0(4);
  CHECK_THROWS_WITH_AS(quantize_q8_pad40_row(x, pad40.data()),
                       "activations are quantized in blocks: their number must be a multiple of 32, not 40",
                       std::invalid_argument);
  CHECK_THROWS_AS(quantize_q8_0_acts_row(x, q8_0.data()), std::invalid_argument);
  std::vector<std::int8_t> codes(4096);
  std::vector<std::uint32_t> scales(128);
  CHECK_THROWS_WITH_AS(pack_q8_pad40_t(pad40.data(), 0, 32, codes.data(), scales.data()),
                       "nt must be at least 1, not 0", std::invalid_argument);
  CHECK_THROWS_WITH_AS(unpack_q8_pad40_t(codes.data(), scales.data(), 1, 48, pad40.data()),
                       "id must be a positive multiple of 32, not 48", std::invalid_argument);
}

TEST_CASE("ggml rounds halves away from zero: other codes at exact ties, and nowhere else") {
  for (const int kind : {plain, ties, outlier, large, one, small_scale, no_scale}) {
    CAPTURE(kind);
    const std::vector<float> x = of_kind(kind, 2000, 17);
    const std::vector<BlockQ8_0> even = host_q8_0(x);
    std::vector<BlockQ8_0> away(even.size());
    quantize_row(WeightType::q8_0, x.data(), away.data(), static_cast<std::int64_t>(x.size()));
    std::size_t tied = 0, differ = 0, unexplained = 0, scales = 0;
    for (std::size_t b = 0; b < even.size(); ++b) {
      scales += even[b].d != away[b].d;
      float amax = 0;
      for (std::size_t i = 0; i < kBlock; ++i) amax = std::max(amax, std::abs(x[b * kBlock + i]));
      const float inverse = 1.0f / (amax / 127.0f);
      for (std::size_t i = 0; i < kBlock; ++i) {
        const float v = x[b * kBlock + i] * inverse;
        const bool tie = std::abs(v - std::trunc(v)) == 0.5f;
        const int e = even[b].qs[i], a = away[b].qs[i];
        tied += tie;
        differ += e != a;
        // At a tie the even one of the two neighbours and the one away from zero; elsewhere the same.
        unexplained += tie ? e % 2 != 0 || std::abs(a) < std::abs(e) || std::abs(e - a) > 1 : e != a;
      }
    }
    CHECK(scales == 0);
    CHECK(unexplained == 0);
    if (kind == ties) {
      CHECK(tied >= 2000 * 31);  // all but the largest of each block
      CHECK(differ > tied * 2 / 5);
      CHECK(differ < tied * 3 / 5);  // half of the integers are even
    } else {
      CHECK(tied < x.size() / 1000);
    }
  }
}

// The planes ------------------------------------------------------------------------------------------------

TEST_CASE("a tile of the planes: every byte once, and what a warp fetches") {
  std::vector<int> seen(kQ8ActsTileBytes, 0), seen_scale(kQ8ActsTileTokens, 0);
  for (int token = 0; token < kQ8ActsTileTokens; ++token) {
    for (int word = 0; word < 8; ++word) ++seen[static_cast<std::size_t>(q8_acts_code_byte(token, word))];
    ++seen_scale[static_cast<std::size_t>(q8_acts_scale_word(token))];
    for (int word = 0; word < 8; ++word) {
      // The formula of the layout, in its own words.
      const int r = token, w = word;
      const int byte = (r & ~3) * 32 + ((((r & 3) * 2 + (w >> 2)) ^ ((r >> 2) & 7)) << 4) + (w & 3) * 4;
      CHECK(q8_acts_code_byte(token, word) == byte);
    }
  }
  for (std::size_t i = 0; i < seen.size(); ++i) CHECK(seen[i] == (i % 4 == 0 ? 1 : 0));
  for (const int n : seen_scale) CHECK(n == 1);
  for (int group = 0; group < 4; ++group) {
    for (int l = 0; l < 32; ++l) {
      // Lanes 8m..8m+7 give the rows of matrix m: tokens 0..7 and 8..15 of words 0..3, then of words 4..7.
      const int token = group * 16 + l % 16, g = group;
      CHECK(q8_acts_ldmatrix_byte(group, l) == q8_acts_code_byte(token, l / 16 * 4));
      CHECK(q8_acts_ldmatrix_byte(group, l) ==
            g * 512 + (l & 12) * 32 + ((((l & 3) * 2 + (l >> 4)) ^ ((l >> 2) & 3) ^ ((g & 1) * 4)) << 4));
      // One load of four words brings the scales of rows l / 4 and l / 4 + 8 of two groups.
      const int first = group / 2 * 32 + l / 4 * 4, row = group * 16 + l / 4;
      CHECK(q8_acts_scale_word(row) == first + group % 2 * 2);
      CHECK(q8_acts_scale_word(row + 8) == first + group % 2 * 2 + 1);
    }
  }
}

TEST_CASE("packing into planes and back") {
  for (const long long nt : {1, 2, 63, 64, 65, 130}) {
    for (const long long id : {32LL, 96LL}) {
      CAPTURE(nt);
      CAPTURE(id);
      const std::vector<BlockQ8Pad40> blocks = host_pad40(all_kinds(nt, id, 23));
      const Planes planes = host_planes(blocks, nt, id);
      CHECK(planes.codes.size() == static_cast<std::size_t>((nt + 63) / 64 * 64 * id));
      CHECK(planes.scales.size() == planes.codes.size() / 32);
      std::vector<BlockQ8Pad40> back(blocks.size());
      std::memset(static_cast<void*>(back.data()), 0xff, back.size() * sizeof back[0]);
      unpack_q8_pad40_t(planes.codes.data(), planes.scales.data(), nt, id, back.data());
      CHECK(differing(back, blocks) == 0);
    }
  }
}

// The kernels -----------------------------------------------------------------------------------------------

namespace {

void check_kernels(long long nt, long long id) {
  const std::vector<float> x = all_kinds(nt, id, static_cast<std::uint32_t>(nt * 1000 + id));
  const std::vector<BlockQ8Pad40> want = host_pad40(x);
  const Buffer<float> acts = on_device(x, "acts");
  {
    Output<BlockQ8Pad40> out(want.size());
    require_ok(launch_quantize_q8_pad40_plain(acts.data(), out.data(), nt, id, stream()));
    CHECK(differing(out.get(), want) == 0);
  }
  {
    Output<BlockQ8Pad40> out(want.size());
    require_ok(launch_quantize_q8_pad40(acts.data(), out.data(), nt, id, stream()));
    CHECK(differing(out.get(), want) == 0);
  }
  {
    Output<BlockQ8_0> out(want.size());
    require_ok(launch_quantize_q8_0(acts.data(), out.data(), nt, id, stream()));
    CHECK(differing(out.get(), host_q8_0(x)) == 0);
  }
  const Planes planes = host_planes(want, nt, id);
  Output<std::int8_t> codes(planes.codes.size());
  Output<std::uint32_t> scales(planes.scales.size());
  require_ok(launch_quantize_q8_pad40_t(acts.data(), codes.data(), scales.data(), nt, id, stream()));
  CHECK(differing(codes.get(), planes.codes) == 0);
  CHECK(differing(scales.get(), planes.scales) == 0);
}

}  // namespace

TEST_CASE("bits of the host, for every kind of block and ragged shapes") {
#if !defined(__CUDACC__)
  const emu::counting on;  // with all checks
#endif
  for (const long long nt : {1, 2, 7, 8, 9, 63, 64, 65}) {
    for (const long long id : {32LL, 96LL, 896LL, 4864LL}) {
      CAPTURE(nt);
      CAPTURE(id);
      check_kernels(nt, id);
    }
  }
  check_kernels(9, 18944);
}

TEST_CASE("bits of the host, each kind of block alone") {
  for (int kind = 0; kind < kKinds; ++kind) {
    CAPTURE(kind);
    const std::vector<float> x = of_kind(kind, 67, 31);
    const std::vector<BlockQ8Pad40> want = host_pad40(x);
    const Buffer<float> acts = on_device(x, "acts");
    Output<BlockQ8Pad40> eight(want.size()), one_thread(want.size());
    require_ok(launch_quantize_q8_pad40(acts.data(), eight.data(), 67, 32, stream()));
    require_ok(launch_quantize_q8_pad40_plain(acts.data(), one_thread.data(), 67, 32, stream()));
    CHECK(differing(eight.get(), want) == 0);
    CHECK(differing(one_thread.get(), want) == 0);
  }
}

// Wrong ones ------------------------------------------------------------------------------------------------

enum class Bug { none, rounds_away, truncates, scale_first, forgets_sum, forgets_pad, signed_max, old_scale };

/// The plain mapping with one bug.
template <Bug kBug>
__global__ void broken_quantizer(const float* acts, BlockQ8Pad40* out, int blocks) {
  const int b = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (b >= blocks) return;
  const float* x = acts + b * kQ8ActsPerBlock;
  unsigned largest = 0;
  float highest = 0.0f;
  for (int i = 0; i < kQ8ActsPerBlock; ++i) {
    largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
    highest = fmaxf(highest, x[i]);
  }
  if (kBug == Bug::signed_max) largest = __float_as_uint(highest);
  Q8Scale s = q8_scale(largest);
  if (kBug == Bug::scale_first) s.inverse = 1.0f / __half2float(__float2half_rn(s.d));
  out[b].d = __half_as_ushort(__float2half_rn(kBug == Bug::old_scale ? s.inverse : s.d));
  if (kBug != Bug::forgets_pad) out[b].pad = 0;
  int sum = 0;
  for (int i = 0; i < kQ8ActsPerBlock; ++i) {
    const float v = x[i] * s.inverse;
    int q = __float2int_rn(v);
    if (kBug == Bug::rounds_away) q = static_cast<int>(roundf(v));
    if (kBug == Bug::truncates) q = static_cast<int>(v);
    if (s.inverse == 0.0f) q = 0;
    out[b].q[i] = static_cast<std::int8_t>(q);
    sum += q;
  }
  if (kBug != Bug::forgets_sum) out[b].sum = sum;
}

namespace {

template <Bug kBug>
std::size_t blocks_told_apart(const std::vector<float>& x) {
  const std::vector<BlockQ8Pad40> want = host_pad40(x);
  const Buffer<float> acts = on_device(x, "acts");
  Output<BlockQ8Pad40> out(want.size());
  const auto blocks = static_cast<int>(want.size());
  require_ok(launch(broken_quantizer<kBug>, dim3(static_cast<unsigned>(blocks + 63) / 64), dim3(64), 0,
                    stream(), acts.data(), out.data(), blocks));
  return differing(out.get(), want);
}

}  // namespace

TEST_CASE("broken quantizers are told from the right one") {
  const std::vector<float> x = all_kinds(9, 896, 41);
  CHECK(blocks_told_apart<Bug::none>(x) == 0);
  CHECK(blocks_told_apart<Bug::rounds_away>(x) > 0);
  CHECK(blocks_told_apart<Bug::truncates>(x) > 0);
  CHECK(blocks_told_apart<Bug::scale_first>(x) > 0);
  CHECK(blocks_told_apart<Bug::forgets_sum>(x) > 0);
  CHECK(blocks_told_apart<Bug::forgets_pad>(x) == x.size() / kBlock);
  CHECK(blocks_told_apart<Bug::signed_max>(x) > 0);
  CHECK(blocks_told_apart<Bug::old_scale>(x) > 0);

  // The two of them that only some blocks show. Random blocks hardly ever have a tie: a test without ties
  // accepts roundf.
  const std::vector<float> without = of_kind(plain, 252, 43);
  CHECK(blocks_told_apart<Bug::rounds_away>(without) == 0);
  CHECK(blocks_told_apart<Bug::rounds_away>(of_kind(ties, 252, 43)) > 240);
  CHECK(blocks_told_apart<Bug::scale_first>(of_kind(plain, 252, 43)) > 25);
}

enum class PlaneBug { none, no_swizzle, stale_tail, scales_in_order };

/// A thread per (padded token, chunk), from blocks that are right.
template <PlaneBug kBug>
__global__ void broken_planes(const BlockQ8Pad40* blocks, std::int8_t* codes, std::uint32_t* scales, int nt,
                              int chunks) {
  const int t = static_cast<int>(blockIdx.x), chunk = static_cast<int>(threadIdx.x);
  if (kBug == PlaneBug::stale_tail && t >= nt) return;
  const int token = t % kQ8ActsTileTokens, tile = t / kQ8ActsTileTokens * chunks + chunk;
  for (int i = 0; i < kQ8ActsPerBlock; ++i) {
    const int byte = kBug == PlaneBug::no_swizzle ? token * 32 + i : q8_acts_code_byte(token, i / 4) + i % 4;
    codes[tile * kQ8ActsTileBytes + byte] = t < nt ? blocks[t * chunks + chunk].q[i] : std::int8_t{0};
  }
  std::uint32_t scale = 0;
  if (t < nt) {
    const BlockQ8Pad40& b = blocks[t * chunks + chunk];
    scale = b.d | static_cast<std::uint32_t>(b.sum) << 16;
  }
  scales[tile * kQ8ActsTileTokens + (kBug == PlaneBug::scales_in_order ? token : q8_acts_scale_word(token))] =
      scale;
}

namespace {

template <PlaneBug kBug>
std::size_t words_told_apart() {
  constexpr int kNt = 66, kChunks = 3;
  const std::vector<BlockQ8Pad40> blocks = host_pad40(of_kind(plain, kNt * kChunks, 47));
  const Planes want = host_planes(blocks, kNt, kChunks * kBlock);
  const Buffer<BlockQ8Pad40> from = on_device(blocks, "blocks");
  Output<std::int8_t> codes(want.codes.size());
  Output<std::uint32_t> scales(want.scales.size());
  require_ok(launch(broken_planes<kBug>, dim3(128), dim3(kChunks), 0, stream(), from.data(), codes.data(),
                    scales.data(), kNt, kChunks));
  return differing(codes.get(), want.codes) + differing(scales.get(), want.scales);
}

}  // namespace

TEST_CASE("broken planes are told from the right ones") {
  CHECK(words_told_apart<PlaneBug::none>() == 0);
  CHECK(words_told_apart<PlaneBug::no_swizzle>() > 0);
  CHECK(words_told_apart<PlaneBug::stale_tail>() >= 62 * 3 * (32 + 1));
  CHECK(words_told_apart<PlaneBug::scales_in_order>() > 0);
}

// The reader of the planes ----------------------------------------------------------------------------------

/// Four warps take a tile to fragments, one of 16 tokens each. Without the swizzle a token's codes are 32
/// neighbouring bytes.
template <bool kSwizzled>
__global__ void fetch_fragments(const std::uint32_t* codes, std::uint32_t* out) {
  __shared__ __align__(128) std::uint32_t tile[kQ8ActsTileBytes / 4];
  for (unsigned i = threadIdx.x; i < kQ8ActsTileBytes / 4; i += blockDim.x) tile[i] = codes[i];
  __syncthreads();  // the tile is written before any of it is read
  const int lane = static_cast<int>(threadIdx.x % 32), group = static_cast<int>(threadIdx.x / 32);
  const int byte =
      kSwizzled ? q8_acts_ldmatrix_byte(group, lane) : group * 512 + lane % 16 * 32 + lane / 16 * 16;
  std::uint32_t a[4];
  ldmatrix(a, tile + byte / 4);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + static_cast<unsigned>(i)] = a[i];
}

TEST_CASE("ldmatrix finds the fragments of mma m16n8k32; the swizzle saves it every second pass") {
  const std::vector<BlockQ8Pad40> blocks = host_pad40(of_kind(plain, 64, 53));
  const Planes planes = host_planes(blocks, 64, 32);
  for (const bool swizzled : {true, false}) {
    CAPTURE(swizzled);
    std::vector<std::uint32_t> tile(kQ8ActsTileBytes / 4);
    for (std::size_t t = 0; t < 64 && !swizzled; ++t) std::memcpy(tile.data() + t * 8, blocks[t].q, 32);
    if (swizzled) std::memcpy(tile.data(), planes.codes.data(), kQ8ActsTileBytes);
    const Buffer<std::uint32_t> codes = on_device(tile, "codes");
    Output<std::uint32_t> out(128 * 4);
#if !defined(__CUDACC__)
    const emu::counting on;
#endif
    require_ok(launch(swizzled ? fetch_fragments<true> : fetch_fragments<false>, dim3(1), dim3(128), 0,
                      stream(), codes.data(), out.data()));
#if !defined(__CUDACC__)
    const emu::SharedCounts read = emu::last_launch().total.shared[0];
    CHECK(read.requests == 4);       // one of each warp,
    CHECK(read.ideal_passes == 16);  // in four phases of eight rows
    CHECK(read.passes == (swizzled ? 16 : 32));
#endif
    const std::vector<std::uint32_t> got = out.get();
    std::size_t wrong = 0;
    for (std::size_t thread = 0; thread < 128; ++thread) {
      for (std::size_t i = 0; i < 4; ++i) {
        // PTX ISA, A fragment of mma.m16n8k32: rows lane / 4 and + 8, words lane % 4 and + 4.
        const std::size_t token = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
        std::uint32_t want = 0;
        std::memcpy(&want, blocks[token].q + (thread % 4 + i / 2 * 4) * 4, 4);
        wrong += got[thread * 4 + i] != want;
      }
    }
    CHECK(wrong == 0);
  }
}

// What the launchers refuse, and what the emulator counts ---------------------------------------------------

TEST_CASE("what the launchers refuse") {
  const Buffer<float> acts(4096, "acts");
  Buffer<BlockQ8Pad40> pad40(128, "pad40");
  Buffer<BlockQ8_0> q8_0(128, "q8_0");
  Buffer<std::int8_t> codes(8192, "codes");
  Buffer<std::uint32_t> scales(256, "scales");
  const auto refused = [](const Status& s, const std::string& part) {
    INFO("message: '" << s.message() << "', wanted: '" << part << "'");
    CHECK(s.message().find(part) != std::string::npos);
  };
  refused(launch_quantize_q8_pad40(acts.data(), pad40.data(), 1, 40, stream()),
          "quantize_q8_pad40: id must be a positive multiple of 32, not 40");
  refused(launch_quantize_q8_pad40(acts.data(), pad40.data(), 1, 0, stream()), "multiple of 32, not 0");
  refused(launch_quantize_q8_pad40(acts.data(), pad40.data(), 1, -32, stream()), "multiple of 32, not -32");
  refused(launch_quantize_q8_pad40(acts.data(), pad40.data(), 0, 32, stream()),
          "nt must be at least 1, not 0");
  refused(launch_quantize_q8_pad40(acts.data(), pad40.data(), 1LL << 40, 1LL << 40, stream()),
          "at most 2199023254528 activations at once, not 1099511627776 x 1099511627776");
  refused(launch_quantize_q8_pad40(acts.data() + 1, pad40.data(), 1, 32, stream()),
          "the activations must begin at a multiple of 16 bytes");
  const auto* odd = reinterpret_cast<const char*>(pad40.data()) + 2;
  refused(launch_quantize_q8_pad40(acts.data(), reinterpret_cast<BlockQ8Pad40*>(const_cast<char*>(odd)), 1,
                                   32, stream()),
          "the output must begin at a multiple of 4 bytes");
  refused(launch_quantize_q8_pad40_plain(acts.data(), pad40.data(), 1, 33, stream()),
          "quantize_q8_pad40_plain: id must be a positive multiple of 32, not 33");
  refused(launch_quantize_q8_0(acts.data(), q8_0.data(), 1, 31, stream()),
          "quantize_q8_0: id must be a positive multiple of 32, not 31");
  refused(launch_quantize_q8_0(acts.data(),
                               reinterpret_cast<BlockQ8_0*>(reinterpret_cast<char*>(q8_0.data()) + 1), 1, 32,
                               stream()),
          "the output must begin at a multiple of 2 bytes");
  refused(launch_quantize_q8_pad40_t(acts.data(), codes.data(), scales.data(), 1, 48, stream()),
          "quantize_q8_pad40_t: id must be a positive multiple of 32, not 48");
  refused(launch_quantize_q8_pad40_t(acts.data(), codes.data(), scales.data(), -1, 32, stream()),
          "nt must be at least 1, not -1");
  refused(launch_quantize_q8_pad40_t(acts.data(), codes.data() + 4, scales.data(), 1, 32, stream()),
          "the output must begin at a multiple of 16 bytes");
  refused(launch_quantize_q8_pad40_t(acts.data(), codes.data(),
                                     reinterpret_cast<std::uint32_t*>(codes.data() + 2), 1, 32, stream()),
          "the output must begin at a multiple of 4 bytes");
  refused(launch_quantize_q8_pad40_t(acts.data(), codes.data(), scales.data(), 1, 1LL << 33, stream()),
          "at most 274877906816 activations at once, not 64 x 8589934592");
}

#if !defined(__CUDACC__)
TEST_CASE("sectors: a lane per block asks for 32 and uses half of each, eight lanes per block ask for 16") {
  constexpr long long kNt = 64, kId = 256;  // 512 blocks: 16 warps with a lane a block, 128 with eight
  const Buffer<float> acts = on_device(of_kind(plain, kNt * kId / kBlock, 59), "acts");
  Output<BlockQ8Pad40> out(kNt * kId / kBlock);
  const emu::counting on;
  require_ok(launch_quantize_q8_pad40_plain(acts.data(), out.data(), kNt, kId, stream()));
  const emu::Counters plain_mapping = emu::last_launch();
  CHECK(plain_mapping.total.loads().requests == 16 * 8);
  CHECK(plain_mapping.total.loads().sectors_per_request() == 32.0);
  CHECK(plain_mapping.total.loads().ideal_sectors == 16 * 8 * 16);
  CHECK(plain_mapping.total.stores().requests == 16 * 10);

  require_ok(launch_quantize_q8_pad40(acts.data(), out.data(), kNt, kId, stream()));
  const emu::Counters coalesced = emu::last_launch();
  CHECK(coalesced.total.loads().requests == 128);
  CHECK(coalesced.total.loads().sectors_per_request() == 16.0);
  CHECK(coalesced.total.stores().requests == 128 * 3);
  CHECK(coalesced.total.stores().sectors < plain_mapping.total.stores().sectors);
  // Both move the same bytes from memory and to it.
  CHECK(coalesced.unique_sectors_read() == plain_mapping.unique_sectors_read());
  CHECK(coalesced.unique_sectors_written() == plain_mapping.unique_sectors_written());

  const Q8ActsPlanes p = q8_acts_planes(kNt, kId);
  Output<std::int8_t> codes(p.codes);
  Output<std::uint32_t> scales(p.scales);
  require_ok(launch_quantize_q8_pad40_t(acts.data(), codes.data(), scales.data(), kNt, kId, stream()));
  const emu::Counters planes = emu::last_launch();
  CHECK(planes.total.loads().sectors_per_request() == 16.0);
  CHECK(planes.total.loads().requests == 128);
  // 128 whole lines of codes in four sectors each, and 128 times four scales, 16 bytes apart, in two.
  CHECK(planes.total.stores().requests == 256);
  CHECK(planes.total.stores().sectors == 128 * 4 + 128 * 2);
}
#endif
