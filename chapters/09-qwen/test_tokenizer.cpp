// Tests of the tokenizer, its streams and the chat format, with a vocabulary of 256 bytes and some merges.
// scripts/tests/test_tokenizer.py compares whole vocabularies with Hugging Face's tokenizers.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <utf8proc.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "chapters/09-qwen/chat.hpp"
#include "chapters/09-qwen/gguf.hpp"
#include "chapters/09-qwen/tokenizer.hpp"

using namespace ladder;
using namespace ladder::qwen;
using std::string;
using std::string_view;

namespace {

using Ids = std::vector<Token>;
using Pieces = std::vector<string_view>;

/// A byte as vocabulary files write it: GPT-2's table, made as its description says.
string mapped(unsigned char byte) {
  int next = 256;
  for (int b = 0;; ++b) {
    const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
    const int code = printable ? b : next++;
    if (b != byte) continue;
    if (code < 0x80) return {static_cast<char>(code)};
    return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
  }
}

string mapped(string_view text) {
  string out;
  for (const char c : text) out += mapped(static_cast<unsigned char>(c));
  return out;
}

/// Bytes (ids 0 to 255), one token for each merge (256 on), then added tokens.
struct Vocabulary {
  std::vector<string> tokens;
  std::vector<TokenType> types;
  std::vector<string> merges;

