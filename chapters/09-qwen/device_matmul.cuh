// Every multiplication of the device engine: asks the dispatch function which kernel it is, brings activations to the form
// that this kernel takes, once for all matrices that share them, and launches it. Weights are kept in the forms that the
// decisions for this model and device need, and no others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "chapters/09-qwen/engine.hpp"
#include "chapters/09-qwen/launches.cuh"
#include "chapters/09-qwen/matmul_kernels.hpp"
#include "chapters/09-qwen/plan.hpp"
#include "harness/device/device.hpp"
#include "harness/experiment/traffic.hpp"
#include "kernels/dispatch/dispatch.hpp"
#include "kernels/elementwise/add_bias.cuh"
#include "kernels/elementwise/add_residual.cuh"
#include "kernels/elementwise/rms_norm.cuh"
#include "kernels/elementwise/swiglu.cuh"
#include "kernels/gemm/acts_f16.cuh"
#include "kernels/gemv/gemv_fused.cuh"
#include "kernels/gemv/quant_f32_matmul.cuh"
#include "kernels/mmvq/mmvq_tiles.cuh"
#include "kernels/mmvq/tile_acts.cuh"
#include "kernels/mmvq/tiles.cuh"
#include "kernels/quant/dequantize.cuh"
#include "kernels/quant/quantize_acts.cuh"

namespace ladder::qwen {

/// A weight matrix as it is kept: rows as in the file, tiles, rows of f16.
struct DeviceWeight {
  Buffer<unsigned char> rows, tiles;
  Buffer<__half> halves;
};

/// One of the matrices that are multiplied with the same rows.
struct Product {
  const gguf::Tensor* weights;
  float* out;                          // [nt][od]
  const gguf::Tensor* bias = nullptr;  // added, or null
  bool add = false;                    // to what is in `out`
};

/// Rows of activations on their way into products.
struct ProductActs {
  const float* rows = nullptr;         // [nt][id]
  const gguf::Tensor* norm = nullptr;  // weights of a root-mean-square normalisation; or null
  bool gated = false;  // the f16 rows of the last swiglu() instead, where it said that it had made them
};

class DeviceMatmul {
 public:
  /// @param rows most token rows of a pass @param logits_rows most of them whose logits are computed at once
  DeviceMatmul(const Model& model, const EngineOptions& options, int logits_rows, Launches& launches)
      : model_(model),
        options_(options),
        device_(device_info()),
        logits_rows_(logits_rows),
        launches_(launches) {
    plan();
  }

  /// The kernel that multiplies a matrix with nt rows.
  [[nodiscard]] const dispatch::Gate& gate(const gguf::Tensor* t, long long nt) const {
    const dispatch::Request r{t->type, {nt, t->rows(), t->row_length()}, options_.exact};
    const dispatch::Gate* g = dispatch::first_gate(options_.gates, r, device_, options_.switches);
    if (g == nullptr) {
      dispatch::Decision none;
      throw DeviceError(std::string(t->name) + ": " +
                        dispatch::decide(options_.gates, r, device_, options_.switches, &none).message());
    }
    return *g;
  }
  [[nodiscard]] dispatch::Kernel kernel(const gguf::Tensor* t, long long nt) const {
    return gate(t, nt).kernel;
  }
  /// Whether gemv_fused multiplies a token alone.
  [[nodiscard]] bool fused(const gguf::Tensor* t) const { return fuses(kernel(t, 1), *t, device_); }

  // Memory ----------------------------------------------------------------------------------------------------------

