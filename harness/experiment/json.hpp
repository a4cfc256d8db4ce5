// The one-line JSON objects that records are made of. Writing only; everything that reads records is Python.
// A library would do more, but then a chapter could no longer be built by one nvcc line on a bare machine.
#pragma once

#include <cmath>
#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>

namespace ladder {

/// Escapes a UTF-8 string as a JSON string literal, quotes included.
inline std::string json_quote(std::string_view s) {
  std::string out = "\"";
  for (const char c : s) {
    const auto u = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (u < 0x20) {
      char buf[8];
      std::snprintf(buf, sizeof buf, "\\u%04x", u);
      out += buf;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

/// An object under construction. Fields keep the order in which they were added; a field that does not apply
/// is simply not added, and a number that is not finite is dropped too: JSON has no way to write it.
class JsonObject {
 public:
  JsonObject& add(std::string_view key, std::string_view value) { return raw(key, json_quote(value)); }
  JsonObject& add(std::string_view key, const char* value) { return add(key, std::string_view(value)); }
  JsonObject& add(std::string_view key, const std::string& value) {
    return add(key, std::string_view(value));
  }
  JsonObject& add(std::string_view key, const JsonObject& value) { return raw(key, value.str()); }
  template <class T>
  requires std::is_arithmetic_v<T> JsonObject& add(std::string_view key, T value) {
    if constexpr (std::is_same_v<T, bool>) {
      return raw(key, value ? "true" : "false");
    } else if constexpr (std::is_integral_v<T>) {
      return raw(key, std::to_string(value));
    } else {
      if (!std::isfinite(static_cast<double>(value))) return *this;
      char buf[40];
      std::snprintf(buf, sizeof buf, "%.9g", static_cast<double>(value));
      return raw(key, buf);
    }
  }
  /// Adds a value that is JSON already.
  JsonObject& raw(std::string_view key, std::string_view json) {
    if (!body_.empty()) body_ += ", ";
    body_ += json_quote(key);
    body_ += ": ";
    body_ += json;
    return *this;
  }
  bool empty() const { return body_.empty(); }
  std::string str() const { return "{" + body_ + "}"; }

 private:
  std::string body_;
};

}  // namespace ladder
