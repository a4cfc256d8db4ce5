#include "harness/emulator/device_model.hpp"

#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "harness/device/status.hpp"

namespace ladder::emu {
namespace {

const DeviceModel* find(std::string_view slug) {
  for (const DeviceModel& m : device_models()) {
    if (slug == m.slug) return &m;
  }
  return nullptr;
}

std::string unknown(std::string_view slug) {
  std::string known;
  for (const DeviceModel& m : device_models()) known += (known.empty() ? "" : ", ") + std::string(m.slug);
  return "no device model '" + std::string(slug) + "'; known: " + known;
}

/// A mistake in the environment, found where no caller could do anything about it.
[[noreturn]] void refuse(const std::string& variable, const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", variable.c_str(), what.c_str());
  std::exit(2);
}

std::atomic<const DeviceModel*> chosen{nullptr};

struct Registers {
  unsigned all = 0;
  std::map<std::string, unsigned, std::less<>> by_kernel;
};

Registers read_registers() {
  Registers r;
  const char* text = std::getenv("LADDER_EMULATOR_REGISTERS");
  std::string_view rest = text == nullptr ? "" : text;
  while (!rest.empty()) {
    const std::string_view part = rest.substr(0, rest.find(';'));
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
    const std::size_t equals = part.rfind('=');
    const std::string_view digits = equals == std::string_view::npos ? part : part.substr(equals + 1);
    unsigned n = 0;
    const auto [end, error] = std::from_chars(digits.begin(), digits.end(), n);
    if (error != std::errc() || end != digits.end() || n < 1 || n > 255) {
      refuse("LADDER_EMULATOR_REGISTERS",
             "'" + std::string(part) + "' is neither a number from 1 to 255 nor kernel=number");
    }
    if (equals == std::string_view::npos) {
      r.all = n;
    } else {
      r.by_kernel[std::string(part.substr(0, equals))] = n;
    }
  }
  return r;
}

/// A variable that holds a whole number; 0 without it.
std::uint64_t read_count(const char* variable) {
  const char* text = std::getenv(variable);
  const std::string_view digits = text == nullptr ? "" : text;
  if (digits.empty()) return 0;
  std::uint64_t n = 0;
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), n);
  if (error != std::errc() || end != digits.end() || n < 1)
    refuse(variable, "'" + std::string(digits) + "' is not a whole number above 0");
  return n;
}

}  // namespace

std::size_t free_memory() {
  static const std::uint64_t bytes = read_count("LADDER_EMULATOR_MEMORY");
  return bytes;
}

std::uint64_t launches_until_lost() {
  static const std::uint64_t launches = read_count("LADDER_EMULATOR_LAUNCHES");
  return launches;
}

const DeviceModel& device_model() {
  const DeviceModel* m = chosen.load(std::memory_order_acquire);
  if (m == nullptr) {
    const char* slug = std::getenv("LADDER_EMULATOR_DEVICE");
    m = slug == nullptr || *slug == '\0' ? &device_models().front() : find(slug);
    if (m == nullptr) refuse("LADDER_EMULATOR_DEVICE", unknown(slug));
    chosen.store(m, std::memory_order_release);
  }
  return *m;
}

void use_device_model(std::string_view slug) {
  const DeviceModel* m = find(slug);
  if (m == nullptr) throw DeviceError(unknown(slug));
  chosen.store(m, std::memory_order_release);
}

unsigned registers_per_thread(std::string_view kernel) {
  static const Registers registers = read_registers();
  const auto it = registers.by_kernel.find(kernel);
  return it != registers.by_kernel.end() ? it->second : registers.all;
}

}  // namespace ladder::emu
