// Counts and checks. Every expected number is worked out by hand in the comment or the test's name. Compiled with
// the flags of kernel sources.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"

using namespace ladder;
using emu::Access;
using emu::Check;
using emu::Counters;
using emu::Counts;
using emu::GlobalCounts;
using emu::SharedCounts;

namespace {

constexpr unsigned kAll = 0xffffffffu;
Stream stream;

std::string place(int line) { return "test_counters.cpp:" + std::to_string(line); }
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// A buffer of `n` elements that the host has written.
template <class T>
Buffer<T> filled(std::size_t n, const char* name) {
  Buffer<T> b(n, name);
  b.fill_bytes(0);
  return b;
}

/// Counts one launch that must be faultless.
template <class... Params, class... Args>
Counters counted(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared, Args&&... args) {
  const emu::counting on;
  const Status s = launch(kernel, grid, block, shared, stream, std::forward<Args>(args)...);
  INFO(s.message());
  REQUIRE(s.ok());
  return emu::last_launch();
}

/// Counts one launch in which something must be found.
template <class... Params, class... Args>
Counters faulty(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared, Args&&... args) {
  const emu::counting on;
  const Status s = launch(kernel, grid, block, shared, stream, std::forward<Args>(args)...);
  REQUIRE(!s.ok());
  Counters c = emu::last_launch();
  REQUIRE(!c.findings.empty());
  CHECK(contains(s.message(), c.findings[0].text));
  return c;
}

}  // namespace

// --- Sectors of one request -------------------------------------------------------------------------------------

/// Every thread loads one T, `stride` elements from its neighbour, after `offset` elements.
template <class T>
__global__ void strided_load(const T* in, T* out, int stride, int offset) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const T v = in[static_cast<long long>(i) * stride + offset];
  out[i] = v;
}

template <class T>
GlobalCounts loads_of(int stride, int offset = 0, unsigned threads = 32) {
  const Buffer<T> in = filled<T>(threads * static_cast<std::size_t>(std::abs(stride) + 1) + 64, "in");
  Buffer<T> out(threads, "out");
  if (stride < 0) offset += static_cast<int>(threads - 1) * -stride;
  const Counters c =
      counted(strided_load<T>, dim3(1), dim3(threads), 0, in.data(), out.data(), stride, offset);
  CHECK(c.total.stores().requests == (threads + 31) / 32);
  return c.of_buffer("in", Access::read);
}

TEST_CASE("one row a lane, as a scalar GEMV has it: 32 sectors where 4 would do") {
  const GlobalCounts g = loads_of<float>(4864);
  CHECK(g.requests == 1);
  CHECK(g.lanes == 32);
  CHECK(g.bytes == 128);
  CHECK(g.sectors == 32);
  CHECK(g.ideal_sectors == 4);
  CHECK(g.sectors_per_request() == 32.0);
}

TEST_CASE("neighbouring lanes, neighbouring elements") {
  CHECK(loads_of<float>(1).sectors == 4);    // 128 bytes
  CHECK(loads_of<float2>(1).sectors == 8);   // 256
  CHECK(loads_of<float4>(1).sectors == 16);  // 512
  CHECK(loads_of<float4>(1).requests == 1);
  CHECK(loads_of<float4>(1).bytes == 512);
  CHECK(loads_of<float4>(1).ideal_sectors == 16);
  CHECK(loads_of<unsigned char>(1).sectors == 1);
  CHECK(loads_of<short>(1).sectors == 2);
  CHECK(loads_of<double>(1).sectors == 8);
  CHECK(loads_of<uchar4>(1).sectors == 4);
}

TEST_CASE("strides, offsets, broadcasts, and warps that are not full") {
  CHECK(loads_of<float>(2).sectors == 8);  // every second float: 256 bytes touched
  CHECK(loads_of<float>(2).ideal_sectors == 4);
  CHECK(loads_of<float>(8).sectors == 32);    // one float of each sector
  CHECK(loads_of<float>(1, 1).sectors == 5);  // 128 bytes that start 4 bytes into a sector
  CHECK(loads_of<float>(1, 8).sectors == 4);  // one sector further: aligned again
  CHECK(loads_of<float>(-1).sectors == 4);    // the order of lanes does not matter
  CHECK(loads_of<float>(0).sectors == 1);     // all lanes the same word
  CHECK(loads_of<float>(0).ideal_sectors == 1);
  CHECK(loads_of<float>(0).bytes == 128);        // asked for, though the same
  CHECK(loads_of<float4>(2).sectors == 32);      // 16 of every 32 bytes
  CHECK(loads_of<float>(1, 0, 5).sectors == 1);  // 20 bytes
  CHECK(loads_of<float>(1, 0, 5).lanes == 5);
  CHECK(loads_of<float>(1, 0, 40).requests == 2);  // a full warp and one of eight lanes
  CHECK(loads_of<float>(1, 0, 40).sectors == 5);
  CHECK(loads_of<float>(4864, 0, 256).sectors == 256);
}

#if !defined(__clang__) || \
    __clang_major__ >= 15                // before, clang copies structures by a memcpy that cannot be seen
constexpr int kCopyLine = __LINE__ + 8;  // the load; the store is on the next line
__global__ void copy_struct(const uint4* in, uint4* out, const int* index) {
  struct Bytes18 {
    unsigned short h[9];
  };
  const unsigned i = threadIdx.x;
  const int k = index[i];
  // A structure of 18 bytes, aligned to 2: nine 2-byte accesses.
  const Bytes18 b = reinterpret_cast<const Bytes18*>(in)[k];
  reinterpret_cast<Bytes18*>(out)[k] = b;
}

