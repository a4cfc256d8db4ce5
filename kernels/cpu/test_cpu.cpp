// Tests of the CPU twins of chapters 01 and 02, of the thread pool and of the feature detection.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cpu/features.hpp"
#include "kernels/cpu/gemv.hpp"
#include "kernels/cpu/thread_pool.hpp"

namespace {

using ladder::Shape;
using ladder::cpu::Isa;
using ladder::cpu::ThreadPool;
using Twin = void (*)(const float*, const float*, float*, Shape, ThreadPool&);

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Puts the best instruction set back whatever happens in the test.
struct Forced {
  explicit Forced(Isa isa) { ladder::cpu::force_isa(isa); }
  ~Forced() { ladder::cpu::force_isa(std::nullopt); }
  Forced(const Forced&) = delete;
  Forced& operator=(const Forced&) = delete;
};

// `count` floats between guard bands. The bands hold a bit pattern that no test computes, so a write to them
// shows; it is a NaN, so a read beyond the ends of an input shows as well, in the output. The inside starts
// as a NaN.
class Guarded {
 public:
  explicit Guarded(long long count)
      : count_(static_cast<std::size_t>(count)), all_(count_ + 2 * kBand, guard()) {}
  float* data() { return all_.data() + kBand; }
  std::size_t size() const { return count_; }
  float& operator[](std::size_t i) { return data()[i]; }
  void poison() { std::fill_n(data(), count_, kNan); }
  bool bands_intact() const {
    const auto intact = [](float f) { return std::bit_cast<std::uint32_t>(f) == kPattern; };
    return std::all_of(all_.begin(), all_.begin() + kBand, intact) &&
           std::all_of(all_.end() - kBand, all_.end(), intact);
  }

 private:
  static constexpr std::ptrdiff_t kBand = 256;  // floats: 1 KiB
  static constexpr std::uint32_t kPattern = 0x7fc0dead;
  static float guard() { return std::bit_cast<float>(kPattern); }
  std::size_t count_;
  std::vector<float> all_;
};

struct Problem {
  explicit Problem(Shape s) : shape(s), weights(s.od * s.id), acts(s.nt * s.id), out(s.nt * s.od) {}
  void fill_random(unsigned seed) {
    std::minstd_rand random(seed);
    std::uniform_real_distribution<float> value(-1, 1);
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = value(random);
    for (std::size_t i = 0; i < acts.size(); ++i) acts[i] = value(random);
  }
  // |products| <= 16 and the sums of up to 4864 of them stay below 2^24, so that every order of summation is
  // exact.
  void fill_integers(unsigned seed) {
    std::minstd_rand random(seed);
    std::uniform_int_distribution<int> value(-4, 4);
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(value(random));
    for (std::size_t i = 0; i < acts.size(); ++i) acts[i] = static_cast<float>(value(random));
  }
  bool bands_intact() const { return weights.bands_intact() && acts.bands_intact() && out.bands_intact(); }

  Shape shape;
  Guarded weights, acts, out;
};

// What the outputs should be, in float64, and the sum of |terms| of each.
struct Reference {
  explicit Reference(Problem& p) {
    const auto [nt, od, id] = p.shape;
    for (long long token = 0; token < nt; ++token) {
      for (long long row = 0; row < od; ++row) {
        const float* w = p.weights.data() + row * id;
        const float* x = p.acts.data() + token * id;
        double total = 0, absolute = 0;
        for (long long k = 0; k < id; ++k) {
          const double term = static_cast<double>(w[k]) * x[k];  // exact: 24 + 24 bits fit into 53
          total += term;
          absolute += std::fabs(term);
        }
        sum.push_back(total);
        bound.push_back(static_cast<double>(id) * 0x1p-24 * absolute);  // derived in gemv.hpp
      }
    }
  }
  // The number of outputs that are not finite or further from the reference than the bound.
  long long count_wrong(Problem& p) const {
    long long wrong = 0;
    for (std::size_t i = 0; i < sum.size(); ++i) {
      if (!(std::isfinite(p.out[i]) && std::fabs(p.out[i] - sum[i]) <= bound[i])) ++wrong;
    }
    return wrong;
  }
  // The number of outputs that differ from the reference in any bit; for problems without rounding.
  long long count_inexact(Problem& p) const {
    long long wrong = 0;
    for (std::size_t i = 0; i < sum.size(); ++i) {
      const auto expected = static_cast<float>(sum[i]);
      if (std::bit_cast<std::uint32_t>(p.out[i]) != std::bit_cast<std::uint32_t>(expected)) ++wrong;
    }
    return wrong;
  }

