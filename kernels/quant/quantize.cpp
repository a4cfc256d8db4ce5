#include "kernels/quant/quantize.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "harness/device/half_bits.hpp"
#include "kernels/quant/decode.hpp"

namespace ladder {
namespace {

// Numbers ---------------------------------------------------------------------------------------------------

/// To the nearest integer, ties to even, for |v| <= 2^22: the sum has no bits left for a fraction.
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
float rounded(float v) { return (v + kRound) - kRound; }

/// The integer nearest to v, at least lo and at most hi. Clamped before it is rounded, which gives the same
/// integer and keeps every v in range; a NaN, as of infinity times zero, becomes lo.
int nearest(float v, float lo, float hi) {
  v = v > lo ? v : lo;
  v = v < hi ? v : hi;
  return static_cast<int>(rounded(v));
}

/// The integer part of v, at least 0 and at most hi.
int truncated(float v, float hi) {
  v = v > 0.0f ? v : 0.0f;
  v = v < hi ? v : hi;
  return static_cast<int>(v);
}

/// To the nearest integer, halves away from zero, for small v.
int rounded_away(float v) {
  const int whole = static_cast<int>(v);
  const float rest = v - static_cast<float>(whole);  // exact
  return whole + (rest >= 0.5f ? 1 : 0) - (rest <= -0.5f ? 1 : 0);
}

/// 1 / d, or 0 where that is no number: a scale of 0, or one so small that it is 0 as f16 anyhow.
float inverse_or_zero(float d) {
  const float inverse = 1.0f / d;
  return std::isfinite(inverse) ? inverse : 0.0f;
}

/// The value of largest magnitude with its sign; the first of equals.
float signed_extreme(const float* x, int n) {
  float magnitude = 0.0f, extreme = 0.0f;
  for (int i = 0; i < n; ++i) {
    if (std::fabs(x[i]) > magnitude) {
      magnitude = std::fabs(x[i]);
      extreme = x[i];
    }
  }
  return extreme;
}

/// Groups whose extreme is smaller than this are stored as zeros.
constexpr float kZeroGroup = 1e-15f;

// Formats of 32 elements ------------------------------------------------------------------------------------

// ANCHOR: quantize_q4_0
/// The extreme value becomes code 0, which is -8 steps: the side that has one step more.
void quantize_block(const float* x, BlockQ4_0& b) {
  const float d = signed_extreme(x, 32) / -8.0f;
  const float inverse = inverse_or_zero(d);
  b.d = float_to_half_bits(d);
  for (int j = 0; j < 16; ++j) {
    const int low = truncated(x[j] * inverse + 8.5f, 15.0f);
    const int high = truncated(x[j + 16] * inverse + 8.5f, 15.0f);
    b.qs[j] = static_cast<std::uint8_t>(low | high << 4);
  }
}
// ANCHOR_END: quantize_q4_0

struct Range {
  float min, max;
};
Range range_of(const float* x, int n) {
  Range r{x[0], x[0]};
  for (int i = 1; i < n; ++i) {
    r.min = x[i] < r.min ? x[i] : r.min;
    r.max = x[i] > r.max ? x[i] : r.max;
  }
  return r;
}

void quantize_block(const float* x, BlockQ4_1& b) {
  const Range r = range_of(x, 32);
  const float d = (r.max - r.min) / 15.0f;
  const float inverse = inverse_or_zero(d);
  b.d = float_to_half_bits(d);
  b.m = float_to_half_bits(r.min);
  for (int j = 0; j < 16; ++j) {
    const int low = truncated((x[j] - r.min) * inverse + 0.5f, 15.0f);
    const int high = truncated((x[j + 16] - r.min) * inverse + 0.5f, 15.0f);
    b.qs[j] = static_cast<std::uint8_t>(low | high << 4);
  }
}

/// Stores 32 five-bit codes: nibbles in qs, fifth bits in qh.
void pack_five_bits(const std::uint8_t* codes, std::uint8_t* qh, std::uint8_t* qs) {
  std::uint32_t high = 0;
  for (int j = 0; j < 32; ++j) high |= static_cast<std::uint32_t>(codes[j] >> 4) << j;
  for (int j = 0; j < 4; ++j) qh[j] = static_cast<std::uint8_t>(high >> (8 * j));
  for (int j = 0; j < 16; ++j) qs[j] = static_cast<std::uint8_t>((codes[j] & 15) | (codes[j + 16] & 15) << 4);
}

void quantize_block(const float* x, BlockQ5_0& b) {
  const float d = signed_extreme(x, 32) / -16.0f;
  const float inverse = inverse_or_zero(d);
  std::uint8_t codes[32];
  for (int j = 0; j < 32; ++j) {
    codes[j] = static_cast<std::uint8_t>(truncated(x[j] * inverse + 16.5f, 31.0f));
  }
  b.d = float_to_half_bits(d);
  pack_five_bits(codes, b.qh, b.qs);
}

void quantize_block(const float* x, BlockQ5_1& b) {
  const Range r = range_of(x, 32);
  const float d = (r.max - r.min) / 31.0f;
  const float inverse = inverse_or_zero(d);
  std::uint8_t codes[32];
  for (int j = 0; j < 32; ++j) {
    codes[j] = static_cast<std::uint8_t>(truncated((x[j] - r.min) * inverse + 0.5f, 31.0f));
  }
  b.d = float_to_half_bits(d);
  b.m = float_to_half_bits(r.min);
  pack_five_bits(codes, b.qh, b.qs);
}

/// Codes of Q8_0 and Q8_1; returns the scale before it is rounded to f16.
float quantize_q8(const float* x, std::int8_t* qs) {
  const float d = std::fabs(signed_extreme(x, 32)) / 127.0f;
  const float inverse = inverse_or_zero(d);
  for (int j = 0; j < 32; ++j) qs[j] = static_cast<std::int8_t>(rounded_away(x[j] * inverse));
  return d;
}

void quantize_block(const float* x, BlockQ8_0& b) { b.d = float_to_half_bits(quantize_q8(x, b.qs)); }

void quantize_block(const float* x, BlockQ8_1& b) {
  const float d = quantize_q8(x, b.qs);
  int sum = 0;
  for (const std::int8_t q : b.qs) sum += q;
  b.d = float_to_half_bits(d);
  b.s = float_to_half_bits(static_cast<float>(sum) * d);
}

void quantize_block(const float* x, BlockQ8_K& b) {
  b = {};
  const float extreme = signed_extreme(x, 256);
  if (extreme == 0.0f) return;
  const float inverse = -127.0f / extreme;
  for (int j = 0; j < 256; ++j) {
    b.qs[j] = static_cast<std::int8_t>(nearest(inverse * x[j], -127.0f, 127.0f));
    b.bsums[j / 16] = static_cast<std::int16_t>(b.bsums[j / 16] + b.qs[j]);
  }
  b.d = 1.0f / inverse;
}

// Searches --------------------------------------------------------------------------------------------------
//
// The other formats try many scales for each group of N neighbouring elements and keep the best. The sums of
// one group must be formed in index order, so they cannot be spread over a vector; but groups know nothing of
// each other, and four of them run side by side, one in each lane.

using Four = float __attribute__((vector_size(16)));
using FourMask = int __attribute__((vector_size(16)));

Four all(float v) { return Four{v, v, v, v}; }
bool any(FourMask m) { return (m[0] | m[1] | m[2] | m[3]) != 0; }
Four magnitude(Four v) { return v < 0.0f ? -v : v; }
/// As nearest(), still as floats.
Four nearest(Four v, float lo, float hi) {
  v = v > lo ? v : all(lo);
  v = v < hi ? v : all(hi);
  return (v + kRound) - kRound;
}

/// Element i of four groups.
template <int N>
struct FourGroups {
  Four element[N];
  Four& operator[](int i) { return element[i]; }
  const Four& operator[](int i) const { return element[i]; }
};

/// Four groups that follow each other in memory. @param x [4][N]
template <int N>
FourGroups<N> load_groups(const float* x) {
  FourGroups<N> g;
  for (int i = 0; i < N; ++i) g[i] = Four{x[i], x[N + i], x[2 * N + i], x[3 * N + i]};
  return g;
}

/// Codes of four groups, each plus `bias`, to memory. @param codes [4][N]
template <int N>
void store_codes(const FourGroups<N>& g, int bias, std::uint8_t* codes) {
  for (int lane = 0; lane < 4; ++lane) {
    for (int i = 0; i < N; ++i)
      codes[lane * N + i] = static_cast<std::uint8_t>(static_cast<int>(g[i][lane]) + bias);
  }
}

/// As signed_extreme(), of each group.
template <int N>
Four signed_extreme(const FourGroups<N>& x) {
  Four largest = all(0.0f), extreme = all(0.0f);
  for (int i = 0; i < N; ++i) {
    const Four a = magnitude(x[i]);
    extreme = a > largest ? x[i] : extreme;
    largest = a > largest ? a : largest;
  }
  return extreme;
}

/// How a scale with a minimum is searched: start + step*k, k = 0..last, is added to the largest code MAX when
/// a trial step is formed.
struct ScaleMinSearch {
  float start, step;
  int last;
  bool absolute;  ///< weigh |error| instead of its square
};

struct FourScaleMins {
  Four scale, min;  ///< value = scale * code - min
};

// ANCHOR: search_scale_min
/// Scales and minima for N elements of four groups: codes are 0..MAX, weighted least squares for each trial
/// step.
/// @param codes [4][N]
template <int N, int MAX>
FourScaleMins search_scale_min(const FourGroups<N>& x, const FourGroups<N>& w, ScaleMinSearch search,
                               std::uint8_t* codes) {
  // 1. Range and weighted sums. The range includes zero.
  Four min = x[0], max = x[0], sum_w = w[0], sum_x = w[0] * x[0];
  for (int i = 1; i < N; ++i) {
    min = x[i] < min ? x[i] : min;
    max = x[i] > max ? x[i] : max;
    sum_w += w[i];
    sum_x += w[i] * x[i];
  }
  min = min > 0.0f ? all(0.0f) : min;

  // 2. The plain choice: MAX steps from end to end. A flat group has steps of size 0: its codes, infinity times
  //    zero, are clamped to 0, its determinants below are 0, and it ends with scale 0 and its own minimum.
  const auto error_of = [&](Four scale, Four offset, const FourGroups<N>& l) {
    Four error = all(0.0f);
    for (int i = 0; i < N; ++i) {
      const Four difference = scale * l[i] + offset - x[i];
      error += w[i] * (search.absolute ? magnitude(difference) : difference * difference);
    }
    return error;
  };
  FourGroups<N> best, trial;
  Four inverse = static_cast<float>(MAX) / (max - min);
  for (int i = 0; i < N; ++i) best[i] = nearest(inverse * (x[i] - min), 0.0f, MAX);
  Four scale = 1.0f / inverse;
  Four best_error = error_of(scale, min, best);

  // 3. Other steps: for the codes that a step gives, the best scale and minimum in closed form. A winner's
  //    minimum is where the trials after it begin.
  for (int k = 0; k <= search.last; ++k) {
    inverse = (search.start + search.step * static_cast<float>(k) + static_cast<float>(MAX)) / (max - min);
    Four sum_l = all(0.0f), sum_l2 = all(0.0f), sum_xl = all(0.0f);
    for (int i = 0; i < N; ++i) {
      const Four l = nearest(inverse * (x[i] - min), 0.0f, MAX);
      trial[i] = l;
      sum_l += w[i] * l;
      sum_l2 += w[i] * l * l;
      sum_xl += w[i] * l * x[i];
    }
    const Four determinant = sum_w * sum_l2 - sum_l * sum_l;
    Four trial_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
    Four trial_min = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
    const FourMask positive = trial_min > 0.0f;  // a minimum is stored as a positive number to take off
    trial_scale = positive ? sum_xl / sum_l2 : trial_scale;
    trial_min = positive ? all(0.0f) : trial_min;
    const Four error = error_of(trial_scale, trial_min, trial);
    const FourMask better = (determinant > 0.0f) & (error < best_error);
    if (!any(better)) continue;
    best_error = better ? error : best_error;
    scale = better ? trial_scale : scale;
    min = better ? trial_min : min;
    for (int i = 0; i < N; ++i) best[i] = better ? trial[i] : best[i];
  }

  store_codes(best, 0, codes);
  return {scale, -min};
}
// ANCHOR_END: search_scale_min

/// Scales for N elements of four groups, codes -MAX..MAX-1, squares as weights.
/// @param codes [4][N] codes plus MAX; all 0 for a group of zeros
template <int N, int MAX>
Four search_scale(const FourGroups<N>& x, std::uint8_t* codes) {
  const Four extreme = signed_extreme<N>(x);
  const FourMask zero = magnitude(extreme) < kZeroGroup;
  FourGroups<N> best, trial;
  Four sum_lx, sum_l2;
  const auto try_step = [&](Four inverse, FourGroups<N>& l) {
    sum_lx = sum_l2 = all(0.0f);
    for (int i = 0; i < N; ++i) {
      l[i] = nearest(inverse * x[i], -MAX, MAX - 1);
      const Four w = x[i] * x[i];
      sum_lx += w * x[i] * l[i];
      sum_l2 += w * l[i] * l[i];
    }
  };
  try_step(static_cast<float>(-MAX) / extreme, best);
  Four scale = sum_l2 != 0.0f ? sum_lx / sum_l2 : all(0.0f);
  Four score = scale * sum_lx;
  for (int k = -9; k <= 9; ++k) {
    if (k == 0) continue;
    try_step(-(static_cast<float>(MAX) + 0.1f * static_cast<float>(k)) / extreme, trial);
    const FourMask better = (sum_l2 > 0.0f) & (sum_lx * sum_lx > score * sum_l2);
    if (!any(better)) continue;
    scale = better ? sum_lx / sum_l2 : scale;
    score = better ? scale * sum_lx : score;
    for (int i = 0; i < N; ++i) best[i] = better ? trial[i] : best[i];
  }
  for (int i = 0; i < N; ++i) best[i] = zero ? all(-MAX) : best[i];
  store_codes(best, MAX, codes);
  return zero ? all(0.0f) : scale;
}

/// Scales for 16 elements of four groups, codes -4..3: up to five sweeps, in which one element after the
/// other moves to the code that suits the scale of the others.
/// @param codes [4][16] codes plus 4; all 0 for a group of zeros
Four sweep_scale(const FourGroups<16>& x, std::uint8_t* codes) {
  constexpr int N = 16, MAX = 4;
  const Four extreme = signed_extreme<N>(x);
  const FourMask zero = magnitude(extreme) < kZeroGroup;
  const Four inverse = static_cast<float>(-MAX) / extreme;
  FourGroups<N> l;
  Four sum_lx = all(0.0f), sum_l2 = all(0.0f);
  for (int i = 0; i < N; ++i) {
    l[i] = nearest(inverse * x[i], -MAX, MAX - 1);
    const Four w = x[i] * x[i];
    sum_lx += w * x[i] * l[i];
    sum_l2 += w * l[i] * l[i];
  }
  for (int sweep = 0; sweep < 5; ++sweep) {
    bool changed = false;
    for (int i = 0; i < N; ++i) {
      const Four w = x[i] * x[i];
      Four lx = sum_lx - w * x[i] * l[i], l2 = sum_l2 - w * l[i] * l[i];
      const Four moved = nearest(x[i] * l2 / lx, -MAX, MAX - 1);
      FourMask better = (lx > 0.0f) & (moved != l[i]);
      lx += w * x[i] * moved;
      l2 += w * moved * moved;
      better = better & (l2 > 0.0f) & (lx * lx * sum_l2 > sum_lx * sum_lx * l2);
      if (!any(better)) continue;
      changed = true;
      l[i] = better ? moved : l[i];
      sum_lx = better ? lx : sum_lx;
      sum_l2 = better ? l2 : sum_l2;
    }
    if (!changed) break;  // a group that no longer changes is not touched by further sweeps
  }
  for (int i = 0; i < N; ++i) l[i] = zero ? all(-MAX) : l[i];
  store_codes(l, MAX, codes);
  return (zero | (sum_l2 <= 0.0f)) ? all(0.0f) : sum_lx / sum_l2;
}

// Formats of 256 elements with a minimum --------------------------------------------------------------------

/// Scale and minimum of every sub-block of 256 elements, and their largest (0 if none is positive).
template <int N>
struct BlockScaleMins {
  float scale[256 / N], min[256 / N];
  float max_scale = 0.0f, max_min = 0.0f;
};

/// @param weights from x [N] to the weights of four groups
/// @param codes [256]
template <int N, int MAX, class Weights>
BlockScaleMins<N> search_block(const float* x, Weights weights, ScaleMinSearch search, std::uint8_t* codes) {
  BlockScaleMins<N> out;
  for (int s = 0; s < 256 / N; s += 4) {
    const FourGroups<N> group = load_groups<N>(x + s * N);
    const FourScaleMins found = search_scale_min<N, MAX>(group, weights(group), search, codes + s * N);
    for (int lane = 0; lane < 4; ++lane) {
      out.scale[s + lane] = found.scale[lane];
      out.min[s + lane] = found.min[lane];
      out.max_scale = std::max(out.max_scale, found.scale[lane]);
      out.max_min = std::max(out.max_min, found.min[lane]);
    }
  }
  return out;
}

/// Codes of N elements for the scale and minimum as they are stored. A scale of 0 leaves the codes as they
/// are.
template <int N>
void requantize(const float* x, float scale, float min, float max_code, std::uint8_t* codes) {
  if (scale == 0.0f) return;
  for (int i = 0; i < N; ++i)
    codes[i] = static_cast<std::uint8_t>(nearest((x[i] + min) / scale, 0.0f, max_code));
}

/// Weights of Q4_K and Q5_K: root mean square of the group plus the element's magnitude.
FourGroups<32> rms_weights(const FourGroups<32>& x) {
  Four sum = all(0.0f);
  for (int i = 0; i < 32; ++i) sum += x[i] * x[i];
  sum /= 32.0f;
  Four rms;
  for (int lane = 0; lane < 4; ++lane) rms[lane] = std::sqrt(sum[lane]);
  FourGroups<32> w;
  for (int i = 0; i < 32; ++i) w[i] = rms + magnitude(x[i]);
  return w;
}

/// Fills d, dmin and scales of a Q4_K or Q5_K block, and the codes that belong to them.
/// @param codes [256]
template <int MAX, class Block>
void quantize_six_bit_scales(const float* x, ScaleMinSearch search, Block& b, std::uint8_t* codes) {
  const auto found = search_block<32, MAX>(x, rms_weights, search, codes);
  const float to_scale = found.max_scale > 0.0f ? 63.0f / found.max_scale : 0.0f;
  const float to_min = found.max_min > 0.0f ? 63.0f / found.max_min : 0.0f;
  for (int j = 0; j < 8; ++j) {
    const int scale = nearest(to_scale * found.scale[j], 0.0f, 63.0f);
    const int min = nearest(to_min * found.min[j], 0.0f, 63.0f);
    if (j < 4) {
      b.scales[j] = static_cast<std::uint8_t>(scale);
      b.scales[j + 4] = static_cast<std::uint8_t>(min);
    } else {
      b.scales[j + 4] = static_cast<std::uint8_t>((scale & 15) | (min & 15) << 4);
      b.scales[j - 4] = static_cast<std::uint8_t>(b.scales[j - 4] | (scale >> 4) << 6);
      b.scales[j] = static_cast<std::uint8_t>(b.scales[j] | (min >> 4) << 6);
    }
  }
  b.d = float_to_half_bits(found.max_scale / 63.0f);
  b.dmin = float_to_half_bits(found.max_min / 63.0f);
  for (int j = 0; j < 8; ++j) {
    const ScaleMin s = scale_min_k4(b.scales, j);
    requantize<32>(x + 32 * j, half_bits_to_float(b.d) * static_cast<float>(s.scale),
                   half_bits_to_float(b.dmin) * static_cast<float>(s.min), MAX, codes + 32 * j);
  }
}

/// Low four bits of 256 codes in the places of Q4_K and Q5_K.
void pack_nibbles_k(const std::uint8_t* codes, std::uint8_t* qs) {
  for (int c = 0; c < 4; ++c) {
    for (int l = 0; l < 32; ++l) {
      qs[32 * c + l] =
          static_cast<std::uint8_t>((codes[64 * c + l] & 15) | (codes[64 * c + 32 + l] & 15) << 4);
    }
  }
}

/// Two low bits of 256 codes in the places of Q2_K and Q3_K.
void pack_two_bits(const std::uint8_t* codes, std::uint8_t* qs) {
  for (int n = 0; n < 2; ++n) {
    for (int l = 0; l < 32; ++l) {
      int byte = 0;
      for (int k = 0; k < 4; ++k) byte |= (codes[128 * n + 32 * k + l] & 3) << (2 * k);
      qs[32 * n + l] = static_cast<std::uint8_t>(byte);
    }
  }
}

void quantize_block(const float* x, BlockQ4_K& b) {
  std::uint8_t codes[256];
  quantize_six_bit_scales<15>(x, {-1.0f, 0.1f, 20, false}, b, codes);
  pack_nibbles_k(codes, b.qs);
}

void quantize_block(const float* x, BlockQ5_K& b) {
  std::uint8_t codes[256];
  quantize_six_bit_scales<31>(x, {-0.5f, 0.1f, 15, false}, b, codes);
  pack_nibbles_k(codes, b.qs);
  for (int l = 0; l < 32; ++l) {
    int byte = 0;
    for (int s = 0; s < 8; ++s) byte |= (codes[32 * s + l] >> 4) << s;
    b.qh[l] = static_cast<std::uint8_t>(byte);
  }
}

void quantize_block(const float* x, BlockQ2_K& b) {
  std::uint8_t codes[256];
  const auto weights = [](const FourGroups<16>& group) {
    FourGroups<16> w;
    for (int i = 0; i < 16; ++i) w[i] = magnitude(group[i]);
    return w;
  };
  const auto found = search_block<16, 3>(x, weights, {-0.5f, 0.1f, 15, true}, codes);
  const float to_scale = found.max_scale > 0.0f ? 15.0f / found.max_scale : 0.0f;
  const float to_min = found.max_min > 0.0f ? 15.0f / found.max_min : 0.0f;
  b.d = float_to_half_bits(found.max_scale / 15.0f);
  b.dmin = float_to_half_bits(found.max_min / 15.0f);
  for (int j = 0; j < 16; ++j) {
    const int scale = nearest(to_scale * found.scale[j], 0.0f, 15.0f);
    const int min = nearest(to_min * found.min[j], 0.0f, 15.0f);
    b.scales[j] = static_cast<std::uint8_t>(scale | min << 4);
    requantize<16>(x + 16 * j, half_bits_to_float(b.d) * static_cast<float>(scale),
                   half_bits_to_float(b.dmin) * static_cast<float>(min), 3.0f, codes + 16 * j);
  }
  pack_two_bits(codes, b.qs);
}

// Formats of 256 elements without a minimum -----------------------------------------------------------------

/// The scale of largest magnitude with its sign; infinity if one is no number, because the values of its
/// group are so large that sums over it overflow. The block is refused then.
float extreme_scale(const float* scales, int n) {
  for (int i = 0; i < n; ++i) {
    if (!std::isfinite(scales[i])) return std::numeric_limits<float>::infinity();
  }
  return signed_extreme(scales, n);
}

/// Codes of 16 elements, plus `max`, for the scale as it is stored: -max..max-1. A scale of 0 leaves them as
/// they are.
void requantize_symmetric(const float* x, float scale, int max, std::uint8_t* codes) {
  if (scale == 0.0f) return;
  const auto limit = static_cast<float>(max);
  for (int i = 0; i < 16; ++i)
    codes[i] = static_cast<std::uint8_t>(nearest(x[i] / scale, -limit, limit - 1.0f) + max);
}

void quantize_block(const float* x, BlockQ6_K& b) {
  std::uint8_t codes[256];
  float scales[16];
  for (int s = 0; s < 16; s += 4) {
    const Four found = search_scale<16, 32>(load_groups<16>(x + 16 * s), codes + 16 * s);
    for (int lane = 0; lane < 4; ++lane) scales[s + lane] = found[lane];
  }
  const float extreme = extreme_scale(scales, 16);
  b = {};
  if (std::fabs(extreme) < kZeroGroup) return;
  const float inverse = -128.0f / extreme;
  b.d = float_to_half_bits(1.0f / inverse);
  for (int j = 0; j < 16; ++j) {
    b.scales[j] = static_cast<std::int8_t>(nearest(inverse * scales[j], -128.0f, 127.0f));
    requantize_symmetric(x + 16 * j, half_bits_to_float(b.d) * static_cast<float>(b.scales[j]), 32,
                         codes + 16 * j);
  }
  for (int n = 0; n < 2; ++n) {
    const std::uint8_t* c = codes + 128 * n;
    for (int l = 0; l < 64; ++l)
      b.ql[64 * n + l] = static_cast<std::uint8_t>((c[l] & 15) | (c[l + 64] & 15) << 4);
    for (int l = 0; l < 32; ++l) {
      b.qh[32 * n + l] = static_cast<std::uint8_t>(c[l] >> 4 | (c[l + 32] >> 4) << 2 | (c[l + 64] >> 4) << 4 |
                                                   (c[l + 96] >> 4) << 6);
    }
  }
}

void quantize_block(const float* x, BlockQ3_K& b) {
  std::uint8_t codes[256];
  float scales[16];
  for (int s = 0; s < 16; s += 4) {
    const Four found = sweep_scale(load_groups<16>(x + 16 * s), codes + 16 * s);
    for (int lane = 0; lane < 4; ++lane) scales[s + lane] = found[lane];
  }
  const float extreme = extreme_scale(scales, 16);
  b = {};
  if (extreme != 0.0f) {
    const float inverse = -32.0f / extreme;
    for (int j = 0; j < 16; ++j) {
      const int stored = nearest(inverse * scales[j], -32.0f, 31.0f) + 32;
      b.scales[j % 8] = static_cast<std::uint8_t>(b.scales[j % 8] | (stored & 15) << (j < 8 ? 0 : 4));
      b.scales[8 + j % 4] = static_cast<std::uint8_t>(b.scales[8 + j % 4] | (stored >> 4) << (2 * (j / 4)));
    }
    b.d = float_to_half_bits(1.0f / inverse);
  }
  for (int j = 0; j < 16; ++j) {
    const float scale = half_bits_to_float(b.d) * static_cast<float>(q3_k_scale(b.scales, j));
    requantize_symmetric(x + 16 * j, scale, 4, codes + 16 * j);
  }
  pack_two_bits(codes, b.qs);
  for (int l = 0; l < 32; ++l) {
    int byte = 0;
    for (int s = 0; s < 8; ++s) byte |= (codes[32 * s + l] >> 2) << s;
    b.hmask[l] = static_cast<std::uint8_t>(byte);
  }
}

// IQ4 -------------------------------------------------------------------------------------------------------

/// Where one table value ends and the next begins: exact in f32, and x goes to the upper one on a tie.
constexpr float iq4_midpoint(int i) {
  return 0.5f * static_cast<float>(kIq4Values[static_cast<std::size_t>(i)] +
                                   kIq4Values[static_cast<std::size_t>(i) + 1]);
}

/// The table value nearest to each x.
Four nearest_iq4_value(Four x) {
  Four v = all(kIq4Values[0]);
  for (int i = 0; i < 15; ++i) {
    const auto step = static_cast<float>(kIq4Values[static_cast<std::size_t>(i) + 1] -
                                         kIq4Values[static_cast<std::size_t>(i)]);
    v += x >= iq4_midpoint(i) ? all(step) : all(0.0f);
  }
  return v;
}

/// The place in the table of the value nearest to x.
int nearest_iq4(float x) {
  int place = 0;
  for (int i = 0; i < 15; ++i) place += x >= iq4_midpoint(i) ? 1 : 0;
  return place;
}

/// Scales for 32 elements of four groups: weighted least squares for the codes of each trial scale, squares
/// as weights.
/// @param tries trial scales on either side of the plain one; -1: the plain one of ggml's reference, which
///        puts the extreme on the end of the table that has its sign reversed
Four search_iq4_scale(const FourGroups<32>& x, int tries) {
  const Four extreme = signed_extreme<32>(x);
  const FourMask zero = magnitude(extreme) < kZeroGroup;
  constexpr auto kFirst = static_cast<float>(kIq4Values[0]);
  Four sum_qx, sum_q2;
  const auto try_inverse = [&](Four inverse) {
    sum_qx = sum_q2 = all(0.0f);
    for (int i = 0; i < 32; ++i) {
      const Four q = nearest_iq4_value(inverse * x[i]);
      const Four w = x[i] * x[i];
      sum_qx += w * q * x[i];
      sum_q2 += w * q * q;
    }
  };
  try_inverse(1.0f / (tries > 0 ? -extreme / kFirst : extreme / kFirst));
  Four d = sum_qx / sum_q2;
  Four score = d * sum_qx;
  for (int k = -tries; k <= tries; ++k) {
    try_inverse((static_cast<float>(k) + kFirst) / extreme);
    const FourMask better = (sum_q2 > 0.0f) & (sum_qx * sum_qx > score * sum_q2);
    d = better ? sum_qx / sum_q2 : d;
    score = better ? d * sum_qx : score;
  }
  return zero ? all(0.0f) : d;
}

void pack_iq4(const float* x, float inverse, std::uint8_t* qs) {
  for (int j = 0; j < 16; ++j) {
    qs[j] = static_cast<std::uint8_t>(nearest_iq4(inverse * x[j]) | nearest_iq4(inverse * x[j + 16]) << 4);
  }
}

constexpr int kIq4Tries = 7;

void quantize_block(const float* x, BlockIQ4_XS& b) {
  b = {};
  float scales[8];
  for (int s = 0; s < 8; s += 4) {
    const Four found = search_iq4_scale(load_groups<32>(x + 32 * s), kIq4Tries);
    for (int lane = 0; lane < 4; ++lane) scales[s + lane] = found[lane];
  }
  const float d = -extreme_scale(scales, 8) / 32.0f;
  b.d = float_to_half_bits(d);
  const float inverse = inverse_or_zero(d);
  unsigned high = 0;
  for (int j = 0; j < 8; ++j) {
    const int scale = nearest(inverse * scales[j], -32.0f, 31.0f);
    pack_iq4(x + 32 * j, inverse_or_zero(d * static_cast<float>(scale)), b.qs + 16 * j);
    b.scales_l[j / 2] = static_cast<std::uint8_t>(b.scales_l[j / 2] | ((scale + 32) & 15) << (4 * (j % 2)));
    high |= static_cast<unsigned>(scale + 32) >> 4 << (2 * j);
  }
  b.scales_h = static_cast<std::uint16_t>(high);
}

/// `count` = 1..4 blocks side by side.
void quantize_iq4_nl_blocks(const float* x, BlockIQ4_NL* b, int count, int tries) {
  float four[128] = {};
  std::copy_n(x, 32 * count, four);
  const Four scales = search_iq4_scale(load_groups<32>(four), tries);
  for (int k = 0; k < count; ++k) {
    b[k].d = float_to_half_bits(scales[k]);
    // The reference does not choose the codes again for the scale that it found.
    const float plain = inverse_or_zero(signed_extreme(x + 32 * k, 32) / static_cast<float>(kIq4Values[0]));
    pack_iq4(x + 32 * k, tries > 0 ? inverse_or_zero(scales[k]) : plain, b[k].qs);
  }
}

// Rows ------------------------------------------------------------------------------------------------------

std::string number(float v) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", static_cast<double>(v));
  return text;
}

void check_length(const char* type, std::int64_t n, int block) {
  if (n >= 0 && n % block == 0) return;
  throw std::invalid_argument("quantize " + std::string(type) +
                              ": the number of elements must be a multiple of " + std::to_string(block) +
                              ", not " + std::to_string(n));
}

/// @param first index in the row of x[0]
void check_finite(const char* type, const float* x, int n, std::int64_t first) {
  constexpr std::uint32_t kInfinity = 0x7f800000u;
  std::uint32_t bad = 0;
  for (int i = 0; i < n; ++i) bad |= (std::bit_cast<std::uint32_t>(x[i]) & kInfinity) == kInfinity ? 1u : 0u;
  if (bad == 0) return;
  int i = 0;
  while (std::isfinite(x[i])) ++i;
  throw std::invalid_argument("quantize " + std::string(type) + ": element " + std::to_string(first + i) +
                              " is " + number(x[i]) + "; only finite values can be stored");
}

bool finite_half(F16Bits h) { return (h & 0x7c00u) != 0x7c00u; }

/// The f16 numbers of a block that a quantizer has computed are finite.
template <class Block>
bool representable(const Block& b) {
  if constexpr (requires { b.dmin; }) return finite_half(b.d) && finite_half(b.dmin);
  if constexpr (requires { b.m; }) return finite_half(b.d) && finite_half(b.m);
  if constexpr (requires { b.s; }) return finite_half(b.d) && finite_half(b.s);
  if constexpr (std::is_same_v<Block, BlockQ8_K>) return std::isfinite(b.d);
  return finite_half(static_cast<F16Bits>(b.d));
}

template <class Block>
void check_representable(const char* type, const Block& b, std::int64_t first) {
  if (representable(b)) return;
  throw std::invalid_argument("quantize " + std::string(type) +
                              ": the values of the block that begins at element " + std::to_string(first) +
                              " are too large: its scale or minimum exceeds the largest f16, 65504");
}

template <class Block>
void quantize_blocks(const char* type, const float* src, unsigned char* dst, std::int64_t n) {
  check_length(type, n, Block::kElems);
  for (std::int64_t i = 0; i < n; i += Block::kElems) {
    check_finite(type, src + i, Block::kElems, i);
    Block b;
    quantize_block(src + i, b);
    check_representable(type, b, i);
    std::memcpy(dst, &b, sizeof b);  // `dst` may have any alignment
    dst += sizeof b;
  }
}

void quantize_iq4_nl_row(const float* src, unsigned char* dst, std::int64_t n, int tries) {
  const char* type = info(WeightType::iq4_nl).name;
  check_length(type, n, 32);
  for (std::int64_t i = 0; i < n; i += 128) {
    const int count = static_cast<int>(std::min<std::int64_t>(4, (n - i) / 32));
    check_finite(type, src + i, 32 * count, i);
    BlockIQ4_NL b[4];
    quantize_iq4_nl_blocks(src + i, b, count, tries);
    for (int k = 0; k < count; ++k) {
      check_representable(type, b[k], i + 32 * k);
      std::memcpy(dst, &b[k], sizeof b[k]);
      dst += sizeof b[k];
    }
  }
}

/// F16 and BF16.
void round_row(WeightType type, const float* src, unsigned char* dst, std::int64_t n) {
  check_length(info(type).name, n, 1);
  const bool half = type == WeightType::f16;
  for (std::int64_t i = 0; i < n; ++i) {
    check_finite(info(type).name, src + i, 1, i);
    const std::uint16_t bits = half ? float_to_half_bits(src[i]) : float_to_bfloat16_bits(src[i]);
    if (!std::isfinite(half ? half_bits_to_float(bits) : bfloat16_bits_to_float(bits))) {
      throw std::invalid_argument(
          "quantize " + std::string(info(type).name) + ": element " + std::to_string(i) + " is " +
          number(src[i]) + ", beyond the largest value of the type, " + (half ? "65504" : "3.38953e+38"));
    }
    std::memcpy(dst + 2 * i, &bits, sizeof bits);
  }
}

}  // namespace

