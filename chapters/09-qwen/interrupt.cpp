#include "chapters/09-qwen/interrupt.hpp"

#include <sys/select.h>
#include <unistd.h>

#include <cerrno>

namespace ladder::qwen {
namespace {

extern "C" void ladder_qwen_on_interrupt(int) {
  if (detail::interrupts.fetch_add(1, std::memory_order_relaxed) > 0) ::_exit(kInterruptedStatus);
}

}  // namespace

Interrupt::Interrupt() {
  clear();
  struct sigaction action {};
  action.sa_handler = ladder_qwen_on_interrupt;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;  // so that no write to stdout is cut short
  ::sigaction(SIGINT, &action, &before_);
}

Interrupt::~Interrupt() {
  ::sigaction(SIGINT, &before_, nullptr);
  clear();
}

bool Interrupt::wait_readable(int descriptor) const {
  // Blocked from the look at the flag until pselect sleeps: a signal in between would otherwise go unnoticed.
  sigset_t blocked, before;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGINT);
  ::pthread_sigmask(SIG_BLOCK, &blocked, &before);
  bool readable = false;
  while (!requested()) {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(descriptor, &set);
    const int n = ::pselect(descriptor + 1, &set, nullptr, nullptr, nullptr, &before);
    if (n < 0 && errno == EINTR) continue;
    readable = true;  // also after an error: reading will say which
    break;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return readable;
}

}  // namespace ladder::qwen
