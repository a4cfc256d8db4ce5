// `qwen explain`: what is in a file, how fast its bytes could be read, and which kernel multiplies what.
#include <cmath>
#include <cstdlib>
#include <sstream>

#include "chapters/09-qwen/bench.hpp"
#include "chapters/09-qwen/census.hpp"
#include "chapters/09-qwen/commands.hpp"
#include "chapters/09-qwen/devices.hpp"
#include "chapters/09-qwen/plan.hpp"
#include "chapters/09-qwen/session.hpp"
#include "kernels/dispatch/tables.hpp"

namespace ladder::qwen {
namespace {

Bandwidth parse_bandwidth(const std::string& text) {
  const std::size_t equals = text.rfind('=');
  char* end = nullptr;
  const double gbps = equals == std::string::npos ? 0 : std::strtod(text.c_str() + equals + 1, &end);
  if (equals == std::string::npos || equals == 0 || end == text.c_str() + equals + 1 || *end != '\0' ||
      !std::isfinite(gbps) || gbps <= 0) {
    throw CommandError("--bandwidth: '" + text + "' is not NAME=GBPS, such as mine=273");
  }
  return {text.substr(0, equals), gbps};
}

/// The GPU that kernels are chosen for: the named one, or the one of this machine, or of the emulator; without any of
/// them the first that is known.
DeviceInfo device_of(std::string slug) {
  if (slug.empty() && device_present()) return build_device();
  if (slug.empty()) slug = known_devices()[0].slug;
  std::string known;
  for (const KnownDevice& d : known_devices()) {
    if (slug == d.slug) {
      DeviceInfo device;
      device.executor = Executor::gpu;
      device.name = d.name;
      device.slug = d.slug;
      device.cc_major = d.cc_major;
      device.cc_minor = d.cc_minor;
      device.shared_per_block_optin = d.shared_per_block_optin;
      return device;
    }
    known += (known.empty() ? "" : ", ") + std::string(d.slug);
  }
  throw CommandError("--device: no device '" + slug + "'; there are " + known);
}

std::vector<int> rows_of(const std::string& text) {
  try {
    return parse_list(text, 1, 1 << 24);
  } catch (const std::invalid_argument& e) {
    throw CommandError(std::string("--nt: ") + e.what());
  }
}

}  // namespace

int explain_command(const ExplainOptions& options) {
  std::vector<Bandwidth> devices;
  for (const KnownDevice& d : known_devices()) devices.push_back({d.name, d.gbps});
  for (const std::string& text : options.bandwidths) devices.push_back(parse_bandwidth(text));
  require_readable(options.model, "model");
  const gguf::File file(options.model, /*headers_only=*/true);
  const Model model(file);
  if (options.context > model.hp.context_length) {
    throw CommandError("-c: the model's context is " + std::to_string(model.hp.context_length) +
                       " tokens, not " + std::to_string(options.context));
  }
  const Census result = census(model, devices, options.context);
  DispatchSetting setting;
  setting.switches = environment_switches();
  if (!options.gates.empty()) setting.switches.gates = options.gates;
  setting.device = device_of(options.device);
  setting.exact = options.exact;
  setting.table = gates_for(setting.switches, setting.device);
  const std::vector<PlannedMatrix> planned = plan(model, setting, rows_of(options.rows));
  if (options.json) {
    std::string text = to_json(result);
    text.pop_back();  // the brace
    text += ", \"gates\": " + json_quote(setting.table.name) +
            ", \"dispatch_device\": " + json_quote(setting.device.name) +
            ", \"dispatch\": " + to_json(planned) + "}\n";
    print(text);
    return 0;
  }
  std::ostringstream text;
  print_text(text, result);
  text << "\nkernels on " << setting.device.name << ", by the gates '" << setting.table.name << "'";
  if (setting.switches.conditions != 0 || setting.switches.small_m_gemm) {
    text << " with " << dispatch::condition_names(setting.switches.conditions)
         << (setting.switches.conditions != 0 && setting.switches.small_m_gemm ? ", " : "")
         << (setting.switches.small_m_gemm ? "LADDER_SMALL_M_GEMM=1" : "");
  }
  text << ";\nmargin: what alone would have to change for another gate to decide\n";
  print_text(text, planned, options.reasons);
  if (options.show_gates) text << "\n" << dispatch::to_text(setting.table);
  print(text.str());
  return 0;
}

}  // namespace ladder::qwen
