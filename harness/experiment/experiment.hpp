// Check, then measure, then place under the roofs: the whole life of one rung at one shape.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "harness/device/device.hpp"
#include "harness/device/half_bits.hpp"
#include "harness/experiment/check.hpp"
#include "harness/experiment/fill.hpp"
#include "harness/experiment/measure.hpp"
#include "harness/experiment/record.hpp"
#include "harness/experiment/reference.hpp"
#include "harness/experiment/roofs.hpp"
#include "harness/experiment/rung.hpp"
#include "harness/experiment/tensor_roofs.hpp"
#include "kernels/mmvq/tile_acts.cuh"
#include "kernels/quant/q8_acts.hpp"
#include "kernels/quant/quantize_acts.cuh"
#if !defined(__CUDACC__)
#include "kernels/cpu/thread_pool.hpp"
#endif

namespace ladder {

/// Where a rung runs: the executor, its device, and what is needed to run there.
struct Context {
  Executor executor = kDeviceExecutor;
  DeviceInfo device;
  Stream stream;
#if !defined(__CUDACC__)
  std::unique_ptr<cpu::ThreadPool> pool;     ///< set when executor is cpu
  std::unique_ptr<CpuReadProbe> read_probe;  ///< set by measure_roofs on the cpu
#endif
  MeasuredRoofs roofs;
};

/// Where f16 activations 0..15 of a sixteen stand beside weights in tiles: a lane's four neighbouring codes are two pairs
/// of an A fragment, eight places apart (kernels/gemm/gemm_tiles_formats.cuh).
constexpr std::size_t place_in_sixteen(std::size_t k) { return k / 4 * 2 + k % 2 + k / 2 % 2 * 8; }

/// The operands of one shape on the device: `sets` copies of (weights, acts, out), each with guard bands.
/// Weights and activations are as the form says, in buffers of exactly their size.
class Operands {
 public:
  Operands(Shape shape, int sets, OperandForm form = {}) : shape_(shape), form_(form) {
    require(whole_blocks(form.type, shape));
    if (quantized() && shape.id % kQ8ActsPerBlock != 0) {
      require(Status::error("id must be a multiple of " + std::to_string(kQ8ActsPerBlock) +
                            " for int8 activations, not " + std::to_string(shape.id)));
    }
    const std::size_t bytes = static_cast<std::size_t>(shape.od) * row_bytes(form.type, shape.id);
    for (int i = 0; i < sets; ++i) {
      if (i == 0 || form.layout == nullptr) blocks_.emplace_back(bytes, "weights");
      if (form.layout != nullptr) laid_out_.emplace_back(form.layout->bytes(form.type, shape), "weights");
      if (i == 0 || form.acts == ActivationFormat::f32 || form.acts == ActivationFormat::f32_q8)
        acts_.emplace_back(count(shape.nt, shape.id), "acts");
      if (quantized() && (i == 0 || !planes()))
        q8_.emplace_back(count(shape.nt, shape.id / kQ8ActsPerBlock), "acts");
      if (planes()) planes_.emplace_back(plane_bytes(), "acts");
      if (halves()) halves_.emplace_back(count(shape.nt, shape.id), "acts");
      out_.emplace_back(count(shape.nt, shape.od), "out");
    }
  }
  Shape shape() const { return shape_; }
  const OperandForm& form() const { return form_; }
  int sets() const { return static_cast<int>(out_.size()); }
  /// What a kernel of this form reads.
  WeightsPointer weights(int set) { return at(form_.layout != nullptr ? laid_out_ : blocks_, set).data(); }
  ActsPointer acts(int set) {
    if (planes()) return at(planes_, set).data();
    if (halves()) return at(halves_, set).data();
    if (form_.acts == ActivationFormat::f32_q8) return at(acts_, set).data();
    if (quantized()) return at(q8_, set).data();
    return at(acts_, set).data();
  }
  float* out(int set) { return at(out_, set).data(); }
  GuardedBuffer<float>& out_buffer(int set) { return at(out_, set); }

