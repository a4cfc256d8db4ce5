// A rung of the ladder: one matmul kernel with everything the harness needs to check it, time it and place it
// under the roofs.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "harness/device/device.hpp"
#include "harness/experiment/traffic.hpp"

namespace ladder {

namespace cpu {
class ThreadPool;
}

/// What a matmul launcher takes. `weights` are packed as the rung's WeightType says, row-major [od][id].
using DeviceMatmul =
    std::function<Status(const float* weights, const float* acts, float* out, Shape shape, Stream& stream)>;
using CpuMatmul = std::function<void(const float* weights, const float* acts, float* out, Shape shape,
                                     cpu::ThreadPool& pool)>;

struct Rung {
  std::string id;       ///< one id in file, kernel, launcher, test, record and plot label
  std::string chapter;  ///< "01-scalar-gemv"
  std::string title;    ///< the idea in a few words
  std::string source;   ///< file that holds the kernel between ANCHOR lines named after the id
  WeightType weight_type = WeightType::f32;
  ActivationFormat acts = ActivationFormat::f32;
  /// Which shapes the kernel takes on this device; the error says what would be allowed.
  std::function<Status(Shape, const DeviceInfo&)> supported;
  DeviceMatmul device;  ///< launcher for `gpu` and `emulator`; empty if there is none
  CpuMatmul cpu;        ///< the CPU twin; empty if there is none
  /// Upper bound on the f32 roundings any single term meets on its way into an output (see check_outputs).
  std::function<double(Shape, Executor)> roundings;
  std::string peer_name;  ///< set for somebody else's kernel that is only measured against
  std::string peer_version;

  Traffic traffic(const Shape& s) const { return compulsory_traffic(weight_type, acts, s); }
  Work work(const Shape& s) const { return {matmul_ops(s), "flop"}; }
  bool runs_on(Executor e) const {
    return e == Executor::cpu ? static_cast<bool>(cpu) : static_cast<bool>(device);
  }
};

/// Accepts every shape with positive axes.
inline Status any_shape(Shape s, const DeviceInfo&) {
  if (s.nt >= 1 && s.od >= 1 && s.id >= 1) return {};
  return Status::error("nt, od and id must all be at least 1");
}

}  // namespace ladder
