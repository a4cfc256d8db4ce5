// The engine on the device of the build: the GPU under nvcc, the emulator under the host compiler. Weights stay packed,
// in the forms that the kernels chosen for them take (device_matmul.cuh): tiles for most. Launches follow each other on
// one stream, each free to begin while the one before it ends; those of a single token, and of the last few numbers of rows,
// are recorded once and replayed.
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... -c chapters/09-qwen/engine_device.cu, linked with the other
//        sources of this folder, of which nvcc compiles matmul_*.cu too
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "chapters/09-qwen/bench.hpp"
#include "chapters/09-qwen/device_matmul.cuh"
#include "chapters/09-qwen/engine.hpp"
#include "chapters/09-qwen/engine_token.hpp"
#include "chapters/09-qwen/launches.cuh"
#include "harness/device/device.hpp"
#include "harness/experiment/fill.hpp"
#include "kernels/attention/attention_decode.cuh"
#include "kernels/attention/attention_f32.cuh"
#include "kernels/attention/attention_prefill.cuh"
#include "kernels/elementwise/argmax.cuh"
#include "kernels/elementwise/rms_norm.cuh"
#include "kernels/elementwise/rope_store.cuh"
#include "kernels/elementwise/sample.cuh"
#include "kernels/elementwise/set_step.cuh"
#include "kernels/elementwise/swiglu.cuh"
#include "kernels/gemv/gemv_fused.cuh"
#include "kernels/mmvq/mmvq_tiles.cuh"
#include "kernels/mmvq/tile_acts.cuh"
#include "kernels/mmvq/tiles.cuh"
#include "kernels/quant/dequantize.cuh"
#include "kernels/roofs/roof_read.cuh"

namespace ladder::qwen {
namespace {

constexpr int kMostLogitsRows =
    tile_acts::kMostTokens;  ///< logits that are on the device at once: a row is 608 KB
constexpr std::size_t kMostRecorded =
    4;  ///< recordings of passes of many rows, the last used of each number of rows

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

/// Which kernels multiply, for people: those of single tokens, then those of whole batches where they are others.
std::string kernels_of(const Model& model, const DeviceMatmul& matmul, int batch) {
  const auto at = [&](int nt) {
    std::map<std::string, std::set<WeightType>> types;  // of a kernel
    const auto add = [&](const gguf::Tensor* t, int rows) {
      const dispatch::Kernel k = matmul.kernel(t, rows);
      const std::string name = nt == 1 && matmul.fused(t) ? kFusedName
                               : k == dispatch::Kernel::f32_matmul
                                   ? dispatch::kernel_name(k, t->type, t->row_length())
                                   : dispatch::info(k).id;
      types[name].insert(t->type);
    };
    for (const Layer& l : model.layers) {
      for (const gguf::Tensor* t :
           {l.attn_q, l.attn_k, l.attn_v, l.attn_output, l.ffn_gate, l.ffn_up, l.ffn_down}) {
        add(t, nt);
      }
    }
    add(model.output, 1);
    std::string text;
    for (const auto& [kernel, of] : types) {
      std::string names;
      for (const WeightType t : of) names += (names.empty() ? "" : ", ") + std::string(info(t).name);
      const bool named =
          (kernel.starts_with("gemv_") && kernel != kFusedName) || kernel.ends_with("_f32_matmul");
      text += (text.empty() ? "" : "; ") + (named ? kernel : kernel + " of " + names);
    }
    return text;
  };
  const std::string one = at(1), many = at(batch);
  return one == many ? one : one + "; prompts: " + many;
}

/// @tparam KV element of the cache: __half or float
template <class KV>
class DeviceEngine final : public Engine {
 public:
  DeviceEngine(const Model& model, const EngineOptions& asked)
      : model_(model),
        options_(completed(asked, model.hp)),
        heads_{model.hp.head_count, model.hp.head_count_kv, model.hp.head_dim()},
        launches_(options_.switches.trace, make_device_read_probe),
        matmul_(model_, options_, logits_rows(), launches_) {
    fused_one_ = fused_one();
    check_fits();
    matmul_.upload(used_tensors(model_), stream_);
    matmul_.allocate();
    const Hyperparameters& hp = model_.hp;
    const std::int64_t rows = options_.batch, context = options_.context;
    step_ = Buffer<std::int32_t>(static_cast<std::size_t>(1 + rows), "position and token ids");
    x_ = floats(rows, hp.embedding_length, "residual stream");
    normed_ = floats(1, hp.embedding_length, "a normalised row");
    q_ = floats(rows, heads_.q_length(), "queries");
    k_ = floats(rows, heads_.kv_length(), "new keys");
    v_ = floats(rows, heads_.kv_length(), "new values");
    mixed_ = floats(rows, heads_.q_length(), "attention output");
    gate_ = floats(rows, hp.feed_forward_length, "gate");
    up_ = floats(rows, hp.feed_forward_length, "up");
    planes_ = Buffer<unsigned char>(tile_acts::bytes(1, longest_row()), "int8 activations of a token");
    row_planes_ = Buffer<unsigned char>(tile_acts::bytes(1, hp.embedding_length), "residual stream as int8");
    squares_ =
        Buffer<float>(static_cast<std::size_t>(hp.embedding_length / kQ8ActsPerBlock + 1), "sums of squares");
    logits_ = floats(logits_rows(), hp.vocabulary, "logits");
    row_ = HostBuffer<float>(static_cast<std::size_t>(hp.vocabulary));
    if (one_launch_attends()) {
      attention_ =
          attention_decode_plan(heads_, options_.context, multiprocessor_count(), most_cluster_blocks());
      workspace_ =
          Buffer<unsigned char>(attention_decode_workspace(heads_, attention_), "pieces of attention");
      workspace_.fill_bytes(0);
    }
    keys_ = Buffer<KV>(product(hp.block_count, context * heads_.kv_length()), "key cache");
    values_ = Buffer<KV>(product(hp.block_count, context * heads_.kv_length()), "value cache");
    upload_rotations();
    info_.executor = to_string(kDeviceExecutor);
    info_.device = device_info().name;
    info_.kernels = kernels_of(model_, matmul_, options_.batch);
    if constexpr (std::is_same_v<KV, __half>) {
      whole_ = WholeToken::chosen(model_, matmul_, options_,
                                  {cosines_.data(), sines_.data(), keys_.data(), values_.data()});
    }
    if (whole_) {
      info_.kernels += "; whole tokens: token_kernel, 1 launch a token";
      info_.kernels_per_token = 1;
    }
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
      if (rows == 1 && whole_ && whole_->takes(position_ + done, 1)) {
        const bool read = !logits.empty() && (every_row || done + 1 == n);
        whole_->queue(launches_, tokens[static_cast<std::size_t>(done)], position_ + done, 1,
                      read ? row_.data() : nullptr, nullptr, stream_);
        finish();
        if (read) copy_row(every_row ? logits.subspan(static_cast<std::size_t>(done) * vocabulary) : logits);
        continue;
      }
      set_step(tokens.subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(rows)),
               position_ + done);
      reach_ = attention_decode_reach(attention_, position_ + done);
      const bool last = done + rows == n, wanted = !logits.empty() && (every_row || last);
      if (wanted && rows == 1) {
        decode(every_row ? logits.subspan(static_cast<std::size_t>(done) * vocabulary) : logits);
        continue;
      }
      pass(rows);
      if (wanted && every_row) {
        read_logits(0, rows, logits.subspan(static_cast<std::size_t>(done) * vocabulary));
      } else if (wanted) {
        read_logits(rows - 1, 1, logits);
      } else {
        finish();
      }
    }
    position_ += n;
  }

