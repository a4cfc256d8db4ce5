// The driver of quant_int8_gemm: what passes which cache, and who does what. The tiles are in
// gemm_int8_avx512.hpp and beside the other products of each instruction set.
#include "kernels/cpu/gemm_int8.hpp"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/cpu/gemm_int8_tile.hpp"
#include "kernels/cpu/gemv_shape.hpp"
#include "kernels/quant/quantize_acts.hpp"

namespace ladder::cpu {
namespace {

constexpr std::size_t kAlign = 64;

// ANCHOR: cpu_int8_gemm
long long groups_of(long long id) { return (id + kGroupElems - 1) / kGroupElems; }
long long blocks_of(long long nt) { return (nt + kMaxQuantTokens - 1) / kMaxQuantTokens; }

// 1. In L1: 8 tokens of a few groups, 31 KB of the panels' lines that one format reads. All pairs of rows of a
//    strip pass them, and their sums wait meanwhile.
constexpr int kMostGroups = 10;

// 2. In L2: a strip of rows as panels, of about this many bytes. The longer it is, the less often activations
//    come from L3.
constexpr std::size_t kStripBytes = std::size_t{512} << 10;
constexpr long long kMostRows = 64;

/// How a matrix is cut.
struct Cut {
  int rows;    // of a strip: an even number
  int groups;  // of a block of k

