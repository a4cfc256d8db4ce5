// Rows in loads of 16 bytes, where they allow it.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "kernels/device/cuda.cuh"

namespace ladder {

/// Neighbouring floats that an elementwise kernel takes at a time: four if all arrays and lengths are multiples of 16
/// bytes, otherwise one.
inline int floats_at_a_time(std::initializer_list<const void*> arrays,
                            std::initializer_list<long long> lengths) {
  std::uintptr_t together = 0;
  for (const void* p : arrays) together |= reinterpret_cast<std::uintptr_t>(p);
  for (const long long n : lengths) together |= static_cast<std::uintptr_t>(n) * sizeof(float);
  return together % 16 == 0 ? 4 : 1;
}

/// V neighbouring floats: V = 4 or 1.
template <int V>
struct Floats;
template <>
struct Floats<4> {
  float v[4];
  __device__ __forceinline__ static Floats load(const float* p) {
    const float4 x = *reinterpret_cast<const float4*>(p);
    return {{x.x, x.y, x.z, x.w}};
  }
  __device__ __forceinline__ void store(float* p) const {
    *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
  }
};
template <>
struct Floats<1> {
  float v[1];
  __device__ __forceinline__ static Floats load(const float* p) { return {{*p}}; }
  __device__ __forceinline__ void store(float* p) const { *p = v[0]; }
};

}  // namespace ladder
