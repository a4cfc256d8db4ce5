#include "harness/emulator/counters.hpp"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <string_view>

#include "harness/emulator/observer.hpp"

namespace ladder::emu {

GlobalCounts& GlobalCounts::operator+=(const GlobalCounts& o) {
  requests += o.requests;
  lanes += o.lanes;
  bytes += o.bytes;
  sectors += o.sectors;
  ideal_sectors += o.ideal_sectors;
  l1_sectors += o.l1_sectors;
  return *this;
}

SharedCounts& SharedCounts::operator+=(const SharedCounts& o) {
  requests += o.requests;
  lanes += o.lanes;
  bytes += o.bytes;
  passes += o.passes;
  ideal_passes += o.ideal_passes;
  return *this;
}

ControlCounts& ControlCounts::operator+=(const ControlCounts& o) {
  blocks += o.blocks;
  lanes += o.lanes;
  divergent_branches += o.divergent_branches;
  return *this;
}

Counts& Counts::operator+=(const Counts& o) {
  for (std::size_t i = 0; i < kAccesses; ++i) {
    global[i] += o.global[i];
    shared[i] += o.shared[i];
  }
  control += o.control;
  barriers += o.barriers;
  collectives += o.collectives;
  for (std::size_t i = 0; i < kInstructions; ++i) instructions[i] += o.instructions[i];
  return *this;
}

SharedCounts Counts::shared_total() const {
  SharedCounts t;
  for (const SharedCounts& s : shared) t += s;
  return t;
}

GlobalCounts Counts::global_total() const {
  GlobalCounts t;
  for (const GlobalCounts& g : global) t += g;
  return t;
}

std::uint64_t Counters::unique_sectors_read() const {
  return std::accumulate(buffers.begin(), buffers.end(), std::uint64_t{0},
                         [](std::uint64_t n, const BufferCounts& b) { return n + b.sectors_read; });
}

std::uint64_t Counters::unique_sectors_written() const {
  return std::accumulate(buffers.begin(), buffers.end(), std::uint64_t{0},
                         [](std::uint64_t n, const BufferCounts& b) { return n + b.sectors_written; });
}

Counts Counters::at(const std::string& place) const {
  Counts sum;
  for (const LineCounts& l : lines) {
    const std::string here = to_string(l.line);
    // "vector_gemv.cu:42" is the end of a whole component, so ":42" and "chapters/.../vector_gemv.cu:42" are too.
    if (!here.ends_with(place)) continue;
    const std::size_t before = here.size() - place.size();
    if (before == 0 || place.front() == ':' || here[before - 1] == '/') sum += l.counts;
  }
  return sum;
}

Counts Counters::at_line(int line) const { return at(":" + std::to_string(line)); }

GlobalCounts Counters::of_buffer(const std::string& name, Access access) const {
  GlobalCounts sum;
  for (const LineCounts& l : lines) {
    for (const BufferAccess& b : l.buffers) {
      if (b.buffer == name && b.access == access) sum += b.counts;
    }
  }
  return sum;
}

const char* to_string(Check c) {
  switch (c) {
    case Check::out_of_bounds:
      return "out of bounds";
    case Check::unwritten_read:
      return "unwritten memory";
    case Check::misaligned:
      return "misaligned access";
    case Check::shared_race:
      return "race in shared memory";
    case Check::global_race:
      return "race between blocks";
    case Check::shared_overrun:
      return "dynamic shared memory overrun";
    case Check::barrier:
      return "barrier";
    case Check::collective:
      return "warp collective";
    case Check::fault:
      return "fault";
    case Check::async_copy:
      return "asynchronous copy";
  }
  return "?";
}

Occupancy occupancy(unsigned threads, std::size_t shared_bytes, unsigned registers_per_thread) {
  const DeviceModel& m = device_model();
  const unsigned warps = (threads + kWarpSize - 1) / kWarpSize;
  Occupancy o;
  o.max_warps_per_sm = static_cast<unsigned>(m.max_threads_per_sm / kWarpSize);
  if (warps == 0) return o;
  struct Limit {
    std::size_t blocks;
    const char* name;
  };
  std::vector<Limit> limits = {
      {o.max_warps_per_sm / warps, "threads"},
      {m.shared_per_sm / (shared_bytes + m.shared_reserved_per_block), "shared memory"},
      {static_cast<std::size_t>(m.max_blocks_per_sm), "block slots"},
  };
  if (registers_per_thread > 0) {
    // Registers are handed out to warps in units of 256.
    const std::size_t per_warp = (std::size_t{registers_per_thread} * kWarpSize + 255) / 256 * 256;
    limits.push_back({static_cast<std::size_t>(m.registers_per_sm) / per_warp / warps, "registers"});
  }
  const Limit& least = *std::min_element(limits.begin(), limits.end(),
                                         [](const Limit& a, const Limit& b) { return a.blocks < b.blocks; });
  o.blocks_per_sm = static_cast<unsigned>(least.blocks);
  o.warps_per_sm = o.blocks_per_sm * warps;
  o.limited_by = least.name;
  return o;
}

// --- On and off -------------------------------------------------------------------------------------------------

namespace {

/// LADDER_EMULATOR_CHECK=1 counts and checks every launch of a program that knows nothing of it.
bool wanted_by_environment() {
  const char* text = std::getenv("LADDER_EMULATOR_CHECK");
  return text != nullptr && std::string_view(text) == "1";
}

std::atomic<bool>& on() {
  static std::atomic<bool> value{wanted_by_environment()};
  return value;
}

struct Last {
  std::mutex mutex;
  Counters counters;
};

/// ladder::gemv_vec<1, 4> -> gemv_vec-1-4
std::string file_prefix(const std::string& kernel) {
  const std::size_t scope = kernel.rfind("::", kernel.find('<'));
  std::string prefix;
  for (const char letter : kernel.substr(scope == std::string::npos ? 0 : scope + 2)) {
    if (std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '_') {
      prefix += letter;
    } else if (!prefix.empty() && prefix.back() != '-') {
      prefix += '-';
    }
  }
  while (!prefix.empty() && prefix.back() == '-') prefix.pop_back();
  return prefix;
}

// Never destroyed, like all that a launch of a static object's destructor may still use.
Last& last() {
  static Last* l = new Last;
  return *l;
}

}  // namespace

counting::counting(bool want) : before_(on().exchange(want)) {}
counting::~counting() { on().store(before_); }
bool counting_now() { return on().load(); }

Counters last_launch() {
  const std::lock_guard lock(last().mutex);
  return last().counters;
}

void set_last_launch(Counters c) {
  if (const char* folder = std::getenv("LADDER_EMULATOR_PICTURES"); folder != nullptr && *folder != '\0') {
    write_pictures(c, folder, file_prefix(c.kernel));
  }
  const std::lock_guard lock(last().mutex);
  last().counters = std::move(c);
}

}  // namespace ladder::emu