  std::vector<double> sum, bound;
};

// Every twin with every instruction set that this machine has.
struct Candidate {
  const char* twin_name;
  Twin twin;
  Isa isa;
};

std::vector<Candidate> candidates() {
  // gemv_scalar has one form only, which depends on nothing that can be forced.
  std::vector<Candidate> all = {{"gemv_scalar", ladder::cpu::gemv_scalar, ladder::cpu::isa()}};
  for (const Isa isa : ladder::cpu::supported_isas()) all.push_back({"gemv_vec", ladder::cpu::gemv_vec, isa});
  return all;
}

constexpr long long kTokens[] = {1, 2, 7, 8, 9, 64, 65};
constexpr long long kRows[] = {1, 3, 7, 8, 9, 127, 896};
constexpr long long kInputs[] = {1, 3, 7, 8, 15, 16, 17, 31, 32, 255, 256, 257, 896, 4864};

// One NaN in a weight spoils its row for every token; one in an activation spoils its token for every row;
// nothing else.
void check_nan(Twin twin, ThreadPool& pool) {
  for (const Shape shape : {Shape{1, 9, 257}, Shape{3, 7, 15}, Shape{9, 13, 1100}}) {
    for (const long long k : {0LL, shape.id / 2, shape.id - 1}) {
      for (const bool in_weights : {true, false}) {
        const long long hit = in_weights ? shape.od - 1 : shape.nt - 1;
        CAPTURE(shape.nt);
        CAPTURE(k);
        CAPTURE(in_weights);
        Problem p(shape);
        p.fill_random(7);
        std::fill_n(p.out.data(), p.out.size(), 0.0F);
        (in_weights ? p.weights : p.acts)[static_cast<std::size_t>(hit * shape.id + k)] = kNan;
        twin(p.weights.data(), p.acts.data(), p.out.data(), shape, pool);
        for (long long token = 0; token < shape.nt; ++token) {
          for (long long row = 0; row < shape.od; ++row) {
            const bool is_nan = std::isnan(p.out[static_cast<std::size_t>(token * shape.od + row)]);
            CHECK(is_nan == ((in_weights ? row : token) == hit));
          }
        }
      }
    }
  }
}

void check_refuses(Twin twin, ThreadPool& pool) {
  for (const Shape shape : {Shape{0, 1, 1}, Shape{1, 0, 1}, Shape{1, 1, 0}, Shape{-1, 1, 1}}) {
    CHECK_THROWS_AS(twin(nullptr, nullptr, nullptr, shape, pool), std::invalid_argument);
  }
}

std::vector<float> run_vec(Problem& p, ThreadPool& pool) {
  p.out.poison();
  ladder::cpu::gemv_vec(p.weights.data(), p.acts.data(), p.out.data(), p.shape, pool);
  return {p.out.data(), p.out.data() + p.out.size()};
}

bool same_bits(const float* a, const float* b, long long count) {
  return std::equal(a, a + count, b, [](float x, float y) {
    return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
  });
}

}  // namespace

TEST_CASE("the checks of this file reject what they should") {
  Problem p({2, 3, 32});
  p.fill_random(1);
  const Reference reference(p);
  ThreadPool pool(1);
  ladder::cpu::gemv_scalar(p.weights.data(), p.acts.data(), p.out.data(), p.shape, pool);
  REQUIRE(reference.count_wrong(p) == 0);
  const float good = p.out[4];
  p.out[4] = kNan;
  CHECK(reference.count_wrong(p) == 1);
  p.out[4] = static_cast<float>(reference.sum[4] + 2 * reference.bound[4]);
  CHECK(reference.count_wrong(p) == 1);
  CHECK(reference.count_inexact(p) > 0);
  p.out[4] = good;
  CHECK(p.bands_intact());
  p.out.data()[-1] = 0;
  CHECK_FALSE(p.bands_intact());
}

TEST_CASE("twins: every shape on every instruction set, within the bound and exact on integers") {
  ThreadPool pool(3);
  unsigned seed = 1;
  for (const long long nt : kTokens) {
    for (const long long od : kRows) {
      for (const long long id : kInputs) {
        Problem p({nt, od, id});
        for (const bool integers : {false, true}) {
          if (integers) {
            p.fill_integers(++seed);
          } else {
            p.fill_random(++seed);
          }
          const Reference reference(p);
          for (const Candidate& c : candidates()) {
            CAPTURE(nt);
            CAPTURE(od);
            CAPTURE(id);
            CAPTURE(integers);
            CAPTURE(c.twin_name);
            CAPTURE(ladder::cpu::name(c.isa));
            const Forced forced(c.isa);
            p.out.poison();
            c.twin(p.weights.data(), p.acts.data(), p.out.data(), p.shape, pool);
            CHECK((integers ? reference.count_inexact(p) : reference.count_wrong(p)) == 0);
            CHECK(p.bands_intact());
          }
        }
      }
    }
  }
}

