// The reader of GGUF files. A file is hostile until it is checked: every count is held against the bytes that
// are left before memory is taken for it, and every product is checked for overflow before it is used.
#include "chapters/09-qwen/gguf.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

namespace ladder::gguf {

static_assert(std::endian::native == std::endian::little,
              "GGUF files are little-endian, and so is this reader");

namespace {

constexpr std::uint64_t kDefaultAlignment = 32;
constexpr std::size_t kNameLimit = 64;                 // a tensor's name is shorter (GGML_MAX_NAME)
constexpr std::uint64_t kKeyLimit = 65535;             // bytes of a key (docs/gguf.md)
constexpr std::uint64_t kStringLimit = 1ULL << 30;     // bytes of a string value
constexpr std::uint64_t kAlignmentLimit = 1ULL << 30;  // far above anything useful
constexpr std::uint64_t kPartsLimit = 99999;           // five digits in a part's name

/// Every code that ggml has given out (ggml.h): with the workbook's type, or with the reason why there is
/// none.
enum class Standing { supported, known, removed };
struct TypeCode {
  std::uint32_t code;
  const char* name;
  Standing standing;
  WeightType type;
};
constexpr auto kNone = WeightType::f32;  // for codes without a type; not looked at
constexpr TypeCode kTypeCodes[] = {
    {0, "F32", Standing::supported, WeightType::f32},
    {1, "F16", Standing::supported, WeightType::f16},
    {2, "Q4_0", Standing::supported, WeightType::q4_0},
    {3, "Q4_1", Standing::supported, WeightType::q4_1},
    {4, "Q4_2", Standing::removed, kNone},
    {5, "Q4_3", Standing::removed, kNone},
    {6, "Q5_0", Standing::supported, WeightType::q5_0},
    {7, "Q5_1", Standing::supported, WeightType::q5_1},
    {8, "Q8_0", Standing::supported, WeightType::q8_0},
    {9, "Q8_1", Standing::known, kNone},
    {10, "Q2_K", Standing::supported, WeightType::q2_k},
    {11, "Q3_K", Standing::supported, WeightType::q3_k},
    {12, "Q4_K", Standing::supported, WeightType::q4_k},
    {13, "Q5_K", Standing::supported, WeightType::q5_k},
    {14, "Q6_K", Standing::supported, WeightType::q6_k},
    {15, "Q8_K", Standing::known, kNone},
    {16, "IQ2_XXS", Standing::known, kNone},
    {17, "IQ2_XS", Standing::known, kNone},
    {18, "IQ3_XXS", Standing::known, kNone},
    {19, "IQ1_S", Standing::known, kNone},
    {20, "IQ4_NL", Standing::supported, WeightType::iq4_nl},
    {21, "IQ3_S", Standing::known, kNone},
    {22, "IQ2_S", Standing::known, kNone},
    {23, "IQ4_XS", Standing::supported, WeightType::iq4_xs},
    {24, "I8", Standing::known, kNone},
    {25, "I16", Standing::known, kNone},
    {26, "I32", Standing::known, kNone},
    {27, "I64", Standing::known, kNone},
    {28, "F64", Standing::known, kNone},
    {29, "IQ1_M", Standing::known, kNone},
    {30, "BF16", Standing::supported, WeightType::bf16},
    {31, "Q4_0_4_4", Standing::removed, kNone},
    {32, "Q4_0_4_8", Standing::removed, kNone},
    {33, "Q4_0_8_8", Standing::removed, kNone},
    {34, "TQ1_0", Standing::known, kNone},
    {35, "TQ2_0", Standing::known, kNone},
    {36, "IQ4_NL_4_4", Standing::removed, kNone},
    {37, "IQ4_NL_4_8", Standing::removed, kNone},
    {38, "IQ4_NL_8_8", Standing::removed, kNone},
    {39, "MXFP4", Standing::known, kNone},
    {40, "NVFP4", Standing::known, kNone},
    {41, "Q1_0", Standing::known, kNone},
    {42, "Q2_0", Standing::known, kNone},
};

/// "F32, F16, ...": the types that a tensor may have here.
std::string supported_types() {
  std::string list;
  for (const TypeCode& t : kTypeCodes) {
    if (t.standing != Standing::supported) continue;
    if (!list.empty()) list += ", ";
    list += t.name;
  }
  return list;
}

/// Bytes of a number or bool of metadata; 0 for strings, arrays and unknown codes.
constexpr std::size_t scalar_bytes(ValueType type) {
  switch (type) {
    case ValueType::u8:
    case ValueType::i8:
    case ValueType::boolean:
      return 1;
    case ValueType::u16:
    case ValueType::i16:
      return 2;
    case ValueType::u32:
    case ValueType::i32:
    case ValueType::f32:
      return 4;
    case ValueType::u64:
    case ValueType::i64:
    case ValueType::f64:
      return 8;
    case ValueType::string:
    case ValueType::array:
      break;
  }
  return 0;
}

/// A path as it is shown: as typed, but for control characters.
std::string shown_path(std::string_view path) {
  std::string out;
  for (const char c : path) {
    const auto u = static_cast<unsigned char>(c);
    out += u < 0x20 || u == 0x7f ? '?' : c;
  }
  return out;
}

[[noreturn]] void fail(const std::string& file, const std::string& what) {
  throw FileError(file + ": " + what);
}

/// a + b or std::nullopt beyond 2^63 - 1.
std::optional<std::uint64_t> add(std::uint64_t a, std::uint64_t b) {
  constexpr std::uint64_t limit = std::numeric_limits<std::int64_t>::max();
  if (a > limit || b > limit - a) return std::nullopt;
  return a + b;
}
/// The next multiple of `alignment`, a power of two, or std::nullopt beyond 2^63 - 1.
std::optional<std::uint64_t> align_up(std::uint64_t value, std::uint64_t alignment) {
  const std::optional<std::uint64_t> raised = add(value, alignment - 1);
  if (!raised) return std::nullopt;
  return *raised & ~(alignment - 1);
}

/// A file mapped for reading; unmapped when this goes.
class Mapping {
 public:
  Mapping() = default;
  explicit Mapping(const std::filesystem::path& path, const std::string& name) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail(name, std::string("cannot be opened: ") + std::strerror(errno));
    struct stat status {};
    const bool known = ::fstat(fd, &status) == 0;
    if (!known || !S_ISREG(status.st_mode)) {
      const bool directory = known && S_ISDIR(status.st_mode);
      ::close(fd);
      fail(name, directory ? "is a directory; a model is one .gguf file"
                           : "is not a regular file, and cannot be mapped");
    }
    size_ = static_cast<std::size_t>(status.st_size);
    if (size_ > 0) {
      address_ = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
      if (address_ == MAP_FAILED) {
        const int error = errno;
        address_ = nullptr;
        ::close(fd);
        fail(name, "cannot be mapped (" + std::to_string(size_) + " bytes): " + std::strerror(error));
      }
    }
    ::close(fd);  // the mapping keeps the file
  }
  ~Mapping() {
    if (address_ != nullptr) ::munmap(address_, size_);
  }
  Mapping(Mapping&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(size_, other.size_);
    return *this;
  }
  [[nodiscard]] std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(address_), size_};
  }

 private:
  void* address_ = nullptr;
  std::size_t size_ = 0;
};

