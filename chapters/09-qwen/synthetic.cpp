// Random weights are quantized once for each type and row length, into a pool of blocks; every row of a
// tensor is then put together from runs of blocks of the pool, which is a copy and as fast as the disk.
#include "chapters/09-qwen/synthetic.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <map>
#include <numbers>
#include <stdexcept>
#include <thread>

#include "chapters/09-qwen/interrupt.hpp"
#include "chapters/09-qwen/parallel.hpp"
#include "chapters/09-qwen/progress.hpp"
#include "harness/experiment/qwen_shapes.hpp"
#include "kernels/quant/quantize.hpp"

namespace ladder::qwen {

namespace {

// The model that the workbook trains itself; scripts/workbook/tales/shape.py has the same numbers for Python.
constexpr QwenSize kTales = {"tales", 256, 5, 4, 2, 2048, 4096, true};

// Elements of a pool: enough that rows differ, few enough that quantizing them takes no time.
constexpr std::int64_t kPoolElements = std::int64_t{1} << 20;
constexpr std::int64_t kRunBlocks = 8;  // most neighbouring blocks that a row takes from the pool
constexpr std::int64_t kPieceBytes = std::int64_t{1} << 20;  // bytes that a thread makes at once

/// A 64-bit mix of a counter (SplitMix64 by Sebastiano Vigna, public domain).
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}
/// In (0, 1].
double unit(std::uint64_t bits) { return (static_cast<double>(bits >> 11) + 1.0) * 0x1p-53; }

/// Normally distributed number `i` of a seed (Box-Muller).
float normal(std::uint64_t seed, std::uint64_t i) {
  const double radius = std::sqrt(-2.0 * std::log(unit(mix(seed ^ (2 * i)))));
  return static_cast<float>(radius * std::cos(2.0 * std::numbers::pi * unit(mix(seed ^ (2 * i + 1)))));
}

const QwenSize& find_size(std::string_view name) {
  std::string lower, known;
  for (const char c : name) lower += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  for (const QwenSize& s : kQwenSizes) {
    if (lower == s.name) return s;
    known += std::string(s.name) + ", ";
  }
  if (lower == kTales.name) return kTales;
  throw std::invalid_argument("size '" + gguf::shown(name) + "' is not known; allowed are " + known +
                              kTales.name);
}

MixtureModel mixture(const Hyperparameters& hp, bool tied) {
  return {.layers = hp.block_count, .gqa = hp.head_count / hp.head_count_kv, .tied = tied};
}

void set_model_metadata(gguf::Writer& out, const Hyperparameters& hp, const FileType& type,
                        std::string_view name, std::string_view size_label) {
  const auto u32 = [](int v) { return static_cast<std::uint32_t>(v); };
  out.set("general.architecture", std::string_view("qwen2"));
  out.set("general.type", std::string_view("model"));
  out.set("general.name", name);
  out.set("general.size_label", size_label);
  out.set("qwen2.block_count", u32(hp.block_count));
  out.set("qwen2.context_length", u32(hp.context_length));
  out.set("qwen2.embedding_length", u32(hp.embedding_length));
  out.set("qwen2.feed_forward_length", u32(hp.feed_forward_length));
  out.set("qwen2.attention.head_count", u32(hp.head_count));
  out.set("qwen2.attention.head_count_kv", u32(hp.head_count_kv));
  out.set("qwen2.rope.freq_base", hp.rope_base);
  out.set("qwen2.attention.layer_norm_rms_epsilon", hp.rms_epsilon);
  out.set("general.file_type", type.code);
  out.set("general.quantization_version", std::uint32_t{2});
}

/// UTF-8 of a code point below 2^11.
std::string utf8(unsigned code) {
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xc0u | (code >> 6)), static_cast<char>(0x80u | (code & 0x3fu))};
}

