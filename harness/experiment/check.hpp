// Is the answer right? An output is accepted only if it is finite and within a bound derived from how the
// kernel adds its terms. Written so that NaN fails: the usual `|ref - out| > tol -> reject` lets NaN pass.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "harness/device/device.hpp"
#include "harness/experiment/reference.hpp"

namespace ladder {

inline constexpr double kUnitRoundoffF32 = 1.0 / 16777216.0;  // 2^-24

/// Outcome of comparing one output array with its reference.
struct CheckResult {
  bool ok = false;
  double max_error_over_bound = 0;  ///< largest |out - ref| / bound over all outputs; meaningless if !ok
  std::string message;              ///< first offence, with its position; empty when ok
};

/// Factor c of the error bound c * u * sum|terms| when a term meets at most `k` f32 roundings on its way into
/// an output (its product, then additions). Two bounds hold, and the smaller is used:
///   k            always (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1)
///   8 sqrt(k)    except with probability below 2k exp(-32), for roundings that are independent with mean
///   zero, as
///                on our random operands (Higham and Mary, SIAM J. Sci. Comput. 41, 2019)
/// The second is what makes the check sharp for long rows: it rejects sums kept in f16.
inline double rounding_factor(double k) { return std::min(k, 8.0 * std::sqrt(k)); }

/// Accepts out[i] only if it is finite and |out[i] - value[i]| <= rounding_factor(roundings) * u *
/// magnitude[i], the factor of magnitude being larger by `operand_rounding`. Both 0 demand equality.
/// @param out, value, magnitude [nt][od]
inline CheckResult check_outputs(std::span<const float> out, std::span<const double> value,
                                 std::span<const double> magnitude, double roundings, Shape shape,
                                 double operand_rounding = 0) {
  CheckResult r;
  const auto where = [&](std::size_t i) {
    return "out[" + std::to_string(i / static_cast<std::size_t>(shape.od)) + "][" +
           std::to_string(i % static_cast<std::size_t>(shape.od)) + "]";
  };
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double bound = (rounding_factor(roundings) * kUnitRoundoffF32 + operand_rounding) * magnitude[i];
    const double error = std::fabs(static_cast<double>(out[i]) - value[i]);
    const bool accepted = std::isfinite(out[i]) && error <= bound;
    if (!accepted) {
      r.message = where(i) + " is " + std::to_string(out[i]) + ", expected " + std::to_string(value[i]) +
                  (roundings > 0 || operand_rounding > 0 ? " within " + std::to_string(bound) : " exactly");
      return r;
    }
    if (bound > 0) r.max_error_over_bound = std::max(r.max_error_over_bound, error / bound);
  }
  r.ok = true;
  return r;
}

/// A device array with 1 KiB of 0xFF bytes (NaN, read as floats) on both sides. A kernel that reads past an
/// end computes NaN; one that writes past an end is caught by `guards_intact`.
template <class T>
class GuardedBuffer {
 public:
  static constexpr std::size_t kGuardBytes = 1024;
  static constexpr std::size_t kGuard = (kGuardBytes + sizeof(T) - 1) / sizeof(T);

  GuardedBuffer() = default;
  GuardedBuffer(std::size_t n, const char* name) : all_(n + 2 * kGuard, name), n_(n) { poison(); }
  T* data() { return all_.data() + kGuard; }
  const T* data() const { return all_.data() + kGuard; }
  std::size_t size() const { return n_; }
  /// Fills payload and guards with 0xFF.
  void poison() { all_.fill_bytes(0xFF); }
  /// Replaces the first elements of the payload; the guards stay.
  void upload(std::span<const T> src) {
    std::vector<T> host(all_.size());
    all_.download(host);
    if (src.size() > n_) throw DeviceError("GuardedBuffer::upload: source longer than the buffer");
    std::memcpy(host.data() + kGuard, src.data(), src.size_bytes());
    all_.upload(host);
  }
  /// Copies the payload out and says whether both guard bands still hold 0xFF.
  bool download(std::span<T> dst) const {
    std::vector<T> host(all_.size());
    all_.download(host);
    std::memcpy(dst.data(), host.data() + kGuard, dst.size_bytes());
    const auto untouched = [](const T* p) {
      const auto* bytes = reinterpret_cast<const unsigned char*>(p);
      for (std::size_t i = 0; i < kGuard * sizeof(T); ++i) {
        if (bytes[i] != 0xFF) return false;
      }
      return true;
    };
    return untouched(host.data()) && untouched(host.data() + kGuard + n_);
  }

 private:
  Buffer<T> all_;
  std::size_t n_ = 0;
};

}  // namespace ladder
