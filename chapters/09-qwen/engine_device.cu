// The engine on the device of the build: the GPU under nvcc, the emulator under the host compiler. Weights stay packed:
// those with blocks are put into tiles while they load, and multiplied with int8 activations; the others, and all with
// EngineOptions::exact, stay as the file has them and are multiplied with f32 activations. Launches follow each other on
// one stream, each free to begin while the one before it ends; those of a single token are recorded once and replayed.
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... -c chapters/09-qwen/engine_device.cu, linked with the other
//        sources of this folder, which the host compiler compiles
#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
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
#include "chapters/09-qwen/engine.hpp"
#include "harness/device/device.hpp"
#include "harness/experiment/fill.hpp"
#include "kernels/attention/attention_decode.cuh"
#include "kernels/attention/attention_f32.cuh"
#include "kernels/elementwise/add_bias.cuh"
#include "kernels/elementwise/add_residual.cuh"
#include "kernels/elementwise/rms_norm.cuh"
#include "kernels/elementwise/rope_store.cuh"
#include "kernels/elementwise/set_step.cuh"
#include "kernels/elementwise/swiglu.cuh"
#include "kernels/gemv/quant_f32_matmul.cuh"
#include "kernels/mmvq/mmvq_tiles.cuh"
#include "kernels/mmvq/tile_acts.cuh"
#include "kernels/mmvq/tiles.cuh"
#include "kernels/quant/dequantize.cuh"
#include "kernels/roofs/roof_read.cuh"

