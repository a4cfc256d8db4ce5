// The SIMT machine. One fiber is one CUDA thread, one OS thread runs one block. A fiber runs until it meets a
// barrier or a warp collective; the scheduler then runs the next one. The last lane to arrive at a collective
// performs it for all, and goes on without a switch.

#include "harness/emulator/machine.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <thread>

#include "harness/emulator/counters.hpp"
#include "harness/emulator/hooks.hpp"
#include "harness/emulator/memory.hpp"
#include "harness/emulator/observer.hpp"
#include "harness/emulator/symbols.hpp"

namespace ladder::emu {

constinit thread_local Current current;
std::uintptr_t program_base = 0;

namespace {

constexpr unsigned kMaxWorkers =
    24;  // 1024 stacks and as many guards each stay within Linux's 65530 mappings

/// Hands boost::context a stack that the worker owns and keeps.
struct OwnedStack {
  char* top;
  boost::context::stack_context allocate() const {
    boost::context::stack_context s;
    s.size = kStackBytes;
    s.sp = top;  // stacks grow down
    return s;
  }
  void deallocate(boost::context::stack_context&) const noexcept {}
};

char* map_memory(std::size_t bytes, int protection) {
  void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(p);
}

const char* collective_name(const Request& r) {
  switch (r.kind) {
    case Collective::syncwarp:
      return "__syncwarp";
    case Collective::shuffle: {
      constexpr const char* kNames[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_down_sync",
                                        "__shfl_xor_sync"};
      return kNames[r.op];
    }
    case Collective::vote: {
      constexpr const char* kNames[] = {"__ballot_sync", "__any_sync", "__all_sync"};
      return kNames[r.op];
    }
    case Collective::match_any:
      return "__match_any_sync";
    case Collective::match_all:
      return "__match_all_sync";
    case Collective::reduce: {
      constexpr const char* kNames[] = {"__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync",
                                        "__reduce_and_sync", "__reduce_or_sync",  "__reduce_xor_sync"};
      return kNames[r.op];
    }
    case Collective::gather:
      return "a warp-wide instruction";
    case Collective::active_mask:
      return "__activemask";
  }
  return "collective";
}

const char* barrier_name(BarrierOp op) {
  switch (op) {
    case BarrierOp::plain:
      return "__syncthreads";
    case BarrierOp::count:
      return "__syncthreads_count";
    case BarrierOp::conjunction:
      return "__syncthreads_and";
    case BarrierOp::disjunction:
      return "__syncthreads_or";
  }
  return "barrier";
}

std::string hex(unsigned v) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", v);
  return text;
}

unsigned reduce_one(Reduce op, bool is_signed, unsigned a, unsigned b) {
  switch (op) {
    case Reduce::add:
      return a + b;
    case Reduce::min:
      return is_signed ? static_cast<unsigned>(std::min(static_cast<int>(a), static_cast<int>(b)))
                       : std::min(a, b);
    case Reduce::max:
      return is_signed ? static_cast<unsigned>(std::max(static_cast<int>(a), static_cast<int>(b)))
                       : std::max(a, b);
    case Reduce::bit_and:
      return a & b;
    case Reduce::bit_or:
      return a | b;
    case Reduce::bit_xor:
      return a ^ b;
  }
  return 0;
}

}  // namespace

std::string triple(const uint3& v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

std::string thread_text(const uint3& block, const uint3& thread) {
  return "block " + triple(block) + " thread " + triple(thread);
}

// --- Worker -----------------------------------------------------------------------------------------------------

Worker::Worker() : lanes(kMaxThreads), gathered(kMaxThreads / 32) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  stack_stride =
      kStackBytes + 2 * page;  // every stack lies above an inaccessible page, and begins in a page of its own
  stacks = map_memory(stack_stride * kMaxThreads, PROT_NONE);
  dynamic_shared = map_memory(kMaxDynamicShared + 2 * page, PROT_NONE) + page;
  mprotect(dynamic_shared, kMaxDynamicShared, PROT_READ | PROT_WRITE);
  const std::uintptr_t begin = thread_block().begin;
  // Shared variables are as good as constructed: no thread of a kernel is to differ from the others by doing it.
  for (const std::size_t guard : program().guards) *reinterpret_cast<char*>(begin + guard) = 1;
  for (const SharedVariable& v : program().shared) {
    const std::uintptr_t at = begin + v.offset;
    if (!static_shared.empty() && static_shared.back().first + static_shared.back().second == at) {
      static_shared.back().second += v.bytes;
    } else {
      static_shared.emplace_back(at, v.bytes);
    }
  }
  // A fault inside a kernel thread may be an overrun of its stack, so the handler needs one of its own.
  stack_t alternative{};
  alternative.ss_size = 64 * 1024;
  alternative.ss_sp = map_memory(alternative.ss_size, PROT_READ | PROT_WRITE);
  sigaltstack(&alternative, nullptr);
}

