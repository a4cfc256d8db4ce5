// What the harness needs to know about the machine it measures.
#pragma once

#include <cctype>
#include <cstddef>
#include <string>

namespace ladder {

/// The three ways to run a rung. A CUDA build has `gpu`; a host build has `emulator` and `cpu`.
enum class Executor { gpu, emulator, cpu };

inline const char* to_string(Executor e) {
  switch (e) {
    case Executor::gpu:
      return "gpu";
    case Executor::emulator:
      return "emulator";
    case Executor::cpu:
      return "cpu";
  }
  return "?";
}

/// Limits and sizes of a device. Bytes unless said otherwise. For `cpu`, `sms` is the number of hardware
/// threads, `l2_bytes` the last-level cache, and the CUDA-only fields are zero.
struct DeviceInfo {
  Executor executor = Executor::cpu;
  std::string name;  ///< as the vendor reports it
  std::string slug;  ///< folder name under data/runs
  int cc_major = 0, cc_minor = 0;
  int sms = 0;
  int warp_size = 32;
  int max_threads_per_block = 0;
  int max_threads_per_sm = 0;
  int registers_per_sm = 0;
  std::size_t l2_bytes = 0;
  std::size_t shared_per_block = 0;        ///< without opt-in (48 KiB on current GPUs)
  std::size_t shared_per_block_optin = 0;  ///< after raising the kernel's dynamic limit
  std::size_t shared_per_sm = 0;
  std::size_t total_bytes = 0;  ///< device memory (host memory for cpu and emulator)
};

/// "NVIDIA H200" -> "nvidia-h200": lower case, runs of anything else become one dash.
inline std::string slugify(const std::string& name) {
  std::string out;
  for (char c : name) {
    if (std::isalnum(static_cast<unsigned char>(c))) {
      out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    } else if (!out.empty() && out.back() != '-') {
      out += '-';
    }
  }
  while (!out.empty() && out.back() == '-') out.pop_back();
  return out.empty() ? "unknown" : out;
}

}  // namespace ladder
