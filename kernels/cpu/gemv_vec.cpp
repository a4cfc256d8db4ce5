// RUNG      gemv_vec (CPU twin): threads over rows, SIMD over elements.
// PREV      gemv_scalar: it waits for one add at a time, and each token streams the weights again.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T   LAYOUT weights row-major f32
// MAP       thread -> ranges of rows; tile -> 4 rows x up to 4 tokens in registers;
//           SIMD lane l -> elements l, l + lanes, l + 2 * lanes, ... of a row, its end padded with zeros
//           (lanes: 16 AVX-512, 8 AVX2, 4 NEON and portable)
// NEEDS     any nt, od, id >= 1
// TRAFFIC   weights 4*od*id B from memory once, from L2 once per 8 tokens; acts 4*nt*id B, out 4*nt*od B
// WORK      2*nt*od*id FLOP
// LOOK FOR  vfmadd with zmm (AVX-512) or ymm (AVX2), fmla with .4s (NEON); no store of sums in the k loop
// EXPECT    nt = 1: the read roof from 64 MB, with all cores; nt >= 64: bound by the FMA units and L2
// BUILD     c++ -std=c++20 -O3 -I. -c kernels/cpu/gemv_vec.cpp
#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/cpu/features.hpp"
#include "kernels/cpu/gemv.hpp"
#include "kernels/cpu/gemv_shape.hpp"
#include "kernels/cpu/gemv_tile.hpp"

namespace ladder::cpu {
namespace {

const TileKernels& kernels_for(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::avx512:
      return kTilesAvx512;
    case Isa::avx2:
      return kTilesAvx2;
#elif defined(__aarch64__)
    case Isa::neon:
      return kTilesNeon;
#endif
    case Isa::portable:
      return kTilesPortable;
    default:
      throw std::logic_error("gemv_vec: no kernels for " + std::string(name(isa)) + " in this build");
  }
}

// Beyond one tile of tokens, k is cut into panels: 4 rows and 8 tokens of a panel (12 * 2 KiB) fit in any L1
// cache, so that only the weights come from further away.
constexpr long long kPanel = 512;
static_assert(kPanel % kMaxLanes == 0);

// A tile of several tokens fetches weights by hand, this many elements ahead: its multiply-adds fill the
// core's window before enough loads are in flight. (One token's tile does little but load, and is best left
// to the hardware.) Only the first group of tokens finds the weights in memory; for later groups they are in
// L2, and 0 says so. At the end of the matrix the address is that of nothing; a prefetch of that is ignored.
constexpr long long kPrefetch = 512;

// Beyond one group of tokens, rows are taken in strips that stay in L2 while all tokens pass: memory sees the
// weights once per call.
constexpr long long kStripBytes = 256LL * 1024;
constexpr long long kMaxStripRows = 32;
static_assert(kMaxStripRows % kTileRows == 0);

struct Plan {
  long long chunk;  // rows a thread takes at a time
  long long strip;  // rows that all tokens pass before the next strip; a multiple of kTileRows
  long long panel;  // elements of k per tile call
};

long long round_up(long long value, long long multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

Plan plan(const Shape& shape, int tile_tokens, int threads) {
  Plan p{};
  // One tile of tokens: the sums never leave the registers and each row is one uninterrupted stream.
  p.panel = shape.nt <= tile_tokens ? shape.id : kPanel;
  const long long row_bytes = 4 * shape.id;
  p.strip = shape.nt <= kGroupTokens
                ? kTileRows
                : round_up(std::clamp(kStripBytes / row_bytes, 1LL, kMaxStripRows), kTileRows);
  // About 8 chunks per thread: few enough that their starts do not matter, enough that the slowest thread's
  // last chunk costs little.
  p.chunk = round_up(std::max(1LL, shape.od / (8LL * threads)), kTileRows);
  return p;
}

// Rows row_begin..row_end-1 of every token: the part of one thread.
// ANCHOR: cpu_gemv_vec
void multiply_rows(const TileKernels& isa, const Plan& plan, const float* weights, const float* acts,
                   float* out, const Shape& shape, long long row_begin, long long row_end) {
  const auto [nt, od, id] = shape;
  alignas(64) float sums[kMaxStripRows][kGroupTokens][kMaxLanes];
  // 1. Rows in strips that stay in L2 while all tokens pass. Up to 8 pass at once: a tile will do.
  for (long long strip = row_begin; strip < row_end; strip += plan.strip) {
    const long long strip_end = std::min(strip + plan.strip, row_end);
    // 2. Tokens in groups of 8: one pass over the strip's weights serves the whole group.
    for (long long group = 0; group < nt; group += kGroupTokens) {
      const long long group_end = std::min<long long>(group + kGroupTokens, nt);
      // 3. The elements of a row in panels that stay in L1; at nt = 1 there is one panel.
      for (long long k = 0; k < id; k += plan.panel) {
        const long long k_end = std::min(k + plan.panel, id);
        // 4. Tiles of 4 rows (of 1 where fewer are left) by as many tokens as the registers have room for.
        for (long long row = strip, height = 0; row < strip_end; row += height) {
          const bool full = row + kTileRows <= strip_end;
          height = full ? kTileRows : 1;
          for (long long token = group; token < group_end; token += isa.tokens) {
            const long long width = std::min<long long>(isa.tokens, group_end - token);  // 1..isa.tokens
            const TileKernel kernel = (full ? isa.full : isa.single)[width - 1];
            kernel({.weights = weights + row * id,  // [height][id]
                    .acts = acts + token * id,      // [width][id]
                    .out = out + token * od + row,  // [width][od]
                    .od = od,
                    .id = id,
                    .k_begin = k,
                    .k_end = k_end,
                    .ahead = group == 0 ? kPrefetch : 0,
                    .sums = sums[row - strip][token - group]});  // [height][kGroupTokens][kMaxLanes]
          }
        }
      }
    }
  }
}
// ANCHOR_END: cpu_gemv_vec

}  // namespace

void gemv_vec(const float* weights, const float* acts, float* out, Shape shape, ThreadPool& pool) {
  require_valid("gemv_vec", shape);
  const TileKernels& kernels = kernels_for(isa());
  const Plan how = plan(shape, kernels.tokens, pool.size());
  pool.parallel_for(shape.od, how.chunk, [&](long long row_begin, long long row_end, int /*thread*/) {
    multiply_rows(kernels, how, weights, acts, out, shape, row_begin, row_end);
  });
}

}  // namespace ladder::cpu
