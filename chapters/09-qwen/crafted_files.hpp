// GGUF files made by hand, field by field, good and bad: for the tests and as seeds of the fuzzer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "chapters/09-qwen/gguf.hpp"

namespace ladder::crafted {

using Bytes = std::vector<std::byte>;

/// The bytes of numbers and of strings with their length, one after another.
template <class... Items>
std::string raw(const Items&... items) {
  std::string out;
  const auto append = [&](const auto& item) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(item)>>) {
      out.append(reinterpret_cast<const char*>(&item), sizeof item);
    } else {
      const std::string_view text(item);
      const std::uint64_t length = text.size();
      out.append(reinterpret_cast<const char*>(&length), sizeof length);
      out.append(text);
    }
  };
  (append(items), ...);
  return out;
}

inline Bytes to_bytes(std::string_view text) {
  Bytes out(text.size());
  if (!text.empty()) std::memcpy(out.data(), text.data(), text.size());
  return out;
}

struct Key {
  std::string key;
  std::uint32_t type;
  std::string payload;
};

struct RawTensor {
  std::string name;
  std::vector<std::int64_t> ne;
  std::uint32_t type;
  std::uint64_t offset;
  std::optional<std::uint32_t> dimensions = {};  ///< in place of ne.size()
};

/// A file by its fields. Nothing is checked; what is not set follows from the rest.
struct RawFile {
  std::string magic = "GGUF";
  std::uint32_t version = 3;
  std::vector<Key> keys;
  std::vector<RawTensor> tensors;
  std::optional<std::int64_t> tensor_count = {}, key_count = {};
  std::uint64_t alignment = 32;
  std::size_t data_bytes = 0;
  std::string data = {};  ///< in place of data_bytes counted up from 0

  [[nodiscard]] std::string str() const {
    std::string out = magic + raw(version, tensor_count.value_or(static_cast<std::int64_t>(tensors.size())),
                                  key_count.value_or(static_cast<std::int64_t>(keys.size())));
    for (const Key& k : keys) out += raw(k.key, k.type) + k.payload;
    for (const RawTensor& t : tensors) {
      out += raw(t.name, t.dimensions.value_or(static_cast<std::uint32_t>(t.ne.size())));
      for (const std::int64_t n : t.ne) out += raw(n);
      out += raw(t.type, t.offset);
    }
    while (out.size() % alignment != 0) out += '\0';
    if (!data.empty()) return out + data;
    for (std::size_t i = 0; i < data_bytes; ++i) out += static_cast<char>(i);
    return out;
  }
};

/// A small file with a value of every kind and two tensors: 'a' F32 [8] and 'b' Q8_0 [32, 2].
inline RawFile good_file() {
  RawFile f;
  f.keys = {
      {"general.architecture", 8, raw("qwen2")},
      {"test.u8", 0, raw(std::uint8_t{200})},
      {"test.i8", 1, raw(std::int8_t{-100})},
      {"test.u16", 2, raw(std::uint16_t{60000})},
      {"test.i16", 3, raw(std::int16_t{-30000})},
      {"test.u32", 4, raw(std::uint32_t{4000000000u})},
      {"test.i32", 5, raw(std::int32_t{-2000000000})},
      {"test.f32", 6, raw(0.5f)},
      {"test.bool", 7, raw(std::uint8_t{1})},
      {"test.string", 8, raw("text")},
      {"test.numbers", 9,
       raw(std::uint32_t{5}, std::uint64_t{3}, std::int32_t{1}, std::int32_t{-2}, std::int32_t{3})},
      {"test.strings", 9, raw(std::uint32_t{8}, std::uint64_t{3}, "one", "", "three")},
      {"test.u64", 10, raw(std::uint64_t{18000000000000000000u})},
      {"test.i64", 11, raw(std::numeric_limits<std::int64_t>::min())},
      {"test.f64", 12, raw(-0.25)},
  };
  f.tensors = {{"a", {8}, 0, 0}, {"b", {32, 2}, 8, 32}};
  f.data_bytes = 32 + 96;  // b has 68 bytes, padded
  return f;
}

/// A file that must be refused, and a part of the message that says why.
struct BadFile {
  std::string name;
  Bytes bytes;
  std::string message;
};

