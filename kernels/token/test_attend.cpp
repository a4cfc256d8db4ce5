// Attention that is split over the blocks of one kernel, against float64 over the caches that it leaves behind: positions
// around tiles and runs, groups of one to eight heads, other numbers of blocks, one token after the other; and that the
// comparison sees a position that is left out.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "harness/device/doctest_main.hpp"
#include "harness/device/half_bits.hpp"
#include "kernels/token/attend.cuh"

using namespace ladder;

namespace {

/// Tokens one after the other, at a.position and behind it. A launch of a.blocks blocks that are all there at once; on the
/// emulator of one, which does the work of all.
template <int HD>
__global__ void __launch_bounds__(token::kThreads, 1)
    attend_tokens(token::AttendArgs a, const float* rows,  // [tokens][q | k | v]
                  const float2* angles,                    // [tokens][HD / 2]
                  Packet* sent,                            // q | k | v
                  Packet* out,                             // [tokens] of a.mixed
                  Packet* done,                            // [gridDim.x]
                  int tokens) {
  __shared__ float2 angle[HD / 2];
  const int thread = static_cast<int>(threadIdx.x), grid = static_cast<int>(gridDim.x);
  const int elements = a.heads.q_length() + 2 * a.heads.kv_length(),
            codes = a.heads.q_length() / 32 * token::kBlockPackets;
  a.q = sent, a.k = sent + a.heads.q_length() / 2, a.v = a.k + a.heads.kv_length() / 2;
  a.angle = angle;
  a.scratch = dynamic_shared<unsigned char>();
  for (int t = 0; t < tokens; ++t, ++a.position, ++a.step) {
    const float* const row = rows + t * elements;
    for (int i = static_cast<int>(blockIdx.x) * token::kThreads + thread; i < elements / 2;
         i += grid * token::kThreads)
      store_packet(sent + i, {{__float_as_uint(row[2 * i]), __float_as_uint(row[2 * i + 1]), 0u}, a.step});
    if (thread < HD / 2) angle[thread] = angles[t * (HD / 2) + thread];
    __syncthreads();  // angles are there, and on the emulator packets
    for (a.block = static_cast<int>(blockIdx.x); a.block < a.blocks; a.block += grid) {
      token::Attend<HD>{a}.units();
      __syncthreads();  // the sums have been read
    }
    for (a.block = static_cast<int>(blockIdx.x); a.block < a.blocks; a.block += grid)
      token::Attend<HD>{a}.combine();
    __syncthreads();

    // No block goes on before all have read what they wanted; and then they see each other's rows of the caches.
    for (int i = thread; i < codes; i += token::kThreads) {
      const Packet p = wait_packet(a.mixed + i, load_packet(a.mixed + i), a.step);
      if (blockIdx.x == 0) out[t * codes + i] = p;
    }
    __threadfence();
    __syncthreads();
    if (thread == 0) store_packet(done + blockIdx.x, {{0, 0, 0}, a.step});
    __syncthreads();
    for (int i = thread; i < grid; i += token::kThreads) wait_packet(done + i, load_packet(done + i), a.step);
    __threadfence();
    __syncthreads();
  }
}

struct Problem {
  HeadShape s;
  int context, tokens = 0;
  std::vector<float> rows;
  std::vector<float2> angles;
  std::vector<__half> keys, values;

  /// @param size of queries: the larger it is, the fewer positions have most of the weight
  Problem(HeadShape shape, int positions, int many, float size, unsigned seed)
      : s(shape), context(positions + many), tokens(many) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> any(-1.0f, 1.0f);
    for (int t = 0; t < tokens; ++t) {
      for (int i = 0; i < s.q_length(); ++i) rows.push_back(size * any(random));
      for (int i = 0; i < 2 * s.kv_length(); ++i) rows.push_back(any(random));
      for (int i = 0; i < s.head_dim / 2; ++i) {
        const float x = 3.0f * any(random);
        angles.push_back(make_float2(std::cos(x), std::sin(x)));
      }
    }
    for (int i = 0; i < context * s.kv_length(); ++i) {
      keys.push_back(__float2half_rn(any(random)));
      values.push_back(__float2half_rn(any(random)));
    }
  }

