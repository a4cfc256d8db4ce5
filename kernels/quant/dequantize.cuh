// RUNG      dequantize_f32, dequantize_f16: four elements a thread; embedding_rows: the same on chosen rows.
// PREV      none: this is the ground floor.
// COMPUTES  out[i] = element i of the packed blocks; embedding_rows: out[t][i] = table[tokens[t]][i]
// LAYOUT    blocks of kernels/quant/blocks.hpp one after the other; out f32 or f16, in element order
// MAP       grid(ceil(elements/1024)) block(256): thread -> four neighbouring elements, which share a scale;
//           types without blocks: grid(ceil(elements/256)), thread -> one element
// NEEDS     whole blocks, out at a multiple of 16 bytes for types with blocks, packed at a multiple of 2
//           (f32: 4): all checked by the launcher, and said in its error
// TRAFFIC   block_bytes/block_elems B an element read, 4 (f16: 2) written     WORK 1 or 2 FLOP an element
// LOOK FOR  SASS: STG.E.128; FMUL and FADD, never FFMA: the bits are those of the host
// EXPECT    near the write roof for f32; decoding a matrix for one product loses to multiplying packed codes
// BUILD     part of the engine of chapters/09-qwen; tested by kernels/quant/test_quant_kernels.cpp
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "harness/device/device.hpp"
#include "kernels/device/cuda.cuh"
#include "kernels/quant/decode.hpp"

