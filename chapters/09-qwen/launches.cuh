// Every kernel of the device engine is launched through here: counted, and with LADDER_TRACE timed and written down.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chapters/09-qwen/devices.hpp"
#include "chapters/09-qwen/gguf.hpp"
#include "chapters/09-qwen/trace.hpp"
#include "harness/device/device.hpp"
#include "harness/experiment/traffic.hpp"
#include "kernels/dispatch/dispatch.hpp"
#include "kernels/gemv/gemv_fused_shape.hpp"

namespace ladder::qwen {

/// What a launch is, for a trace.
struct LaunchNote {
  const char* kernel;
  std::array<const gguf::Tensor*, 3> weights{};  ///< matrices that it multiplies, all of one type; or none
  int nt = 1;                                    ///< token rows
  long long width = 0;                           ///< of a row, where nothing is multiplied
  const dispatch::Gate* gate = nullptr;          ///< of a multiplication
};

#if defined(__CUDACC__)
/// Keeps a stream busy for a time.
static __global__ void hold_stream(long long ns) {
  const auto now = [] {
    long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
  };
  const long long begin = now();
  while (now() - begin < ns) {
  }
}
#endif

class Launches {
 public:
  /// @param trace file, or empty for no trace @param probe measures the read roof in GB/s; asked once, for a trace
  /// Throws std::runtime_error if the file cannot be written.
  Launches(const std::string& trace, const std::function<std::function<double()>()>& probe) {
    if (trace.empty()) return;
    trace_ = std::make_unique<Trace>(trace);
    const DeviceInfo device = device_info();
    trace_->name_process(device.name + (kDeviceExecutor == Executor::gpu
                                            ? ": kernels one after the other, by CUDA events"
                                            : ": times of the host that emulates, of no GPU"));
    if (kDeviceExecutor != Executor::gpu) return;
    const std::function<double()> read = probe();
    for (int i = 0; i < 3; ++i) read_gbps_ = std::max(read_gbps_, read());
    for (const KnownDevice& known : known_devices()) {
      if (device.name.starts_with(known.name)) {
        f16_gops_ = known.f16_gops;
        s8_gops_ = known.s8_gops;
      }
    }
  }

  /// Whether launches may begin before the ones before them have ended: not where each is timed.
  [[nodiscard]] bool overlap() const { return trace_ == nullptr; }
  /// Whether launches may be recorded and replayed: a replayed one is not timed.
  [[nodiscard]] bool replay() const { return trace_ == nullptr; }
  [[nodiscard]] int count() const { return count_; }

  /// Launches. @param launch returns a Status, whose error is thrown
  template <class F>
  void operator()(const LaunchNote& note, Stream& stream, F&& launch) {
    ++count_;
    if (trace_ == nullptr) {
      require(launch());
      return;
    }
    if (used_ == 0) hold(stream);
    if (timed_.size() == used_) timed_.push_back(std::make_unique<Timed>());
    Timed& t = *timed_[used_++];
    t.note = note;
    t.timer.start(stream);
    require(launch());
    t.timer.stop(stream);
  }

  /// Writes what has been timed. To be called when the stream has been synchronised.
  void write_trace() {
    if (used_ == 0) return;
    if (first_ == nullptr) {
      first_ = std::move(timed_[0]);  // all times count from its start
      timed_[0] = std::make_unique<Timed>();
      write(*first_, *first_);
    } else {
      write(*timed_[0], *first_);
    }
    for (std::size_t i = 1; i < used_; ++i) write(*timed_[i], *first_);
    used_ = 0;
    trace_->flush();
  }

 private:
  struct Timed {
    LaunchNote note;
    Timer timer;
  };

  /// The device waits until the host has queued what follows. Otherwise short kernels would be timed with the host's
  /// way to the next launch.
  static void hold([[maybe_unused]] Stream& stream) {
#if defined(__CUDACC__)
    constexpr long long kLongEnough = 3'000'000;  // ns: some 300 launches, each with two events
    require(launch(hold_stream, dim3(1), dim3(1), 0, stream, kLongEnough));
#endif
  }

  void write(Timed& t, Timed& first) {
    const double ns = t.timer.elapsed_ns(), begin = t.timer.begin_after_ns(first.timer);
    const LaunchNote& n = t.note;
    JsonObject o;
    if (n.gate == nullptr) {
      o.add("nt", n.nt);
      if (n.width > 0) o.add("width", n.width);
      trace_->add(n.kernel, "other", begin, ns, o);
      return;
    }
    const WeightType type = n.weights[0]->type;
    const long long id = n.weights[0]->row_length();
    long long od = 0;
    std::string names;
    for (const gguf::Tensor* w : n.weights) {
      if (w == nullptr) continue;
      od += w->rows();
      names += (names.empty() ? "" : " + ") + std::string(w->name);
    }
    using dispatch::Kernel;
    const Kernel k = n.gate->kernel;
    const bool int8 = k == Kernel::mmvq_tiles || k == Kernel::mmvq_multi || k == Kernel::mmq_tiles;
    const bool f16 = dispatch::info(k).tier == 1 && !int8;
    const Shape s{n.nt, od, id};
    const ActivationFormat acts = int8  ? ActivationFormat::pad40
                                  : f16 ? ActivationFormat::f16
                                        : ActivationFormat::f32;
    const double bytes = compulsory_traffic(type, acts, s).total(), ops = matmul_ops(s);
    o.add("weights", names).add("type", info(type).name).add("nt", s.nt).add("od", od).add("id", id);
    o.add("tier", dispatch::info(k).tier).add("gate", n.gate->name);
    o.add("bytes", static_cast<long long>(bytes)).add("ops", static_cast<long long>(ops));
    o.add("gbps", bytes / ns).add("gops", ops / ns);
    // The roof is the longer of what the bytes and what the operations take at least.
    const double peak = int8 ? s8_gops_ : f16 ? f16_gops_ : 0;
    const double by_bytes = read_gbps_ > 0 ? bytes / read_gbps_ : 0, by_ops = peak > 0 ? ops / peak : 0;
    if (kDeviceExecutor == Executor::gpu) {
      o.add("percent_of_roof", 100 * std::max(by_bytes, by_ops) / ns);
      o.add("roof", by_bytes >= by_ops ? "memory, measured before" : "tensor cores, data sheet");
    }
    trace_->add(n.kernel == kFusedName ? kFusedName : dispatch::kernel_name(k, type, id), "multiply", begin,
                ns, o);
  }

  int count_ = 0;
  std::unique_ptr<Trace> trace_;
  std::vector<std::unique_ptr<Timed>> timed_;
  std::size_t used_ = 0;
  std::unique_ptr<Timed> first_;
  double read_gbps_ = 0, f16_gops_ = 0, s8_gops_ = 0;
};

}  // namespace ladder::qwen
