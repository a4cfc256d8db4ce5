// What this CPU can do, found at run time, and which instruction set the twins use.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace ladder::cpu {

/// Instruction sets that the twins have code for, in order of preference (later is better).
enum class Isa {
  portable,  ///< plain C++ with the compiler's own vectors: any CPU
  neon,      ///< aarch64: 128-bit, always there
  avx2,      ///< x86-64: 256-bit with fused multiply-add (AVX2, FMA and F16C)
  avx512,    ///< x86-64: 512-bit with masks (AVX-512 F, BW and VL)
};

struct Features {
  bool avx2 = false, fma = false, f16c = false;
  bool avx512f = false, avx512bw = false, avx512vl = false, avx512vnni = false;
  bool neon = false, dotprod = false;
};

/// The features of the CPU this process runs on; also false for what the operating system does not save.
[[nodiscard]] const Features& features();

/// One line, such as "avx2 fma f16c avx512f avx512bw avx512vl avx512vnni; twins use avx512".
[[nodiscard]] std::string features_summary();

/// "portable", "neon", "avx2" or "avx512".
[[nodiscard]] std::string_view name(Isa isa);

/// Every instruction set that this machine can run, worst first; Isa::portable is always among them.
[[nodiscard]] std::span<const Isa> supported_isas();

/// The instruction set the twins use now: the forced one, otherwise the best supported one.
[[nodiscard]] Isa isa();

/// Makes the twins use `isa` until the next call; std::nullopt goes back to the best. For tests and for
/// measuring one instruction set against another; not to be changed while a twin runs. Throws
/// std::invalid_argument if this machine cannot run it.
void force_isa(std::optional<Isa> isa);

}  // namespace ladder::cpu