TEST_CASE("twins: NaN reaches the outputs that depend on it, and no others; empty shapes are refused") {
  ThreadPool pool(2);
  for (const Candidate& c : candidates()) {
    CAPTURE(c.twin_name);
    CAPTURE(ladder::cpu::name(c.isa));
    const Forced forced(c.isa);
    check_nan(c.twin, pool);
    check_refuses(c.twin, pool);
  }
}

TEST_CASE("gemv_vec: a token's bits do not depend on nt, its place, the threads or the row's tile") {
  ThreadPool one(1);
  ThreadPool many(3);
  for (const Isa isa : ladder::cpu::supported_isas()) {
    const Forced forced(isa);
    for (const Shape shape : {Shape{8, 9, 896}, Shape{8, 7, 1037}, Shape{7, 5, 4864}, Shape{19, 130, 1543},
                              Shape{66, 70, 1100}}) {
      CAPTURE(ladder::cpu::name(isa));
      CAPTURE(shape.nt);
      CAPTURE(shape.id);
      Problem p(shape);
      p.fill_random(3);
      const auto together = run_vec(p, one);
      CHECK(same_bits(run_vec(p, many).data(), together.data(), shape.nt * shape.od));
      for (long long token = 0; token < shape.nt; ++token) {
        Problem alone({1, shape.od, shape.id});
        std::copy_n(p.weights.data(), p.weights.size(), alone.weights.data());
        std::copy_n(p.acts.data() + token * shape.id, shape.id, alone.acts.data());
        CHECK(same_bits(run_vec(alone, many).data(), together.data() + token * shape.od, shape.od));
      }
      // The first row stands in a tile of four rows; by itself it is computed by a tile of one.
      Problem row({shape.nt, 1, shape.id});
      std::copy_n(p.weights.data(), shape.id, row.weights.data());
      std::copy_n(p.acts.data(), p.acts.size(), row.acts.data());
      const auto first = run_vec(row, one);
      for (long long token = 0; token < shape.nt; ++token) {
        CHECK(same_bits(first.data() + token, together.data() + token * shape.od, 1));
      }
    }
  }
}

TEST_CASE("features: the chosen instruction set is supported, can be forced, and others are refused") {
  using namespace ladder::cpu;
  const auto supported = supported_isas();
  REQUIRE_FALSE(supported.empty());
  CHECK(supported.front() == Isa::portable);
  CHECK(isa() == supported.back());
  CHECK(features_summary().ends_with("twins use " + std::string(name(isa()))));
  for (const Isa one : {Isa::portable, Isa::neon, Isa::avx2, Isa::avx512}) {
    if (std::ranges::find(supported, one) != supported.end()) {
      const Forced forced(one);
      CHECK(isa() == one);
    } else {
      CHECK_THROWS_AS(force_isa(one), std::invalid_argument);
      CHECK(isa() == supported.back());
    }
  }
  CHECK(isa() == supported.back());
#if defined(__aarch64__)
  CHECK(features().neon);
  CHECK_FALSE(features().avx2);
#elif defined(__x86_64__)
  CHECK_FALSE(features().neon);
  CHECK((!features().avx512f || features().avx2));
#endif
  MESSAGE(features_summary());
}

TEST_CASE("thread pool: run calls every thread once") {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    CHECK(pool.size() == threads);
    for (int repeat = 0; repeat < 200; ++repeat) {
      std::vector<int> calls(static_cast<std::size_t>(threads));
      pool.run([&](int thread, int count) { calls[static_cast<std::size_t>(thread)] += count; });
      CHECK(calls == std::vector<int>(static_cast<std::size_t>(threads), threads));
    }
  }
}

TEST_CASE("thread pool: threads are distinct and the caller is thread 0") {
  ThreadPool pool(3);
  std::vector<std::thread::id> ids(3);
  pool.run([&](int thread, int) { ids[static_cast<std::size_t>(thread)] = std::this_thread::get_id(); });
  CHECK(ids[0] == std::this_thread::get_id());
  CHECK(std::set<std::thread::id>(ids.begin(), ids.end()).size() == 3);
}

TEST_CASE("thread pool: parallel_for covers every index once, in ranges of at most a chunk") {
  ThreadPool pool(3);
  for (const long long count : {0LL, 1LL, 2LL, 3LL, 100LL, 1001LL}) {
    for (const long long chunk : {1LL, 2LL, 7LL, 1000LL, std::numeric_limits<long long>::max()}) {
      std::vector<std::atomic<int>> hits(static_cast<std::size_t>(count));
      std::atomic<int> bad = 0;
      pool.parallel_for(count, chunk, [&](long long begin, long long end, int thread) {
        if (begin >= end || end - begin > chunk || begin < 0 || end > count || thread < 0 || thread >= 3)
          ++bad;
        for (long long i = begin; i < end; ++i) ++hits[static_cast<std::size_t>(i)];
      });
      CHECK(bad == 0);
      CHECK(std::ranges::all_of(hits, [](const auto& h) { return h == 1; }));
    }
  }
  CHECK_THROWS_AS(pool.parallel_for(-1, 1, [](long long, long long, int) {}), std::invalid_argument);
  CHECK_THROWS_AS(pool.parallel_for(1, 0, [](long long, long long, int) {}), std::invalid_argument);
}