/// Reads forward through the header of one file. Every read names what it is for, so that a short file says
/// where it ends.
class Cursor {
 public:
  Cursor(std::span<const std::byte> bytes, const std::string& file) : bytes_(bytes), file_(file) {}
  [[nodiscard]] std::uint64_t position() const { return position_; }
  [[nodiscard]] std::uint64_t left() const { return bytes_.size() - position_; }
  [[nodiscard]] const std::string& file() const { return file_; }

  std::span<const std::byte> take(std::uint64_t count, std::string_view what) {
    if (count > left()) {
      fail(file_, "truncated: it ends at byte " + std::to_string(bytes_.size()) + ", inside " +
                      std::string(what) + " (at byte " + std::to_string(position_) + ", " +
                      std::to_string(count) + " bytes): " + std::to_string(count - left()) +
                      " bytes are missing, at least");
    }
    const std::span<const std::byte> taken = bytes_.subspan(position_, count);
    position_ += count;
    return taken;
  }
  template <class T>
  T number(std::string_view what) {
    T value;
    std::memcpy(&value, take(sizeof value, what).data(), sizeof value);
    return value;
  }
  std::string_view string(std::uint64_t limit, std::string_view what) {
    const auto length = number<std::uint64_t>(what);
    if (length > limit) {
      fail(file_, std::string(what) + " has a length of " + std::to_string(length) +
                      " bytes; allowed are up to " + std::to_string(limit));
    }
    const std::span<const std::byte> text = take(length, what);
    return {reinterpret_cast<const char*>(text.data()), text.size()};
  }

