// `qwen tokenize`: text to ids and pieces, and back.
#include <unistd.h>

#include <charconv>
#include <cstdio>

#include "chapters/09-qwen/commands.hpp"
#include "chapters/09-qwen/session.hpp"
#include "harness/experiment/json.hpp"

namespace ladder::qwen {
namespace {

/// A piece for the eye: control characters and bytes that are no whole character are escaped.
std::string visible(std::string_view bytes) {
  std::string out;
  const bool whole = valid_utf8(bytes) == bytes;
  for (const char c : bytes) {
    const auto u = static_cast<unsigned char>(c);
    char code[8];
    if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c == '\\' || c == '\'') {
      out += '\\';
      out += c;
    } else if (u < 0x20 || u == 0x7F || (u >= 0x80 && !whole)) {
      std::snprintf(code, sizeof code, "\\x%02x", u);
      out += code;
    } else {
      out += c;
    }
  }
  return out;
}

std::string text_of(const TokenizeOptions& options) {
  if (options.text.empty() && ::isatty(STDIN_FILENO) == 1) {
    throw CommandError(options.decode ? "no ids: give them as arguments or on stdin"
                                      : "no text: give it as an argument or on stdin");
  }
  if (options.text.empty() || (options.text.size() == 1 && options.text[0] == "-"))
    return read_whole("-", "text");
  if (!options.decode && options.text.size() > 1) {
    throw CommandError("'" + options.text[1] + "' was not expected: put the text in quotes");
  }
  std::string all;
  for (const std::string& part : options.text) all += (all.empty() ? "" : " ") + part;
  return all;
}

/// Ids between spaces, commas or brackets: what --ids and --json print can be given back.
std::vector<Token> parse_ids(std::string_view text, int size) {
  constexpr std::string_view kBetween = " \t\r\n,[]";
  std::vector<Token> ids;
  for (std::size_t i = text.find_first_not_of(kBetween); i != std::string_view::npos;
       i = text.find_first_not_of(kBetween, i)) {
    const std::size_t end = std::min(text.find_first_of(kBetween, i), text.size());
    const std::string_view word = text.substr(i, end - i);
    Token id = 0;
    const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (error != std::errc() || stop != word.data() + word.size() || id < 0 || id >= size) {
      throw CommandError(std::string(word) + " is not a token id from 0 to " + std::to_string(size - 1));
    }
    ids.push_back(id);
    i = end;
  }
  return ids;
}

}  // namespace

int tokenize_command(const TokenizeOptions& options) {
  require_readable(options.model, "model");
  const std::string text = text_of(options);
  const gguf::File file(options.model, /*headers_only=*/true);
  const Tokenizer tokenizer(file);
  std::vector<Token> ids;
  bool changed = false;
  if (options.decode) {
    ids = parse_ids(text, tokenizer.size());
    const std::string decoded = tokenizer.decode(ids, /*special=*/true);
    if (!options.json) {
      print(decoded);
      if (::isatty(STDOUT_FILENO) == 1 && !decoded.ends_with('\n')) print("\n");
      return 0;
    }
  } else {
    ids = tokenizer.encode(text, {.special = options.parse_special, .nfc = options.nfc}, &changed);
    if (changed) std::fprintf(stderr, "note: the text was normalised to NFC (--no-nfc leaves it as it is)\n");
  }
  if (options.ids) {
    std::string line;
    for (const Token id : ids) line.append(line.empty() ? "" : " ").append(std::to_string(id));
    print(line + "\n");
    return 0;
  }
  if (options.json) {
    std::string pieces = "[";
    for (const Token id : ids)
      pieces += (pieces.size() > 1 ? ", " : "") + json_quote(valid_utf8(tokenizer.bytes(id, true)));
    JsonObject report;
    report.add("text", valid_utf8(options.decode ? tokenizer.decode(ids, true) : text))
        .raw("tokens", json_array(std::span<const Token>(ids)))
        .raw("pieces", pieces + "]")
        .add("count", ids.size());
    if (!options.decode) report.add("normalized", changed);
    print(report.str() + "\n");
    return 0;
  }
  std::string lines;
  for (const Token id : ids) {
    char number[16];
    std::snprintf(number, sizeof number, "%6d  '", id);
    lines += number + visible(tokenizer.bytes(id, true)) + "'\n";
  }
  print(lines);
  return 0;
}

}  // namespace ladder::qwen
