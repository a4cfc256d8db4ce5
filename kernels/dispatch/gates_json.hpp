// Tables of gates as files: data/gates/<device>.json, which `scripts/ladder tune` writes, and LADDER_GATES=FILE.
//
//   {"schema": 1, "device": "NVIDIA H200", "gates": [
//     {"name": "prefill.mmq", "kernel": "mmq_tiles", "types": ["q4_0", "q8_0"], "nt": [9, 64], "id": [2048, null],
//      "weights": [1, null], "only": ["LADDER_MMQ=1"], "unless": ["LADDER_NO_PREFILL_GEMM=1"], "evidence": "..."}, ...]}
//
// The order is that in which they are asked. "types" may be "all" or "blocks"; what is left out has no bound. "date",
// "git" and "evidence" of the whole are for readers.
#pragma once

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <system_error>

#include "harness/experiment/json.hpp"
#include "kernels/dispatch/dispatch.hpp"
#include "kernels/dispatch/json_reader.hpp"

namespace ladder::dispatch {

namespace detail {

[[noreturn]] inline void wrong(const JsonValue& v, const std::string& what) { throw JsonError(v.line, what); }

inline const std::string& text_of(const JsonValue& v, const std::string& name) {
  if (v.kind != JsonValue::Kind::string) wrong(v, "'" + name + "' must be a text");
  return v.string;
}

template <class Each>
void each_text(const JsonValue& v, const std::string& name, Each&& each) {
  if (v.kind != JsonValue::Kind::array) wrong(v, "'" + name + "' must be a list of texts");
  for (const JsonValue& item : v.items) each(item, text_of(item, name));
}

inline long long bound_of(const JsonValue& v, const std::string& name) {
  constexpr double kMost = 9e15;  // integers are exact in a double up to here
  if (v.kind != JsonValue::Kind::number || v.number != std::floor(v.number) || v.number < 1 ||
      v.number > kMost) {
    wrong(v, "'" + name + "' must be [least, most]: whole numbers from 1, or null for most without a bound");
  }
  return static_cast<long long>(v.number);
}

inline Range range_of(const JsonValue& v, const std::string& name) {
  if (v.kind != JsonValue::Kind::array || v.items.size() != 2) {
    wrong(v, "'" + name + "' must be [least, most]: whole numbers from 1, or null for most without a bound");
  }
  Range r;
  r.least = bound_of(v.items[0], name);
  if (v.items[1].kind != JsonValue::Kind::null) r.most = bound_of(v.items[1], name);
  if (r.most < r.least)
    wrong(v, "'" + name + "' is empty: " + std::to_string(r.least) + " to " + std::to_string(r.most));
  return r;
}

inline Conditions conditions_of(const JsonValue& v, const std::string& name) {
  Conditions set = 0;
  each_text(v, name, [&](const JsonValue& at, const std::string& text) {
    for (const ConditionInfo& c : kConditions) {
      if (text == c.name) {
        set |= c.bit;
        return;
      }
    }
    wrong(at, "no gate can ask for '" + text + "'; allowed are " + condition_names(~Conditions{0}));
  });
  return set;
}

inline TypeSet types_of(const JsonValue& v) {
  if (v.kind == JsonValue::Kind::string) {
    if (v.string == "all") return kAllTypes;
    if (v.string == "blocks") return kBlockTypes;
    wrong(v, "'types' must be \"all\", \"blocks\" or a list, not '" + v.string + "'");
  }
  TypeSet set = 0;
  each_text(v, "types", [&](const JsonValue& at, const std::string& text) {
    for (const WeightTypeInfo& t : kWeightTypes) {
      if (text == t.name) {
        set |= bit(t.type);
        return;
      }
    }
    std::string known;
    for (const WeightTypeInfo& t : kWeightTypes) known += (known.empty() ? "" : ", ") + std::string(t.name);
    wrong(at, "no type '" + text + "'; there are " + known);
  });
  if (set == 0) wrong(v, "'types' is empty");
  return set;
}

inline Kernel kernel_of(const JsonValue& v) {
  std::string known;
  for (const KernelInfo& k : kKernels) {
    if (text_of(v, "kernel") == k.id) return k.kernel;
    known += (known.empty() ? "" : ", ") + std::string(k.id);
  }
  wrong(v, "no kernel '" + v.string + "'; there are " + known);
}

inline Gate gate_of(const JsonValue& v) {
  if (v.kind != JsonValue::Kind::object) wrong(v, "a gate must be an object");
  Gate g;
  bool named = false, kernel = false;
  for (std::size_t i = 0; i < v.items.size(); ++i) {
    const std::string& name = v.names[i];
    const JsonValue& m = v.items[i];
    if (name == "name") {
      g.name = text_of(m, name);
      named = !g.name.empty();
    } else if (name == "kernel") {
      g.kernel = kernel_of(m);
      kernel = true;
    } else if (name == "types") {
      g.types = types_of(m);
    } else if (name == "nt") {
      g.nt = range_of(m, name);
    } else if (name == "id") {
      g.id = range_of(m, name);
    } else if (name == "weights") {
      g.weights = range_of(m, name);
    } else if (name == "only") {
      g.only = conditions_of(m, name);
    } else if (name == "unless") {
      g.unless = conditions_of(m, name);
    } else if (name == "evidence") {
      g.evidence = text_of(m, name);
    } else {
      wrong(m, "a gate has no '" + name +
                   "'; it has name, kernel, types, nt, id, weights, only, unless and evidence");
    }
  }
  if (!named || !kernel) wrong(v, "a gate needs 'name' and 'kernel'");
  return g;
}

/// What a table must have to be used: names that tell gates apart, and an answer for every shape.
inline void check_table(const JsonValue& at, const Table& t) {
  for (std::size_t i = 0; i < t.gates.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (t.gates[i].name == t.gates[j].name) wrong(at, "two gates are called '" + t.gates[i].name + "'");
    }
  }
  const Range any{};
  const auto catches_all = [&any](const Gate& g) {
    return g.kernel == Kernel::f32_matmul && g.types == kAllTypes && g.nt == any && g.id == any &&
           g.weights == any && g.only == 0 && g.unless == 0;
  };
  if (t.gates.empty() || !catches_all(t.gates.back())) {
    wrong(at, "the last gate must be f32_matmul for all types, without bounds: it takes what no other does");
  }
}

}  // namespace detail

