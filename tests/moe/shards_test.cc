// Layers divided among NUMA nodes. The nodes are pretended (synthetic topologies), what they compute is not: each shard has its
// own weights, tasks and sums.
#include "moe/shards.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cpu_kernels/gemm/tiles.h"
#include "cpu_kernels/isa.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tensor_access.h"
#include "moe/workspace.h"
#include "tests/moe/expect.h"
#include "tests/threadpool/sources.h"
#include "threadpool/topology.h"

namespace moesaic::moe {
namespace {

using threadpool::Pool;
using threadpool::ThreadSource;
using threadpool::Topology;

std::vector<std::int64_t> Sizes(std::int64_t intermediate, const Topology& machine) {
  std::vector<std::int64_t> sizes;
  std::int64_t end = 0;
  for (const Shard& shard : ShardIntermediate(intermediate, machine)) {
    EXPECT_EQ(shard.begin, end);
    EXPECT_EQ(shard.begin % kTileColumns, 0);
    EXPECT_GT(shard.size, 0);
    end += shard.size;
    sizes.push_back(shard.size);
  }
  EXPECT_EQ(end, intermediate);
  return sizes;
}

using S = std::vector<std::int64_t>;

TEST(Shards, OneNodeHasTheWhole) {
  for (const char* machine : {"core:1 pu:1", "pack:1 numa:1 core:3 pu:1", "pack:1 [numa] core:8 pu:2"}) {
    EXPECT_EQ(Sizes(768, Topology::FromSynthetic(machine)), (S{768})) << machine;
  }
}

TEST(Shards, EqualNodesHaveEqualShares) {
  EXPECT_EQ(Sizes(768, Topology::FromSynthetic("pack:2 [numa] core:4 pu:2")), (S{384, 384}));
  EXPECT_EQ(Sizes(768, Topology::FromSynthetic("pack:4 [numa] core:1 pu:1")), (S{192, 192, 192, 192}));
  // Sub-NUMA clusters: nodes below packages.
  EXPECT_EQ(Sizes(2048, Topology::FromSynthetic("pack:2 die:4 [numa] core:2 pu:2")), (S(8, 256)));
  // Blocks of 32 rows that cannot be dealt evenly, and rows that fill no block.
  EXPECT_EQ(Sizes(5 * 32, Topology::FromSynthetic("pack:2 [numa] core:1 pu:1")), (S{96, 64}));
  EXPECT_EQ(Sizes(100, Topology::FromSynthetic("pack:2 [numa] core:1 pu:1")), (S{64, 36}));
}

TEST(Shards, FewRowsLeaveNodesOut) {
  const Topology machine = Topology::FromSynthetic("pack:8 [numa] core:1 pu:1");
  EXPECT_EQ(Sizes(7, machine), (S{7}));
  EXPECT_EQ(Sizes(32, machine), (S{32}));
  EXPECT_EQ(Sizes(3 * 32, machine).size(), 3u);
}

TEST(Shards, ACpusetCutsNodesApart) {
  Topology machine = Topology::FromSynthetic("pack:2 [numa] core:4 pu:2");
  machine.Restrict({0, 1, 2, 3, 4, 5, 8});  // three cores of the first node, one unit of the second
  EXPECT_EQ(Sizes(1024, machine), (S{768, 256}));
  machine.Restrict({12, 13});
  const std::vector<Shard> shards = ShardIntermediate(1024, machine);
  ASSERT_EQ(shards.size(), 1u);
  EXPECT_EQ(shards[0].node, 1);
  machine.Restrict({});
  EXPECT_EQ(Sizes(1024, machine), (S{1024}));
}

TEST(Shards, NodesOfMemoryAloneHaveNone) {
  // Two nodes near the same cores: the first, hwloc's default, counts.
  const Topology machine = Topology::FromSynthetic("pack:2 [numa] [numa] core:2 pu:1");
  ASSERT_EQ(machine.nodes.size(), 4u);
  EXPECT_EQ(Sizes(256, machine), (S{128, 128}));
}

ProblemSpec Spec() {
  ProblemSpec spec;
  spec.tokens = 150;
  spec.experts = 5;
  spec.top_k = 2;
  spec.hidden = 200;
  spec.intermediate = 300;
  spec.skipped = 0.1;
  // A of gate and up is more than a task packs of all experts.
  spec.adapters = {{.gate_up = 64, .down = 5, .peft_strides = true},
                   {.gate = 3, .up = 2, .down = 9, .dtype = DType::kBFloat16}};
  spec.seed = 5;
  return spec;
}

struct Machine {
  const char* name;
  const char* description;
  std::vector<int> allowed;  ///< empty: all
  std::size_t shards;

