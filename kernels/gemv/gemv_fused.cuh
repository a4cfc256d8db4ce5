// RUNG      gemv_fused: one token's products of float weights, with what stands before and behind them in the same launch.
// PREV      quant_f32_matmul: normalisation, bias, residual and gate are launches of their own, and no weight is on its way
//           while the kernel before ends
// COMPUTES  out[od] = f(acts)[id] . weights[od][id]^T of up to three matrices, a bias and a residual added; or of two,
//           silu(gate) * up. f is nothing, or x / sqrt(mean(x^2) + epsilon) * norm
// LAYOUT    weights row-major f16, bf16 or f32, acts and out f32
// MAP       grid(one block a multiprocessor, or a few) block(32 W): block -> neighbouring rows; `split` warps -> every
//           (W/split)th pair of them; lane -> every (32*split)th 16 bytes of both rows
// NEEDS     id % 8 == 0 (f32: 4), pointers to rows at multiples of 16 bytes, sm_80, the activations in shared memory:
//           checked by the launcher, and said in its error
// TRAFFIC   weights od*id*element B, once; acts 4*id B a block, from L2     WORK 2*od*id FLOP
// LOOK FOR  SASS: LDGSTS.E.BYPASS.128 before ACQBULK; in the loop four LDS.128 a step (f32: three), and no LDG
// EXPECT    the read roof for hundreds of megabytes; a launch, and two trips to L2, for a few
// BUILD     part of the engine of chapters/09-qwen; tested by kernels/gemv/test_gemv_fused.cpp
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "harness/device/device.hpp"
#include "harness/experiment/weight_types.hpp"
#include "kernels/device/cp_async.cuh"
#include "kernels/device/cuda.cuh"
#include "kernels/device/pdl.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/gemv/gemv_fused_shape.hpp"
#include "kernels/gemv/quant_f32_formats.cuh"