  /// Bytes of a tensor in the forms that are kept, and while it is loaded; of the work buffers.
  [[nodiscard]] std::uint64_t bytes(const gguf::Tensor* t) const {
    const Forms f = forms(t);
    return (f.rows ? t->data.size() : 0) + (f.tiles ? tiles::bytes(t->type, shape_of(t)) : 0) +
           (f.halves ? 2 * static_cast<std::uint64_t>(t->elements()) : 0);
  }
  [[nodiscard]] std::uint64_t loading_bytes(const gguf::Tensor* t) const {
    return forms(t).rows ? 0 : t->data.size();
  }
  [[nodiscard]] std::uint64_t work_bytes() const {
    return scratch_.planes + scratch_.blocks + scratch_.mmq_planes + 2 * (scratch_.halves + scratch_.gated) +
           8 * static_cast<std::uint64_t>(options_.batch) + 4 * (scratch_.normed + scratch_.added) +
           scratch_.workspace;
  }
  /// Whether a tensor is kept in two forms.
  [[nodiscard]] bool kept_twice(const gguf::Tensor* t) const {
    const Forms f = forms(t);
    return int{f.rows} + int{f.tiles} + int{f.halves} > 1;
  }

  /// Rows go up as they are; other forms are made of them on the device, from a buffer that all matrices pass through.
  void upload(std::span<const gguf::Tensor* const> tensors, Stream& stream) {
    std::uint64_t total = 0, done = 0;
    std::size_t largest = 0;
    for (const gguf::Tensor* t : tensors) {
      total += t->data.size();
      largest = std::max<std::size_t>(largest, loading_bytes(t));
    }
    Buffer<unsigned char> passing(largest, "weights on their way");
    for (const gguf::Tensor* t : tensors) {
      const Forms f = forms(t);
      DeviceWeight w;
      if (f.rows) w.rows = Buffer<unsigned char>(t->data.size(), "weights");
      Buffer<unsigned char>& rows = f.rows ? w.rows : passing;
      rows.upload_mapped({reinterpret_cast<const unsigned char*>(t->data.data()), t->data.size()});
      if (f.tiles) {
        w.tiles = Buffer<unsigned char>(tiles::bytes(t->type, shape_of(t)), "tiles");
        require(tiles::launch_repack(t->type, rows.data(), w.tiles.data(), shape_of(t), stream));
      }
      if (f.halves) {
        w.halves = Buffer<__half>(static_cast<std::size_t>(t->elements()), "f16 weights");
        require(launch_dequantize(t->type, rows.data(), w.halves.data(), t->elements(), stream));
      }
      stream.synchronize();  // the next matrix takes this one's place
      weights_.emplace(t, std::move(w));
      done += t->data.size();
      if (options_.on_progress) options_.on_progress(done, total);
    }
  }
  void allocate() {
    const auto rows = static_cast<std::size_t>(options_.batch);
    planes_ = Buffer<unsigned char>(scratch_.planes, "int8 activations");
    blocks_ = Buffer<BlockQ8Pad40>(scratch_.blocks / sizeof(BlockQ8Pad40), "int8 blocks");
    mmq_planes_ = Buffer<unsigned char>(scratch_.mmq_planes, "int8 activations of a prompt");
    halves_ = Buffer<__half>(scratch_.halves, "f16 activations");
    gated_ = Buffer<__half>(scratch_.gated, "f16 gate");
    row_scale_ = Buffer<float>(scratch_.halves > 0 ? rows : 0, "scales of f16 rows");
    if (scratch_.gated > 0) {
      gated_scale_ = Buffer<float>(rows, "scale of the f16 gate");
      gated_scale_.upload(std::vector<float>(rows, 1.0f / kGatedScale));
    }
    normed_ = Buffer<float>(scratch_.normed, "normalised rows");
    added_ = Buffer<float>(scratch_.added, "residual to add");
    workspace_ = Buffer<float>(scratch_.workspace / sizeof(float), "partial sums");
    flags_ = Buffer<unsigned>(static_cast<std::size_t>(device_.sms), "flags of partial sums");
    flags_.fill_bytes(0);
  }

  [[nodiscard]] const unsigned char* rows_of(const gguf::Tensor* t) const {
    return weights_.at(t).rows.data();
  }
  [[nodiscard]] const unsigned char* tiles_of(const gguf::Tensor* t) const {
    return weights_.at(t).tiles.data();
  }
  [[nodiscard]] const float* floats_of(const gguf::Tensor* t) const {
    return t == nullptr ? nullptr : reinterpret_cast<const float*>(rows_of(t));
  }
  static Shape shape_of(const gguf::Tensor* t) { return {1, t->rows(), t->row_length()}; }

