// The CPU's read roof, one sample at a time.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "harness/device/device_info.hpp"
#include "harness/device/status.hpp"
#include "kernels/cpu/roofs.hpp"
#include "kernels/cpu/thread_pool.hpp"

namespace ladder {

/// Host memory for the CPU's bandwidth probes: at least eight last-level caches and 1 GiB (processors with
/// several caches report one of them), at most a quarter of the memory.
inline std::size_t cpu_roof_bytes(const DeviceInfo& device) {
  const std::size_t wanted = std::max(8 * device.l2_bytes, std::size_t{1} << 30);
  const std::size_t most = device.total_bytes > 0 ? device.total_bytes / 4 : wanted;
  return std::max<std::size_t>(1 << 20, std::min(wanted, most) / 4096 * 4096);
}

/// Reads a buffer of at least eight last-level caches with all threads of the pool; `once()` is the time in
/// ns. The memory of a shared machine can change its speed from one second to the next, so what runs on the
/// CPU is timed in turns with this: each sample has one of the roof beside it.
class CpuReadProbe {
 public:
  /// Throws std::bad_alloc.
  CpuReadProbe(const DeviceInfo& device, cpu::ThreadPool& pool)
      : pool_(pool), words_(cpu_roof_bytes(device) / sizeof(std::uint32_t)) {
    buffer_.reset(static_cast<std::uint32_t*>(std::aligned_alloc(4096, words_ * sizeof(std::uint32_t))));
    if (!buffer_) throw std::bad_alloc();
    // The first writer of a page decides which memory it lies in: the threads that will read it.
    cpu::roof_write(buffer_.get(), words_, kSeed, cpu::Stores::cached, pool);
    for (std::size_t i = 0; i < words_; ++i) expected_ += cpu::roof_write_word(kSeed, i);
  }
  [[nodiscard]] double bytes() const { return static_cast<double>(words_ * sizeof(std::uint32_t)); }
  /// Throws DeviceError if the sum is not what was written.
  double once() {
    const auto start = std::chrono::steady_clock::now();
    const std::uint32_t sum = cpu::roof_read(buffer_.get(), words_, pool_);
    const double ns =
        std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
    if (sum != expected_)
      throw DeviceError("the CPU's roof_read returned a wrong sum; no roof can be measured");
    return ns;
  }

 private:
  static constexpr std::uint32_t kSeed = 77;
  struct Free {
    void operator()(std::uint32_t* p) const { std::free(p); }
  };
  cpu::ThreadPool& pool_;
  std::size_t words_;
  std::unique_ptr<std::uint32_t, Free> buffer_;
  std::uint32_t expected_ = 0;
};

}  // namespace ladder
