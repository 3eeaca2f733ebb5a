// Jobs and groups of a routing: every slot once, the fullest experts first.
#include "moe/jobs.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cpu_kernels/gemm/tiles.h"

namespace moesaic::moe {
namespace {

/// Offsets and slots of a routing with so many rows of each expert.
std::vector<std::int32_t> Routing(const std::vector<std::int32_t>& rows) {
  std::vector<std::int32_t> routing{0};
  for (std::int32_t count : rows) routing.push_back(routing.back() + count);
  const std::int32_t slots = routing.back();
  for (std::int32_t slot = 0; slot < slots; ++slot) routing.push_back(slot);
  return routing;
}

std::vector<std::int64_t> Experts(const std::vector<Job>& jobs) {
  std::vector<std::int64_t> experts;
  for (const Job& job : jobs) {
    if (job.previous < 0 && job.shard == 0) experts.push_back(job.expert);
  }
  return experts;
}

TEST(Jobs, TheFullestExpertBegins) {
  const LayerConfig config{7, 64, 64};
  const std::vector<std::int32_t> rows{3, 9, 0, 9, 40, 1, 5};
  const Shard whole{0, 64};
  const std::vector<std::int32_t> routing = Routing(rows);
  EXPECT_EQ(Experts(BuildJobs(config, {&whole, 1}, routing.data(), 7)), (std::vector<std::int64_t>{4, 1, 3, 6, 0, 5}));
  // Groups 0-2, 3-5 and 6: the second has the fullest expert, then the first.
  EXPECT_EQ(Experts(BuildJobs(config, {&whole, 1}, routing.data(), 3)), (std::vector<std::int64_t>{4, 3, 5, 1, 0, 6}));
}

TEST(Jobs, EverySlotIsInOneJobAndEveryExpertInOneGroup) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    const auto below = [&](int n) { return static_cast<std::int32_t>(random() % static_cast<unsigned>(n)); };
    const LayerConfig config{1 + below(40), 64, 96};
    std::vector<std::int32_t> rows;
    for (std::int64_t e = 0; e < config.num_experts; ++e) rows.push_back(below(3) == 0 ? 0 : below(trial % 2 == 0 ? 20 : 1500));
    const std::vector<std::int32_t> routing = Routing(rows);
    const std::vector<Shard> shards = trial % 3 == 0 ? std::vector<Shard>{{0, 32}, {32, 64}} : std::vector<Shard>{{0, 96}};
    const std::int64_t size = 1 + below(17);
    SCOPED_TRACE(testing::Message() << "trial " << trial << " experts " << config.num_experts << " groups of " << size);

    const std::vector<Job> jobs = BuildJobs(config, shards, routing.data(), size);
    std::vector<int> computed(static_cast<std::size_t>(routing[static_cast<std::size_t>(config.num_experts)]) * shards.size());
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      const Job& job = jobs[i];
      ASSERT_GT(job.rows, 0);
      ASSERT_LE(job.begin + job.rows, routing[static_cast<std::size_t>(job.expert) + 1]);
      for (std::int64_t r = 0; r < job.rows; ++r) ++computed[(job.begin + r) * shards.size() + job.shard];
      const bool first = job.begin == routing[static_cast<std::size_t>(job.expert)];
      ASSERT_EQ(job.previous < 0, first);
      if (first) continue;
      const Job& previous = jobs[static_cast<std::size_t>(job.previous)];
      ASSERT_LT(job.previous, static_cast<std::int64_t>(i));
      ASSERT_EQ(previous.expert, job.expert);
      ASSERT_EQ(previous.shard, job.shard);
      ASSERT_EQ(previous.begin + previous.rows, job.begin);
    }
    for (int times : computed) ASSERT_EQ(times, 1);

    const std::vector<JobGroup> groups = BuildGroups(config, jobs, size);
    ASSERT_EQ(static_cast<std::int64_t>(groups.size()), CeilDiv(config.num_experts, size));
    std::vector<int> met(groups.size());
    std::int64_t job = 0, experts = 0;
    for (const JobGroup& group : groups) {
      ASSERT_EQ(group.first_job, job);
      ASSERT_EQ(group.first_expert % size, 0);
      ++met[static_cast<std::size_t>(group.first_expert / size)];
      for (std::int64_t e : group.experts) ASSERT_EQ(e / size, group.first_expert / size);
      experts += static_cast<std::int64_t>(group.experts.size());
      for (std::int64_t end = job + group.jobs; job < end; ++job) {
        ASSERT_EQ(jobs[static_cast<std::size_t>(job)].expert / size, group.first_expert / size);
      }
    }
    ASSERT_EQ(job, static_cast<std::int64_t>(jobs.size()));
    ASSERT_EQ(experts, static_cast<std::int64_t>(Experts(jobs).size()));
    for (int times : met) ASSERT_EQ(times, 1);
  }
}

}  // namespace
}  // namespace moesaic::moe
