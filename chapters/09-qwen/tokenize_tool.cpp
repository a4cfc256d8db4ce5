// tokenize_tool MODEL.gguf [--special] [--no-nfc] [--decode]: many texts through one tokenizer, for tests in
// other languages. Each text on stdin is its length in bytes (u32, little-endian) and the bytes; each line on
// stdout is its ids, separated by spaces. --decode is the way back: lines of ids in, texts with their length
// before them out.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "chapters/09-qwen/gguf.hpp"
#include "chapters/09-qwen/tokenizer.hpp"

namespace {

namespace qwen = ladder::qwen;

constexpr std::size_t kPrefix = 4;

std::uint32_t length_at(std::string_view bytes) {
  std::uint32_t length = 0;
  for (std::size_t i = 0; i < kPrefix; ++i) {
    length |= static_cast<std::uint32_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  }
  return length;
}

void encode_all(const qwen::Tokenizer& tokenizer, const qwen::EncodeOptions& options) {
  const std::string in((std::istreambuf_iterator<char>(std::cin)), {});
  std::string out;
  for (std::string_view rest = in; !rest.empty();) {
    if (rest.size() < kPrefix || rest.size() - kPrefix < length_at(rest)) {
      throw std::runtime_error("stdin ends inside a text");
    }
    const std::string_view text = rest.substr(kPrefix, length_at(rest));
    rest.remove_prefix(kPrefix + text.size());
    const std::vector<qwen::Token> ids = tokenizer.encode(text, options);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (i > 0) out += ' ';
      out += std::to_string(ids[i]);
    }
    out += '\n';
  }
  std::cout << out;
}

void decode_all(const qwen::Tokenizer& tokenizer) {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::vector<qwen::Token> ids;
    for (qwen::Token id = 0; words >> id;) ids.push_back(id);
    if (!words.eof()) throw std::runtime_error("a line holds something other than ids");
    const std::string text = tokenizer.decode(ids, /*special=*/true);
    for (std::size_t i = 0; i < kPrefix; ++i) std::cout.put(static_cast<char>(text.size() >> (8 * i) & 0xFF));
    std::cout << text;
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::ios::sync_with_stdio(false);
  try {
    const std::vector<std::string_view> arguments(argv + 1, argv + argc);
    if (arguments.empty() || arguments[0].starts_with('-')) {
      throw std::runtime_error("the first argument must be a GGUF file");
    }
    qwen::EncodeOptions options;
    bool decode = false;
    for (const std::string_view option :
         std::vector<std::string_view>(arguments.begin() + 1, arguments.end())) {
      if (option == "--special") {
        options.special = true;
      } else if (option == "--no-nfc") {
        options.nfc = false;
      } else if (option == "--decode") {
        decode = true;
      } else {
        throw std::runtime_error("unknown option '" + std::string(option) +
                                 "'; --special, --no-nfc, --decode are known");
      }
    }
    const ladder::gguf::File file(std::string(arguments[0]), /*headers_only=*/true);
    const qwen::Tokenizer tokenizer(file);
    decode ? decode_all(tokenizer) : encode_all(tokenizer, options);
    return std::cout.flush() ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tokenize_tool: %s\n", error.what());
    return 2;
  }
}
