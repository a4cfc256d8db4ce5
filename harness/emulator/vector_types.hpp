// CUDA's vector types, dim3, and their make_ functions for the host compiler, with CUDA's sizes and alignments.
#pragma once

// One structure and one maker per (name, element, count); the alignment is what makes a 16-byte load possible.
#define LADDER_EMU_VEC1(name, T) \
  struct name {                  \
    T x;                         \
  };                             \
  static inline name make_##name(T x) { return name{x}; }
#define LADDER_EMU_VEC2(name, T, bytes) \
  struct alignas(bytes) name {          \
    T x, y;                             \
  };                                    \
  static inline name make_##name(T x, T y) { return name{x, y}; }
#define LADDER_EMU_VEC3(name, T) \
  struct name {                  \
    T x, y, z;                   \
  };                             \
  static inline name make_##name(T x, T y, T z) { return name{x, y, z}; }
#define LADDER_EMU_VEC4(name, T, bytes) \
  struct alignas(bytes) name {          \
    T x, y, z, w;                       \
  };                                    \
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
