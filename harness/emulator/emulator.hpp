// Running a kernel on the emulator: what the device seam calls. Readers of the workbook call ladder::launch.
#pragma once

#include <cstddef>

#include "harness/device/status.hpp"
#include "harness/emulator/vector_types.hpp"

namespace ladder::emu {

/// A kernel parameter that is a pointer.
struct PointerArgument {
  const void* address = nullptr;
  bool to_const = false;  ///< declared as a pointer to const: the kernel does not write through it
};

/// One kernel launch with its argument types erased.
struct LaunchRequest {
  const void* kernel = nullptr;  ///< the kernel's address: its name is found by it
  void (*invoke)(const void* kernel, const void* arguments) = nullptr;  ///< calls the kernel for one thread
  const void* arguments = nullptr;
  std::size_t argument_bytes = 0;
  const PointerArgument* pointers = nullptr;
  std::size_t pointer_count = 0;
  dim3 grid, block;
  std::size_t shared_bytes = 0;  ///< dynamic shared memory
};

/// Runs all blocks and waits for them. The error of a failed launch names kernel, block and thread; where
/// several blocks fail it is that of the first one. Threads of the host may launch at the same time; their
/// launches run one after the other.
Status run(const LaunchRequest& request);

/// Number of OS threads that run blocks: `LADDER_EMULATOR_THREADS`, or one for each core, at most 24.
unsigned worker_count();

/// Stack of one kernel thread; an overrun is reported as an error of the launch.
inline constexpr std::size_t kStackBytes = 128 * 1024;

}  // namespace ladder::emu
