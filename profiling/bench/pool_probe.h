// What the pool itself costs: jobs, wake-ups, edges, steals, with next to nothing to compute.
//
// All times are microseconds, one for each measurement, so that the caller can say how they spread.
#pragma once

#include <cstdint>
#include <vector>

#include "threadpool/pool.h"

namespace moesaic::bench {

/// A pool of its own, measured. Not thread safe.
class PoolProbe {
 public:
  /// Throws as threadpool::Pool does.
  PoolProbe(int threads, threadpool::ThreadSource source);

  int num_threads() const { return pool_.num_threads(); }

  /// `count` jobs of one empty task a thread, one right after the other: each from the call to its return.
  std::vector<double> EmptyJobs(int count);

  /// `count` jobs, each after `pause_seconds` in which every thread has gone to sleep: from the call until every worker is in
  /// the job. Throws std::runtime_error where the pool cannot run all its workers at once.
  std::vector<double> Wakes(int count, double pause_seconds);

  /// `count` chains of `length` empty tasks, each waiting for the one before: time of a task with its edge.
  std::vector<double> Edges(int count, int length);

  /// `count` graphs of `tasks` tasks without edges, each busy for `task_us`: time of the whole graph.
  std::vector<double> SmallTasks(int count, int tasks, double task_us);

  /// `count` graphs in which the end of one task makes as many ready as there are threads: from that end until a task starts
  /// on another worker than the one that ended. Empty with one thread.
  std::vector<double> Steals(int count);

 private:
  threadpool::Pool pool_;
};

/// `count` empty OpenMP parallel regions, one right after the other, through the OpenMP runtime of this process. Whether its
/// threads wait actively is the runtime's setting (OMP_WAIT_POLICY); by default libgomp's do for some milliseconds.
std::vector<double> EmptyOpenMpRegions(int count, int threads);

}  // namespace moesaic::bench
