// Tensor-core and asynchronous building blocks, on whatever device this build has: against float64 or int64
// references, and lane by lane against the fragment layouts of the PTX ISA, written here as formulas. What
// only the emulator knows (counts, findings) is tested on it alone.
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... -x cu kernels/device/test_building_blocks.cpp -o
//        building_blocks
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "harness/device/device.hpp"
#include "harness/device/doctest_main.hpp"
#include "kernels/device/cluster.cuh"
#include "kernels/device/cp_async.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/ldmatrix.cuh"
#include "kernels/device/mbarrier.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/device/named_barrier.cuh"
#include "kernels/device/tma.cuh"
#include "kernels/device/wgmma.cuh"
#include "kernels/device/wmma.cuh"

using namespace ladder;

namespace {

Stream& stream() {
  static Stream s;
  return s;
}

template <class T>
Buffer<T> on_device(const std::vector<T>& v, const char* name) {
  Buffer<T> b(v.size(), name);
  b.upload(v);
  return b;
}

template <class T>
std::vector<T> on_host(const Buffer<T>& b) {
  std::vector<T> v(b.size());
  stream().synchronize();
  b.download(v);
  return v;
}

/// Runs a kernel that must succeed; on the emulator, under all its checks.
template <class... Params, class... Args>
void run_kernel(void (*kernel)(Params...), unsigned threads, std::size_t shared_bytes, Args&&... args) {
#if !defined(__CUDACC__)
  const emu::counting on;
#endif
  const Status s =
      launch(kernel, dim3(1), dim3(threads), shared_bytes, stream(), std::forward<Args>(args)...);
  INFO(s.message());
  REQUIRE(s.ok());
  stream().synchronize();
}

std::uint16_t half_bits(float v) { return __half_as_ushort(__float2half(v)); }
double half_value(std::uint32_t bits) {
  return static_cast<double>(half_bits_to_float(static_cast<std::uint16_t>(bits & 0xffffu)));
}

/// A linear congruential generator: the same numbers everywhere.
struct Random {
  std::uint32_t state = 12345;
  std::uint32_t next() { return (state = state * 1664525u + 1013904223u) >> 8; }
  int integer(int lo, int hi) { return lo + static_cast<int>(next() % static_cast<unsigned>(hi - lo + 1)); }
  float real() { return static_cast<float>(next()) / (1 << 23) - 1.0f; }
};

/// Whether this device can execute Hopper's instructions; the emulator emulates those that it can.
bool has_sm90() { return kDeviceExecutor == Executor::emulator || device_info().cc_major >= 9; }

}  // namespace

// --- mma
// --------------------------------------------------------------------------------------------------------

/// Each lane brings its registers and takes away its registers: the layout is the test's business.
__global__ void mma_f16_registers(const std::uint32_t* a, const std::uint32_t* b, float* d) {
  const unsigned lane = threadIdx.x;
  const std::uint32_t x[4] = {a[lane * 4], a[lane * 4 + 1], a[lane * 4 + 2], a[lane * 4 + 3]};
  const std::uint32_t y[2] = {b[lane * 2], b[lane * 2 + 1]};
  float sum[4] = {d[lane * 4], d[lane * 4 + 1], d[lane * 4 + 2], d[lane * 4 + 3]};
  mma_m16n8k16_f16(sum, x, y);
  for (int i = 0; i < 4; ++i) d[lane * 4 + i] = sum[i];
}

/// @tparam A, B registers of a lane: 4 and 2 for k = 32, 2 and 1 for k = 16
template <int A, int B>
__global__ void mma_s8_registers(const std::uint32_t* a, const std::uint32_t* b, int* d) {
  const unsigned lane = threadIdx.x;
  std::uint32_t x[A], y[B];
  for (int i = 0; i < A; ++i) x[i] = a[lane * A + i];
  for (int i = 0; i < B; ++i) y[i] = b[lane * B + i];
  int sum[4] = {d[lane * 4], d[lane * 4 + 1], d[lane * 4 + 2], d[lane * 4 + 3]};
  if constexpr (A == 4) {
    mma_m16n8k32_s8(sum, x, y);
  } else {
    mma_m16n8k16_s8(sum, x, y);
  }
  for (int i = 0; i < 4; ++i) d[lane * 4 + i] = sum[i];
}

namespace {

// PTX ISA, fragments of mma.m16n8k16 (f16): element i of a lane's A, B, C.
struct Place {
  int row, column;
};
Place f16_a(int lane, int i) {  // i = 0..7
  const int group = lane >> 2, member = lane % 4;
  return {(i < 2 || (i >= 4 && i < 6)) ? group : group + 8, member * 2 + (i & 1) + (i >= 4 ? 8 : 0)};
}
Place f16_b(int lane, int i) {  // i = 0..3
  return {(lane % 4) * 2 + (i & 1) + (i >= 2 ? 8 : 0), lane >> 2};
}
Place any_c(int lane, int i) {  // i = 0..3, the same for f16 and s8
  return {i < 2 ? lane >> 2 : (lane >> 2) + 8, (lane % 4) * 2 + (i & 1)};
}
// mma.m16n8k16 (s8): A i = 0..7, B i = 0..3.
Place s8_k16_a(int lane, int i) { return {i < 4 ? lane >> 2 : (lane >> 2) + 8, (lane % 4) * 4 + (i & 3)}; }
Place s8_k16_b(int lane, int i) { return {(lane % 4) * 4 + i, lane >> 2}; }
// mma.m16n8k32 (s8): A i = 0..15, B i = 0..7.
Place s8_k32_a(int lane, int i) {
  return {(i < 4 || (i >= 8 && i < 12)) ? lane >> 2 : (lane >> 2) + 8,
          (lane % 4) * 4 + (i & 3) + (i >= 8 ? 16 : 0)};
}
Place s8_k32_b(int lane, int i) { return {(lane % 4) * 4 + (i & 3) + (i >= 4 ? 16 : 0), lane >> 2}; }

/// @param exact small integers, so that every sum is exact; otherwise random halves
void check_f16(bool exact) {
  Random r;
  std::vector<float> a(16 * 16), b(16 * 8), c(16 * 8);
  for (auto* m : {&a, &b, &c}) {
    for (float& v : *m) {
      v = exact ? static_cast<float>(r.integer(-8, 8)) : static_cast<float>(half_value(half_bits(r.real())));
    }
  }
  std::vector<std::uint32_t> ra(32 * 4), rb(32 * 2);
  std::vector<float> rd(32 * 4);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 8; ++i) {
      const Place p = f16_a(lane, i);
      ra[lane * 4 + i / 2] |= std::uint32_t{half_bits(a[p.row * 16 + p.column])} << (16 * (i % 2));
    }
    for (int i = 0; i < 4; ++i) {
      const Place p = f16_b(lane, i);
      rb[lane * 2 + i / 2] |= std::uint32_t{half_bits(b[p.row * 8 + p.column])} << (16 * (i % 2));
      const Place q = any_c(lane, i);
      rd[lane * 4 + i] = c[q.row * 8 + q.column];
    }
  }
  const auto da = on_device(ra, "a"), db = on_device(rb, "b");
  auto dd = on_device(rd, "d");
  run_kernel(mma_f16_registers, 32, 0, da.data(), db.data(), dd.data());
  const std::vector<float> got = on_host(dd);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const Place p = any_c(lane, i);
      double sum = c[p.row * 8 + p.column], terms = std::fabs(sum);
      for (int k = 0; k < 16; ++k) {
        const double t = static_cast<double>(a[p.row * 16 + k]) * b[k * 8 + p.column];
        sum += t;
        terms += std::fabs(t);
      }
      // f32 sums of 17 terms, each addition rounded or cut off: 16 additions of at most 2^-23 of the terms.
      const double bound = exact ? 0.0 : 16 * std::ldexp(terms, -23);
      INFO("lane ", lane, " register ", i);
      CHECK(std::isfinite(got[lane * 4 + i]));
      CHECK(std::fabs(got[lane * 4 + i] - sum) <= bound);
    }
  }
}