Worker::~Worker() = default;

uint3 Worker::block_at(std::uint64_t index) const {
  const dim3 grid = launch->request->grid;
  return {static_cast<unsigned>(index % grid.x), static_cast<unsigned>(index / grid.x % grid.y),
          static_cast<unsigned>(index / grid.x / grid.y)};
}

uint3 Worker::thread_at(unsigned linear) const {
  const dim3 shape = launch->request->block;
  return {linear % shape.x, linear / shape.x % shape.y, linear / shape.x / shape.y};
}

unsigned Worker::lanes_in_warp(unsigned warp) const { return std::min(32u, threads - warp * 32); }

bool Worker::in_shared(const void* p, std::size_t bytes) const {
  const auto at = reinterpret_cast<std::uintptr_t>(p);
  const std::uintptr_t dynamic = at - reinterpret_cast<std::uintptr_t>(dynamic_shared);
  if (dynamic < launch->request->shared_bytes) return bytes <= launch->request->shared_bytes - dynamic;
  return std::any_of(static_shared.begin(), static_shared.end(), [&](const auto& range) {
    return at - range.first < range.second && bytes <= range.second - (at - range.first);
  });
}

void Worker::poison_shared() {
  for (const auto& [at, bytes] : static_shared) std::memset(reinterpret_cast<void*>(at), 0xff, bytes);
  std::memset(dynamic_shared, 0xff, launch->request->shared_bytes);
}

void Worker::resume(Lane& lane) {
  if (!lane.started) {
    const auto index = static_cast<std::size_t>(&lane - lanes.data()),
               page = (stack_stride - kStackBytes) / 2;
    char* base = stacks + stack_stride * index + page;
    mprotect(base, kStackBytes + page, PROT_READ | PROT_WRITE);
    // Stacks that all began at the same place of a page would share a few sets of the L1 cache, and the lanes of a warp
    // push each other's out: an odd number of lines further each, they spread over all.
    constexpr std::size_t kApart = 17 * 64, kPage = 4096;
    lane.context =
        boost::context::fiber(std::allocator_arg, OwnedStack{base + kStackBytes + index * kApart % kPage},
                              [this, &lane](boost::context::fiber&& from) -> boost::context::fiber {
                                hub = std::move(from);
                                for (;;) {  // one turn for every block this lane is part of
                                  thread_body(lane);
                                  to_hub();
                                }
                              });
    lane.started = true;
  }
  current.lane = &lane;
  current.recording = launch->observation != nullptr;
  lane.context = std::move(lane.context).resume();
  current.recording = false;
  current.lane = nullptr;
}

void Worker::to_hub() { hub = std::move(hub).resume(); }

void Worker::abandon() {
  for (;;) to_hub();
}

void Worker::discard(Lane& lane) {
  // The fiber is suspended in the middle of a kernel. Destroying it would unwind through frames that were
  // compiled without a thought of it, so it is forgotten: its stack is ours, and is used again.
  ::new (static_cast<void*>(&lane.context)) boost::context::fiber{};
  lane.started = false;
}

void Worker::thread_body(Lane& lane) {
  try {
    launch->request->invoke(launch->request->kernel, launch->request->arguments);
  } catch (const std::exception& e) {
    current.recording = false;
    report(&lane, std::string("exception: ") + e.what(), Check::fault);
  } catch (...) {
    report(&lane, "an exception that is not a std::exception", Check::fault);
  }
  lane.state = State::done;
}

void Worker::report(const Lane* lane, const std::string& what, Check check, std::uintptr_t pc) {
  if (failed) return;
  failed = true;
  error_check = check;
  error_pc = pc;
  error = launch->kernel + ": ";
  error += lane != nullptr ? thread_text(block, lane->tid) : "block " + triple(block);
  error += ": " + what;
}