  /// The same values in every set: rotation changes addresses, never results. Packed weights are random
  /// blocks; beside packed integers the activations are smaller ones (see FillKind).
  void fill_inputs(FillKind kind, unsigned seed, Stream& stream) {
    const bool packed = form_.type != WeightType::f32;
    const FillKind acts_kind = packed && kind == FillKind::small_int ? FillKind::tiny_int : kind;
    for (GuardedBuffer<unsigned char>& b : blocks_) {
      fill_weights(b.data(), form_.type, shape_.od, shape_.id, kind, seed, stream);
    }
    for (GuardedBuffer<unsigned char>& l : laid_out_) {
      require(form_.layout->repack(form_.type, blocks_[0].data(), l.data(), shape_, stream));
    }
    for (GuardedBuffer<float>& a : acts_) fill(a.data(), a.size(), acts_kind, seed + 1, stream);
    stream.synchronize();
    if (form_.acts == ActivationFormat::f32_q8) {
      if (kind == FillKind::small_int) make_scales_one();
      quantize_acts(false, stream);
    } else if (quantized()) {
      quantize_acts(kind == FillKind::small_int, stream);
    }
    if (halves()) round_acts();
  }

  /// Replaces the activations of set 0. [nt][id]
  void upload_acts(std::span<const float> acts, Stream& stream) {
    acts_[0].upload(acts);
    if (quantized()) quantize_acts(false, stream);
    if (halves()) round_acts();
  }

  /// What the outputs of set 0 should be: the product of the very weights and activations that kernels read.
  Reference reference(Stream& stream) {
    if (!quantized()) return reference_matmul(blocks_[0].data(), acts_[0].data(), shape_, stream, form_.type);
    const std::vector<BlockQ8Pad40> blocks = download(q8_[0]);
    std::vector<float> decoded(acts_[0].size());
    for (std::size_t i = 0; i < decoded.size(); ++i) {
      const BlockQ8Pad40& b = blocks[i / kQ8ActsPerBlock];
      decoded[i] =
          half_bits_to_float(b.d) * static_cast<float>(b.q[i % kQ8ActsPerBlock]);  // exact: 11 and 8 bits
    }
    Buffer<float> acts(decoded.size(), "decoded acts");
    acts.upload(decoded);
    return reference_matmul(blocks_[0].data(), acts.data(), shape_, stream, form_.type);
  }

  /// Bytes of one set, guards included.
  static double bytes_per_set(Shape s, OperandForm form = {}) {
    const double weights = form.layout != nullptr ? static_cast<double>(form.layout->bytes(form.type, s))
                                                  : weight_bytes(form.type, s.od, s.id);
    return weights + activation_bytes(form.acts, s.nt, s.id) +
           4.0 * static_cast<double>(s.nt) * static_cast<double>(s.od) +
           6.0 * GuardedBuffer<float>::kGuardBytes;
  }

 private:
  static std::size_t count(long long a, long long b) {
    return static_cast<std::size_t>(a) * static_cast<std::size_t>(b);
  }
  template <class T>
  static GuardedBuffer<T>& at(std::vector<GuardedBuffer<T>>& v, int set) {
    return v[static_cast<std::size_t>(set)];
  }
  template <class T>
  static std::vector<T> download(const GuardedBuffer<T>& b) {
    std::vector<T> host(b.size());
    if (!b.download(host)) throw DeviceError("a guard band of the operands changed");
    return host;
  }
  bool quantized() const {
    return form_.acts == ActivationFormat::pad40 || form_.acts == ActivationFormat::f32_q8 || planes();
  }
  bool planes() const {
    return form_.acts == ActivationFormat::planes40 || form_.acts == ActivationFormat::pad40_t;
  }
  bool halves() const {
    return form_.acts == ActivationFormat::f16 || form_.acts == ActivationFormat::f16_tiles;
  }
  std::size_t plane_bytes() const {
    if (form_.acts == ActivationFormat::planes40) return tile_acts::bytes(shape_.nt, shape_.id);
    const Q8ActsPlanes p = q8_acts_planes(shape_.nt, shape_.id);
    return p.codes + p.scales * sizeof(std::uint32_t);
  }

  /// Puts 127 first in every block of activations, so that its scale is 1 and its codes are the numbers themselves.
  void make_scales_one() {
    std::vector<float> acts = download(acts_[0]);
    for (std::size_t i = 0; i < acts.size(); i += kQ8ActsPerBlock)
      acts[i] = acts[i] < 0.0f ? -127.0f : 127.0f;
    for (GuardedBuffer<float>& a : acts_) a.upload(acts);
  }

