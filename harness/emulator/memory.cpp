#include "harness/emulator/memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>

#include "harness/device/status.hpp"

namespace ladder::emu {
namespace {

// Never destroyed: buffers of static storage duration may be released after any destructor of ours would run.
struct Registry {
  std::mutex mutex;
  std::map<std::uintptr_t, std::shared_ptr<Allocation>> by_begin;
};
Registry& registry() {
  static Registry* r = new Registry;
  return *r;
}

std::size_t page_bytes() {
  static const auto n = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return n;
}

std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

/// The allocation with the greatest begin <= address, or nullptr. The lock is held by the caller.
Allocation* at_or_before(std::uintptr_t address) {
  auto& map = registry().by_begin;
  auto it = map.upper_bound(address);
  return it == map.begin() ? nullptr : std::prev(it)->second.get();
}

/// Marks bytes [from, to).
void set_written(Allocation& a, std::size_t from, std::size_t to) {
  if (a.all_written || from >= to) return;
  if (from == 0 && to == a.bytes) {
    a.all_written = true;
    a.written = {};
    return;
  }
  if (a.written.empty()) a.written.assign((a.bytes + 63) / 64, 0);
  for (std::size_t i = from; i < to;) {
    const std::size_t bit = i % 64, n = std::min<std::size_t>(64 - bit, to - i);
    a.written[i / 64] |= (n == 64 ? ~std::uint64_t{0} : ((std::uint64_t{1} << n) - 1)) << bit;
    i += n;
  }
}

}  // namespace

void* allocate(std::size_t bytes, const char* name) {
  const std::size_t page = page_bytes();
  const std::size_t usable = round_up(round_up(bytes, kAlignment), page);
  const std::size_t total = usable + 2 * page;
  void* mapping = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    throw DeviceError("no host memory for " + std::to_string(bytes) + " bytes of " + name);
  }
  char* first = static_cast<char*>(mapping) + page;
  if (mprotect(first, usable, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping, total);
    throw DeviceError("no host memory for " + std::to_string(bytes) + " bytes of " + name);
  }
  // The CPU twins read the same buffers: with 4 KiB pages a matrix of 100 MB would measure the TLB. Only advice.
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  if (usable >= 2 * kHugePage) (void)madvise(first, usable, MADV_HUGEPAGE);
  char* data = first + (usable - round_up(bytes, kAlignment));
  auto a = std::make_shared<Allocation>();
  a->begin = reinterpret_cast<std::uintptr_t>(data);
  a->bytes = bytes;
  a->name = name;
  a->mapping = mapping;
  a->mapping_bytes = total;
  const std::lock_guard lock(registry().mutex);
  registry().by_begin.emplace(a->begin, std::move(a));
  return data;
}

void release(void* data) {
  if (data == nullptr) return;
  const std::lock_guard lock(registry().mutex);
  auto it = registry().by_begin.find(reinterpret_cast<std::uintptr_t>(data));
  if (it == registry().by_begin.end()) return;
  munmap(it->second->mapping, it->second->mapping_bytes);
  registry().by_begin.erase(it);
}

void note_written(const void* data, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::lock_guard lock(registry().mutex);
  Allocation* a = at_or_before(address);
  if (a == nullptr || address - a->begin >= a->bytes) return;
  const std::size_t from = address - a->begin;
  set_written(*a, from, std::min(a->bytes, from + bytes));
}

void note_copied(void* destination, const void* source, std::size_t bytes) {
  const auto to = reinterpret_cast<std::uintptr_t>(destination),
             from = reinterpret_cast<std::uintptr_t>(source);
  const std::lock_guard lock(registry().mutex);
  Allocation* s = at_or_before(from);
  Allocation* d = at_or_before(to);
  if (s == nullptr || d == nullptr) return;
  const std::size_t s0 = from - s->begin, d0 = to - d->begin;
  if (s->all_written) return set_written(*d, d0, std::min(d->bytes, d0 + bytes));
  if (d->all_written) {
    d->all_written = false;
    d->written.assign((d->bytes + 63) / 64, ~std::uint64_t{0});
  }
  if (d->written.empty()) d->written.assign((d->bytes + 63) / 64, 0);
  for (std::size_t i = 0; i < bytes && d0 + i < d->bytes; ++i) {
    const std::size_t sb = s0 + i, db = d0 + i;
    const bool on = !s->written.empty() && (s->written[sb / 64] >> (sb % 64) & 1) != 0;
    const std::uint64_t bit = std::uint64_t{1} << (db % 64);
    d->written[db / 64] = on ? d->written[db / 64] | bit : d->written[db / 64] & ~bit;
  }
}

std::vector<std::shared_ptr<Allocation>> allocations() {
  const std::lock_guard lock(registry().mutex);
  std::vector<std::shared_ptr<Allocation>> out;
  out.reserve(registry().by_begin.size());
  for (const auto& [begin, a] : registry().by_begin) out.push_back(a);
  return out;
}

std::vector<std::uint64_t> written_bytes(const Allocation& a) {
  const std::lock_guard lock(registry().mutex);
  if (a.all_written) return {};
  return a.written.empty() ? std::vector<std::uint64_t>((a.bytes + 63) / 64) : a.written;
}

void set_written_bytes(Allocation& a, std::vector<std::uint64_t> bits) {
  std::size_t n = 0;
  for (const std::uint64_t word : bits) n += static_cast<std::size_t>(std::popcount(word));
  const std::lock_guard lock(registry().mutex);
  a.all_written = n == a.bytes;
  a.written = a.all_written ? std::vector<std::uint64_t>() : std::move(bits);
}

void assume_all_written() {
  const std::lock_guard lock(registry().mutex);
  for (const auto& [begin, a] : registry().by_begin) {
    a->all_written = true;
    a->written = {};
  }
}

std::optional<Neighbour> nearest_allocation(std::uintptr_t address) {
  const std::lock_guard lock(registry().mutex);
  for (const auto& [begin, a] : registry().by_begin) {
    const auto first = reinterpret_cast<std::uintptr_t>(a->mapping);
    if (address - first < a->mapping_bytes) return Neighbour{a->begin, a->bytes, a->name};
  }
  return std::nullopt;
}

}  // namespace ladder::emu
