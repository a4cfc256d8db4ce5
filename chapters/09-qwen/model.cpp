// The hyperparameters and tensors of a Qwen2 model, found and checked.
#include "chapters/09-qwen/model.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>

#include "chapters/09-qwen/quantize_model.hpp"
#include "harness/experiment/qwen_shapes.hpp"

namespace ladder::qwen {

namespace {

using gguf::File;
using gguf::FileError;
using gguf::shown;
using gguf::Tensor;

// Far above any model there is, and low enough that no product of them (the largest is the KV cache, 2 *
// layers * tokens * d * 4 bytes) comes near 2^63.
constexpr int kMaxLayers = 1 << 12;
constexpr int kMaxContext = 1 << 24;
constexpr int kMaxLength = 1 << 20;  // d
constexpr int kMaxFeedForward = 1 << 22;
constexpr int kMaxVocabulary = 1 << 24;

constexpr std::string_view kRopeScaling = "qwen2.rope.scaling.";

[[noreturn]] void fail(const File& file, const std::string& what) {
  throw FileError(file.name() + ": " + what);
}

/// An integer key with its allowed range.
int size(const File& file, std::string_view key, int most) {
  const auto value = file.get<std::int64_t>(key);
  if (value < 1 || value > most) {
    fail(file, "key '" + std::string(key) + "' is " + std::to_string(value) + "; allowed are 1 to " +
                   std::to_string(most));
  }
  return static_cast<int>(value);
}

/// A floating-point key in (above, most].
float real(const File& file, std::string_view key, double above, double most) {
  const auto value = file.get<double>(key);
  if (!(std::isfinite(value) && value > above && value <= most)) {
    char text[160];
    std::snprintf(text, sizeof text, "' is %g; allowed is above %g, up to %g", value, above, most);
    fail(file, "key '" + std::string(key) + text);
  }
  return static_cast<float>(value);
}

/// A key that some writers add, which must then agree with what follows from the others.
void same_if_there(const File& file, std::string_view key, int expected) {
  if (file.find(key) == nullptr) return;
  const auto value = file.get<std::int64_t>(key);
  if (value != expected) {
    fail(file, "key '" + std::string(key) + "' is " + std::to_string(value) +
                   "; allowed is the head's length, " + std::to_string(expected));
  }
}

std::optional<Yarn> rope_scaling(const File& file) {
  constexpr std::array<std::string_view, 4> understood = {"type", "factor", "original_context_length",
                                                          "finetuned"};
  for (const auto& [key, value] : file.metadata()) {
    if (!key.starts_with(kRopeScaling)) continue;
    if (std::find(understood.begin(), understood.end(), key.substr(kRopeScaling.size())) ==
        understood.end()) {
      fail(file, "key '" + shown(key) + "' is not understood; allowed behind '" + std::string(kRopeScaling) +
                     "' are type, factor, original_context_length, finetuned");
    }
  }
  const std::string prefix(kRopeScaling);
  const auto type = file.get_or<std::string_view>(prefix + "type", "none");
  if (type == "none") return std::nullopt;
  if (type != "yarn") {
    fail(file, "key '" + prefix + "type' is '" + shown(type) + "'; allowed are 'none' and 'yarn'");
  }
  return Yarn{.factor = real(file, prefix + "factor", 0, 1024),
              .original_context = size(file, prefix + "original_context_length", kMaxContext)};
}

Hyperparameters hyperparameters(const File& file) {
  const auto architecture = file.get<std::string_view>("general.architecture");
  if (architecture != "qwen2") {
    fail(file, "key 'general.architecture' is '" + shown(architecture) +
                   "'; allowed is 'qwen2' (Qwen2, Qwen2.5 and what is derived from them)");
  }
  Hyperparameters hp;
  hp.block_count = size(file, "qwen2.block_count", kMaxLayers);
  hp.context_length = size(file, "qwen2.context_length", kMaxContext);
  hp.embedding_length = size(file, "qwen2.embedding_length", kMaxLength);
  hp.feed_forward_length = size(file, "qwen2.feed_forward_length", kMaxFeedForward);
  hp.head_count = size(file, "qwen2.attention.head_count", hp.embedding_length);
  // docs/gguf.md: without the key there are as many key and value heads as query heads.
  constexpr std::string_view kv_key = "qwen2.attention.head_count_kv";
  hp.head_count_kv = file.find(kv_key) ? size(file, kv_key, hp.head_count) : hp.head_count;
  if (hp.embedding_length % hp.head_count != 0 || hp.head_dim() % 2 != 0) {
    fail(file, "key 'qwen2.attention.head_count' is " + std::to_string(hp.head_count) +
                   "; allowed are divisors of embedding_length, " + std::to_string(hp.embedding_length) +
                   ", that make heads of an even length");
  }
  if (hp.head_count % hp.head_count_kv != 0) {
    fail(file, "key 'qwen2.attention.head_count_kv' is " + std::to_string(hp.head_count_kv) +
                   "; allowed are divisors of head_count, " + std::to_string(hp.head_count));
  }
  same_if_there(file, "qwen2.attention.key_length", hp.head_dim());
  same_if_there(file, "qwen2.attention.value_length", hp.head_dim());
  same_if_there(file, "qwen2.rope.dimension_count", hp.head_dim());
  hp.rms_epsilon = real(file, "qwen2.attention.layer_norm_rms_epsilon", 0, 1);
  hp.rope_base = real(file, "qwen2.rope.freq_base", 1, 1e12);
  hp.yarn = rope_scaling(file);
  return hp;
}

/// "[896, 4864]".
std::string shape(const Tensor& t) {
  std::string text = "[";
  for (unsigned i = 0; i < t.dimensions; ++i) text += (i ? ", " : "") + std::to_string(t.ne[i]);
  return text + "]";
}

/// Finds tensors, checks their shapes, and counts them.
class Finder {
 public:
  explicit Finder(const File& file) : file_(file) {}
  /// A matrix of `rows` rows of `row_length` elements.
  const Tensor* matrix(const std::string& name, std::int64_t row_length, std::int64_t rows) {
    const Tensor* t = required(name);
    if (t->dimensions != 2 || t->ne[0] != row_length || t->ne[1] != rows) {
      fail(file_, "tensor '" + name + "' has shape " + shape(*t) + "; allowed is [" +
                      std::to_string(row_length) + ", " + std::to_string(rows) + "]");
    }
    return t;
  }
  /// A norm or a bias.
  const Tensor* vector(const std::string& name, std::int64_t length) {
    const Tensor* t = required(name);
    if (t->dimensions != 1 || t->ne[0] != length) {
      fail(file_,
           "tensor '" + name + "' has shape " + shape(*t) + "; allowed is [" + std::to_string(length) + "]");
    }
    if (t->type != WeightType::f32) {
      fail(file_, "tensor '" + name + "' has type " + gguf::type_name(t->type) + "; allowed is F32");
    }
    return t;
  }
  const Tensor* required(const std::string& name) {
    const Tensor* t = file_.tensor(name);
    if (t == nullptr) fail(file_, "tensor '" + name + "' is missing");
    ++found_;
    return t;
  }
  [[nodiscard]] std::size_t found() const { return found_; }

