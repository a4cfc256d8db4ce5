// __half, __half2, __nv_bfloat16, __nv_bfloat162 and their usual intrinsics for the host compiler. Every
// conversion rounds to nearest, ties to even, unless its name says otherwise; results are bit-exact with CUDA's
// for finite values and infinities, and any NaN becomes a quiet NaN.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "harness/device/half_bits.hpp"
#include "harness/emulator/vector_types.hpp"

namespace ladder::emu {

using ladder::float_to_half_bits;
using ladder::half_bits_to_float;

/// f64 -> f16 bits with a single rounding. Going through f32 is safe once f32 was rounded *to odd*: it keeps
/// two more bits than f16's eleven, so the second rounding cannot see a false tie.
constexpr std::uint16_t double_to_half_bits(double d) {
  float f = static_cast<float>(d);
  const double back = f;
  if (back != d && d == d) {
    std::uint32_t bits = std::bit_cast<std::uint32_t>(f);
    const bool infinite = (bits & 0x7fffffffu) == 0x7f800000u;
    if ((bits & 1u) == 0 && !infinite) {
      const bool away = (d < 0 ? -d : d) > (back < 0 ? -back : back);
      bits = away ? bits + 1 : bits - 1;
      f = std::bit_cast<float>(bits);
    }
  }
  return float_to_half_bits(f);
}

constexpr float bfloat_bits_to_float(std::uint16_t b) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(b) << 16);
}

constexpr std::uint16_t float_to_bfloat_bits(float f) {
  const std::uint32_t x = std::bit_cast<std::uint32_t>(f);
  if ((x & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;  // NaN: CUDA's canonical one
  return static_cast<std::uint16_t>((x + 0x7fffu + ((x >> 16) & 1u)) >> 16);
}

/// a*b + c in f64, rounded to odd where it is inexact, so that a following rounding to f16 or bf16 is the only
/// one. The product of two f16 or bf16 values is exact in f64.
inline double fused_to_odd(double a, double b, double c) {
  const double p = a * b, s = p + c;
  if (!std::isfinite(s)) return s;
  const double t = s - p, error = (p - (s - t)) + (c - t);  // Knuth's exact sum error
  auto bits = std::bit_cast<std::uint64_t>(s);
  if (error == 0.0 || (bits & 1u) != 0) return s;
  return std::bit_cast<double>((error > 0) == (s > 0) ? bits + 1 : bits - 1);
}

}  // namespace ladder::emu

struct __half_raw {
  unsigned short x;
};

struct alignas(2) __half {
  unsigned short bits_;

  __half() = default;
  constexpr __half(const __half_raw& r) : bits_(r.x) {}
  constexpr __half(float f) : bits_(ladder::emu::float_to_half_bits(f)) {}
  constexpr __half(double d) : bits_(ladder::emu::double_to_half_bits(d)) {}
  constexpr __half(int i) : bits_(ladder::emu::double_to_half_bits(i)) {}
  constexpr __half(unsigned i) : bits_(ladder::emu::double_to_half_bits(i)) {}
  constexpr operator float() const { return ladder::emu::half_bits_to_float(bits_); }
  constexpr operator __half_raw() const { return __half_raw{bits_}; }
};
using half = __half;

struct alignas(4) __half2 {
  __half x, y;
#if defined(__clang__)
  LADDER_EMU_WHOLE(__half2, 4)
#else
  __half2() = default;
#endif
  constexpr __half2(__half a, __half b) : x(a), y(b) {}
};
using half2 = __half2;

struct __nv_bfloat16_raw {
  unsigned short x;
};

struct alignas(2) __nv_bfloat16 {
  unsigned short bits_;

  __nv_bfloat16() = default;
  constexpr __nv_bfloat16(const __nv_bfloat16_raw& r) : bits_(r.x) {}
  constexpr __nv_bfloat16(float f) : bits_(ladder::emu::float_to_bfloat_bits(f)) {}
  constexpr operator float() const { return ladder::emu::bfloat_bits_to_float(bits_); }
  constexpr operator __nv_bfloat16_raw() const { return __nv_bfloat16_raw{bits_}; }
};
using nv_bfloat16 = __nv_bfloat16;

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
#if defined(__clang__)
  LADDER_EMU_WHOLE(__nv_bfloat162, 4)
#else
  __nv_bfloat162() = default;
#endif
  constexpr __nv_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) : x(a), y(b) {}
};
using nv_bfloat162 = __nv_bfloat162;