template <int A, int B>
void check_s8(Place (*place_a)(int, int), Place (*place_b)(int, int), bool extreme) {
  constexpr int kDepth = 8 * A;
  Random r;
  std::vector<int> a(16 * kDepth), b(kDepth * 8), c(16 * 8);
  for (int& v : a) v = extreme ? -128 : r.integer(-128, 127);
  for (int& v : b) v = extreme ? -128 : r.integer(-128, 127);
  for (int& v : c) v = extreme ? 2147483647 : r.integer(-1000000, 1000000);
  std::vector<std::uint32_t> ra(32 * A), rb(32 * B);
  std::vector<int> rd(32 * 4);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4 * A; ++i) {
      const Place p = place_a(lane, i);
      ra[lane * A + i / 4] |= (static_cast<std::uint32_t>(a[p.row * kDepth + p.column]) & 0xffu)
                              << (8 * (i % 4));
    }
    for (int i = 0; i < 4 * B; ++i) {
      const Place p = place_b(lane, i);
      rb[lane * B + i / 4] |= (static_cast<std::uint32_t>(b[p.row * 8 + p.column]) & 0xffu) << (8 * (i % 4));
    }
    for (int i = 0; i < 4; ++i) {
      const Place p = any_c(lane, i);
      rd[lane * 4 + i] = c[p.row * 8 + p.column];
    }
  }
  const auto da = on_device(ra, "a"), db = on_device(rb, "b");
  auto dd = on_device(rd, "d");
  run_kernel(mma_s8_registers<A, B>, 32, 0, da.data(), db.data(), dd.data());
  const std::vector<int> got = on_host(dd);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const Place p = any_c(lane, i);
      std::int64_t sum = c[p.row * 8 + p.column];
      for (int k = 0; k < kDepth; ++k) {
        sum += std::int64_t{a[p.row * kDepth + k]} * b[k * 8 + p.column];
      }
      INFO("lane ", lane, " register ", i);
      CHECK(got[lane * 4 + i] == static_cast<int>(static_cast<std::uint32_t>(sum)));  // wraps around
    }
  }
}

}  // namespace

TEST_CASE("mma m16n8k16 f16: integers exactly, random halves within the bound, by the PTX ISA's layout") {
  check_f16(true);
  check_f16(false);
}

TEST_CASE("mma s8, k = 16 and k = 32: exactly, wrapping around, by the PTX ISA's layout") {
  check_s8<2, 1>(s8_k16_a, s8_k16_b, false);
  check_s8<4, 2>(s8_k32_a, s8_k32_b, false);
  check_s8<2, 1>(s8_k16_a, s8_k16_b, true);
  check_s8<4, 2>(s8_k32_a, s8_k32_b, true);
}

/// d = a . b with k = 8, and d += a . b of floats cut to tf32.
__global__ void mma_k8_registers(const std::uint32_t* a, const std::uint32_t* b, float* d) {
  const unsigned lane = threadIdx.x;
  float sum[4];
  mma_m16n8k8_f16_zero(sum, {a[2 * lane], a[2 * lane + 1]}, {b[lane]});
  for (unsigned i = 0; i < 4; ++i) d[4 * lane + i] = sum[i];
}
__global__ void mma_tf32_registers(const std::uint32_t* a, const std::uint32_t* b, float* d) {
  const unsigned lane = threadIdx.x;
  float sum[4] = {d[4 * lane], d[4 * lane + 1], d[4 * lane + 2], d[4 * lane + 3]};
  mma_m16n8k8_tf32(sum, {a[4 * lane], a[4 * lane + 1], a[4 * lane + 2], a[4 * lane + 3]},
                   {b[2 * lane], b[2 * lane + 1]});
  for (unsigned i = 0; i < 4; ++i) d[4 * lane + i] = sum[i];
}

TEST_CASE("mma k = 8, f16 without a sum and tf32 with one: integers exactly, by the PTX ISA's layout") {
  Random r;
  std::vector<int> a(16 * 8), b(8 * 8), c(16 * 8);
  for (int& v : a) v = r.integer(-1024, 1024);
  for (int& v : b) v = r.integer(-1024, 1024);
  for (int& v : c) v = r.integer(-100000, 100000);
  for (const bool tf32 : {false, true}) {
    // tf32: what is in the last 13 bits of a word does not count.
    const auto word = [&](int v) { return std::bit_cast<std::uint32_t>(static_cast<float>(v)) | 0x1000u; };
    const auto f16 = [&](int v) { return std::uint32_t{half_bits(static_cast<float>(v))}; };
    std::vector<std::uint32_t> ra(32 * (tf32 ? 4 : 2)), rb(32 * (tf32 ? 2 : 1));
    std::vector<float> rd(32 * 4);
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      const auto at = [](int v) { return static_cast<std::size_t>(v); };
      for (int i = 0; i < (tf32 ? 4 : 2); ++i) {
        const int row = 8 * (g + i % 2 * 8);
        ra[at(lane * (tf32 ? 4 : 2) + i)] = tf32
                                                ? word(a[at(row + t + i / 2 * 4)])
                                                : f16(a[at(row + 2 * t)]) | f16(a[at(row + 2 * t + 1)]) << 16;
      }
      for (int i = 0; i < (tf32 ? 2 : 1); ++i) {
        rb[at(lane * (tf32 ? 2 : 1) + i)] = tf32 ? word(b[at(8 * (t + 4 * i) + g)])
                                                 : f16(b[at(16 * t + g)]) | f16(b[at(16 * t + 8 + g)]) << 16;
      }
      for (int i = 0; i < 4; ++i)
        rd[at(4 * lane + i)] = static_cast<float>(c[at(8 * (g + i / 2 * 8) + 2 * t + i % 2)]);
    }
    const auto da = on_device(ra, "a"), db = on_device(rb, "b");
    auto dd = on_device(rd, "d");
    run_kernel(tf32 ? mma_tf32_registers : mma_k8_registers, 32, 0, da.data(), db.data(), dd.data());
    const std::vector<float> got = on_host(dd);
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        int sum = tf32 ? c[static_cast<std::size_t>(8 * row + column)] : 0;
        for (int k = 0; k < 8; ++k)
          sum += a[static_cast<std::size_t>(8 * row + k)] * b[static_cast<std::size_t>(8 * k + column)];
        INFO("tf32 ", tf32, " lane ", lane, " register ", i);
        CHECK(got[static_cast<std::size_t>(4 * lane + i)] == static_cast<float>(sum));
      }
    }
  }
}

// --- ldmatrix
// ---------------------------------------------------------------------------------------------------

/// Fills rows 0..8 * N - 1, `stride` halves apart, with out[.] = row * 8 + column, and loads them.
template <int N, bool Transposed>
__global__ void ldmatrix_registers(std::uint32_t* out, int stride) {
  auto* tile = dynamic_shared<unsigned short>();  // [8 * N][stride]
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < 8 * N) {
    for (int c = 0; c < 8; ++c) tile[lane * stride + c] = static_cast<unsigned short>(lane * 8 + c);
  }
  __syncthreads();
  std::uint32_t f[N];
  const auto* row = tile + (lane % (8 * N)) * stride;
  if constexpr (Transposed) {
    ldmatrix_transposed(f, row);
  } else {
    ldmatrix(f, row);
  }
  for (int m = 0; m < N; ++m) out[lane * N + m] = f[m];
}

