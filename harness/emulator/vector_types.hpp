// CUDA's vector types, dim3, and their make_ functions for the host compiler, with CUDA's sizes and alignments.
#pragma once

#include <type_traits>

// LADDER_EMU_WHOLE(name, bytes, ...): what makes a copy one access of that many bytes. g++ keeps a structure whole when
// told to (see cuda.hpp). clang would copy it member by member, so for clang copying goes through one integer or
// vector; the type is then no longer trivially copyable in the language's sense, but still a bag of bytes.
#if defined(__clang__)
namespace ladder::emu {
template <int Bytes>
struct Whole;
template <>
struct Whole<2> {
  typedef unsigned short type __attribute__((may_alias));
};
template <>
struct Whole<4> {
  typedef unsigned type __attribute__((may_alias));
};
template <>
struct Whole<8> {
  typedef unsigned long long type __attribute__((may_alias));
};
template <>
struct Whole<16> {
  typedef float type __attribute__((vector_size(16), may_alias));
};
}  // namespace ladder::emu
#define LADDER_EMU_WHOLE(name, bytes)                                                            \
  using ladder_emu_whole = ladder::emu::Whole<bytes>::type;                                      \
  name() = default;                                                                              \
  name(const name& o) {                                                                          \
    *reinterpret_cast<ladder_emu_whole*>(this) = *reinterpret_cast<const ladder_emu_whole*>(&o); \
  }                                                                                              \
  name& operator=(const name& o) {                                                               \
    *reinterpret_cast<ladder_emu_whole*>(this) = *reinterpret_cast<const ladder_emu_whole*>(&o); \
    return *this;                                                                                \
  }
#define LADDER_EMU_INIT(...) __VA_ARGS__
#else
#define LADDER_EMU_WHOLE(name, bytes)
#define LADDER_EMU_INIT(...)
#endif

namespace ladder::emu {
/// Types that can be moved about as bytes: what buffers and shuffles take.
template <class T>
inline constexpr bool kCopiesAsBytes = std::is_trivially_copyable_v<T> || requires {
  typename T::ladder_emu_whole;
};
}  // namespace ladder::emu

// One structure and one maker per (name, element, count); the alignment is what makes a 16-byte load possible.
#define LADDER_EMU_VEC1(name, T) \
  struct name {                  \
    T x;                         \
  };                             \
  static inline name make_##name(T x) { return name{x}; }
#define LADDER_EMU_VEC2(name, T, bytes)                      \
  struct alignas(bytes) name {                               \
    T x, y;                                                  \
    LADDER_EMU_WHOLE(name, bytes)                            \
    LADDER_EMU_INIT(constexpr name(T a, T b) : x(a), y(b){}) \
  };                                                         \
  static inline name make_##name(T x, T y) { return name{x, y}; }
#define LADDER_EMU_VEC3(name, T) \
  struct name {                  \
    T x, y, z;                   \
  };                             \
  static inline name make_##name(T x, T y, T z) { return name{x, y, z}; }
#define LADDER_EMU_VEC4(name, T, bytes)                                            \
  struct alignas(bytes) name {                                                     \
    T x, y, z, w;                                                                  \
    LADDER_EMU_WHOLE(name, bytes)                                                  \
    LADDER_EMU_INIT(constexpr name(T a, T b, T c, T d) : x(a), y(b), z(c), w(d){}) \
  };                                                                               \
  static inline name make_##name(T x, T y, T z, T w) { return name{x, y, z, w}; }

LADDER_EMU_VEC1(char1, signed char)
LADDER_EMU_VEC2(char2, signed char, 2)
LADDER_EMU_VEC3(char3, signed char)
LADDER_EMU_VEC4(char4, signed char, 4)
LADDER_EMU_VEC1(uchar1, unsigned char)
LADDER_EMU_VEC2(uchar2, unsigned char, 2)
LADDER_EMU_VEC3(uchar3, unsigned char)
LADDER_EMU_VEC4(uchar4, unsigned char, 4)
LADDER_EMU_VEC1(short1, short)
LADDER_EMU_VEC2(short2, short, 4)
LADDER_EMU_VEC3(short3, short)
LADDER_EMU_VEC4(short4, short, 8)
LADDER_EMU_VEC1(ushort1, unsigned short)
LADDER_EMU_VEC2(ushort2, unsigned short, 4)
LADDER_EMU_VEC3(ushort3, unsigned short)
LADDER_EMU_VEC4(ushort4, unsigned short, 8)
LADDER_EMU_VEC1(int1, int)
LADDER_EMU_VEC2(int2, int, 8)
LADDER_EMU_VEC3(int3, int)
LADDER_EMU_VEC4(int4, int, 16)
LADDER_EMU_VEC1(uint1, unsigned)
LADDER_EMU_VEC2(uint2, unsigned, 8)
LADDER_EMU_VEC3(uint3, unsigned)
LADDER_EMU_VEC4(uint4, unsigned, 16)
LADDER_EMU_VEC1(longlong1, long long)
LADDER_EMU_VEC2(longlong2, long long, 16)
LADDER_EMU_VEC1(ulonglong1, unsigned long long)
LADDER_EMU_VEC2(ulonglong2, unsigned long long, 16)
LADDER_EMU_VEC1(float1, float)
LADDER_EMU_VEC2(float2, float, 8)
LADDER_EMU_VEC3(float3, float)
LADDER_EMU_VEC4(float4, float, 16)
LADDER_EMU_VEC1(double1, double)
LADDER_EMU_VEC2(double2, double, 16)

#undef LADDER_EMU_VEC1
#undef LADDER_EMU_VEC2
#undef LADDER_EMU_VEC3
#undef LADDER_EMU_VEC4

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned vx = 1, unsigned vy = 1, unsigned vz = 1) : x(vx), y(vy), z(vz) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return uint3{x, y, z}; }
};