  /// Rounds acts_[0] to f16, for all sets, and keeps there what became of it: kernels and reference see the same numbers.
  void round_acts() {
    std::vector<float> acts = download(acts_[0]);
    std::vector<std::uint16_t> rounded(acts.size());
    for (std::size_t i = 0; i < acts.size(); ++i) {
      const std::uint16_t h = float_to_half_bits(acts[i]);
      acts[i] = half_bits_to_float(h);
      rounded[form_.acts == ActivationFormat::f16 ? i : i / 16 * 16 + place_in_sixteen(i % 16)] = h;
    }
    acts_[0].upload(acts);
    for (GuardedBuffer<std::uint16_t>& h : halves_) h.upload(rounded);
  }

  /// Makes int8 blocks of acts_[0], for all sets. `as_integers`: scales of 1, so that codes are the numbers themselves.
  void quantize_acts(bool as_integers, Stream& stream) {
    if (!as_integers) {
      require(launch_quantize_q8_pad40(acts_[0].data(), q8_[0].data(), shape_.nt, shape_.id, stream));
      stream.synchronize();
    }
    std::vector<BlockQ8Pad40> blocks = download(q8_[0]);
    if (as_integers) {
      const std::vector<float> acts = download(acts_[0]);
      for (std::size_t b = 0; b < blocks.size(); ++b) {
        blocks[b] = {0x3c00, 0, {}, 0};  // 1.0
        for (int j = 0; j < kQ8ActsPerBlock; ++j) {
          blocks[b].q[j] = static_cast<std::int8_t>(acts[b * kQ8ActsPerBlock + static_cast<std::size_t>(j)]);
          blocks[b].sum += blocks[b].q[j];
        }
      }
    }
    for (GuardedBuffer<BlockQ8Pad40>& q : q8_) q.upload(blocks);
    if (!planes()) return;
    std::vector<unsigned char> ordered;
    if (form_.acts == ActivationFormat::planes40) {
      ordered = tile_acts::from_blocks(blocks.data(), shape_.nt, shape_.id);
    } else {
      ordered.resize(plane_bytes());
      const std::size_t codes = q8_acts_planes(shape_.nt, shape_.id).codes;  // a multiple of 4
      pack_q8_pad40_t(blocks.data(), shape_.nt, shape_.id, reinterpret_cast<std::int8_t*>(ordered.data()),
                      reinterpret_cast<std::uint32_t*>(ordered.data() + codes));
    }
    for (GuardedBuffer<unsigned char>& p : planes_) p.upload(ordered);
  }