 private:
  std::span<const std::byte> bytes_;
  const std::string& file_;
  std::uint64_t position_ = 0;
};

bool known(ValueType type) {
  return type == ValueType::string || type == ValueType::array || scalar_bytes(type) != 0;
}

[[noreturn]] void unknown_value_type(const std::string& file, const std::string& what, std::uint32_t code) {
  fail(file, what + " has the unknown type code " + std::to_string(code) + "; allowed are 0 to 12");
}

bool read_bool(Cursor& in, const std::string& what) {
  const auto value = in.number<std::uint8_t>(what);
  if (value > 1) {
    fail(in.file(), what + " is a bool with the value " + std::to_string(value) + "; allowed are 0 and 1");
  }
  return value == 1;
}

Array read_array(Cursor& in, const std::string& what) {
  Array array;
  const auto code = in.number<std::uint32_t>(what);
  array.element = static_cast<ValueType>(code);
  if (!known(array.element)) unknown_value_type(in.file(), "an element of " + what, code);
  if (array.element == ValueType::array) {
    fail(in.file(), what + " is an array of arrays; allowed are arrays of numbers, bools or strings");
  }
  array.count = in.number<std::uint64_t>(what);
  // The smallest that an element can be: a string has a length of 8 bytes in front.
  const std::size_t least = array.element == ValueType::string ? 8 : scalar_bytes(array.element);
  if (array.count > in.left() / least) {
    fail(in.file(), what + " claims " + std::to_string(array.count) + " elements of type " +
                        name(array.element) + ", at least " + std::to_string(least) +
                        " bytes each, but only " + std::to_string(in.left()) + " bytes are left in the file");
  }
  if (array.element == ValueType::string) {
    array.strings.reserve(array.count);
    for (std::uint64_t i = 0; i < array.count; ++i) array.strings.push_back(in.string(kStringLimit, what));
    return array;
  }
  array.bytes = in.take(array.count * least, what);
  if (array.element == ValueType::boolean) {
    for (const std::byte b : array.bytes) {
      if (std::to_integer<int>(b) > 1) fail(in.file(), what + " has a bool other than 0 and 1");
    }
  }
  return array;
}

Value read_value(Cursor& in, ValueType type, const std::string& what) {
  switch (type) {
    case ValueType::u8:
      return in.number<std::uint8_t>(what);
    case ValueType::i8:
      return in.number<std::int8_t>(what);
    case ValueType::u16:
      return in.number<std::uint16_t>(what);
    case ValueType::i16:
      return in.number<std::int16_t>(what);
    case ValueType::u32:
      return in.number<std::uint32_t>(what);
    case ValueType::i32:
      return in.number<std::int32_t>(what);
    case ValueType::f32:
      return in.number<float>(what);
    case ValueType::boolean:
      return read_bool(in, what);
    case ValueType::string:
      return in.string(kStringLimit, what);
    case ValueType::array:
      return read_array(in, what);
    case ValueType::u64:
      return in.number<std::uint64_t>(what);
    case ValueType::i64:
      return in.number<std::int64_t>(what);
    case ValueType::f64:
      return in.number<double>(what);
  }
  unknown_value_type(in.file(), what, static_cast<std::uint32_t>(type));
}

/// An integer of any kind as one that can be compared; std::nullopt for other kinds. |value| < 2^64.
struct Integer {
  bool negative;
  std::uint64_t magnitude;
};
std::optional<Integer> integer(const Value& value) {
  return std::visit(
      [](const auto& v) -> std::optional<Integer> {
        using V = std::decay_t<decltype(v)>;
        if constexpr (std::is_integral_v<V> && !std::is_same_v<V, bool>) {
          if constexpr (std::is_signed_v<V>) {
            const auto wide = static_cast<std::int64_t>(v);
            // 0 - x in unsigned arithmetic is the magnitude of -2^63 too.
            if (wide < 0) return Integer{true, std::uint64_t{0} - static_cast<std::uint64_t>(wide)};
            return Integer{false, static_cast<std::uint64_t>(wide)};
          } else {
            return Integer{false, static_cast<std::uint64_t>(v)};
          }
        } else {
          return std::nullopt;
        }
      },
      value);
}

