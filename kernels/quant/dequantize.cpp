#include "kernels/quant/dequantize.hpp"

#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "kernels/quant/decode.hpp"

namespace ladder {
namespace {

/// Values of run `Run` of a block: a loop without branches, since everything but j is a constant.
template <int Run, class Block>
LADDER_HD void decode_run(const Block& b, float* out) {
  const auto scale = run_scale(b, Run);
  for (int j = 0; j < 16; ++j) out[16 * Run + j] = value(scale, run_code(b, Run, j));
}

template <class Block>
void decode_block(const Block& b, float* out) {
  if constexpr (Block::kElems == 1) {
    *out = element(b, 0);
  } else {
    [&]<int... Run>(std::integer_sequence<int, Run...>) { (decode_run<Run>(b, out), ...); }
    (std::make_integer_sequence<int, Block::kElems / 16>{});
  }
}

}  // namespace

void dequantize_row(WeightType type, const void* src, float* dst, std::int64_t n) {
  with_block(type, [&](auto tag) {
    using Block = typename decltype(tag)::type;
    if (n < 0 || n % Block::kElems != 0) {
      throw std::invalid_argument("dequantize " + std::string(info(type).name) +
                                  ": the number of elements must be a multiple of " +
                                  std::to_string(Block::kElems) + ", not " + std::to_string(n));
    }
    const auto* bytes = static_cast<const unsigned char*>(src);
    for (std::int64_t i = 0; i < n / Block::kElems; ++i) {
      Block b;  // a copy, because `src` may have any alignment
      std::memcpy(&b, bytes + i * static_cast<std::int64_t>(sizeof b), sizeof b);
      decode_block(b, dst + i * Block::kElems);
    }
  });
}

}  // namespace ladder
