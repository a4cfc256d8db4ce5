// The engine on the CPU: the twins of kernels/cpu. Weights are multiplied where the file's map has them,
// packed.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "chapters/09-qwen/engine.hpp"
#include "chapters/09-qwen/interrupt.hpp"
#include "kernels/cpu/gemm_int8.hpp"
#include "kernels/cpu/quant_matmul.hpp"
#include "kernels/cpu/thread_pool.hpp"
#include "kernels/cpu/transformer.hpp"
#include "kernels/quant/dequantize.hpp"

namespace ladder::qwen {
namespace {

constexpr int kMostLogitsRows = 64;  ///< rows that are normalised at once for their logits

/// Every tensor that a forward pass reads whole, once each (a tied output is the embedding).
std::vector<const gguf::Tensor*> used_tensors(const Model& model) {
  std::vector<const gguf::Tensor*> all;
  for (const Layer& l : model.layers) {
    for (const gguf::Tensor* t :
         {l.attn_norm, l.attn_q, l.attn_k, l.attn_v, l.attn_q_bias, l.attn_k_bias, l.attn_v_bias,
          l.attn_output, l.ffn_norm, l.ffn_gate, l.ffn_up, l.ffn_down}) {
      all.push_back(t);
    }
  }
  all.push_back(model.output_norm);
  all.push_back(model.output);
  return all;
}

/// Brings the weights into memory, so that the first token does not wait for the disk page by page.
void prefault(const Model& model, const std::function<void(std::uint64_t, std::uint64_t)>& on_progress) {
  constexpr std::size_t kPiece = std::size_t{16} << 20;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::vector<const gguf::Tensor*> tensors = used_tensors(model);
  std::uint64_t total = 0, done = 0;
  for (const gguf::Tensor* t : tensors) total += t->data.size();
  for (const gguf::Tensor* t : tensors) {
    for (std::size_t at = 0; at < t->data.size(); at += kPiece) {
      const auto piece = t->data.subspan(at, std::min(kPiece, t->data.size() - at));
      const auto begin = reinterpret_cast<std::uintptr_t>(piece.data()) / page * page;
      const auto end = reinterpret_cast<std::uintptr_t>(piece.data() + piece.size());
      // Hints: a system that does not know them reads the pages later, as they are needed.
#if defined(MADV_POPULATE_READ)
      if (::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_READ) != 0)
#endif
      {
        (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_WILLNEED);
      }
      done += piece.size();
      if (on_progress) on_progress(done, total);
    }
  }
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const auto colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "CPU";
}

/// Which kernels multiply, for people.
std::string kernels_of(const Model& model, bool exact, int threads) {
  std::set<WeightType> types = {model.output->type};
  for (const Layer& l : model.layers) {
    for (const gguf::Tensor* t :
         {l.attn_q, l.attn_k, l.attn_v, l.attn_output, l.ffn_gate, l.ffn_up, l.ffn_down}) {
      types.insert(t->type);
    }
  }
  std::string integers, floats;
  for (const WeightType t : types) {
    std::string& names = cpu::uses_int8(t) && !exact ? integers : floats;
    names.append(names.empty() ? "" : ", ").append(info(t).name);
  }
  std::string text;
  if (!integers.empty()) text += integers + " x int8 (" + cpu::quant_int8_instruction() + ")";
  if (!floats.empty()) text += (text.empty() ? "" : "; ") + floats + " x f32";
  return text + "; " + std::to_string(threads) + (threads == 1 ? " thread" : " threads");
}

class CpuEngine final : public Engine {
 public:
  CpuEngine(const Model& model, const EngineOptions& asked)
      : model_(model),
        options_(completed(asked, model.hp)),
        heads_{model.hp.head_count, model.hp.head_count_kv, model.hp.head_dim()},
        pool_(options_.threads) {
    const Hyperparameters& hp = model_.hp;
    caches_.reserve(model_.layers.size());
    for (std::size_t i = 0; i < model_.layers.size(); ++i) {
      caches_.emplace_back(heads_, options_.context, options_.kv_f16);
    }
    const auto rows = static_cast<std::size_t>(options_.batch),
               d = static_cast<std::size_t>(hp.embedding_length);
    const auto kv = static_cast<std::size_t>(hp.kv_length()),
               ff = static_cast<std::size_t>(hp.feed_forward_length);
    const auto half = static_cast<std::size_t>(heads_.head_dim / 2);
    x_.resize(rows * d);
    normed_.resize(rows * d);
    q_.resize(rows * d);
    k_.resize(rows * kv);
    v_.resize(rows * kv);
    mixed_.resize(rows * d);
    added_.resize(rows * d);
    gate_.resize(rows * ff);
    up_.resize(rows * ff);
    cosines_.resize(static_cast<std::size_t>(options_.context) * half);
    sines_.resize(cosines_.size());
    pool_.parallel_for(options_.context, 256, [&](long long begin, long long end, int) {
      for (long long p = begin; p < end; ++p) {
        const std::size_t at = static_cast<std::size_t>(p) * half;
        rope_row(hp, static_cast<int>(p), std::span(cosines_).subspan(at, half),
                 std::span(sines_).subspan(at, half));
      }
    });
    prefault(model_, options_.on_progress);
    info_.executor = "cpu";
    info_.device = cpu_name();
    info_.kernels = kernels_of(model_, options_.exact, pool_.size());
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
      const bool last = done + rows == n;
      const bool wanted = !logits.empty() && (every_row || last);
      // Of the last layer, only rows whose logits are wanted are needed behind attention.
      const int keep = !wanted ? 0 : every_row ? rows : 1;
      forward(tokens.subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(rows)),
              position_ + done, keep);
      if (wanted) {
        compute_logits(rows - keep, keep,
                       every_row ? logits.subspan(static_cast<std::size_t>(done) * vocabulary) : logits);
      }
    }
    position_ += n;
  }

  void truncate(int position) override {
    check_truncate(*this, position);
    position_ = position;
  }

 private:
  [[nodiscard]] bool any_int8(std::span<const cpu::Product> products) const {
    return !options_.exact && std::any_of(products.begin(), products.end(),
                                          [](const cpu::Product& p) { return cpu::uses_int8(p.type); });
  }
  static const float* floats_of(const gguf::Tensor* t) {
    return reinterpret_cast<const float*>(t->data.data());
  }
  static cpu::Product product(const gguf::Tensor* w, float* out) {
    return {w->type, w->data.data(), w->rows(), out};
  }

  /// Several matrices times the same rows.
  void multiply(std::span<const cpu::Product> products, const float* acts, int nt, long long id) {
    const bool round = any_int8(products);
    // The same bits either way: only what is worth keeping for the next tokens differs.
    if (round && nt >= cpu::kInt8GemmTokens) {
      gemm_.quantize(acts, nt, id, pool_);
      return gemm_.multiply(products, acts, nt, id, pool_);
    }
    if (round) rounded_.quantize(acts, nt, id, pool_);
    cpu::multiply(products, acts, round ? &rounded_ : nullptr, nt, id, pool_);
  }
  /// Several matrices times rows that make(token, where) makes: where they are to lie, or in place.
  /// @param acts [nt][id] where they are to lie, if they are needed as floats
  template <class Make>
  void multiply_made(std::span<const cpu::Product> products, float* acts, int nt, long long id, Make&& make) {
    const bool all_int8 = std::all_of(products.begin(), products.end(),
                                      [](const cpu::Product& p) { return cpu::uses_int8(p.type); });
    if (!options_.exact && all_int8 && nt >= cpu::kInt8GemmTokens) {
      gemm_.quantize(make, nt, id, pool_);
      return gemm_.multiply(products, nullptr, nt, id, pool_);
    }
    pool_.parallel_for(nt, 4, [&](long long begin, long long end, int) {
      for (long long t = begin; t < end; ++t) make(t, acts + t * id);
    });
    multiply(products, acts, nt, id);
  }
  void multiply(const gguf::Tensor* w, const float* acts, float* out, int nt) {
    const cpu::Product one = product(w, out);
    multiply({&one, 1}, acts, nt, w->row_length());
  }

  /// A forward pass of up to `batch` tokens at positions first, first + 1, ...
  /// @param keep last rows of x_ that are wanted of the last layer; 0 fills the KV cache only
  void forward(std::span<const std::int32_t> tokens, int first, int keep) {
    const Hyperparameters& hp = model_.hp;
    const int d = hp.embedding_length, ff = hp.feed_forward_length, kv = hp.kv_length();
    int nt = static_cast<int>(tokens.size());
    const std::size_t embedding_bytes = row_bytes(model_.token_embd->type, d);
    pool_.parallel_for(nt, 16, [&](long long begin, long long end, int) {
      for (long long t = begin; t < end; ++t) {
        const auto id = static_cast<std::size_t>(tokens[static_cast<std::size_t>(t)]);
        dequantize_row(model_.token_embd->type, model_.token_embd->data.data() + id * embedding_bytes,
                       x_.data() + t * d, d);
      }
    });
    const float* cosines = cosines_.data() + static_cast<std::ptrdiff_t>(first) * (heads_.head_dim / 2);
    const float* sines = sines_.data() + static_cast<std::ptrdiff_t>(first) * (heads_.head_dim / 2);
    for (std::size_t i = 0; i < model_.layers.size(); ++i) {
      if (nt > 1) Interrupt::check();  // a piece of a prompt can take a while
      const Layer& l = model_.layers[i];
      // 1. Attention: x += output . attention(rope(q), rope(k), v), all of norm(x).
      const cpu::Product qkv[] = {product(l.attn_q, q_.data()), product(l.attn_k, k_.data()),
                                  product(l.attn_v, v_.data())};
      multiply_made(qkv, normed_.data(), nt, d, [&](long long t, float* out) {
        cpu::rms_norm(x_.data() + t * d, floats_of(l.attn_norm), out, d, hp.rms_epsilon);
        return out;
      });
      cpu::add_bias(q_.data(), floats_of(l.attn_q_bias), nt, d, pool_);
      cpu::add_bias(k_.data(), floats_of(l.attn_k_bias), nt, kv, pool_);
      cpu::add_bias(v_.data(), floats_of(l.attn_v_bias), nt, kv, pool_);
      cpu::rope(q_.data(), cosines, sines, nt, heads_.heads, heads_.head_dim, pool_);
      cpu::rope(k_.data(), cosines, sines, nt, heads_.kv_heads, heads_.head_dim, pool_);
      caches_[i].store(k_.data(), v_.data(), nt, first, pool_);

      float* x = x_.data();
      const float* q = q_.data();
      int at = first;
      if (i + 1 == model_.layers.size()) {  // nobody asks for the other rows from here on
        if (keep == 0) return;
        const int skipped = nt - keep;
        x += static_cast<std::ptrdiff_t>(skipped) * d;
        q += static_cast<std::ptrdiff_t>(skipped) * d;
        at += skipped;
        nt = keep;
      }
      cpu::attention(q, caches_[i], mixed_.data(), nt, at, attention_, pool_);
      multiply(l.attn_output, mixed_.data(), added_.data(), nt);
      cpu::add_residual(x, added_.data(), static_cast<long long>(nt) * d, pool_);

      // 2. Feed-forward: x += down . (silu(gate) * up), both of norm(x).
      const cpu::Product gate_up[] = {product(l.ffn_gate, gate_.data()), product(l.ffn_up, up_.data())};
      multiply_made(gate_up, normed_.data(), nt, d, [&](long long t, float* out) {
        cpu::rms_norm(x + t * d, floats_of(l.ffn_norm), out, d, hp.rms_epsilon);
        return out;
      });
      const cpu::Product down[] = {product(l.ffn_down, added_.data())};
      multiply_made(down, gate_.data(), nt, ff, [&](long long t, float*) {
        float* gate = gate_.data() + t * ff;
        cpu::swiglu(gate, up_.data() + t * ff, ff);
        return gate;
      });
      cpu::add_residual(x, added_.data(), static_cast<long long>(nt) * d, pool_);
    }
  }

  /// Logits of rows r0 .. r0+rows-1 of x_. @param logits at least [rows][vocabulary]
  void compute_logits(int r0, int rows, std::span<float> logits) {
    const Hyperparameters& hp = model_.hp;
    const auto d = static_cast<std::size_t>(hp.embedding_length);
    for (int done = 0; done < rows; done += kMostLogitsRows) {
      const int now = std::min({kMostLogitsRows, options_.batch, rows - done});
      const float* x = x_.data() + static_cast<std::size_t>(r0 + done) * d;
      const cpu::Product head[] = {
          product(model_.output,
                  logits.data() + static_cast<std::size_t>(done) * static_cast<std::size_t>(hp.vocabulary))};
      multiply_made(head, normed_.data(), now, hp.embedding_length, [&](long long t, float* out) {
        cpu::rms_norm(x + t * hp.embedding_length, floats_of(model_.output_norm), out, hp.embedding_length,
                      hp.rms_epsilon);
        return out;
      });
    }
  }

  const Model& model_;
  EngineOptions options_;
  cpu::Heads heads_;
  cpu::ThreadPool pool_;
  EngineInfo info_;
  int position_ = 0;
  std::vector<cpu::KvCache> caches_;                                       // one a layer
  std::vector<float> cosines_, sines_;                                     // [context][head_dim/2]
  std::vector<float> x_, normed_, q_, k_, v_, mixed_, added_, gate_, up_;  // [batch][...]
  cpu::QuantizedActs rounded_;
  cpu::Int8Gemm gemm_;
  cpu::AttentionScratch attention_;
};

}  // namespace

std::unique_ptr<Engine> make_cpu_engine(const Model& model, const EngineOptions& options) {
  return std::make_unique<CpuEngine>(model, options);
}

}  // namespace ladder::qwen
