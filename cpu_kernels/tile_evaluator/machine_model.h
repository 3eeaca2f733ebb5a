// The figures of a machine that the GEMM model needs, for one number of threads.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace moesaic {

/// Where bytes come from.
enum class MemoryLevel { kL1, kL2, kL3, kMemory };
inline constexpr std::size_t kMemoryLevels = 4;

/// Rows of activations, at most, that are measured one by one where a tier has forms for few: what two passes of the unpack
/// form take.
inline constexpr std::size_t kMostMeasuredRows = 24;

/// What the kernels of one tier do on this machine, on each thread of so many, with its operands in the L1 cache.
struct KernelFigures {
  std::int64_t left_panels = 1;   ///< kMaxA of the cell, 1 or 2
  std::int64_t right_panels = 1;  ///< kMaxB of the cell, 1 to 3
  /// Nanoseconds of one step (32 of the contraction) of a cell with i + 1 left and j + 1 right panels.
  std::array<std::array<double, 3>, 2> step_ns{};
  std::int64_t most_few_rows = 0, most_stored_rows = 0;  ///< KernelTier's
  /// Of the forms whose work grows with the rows: how many rows are measured (0: there are none), and nanoseconds of a tile of
  /// weights in L2, by form (direct, unpack) and rows - 1.
  std::int64_t measured_rows = 0;
  std::array<std::array<double, kMostMeasuredRows>, 2> few_tile_ns{};
  double cell_ns = 0;            ///< begin and end of the widest cell: accumulators cleared and stored
  double again_ns = 0;           ///< the same of one that goes on with sums in C: accumulators loaded and stored
  double call_ns = 0;            ///< begin and end of a call
  double unpack_tile_ns = 0;     ///< a stored tile becomes part of right factors (unpack form)
  bool unpack_overlaps = false;  ///< beside the products instead of before them: a matrix unit, which also takes slices
  /// How well the kernels compute while the caches and the memory bring what they need: times of both combine as
  /// (sum of t^overlap)^(1/overlap). 1: one after the other; 3: nearly at the same time.
  double overlap = 3;
  double unpack_overlap = 3;  ///< the same of the unpack form
  double few_overlap = 2.5;   ///< of the forms for few rows where they pass a tile once
  double pack_gbps = 0;       ///< rows become tiles, bytes of bf16 written by one thread
  /// Rates at which 1, 2, ... and all threads together take weights from memory, the others leaving it alone.
  std::vector<double> direct_gbps, unpack_gbps;
  /// The same of the forms for few rows, where there are any: all rows are few to the unpack form.
  std::vector<double> few_direct_gbps, few_unpack_gbps;
};

/// A machine as `threads` threads see it. Rates are those of all threads together.
struct MachineModel {
  int threads = 1;
  double compute_gflops = 0;                       ///< multiply-adds on registers, of the tier
  std::array<double, kMemoryLevels> gbps{};        ///< reads
  std::array<double, kMemoryLevels> latency_ns{};  ///< a load that depends on the one before
  std::array<std::int64_t, 3> cache_bytes{};       ///< of one core: L1, L2; L3: what one thread may count as its own
  std::int64_t l3_bytes = 0;                       ///< all of L3
  double job_us = 0;                               ///< a parallel loop that does nothing
  double task_us = 0;                              ///< one more task in it
  /// Of 1, 2, ... and as many equal tasks as threads, the longest over the mean.
  std::vector<double> uneven;
  /// To pack a tile from bf16, where other threads have written both, more than packing takes in a thread's own caches and
  /// reading the rows from theirs.
  double claim_ns = 0;
  /// To read a tile that another thread has packed, more than one of a thread's own; and to read the rows of one that is
  /// packed.
  double fetch_ns = 0;
  /// What computing takes in a product of cells, over what its steps, unpacking, L2 and L3 take by themselves: the direct form
  /// (and the other one in calls that meet each weight once, as that does), the unpack form.
  double direct_factor = 1, unpack_factor = 1;
  KernelFigures kernel;
};

}  // namespace moesaic
