// How chapter 08's operations are checked, timed and counted: they are no matmuls, and their records have the model's size,
// the number of tokens and the depth among the parameters instead of a shape.
//
//   around_the_matmul --rung attention_decode --model 7b --depth 1,1024,4096
//   around_the_matmul --rung attention_prefill,attention_f32 --model 0.5b,7b --nt 64,512
//   around_the_matmul --compare attention_two_launches,attention_decode --model 7b --depth 1024
//
// The depth is the number of positions that the last of the nt tokens sees, itself included.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "harness/experiment/check.hpp"
#include "harness/experiment/main.hpp"
#include "harness/experiment/qwen_shapes.hpp"
#include "kernels/attention/attention_decode.cuh"
#include "kernels/attention/attention_f32.cuh"
#include "kernels/attention/attention_prefill.cuh"
#include "kernels/attention/attention_reference.hpp"
#include "kernels/elementwise/rope_store.cuh"
#include "kernels/elementwise/sample_reference.hpp"
#include "kernels/mmvq/tile_acts.cuh"
#include "kernels/quant/quantize_acts.hpp"

namespace ladder::chapter08 {

inline constexpr const char* kChapter = "08-around-the-matmul";
inline constexpr float kEpsilon = 1e-6f;
inline constexpr double kU = kUnitRoundoffF32;

inline std::size_t count(long long n) { return static_cast<std::size_t>(n); }

/// What an operation is run for: nt tokens of a model, the last of which sees `depth` positions.
struct Point {
  const QwenSize* size;
  int nt, depth;
  [[nodiscard]] HeadShape heads() const { return {size->heads, size->kv_heads, size->head_dim()}; }
  [[nodiscard]] int first() const { return depth - nt; }
};

/// Elements of the operands.
struct Sizes {
  std::size_t x = 0, y = 0, w = 0;  ///< f32: rows, rows, a vector
  std::size_t k = 0;                ///< f32: new keys, and as many new values; with tables of angles
  std::size_t kv = 0;               ///< f16: a cache of keys, and one of values
  std::size_t out = 0;              ///< f32
  std::size_t planes = 0;           ///< bytes
  std::size_t ids = 0;              ///< int32
  bool x_twice = false;             ///< x is written as well
  bool reads_cache = true;          ///< the whole cache is read, not only added to
};

/// Where the operands of a launch are.
struct View {
  float *x = nullptr, *y = nullptr, *w = nullptr, *k = nullptr, *v = nullptr, *out = nullptr;
  float *cosines = nullptr, *sines = nullptr;
  __half *keys = nullptr, *values = nullptr;
  unsigned char *planes = nullptr, *workspace = nullptr;
  int *position = nullptr, *ids = nullptr;
};

/// The operands on the host.
struct Host {
  std::vector<float> x, y, w, k, v, out, cosines, sines;
  std::vector<__half> keys, values;
  std::vector<unsigned char> planes;
  std::vector<int> ids;
};

struct Operation {
  std::string id, title;
  std::string source;           ///< see Rung::source
  bool one_token = false;       ///< nt = 1 only
  bool attends = false;         ///< the depth matters
  bool draws = false;           ///< the position is an operand
  bool two_launches = false;    ///< the emulator counts one at a time, so it only checks
  bool needs_clusters = false;  ///< says nothing where there are none
  int most_rows = 1 << 20;      ///< nt beyond which it is of no interest
  MathUnit unit = MathUnit::f32;
  Sizes (*sizes)(const Point&) = nullptr;
  double (*flop)(const Point&) = nullptr;
  std::size_t (*workspace)(const Point&,
                           int sms) = nullptr;  ///< bytes, zero before the first use; null for none
  Status (*run)(const Point&, const View&, Stream&) = nullptr;
  /// What is wrong with one run; empty if nothing is.
  std::string (*check)(const Point&, const Host& before, const Host& after) = nullptr;