using Metadata = std::vector<std::pair<std::string_view, Value>>;
using Index = std::unordered_map<std::string_view, std::size_t>;

// A value's index in the variant is its code in the file.
template <ValueType code, class T>
constexpr bool coded = std::is_same_v<std::variant_alternative_t<static_cast<std::size_t>(code), Value>, T>;
static_assert(coded<ValueType::u8, std::uint8_t> && coded<ValueType::f32, float> &&
              coded<ValueType::boolean, bool> && coded<ValueType::string, std::string_view> &&
              coded<ValueType::array, Array> && coded<ValueType::u64, std::uint64_t> &&
              coded<ValueType::f64, double>);

/// What the header of one part says.
struct Header {
  std::uint32_t version = 0;
  std::uint64_t alignment = kDefaultAlignment;
  Metadata metadata;
  Index keys;
  std::vector<Tensor> tensors;
};

std::uint32_t read_version(Cursor& in) {
  const std::span<const std::byte> magic = in.take(4, "the magic number");
  const std::string_view text(reinterpret_cast<const char*>(magic.data()), magic.size());
  if (text == "vers")
    fail(in.file(), "is not a GGUF file but, by its first bytes, a Git LFS pointer: fetch the file itself");
  if (text != "GGUF")
    fail(in.file(), "is not a GGUF file: it begins with '" + shown(text) + "', allowed is 'GGUF'");
  const auto version = in.number<std::uint32_t>("the version");
  if (version != 0 && (version & 0xffffu) == 0) {
    fail(in.file(), "has the other endianness: its numbers are big-endian, allowed is little-endian");
  }
  if (version != 2 && version != 3) {
    fail(in.file(), "has GGUF version " + std::to_string(version) + "; allowed are 2 and 3" +
                        (version == 1 ? " (version 1 has 32-bit counts; convert the model anew)" : ""));
  }
  return version;
}

/// A count of the header, held against what the file can hold: each item takes `least` bytes or more.
std::uint64_t checked_count(const Cursor& in, std::int64_t count, std::uint64_t least, const char* what) {
  if (count < 0 || static_cast<std::uint64_t>(count) > in.left() / least) {
    fail(in.file(), "claims " + std::to_string(count) + " " + what + ", but " + std::to_string(in.left()) +
                        " bytes are left for them; allowed are 0 to " + std::to_string(in.left() / least));
  }
  return static_cast<std::uint64_t>(count);
}

std::uint64_t read_alignment(const Header& header, const std::string& file) {
  const auto at = header.keys.find("general.alignment");
  if (at == header.keys.end()) return kDefaultAlignment;
  const Value& value = header.metadata[at->second].second;
  const auto* alignment = std::get_if<std::uint32_t>(&value);
  if (alignment == nullptr) {
    fail(file, std::string("key 'general.alignment' has type ") +
                   name(static_cast<ValueType>(value.index())) + "; allowed is u32");
  }
  if (!std::has_single_bit(*alignment) || *alignment > kAlignmentLimit) {
    fail(file, "key 'general.alignment' is " + std::to_string(*alignment) +
                   "; allowed are powers of two up to " + std::to_string(kAlignmentLimit));
  }
  return *alignment;
}

WeightType checked_type(const std::string& file, const std::string& what, std::uint32_t code) {
  for (const TypeCode& t : kTypeCodes) {
    if (t.code != code) continue;
    if (t.standing == Standing::supported) return t.type;
    fail(file, what + " has type " + t.name + " (" + std::to_string(code) + "), which " +
                   (t.standing == Standing::removed ? "was removed from the format" : "is not supported") +
                   "; allowed are " + supported_types());
  }
  fail(file, what + " has the unknown type " + std::to_string(code) + "; allowed are " + supported_types());
}