void quantize_row(WeightType type, const float* src, void* dst, std::int64_t n) {
  auto* bytes = static_cast<unsigned char*>(dst);
  with_block(type, [&](auto tag) {
    using Block = typename decltype(tag)::type;
    if constexpr (Block::kType == WeightType::f32) {
      check_length(info(type).name, n, 1);
      for (std::int64_t i = 0; i < n; ++i) check_finite(info(type).name, src + i, 1, i);
      if (n > 0) std::memcpy(bytes, src, static_cast<std::size_t>(n) * sizeof(float));
    } else if constexpr (Block::kElems == 1) {
      round_row(type, src, bytes, n);
    } else if constexpr (Block::kType == WeightType::iq4_nl) {
      quantize_iq4_nl_row(src, bytes, n, kIq4Tries);
    } else {
      quantize_blocks<Block>(info(type).name, src, bytes, n);
    }
  });
}

void quantize_row_q8_1(const float* src, BlockQ8_1* dst, std::int64_t n) {
  quantize_blocks<BlockQ8_1>("q8_1", src, reinterpret_cast<unsigned char*>(dst), n);
}

void quantize_row_q8_k(const float* src, BlockQ8_K* dst, std::int64_t n) {
  quantize_blocks<BlockQ8_K>("q8_k", src, reinterpret_cast<unsigned char*>(dst), n);
}

void quantize_row_iq4_nl(const float* src, BlockIQ4_NL* dst, std::int64_t n, int tries) {
  quantize_iq4_nl_row(src, reinterpret_cast<unsigned char*>(dst), n, tries);
}

}  // namespace ladder
