// The engine on the device of the build: the GPU under nvcc, the emulator under the host compiler. Weights
// stay packed as the file has them; every operation is one launch, one after the other on one stream.
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... -c chapters/09-qwen/engine_device.cu, linked with the other
//        sources of this folder, which the host compiler compiles
#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "chapters/09-qwen/engine.hpp"
#include "harness/device/device.hpp"
#include "kernels/attention/attention_f32.cuh"
#include "kernels/elementwise/add_bias.cuh"
#include "kernels/elementwise/add_residual.cuh"
#include "kernels/elementwise/rms_norm.cuh"
#include "kernels/elementwise/rope_store.cuh"
#include "kernels/elementwise/swiglu.cuh"
#include "kernels/gemv/quant_f32_matmul.cuh"
#include "kernels/quant/dequantize.cuh"

namespace ladder::qwen {
namespace {

constexpr int kMostLogitsRows = 8;  ///< rows of logits that are on the device at once: a row is up to 608 KB

std::size_t product(std::int64_t a, std::int64_t b) {
  return static_cast<std::size_t>(a) * static_cast<std::size_t>(b);
}

/// Every tensor that a forward pass reads, once each (a tied output is the embedding).
std::vector<const gguf::Tensor*> used_tensors(const Model& model) {
  std::vector<const gguf::Tensor*> all = {model.token_embd, model.output_norm};
  if (!model.tied) all.push_back(model.output);
  for (const Layer& l : model.layers) {
    for (const gguf::Tensor* t :
         {l.attn_norm, l.attn_q, l.attn_k, l.attn_v, l.attn_q_bias, l.attn_k_bias, l.attn_v_bias,
          l.attn_output, l.ffn_norm, l.ffn_gate, l.ffn_up, l.ffn_down}) {
      all.push_back(t);
    }
  }
  return all;
}

/// Which kernels multiply, for people.
std::string kernels_of(const Model& model) {
  std::set<WeightType> types = {model.output->type};
  for (const Layer& l : model.layers) {
    for (const gguf::Tensor* t :
         {l.attn_q, l.attn_k, l.attn_v, l.attn_output, l.ffn_gate, l.ffn_up, l.ffn_down}) {
      types.insert(t->type);
    }
  }
  std::string names;
  for (const WeightType t : types) {
    names += names.empty() ? "" : ", ";
    names += t == WeightType::f32 ? "gemv_vec" : std::string(info(t).name) + "_f32_matmul";
  }
  return names;
}

/// @tparam KV element of the cache: __half or float
template <class KV>
class DeviceEngine final : public Engine {
 public:
  DeviceEngine(const Model& model, const EngineOptions& asked)
      : model_(model),
        options_(completed(asked, model.hp)),
        heads_{model.hp.head_count, model.hp.head_count_kv, model.hp.head_dim()} {
    check_fits();
    upload_weights();
    const Hyperparameters& hp = model_.hp;
    const std::int64_t rows = options_.batch, context = options_.context;
    ids_ = Buffer<std::int32_t>(static_cast<std::size_t>(rows), "token ids");
    x_ = floats(rows, hp.embedding_length, "residual stream");
    normed_ = floats(rows, hp.embedding_length, "normalised rows");
    q_ = floats(rows, heads_.q_length(), "queries");
    k_ = floats(rows, heads_.kv_length(), "new keys");
    v_ = floats(rows, heads_.kv_length(), "new values");
    mixed_ = floats(rows, heads_.q_length(), "attention output");
    added_ = floats(rows, hp.embedding_length, "residual to add");
    gate_ = floats(rows, hp.feed_forward_length, "gate");
    up_ = floats(rows, hp.feed_forward_length, "up");
    logits_ = floats(logits_rows(), hp.vocabulary, "logits");
    keys_ = Buffer<KV>(product(hp.block_count, context * heads_.kv_length()), "key cache");
    values_ = Buffer<KV>(product(hp.block_count, context * heads_.kv_length()), "value cache");
    upload_rotations();
    info_.executor = to_string(kDeviceExecutor);
    info_.device = device_info().name;
    info_.kernels = kernels_of(model_);
  }

  [[nodiscard]] const EngineInfo& info() const override { return info_; }
  [[nodiscard]] int context() const override { return options_.context; }
  [[nodiscard]] int position() const override { return position_; }

