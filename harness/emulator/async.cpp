// Asynchronous copies and mbarriers. An emulated copy arrives as late as the programming model allows: a
// cp.async when its thread waits for its group, a bulk copy when no thread of the block can go on without it.
// Until then its destination is poison, so code that reads too early is wrong here every time, not once in a
// while.

#include <cstring>

#include "harness/emulator/building_blocks.hpp"
#include "harness/emulator/hooks.hpp"
#include "harness/emulator/observer.hpp"

#define LADDER_EMU_HERE reinterpret_cast<std::uintptr_t>(__builtin_return_address(0))

namespace ladder::emu {
namespace {

[[noreturn]] void fail_at(std::uintptr_t pc, const std::string& what) {
  current.recording = false;
  fail((what + ", at " + to_string(source_line(pc))).c_str());
}

/// Calls `f` with the observer. A lane may be suspended in it, and is observed again when it goes on.
template <class F>
void tell(const Quiet& q, F f) {
  if (!q.recording()) return;
  f(*current.worker->observer);
  current.recording = false;
}

void require_aligned(const void* p, unsigned bytes, const char* what, std::uintptr_t pc) {
  if (reinterpret_cast<std::uintptr_t>(p) % bytes == 0) return;
  fail_at(pc, std::string(what) + " is not a multiple of " + std::to_string(bytes));
}

void require_shared(const void* p, std::size_t bytes, const char* what, std::uintptr_t pc) {
  if (current.worker->in_shared(p, bytes)) return;
  fail_at(pc, std::string(what) + " does not lie in the block's shared memory");
}

/// The 64 bits of an mbarrier. How the hardware packs them is not documented; nobody may look.
struct Mbarrier {
  static constexpr unsigned kMaxArrivals = (1u << 20) - 1;
  static constexpr int kMaxBytes = (1 << 20) - 1;
  unsigned missing = 0, expected = 0;  // arrivals in this phase; of every phase
  int bytes = 0;                       // that this phase still waits for
  unsigned parity = 0;                 // of this phase

