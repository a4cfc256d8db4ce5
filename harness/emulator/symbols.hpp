// Names and source lines of the running program, from its own symbol table and debug information.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ladder::emu {

/// A variable of static storage in a thread's block: what `__shared__` becomes on the host.
struct SharedVariable {
  std::size_t offset;  ///< from the start of the executable's thread-local block
  std::size_t bytes;
  std::string name;      ///< "tile"
  std::string function;  ///< mangled name of the function it is declared in
};

/// Where the executable lies in memory and what is in it. Read once.
struct Program {
  std::string path;
  std::uintptr_t base = 0;             ///< add to an address of the file for one of the process
  std::uintptr_t begin = 0, end = 0;   ///< of all its segments
  bool has_symbols = false;            ///< false for a stripped executable
  std::vector<SharedVariable> shared;  ///< sorted by offset
  /// Offsets of the bytes in which compilers note that such a variable has been constructed. g++ makes one for an
  /// array of a type like half, whose construction does nothing.
  std::vector<std::size_t> guards;  ///< sorted
};
const Program& program();

/// Start of the calling thread's copy of the executable's thread-local block, and its size.
struct ThreadBlock {
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;
};
ThreadBlock thread_block();

/// Mangled name of the function that starts at `address`, or "" if none does.
std::string_view mangled_name(const void* address);
/// "reduce<256>" for `void reduce<256>(float const*, float*)`: no return type, no parameters.
std::string kernel_name(const void* address);
std::string shorten(const std::string& demangled);
/// Bytes of the __shared__ variables that the kernel itself declares; those of functions it calls are not among them.
std::size_t static_shared_bytes(const void* kernel);

/// A place in the source: the innermost one that is neither in the emulator's headers nor in a system header.
struct SourceLine {
  std::string file;  ///< relative to the working directory where it lies below it
  int line = 0;      ///< 0: unknown
  std::string function;
};
bool operator==(const SourceLine& a, const SourceLine& b);
std::string to_string(const SourceLine& s);
/// Whether a file is part of what runs kernels on the host, so that its lines say nothing about a kernel.
bool of_the_emulator(const std::string& file);

/// Lines of return addresses (the call, not the instruction after it), answered from a cache where possible.
std::vector<SourceLine> source_lines(const std::vector<std::uintptr_t>& return_addresses);
SourceLine source_line(std::uintptr_t return_address);

}  // namespace ladder::emu
