// Bulk copies: one thread asks Hopper's copy engine for a whole tile, and an mbarrier says when it is there.
//
//   bulk_copy                  1-D: contiguous bytes from global to shared memory. Emulated.
//   tensor_copy_2d             2-D: a box of a matrix that a TensorMap describes. Needs a GPU.
//   tensor_copy_2d_multicast   the same box for several blocks of a cluster, read once.
//   tensor_store_2d            the way back: a box from shared memory into the matrix.
//
// USE     mbarrier_arrive_expect_bytes(&b, bytes), then the copy, by one thread; mbarrier_wait(&b, parity) by
//         all that read the tile. For stores: those that wrote the box, wgmma_smem_fence() and a barrier; then
//         one thread: tensor_store_2d, bulk_store_commit(), and before the box is written again
//         bulk_store_wait_read<n>(): all but the latest n groups have been read. The kernel's end waits for
//         the rest.
// SHAPE   1-D: both addresses and the size are multiples of 16 bytes. 2-D: the destination is aligned to 128
//         bytes, gets the box row after row without gaps, and zeros where the box hangs over the matrix; a
//         store leaves out what hangs over. With the 128-byte swizzle the box is 128 bytes wide and the
//         destination aligned to 1024: the 16 bytes number c of row r lie at place c ^ (r % 8) of the row, so
//         that eight rows' same column is in all 32 banks.
// COUNTS  on the emulator a bulk copy is one request of one thread, past L1; it writes shared memory in whole
//         rows of the 32 banks.
// ERRORS  reading the destination before the wait: undefined on the GPU, a finding on the emulator (the
//         destination is poison until then). Below sm_90, and for the 2-D copies on the emulator, the kernel
//         ends with an error.
// SOURCE  PTX ISA, "cp.async.bulk", "cp.async.bulk.tensor", "Tensor swizzling modes"; CUDA driver API, "Tensor
//         Map Object Management".
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

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

enum class TensorElement { f16, f32 };
enum class TensorSwizzle { none, bytes_128 };

/// How a matrix and its boxes are described, where the plain way is not enough.
struct TensorMapOptions {
  TensorElement element = TensorElement::f16;
  TensorSwizzle swizzle = TensorSwizzle::none;
  /// A miss in L2 brings 256 bytes of the row. For matrices that are read whole.
  bool promote_l2 = false;
};

/// Describes a row-major matrix. Host code.
/// @param data device memory, aligned to 16 bytes @param columns rows have whole 16 bytes: a multiple of 8
/// halves or 4 floats
/// @param box_rows, box_columns 1..256, box_columns a multiple of 16 bytes; with the 128-byte swizzle at most
/// 128 bytes
[[nodiscard]] inline Status make_tensor_map(TensorMap& out, const void* data, std::uint64_t rows,
                                            std::uint64_t columns, unsigned box_rows, unsigned box_columns,
                                            const TensorMapOptions& options = {}) {
  const bool halves = options.element == TensorElement::f16;
  const unsigned bytes = halves ? 2 : 4, step_columns = 16 / bytes;
  const std::string names = halves ? " halves" : " floats", step_name = std::to_string(step_columns);
  if (rows == 0 || columns == 0 || columns % step_columns != 0) {
    return Status::error("tensor map: a matrix of " + std::to_string(rows) + " x " + std::to_string(columns) +
                         names + "; columns must be a multiple of " + step_name + ", and both at least 1");
  }
  const unsigned widest = options.swizzle == TensorSwizzle::bytes_128 ? 128 / bytes : 256;
  if (box_rows < 1 || box_rows > 256 || box_columns < step_columns || box_columns > widest ||
      box_columns % step_columns != 0) {
    return Status::error("tensor map: a box of " + std::to_string(box_rows) + " x " +
                         std::to_string(box_columns) + names + "; allowed are 1 to 256 rows and " +
                         step_name + " to " + std::to_string(widest) + " columns, a multiple of " +
                         step_name);
  }
#if defined(__CUDACC__)
  // The driver's function is asked for at run time, so that nothing has to be linked with the driver; once,
  // because kernels of a few microseconds get new maps at every launch.
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const bool ok = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                     cudaEnableDefault, &found) == cudaSuccess;
    return ok ? reinterpret_cast<Encode>(entry) : nullptr;
  }();
  if (encode == nullptr) {
    return Status::error("tensor map: this driver has no cuTensorMapEncodeTiled; 12.0 or newer does");
  }
  const cuuint64_t size[2] = {columns, rows}, stride[1] = {columns * bytes};  // innermost first
  const cuuint32_t box[2] = {box_columns, box_rows}, step[2] = {1, 1};
  const CUresult r = encode(
      &out.map, halves ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2,
      const_cast<void*>(data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      options.swizzle == TensorSwizzle::bytes_128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      options.promote_l2 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE,
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

/// Brings the description itself near, before the first copy needs it. One thread.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map.map) : "memory");
#else
  (void)map;
#endif
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

/// Copies the box into the shared memory of every block of the cluster whose bit is set in `blocks`, at the
/// same place in each; each such block's barrier at the place of `b` gets the bytes.
__device__ __forceinline__ void tensor_copy_2d_multicast(void* shared, const TensorMap& map, int row,
                                                         int column, std::uint64_t* b, unsigned blocks) {
#if !defined(__CUDACC__)
  (void)shared, (void)map, (void)row, (void)column, (void)b, (void)blocks;
  needs_sm90("cp.async.bulk.tensor");
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  needs_sm90("cp.async.bulk.tensor");
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(&map.map), "r"(column), "r"(row), "r"(shared_address(b)), "h"(static_cast<unsigned short>(blocks))
      : "memory");
#endif
}

/// Writes the box to the matrix at (row, column), without what hangs over. Ordered by the bulk_store calls.
__device__ __forceinline__ void tensor_store_2d(const TensorMap& map, int row, int column,
                                                const void* shared) {
#if !defined(__CUDACC__)
  (void)shared, (void)map, (void)row, (void)column;
  needs_sm90("cp.async.bulk.tensor");
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  needs_sm90("cp.async.bulk.tensor");
#else
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map.map),
               "r"(column), "r"(row), "r"(shared_address(shared))
               : "memory");
#endif
}

/// Ends a group of stores of this thread.
__device__ __forceinline__ void bulk_store_commit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#else
  needs_sm90("cp.async.bulk.commit_group");
#endif
}

/// Returns once the shared memory of all but this thread's latest N groups has been read.
template <int N>
__device__ __forceinline__ void bulk_store_wait_read() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
#else
  needs_sm90("cp.async.bulk.wait_group");
#endif
}

/// Returns once all of this thread's stores are done and visible to kernels that wait for this one.
__device__ __forceinline__ void bulk_store_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#else
  needs_sm90("cp.async.bulk.wait_group");
#endif
}

}  // namespace ladder