Tensor read_tensor(Cursor& in, std::uint64_t number) {
  Tensor t;
  std::string what = "the name of tensor number " + std::to_string(number);
  t.name = in.string(kNameLimit - 1, what);
  if (t.name.empty()) fail(in.file(), what + " is empty; allowed are 1 to 63 bytes");
  what = "tensor '" + shown(t.name) + "'";
  t.dimensions = in.number<std::uint32_t>(what);
  if (t.dimensions < 1 || t.dimensions > 4) {
    fail(in.file(), what + " has " + std::to_string(t.dimensions) + " dimensions; allowed are 1 to 4");
  }
  std::int64_t elements = 1;
  for (unsigned axis = 0; axis < t.dimensions; ++axis) {
    const auto ne = in.number<std::int64_t>(what);
    if (ne < 1) {
      fail(in.file(), what + " has " + std::to_string(ne) + " elements on axis " + std::to_string(axis) +
                          "; allowed are 1 and more");
    }
    if (__builtin_mul_overflow(elements, ne, &elements)) {
      fail(in.file(), what + " has more than 2^63 - 1 elements");
    }
    t.ne[axis] = ne;
  }
  t.type = checked_type(in.file(), what, in.number<std::uint32_t>(what));
  const WeightTypeInfo& type = info(t.type);
  if (t.ne[0] % type.block_elems != 0) {
    fail(in.file(), what + " has rows of " + std::to_string(t.ne[0]) + " elements; type " +
                        type_name(t.type) + " allows multiples of " + std::to_string(type.block_elems));
  }
  const std::optional<std::int64_t> bytes = tensor_bytes(t.type, t.ne[0], elements / t.ne[0]);
  if (!bytes) fail(in.file(), what + " has more than 2^63 - 1 bytes");
  t.bytes = *bytes;
  t.offset = in.number<std::uint64_t>(what);
  return t;
}

/// Checks where the tensors of one part lie, and points them at their bytes.
/// @param begin the first byte after the header
void place_tensors(Header& header, std::uint64_t begin, std::span<const std::byte> bytes,
                   const std::string& file, bool headers_only) {
  if (header.tensors.empty()) return;
  const std::optional<std::uint64_t> base = align_up(begin, header.alignment);
  if (!base) fail(file, "has its tensor data beyond 2^63 - 1 bytes");
  std::uint64_t end_of_all = 0;
  const Tensor* first_cut = nullptr;  // the first tensor that is not whole
  for (Tensor& t : header.tensors) {
    if (t.offset % header.alignment != 0) {
      fail(file, "tensor '" + shown(t.name) + "' has offset " + std::to_string(t.offset) +
                     "; allowed are multiples of the alignment, " + std::to_string(header.alignment));
    }
    const std::optional<std::uint64_t> start = add(*base, t.offset);
    const std::optional<std::uint64_t> end =
        start ? add(*start, static_cast<std::uint64_t>(t.bytes)) : std::nullopt;
    if (!end || !align_up(*end, header.alignment)) {
      fail(file, "tensor '" + shown(t.name) + "', " + std::to_string(t.bytes) + " bytes at offset " +
                     std::to_string(t.offset) + ", ends beyond 2^63 - 1 bytes");
    }
    end_of_all = std::max(end_of_all, *end);
    if (*end <= bytes.size()) {
      t.data = bytes.subspan(*start, static_cast<std::size_t>(t.bytes));
    } else if (first_cut == nullptr || t.offset < first_cut->offset) {
      first_cut = &t;
    }
  }
  std::vector<const Tensor*> by_offset;
  by_offset.reserve(header.tensors.size());
  for (const Tensor& t : header.tensors) by_offset.push_back(&t);
  std::sort(by_offset.begin(), by_offset.end(),
            [](const Tensor* a, const Tensor* b) { return a->offset < b->offset; });
  for (std::size_t i = 1; i < by_offset.size(); ++i) {
    const Tensor &before = *by_offset[i - 1], &t = *by_offset[i];
    if (before.offset + static_cast<std::uint64_t>(before.bytes) > t.offset) {
      fail(file, "tensors '" + shown(before.name) + "' (" + std::to_string(before.bytes) +
                     " bytes at offset " + std::to_string(before.offset) + ") and '" + shown(t.name) +
                     "' (at offset " + std::to_string(t.offset) + ") overlap");
    }
  }
  if (first_cut != nullptr && !headers_only) {
    fail(file, "truncated: the tensors end at byte " + std::to_string(end_of_all) + ", the file at byte " +
                   std::to_string(bytes.size()) + ": " + std::to_string(end_of_all - bytes.size()) +
                   " bytes are missing, from tensor '" + shown(first_cut->name) + "' on");
  }
}

