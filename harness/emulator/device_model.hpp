// The device whose limits the emulator enforces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace ladder::emu {

/// Sizes in bytes. A model for each file in data/devices, which names the source of every figure; the table is
/// generated from them (scripts/device_table.py). Members with a value here are the same on every GPU of compute
/// capability 8.0 to 12.1, by the table of technical specifications in the CUDA programming guide.
struct DeviceModel {
  const char* slug;
  const char* name;
  int cc_major, cc_minor;
  int sms;
  int max_threads_per_block = 1024;
  int max_threads_per_sm;
  int max_blocks_per_sm;
  int registers_per_sm;
  std::size_t l2_bytes;
  std::size_t l1_and_shared_per_sm;          ///< one array serves as L1 and as shared memory
  std::size_t shared_per_block = 48 * 1024;  ///< without opt-in
  std::size_t shared_per_block_optin;
  std::size_t shared_per_sm;
  std::size_t shared_reserved_per_block = 1024;  ///< taken by the system from every block
};

/// All known models; the first is the default.
std::span<const DeviceModel> device_models();

/// The model in use: `LADDER_EMULATOR_DEVICE=<slug>` chooses one, otherwise the first. A name that is none of them ends
/// the program with a line that lists them, and exit status 2: no result would mean what was asked for.
const DeviceModel& device_model();

/// Replaces the model in use, for tests and for questions about another device. Throws a DeviceError that lists the
/// slugs.
void use_device_model(std::string_view slug);

/// Registers of one thread of a kernel, which only a GPU's compiler knows; 0: not known, and then they limit nothing.
/// LADDER_EMULATOR_REGISTERS gives them: one number for all kernels, or `name=number` parts between semicolons, the
/// names as reports print them. A text of another form ends the program with one line and exit status 2.
unsigned registers_per_thread(std::string_view kernel);

/// Bytes of memory that are free on the device: LADDER_EMULATOR_MEMORY, to see what a program does when there is little;
/// 0: as many as the host has free.
std::size_t free_memory();

/// LADDER_EMULATOR_LAUNCHES=N: every launch after the first N fails, as on a GPU that was lost; 0: none does.
std::uint64_t launches_until_lost();

inline constexpr int kWarpSize = 32;
inline constexpr int kBanks = 32;
inline constexpr unsigned kMaxThreads = 1024;

}  // namespace ladder::emu
