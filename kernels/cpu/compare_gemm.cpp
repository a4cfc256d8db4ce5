// The CPU's GEMMs against OpenBLAS, interleaved in one process, on shapes of Qwen2.5 at 512 tokens.
//
//   compare_gemm [--blas FILE] [--core NAME] [--threads N] [--rounds N] [--tokens N]
//
// OpenBLAS is loaded at run time and used by nothing else. Without --blas it is looked for as libopenblas.so.0 and
// among the libraries of NumPy in ./.venv. It chooses kernels by the CPU, or as --core says (SkylakeX, Haswell, ...);
// what the environment says of that, which may be meant for other programs, does not count here.
// Every product is checked against a float64 sum at some places before it is timed. Times are the best and the median
// of the rounds: by the clock on the wall, or with one thread by that thread's CPU clock, which others on the machine do
// not stretch. Exit status 77 where there is no OpenBLAS.
#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/features.hpp"
#include "kernels/cpu/gemm_f32.hpp"
#include "kernels/cpu/gemm_int8.hpp"
#include "kernels/cpu/gemv.hpp"
#include "kernels/cpu/thread_pool.hpp"
#include "kernels/quant/quantize.hpp"

namespace {

using ladder::Shape;
using ladder::WeightType;
using ladder::cpu::ThreadPool;

/// cblas_sgemm with 32- or 64-bit integers.
class OpenBlas {
 public:
  explicit OpenBlas(const std::string& file, int threads)
      : library_(::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) return;
    for (const char* prefix : {"scipy_", ""}) {
      for (const char* suffix : {"64_", ""}) {
        const auto find = [&](const char* name) {
          return ::dlsym(library_, (std::string(prefix) + name + suffix).c_str());
        };
        sgemm_ = find("cblas_sgemm");
        if (sgemm_ == nullptr) continue;
        wide_ = *suffix != '\0';
        if (void* set = find("openblas_set_num_threads")) reinterpret_cast<void (*)(int)>(set)(threads);
        if (void* core = find("openblas_get_corename")) core_ = reinterpret_cast<char* (*)()>(core)();
        return;
      }
    }
  }
  [[nodiscard]] bool usable() const { return sgemm_ != nullptr; }
  [[nodiscard]] const std::string& core() const { return core_; }

  /// out[nt][od] = acts[nt][id] . weights[od][id]^T
  void multiply(const float* weights, const float* acts, float* out, Shape s) const {
    wide_ ? call<long long>(weights, acts, out, s) : call<int>(weights, acts, out, s);
  }

 private:
  template <class Int>
  void call(const float* weights, const float* acts, float* out, Shape s) const {
    constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;
    using Sgemm = void (*)(int, int, int, Int, Int, Int, float, const float*, Int, const float*, Int, float,
                           float*, Int);
    const auto nt = static_cast<Int>(s.nt), od = static_cast<Int>(s.od), id = static_cast<Int>(s.id);
    reinterpret_cast<Sgemm>(sgemm_)(kRowMajor, kPlain, kTransposed, nt, od, id, 1, acts, id, weights, id, 0,
                                    out, od);
  }
  void* library_;
  void* sgemm_ = nullptr;
  bool wide_ = false;
  std::string core_ = "unknown";
};

std::vector<std::string> candidates() {
  std::vector<std::string> files = {"libopenblas.so.0", "libopenblas.so"};
  std::error_code none;
  for (auto it = std::filesystem::recursive_directory_iterator(".venv/lib", none);
       it != std::filesystem::recursive_directory_iterator(); it.increment(none)) {
    if (it->path().filename().string().starts_with("libscipy_openblas")) files.push_back(it->path().string());
  }
  return files;
}

/// One way to multiply: its times, and operations of a product.
struct Way {
  std::string name;
  std::function<void()> run;
  const std::vector<float>* out;
  double relative_error;  // of a sum of magnitudes that is accepted
  std::vector<double> seconds = {};
};

void require_right(const Way& way, const std::vector<float>& weights, const std::vector<float>& acts,
                   Shape s) {
  std::minstd_rand random(7);
  for (int i = 0; i < 64; ++i) {
    const auto t = static_cast<long long>(random() % static_cast<unsigned>(s.nt));
    const auto r = static_cast<long long>(random() % static_cast<unsigned>(s.od));
    double sum = 0, terms = 0;
    for (long long k = 0; k < s.id; ++k) {
      const double p = static_cast<double>(weights[static_cast<std::size_t>(r * s.id + k)]) *
                       acts[static_cast<std::size_t>(t * s.id + k)];
      sum += p;
      terms += std::fabs(p);
    }
    const double got = (*way.out)[static_cast<std::size_t>(t * s.od + r)];
    if (!(std::fabs(got - sum) <= way.relative_error * terms))
      throw std::runtime_error(way.name + ": wrong product");
  }
}

