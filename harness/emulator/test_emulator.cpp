// The machine: indices, memory, barriers, collectives, atomics, half types, and what is reported when a kernel
// goes wrong. Expected values are worked out by hand or by a loop over the definition. Compiled with the flags of
// kernel sources.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"

using namespace ladder;

namespace {

constexpr unsigned kAll = 0xffffffffu;

template <class T>
std::vector<T> download(const Buffer<T>& b) {
  std::vector<T> v(b.size());
  b.download(v);
  return v;
}

template <class T>
Buffer<T> upload(const std::vector<T>& v, const char* name = "buffer") {
  Buffer<T> b(v.size(), name);
  b.upload(v);
  return b;
}

std::string line_text(int line) { return "test_emulator.cpp:" + std::to_string(line); }
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

// --- Indices ----------------------------------------------------------------------------------------------------

__global__ void write_indices(uint3* thread, uint3* block, dim3* dims) {
  const unsigned in_block = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned i = b * blockDim.x * blockDim.y * blockDim.z + in_block;
  thread[i] = threadIdx;
  block[i] = blockIdx;
  if (i == 0) {
    dims[0] = blockDim;
    dims[1] = gridDim;
  }
}

TEST_CASE("3-D grids and blocks give every thread its own indices, x fastest") {
  const dim3 grid(3, 2, 4), block(5, 3, 2);
  const std::size_t n = 3 * 2 * 4 * 5 * 3 * 2;
  Buffer<uint3> thread(n), blocks(n);
  Buffer<dim3> dims(2);
  Stream s;
  require(launch(write_indices, grid, block, 0, s, thread.data(), blocks.data(), dims.data()));
  const auto t = download(thread), b = download(blocks);
  std::size_t i = 0;
  for (unsigned bz = 0; bz < 4; ++bz)
    for (unsigned by = 0; by < 2; ++by)
      for (unsigned bx = 0; bx < 3; ++bx)
        for (unsigned tz = 0; tz < 2; ++tz)
          for (unsigned ty = 0; ty < 3; ++ty)
            for (unsigned tx = 0; tx < 5; ++tx, ++i) {
              REQUIRE(t[i].x == tx);
              REQUIRE(t[i].y == ty);
              REQUIRE(t[i].z == tz);
              REQUIRE(b[i].x == bx);
              REQUIRE(b[i].y == by);
              REQUIRE(b[i].z == bz);
            }
  const auto d = download(dims);
  CHECK(d[0].x == 5);
  CHECK(d[0].z == 2);
  CHECK(d[1].y == 2);
  CHECK(d[1].z == 4);
}

// --- Shared memory and barriers ---------------------------------------------------------------------------------

__global__ void reverse_static(const int* in, int* out) {
  __shared__ int tile[1024];
  const unsigned i = threadIdx.x, n = blockDim.x;
  tile[i] = in[blockIdx.x * n + i];
  __syncthreads();
  out[blockIdx.x * n + i] = tile[n - 1 - i];
}

__global__ void reverse_dynamic(const int* in, int* out) {
  int* tile = dynamic_shared<int>();
  const unsigned i = threadIdx.x, n = blockDim.x;
  tile[i] = in[blockIdx.x * n + i];
  __syncthreads();
  out[blockIdx.x * n + i] = tile[n - 1 - i];
}

TEST_CASE("static and dynamic shared memory, blocks of 1 to 1024 threads, many blocks at once") {
  Stream s;
  for (const unsigned n : {1u, 31u, 32u, 33u, 256u, 1000u, 1024u}) {
    constexpr unsigned kBlocks = 37;
    std::vector<int> in(kBlocks * n);
    std::iota(in.begin(), in.end(), 7);
    const Buffer<int> a = upload(in);
    for (const bool dynamic : {false, true}) {
      Buffer<int> out(in.size());
      if (dynamic) {
        require(launch(reverse_dynamic, dim3(kBlocks), dim3(n), n * sizeof(int), s, a.data(), out.data()));
      } else {
        require(launch(reverse_static, dim3(kBlocks), dim3(n), 0, s, a.data(), out.data()));
      }
      const auto r = download(out);
      for (unsigned b = 0; b < kBlocks; ++b)
        for (unsigned i = 0; i < n; ++i) REQUIRE(r[b * n + i] == in[b * n + n - 1 - i]);
    }
  }
}

__global__ void read_unset(unsigned* out, int touch) {
  __shared__ unsigned fixed[4];
  unsigned* dynamic = dynamic_shared<unsigned>();
  out[blockIdx.x * 2] = fixed[1];
  out[blockIdx.x * 2 + 1] = dynamic[3];
  if (touch != 0) fixed[1] = dynamic[3] = 5;  // the next block on this core must not see it
}

template <int N>
__global__ void read_unset_template(unsigned* out, int touch) {
  __shared__ unsigned fixed[N];
  out[blockIdx.x] = fixed[N - 1];
  if (touch != 0) fixed[N - 1] = 5;
}

TEST_CASE("shared memory is poison at the start of every block") {
  Stream s;
  Buffer<unsigned> out(128);
  require(launch(read_unset, dim3(64), dim3(1), 16, s, out.data(), 1));
  for (const unsigned v : download(out)) REQUIRE(v == 0xffffffffu);
  require(launch(read_unset_template<9>, dim3(128), dim3(1), 0, s, out.data(), 1));
  for (const unsigned v : download(out)) REQUIRE(v == 0xffffffffu);
}

__global__ void barrier_votes(int* out) {
  const int i = static_cast<int>(threadIdx.x);
  const int count = __syncthreads_count(i % 3 == 0);
  const int all_small = __syncthreads_and(i < 1000), not_all = __syncthreads_and(i < 99);
  const int one = __syncthreads_or(i == 57), none = __syncthreads_or(i > 1000);
  out[i] = count * 16 + (all_small ? 8 : 0) + (not_all ? 4 : 0) + (one ? 2 : 0) + (none ? 1 : 0);
}

TEST_CASE("barriers that count and vote") {
  Stream s;
  Buffer<int> out(100);
  require(launch(barrier_votes, dim3(1), dim3(100), 0, s, out.data()));
  for (const int v : download(out)) REQUIRE(v == 34 * 16 + 8 + 2);  // 0, 3, ..., 99: 34 of them
}

__global__ void many_barriers(int* out) {
  __shared__ int cell[256];
  const unsigned i = threadIdx.x;
  cell[i] = static_cast<int>(i);
  __syncthreads();
  for (int step = 0; step < 100; ++step) {
    const int next = cell[(i + 1) % blockDim.x];
    __syncthreads();  // everyone has read before anyone writes
    cell[i] = next;
    __syncthreads();  // everyone has written before anyone reads
  }
  out[i] = cell[i];
}

TEST_CASE("two hundred barriers in a loop") {
  Stream s;
  Buffer<int> out(256);
  require(launch(many_barriers, dim3(1), dim3(256), 0, s, out.data()));
  const auto r = download(out);
  for (int i = 0; i < 256; ++i) REQUIRE(r[i] == (i + 100) % 256);
}

// --- Warp collectives -------------------------------------------------------------------------------------------

template <class T>
__global__ void shuffles(T* out) {
  const int lane = static_cast<int>(threadIdx.x);
  const T v = static_cast<T>(100 + lane);
  T* o = out + lane * 10;
  o[0] = __shfl_sync(kAll, v, 5);
  o[1] = __shfl_sync(kAll, v, lane + 3);     // wraps around
  o[2] = __shfl_sync(kAll, v, lane + 1, 8);  // within groups of eight
  o[3] = __shfl_up_sync(kAll, v, 2);
  o[4] = __shfl_up_sync(kAll, v, 3, 16);
  o[5] = __shfl_down_sync(kAll, v, 4);
  o[6] = __shfl_down_sync(kAll, v, 1, 4);
  o[7] = __shfl_xor_sync(kAll, v, 16);
  o[8] = __shfl_xor_sync(kAll, v, 1, 2);
  o[9] = __shfl_xor_sync(kAll, v, 8, 8);  // a later group: own value; an earlier one: its value
}

template <class T>
void check_shuffles() {
  Stream s;
  Buffer<T> out(320);
  require(launch(shuffles<T>, dim3(1), dim3(32), 0, s, out.data()));
  const auto r = download(out);
  for (int lane = 0; lane < 32; ++lane) {
    const std::array<int, 10> from = {5,
                                      (lane + 3) % 32,
                                      lane / 8 * 8 + (lane + 1) % 8,
                                      lane < 2 ? lane : lane - 2,
                                      lane % 16 < 3 ? lane : lane - 3,
                                      lane > 27 ? lane : lane + 4,
                                      lane % 4 == 3 ? lane : lane + 1,
                                      lane ^ 16,
                                      lane ^ 1,
                                      (lane & 8) != 0 ? lane - 8 : lane};
    for (int k = 0; k < 10; ++k) {
      INFO("lane ", lane, " shuffle ", k);
      REQUIRE(r[lane * 10 + k] == static_cast<T>(100 + from[k]));
    }
  }
}

TEST_CASE("shuffles of 4- and 8-byte types, with widths") {
  check_shuffles<int>();
  check_shuffles<unsigned>();
  check_shuffles<float>();
  check_shuffles<long long>();
  check_shuffles<unsigned long long>();
  check_shuffles<double>();
}

__global__ void shuffle_half2(__half2* out) {
  const int lane = static_cast<int>(threadIdx.x);
  const __half2 v(__float2half(static_cast<float>(lane)), __float2half(-1.5f));
  out[lane] = __shfl_xor_sync(kAll, v, 3);
}

TEST_CASE("half2 can be shuffled") {
  Stream s;
  Buffer<__half2> out(32);
  require(launch(shuffle_half2, dim3(1), dim3(32), 0, s, out.data()));
  const auto r = download(out);
  for (int lane = 0; lane < 32; ++lane) {
    REQUIRE(__low2float(r[lane]) == static_cast<float>(lane ^ 3));
    REQUIRE(__high2float(r[lane]) == -1.5f);
  }
}

__global__ void votes(unsigned* out) {
  const unsigned lane = threadIdx.x;
  unsigned* o = out + lane * 10;
  o[0] = __ballot_sync(kAll, lane % 5 == 0);
  o[1] = static_cast<unsigned>(__any_sync(kAll, lane == 31));
  o[2] = static_cast<unsigned>(__any_sync(kAll, lane == 32));
  o[3] = static_cast<unsigned>(__all_sync(kAll, lane < 32));
  o[4] = static_cast<unsigned>(__all_sync(kAll, lane < 31));
  o[5] = __match_any_sync(kAll, lane / 10);
  int same = -1;
  o[6] = __match_all_sync(kAll, 7.0f, &same) + static_cast<unsigned>(same);
  o[7] = __match_all_sync(kAll, lane, &same) + static_cast<unsigned>(same);
  o[8] = __activemask();
  o[9] = 0;
  if (lane >= 8 && lane < 16) o[9] = __ballot_sync(0x0000ff00u, lane != 9) + __activemask();
}

TEST_CASE("votes, matches and masks") {
  Stream s;
  Buffer<unsigned> out(320);
  require(launch(votes, dim3(1), dim3(32), 0, s, out.data()));
  const auto r = download(out);
  unsigned fives = 0;
  for (unsigned i = 0; i < 32; i += 5) fives |= 1u << i;
  for (unsigned lane = 0; lane < 32; ++lane) {
    const unsigned* o = r.data() + lane * 10;
    REQUIRE(o[0] == fives);
    REQUIRE(o[1] == 1);
    REQUIRE(o[2] == 0);
    REQUIRE(o[3] == 1);
    REQUIRE(o[4] == 0);
    REQUIRE(o[5] == (lane < 10   ? 0x000003ffu
                     : lane < 20 ? 0x000ffc00u
                     : lane < 30 ? 0x3ff00000u
                                 : 0xc0000000u));
    REQUIRE(o[6] == kAll + 1);  // all lanes, and the predicate
    REQUIRE(o[7] == 0);
    REQUIRE(o[8] == kAll);
    REQUIRE(o[9] == (lane >= 8 && lane < 16 ? 0x0000fd00u + 0x0000ff00u : 0u));
  }
}

__global__ void reductions(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  int* o = out + lane * 8;
  o[0] = __reduce_add_sync(kAll, lane - 20);
  o[1] = __reduce_min_sync(kAll, lane - 20);
  o[2] = __reduce_max_sync(kAll, lane - 20);
  o[3] = static_cast<int>(__reduce_min_sync(kAll, static_cast<unsigned>(lane - 20)));
  o[4] = static_cast<int>(__reduce_max_sync(kAll, static_cast<unsigned>(lane - 20)));
  o[5] = static_cast<int>(__reduce_and_sync(kAll, 0xf0u | static_cast<unsigned>(lane)));
  o[6] = static_cast<int>(__reduce_or_sync(kAll, static_cast<unsigned>(lane)));
  o[7] = static_cast<int>(__reduce_xor_sync(kAll, lane == 3 ? 5u : 0u));
}

TEST_CASE("warp reductions, signed and unsigned") {
  Stream s;
  Buffer<int> out(256);
  require(launch(reductions, dim3(1), dim3(32), 0, s, out.data()));
  const auto r = download(out);
  for (int lane = 0; lane < 32; ++lane) {
    const int* o = r.data() + lane * 8;
    REQUIRE(o[0] == 496 - 640);
    REQUIRE(o[1] == -20);
    REQUIRE(o[2] == 11);
    REQUIRE(o[3] == 0);
    REQUIRE(o[4] == -1);
    REQUIRE(o[5] == 0xf0);
    REQUIRE(o[6] == 31);
    REQUIRE(o[7] == 5);
  }
}

__global__ void half_warps(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  int v = lane;
  if (lane < 16) {
    for (int d = 8; d > 0; d /= 2) v += __shfl_xor_sync(0x0000ffffu, v, d);
  } else {
    for (int d = 8; d > 1; d /= 2) v += __shfl_xor_sync(0xffff0000u, v, d);
    __syncwarp(0xffff0000u);
  }
  __syncwarp();
  out[lane] = v;
}

TEST_CASE("two halves of a warp take different branches, each with its own collectives") {
  Stream s;
  Buffer<int> out(32);
  require(launch(half_warps, dim3(1), dim3(32), 0, s, out.data()));
  const auto r = download(out);
  for (int lane = 0; lane < 16; ++lane) REQUIRE(r[lane] == 120);
  for (int lane = 16; lane < 32; ++lane) {
    int sum = 0;  // lanes that differ in bits 1, 2 and 3
    for (int k = 0; k < 8; ++k) sum += (lane & ~14) + 2 * k;
    REQUIRE(r[lane] == sum);
  }
}

__global__ void short_warp(float* out, int n) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= n) return;
  float v = 1.0f;
  for (int d = 16; d > 0; d /= 2) v += __shfl_down_sync(kAll, v, static_cast<unsigned>(d));
  out[i] = v;
}

