// `qwen explain`: what is in a file, and how fast its bytes could be read.
#include <cmath>
#include <cstdlib>
#include <sstream>

#include "chapters/09-qwen/census.hpp"
#include "chapters/09-qwen/commands.hpp"
#include "chapters/09-qwen/devices.hpp"
#include "chapters/09-qwen/session.hpp"

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

}  // namespace

int explain_command(const ExplainOptions& options) {
  std::vector<Bandwidth> devices;
  for (const DeviceBandwidth& d : device_bandwidths()) devices.push_back({d.name, d.gbps});
  for (const std::string& text : options.bandwidths) devices.push_back(parse_bandwidth(text));
  require_readable(options.model, "model");
  const gguf::File file(options.model, /*headers_only=*/true);
  const Model model(file);
  if (options.context > model.hp.context_length) {
    throw CommandError("-c: the model's context is " + std::to_string(model.hp.context_length) +
                       " tokens, not " + std::to_string(options.context));
  }
  const Census result = census(model, devices, options.context);
  if (options.json) {
    print(to_json(result) + "\n");
    return 0;
  }
  std::ostringstream text;
  print_text(text, result);
  print(text.str());
  return 0;
}

}  // namespace ladder::qwen
