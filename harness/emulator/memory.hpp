// Device memory of the emulator: where it is, what it is called, and who has written it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ladder::emu {

/// One allocation. Its last byte lies as close as its alignment allows to an inaccessible page, so that even
/// without checks an overrun of more than `kAlignment` bytes is caught by the hardware.
struct Allocation {
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;
  std::string name;
  void* mapping = nullptr;
  std::size_t mapping_bytes = 0;
  /// One bit a byte, set once the byte has been written by the host or by a kernel. Empty when all have been.
  std::vector<std::uint64_t> written;
  bool all_written = false;
};

inline constexpr std::size_t kAlignment = 256;  ///< what cudaMalloc promises

/// Reserves device memory. Throws DeviceError when the host has not enough.
void* allocate(std::size_t bytes, const char* name);
void release(void* data);

/// Tells the emulator that the host has written `bytes` at `data` (part of one allocation).
void note_written(const void* data, std::size_t bytes);
/// The same for a device-to-device copy: the destination is as written as the source was.
void note_copied(void* destination, const void* source, std::size_t bytes);

/// The allocations at this moment, sorted by address. A buffer that is freed meanwhile stays described.
std::vector<std::shared_ptr<Allocation>> allocations();

/// Which bytes of `a` have been written, a bit each, or nothing if all have.
std::vector<std::uint64_t> written_bytes(const Allocation& a);
/// Replaces that by what is known after a launch.
void set_written_bytes(Allocation& a, std::vector<std::uint64_t> bits);
/// After a launch that nobody watched, no byte can be called unwritten.
void assume_all_written();

/// Where an address lies next to: the allocation whose bytes or inaccessible pages hold it.
struct Neighbour {
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;
  std::string name;
};
std::optional<Neighbour> nearest_allocation(std::uintptr_t address);

}  // namespace ladder::emu