inline std::vector<BadFile> bad_files() {
  std::vector<BadFile> files;
  const auto add = [&](std::string name, std::string message, auto breaks) {
    RawFile f = good_file();
    breaks(f);
    files.push_back({std::move(name), to_bytes(f.str()), std::move(message)});
  };
  const auto add_text = [&](std::string name, std::string message, auto breaks) {
    std::string text = good_file().str();
    breaks(text);
    files.push_back({std::move(name), to_bytes(text), std::move(message)});
  };
  const auto add_key = [&](std::string name, std::string message, Key key) {
    add(std::move(name), std::move(message), [&](RawFile& f) { f.keys.push_back(key); });
  };
  const auto add_tensor = [&](std::string name, std::string message, RawTensor tensor) {
    add(std::move(name), std::move(message), [&](RawFile& f) { f.tensors[1] = tensor; });
  };
  static constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  static constexpr std::uint64_t huge = std::numeric_limits<std::uint64_t>::max();

  // The first 24 bytes.
  add_text("empty", "is empty", [](std::string& t) { t.clear(); });
  add_text("magic_cut", "inside the magic number", [](std::string& t) { t.resize(3); });
  add("magic", "begins with 'GGML', allowed is 'GGUF'", [](RawFile& f) { f.magic = "GGML"; });
  add("magic_control", "begins with 'G\\x1b[m'", [](RawFile& f) { f.magic = "G\x1b[m"; });
  add_text("lfs_pointer", "Git LFS pointer",
           [](std::string& t) { t = "version https://git-lfs.github.com/spec/v1\n"; });
  add_text("version_cut", "inside the version", [](std::string& t) { t.resize(6); });
  add("version_0", "version 0; allowed are 2 and 3", [](RawFile& f) { f.version = 0; });
  add("version_1", "32-bit counts", [](RawFile& f) { f.version = 1; });
  add("version_4", "version 4; allowed are 2 and 3", [](RawFile& f) { f.version = 4; });
  add("big_endian", "endianness", [](RawFile& f) { f.version = 0x03000000; });
  add_text("counts_cut", "inside the number of metadata keys", [](std::string& t) { t.resize(20); });
  add("tensor_count_huge", "claims 9223372036854775807 tensors", [](RawFile& f) { f.tensor_count = most; });
  add("tensor_count_negative", "claims -1 tensors", [](RawFile& f) { f.tensor_count = -1; });
  add("tensor_count_4g", "claims 4294967296 tensors",
      [](RawFile& f) { f.tensor_count = std::int64_t{1} << 32; });
  add("key_count_huge", "claims 9223372036854775807 metadata keys", [](RawFile& f) { f.key_count = most; });
  add("key_count_negative", "claims -5 metadata keys", [](RawFile& f) { f.key_count = -5; });

  // Metadata.
  add("key_empty", "metadata key number 0 is empty", [](RawFile& f) { f.keys[0].key.clear(); });
  add("key_long", "metadata key number 15 has a length of 70000 bytes; allowed are up to 65535",
      [](RawFile& f) {
        f.keys.push_back({std::string(70000, 'k'), 4, raw(std::uint32_t{1})});
      });
  add("key_twice", "key 'test.u8' is there twice", [](RawFile& f) {
    f.keys.push_back({"test.u8", 0, raw(std::uint8_t{1})});
  });
  add_key("value_type", "key 'x' has the unknown type code 13; allowed are 0 to 12",
          {"x", 13, raw(std::uint64_t{0})});
  add_key("value_type_control", "key 'x\\x07\\x0a' has the unknown type code 4294967295",
          {"x\a\n", 0xffffffffu, raw(std::uint64_t{0})});
  add_key("bool_2", "key 'x' is a bool with the value 2; allowed are 0 and 1",
          {"x", 7, raw(std::uint8_t{2})});
  add_key("bools_2", "key 'x' has a bool other than 0 and 1",
          {"x", 9, raw(std::uint32_t{7}, std::uint64_t{2}, std::uint8_t{1}, std::uint8_t{2})});
  add_key("string_huge", "key 'x' has a length of 18446744073709551615 bytes", {"x", 8, raw(huge)});
  add_key("string_long", "truncated", {"x", 8, raw(std::uint64_t{1} << 29)});
  add_key("array_huge", "key 'x' claims 18446744073709551615 elements of type u32",
          {"x", 9, raw(std::uint32_t{4}, huge)});
  add_key("array_wraps",
          "key 'x' claims 4611686018427387905 elements of type u32",  // times 4 is 4 in 64 bits
          {"x", 9, raw(std::uint32_t{4}, (std::uint64_t{1} << 62) + 1)});
  add_key("array_strings_huge", "key 'x' claims 1000000 elements of type string, at least 8 bytes each",
          {"x", 9, raw(std::uint32_t{8}, std::uint64_t{1000000})});
  add_key("array_of_arrays", "key 'x' is an array of arrays",
          {"x", 9, raw(std::uint32_t{9}, std::uint64_t{0})});
  add_key("array_type", "an element of key 'x' has the unknown type code 99",
          {"x", 9, raw(std::uint32_t{99}, std::uint64_t{0})});
  add_text("metadata_cut_early", "claims 15 metadata keys, but 76 bytes are left",
           [](std::string& t) { t.resize(100); });
  add_text("metadata_cut", "inside key 'test.strings'",
           [](std::string& t) { t.resize(t.find("three") + 2); });
  add_key("alignment_type", "key 'general.alignment' has type u64; allowed is u32",
          {"general.alignment", 10, raw(std::uint64_t{32})});
  add_key("alignment_0", "key 'general.alignment' is 0; allowed are powers of two",
          {"general.alignment", 4, raw(std::uint32_t{0})});
  add_key("alignment_24", "key 'general.alignment' is 24; allowed are powers of two",
          {"general.alignment", 4, raw(std::uint32_t{24})});
  add_key("alignment_2g", "key 'general.alignment' is 2147483648; allowed are powers of two up to 1073741824",
          {"general.alignment", 4, raw(std::uint32_t{1} << 31)});

  // The tensor table.
  add_tensor("tensor_name_empty", "the name of tensor number 1 is empty", {"", {32, 2}, 8, 32});
  add_tensor("tensor_name_long", "the name of tensor number 1 has a length of 64 bytes; allowed are up to 63",
             {std::string(64, 'n'), {32, 2}, 8, 32});
  add_tensor("tensor_twice", "tensor 'a' is there twice", {"a", {32, 2}, 8, 32});
  add_tensor("dimensions_0", "tensor 'b' has 0 dimensions; allowed are 1 to 4", {"b", {}, 8, 32});
  add_tensor("dimensions_5", "tensor 'b' has 5 dimensions; allowed are 1 to 4",
             {"b", {32, 1, 1, 1, 1}, 8, 32});
  add_tensor("dimensions_huge", "tensor 'b' has 4294967295 dimensions", {"b", {32, 2}, 8, 32, 0xffffffffu});
  add_tensor("ne_0", "tensor 'b' has 0 elements on axis 1", {"b", {32, 0}, 8, 32});
  add_tensor("ne_negative", "tensor 'b' has -32 elements on axis 0", {"b", {-32, 2}, 8, 32});
  add_tensor("elements_overflow", "tensor 'b' has more than 2^63 - 1 elements",
             {"b", {std::int64_t{1} << 32, std::int64_t{1} << 31}, 8, 32});
  add_tensor("bytes_overflow", "tensor 'b' has more than 2^63 - 1 bytes",
             {"b", {std::int64_t{1} << 62}, 0, 32});
  add_tensor("end_overflow", "ends beyond 2^63 - 1 bytes", {"b", {32, 2}, 8, huge - 31});
  // The last byte is just below 2^63, the end of the padding is not.
  const std::uint64_t base = good_file().str().size() - good_file().data_bytes;
  add_tensor("padded_end_overflow", "ends beyond 2^63 - 1 bytes",
             {"b", {32, 2}, 8, (std::uint64_t{1} << 63) - 96 - base});
  add_tensor("type_iq2_xs",
             "tensor 'b' has type IQ2_XS (17), which is not supported; allowed are F32, F16, Q4_0",
             {"b", {256}, 17, 32});
  add_tensor("type_i32", "tensor 'b' has type I32 (26), which is not supported", {"b", {32}, 26, 32});
  add_tensor("type_removed", "tensor 'b' has type Q4_2 (4), which was removed from the format",
             {"b", {32}, 4, 32});
  add_tensor("type_unknown", "tensor 'b' has the unknown type 77", {"b", {32}, 77, 32});
  add_tensor("type_negative", "tensor 'b' has the unknown type 4294967295", {"b", {32}, 0xffffffffu, 32});
  add_tensor("row_not_blocks", "tensor 'b' has rows of 33 elements; type Q8_0 allows multiples of 32",
             {"b", {33, 2}, 8, 32});
  add_tensor("offset_not_aligned", "tensor 'b' has offset 36; allowed are multiples of the alignment, 32",
             {"b", {32, 2}, 8, 36});
  add_tensor("overlap", "tensors 'a' (32 bytes at offset 0) and 'b' (at offset 0) overlap",
             {"b", {32, 2}, 8, 0});
  add_tensor("offset_beyond", "truncated: the tensors end at byte", {"b", {32, 2}, 8, 1 << 20});
  add_text("tensor_table_cut", "inside tensor 'b'",
           [](std::string& t) { t.resize(t.find(raw("b", std::uint32_t{2})) + 20); });
  add_text("data_cut", "40 bytes are missing, from tensor 'b' on",
           [](std::string& t) { t.resize(t.size() - 28 - 40); });
  add_text("data_missing", "bytes are missing, from tensor 'a' on",
           [](std::string& t) { t.resize(t.size() - 128); });

  // Split files in memory.
  add_key("split_count", "is part of a split model", {"split.count", 2, raw(std::uint16_t{3})});
  add_key("split_count_huge", "split.count = 18446744073709551615", {"split.count", 10, raw(huge)});
  add_key("split_count_text", "key 'split.count' is not a non-negative integer",
          {"split.count", 8, raw("3")});
  add("split_no_beyond", "part split.no = 3 (from 0) of split.count = 3", [](RawFile& f) {
    f.keys.push_back({"split.count", 2, raw(std::uint16_t{3})});
    f.keys.push_back({"split.no", 2, raw(std::uint16_t{3})});
  });
  return files;
}