  [[nodiscard]] bool can_follow(const Drawing& drawing) override {
    const auto vocabulary = model_.hp.vocabulary;
    if (drawing.sample && !sample_supported(*drawing.sample, 1, vocabulary).ok()) return false;
    if (drawn_.size() == 0) {
      drawn_ = HostBuffer<std::int32_t>(static_cast<std::size_t>(options_.context) + 1);
      argmax_state_ = Buffer<unsigned char>(argmax_workspace(1), "the largest logit so far");
      argmax_state_.fill_bytes(0);
      bias_ = Buffer<float>(static_cast<std::size_t>(vocabulary), "what is added to logits");
    }
    if (drawing.sample && sample_state_.size() == 0) {
      sample_state_ = Buffer<unsigned char>(sample_workspace(1), "the most probable tokens so far");
      sample_state_.fill_bytes(0);
    }
    if (drawing.sample != sample_) followed_ = {};  // recorded with the options of the draw
    sample_ = drawing.sample;
    biased_ = !drawing.bias.empty();
    if (!biased_) {
      bias_.fill_bytes(0);
    } else {
      bias_.upload(drawing.bias);
    }
    return true;
  }

  void follow(std::int32_t token, std::span<std::int32_t> drawn) override {
    check_follow(*this, model_.hp.vocabulary, token, drawn.size());
    if (whole_ && !biased_ && !sample_ && whole_->takes(position_, static_cast<int>(drawn.size()))) {
      std::int32_t* const to = drawn_.data() + position_ + 1;
      whole_->queue(launches_, token, position_, static_cast<int>(drawn.size()), nullptr, to, stream_);
      finish();
      std::copy_n(to, drawn.size(), drawn.data());
      position_ += static_cast<int>(drawn.size());
      return;
    }
    set_step(std::span(&token, 1), position_);
    for (std::size_t i = 0; i < drawn.size(); ++i) {
      // Behind the token before, whose choice it finds on the device.
      reach_ = attention_decode_reach(attention_, position_ + static_cast<int>(i));
      queue_again(followed_[static_cast<std::size_t>(reach_)], 0,
                  [this] { queue_token(logits_.data(), true); });
      if (!launches_.replay()) finish();
    }
    finish();
    const auto first = static_cast<std::size_t>(position_) + 1;
    std::copy_n(drawn_.data() + first, drawn.size(), drawn.data());
    position_ += static_cast<int>(drawn.size());
  }

