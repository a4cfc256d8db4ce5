// Reads JSON, as far as tables of gates need it: a text to a tree of values, with the line of what is wrong. Chapters
// build by one line on a bare machine, so there is no library here; records are read by Python alone.
#pragma once

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ladder::dispatch {

/// "line 3: ..."
class JsonError : public std::runtime_error {
 public:
  JsonError(int line, const std::string& what)
      : std::runtime_error("line " + std::to_string(line) + ": " + what) {}
};

struct JsonValue {
  enum class Kind { null, boolean, number, string, array, object };
  Kind kind = Kind::null;
  int line = 1;                    ///< where it begins
  bool boolean = false;            ///< of boolean
  double number = 0;               ///< of number
  std::string string;              ///< of string, UTF-8
  std::vector<JsonValue> items;    ///< of array, and of object in order
  std::vector<std::string> names;  ///< of object: those of its items, each once
};

/// A recursive descent over RFC 8259, to a depth of 64.
class JsonReader {
 public:
  /// Throws JsonError.
  static JsonValue read(std::string_view text) {
    JsonReader reader(text);
    JsonValue v = reader.value(0);
    reader.skip_space();
    if (reader.at_ < text.size()) reader.fail("something follows the value");
    return v;
  }

 private:
  explicit JsonReader(std::string_view text) : text_(text) {}

  [[noreturn]] void fail(const std::string& what) const { throw JsonError(line_, what); }
  [[nodiscard]] char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  char next() {
    if (at_ >= text_.size()) fail("the text ends too early");
    if (text_[at_] == '\n') ++line_;
    return text_[at_++];
  }
  void skip_space() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos)
      next();
  }
  void expect(char c) {
    skip_space();
    if (peek() != c || at_ >= text_.size()) {
      fail(std::string("expected '") + c + "', found " +
           (at_ < text_.size() ? std::string("'") + text_[at_] + "'" : "the end"));
    }
    next();
  }
  void word(std::string_view w) {
    if (text_.substr(at_, w.size()) != w) fail("expected a value");
    at_ += w.size();
  }

  JsonValue value(int depth) {
    if (depth > kDeepest) fail("values are nested too deeply");
    skip_space();
    JsonValue v;
    v.line = line_;
    switch (peek()) {
      case '{':
        object(v, depth);
        break;
      case '[':
        array(v, depth);
        break;
      case '"':
        v.kind = JsonValue::Kind::string;
        v.string = string();
        break;
      case 't':
      case 'f':
        v.kind = JsonValue::Kind::boolean;
        v.boolean = peek() == 't';
        word(v.boolean ? "true" : "false");
        break;
      case 'n':
        word("null");
        break;
      default:
        number(v);
    }
    return v;
  }

  void object(JsonValue& v, int depth) {
    v.kind = JsonValue::Kind::object;
    expect('{');
    skip_space();
    if (peek() == '}') {
      next();
      return;
    }
    for (;;) {
      skip_space();
      if (peek() != '"') fail("expected a name in quotes");
      std::string name = string();
      if (std::find(v.names.begin(), v.names.end(), name) != v.names.end())
        fail("'" + name + "' is there twice");
      expect(':');
      v.names.push_back(std::move(name));
      v.items.push_back(value(depth + 1));
      skip_space();
      if (peek() != ',') break;
      next();
    }
    expect('}');
  }

  void array(JsonValue& v, int depth) {
    v.kind = JsonValue::Kind::array;
    expect('[');
    skip_space();
    if (peek() == ']') {
      next();
      return;
    }
    for (;;) {
      v.items.push_back(value(depth + 1));
      skip_space();
      if (peek() != ',') break;
      next();
    }
    expect(']');
  }

  std::string string() {
    next();
    std::string out;
    for (;;) {
      const char c = next();
      if (c == '"') return out;
      if (static_cast<unsigned char>(c) < 0x20) fail("a string holds a control character");
      if (c != '\\') {
        out += c;
        continue;
      }
      const char e = next();
      constexpr std::string_view kFrom = "\"\\/bfnrt", kTo = "\"\\/\b\f\n\r\t";
      if (const std::size_t i = kFrom.find(e); i != std::string_view::npos) {
        out += kTo[i];
      } else if (e == 'u') {
        utf8(code_unit(), out);
      } else {
        fail(std::string("there is no escape \\") + e);
      }
    }
  }
  std::uint32_t code_unit() {
    std::uint32_t v = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = next();
      if (std::isxdigit(static_cast<unsigned char>(c)) == 0) fail("\\u takes four hexadecimal digits");
      v = v * 16 + static_cast<std::uint32_t>(std::isdigit(static_cast<unsigned char>(c)) != 0
                                                  ? c - '0'
                                                  : std::tolower(static_cast<unsigned char>(c)) - 'a' + 10);
    }
    return v;
  }
  void utf8(std::uint32_t c, std::string& out) {
    if (c >= 0xd800 && c < 0xdc00) {  // the first of a pair
      if (next() != '\\' || next() != 'u') fail("half of a pair of surrogates");
      const std::uint32_t low = code_unit();
      if (low < 0xdc00 || low > 0xdfff) fail("half of a pair of surrogates");
      c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
    } else if (c >= 0xdc00 && c < 0xe000) {
      fail("half of a pair of surrogates");
    }
    const auto byte = [&out](std::uint32_t b) { out += static_cast<char>(b); };
    if (c < 0x80) {
      byte(c);
    } else if (c < 0x800) {
      byte(0xc0 | c >> 6);
      byte(0x80 | (c & 63));
    } else if (c < 0x10000) {
      byte(0xe0 | c >> 12);
      byte(0x80 | (c >> 6 & 63));
      byte(0x80 | (c & 63));
    } else {
      byte(0xf0 | c >> 18);
      byte(0x80 | (c >> 12 & 63));
      byte(0x80 | (c >> 6 & 63));
      byte(0x80 | (c & 63));
    }
  }

  void number(JsonValue& v) {
    const char* const begin = text_.data() + at_;
    const char* const end = text_.data() + text_.size();
    const bool signed_ = begin < end && *begin == '-';
    const char* const digits = begin + (signed_ ? 1 : 0);
    if (digits >= end || *digits < '0' || *digits > '9') fail("expected a value");
    if (*digits == '0' && digits + 1 < end && digits[1] >= '0' && digits[1] <= '9') {
      fail("a number begins with 0");
    }
    const auto [stop, error] = std::from_chars(begin, end, v.number);
    if (error != std::errc() || stop[-1] == '.') fail("a number is malformed or too large");
    v.kind = JsonValue::Kind::number;
    at_ += static_cast<std::size_t>(stop - begin);
  }

  static constexpr int kDeepest = 64;
  std::string_view text_;
  std::size_t at_ = 0;
  int line_ = 1;
};

}  // namespace ladder::dispatch
