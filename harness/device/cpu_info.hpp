// The host processor as a device: name, hardware threads, last-level cache, memory.
#pragma once

#include "harness/device/device_info.hpp"

namespace ladder {

/// Reads the operating system's description of the CPU. `l2_bytes` is the last-level cache that one thread
/// can use (a cold measurement rotates through four times as much), `total_bytes` the memory available right
/// now.
DeviceInfo cpu_info();

}  // namespace ladder
