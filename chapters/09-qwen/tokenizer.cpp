#include "chapters/09-qwen/tokenizer.hpp"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <new>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace ladder::qwen {
namespace {

// --- characters --------------------------------------------------------------------------------------------

enum class Class : std::uint8_t {
  letter,
  number,
  line_end,
  space,
  other
};  // line_end: CR and LF, which are spaces too

bool is_space(Class c) { return c == Class::space || c == Class::line_end; }

constexpr std::array<Class, 128> kAsciiClass = [] {
  std::array<Class, 128> table{};
  table.fill(Class::other);
  for (int c = 'a'; c <= 'z'; ++c) table[c] = table[c - 'a' + 'A'] = Class::letter;
  for (int c = '0'; c <= '9'; ++c) table[c] = Class::number;
  table[' '] = table['\t'] = table['\v'] = table['\f'] = Class::space;
  table['\r'] = table['\n'] = Class::line_end;
  return table;
}();

Class class_of(utf8proc_int32_t c) {
  if (c < 128) return kAsciiClass[static_cast<std::size_t>(c)];
  switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return Class::letter;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return Class::number;
    // White_Space is these three categories and some controls, of which only U+0085 is not ASCII.
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return Class::space;
    default:
      return c == 0x85 ? Class::space : Class::other;
  }
}

const utf8proc_uint8_t* as_utf8(const char* p) { return reinterpret_cast<const utf8proc_uint8_t*>(p); }

/// A character of a text and where the next one begins. A byte that is not part of a well-formed character
/// has `code` -1.
struct Character {
  utf8proc_int32_t code;
  std::uint32_t bytes;
};

Character character_at(std::string_view text, std::size_t i) {
  const auto first = static_cast<unsigned char>(text[i]);
  if (first < 128) return {first, 1};
  utf8proc_int32_t code = -1;
  const utf8proc_ssize_t n =
      utf8proc_iterate(as_utf8(text.data() + i), static_cast<utf8proc_ssize_t>(text.size() - i), &code);
  return n > 0 ? Character{code, static_cast<std::uint32_t>(n)} : Character{-1, 1};
}

/// As character_at, for those who only want the class.
struct Classified {
  Class of;
  std::uint32_t bytes;
};

Classified classified_at(std::string_view text, std::size_t i) {
  const auto first = static_cast<unsigned char>(text[i]);
  if (first < 128) return {kAsciiClass[first], 1};
  const Character c = character_at(text, i);
  return {c.code < 0 ? Class::other : class_of(c.code), c.bytes};
}

// --- Unicode normalisation ---------------------------------------------------------------------------------

/// Is a text of such characters alone in NFC for certain? These have combining class 0 and
/// NFC_Quick_Check=Yes in every version of Unicode. The ranges are the common ones, not all: the rest takes
/// the slow path and is as right.
bool surely_nfc(utf8proc_int32_t c) {
  struct Range {
    utf8proc_int32_t first, last;
  };
  constexpr std::array<Range, 15> kRanges{{{0x0000, 0x02FF},      // Latin
                                           {0x3400, 0x9FFF},      // CJK ideographs
                                           {0x2002, 0x2027},      // spaces, joiners, punctuation
                                           {0x3000, 0x3029},      // CJK punctuation
                                           {0x3041, 0x3096},      // hiragana
                                           {0x30A0, 0x30FF},      // katakana
                                           {0xAC00, 0xD7A3},      // Hangul syllables
                                           {0x0388, 0x0482},      // Greek, Cyrillic
                                           {0x048A, 0x052F},      // Cyrillic
                                           {0x2030, 0x205E},      // punctuation
                                           {0x2190, 0x21FF},      // arrows
                                           {0x2500, 0x27BF},      // box drawing to dingbats
                                           {0xFE00, 0xFE0F},      // variation selectors
                                           {0xFF01, 0xFFDC},      // full-width and half-width forms
                                           {0x1F300, 0x1FAFF}}};  // emoji
  return std::any_of(kRanges.begin(), kRanges.end(), [c](Range r) { return c >= r.first && c <= r.last; });
}

