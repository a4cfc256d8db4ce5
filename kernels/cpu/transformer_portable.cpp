// The parts around the matmuls in plain C++: loops over 16 floats that the compiler makes vectors of.
#include <bit>
#include <cmath>
#include <cstdint>

#include "harness/device/half_bits.hpp"

#define LADDER_TARGET

namespace ladder::cpu {
namespace {

struct Floats {
  float lane[16];
};
template <class F>
inline Floats each(F&& f) {
  Floats v;
  for (int i = 0; i < 16; ++i) v.lane[i] = f(i);
  return v;
}
inline Floats load(const float* p) {
  return each([&](int i) { return p[i]; });
}
inline Floats load_halves(const std::uint16_t* p) {
  return each([&](int i) { return half_bits_to_float(p[i]); });
}
inline void store(float* p, const Floats& v) {
  for (int i = 0; i < 16; ++i) p[i] = v.lane[i];
}
inline void store_halves(std::uint16_t* p, const Floats& v) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half_bits(v.lane[i]);
}
inline Floats all(float x) {
  return each([&](int) { return x; });
}
inline Floats add(const Floats& a, const Floats& b) {
  return each([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Floats sub(const Floats& a, const Floats& b) {
  return each([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Floats mul(const Floats& a, const Floats& b) {
  return each([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Floats div(const Floats& a, const Floats& b) {
  return each([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline Floats madd(const Floats& a, const Floats& b,
                   const Floats& c) {  // rounds twice: not every CPU can fuse
  return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}
inline Floats larger(const Floats& a, const Floats& b) {  // a NaN in b stays
  return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Floats smaller(const Floats& a, const Floats& b) {  // a NaN in b stays
  return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Floats nearest(const Floats& v) {
  constexpr float kBig = 12582912;  // 1.5 * 2^23: the sum has no room for a fraction. |v| < 2^22
  return each([&](int i) { return (v.lane[i] + kBig) - kBig; });
}
inline Floats times_power(const Floats& x, const Floats& n) {
  return each([&](int i) {
    if (std::isnan(n.lane[i])) return n.lane[i];
    return x.lane[i] * std::bit_cast<float>((static_cast<std::int32_t>(n.lane[i]) + 127) << 23);
  });
}
inline Floats first_or(const Floats& v, int n, float other) {
  return each([&](int i) { return i < n ? v.lane[i] : other; });
}

}  // namespace
}  // namespace ladder::cpu

#include "kernels/cpu/transformer_body.hpp"

namespace ladder::cpu {
const TransformerKernels kTransformerPortable = LADDER_TRANSFORMER_KERNELS;
}  // namespace ladder::cpu
