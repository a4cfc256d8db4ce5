// The device seam. Host code of the workbook talks to a device through these names only:
//
//   Stream              an ordered queue of work
//   Buffer<T>           RAII device memory
//   HostBuffer<T>       host memory that kernels can write
//   Timer               elapsed device time between two points of a stream, in ns
//   Graph               a captured sequence of launches that replays with one call
//   launch(...)         start a kernel; never a chevron in host code
//   device_info()       limits of the device, by attribute queries
//
// There are two implementations with one interface: CUDA (this translation unit is compiled by nvcc) and the
// SIMT emulator (compiled by the host compiler). `kDeviceExecutor` says which one this build has.
#pragma once

#include "harness/device/device_info.hpp"
#include "harness/device/shape.hpp"
#include "harness/device/status.hpp"

#if defined(__CUDACC__)
#include "harness/device/device_cuda.hpp"
#else
#include "harness/device/device_emulator.hpp"
#endif