namespace {

template <int N, bool Transposed>
void check_ldmatrix(int stride_bytes) {
  Buffer<std::uint32_t> out(32 * N, "out");
  run_kernel(ldmatrix_registers<N, Transposed>, 32, static_cast<std::size_t>(8 * N * stride_bytes),
             out.data(), stride_bytes / 2);
  const auto got = on_host(out);
  for (int lane = 0; lane < 32; ++lane) {
    for (int m = 0; m < N; ++m) {
      for (int part = 0; part < 2; ++part) {
        // PTX ISA: thread 4 * row + column / 2 holds (row, column) of matrix m in register m; .trans swaps
        //     the two.
        const int first = lane / 4, second = lane % 4 * 2 + part;
        const int row = Transposed ? second : first, column = Transposed ? first : second;
        INFO("lane ", lane, " matrix ", m, " part ", part);
        CHECK((got[lane * N + m] >> (16 * part) & 0xffffu) ==
              static_cast<unsigned>((m * 8 + row) * 8 + column));
      }
    }
  }
}

}  // namespace

TEST_CASE("ldmatrix x1, x2, x4, plain and transposed, by the PTX ISA's layout") {
  for (const int stride : {16, 64, 80, 128, 144}) {
    check_ldmatrix<1, false>(stride);
    check_ldmatrix<2, false>(stride);
    check_ldmatrix<4, false>(stride);
    check_ldmatrix<1, true>(stride);
    check_ldmatrix<2, true>(stride);
    check_ldmatrix<4, true>(stride);
  }
}

/// out[16][8] = a[16][16] . b[16][8], both row-major: A by ldmatrix x4, B by a transposed x2.
__global__ void ldmatrix_feeds_mma(const half* a, const half* b, float* out) {
  __shared__ __align__(16) half tile_a[16 * 24], tile_b[16 * 8];  // rows of A 48 bytes apart: no conflicts
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < 256; i += 32) tile_a[i / 16 * 24 + i % 16] = a[i];
  for (int i = lane; i < 128; i += 32) tile_b[i] = b[i];
  __syncthreads();
  std::uint32_t fa[4], fb[2];
  // Matrices of A: rows 0..7 and 8..15 of k 0..7, then of k 8..15.
  ldmatrix(fa, tile_a + lane % 16 * 24 + lane / 16 * 8);
  ldmatrix_transposed(fb, tile_b + lane % 16 * 8);
  float d[4] = {};
  mma_m16n8k16_f16(d, fa, fb);
  store_mma_d(out, d, lane);
}

TEST_CASE("ldmatrix brings what mma wants: a product from row-major A and row-major B") {
  Random r;
  std::vector<half> a(256), b(128);
  for (half& v : a) v = __float2half(static_cast<float>(r.integer(-9, 9)));
  for (half& v : b) v = __float2half(static_cast<float>(r.integer(-9, 9)));
  const auto da = on_device(a, "a"), db = on_device(b, "b");
  Buffer<float> out(128, "out");
  out.fill_bytes(0xff);
  run_kernel(ldmatrix_feeds_mma, 32, 0, da.data(), db.data(), out.data());
  const auto got = on_host(out);
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      double sum = 0;
      for (int k = 0; k < 16; ++k) {
        sum += static_cast<double>(__half2float(a[row * 16 + k])) *
               static_cast<double>(__half2float(b[k * 8 + column]));
      }
      CHECK(got[row * 8 + column] == sum);
    }
  }
}

// --- cp.async
// ---------------------------------------------------------------------------------------------------

/// Copies `n` bytes of `in`, zeros after them, through shared memory to `out`: `Bytes` a thread.
template <int Bytes, bool PastL1>
__global__ void cp_async_tail(const unsigned char* in, unsigned char* out, int n) {
  auto* tile = dynamic_shared<unsigned char>();
  const int at = static_cast<int>(threadIdx.x) * Bytes;
  const int left = n - at, source = left < 0 ? 0 : left > Bytes ? Bytes : left;
  if constexpr (PastL1) {
    cp_async_cg(tile + at, source > 0 ? in + at : in, source);
  } else {
    cp_async_ca<Bytes>(tile + at, source > 0 ? in + at : in, source);
  }
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();
  for (int i = 0; i < Bytes; ++i) {
    const int from = static_cast<int>(blockDim.x) * Bytes - 1 - (at + i);  // what another thread copied
    out[at + i] = tile[from];
  }
}

/// A pipeline of three stages: while stage i is added up, i + 1 and i + 2 are on their way.
__global__ void cp_async_pipeline(const float* in, float* out, int stages) {
  __shared__ __align__(16) float tile[3][128];
  const unsigned i = threadIdx.x;  // 0..31, four floats each
  for (int s = 0; s < 2; ++s) {
    if (s < stages) cp_async_cg(&tile[s][i * 4], in + s * 128 + i * 4);
    cp_async_commit_group();
  }
  float sum = 0;
  for (int s = 0; s < stages; ++s) {
    cp_async_wait_group<1>();
    __syncthreads();  // stage s is there for all, and all have done with s - 1, whose place is filled next
    if (s + 2 < stages) cp_async_cg(&tile[(s + 2) % 3][i * 4], in + (s + 2) * 128 + i * 4);
    cp_async_commit_group();
    for (int k = 0; k < 4; ++k) sum += tile[s % 3][(i + 1) % 32 * 4 + k];
  }
  cp_async_wait_all();
  out[i] = sum;
}

namespace {

template <int Bytes, bool PastL1>
void check_tail() {
  for (const int n : {0, 1, Bytes - 1, Bytes, Bytes + 1, 31 * Bytes + Bytes / 2, 32 * Bytes}) {
    // On the emulator the source ends where it must not be read any more. compute-sanitizer takes a short
    // copy for a whole one, so on the GPU the allocation has room for it.
    const int room = kDeviceExecutor == Executor::emulator ? n : (n + Bytes - 1) / Bytes * Bytes;
    std::vector<unsigned char> in(static_cast<std::size_t>(room > 0 ? room : Bytes));
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<unsigned char>(i * 7 + 1);
    const auto di = on_device(in, "in");
    Buffer<unsigned char> out(32 * Bytes, "out");
    run_kernel(cp_async_tail<Bytes, PastL1>, 32, 32 * Bytes, di.data(), out.data(), n);
    const auto got = on_host(out);
    for (int i = 0; i < 32 * Bytes; ++i) {
      INFO(Bytes, " bytes a copy, ", n, " of them, byte ", i);
      const int from = 32 * Bytes - 1 - i;
      CHECK(got[i] == (from < n ? in[from] : 0));
    }
  }
}

}  // namespace

TEST_CASE("cp.async of 4, 8 and 16 bytes, with zeros after the end of the source") {
  check_tail<4, false>();
  check_tail<8, false>();
  check_tail<16, false>();
  check_tail<16, true>();
}

TEST_CASE("cp.async: a pipeline of groups") {
  for (const int stages : {1, 2, 3, 7}) {
    std::vector<float> in(static_cast<std::size_t>(stages) * 128);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i % 1009);
    const auto di = on_device(in, "in");
    Buffer<float> out(32, "out");
    run_kernel(cp_async_pipeline, 32, 0, di.data(), out.data(), stages);
    const auto got = on_host(out);
    for (int lane = 0; lane < 32; ++lane) {
      double sum = 0;
      for (int s = 0; s < stages; ++s) {
        for (int k = 0; k < 4; ++k) sum += in[s * 128 + (lane + 1) % 32 * 4 + k];
      }
      CHECK(got[lane] == sum);
    }
  }
}

// --- wmma
// -------------------------------------------------------------------------------------------------------

