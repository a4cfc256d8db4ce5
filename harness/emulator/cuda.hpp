// CUDA's names for the host compiler. Kernel code sees nothing but CUDA; what it calls lands in the emulator.
//
// A translation unit that includes this is compiled as C++20 with
//
//   g++      -O1 -g -fsanitize=thread -fsanitize-coverage=trace-pc -fno-tree-sra -fno-thread-jumps
//            -fno-reorder-blocks -ffp-contract=off -Wno-unknown-pragmas
//   clang++  -O1 -g -fsanitize=thread -fsanitize-coverage=trace-pc,no-prune -mllvm -disable-vector-combine
//            -mllvm -tsan-instrument-read-before-write=1 -ffp-contract=off -Wno-unknown-pragmas
//
// and linked, without -fsanitize, with the emulator's library, Boost.Context and -rdynamic. Why each flag:
//   -fsanitize=thread     the compiler calls __tsan_read4(address) and its like before every access that can
//                         be seen outside the function. The emulator defines those calls; the sanitizer's own
//                         runtime is never linked.
//   trace-pc              one call per basic block: how branches are seen. Optional; without it divergence is
//                         not counted and lanes are lined up by their accesses alone.
//   -O1, not -O2          no loop unrolling or vectorising, so one access in the source is one instruction; not
//                         -O0, whose reloads of every local from memory no GPU compiler would emit.
//   -fno-tree-sra         keeps a structure whole: `float4 v = *p` is one access of 16 bytes, not four of 4. For
//                         clang the vector types copy themselves as one 16-byte value, and vector-combine,
//                         which would split that again, is off.
//   -fno-thread-jumps     jump threading and block reordering would copy a barrier, a load or a store into both
//   -fno-reorder-blocks   arms of a branch, two instructions where a GPU has one, and put code out of its order.
//   read-before-write     clang drops the read of `a[i] += x` unless told not to.
//   memcpy                clang before 15 calls plain memcpy for the copy of a structure that is no vector type: such
//                         a copy is executed but not seen. Every other access is.
//   -ffp-contract=off     results do not depend on the host's FMA.
//
// Copies that live in registers or on the stack of a kernel thread are not memory traffic: the compiler leaves
// most of them out, and the emulator ignores the rest by address.
#pragma once

#if defined(__CUDACC__)
#error "harness/emulator/cuda.hpp is for the host compiler; kernel files include kernels/device/cuda.cuh"
#endif

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "harness/emulator/half.hpp"
#include "harness/emulator/vector_types.hpp"

#define __global__ inline  // so that kernels which are no templates may be in several sources of a program
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// __noinline__ is left out: as a macro it breaks the standard library, which spells an attribute that way. Both
// compilers know [[gnu::noinline]].
//
// One block runs on one OS thread at a time, so a thread's storage is a block's. `used`: the emulator writes to it
// too, so the compiler must not conclude from the kernel alone which values it can have.
#define __shared__ static thread_local __attribute__((used))

// clang would merge the barriers of two arms of a branch into one behind it, and so hide a mistake.
#if defined(__clang__)
#define LADDER_EMU_MEETING __attribute__((nomerge, convergent))
#else
#define LADDER_EMU_MEETING
#endif