/// A model of one layer with d = 32, made to be broken: every key and tensor can be changed before it is
/// built.
struct TinyModel {
  struct Planned {
    std::string name;
    WeightType type;
    std::vector<std::int64_t> ne;
  };
  std::vector<std::pair<std::string, gguf::Value>> keys;
  std::vector<Planned> tensors;

  TinyModel() {
    const auto u32 = [](std::uint32_t v) { return gguf::Value(v); };
    keys = {{"general.architecture", std::string_view("qwen2")},
            {"qwen2.block_count", u32(1)},
            {"qwen2.context_length", u32(128)},
            {"qwen2.embedding_length", u32(32)},
            {"qwen2.feed_forward_length", u32(64)},
            {"qwen2.attention.head_count", u32(4)},
            {"qwen2.attention.head_count_kv", u32(2)},
            {"qwen2.rope.freq_base", 1e6f},
            {"qwen2.attention.layer_norm_rms_epsilon", 1e-6f}};
    const auto matrix = WeightType::q8_0, vector = WeightType::f32;
    tensors = {{"token_embd.weight", matrix, {32, 10}},   {"output_norm.weight", vector, {32}},
               {"blk.0.attn_norm.weight", vector, {32}},  {"blk.0.attn_q.weight", matrix, {32, 32}},
               {"blk.0.attn_q.bias", vector, {32}},       {"blk.0.attn_k.weight", matrix, {32, 16}},
               {"blk.0.attn_k.bias", vector, {16}},       {"blk.0.attn_v.weight", matrix, {32, 16}},
               {"blk.0.attn_v.bias", vector, {16}},       {"blk.0.attn_output.weight", matrix, {32, 32}},
               {"blk.0.ffn_norm.weight", vector, {32}},   {"blk.0.ffn_gate.weight", matrix, {32, 64}},
               {"blk.0.ffn_up.weight", matrix, {32, 64}}, {"blk.0.ffn_down.weight", matrix, {64, 32}}};
  }
  TinyModel& set(const std::string& key, gguf::Value value) {
    for (auto& [k, v] : keys) {
      if (k == key) {
        v = std::move(value);
        return *this;
      }
    }
    keys.emplace_back(key, std::move(value));
    return *this;
  }
  TinyModel& without_key(const std::string& key) {
    std::erase_if(keys, [&](const auto& k) { return k.first == key; });
    return *this;
  }
  TinyModel& without_tensor(const std::string& name) {
    std::erase_if(tensors, [&](const Planned& t) { return t.name == name; });
    return *this;
  }
  TinyModel& with_tensor(const std::string& name, WeightType type, std::vector<std::int64_t> ne) {
    without_tensor(name);
    tensors.push_back({name, type, std::move(ne)});
    return *this;
  }
  /// The header alone, for gguf::File with headers_only.
  [[nodiscard]] Bytes header() const {
    gguf::Writer out;
    for (const auto& [k, v] : keys) out.set(k, v);
    for (const Planned& t : tensors) out.add(t.name, t.type, t.ne, {});
    return out.header();
  }
};

}  // namespace ladder::crafted
