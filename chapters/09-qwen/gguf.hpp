// GGUF: the container of models and tokenizers that llama.cpp defined. A reader on a memory map, split files
// included, and a writer. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "harness/experiment/weight_types.hpp"

namespace ladder::gguf {

/// A file that is not what it should be. One line: the file, the key or tensor, what is wrong, what is
/// allowed.
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Codes of metadata values, as they stand in the file.
enum class ValueType : std::uint32_t {
  u8 = 0,
  i8 = 1,
  u16 = 2,
  i16 = 3,
  u32 = 4,
  i32 = 5,
  f32 = 6,
  boolean = 7,
  string = 8,
  array = 9,
  u64 = 10,
  i64 = 11,
  f64 = 12,
};

/// An array of metadata. Numbers are kept as the file has them (little-endian, packed); strings are views
/// into the map.
struct Array {
  ValueType element{};
  std::uint64_t count = 0;
  std::span<const std::byte> bytes;       ///< numbers: count * size of element
  std::vector<std::string_view> strings;  ///< element == string: `count` of them
};

using Value =
    std::variant<std::uint8_t, std::int8_t, std::uint16_t, std::int16_t, std::uint32_t, std::int32_t, float,
                 bool, std::string_view, Array, std::uint64_t, std::int64_t, double>;

/// "u32", "string", ...: for messages.
[[nodiscard]] const char* name(ValueType type);
/// The name of a tensor type as ggml prints it: "Q4_K".
[[nodiscard]] std::string type_name(WeightType type);
/// Text of a file made fit for a message: control characters and bytes that are not ASCII become \xNN, and
/// what is longer than `limit` bytes is cut and ends in "...".
[[nodiscard]] std::string shown(std::string_view text, std::size_t limit = 64);

/// Code of a tensor type in a file -> the workbook's type; std::nullopt for types that the workbook has no
/// kernels for.
[[nodiscard]] std::optional<WeightType> weight_type(std::uint32_t ggml_type);
/// The code that stands for the type in a file.
[[nodiscard]] std::uint32_t ggml_type(WeightType type);

struct Tensor {
  std::string_view name;
  WeightType type{};
  unsigned dimensions = 0;                     ///< 1 to 4
  std::array<std::int64_t, 4> ne{1, 1, 1, 1};  ///< elements of each axis, ne[0] (a row's length) first
  std::uint64_t offset = 0;                    ///< in its part, from the start of the tensor data
  std::int64_t bytes = 0;                      ///< rows() * bytes of a row
  /// the tensor's bytes in the map: `bytes` of them, or none if headers_only
  std::span<const std::byte> data;
  [[nodiscard]] std::int64_t row_length() const { return ne[0]; }
  [[nodiscard]] std::int64_t rows() const { return ne[1] * ne[2] * ne[3]; }
  [[nodiscard]] std::int64_t elements() const { return ne[0] * rows(); }
};

/// A GGUF file, opened and checked. Everything that it hands out points into the map and lives as long as it
/// does. The file must not be cut shorter meanwhile: the system answers a read of pages that are gone with
/// SIGBUS.
class File {
 public:
  /// Opens a file, or all parts of a split one when `path` is its first part. Throws FileError; nothing is
  /// allocated for a count before the file is known to be long enough for it.
  /// @param headers_only tensors may lie beyond the end of the file (`data` is then empty): for a census of a
  ///        download in progress or of a header alone
  explicit File(const std::filesystem::path& path, bool headers_only = false);
  /// A file in memory (tests, the fuzzer). `name` stands for the path in messages. Split files are refused.
  File(std::span<const std::byte> bytes, std::string name, bool headers_only = false);
  ~File();
  File(File&&) noexcept;
  File& operator=(File&&) noexcept;

  [[nodiscard]] const std::string& name() const;  ///< path, for messages
  [[nodiscard]] std::uint32_t version() const;
  [[nodiscard]] std::uint64_t bytes() const;  ///< of all parts
  [[nodiscard]] std::size_t parts() const;
  [[nodiscard]] std::uint64_t alignment() const;

  /// Metadata in file order (of the first part).
  [[nodiscard]] std::span<const std::pair<std::string_view, Value>> metadata() const;
  [[nodiscard]] const Value* find(std::string_view key) const;
  /// The value as T: exact type for strings, bools and arrays; any integer that fits for integers; f32 or f64
  /// for floats. Throws FileError, naming the key, when it is missing or of another kind.
  template <class T>
  [[nodiscard]] T get(std::string_view key) const;
  /// As get, with `otherwise` for a missing key. Still an error for a key of another kind.
  template <class T>
  [[nodiscard]] T get_or(std::string_view key, T otherwise) const {
    return find(key) ? get<T>(key) : otherwise;
  }

  /// All tensors, of all parts, in file order.
  [[nodiscard]] std::span<const Tensor> tensors() const;
  [[nodiscard]] const Tensor* tensor(std::string_view name) const;

 private:
  struct Contents;
  std::unique_ptr<Contents> contents_;
};
// Instantiated in gguf.cpp: std::string_view, bool, float, double, std::int64_t, std::uint64_t, std::int32_t,
// std::uint32_t, const Array*.

/// Bytes of `rows` rows of `row_length` elements each. std::nullopt if a row is not whole blocks or the size
/// is beyond 2^63 - 1 bytes.
[[nodiscard]] std::optional<std::int64_t> tensor_bytes(WeightType type, std::int64_t row_length,
                                                       std::int64_t rows);

/// Writes a file: add metadata and tensors, then write(). The file appears under its name only when it is
/// whole (it is written beside it and renamed).
class Writer {
 public:
  explicit Writer(std::uint64_t alignment = 32);
  ~Writer();
  /// Values own their bytes here. A key that is there already is replaced in place. Throws
  /// std::invalid_argument.
  void set(std::string key, Value value);
  void set_strings(std::string key, std::vector<std::string> strings);
  /// Copies metadata of a file (all keys but general.alignment and split.*).
  void copy_metadata(const File& from);
  /// Declares a tensor; its bytes are asked for during write(), one tensor at a time.
  /// @param produce fills the span, of exactly the tensor's size
  void add(std::string name, WeightType type, std::vector<std::int64_t> ne,
           std::function<void(std::span<std::byte>)> produce);
  /// The file up to the bytes of its first tensor, padding included: what File reads with headers_only.
  [[nodiscard]] std::vector<std::byte> header() const;
  /// Throws FileError (with the system's reason, such as a full disk; nothing is left behind) and whatever
  /// `produce` throws. A device or directory of that name is refused, an old file is replaced at the end.
  /// @param progress called with bytes written and bytes in all; may be empty
  void write(const std::filesystem::path& path,
             const std::function<void(std::uint64_t, std::uint64_t)>& progress = {}) const;

 private:
  struct Contents;
  std::unique_ptr<Contents> contents_;
};

}  // namespace ladder::gguf