/// Puts long runs of combining marks into canonical order: sorted by combining class, equal ones as they
/// were. That makes an equivalent text, so its NFC is the same. utf8proc would do it too, but in quadratic
/// time, and a run may be as long as somebody cares to make it. Returns the text, or `out` if that is where
/// another one is.
std::string_view with_long_runs_ordered(std::string_view text, std::string& out) {
  constexpr std::size_t kLong = 64;
  struct Mark {
    utf8proc_propval_t of;  // combining class; 0: no mark
    std::string_view bytes;
  };
  std::vector<Mark> run;
  std::size_t copied = 0;  // of the text into `out`
  for (std::size_t i = 0; i <= text.size();) {
    Mark mark{0, text.substr(i, 1)};
    if (i < text.size() && static_cast<unsigned char>(text[i]) >= 128) {
      const Character c = character_at(text, i);
      mark = {utf8proc_get_property(c.code)->combining_class, text.substr(i, c.bytes)};
    }
    if (mark.of != 0) {
      run.push_back(mark);
    } else {
      if (run.size() >= kLong) {
        const auto begin = static_cast<std::size_t>(run.front().bytes.data() - text.data());
        std::stable_sort(run.begin(), run.end(), [](const Mark& a, const Mark& b) { return a.of < b.of; });
        out += text.substr(copied, begin - copied);
        for (const Mark& m : run) out += m.bytes;
        copied = i;
      }
      run.clear();
    }
    i += std::max<std::size_t>(1, mark.bytes.size());
  }
  if (copied == 0) return text;
  out += text.substr(copied);
  return out;
}

/// Appends the NFC of a well-formed text. Returns whether that is another text.
bool append_nfc(std::string& to, std::string_view text) {
  std::string reordered;
  const std::string_view ordered = with_long_runs_ordered(text, reordered);
  utf8proc_uint8_t* composed = nullptr;
  const utf8proc_ssize_t bytes =
      utf8proc_map(as_utf8(ordered.data()), static_cast<utf8proc_ssize_t>(ordered.size()), &composed,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(composed, &std::free);
  if (bytes == UTF8PROC_ERROR_NOMEM) throw std::bad_alloc();
  if (bytes < 0) throw std::logic_error(std::string("NFC failed: ") + utf8proc_errmsg(bytes));
  const std::string_view result(reinterpret_cast<const char*>(composed), static_cast<std::size_t>(bytes));
  to += result;
  return result != text;
}

/// Puts the NFC of a text into `out` if it is another text, and returns whether it is.
bool normalise(std::string_view text, std::string& out) {
  // 1. Nearly every text is in NFC, and looking is cheaper than composing.
  std::size_t i = 0;
  while (i < text.size()) {
    const Character c = character_at(text, i);
    if (c.code >= 0 && !surely_nfc(c.code)) break;
    i += c.bytes;
  }
  if (i == text.size()) return false;
  // 2. Otherwise each stretch between ill-formed bytes is composed.
  bool changed = false;
  std::size_t begin = 0;
  for (i = 0; i < text.size();) {
    const Character c = character_at(text, i);
    if (c.code < 0) {
      changed |= append_nfc(out, text.substr(begin, i - begin));
      out += text[i];
      begin = i + 1;
    }
    i += c.bytes;
  }
  changed |= append_nfc(out, text.substr(begin));
  return changed;
}

// --- the pre-tokenizer -------------------------------------------------------------------------------------

/// End of the contraction that begins with the apostrophe at text[i], or i: 's 't 're 've 'm 'll 'd in either
/// case. U+017F, the long s, is an s to a case-insensitive pattern.
std::size_t contraction_end(std::string_view text, std::size_t i) {
  const auto lower = [&text](std::size_t at) -> char {
    if (at >= text.size()) return 0;
    const char c = text[at];
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  };
  const char one = lower(i + 1);
  if (one == 's' || one == 't' || one == 'm' || one == 'd') return i + 2;
  const char two = lower(i + 2);
  if ((one == 'r' && two == 'e') || (one == 'v' && two == 'e') || (one == 'l' && two == 'l')) return i + 3;
  if (text.substr(i + 1, 2) == "\xC5\xBF") return i + 3;
  return i;
}

/// End of the run of characters from text[i] on whose class is not refused.
template <class Accepts>
std::size_t run_end(std::string_view text, std::size_t i, Accepts accepts) {
  while (i < text.size()) {
    const Classified c = classified_at(text, i);
    if (!accepts(c.of)) break;
    i += c.bytes;
  }
  return i;
}

/// End of the piece that begins at text[begin]. The numbers are those of the pattern's alternatives.
std::size_t piece_end(std::string_view text, std::size_t begin) {
  const auto is_letter = [](Class c) { return c == Class::letter; };
  const auto is_other = [](Class c) { return c == Class::other; };
  const auto is_line_end = [](Class c) { return c == Class::line_end; };

  // 1. (?i:'s|'t|'re|'ve|'m|'ll|'d)
  if (text[begin] == '\'') {
    const std::size_t end = contraction_end(text, begin);
    if (end > begin) return end;
  }
  const Classified first = classified_at(text, begin);
  const std::size_t second = begin + first.bytes;
  // 2. [^\r\n\p{L}\p{N}]?\p{L}+
  if (first.of == Class::letter) return run_end(text, second, is_letter);
  if (first.of == Class::space || first.of == Class::other) {
    const std::size_t end = run_end(text, second, is_letter);
    if (end > second) return end;
  }
  // 3. \p{N}
  if (first.of == Class::number) return second;
  // 4. ` ?[^\s\p{L}\p{N}]+[\r\n]*`
  if (first.of == Class::other || text[begin] == ' ') {
    const std::size_t end = run_end(text, second, is_other);
    if (first.of == Class::other || end > second) return run_end(text, end, is_line_end);
  }
  // Only white space is left, and all that is left depends on the run that it begins.
  std::size_t end = begin, last = begin, after_line_end = begin;
  while (end < text.size()) {
    const Classified c = classified_at(text, end);
    if (!is_space(c.of)) break;
    last = end;
    end += c.bytes;
    if (c.of == Class::line_end) after_line_end = end;
  }
  // 5. \s*[\r\n]+   up to and with the last line end of the run
  if (after_line_end > begin) return after_line_end;
  // 6. \s+(?!\S)    all of the run at the end of the text, else all but the last of at least two
  if (end == text.size()) return end;
  if (last > begin) return last;
  // 7. \s+
  return end;
}

// --- the byte alphabet -------------------------------------------------------------------------------------

constexpr int kAlphabet = 0x144;  // characters of the alphabet are below this

/// Character -> byte, or -1.
constexpr std::array<std::int16_t, kAlphabet> kByteOfCharacter = [] {
  std::array<std::int16_t, kAlphabet> table{};
  table.fill(-1);
  int next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool itself = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    table[itself ? byte : next++] = static_cast<std::int16_t>(byte);
  }
  return table;
}();