/// out = 2 * (a . b + c), through shared memory for A and straight from global memory for B and C.
template <class LayoutA, class LayoutB>
__global__ void wmma_product(const half* a, const half* b, const float* c, float* out, int c_rows) {
  __shared__ __align__(32) half tile[16 * 24];
  for (int i = static_cast<int>(threadIdx.x); i < 256; i += 32) tile[i / 16 * 24 + i % 16] = a[i];
  __syncthreads();
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, LayoutA> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, LayoutB> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc, fd;
  const wmma::layout_t layout = c_rows != 0 ? wmma::mem_row_major : wmma::mem_col_major;
  wmma::load_matrix_sync(fa, tile, 24);
  wmma::load_matrix_sync(fb, b, 16);
  wmma::load_matrix_sync(fc, c, 16, layout);
  wmma::fill_fragment(fd, 100.0f);
  for (int i = 0; i < fd.num_elements; ++i) fc.x[i] += fd.x[i] - 100.0f;
  wmma::mma_sync(fd, fa, fb, fc);
  for (int i = 0; i < fd.num_elements; ++i) fd.x[i] *= 2.0f;
  wmma::store_matrix_sync(out, fd, 16, layout);
}

namespace {

template <class LayoutA, class LayoutB>
void check_wmma(bool a_rows, bool b_rows, bool c_rows) {
  Random r;
  std::vector<half> a(256), b(256);
  std::vector<float> c(256);
  for (half& v : a) v = __float2half(static_cast<float>(r.integer(-9, 9)));
  for (half& v : b) v = __float2half(static_cast<float>(r.integer(-9, 9)));
  for (float& v : c) v = static_cast<float>(r.integer(-99, 99));
  const auto da = on_device(a, "a"), db = on_device(b, "b");
  const auto dc = on_device(c, "c");
  Buffer<float> out(256, "out");
  out.fill_bytes(0xff);
  run_kernel(wmma_product<LayoutA, LayoutB>, 32, 0, da.data(), db.data(), dc.data(), out.data(),
             c_rows ? 1 : 0);
  const auto got = on_host(out);
  const auto at = [](bool rows, int row, int column) { return rows ? row * 16 + column : column * 16 + row; };
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 16; ++column) {
      double sum = c[at(c_rows, row, column)];
      for (int k = 0; k < 16; ++k) {
        sum += static_cast<double>(__half2float(a[at(a_rows, row, k)])) *
               static_cast<double>(__half2float(b[at(b_rows, k, column)]));
      }
      INFO("row ", row, " column ", column);
      CHECK(got[at(c_rows, row, column)] == 2 * sum);
    }
  }
}

}  // namespace

TEST_CASE("wmma: every layout of A, B and C, elementwise operations, exactly on integers") {
  for (const bool c_rows : {true, false}) {
    check_wmma<wmma::row_major, wmma::row_major>(true, true, c_rows);
    check_wmma<wmma::row_major, wmma::col_major>(true, false, c_rows);
    check_wmma<wmma::col_major, wmma::row_major>(false, true, c_rows);
    check_wmma<wmma::col_major, wmma::col_major>(false, false, c_rows);
  }
}

// --- mbarrier and bulk copies
// -----------------------------------------------------------------------------------

/// Two warps pass a tile to and fro: warp 0 fills it, warp 1 adds it up; `full` and `empty` take turns.
__global__ void mbarrier_ping_pong(int* out, int rounds) {
  __shared__ std::uint64_t full, empty;
  __shared__ int tile[32];
  const unsigned i = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 32);
    mbarrier_init(&empty, 32);
    mbarrier_init_fence();
  }
  __syncthreads();
  int sum = 0;
  for (int r = 0; r < rounds; ++r) {
    const auto parity = static_cast<unsigned>(r % 2);
    if (threadIdx.x < 32) {
      mbarrier_wait(&empty, parity ^ 1u);  // round 0 returns at once: the tile is empty
      tile[i] = r * 100 + static_cast<int>(i);
      mbarrier_arrive(&full);
    } else {
      mbarrier_wait(&full, parity);
      sum += tile[(i + 1) % 32];
      mbarrier_arrive(&empty);
    }
  }
  if (threadIdx.x >= 32) out[i] = sum;
}

/// Two stages of `floats` each, filled by bulk copies that thread 0 asks for; all threads add up.
__global__ void bulk_stages(const float* in, float* out, int floats, int stages) {
  __shared__ std::uint64_t full[2];
  auto* tile = dynamic_shared<float>();  // [2][floats]
  const auto bytes = static_cast<unsigned>(floats) * 4u;
  if (threadIdx.x == 0) {
    mbarrier_init(&full[0], 1);
    mbarrier_init(&full[1], 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2 && s < stages; ++s) {
      mbarrier_arrive_expect_bytes(&full[s], bytes);
      bulk_copy(tile + s * floats, in + s * floats, bytes, &full[s]);
    }
  }
  float sum = 0;
  for (int s = 0; s < stages; ++s) {
    mbarrier_wait(&full[s % 2], static_cast<unsigned>(s / 2 % 2));
    for (int k = static_cast<int>(threadIdx.x); k < floats; k += static_cast<int>(blockDim.x)) {
      sum += tile[s % 2 * floats + k];
    }
    __syncthreads();  // all have done with this stage
    if (threadIdx.x == 0 && s + 2 < stages) {
      mbarrier_arrive_expect_bytes(&full[s % 2], bytes);
      bulk_copy(tile + s % 2 * floats, in + (s + 2) * floats, bytes, &full[s % 2]);
    }
  }
  out[threadIdx.x] = sum;
}

/// Two warps with parts of their own give each other a word a lane, in turn, and meet from different places.
/// @param with 0: they write again without waiting for the reader
__global__ void two_parts(int* out, int rounds, int with) {
  __shared__ int first[32], second[32];
  const int lane = static_cast<int>(threadIdx.x % 32);
  int sum = 0;
  if (threadIdx.x < 32) {
    for (int r = 0; r < rounds; ++r) {
      first[lane] = 100 * r + lane;
      named_barrier(1, 64);
      sum += second[31 - lane];
      if (with != 0) named_barrier(1, 64);  // both have read
    }
  } else {
    for (int r = 0; r < rounds; ++r) {
      second[lane] = 7 * r + lane;
      named_barrier(1, 64);
      sum += first[31 - lane];
      if (with != 0) named_barrier(1, 64);
    }
  }
  out[threadIdx.x] = sum;
}

TEST_CASE("named_barrier: warps meet at it from different places") {
  for (const int rounds : {1, 2, 5}) {
    Buffer<int> out(64, "out");
    run_kernel(two_parts, 64, 0, out.data(), rounds, 1);
    const auto got = on_host(out);
    const int all = rounds * (rounds - 1) / 2;
    for (int i = 0; i < 32; ++i) {
      CHECK(got[i] == 7 * all + rounds * (31 - i));
      CHECK(got[32 + i] == 100 * all + rounds * (31 - i));
    }
  }
}

TEST_CASE("mbarrier: phases of even and odd parity pass a tile between two warps") {
  if (!has_sm90()) {
    MESSAGE("skipped: needs compute capability 9.0");
    return;
  }
  for (const int rounds : {1, 2, 3, 8}) {
    Buffer<int> out(32, "out");
    run_kernel(mbarrier_ping_pong, 64, 0, out.data(), rounds);
    const auto got = on_host(out);
    for (int i = 0; i < 32; ++i) CHECK(got[i] == rounds * (rounds - 1) / 2 * 100 + rounds * ((i + 1) % 32));
  }
}

TEST_CASE("bulk copies fill two stages in turn") {
  if (!has_sm90()) {
    MESSAGE("skipped: needs compute capability 9.0");
    return;
  }
  constexpr int kFloats = 516;  // 2064 bytes: a multiple of 16, not of 32
  for (const int stages : {1, 2, 5}) {
    std::vector<float> in(static_cast<std::size_t>(stages) * kFloats);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i % 251);
    const auto di = on_device(in, "in");
    Buffer<float> out(64, "out");
    run_kernel(bulk_stages, 64, 2 * kFloats * 4, di.data(), out.data(), kFloats, stages);
    const auto got = on_host(out);
    for (int t = 0; t < 64; ++t) {
      double sum = 0;
      for (int s = 0; s < stages; ++s) {
        for (int k = t; k < kFloats; k += 64) sum += in[s * kFloats + k];
      }
      CHECK(got[t] == sum);
    }
  }
}

