// From routing to jobs: which rows each expert computes, in pieces that fit a core's cache.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu_kernels/tensor_view.h"
#include "moe/config.h"
#include "moe/shards.h"

namespace moesaic::moe {

/// A chunk of the rows of one expert (ChunkRows()), on one shard of I. Rows are slots t * k + j, in ascending order, at
/// [begin, begin + rows) of the routing.
struct Job {
  std::int64_t expert;
  std::int64_t shard;
  std::int64_t begin;
  std::int64_t rows;
  std::int64_t previous;  ///< the job with the rows before these, of the same expert and shard; -1: this is the first
  bool last;              ///< of its expert
};

/// Writes the routing: offsets[E + 1], then the slots grouped by expert, without those that are skipped. ids are validated.
void BuildRouting(const LayerConfig& config, const TensorView& ids, std::int32_t* routing);

/// Jobs in the order in which they begin: the fullest expert first, so that the last ones, for which all threads wait, are
/// short; where adapters are packed for `group` neighbouring experts at a time, the groups by their fullest one, and in each
/// its experts. Then in ascending order of rows, then of shards. An expert's rows are dealt evenly: a short last chunk would
/// read the weights again for little work.
/// @param group  experts; num_experts: of all together
std::vector<Job> BuildJobs(const LayerConfig& config, std::span<const Shard> shards, const std::int32_t* routing,
                           std::int64_t group);

/// The jobs, of all shards, of the experts of one adapter group.
struct JobGroup {
  std::int64_t first_expert;          ///< multiple of the group's size
  std::vector<std::int64_t> experts;  ///< those with rows
  std::int64_t first_job;
  std::int64_t jobs;
};

/// One group for every `size` experts of the layer, in the order of the jobs, then those without rows.
std::vector<JobGroup> BuildGroups(const LayerConfig& config, std::span<const Job> jobs, std::int64_t size);

}  // namespace moesaic::moe
