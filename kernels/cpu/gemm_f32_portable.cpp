// The tiles of gemm_f32 in plain C++: vectors of 4 floats as the compiler has them; 2 vectors of rows x 4 tokens.
#include <cstdint>
#include <utility>

#include "harness/device/half_bits.hpp"

#define LADDER_TARGET

namespace ladder::cpu {
namespace {

struct Floats {
  float lane[4];
};
constexpr int kLanes = 4, kVectors = 2, kTokens = 4;
inline Floats load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
inline Floats load_halves(const std::uint16_t* p) {
  return {{half_bits_to_float(p[0]), half_bits_to_float(p[1]), half_bits_to_float(p[2]),
           half_bits_to_float(p[3])}};
}
inline void store(float* p, const Floats& v) {
  for (int i = 0; i < 4; ++i) p[i] = v.lane[i];
}
inline Floats all(float v) { return {{v, v, v, v}}; }
inline void keep(Floats&) {}
inline Floats add(Floats a, const Floats& b) {
  for (int i = 0; i < 4; ++i) a.lane[i] += b.lane[i];
  return a;
}
inline Floats madd(const Floats& a, const Floats& b, Floats c) {
  for (int i = 0; i < 4; ++i) c.lane[i] += a.lane[i] * b.lane[i];
  return c;
}
inline void transpose(Floats v[4]) {
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < i; ++j) std::swap(v[i].lane[j], v[j].lane[i]);
  }
}

}  // namespace
}  // namespace ladder::cpu

#include "kernels/cpu/gemm_f32_body.hpp"

namespace ladder::cpu {
const GemmKernels kGemmPortable = kGemm;
}  // namespace ladder::cpu