Header read_header(std::span<const std::byte> bytes, const std::string& file, bool headers_only) {
  Header header;
  Cursor in(bytes, file);
  if (bytes.empty()) fail(file, "is empty; a GGUF file has a header of at least 24 bytes");
  header.version = read_version(in);
  const auto tensor_count = in.number<std::int64_t>("the number of tensors");
  const auto key_count = in.number<std::int64_t>("the number of metadata keys");
  // A key takes a length (8), a byte or more, a type (4) and a value (1 or more); a tensor a length (8), a
  // byte or more, a number of dimensions (4), one extent or more (8), a type (4) and an offset (8).
  const std::uint64_t keys = checked_count(in, key_count, 14, "metadata keys");
  const std::uint64_t tensors = checked_count(in, tensor_count, 33, "tensors");

  for (std::uint64_t i = 0; i < keys; ++i) {
    const std::string number = "metadata key number " + std::to_string(i);
    const std::string_view key = in.string(kKeyLimit, number);
    if (key.empty()) fail(file, number + " is empty; allowed are 1 to 65535 bytes");
    const std::string what = "key '" + shown(key) + "'";
    if (!header.keys.emplace(key, header.metadata.size()).second)
      fail(file, what + " is there twice; allowed is once");
    const auto type = in.number<std::uint32_t>(what);
    header.metadata.emplace_back(key, read_value(in, static_cast<ValueType>(type), what));
  }
  header.alignment = read_alignment(header, file);
  for (std::uint64_t i = 0; i < tensors; ++i) header.tensors.push_back(read_tensor(in, i));
  place_tensors(header, in.position(), bytes, file, headers_only);
  return header;
}

/// What a header says about its place among the parts of a split file.
struct SplitPlace {
  std::uint64_t number = 0, count = 1;
  std::optional<std::uint64_t> tensors;
};
std::optional<std::uint64_t> split_key(const Header& header, std::string_view key, const std::string& file) {
  const auto at = header.keys.find(key);
  if (at == header.keys.end()) return std::nullopt;
  const std::optional<Integer> value = integer(header.metadata[at->second].second);
  if (!value || value->negative) fail(file, "key '" + std::string(key) + "' is not a non-negative integer");
  return value->magnitude;
}
SplitPlace split_place(const Header& header, const std::string& file) {
  SplitPlace place;
  const std::optional<std::uint64_t> count = split_key(header, "split.count", file);
  const std::optional<std::uint64_t> number = split_key(header, "split.no", file);
  place.tensors = split_key(header, "split.tensors.count", file);
  if (!count || *count == 0) return place;  // not split; some writers say so with a count of 0
  place.count = *count;
  place.number = number.value_or(0);
  if (place.count > kPartsLimit || place.number >= place.count) {
    fail(file, "is part split.no = " + std::to_string(place.number) +
                   " (from 0) of split.count = " + std::to_string(place.count) +
                   " parts; allowed are up to 99999 parts, numbered below their count");
  }
  return place;
}

/// "-00001-of-00003.gguf".
std::string part_suffix(std::uint64_t number, std::uint64_t count) {
  char text[64];
  std::snprintf(text, sizeof text, "-%05llu-of-%05llu.gguf", static_cast<unsigned long long>(number + 1),
                static_cast<unsigned long long>(count));
  return text;
}

}  // namespace

const char* name(ValueType type) {
  switch (type) {
    case ValueType::u8:
      return "u8";
    case ValueType::i8:
      return "i8";
    case ValueType::u16:
      return "u16";
    case ValueType::i16:
      return "i16";
    case ValueType::u32:
      return "u32";
    case ValueType::i32:
      return "i32";
    case ValueType::f32:
      return "f32";
    case ValueType::boolean:
      return "bool";
    case ValueType::string:
      return "string";
    case ValueType::array:
      return "array";
    case ValueType::u64:
      return "u64";
    case ValueType::i64:
      return "i64";
    case ValueType::f64:
      return "f64";
  }
  return "unknown";
}

