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

/// Seconds that every worker takes for a pass of `form` (direct or unpack) with 16 rows over its own weights, which come from
/// memory: the bytes of weights a second, GB/s, all workers together.
/// @param bytes  of weights, all workers together; more than the caches hold
double MeasureStream(const KernelTier& tier, bool direct, threadpool::Pool* pool, std::int64_t bytes);

}  // namespace moesaic::bench
