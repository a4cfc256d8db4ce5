// Host halves of fill.hpp and reference.hpp. They live in their own translation unit because chapter sources
// are compiled with memory instrumentation in the host build, and these loops touch every weight.
#include "harness/experiment/reference.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

#include "harness/experiment/fill.hpp"
#include "kernels/quant/dequantize.hpp"

namespace ladder {
namespace {

/// Calls body(begin, end) over [0, n) on all hardware threads.
template <class F>
void for_chunks(long long n, long long chunk, F body) {
  std::atomic<long long> next{0};
  const auto work = [&] {
    for (long long b = next.fetch_add(chunk); b < n; b = next.fetch_add(chunk))
      body(b, std::min(n, b + chunk));
  };
  const unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> pool;
  for (unsigned t = 1; t < threads && n > chunk; ++t) pool.emplace_back(work);
  work();
  for (std::thread& t : pool) t.join();
}

}  // namespace

void fill_host(float* dst, unsigned long long n, FillKind kind, unsigned seed) {
  for_chunks(static_cast<long long>(n), 1 << 16, [&](long long b, long long e) {
    for (long long i = b; i < e; ++i) dst[i] = fill_value(kind, seed, static_cast<std::uint64_t>(i));
  });
}

void fill_blocks_host(unsigned char* dst, unsigned long long blocks, WeightType type, BlockFill kind,
                      unsigned seed) {
  const int bytes = info(type).block_bytes;
  for_chunks(static_cast<long long>(blocks), 1 << 10, [&](long long b, long long e) {
    for (long long i = b; i < e; ++i) {
      fill_block(type, kind, seed, static_cast<std::uint64_t>(i), dst + i * bytes, bytes);
    }
  });
}

void reference_host(const void* weights, WeightType type, const float* acts, double* value, double* magnitude,
                    Shape s) {
  // Eight rows at a time: eight independent chains keep the adders busy without reordering any sum.
  constexpr int kRows = 8;
  const long long groups = (s.od + kRows - 1) / kRows;
  const std::size_t bytes = row_bytes(type, s.id);
  const bool packed = type != WeightType::f32, offsets = has_offset(type);
  for_chunks(groups, 1, [&](long long b, long long e) {
    std::vector<float> decoded(packed ? static_cast<std::size_t>(kRows * s.id) : 0);
    std::vector<float> zero_point(offsets ? decoded.size() : 0);
    std::vector<unsigned char> codeless(offsets ? bytes : 0);
    for (long long g = b; g < e; ++g) {
      const long long r0 = g * kRows;
      const int rows = static_cast<int>(std::min<long long>(kRows, s.od - r0));
      const float* w = packed ? decoded.data() : static_cast<const float*>(weights) + r0 * s.id;
      for (int k = 0; packed && k < rows; ++k) {
        const auto* row =
            static_cast<const unsigned char*>(weights) + static_cast<std::size_t>(r0 + k) * bytes;
        dequantize_row(type, row, decoded.data() + k * s.id, s.id);
        if (!offsets) continue;
        std::copy(row, row + bytes, codeless.begin());
        for (std::size_t at = 0; at < bytes; at += static_cast<std::size_t>(info(type).block_bytes)) {
          zero_codes(type, codeless.data() + at);
        }
        dequantize_row(type, codeless.data(), zero_point.data() + k * s.id, s.id);
      }
      for (long long t = 0; t < s.nt; ++t) {
        double sum[kRows] = {}, absolute[kRows] = {};
        const float* x = acts + t * s.id;
        for (long long i = 0; i < s.id; ++i) {
          const double xi = x[i];
          for (int k = 0; k < rows; ++k) {
            const double wi = w[k * s.id + i];
            const double term = wi * xi;
            sum[k] += term;
            if (!offsets) {
              absolute[k] += std::fabs(term);
            } else {
              const double oi = zero_point[static_cast<std::size_t>(k * s.id + i)];
              absolute[k] += std::fabs((wi - oi) * xi) + std::fabs(oi * xi);
            }
          }
        }
        for (int k = 0; k < rows; ++k) {
          value[t * s.od + r0 + k] = sum[k];
          magnitude[t * s.od + r0 + k] = absolute[k];
        }
      }
    }
  });
}

}  // namespace ladder
