// How blocks of one kernel hand each other numbers: every store carries the number of the step that it belongs to, in the
// same 16 bytes as the data. Whoever wants the data reads until the number is right, so the trip that brings the number
// brings the data too; a counter or flag beside them would be one more trip to L2 each way.
//
// USE     store_packet by the one that has the data; load_packet, then wait_packet, by all that want it. Numbers of steps
//         differ from each other, and from zero, with which the memory begins.
// ORDER   none: only the bytes of one packet belong together. The place of a step may be written again once all that read
//         it are known to have done so, for example because what is to be written next depends on what they sent.
// ERRORS  waiting for what nobody sends: the kernel ends with a trap after kMostPolls. On the emulator, where a block runs
//         alone, whatever is waited for must have been stored before.
// SOURCE  PTX ISA, "Memory Consistency Model": a relaxed access of 128 bits of one type is a single access.
#pragma once

#include <cstdint>

#include "kernels/device/cuda.cuh"

namespace ladder {

inline constexpr unsigned kMostPolls = 1u << 22;  ///< a few seconds

/// Three words and the number of their step.
struct alignas(16) Packet {
  unsigned word[3], step;
};

__device__ __forceinline__ void store_packet(Packet* to, const Packet& p) {
#if defined(__CUDACC__)
  const std::uint64_t low = p.word[0] | static_cast<std::uint64_t>(p.word[1]) << 32,
                      high = p.word[2] | static_cast<std::uint64_t>(p.step) << 32;
  asm volatile(
      "{\n\t.reg .b128 t;\n\tmov.b128 t, {%1, %2};\n\tst.relaxed.gpu.global.b128 [%0], t;\n\t}" ::"l"(to),
      "l"(low), "l"(high)
      : "memory");
#else
  *to = p;
#endif
}

__device__ __forceinline__ Packet load_packet(const Packet* from) {
#if defined(__CUDACC__)
  std::uint64_t low, high;
  asm volatile("{\n\t.reg .b128 t;\n\tld.relaxed.gpu.global.b128 t, [%2];\n\tmov.b128 {%0, %1}, t;\n\t}"
               : "=l"(low), "=l"(high)
               : "l"(from)
               : "memory");
  return {{static_cast<unsigned>(low), static_cast<unsigned>(low >> 32), static_cast<unsigned>(high)},
          static_cast<unsigned>(high >> 32)};
#else
  return *from;
#endif
}

/// @param p what load_packet has brought, asked for earlier so that several loads are under way at once
__device__ __forceinline__ Packet wait_packet(const Packet* from, Packet p, unsigned step) {
  for (unsigned polls = 0; p.step != step; p = load_packet(from)) {
    if (++polls == kMostPolls) __trap();
  }
  return p;
}

}  // namespace ladder