  /// A matrix as rows, and what is to become of its product, for gemv_fused.
  [[nodiscard]] FusedPart fused_part(const Product& p) const {
    return {rows_of(p.weights), p.out, static_cast<int>(p.weights->rows()), floats_of(p.bias),
            p.add ? p.out : nullptr};
  }

  // Products --------------------------------------------------------------------------------------------------------

  // ANCHOR: multiply
  /// out = norm(acts) . weights^T for each product. Matrices of one kernel and type are one launch where the kernel takes
  /// several; no activation is converted twice.
  void multiply(std::span<const Product> products, const ProductActs& acts, int nt, Stream& stream) {
    Converted ready;
    std::vector<bool> done(products.size(), false);
    for (std::size_t i = 0; i < products.size(); ++i) {
      if (done[i]) continue;
      const dispatch::Gate& chosen = gate(products[i].weights, nt);
      std::vector<Product> group;
      for (std::size_t j = i; j < products.size(); ++j) {
        const gguf::Tensor* t = products[j].weights;
        if (t->type != products[i].weights->type || kernel(t, nt) != chosen.kernel) continue;
        group.push_back(products[j]);
        done[j] = true;
      }
      launch(chosen, group, acts, nt, ready, stream);
    }
  }
  // ANCHOR_END: multiply

  /// out = silu(norm(acts) . gate^T) * (norm(acts) . up^T), [nt][od]. @param up_out room for the second factor
  /// @return whether the result is f16 rows of this object instead (ProductActs::gated), which `next` takes
  bool swiglu(const gguf::Tensor* gate_weights, const gguf::Tensor* up, const gguf::Tensor* next,
              const ProductActs& acts, float* out, float* up_out, int nt, Stream& stream) {
    using dispatch::Kernel;
    const dispatch::Gate& chosen = gate(gate_weights, nt);
    const bool together = gate_weights->type == up->type && kernel(up, nt) == chosen.kernel;
    const int id = static_cast<int>(gate_weights->row_length()), ff = static_cast<int>(gate_weights->rows());
    const WeightType type = gate_weights->type;
    Converted ready;
    if (together && chosen.kernel == Kernel::gemm_tiles_wgmma) {
      const bool f16 = kernel(next, nt) == Kernel::gemm_tiles_wgmma && ff % tiles::kRows == 0;
      const __half* x = halves(acts, nt, id, HalfOrder::tiles, ready, stream);
      GemmTilesGate both{tiles_of(gate_weights), tiles_of(up)};
      both.out = f16 ? nullptr : out;
      both.halves = f16 ? gated_.data() : nullptr;
      both.halves_scale = f16 ? kGatedScale : 1.0f;
      both.row_scale = row_scale_.data();
      launches_(note(chosen, {{gate_weights, up}}, nt), stream, [&] {
        return multiply_tiles_swiglu(type, both, x, {nt, ff, id}, workspace_.data(), flags_.data(), stream,
                                     launches_.overlap());
      });
      return f16;
    }
    if (together && chosen.kernel == Kernel::mmvq_tiles) {
      const unsigned char* planes = tile_planes(acts, nt, id, ready, stream);
      for (int t0 = 0; t0 < nt; t0 += tile_acts::kMostTokens) {
        const int some = std::min(nt - t0, tile_acts::kMostTokens);
        launches_(note(chosen, {{gate_weights, up}}, some), stream, [&] {
          return launch_mmvq_tiles_swiglu(type, tiles_of(gate_weights), tiles_of(up),
                                          {group_of(planes, t0, id)},
                                          out + static_cast<std::size_t>(t0) * static_cast<std::size_t>(ff),
                                          nullptr, {some, ff, id}, stream, {launches_.overlap()});
        });
      }
      return false;
    }
    const Product both[] = {{gate_weights, out}, {up, up_out}};
    multiply(both, acts, nt, stream);
    launches_({"swiglu", {}, nt, ff}, stream,
              [&] { return launch_swiglu(out, up_out, std::int64_t{nt} * ff, stream, launches_.overlap()); });
    return false;
  }

