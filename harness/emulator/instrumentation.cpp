// The functions that -fsanitize=thread and -fsanitize-coverage=trace-pc make the compiler call. The sanitizers'
// own runtimes are not linked; these are all there is. Outside a kernel thread that is being observed each
// returns at once: host code of the same translation unit calls them too.

#include <atomic>
#include <cstring>

#include "harness/emulator/hooks.hpp"

using ladder::emu::Access;
using ladder::emu::current;
using ladder::emu::observe;
using ladder::emu::observe_copy;

#define LADDER_EMU_CALLER __builtin_return_address(0)

namespace {

__extension__ using Wide = unsigned __int128;

std::atomic_flag wide_flag;
struct WideLock {
  WideLock() {
    while (wide_flag.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~WideLock() { wide_flag.clear(std::memory_order_release); }
  WideLock(const WideLock&) = delete;
  WideLock& operator=(const WideLock&) = delete;
};

}  // namespace

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void* caller) {
  if (current.recording) [[unlikely]]
    ladder::emu::record_enter(reinterpret_cast<std::uintptr_t>(caller));
}
void __tsan_func_exit() {
  if (current.recording) [[unlikely]]
    ladder::emu::record_exit();
}
void __tsan_ignore_thread_begin() {}
void __tsan_ignore_thread_end() {}
void __tsan_acquire(void*) {}
void __tsan_release(void*) {}

void __sanitizer_cov_trace_pc() {
  if (current.recording) [[unlikely]] {
    ladder::emu::record_block(reinterpret_cast<std::uintptr_t>(LADDER_EMU_CALLER));
  }
}

#define LADDER_EMU_ACCESSES(n)                                                                               \
  void __tsan_read##n(void* p) { observe(p, n, Access::read, LADDER_EMU_CALLER); }                           \
  void __tsan_write##n(void* p) { observe(p, n, Access::write, LADDER_EMU_CALLER); }                         \
  void __tsan_unaligned_read##n(void* p) { observe_copy(p, n, Access::read, LADDER_EMU_CALLER); }            \
  void __tsan_unaligned_write##n(void* p) { observe_copy(p, n, Access::write, LADDER_EMU_CALLER); }          \
  void __tsan_volatile_read##n(void* p) { observe(p, n, Access::read, LADDER_EMU_CALLER); }                  \
  void __tsan_volatile_write##n(void* p) { observe(p, n, Access::write, LADDER_EMU_CALLER); }                \
  void __tsan_unaligned_volatile_read##n(void* p) { observe_copy(p, n, Access::read, LADDER_EMU_CALLER); }   \
  void __tsan_unaligned_volatile_write##n(void* p) { observe_copy(p, n, Access::write, LADDER_EMU_CALLER); } \
  void __tsan_read_write##n(void* p) {                                                                       \
    observe(p, n, Access::read, LADDER_EMU_CALLER);                                                          \
    observe(p, n, Access::write, LADDER_EMU_CALLER);                                                         \
  }                                                                                                          \
  void __tsan_unaligned_read_write##n(void* p) {                                                             \
    observe_copy(p, n, Access::read, LADDER_EMU_CALLER);                                                     \
    observe_copy(p, n, Access::write, LADDER_EMU_CALLER);                                                    \
  }
LADDER_EMU_ACCESSES(1)
LADDER_EMU_ACCESSES(2)
LADDER_EMU_ACCESSES(4)
LADDER_EMU_ACCESSES(8)
LADDER_EMU_ACCESSES(16)
#undef LADDER_EMU_ACCESSES

void __tsan_read_range(void* p, std::size_t n) { observe_copy(p, n, Access::read, LADDER_EMU_CALLER); }
void __tsan_write_range(void* p, std::size_t n) { observe_copy(p, n, Access::write, LADDER_EMU_CALLER); }
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}

void* __tsan_memcpy(void* to, const void* from, std::size_t n) {
  observe_copy(from, n, Access::read, LADDER_EMU_CALLER);
  observe_copy(to, n, Access::write, LADDER_EMU_CALLER);
  return std::memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, std::size_t n) {
  observe_copy(from, n, Access::read, LADDER_EMU_CALLER);
  observe_copy(to, n, Access::write, LADDER_EMU_CALLER);
  return std::memmove(to, from, n);
}
void* __tsan_memset(void* to, int byte, std::size_t n) {
  observe_copy(to, n, Access::write, LADDER_EMU_CALLER);
  return std::memset(to, byte, n);
}