TEST_CASE("a structure that is not a vector type is copied in pieces of its alignment") {
  const Buffer<uint4> in = filled<uint4>(64, "in");
  Buffer<uint4> out(64, "out");
  std::vector<int> order(32);
  std::iota(order.begin(), order.end(), 0);
  Buffer<int> index(32, "index");
  index.upload(order);
  const Counters c = counted(copy_struct, dim3(1), dim3(32), 0, in.data(), out.data(), index.data());
  const GlobalCounts g = c.of_buffer("in", Access::read);
  CHECK(g.requests == 9);
  CHECK(g.bytes == 32 * 18);
  CHECK(c.of_buffer("out", Access::write).requests == 9);
  CHECK(c.of_buffer("index", Access::read).requests == 1);
  CHECK(c.at(place(kCopyLine)).loads().requests == 9);
  // Lanes are 18 bytes apart: 576 bytes are touched, 18 sectors, each by one or two lanes of each piece.
  CHECK(g.sectors >= 9 * 17);
  CHECK(g.sectors <= 9 * 18);
}

#endif

constexpr int kSumLine = __LINE__ + 4;
__global__ void row_sum(const float* in, float* out, int n) {
  float sum = 0;
  const float* row = in + static_cast<long long>(threadIdx.x) * n;
  for (int i = 0; i < n; ++i) sum += row[i];
  out[threadIdx.x] = sum;
}

TEST_CASE("lines: every trip of a loop is a request of its line") {
  const Buffer<float> in = filled<float>(32 * 100, "in");
  Buffer<float> out(32, "out");
  const Counters c = counted(row_sum, dim3(1), dim3(32), 0, in.data(), out.data(), 100);
  const Counts loop = c.at(place(kSumLine));
  CHECK(loop.loads().requests == 100);
  CHECK(loop.loads().sectors == 3200);
  CHECK(loop.stores().requests == 0);
  CHECK(c.at(place(kSumLine + 1)).stores().requests == 1);
  CHECK(c.at(place(kSumLine + 1)).stores().sectors == 4);
  CHECK(c.at("other_test_counters.cpp:1").loads().requests == 0);
  // Rows are 400 bytes: 12.5 sectors. Two rows share a sector in the middle, so 32 rows lie in 400 sectors.
  CHECK(c.unique_sectors_read() == 400);
  CHECK(c.unique_sectors_written() == 4);
  CHECK(c.kernel == "row_sum");
}

// --- The L1 model -----------------------------------------------------------------------------------------------

__global__ void read_twice(const float* in, float* out, int n) {
  float sum = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) sum += in[i];
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

TEST_CASE("the L1 model: what fits is fetched once a block, what does not is fetched each time") {
  // One block on an H200: 256 KiB less the 1 KiB that the system takes of shared memory.
  constexpr int kFits = 32 * 1024, kTooMuch = 128 * 1024;  // floats: 128 KiB, 512 KiB
  const Buffer<float> in = filled<float>(kTooMuch, "in");
  Buffer<float> out(1024, "out");
  Counters c = counted(read_twice, dim3(1), dim3(32), 0, in.data(), out.data(), kFits);
  CHECK(c.l1_bytes == 255 * 1024);
  CHECK(c.of_buffer("in", Access::read).sectors == 2 * kFits / 8);
  CHECK(c.of_buffer("in", Access::read).l1_sectors == kFits / 8);
  c = counted(read_twice, dim3(1), dim3(32), 0, in.data(), out.data(), kTooMuch);
  // Round and round through more than the capacity, the oldest line is always the one needed next.
  CHECK(c.of_buffer("in", Access::read).l1_sectors == 2 * kTooMuch / 8);
  CHECK(c.of_buffer("out", Access::write).l1_sectors == 4);
  // Two blocks, on two SMs: each has its own.
  c = counted(read_twice, dim3(2), dim3(32), 0, in.data(), out.data(), kFits);
  CHECK(c.of_buffer("in", Access::read).l1_sectors == 2 * kFits / 8);
  CHECK(c.unique_sectors_read() == kFits / 8);
  // 264 blocks on 132 SMs: two share the array, which loses 1 KiB and their shared memory to each.
  Buffer<float> wide(264 * 32, "wide");
  c = counted(read_twice, dim3(264), dim3(32), 8 * 1024, in.data(), wide.data(), 1024);
  CHECK(c.l1_bytes == (256 - 2 * 9) / 2 * 1024);
}

// --- Lining up lanes --------------------------------------------------------------------------------------------

constexpr int kInnerLine = __LINE__ + 7;
__global__ void uneven_loops(const float* in, float* out, int outer) {
  const int lane = static_cast<int>(threadIdx.x);
  float sum = 0;
  for (int k = 0; k < outer; ++k) {
    // Lane i makes i trips. Those that are through wait behind the loop for the others.
    for (int i = 0; i < lane; ++i) {
      sum += in[32 * i + lane];
    }
    out[32 * k + lane] = sum;
  }
}