  /// A product with f32 activations.
  void multiply_floats(const Product& p, const float* acts, int nt, Stream& stream) {
    const auto od = static_cast<int>(p.weights->rows());
    float* out = p.add ? added_.data() : p.out;
    launches_(note(gate_of_floats(), {{p.weights}}, nt), stream, [&] {
      return launch_f32_matmul(p.weights->type, rows_of(p.weights), acts, out,
                               {nt, od, p.weights->row_length()}, stream);
    });
    finish(p, out, nt, stream);
  }

  /// What a launch of gemv_fused is, for a trace.
  [[nodiscard]] LaunchNote fused_note(std::array<const gguf::Tensor*, 3> weights) const {
    LaunchNote n = note(gate(weights[0], 1), weights, 1);
    n.kernel = kFusedName;
    return n;
  }
  /// What a launch of a product is, for a trace.
  [[nodiscard]] LaunchNote note(const dispatch::Gate& g, std::array<const gguf::Tensor*, 3> weights,
                                int nt) const {
    LaunchNote n;
    n.kernel = dispatch::info(g.kernel).id;
    n.weights = weights;
    n.nt = nt;
    n.gate = &g;
    return n;
  }

 private:
  /// What silu(gate) * up is multiplied with before it becomes f16: numbers up to four million fit, and what is lost below
  /// 2^-18 is nothing beside a row's larger ones.
  static constexpr float kGatedScale = 1.0f / 64;

  struct Forms {
    bool rows = false, tiles = false, halves = false;
  };
  /// Elements or bytes of the work buffers.
  struct Scratch {
    std::size_t planes = 0, blocks = 0, mmq_planes = 0, halves = 0, gated = 0, normed = 0, added = 0,
                workspace = 0;
  };
  /// Forms that the activations of a call have been brought to.
  struct Converted {
    bool normed = false, planes = false, blocks = false, mmq_planes = false, halves = false;
    HalfOrder order{};
  };

  [[nodiscard]] std::vector<const gguf::Tensor*> matrices() const {
    std::vector<const gguf::Tensor*> all = {model_.output};
    for (const Layer& l : model_.layers) {
      for (const gguf::Tensor* t :
           {l.attn_q, l.attn_k, l.attn_v, l.attn_output, l.ffn_gate, l.ffn_up, l.ffn_down}) {
        all.push_back(t);
      }
    }
    return all;
  }

  /// Which forms and work buffers all decisions need, for every number of rows that a pass may have.
  void plan() {
    struct Kind {
      WeightType type;
      long long od, id;
      int most;
      bool operator<(const Kind& o) const {
        return std::tie(type, od, id, most) < std::tie(o.type, o.od, o.id, o.most);
      }
    };
    std::map<Kind, std::set<dispatch::Kernel>> kinds;
    for (const gguf::Tensor* t : matrices()) {
      const int most = t == model_.output ? logits_rows_ : options_.batch;
      const auto [kind, added] = kinds.try_emplace({t->type, t->rows(), t->row_length(), most});
      for (int nt = 1; added && nt <= most; ++nt) kind->second.insert(need(t, nt));
      Forms& f = forms_[t];
      for (const dispatch::Kernel k : kind->second) {
        switch (dispatch::info(k).weights) {
          case dispatch::WeightForm::rows:
            f.rows = true;
            break;
          case dispatch::WeightForm::tiles:
            f.tiles = true;
            break;
          case dispatch::WeightForm::f16_rows:  // which F16 rows of a file are
            (t->type == WeightType::f16 ? f.rows : f.halves) = true;
            break;
        }
      }
    }
    const auto rows = static_cast<std::size_t>(options_.batch);
    scratch_.normed = rows * static_cast<std::size_t>(model_.hp.embedding_length);
    scratch_.added = rows * static_cast<std::size_t>(model_.hp.embedding_length);
  }

