// Bulk copies: one thread asks Hopper's copy engine for a whole tile, and an mbarrier says when it is there.
//
//   bulk_copy        1-D: contiguous bytes from global to shared memory. Emulated.
//   tensor_copy_2d   2-D: a box of a matrix that a TensorMap describes. Needs a GPU.
//
// USE     mbarrier_arrive_expect_bytes(&b, bytes), then the copy, by one thread; mbarrier_wait(&b, parity) by
//         all that read the tile.
// SHAPE   1-D: both addresses and the size are multiples of 16 bytes. 2-D: the destination is aligned to 128
//         bytes, gets the box row after row without gaps, and zeros where the box hangs over the matrix.
// COUNTS  on the emulator a bulk copy is one request of one thread, past L1; it writes shared memory in whole
//         rows of the 32 banks.
// ERRORS  reading the destination before the wait: undefined on the GPU, a finding on the emulator (the
//         destination is poison until then). Below sm_90, and for tensor_copy_2d on the emulator, the kernel
//         ends with an error.
// SOURCE  PTX ISA, "cp.async.bulk", "cp.async.bulk.tensor"; CUDA driver API, "Tensor Map Object Management".
#pragma once

#include <cstddef>
#include <cstdint>

#include "harness/device/status.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/mbarrier.cuh"
#if defined(__CUDACC__)
#include <cuda.h>
#endif

namespace ladder {

__device__ __forceinline__ void bulk_copy(void* shared, const void* global, unsigned bytes,
                                          std::uint64_t* b) {
#if !defined(__CUDACC__)
  emu::bulk_copy(shared, global, bytes, b);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  needs_sm90("cp.async.bulk");
#else
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(b))
      : "memory");
#endif
}

/// A matrix in global memory and the box that one copy takes of it. Kernels get it by value, as
/// `const __grid_constant__ TensorMap map`.
struct TensorMap {
#if defined(__CUDACC__)
  CUtensorMap map;
#else
  const void* data = nullptr;
#endif
};

/// Describes a row-major f16 matrix. Host code.
/// @param data device memory, aligned to 16 bytes @param columns a multiple of 8 (rows of 16 bytes)
/// @param box_rows, box_columns 1..256, box_columns a multiple of 8
[[nodiscard]] inline Status make_tensor_map(TensorMap& out, const void* data, std::uint64_t rows,
                                            std::uint64_t columns, unsigned box_rows, unsigned box_columns) {
  if (rows == 0 || columns == 0 || columns % 8 != 0) {
    return Status::error("tensor map: a matrix of " + std::to_string(rows) + " x " + std::to_string(columns) +
                         " halves; columns must be a multiple of 8, and both at least 1");
  }
  if (box_rows < 1 || box_rows > 256 || box_columns < 8 || box_columns > 256 || box_columns % 8 != 0) {
    return Status::error("tensor map: a box of " + std::to_string(box_rows) + " x " +
                         std::to_string(box_columns) +
                         "; allowed are 1 to 256 rows and 8 to 256 columns, a multiple of 8");
  }
#if defined(__CUDACC__)
  // The driver's function is asked for at run time, so that nothing has to be linked with the driver.
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found) !=
          cudaSuccess ||
      entry == nullptr) {
    return Status::error("tensor map: this driver has no cuTensorMapEncodeTiled; 12.0 or newer does");
  }
  const cuuint64_t size[2] = {columns, rows}, stride[1] = {columns * 2};  // innermost first
  const cuuint32_t box[2] = {box_columns, box_rows}, step[2] = {1, 1};
  const CUresult r = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
      &out.map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(data), size, stride, box, step,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r != CUDA_SUCCESS) {
    return Status::error("tensor map: cuTensorMapEncodeTiled returned error " +
                         std::to_string(static_cast<int>(r)));
  }
#else
  out.data = data;
#endif
  return {};
}

/// Copies the box whose first element is (row, column), which may lie outside the matrix.
__device__ __forceinline__ void tensor_copy_2d(void* shared, const TensorMap& map, int row, int column,
                                               std::uint64_t* b) {
#if !defined(__CUDACC__)
  (void)shared, (void)map, (void)row, (void)column, (void)b;
  needs_sm90("cp.async.bulk.tensor");
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  needs_sm90("cp.async.bulk.tensor");
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(shared_address(shared)),
      "l"(&map.map), "r"(column), "r"(row), "r"(shared_address(b))
      : "memory");
#endif
}

}  // namespace ladder