TEST_CASE("lanes that do not exist or have returned are not waited for, and have no value") {
  Stream s;
  Buffer<float> out(40);
  require(launch(short_warp, dim3(1), dim3(40), 0, s, out.data(), 40));
  CHECK(download(out)[0] == 32.0f);
  CHECK(std::isnan(download(out)[32]));  // its warp has eight lanes: the sum reads lanes that are not there
  require(launch(short_warp, dim3(1), dim3(40), 0, s, out.data(), 31));
  CHECK(std::isnan(download(out)[0]));
}

// --- Atomics ----------------------------------------------------------------------------------------------------

struct AtomicCells {
  int add, sub, max, min, exch_count, cas;
  unsigned uadd, umax, inc, bits_or, bits_and, bits_xor;
  unsigned long long ladd, lmax;
  float fadd;
  double dadd;
};

__global__ void atomics(AtomicCells* c) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(&c->add, i);
  atomicSub(&c->sub, 2);
  atomicMax(&c->max, i);
  atomicMin(&c->min, -i);
  if (atomicExch(&c->exch_count, i) == -1) atomicAdd(&c->uadd, 1000u);
  int old = c->cas, seen;
  do {
    seen = old;
    old = atomicCAS(&c->cas, seen, seen + 3);
  } while (old != seen);
  atomicAdd(&c->uadd, 1u);
  atomicMax(&c->umax, static_cast<unsigned>(i) + 0x80000000u);
  atomicInc(&c->inc, 9u);
  atomicOr(&c->bits_or, 1u << (i % 20));
  atomicAnd(&c->bits_and, ~(1u << (i % 20)));
  atomicXor(&c->bits_xor, 1u);
  atomicAdd(&c->ladd, 0x100000000ull);
  atomicMax(&c->lmax, 0x100000000ull * static_cast<unsigned>(i));
  atomicAdd(&c->fadd, 0.5f);
  atomicAdd(&c->dadd, 0.25);
}

