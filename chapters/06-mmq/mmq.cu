// Chapter 06: int8 products for many tokens, and what their scales cost.
//
// The kernels are in kernels/mmq: mmq_raw.cuh takes a file's blocks, mmq_tiles.cuh the tiles of chapter 04.
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/06-mmq/mmq.cu -o mmq
#include "harness/experiment/main.hpp"
#include "harness/experiment/workspace.hpp"
#include "kernels/mmq/mmq_raw.cuh"
#include "kernels/mmq/mmq_tiles.cuh"
#if !defined(__CUDACC__)
#include "kernels/cpu/gemm_int8.hpp"
#include "kernels/cpu/quant_matmul.hpp"
#endif

namespace ladder {
namespace mmq_rungs {

using mmq::Scaling;

/// The planes as a rung gets them: codes, and right behind them scales.
struct Planes {
  const std::int8_t* codes;
  const std::uint32_t* scales;
  Planes(const void* acts, Shape s)
      : codes(static_cast<const std::int8_t*>(acts)),
        scales(reinterpret_cast<const std::uint32_t*>(codes + q8_acts_planes(s.nt, s.id).codes)) {}
};

inline Rung make(const std::string& id, const char* title, WeightType type, std::string source) {
  Rung r;
  r.id = id;
  r.chapter = "06-mmq";
  r.title = title;
  r.source = std::move(source);
  r.weight_type = type;
  r.acts = ActivationFormat::pad40_t;
  r.math = MathUnit::mma_s8;
  return r;
}

/// mmq_raw. @param ksplit parts of k; 0: as many as fill the device
template <class Block, bool XOR = true, int BUFFERS = 1, bool PLANE = false>
Rung raw(const std::string& id, const char* title, int ksplit = 0) {
  const std::string file = "kernels/mmq/mmq_raw.cuh#";
  Rung r =
      make(id, title, Block::kType, file + "mmq_raw," + file + "mmq_raw_stage," + file + "mmq_raw_buffer");
  if (PLANE) r.layout = &mmq::kRawPlane;
  r.supported = [ksplit](Shape s, const DeviceInfo&) {
    Status ok = mmq_raw_supported(Block::kType, s);
    if (ok.ok() && ksplit > s.id / 256)
      return Status::error("id must be at least " + std::to_string(256 * ksplit));
    return ok;
  };
  r.roundings = [](Shape s, Executor) { return mmq_raw_roundings(s.id); };
  r.device = [ksplit, workspace = Workspace()](const void* weights, const void* acts, float* out, Shape s,
                                               Stream& stream) mutable -> Status {
    if (Status ok = mmq_raw_supported(Block::kType, s); !ok.ok()) return ok;
    const Planes x(acts, s);
    const int parts = ksplit > 0 ? ksplit : mmq_raw_ksplit(s, multiprocessor_count());
    return launch_mmq_raw<Block, XOR, BUFFERS, PLANE>(
        weights, x.codes, x.scales, out, s, parts,
        workspace.floats(split_k_workspace_bytes(parts, s.nt, s.od)), {}, stream);
  };
  return r;
}

/// The CPU twin, which takes a file's blocks and the same planes.
inline Rung with_cpu_twin(Rung r) {
#if !defined(__CUDACC__)
  const WeightType type = r.weight_type;
  r.cpu = [type](const void* weights, const void* acts, float* out, Shape s, cpu::ThreadPool& pool) {
    cpu::quant_int8_gemm_planes(type, weights, acts, out, s, pool);
  };
  r.cpu_source = cpu::quant_int8_gemm_source(type);
  r.roundings = [type, device = std::move(r.roundings)](Shape s, Executor e) {
    return e == Executor::cpu ? cpu::quant_int8_roundings(type, s.id) : device(s, e);
  };
#endif
  return r;
}

template <class F>
Rung make_tiled(const std::string& id, const char* title) {
  constexpr WeightType kType = F::Block::kType;
  const std::string file = "kernels/mmq/mmq_tiles.cuh#", formats = "kernels/mmq/mmq_formats.cuh#";
  Rung r = make(id, title, kType,
                file + "mmq_tiles," + file + "mmq_step," + file + "mmq_scale," + file + "mmq_stage," +
                    formats + "mmq_properties," + formats +
                    "mmq_operand,kernels/mmvq/mmvq_tiles_formats.cuh#tile_" + info(kType).name);
  r.layout = &tiles::kLayout;
  r.supported = [](Shape s, const DeviceInfo&) { return mmq_supported(kType, s); };
  r.roundings = [](Shape s, Executor) { return mmq_roundings(s.id); };
  return r;
}

/// mmq_tiles with its own choice of sizes. @param ksplit parts of k; 0: as many as fill the device
template <class F, Scaling SCALING>
Rung tiled(const std::string& id, const char* title, int ksplit = 0) {
  constexpr WeightType kType = F::Block::kType;
  Rung r = make_tiled<F>(id, title);
  if (ksplit > 0) {
    r.supported = [ksplit](Shape s, const DeviceInfo&) {
      Status ok = mmq_supported(kType, s);
      if (ok.ok() && ksplit > tiles::steps<typename F::Block>(s.id))
        return Status::error("id must be more than " +
                             std::to_string(32 * tiles::Tile<typename F::Block>::kSteps * (ksplit - 1)));
      return ok;
    };
  }
  r.device = [ksplit, workspace = Workspace()](const void* weights, const void* acts, float* out, Shape s,
                                               Stream& stream) mutable -> Status {
    if (Status ok = mmq_supported(kType, s); !ok.ok()) return ok;
    const Planes x(acts, s);
    const std::size_t bytes = ksplit > 0 ? split_k_workspace_bytes(ksplit, s.nt, s.od)
                                         : mmq_workspace_bytes(kType, s, multiprocessor_count());
    return mmq::launch_format<F, SCALING>(weights, x.codes, x.scales, out, s, ksplit, workspace.floats(bytes),
                                          {}, stream);
  };
  return r;
}

/// mmq_tiles with sizes Z for every number of tokens.
template <class F, class Z>
Rung sized(const std::string& id, const char* title) {
  Rung r = make_tiled<F>(id, title);
  r.device = [](const void* weights, const void* acts, float* out, Shape s, Stream& stream) -> Status {
    if (Status ok = mmq_supported(F::Block::kType, s); !ok.ok()) return ok;
    const Planes x(acts, s);
    return mmq::launch_sizes<F, Scaling::tensor, Z>(weights, x.codes, x.scales, out, s, 1, nullptr, {},
                                                    stream);
  };
  return r;
}

/// As programs use it.
template <class F>
void add_type(Chapter& c) {
  constexpr Scaling kScaling = mmq::Properties<F>::kScaling;
  c.rungs.push_back(tiled<F, kScaling>(std::string(info(F::Block::kType).name) + "_q8_mmq",
                                       kScaling == Scaling::tensor ? "scales multiplied by the tensor core"
                                                                   : "integer scales before one conversion"));
}

/// The ways to scale, in the order of the text; the last one is add_type's.
template <class F>
void add_scalings(Chapter& c) {
  using P = mmq::Properties<F>;
  const std::string id = std::string(info(F::Block::kType).name) + "_q8_mmq";
  c.rungs.push_back(tiled<F, Scaling::convert>(id + "_i2f", "integers converted to floats"));
  if constexpr (P::kBlockSums && P::kScaling != Scaling::integers)
    c.rungs.push_back(tiled<F, Scaling::integers>(id + "_int", "integer scales before one conversion"));
  c.rungs.push_back(tiled<F, Scaling::seeded>(id + "_seed", "sums seeded with the bits of a float"));
  if constexpr (P::kScaling != Scaling::tensor)
    c.rungs.push_back(tiled<F, Scaling::tensor>(id + "_mma", "scales multiplied by the tensor core"));
  add_type<F>(c);
}

}  // namespace mmq_rungs

/// The rungs of this chapter, in the order of the text.
inline Chapter chapter_06() {
  Chapter c;
  c.name = "06-mmq";
  c.default_layers = {"7b.attn_q", "7b.ffn_down"};
  c.default_nts = {512};
  using namespace mmq_rungs;
  using namespace tiles;
  // A file's blocks, tokens on the instruction's sixteen rows.
  c.rungs.push_back(with_cpu_twin(raw<BlockQ4_0>("q4_0_q8_mmq_raw", "blocks staged as a file has them")));
  c.rungs.push_back(with_cpu_twin(raw<BlockQ4_K>("q4_k_q8_mmq_raw", "blocks staged as a file has them")));
  c.rungs.push_back(raw<BlockQ4_K, false>("q4_k_q8_mmq_raw_noxor", "rows 128 bytes apart, not swizzled"));
  c.rungs.push_back(raw<BlockQ4_K, true, 2>("q4_k_q8_mmq_raw_b2", "two buffers"));
  c.rungs.push_back(raw<BlockQ4_K, true, 1, true>("q4_k_q8_mmq_raw_plane", "scales from a plane"));
  c.rungs.push_back(raw<BlockQ4_K>("q4_k_q8_mmq_raw_k1", "k not divided", 1));
  // Tiles, weights on the sixteen rows.
  add_scalings<TileQ8_0>(c);
  add_type<TileQ5_1>(c);
  add_type<TileQ5_0>(c);
  add_type<TileQ4_1>(c);
  add_scalings<TileQ4_0>(c);
  c.rungs.push_back(tiled<TileQ4_0, Scaling::seeded_tensor>(
      "q4_0_q8_mmq_seed_mma", "seeded sums, scales multiplied by the tensor core"));
  c.rungs.push_back(tiled<TileQ4_0, Scaling::tensor>("q4_0_q8_mmq_k1", "k not divided", 1));
  c.rungs.push_back(tiled<TileQ4_0, Scaling::tensor>("q4_0_q8_mmq_k2", "k in two parts", 2));
  c.rungs.push_back(tiled<TileQ4_0, Scaling::tensor>("q4_0_q8_mmq_k4", "k in four parts", 4));
  c.rungs.push_back(tiled<TileQ4_0, Scaling::tensor>("q4_0_q8_mmq_k8", "k in eight parts", 8));
  c.rungs.push_back(
      sized<TileQ4_0, mmq::Sizes<2, 4, 4, 1, 2>>("q4_0_q8_mmq_s2", "two steps in shared memory, not four"));
  add_type<TileIQ4_NL>(c);
  add_scalings<TileQ6_K>(c);
  add_type<TileQ5_K>(c);
  add_scalings<TileQ4_K>(c);
  add_type<TileIQ4_XS>(c);
  add_type<TileQ3_K>(c);
  add_type<TileQ2_K>(c);
  return c;
}

}  // namespace ladder

#ifndef LADDER_NO_MAIN
int main(int argc, char** argv) { return ladder::chapter_main(ladder::chapter_06(), argc, argv); }
#endif