/// The characters that stand for the 256 bytes in a byte-level vocabulary (GPT-2's): printable ones for
/// themselves, the others, in order, U+0100 and on.
std::vector<std::string> byte_tokens() {
  std::vector<std::string> tokens;
  unsigned next = 0x100;
  for (unsigned b = 0; b < 256; ++b) {
    const bool itself = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
    tokens.push_back(utf8(itself ? b : next++));
  }
  return tokens;
}

/// A vocabulary by construction: bytes, a space and a letter, two letters, a space and two letters; three
/// control tokens; unused ones.
void set_made_up_vocabulary(gguf::Writer& out, int vocabulary) {
  std::vector<std::string> tokens = byte_tokens(), merges;
  const auto room = static_cast<std::size_t>(vocabulary) - 3;  // the control tokens come last
  const std::string space = tokens[static_cast<unsigned char>(' ')];
  const auto merge = [&](const std::string& left, const std::string& right) {
    if (tokens.size() >= room) return;
    merges.push_back(left + " " + right);
    tokens.push_back(left + right);
  };
  for (char a = 'a'; a <= 'z'; ++a) {
    for (char b = 'a'; b <= 'z'; ++b) merge({a}, {b});
  }
  for (char a = 'a'; a <= 'z'; ++a) merge(space, {a});
  for (char a = 'a'; a <= 'z'; ++a) {
    for (char b = 'a'; b <= 'z'; ++b) merge(space, {a, b});
  }
  std::vector<std::int32_t> types(tokens.size(), 1);  // normal
  const auto first_control = static_cast<std::uint32_t>(tokens.size());
  for (const char* text : {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}) {
    tokens.emplace_back(text);
    types.push_back(3);  // control
  }
  while (tokens.size() < static_cast<std::size_t>(vocabulary)) {
    tokens.push_back("[PAD" + std::to_string(tokens.size()) + "]");
    types.push_back(5);  // unused
  }
  out.set("tokenizer.ggml.model", std::string_view("gpt2"));
  out.set("tokenizer.ggml.pre", std::string_view("qwen2"));
  out.set_strings("tokenizer.ggml.tokens", std::move(tokens));
  gguf::Array array;
  array.element = gguf::ValueType::i32;
  array.count = types.size();
  array.bytes = std::as_bytes(std::span(types));
  out.set("tokenizer.ggml.token_type", array);
  out.set_strings("tokenizer.ggml.merges", std::move(merges));
  out.set("tokenizer.ggml.eos_token_id", first_control + 2);
  out.set("tokenizer.ggml.padding_token_id", first_control);
  out.set("tokenizer.ggml.bos_token_id", first_control);
  out.set("tokenizer.ggml.add_bos_token", false);
}

/// Blocks of one type with weights for rows of one length.
struct Pool {
  std::vector<std::byte> bytes;
  std::int64_t blocks = 0;
};

/// Elements that are quantized together: a multiple of every block size.
constexpr std::int64_t kPoolRow = 4096;

/// kPoolElements normally distributed numbers.
std::vector<float> make_normals(std::uint64_t seed, int threads) {
  std::vector<float> normals(static_cast<std::size_t>(kPoolElements));
  parallel_rows(threads, kPoolElements / kPoolRow, 4, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first * kPoolRow; i < last * kPoolRow; ++i) {
      normals[static_cast<std::size_t>(i)] = normal(seed, static_cast<std::uint64_t>(i));
    }
  });
  return normals;
}

Pool make_pool(WeightType type, std::int64_t id, const std::vector<float>& normals, int threads) {
  const WeightTypeInfo& t = info(type);
  Pool pool;
  pool.blocks = kPoolElements / t.block_elems;
  pool.bytes.resize(static_cast<std::size_t>(pool.blocks * t.block_bytes));
  const float deviation = 1.0f / std::sqrt(static_cast<float>(id));
  const auto row_bytes = static_cast<std::size_t>(kPoolRow / t.block_elems * t.block_bytes);
  parallel_rows(threads, kPoolElements / kPoolRow, 4, [&](std::int64_t first, std::int64_t last) {
    Interrupt::check();
    std::vector<float> values(kPoolRow);
    for (std::int64_t r = first; r < last; ++r) {
      const auto* from = normals.data() + r * kPoolRow;
      std::transform(from, from + kPoolRow, values.begin(), [deviation](float x) { return deviation * x; });
      quantize_row(type, values.data(), pool.bytes.data() + static_cast<std::size_t>(r) * row_bytes,
                   kPoolRow);
    }
  });
  return pool;
}

