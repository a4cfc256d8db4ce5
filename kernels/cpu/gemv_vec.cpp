// RUNG      gemv_vec (CPU twin): threads over rows, SIMD over elements.
// PREV      gemv_scalar: it waits for one add at a time, and each token streams the weights again.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T   LAYOUT weights row-major f32
// MAP       thread -> ranges of rows; tile -> 4 rows x up to 4 tokens in registers;
//           SIMD lane l -> elements l, l + lanes, l + 2 * lanes, ... of a row, its end padded with zeros
//           (lanes: 16 AVX-512, 8 AVX2, 4 NEON and portable)
// NEEDS     any nt, od, id >= 1
// TRAFFIC   weights 4*od*id B, once per 64 tokens; acts 4*nt*id B, once per 64 rows; out 4*nt*od B
// WORK      2*nt*od*id FLOP
// LOOK FOR  vfmadd with zmm (AVX-512) or ymm (AVX2), fmla with .4s (NEON); no store of sums in the k loop
// EXPECT    nt = 1: the read roof from 64 MB, with all cores; nt >= 64: bound by the FMA units and L2
// BUILD     c++ -std=c++20 -O3 -I. -c kernels/cpu/gemv_vec.cpp
#include <algorithm>
#include <memory>
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

// Beyond one group of tokens, a strip of rows meets a block of tokens panel by panel, and their partial
// sums wait in L2 meanwhile, next to the strip's panel of weights: 256 KiB of sums and 128 KiB of weights.
// Activations are then read once per strip and weights once per block, from wherever they lie.
constexpr long long kStripRows = 64;
constexpr long long kBlockTokens = 64;
static_assert(kStripRows % kTileRows == 0 && kBlockTokens % kGroupTokens == 0);

// A tile of several tokens fetches weights by hand, this many elements ahead (a panel): its multiply-adds
// fill the core's window before enough loads are in flight. (One token's tile does little but load, and is
// best left to the hardware.) Only a block's first group of tokens finds the weights in memory; for later
// groups they are in L2, and 0 says so. At the end of the matrix the address is that of nothing; a prefetch
// of that is ignored.
constexpr long long kPrefetch = kPanel;

// The partial sums of one row of a tile, for one group of tokens.
struct alignas(64) GroupSums {
  float lanes[kGroupTokens][kMaxLanes];
};

struct Plan {
  long long chunk;  // rows a thread takes at a time
  long long strip;  // rows that meet a block of tokens before the next strip; a multiple of kTileRows
  long long panel;  // elements of k per tile call
  [[nodiscard]] long long sums() const {
    return strip * (kBlockTokens / kGroupTokens);
  }  // GroupSums of a thread
};

long long round_up(long long value, long long multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

Plan plan(const Shape& shape, int tile_tokens, int threads) {
  Plan p{};
  // One tile of tokens: the sums never leave the registers and each row is one uninterrupted stream.
  p.panel = shape.nt <= tile_tokens ? shape.id : kPanel;
  p.strip = shape.nt <= kGroupTokens ? kTileRows : kStripRows;
  // About 8 chunks per thread: few enough that their starts do not matter, enough that the slowest thread's
  // last chunk costs little.
  p.chunk = round_up(std::max(1LL, shape.od / (8LL * threads)), kTileRows);
  return p;
}

// Rows row_begin..row_end-1 of every token: the part of one thread. `sums` has room for plan.sums().
// ANCHOR: cpu_gemv_vec
void multiply_rows(const TileKernels& isa, const Plan& plan, const float* weights, const float* acts,
                   float* out, const Shape& shape, long long row_begin, long long row_end, GroupSums* sums) {
  const auto [nt, od, id] = shape;
  // 1. A strip of rows meets a block of tokens. Up to 8 tokens there is one block, and a strip is one tile
  // high.
  for (long long strip = row_begin; strip < row_end; strip += plan.strip) {
    const long long strip_end = std::min(strip + plan.strip, row_end);
    for (long long block = 0; block < nt; block += kBlockTokens) {
      const long long block_end = std::min(block + kBlockTokens, nt);
      // 2. Panel by panel of k; at nt = 1 there is one panel.
      for (long long k = 0; k < id; k += plan.panel) {
        const long long k_end = std::min(k + plan.panel, id);
        // 3. Tokens in groups of 8, whose activations stay in L1 while the strip's rows pass.
        for (long long group = block; group < block_end; group += kGroupTokens) {
          const long long group_end = std::min(group + kGroupTokens, block_end);
          GroupSums* group_sums = sums + (group - block) / kGroupTokens * plan.strip;  // [strip rows]
          // 4. Tiles of 4 rows (of 1 where fewer are left) by as many tokens as the registers have room for.
          for (long long row = strip, height = 0; row < strip_end; row += height) {
            const bool full = row + kTileRows <= strip_end;
            height = full ? kTileRows : 1;
            for (long long token = group; token < group_end; token += isa.tokens) {
              const long long width = std::min<long long>(isa.tokens, group_end - token);  // 1..isa.tokens
              const TileKernel kernel = (full ? isa.full : isa.single)[width - 1];
              kernel(
                  {.weights = weights + row * id,  // [height][id]
                   .acts = acts + token * id,      // [width][id]
                   .out = out + token * od + row,  // [width][od]
                   .od = od,
                   .id = id,
                   .k_begin = k,
                   .k_end = k_end,
                   .ahead = group == block ? kPrefetch : 0,
                   .sums =
                       group_sums[row - strip].lanes[token - group]});  // [height][kGroupTokens][kMaxLanes]
            }
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
  // While decoding the sums are one tile's and fit on the stack: that path does not allocate.
  const bool decoding = shape.nt <= kGroupTokens;
  const auto scratch =
      decoding
          ? nullptr
          : std::make_unique_for_overwrite<GroupSums[]>(static_cast<std::size_t>(how.sums() * pool.size()));
  pool.parallel_for(shape.od, how.chunk, [&](long long row_begin, long long row_end, int thread) {
    GroupSums of_tile[kTileRows];
    GroupSums* sums = decoding ? of_tile : scratch.get() + thread * how.sums();
    multiply_rows(kernels, how, weights, acts, out, shape, row_begin, row_end, sums);
  });
}

}  // namespace ladder::cpu
