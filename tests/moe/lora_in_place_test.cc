// Adapters that are used where they lie: when, and that they are told as the same work as packed ones. (That they compute the
// same is in the tests of the layer, whose random problems have both.)
#include "moe/lora_in_place.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cpu_kernels/tensor_access.h"
#include "profiling/range.h"
#include "tests/moe/expect.h"

namespace moesaic::moe {
namespace {

using threadpool::Pool;

std::vector<std::int64_t> Rows(std::int64_t experts, std::int64_t each) {
  return std::vector<std::int64_t>(static_cast<std::size_t>(experts), each);
}

bool IsFaster(const std::vector<std::int64_t>& rows, std::int64_t rank = 16) { return LoraInPlace::IsFaster(rows, rank, rank); }

TEST(LoraInPlace, ServesFewRowsOfAnExpert) {
  EXPECT_TRUE(IsFaster(Rows(128, 1)));
  EXPECT_TRUE(IsFaster(Rows(128, 32)));
  EXPECT_FALSE(IsFaster(Rows(128, 33)));
  std::vector<std::int64_t> rows = Rows(64, 1);
  rows[20] = kMostLowRankRows;
  EXPECT_TRUE(IsFaster(rows));
  rows[20] = kMostLowRankRows + 1;
  EXPECT_FALSE(IsFaster(rows)) << "more than the kernels take";
  rows = Rows(128, 0);
  for (int i = 0; i < 32; ++i) rows[static_cast<std::size_t>(i)] = 33;
  EXPECT_FALSE(IsFaster(rows)) << "experts without rows do not make room for others'";
}

TEST(LoraInPlace, ServesNoRanksThatWouldTakeMuchMemory) {
  EXPECT_TRUE(IsFaster(Rows(128, 16), 64));
  EXPECT_FALSE(IsFaster(Rows(128, 16), 128));
  EXPECT_TRUE(IsFaster(Rows(128, 4), 128));
}

ProblemSpec SmallSpec(const AdapterSpec& adapter) {
  ProblemSpec spec;
  spec.tokens = 24;
  spec.experts = 20;
  spec.top_k = 3;
  spec.hidden = 96;
  spec.intermediate = 64;
  spec.adapters = {adapter};
  return spec;
}

bool Serves(const AdapterSpec& adapter, std::int64_t previous = -1) {
  const Problem problem(SmallSpec(adapter));
  const LoraCall lora(problem.config(), {0, problem.spec.intermediate}, problem.lora, {});
  const Job job{.expert = 3, .shard = 0, .begin = 0, .rows = 5, .previous = previous, .last = true};
  return LoraInPlace::Serves(problem.config(), lora, {&job, 1});
}

TEST(LoraInPlace, ServesPeftsLayoutInFp32) {
  EXPECT_TRUE(Serves({.gate_up = 5, .down = 7, .peft_strides = true}));
  EXPECT_TRUE(Serves({.down = 7, .peft_strides = true}));
  EXPECT_FALSE(Serves({.gate_up = 5, .down = 7})) << "B with ranks innermost";
  EXPECT_FALSE(Serves({.gate_up = 5, .down = 7, .dtype = DType::kBFloat16, .peft_strides = true}));
  EXPECT_FALSE(Serves({})) << "no adapters";
  EXPECT_FALSE(Serves({.gate_up = 5, .peft_strides = true}, 0)) << "an expert with several jobs";
}

/// More experts or ranks than one sweep holds.
TEST(LoraInPlace, MatchesReferenceInSeveralSweeps) {
  Pool pool(2);
  for (const auto& [experts, rank] : {std::pair<std::int64_t, std::int64_t>{300, 4}, {40, 256}}) {
    ProblemSpec spec = SmallSpec({.gate_up = rank, .down = rank, .peft_strides = true});
    spec.experts = experts;
    spec.tokens = 48;
    ASSERT_TRUE(IsFaster(Rows(experts, 2), rank));
    ExpectMatchesReference(spec, pool);
  }
}

/// Flops of each phase with adapters in it, of a forward and a backward.
std::map<std::string, double> FlopsOfAdapters(const ProblemSpec& spec) {
  const Problem problem(spec);
  Pool pool(2);
  const ExpertsLayer layer(problem.config(), problem.gate_up.view(), problem.down.view(), pool);
  profiling::SetTimersEnabled(true);
  profiling::Reset();
  const Saved saved(layer, problem);
  RunForward(layer, problem, pool, &saved);
  RunBackward(layer, problem, pool, saved);
  std::map<std::string, double> flops;
  for (const profiling::RangeStats& stats : profiling::Snapshot()) {
    for (const char* name : {"gate_up_lora", "down_lora", "D4_lora_grad", "P", "dB", "dX_lora", "dA"}) {
      if (stats.name == name) flops[stats.category + "." + name] += stats.flops;
    }
  }
  profiling::SetTimersEnabled(false);
  profiling::Reset();
  return flops;
}

TEST(LoraInPlace, IsTheSameWorkAsPacked) {
  ProblemSpec spec = SmallSpec({.gate_up = 5, .down = 7, .peft_strides = true});
  std::vector<std::int64_t> rows = Rows(spec.experts, 0);
  const Problem problem(spec);
  for (std::int64_t t = 0; t < spec.tokens; ++t) {
    for (std::int64_t j = 0; j < spec.top_k; ++j) ++rows[static_cast<std::size_t>(LoadInt(problem.ids.view(), t, j))];
  }
  ASSERT_TRUE(IsFaster(rows, spec.adapters[0].down));
  const std::map<std::string, double> in_place = FlopsOfAdapters(spec);
  spec.adapters = {{.gate_up = 5, .down = 7}};
  const std::map<std::string, double> packed = FlopsOfAdapters(spec);
  ASSERT_FALSE(packed.empty());
  for (const auto& [phase, flops] : packed) {
    ASSERT_TRUE(in_place.contains(phase)) << phase;
    EXPECT_NEAR(in_place.at(phase), flops, 1e-6 * flops) << phase;
  }
}

}  // namespace
}  // namespace moesaic::moe