void Worker::run_block(std::uint64_t index) {
  block_index = index;
  block = block_at(index);
  failed = false;
  poison_shared();
  for (unsigned i = 0; i < threads; ++i) {
    Lane& lane = lanes[i];
    lane.linear = i;
    lane.tid = thread_at(i);
    lane.state = State::ready;
    lane.copies.clear();
    lane.groups = 0;
  }
  bulk.clear();
  const unsigned warps = (threads + 31) / 32;
  if (launch->observation != nullptr) observer->begin_block();
  do {
    if (launch->observation != nullptr) {
      observer->run_warps();
    } else {
      for (unsigned w = 0; w < warps && !failed; ++w) run_warp(w);
    }
  } while (!failed && complete_barrier());
  if (failed) {
    for (unsigned i = 0; i < threads; ++i) {
      if (lanes[i].state != State::done) discard(lanes[i]);
    }
  }
}

void Worker::run_warp(unsigned warp) {
  const unsigned first = warp * 32, n = lanes_in_warp(warp);
  do {
    for (bool ran = true; ran && !failed;) {
      ran = false;
      for (unsigned i = first; i < first + n && !failed; ++i) {
        if (lanes[i].state != State::ready) continue;
        resume(lanes[i]);
        ran = true;
      }
    }
    // Lanes that have returned since may have been all that a collective was waiting for.
  } while (!failed && complete_collectives(warp));
}

// --- Barriers ---------------------------------------------------------------------------------------------------

/// Called when no thread of the block can run. True: a barrier was completed, or all is done and nothing waits;
/// the caller goes on while threads are ready.
bool Worker::complete_barrier() {
  if (wake_waiters()) return true;
  unsigned waiting = 0, done = 0;
  for (unsigned i = 0; i < threads; ++i) {
    waiting += lanes[i].state == State::at_barrier;
    done += lanes[i].state == State::done;
  }
  if (done == threads) return false;
  if (waiting != threads) {
    // Hardware of today would let a barrier pass when the missing threads have returned; the programming model
    // asks for all of them, and code that relies on less is the classic early return before a barrier.
    const bool collective = std::any_of(lanes.begin(), lanes.begin() + threads,
                                        [](const Lane& l) { return l.state == State::at_collective; });
    report(nullptr, deadlock_text(), collective ? Check::collective : Check::barrier);
    return false;
  }
  const Lane& head = lanes[0];
  int count = 0;
  for (unsigned i = 0; i < threads; ++i) {
    const Lane& lane = lanes[i];
    count += lane.predicate != 0;
    if (lane.barrier_op != head.barrier_op ||
        (lane.pc != head.pc && !(source_line(lane.pc) == source_line(head.pc)))) {
      report(nullptr, "threads meet at different barriers: " + deadlock_text(), Check::barrier, lane.pc);
      return false;
    }
  }
  if (launch->observation != nullptr) observer->barrier_completed(head.pc);
  for (unsigned i = 0; i < threads; ++i) {
    Lane& lane = lanes[i];
    lane.result = static_cast<std::uint64_t>(head.barrier_op == BarrierOp::count ? count
                                             : head.barrier_op == BarrierOp::conjunction
                                                 ? count == static_cast<int>(threads)
                                                 : count > 0);
    lane.state = State::ready;
  }
  return true;
}

int barrier(BarrierOp op, int predicate) {
  Lane& lane = *current.lane;
  lane.pc = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
  lane.barrier_op = op;
  lane.predicate = predicate;
  lane.state = State::at_barrier;
  current.worker->to_hub();
  return static_cast<int>(lane.result);
}

// --- Warp collectives -------------------------------------------------------------------------------------------

/// Whether nobody is missing who may still come: a cheap look before try_collective's.
bool Worker::all_wait(unsigned first, unsigned mask) const {
  for (unsigned i = lanes_in_warp(first / 32); i-- > 0;) {  // from the last: lanes run in order
    const State state = lanes[first + i].state;
    if ((mask >> i & 1) != 0 && state != State::at_collective && state != State::done) return false;
  }
  return true;
}

/// Performs `r` if every lane that it names, and that has not returned, waits at it.
bool Worker::try_collective(unsigned first, const Request& r) {
  const unsigned n = lanes_in_warp(first / 32);
  unsigned members = 0;
  std::uintptr_t pc = 0;
  for (unsigned i = 0; i < n; ++i) {
    if ((r.mask >> i & 1) == 0) continue;
    const Lane& lane = lanes[first + i];
    if (lane.state == State::done) continue;
    if (lane.state != State::at_collective || !same_call(lane.request, r)) return false;
    if (pc != 0 && lane.pc != pc && !(source_line(lane.pc) == source_line(pc))) {
      report(nullptr,
             std::string("lanes of warp ") + std::to_string(first / 32) + " meet in " + collective_name(r) +
                 " called at different places: " + to_string(source_line(pc)) + " and " +
                 to_string(source_line(lane.pc)),
             Check::collective, lane.pc);
      return false;
    }
    pc = lane.pc;
    members |= 1u << i;
  }
  if (r.kind == Collective::gather && members != ~0u) {
    report(nullptr,
           "a warp-wide instruction needs all 32 lanes of warp " + std::to_string(first / 32) + "; " +
               std::to_string(std::popcount(members)) + " are there, at " + to_string(source_line(pc)),
           Check::collective, pc);
    return false;
  }
  if (launch->observation != nullptr) observer->collective_completed(first, r, pc);
  perform(first, members, r);
  return true;
}

