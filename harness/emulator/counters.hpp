// What the emulator counts and checks. Off by default; on for the launches inside the life of a `counting` object:
//
//   ladder::emu::counting on;
//   ladder::require(ladder::launch(kernel, grid, block, 0, stream, ...));
//   std::cout << ladder::emu::text_report(ladder::emu::last_launch());
//
// Everything counted is exact and repeatable: it depends on the program and its data, not on the host's speed,
// cores or scheduling. Nothing here is a time.
//
// How lanes are lined up into warp requests. A GPU issues an instruction once for all lanes that are at it. The
// emulator's lanes run one after the other, so it lines up their accesses afterwards: of the lanes of a warp that
// have not caught up with each other, those that are furthest behind in the code go next (lowest instruction
// address; inside a function, the place of the call decides first), and all lanes that are at the same
// instruction go together. So lanes that leave a loop early wait behind it for those that stay, both arms of a
// branch join after it, and in the next trip of an outer loop all are together again. Barriers and warp
// collectives are met by all their lanes in any case.
//
// The L1 model. Each running block has its own cache for loads of global memory: lines of 128 bytes in four
// sectors, least recently used line replaced, no other latency or limit. Its size is the SM's memory that is not
// shared memory, divided by the blocks that are resident together (by threads, shared memory, block slots, and the
// number of blocks there are; registers only if given). Stores and atomics go past it. A hit costs no sector.
// The warps of a block take turns of up to 128 steps (accesses and basic blocks) each, or until they wait.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "harness/emulator/cuda.hpp"
#include "harness/emulator/symbols.hpp"

namespace ladder::emu {

inline constexpr std::size_t kSectorBytes = 32;
inline constexpr std::size_t kLineBytes = 128;

enum class Access : std::uint8_t { read, write, atomic };
inline constexpr int kAccesses = 3;

/// Warp requests to global memory of one kind.
struct GlobalCounts {
  std::uint64_t requests = 0;       ///< one for each instruction of each warp that executes it
  std::uint64_t lanes = 0;          ///< lanes that took part, over all requests
  std::uint64_t bytes = 0;          ///< what the lanes asked for, repetitions included
  std::uint64_t sectors = 0;        ///< distinct 32-byte sectors, request by request
  std::uint64_t ideal_sectors = 0;  ///< the fewest that could hold the distinct bytes of each request
  std::uint64_t l1_sectors = 0;     ///< sectors that the L1 model had to fetch (loads), or that went past it

  double sectors_per_request() const {
    return requests == 0 ? 0.0 : static_cast<double>(sectors) / static_cast<double>(requests);
  }
  GlobalCounts& operator+=(const GlobalCounts& o);
};

/// Warp requests to shared memory of one kind. A request is served in passes: in one pass each of the 32 banks (4
/// bytes wide) delivers one word, to any number of lanes. 4-byte accesses and smaller are served for the whole
/// warp at once, 8-byte ones for each half-warp, 16-byte ones for each quarter-warp.
struct SharedCounts {
  std::uint64_t requests = 0;
  std::uint64_t lanes = 0;
  std::uint64_t bytes = 0;
  std::uint64_t passes = 0;
  std::uint64_t ideal_passes = 0;  ///< 1, 2 or 4, less where half- or quarter-warps are absent

  std::uint64_t conflicts() const { return passes - ideal_passes; }
  SharedCounts& operator+=(const SharedCounts& o);
};

/// Branches, seen as the basic blocks of the host compiler's code.
struct ControlCounts {
  std::uint64_t blocks = 0;              ///< basic blocks executed by warps
  std::uint64_t lanes = 0;               ///< lanes active in them, over all
  std::uint64_t divergent_branches = 0;  ///< times that lanes which were together went different ways

  double active_lanes() const {
    return blocks == 0 ? 0.0 : static_cast<double>(lanes) / static_cast<double>(blocks);
  }
  ControlCounts& operator+=(const ControlCounts& o);
};

/// Everything counted for one source line, or for a whole launch.
struct Counts {
  std::array<GlobalCounts, kAccesses> global;  ///< by Access
  std::array<SharedCounts, kAccesses> shared;
  ControlCounts control;
  std::uint64_t barriers = 0;     ///< __syncthreads and its like, once for each block
  std::uint64_t collectives = 0;  ///< shuffles, votes, reductions, __syncwarp: once for each group of lanes
  std::array<std::uint64_t, kInstructions> instructions{};  ///< by Instruction