TEST_CASE("atomics of many blocks lose nothing") {
  constexpr int kBlocks = 50, kThreads = 100, n = kBlocks * kThreads;
  AtomicCells zero{};
  zero.exch_count = -1;
  zero.bits_and = kAll;
  Buffer<AtomicCells> cell = upload(std::vector<AtomicCells>{zero});
  Stream s;
  require(launch(atomics, dim3(kBlocks), dim3(kThreads), 0, s, cell.data()));
  const AtomicCells c = download(cell)[0];
  CHECK(c.add == n * (n - 1) / 2);
  CHECK(c.sub == -2 * n);
  CHECK(c.max == n - 1);
  CHECK(c.min == -(n - 1));
  CHECK(c.cas == 3 * n);
  CHECK(c.uadd == 1000u + n);
  CHECK(c.umax == 0x80000000u + n - 1);
  CHECK(c.inc == n % 10);  // counts 0..9
  CHECK(c.bits_or == 0xfffffu);
  CHECK(c.bits_and == 0xfff00000u);
  CHECK(c.bits_xor == n % 2);
  CHECK(c.ladd == 0x100000000ull * n);
  CHECK(c.lmax == 0x100000000ull * (n - 1));
  CHECK(c.fadd == 0.5f * n);
  CHECK(c.dadd == 0.25 * n);
}

