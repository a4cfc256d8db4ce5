// cuBLAS as a peer to measure against. Only the comparison binary includes this; no rung calls cuBLAS.
// ANCHOR: cublas_hgemm
#pragma once

#include "harness/compare/cublas_sgemv.hpp"

namespace ladder {

/// out[nt][od] = acts[nt][id] . weights[od][id]^T with f16 operands, f32 sums and f32 results. cuBLAS chooses the
/// kernel; on Hopper it has some that use wgmma.
inline Status launch_cublas_hgemm(const __half* weights, const __half* acts, float* out, Shape s,
                                  Stream& stream) {
  // A handle of its own: the other one's mode forbids nothing here, but a workspace belongs to a handle and a stream.
  struct Handle {
    cublasHandle_t h = nullptr;
    Buffer<unsigned char> workspace;
    Handle() : workspace(std::size_t{64} << 20, "cuBLAS workspace") {
      if (cublasCreate(&h) != CUBLAS_STATUS_SUCCESS) throw DeviceError("cublasCreate failed");
    }
  };
  static Handle handle;
  const float one = 1.0f, zero = 0.0f;
  const int nt = static_cast<int>(s.nt), od = static_cast<int>(s.od), id = static_cast<int>(s.id);
  cublasStatus_t e = cublasSetStream(handle.h, stream.handle());
  // Setting the stream takes the workspace away again. 64 MiB, more than cuBLAS asks for on Hopper (32 MiB).
  if (e == CUBLAS_STATUS_SUCCESS) {
    e = cublasSetWorkspace(handle.h, handle.workspace.data(), handle.workspace.bytes());
  }
  if (e == CUBLAS_STATUS_SUCCESS) {
    e = cublasGemmEx(handle.h, CUBLAS_OP_T, CUBLAS_OP_N, od, nt, id, &one, weights, CUDA_R_16F, id, acts,
                     CUDA_R_16F, id, &zero, out, CUDA_R_32F, od, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  }
  if (e != CUBLAS_STATUS_SUCCESS) return Status::error(std::string("cuBLAS: ") + cublasGetStatusString(e));
  return {};
}

}  // namespace ladder
// ANCHOR_END: cublas_hgemm