namespace ladder::emu {

enum class Shuffle : int { index, up, down, exclusive_or };
enum class Vote : int { ballot, any, all };
enum class Reduce : int { add, min, max, bit_and, bit_or, bit_xor };
enum class BarrierOp : int { plain, count, conjunction, disjunction };

// `const`: within one kernel thread the answer never changes, so a call may be hoisted out of a loop.
[[gnu::const]] uint3 thread_index() noexcept;
[[gnu::const]] uint3 block_index() noexcept;
[[gnu::const]] dim3 block_dim() noexcept;
[[gnu::const]] dim3 grid_dim() noexcept;
[[gnu::const]] void* dynamic_shared_bytes() noexcept;

LADDER_EMU_MEETING int barrier(BarrierOp op, int predicate);
LADDER_EMU_MEETING void warp_barrier(unsigned mask);
LADDER_EMU_MEETING std::uint64_t warp_shuffle(Shuffle op, unsigned mask, std::uint64_t value, int argument,
                                              int width);
LADDER_EMU_MEETING unsigned warp_vote(Vote op, unsigned mask, int predicate);
LADDER_EMU_MEETING unsigned warp_match_any(unsigned mask, std::uint64_t value);
LADDER_EMU_MEETING unsigned warp_match_all(unsigned mask, std::uint64_t value, int* predicate);
LADDER_EMU_MEETING unsigned warp_reduce(Reduce op, bool is_signed, unsigned mask, unsigned value);
LADDER_EMU_MEETING unsigned active_mask();
void fence(int scope);
[[noreturn]] void trap();
[[noreturn]] void fail(const char* message);

/// Instructions that the workbook speaks of by name: once for each thread, those of a whole warp once for the warp.
/// Device functions report themselves (`count`). `a * b + c` is no such function: only __fmaf_rn counts as an FMA.
enum class Instruction : int {
  fma_f32,
  fma_f16x2,
  dp4a,
  mma_f16,
  mma_s8,
  cp_async,
  special,
  ldmatrix,
  bulk_copy
};
inline constexpr int kInstructions = 9;
/// Counts `n` such instructions of the calling thread, when counting is on, at the line of the call.
void count(Instruction which, int n = 1);

/// A tensor-core or other warp-wide instruction with operands in all lanes: gives every lane of the warp the operands of
/// all 32, `bytes` each, in `all`. One meeting of the lanes, counted as one `which`.
LADDER_EMU_MEETING void warp_gather(const void* mine, void* all, std::size_t bytes, Instruction which);

template <class T>
concept WarpValue = kCopiesAsBytes<T> &&(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8);

template <WarpValue T>
__forceinline__ std::uint64_t to_bits(const T& v) {
  std::uint64_t bits = 0;
  __builtin_memcpy(&bits, &v, sizeof v);
  return bits;
}

template <WarpValue T>
__forceinline__ T from_bits(std::uint64_t bits) {
  T v;
  __builtin_memcpy(static_cast<void*>(&v), &bits, sizeof v);
  return v;
}

}  // namespace ladder::emu

#define threadIdx (::ladder::emu::thread_index())
#define blockIdx (::ladder::emu::block_index())
#define blockDim (::ladder::emu::block_dim())
#define gridDim (::ladder::emu::grid_dim())
inline constexpr int warpSize = 32;

// Barriers and fences.
__forceinline__ void __syncthreads() { ladder::emu::barrier(ladder::emu::BarrierOp::plain, 0); }
__forceinline__ int __syncthreads_count(int p) {
  return ladder::emu::barrier(ladder::emu::BarrierOp::count, p);
}
__forceinline__ int __syncthreads_and(int p) {
  return ladder::emu::barrier(ladder::emu::BarrierOp::conjunction, p);
}
__forceinline__ int __syncthreads_or(int p) {
  return ladder::emu::barrier(ladder::emu::BarrierOp::disjunction, p);
}
__forceinline__ void __syncwarp(unsigned mask = 0xffffffffu) { ladder::emu::warp_barrier(mask); }
__forceinline__ void __threadfence() { ladder::emu::fence(1); }
__forceinline__ void __threadfence_block() { ladder::emu::fence(0); }
__forceinline__ void __threadfence_system() { ladder::emu::fence(2); }
[[noreturn]] __forceinline__ void __trap() { ladder::emu::trap(); }
__forceinline__ void __nanosleep(unsigned) {}
// Launches in one stream never overlap here, so a dependent launch has nothing to wait for.
__forceinline__ void cudaGridDependencySynchronize() {}
__forceinline__ void cudaTriggerProgrammaticLaunchCompletion() {}

