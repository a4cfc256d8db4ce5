// A Qwen2 or Qwen2.5 model as a GGUF file describes it: the hyperparameters and every tensor, checked. No
// weights are copied; everything points into the file's map.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "chapters/09-qwen/gguf.hpp"

namespace ladder::qwen {

/// YaRN: longer contexts by slower rotation (https://arxiv.org/abs/2309.00071), as Qwen2.5 uses it.
struct Yarn {
  float factor;
  int original_context;
};

/// Sizes and constants of a model. Names as in the file's metadata.
struct Hyperparameters {
  int block_count = 0;       ///< layers
  int context_length = 0;    ///< tokens
  int embedding_length = 0;  ///< d
  int feed_forward_length = 0;
  int head_count = 0, head_count_kv = 0;
  int vocabulary = 0;  ///< rows of the embedding; the logits' length
  float rms_epsilon = 0;
  float rope_base = 0;
  std::optional<Yarn> yarn;
  [[nodiscard]] int head_dim() const { return embedding_length / head_count; }
  [[nodiscard]] int kv_length() const { return head_count_kv * head_dim(); }
};

struct Layer {
  const gguf::Tensor *attn_norm, *attn_q, *attn_k, *attn_v, *attn_output, *ffn_norm, *ffn_gate, *ffn_up,
      *ffn_down;
  const gguf::Tensor *attn_q_bias, *attn_k_bias, *attn_v_bias;
};

/// A checked model. Throws gguf::FileError from the constructor: another architecture (named), a missing key
/// or tensor, a tensor of another shape (both shapes are said), norms or biases that are not F32.
class Model {
 public:
  explicit Model(const gguf::File& file);
  Hyperparameters hp;
  std::string name;  ///< general.name, or the file's name
  /// "0.5B", ...: general.size_label, or by the number of layers and d, or of parameters
  std::string size_label;
  std::string file_type;  ///< "Q4_K - Medium": by general.file_type, else by the commonest tensor type
  const gguf::Tensor* token_embd = nullptr;
  const gguf::Tensor* output_norm = nullptr;
  const gguf::Tensor* output = nullptr;  ///< token_embd when tied
  bool tied = false;
  std::vector<Layer> layers;
  const gguf::File* file = nullptr;
  [[nodiscard]] std::int64_t parameters() const;    ///< elements of all tensors of the file
  [[nodiscard]] std::int64_t tensor_bytes() const;  ///< bytes of all tensors of the file
  /// Bytes of weights that one decoded token reads: every tensor once, but of an untied token_embd one row
  /// only.
  [[nodiscard]] std::int64_t bytes_per_token() const;
};

}  // namespace ladder::qwen
