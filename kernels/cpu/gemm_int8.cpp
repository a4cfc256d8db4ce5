// The driver of quant_int8_gemm: what passes which cache, and who does what. The tiles are in
// gemm_int8_avx512.hpp and beside the other products of each instruction set.
#include "kernels/cpu/gemm_int8.hpp"

#include <sys/mman.h>

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

constexpr std::size_t kAlign = 64, kHugePage = std::size_t{2} << 20;
constexpr long long kStripsOfThread = 4;  // of a matrix, at least: so the threads end together

}  // namespace

void Int8Gemm::Kept::Free::operator()(unsigned char* p) const {
  ::operator delete[](p, std::align_val_t{alignment});
}

unsigned char* Int8Gemm::Kept::grown(std::size_t wanted) {
  if (wanted <= bytes) return memory.get();
  memory.reset();
  bytes = 0;
  const std::size_t alignment = wanted < kHugePage ? kAlign : kHugePage;
  wanted = (wanted + alignment - 1) / alignment * alignment;
  memory = {static_cast<unsigned char*>(::operator new[](wanted, std::align_val_t{alignment})),
            Free{alignment}};
  bytes = wanted;
#if defined(MADV_HUGEPAGE)
  // A hint: panels are read in strides of several kilobytes, each of which would be a page of its own.
  if (alignment == kHugePage) (void)::madvise(memory.get(), wanted, MADV_HUGEPAGE);
#endif
  return memory.get();
}

// ANCHOR: cpu_int8_gemm_acts
/// Calls row(token, thread, place in the tile) for every token, and make(kernels, what it gave, first element, elements,
/// group) for every group of it.
template <class Row, class Make>
void Int8Gemm::fill(long long nt, long long id, ThreadPool& pool, Row&& row, Make&& make) {
  if (nt < 1 || id < 32 || id % 32 != 0) {
    throw std::invalid_argument("int8 GEMM: nt must be >= 1 and id a multiple of 32, not " +
                                std::to_string(nt) + " and " + std::to_string(id));
  }
  const QuantKernels& kernels = quant_kernels();
  const GemmInt8Kernels& gemm = kernels.gemm;
  const long long groups = groups_of_row(id), tiles = (nt + gemm.tokens - 1) / gemm.tokens;
  const std::size_t tile_bytes = gemm.act_bytes * static_cast<std::size_t>(groups);
  unsigned char* panels = acts_.grown(static_cast<std::size_t>(tiles) * tile_bytes);
  nt_ = nt;
  id_ = id;
  kernels_ = &kernels;
  pool.parallel_for(tiles, 1, [&](long long begin, long long end, int thread) {
    ActGroup acts[kMaxQuantTokens];
    for (long long tile = begin; tile < end; ++tile) {
      const auto count = static_cast<int>(std::min<long long>(gemm.tokens, nt - tile * gemm.tokens));
      decltype(row(0LL, 0, 0)) rows[kMaxQuantTokens];
      for (int t = 0; t < count; ++t) rows[t] = row(tile * gemm.tokens + t, thread, t);
      for (long long g = 0; g < groups; ++g) {
        const long long first = g * kGroupElems;
        const auto elems = static_cast<int>(std::min<long long>(kGroupElems, id - first));
        for (int t = 0; t < count; ++t) make(kernels, rows[t], first, elems, acts[t]);
        gemm.put(acts, count, g, groups, panels + static_cast<std::size_t>(tile) * tile_bytes);
      }
    }
  });
}
// ANCHOR_END: cpu_int8_gemm_acts

namespace {

void round_group(const QuantKernels& kernels, const float* row, long long first, int elems, ActGroup& group) {
  kernels.quantize(row + first, elems, group);
}

}  // namespace

void Int8Gemm::quantize(const float* acts, long long nt, long long id, ThreadPool& pool) {
  fill(
      nt, id, pool, [&](long long t, int, int) { return acts + t * id; }, round_group);
}

void Int8Gemm::quantize(const std::function<const float*(long long, float*)>& make, long long nt,
                        long long id, ThreadPool& pool) {
  const std::size_t of_row = static_cast<std::size_t>(std::max(id, 0LL)) * sizeof(float);
  const auto threads = static_cast<std::size_t>(pool.size());
  auto* rows = reinterpret_cast<float*>(rows_.grown(threads * kMaxQuantTokens * of_row));
  fill(
      nt, id, pool,
      [&](long long t, int thread, int place) {
        return make(t, rows + (static_cast<long long>(thread) * kMaxQuantTokens + place) * id);
      },
      round_group);
}

