// cuBLAS as a peer to measure against. Only the comparison binary includes this; no rung calls cuBLAS.
// ANCHOR: cublas_sgemv
#pragma once

#include <cublas_v2.h>

#include <memory>
#include <string>

#include "harness/device/device.hpp"

namespace ladder {

/// One handle per process; cuBLAS wants few and long-lived ones.
inline cublasHandle_t cublas_handle() {
  struct Handle {
    cublasHandle_t h = nullptr;
    Handle() {
      if (cublasCreate(&h) != CUBLAS_STATUS_SUCCESS) throw DeviceError("cublasCreate failed");
      // Plain f32 arithmetic, as in our kernels: no TF32.
      (void)cublasSetMathMode(h, CUBLAS_PEDANTIC_MATH);
    }
  };
  static Handle handle;
  return handle.h;
}

inline std::string cublas_version() {
  int v = 0;
  if (cublasGetProperty(MAJOR_VERSION, &v) != CUBLAS_STATUS_SUCCESS) return "";
  std::string s = std::to_string(v);
  for (const libraryPropertyType p : {MINOR_VERSION, PATCH_LEVEL}) {
    if (cublasGetProperty(p, &v) == CUBLAS_STATUS_SUCCESS) s += "." + std::to_string(v);
  }
  return s;
}

/// out[nt][od] = acts[nt][id] . weights[od][id]^T by sgemv (nt = 1) or sgemm. cuBLAS is column-major, where
/// our row-major weights [od][id] are the transpose of an id x od matrix.
inline Status launch_cublas_sgemv(const float* weights, const float* acts, float* out, Shape s,
                                  Stream& stream) {
  const float one = 1.0f, zero = 0.0f;
  const int nt = static_cast<int>(s.nt), od = static_cast<int>(s.od), id = static_cast<int>(s.id);
  cublasStatus_t e = cublasSetStream(cublas_handle(), stream.handle());
  if (e == CUBLAS_STATUS_SUCCESS) {
    e = nt == 1 ? cublasSgemv(cublas_handle(), CUBLAS_OP_T, id, od, &one, weights, id, acts, 1, &zero, out, 1)
                : cublasSgemm(cublas_handle(), CUBLAS_OP_T, CUBLAS_OP_N, od, nt, id, &one, weights, id, acts,
                              id, &zero, out, od);
  }
  if (e != CUBLAS_STATUS_SUCCESS) return Status::error(std::string("cuBLAS: ") + cublasGetStatusString(e));
  return {};
}

}  // namespace ladder
// ANCHOR_END: cublas_sgemv