  /// Codes and scales of every token, and the caches as they are then.
  struct Result {
    std::vector<Packet> codes;
    std::vector<__half> keys, values;
  };
  Result run(int blocks) const {
    Stream stream;
    const auto kv = static_cast<std::size_t>(s.kv_length());
    Buffer<__half> dk(keys.size(), "keys"), dv(values.size(), "values");
    const std::size_t known = static_cast<std::size_t>(context - tokens) * kv;
    dk.fill_bytes(0xFF), dv.fill_bytes(0xFF);
    dk.upload(std::span(keys).first(known));
    dv.upload(std::span(values).first(known));
    Buffer<float> dr(rows.size(), "rows");
    dr.upload(rows);
    Buffer<float2> da(angles.size(), "angles");
    da.upload(angles);
    const int codes = s.q_length() / 32 * token::kBlockPackets;
    const auto grid = kDeviceExecutor == Executor::gpu ? static_cast<unsigned>(blocks) : 1u;
    Buffer<Packet> sent(static_cast<std::size_t>(s.q_length() / 2 + s.kv_length()), "rows"),
        mixed(static_cast<std::size_t>(codes), "codes"), out(static_cast<std::size_t>(codes * tokens), "out"),
        done(grid, "done"), partial(static_cast<std::size_t>(token::attend_packets(s, blocks)), "partial");
    for (Buffer<Packet>* b : {&sent, &mixed, &out, &done, &partial}) b->fill_bytes(0);
    token::AttendArgs a{};
    a.heads = s, a.position = context - tokens, a.blocks = blocks;
    a.keys = dk.data(), a.values = dv.data(), a.mixed = mixed.data(), a.partial = partial.data(), a.step = 7;
    LaunchOptions options;
    options.cooperative = kDeviceExecutor == Executor::gpu;
    const Status status = s.head_dim == 64
                              ? launch(options, attend_tokens<64>, dim3(grid), dim3(token::kThreads),
                                       token::Attend<64>::kScratchBytes, stream, a, dr.data(), da.data(),
                                       sent.data(), out.data(), done.data(), tokens)
                              : launch(options, attend_tokens<128>, dim3(grid), dim3(token::kThreads),
                                       token::Attend<128>::kScratchBytes, stream, a, dr.data(), da.data(),
                                       sent.data(), out.data(), done.data(), tokens);
    REQUIRE_MESSAGE(status.ok(), status.message());
    stream.synchronize();
    Result r{std::vector<Packet>(out.size()), keys, values};
    out.download(r.codes);
    dk.download(r.keys);
    dv.download(r.values);
    return r;
  }

  /// What is wrong with token t; empty if nothing is. @param without a cached position that the reference leaves out, or -1
  std::string compare(const Result& r, int t, int without = -1) const {
    const int position = context - tokens + t, half = s.head_dim / 2, group = s.heads / s.kv_heads;
    const int elements = s.q_length() + 2 * s.kv_length(), codes = s.q_length() / 32 * token::kBlockPackets;
    const float* const row = rows.data() + static_cast<std::size_t>(t * elements);
    const float2* const angle = angles.data() + static_cast<std::size_t>(t * half);
    const auto at = [&](const std::vector<__half>& cache, int p, int kv, int i) {
      return static_cast<double>(
          __half2float(cache[static_cast<std::size_t>((p * s.kv_heads + kv) * s.head_dim + i)]));
    };
    const auto rotated = [&](const float* x, int i) {
      const double c = angle[i % half].x, d = angle[i % half].y;
      return i < half ? x[i] * c - x[i + half] * d : x[i] * c + x[i - half] * d;
    };
    for (int kv = 0; kv < s.kv_heads; ++kv) {
      for (int i = 0; i < s.head_dim; ++i) {
        const double k = rotated(row + s.q_length() + kv * s.head_dim, i),
                     v = row[s.q_length() + s.kv_length() + kv * s.head_dim + i];
        if (!(std::fabs(at(r.keys, position, kv, i) - k) <= std::fabs(k) / 2048 + 1e-6))
          return "new key " + std::to_string(i);
        if (!(std::fabs(at(r.values, position, kv, i) - v) <= std::fabs(v) / 2048 + 1e-7))
          return "new value " + std::to_string(i);
      }
    }
    for (int h = 0; h < s.heads; ++h) {
      std::vector<double> weight, out(static_cast<std::size_t>(s.head_dim), 0.0);
      double highest = -INFINITY, total = 0.0;
      for (int p = 0; p <= position; ++p) {
        double score = 0.0;
        for (int i = 0; i < s.head_dim; ++i)
          score += rotated(row + h * s.head_dim, i) * at(r.keys, p, h / group, i);
        weight.push_back(p == without ? -INFINITY : score / std::sqrt(s.head_dim));
        highest = std::max(highest, weight.back());
      }
      for (int p = 0; p <= position; ++p) {
        const double w = std::exp(weight[static_cast<std::size_t>(p)] - highest);
        total += w;
        for (std::size_t i = 0; i < out.size(); ++i)
          out[i] += w * at(r.values, p, h / group, static_cast<int>(i));
      }
      for (std::size_t b = 0; b < out.size() / 32; ++b) {
        const Packet* const packet =
            r.codes.data() + static_cast<std::size_t>(t * codes) +
            (static_cast<std::size_t>(h * s.head_dim / 32) + b) * token::kBlockPackets;
        double largest = 0.0;
        for (std::size_t i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(out[32 * b + i] / total));
        float scale;
        std::memcpy(&scale, &packet[0].word[2], 4);
        // Half a step of the code, the scale's rounding to f16, and what f32 and two f16 for a weight lose.
        const double step = largest / 127, more = 127 * step / 2048 + 1e-5;
        int sums[2] = {};
        for (std::size_t i = 0; i < 32; ++i) {
          const auto code = static_cast<signed char>(packet[i / 8].word[i / 4 % 2] >> (i % 4 * 8) & 0xffu);
          sums[i / 16] += code;
          if (!(std::fabs(static_cast<double>(scale) * code - out[32 * b + i] / total) <= step / 2 + more)) {
            return "head " + std::to_string(h) + " element " + std::to_string(32 * b + i) + " is " +
                   std::to_string(scale * static_cast<float>(code)) + ", expected " +
                   std::to_string(out[32 * b + i] / total);
          }
        }
        if (packet[1].word[2] !=
            ((static_cast<unsigned>(sums[0]) & 0xffffu) | static_cast<unsigned>(sums[1]) << 16))
          return "sums of head " + std::to_string(h);
      }
    }
    return "";
  }

