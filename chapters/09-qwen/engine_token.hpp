// The kernel of whole tokens as the engine uses it: for models that it takes, and where it is asked for or known to win.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "chapters/09-qwen/device_matmul.cuh"
#include "chapters/09-qwen/launches.cuh"
#include "chapters/09-qwen/model.hpp"
#include "harness/device/device.hpp"
#include "kernels/dispatch/dispatch.hpp"
#include "kernels/token/token_kernel.cuh"

namespace ladder::qwen {

class WholeToken {
 public:
  /// Where the kernel is used unasked, because it was measured to be faster than five launches a layer: bytes of weights
  /// that a token reads (0.5B Q4_0), and positions (128 behind 4096).
  static constexpr std::int64_t kMostBytes = 400'000'000;
  static constexpr int kMostPositions = 4096 + 128;

  /// What the engine owns and the kernel works on.
  struct Memory {
    const float *cosines, *sines;  // [context][head_dim / 2]
    __half *keys, *values;         // [layers][context][kv_heads][head_dim]
  };

  /// @param matmul with its weights uploaded. Throws DeviceError for a model that supported() refuses.
  WholeToken(const Model& model, const DeviceMatmul& matmul, int context, const Memory& memory)
      : blocks_(token_blocks()),
        layers_(model.layers.size(), "layers of the token kernel"),
        packets_(token_packets(shape(model, context).heads, model.hp.feed_forward_length, blocks_),
                 "packets of the token kernel"),
        layer_type_(model.layers[0].attn_q->type),
        head_type_(model.output->type),
        program_(shape(model, context)) {
    require(supported(model, matmul, context));
    std::vector<token::LayerWeights> table;
    for (const Layer& l : model.layers) {
      token::LayerWeights w{};
      const auto matrices = matrices_of(l);
      for (std::size_t m = 0; m < matrices.size(); ++m) w.tiles[m] = matmul.tiles_of(matrices[m]);
      w.bias[0] = matmul.floats_of(l.attn_q_bias);
      w.bias[1] = matmul.floats_of(l.attn_k_bias);
      w.bias[2] = matmul.floats_of(l.attn_v_bias);
      w.attn_norm = matmul.floats_of(l.attn_norm);
      w.ffn_norm = matmul.floats_of(l.ffn_norm);
      table.push_back(w);
    }
    layers_.upload(table);
    packets_.fill_bytes(0);
    program_.layers = layers_.data();
    program_.head = matmul.tiles_of(model.output);
    program_.rows = matmul.rows_of(model.token_embd);
    program_.output_norm = matmul.floats_of(model.output_norm);
    program_.cosines = memory.cosines, program_.sines = memory.sines;
    program_.keys = memory.keys, program_.values = memory.values;
    program_.packets = packets_.data();
  }

  /// The kernel for an engine's single tokens, or nothing where launches of parts of a token do them. Throws DeviceError
  /// where it is asked for and does not take the model.
  static std::optional<WholeToken> chosen(const Model& model, const DeviceMatmul& matmul,
                                          const EngineOptions& options, const Memory& memory) {
    const std::optional<bool> asked = options.switches.token_kernel;
    if (asked == false) return {};
    if (const Status s = supported(model, matmul, options.context); !s.ok()) {
      if (asked == true) throw DeviceError(s.message());
      return {};
    }
    // A trace is there to show the parts.
    if (!asked && (kDeviceExecutor != Executor::gpu || model.bytes_per_token() > kMostBytes ||
                   !options.switches.trace.empty()))
      return {};
    std::optional<WholeToken> whole(std::in_place, model, matmul, options.context, memory);
    whole->always_ = asked.has_value();
    return whole;
  }
  /// Whether it is to compute these tokens; launches of parts of a token do others.
  [[nodiscard]] bool takes(int position, int tokens) const {
    return always_ || position + tokens <= kMostPositions;
  }

  /// Whether the kernel computes this model's tokens here; the error says why not.
  static Status supported(const Model& model, const DeviceMatmul& matmul, int context) {
    const WeightType layers = model.layers[0].attn_q->type, head = model.output->type;
    const auto tiled = [&](const gguf::Tensor* t) {
      return matmul.kernel(t, 1) == dispatch::Kernel::mmvq_tiles;
    };
    bool fits = tiled(model.output) && model.token_embd->type == head;
    for (const Layer& l : model.layers) {
      for (const gguf::Tensor* t : matrices_of(l)) fits = fits && t->type == layers && tiled(t);
      fits = fits && l.attn_q_bias != nullptr && l.attn_k_bias != nullptr && l.attn_v_bias != nullptr;
    }
    if (!fits) {
      return Status::error(
          "token_kernel: all matrices of layers must be of one type and decoded as tiles, and the embedding "
          "of the "
          "head's type");
    }
    return token_supported(layers, head, shape(model, context), token_blocks(), device_info());
  }

  /// Tokens from `token` on, every other the largest logit's place before it. Does not synchronise.
  /// @param logits [vocabulary] after the last one, or null @param ids [tokens] what follows each, or null
  void queue(Launches& launches, std::int32_t token, int position, int tokens, float* logits,
             std::int32_t* ids, Stream& stream) {
    program_.first_token = token, program_.position = position, program_.tokens = tokens;
    program_.logits = logits, program_.ids = ids;
    launches({"token_kernel", {}, tokens, program_.embedding}, stream,
             [&] { return launch_token(layer_type_, head_type_, program_, blocks_, stream); });
    program_.step += token_steps(program_);
  }

 private:
  static std::array<const gguf::Tensor*, token::kMatrices> matrices_of(const Layer& l) {
    return {l.attn_q, l.attn_k, l.attn_v, l.attn_output, l.ffn_gate, l.ffn_up, l.ffn_down};
  }
  static TokenProgram shape(const Model& model, int context) {
    TokenProgram p;
    p.heads = {model.hp.head_count, model.hp.head_count_kv, model.hp.head_dim()};
    p.layer_count = model.hp.block_count, p.embedding = model.hp.embedding_length;
    p.feed_forward = model.hp.feed_forward_length, p.vocabulary = model.hp.vocabulary;
    p.context = context, p.epsilon = model.hp.rms_epsilon;
    return p;
  }

  bool always_ = false;
  int blocks_;
  Buffer<token::LayerWeights> layers_;
  Buffer<Packet> packets_;
  WeightType layer_type_, head_type_;
  TokenProgram program_;
};

}  // namespace ladder::qwen
