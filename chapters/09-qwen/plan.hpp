// Which kernel multiplies which matrix of a model, for every number of rows: what the dispatch function says, asked for
// a whole model. No weights are read, and no device is needed.
#pragma once

#include <iosfwd>
#include <span>
#include <string>
#include <vector>

#include "chapters/09-qwen/model.hpp"
#include "harness/device/device_info.hpp"
#include "kernels/dispatch/dispatch.hpp"

namespace ladder::qwen {

/// What a device, an environment and a table make of every matmul.
struct DispatchSetting {
  dispatch::Table table;
  dispatch::Switches switches;
  DeviceInfo device;
  bool exact = false;
};

/// One matrix of a model.
struct PlannedMatrix {
  struct At {
    int nt = 0;
    std::string kernel, gate, margin;
    int tier = 0;
    double factor = 0;                 ///< of the margin; infinite if there is none
    std::vector<std::string> refused;  ///< "gate: reason" of the gates before
  };
  const gguf::Tensor* tensor = nullptr;
  std::vector<At> at;  ///< one for each number of rows that was asked for
};

/// Whether a token alone is multiplied by gemv_fused in place of the kernel that a gate decided for: with f32 activations,
/// in one launch with what stands around the product.
[[nodiscard]] bool fuses(dispatch::Kernel kernel, const gguf::Tensor& t, const DeviceInfo& device);

/// Every matrix that a forward pass multiplies, in its order.
/// @param rows numbers of token rows, each at least 1
/// Throws std::runtime_error for a matrix that no kernel takes.
[[nodiscard]] std::vector<PlannedMatrix> plan(const Model& model, const DispatchSetting& setting,
                                              std::span<const int> rows);

/// A table for people: matrices that differ in their layer alone are one line.
void print_text(std::ostream& out, const std::vector<PlannedMatrix>& planned, bool reasons);
/// A JSON list, a matrix each.
[[nodiscard]] std::string to_json(const std::vector<PlannedMatrix>& planned);

}  // namespace ladder::qwen
