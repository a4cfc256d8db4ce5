// The code of transformer_kernels.hpp, compiled once for each instruction set. The file that includes this
// one defines
//   LADDER_TARGET   the target attribute of every function
//   Floats          a vector of 16 floats, with load, load_halves, store, store_halves, all, add, sub, mul,
// div,
//                   madd(a, b, c) = a * b + c, larger, smaller, nearest, times_power(x, n) = x * 2^n,
// first_or(v, n, other) in ladder::cpu's unnamed namespace.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/transformer_kernels.hpp"

namespace ladder::cpu {
namespace {

#define LADDER_TARGET_INLINE LADDER_TARGET inline __attribute__((always_inline))

constexpr int kLanes = 16;

// The lanes as a fixed tree: 16 -> 8 -> 4 -> 2 -> 1.
LADDER_TARGET_INLINE float sum_of_lanes(Floats v) {
  alignas(64) float lane[kLanes];
  store(lane, v);
  for (int n = kLanes / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) lane[i] += lane[i + n];
  }
  return lane[0];
}
/// A NaN in any lane makes the result one.
LADDER_TARGET_INLINE float largest_lane(Floats v) {
  alignas(64) float lane[kLanes];
  store(lane, v);
  float largest = lane[0];
  for (int i = 1; i < kLanes; ++i) largest = lane[i] <= largest ? largest : lane[i];
  return largest;
}

/// e^x, within 2^-21 of it relatively for -87 <= x <= 88; below and above as at these ends. A NaN stays one.
///   x = n ln 2 + r, |r| <= ln 2 / 2, and e^r by its series up to r^7 / 7!, which leaves out less than 6e-9.
LADDER_TARGET_INLINE Floats exponential(Floats x) {
  constexpr float kLog2E = 1.44269504F;
  constexpr float kLn2High = 0.693359375F;       // ten bits: its product with n is exact
  constexpr float kLn2Low = -2.12194440055e-4F;  // ln 2 - kLn2High
  x = smaller(all(88.0F), larger(all(-87.0F), x));
  const Floats n = nearest(mul(x, all(kLog2E)));
  const Floats r = madd(n, all(-kLn2Low), madd(n, all(-kLn2High), x));
  Floats y = all(1.0F / 5040);
  y = madd(y, r, all(1.0F / 720));
  y = madd(y, r, all(1.0F / 120));
  y = madd(y, r, all(1.0F / 24));
  y = madd(y, r, all(1.0F / 6));
  y = madd(y, r, all(0.5F));
  y = madd(y, r, all(1.0F));
  y = madd(y, r, all(1.0F));
  return times_power(y, n);
}

/// Calls f(at, count) for pieces of 16 and a rest.
template <class F>
LADDER_TARGET_INLINE void by_sixteens(long long count, F&& f) {
  long long i = 0;
  for (; i + kLanes <= count; i += kLanes) f(i, kLanes);
  if (i < count) f(i, static_cast<int>(count - i));
}
LADDER_TARGET_INLINE Floats load_some(const float* p, int count) {
  if (count == kLanes) return load(p);
  alignas(64) float some[kLanes] = {};
  std::copy_n(p, count, some);
  return load(some);
}
LADDER_TARGET_INLINE void store_some(float* p, Floats v, int count) {
  if (count == kLanes) return store(p, v);
  alignas(64) float some[kLanes];
  store(some, v);
  std::copy_n(some, count, p);
}

LADDER_TARGET void rms_norm_row(const float* x, const float* weight, float* out, long long d, float epsilon) {
  Floats squares = all(0);
  by_sixteens(d, [&](long long i, int count) LADDER_TARGET {
    const Floats v = load_some(x + i, count);
    squares = madd(v, v, squares);
  });
  const float scale = 1 / std::sqrt(sum_of_lanes(squares) / static_cast<float>(d) + epsilon);
  by_sixteens(d, [&](long long i, int count) LADDER_TARGET {
    store_some(out + i, mul(mul(load_some(x + i, count), all(scale)), load_some(weight + i, count)), count);
  });
}

LADDER_TARGET void add_row(float* x, const float* y, long long count) {
  by_sixteens(count, [&](long long i, int n) LADDER_TARGET {
    store_some(x + i, add(load_some(x + i, n), load_some(y + i, n)), n);
  });
}

LADDER_TARGET void swiglu_row(float* gate, const float* up, long long count) {
  by_sixteens(count, [&](long long i, int n) LADDER_TARGET {
    const Floats g = load_some(gate + i, n);
    const Floats silu = div(g, add(all(1), exponential(sub(all(0), g))));
    store_some(gate + i, mul(silu, load_some(up + i, n)), n);
  });
}

LADDER_TARGET void rotate_head(float* head, const float* cosines, const float* sines, int head_dim) {
  const int half = head_dim / 2;
  by_sixteens(half, [&](long long i, int n) LADDER_TARGET {
    const Floats a = load_some(head + i, n), b = load_some(head + half + i, n);
    const Floats c = load_some(cosines + i, n), s = load_some(sines + i, n);
    store_some(head + i, sub(mul(a, c), mul(b, s)), n);
    store_some(head + half + i, add(mul(a, s), mul(b, c)), n);
  });
}

LADDER_TARGET void to_halves(const float* x, std::uint16_t* out, long long count) {
  by_sixteens(count, [&](long long i, int n) LADDER_TARGET {
    alignas(64) std::uint16_t halves[kLanes];
    store_halves(halves, load_some(x + i, n));
    std::copy_n(halves, n, out + i);
  });
}

// Attention -------------------------------------------------------------------------------------------------

LADDER_TARGET_INLINE Floats load_kv(const float* p) { return load(p); }
LADDER_TARGET_INLINE Floats load_kv(const std::uint16_t* p) { return load_halves(p); }

/// Scores of some heads with some blocks of 16 positions.
/// @param scores [H][kPiecePositions], at the first block
template <class KV, int H, int Blocks>
LADDER_TARGET_INLINE void score_blocks(const float* q, const KV* keys, int head_dim, float* scores) {
  Floats sum[H][Blocks];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
    for (int b = 0; b < Blocks; ++b) sum[h][b] = all(0);
  }
  for (int d = 0; d < head_dim; ++d) {
    Floats k[Blocks];
#pragma GCC unroll 4
    for (int b = 0; b < Blocks; ++b) k[b] = load_kv(keys + (b * head_dim + d) * kLanes);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const Floats one = all(q[h * head_dim + d]);
#pragma GCC unroll 4
      for (int b = 0; b < Blocks; ++b) sum[h][b] = madd(one, k[b], sum[h][b]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
    for (int b = 0; b < Blocks; ++b) store(scores + h * kPiecePositions + kLanes * b, sum[h][b]);
  }
}

/// weighted[h] = sum over positions of p[h][position] * value, for Vectors * 16 elements of the values.
template <class KV, int H, int Vectors>
LADDER_TARGET_INLINE void weigh(const float* p, const KV* values, int value_length, int count,
                                float* weighted) {
  Floats sum[H][Vectors];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sum[h][v] = all(0);
  }
  for (int i = 0; i < count; ++i) {
    Floats value[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) value[v] = load_kv(values + i * value_length + kLanes * v);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const Floats one = all(p[h * kPiecePositions + i]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[h][v] = madd(one, value[v], sum[h][v]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(weighted + h * value_length + kLanes * v, sum[h][v]);
  }
}

/// Scores become exp(score - largest), zero beyond count.
LADDER_TARGET_INLINE PieceResult softmax_piece(float* scores, int count) {
  const float infinity = std::numeric_limits<float>::infinity();
  Floats most = all(-infinity);
  by_sixteens(count, [&](long long i, int n)
                         LADDER_TARGET { most = larger(first_or(load(scores + i), n, -infinity), most); });
  const float largest = largest_lane(most);
  Floats sum = all(0);
  by_sixteens(count, [&](long long i, int n) LADDER_TARGET {
    const Floats p = first_or(exponential(sub(load(scores + i), all(largest))), n, 0);
    store(scores + i, p);
    sum = add(sum, p);
  });
  return {largest, sum_of_lanes(sum)};
}

template <class KV, int H>
LADDER_TARGET void attend(const AttentionPiece& piece, int head) {
  alignas(64) float scores[H][kPiecePositions];
  const int count = piece.last - piece.first, blocks = (count + kLanes - 1) / kLanes;
  const float* q = piece.q + head * piece.head_dim;
  const KV* keys =
      static_cast<const KV*>(piece.keys) + static_cast<std::size_t>(piece.first) * piece.head_dim;
  const KV* values =
      static_cast<const KV*>(piece.values) + static_cast<std::size_t>(piece.first) * piece.value_length;
  float* weighted = piece.weighted + static_cast<std::size_t>(head) * piece.value_length;
  // 1. Scores of 64 positions at a time, then of 16.
  int block = 0;
  for (; block + 4 <= blocks; block += 4) {
    score_blocks<KV, H, 4>(q, keys + block * kLanes * piece.head_dim, piece.head_dim,
                           &scores[0][kLanes * block]);
  }
  for (; block < blocks; ++block) {
    score_blocks<KV, H, 1>(q, keys + block * kLanes * piece.head_dim, piece.head_dim,
                           &scores[0][kLanes * block]);
  }
  // 2. Softmax of the piece alone; what the other pieces have is made up for when they are combined.
  for (int h = 0; h < H; ++h) piece.results[head + h] = softmax_piece(scores[h], count);
  // 3. Values of 64 elements at a time, then of 16.
  int at = 0;
  for (; at + 4 * kLanes <= piece.value_length; at += 4 * kLanes) {
    weigh<KV, H, 4>(scores[0], values + at, piece.value_length, count, weighted + at);
  }
  for (; at < piece.value_length; at += kLanes) {
    weigh<KV, H, 1>(scores[0], values + at, piece.value_length, count, weighted + at);
  }
}

template <class KV>
LADDER_TARGET void attention_piece(const AttentionPiece& piece) {
  int head = 0;
  for (; head + 4 <= piece.group; head += 4) attend<KV, 4>(piece, head);
  switch (piece.group - head) {
    case 3:
      attend<KV, 3>(piece, head);
      break;
    case 2:
      attend<KV, 2>(piece, head);
      break;
    case 1:
      attend<KV, 1>(piece, head);
      break;
    default:
      break;
  }
}

LADDER_TARGET void combine_pieces(const PieceResult* results, long long result_stride, const float* weighted,
                                  long long weighted_stride, int pieces, float* out, int head_dim) {
  float largest = results[0].largest;
  for (int i = 1; i < pieces; ++i) {
    const float next = results[i * result_stride].largest;
    largest = next <= largest ? largest : next;  // a NaN wins
  }
  // 1. The sum of exponentials over all pieces, in order.
  Floats sum = all(0);
  for (int i = 0; i < pieces; ++i) {
    const PieceResult& piece = results[i * result_stride];
    sum = madd(all(piece.sum), exponential(all(piece.largest - largest)), sum);
  }
  // 2. Values likewise, and divided by it.
  by_sixteens(head_dim, [&](long long d, int n) LADDER_TARGET {
    Floats v = all(0);
    for (int i = 0; i < pieces; ++i) {
      const Floats factor = exponential(all(results[i * result_stride].largest - largest));
      v = madd(load(weighted + i * weighted_stride + d), factor, v);
    }
    store_some(out + d, div(v, sum), n);
  });
}

}  // namespace
}  // namespace ladder::cpu

#define LADDER_TRANSFORMER_KERNELS                                                         \
  {                                                                                        \
    .rms_norm = rms_norm_row, .add = add_row, .swiglu = swiglu_row, .rotate = rotate_head, \
    .to_halves = to_halves, .piece_f16 = attention_piece<std::uint16_t>,                   \
    .piece_f32 = attention_piece<float>, .combine = combine_pieces                         \
  }
