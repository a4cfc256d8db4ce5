// `qwen quantize`: a file of F32, F16, BF16 (or any other) tensors to one of other types, by llama.cpp's rules.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chapters/09-qwen/gguf.hpp"

namespace ladder::qwen {

/// A mixture of tensor types, named as llama.cpp names it, and its general.file_type.
struct FileType {
  std::string_view name;         ///< "Q4_K_M"
  std::string_view description;  ///< "Q4_K - Medium": as llama-bench prints it
  std::uint32_t code;
  WeightType base;
};
[[nodiscard]] std::span<const FileType> file_types();
/// By name, letter case ignored. nullptr if there is none.
[[nodiscard]] const FileType* find_file_type(std::string_view name);

/// The type that a tensor gets in a file of this mixture. SPEC: norms, biases (all 1-D tensors) stay F32.
/// @param ne0 row length; @param layer of blk.N, layers in all; tied: token_embd is also the output
[[nodiscard]] WeightType tensor_type(const FileType& to, std::string_view tensor, std::int64_t ne0, unsigned dimensions,
                                     int layers, bool tied);

struct QuantizeReport {
  std::uint64_t bytes_before = 0, bytes_after = 0;
  std::vector<std::string> fallbacks;  ///< one line a tensor whose row length does not fit the type wanted
};
/// Throws gguf::FileError, std::invalid_argument. The output appears only when it is whole.
QuantizeReport quantize_model(const gguf::File& from, const std::filesystem::path& to, const FileType& type,
                              int threads, bool progress);

}  // namespace ladder::qwen