/// Appends the bytes that a text in the alphabet stands for. false: it is not all in the alphabet, and `to`
/// is as it was.
bool append_unmapped(std::string& to, std::string_view text) {
  const std::size_t before = to.size();
  for (std::size_t i = 0; i < text.size();) {
    const Character c = character_at(text, i);
    const int byte =
        c.code < 0 || c.code >= kAlphabet ? -1 : kByteOfCharacter[static_cast<std::size_t>(c.code)];
    if (byte < 0) {
      to.resize(before);
      return false;
    }
    to += static_cast<char>(byte);
    i += c.bytes;
  }
  return true;
}

std::uint64_t mixed(std::uint64_t x) {  // so that the low bits depend on all bits
  x ^= x >> 32;
  x *= 0x9E3779B97F4A7C15u;
  return x ^ (x >> 29);
}

/// A hash of a short text, eight bytes at a time.
std::uint64_t hash_of(std::string_view text) {
  std::uint64_t h = text.size();
  std::size_t i = 0;
  for (; i + 8 <= text.size(); i += 8) {
    std::uint64_t word;
    std::memcpy(&word, text.data() + i, 8);
    h = mixed(h ^ word);
  }
  std::uint64_t word = 0;
  for (std::size_t shift = 0; i < text.size(); ++i, shift += 8) {
    word |= static_cast<std::uint64_t>(static_cast<unsigned char>(text[i])) << shift;
  }
  return mixed(h ^ (word * 0xD6E8FEB86659FD93u));
}

constexpr std::uint32_t kNoRank = std::numeric_limits<std::uint32_t>::max();

struct Merge {
  std::uint32_t rank = kNoRank;  // kNoRank: the pair does not merge
  Token to = -1;
};

/// Pair of tokens -> merge. Open addressing: a step of BPE is one probe of it.
class MergeTable {
 public:
  explicit MergeTable(std::size_t merges)
      : slots_(std::bit_ceil(std::max<std::size_t>(16, merges + merges / 2))) {}
  /// false: the pair is there already.
  bool insert(Token left, Token right, Merge merge) {
    Slot& slot = slots_[find(key(left, right))];
    if (slot.merge.rank != kNoRank) return false;
    slot = {key(left, right), merge};
    return true;
  }
  [[nodiscard]] Merge operator()(Token left, Token right) const {
    return slots_[find(key(left, right))].merge;
  }

