// Text to tokens and back: Qwen2's pre-tokenizer and byte-level BPE, from the vocabulary that a GGUF file
// carries.
//
// The same ids as Hugging Face's tokenizers give, in the same steps:
//   1. added tokens are cut out of the text, leftmost first, the longest where several begin; nothing else
//      touches them
//   2. the text between them is normalised to NFC, each stretch by itself
//   3. it is cut into pieces by the pattern of Qwen2's tokenizer (pretokenize)
//   4. the bytes of a piece become one token each, and the adjacent pair with the lowest merge rank becomes
//      one token, the leftmost on ties, until no pair has a rank
// Vocabulary files write bytes as printable characters, GPT-2's alphabet: 0x21-0x7E, 0xA1-0xAC and 0xAE-0xFF
// stand for themselves, the other 68 bytes in increasing order are U+0100 to U+0143 (a space is U+0120).
//
// Text that is not UTF-8 loses nothing: a byte that is not part of a well-formed character counts as a
// character of its own that is neither letter, number nor space, BPE keeps it as it is, and NFC is applied to
// the well-formed text before and after it.
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

enum class TokenType : std::int32_t {
  normal = 1,
  unknown = 2,
  control = 3,
  user_defined = 4,
  unused = 5,
  byte = 6
};

struct EncodeOptions {
  bool special = false;  ///< recognise control tokens such as <|im_end|>; user-defined ones always are
  bool nfc = true;       ///< normalise to NFC, as Hugging Face does (llama.cpp does not)
};

/// The pieces that BPE works on, one after another; together they are the whole text. The pattern, whose
/// alternatives are tried in this order at every position, is that of Qwen2's tokenizer.json:
///   (?i:'s|'t|'re|'ve|'m|'ll|'d) | [^\r\n\p{L}\p{N}]?\p{L}+ | \p{N} | [ ]?[^\s\p{L}\p{N}]+[\r\n]* |
///   \s*[\r\n]+ | \s+(?!\S) | \s+        (with the spaces between alternatives left out)
/// \p{L} and \p{N} are Unicode's general categories, \s its White_Space. `text` is taken as it is: no NFC, no
/// added tokens.
[[nodiscard]] std::vector<std::string_view> pretokenize(std::string_view text);

/// Canonical composition (Unicode's NFC) of the well-formed parts of a text; other bytes are kept.
[[nodiscard]] std::string to_nfc(std::string_view text);

class Tokenizer {
 public:
  /// Reads tokenizer.ggml.*; the file may go away afterwards. Throws gguf::FileError: missing arrays or
  /// arrays of different lengths, another tokenizer model or pre-tokenizer (named), a merge of pieces that
  /// are not tokens or one that is there twice, a byte without a token, an id that is no token.
  explicit Tokenizer(const gguf::File& file);
  /// From parts, for tests and tools. `tokens` and `merges` ("a b", in order of rank) are in the mapped-byte
  /// alphabet; tokens of other types than normal are plain text. There is no eos then. Throws as above.
  Tokenizer(std::vector<std::string> tokens, std::vector<TokenType> types, std::vector<std::string> merges);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;

  /// No token is put in front (see bos()). Several threads may call it at once. Throws std::length_error for
  /// a text of 2 GiB or more.
  /// @param nfc_changed set to whether normalisation changed the text; may be null
  [[nodiscard]] std::vector<Token> encode(std::string_view text, EncodeOptions options = {},
                                          bool* nfc_changed = nullptr) const;
  /// The bytes of a token as it is printed: empty for control and unused tokens unless `special`. Lives as
  /// long as the tokenizer. Throws std::out_of_range for an id that is no token, as type() does.
  [[nodiscard]] std::string_view bytes(Token token, bool special = false) const;
  /// Concatenated bytes; may not be whole UTF-8 (see Utf8Stream).
  [[nodiscard]] std::string decode(std::span<const Token> tokens, bool special = false) const;

  [[nodiscard]] int size() const;
  [[nodiscard]] TokenType type(Token token) const;
  /// The id of a token's text (mapped alphabet for normal tokens, plain text for added ones), or -1.
  [[nodiscard]] Token find(std::string_view token) const;
  [[nodiscard]] Token eos() const;  ///< of the file, or -1
  /// The token that the file wants in front of a prompt (tokenizer.ggml.add_bos_token), or -1: Qwen's want
  /// none.
  [[nodiscard]] Token bos() const;
  /// End-of-generation tokens: the file's eos and eot and, where the vocabulary has them as control or
  /// user-defined tokens, <|endoftext|>, <|im_end|>, <|fim_pad|>, <|repo_name|>, <|file_sep|>.
  [[nodiscard]] bool ends_generation(Token token) const;

 private:
  struct Tables;
  std::unique_ptr<const Tables> tables_;
};

/// Whole characters out of a stream of bytes: holds back the longest incomplete suffix, 1 to 3 bytes that
/// more bytes may complete; what can no longer become a character is U+FFFD at once, one for the longest
/// beginning of a character and one for any other byte (Unicode's "maximal subpart" practice). However the
/// bytes are cut up, the result is the same.
class Utf8Stream {
 public:
  /// Appends, and returns what can be printed now.
  [[nodiscard]] std::string push(std::string_view bytes);
  /// The rest: U+FFFD if a character is incomplete.
  [[nodiscard]] std::string flush();

 private:
  std::string held_;
};

/// Text up to the first of some stop strings, out of a stream: a possible beginning of one is held back. The
/// first is the one that is complete first, the longest of those that end together; so the result does not
/// depend on how the text is cut up.
class StopStrings {
 public:
  /// Throws std::invalid_argument for an empty stop string.
  explicit StopStrings(std::vector<std::string> stops);
  /// Appends, and returns what can be printed now. After stopped() returns true: always empty.
  [[nodiscard]] std::string push(std::string_view text);
  [[nodiscard]] bool stopped() const;
  /// What was held back, when generation ended for another reason. Empty after stopped().
  [[nodiscard]] std::string flush();

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace ladder::qwen
