#include "harness/emulator/hooks.hpp"
namespace ladder::emu {
void record_access(std::uintptr_t, std::size_t, Access, std::uintptr_t) {}
void record_enter(std::uintptr_t) {}
void record_exit() {}
void record_block(std::uintptr_t) {}
void count(Instruction, int) {}
void fence(int) {}
}