  [[nodiscard]] std::span<float> logits_room() override { return {row_.data(), row_.size()}; }

  void truncate(int position) override {
    check_truncate(*this, position);
    position_ = position;
  }

 private:
  /// The launches of a token, which are the same for every token.
  struct Again {
    int launches = 0;  // 0 before the first time
    std::optional<Graph> recorded;
  };
  static Buffer<float> floats(std::int64_t rows, std::int64_t length, const char* name) {
    return Buffer<float>(product(rows, length), name);
  }
  [[nodiscard]] int logits_rows() const { return std::min(options_.batch, kMostLogitsRows); }
  [[nodiscard]] int longest_row() const {
    return std::max({model_.hp.embedding_length, model_.hp.feed_forward_length, heads_.q_length()});
  }

  /// Whether a matrix is multiplied as tiles for a single token.
  [[nodiscard]] bool tiled(const gguf::Tensor* t) const {
    return matmul_.kernel(t, 1) == dispatch::Kernel::mmvq_tiles;
  }
  /// Whether the kernel for one token takes these heads; others rotate, store and attend in two launches.
  [[nodiscard]] bool one_launch_attends() const { return attention_decode_supported<KV>(heads_).ok(); }
  /// Whether launches for one token are the fused ones: all matrices tiles, or multiplied with f32 activations.
  [[nodiscard]] bool fused_one() const {
    const auto other = [this](const gguf::Tensor* t) {
      const dispatch::Kernel k = matmul_.kernel(t, 1);
      return k != dispatch::Kernel::mmvq_tiles && k != dispatch::Kernel::f32_matmul;
    };
    for (const Layer& l : model_.layers) {
      for (const gguf::Tensor* t :
           {l.attn_q, l.attn_k, l.attn_v, l.attn_output, l.ffn_gate, l.ffn_up, l.ffn_down}) {
        if (other(t)) return false;
      }
    }
    return !other(model_.output);
  }
  static Shape shape_of(const gguf::Tensor* t) { return DeviceMatmul::shape_of(t); }