TEST_CASE("thread pool: more threads than work, and than CPUs") {
  ThreadPool pool(16);
  std::atomic<int> sum = 0;
  for (int repeat = 0; repeat < 50; ++repeat) {
    pool.parallel_for(3, 1, [&](long long begin, long long, int) { sum += static_cast<int>(begin) + 1; });
  }
  CHECK(sum == 50 * 6);
}

TEST_CASE("thread pool: uneven work is shared out") {
  ThreadPool pool(2);
  // Whoever draws range 0 holds it until all the others are done: they can only be done by the other thread.
  std::atomic<int> done = 0;
  std::atomic<bool> shared = false;
  pool.parallel_for(10, 1, [&](long long begin, long long, int) {
    if (begin == 0) {
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
      while (done < 9 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
      shared = done == 9;
    } else {
      ++done;
    }
  });
  CHECK(shared);
}

TEST_CASE("thread pool: an exception reaches the caller from any thread, and the pool lives on") {
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    for (int thrower = 0; thrower < threads; ++thrower) {
      CHECK_THROWS_WITH_AS(pool.run([&](int thread, int) {
        if (thread == thrower) throw std::runtime_error("thread " + std::to_string(thread));
      }),
                           ("thread " + std::to_string(thrower)).c_str(), std::runtime_error);
    }
    // One range fails at once, the others take their time: most of them must never start.
    std::atomic<int> ranges = 0;
    CHECK_THROWS_AS(pool.parallel_for(1000, 1,
                                      [&](long long begin, long long, int) {
                                        if (begin == 0) throw std::runtime_error("first range");
                                        ++ranges;
                                        std::this_thread::sleep_for(std::chrono::milliseconds(1));
                                      }),
                    std::runtime_error);
    CHECK(ranges < 500);
    std::atomic<int> calls = 0;
    pool.run([&](int, int) { ++calls; });
    CHECK(calls == threads);
  }
}

TEST_CASE("thread pool: nested and concurrent use of one pool is refused, of another pool is not") {
  for (const int threads : {1, 2}) {
    ThreadPool pool(threads);
    ThreadPool other(2);
    CHECK_THROWS_AS(pool.run([&](int, int) { pool.run([](int, int) {}); }), std::logic_error);
    CHECK_THROWS_AS(pool.parallel_for(4, 1, [&](long long, long long, int) { pool.run([](int, int) {}); }),
                    std::logic_error);
    CHECK_THROWS_AS(pool.run([&](int, int) { pool.parallel_for(0, 1, [](long long, long long, int) {}); }),
                    std::logic_error);
    std::atomic<int> calls = 0;
    pool.run([&](int thread, int) {
      if (thread == 0) other.run([&](int, int) { ++calls; });
    });
    CHECK(calls == 2);
    // From a thread that is not in the pool, while the pool runs.
    bool refused = false;
    pool.run([&](int thread, int) {
      if (thread != 0) return;
      std::thread outsider([&] {
        try {
          pool.run([](int, int) {});
        } catch (const std::logic_error&) {
          refused = true;
        }
      });
      outsider.join();
    });
    CHECK(refused);
  }
}

TEST_CASE("thread pool: workers that went to sleep wake up again") {
  ThreadPool pool(2);
  std::atomic<int> calls = 0;
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // far longer than the pool spins
    pool.run([&](int thread, int) {
      if (thread == repeat % 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      ++calls;
    });
  }
  CHECK(calls == 40);
}

TEST_CASE("thread pool: bad thread counts are refused; 0 means one per CPU; pinning works where it can") {
  CHECK_THROWS_AS(ThreadPool(-1), std::invalid_argument);
  CHECK(ThreadPool(0).size() == ladder::cpu::available_cpus());
  CHECK_THROWS_AS(ThreadPool(ladder::cpu::available_cpus() + 1, true), std::invalid_argument);
#if defined(__linux__)
  const int cpus = ladder::cpu::available_cpus();
  ThreadPool pool(0, true);
  std::vector<int> seen(static_cast<std::size_t>(cpus));
  pool.run([&](int thread, int) { seen[static_cast<std::size_t>(thread)] = ladder::cpu::available_cpus(); });
  CHECK(seen[0] == cpus);  // the caller keeps its own mask
  CHECK(std::all_of(seen.begin() + 1, seen.end(), [](int n) { return n == 1; }));
#endif
}