namespace ladder::qwen {
namespace {

constexpr bool kOverlap =
    true;  ///< launches may begin before the one before has ended: every kernel here waits
/// Weights that a launch asks for on behalf of the next one: what the memory delivers while one ends and the other begins.
constexpr std::size_t kAhead = 8U << 20;
constexpr int kMostLogitsRows =
    tile_acts::kMostTokens;  ///< logits that are on the device at once: a row is 608 KB

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
std::string kernels_of(const Model& model, bool exact) {
  std::set<WeightType> types = {model.output->type};
  for (const Layer& l : model.layers) {
    for (const gguf::Tensor* t :
         {l.attn_q, l.attn_k, l.attn_v, l.attn_output, l.ffn_gate, l.ffn_up, l.ffn_down}) {
      types.insert(t->type);
    }
  }
  std::string integers, floats;
  for (const WeightType t : types) {
    const bool tiled = tiles::has_tiles(t) && !exact;
    std::string& names = tiled ? integers : floats;
    names += names.empty() ? "" : ", ";
    names += tiled                  ? info(t).name
             : t == WeightType::f32 ? "gemv_vec"
                                    : std::string(info(t).name) + "_f32_matmul";
  }
  std::string text;
  if (!integers.empty()) text += integers + " x int8 (mmvq_tiles)";
  if (!floats.empty()) text += (text.empty() ? "" : "; ") + floats;
  return text;
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
    step_ = Buffer<std::int32_t>(static_cast<std::size_t>(1 + rows), "position and token ids");
    x_ = floats(rows, hp.embedding_length, "residual stream");
    normed_ = floats(rows, hp.embedding_length, "normalised rows");
    q_ = floats(rows, heads_.q_length(), "queries");
    k_ = floats(rows, heads_.kv_length(), "new keys");
    v_ = floats(rows, heads_.kv_length(), "new values");
    mixed_ = floats(rows, heads_.q_length(), "attention output");
    added_ = floats(rows, hp.embedding_length, "residual to add");
    gate_ = floats(rows, hp.feed_forward_length, "gate");
    up_ = floats(rows, hp.feed_forward_length, "up");
    planes_ = Buffer<unsigned char>(tile_acts::bytes(rows, longest_row()), "int8 activations");
    logits_ = floats(logits_rows(), hp.vocabulary, "logits");
    row_ = HostBuffer<float>(static_cast<std::size_t>(hp.vocabulary));
    if (one_launch_attends()) {
      workspace_ =
          Buffer<unsigned char>(attention_decode_workspace(heads_, options_.context, multiprocessor_count()),
                                "pieces of attention");
      workspace_.fill_bytes(0);
    }
    keys_ = Buffer<KV>(product(hp.block_count, context * heads_.kv_length()), "key cache");
    values_ = Buffer<KV>(product(hp.block_count, context * heads_.kv_length()), "value cache");
    upload_rotations();
    info_.executor = to_string(kDeviceExecutor);
    info_.device = device_info().name;
    info_.kernels = kernels_of(model_, options_.exact);
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
      set_step(tokens.subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(rows)),
               position_ + done);
      const bool last = done + rows == n, wanted = !logits.empty() && (every_row || last);
      if (wanted && rows == 1) {
        decode(every_row ? logits.subspan(static_cast<std::size_t>(done) * vocabulary) : logits);
        continue;
      }
      rows == 1 ? forward_one() : forward(rows);
      if (wanted && every_row) {
        read_logits(0, rows, logits.subspan(static_cast<std::size_t>(done) * vocabulary));
      } else if (wanted) {
        read_logits(rows - 1, 1, logits);
      } else {
        stream_.synchronize();
      }
    }
    position_ += n;
  }

  [[nodiscard]] std::span<float> logits_room() override { return {row_.data(), row_.size()}; }

  void truncate(int position) override {
    check_truncate(*this, position);
    position_ = position;
  }

 private:
  /// A weight matrix as it is kept: rows as in the file for float kernels and look-ups, or tiles for mmvq_tiles. A tied
  /// embedding has both, one to look tokens up and one to multiply.
  struct Weight {
    Buffer<unsigned char> rows, tiles;
  };
  /// One of the matrices that are multiplied with the same rows.
  struct Product {
    const gguf::Tensor* weights;
    float* out;                          // [nt][od]
    const gguf::Tensor* bias = nullptr;  // added, or null
    bool add = false;                    // to what is in `out`
  };

  static Buffer<float> floats(std::int64_t rows, std::int64_t length, const char* name) {
    return Buffer<float>(product(rows, length), name);
  }
  [[nodiscard]] int logits_rows() const { return std::min(options_.batch, kMostLogitsRows); }
  [[nodiscard]] int longest_row() const {
    return std::max({model_.hp.embedding_length, model_.hp.feed_forward_length, heads_.q_length()});
  }

  /// Whether a matrix is multiplied as tiles: all types with blocks, unless activations are to stay f32.
  [[nodiscard]] bool tiled(const gguf::Tensor* t) const {
    return !options_.exact && tiles::has_tiles(t->type);
  }
  /// Whether the kernel for one token takes these heads; others rotate, store and attend in two launches.
  [[nodiscard]] bool one_launch_attends() const { return attention_decode_supported<KV>(heads_).ok(); }
  [[nodiscard]] bool keeps_rows(const gguf::Tensor* t) const { return !tiled(t) || t == model_.token_embd; }
  [[nodiscard]] bool keeps_tiles(const gguf::Tensor* t) const {
    return tiled(t) && (t != model_.token_embd || model_.tied);
  }
  static Shape shape_of(const gguf::Tensor* t) { return {1, t->rows(), t->row_length()}; }

  /// Throws DeviceError when weights, cache and work buffers are more than what is free.
  void check_fits() const {
    const Hyperparameters& hp = model_.hp;
    std::uint64_t weights = 0, loading = 0;
    for (const gguf::Tensor* t : used_tensors(model_)) {
      if (keeps_rows(t)) weights += t->data.size();
      if (keeps_tiles(t)) weights += tiles::bytes(t->type, shape_of(t));
      if (!keeps_rows(t)) loading = std::max<std::uint64_t>(loading, t->data.size());
    }
    const std::uint64_t cache =
        2 * sizeof(KV) * product(hp.block_count, std::int64_t{options_.context} * heads_.kv_length());
    const std::int64_t row = 3LL * hp.embedding_length + 2LL * heads_.q_length() + 2LL * heads_.kv_length() +
                             2LL * hp.feed_forward_length;
    const std::uint64_t work = 4 * (product(options_.batch, row) + product(logits_rows(), hp.vocabulary) +
                                    product(options_.context, heads_.head_dim)) +
                               tile_acts::bytes(options_.batch, longest_row());
    const std::uint64_t needed = weights + loading + cache + work, available = device_free_bytes();
    if (needed <= available) return;
    const bool twice = model_.tied && keeps_tiles(model_.token_embd);
    throw DeviceError("the model needs " + std::to_string(needed) + " bytes of device memory (weights " +
                      std::to_string(weights) + (twice ? " with the tied embedding in two forms" : "") +
                      ", loading them " + std::to_string(loading) + ", KV cache " + std::to_string(cache) +
                      ", work " + std::to_string(work) + "), and " + std::to_string(available) + " are free");
  }

  /// Rows go up as they are; tiles are made of them on the device, from a buffer that all matrices pass through.
  void upload_weights() {
    const std::vector<const gguf::Tensor*> tensors = used_tensors(model_);
    std::uint64_t total = 0, done = 0;
    std::size_t largest = 0;
    for (const gguf::Tensor* t : tensors) {
      total += t->data.size();
      if (!keeps_rows(t)) largest = std::max(largest, t->data.size());
    }
    Buffer<unsigned char> passing(largest, "weights on their way");
    for (const gguf::Tensor* t : tensors) {
      Weight w;
      if (keeps_rows(t)) w.rows = Buffer<unsigned char>(t->data.size(), "weights");
      Buffer<unsigned char>& rows = keeps_rows(t) ? w.rows : passing;
      rows.upload({reinterpret_cast<const unsigned char*>(t->data.data()), t->data.size()});
      if (keeps_tiles(t)) {
        w.tiles = Buffer<unsigned char>(tiles::bytes(t->type, shape_of(t)), "tiles");
        require(tiles::launch_repack(t->type, rows.data(), w.tiles.data(), shape_of(t), stream_));
        stream_.synchronize();  // the next matrix takes this one's place
      }
      weights_.emplace(t, std::move(w));
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

  const unsigned char* rows_of(const gguf::Tensor* t) const { return weights_.at(t).rows.data(); }
  const unsigned char* tiles_of(const gguf::Tensor* t) const { return weights_.at(t).tiles.data(); }
  const float* floats_of(const gguf::Tensor* t) const {
    return t == nullptr ? nullptr : reinterpret_cast<const float*>(rows_of(t));
  }

  /// One more launch is queued.
  void queue(const Status& s) {
    require(s);
    ++launches_;
  }

  /// Position and token ids to device memory, where a replayed graph finds them.
  void set_step(std::span<const std::int32_t> tokens, int position) {
    if (tokens.size() <= kMostStepTokens) {
      queue(launch_set_step(step_.data(), position, tokens, stream_));
      return;
    }
    std::vector<std::int32_t> step = {position};
    step.insert(step.end(), tokens.begin(), tokens.end());
    step_.upload(step);
  }
  const std::int32_t* first_position() const { return step_.data(); }
  const std::int32_t* token_ids() const { return step_.data() + 1; }

  /// out = norm(acts) . weights^T for each product, `norm` being null for acts as they are. Tiles of one type are one
  /// launch for up to eight rows; what has no tiles takes f32 activations and a kernel for each step.
  void multiply(std::span<const Product> products, const float* acts, const gguf::Tensor* norm, int nt) {
    const auto id = static_cast<int>(products[0].weights->row_length());
    const auto is_tiled = [this](const Product& p) { return tiled(p.weights); };
    if (std::any_of(products.begin(), products.end(), is_tiled)) quantize(acts, norm, nt, id);
    if (!std::all_of(products.begin(), products.end(), is_tiled) && norm != nullptr) {
      queue(launch_rms_norm(acts, floats_of(norm), normed_.data(), nt, id, model_.hp.rms_epsilon, stream_,
                            kOverlap));
      acts = normed_.data();
    }
    std::set<WeightType> done;
    for (const Product& p : products) {
      if (!tiled(p.weights)) {
        multiply_floats(p, acts, nt);
      } else if (done.insert(p.weights->type).second) {
        multiply_tiles(p.weights->type, products, nt, id);
      }
    }
  }

  void multiply_tiles(WeightType type, std::span<const Product> products, int nt, int id) {
    for (int t0 = 0; t0 < nt; t0 += tile_acts::kMostTokens) {  // a group of tokens at a time
      std::vector<MmvqPart> parts;
      for (const Product& p : products) {
        if (p.weights->type != type) continue;
        const auto od = static_cast<int>(p.weights->rows());
        float* out = p.out + product(t0, od);
        parts.push_back({tiles_of(p.weights), out, od, floats_of(p.bias), p.add ? out : nullptr});
      }
      queue(launch_mmvq_tiles(type, parts, {group(t0, id)}, std::min(nt - t0, tile_acts::kMostTokens), id,
                              stream_, {kOverlap}));
    }
  }

  void multiply_floats(const Product& p, const float* acts, int nt) {
    const auto od = static_cast<int>(p.weights->rows());
    float* out = p.add ? added_.data() : p.out;
    queue(launch_f32_matmul(p.weights->type, rows_of(p.weights), acts, out, {nt, od, p.weights->row_length()},
                            stream_));
    if (p.bias != nullptr) queue(launch_add_bias(out, floats_of(p.bias), nt, od, stream_, kOverlap));
    if (p.add) queue(launch_add_residual(p.out, out, std::int64_t{nt} * od, stream_, kOverlap));
  }

  /// gate_ = silu(norm(x_) . gate^T) * (norm(x_) . up^T)
  void multiply_swiglu(const Layer& l, int nt) {
    const auto id = static_cast<int>(l.ffn_gate->row_length()), ff = static_cast<int>(l.ffn_gate->rows());
    if (!tiled(l.ffn_gate) || l.ffn_gate->type != l.ffn_up->type) {
      const Product both[] = {{l.ffn_gate, gate_.data()}, {l.ffn_up, up_.data()}};
      multiply(both, x_.data(), l.ffn_norm, nt);
      queue(launch_swiglu(gate_.data(), up_.data(), std::int64_t{nt} * ff, stream_, kOverlap));
      return;
    }
    quantize(x_.data(), l.ffn_norm, nt, id);
    for (int t0 = 0; t0 < nt; t0 += tile_acts::kMostTokens) {
      queue(launch_mmvq_tiles_swiglu(l.ffn_gate->type, tiles_of(l.ffn_gate), tiles_of(l.ffn_up),
                                     {group(t0, id)}, gate_.data() + product(t0, ff), nullptr,
                                     {std::min(nt - t0, tile_acts::kMostTokens), ff, id}, stream_,
                                     {kOverlap}));
    }
  }

  void quantize(const float* acts, const gguf::Tensor* norm, int nt, int id) {
    queue(tile_acts::launch_quantize(acts, floats_of(norm), model_.hp.rms_epsilon, planes_.data(), nt, id,
                                     stream_, kOverlap));
  }
  /// The activations of the group of eight that begins with token t0.
  const unsigned char* group(int t0, int id) const {
    return planes_.data() +
           product(t0 / tile_acts::kMostTokens,
                   static_cast<std::int64_t>(tile_acts::group_bytes(tile_acts::kMostTokens, id)));
  }

  /// Queues a forward pass of the nt tokens of the step; x_ then holds the last layer's rows. Launches with the same
  /// arguments for every token and position, so that one recording of them serves all.
  void forward(int nt) {
    const Hyperparameters& hp = model_.hp;
    queue(launch_embedding_rows(model_.token_embd->type, rows_of(model_.token_embd), token_ids(), x_.data(),
                                nt, hp.embedding_length, hp.vocabulary, stream_));
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
      multiply(qkv, x_.data(), l.attn_norm, nt);
      queue(launch_rope_store(q_.data(), k_.data(), v_.data(), cosines_.data(), sines_.data(), keys, values,
                              nt, first_position(), heads_, stream_, kOverlap));
      queue(launch_attention_f32<KV>(q_.data(), keys, values, mixed_.data(), nt, first_position(), heads_,
                                     stream_, kOverlap));
      const Product output = {l.attn_output, x_.data(), nullptr, true};
      multiply({&output, 1}, mixed_.data(), nullptr, nt);

      // 2. Feed-forward: x += down . (silu(gate) * up), both of norm(x).
      multiply_swiglu(l, nt);
      const Product down = {l.ffn_down, x_.data(), nullptr, true};
      multiply({&down, 1}, gate_.data(), nullptr, nt);
      // ANCHOR_END: layer
    }
  }

  // One token: five launches a layer. What a launch needs as int8 is either made by the launch before it or by the blocks
  // of its own, and the memory is never asked for nothing: a launch that has asked for its last weights asks for the next
  // ones.

  /// A row of f32, normalised if `norm` is given, or planes that the launch before has made.
  MmvqActs acts_of(const float* row, const gguf::Tensor* norm) const {
    return {nullptr, row, floats_of(norm), model_.hp.rms_epsilon};
  }

  /// What a launch that multiplies these matrices begins with, kAhead bytes in all.
  void ask_next(std::initializer_list<const gguf::Tensor*> matrices, MmvqLaunch& how) const {
    std::size_t n = 0, all = 0;
    for (const gguf::Tensor* t : matrices) {
      if (tiled(t)) all += tiles::bytes(t->type, shape_of(t));
    }
    for (const gguf::Tensor* t : matrices) {
      if (!tiled(t)) continue;
      const std::size_t bytes = tiles::bytes(t->type, shape_of(t));
      const double share = std::min(1.0, static_cast<double>(kAhead) / static_cast<double>(all));
      how.next[n++] = {tiles_of(t), static_cast<std::size_t>(share * static_cast<double>(bytes))};
    }
  }

  /// Products of one token, all with the same activations: a launch for each type of tiles, one after the other where
  /// there are several; what has no tiles takes `row`, which is then needed.
  void multiply_one(std::span<const Product> products, const MmvqActs& acts, const float* row,
                    const gguf::Tensor* norm, const MmvqLaunch& how) {
    const auto id = static_cast<int>(products[0].weights->row_length());
    std::set<WeightType> done;
    bool normed = false;
    for (const Product& p : products) {
      const WeightType type = p.weights->type;
      if (!tiled(p.weights)) {
        if (norm != nullptr && !normed) {
          queue(launch_rms_norm(row, floats_of(norm), normed_.data(), 1, id, model_.hp.rms_epsilon, stream_,
                                kOverlap));
          normed = true;
        }
        multiply_floats(p, norm != nullptr ? normed_.data() : row, 1);
      } else if (done.insert(type).second) {
        std::vector<MmvqPart> parts;
        for (const Product& q : products) {
          if (q.weights->type != type || !tiled(q.weights)) continue;
          parts.push_back({tiles_of(q.weights), q.out, static_cast<int>(q.weights->rows()), floats_of(q.bias),
                           q.add ? q.out : nullptr});
        }
        queue(launch_mmvq_tiles(type, parts, acts, 1, id, stream_, how));
      }
    }
  }

  /// Queues a forward pass of one token, whose step is set; x_ then holds the last layer's row.
  void forward_one() {
    const Hyperparameters& hp = model_.hp;
    queue(launch_embedding_rows(model_.token_embd->type, rows_of(model_.token_embd), token_ids(), x_.data(),
                                1, hp.embedding_length, hp.vocabulary, stream_));
    for (std::size_t i = 0; i < model_.layers.size(); ++i) {
      const Layer& l = model_.layers[i];
      const std::size_t cache_at =
          product(static_cast<std::int64_t>(i), std::int64_t{options_.context} * heads_.kv_length());
      KV* keys = keys_.data() + cache_at;
      KV* values = values_.data() + cache_at;
      MmvqLaunch qkv_launch{kOverlap}, output_launch{kOverlap}, gate_launch{kOverlap}, down_launch{kOverlap};
      ask_next({l.attn_output}, qkv_launch);
      ask_next({l.ffn_gate, l.ffn_up}, output_launch);
      ask_next({l.ffn_down}, gate_launch);
      if (i + 1 < model_.layers.size()) {
        const Layer& after = model_.layers[i + 1];
        ask_next({after.attn_q, after.attn_k, after.attn_v}, down_launch);
      } else {
        ask_next({model_.output}, down_launch);
      }

      // ANCHOR: layer_of_one
      // 1. Attention: x += output . attention(rope(q), rope(k), v), all of norm(x).
      const Product qkv[] = {{l.attn_q, q_.data(), l.attn_q_bias},
                             {l.attn_k, k_.data(), l.attn_k_bias},
                             {l.attn_v, v_.data(), l.attn_v_bias}};
      multiply_one(qkv, acts_of(x_.data(), l.attn_norm), x_.data(), l.attn_norm, qkv_launch);
      const bool planes = attend_one(keys, values, tiled(l.attn_output));
      const Product output = {l.attn_output, x_.data(), nullptr, true};
      multiply_one({&output, 1}, planes ? MmvqActs{planes_.data()} : acts_of(mixed_.data(), nullptr),
                   mixed_.data(), nullptr, output_launch);

      // 2. Feed-forward: x += down . (silu(gate) * up), both of norm(x).
      const bool gated = swiglu_one(l, gate_launch);
      const Product down = {l.ffn_down, x_.data(), nullptr, true};
      multiply_one({&down, 1}, gated ? MmvqActs{planes_.data()} : acts_of(gate_.data(), nullptr),
                   gate_.data(), nullptr, down_launch);
      // ANCHOR_END: layer_of_one
    }
  }

  /// Attention of one token to planes_, if it is asked for and there is a kernel that makes them, else to mixed_.
  bool attend_one(KV* keys, KV* values, bool planes) {
    if (!one_launch_attends()) {
      queue(launch_rope_store(q_.data(), k_.data(), v_.data(), cosines_.data(), sines_.data(), keys, values,
                              1, first_position(), heads_, stream_, kOverlap));
      queue(launch_attention_f32<KV>(q_.data(), keys, values, mixed_.data(), 1, first_position(), heads_,
                                     stream_, kOverlap));
      return false;
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
    queue(launch_attention_decode(a, stream_, kOverlap));
    return planes;
  }

  /// silu(norm(x_) . gate^T) * (norm(x_) . up^T) of one token, to planes_ if one launch can do it all, else to gate_.
  bool swiglu_one(const Layer& l, const MmvqLaunch& how) {
    const MmvqActs acts = acts_of(x_.data(), l.ffn_norm);
    if (!tiled(l.ffn_gate) || l.ffn_gate->type != l.ffn_up->type) {
      const Product both[] = {{l.ffn_gate, gate_.data()}, {l.ffn_up, up_.data()}};
      multiply_one(both, acts, x_.data(), l.ffn_norm, how);
      queue(launch_swiglu(gate_.data(), up_.data(), l.ffn_gate->rows(), stream_, kOverlap));
      return false;
    }
    const bool planes = tiled(l.ffn_down);
    queue(launch_mmvq_tiles_swiglu(l.ffn_gate->type, tiles_of(l.ffn_gate), tiles_of(l.ffn_up), acts,
                                   planes ? nullptr : gate_.data(), planes ? planes_.data() : nullptr,
                                   {1, l.ffn_gate->rows(), l.ffn_gate->row_length()}, stream_, how));
    return planes;
  }

  /// Queues the logits of rows r0 .. r0+rows-1 of x_, at most logits_rows() of them.
  void queue_logits(int r0, int rows) {
    const Product output = {model_.output, logits_.data()};
    multiply({&output, 1}, x_.data() + product(r0, model_.hp.embedding_length), model_.output_norm, rows);
  }

  /// One token, whose step is set, and its logits. The first time launch by launch (which also loads the kernels), the
  /// second time recorded, and from then on replayed: a call for all of them. Synchronises.
  void decode(std::span<float> logits) {
    const auto queue_all = [this] {
      forward_one();
      const Product output = {model_.output, row_.data()};
      multiply_one({&output, 1}, acts_of(x_.data(), model_.output_norm), x_.data(), model_.output_norm,
                   {kOverlap});
    };
    if (launches_per_token_ == 0) {
      const int before = launches_ - 1;  // one has set the step
      queue_all();
      launches_per_token_ = launches_ - before;
      info_.kernels += "; " + std::to_string(launches_per_token_) + " launches a token";
    } else {
      if (!recorded_) {
        recorded_ = Graph::capture(stream_, [&](Stream&) -> Status {
          try {
            queue_all();
          } catch (const DeviceError& e) {  // a recording has to be ended before anyone is told
            return Status::error(e.what());
          }
          return {};
        });
      }
      recorded_->launch(stream_);
    }
    stream_.synchronize();
    if (logits.data() != row_.data()) std::copy(row_.data(), row_.data() + row_.size(), logits.data());
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
    stream_.synchronize();
    logits_.download(logits.first(product(rows, model_.hp.vocabulary)));
  }

  const Model& model_;
  EngineOptions options_;
  HeadShape heads_;
  EngineInfo info_;
  int position_ = 0;
  int launches_ = 0, launches_per_token_ = 0;  // all so far; of a decoded token, 0 before the first one
  Stream stream_;
  std::map<const gguf::Tensor*, Weight> weights_;
  Buffer<float> cosines_, sines_;  // [context][head_dim/2]
  Buffer<KV> keys_, values_;       // [layer][context][kv_heads][head_dim]
  Buffer<std::int32_t> step_;      // [1 + batch]: first position, token ids
  Buffer<float> x_, normed_, q_, k_, v_, mixed_, added_, gate_, up_;  // [batch][...]
  Buffer<unsigned char> planes_;                                      // activations as int8, of [batch][...]
  Buffer<unsigned char> workspace_;                                   // of attention_decode
  Buffer<float> logits_;                                              // [logits_rows][vocabulary]
  HostBuffer<float> row_;          // one token's logits, written by the kernel that computes them
  std::optional<Graph> recorded_;  // a token and its logits
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
