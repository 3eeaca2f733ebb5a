#include "moe/jobs.h"

#include <algorithm>

#include "cpu_kernels/gemm/tiles.h"
#include "cpu_kernels/tensor_access.h"
#include "cpu_kernels/tile_evaluator.h"

namespace moesaic::moe {

void BuildRouting(const LayerConfig& config, const TensorView& ids, std::int32_t* routing) {
  const std::int64_t experts = config.num_experts, top_k = ids.shape[1];
  std::int32_t* offsets = routing;
  std::int32_t* slots = routing + experts + 1;
  std::fill(offsets, offsets + experts + 1, 0);
  ForEachInt(ids, [&](std::int64_t, std::int64_t, std::int64_t id) {
    if (id >= 0 && id < experts) ++offsets[id + 1];
  });
  for (std::int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
  std::vector<std::int32_t> next(offsets, offsets + experts);
  ForEachInt(ids, [&](std::int64_t t, std::int64_t j, std::int64_t id) {
    if (id >= 0 && id < experts) slots[next[id]++] = static_cast<std::int32_t>(t * top_k + j);
  });
}

namespace {

/// Experts in the order in which their jobs begin.
std::vector<std::int64_t> OrderOfExperts(const LayerConfig& config, const std::int32_t* routing, std::int64_t group) {
  struct Entry {
    std::int32_t rows;
    std::int64_t expert;
  };
  const auto fuller = [](const Entry& a, const Entry& b) { return a.rows != b.rows ? a.rows > b.rows : a.expert < b.expert; };
  std::vector<Entry> experts, groups;  // a group by the rows of its fullest expert, and its first one
  experts.reserve(static_cast<std::size_t>(config.num_experts));
  for (std::int64_t e = 0; e < config.num_experts; ++e) experts.push_back({routing[e + 1] - routing[e], e});
  for (std::int64_t first = 0; first < config.num_experts; first += group) {
    const auto begin = experts.begin() + first, end = experts.begin() + std::min(first + group, config.num_experts);
    std::sort(begin, end, fuller);
    groups.push_back({begin->rows, first});
  }
  std::sort(groups.begin(), groups.end(), fuller);
  std::vector<std::int64_t> order;
  order.reserve(experts.size());
  for (const Entry& of_group : groups) {
    const std::int64_t end = std::min(of_group.expert + group, config.num_experts);
    for (std::int64_t i = of_group.expert; i < end; ++i) order.push_back(experts[i].expert);
  }
  return order;
}

}  // namespace

std::vector<Job> BuildJobs(const LayerConfig& config, std::span<const Shard> shards, const std::int32_t* routing,
                           std::int64_t group) {
  const auto num_shards = static_cast<std::int64_t>(shards.size());
  std::vector<Job> jobs;
  jobs.reserve(static_cast<std::size_t>(config.num_experts * num_shards));
  for (std::int64_t e : OrderOfExperts(config, routing, group)) {
    const std::int64_t begin = routing[e], end = routing[e + 1];
    if (begin == end) continue;
    const std::int64_t rows = ChunkRows(end - begin, config.hidden_size, LargestShard(shards));
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
  std::vector<bool> has_rows(static_cast<std::size_t>(CeilDiv(config.num_experts, size)));
  groups.reserve(has_rows.size());
  for (std::size_t job = 0; job < jobs.size(); ++job) {
    const std::int64_t first = jobs[job].expert / size * size;
    if (groups.empty() || groups.back().first_expert != first) {
      groups.push_back({first, {}, static_cast<std::int64_t>(job), 0});
      groups.back().experts.reserve(static_cast<std::size_t>(size));
    }
    has_rows[static_cast<std::size_t>(first / size)] = true;
    if (jobs[job].previous < 0 && jobs[job].shard == 0) groups.back().experts.push_back(jobs[job].expert);
    ++groups.back().jobs;
  }
  for (std::size_t g = 0; g < has_rows.size(); ++g) {
    if (!has_rows[g]) groups.push_back({static_cast<std::int64_t>(g) * size, {}, static_cast<std::int64_t>(jobs.size()), 0});
  }
  return groups;
}

}  // namespace moesaic::moe
