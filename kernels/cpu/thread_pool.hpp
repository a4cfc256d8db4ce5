// A fork/join thread pool: the CPU's version of a kernel launch.
//
// A CUDA launch costs a few microseconds; a CPU twin has to fork and join its threads at about that price, or
// the pool's overhead would be measured instead of the kernel. So the workers live as long as the pool, wait
// for work by spinning for a short while before they sleep, and the calling thread is one of them (thread 0).
//
// This header holds no atomics and no locks: chapter sources are also compiled with the emulator's memory
// instrumentation, and the pool must not be counted as part of a kernel.
#pragma once

#include <memory>
#include <type_traits>

namespace ladder::cpu {

/// The number of CPUs that this process may run on (its affinity mask, not the machine's core count); at
/// least 1.
[[nodiscard]] int available_cpus();

class ThreadPool {
 public:
  /// `threads` includes the caller; 0 means one per available CPU. `pin` binds worker i to the i-th available
  /// CPU (the caller keeps its own affinity: it belongs to the program, and CPU 0 of the mask is left free
  /// for it). Throws std::invalid_argument for threads < 0, and for `pin` with more threads than CPUs or
  /// where the system cannot pin; std::system_error if a thread cannot be started.
  explicit ThreadPool(int threads = 0, bool pin = false);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// Threads that take part in run and parallel_for, the caller included.
  [[nodiscard]] int size() const;

  /// Calls body(int thread, int threads) once on every thread of the pool and returns when all have returned.
  /// The first exception thrown by a body is rethrown here after the join. A call from inside a body of the
  /// same pool, or from two threads at once, is refused with std::logic_error: there is one set of workers.
  template <class Body>
  void run(Body&& body) {
    run_each({address(body), [](void* self, int thread, int threads) {
                (*static_cast<std::remove_reference_t<Body>*>(self))(thread, threads);
              }});
  }

  /// Calls body(long long begin, long long end, int thread) for consecutive ranges of at most `chunk` indices
  /// that cover [0, count) once. A thread takes the next range when it has finished its last one, so uneven
  /// ranges balance. count == 0 calls nothing. After an exception no new range is started. Throws
  /// std::invalid_argument for count < 0 or chunk < 1; otherwise as run().
  template <class Body>
  void parallel_for(long long count, long long chunk, Body&& body) {
    run_ranges(count, chunk, {address(body), [](void* self, long long begin, long long end, int thread) {
                                (*static_cast<std::remove_reference_t<Body>*>(self))(begin, end, thread);
                              }});
  }

 private:
  // A borrowed callable: two pointers, where std::function would allocate. It lives no longer than the call.
  struct Each {
    void* self;
    void (*call)(void* self, int thread, int threads);
  };
  struct Ranges {
    void* self;
    void (*call)(void* self, long long begin, long long end, int thread);
  };
  template <class Body>
  static void* address(Body& body) {
    return const_cast<void*>(static_cast<const void*>(std::addressof(body)));
  }

  void run_each(Each body);
  void run_ranges(long long count, long long chunk, Ranges body);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ladder::cpu
