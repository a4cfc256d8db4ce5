#include "chapters/09-qwen/census.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ostream>
#include <stdexcept>

#include "harness/experiment/json.hpp"

namespace ladder::qwen {

namespace {

/// printf into a string.
template <class... Args>
std::string text(const char* format, Args... args) {
  char buffer[256];
  std::snprintf(buffer, sizeof buffer, format, args...);
  return buffer;
}

std::string json_list(const std::vector<std::string>& items) {
  std::string list = "[";
  for (const std::string& item : items) list += (list.size() > 1 ? ", " : "") + item;
  return list + "]";
}

std::string megabytes(std::int64_t bytes) { return text("%.1f MB", static_cast<double>(bytes) / 1e6); }

}  // namespace

Census census(const Model& model, std::span<const Bandwidth> devices, int context) {
  if (context < 0 || context > model.hp.context_length) {
    throw std::invalid_argument("context is " + std::to_string(context) + " tokens; allowed are 0 to " +
                                std::to_string(model.hp.context_length));
  }
  Census c;
  c.name = model.name;
  c.size_label = model.size_label;
  c.file_type = model.file_type;
  c.hp = model.hp;
  c.tied = model.tied;
  c.parts = model.file->parts();
  c.file_bytes = model.file->bytes();
  c.parameters = model.parameters();
  c.tensor_bytes = model.tensor_bytes();
  c.bytes_per_token = model.bytes_per_token();
  // A key and a value of every layer: kv_length elements each.
  c.kv_bytes_f32 = std::int64_t{2} * model.hp.block_count * model.hp.kv_length() * 4;
  c.kv_bytes_f16 = c.kv_bytes_f32 / 2;
  c.context = context;
  for (const WeightTypeInfo& type : kWeightTypes) {
    Census::Type row{.type = type.type};
    for (const gguf::Tensor& t : model.file->tensors()) {
      if (t.type != type.type) continue;
      ++row.tensors;
      row.elements += t.elements();
      row.bytes += t.bytes;
    }
    if (row.tensors > 0) c.types.push_back(row);
  }
  std::stable_sort(c.types.begin(), c.types.end(),
                   [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  const double bytes = static_cast<double>(c.bytes_per_token) +
                       static_cast<double>(context) * static_cast<double>(c.kv_bytes_f16);
  for (const Bandwidth& device : devices) {
    if (!(std::isfinite(device.gbps) && device.gbps > 0)) {
      throw std::invalid_argument("the bandwidth of " + device.name + " is " + text("%g", device.gbps) +
                                  " GB/s; allowed are positive numbers");
    }
    c.ceilings.push_back({device.name, device.gbps, device.gbps * 1e9 / bytes});
  }
  return c;
}

void print_text(std::ostream& out, const Census& c) {
  out << c.name << ": qwen2 " << c.size_label << ", " << c.file_type << ", " << c.parts
      << (c.parts == 1 ? " file, " : " files, ") << c.file_bytes << " bytes\n";
  out << c.hp.block_count << " layers, d " << c.hp.embedding_length << ", feed-forward "
      << c.hp.feed_forward_length << ", " << c.hp.head_count << " heads of " << c.hp.head_dim() << " over "
      << c.hp.head_count_kv << " of keys and values, " << c.hp.vocabulary << " tokens, context "
      << c.hp.context_length << "\n";
  out << "rms epsilon " << c.hp.rms_epsilon << ", rope base " << c.hp.rope_base;
  if (c.hp.yarn) out << ", YaRN " << c.hp.yarn->factor << " over " << c.hp.yarn->original_context;
  out << (c.tied ? ", output tied to the embedding" : ", output of its own") << "\n\n";
  out << text("%-8s %8s %16s %16s %8s\n", "type", "tensors", "elements", "bytes", "of all");
  for (const Census::Type& t : c.types) {
    out << text("%-8s %8lld %16lld %16lld %6.1f %%\n", gguf::type_name(t.type).c_str(),
                static_cast<long long>(t.tensors), static_cast<long long>(t.elements),
                static_cast<long long>(t.bytes),
                100.0 * static_cast<double>(t.bytes) / static_cast<double>(c.tensor_bytes));
  }
  out << text("%-8s %8s %16lld %16lld\n\n", "all", "", static_cast<long long>(c.parameters),
              static_cast<long long>(c.tensor_bytes));
  out << "weights read for a token   " << c.bytes_per_token << " bytes (" << megabytes(c.bytes_per_token)
      << ")\n";
  out << "KV cache for a token       " << c.kv_bytes_f16 << " bytes as f16, " << c.kv_bytes_f32 << " as f32; "
      << megabytes(c.kv_bytes_f16 * c.hp.context_length) << " for the whole context as f16\n";
  if (c.ceilings.empty()) return;
  out << "\nceiling of the memory bandwidth, with " << c.context << " tokens of context\n";
  for (const Census::Ceiling& d : c.ceilings) {
    out << text("%-32s %8.0f GB/s %10.1f tokens/s\n", d.device.c_str(), d.gbps, d.tokens_per_second);
  }
}

std::string to_json(const Census& c) {
  std::vector<std::string> types, ceilings;
  for (const Census::Type& t : c.types) {
    types.push_back(JsonObject()
                        .add("type", gguf::type_name(t.type))
                        .add("tensors", t.tensors)
                        .add("elements", t.elements)
                        .add("bytes", t.bytes)
                        .str());
  }
  for (const Census::Ceiling& d : c.ceilings) {
    ceilings.push_back(JsonObject()
                           .add("device", d.device)
                           .add("gbps", d.gbps)
                           .add("tokens_per_second", d.tokens_per_second)
                           .str());
  }
  JsonObject o;
  o.add("name", c.name).add("size_label", c.size_label).add("file_type", c.file_type);
  o.add("layers", c.hp.block_count)
      .add("d", c.hp.embedding_length)
      .add("feed_forward", c.hp.feed_forward_length);
  o.add("heads", c.hp.head_count).add("kv_heads", c.hp.head_count_kv).add("vocabulary", c.hp.vocabulary);
  o.add("context_length", c.hp.context_length)
      .add("rms_epsilon", c.hp.rms_epsilon)
      .add("rope_base", c.hp.rope_base);
  if (c.hp.yarn)
    o.add("yarn_factor", c.hp.yarn->factor).add("yarn_original_context", c.hp.yarn->original_context);
  o.add("tied", c.tied).add("parts", c.parts).add("file_bytes", c.file_bytes).add("parameters", c.parameters);
  o.add("tensor_bytes", c.tensor_bytes).add("bytes_per_token", c.bytes_per_token);
  o.add("kv_bytes_per_token_f16", c.kv_bytes_f16).add("kv_bytes_per_token_f32", c.kv_bytes_f32);
  o.raw("types", json_list(types)).add("context", c.context).raw("ceilings", json_list(ceilings));
  return o.str();
}

}  // namespace ladder::qwen
