#include "harness/device/cpu_info.hpp"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

namespace ladder {
namespace {

/// First value of `key` in a "key : value" file, or "".
std::string field(const char* path, const std::string& key) {
  std::ifstream in(path);
  std::string line;
  while (std::getline(in, line)) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

/// Largest cache that sysfs lists for core 0, in bytes; 0 when there is no such listing.
std::size_t last_level_cache_bytes() {
  std::size_t largest = 0;
  for (int i = 0; i < 8; ++i) {
    std::ifstream in("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/size");
    std::size_t n = 0;
    char suffix = 0;
    if (!(in >> n)) break;
    in >> suffix;
    largest = std::max(largest, suffix == 'M' ? n << 20 : n << 10);
  }
  return largest;
}

}  // namespace

DeviceInfo cpu_info() {
  DeviceInfo d;
  d.executor = Executor::cpu;
  d.sms = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  d.warp_size = 1;
  std::string model = field("/proc/cpuinfo", "model name");
  if (model.empty()) model = field("/proc/cpuinfo", "Hardware");
  if (model.empty()) model = "cpu";
  d.name = model + ", " + std::to_string(d.sms) + (d.sms == 1 ? " thread" : " threads");
  // Marks that say nothing about the part would only make folder names long.
  for (const char* noise : {"(R)", "(TM)", " Processor", " CPU"}) {
    for (std::size_t at = model.find(noise); at != std::string::npos; at = model.find(noise)) {
      model.erase(at, std::string(noise).size());
    }
  }
  d.slug = slugify(model) + "-" + std::to_string(d.sms) + "c";
  // Where the system does not say (some virtual machines and aarch64 boards), assume a large one: rotating
  // through too much memory is only slow, through too little is wrong.
  constexpr std::size_t kAssumedCache = std::size_t{64} << 20;
  d.l2_bytes = last_level_cache_bytes();
  if (d.l2_bytes == 0) d.l2_bytes = kAssumedCache;
  std::istringstream available(field("/proc/meminfo", "MemAvailable"));
  std::size_t kib = 0;
  if (available >> kib) {
    d.total_bytes = kib << 10;
  } else {
    d.total_bytes =
        static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  }
  return d;
}

}  // namespace ladder
