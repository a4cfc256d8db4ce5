// LADDER_TRACE: what every kernel of a pass was, how long it took, and how near it came to its roof, in the format of
// Chrome's trace viewer (chrome://tracing, Perfetto).
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "harness/experiment/json.hpp"

namespace ladder::qwen {

/// A file of events, complete after finish() or when the object goes: a list of JSON objects.
class Trace {
 public:
  /// Throws std::runtime_error if the file cannot be written.
  explicit Trace(std::string path)
      : path_(std::move(path)), file_(path_, std::ios::binary | std::ios::trunc) {
    if (!file_) throw std::runtime_error("LADDER_TRACE: cannot write " + path_ + ": " + std::strerror(errno));
    file_ << "[\n";
  }
  ~Trace() {
    try {
      finish();
    } catch (const std::exception& e) {
      std::fprintf(stderr, "qwen: %s\n", e.what());
    }
  }
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// A name for everything that follows: the program and what its times are.
  void name_process(const std::string& name) {
    write(JsonObject()
              .add("name", "process_name")
              .add("ph", "M")
              .add("pid", 1)
              .add("args", JsonObject().add("name", name)));
  }
  /// An event from `begin_ns`, which counts from any moment, for `ns`.
  void add(const std::string& name, const char* category, double begin_ns, double ns,
           const JsonObject& arguments) {
    write(JsonObject()
              .add("name", name)
              .add("cat", category)
              .add("ph", "X")
              .add("pid", 1)
              .add("tid", 1)
              .raw("ts", microseconds(begin_ns))
              .raw("dur", microseconds(ns))
              .add("args", arguments));
    ++events_;
  }
  [[nodiscard]] std::size_t events() const { return events_; }

  /// Brings what there is to the file. Throws std::runtime_error if anything could not be written (disk full), once.
  void flush() { check(file_.is_open() && !file_.flush()); }
  /// Ends the list. Throws as flush().
  void finish() {
    if (!file_.is_open()) return;
    file_ << "\n]\n";
    file_.close();
    check(!file_);
  }

 private:
  void check(bool failed) {
    if (!failed) return;
    file_.close();
    throw std::runtime_error("LADDER_TRACE: writing " + path_ + " failed");
  }
  static std::string microseconds(double ns) {
    char text[40];
    std::snprintf(text, sizeof text, "%.3f", ns / 1e3);
    return text;
  }
  void write(const JsonObject& event) {
    file_ << (first_ ? "" : ",\n") << event.str();
    first_ = false;
  }

  std::string path_;
  std::ofstream file_;
  bool first_ = true;
  std::size_t events_ = 0;
};

}  // namespace ladder::qwen
