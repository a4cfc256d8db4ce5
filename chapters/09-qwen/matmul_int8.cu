// Products with int8 activations for the engine (matmul_kernels.hpp), but for those of single tokens.
//
// BUILD  nvcc -std=c++20 -O3 -I. -gencode=arch=... -c chapters/09-qwen/matmul_int8.cu
#define LADDER_STATIC_KERNELS
#include <string>

#include "chapters/09-qwen/matmul_kernels.hpp"
#include "kernels/mmq/mmq_tiles.cuh"
#include "kernels/mmvq/mmvq.cuh"
#include "kernels/mmvq/mmvq_formats.cuh"
#include "kernels/quant/quantize_acts.cuh"

namespace ladder::qwen {

Status multiply_blocks(WeightType type, const void* rows, const BlockQ8Pad40* acts, float* out, Shape s,
                       Stream& stream) {
  using namespace mmvq;
  switch (type) {
    case WeightType::q4_0:
      return launch_mmvq_multi<Q4_0>(rows, acts, out, s, stream);
    case WeightType::q4_1:
      return launch_mmvq_multi<Q4_1>(rows, acts, out, s, stream);
    case WeightType::q5_0:
      return launch_mmvq_multi<Q5_0>(rows, acts, out, s, stream);
    case WeightType::q5_1:
      return launch_mmvq_multi<Q5_1>(rows, acts, out, s, stream);
    case WeightType::q8_0:
      return launch_mmvq_multi<Q8_0>(rows, acts, out, s, stream);
    case WeightType::q2_k:
      return launch_mmvq_multi<Q2_K>(rows, acts, out, s, stream);
    case WeightType::q3_k:
      return launch_mmvq_multi<Q3_K>(rows, acts, out, s, stream);
    case WeightType::q4_k:
      return launch_mmvq_multi<Q4_K>(rows, acts, out, s, stream);
    case WeightType::q5_k:
      return launch_mmvq_multi<Q5_K>(rows, acts, out, s, stream);
    case WeightType::q6_k:
      return launch_mmvq_multi<Q6_K>(rows, acts, out, s, stream);
    case WeightType::iq4_nl:
      return launch_mmvq_multi<IQ4_NL>(rows, acts, out, s, stream);
    case WeightType::iq4_xs:
      return launch_mmvq_multi<IQ4_XS>(rows, acts, out, s, stream);
    case WeightType::f32:
    case WeightType::f16:
    case WeightType::bf16:
      break;
  }
  return Status::error(std::string("mmvq_multi: ") + info(type).name + " weights have no blocks");
}

Status planes_for_mmq(const float* acts, unsigned char* planes, long long nt, long long id, Stream& stream) {
  const Q8ActsPlanes p = q8_acts_planes(nt, id);
  return launch_quantize_q8_pad40_t(acts, reinterpret_cast<std::int8_t*>(planes),
                                    reinterpret_cast<std::uint32_t*>(planes + p.codes), nt, id, stream);
}

std::size_t mmq_planes_bytes(long long nt, long long id) {
  const Q8ActsPlanes p = q8_acts_planes(nt, id);
  return p.codes + 4 * p.scales;
}

Status multiply_mmq(WeightType type, const void* tiles, const unsigned char* planes, float* out, Shape s,
                    const GemmEpilogue& epilogue, float* workspace, Stream& stream, bool programmatic) {
  const Q8ActsPlanes p = q8_acts_planes(s.nt, s.id);
  return launch_mmq(type, tiles, reinterpret_cast<const std::int8_t*>(planes),
                    reinterpret_cast<const std::uint32_t*>(planes + p.codes), out, s, epilogue, workspace,
                    stream, programmatic);
}

std::size_t workspace_of_mmq(WeightType type, Shape s, int sms) { return mmq_workspace_bytes(type, s, sms); }

}  // namespace ladder::qwen
