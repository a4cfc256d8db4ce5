// RUNG      gemm_f32 (CPU twin), and with f16 operands gemm_f16 and gemm_f16_af32: three layers of tiles.
// PREV      gemv_vec: its tile of 4 rows x 4 tokens loads 8 vectors for 16 multiply-adds, and adds up lanes at the end.
// COMPUTES  out[nt][od] = acts[nt][id] . weights[od][id]^T   LAYOUT weights and acts row-major, f32 or f16
// MAP       thread -> strips of up to 128 rows x blocks of tokens; in them, by 256 elements of k: a panel of rows in
//           L1 x panels of tokens from L2; tile -> 32 rows x 12 tokens in registers (AVX-512), lane -> a row
// NEEDS     any nt, od, id >= 1
// TRAFFIC   weights once per 2048 tokens; acts once, and their panels once a strip; out 8*nt*od*ceil(id/256) B, in L2
// WORK      2*nt*od*id FLOP
// LOOK FOR  24 vfmadd231ps with zmm for 2 loads and 12 broadcasts; no store in the loop over k
// EXPECT    beside a good BLAS from nt = 64 on; packing shows below
// BUILD     c++ -std=c++20 -O3 -I. -c kernels/cpu/gemm_f32.cpp
#include "kernels/cpu/gemm_f32.hpp"

#include <algorithm>
#include <memory>
#include <new>
#include <stdexcept>
#include <type_traits>

#include "kernels/cpu/features.hpp"
#include "kernels/cpu/gemm_f32_tile.hpp"
#include "kernels/cpu/gemv_shape.hpp"

