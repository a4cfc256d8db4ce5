// wmma: CUDA C++'s own tensor-core interface, as `ladder::wmma` in both builds. On the GPU it is
// nvcuda::wmma.
//
// SHAPE   D[16][16] (f32) = A[16][16] . B[16][16] (f16) + C[16][16] (f32)
// LAYOUT  NVIDIA does not document which lane holds which element of a wmma fragment, and it differs from GPU
//         to GPU: portable code uses load, store, mma, fill, and the same operation on every x[i]. The
//         emulator chose the layout of two mma m16n8k16 side by side (mma.cuh). With group = lane / 4 and
//         member = lane % 4:
//           A  x[i]  row group + 8 * (i / 2 % 2), k = 2 * member + i % 2 + 8 * (i / 4)
//           B  x[i]  k = 2 * member + i % 2 + 8 * (i / 2 % 2), column group + 8 * (i / 4)
//           D  x[i]  row group + 8 * (i / 2 % 2), column 2 * member + i % 2 + 8 * (i / 4)
//         so fragments have 8 elements; on GPUs those of A and B have 16, some of them copies.
// COUNTS  on the emulator a load or store counts as this layout makes it: a pair that is contiguous in memory
//         is one access (4 bytes for halves, 8 for floats), otherwise each element is one. An mma_sync is two
//         mma_f16.
// ERRORS  lanes that do not all get to mma_sync; a pointer that is not a multiple of 32 bytes, or a leading
//         dimension that is not a multiple of 8 halves or 4 floats: undefined on the GPU, an error of the
//         launch on the emulator.
// SOURCE  CUDA C++ Programming Guide, "Warp Matrix Functions". Needs sm_70.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/device/cuda.cuh"
#include "kernels/device/mma.cuh"

#if defined(__CUDACC__)
#include <mma.h>
#else

namespace nvcuda::wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment;

namespace detail {

/// The elements of one lane.
template <class T>
struct Elements {
  using element_type = T;
  static constexpr int num_elements = 8;
  T x[num_elements];
};

/// Two contiguous elements as one word, so that every compiler moves them by one access.
template <class T>
struct PairOf;
template <>
struct PairOf<half> {
  typedef std::uint32_t __attribute__((may_alias)) Word;
};
template <>
struct PairOf<float> {
  typedef std::uint64_t __attribute__((may_alias)) Word;
};

/// Calls f(0), f(1), ... f(N - 1), with no loop that would count as the kernel's own.
template <int... I, class F>
__forceinline__ void each(std::integer_sequence<int, I...>, F f) {
  (f(std::integral_constant<int, I>{}), ...);
}

[[gnu::noinline]] inline void check(const void* p, unsigned leading, unsigned multiple) {
  if (reinterpret_cast<std::uintptr_t>(p) % 32 != 0) {
    ladder::emu::fail("wmma: the address of a matrix must be a multiple of 32 bytes");
  }
  if (leading % multiple != 0) {
    ladder::emu::fail("wmma: the leading dimension must be a multiple of 16 bytes");
  }
}

/// @param near distance in memory between the two elements of the pair: 1, or the leading dimension
template <class T>
__forceinline__ void move_pair(T* to, const T* from, std::size_t near) {
  if (near == 1) {
    const typename PairOf<T>::Word pair = *reinterpret_cast<const typename PairOf<T>::Word*>(from);
    __builtin_memcpy(static_cast<void*>(to), &pair, sizeof pair);
  } else {
    to[0] = from[0];
    to[1] = from[near];
  }
}

template <class T>
__forceinline__ void move_pair(const T* from, T* to, std::size_t near) {
  if (near == 1) {
    typename PairOf<T>::Word pair;
    __builtin_memcpy(&pair, from, sizeof pair);
    *reinterpret_cast<typename PairOf<T>::Word*>(to) = pair;
  } else {
    to[0] = from[0];
    to[near] = from[1];
  }
}

/// Where pair 0..3 of a lane starts: A and D have groups along rows, and go down 8 rows first, then right. B
/// has groups along columns and pairs along k, and goes along k first.
__forceinline__ std::size_t along_groups(int pair, bool down_first) {
  return ladder::emu::lane_index() / 4 + 8 * static_cast<std::size_t>(down_first ? pair % 2 : pair / 2);
}
__forceinline__ std::size_t along_pairs(int pair, bool down_first) {
  return 2 * (ladder::emu::lane_index() % 4) + 8 * static_cast<std::size_t>(down_first ? pair / 2 : pair % 2);
}

using FourPairs = std::make_integer_sequence<int, 4>;

/// Loads (T* from const T*) or stores. @param group_step, pair_step distances in memory between neighbours
template <class T, class P>
__forceinline__ void four_pairs(T* x, P* p, bool down_first, std::size_t group_step, std::size_t pair_step) {
  each(
      FourPairs{}, [&](auto pair) __attribute__((always_inline)) {
        move_pair(x + 2 * pair,
                  p + along_groups(pair, down_first) * group_step + along_pairs(pair, down_first) * pair_step,
                  pair_step);
      });
}

}  // namespace detail

