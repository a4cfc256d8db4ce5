// The device whose limits the emulator enforces.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace ladder::emu {

/// Sizes in bytes. The figures are those of the CUDA programming guide's table of technical specifications for
/// the compute capability, and of the product's datasheet for the number of SMs and the L2.
struct DeviceModel {
  const char* slug;
  const char* name;
  int cc_major, cc_minor;
  int sms;
  int max_threads_per_block;
  int max_threads_per_sm;
  int max_blocks_per_sm;
  int registers_per_sm;
  std::size_t l2_bytes;
  std::size_t l1_and_shared_per_sm;  ///< one array serves as L1 and as shared memory
  std::size_t shared_per_block;      ///< without opt-in
  std::size_t shared_per_block_optin;
  std::size_t shared_per_sm;
  std::size_t shared_reserved_per_block;  ///< taken by the system from every block
};

/// All known models; the first is the default.
std::span<const DeviceModel> device_models();

/// The model in use: `LADDER_EMULATOR_DEVICE=<slug>` chooses one, otherwise the first. Throws DeviceError that
/// lists the slugs when the variable names none of them.
const DeviceModel& device_model();

/// Replaces the model in use, for tests and for questions about another device. Throws as above.
void use_device_model(std::string_view slug);

inline constexpr int kWarpSize = 32;
inline constexpr int kBanks = 32;
inline constexpr unsigned kMaxThreads = 1024;

}  // namespace ladder::emu