namespace ladder::cpu {
namespace {

const GemmKernels& kernels_for(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::avx512:
      return kGemmAvx512;
    case Isa::avx2:
      return kGemmAvx2;
#elif defined(__aarch64__)
    case Isa::neon:
      return kGemmNeon;
#endif
    default:
      return kGemmPortable;
  }
}

// ANCHOR: cpu_gemm_blocks
constexpr long long kMostStripRows = 128;  // panels of k x rows in L2: 128 KiB
constexpr long long kBlockTiles = 8;       // panels of k x tokens in L2: 96 KiB where a tile has 12 tokens
constexpr long long kCallTokens =
    2048;  // tokens and elements of k whose panels are made at once: 512 tokens' are
constexpr long long kCallDepths = 8;  // 4 MiB, in L3

long long round_up(long long value, long long multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Floats at a multiple of 64 bytes.
class Panels {
 public:
  explicit Panels(long long count)
      : floats_(static_cast<float*>(
            ::operator new[](static_cast<std::size_t>(count) * sizeof(float), std::align_val_t{64}))) {}
  [[nodiscard]] float* data() const { return floats_.get(); }

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<float[], Free> floats_;
};

void pack(const GemmKernels& kernels, const float* from, long long id, int rows, int depth, int width,
          float* out) {
  kernels.pack_f32(from, id, rows, depth, width, out);
}
void pack(const GemmKernels& kernels, const std::uint16_t* from, long long id, int rows, int depth, int width,
          float* out) {
  kernels.pack_f16(from, id, rows, depth, width, out);
}

/// Elements k_begin..k_end-1 of k, added to what came before. @param x room for panels of activations
template <class Weight, class Act>
void gemm(const Weight* weights, const Act* acts, float* out, Shape shape, long long k_begin, long long k_end,
          float* x, ThreadPool& pool) {
  const GemmKernels& kernels = kernels_for(isa());
  const long long nt = shape.nt, od = shape.od, id = shape.id;
  const long long width = kernels.rows, most = kernels.tokens;
  // 1. Activations to panels, [k / 256][tokens / most][256][most]. The last panel has as many tokens as are left.
  pool.parallel_for((nt + most - 1) / most, 1, [&](long long begin, long long end, int) {
    for (long long p = begin; p < end; ++p) {
      const auto tokens = static_cast<int>(std::min(most, nt - p * most));
      for (long long k = k_begin; k < k_end; k += kGemmDepth) {
        const auto depth = static_cast<int>(std::min(kGemmDepth, k_end - k));
        pack(kernels, acts + p * most * id + k, id, tokens, depth, tokens,
             x + nt * (k - k_begin) + p * most * depth);
      }
    }
  });
  // 2. Strips of rows times shares of the tokens: enough of them that the threads end together.
  const long long strip = std::clamp(round_up(od / (8LL * pool.size()) + 1, width), width,
                                     std::max(width, kMostStripRows / width * width));
  const long long strips = (od + strip - 1) / strip, tokens_of_block = kBlockTiles * most;
  const long long share = strips < 4LL * pool.size() ? tokens_of_block : nt,
                  shares = (nt + share - 1) / share;
  const Panels w(strip * kGemmDepth * pool.size());
  pool.parallel_for(strips * shares, 1, [&](long long begin, long long end, int thread) {
    float* panels = w.data() + strip * kGemmDepth * thread;
    for (long long unit = begin; unit < end; ++unit) {
      const long long row = unit / shares * strip, row_end = std::min(row + strip, od);
      const long long token = unit % shares * share, token_end = std::min(token + share, nt);
      for (long long k = k_begin; k < k_end; k += kGemmDepth) {
        GemmTile tile{};
        tile.depth = static_cast<int>(std::min(kGemmDepth, k_end - k));
        tile.od = od;
        tile.accumulates = k > 0;
        for (long long r = row; r < row_end; r += width) {
          pack(kernels, weights + r * id + k, id, static_cast<int>(std::min(width, row_end - r)), tile.depth,
               static_cast<int>(width), panels + (r - row) * tile.depth);
        }
        // 3. A block of tokens from L2 meets the strip panel by panel; the panel of rows stays in L1.
        for (long long block = token; block < token_end; block += tokens_of_block) {
          const long long block_end = std::min(block + tokens_of_block, token_end);
          for (long long r = row; r < row_end; r += width) {
            tile.weights = panels + (r - row) * tile.depth;  // [depth][width]
            tile.rows = static_cast<int>(std::min(width, row_end - r));
            for (long long t = block; t < block_end; t += most) {
              tile.acts = x + nt * (k - k_begin) + t * tile.depth;  // [depth][tokens]
              tile.out = out + t * od + r;
              kernels.tile[std::min(most, block_end - t) - 1](tile);
            }
          }
        }
      }
    }
  });
}
// ANCHOR_END: cpu_gemm_blocks

template <class Weight, class Act>
void checked(const char* name, const Weight* weights, const Act* acts, float* out, Shape shape,
             ThreadPool& pool) {
  require_valid(name, shape);
  const auto [nt, od, id] = shape;
  const long long chunk = kCallDepths * kGemmDepth;
  const Panels x(std::min(kCallTokens, nt) * std::min(chunk, id));
  for (long long t = 0; t < nt; t += kCallTokens) {
    for (long long k = 0; k < id; k += chunk) {
      gemm(weights, acts + t * id, out + t * od, {std::min(kCallTokens, nt - t), od, id}, k,
           std::min(k + chunk, id), x.data(), pool);
    }
  }
}

}  // namespace

void gemm_f32(const float* weights, const float* acts, float* out, Shape shape, ThreadPool& pool) {
  checked("gemm_f32", weights, acts, out, shape, pool);
}

void gemm_f16(const std::uint16_t* weights, const std::uint16_t* acts, float* out, Shape shape,
              ThreadPool& pool) {
  checked("gemm_f16", weights, acts, out, shape, pool);
}

void gemm_f16_af32(const std::uint16_t* weights, const float* acts, float* out, Shape shape,
                   ThreadPool& pool) {
  checked("gemm_f16_af32", weights, acts, out, shape, pool);
}

double gemm_roundings(long long id) {
  return static_cast<double>(std::min(id, kGemmDepth) + (id + kGemmDepth - 1) / kGemmDepth - 1);
}

std::string gemm_source() {
  return "kernels/cpu/gemm_f32_body.hpp#cpu_gemm_tile,kernels/cpu/gemm_f32_body.hpp#cpu_gemm_pack,"
         "kernels/cpu/gemm_f32.cpp#cpu_gemm_blocks";
}

}  // namespace ladder::cpu
