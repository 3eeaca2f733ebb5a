// What this host can do at most: multiply-adds on registers, and reading memory.
//
// The probes share no code with the kernels, so no kernel is measured against its own mistakes. All threads of a probe start
// together and run for a fixed time; a rate is the sum over the threads of work / own time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "threadpool/pool.h"

namespace moesaic::bench {

/// The compute probe of one tier of kernels.
struct ComputeProbe {
  std::string isa;          ///< tier whose ceiling it is: "amx_bf16", "avx512_bf16", "avx512", "portable"
  std::string instruction;  ///< what it issues: "TDPBF16PS", "VFMADD ymm fp32", ...
  bool available = false;   ///< the host has the instructions and this process may use them
};

/// Every probe of this build, best first. Throws UnsupportedHostError as IsaTiers() does.
std::vector<ComputeProbe> ComputeProbes();

/// GFLOP/s (a multiplication and an addition are two) of independent multiply-adds whose operands stay in registers.
/// @param isa      a name of ComputeProbes()
/// @param pool     one probe on each of its workers at the same time; null: on the calling thread alone
/// @param seconds  time of measurement; a tenth more is spent on warming up
/// Throws std::invalid_argument for an unknown or unavailable isa and for seconds outside (0, 60], std::runtime_error where the
/// pool cannot run all its workers at once.
double MeasureCompute(std::string_view isa, threadpool::Pool* pool, double seconds);

/// The same in the best window of half a millisecond.
double MeasureBestCompute(std::string_view isa, threadpool::Pool* pool, double seconds);

/// Streaming reads of a buffer too large for any cache, with the widest loads that the host has. How many streams a thread
/// reads side by side, and with which prefetch, is tried out when the probe is made.
/// Memory is touched first by the worker that reads it, so it lies on that worker's NUMA node, and huge pages are asked for.
/// Threads: not thread safe.
class ReadProbe {
 public:
  /// @param pool   each worker reads its own share; null: the calling thread reads all. Must outlive the probe, its number of
  ///               threads unchanged.
  /// @param bytes  size of the buffer, rounded up to 512 KiB for each thread; 0: the larger of 1 GiB and four times the
  ///               last-level caches, but at most a quarter of the memory that is free
  /// Throws std::invalid_argument for negative bytes, std::bad_alloc where memory cannot be had.
  explicit ReadProbe(threadpool::Pool* pool, std::int64_t bytes = 0);
  ~ReadProbe();
  ReadProbe(const ReadProbe&) = delete;
  ReadProbe& operator=(const ReadProbe&) = delete;

  /// GB/s (1e9 bytes). Starts where the previous call ended, so that short calls do not find their data in a cache.
  /// Throws like MeasureCompute, and std::invalid_argument where the pool's number of threads has changed.
  double Measure(double seconds);
  /// The same in the best window of half a millisecond.
  double MeasureBest(double seconds);

  /// What a worker reads: bytes of 1.
  std::span<std::byte> Share(int worker) const;
  std::int64_t bytes() const;
  /// How it reads: "32-byte loads, 8 streams, prefetched to L2".
  const std::string& method() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Bytes of all last-level caches of the host together, from /sys; 0 where it does not say.
std::int64_t LastLevelCacheBytes();

}  // namespace moesaic::bench
