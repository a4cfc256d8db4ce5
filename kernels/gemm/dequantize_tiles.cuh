// RUNG      dequantize_tiles_f16: weights in tiles to f16 rows, for products that want them so.
// PREV      dequantize_f16, which reads a file's blocks
// COMPUTES  out[r][i] = weight i of row r, as the gemm_tiles kernels multiply it (gemm_tiles_formats.cuh)
// LAYOUT    weights in tiles (kernels/mmvq/tiles.cuh), out [od][id] f16 row-major
// MAP       grid(ceil(tiles/8)) block(256): warp -> a tile, lane 4g+t -> four neighbours in every 16 of rows g and g+8
// NEEDS     id % 32 == 0 (256 for types with blocks of 256), operands at multiples of 16 bytes: checked by the launcher
// TRAFFIC   bpe*od*id B read, 2*od*id B written     WORK 2*od*id FLOP
// LOOK FOR  SASS: LDG.E.128, PRMT, HFMA2 or HMUL2, STG.E.64 in whole sectors
// EXPECT    near the write roof; decoding a matrix for one product pays only where the product is long
// BUILD     part of chapters/05-tiled-gemm
#pragma once

#include <cstdint>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/gemm/gemm_tiles_formats.cuh"
#include "kernels/gemm/gemm_tiles_parts.cuh"
#include "kernels/mmvq/mmvq_tiles_formats.cuh"

namespace ladder {

namespace tiles {

// ANCHOR: dequantize_tiles_f16
template <class Format>
__global__ void __launch_bounds__(256)
    dequantize_tiles_f16(const unsigned char* __restrict__ weights, __half* __restrict__ out, long long od,
                         long long id, long long row_steps, long long all) {
  constexpr int SUBS = Tile<typename Format::Block>::kSteps;
  const long long tile = static_cast<long long>(blockIdx.x) * 8 + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  allow_next_kernel();
  wait_for_previous_kernel();
  if (tile >= all) return;
  HalfRaw<Format> raw;
  raw.template load<FromShared>(weights + tile * tile_bytes<typename Format::Block>(), lane);
  const HalfUnits units = half_units<Format>(raw);
  const long long row = tile / row_steps * kRows + g, k0 = tile % row_steps * (32 * SUBS) + 4 * t;
  const auto sub_block = [&]<int S>() {
    std::uint32_t a[2][4];
    half_fragments<Format, S>(raw, units, a);
#pragma unroll
    for (int h16 = 0; h16 < 2; ++h16) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const long long k = k0 + 32 * S + 16 * h16, to = row + 8 * r;
        if (to < od && k < id)
          *reinterpret_cast<uint2*>(out + to * id + k) = make_uint2(a[h16][r], a[h16][2 + r]);
      }
    }
  };
  sub_block.template operator()<0>();
  sub_block.template operator()<1>();
  sub_block.template operator()<2>();
  sub_block.template operator()<3>();
  if constexpr (SUBS == 8) {
    sub_block.template operator()<4>();
    sub_block.template operator()<5>();
    sub_block.template operator()<6>();
    sub_block.template operator()<7>();
  }
}
// ANCHOR_END: dequantize_tiles_f16

}  // namespace tiles

/// out[od][id] f16 = the weights of a matrix in tiles, both in device memory. Does not synchronise.
/// @param shape od and id; nt does not matter, but must be 1 or more
inline Status launch_dequantize_tiles_f16(WeightType type, const void* weights, __half* out, Shape shape,
                                          Stream& stream, bool programmatic = false) {
  if (Status ok = gemm_tiles_supported(type, shape); !ok.ok()) return ok;
  if ((reinterpret_cast<std::uintptr_t>(weights) | reinterpret_cast<std::uintptr_t>(out)) % 16 != 0) {
    return Status::error("dequantize_tiles_f16: weights and output must begin at a multiple of 16 bytes");
  }
  return tiles::with_tile_format(type, [&](auto format) -> Status {
    using Format = decltype(format);
    const long long row_steps = tiles::steps<typename Format::Block>(shape.id);
    const long long all = tiles::row_tiles(shape.od) * row_steps;
    LaunchOptions options;
    options.programmatic = programmatic;
    return launch(options, tiles::dequantize_tiles_f16<Format>, dim3(static_cast<unsigned>((all + 7) / 8)),
                  dim3(256), 0, stream, static_cast<const unsigned char*>(weights), out, shape.od, shape.id,
                  row_steps, all);
  });
}

}  // namespace ladder
