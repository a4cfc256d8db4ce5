// Arbitrary bytes into the reader and the model: whatever they are, the answer is an object or a FileError.
//
// With libFuzzer: `ninja -C build chapters/09-qwen/fuzz_gguf_libfuzzer`, then run it with -max_len=8192 CORPUS.
// Without it, by any compiler: `fuzz_gguf [--runs N] [--seed N] [FILE...]` mutates the crafted files and FILEs
// a bounded number of times; `fuzz_gguf --write-corpus DIR` writes the crafted files as seeds.
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "chapters/09-qwen/census.hpp"
#include "chapters/09-qwen/crafted_files.hpp"
#include "chapters/09-qwen/gguf.hpp"
#include "chapters/09-qwen/model.hpp"

namespace {

using ladder::gguf::Array;
using ladder::gguf::File;
using ladder::gguf::FileError;

/// Reads a value as T; every outcome but a crash is right.
template <class T>
void try_get(const File& file, std::string_view key) {
  try {
    (void)file.get<T>(key);
  } catch (const FileError&) {  // NOLINT(bugprone-empty-catch): of another kind, which is an answer
  }
}

/// Touches what the file hands out, so that a sanitizer sees every byte.
unsigned touch(const File& file) {
  unsigned sum = 0;
  for (const auto& [key, value] : file.metadata()) {
    if (file.find(key) != &value) std::abort();
    try_get<std::string_view>(file, key);
    try_get<bool>(file, key);
    try_get<float>(file, key);
    try_get<double>(file, key);
    try_get<std::int64_t>(file, key);
    try_get<std::uint64_t>(file, key);
    try_get<std::int32_t>(file, key);
    try_get<std::uint32_t>(file, key);
    try_get<const Array*>(file, key);
    if (const auto* text = std::get_if<std::string_view>(&value)) {
      for (const char c : *text) sum += static_cast<unsigned char>(c);
    }
    if (const auto* array = std::get_if<Array>(&value)) {
      for (const std::byte b : array->bytes) sum += std::to_integer<unsigned>(b);
      for (const std::string_view s : array->strings) {
        for (const char c : s) sum += static_cast<unsigned char>(c);
      }
    }
  }
  for (const ladder::gguf::Tensor& t : file.tensors()) {
    if (file.tensor(t.name) != &t) std::abort();
    if (t.elements() < 1 || t.bytes < 1) std::abort();
    if (!t.data.empty() && t.data.size() != static_cast<std::size_t>(t.bytes)) std::abort();
    for (const std::byte b : t.data) sum += std::to_integer<unsigned>(b);
  }
  return sum;
}

unsigned read_everything(std::span<const std::byte> bytes, bool headers_only) {
  unsigned sum = 0;
  try {
    const File file(bytes, "fuzz", headers_only);
    sum = touch(file);
    const ladder::qwen::Model model(file);
    const ladder::qwen::Bandwidth device{"device", 1000};
    std::ostringstream text;
    print_text(text, ladder::qwen::census(model, {&device, 1}, model.hp.context_length));
    sum += static_cast<unsigned>(text.str().size());
  } catch (const FileError& error) {
    // One line, of a length that fits on a screen.
    const std::string_view line = error.what();
    if (line.find('\n') != std::string_view::npos || line.size() > 600) std::abort();
    sum += static_cast<unsigned>(line.size());
  }
  return sum;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  read_everything(bytes, false);
  read_everything(bytes, true);
  return 0;
}

#ifndef LADDER_LIBFUZZER

namespace {

using ladder::crafted::Bytes;

/// A xorshift generator: mutations are the same on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 2 + 1) {}
  std::uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  std::size_t below(std::size_t n) { return n == 0 ? 0 : static_cast<std::size_t>(next() % n); }