  /// Makes room in the plan for a product with nt rows. @return its kernel
  dispatch::Kernel need(const gguf::Tensor* t, int nt) {
    using dispatch::Kernel;
    const Kernel k = kernel(t, nt);
    const long long id = t->row_length();
    const Shape s{nt, t->rows(), id};
    const auto elements = static_cast<std::size_t>(nt) * static_cast<std::size_t>(id);
    const auto grow = [](std::size_t& n, std::size_t to) { n = std::max(n, to); };
    switch (k) {
      case Kernel::mmvq_tiles:
        grow(scratch_.planes, tile_acts::bytes(nt, id));
        break;
      case Kernel::mmvq_multi:
        grow(scratch_.blocks, elements / kQ8ActsPerBlock * sizeof(BlockQ8Pad40));
        break;
      case Kernel::mmq_tiles:
        grow(scratch_.mmq_planes, mmq_planes_bytes(nt, id));
        grow(scratch_.workspace, workspace_of_mmq(t->type, s, device_.sms));
        break;
      case Kernel::gemm_tiles_wgmma:
        grow(scratch_.gated,
             static_cast<std::size_t>(nt) * static_cast<std::size_t>(model_.hp.feed_forward_length));
        grow(scratch_.workspace, tiles_workspace_bytes(device_.sms));
        grow(scratch_.halves, elements);
        break;
      case Kernel::gemm_tiles_mma:
        grow(scratch_.halves, elements);
        break;
      case Kernel::gemm_f16_wgmma:
      case Kernel::gemm_f16_mma:
        grow(scratch_.halves, elements);
        grow(scratch_.workspace, f16_workspace_bytes(k == Kernel::gemm_f16_wgmma, s, device_.sms));
        break;
      case Kernel::f32_matmul:
        break;
    }
    return k;
  }

  [[nodiscard]] F16Tile f16_tile() const {
    const dispatch::Switches& s = options_.switches;
    if (s.gemm_tm == 0 && !s.gemm_k64) return {};
    return {s.gemm_tm != 0 ? s.gemm_tm : 128, s.gemm_k64 ? 64 : 32};
  }

  /// Forms of a tensor: those of its products; rows for what is looked up or added.
  [[nodiscard]] Forms forms(const gguf::Tensor* t) const {
    const auto found = forms_.find(t);
    Forms f = found != forms_.end() ? found->second : Forms{true, false, false};
    if (t == model_.token_embd) f.rows = true;
    return f;
  }

  /// The gate that a product with f32 activations is noted with.
  [[nodiscard]] const dispatch::Gate& gate_of_floats() const { return options_.gates.gates.back(); }