// Warp collectives.
template <ladder::emu::WarpValue T>
__forceinline__ T __shfl_sync(unsigned mask, T v, int source, int width = 32) {
  return ladder::emu::from_bits<T>(
      ladder::emu::warp_shuffle(ladder::emu::Shuffle::index, mask, ladder::emu::to_bits(v), source, width));
}
template <ladder::emu::WarpValue T>
__forceinline__ T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32) {
  return ladder::emu::from_bits<T>(ladder::emu::warp_shuffle(
      ladder::emu::Shuffle::up, mask, ladder::emu::to_bits(v), static_cast<int>(delta), width));
}
template <ladder::emu::WarpValue T>
__forceinline__ T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32) {
  return ladder::emu::from_bits<T>(ladder::emu::warp_shuffle(
      ladder::emu::Shuffle::down, mask, ladder::emu::to_bits(v), static_cast<int>(delta), width));
}
template <ladder::emu::WarpValue T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T v, int lane_mask, int width = 32) {
  return ladder::emu::from_bits<T>(ladder::emu::warp_shuffle(ladder::emu::Shuffle::exclusive_or, mask,
                                                             ladder::emu::to_bits(v), lane_mask, width));
}
__forceinline__ unsigned __ballot_sync(unsigned mask, int p) {
  return ladder::emu::warp_vote(ladder::emu::Vote::ballot, mask, p);
}
__forceinline__ int __any_sync(unsigned mask, int p) {
  return static_cast<int>(ladder::emu::warp_vote(ladder::emu::Vote::any, mask, p));
}
__forceinline__ int __all_sync(unsigned mask, int p) {
  return static_cast<int>(ladder::emu::warp_vote(ladder::emu::Vote::all, mask, p));
}
__forceinline__ unsigned __activemask() { return ladder::emu::active_mask(); }
template <ladder::emu::WarpValue T>
__forceinline__ unsigned __match_any_sync(unsigned mask, T v) {
  return ladder::emu::warp_match_any(mask, ladder::emu::to_bits(v));
}
template <ladder::emu::WarpValue T>
__forceinline__ unsigned __match_all_sync(unsigned mask, T v, int* predicate) {
  return ladder::emu::warp_match_all(mask, ladder::emu::to_bits(v), predicate);
}
#define LADDER_EMU_REDUCE(name, op)                                                               \
  __forceinline__ unsigned name(unsigned mask, unsigned v) {                                      \
    return ladder::emu::warp_reduce(ladder::emu::Reduce::op, false, mask, v);                     \
  }                                                                                               \
  __forceinline__ int name(unsigned mask, int v) {                                                \
    return static_cast<int>(                                                                      \
        ladder::emu::warp_reduce(ladder::emu::Reduce::op, true, mask, static_cast<unsigned>(v))); \
  }
LADDER_EMU_REDUCE(__reduce_add_sync, add)
LADDER_EMU_REDUCE(__reduce_min_sync, min)
LADDER_EMU_REDUCE(__reduce_max_sync, max)
#undef LADDER_EMU_REDUCE
__forceinline__ unsigned __reduce_and_sync(unsigned mask, unsigned v) {
  return ladder::emu::warp_reduce(ladder::emu::Reduce::bit_and, false, mask, v);
}
__forceinline__ unsigned __reduce_or_sync(unsigned mask, unsigned v) {
  return ladder::emu::warp_reduce(ladder::emu::Reduce::bit_or, false, mask, v);
}
__forceinline__ unsigned __reduce_xor_sync(unsigned mask, unsigned v) {
  return ladder::emu::warp_reduce(ladder::emu::Reduce::bit_xor, false, mask, v);
}

// Atomics: on global memory they are atomic between blocks, on shared memory within the block. All return the
// old value.
int atomicAdd(int* p, int v);
unsigned atomicAdd(unsigned* p, unsigned v);
unsigned long long atomicAdd(unsigned long long* p, unsigned long long v);
float atomicAdd(float* p, float v);
double atomicAdd(double* p, double v);
int atomicSub(int* p, int v);
unsigned atomicSub(unsigned* p, unsigned v);
int atomicMax(int* p, int v);
unsigned atomicMax(unsigned* p, unsigned v);
long long atomicMax(long long* p, long long v);
unsigned long long atomicMax(unsigned long long* p, unsigned long long v);
int atomicMin(int* p, int v);
unsigned atomicMin(unsigned* p, unsigned v);
long long atomicMin(long long* p, long long v);
unsigned long long atomicMin(unsigned long long* p, unsigned long long v);
unsigned atomicInc(unsigned* p, unsigned limit);
unsigned atomicDec(unsigned* p, unsigned limit);
int atomicExch(int* p, int v);
unsigned atomicExch(unsigned* p, unsigned v);
unsigned long long atomicExch(unsigned long long* p, unsigned long long v);
float atomicExch(float* p, float v);
int atomicCAS(int* p, int expected, int v);
unsigned atomicCAS(unsigned* p, unsigned expected, unsigned v);
unsigned long long atomicCAS(unsigned long long* p, unsigned long long expected, unsigned long long v);
int atomicOr(int* p, int v);
unsigned atomicOr(unsigned* p, unsigned v);
unsigned long long atomicOr(unsigned long long* p, unsigned long long v);
int atomicAnd(int* p, int v);
unsigned atomicAnd(unsigned* p, unsigned v);
unsigned long long atomicAnd(unsigned long long* p, unsigned long long v);
int atomicXor(int* p, int v);
unsigned atomicXor(unsigned* p, unsigned v);
unsigned long long atomicXor(unsigned long long* p, unsigned long long v);

