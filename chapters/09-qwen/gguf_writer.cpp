// The writer of GGUF files, version 3: metadata, tensor table, padding, tensors.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "chapters/09-qwen/gguf.hpp"

namespace ladder::gguf {

namespace {

constexpr std::uint32_t kVersion = 3;

using Bytes = std::vector<std::byte>;

void put(Bytes& out, const void* from, std::size_t count) {
  const std::size_t at = out.size();
  out.resize(at + count);
  if (count > 0) std::memcpy(out.data() + at, from, count);
}
template <class T>
requires std::is_arithmetic_v<T>
void put(Bytes& out, T value) { put(out, &value, sizeof value); }
void put(Bytes& out, std::string_view text) {
  put(out, static_cast<std::uint64_t>(text.size()));
  put(out, text.data(), text.size());
}
void put(Bytes& out, ValueType type) { put(out, static_cast<std::uint32_t>(type)); }

/// A value as it stands in a file, without its type.
Bytes payload(const Value& value) {
  Bytes out;
  std::visit(
      [&](const auto& v) {
        using V = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<V, Array>) {
          if (v.element == ValueType::array)
            throw std::invalid_argument("arrays of arrays cannot be written");
          put(out, v.element);
          put(out, v.count);
          if (v.element == ValueType::string) {
            if (v.strings.size() != v.count)
              throw std::invalid_argument("an array's count is not its number of strings");
            for (const std::string_view s : v.strings) put(out, s);
          } else {
            put(out, v.bytes.data(), v.bytes.size());
          }
        } else if constexpr (std::is_same_v<V, bool>) {
          put(out, static_cast<std::uint8_t>(v));
        } else {
          put(out, v);
        }
      },
      value);
  return out;
}

/// A file that is being written beside `path`, and takes its name when it is whole. If that never happens it
/// is removed.
class PendingFile {
 public:
  explicit PendingFile(const std::filesystem::path& path) : path_(path) {
    struct stat status {};
    if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
      throw FileError(path.string() +
                      ": is there and is not a regular file; allowed is a new name or a regular file");
    }
    // Another process, or one that was killed, may have left a file of the same name.
    for (int attempt = 0; descriptor_ < 0 && attempt < 100; ++attempt) {
      pending_ = path.string() + ".part" + std::to_string(::getpid()) + "-" + std::to_string(attempt);
      descriptor_ = ::open(pending_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (descriptor_ < 0 && errno != EEXIST) break;
    }
    if (descriptor_ < 0) fail("cannot be written", errno);
  }
  ~PendingFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (!finished_) ::unlink(pending_.c_str());
  }
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;

  void write(std::span<const std::byte> bytes) {
    constexpr std::size_t most = std::size_t{1} << 30;  // the system takes no more than 2 GiB in one call
    while (!bytes.empty()) {
      const ssize_t count = ::write(descriptor_, bytes.data(), std::min(bytes.size(), most));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0)
        fail("cannot be written beyond byte " + std::to_string(written_), count < 0 ? errno : EIO);
      written_ += static_cast<std::uint64_t>(count);
      bytes = bytes.subspan(static_cast<std::size_t>(count));
    }
  }
  void finish() {
    // The data must reach the disk before the name does, or a crash could leave a whole name on half a file.
    if (::fsync(descriptor_) != 0) fail("cannot be written", errno);
    if (::close(std::exchange(descriptor_, -1)) != 0) fail("cannot be written", errno);
    if (::rename(pending_.c_str(), path_.c_str()) != 0) fail("cannot be given its name", errno);
    finished_ = true;
  }
  [[nodiscard]] std::uint64_t written() const { return written_; }

 private:
  [[noreturn]] void fail(const std::string& what, int error) const {
    throw FileError(path_.string() + ": " + what + ": " + std::strerror(error));
  }
  std::filesystem::path path_;
  std::string pending_;
  int descriptor_ = -1;
  std::uint64_t written_ = 0;
  bool finished_ = false;
};

}  // namespace

struct Writer::Contents {
  struct Entry {
    std::string key;
    ValueType type;
    Bytes payload;
  };
  struct Planned {
    std::string name;
    WeightType type;
    std::vector<std::int64_t> ne;
    std::uint64_t bytes;
    std::function<void(std::span<std::byte>)> produce;
  };
  std::uint64_t alignment;
  std::vector<Entry> metadata;
  std::vector<Planned> tensors;
  std::unordered_map<std::string, std::size_t> keys, names;

  void set(std::string key, ValueType type, Bytes payload) {
    if (key.empty() || key.size() > 65535) {
      throw std::invalid_argument("a metadata key has " + std::to_string(key.size()) +
                                  " bytes; allowed are 1 to 65535");
    }
    const auto [at, fresh] = keys.emplace(key, metadata.size());
    if (fresh) {
      metadata.push_back({std::move(key), type, std::move(payload)});
    } else {
      metadata[at->second].type = type;
      metadata[at->second].payload = std::move(payload);
    }
  }
  [[nodiscard]] std::uint64_t padding(std::uint64_t size) const {
    return (alignment - size % alignment) % alignment;
  }

