// Chapter 08: what a layer does between its matmuls: normalisation, rotation, attention, gates, residuals, and the choice
// of a token at the end. None of it is a product of matrices with weights; operations.hpp checks, times and counts it.
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/08-around-the-matmul/around_the_matmul.cu
//        kernels/quant/quantize_acts.cpp -o around_the_matmul
#include "chapters/08-around-the-matmul/operations.hpp"
#include "kernels/elementwise/add_bias.cuh"
#include "kernels/elementwise/add_residual.cuh"
#include "kernels/elementwise/argmax.cuh"
#include "kernels/elementwise/rms_norm.cuh"
#include "kernels/elementwise/sample.cuh"
#include "kernels/elementwise/swiglu.cuh"

namespace ladder::chapter08 {

/// The operations of this chapter, in the order in which a token meets them.
inline std::vector<Operation> operations() {
  std::vector<Operation> all;
  const auto add = [&](const char* id, const char* title, const char* source) -> Operation& {
    Operation o;
    o.id = id, o.title = title, o.source = source;
    all.push_back(std::move(o));
    return all.back();
  };

  Operation& norm =
      add("rms_norm", "a row divided by its root mean square", "kernels/elementwise/rms_norm.cuh#rms_norm");
  norm.sizes = [](const Point& p) {
    const std::size_t row = count(p.size->d_model);
    return Sizes{.x = count(p.nt) * row, .w = row, .out = count(p.nt) * row};
  };
  norm.flop = [](const Point& p) { return 4.0 * p.nt * p.size->d_model; };
  norm.run = [](const Point& p, const View& v, Stream& s) {
    return launch_rms_norm(v.x, v.w, v.out, p.nt, p.size->d_model, kEpsilon, s);
  };
  norm.check = check_rms_norm;

  Operation& bias =
      add("add_bias", "a vector added to every row", "kernels/elementwise/add_bias.cuh#add_bias");
  bias.sizes = [](const Point& p) {
    const std::size_t row = count(p.size->d_model);
    return Sizes{.x = count(p.nt) * row, .w = row, .x_twice = true};
  };
  bias.flop = [](const Point& p) { return 1.0 * p.nt * p.size->d_model; };
  bias.run = [](const Point& p, const View& v, Stream& s) {
    return launch_add_bias(v.x, v.w, p.nt, p.size->d_model, s);
  };
  bias.check = check_add_bias;

  Operation& rope = add("rope_store", "queries and keys rotated, keys and values stored",
                        "kernels/elementwise/rope_store.cuh#rope_store");
  rope.attends = true;
  rope.sizes = [](const Point& p) {
    Sizes s = attention_sizes(p, true);
    s.out = 0, s.x_twice = true, s.reads_cache = false;
    return s;
  };
  rope.flop = [](const Point& p) { return 3.0 * p.nt * (p.heads().q_length() + p.heads().kv_length()); };
  rope.run = [](const Point& p, const View& v, Stream& s) {
    return launch_rope_store(v.x, v.k, v.v, v.cosines, v.sines, v.keys, v.values, p.nt, v.position, p.heads(),
                             s);
  };
  rope.check = check_rope_store;

  Operation& f32 = add("attention_f32", "attention, a block for each token and head",
                       "kernels/attention/attention_f32.cuh#attention_f32");
  f32.attends = true;
  f32.most_rows = 512;  // of tokens: it reads the cache again for each
  f32.sizes = [](const Point& p) { return attention_sizes(p, false); };
  f32.flop = attention_flop;
  f32.run = [](const Point& p, const View& v, Stream& s) {
    return launch_attention_f32<__half>(v.x, v.keys, v.values, v.out, p.nt, v.position, p.heads(), s);
  };
  f32.check = check_attention<AttentionKernel::f32>;

  Operation& two =
      add("attention_two_launches", "rope_store, then attention_f32: one token in two launches",
          "kernels/attention/attention_f32.cuh#attention_f32,kernels/elementwise/rope_store.cuh#rope_store");
  two.attends = two.one_token = true;
  two.sizes = [](const Point& p) { return attention_sizes(p, true); };
  two.flop = attention_flop;
  two.run = [](const Point& p, const View& v, Stream& s) {
    Status rotated =
        launch_rope_store(v.x, v.k, v.v, v.cosines, v.sines, v.keys, v.values, 1, v.position, p.heads(), s);
    if (!rotated.ok()) return rotated;
    return launch_attention_f32<__half>(v.x, v.keys, v.values, v.out, 1, v.position, p.heads(), s);
  };
  two.check = check_attention<AttentionKernel::two_launches>;
  two.two_launches = true;

  // Without clusters, for what they are worth; then as it is used.
#define LADDER_DECODE "kernels/attention/attention_decode.cuh#"
  for (const bool clusters : {false, true}) {
    Operation& decode =
        add(clusters ? "attention_decode" : "attention_decode_blocks",
            clusters ? "one token: rotation, store, attention by clusters of blocks or by blocks, and int8 "
                       "planes in one launch"
                     : "the same without clusters: every block sends its piece to others",
            LADDER_DECODE
            "attention_decode," LADDER_DECODE "runs," LADDER_DECODE
            "pieces,"
            "kernels/attention/decode_tile.cuh#decode_keys,kernels/attention/decode_tile.cuh#decode_values");
    decode.attends = decode.one_token = true;
    decode.unit = MathUnit::mma_f16;
    decode.sizes = [](const Point& p) {
      Sizes s = attention_sizes(p, true);
      s.planes = tile_acts::bytes(1, p.heads().q_length());
      return s;
    };
    decode.flop = attention_flop;
    decode.workspace = [](const Point& p, int sms) {
      return attention_decode_workspace(p.heads(), p.depth, sms);
    };
    decode.run = clusters ? run_decode<true> : run_decode<false>;
    decode.check = check_attention<AttentionKernel::decode>;
    if (!clusters) decode.needs_clusters = true;
  }
#undef LADDER_DECODE

  Operation& prefill = add("attention_prefill", "a prompt's attention on tensor cores",
                           "kernels/attention/attention_prefill.cuh#attention_prefill");
  prefill.attends = true;
  prefill.unit = MathUnit::mma_f16;
  prefill.sizes = [](const Point& p) { return attention_sizes(p, false); };
  prefill.flop = attention_flop;
  prefill.workspace = [](const Point& p, int sms) { return attention_prefill_workspace(p.heads(), sms); };
  prefill.run = [](const Point& p, const View& v, Stream& s) {
    return launch_attention_prefill(v.x, v.keys, v.values, v.out, p.nt, v.position, p.heads(), s, false,
                                    v.workspace);
  };
  prefill.check = check_attention<AttentionKernel::prefill>;

  Operation& residual =
      add("add_residual", "a row added to the stream", "kernels/elementwise/add_residual.cuh#add_residual");
  residual.sizes = [](const Point& p) {
    const std::size_t rows = count(p.nt) * count(p.size->d_model);
    return Sizes{.x = rows, .y = rows, .x_twice = true};
  };
  residual.flop = [](const Point& p) { return 1.0 * p.nt * p.size->d_model; };
  residual.run = [](const Point& p, const View& v, Stream& s) {
    return launch_add_residual(v.x, v.y, static_cast<long long>(p.nt) * p.size->d_model, s);
  };
  residual.check = check_add_residual;

  Operation& gate = add("swiglu", "silu of the gate times up", "kernels/elementwise/swiglu.cuh#swiglu");
  gate.sizes = [](const Point& p) {
    const std::size_t rows = count(p.nt) * count(p.size->d_ff);
    return Sizes{.x = rows, .y = rows, .out = rows};
  };
  gate.flop = [](const Point& p) { return 5.0 * p.nt * p.size->d_ff; };
  gate.run = [](const Point& p, const View& v, Stream& s) {
    return launch_swiglu(v.x, v.y, v.out, static_cast<long long>(p.nt) * p.size->d_ff, s);
  };
  gate.check = check_swiglu;

  Operation& choice = add("argmax", "the token of the largest logit",
                          "kernels/elementwise/argmax.cuh#argmax,kernels/elementwise/argmax.cuh#argmax_key");
  choice.most_rows = 8;
  choice.sizes = [](const Point& p) {
    return Sizes{.x = count(p.nt) * count(p.size->vocab), .ids = count(p.nt)};
  };
  choice.flop = [](const Point& p) { return 1.0 * p.nt * p.size->vocab; };
  choice.workspace = [](const Point& p, int) { return argmax_workspace(p.nt); };
  choice.run = [](const Point& p, const View& v, Stream& s) {
    return launch_argmax(v.x, v.ids, p.nt, p.size->vocab, v.workspace, s);
  };
  choice.check = check_argmax;

  Operation& drawn = add("sample_token", "a token drawn among the most probable",
                         "kernels/elementwise/sample.cuh#select,kernels/elementwise/sample.cuh#draw,kernels/"
                         "elementwise/sample.cuh#sample");
  drawn.draws = true;
  drawn.most_rows = 8;
  drawn.sizes = choice.sizes;
  drawn.flop = choice.flop;
  drawn.workspace = [](const Point& p, int) { return sample_workspace(p.nt); };
  drawn.run = [](const Point& p, const View& v, Stream& s) {
    return launch_sample(v.x, v.ids, v.position, kSample, p.nt, p.size->vocab, v.workspace, s);
  };
  drawn.check = check_sample;
  return all;
}

}  // namespace ladder::chapter08

#ifndef LADDER_NO_MAIN
int main(int argc, char** argv) {
  return ladder::chapter08::main_of_chapter(ladder::chapter08::operations(), argc, argv);
}
#endif