TEST_CASE(
    "loops with different trip counts: as many requests as the longest, and together again behind them") {
  const Buffer<float> in = filled<float>(1024, "in");
  Buffer<float> out(32 * 20, "out");
  const Counters c = counted(uneven_loops, dim3(1), dim3(32), 0, in.data(), out.data(), 20);
  const GlobalCounts inner = c.at(place(kInnerLine)).loads();
  CHECK(inner.requests == 20 * 31);
  CHECK(inner.lanes == 20 * 496);  // 0 + 1 + ... + 31
  const GlobalCounts after = c.at(place(kInnerLine + 2)).stores();
  CHECK(after.requests == 20);
  CHECK(after.lanes == 20 * 32);
  CHECK(after.sectors == 20 * 4);
  // Lane 0 does not enter the loop, and in trip k lane k leaves, until lane 31 is alone: 31 times the lanes part.
  CHECK(c.total.control.divergent_branches == 20 * 31);
}

constexpr int kArmLine = __LINE__ + 5;
__global__ void two_arms(const float* in, float* out) {
  const unsigned i = threadIdx.x;
  float v;
  if (i % 4 == 0) {
    v = in[i] * 2.0f;
    out[i + 64] = v;
  } else {
    v = in[i + 32] + 1.0f;
    out[i + 96] = v;
  }
  out[i] = v;
}

TEST_CASE("two arms of a branch are two requests, and one behind it") {
  const Buffer<float> in = filled<float>(128, "in");
  Buffer<float> out(160, "out");
  const Counters c = counted(two_arms, dim3(1), dim3(64), 0, in.data(), out.data());
  CHECK(c.at(place(kArmLine)).loads().requests == 2);  // two warps
  CHECK(c.at(place(kArmLine)).loads().lanes == 16);
  CHECK(c.at(place(kArmLine + 3)).loads().requests == 2);
  CHECK(c.at(place(kArmLine + 3)).loads().lanes == 48);
  CHECK(c.at(place(kArmLine + 6)).stores().requests == 2);
  CHECK(c.at(place(kArmLine + 6)).stores().lanes == 64);
  CHECK(c.total.control.divergent_branches == 2);
  CHECK(c.total.control.active_lanes() < 32.0);
  CHECK(c.total.control.active_lanes() > 16.0);
}

__global__ void whole_warps_part(const float* in, float* out) {
  const unsigned i = threadIdx.x;
  if (i < 32) {
    out[i] = in[i];
  } else {
    out[i] = in[i] + in[i + 1];
  }
}

TEST_CASE("a branch that whole warps take together does not diverge") {
  const Buffer<float> in = filled<float>(128, "in");
  Buffer<float> out(64, "out");
  const Counters c = counted(whole_warps_part, dim3(1), dim3(64), 0, in.data(), out.data());
  CHECK(c.total.control.divergent_branches == 0);
  CHECK(c.total.control.active_lanes() == 32.0);
}

[[gnu::noinline]] __device__ float called(const float* p, int n) {
  float s = 0;
  for (int i = 0; i < n; ++i) s += p[i];
  return s;
}
constexpr int kCallLine = __LINE__ + 4;
__global__ void calls(const float* in, float* out) {
  const int lane = static_cast<int>(threadIdx.x);
  float v = 0;
  if (lane % 2 == 0) v = called(in + lane, 3);
  v += in[lane];
  v += called(in, lane / 16 + 1);
  out[lane] = v;
}

TEST_CASE("functions that are not inlined: the place of the call decides who is behind") {
  const Buffer<float> in = filled<float>(128, "in");
  Buffer<float> out(32, "out");
  const Counters c = counted(calls, dim3(1), dim3(32), 0, in.data(), out.data());
  CHECK(c.at(place(kCallLine + 1)).loads().requests == 1);  // even and odd lanes are together here
  CHECK(c.at(place(kCallLine + 1)).loads().lanes == 32);
  CHECK(c.at(place(kCallLine - 7)).loads().requests == 3 + 2);
  CHECK(c.at(place(kCallLine - 7)).loads().lanes == 16 * 3 + 32 + 16);
}

__global__ void collectives_and_barriers(const float* in, float* out) {
  __shared__ float part[8];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float v = in[threadIdx.x];
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(kAll, v, d);
  if (lane == 0) part[warp] = v;
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0;
    for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += part[w];
    out[blockIdx.x] = sum;
  }
}

TEST_CASE("barriers are counted for each block, collectives for each warp") {
  const Buffer<float> in = filled<float>(256, "in");
  Buffer<float> out(3, "out");
  const Counters c = counted(collectives_and_barriers, dim3(3), dim3(256), 0, in.data(), out.data());
  CHECK(c.total.barriers == 3);
  CHECK(c.total.collectives == 3 * 8 * 5);
  CHECK(c.static_shared_bytes == 32);
  CHECK(c.findings.empty());
}

// --- Banks ------------------------------------------------------------------------------------------------------

/// Every thread stores, waits, and loads one T of shared memory, `stride` elements apart.
template <class T>
__global__ void banks(T* out, int stride) {
  T* tile = dynamic_shared<T>();
  const int i = static_cast<int>(threadIdx.x);
  if (stride != 0 || i == 0) tile[i * stride] = T{};
  __syncthreads();
  const T v = tile[i * stride];
  out[i] = v;
}

template <class T>
SharedCounts bank_loads(int stride, unsigned threads = 32) {
  Buffer<T> out(threads, "out");
  const std::size_t bytes = threads * static_cast<std::size_t>(stride + 1) * sizeof(T);
  return counted(banks<T>, dim3(1), dim3(threads), bytes, out.data(), stride).total.shared[0];
}