// --- Tensor copies and wgmma
// ------------------------------------------------------------------------------------

__global__ void tensor_box(const __grid_constant__ TensorMap map, int row, int column, half* out) {
  __shared__ __align__(128) half tile[8 * 16];
  __shared__ std::uint64_t full;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_bytes(&full, sizeof tile);
    tensor_copy_2d(tile, map, row, column, &full);
  }
  __syncthreads();
  mbarrier_wait(&full, 0);
  for (unsigned i = threadIdx.x; i < 128; i += 32) out[i] = tile[i];
}

/// d[64][64] = a[64][16] . b[64][16]^T
__global__ void wgmma_product(const half* a, const half* b, float* d) {
  __shared__ __align__(128) half tile_a[64 * 16], tile_b[64 * 16];
  for (unsigned i = threadIdx.x; i < 64 * 16; i += 128) {
    const unsigned row = i / 16, k = i % 16, at = (row / 8 * 2 + k / 8) * 64 + row % 8 * 8 + k % 8;
    tile_a[at] = a[i];
    tile_b[at] = b[i];
  }
  wgmma_smem_fence();
  __syncthreads();
  float sum[32] = {};
  wgmma_fence();
  wgmma_m64n64k16_f16(sum, tile_a, tile_b);
  wgmma_commit_group();
  wgmma_wait_group<0>();
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 32; ++i) {
    d[(16 * warp + lane / 4 + 8 * (i / 2 % 2)) * 64 + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = sum[i];
  }
}

/// d[64][N] = a[64][64] . b[N][64]^T with operands that the copy engine swizzles; A from shared memory or from registers.
template <int N, bool REGISTERS>
__global__ void __launch_bounds__(128, 1)
    wgmma_swizzled(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                   const half* a, float* d) {
  auto* tile = dynamic_shared<unsigned char>();
  tile += (1024 - reinterpret_cast<std::uintptr_t>(tile) % 1024) % 1024;  // [64][64], [N][64] halves
  __shared__ std::uint64_t full;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(a_map);
    prefetch_tensor_map(b_map);
    mbarrier_init(&full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_bytes(&full, (64 + N) * 128);
    tensor_copy_2d(tile, a_map, 0, 0, &full);
    tensor_copy_2d(tile + 64 * 128, b_map, 0, 0, &full);
  }
  __syncthreads();
  mbarrier_wait(&full, 0);
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sum[N / 2];
  for (int i = 0; i < N / 2; ++i) sum[i] = __int_as_float(0x7fffffff);  // NaN: the first product must not add
  const std::uint64_t shared_a = wgmma_descriptor_128b(tile);
  const std::uint64_t shared_b = wgmma_descriptor_128b(tile + 64 * 128);
  std::uint32_t fragment[4][4];
  for (unsigned k = 0; k < 4; ++k) {
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = 16 * warp + lane / 4 + 8 * (i % 2), at = 16 * k + 8 * (i / 2) + 2 * (lane % 4);
      fragment[k][i] = *reinterpret_cast<const std::uint32_t*>(a + row * 64 + at);
    }
    wgmma_hold(fragment[k]);
  }
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if constexpr (REGISTERS) {
      wgmma_f16<N>(sum, fragment[k], wgmma_next_k(shared_b, k), k > 0);
    } else {
      wgmma_f16<N>(sum, wgmma_next_k(shared_a, k), wgmma_next_k(shared_b, k), k > 0);
    }
  }
  wgmma_commit_group();
  wgmma_wait_group<0>();
  wgmma_hold(sum);
  for (unsigned i = 0; i < N / 2; ++i) {
    d[(16 * warp + lane / 4 + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = sum[i];
  }
}

/// Each block of a cluster of two copies half of the box for both, adds 100 to what the other's first thread hands it,
/// and the copy engine writes the box, which each has whole, to the block's place in the output.
__global__ void cluster_box(const __grid_constant__ TensorMap in, const __grid_constant__ TensorMap out,
                            float* handed) {
  __shared__ __align__(1024) float box[16 * 32];
  __shared__ __align__(16) float mail[4];
  __shared__ std::uint64_t full, here;
  const unsigned block = cluster_block();
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init(&here, 2);
    mbarrier_init_fence();
    mbarrier_arrive_expect_bytes(&full, sizeof box);
  }
  __syncthreads();
  cluster_barrier_relaxed();
  if (threadIdx.x == 0) {
    tensor_copy_2d_multicast(box + block * 8 * 32, in, static_cast<int>(block) * 8, 0, &full, 3);
    const float v = static_cast<float>(block);
    store_at(shared_address_in(1 - block, mail), make_float4(v, v + 10, v + 20, v + 30));
  }
  cluster_barrier();
  mbarrier_wait(&full, 0);
  if (threadIdx.x < 2) mbarrier_arrive_at(shared_address_in(threadIdx.x, &here));
  mbarrier_wait(&here, 0);
  if (threadIdx.x < 4) handed[block * 4 + threadIdx.x] = mail[threadIdx.x] + 100;
  if (threadIdx.x == 0) {
    tensor_store_2d(out, static_cast<int>(block) * 16, 0, box);
    bulk_store_commit();
    bulk_store_wait_read<0>();
    bulk_store_wait();
  }
  cluster_barrier_relaxed();
}

TEST_CASE("a tensor map says what it does not take") {
  TensorMap map;
  Buffer<half> m(64, "m");
  CHECK(make_tensor_map(map, m.data(), 8, 7, 8, 8).message().find("multiple of 8") != std::string::npos);
  CHECK(!make_tensor_map(map, m.data(), 8, 8, 0, 8).ok());
  CHECK(!make_tensor_map(map, m.data(), 8, 8, 257, 8).ok());
  CHECK(!make_tensor_map(map, m.data(), 8, 8, 8, 12).ok());
  const TensorMapOptions floats{.element = TensorElement::f32};
  CHECK(make_tensor_map(map, m.data(), 4, 6, 4, 4, floats).message().find("multiple of 4") !=
        std::string::npos);
  const TensorMapOptions swizzled{.swizzle = TensorSwizzle::bytes_128};
  CHECK(make_tensor_map(map, m.data(), 1, 64, 8, 72, swizzled).message() ==
        "tensor map: a box of 8 x 72 halves; allowed are 1 to 256 rows and 8 to 64 columns, a multiple of 8");
}

#if defined(__CUDACC__)
TEST_CASE("a tensor copy takes a box, with zeros where it hangs over") {
  if (!has_sm90()) {
    MESSAGE("skipped: needs compute capability 9.0");
    return;
  }
  constexpr int kRows = 21, kColumns = 40;
  std::vector<half> m(kRows * kColumns);
  for (std::size_t i = 0; i < m.size(); ++i) m[i] = __float2half(static_cast<float>(i + 1));
  const auto dm = on_device(m, "m");
  TensorMap map;
  REQUIRE(make_tensor_map(map, dm.data(), kRows, kColumns, 8, 16).ok());
  const int corners[][2] = {{0, 0}, {5, 8}, {16, 32}, {-3, -8}};
  for (const auto& corner : corners) {
    Buffer<half> out(128, "out");
    out.fill_bytes(0xff);
    run_kernel(tensor_box, 32, 0, map, corner[0], corner[1], out.data());
    const auto got = on_host(out);
    for (int i = 0; i < 128; ++i) {
      const int row = corner[0] + i / 16, column = corner[1] + i % 16;
      const bool inside = row >= 0 && row < kRows && column >= 0 && column < kColumns;
      CHECK(__half2float(got[i]) == (inside ? __half2float(m[row * kColumns + column]) : 0.0f));
    }
  }
}

