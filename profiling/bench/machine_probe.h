// What the GEMM model wants to know of a machine, beyond its ceilings: caches, latencies, the pool, and the kernels in cache.
//
// Figures of one thread are the least time, or the best rate, of many short tries: a machine is never faster than itself, and
// where others use it too only its best moments are its own. Those of several threads are the usual ones, medians and means:
// of many threads one or the other is always disturbed, and the rest waits for it. Callers spread the tries over some seconds,
// for others disturb a core (its sibling, the caches, the memory) for that long.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "cpu_kernels/aligned_buffer.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tile_evaluator/machine_model.h"
#include "profiling/bench/ceiling.h"
#include "profiling/bench/rate.h"
#include "threadpool/pool.h"

namespace moesaic::bench {

/// GB/s of reading a block of `bytes` (rounded up to 4 KiB) over and over with the widest loads, one block a worker, all
/// workers together: of one in the best window of half a millisecond, of several on average. A block that a cache holds shows
/// that cache.
/// @param pool     null: the calling thread alone
/// @param seconds  as for MeasureCompute
double MeasureBlockRead(threadpool::Pool* pool, std::int64_t bytes, double seconds);

/// A load whose address is the result of the load before, in a block of `bytes`, one load a cache line in random order, on the
/// calling thread.
class LatencyProbe {
 public:
  explicit LatencyProbe(std::int64_t bytes);
  /// Nanoseconds of a load: the mean of some hundred that follow each other, and of such means the least.
  double Measure(double seconds);

 private:
  AlignedBuffer buffer_;
  const std::byte* at_;
};

/// Microseconds, the median of many: a parallel loop in which every worker takes part, after each has read a megabyte of
/// other data, and what each further task costs a thread.
struct PoolFigures {
  double job_us = 0;
  double task_us = 0;
};
PoolFigures MeasurePool(threadpool::Pool& pool);

/// The kernels of a tier with operands in the L1 cache, on one thread or on all of a pool at the same time: cores that share
/// what computes, or caches, have less for each. The tier must run here.
class KernelProbe {
 public:
  /// @param pool  null: the calling thread alone
  explicit KernelProbe(const KernelTier& tier, threadpool::Pool* pool = nullptr);

  /// Each call that the figures rest on once more, some 0.05 ms each on one thread and 0.4 ms on several, with operands in
  /// other places.
  void Turn();
  /// From the least time of each call on one thread, the median over the turns on several: all of KernelFigures but the rates
  /// from memory and how they overlap. After a Turn().
  ///
  /// @param product_ns  of a product of two tiles at the compute ceiling: no step counts as faster. Steps are differences
  ///                    of what calls of two lengths take; what they seem to gain, the rest of these calls would seem to lose.
  KernelFigures Figures(double product_ns) const;

 private:
  using Bodies = std::vector<std::function<void()>>;

  void MakeCalls(Bodies& bodies);
  double NsOfAll(const std::vector<Bodies>& workers, std::size_t body) const;
  std::int64_t MeasuredRows() const { return std::min<std::int64_t>(tier_.most_few_rows, kMostMeasuredRows); }

  const KernelTier& tier_;
  threadpool::Pool* const pool_;
  std::vector<std::vector<double>> ns_;  ///< of each call, by turns; one thread: the least so far alone
  std::size_t with_long_[2][3] = {}, with_short_[2][3] = {}, some_cells_ = 0, longer_cells_ = 0, again_ = 0, one_column_ = 0,
              more_columns_ = 0, packing_ = 0;
  std::size_t few_[2][kMostMeasuredRows] = {};
  double packed_bytes_ = 0;
};

/// To read a tile of activations, 1 KB, that another thread has packed, more than one of a thread's own: nanoseconds. Some 0.5
/// MB of tiles, of which each worker packs another part every time and which every worker reads in a direct product with two
/// panels of weights of its own. The median of a few times, each the mean over the workers.
double MeasureFetch(const KernelTier& tier, threadpool::Pool& pool);

/// Nanoseconds of one call of the widest cell with six steps, on the calling thread, in some 0.2 ms: beside
/// call_ns + cell_ns + 6 step_ns it tells whether others use the core just now.
double MeasureCell(const KernelTier& tier);

/// The kernels with weights from memory.
class StreamProbe {
 public:
  /// @param memory  whose bytes serve as weights, more than the caches hold; it and the pool must outlive this
  /// @param pool    null: the calling thread alone
  StreamProbe(const ReadProbe& memory, threadpool::Pool* pool);
  ~StreamProbe();

  /// Passes of a form (direct or unpack; that for few rows where the tier has one for so many) with `rows` rows over matrices
  /// of 2,048 (the contraction) x 512, each worker over its own: the bytes of weights a second, GB/s, all workers together, in
  /// the best window of two milliseconds and on average.
  BestAndMean Measure(const KernelTier& tier, bool direct, std::int64_t rows, double seconds);

 private:
  struct Worker;

  const ReadProbe& memory_;
  threadpool::Pool* const pool_;
  std::map<std::tuple<const KernelTier*, bool, std::int64_t>, std::vector<Worker>> workers_;
};

}  // namespace moesaic::bench
