// What the GEMM model wants to know of a machine, beyond its ceilings: caches, latencies, the pool, and the kernels in cache.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tile_evaluator/machine_model.h"
#include "threadpool/pool.h"

namespace moesaic::bench {

/// GB/s of reading a block of `bytes` (rounded up to 4 KiB) over and over with the widest loads, one block a worker, all
/// workers together. A block that a cache holds shows that cache.
/// @param pool     null: the calling thread alone
/// @param seconds  as for MeasureCompute
double MeasureBlockRead(threadpool::Pool* pool, std::int64_t bytes, double seconds);

/// Nanoseconds of a load whose address is the result of the load before, in a block of `bytes`, one load a cache line in random
/// order, on the calling thread.
double MeasureLatency(std::int64_t bytes, double seconds);

/// Microseconds, the least of many: a parallel loop in which every worker takes part, and what each further task costs a
/// thread.
struct PoolFigures {
  double job_us = 0;
  double task_us = 0;
};
PoolFigures MeasurePool(threadpool::Pool& pool);

/// The kernels of a tier with operands in the L1 cache, on the calling thread: all of KernelFigures but the rates from memory.
/// The tier must run here.
KernelFigures MeasureKernels(const KernelTier& tier);

/// Nanoseconds of one call of the widest cell with six steps, on the calling thread, in some 0.2 ms: beside
/// call_ns + cell_ns + 6 step_ns it tells whether others use the core just now.
double MeasureCell(const KernelTier& tier);

/// Passes of a form (direct or unpack) with `rows` rows over matrices of 2,048 x 2,048 that come from memory, each worker over
/// its own: the bytes of weights a second, GB/s, all workers together. The median of some times before and after which
/// MeasureCell took at most `undisturbed_ns`; where there are none, the third best of all.
/// @param bytes  of weights, all workers together; more than the caches hold
double MeasureStream(const KernelTier& tier, bool direct, std::int64_t rows, threadpool::Pool* pool, std::int64_t bytes,
                     double undisturbed_ns);

}  // namespace moesaic::bench
