// Inside the emulator: the state of a worker, its block, warps and lanes. Not for kernels, not for host code.
#pragma once

#include <array>
#include <atomic>
#include <boost/context/fiber.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "harness/emulator/cuda.hpp"
#include "harness/emulator/device_model.hpp"
#include "harness/emulator/emulator.hpp"

namespace ladder::emu {

struct Observer;     // counters and checks of one worker; see observer.hpp
struct Observation;  // and what all workers of a launch share
enum class Check;

/// Where the executable lies: program counters are kept as distances from here.
extern std::uintptr_t program_base;

/// Everything about the launch that its workers share.
struct LaunchState {
  const LaunchRequest* request = nullptr;
  std::string kernel;  ///< readable name
  std::uint64_t blocks = 0;
  unsigned threads = 0;  ///< of one block
  std::atomic<std::uint64_t> next{0};
  /// Lowest block that failed. Blocks after it need not run; blocks before it must, so that the error reported
  /// does not depend on the order in which workers took the blocks.
  std::atomic<std::uint64_t> failed{~std::uint64_t{0}};
  std::string error;  ///< of that block; guarded by the pool's mutex
  Check error_check{};
  std::uintptr_t error_pc = 0;
  Observation* observation = nullptr;  ///< set while counting
};

/// What a thread is doing.
enum class State : std::uint8_t { ready, at_barrier, at_collective, at_mbarrier, paused, done };

enum class Collective : std::uint8_t {
  syncwarp,
  shuffle,
  vote,
  match_any,
  match_all,
  reduce,
  gather,
  active_mask
};

/// What is to be made, once for the warp, of the operands of its 32 lanes, in place.
using WarpWork = void (*)(void* all);

/// A collective as one lane asks for it. Lanes meet when `same_call` holds.
struct Request {
  Collective kind{};
  int op = 0;
  bool is_signed = false;
  unsigned mask = 0;
  std::uint64_t value = 0;
  int argument = 0, width = 32;
  const void* from = nullptr;  // gather: this lane's operands
  WarpWork work = nullptr;     // gather: what to make of those of all
};
inline bool same_call(const Request& a, const Request& b) {
  return a.kind == b.kind && a.op == b.op && a.mask == b.mask;
}

/// A cp.async that its thread has not waited for.
struct AsyncCopy {
  void* to = nullptr;
  unsigned bytes = 0;
  unsigned group = 0;  ///< number of groups that the thread had committed before
  std::array<unsigned char, 16> data{};
};

/// A cp.async.bulk of the running block.
struct BulkCopy {
  unsigned thread = 0;  ///< that issued it
  void* to = nullptr;
  const void* from = nullptr;
  std::uint32_t bytes = 0;
  std::uint64_t* mbarrier = nullptr;
  std::uintptr_t pc = 0;
  bool delivered = false;
};

struct Lane {
  boost::context::fiber context;
  bool started = false;  ///< `context` holds a suspended fiber
  State state = State::done;
  uint3 tid{};
  unsigned linear = 0;
  Request request;         // while at_collective
  BarrierOp barrier_op{};  // while at_barrier
  int predicate = 0;
  std::uintptr_t pc = 0;  ///< return address of the call the thread waits in
  std::uint64_t result = 0;
  int match_all = 0;
  std::vector<AsyncCopy> copies;      // in the order of issue
  unsigned groups = 0;                // of copies, that were committed
  std::uint64_t* mbarrier = nullptr;  // while at_mbarrier
  unsigned parity = 0;
};

/// The calling OS thread's view of the kernel thread that it runs. One object, so that one address is needed.
struct Current {
  bool recording = false;  ///< accesses are to be observed
  Lane* lane = nullptr;    ///< nullptr outside kernel threads
  struct Worker* worker = nullptr;
};
extern constinit thread_local Current current;

/// One OS thread that runs blocks, one at a time.
struct Worker {
  Worker();
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  void run_blocks(LaunchState& launch);
  void run_block(std::uint64_t index);
  void run_warp(unsigned warp);  ///< runs until every lane of it waits or is done
  void resume(Lane& lane);
  void to_hub();                ///< from a lane: suspends it
  [[noreturn]] void abandon();  ///< from a lane: suspends it for ever
  void thread_body(Lane& lane);
  void discard(Lane& lane);
  bool complete_barrier();
  bool complete_collectives(unsigned warp);
  bool try_collective(unsigned first_lane, const Request& r);
  bool all_wait(unsigned first_lane, unsigned mask) const;
  void perform(unsigned first_lane, unsigned members, const Request& r);
  void report(const Lane* lane, const std::string& what, Check check, std::uintptr_t pc = 0);
  std::string deadlock_text() const;
  void poison_shared();
  /// Lets lanes go on whose mbarrier's phase is complete, or is once bulk copies arrive. True: there was one.
  bool wake_waiters();
  void deliver(std::uint64_t* mbarrier);
  bool in_shared(const void* p, std::size_t bytes) const;
  unsigned lanes_in_warp(unsigned warp) const;
  uint3 block_at(std::uint64_t index) const;
  uint3 thread_at(unsigned linear) const;

  std::vector<Lane> lanes;
  boost::context::fiber hub;
  char* stacks = nullptr;
  std::size_t stack_stride = 0;
  LaunchState* launch = nullptr;
  uint3 block{};
  std::uint64_t block_index = 0;
  unsigned threads = 0;
  bool failed = false;  ///< the block, while it runs
  std::string error;
  Check error_check{};
  std::uintptr_t error_pc = 0;
  std::vector<std::pair<std::uintptr_t, std::size_t>> static_shared;  ///< ranges of __shared__ variables
  char* dynamic_shared = nullptr;
  std::vector<BulkCopy> bulk;  ///< of the block
  std::vector<std::vector<unsigned char>>
      gathered;  ///< operands of the last warp-wide instruction of each warp
  std::unique_ptr<Observer> observer;
};

/// While it lives, a kernel thread that touches memory that is not there ends with an error of its launch.
struct FaultHandler {
  FaultHandler();
  ~FaultHandler();
  FaultHandler(const FaultHandler&) = delete;
  FaultHandler& operator=(const FaultHandler&) = delete;
};

std::string thread_text(const uint3& block, const uint3& thread);
std::string triple(const uint3& v);

}  // namespace ladder::emu
