#include "moe/shards.h"

#include <algorithm>

#include "cpu_kernels/gemm/tiles.h"

namespace moesaic::moe {

std::vector<Shard> ShardIntermediate(std::int64_t intermediate, const threadpool::Topology& machine) {
  const std::vector<threadpool::Topology::ComputeNode> nodes = machine.ComputeNodes();
  const std::int64_t blocks = CeilDiv(intermediate, kTileColumns);
  std::int64_t all_cores = 0, cores = 0, begin = 0;
  for (const auto& node : nodes) all_cores += node.cores;
  std::vector<Shard> shards;
  for (const auto& node : nodes) {
    // Where the shares end, rounded: so that no rounding adds up.
    cores += node.cores;
    const std::int64_t end = std::min((2 * blocks * cores + all_cores) / (2 * all_cores) * kTileColumns, intermediate);
    if (end == begin) continue;
    shards.push_back({begin, end - begin, node.node});
    begin = end;
  }
  return shards;
}

std::int64_t LargestShard(std::span<const Shard> shards) {
  std::int64_t size = 0;
  for (const Shard& shard : shards) size = std::max(size, shard.size);
  return size;
}

}  // namespace moesaic::moe
