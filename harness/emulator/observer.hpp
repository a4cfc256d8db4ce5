// Inside the emulator: one worker's part in counting and checking a launch.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "harness/emulator/counters.hpp"
#include "harness/emulator/machine.hpp"
#include "harness/emulator/memory.hpp"

namespace ladder::emu {

/// What a lane did, in the order it did it.
struct Record {
  enum What : std::uint8_t {
    global_read,
    global_write,
    global_atomic,
    shared_read,
    shared_write,
    shared_atomic,
    basic_block,
    memory_fence,
    async_read,     // by cp.async; `address` also has the bytes that are read, in its topmost 8 bits
    async_read_l1,  // the same through L1
    async_write,
    async_arrival,
    mbarrier_arrive,
    mbarrier_wait,
    bulk_copy  // `address` is an index into Worker::bulk
  };
  std::uint64_t address = 0;
  std::uint32_t pc = 0;    ///< from the start of the program
  std::uint16_t node = 0;  ///< where in the tree of calls
  What what = basic_block;
  std::uint8_t bytes = 0;

  /// Lanes whose next records agree in this are at the same instruction.
  bool same_instruction(const Record& o) const {
    return pc == o.pc && node == o.node && what == o.what && bytes == o.bytes;
  }
};

/// Longer logs line up no better, and fit the caches worse.
inline constexpr unsigned kLogRecords = 128;

struct LaneLog {
  Record* begin = nullptr;  ///< next record to be lined up
  Record* end = nullptr;
  Record* limit = nullptr;
  Record* first = nullptr;
  std::uint16_t node = 0;
  std::uint32_t last_event = 0;  ///< the basic block execution that the lane was last part of; 0: none
};

/// A function call that was not inlined: where its code lies in the order of the caller's code.
struct CallNode {
  std::uint16_t parent = 0;
  std::uint16_t depth = 0;
  std::uint32_t call_pc = 0;
};

/// Who touched a word of global memory: packed, so that it can be exchanged atomically.
struct Toucher {
  static constexpr std::uint64_t kNobody = 0;
  static constexpr unsigned kMany = (1u << 22) - 1;
  static constexpr std::uint64_t kMaxBlocks = kMany - 2;
  static std::uint64_t pack(std::uint64_t block, unsigned thread, unsigned site, bool atomic, unsigned fences,
                            unsigned bytes) {
    return (block + 1) << 42 | std::uint64_t{thread} << 32 | std::uint64_t{site & 0x3fff} << 18 |
           std::uint64_t{atomic} << 17 | std::uint64_t{std::min(fences, 0x1fffu)} << 4 | bytes;
  }
  explicit Toucher(std::uint64_t bits) : bits_(bits) {}
  bool nobody() const { return bits_ == kNobody; }
  bool many() const { return owner() == kMany; }
  unsigned owner() const { return static_cast<unsigned>(bits_ >> 42); }  ///< block + 1
  unsigned thread() const { return static_cast<unsigned>(bits_ >> 32) & 0x3ffu; }
  unsigned site() const { return static_cast<unsigned>(bits_ >> 18) & 0x3fffu; }
  bool atomic() const { return (bits_ >> 17 & 1) != 0; }
  unsigned fences() const { return static_cast<unsigned>(bits_ >> 4) & 0x1fffu; }
  unsigned bytes() const { return static_cast<unsigned>(bits_) & 0xfu; }

 private:
  std::uint64_t bits_;
};

inline constexpr std::size_t kPageBytes = 4096;
inline constexpr std::size_t kPageWords = kPageBytes / 4;

/// One page's touchers, a word each.
struct TouchPage {
  std::array<std::atomic<std::uint64_t>, kPageWords> word{};
};

/// One buffer during one launch, shared by all workers.
struct Watched {
  std::shared_ptr<Allocation> allocation;
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;
  std::uint32_t index = 0;  ///< in Observation::watched
  bool only_read = false;   ///< the kernel gets it as a pointer to const: it cannot conflict with a write
  bool unwritten_parts = false;
  std::vector<std::atomic<std::uint64_t>> read, written;  ///< a bit for each sector
  std::vector<std::atomic<std::uint64_t>> ever_written;   ///< a bit for each byte, while `unwritten_parts`
  std::vector<std::atomic<TouchPage*>> readers, writers;
  ~Watched();
};

/// The same fault at the same two instructions is one finding.
struct FindingKey {
  Check check{};
  std::uint32_t pc = 0, other_pc = 0;
  auto operator<=>(const FindingKey&) const = default;
};

/// Accesses of one kind by one instruction to one buffer.
struct AccessKey {
  std::uint32_t pc = 0;
  std::uint32_t buffer = 0;  ///< index in Observation::watched
  Access access{};
  auto operator<=>(const AccessKey&) const = default;
};

/// What the workers of one counted launch share.
struct Observation {
  explicit Observation(const LaunchRequest& r);
  Watched* find(std::uintptr_t address);
  unsigned site_number(std::uint32_t pc);
  std::uint32_t site_pc(unsigned number);
  /// After all workers have ended: resolves lines, and writes back which bytes are written now.
  Counters finish(const std::string& kernel);