void Int8Gemm::assign(const BlockQ8Pad40* blocks, long long nt, long long id, ThreadPool& pool) {
  const long long blocks_of_token = id / kQ8ActsPerBlock;
  fill(
      nt, id, pool, [&](long long t, int, int) { return blocks + t * blocks_of_token; },
      [](const QuantKernels& kernels, const BlockQ8Pad40* row, long long first, int elems, ActGroup& group) {
        kernels.take(row + first / kQ8ActsPerBlock, elems / kQ8ActsPerBlock, group);
      });
}

// ANCHOR: cpu_int8_gemm
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
  const GemmInt8Kernels& gemm = kernels.gemm;
  std::vector<Product> floats;
  std::vector<int> rows;                // of a strip, for each matrix
  std::vector<long long> strips = {0};  // before each matrix
  std::size_t panels = 0, scratch = 0;  // bytes, the most of any
  for (const Product& p : products) {
    require_valid("int8 GEMM", {nt, p.od, id});
    if (id % info(p.type).block_elems != 0) {
      throw std::invalid_argument(std::string("int8 GEMM: rows of ") + info(p.type).name +
                                  " have a multiple of " + std::to_string(info(p.type).block_elems) +
                                  " elements, not " + std::to_string(id));
    }
    rows.push_back(0);
    strips.push_back(strips.back());
    if (!uses_int8(p.type)) {
      if (acts == nullptr) {
        throw std::invalid_argument(std::string("int8 GEMM: ") + info(p.type).name +
                                    " weights are multiplied with f32 activations, and there are none");
      }
      floats.push_back(p);
      continue;
    }
    const std::size_t bytes = gemm.types[static_cast<std::size_t>(p.type)].bytes;
    rows.back() = gemm.rows(p.od / (kStripsOfThread * pool.size()), id, bytes);
    strips.back() += (p.od + rows.back() - 1) / rows.back();
    panels = std::max(
        panels, static_cast<std::size_t>(rows.back()) * static_cast<std::size_t>(groups_of_row(id)) * bytes);
    scratch = std::max(scratch, gemm.scratch(rows.back(), nt, id) * sizeof(float));
  }
  if (!floats.empty()) cpu::multiply(floats, acts, nullptr, nt, id, pool);
  if (strips.back() == 0) return;
  // 2. Strips of all matrices one after the other, to whoever is free.
  const auto aligned = [](std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; };
  const std::size_t of_thread = aligned(panels) + aligned(scratch);
  unsigned char* memory = scratch_.grown(static_cast<std::size_t>(pool.size()) * of_thread);
  pool.parallel_for(strips.back(), 1, [&](long long begin, long long end, int thread) {
    unsigned char* mine = memory + static_cast<std::size_t>(thread) * of_thread;
    for (long long i = begin; i < end; ++i) {
      const auto m =
          static_cast<std::size_t>(std::upper_bound(strips.begin(), strips.end(), i) - strips.begin() - 1);
      const Product& p = products[m];
      const PanelKernels& of_type = gemm.types[static_cast<std::size_t>(p.type)];
      const long long row = (i - strips[m]) * rows[m];
      const std::size_t row_size = row_bytes(p.type, id);
      PanelStrip strip{};
      strip.panels = mine;
      strip.rows = static_cast<int>(std::min<long long>(rows[m], p.od - row));
      strip.acts = acts_.memory.get();
      strip.nt = nt;
      strip.id = id;
      strip.out = p.out + row;
      strip.od = p.od;
      strip.scratch = reinterpret_cast<float*>(mine + aligned(panels));
      of_type.pack(static_cast<const unsigned char*>(p.weights) + static_cast<std::size_t>(row) * row_size,
                   row_size, strip.rows, id, mine);
      // The strip that this thread probably takes next comes from memory meanwhile. Beyond the end a prefetch is ignored.
      const auto* next = static_cast<const char*>(p.weights) +
                         static_cast<std::size_t>(row + pool.size() * rows[m]) * row_size;
      const auto bytes = static_cast<std::size_t>(rows[m]) * row_size;
      for (std::size_t line = 0; line < bytes; line += kAlign) __builtin_prefetch(next + line, 0, 2);
      of_type.multiply(strip);
    }
  });
}
// ANCHOR_END: cpu_int8_gemm

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