__global__ void shared_histogram(const int* in, int* out, int n) {
  __shared__ int bins[16];
  if (threadIdx.x < 16) bins[threadIdx.x] = 0;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x))
    atomicAdd(&bins[in[i]], 1);
  __syncthreads();
  if (threadIdx.x < 16) out[threadIdx.x] = bins[threadIdx.x];
}

TEST_CASE("atomics on shared memory") {
  std::vector<int> in(1000);
  for (int i = 0; i < 1000; ++i) in[i] = i * i % 16;
  std::array<int, 16> expected{};
  for (const int v : in) ++expected[v];
  const Buffer<int> a = upload(in);
  Buffer<int> out(16);
  Stream s;
  require(launch(shared_histogram, dim3(1), dim3(128), 0, s, a.data(), out.data(), 1000));
  const auto r = download(out);
  for (int i = 0; i < 16; ++i) CHECK(r[i] == expected[i]);
}

// --- Vector types and instructions ------------------------------------------------------------------------------

__global__ void vector_loads(const float4* f, const int2* i, const uchar4* u, float4* fo, int2* io,
                             uchar4* uo) {
  const unsigned k = threadIdx.x;
  const float4 v = f[k];
  fo[k] = make_float4(v.w, v.z, v.y, v.x);
  const int2 p = __ldg(i + k);
  io[k] = make_int2(p.y, p.x);
  const uchar4 q = __ldcs(u + k);
  __stcs(uo + k, make_uchar4(q.y, q.x, q.w, q.z));
}

TEST_CASE("vector types load and store as wholes") {
  static_assert(alignof(float4) == 16 && alignof(int2) == 8 && alignof(uchar4) == 4 && alignof(float3) == 4);
  static_assert(alignof(double2) == 16 && alignof(ulonglong2) == 16 && alignof(short4) == 8);
  static_assert(sizeof(float3) == 12 && sizeof(char4) == 4 && alignof(char2) == 2);
  std::vector<float4> f;
  std::vector<int2> i;
  std::vector<uchar4> u;
  for (int k = 0; k < 64; ++k) {
    const auto x = static_cast<float>(k);
    f.push_back(make_float4(x, x + 0.25f, x + 0.5f, x + 0.75f));
    i.push_back(make_int2(k, -k));
    u.push_back(make_uchar4(static_cast<unsigned char>(k), 1, 2, 3));
  }
  const Buffer<float4> bf = upload(f);
  const Buffer<int2> bi = upload(i);
  const Buffer<uchar4> bu = upload(u);
  Buffer<float4> of(64);
  Buffer<int2> oi(64);
  Buffer<uchar4> ou(64);
  Stream s;
  require(launch(vector_loads, dim3(1), dim3(64), 0, s, bf.data(), bi.data(), bu.data(), of.data(), oi.data(),
                 ou.data()));
  const auto rf = download(of);
  const auto ri = download(oi);
  const auto ru = download(ou);
  for (int k = 0; k < 64; ++k) {
    REQUIRE(rf[k].x == static_cast<float>(k) + 0.75f);
    REQUIRE(rf[k].w == static_cast<float>(k));
    REQUIRE(ri[k].x == -k);
    REQUIRE(ru[k].y == k);
    REQUIRE(ru[k].z == 3);
  }
}

