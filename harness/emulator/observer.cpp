// Counting and checking. Kernel threads append what they do to their lane's log; when a log is full, or every lane
// waits, the scheduler lines the logs of the warp up into warp requests (the rule is in counters.hpp) and takes
// each request to what it belongs to: sectors and the L1 model, banks, the shadow of global or shared memory.

#include "harness/emulator/observer.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "harness/emulator/hooks.hpp"

namespace ladder::emu {
namespace {

constexpr std::uint32_t kNobody = 0;

Access access_of(Record::What w) {
  switch (w) {
    case Record::global_write:
    case Record::shared_write:
    case Record::async_write:
      return Access::write;
    case Record::global_atomic:
    case Record::shared_atomic:
      return Access::atomic;
    default:
      return Access::read;
  }
}

const char* verb(Access a) {
  return a == Access::read ? "reads" : a == Access::write ? "writes" : "atomically updates";
}

/// Sets a bit; true if it was clear. The common case, set already, costs no locked instruction.
bool set_bit(std::vector<std::atomic<std::uint64_t>>& bits, std::size_t i) {
  const std::uint64_t bit = std::uint64_t{1} << (i % 64);
  auto& word = bits[i / 64];
  if ((word.load(std::memory_order_relaxed) & bit) != 0) return false;
  return (word.fetch_or(bit, std::memory_order_relaxed) & bit) == 0;
}

std::vector<std::atomic<std::uint64_t>> bitmap(std::size_t bits) {
  return std::vector<std::atomic<std::uint64_t>>((bits + 63) / 64);
}

std::uint64_t count_bits(const std::vector<std::atomic<std::uint64_t>>& bits) {
  std::uint64_t n = 0;
  for (const auto& w : bits)
    n += static_cast<std::uint64_t>(std::popcount(w.load(std::memory_order_relaxed)));
  return n;
}

TouchPage& page_of(std::vector<std::atomic<TouchPage*>>& pages, std::size_t offset) {
  auto& slot = pages[offset / kPageBytes];
  TouchPage* p = slot.load(std::memory_order_acquire);
  if (p != nullptr) return *p;
  auto fresh = std::make_unique<TouchPage>();
  if (slot.compare_exchange_strong(p, fresh.get(), std::memory_order_acq_rel)) return *fresh.release();
  return *p;
}

std::string position(const Watched& w, std::uint64_t address) {
  return "'" + w.allocation->name + "' at byte " + std::to_string(address - w.begin);
}

// Source lines are looked up once, for all findings of a launch; until then the text has these in their place.
constexpr std::string_view kLine = "{line}", kOther = "{other}";

void replace(std::string& text, std::string_view what, const std::string& by) {
  for (std::size_t at; (at = text.find(what)) != std::string::npos;) text.replace(at, what.size(), by);
}

}  // namespace

// --- What workers share -----------------------------------------------------------------------------------------

Watched::~Watched() {
  for (auto* pages : {&readers, &writers}) {
    for (auto& p : *pages) delete p.load(std::memory_order_relaxed);
  }
}

Observation::Observation(const LaunchRequest& r)
    : request(&r), blocks(std::uint64_t{r.grid.x} * r.grid.y * r.grid.z) {
  races = blocks > 1 && blocks <= Toucher::kMaxBlocks;
  const DeviceModel& m = device_model();
  const std::size_t shared = static_shared_bytes(r.kernel) + r.shared_bytes;
  const std::uint64_t resident = std::max<std::uint64_t>(
      1, std::min<std::uint64_t>(
             occupancy(r.block.x * r.block.y * r.block.z, shared, registers_per_thread(kernel_name(r.kernel)))
                 .blocks_per_sm,
             (blocks + static_cast<std::uint64_t>(m.sms) - 1) / static_cast<std::uint64_t>(m.sms)));
  const std::size_t taken = resident * (shared + m.shared_reserved_per_block);
  l1_lines = (m.l1_and_shared_per_sm - std::min(taken, m.l1_and_shared_per_sm)) / resident / kLineBytes;
  if (races) released = std::vector<std::atomic<std::uint16_t>>(blocks);
  for (const std::shared_ptr<Allocation>& a : allocations()) {
    auto w = std::make_unique<Watched>();
    w->allocation = a;
    w->begin = a->begin;
    w->bytes = a->bytes;
    w->index = static_cast<std::uint32_t>(watched.size());
    bool named = false, writable = false;
    for (std::size_t i = 0; i < r.pointer_count; ++i) {
      const auto p = reinterpret_cast<std::uintptr_t>(r.pointers[i].address);
      if (p < a->begin || p - a->begin >= a->bytes) continue;
      named = true;
      writable = writable || !r.pointers[i].to_const;
    }
    w->only_read = named && !writable;
    const std::size_t sectors = (a->bytes + kSectorBytes - 1) / kSectorBytes;
    w->read = bitmap(sectors);
    w->written = bitmap(sectors);
    const std::size_t pages = (a->bytes + kPageBytes - 1) / kPageBytes;
    w->readers = std::vector<std::atomic<TouchPage*>>(pages);
    w->writers = std::vector<std::atomic<TouchPage*>>(pages);
    const std::vector<std::uint64_t> known = written_bytes(*a);
    w->unwritten_parts = !known.empty();
    w->ever_written = bitmap(known.size() * 64);
    for (std::size_t i = 0; i < known.size(); ++i)
      w->ever_written[i].store(known[i], std::memory_order_relaxed);
    watched.push_back(std::move(w));
  }
}

Watched* Observation::find(std::uintptr_t address) {
  auto it =
      std::upper_bound(watched.begin(), watched.end(), address,
                       [](std::uintptr_t a, const std::unique_ptr<Watched>& w) { return a < w->begin; });
  if (it == watched.begin()) return nullptr;
  Watched* w = std::prev(it)->get();
  return address - w->begin < w->bytes ? w : nullptr;
}

unsigned Observation::site_number(std::uint32_t pc) {
  const std::lock_guard lock(mutex);
  const auto [it, fresh] = site_numbers.emplace(pc, static_cast<unsigned>(site_pcs.size()));
  if (fresh) site_pcs.push_back(pc);
  return it->second;
}

std::uint32_t Observation::site_pc(unsigned number) {
  const std::lock_guard lock(mutex);
  return number < site_pcs.size() ? site_pcs[number] : 0;
}

Counters Observation::finish(const std::string& kernel) {
  Counters c;
  c.kernel = kernel;
  c.grid = request->grid;
  c.block = request->block;
  c.dynamic_shared_bytes = request->shared_bytes;
  c.static_shared_bytes = static_shared_bytes(request->kernel);
  c.l1_bytes = l1_lines * kLineBytes;
  c.registers = registers_per_thread(kernel);
  c.occupancy = occupancy(request->block.x * request->block.y * request->block.z,
                          c.static_shared_bytes + c.dynamic_shared_bytes, c.registers);

  // All lines in one question to the debug information.
  std::vector<std::uintptr_t> addresses;
  const std::uintptr_t base = program().base;
  for (const auto& [pc, counts] : by_pc) addresses.push_back(base + pc);
  for (const auto& [key, counts] : accesses) addresses.push_back(base + key.pc);
  for (const auto& [key, f] : findings) {
    if (key.pc != 0) addresses.push_back(base + key.pc);
    if (key.other_pc != 0) addresses.push_back(base + key.other_pc);
  }
  (void)source_lines(addresses);

  std::map<std::pair<std::string, int>, LineCounts> by_line;
  const auto at = [&](std::uint32_t pc) -> LineCounts& {
    const SourceLine line = source_line(base + pc);
    LineCounts& l = by_line[{line.file, line.line}];
    l.line = line;
    return l;
  };
  for (const auto& [pc, counts] : by_pc) {
    if (of_the_emulator(source_line(base + pc).file)) continue;  // the way into the kernel
    at(pc).counts += counts;
    c.total += counts;
  }
  for (const auto& [key, counts] : accesses) {
    LineCounts& l = at(key.pc);
    l.counts.global[static_cast<std::size_t>(key.access)] += counts;
    c.total.global[static_cast<std::size_t>(key.access)] += counts;
    const std::string& name = watched[key.buffer]->allocation->name;
    const Access access = key.access;
    auto same = std::find_if(l.buffers.begin(), l.buffers.end(),
                             [&](const BufferAccess& b) { return b.access == access && b.buffer == name; });
    if (same == l.buffers.end()) same = l.buffers.insert(same, {name, access, {}});
    same->counts += counts;
  }
  for (auto& [key, l] : by_line) c.lines.push_back(std::move(l));

  for (const auto& w : watched) {
    BufferCounts b;
    b.name = w->allocation->name;
    b.bytes = w->bytes;
    b.sectors_read = count_bits(w->read);
    b.sectors_written = count_bits(w->written);
    if (b.sectors_read + b.sectors_written > 0) c.buffers.push_back(b);
    if (!w->unwritten_parts) continue;
    std::vector<std::uint64_t> now;
    for (const auto& word : w->ever_written) now.push_back(word.load(std::memory_order_relaxed));
    set_written_bytes(*w->allocation, std::move(now));
  }

  for (auto& [key, f] : findings) {
    if (key.pc != 0) f.line = source_line(base + key.pc);
    if (key.other_pc != 0) f.other = source_line(base + key.other_pc);
    replace(f.text, kLine, to_string(f.line));
    replace(f.text, kOther, to_string(f.other));
    c.findings.push_back(f);
  }
  std::stable_sort(c.findings.begin(), c.findings.end(),
                   [](const Finding& a, const Finding& b) { return a.block < b.block; });
  for (auto& [pc, r] : captured) {
    r.line = source_line(base + pc);
    c.captured.push_back(r);
  }
  return c;
}

// --- The L1 model -----------------------------------------------------------------------------------------------

void L1Model::reset(std::size_t lines) {
  capacity_ = lines;
  lines_.clear();
  lines_.push_back({});  // line 0 stands for none
  buckets_.assign(std::bit_ceil(std::max<std::size_t>(lines, 1) * 2), 0);
  newest_ = oldest_ = 0;
}

void L1Model::unlink(std::uint32_t i) {
  Line& l = lines_[i];
  (l.newer != 0 ? lines_[l.newer].older : newest_) = l.older;
  (l.older != 0 ? lines_[l.older].newer : oldest_) = l.newer;
}

void L1Model::push_newest(std::uint32_t i) {
  lines_[i].newer = 0;
  lines_[i].older = newest_;
  if (newest_ != 0) lines_[newest_].newer = i;
  newest_ = i;
  if (oldest_ == 0) oldest_ = i;
}

bool L1Model::access(std::uint64_t sector) {
  if (capacity_ == 0) return false;
  const std::uint64_t number = sector / (kLineBytes / kSectorBytes);
  const auto bit = static_cast<std::uint8_t>(1u << (sector % (kLineBytes / kSectorBytes)));
  const auto bucket_of = [this](std::uint64_t n) -> std::uint32_t& {
    return buckets_[(n * 0x9e3779b97f4a7c15ull >> 32) & (buckets_.size() - 1)];
  };
  for (std::uint32_t i = bucket_of(number); i != 0; i = lines_[i].next_in_bucket) {
    if (lines_[i].number != number) continue;
    if (i != newest_) {
      unlink(i);
      push_newest(i);
    }
    const bool hit = (lines_[i].sectors & bit) != 0;
    lines_[i].sectors |= bit;
    return hit;
  }
  std::uint32_t i;
  if (lines_.size() <= capacity_) {
    i = static_cast<std::uint32_t>(lines_.size());
    lines_.push_back({});
  } else {
    i = oldest_;
    unlink(i);
    std::uint32_t* link = &bucket_of(lines_[i].number);
    while (*link != i) link = &lines_[*link].next_in_bucket;
    *link = lines_[i].next_in_bucket;
  }
  std::uint32_t& bucket = bucket_of(number);
  lines_[i] = {number, 0, 0, bucket, bit};
  bucket = i;
  push_newest(i);
  return false;
}

// --- Observer: from launch to launch ----------------------------------------------------------------------------

Observer::Observer(Worker& w) : worker_(w), records_(std::size_t{kLogRecords + 4} * kMaxThreads), nodes_(1) {
  for (unsigned i = 0; i < kMaxThreads; ++i) {
    // The spare records keep the logs of a warp from falling into the same sets of the host's cache.
    log_[i].first = records_.data() + std::size_t{kLogRecords + 4} * i;
    log_[i].limit = log_[i].first + kLogRecords;
  }
  const ThreadBlock tls = thread_block();
  tls_begin_ = tls.begin;
  tls_bytes_ = tls.bytes;
  const auto& shared = program().shared;
  if (!shared.empty()) {
    static_begin_ = tls.begin + shared.front().offset;
    static_bytes_ = shared.back().offset + shared.back().bytes - shared.front().offset;
  }
}

void Observer::begin_launch(Observation& shared) {
  launch_ = &shared;
  recent_[0] = recent_[1] = nullptr;
  const std::size_t bytes = static_bytes_ + 16 + shared.request->shared_bytes;
  if (cells_.size() < (bytes >> cell_shift_) + 1) cells_.resize((bytes >> cell_shift_) + 1);
}

void Observer::end_launch() {
  const std::lock_guard lock(launch_->mutex);
  for (const auto& [pc, counts] : by_pc_) launch_->by_pc[pc] += counts;
  for (const auto& [key, f] : findings_) {
    const auto [it, fresh] = launch_->findings.emplace(key, f);
    if (fresh) continue;
    const std::uint64_t times = it->second.times + f.times;
    if (f.block < it->second.block) it->second = f;
    it->second.times = times;
  }
  for (const auto& [pc, r] : captured_) {
    const auto [it, fresh] = launch_->captured.emplace(pc, r);
    if (!fresh && r.block < it->second.block) it->second = r;
  }
  for (const auto& [key, counts] : accesses_) launch_->accesses[key] += counts;
  by_pc_.clear();
  accesses_.clear();
  findings_.clear();
  captured_.clear();
  sites_.clear();
}

void Observer::begin_block() {
  block_epoch_ = ++epoch_;
  fences_ = 0;
  acquired_ = false;
  warp_syncs_.fill(0);
  clock_.clear();
  mbarrier_clock_.clear();
  event_count_.fill(0);
  events_ = {};
  l1_.reset(launch_->l1_lines);
  for (unsigned i = 0; i < worker_.threads; ++i) {
    LaneLog& l = log_[i];
    l.begin = l.end = l.first;
    l.node = 0;
    l.last_event = 0;
  }
}

// --- Observer: what kernel threads report -----------------------------------------------------------------------

void Observer::append(std::uint64_t address, unsigned bytes, Record::What what, std::uintptr_t pc) {
  Lane& lane = *current.lane;
  LaneLog& l = log_[lane.linear];
  Record& r = *l.end++;
  r.address = address;
  r.pc = static_cast<std::uint32_t>(pc - program_base);
  r.node = l.node;
  r.what = what;
  r.bytes = static_cast<std::uint8_t>(bytes);
  // An atomic is lined up before it is executed: whoever sees its effect must find everything before it in the
  // shadow of memory.
  if (l.end == l.limit || what == Record::global_atomic) {
    lane.state = State::paused;
    worker_.to_hub();
  }
}

void Observer::block(std::uintptr_t pc) { append(0, 0, Record::basic_block, pc); }
void Observer::fence() { append(0, 0, Record::memory_fence, program_base); }

void Observer::enter(std::uintptr_t caller) {
  LaneLog& l = log_[current.lane->linear];
  const std::uint64_t key = std::uint64_t{l.node} << 32 | static_cast<std::uint32_t>(caller - program_base);
  if (key != last_child_key_) {
    const auto [it, fresh] = children_.emplace(key, static_cast<std::uint16_t>(nodes_.size()));
    if (fresh) {
      // A program with more call paths than this loses exactness of the order between them, nothing else.
      if (nodes_.size() < 0xffff) {
        nodes_.push_back(
            {l.node, static_cast<std::uint16_t>(nodes_[l.node].depth + 1), static_cast<std::uint32_t>(key)});
      } else {
        it->second = 0xfffe;
      }
    }
    last_child_key_ = key;
    last_child_ = it->second;
  }
  l.node = last_child_;
}

void Observer::leave() {
  LaneLog& l = log_[current.lane->linear];
  l.node = nodes_[l.node].parent;
}

void Observer::instruction(Instruction which, int n, std::uintptr_t pc) {
  counts(static_cast<std::uint32_t>(pc - program_base)).instructions[static_cast<std::size_t>(which)] +=
      static_cast<std::uint64_t>(n);
}

Record::What Observer::classify(std::uintptr_t address, std::size_t bytes, Access kind, std::uintptr_t pc) {
  Record::What what;
  if (Watched* w = recent_[0]; w != nullptr && address - w->begin < w->bytes) {
    what = static_cast<Record::What>(Record::global_read + static_cast<int>(kind));
  } else if (w = recent_[1]; w != nullptr && address - w->begin < w->bytes) {
    std::swap(recent_[0], recent_[1]);
    what = static_cast<Record::What>(Record::global_read + static_cast<int>(kind));
  } else if (address - reinterpret_cast<std::uintptr_t>(worker_.stacks) <
             worker_.stack_stride * kMaxThreads) {
    return Record::basic_block;  // a local variable: a register or local memory, not what is counted here
  } else if (address - static_begin_ < static_bytes_ ||
             address - reinterpret_cast<std::uintptr_t>(worker_.dynamic_shared) < kMaxDynamicShared) {
    what = static_cast<Record::What>(Record::shared_read + static_cast<int>(kind));
    const std::uintptr_t dynamic = address - reinterpret_cast<std::uintptr_t>(worker_.dynamic_shared);
    if (dynamic < kMaxDynamicShared) {
      if (dynamic + bytes > launch_->request->shared_bytes) {
        stop(Check::shared_overrun, pc,
             std::string(verb(kind)) + " " + std::to_string(bytes) +
                 " bytes of dynamic shared memory at byte " + std::to_string(dynamic) +
                 ", but the launch declared " + std::to_string(launch_->request->shared_bytes) + " bytes");
      }
    } else {
      const std::size_t offset = address - tls_begin_;
      const auto& shared = program().shared;
      auto it = std::upper_bound(shared.begin(), shared.end(), offset,
                                 [](std::size_t o, const SharedVariable& v) { return o < v.offset; });
      const bool inside =
          it != shared.begin() && offset + bytes <= std::prev(it)->offset + std::prev(it)->bytes;
      if (!inside && std::binary_search(program().guards.begin(), program().guards.end(), offset)) {
        return Record::basic_block;
      }
      if (!inside) {
        stop(Check::out_of_bounds, pc,
             std::string(verb(kind)) + " " + std::to_string(bytes) +
                 " bytes outside every __shared__ variable, " +
                 (it != shared.begin()
                      ? std::to_string(offset - std::prev(it)->offset) + " bytes after the start of '" +
                            std::prev(it)->name + "' (" + std::to_string(std::prev(it)->bytes) + " bytes)"
                      : std::string("before the first")));
      }
    }
  } else if (w = launch_->find(address); w != nullptr) {
    recent_[1] = recent_[0];
    recent_[0] = w;
    what = static_cast<Record::What>(Record::global_read + static_cast<int>(kind));
  } else {
    const Program& p = program();
    const auto arguments = reinterpret_cast<std::uintptr_t>(launch_->request->arguments);
    if (address - p.begin < p.end - p.begin || address - arguments < launch_->request->argument_bytes ||
        address - tls_begin_ < tls_bytes_) {
      return Record::basic_block;  // constants and variables of the program, and the launch's own parameters
    }
    std::string text = std::string(verb(kind)) + " " + std::to_string(bytes) + " bytes ";
    if (const std::optional<Neighbour> a = nearest_allocation(address)) {
      text += address < a->begin ? std::to_string(a->begin - address) + " bytes before"
                                 : std::to_string(address - a->begin - a->bytes) + " bytes past the end of";
      text += " '" + a->name + "' (" + std::to_string(a->bytes) + " bytes)";
    } else {
      char at[32];
      std::snprintf(at, sizeof at, "%#zx", address);
      text += "at address " + std::string(at) + ", which is no device memory";
    }
    stop(Check::out_of_bounds, pc, text);
  }

  if (what <= Record::global_atomic && address + bytes > recent_[0]->begin + recent_[0]->bytes) {
    stop(Check::out_of_bounds, pc,
         std::string(verb(kind)) + " " + std::to_string(bytes) + " bytes at byte " +
             std::to_string(address - recent_[0]->begin) + " of '" + recent_[0]->allocation->name +
             "', which has " + std::to_string(recent_[0]->bytes));
  }
  return what;
}

void Observer::check_aligned(std::uintptr_t address, std::size_t bytes, Access kind, Record::What what,
                             std::uintptr_t pc) {
  if ((address & (bytes - 1)) == 0) return;
  stop(Check::misaligned, pc,
       std::string(verb(kind)) + " " + std::to_string(bytes) +
           " bytes at an address that is not a multiple of " + std::to_string(bytes) +
           (what <= Record::global_atomic ? ": " + position(*recent_[0], address)
                                          : ": " + shared_name(address)));
}

void Observer::access(std::uintptr_t address, std::size_t bytes, Access kind, std::uintptr_t pc, bool whole) {
  const Record::What what = classify(address, bytes, kind, pc);
  if (what == Record::basic_block) return;
  if (whole) {
    check_aligned(address, bytes, kind, what, pc);
    append(address, static_cast<unsigned>(bytes), what, pc);
    return;
  }
  // A structure that is copied as a whole, and whose alignment is less than its size: by words, or what divides it.
  std::size_t piece = std::min<std::size_t>(4, bytes & (~bytes + 1));
  while ((address & (piece - 1)) != 0) piece /= 2;
  for (std::size_t i = 0; i < bytes; i += piece) append(address + i, static_cast<unsigned>(piece), what, pc);
}

// --- Observer: asynchronous copies and mbarriers ---------------------------------------------------------------

void Observer::async_issued(std::uintptr_t to, std::uintptr_t from, unsigned bytes, unsigned source_bytes,
                            bool through_l1, std::uintptr_t pc) {
  instruction(Instruction::cp_async, 1, pc);
  if (source_bytes > 0) {
    const Record::What what = classify(from, source_bytes, Access::read, pc);
    if (what != Record::global_read) stop(Check::fault, pc, "cp.async from memory that is not global");
    check_aligned(from, bytes, Access::read, what, pc);
    append(std::uint64_t{source_bytes} << 56 | from, bytes,
           through_l1 ? Record::async_read_l1 : Record::async_read, pc);
  }
  const Record::What what = classify(to, bytes, Access::write, pc);
  if (what != Record::shared_write) stop(Check::fault, pc, "cp.async to memory that is not shared");
  check_aligned(to, bytes, Access::write, what, pc);
  append(to, bytes, Record::async_write, pc);
}

void Observer::async_arrived(std::uintptr_t to, unsigned bytes, std::uintptr_t pc) {
  append(to, bytes, Record::async_arrival, pc);
}

void Observer::mbarrier_event(const void* mbarrier, bool arrive, std::uintptr_t pc) {
  append(reinterpret_cast<std::uintptr_t>(mbarrier), 0,
         arrive ? Record::mbarrier_arrive : Record::mbarrier_wait, pc);
}

void Observer::bulk_issued(const BulkCopy& c, std::size_t index) {
  instruction(Instruction::bulk_copy, 1, c.pc);
  if (classify(reinterpret_cast<std::uintptr_t>(c.from), c.bytes, Access::read, c.pc) !=
      Record::global_read) {
    stop(Check::fault, c.pc, "cp.async.bulk from memory that is not global");
  }
  if (classify(reinterpret_cast<std::uintptr_t>(c.to), c.bytes, Access::write, c.pc) !=
      Record::shared_write) {
    stop(Check::fault, c.pc, "cp.async.bulk to memory that is not shared");
  }
  append(index, 0, Record::bulk_copy, c.pc);
}

// --- Observer: lining up ----------------------------------------------------------------------------------------

/// Lets every lane that is not ahead of the others fill its log once, and lines the logs up. False: no lane can run.
bool Observer::take_turn(unsigned warp) {
  Worker& w = worker_;
  const unsigned first = warp * 32, n = w.lanes_in_warp(warp);
  bool ran = false;
  for (unsigned i = first; i < first + n && !w.failed; ++i) {
    Lane& lane = w.lanes[i];
    LaneLog& l = log_[i];
    if ((lane.state != State::ready && lane.state != State::paused) || l.begin != l.end) continue;
    l.begin = l.end = l.first;
    lane.state = State::ready;
    w.resume(lane);
    ran = true;
  }
  if (w.failed) return false;
  if (line_up(warp)) return true;
  return w.complete_collectives(warp) || (ran && !w.failed);
}

/// Runs all warps until none can go on. They take turns, so that what they share in L1 is shared at about the same
/// time, as it is where a scheduler picks among them.
void Observer::run_warps() {
  const unsigned warps = (worker_.threads + 31) / 32;
  for (bool ran = true; ran && !worker_.failed;) {
    ran = false;
    for (unsigned w = 0; w < warps && !worker_.failed; ++w) ran = take_turn(w) || ran;
  }
}

/// Lines up as much as can be decided. True: a lane must run on before the next request is known.
bool Observer::line_up(unsigned warp) {
  const unsigned first = warp * 32, n = worker_.lanes_in_warp(warp);
  Group g;
  g.warp = warp;
  for (;;) {
    std::array<std::uint8_t, 32> live;
    unsigned lives = 0;
    std::ptrdiff_t steps = kLogRecords;
    for (unsigned i = 0; i < n; ++i) {
      const LaneLog& l = log_[first + i];
      if (l.begin != l.end) {
        live[lives++] = static_cast<std::uint8_t>(i);
        steps = std::min(steps, l.end - l.begin);
      } else {
        const State s = worker_.lanes[first + i].state;
        if (s == State::ready || s == State::paused) return true;
      }
    }
    if (lives == 0) return false;
    for (; steps > 0; --steps) {
      const Record* head = log_[first + live[0]].begin;
      bool together = true;
      for (unsigned k = 1; k < lives; ++k)
        together = together && head->same_instruction(*log_[first + live[k]].begin);
      if (!together) {
        for (unsigned k = 1; k < lives; ++k) {
          const Record* r = log_[first + live[k]].begin;
          if (earlier(*r, *head)) head = r;
        }
      }
      g.head = head;
      g.count = 0;
      for (unsigned k = 0; k < lives; ++k) {
        LaneLog& l = log_[first + live[k]];
        if (!together && !l.begin->same_instruction(*head)) continue;
        g.address[g.count] = l.begin->address;
        g.lane[g.count++] = live[k];
        if (l.begin != head) ++l.begin;  // the head is still needed
      }
      emit(g);
      for (unsigned k = 0; k < lives; ++k) {
        LaneLog& l = log_[first + live[k]];
        if (l.begin == head) ++l.begin;
      }
      if (!together) break;
    }
  }
}

/// Whether `a` comes before `b` in the code, seen from the function that both paths of calls share.
bool Observer::earlier(const Record& a, const Record& b) const {
  std::uint32_t pa = a.pc, pb = b.pc;
  std::uint16_t na = a.node, nb = b.node;
  while (na != nb) {
    if (nodes_[na].depth >= nodes_[nb].depth) {
      pa = nodes_[na].call_pc;
      na = nodes_[na].parent;
    } else {
      pb = nodes_[nb].call_pc;
      nb = nodes_[nb].parent;
    }
  }
  if (pa != pb) return pa < pb;
  if (nodes_[a.node].depth != nodes_[b.node].depth) return nodes_[a.node].depth > nodes_[b.node].depth;
  if (a.what != b.what) return a.what < b.what;
  return a.bytes < b.bytes;
}

void Observer::emit(const Group& g) {
  switch (g.head->what) {
    case Record::basic_block:
      return block_executed(g);
    case Record::memory_fence:
      ++fences_;
      return;
    case Record::shared_read:
    case Record::shared_write:
    case Record::shared_atomic:
      return shared_request(g);
    case Record::global_read:
    case Record::global_write:
    case Record::global_atomic:
      return global_request(g);
    case Record::async_read:
    case Record::async_read_l1:
      return async_read(g);
    case Record::async_write:
      shared_request(g);
      for (unsigned k = 0; k < g.count; ++k) {
        set_pending(g.address[k], g.head->bytes, g.warp * 32 + g.lane[k], g.head->pc, false);
      }
      return;
    case Record::async_arrival:
      for (unsigned k = 0; k < g.count; ++k) {
        for (unsigned b = 0; b < g.head->bytes; b += 1u << cell_shift_) {
          SharedCell& c = cells_[shared_cell(g.address[k] + b)];
          const std::uint32_t pc = c.pending.epoch != 0 ? c.pending.pc : g.head->pc;
          c.pending.epoch = 0;
          touch_cell(c, g.address[k] + b, Access::write, g.warp * 32 + g.lane[k], pc);
        }
      }
      return;
    case Record::mbarrier_arrive:
      for (unsigned k = 0; k < g.count; ++k) release(g.warp * 32 + g.lane[k], g.address[k]);
      return;
    case Record::mbarrier_wait:
      for (unsigned k = 0; k < g.count; ++k) acquire(g.warp * 32 + g.lane[k], g.address[k]);
      return;
    case Record::bulk_copy:
      for (unsigned k = 0; k < g.count; ++k) bulk_request(worker_.bulk[g.address[k]]);
      return;
  }
}

Counts& Observer::counts(std::uint32_t pc) { return by_pc_[pc]; }

unsigned Observer::site(std::uint32_t pc) {
  const auto it = sites_.find(pc);
  if (it != sites_.end()) return it->second;
  return sites_.emplace(pc, launch_->site_number(pc)).first->second;
}

void Observer::block_executed(const Group& g) {
  ControlCounts& c = counts(g.head->pc).control;
  ++c.blocks;
  c.lanes += g.count;
  auto& ring = events_[g.warp];
  const std::uint32_t id = ++event_count_[g.warp];
  std::uint32_t members = 0;
  for (unsigned k = 0; k < g.count; ++k) members |= 1u << g.lane[k];
  for (std::uint32_t rest = members; rest != 0;) {
    // The lanes of the group that come from the same execution of a block, and whether any stayed behind.
    const std::uint32_t before = log_[g.warp * 32 + static_cast<unsigned>(std::countr_zero(rest))].last_event;
    std::uint32_t same = 0;
    for (std::uint32_t m = rest; m != 0; m &= m - 1) {
      const auto i = static_cast<unsigned>(std::countr_zero(m));
      if (log_[g.warp * 32 + i].last_event == before) same |= 1u << i;
    }
    Event& e = ring[before % kEvents];
    if (before != 0 && e.id == before && !e.split && e.lanes != same) {
      e.split = true;
      ++counts(e.pc).control.divergent_branches;
    }
    rest &= ~same;
  }
  ring[id % kEvents] = {id, g.head->pc, members, false};
  for (unsigned k = 0; k < g.count; ++k) log_[g.warp * 32 + g.lane[k]].last_event = id;
}

// --- Observer: global memory ------------------------------------------------------------------------------------

void Observer::global_request(const Group& g) {
  const Access kind = access_of(g.head->what);
  const unsigned bytes = g.head->bytes;
  Watched* w = launch_->find(g.address[0]);
  // Lanes of one instruction hardly ever ask different buffers; where they do, it counts for the first lane's.
  GlobalCounts& c = accesses_[{g.head->pc, w->index, kind}];

  // Distinct addresses in rising order: often they come that way.
  std::array<std::uint64_t, 32> address = g.address;
  bool rising = true;
  for (unsigned k = 1; k < g.count; ++k) rising = rising && address[k - 1] <= address[k];
  if (!rising) std::sort(address.begin(), address.begin() + g.count);
  unsigned distinct = 0, sectors = 0;
  std::array<std::uint64_t, 32> sector;
  for (unsigned k = 0; k < g.count; ++k) {
    if (k > 0 && address[k] == address[distinct - 1]) continue;
    address[distinct++] = address[k];
    const std::uint64_t s = address[distinct - 1] / kSectorBytes;  // no aligned access crosses a sector
    if (sectors == 0 || sector[sectors - 1] != s) sector[sectors++] = s;
  }

  unsigned fetched = 0;
  for (unsigned k = 0; k < sectors; ++k) {
    const std::uint64_t at = sector[k] * kSectorBytes;
    if (at - w->begin >= w->bytes) w = launch_->find(at);  // buffers start at whole sectors
    const std::size_t index = (at - w->begin) / kSectorBytes;
    if (kind != Access::write) set_bit(w->read, index);
    if (kind != Access::read) set_bit(w->written, index);
    fetched += kind != Access::read || g.past_l1 || !l1_.access(sector[k]);
  }
  if (c.requests == 0) capture(g, kind, launch_->find(g.address[0]));
  ++c.requests;
  c.lanes += g.count;
  std::uint64_t asked = std::uint64_t{g.count} * bytes, distinct_bytes = std::uint64_t{distinct} * bytes;
  if (g.used != nullptr) {
    asked = distinct_bytes = 0;
    for (unsigned k = 0; k < g.count; ++k) {
      asked += g.used[k];
      if (std::find(g.address.begin(), g.address.begin() + k, g.address[k]) == g.address.begin() + k) {
        distinct_bytes += g.used[k];
      }
    }
  }
  c.bytes += asked;
  c.sectors += sectors;
  c.ideal_sectors += (distinct_bytes + kSectorBytes - 1) / kSectorBytes;
  c.l1_sectors += fetched;

  if (kind == Access::atomic) {
    acquired_ = true;
    if (launch_->races) {
      launch_->released[worker_.block_index].store(static_cast<std::uint16_t>(std::min(fences_, 0x1fffu)));
    }
  }
  w = launch_->find(g.address[0]);
  for (unsigned k = 0; k < g.count; ++k) {
    const std::uint64_t a = g.address[k];
    if (k > 0 && a == g.address[k - 1] && kind == Access::read)
      continue;  // the same block reads the same word
    if (a - w->begin >= w->bytes) w = launch_->find(a);
    const unsigned thread = g.warp * 32 + g.lane[k], own = g.used != nullptr ? g.used[k] : bytes;
    if (w->unwritten_parts) {
      if (kind != Access::write) check_written(*w, a, own, thread, g.head->pc);
      if (kind != Access::read) mark_written(*w, a, own);
    }
    if (launch_->races && !w->only_read) touch_global(*w, a, own, kind, thread, g.head->pc);
  }
}

void Observer::check_written(Watched& w, std::uint64_t address, unsigned bytes, unsigned thread,
                             std::uint32_t pc) {
  const std::size_t at = address - w.begin;
  const std::uint64_t mask = (std::uint64_t{1} << bytes) - 1;  // aligned: within one word of the map
  if ((w.ever_written[at / 64].load(std::memory_order_relaxed) >> (at % 64) & mask) == mask) return;
  if (Finding* f = find(Check::unwritten_read, pc, kNobody)) {
    f->text = who(thread) + " reads " + std::to_string(bytes) +
              " bytes that nobody has written: " + position(w, address) + ", at " + std::string(kLine);
  }
}

void Observer::mark_written(Watched& w, std::uint64_t address, unsigned bytes) {
  const std::size_t at = address - w.begin;
  const std::uint64_t bits = ((std::uint64_t{1} << bytes) - 1) << (at % 64);
  auto& word = w.ever_written[at / 64];
  if ((word.load(std::memory_order_relaxed) & bits) != bits) word.fetch_or(bits, std::memory_order_relaxed);
}

void Observer::touch_global(Watched& w, std::uint64_t address, unsigned bytes, Access kind, unsigned thread,
                            std::uint32_t pc) {
  const std::uint64_t me = worker_.block_index;
  const auto owner = static_cast<unsigned>(me + 1);
  const std::size_t offset = address - w.begin;
  // Reading or writing: enter oneself first, then look at the other table. Whoever comes second sees the first.
  for (std::size_t o = offset & ~std::size_t{3}; o < offset + bytes; o += 4) {
    const unsigned part = bytes >= 4 ? 0xfu : ((1u << bytes) - 1) << (offset & 3);
    const std::uint64_t mine = Toucher::pack(me, thread, site(pc), kind == Access::atomic, fences_, part);
    if (kind != Access::read) {
      auto& cell = page_of(w.writers, o).word[o % kPageBytes / 4];
      std::uint64_t seen = cell.load();
      for (;;) {
        const Toucher before(seen);
        std::uint64_t next = mine;
        if (before.many()) break;  // several blocks wrote different bytes of this word: no longer followed
        if (!before.nobody() && before.owner() != owner) {
          if ((before.bytes() & part) == 0) next = std::uint64_t{Toucher::kMany} << 42;
        } else if (!before.nobody()) {
          next |= before.bytes();
          if (next == seen) break;
        }
        if (!cell.compare_exchange_weak(seen, next)) continue;
        if (!before.nobody() && before.owner() != owner && (before.bytes() & part) != 0 &&
            !(before.atomic() && kind == Access::atomic)) {
          conflict(w, w.begin + o, before, true, kind, thread, pc);
        }
        break;
      }
      if (kind == Access::write) {
        if (TouchPage* p = w.readers[o / kPageBytes].load()) {
          const Toucher reader(p->word[o % kPageBytes / 4].load());
          if (!reader.nobody() && reader.owner() != owner && (reader.bytes() & part) != 0) {
            conflict(w, w.begin + o, reader, false, kind, thread, pc);
          }
        }
      }
    } else {
      auto& cell = page_of(w.readers, o).word[o % kPageBytes / 4];
      std::uint64_t seen = cell.load();
      for (;;) {
        const Toucher before(seen);
        std::uint64_t next = mine | before.bytes();
        if (before.many() || (!before.nobody() && before.owner() != owner)) {
          next =
              (mine & ((std::uint64_t{1} << 42) - 1)) | std::uint64_t{Toucher::kMany} << 42 | before.bytes();
          if (before.many() && (before.bytes() & part) == part) break;
        } else if (!before.nobody() && (before.bytes() & part) == part) {
          break;
        }
        if (cell.compare_exchange_weak(seen, next)) break;
      }
      if (TouchPage* p = w.writers[o / kPageBytes].load()) {
        const Toucher writer(p->word[o % kPageBytes / 4].load());
        if (!writer.nobody() && !writer.many() && writer.owner() != owner && !writer.atomic() &&
            (writer.bytes() & part) != 0) {
          conflict(w, w.begin + o, writer, true, kind, thread, pc);
        }
      }
    }
  }
}

void Observer::conflict(Watched& w, std::uint64_t address, Toucher before, bool before_wrote, Access kind,
                        unsigned thread, std::uint32_t pc) {
  // A fence and then an atomic by the one, an atomic by the other: the usual way to hand data over.
  if (!before.many() && acquired_ && launch_->released[before.owner() - 1].load() > before.fences()) return;
  const std::uint32_t other = launch_->site_pc(before.site());
  Finding* f = find(Check::global_race, pc, other);
  if (f == nullptr) return;
  std::string them;
  if (before.many()) {
    them = "other blocks";
  } else {
    const std::uint64_t index = before.owner() - 1;
    them = thread_text(worker_.block_at(index), worker_.thread_at(before.thread()));
  }
  const char* did = before.atomic() ? (before.many() ? "atomically update" : "atomically updates")
                    : before_wrote  ? (before.many() ? "write" : "writes")
                                    : (before.many() ? "read" : "reads");
  f->text = "race on " + position(w, address) + ": " + who(thread) + " " + verb(kind) + " it at " +
            std::string(kLine) + ", " + them + " " + did + " it at " + std::string(kOther) +
            ", and nothing orders the two";
}

// --- Observer: shared memory ------------------------------------------------------------------------------------

void Observer::shared_request(const Group& g) {
  const Access kind = access_of(g.head->what);
  const unsigned bytes = g.head->bytes;
  SharedCounts& c = counts(g.head->pc).shared[static_cast<std::size_t>(kind)];

  // Lanes that are served together: all 32, 16 for 8-byte accesses, 8 for 16-byte ones.
  const unsigned together = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
  unsigned passes = 0, ideal = 0;
  for (unsigned k = 0; k < g.count;) {
    const unsigned part = g.lane[k] / together;
    std::array<std::array<std::uint64_t, 32>, kBanks> word;  // distinct words wanted of each bank
    std::array<std::uint8_t, kBanks> words{};
    unsigned most = 0;
    for (; k < g.count && g.lane[k] / together == part; ++k) {
      for (unsigned b = 0; b < bytes; b += 4) {
        const std::uint64_t want = (g.address[k] + b) / 4;
        const std::size_t bank = want % kBanks;
        unsigned i = 0;
        // Atomics to one word are performed one after the other; loads and stores of one word go together.
        while (i < words[bank] && (kind == Access::atomic || word[bank][i] != want)) ++i;
        if (i == words[bank]) word[bank][words[bank]++] = want;
        most = std::max<unsigned>(most, words[bank]);
      }
    }
    passes += most;
    ++ideal;
  }
  if (c.requests == 0) capture(g, kind, nullptr);
  ++c.requests;
  c.lanes += g.count;
  c.bytes += std::uint64_t{g.count} * bytes;
  c.passes += passes;
  c.ideal_passes += ideal;
  if (bytes < 4 && cell_shift_ != 0) use_byte_cells();
  for (unsigned k = 0; k < g.count; ++k) {
    touch_shared(g.address[k], bytes, kind, g.warp * 32 + g.lane[k], g.head->pc);
  }
}

std::size_t Observer::shared_cell(std::uint64_t address) const {
  const std::size_t fixed = address - static_begin_;
  if (fixed < static_bytes_) return (fixed + (static_begin_ & 3)) >> cell_shift_;
  const std::size_t after = (static_bytes_ + 15) & ~std::size_t{15};
  return (after + address - reinterpret_cast<std::uintptr_t>(worker_.dynamic_shared)) >> cell_shift_;
}

void Observer::use_byte_cells() {
  std::vector<SharedCell> fine(cells_.size() * 4);
  for (std::size_t i = 0; i < fine.size(); ++i) fine[i] = cells_[i / 4];
  cells_ = std::move(fine);
  cell_shift_ = 0;
}

void Observer::touch_shared(std::uint64_t address, unsigned bytes, Access kind, unsigned thread,
                            std::uint32_t pc) {
  const unsigned step = 1u << cell_shift_;
  for (unsigned b = 0; b < bytes; b += step) {
    touch_cell(cells_[shared_cell(address + b)], address + b, kind, thread, pc);
  }
}

bool Observer::ordered(const SharedCell::Touch& before, unsigned thread) const {
  if (before.thread / 32 == thread / 32 && before.syncs != warp_syncs_[thread / 32]) return true;
  return !clock_.empty() && clock_[thread][before.thread] > before.releases;
}

SharedCell::Touch Observer::touch_of(unsigned thread, std::uint32_t pc) const {
  SharedCell::Touch t;
  t.epoch = epoch_;
  t.thread = static_cast<std::uint16_t>(thread);
  t.syncs = thread < kMaxThreads ? warp_syncs_[thread / 32] : std::uint16_t{0};
  t.pc = pc;
  t.releases = clock_.empty() ? std::uint16_t{0} : clock_[thread][thread];
  return t;
}

std::string Observer::other_thread(const SharedCell::Touch& t) const {
  return t.thread == kCopyEngine ? "a cp.async.bulk" : "thread " + triple(worker_.thread_at(t.thread));
}

void Observer::touch_cell(SharedCell& c, std::uint64_t address, Access kind, unsigned thread,
                          std::uint32_t pc) {
  if (c.pending.epoch >= block_epoch_) {
    if (Finding* f = find(Check::async_copy, pc, c.pending.pc)) {
      f->text = who(thread) + " " + verb(kind) + " shared memory that a " +
                (c.pending_bulk ? "cp.async.bulk" : "cp.async") +
                " has not delivered yet: " + shared_name(address) + ", at " + std::string(kLine) +
                "; thread " + triple(worker_.thread_at(c.pending.thread)) + " issued the copy at " +
                std::string(kOther);
    }
    return;  // one fault is enough
  }
  const SharedCell::Touch now = touch_of(thread, pc);
  if (kind != Access::write && c.write.epoch < block_epoch_) {
    if (Finding* f = find(Check::unwritten_read, pc, kNobody)) {
      f->text = who(thread) +
                " reads shared memory that nobody has written in this block: " + shared_name(address) +
                ", at " + std::string(kLine);
    }
  }
  if (c.write.epoch == epoch_ && c.write.thread != thread && !ordered(c.write, thread) &&
      !(c.write_atomic && kind == Access::atomic)) {
    shared_conflict(address, c.write, true, false, kind, thread, pc);
  }
  if (kind == Access::read) {
    if (c.read.epoch != epoch_) {
      c.other_read.epoch = 0;
      c.read_by_several = false;
    } else if (c.read.thread / 32 != thread / 32) {
      c.other_read = c.read;
      c.read_by_several = false;
    } else {
      c.read_by_several = c.read.syncs == now.syncs && (c.read_by_several || c.read.thread != thread);
    }
    c.read = now;
    return;
  }
  if (c.read.epoch == epoch_ && !ordered(c.read, thread) && (c.read.thread != thread || c.read_by_several)) {
    shared_conflict(address, c.read, false, c.read.thread == thread, kind, thread, pc);
  } else if (c.read.epoch == epoch_ && c.other_read.epoch == epoch_ &&
             c.other_read.thread / 32 != thread / 32 && !ordered(c.other_read, thread)) {
    shared_conflict(address, c.other_read, false, false, kind, thread, pc);
  }
  c.write = now;
  c.write_atomic = kind == Access::atomic;
}

void Observer::shared_conflict(std::uint64_t address, const SharedCell::Touch& before, bool before_wrote,
                               bool several, Access kind, unsigned thread, std::uint32_t pc) {
  Finding* f = find(Check::shared_race, pc, before.pc);
  if (f == nullptr) return;
  f->text = "race on " + shared_name(address) + ": " + who(thread) + " " + verb(kind) + " it at " +
            std::string(kLine) + ", " + (several ? "another lane of the warp" : other_thread(before)) + " " +
            (before_wrote ? "writes" : "reads") + " it at " + std::string(kOther) + ", with no " +
            (before.thread / 32 == thread / 32 ? "__syncwarp or barrier" : "barrier") + " between them";
}

void Observer::set_pending(std::uint64_t address, unsigned bytes, unsigned thread, std::uint32_t pc,
                           bool bulk) {
  for (unsigned b = 0; b < bytes; b += 1u << cell_shift_) {
    SharedCell& c = cells_[shared_cell(address + b)];
    c.pending = touch_of(thread, pc);
    c.pending_bulk = bulk;
  }
}

// --- Observer: asynchronous copies and mbarriers, lined up ------------------------------------------------------

void Observer::async_read(const Group& g) {
  Group plain = g;
  std::array<std::uint8_t, 32> used;
  for (unsigned k = 0; k < g.count; ++k) {
    used[k] = static_cast<std::uint8_t>(g.address[k] >> 56);
    plain.address[k] = g.address[k] << 8 >> 8;
  }
  plain.used = used.data();
  plain.past_l1 = g.head->what == Record::async_read;
  global_request(plain);
}

/// A bulk copy is one request of one thread. It goes past L1, and writes shared memory in whole rows of banks.
void Observer::bulk_request(const BulkCopy& c) {
  const auto from = reinterpret_cast<std::uintptr_t>(c.from), to = reinterpret_cast<std::uintptr_t>(c.to);
  const auto pc = static_cast<std::uint32_t>(c.pc - program_base);
  Watched& w = *launch_->find(from);
  GlobalCounts& g = accesses_[{pc, w.index, Access::read}];
  const std::uint64_t first = (from - w.begin) / kSectorBytes,
                      last = (from - w.begin + c.bytes - 1) / kSectorBytes;
  for (std::uint64_t s = first; s <= last; ++s) set_bit(w.read, s);
  ++g.requests;
  ++g.lanes;
  g.bytes += c.bytes;
  g.sectors += last - first + 1;
  g.l1_sectors += last - first + 1;
  g.ideal_sectors += (c.bytes + kSectorBytes - 1) / kSectorBytes;
  for (unsigned b = 0; b < c.bytes; b += 16) {
    if (w.unwritten_parts) check_written(w, from + b, 16, c.thread, pc);
    if (launch_->races && !w.only_read) touch_global(w, from + b, 16, Access::read, c.thread, pc);
  }
  SharedCounts& s = counts(pc).shared[static_cast<std::size_t>(Access::write)];
  ++s.requests;
  ++s.lanes;
  s.bytes += c.bytes;
  s.passes += (c.bytes + 4 * kBanks - 1) / (4 * kBanks);
  s.ideal_passes += (c.bytes + 4 * kBanks - 1) / (4 * kBanks);
  touch_shared(to, c.bytes, Access::write, c.thread, pc);
  set_pending(to, c.bytes, c.thread, pc, true);
}

void Observer::bulk_delivered(const BulkCopy& c) {
  use_clocks();
  const auto to = reinterpret_cast<std::uintptr_t>(c.to);
  for (unsigned b = 0; b < c.bytes; b += 1u << cell_shift_) {
    SharedCell& cell = cells_[shared_cell(to + b)];
    cell.pending.epoch = 0;
    cell.write = touch_of(kCopyEngine, static_cast<std::uint32_t>(c.pc - program_base));
    cell.write_atomic = false;
  }
  release(kCopyEngine, reinterpret_cast<std::uintptr_t>(c.mbarrier));
}

void Observer::use_clocks() {
  if (clock_.empty()) clock_.assign(kMaxThreads + 1, std::vector<std::uint16_t>(kMaxThreads + 1));
}

namespace {

void join(std::vector<std::uint16_t>& to, const std::vector<std::uint16_t>& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

}  // namespace

/// What the thread did so far comes before what others do once they have waited. All arrivals at an mbarrier are
/// taken together, whatever their phase: a race may go unseen, none is made up.
void Observer::release(unsigned thread, std::uint64_t mbarrier) {
  use_clocks();
  ++clock_[thread][thread];
  join(mbarrier_clock_[mbarrier], clock_[thread]);
}

void Observer::acquire(unsigned thread, std::uint64_t mbarrier) {
  use_clocks();
  join(clock_[thread], mbarrier_clock_[mbarrier]);
}

// --- Observer: events from the scheduler ------------------------------------------------------------------------

void Observer::barrier_completed(std::uintptr_t pc) {
  ++counts(static_cast<std::uint32_t>(pc - program_base)).barriers;
  ++epoch_;
}

void Observer::collective_completed(unsigned first_lane, const Request& r, std::uintptr_t pc) {
  if (r.kind == Collective::active_mask) return;
  Counts& c = counts(static_cast<std::uint32_t>(pc - program_base));
  if (r.kind == Collective::gather) {
    ++c.instructions[static_cast<std::size_t>(r.op)];
    return;
  }
  ++c.collectives;
  // Only __syncwarp orders memory; a shuffle or vote does not.
  if (r.kind != Collective::syncwarp) return;
  ++warp_syncs_[first_lane / 32];
  if (clock_.empty()) return;
  std::vector<std::uint16_t> all;
  for (unsigned i = 0; i < 32; ++i) {
    if ((r.mask >> i & 1) == 0) continue;
    ++clock_[first_lane + i][first_lane + i];
    join(all, clock_[first_lane + i]);
  }
  for (unsigned i = 0; i < 32; ++i) {
    if ((r.mask >> i & 1) != 0) clock_[first_lane + i] = all;
  }
}

// --- Observer: findings -----------------------------------------------------------------------------------------

std::string Observer::who(unsigned thread) const {
  return thread_text(worker_.block, worker_.thread_at(thread));
}

std::string Observer::shared_name(std::uint64_t address) const {
  const std::uint64_t dynamic = address - reinterpret_cast<std::uintptr_t>(worker_.dynamic_shared);
  if (dynamic < kMaxDynamicShared) return "dynamic shared memory at byte " + std::to_string(dynamic);
  const std::size_t offset = address - tls_begin_;
  for (const SharedVariable& v : program().shared) {
    if (offset >= v.offset && offset - v.offset < v.bytes) {
      return "shared '" + v.name + "' at byte " + std::to_string(offset - v.offset);
    }
  }
  return "shared memory";
}

Finding* Observer::find(Check check, std::uint32_t pc, std::uint32_t other_pc) {
  const auto [it, fresh] = findings_.emplace(FindingKey{check, pc, other_pc}, Finding{});
  Finding& f = it->second;
  ++f.times;
  if (!fresh) return nullptr;
  f.check = check;
  f.block = worker_.block_index;
  return &f;
}

void Observer::stop(Check check, std::uintptr_t pc, const std::string& text) {
  worker_.report(current.lane, text + ", at " + to_string(source_line(pc)), check, pc);
  worker_.abandon();
}

void Observer::capture(const Group& g, Access kind, const Watched* w) {
  CapturedRequest r;
  r.shared = w == nullptr;
  r.access = kind;
  r.bytes = g.head->bytes;
  r.block = worker_.block_index;
  r.warp = g.warp;
  r.offset.fill(-1);
  if (w != nullptr) r.buffer = w->allocation->name;
  for (unsigned k = 0; k < g.count; ++k) {
    std::uint64_t from = w != nullptr ? w->begin : static_begin_;
    const auto dynamic = reinterpret_cast<std::uintptr_t>(worker_.dynamic_shared);
    if (w == nullptr && g.address[k] - dynamic < kMaxDynamicShared) from = dynamic;
    r.offset[g.lane[k]] = static_cast<std::int64_t>(g.address[k] - from);
  }
  captured_.emplace(g.head->pc, r);
}

// --- Hooks ------------------------------------------------------------------------------------------------------

void record_access(std::uintptr_t address, std::size_t bytes, Access kind, std::uintptr_t pc, bool whole) {
  const Quiet q;
  current.worker->observer->access(address, bytes, kind, pc, whole);
}
void record_enter(std::uintptr_t caller) {
  const Quiet q;
  current.worker->observer->enter(caller);
}
void record_exit() {
  const Quiet q;
  current.worker->observer->leave();
}
void record_block(std::uintptr_t pc) {
  const Quiet q;
  current.worker->observer->block(pc);
}

void count(Instruction which, int n) { count_at(which, n, __builtin_return_address(0)); }
void count_at(Instruction which, int n, const void* pc) {
  if (!current.recording) return;
  const Quiet q;
  current.worker->observer->instruction(which, n, reinterpret_cast<std::uintptr_t>(pc));
}
void fence(int scope) {
  if (!current.recording || scope == 0) return;
  const Quiet q;
  current.worker->observer->fence();
}

}  // namespace ladder::emu
