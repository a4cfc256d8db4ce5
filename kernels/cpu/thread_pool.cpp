#include "kernels/cpu/thread_pool.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace ladder::cpu {
namespace {

// Two threads that write the same cache line slow each other down; what different threads write stands this
// far apart.
constexpr std::size_t kCacheLine = 64;

// How long a thread spins before it sleeps. Waking a sleeping thread costs tens of microseconds, and a decode
// step starts its next matmul within a few: long enough to bridge that gap, short enough not to burn a core
// that is idle.
constexpr auto kSpinTime = std::chrono::microseconds(50);

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#if defined(__linux__)
// The CPUs of the affinity mask, ascending. A machine with more CPUs than cpu_set_t holds (1024) makes the
// query fail; the caller then falls back to the standard library's count and cannot pin.
std::vector<int> cpus_of_mask() {
  std::vector<int> cpus;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &mask)) cpus.push_back(cpu);
    }
  }
  return cpus;
}
#else
std::vector<int> cpus_of_mask() { return {}; }
#endif

void pin_to(std::thread& thread, int cpu) {
#if defined(__linux__)
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(cpu, &mask);
  const int error = pthread_setaffinity_np(thread.native_handle(), sizeof mask, &mask);
  if (error != 0) {
    throw std::system_error(error, std::generic_category(),
                            "thread pool: cannot pin a thread to CPU " + std::to_string(cpu));
  }
#else
  (void)thread;
  (void)cpu;
#endif
}

}  // namespace

