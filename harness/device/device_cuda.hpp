// The device seam on CUDA. Every CUDA call is checked; an error names the call, and for a launch the kernel.
#pragma once

#include <cuda_runtime.h>
#include <cxxabi.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "harness/device/device_info.hpp"
#include "harness/device/status.hpp"

namespace ladder {

inline constexpr Executor kDeviceExecutor = Executor::gpu;

namespace detail {

inline std::string cuda_message(cudaError_t e, const std::string& what) {
  return what + ": " + cudaGetErrorName(e) + " (" + cudaGetErrorString(e) + ")";
}

inline void check_cuda(cudaError_t e, const char* call) {
  if (e != cudaSuccess) throw DeviceError(cuda_message(e, call));
}

/// Human-readable name of a kernel, for error messages only.
inline std::string kernel_name(const void* kernel) {
#if CUDART_VERSION >= 12030
  const char* mangled = nullptr;
  if (cudaFuncGetName(&mangled, kernel) == cudaSuccess && mangled != nullptr) {
    int status = 0;
    char* plain = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
    std::string name = (status == 0 && plain != nullptr) ? plain : mangled;
    std::free(plain);
    return name;
  }
  (void)cudaGetLastError();
#else
  (void)kernel;
#endif
  return "kernel";
}

}  // namespace detail

/// Checks a CUDA runtime call and throws DeviceError with the call's own text.
#define LADDER_CUDA(call) ::ladder::detail::check_cuda((call), #call)

/// Number of usable devices; 0 also when there is no driver.
inline int device_count() {
  int n = 0;
  if (cudaGetDeviceCount(&n) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return n;
}

/// Attribute queries only: cudaDeviceProp lost its clock fields in CUDA 13, and is slow to fill.
inline DeviceInfo device_info() {
  int dev = 0;
  LADDER_CUDA(cudaGetDevice(&dev));
  const auto attr = [dev](cudaDeviceAttr a) {
    int v = 0;
    LADDER_CUDA(cudaDeviceGetAttribute(&v, a, dev));
    return v;
  };
  DeviceInfo d;
  d.executor = Executor::gpu;
  cudaDeviceProp prop{};
  LADDER_CUDA(cudaGetDeviceProperties(&prop, dev));
  d.name = prop.name;
  d.slug = slugify(d.name);
  d.cc_major = attr(cudaDevAttrComputeCapabilityMajor);
  d.cc_minor = attr(cudaDevAttrComputeCapabilityMinor);
  d.sms = attr(cudaDevAttrMultiProcessorCount);
  d.warp_size = attr(cudaDevAttrWarpSize);
  d.max_threads_per_block = attr(cudaDevAttrMaxThreadsPerBlock);
  d.max_threads_per_sm = attr(cudaDevAttrMaxThreadsPerMultiProcessor);
  d.registers_per_sm = attr(cudaDevAttrMaxRegistersPerMultiprocessor);
  d.l2_bytes = static_cast<std::size_t>(attr(cudaDevAttrL2CacheSize));
  d.shared_per_block = static_cast<std::size_t>(attr(cudaDevAttrMaxSharedMemoryPerBlock));
  d.shared_per_block_optin = static_cast<std::size_t>(attr(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  d.shared_per_sm = static_cast<std::size_t>(attr(cudaDevAttrMaxSharedMemoryPerMultiprocessor));
  d.total_bytes = prop.totalGlobalMem;
  return d;
}

/// Multiprocessors of the current device; cheap enough for a launcher (cudaGetDeviceProperties is not).
inline int multiprocessor_count() {
  int dev = 0, n = 0;
  LADDER_CUDA(cudaGetDevice(&dev));
  LADDER_CUDA(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, dev));
  return n;
}

/// Most shared memory of a block, static and dynamic together, in bytes; cheap enough for a launcher.
inline std::size_t shared_memory_limit() {
  int dev = 0, n = 0;
  LADDER_CUDA(cudaGetDevice(&dev));
  LADDER_CUDA(cudaDeviceGetAttribute(&n, cudaDevAttrMaxSharedMemoryPerBlockOptin, dev));
  return static_cast<std::size_t>(n);
}

/// Most blocks of a cluster that every kernel may ask for: 1 where there are no clusters. Cheap enough for a launcher.
inline int most_cluster_blocks() {
  int dev = 0, major = 0;
  LADDER_CUDA(cudaGetDevice(&dev));
  LADDER_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, dev));
  return major >= 9 ? 8 : 1;
}

/// Free device memory right now, in bytes.
inline std::size_t device_free_bytes() {
  std::size_t free_bytes = 0, total = 0;
  LADDER_CUDA(cudaMemGetInfo(&free_bytes, &total));
  return free_bytes;
}

/// An ordered queue of device work. Movable, not copyable.
class Stream {
 public:
  Stream() { LADDER_CUDA(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking)); }
  ~Stream() {
    if (handle_ != nullptr) (void)cudaStreamDestroy(handle_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  Stream(Stream&& o) noexcept : handle_(std::exchange(o.handle_, nullptr)) {}
  Stream& operator=(Stream&& o) noexcept {
    std::swap(handle_, o.handle_);
    return *this;
  }
  cudaStream_t handle() const { return handle_; }
  /// Waits for all work queued so far; throws DeviceError if any of it failed.
  void synchronize() { LADDER_CUDA(cudaStreamSynchronize(handle_)); }

 private:
  cudaStream_t handle_ = nullptr;
};

namespace detail {

/// The whole pages of a range of host memory, page-locked for reading while this lives; none where that is not possible
/// or not worth it.
class LockedPages {
 public:
  LockedPages(const void* data, std::size_t bytes)
      : begin_(static_cast<const std::byte*>(data)), end_(begin_) {
    constexpr std::size_t kWorthIt = std::size_t{1} << 20;
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const std::size_t head = (page - reinterpret_cast<std::uintptr_t>(data) % page) % page;
    if (bytes < head + kWorthIt) return;
    const std::size_t whole = (bytes - head) / page * page;
    auto* first = const_cast<std::byte*>(begin_) + head;
    (void)::madvise(first, whole, MADV_WILLNEED);  // of a file: many pages at once
    if (cudaHostRegister(first, whole, cudaHostRegisterReadOnly) != cudaSuccess) {
      (void)cudaGetLastError();
      return;
    }
    begin_ = first;
    end_ = first + whole;
  }
  ~LockedPages() {
    if (end_ != begin_) (void)cudaHostUnregister(const_cast<std::byte*>(begin_));
  }
  LockedPages(const LockedPages&) = delete;
  LockedPages& operator=(const LockedPages&) = delete;
  const std::byte* begin() const { return begin_; }
  const std::byte* end() const { return end_; }

 private:
  const std::byte *begin_, *end_;
};

}  // namespace detail

/// `n` elements of device memory. The name appears in the emulator's reports.
template <class T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Buffer() = default;
  explicit Buffer(std::size_t n, const char* name = "buffer") : size_(n) {
    if (n == 0) return;
    const cudaError_t e = cudaMalloc(reinterpret_cast<void**>(&data_), n * sizeof(T));
    if (e != cudaSuccess) {
      (void)cudaGetLastError();
      throw DeviceError(
          detail::cuda_message(e, "cudaMalloc of " + std::to_string(n * sizeof(T)) + " bytes for " + name));
    }
  }
  ~Buffer() {
    if (data_ != nullptr) (void)cudaFree(data_);
  }
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
    LADDER_CUDA(cudaMemcpy(data_, src.data(), src.size_bytes(), cudaMemcpyHostToDevice));
    settle();
  }
  /// The same from memory that a file is mapped to. Its pages are locked for the time, which makes the bus the limit.
  void upload_mapped(std::span<const T> src) {
    if (src.size() > size_) throw DeviceError("Buffer::upload_mapped: source longer than the buffer");
    const std::span<const std::byte> all = std::as_bytes(src);
    const detail::LockedPages locked(all.data(), all.size());
    const std::byte* const ends[] = {all.data(), locked.begin(), locked.end(), all.data() + all.size()};
    for (int i = 0; i < 3; ++i) {
      const auto bytes = static_cast<std::size_t>(ends[i + 1] - ends[i]);
      if (bytes == 0) continue;
      void* to = reinterpret_cast<std::byte*>(data_) + (ends[i] - all.data());
      LADDER_CUDA(cudaMemcpy(to, ends[i], bytes, cudaMemcpyHostToDevice));
    }
    settle();
  }
  void download(std::span<T> dst) const {
    if (dst.size() > size_) throw DeviceError("Buffer::download: destination longer than the buffer");
    LADDER_CUDA(cudaMemcpy(dst.data(), data_, dst.size_bytes(), cudaMemcpyDeviceToHost));
  }
  /// Sets every byte. 0xFF makes every float a NaN, which is how outputs are poisoned.
  void fill_bytes(int byte) {
    LADDER_CUDA(cudaMemset(data_, byte, bytes()));
    settle();
  }
  /// Device-to-device copy of the first `n` elements.
  void copy_from(const Buffer& src, std::size_t n) {
    if (n > size_ || n > src.size_) throw DeviceError("Buffer::copy_from: out of range");
    LADDER_CUDA(cudaMemcpy(data_, src.data_, n * sizeof(T), cudaMemcpyDeviceToDevice));
    settle();
  }

