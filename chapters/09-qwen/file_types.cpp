// Which tensor gets which type: llama.cpp's mixtures.
#include <algorithm>
#include <array>
#include <cctype>

#include "chapters/09-qwen/quantize_model.hpp"

namespace ladder::qwen {

namespace {

// Codes: llama_ftype in include/llama.h; descriptions: llama_model_ftype_name in src/llama-model-loader.cpp.
constexpr std::array<FileType, 19> kFileTypes = {{
    {"F32", "all F32", 0, WeightType::f32},
    {"F16", "F16", 1, WeightType::f16},
    {"Q4_0", "Q4_0", 2, WeightType::q4_0},
    {"Q4_1", "Q4_1", 3, WeightType::q4_1},
    {"Q8_0", "Q8_0", 7, WeightType::q8_0},
    {"Q5_0", "Q5_0", 8, WeightType::q5_0},
    {"Q5_1", "Q5_1", 9, WeightType::q5_1},
    {"Q2_K", "Q2_K - Medium", 10, WeightType::q2_k},
    {"Q3_K_S", "Q3_K - Small", 11, WeightType::q3_k},
    {"Q3_K_M", "Q3_K - Medium", 12, WeightType::q3_k},
    {"Q3_K_L", "Q3_K - Large", 13, WeightType::q3_k},
    {"Q4_K_S", "Q4_K - Small", 14, WeightType::q4_k},
    {"Q4_K_M", "Q4_K - Medium", 15, WeightType::q4_k},
    {"Q5_K_S", "Q5_K - Small", 16, WeightType::q5_k},
    {"Q5_K_M", "Q5_K - Medium", 17, WeightType::q5_k},
    {"Q6_K", "Q6_K", 18, WeightType::q6_k},
    {"IQ4_NL", "IQ4_NL - 4.5 bpw", 25, WeightType::iq4_nl},
    {"IQ4_XS", "IQ4_XS - 4.25 bpw", 30, WeightType::iq4_xs},
    {"BF16", "BF16", 32, WeightType::bf16},
}};

bool same_name(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](unsigned char x, unsigned char y) { return std::toupper(x) == std::toupper(y); });
}

/// The layer of "blk.12.ffn_down.weight", and the rest behind it: "ffn_down.weight". -1 and the name for
/// other tensors.
struct Place {
  int layer = -1;
  std::string_view rest;
};
Place place_of(std::string_view tensor) {
  if (!tensor.starts_with("blk.")) return {-1, tensor};
  int layer = 0;
  std::size_t i = 4;
  for (; i < tensor.size() && tensor[i] >= '0' && tensor[i] <= '9' && i < 12; ++i)
    layer = layer * 10 + (tensor[i] - '0');
  if (i == 4 || i >= tensor.size() || tensor[i] != '.') return {-1, tensor};
  return {layer, tensor.substr(i + 1)};
}

/// The layers of a "medium" mixture that are worth more bits: the first and last eighth, and every third
/// between.
bool more_bits(int layer, int layers) {
  return layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2;
}

WeightType attn_v_type(const FileType& to, int layer, const MixtureModel& m) {
  const bool shared_by_many = m.gqa >= 4;  // a small tensor then, which costs little
  WeightType type = to.base;
  if (to.name == "Q2_K") type = shared_by_many ? WeightType::q4_k : WeightType::q3_k;
  if (to.name == "Q3_K_M") type = layer < 2 ? WeightType::q5_k : WeightType::q4_k;
  if (to.name == "Q3_K_L") type = WeightType::q5_k;
  if ((to.name == "IQ4_NL" || to.name == "IQ4_XS") && shared_by_many) type = WeightType::q5_k;
  if (to.name == "Q4_K_S" && layer < 4) type = WeightType::q5_k;
  if ((to.name == "Q4_K_M" || to.name == "Q5_K_M") && more_bits(layer, m.layers)) type = WeightType::q6_k;
  // llama.cpp takes a model of 80 layers for the 70B size, which it gives more bits here.
  if (m.layers == 80 && (type == WeightType::q3_k || type == WeightType::q4_k)) type = WeightType::q5_k;
  return type;
}

