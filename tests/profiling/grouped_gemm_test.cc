// Whatever configuration the evaluator picks, a grouped GEMM gives the same bits, and the right ones.
#include "profiling/bench/grouped_gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace moesaic::bench {
namespace {

struct Case {
  const char* name;
  GemmProblem problem;
};

std::vector<Case> Cases() {
  const auto of = [](std::vector<GroupRows> groups, std::int64_t k, std::int64_t n, GemmForm form, std::int64_t in,
                     std::int64_t out, bool packed) {
    GemmProblem problem;
    problem.groups = std::move(groups);
    problem.k = k;
    problem.n = n;
    problem.form = form;
    problem.input_bytes = in;
    problem.output_bytes = out;
    problem.packed = packed;
    return problem;
  };
  using enum GemmForm;
  return {
      {"direct", of({{50, 1}, {60, 1}}, 600, 330, kDirect, 2, 4, false)},
      {"direct_bf16", of({{70, 2}, {1, 1}}, 545, 257, kDirect, 4, 2, false)},
      {"unpack", of({{33, 1}}, 600, 330, kUnpack, 2, 4, true)},
      {"unpack_bf16", of({{70, 2}, {1, 1}}, 545, 257, kUnpack, 4, 2, false)},
      {"gradient", of({{50, 2}}, 530, 200, kGradient, 2, 4, true)},
  };
}

double Expected(const GroupedGemm& gemm, std::int64_t group, std::int64_t row, std::int64_t column, std::int64_t k_count) {
  double sum = 0;
  for (std::int64_t k = 0; k < k_count; ++k) {
    // fp32 inputs are rounded to bf16 when they are packed.
    const float x = ToFloat(ToBFloat16(static_cast<float>(gemm.Activation(group, row, k))));
    sum += static_cast<double>(x) * gemm.Weight(group, k, column);
  }
  return sum;
}

class GroupedGemmTest : public testing::TestWithParam<std::size_t> {};

TEST_P(GroupedGemmTest, SameBitsForAnyConfigurationAndThreads) {
  const Case c = Cases()[GetParam()];
  MachineModel machine;
  machine.threads = 3;
  std::mt19937_64 random(7);
  for (const KernelTier* tier : KernelTiers()) {
    if (!tier->runs_here()) continue;
    SCOPED_TRACE(std::string(c.name) + " " + tier->name);
    machine.kernel.left_panels = tier->left_panels;
    machine.kernel.right_panels = tier->right_panels;
    std::vector<GemmConfiguration> configurations;
    for (const GemmConfiguration& candidate : Candidates(c.problem, machine, CandidateSpace::kPublished)) {
      if (Legal(c.problem, candidate)) configurations.push_back(candidate);
    }
    ASSERT_GT(configurations.size(), 100u);
    threadpool::Pool one(1), three(3);
    GroupedGemm alone(*tier, c.problem, one), together(*tier, c.problem, three);
    alone.Run(configurations[0]);
    const std::uint64_t digest = alone.Digest();
    for (int trial = 0; trial < 12; ++trial) {
      const GemmConfiguration& some = configurations[random() % configurations.size()];
      SCOPED_TRACE(testing::Message() << some.task_rows << "x" << some.task_columns << " " << some.call_rows << "x"
                                      << some.call_columns << "x" << some.call_depth << " " << static_cast<int>(some.order));
      GroupedGemm& gemm = trial % 2 == 0 ? together : alone;
      gemm.Run(some);
      ASSERT_EQ(gemm.Digest(), digest);
    }
    // K products of values below 2 in fp32: K roundings of at most eps/2 of a partial sum below 4 K, or one of bf16 at the end.
    for (int trial = 0; trial < 60; ++trial) {
      std::int64_t groups = 0;
      for (const GroupRows& rows : c.problem.groups) groups += rows.groups;
      const auto group = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(groups));
      const std::int64_t rows = group < c.problem.groups[0].groups ? c.problem.groups[0].rows : c.problem.groups[1].rows;
      const auto row = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(rows));
      const auto column = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(c.problem.n));
      const double expected = Expected(together, group, row, column, c.problem.k);
      const double k = static_cast<double>(c.problem.k);
      const double tolerance =
          k * std::ldexp(4 * std::sqrt(k), -24) + (c.problem.output_bytes == 2 ? std::abs(expected) / 256 : 0);
      EXPECT_NEAR(together.Result(group, row, column), expected, tolerance) << group << " " << row << " " << column;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, GroupedGemmTest, testing::Range(std::size_t{0}, Cases().size()),
                         [](const auto& info) { return std::string(Cases()[info.param].name); });