TEST_CASE("4-byte accesses: the whole warp in one pass, unless a bank is asked for two words") {
  CHECK(bank_loads<float>(1).passes == 1);
  CHECK(bank_loads<float>(1).conflicts() == 0);
  CHECK(bank_loads<float>(0).passes == 1);  // one word for all: a broadcast
  CHECK(bank_loads<float>(2).passes == 2);  // 16 banks, two words each
  CHECK(bank_loads<float>(2).conflicts() == 1);
  CHECK(bank_loads<float>(3).passes == 1);  // odd strides visit all banks
  CHECK(bank_loads<float>(8).passes == 8);
  CHECK(bank_loads<float>(32).passes == 32);        // a column of a 32-wide tile
  CHECK(bank_loads<float>(33).passes == 1);         // the same, padded
  CHECK(bank_loads<unsigned char>(1).passes == 1);  // four lanes share a word
  CHECK(bank_loads<short>(2).passes == 1);
  CHECK(bank_loads<float>(1, 64).requests == 2);
  CHECK(bank_loads<float>(1, 64).passes == 2);
  CHECK(bank_loads<float>(1).bytes == 128);
}

TEST_CASE("8-byte accesses are served for half-warps, 16-byte ones for quarter-warps") {
  CHECK(bank_loads<float2>(1).passes == 2);  // 16 lanes x 8 bytes = 128 bytes, twice
  CHECK(bank_loads<float2>(1).conflicts() == 0);
  CHECK(bank_loads<float2>(2).passes == 4);  // 16 bytes apart: 16 lanes reach over 256 bytes
  CHECK(bank_loads<float2>(0).passes == 2);
  CHECK(bank_loads<float4>(1).passes == 4);
  CHECK(bank_loads<float4>(1).ideal_passes == 4);
  CHECK(bank_loads<float4>(2).passes == 8);
  CHECK(bank_loads<float4>(8).passes == 32);  // 128 bytes apart: all on the same four banks
  CHECK(bank_loads<float4>(9).passes == 4);   // padded by 16 bytes: conflict-free
  CHECK(bank_loads<float4>(1, 8).passes == 1);
}

__global__ void shared_atomics(int* out) {
  __shared__ int cell[32];
  const unsigned i = threadIdx.x;
  cell[i] = 0;
  __syncthreads();
  atomicAdd(&cell[0], 1);
  atomicAdd(&cell[i], 1);
  __syncthreads();
  out[i] = cell[i];
}

TEST_CASE("atomics on one word of shared memory take a pass each") {
  Buffer<int> out(32, "out");
  const Counters c = counted(shared_atomics, dim3(1), dim3(32), 0, out.data());
  CHECK(c.total.shared[2].requests == 2);
  CHECK(c.total.shared[2].passes == 32 + 1);
}

// --- Other counts -----------------------------------------------------------------------------------------------

__global__ void dots(const int* in, int* out) {
  const unsigned i = threadIdx.x;
  int sum = 0;
  for (int k = 0; k < 5; ++k) sum = __dp4a(in[i], in[i + 1], sum);
  out[i] = sum + static_cast<int>(__fmaf_rn(2.0f, 3.0f, 1.0f));
}

__global__ void add_all(unsigned* counter) { atomicAdd(counter, 1u); }

TEST_CASE("instructions with a name, and atomics") {
  const Buffer<int> in = filled<int>(65, "in");
  Buffer<int> out(64, "out");
  Counters c = counted(dots, dim3(1), dim3(64), 0, in.data(), out.data());
  CHECK(c.total.instructions[static_cast<std::size_t>(emu::Instruction::dp4a)] == 5 * 64);
  CHECK(c.total.instructions[static_cast<std::size_t>(emu::Instruction::fma_f32)] == 64);
  Buffer<unsigned> counter = filled<unsigned>(1, "counter");
  c = counted(add_all, dim3(10), dim3(64), 0, counter.data());
  CHECK(c.total.atomics().requests == 20);
  CHECK(c.total.atomics().lanes == 640);
  CHECK(c.total.atomics().sectors == 20);
  CHECK(c.unique_sectors_read() == 1);
  CHECK(c.unique_sectors_written() == 1);
  std::vector<unsigned> v(1);
  counter.download(v);
  CHECK(v[0] == 640);
}

TEST_CASE("occupancy on an H200") {
  // 64 warps, 32 block slots, 228 KiB of shared memory of which each block costs 1 KiB more than it asks for.
  CHECK(emu::occupancy(256, 0).blocks_per_sm == 8);
  CHECK(std::string(emu::occupancy(256, 0).limited_by) == "threads");
  CHECK(emu::occupancy(256, 0).fraction() == 1.0);
  CHECK(emu::occupancy(32, 0).blocks_per_sm == 32);
  CHECK(std::string(emu::occupancy(32, 0).limited_by) == "block slots");
  CHECK(emu::occupancy(32, 0).fraction() == 0.5);
  CHECK(emu::occupancy(256, 100 * 1024).blocks_per_sm == 2);
  CHECK(std::string(emu::occupancy(256, 100 * 1024).limited_by) == "shared memory");
  CHECK(emu::occupancy(33, 0).blocks_per_sm == 32);       // two warps
  CHECK(emu::occupancy(256, 0, 255).blocks_per_sm == 1);  // 8192 registers a warp: eight warps
  CHECK(std::string(emu::occupancy(256, 0, 255).limited_by) == "registers");
  CHECK(emu::occupancy(256, 0, 32).blocks_per_sm == 8);
}