TEST_CASE("integer instructions") {
  // dp4a: bytes 1, -2, 3, -128 times 5, 6, -7, 2: 5 - 12 - 21 - 256 = -284.
  const int a = static_cast<int>(0x8003fe01u), b = 0x02f90605;
  CHECK(__dp4a(a, b, 1000) == 716);
  CHECK(__dp4a(0x8003fe01u, 0x02f90605u, 0u) == 1u * 5 + 254u * 6 + 3u * 249 + 128u * 2);
  CHECK(__dp4a(0x01010101, static_cast<int>(0xff7f80feu), 0) == -2 - 128 + 127 - 1);
  CHECK(__byte_perm(0x33221100u, 0x77665544u, 0x7520) == 0x77552200u);
  CHECK(__byte_perm(0x80000000u, 0, 0x000b) == 0x000000ffu);  // the sign of byte 3
  CHECK(__popc(0xf0f0u) == 8);
  CHECK(__popcll(~0ull) == 64);
  CHECK(__ffs(0) == 0);
  CHECK(__ffs(8) == 4);
  CHECK(__clz(1) == 31);
  CHECK(__clz(0) == 32);
  CHECK(__brev(1u) == 0x80000000u);
  CHECK(__brev(0x12345678u) == 0x1e6a2c48u);
  CHECK(__funnelshift_l(0x80000000u, 0x1u, 1) == 0x3u);
  CHECK(__funnelshift_r(0x80000000u, 0x1u, 31) == 0x3u);
  CHECK(__funnelshift_l(5u, 7u, 32) == 7u);
  CHECK(__funnelshift_lc(5u, 7u, 32) == 5u);
  CHECK(__mulhi(-1, 1) == -1);
  CHECK(__umulhi(0xffffffffu, 0xffffffffu) == 0xfffffffeu);
  CHECK(__vsubss4(0x80808080u, 0x01010101u) == 0x80808080u);
  CHECK(__vsub4(0x00000000u, 0x01010101u) == 0xffffffffu);
}

TEST_CASE("conversions and arithmetic with a named rounding") {
  CHECK(__float2int_rn(2.5f) == 2);
  CHECK(__float2int_rn(3.5f) == 4);
  CHECK(__float2int_rn(-0.5f) == 0);
  CHECK(__float2int_rz(-2.9f) == -2);
  CHECK(__float2int_rd(-2.1f) == -3);
  CHECK(__float2int_ru(2.1f) == 3);
  CHECK(__float2int_rn(3e9f) == std::numeric_limits<int>::max());
  CHECK(__float2int_rn(NAN) == 0);
  CHECK(__float2uint_rn(-5.0f) == 0);
  CHECK(__float_as_uint(1.0f) == 0x3f800000u);
  CHECK(__uint_as_float(0x40490fdbu) == 3.14159274f);
  CHECK(rsqrtf(4.0f) == 0.5f);
  // (1 + 2^-23)^2 = 1 + 2^-22 + 2^-46: rounded before the addition, the last term would be lost.
  CHECK(__fmaf_rn(0x1.000002p0f, 0x1.000002p0f, -0x1.000004p0f) == 0x1p-46f);
  CHECK(max(3, 5) == 5);
  CHECK(min(-3, 5) == -3);
  CHECK(max(-1, 5u) == 0xffffffffu);
  CHECK(max(2.0f, NAN) == 2.0f);
  CHECK(__saturatef(1.5f) == 1.0f);
  CHECK(__saturatef(NAN) == 0.0f);
}

// --- Half types -------------------------------------------------------------------------------------------------

namespace {

/// The definition of binary16, in double.
double half_value(unsigned bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31);
  const double m = bits & 1023, sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
  if (exponent == 31) return m != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(m, -24) : std::ldexp(m + 1024, exponent - 25));
}

}  // namespace

TEST_CASE("all 65536 f16 values: decoded by the definition, and unchanged by a round trip") {
  for (unsigned b = 0; b < 65536; ++b) {
    const __half h = __ushort_as_half(static_cast<unsigned short>(b));
    const float f = __half2float(h);
    const double expected = half_value(b);
    if (expected != expected) {
      REQUIRE(std::isnan(f));
      REQUIRE(__hisnan(__float2half_rn(f)));
    } else {
      REQUIRE(static_cast<double>(f) == expected);
      REQUIRE(__half_as_ushort(__float2half_rn(f)) == b);
    }
  }
}

TEST_CASE("f32 to f16 rounds to nearest, ties to even, between all neighbours") {
  for (unsigned b = 0; b < 0x7c00; ++b) {
    const double lo = half_value(b), hi = b == 0x7bff ? 65536.0 : half_value(b + 1);
    const auto middle = static_cast<float>((lo + hi) / 2);  // exact: f32 has bits to spare
    const unsigned even = b % 2 == 0 ? b : b + 1;
    REQUIRE(__half_as_ushort(__float2half_rn(middle)) == even);
    REQUIRE(__half_as_ushort(__float2half_rn(std::nextafter(middle, 0.0f))) == b);
    REQUIRE(__half_as_ushort(__float2half_rn(std::nextafter(middle, 1e9f))) == b + 1);
    REQUIRE(__half_as_ushort(__float2half_rn(-middle)) == (even | 0x8000u));
    REQUIRE(__half_as_ushort(__double2half((lo + hi) / 2 * (1 + 0x1p-50))) == b + 1);  // f32 cannot see this
  }
}

