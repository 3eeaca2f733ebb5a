// Scratch memory of a call: bounded for every shape, number of threads and order of calls, and one for all callers.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "cpu_kernels/gemm/tiles.h"
#include "cpu_kernels/tensor_access.h"
#include "moe/workspace.h"
#include "tests/moe/problem.h"

namespace moesaic::moe {
namespace {

using threadpool::Pool;

std::int64_t Held() { return StoredWorkspaceBytes() + ThreadScratchBytes(); }

/// Beyond outputs, gradients and saved tensors: 64 MiB + 8 MiB a thread + 4 T H + 2 T k H bytes, H rounded up to a tile.
std::int64_t Bound(const ProblemSpec& spec, int threads) {
  const std::int64_t hidden = RoundUp(spec.hidden, kTileColumns);
  return ScratchBudget(threads) + 4 * spec.tokens * hidden + 2 * spec.tokens * spec.top_k * hidden;
}

/// What calls with adapters in place hold besides: 2 T k H + 8 T k I.
std::int64_t InPlaceBytes(const ProblemSpec& spec) {
  const std::int64_t slots = spec.tokens * spec.top_k;
  return 2 * slots * (RoundUp(spec.hidden, kTileColumns) + kTileColumns) + 8 * slots * RoundUp(spec.intermediate, kTileColumns);
}

/// The same values, the columns of a row far apart.
Tensor ColumnMajor(const Tensor& source) {
  const TensorView& view = source.view();
  Tensor result(view.dtype, {view.shape[0], view.shape[1]}, {1, view.shape[0]});
  for (std::int64_t i = 0; i < view.shape[0]; ++i) {
    for (std::int64_t j = 0; j < view.shape[1]; ++j) StoreFloat(result.view(), i, j, 0, LoadFloat(view, i, j));
  }
  return result;
}

void Train(const ExpertsLayer& layer, const Problem& problem, Pool& pool) {
  const Saved saved(layer, problem);
  RunForward(layer, problem, pool, &saved);
  RunBackward(layer, problem, pool, saved);
}

/// @param others  scratch of threads that take no part
void ExpectBounded(const ProblemSpec& spec, int threads, std::int64_t others = 0) {
  SCOPED_TRACE(testing::Message() << Describe(spec) << ", " << threads << " threads");
  ReleaseWorkspaces();
  const Problem problem(spec);
  Pool pool(threads);
  const ExpertsLayer layer(problem.config(), problem.gate_up.view(), problem.down.view(), pool);
  Train(layer, problem, pool);
  EXPECT_GT(StoredWorkspaceBytes(), 0);
  EXPECT_LE(Held() - others, Bound(spec, threads));
}

TEST(Scratch, ManyThreadsOnAWideLayer) {
  // Unpacked panels grow with I, and every thread has its own.
  ProblemSpec spec;
  spec.tokens = 600;
  spec.experts = 2;
  spec.hidden = 32;
  spec.intermediate = 24000;
  spec.adapters = {{.gate_up = 8, .down = 8}};
  for (const int threads : {1, 13, 40}) ExpectBounded(spec, threads);
}

ProblemSpec LargeRanks(std::int64_t tokens) {
  ProblemSpec spec;
  spec.tokens = tokens;
  spec.experts = 48;
  spec.hidden = 192;
  spec.intermediate = 128;
  spec.adapters = {{.gate_up = 256, .down = 256, .peft_strides = true}, {.gate = 256, .up = 256, .down = 256}};
  return spec;
}

TEST(Scratch, LargeRanks) {
  for (const int threads : {1, 40}) ExpectBounded(LargeRanks(12000), threads);
}

TEST(Scratch, PlacesOfAdaptersAreTakenAgain) {
  // Fewer groups of experts fit the memory of 1 and of 40 threads than there are.
  const Problem problem(LargeRanks(500));
  Pool one(1), many(40);
  const ExpertsLayer layer(problem.config(), problem.gate_up.view(), problem.down.view(), one);
  const Saved saved(layer, problem), again(layer, problem);
  EXPECT_TRUE(RunForward(layer, problem, one, &saved) == RunForward(layer, problem, many, &again));
  EXPECT_TRUE(Equal(RunBackward(layer, problem, one, saved), RunBackward(layer, problem, many, again)));
}

TEST(Scratch, AdaptersInPlace) {
  // Of rank 128 the rank-wide intermediates of 40 slots and more would take over 32 MiB: those are packed.
  for (const std::int64_t rank : {16, 128}) {
    for (const std::int64_t tokens : {8, 40, 120}) {
      ProblemSpec spec;
      spec.tokens = tokens;
      spec.experts = 128;
      spec.top_k = 8;
      spec.hidden = 256;
      spec.intermediate = 96;
      spec.adapters = {{.gate_up = rank, .down = rank, .peft_strides = true}};
      SCOPED_TRACE(testing::Message() << Describe(spec));
      ReleaseWorkspaces();
      const Problem problem(spec);
      Pool pool(1);
      const ExpertsLayer layer(problem.config(), problem.gate_up.view(), problem.down.view(), pool);
      Train(layer, problem, pool);
      EXPECT_LE(Held(), Bound(spec, 1) + InPlaceBytes(spec));
    }
  }
}

TEST(Scratch, AdaptersOfOneExpertThatFillIt) {
  // Packed, with its gradients' sums, one expert's adapters take 60 MiB of the 72 MiB that one thread has.
  ProblemSpec spec;
  spec.tokens = 400;
  spec.hidden = 7168;
  spec.intermediate = 2048;
  spec.adapters = {{.gate_up = 256, .down = 256}, {.gate_up = 256, .down = 256}};
  // By a thread of its own, for this one may keep scratch of a wider layer, and nothing is left to make up for it.
  const std::int64_t others = ThreadScratchBytes();
  std::thread([&] { ExpectBounded(spec, 1, others); }).join();
}

TEST(Scratch, ManyTokens) {
  ProblemSpec spec;
  spec.tokens = 30000;
  spec.experts = 16;
  spec.top_k = 4;
  spec.hidden = 96;
  spec.intermediate = 64;
  spec.adapters = {{.gate_up = 4, .down = 4}};
  ExpectBounded(spec, 2);
}

TEST(Scratch, CopiesOfStridedRows) {
  ProblemSpec spec;
  spec.tokens = 20000;
  spec.experts = 4;
  spec.hidden = 512;
  spec.intermediate = 32;
  ReleaseWorkspaces();
  const Problem problem(spec);
  Pool pool(2);
  const ExpertsLayer layer(problem.config(), problem.gate_up.view(), problem.down.view(), pool);
  const Tensor hidden = ColumnMajor(problem.hidden), d_out = ColumnMajor(problem.d_out), out = problem.hidden.Like();
  const Saved saved(layer, problem);
  layer.Forward({hidden.view(), problem.ids.view(), problem.top_k_weights.view(), {}, out.view(), &saved.state}, pool);
  EXPECT_GE(StoredWorkspaceBytes(), 2 * spec.tokens * spec.hidden) << "no copy was made";
  EXPECT_LE(Held(), Bound(spec, 2));
  const Tensor d_hidden = hidden.Like();
  layer.Backward({hidden.view(), problem.top_k_weights.view(), {}, &saved.state, d_out.view(), d_hidden.view(), {}, {}}, pool);
  EXPECT_GE(StoredWorkspaceBytes(), 4 * spec.tokens * spec.hidden) << "no copies were made";
  EXPECT_LE(Held(), Bound(spec, 2));
}

TEST(Scratch, CallsOfDifferentShapesInTurn) {
  // What one call leaves may not add to what the next one needs.
  ProblemSpec jobs;
  jobs.tokens = 1500;
  jobs.experts = 4;
  jobs.top_k = 2;
  jobs.hidden = 1024;
  jobs.intermediate = 512;
  ProblemSpec adapters;
  adapters.tokens = 40;
  adapters.hidden = 6656;
  adapters.intermediate = 2048;
  adapters.adapters = {{.gate_up = 256, .down = 256}, {.gate_up = 256, .down = 256}};
  const Problem first(jobs), second(adapters);
  Pool pool(1);
  ReleaseWorkspaces();
  const ExpertsLayer first_layer(first.config(), first.gate_up.view(), first.down.view(), pool);
  const ExpertsLayer second_layer(second.config(), second.gate_up.view(), second.down.view(), pool);
  for (int round = 0; round < 2; ++round) {
    Train(first_layer, first, pool);
    EXPECT_LE(Held(), Bound(jobs, 1));
    Train(second_layer, second, pool);
    EXPECT_LE(Held(), Bound(jobs, 1)) << "rows of the larger of both calls";
  }
}

TEST(Scratch, CallersTakeTurns) {
  ProblemSpec spec;
  spec.tokens = 500;
  spec.experts = 4;
  spec.hidden = 256;
  spec.intermediate = 128;
  const Problem problem(spec);
  Pool pool(2);
  const ExpertsLayer layer(problem.config(), problem.gate_up.view(), problem.down.view(), pool);
  ReleaseWorkspaces();
  Train(layer, problem, pool);
  const std::int64_t of_one = StoredWorkspaceBytes();
  std::vector<std::thread> callers;
  for (int i = 0; i < 6; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 20; ++round) Train(layer, problem, pool);
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(StoredWorkspaceBytes(), of_one);
}

TEST(Scratch, EndedThreadsHoldNone) {
  const std::int64_t before = ThreadScratchBytes();
  std::thread([&] {
    ThreadScratch(1 << 20);
    EXPECT_EQ(ThreadScratchBytes(), before + (1 << 20));
    ThreadScratch(1 << 10);
    EXPECT_EQ(ThreadScratchBytes(), before + (1 << 20));
  }).join();
  EXPECT_EQ(ThreadScratchBytes(), before);
}

}  // namespace
}  // namespace moesaic::moe