TEST_CASE("wgmma m64n64k16: exactly on integers, by the PTX ISA's layout") {
  if (device_info().cc_major != 9) {
    MESSAGE("skipped: needs compute capability 9.0");
    return;
  }
  Random r;
  std::vector<half> a(64 * 16), b(64 * 16);
  for (half& v : a) v = __float2half(static_cast<float>(r.integer(-9, 9)));
  for (half& v : b) v = __float2half(static_cast<float>(r.integer(-9, 9)));
  const auto da = on_device(a, "a"), db = on_device(b, "b");
  Buffer<float> d(64 * 64, "d");
  d.fill_bytes(0xff);
  run_kernel(wgmma_product, 128, 0, da.data(), db.data(), d.data());
  const auto got = on_host(d);
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < 64; ++column) {
      double sum = 0;
      for (int k = 0; k < 16; ++k) {
        sum += static_cast<double>(__half2float(a[row * 16 + k])) *
               static_cast<double>(__half2float(b[column * 16 + k]));
      }
      INFO("row ", row, " column ", column);
      CHECK(got[row * 64 + column] == sum);
    }
  }
}

namespace {

template <int N, bool REGISTERS>
void check_wgmma_swizzled() {
  CAPTURE(N);
  CAPTURE(REGISTERS);
  Random r;
  std::vector<half> a(64 * 64), b(N * 64);
  for (half& v : a) v = __float2half(static_cast<float>(r.integer(-9, 9)));
  for (half& v : b) v = __float2half(static_cast<float>(r.integer(-9, 9)));
  const auto da = on_device(a, "a"), db = on_device(b, "b");
  const TensorMapOptions options{TensorElement::f16, TensorSwizzle::bytes_128, true};
  TensorMap a_map, b_map;
  REQUIRE(make_tensor_map(a_map, da.data(), 64, 64, 64, 64, options).ok());
  REQUIRE(make_tensor_map(b_map, db.data(), N, 64, N, 64, options).ok());
  Buffer<float> d(64 * N, "d");
  d.fill_bytes(0xff);
  run_kernel(wgmma_swizzled<N, REGISTERS>, 128, 1024 + (64 + N) * 128, a_map, b_map, da.data(), d.data());
  const auto got = on_host(d);
  int wrong = 0;
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < N; ++column) {
      double sum = 0;
      for (int k = 0; k < 64; ++k) {
        sum += static_cast<double>(__half2float(a[row * 64 + k])) *
               static_cast<double>(__half2float(b[column * 64 + k]));
      }
      wrong += got[row * N + column] != sum;
    }
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("wgmma of every width, swizzled, with A in shared memory and in registers: exactly on integers") {
  if (device_info().cc_major != 9) {
    MESSAGE("skipped: needs compute capability 9.0");
    return;
  }
  [&]<int... N>(std::integer_sequence<int, N...>) {
    (check_wgmma_swizzled<N, false>(), ...);
    (check_wgmma_swizzled<N, true>(), ...);
  }
  (std::integer_sequence<int, 8, 16, 32, 64, 72, 96, 112, 128, 144, 152, 160, 192, 224, 256>{});
}

TEST_CASE("a cluster shares what it copies, writes to each other's memory, and the copy engine stores") {
  if (!has_sm90()) {
    MESSAGE("skipped: needs compute capability 9.0");
    return;
  }
  constexpr int kRows = 16, kColumns = 36, kOutRows = 30;  // the last two rows of the second box hang over
  std::vector<float> m(kRows * kColumns);
  for (std::size_t i = 0; i < m.size(); ++i) m[i] = static_cast<float>(i + 1);
  const auto in = on_device(m, "in");
  Buffer<float> out(kOutRows * 32 + 64, "out"), handed(8, "handed");
  out.fill_bytes(0xff);
  const TensorMapOptions options{TensorElement::f32, TensorSwizzle::bytes_128, false};
  TensorMap in_map, out_map;
  REQUIRE(make_tensor_map(in_map, in.data(), kRows, kColumns, 8, 32, options).ok());
  REQUIRE(make_tensor_map(out_map, out.data(), kOutRows, 32, 16, 32, options).ok());
  const Status s = launch(LaunchOptions{.cluster_blocks = 2}, cluster_box, dim3(2), dim3(32), 0, stream(),
                          in_map, out_map, handed.data());
  INFO(s.message());
  REQUIRE(s.ok());
  const auto got = on_host(out), mail = on_host(handed);
  for (int row = 0; row < kOutRows; ++row) {
    for (int column = 0; column < 32; ++column)
      CHECK(got[row * 32 + column] == m[row % 16 * kColumns + column]);
  }
  for (std::size_t i = kOutRows * 32; i < got.size(); ++i) CHECK(std::isnan(got[i]));
  for (int i = 0; i < 8; ++i) CHECK(mail[i] == 100 + (i < 4 ? 1 : 0) + i % 4 * 10);
}
#endif

// --- What only the emulator knows
// -------------------------------------------------------------------------------

#if !defined(__CUDACC__)

namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

template <class... Params, class... Args>
emu::Counters counted(void (*kernel)(Params...), unsigned threads, std::size_t shared_bytes, Args&&... args) {
  run_kernel(kernel, threads, shared_bytes, std::forward<Args>(args)...);
  return emu::last_launch();
}

/// The one finding of a launch that must fail.
template <class... Params, class... Args>
emu::Finding finding(void (*kernel)(Params...), unsigned threads, std::size_t shared_bytes, Args&&... args) {
  const emu::counting on;
  const Status s =
      launch(kernel, dim3(1), dim3(threads), shared_bytes, stream(), std::forward<Args>(args)...);
  CHECK(!s.ok());
  const emu::Counters c = emu::last_launch();
  REQUIRE(!c.findings.empty());
  MESSAGE(c.findings[0].text);
  return c.findings[0];
}

std::uint64_t instructions(const emu::Counters& c, emu::Instruction i) {
  return c.total.instructions[static_cast<std::size_t>(i)];
}

constexpr auto kRead = static_cast<std::size_t>(emu::Access::read);
constexpr auto kWrite = static_cast<std::size_t>(emu::Access::write);

}  // namespace

TEST_CASE("an mma counts as one mma of the warp, and needs no shuffles") {
  const auto a = on_device(std::vector<std::uint32_t>(128), "a"),
             b = on_device(std::vector<std::uint32_t>(64), "b");
  auto d = on_device(std::vector<float>(128), "d");
  emu::Counters c = counted(mma_f16_registers, 32, 0, a.data(), b.data(), d.data());
  CHECK(instructions(c, emu::Instruction::mma_f16) == 1);
  CHECK(c.total.collectives == 0);
  auto sums = on_device(std::vector<int>(128), "d");
  c = counted(mma_s8_registers<4, 2>, 32, 0, a.data(), b.data(), sums.data());
  CHECK(instructions(c, emu::Instruction::mma_s8) == 1);
  c = counted(mma_s8_registers<2, 1>, 32, 0, a.data(), b.data(), sums.data());
  CHECK(instructions(c, emu::Instruction::mma_s8) == 1);
}

__global__ void mma_after_return(float* out, int lanes) {
  if (static_cast<int>(threadIdx.x) >= lanes) return;
  const std::uint32_t a[4] = {}, b[2] = {};
  float d[4] = {};
  mma_m16n8k16_f16(d, a, b);
  out[threadIdx.x] = d[0];
}

TEST_CASE("an mma with fewer than 32 lanes is a finding") {
  Buffer<float> out(32, "out");
  counted(mma_after_return, 32, 0, out.data(), 32);
  const emu::Finding f = finding(mma_after_return, 32, 0, out.data(), 31);
  CHECK(f.check == emu::Check::collective);
  CHECK(contains(f.text, "needs all 32 lanes of warp 0; 31 are there"));
}