/// Fills a matrix with runs of blocks of the pool. The first run of a row begins at another block in each row
/// (as far as the pool goes), the others anywhere.
void fill_matrix(std::span<std::byte> out, const Pool& pool, WeightType type, std::int64_t id,
                 std::uint64_t seed, int threads) {
  const WeightTypeInfo& t = info(type);
  // Types of one element would make runs of 8 elements: take at least 256 elements at a time.
  const std::int64_t run = std::max<std::int64_t>(kRunBlocks, 256 / t.block_elems);
  const std::int64_t blocks = id / t.block_elems, starts = pool.blocks - run;
  const std::int64_t row_bytes = blocks * t.block_bytes;
  const std::int64_t rows = static_cast<std::int64_t>(out.size()) / row_bytes;
  const auto first_start = static_cast<std::int64_t>(seed % static_cast<std::uint64_t>(starts));
  parallel_rows(threads, rows, std::max<std::int64_t>(1, kPieceBytes / row_bytes),
                [&](std::int64_t first, std::int64_t last) {
                  Interrupt::check();
                  for (std::int64_t r = first; r < last; ++r) {
                    for (std::int64_t b = 0; b < blocks; b += run) {
                      const std::uint64_t random =
                          mix(mix(seed ^ static_cast<std::uint64_t>(r)) ^ static_cast<std::uint64_t>(b));
                      const std::int64_t start =
                          b == 0 ? (first_start + r) % starts
                                 : static_cast<std::int64_t>(random % static_cast<std::uint64_t>(starts));
                      std::memcpy(out.data() + r * row_bytes + b * t.block_bytes,
                                  pool.bytes.data() + start * t.block_bytes,
                                  static_cast<std::size_t>(std::min(run, blocks - b) * t.block_bytes));
                    }
                  }
                });
}

void fill_vector(std::span<std::byte> out, bool norm, std::uint64_t seed) {
  for (std::size_t i = 0; i < out.size() / sizeof(float); ++i) {
    const float value = norm ? 1.0f : 0.05f * normal(seed, i);
    std::memcpy(out.data() + i * sizeof(float), &value, sizeof value);
  }
}

}  // namespace

Hyperparameters size_by_name(std::string_view name) {
  const QwenSize& s = find_size(name);
  Hyperparameters hp;
  hp.block_count = s.layers;
  hp.context_length = &s == &kTales ? 2048 : 32768;
  hp.embedding_length = s.d_model;
  hp.feed_forward_length = s.d_ff;
  hp.head_count = s.heads;
  hp.head_count_kv = s.kv_heads;
  hp.vocabulary = s.vocab;
  hp.rms_epsilon = 1e-6f;
  hp.rope_base = 1e6f;
  return hp;
}

bool tied_by_name(std::string_view name) { return find_size(name).tied; }

std::vector<PlannedTensor> plan(const Hyperparameters& hp, const FileType& type, bool tied) {
  const std::int64_t d = hp.embedding_length, kv = hp.kv_length(), ff = hp.feed_forward_length,
                     v = hp.vocabulary;
  std::vector<PlannedTensor> tensors;
  const auto add = [&](std::string name, std::vector<std::int64_t> ne) {
    const WeightType t = tensor_type(type, name, ne[0], static_cast<unsigned>(ne.size()), mixture(hp, tied));
    tensors.push_back({std::move(name), t, std::move(ne)});
  };
  if (!tied) add("output.weight", {d, v});
  add("token_embd.weight", {d, v});
  for (int layer = 0; layer < hp.block_count; ++layer) {
    const std::string p = "blk." + std::to_string(layer) + ".";
    add(p + "attn_norm.weight", {d});
    add(p + "ffn_down.weight", {ff, d});
    add(p + "ffn_gate.weight", {d, ff});
    add(p + "ffn_up.weight", {d, ff});
    add(p + "ffn_norm.weight", {d});
    add(p + "attn_k.bias", {kv});
    add(p + "attn_k.weight", {d, kv});
    add(p + "attn_output.weight", {d, d});
    add(p + "attn_q.bias", {d});
    add(p + "attn_q.weight", {d, d});
    add(p + "attn_v.bias", {kv});
    add(p + "attn_v.weight", {d, kv});
  }
  add("output_norm.weight", {d});
  return tensors;
}