void Worker::perform(unsigned first, unsigned members, const Request& r) {
  const auto value = [&](unsigned i) { return lanes[first + i].request.value; };
  const auto each = [&](auto&& f) {
    for (unsigned m = members; m != 0; m &= m - 1) f(static_cast<unsigned>(std::countr_zero(m)));
  };
  switch (r.kind) {
    case Collective::syncwarp:
      break;
    case Collective::active_mask:
      each([&](unsigned i) { lanes[first + i].result = members; });
      break;
    case Collective::shuffle:
      each([&](unsigned i) {
        const Request& own = lanes[first + i].request;
        const int lane = static_cast<int>(i), width = own.width, base = lane & ~(width - 1);
        int from = lane;
        switch (static_cast<Shuffle>(own.op)) {
          case Shuffle::index:
            from = base + (own.argument & (width - 1));
            break;
          case Shuffle::up:
            from = lane - (own.argument & 31) >= base ? lane - (own.argument & 31) : lane;
            break;
          case Shuffle::down: {
            const int to = lane + (own.argument & 31);
            from = to < base + width ? to : lane;
            break;
          }
          case Shuffle::exclusive_or: {
            const int to = lane ^ (own.argument & 31);
            from = to < base + width ? to : lane;
            break;
          }
        }
        // A lane that takes no part has no value: what the hardware returns is undefined, here it is poison.
        lanes[first + i].result =
            (members >> from & 1) != 0 ? value(static_cast<unsigned>(from)) : ~std::uint64_t{0};
      });
      break;
    case Collective::vote: {
      unsigned ballot = 0;
      each([&](unsigned i) { ballot |= (value(i) != 0 ? 1u : 0u) << i; });
      unsigned result = ballot;
      if (static_cast<Vote>(r.op) == Vote::any) result = ballot != 0;
      if (static_cast<Vote>(r.op) == Vote::all) result = ballot == members;
      each([&](unsigned i) { lanes[first + i].result = result; });
      break;
    }
    case Collective::match_any:
      each([&](unsigned i) {
        unsigned same = 0;
        each([&](unsigned j) { same |= (value(j) == value(i) ? 1u : 0u) << j; });
        lanes[first + i].result = same;
      });
      break;
    case Collective::match_all: {
      bool all = true;
      each([&](unsigned i) {
        all = all && value(i) == value(static_cast<unsigned>(std::countr_zero(members)));
      });
      each([&](unsigned i) {
        lanes[first + i].result = all ? members : 0;
        lanes[first + i].match_all = all;
      });
      break;
    }
    case Collective::gather: {  // all 32 lanes are here
      const auto bytes = static_cast<std::size_t>(r.argument);
      auto& all = gathered[first / 32];
      if (all.size() < 32 * bytes) all.resize(32 * bytes);
      each([&](unsigned i) { std::memcpy(all.data() + i * bytes, lanes[first + i].request.from, bytes); });
      if (r.work != nullptr) r.work(all.data());
      break;
    }
    case Collective::reduce: {
      bool any = false;
      unsigned total = 0;
      each([&](unsigned i) {
        const auto v = static_cast<unsigned>(value(i));
        total = any ? reduce_one(static_cast<Reduce>(r.op), r.is_signed, total, v) : v;
        any = true;
      });
      each([&](unsigned i) { lanes[first + i].result = total; });
      break;
    }
  }
  each([&](unsigned i) { lanes[first + i].state = State::ready; });
}