TEST_CASE("ldmatrix: a pass for each matrix without conflicts, four-way at 64 bytes, eight-way at 128") {
  struct Case {
    int stride, ways;
  };
  for (const Case& k : {Case{16, 1}, {64, 4}, {80, 1}, {128, 8}, {144, 1}}) {
    INFO("rows ", k.stride, " bytes apart");
    Buffer<std::uint32_t> out(128, "out");
    const auto check = [&](const emu::Counters& c, std::uint64_t matrices) {
      CHECK(instructions(c, emu::Instruction::ldmatrix) == 1);
      const emu::SharedCounts& s = c.total.shared[kRead];
      CHECK(s.requests == 1);
      CHECK(s.lanes == 8 * matrices);
      CHECK(s.bytes == 128 * matrices);
      CHECK(s.ideal_passes == matrices);
      CHECK(s.passes == matrices * static_cast<std::uint64_t>(k.ways));
    };
    check(counted(ldmatrix_registers<1, false>, 32, 32 * 144, out.data(), k.stride / 2), 1);
    check(counted(ldmatrix_registers<2, true>, 32, 32 * 144, out.data(), k.stride / 2), 2);
    check(counted(ldmatrix_registers<4, false>, 32, 32 * 144, out.data(), k.stride / 2), 4);
  }
}

__global__ void ldmatrix_misaligned(std::uint32_t* out) {
  auto* tile = dynamic_shared<unsigned short>();
  for (unsigned i = threadIdx.x; i < 128; i += 32) tile[i] = 0;
  __syncthreads();
  std::uint32_t f[1];
  ldmatrix(f, tile + threadIdx.x % 8 * 8 + 4);
  out[threadIdx.x] = f[0];
}

TEST_CASE("ldmatrix of a row that is not aligned to 16 bytes is an error, counting or not") {
  Buffer<std::uint32_t> out(32, "out");
  CHECK(finding(ldmatrix_misaligned, 32, 256, out.data()).check == emu::Check::misaligned);
  const emu::counting off(false);
  const Status s = launch(ldmatrix_misaligned, dim3(1), dim3(32), 256, stream(), out.data());
  CHECK(contains(s.message(), "test_building_blocks.cpp"));
}

TEST_CASE("cp.async: instructions, sectors and bytes, of which a short source has fewer") {
  const auto in = on_device(std::vector<unsigned char>(512, 1), "in");
  Buffer<unsigned char> out(512, "out");
  // 32 lanes, 16 bytes each, all there: 16 sectors; 512 bytes written to shared memory in 4 passes.
  emu::Counters c = counted(cp_async_tail<16, true>, 32, 512, in.data(), out.data(), 512);
  CHECK(instructions(c, emu::Instruction::cp_async) == 32);
  CHECK(c.total.loads().requests == 1);
  CHECK(c.total.loads().sectors == 16);
  CHECK(c.total.loads().bytes == 512);
  CHECK(c.total.shared[kWrite].requests == 1);
  CHECK(c.total.shared[kWrite].bytes == 512);
  CHECK(c.total.shared[kWrite].passes == 4);
  // 100 bytes: six lanes of 16, one of 4, still one request, 4 sectors; 25 lanes read nothing.
  c = counted(cp_async_tail<16, false>, 32, 512, in.data(), out.data(), 100);
  CHECK(instructions(c, emu::Instruction::cp_async) == 32);
  CHECK(c.total.loads().requests == 1);
  CHECK(c.total.loads().lanes == 7);
  CHECK(c.total.loads().sectors == 4);
  CHECK(c.total.loads().ideal_sectors == 4);
  CHECK(c.total.loads().bytes == 100);
  CHECK(c.total.shared[kWrite].bytes == 512);
}

/// Loads the same 16 bytes twice.
template <bool PastL1>
__global__ void cp_async_twice(const float* in, float* out) {
  __shared__ __align__(16) float tile[2][4];
  for (int i = 0; i < 2; ++i) {
    if constexpr (PastL1) {
      cp_async_cg(tile[i], in);
    } else {
      cp_async_ca<16>(tile[i], in);
    }
  }
  cp_async_wait_all();
  out[0] = tile[0][0] + tile[1][3];
}

TEST_CASE("cp.async.ca finds in L1 what it has loaded before; .cg goes past L1") {
  const auto in = on_device(std::vector<float>(4, 1.0f), "in");
  Buffer<float> out(1, "out");
  CHECK(counted(cp_async_twice<false>, 1, 0, in.data(), out.data()).total.loads().l1_sectors == 1);
  CHECK(counted(cp_async_twice<true>, 1, 0, in.data(), out.data()).total.loads().l1_sectors == 2);
}

constexpr int kEarlyCopyLine = __LINE__ + 6;
/// @param how 0: correct, 1: reads before waiting, 2: waits for too few groups, 3: no wait, but a barrier,
/// and reads what another thread copied, 4: waits, but no barrier before reading what another thread copied
__global__ void cp_async_early(const float* in, float* out, int how) {
  __shared__ __align__(16) float tile[64];
  const unsigned i = threadIdx.x;
  cp_async_ca<4>(&tile[i], in + i);
  cp_async_commit_group();
  if (how == 0 || how == 4) cp_async_wait_group<0>();
  if (how == 2) cp_async_wait_group<1>();
  if (how == 0 || how == 3) __syncthreads();
  const unsigned other = how == 1 || how == 2 ? i : 63 - i;
  out[i] = tile[other];
}

TEST_CASE(
    "cp.async: a read of data that has not arrived is found, with the lines of the read and of the copy") {
  const auto in = on_device(std::vector<float>(64, 1.0f), "in");
  Buffer<float> out(64, "out");
  counted(cp_async_early, 64, 0, in.data(), out.data(), 0);
  for (const int how : {1, 2, 3}) {
    INFO("how ", how);
    const emu::Finding f = finding(cp_async_early, 64, 0, in.data(), out.data(), how);
    CHECK(f.check == emu::Check::async_copy);
    CHECK(
        contains(f.text, "reads shared memory that a cp.async has not delivered yet: shared 'tile' at byte"));
    CHECK(f.line.line == kEarlyCopyLine + 6);
    CHECK(f.other.line == kEarlyCopyLine);
  }
  CHECK(emu::last_launch().findings.size() == 1);
  (void)finding(cp_async_early, 64, 0, in.data(), out.data(), 4);
  const std::vector<emu::Finding> found = emu::last_launch().findings;
  CHECK(std::any_of(found.begin(), found.end(),
                    [](const emu::Finding& f) { return f.check == emu::Check::shared_race; }));

  // With counting off there is nobody to tell, but what is read is poison.
  const emu::counting off(false);
  REQUIRE(launch(cp_async_early, dim3(1), dim3(64), 0, stream(), in.data(), out.data(), 1).ok());
  for (const float v : on_host(out)) CHECK(std::isnan(v));
}

__global__ void cp_async_over_readers(const float* in, float* out, int with) {
  __shared__ float tile[64];
  const unsigned i = threadIdx.x;
  tile[i] = 1.0f;
  __syncthreads();
  const float v = tile[63 - i];
  if (with != 0) __syncthreads();
  cp_async_ca<4>(&tile[i], in + i);
  cp_async_wait_all();
  out[i] = v + tile[i];
}

TEST_CASE("cp.async into a place that others still read is a race") {
  const auto in = on_device(std::vector<float>(64, 1.0f), "in");
  Buffer<float> out(64, "out");
  counted(cp_async_over_readers, 64, 0, in.data(), out.data(), 1);
  CHECK(finding(cp_async_over_readers, 64, 0, in.data(), out.data(), 0).check == emu::Check::shared_race);
}