  const LaunchRequest* request;
  std::vector<std::unique_ptr<Watched>> watched;  ///< by address
  std::uint64_t blocks = 0;
  std::size_t l1_lines = 0;
  bool races = true;  ///< false: more blocks than a Toucher can name, or only one
  /// For every block, the number of fences that an atomic of it has followed: what others may rely on.
  std::vector<std::atomic<std::uint16_t>> released;
  std::mutex mutex;  // guards the rest
  std::unordered_map<std::uint32_t, unsigned> site_numbers;
  std::vector<std::uint32_t> site_pcs;
  std::unordered_map<std::uint32_t, Counts> by_pc;
  std::map<AccessKey, GlobalCounts> accesses;
  std::map<FindingKey, Finding> findings;
  std::map<std::uint32_t, CapturedRequest> captured;  ///< by pc
};

/// An L1 of `lines` lines, least recently used out first.
class L1Model {
 public:
  void reset(std::size_t lines);
  /// True when the sector was there; brings it in otherwise.
  bool access(std::uint64_t sector);

 private:
  struct Line {
    std::uint64_t number;
    std::uint32_t newer, older, next_in_bucket;
    std::uint8_t sectors;
  };
  void unlink(std::uint32_t i);
  void push_newest(std::uint32_t i);
  std::vector<Line> lines_;
  std::vector<std::uint32_t> buckets_;
  std::size_t capacity_ = 0;
  std::uint32_t newest_ = 0, oldest_ = 0;  // 0: none; lines are numbered from 1
};

/// The threads that touched a word (or byte) of shared memory since the block started.
struct SharedCell {
  struct Touch {
    std::uint32_t epoch = 0;  ///< of barriers; 0: never
    std::uint16_t thread = 0;
    std::uint16_t syncs = 0;  ///< __syncwarps of its warp before it
    std::uint32_t pc = 0;
    std::uint16_t releases = 0;  ///< arrivals of its thread at mbarriers before it
  };
  Touch write, read, other_read;  ///< `other_read` is by another warp than `read`
  bool write_atomic = false;
  Touch pending;  ///< an asynchronous copy to here that has not arrived; epoch 0: none
  bool pending_bulk = false;
  bool read_by_several = false;  ///< lanes of the warp of `read`, between the same __syncwarps
};

struct Observer {
  explicit Observer(Worker& w);
  void begin_launch(Observation& shared);
  void end_launch();
  void begin_block();
  void run_warps();

  // From a kernel thread.
  /// @param whole one instruction that must be aligned to its size; otherwise a copy that is split up
  void access(std::uintptr_t address, std::size_t bytes, Access kind, std::uintptr_t pc, bool whole);
  void block(std::uintptr_t pc);
  void fence();
  void enter(std::uintptr_t caller);
  void leave();
  void instruction(Instruction which, int n, std::uintptr_t pc);
  /// A cp.async: what it reads and writes. `through_l1`: .ca
  void async_issued(std::uintptr_t to, std::uintptr_t from, unsigned bytes, unsigned source_bytes,
                    bool through_l1, std::uintptr_t pc);
  void async_arrived(std::uintptr_t to, unsigned bytes, std::uintptr_t pc);
  void mbarrier_event(const void* mbarrier, bool arrive, std::uintptr_t pc);
  void bulk_issued(const BulkCopy& c, std::size_t index);

  // From the scheduler.
  void barrier_completed(std::uintptr_t pc);
  void collective_completed(unsigned first_lane, const Request& r, std::uintptr_t pc);
  void bulk_delivered(const BulkCopy& c);

 private:
  struct Group {  // lanes of a warp at one instruction
    unsigned warp = 0, count = 0;
    const Record* head = nullptr;
    std::array<std::uint64_t, 32> address;
    std::array<std::uint8_t, 32> lane;
    const std::uint8_t* used = nullptr;  // for each, the bytes of head->bytes that are accessed; nullptr: all
    bool past_l1 = false;
  };
  struct Event {  // one execution of a basic block by a warp
    std::uint32_t id = 0, pc = 0, lanes = 0;
    bool split = false;
  };
  static constexpr unsigned kEvents = 64;

