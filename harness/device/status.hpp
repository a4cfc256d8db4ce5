// Success, or one line that says what was wrong and what would have been allowed.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace ladder {

/// Result of a launcher or a `supported` question. Launchers never throw: they run inside timed loops and
/// graph captures, where unwinding would leave the stream in an unknown state.
class [[nodiscard]] Status {
 public:
  Status() = default;
  static Status error(std::string message) {
    Status s;
    s.message_ = std::move(message);
    if (s.message_.empty()) s.message_ = "unspecified error";
    return s;
  }
  bool ok() const { return message_.empty(); }
  explicit operator bool() const { return ok(); }
  /// Empty when ok().
  const std::string& message() const { return message_; }

 private:
  std::string message_;
};

/// Thrown by the host side of the device seam (allocation, copies, timing) where the caller cannot go on.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Turns a failed launch into an exception, for code outside hot paths.
inline void require(const Status& s) {
  if (!s.ok()) throw DeviceError(s.message());
}

}  // namespace ladder
