#include "harness/emulator/device_model.hpp"

#include <atomic>
#include <cstdlib>
#include <string>

#include "harness/device/status.hpp"

namespace ladder::emu {
namespace {

constexpr std::size_t KiB = 1024, MiB = 1024 * 1024;

constexpr DeviceModel kModels[] = {
    {"nvidia-h200", "NVIDIA H200", 9, 0, 132, 1024, 2048, 32, 65536, 50 * MiB, 256 * KiB, 48 * KiB, 227 * KiB,
     228 * KiB, KiB},
    {"nvidia-a100-sxm4-80gb", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 1024, 2048, 32, 65536, 40 * MiB, 192 * KiB,
     48 * KiB, 163 * KiB, 164 * KiB, KiB},
    {"nvidia-geforce-rtx-4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, 1024, 1536, 24, 65536, 72 * MiB,
     128 * KiB, 48 * KiB, 99 * KiB, 100 * KiB, KiB},
    {"nvidia-gb10", "NVIDIA GB10", 12, 1, 48, 1024, 1536, 24, 65536, 24 * MiB, 128 * KiB, 48 * KiB, 99 * KiB,
     100 * KiB, KiB},
};

const DeviceModel& find(std::string_view slug) {
  std::string known;
  for (const DeviceModel& m : kModels) {
    if (slug == m.slug) return m;
    known += known.empty() ? "" : ", ";
    known += m.slug;
  }
  throw DeviceError("no device model '" + std::string(slug) + "'; known: " + known);
}

std::atomic<const DeviceModel*> chosen{nullptr};

}  // namespace

std::span<const DeviceModel> device_models() { return kModels; }

const DeviceModel& device_model() {
  const DeviceModel* m = chosen.load(std::memory_order_acquire);
  if (m == nullptr) {
    const char* slug = std::getenv("LADDER_EMULATOR_DEVICE");
    m = slug == nullptr || *slug == '\0' ? &kModels[0] : &find(slug);
    chosen.store(m, std::memory_order_release);
  }
  return *m;
}

void use_device_model(std::string_view slug) { chosen.store(&find(slug), std::memory_order_release); }

}  // namespace ladder::emu
