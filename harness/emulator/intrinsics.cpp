// Device functions that are better off out of line: atomics, whose call is what the counters see, and integer
// instructions that are counted.

#include <atomic>

#include "harness/emulator/cuda.hpp"
#include "harness/emulator/hooks.hpp"

namespace {

using ladder::emu::observe_atomic;

/// One read-modify-write. `change` maps the old value to the new one.
template <class T, class F>
T update(T* p, F change, const void* caller) {
  observe_atomic(p, sizeof(T), caller);
  std::atomic_ref<T> target(*p);
  T old = target.load(std::memory_order_relaxed);
  while (!target.compare_exchange_weak(old, change(old), std::memory_order_relaxed)) {
  }
  return old;
}

}  // namespace

#define LADDER_EMU_ATOMIC(name, T, expression)                                              \
  T name(T* p, T v) {                                                                       \
    return update(                                                                          \
        p, [v](T old) { return static_cast<T>(expression); }, __builtin_return_address(0)); \
  }

// Signed addition wraps around on the GPU; unsigned arithmetic says so in C++.
int atomicAdd(int* p, int v) {
  return update(
      p, [v](int old) { return static_cast<int>(static_cast<unsigned>(old) + static_cast<unsigned>(v)); },
      __builtin_return_address(0));
}
int atomicSub(int* p, int v) {
  return update(
      p, [v](int old) { return static_cast<int>(static_cast<unsigned>(old) - static_cast<unsigned>(v)); },
      __builtin_return_address(0));
}
LADDER_EMU_ATOMIC(atomicAdd, unsigned, old + v)
LADDER_EMU_ATOMIC(atomicAdd, unsigned long long, old + v)
LADDER_EMU_ATOMIC(atomicAdd, float, old + v)
LADDER_EMU_ATOMIC(atomicAdd, double, old + v)
LADDER_EMU_ATOMIC(atomicSub, unsigned, old - v)
LADDER_EMU_ATOMIC(atomicMax, int, old < v ? v : old)
LADDER_EMU_ATOMIC(atomicMax, unsigned, old < v ? v : old)
LADDER_EMU_ATOMIC(atomicMax, long long, old < v ? v : old)
LADDER_EMU_ATOMIC(atomicMax, unsigned long long, old < v ? v : old)
LADDER_EMU_ATOMIC(atomicMin, int, v < old ? v : old)
LADDER_EMU_ATOMIC(atomicMin, unsigned, v < old ? v : old)
LADDER_EMU_ATOMIC(atomicMin, long long, v < old ? v : old)
LADDER_EMU_ATOMIC(atomicMin, unsigned long long, v < old ? v : old)
LADDER_EMU_ATOMIC(atomicInc, unsigned, old >= v ? 0 : old + 1)
LADDER_EMU_ATOMIC(atomicDec, unsigned, old == 0 || old > v ? v : old - 1)
LADDER_EMU_ATOMIC(atomicExch, int, ((void)old, v))
LADDER_EMU_ATOMIC(atomicExch, unsigned, ((void)old, v))
LADDER_EMU_ATOMIC(atomicExch, unsigned long long, ((void)old, v))
LADDER_EMU_ATOMIC(atomicExch, float, ((void)old, v))
LADDER_EMU_ATOMIC(atomicOr, int, old | v)
LADDER_EMU_ATOMIC(atomicOr, unsigned, old | v)
LADDER_EMU_ATOMIC(atomicOr, unsigned long long, old | v)
LADDER_EMU_ATOMIC(atomicAnd, int, old& v)
LADDER_EMU_ATOMIC(atomicAnd, unsigned, old& v)
LADDER_EMU_ATOMIC(atomicAnd, unsigned long long, old& v)
LADDER_EMU_ATOMIC(atomicXor, int, old ^ v)
LADDER_EMU_ATOMIC(atomicXor, unsigned, old ^ v)
LADDER_EMU_ATOMIC(atomicXor, unsigned long long, old ^ v)

#define LADDER_EMU_CAS(T)                                                                  \
  T atomicCAS(T* p, T expected, T v) {                                                     \
    return update(                                                                         \
        p, [=](T old) { return old == expected ? v : old; }, __builtin_return_address(0)); \
  }
LADDER_EMU_CAS(int)
LADDER_EMU_CAS(unsigned)
LADDER_EMU_CAS(unsigned long long)

namespace {

template <class Byte>
unsigned dot4(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; ++i) {
    const int x = static_cast<Byte>(a >> (8 * i)), y = static_cast<Byte>(b >> (8 * i));
    c += static_cast<unsigned>(x * y);
  }
  return c;
}

template <class T>
unsigned bits_of(const T& v) {
  return static_cast<unsigned>(ladder::emu::to_bits(v));
}

/// Applies `f` to each of the four bytes.
template <class F>
unsigned bytewise(unsigned a, unsigned b, F f) {
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= (static_cast<unsigned>(f(a >> (8 * i) & 0xffu, b >> (8 * i) & 0xffu)) & 0xffu) << (8 * i);
  }
  return out;
}

}  // namespace

#define LADDER_EMU_COUNT_DP4A \
  ladder::emu::count_at(ladder::emu::Instruction::dp4a, 1, __builtin_return_address(0))
int __dp4a(int a, int b, int c) {
  LADDER_EMU_COUNT_DP4A;
  return static_cast<int>(
      dot4<std::int8_t>(static_cast<unsigned>(a), static_cast<unsigned>(b), static_cast<unsigned>(c)));
}
unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  LADDER_EMU_COUNT_DP4A;
  return dot4<std::uint8_t>(a, b, c);
}
int __dp4a(char4 a, char4 b, int c) {
  LADDER_EMU_COUNT_DP4A;
  return static_cast<int>(dot4<std::int8_t>(bits_of(a), bits_of(b), static_cast<unsigned>(c)));
}
unsigned __dp4a(uchar4 a, uchar4 b, unsigned c) {
  LADDER_EMU_COUNT_DP4A;
  return dot4<std::uint8_t>(bits_of(a), bits_of(b), c);
}

unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> (4 * i);
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (s & 7))) & 0xffu;
    if ((s & 8) != 0) byte = (byte & 0x80u) != 0 ? 0xffu : 0u;  // the sign, spread over the byte
    out |= byte << (8 * i);
  }
  return out;
}

unsigned __vadd4(unsigned a, unsigned b) {
  return bytewise(a, b, [](unsigned x, unsigned y) { return x + y; });
}
unsigned __vsub4(unsigned a, unsigned b) {
  return bytewise(a, b, [](unsigned x, unsigned y) { return x - y; });
}
unsigned __vsubss4(unsigned a, unsigned b) {
  return bytewise(a, b, [](unsigned x, unsigned y) {
    const int d = static_cast<std::int8_t>(x) - static_cast<std::int8_t>(y);
    return d < -128 ? -128 : d > 127 ? 127 : d;
  });
}
unsigned __vcmpeq4(unsigned a, unsigned b) {
  return bytewise(a, b, [](unsigned x, unsigned y) { return x == y ? 0xffu : 0u; });
}
unsigned __vcmpne4(unsigned a, unsigned b) {
  return bytewise(a, b, [](unsigned x, unsigned y) { return x != y ? 0xffu : 0u; });
}
