#include "kernels/cpu/features.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace ladder::cpu {
namespace {

Features detect() {
  Features found;
#if defined(__x86_64__)
  // The compiler's run-time query also asks XGETBV whether the operating system saves the wide registers.
  found.avx2 = __builtin_cpu_supports("avx2") != 0;
  found.fma = __builtin_cpu_supports("fma") != 0;
  unsigned a = 0, b = 0, c = 0,
           d = 0;  // not every compiler's query knows F16C; it needs AVX's registers only
  found.f16c = found.avx2 && __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  found.avx512f = __builtin_cpu_supports("avx512f") != 0;
  found.avx512bw = __builtin_cpu_supports("avx512bw") != 0;
  found.avx512vl = __builtin_cpu_supports("avx512vl") != 0;
  found.avx512vnni = __builtin_cpu_supports("avx512vnni") != 0;
#elif defined(__aarch64__)
  found.neon = true;  // part of the base architecture
#if defined(__linux__)
  found.dotprod = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__ARM_FEATURE_DOTPROD)
  found.dotprod = true;  // no auxiliary vector here: what the compiler was told is all there is
#endif
#endif
  return found;
}

std::vector<Isa> detect_isas() {
  const Features& f = features();
  std::vector<Isa> isas = {Isa::portable};
  if (f.neon) isas.push_back(Isa::neon);
  if (f.avx2 && f.fma && f.f16c) isas.push_back(Isa::avx2);
  if (f.avx512f && f.avx512bw && f.avx512vl) isas.push_back(Isa::avx512);
  return isas;
}

constexpr int kNotForced = -1;
std::atomic<int> forced_isa = kNotForced;

}  // namespace

const Features& features() {
  static const Features found = detect();
  return found;
}

std::string_view name(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return "portable";
    case Isa::neon:
      return "neon";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
  }
  throw std::invalid_argument("name: not an instruction set");
}

std::span<const Isa> supported_isas() {
  static const std::vector<Isa> isas = detect_isas();
  return isas;
}

Isa isa() {
  const int forced = forced_isa.load(std::memory_order_relaxed);
  return forced == kNotForced ? supported_isas().back() : static_cast<Isa>(forced);
}

void force_isa(std::optional<Isa> isa) {
  if (isa && std::ranges::find(supported_isas(), *isa) == supported_isas().end()) {
    std::string allowed;
    for (const Isa one : supported_isas()) allowed.append(allowed.empty() ? "" : ", ").append(name(one));
    throw std::invalid_argument("force_isa: this CPU cannot run " + std::string(name(*isa)) +
                                "; allowed: " + allowed);
  }
  forced_isa.store(isa ? static_cast<int>(*isa) : kNotForced, std::memory_order_relaxed);
}

std::string features_summary() {
  const Features& f = features();
  std::string text;
  const auto add = [&](bool have, const char* what) {
    if (have) text.append(text.empty() ? "" : " ").append(what);
  };
  add(f.avx2, "avx2");
  add(f.fma, "fma");
  add(f.f16c, "f16c");
  add(f.avx512f, "avx512f");
  add(f.avx512bw, "avx512bw");
  add(f.avx512vl, "avx512vl");
  add(f.avx512vnni, "avx512vnni");
  add(f.neon, "neon");
  add(f.dotprod, "dotprod");
  if (text.empty()) text = "no vector extensions known to the twins";
  return text.append("; twins use ").append(name(isa()));
}

}  // namespace ladder::cpu
