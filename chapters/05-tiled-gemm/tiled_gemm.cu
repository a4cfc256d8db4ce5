// Chapter 05: many tokens at once. Tiles of tiles, so that every byte is used often enough for tensor cores.
//
// The steps to wmma are in gemm_steps.cuh and gemm_f16_nt.cuh beside this file; what programs use is in kernels/gemm.
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/05-tiled-gemm/tiled_gemm.cu -o tiled_gemm
#include <memory>

#include "chapters/05-tiled-gemm/gemm_f16_nt.cuh"
#include "chapters/05-tiled-gemm/gemm_steps.cuh"
#include "harness/experiment/main.hpp"
#include "harness/experiment/workspace.hpp"
#include "kernels/gemm/gemm_f16_mma.cuh"
#include "kernels/gemm/gemm_f16_mma_tma.cuh"
#include "kernels/gemm/gemm_f16_wgmma.cuh"
#if !defined(__CUDACC__)
#include "kernels/cpu/gemm_f32.hpp"
#endif
#if defined(LADDER_WITH_CUBLAS)
#include "harness/compare/cublas_gemm.hpp"
#include "kernels/gemm/dequantize_tiles.cuh"
#include "kernels/gemm/gemm_tiles_wgmma.cuh"
#endif

namespace ladder {
namespace gemm_rungs {

inline constexpr const char* kSteps = "chapters/05-tiled-gemm/gemm_steps.cuh#";
inline constexpr const char* kNt =
    "chapters/05-tiled-gemm/gemm_f16_nt.cuh#gemm_f16_nt,chapters/05-tiled-gemm/gemm_f16_nt.cuh#nt_tile,"
    "chapters/05-tiled-gemm/gemm_f16_nt.cuh#gemm_f16_nt_multiply";
inline constexpr const char* kMma =
    "kernels/gemm/gemm_f16_mma.cuh#gemm_f16_mma,kernels/gemm/gemm_f16_mma.cuh#gemm_mma_tile,"
    "kernels/gemm/gemm_f16_mma.cuh#gemm_mma_units,kernels/gemm/gemm_f16_mma.cuh#gemm_mma_warp";

/// A rung of the chapter: f16 operands unless said otherwise.
inline Rung make(const std::string& id, const char* title, std::string source) {
  Rung r;
  r.id = id;
  r.chapter = "05-tiled-gemm";
  r.title = title;
  r.source = std::move(source);
  r.weight_type = WeightType::f16;
  r.acts = ActivationFormat::f16;
  return r;
}

/// A step that multiplies with ordinary instructions. Products of two halves are exact in f32; a term is rounded by the
/// additions.
inline Rung step(const std::string& id, const char* title, Status (*supported)(Shape),
                 DeviceMatmul launcher) {
  Rung r = make(id, title, kSteps + id);
  r.supported = [supported](Shape s, const DeviceInfo&) { return supported(s); };
  r.roundings = [](Shape s, Executor) { return static_cast<double>(s.id); };
  r.device = std::move(launcher);
  return r;
}

/// Roundings of sums in tensor cores: sixteen products and a sum are added at once. How, is not specified; on current GPUs
/// they are aligned to the largest and cut off, which errs by up to one unit in the last place of f32, two roundings,
/// for each.
inline double mma_roundings(long long id, int ksplit = 1) {
  return 2.0 * (static_cast<double>(id) / 16 + 1) + 2 * 17 + ksplit;
}

template <class T>
Rung nt(const std::string& id, const char* title) {
  Rung r = make(id, title, kNt);
  r.math = MathUnit::mma_f16;
  r.supported = [](Shape s, const DeviceInfo&) { return gemm_f16_nt_supported<T>(s); };
  r.roundings = [](Shape s, Executor) { return mma_roundings(s.id); };
  r.device = launch_gemm_f16_nt<T>;
  if (T::ACTS_ARE_F32) {
    r.acts = ActivationFormat::f32;
    r.operand_rounding = 1.0 / 2048;  // of an activation
  }
  return r;
}

template <class Block>
Rung qb() {
  const std::string type = info(Block::kType).name;
  Rung r =
      make("gemm_qb_nt_" + type, "weights decoded on their way into shared memory",
           "chapters/05-tiled-gemm/gemm_f16_nt.cuh#gemm_qb_nt,chapters/05-tiled-gemm/"
           "gemm_f16_nt.cuh#gemm_qb_nt_decode,chapters/05-tiled-gemm/gemm_f16_nt.cuh#gemm_f16_nt_multiply");
  r.weight_type = Block::kType;
  r.math = MathUnit::mma_f16;
  r.operand_rounding = 1.0 / 2048;
  r.supported = [](Shape s, const DeviceInfo&) { return gemm_qb_nt_supported<Block>(s); };
  r.roundings = [](Shape s, Executor) { return mma_roundings(s.id); };
  r.device = launch_gemm_qb_nt<Block>;
  return r;
}

/// gemm_f16_mma with one tile.
template <class T>
Rung mma(const std::string& id, const char* title) {
  Rung r = make(id, title, kMma);
  r.math = MathUnit::mma_f16;
  r.supported = [](Shape s, const DeviceInfo&) { return gemm_f16_mma_supported(s); };
  r.roundings = [](Shape s, Executor) { return mma_roundings(s.id); };
  r.device = [](const __half* weights, const __half* acts, float* out, Shape s, Stream& stream) {
    return launch_gemm_f16_mma_tile<T>(weights, acts, out, s, {}, 1, nullptr, stream);
  };
  return r;
}

/// gemm_f16_mma as programs use it, with or without a workspace for parts of k.
inline Rung product(const std::string& id, const char* title, bool split) {
  Rung r = make(id, title,
                std::string(kMma) + ",kernels/gemm/gemm_f16_mma.cuh#gemm_mma_plan" +
                    (split ? ",kernels/gemm/split_k.cuh#split_k_reduce" : ""));
  r.math = MathUnit::mma_f16;
  r.supported = [](Shape s, const DeviceInfo&) { return gemm_f16_mma_supported(s); };
  r.roundings = [split](Shape s, Executor) { return mma_roundings(s.id, split ? kMostKSplit : 1); };
  r.device = [split, workspace = Workspace()](const __half* weights, const __half* acts, float* out, Shape s,
                                              Stream& stream) mutable {
    if (Status ok = gemm_f16_mma_supported(s); !ok.ok()) return ok;
    float* const partials =
        split ? workspace.floats(gemm_f16_mma_workspace_bytes(s, multiprocessor_count())) : nullptr;
    return launch_gemm_f16_mma(weights, acts, out, s, {}, partials, stream);
  };
  return r;
}

/// What kernels that cut tiles along k leave for other blocks: sums, and flags, which are zero between launches.
struct CutSums {
  Buffer<float> sums;
  Buffer<unsigned> flags;
  CutSums(std::size_t bytes, std::size_t flag_count)
      : sums(bytes / sizeof(float), "workspace"), flags(flag_count, "flags") {
    sums.fill_bytes(0xFF);
    flags.fill_bytes(0);
  }
};

/// The same with Hopper's copy engine. @param cuts whether tiles are cut along k where they do not fill all multiprocessors
inline Rung product_tma(const std::string& id, const char* title, bool cuts) {
  const std::string file = "kernels/gemm/gemm_f16_mma_tma.cuh#", mma = "kernels/gemm/gemm_f16_mma.cuh#";
  Rung r =
      make(id, title,
           file + "gemm_f16_mma_tma," + file + "gemm_mma_tma_lines," + file + "gemm_mma_tma_plan," + file +
               "gemm_mma_share," + mma + "gemm_mma_tile," + mma + "gemm_mma_units," + mma + "gemm_mma_warp");
  r.math = MathUnit::mma_f16;
  r.supported = gemm_f16_mma_tma_supported;
  r.roundings = [](Shape s, Executor) {
    return mma_roundings(s.id, 1 + static_cast<int>(s.id / (64 * kFewestCutSteps)));
  };
  r.device = [cuts, cut = std::shared_ptr<CutSums>()](const __half* weights, const __half* acts, float* out,
                                                      Shape s, Stream& stream) mutable {
    if (Status ok = gemm_f16_mma_supported(s); !ok.ok()) return ok;
    const int sms = multiprocessor_count();
    if (cuts && !cut) {
      cut = std::make_shared<CutSums>(gemm_f16_mma_tma_sums_bytes(sms), gemm_f16_mma_tma_flags(sms));
    }
    // Products that follow one another start early: none writes weights, which is all that one reads until then.
    const MmaWorkspace workspace = cut ? MmaWorkspace{cut->sums.data(), cut->flags.data()} : MmaWorkspace{};
    return launch_gemm_f16_mma_tma(weights, acts, out, s, {}, workspace, stream, true);
  };
  return r;
}

/// Hopper's own tensor-core instruction. Elsewhere, and on the emulator, its rungs say that they need it.
inline Rung wgmma() {
  const std::string file = "kernels/gemm/gemm_f16_wgmma.cuh#gemm_f16_wgmma";
  Rung r = make("gemm_f16_wgmma", "TMA, clusters and wgmma",
                file + "," + file + "_multiply," + file + "_store," + file + "_parts," + file + "_plan");
  r.math = MathUnit::wgmma_f16;
  r.supported = gemm_f16_wgmma_supported;
  r.roundings = [](Shape s, Executor) { return mma_roundings(s.id, 4); };
  r.device = [](const __half* weights, const __half* acts, float* out, Shape s, Stream& stream) {
    // Products that follow one another start early: none writes weights, which is all that one reads until then.
    return launch_gemm_f16_wgmma(acts, weights, out, {}, s, stream, true);
  };
  return r;
}

#if defined(LADDER_WITH_CUBLAS)
/// Packed weights in tiles as operands of wgmma, decoded in registers. They take minutes to compile, so only the program
/// that compares has them, and of four types; kernels/gemm/test_gemm_tiles.cpp checks all.
template <class Format>
Rung packed() {
  constexpr WeightType kType = Format::Block::kType;
  Rung r =
      make(std::string(info(kType).name) + "_f16_wgmma", "packed weights, TMA and wgmma",
           std::string("kernels/gemm/gemm_tiles_wgmma.cuh#gemm_tiles_wgmma,kernels/gemm/gemm_tiles_few.cuh#"
                       "gemm_tiles_few,kernels/gemm/gemm_tiles_formats.cuh#half_fragments,"
                       "kernels/mmvq/mmvq_tiles_formats.cuh#tile_") +
               info(kType).name);
  r.weight_type = kType;
  r.acts = ActivationFormat::f16_tiles;
  r.layout = &tiles::kLayout;
  r.operand_rounding = tiles::half_rounding(kType);
  r.math = MathUnit::wgmma_f16;
  r.roundings = [](Shape s, Executor) { return gemm_tiles_roundings(s.id); };
  r.supported = [](Shape s, const DeviceInfo& d) { return gemm_tiles_wgmma_supported(kType, s, d); };
  r.device = [cut = std::shared_ptr<CutSums>()](WeightsPointer weights, ActsPointer acts, float* out, Shape s,
                                                Stream& stream) mutable -> Status {
    const int sms = multiprocessor_count();
    if (!cut) {
      cut = std::make_shared<CutSums>(gemm_tiles_most_partial_bytes(sms), static_cast<std::size_t>(sms));
    }
    const GemmTilesPart part{weights, out, static_cast<int>(s.od)};
    tiles::GemmTilesArgs args{};
    if (Status ok = tiles::gather_parts(kType, {&part, 1}, acts, s.nt, s.id, args.parts); !ok.ok()) return ok;
    args.nt = static_cast<int>(s.nt);
    args.steps = static_cast<int>(tiles::steps<typename Format::Block>(s.id));
    return tiles::launch_gemm_tiles<Format, false>(args, acts, static_cast<int>(s.id),
                                                   gemm_tiles_plan(kType, s, sms),
                                                   {cut->sums.data(), cut->flags.data()}, stream, true);
  };
  return r;
}

/// What packed weights can do without a kernel for them: decoded to f16 first, every time, and multiplied by cuBLAS.
template <class Format>
Rung decoded() {
  constexpr WeightType kType = Format::Block::kType;
  Rung r = make(std::string(info(kType).name) + "_dequantize_cublas",
                "weights decoded first, then cuBLAS, for comparison only",
                "kernels/gemm/dequantize_tiles.cuh#dequantize_tiles_f16,kernels/gemm/gemm_tiles_formats.cuh#"
                "half_fragments,harness/compare/cublas_gemm.hpp");
  r.weight_type = kType;
  r.layout = &tiles::kLayout;
  r.operand_rounding = tiles::half_rounding(kType);
  r.math = MathUnit::wgmma_f16;
  r.supported = [](Shape s, const DeviceInfo&) { return gemm_tiles_supported(kType, s); };
  r.roundings = [](Shape s, Executor) { return mma_roundings(s.id, 16); };
  r.device = [workspace = Workspace()](WeightsPointer weights, ActsPointer acts, float* out, Shape s,
                                       Stream& stream) mutable -> Status {
    auto* const rows = reinterpret_cast<__half*>(
        workspace.floats(sizeof(__half) * static_cast<std::size_t>(s.od) * static_cast<std::size_t>(s.id)));
    if (Status ok = launch_dequantize_tiles_f16(kType, weights, rows, s, stream); !ok.ok()) return ok;
    return launch_cublas_hgemm(rows, acts, out, s, stream);
  };
  r.peer_name = "cuBLAS";
  r.peer_version = cublas_version();
  return r;
}
#endif

/// The CPU twin of a rung whose operands are f16 (or its activations f32).
inline Rung with_cpu_twin(Rung r) {
#if !defined(__CUDACC__)
  if (r.acts == ActivationFormat::f16) {
    r.cpu = [](const std::uint16_t* w, const std::uint16_t* a, float* out, Shape s, cpu::ThreadPool& pool) {
      cpu::gemm_f16(w, a, out, s, pool);
    };
  } else {
    r.cpu = [](const std::uint16_t* w, const float* a, float* out, Shape s, cpu::ThreadPool& pool) {
      cpu::gemm_f16_af32(w, a, out, s, pool);
    };
  }
  r.cpu_source = cpu::gemm_source();
  r.roundings = [device = std::move(r.roundings)](Shape s, Executor e) {
    return e == Executor::cpu ? cpu::gemm_roundings(s.id) : device(s, e);
  };
#endif
  return r;
}

}  // namespace gemm_rungs

/// The rungs of this chapter, in the order of the text.
inline Chapter chapter_05() {
  Chapter c;
  c.name = "05-tiled-gemm";
  c.default_layers = {"7b.attn_q", "7b.ffn_down"};
  c.default_nts = {512};
  using namespace gemm_rungs;
  const auto add = [&](Rung r) { c.rungs.push_back(std::move(r)); };

  add(step("gemm_naive", "a thread per output", gemm_naive_supported, launch_gemm_naive));
  add(step("gemm_shared", "tiles in shared memory", gemm_shared_supported, launch_gemm_shared));
  add(step("gemm_register", "tiles in registers", gemm_register_supported, launch_gemm_register));

  add(nt<NtTile<128, 32, 32, 1>>("gemm_f16_nt_b1", "tensor cores, one buffer"));
  add(with_cpu_twin(nt<NtTile<128, 32, 32>>("gemm_f16_nt", "tensor cores, copies one step ahead")));
  add(with_cpu_twin(
      nt<NtTile<128, 32, 32, 2, float>>("gemm_f16_nt_af32", "activations rounded to f16 on the way")));
  // What would make it slow: tiles, strides, the order of blocks.
  add(nt<NtTile<64, 32, 32>>("gemm_f16_nt_tm64", "64 outputs a block"));
  add(nt<NtTile<128, 64, 64>>("gemm_f16_nt_k64", "64 of k a step: rows 128 bytes apart"));
  add(nt<NtTile<64, 64, 64>>("gemm_f16_nt_tm64_k64", "64 outputs a block, 64 of k a step"));
  add(nt<NtTile<128, 32, 40>>("gemm_f16_nt_s80", "rows 80 bytes apart"));
  add(nt<NtTile<128, 64, 72>>("gemm_f16_nt_k64_s144", "64 of k a step, rows 144 bytes apart"));
  add(nt<NtTile<128, 32, 40, 1>>("gemm_f16_nt_s80_b1", "rows 80 bytes apart, one buffer"));
  add(nt<NtTile<128, 32, 40, 2, __half, false>>("gemm_f16_nt_s80_xy", "neighbouring blocks share tokens"));

  add(qb<BlockQ8_0>());
  add(qb<BlockQ4_0>());
  add(qb<BlockQ6_K>());
  add(qb<BlockQ4_K>());

  add(mma<MmaTile<64, 128, 32, 2, 32, 32, 2, false>>("gemm_f16_mma_w32_plain", "ldmatrix and mma.sync"));
  add(mma<MmaTile<64, 128, 32, 2, 32, 32, 2>>("gemm_f16_mma_w32", "chunks swizzled"));
  add(mma<MmaTile<128, 128, 32, 2, 64, 64, 2>>("gemm_f16_mma_w64", "warp tiles of 64 x 64"));
  add(mma<MmaTile<128, 128, 32, 4, 64, 64, 2>>("gemm_f16_mma_w64_s4", "four stages"));
  add(product("gemm_f16_mma", "the tile that fits the shape", false));
  add(product("gemm_f16_mma_splitk", "k divided where tiles are few", true));

  add(product_tma("gemm_f16_mma_tma_whole", "mma.sync, fed by Hopper's copy engine", false));
  add(product_tma("gemm_f16_mma_tma", "tiles cut along k where they do not fill the GPU", true));
  add(wgmma());

#if defined(LADDER_WITH_CUBLAS)
  add(packed<tiles::TileQ8_0>());
  add(packed<tiles::TileQ4_0>());
  add(packed<tiles::TileQ6_K>());
  add(packed<tiles::TileQ4_K>());
  add(decoded<tiles::TileQ8_0>());
  add(decoded<tiles::TileQ4_0>());
  add(decoded<tiles::TileQ6_K>());
  add(decoded<tiles::TileQ4_K>());
  Rung peer = make("cublas_hgemm", "cuBLAS, for comparison only", "harness/compare/cublas_gemm.hpp");
  peer.math = MathUnit::wgmma_f16;
  peer.supported = any_shape;
  peer.roundings = [](Shape s, Executor) { return mma_roundings(s.id, 16); };
  peer.device = launch_cublas_hgemm;
  peer.peer_name = "cuBLAS";
  peer.peer_version = cublas_version();
  add(std::move(peer));
#endif
  return c;
}

}  // namespace ladder

#ifndef LADDER_NO_MAIN
int main(int argc, char** argv) { return ladder::chapter_main(ladder::chapter_05(), argc, argv); }
#endif
