// RUNG      quant_int8 and quant_f32: the CPU twins of packed weights times int8 and f32 activations.
// PREV      gemv_vec: it reads four bytes a weight, where a packed weight has about half a byte.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T   LAYOUT weights as in GGUF, row-major blocks
// MAP       thread -> a contiguous share of the rows, then pieces of the others'; tile -> 1 or 2 rows x 1 to
//           8 tokens in registers; AVX-512 lane -> one run of 16 elements of each group of 256
//           (f32 activations: elements l, l + 16, ... of the row)
// NEEDS     id a multiple of the block length; weights at a multiple of 4 bytes
// TRAFFIC   weights od * row_bytes(type, id) B, once per 512 tokens; acts 4*nt*id B, out 4*nt*od B
// WORK      2*nt*od*id OP
// LOOK FOR  vpdpbusd with zmm, four for each vcvtdq2ps; nt = 1: prefetcht0, and no store but of out
// EXPECT    nt = 1: near the read roof while a core's share of it is below 40 GB/s; nt >= 8: bound by the decoding of
//           weights and the multipliers
// BUILD     c++ -std=c++20 -O3 -I. -c kernels/cpu/quant_matmul.cpp
#include "kernels/cpu/quant_matmul.hpp"

#include <algorithm>
#include <atomic>
#include <concepts>
#include <initializer_list>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/cpu/features.hpp"
#include "kernels/cpu/gemv_shape.hpp"
#include "kernels/cpu/quant_tile.hpp"
#include "kernels/quant/decode.hpp"

namespace ladder::cpu {
namespace {

std::atomic<bool> dot_avoided = false;

}  // namespace

const QuantKernels& quant_kernels() {
  switch (isa()) {
#if defined(__x86_64__)
    case Isa::avx512:
      return features().avx512vnni && !dot_avoided.load(std::memory_order_relaxed) ? kQuantAvx512Vnni
                                                                                   : kQuantAvx512;
    case Isa::avx2:
      return kQuantAvx2;
#elif defined(__aarch64__)
    case Isa::neon:
      return features().dotprod && !dot_avoided.load(std::memory_order_relaxed) ? kQuantNeonDotprod
                                                                                : kQuantNeon;
#endif
    default:
      return kQuantPortable;
  }
}

namespace {

const QuantKernels& kernels_in_use() { return quant_kernels(); }

// ANCHOR: cpu_int8_rows
long long groups_of(long long id) { return (id + kGroupElems - 1) / kGroupElems; }

// A strip of rows passes all tokens, 8 at a time, before the next strip comes: its packed weights stay in L2
// (32 rows of 4864 4-bit weights are 88 KB). At nt <= 8 a row is read once anyway.
constexpr long long kStripRows = 32;

// While decoding a thread takes rows of about this many bytes at a time: long against taking them, short
// against a matrix, so that the threads end together.
constexpr std::size_t kPieceBytes = 32 << 10;

/// Rows that a thread takes at a time. Sixteen outputs fill a line of the cache: no two threads write the same.
long long rows_of_piece(std::size_t row_bytes) {
  constexpr long long kLine = 16;
  const auto rows = static_cast<long long>(kPieceBytes / row_bytes);
  return rows < kLine ? std::max(rows, 4LL) : std::min(rows / kLine * kLine, 4 * kLine);
}

/// Rows shared out in two steps: every thread has a contiguous part of its own, so that it reads one stream,
/// and one that has finished helps the others with theirs, piece by piece.
class Shares {
 public:
  Shares(long long rows, long long piece, int threads)
      : rows_(rows), piece_(piece), threads_(threads), next_(static_cast<std::size_t>(threads)) {}

  [[nodiscard]] static long long begin(long long rows, int thread, int threads) {
    return rows * thread / threads;
  }

  /// Calls f(begin, end) until nothing is left.
  template <class F>
  void work(int thread, F&& f) {
    for (int i = 0; i < threads_; ++i) {
      const int of = (thread + i) % threads_;
      const long long first = begin(rows_, of, threads_), end = begin(rows_, of + 1, threads_);
      auto& taken = next_[static_cast<std::size_t>(of)].rows;
      for (;;) {
        const long long at = first + taken.fetch_add(piece_, std::memory_order_relaxed);
        if (at >= end) break;
        f(at, std::min(at + piece_, end));
      }
    }
  }