// Loads and stores with a cache hint. The hint has no meaning here; the access counts as an ordinary one.
#define LADDER_EMU_LOAD(name)          \
  template <class T>                   \
  __forceinline__ T name(const T* p) { \
    return *p;                         \
  }
#define LADDER_EMU_STORE(name)           \
  template <class T>                     \
  __forceinline__ void name(T* p, T v) { \
    *p = v;                              \
  }
LADDER_EMU_LOAD(__ldg)
LADDER_EMU_LOAD(__ldca)
LADDER_EMU_LOAD(__ldcs)
LADDER_EMU_LOAD(__ldcg)
LADDER_EMU_LOAD(__ldlu)
LADDER_EMU_LOAD(__ldcv)
LADDER_EMU_STORE(__stcs)
LADDER_EMU_STORE(__stcg)
LADDER_EMU_STORE(__stwb)
LADDER_EMU_STORE(__stwt)
#undef LADDER_EMU_LOAD
#undef LADDER_EMU_STORE

// Integer instructions.
int __dp4a(int a, int b, int c);
unsigned __dp4a(unsigned a, unsigned b, unsigned c);
int __dp4a(char4 a, char4 b, int c);
unsigned __dp4a(uchar4 a, uchar4 b, unsigned c);
unsigned __byte_perm(unsigned x, unsigned y, unsigned selector);
unsigned __vadd4(unsigned a, unsigned b);
unsigned __vsub4(unsigned a, unsigned b);
unsigned __vsubss4(unsigned a, unsigned b);
unsigned __vcmpeq4(unsigned a, unsigned b);
unsigned __vcmpne4(unsigned a, unsigned b);
inline int __popc(unsigned v) { return std::popcount(v); }
inline int __popcll(unsigned long long v) { return std::popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return std::countl_zero(static_cast<unsigned>(v)); }
inline int __clzll(long long v) { return std::countl_zero(static_cast<unsigned long long>(v)); }
inline unsigned __brev(unsigned v) {
  v = ((v >> 1) & 0x55555555u) | ((v & 0x55555555u) << 1);
  v = ((v >> 2) & 0x33333333u) | ((v & 0x33333333u) << 2);
  v = ((v >> 4) & 0x0f0f0f0fu) | ((v & 0x0f0f0f0fu) << 4);
  return __builtin_bswap32(v);
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) {
  return static_cast<unsigned>((((static_cast<unsigned long long>(hi) << 32) | lo) << (s & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) {
  return static_cast<unsigned>(((static_cast<unsigned long long>(hi) << 32) | lo) >> (s & 31));
}
inline unsigned __funnelshift_lc(unsigned lo, unsigned hi, unsigned s) {
  return s >= 32 ? lo : __funnelshift_l(lo, hi, s);
}
inline unsigned __funnelshift_rc(unsigned lo, unsigned hi, unsigned s) {
  return s >= 32 ? hi : __funnelshift_r(lo, hi, s);
}
inline int __mulhi(int a, int b) { return static_cast<int>((static_cast<long long>(a) * b) >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
}
inline unsigned __sad(int a, int b, unsigned c) {
  const long long d = static_cast<long long>(a) - b;
  return c + static_cast<unsigned>(d < 0 ? -d : d);
}

// Bit casts.
inline unsigned __float_as_uint(float f) { return std::bit_cast<unsigned>(f); }
inline int __float_as_int(float f) { return std::bit_cast<int>(f); }
inline float __uint_as_float(unsigned u) { return std::bit_cast<float>(u); }
inline float __int_as_float(int i) { return std::bit_cast<float>(i); }
inline long long __double_as_longlong(double d) { return std::bit_cast<long long>(d); }
inline double __longlong_as_double(long long i) { return std::bit_cast<double>(i); }

// Conversions: rn nearest-even, rz toward zero, ru up, rd down; saturating, and NaN gives 0, as on the GPU.
namespace ladder::emu {
template <class I>
inline I saturate_to(double d) {
  constexpr double lo = static_cast<double>(std::is_signed_v<I> ? -0x80000000LL : 0LL);
  constexpr double hi = static_cast<double>(std::is_signed_v<I> ? 0x7fffffffLL : 0xffffffffLL);
  if (!(d == d)) return 0;
  return static_cast<I>(d < lo ? lo : d > hi ? hi : d);
}
}  // namespace ladder::emu
inline int __float2int_rn(float f) { return ladder::emu::saturate_to<int>(std::nearbyint(f)); }
inline int __float2int_rz(float f) { return ladder::emu::saturate_to<int>(std::trunc(f)); }
inline int __float2int_ru(float f) { return ladder::emu::saturate_to<int>(std::ceil(f)); }
inline int __float2int_rd(float f) { return ladder::emu::saturate_to<int>(std::floor(f)); }
inline unsigned __float2uint_rn(float f) { return ladder::emu::saturate_to<unsigned>(std::nearbyint(f)); }
inline unsigned __float2uint_rz(float f) { return ladder::emu::saturate_to<unsigned>(std::trunc(f)); }
inline float __int2float_rn(int i) { return static_cast<float>(i); }
inline float __uint2float_rn(unsigned i) { return static_cast<float>(i); }
inline float __ll2float_rn(long long i) { return static_cast<float>(i); }
inline float __double2float_rn(double d) { return static_cast<float>(d); }
inline int __double2int_rn(double d) { return ladder::emu::saturate_to<int>(std::nearbyint(d)); }

// Arithmetic with a named rounding. `__expf` and its like are approximate on the GPU; here they are the host's
// own functions, which lie within the documented error of the GPU's.
inline float __fmaf_rn(float a, float b, float c) {
  ladder::emu::count(ladder::emu::Instruction::fma_f32);
  return std::fma(a, b, c);
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frsqrt_rn(float a) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))); }
inline float rsqrtf(float a) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))); }
inline double rsqrt(double a) { return 1.0 / std::sqrt(a); }
inline float __expf(float a) { return std::exp(a); }
inline float __exp10f(float a) { return std::pow(10.0f, a); }
inline float __logf(float a) { return std::log(a); }
inline float __log2f(float a) { return std::log2(a); }
inline float __log10f(float a) { return std::log10(a); }
inline float __powf(float a, float b) { return std::pow(a, b); }
inline float __sinf(float a) { return std::sin(a); }
inline float __cosf(float a) { return std::cos(a); }
inline float __tanf(float a) { return std::tan(a); }
inline void __sincosf(float a, float* s, float* c) {
  *s = std::sin(a);
  *c = std::cos(a);
}
inline float __saturatef(float a) { return a >= 1.0f ? 1.0f : a > 0.0f ? a : 0.0f; }