 private:
  struct Slot {
    std::uint64_t key = 0;
    Merge merge;
  };
  static std::uint64_t key(Token left, Token right) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
           static_cast<std::uint32_t>(right);
  }
  [[nodiscard]] std::size_t find(std::uint64_t k) const {
    const std::size_t mask = slots_.size() - 1;
    std::size_t i = mixed(k) & mask;
    while (slots_[i].key != k && slots_[i].merge.rank != kNoRank) i = (i + 1) & mask;
    return i;
  }
  std::vector<Slot> slots_;  // at most two thirds full
};

/// Tokens of a piece, replaced in place by the result of BPE. Quadratic, and for a word faster than anything
/// else.
void merge_short(const MergeTable& merges, std::span<Token>& tokens) {
  constexpr std::size_t kMost = 64;
  std::array<Merge, kMost> pair;  // pair[i] of tokens[i] and tokens[i + 1]
  std::size_t n = tokens.size();
  for (std::size_t i = 0; i + 1 < n; ++i) pair[i] = merges(tokens[i], tokens[i + 1]);
  while (n > 1) {
    std::size_t best = 0;
    for (std::size_t i = 1; i + 1 < n; ++i) {
      if (pair[i].rank < pair[best].rank) best = i;
    }
    if (pair[best].rank == kNoRank) break;
    tokens[best] = pair[best].to;
    std::copy(tokens.begin() + static_cast<std::ptrdiff_t>(best) + 2,
              tokens.begin() + static_cast<std::ptrdiff_t>(n),
              tokens.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    --n;
    std::copy(pair.begin() + best + 1, pair.begin() + n, pair.begin() + best);
    if (best > 0) pair[best - 1] = merges(tokens[best - 1], tokens[best]);
    if (best + 1 < n) pair[best] = merges(tokens[best], tokens[best + 1]);
  }
  tokens = tokens.first(n);
}
constexpr std::size_t kShortPiece = 64;

/// The same for a piece of any length, in n log n: pairs wait in a heap by (rank, position), tokens are a
/// linked list. A pair that is no longer there is found out when its turn comes.
void merge_long(const MergeTable& merges, std::span<Token>& tokens) {
  constexpr std::uint32_t kEnd = std::numeric_limits<std::uint32_t>::max();
  struct Node {
    std::uint32_t previous, next;
    Merge pair;  // of this token and the next
  };
  const std::size_t n = tokens.size();
  std::vector<Node> nodes(n);
  std::vector<std::uint64_t> heap;  // rank << 32 | position of the left token
  heap.reserve(n);
  for (std::size_t i = 0; i < n; ++i) {
    nodes[i] = {i == 0 ? kEnd : static_cast<std::uint32_t>(i - 1),
                i + 1 == n ? kEnd : static_cast<std::uint32_t>(i + 1),
                {}};
    if (i + 1 == n) break;
    nodes[i].pair = merges(tokens[i], tokens[i + 1]);
    if (nodes[i].pair.rank != kNoRank)
      heap.push_back(static_cast<std::uint64_t>(nodes[i].pair.rank) << 32 | i);
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto update = [&](std::uint32_t left) {
    Node& node = nodes[left];
    node.pair = node.next == kEnd ? Merge{} : merges(tokens[left], tokens[node.next]);
    if (node.pair.rank == kNoRank) return;
    heap.push_back(static_cast<std::uint64_t>(node.pair.rank) << 32 | left);
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const auto rank = static_cast<std::uint32_t>(heap.back() >> 32);
    const auto left = static_cast<std::uint32_t>(heap.back());
    heap.pop_back();
    // A rank is one pair's, so a node whose pair still has it still holds that pair.
    if (nodes[left].pair.rank != rank) continue;
    const std::uint32_t right = nodes[left].next;
    tokens[left] = nodes[left].pair.to;
    nodes[left].next = nodes[right].next;
    if (nodes[right].next != kEnd) nodes[nodes[right].next].previous = left;
    nodes[right].pair = {};  // it is gone, and so are the entries of its pair
    update(left);
    if (nodes[left].previous != kEnd) update(nodes[left].previous);
  }
  std::size_t kept = 0;
  for (std::uint32_t i = 0; i != kEnd; i = nodes[i].next) tokens[kept++] = tokens[i];
  tokens = tokens.first(kept);
}

}  // namespace

std::vector<std::string_view> pretokenize(std::string_view text) {
  std::vector<std::string_view> pieces;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t end = piece_end(text, i);
    pieces.push_back(text.substr(i, end - i));
    i = end;
  }
  return pieces;
}

std::string to_nfc(std::string_view text) {
  std::string out;
  return normalise(text, out) ? out : std::string(text);
}

// --- the vocabulary ----------------------------------------------------------------------------------------