 private:
  struct alignas(64) Taken {
    std::atomic<long long> rows = 0;
  };
  long long rows_, piece_;
  int threads_;
  std::vector<Taken> next_;
};
// ANCHOR_END: cpu_int8_rows

}  // namespace

// Activations
// -------------------------------------------------------------------------------------------------

QuantizedActs::QuantizedActs() = default;
QuantizedActs::~QuantizedActs() = default;
QuantizedActs::QuantizedActs(QuantizedActs&&) noexcept = default;
QuantizedActs& QuantizedActs::operator=(QuantizedActs&&) noexcept = default;

void QuantizedActs::Free::operator()(ActGroup* groups) const {
  ::operator delete[](groups, std::align_val_t{alignof(ActGroup)});
}

// ANCHOR: cpu_int8_make
/// Calls make(kernels, token, first element, elements, group) for every group.
/// @param worth_forking groups that take longer than waking the other threads
template <class Make>
void QuantizedActs::fill(long long nt, long long id, long long worth_forking, ThreadPool& pool, Make&& make) {
  if (nt < 1 || id < 32 || id % 32 != 0) {
    throw std::invalid_argument("quantized activations: nt must be >= 1 and id a multiple of 32, not " +
                                std::to_string(nt) + " and " + std::to_string(id));
  }
  const QuantKernels& kernels = kernels_in_use();
  const long long groups = groups_of(id), count = nt * groups;
  if (static_cast<std::size_t>(count) > capacity_) {
    groups_.reset();
    capacity_ = 0;
    const auto bytes = static_cast<std::size_t>(count) * sizeof(ActGroup);
    groups_.reset(static_cast<ActGroup*>(::operator new[](bytes, std::align_val_t{alignof(ActGroup)})));
    capacity_ = static_cast<std::size_t>(count);
  }
  nt_ = nt;
  id_ = id;
  kernels_ = &kernels;
  const auto some = [&](long long begin, long long end, int) {
    for (long long i = begin; i < end; ++i) {
      const long long t = i / groups, first = i % groups * kGroupElems;
      make(kernels, t, first, static_cast<int>(std::min<long long>(kGroupElems, id - first)),
           groups_[static_cast<std::size_t>(i)]);
    }
  };
  if (count < worth_forking) {
    some(0, count, 0);
  } else {
    pool.parallel_for(count, worth_forking / 2, some);
  }
}

void QuantizedActs::assign(const BlockQ8Pad40* blocks, long long nt, long long id, ThreadPool& pool) {
  const long long blocks_of_token = id / kQ8ActsPerBlock;
  constexpr long long kWorthForking = 512;  // a group takes about 0.02 us
  fill(nt, id, kWorthForking, pool,
       [&](const QuantKernels& kernels, long long t, long long first, int elems, ActGroup& group) {
         kernels.take(blocks + t * blocks_of_token + first / kQ8ActsPerBlock, elems / kQ8ActsPerBlock, group);
       });
}
// ANCHOR_END: cpu_int8_make

void QuantizedActs::quantize(const float* acts, long long nt, long long id, ThreadPool& pool) {
  constexpr long long kWorthForking = 64;  // a group takes about 0.1 us
  fill(nt, id, kWorthForking, pool,
       [&](const QuantKernels& kernels, long long t, long long first, int elems, ActGroup& group) {
         kernels.quantize(acts + t * id + first, elems, group);
       });
}

int QuantizedActs::code(long long t, long long k) const {
  const ActGroup& group = groups_[static_cast<std::size_t>(t * groups_of(id_) + k / kGroupElems)];
  const auto i = static_cast<int>(k % kGroupElems);
  const auto* kernels = static_cast<const QuantKernels*>(kernels_);
  if (!kernels->lanes) return group.codes[i];
  const int run = i / 16, lane = run % 4 * 4 + run / 4;  // quant_int8_avx512.hpp
  return group.codes[64 * (i % 16 / 4) + 4 * lane + i % 4];
}

float QuantizedActs::scale(long long t, long long k) const {
  const ActGroup& group = groups_[static_cast<std::size_t>(t * groups_of(id_) + k / kGroupElems)];
  const auto run = static_cast<int>(k % kGroupElems / 16);
  const auto* kernels = static_cast<const QuantKernels*>(kernels_);
  return group.scales[kernels->lanes ? run % 4 * 4 + run / 4 : run];
}

// Products
// ----------------------------------------------------------------------------------------------------

// ANCHOR: cpu_int8_plan
/// A call, checked.
class ProductPlan {
 public:
  ProductPlan(std::span<const Product> products, const float* acts, const QuantizedActs* quantized,
              long long nt, long long id)
      : kernels_(kernels_in_use()), products_(products), acts_(acts), nt_(nt), id_(id) {
    for (const Product& p : products) {
      require_valid("quantized matmul", {nt, p.od, id});
      if (id % info(p.type).block_elems != 0) {
        throw std::invalid_argument(std::string("quantized matmul: rows of ") + info(p.type).name +
                                    " have a multiple of " + std::to_string(info(p.type).block_elems) +
                                    " elements, not " + std::to_string(id));
      }
      rows_ += p.od;
    }
    if (quantized == nullptr) return;
    if (quantized->nt_ != nt || quantized->id_ != id) {
      throw std::invalid_argument("quantized matmul: activations of shape " + std::to_string(nt) + " x " +
                                  std::to_string(id) + " were quantized as " +
                                  std::to_string(quantized->nt_) + " x " + std::to_string(quantized->id_));
    }
    if (quantized->kernels_ != &kernels_) {
      throw std::logic_error("quantized matmul: the activations were quantized for another instruction set");
    }
    groups_ = quantized->groups_.get();
  }

