#include "cpu_kernels/tile_evaluator.h"

#include <gtest/gtest.h>

namespace moesaic {
namespace {

TEST(TileEvaluator, ChunkRowsIsAFunctionOfTheShape) {
  for (const std::int64_t hidden : {1, 100, 2048, 7168, 100'000, 10'000'000}) {
    for (const std::int64_t intermediate : {1, 768, 2048, 14'336, 10'000'000}) {
      for (const std::int64_t all : {1, 31, 33, 128, 385, 1000, 100'000}) {
        const std::int64_t rows = ChunkRows(all, hidden, intermediate);
        EXPECT_GE(rows, 32);
        EXPECT_LE(rows, kMaxChunkRows);
        EXPECT_EQ(rows % 32, 0);
        // It fixes the order of summation: no tuning may touch it.
        const ScopedBlocking forced({1, 1, 1});
        EXPECT_EQ(ChunkRows(all, hidden, intermediate), rows);
      }
    }
  }
}

TEST(TileEvaluator, ChunksAreNearTheUsualOne) {
  // Just more than the usual number of rows are no reason to read the weights twice.
  EXPECT_EQ(ChunkRows(200, 4096, 14'336), 224);
  EXPECT_EQ(ChunkRows(288, 4096, 14'336), 288);
  EXPECT_EQ(ChunkRows(289, 4096, 14'336), 160);
  EXPECT_EQ(ChunkRows(1000, 4096, 14'336), 192);
  // But none has more than the most.
  EXPECT_EQ(ChunkRows(384, 2048, 768), 384);
  EXPECT_EQ(ChunkRows(385, 2048, 768), 224);
  // Where a row's activations are large, chunks are small.
  EXPECT_EQ(ChunkRows(1000, 1 << 20, 1 << 20), 32);
  // A single one has up to half as many again as usual, of several none has more than that, or fewer than two thirds of it.
  for (std::int64_t rows = 193; rows < 3000; ++rows) {
    const std::int64_t chunk = ChunkRows(rows, 7168, 2048);
    EXPECT_LE(chunk, rows <= 288 ? 288 : 192);
    EXPECT_GE(chunk, rows <= 288 ? rows : 128);
  }
}

TEST(TileEvaluator, BlockingIsLegalForAnyCall) {
  for (const std::int64_t jobs : {0, 1, 8, 1000}) {
    for (const std::int64_t hidden : {1, 33, 2048, 7168}) {
      for (const std::int64_t intermediate : {1, 129, 2048}) {
        for (const int threads : {1, 2, 60, 4096}) {
          const Blocking blocking = ChooseBlocking({jobs, 17, hidden, intermediate, threads});
          EXPECT_GE(blocking.intermediate_units_per_task, 1);
          EXPECT_GE(blocking.hidden_columns_per_task, 1);
          EXPECT_GE(blocking.tokens_per_merge, 1);
        }
      }
    }
  }
}

TEST(TileEvaluator, MergesAreTasksForAllThreads) {
  for (const int threads : {1, 2, 16, 4096}) {
    for (const std::int64_t tokens : {0, 1, 15, 16, 128, 4096}) {
      const std::int64_t of_task = TokensPerMerge(tokens, threads);
      EXPECT_GE(of_task, 1);
      EXPECT_LE(of_task, 32);
      EXPECT_TRUE(threads == 1 || of_task == 1 || 4 * threads * (of_task - 1) < tokens);
      EXPECT_EQ(ChooseBlocking({4, 64, 2048, 768, threads, 4, false, tokens}).tokens_per_merge, of_task);
    }
  }
  EXPECT_EQ(TokensPerMerge(128, 16), 2);
  EXPECT_EQ(TokensPerMerge(4096, 16), 32);
}

TEST(TileEvaluator, StepsAreLongerWhereActivationsPassByOnceMore) {
  constexpr std::int64_t kL2 = std::int64_t{2} << 20;
  EXPECT_EQ(StepBlocks(false, 16, 2048, kL2), 4);
  EXPECT_EQ(StepBlocks(false, 128, 7168, kL2), 2);
  EXPECT_EQ(StepBlocks(true, 96, 2048, kL2), 4);
  EXPECT_EQ(StepBlocks(true, 160, 2048, kL2), 8);
  EXPECT_EQ(StepBlocks(true, 384, 512, kL2), 2);
  EXPECT_EQ(StepBlocks(true, 384, 2048, kL2), 5);
  for (const bool matrix_unit : {false, true}) {
    for (std::int64_t rows = 0; rows <= kMaxChunkRows; ++rows) {
      const std::int64_t blocks = StepBlocks(matrix_unit, rows, 7168, kL2);
      EXPECT_GE(blocks, 1);
      EXPECT_TRUE(blocks == 1 || 256 * rows * blocks <= kMostStepBytes);
    }
  }
}

TEST(TileEvaluator, GradientColumnsFitTheirShareOfL2) {
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  EXPECT_EQ(GradientColumns(false, 64, kMiB), 32);
  EXPECT_EQ(GradientColumns(false, 342, kMiB), 23);
  EXPECT_EQ(GradientColumns(true, 64, 2 * kMiB), 16);
  EXPECT_EQ(GradientColumns(true, 342, 2 * kMiB), 11);
  EXPECT_EQ(GradientColumns(false, 384, kMiB / 4), 5);
  EXPECT_EQ(GradientColumns(true, 384, kMiB / 4), 4);
  for (std::int64_t rows = 0; rows <= kMaxChunkRows; ++rows) {
    const std::int64_t columns = GradientColumns(false, rows, 16 * kMiB);
    EXPECT_TRUE(columns == 4 || 64 * rows * columns <= kGradientBytes) << rows;
  }
}

TEST(TileEvaluator, SmallAdaptersAreTasksForAllThreads) {
  EXPECT_EQ(LoraTaskElements(0, 16), 16 * 1024);
  EXPECT_EQ(LoraTaskElements(32 * 16 * 1792, 16), 32 * 16 * 1792 / 48);
  EXPECT_EQ(LoraTaskElements(32 * 16 * 1792, 2), 64 * 1024);
  EXPECT_EQ(LoraTaskElements(128 * 16 * 6400, 16), 64 * 1024);
}

TEST(TileEvaluator, FewJobsAreCutFiner) {
  const auto columns = [](std::int64_t jobs) { return ChooseBlocking({jobs, 128, 4096, 14336, 16}).hidden_columns_per_task; };
  EXPECT_EQ(columns(8), 8);    // 128 / 24 tasks, in superblocks of 8
  EXPECT_EQ(columns(16), 8);   // 128 / 12
  EXPECT_EQ(columns(47), 24);  // 128 / 5
  EXPECT_EQ(columns(48), 128);
}

TEST(TileEvaluator, LongJobsAreCutFiner) {
  EXPECT_EQ(PartsOfLongJob(50, 1600, 16), 1);  // half of what a thread has
  EXPECT_EQ(PartsOfLongJob(51, 1600, 16), 2);
  EXPECT_EQ(PartsOfLongJob(1600, 1600, 16), 32);
  EXPECT_EQ(PartsOfLongJob(1600, 1600, 1), 1);
  EXPECT_EQ(PartsOfLongJob(0, 0, 16), 1);
  EXPECT_EQ(UnitsOfPart(112, 5), 22);
  EXPECT_EQ(UnitsOfPart(1, 32), 1);      // there is one
  EXPECT_EQ(ColumnsOfPart(128, 3), 40);  // in superblocks of 8
  EXPECT_EQ(ColumnsOfPart(128, 4), 32);
  EXPECT_EQ(ColumnsOfPart(128, 1000), 8);
  EXPECT_EQ(ColumnsOfPart(4, 2), 4);    // all
  EXPECT_EQ(ColumnsOfPart(90, 1), 90);  // all
}

TEST(TileEvaluator, LongContractionsAreCutSoThatASliceStaysInCache) {
  constexpr std::int64_t kL2 = 2 << 20;
  EXPECT_EQ(UnpackSlice(false, 64, 16, kL2), 0);  // 1 MB: half of it
  for (const std::int64_t panels : {2, 9, 24, 100, 1000}) {
    const std::int64_t slice = UnpackSlice(false, 2000, panels, kL2);
    EXPECT_GE(slice, 8);
    EXPECT_EQ(slice % 8, 0);  // superblocks
    EXPECT_TRUE(slice == 8 || slice * panels * 1024 <= kL2 / 4);
    EXPECT_EQ(UnpackSlice(true, 2000, panels, kL2), panels > 2 ? 8 : 0);  // right factors in L1
  }
}

TEST(TileEvaluator, ScopedBlockingEndsWithItsScope) {
  const BlockingQuery query{4, 64, 2048, 768, 2};
  const std::int64_t before = ChooseBlocking(query).tokens_per_merge;
  {
    const ScopedBlocking forced({3, 5, 77});
    EXPECT_EQ(ChooseBlocking(query).tokens_per_merge, 77);
  }
  EXPECT_EQ(ChooseBlocking(query).tokens_per_merge, before);
}

TEST(TileEvaluator, L2IsKnown) { EXPECT_GE(HostL2Bytes(), 64 << 10); }

}  // namespace
}  // namespace moesaic