 private:
  /// cudaMemset, device-to-device copies and the tail of an upload run on the legacy stream without blocking
  /// the host, and our streams are not ordered with that one: without this wait, poison could land on a
  /// kernel's output.
  static void settle() { LADDER_CUDA(cudaStreamSynchronize(cudaStreamLegacy)); }

  T* data_ = nullptr;
  std::size_t size_ = 0;
};

/// `n` elements of the host's memory that kernels can write: page-locked, at the same address on both sides. What a kernel
/// has written is there once the stream is synchronised.
template <class T>
class HostBuffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  HostBuffer() = default;
  explicit HostBuffer(std::size_t n) : size_(n) {
    LADDER_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&data_), n * sizeof(T), cudaHostAllocDefault));
  }
  ~HostBuffer() {
    if (data_ != nullptr) (void)cudaFreeHost(data_);
  }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  HostBuffer(HostBuffer&& o) noexcept
      : data_(std::exchange(o.data_, nullptr)), size_(std::exchange(o.size_, 0)) {}
  HostBuffer& operator=(HostBuffer&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(size_, o.size_);
    return *this;
  }
  T* data() { return data_; }
  std::size_t size() const { return size_; }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Device time between start() and stop() on one stream. Event resolution is about 0.5 us.
class Timer {
 public:
  Timer() {
    LADDER_CUDA(cudaEventCreate(&begin_));
    LADDER_CUDA(cudaEventCreate(&end_));
  }
  ~Timer() {
    (void)cudaEventDestroy(begin_);
    (void)cudaEventDestroy(end_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  void start(Stream& s) { LADDER_CUDA(cudaEventRecord(begin_, s.handle())); }
  void stop(Stream& s) { LADDER_CUDA(cudaEventRecord(end_, s.handle())); }
  /// Waits for stop() to be reached. Nanoseconds.
  double elapsed_ns() {
    LADDER_CUDA(cudaEventSynchronize(end_));
    float ms = 0.0f;
    LADDER_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    return static_cast<double>(ms) * 1e6;
  }
  /// Nanoseconds from the start of `first`, an earlier one, to this one's. Both must have been stopped.
  double begin_after_ns(const Timer& first) const {
    float ms = 0.0f;
    LADDER_CUDA(cudaEventElapsedTime(&ms, first.begin_, begin_));
    return static_cast<double>(ms) * 1e6;
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

/// How a kernel is launched when the plain way is not enough.
struct LaunchOptions {
  bool cooperative = false;     ///< all blocks resident at once; needed for a grid-wide barrier
  bool programmatic = false;    ///< may start before its predecessor in the stream ends (sm_90 and later)
  unsigned cluster_blocks = 1;  ///< blocks of a cluster, along x; grid.x is a multiple (sm_90 and later)
};

/// Starts `kernel` with the arguments converted to its parameter types. Returns an error that names the
/// kernel when the launch is refused; a fault during execution surfaces at the next synchronisation.
/// @param shared_bytes dynamic shared memory per block; the limit is raised here where that is needed.
template <class... Params, class... Args>
Status launch(const LaunchOptions& options, void (*kernel)(Params...), dim3 grid, dim3 block,
              std::size_t shared_bytes, Stream& stream, Args&&... args) {
  static_assert(sizeof...(Params) == sizeof...(Args), "launch: wrong number of kernel arguments");
  const void* address = reinterpret_cast<const void*>(kernel);
  // 48 KiB of static and dynamic shared memory together need no permission. How much of it is static is not known here,
  // so permission is asked for any dynamic memory that could make more.
  constexpr std::size_t kSurelyFits = 1024;
  if (shared_bytes > kSurelyFits) {
    const cudaError_t e = cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               static_cast<int>(shared_bytes));
    if (e != cudaSuccess) {
      (void)cudaGetLastError();
      return Status::error(detail::cuda_message(
          e, detail::kernel_name(address) + ": " + std::to_string(shared_bytes) + " bytes of shared memory"));
    }
  }
  cudaLaunchAttribute attributes[3];
  unsigned count = 0;
  if (options.cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  if (options.programmatic) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (options.cluster_blocks > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = options.cluster_blocks;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream.handle();
  config.attrs = attributes;
  config.numAttrs = count;
  const cudaError_t e = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Args>(args))...);
  if (e != cudaSuccess) {
    (void)cudaGetLastError();
    return Status::error(detail::cuda_message(e, "launch of " + detail::kernel_name(address)));
  }
  return {};
}

template <class... Params, class... Args>
Status launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes, Stream& stream,
              Args&&... args) {
  return launch(LaunchOptions{}, kernel, grid, block, shared_bytes, stream, std::forward<Args>(args)...);
}

/// A captured sequence of launches. Replaying it costs one call, so the gaps between short kernels shrink to
/// what the GPU itself needs.
class Graph {
 public:
  Graph() = default;
  /// Runs `record(stream)` in capture mode. `record` returns a Status and must only launch on `stream`.
  template <class F>
  static Graph capture(Stream& stream, F&& record) {
    Graph g;
    LADDER_CUDA(cudaStreamBeginCapture(stream.handle(), cudaStreamCaptureModeThreadLocal));
    const Status s = record(stream);
    cudaGraph_t graph = nullptr;
    const cudaError_t e = cudaStreamEndCapture(stream.handle(), &graph);
    if (!s.ok() || e != cudaSuccess) {
      if (graph != nullptr) (void)cudaGraphDestroy(graph);
      (void)cudaGetLastError();
      throw DeviceError(!s.ok() ? s.message() : detail::cuda_message(e, "cudaStreamEndCapture"));
    }
    const cudaError_t built = cudaGraphInstantiate(&g.exec_, graph, 0);
    (void)cudaGraphDestroy(graph);
    detail::check_cuda(built, "cudaGraphInstantiate");
    return g;
  }
  ~Graph() {
    if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  Graph(Graph&& o) noexcept : exec_(std::exchange(o.exec_, nullptr)) {}
  Graph& operator=(Graph&& o) noexcept {
    std::swap(exec_, o.exec_);
    return *this;
  }
  void launch(Stream& stream) { LADDER_CUDA(cudaGraphLaunch(exec_, stream.handle())); }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace ladder
