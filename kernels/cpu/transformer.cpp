#include "kernels/cpu/transformer.hpp"

#include <algorithm>
#include <cmath>
#include <new>
#include <stdexcept>
#include <string>

#include "kernels/cpu/features.hpp"
#include "kernels/cpu/transformer_kernels.hpp"

namespace ladder::cpu {
namespace {

const TransformerKernels& kernels() {
  switch (isa()) {
#if defined(__x86_64__)
    case Isa::avx512:
      return kTransformerAvx512;
    case Isa::avx2:
      return kTransformerAvx2;
#endif
    default:  // NEON: the portable code as the compiler vectorises it
      return kTransformerPortable;
  }
}

// Calls f(begin, end) for ranges of rows, on one thread where there is less to do than waking the others
// costs.
template <class F>
void over_rows(long long rows, long long row_floats, ThreadPool& pool, F&& f) {
  constexpr long long kWorthForking = 1 << 14;  // floats: some microseconds
  if (rows * row_floats < kWorthForking || pool.size() == 1) return f(0, rows);
  const long long chunk = std::max(1LL, rows / (4LL * pool.size()));
  pool.parallel_for(rows, chunk, [&](long long begin, long long end, int) { f(begin, end); });
}

}  // namespace

void rms_norm(const float* x, const float* weight, float* out, long long d, float epsilon) {
  kernels().rms_norm(x, weight, out, d, epsilon);
}

void add_bias(float* x, const float* bias, long long nt, long long d, ThreadPool& pool) {
  const auto row = kernels().add;
  over_rows(nt, d, pool, [&](long long begin, long long end) {
    for (long long t = begin; t < end; ++t) row(x + t * d, bias, d);
  });
}

void add_residual(float* x, const float* y, long long count, ThreadPool& pool) {
  constexpr long long kRow = 1024;  // a multiple of 16 elements, so that vectors stay whole
  const auto add = kernels().add;
  over_rows((count + kRow - 1) / kRow, kRow, pool, [&](long long begin, long long end) {
    add(x + begin * kRow, y + begin * kRow, std::min(end * kRow, count) - begin * kRow);
  });
}

void swiglu(float* gate, const float* up, long long count) { kernels().swiglu(gate, up, count); }

void rope(float* x, const float* cosines, const float* sines, long long nt, int heads, int head_dim,
          ThreadPool& pool) {
  const auto rotate = kernels().rotate;
  const long long row = static_cast<long long>(heads) * head_dim;
  over_rows(nt, row, pool, [&](long long begin, long long end) {
    for (long long t = begin; t < end; ++t) {
      for (int h = 0; h < heads; ++h) {
        rotate(x + t * row + static_cast<long long>(h) * head_dim, cosines + t * (head_dim / 2),
               sines + t * (head_dim / 2), head_dim);
      }
    }
  });
}

// The cache
// ---------------------------------------------------------------------------------------------------

KvCache::KvCache(Heads heads, int context, bool f16) : heads_(heads), context_(context), f16_(f16) {
  if (heads.kv_heads < 1 || heads.heads < 1 || heads.heads % heads.kv_heads != 0 || heads.head_dim < 1 ||
      context < 1) {
    throw std::invalid_argument("KV cache: sizes must be at least 1 and heads a multiple of kv_heads, not " +
                                std::to_string(heads.heads) + " heads, " + std::to_string(heads.kv_heads) +
                                " kv heads of " + std::to_string(heads.head_dim) + ", " +
                                std::to_string(context) + " positions");
  }
  keys_.reset(std::calloc(key_bytes(), 1));
  values_.reset(std::calloc(value_bytes(), 1));
  if (!keys_ || !values_) throw std::bad_alloc();
}

std::size_t KvCache::key_bytes() const {
  return static_cast<std::size_t>(heads_.kv_heads) * static_cast<std::size_t>(blocks()) * 16 *
         static_cast<std::size_t>(heads_.head_dim) * (f16_ ? 2 : 4);
}
std::size_t KvCache::value_bytes() const {
  return static_cast<std::size_t>(heads_.kv_heads) * static_cast<std::size_t>(context_) *
         static_cast<std::size_t>(value_length()) * (f16_ ? 2 : 4);
}

namespace {

/// One token's key and value of one head, as KV.
template <class KV>
void store_head(const KV* k, const KV* v, int head_dim, KV* keys, KV* values, int position) {
  KV* lane = keys + static_cast<std::size_t>(position / 16) * 16 * static_cast<std::size_t>(head_dim) +
             position % 16;
  for (int d = 0; d < head_dim; ++d) lane[16 * d] = k[d];
  std::copy_n(v, head_dim, values);
}

void require_positions(const char* what, long long nt, int first, int context) {
  if (nt >= 1 && first >= 0 && nt <= context && first <= context - nt) return;
  throw std::invalid_argument(std::string(what) + ": " + std::to_string(nt) + " positions from " +
                              std::to_string(first) + " on are not in a context of " +
                              std::to_string(context));
}

}  // namespace

void KvCache::store(const float* k, const float* v, long long nt, int first, ThreadPool& pool) {
  require_positions("KV cache", nt, first, context_);
  const int hd = heads_.head_dim, kv_heads = heads_.kv_heads;
  const auto to_halves = kernels().to_halves;
  over_rows(nt, 4LL * kv_heads * hd, pool, [&](long long begin, long long end) {
    std::vector<std::uint16_t> halves(f16_ ? 2 * static_cast<std::size_t>(hd) : 0);
    for (long long t = begin; t < end; ++t) {
      const int position = first + static_cast<int>(t);
      for (int h = 0; h < kv_heads; ++h) {
        const float* from_k = k + (t * kv_heads + h) * hd;
        const float* from_v = v + (t * kv_heads + h) * hd;
        const std::size_t keys_at = static_cast<std::size_t>(h) * static_cast<std::size_t>(blocks()) * 16 *
                                    static_cast<std::size_t>(hd);
        const std::size_t values_at = (static_cast<std::size_t>(h) * static_cast<std::size_t>(context_) +
                                       static_cast<std::size_t>(position)) *
                                      static_cast<std::size_t>(value_length());
        if (f16_) {
          to_halves(from_k, halves.data(), hd);
          to_halves(from_v, halves.data() + hd, hd);
          store_head<std::uint16_t>(halves.data(), halves.data() + hd, hd,
                                    static_cast<std::uint16_t*>(keys_.get()) + keys_at,
                                    static_cast<std::uint16_t*>(values_.get()) + values_at, position);
        } else {
          store_head<float>(from_k, from_v, hd, static_cast<float*>(keys_.get()) + keys_at,
                            static_cast<float*>(values_.get()) + values_at, position);
        }
      }
    }
  });
}

// Attention
// ---------------------------------------------------------------------------------------------------

/// Where a call keeps what the pieces give, and what one (token, kv head, piece) has to do.
class AttentionPlan {
 public:
  AttentionPlan(const float* q, const KvCache& cache, float* out, int first)
      : q_(q),
        cache_(cache),
        out_(out),
        first_(first),
        heads_(cache.heads()),
        scale_(1 / std::sqrt(static_cast<float>(heads_.head_dim))),
        kernels_(kernels()) {}

