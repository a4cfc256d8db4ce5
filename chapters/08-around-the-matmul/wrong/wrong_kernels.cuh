// Broken operations: one bug each, and the checks must reject them all. Those without a bug are the control: the checks
// must accept them, so it is the bug that they reject.
#pragma once

#include "chapters/08-around-the-matmul/operations.hpp"
#include "kernels/device/cuda.cuh"

namespace ladder::wrong {

using chapter08::Point;
using chapter08::View;

/// What a plain attention may get wrong.
struct RightAttention {
  static __device__ int positions(int first, int t, int) { return first + t + 1; }
  static __device__ int kv_head(int h, const HeadShape& s) { return h / (s.heads / s.kv_heads); }
  static __device__ double scale(int head_dim) { return 1 / sqrt(static_cast<double>(head_dim)); }
  static __device__ double keep(double sum) { return sum; }
};
struct FutureSeen : RightAttention {
  static __device__ int positions(int first, int, int nt) { return first + nt; }
};
struct NewestForgotten : RightAttention {
  static __device__ int positions(int first, int t, int) { return first + t; }
};
struct ScaleForgotten : RightAttention {
  static __device__ double scale(int) { return 1; }
};
struct HeadsInterleaved : RightAttention {
  static __device__ int kv_head(int h, const HeadShape& s) { return h % s.kv_heads; }
};
struct SumsInHalf : RightAttention {
  static __device__ double keep(double sum) { return __half2float(__float2half_rn(static_cast<float>(sum))); }
};

/// A thread an output, all of the softmax in each.
template <class Bug>
__global__ void attention(const float* q, const __half* keys, const __half* values, float* out, int nt,
                          const int* first, HeadShape s) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= nt * s.q_length()) return;
  const int t = i / s.q_length(), h = i % s.q_length() / s.head_dim, e = i % s.head_dim;
  const int positions = Bug::positions(*first, t, nt), g = Bug::kv_head(h, s);
  const float* query = q + t * s.q_length() + h * s.head_dim;
  double total = 0, sum = 0;
  for (int p = 0; p < positions; ++p) {
    const __half* key = keys + p * s.kv_length() + g * s.head_dim;
    double score = 0;
    for (int k = 0; k < s.head_dim; ++k) score += static_cast<double>(query[k]) * __half2float(key[k]);
    const double weight = exp(score * Bug::scale(s.head_dim));
    total = Bug::keep(total + weight);
    sum = Bug::keep(sum + weight * __half2float(values[p * s.kv_length() + g * s.head_dim + e]));
  }
  out[i] = static_cast<float>(sum / total);
}
template <class Bug>
Status run_attention(const Point& p, const View& v, Stream& stream) {
  const auto blocks = static_cast<unsigned>((p.nt * p.heads().q_length() + 127) / 128);
  return launch(attention<Bug>, dim3(blocks), dim3(128), 0, stream, v.x, v.keys, v.values, v.out, p.nt,
                v.position, p.heads());
}

/// What a plain rotation may get wrong: its position, which elements are a pair, what is rotated.
struct RightRotation {
  static constexpr int kLater = 0;
  static constexpr bool kNeighbours = false, kValues = false;
};
struct PositionOffByOne : RightRotation {
  static constexpr int kLater = 1;
};
struct NeighboursPaired : RightRotation {
  static constexpr bool kNeighbours = true;
};
struct ValuesRotated : RightRotation {
  static constexpr bool kValues = true;
};

/// A thread a pair of a head of q, k or v.
template <class Bug>
__global__ void rotate(View x, int nt, HeadShape s) {
  const int half = s.head_dim / 2, heads = s.heads + 2 * s.kv_heads;
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (index >= nt * heads * half) return;
  const int i = index % half, h = index / half % heads, t = index / half / heads, position = *x.position + t;
  const bool query = h < s.heads, value = h >= s.heads + s.kv_heads;
  const int head = query ? h : value ? h - s.heads - s.kv_heads : h - s.heads;
  float* from = query ? x.x + t * s.q_length() : (value ? x.v : x.k) + t * s.kv_length();
  from += head * s.head_dim;
  const int low = Bug::kNeighbours ? 2 * i : i, high = Bug::kNeighbours ? 2 * i + 1 : i + half;
  const int angle = max(position - Bug::kLater, 0) * half + i;
  const bool turn = !value || Bug::kValues;
  const float c = turn ? x.cosines[angle] : 1.0f, d = turn ? x.sines[angle] : 0.0f;
  const float a = from[low], b = from[high];
  if (query) {
    from[low] = a * c - b * d;
    from[high] = b * c + a * d;
  } else {
    __half* to = (value ? x.values : x.keys) + position * s.kv_length() + head * s.head_dim;
    to[low] = __float2half_rn(a * c - b * d);
    to[high] = __float2half_rn(b * c + a * d);
  }
}
template <class Bug>
Status run_rotation(const Point& p, const View& v, Stream& stream) {
  const HeadShape s = p.heads();
  const auto blocks = static_cast<unsigned>((p.nt * (s.heads + 2 * s.kv_heads) * s.head_dim / 2 + 127) / 128);
  return launch(rotate<Bug>, dim3(blocks), dim3(128), 0, stream, v, p.nt, s);
}

/// What a plain normalisation may get wrong.
struct RightNorm {
  static __device__ int length(int d) { return d; }
  static __device__ double mean(double squares, int d) { return squares / d; }
};
struct MeanForgotten : RightNorm {
  static __device__ double mean(double squares, int) { return squares; }
};
struct TailDropped : RightNorm {
  static __device__ int length(int d) { return d - 1; }
};

template <class Bug>
__global__ void rms_norm(const float* x, const float* w, float* out, int nt, int d) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= nt * d) return;
  const float* row = x + i / d * d;
  double squares = 0;
  for (int k = 0; k < Bug::length(d); ++k) squares += static_cast<double>(row[k]) * row[k];
  out[i] = static_cast<float>(x[i] / sqrt(Bug::mean(squares, d) + chapter08::kEpsilon) * w[i % d]);
}
template <class Bug>
Status run_rms_norm(const Point& p, const View& v, Stream& stream) {
  const int d = p.size->d_model;
  return launch(rms_norm<Bug>, dim3(static_cast<unsigned>((p.nt * d + 127) / 128)), dim3(128), 0, stream, v.x,
                v.w, v.out, p.nt, d);
}

/// The gate without itself: a sigmoid where silu should be.
__global__ void sigmoid_gate(const float* gate, const float* up, float* out, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) out[i] = up[i] / (1.0f + expf(-gate[i]));
}
inline Status run_sigmoid_gate(const Point& p, const View& v, Stream& stream) {
  const int n = p.nt * p.size->d_ff;
  return launch(sigmoid_gate, dim3(static_cast<unsigned>((n + 127) / 128)), dim3(128), 0, stream, v.x, v.y,
                v.out, n);
}

/// Nothing at all: what was in the output stays there.
inline Status run_nothing(const Point&, const View&, Stream&) { return {}; }

}  // namespace ladder::wrong
