// Asks the dispatch function: which kernel multiplies a matrix of a Qwen2.5 model, which gate decided, and how far away
// the next decision is. No device and no model are needed.
//
//   build/chapters/07-dispatch/dispatch --size 7b --type q4_k --nt 1,8,9,512 --gates seed
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "chapters/09-qwen/devices.hpp"
#include "harness/experiment/qwen_shapes.hpp"
#include "kernels/dispatch/tables.hpp"

namespace {

using namespace ladder;
using namespace ladder::dispatch;

constexpr const char* kHelp =
    "usage: dispatch [--type T,..] [--size S,..] [--layer L,..] [--nt N,..] [--device SLUG] [--gates G] "
    "[--exact] [--reasons] "
    "[--table | --borders G,..]\n"
    "  --type T,..     types of the weights (q4_0)\n"
    "  --size S,..     of the models: 0.5b 1.5b 3b 7b 14b 32b 72b (0.5b)\n"
    "  --layer L,..    of these matrices alone: attn_q, ffn_down, ... (all)\n"
    "  --nt N,..       numbers of token rows (1,8,9,512)\n"
    "  --device SLUG   a file of data/devices (nvidia-h200)\n"
    "  --gates G       default, seed, a device's slug, or a file (LADDER_GATES, else the device's)\n"
    "  --exact         activations stay f32\n"
    "  --reasons       why the gates before did not decide\n"
    "  --table         print the gates alone\n"
    "  --borders G,..  the kernels for 1 to 512 rows by these gates side by side: those of a device on that "
    "device,\n"
    "                  the seed's on the GB10 that they are from\n"
    "Environment:\n";

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "dispatch: %s\n", what.c_str());
  std::exit(2);
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

WeightType type_named(const std::string& name) {
  std::string known;
  for (const WeightTypeInfo& t : kWeightTypes) {
    if (name == t.name) return t.type;
    known += (known.empty() ? "" : ", ") + std::string(t.name);
  }
  fail("no type '" + name + "'; there are " + known);
}

QwenSize size_named(const std::string& name) {
  std::string known;
  for (const QwenSize& s : kQwenSizes) {
    if (name == s.name) return s;
    known += (known.empty() ? "" : ", ") + std::string(s.name);
  }
  fail("no size '" + name + "'; there are " + known);
}

DeviceInfo device_named(const std::string& slug) {
  std::string known;
  for (const qwen::KnownDevice& d : qwen::known_devices()) {
    if (slug == d.slug) {
      DeviceInfo info;
      info.executor = Executor::gpu;
      info.name = d.name;
      info.slug = d.slug;
      info.cc_major = d.cc_major;
      info.cc_minor = d.cc_minor;
      return info;
    }
    known += (known.empty() ? "" : ", ") + std::string(d.slug);
  }
  fail("no device '" + slug + "'; there are " + known);
}

Table table_named(const std::string& gates, const std::string& slug) {
  Table table;
  if (Status ok = choose_table(gates, slug, gates_files(), &table); !ok.ok()) fail(ok.message());
  return table;
}

/// The matrices of models, or those of some roles: "ffn_down,output".
std::vector<QwenLayer> chosen_layers(const std::string& sizes, const std::string& roles) {
  const std::vector<std::string> wanted = split(roles);
  std::vector<QwenLayer> all;
  for (const std::string& size : split(sizes)) {
    for (const QwenLayer& layer : qwen_layers(size_named(size))) {
      const std::string role = layer.name.substr(layer.name.rfind('.') + 1);
      if (roles.empty() || std::find(wanted.begin(), wanted.end(), role) != wanted.end())
        all.push_back(layer);
    }
  }
  return all;
}

/// A table and the device that it decides for.
struct Side {
  Table table;
  DeviceInfo device;
};

/// The kernels of a matrix from one row to many: "mmvq_tiles 1-8, mmq_tiles from 9".
std::string spans(const Side& side, const Request& one, const Switches& switches) {
  constexpr long long kMost = 512;
  std::string text;
  const Gate* before = nullptr;
  long long begin = 1;
  Request r = one;
  for (r.shape.nt = 1; r.shape.nt <= kMost; ++r.shape.nt) {
    const Gate* now = first_gate(side.table, r, side.device, switches);
    if (now == nullptr) return "no kernel at nt " + std::to_string(r.shape.nt);
    if (before != nullptr && now->kernel != before->kernel) {
      const long long end = r.shape.nt - 1;
      text += std::string(info(before->kernel).id) + " " + std::to_string(begin) +
              (end > begin ? "-" + std::to_string(end) : "") + ", ";
      begin = r.shape.nt;
    }
    before = now;
  }
  return text + info(before->kernel).id + (begin > 1 ? " from " + std::to_string(begin) : " always");
}

