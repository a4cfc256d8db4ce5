// Chapter 04: int8 products for few tokens. Weights as a file has them, activations in int8 blocks, and steps
// that differ in who asks for what.
//
// The kernels are in kernels/mmvq/mmvq.cuh; what differs from type to type is in mmvq_formats.cuh beside it.
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/04-mmvq/mmvq.cu -o mmvq
#include "harness/experiment/main.hpp"
#include "kernels/mmvq/mmvq.cuh"
#include "kernels/mmvq/mmvq_tiles.cuh"
#if !defined(__CUDACC__)
#include "kernels/cpu/quant_matmul.hpp"
#endif

namespace ladder {
namespace mmvq_rungs {

/// Makes a rung of the chapter.
/// @param kernel file and anchor
/// @param v2 whether it reads the type's second format, with loads as wide as addresses allow
inline Rung make(const std::string& id, const char* title, WeightType type, const std::string& kernel,
                 bool v2) {
  Rung r;
  r.id = id;
  r.chapter = "04-mmvq";
  r.title = title;
  const std::string formats = ",kernels/mmvq/mmvq_formats.cuh#",
                    format = std::string("mmvq_") + info(type).name;
  r.source = kernel + ",kernels/mmvq/mmvq_formats.cuh#mmvq_units" + formats + format;
  if (v2) r.source += formats + format + "_v2";
  r.weight_type = type;
  r.acts = ActivationFormat::pad40;
  r.supported = [type](Shape s, const DeviceInfo&) { return mmvq_supported(type, s); };
  return r;
}

/// mmvq_block with blocks of THREADS threads.
template <class Format, int THREADS>
Rung block(const std::string& id, const char* title) {
  Rung r = make(id, title, Format::kType, "kernels/mmvq/mmvq.cuh#mmvq_block", false);
  r.device = launch_mmvq_block<Format, THREADS>;
  r.roundings = [](Shape s, Executor) { return mmvq_roundings<Format>(s.id, THREADS / 32); };
  return r;
}

template <class Format>
Rung rows(const std::string& id, const char* title, bool v2) {
  Rung r = make(id, title, Format::kType, "kernels/mmvq/mmvq.cuh#mmvq_rows", v2);
  r.device = launch_mmvq_rows<Format>;
  r.roundings = [](Shape s, Executor) {
    return mmvq_roundings<Format>(s.id, mmvq_plan(s.id / Format::kUnit, 1).warps_per_group);
  };
  return r;
}

template <class Format>
Rung multi(const std::string& id, const char* title) {
  Rung r = make(id, title, Format::kType, "kernels/mmvq/mmvq.cuh#mmvq_multi", true);
  r.supported = [](Shape s, const DeviceInfo&) {
    return mmvq_supported(Format::kType, s, kMmvqMultiMaxTokens);
  };
  r.device = launch_mmvq_multi<Format>;
  r.roundings = [](Shape s, Executor) {
    return mmvq_roundings<Format>(s.id, mmvq_plan(s.id / Format::kUnit, 1).warps_per_group);
  };
  return r;
}

template <class Format>
Rung pipelined(const std::string& id, const char* title) {
  Rung r = make(id, title, Format::kType, "kernels/mmvq/mmvq.cuh#mmvq_pf", true);
  r.device = launch_mmvq_pf<Format>;
  r.roundings = [](Shape s, Executor) {
    return mmvq_roundings<Format>(s.id, mmvq_pf_plan<Format>(s.id, 1).warps_per_group);
  };
  return r;
}

/// mmvq_tiles.
/// @param programmatic starts before the launch before it has ended
template <class Format>
Rung tiled(const std::string& id, const char* title, bool programmatic) {
  constexpr WeightType kType = Format::Block::kType;
  Rung r;
  r.id = id;
  r.chapter = "04-mmvq";
  r.title = title;
  const std::string formats = ",kernels/mmvq/mmvq_tiles_formats.cuh#";
  r.source = "kernels/mmvq/mmvq_tiles.cuh#mmvq_tiles,kernels/mmvq/mmvq_tiles_formats.cuh#multiply_tile" +
             formats + "tile_" + info(kType).name;
  r.weight_type = kType;
  r.acts = ActivationFormat::planes40;
  r.layout = &tiles::kLayout;
  r.math = MathUnit::mma_s8;
  r.supported = [](Shape s, const DeviceInfo&) { return mmvq_tiles_supported(kType, s); };
  r.roundings = [](Shape s, Executor) { return mmvq_tiles_roundings(kType, s.id); };
  r.device = [programmatic](const void* weights, const void* acts, float* out, Shape s, Stream& stream) {
    const MmvqPart part{weights, out, static_cast<int>(s.od)};
    return tiles::launch_format<Format>({&part, 1}, {acts}, static_cast<int>(s.nt), static_cast<int>(s.id),
                                        stream, programmatic);
  };
  return r;
}

/// A format with another number of tiles under way.
template <class Format, int TILES>
struct InFlight : Format {
  static constexpr tiles::Plan with(tiles::Plan p) { return {p.warps, TILES, p.blocks, TILES}; }
  static constexpr tiles::Plan kShort = with(Format::kShort), kLong = with(Format::kLong);
};
}  // namespace mmvq_rungs
template <class Format, int TILES>
inline constexpr tiles::Plan tiles::kOneBlock<mmvq_rungs::InFlight<Format, TILES>> =
    mmvq_rungs::InFlight<Format, TILES>::with(kOneBlock<Format>);
namespace mmvq_rungs {

/// mmvq_tiles as programs use it, and what its parts are worth: one tile a warp under way instead of several, and
/// launches that wait for each other's end.
template <class Format>
void add_tiled_parts(Chapter& c) {
  const std::string id = std::string(info(Format::Block::kType).name) + "_q8_mmvq_tiles";
  c.rungs.push_back(tiled<InFlight<Format, 1>>(id + "_d1", "one tile a warp under way", true));
  c.rungs.push_back(tiled<Format>(id + "_apart", "launches one after the other", false));
}

/// The CPU twin of a type stands beside its first step.
inline void add_cpu_twin(Rung& r) {
#if !defined(__CUDACC__)
  const WeightType type = r.weight_type;
  r.cpu = [type](const void* weights, const BlockQ8Pad40* acts, float* out, Shape s, cpu::ThreadPool& pool) {
    cpu::quant_int8_matmul(type, weights, acts, out, s, pool);
  };
  r.cpu_source = cpu::quant_int8_source(type);
  r.roundings = [type, device = std::move(r.roundings)](Shape s, Executor e) {
    return e == Executor::cpu ? cpu::quant_int8_roundings(type, s.id) : device(s, e);
  };
#else
  (void)r;
#endif
}

/// The steps of one type, in the order of the text.
template <class Plain, class V2, class Tile>
void add_type(Chapter& c) {
  const std::string type = info(Plain::kType).name, id = type + "_q8_mmvq";
  c.rungs.push_back(block<Plain, 256>(id, "a block of threads for every output"));
  add_cpu_twin(c.rungs.back());
  c.rungs.push_back(rows<Plain>(id + "_rows", "rows share the activations", false));
  c.rungs.push_back(rows<V2>(id + "_v2", "loads as wide as the addresses allow", true));
  c.rungs.push_back(multi<V2>(id + "_multi", "up to eight tokens in one pass"));
  c.rungs.push_back(pipelined<V2>(id + "_pf", "copies run ahead of the arithmetic"));
  c.rungs.push_back(tiled<Tile>(id + "_tiles", "tiles for tensor cores", true));
}

}  // namespace mmvq_rungs

/// The rungs of this chapter, type by type, from the largest to the smallest of each family.
inline Chapter chapter_04() {
  Chapter c;
  c.name = "04-mmvq";
  c.default_layers = {"7b.attn_q", "7b.ffn_down"};
  using namespace mmvq;
  using namespace mmvq_rungs;
  add_type<Q8_0, Q8_0V2, tiles::TileQ8_0>(c);
  add_tiled_parts<tiles::TileQ8_0>(c);
  add_type<Q5_1, Q5_1V2, tiles::TileQ5_1>(c);
  add_type<Q5_0, Q5_0V2, tiles::TileQ5_0>(c);
  add_type<Q4_1, Q4_1V2, tiles::TileQ4_1>(c);
  add_type<Q4_0, Q4_0V2, tiles::TileQ4_0>(c);
  add_tiled_parts<tiles::TileQ4_0>(c);
  c.rungs.push_back(block<Q4_0, 64>("q4_0_q8_mmvq_t64", "blocks of 64 threads"));
  c.rungs.push_back(block<Q4_0, 128>("q4_0_q8_mmvq_t128", "blocks of 128 threads"));
  add_type<IQ4_NL, IQ4_NLV2, tiles::TileIQ4_NL>(c);
  add_type<Q6_K, Q6_KV2, tiles::TileQ6_K>(c);
  add_type<Q5_K, Q5_KV2, tiles::TileQ5_K>(c);
  add_type<Q4_K, Q4_KV2, tiles::TileQ4_K>(c);
  add_tiled_parts<tiles::TileQ4_K>(c);
  add_type<IQ4_XS, IQ4_XSV2, tiles::TileIQ4_XS>(c);
  add_type<Q3_K, Q3_KV2, tiles::TileQ3_K>(c);
  add_type<Q2_K, Q2_KV2, tiles::TileQ2_K>(c);
  return c;
}

}  // namespace ladder

#ifndef LADDER_NO_MAIN
int main(int argc, char** argv) { return ladder::chapter_main(ladder::chapter_04(), argc, argv); }
#endif
