// Lets the workers of a pool go at the same moment.
#pragma once

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

namespace moesaic::bench {

/// A barrier for `count` threads, used once.
class StartBarrier {
 public:
  explicit StartBarrier(int count) : count_(count) {}

  /// Waits for the others. Throws std::runtime_error where they do not come within ten seconds: a pool that runs fewer workers
  /// than it has would wait for ever.
  void Wait() {
    using Clock = std::chrono::steady_clock;
    arrived_.fetch_add(1);
    const Clock::time_point start = Clock::now();
    while (arrived_.load(std::memory_order_acquire) < count_) {
      std::this_thread::yield();
      if (Clock::now() - start > std::chrono::seconds(10)) {
        throw std::runtime_error("only " + std::to_string(arrived_.load()) + " of the pool's " + std::to_string(count_) +
                                 " threads run at the same time");
      }
    }
  }

 private:
  const int count_;
  std::atomic<int> arrived_{0};
};

}  // namespace moesaic::bench