struct Tokenizer::Tables {
  struct Added {
    std::string_view text;
    Token token;
    bool control;
  };

  Tables(std::span<const std::string_view> tokens, std::vector<TokenType> token_types,
         std::span<const std::string_view> merge_lines, const std::string& source);

  void encode(std::string_view text, EncodeOptions options, std::vector<Token>& out, bool* nfc_changed) const;
  [[nodiscard]] std::string_view bytes(Token t) const {
    const auto i = static_cast<std::size_t>(t);
    return std::string_view(pool).substr(starts[i], starts[i + 1] - starts[i]);
  }
  [[nodiscard]] std::size_t checked(Token t) const {
    if (t < 0 || static_cast<std::size_t>(t) >= types.size()) {
      throw std::out_of_range("token id " + std::to_string(t) + " is outside of the vocabulary: 0 to " +
                              std::to_string(types.size() - 1) + " are allowed");
    }
    return static_cast<std::size_t>(t);
  }
  /// A normal token by its bytes, or -1.
  [[nodiscard]] Token normal(std::string_view text) const { return slots[slot(text)]; }
  [[nodiscard]] std::size_t slot(std::string_view text) const {
    const std::size_t mask = slots.size() - 1;
    std::size_t i = hash_of(text) & mask;
    while (slots[i] >= 0 && bytes(slots[i]) != text) i = (i + 1) & mask;
    return i;
  }

  std::string pool;                   // the bytes of all tokens
  std::vector<std::uint32_t> starts;  // of each token in the pool, and the end
  std::vector<TokenType> types;
  std::vector<Token> slots;  // hash table of the normal tokens, at most half full; -1: free
  std::unordered_map<std::string_view, Token> plain;  // the others, by their text
  std::array<Token, 256> of_byte{};
  MergeTable merges;
  std::vector<Added> added;  // control and user-defined tokens, by first byte, then the longest first
  std::array<std::pair<std::uint32_t, std::uint32_t>, 256>
      added_by_byte{};  // first byte -> its range in `added`
  Token eos = -1, bos = -1;
  std::unordered_set<Token> ends;  // end-of-generation tokens
};

Tokenizer::Tables::Tables(std::span<const std::string_view> tokens, std::vector<TokenType> token_types,
                          std::span<const std::string_view> merge_lines, const std::string& source)
    : types(std::move(token_types)), merges(merge_lines.size()) {
  const auto fail = [&source](const std::string& what) { throw gguf::FileError(source + what); };
  constexpr std::size_t kMost = 1u << 30;
  if (tokens.empty()) fail("the vocabulary has no token");
  if (types.size() != tokens.size()) {
    fail("the vocabulary has " + std::to_string(tokens.size()) + " tokens and " +
         std::to_string(types.size()) + " token types; the numbers must be equal");
  }
  std::size_t total = 0;
  for (const std::string_view t : tokens) total += t.size();
  if (tokens.size() > kMost || total > kMost || merge_lines.size() > kMost)
    fail("the vocabulary has more than 2^30 tokens, bytes or merges");

  // 1. The bytes of each token. A normal token with characters outside of the alphabet keeps its text; BPE
  //    never makes it.
  pool.reserve(total);
  starts.reserve(tokens.size() + 1);
  slots.assign(std::bit_ceil(2 * tokens.size()), -1);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    starts.push_back(static_cast<std::uint32_t>(pool.size()));
    const int type = static_cast<int>(types[i]);
    if (type < 1 || type > 6)
      fail("token " + std::to_string(i) + " has type " + std::to_string(type) + "; types are 1 to 6");
    if (types[i] != TokenType::normal || !append_unmapped(pool, tokens[i])) pool += tokens[i];
  }
  starts.push_back(static_cast<std::uint32_t>(pool.size()));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const auto id = static_cast<Token>(i);
    const std::string_view text = bytes(id);
    if (types[i] == TokenType::normal) {
      Token& free = slots[slot(text)];
      if (free < 0) free = id;  // of equal tokens the first counts
    } else {
      plain.emplace(text, id);
      const bool control = types[i] == TokenType::control;
      if ((control || types[i] == TokenType::user_defined) && !text.empty())
        added.push_back({text, id, control});
    }
  }
  for (int byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    of_byte[static_cast<std::size_t>(byte)] = normal({&c, 1});
    if (of_byte[static_cast<std::size_t>(byte)] < 0) {
      fail("no token stands for byte " + std::to_string(byte) +
           "; a byte-level vocabulary has one for each of the 256");
    }
  }

  // 2. Merges: "a b" says that token a and token b, side by side, become token ab.
  std::string both;
  for (std::size_t rank = 0; rank < merge_lines.size(); ++rank) {
    const std::string_view line = merge_lines[rank];
    const auto fail_merge = [&](const std::string& what) {
      fail("merge " + std::to_string(rank) + ", '" + gguf::shown(line) + "', " + what);
    };
    const std::size_t space = line.find(' ');
    both.clear();
    if (space == std::string_view::npos || space == 0 || !append_unmapped(both, line.substr(0, space))) {
      fail_merge("is not two tokens with a space between");
    }
    const std::size_t cut = both.size();
    if (!append_unmapped(both, line.substr(space + 1)) || both.size() == cut) {
      fail_merge("is not two tokens with a space between");
    }
    const Token left = normal(std::string_view(both).substr(0, cut));
    const Token right = normal(std::string_view(both).substr(cut));
    const Token to = normal(both);
    if (left < 0 || right < 0)
      fail_merge(std::string("joins pieces of which the ") + (left < 0 ? "first" : "second") +
                 " is not a token");
    if (to < 0) fail_merge("makes a piece that is not a token");
    if (!merges.insert(left, right, {static_cast<std::uint32_t>(rank), to}))
      fail_merge("is there already with a lower rank");
  }

  // 3. Added tokens, so that the first that fits at a position is the longest.
  std::sort(added.begin(), added.end(), [](const Added& a, const Added& b) {
    if (a.text[0] != b.text[0])
      return static_cast<unsigned char>(a.text[0]) < static_cast<unsigned char>(b.text[0]);
    return a.text.size() != b.text.size() ? a.text.size() > b.text.size() : a.token < b.token;
  });
  for (std::size_t i = 0; i < added.size(); ++i) {
    auto& range = added_by_byte[static_cast<unsigned char>(added[i].text[0])];
    if (range.second == 0) range.first = static_cast<std::uint32_t>(i);
    range.second = static_cast<std::uint32_t>(i + 1);
  }
  for (const char* name : {"<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}) {
    const auto found = plain.find(name);
    if (found == plain.end()) continue;
    const TokenType type = types[static_cast<std::size_t>(found->second)];
    if (type == TokenType::control || type == TokenType::user_defined) ends.insert(found->second);
  }
}

