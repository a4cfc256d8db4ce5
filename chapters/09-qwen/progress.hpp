// A progress bar for people: on stderr, and only where that is a terminal.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

namespace ladder::qwen {

/// Redraws one line of stderr at most ten times a second and wipes it at the end, so that nothing of it is
/// left in a log. Where stderr is no terminal it prints nothing.
class ProgressBar {
 public:
  /// @param label what is being done: "loading", "quantizing"
  explicit ProgressBar(std::string label) : label_(std::move(label)), shown_(::isatty(STDERR_FILENO) == 1) {}
  ~ProgressBar() { finish(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// @param done, total in any one unit; total 0 draws nothing
  void update(std::uint64_t done, std::uint64_t total) {
    if (!shown_ || total == 0) return;
    const auto now = std::chrono::steady_clock::now();
    if (drawn_ && now - last_ < std::chrono::milliseconds(100)) return;
    last_ = now;
    drawn_ = true;
    constexpr int kWidth = 30;
    const double part = std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
    const auto full = static_cast<std::size_t>(part * kWidth);
    const std::string bar = std::string(full, '#') + std::string(kWidth - full, '.');
    std::fprintf(stderr, "\r%s [%s] %3d %%", label_.c_str(), bar.c_str(), static_cast<int>(part * 100));
    std::fflush(stderr);
  }

  /// Wipes the line. Safe to call more than once.
  void finish() {
    if (drawn_) {
      std::fprintf(stderr, "\r\033[K");
      std::fflush(stderr);
    }
    drawn_ = false;
  }

 private:
  std::string label_;
  bool shown_, drawn_ = false;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace ladder::qwen