WeightType ffn_down_type(const FileType& to, int layer, const MixtureModel& m) {
  const bool first_eighth = layer < m.layers / 8;
  if (to.name == "Q2_K") return WeightType::q3_k;
  if (to.name == "Q3_K_M") return layer < m.layers / 16 ? WeightType::q5_k : WeightType::q4_k;
  if (to.name == "Q3_K_L") return WeightType::q5_k;
  if (to.name == "Q4_K_S" && first_eighth) return WeightType::q5_k;
  if ((to.name == "IQ4_NL" || to.name == "IQ4_XS") && first_eighth) return WeightType::q5_k;
  if ((to.name == "Q4_K_M" || to.name == "Q5_K_M") && more_bits(layer, m.layers)) return WeightType::q6_k;
  return to.base;
}

WeightType attn_output_type(const FileType& to) {
  if (to.name == "Q2_K") return WeightType::q3_k;
  if (to.name == "Q3_K_M") return WeightType::q4_k;
  if (to.name == "Q3_K_L") return WeightType::q5_k;
  return to.base;
}

bool quantized(WeightType type) { return info(type).block_elems > 1; }

}  // namespace

std::span<const FileType> file_types() { return kFileTypes; }

const FileType* find_file_type(std::string_view name) {
  const auto* const found = std::find_if(kFileTypes.begin(), kFileTypes.end(),
                                         [&](const FileType& t) { return same_name(t.name, name); });
  return found == kFileTypes.end() ? nullptr : found;
}

std::string file_type_names() {
  std::string list;
  for (const FileType& t : kFileTypes) {
    if (!list.empty()) list += ", ";
    list += t.name;
  }
  return list;
}

WeightType wanted_type(const FileType& to, std::string_view tensor, std::int64_t ne0, unsigned dimensions,
                       const MixtureModel& model) {
  if (dimensions < 2) return WeightType::f32;
  if (!quantized(to.base)) return to.base;
  if (tensor == "output.weight" || (tensor == "token_embd.weight" && model.tied)) {
    if (ne0 % info(to.base).block_elems != 0) return WeightType::q8_0;
    return to.base == WeightType::q8_0 ? WeightType::q8_0 : WeightType::q6_k;
  }
  const Place place = place_of(tensor);
  if (place.rest == "attn_v.weight") return attn_v_type(to, place.layer, model);
  if (place.rest == "ffn_down.weight") return ffn_down_type(to, place.layer, model);
  if (place.rest == "attn_output.weight") return attn_output_type(to);
  return to.base;
}

int layer_of(std::string_view tensor) { return place_of(tensor).layer; }

WeightType fitting_type(WeightType wanted, std::int64_t ne0) {
  if (ne0 % info(wanted).block_elems == 0) return wanted;
  WeightType smaller = WeightType::f16;
  switch (wanted) {
    case WeightType::q2_k:
    case WeightType::q3_k:
      smaller = WeightType::q4_0;
      break;
    case WeightType::q4_k:
      smaller = WeightType::q5_0;
      break;
    case WeightType::q5_k:
      smaller = WeightType::q5_1;
      break;
    case WeightType::q6_k:
      smaller = WeightType::q8_0;
      break;
    case WeightType::iq4_xs:
      smaller = WeightType::iq4_nl;
      break;
    default:
      break;
  }
  return ne0 % info(smaller).block_elems == 0 ? smaller : WeightType::f16;
}

WeightType tensor_type(const FileType& to, std::string_view tensor, std::int64_t ne0, unsigned dimensions,
                       const MixtureModel& model) {
  return fitting_type(wanted_type(to, tensor, ne0, dimensions, model), ne0);
}

}  // namespace ladder::qwen