namespace {

/// Pieces that were encoded before in this text, and where their tokens are in the output: prose and code
/// repeat themselves, and with the full vocabulary this makes prose a quarter faster and code half as fast
/// again. One place for each hash; a later piece takes it over.
class PieceCache {
 public:
  struct Entry {
    std::string_view piece;
    std::uint32_t at = 0, count = 0;
  };
  explicit PieceCache(std::size_t text_bytes)
      : entries_(std::bit_ceil(std::clamp<std::size_t>(text_bytes / 8, 1, 16384))) {}
  Entry& operator[](std::string_view piece) { return entries_[hash_of(piece) & (entries_.size() - 1)]; }

 private:
  std::vector<Entry> entries_;
};

}  // namespace

void Tokenizer::Tables::encode(std::string_view text, EncodeOptions options, std::vector<Token>& out,
                               bool* nfc_changed) const {
  PieceCache cache(text.size());
  std::deque<std::string> normalised;  // the cache points into them
  const auto encode_piece = [&](std::string_view piece) {
    if (piece.size() == 1) {
      out.push_back(of_byte[static_cast<unsigned char>(piece[0])]);
      return;
    }
    const bool is_short = piece.size() <= kShortPiece;
    PieceCache::Entry* entry = is_short ? &cache[piece] : nullptr;
    const std::size_t at = out.size();
    if (entry != nullptr && entry->piece == piece) {
      out.resize(at + entry->count);
      std::copy_n(out.begin() + entry->at, entry->count, out.begin() + static_cast<std::ptrdiff_t>(at));
      return;
    }
    out.resize(at + piece.size());
    std::span<Token> tokens(out.data() + at, piece.size());
    std::transform(piece.begin(), piece.end(), tokens.begin(),
                   [this](char c) { return of_byte[static_cast<unsigned char>(c)]; });
    is_short ? merge_short(merges, tokens) : merge_long(merges, tokens);
    out.resize(at + tokens.size());
    if (entry != nullptr)
      *entry = {piece, static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(tokens.size())};
  };
  const auto encode_stretch = [&](std::string_view stretch) {
    if (options.nfc) {
      std::string composed;
      if (normalise(stretch, composed)) {
        normalised.push_back(std::move(composed));
        stretch = normalised.back();
        if (nfc_changed != nullptr) *nfc_changed = true;
      }
    }
    for (std::size_t i = 0; i < stretch.size();) {
      const std::size_t end = piece_end(stretch, i);
      encode_piece(stretch.substr(i, end - i));
      i = end;
    }
  };

  std::size_t begin = 0;  // of the text that no added token has claimed
  for (std::size_t i = 0; i < text.size();) {
    const auto [from, to] = added_by_byte[static_cast<unsigned char>(text[i])];
    const Added* found = nullptr;
    for (std::uint32_t a = from; a < to && found == nullptr; ++a) {
      if ((options.special || !added[a].control) && text.substr(i, added[a].text.size()) == added[a].text)
        found = &added[a];
    }
    if (found == nullptr) {
      ++i;
      continue;
    }
    encode_stretch(text.substr(begin, i - begin));
    out.push_back(found->token);
    begin = i += found->text.size();
  }
  encode_stretch(text.substr(begin));
}

