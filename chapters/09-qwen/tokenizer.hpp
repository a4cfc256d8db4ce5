// Text to tokens and back: Qwen2's pre-tokenizer and byte-level BPE, from the vocabulary that a GGUF file carries.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chapters/09-qwen/gguf.hpp"

namespace ladder::qwen {

using Token = std::int32_t;

enum class TokenType : std::int32_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

struct EncodeOptions {
  bool special = false;  ///< recognise control tokens such as <|im_end|> in the text
  bool nfc = true;       ///< normalise to NFC first, as Hugging Face does
};

class Tokenizer {
 public:
  /// Throws gguf::FileError: missing arrays, another tokenizer model or pre-tokenizer (named), a merge of pieces that are
  /// not tokens, a byte without a token.
  explicit Tokenizer(const gguf::File& file);
  /// From parts, for tests and tools. `tokens` and `merges` ("a b", in order of rank) are in the mapped-byte alphabet.
  Tokenizer(std::vector<std::string> tokens, std::vector<TokenType> types, std::vector<std::string> merges);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;

  /// @param nfc_changed set to whether normalisation changed the text; may be null
  [[nodiscard]] std::vector<Token> encode(std::string_view text, EncodeOptions options = {},
                                          bool* nfc_changed = nullptr) const;
  /// The bytes of a token as it is printed: empty for control and unused tokens unless `special`.
  [[nodiscard]] std::string_view bytes(Token token, bool special = false) const;
  /// Concatenated bytes; may not be whole UTF-8 (see Utf8Stream).
  [[nodiscard]] std::string decode(std::span<const Token> tokens, bool special = false) const;

  [[nodiscard]] int size() const;
  [[nodiscard]] TokenType type(Token token) const;
  /// The id of a token's text (mapped alphabet for normal tokens, plain text for added ones), or -1.
  [[nodiscard]] Token find(std::string_view token) const;
  [[nodiscard]] Token eos() const;                 ///< of the file, or -1
  /// End-of-generation tokens: the file's eos and, where the vocabulary has them as control or user-defined tokens,
  /// <|endoftext|>, <|im_end|>, <|fim_pad|>, <|repo_name|>, <|file_sep|>.
  [[nodiscard]] bool ends_generation(Token token) const;

 private:
  struct Tables;
  std::unique_ptr<const Tables> tables_;
};

/// Whole characters out of a stream of bytes: holds back the longest incomplete suffix; invalid bytes become U+FFFD.
class Utf8Stream {
 public:
  /// Appends, and returns what can be printed now.
  [[nodiscard]] std::string push(std::string_view bytes);
  /// The rest: U+FFFD if a character is incomplete.
  [[nodiscard]] std::string flush();

 private:
  std::string held_;
};

/// Text up to the first of some stop strings, out of a stream: a possible beginning of one is held back.
class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> stops);
  /// Appends, and returns what can be printed now. After stopped() returns true: always empty.
  [[nodiscard]] std::string push(std::string_view text);
  [[nodiscard]] bool stopped() const;
  /// What was held back, when generation ended for another reason.
  [[nodiscard]] std::string flush();

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace ladder::qwen