// min and max as CUDA overloads them; for floating point a NaN loses against a number.
#define LADDER_EMU_MINMAX(T)                          \
  constexpr T min(T a, T b) { return b < a ? b : a; } \
  constexpr T max(T a, T b) { return a < b ? b : a; }
LADDER_EMU_MINMAX(int)
LADDER_EMU_MINMAX(unsigned)
LADDER_EMU_MINMAX(long)
LADDER_EMU_MINMAX(unsigned long)
LADDER_EMU_MINMAX(long long)
LADDER_EMU_MINMAX(unsigned long long)
#undef LADDER_EMU_MINMAX
#define LADDER_EMU_MINMAX_MIXED(S, U)                             \
  constexpr U min(S a, U b) { return min(static_cast<U>(a), b); } \
  constexpr U min(U a, S b) { return min(a, static_cast<U>(b)); } \
  constexpr U max(S a, U b) { return max(static_cast<U>(a), b); } \
  constexpr U max(U a, S b) { return max(a, static_cast<U>(b)); }
LADDER_EMU_MINMAX_MIXED(int, unsigned)
LADDER_EMU_MINMAX_MIXED(long, unsigned long)
LADDER_EMU_MINMAX_MIXED(long long, unsigned long long)
#undef LADDER_EMU_MINMAX_MIXED
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }
inline double min(float a, double b) { return std::fmin(static_cast<double>(a), b); }
inline double min(double a, float b) { return std::fmin(a, static_cast<double>(b)); }
inline double max(float a, double b) { return std::fmax(static_cast<double>(a), b); }
inline double max(double a, float b) { return std::fmax(a, static_cast<double>(b)); }