// --- Tokenizer ---------------------------------------------------------------------------------------------

Tokenizer::Tokenizer(std::vector<std::string> tokens, std::vector<TokenType> types,
                     std::vector<std::string> merges) {
  const std::vector<std::string_view> token_views(tokens.begin(), tokens.end());
  const std::vector<std::string_view> merge_views(merges.begin(), merges.end());
  tables_ = std::make_unique<const Tables>(token_views, std::move(types), merge_views, "");
}

Tokenizer::Tokenizer(const gguf::File& file) {
  const auto fail = [&file](const std::string& what) { throw gguf::FileError(file.name() + ": " + what); };
  const auto model = file.get<std::string_view>("tokenizer.ggml.model");
  if (model != "gpt2") {
    fail("tokenizer.ggml.model is '" + gguf::shown(model) + "'; only 'gpt2', byte-level BPE, is supported");
  }
  const auto pre = file.get<std::string_view>("tokenizer.ggml.pre");
  if (pre != "qwen2" && pre != "deepseek-r1-qwen") {
    fail("tokenizer.ggml.pre is '" + gguf::shown(pre) +
         "'; only 'qwen2' and 'deepseek-r1-qwen', the same pattern, are supported");
  }
  const auto strings = [&](std::string_view key) -> const std::vector<std::string_view>& {
    const gguf::Array* array = file.get<const gguf::Array*>(key);
    if (array->element != gguf::ValueType::string) {
      fail("key '" + std::string(key) + "' is an array of " + gguf::name(array->element) +
           "; an array of strings is needed");
    }
    return array->strings;
  };
  const std::vector<std::string_view>& tokens = strings("tokenizer.ggml.tokens");
  const std::vector<std::string_view>& merges = strings("tokenizer.ggml.merges");
  const gguf::Array* type_array = file.get<const gguf::Array*>("tokenizer.ggml.token_type");
  if (type_array->element != gguf::ValueType::i32 && type_array->element != gguf::ValueType::u32) {
    fail(std::string("key 'tokenizer.ggml.token_type' is an array of ") + gguf::name(type_array->element) +
         "; an array of i32 is needed");
  }
  std::vector<TokenType> types(type_array->count);
  static_assert(sizeof(TokenType) == 4);
  if (!types.empty()) std::memcpy(types.data(), type_array->bytes.data(), types.size() * sizeof(TokenType));

  auto tables = std::make_unique<Tables>(tokens, std::move(types), merges, file.name() + ": ");
  const auto id = [&](std::string_view key) -> Token {
    if (file.find(key) == nullptr) return -1;
    const auto value = file.get<std::uint64_t>(key);
    if (value >= tokens.size()) {
      fail("key '" + std::string(key) + "' is " + std::to_string(value) + "; token ids are 0 to " +
           std::to_string(tokens.size() - 1));
    }
    return static_cast<Token>(value);
  };
  tables->eos = id("tokenizer.ggml.eos_token_id");
  if (tables->eos >= 0) tables->ends.insert(tables->eos);
  if (const Token eot = id("tokenizer.ggml.eot_token_id"); eot >= 0) tables->ends.insert(eot);
  const Token bos = id("tokenizer.ggml.bos_token_id");
  if (file.get_or<bool>("tokenizer.ggml.add_bos_token", false)) {
    if (bos < 0)
      fail("tokenizer.ggml.add_bos_token is true, but the file has no tokenizer.ggml.bos_token_id");
    tables->bos = bos;
  }
  tables_ = std::move(tables);
}

Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;