  /// Checks that the access stays inside what it starts in. basic_block: it is none that counts.
  Record::What classify(std::uintptr_t address, std::size_t bytes, Access kind, std::uintptr_t pc);
  void check_aligned(std::uintptr_t address, std::size_t bytes, Access kind, Record::What what,
                     std::uintptr_t pc);
  void async_read(const Group& g);
  void set_pending(std::uint64_t address, unsigned bytes, unsigned thread, std::uint32_t pc, bool bulk);
  void bulk_request(const BulkCopy& c);
  void release(unsigned thread, std::uint64_t mbarrier);
  void acquire(unsigned thread, std::uint64_t mbarrier);
  void use_clocks();
  SharedCell::Touch touch_of(unsigned thread, std::uint32_t pc) const;
  std::string other_thread(const SharedCell::Touch& t) const;
  void append(std::uint64_t address, unsigned bytes, Record::What what, std::uintptr_t pc);
  bool take_turn(unsigned warp);
  bool line_up(unsigned warp);
  bool earlier(const Record& a, const Record& b) const;
  void emit(const Group& g);
  void global_request(const Group& g);
  void shared_request(const Group& g);
  void block_executed(const Group& g);
  void touch_global(Watched& w, std::uint64_t address, unsigned bytes, Access kind, unsigned thread,
                    std::uint32_t pc);
  void conflict(Watched& w, std::uint64_t address, Toucher before, bool before_wrote, Access kind,
                unsigned thread, std::uint32_t pc);
  void touch_shared(std::uint64_t address, unsigned bytes, Access kind, unsigned thread, std::uint32_t pc);
  void touch_cell(SharedCell& c, std::uint64_t address, Access kind, unsigned thread, std::uint32_t pc);
  bool ordered(const SharedCell::Touch& before, unsigned thread) const;
  void shared_conflict(std::uint64_t address, const SharedCell::Touch& before, bool before_wrote,
                       bool several, Access kind, unsigned thread, std::uint32_t pc);
  void use_byte_cells();
  void check_written(Watched& w, std::uint64_t address, unsigned bytes, unsigned thread, std::uint32_t pc);
  void mark_written(Watched& w, std::uint64_t address, unsigned bytes);
  Counts& counts(std::uint32_t pc);
  unsigned site(std::uint32_t pc);
  /// The new finding to be filled in, or nullptr when there is one of this kind at these lines already.
  Finding* find(Check check, std::uint32_t pc, std::uint32_t other_pc);
  [[noreturn]] void stop(Check check, std::uintptr_t pc, const std::string& text);
  void capture(const Group& g, Access kind, const Watched* w);
  std::string who(unsigned thread) const;
  std::string shared_name(std::uint64_t address) const;
  std::size_t shared_cell(std::uint64_t address) const;

  Worker& worker_;
  Observation* launch_ = nullptr;
  std::vector<Record> records_;
  std::array<LaneLog, kMaxThreads> log_;
  std::vector<CallNode> nodes_;
  std::unordered_map<std::uint64_t, std::uint16_t> children_;
  std::uint64_t last_child_key_ = ~std::uint64_t{0};
  std::uint16_t last_child_ = 0;
  std::unordered_map<std::uint32_t, Counts> by_pc_;
  std::map<AccessKey, GlobalCounts> accesses_;  // goes into the lines' counts at the end
  std::unordered_map<std::uint32_t, unsigned> sites_;
  std::map<FindingKey, Finding> findings_;
  std::map<std::uint32_t, CapturedRequest> captured_;
  L1Model l1_;
  Watched* recent_[2] = {nullptr, nullptr};
  std::uintptr_t tls_begin_ = 0;  // the executable's thread-local block
  std::size_t tls_bytes_ = 0;
  std::uintptr_t static_begin_ = 0;  // the part of it that holds __shared__ variables
  std::size_t static_bytes_ = 0;
  std::vector<SharedCell> cells_;  // of the static part, then of dynamic shared memory
  unsigned cell_shift_ = 2;        // 2: a cell is a word; 0: a byte, once something smaller was accessed
  std::uint32_t epoch_ = 1, block_epoch_ = 1;
  std::array<std::uint16_t, 32> warp_syncs_{};
  // What is ordered through mbarriers: for each thread, the arrivals of every other that it knows of. The copy
  // engine, which arrives with bulk copies, is one more thread. Empty until the block uses an mbarrier.
  std::vector<std::vector<std::uint16_t>> clock_;
  std::map<std::uint64_t, std::vector<std::uint16_t>> mbarrier_clock_;
  unsigned fences_ = 0;    // of this block so far
  bool acquired_ = false;  // an atomic of this block has been executed
  std::array<std::array<Event, kEvents>, 32> events_{};
  std::array<std::uint32_t, 32> event_count_{};
};

/// Stands for the engine of bulk copies where a thread is asked for.
inline constexpr unsigned kCopyEngine = kMaxThreads;

/// Of one block, on any device model.
inline constexpr std::size_t kMaxDynamicShared = 256 * 1024;

/// What last_launch() will answer.
void set_last_launch(Counters c);

}  // namespace ladder::emu