TEST_CASE("bf16 rounds to nearest even and keeps every value") {
  for (unsigned b = 0; b < 65536; ++b) {
    const float f = __bfloat162float(__ushort_as_bfloat16(static_cast<unsigned short>(b)));
    if (std::isnan(f)) {
      REQUIRE(std::isnan(__bfloat162float(__float2bfloat16(f))));
      continue;
    }
    REQUIRE(__float_as_uint(f) == b << 16);
    REQUIRE(__bfloat16_as_ushort(__float2bfloat16(f)) == b);
    if (std::isinf(f)) continue;
    const unsigned tie = b << 16 | 0x8000u;
    REQUIRE(__bfloat16_as_ushort(__float2bfloat16(__uint_as_float(tie))) == (b % 2 == 0 ? b : b + 1));
    REQUIRE(__bfloat16_as_ushort(__float2bfloat16(__uint_as_float(tie + 1))) == b + 1);
    REQUIRE(__bfloat16_as_ushort(__float2bfloat16(__uint_as_float(tie - 1))) == b);
  }
}

TEST_CASE("f16 arithmetic rounds once") {
  const auto h = [](float f) { return __float2half(f); };
  CHECK(__half2float(h(2048.0f) + h(1.0f)) == 2048.0f);  // a tie, to even
  CHECK(__half2float(h(2050.0f) + h(1.0f)) == 2052.0f);
  CHECK(__half2float(h(3.0f) * h(0.5f)) == 1.5f);
  CHECK(__half2float(h(1.0f) / h(3.0f)) == 0x1.554p-2f);
  // 1.0009765625^2 = 1.00195407867431640625; minus 1.001953125 leaves 2^-20, which two roundings would lose.
  CHECK(__half2float(__hfma(h(1.0009765625f), h(1.0009765625f), h(-1.001953125f))) == 0x1p-20f);
  // 2048 + 1 + 2^-20 is above the tie; rounded to f32 first it would be the tie 2049.
  CHECK(__half2float(__hfma(h(1.0f + 0x1p-10f), h(1.0f), h(2048.0f))) == 2050.0f);
  CHECK(__half2float(__hmax(h(NAN), h(2.0f))) == 2.0f);
  const __half2 v = __hfma2(__half2(h(1), h(2)), __half2(h(3), h(4)), __half2(h(5), h(6)));
  CHECK(__low2float(v) == 8.0f);
  CHECK(__high2float(v) == 14.0f);
}

// --- What goes wrong --------------------------------------------------------------------------------------------

int line_of_lonely_barrier = 0;

__global__ void lonely_barrier(int* out, int who) {
  __shared__ int x;
  if (static_cast<int>(threadIdx.x) == who) {
    out[0] = 1;
    return;
  }
  x = 1;
  line_of_lonely_barrier = __LINE__ + 1;
  __syncthreads();
  out[1] = x;
}

TEST_CASE("a thread that returns before a barrier is reported, with the barrier's line") {
  Stream s;
  Buffer<int> out(2);
  const Status r = launch(lonely_barrier, dim3(3, 2), dim3(64), 0, s, out.data(), 5);
  REQUIRE(!r.ok());
  INFO(r.message());
  CHECK(contains(r.message(), "lonely_barrier: block (0,0,0)"));
  CHECK(contains(r.message(), "63 threads"));
  CHECK(contains(r.message(), "at __syncthreads"));
  CHECK(contains(r.message(), line_text(line_of_lonely_barrier)));
  CHECK(contains(r.message(), "thread (5,0,0) returned from the kernel"));
  // And the machine is none the worse for it.
  require(launch(lonely_barrier, dim3(3, 2), dim3(64), 0, s, out.data(), -1));
}

__global__ void two_barriers(int* out) {
  if (threadIdx.x % 2 == 0) {
    out[0] = 1;
    __syncthreads();
  } else {
    out[1] = 1;
    __syncthreads();
  }
  out[2] = 1;
}

TEST_CASE("threads that meet at different barriers are reported") {
  Stream s;
  Buffer<int> out(3);
  const Status r = launch(two_barriers, dim3(1), dim3(64), 0, s, out.data());
  REQUIRE(!r.ok());
  INFO(r.message());
  CHECK(contains(r.message(), "different barriers"));
  CHECK(contains(r.message(), "32 threads"));
}

__global__ void missing_lane(int* out) {
  const unsigned lane = threadIdx.x;
  int v = 1;
  if (lane != 7) v = __shfl_xor_sync(kAll, v, 1);
  __syncthreads();
  out[lane] = v;
}

TEST_CASE("a lane that a collective's mask names but that waits elsewhere is reported") {
  Stream s;
  Buffer<int> out(32);
  const Status r = launch(missing_lane, dim3(1), dim3(32), 0, s, out.data());
  REQUIRE(!r.ok());
  INFO(r.message());
  CHECK(contains(r.message(), "31 threads"));
  CHECK(contains(r.message(), "in __shfl_xor_sync"));
  CHECK(contains(r.message(), "mask 0xffffffff"));
  CHECK(contains(r.message(), "thread (7,0,0) at __syncthreads"));
}