std::string type_name(WeightType type) {
  std::string upper = info(type).name;
  for (char& c : upper) {
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  }
  return upper;
}

std::string shown(std::string_view text, std::size_t limit) {
  std::string out;
  for (const char c : text.substr(0, limit)) {
    const auto u = static_cast<unsigned char>(c);
    if (u >= 0x20 && u < 0x7f) {
      out += c;
    } else {
      char hex[8];
      std::snprintf(hex, sizeof hex, "\\x%02x", u);
      out += hex;
    }
  }
  return text.size() > limit ? out + "..." : out;
}

std::optional<WeightType> weight_type(std::uint32_t ggml_type) {
  for (const TypeCode& t : kTypeCodes) {
    if (t.code == ggml_type && t.standing == Standing::supported) return t.type;
  }
  return std::nullopt;
}

std::uint32_t ggml_type(WeightType type) {
  for (const TypeCode& t : kTypeCodes) {
    if (t.standing == Standing::supported && t.type == type) return t.code;
  }
  throw std::logic_error("a weight type without a code in GGUF");
}

std::optional<std::int64_t> tensor_bytes(WeightType type, std::int64_t row_length, std::int64_t rows) {
  const WeightTypeInfo& t = info(type);
  if (row_length < 0 || rows < 0 || row_length % t.block_elems != 0) return std::nullopt;
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(row_length / t.block_elems, std::int64_t{t.block_bytes}, &bytes))
    return std::nullopt;
  if (__builtin_mul_overflow(bytes, rows, &bytes)) return std::nullopt;
  return bytes;
}

struct File::Contents {
  std::string name;
  std::vector<Mapping> maps;
  std::uint32_t version = 0;
  std::uint64_t alignment = kDefaultAlignment;
  std::uint64_t bytes = 0;
  std::size_t parts = 0;
  Metadata metadata;
  Index keys;
  std::vector<Tensor> tensors;
  Index tensor_index;

  /// Takes over the header of one more part; the first part's metadata are the file's.
  void append(Header header, std::uint64_t size, const std::string& file) {
    if (parts == 0) {
      version = header.version;
      alignment = header.alignment;
      metadata = std::move(header.metadata);
      keys = std::move(header.keys);
    }
    for (Tensor& t : header.tensors) {
      if (!tensor_index.emplace(t.name, tensors.size()).second) {
        fail(file, "tensor '" + shown(t.name) + "' is there twice; allowed is once");
      }
      tensors.push_back(t);
    }
    bytes += size;
    ++parts;
  }
};

File::File(const std::filesystem::path& path, bool headers_only) : contents_(std::make_unique<Contents>()) {
  Contents& c = *contents_;
  c.name = shown_path(path.string());
  c.maps.emplace_back(path, c.name);
  Header first = read_header(c.maps[0].bytes(), c.name, headers_only);
  const SplitPlace place = split_place(first, c.name);
  c.append(std::move(first), c.maps[0].bytes().size(), c.name);
  if (place.count == 1) return;

  // Split: <prefix>-00001-of-00003.gguf and so on. The tensors of a part lie in that part.
  const std::string file = path.string(), suffix = part_suffix(place.number, place.count);
  if (!file.ends_with(suffix)) {
    fail(c.name, "is part " + std::to_string(place.number + 1) + " of " + std::to_string(place.count) +
                     " of a split model; allowed is a name that ends in '" + suffix + "'");
  }
  const std::string prefix = file.substr(0, file.size() - suffix.size());
  if (place.number != 0) {
    fail(c.name, "is part " + std::to_string(place.number + 1) + " of a split model; open its first part, '" +
                     shown_path(prefix + part_suffix(0, place.count)) + "'");
  }
  for (std::uint64_t i = 1; i < place.count; ++i) {
    const std::string part = prefix + part_suffix(i, place.count), part_name = shown_path(part);
    c.maps.emplace_back(part, part_name);
    const std::span<const std::byte> bytes = c.maps.back().bytes();
    Header header = read_header(bytes, part_name, headers_only);
    const SplitPlace its = split_place(header, part_name);
    if (its.number != i || its.count != place.count) {
      fail(part_name, "says that it is part " + std::to_string(its.number + 1) + " of " +
                          std::to_string(its.count) + "; allowed is, by its name, part " +
                          std::to_string(i + 1) + " of " + std::to_string(place.count));
    }
    c.append(std::move(header), bytes.size(), part_name);
  }
  if (place.tensors && *place.tensors != c.tensors.size()) {
    fail(c.name, "its parts hold " + std::to_string(c.tensors.size()) +
                     " tensors; split.tensors.count says " + std::to_string(*place.tensors));
  }
}