  Shape shape_;
  OperandForm form_;
  std::vector<GuardedBuffer<unsigned char>> blocks_;    // in the order of a file; one, if there is a layout
  std::vector<GuardedBuffer<unsigned char>> laid_out_;  // in the form's layout
  std::vector<GuardedBuffer<float>> acts_;              // as they were filled; one, if they are quantized
  std::vector<GuardedBuffer<BlockQ8Pad40>> q8_;         // [nt][id/32]; one, if there are planes
  std::vector<GuardedBuffer<unsigned char>> planes_;    // tile_acts.cuh, or codes and scales of pad40_t
  std::vector<GuardedBuffer<std::uint16_t>> halves_;    // [nt][id]
  std::vector<GuardedBuffer<float>> out_;
};

/// Launches `rung` once on operand set `set`, on the context's executor.
inline Status run_once(const Rung& rung, Operands& ops, int set, Context& ctx, Stream& stream) {
#if !defined(__CUDACC__)
  if (ctx.executor == Executor::cpu) {
    rung.cpu(ops.weights(set), ops.acts(set), ops.out(set), ops.shape(), *ctx.pool);
    return {};
  }
#else
  (void)ctx;
#endif
  return rung.device(ops.weights(set), ops.acts(set), ops.out(set), ops.shape(), stream);
}

/// Which of the two tests an output has to pass.
enum class CheckKind {
  exact,   ///< small integers: every partial sum is exact in f32, so the output must match bit for bit
  random,  ///< reals: within the rung's derived bound
};

/// Runs the rung on set 0 with a poisoned output and compares with `reference`.
inline CheckResult check_once(const Rung& rung, Operands& ops, const Reference& reference, CheckKind kind,
                              Context& ctx) {
  CheckResult r;
  GuardedBuffer<float>& out = ops.out_buffer(0);
  out.poison();
  try {
    if (Status s = run_once(rung, ops, 0, ctx, ctx.stream); !s.ok()) {
      r.message = s.message();
      return r;
    }
    ctx.stream.synchronize();
  } catch (const DeviceError& e) {
    r.message = e.what();
    return r;
  }
  std::vector<float> host(out.size());
  if (!out.download(host)) {
    r.message = "wrote outside its output buffer (a guard band changed)";
    return r;
  }
  const double roundings = kind == CheckKind::exact ? 0.0 : rung.roundings(ops.shape(), ctx.executor);
  const double operand_rounding = kind == CheckKind::exact ? 0.0 : rung.operand_rounding;
  return check_outputs(host, reference.value, reference.magnitude, roundings, ops.shape(), operand_rounding);
}

struct RungCheck {
  CheckResult exact, random;
  bool ok() const { return exact.ok && random.ok; }
  const std::string& message() const { return exact.ok ? random.message : exact.message; }
};

/// Rungs by the form of their operands, forms in order of first appearance: one group can share its operands.
inline std::vector<std::vector<const Rung*>> group_by_form(const std::vector<const Rung*>& rungs) {
  std::vector<std::vector<const Rung*>> groups;
  for (const Rung* r : rungs) {
    const auto same = [r](const std::vector<const Rung*>& g) { return g.front()->form() == r->form(); };
    const auto at = std::find_if(groups.begin(), groups.end(), same);
    if (at == groups.end()) {
      groups.push_back({r});
    } else {
      at->push_back(r);
    }
  }
  return groups;
}

/// Checks several rungs at one shape, sharing inputs and references. Leaves random inputs in every operand
/// set. Rungs that cannot run there must have been filtered out by the caller; all must have the operands'
/// form.
inline std::vector<RungCheck> check_rungs(const std::vector<const Rung*>& rungs, Operands& ops, Context& ctx,
                                          Reference& random_reference, unsigned seed = 1) {
  for (const Rung* r : rungs) {
    if (r->weight_type != ops.form().type) {
      throw DeviceError(r->id + " multiplies " + info(r->weight_type).name + " weights; these are " +
                        info(ops.form().type).name);
    }
    if (!(r->form() == ops.form()))
      throw DeviceError(r->id + " reads its operands in another form than these");
  }
  std::vector<RungCheck> results(rungs.size());
  for (const CheckKind kind : {CheckKind::exact, CheckKind::random}) {
    ops.fill_inputs(kind == CheckKind::exact ? FillKind::small_int : FillKind::uniform,
                    seed + (kind == CheckKind::exact ? 100 : 200), ctx.stream);
    Reference reference = ops.reference(ctx.stream);
    for (std::size_t i = 0; i < rungs.size(); ++i) {
      (kind == CheckKind::exact ? results[i].exact : results[i].random) =
          check_once(*rungs[i], ops, reference, kind, ctx);
    }
    if (kind == CheckKind::random) random_reference = std::move(reference);
  }
  return results;
}

/// How many operand sets a cold measurement rotates through: together at least four times the last-level
/// cache, as far as `budget_bytes` allows. Reading other copies evicts clean lines; a memset would leave
/// dirty ones whose write-back is then charged to the kernel.
inline int sets_for_cold(Shape shape, const DeviceInfo& device, double budget_bytes, OperandForm form = {}) {
  const double per_set = Operands::bytes_per_set(shape, form);
  const double wanted = std::max(1.0, std::ceil(4.0 * static_cast<double>(device.l2_bytes) / per_set));
  return static_cast<int>(std::max(1.0, std::min(wanted, std::floor(budget_bytes / per_set))));
}

/// Timing closure of a rung: `once()` gives one sample in ns.
class RungSampler {
 public:
  /// @param cold rotate through all operand sets; otherwise only set 0 is used, back to back
  RungSampler(const Rung& rung, Operands& ops, Context& ctx, bool cold) {
    const int sets = cold ? ops.sets() : 1;
#if !defined(__CUDACC__)
    if (ctx.executor == Executor::cpu) {
      host_ = std::make_unique<HostSampler>(
          [&rung, &ops, &ctx](int set) { require(run_once(rung, ops, set, ctx, ctx.stream)); }, sets);
      return;
    }
#endif
    device_ = std::make_unique<DeviceSampler>(
        DeviceWorkload{[&rung, &ops, &ctx](int set, Stream& s) { return run_once(rung, ops, set, ctx, s); },
                       sets},
        ctx.stream);
  }
  double once() { return host_ ? host_->once() : device_->once(); }
  /// See DeviceSampler.
  double sm_mhz() const { return device_ ? device_->sm_mhz() : 0.0; }