  Topology topology() const {
    Topology topology = Topology::FromSynthetic(description);
    if (!allowed.empty()) topology.Restrict(allowed);
    return topology;
  }
};

const std::vector<Machine>& Machines() {
  static const std::vector<Machine> machines = {
      {"OneNode", "pack:1 [numa] core:4 pu:1", {}, 1},           {"TwoNodes", "pack:2 [numa] core:2 pu:1", {}, 2},
      {"TwoNodesSmt", "pack:2 [numa] core:1 pu:2", {}, 2},       {"FourNodes", "pack:4 [numa] core:1 pu:1", {}, 4},
      {"EightNodes", "pack:2 die:4 [numa] core:1 pu:2", {}, 8},  {"MemoryOnly", "pack:2 [numa] [numa] core:2 pu:1", {}, 2},
      {"ThreeCores", "pack:2 [numa] core:2 pu:1", {0, 1, 3}, 2}, {"CutApart", "pack:4 [numa] core:2 pu:2", {0, 1, 2, 9}, 2},
  };
  return machines;
}

class OnMachine : public testing::TestWithParam<std::size_t> {
 protected:
  const Machine& machine() const { return Machines()[GetParam()]; }
};

TEST_P(OnMachine, MatchesReference) {
  Pool pool(3, ThreadSource::kOwn, machine().topology());
  for (const Routing routing : {Routing::kUniform, Routing::kOneExpert}) {
    ProblemSpec spec = Spec();
    spec.routing = routing;
    if (routing == Routing::kOneExpert) spec.tokens = 500;  // in several chunks
    ExpectMatchesReference(spec, pool);
  }
}

TEST_P(OnMachine, SameBitsForAnyThreads) {
  const Problem problem(Spec());
  Pool one(1, ThreadSource::kOwn, machine().topology());
  const ExpertsLayer layer = MakeLayer(problem, one);
  EXPECT_EQ(layer.shards().size(), machine().shards);
  const Saved saved(layer, problem);
  const Tensor out = RunForward(layer, problem, one, &saved);
  const Gradients gradients = RunBackward(layer, problem, one, saved);
  for (const ThreadSource source : {ThreadSource::kOwn, ThreadSource::kOpenMp}) {
    if (MOESAIC_TSAN && source == ThreadSource::kOpenMp) continue;
    for (const int threads : {2, 5}) {
      Pool pool(threads, source, machine().topology());
      const ExpertsLayer other = MakeLayer(problem, pool);
      const Saved other_saved(other, problem);
      EXPECT_TRUE(RunForward(other, problem, pool, &other_saved) == out);
      EXPECT_TRUE(Equal(RunBackward(other, problem, pool, other_saved), gradients));
      // A layer packed for other nodes than the pool has is computed as it was packed.
      Pool host(threads, source);
      EXPECT_TRUE(RunForward(other, problem, host) == out);
      EXPECT_TRUE(Equal(RunBackward(other, problem, host, other_saved), gradients));
    }
  }
}

TEST_P(OnMachine, UnpacksWhatItPacked) {
  Pool pool(2, ThreadSource::kOwn, machine().topology());
  ProblemSpec spec = Spec();
  spec.hidden = 45;
  const Problem problem(spec);
  const ExpertsLayer layer = MakeLayer(problem, pool);
  const Tensor gate_up = problem.gate_up.Like(), down = problem.down.Like();
  layer.Unpack(gate_up.view(), down.view(), pool);
  EXPECT_TRUE(gate_up == problem.gate_up);
  EXPECT_TRUE(down == problem.down);
}

INSTANTIATE_TEST_SUITE_P(Machines, OnMachine, testing::Range<std::size_t>(0, Machines().size()),
                         [](const auto& info) { return std::string(Machines()[info.param].name); });

TEST(Shards, EveryTierOnTwoNodes) {
  for (const KernelTier* tier : KernelTiers()) {
    if (!tier->runs_here()) continue;
    SCOPED_TRACE(tier->name);
    ForceIsa(tier->name);
    Pool pool(2, ThreadSource::kOwn, Topology::FromSynthetic("pack:2 [numa] core:1 pu:1"));
    ExpectMatchesReference(Spec(), pool);
  }
  ForceIsa("");
}

TEST(Shards, GradientsThatNobodyWants) {
  Pool pool(2, ThreadSource::kOwn, Topology::FromSynthetic("pack:2 [numa] core:1 pu:1"));
  const Problem problem(Spec());
  const ExpertsLayer layer = MakeLayer(problem, pool);
  const Saved saved(layer, problem);
  RunForward(layer, problem, pool, &saved);
  const Gradients all = RunBackward(layer, problem, pool, saved);
  BackwardArgs args{
      problem.hidden.view(), problem.top_k_weights.view(), problem.lora, &saved.state, problem.d_out.view(), {}, {}, {}};
  layer.Backward(args, pool);  // nothing at all is wanted
  const Tensor d_weights = problem.top_k_weights.Like();
  args.d_weights = d_weights.view();  // they are sums over the shards, and come without the merge of dX
  layer.Backward(args, pool);
  EXPECT_TRUE(d_weights == all.top_k_weights);
  args.d_weights = {};
  const Tensor d_hidden = problem.hidden.Like();
  args.d_hidden = d_hidden.view();
  layer.Backward(args, pool);
  EXPECT_TRUE(d_hidden == all.hidden);
}

TEST(Shards, NoTokens) {
  Pool pool(2, ThreadSource::kOwn, Topology::FromSynthetic("pack:2 [numa] core:1 pu:1"));
  ProblemSpec spec = Spec();
  spec.tokens = 0;
  const Problem problem(spec);
  const ExpertsLayer layer = MakeLayer(problem, pool);
  const Saved saved(layer, problem);
  RunForward(layer, problem, pool, &saved);
  RunBackward(layer, problem, pool, saved);
}

TEST(Shards, ScratchStaysBounded) {
  // A row of Y or dX for each (token, slot, node); all else has the bound that one node has.
  ProblemSpec spec;
  spec.tokens = 6000;
  spec.experts = 8;
  spec.top_k = 4;
  spec.hidden = 96;
  spec.intermediate = 256;
  spec.adapters = {{.gate_up = 64, .down = 64, .peft_strides = true}};
  const Problem problem(spec);
  for (const int threads : {1, 6}) {
    ReleaseWorkspaces();
    Pool pool(threads, ThreadSource::kOwn, Topology::FromSynthetic("pack:4 [numa] core:2 pu:1"));
    const ExpertsLayer layer = MakeLayer(problem, pool);
    const Saved saved(layer, problem);
    RunForward(layer, problem, pool, &saved);
    RunBackward(layer, problem, pool, saved);
    EXPECT_LE(StoredWorkspaceBytes() + ThreadScratchBytes(),
              ScratchBudget(threads) + 4 * spec.tokens * spec.hidden + 4 * 2 * spec.tokens * spec.top_k * spec.hidden);
  }
}

}  // namespace
}  // namespace moesaic::moe
