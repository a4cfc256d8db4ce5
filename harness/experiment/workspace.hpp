// Device memory that a kernel needs besides its operands, for rungs. Programs bring their own.
#pragma once

#include <cstddef>
#include <memory>

#include "harness/device/device.hpp"

namespace ladder {

/// Grows to the largest size asked for. A rung's launcher holds one: the check before a measurement makes it large enough,
/// so nothing is allocated while kernels are timed or captured. Copies share the memory. New memory is poisoned.
class Workspace {
 public:
  /// At least `bytes` bytes at a multiple of 16, or null for none. Throws DeviceError if there is no memory left.
  float* floats(std::size_t bytes) {
    if (bytes == 0) return nullptr;
    const std::size_t count = (bytes + sizeof(float) - 1) / sizeof(float);
    if (memory_->size() < count) {
      *memory_ = Buffer<float>();  // the old one goes before the new one comes
      *memory_ = Buffer<float>(count, "workspace");
      memory_->fill_bytes(0xFF);
    }
    return memory_->data();
  }

 private:
  std::shared_ptr<Buffer<float>> memory_ = std::make_shared<Buffer<float>>();
};

}  // namespace ladder
