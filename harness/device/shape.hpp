// The axes every matmul of the workbook is measured on.
#pragma once

namespace ladder {

/// One matmul: out[nt][od] = acts[nt][id] . weights[od][id]^T. All three are element counts >= 1.
/// `nt` token rows (1 while decoding, hundreds while reading a prompt), `od` output features, `id` inputs.
struct Shape {
  long long nt, od, id;
};

constexpr bool operator==(const Shape& a, const Shape& b) {
  return a.nt == b.nt && a.od == b.od && a.id == b.id;
}

}  // namespace ladder