File::File(std::span<const std::byte> bytes, std::string name, bool headers_only)
    : contents_(std::make_unique<Contents>()) {
  Contents& c = *contents_;
  c.name = shown_path(name);
  Header header = read_header(bytes, c.name, headers_only);
  const SplitPlace place = split_place(header, c.name);
  if (place.count > 1) {
    fail(c.name, "is part of a split model (split.count = " + std::to_string(place.count) +
                     "), which must be opened by its path");
  }
  c.append(std::move(header), bytes.size(), c.name);
}

File::~File() = default;
File::File(File&&) noexcept = default;
File& File::operator=(File&&) noexcept = default;

const std::string& File::name() const { return contents_->name; }
std::uint32_t File::version() const { return contents_->version; }
std::uint64_t File::bytes() const { return contents_->bytes; }
std::size_t File::parts() const { return contents_->parts; }
std::uint64_t File::alignment() const { return contents_->alignment; }
std::span<const std::pair<std::string_view, Value>> File::metadata() const { return contents_->metadata; }
std::span<const Tensor> File::tensors() const { return contents_->tensors; }

const Value* File::find(std::string_view key) const {
  const auto at = contents_->keys.find(key);
  return at == contents_->keys.end() ? nullptr : &contents_->metadata[at->second].second;
}

const Tensor* File::tensor(std::string_view name) const {
  const auto at = contents_->tensor_index.find(name);
  return at == contents_->tensor_index.end() ? nullptr : &contents_->tensors[at->second];
}

template <class T>
T File::get(std::string_view key) const {
  const std::string what = "key '" + shown(key) + "'";
  const Value* value = find(key);
  if (value == nullptr) fail(name(), what + " is missing");
  const char* type = gguf::name(static_cast<ValueType>(value->index()));
  if constexpr (std::is_same_v<T, const Array*>) {
    if (const auto* array = std::get_if<Array>(value)) return array;
    fail(name(), what + " has type " + type + "; allowed is array");
  } else if constexpr (std::is_same_v<T, std::string_view> || std::is_same_v<T, bool>) {
    if (const T* exact = std::get_if<T>(value)) return *exact;
    fail(name(),
         what + " has type " + type + "; allowed is " + (std::is_same_v<T, bool> ? "bool" : "string"));
  } else if constexpr (std::is_floating_point_v<T>) {
    if (const auto* f = std::get_if<float>(value)) return static_cast<T>(*f);
    if (const auto* d = std::get_if<double>(value)) return static_cast<T>(*d);
    fail(name(), what + " has type " + type + "; allowed are f32 and f64");
  } else {
    const std::optional<Integer> i = integer(*value);
    if (!i) fail(name(), what + " has type " + type + "; allowed is an integer");
    using Limits = std::numeric_limits<T>;
    const auto most = static_cast<std::uint64_t>(Limits::max());
    if (i->negative ? (std::is_unsigned_v<T> || i->magnitude > most + 1) : i->magnitude > most) {
      fail(name(), what + " is " + (i->negative ? "-" : "") + std::to_string(i->magnitude) +
                       "; allowed are " + std::to_string(Limits::min()) + " to " +
                       std::to_string(Limits::max()));
    }
    return static_cast<T>(i->negative ? std::uint64_t{0} - i->magnitude : i->magnitude);
  }
}

template std::string_view File::get(std::string_view) const;
template bool File::get(std::string_view) const;
template float File::get(std::string_view) const;
template double File::get(std::string_view) const;
template std::int64_t File::get(std::string_view) const;
template std::uint64_t File::get(std::string_view) const;
template std::int32_t File::get(std::string_view) const;
template std::uint32_t File::get(std::string_view) const;
template const Array* File::get(std::string_view) const;

}  // namespace ladder::gguf