  const GlobalCounts& loads() const { return global[0]; }
  const GlobalCounts& stores() const { return global[1]; }
  const GlobalCounts& atomics() const { return global[2]; }
  SharedCounts shared_total() const;
  GlobalCounts global_total() const;
  Counts& operator+=(const Counts& o);
};

/// What one line asked of one buffer.
struct BufferAccess {
  std::string buffer;
  Access access{};
  GlobalCounts counts;
};

struct LineCounts {
  SourceLine line;
  Counts counts;
  std::vector<BufferAccess> buffers;  ///< the same as counts.global, apart by buffer
};

/// What a launch did with one buffer: the compulsory traffic, each sector once.
struct BufferCounts {
  std::string name;
  std::size_t bytes = 0;
  std::uint64_t sectors_read = 0, sectors_written = 0;  ///< distinct ones; an atomic counts as both
};

enum class Check {
  out_of_bounds,
  unwritten_read,
  misaligned,
  shared_race,
  global_race,
  shared_overrun,
  barrier,
  collective,
  fault,
  async_copy,
};
const char* to_string(Check c);

/// Something that a correct kernel does not do. The same fault at the same lines is one finding.
struct Finding {
  Check check{};
  std::string text;  ///< one line: block, thread(s), what happened, the source line(s)
  std::uint64_t times = 0;
  std::uint64_t block = 0;  ///< linear index of the block that `text` is about
  SourceLine line, other;   ///< the access, and the one it conflicts with (line 0 if there is none)
};

struct Occupancy {
  unsigned blocks_per_sm = 0, warps_per_sm = 0, max_warps_per_sm = 0;
  const char* limited_by = "";  ///< "threads", "shared memory", "registers" or "block slots"
  double fraction() const {
    return max_warps_per_sm == 0 ? 0.0
                                 : static_cast<double>(warps_per_sm) / static_cast<double>(max_warps_per_sm);
  }
};
/// Blocks that fit on an SM of the device model. @param registers_per_thread 0: not known, so no limit
Occupancy occupancy(unsigned threads, std::size_t shared_bytes, unsigned registers_per_thread = 0);

/// One warp request, as it was made: for pictures.
struct CapturedRequest {
  SourceLine line;
  bool shared = false;
  Access access{};
  unsigned bytes = 0;  ///< of one lane's access
  std::uint64_t block = 0;
  unsigned warp = 0;
  std::string buffer;  ///< name, for global memory
  std::array<std::int64_t, 32>
      offset{};  ///< from the start of the buffer or of shared memory; -1: lane not active
};

struct Counters {
  std::string kernel;
  dim3 grid, block;
  std::size_t static_shared_bytes = 0, dynamic_shared_bytes = 0;
  unsigned registers = 0;    ///< of one thread; 0: not known (see registers_per_thread)
  std::size_t l1_bytes = 0;  ///< of the L1 model, for one block
  Occupancy occupancy;
  Counts total;
  std::vector<LineCounts> lines;  ///< by file and line
  std::vector<BufferCounts> buffers;
  std::vector<Finding> findings;          ///< by block
  std::vector<CapturedRequest> captured;  ///< the first request of every line that accesses memory

  std::uint64_t unique_sectors_read() const;
  std::uint64_t unique_sectors_written() const;
  /// Counts of a line given as "file:line" or ":line" with the file's end; all zero if it did nothing.
  Counts at(const std::string& file_and_line) const;
  Counts at_line(int line) const;
  /// All that was asked of the buffers of this name.
  GlobalCounts of_buffer(const std::string& name, Access access) const;
};

/// Turns counting and checking on, or off, while it lives; then what was before. For the whole process. Without one,
/// LADDER_EMULATOR_CHECK=1 turns them on: how a program's tests are run under the checks.
class counting {
 public:
  explicit counting(bool on = true);
  ~counting();
  counting(const counting&) = delete;
  counting& operator=(const counting&) = delete;

 private:
  bool before_;
};
bool counting_now();

/// The last launch that was counted. Empty before the first.
Counters last_launch();

/// Tables for people, at most 100 columns wide.
std::string text_report(const Counters& c);
/// The source files of the kernel with counts in the margin, the lines that did something and those around them.
std::string annotated_source(const Counters& c);
/// The `counters` object of a record: totals only.
std::string record_json(const Counters& c);
/// Everything: totals, lines, buffers, findings.
std::string json(const Counters& c);
/// SVG pictures of one request: lanes against sectors, and lanes against banks.
std::string access_picture(const CapturedRequest& r);
std::string bank_picture(const CapturedRequest& r);
/// Writes the picture of every captured request into a folder, which is made if need be:
/// `prefix`-line64-weights.svg, `prefix`-line121-shared.svg. Throws std::runtime_error when a file cannot be written.
/// LADDER_EMULATOR_PICTURES=FOLDER does this after every counted launch, with the kernel's name as the prefix.
std::vector<std::string> write_pictures(const Counters& c, const std::string& folder,
                                        const std::string& prefix);

}  // namespace ladder::emu
