// What the machine looks like, and what of it this process may use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moesaic::threadpool {

/// A plain description: read it, print it, copy it. Indices `core`, `node` and `package` count from 0 in hwloc's logical order,
/// in which neighbours are near; `os_index` is the operating system's number.
struct Topology {
  /// A processing unit: what the operating system calls a CPU.
  struct Pu {
    int os_index = 0;
    int core = 0;
    int node = 0;
    int package = 0;
    int sibling = 0;       ///< 0 for the first unit of its core, 1 for its SMT sibling, ...
    bool allowed = false;  ///< in the affinity of this process
  };
  struct NumaNode {
    int os_index = 0;
    int package = 0;  ///< -1: belongs to no single one
    std::int64_t memory_bytes = 0;
    int pus = 0;  ///< 0: memory only
  };
  /// The largest of its level; 0 where it is not known.
  struct Cache {
    std::int64_t bytes = 0;
    int pus = 0;  ///< units that share one
  };

  bool is_host = true;  ///< false: read from a file or a description, nothing can be pinned to it
  int packages = 0;
  int cores = 0;
  std::vector<NumaNode> nodes;
  std::vector<Pu> pus;  ///< in logical order
  Cache l1d, l2, l3;
  std::vector<int> affinity;  ///< os_index of the allowed units, ascending
  double cpu_quota = 0;       ///< CPUs' worth of time that control groups grant; 0: no limit

  /// This machine, or what MOESAIC_HWLOC_XML names; found out once. The affinity and the quota are those of the first call.
  /// Throws std::invalid_argument naming MOESAIC_HWLOC_XML if it cannot be read.
  static const Topology& Host();
  /// The same, found out anew. Takes milliseconds. Changes no thread's affinity.
  static Topology Discover();
  /// A topology that hwloc (lstopo --of xml) wrote. Every unit is allowed, there is no quota.
  static Topology FromXml(const std::string& path);
  /// A topology in hwloc's synthetic notation, e.g. "package:2 core:4 pu:2". Every unit is allowed, there is no quota.
  static Topology FromSynthetic(const std::string& description);

  /// Leaves only these units allowed.
  void Restrict(const std::vector<int>& os_indices);

  /// Cores with an allowed unit, no more than the quota rounded to a whole number; at least 1.
  int UsableCores() const;
  /// Units of time-sharing: allowed units, no more than the quota rounded up; at least 1. More threads than these take turns.
  int UsablePus() const;
  /// The allowed units in the order in which threads are to be placed: one a core first, then SMT siblings.
  std::vector<Pu> PlacementOrder() const;
  /// Units for so many threads, in that order: as many on each NUMA node as its share of the usable cores. More threads than
  /// units: from the first one again.
  std::vector<Pu> Places(int threads) const;

  /// A NUMA node on which this process may compute.
  struct ComputeNode {
    int node;   ///< its place in `nodes`
    int cores;  ///< those with an allowed unit
  };
  /// Ascending. Memory-only nodes, and those outside the affinity, are not among them; there is always one.
  std::vector<ComputeNode> ComputeNodes() const;
  /// The NUMA node (its place in `nodes`) on which the calling thread runs now; 0 if unknown.
  int NodeOfCallingThread() const;
};

}  // namespace moesaic::threadpool