/// Called when no lane of the warp can run. True: at least one lane can run again.
bool Worker::complete_collectives(unsigned warp) {
  const unsigned first = warp * 32, n = lanes_in_warp(warp);
  for (unsigned i = first; i < first + n && !failed; ++i) {
    if (lanes[i].state != State::at_collective) continue;
    Request r = lanes[i].request;
    if (r.kind == Collective::active_mask) {
      // Nobody can run, so the lanes that wait here now are the ones that run together.
      unsigned members = 0;
      for (unsigned j = first; j < first + n; ++j) {
        const Lane& lane = lanes[j];
        if (lane.state == State::at_collective && lane.request.kind == Collective::active_mask &&
            lane.pc == lanes[i].pc) {
          members |= 1u << (j - first);
        }
      }
      perform(first, members, r);
      return true;
    }
    if (try_collective(first, r)) return true;
  }
  return false;
}

namespace {

/// What the calling lane asks for, to be completed before it meets the others. (It is made where they look for it.)
Request& ask(Collective kind, unsigned mask) {
  Request& r = current.lane->request;
  r = {};
  r.kind = kind;
  r.mask = mask;
  return r;
}

/// The calling lane takes part in what it asked for; returns once it has been performed.
void meet(std::uintptr_t pc) {
  Worker& w = *current.worker;
  Lane& lane = *current.lane;
  const Request& r = lane.request;
  const unsigned first = lane.linear & ~31u;
  lane.pc = pc;
  current.recording = false;  // until the scheduler lets the lane go on
  if ((r.mask >> (lane.linear & 31) & 1) == 0) {
    w.report(&lane,
             std::string(collective_name(r)) + " at " + to_string(source_line(pc)) + ": the mask " +
                 hex(r.mask) + " does not name the calling lane " + std::to_string(lane.linear & 31),
             Check::collective, pc);
    w.abandon();
  }
  lane.state = State::at_collective;
  // While counting, the scheduler first lines up what the lanes did before they came here.
  if (w.launch->observation == nullptr && r.kind != Collective::active_mask && w.all_wait(first, r.mask) &&
      w.try_collective(first, r)) {
    return;
  }
  w.to_hub();
}

}  // namespace

#define LADDER_EMU_HERE reinterpret_cast<std::uintptr_t>(__builtin_return_address(0))

void warp_barrier(unsigned mask) {
  ask(Collective::syncwarp, mask);
  meet(LADDER_EMU_HERE);
}

std::uint64_t warp_shuffle(Shuffle op, unsigned mask, std::uint64_t value, int argument, int width) {
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
    current.recording = false;
    const std::string text = "shuffle width " + std::to_string(width) + " at " +
                             to_string(source_line(LADDER_EMU_HERE)) + " is not a power of two up to 32";
    fail(text.c_str());
  }
  Request& r = ask(Collective::shuffle, mask);
  r.op = static_cast<int>(op);
  r.value = value;
  r.argument = argument;
  r.width = width;
  meet(LADDER_EMU_HERE);
  return current.lane->result;
}

unsigned warp_vote(Vote op, unsigned mask, int predicate) {
  Request& r = ask(Collective::vote, mask);
  r.op = static_cast<int>(op);
  r.value = predicate != 0;
  meet(LADDER_EMU_HERE);
  return static_cast<unsigned>(current.lane->result);
}

unsigned warp_match_any(unsigned mask, std::uint64_t value) {
  Request& r = ask(Collective::match_any, mask);
  r.value = value;
  meet(LADDER_EMU_HERE);
  return static_cast<unsigned>(current.lane->result);
}

unsigned warp_match_all(unsigned mask, std::uint64_t value, int* predicate) {
  Request& r = ask(Collective::match_all, mask);
  r.value = value;
  meet(LADDER_EMU_HERE);
  *predicate = current.lane->match_all;
  return static_cast<unsigned>(current.lane->result);
}

unsigned warp_reduce(Reduce op, bool is_signed, unsigned mask, unsigned value) {
  Request& r = ask(Collective::reduce, mask);
  r.op = static_cast<int>(op);
  r.is_signed = is_signed;
  r.value = value;
  meet(LADDER_EMU_HERE);
  return static_cast<unsigned>(current.lane->result);
}

void warp_gather(const void* mine, void* all, std::size_t bytes, Instruction which) {
  std::memcpy(all, warp_gather_at(mine, bytes, nullptr, which, LADDER_EMU_HERE), 32 * bytes);
}

const void* warp_gather_at(const void* mine, std::size_t bytes, WarpWork work, Instruction which,
                           std::uintptr_t pc) {
  Request& r = ask(Collective::gather, ~0u);
  r.op = static_cast<int>(which);
  r.argument = static_cast<int>(bytes);
  r.from = mine;
  r.work = work;
  meet(pc);
  return current.worker->gathered[current.lane->linear / 32].data();
}