  /// Throws DeviceError when weights, cache and work buffers are more than what is free.
  void check_fits() const {
    const Hyperparameters& hp = model_.hp;
    std::uint64_t weights = 0, loading = 0;
    for (const gguf::Tensor* t : used_tensors(model_)) {
      weights += matmul_.bytes(t);
      loading = std::max(loading, matmul_.loading_bytes(t));
    }
    const std::uint64_t context = static_cast<std::uint64_t>(options_.context);
    const std::uint64_t cached_token = 2 * sizeof(KV) * product(hp.block_count, heads_.kv_length()),
                        rotated_token = 4 * static_cast<std::uint64_t>(heads_.head_dim);
    const std::uint64_t cache = context * cached_token;
    const std::int64_t row = hp.embedding_length + 2LL * heads_.q_length() + 2LL * heads_.kv_length() +
                             2LL * hp.feed_forward_length;
    const std::uint64_t work = 4 * (product(options_.batch, row) + product(logits_rows(), hp.vocabulary)) +
                               context * rotated_token + 4 * static_cast<std::uint64_t>(hp.vocabulary) +
                               tile_acts::bytes(1, longest_row()) + matmul_.work_bytes();
    const std::uint64_t needed = weights + loading + cache + work, available = device_free_bytes();
    if (needed <= available) return;
    const bool twice = model_.tied && matmul_.kept_twice(model_.token_embd);
    throw DeviceError("the model needs " + std::to_string(needed) + " bytes of device memory (weights " +
                      std::to_string(weights) + (twice ? " with the tied embedding in two forms" : "") +
                      ", loading them " + std::to_string(loading) + ", KV cache " + std::to_string(cache) +
                      ", work " + std::to_string(work) + "), and " + std::to_string(available) + " are free" +
                      what_would_fit(available, needed - context * (cached_token + rotated_token),
                                     cached_token + rotated_token));
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

  const unsigned char* rows_of(const gguf::Tensor* t) const { return matmul_.rows_of(t); }
  const unsigned char* tiles_of(const gguf::Tensor* t) const { return matmul_.tiles_of(t); }
  const float* floats_of(const gguf::Tensor* t) const { return matmul_.floats_of(t); }
  [[nodiscard]] bool overlap() const { return launches_.overlap(); }

  /// One more launch is queued. @param launch returns its Status
  template <class F>
  void queue(const LaunchNote& note, F&& launch) {
    launches_(note, stream_, launch);
  }

  /// Position and token ids to device memory, where a replayed graph finds them.
  void set_step(std::span<const std::int32_t> tokens, int position) {
    if (tokens.size() <= kMostStepTokens) {
      queue({"set_step"}, [&] { return launch_set_step(step_.data(), position, tokens, stream_); });
      return;
    }
    std::vector<std::int32_t> step = {position};
    step.insert(step.end(), tokens.begin(), tokens.end());
    step_.upload(step);
  }
  const std::int32_t* first_position() const { return step_.data(); }
  const std::int32_t* token_ids() const { return step_.data() + 1; }

  /// Queues a forward pass of the tokens of the step; x_ then holds the last layer's rows. Launches have the same arguments
  /// at every position. So a pass of a number of rows goes launch by launch at first, which also loads the kernels, and is
  /// recorded when that number comes again, and replayed from then on; a full batch is expected to come again, and is
  /// recorded while the device works on the first one.
  void pass(int nt) {
    if (nt == 1 && fused_one_) {
      forward_one();
      return;
    }
    if (options_.switches.no_cuda_graph || !launches_.replay() || nt <= tile_acts::kMostTokens) {
      forward(nt);
      return;
    }
    const auto [at, is_new] = passes_.try_emplace(nt);
    if (is_new) {
      forward(nt);
      if (nt == options_.batch) at->second = record([&] { forward(nt); });
      if (passes_.size() > kMostRecorded)
        passes_.erase(passes_.begin()->first != nt ? passes_.begin() : std::next(at));
      return;
    }
    if (!at->second) at->second = record([&] { forward(nt); });
    at->second->launch(stream_);
  }

  /// Launches recorded instead of run.
  template <class F>
  Graph record(F&& queue_all) {
    return Graph::capture(stream_, [&](Stream&) -> Status {
      try {
        queue_all();
      } catch (const DeviceError& e) {  // a recording has to be ended before anyone is told
        return Status::error(e.what());
      }
      return {};
    });
  }

  void look_up(int nt) {
    queue({"embedding_rows", {}, nt, model_.hp.embedding_length}, [&] {
      return launch_embedding_rows(model_.token_embd->type, rows_of(model_.token_embd), token_ids(),
                                   x_.data(), nt, model_.hp.embedding_length, model_.hp.vocabulary, stream_);
    });
  }

  /// Any number of tokens, with whatever kernels the dispatch function chooses.
  void forward(int nt) {
    look_up(nt);
    for (std::size_t i = 0; i < model_.layers.size(); ++i) {
      const Layer& l = model_.layers[i];
      const std::size_t cache_at =
          product(static_cast<std::int64_t>(i), std::int64_t{options_.context} * heads_.kv_length());
      KV* keys = keys_.data() + cache_at;
      KV* values = values_.data() + cache_at;

      // ANCHOR: layer
      // 1. Attention: x += output . attention(rope(q), rope(k), v), all of norm(x).
      const Product qkv[] = {{l.attn_q, q_.data(), l.attn_q_bias},
                             {l.attn_k, k_.data(), l.attn_k_bias},
                             {l.attn_v, v_.data(), l.attn_v_bias}};
      matmul_.multiply(qkv, {x_.data(), l.attn_norm}, nt, stream_);
      attend(keys, values, nt);
      const Product output = {l.attn_output, x_.data(), nullptr, true};
      matmul_.multiply({&output, 1}, {mixed_.data()}, nt, stream_);

      // 2. Feed-forward: x += down . (silu(gate) * up), both of norm(x).
      const bool gated = matmul_.swiglu(l.ffn_gate, l.ffn_up, l.ffn_down, {x_.data(), l.ffn_norm},
                                        gate_.data(), up_.data(), nt, stream_);
      const Product down = {l.ffn_down, x_.data(), nullptr, true};
      matmul_.multiply({&down, 1}, {gate_.data(), nullptr, gated}, nt, stream_);
      // ANCHOR_END: layer
    }
  }

  /// Rotates and stores the keys and values of nt tokens, then attends: q_, k_, v_ to mixed_.
  void attend(KV* keys, KV* values, int nt) {
    queue({"rope_store", {}, nt, heads_.q_length()}, [&] {
      return launch_rope_store(q_.data(), k_.data(), v_.data(), cosines_.data(), sines_.data(), keys, values,
                               nt, first_position(), heads_, stream_, overlap());
    });
    if constexpr (std::is_same_v<KV, __half>) {
      if (nt > 1 && attention_prefill_supported(heads_).ok()) {
        queue({"attention_prefill", {}, nt, heads_.q_length()}, [&] {
          return launch_attention_prefill(q_.data(), keys, values, mixed_.data(), nt, first_position(),
                                          heads_, stream_, overlap());
        });
        return;
      }
    }
    queue({"attention_f32", {}, nt, heads_.q_length()}, [&] {
      return launch_attention_f32<KV>(q_.data(), keys, values, mixed_.data(), nt, first_position(), heads_,
                                      stream_, overlap());
    });
  }

  // One token: five launches a layer. What a launch needs as int8, the launch before it has made; float weights take rows as
  // they are.

  /// The residual stream as int8, whose normalisation is still to come: what the launch before has left of x_.
  [[nodiscard]] MmvqActs row_acts() const {
    return {row_planes_.data(), squares_.data(), model_.hp.rms_epsilon};
  }
  /// Where a launch leaves it. @param norm the next normalisation; null where nobody needs int8
  MmvqPlanes row_planes(const gguf::Tensor* norm) {
    if (norm == nullptr) return {};
    return {row_planes_.data(), floats_of(norm), squares_.data()};
  }
  /// Leaves it where the launch that has made x_ did not.
  void make_row_planes(const gguf::Tensor* norm) {
    if (norm == nullptr) return;
    const std::int64_t id = model_.hp.embedding_length;
    queue({"unnormalised_tile_acts", {}, 1, id}, [&] {
      return tile_acts::launch_unnormalised(x_.data(), floats_of(norm), row_planes_.data(), squares_.data(),
                                            id, stream_, overlap());
    });
  }
  /// The normalisation of what these matrices are multiplied with, if one of them takes int8.
  const gguf::Tensor* for_int8(const gguf::Tensor* norm,
                               std::initializer_list<const gguf::Tensor*> matrices) const {
    return std::any_of(matrices.begin(), matrices.end(), [this](const gguf::Tensor* t) { return tiled(t); })
               ? norm
               : nullptr;
  }

  /// Products of one token, all with the same activations: a launch for each type of tiles, or for two that go together, and
  /// for each of float weights, one after the other where there are several; others take `row`, normalised if `norm` is
  /// given, one by one.
  /// @param also as launch_mmvq_tiles has it
  void multiply_one(std::span<const Product> products, const MmvqActs& acts, const float* row,
                    const gguf::Tensor* norm, const MmvqPlanes& also = {}) {
    const auto id = static_cast<int>(products[0].weights->row_length());
    std::set<WeightType> done;
    bool normed = false;
    if (multiply_two_types(products, acts, id)) return;
    for (const Product& p : products) {
      const WeightType type = p.weights->type;
      const bool tiles = tiled(p.weights);
      if (!tiles && !matmul_.fused(p.weights)) {
        if (norm != nullptr && !normed) {
          queue({"rms_norm", {}, 1, id}, [&] {
            return launch_rms_norm(row, floats_of(norm), normed_.data(), 1, id, model_.hp.rms_epsilon,
                                   stream_, overlap());
          });
          normed = true;
        }
        matmul_.multiply_floats(p, norm != nullptr ? normed_.data() : row, 1, stream_);
        continue;
      }
      if (!done.insert(type).second) continue;
      std::vector<MmvqPart> of_tiles;
      std::vector<FusedPart> of_rows;
      LaunchNote note =
          tiles ? matmul_.note(matmul_.gate(p.weights, 1), {}, 1) : matmul_.fused_note({{p.weights}});
      std::size_t n = 0;
      for (const Product& q : products) {
        if (q.weights->type != type || !(tiles ? tiled(q.weights) : matmul_.fused(q.weights))) continue;
        note.weights[n++] = q.weights;
        if (tiles) {
          of_tiles.push_back({tiles_of(q.weights), q.out, static_cast<int>(q.weights->rows()),
                              floats_of(q.bias), q.add ? q.out : nullptr});
        } else {
          of_rows.push_back(matmul_.fused_part(q));
        }
      }
      queue(note, [&] {
        return tiles ? launch_mmvq_tiles(type, of_tiles, acts, 1, id, stream_, overlap(), also)
                     : launch_gemv_fused(type, of_rows, fused_acts(row, norm), id, stream_, overlap());
      });
    }
  }
  /// Products of one token with tiles of two types in one launch, if there is one for them: those of the first type and the
  /// others. A trace has a launch for each type.
  bool multiply_two_types(std::span<const Product> products, const MmvqActs& acts, int id) {
    const WeightType first = products[0].weights->type;
    std::vector<MmvqPart> of_first, of_other;
    WeightType other = first;
    for (const Product& p : products) {
      if (!tiled(p.weights)) return false;
      const WeightType type = p.weights->type;
      if (type != first && other != first && type != other) return false;
      if (type != first) other = type;
      (type == first ? of_first : of_other)
          .push_back({tiles_of(p.weights), p.out, static_cast<int>(p.weights->rows()), floats_of(p.bias),
                      p.add ? p.out : nullptr});
    }
    if (!overlap() || !mmvq_tiles_two_supported(first, other)) return false;
    queue({"mmvq_tiles_two"}, [&] {
      return launch_mmvq_tiles_two(first, of_first, other, of_other, acts, id, stream_, overlap());
    });
    return true;
  }
  /// What float weights are multiplied with, normalised if `norm` is given.
  [[nodiscard]] FusedActs fused_acts(const float* row, const gguf::Tensor* norm) const {
    return {row, floats_of(norm), model_.hp.rms_epsilon};
  }

  /// Queues a forward pass of one token, whose step is set; x_ then holds the last layer's row.
  void forward_one() {
    look_up(1);
    const Layer& first = model_.layers[0];
    make_row_planes(for_int8(first.attn_norm, {first.attn_q, first.attn_k, first.attn_v}));
    for (std::size_t i = 0; i < model_.layers.size(); ++i) {
      const Layer& l = model_.layers[i];
      const std::size_t cache_at =
          product(static_cast<std::int64_t>(i), std::int64_t{options_.context} * heads_.kv_length());
      KV* keys = keys_.data() + cache_at;
      KV* values = values_.data() + cache_at;
      const gguf::Tensor* next_norm = for_int8(model_.output_norm, {model_.output});
      if (i + 1 < model_.layers.size()) {
        const Layer& after = model_.layers[i + 1];
        next_norm = for_int8(after.attn_norm, {after.attn_q, after.attn_k, after.attn_v});
      }

      // ANCHOR: layer_of_one
      // 1. Attention: x += output . attention(rope(q), rope(k), v), all of norm(x).
      const Product qkv[] = {{l.attn_q, q_.data(), l.attn_q_bias},
                             {l.attn_k, k_.data(), l.attn_k_bias},
                             {l.attn_v, v_.data(), l.attn_v_bias}};
      multiply_one(qkv, row_acts(), x_.data(), l.attn_norm);
      attend_one(keys, values, tiled(l.attn_output));
      add_to_row(l.attn_output, mixed_.data(), for_int8(l.ffn_norm, {l.ffn_gate, l.ffn_up}));

      // 2. Feed-forward: x += down . (silu(gate) * up), both of norm(x).
      swiglu_one(l);
      add_to_row(l.ffn_down, gate_.data(), next_norm);
      // ANCHOR_END: layer_of_one
    }
  }

  /// x_ += weights . acts, of planes_ for tiles, else of `acts`; and what row_planes() says of x_.
  void add_to_row(const gguf::Tensor* weights, const float* acts, const gguf::Tensor* norm) {
    const Product product = {weights, x_.data(), nullptr, true};
    multiply_one({&product, 1}, {planes_.data()}, acts, nullptr, row_planes(norm));
    if (!tiled(weights)) make_row_planes(norm);
  }

  /// Attention of one token to planes_ or to mixed_.
  void attend_one(KV* keys, KV* values, bool planes) {
    if (!one_launch_attends()) {
      attend(keys, values, 1);
      if (planes) quantize_one(mixed_.data(), heads_.q_length());
      return;
    }
    AttentionDecode<KV> a;
    a.q = q_.data(), a.k = k_.data(), a.v = v_.data();
    a.cosines = cosines_.data(), a.sines = sines_.data();
    a.keys = keys, a.values = values;
    a.position = first_position();
    a.out = planes ? nullptr : mixed_.data();
    a.planes = planes ? planes_.data() : nullptr;
    a.workspace = workspace_.data();
    a.shape = heads_, a.context = options_.context;
    a.early = true;  // the token's embedding was looked up by a launch that waited for all before it
    const AttentionDecodePlan plan = attention_decode_plan_of(attention_, reach_);
    queue({"attention_decode", {}, 1, heads_.q_length()},
          [&] { return launch_attention_decode(a, stream_, overlap(), plan); });
  }

  void quantize_one(const float* acts, std::int64_t id) {
    queue({"quantize_tile_acts", {}, 1, id}, [&] {
      return tile_acts::launch_quantize(acts, nullptr, 0.0f, planes_.data(), 1, id, stream_, overlap());
    });
  }

  /// silu(norm(x_) . gate^T) * (norm(x_) . up^T) of one token, to planes_ if `down` has tiles, else to gate_.
  void swiglu_one(const Layer& l) {
    const MmvqActs acts = row_acts();
    const bool planes = tiled(l.ffn_down);
    const bool together = l.ffn_gate->type == l.ffn_up->type;
    const auto od = static_cast<int>(l.ffn_gate->rows()), id = static_cast<int>(l.ffn_gate->row_length());
    if (together && matmul_.fused(l.ffn_gate)) {
      queue(matmul_.fused_note({{l.ffn_gate, l.ffn_up}}), [&] {
        return launch_gemv_fused_swiglu(l.ffn_gate->type, rows_of(l.ffn_gate), rows_of(l.ffn_up),
                                        fused_acts(x_.data(), l.ffn_norm), gate_.data(), od, id, stream_,
                                        overlap());
      });
      if (planes) quantize_one(gate_.data(), od);
      return;
    }
    if (!together || !tiled(l.ffn_gate)) {
      const Product both[] = {{l.ffn_gate, gate_.data()}, {l.ffn_up, up_.data()}};
      multiply_one(both, acts, x_.data(), l.ffn_norm);
      queue({"swiglu", {}, 1, od},
            [&] { return launch_swiglu(gate_.data(), up_.data(), od, stream_, overlap()); });
      if (planes) quantize_one(gate_.data(), od);
      return;
    }
    queue(matmul_.note(matmul_.gate(l.ffn_gate, 1), {{l.ffn_gate, l.ffn_up}}, 1), [&] {
      return launch_mmvq_tiles_swiglu(l.ffn_gate->type, tiles_of(l.ffn_gate), tiles_of(l.ffn_up), acts,
                                      planes ? nullptr : gate_.data(), planes ? planes_.data() : nullptr,
                                      {1, od, id}, stream_, overlap());
    });
  }

  /// Queues the logits of rows r0 .. r0+rows-1 of x_, at most logits_rows() of them.
  void queue_logits(int r0, int rows) {
    const Product output = {model_.output, logits_.data()};
    matmul_.multiply({&output, 1}, {x_.data() + product(r0, model_.hp.embedding_length), model_.output_norm},
                     rows, stream_);
  }

  /// One token, whose step is set, to its logits, in device memory or row_. @param draw and the token after it to the step
  void queue_token(float* logits, bool draw) {
    const Product output = {model_.output, logits};
    if (fused_one_) {
      forward_one();
      multiply_one({&output, 1}, row_acts(), x_.data(), model_.output_norm);
    } else {
      forward(1);
      matmul_.multiply({&output, 1}, {x_.data(), model_.output_norm}, 1, stream_);
    }
    if (!draw) return;
    if (sample_) {
      queue({"sample_token", {}, 1, model_.hp.vocabulary}, [&] {
        return launch_sample(logits, drawn_.data(), nullptr, *sample_, 1, model_.hp.vocabulary,
                             sample_state_.data(), stream_, overlap(), bias_.data(),
                             {step_.data(), drawn_.data()});
      });
      return;
    }
    queue({"argmax", {}, 1, model_.hp.vocabulary}, [&] {
      return launch_argmax(logits, drawn_.data(), 1, model_.hp.vocabulary, argmax_state_.data(), stream_,
                           overlap(), bias_.data(), {step_.data(), drawn_.data()});
    });
  }

  /// The same launches for every token: the first time one by one (which also loads the kernels), the second time
  /// recorded, and from then on replayed: a call for all of them.
  /// @param more launches for every token beside these
  template <class F>
  void queue_again(Again& again, int more, F&& queue_all) {
    if (again.launches == 0) {
      const int before = launches_.count();
      queue_all();
      again.launches = launches_.count() - before;
      if (info_.kernels_per_token > 0) return;
      info_.kernels_per_token = again.launches + more;
      info_.kernels += "; " + std::to_string(info_.kernels_per_token) + " launches a token";
    } else if (options_.switches.no_cuda_graph || !launches_.replay()) {
      queue_all();
    } else {
      if (!again.recorded) again.recorded = record(queue_all);
      again.recorded->launch(stream_);
    }
  }

  /// One token, whose step is set, and its logits. Synchronises.
  void decode(std::span<float> logits) {
    queue_again(one_[static_cast<std::size_t>(reach_)], 1, [this] { queue_token(row_.data(), false); });
    finish();
    copy_row(logits);
  }
  /// A token's logits to where they are wanted, if that is elsewhere.
  void copy_row(std::span<float> logits) {
    if (logits.data() != row_.data()) std::copy(row_.data(), row_.data() + row_.size(), logits.data());
  }

  /// Waits for all that is queued.
  void finish() {
    stream_.synchronize();
    launches_.write_trace();
  }

  /// Logits of rows r0 .. r0+rows-1 of x_, a few at a time. Synchronises.
  /// @param logits at least [rows][vocabulary]
  void read_logits(int r0, int rows, std::span<float> logits) {
    for (int done = 0; done < rows; done += logits_rows()) {
      const int now = std::min(logits_rows(), rows - done);
      queue_logits(r0 + done, now);
      download_logits(now, logits.subspan(product(done, model_.hp.vocabulary)));
    }
  }
  void download_logits(int rows, std::span<float> logits) {
    finish();
    logits_.download(logits.first(product(rows, model_.hp.vocabulary)));
  }

  const Model& model_;
  EngineOptions options_;
  HeadShape heads_;
  EngineInfo info_;
  int position_ = 0;
  bool fused_one_ = false;
  Stream stream_;
  Launches launches_;
  DeviceMatmul matmul_;
  Buffer<float> cosines_, sines_;                    // [context][head_dim/2]
  Buffer<KV> keys_, values_;                         // [layer][context][kv_heads][head_dim]
  Buffer<std::int32_t> step_;                        // [1 + batch]: first position, token ids
  Buffer<float> x_, q_, k_, v_, mixed_, gate_, up_;  // [batch][...]
  Buffer<float> normed_;                             // of one token
  Buffer<unsigned char> planes_;                     // activations of one token as int8
  Buffer<unsigned char> row_planes_;                 // x_ of one token as int8, not normalised
  Buffer<float> squares_;                            // and sums of its squares, 32 each
  Buffer<unsigned char> workspace_;                  // of attention_decode
  Buffer<float> logits_;                             // [logits_rows][vocabulary]
  HostBuffer<float> row_;           // one token's logits, written by the kernel that computes them
  HostBuffer<std::int32_t> drawn_;  // [context + 1], by position: tokens of follow()
  Buffer<unsigned char> argmax_state_, sample_state_;
  Buffer<float> bias_;                   // [vocabulary] of follow()
  bool biased_ = false;                  // whether one of them is not 0
  std::optional<SampleOptions> sample_;  // of follow(); nothing: the largest logit
  std::optional<WholeToken> whole_;      // where single tokens are one launch
  // A token and its logits; and the token after it: of every reach.
  std::array<Again, kAttentionDecodeReaches> one_, followed_;
  AttentionDecodePlan attention_;               // of attention_decode
  int reach_ = 0;                               // attention_decode_reach() of the token that is queued
  std::map<int, std::optional<Graph>> passes_;  // by their number of rows: seen once, or recorded
};

}  // namespace

