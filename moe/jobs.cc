#include "moe/jobs.h"

#include <algorithm>

#include "cpu_kernels/gemm/tiles.h"
#include "cpu_kernels/tensor_access.h"
#include "cpu_kernels/tile_evaluator.h"

namespace moesaic::moe {

void BuildRouting(const LayerConfig& config, const TensorView& ids, std::int32_t* routing) {
  const std::int64_t experts = config.num_experts, tokens = ids.shape[0], top_k = ids.shape[1];
  std::int32_t* offsets = routing;
  std::int32_t* slots = routing + experts + 1;
  std::fill(offsets, offsets + experts + 1, 0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t j = 0; j < top_k; ++j) {
      const std::int64_t id = LoadInt(ids, t, j);
      if (id >= 0 && id < experts) ++offsets[id + 1];
    }
  }
  for (std::int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
  std::vector<std::int32_t> next(offsets, offsets + experts);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t j = 0; j < top_k; ++j) {
      const std::int64_t id = LoadInt(ids, t, j);
      if (id >= 0 && id < experts) slots[next[id]++] = static_cast<std::int32_t>(t * top_k + j);
    }
  }
}

std::vector<Job> BuildJobs(const LayerConfig& config, std::span<const Shard> shards, const std::int32_t* routing) {
  const std::int64_t most = ChunkRows(config.hidden_size, LargestShard(shards));
  const auto num_shards = static_cast<std::int64_t>(shards.size());
  std::vector<Job> jobs;
  for (std::int64_t e = 0; e < config.num_experts; ++e) {
    const std::int64_t begin = routing[e], end = routing[e + 1];
    if (begin == end) continue;
    const std::int64_t chunks = CeilDiv(end - begin, most);
    const std::int64_t rows = RoundUp(CeilDiv(end - begin, chunks), 32);
    for (std::int64_t first = begin; first < end; first += rows) {
      const bool last = first + rows >= end;
      for (std::int64_t shard = 0; shard < num_shards; ++shard) {
        const std::int64_t previous = first == begin ? -1 : static_cast<std::int64_t>(jobs.size()) - num_shards;
        jobs.push_back({e, shard, first, std::min(rows, end - first), previous, last});
      }
    }
  }
  return jobs;
}

std::vector<JobGroup> BuildGroups(const LayerConfig& config, std::span<const Job> jobs, std::int64_t size) {
  std::vector<JobGroup> groups;
  std::size_t job = 0;
  for (std::int64_t first = 0; first < config.num_experts; first += size) {
    JobGroup group{first, {}, static_cast<std::int64_t>(job), 0};
    for (; job < jobs.size() && jobs[job].expert < first + size; ++job) {
      if (jobs[job].previous < 0 && jobs[job].shard == 0) group.experts.push_back(jobs[job].expert);
      ++group.jobs;
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace moesaic::moe