 private:
  std::unique_ptr<DeviceSampler> device_;
  std::unique_ptr<HostSampler> host_;
};

/// Fills in the parts of a record that follow from rung, shape and context.
inline Record describe(const Rung& rung, Shape shape, const std::string& layer, const Context& ctx) {
  Record r;
  r.rung = rung.id;
  r.executor = ctx.executor;
  r.device = ctx.device.slug;
  r.type = info(rung.weight_type).name;
  r.shape = shape;
  r.layer = layer;
  r.traffic = rung.traffic(shape);
  r.work = rung.work(shape);
  if (ctx.roofs.read_gbps > 0) {
    const double peak =
        ctx.executor == Executor::gpu ? peak_gops(ctx.roofs, rung.math) : ctx.roofs.f32_gflops;
    r.roof = Roof{ctx.roofs.read_gbps, peak, r.work->unit, "measured"};
  }
  if (!rung.peer_name.empty()) {
    r.peer.add("name", rung.peer_name);
    if (!rung.peer_version.empty()) r.peer.add("version", rung.peer_version);
  }
#if !defined(__CUDACC__)
  if (ctx.executor == Executor::cpu) r.params.add("threads", ctx.pool->size());
#endif
  return r;
}

/// A point this little above the roof is the noise of two measurements; higher, it did not come from memory.
inline constexpr double kRoofTolerance = 1.03;

/// Samples the rung until the stop rule of `options`. On the CPU each sample has one of the read roof beside it, and
/// the record's roof becomes their median.
inline TimeStats sample_with_roof(RungSampler& sampler, const MeasureOptions& options, Context& ctx,
                                  Record& record) {
#if !defined(__CUDACC__)
  if (ctx.read_probe) {
    std::vector<double> probe_ns;
    const TimeStats time = sample(
        [&] {
          probe_ns.push_back(ctx.read_probe->once());
          return sampler.once();
        },
        options);
    if (record.roof) record.roof->bandwidth_gbps = ctx.read_probe->bytes() / summarize(probe_ns).median;
    return time;
  }
#endif
  (void)ctx;
  (void)record;
  TimeStats time = sample([&] { return sampler.once(); }, options);
  time.sm_mhz = sampler.sm_mhz();
  return time;
}

/// Says what limits a measured record, and whether its point may stand under the memory roof.
inline void judge(Record& r, const Context& ctx) {
  if (!r.time || !r.roof) return;
  const double memory_ns = r.roof->bandwidth_gbps > 0 ? r.moved_bytes() / r.roof->bandwidth_gbps : 0;
  const double compute_ns = r.work && r.roof->peak_gops > 0 ? r.work->count / r.roof->peak_gops : 0;
  r.bound = memory_ns >= compute_ns ? "memory" : "compute";
  // Shorter than one empty graph node: what is measured is mostly the launch.
  if (std::max(memory_ns, compute_ns) < ctx.roofs.graph_node_ns) r.bound = "latency";
  r.valid = true;
  const double gbps = r.moved_bytes() / r.time->median;
  if (r.mode == "hot" && r.moved_bytes() < static_cast<double>(ctx.device.l2_bytes)) {
    r.valid = false;
    r.why_not = "operands fit in the last-level cache, so this point says nothing about memory";
  } else if (gbps > kRoofTolerance * r.roof->bandwidth_gbps) {
    r.valid = false;
    r.why_not = "above the memory roof: part of the operands came from a cache";
  }
}

}  // namespace ladder
