// How I is divided among the NUMA nodes of a machine.
//
// Every expert is cut along I, once, when its weights are packed: each node gets some rows of W_g and W_u and the same columns
// of W_d, keeps them in its memory and computes with them. To the node its shard is an expert with a smaller I; results that
// are sums over I (Y, dX, the gradients of the routing weights, of A and of the down adapter's B) are added up over the shards,
// in their order. On a machine with one node there is one shard, the whole.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "threadpool/topology.h"

namespace moesaic::moe {

/// Rows [begin, begin + size) of I. `begin` is a multiple of 32, and `size` too except in the last shard.
struct Shard {
  std::int64_t begin = 0;
  std::int64_t size = 0;
  int node = 0;  ///< its place in Topology::nodes
};

/// At least one; in ascending order of `begin`. A node's share is that of its usable cores; one with less than half of 32 rows
/// gets none. A function of I and of the machine (nodes, affinity), not of the number of threads.
std::vector<Shard> ShardIntermediate(std::int64_t intermediate, const threadpool::Topology& machine);

/// Rows of the largest one.
std::int64_t LargestShard(std::span<const Shard> shards);

}  // namespace moesaic::moe
