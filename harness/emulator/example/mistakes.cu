// One kernel for each mistake that the emulator finds:  scripts/ladder emulate harness/emulator/example/mistakes.cu
#include <cstdio>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
using namespace ladder;

// ANCHOR: mistakes
// 33 threads for 32 elements.
__global__ void out_of_bounds(float* a, int) { a[threadIdx.x] = 1.0f; }

// The host filled the first half of `a` only.
__global__ void unwritten_read(float* a, int n) { a[threadIdx.x] = a[threadIdx.x + n / 2]; }

// A float4 must lie at a multiple of 16 bytes; this one starts 4 bytes later.
__global__ void misaligned(float* a, int) {
  const float4 v = *reinterpret_cast<const float4*>(a + 1);
  a[0] = v.x + v.w;
}

// The reader does not wait for the writer, which is in another warp.
__global__ void shared_race(float* a, int) {
  __shared__ float s[64];
  s[threadIdx.x] = a[0];
  a[threadIdx.x % 8] = s[63 - threadIdx.x];
}

// Every block stores to the same element.
__global__ void global_race(float* a, int) { a[0] = static_cast<float>(blockIdx.x); }

// The launch declares 64 bytes of dynamic shared memory, room for 16 floats.
__global__ void shared_overrun(float* a, int) { dynamic_shared<float>()[threadIdx.x] = a[0]; }

// Half of the threads never come to the barrier.
__global__ void barrier(float* a, int) {
  if (threadIdx.x < 32) __syncthreads();
  a[threadIdx.x % 8] = 0.0f;
}

// The mask names all lanes, but the upper half waits elsewhere.
__global__ void collective(float* a, int) {
  float v = a[0];
  if (threadIdx.x < 16) v = __shfl_down_sync(0xffffffffu, v, 1);
  __syncthreads();
  a[threadIdx.x] = v;
}
// ANCHOR_END: mistakes

int main() {
  using Kernel = void (*)(float*, int);
  struct Mistake {
    Kernel kernel;
    unsigned blocks, threads;
    std::size_t shared_bytes;
  };
  for (const Mistake& m :
       {Mistake{out_of_bounds, 1, 33, 0}, Mistake{unwritten_read, 1, 16, 0}, Mistake{misaligned, 1, 1, 0},
        Mistake{shared_race, 1, 64, 0}, Mistake{global_race, 2, 1, 0}, Mistake{shared_overrun, 1, 32, 64},
        Mistake{barrier, 1, 64, 0}, Mistake{collective, 1, 32, 0}}) {
    const int n = 32;
    Stream stream;
    Buffer<float> a(n, "a");
    const float zeros[n / 2] = {};
    a.upload(zeros);
#if defined(__CUDACC__)
    const Status s = launch(m.kernel, dim3(m.blocks), dim3(m.threads), m.shared_bytes, stream, a.data(), n);
    std::printf("%s\n", s.ok() ? "launched: a GPU need not notice" : s.message().c_str());
#else
    const emu::counting on;
    (void)launch(m.kernel, dim3(m.blocks), dim3(m.threads), m.shared_bytes, stream, a.data(), n).ok();
    const std::string report = emu::text_report(emu::last_launch());
    const std::size_t checks = report.find("checks: ");
    std::fputs(report.substr(report.find('\n', checks) + 1).c_str(), stdout);
#endif
  }
}
