// A kernel of your own on the emulator:  scripts/ladder emulate harness/emulator/example/first_kernel.cu
// The same file on a GPU:                nvcc -std=c++20 -O3 -I. harness/emulator/example/first_kernel.cu -o first_kernel
// ANCHOR: first_kernel
#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
using namespace ladder;

__global__ void transpose(const float* in, float* out, int n) {  // one 32x32 tile a block
  __shared__ float tile[32][32];
  const int x = blockIdx.x * 32, y = blockIdx.y * 32;
  tile[threadIdx.y][threadIdx.x] = in[(y + threadIdx.y) * n + x + threadIdx.x];
  __syncthreads();
  out[(x + threadIdx.y) * n + y + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}

int main() {
  const int n = 64;
  Stream stream;
  Buffer<float> in(n * n, "in"), out(n * n, "out");
  in.fill_bytes(0);
#if !defined(__CUDACC__)
  const emu::counting on;
#endif
  require(launch(transpose, dim3(n / 32, n / 32), dim3(32, 32), 0, stream, in.data(), out.data(), n));
  stream.synchronize();
#if !defined(__CUDACC__)
  std::fputs(emu::text_report(emu::last_launch()).c_str(), stdout);
#endif
}
// ANCHOR_END: first_kernel