/// A table from the text of a file. Error, with the line, for what is no table.
inline Status parse_table(std::string_view text, const std::string& name, Table* out) {
  using detail::wrong;
  try {
    const JsonValue root = JsonReader::read(text);
    if (root.kind != JsonValue::Kind::object) wrong(root, "a table of gates is an object");
    Table t{name, {}};
    bool schema = false, gates = false;
    for (std::size_t i = 0; i < root.items.size(); ++i) {
      const std::string& key = root.names[i];
      const JsonValue& m = root.items[i];
      if (key == "schema") {
        schema = m.kind == JsonValue::Kind::number && m.number == 1;
      } else if (key == "gates") {
        if (m.kind != JsonValue::Kind::array) wrong(m, "'gates' must be a list");
        for (const JsonValue& g : m.items) t.gates.push_back(detail::gate_of(g));
        detail::check_table(m, t);
        gates = true;
      } else if (key != "device" && key != "date" && key != "git" && key != "evidence" && key != "note") {
        wrong(m, "a table has no '" + key + "'; it has schema, device, date, git, note, gates and evidence");
      }
    }
    if (!schema) wrong(root, "\"schema\": 1 is missing");
    if (!gates) wrong(root, "'gates' is missing");
    *out = std::move(t);
    return {};
  } catch (const JsonError& e) {
    return Status::error("gates " + name + ": " + e.what());
  }
}

/// A table from a file.
inline Status read_table(const std::string& path, Table* out) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return Status::error("gates " + path + ": it is a folder");
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file.is_open() || file.bad()) return Status::error("gates " + path + ": the file cannot be read");
  return parse_table(text, path, out);
}

/// One gate a line, in the form that parse_table reads. @param device as the vendor reports it
inline std::string to_json(const Table& table, const std::string& device) {
  const auto texts = [](const std::vector<std::string>& items) {
    std::string list;
    for (const std::string& item : items) list += (list.empty() ? "" : ", ") + json_quote(item);
    return "[" + list + "]";
  };
  const auto range = [](const Range& r) {
    return "[" + std::to_string(r.least) + ", " + (r.most == Range::kNone ? "null" : std::to_string(r.most)) +
           "]";
  };
  const auto conditions = [&](Conditions set) {
    std::vector<std::string> names;
    for (const ConditionInfo& c : kConditions) {
      if ((set & c.bit) != 0) names.emplace_back(c.name);
    }
    return texts(names);
  };
  std::string out = "{\"schema\": 1, \"device\": " + json_quote(device) + ", \"gates\": [\n";
  for (const Gate& g : table.gates) {
    JsonObject o;
    o.add("name", g.name).add("kernel", info(g.kernel).id);
    if (g.types == kAllTypes || g.types == kBlockTypes) {
      o.add("types", g.types == kAllTypes ? "all" : "blocks");
    } else {
      std::vector<std::string> names;
      for (const WeightTypeInfo& t : kWeightTypes) {
        if (has(g.types, t.type)) names.emplace_back(t.name);
      }
      o.raw("types", texts(names));
    }
    const Range any{};
    if (!(g.nt == any)) o.raw("nt", range(g.nt));
    if (!(g.id == any)) o.raw("id", range(g.id));
    if (!(g.weights == any)) o.raw("weights", range(g.weights));
    if (g.only != 0) o.raw("only", conditions(g.only));
    if (g.unless != 0) o.raw("unless", conditions(g.unless));
    if (!g.evidence.empty()) o.add("evidence", g.evidence);
    out += "  " + o.str() + (&g == &table.gates.back() ? "\n" : ",\n");
  }
  return out + "]}\n";
}

}  // namespace ladder::dispatch