std::unique_ptr<Engine> make_device_engine(const Model& model, const EngineOptions& options) {
  if (!device_present()) throw DeviceError("no CUDA device, or no driver for one");
  if (options.kv_f16) return std::make_unique<DeviceEngine<__half>>(model, options);
  return std::make_unique<DeviceEngine<float>>(model, options);
}

std::function<double()> make_device_read_probe() {
  struct Probe {
    Stream stream;
    Timer timer;
    Buffer<float> words;
    int blocks;
  };
  constexpr int kLoads = 4, kBlocksPerSm = 64,
                kInARow = 4;  // a lone launch would also pay for its way to the device
  constexpr std::size_t kTile = stream_tile_bytes(kLoads);
  constexpr unsigned kSeed = 77;
  const std::size_t bytes = std::min(std::size_t{2} << 30, device_free_bytes() / 4) / kTile * kTile;
  auto probe = std::make_shared<Probe>();
  probe->words = Buffer<float>(bytes / sizeof(float), "read roof");
  probe->blocks = kBlocksPerSm * multiprocessor_count();
  const auto read = [probe](std::size_t some, unsigned* sum) {
    require(launch_roof_read(kLoads, reinterpret_cast<const uint4*>(probe->words.data()), some, sum,
                             probe->blocks, probe->stream));
  };
  fill(probe->words.data(), probe->words.size(), FillKind::uniform, kSeed, probe->stream);
  const std::size_t some =
      std::min(bytes, 37 * kTile);  // enough to see that what is timed reads what it should
  std::uint32_t expected = 0, got = 0;
  for (std::size_t i = 0; i < some / sizeof(float); ++i) {
    expected += std::bit_cast<std::uint32_t>(fill_value(FillKind::uniform, kSeed, i));
  }
  Buffer<unsigned> sum(1, "read roof sum");
  sum.fill_bytes(0);
  read(some, sum.data());
  probe->stream.synchronize();
  sum.download(std::span(&got, 1));
  if (got != expected) throw DeviceError("roof_read returned a wrong sum; no roof can be measured");
  return [probe, read, bytes] {
    probe->timer.start(probe->stream);
    for (int i = 0; i < kInARow; ++i) read(bytes, nullptr);
    probe->timer.stop(probe->stream);
    return static_cast<double>(bytes) * kInARow / probe->timer.elapsed_ns();
  };
}

const char* device_executor() { return to_string(kDeviceExecutor); }

bool device_present() { return device_count() > 0; }

DeviceInfo build_device() { return device_info(); }

}  // namespace ladder::qwen