  [[nodiscard]] long long rows() const { return rows_; }

  /// Rows begin..end-1 of all matrices one after the other.
  void multiply(long long begin, long long end) const {
    long long first = 0;  // of the matrix
    for (const Product& p : products_) {
      const long long from = std::max(begin, first) - first, to = std::min(end, first + p.od) - first;
      for (long long strip = from; strip < to; strip += kStripRows) {
        multiply_strip(p, strip, std::min(strip + kStripRows, to));
      }
      first += p.od;
    }
  }

 private:
  void multiply_strip(const Product& p, long long begin, long long end) const {
    const auto type = static_cast<std::size_t>(p.type);
    const bool int8 = groups_ != nullptr && kernels_.int8[type] != nullptr;
    const QuantKernel kernel = int8 ? kernels_.int8[type] : kernels_.f32[type];
    QuantTile tile{};
    tile.row_bytes = row_bytes(p.type, id_);
    tile.weights =
        static_cast<const unsigned char*>(p.weights) + static_cast<std::size_t>(begin) * tile.row_bytes;
    tile.rows = end - begin;
    tile.id = id_;
    tile.od = p.od;
    for (long long token = 0; token < nt_; token += kMaxQuantTokens) {
      tile.acts = int8 ? groups_ + token * groups_of(id_) : nullptr;
      tile.floats = acts_ + token * id_;
      tile.tokens = static_cast<int>(std::min<long long>(kMaxQuantTokens, nt_ - token));
      tile.out = p.out + token * p.od + begin;
      tile.cold = token == 0;
      kernel(tile);
    }
  }

