// Ctrl-C as a question that long work asks now and then, instead of the end of the program.
#pragma once

#include <csignal>

namespace ladder::qwen {

/// While one of these lives, the first SIGINT only sets a flag; another one, before clear(), ends the program
/// with status 130. At most one may live at a time: a process has one disposition of a signal.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  [[nodiscard]] bool requested() const;
  void clear();

  /// Waits until `descriptor` can be read (or is at its end). false: SIGINT came first, or had come already.
  [[nodiscard]] bool wait_readable(int descriptor) const;

 private:
  struct sigaction before_ {};
};

/// Exit status of a program that Ctrl-C ended, as shells report it.
inline constexpr int kInterruptedStatus = 128 + SIGINT;

}  // namespace ladder::qwen