  Cut(long long od, long long id, std::size_t panel_bytes, int threads) {
    const long long all = groups_of(id), blocks = (all + kMostGroups - 1) / kMostGroups;
    groups = static_cast<int>((all + blocks - 1) / blocks);
    const auto fitting = static_cast<long long>(kStripBytes / (static_cast<std::size_t>(all) * panel_bytes));
    const long long fair = od / (4LL * threads);  // strips enough that the threads end together
    rows = static_cast<int>(std::clamp(std::min(fitting, fair), 8LL, kMostRows) / 2 * 2);
  }
  [[nodiscard]] std::size_t panels(long long id, std::size_t panel_bytes) const {
    return static_cast<std::size_t>(rows) * static_cast<std::size_t>(groups_of(id)) * panel_bytes;
  }
  [[nodiscard]] std::size_t sums() const {
    return static_cast<std::size_t>(rows) * kMaxQuantTokens * 16 * sizeof(float);
  }
};

/// A strip times all tokens.
void multiply_strip(const PanelKernels& kernels, const Cut& cut, const Product& product, const ActPanel* acts,
                    long long nt, long long id, long long row, int rows, unsigned char* panels, float* sums) {
  const std::size_t row_size = row_bytes(product.type, id);
  const long long groups = groups_of(id);
  kernels.pack(static_cast<const unsigned char*>(product.weights) + static_cast<std::size_t>(row) * row_size,
               row_size, rows, id, panels);
  PanelTile tile{};
  tile.panels = panels;
  tile.row_groups = groups;
  tile.rows = rows;
  tile.sums = sums;
  tile.od = product.od;
  for (long long token = 0; token < nt; token += kMaxQuantTokens) {
    tile.tokens = static_cast<int>(std::min<long long>(kMaxQuantTokens, nt - token));
    tile.out = product.out + token * product.od + row;
    for (long long g = 0; g < groups; g += cut.groups) {
      tile.group = static_cast<int>(g);
      tile.groups = static_cast<int>(std::min<long long>(cut.groups, groups - g));
      tile.acts = acts + token * groups + g * kMaxQuantTokens;
      tile.first = g == 0;
      tile.last = g + tile.groups == groups;
      kernels.multiply(tile);
    }
  }
}
// ANCHOR_END: cpu_int8_gemm

}  // namespace

Int8Gemm::Int8Gemm() = default;
Int8Gemm::~Int8Gemm() = default;
Int8Gemm::Int8Gemm(Int8Gemm&&) noexcept = default;
Int8Gemm& Int8Gemm::operator=(Int8Gemm&&) noexcept = default;

void Int8Gemm::Free::operator()(void* memory) const { ::operator delete[](memory, std::align_val_t{kAlign}); }

template <class T>
T* Int8Gemm::Kept<T>::grown(std::size_t wanted) {
  if (wanted > count) {
    memory.reset();
    count = 0;
    memory.reset(static_cast<T*>(::operator new[](wanted * sizeof(T), std::align_val_t{kAlign})));
    count = wanted;
  }
  return memory.get();
}

// ANCHOR: cpu_int8_gemm_acts
/// Calls make(kernels, token, first element, elements, group) for every group.
/// @param worth_forking groups that take longer than waking the other threads
template <class Make>
void Int8Gemm::fill(long long nt, long long id, long long worth_forking, ThreadPool& pool, Make&& make) {
  if (nt < 1 || id < 32 || id % 32 != 0) {
    throw std::invalid_argument("int8 GEMM: nt must be >= 1 and id a multiple of 32, not " +
                                std::to_string(nt) + " and " + std::to_string(id));
  }
  const QuantKernels& kernels = quant_kernels();
  const long long groups = groups_of(id), count = nt * groups;
  ActPanel* panels = acts_.grown(static_cast<std::size_t>(blocks_of(nt) * groups * kMaxQuantTokens));
  nt_ = nt;
  id_ = id;
  kernels_ = &kernels;
  const auto some = [&](long long begin, long long end, int) {
    for (long long i = begin; i < end; ++i) {
      const long long t = i / groups, g = i % groups, first = g * kGroupElems;
      ActPanel& panel = panels[(t / kMaxQuantTokens * groups + g) * kMaxQuantTokens + t % kMaxQuantTokens];
      make(kernels, t, first, static_cast<int>(std::min<long long>(kGroupElems, id - first)), panel.group);
      // The product that quant_int8 makes in its tile, with the same rounding.
      for (int run = 0; run < kGroupRuns; ++run) {
        panel.negatives[run] = static_cast<float>(panel.group.negative_sums[run]) * panel.group.scales[run];
      }
    }
  };
  if (count < worth_forking) {
    some(0, count, 0);
  } else {
    pool.parallel_for(count, worth_forking / 2, some);
  }
}
// ANCHOR_END: cpu_int8_gemm_acts

void Int8Gemm::quantize(const float* acts, long long nt, long long id, ThreadPool& pool) {
  constexpr long long kWorthForking = 64;  // a group takes about 0.1 us
  fill(nt, id, kWorthForking, pool,
       [&](const QuantKernels& kernels, long long t, long long first, int elems, ActGroup& group) {
         kernels.quantize(acts + t * id + first, elems, group);
       });
}

void Int8Gemm::assign(const BlockQ8Pad40* blocks, long long nt, long long id, ThreadPool& pool) {
  const long long blocks_of_token = id / kQ8ActsPerBlock;
  constexpr long long kWorthForking = 512;  // a group takes about 0.02 us
  fill(nt, id, kWorthForking, pool,
       [&](const QuantKernels& kernels, long long t, long long first, int elems, ActGroup& group) {
         kernels.take(blocks + t * blocks_of_token + first / kQ8ActsPerBlock, elems / kQ8ActsPerBlock, group);
       });
}

void Int8Gemm::multiply(std::span<const Product> products, const float* acts, long long nt, long long id,
                        ThreadPool& pool) {
  const QuantKernels& kernels = quant_kernels();
  if (kernels_ == nullptr || nt != nt_ || id != id_) {
    throw std::invalid_argument("int8 GEMM: activations of shape " + std::to_string(nt) + " x " +
                                std::to_string(id) + " were made as " + std::to_string(nt_) + " x " +
                                std::to_string(id_));
  }
  if (kernels_ != &kernels) {
    throw std::logic_error("int8 GEMM: the activations were made for another instruction set");
  }
  // 1. Check, and cut matrices to strips.
  std::vector<Product> floats;
  std::vector<Cut> cuts;
  std::vector<long long> strips = {0};  // before each matrix
  std::size_t panels = 0, sums = 0;
  for (const Product& p : products) {
    require_valid("int8 GEMM", {nt, p.od, id});
    if (id % info(p.type).block_elems != 0) {
      throw std::invalid_argument(std::string("int8 GEMM: rows of ") + info(p.type).name +
                                  " have a multiple of " + std::to_string(info(p.type).block_elems) +
                                  " elements, not " + std::to_string(id));
    }
    if (!uses_int8(p.type)) {
      if (acts == nullptr) {
        throw std::invalid_argument(std::string("int8 GEMM: ") + info(p.type).name +
                                    " weights are multiplied with f32 activations, and there are none");
      }
      floats.push_back(p);
    }
    const std::size_t bytes = kernels.panels[static_cast<std::size_t>(p.type)].bytes;
    cuts.emplace_back(p.od, id, std::max<std::size_t>(bytes, 1), pool.size());
    strips.push_back(strips.back() +
                     (uses_int8(p.type) ? (p.od + cuts.back().rows - 1) / cuts.back().rows : 0));
    panels = std::max(panels, uses_int8(p.type) ? cuts.back().panels(id, bytes) : 0);
    sums = std::max(sums, cuts.back().sums());
  }
  if (!floats.empty()) cpu::multiply(floats, acts, nullptr, nt, id, pool);
  if (strips.back() == 0) return;
  // 2. Strips of all matrices one after the other, to whoever is free.
  panels = (panels + kAlign - 1) / kAlign * kAlign;
  unsigned char* scratch = scratch_.grown(static_cast<std::size_t>(pool.size()) * (panels + sums));
  pool.parallel_for(strips.back(), 1, [&](long long begin, long long end, int thread) {
    unsigned char* mine = scratch + static_cast<std::size_t>(thread) * (panels + sums);
    for (long long i = begin; i < end; ++i) {
      const auto m =
          static_cast<std::size_t>(std::upper_bound(strips.begin(), strips.end(), i) - strips.begin() - 1);
      const Product& p = products[m];
      const long long row = (i - strips[m]) * cuts[m].rows;
      multiply_strip(kernels.panels[static_cast<std::size_t>(p.type)], cuts[m], p, acts_.memory.get(), nt, id,
                     row, static_cast<int>(std::min<long long>(cuts[m].rows, p.od - row)), mine,
                     reinterpret_cast<float*>(mine + panels));
    }
  });
}

namespace {

void require_int8(WeightType type) {
  if (uses_int8(type)) return;
  throw std::invalid_argument(std::string("int8 GEMM: ") + info(type).name +
                              " weights are multiplied with f32 activations, not with int8 ones");
}

}  // namespace

void quant_int8_gemm(WeightType type, const void* weights, const BlockQ8Pad40* acts, float* out, Shape shape,
                     ThreadPool& pool) {
  require_int8(type);
  Int8Gemm gemm;
  gemm.assign(acts, shape.nt, shape.id, pool);
  const Product product{type, weights, shape.od, out};
  gemm.multiply({&product, 1}, nullptr, shape.nt, shape.id, pool);
}

void quant_int8_gemm_planes(WeightType type, const void* weights, const void* acts, float* out, Shape shape,
                            ThreadPool& pool) {
  require_int8(type);
  if (shape.nt < 1 || shape.id < 32 || shape.id % 32 != 0) {
    throw std::invalid_argument("int8 GEMM: nt must be >= 1 and id a multiple of 32, not " +
                                std::to_string(shape.nt) + " and " + std::to_string(shape.id));
  }
  const Q8ActsPlanes planes = q8_acts_planes(shape.nt, shape.id);
  const auto* codes = static_cast<const std::int8_t*>(acts);
  std::vector<BlockQ8Pad40> blocks(static_cast<std::size_t>(shape.nt * planes.chunks));
  unpack_q8_pad40_t(codes, reinterpret_cast<const std::uint32_t*>(codes + planes.codes), shape.nt, shape.id,
                    blocks.data());
  quant_int8_gemm(type, weights, blocks.data(), out, shape, pool);
}

std::string quant_int8_gemm_source(WeightType type) {
  if (!uses_int8(type)) return {};
  return "kernels/cpu/gemm_int8_avx512.hpp#cpu_int8_panels,kernels/cpu/gemm_int8.cpp#cpu_int8_gemm,"
         "kernels/cpu/gemm_int8.cpp#cpu_int8_gemm_acts," +
         quant_int8_source(type);
}

}  // namespace ladder::cpu