std::vector<Token> Tokenizer::encode(std::string_view text, EncodeOptions options, bool* nfc_changed) const {
  if (nfc_changed != nullptr) *nfc_changed = false;
  constexpr std::size_t kMost = (std::size_t{1} << 31) - 1;
  if (text.size() > kMost) {
    throw std::length_error("a text of " + std::to_string(text.size()) + " bytes; at most " +
                            std::to_string(kMost) + " can be encoded at once");
  }
  std::vector<Token> out;
  out.reserve(text.size() / 4 + 16);
  tables_->encode(text, options, out, nfc_changed);
  return out;
}

std::string_view Tokenizer::bytes(Token token, bool special) const {
  const TokenType type = tables_->types[tables_->checked(token)];
  if (!special && (type == TokenType::control || type == TokenType::unused)) return {};
  return tables_->bytes(token);
}

std::string Tokenizer::decode(std::span<const Token> tokens, bool special) const {
  std::string text;
  for (const Token t : tokens) text += bytes(t, special);
  return text;
}

int Tokenizer::size() const { return static_cast<int>(tables_->types.size()); }
TokenType Tokenizer::type(Token token) const { return tables_->types[tables_->checked(token)]; }

Token Tokenizer::find(std::string_view token) const {
  if (const auto found = tables_->plain.find(token); found != tables_->plain.end()) return found->second;
  std::string bytes;
  return append_unmapped(bytes, token) ? tables_->normal(bytes) : -1;
}

Token Tokenizer::eos() const { return tables_->eos; }
Token Tokenizer::bos() const { return tables_->bos; }
bool Tokenizer::ends_generation(Token token) const { return tables_->ends.contains(token); }

// --- streams -----------------------------------------------------------------------------------------------

namespace {

/// Bytes from text[i] on that are a well-formed character (whole) or a beginning of one; 0: neither.
struct Sequence {
  std::size_t bytes;
  bool whole;
};

/// Well-formed byte sequences: The Unicode Standard, table 3-7.
Sequence sequence_at(std::string_view text, std::size_t i) {
  const auto byte = [&text](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  const unsigned char lead = byte(i);
  if (lead < 0x80) return {1, true};
  if (lead < 0xC2 || lead > 0xF4) return {0, false};
  const std::size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte excludes what is too long for its value, surrogates, and what is beyond U+10FFFF.
  const unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  std::size_t n = 1;
  while (n < length && i + n < text.size() && byte(i + n) >= (n == 1 ? low : 0x80) &&
         byte(i + n) <= (n == 1 ? high : 0xBF))
    ++n;
  return {n, n == length};
}

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace

std::string Utf8Stream::push(std::string_view bytes) {
  held_ += bytes;
  std::string out;
  std::size_t i = 0;
  while (i < held_.size()) {
    const Sequence s = sequence_at(held_, i);
    if (s.whole) {
      out.append(held_, i, s.bytes);
    } else if (s.bytes > 0 && i + s.bytes == held_.size()) {
      break;  // the next bytes may complete it
    } else {
      out += kReplacement;
    }
    i += std::max<std::size_t>(1, s.bytes);
  }
  held_.erase(0, i);
  return out;
}

std::string Utf8Stream::flush() {
  std::string out(held_.empty() ? std::string_view() : kReplacement);
  held_.clear();
  return out;
}

StopStrings::StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {
  for (const std::string& stop : stops_) {
    if (stop.empty())
      throw std::invalid_argument("a stop string is empty; it must have at least one character");
  }
}

std::string StopStrings::push(std::string_view text) {
  if (stopped_) return {};
  held_ += text;
  // 1. The stop string that is complete first; it cannot have begun in what was given out, which is no
  //    beginning of one.
  std::size_t first_end = std::string::npos, begin = 0;
  for (const std::string& stop : stops_) {
    const std::size_t at = held_.find(stop);
    if (at == std::string::npos) continue;
    const std::size_t end = at + stop.size();
    if (end < first_end || (end == first_end && at < begin)) {
      first_end = end;
      begin = at;
    }
  }
  if (first_end != std::string::npos) {
    stopped_ = true;
    std::string out = held_.substr(0, begin);
    held_.clear();
    return out;
  }
  // 2. Otherwise all but the longest end that is a beginning of a stop string.
  std::size_t keep = 0;
  for (const std::string& stop : stops_) {
    for (std::size_t n = std::min(stop.size() - 1, held_.size()); n > keep; --n) {
      if (std::string_view(held_).substr(held_.size() - n) == std::string_view(stop).substr(0, n)) keep = n;
    }
  }
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return out;
}

bool StopStrings::stopped() const { return stopped_; }

std::string StopStrings::flush() { return std::exchange(held_, {}); }

}  // namespace ladder::qwen