  /// Floats of scratch for one token and kv head: scaled queries, then for each piece its results and
  /// weighted values.
  [[nodiscard]] std::size_t floats(int pieces) const {
    return queries() + static_cast<std::size_t>(pieces) * static_cast<std::size_t>(heads_.group()) *
                           (2 + static_cast<std::size_t>(cache_.value_length()));
  }
  [[nodiscard]] static int pieces(int positions) {
    return (positions + kPiecePositions - 1) / kPiecePositions;
  }

  void scale_queries(long long t, int kv_head, float* scratch) const {
    const float* from = query(t, kv_head);
    for (int i = 0; i < heads_.group() * heads_.head_dim; ++i) scratch[i] = from[i] * scale_;
  }

  void attend(long long t, int kv_head, int piece, int of, float* scratch) const {
    const int positions = first_ + static_cast<int>(t) + 1;
    AttentionPiece p{};
    p.q = scratch;
    p.group = heads_.group();
    p.head_dim = heads_.head_dim;
    p.value_length = cache_.value_length();
    p.first = piece * kPiecePositions;
    p.last = std::min(p.first + kPiecePositions, positions);
    p.results = results(scratch) + static_cast<long long>(piece) * p.group;
    p.weighted = weighted(scratch, of) + static_cast<long long>(piece) * p.group * p.value_length;
    const std::size_t element = cache_.f16() ? 2 : 4, head = static_cast<std::size_t>(kv_head);
    p.keys = static_cast<const unsigned char*>(cache_.keys_.get()) +
             head * static_cast<std::size_t>(cache_.blocks()) * 16 * static_cast<std::size_t>(p.head_dim) *
                 element;
    p.values = static_cast<const unsigned char*>(cache_.values_.get()) +
               head * static_cast<std::size_t>(cache_.context()) * static_cast<std::size_t>(p.value_length) *
                   element;
    cache_.f16() ? kernels_.piece_f16(p) : kernels_.piece_f32(p);
  }