void print_borders(const std::string& tables, const std::string& types, const std::vector<QwenLayer>& layers,
                   const std::string& slug, bool exact, const Switches& switches) {
  std::vector<Side> sides;
  std::vector<std::string> heads;
  std::printf("%-17s %-16s %-7s", "matrix", "[od, id]", "type");
  for (const std::string& name : split(tables)) {
    const auto devices = qwen::known_devices();
    const bool own =
        std::any_of(devices.begin(), devices.end(), [&](const auto& d) { return name == d.slug; });
    const std::string on = own ? name : name == "seed" ? "nvidia-gb10" : slug;
    sides.push_back({table_named(name, slug), device_named(on)});
    heads.push_back("gates " + name + ", " + sides.back().device.name);
  }
  for (const std::string& head : heads)
    std::printf(&head == &heads.back() ? " %s\n" : " %-46s", head.c_str());
  for (const std::string& name : split(types)) {
    const WeightType type = type_named(name);
    for (const QwenLayer& layer : layers) {
      const Request one{type, {1, layer.od, layer.id}, exact};
      if (!check_shape(type, one.shape).ok()) continue;
      const std::string shape = "[" + std::to_string(layer.od) + ", " + std::to_string(layer.id) + "]";
      std::printf("%-17s %-16s %-7s", layer.name.c_str(), shape.c_str(), name.c_str());
      for (const Side& side : sides) {
        std::printf(&side == &sides.back() ? " %s\n" : " %-46s", spans(side, one, switches).c_str());
      }
    }
  }
}

long long number(const std::string& text) {
  char* end = nullptr;
  const long long n = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || n < 1) fail("--nt: '" + text + "' is not a whole number above 0");
  return n;
}

}  // namespace

int main(int argc, char** argv) {
  std::string types = "q4_0", sizes = "0.5b", rows = "1,8,9,512", slug = "nvidia-h200", gates, roles, borders;
  bool exact = false, reasons = false, table_only = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 >= argc) fail(std::string(word) + " needs a value");
      return argv[++i];
    };
    if (word == "--type") {
      types = value();
    } else if (word == "--size") {
      sizes = value();
    } else if (word == "--layer") {
      roles = value();
    } else if (word == "--nt") {
      rows = value();
    } else if (word == "--device") {
      slug = value();
    } else if (word == "--gates") {
      gates = value();
    } else if (word == "--exact") {
      exact = true;
    } else if (word == "--reasons") {
      reasons = true;
    } else if (word == "--table") {
      table_only = true;
    } else if (word == "--borders") {
      borders = value();
    } else if (word == "--help") {
      std::printf("%s%s", kHelp, switches_help().c_str());
      return 0;
    } else {
      fail("no option '" + std::string(word) + "'; dispatch --help lists them");
    }
  }
  const DeviceInfo device = device_named(slug);
  Switches switches;
  if (Status ok = read_switches(std::getenv, &switches); !ok.ok()) fail(ok.message());
  const std::vector<QwenLayer> layers = chosen_layers(sizes, roles);
  if (!borders.empty()) {
    print_borders(borders, types, layers, slug, exact, switches);
    return 0;
  }
  const Table table = table_named(gates.empty() ? switches.gates : gates, slug);
  if (table_only) {
    std::printf("%s", to_text(table).c_str());
    return 0;
  }
  std::printf("%-17s %-16s %-7s %5s %-24s %-30s %s\n", "matrix", "[od, id]", "type", "nt", "kernel", "gate",
              "margin");
  for (const std::string& name : split(types)) {
    const WeightType type = type_named(name);
    for (const QwenLayer& layer : layers) {
      for (const std::string& nt : split(rows)) {
        const Request request{type, {number(nt), layer.od, layer.id}, exact};
        Decision d;
        const std::string shape = "[" + std::to_string(layer.od) + ", " + std::to_string(layer.id) + "]";
        if (Status ok = decide(table, request, device, switches, &d); !ok.ok()) {
          std::printf("%-17s %-16s %-7s %5s %s\n", layer.name.c_str(), shape.c_str(), name.c_str(),
                      nt.c_str(), ok.message().c_str());
          break;  // the shape, whatever nt is
        }
        std::printf("%-17s %-16s %-7s %5s %-24s %-30s %s\n", layer.name.c_str(), shape.c_str(), name.c_str(),
                    nt.c_str(), kernel_name(d.kernel(), type, layer.id).c_str(), d.gate->name.c_str(),
                    to_text(d.margin).c_str());
        for (const Verdict& v : d.refused) {
          if (reasons)
            std::printf("%48s not %s: %s\n", "", v.gate->name.c_str(), to_text(v, request, device).c_str());
        }
      }
    }
  }
  return 0;
}