// --- Checks: global memory --------------------------------------------------------------------------------------

constexpr int kPastLine = __LINE__ + 3;
__global__ void one_past(const float* in, float* out, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i <= n) out[i] = in[i];
}

TEST_CASE("out of bounds by one element, with block, thread, line and buffer") {
  const Buffer<float> in = filled<float>(100, "weights");
  Buffer<float> out(128, "out");
  const Counters c = faulty(one_past, dim3(2), dim3(64), 0, in.data(), out.data(), 100);
  const emu::Finding& f = c.findings[0];
  INFO(f.text);
  CHECK(f.check == Check::out_of_bounds);
  CHECK(contains(f.text, "block (1,0,0) thread (36,0,0)"));
  CHECK(contains(f.text, "reads 4 bytes 0 bytes past the end of 'weights' (400 bytes)"));
  CHECK(contains(f.text, place(kPastLine)));
  CHECK(f.line.line == kPastLine);
}

__global__ void before_start(float* out) { out[static_cast<int>(threadIdx.x) - 1] = 1.0f; }
__global__ void straddle(const unsigned char* in, int* out) {
  unsigned char copy[6];
  std::memcpy(copy, in, sizeof copy);
  out[0] = copy[0] + copy[5];
}
__global__ void null_read(const int* in, int* out) { out[0] = in[3]; }

TEST_CASE("out of bounds before the start, across the end, and nowhere at all") {
  Buffer<float> out(32, "out");
  Counters c = faulty(before_start, dim3(1), dim3(32), 0, out.data());
  CHECK(c.findings[0].check == Check::out_of_bounds);
  CHECK(contains(c.findings[0].text, "writes 4 bytes 4 bytes before 'out'"));
  const Buffer<unsigned char> bytes = filled<unsigned char>(5, "bytes");
  Buffer<int> one(1, "one");
  c = faulty(straddle, dim3(1), dim3(1), 0, bytes.data(), one.data());
  INFO(c.findings[0].text);
  CHECK(c.findings[0].check == Check::out_of_bounds);
  CHECK(contains(c.findings[0].text, "'bytes'"));
  c = faulty(null_read, dim3(1), dim3(1), 0, static_cast<const int*>(nullptr), one.data());
  CHECK(contains(c.findings[0].text, "at address 0xc, which is no device memory"));
}

constexpr int kUnwrittenLine = __LINE__ + 3;
__global__ void copy_floats(const float* in, float* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  const float v = in[i];
  out[i] = v;
}

TEST_CASE("reading what nobody has written; what the host or an earlier kernel wrote is written") {
  Buffer<float> a(64, "a"), b(64, "b"), c2(64, "c");
  const std::vector<float> part(40, 1.0f);
  a.upload(part);  // 40 of 64
  const Counters c = faulty(copy_floats, dim3(2), dim3(32), 0, a.data(), b.data());
  const emu::Finding& f = c.findings[0];
  INFO(f.text);
  CHECK(f.check == Check::unwritten_read);
  CHECK(f.times == 24);
  CHECK(contains(f.text, "block (1,0,0) thread (8,0,0)"));
  CHECK(contains(f.text, "'a' at byte 160"));
  CHECK(f.line.line == kUnwrittenLine);
  // `b` has been written by the kernel.
  CHECK(counted(copy_floats, dim3(2), dim3(32), 0, b.data(), c2.data()).findings.empty());
  // A copy is as written as its source.
  Buffer<float> d(64, "d"), e(64, "e"), g(64, "g");
  e.upload(part);
  d.copy_from(e, 64);
  CHECK(faulty(copy_floats, dim3(2), dim3(32), 0, d.data(), g.data()).findings[0].times == 24);
}

constexpr int kMisalignedLine = __LINE__ + 2;
__global__ void misaligned(const float* in, float4* out) {
  out[threadIdx.x] = *reinterpret_cast<const float4*>(in + threadIdx.x * 6);
}

TEST_CASE("a vector access must be aligned to its size") {
  const Buffer<float> in = filled<float>(256, "in");
  Buffer<float4> out(32, "out");
  const Counters c = faulty(misaligned, dim3(1), dim3(32), 0, in.data(), out.data());
  const emu::Finding& f = c.findings[0];
  INFO(f.text);
  CHECK(f.check == Check::misaligned);
  CHECK(contains(
      f.text, "thread (1,0,0): reads 16 bytes at an address that is not a multiple of 16: 'in' at byte 24"));
  CHECK(f.line.line == kMisalignedLine);
}

constexpr int kRaceLine = __LINE__ + 1;
__global__ void block_race(float* out) { out[threadIdx.x] = static_cast<float>(blockIdx.x); }
constexpr int kNeighbourLine = __LINE__ + 3;
__global__ void read_neighbour(float* data, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const float v = data[(i + 32) % n];
  data[i] = v + 1.0f;
}
__global__ void in_place(float* data) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  data[i] = data[i] + 1.0f;
}
__global__ void bytes_apart(unsigned char* out) {
  if (threadIdx.x < 3) out[blockIdx.x * 3 + threadIdx.x] = 1;  // blocks share words, never bytes
}