  /// Launches one kernel's products, all of one type.
  void launch(const dispatch::Gate& chosen, std::span<const Product> group, const ProductActs& acts, int nt,
              Converted& ready, Stream& stream) {
    using dispatch::Kernel;
    const auto id = static_cast<int>(group[0].weights->row_length());
    switch (chosen.kernel) {
      case Kernel::mmvq_tiles: {
        const unsigned char* planes = tile_planes(acts, nt, id, ready, stream);
        by_parts(
            chosen, group, nt, tile_acts::kMostTokens, [&](std::span<const Product> some, int t0, int n) {
              std::vector<MmvqPart> parts;
              for (const Product& p : some) {
                const auto od = static_cast<int>(p.weights->rows());
                float* out = at(p.out, t0, od);
                parts.push_back({tiles_of(p.weights), out, od, floats_of(p.bias), p.add ? out : nullptr});
              }
              launches_(note_of(chosen, some, n), stream, [&] {
                return launch_mmvq_tiles(some[0].weights->type, parts, {group_of(planes, t0, id)}, n, id,
                                         stream, {launches_.overlap()});
              });
            });
        return;
      }
      case Kernel::mmvq_multi: {
        const BlockQ8Pad40* blocks = int8_blocks(acts, nt, id, ready, stream);
        for (const Product& p : group) {
          const auto od = static_cast<int>(p.weights->rows());
          float* out = p.add ? added_.data() : p.out;
          for (int t0 = 0; t0 < nt; t0 += tile_acts::kMostTokens) {
            const int n = std::min(nt - t0, tile_acts::kMostTokens);
            launches_(note(chosen, {{p.weights}}, n), stream, [&] {
              return multiply_blocks(p.weights->type, rows_of(p.weights),
                                     blocks + std::int64_t{t0} * (id / 32), at(out, t0, od), {n, od, id},
                                     stream);
            });
          }
          finish(p, out, nt, stream);
        }
        return;
      }
      case Kernel::mmq_tiles: {
        const unsigned char* planes = planes_of_prompt(acts, nt, id, ready, stream);
        for (const Product& p : group) {
          launches_(note(chosen, {{p.weights}}, nt), stream, [&] {
            return multiply_mmq(p.weights->type, tiles_of(p.weights), planes, p.out,
                                {nt, p.weights->rows(), id}, epilogue(p, nullptr), workspace_.data(), stream,
                                launches_.overlap());
          });
        }
        return;
      }
      case Kernel::gemm_tiles_wgmma:
      case Kernel::gemm_tiles_mma: {
        const __half* x = halves(acts, nt, id, HalfOrder::tiles, ready, stream);
        const float* scale = acts.gated ? gated_scale_.data() : row_scale_.data();
        by_parts(chosen, group, nt, nt, [&](std::span<const Product> some, int, int) {
          std::vector<GemmTilesPart> parts;
          for (const Product& p : some) {
            parts.push_back(
                {tiles_of(p.weights), p.out, static_cast<int>(p.weights->rows()), epilogue(p, scale)});
          }
          launches_(note_of(chosen, some, nt), stream, [&] {
            return multiply_tiles(chosen.kernel == Kernel::gemm_tiles_wgmma, some[0].weights->type, parts, x,
                                  nt, id, workspace_.data(), flags_.data(), stream, launches_.overlap());
          });
        });
        return;
      }
      case Kernel::gemm_f16_wgmma:
      case Kernel::gemm_f16_mma: {
        const __half* x = halves(acts, nt, id, HalfOrder::plain, ready, stream);
        for (const Product& p : group) {
          const DeviceWeight& w = weights_.at(p.weights);
          const __half* weights =
              w.halves.size() > 0 ? w.halves.data() : reinterpret_cast<const __half*>(w.rows.data());
          launches_(note(chosen, {{p.weights}}, nt), stream, [&] {
            return multiply_f16(chosen.kernel == Kernel::gemm_f16_wgmma, f16_tile(), weights, x, p.out,
                                {nt, p.weights->rows(), id}, epilogue(p, row_scale_.data()),
                                workspace_.data(), stream, launches_.overlap());
          });
        }
        return;
      }
      case Kernel::f32_matmul: {
        const float* x = floats(acts, nt, id, ready, stream);
        for (const Product& p : group) multiply_floats(p, x, nt, stream);
        return;
      }
    }
  }

  /// f(products, first token, tokens) for up to three products and `most` tokens at a time.
  template <class F>
  static void by_parts(const dispatch::Gate&, std::span<const Product> group, int nt, int most, F&& f) {
    constexpr std::size_t kMost = std::min(kMostMmvqParts, kMostGemmTilesParts);
    for (int t0 = 0; t0 < nt; t0 += most) {
      for (std::size_t i = 0; i < group.size(); i += kMost) {
        f(group.subspan(i, std::min(kMost, group.size() - i)), t0, std::min(nt - t0, most));
      }
    }
  }
  [[nodiscard]] LaunchNote note_of(const dispatch::Gate& g, std::span<const Product> some, int nt) const {
    std::array<const gguf::Tensor*, 3> weights{};
    for (std::size_t i = 0; i < some.size(); ++i) weights[i] = some[i].weights;
    return note(g, weights, nt);
  }
  static float* at(float* out, int t0, int od) {
    return out + static_cast<std::size_t>(t0) * static_cast<std::size_t>(od);
  }
  [[nodiscard]] GemmEpilogue epilogue(const Product& p, const float* row_scale) const {
    return {floats_of(p.bias), p.add ? p.out : nullptr, row_scale};
  }
  /// Bias and residual of a kernel that has no epilogue.
  void finish(const Product& p, float* out, int nt, Stream& stream) {
    const auto od = static_cast<int>(p.weights->rows());
    if (p.bias != nullptr) {
      launches_({"add_bias", {}, nt, od}, stream,
                [&] { return launch_add_bias(out, floats_of(p.bias), nt, od, stream, launches_.overlap()); });
    }
    if (p.add) {
      launches_({"add_residual", {}, nt, od}, stream, [&] {
        return launch_add_residual(p.out, out, std::int64_t{nt} * od, stream, launches_.overlap());
      });
    }
  }