  void combine(long long t, int kv_head, int of, float* scratch) const {
    const long long group = heads_.group(), length = cache_.value_length();
    for (int h = 0; h < group; ++h) {
      float* out = out_ + (t * heads_.heads + kv_head * group + h) * heads_.head_dim;
      kernels_.combine(results(scratch) + h, group, weighted(scratch, of) + h * length, group * length, of,
                       out, heads_.head_dim);
    }
  }

 private:
  [[nodiscard]] std::size_t queries() const {
    return static_cast<std::size_t>(heads_.group()) * static_cast<std::size_t>(heads_.head_dim);
  }
  [[nodiscard]] const float* query(long long t, int kv_head) const {
    return q_ + (t * heads_.heads + static_cast<long long>(kv_head) * heads_.group()) * heads_.head_dim;
  }
  [[nodiscard]] PieceResult* results(float* scratch) const {
    return reinterpret_cast<PieceResult*>(scratch + queries());
  }
  [[nodiscard]] float* weighted(float* scratch, int of) const {
    return scratch + queries() + 2 * static_cast<std::size_t>(of) * static_cast<std::size_t>(heads_.group());
  }

  const float* q_;
  const KvCache& cache_;
  float* out_;
  int first_;
  Heads heads_;
  float scale_;
  const TransformerKernels& kernels_;
};

void attention(const float* q, const KvCache& cache, float* out, long long nt, int first,
               AttentionScratch& scratch, ThreadPool& pool) {
  require_positions("attention", nt, first, cache.context());
  const AttentionPlan plan(q, cache, out, first);
  const int kv_heads = cache.heads().kv_heads;
  const int most_pieces = AttentionPlan::pieces(first + static_cast<int>(nt));
  const std::size_t part = plan.floats(most_pieces);
  if (nt == 1) {  // pieces of all kv heads side by side, then combined
    const auto count = static_cast<std::size_t>(kv_heads);
    if (scratch.floats.size() < count * part) scratch.floats.resize(count * part);
    const auto of_head = [&](int head) {
      return scratch.floats.data() + static_cast<std::size_t>(head) * part;
    };
    for (int head = 0; head < kv_heads; ++head) plan.scale_queries(0, head, of_head(head));
    const long long units = static_cast<long long>(kv_heads) * most_pieces;
    const auto some = [&](long long begin, long long end, int) {
      for (long long u = begin; u < end; ++u) {
        const auto head = static_cast<int>(u / most_pieces);
        plan.attend(0, head, static_cast<int>(u % most_pieces), most_pieces, of_head(head));
      }
    };
    // Few positions take less time than waking the other threads.
    constexpr long long kWorthForking = 1 << 15;  // multiply-adds
    const Heads h = cache.heads();
    if (2LL * (first + 1) * h.heads * h.head_dim < kWorthForking) {
      some(0, units, 0);
    } else {
      pool.parallel_for(units, 1, some);
    }
    for (int head = 0; head < kv_heads; ++head) plan.combine(0, head, most_pieces, of_head(head));
    return;
  }
  // Tokens side by side, the last (and longest) first, each piece by piece.
  const auto threads = static_cast<std::size_t>(pool.size());
  if (scratch.floats.size() < threads * part) scratch.floats.resize(threads * part);
  pool.parallel_for(nt * kv_heads, 4, [&](long long begin, long long end, int thread) {
    float* mine = scratch.floats.data() + static_cast<std::size_t>(thread) * part;
    for (long long u = begin; u < end; ++u) {
      const long long t = nt - 1 - u / kv_heads;
      const auto head = static_cast<int>(u % kv_heads);
      const int pieces = AttentionPlan::pieces(first + static_cast<int>(t) + 1);
      plan.scale_queries(t, head, mine);
      for (int piece = 0; piece < pieces; ++piece) plan.attend(t, head, piece, pieces, mine);
      plan.combine(t, head, pieces, mine);
    }
  });
}

}  // namespace ladder::cpu
