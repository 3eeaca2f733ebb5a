// Rates of work on all workers of a pool at the same time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "profiling/bench/start_barrier.h"
#include "profiling/clock.h"
#include "threadpool/pool.h"

namespace moesaic::bench {

/// Since a reading of profiling::Now().
inline double SecondsSince(std::int64_t start) { return 1e-9 * static_cast<double>(profiling::Now() - start); }

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
    for (const std::int64_t start = profiling::Now(); SecondsSince(start) < 0.1 * seconds;) turn(worker);
    const std::int64_t start = profiling::Now();
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

/// How far a worker was, as it went.
struct Progress {
  std::int64_t ns;  ///< profiling::Now()
  double work;      ///< until then
};

/// The work that a worker had done at a time between its first and last entry: evenly between two of them.
inline double WorkAt(const std::vector<Progress>& worker, std::int64_t ns) {
  const auto after =
      std::lower_bound(worker.begin(), worker.end(), ns, [](const Progress& p, std::int64_t t) { return p.ns < t; });
  if (after == worker.begin()) return after->work;
  const auto before = after - 1;
  const double share = static_cast<double>(ns - before->ns) / static_cast<double>(after->ns - before->ns);
  return before->work + share * (after->work - before->work);
}

/// The best of all windows of so many seconds, in work a second of all workers together: what they do when nobody disturbs any
/// of them. (The sum of each worker's own best is more than a memory can do that they share.) 0: no window is so short.
inline double BestWindow(const std::vector<std::vector<Progress>>& workers, double window) {
  const auto ns = static_cast<std::int64_t>(1e9 * window);
  double best = 0;
  std::int64_t begin = workers[0].front().ns, end = workers[0].back().ns;
  for (const std::vector<Progress>& worker : workers) {
    begin = std::max(begin, worker.front().ns);
    end = std::min(end, worker.back().ns);
  }
  for (const Progress& from : workers[0]) {
    if (from.ns < begin || from.ns + ns > end) continue;
    double work = 0;
    for (const std::vector<Progress>& worker : workers) work += WorkAt(worker, from.ns + ns) - WorkAt(worker, from.ns);
    best = std::max(best, work / window);
  }
  return best;
}

/// Work a second of all workers together: in the best window, and on average.
struct BestAndMean {
  double best = 0, mean = 0;
};

/// As MeasureRate, and BestWindow().
template <typename Turn>
BestAndMean MeasureRates(threadpool::Pool* pool, double seconds, double window, Turn&& turn) {
  constexpr int kMostTries = 16;
  std::vector<std::vector<Progress>> workers(static_cast<std::size_t>(pool == nullptr ? 1 : pool->num_threads()));
  BestAndMean rates;
  // Until all of them were there at the same time. (By clocks of their own, of CPU time, several never are.)
  for (int tries = 0; rates.best == 0 && tries < kMostTries; ++tries) {
    OnAllWorkers(pool, [&](int worker) {
      std::vector<Progress> own;
      double work = 0;
      const std::int64_t start = profiling::Now();
      for (std::int64_t now = start; own.empty() || SecondsSince(start) < seconds; now = profiling::Now()) {
        own.push_back({now, work});
        work += turn(worker);
      }
      own.push_back({profiling::Now(), work});
      workers[static_cast<std::size_t>(worker)] = std::move(own);
    });
    rates.best = BestWindow(workers, std::min(window, seconds));
  }
  for (const std::vector<Progress>& own : workers) {
    rates.mean += (own.back().work - own.front().work) * 1e9 / static_cast<double>(own.back().ns - own.front().ns);
  }
  if (rates.best == 0) rates.best = rates.mean;
  return rates;
}

/// The best of these.
template <typename Turn>
double MeasureBestRate(threadpool::Pool* pool, double seconds, double window, Turn&& turn) {
  return MeasureRates(pool, seconds, window, turn).best;
}

/// A result that nobody reads, kept so that the compiler cannot drop the loop.
inline void Keep(std::uint64_t result) {
  static std::atomic<std::uint64_t> sink{0};
  sink.store(result, std::memory_order_relaxed);
}

}  // namespace moesaic::bench
