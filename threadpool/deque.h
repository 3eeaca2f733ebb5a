// The ready tasks of one worker.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace moesaic::threadpool {

/// A work-stealing deque of fixed capacity: its owner pushes and pops at the bottom, anyone steals at the top. The algorithm of
/// Chase and Lev ("Dynamic circular work-stealing deque", SPAA 2005) in the form that Lê et al. proved for C11 (PPoPP 2013),
/// with sequentially consistent operations in place of the fences: ThreadSanitizer does not understand fences, and on x86 they
/// cost the same. A full deque refuses: no memory is allocated while tasks run.
class Deque {
 public:
  static constexpr std::int64_t kCapacity = 256;
  static constexpr std::int32_t kNone = -1;

  /// Owner only. False when full. Sequentially consistent: see Executor::Park.
  bool Push(std::int32_t task) {
    const std::int64_t bottom = bottom_.load(std::memory_order_relaxed);
    if (bottom - top_.load(std::memory_order_acquire) >= kCapacity) return false;
    slots_[bottom % kCapacity].store(task, std::memory_order_relaxed);
    bottom_.store(bottom + 1, std::memory_order_seq_cst);
    return true;
  }

  /// Owner only: the task pushed last, or kNone.
  std::int32_t Pop() {
    const std::int64_t bottom = bottom_.load(std::memory_order_relaxed) - 1;
    if (top_.load(std::memory_order_relaxed) > bottom) return kNone;  // top only grows: empty for certain
    bottom_.store(bottom, std::memory_order_seq_cst);
    std::int64_t top = top_.load(std::memory_order_seq_cst);
    std::int32_t task = kNone;
    if (top <= bottom) {
      task = slots_[bottom % kCapacity].load(std::memory_order_relaxed);
      if (top < bottom) return task;
      // The last one: thieves may want it too.
      if (!top_.compare_exchange_strong(top, top + 1, std::memory_order_seq_cst)) task = kNone;
    }
    bottom_.store(bottom + 1, std::memory_order_relaxed);
    return task;
  }

  /// Any thread: the oldest task; kNone when there is none or another thread was quicker.
  std::int32_t Steal() {
    std::int64_t top = top_.load(std::memory_order_seq_cst);
    if (top >= bottom_.load(std::memory_order_seq_cst)) return kNone;
    const std::int32_t task = slots_[top % kCapacity].load(std::memory_order_relaxed);
    return top_.compare_exchange_strong(top, top + 1, std::memory_order_seq_cst) ? task : kNone;
  }

  /// Any thread; both may be out of date at once.
  std::int64_t size() const { return bottom_.load(std::memory_order_relaxed) - top_.load(std::memory_order_relaxed); }
  bool empty() const { return top_.load(std::memory_order_seq_cst) >= bottom_.load(std::memory_order_seq_cst); }

 private:
  // Thieves write top_, the owner bottom_: each on a line of its own.
  alignas(64) std::atomic<std::int64_t> top_{0};
  alignas(64) std::atomic<std::int64_t> bottom_{0};
  alignas(64) std::array<std::atomic<std::int32_t>, kCapacity> slots_{};
};

}  // namespace moesaic::threadpool