  [[nodiscard]] Bytes header() const {
    Bytes out;
    put(out, "GGUF", 4);
    put(out, kVersion);
    put(out, static_cast<std::uint64_t>(tensors.size()));
    put(out, static_cast<std::uint64_t>(metadata.size()));
    for (const Entry& e : metadata) {
      put(out, std::string_view(e.key));
      put(out, e.type);
      put(out, e.payload.data(), e.payload.size());
    }
    std::uint64_t offset = 0;
    for (const Planned& t : tensors) {
      put(out, std::string_view(t.name));
      put(out, static_cast<std::uint32_t>(t.ne.size()));
      for (const std::int64_t n : t.ne) put(out, n);
      put(out, ggml_type(t.type));
      put(out, offset);
      offset += t.bytes + padding(t.bytes);
    }
    out.resize(out.size() + padding(out.size()));
    return out;
  }
};

Writer::Writer(std::uint64_t alignment) : contents_(std::make_unique<Contents>()) {
  if (!std::has_single_bit(alignment) || alignment > (1u << 30)) {
    throw std::invalid_argument("alignment " + std::to_string(alignment) +
                                "; allowed are powers of two up to 2^30");
  }
  contents_->alignment = alignment;
  if (alignment != 32) set("general.alignment", static_cast<std::uint32_t>(alignment));
}

Writer::~Writer() = default;

void Writer::set(std::string key, Value value) {
  const auto type = static_cast<ValueType>(value.index());
  if (key == "general.alignment" &&
      (type != ValueType::u32 || std::get<std::uint32_t>(value) != contents_->alignment)) {
    throw std::invalid_argument("general.alignment comes from the writer's constructor");
  }
  contents_->set(std::move(key), type, payload(value));
}

void Writer::set_strings(std::string key, std::vector<std::string> strings) {
  Bytes out;
  put(out, ValueType::string);
  put(out, static_cast<std::uint64_t>(strings.size()));
  for (const std::string& s : strings) put(out, std::string_view(s));
  contents_->set(std::move(key), ValueType::array, std::move(out));
}

void Writer::copy_metadata(const File& from) {
  for (const auto& [key, value] : from.metadata()) {
    if (key == "general.alignment" || key.starts_with("split.")) continue;
    set(std::string(key), value);
  }
}

void Writer::add(std::string name, WeightType type, std::vector<std::int64_t> ne,
                 std::function<void(std::span<std::byte>)> produce) {
  const std::string what = "tensor '" + shown(name) + "'";
  if (name.empty() || name.size() > 63) {
    throw std::invalid_argument(what + " has a name of " + std::to_string(name.size()) +
                                " bytes; allowed are 1 to 63");
  }
  if (ne.empty() || ne.size() > 4) {
    throw std::invalid_argument(what + " has " + std::to_string(ne.size()) +
                                " dimensions; allowed are 1 to 4");
  }
  std::int64_t rows = 1;
  bool fits = ne[0] >= 1;
  for (std::size_t i = 1; i < ne.size(); ++i) {
    if (ne[i] < 1 || __builtin_mul_overflow(rows, ne[i], &rows)) fits = false;
  }
  const std::optional<std::int64_t> bytes = fits ? tensor_bytes(type, ne[0], rows) : std::nullopt;
  if (!bytes) {
    throw std::invalid_argument(
        what + " has an impossible shape; allowed are positive numbers, the first a multiple of " +
        std::to_string(info(type).block_elems) + " for type " + type_name(type));
  }
  if (!contents_->names.emplace(name, contents_->tensors.size()).second) {
    throw std::invalid_argument(what + " is added twice");
  }
  contents_->tensors.push_back(
      {std::move(name), type, std::move(ne), static_cast<std::uint64_t>(*bytes), std::move(produce)});
}

std::vector<std::byte> Writer::header() const { return contents_->header(); }

void Writer::write(const std::filesystem::path& path,
                   const std::function<void(std::uint64_t, std::uint64_t)>& progress) const {
  const Bytes header = contents_->header();
  std::uint64_t total = header.size(), largest = 0;
  for (const Contents::Planned& t : contents_->tensors) {
    const std::uint64_t padded = t.bytes + contents_->padding(t.bytes);
    if (padded > std::numeric_limits<std::int64_t>::max() - total) {
      throw std::invalid_argument("the tensors are more than 2^63 - 1 bytes");
    }
    total += padded;
    largest = std::max(largest, padded);
  }
  PendingFile file(path);
  // One buffer for all tensors. Not cleared: it can be large, and `produce` fills it.
  std::unique_ptr<std::byte[]> buffer(new (std::nothrow) std::byte[largest]);
  if (!buffer) {
    throw FileError(path.string() + ": no memory for its largest tensor, " + std::to_string(largest) +
                    " bytes");
  }
  file.write(header);
  for (const Contents::Planned& t : contents_->tensors) {
    const std::uint64_t padded = t.bytes + contents_->padding(t.bytes);
    t.produce({buffer.get(), static_cast<std::size_t>(t.bytes)});
    std::fill(buffer.get() + t.bytes, buffer.get() + padded, std::byte{0});
    file.write({buffer.get(), static_cast<std::size_t>(padded)});
    if (progress) progress(file.written(), total);
  }
  file.finish();
}

}  // namespace ladder::gguf