  // Forms of activations. Each is made by the first product that takes it.

  const float* floats(const ProductActs& acts, int nt, int id, Converted& ready, Stream& stream) {
    if (acts.norm == nullptr) return acts.rows;
    if (!ready.normed) {
      launches_({"rms_norm", {}, nt, id}, stream, [&] {
        return launch_rms_norm(acts.rows, floats_of(acts.norm), normed_.data(), nt, id, model_.hp.rms_epsilon,
                               stream, launches_.overlap());
      });
      ready.normed = true;
    }
    return normed_.data();
  }
  const unsigned char* tile_planes(const ProductActs& acts, int nt, int id, Converted& ready,
                                   Stream& stream) {
    if (!ready.planes) {
      launches_({"quantize_tile_acts", {}, nt, id}, stream, [&] {
        return tile_acts::launch_quantize(acts.rows, floats_of(acts.norm), model_.hp.rms_epsilon,
                                          planes_.data(), nt, id, stream, launches_.overlap());
      });
      ready.planes = true;
    }
    return planes_.data();
  }
  /// The planes of the group of eight that begins with token t0.
  static const unsigned char* group_of(const unsigned char* planes, int t0, int id) {
    return planes + static_cast<std::size_t>(t0 / tile_acts::kMostTokens) *
                        tile_acts::group_bytes(tile_acts::kMostTokens, id);
  }
  const BlockQ8Pad40* int8_blocks(const ProductActs& acts, int nt, int id, Converted& ready, Stream& stream) {
    const float* x = floats(acts, nt, id, ready, stream);
    if (!ready.blocks) {
      launches_({"quantize_q8_pad40", {}, nt, id}, stream,
                [&] { return launch_quantize_q8_pad40(x, blocks_.data(), nt, id, stream); });
      ready.blocks = true;
    }
    return blocks_.data();
  }
  const unsigned char* planes_of_prompt(const ProductActs& acts, int nt, int id, Converted& ready,
                                        Stream& stream) {
    const float* x = floats(acts, nt, id, ready, stream);
    if (!ready.mmq_planes) {
      launches_({"quantize_q8_pad40_t", {}, nt, id}, stream,
                [&] { return planes_for_mmq(x, mmq_planes_.data(), nt, id, stream); });
      ready.mmq_planes = true;
    }
    return mmq_planes_.data();
  }
  const __half* halves(const ProductActs& acts, int nt, int id, HalfOrder order, Converted& ready,
                       Stream& stream) {
    if (acts.gated) return gated_.data();
    if (!ready.halves || ready.order != order) {
      launches_({"acts_f16", {}, nt, id}, stream, [&] {
        return launch_acts_f16(acts.rows, floats_of(acts.norm), model_.hp.rms_epsilon, halves_.data(),
                               row_scale_.data(), nt, id, order, stream, launches_.overlap());
      });
      ready.halves = true;
      ready.order = order;
    }
    return halves_.data();
  }

  const Model& model_;
  const EngineOptions& options_;
  DeviceInfo device_;
  int logits_rows_;
  Launches& launches_;
  Scratch scratch_;
  std::map<const gguf::Tensor*, Forms> forms_;
  std::map<const gguf::Tensor*, DeviceWeight> weights_;
  Buffer<unsigned char> planes_, mmq_planes_;
  Buffer<BlockQ8Pad40> blocks_;
  Buffer<__half> halves_, gated_;
  Buffer<float> row_scale_, gated_scale_, normed_, added_, workspace_;
  Buffer<unsigned> flags_;
};

}  // namespace ladder::qwen