unsigned active_mask() {
  ask(Collective::active_mask, ~0u);
  meet(LADDER_EMU_HERE);
  return static_cast<unsigned>(current.lane->result);
}

void fail(const char* message) {
  current.recording = false;
  Worker& w = *current.worker;
  w.report(current.lane, message, Check::fault);
  w.abandon();
}

void trap() {
  current.recording = false;
  const std::string text = "__trap() at " + to_string(source_line(LADDER_EMU_HERE));
  fail(text.c_str());
}

// --- Who waits where --------------------------------------------------------------------------------------------

std::string Worker::deadlock_text() const {
  struct Group {
    unsigned count = 0;
    const Lane* first = nullptr;
    std::vector<unsigned> members;
  };
  std::map<std::string, Group> groups;
  std::vector<std::string> order;
  for (unsigned i = 0; i < threads; ++i) {
    const Lane& lane = lanes[i];
    std::string what;
    if (lane.state == State::done) {
      what = "returned from the kernel";
    } else if (lane.state == State::at_barrier) {
      what =
          std::string("at ") + barrier_name(lane.barrier_op) + " (" + to_string(source_line(lane.pc)) + ")";
    } else if (lane.state == State::at_mbarrier) {
      what = "waiting for the phase of parity " + std::to_string(lane.parity) + " of an mbarrier (" +
             to_string(source_line(lane.pc)) + "), " + mbarrier_text(*lane.mbarrier);
    } else {
      const Request& r = lane.request;
      what = std::string("in ") + collective_name(r) + " (" + to_string(source_line(lane.pc)) + ", mask " +
             hex(r.mask) + ")";
    }
    Group& g = groups[what];
    if (g.count++ == 0) {
      g.first = &lane;
      order.push_back(what);
    }
    g.members.push_back(i);
  }
  std::string text = "threads wait for each other for ever: ";
  if (groups.size() == 1) text = "threads wait for lanes that never come: ";
  for (std::size_t k = 0; k < order.size(); ++k) {
    const Group& g = groups[order[k]];
    if (k > 0) text += "; ";
    if (g.count == 1) {
      text += "thread " + triple(g.first->tid);
    } else {
      text += std::to_string(g.count) + " threads, ";
      const Lane& last = lanes[g.members.back()];
      const bool run = g.members.back() - g.members.front() + 1 == g.count;
      text += run ? triple(g.first->tid) + " to " + triple(last.tid)
                  : "among them " + triple(g.first->tid) + " and " + triple(last.tid);
    }
    text += " " + order[k];
  }
  return text;
}

// --- Index registers --------------------------------------------------------------------------------------------

uint3 thread_index() noexcept { return current.lane != nullptr ? current.lane->tid : uint3{0, 0, 0}; }
uint3 block_index() noexcept { return current.worker != nullptr ? current.worker->block : uint3{0, 0, 0}; }
dim3 block_dim() noexcept {
  return current.worker != nullptr ? current.worker->launch->request->block : dim3{};
}
dim3 grid_dim() noexcept {
  return current.worker != nullptr ? current.worker->launch->request->grid : dim3{};
}
void* dynamic_shared_bytes() noexcept {
  return current.worker != nullptr ? current.worker->dynamic_shared : nullptr;
}

// --- Faults -----------------------------------------------------------------------------------------------------