TEST(FarWeights, GoOnAndBeginAgain) {
  threadpool::Pool pool(2);
  FarWeights far(pool, 3 << 20);
  std::byte* first = far.Next(1 << 20);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first) % 64, 0u);
  EXPECT_EQ(far.Next((1 << 20) - 1), first + (1 << 20));  // to the next page
  EXPECT_EQ(far.Next(1 << 20), first + (2 << 20));
  EXPECT_EQ(far.Next(4096), first);
  EXPECT_EQ(far.Next(3 << 20), first);
}

TEST(GroupedGemm, TakesOtherFarWeightsEachTime) {
  const Case c = Cases()[1];
  threadpool::Pool pool(2);
  const auto far = std::make_shared<FarWeights>(pool, 4 << 20);
  GroupedGemm gemm(*KernelTiers().back(), c.problem, pool, far);
  std::vector<double> weights;
  for (int run = 0; run < 2; ++run) {
    gemm.Run({16, 128, 16, 32, 545, LoopOrder::kRows});
    weights.push_back(gemm.Weight(1, 7, 200));
    EXPECT_NEAR(gemm.Result(1, 33, 200), Expected(gemm, 1, 33, 200, c.problem.k), 0.1);
  }
  EXPECT_NE(weights[0], weights[1]);
  // Fewer than it needs: its own.
  GroupedGemm own(*KernelTiers().back(), c.problem, pool, std::make_shared<FarWeights>(pool, 4096));
  own.Run({16, 128, 16, 32, 545, LoopOrder::kRows});
  EXPECT_NEAR(own.Result(2, 0, 256), Expected(own, 2, 0, 256, c.problem.k), 0.1);
}

TEST(GroupedGemm, PassesInParts) {
  const Case c = Cases()[1];
  const GemmConfiguration configuration{16, 128, 16, 32, 545, LoopOrder::kRows};
  threadpool::Pool pool(2);
  GroupedGemm gemm(*KernelTiers().back(), c.problem, pool), whole(*KernelTiers().back(), c.problem, pool);
  const std::vector<GroupedGemm::Pass> passes = gemm.MeasurePasses(configuration, 3);
  ASSERT_EQ(passes.size(), 3u);
  for (const GroupedGemm::Pass& pass : passes) {
    EXPECT_GT(pass.packing_ms, 0);
    EXPECT_GE(pass.uneven, 1);  // the longest of some is no shorter than their mean
  }
  whole.Run(configuration);
  EXPECT_EQ(gemm.Digest(), whole.Digest());
  GemmProblem one = c.problem;
  one.groups = {{16, 1}};
  one.n = 128;
  one.packed = true;
  GroupedGemm alone(*KernelTiers().back(), one, pool);
  const GroupedGemm::Pass pass = alone.MeasurePasses(configuration, 1)[0];
  EXPECT_DOUBLE_EQ(pass.uneven, 1);
  EXPECT_EQ(pass.packing_ms, 0);
  EXPECT_THROW(gemm.MeasurePasses({17, 128, 16, 32, 545, LoopOrder::kRows}, 1), std::invalid_argument);
}

TEST(GroupedGemm, RefusesWhatTheKernelsCannotRun) {
  GemmProblem problem = Cases()[3].problem;
  threadpool::Pool pool(1);
  GroupedGemm gemm(*KernelTiers().back(), problem, pool), direct(*KernelTiers().back(), Cases()[1].problem, pool);
  // A part of a contraction from the middle of a superblock, or over several rows of them.
  EXPECT_THROW(gemm.Run({16, 128, 16, 32, 128, LoopOrder::kColumns}), std::invalid_argument);
  EXPECT_THROW(direct.Run({16, 257, 16, 257, 256, LoopOrder::kColumns}), std::invalid_argument);
  EXPECT_THROW(gemm.Run({17, 128, 16, 32, 545, LoopOrder::kRows}), std::invalid_argument);
  EXPECT_THROW(gemm.Run({16, 100, 16, 32, 545, LoopOrder::kRows}), std::invalid_argument);
  gemm.Run({16, 128, 16, 32, 545, LoopOrder::kRows});
  problem.groups.clear();
  EXPECT_THROW(GroupedGemm(*KernelTiers().back(), problem, pool), std::invalid_argument);
}

}  // namespace
}  // namespace moesaic::bench