  [[nodiscard]] bool takes(const Point& p) const {
    return p.nt <= p.depth && (!one_token || p.nt == 1) && p.nt <= most_rows;
  }
};

/// Bytes that one run must read and write, each operand once.
inline double moved_bytes(const Operation& o, const Point& p) {
  const Sizes s = o.sizes(p);
  const double rows =
      static_cast<double>(s.x) * (s.x_twice ? 2 : 1) + static_cast<double>(s.y + s.w + 2 * s.k + s.out);
  const double tables = s.k > 0 ? static_cast<double>(p.nt) * p.heads().head_dim : 0;
  const double cache = s.reads_cache ? static_cast<double>(2 * s.kv) : 2.0 * p.nt * p.heads().kv_length();
  return 4 * (rows + tables) + (s.kv > 0 ? 2 * cache : 0) + static_cast<double>(s.planes + 4 * s.ids);
}

/// @param rotates new keys and values come with the call, and tables of angles
inline Sizes attention_sizes(const Point& p, bool rotates) {
  const HeadShape h = p.heads();
  const std::size_t rows = count(p.nt) * count(h.q_length());
  return {.x = rows,
          .k = rotates ? count(p.nt) * count(h.kv_length()) : 0,
          .kv = count(p.depth) * count(h.kv_length()),
          .out = rows};
}
inline double attention_flop(const Point& p) {
  double positions = 0;
  for (int t = 0; t < p.nt; ++t) positions += p.first() + t + 1;
  return 4.0 * p.heads().q_length() * positions;
}

template <bool CLUSTERS>
Status run_decode(const Point& p, const View& v, Stream& s) {
  AttentionDecode<__half> a;
  a.q = v.x, a.k = v.k, a.v = v.v, a.cosines = v.cosines, a.sines = v.sines;
  a.keys = v.keys, a.values = v.values, a.position = v.position, a.out = v.out, a.planes = v.planes;
  a.workspace = v.workspace, a.shape = p.heads(), a.context = p.depth;
  const int cluster = CLUSTERS ? most_cluster_blocks() : 1;
  return launch_attention_decode(a, s, false,
                                 attention_decode_plan(a.shape, a.context, multiprocessor_count(), cluster));
}

// Checks ----------------------------------------------------------------------------------------------------------------

/// The first two, the middle one and the last of n things.
inline std::vector<int> some(int n) {
  std::vector<int> all = {0, std::min(1, n - 1), n / 2, n - 1};
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

inline std::string differs(const char* what, std::size_t i, double got, double want, double bound) {
  return std::string(what) + "[" + std::to_string(i) + "] is " + std::to_string(got) + ", expected " +
         std::to_string(want) + " within " + std::to_string(bound);
}
inline bool within(double got, double want, double bound) {
  return std::isfinite(got) && std::fabs(got - want) <= bound;
}

inline std::string check_rms_norm(const Point& p, const Host& before, const Host& after) {
  const std::size_t d = count(p.size->d_model);
  for (const int t : some(p.nt)) {
    const float* row = before.x.data() + count(t) * d;
    double squares = 0;
    for (std::size_t i = 0; i < d; ++i) squares += static_cast<double>(row[i]) * row[i];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(d) + kEpsilon);
    for (std::size_t i = 0; i < d; ++i) {
      const double want = row[i] * scale * before.w[i];
      // Half the roundings of a sum of positive terms (a thread's, then the butterfly and the warps'), and six more.
      const double bound = ((static_cast<double>(d) / 256 + 15) / 2 + 6) * kU * std::fabs(want);
      const std::size_t at = count(t) * d + i;
      if (!within(after.out[at], want, bound)) return differs("out", at, after.out[at], want, bound);
    }
  }
  return "";
}

inline std::string check_sums(const Host& before, const Host& after, const auto& other) {
  for (std::size_t i = 0; i < before.x.size(); ++i) {
    const float want = before.x[i] + other(i);
    if (!(after.x[i] == want)) return differs("x", i, after.x[i], want, 0);
  }
  return "";
}
inline std::string check_add_bias(const Point& p, const Host& before, const Host& after) {
  return check_sums(before, after, [&](std::size_t i) { return before.w[i % count(p.size->d_model)]; });
}
inline std::string check_add_residual(const Point&, const Host& before, const Host& after) {
  return check_sums(before, after, [&](std::size_t i) { return before.y[i]; });
}

inline std::string check_swiglu(const Point&, const Host& before, const Host& after) {
  for (std::size_t i = 0; i < before.x.size(); ++i) {
    const double g = before.x[i], want = g / (1 + std::exp(-g)) * before.y[i];
    const double bound =
        8 * kU * std::fabs(want);  // the exponential is good to two units; sum, quotient and product
    if (!within(after.out[i], want, bound)) return differs("out", i, after.out[i], want, bound);
  }
  return "";
}

inline std::string check_argmax(const Point& p, const Host& before, const Host& after) {
  const std::size_t n = count(p.size->vocab);
  for (int t = 0; t < p.nt; ++t) {
    const float* row = before.x.data() + count(t) * n;
    const auto want = static_cast<int>(std::max_element(row, row + n) - row);  // the first of equals
    if (after.ids[count(t)] != want) {
      return "row " + std::to_string(t) + " has its largest logit at " + std::to_string(want) + ", not at " +
             std::to_string(after.ids[count(t)]);
    }
  }
  return "";
}

/// What chapter 09 draws with if nothing else is asked for.
inline constexpr SampleOptions kSample = {0.8f, 40, 0.95f, 0.05f, 1};

inline std::string check_sample(const Point& p, const Host& before, const Host& after) {
  for (int t = 0; t < p.nt; ++t) {
    const float* row = before.x.data() + count(t) * count(p.size->vocab);
    const int want =
        sample_reference(row, p.size->vocab, kSample, static_cast<std::uint64_t>(p.first()) + count(t));
    if (after.ids[count(t)] != want) {
      return "row " + std::to_string(t) + " must draw token " + std::to_string(want) + ", not " +
             std::to_string(after.ids[count(t)]);
    }
  }
  return "";
}

/// Elements i and i + head_dim/2 of a row's head, rotated by the angles of a position; and the magnitudes of the terms.
struct RotatedPair {
  double low, high, low_terms, high_terms;
};
inline RotatedPair rotated(const float* head, int i, int position, const HeadShape& h, const Host& tables) {
  const std::size_t angle = count(position) * count(h.head_dim / 2) + count(i);
  const double a = head[i], b = head[i + h.head_dim / 2], c = tables.cosines[angle], d = tables.sines[angle];
  return {a * c - b * d, b * c + a * d, std::fabs(a * c) + std::fabs(b * d),
          std::fabs(b * c) + std::fabs(a * d)};
}

/// The rows of the caches that are new: keys rotated, values as they came, both rounded to f16.
inline std::string check_new_rows(const Point& p, const Host& before, const Host& after) {
  const HeadShape h = p.heads();
  constexpr double kF16 = 0x1p-11, kSmallest = 0x1p-25;
  for (const int t : some(p.nt)) {
    const std::size_t at = count(p.first() + t) * count(h.kv_length());
    for (int g = 0; g < h.kv_heads; ++g) {
      const std::size_t in_row = count(g * h.head_dim);
      const float* k = before.k.data() + count(t) * count(h.kv_length()) + in_row;
      const float* v = before.v.data() + count(t) * count(h.kv_length()) + in_row;
      for (int i = 0; i < h.head_dim / 2; ++i) {
        const RotatedPair r = rotated(k, i, p.first() + t, h, before);
        const std::size_t low = at + in_row + count(i), high = low + count(h.head_dim / 2);
        const double low_bound = kF16 * std::fabs(r.low) + 4 * kU * r.low_terms + kSmallest;
        const double high_bound = kF16 * std::fabs(r.high) + 4 * kU * r.high_terms + kSmallest;
        const double got_low = __half2float(after.keys[low]), got_high = __half2float(after.keys[high]);
        if (!within(got_low, r.low, low_bound)) return differs("keys", low, got_low, r.low, low_bound);
        if (!within(got_high, r.high, high_bound)) return differs("keys", high, got_high, r.high, high_bound);
      }
      for (int i = 0; i < h.head_dim; ++i) {
        const std::size_t to = at + in_row + count(i);
        const double got = __half2float(after.values[to]), want = __half2float(__float2half_rn(v[i]));
        if (!within(got, want, 0)) return differs("values", to, got, want, 0);
      }
    }
  }
  return "";
}

inline std::string check_rope_store(const Point& p, const Host& before, const Host& after) {
  const HeadShape h = p.heads();
  for (const int t : some(p.nt)) {
    for (int head = 0; head < h.heads; ++head) {
      const std::size_t at = count(t) * count(h.q_length()) + count(head * h.head_dim);
      for (int i = 0; i < h.head_dim / 2; ++i) {
        const RotatedPair r = rotated(before.x.data() + at, i, p.first() + t, h, before);
        const std::size_t low = at + count(i), high = low + count(h.head_dim / 2);
        if (!within(after.x[low], r.low, 3 * kU * r.low_terms))
          return differs("q", low, after.x[low], r.low, 3 * kU * r.low_terms);
        if (!within(after.x[high], r.high, 3 * kU * r.high_terms))
          return differs("q", high, after.x[high], r.high, 3 * kU * r.high_terms);
      }
    }
  }
  return check_new_rows(p, before, after);
}

enum class AttentionKernel { f32, two_launches, decode, prefill };

/// Outputs of some tokens and heads against float64, over the caches that are left behind.
template <AttentionKernel KERNEL>
std::string check_attention(const Point& p, const Host& before, const Host& after) {
  constexpr bool ROTATES = KERNEL == AttentionKernel::two_launches || KERNEL == AttentionKernel::decode;
  const HeadShape h = p.heads();
  if (ROTATES) {
    if (std::string wrong = check_new_rows(p, before, after); !wrong.empty()) return wrong;
  }
  const std::size_t length = count(h.head_dim);
  std::vector<double> q(length), terms(length);
  for (const int t : some(p.nt)) {
    const int positions = p.first() + t + 1;
    for (const int head : some(h.heads)) {
      const int g = head / (h.heads / h.kv_heads);
      const std::size_t at = count(t) * count(h.q_length()) + count(head) * length;
      const float* from = before.x.data() + at;
      for (int i = 0; i < h.head_dim / 2 && ROTATES; ++i) {
        const RotatedPair r = rotated(from, i, p.first() + t, h, before);
        const std::size_t low = count(i), high = low + length / 2;
        q[low] = r.low, q[high] = r.high, terms[low] = r.low_terms, terms[high] = r.high_terms;
      }
      for (std::size_t i = 0; i < length && !ROTATES; ++i) {
        q[i] = KERNEL == AttentionKernel::prefill ? attention_prefill_query(from[i], h.head_dim) : from[i];
        terms[i] = std::fabs(q[i]);
      }
      const auto element = [&](const std::vector<__half>& cache, int position, int i) {
        return static_cast<double>(
            __half2float(cache[count(position) * count(h.kv_length()) + count(g) * length + count(i)]));
      };
      const AttentionRow row = attention_row(
          q, terms, positions, [&](int position, int i) { return element(after.keys, position, i); },
          [&](int position, int i) { return element(after.values, position, i); });
      AttentionBound bound{};
      if (KERNEL == AttentionKernel::decode) {
        bound = attention_decode_bound(row, positions, h.head_dim);
      } else if (KERNEL == AttentionKernel::prefill) {
        bound = attention_prefill_bound(row, positions, h.head_dim);
      } else {
        bound = attention_f32_bound(row, positions);
        bound.relative +=
            KERNEL == AttentionKernel::two_launches ? 12 * kU * row.terms : 0;  // rotated in f32
      }
      const std::string wrong = compare_row(std::span(after.out).subspan(at, length), row, bound);
      if (!wrong.empty()) return "token " + std::to_string(t) + " head " + std::to_string(head) + wrong;
    }
  }
  if (KERNEL == AttentionKernel::decode) {
    std::vector<BlockQ8Pad40> blocks(count(h.q_length() / kQ8ActsPerBlock));
    quantize_q8_pad40_row(after.out, blocks.data());
    if (tile_acts::from_blocks(blocks.data(), 1, h.q_length()) != after.planes)
      return "the int8 planes are not those of the floats";
  }
  return "";
}

// Operands --------------------------------------------------------------------------------------------------------------

/// Reals in [-1, 1) as halves.
static __global__ void __launch_bounds__(256) fill_halves(__half* out, unsigned long long n, unsigned seed) {
  const unsigned long long step = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  for (unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
       i += step)
    out[i] = __float2half_rn(fill_value(FillKind::uniform, seed, i));
}

/// Operands of one point, `sets` times over, so that a launch can find its own in no cache.
class Arrays {
 public:
  Arrays(const Operation& o, const Point& p, int sets, Stream& stream) : size_(o.sizes(p)), sets_(sets) {
    const auto make = [&](std::size_t n, const char* name, unsigned seed) {
      Buffer<float> b(n * count(sets), name);
      if (n > 0) fill(b.data(), b.size(), FillKind::uniform, seed, stream);
      return b;
    };
    x_ = make(padded(size_.x), "x", 1), y_ = make(padded(size_.y), "y", 2),
    w_ = make(padded(size_.w), "w", 3);
    k_ = make(padded(size_.k), "new keys", 4), v_ = make(padded(size_.k), "new values", 5);
    out_ = Buffer<float>(padded(size_.out) * count(sets), "out");
    if (out_.size() > 0) out_.fill_bytes(0xFF);
    for (auto* cache : {&keys_, &values_}) {
      *cache = Buffer<__half>(padded(size_.kv) * count(sets), cache == &keys_ ? "keys" : "values");
      if (cache->size() == 0) continue;
      require(launch(fill_halves, dim3(256), dim3(256), 0, stream, cache->data(), cache->size(),
                     cache == &keys_ ? 6u : 7u));
    }
    planes_ = Buffer<unsigned char>(padded(size_.planes) * count(sets), "int8 planes");
    if (planes_.size() > 0) planes_.fill_bytes(0xFF);
    ids_ = Buffer<int>(padded(size_.ids) * count(sets), "ids");
    workspace_ = Buffer<unsigned char>(o.workspace == nullptr ? 0 : o.workspace(p, multiprocessor_count()),
                                       "workspace");
    if (workspace_.size() > 0) workspace_.fill_bytes(0);
    if (!o.attends && !o.draws) return;
    position_ = Buffer<int>(1, "position");
    const int first[] = {p.first()};
    position_.upload(first);
    if (size_.k == 0) return;
    // The angles of the model's rotary embedding, base 1e6.
    const int half = p.heads().head_dim / 2;
    std::vector<float> c(count(p.depth) * count(half)), d(c.size());
    for (int at = p.first(); at < p.depth; ++at) {
      for (int i = 0; i < half; ++i) {
        const double angle = at * std::pow(1e6, -static_cast<double>(i) / half);
        c[count(at) * count(half) + count(i)] = static_cast<float>(std::cos(angle));
        d[count(at) * count(half) + count(i)] = static_cast<float>(std::sin(angle));
      }
    }
    cosines_ = Buffer<float>(c.size(), "cosines"), sines_ = Buffer<float>(d.size(), "sines");
    cosines_.upload(c), sines_.upload(d);
    stream.synchronize();
  }