std::vector<std::byte> planned_header(const Hyperparameters& hp, const FileType& type, bool tied,
                                      std::string_view name) {
  gguf::Writer out;
  set_model_metadata(out, hp, type, name, name);
  for (PlannedTensor& t : plan(hp, type, tied)) out.add(std::move(t.name), t.type, std::move(t.ne), {});
  return out.header();
}

std::uint64_t write_synthetic(const std::filesystem::path& path, const SyntheticModel& model) {
  Hyperparameters hp = size_by_name(model.size);
  if (!model.layers.empty()) hp.block_count = static_cast<int>(model.layers.size());
  if (model.type == nullptr) throw std::invalid_argument("no file type; allowed are " + file_type_names());
  if (model.threads < 0) {
    throw std::invalid_argument("threads is " + std::to_string(model.threads) +
                                "; allowed are 0 (one for each CPU) and more");
  }
  const int threads =
      model.threads > 0 ? model.threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  std::string label = find_size(model.size).name;
  if (label.back() == 'b') label.back() = 'B';

  gguf::Writer out;
  set_model_metadata(out, hp, *model.type, "Random weights in the shape of " + label, label);
  if (model.vocabulary != nullptr) {
    const auto tokens = model.vocabulary->get<const gguf::Array*>("tokenizer.ggml.tokens")->count;
    if (tokens > static_cast<std::uint64_t>(hp.vocabulary)) {
      throw std::invalid_argument(model.vocabulary->name() + " has " + std::to_string(tokens) +
                                  " tokens; allowed for size " + label + " are up to " +
                                  std::to_string(hp.vocabulary));
    }
    for (const auto& [key, value] : model.vocabulary->metadata()) {
      if (key.starts_with("tokenizer.")) out.set(std::string(key), value);
    }
  } else {
    set_made_up_vocabulary(out, hp.vocabulary);
  }

  const std::vector<float> normals = make_normals(mix(model.seed), threads);
  std::map<std::pair<WeightType, std::int64_t>, Pool> pools;
  std::uint64_t number = 0;
  for (PlannedTensor& t : plan(hp, *model.type, model.tied)) {
    const std::uint64_t seed = mix(mix(model.seed) ^ ++number);
    const std::int64_t id = t.ne[0];
    const bool matrix = t.ne.size() > 1, norm = t.name.ends_with("_norm.weight");
    if (const int layer = layer_of(t.name); matrix && layer >= 0 && !model.layers.empty()) {
      t.type = fitting_type(model.layers[static_cast<std::size_t>(layer)], id);
    }
    const WeightType type = t.type;
    out.add(std::move(t.name), type, std::move(t.ne),
            [&, seed, id, matrix, norm, type](std::span<std::byte> bytes) {
              if (!matrix) return fill_vector(bytes, norm, seed);
              Pool& pool = pools[{type, id}];
              if (pool.blocks == 0) pool = make_pool(type, id, normals, threads);
              fill_matrix(bytes, pool, type, id, seed, threads);
            });
  }
  std::optional<ProgressBar> bar;
  if (model.progress) bar.emplace("writing");
  std::uint64_t bytes = 0;
  out.write(path, [&](std::uint64_t done, std::uint64_t all) {
    bytes = all;
    if (bar) bar->update(done, all);
  });
  return bytes;
}

}  // namespace ladder::qwen