int available_cpus() {
  const auto cpus = cpus_of_mask();
  if (!cpus.empty()) return static_cast<int>(cpus.size());
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

struct ThreadPool::State {
  State(int thread_count, bool pin) : threads(thread_count), spin(thread_count <= available_cpus()) {
    try {
      const auto cpus = pin ? cpus_of_mask() : std::vector<int>{};
      for (int thread = 1; thread < threads; ++thread) {
        workers.emplace_back([this, thread] { worker_loop(thread); });
        if (pin) pin_to(workers.back(), cpus[static_cast<std::size_t>(thread)]);
      }
    } catch (...) {
      stop();
      throw;
    }
  }
  ~State() { stop(); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void fork_join(Each body) {
    job = body;
    failure = nullptr;
    failed.store(false, std::memory_order_relaxed);
    running.store(static_cast<int>(workers.size()), std::memory_order_relaxed);
    announce();  // publishes the four stores above
    call(body, 0);
    wait_until(worker_done, [this] { return running.load(std::memory_order_seq_cst) == 0; });
    if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
  }

  const int threads;
  // Spinning is only free while every thread has a CPU of its own; otherwise it takes time from the thread
  // waited for.
  const bool spin;
  std::atomic<bool> failed = false;
  std::atomic<bool> busy = false;
  alignas(kCacheLine) std::atomic<long long> next_range = 0;

 private:
  // A place to sleep. `sleepers` lets the waking side skip the lock when nobody sleeps, which is the usual
  // case. No wake-up is lost: the sleeper writes `sleepers` and then reads the condition, the waker writes
  // the condition and then reads `sleepers`, all four sequentially consistent, so at least one of them sees
  // the other's write.
  struct Bell {
    std::mutex mutex;
    std::condition_variable rung;
    std::atomic<int> sleepers = 0;

    void ring() {
      if (sleepers.load(std::memory_order_seq_cst) == 0) return;
      const std::lock_guard lock(
          mutex);  // taken so that a sleeper is either before its check or really asleep
      rung.notify_all();
    }
  };

  template <class Condition>
  void wait_until(Bell& bell, Condition condition) {
    if (spin) {
      const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
      do {
        for (int i = 0; i < 32; ++i) {
          if (condition()) return;
          pause();
        }
      } while (std::chrono::steady_clock::now() < deadline);
    }
    std::unique_lock lock(bell.mutex);
    bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
    bell.rung.wait(lock, condition);
    bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }

  void announce() {
    generation.fetch_add(1, std::memory_order_seq_cst);
    new_job.ring();
  }

  void call(Each body, int thread) noexcept {
    try {
      body.call(body.self, thread, threads);
    } catch (...) {
      // The first failure wins; the join orders this write before fork_join reads it.
      if (!failed.exchange(true, std::memory_order_acq_rel)) failure = std::current_exception();
    }
  }

  void worker_loop(int thread) {
    for (std::uint32_t seen = 0;;) {
      wait_until(new_job, [&] { return generation.load(std::memory_order_seq_cst) != seen; });
      // Exactly one step at a time: fork_join does not announce again before this worker has reported back.
      ++seen;
      if (stopping.load(std::memory_order_relaxed)) return;
      call(job, thread);
      if (running.fetch_sub(1, std::memory_order_seq_cst) == 1) worker_done.ring();
    }
  }

  void stop() noexcept {
    stopping.store(true, std::memory_order_relaxed);
    announce();
    for (auto& worker : workers) worker.join();
  }

  Each job{};
  std::exception_ptr failure;
  std::atomic<bool> stopping = false;
  Bell new_job;
  Bell worker_done;
  alignas(kCacheLine) std::atomic<std::uint32_t> generation = 0;
  alignas(kCacheLine) std::atomic<int> running = 0;
  std::vector<std::thread> workers;
};

namespace {

// Marks the pool as in use for one call, and refuses a second one meanwhile.
class InUse {
 public:
  explicit InUse(std::atomic<bool>& busy) : busy_(busy) {
    if (busy_.exchange(true, std::memory_order_acquire)) {
      throw std::logic_error(
          "thread pool: already running; nested and concurrent use of one pool is refused");
    }
  }
  ~InUse() { busy_.store(false, std::memory_order_release); }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;

 private:
  std::atomic<bool>& busy_;
};

}  // namespace

ThreadPool::ThreadPool(int threads, bool pin) {
  if (threads < 0) {
    throw std::invalid_argument("thread pool: threads must be >= 0 (0: one per CPU), not " +
                                std::to_string(threads));
  }
  if (threads == 0) threads = available_cpus();
  const auto pinnable = cpus_of_mask().size();
  if (pin && static_cast<std::size_t>(threads) > pinnable) {
    throw std::invalid_argument("thread pool: cannot pin " + std::to_string(threads) + " threads to " +
                                std::to_string(pinnable) + " CPUs");
  }
  state_ = std::make_unique<State>(threads, pin);
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::size() const { return state_->threads; }

void ThreadPool::run_each(Each body) {
  const InUse in_use(state_->busy);
  state_->fork_join(body);
}

void ThreadPool::run_ranges(long long count, long long chunk, Ranges body) {
  if (count < 0 || chunk < 1) {
    throw std::invalid_argument("thread pool: parallel_for needs count >= 0 and chunk >= 1, not count " +
                                std::to_string(count) + ", chunk " + std::to_string(chunk));
  }
  const InUse in_use(state_->busy);
  if (count == 0) return;
  chunk = std::min(chunk, count);
  const long long ranges = (count - 1) / chunk + 1;
  if (ranges == 1 || state_->threads == 1) {  // nobody to share with: no fork, same ranges
    for (long long begin = 0; begin < count; begin += chunk) {
      body.call(body.self, begin, begin + std::min(chunk, count - begin), 0);
    }
    return;
  }
  // Threads draw range numbers rather than indices, so that drawing past the end cannot overflow.
  state_->next_range.store(0, std::memory_order_relaxed);
  const auto draw = [&](int thread, int) {
    while (!state_->failed.load(std::memory_order_relaxed)) {
      const long long range = state_->next_range.fetch_add(1, std::memory_order_relaxed);
      if (range >= ranges) return;
      const long long begin = range * chunk;
      body.call(body.self, begin, begin + std::min(chunk, count - begin), thread);
    }
  };
  state_->fork_join(
      {const_cast<void*>(static_cast<const void*>(&draw)),
       [](void* self, int thread, int threads) { (*static_cast<decltype(draw)*>(self))(thread, threads); }});
}

}  // namespace ladder::cpu