  void evaluate(std::span<const std::int32_t> tokens, std::span<float> logits) override {
    const auto vocabulary = static_cast<std::size_t>(model_.hp.vocabulary);
    check_evaluate(*this, model_.hp.vocabulary, tokens, logits.size());
    const bool every_row = logits.size() != vocabulary;  // with one token both are the same
    const auto n = static_cast<int>(tokens.size());
    for (int done = 0; done < n; done += options_.batch) {
      const int rows = std::min(options_.batch, n - done);
      forward(tokens.subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(rows)),
              position_ + done);
      const bool last = done + rows == n;
      if (!logits.empty() && every_row) {
        read_logits(0, rows, logits.subspan(static_cast<std::size_t>(done) * vocabulary));
      } else if (!logits.empty() && last) {
        read_logits(rows - 1, 1, logits);
      } else {
        stream_.synchronize();
      }
    }
    position_ += n;
  }

  void truncate(int position) override {
    check_truncate(*this, position);
    position_ = position;
  }

 private:
  static Buffer<float> floats(std::int64_t rows, std::int64_t length, const char* name) {
    return Buffer<float>(product(rows, length), name);
  }
  [[nodiscard]] int logits_rows() const { return std::min(options_.batch, kMostLogitsRows); }

  /// Throws DeviceError when weights, cache and work buffers are more than what is free.
  void check_fits() const {
    const Hyperparameters& hp = model_.hp;
    std::uint64_t weights = 0;
    for (const gguf::Tensor* t : used_tensors(model_)) weights += t->data.size();
    const std::uint64_t cache =
        2 * sizeof(KV) * product(hp.block_count, std::int64_t{options_.context} * heads_.kv_length());
    const std::int64_t row = 3LL * hp.embedding_length + 2LL * heads_.q_length() + 2LL * heads_.kv_length() +
                             2LL * hp.feed_forward_length;
    const std::uint64_t work = 4 * (product(options_.batch, row) + product(logits_rows(), hp.vocabulary) +
                                    product(options_.context, heads_.head_dim));
    const std::uint64_t needed = weights + cache + work, available = device_free_bytes();
    if (needed <= available) return;
    throw DeviceError("the model needs " + std::to_string(needed) + " bytes of device memory (weights " +
                      std::to_string(weights) + ", KV cache " + std::to_string(cache) + ", work " +
                      std::to_string(work) + "), and " + std::to_string(available) + " are free");
  }

  void upload_weights() {
    const std::vector<const gguf::Tensor*> tensors = used_tensors(model_);
    std::uint64_t total = 0, done = 0;
    for (const gguf::Tensor* t : tensors) total += t->data.size();
    for (const gguf::Tensor* t : tensors) {
      Buffer<unsigned char> packed(t->data.size(), "weights");
      packed.upload({reinterpret_cast<const unsigned char*>(t->data.data()), t->data.size()});
      weights_.emplace(t, std::move(packed));
      done += t->data.size();
      if (options_.on_progress) options_.on_progress(done, total);
    }
  }

  void upload_rotations() {
    const auto half = static_cast<std::size_t>(heads_.head_dim / 2);
    std::vector<float> cosines(static_cast<std::size_t>(options_.context) * half), sines(cosines.size());
    for (int p = 0; p < options_.context; ++p) {
      const std::size_t at = static_cast<std::size_t>(p) * half;
      rope_row(model_.hp, p, std::span(cosines).subspan(at, half), std::span(sines).subspan(at, half));
    }
    cosines_ = Buffer<float>(cosines.size(), "cosines");
    sines_ = Buffer<float>(sines.size(), "sines");
    cosines_.upload(cosines);
    sines_.upload(sines);
  }

  const unsigned char* bytes_of(const gguf::Tensor* t) const { return weights_.at(t).data(); }
  const float* floats_of(const gguf::Tensor* t) const { return reinterpret_cast<const float*>(bytes_of(t)); }

  /// out[rows][od] = acts[rows][id] . w[od][id]^T
  void multiply(const gguf::Tensor* w, const float* acts, float* out, int rows) {
    require(launch_f32_matmul(w->type, bytes_of(w), acts, out, {rows, w->rows(), w->row_length()}, stream_));
  }

