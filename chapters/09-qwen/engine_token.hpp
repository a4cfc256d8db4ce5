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
  /// that a token reads (0.5B Q4_0), and positions, of which each head has all to itself.
  static constexpr std::int64_t kMostBytes = 400'000'000;
  static constexpr int kMostPositions = 512;

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
        plan_((require(supported(model, matmul, context)),
               token_plan(types_of(model), shape(model, context), blocks_, shared_memory_limit()))) {
    std::vector<token::LayerWeights> table;
    for (const Layer& l : model.layers) {
      token::LayerWeights w{};
      const auto matrices = matrices_of(l);
      for (std::size_t m = 0; m < matrices.size(); ++m) {
        w.tiles[m] = matmul.tiles_of(matrices[m]);
        w.format[m] = static_cast<unsigned char>(token::format_of(matrices[m]->type));
      }
      w.bias[0] = matmul.floats_of(l.attn_q_bias);
      w.bias[1] = matmul.floats_of(l.attn_k_bias);
      w.bias[2] = matmul.floats_of(l.attn_v_bias);
      w.attn_norm = matmul.floats_of(l.attn_norm);
      w.ffn_norm = matmul.floats_of(l.ffn_norm);
      table.push_back(w);
    }
    layers_.upload(table);
    packets_.fill_bytes(0);
    TokenProgram& program = plan_.program;
    program.layers = layers_.data();
    program.head = matmul.tiles_of(model.output);
    program.rows = matmul.rows_of(model.token_embd);
    program.output_norm = matmul.floats_of(model.output_norm);
    program.cosines = memory.cosines, program.sines = memory.sines;
    program.keys = memory.keys, program.values = memory.values;
    program.packets = packets_.data();
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
    const auto tiled = [&](const gguf::Tensor* t) {
      return matmul.kernel(t, 1) == dispatch::Kernel::mmvq_tiles;
    };
    bool fits = tiled(model.output);
    for (const Layer& l : model.layers) {
      for (const gguf::Tensor* t : matrices_of(l)) fits = fits && tiled(t);
      fits = fits && l.attn_q_bias != nullptr && l.attn_k_bias != nullptr && l.attn_v_bias != nullptr;
    }
    if (!fits)
      return Status::error("token_kernel: all matrices must be decoded as tiles, and q, k and v have biases");
    return token_supported(types_of(model), shape(model, context), token_blocks(), device_info());
  }

  /// Tokens from `token` on, every other the largest logit's place before it. Does not synchronise.
  /// @param logits [vocabulary] after the last one, or null @param ids [tokens] what follows each, or null
  void queue(Launches& launches, std::int32_t token, int position, int tokens, float* logits,
             std::int32_t* ids, Stream& stream) {
    TokenProgram& program = plan_.program;
    program.first_token = token, program.position = position, program.tokens = tokens;
    program.logits = logits, program.ids = ids;
    launches({"token_kernel", {}, tokens, program.embedding}, stream,
             [&] { return launch_token(plan_, stream); });
    program.step += token_steps(program);
  }

 private:
  static std::array<const gguf::Tensor*, token::kMatrices> matrices_of(const Layer& l) {
    return {l.attn_q, l.attn_k, l.attn_v, l.attn_output, l.ffn_gate, l.ffn_up, l.ffn_down};
  }
  static TokenTypes types_of(const Model& model) {
    TokenTypes types{{}, model.output->type, model.token_embd->type};
    for (const Layer& l : model.layers) {
      std::array<WeightType, token::kMatrices> t{};
      std::ranges::transform(matrices_of(l), t.begin(), [](const gguf::Tensor* m) { return m->type; });
      types.layers.push_back(t);
    }
    return types;
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
  token::Plan plan_;
};

}  // namespace ladder::qwen