static_assert(sizeof(__half) == 2 && sizeof(__half2) == 4);
static_assert(sizeof(__nv_bfloat16) == 2 && sizeof(__nv_bfloat162) == 4);

// Bit casts.
inline __half __ushort_as_half(unsigned short b) { return __half(__half_raw{b}); }
inline __half __short_as_half(short b) { return __half(__half_raw{static_cast<unsigned short>(b)}); }
inline unsigned short __half_as_ushort(__half h) { return h.bits_; }
inline short __half_as_short(__half h) { return static_cast<short>(h.bits_); }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short b) { return __nv_bfloat16(__nv_bfloat16_raw{b}); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.bits_; }

// f16 <-> f32, f64 and integers.
inline __half __float2half(float f) { return __half(f); }
inline __half __float2half_rn(float f) { return __half(f); }
inline __half __double2half(double d) { return __half(d); }
inline __half __int2half_rn(int i) { return __half(i); }
inline __half __uint2half_rn(unsigned i) { return __half(i); }
inline __half __short2half_rn(short i) { return __half(static_cast<int>(i)); }
inline __half __ushort2half_rn(unsigned short i) { return __half(static_cast<int>(i)); }
inline float __half2float(__half h) { return static_cast<float>(h); }
inline int __half2int_rn(__half h) { return static_cast<int>(std::nearbyint(static_cast<float>(h))); }
inline int __half2int_rz(__half h) { return static_cast<int>(static_cast<float>(h)); }
inline __half2 __floats2half2_rn(float a, float b) { return __half2(__half(a), __half(b)); }
inline __half2 __float2half2_rn(float a) { return __half2(__half(a), __half(a)); }
inline __half2 __half2half2(__half a) { return __half2(a, a); }
inline __half2 __halves2half2(__half a, __half b) { return __half2(a, b); }
inline __half2 make_half2(__half a, __half b) { return __half2(a, b); }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline float __low2float(__half2 v) { return static_cast<float>(v.x); }
inline float __high2float(__half2 v) { return static_cast<float>(v.y); }
inline __half2 __low2half2(__half2 v) { return __half2(v.x, v.x); }
inline __half2 __high2half2(__half2 v) { return __half2(v.y, v.y); }
inline __half2 __lowhigh2highlow(__half2 v) { return __half2(v.y, v.x); }
inline __half2 __float22half2_rn(float2 v) { return __half2(__half(v.x), __half(v.y)); }
inline float2 __half22float2(__half2 v) { return float2{static_cast<float>(v.x), static_cast<float>(v.y)}; }

// f16 arithmetic. f32 has more than twice f16's bits plus two, so a single operation done in f32 and then
// rounded to f16 equals one rounding; only the fused operation needs more.
inline __half __hadd(__half a, __half b) { return __half(static_cast<float>(a) + static_cast<float>(b)); }
inline __half __hsub(__half a, __half b) { return __half(static_cast<float>(a) - static_cast<float>(b)); }
inline __half __hmul(__half a, __half b) { return __half(static_cast<float>(a) * static_cast<float>(b)); }
inline __half __hdiv(__half a, __half b) { return __half(static_cast<float>(a) / static_cast<float>(b)); }
inline __half __hfma(__half a, __half b, __half c) {
  return __half(
      ladder::emu::fused_to_odd(static_cast<float>(a), static_cast<float>(b), static_cast<float>(c)));
}
inline __half __hneg(__half a) { return __ushort_as_half(static_cast<unsigned short>(a.bits_ ^ 0x8000u)); }
inline __half __habs(__half a) { return __ushort_as_half(static_cast<unsigned short>(a.bits_ & 0x7fffu)); }
inline bool __hisnan(__half a) { return (a.bits_ & 0x7fffu) > 0x7c00u; }
inline int __hisinf(__half a) { return (a.bits_ & 0x7fffu) == 0x7c00u ? ((a.bits_ & 0x8000u) ? -1 : 1) : 0; }
inline bool __heq(__half a, __half b) { return static_cast<float>(a) == static_cast<float>(b); }
inline bool __hne(__half a, __half b) { return !__hisnan(a) && !__hisnan(b) && !__heq(a, b); }
inline bool __hlt(__half a, __half b) { return static_cast<float>(a) < static_cast<float>(b); }
inline bool __hle(__half a, __half b) { return static_cast<float>(a) <= static_cast<float>(b); }
inline bool __hgt(__half a, __half b) { return static_cast<float>(a) > static_cast<float>(b); }
inline bool __hge(__half a, __half b) { return static_cast<float>(a) >= static_cast<float>(b); }
inline __half __hmax(__half a, __half b) {
  return __half(std::fmax(static_cast<float>(a), static_cast<float>(b)));
}
inline __half __hmin(__half a, __half b) {
  return __half(std::fmin(static_cast<float>(a), static_cast<float>(b)));
}
inline __half hsqrt(__half a) { return __half(std::sqrt(static_cast<float>(a))); }
inline __half hexp(__half a) { return __half(std::exp(static_cast<double>(static_cast<float>(a)))); }
inline __half hrcp(__half a) { return __half(1.0f / static_cast<float>(a)); }

