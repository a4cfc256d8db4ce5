// `qwen quantize`: a file of F32, F16, BF16 (or any other) tensors to one of other types, by llama.cpp's
// rules.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chapters/09-qwen/gguf.hpp"

namespace ladder::qwen {

/// A mixture of tensor types, named as llama.cpp names it, and its general.file_type.
struct FileType {
  std::string_view name;         ///< "Q4_K_M"
  std::string_view description;  ///< "Q4_K - Medium": as llama-bench prints it
  std::uint32_t code;            ///< general.file_type
  WeightType base;               ///< of most tensors
};
/// All mixtures that can be written, by code.
[[nodiscard]] std::span<const FileType> file_types();
/// By name, letter case ignored. nullptr if there is none.
[[nodiscard]] const FileType* find_file_type(std::string_view name);
/// "F32, F16, ...": for messages.
[[nodiscard]] std::string file_type_names();

/// What the choice of a tensor's type depends on besides the tensor.
struct MixtureModel {
  int layers;  ///< block_count
  int gqa;     ///< query heads that share a key and value head
  bool tied;   ///< token_embd is also the output
};

/// The type that llama.cpp's quantizer (without an importance matrix) wants for a tensor of a Qwen2 model,
/// whether or not the rows are whole blocks of it. All 1-D tensors, which are norms and biases, are F32. The
/// rules, restated: `llama_tensor_get_type_impl` in src/llama-quant.cpp of
/// https://github.com/ggml-org/llama.cpp, commit 007dbbf3.
/// @param tensor "blk.3.attn_v.weight"; @param ne0 row length
[[nodiscard]] WeightType wanted_type(const FileType& to, std::string_view tensor, std::int64_t ne0,
                                     unsigned dimensions, const MixtureModel& model);
/// The type that replaces one whose blocks do not divide a row: a nearby type of blocks of 32, else F16.
/// llama.cpp stops where this says F16 for a type of blocks of 32.
[[nodiscard]] WeightType fitting_type(WeightType wanted, std::int64_t ne0);
/// The layer of "blk.12.ffn_down.weight"; -1 for a tensor of no layer.
[[nodiscard]] int layer_of(std::string_view tensor);
/// fitting_type of wanted_type: the type that the tensor gets.
[[nodiscard]] WeightType tensor_type(const FileType& to, std::string_view tensor, std::int64_t ne0,
                                     unsigned dimensions, const MixtureModel& model);

struct QuantizeReport {
  std::uint64_t bytes_before = 0, bytes_after = 0;  ///< of all tensors
  std::vector<std::string> fallbacks;  ///< one line a tensor whose row length does not fit the type wanted
  std::vector<std::string>
      requantized;  ///< one line a tensor that was quantized before: errors of both add up
};
/// Writes the model with its tensors in the types of `type`; metadata are copied, but for general.file_type
/// and general.quantization_version. Rows are dequantized and quantized by themselves, so that the bytes do
/// not depend on `threads`. Throws gguf::FileError (not a Qwen2 model, a weight that is not finite or that
/// the type cannot hold, a full disk) and std::invalid_argument (threads < 0). The output appears only when
/// it is whole.
/// @param threads 0: one for each CPU
/// @param progress a bar on standard error
QuantizeReport quantize_model(const gguf::File& from, const std::filesystem::path& to, const FileType& type,
                              int threads, bool progress);

}  // namespace ladder::qwen
