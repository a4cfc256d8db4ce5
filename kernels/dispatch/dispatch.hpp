// One function decides which kernel multiplies: decide(), over a table of gates. A gate says for which types, token
// rows, row lengths and switches a kernel is wanted; the first gate of the table that wants a shape, and whose kernel
// this device can run, has it. No device is needed to ask: `qwen explain` does, on any machine.
//
//   tier 1  prefill   many rows share every weight: tensor cores, bound by arithmetic
//   tier 2  decode    1 to 8 rows: int8 products, bound by the weights' bytes
//   tier 3  float     everything else: f32 activations, any shape
#pragma once

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "harness/device/device_info.hpp"
#include "harness/device/shape.hpp"
#include "harness/device/status.hpp"
#include "harness/experiment/weight_types.hpp"
#include "kernels/dispatch/switches.hpp"

namespace ladder::dispatch {

/// Kernels that multiply matrices of a model.
enum class Kernel {
  mmvq_tiles,
  mmvq_multi,
  mmq_tiles,
  gemm_tiles_wgmma,
  gemm_tiles_mma,
  gemm_f16_wgmma,
  gemm_f16_mma,
  f32_matmul,
};

/// How a kernel wants the weights.
enum class WeightForm { rows, tiles, f16_rows };  ///< as in the file; tiles.cuh; decoded to f16

/// What a kernel takes, whatever the gates say.
struct KernelInfo {
  Kernel kernel;
  const char* id;
  int tier;
  WeightForm weights;
  bool f32_acts;     ///< activations as they are, neither int8 nor f16
  TypeSet types;     ///< types that it multiplies
  int id_multiple;   ///< of a row's length, beside whole blocks
  int rows_at_once;  ///< token rows of one launch; 0: any number
  int least_cc;      ///< compute capability, 10 major + minor
  int most_cc;
  bool emulated;  ///< whether the emulator can run it
};
inline constexpr int kAnyCc = 1 << 20;
inline constexpr std::array<KernelInfo, 8> kKernels = {{
    {Kernel::mmvq_tiles, "mmvq_tiles", 2, WeightForm::tiles, false, kBlockTypes, 32, 8, 80, kAnyCc, true},
    {Kernel::mmvq_multi, "mmvq_multi", 2, WeightForm::rows, false, kBlockTypes, 32, 8, 61, kAnyCc, true},
    {Kernel::mmq_tiles, "mmq_tiles", 1, WeightForm::tiles, false, kBlockTypes, 32, 0, 80, kAnyCc, true},
    {Kernel::gemm_tiles_wgmma, "gemm_tiles_wgmma", 1, WeightForm::tiles, false, kBlockTypes, 32, 0, 90, 90,
     false},
    {Kernel::gemm_tiles_mma, "gemm_tiles_mma", 1, WeightForm::tiles, false, kBlockTypes, 32, 0, 80, kAnyCc,
     true},
    {Kernel::gemm_f16_wgmma, "gemm_f16_wgmma", 1, WeightForm::f16_rows, false,
     kBlockTypes | bit(WeightType::f16), 8, 0, 90, 90, false},
    {Kernel::gemm_f16_mma, "gemm_f16_mma", 1, WeightForm::f16_rows, false, kBlockTypes | bit(WeightType::f16),
     8, 0, 80, kAnyCc, true},
    {Kernel::f32_matmul, "f32_matmul", 3, WeightForm::rows, true, kAllTypes, 1, 0, 0, kAnyCc, true},
}};
constexpr const KernelInfo& info(Kernel k) { return kKernels[static_cast<std::size_t>(k)]; }

/// The name of a kernel with the type that it multiplies, as rungs and records have it.
inline std::string kernel_name(Kernel k, WeightType t, long long id) {
  const std::string type = ladder::info(t).name;
  if (k != Kernel::f32_matmul) return type + "_" + info(k).id;
  if (t != WeightType::f32) return type + "_f32_matmul";
  return id % 4 == 0 ? "gemv_vec" : "gemv_scalar";
}

/// From `least` to `most`, both included.
struct Range {
  static constexpr long long kNone = std::numeric_limits<long long>::max();  ///< no upper bound
  long long least = 1, most = kNone;
  [[nodiscard]] constexpr bool has(long long v) const { return v >= least && v <= most; }
  bool operator==(const Range&) const = default;
};

// ANCHOR: gate
/// When a kernel is wanted. All conditions must hold.
struct Gate {
  std::string name;  ///< "prefill.mmq"
  Kernel kernel{};
  TypeSet types = kAllTypes;
  Range nt{}, id{}, weights{};  ///< token rows; length of a row; od * id, the number of weights
  Conditions only = 0;          ///< switches that must be set
  Conditions unless = 0;        ///< switches that must not
  std::string evidence{};       ///< where the bounds come from
};
// ANCHOR_END: gate

/// Gates in the order in which they are asked.
struct Table {
  std::string name;  ///< "default", "seed", or a device's
  std::vector<Gate> gates;
};

/// Token rows from which on a prompt is one.
inline constexpr long long kPrefillFrom = 9;

// ANCHOR: default_table
/// The table for devices that have none of their own. Prompts: int8 or f16 switched off or on come first; then tiles,
/// decoded on their way to the tensor cores, where there is wgmma, and int8 elsewhere. What is decoded goes through
/// mmvq_tiles at any length: tensor cores and a ring of copies lose to f32 activations at no shape of any Qwen2.5 layer.
inline Table default_table() {
  const Range prompt{kPrefillFrom, Range::kNone}, any{};
  const Conditions no_mmvq = kNoQ40Mmvq | kNoQ80Mmvq | kNoKqMmvq;
  const TypeSet f16 = bit(WeightType::f16);
  Table t{"default", {}};
  t.gates = {
      {"prefill.mmq_forced", Kernel::mmq_tiles, kBlockTypes, prompt, any, any, kMmqOn, kNoPrefillGemm},
      {"prefill.f16_wgmma", Kernel::gemm_f16_wgmma, kBlockTypes, prompt, any, any, kMmqOff,
       kNoPrefillGemm | kGemmTile},
      {"prefill.f16_mma", Kernel::gemm_f16_mma, kBlockTypes, prompt, any, any, kMmqOff, kNoPrefillGemm},
      {"prefill.f16_weights_wgmma", Kernel::gemm_f16_wgmma, f16, prompt, any, any, 0,
       kNoPrefillGemm | kGemmTile},
      {"prefill.f16_weights_mma", Kernel::gemm_f16_mma, f16, prompt, any, any, 0, kNoPrefillGemm},
      {"prefill.tiles_wgmma", Kernel::gemm_tiles_wgmma, kBlockTypes, prompt, any, any, 0, kNoPrefillGemm},
      {"prefill.mmq", Kernel::mmq_tiles, kBlockTypes, prompt, any, any, 0, kNoPrefillGemm},
      {"decode.mmvq_v1", Kernel::mmvq_multi, kBlockTypes, any, any, any, kMmvqV1, no_mmvq},
      {"decode.mmvq", Kernel::mmvq_tiles, kBlockTypes, any, any, any, 0, no_mmvq},
      {"float", Kernel::f32_matmul, kAllTypes, any, any, any, 0, 0},
  };
  return t;
}
// ANCHOR_END: default_table

/// The seed's gates, found by its authors on a GB10, over the kernels of this project: its int8 kernels for small batches
/// are mmvq_tiles here, its f16 GEMM is gemm_f16. Q4_1, Q5_0 and Q5_1 decode with f32 activations, and so does every
/// row that is too short.
inline Table seed_table() {
  using W = WeightType;
  const Range prompt{kPrefillFrom, Range::kNone}, any{}, one{1, 1}, few{1, 8}, two_to_eight{2, 8};
  const Range long_rows{2048, Range::kNone};
  const TypeSet prefill = bit(W::q4_0) | bit(W::q4_1) | bit(W::q5_0) | bit(W::q5_1) | bit(W::q8_0) |
                          bit(W::q4_k) | bit(W::q5_k) | bit(W::q6_k);
  const char* by = "the seed, on a GB10";
  Table t{"seed", {}};
  t.gates = {
      {"prefill.mmq", Kernel::mmq_tiles, prefill, prompt, any, any, 0, kNoPrefillGemm | kMmqOff, by},
      {"prefill.f16_wgmma", Kernel::gemm_f16_wgmma, prefill, prompt, any, any, 0, kNoPrefillGemm | kGemmTile,
       by},
      {"prefill.f16_mma", Kernel::gemm_f16_mma, prefill, prompt, any, any, 0, kNoPrefillGemm, by},
      {"q4_0.small_batch", Kernel::mmvq_tiles, bit(W::q4_0), {2, Range::kNone}, {1, 8192}, any, 0, 0, by},
      {"q4_0.mmvq", Kernel::mmvq_tiles, bit(W::q4_0), one, long_rows, any, 0, kNoQ40Mmvq, by},
      {"q4_0.mmvq_multi",
       Kernel::mmvq_tiles,
       bit(W::q4_0),
       two_to_eight,
       {8193, Range::kNone},
       any,
       0,
       kNoQ40Mmvq,
       by},
      {"q8_0.mmvq", Kernel::mmvq_tiles, bit(W::q8_0), few, long_rows, any, 0, kNoQ80Mmvq, by},
      {"q4_k.mmvq_v1", Kernel::mmvq_multi, bit(W::q4_k), few, long_rows, any, kMmvqV1, 0, by},
      {"q4_k.mmvq", Kernel::mmvq_tiles, bit(W::q4_k), few, long_rows, any, 0, 0, by},
      {"q5_k.mmvq", Kernel::mmvq_tiles, bit(W::q5_k), few, any, {24'000'000, Range::kNone}, 0, kNoKqMmvq, by},
      {"q6_k.mmvq", Kernel::mmvq_tiles, bit(W::q6_k), few, any, {4'000'000, Range::kNone}, 0, kNoKqMmvq, by},
      {"float", Kernel::f32_matmul, kAllTypes, any, any, any, 0, 0, by},
  };
  return t;
}

/// One matmul to decide about.
struct Request {
  WeightType type{};
  Shape shape{};
  bool exact = false;  ///< only kernels that take activations as they are
};

/// What gates have bounds on, and what can vary: nt, id, and od by way of od*id.
enum class Axis { nt, id, weights, od };
constexpr const char* to_string(Axis a) {
  return a == Axis::nt ? "nt" : a == Axis::id ? "id" : a == Axis::od ? "od" : "od*id";
}

/// Why a gate did not take a shape. In this order: the first that applies is named.
enum class Refusal { none, type, exact, device, id_multiple, not_switched_on, switched_off, below, above };

/// What a gate says of a request.
struct Verdict {
  const Gate* gate = nullptr;
  Refusal refusal = Refusal::none;
  Axis axis = Axis::nt;      ///< of below and above
  long long bound = 0;       ///< of below, above and id_multiple
  Conditions condition = 0;  ///< of not_switched_on and switched_off
};

/// How near a decision is to another one: the smallest factor by which nt, id or od alone, all else as it is, has to grow
/// or shrink for another gate to decide. id goes by whole blocks.
struct Margin {
  double factor = std::numeric_limits<double>::infinity();  ///< infinite: no gate has a bound in reach
  Axis axis{};
  long long at = 0;          ///< the nearest value at which another gate decides; 0: there is none
  const Gate* to = nullptr;  ///< that gate; null if none would
};

struct Decision {
  const Gate* gate = nullptr;  ///< of the table that was asked
  Margin margin;
  std::vector<Verdict> refused;  ///< the gates that were asked before, in order
  [[nodiscard]] Kernel kernel() const { return gate->kernel; }
};

/// What is wrong with a shape for any kernel, and what would be allowed.
inline Status check_shape(WeightType type, const Shape& s) {
  constexpr long long kMost = std::numeric_limits<int>::max();
  if (s.nt < 1 || s.od < 1 || s.id < 1) return Status::error("nt, od and id must all be at least 1");
  if (s.nt > kMost || s.od > kMost || s.id > kMost) {
    return Status::error("nt, od and id must be at most " + std::to_string(kMost));
  }
  const WeightTypeInfo& t = ladder::info(type);
  if (s.id % t.block_elems == 0) return {};
  return Status::error("id must be a multiple of " + std::to_string(t.block_elems) + ", the block of " +
                       t.name + ", not " + std::to_string(s.id));
}

/// Whether a device can run a kernel.
constexpr bool runs_on(Kernel k, const DeviceInfo& d) {
  const int cc = 10 * d.cc_major + d.cc_minor;
  return (d.executor != Executor::emulator || info(k).emulated) && cc >= info(k).least_cc &&
         cc <= info(k).most_cc;
}

/// Why it cannot; empty if it can.
inline std::string device_refusal(Kernel k, const DeviceInfo& d) {
  const KernelInfo& i = info(k);
  if (runs_on(k, d)) return "";
  if (d.executor == Executor::emulator && !i.emulated) return "the emulator has no wgmma";
  const auto dotted = [](int n) { return std::to_string(n / 10) + "." + std::to_string(n % 10); };
  return "it needs compute capability " + dotted(i.least_cc) + (i.most_cc == kAnyCc ? " or later" : "") +
         ", here " + dotted(10 * d.cc_major + d.cc_minor);
}

/// The rows that a gate wants: its own, or with LADDER_SMALL_M_GEMM, for prompts, from two on.
constexpr Range rows_of(const Gate& g, const Switches& s) {
  Range r = g.nt;
  if (s.small_m_gemm && info(g.kernel).tier == 1 && r.least > 2 && r.least <= kPrefillFrom) r.least = 2;
  return r;
}

// ANCHOR: ask_kind
/// All that a gate asks but its bounds: whether it is for this type, these switches, this device.
inline Verdict ask_kind(const Gate& g, const Request& r, const DeviceInfo& device, const Switches& switches) {
  const KernelInfo& kernel = info(g.kernel);
  if (!has(g.types & kernel.types, r.type)) return {&g, Refusal::type};
  if (r.exact && !kernel.f32_acts) return {&g, Refusal::exact};
  for (const ConditionInfo& c : kConditions) {
    const bool set = (switches.conditions & c.bit) != 0;
    if ((g.only & c.bit) != 0 && !set) return {&g, Refusal::not_switched_on, {}, 0, c.bit};
    if ((g.unless & c.bit) != 0 && set && has(c.types, r.type))
      return {&g, Refusal::switched_off, {}, 0, c.bit};
  }
  if (!runs_on(g.kernel, device)) return {&g, Refusal::device};
  if (r.shape.id % kernel.id_multiple != 0) return {&g, Refusal::id_multiple, {}, kernel.id_multiple};
  return {&g};
}
// ANCHOR_END: ask_kind

/// A gate's bounds.
inline Verdict ask_bounds(const Gate& g, const Shape& s, const Switches& switches) {
  const auto outside = [&g](Axis axis, const Range& r, long long v) -> Verdict {
    const bool below = v < r.least;
    return {&g, below ? Refusal::below : Refusal::above, axis, below ? r.least : r.most};
  };
  const Range rows = rows_of(g, switches);
  if (!rows.has(s.nt)) return outside(Axis::nt, rows, s.nt);
  if (!g.id.has(s.id)) return outside(Axis::id, g.id, s.id);
  if (!g.weights.has(s.od * s.id)) return outside(Axis::weights, g.weights, s.od * s.id);
  return {&g};
}

/// One gate, one request whose shape is sound.
inline Verdict ask(const Gate& g, const Request& r, const DeviceInfo& device, const Switches& switches) {
  const Verdict kind = ask_kind(g, r, device, switches);
  return kind.refusal != Refusal::none ? kind : ask_bounds(g, r.shape, switches);
}

/// The first gate that takes a request whose shape is sound; null for none.
inline const Gate* first_gate(const Table& table, const Request& r, const DeviceInfo& device,
                              const Switches& switches) {
  for (const Gate& g : table.gates) {
    if (ask(g, r, device, switches).refusal == Refusal::none) return &g;
  }
  return nullptr;
}

/// The margin of a decision for `chosen`. Decisions change at bounds only, so the nearest values on either side of every
/// bound are all that has to be tried.
inline Margin margin_of(const Table& table, const Gate* chosen, const Request& r, const DeviceInfo& device,
                        const Switches& switches) {
  std::vector<const Gate*> kind;  // gates that are for this request, but for their bounds
  for (const Gate& g : table.gates) {
    if (ask_kind(g, r, device, switches).refusal == Refusal::none) kind.push_back(&g);
  }
  Margin best;
  const auto consider = [&](Axis axis, long long now, long long value) {
    if (value < 1 || value == now) return;
    const double factor =
        static_cast<double>(std::max(value, now)) / static_cast<double>(std::min(value, now));
    if (!(factor < best.factor)) return;
    const Shape s = {axis == Axis::nt ? value : r.shape.nt, axis == Axis::od ? value : r.shape.od,
                     axis == Axis::id ? value : r.shape.id};
    const auto there = std::find_if(kind.begin(), kind.end(), [&](const Gate* g) {
      return ask_bounds(*g, s, switches).refusal == Refusal::none;
    });
    const Gate* gate = there != kind.end() ? *there : nullptr;
    if (gate != chosen) best = {factor, axis, value, gate};
  };
  // Both sides of the ends of a range over v * each, v going by steps.
  const auto ends = [&](Axis axis, long long now, const Range& range, long long each, long long step) {
    const long long unit = each * step, first = (range.least + unit - 1) / unit * step;
    consider(axis, now, first);
    consider(axis, now, first - step);
    if (range.most == Range::kNone) return;
    consider(axis, now, range.most / unit * step);
    consider(axis, now, range.most / unit * step + step);
  };
  const long long block = std::max(ladder::info(r.type).block_elems, info(chosen->kernel).id_multiple);
  for (const Gate* g : kind) {
    ends(Axis::nt, r.shape.nt, rows_of(*g, switches), 1, 1);
    ends(Axis::id, r.shape.id, g->id, 1, block);
    ends(Axis::id, r.shape.id, g->weights, r.shape.od, block);
    ends(Axis::od, r.shape.od, g->weights, r.shape.id, 1);
  }
  return best;
}

// ANCHOR: decide
/// Decides. Error for a shape that no kernel takes, with what would be allowed, and for a table without an answer.
inline Status decide(const Table& table, const Request& r, const DeviceInfo& device, const Switches& switches,
                     Decision* out) {
  if (Status ok = check_shape(r.type, r.shape); !ok.ok()) return ok;
  Decision d;
  for (const Gate& g : table.gates) {
    const Verdict v = ask(g, r, device, switches);
    if (v.refusal == Refusal::none) {
      d.gate = &g;
      break;
    }
    d.refused.push_back(v);
  }
  if (d.gate == nullptr) {
    return Status::error("the table of gates '" + table.name + "' has no kernel for " +
                         ladder::info(r.type).name + " at nt " + std::to_string(r.shape.nt) + ", od " +
                         std::to_string(r.shape.od) + ", id " + std::to_string(r.shape.id) +
                         "; its last gate should be float, without bounds");
  }
  d.margin = margin_of(table, d.gate, r, device, switches);
  *out = std::move(d);
  return {};
}
// ANCHOR_END: decide

/// Names of the conditions of a set, ", " between them.
inline std::string condition_names(Conditions set) {
  std::string text;
  for (const ConditionInfo& c : kConditions) {
    if ((set & c.bit) != 0) text += (text.empty() ? "" : ", ") + std::string(c.name);
  }
  return text;
}

/// Why a gate did not take a request, for people: "nt 8 is below 9".
inline std::string to_text(const Verdict& v, const Request& r, const DeviceInfo& device) {
  const auto value = [&] {
    return std::to_string(v.axis == Axis::nt   ? r.shape.nt
                          : v.axis == Axis::id ? r.shape.id
                                               : r.shape.od * r.shape.id);
  };
  switch (v.refusal) {
    case Refusal::none:
      return "";
    case Refusal::type:
      return std::string("not for ") + ladder::info(r.type).name;
    case Refusal::exact:
      return "activations are to stay f32";
    case Refusal::device:
      return device_refusal(v.gate->kernel, device);
    case Refusal::id_multiple:
      return "id " + std::to_string(r.shape.id) + " is not a multiple of " + std::to_string(v.bound);
    case Refusal::not_switched_on:
      return "only with " + condition_names(v.condition);
    case Refusal::switched_off:
      return condition_names(v.condition);
    case Refusal::below:
      return std::string(to_string(v.axis)) + " " + value() + " is below " + std::to_string(v.bound);
    case Refusal::above:
      return std::string(to_string(v.axis)) + " " + value() + " is above " + std::to_string(v.bound);
  }
  return "";
}

/// "1.13x, nt to 9 (prefill.mmq)"; "none" where no bound is in reach.
inline std::string to_text(const Margin& m) {
  if (m.at == 0) return "none";
  char factor[32];
  std::snprintf(factor, sizeof factor, m.factor < 100 ? "%.2fx" : "%.0fx", m.factor);
  return std::string(factor) + ", " + to_string(m.axis) + " to " + std::to_string(m.at) + " (" +
         (m.to != nullptr ? m.to->name : "no gate") + ")";
}

/// "nt 9 to 64", "od*id from 4000000"; empty for a range without bounds.
inline std::string to_text(Axis axis, const Range& r) {
  const std::string name = to_string(axis);
  if (r.least <= 1 && r.most == Range::kNone) return "";
  if (r.least == r.most) return name + " " + std::to_string(r.least);
  if (r.most == Range::kNone) return name + " from " + std::to_string(r.least);
  if (r.least <= 1) return name + " to " + std::to_string(r.most);
  return name + " " + std::to_string(r.least) + " to " + std::to_string(r.most);
}

/// Names of a set of types, "all", or "types with blocks".
inline std::string type_names(TypeSet set) {
  if (set == kAllTypes) return "all";
  if (set == kBlockTypes) return "types with blocks";
  std::string text;
  for (const WeightTypeInfo& t : kWeightTypes) {
    if (has(set, t.type)) text += (text.empty() ? "" : ", ") + std::string(t.name);
  }
  return text;
}

/// A table for people, a line a gate.
inline std::string to_text(const Table& table) {
  std::string text = "gates '" + table.name + "', the first that takes a shape decides:\n";
  for (const Gate& g : table.gates) {
    std::string line = "  tier " + std::to_string(info(g.kernel).tier) + "  " + g.name;
    line.resize(std::max<std::size_t>(line.size(), 36), ' ');
    line += std::string(" ") + info(g.kernel).id;
    line.resize(std::max<std::size_t>(line.size(), 56), ' ');
    line.append(" ").append(type_names(g.types));  // a sum of both makes GCC 12 warn of a copy that never is
    for (const std::string& bound :
         {to_text(Axis::nt, g.nt), to_text(Axis::id, g.id), to_text(Axis::weights, g.weights)}) {
      if (!bound.empty()) line += "; " + bound;
    }
    if (g.only != 0) line += "; only with " + condition_names(g.only);
    if (g.unless != 0) line += "; unless " + condition_names(g.unless);
    text += line + "\n";
  }
  return text;
}

}  // namespace ladder::dispatch