  /// Queues a forward pass of up to `batch` tokens at positions first, first+1, ...; x_ then holds the last
  /// layer's rows.
  void forward(std::span<const std::int32_t> tokens, int first) {
    const Hyperparameters& hp = model_.hp;
    const int nt = static_cast<int>(tokens.size()), d = hp.embedding_length, ff = hp.feed_forward_length;
    ids_.upload(tokens);
    require(launch_embedding_rows(model_.token_embd->type, bytes_of(model_.token_embd), ids_.data(),
                                  x_.data(), nt, d, hp.vocabulary, stream_));
    for (std::size_t i = 0; i < model_.layers.size(); ++i) {
      const Layer& l = model_.layers[i];
      const std::size_t cache_at =
          product(static_cast<std::int64_t>(i), std::int64_t{options_.context} * heads_.kv_length());
      KV* keys = keys_.data() + cache_at;
      KV* values = values_.data() + cache_at;

      // ANCHOR: layer
      // 1. Attention: x += output . attention(rope(q), rope(k), v), all of norm(x).
      require(
          launch_rms_norm(x_.data(), floats_of(l.attn_norm), normed_.data(), nt, d, hp.rms_epsilon, stream_));
      multiply(l.attn_q, normed_.data(), q_.data(), nt);
      multiply(l.attn_k, normed_.data(), k_.data(), nt);
      multiply(l.attn_v, normed_.data(), v_.data(), nt);
      require(launch_add_bias(q_.data(), floats_of(l.attn_q_bias), nt, heads_.q_length(), stream_));
      require(launch_add_bias(k_.data(), floats_of(l.attn_k_bias), nt, heads_.kv_length(), stream_));
      require(launch_add_bias(v_.data(), floats_of(l.attn_v_bias), nt, heads_.kv_length(), stream_));
      require(launch_rope_store(q_.data(), k_.data(), v_.data(), cosines_.data(), sines_.data(), keys, values,
                                nt, first, heads_, stream_));
      require(launch_attention_f32<KV>(q_.data(), keys, values, mixed_.data(), nt, first, heads_, stream_));
      multiply(l.attn_output, mixed_.data(), added_.data(), nt);
      require(launch_add_residual(x_.data(), added_.data(), std::int64_t{nt} * d, stream_));

      // 2. Feed-forward: x += down . (silu(gate) * up), both of norm(x).
      require(
          launch_rms_norm(x_.data(), floats_of(l.ffn_norm), normed_.data(), nt, d, hp.rms_epsilon, stream_));
      multiply(l.ffn_gate, normed_.data(), gate_.data(), nt);
      multiply(l.ffn_up, normed_.data(), up_.data(), nt);
      require(launch_swiglu(gate_.data(), up_.data(), std::int64_t{nt} * ff, stream_));
      multiply(l.ffn_down, gate_.data(), added_.data(), nt);
      require(launch_add_residual(x_.data(), added_.data(), std::int64_t{nt} * d, stream_));
      // ANCHOR_END: layer
    }
  }

  /// Logits of rows r0 .. r0+rows-1 of x_, a few at a time. Synchronises.
  /// @param logits at least [rows][vocabulary]
  void read_logits(int r0, int rows, std::span<float> logits) {
    const Hyperparameters& hp = model_.hp;
    for (int done = 0; done < rows; done += logits_rows()) {
      const int now = std::min(logits_rows(), rows - done);
      const float* x = x_.data() + product(r0 + done, hp.embedding_length);
      require(launch_rms_norm(x, floats_of(model_.output_norm), normed_.data(), now, hp.embedding_length,
                              hp.rms_epsilon, stream_));
      multiply(model_.output, normed_.data(), logits_.data(), now);
      stream_.synchronize();
      logits_.download(logits.subspan(product(done, hp.vocabulary), product(now, hp.vocabulary)));
    }
  }

  const Model& model_;
  EngineOptions options_;
  HeadShape heads_;
  EngineInfo info_;
  int position_ = 0;
  Stream stream_;
  std::map<const gguf::Tensor*, Buffer<unsigned char>> weights_;      // packed as in the file
  Buffer<float> cosines_, sines_;                                     // [context][head_dim/2]
  Buffer<KV> keys_, values_;                                          // [layer][context][kv_heads][head_dim]
  Buffer<std::int32_t> ids_;                                          // [batch]
  Buffer<float> x_, normed_, q_, k_, v_, mixed_, added_, gate_, up_;  // [batch][...]
  Buffer<float> logits_;                                              // [logits_rows][vocabulary]
};

}  // namespace

std::unique_ptr<Engine> make_device_engine(const Model& model, const EngineOptions& options) {
  if (!device_present()) throw DeviceError("no CUDA device, or no driver for one");
  if (options.kv_f16) return std::make_unique<DeviceEngine<__half>>(model, options);
  return std::make_unique<DeviceEngine<float>>(model, options);
}

const char* device_executor() { return to_string(kDeviceExecutor); }

bool device_present() { return device_count() > 0; }

}  // namespace ladder::qwen