namespace ladder {

/// Elements that a thread decodes.
template <class Block>
inline constexpr int kDequantizePerThread = Block::kElems == 1 ? 1 : 4;

// ANCHOR: decode_four
/// Elements first..first+3 of a block, first = 0, 4, 8, ...: part of one run of 16, so of one scale.
template <class Block>
__device__ __forceinline__ float4 decode_four(const Block& b, int first) {
  const int run = first / 16, j = first % 16;
  const auto scale = run_scale(b, run);
  return make_float4(value(scale, run_code(b, run, j)), value(scale, run_code(b, run, j + 1)),
                     value(scale, run_code(b, run, j + 2)), value(scale, run_code(b, run, j + 3)));
}
// ANCHOR_END: decode_four

/// Four f16 numbers that are stored at once.
struct alignas(8) FourHalves {
  __half2 low, high;
};

__device__ __forceinline__ void store_decoded(float* p, float v) { *p = v; }
__device__ __forceinline__ void store_decoded(float* p, float4 v) { *reinterpret_cast<float4*>(p) = v; }
__device__ __forceinline__ void store_decoded(__half* p, float v) { *p = __float2half_rn(v); }
__device__ __forceinline__ void store_decoded(__half* p, float4 v) {
  *reinterpret_cast<FourHalves*>(p) = {__floats2half2_rn(v.x, v.y), __floats2half2_rn(v.z, v.w)};
}

/// Decodes element `i` of `packed`, or elements i..i+3 for types with blocks, to out.
template <class Block, class Out>
__device__ __forceinline__ void decode_to(const Block* packed, long long i, Out* out) {
  const Block& b = packed[i / Block::kElems];
  if constexpr (Block::kElems == 1) {
    store_decoded(out, element(b, 0));
  } else {
    store_decoded(out, decode_four(b, static_cast<int>(i % Block::kElems)));
  }
}

// ANCHOR: dequantize_f32
template <class Block>
__global__ void __launch_bounds__(256)
    dequantize_f32(const Block* __restrict__ packed,  // [elements / kElems]
                   float* __restrict__ out,           // [elements]
                   long long elements) {
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long i = thread * kDequantizePerThread<Block>;  // 0..elements-1
  if (i < elements) decode_to(packed, i, out + i);
}
// ANCHOR_END: dequantize_f32

/// Rounds to nearest even; values beyond the largest f16 become infinite.
template <class Block>
__global__ void __launch_bounds__(256)
    dequantize_f16(const Block* __restrict__ packed,  // [elements / kElems]
                   __half* __restrict__ out,          // [elements]
                   long long elements) {
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long i = thread * kDequantizePerThread<Block>;  // 0..elements-1
  if (i < elements) decode_to(packed, i, out + i);
}

// ANCHOR: embedding_rows
template <class Block>
__global__ void __launch_bounds__(256)
    embedding_rows(const Block* __restrict__ table,  // [vocabulary][id / kElems]
                   const int* __restrict__ tokens,   // [nt]
                   float* __restrict__ out,          // [nt][id]
                   long long nt, long long id, long long vocabulary) {
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long i = thread * kDequantizePerThread<Block>;  // 0..nt*id-1
  if (i >= nt * id) return;
  const long long token = tokens[i / id];
  if (token < 0 || token >= vocabulary) {
    // No such row. NaN goes through everything that follows; zeros would pass for a row.
    for (int k = 0; k < kDequantizePerThread<Block>; ++k) out[i + k] = __int_as_float(0x7fffffff);
    return;
  }
  decode_to(table + token * (id / Block::kElems), i % id, out + i);
}
// ANCHOR_END: embedding_rows

namespace detail {

/// Blocks of 256 threads that decode so many elements.
template <class Block>
constexpr long long dequantize_blocks(long long elements) {
  constexpr long long kPerBlock = 256LL * kDequantizePerThread<Block>;
  return (elements - 1) / kPerBlock + 1;
}

/// What the kernels of this file ask of their arguments: `rows` rows of `length` elements.
template <class Block>
Status check_dequantize(const char* kernel, const char* what, long long rows, long long length,
                        const void* packed, const void* out) {
  const std::string name = std::string(kernel) + " (" + info(Block::kType).name + "): ";
  if (length < 1 || length % Block::kElems != 0) {
    return Status::error(name + "the number of elements" + what + " must be a positive multiple of " +
                         std::to_string(Block::kElems) + ", not " + std::to_string(length));
  }
  constexpr long long kMost =
      0x7fffffffLL * 256;  // a grid of the most blocks, with an element for each thread
  if (length > kMost / rows) {
    return Status::error(name + "at most " + std::to_string(kMost) + " elements at once, not " +
                         std::to_string(rows) + " x " + std::to_string(length));
  }
  if (reinterpret_cast<std::uintptr_t>(packed) % alignof(Block) != 0) {
    return Status::error(name + "the packed blocks must begin at a multiple of " +
                         std::to_string(alignof(Block)) + " bytes");
  }
  if (Block::kElems > 1 && reinterpret_cast<std::uintptr_t>(out) % 16 != 0) {
    return Status::error(name + "the output must begin at a multiple of 16 bytes");
  }
  return {};
}

/// with_block for launchers, which return what is wrong.
template <class F>
Status with_block_status(WeightType type, F&& f) {
  try {
    return with_block(type, f);
  } catch (const std::invalid_argument& e) {
    return Status::error(e.what());
  }
}

}  // namespace detail

/// out[elements] f32 = the packed elements, with the bits of dequantize_row (NaNs may differ in theirs). Both
/// in device memory. Does not synchronise.
/// @param elements a positive multiple of the block length of the type
inline Status launch_dequantize(WeightType type, const void* packed, float* out, long long elements,
                                Stream& stream) {
  return detail::with_block_status(type, [&](auto tag) -> Status {
    using Block = typename decltype(tag)::type;
    Status ok = detail::check_dequantize<Block>("dequantize_f32", "", 1, elements, packed, out);
    if (!ok.ok()) return ok;
    const dim3 grid(static_cast<unsigned>(detail::dequantize_blocks<Block>(elements)));
    return launch(dequantize_f32<Block>, grid, dim3(256), 0, stream, static_cast<const Block*>(packed), out,
                  elements);
  });
}

/// As the other, to f16: rounded to nearest even, infinite beyond the largest f16.
inline Status launch_dequantize(WeightType type, const void* packed, __half* out, long long elements,
                                Stream& stream) {
  return detail::with_block_status(type, [&](auto tag) -> Status {
    using Block = typename decltype(tag)::type;
    Status ok = detail::check_dequantize<Block>("dequantize_f16", "", 1, elements, packed, out);
    if (!ok.ok()) return ok;
    const dim3 grid(static_cast<unsigned>(detail::dequantize_blocks<Block>(elements)));
    return launch(dequantize_f16<Block>, grid, dim3(256), 0, stream, static_cast<const Block*>(packed), out,
                  elements);
  });
}

/// out[nt][id] f32 = rows tokens[0..nt-1] of table[vocabulary][id], all in device memory: the embedding of a
/// prompt. A token outside 0..vocabulary-1 gives a row of NaN. Does not synchronise.
/// @param id a positive multiple of the block length of the type
inline Status launch_embedding_rows(WeightType type, const void* table, const int* tokens, float* out,
                                    long long nt, long long id, long long vocabulary, Stream& stream) {
  return detail::with_block_status(type, [&](auto tag) -> Status {
    using Block = typename decltype(tag)::type;
    if (nt < 1 || vocabulary < 1)
      return Status::error("embedding_rows: nt and vocabulary must be at least 1");
    Status ok = detail::check_dequantize<Block>("embedding_rows", " of a row", nt, id, table, out);
    if (!ok.ok()) return ok;
    const dim3 grid(static_cast<unsigned>(detail::dequantize_blocks<Block>(nt * id)));
    return launch(embedding_rows<Block>, grid, dim3(256), 0, stream, static_cast<const Block*>(table), tokens,
                  out, nt, id, vocabulary);
  });
}

}  // namespace ladder