// C++ atomics: std::atomic and std::atomic_ref in instrumented code, host and device. The memory order is an
// upper bound in practice on what the caller asked for: always sequentially consistent.
#define LADDER_EMU_ATOMICS(bits, T)                                                                \
  T __tsan_atomic##bits##_load(const volatile T* p, int) {                                         \
    observe(p, sizeof(T), Access::atomic, LADDER_EMU_CALLER);                                      \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                   \
  }                                                                                                \
  void __tsan_atomic##bits##_store(volatile T* p, T v, int) {                                      \
    observe(p, sizeof(T), Access::atomic, LADDER_EMU_CALLER);                                      \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                      \
  }                                                                                                \
  T __tsan_atomic##bits##_exchange(volatile T* p, T v, int) {                                      \
    observe(p, sizeof(T), Access::atomic, LADDER_EMU_CALLER);                                      \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                            \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_add(volatile T* p, T v, int) {                                     \
    observe(p, sizeof(T), Access::atomic, LADDER_EMU_CALLER);                                      \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                             \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_sub(volatile T* p, T v, int) {                                     \
    observe(p, sizeof(T), Access::atomic, LADDER_EMU_CALLER);                                      \
    return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                             \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_and(volatile T* p, T v, int) {                                     \
    observe(p, sizeof(T), Access::atomic, LADDER_EMU_CALLER);                                      \
    return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST);                                             \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_or(volatile T* p, T v, int) {                                      \
    observe(p, sizeof(T), Access::atomic, LADDER_EMU_CALLER);                                      \
    return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);                                              \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_xor(volatile T* p, T v, int) {                                     \
    observe(p, sizeof(T), Access::atomic, LADDER_EMU_CALLER);                                      \
    return __atomic_fetch_xor(p, v, __ATOMIC_SEQ_CST);                                             \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_nand(volatile T* p, T v, int) {                                    \
    observe(p, sizeof(T), Access::atomic, LADDER_EMU_CALLER);                                      \
    return __atomic_fetch_nand(p, v, __ATOMIC_SEQ_CST);                                            \
  }                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* expected, T v, int, int) {   \
    observe(p, sizeof(T), Access::atomic, LADDER_EMU_CALLER);                                      \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* expected, T v, int, int) {     \
    observe(p, sizeof(T), Access::atomic, LADDER_EMU_CALLER);                                      \
    return __atomic_compare_exchange_n(p, expected, v, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);  \
  }                                                                                                \
  T __tsan_atomic##bits##_compare_exchange_val(volatile T* p, T expected, T v, int, int) {         \
    observe(p, sizeof(T), Access::atomic, LADDER_EMU_CALLER);                                      \
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);       \
    return expected;                                                                               \
  }
LADDER_EMU_ATOMICS(8, unsigned char)
LADDER_EMU_ATOMICS(16, unsigned short)
LADDER_EMU_ATOMICS(32, unsigned)
LADDER_EMU_ATOMICS(64, unsigned long long)
#undef LADDER_EMU_ATOMICS

// 16-byte atomics exist on few hosts without a library, so one lock serves them all.
#define LADDER_EMU_ATOMIC128(name, expression)                   \
  Wide __tsan_atomic128_##name(volatile Wide* p, Wide v, int) {  \
    observe(p, sizeof(Wide), Access::atomic, LADDER_EMU_CALLER); \
    const WideLock lock;                                         \
    const Wide old = *p;                                         \
    *p = (expression);                                           \
    return old;                                                  \
  }
LADDER_EMU_ATOMIC128(exchange, v)
LADDER_EMU_ATOMIC128(fetch_add, old + v)
LADDER_EMU_ATOMIC128(fetch_sub, old - v)
LADDER_EMU_ATOMIC128(fetch_and, old& v)
LADDER_EMU_ATOMIC128(fetch_or, old | v)
LADDER_EMU_ATOMIC128(fetch_xor, old ^ v)
LADDER_EMU_ATOMIC128(fetch_nand, ~(old& v))
#undef LADDER_EMU_ATOMIC128
Wide __tsan_atomic128_load(const volatile Wide* p, int) {
  observe(p, sizeof(Wide), Access::atomic, LADDER_EMU_CALLER);
  const WideLock lock;
  return *p;
}
void __tsan_atomic128_store(volatile Wide* p, Wide v, int) {
  observe(p, sizeof(Wide), Access::atomic, LADDER_EMU_CALLER);
  const WideLock lock;
  *p = v;
}
Wide __tsan_atomic128_compare_exchange_val(volatile Wide* p, Wide expected, Wide v, int, int) {
  observe(p, sizeof(Wide), Access::atomic, LADDER_EMU_CALLER);
  const WideLock lock;
  const Wide old = *p;
  if (old == expected) *p = v;
  return old;
}
int __tsan_atomic128_compare_exchange_strong(volatile Wide* p, Wide* expected, Wide v, int, int) {
  observe(p, sizeof(Wide), Access::atomic, LADDER_EMU_CALLER);
  const WideLock lock;
  const Wide old = *p;
  const bool same = old == *expected;
  if (same) *p = v;
  *expected = old;
  return same;
}
int __tsan_atomic128_compare_exchange_weak(volatile Wide* p, Wide* expected, Wide v, int a, int b) {
  return __tsan_atomic128_compare_exchange_strong(p, expected, v, a, b);
}

void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}

}  // extern "C"