  [[nodiscard]] int sets() const { return sets_; }
  View view(int set) {
    const std::size_t n = count(set);
    View v;
    v.x = x_.data() + n * padded(size_.x), v.y = y_.data() + n * padded(size_.y),
    v.w = w_.data() + n * padded(size_.w);
    v.k = k_.data() + n * padded(size_.k), v.v = v_.data() + n * padded(size_.k);
    v.out = out_.data() + n * padded(size_.out);
    v.keys = keys_.data() + n * padded(size_.kv), v.values = values_.data() + n * padded(size_.kv);
    v.planes = planes_.data() + n * padded(size_.planes), v.ids = ids_.data() + n * padded(size_.ids);
    v.cosines = cosines_.data(), v.sines = sines_.data(), v.position = position_.data();
    v.workspace = workspace_.data();
    return v;
  }
  /// Set 0 on the host.
  [[nodiscard]] Host host() const {
    const auto down = [](const auto& buffer, std::size_t n) {
      std::vector<std::remove_cvref_t<decltype(*buffer.data())>> all(n);
      if (n > 0) buffer.download(all);
      return all;
    };
    Host h;
    h.x = down(x_, size_.x), h.y = down(y_, size_.y), h.w = down(w_, size_.w), h.k = down(k_, size_.k);
    h.v = down(v_, size_.k), h.out = down(out_, size_.out), h.keys = down(keys_, size_.kv);
    h.values = down(values_, size_.kv), h.planes = down(planes_, size_.planes), h.ids = down(ids_, size_.ids);
    h.cosines = down(cosines_, cosines_.size()), h.sines = down(sines_, sines_.size());
    return h;
  }