 private:
  const File& file_;
  std::size_t found_ = 0;
};

Layer find_layer(Finder& find, int layer, const Hyperparameters& hp) {
  const std::string p = "blk." + std::to_string(layer) + ".";
  const std::int64_t d = hp.embedding_length, kv = hp.kv_length(), ff = hp.feed_forward_length;
  return Layer{.attn_norm = find.vector(p + "attn_norm.weight", d),
               .attn_q = find.matrix(p + "attn_q.weight", d, d),
               .attn_k = find.matrix(p + "attn_k.weight", d, kv),
               .attn_v = find.matrix(p + "attn_v.weight", d, kv),
               .attn_output = find.matrix(p + "attn_output.weight", d, d),
               .ffn_norm = find.vector(p + "ffn_norm.weight", d),
               .ffn_gate = find.matrix(p + "ffn_gate.weight", d, ff),
               .ffn_up = find.matrix(p + "ffn_up.weight", d, ff),
               .ffn_down = find.matrix(p + "ffn_down.weight", ff, d),
               .attn_q_bias = find.vector(p + "attn_q.bias", d),
               .attn_k_bias = find.vector(p + "attn_k.bias", kv),
               .attn_v_bias = find.vector(p + "attn_v.bias", kv)};
}

/// The tensors that were not looked for would be part of the model's arithmetic: name one.
void refuse_unknown_tensors(const Model& m) {
  std::vector<const Tensor*> used = {m.token_embd, m.output_norm, m.output};
  for (const Layer& l : m.layers) {
    used.insert(used.end(), {l.attn_norm, l.attn_q, l.attn_k, l.attn_v, l.attn_output, l.ffn_norm, l.ffn_gate,
                             l.ffn_up, l.ffn_down, l.attn_q_bias, l.attn_k_bias, l.attn_v_bias});
  }
  std::sort(used.begin(), used.end());
  for (const Tensor& t : m.file->tensors()) {
    if (!std::binary_search(used.begin(), used.end(), &t)) {
      fail(*m.file, "tensor '" + shown(t.name) + "' is not one that a qwen2 model of " +
                        std::to_string(m.hp.block_count) + " layers has");
    }
  }
}

std::string size_label(const Model& m) {
  if (m.file->find("general.size_label") != nullptr) {
    return shown(m.file->get<std::string_view>("general.size_label"), 16);
  }
  for (const QwenSize& s : kQwenSizes) {
    if (s.layers == m.hp.block_count && s.d_model == m.hp.embedding_length) {
      std::string label = s.name;
      label.back() = 'B';
      return label;
    }
  }
  const auto parameters = static_cast<double>(m.parameters());
  char text[32];
  if (parameters >= 1e9) {
    std::snprintf(text, sizeof text, "%.1fB", parameters / 1e9);
  } else {
    std::snprintf(text, sizeof text, "%.1fM", parameters / 1e6);
  }
  return text;
}

std::string describe_file_type(const File& file) {
  if (file.find("general.file_type") != nullptr) {
    const auto code = file.get<std::uint32_t>("general.file_type");
    for (const FileType& t : file_types()) {
      if (t.code == code) return std::string(t.description);
    }
  }
  std::map<WeightType, int> matrices;
  for (const Tensor& t : file.tensors()) {
    if (t.dimensions > 1) ++matrices[t.type];
  }
  const auto commonest = std::max_element(matrices.begin(), matrices.end(),
                                          [](const auto& a, const auto& b) { return a.second < b.second; });
  return gguf::type_name(commonest->first);
}

}  // namespace

Model::Model(const File& from) : hp(hyperparameters(from)), file(&from) {
  // Before memory is taken for the layers: 12 tensors each, and two besides.
  const auto needed = 12 * static_cast<std::size_t>(hp.block_count) + 2;
  if (from.tensors().size() < needed) {
    fail(from, "has " + std::to_string(from.tensors().size()) + " tensors; allowed for " +
                   std::to_string(hp.block_count) + " layers are " + std::to_string(needed) + " or " +
                   std::to_string(needed + 1));
  }
  Finder find(from);
  const Tensor* embedding = find.required("token_embd.weight");
  if (embedding->dimensions != 2 || embedding->ne[0] != hp.embedding_length ||
      embedding->ne[1] > kMaxVocabulary) {
    fail(from, "tensor 'token_embd.weight' has shape " + shape(*embedding) + "; allowed is [" +
                   std::to_string(hp.embedding_length) + ", V] with V up to " +
                   std::to_string(kMaxVocabulary));
  }
  token_embd = embedding;
  hp.vocabulary = static_cast<int>(embedding->ne[1]);
  if (from.find("tokenizer.ggml.tokens") != nullptr) {
    const gguf::Array* tokens = from.get<const gguf::Array*>("tokenizer.ggml.tokens");
    if (tokens->count > static_cast<std::uint64_t>(hp.vocabulary)) {
      fail(from, "key 'tokenizer.ggml.tokens' has " + std::to_string(tokens->count) +
                     " tokens; allowed are up to the rows of token_embd.weight, " +
                     std::to_string(hp.vocabulary));
    }
  }
  output_norm = find.vector("output_norm.weight", hp.embedding_length);
  tied = from.tensor("output.weight") == nullptr;
  output = tied ? token_embd : find.matrix("output.weight", hp.embedding_length, hp.vocabulary);
  layers.reserve(static_cast<std::size_t>(hp.block_count));
  for (int i = 0; i < hp.block_count; ++i) layers.push_back(find_layer(find, i, hp));
  if (find.found() != from.tensors().size()) refuse_unknown_tensors(*this);

  name = from.find("general.name") != nullptr ? shown(from.get<std::string_view>("general.name"))
                                              : std::filesystem::path(from.name()).filename().string();
  size_label = qwen::size_label(*this);
  file_type = describe_file_type(from);
}

std::int64_t Model::parameters() const {
  std::int64_t sum = 0;
  for (const Tensor& t : file->tensors()) sum += t.elements();
  return sum;
}

std::int64_t Model::tensor_bytes() const {
  std::int64_t sum = 0;
  for (const Tensor& t : file->tensors()) sum += t.bytes;
  return sum;
}

std::int64_t Model::bytes_per_token() const {
  return tied ? tensor_bytes() : tensor_bytes() - token_embd->bytes + token_embd->bytes / token_embd->rows();
}

}  // namespace ladder::qwen
