// The switches for A/B runs: environment variables, read once, that turn parts of the dispatch off or choose between
// them. The only list of them; `qwen --help` prints it.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "harness/device/status.hpp"
#include "harness/experiment/weight_types.hpp"

namespace ladder::dispatch {

/// A set of weight types, a bit each.
using TypeSet = std::uint32_t;
constexpr TypeSet bit(WeightType t) { return TypeSet{1} << static_cast<unsigned>(t); }
constexpr bool has(TypeSet set, WeightType t) { return (set & bit(t)) != 0; }
inline constexpr TypeSet kAllTypes = (TypeSet{1} << kWeightTypes.size()) - 1;
/// Types with blocks, which can be put into tiles.
constexpr TypeSet types_with_blocks() {
  TypeSet set = 0;
  for (const WeightTypeInfo& t : kWeightTypes) set |= t.block_elems > 1 ? bit(t.type) : 0;
  return set;
}
inline constexpr TypeSet kBlockTypes = types_with_blocks();
inline constexpr TypeSet kKQuants = bit(WeightType::q2_k) | bit(WeightType::q3_k) | bit(WeightType::q4_k) |
                                    bit(WeightType::q5_k) | bit(WeightType::q6_k);

/// States of switches that a gate can ask for, a bit each.
using Conditions = std::uint32_t;
inline constexpr Conditions kMmqOff = 1, kMmqOn = 2, kNoPrefillGemm = 4, kNoQ40Mmvq = 8, kNoQ80Mmvq = 16,
                            kNoKqMmvq = 32, kMmvqV1 = 64, kGemmTile = 128;
struct ConditionInfo {
  Conditions bit;
  const char* name;  ///< as it is written in a shell, and in a table of gates
  TypeSet types;     ///< whose gates it can open or shut
};
inline constexpr std::array<ConditionInfo, 8> kConditions = {{
    {kMmqOff, "LADDER_MMQ=0", kBlockTypes},
    {kMmqOn, "LADDER_MMQ=1", kBlockTypes},
    {kNoPrefillGemm, "LADDER_NO_PREFILL_GEMM=1", kAllTypes},
    {kNoQ40Mmvq, "LADDER_NO_Q40_MMVQ=1", bit(WeightType::q4_0)},
    {kNoQ80Mmvq, "LADDER_NO_Q80_MMVQ=1", bit(WeightType::q8_0)},
    {kNoKqMmvq, "LADDER_NO_KQ_MMVQ=1", kKQuants},
    {kMmvqV1, "LADDER_MMVQ_V1=1", kBlockTypes},
    {kGemmTile, "LADDER_GEMM_TM or LADDER_GEMM_K64", kAllTypes},
}};

/// What the environment asks for.
struct Switches {
  Conditions conditions = 0;
  bool small_m_gemm = false;         ///< prefill kernels from two token rows on
  int gemm_tm = 0;                   ///< 64 or 128 outputs of a block of gemm_f16_mma; 0: not asked for
  bool gemm_k64 = false;             ///< steps of 64 along k in gemm_f16_mma
  bool no_cuda_graph = false;        ///< every launch of a token on its own
  std::optional<bool> token_kernel;  ///< whole tokens in one launch; unset: where that is known to be faster
  std::string trace;                 ///< file for a trace; empty: none
  std::string gates;                 ///< "seed", "default" or a file; empty: the device's own table
  bool operator==(const Switches&) const = default;
};

/// One switch: its name, what it may be set to, and what it does.
struct SwitchInfo {
  const char* name;
  const char* values;  ///< "0|1", or a word for anything: FILE
  const char* text;
};
inline constexpr std::array<SwitchInfo, 13> kSwitches = {{
    {"LADDER_MMQ", "0|1", "prompts: 0 multiplies f16 copies of the weights, 1 int8 whatever the gates say"},
    {"LADDER_NO_PREFILL_GEMM", "0|1", "1: prompts go eight rows at a time through the kernels of decoding"},
    {"LADDER_SMALL_M_GEMM", "0|1", "1: the kernels of prompts from two rows on"},
    {"LADDER_NO_Q40_MMVQ", "0|1", "1: Q4_0 decodes with f32 activations"},
    {"LADDER_NO_Q80_MMVQ", "0|1", "1: Q8_0 decodes with f32 activations"},
    {"LADDER_NO_KQ_MMVQ", "0|1", "1: K-quants decode with f32 activations"},
    {"LADDER_MMVQ_V1", "0|1", "1: decoding reads the file's blocks (mmvq_multi), not tiles"},
    {"LADDER_GEMM_TM", "64|128", "f16 prompts through gemm_f16_mma, with so many outputs a block"},
    {"LADDER_GEMM_K64", "0|1", "1: f16 prompts through gemm_f16_mma, by 64 along k instead of 32"},
    {"LADDER_NO_CUDA_GRAPH", "0|1", "1: a decoded token is launched kernel by kernel"},
    {"LADDER_TOKEN_KERNEL", "0|1",
     "1: whole tokens in one launch for every model that it takes, 0: for none"},
    {"LADDER_TRACE", "FILE", "writes a Chrome trace of every kernel of a multiplication"},
    {"LADDER_GATES", "FILE", "a table of gates instead of the device's; also: seed, default"},
}};

/// The switches as `get` (std::getenv in a program) has them; an unset or empty one is off. Error for a value that a
/// switch does not have, with those that it has.
inline Status read_switches(const std::function<const char*(const char*)>& get, Switches* out) {
  Switches s;
  std::string wrong;
  const auto value = [&](const char* name) -> std::string_view {
    const char* v = get(name);
    return v != nullptr ? v : "";
  };
  const auto one_of = [&](const char* name, std::initializer_list<std::string_view> allowed) {
    const std::string_view v = value(name);
    if (v.empty()) return v;
    for (const std::string_view a : allowed) {
      if (v == a) return v;
    }
    std::string list;
    for (const std::string_view a : allowed) list += (list.empty() ? "" : " or ") + std::string(a);
    if (wrong.empty()) wrong = std::string(name) + " must be " + list + ", not '" + std::string(v) + "'";
    return std::string_view();
  };
  const auto on = [&](const char* name) { return one_of(name, {"0", "1"}) == "1"; };
  const std::string_view mmq = one_of("LADDER_MMQ", {"0", "1"});
  if (mmq == "0") s.conditions |= kMmqOff;
  if (mmq == "1") s.conditions |= kMmqOn;
  if (on("LADDER_NO_PREFILL_GEMM")) s.conditions |= kNoPrefillGemm;
  if (on("LADDER_NO_Q40_MMVQ")) s.conditions |= kNoQ40Mmvq;
  if (on("LADDER_NO_Q80_MMVQ")) s.conditions |= kNoQ80Mmvq;
  if (on("LADDER_NO_KQ_MMVQ")) s.conditions |= kNoKqMmvq;
  if (on("LADDER_MMVQ_V1")) s.conditions |= kMmvqV1;
  s.small_m_gemm = on("LADDER_SMALL_M_GEMM");
  const std::string_view tm = one_of("LADDER_GEMM_TM", {"64", "128"});
  s.gemm_tm = tm == "64" ? 64 : tm == "128" ? 128 : 0;
  s.gemm_k64 = on("LADDER_GEMM_K64");
  if (s.gemm_tm != 0 || s.gemm_k64) s.conditions |= kGemmTile;
  s.no_cuda_graph = on("LADDER_NO_CUDA_GRAPH");
  const std::string_view whole = one_of("LADDER_TOKEN_KERNEL", {"0", "1"});
  if (!whole.empty()) s.token_kernel = whole == "1";
  s.trace = value("LADDER_TRACE");
  s.gates = value("LADDER_GATES");
  if (!wrong.empty()) return Status::error(wrong);
  *out = s;
  return {};
}

/// A text for `--help`: a line a switch.
inline std::string switches_help() {
  std::string text;
  for (const SwitchInfo& s : kSwitches) {
    std::string line = std::string("  ") + s.name + "=" + s.values;
    line.resize(line.size() < 32 ? 32 : line.size() + 1, ' ');
    text += line + s.text + "\n";
  }
  return text;
}

}  // namespace ladder::dispatch