  void check(int blocks) const {
    const Result r = run(blocks);
    for (int t = 0; t < tokens; ++t) {
      const std::string wrong = compare(r, t);
      CHECK_MESSAGE(wrong.empty(), s.heads << "/" << s.kv_heads << "/" << s.head_dim << ", " << blocks
                                           << " blocks, position " << context - tokens + t << ": " << wrong);
    }
  }
};

constexpr HeadShape kSmall = {14, 2, 64}, kLarge = {28, 4, 128};
int all_blocks() { return kDeviceExecutor == Executor::gpu ? multiprocessor_count() : 132; }

}  // namespace

TEST_CASE("one run a key head") {
  for (const int position : {0, 1, 15, 16, 127, 128, 255}) {
    Problem(kSmall, position, 1, 2.0f, 1).check(all_blocks());
    Problem(kLarge, position, 1, 2.0f, 2).check(all_blocks());
  }
}

TEST_CASE("several runs") {
  for (const int position : {256, 271, 700}) {
    Problem(kSmall, position, 1, 2.0f, 3).check(all_blocks());
    Problem(kLarge, position, 1, 3.0f, 4).check(all_blocks());
  }
  if (kDeviceExecutor != Executor::gpu) return;
  for (const int position : {4095, 4222, 4224, 9000}) {
    Problem(kSmall, position, 2, 4.0f, 5).check(all_blocks());
    Problem(kLarge, position, 2, 4.0f, 6).check(all_blocks());
  }
}

TEST_CASE("fewer blocks than units, and groups of other sizes") {
  Problem(kLarge, 300, 1, 2.0f, 7).check(3);
  Problem(kLarge, 600, 1, 2.0f, 8).check(9);
  Problem({8, 1, 128}, 500, 1, 2.0f, 9).check(5);
  Problem({3, 3, 64}, 400, 1, 2.0f, 10).check(7);
  Problem({4, 1, 64}, 290, 1, 2.0f, 11).check(1);
}

TEST_CASE("tokens one after the other see each other's rows, whoever had stored them") {
  Problem(kSmall, 254, 4, 3.0f, 12).check(all_blocks());
  Problem(kLarge, 382, 4, 3.0f, 13).check(11);
}

TEST_CASE("the same bits every time, and a position that is left out is seen") {
  const Problem p(kSmall, 500, 1, 1.0f, 14);
  const Problem::Result a = p.run(12), b = p.run(12);
  CHECK(std::memcmp(a.codes.data(), b.codes.data(), a.codes.size() * sizeof(Packet)) == 0);
  CHECK(p.compare(a, 0).empty());
  int seen = 0;
  for (const int without : {0, 127, 128, 300, 499, 500}) seen += p.compare(a, 0, without).empty() ? 0 : 1;
  CHECK(seen == 6);
}

TEST_CASE("positions are cut into whole tiles that cover them") {
  for (int most = 1; most <= token::kMostRuns; ++most) {
    for (int positions = 1; positions < 40000; positions += 37) {
      const token::Runs r = token::runs_of(positions, most);
      const bool covered =
          r.count >= 1 && r.count <= most && r.count * r.size >= positions &&
          (r.count - 1) * r.size < positions &&
          (r.count == 1 || (r.size % decode_tile::kPositions == 0 && r.size >= token::kLeastRun));
      if (!covered) FAIL_CHECK("positions " << positions << ", most " << most);
    }
  }
}