inline __half2 __hadd2(__half2 a, __half2 b) { return __half2(__hadd(a.x, b.x), __hadd(a.y, b.y)); }
inline __half2 __hsub2(__half2 a, __half2 b) { return __half2(__hsub(a.x, b.x), __hsub(a.y, b.y)); }
inline __half2 __hmul2(__half2 a, __half2 b) { return __half2(__hmul(a.x, b.x), __hmul(a.y, b.y)); }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __half2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
inline __half2 __hneg2(__half2 a) { return __half2(__hneg(a.x), __hneg(a.y)); }
inline __half2 __habs2(__half2 a) { return __half2(__habs(a.x), __habs(a.y)); }
inline __half2 __hmax2(__half2 a, __half2 b) { return __half2(__hmax(a.x, b.x), __hmax(a.y, b.y)); }
inline __half2 __hmin2(__half2 a, __half2 b) { return __half2(__hmin(a.x, b.x), __hmin(a.y, b.y)); }

inline __half operator+(__half a, __half b) { return __hadd(a, b); }
inline __half operator-(__half a, __half b) { return __hsub(a, b); }
inline __half operator*(__half a, __half b) { return __hmul(a, b); }
inline __half operator/(__half a, __half b) { return __hdiv(a, b); }
inline __half operator-(__half a) { return __hneg(a); }
inline __half& operator+=(__half& a, __half b) { return a = __hadd(a, b); }
inline __half& operator-=(__half& a, __half b) { return a = __hsub(a, b); }
inline __half& operator*=(__half& a, __half b) { return a = __hmul(a, b); }
inline bool operator==(__half a, __half b) { return __heq(a, b); }
inline bool operator<(__half a, __half b) { return __hlt(a, b); }
inline bool operator>(__half a, __half b) { return __hgt(a, b); }
inline bool operator<=(__half a, __half b) { return __hle(a, b); }
inline bool operator>=(__half a, __half b) { return __hge(a, b); }
inline __half2 operator+(__half2 a, __half2 b) { return __hadd2(a, b); }
inline __half2 operator-(__half2 a, __half2 b) { return __hsub2(a, b); }
inline __half2 operator*(__half2 a, __half2 b) { return __hmul2(a, b); }

// bf16.
inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
inline float __bfloat162float(__nv_bfloat16 h) { return static_cast<float>(h); }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return __nv_bfloat162(__nv_bfloat16(a), __nv_bfloat16(b));
}
inline __nv_bfloat162 __float2bfloat162_rn(float a) { return __floats2bfloat162_rn(a, a); }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat162(a, b); }
inline float __low2float(__nv_bfloat162 v) { return static_cast<float>(v.x); }
inline float __high2float(__nv_bfloat162 v) { return static_cast<float>(v.y); }
inline float2 __bfloat1622float2(__nv_bfloat162 v) {
  return float2{static_cast<float>(v.x), static_cast<float>(v.y)};
}
inline __nv_bfloat16 __hadd(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __nv_bfloat16(static_cast<float>(a) + static_cast<float>(b));
}
inline __nv_bfloat16 __hsub(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __nv_bfloat16(static_cast<float>(a) - static_cast<float>(b));
}
inline __nv_bfloat16 __hmul(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __nv_bfloat16(static_cast<float>(a) * static_cast<float>(b));
}
inline __nv_bfloat16 operator+(__nv_bfloat16 a, __nv_bfloat16 b) { return __hadd(a, b); }
inline __nv_bfloat16 operator-(__nv_bfloat16 a, __nv_bfloat16 b) { return __hsub(a, b); }
inline __nv_bfloat16 operator*(__nv_bfloat16 a, __nv_bfloat16 b) { return __hmul(a, b); }