double now(int threads) {
  timespec time{};
  ::clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void compare(const OpenBlas& blas, Shape s, int rounds, ThreadPool& pool) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> weights(static_cast<std::size_t>(s.od * s.id)),
      acts(static_cast<std::size_t>(s.nt * s.id));
  for (float& w : weights) w = normal(random);
  for (float& x : acts) x = normal(random);
  std::vector<float> out(static_cast<std::size_t>(s.nt * s.od));
  std::vector<std::vector<unsigned char>> packed;
  ladder::cpu::Int8Gemm gemm;
  ladder::cpu::QuantizedActs quantized;

  const double f32_error = static_cast<double>(s.id) * 0x1p-24;
  constexpr double kCodes = 0.2;  // of weights and activations with few bits: only gross mistakes show here
  std::vector<Way> ways = {
      {"openblas", [&] { blas.multiply(weights.data(), acts.data(), out.data(), s); }, &out, f32_error},
      {"gemm_f32", [&] { ladder::cpu::gemm_f32(weights.data(), acts.data(), out.data(), s, pool); }, &out,
       f32_error},
      {"gemv_vec", [&] { ladder::cpu::gemv_vec(weights.data(), acts.data(), out.data(), s, pool); }, &out,
       f32_error}};
  const WeightType types[] = {WeightType::q4_0, WeightType::q8_0, WeightType::q4_k};
  for (const WeightType type : types) {
    if (s.id % ladder::info(type).block_elems != 0) continue;
    const std::size_t row = ladder::row_bytes(type, s.id);
    packed.emplace_back(static_cast<std::size_t>(s.od) * row);
    unsigned char* blocks = packed.back().data();
    for (long long r = 0; r < s.od; ++r) {
      ladder::quantize_row(type, weights.data() + r * s.id, blocks + static_cast<std::size_t>(r) * row, s.id);
    }
    const auto product = [blocks, type, &out, s] {
      return ladder::cpu::Product{type, blocks, s.od, out.data()};
    };
    const std::string name = ladder::info(type).name;
    ways.push_back({name + " gemm",
                    [&, product] {
                      gemm.quantize(acts.data(), s.nt, s.id, pool);
                      const ladder::cpu::Product p = product();
                      gemm.multiply({&p, 1}, acts.data(), s.nt, s.id, pool);
                    },
                    &out, kCodes});
    ways.push_back({name + " matmul",
                    [&, product] {
                      quantized.quantize(acts.data(), s.nt, s.id, pool);
                      const ladder::cpu::Product p = product();
                      ladder::cpu::multiply({&p, 1}, acts.data(), &quantized, s.nt, s.id, pool);
                    },
                    &out, kCodes});
  }
  for (Way& way : ways) {
    std::fill(out.begin(), out.end(), std::nanf(""));
    way.run();
    require_right(way, weights, acts, s);
  }
  for (int round = 0; round < rounds; ++round) {
    for (Way& way : ways) {
      const double begin = now(pool.size());
      way.run();
      way.seconds.push_back(now(pool.size()) - begin);
    }
  }
  const double operations =
      2e-9 * static_cast<double>(s.nt) * static_cast<double>(s.od) * static_cast<double>(s.id);
  std::printf("nt %lld, od %lld, id %lld\n", s.nt, s.od, s.id);
  double best_blas = 0;
  for (Way& way : ways) {
    std::sort(way.seconds.begin(), way.seconds.end());
    const double best = way.seconds.front(), median = way.seconds[way.seconds.size() / 2];
    if (best_blas == 0) best_blas = best;
    std::printf("  %-12s %8.1f GOP/s best %8.1f median   %5.2f x openblas\n", way.name.c_str(),
                operations / best, operations / median, best_blas / best);
  }
}

int number(const char* text, const char* of) {
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (end == text || *end != '\0' || value < 1 || value > 65536) {
    throw std::invalid_argument(std::string(of) + " must be 1 to 65536, not " + text);
  }
  return static_cast<int>(value);
}

int run(int argc, char** argv) {
  std::vector<std::string> files;
  std::string core;
  int threads = ladder::cpu::available_cpus(), rounds = 7, tokens = 512;
  for (int i = 1; i < argc; i += 2) {
    const std::string option = argv[i];
    if (i + 1 == argc) throw std::invalid_argument(option + " needs a value");
    if (option == "--blas") {
      files = {argv[i + 1]};
    } else if (option == "--core") {
      core = argv[i + 1];
    } else if (option == "--threads") {
      threads = number(argv[i + 1], "--threads");
    } else if (option == "--rounds") {
      rounds = number(argv[i + 1], "--rounds");
    } else if (option == "--tokens") {
      tokens = number(argv[i + 1], "--tokens");
    } else {
      throw std::invalid_argument("unknown option " + option +
                                  "; there are --blas, --core, --threads, --rounds, --tokens");
    }
  }
  if (files.empty()) files = candidates();
  ::unsetenv("OPENBLAS_L2_SIZE");
  core.empty() ? ::unsetenv("OPENBLAS_CORETYPE") : ::setenv("OPENBLAS_CORETYPE", core.c_str(), 1);
  for (const std::string& file : files) {
    const OpenBlas blas(file, threads);
    if (!blas.usable()) continue;
    std::printf("%s\n%d threads; openblas with kernels for %s\n", ladder::cpu::features_summary().c_str(),
                threads, blas.core().c_str());
    ThreadPool pool(threads);
    for (const auto& [od, id] :
         {std::pair{896LL, 896LL}, {4864LL, 896LL}, {896LL, 4864LL}, {3584LL, 3584LL}}) {
      compare(blas, {tokens, od, id}, rounds, pool);
    }
    compare(blas, {tokens, 2048, 3584}, rounds, pool);   // a part of 18944 rows
    compare(blas, {tokens, 1024, 18944}, rounds, pool);  // a part of 3584 rows
    return 0;
  }
  std::fprintf(stderr, "compare_gemm: no OpenBLAS found; --blas FILE names one\n");
  return 77;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "compare_gemm: %s\n", e.what());
    return 1;
  }
}