 private:
  /// Sets begin at multiples of 256 bytes.
  static std::size_t padded(std::size_t n) { return (n + 255) / 256 * 256; }

  Sizes size_;
  int sets_;
  Buffer<float> x_, y_, w_, k_, v_, out_, cosines_, sines_;
  Buffer<__half> keys_, values_;
  Buffer<unsigned char> planes_, workspace_;
  Buffer<int> position_, ids_;
};

/// What is wrong with one run on fresh operands; empty if nothing is.
inline std::string check(const Operation& o, const Point& p, Stream& stream) {
  Arrays arrays(o, p, 1, stream);
  stream.synchronize();
  const Host before = arrays.host();
  if (const Status s = o.run(p, arrays.view(0), stream); !s.ok()) return s.message();
  stream.synchronize();
  return o.check(p, before, arrays.host());
}

/// As many sets as are four last-level caches, as far as memory allows; one when hot.
inline Arrays make_arrays(const Operation& o, const Point& p, bool cold, Context& ctx) {
  const double each = moved_bytes(o, p) + 1024;
  const double wanted = std::ceil(4.0 * static_cast<double>(ctx.device.l2_bytes) / each);
  const double room = std::floor(ladder::detail::operand_budget(ctx) / (2 * each));
  if (room < 1) throw UsageError(o.id + ": not enough memory for this size");
  constexpr double kMost = 2000;  // launches of a graph
  return {o, p, cold ? static_cast<int>(std::max(1.0, std::min({wanted, room, kMost}))) : 1, ctx.stream};
}

inline DeviceSampler make_sampler(const Operation& o, const Point& p, Arrays& arrays, Context& ctx) {
  return {DeviceWorkload{[&o, p, &arrays](int set, Stream& s) { return o.run(p, arrays.view(set), s); },
                         arrays.sets()},
          ctx.stream};
}

// Running ---------------------------------------------------------------------------------------------------------------

/// What the command line asks for beside the options of all chapters.
struct Asked {
  Options options;
  std::vector<const QwenSize*> sizes;
  std::vector<int> depths;  ///< none: the default of each point
};

inline Record describe(const Operation& o, const Point& p, const Context& ctx) {
  Record r;
  r.rung = o.id;
  r.executor = ctx.executor;
  r.device = ctx.device.slug;
  r.params.add("size", p.size->name).add("nt", p.nt);
  if (o.attends) r.params.add("depth", p.depth);
  r.bytes_total = moved_bytes(o, p);
  r.work = Work{o.flop(p), "flop"};
  if (ctx.roofs.read_gbps > 0)
    r.roof = Roof{ctx.roofs.read_gbps, peak_gops(ctx.roofs, o.unit), "flop", "measured"};
  return r;
}

/// The points of an operation: what is asked for, or decoding at several depths and prompts of several lengths.
inline std::vector<Point> points(const Operation& o, const Asked& asked, Executor executor) {
  std::vector<Point> all;
  const bool counted = executor == Executor::emulator;
  std::vector<long long> nts = asked.options.nts;
  if (nts.empty())
    nts = counted ? std::vector<long long>{1, 3} : std::vector<long long>{1, 8, 16, 64, 512, 2048};
  for (const QwenSize* size : asked.sizes) {
    for (const long long nt : nts) {
      std::vector<int> depths = asked.depths;
      if (depths.empty()) {
        const auto n = static_cast<int>(nt);
        if (!o.attends) {
          depths = {n};
        } else if (counted) {
          depths = {n + 255};
        } else if (nt == 1) {
          depths = {1, 256, 1024, 4096, 16384};
        } else {
          depths = {n, n + 4096};
        }
      }
      for (const int depth : depths) {
        const Point p{size, static_cast<int>(nt), o.attends ? depth : static_cast<int>(nt)};
        const bool again = std::any_of(all.begin(), all.end(), [&](const Point& q) {
          return q.size == p.size && q.nt == p.nt && q.depth == p.depth;
        });
        if (o.takes(p) && !again) all.push_back(p);
      }
    }
  }
  return all;
}

inline std::string where(const Operation& o, const Point& p) {
  char text[160];
  std::snprintf(text, sizeof text, "%-24s %-5s nt %4d", o.id.c_str(), p.size->name, p.nt);
  return text + (o.attends ? ", depth " + std::to_string(p.depth) : std::string()) + ":";
}

#if !defined(__CUDACC__)
/// Counts one run on the emulator. Returns what its checks found wrong.
inline std::string count_run(const Operation& o, const Point& p, const Options& options, Context& ctx,
                             FILE* f, Record& record) {
  const emu::counting on;
  Arrays arrays(o, p, 1, ctx.stream);
  const Status status = o.run(p, arrays.view(0), ctx.stream);
  const emu::Counters c = emu::last_launch();
  record.counters_json = emu::record_json(c);
  if (options.report) std::fprintf(f, "%s\n", emu::text_report(c).c_str());
  if (options.annotate) std::fprintf(f, "%s\n", emu::annotated_source(c).c_str());
  if (!options.pictures.empty()) throw UsageError("--pictures is for matmuls");
  if (!c.findings.empty()) return c.findings.front().text;
  return status.ok() ? "" : status.message();
}
#endif

/// Prints and records one measurement.
inline void finish(const Operation& o, Record r, const TimeStats& time, const std::string& mode, Context& ctx,
                   RecordSink& sink) {
  r.mode = mode;
  r.time = time;
  judge(r, ctx);
  std::fprintf(sink.table(), " %-4s %10.2f us %8.1f GB/s", mode.c_str(), time.median / 1e3,
               r.moved_bytes() / time.median);
  if (o.unit == MathUnit::mma_f16)
    std::fprintf(sink.table(), " %7.2f TFLOP/s", r.work->count / time.median / 1e3);
  std::fprintf(sink.table(), "  -%.1f +%.1f %%%s%s\n", 100 * (1 - time.q1 / time.median),
               100 * (time.q3 / time.median - 1), r.why_not.empty() ? "" : "; INVALID: ", r.why_not.c_str());
  std::fflush(sink.table());
  sink.write(r);
}

/// Alternates two operations at one point. @return false if a check failed
inline bool compare(const Operation& a, const Operation& b, const Point& p, const Options& o, Context& ctx,
                    RecordSink& sink) {
  FILE* f = sink.table();
  for (const Operation* each : {&a, &b}) {
    if (const std::string wrong = check(*each, p, ctx.stream); !wrong.empty()) {
      std::fprintf(f, "%s CHECK FAILED, not timed: %s\n", where(*each, p).c_str(), wrong.c_str());
      return false;
    }
  }
  Arrays of_a = make_arrays(a, p, true, ctx), of_b = make_arrays(b, p, true, ctx);
  DeviceSampler sampler_a = make_sampler(a, p, of_a, ctx), sampler_b = make_sampler(b, p, of_b, ctx);
  const Comparison c =
      compare_interleaved([&] { return sampler_a.once(); }, [&] { return sampler_b.once(); }, o.measure);
  std::fprintf(f, "%s nt %d, depth %d: %s is %s than %s, ratio %.3f (quartiles %.3f to %.3f, %d pairs)\n",
               p.size->name, p.nt, p.depth, a.id.c_str(), c.verdict, b.id.c_str(), c.ratio.median, c.ratio.q1,
               c.ratio.q3, c.ratio.n);
  for (const bool first : {true, false}) {
    const Operation &self = first ? a : b, &other = first ? b : a;
    Record r = describe(self, p, ctx);
    r.params.add("compared_with", other.id)
        .add("ratio_median", first ? c.ratio.median : 1 / c.ratio.median)
        .add("ratio_q1", first ? c.ratio.q1 : 1 / c.ratio.q3)
        .add("ratio_q3", first ? c.ratio.q3 : 1 / c.ratio.q1);
    r.check_exact_case = true;
    std::fprintf(f, "%s", where(self, p).c_str());
    finish(self, r, first ? c.a : c.b, "cold", ctx, sink);
  }
  return true;
}

inline const Operation& find(const std::vector<Operation>& all, const std::string& id) {
  std::string known;
  for (const Operation& o : all) {
    if (o.id == id) return o;
    known += (known.empty() ? "" : ", ") + o.id;
  }
  throw UsageError("unknown rung '" + id + "'; this chapter has: " + known);
}

/// Checks, times or counts. @return the process exit status
inline int run(const std::vector<Operation>& all, const Asked& asked) {
  const Options& o = asked.options;
  Context ctx = make_context(o, false);
  if (ctx.executor == Executor::cpu)
    throw UsageError(
        "the operations of this chapter do not run on cpu: their CPU twins are parts of the engine");
  const bool timed = !o.check_only && ctx.executor != Executor::emulator;
  if (!o.compare_a.empty() && !timed)
    throw UsageError("--compare times kernels, and the emulator has no clock; use a CUDA build");
  std::vector<const Operation*> chosen;
  for (const std::string& id : o.rungs) chosen.push_back(&find(all, id));
  if (o.rungs.empty()) {
    for (const Operation& each : all) chosen.push_back(&each);
  }
  RecordSink sink(o.json_path);
  FILE* f = sink.table();
  if (timed) {
    ctx.roofs = measure_roofs(ctx);
    Rung tensor;  // a rung that needs the tensor cores' roof
    tensor.math = MathUnit::mma_f16;
    measure_tensor_roofs({&tensor}, ctx);
  }
  std::fprintf(f, "%s on %s (%s)", kChapter, ctx.device.name.c_str(), to_string(ctx.executor));
  if (timed) {
    std::fprintf(f, ": read roof %.1f GB/s, mma f16 %.1f TFLOP/s, both measured now", ctx.roofs.read_gbps,
                 ctx.roofs.mma_f16_gflops / 1e3);
  }
  std::fprintf(f, "\n");
  int failures = 0;
  if (!o.compare_a.empty()) {
    const Operation &a = find(all, o.compare_a), &b = find(all, o.compare_b);
    for (const Point& p : points(a, asked, ctx.executor)) {
      if (b.takes(p)) failures += compare(a, b, p, o, ctx, sink) ? 0 : 1;
    }
    return failures == 0 ? 0 : 1;
  }
  for (const Operation* each : chosen) {
    if (each->needs_clusters && most_cluster_blocks() == 1) {
      std::fprintf(f, "%-24s not run: there are no clusters here, and without them it is attention_decode\n",
                   each->id.c_str());
      continue;
    }
    const std::vector<Point> mine = points(*each, asked, ctx.executor);
    if (mine.empty() && !o.rungs.empty()) {
      throw UsageError(
          each->id + ": takes " +
          (each->one_token ? "one token" : "at most " + std::to_string(each->most_rows) + " tokens") +
          ", and a depth of at least the number of tokens");
    }
    for (const Point& p : mine) {
      if (const std::string wrong = check(*each, p, ctx.stream); !wrong.empty()) {
        ++failures;
        std::fprintf(f, "%s CHECK FAILED, not measured: %s\n", where(*each, p).c_str(), wrong.c_str());
        continue;
      }
      Record base = describe(*each, p, ctx);
      if (!timed) {
        std::string wrong;
#if !defined(__CUDACC__)
        if (!o.check_only && !each->two_launches) wrong = count_run(*each, p, o, ctx, f, base);
#endif
        std::fprintf(f, "%s %s\n", where(*each, p).c_str(),
                     wrong.empty() ? "within its bound" : ("FOUND " + wrong).c_str());
        failures += wrong.empty() ? 0 : 1;
        if (wrong.empty() && !base.counters_json.empty()) sink.write(base);
        continue;
      }
      for (const std::string& mode : o.modes.empty() ? std::vector<std::string>{"cold"} : o.modes) {
        Arrays arrays = make_arrays(*each, p, mode == "cold", ctx);
        DeviceSampler sampler = make_sampler(*each, p, arrays, ctx);
        const TimeStats time = sample([&] { return sampler.once(); }, o.measure);
        std::fprintf(f, "%s", where(*each, p).c_str());
        finish(*each, base, time, mode, ctx, sink);
      }
      // A kernel that was right when checked can still be wrong when hurried; fresh operands, after the hurry.
      if (const std::string wrong = check(*each, p, ctx.stream); !wrong.empty()) {
        ++failures;
        std::fprintf(f, "%s CHECK FAILED after timing: %s\n", where(*each, p).c_str(), wrong.c_str());
      }
    }
  }
  if (failures > 0) std::fprintf(f, "%d check(s) failed\n", failures);
  return failures == 0 ? 0 : 1;
}

/// Takes `--model` and `--depth` out of the arguments; a layer stands for its model.
inline Asked parse(std::vector<std::string> args) {
  Asked asked;
  const auto take = [&](const std::string& option) {
    const auto at = std::find(args.begin(), args.end(), option);
    if (at == args.end()) return std::vector<std::string>{};
    if (at + 1 == args.end()) throw UsageError(option + " needs a value");
    std::vector<std::string> parts = split_commas(at[1]);
    args.erase(at, at + 2);
    return parts;
  };
  std::vector<std::string> names = take("--model");
  for (const std::string& n : take("--depth"))
    asked.depths.push_back(static_cast<int>(parse_integer("--depth", n, 1, 1 << 20)));
  asked.options = parse_options(args);
  if (asked.options.od)
    throw UsageError("chapter 08 has no matmul shape: --model and --depth instead of --od and --id");
  for (const std::string& layer : asked.options.layer_names) {
    if (!find_qwen_layer(layer)) throw UsageError("unknown layer '" + layer + "'; --layers lists them");
    names.push_back(layer.substr(0, layer.rfind('.')));
  }
  if (names.empty()) names = {"0.5b", "7b"};
  for (const std::string& name : names) {
    const auto found =
        std::find_if(kQwenSizes.begin(), kQwenSizes.end(), [&](const QwenSize& s) { return s.name == name; });
    std::string known;
    for (const QwenSize& s : kQwenSizes) known += (known.empty() ? "" : ", ") + std::string(s.name);
    if (found == kQwenSizes.end()) throw UsageError("--model: '" + name + "' is not one of " + known);
    if (std::find(asked.sizes.begin(), asked.sizes.end(), &*found) == asked.sizes.end())
      asked.sizes.push_back(&*found);
  }
  return asked;
}

inline void print_list(const std::vector<Operation>& all) {
  for (const Operation& o : all) {
    std::printf("%s\n", JsonObject()
                            .add("rung", o.id)
                            .add("chapter", kChapter)
                            .add("title", o.title)
                            .raw("executors", "[" + json_quote(to_string(kDeviceExecutor)) + "]")
                            .add("source", o.source)
                            .str()
                            .c_str());
  }
}

/// The `main` of this chapter: exit status 0, 1 (a check or the device failed) or 2 (usage).
inline int main_of_chapter(const std::vector<Operation>& all, int argc, char** argv) {
  try {
    const std::vector<std::string> args(argv + 1, argv + argc);
    Asked asked = parse(args);
    if (asked.options.help) {
      std::printf(kUsage, argv[0]);
      std::printf(
          "of this chapter:\n"
          "  --model NAME[,NAME...]    sizes of Qwen2.5 (default 0.5b,7b); a layer stands for its model\n"
          "  --depth N[,N...]          positions that the last token sees, itself included\n");
      return 0;
    }
    if (asked.options.list) {
      print_list(all);
      return 0;
    }
    if (asked.options.layers) return 0;  // no matmul, no layers
    if (asked.options.device) {
      std::printf("%s\n", device_json(make_context(asked.options, false).device).c_str());
      return 0;
    }
    // There are many points: a fifth of the time for each is enough.
    if (std::find(args.begin(), args.end(), "--time-limit-ms") == args.end())
      asked.options.measure.time_limit_ms = 60;
    return run(all, asked);
  } catch (const UsageError& e) {
    std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
    return 1;
  }
}

}  // namespace ladder::chapter08