TEST_CASE("races between blocks, and what is none") {
  Buffer<float> out(64, "out");
  Counters c = faulty(block_race, dim3(2), dim3(32), 0, out.data());
  REQUIRE(c.findings.size() == 1);
  emu::Finding f = c.findings[0];
  INFO(f.text);
  CHECK(f.check == Check::global_race);
  CHECK(f.line.line == kRaceLine);
  CHECK(f.other.line == kRaceLine);
  CHECK(contains(f.text, "race on 'out'"));
  CHECK(contains(f.text, "block (0,0,0)"));
  CHECK(contains(f.text, "block (1,0,0)"));
  CHECK(counted(block_race, dim3(1), dim3(32), 0, out.data()).findings.empty());

  Buffer<float> data = filled<float>(128, "data");
  c = faulty(read_neighbour, dim3(4), dim3(32), 0, data.data(), 128);
  f = c.findings[0];
  INFO(f.text);
  CHECK(f.check == Check::global_race);
  const int low = std::min(f.line.line, f.other.line), high = std::max(f.line.line, f.other.line);
  CHECK(low == kNeighbourLine);
  CHECK(high == kNeighbourLine + 1);

  CHECK(counted(in_place, dim3(4), dim3(32), 0, data.data()).findings.empty());
  Buffer<unsigned char> bytes(300, "bytes");
  CHECK(counted(bytes_apart, dim3(100), dim3(32), 0, bytes.data()).findings.empty());
}

/// Every block leaves a partial sum; the block that comes last adds them. The fence and the counter order the two.
__global__ void last_block_sums(const float* in, float* partial, unsigned* arrived, float* out, int fenced) {
  __shared__ bool last;
  const unsigned n = gridDim.x;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = in[blockIdx.x];
    if (fenced != 0) __threadfence();
    last = atomicAdd(arrived, 1u) == n - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    float sum = 0;
    for (unsigned i = 0; i < n; ++i) sum += partial[i];
    out[0] = sum;
  }
}

TEST_CASE("handing over with a fence and an atomic is no race; without the fence it is") {
  const Buffer<float> in = filled<float>(16, "in");
  Buffer<float> partial(16, "partial"), out(1, "out");
  for (int round = 0; round < 20; ++round) {
    Buffer<unsigned> arrived = filled<unsigned>(1, "arrived");
    CHECK(counted(last_block_sums, dim3(16), dim3(64), 0, in.data(), partial.data(), arrived.data(),
                  out.data(), 1)
              .findings.empty());
  }
  Buffer<unsigned> arrived = filled<unsigned>(1, "arrived");
  const Counters c = faulty(last_block_sums, dim3(16), dim3(64), 0, in.data(), partial.data(), arrived.data(),
                            out.data(), 0);
  CHECK(c.findings[0].check == Check::global_race);
  CHECK(contains(c.findings[0].text, "'partial'"));
}

__global__ void cas_loop(int* cell) {
  int old = *cell, seen;
  do {
    seen = old;
    old = atomicCAS(cell, seen, seen + 1);
  } while (old != seen);
}

TEST_CASE("a compare-and-swap loop that starts with a plain read is no race") {
  Buffer<int> cell = filled<int>(1, "cell");
  CHECK(counted(cas_loop, dim3(8), dim3(64), 0, cell.data()).findings.empty());
  std::vector<int> v(1);
  cell.download(v);
  CHECK(v[0] == 512);
}

// --- Checks: shared memory --------------------------------------------------------------------------------------

constexpr int kStoreLine = __LINE__ + 4;
__global__ void no_barrier(float* out, int with) {
  __shared__ float tile[64];
  const unsigned i = threadIdx.x;
  tile[i] = static_cast<float>(i);
  if (with != 0) __syncthreads();
  out[i] = tile[63 - i];
}

TEST_CASE("a missing barrier is a race in shared memory, with both lines and both threads") {
  Buffer<float> out(64, "out");
  CHECK(counted(no_barrier, dim3(1), dim3(64), 0, out.data(), 1).findings.empty());
  const Counters c = faulty(no_barrier, dim3(1), dim3(64), 0, out.data(), 0);
  const auto race = std::find_if(c.findings.begin(), c.findings.end(),
                                 [](const emu::Finding& f) { return f.check == Check::shared_race; });
  REQUIRE(race != c.findings.end());
  INFO(race->text);
  CHECK(contains(race->text, "shared 'tile' at byte"));
  const int low = std::min(race->line.line, race->other.line),
            high = std::max(race->line.line, race->other.line);
  CHECK(low == kStoreLine);
  CHECK(high == kStoreLine + 2);
  CHECK(contains(race->text, "with no barrier between them"));
}

