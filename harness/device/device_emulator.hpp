// The device seam on the SIMT emulator: the same interface as device_cuda.hpp, for the host compiler. Work runs
// when it is queued, so a fault of a kernel is the launch's own error and synchronising is nothing.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "harness/device/device_info.hpp"
#include "harness/device/status.hpp"
#include "harness/emulator/counters.hpp"
#include "harness/emulator/device_model.hpp"
#include "harness/emulator/emulator.hpp"
#include "harness/emulator/memory.hpp"

namespace ladder {

inline constexpr Executor kDeviceExecutor = Executor::emulator;

/// Always one.
inline int device_count() { return 1; }

/// Limits of the device that the emulator models (LADDER_EMULATOR_DEVICE), memory of the host.
inline DeviceInfo device_info() {
  const emu::DeviceModel& m = emu::device_model();
  DeviceInfo d;
  d.executor = Executor::emulator;
  d.name = std::string("SIMT emulator with the limits of ") + m.name;
  d.slug = std::string("emulator-") + m.slug;
  d.cc_major = m.cc_major;
  d.cc_minor = m.cc_minor;
  d.sms = m.sms;
  d.warp_size = emu::kWarpSize;
  d.max_threads_per_block = m.max_threads_per_block;
  d.max_threads_per_sm = m.max_threads_per_sm;
  d.registers_per_sm = m.registers_per_sm;
  d.l2_bytes = m.l2_bytes;
  d.shared_per_block = m.shared_per_block;
  d.shared_per_block_optin = m.shared_per_block_optin;
  d.shared_per_sm = m.shared_per_sm;
  d.total_bytes =
      static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return d;
}

/// Streaming multiprocessors of the modelled device: what a persistent kernel sizes its grid by.
inline int multiprocessor_count() { return emu::device_model().sms; }

/// Most shared memory of a block, static and dynamic together, in bytes.
inline std::size_t shared_memory_limit() { return device_info().shared_per_block_optin; }

/// Most blocks of a cluster: blocks run one after the other here.
inline int most_cluster_blocks() { return 1; }

/// Free memory of the host right now, in bytes, or what LADDER_EMULATOR_MEMORY says instead.
inline std::size_t device_free_bytes() {
  if (const std::size_t given = emu::free_memory(); given > 0) return given;
  return static_cast<std::size_t>(sysconf(_SC_AVPHYS_PAGES)) *
         static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

/// An ordered queue of device work. Movable, not copyable.
class Stream {
 public:
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  Stream(Stream&&) noexcept = default;
  Stream& operator=(Stream&&) noexcept = default;
  /// Nothing is ever pending: launches run when they are made.
  void synchronize() {}

 private:
  friend class Graph;
  friend struct StreamRecorder;
  std::vector<std::function<Status()>>* recording_ = nullptr;
};

/// What launch() needs of a stream: whether a graph is being captured on it.
struct StreamRecorder {
  static std::vector<std::function<Status()>>* of(Stream& s) { return s.recording_; }
};

/// `n` elements of device memory. The name appears in the emulator's reports.
template <class T>
class Buffer {
  static_assert(emu::kCopiesAsBytes<T>);

 public:
  Buffer() = default;
  explicit Buffer(std::size_t n, const char* name = "buffer") : size_(n) {
    if (n == 0) return;
    data_ = static_cast<T*>(emu::allocate(n * sizeof(T), name));
  }
  ~Buffer() { emu::release(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& o) noexcept : data_(std::exchange(o.data_, nullptr)), size_(std::exchange(o.size_, 0)) {}
  Buffer& operator=(Buffer&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(size_, o.size_);
    return *this;
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::size_t bytes() const { return size_ * sizeof(T); }

  /// Synchronous copies; the span's length must not exceed size().
  void upload(std::span<const T> src) {
    if (src.size() > size_) throw DeviceError("Buffer::upload: source longer than the buffer");
    if (src.empty()) return;
    std::memcpy(static_cast<void*>(data_), src.data(), src.size_bytes());
    emu::note_written(data_, src.size_bytes());
  }
  /// The same from memory that a file is mapped to.
  void upload_mapped(std::span<const T> src) { upload(src); }
  void download(std::span<T> dst) const {
    if (dst.size() > size_) throw DeviceError("Buffer::download: destination longer than the buffer");
    if (dst.empty()) return;
    std::memcpy(static_cast<void*>(dst.data()), data_, dst.size_bytes());
  }
  /// Sets every byte. 0xFF makes every float a NaN, which is how outputs are poisoned.
  void fill_bytes(int byte) {
    if (size_ == 0) return;
    std::memset(static_cast<void*>(data_), byte, bytes());
    emu::note_written(data_, bytes());
  }
  /// Device-to-device copy of the first `n` elements.
  void copy_from(const Buffer& src, std::size_t n) {
    if (n > size_ || n > src.size_) throw DeviceError("Buffer::copy_from: out of range");
    if (n == 0) return;
    std::memcpy(static_cast<void*>(data_), src.data_, n * sizeof(T));
    emu::note_copied(data_, src.data_, n * sizeof(T));
  }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Memory that host and kernels share: here all of it.
template <class T>
class HostBuffer {
 public:
  HostBuffer() = default;
  explicit HostBuffer(std::size_t n) : all_(n, "host memory") {}
  T* data() { return all_.data(); }
  std::size_t size() const { return all_.size(); }

 private:
  Buffer<T> all_;
};

/// Host time between start() and stop(): how long the emulation took, which says nothing about any GPU.
class Timer {
 public:
  Timer() = default;
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  void start(Stream&) { begin_ = Clock::now(); }
  void stop(Stream&) { end_ = Clock::now(); }
  double elapsed_ns() { return std::chrono::duration<double, std::nano>(end_ - begin_).count(); }
  double begin_after_ns(const Timer& first) const {
    return std::chrono::duration<double, std::nano>(begin_ - first.begin_).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_{}, end_{};
};

/// How a kernel is launched when the plain way is not enough.
struct LaunchOptions {
  bool cooperative = false;     ///< needs all blocks resident at once: refused here
  bool programmatic = false;    ///< may start before its predecessor ends: here it never does
  unsigned cluster_blocks = 1;  ///< blocks of a cluster, along x: more than 1 is refused here
};

namespace detail {

/// Calls a kernel with a tuple of its parameters, for one thread.
template <class... Params>
struct KernelCall {
  using Kernel = void (*)(Params...);
  using Arguments = std::tuple<std::decay_t<Params>...>;

  static void invoke(const void* kernel, const void* arguments) {
    call(reinterpret_cast<Kernel>(const_cast<void*>(kernel)), *static_cast<const Arguments*>(arguments),
         std::index_sequence_for<Params...>{});
  }

  /// Those of the arguments that are pointers to data.
  static std::vector<emu::PointerArgument> pointers(const Arguments& a) {
    std::vector<emu::PointerArgument> out;
    std::apply([&](const auto&... v) { (add(out, v), ...); }, a);
    return out;
  }

 private:
  template <class T>
  static void add(std::vector<emu::PointerArgument>& out, const T& v) {
    if constexpr (std::is_pointer_v<T> && !std::is_function_v<std::remove_pointer_t<T>>) {
      using To = std::remove_pointer_t<T>;
      out.push_back({const_cast<const std::remove_volatile_t<To>*>(v), std::is_const_v<To>});
    }
  }
  template <std::size_t... I>
  static void call(Kernel kernel, const Arguments& a, std::index_sequence<I...>) {
    kernel(static_cast<Params>(std::get<I>(a))...);
  }
};

}  // namespace detail

/// Runs `kernel` with the arguments converted to its parameter types. Returns an error that names the kernel when
/// the launch is refused or a thread of it fails; on a GPU the latter would surface at the next synchronisation.
/// @param shared_bytes dynamic shared memory per block, up to the device's opt-in limit.
template <class... Params, class... Args>
Status launch(const LaunchOptions& options, void (*kernel)(Params...), dim3 grid, dim3 block,
              std::size_t shared_bytes, Stream& stream, Args&&... args) {
  static_assert(sizeof...(Params) == sizeof...(Args), "launch: wrong number of kernel arguments");
  using Call = detail::KernelCall<Params...>;
  if (options.cooperative) {
    return Status::error(
        "a cooperative launch needs a GPU: the emulator runs blocks one after the other, and a "
        "grid-wide barrier would never be reached by all of them");
  }
  if (options.cluster_blocks > 1) {
    return Status::error(
        "a launch of clusters needs a GPU of compute capability 9.0: the emulator runs blocks one "
        "after the other");
  }
  auto run = [kernel, grid, block, shared_bytes,
              arguments = typename Call::Arguments(static_cast<Params>(std::forward<Args>(args))...)] {
    emu::LaunchRequest r;
    r.kernel = reinterpret_cast<const void*>(kernel);
    r.invoke = &Call::invoke;
    r.arguments = &arguments;
    r.argument_bytes = sizeof arguments;
    const std::vector<emu::PointerArgument> pointers = Call::pointers(arguments);
    r.pointers = pointers.data();
    r.pointer_count = pointers.size();
    r.grid = grid;
    r.block = block;
    r.shared_bytes = shared_bytes;
    return emu::run(r);
  };
  if (auto* recording = StreamRecorder::of(stream)) {
    recording->push_back(std::move(run));
    return {};
  }
  return run();
}

template <class... Params, class... Args>
Status launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes, Stream& stream,
              Args&&... args) {
  return launch(LaunchOptions{}, kernel, grid, block, shared_bytes, stream, std::forward<Args>(args)...);
}

/// A captured sequence of launches, replayed one after the other.
class Graph {
 public:
  Graph() = default;
  /// Runs `record(stream)` in capture mode. `record` returns a Status and must only launch on `stream`.
  template <class F>
  static Graph capture(Stream& stream, F&& record) {
    Graph g;
    stream.recording_ = &g.launches_;
    const Status s = record(stream);
    stream.recording_ = nullptr;
    if (!s.ok()) throw DeviceError(s.message());
    return g;
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  Graph(Graph&&) noexcept = default;
  Graph& operator=(Graph&&) noexcept = default;
  void launch(Stream&) {
    for (const auto& run : launches_) require(run());
  }

 private:
  std::vector<std::function<Status()>> launches_;
};

}  // namespace ladder