namespace ladder {

inline constexpr int kMostFusedParts = 3;  ///< matrices of one launch: Q, K and V

/// One of the matrices that are multiplied with the same activations.
struct FusedPart {
  const void* weights;  ///< [od][id]
  float* out;           ///< [od]
  int od;
  const float* bias = nullptr;      ///< [od], added; or null
  const float* residual = nullptr;  ///< [od], added, may be `out` itself; or null
};

/// What the matrices are multiplied with.
struct FusedActs {
  const float* row;             ///< [id]
  const float* norm = nullptr;  ///< [id] weights of a root-mean-square normalisation, or null
  float epsilon = 0.0f;         ///< of that
};

namespace gemv_fused_detail {

/// Sixteen bytes of two rows times activations, which lie in planes: four elements of every unit, then the next four.
template <class Pair, WeightType TYPE>
struct SixteenBits {
  static constexpr WeightType kType = TYPE;
  static constexpr int kElems = elements_of(TYPE);
  static __device__ __forceinline__ void add(unsigned w, float x, float y, float2& sum) {
    sum.x += Pair::first(w) * x;
    sum.y += Pair::second(w) * y;
  }
  static __device__ __forceinline__ void add(const uint4& w, const uint4& v, const float4* acts, int plane,
                                             float2& sum, float2& other) {
    const float4 a = acts[0], b = acts[plane];
    add(w.x, a.x, a.y, sum), add(v.x, a.x, a.y, other);
    add(w.y, a.z, a.w, sum), add(v.y, a.z, a.w, other);
    add(w.z, b.x, b.y, sum), add(v.z, b.x, b.y, other);
    add(w.w, b.z, b.w, sum), add(v.w, b.z, b.w, other);
  }
};
using F16 = SixteenBits<quant_f32::HalfPair, WeightType::f16>;
using BF16 = SixteenBits<quant_f32::BfloatPair, WeightType::bf16>;
struct F32 {
  static constexpr WeightType kType = WeightType::f32;
  static constexpr int kElems = elements_of(kType);
  static __device__ __forceinline__ void add(const uint4& w, const float4& a, float2& sum) {
    sum.x += __uint_as_float(w.x) * a.x;
    sum.y += __uint_as_float(w.y) * a.y;
    sum.x += __uint_as_float(w.z) * a.z;
    sum.y += __uint_as_float(w.w) * a.w;
  }
  static __device__ __forceinline__ void add(const uint4& w, const uint4& v, const float4* acts, int,
                                             float2& sum, float2& other) {
    const float4 a = acts[0];
    add(w, a, sum), add(v, a, other);
  }
};

/// Sums of all lanes: of `a` in lanes 0..15, of `b` in lanes 16..31. With half the shuffles of two sums.
__device__ __forceinline__ float pair_reduce_sum(float a, float b, int lane) {
  const bool upper = lane >= 16;
  float sum = (upper ? b : a) + __shfl_xor_sync(kAllLanes, upper ? a : b, 16);
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  return sum;
}

struct Parts {
  FusedPart part[kMostFusedParts];
  int first[kMostFusedParts];  ///< output that part p begins with, counted over all parts
  int share, more;             ///< outputs of a block, and how many blocks have one more
  int split;                   ///< warps that share a row: 1 to W, a power of two
};

__device__ __forceinline__ int part_of(const Parts& parts, int out) {
  return out < parts.first[1] ? 0 : out < parts.first[2] ? 1 : 2;
}

/// @tparam W warps of a block @tparam D steps of a warp under way
/// @tparam SWIGLU part 0 is the gate and part 1 what it lets through: out = silu(gate) * up
/// Registers are so few that two blocks have room on a multiprocessor, and one of attention, of 128 threads, beside them.
template <class Format, bool SWIGLU, int W, int D>
__global__ void __launch_bounds__(32 * W + 64, 2) gemv_fused(Parts parts, FusedActs x, int id) {
  constexpr int THREADS = 32 * W, PLANES = Format::kElems / 4;
  __shared__ float sums[kMostSums], squares[W];
  const int me = static_cast<int>(threadIdx.x), lane = me % 32, warp = me / 32;
  allow_next_kernel();

  // 1. This block's outputs, and the rows that they are made of: with a gate, its row and the other matrix's in turn. Two
  //    neighbouring rows are multiplied together, as they share what is read of the activations.
  const int block = static_cast<int>(blockIdx.x);
  const int first = block * parts.share + min(block, parts.more);
  const int outs = parts.share + (block < parts.more ? 1 : 0), rows = SWIGLU ? 2 * outs : outs;
  const int pairs = (rows + 1) / 2;
  const int split = parts.split, together = W / split, part = warp % split;
  const int units = id / Format::kElems, stride = 32 * split, steps = (units + stride - 1) / stride;
  const auto row_at = [&](int row) {
    const int p = SWIGLU ? row % 2 : part_of(parts, first + row);
    const long long r = SWIGLU ? first + row / 2 : first + row - parts.first[p];
    return static_cast<const uint4*>(parts.part[p].weights) + r * units;
  };

  // 2. Weights on their way before anything else, into a ring of the warp's own: they do not depend on the kernel before
  //    this one. Each lane copies what it will multiply itself, so no lane waits for another. Behind the end of a row come
  //    zeros; a last row without a neighbour is its own.
  uint4* const ring = dynamic_shared<uint4>() + warp * (D * 64) + lane;  // [D][2][32]
  int load_pair = warp / split, load_unit = part * 32 + lane;
  const uint4 *from = nullptr, *other = nullptr;
  const auto begin_pair = [&] {
    if (load_pair >= pairs) return;
    from = row_at(2 * load_pair);
    other = row_at(min(2 * load_pair + 1, rows - 1));
  };
  begin_pair();
  const auto load_next = [&](uint4* to) {
    if (load_pair < pairs) {
      const int at = load_unit < units ? load_unit : 0, bytes = load_unit < units ? 16 : 0;
      cp_async_cg(to, from + at, bytes);
      cp_async_cg(to + 32, other + at, bytes);
      load_unit += stride;
      if (load_unit >= steps * stride) {
        load_unit = part * 32 + lane;
        load_pair += together;
        begin_pair();
      }
    }
    cp_async_commit_group();  // empty at the end, so that groups count steps
  };
#pragma unroll 1
  for (int d = 0; d < D; ++d) load_next(ring + 64 * d);

  // 3. Activations in planes, zeros behind them; the norm's weights are there before the row is.
  const int plane = steps * stride, fours = id / 4;
  float4* const acts = dynamic_shared<float4>() + W * D * 64;  // [PLANES][plane]
  const auto place = [&](int i) { return i % PLANES * plane + i / PLANES; };
  for (int i = me; i < plane * PLANES; i += THREADS) {
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (x.norm != nullptr && i < fours) v = reinterpret_cast<const float4*>(x.norm)[i];
    acts[place(i)] = v;
  }
  float bias = 0.0f, residual = 0.0f;  // of the thread's first output
  const auto added = [&](int o, float& b, float& r, bool now) {
    const int p = part_of(parts, first + o);
    const int at = first + o - parts.first[p];
    if (!now && parts.part[p].bias != nullptr) b = parts.part[p].bias[at];
    if (now && parts.part[p].residual != nullptr) r = parts.part[p].residual[at];
  };
  if (!SWIGLU && me < outs) added(me, bias, residual, false);
  wait_for_previous_kernel();
  float square = 0.0f;
  constexpr int TOGETHER = 4;  // loads under way at the same time
#pragma unroll 1
  for (int i0 = me; i0 < fours; i0 += TOGETHER * THREADS) {
    float4 v[TOGETHER];
#pragma unroll
    for (int k = 0; k < TOGETHER; ++k) {
      if (i0 + k * THREADS < fours) v[k] = reinterpret_cast<const float4*>(x.row)[i0 + k * THREADS];
    }
#pragma unroll
    for (int k = 0; k < TOGETHER; ++k) {
      if (i0 + k * THREADS >= fours) continue;
      float4& a = acts[place(i0 + k * THREADS)];
      if (x.norm == nullptr) {
        a = v[k];
      } else {
        square += v[k].x * v[k].x + v[k].y * v[k].y + v[k].z * v[k].z + v[k].w * v[k].w;
        a = make_float4(a.x * v[k].x, a.y * v[k].y, a.z * v[k].z, a.w * v[k].w);
      }
    }
  }
  if (!SWIGLU && me < outs) added(me, bias, residual, true);
  square = warp_reduce_sum(square);
  if (lane == 0) squares[warp] = square;
  __syncthreads();  // all activations and sums of squares are there

  // ANCHOR: gemv_fused
  // 4. As a step has come to registers, the one D further on takes its place, of whatever rows it is.
  const float4* const mine = acts + part * 32 + lane;
  float2 sum = make_float2(0.0f, 0.0f), other_sum = sum;
  uint4* slot = ring;
  int at = 0;
#pragma unroll 1
  for (int pair = warp / split; pair < pairs;) {
    cp_async_wait_group<D - 1>();
    const uint4 w = slot[0], v = slot[32];
    load_next(slot);
    slot = slot == ring + 64 * (D - 1) ? ring : slot + 64;
    Format::add(w, v, mine + at, plane, sum, other_sum);
    at += stride;
    if (at < plane) continue;
    const float total = pair_reduce_sum(sum.x + sum.y, other_sum.x + other_sum.y, lane);
    const int row = 2 * pair + lane / 16;
    if (lane % 16 == 0 && row < rows) sums[row * split + part] = total;
    sum = other_sum = make_float2(0.0f, 0.0f);
    at = 0;
    pair += together;
  }
  __syncthreads();  // all rows' sums are there
  // ANCHOR_END: gemv_fused

  // 5. A thread an output: the sums of a row in order, the root that is common to all, and what is added.
  float root = 1.0f;
  if (x.norm != nullptr) {
    float all = 0.0f;
#pragma unroll
    for (int w = 0; w < W; ++w) all += squares[w];
    root = 1.0f / sqrtf(all / static_cast<float>(id) + x.epsilon);
  }
  const auto total = [&](int row) {
    float all = 0.0f;
    for (int p = 0; p < split; ++p) all += sums[row * split + p];
    return all * root;
  };
  for (int o = me; o < outs; o += THREADS) {
    if constexpr (SWIGLU) {
      const float gate = total(2 * o);
      parts.part[0].out[first + o] = gate / (1.0f + expf(-gate)) * total(2 * o + 1);
    } else {
      if (o != me) {
        bias = residual = 0.0f;
        added(o, bias, residual, false);
        added(o, bias, residual, true);
      }
      const int p = part_of(parts, first + o);
      parts.part[p].out[first + o - parts.first[p]] = residual + (total(o) + bias);
    }
  }
}

inline constexpr long long kManyBytes = 128 * 1024;  ///< of weights, for a multiprocessor

/// Warps that share a row: so that none has much more to do than another, and few sums are added up. The end of a row is
/// about as much work as half a step.
template <class Format>
constexpr int split_of(int rows, int id) {
  int best = 0;
  long long least = 0;
  for (int split = 1; split <= kWarps; split *= 2) {
    if (split > 1 && rows * split > kMostSums) break;
    const int units = id / Format::kElems, together = kWarps / split;
    const long long steps = (units + 32 * split - 1) / (32 * split),
                    work = ((rows + 1) / 2 + together - 1) / together * (2 * steps + 1);
    if (best == 0 || work < least) best = split, least = work;
  }
  return best;
}

template <bool SWIGLU, class Format>
Status launch_parts(std::span<const FusedPart> matrices, const FusedActs& acts, int id, Stream& stream,
                    bool programmatic) {
  Parts parts{};
  int outs = 0;
  for (std::size_t p = 0; p < kMostFusedParts; ++p) {
    parts.first[p] = outs;
    if (p >= matrices.size()) continue;
    parts.part[p] = matrices[p];
    if (p == 0 || !SWIGLU) outs += matrices[p].od;
  }
  const int sms = multiprocessor_count(), of_out = SWIGLU ? 2 : 1;
  // Where weights are many, two blocks have twice as many of them under way. If there were one, and room for two, a
  // multiprocessor that is free early would be given two, and another none.
  const long long bytes = static_cast<long long>(outs) * of_out * id * (16 / Format::kElems);
  const bool two =
      bytes >= sms * kManyBytes && 2 * most_shared_bytes(Format::kElems, id) <= shared_memory_limit();
  int blocks = std::min(outs, two ? 2 * sms : sms);
  while ((outs + blocks - 1) / blocks * of_out > kMostSums) blocks += sms;
  parts.share = outs / blocks;
  parts.more = outs % blocks;
  parts.split = split_of<Format>((outs + blocks - 1) / blocks * of_out, id);
  LaunchOptions options;
  options.programmatic = programmatic;
  return launch(options, gemv_fused<Format, SWIGLU, kWarps, kInFlight>, dim3(static_cast<unsigned>(blocks)),
                dim3(32 * kWarps), shared_bytes(Format::kElems, id, parts.split), stream, parts, acts, id);
}

/// Calls f with the format of a type; an error for types with blocks.
template <class F>
Status with_format(WeightType type, F&& f) {
  switch (type) {
    case WeightType::f16:
      return f(F16{});
    case WeightType::bf16:
      return f(BF16{});
    case WeightType::f32:
      return f(F32{});
    default:
      return no_format(type);
  }
}

template <bool SWIGLU>
Status launch_type(WeightType type, std::span<const FusedPart> matrices, const FusedActs& acts, int id,
                   Stream& stream, bool programmatic) {
  if (Status ok = gemv_fused_supported(type, id, shared_memory_limit()); !ok.ok()) return ok;
  if (matrices.empty() || matrices.size() > kMostFusedParts) {
    return Status::error("gemv_fused: 1 to " + std::to_string(kMostFusedParts) + " matrices at once, not " +
                         std::to_string(matrices.size()));
  }
  auto addresses = reinterpret_cast<std::uintptr_t>(acts.row) | reinterpret_cast<std::uintptr_t>(acts.norm);
  for (const FusedPart& p : matrices) {
    if (p.od < 1) return Status::error("gemv_fused: od must be at least 1, not " + std::to_string(p.od));
    addresses |= reinterpret_cast<std::uintptr_t>(p.weights);
  }
  if (addresses % 16 != 0)
    return Status::error("gemv_fused: weights and activations must begin at a multiple of 16 bytes");
  return with_format(type, [&]<class Format>(Format) {
    return launch_parts<SWIGLU, Format>(matrices, acts, id, stream, programmatic);
  });
}

}  // namespace gemv_fused_detail

/// out = f(acts) . weights^T + bias + residual of one token for each matrix, all of one type, in device memory. Does not
/// synchronise.
/// @param matrices 1 to kMostFusedParts
/// @param programmatic may start before the kernel before it has ended, and waits for that one's results itself
inline Status launch_gemv_fused(WeightType type, std::span<const FusedPart> matrices, const FusedActs& acts,
                                int id, Stream& stream, bool programmatic = false) {
  return gemv_fused_detail::launch_type<false>(type, matrices, acts, id, stream, programmatic);
}

/// out[od] = silu(f(acts) . gate^T) * (f(acts) . up^T), both matrices [od][id]. As launch_gemv_fused.
inline Status launch_gemv_fused_swiglu(WeightType type, const void* gate, const void* up,
                                       const FusedActs& acts, float* out, int od, int id, Stream& stream,
                                       bool programmatic = false) {
  const FusedPart both[] = {{gate, out, od}, {up, out, od}};
  return gemv_fused_detail::launch_type<true>(type, both, acts, id, stream, programmatic);
}

}  // namespace ladder
