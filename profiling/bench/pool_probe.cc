#include "profiling/bench/pool_probe.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>

#include "profiling/bench/start_barrier.h"

namespace moesaic::bench {
namespace {

using Clock = std::chrono::steady_clock;
using threadpool::TaskGraph;
using threadpool::TaskId;

double MicrosecondsBetween(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::micro>(end - begin).count();
}

void BusyFor(double us) {
  for (const Clock::time_point start = Clock::now(); MicrosecondsBetween(start, Clock::now()) < us;) {
  }
}

template <typename Body>
std::vector<double> Time(int count, Body body) {
  std::vector<double> times(static_cast<std::size_t>(std::max(count, 0)));
  for (double& time : times) {
    const Clock::time_point start = Clock::now();
    body();
    time = MicrosecondsBetween(start, Clock::now());
  }
  return times;
}

void DoNothing(void*, std::int64_t, int) {}

// A task that makes others ready, and what they find.
struct StealRun {
  Clock::time_point ended;
  int owner = -1;
  std::vector<double> latencies;
  std::mutex mutex;

  // Long enough for helpers to have joined the run and to look for work.
  static constexpr double kBeforeUs = 20.0;
  // Long enough for the others to take the remaining tasks meanwhile.
  static constexpr double kTaskUs = 20.0;

  static void Make(void* context, std::int64_t, int worker) {
    auto* self = static_cast<StealRun*>(context);
    BusyFor(kBeforeUs);
    self->owner = worker;
    self->ended = Clock::now();
  }

  static void Take(void* context, std::int64_t, int worker) {
    auto* self = static_cast<StealRun*>(context);
    const Clock::time_point now = Clock::now();
    if (worker != self->owner) {
      const std::lock_guard lock(self->mutex);
      self->latencies.push_back(MicrosecondsBetween(self->ended, now));
    }
    BusyFor(kTaskUs);
  }
};

}  // namespace

PoolProbe::PoolProbe(int threads, threadpool::ThreadSource source) : pool_(threads, source) {}

std::vector<double> PoolProbe::EmptyJobs(int count) {
  const int threads = num_threads();
  return Time(count, [&] { pool_.ParallelFor(threads, DoNothing, nullptr); });
}

std::vector<double> PoolProbe::Wakes(int count, double pause_seconds) {
  std::vector<double> times;
  const int threads = num_threads();
  std::vector<Clock::time_point> arrived(static_cast<std::size_t>(threads));
  for (int i = 0; i < count; ++i) {
    std::this_thread::sleep_for(std::chrono::duration<double>(pause_seconds));
    // Nobody leaves the barrier before all have come, so no worker takes two of the tasks.
    StartBarrier barrier(threads);
    const Clock::time_point start = Clock::now();
    pool_.ParallelFor(threads, [&](std::int64_t, int worker) {
      arrived[static_cast<std::size_t>(worker)] = Clock::now();
      barrier.Wait();
    });
    times.push_back(MicrosecondsBetween(start, *std::max_element(arrived.begin(), arrived.end())));
  }
  return times;
}

std::vector<double> PoolProbe::Edges(int count, int length) {
  TaskGraph graph;
  for (int i = 0; i < length; ++i) {
    const TaskId task = graph.Add(DoNothing, nullptr, i);
    if (i > 0) graph.AddEdge(task - 1, task);
  }
  std::vector<double> times = Time(count, [&] { pool_.Run(graph); });
  for (double& time : times) time /= std::max(length, 1);
  return times;
}

std::vector<double> PoolProbe::SmallTasks(int count, int tasks, double task_us) {
  TaskGraph graph;
  const auto work = [](void* us, std::int64_t, int) { BusyFor(*static_cast<double*>(us)); };
  for (int i = 0; i < tasks; ++i) {
    if (task_us > 0.0) {
      graph.Add(work, &task_us, i);
    } else {
      graph.Add(DoNothing, nullptr, i);
    }
  }
  return Time(count, [&] { pool_.Run(graph); });
}

std::vector<double> PoolProbe::Steals(int count) {
  StealRun run;
  TaskGraph graph;
  const TaskId maker = graph.Add(&StealRun::Make, &run, 0);
  for (int i = 0; i < num_threads(); ++i) graph.AddEdge(maker, graph.Add(&StealRun::Take, &run, i));
  for (int i = 0; i < count; ++i) pool_.Run(graph);
  return run.latencies;
}

std::vector<double> EmptyOpenMpRegions(int count, int threads) {
  return Time(count, [threads] {
#pragma omp parallel num_threads(threads)
    asm volatile("" ::: "memory");
  });
}

}  // namespace moesaic::bench