  const QuantKernels& kernels_;
  std::span<const Product> products_;
  const float* acts_;
  const ActGroup* groups_ = nullptr;
  long long nt_, id_, rows_ = 0;
};

bool uses_int8(WeightType type) { return info(type).block_elems > 1; }

void multiply(std::span<const Product> products, const float* acts, const QuantizedActs* quantized,
              long long nt, long long id, ThreadPool& pool) {
  const ProductPlan plan(products, acts, quantized, nt, id);
  if (plan.rows() == 0) return;
  std::size_t longest = 1;
  for (const Product& p : products) longest = std::max(longest, row_bytes(p.type, id));
  const long long piece = nt > kMaxQuantTokens ? kStripRows : rows_of_piece(longest);
  Shares shares(plan.rows(), piece, pool.size());
  pool.run([&](int thread, int) {
    shares.work(thread, [&](long long begin, long long end) { plan.multiply(begin, end); });
  });
}

void quant_int8_matmul(WeightType type, const void* weights, const BlockQ8Pad40* acts, float* out,
                       Shape shape, ThreadPool& pool) {
  if (!uses_int8(type)) {
    throw std::invalid_argument(std::string("quantized matmul: ") + info(type).name +
                                " weights are multiplied with f32 activations, not with int8 ones");
  }
  const Product product{type, weights, shape.od, out};
  QuantizedActs taken;
  taken.assign(acts, shape.nt, shape.id, pool);
  multiply({&product, 1}, nullptr, &taken, shape.nt, shape.id, pool);
}
// ANCHOR_END: cpu_int8_plan

void quant_f32_matmul(WeightType type, const void* weights, const float* acts, float* out, Shape shape,
                      ThreadPool& pool) {
  const Product product{type, weights, shape.od, out};
  multiply({&product, 1}, acts, nullptr, shape.nt, shape.id, pool);
}

void quant_int8_matmul(WeightType type, const void* weights, const float* acts, float* out, Shape shape,
                       ThreadPool& pool) {
  const Product product{type, weights, shape.od, out};
  if (!uses_int8(type)) return multiply({&product, 1}, acts, nullptr, shape.nt, shape.id, pool);
  QuantizedActs quantized;
  quantized.quantize(acts, shape.nt, shape.id, pool);
  multiply({&product, 1}, acts, &quantized, shape.nt, shape.id, pool);
}

double quant_int8_roundings(WeightType type, long long id) {
  const QuantKernels& kernels = kernels_in_use();
  const bool offsets = with_block(type, [](auto tag) {
    using Block = typename decltype(tag)::type;
    return requires(const Block& b) {
      { run_scale(b, 0) } -> std::same_as<ScaleOffset>;
    };
  });
  const int additions = kernels.code_additions + (offsets ? kernels.offset_additions : 0);
  constexpr int kScales = 2, kReference = 2;  // two products with scales, at most; a weight of the reference
  return static_cast<double>(groups_of(id) * additions + kernels.tree_additions + kScales + kReference);
}

std::string quant_int8_source(WeightType type) {
  if (!uses_int8(type)) return {};
  const auto list = [](std::string_view file, std::initializer_list<std::string_view> names) {
    std::string text;
    for (const std::string_view name : names) {
      text.append(text.empty() ? "" : ",").append("kernels/cpu/").append(file);
      text.append("#cpu_int8_").append(name);
    }
    return text;
  };
  constexpr std::string_view kTiles = "quant_int8_avx512.hpp";
  std::string text = list(kTiles, {"tiles", "lanes", "acts", "blocks", info(type).name});
  switch (type) {  // parts of a format that others share
    case WeightType::iq4_nl:
      text.append(",").append(list(kTiles, {"q4_0", "iq4_table"}));
      break;
    case WeightType::iq4_xs:
      text.append(",").append(list(kTiles, {"iq4_table"}));
      break;
    case WeightType::q4_k:
      text.append(",").append(list(kTiles, {"k4"}));
      break;
    case WeightType::q5_k:
      text.append(",").append(list(kTiles, {"k4", "bits_of_k"}));
      break;
    case WeightType::q3_k:
      text.append(",").append(list(kTiles, {"two_bits", "bits_of_k"}));
      break;
    case WeightType::q2_k:
    case WeightType::q6_k:
      text.append(",").append(list(kTiles, {"two_bits"}));
      break;
    default:
      break;
  }
  return text.append(",").append(list("quant_matmul.cpp", {"rows", "make", "plan"}));
}

const char* quant_int8_instruction() { return kernels_in_use().name; }

void avoid_dot_instruction(bool avoid) { dot_avoided.store(avoid, std::memory_order_relaxed); }

}  // namespace ladder::cpu