__global__ void cp_async_bad(const unsigned char* in, int offset, int source) {
  auto* tile = dynamic_shared<unsigned char>();
  cp_async_ca<8>(tile + threadIdx.x * 8, in + threadIdx.x * 8 + offset, source);
  cp_async_wait_all();
}

TEST_CASE("cp.async: misaligned, too long and out-of-bounds sources are errors") {
  const auto in = on_device(std::vector<unsigned char>(256), "in");
  counted(cp_async_bad, 32, 256, in.data(), 0, 8);
  CHECK(finding(cp_async_bad, 32, 256, in.data(), 4, 8).check == emu::Check::misaligned);
  CHECK(finding(cp_async_bad, 32, 256, in.data(), 8, 8).check == emu::Check::out_of_bounds);
  CHECK(finding(cp_async_bad, 32, 255, in.data(), 0, 8).check == emu::Check::shared_overrun);
  CHECK(contains(finding(cp_async_bad, 32, 256, in.data(), 0, 9).text, "allowed are 0 to 8"));
  const emu::counting off(false);
  CHECK(!launch(cp_async_bad, dim3(1), dim3(32), 256, stream(), in.data(), 4, 8).ok());
}

TEST_CASE("wmma: an mma_sync is two mma_f16; row-major halves are loaded in pairs") {
  const auto a = on_device(std::vector<half>(256, __float2half(1.0f)), "a"),
             b = on_device(std::vector<half>(256, __float2half(1.0f)), "b");
  const auto c = on_device(std::vector<float>(256), "c");
  Buffer<float> out(256, "out");
  const emu::Counters rows = counted(wmma_product<wmma::row_major, wmma::row_major>, 32, 0, a.data(),
                                     b.data(), c.data(), out.data(), 1);
  CHECK(instructions(rows, emu::Instruction::mma_f16) == 2);
  CHECK(rows.total.shared[kRead].requests == 4);  // A: four pairs of halves a lane
  CHECK(rows.total.shared[kRead].bytes == 512);
  CHECK(rows.of_buffer("b", emu::Access::read).requests ==
        8);  // B row-major: k is not contiguous, single halves
  CHECK(rows.of_buffer("b", emu::Access::read).bytes == 512);
  CHECK(rows.of_buffer("c", emu::Access::read).requests == 4);  // C: four pairs of floats
  CHECK(rows.of_buffer("out", emu::Access::write).requests == 4);
  CHECK(rows.of_buffer("out", emu::Access::write).bytes == 1024);
  const emu::Counters columns = counted(wmma_product<wmma::col_major, wmma::col_major>, 32, 0, a.data(),
                                        b.data(), c.data(), out.data(), 0);
  CHECK(columns.total.shared[kRead].requests == 8);
  CHECK(columns.of_buffer("b", emu::Access::read).requests == 4);
  CHECK(columns.of_buffer("c", emu::Access::read).requests == 8);
}

TEST_CASE("bulk copies count as requests of one thread") {
  const auto in = on_device(std::vector<float>(2 * 516, 1.0f), "in");
  Buffer<float> out(64, "out");
  const emu::Counters c = counted(bulk_stages, 64, 2 * 2064, in.data(), out.data(), 516, 2);
  CHECK(instructions(c, emu::Instruction::bulk_copy) == 2);
  CHECK(c.of_buffer("in", emu::Access::read).requests == 2);
  CHECK(c.of_buffer("in", emu::Access::read).bytes == 4128);
  // 2064 bytes from byte 0: 64.5 sectors; from byte 2064, in the middle of a sector: as many.
  CHECK(c.of_buffer("in", emu::Access::read).sectors == 130);
  CHECK(c.total.shared[kWrite].passes >= 34);  // 17 rows of banks each; the inits of the barriers besides
}

/// @param how 0: correct, 1: reads without waiting, 2: waits for a phase that never ends, 3: no init
__global__ void bulk_wrong(const float* in, float* out, int how) {
  __shared__ __align__(16) float tile[32];
  __shared__ std::uint64_t full;
  if (threadIdx.x == 0 && how != 3) mbarrier_init(&full, 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_bytes(&full, how == 2 ? 256 : 128);
    bulk_copy(tile, in, 128, &full);
  }
  if (how != 1) mbarrier_wait(&full, 0);
  out[threadIdx.x] = tile[threadIdx.x];
}

TEST_CASE("bulk copies: an early read, a phase that never ends and a barrier without init are found") {
  const auto in = on_device(std::vector<float>(32, 1.0f), "in");
  Buffer<float> out(32, "out");
  counted(bulk_wrong, 32, 0, in.data(), out.data(), 0);
  const emu::Finding early = finding(bulk_wrong, 32, 0, in.data(), out.data(), 1);
  CHECK(early.check == emu::Check::async_copy);
  CHECK(contains(early.text, "a cp.async.bulk has not delivered yet"));
  CHECK(contains(finding(bulk_wrong, 32, 0, in.data(), out.data(), 2).text,
                 "which still waits for 0 of 1 arrivals and 128 bytes"));
  CHECK(contains(finding(bulk_wrong, 32, 0, in.data(), out.data(), 3).text, "not initialised"));
}

/// @param with 0: the tile is filled for the second time without waiting for its readers
__global__ void mbarrier_refill(int* out, int with) {
  __shared__ std::uint64_t full, empty;
  __shared__ int tile[32];
  const unsigned i = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 32);
    mbarrier_init(&empty, 32);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    tile[i] = 1;
    mbarrier_arrive(&full);
    if (with != 0) mbarrier_wait(&empty, 0);
    tile[i] = 2;
  } else {
    mbarrier_wait(&full, 0);
    out[i] = tile[31 - i];
    mbarrier_arrive(&empty);
  }
}

TEST_CASE("mbarrier orders what it orders, and no more: a missing 'empty' barrier is a race") {
  Buffer<int> out(32, "out");
  counted(mbarrier_refill, 64, 0, out.data(), 1);
  CHECK(finding(mbarrier_refill, 64, 0, out.data(), 0).check == emu::Check::shared_race);
}

TEST_CASE("two parts that do not meet before they write again are a race") {
  Buffer<int> out(64, "out");
  counted(two_parts, 64, 0, out.data(), 2, 1);
  CHECK(finding(two_parts, 64, 0, out.data(), 2, 0).check == emu::Check::shared_race);
}

TEST_CASE("building blocks work with counting off") {
  const emu::counting off(false);
  Buffer<int> out(32, "out");
  REQUIRE(launch(mbarrier_ping_pong, dim3(1), dim3(64), 0, stream(), out.data(), 3).ok());
  CHECK(on_host(out)[0] == 303);
  const auto in = on_device(std::vector<float>(5 * 516, 1.0f), "in");
  Buffer<float> sums(64, "sums");
  REQUIRE(launch(bulk_stages, dim3(1), dim3(64), 2 * 2064, stream(), in.data(), sums.data(), 516, 5).ok());
  CHECK(on_host(sums)[0] == 45.0f);  // thread 0 has 9 of every 516
}

TEST_CASE("what has no emulated body says that it needs a GPU") {
  const auto m = on_device(std::vector<half>(64 * 16), "m");
  Buffer<half> box(128, "box");
  TensorMap map;
  REQUIRE(make_tensor_map(map, m.data(), 64, 16, 8, 16).ok());
  const emu::counting off(false);
  const Status tensor = launch(tensor_box, dim3(1), dim3(32), 0, stream(), map, 0, 0, box.data());
  CHECK(contains(tensor.message(), "this kernel needs a GPU of compute capability 9.0"));
  Buffer<float> d(64 * 64, "d");
  const Status product = launch(wgmma_product, dim3(1), dim3(128), 0, stream(), m.data(), m.data(), d.data());
  CHECK(contains(product.message(),
                 "wgmma has no emulated body: this kernel needs a GPU of compute capability 9.0"));
}

#endif
