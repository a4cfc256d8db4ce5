// `qwen synthetic`: a model of any size, for measurements where the real weights cannot be had.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "chapters/09-qwen/commands.hpp"
#include "chapters/09-qwen/interrupt.hpp"
#include "chapters/09-qwen/session.hpp"
#include "chapters/09-qwen/synthetic.hpp"

namespace ladder::qwen {
namespace {

/// "q4_0,q6_k" as types.
std::vector<WeightType> layer_types(const std::string& text) {
  std::vector<WeightType> types;
  for (std::size_t at = 0; !text.empty() && at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    const std::string name = text.substr(at, end - at);
    const auto* const found = std::find_if(kWeightTypes.begin(), kWeightTypes.end(),
                                           [&name](const WeightTypeInfo& t) { return name == t.name; });
    if (found == kWeightTypes.end()) {
      std::string known;
      for (const WeightTypeInfo& t : kWeightTypes) known += (known.empty() ? "" : ", ") + std::string(t.name);
      throw CommandError("--layer-types: there is no type '" + name + "'; there are " + known);
    }
    types.push_back(found->type);
    at = end + 1;
  }
  return types;
}

}  // namespace

int synthetic_command(const SyntheticOptions& options) {
  SyntheticModel model;
  model.size = options.size;
  try {
    model.tied = !options.untied && tied_by_name(options.size);
  } catch (const std::invalid_argument& e) {
    throw CommandError(e.what());
  }
  model.type = find_file_type(options.type);
  if (model.type == nullptr) {
    throw CommandError("there is no file type '" + options.type + "'; known: " + file_type_names());
  }
  std::optional<gguf::File> vocabulary;
  if (!options.vocabulary.empty()) {
    require_readable(options.vocabulary, "--vocabulary");
    std::error_code error;
    if (std::filesystem::equivalent(options.vocabulary, options.out, error) && !error) {
      throw CommandError("OUT: " + options.out + " is the file that --vocabulary reads; give another name");
    }
    vocabulary.emplace(options.vocabulary, /*headers_only=*/true);
    model.vocabulary = &*vocabulary;
  }
  model.layers = layer_types(options.layer_types);
  require_writable(options.out);
  const Interrupt interrupt;
  model.seed = options.seed;
  model.threads = options.threads;
  model.progress = ::isatty(STDERR_FILENO) == 1;
  const std::uint64_t bytes = write_synthetic(options.out, model);
  char line[96];
  std::snprintf(line, sizeof line, ": %.2f MB, %s of random weights\n", static_cast<double>(bytes) / 1e6,
                std::string(model.type->description).c_str());
  print(options.out + line);
  return 0;
}

}  // namespace ladder::qwen