namespace {

struct sigaction previous_segv, previous_bus;
thread_local std::uintptr_t fault_address = 0;
thread_local std::uintptr_t fault_pc = 0;

/// Runs on the kernel thread's own stack, from its top, in place of the instruction that faulted.
[[noreturn]] void fault_landing() {
  current.recording = false;
  Worker& w = *current.worker;
  const Lane& lane = *current.lane;
  const char* stack = w.stacks + w.stack_stride * static_cast<std::size_t>(&lane - w.lanes.data());
  const auto guard = reinterpret_cast<std::uintptr_t>(stack);
  std::string what;
  if (fault_address - guard < (w.stack_stride - kStackBytes) / 2) {
    what = "the thread's stack of " + std::to_string(kStackBytes) + " bytes overflowed";
  } else if (const std::optional<Neighbour> a = nearest_allocation(fault_address)) {
    what = "out of bounds: an access ";
    what += fault_address < a->begin
                ? std::to_string(a->begin - fault_address) + " bytes before"
                : std::to_string(fault_address - a->begin - a->bytes) + " bytes past the end of";
    what += " '" + a->name + "' (" + std::to_string(a->bytes) + " bytes)";
  } else {
    char text[64];
    std::snprintf(text, sizeof text, "an access to address %#zx, which is no device memory", fault_address);
    what = text;
  }
  what += " at " + to_string(source_line(fault_pc + 1));
  w.report(&lane, what, Check::fault, fault_pc);
  w.abandon();
}

void on_fault(int signal, siginfo_t* info, void* context) {
#if defined(__x86_64__) || defined(__aarch64__)
  if (current.lane != nullptr) {
    auto* u = static_cast<ucontext_t*>(context);
    const Lane& lane = *current.lane;
    Worker& w = *current.worker;
    const auto top = reinterpret_cast<std::uintptr_t>(w.stacks) +
                     w.stack_stride * static_cast<std::size_t>(&lane - w.lanes.data() + 1) -
                     (w.stack_stride - kStackBytes) / 2 - 4096;
    fault_address = reinterpret_cast<std::uintptr_t>(info->si_addr);
#if defined(__x86_64__)
    fault_pc = static_cast<std::uintptr_t>(u->uc_mcontext.gregs[REG_RIP]);
    u->uc_mcontext.gregs[REG_RSP] = static_cast<greg_t>((top & ~std::uintptr_t{15}) - 8);  // as after a call
    u->uc_mcontext.gregs[REG_RIP] = static_cast<greg_t>(reinterpret_cast<std::uintptr_t>(&fault_landing));
#else
    fault_pc = u->uc_mcontext.pc;
    u->uc_mcontext.sp = top & ~std::uintptr_t{15};
    u->uc_mcontext.pc = reinterpret_cast<std::uintptr_t>(&fault_landing);
#endif
    return;
  }
#endif
  // Not ours: as if this handler had never been there.
  sigaction(signal, signal == SIGBUS ? &previous_bus : &previous_segv, nullptr);
}

}  // namespace

FaultHandler::FaultHandler() {
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &previous_segv);
  sigaction(SIGBUS, &action, &previous_bus);
}

FaultHandler::~FaultHandler() {
  sigaction(SIGSEGV, &previous_segv, nullptr);
  sigaction(SIGBUS, &previous_bus, nullptr);
}

// --- The pool ---------------------------------------------------------------------------------------------------

namespace {

struct Pool {
  std::mutex launch_mutex;  // one launch at a time
  std::mutex mutex;
  std::condition_variable work, finished;
  LaunchState* launch = nullptr;
  std::uint64_t generation = 0;
  unsigned wanted = 0, taken = 0, busy = 0;
  unsigned size = 0;

  Pool() {
    size = worker_count();
    for (unsigned i = 0; i < size; ++i) std::thread([this] { serve(); }).detach();
  }

  void serve() {
    auto worker = std::make_unique<Worker>();
    current.worker = worker.get();
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      work.wait(lock, [&] { return generation != seen && taken < wanted; });
      seen = generation;
      ++taken;
      ++busy;
      LaunchState& mine = *launch;
      lock.unlock();
      worker->run_blocks(mine);
      lock.lock();
      if (--busy == 0 && taken == wanted) finished.notify_all();
    }
  }

  void run(LaunchState& state) {
    std::unique_lock lock(mutex);
    launch = &state;
    wanted = static_cast<unsigned>(std::min<std::uint64_t>(size, state.blocks));
    taken = 0;
    ++generation;
    work.notify_all();
    finished.wait(lock, [&] { return taken == wanted && busy == 0; });
    launch = nullptr;
  }
};

// Never destroyed: its threads sleep until the process ends.
Pool& pool() {
  static Pool* p = new Pool;
  return *p;
}

std::string shape_text(const dim3& d) { return triple(d); }

