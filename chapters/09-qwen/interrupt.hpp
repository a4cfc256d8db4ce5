// Ctrl-C as a question that long work asks now and then, instead of the end of the program.
#pragma once

#include <atomic>
#include <csignal>
#include <exception>

namespace ladder::qwen {

namespace detail {
// A signal handler is given no pointer, so what it sets has to be static.
inline constinit std::atomic<int> interrupts{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler may touch nothing else");
}  // namespace detail

/// Thrown out of work that Ctrl-C ends.
class Interrupted : public std::exception {
 public:
  [[nodiscard]] const char* what() const noexcept override { return "interrupted"; }
};

/// While one of these lives, the first SIGINT only sets a flag; another one, before clear(), ends the program
/// with status 130. At most one may live at a time: a process has one disposition of a signal.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  [[nodiscard]] bool requested() const { return detail::interrupts.load(std::memory_order_relaxed) > 0; }
  void clear() { detail::interrupts.store(0, std::memory_order_relaxed); }
  /// Throws Interrupted if SIGINT came. For work that knows of no Interrupt; without one nothing is ever requested.
  static void check() {
    if (detail::interrupts.load(std::memory_order_relaxed) > 0) throw Interrupted();
  }

  /// Waits until `descriptor` can be read (or is at its end). false: SIGINT came first, or had come already.
  [[nodiscard]] bool wait_readable(int descriptor) const;

 private:
  struct sigaction before_ {};
};

/// Exit status of a program that Ctrl-C ended, as shells report it.
inline constexpr int kInterruptedStatus = 128 + SIGINT;

}  // namespace ladder::qwen
