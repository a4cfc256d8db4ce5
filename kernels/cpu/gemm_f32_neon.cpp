// The tiles of gemm_f32 for aarch64 NEON: 4 floats to a vector; 3 vectors of rows x 8 tokens = 24 of the 32 registers.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "harness/device/half_bits.hpp"

#define LADDER_TARGET

namespace ladder::cpu {
namespace {

using Floats = float32x4_t;
constexpr int kLanes = 4, kVectors = 3, kTokens = 8;
inline Floats load(const float* p) { return vld1q_f32(p); }
inline Floats load_halves(const std::uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline void store(float* p, Floats v) { vst1q_f32(p, v); }
inline Floats all(float v) { return vdupq_n_f32(v); }
inline void keep(Floats&) {}
inline Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
inline Floats madd(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline void transpose(Floats v[4]) {
  const float32x4x2_t a = vtrnq_f32(v[0], v[1]), b = vtrnq_f32(v[2], v[3]);
  v[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
  v[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
  v[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
  v[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

}  // namespace
}  // namespace ladder::cpu

#include "kernels/cpu/gemm_f32_body.hpp"

namespace ladder::cpu {
const GemmKernels kGemmNeon = kGemm;
}  // namespace ladder::cpu
#endif