template <class Layout>
struct fragment<matrix_a, 16, 16, 16, half, Layout> : detail::Elements<half> {};
template <class Layout>
struct fragment<matrix_b, 16, 16, 16, half, Layout> : detail::Elements<half> {};
template <>
struct fragment<accumulator, 16, 16, 16, float, void> : detail::Elements<float> {};

using Accumulator = fragment<accumulator, 16, 16, 16, float>;

template <class Use, class T, class Layout>
__forceinline__ void fill_fragment(fragment<Use, 16, 16, 16, T, Layout>& f, const T& v) {
  detail::each(std::make_integer_sequence<int, 8>{}, [&](auto i) { f.x[i] = v; });
}

/// @param leading elements from one row (row_major) or column (col_major) to the next
__forceinline__ void load_matrix_sync(fragment<matrix_a, 16, 16, 16, half, row_major>& f, const half* p,
                                      unsigned leading) {
  detail::check(p, leading, 8);
  detail::four_pairs(f.x, p, true, leading, 1);
}
__forceinline__ void load_matrix_sync(fragment<matrix_a, 16, 16, 16, half, col_major>& f, const half* p,
                                      unsigned leading) {
  detail::check(p, leading, 8);
  detail::four_pairs(f.x, p, true, 1, leading);
}
__forceinline__ void load_matrix_sync(fragment<matrix_b, 16, 16, 16, half, row_major>& f, const half* p,
                                      unsigned leading) {
  detail::check(p, leading, 8);
  detail::four_pairs(f.x, p, false, 1, leading);
}
__forceinline__ void load_matrix_sync(fragment<matrix_b, 16, 16, 16, half, col_major>& f, const half* p,
                                      unsigned leading) {
  detail::check(p, leading, 8);
  detail::four_pairs(f.x, p, false, leading, 1);
}
__forceinline__ void load_matrix_sync(Accumulator& f, const float* p, unsigned leading, layout_t layout) {
  detail::check(p, leading, 4);
  const bool rows = layout == mem_row_major;
  detail::four_pairs(f.x, p, true, rows ? leading : 1, rows ? 1 : leading);
}
__forceinline__ void store_matrix_sync(float* p, const Accumulator& f, unsigned leading, layout_t layout) {
  detail::check(p, leading, 4);
  const bool rows = layout == mem_row_major;
  detail::four_pairs(f.x, p, true, rows ? leading : 1, rows ? 1 : leading);
}

/// d = a . b + c; d may be c.
template <class LayoutA, class LayoutB>
__forceinline__ void mma_sync(Accumulator& d, const fragment<matrix_a, 16, 16, 16, half, LayoutA>& a,
                              const fragment<matrix_b, 16, 16, 16, half, LayoutB>& b, const Accumulator& c) {
  std::uint32_t a_words[4], left[2], right[2];
  __builtin_memcpy(a_words, a.x, sizeof a_words);
  __builtin_memcpy(left, b.x, sizeof left);
  __builtin_memcpy(right, b.x + 4, sizeof right);
  float lo[4] = {c.x[0], c.x[1], c.x[2], c.x[3]}, hi[4] = {c.x[4], c.x[5], c.x[6], c.x[7]};
  ladder::mma_m16n8k16_f16(lo, a_words, left);
  ladder::mma_m16n8k16_f16(hi, a_words, right);
  detail::each(std::make_integer_sequence<int, 4>{}, [&](auto i) {
    d.x[i] = lo[i];
    d.x[i + 4] = hi[i];
  });
}

}  // namespace nvcuda::wmma
#endif

namespace ladder {
namespace wmma = nvcuda::wmma;
}
