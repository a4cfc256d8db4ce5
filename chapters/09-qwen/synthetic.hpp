// Models with random weights in the exact shapes and tensor types of Qwen2.5: what measurements need when the
// real weights cannot be had. They compute finite nonsense.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "chapters/09-qwen/gguf.hpp"
#include "chapters/09-qwen/model.hpp"
#include "chapters/09-qwen/quantize_model.hpp"

namespace ladder::qwen {

/// A tensor of a model yet to be written.
struct PlannedTensor {
  std::string name;
  WeightType type{};
  std::vector<std::int64_t> ne;  ///< row length first
};

/// The hyperparameters of "0.5b", ... "72b" (harness/experiment/qwen_shapes.hpp) or of the workbook's own
/// "tales"; letter case ignored. Throws std::invalid_argument, which lists the names.
[[nodiscard]] Hyperparameters size_by_name(std::string_view name);
/// Whether the published model of that size shares token_embd with the output. Throws as size_by_name.
[[nodiscard]] bool tied_by_name(std::string_view name);

/// All tensors of a model in llama.cpp's order of conversion, with the types that a file of mixture `type`
/// gives them.
[[nodiscard]] std::vector<PlannedTensor> plan(const Hyperparameters& hp, const FileType& type, bool tied);

/// Metadata and header of such a file, without tensors or vocabulary: what gguf::File reads with
/// headers_only.
[[nodiscard]] std::vector<std::byte> planned_header(const Hyperparameters& hp, const FileType& type,
                                                    bool tied, std::string_view name);

/// What write_synthetic writes.
struct SyntheticModel {
  std::string size;  ///< as size_by_name takes it
  const FileType* type = nullptr;
  /// Types of the layers' matrices, one for each layer; empty: as many layers as the size has, in the types of `type`.
  std::vector<WeightType> layers;
  bool tied = true;
  std::uint64_t seed = 0;  ///< the same seed gives the same bytes, whatever the number of threads
  const gguf::File* vocabulary =
      nullptr;            ///< tokenizer.* keys are copied from it; nullptr: a made-up vocabulary
  int threads = 0;        ///< 0: one for each CPU
  bool progress = false;  ///< a bar on standard error
};

/// Writes the file. Matrices have normally distributed weights of mean 0 and standard deviation 1 / sqrt(id),
/// norms are 1, biases small: activations stay of the order of 1. Blocks of weights repeat (a row is put
/// together from a pool of 2^20 weights), which no kernel can tell. The made-up vocabulary has the 256 bytes,
/// merges of two and three letters, <|endoftext|>, <|im_start|>, <|im_end|>, and unused tokens up to the
/// size's vocabulary. Throws std::invalid_argument (unknown size, no type, more tokens in `vocabulary` than
/// the size has rows) and gguf::FileError (the disk is full; nothing is left behind).
/// @return bytes of the file
std::uint64_t write_synthetic(const std::filesystem::path& path, const SyntheticModel& model);

}  // namespace ladder::qwen