  Vocabulary() {
    for (int b = 0; b < 256; ++b) add(mapped(static_cast<unsigned char>(b)), TokenType::normal);
  }
  Token add(const string& token, TokenType type) {
    tokens.push_back(token);
    types.push_back(type);
    return static_cast<Token>(tokens.size() - 1);
  }
  /// The next merge, of plain texts.
  Token merge(string_view left, string_view right) {
    merges.push_back(mapped(left) + " " + mapped(right));
    return add(mapped(left) + mapped(right), TokenType::normal);
  }
  [[nodiscard]] Tokenizer tokenizer() const { return {tokens, types, merges}; }
};

struct Words : Vocabulary {
  Token he = merge("h", "e"), ll = merge("l", "l"), hell = merge("he", "ll"), hello = merge("hell", "o");
  Token sp_w = merge(" ", "w"), lo = merge("l", "o"), aa = merge("a", "a"), aaaa = merge("aa", "aa");
  Token bc = merge("b", "c"), ab = merge("a", "b"), e_acute = merge("\xC3", "\xA9"), crlf = merge("\r", "\n");
  Token user = merge("u", "s");
  Token end_of_text = add("<|endoftext|>", TokenType::control),
        im_start = add("<|im_start|>", TokenType::control);
  Token im_end = add("<|im_end|>", TokenType::control), tool = add("<tool_call>", TokenType::user_defined);
  Token tools = add("<tool_call>>", TokenType::user_defined), spaced = add(" x y", TokenType::user_defined);
  Token file_sep = add("<|file_sep|>", TokenType::user_defined), pad = add("[PAD0]", TokenType::unused);
};

Ids bytes_of(string_view text) {
  Ids ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

Ids joined(std::initializer_list<Ids> parts) {
  Ids all;
  for (const Ids& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

/// The message of the error that an action throws, or "" if it throws none of this type.
template <class Error, class Action>
string error_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool contains(string_view text, string_view part) { return text.find(part) != string_view::npos; }

/// BPE as its definition says: the lowest rank, then the leftmost, over and over.
Ids naive_bpe(const Vocabulary& vocabulary, string_view piece) {
  std::map<string, std::size_t> rank;
  for (std::size_t i = 0; i < vocabulary.merges.size(); ++i) rank[vocabulary.merges[i]] = i;
  std::vector<string> parts;
  for (const char c : piece) parts.push_back(mapped(static_cast<unsigned char>(c)));
  while (true) {
    std::size_t best = std::numeric_limits<std::size_t>::max(), at = 0;
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto found = rank.find(parts[i] + " " + parts[i + 1]);
      if (found != rank.end() && found->second < best) {
        best = found->second;
        at = i;
      }
    }
    if (best == std::numeric_limits<std::size_t>::max()) break;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
  Ids ids;
  for (const string& part : parts) {
    for (std::size_t i = 0; i < vocabulary.tokens.size(); ++i) {
      if (vocabulary.tokens[i] == part) {
        ids.push_back(static_cast<Token>(i));
        break;
      }
    }
  }
  return ids;
}

gguf::File file_of(const gguf::Writer& writer, std::vector<std::byte>& bytes) {
  bytes = writer.header();
  return {bytes, "made.gguf"};
}

void fill(gguf::Writer& writer, const Vocabulary& vocabulary) {
  writer.set("general.architecture", string_view("qwen2"));
  writer.set("tokenizer.ggml.model", string_view("gpt2"));
  writer.set("tokenizer.ggml.pre", string_view("qwen2"));
  writer.set_strings("tokenizer.ggml.tokens", vocabulary.tokens);
  gguf::Array types;
  types.element = gguf::ValueType::i32;
  types.count = vocabulary.types.size();
  types.bytes = std::as_bytes(std::span(vocabulary.types));
  writer.set("tokenizer.ggml.token_type", types);
  writer.set_strings("tokenizer.ggml.merges", vocabulary.merges);
}

}  // namespace

// --- pre-tokenizer -----------------------------------------------------------------------------------------

TEST_CASE("pretokenize: every alternative of the pattern") {
  const std::vector<std::pair<string_view, Pieces>> table{
      {"", {}},
      // 1. contractions, in either case, the long s included
      {"it's", {"it", "'s"}},
      {"'S'T'RE'VE'M'LL'D", {"'S", "'T", "'RE", "'VE", "'M", "'LL", "'D"}},
      {"'s't're've'm'll'd", {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}},
      {"'Re've'lL", {"'Re", "'ve", "'lL"}},
      {"'sun", {"'s", "un"}},
      {"'\xC5\xBF"
       "abc",
       {"'\xC5\xBF", "abc"}},
      {"'run", {"'run"}},  // no contraction: alternative 2 takes the apostrophe
      {"'l", {"'l"}},
      {"'", {"'"}},
      {"''s", {"''", "s"}},  // alternative 4 takes both
      {"x 's", {"x", " '", "s"}},
      // 2. letters, with one character before them that is neither line end, letter nor number
      {"Hello world", {"Hello", " world"}},
      {"\tword", {"\tword"}},
      {"(word)", {"(word", ")"}},
      {"((word", {"((", "word"}},
      {"\nword", {"\n", "word"}},
      {"1word", {"1", "word"}},
      {"\xC3\xA9t\xC3\xA9", {"\xC3\xA9t\xC3\xA9"}},
      {"a\xCC\x81z", {"a", "\xCC\x81z"}},  // a combining mark is no letter, but may stand before one
      {"\xC2\xA0"
       "b",
       {"\xC2\xA0"
        "b"}},
      // 3. numbers one at a time, of any script
      {"123", {"1", "2", "3"}},
      {" 12", {" ", "1", "2"}},
      {"x1\xC2\xBD\xD9\xA3\xE2\x85\xA7", {"x", "1", "\xC2\xBD", "\xD9\xA3", "\xE2\x85\xA7"}},
      // 4. other characters, a space before them, line ends after them
      {" ==>\r\n\nx", {" ==>\r\n\n", "x"}},
      {"a, b", {"a", ",", " b"}},
      {"  !?", {" ", " !?"}},
      {"\t!?", {"\t", "!?"}},
      {"!\n x", {"!\n", " x"}},
      {"\xF0\x9F\x98\x80\xE2\x80\x8D", {"\xF0\x9F\x98\x80\xE2\x80\x8D"}},
      // 5. white space up to the last line end
      {" \n \r\n  x", {" \n \r\n", " ", " x"}},
      {"\n", {"\n"}},
      {"a\n\n", {"a", "\n\n"}},
      {"\xE2\x80\xA8\n.", {"\xE2\x80\xA8\n", "."}},
      // 6. the last character of a run of white space is left for what follows, if there is more than one
      {"a  b", {"a", " ", " b"}},
      {"a   1", {"a", "  ", " ", "1"}},
      {"a \t", {"a", " \t"}},
      {"\xE3\x80\x80\xE3\x80\x80.", {"\xE3\x80\x80", "\xE3\x80\x80", "."}},
      {"x\xE2\x80\xA8y", {"x", "\xE2\x80\xA8y"}},
      // 7. one white space character
      {"a 1", {"a", " ", "1"}},
      {"\t1", {"\t", "1"}},
      // Not white space, although they look or sound like it
      {"\xE2\x80\x8B\xE2\x80\x8B.", {"\xE2\x80\x8B\xE2\x80\x8B."}},  // U+200B
      {"\x1C\x1F.", {"\x1C\x1F."}},
      // White space that is not ASCII: U+0085, U+1680
      {"\xC2\x85\xC2\x85"
       "1",
       {"\xC2\x85", "\xC2\x85", "1"}},
      {"\xE1\x9A\x80\xE1\x9A\x80"
       "1",
       {"\xE1\x9A\x80", "\xE1\x9A\x80", "1"}},
      // Bytes that are no character are like punctuation
      {"\xFF\xFE!", {"\xFF\xFE!"}},
      {" \xE4\xBD", {" \xE4\xBD"}},
      {"\xC0\xAF"
       "a",
       {"\xC0\xAF", "a"}},
      {"\xED\xA0\x80", {"\xED\xA0\x80"}},
  };
  for (const auto& row : table) {
    const string text(row.first);
    CAPTURE(text);
    CHECK(pretokenize(row.first) == row.second);
  }
}

TEST_CASE("pretokenize: pieces are the whole text, whatever the bytes") {
  std::mt19937 random(1);
  const string_view some = " \n\r\t'sStdlreLLvm19!.\xC3\xA9\xE4\xBD\xA0\xCC\x81\xFF";
  for (int i = 0; i < 2000; ++i) {
    string text;
    for (unsigned n = random() % 24; n > 0; --n) text += some[random() % some.size()];
    string together;
    for (const string_view piece : pretokenize(text)) {
      CHECK(!piece.empty());
      together += piece;
    }
    CHECK(together == text);
  }
}

// --- BPE ---------------------------------------------------------------------------------------------------

TEST_CASE("encode: merges by rank, then from the left") {
  const Words w;
  const Tokenizer tokenizer = w.tokenizer();
  CHECK(tokenizer.encode("") == Ids{});
  CHECK(tokenizer.encode("hello") == Ids{w.hello});
  CHECK(tokenizer.encode("hellohello") == Ids{w.hello, w.hello});
  CHECK(tokenizer.encode("helo") == Ids{w.he, w.lo});
  CHECK(tokenizer.encode("llo") == Ids{w.ll, 'o'});  // "l l" comes before "l o"
  CHECK(tokenizer.encode("abc") == Ids{'a', w.bc});  // "b c" before "a b", though it is further right
  CHECK(tokenizer.encode("aaa") == Ids{w.aa, 'a'});  // ties: leftmost
  CHECK(tokenizer.encode("aaaaa") == Ids{w.aaaa, 'a'});
  CHECK(tokenizer.encode("aaaaaaa") == Ids{w.aaaa, w.aa, 'a'});
  CHECK(tokenizer.encode("hello world") == joined({{w.hello, w.sp_w}, bytes_of("orld")}));
  CHECK(tokenizer.encode("\r\n") == Ids{w.crlf});
}

TEST_CASE("encode: short and long pieces are as the definition says") {
  std::mt19937 random(2);
  Vocabulary vocabulary;
  std::vector<string> parts{"a", "b", "c", "d"};
  while (vocabulary.merges.size() < 60) {
    const string left = parts[random() % parts.size()], right = parts[random() % parts.size()];
    if (left.size() + right.size() > 8) continue;
    if (std::find(vocabulary.tokens.begin(), vocabulary.tokens.end(), left + right) !=
        vocabulary.tokens.end())
      continue;
    vocabulary.merge(left, right);
    parts.push_back(left + right);
  }
  const Tokenizer tokenizer = vocabulary.tokenizer();
  for (int i = 0; i < 600; ++i) {
    const std::size_t length = i < 500 ? 1 + random() % 20 : 55 + random() % 300;  // two methods meet at 64
    string piece;
    while (piece.size() < length) piece += "abcd"[random() % 4];
    CAPTURE(piece);
    CHECK(tokenizer.encode(piece) == naive_bpe(vocabulary, piece));
  }
}

TEST_CASE("encode: a repeated word gives the same ids wherever it stands") {
  const Words w;
  const Tokenizer tokenizer = w.tokenizer();
  string text;
  Ids expected;
  for (int i = 0; i < 3000; ++i) {
    const string word = " w" + string(1, static_cast<char>('a' + i % 7)) + (i % 3 == 0 ? "hello" : "llo");
    text += word;
    const Ids alone = tokenizer.encode(word);
    expected.insert(expected.end(), alone.begin(), alone.end());
  }
  CHECK(tokenizer.encode(text) == expected);
}

TEST_CASE("encode: long pieces take little more than their length") {
  const Words w;
  const Tokenizer tokenizer = w.tokenizer();
  const auto seconds = [&](std::size_t length) {
    const string text(length, 'a');
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 3; ++i) {
      const auto start = std::chrono::steady_clock::now();
      const Ids ids = tokenizer.encode(text);
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      CHECK(ids == Ids(length / 4, w.aaaa));
    }
    return best;
  };
  const double small = seconds(100'000), large = seconds(800'000);
  // 8 times the length: n log n says about 10 times the time, n * n says 64.
  CHECK_MESSAGE(large < 32 * small, "100 kB: ", small, " s, 800 kB: ", large, " s");
}

// --- added tokens ------------------------------------------------------------------------------------------

TEST_CASE("added tokens: control ones on request, user-defined ones always") {
  const Words w;
  const Tokenizer tokenizer = w.tokenizer();
  const EncodeOptions special{.special = true};
  CHECK(tokenizer.encode("a<|im_end|>b", special) == Ids{'a', w.im_end, 'b'});
  CHECK(tokenizer.encode("<|im_end|>") == bytes_of("<|im_end|>"));
  CHECK(tokenizer.encode("<|im_end|><|im_end|>", special) == Ids{w.im_end, w.im_end});
  CHECK(tokenizer.encode("<|im_end|", special) == bytes_of("<|im_end|"));
  CHECK(tokenizer.encode("a<tool_call>b") == Ids{'a', w.tool, 'b'});
  CHECK(tokenizer.encode("<tool_call>>>") == Ids{w.tools, '>'});  // the longest
  CHECK(tokenizer.encode("a x y") == Ids{'a', w.spaced});
  CHECK(tokenizer.encode("[PAD0]", special) == bytes_of("[PAD0]"));
  // What they cut apart is cut into pieces by itself: the end of a stretch is an end of text to the pattern.
  CHECK(tokenizer.encode("a  <tool_call>") == Ids{'a', ' ', ' ', w.tool});
  CHECK(tokenizer.encode("he<tool_call>llo") == Ids{w.he, w.tool, w.ll, 'o'});
}

TEST_CASE("bytes, find, type, ends_generation") {
  const Words w;
  const Tokenizer tokenizer = w.tokenizer();
  CHECK(tokenizer.size() == static_cast<int>(w.tokens.size()));
  CHECK(tokenizer.bytes(w.sp_w) == " w");
  CHECK(tokenizer.bytes(0) == string_view("\0", 1));
  CHECK(tokenizer.bytes(w.im_end) == "");
  CHECK(tokenizer.bytes(w.im_end, true) == "<|im_end|>");
  CHECK(tokenizer.bytes(w.tool) == "<tool_call>");
  CHECK(tokenizer.bytes(w.pad) == "");
  CHECK(tokenizer.bytes(w.pad, true) == "[PAD0]");
  CHECK(tokenizer.decode(Ids{w.hello, w.im_end, w.sp_w}) == "hello w");
  CHECK(tokenizer.decode(Ids{w.hello, w.im_end, w.sp_w}, true) == "hello<|im_end|> w");
  CHECK_THROWS_AS((void)tokenizer.bytes(-1), std::out_of_range);
  CHECK_THROWS_AS((void)tokenizer.type(tokenizer.size()), std::out_of_range);
  CHECK(tokenizer.find("\xC4\xA0w") == w.sp_w);  // U+0120 for the space
  CHECK(tokenizer.find(" w") == -1);
  CHECK(tokenizer.find("<|im_end|>") == w.im_end);
  CHECK(tokenizer.find(" x y") == w.spaced);
  CHECK(tokenizer.find("nothing") == -1);
  CHECK(tokenizer.type(w.hello) == TokenType::normal);
  CHECK(tokenizer.type(w.tool) == TokenType::user_defined);
  CHECK(tokenizer.eos() == -1);
  CHECK(tokenizer.bos() == -1);
  CHECK(tokenizer.ends_generation(w.end_of_text));
  CHECK(tokenizer.ends_generation(w.im_end));
  CHECK(tokenizer.ends_generation(w.file_sep));
  CHECK(!tokenizer.ends_generation(w.im_start));
  CHECK(!tokenizer.ends_generation(w.tool));
}

// --- NFC and invalid text ----------------------------------------------------------------------------------

TEST_CASE("NFC: composed on request, and reported") {
  const Words w;
  const Tokenizer tokenizer = w.tokenizer();
  const string decomposed = "e\xCC\x81";  // e, U+0301
  bool changed = false;
  CHECK(tokenizer.encode(decomposed, {}, &changed) == Ids{w.e_acute});
  CHECK(changed);
  CHECK(tokenizer.encode("\xC3\xA9", {}, &changed) == Ids{w.e_acute});
  CHECK(!changed);
  changed = true;
  CHECK(tokenizer.encode(decomposed, {.nfc = false}, &changed) == bytes_of(decomposed));
  CHECK(!changed);
  // Added tokens are cut out first, so that a mark after one does not change it.
  CHECK(tokenizer.encode("<tool_call>\xCC\xB8") == joined({{w.tool}, bytes_of("\xCC\xB8")}));
  CHECK(to_nfc("\xE2\x84\xAB") == "\xC3\x85");                              // Angstrom sign: a singleton
  CHECK(to_nfc("\xE0\xA4\x95\xE0\xA4\xBC") == "\xE0\xA4\x95\xE0\xA4\xBC");  // excluded from composition
  CHECK(to_nfc("a\xCC\x81\xCC\xA3") == "\xE1\xBA\xA1\xCC\x81");             // marks are put in order
  CHECK(to_nfc("\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8") == "\xEA\xB0\x81");  // Hangul
}

TEST_CASE("NFC: many marks on one letter are put in order, and soon") {
  const string above = "\xCC\x81", below = "\xCC\xA3", far_below = "\xCC\xA7";  // classes 230, 220, 202
  string text = "x", expected = "x";
  constexpr int kMarks = 50'000;
  for (int i = 0; i < kMarks; ++i) text += i % 3 == 0 ? above : i % 3 == 1 ? below : far_below;
  for (int i = 2; i < kMarks; i += 3) expected += far_below;
  for (int i = 1; i < kMarks; i += 3) expected += below;
  for (int i = 0; i < kMarks; i += 3) expected += above;
  const auto start = std::chrono::steady_clock::now();
  const bool same = to_nfc(text + "y" + text) == expected + "y" + expected;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  CHECK(same);
  CHECK_MESSAGE(seconds < 1, "2 runs of ", kMarks, " marks took ", seconds,
                " s");                                                  // a quadratic sort takes minutes
  CHECK(to_nfc("e" + text.substr(1, 400)).substr(0, 2) == "\xC8\xA9");  // e with cedilla
}

TEST_CASE("NFC: the quick look is right about every character, alone and before a mark") {
  const auto slow = [](const string& text) {
    utf8proc_uint8_t* out = nullptr;
    const auto n = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                static_cast<utf8proc_ssize_t>(text.size()), &out,
                                static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    REQUIRE(n >= 0);
    string result(reinterpret_cast<char*>(out), static_cast<std::size_t>(n));
    std::free(out);
    return result;
  };
  const auto utf8 = [](utf8proc_int32_t code) {
    utf8proc_uint8_t bytes[4];
    return string(reinterpret_cast<char*>(bytes),
                  static_cast<std::size_t>(utf8proc_encode_char(code, bytes)));
  };
  int wrong = 0;
  for (utf8proc_int32_t code = 1; code < 0x30000; ++code) {
    if (code >= 0xD800 && code < 0xE000) continue;
    // A letter before it shows whether it composes with what stands to its left.
    for (const string& text : {utf8(code), "\xE3\x81\x8B" + utf8(code), "a" + utf8(code)}) {
      if (to_nfc(text) != slow(text)) ++wrong;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("invalid UTF-8: no byte is lost, and the text around it is treated as ever") {
  const Words w;
  const Tokenizer tokenizer = w.tokenizer();
  for (const string_view text :
       {"\xFF", "\xC3", "a\xC3 b", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xC0\x80", "\xE4\xBD"}) {
    CAPTURE(string(text));
    CHECK(tokenizer.decode(tokenizer.encode(text)) == text);
  }
  CHECK(tokenizer.encode("hello\xFFhello") == Ids{w.hello, 0xFF, w.hello});
  bool changed = false;
  CHECK(tokenizer.encode("e\xCC\x81\xFF"
                         "e\xCC\x81",
                         {}, &changed) == Ids{w.e_acute, 0xFF, w.e_acute});
  CHECK(changed);
  CHECK(to_nfc("e\xFF\xCC\x81") == "e\xFF\xCC\x81");
  std::mt19937 random(3);
  for (int i = 0; i < 2000; ++i) {
    string text;
    for (unsigned n = random() % 40; n > 0; --n)
      text += static_cast<char>(random() % 4 == 0 ? 0x80 + random() % 128 : random());
    CHECK(tokenizer.decode(tokenizer.encode(text, {.special = true, .nfc = false}), true) == text);
  }
}

// --- files -------------------------------------------------------------------------------------------------

TEST_CASE("from a file") {
  const Words w;
  std::vector<std::byte> bytes;
  gguf::Writer writer;
  fill(writer, w);
  const auto made = [&] { return Tokenizer(file_of(writer, bytes)); };
  const auto error = [&] { return error_of<gguf::FileError>([&] { (void)made(); }); };

  SUBCASE("a good one, which outlives the file") {
    writer.set("tokenizer.ggml.eos_token_id", std::uint32_t(w.hello));
    writer.set("tokenizer.ggml.eot_token_id", std::uint32_t(w.ll));
    const Tokenizer tokenizer = made();
    std::fill(bytes.begin(), bytes.end(), std::byte{0xAA});
    CHECK(tokenizer.encode("hello<tool_call>") == Ids{w.hello, w.tool});
    CHECK(tokenizer.eos() == w.hello);
    CHECK(tokenizer.ends_generation(w.hello));
    CHECK(tokenizer.ends_generation(w.ll));
    CHECK(tokenizer.bos() == -1);
    CHECK(tokenizer.find("<|im_end|>") == w.im_end);
  }
  SUBCASE("a token in front, where the file asks for it") {
    writer.set("tokenizer.ggml.bos_token_id", std::uint32_t(w.end_of_text));
    CHECK(made().bos() == -1);
    writer.set("tokenizer.ggml.add_bos_token", true);
    CHECK(made().bos() == w.end_of_text);
  }
  SUBCASE("another model") {
    writer.set("tokenizer.ggml.model", string_view("llama"));
    CHECK(contains(error(), "made.gguf: tokenizer.ggml.model is 'llama'"));
  }
  SUBCASE("another pre-tokenizer") {
    writer.set("tokenizer.ggml.pre", string_view("llama-bpe"));
    CHECK(contains(error(), "tokenizer.ggml.pre is 'llama-bpe'"));
    writer.set("tokenizer.ggml.pre", string_view("deepseek-r1-qwen"));
    CHECK(made().size() == static_cast<int>(w.tokens.size()));
  }
  SUBCASE("an id that is no token") {
    writer.set("tokenizer.ggml.eos_token_id", std::uint32_t(w.tokens.size()));
    CHECK(contains(error(), "tokenizer.ggml.eos_token_id"));
  }
  SUBCASE("a missing array") {
    gguf::Writer empty;
    empty.set("tokenizer.ggml.model", string_view("gpt2"));
    empty.set("tokenizer.ggml.pre", string_view("qwen2"));
    CHECK(contains(error_of<gguf::FileError>([&] { (void)Tokenizer(file_of(empty, bytes)); }),
                   "tokenizer.ggml.tokens"));
  }
  SUBCASE("types of another number") {
    writer.set_strings("tokenizer.ggml.tokens", Vocabulary().tokens);
    CHECK(contains(error(), "256 tokens and " + std::to_string(w.types.size()) + " token types"));
  }
}

TEST_CASE("vocabularies that cannot be") {
  const auto error = [](const Vocabulary& v) {
    return error_of<gguf::FileError>([&] { (void)v.tokenizer(); });
  };
  Vocabulary v;
  CHECK(error(v) == "");
  SUBCASE("a byte without a token") {
    v.tokens[7] = "other";
    CHECK(contains(error(v), "no token stands for byte 7;"));
  }
  SUBCASE("a merge of what is no token") {
    v.merges.push_back("ab c");
    CHECK(contains(error(v), "merge 0, 'ab c', joins pieces of which the first is not a token"));
  }
  SUBCASE("a merge into what is no token") {
    v.merges.push_back("a b");
    CHECK(contains(error(v), "merge 0, 'a b', makes a piece that is not a token"));
  }
  SUBCASE("no merge at all") {
    for (const char* line : {"ab", "", " ", "a ", " b", "a b c", "a \xE4\xBD\xA0"}) {
      v.merges = {line};
      CAPTURE(line);
      CHECK(contains(error(v), "is not two tokens with a space between"));
    }
  }
  SUBCASE("a merge twice") {
    v.merge("a", "b");
    v.merges.push_back("a b");
    CHECK(contains(error(v), "merge 1, 'a b', is there already"));
  }
  SUBCASE("a type that is none") {
    v.types[3] = static_cast<TokenType>(9);
    CHECK(contains(error(v), "token 3 has type 9"));
  }
  SUBCASE("nothing") {
    v.tokens.clear();
    v.types.clear();
    CHECK(contains(error(v), "no token"));
  }
}

// --- streams -----------------------------------------------------------------------------------------------

namespace {

/// What a stream gives for a text that comes in pieces, which begin at `cuts`.
template <class Stream>
string streamed(Stream stream, string_view text, const std::vector<std::size_t>& cuts) {
  string out;
  std::size_t begin = 0;
  for (const std::size_t cut : cuts) {
    out += stream.push(text.substr(begin, cut - begin));
    begin = cut;
  }
  out += stream.push(text.substr(begin));
  return out + stream.flush();
}

}  // namespace

TEST_CASE("Utf8Stream: the same text at every split") {
  const string_view bad = "\xEF\xBF\xBD";
  const string r(bad);
  const std::vector<std::pair<string, string>> table{
      {"abc", "abc"},
      {"h\xC3\xA9\xE4\xBD\xA0\xF0\x9F\x98\x80!", "h\xC3\xA9\xE4\xBD\xA0\xF0\x9F\x98\x80!"},
      {"\xFF"
       "a",
       r + "a"},
      {"\x80\x80", r + r},
      {"\xE4\xBD"
       "a",
       r + "a"},            // a beginning of a character is one U+FFFD
      {"\xF0\x9F\x98", r},  // at the end too
      {"\xF0\x9F\xE4\xBD\xA0", r + "\xE4\xBD\xA0"},
      {"\xC0\x80", r + r},                  // never begins a character
      {"\xE0\x80\x80", r + r + r},          // too long for its value
      {"\xED\xA0\x80", r + r + r},          // a surrogate
      {"\xF4\x90\x80\x80", r + r + r + r},  // beyond U+10FFFF
      {"\xF5", r},
      {"\xC3\xC3\xA9", r + "\xC3\xA9"},
  };
  for (const auto& row : table) {
    const string &text = row.first, &expected = row.second;
    for (std::size_t a = 0; a <= text.size(); ++a) {
      for (std::size_t b = a; b <= text.size(); ++b) {
        CAPTURE(text);
        CAPTURE(a);
        CAPTURE(b);
        CHECK(streamed(Utf8Stream(), text, {a, b}) == expected);
      }
    }
  }
}

TEST_CASE("Utf8Stream: holds back no more than an incomplete character") {
  Utf8Stream stream;
  CHECK(stream.push("a\xF0\x9F") == "a");
  CHECK(stream.push("\x98") == "");
  CHECK(stream.push("\x80"
                    "b") ==
        "\xF0\x9F\x98\x80"
        "b");
  CHECK(stream.push("\xE4") == "");
  CHECK(stream.push("\xFF") ==
        "\xEF\xBF\xBD\xEF\xBF\xBD");  // nothing can complete the one, the other is none
  CHECK(stream.push("\xE4\xBD") == "");
  CHECK(stream.flush() == "\xEF\xBF\xBD");
  CHECK(stream.flush() == "");
}

TEST_CASE("StopStrings: the same text at every split") {
  struct Row {
    std::vector<string> stops;
    string text, expected;
    bool stopped;
  };
  const std::vector<Row> table{
      {{}, "anything", "anything", false},
      {{"END"}, "text END more", "text ", true},
      {{"END"}, "text EN", "text EN", false},
      {{"END"}, "ENEND", "EN", true},
      {{"aab"}, "aaab", "a", true},
      {{"abab"}, "abacababx", "abac", true},
      {{"abcd", "bc"}, "xabcd", "xa", true},  // "bc" is complete first
      {{"bc", "abc"}, "xabc", "x", true},     // both end together: the longest
      {{"\n\n", "User:"}, "a\nUser:", "a\n", true},
      {{"x"}, "x", "", true},
      {{"\xE4\xBD\xA0"}, "a\xE4\xBD\xA0", "a", true},
  };
  for (const Row& row : table) {
    for (std::size_t a = 0; a <= row.text.size(); ++a) {
      for (std::size_t b = a; b <= row.text.size(); ++b) {
        CAPTURE(row.text);
        CAPTURE(a);
        CAPTURE(b);
        CHECK(streamed(StopStrings(row.stops), row.text, {a, b}) == row.expected);
      }
    }
    StopStrings bytewise(row.stops);
    string out;
    for (const char c : row.text) out += bytewise.push({&c, 1});
    CHECK(bytewise.stopped() == row.stopped);
    CHECK(out + bytewise.flush() == row.expected);
    if (row.stopped) CHECK(bytewise.push("more") == "");
  }
}

TEST_CASE("StopStrings: holds back only what may become one") {
  StopStrings stops({"stop"});
  CHECK(stops.push("sst") == "s");
  CHECK(stops.push("x") == "stx");
  CHECK(stops.push("sto") == "");
  CHECK(stops.flush() == "sto");
  CHECK(!stops.stopped());
  CHECK_THROWS_AS(StopStrings({""}), std::invalid_argument);
}

// --- chat --------------------------------------------------------------------------------------------------

namespace {

constexpr const char* kQwen25 =
    "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n    {%- if messages[0]['role'] == 'system' %}\n"
    "        {{- messages[0]['content'] }}\n    {%- else %}\n        {{- 'You are Qwen, created by Alibaba "
    "Cloud. You are "
    "a helpful assistant.' }}\n    {%- endif %}\n{%- else %}\n    {%- if messages[0]['role'] == 'system' %}\n"
    "        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n    {%- else %}\n"
    "        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
    "assistant.<|im_end|>\\n' "
    "}}\n    {%- endif %}\n{%- endif %}\n";
constexpr const char* kPlain =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + "
    "'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

}  // namespace

TEST_CASE("chat: prompts") {
  const Words w;
  const Tokenizer tokenizer = w.tokenizer();
  std::vector<std::byte> bytes;
  gguf::Writer writer;
  fill(writer, w);
  const auto plain = [&](string_view text) { return tokenizer.encode(text); };
  const Ids answer = joined({{w.im_start}, plain("assistant\n")});
  const auto message = [&](const string& text) {
    return joined({{w.im_start}, plain(text), {w.im_end}, plain("\n")});
  };
  const std::vector<Message> hello{{"user", "hello"}};

  SUBCASE("no template: ChatML with Qwen2.5's system prompt") {
    const gguf::File file = file_of(writer, bytes);
    const ChatFormat format(file, tokenizer, "");
    CHECK(format.default_system_prompt() == kDefaultSystemPrompt);
    CHECK(format.prompt(hello) ==
          joined({message("system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
                  message("user\nhello"), answer}));
    // What a user writes is text, whatever it looks like.
    CHECK(format.prompt(std::vector<Message>{{"system", ""}, {"user", "<|im_end|>"}}) ==
          joined({message("system\n"), message("user\n<|im_end|>"), answer}));
    CHECK(tokenizer.encode("<|im_end|>").size() == 10);
    // The line end after the role and those of the content are one piece.
    const Ids lines = format.prompt(std::vector<Message>{{"system", "\r\nx"}});
    CHECK(lines == joined({message("system\n\r\nx"), answer}));
    const std::vector<Message> turns{{"system", "s"}, {"user", "a"}, {"assistant", "b"}, {"user", "c"}};
    CHECK(format.prompt(turns) == joined({message("system\ns"), message("user\na"), message("assistant\nb"),
                                          message("user\nc"), answer}));
    // The same conversation, when the answer is in the cache already.
    CHECK(joined({format.prompt(std::vector<Message>(turns.begin(), turns.begin() + 2)), plain("b"),
                  format.next_turn("c")}) == format.prompt(turns));
    CHECK(contains(error_of<std::invalid_argument>([&] {
                     (void)format.prompt(std::vector<Message>{{"tool", "x"}});
                   }),
                   "unknown role 'tool'"));
  }
  SUBCASE("Qwen2.5's template") {
    writer.set("tokenizer.chat_template", string_view(kQwen25));
    const gguf::File file = file_of(writer, bytes);
    CHECK(ChatFormat(file, tokenizer, "").default_system_prompt() == kDefaultSystemPrompt);
  }
  SUBCASE("a template without a system message: none is added") {
    writer.set("tokenizer.chat_template", string_view(kPlain));
    const gguf::File file = file_of(writer, bytes);
    const ChatFormat format(file, tokenizer, "");
    CHECK(format.default_system_prompt() == "");
    CHECK(format.prompt(hello) == joined({message("user\nhello"), answer}));
    CHECK(ChatFormat(file, tokenizer, "chatml").default_system_prompt() == kDefaultSystemPrompt);
  }
  SUBCASE("another template") {
    writer.set("tokenizer.chat_template", string_view("{{ '<|start_header_id|>' }}"));
    const gguf::File file = file_of(writer, bytes);
    CHECK(contains(error_of<gguf::FileError>([&] { ChatFormat(file, tokenizer, ""); }),
                   "made.gguf: its chat template is for another format (Llama 3)"));
    CHECK(ChatFormat(file, tokenizer, "chatml").prompt(hello).size() > 0);
    CHECK(contains(error_of<std::invalid_argument>([&] { ChatFormat(file, tokenizer, "llama3"); }),
                   "no chat template is called 'llama3'"));
  }
  SUBCASE("a vocabulary without the markers") {
    Vocabulary few;
    few.add("<|im_start|>", TokenType::control);
    const gguf::File file = file_of(writer, bytes);
    const Tokenizer other = few.tokenizer();
    CHECK(contains(error_of<gguf::FileError>([&] { ChatFormat(file, other, ""); }),
                   "no special token <|im_end|>"));
  }
}

TEST_CASE("chat: formats are told apart") {
  const std::vector<std::pair<string, string>> table{
      {kQwen25, "ChatML"},
      {kPlain, "ChatML"},
      {"[INST] <<SYS>>\\n' + system + '\\n<</SYS>>", "Llama 2"},
      {"'[INST] ' + message['content'] + ' [/INST]'", "Mistral"},
      {"'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'", "Llama 3"},
      {"'<start_of_turn>' + role", "Gemma"},
      {"'<|user|>\\n' + message['content'] + '<|end|>\\n<|assistant|>\\n'", "Phi or Zephyr"},
      {"'<｜User｜>' + message['content'] + '<｜Assistant｜>'", "DeepSeek"},
      {"'USER: ' + message['content'] + ' ASSISTANT:'", "Vicuna"},
      {"'### Instruction:\\n'", "Alpaca"},
      {"'<|im_start|>' + role + '[INST]' + '<|im_end|>'", "Mistral"},  // both: not ChatML
      {"'<|im_start|>' + message['content']", "not recognised"},
      {"{{ messages }}", "not recognised"},
      {"", "not recognised"},
  };
  for (const auto& row : table) {
    const string& text = row.first;
    CAPTURE(text);
    CHECK(template_kind(text) == row.second);
  }
}

TEST_CASE("chat: the default system prompt is read from the template") {
  CHECK(default_system_prompt_of(kQwen25) == kDefaultSystemPrompt);
  CHECK(default_system_prompt_of("{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}") ==
        "You are a helpful assistant.");
  CHECK(default_system_prompt_of("{{ '<|im_start|>system\\nReason\\nstep by step.<|im_end|>\\n' }}") ==
        "Reason\nstep by step.");
  CHECK(default_system_prompt_of(
            "{% set system = 'You are a helpful assistant.' %}<|im_start|>system\n{{ system }}<|im_end|>") ==
        "You are a helpful assistant.");
  CHECK(default_system_prompt_of(kPlain) == "");
}
