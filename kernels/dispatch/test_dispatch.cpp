// The dispatch: both built-in tables against the decision trees that they stand for, written out as branches, over every
// type, switch, device and Qwen2.5 layer and on both sides of every bound; every bound, switch and gate is then changed,
// and the comparison must notice. Margins against a search. Files of gates, whole and broken.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "harness/experiment/qwen_shapes.hpp"
#include "kernels/dispatch/dispatch.hpp"
#include "kernels/dispatch/gates_json.hpp"
#include "kernels/dispatch/switches.hpp"
#include "kernels/dispatch/tables.hpp"

using namespace ladder;
using namespace ladder::dispatch;
using W = WeightType;

namespace {

DeviceInfo device(Executor e, int major, int minor) {
  DeviceInfo d;
  d.executor = e;
  d.cc_major = major;
  d.cc_minor = minor;
  return d;
}

/// The devices that kernels tell apart.
const std::vector<DeviceInfo>& devices() {
  static const std::vector<DeviceInfo> all = {device(Executor::gpu, 9, 0), device(Executor::emulator, 9, 0),
                                              device(Executor::gpu, 8, 0), device(Executor::gpu, 12, 1),
                                              device(Executor::gpu, 7, 5), device(Executor::gpu, 6, 0)};
  return all;
}

/// All matrices of all sizes, and shapes on both sides of the bounds that both tables have on id and od * id.
const std::vector<Shape>& matrices() {
  static const std::vector<Shape> all = [] {
    std::vector<Shape> v;
    std::set<std::pair<long long, long long>> seen;
    for (const QwenLayer& l : all_qwen_layers()) {
      if (seen.insert({l.od, l.id}).second) v.push_back({1, l.od, l.id});
    }
    for (const long long id : {2016, 2048, 1792, 8160, 8192, 8224, 8448, 7936, 4, 36})
      v.push_back({1, 900, id});
    for (const long long od : {93749, 93750, 93751, 15624, 15625, 15626}) v.push_back({1, od, 256});
    return v;
  }();
  return all;
}

constexpr long long kRows[] = {1, 2, 3, 7, 8, 9, 10, 64, 65, 512};

/// Every combination of conditions that an environment can make: LADDER_MMQ is not 0 and 1 at once.
const std::vector<Switches>& environments() {
  static const std::vector<Switches> all = [] {
    std::vector<Switches> v;
    for (Conditions c = 0; c < 256; ++c) {
      if ((c & kMmqOff) != 0 && (c & kMmqOn) != 0) continue;
      for (const bool small : {false, true}) {
        Switches s;
        s.conditions = c;
        s.small_m_gemm = small;
        v.push_back(s);
      }
    }
    return v;
  }();
  return all;
}

/// At most two switches: what shows a change of one thing.
const std::vector<Switches>& short_environments() {
  static const std::vector<Switches> all = [] {
    std::vector<Switches> v;
    for (const Switches& s : environments()) {
      if (std::popcount(s.conditions) + (s.small_m_gemm ? 1 : 0) <= 2) v.push_back(s);
    }
    return v;
  }();
  return all;
}

bool on(const Switches& s, Conditions c) { return (s.conditions & c) != 0; }

/// The seed's decision tree (matmul_f32_ptr_layout), branch by branch, with this project's kernels in the leaves.
const char* seed_tree(const Request& r, const DeviceInfo& d, const Switches& s) {
  const auto [nt, od, id] = r.shape;
  const int cc = 10 * d.cc_major + d.cc_minor;
  const bool wgmma = d.executor == Executor::gpu && cc == 90, tensor = cc >= 80, dp4a = cc >= 61;
  if (r.exact) return "float";
  switch (r.type) {
    case W::q4_0:
    case W::q4_1:
    case W::q5_0:
    case W::q5_1:
    case W::q8_0:
    case W::q4_k:
    case W::q5_k:
    case W::q6_k:
      if ((nt >= 9 || (nt >= 2 && s.small_m_gemm)) && !on(s, kNoPrefillGemm)) {
        if (!on(s, kMmqOff) && tensor) return "prefill.mmq";
        if (on(s, kMmqOff) && wgmma && !on(s, kGemmTile)) return "prefill.f16_wgmma";
        if (on(s, kMmqOff) && tensor) return "prefill.f16_mma";
      }
      break;
    default:
      return "float";
  }
  switch (r.type) {
    case W::q4_0:
      if (nt > 1 && id <= 8192 && tensor) return "q4_0.small_batch";
      if (nt == 1 && id >= 2048 && !on(s, kNoQ40Mmvq) && tensor) return "q4_0.mmvq";
      if (nt >= 2 && nt <= 8 && id > 8192 && !on(s, kNoQ40Mmvq) && tensor) return "q4_0.mmvq_multi";
      return "float";
    case W::q8_0:
      return nt <= 8 && id >= 2048 && !on(s, kNoQ80Mmvq) && tensor ? "q8_0.mmvq" : "float";
    case W::q4_k:
      if (nt > 8 || id < 2048) return "float";
      if (on(s, kMmvqV1)) return dp4a ? "q4_k.mmvq_v1" : "float";
      return tensor ? "q4_k.mmvq" : "float";
    case W::q5_k:
      return nt <= 8 && od * id >= 24'000'000 && !on(s, kNoKqMmvq) && tensor ? "q5_k.mmvq" : "float";
    case W::q6_k:
      return nt <= 8 && od * id >= 4'000'000 && !on(s, kNoKqMmvq) && tensor ? "q6_k.mmvq" : "float";
    default:
      return "float";
  }
}

/// The default table as branches.
const char* default_tree(const Request& r, const DeviceInfo& d, const Switches& s) {
  const auto [nt, od, id] = r.shape;
  const int cc = 10 * d.cc_major + d.cc_minor;
  const bool wgmma = d.executor == Executor::gpu && cc == 90, tensor = cc >= 80, dp4a = cc >= 61;
  const bool prompt = (nt >= 9 || (nt >= 2 && s.small_m_gemm)) && !on(s, kNoPrefillGemm);
  if (r.exact || r.type == W::f32 || r.type == W::bf16) return "float";
  if (r.type == W::f16) {
    if (!prompt || id % 8 != 0) return "float";
    return wgmma && !on(s, kGemmTile) ? "prefill.f16_weights_wgmma"
           : tensor                   ? "prefill.f16_weights_mma"
                                      : "float";
  }
  if (prompt && tensor) {
    if (on(s, kMmqOn)) return "prefill.mmq_forced";
    if (on(s, kMmqOff)) return wgmma && !on(s, kGemmTile) ? "prefill.f16_wgmma" : "prefill.f16_mma";
    return wgmma ? "prefill.tiles_wgmma" : "prefill.mmq";
  }
  const bool k_quant =
      r.type == W::q2_k || r.type == W::q3_k || r.type == W::q4_k || r.type == W::q5_k || r.type == W::q6_k;
  if (r.type == W::q4_0 && on(s, kNoQ40Mmvq)) return "float";
  if (r.type == W::q8_0 && on(s, kNoQ80Mmvq)) return "float";
  if (k_quant && on(s, kNoKqMmvq)) return "float";
  if (on(s, kMmvqV1) && dp4a) return "decode.mmvq_v1";
  return tensor ? "decode.mmvq" : "float";
}

using Tree = const char* (*)(const Request&, const DeviceInfo&, const Switches&);

/// The first request on which table and tree differ, or "".
std::string first_difference(const Table& table, Tree tree, const std::vector<Switches>& switches) {
  long long asked = 0;
  for (const WeightTypeInfo& t : kWeightTypes) {
    for (Shape s : matrices()) {
      if (s.id % t.block_elems != 0) continue;
      for (const long long nt : kRows) {
        s.nt = nt;
        for (const DeviceInfo& d : devices()) {
          for (const Switches& e : switches) {
            // `exact` leaves f32_matmul alone, so fewer environments show all there is to see.
            for (const bool exact : {false, true}) {
              if (exact && e.conditions > 1) continue;
              const Request r{t.type, s, exact};
              const Gate* g = first_gate(table, r, d, e);
              ++asked;
              if (g == nullptr || g->name != tree(r, d, e)) {
                return std::string(t.name) + " nt " + std::to_string(nt) + " od " + std::to_string(s.od) +
                       " id " + std::to_string(s.id) + " cc " + std::to_string(d.cc_major) + " " +
                       condition_names(e.conditions) + (e.small_m_gemm ? " small" : "") + ": " +
                       (g != nullptr ? g->name : "none") + ", expected " + tree(r, d, e);
              }
            }
          }
        }
      }
    }
  }
  CHECK(asked > 400'000);
  return "";
}

/// Every way to change one number, switch or place of a table, with a name.
std::vector<std::pair<std::string, Table>> mutants(const Table& table) {
  std::vector<std::pair<std::string, Table>> all;
  for (std::size_t i = 0; i < table.gates.size(); ++i) {
    const Gate& g = table.gates[i];
    const auto changed = [&](const std::string& how, const auto& change) {
      Table t = table;
      change(t.gates[i]);
      all.emplace_back(g.name + " " + how, std::move(t));
    };
    // By as much as tells neighbours apart on the grid of the tests: a row, a block of a row, a block of a matrix.
    const auto range = [&](const char* name, Range Gate::*member, long long step) {
      const Range& r = g.*member;
      if (r.least > 1) {
        changed(std::string(name) + " from later", [&](Gate& m) { (m.*member).least += step; });
        changed(std::string(name) + " from earlier", [&](Gate& m) { (m.*member).least -= step; });
      }
      if (r.most != Range::kNone) {
        changed(std::string(name) + " to more", [&](Gate& m) { (m.*member).most += step; });
        changed(std::string(name) + " to less", [&](Gate& m) { (m.*member).most -= step; });
      }
    };
    range("nt", &Gate::nt, 1);
    range("id", &Gate::id, (g.types & ~kKQuants) == 0 ? 256 : 32);
    range("weights", &Gate::weights, 256);
    for (const ConditionInfo& c : kConditions) {
      if ((g.only & c.bit) != 0)
        changed(std::string("without only ") + c.name, [&](Gate& m) { m.only &= ~c.bit; });
      if ((g.unless & c.bit) != 0) {
        changed(std::string("without unless ") + c.name, [&](Gate& m) { m.unless &= ~c.bit; });
      }
    }
    for (const WeightTypeInfo& t : kWeightTypes) {
      if (has(g.types & info(g.kernel).types, t.type)) {
        changed(std::string("without ") + t.name, [&](Gate& m) { m.types &= ~bit(t.type); });
      }
    }
    if (i + 1 < table.gates.size()) {
      Table t = table;
      t.gates.erase(t.gates.begin() + static_cast<std::ptrdiff_t>(i));
      all.emplace_back(g.name + " gone", std::move(t));
    }
  }
  return all;
}

std::string refusal(const std::string& text) {
  Table t;
  return parse_table(text, "x", &t).message();
}

/// A sound table around one gate.
std::string around(const std::string& gate) {
  return "{\"schema\": 1, \"gates\": [\n" + gate + ",\n{\"name\": \"float\", \"kernel\": \"f32_matmul\"}]}";
}

}  // namespace

TEST_CASE("the tables are their decision trees") {
  CHECK(first_difference(default_table(), default_tree, environments()) == "");
  CHECK(first_difference(seed_table(), seed_tree, environments()) == "");
}

TEST_CASE("a table with one thing changed is noticed") {
  // Two that no request can tell: what they would add is taken by a gate that is asked before.
  const std::set<std::string> equal = {"q4_0.mmvq_multi id from earlier", "q4_0.mmvq_multi nt from earlier"};
  int noticed = 0;
  for (const auto& [table, tree] : {std::pair<Table, Tree>{default_table(), default_tree},
                                    std::pair<Table, Tree>{seed_table(), seed_tree}}) {
    for (const auto& [how, mutant] : mutants(table)) {
      const std::string name = how, of = table.name;
      CAPTURE(of);
      CAPTURE(name);
      const bool differs = !first_difference(mutant, tree, short_environments()).empty();
      CHECK(differs == (equal.count(name) == 0));
      noticed += differs ? 1 : 0;
    }
  }
  MESSAGE(noticed << " changes noticed");
}

TEST_CASE("a margin is the nearest change") {
  const DeviceInfo d = device(Executor::gpu, 9, 0);
  const Switches none;
  for (const Table& table : {default_table(), seed_table()}) {
    for (const W type : {W::q4_0, W::q8_0, W::q4_k, W::q5_k, W::q6_k, W::f16, W::f32}) {
      for (const Shape matrix : {Shape{1, 896, 896 - 896 % 256}, Shape{1, 896, 4864}, Shape{1, 3584, 3584},
                                 Shape{1, 3584, 18944}, Shape{1, 512, 2048}, Shape{1, 128, 8192}}) {
        for (const long long nt : {1, 2, 8, 9, 30}) {
          const Request r{type, {nt, matrix.od, matrix.id}};
          Decision decision;
          REQUIRE(decide(table, r, d, none, &decision).ok());
          // By trial: all values of one axis up to the factor that was claimed, and a bit beyond.
          const long long block = std::max(info(type).block_elems, info(decision.kernel()).id_multiple);
          double nearest = std::numeric_limits<double>::infinity();
          const auto search = [&](long long now, long long step, const auto& with) {
            const double limit = std::isfinite(decision.margin.factor) ? decision.margin.factor : 64;
            for (long long v = step; static_cast<double>(v) <= 1.01 * limit * static_cast<double>(now) + 2;
                 v += step) {
              const double factor =
                  static_cast<double>(std::max(v, now)) / static_cast<double>(std::min(v, now));
              if (factor >= nearest || factor > 1.01 * limit + 2) continue;
              if (first_gate(table, {type, with(v)}, d, none) != decision.gate) nearest = factor;
            }
          };
          search(nt, 1, [&](long long v) { return Shape{v, matrix.od, matrix.id}; });
          search(matrix.id, block, [&](long long v) { return Shape{nt, matrix.od, v}; });
          search(matrix.od, 1, [&](long long v) { return Shape{nt, v, matrix.id}; });
          CAPTURE(table.name);
          CAPTURE(info(type).name);
          CAPTURE(nt);
          CAPTURE(matrix.od);
          CAPTURE(matrix.id);
          CAPTURE(to_text(decision.margin));
          CHECK(decision.margin.factor == nearest);
          if (decision.margin.at == 0) continue;
          Shape there = r.shape;
          (decision.margin.axis == Axis::nt   ? there.nt
           : decision.margin.axis == Axis::id ? there.id
                                              : there.od) = decision.margin.at;
          CHECK(first_gate(table, {type, there}, d, none) == decision.margin.to);
        }
      }
    }
  }
}

TEST_CASE("decisions say what decided, by how much, and why not others") {
  const DeviceInfo h200 = device(Executor::gpu, 9, 0), emulator = device(Executor::emulator, 9, 0);
  const Table seed = seed_table(), own = default_table();
  Decision d;
  const Request down{W::q4_0, {1, 896, 4864}};
  REQUIRE(decide(seed, down, h200, {}, &d).ok());
  CHECK(d.gate->name == "q4_0.mmvq");
  CHECK(to_text(d.margin) == "2.00x, nt to 2 (q4_0.small_batch)");
  std::string why;
  for (const Verdict& v : d.refused) why += v.gate->name + ": " + to_text(v, down, h200) + "\n";
  CHECK(why ==
        "prefill.mmq: nt 1 is below 9\n"
        "prefill.f16_wgmma: nt 1 is below 9\n"
        "prefill.f16_mma: nt 1 is below 9\n"
        "q4_0.small_batch: nt 1 is below 2\n");

  const Request gate{W::q5_k, {8, 896, 256}};
  REQUIRE(decide(seed, gate, h200, {}, &d).ok());
  CHECK(d.gate->name == "float");
  CHECK(to_text(d.margin) == "1.12x, nt to 9 (prefill.mmq)");
  CHECK(to_text(d.refused.back(), gate, h200) == "not for q5_k");
  CHECK(to_text(d.refused[d.refused.size() - 2], gate, h200) == "od*id 229376 is below 24000000");

  const Request prompt{W::q4_k, {512, 3584, 3584}};
  REQUIRE(decide(own, prompt, emulator, {}, &d).ok());
  CHECK(d.gate->name == "prefill.mmq");
  CHECK(to_text(d.refused.back(), prompt, emulator) == "the emulator has no wgmma");
  REQUIRE(decide(own, prompt, h200, {}, &d).ok());
  CHECK(d.gate->name == "prefill.tiles_wgmma");
  CHECK(to_text(d.margin) == "64.00x, nt to 8 (decode.mmvq)");
  const DeviceInfo turing = device(Executor::gpu, 7, 5);
  REQUIRE(decide(own, prompt, turing, {}, &d).ok());
  CHECK(d.gate->name == "float");
  CHECK(to_text(d.margin) == "none");
  CHECK(to_text(d.refused.back(), prompt, turing) == "it needs compute capability 8.0 or later, here 7.5");
  CHECK(device_refusal(Kernel::gemm_tiles_wgmma, device(Executor::gpu, 12, 1)) ==
        "it needs compute capability 9.0, here 12.1");

  const Request odd{W::f16, {64, 10, 12}};
  REQUIRE(decide(own, odd, h200, {}, &d).ok());
  CHECK(d.gate->name == "float");
  CHECK(to_text(d.refused[3], odd, h200) == "id 12 is not a multiple of 8");
  Request exact = prompt;
  exact.exact = true;
  REQUIRE(decide(own, exact, h200, {}, &d).ok());
  CHECK(to_text(d.refused[0], exact, h200) == "activations are to stay f32");
  Switches off;
  off.conditions = kNoPrefillGemm;
  REQUIRE(decide(own, prompt, h200, off, &d).ok());
  CHECK(d.gate->name == "decode.mmvq");
  CHECK(to_text(d.refused[5], prompt, h200) == "LADDER_NO_PREFILL_GEMM=1");

  CHECK(kernel_name(Kernel::mmvq_tiles, W::q4_0, 896) == "q4_0_mmvq_tiles");
  CHECK(kernel_name(Kernel::f32_matmul, W::q4_0, 896) == "q4_0_f32_matmul");
  CHECK(kernel_name(Kernel::f32_matmul, W::f32, 896) == "gemv_vec");
  CHECK(kernel_name(Kernel::f32_matmul, W::f32, 7) == "gemv_scalar");
}

TEST_CASE("shapes that no kernel takes are errors that say what is allowed") {
  const DeviceInfo d = device(Executor::gpu, 9, 0);
  const Table t = default_table();
  Decision out;
  const auto message = [&](W type, Shape s) { return decide(t, {type, s}, d, {}, &out).message(); };
  CHECK(message(W::q4_k, {1, 896, 896}) == "id must be a multiple of 256, the block of q4_k, not 896");
  CHECK(message(W::q4_0, {1, 896, 900}) == "id must be a multiple of 32, the block of q4_0, not 900");
  CHECK(message(W::f32, {0, 1, 1}) == "nt, od and id must all be at least 1");
  CHECK(message(W::f32, {1, 0, 1}) == "nt, od and id must all be at least 1");
  CHECK(message(W::f32, {1, 1, -1}) == "nt, od and id must all be at least 1");
  CHECK(message(W::f32, {1, 1LL << 31, 1}) == "nt, od and id must be at most 2147483647");
  CHECK(message(W::f32, {1, 1, 1}) == "");
  Table holes = seed_table();
  holes.gates.pop_back();
  CHECK(decide(holes, {W::f32, {1, 5, 7}}, d, {}, &out).message() ==
        "the table of gates 'seed' has no kernel for f32 at nt 1, od 5, id 7; its last gate should be float, "
        "without "
        "bounds");
}

TEST_CASE("switches") {
  std::map<std::string, std::string> environment;
  const auto get = [&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found != environment.end() ? found->second.c_str() : nullptr;
  };
  Switches s;
  REQUIRE(read_switches(get, &s).ok());
  CHECK(s == Switches{});
  // Each alone moves one field, and its other value none.
  std::set<std::string> names;
  for (const SwitchInfo& info : kSwitches) {
    CAPTURE(info.name);
    names.insert(info.name);
    const std::string values = info.values;
    environment = {{info.name, values == "64|128" ? "64" : values == "FILE" ? "x.json" : "1"}};
    REQUIRE(read_switches(get, &s).ok());
    CHECK(!(s == Switches{}));
    environment = {{info.name, ""}};
    REQUIRE(read_switches(get, &s).ok());
    CHECK(s == Switches{});
    const bool three_ways =
        std::string(info.name) == "LADDER_MMQ" || std::string(info.name) == "LADDER_TOKEN_KERNEL";
    if (values == "0|1" && !three_ways) {
      environment = {{info.name, "0"}};
      REQUIRE(read_switches(get, &s).ok());
      CHECK(s == Switches{});
    }
    if (values != "FILE") {
      environment = {{info.name, "yes"}};
      const std::string allowed = values == "64|128" ? "64 or 128" : "0 or 1";
      CHECK(read_switches(get, &s).message() ==
            std::string(info.name) + " must be " + allowed + ", not 'yes'");
    }
    CHECK(switches_help().find(std::string(info.name) + "=" + values + " ") != std::string::npos);
  }
  CHECK(names.size() == kSwitches.size());
  environment = {{"LADDER_MMQ", "0"}};
  REQUIRE(read_switches(get, &s).ok());
  CHECK(s.conditions == kMmqOff);
  environment = {{"LADDER_TOKEN_KERNEL", "0"}};
  REQUIRE(read_switches(get, &s).ok());
  CHECK(s.token_kernel == false);
  environment = {
      {"LADDER_MMQ", "1"}, {"LADDER_NO_KQ_MMVQ", "1"}, {"LADDER_GEMM_TM", "128"}, {"LADDER_TRACE", "t"}};
  REQUIRE(read_switches(get, &s).ok());
  CHECK(s.conditions == (kMmqOn | kNoKqMmvq | kGemmTile));
  CHECK(s.gemm_tm == 128);
  CHECK(s.trace == "t");
  for (const ConditionInfo& c : kConditions) {
    const std::string name = std::string(c.name).substr(0, std::string(c.name).find_first_of("= "));
    CHECK(names.count(name) == 1);
  }
}

TEST_CASE("tables go to files and back") {
  for (const Table& table : {default_table(), seed_table()}) {
    Table back;
    const Status ok = parse_table(to_json(table, "a \"device\""), table.name, &back);
    CAPTURE(ok.message());
    REQUIRE(ok.ok());
    REQUIRE(back.gates.size() == table.gates.size());
    for (std::size_t i = 0; i < back.gates.size(); ++i) {
      const Gate &a = back.gates[i], &b = table.gates[i];
      CHECK(a.name == b.name);
      CHECK(a.kernel == b.kernel);
      CHECK(a.types == b.types);
      CHECK(a.nt == b.nt);
      CHECK(a.id == b.id);
      CHECK(a.weights == b.weights);
      CHECK(a.only == b.only);
      CHECK(a.unless == b.unless);
      CHECK(a.evidence == b.evidence);
    }
  }
}

TEST_CASE("a broken file of gates is one clear error") {
  const std::string good =
      "{\"name\": \"a\", \"kernel\": \"mmq_tiles\", \"nt\": [9, 64], \"types\": [\"q4_0\"]}";
  CHECK(refusal(around(good)) == "");
  CHECK(refusal("") == "gates x: line 1: expected a value");
  CHECK(refusal("[]") == "gates x: line 1: a table of gates is an object");
  CHECK(refusal("{\"schema\": 2, \"gates\": []}").find("the last gate must be f32_matmul") !=
        std::string::npos);
  CHECK(refusal("{\"gates\": [{\"name\": \"f\", \"kernel\": \"f32_matmul\"}]}") ==
        "gates x: line 1: \"schema\": 1 is missing");
  CHECK(refusal("{\"schema\": 1}") == "gates x: line 1: 'gates' is missing");
  CHECK(refusal("{\"schema\": 1, \"gate\": []}") ==
        "gates x: line 1: a table has no 'gate'; it has schema, device, date, git, note, gates and evidence");
  CHECK(refusal(around("{\"name\": \"a\"}")) == "gates x: line 2: a gate needs 'name' and 'kernel'");
  CHECK(refusal(around("{\"name\": \"a\", \"kernel\": \"mmq\"}")) ==
        "gates x: line 2: no kernel 'mmq'; there are mmvq_tiles, mmvq_multi, mmq_tiles, gemm_tiles_wgmma, "
        "gemm_tiles_mma, gemm_f16_wgmma, gemm_f16_mma, f32_matmul");
  const auto with = [&](const std::string& member) {
    return refusal(around("{\"name\": \"a\", \"kernel\": \"mmq_tiles\",\n" + member + "}"));
  };
  const std::string range = "' must be [least, most]: whole numbers from 1, or null for most without a bound";
  for (const char* wrong :
       {"9", "[9]", "[9, 1.5]", "[0, 9]", "[null, 9]", "[\"9\", 10]", "[1, 2, 3]", "[1, 1e17]"}) {
    CAPTURE(wrong);
    CHECK(with("\"nt\": " + std::string(wrong)) == "gates x: line 3: 'nt" + range);
  }
  CHECK(with("\"id\": [9, 8]") == "gates x: line 3: 'id' is empty: 9 to 8");
  CHECK(with("\"types\": \"q4_0\"") ==
        "gates x: line 3: 'types' must be \"all\", \"blocks\" or a list, not 'q4_0'");
  CHECK(with("\"types\": []") == "gates x: line 3: 'types' is empty");
  CHECK(with("\"types\": [\"q4\"]").find("line 3: no type 'q4'; there are f32, f16, ") != std::string::npos);
  CHECK(with("\"only\": [\"LADDER_MMQ=2\"]")
            .find("no gate can ask for 'LADDER_MMQ=2'; allowed are LADDER_MMQ=0, ") != std::string::npos);
  CHECK(with("\"unless\": \"x\"") == "gates x: line 3: 'unless' must be a list of texts");
  CHECK(with("\"rows\": [1, 2]").find("line 3: a gate has no 'rows'; it has name, ") != std::string::npos);
  CHECK(with("\"name\": \"b\"") == "gates x: line 3: 'name' is there twice");
  CHECK(refusal(around(good + ",\n" + good)) == "gates x: line 1: two gates are called 'a'");
  CHECK(refusal("{\"schema\": 1, \"gates\": [" + good + "]}") ==
        "gates x: line 1: the last gate must be f32_matmul for all types, without bounds: it takes what no "
        "other does");
  // Every prefix of a sound file is an error, and never a crash.
  const std::string whole = to_json(seed_table(), "d");
  for (std::size_t n = 0; n + 2 < whole.size(); n += 7) CHECK(refusal(whole.substr(0, n)) != "");
}

TEST_CASE("JSON") {
  const auto error = [](const std::string& text) -> std::string {
    try {
      (void)JsonReader::read(text);
    } catch (const JsonError& e) {
      return e.what();
    }
    return "";
  };
  const JsonValue v = JsonReader::read(
      " {\"a\": [1, -2.5e3, true, false, null, \"\\u00e9\\ud83d\\ude00\\n\\/\"],\n\"b\": {}} ");
  REQUIRE(v.names == std::vector<std::string>{"a", "b"});
  const std::vector<JsonValue>& a = v.items[0].items;
  REQUIRE(a.size() == 6);
  CHECK(a[0].number == 1);
  CHECK(a[1].number == -2500);
  CHECK(a[2].boolean);
  CHECK(!a[3].boolean);
  CHECK(a[4].kind == JsonValue::Kind::null);
  CHECK(a[5].string == "\xc3\xa9\xf0\x9f\x98\x80\n/");
  CHECK(v.items[1].line == 2);
  CHECK(error("[1, 2,]") == "line 1: expected a value");
  CHECK(error("[1 2]") == "line 1: expected ']', found '2'");
  CHECK(error("[1") == "line 1: expected ']', found the end");
  CHECK(error("01") == "line 1: a number begins with 0");
  CHECK(error("1e999") == "line 1: a number is malformed or too large");
  CHECK(error("+1") == "line 1: expected a value");
  CHECK(error("\"\\x\"") == "line 1: there is no escape \\x");
  CHECK(error("\"\\ud800\"") == "line 1: half of a pair of surrogates");
  CHECK(error("\"\\ude00\"") == "line 1: half of a pair of surrogates");
  CHECK(error("\"\\u12g4\"") == "line 1: \\u takes four hexadecimal digits");
  CHECK(error("\"a\nb\"") == "line 2: a string holds a control character");
  CHECK(error("1 2") == "line 1: something follows the value");
  CHECK(error("{\"a\"\n\n 1}") == "line 3: expected ':', found '1'");
  CHECK(error(std::string(100, '[')) == "line 1: values are nested too deeply");
  CHECK(error("nul") == "line 1: expected a value");
}

TEST_CASE("which table") {
  const std::string text = to_json(seed_table(), "A");
  const std::vector<GatesFile> files = {{"a-gpu", text.c_str()}};
  Table t;
  REQUIRE(choose_table("", "a-gpu", files, &t).ok());
  CHECK(t.name == "a-gpu");
  CHECK(t.gates.size() == seed_table().gates.size());
  REQUIRE(choose_table("", "emulator-a-gpu", files, &t).ok());
  CHECK(t.name == "a-gpu");
  REQUIRE(choose_table("", "b-gpu", files, &t).ok());
  CHECK(t.name == "default");
  REQUIRE(choose_table("default", "a-gpu", files, &t).ok());
  CHECK(t.name == "default");
  REQUIRE(choose_table("seed", "a-gpu", files, &t).ok());
  CHECK(t.name == "seed");
  REQUIRE(choose_table("a-gpu", "b-gpu", files, &t).ok());
  CHECK(t.name == "a-gpu");
  CHECK(choose_table("no/such", "a-gpu", files, &t).message() == "gates no/such: the file cannot be read");
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("ladder-gates-" + std::to_string(getpid()) + ".json");
  std::ofstream(path) << text;
  REQUIRE(choose_table(path.string(), "a-gpu", files, &t).ok());
  CHECK(t.name == path.string());
  std::ofstream(path) << text << "}";
  CHECK(choose_table(path.string(), "a-gpu", files, &t).message() ==
        "gates " + path.string() + ": line 15: something follows the value");
  std::filesystem::remove(path);
}