__global__ void outside_mask(unsigned* out) { out[threadIdx.x] = __ballot_sync(0x0fffffffu, 1); }

__global__ void different_masks(unsigned* out) {
  out[threadIdx.x] = __ballot_sync(threadIdx.x < 16 ? 0xffffffffu : 0xffff0000u, 1);
  __syncthreads();
}

__global__ void bad_width(int* out) { out[0] = __shfl_sync(kAll, 1, 0, 12); }

TEST_CASE("masks that cannot be met and widths that do not exist are reported") {
  Stream s;
  Buffer<unsigned> out(32);
  Status r = launch(outside_mask, dim3(1), dim3(32), 0, s, out.data());
  REQUIRE(!r.ok());
  INFO(r.message());
  CHECK(contains(r.message(), "thread (28,0,0)"));
  CHECK(contains(r.message(), "does not name the calling lane 28"));
  r = launch(different_masks, dim3(1), dim3(32), 0, s, out.data());
  REQUIRE(!r.ok());
  INFO(r.message());
  CHECK(contains(r.message(), "16 threads, (0,0,0) to (15,0,0) in __ballot_sync"));
  Buffer<int> other(32);
  r = launch(bad_width, dim3(1), dim3(32), 0, s, other.data());
  REQUIRE(!r.ok());
  CHECK(contains(r.message(), "width 12"));
}

__global__ void throws(int which) {
  if (static_cast<int>(blockIdx.x) == which && threadIdx.x == 3) throw std::runtime_error("did not converge");
}

__global__ void traps() {
  if (threadIdx.x == 2) __trap();
}

TEST_CASE("an exception or a trap in a kernel is the launch's error; the first block's is the one reported") {
  Stream s;
  Status r = launch(throws, dim3(100), dim3(32), 0, s, 41);
  CHECK(r.message() == "throws: block (41,0,0) thread (3,0,0): exception: did not converge");
  require(launch(throws, dim3(100), dim3(32), 0, s, 100));
  r = launch(traps, dim3(100), dim3(32), 0, s);
  REQUIRE(!r.ok());
  INFO(r.message());
  CHECK(contains(r.message(), "traps: block (0,0,0) thread (2,0,0): __trap() at "));
}

__global__ void far_write(float* p, long long i) { p[i] = 1.0f; }

int recurse(volatile int* p, int depth);
int (*volatile recurse_again)(volatile int*, int) = recurse;  // or the compiler makes a loop of it
int recurse(volatile int* p, int depth) {
  volatile char frame[4096];
  frame[depth * 13 % 4096] = 1;
  return depth == 0 ? *p : recurse_again(p, depth - 1) + frame[depth * 13 % 4096];
}
__global__ void deep(int* out, int depth) { out[0] = recurse(out, depth); }

TEST_CASE("memory faults become errors: far out of bounds, no device memory, stack overflow") {
  Stream s;
  Buffer<float> weights(1000, "weights");
  Status r = launch(far_write, dim3(1), dim3(1), 0, s, weights.data(), 1100LL);
  REQUIRE(!r.ok());
  INFO(r.message());
  CHECK(contains(r.message(), "out of bounds: an access 400 bytes past the end of 'weights' (4000 bytes)"));
  r = launch(far_write, dim3(1), dim3(1), 0, s, static_cast<float*>(nullptr), 2LL);
  REQUIRE(!r.ok());
  CHECK(contains(r.message(), "address 0x8, which is no device memory"));
  Buffer<int> out(1);
  out.fill_bytes(0);
  require(launch(deep, dim3(1), dim3(1), 0, s, out.data(), 10));
  r = launch(deep, dim3(1), dim3(1), 0, s, out.data(), 100);
  REQUIRE(!r.ok());
  CHECK(contains(r.message(), "stack of 131072 bytes overflowed"));
  require(launch(deep, dim3(1), dim3(1), 0, s, out.data(), 10));
}

__global__ void nothing() {}

__global__ void large_static(float* out) {
  __shared__ float tile[12 * 1024];
  tile[threadIdx.x] = 1;
  out[threadIdx.x] = tile[threadIdx.x];
}

