// Every matmul of every Qwen2.5 size. The only copy of these numbers; Python asks a chapter binary
// (--layers).
#pragma once

#include <array>
#include <cctype>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "harness/device/shape.hpp"

namespace ladder {

/// Dimensions of one model size, from the published configurations (config.json of Qwen/Qwen2.5-<size>).
struct QwenSize {
  const char* name;  ///< "0.5b"
  int d_model, layers, heads, kv_heads, d_ff, vocab;
  bool tied;  ///< the output head shares the embedding table
  constexpr int head_dim() const { return d_model / heads; }
  constexpr int d_kv() const { return kv_heads * head_dim(); }
};

inline constexpr std::array<QwenSize, 7> kQwenSizes = {{
    {"0.5b", 896, 24, 14, 2, 4864, 151936, true},
    {"1.5b", 1536, 28, 12, 2, 8960, 151936, true},
    {"3b", 2048, 36, 16, 2, 11008, 151936, true},
    {"7b", 3584, 28, 28, 4, 18944, 152064, false},
    {"14b", 5120, 48, 40, 8, 13824, 152064, false},
    {"32b", 5120, 64, 40, 8, 27648, 152064, false},
    {"72b", 8192, 80, 64, 8, 29568, 152064, false},
}};

/// A weight matrix of a model: out[nt][od] = acts[nt][id] . weights[od][id]^T.
struct QwenLayer {
  std::string name;  ///< "7b.ffn_down"
  long long od, id;
  int count;  ///< how often it occurs in the model (layers, or 1 for the output head)
};

/// The seven matmuls of a layer and the output head, in the order in which a forward pass meets them.
inline std::vector<QwenLayer> qwen_layers(const QwenSize& s) {
  const std::string p = std::string(s.name) + ".";
  return {
      {p + "attn_q", s.d_model, s.d_model, s.layers}, {p + "attn_k", s.d_kv(), s.d_model, s.layers},
      {p + "attn_v", s.d_kv(), s.d_model, s.layers},  {p + "attn_output", s.d_model, s.d_model, s.layers},
      {p + "ffn_gate", s.d_ff, s.d_model, s.layers},  {p + "ffn_up", s.d_ff, s.d_model, s.layers},
      {p + "ffn_down", s.d_model, s.d_ff, s.layers},  {p + "output", s.vocab, s.d_model, 1},
  };
}

inline std::vector<QwenLayer> all_qwen_layers() {
  std::vector<QwenLayer> all;
  for (const QwenSize& s : kQwenSizes) {
    for (QwenLayer& l : qwen_layers(s)) all.push_back(std::move(l));
  }
  return all;
}

/// Finds "7b.ffn_down"; letters may be of either case. Empty when there is no such layer.
inline std::optional<QwenLayer> find_qwen_layer(std::string_view name) {
  std::string lower;
  for (const char c : name) lower += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  for (QwenLayer& l : all_qwen_layers()) {
    if (l.name == lower) return l;
  }
  return std::nullopt;
}

}  // namespace ladder
