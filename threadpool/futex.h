// Waiting without a condition variable: a short spin, then a futex.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace moesaic::threadpool {

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t), "a futex is a plain 32-bit word");

/// Sleeps while `word` holds `expected`, until a wake. May return early: the caller checks again.
inline void FutexWait(std::atomic<std::uint32_t>& word, std::uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

/// Wakes up to `count` threads that sleep on `word`.
inline void FutexWake(std::atomic<std::uint32_t>& word, int count) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

/// Tells the core that this thread only waits.
inline void CpuPause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Bounds a spin. A wake-up through the kernel takes some 5-50 us, so a spin of that length at most doubles the cost of a wait
/// that turns out long, and saves the wake-up where work comes in quick succession.
class Spin {
 public:
  static constexpr std::chrono::microseconds kLimit{50};
  /// Inside of a job, whose next stage, and in an OpenMP region whose end, waits until those who sleep have been woken: 16 of
  /// them took 100 to 200 us. (16 threads of a virtual machine, 50 us and 1 ms in turn: most calls of 0.4 to 3 ms faster with 1
  /// ms, by up to a sixth; 4 ms no better.)
  static constexpr std::chrono::microseconds kLimitInJob{1000};

  /// @param yield  give the core away between looks: there are more threads than cores
  explicit Spin(bool yield, std::chrono::microseconds limit = kLimit) : yield_(yield), limit_(limit) {}

  /// Pauses for a moment; false once the time is up.
  bool Once() {
    if (yield_) {
      sched_yield();
    } else {
      CpuPause();
      if (++looks_ % kLooksPerClock != 0) return true;
    }
    const auto now = std::chrono::steady_clock::now();
    if (end_ == std::chrono::steady_clock::time_point{}) end_ = now + limit_;
    return now < end_;
  }

  void Restart() { end_ = {}; }

 private:
  static constexpr unsigned kLooksPerClock = 16;  // reading the clock costs as much as a pause or two

  bool yield_;
  std::chrono::microseconds limit_;
  unsigned looks_ = 0;
  std::chrono::steady_clock::time_point end_{};
};

/// A lock that is granted in the order in which it was asked for. Usable with std::lock_guard.
class TurnLock {
 public:
  void lock() {
    const std::uint32_t ticket = next_.fetch_add(1, std::memory_order_relaxed);
    Spin spin(false);
    do {
      if (serving_.load(std::memory_order_acquire) == ticket) return;
    } while (spin.Once());
    waiters_.fetch_add(1, std::memory_order_seq_cst);
    for (std::uint32_t now; (now = serving_.load(std::memory_order_seq_cst)) != ticket;) FutexWait(serving_, now);
    waiters_.fetch_sub(1, std::memory_order_relaxed);
  }

  void unlock() {
    serving_.store(serving_.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
    if (waiters_.load(std::memory_order_seq_cst) != 0) FutexWake(serving_, INT32_MAX);
  }

  /// How many turns have been asked for, those that have ended included. (Tests.)
  std::uint32_t asked() const { return next_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint32_t> next_{0};
  std::atomic<std::uint32_t> serving_{0};
  std::atomic<std::uint32_t> waiters_{0};
};

}  // namespace moesaic::threadpool
