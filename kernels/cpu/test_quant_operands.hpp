// What the tests of packed weights on the CPU share: operands, their exact values, and every instruction set in turn.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "harness/device/half_bits.hpp"
#include "kernels/cpu/features.hpp"
#include "kernels/cpu/quant_matmul.hpp"
#include "kernels/cpu/thread_pool.hpp"
#include "kernels/quant/decode.hpp"
#include "kernels/quant/dequantize.hpp"

namespace {

using ladder::BlockQ8Pad40;
using ladder::info;
using ladder::Shape;
using ladder::WeightType;
using ladder::cpu::Isa;
using ladder::cpu::Product;
using ladder::cpu::QuantizedActs;
using ladder::cpu::ThreadPool;

constexpr double kUnit = 1.0 / 16777216.0;  // u of f32
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Calls f(name) with every set of kernels forced in turn.
void on_every_isa(const std::function<void(const std::string&)>& f) {
  struct Restore {
    ~Restore() {
      ladder::cpu::force_isa(std::nullopt);
      ladder::cpu::avoid_dot_instruction(false);
    }
  } restore;
  for (const Isa isa : ladder::cpu::supported_isas()) {
    ladder::cpu::force_isa(isa);
    f(std::string(ladder::cpu::name(isa)) + " " + ladder::cpu::quant_int8_instruction());
    if ((isa == Isa::avx512 && ladder::cpu::features().avx512vnni) ||
        (isa == Isa::neon && ladder::cpu::features().dotprod)) {
      ladder::cpu::avoid_dot_instruction(true);
      f(std::string(ladder::cpu::name(isa)) + " " + ladder::cpu::quant_int8_instruction());
      ladder::cpu::avoid_dot_instruction(false);
    }
  }
}

enum class Scales { random, ones, tiny };

/// Random blocks: all codes, and scales of the kind asked for.
std::vector<unsigned char> random_weights(WeightType type, long long od, long long id, Scales kind,
                                          unsigned seed) {
  std::minstd_rand random(seed);
  std::vector<unsigned char> bytes(static_cast<std::size_t>(od) * ladder::row_bytes(type, id));
  for (auto& b : bytes) b = static_cast<unsigned char>(random() >> 8);
  ladder::with_block(type, [&](auto tag) {
    using Block = typename decltype(tag)::type;
    std::uniform_real_distribution<float> value(0.25F, 1.0F);
    const auto scale = [&]() -> std::uint16_t {
      const float sign = random() % 2 == 0 ? 1.0F : -1.0F;
      switch (kind) {
        case Scales::random:
          return ladder::float_to_half_bits(sign * 0.05F * value(random));
        case Scales::ones:
          return ladder::float_to_half_bits(1);
        case Scales::tiny:
          return static_cast<std::uint16_t>(random() % 1024);  // subnormal f16 and zero
      }
      return 0;
    };
    for (std::size_t at = 0; at < bytes.size(); at += sizeof(Block)) {
      Block b;
      std::memcpy(&b, bytes.data() + at, sizeof b);
      if constexpr (Block::kElems == 1) {
        const float v = kind == Scales::ones ? static_cast<float>(static_cast<int>(random() % 9) - 4)
                                             : value(random) - 0.6F;
        if constexpr (std::is_same_v<Block, ladder::BlockF32>) b.value = v;
        if constexpr (std::is_same_v<Block, ladder::BlockF16>) b.value = ladder::float_to_half_bits(v);
        if constexpr (std::is_same_v<Block, ladder::BlockBF16>) b.value = ladder::float_to_bfloat16_bits(v);
      } else {
        b.d = scale();
        if constexpr (requires { b.m; }) b.m = scale();
        if constexpr (requires { b.dmin; }) b.dmin = scale();
        if constexpr (std::is_same_v<Block, ladder::BlockQ6_K>) {  // keeps the exact case within 24 bits
          if (kind == Scales::ones) {
            for (auto& s : b.scales) s = static_cast<std::int8_t>(static_cast<int>(random() % 7) - 3);
          }
        }
      }
      std::memcpy(bytes.data() + at, &b, sizeof b);
    }
  });
  return bytes;
}

enum class Acts { random, integers, outliers };

std::vector<float> random_acts(long long nt, long long id, Acts kind, unsigned seed) {
  std::minstd_rand random(seed);
  std::uniform_real_distribution<float> value(-1, 1);
  std::vector<float> acts(static_cast<std::size_t>(nt * id));
  for (std::size_t i = 0; i < acts.size(); ++i) {
    switch (kind) {
      case Acts::random:
        acts[i] = value(random);
        break;
      // A magnitude of 127 in each block makes the scale 1.
      case Acts::integers:
        acts[i] = i % 32 == 5 ? 127.0F : static_cast<float>(static_cast<int>(random() % 9) - 4);
        break;
      case Acts::outliers: {
        const auto block = i / 32 % 4;
        acts[i] = block == 0    ? 0.0F                    // a block of zeros
                  : block == 1  ? value(random) * 1e-39F  // subnormal
                  : i % 32 == 3 ? (random() % 2 == 0 ? 1e5F : -1e5F)
                                : value(random);
        break;
      }
    }
  }
  return acts;
}

/// Code, scale and offset of every weight, in f64: value = scale * code + offset.
struct Exact {
  std::vector<double> code, scale, offset;
  Exact(WeightType type, const std::vector<unsigned char>& bytes) {
    ladder::with_block(type, [&](auto tag) {
      using Block = typename decltype(tag)::type;
      for (std::size_t at = 0; at < bytes.size(); at += sizeof(Block)) {
        Block b;
        std::memcpy(&b, bytes.data() + at, sizeof b);
        for (int i = 0; i < Block::kElems; ++i) {
          if constexpr (Block::kElems == 1) {
            code.push_back(1);
            scale.push_back(ladder::element(b, i));
            offset.push_back(0);
          } else {
            const auto s = ladder::run_scale(b, i / 16);
            code.push_back(ladder::run_code(b, i / 16, i % 16));
            scale.push_back(s.d);
            offset.push_back(0);
            if constexpr (requires { s.offset; }) offset.back() = s.offset;
          }
        }
      }
    });
  }
};

/// Floats between guard bands, poisoned with NaN.
class Guarded {
 public:
  explicit Guarded(long long count) : all_(static_cast<std::size_t>(count) + 2 * kBand, guard()) {
    std::fill(all_.begin() + kBand, all_.end() - kBand, kNan);
  }
  float* data() { return all_.data() + kBand; }
  bool bands_intact() const {
    const auto intact = [](float f) { return std::bit_cast<std::uint32_t>(f) == 0x7fc0deadU; };
    return std::all_of(all_.begin(), all_.begin() + kBand, intact) &&
           std::all_of(all_.end() - kBand, all_.end(), intact);
  }

 private:
  static constexpr std::ptrdiff_t kBand = 256;
  static float guard() { return std::bit_cast<float>(0x7fc0deadU); }
  std::vector<float> all_;
};

std::vector<WeightType> all_types() {
  std::vector<WeightType> types;
  types.reserve(ladder::kWeightTypes.size());
  for (const auto& t : ladder::kWeightTypes) types.push_back(t.type);
  return types;
}

bool same_bits(const float* a, const float* b, long long count) {
  return std::memcmp(a, b, static_cast<std::size_t>(count) * sizeof(float)) == 0;
}

}  // namespace