  static bool initialised(std::uint64_t v) { return v >> 63 == 0; }  // poison has all bits set
  explicit Mbarrier(std::uint64_t v)
      : missing(static_cast<unsigned>(v) & kMaxArrivals),
        expected(static_cast<unsigned>(v >> 20) & kMaxArrivals),
        bytes(static_cast<int>(v >> 40 & 0x3fffff) - (1 << 21)),
        parity(static_cast<unsigned>(v >> 62)) {}
  std::uint64_t packed() const {
    return std::uint64_t{parity} << 62 | static_cast<std::uint64_t>(bytes + (1 << 21)) << 40 |
           std::uint64_t{expected} << 20 | missing;
  }
  void end_phase_if_complete() {
    if (missing != 0 || bytes != 0) return;
    missing = expected;
    parity ^= 1;
  }
};

std::uint64_t& checked(std::uint64_t* b, std::uintptr_t pc) {
  require_aligned(b, 8, "the address of an mbarrier", pc);
  require_shared(b, 8, "an mbarrier", pc);
  if (!Mbarrier::initialised(*b)) fail_at(pc, "an mbarrier is used that was not initialised");
  return *b;
}

void expect(Mbarrier& m, unsigned bytes, std::uintptr_t pc) {
  if (bytes > static_cast<unsigned>(Mbarrier::kMaxBytes) ||
      m.bytes + static_cast<int>(bytes) > Mbarrier::kMaxBytes) {
    fail_at(pc, "an mbarrier expects " + std::to_string(m.bytes) + " and " + std::to_string(bytes) +
                    " bytes more; allowed are " + std::to_string(Mbarrier::kMaxBytes));
  }
  m.bytes += static_cast<int>(bytes);
}

/// Ends the waiting for those copies of the calling thread that `arrived` names, which are the oldest.
template <class F>
void arrive_copies(F arrived, std::uintptr_t pc) {
  const Quiet q;
  Lane& lane = *current.lane;
  std::size_t n = 0;
  for (; n < lane.copies.size() && arrived(lane.copies[n]); ++n) {
    const AsyncCopy& c = lane.copies[n];
    std::memcpy(c.to, c.data.data(), c.bytes);
    tell(q, [&](Observer& o) { o.async_arrived(reinterpret_cast<std::uintptr_t>(c.to), c.bytes, pc); });
  }
  lane.copies.erase(lane.copies.begin(), lane.copies.begin() + static_cast<std::ptrdiff_t>(n));
}

}  // namespace

// --- cp.async
// ---------------------------------------------------------------------------------------------------

void cp_async(void* shared, const void* global, unsigned bytes, unsigned source_bytes, bool through_l1) {
  const std::uintptr_t pc = LADDER_EMU_HERE;
  const Quiet q;
  if (source_bytes > bytes) {
    fail_at(pc, "cp.async of " + std::to_string(bytes) + " bytes with a source of " +
                    std::to_string(source_bytes) + "; allowed are 0 to " + std::to_string(bytes));
  }
  tell(q, [&](Observer& o) {
    o.async_issued(reinterpret_cast<std::uintptr_t>(shared), reinterpret_cast<std::uintptr_t>(global), bytes,
                   source_bytes, through_l1, pc);
  });
  require_aligned(shared, bytes, "the destination of a cp.async", pc);
  require_aligned(global, bytes, "the source of a cp.async", pc);
  require_shared(shared, bytes, "the destination of a cp.async", pc);
  Lane& lane = *current.lane;
  AsyncCopy c;
  c.to = shared;
  c.bytes = bytes;
  c.group = lane.groups;
  std::memcpy(c.data.data(), global, source_bytes);  // what is left stays zero
  std::memset(shared, 0xff, bytes);
  lane.copies.push_back(c);
}

void cp_async_commit_group() { ++current.lane->groups; }

void cp_async_wait_group(unsigned groups_left) {
  const unsigned groups = current.lane->groups;
  arrive_copies([=](const AsyncCopy& c) { return c.group + groups_left < groups; }, LADDER_EMU_HERE);
}

void cp_async_wait_all() {
  arrive_copies([](const AsyncCopy&) { return true; }, LADDER_EMU_HERE);
}

// --- mbarrier
// ---------------------------------------------------------------------------------------------------

std::string mbarrier_text(std::uint64_t state) {
  const Mbarrier m(state);
  return "which still waits for " + std::to_string(m.missing) + " of " + std::to_string(m.expected) +
         " arrivals and " + std::to_string(m.bytes) + " bytes";
}

void mbarrier_init(std::uint64_t* b, unsigned arrivals) {
  const std::uintptr_t pc = LADDER_EMU_HERE;
  const Quiet q;
  require_aligned(b, 8, "the address of an mbarrier", pc);
  require_shared(b, 8, "an mbarrier", pc);
  if (arrivals < 1 || arrivals > Mbarrier::kMaxArrivals) {
    fail_at(pc, "an mbarrier for " + std::to_string(arrivals) + " arrivals; allowed are 1 to " +
                    std::to_string(Mbarrier::kMaxArrivals));
  }
  tell(q, [&](Observer& o) { o.access(reinterpret_cast<std::uintptr_t>(b), 8, Access::write, pc, true); });
  Mbarrier m(0);
  m.missing = m.expected = arrivals;
  m.bytes = 0;
  *b = m.packed();
}

void mbarrier_arrive(std::uint64_t* b, unsigned arrivals, unsigned expected_bytes) {
  const std::uintptr_t pc = LADDER_EMU_HERE;
  const Quiet q;
  std::uint64_t& state = checked(b, pc);
  tell(q, [&](Observer& o) { o.access(reinterpret_cast<std::uintptr_t>(b), 8, Access::atomic, pc, true); });
  tell(q, [&](Observer& o) { o.mbarrier_event(b, true, pc); });
  Mbarrier m(state);
  expect(m, expected_bytes, pc);
  if (arrivals > m.missing) {
    fail_at(pc, "an mbarrier gets " + std::to_string(arrivals) + " arrivals but waits for " +
                    std::to_string(m.missing));
  }
  m.missing -= arrivals;
  m.end_phase_if_complete();
  state = m.packed();
}

void mbarrier_expect_bytes(std::uint64_t* b, unsigned bytes) {
  const std::uintptr_t pc = LADDER_EMU_HERE;
  const Quiet q;
  std::uint64_t& state = checked(b, pc);
  tell(q, [&](Observer& o) { o.access(reinterpret_cast<std::uintptr_t>(b), 8, Access::atomic, pc, true); });
  Mbarrier m(state);
  expect(m, bytes, pc);
  state = m.packed();
}

void mbarrier_wait(std::uint64_t* b, unsigned parity) {
  const std::uintptr_t pc = LADDER_EMU_HERE;
  const Quiet q;
  std::uint64_t& state = checked(b, pc);
  tell(q, [&](Observer& o) { o.access(reinterpret_cast<std::uintptr_t>(b), 8, Access::atomic, pc, true); });
  // While counting, the scheduler first lines up what others did before they arrived.
  if (q.recording() || Mbarrier(state).parity == parity) {
    Lane& lane = *current.lane;
    lane.pc = pc;
    lane.mbarrier = b;
    lane.parity = parity;
    lane.state = State::at_mbarrier;
    current.worker->to_hub();
    current.recording = false;
  }
  tell(q, [&](Observer& o) { o.mbarrier_event(b, false, pc); });
}

/// Called when no thread of the block can run.
bool Worker::wake_waiters() {
  bool woke = false;
  for (unsigned i = 0; i < threads; ++i) {
    Lane& lane = lanes[i];
    if (lane.state != State::at_mbarrier) continue;
    if (Mbarrier(*lane.mbarrier).parity == lane.parity) deliver(lane.mbarrier);
    if (Mbarrier(*lane.mbarrier).parity == lane.parity) continue;
    lane.state = State::ready;
    woke = true;
  }
  return woke;
}

// --- cp.async.bulk
// ----------------------------------------------------------------------------------------------

void bulk_copy(void* shared, const void* global, unsigned bytes, std::uint64_t* b) {
  const std::uintptr_t pc = LADDER_EMU_HERE;
  const Quiet q;
  (void)checked(b, pc);
  if (bytes == 0 || bytes % 16 != 0) {
    fail_at(pc, "cp.async.bulk of " + std::to_string(bytes) + " bytes; allowed are multiples of 16");
  }
  require_aligned(shared, 16, "the destination of a cp.async.bulk", pc);
  require_aligned(global, 16, "the source of a cp.async.bulk", pc);
  require_shared(shared, bytes, "the destination of a cp.async.bulk", pc);
  Worker& w = *current.worker;
  const BulkCopy c{current.lane->linear, shared, global, bytes, b, pc, false};
  w.bulk.push_back(c);
  const std::size_t index = w.bulk.size() - 1;
  tell(q, [&](Observer& o) { o.bulk_issued(c, index); });
  std::memset(shared, 0xff, bytes);
}

void Worker::deliver(std::uint64_t* mbarrier) {
  for (BulkCopy& c : bulk) {
    if (c.delivered || c.mbarrier != mbarrier) continue;
    c.delivered = true;
    std::memcpy(c.to, c.from, c.bytes);
    if (launch->observation != nullptr) observer->bulk_delivered(c);
    Mbarrier m(*mbarrier);
    m.bytes -= static_cast<int>(c.bytes);
    m.end_phase_if_complete();
    *mbarrier = m.packed();
  }
}

void needs_gpu(const char* what) {
  fail_at(LADDER_EMU_HERE,
          std::string(what) + " has no emulated body: this kernel needs a GPU of compute capability 9.0");
}

}  // namespace ladder::emu
