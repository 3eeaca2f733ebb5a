// Rates of work on all workers of a pool at the same time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "profiling/bench/start_barrier.h"
#include "threadpool/pool.h"

namespace moesaic::bench {

inline double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// body(worker) once on each worker of the pool, all at the same time; null: on the calling thread, as worker 0.
template <typename Body>
void OnAllWorkers(threadpool::Pool* pool, Body&& body) {
  const int threads = pool == nullptr ? 1 : pool->num_threads();
  if (threads == 1) {
    body(0);
    return;
  }
  // Nobody leaves the barrier before all have come, so no worker takes two of the tasks.
  StartBarrier barrier(threads);
  pool->ParallelFor(threads, [&](std::int64_t, int worker) {
    barrier.Wait();
    body(worker);
  });
}

/// turn(worker) does a few microseconds of work and says how much; returns work a second, summed over the workers.
template <typename Turn>
double MeasureRate(threadpool::Pool* pool, double seconds, Turn&& turn) {
  struct alignas(64) Slot {
    double rate = 0.0;
  };
  std::vector<Slot> slots(static_cast<std::size_t>(pool == nullptr ? 1 : pool->num_threads()));
  OnAllWorkers(pool, [&](int worker) {
    for (const auto start = std::chrono::steady_clock::now(); SecondsSince(start) < 0.1 * seconds;) turn(worker);
    const auto start = std::chrono::steady_clock::now();
    double work = 0.0;
    double elapsed = 0.0;
    do {
      work += turn(worker);
      elapsed = SecondsSince(start);
    } while (elapsed < seconds);
    slots[static_cast<std::size_t>(worker)].rate = work / elapsed;
  });
  double rate = 0.0;
  for (const Slot& slot : slots) rate += slot.rate;
  return rate;
}

/// A result that nobody reads, kept so that the compiler cannot drop the loop.
inline void Keep(std::uint64_t result) {
  static std::atomic<std::uint64_t> sink{0};
  sink.store(result, std::memory_order_relaxed);
}

}  // namespace moesaic::bench
