// Chapter 04: int8 products for few tokens. Weights as a file has them, activations in int8 blocks, and steps
// that differ in who asks for what.
//
// The kernels are in kernels/mmvq/mmvq.cuh; what differs from type to type is in mmvq_formats.cuh beside it.
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... chapters/04-mmvq/mmvq.cu -o mmvq
#include "harness/experiment/main.hpp"
#include "kernels/mmvq/mmvq.cuh"

namespace ladder {
namespace mmvq_rungs {

/// Makes a rung of the chapter. `kernel` and `format` are anchors.
inline Rung make(const std::string& id, const char* title, WeightType type, const std::string& kernel,
                 const std::string& format, bool v2) {
  Rung r;
  r.id = id;
  r.chapter = "04-mmvq";
  r.title = title;
  const std::string formats = "kernels/mmvq/mmvq_formats.cuh#";
  r.source = "kernels/mmvq/mmvq.cuh#" + kernel + "," + formats + "mmvq_units," + formats + format;
  if (v2) r.source += "," + formats + format + "_v2";
  r.weight_type = type;
  r.acts = ActivationFormat::pad40;
  r.supported = [type](Shape s, const DeviceInfo&) { return mmvq_supported(type, s); };
  return r;
}

/// mmvq_block with blocks of THREADS threads.
template <class Format, int THREADS>
Rung block(const std::string& id, const char* title, const std::string& format) {
  Rung r = make(id, title, Format::kType, "mmvq_block", format, false);
  r.device = launch_mmvq_block<Format, THREADS>;
  r.roundings = [](Shape s, Executor) { return mmvq_roundings<Format>(s.id, THREADS / 32); };
  return r;
}

template <class Format>
Rung rows(const std::string& id, const char* title, const std::string& format, bool v2) {
  Rung r = make(id, title, Format::kType, "mmvq_rows", format, v2);
  r.device = launch_mmvq_rows<Format>;
  r.roundings = [](Shape s, Executor) {
    return mmvq_roundings<Format>(s.id, mmvq_plan(s.id / Format::kUnit, 1).warps_per_group);
  };
  return r;
}

template <class Format>
Rung multi(const std::string& id, const char* title, const std::string& format) {
  Rung r = make(id, title, Format::kType, "mmvq_multi", format, true);
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
Rung pipelined(const std::string& id, const char* title, const std::string& format) {
  Rung r = make(id, title, Format::kType, "mmvq_pf", format, true);
  r.device = launch_mmvq_pf<Format>;
  r.roundings = [](Shape s, Executor) {
    return mmvq_roundings<Format>(s.id, mmvq_pf_plan<Format>(s.id, 1).warps_per_group);
  };
  return r;
}

/// The steps of one type, in the order of the text.
template <class Plain, class V2>
void add_type(Chapter& c) {
  const std::string type = info(Plain::kType).name, id = type + "_q8_mmvq", format = "mmvq_" + type;
  c.rungs.push_back(block<Plain, 256>(id, "a block of threads for every output", format));
  c.rungs.push_back(rows<Plain>(id + "_rows", "rows share the activations", format, false));
  c.rungs.push_back(rows<V2>(id + "_v2", "loads as wide as the addresses allow", format, true));
  c.rungs.push_back(multi<V2>(id + "_multi", "up to eight tokens in one pass", format));
  c.rungs.push_back(pipelined<V2>(id + "_pf", "copies run ahead of the arithmetic", format));
}

}  // namespace mmvq_rungs

/// The rungs of this chapter, type by type, from the largest to the smallest of each family.
inline Chapter chapter_04() {
  Chapter c;
  c.name = "04-mmvq";
  c.default_layers = {"7b.attn_q", "7b.ffn_down"};
  using namespace mmvq;
  using namespace mmvq_rungs;
  add_type<Q8_0, Q8_0V2>(c);
  add_type<Q5_1, Q5_1V2>(c);
  add_type<Q5_0, Q5_0V2>(c);
  add_type<Q4_1, Q4_1V2>(c);
  add_type<Q4_0, Q4_0V2>(c);
  c.rungs.push_back(block<Q4_0, 64>("q4_0_q8_mmvq_t64", "blocks of 64 threads", "mmvq_q4_0"));
  c.rungs.push_back(block<Q4_0, 128>("q4_0_q8_mmvq_t128", "blocks of 128 threads", "mmvq_q4_0"));
  add_type<IQ4_NL, IQ4_NLV2>(c);
  add_type<Q6_K, Q6_KV2>(c);
  add_type<Q5_K, Q5_KV2>(c);
  add_type<Q4_K, Q4_KV2>(c);
  add_type<IQ4_XS, IQ4_XSV2>(c);
  add_type<Q3_K, Q3_KV2>(c);
  add_type<Q2_K, Q2_KV2>(c);
  return c;
}

}  // namespace ladder

#ifndef LADDER_NO_MAIN
int main(int argc, char** argv) { return ladder::chapter_main(ladder::chapter_04(), argc, argv); }
#endif
