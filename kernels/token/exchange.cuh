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
#include "kernels/device/reduce.cuh"
#include "kernels/quant/quantize_acts.cuh"

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

/// Packets of a warp's lanes, all asked for at the same time, and again all that have not come: one after the other, each
/// would take a trip to L2. By all lanes.
/// @param place of packet n: its address, or null for one that the lane does not want
template <int N, class Place>
__device__ __forceinline__ void wait_packets(Packet (&got)[N], const Place& place, unsigned step) {
#pragma unroll
  for (int n = 0; n < N; ++n) got[n] = {{0, 0, 0}, place(n) != nullptr ? step - 1 : step};
  unsigned polls = 0;
  bool missing;
  do {
    if (++polls == kMostPolls) __trap();
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (got[n].step != step) got[n] = load_packet(place(n));
    }
    missing = false;
#pragma unroll
    for (int n = 0; n < N; ++n) missing = missing || got[n].step != step;
  } while (__any_sync(kAllLanes, missing));
}

namespace token {

inline constexpr int kWarps = 16,
                     kThreads = 32 * kWarps;  ///< of a block
inline constexpr int kFloatPackets = 8;       ///< of sixteen f32
inline constexpr int kBlockPackets = 4;       ///< of 32 int8, their scale and sums

/// d and 1/d of a block of int8, as q8_scale has them but for the last bits: a reciprocal of one instruction.
__device__ __forceinline__ Q8Scale quick_scale(unsigned largest) {
  if (largest >= 0x7f800000u) return {__uint_as_float(0x7fffffffu), 0.0f};  // not finite: NaN
  const float most = __uint_as_float(largest);
#if defined(__CUDACC__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(most));
  inverse *= 127.0f;
#else
  const float inverse = 127.0f / most;
#endif
  if (inverse > 3.402823466e38f) return {0.0f, 0.0f};
  return {most * (1.0f / 127.0f), inverse};
}
__device__ __forceinline__ unsigned pack_sums(int low, int high) {
  return (static_cast<unsigned>(low) & 0xffffu) | static_cast<unsigned>(high) << 16;
}

/// A block of 32, an element a lane, as kBlockPackets: packet j has words 2 j and 2 j + 1 of its codes, the first one also
/// its scale, the second one the sums.
__device__ __forceinline__ void send_codes(float x, Packet* to, unsigned step) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const Q8Scale scale = quick_scale(__reduce_max_sync(kAllLanes, __float_as_uint(x) & 0x7fffffffu));
  const int code = scale.inverse == 0.0f ? 0 : __float2int_rn(x * scale.inverse);
  // Both halves' sums in one, the upper one 2^16 times: what the lower one borrows is given back.
  const unsigned both = __reduce_add_sync(kAllLanes, static_cast<unsigned>(code) << (lane < 16 ? 0 : 16));
  const int low = static_cast<short>(both & 0xffffu);
  const unsigned sums = pack_sums(low, static_cast<int>(both - static_cast<unsigned>(low)) >> 16);
  unsigned word = (static_cast<unsigned>(code) & 0xffu) << (lane % 4 * 8);
  word |= __shfl_xor_sync(kAllLanes, word, 1);
  word |= __shfl_xor_sync(kAllLanes, word, 2);
  const unsigned next = __shfl_xor_sync(kAllLanes, word, 4);
  const auto d = static_cast<unsigned short>(q8_stored_scale(scale.d));
  const int j = lane / 8;
  if (lane % 8 == 0)
    store_packet(to + j,
                 {{word, next, j == 0 ? __float_as_uint(__half2float(__ushort_as_half(d))) : sums}, step});
}

}  // namespace token

}  // namespace ladder