__global__ void all_write_one(int* out) {
  __shared__ int cell;
  cell = static_cast<int>(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = cell;
}
__global__ void warp_private(float* out, int how) {
  __shared__ float tile[64];
  const unsigned i = threadIdx.x, lane = i % 32, base = i - lane;
  tile[i] = static_cast<float>(i);
  if (how == 1) __syncwarp();
  float v = tile[base + (lane + 1) % 32];
  if (how == 2) v = __shfl_sync(kAll, v, 0);  // meets all lanes, but orders no memory
  out[i] = v;
}
__global__ void write_after_read(float* out, int with) {
  __shared__ float cell[64];
  const unsigned i = threadIdx.x;
  cell[i] = 1.0f;
  __syncthreads();
  const float v = cell[(i + 32) % 64];
  if (with != 0) __syncthreads();
  cell[i] = v + 1.0f;
  out[i] = v;
}
__global__ void neighbours_in_a_word(unsigned char* out) {
  __shared__ unsigned char bytes[64];
  bytes[threadIdx.x] = static_cast<unsigned char>(threadIdx.x);  // four threads to a word, each its own byte
  __syncthreads();
  out[threadIdx.x] = bytes[threadIdx.x ^ 1u];
}

TEST_CASE(
    "races in shared memory: two writers, a writer after a reader, lanes of one warp; and what is none") {
  Buffer<int> ints(64, "ints");
  Counters c = faulty(all_write_one, dim3(1), dim3(32), 0, ints.data());
  CHECK(c.findings[0].check == Check::shared_race);
  CHECK(counted(all_write_one, dim3(1), dim3(1), 0, ints.data()).findings.empty());
  Buffer<float> out(64, "out");
  CHECK(faulty(write_after_read, dim3(1), dim3(64), 0, out.data(), 0).findings[0].check ==
        Check::shared_race);
  CHECK(counted(write_after_read, dim3(1), dim3(64), 0, out.data(), 1).findings.empty());
  c = faulty(warp_private, dim3(1), dim3(64), 0, out.data(), 0);
  CHECK(c.findings[0].check == Check::shared_race);
  CHECK(contains(c.findings[0].text, "no __syncwarp or barrier"));
  CHECK(counted(warp_private, dim3(1), dim3(64), 0, out.data(), 1).findings.empty());
  CHECK(faulty(warp_private, dim3(1), dim3(64), 0, out.data(), 2).findings[0].check == Check::shared_race);
  Buffer<unsigned char> bytes(64, "bytes");
  CHECK(counted(neighbours_in_a_word, dim3(1), dim3(64), 0, bytes.data()).findings.empty());
}

TEST_CASE("two blocks that write the same bytes of a buffer race, also when their threads do not") {
  Buffer<unsigned char> bytes(64, "bytes");
  const emu::counting on;
  CHECK(!launch(neighbours_in_a_word, dim3(2), dim3(64), 0, stream, bytes.data()).ok());
}

constexpr int kUnsetLine = __LINE__ + 5;
__global__ void unset_shared(float* out) {
  __shared__ float tile[64];
  if (threadIdx.x < 63) tile[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}

TEST_CASE("reading shared memory that nobody wrote in this block") {
  Buffer<float> out(128, "out");
  const Counters c = faulty(unset_shared, dim3(1), dim3(64), 0, out.data());
  INFO(c.findings[0].text);
  CHECK(c.findings[0].check == Check::unwritten_read);
  CHECK(contains(c.findings[0].text, "thread (63,0,0)"));
  CHECK(contains(c.findings[0].text, "shared 'tile' at byte 252"));
  CHECK(c.findings[0].line.line == kUnsetLine);
}

__global__ void overrun(float* out) {
  float* tile = dynamic_shared<float>();
  tile[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}

TEST_CASE("dynamic shared memory beyond what the launch declared") {
  Buffer<float> out(64, "out");
  CHECK(counted(overrun, dim3(1), dim3(64), 256, out.data()).findings.empty());
  const Counters c = faulty(overrun, dim3(1), dim3(64), 252, out.data());
  INFO(c.findings[0].text);
  CHECK(c.findings[0].check == Check::shared_overrun);
  CHECK(contains(c.findings[0].text, "thread (63,0,0)"));
  CHECK(contains(c.findings[0].text, "at byte 252, but the launch declared 252 bytes"));
}

// --- Checks: barriers and collectives ---------------------------------------------------------------------------

__global__ void early_return(float* out, int n) {
  if (static_cast<int>(threadIdx.x) >= n) return;
  __syncthreads();
  out[threadIdx.x] = 1.0f;
}
__global__ void absent_lane(float* out) {
  float v = 1.0f;
  if (threadIdx.x != 3) v = __shfl_down_sync(kAll, v, 1);
  __syncthreads();
  out[threadIdx.x] = v;
}

TEST_CASE("barriers and collectives that are not met are findings too") {
  Buffer<float> out(64, "out");
  CHECK(faulty(early_return, dim3(1), dim3(64), 0, out.data(), 60).findings[0].check == Check::barrier);
  CHECK(counted(early_return, dim3(1), dim3(64), 0, out.data(), 64).findings.empty());
  const Counters c = faulty(absent_lane, dim3(1), dim3(32), 0, out.data());
  CHECK(c.findings[0].check == Check::collective);
  CHECK(contains(c.findings[0].text, "thread (3,0,0) at __syncthreads"));
}

// --- Reports ----------------------------------------------------------------------------------------------------

TEST_CASE("counting is off unless asked for, and ends with its object") {
  const emu::counting outer(false);  // whatever LADDER_EMULATOR_CHECK says
  const Buffer<float> in = filled<float>(64, "in");
  Buffer<float> out(64, "out");
  {
    const emu::counting on;
    require(launch(copy_floats, dim3(2), dim3(32), 0, stream, in.data(), out.data()));
    {
      const emu::counting off(false);
      require(launch(in_place, dim3(2), dim3(32), 0, stream, out.data()));
    }
    CHECK(emu::counting_now());
  }
  CHECK(!emu::counting_now());
  require(launch(in_place, dim3(2), dim3(32), 0, stream, out.data()));
  CHECK(emu::last_launch().kernel == "copy_floats");
}

TEST_CASE("the same launch gives the same counts, whatever thread runs which block") {
  const Buffer<float> in = filled<float>(256, "in");
  Buffer<float> out(64, "out");
  const std::string first =
      emu::json(counted(collectives_and_barriers, dim3(64), dim3(256), 0, in.data(), out.data()));
  for (int i = 0; i < 5; ++i) {
    CHECK(emu::json(counted(collectives_and_barriers, dim3(64), dim3(256), 0, in.data(), out.data())) ==
          first);
  }
}

TEST_CASE(
    "the text report fits in 100 columns and says the numbers; the listing has them beside the source") {
  const Buffer<float> in = filled<float>(32 * 4864, "weights");
  Buffer<float> out(32, "out");
  const Counters c = counted(row_sum, dim3(1), dim3(32), 0, in.data(), out.data(), 4864);
  const std::string text = emu::text_report(c);
  INFO(text);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) CHECK(line.size() <= 100);
  CHECK(contains(text, "row_sum  grid (1,1,1)"));
  CHECK(contains(text, "   32.00   4.00"));
  CHECK(contains(text, "4,864"));
  CHECK(contains(text, "checks: nothing found"));
  const std::string listing = emu::annotated_source(c);
  CHECK(contains(listing, "for (int i = 0; i < n; ++i) sum += row[i];"));
  CHECK(contains(listing, "    4,864    32.00    4.00"));
}

TEST_CASE("JSON: totals in the record's fields, and the details by line and buffer") {
  const Buffer<float> in = filled<float>(3200, "in \"quoted\"");
  Buffer<float> out(32, "out");
  const Counters c = counted(row_sum, dim3(1), dim3(32), 0, in.data(), out.data(), 100);
  const std::string record = emu::record_json(c);
  CHECK(contains(record, "\"requests\": 101, \"sectors\": 3204,"));
  CHECK(contains(record, "\"bytes_requested\": 12928"));  // 3200 loads and 32 stores of 4 bytes
  CHECK(contains(record, "\"unique_bytes\": 12928"));     // 400 and 4 sectors
  CHECK(contains(record, "\"divergent_branches\": 0"));
  CHECK(!contains(record, "bank_passes"));  // the kernel has no shared memory: absent, not zero
  const std::string all = emu::json(c);
  CHECK(contains(all, "\"buffer\": \"in \\\"quoted\\\"\", \"access\": \"load\", \"requests\": 100"));
  CHECK(contains(all, "\"line\": " + std::to_string(kSumLine)));
}

TEST_CASE("pictures of one request: a row for each sector, a box for each lane; passes over banks") {
  const Buffer<float> in = filled<float>(3200, "in");
  Buffer<float> out(32, "out");
  Counters c = counted(row_sum, dim3(1), dim3(32), 0, in.data(), out.data(), 100);
  const auto request = std::find_if(c.captured.begin(), c.captured.end(),
                                    [](const emu::CapturedRequest& r) { return r.line.line == kSumLine; });
  REQUIRE(request != c.captured.end());
  CHECK(request->offset[0] == 0);
  CHECK(request->offset[31] == 31 * 400);
  const std::string picture = emu::access_picture(*request);
  CHECK(contains(picture, "touches 32 sectors of 'in' where 4 could hold it: 128 of 1024 bytes"));
  CHECK(contains(picture, "<title>1 lane: 31</title>"));
  CHECK(picture.starts_with("<svg"));
  c = counted(banks<float>, dim3(1), dim3(32), 32 * 33 * 4, out.data(), 8);
  const auto shared = std::find_if(c.captured.begin(), c.captured.end(), [](const emu::CapturedRequest& r) {
    return r.shared && r.access == Access::read;
  });
  REQUIRE(shared != c.captured.end());
  CHECK(contains(emu::bank_picture(*shared), "served in 8 passes where 1 would do"));

  const auto folder =
      std::filesystem::temp_directory_path() / ("ladder-pictures-" + std::to_string(::getpid()));
  const std::vector<std::string> files = emu::write_pictures(c, folder.string(), "banks");
  CHECK(files.size() == c.captured.size());
  for (const std::string& file : files) CHECK(std::filesystem::file_size(file) > 1000);
  std::filesystem::remove_all(folder);
  CHECK_THROWS_WITH_AS((void)emu::write_pictures(c, "/dev/null/no", "banks"),
                       doctest::Contains("cannot write"), std::runtime_error);
}

TEST_CASE("reports fit into 100 columns, with what is too long below itself") {
  const Buffer<float> in = filled<float>(3200, "a buffer with a name that is much longer than its column");
  Buffer<float> out(32, "out");
  const Counters c = counted(row_sum, dim3(1), dim3(32), 0, in.data(), out.data(), 100);
  for (const std::string& text : {emu::text_report(c), emu::annotated_source(c)}) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      INFO(line);
      CHECK(line.size() <= 100);
    }
  }
}

TEST_CASE("counting costs at most thirty times as much as not counting") {
  constexpr int kRows = 256, kColumns = 2048;
  const Buffer<float> in = filled<float>(kRows * kColumns, "in");
  Buffer<float> out(kRows, "out");
  const auto best = [&](bool on) {
    const emu::counting c(on);
    double seconds = 1e9;
    for (int i = 0; i < 5; ++i) {
      const auto t0 = std::chrono::steady_clock::now();
      require(launch(row_sum, dim3(1), dim3(kRows), 0, stream, in.data(), out.data(), kColumns));
      seconds =
          std::min(seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count());
    }
    return seconds;
  };
  const double off = best(false), on = best(true);
  INFO("off ", off * 1e3, " ms, on ", on * 1e3, " ms");
  CHECK(on < 30 * off);
}
