// The quantized matmuls in plain C++: the compiler's own vectors, on any CPU.
#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>
#include <utility>

#include "kernels/cpu/gemm_int8_tile.hpp"
#include "kernels/cpu/quant_acts.hpp"
#include "kernels/cpu/quant_tile.hpp"
#include "kernels/quant/decode.hpp"

namespace ladder::cpu {
namespace {

/// 256 weights: value = scale of the run * code + offset of the run.
struct DecodedGroup {
  alignas(64) std::int8_t codes[kGroupElems];
  alignas(64) float scales[kGroupRuns];
  alignas(64) float offsets[kGroupRuns];  // only of formats that have them
};

template <class Block>
inline constexpr bool kHasOffset = std::is_same_v<decltype(run_scale(std::declval<Block>(), 0)), ScaleOffset>;

template <int Run, class Block>
void decode_run(const Block& b, std::int8_t* codes, float& scale, float& offset) {
  const auto s = run_scale(b, Run);
  scale = s.d;
  if constexpr (kHasOffset<Block>) offset = s.offset;
  for (int j = 0; j < 16; ++j) codes[j] = static_cast<std::int8_t>(run_code(b, Run, j));
}

/// @param count blocks that are there, 1 to 256 / kElems. What is missing has codes and scales of zero.
template <class Block>
void decode_group(const Block* b, int count, DecodedGroup& out) {
  constexpr int kRuns = Block::kElems / 16;
  if (count * kRuns < kGroupRuns) out = {};
  for (int i = 0; i < count; ++i) {
    const int first = kRuns * i;
    [&]<int... Run>(std::integer_sequence<int, Run...>) {
      (decode_run<Run>(b[i], out.codes + 16 * (first + Run), out.scales[first + Run],
                       out.offsets[first + Run]),
       ...);
    }
    (std::make_integer_sequence<int, kRuns>{});
  }
}

// Adds 16 lanes as a fixed tree: 16 -> 8 -> 4 -> 2 -> 1.
float sum_of_lanes(const float* lanes) {
  float v[16];
  std::copy_n(lanes, 16, v);
  for (int n = 8; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) v[i] += v[i + n];
  }
  return v[0];
}

/// Lane r of `sums` gets run r.
template <class Block>
void add_int8(const DecodedGroup& w, const ActGroup& x, float* sums) {
  for (int run = 0; run < kGroupRuns; ++run) {
    int dot = 0;
    for (int j = 16 * run; j < 16 * run + 16; ++j) dot += w.codes[j] * x.codes[j];
    sums[run] += static_cast<float>(dot) * (w.scales[run] * x.scales[run]);
    if constexpr (kHasOffset<Block>) {
      sums[run] -= static_cast<float>(x.negative_sums[run]) * x.scales[run] * w.offsets[run];
    }
  }
}

/// Lane j of `sums` gets element j of each run.
template <class Block>
void add_f32(const DecodedGroup& w, const float* x, int count, float* sums) {
  for (int run = 0; 16 * run < count; ++run) {
    for (int j = 0; j < 16; ++j) {
      float value = static_cast<float>(w.codes[16 * run + j]) * w.scales[run];
      if constexpr (kHasOffset<Block>) value += w.offsets[run];
      sums[j] += value * x[16 * run + j];
    }
  }
}

template <class Block, bool Int8>
void multiply(const QuantTile& tile) {
  constexpr long long kBlocks = kGroupElems / Block::kElems;
  const long long blocks_of_row = tile.id / Block::kElems, groups = (tile.id + kGroupElems - 1) / kGroupElems;
  DecodedGroup w;
  for (long long row = 0; row < tile.rows; ++row) {
    const auto* blocks =
        reinterpret_cast<const Block*>(tile.weights + static_cast<std::size_t>(row) * tile.row_bytes);
    float sums[kMaxQuantTokens][16] = {};
    for (long long g = 0; g < groups; ++g) {
      const auto count = static_cast<int>(std::min(kBlocks, blocks_of_row - g * kBlocks));
      decode_group(blocks + g * kBlocks, count, w);
      for (int t = 0; t < tile.tokens; ++t) {
        if constexpr (Int8) {
          add_int8<Block>(w, tile.acts[t * groups + g], sums[t]);
        } else {
          add_f32<Block>(w, tile.floats + t * tile.id + g * kGroupElems, count * Block::kElems, sums[t]);
        }
      }
    }
    for (int t = 0; t < tile.tokens; ++t) tile.out[t * tile.od + row] = sum_of_lanes(sums[t]);
  }
}

template <class Element>
void multiply_floats(const QuantTile& tile) {
  const long long whole = tile.id / 16 * 16;
  for (long long row = 0; row < tile.rows; ++row) {
    const auto* w =
        reinterpret_cast<const Element*>(tile.weights + static_cast<std::size_t>(row) * tile.row_bytes);
    float sums[kMaxQuantTokens][16] = {};
    for (long long k = 0; k < whole; k += 16) {
      float values[16];
      for (int j = 0; j < 16; ++j) values[j] = element(w[k + j], 0);
      for (int t = 0; t < tile.tokens; ++t) {
        const float* x = tile.floats + t * tile.id + k;
        for (int j = 0; j < 16; ++j) sums[t][j] += values[j] * x[j];
      }
    }
    for (long long k = whole; k < tile.id; ++k) {
      for (int t = 0; t < tile.tokens; ++t)
        sums[t][k - whole] += element(w[k], 0) * tile.floats[t * tile.id + k];
    }
    for (int t = 0; t < tile.tokens; ++t) tile.out[t * tile.od + row] = sum_of_lanes(sums[t]);
  }
}

void quantize(const float* acts, int count, ActGroup& group) {
  group = {};
  for (int block = 0; 32 * block < count; ++block) {
    const float* x = acts + 32 * block;
    std::uint32_t largest =
        0;  // the order of magnitudes is that of their bits; infinities and NaNs come last
    for (int i = 0; i < 32; ++i)
      largest = std::max(largest, std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffU);
    const ActScale scale = act_scale(largest);
    group.scales[2 * block] = group.scales[2 * block + 1] = scale.scale;
    if (scale.inverse == 0) continue;
    for (int i = 0; i < 32; ++i) {
      const int code = static_cast<int>(std::nearbyint(x[i] * scale.inverse));  // halves to even
      group.codes[32 * block + i] = static_cast<std::int8_t>(code);
      group.negative_sums[2 * block + i / 16] -= code;
    }
  }
}

constexpr QuantKernel kInt8[kWeightTypes.size()] = {nullptr,
                                                    nullptr,
                                                    nullptr,
                                                    multiply<BlockQ4_0, true>,
                                                    multiply<BlockQ4_1, true>,
                                                    multiply<BlockQ5_0, true>,
                                                    multiply<BlockQ5_1, true>,
                                                    multiply<BlockQ8_0, true>,
                                                    multiply<BlockQ2_K, true>,
                                                    multiply<BlockQ3_K, true>,
                                                    multiply<BlockQ4_K, true>,
                                                    multiply<BlockQ5_K, true>,
                                                    multiply<BlockQ6_K, true>,
                                                    multiply<BlockIQ4_NL, true>,
                                                    multiply<BlockIQ4_XS, true>};

// Many tokens -----------------------------------------------------------------------------------------------

#define LADDER_PANEL

struct ActPanel {
  ActGroup group;
};
void put_panel(const ActGroup& group, ActPanel& out) { out.group = group; }

using Panel = DecodedGroup;
template <class Block>
void make_panel(const Block* b, int count, Panel& out) {
  decode_group(b, count, out);
}

struct Sum {
  float lanes[16];
};
Sum zero_sum() { return {}; }
Sum load_sum(const float* p) {
  Sum s;
  std::copy_n(p, 16, s.lanes);
  return s;
}
void store_sum(float* p, const Sum& s) { std::copy_n(s.lanes, 16, p); }
float total(const Sum& s) { return sum_of_lanes(s.lanes); }

template <class Block, int Tokens>
void add_panel(const Panel& w, const ActPanel* x, Sum* sums) {
  for (int t = 0; t < Tokens; ++t) add_int8<Block>(w, x[t].group, sums[t].lanes);
}

}  // namespace
}  // namespace ladder::cpu

#include "kernels/cpu/gemm_int8_groups.hpp"

namespace ladder::cpu {

const QuantKernel kQuantF32Portable[kWeightTypes.size()] = {
    multiply_floats<BlockF32>,  multiply_floats<BlockF16>,    multiply_floats<BlockBF16>,
    multiply<BlockQ4_0, false>, multiply<BlockQ4_1, false>,   multiply<BlockQ5_0, false>,
    multiply<BlockQ5_1, false>, multiply<BlockQ8_0, false>,   multiply<BlockQ2_K, false>,
    multiply<BlockQ3_K, false>, multiply<BlockQ4_K, false>,   multiply<BlockQ5_K, false>,
    multiply<BlockQ6_K, false>, multiply<BlockIQ4_NL, false>, multiply<BlockIQ4_XS, false>};

const QuantKernels kQuantPortable = {
    .name = "portable int8 products",
    .lanes = false,
    .quantize = quantize,
    .take = take_in_order,
    .code_additions = 1,
    .offset_additions = 1,
    .tree_additions = 4,
    .int8 = kInt8,
    .f32 = kQuantF32Portable,
    .gemm = kGemmInt8,
};

}  // namespace ladder::cpu
