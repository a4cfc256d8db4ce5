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
    "usage: dispatch [--type T,..] [--size S] [--layer L,..] [--nt N,..] [--device SLUG] [--gates G] "
    "[--exact] [--reasons] "
    "[--table]\n"
    "  --type T,..     types of the weights (q4_0)\n"
    "  --size S        of the model: 0.5b 1.5b 3b 7b 14b 32b 72b (0.5b)\n"
    "  --layer L,..    of these matrices alone: attn_q, ffn_down, ... (all)\n"
    "  --nt N,..       numbers of token rows (1,8,9,512)\n"
    "  --device SLUG   a file of data/devices (nvidia-h200)\n"
    "  --gates G       default, seed, a device's slug, or a file (LADDER_GATES, else the device's)\n"
    "  --exact         activations stay f32\n"
    "  --reasons       why the gates before did not decide\n"
    "  --table         print the gates alone\n"
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

long long number(const std::string& text) {
  char* end = nullptr;
  const long long n = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || n < 1) fail("--nt: '" + text + "' is not a whole number above 0");
  return n;
}

}  // namespace

int main(int argc, char** argv) {
  std::string types = "q4_0", size = "0.5b", rows = "1,8,9,512", slug = "nvidia-h200", gates, layers;
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
      size = value();
    } else if (word == "--layer") {
      layers = value();
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
  Table table;
  if (Status ok = choose_table(gates.empty() ? switches.gates : gates, slug, gates_files(), &table);
      !ok.ok()) {
    fail(ok.message());
  }
  if (table_only) {
    std::printf("%s", to_text(table).c_str());
    return 0;
  }
  std::printf("%-17s %-16s %-7s %5s %-24s %-26s %s\n", "matrix", "[od, id]", "type", "nt", "kernel", "gate",
              "margin");
  for (const std::string& name : split(types)) {
    const WeightType type = type_named(name);
    for (const QwenLayer& layer : qwen_layers(size_named(size))) {
      const std::vector<std::string> wanted = split(layers);
      const std::string role = layer.name.substr(layer.name.rfind('.') + 1);
      if (!layers.empty() && std::find(wanted.begin(), wanted.end(), role) == wanted.end()) continue;
      for (const std::string& nt : split(rows)) {
        const Request request{type, {number(nt), layer.od, layer.id}, exact};
        Decision d;
        const std::string shape = "[" + std::to_string(layer.od) + ", " + std::to_string(layer.id) + "]";
        if (Status ok = decide(table, request, device, switches, &d); !ok.ok()) {
          std::printf("%-17s %-16s %-7s %5s %s\n", layer.name.c_str(), shape.c_str(), name.c_str(),
                      nt.c_str(), ok.message().c_str());
          break;  // the shape, whatever nt is
        }
        std::printf("%-17s %-16s %-7s %5s %-24s %-26s %s\n", layer.name.c_str(), shape.c_str(), name.c_str(),
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