TEST_CASE("launches beyond the device's limits are refused, with the limit") {
  Stream s;
  const auto message = [&](dim3 grid, dim3 block, std::size_t shared) {
    return launch(nothing, grid, block, shared, s).message();
  };
  CHECK(message(dim3(1), dim3(1024), 0).empty());
  CHECK(message(dim3(1), dim3(1), 227 * 1024).empty());
  CHECK(contains(message(dim3(1), dim3(1025), 0), "1025 threads; allowed are 1024"));
  CHECK(contains(message(dim3(1), dim3(1, 1, 65), 0), "at most (1024,1024,64)"));
  CHECK(contains(message(dim3(1), dim3(0), 0), "has no threads"));
  CHECK(contains(message(dim3(0), dim3(1), 0), "has no blocks"));
  CHECK(contains(message(dim3(1, 65536), dim3(1), 0), "is beyond"));
  CHECK(contains(message(dim3(1), dim3(1), 227 * 1024 + 1),
                 "dynamic bytes of shared memory; allowed are 232448"));
  emu::use_device_model("nvidia-geforce-rtx-4090");
  CHECK(contains(message(dim3(1), dim3(1), 227 * 1024),
                 "allowed are 101376 (limits of NVIDIA GeForce RTX 4090"));
  emu::use_device_model("nvidia-h200");
  CHECK_THROWS_WITH_AS(emu::use_device_model("h300"),
                       doctest::Contains("no device model 'h300'; known: nvidia-h200"), DeviceError);
  Buffer<float> out(32);
  require(launch(large_static, dim3(1), dim3(32), 180 * 1024 - 1024, s, out.data()));
  CHECK(contains(launch(large_static, dim3(1), dim3(32), 180 * 1024, s, out.data()).message(),
                 "49152 static and 184320 dynamic bytes"));
  CHECK(contains(launch(LaunchOptions{.cooperative = true}, nothing, dim3(1), dim3(1), 0, s).message(),
                 "needs a GPU"));
}

TEST_CASE("the device models agree with data/devices") {
  for (const emu::DeviceModel& m : emu::device_models()) {
    const auto file = std::filesystem::path(__FILE__).parent_path() / "../../data/devices" /
                      (std::string(m.slug) + ".json");
    std::ifstream in(file);
    INFO(file.string());
    REQUIRE(in.good());
    const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    const auto has = [&](const char* key, std::size_t value) {
      return contains(text, "\"" + std::string(key) + "\": " + std::to_string(value) + ",");
    };
    CHECK(contains(text, "\"name\": \"" + std::string(m.name) + "\""));
    CHECK(contains(
        text, "\"compute_capability\": \"" + std::to_string(m.cc_major) + "." + std::to_string(m.cc_minor)));
    CHECK(has("sms", static_cast<std::size_t>(m.sms)));
    CHECK(has("l2_bytes", m.l2_bytes));
    CHECK(has("shared_bytes_per_block_optin", m.shared_per_block_optin));
    CHECK(has("shared_bytes_per_sm", m.shared_per_sm));
    CHECK(has("max_threads_per_sm", static_cast<std::size_t>(m.max_threads_per_sm)));
    CHECK(has("registers_per_sm", static_cast<std::size_t>(m.registers_per_sm)));
    CHECK(has("warp_size", emu::kWarpSize));
    CHECK(has("shared_banks", emu::kBanks));
  }
}

__global__ void gather(unsigned* out) {
  const unsigned mine[2] = {threadIdx.x * 10, threadIdx.x + 1000};
  unsigned all[32][2];
  emu::warp_gather(mine, all, sizeof mine, emu::Instruction::mma_s8);
  unsigned sum = 0;
  for (unsigned i = 0; i < 32; ++i) sum += (i + 1) * (all[i][0] + all[i][1]);
  out[threadIdx.x] = sum;
}

TEST_CASE("an emulated warp-wide instruction sees the operands of all lanes") {
  Stream s;
  Buffer<unsigned> out(64);
  require(launch(gather, dim3(1), dim3(64), 0, s, out.data()));
  const auto r = download(out);
  for (unsigned t = 0; t < 64; ++t) {
    unsigned sum = 0;
    for (unsigned i = 0; i < 32; ++i) sum += (i + 1) * (11 * (t / 32 * 32 + i) + 1000);
    REQUIRE(r[t] == sum);
  }
}

// --- The seam ---------------------------------------------------------------------------------------------------

__global__ void add_one(int* p) { p[threadIdx.x] += 1; }

TEST_CASE("a graph records launches and replays them; nothing runs while it records") {
  Stream s;
  Buffer<int> b(8);
  b.fill_bytes(0);
  Graph g = Graph::capture(s, [&](Stream& st) -> Status {
    for (int i = 0; i < 3; ++i) {
      if (Status r = launch(add_one, dim3(1), dim3(8), 0, st, b.data()); !r.ok()) return r;
    }
    return {};
  });
  CHECK(download(b)[5] == 0);
  g.launch(s);
  g.launch(s);
  CHECK(download(b)[5] == 6);
  CHECK_THROWS_WITH_AS(Graph::capture(s, [](Stream&) { return Status::error("no"); }), "no", DeviceError);
  require(launch(add_one, dim3(1), dim3(8), 0, s, b.data()));  // the stream no longer records
  CHECK(download(b)[5] == 7);
}

TEST_CASE("buffers refuse copies that do not fit, and move") {
  Buffer<int> b(4), c(8);
  std::vector<int> five(5);
  CHECK_THROWS_AS(b.upload(five), DeviceError);
  CHECK_THROWS_AS(b.download(five), DeviceError);
  CHECK_THROWS_AS(b.copy_from(c, 5), DeviceError);
  c.upload(std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8});
  b.copy_from(c, 4);
  Buffer<int> d = std::move(b);
  CHECK(d.size() == 4);
  CHECK(download(d)[3] == 4);
  CHECK(b.data() == nullptr);  // NOLINT(bugprone-use-after-move): what is left is the point
  CHECK(reinterpret_cast<std::uintptr_t>(c.data()) % 256 == 0);
  const DeviceInfo info = device_info();
  CHECK(info.executor == Executor::emulator);
  CHECK(info.slug == "emulator-nvidia-h200");
  CHECK(info.sms == 132);
}