Status check_limits(const LaunchRequest& r, const std::string& kernel) {
  const DeviceModel& m = device_model();
  const auto refuse = [&](const std::string& what) {
    return Status::error(kernel + ": cannot be launched: " + what + " (limits of " + m.name + ")");
  };
  const std::uint64_t threads = std::uint64_t{r.block.x} * r.block.y * r.block.z;
  if (threads == 0) return refuse("block " + shape_text(r.block) + " has no threads");
  if (threads > static_cast<std::uint64_t>(m.max_threads_per_block) || r.block.x > 1024 || r.block.y > 1024 ||
      r.block.z > 64) {
    return refuse("block " + shape_text(r.block) + " has " + std::to_string(threads) +
                  " threads; allowed are " + std::to_string(m.max_threads_per_block) +
                  ", at most (1024,1024,64)");
  }
  if (r.grid.x == 0 || r.grid.y == 0 || r.grid.z == 0) {
    return refuse("grid " + shape_text(r.grid) + " has no blocks");
  }
  if (r.grid.x > 0x7fffffffu || r.grid.y > 65535 || r.grid.z > 65535) {
    return refuse("grid " + shape_text(r.grid) + " is beyond (2147483647,65535,65535)");
  }
  const std::size_t own = static_shared_bytes(r.kernel);
  if (own > m.shared_per_block) {
    return refuse(std::to_string(own) + " bytes of static shared memory; allowed are " +
                  std::to_string(m.shared_per_block));
  }
  if (own + r.shared_bytes > m.shared_per_block_optin) {
    return refuse(std::to_string(own) + " static and " + std::to_string(r.shared_bytes) +
                  " dynamic bytes of shared memory; allowed are " + std::to_string(m.shared_per_block_optin));
  }
  return {};
}

}  // namespace

void Worker::run_blocks(LaunchState& state) {
  launch = &state;
  threads = state.threads;
  if (state.observation != nullptr) {
    if (observer == nullptr) observer = std::make_unique<Observer>(*this);
    observer->begin_launch(*state.observation);
  }
  for (;;) {
    const std::uint64_t index = state.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= state.blocks || index > state.failed.load(std::memory_order_relaxed)) break;
    run_block(index);
    if (!failed) continue;
    const std::lock_guard lock(pool().mutex);
    if (index < state.failed.load(std::memory_order_relaxed)) {
      state.failed.store(index, std::memory_order_relaxed);
      state.error = error;
      state.error_check = error_check;
      state.error_pc = error_pc;
    }
  }
  if (state.observation != nullptr) observer->end_launch();
}

unsigned worker_count() {
  static const unsigned n = [] {
    const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
    const char* text = std::getenv("LADDER_EMULATOR_THREADS");
    if (text == nullptr || *text == '\0') return std::min(cores, kMaxWorkers);
    char* end = nullptr;
    const long v = std::strtol(text, &end, 10);
    if (*end != '\0' || v < 1 || v > static_cast<long>(kMaxWorkers)) {
      throw DeviceError("LADDER_EMULATOR_THREADS=" + std::string(text) + ": allowed are 1 to " +
                        std::to_string(kMaxWorkers));
    }
    return static_cast<unsigned>(v);
  }();
  return n;
}

Status run(const LaunchRequest& request) {
  try {
    if (!program().has_symbols) {
      return Status::error("the emulator needs the executable's symbol table; " + program().path +
                           " has been stripped");
    }
    LaunchState state;
    state.request = &request;
    program_base = program().base;
    state.kernel = kernel_name(request.kernel);
    if (Status s = check_limits(request, state.kernel); !s.ok()) return s;
    if (static std::atomic<std::uint64_t> launches{0};
        launches_until_lost() > 0 && ++launches > launches_until_lost()) {
      return Status::error(state.kernel + ": the device was lost (LADDER_EMULATOR_LAUNCHES=" +
                           std::to_string(launches_until_lost()) + ")");
    }
    state.threads = request.block.x * request.block.y * request.block.z;
    state.blocks = std::uint64_t{request.grid.x} * request.grid.y * request.grid.z;
    Pool& p = pool();
    const std::lock_guard lock(p.launch_mutex);
    const FaultHandler
        handler;  // only during a launch: test frameworks and others have handlers of their own
    if (!counting_now()) {
      assume_all_written();
      p.run(state);
      return state.error.empty() ? Status() : Status::error(state.error);
    }
    Observation observation(request);
    state.observation = &observation;
    p.run(state);
    Counters counters = observation.finish(state.kernel);
    if (!state.error.empty()) {
      // What ended the launch comes first, whatever else was found.
      Finding f;
      f.check = state.error_check;
      f.text = state.error.substr(state.kernel.size() + 2);
      f.times = 1;
      f.block = state.failed.load();
      if (state.error_pc != 0) f.line = source_line(state.error_pc);
      counters.findings.insert(counters.findings.begin(), f);
    }
    Status status;
    if (!counters.findings.empty()) {
      std::string text = state.kernel + ": " + counters.findings.front().text;
      if (counters.findings.size() > 1) {
        text += " (and " + std::to_string(counters.findings.size() - 1) + " more findings)";
      }
      status = Status::error(text);
    }
    set_last_launch(std::move(counters));
    return status;
  } catch (const std::exception& e) {
    return Status::error(e.what());
  }
}

}  // namespace ladder::emu