 private:
  std::uint64_t state_;
};

/// One random change: a bit, a byte, an integer at one of its edges, a cut, a repeated or a removed piece.
void mutate(Bytes& bytes, Random& random) {
  constexpr std::uint64_t edges[] = {0,          1,          2,          3,          8,           31,
                                     33,         0x7f,       0x80,       0xff,       0x7fff,      0xffff,
                                     0x10000,    0x7fffffff, 0x80000000, 0xffffffff, 0x100000000, 1ULL << 62,
                                     1ULL << 63, ~0ULL,      ~0ULL - 31};
  const std::size_t at = random.below(bytes.size());
  switch (random.below(7)) {
    case 0:
      if (!bytes.empty()) bytes[at] ^= static_cast<std::byte>(1u << random.below(8));
      break;
    case 1:
      if (!bytes.empty()) bytes[at] = static_cast<std::byte>(random.next());
      break;
    case 2:
    case 3: {
      const std::uint64_t edge = edges[random.below(std::size(edges))];
      const std::size_t width = std::min(std::size_t{1} << random.below(4), bytes.size() - at);
      if (width > 0) std::memcpy(bytes.data() + at, &edge, width);
      break;
    }
    case 4:
      bytes.resize(at);
      break;
    case 5: {
      const std::size_t length = random.below(std::min<std::size_t>(bytes.size() - at, 64));
      const Bytes piece(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                        bytes.begin() + static_cast<std::ptrdiff_t>(at + length));
      bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(random.below(bytes.size())), piece.begin(),
                   piece.end());
      break;
    }
    default: {
      const std::size_t length = random.below(std::min<std::size_t>(bytes.size() - at, 64));
      bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                  bytes.begin() + static_cast<std::ptrdiff_t>(at + length));
    }
  }
}

void run(const Bytes& bytes) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
}

struct Seed {
  std::string name;
  Bytes bytes;
};

std::vector<Seed> crafted_seeds() {
  std::vector<Seed> seeds;
  ladder::crafted::RawFile good = ladder::crafted::good_file();
  seeds.push_back({"good", ladder::crafted::to_bytes(good.str())});
  good.version = 2;
  seeds.push_back({"good_v2", ladder::crafted::to_bytes(good.str())});
  seeds.push_back({"model", ladder::crafted::TinyModel().header()});
  for (ladder::crafted::BadFile& f : ladder::crafted::bad_files())
    seeds.push_back({f.name, std::move(f.bytes)});
  return seeds;
}

std::uint64_t number(std::string_view text) {
  std::uint64_t value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size()) {
    std::fprintf(stderr, "fuzz_gguf: '%s' is not a number; allowed are 0 and more\n",
                 std::string(text).c_str());
    std::exit(2);
  }
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t runs = 100000, seed = 1;
  std::vector<Seed> seeds = crafted_seeds();
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const bool more = i + 1 < argc;
    if (argument == "--runs" && more) {
      runs = number(argv[++i]);
    } else if (argument == "--seed" && more) {
      seed = number(argv[++i]);
    } else if (argument == "--write-corpus" && more) {
      const std::filesystem::path folder = argv[++i];
      std::filesystem::create_directories(folder);
      for (const Seed& s : seeds) {
        std::ofstream out(folder / (s.name + ".gguf"), std::ios::binary);
        out.write(reinterpret_cast<const char*>(s.bytes.data()),
                  static_cast<std::streamsize>(s.bytes.size()));
        if (!out.flush()) {
          std::fprintf(stderr, "fuzz_gguf: %s cannot be written\n", (folder / s.name).c_str());
          return 1;
        }
      }
      std::printf("%zu files in %s\n", seeds.size(), folder.c_str());
      return 0;
    } else if (argument.starts_with("--")) {
      std::fprintf(stderr, "usage: fuzz_gguf [--runs N] [--seed N] [FILE...] | --write-corpus DIR\n");
      return 2;
    } else {
      std::ifstream in(argv[i], std::ios::binary);
      if (!in) {
        std::fprintf(stderr, "fuzz_gguf: %s cannot be read\n", argv[i]);
        return 1;
      }
      const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
      seeds.push_back({argv[i], ladder::crafted::to_bytes(text)});
    }
  }
  for (const Seed& s : seeds) run(s.bytes);
  Random random(seed);
  for (std::uint64_t i = 0; i < runs; ++i) {
    Bytes bytes = seeds[random.below(seeds.size())].bytes;
    for (std::size_t changes = 1 + random.below(4); changes > 0; --changes) mutate(bytes, random);
    run(bytes);
  }
  std::printf("%zu files and %llu mutations of them: each was read or refused with a message\n", seeds.size(),
              static_cast<unsigned long long>(runs));
  return 0;
}

#endif
