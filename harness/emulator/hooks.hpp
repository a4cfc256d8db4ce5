// Where an access of a kernel thread enters the emulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "harness/emulator/counters.hpp"
#include "harness/emulator/machine.hpp"

namespace ladder::emu {

/// Observes one access of the running kernel thread. `pc` is the return address of the call that reports it; `whole`
/// says that it is one instruction, which must be aligned to its size, and not the copy of a structure.
void record_access(std::uintptr_t address, std::size_t bytes, Access kind, std::uintptr_t pc, bool whole);
/// As `count`, for a function of the emulator that a kernel called at `pc`.
void count_at(Instruction which, int n, const void* pc);
void record_enter(std::uintptr_t caller);
void record_exit();
void record_block(std::uintptr_t pc);

/// As warp_gather, for a function of the emulator that a kernel called at `pc`. @return the operands of all lanes, or
/// what `work` made of them; they stay until the warp's next such instruction
const void* warp_gather_at(const void* mine, std::size_t bytes, WarpWork work, Instruction which,
                           std::uintptr_t pc);

/// "1 of 2 arrivals missing, 4096 bytes missing", for an mbarrier in shared memory.
std::string mbarrier_text(std::uint64_t state);

/// While it lives, the emulator's own code runs in a kernel thread. Library functions that it shares with kernel
/// sources (the linker keeps one copy of an inline function, perhaps the instrumented one) must not be observed.
class Quiet {
 public:
  Quiet() : before_(current.recording) { current.recording = false; }
  ~Quiet() { current.recording = before_; }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;
  bool recording() const { return before_; }

 private:
  bool before_;
};

inline void observe(const volatile void* p, std::size_t bytes, Access kind, const void* pc) {
  if (!current.recording) [[likely]]
    return;
  record_access(reinterpret_cast<std::uintptr_t>(p), bytes, kind, reinterpret_cast<std::uintptr_t>(pc), true);
}

inline void observe_copy(const volatile void* p, std::size_t bytes, Access kind, const void* pc) {
  if (!current.recording) [[likely]]
    return;
  record_access(reinterpret_cast<std::uintptr_t>(p), bytes, kind, reinterpret_cast<std::uintptr_t>(pc),
                false);
}

inline void observe_atomic(const volatile void* p, std::size_t bytes, const void* pc) {
  observe(p, bytes, Access::atomic, pc);
}

}  // namespace ladder::emu
